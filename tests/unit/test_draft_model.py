"""Draft models of third parties: the map from rows of the output matrix to tokens, and how the config names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from checkpoints import rewrite, set_fields
from draft_models import CHOSEN, DraftModelToWrite
from mtp_inference.opening import head_plan
from mtp_train import inspect
from mtp_train.errors import CheckpointError, UnsupportedModelError
from tiny import VOCAB_SIZE

Tensors = dict[str, Tensor]


DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "out of range": (
        lambda all: all["d2t"].add_(60),
        f"d2t maps rows to tokens 60 to 126; expected tokens below {VOCAB_SIZE}",
    ),
    "below 0": (lambda all: all["d2t"].sub_(1), "d2t maps rows to tokens -1 to"),
    "ids beyond": (lambda all: all.update(d2t=CHOSEN.long()), "d2t maps rows to tokens 0 to 74"),
    "too short": (
        lambda all: all.update(d2t=all["d2t"][:5].clone()),
        r"d2t is I64 \[5\]; expected one integer for .* 9",
    ),
    "floats": (lambda all: all.update(d2t=all["d2t"].float()), r"d2t is F32 \[9\]; expected one integer"),
    "missing": (lambda all: all.pop("d2t"), "no d2t for 9 of 67 tokens; expected an offset for each row"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_map_of_tokens_is_named_by_every_reader(damage: str, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    change, message = DAMAGES[damage]
    rewrite(written.out, change)
    with pytest.raises(CheckpointError, match=message):
        head_plan(written.source, str(written.out))
    for base in (None, written.source.path):
        found = inspect(written.out, base)
        assert found.status == "damaged"
        assert found.runs_here == f"no: {found.problems[0]}"
        assert found.cure is not None


@pytest.mark.parametrize("vocab", [None, CHOSEN])
def test_a_sound_map_is_read(vocab: Tensor | None, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", vocab)
    written.write()
    output = head_plan(written.source, str(written.out)).output
    assert output is not None
    assert (output.token_ids_R is None) is (vocab is None)
    assert vocab is None or output.token_ids_R is None or output.token_ids_R.tolist() == vocab.tolist()
    assert inspect(written.out, written.source.path).status == "healthy"


def test_an_eagle3_draft_that_declares_the_class_of_its_trunk_is_one(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    set_fields(written.out, {"architectures": ["LlamaForCausalLM"]})
    assert inspect(written.out).family == "eagle3"
    assert head_plan(written.source, str(written.out)).family.kind == "eagle3"


def test_an_eagle_draft_that_declares_the_class_of_its_trunk_is_named(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle")
    written.write()
    set_fields(written.out, {"architectures": ["LlamaForCausalLM"]})
    for read in (lambda: inspect(written.out), lambda: head_plan(written.source, str(written.out))):
        with pytest.raises(CheckpointError, match=r"tensors of an EAGLE draft model, while config\.json declares"):
            read()


def test_a_form_that_is_not_supported_is_named_by_every_reader(tmp_path: Path) -> None:
    """EAGLE-3.1 feeds the normed state back."""
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    set_fields(written.out, {"norm_output": True})
    reason = "norm_output = True, a form of EAGLE-3 draft model that we do not support; expected False"
    for base in (None, written.source.path):
        assert inspect(written.out, base).runs_here == f"no: {reason}"
    with pytest.raises(UnsupportedModelError, match=reason):
        head_plan(written.source, str(written.out))
