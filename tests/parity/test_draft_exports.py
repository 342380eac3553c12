"""A head of another kind, drafted with by hand from what was exported alone, against our decoder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_draft_kinds import ByHand
from torch import Tensor

from draft_models import CHOSEN, DraftModelToWrite
from mtp_train.checkpoints.files import SINGLE_FILE
from scripted import spied_drafts


class FromExport(ByHand):
    """EAGLE-3's forward with nothing but the exported tensors; the embedding and the states are the trunk's."""

    def __init__(self, written: DraftModelToWrite, layer: str) -> None:
        super().__init__(written.trunk, written.head)
        found = load_file(written.out / SINGLE_FILE)
        self.weights = {key.replace(layer, "midlayer."): value for key, value in found.items()}

    def choice(self, state_D: Tensor) -> int:
        row = int(self.times("lm_head", state_D).argmax())
        return row + int(self.weights["d2t"][row])

    def drafts(self, rounds: list[tuple[list[int], list[int]]], **wrongly: int) -> list[list[int]]:
        return [
            [self.choice(state_D) for state_D in self.eagle3(tokens, len(drafts), **wrongly)]
            for tokens, drafts in rounds
        ]


@pytest.mark.parametrize(("form", "layer"), [("engines", "midlayer."), ("speculators", "layers.0.")])
@torch.inference_mode()
def test_what_the_export_drafts_by_hand_is_what_we_draft(form: str, layer: str, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write(form=form)
    by_hand = FromExport(written, layer)
    found = spied_drafts(written.trunk, written.head, [3, 0, 2, 4, 3], CHOSEN.long())
    rounds = [row for rows in found for row in rows]
    ours = [drafts for _, drafts in rounds]
    assert by_hand.drafts(rounds) == ours
    assert len({token for drafts in ours for token in drafts}) > 2
    # Neither states of other layers nor tokens in the place of offsets would go unseen.
    assert by_hand.drafts(rounds, later=1) != ours
    by_hand.weights["d2t"] = CHOSEN.long()
    with pytest.raises(IndexError):
        by_hand.drafts(rounds)
