"""Our side of a comparison: a checkpoint, its head with an engine's wiring, and our decoder with recorded drafts.

Shapes: R rows that start together, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engines.traces import Round, Text
from mtp_inference import Request, SpeculativeDecoder
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_train.checkpoints.artifact import load_artifact
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.heads.build import build_head, graft_artifact_plan, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.heads.head import Head
from mtp_train.trunk.load import Trunk, load_trunk


@dataclass(frozen=True)
class Subject:
    """A trunk and its head, in the same dtype."""

    trunk: Trunk
    head: Head
    draft_vocab_R: Tensor | None = None
    """Token ids of the draft vocabulary, int64; None for all tokens."""


def load_subject(
    checkpoint: Checkpoint, convention: str, dtype: torch.dtype, head: Path | None = None, draft: Path | None = None
) -> Subject:
    """Load a checkpoint with its own head, with a head directory, or with a draft model alone, on the CPU.

    Args:
        checkpoint: The checkpoint of the trunk.
        convention: The convention of an engine's wiring.
        dtype: Dtype of trunk and head.
        head: A head directory; None for the draft model, or else the checkpoint's own head.
        draft: A draft model.

    Raises:
        MtpError: There is no head, or the family has no such convention.
    """
    found = None if head is not None or draft is None else draft_model(open_checkpoint(draft))
    if found is not None:
        plan = draft_plan(found, checkpoint)
    elif head is None:
        plan = graft_plan(checkpoint, checkpoint, convention)
    else:
        artifact = load_artifact(head)
        plan = graft_artifact_plan(checkpoint, artifact, head, artifact.convention)
        plan = replace(plan, convention=convention)
    trunk = load_trunk(checkpoint.path, checkpoint.family, dtype=dtype)
    built = build_head(plan, text_config_of(checkpoint), dtype=dtype).eval()
    return Subject(trunk, built, None if plan.draft_vocab is None else plan.draft_vocab.long())


def with_state_before_norm(trunk: Trunk) -> Trunk:
    """Return a trunk that also keeps the hidden state before the final norm, for any family."""
    family = trunk.family
    if family.reads_before_norm:
        return trunk
    default = replace(family.wiring.default, hidden="before_final_norm")
    return Trunk(trunk.model, replace(family, wiring=replace(family.wiring, default=default))).eval()


class _Recorder(Drafter):
    """Wrap a drafter and record its drafts.

    Args:
        drafter: The wrapped drafter.
        drafted: The list that gets one tuple of drafts per round.
        leading_row: Whether to add a first row to every text: its first token with a hidden state of zeros.
    """

    def __init__(self, drafter: Drafter, drafted: list[tuple[int, ...]], leading_row: bool) -> None:
        self._drafter = drafter
        self._drafted = drafted
        self._leading_row = leading_row

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        if self._leading_row:
            # A row pairs a hidden state with the token after it: the added row pairs zeros with the first token. All
            # rows move by one position, which does not change rotary attention.
            hidden_RTD = torch.cat([torch.zeros_like(hidden_RTD[:, :1]), hidden_RTD], dim=1)
            prompt_RT = torch.cat([prompt_RT[:, :1], prompt_RT], dim=1)
        self._drafter.start(rows, hidden_RTD, prompt_RT, first_R)

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        self._drafter.observe(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        drafts = self._drafter.draft(plan, choice)
        if plan.depth:
            self._drafted.append(tuple(drafts.tokens_BK[0].tolist()))
        return drafts


class RecordedDrafting(Drafting):
    """Draft with a head, one text at a time, and record the drafts of every round in ``drafted``."""

    def __init__(self, subject: Subject, *, leading_row: bool) -> None:
        self._drafting: Drafting = subject.head.family.kind.draft_with(subject.head, subject.draft_vocab_R)
        self._leading_row = leading_row
        self.drafted: list[tuple[int, ...]] = []

    def check(self, trunk: Trunk, depth: int) -> None:
        self._drafting.check(trunk, depth)

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        roomier = size._replace(capacity=size.capacity + 1)
        return _Recorder(self._drafting.make(trunk, roomier, cache), self.drafted, self._leading_row)


def decode(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    leading_row: bool,
) -> list[Text]:
    """Decode each prompt by itself, greedily, and return all of its rounds.

    Args:
        subject: The trunk and head.
        prompts: Token ids of the prompts.
        depth: Drafts per round.
        max_new_tokens: Limit of each text.
        eos_ids: Tokens that end a text.
        leading_row: Whether the head reads an extra first row: the first token with a hidden state of zeros.
    """
    drafting = RecordedDrafting(subject, leading_row=leading_row)
    decoder = SpeculativeDecoder(subject.trunk, drafting, depth, eos_ids, max_batch=1)
    texts = []
    for prompt_ids in prompts:
        drafting.drafted.clear()
        request = Request(prompt_ids=prompt_ids, max_new_tokens=max_new_tokens)
        committed = [chunk.token_ids for chunk in decoder.stream([request])]
        drafts = [(), *drafting.drafted]
        texts.append(Text(tuple(prompt_ids), tuple(map(Round, drafts, committed))))
    return texts
