"""External drafters: checkpoints of their own that stand in the place of a head."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from mtp_inference import AssistantDrafting
from mtp_train.errors import UnsupportedModelError
from mtp_train.families import Assistant, Family, assistant_for
from mtp_train.heads.assistant import load_assistant
from mtp_train.inputs import is_head_directory, open_location
from mtp_train.weights.files import Checkpoint


@dataclass(frozen=True)
class ExternalDrafter:
    """A drafter that is a checkpoint of its own."""

    checkpoint: Checkpoint
    assistant: Assistant

    @property
    def title(self) -> str:
        """What it is, for messages."""
        return self.assistant.title

    def trunk_family(self, trunk: Checkpoint) -> Family:
        """Return the record to load a trunk by, which no family of heads claims.

        Raises:
            UnsupportedModelError: The drafter is made for trunks of another kind.
        """
        family, found = self.assistant.trunk, trunk.text_config.get("model_type")
        if found not in family.model_types:
            raise UnsupportedModelError(
                f"{self.checkpoint.path}: a {self.title}, given for {trunk.path}, of model_type '{found}'; "
                f"expected {family.title} ({', '.join(family.model_types)}). Use the trunk that it was made for."
            )
        return family

    def drafting(self, *, dtype: torch.dtype, device: torch.device) -> AssistantDrafting:
        """Load it.

        Raises:
            CheckpointError: Weights are missing or do not fit, or transformers refuses the config.
        """
        model = load_assistant(self.checkpoint, self.assistant, dtype=dtype, device=device)
        return AssistantDrafting(model, self.assistant)


def external_drafter(head: str | None) -> ExternalDrafter | None:
    """Open what is named as a head, None where it is one.

    Raises:
        CheckpointError: It is no checkpoint.
    """
    if head is None or is_head_directory(Path(head)):
        return None
    checkpoint = open_location(head)
    assistant = assistant_for(checkpoint.config)
    return None if assistant is None else ExternalDrafter(checkpoint, assistant)
