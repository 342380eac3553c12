"""A tiny trunk with a head of another kind, in memory and on disk, to be written as a draft model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import save_stripped
from json_files import read_json
from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.draft_checkpoint import write_draft_checkpoint
from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint
from mtp_train.heads.build import fresh_plan, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from tiny import draft_head, tiny_trunk

NUM_LAYERS, NUM_DEPTHS = 9, 3
CHOSEN = torch.tensor([0, 3, 4, 9, 20, 33, 34, 50, 66], dtype=torch.int32)


class DraftModelToWrite:
    """All that a draft model is written from, and where it goes; ``vocab`` are the tokens that it may draft."""

    def __init__(
        self,
        directory: Path,
        kind: str,
        vocab: Tensor | None = None,
        *,
        tied: bool = False,
        num_layers: int = NUM_LAYERS,
    ) -> None:
        self.trunk: Trunk = tiny_trunk("llama", tied=tied, num_layers=num_layers)
        modules = NUM_DEPTHS if kind == "medusa" else 1
        self.head: MtpHead = draft_head(self.trunk, kind, num_modules=modules)
        self.source: Checkpoint = open_checkpoint(save_stripped(self.trunk, directory / "trunk"))
        plan = fresh_plan(self.source, text_config_of(self.source), "auto", seed=0, kind=kind, num_modules=modules)
        self.artifact = Artifact(
            layout=plan.layout,
            num_modules=modules,
            num_depths=NUM_DEPTHS,
            convention="auto",
            head=trained_head(plan, self.head.state_dict()),
            notes={},
            draft_vocab=vocab,
        )
        self.out = directory / "draft"

    def write(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Write it; return its tensors and its config."""
        write_draft_checkpoint(self.source, self.artifact, self.head.config, self.out)
        return load_file(self.out / SINGLE_FILE), read_json(self.out / "config.json")
