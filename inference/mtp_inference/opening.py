"""Open a checkpoint and a drafter for it: check the files first, then load the weights.

A drafter is named by a string: ``own`` (the checkpoint's own MTP head), a head directory, a checkpoint that contains a
head, a draft model with an EAGLE or Medusa head, an assistant model, a block drafter, or ``ngram`` (prompt lookup).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from mtp_inference.cache.recurrent import most_undecided
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.requests import MAX_DEPTH
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import Checkpoint
from mtp_train.checkpoints.locations import head_directory, is_head_directory, locate_adapter, open_location
from mtp_train.checkpoints.tokenizer import chat_prompt_tokens, raw_tokens
from mtp_train.errors import CheckpointError, DataError
from mtp_train.heads.build import HeadPlan, deepest, drafting_of, graft_artifact_plan, graft_plan
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.precision import trunk_dtype
from mtp_train.trunk.quantise import Quantization, require_bitsandbytes, require_quantizable

OWN, NGRAM = "own", "ngram"
"""Drafters that are not named by location: the own head, and prompt lookup."""
IMAGE_FIELDS = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id")
"""Config fields of vision-language models that declare a placeholder token for an image or a video."""


def head_plan(checkpoint: Checkpoint, head: str) -> HeadPlan:
    if head == OWN:
        checkpoint.family.require_layer()
        found = diagnose_head(checkpoint)
        if not found.complete:
            raise CheckpointError(
                f"{checkpoint.path}: {found.describe()}; expected a head to draft with. Name one, --head BASE, or "
                "--head ngram, which needs none; generate decodes without drafts by --mtp off."
            )
        return graft_plan(checkpoint, checkpoint, "auto")
    if is_head_directory(Path(head)):
        artifact = load_artifact(Path(head))
        return graft_artifact_plan(checkpoint, artifact, Path(head), artifact.convention)
    donor = open_location(head)
    draft = draft_model(donor)
    return graft_plan(checkpoint, donor, "auto") if draft is None else draft_plan(draft, checkpoint)


@dataclass(frozen=True)
class OpenModel:
    """A trunk and its drafter whose files were opened and checked; no weight is loaded yet."""

    checkpoint: Checkpoint
    adapter: Path | None
    """A peft adapter to apply to the trunk, unmerged."""
    quantization: Quantization | None
    """Format that the trunk's linear layers are packed in while loading."""
    head: str | None
    """Name of the drafter; None for plain decoding."""
    plan: HeadPlan | None
    """Set if the drafter is a head."""

    @property
    def most_drafts(self) -> int:
        """Largest number of drafts per round of this kind of drafter."""
        return MAX_DEPTH if self.plan is None else self.plan.kind.deepest

    @property
    def deepest(self) -> int:
        """Largest number of drafts per round of this very head on this trunk.

        A head that chains its modules has one module for each depth, and recurrent layers undo few tokens.
        """
        of_head = None if self.plan is None else deepest(self.plan)
        of_trunk = most_undecided(self.checkpoint.family)
        limits = [self.most_drafts, of_head, None if of_trunk is None else of_trunk - 1]
        return min(most for most in limits if most is not None)

    @property
    def image_ids(self) -> frozenset[int]:
        """Token ids that stand for an image or a video in a prompt."""
        config = self.checkpoint.config
        return frozenset(int(config[name]) for name in IMAGE_FIELDS if name in config)

    def load_trunk(self, device: torch.device, dtype: torch.dtype | None = None) -> Trunk:
        """Load the trunk; without a dtype in the stored one, on a CPU in fp32 if that fits in memory."""
        return load_trunk(
            self.checkpoint,
            dtype=dtype or trunk_dtype(self.checkpoint, device),
            device=device,
            adapter=self.adapter,
            quantization=self.quantization,
        )

    def load_drafting(self, trunk: Trunk) -> Drafting | None:
        """Load the drafter in the trunk's dtype and on its device; None for plain decoding."""
        if self.plan is not None:
            return drafting_of(self.plan, self.checkpoint, trunk.lm_head_VD)
        return NgramDrafting() if self.head == NGRAM else None


def open_model(
    location: str,
    head: str | None,
    *,
    adapter: str | None = None,
    quantization: Quantization | None = None,
    where: str = "head",
) -> OpenModel:
    """Open the files of a trunk and its drafter, and check that they fit each other.

    ``where`` begins error messages about quantization; the other arguments are fields of :class:`OpenModel`.

    Raises:
        MtpError: A file is missing or damaged, or does not fit the trunk.
    """
    checkpoint = open_location(location)
    if quantization is not None:
        require_quantizable(quantization, checkpoint)
        require_bitsandbytes(quantization, where)
    adapter_path = locate_adapter(adapter, location) if adapter else None
    stored = head_directory(head) if head is not None else None
    head = head if stored is None else str(stored)
    plan = None if head in (None, NGRAM) else head_plan(checkpoint, str(head))
    return OpenModel(checkpoint, adapter_path, quantization, head, plan)


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompt: str, *, chat: bool, where: str) -> list[int]:
    """Return the token ids of a text; with ``chat``, of the chat template with the text as the user's message.

    Raises:
        DataError: The prompt has no token, or there is no chat template that accepts it.
    """
    if chat:
        return chat_prompt_tokens(tokenizer, [{"role": "user", "content": prompt}], where)
    prompt_ids = raw_tokens(tokenizer, prompt)
    if not prompt_ids:
        raise DataError(f"{where}: no token; expected some text. Write a prompt.")
    return prompt_ids


def refuse_images(prompt_ids: Iterable[int], image_ids: frozenset[int], where: str) -> None:
    """Raise a DataError if a prompt contains a placeholder of an image: the vision tower is not loaded."""
    found = image_ids.intersection(prompt_ids)
    if found:
        raise DataError(
            f"{where}: holds image or video token {min(found)}; expected text, as only the language model of a "
            "vision-language checkpoint is decoded here. Take the image out, or use an engine."
        )
