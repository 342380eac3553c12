"""Our side: the checkpoint, its head as an engine wires it, and our decoder with its drafts written down.

Shapes: R rows that start together, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from engines.traces import Round, Text
from mtp_inference import HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.chooser import Chooser, Drafts
from mtp_inference.draft import Drafter, Place, Size
from mtp_train.heads.attach import build_head, native_plan, stored_head_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk, load_trunk
from mtp_train.weights.files import Checkpoint


@dataclass(frozen=True)
class Subject:
    """A trunk and its head, both in one dtype."""

    trunk: Trunk
    head: MtpHead
    draft_vocab_R: Tensor | None = None
    """int64, the tokens that the head may draft; None for all."""


def load_subject(checkpoint: Checkpoint, convention: str, dtype: torch.dtype, head: Path | None = None) -> Subject:
    """Load a checkpoint with the head that it holds, or with another one, on the CPU.

    Args:
        checkpoint: The trunk.
        convention: How an engine wires the head.
        dtype: Of both.
        head: A head directory; None for the checkpoint's own head.

    Raises:
        MtpError: There is no head, or the family knows no such convention.
    """
    if head is None:
        plan = native_plan(checkpoint, convention)
    else:
        plan = replace(stored_head_plan(head, checkpoint.family), convention=convention)
    trunk = load_trunk(checkpoint.path, checkpoint.family, dtype=dtype)
    built = build_head(plan, text_config_of(checkpoint), dtype=dtype).eval()
    return Subject(trunk, built, None if plan.draft_vocab is None else plan.draft_vocab.long())


def with_state_before_norm(trunk: Trunk) -> Trunk:
    """Return a trunk that keeps its state before its final norm too, also of a family of whose heads none reads it."""
    family = trunk.family
    if family.reads_before_norm:
        return trunk
    return Trunk(trunk.model, replace(family, default=replace(family.default, hidden="before_final_norm"))).eval()


class _Recorder:
    """A drafter that keeps what another one drafts.

    Args:
        drafter: The one that drafts.
        drafted: Where its drafts go, a list per round.
        leading_row: Whether to begin every text with a row of its first token and a hidden state of zeros.
    """

    def __init__(self, drafter: Drafter, drafted: list[tuple[int, ...]], leading_row: bool) -> None:
        self._drafter = drafter
        self._drafted = drafted
        self._leading_row = leading_row

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        """See :class:`Drafter`."""
        if self._leading_row:
            # A row pairs a state with the token after it: the new first row pairs zeros with the first token. All rows
            # stand one position later than ours do, which rotary attention does not see.
            hidden_RTD = torch.cat([torch.zeros_like(hidden_RTD[:, :1]), hidden_RTD], dim=1)
            prompt_RT = torch.cat([prompt_RT[:, :1], prompt_RT], dim=1)
        self._drafter.start(rows, hidden_RTD, prompt_RT, first_R)

    def extend(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        """See :class:`Drafter`."""
        self._drafter.extend(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, depth: int, place: Place, chooser: Chooser) -> Drafts:
        """See :class:`Drafter`."""
        drafts = self._drafter.draft(depth, place, chooser)
        self._drafted.append(tuple(drafts.tokens_BK[0].tolist()))
        return drafts

    def settle(self, place: Place) -> None:
        """See :class:`Drafter`."""
        self._drafter.settle(place)


class RecordedDrafting:
    """Draft with a head, one text at a time, and keep the drafts of every round in ``drafted``."""

    def __init__(self, subject: Subject, *, leading_row: bool) -> None:
        self._drafting = HeadDrafting(subject.head, subject.draft_vocab_R)
        self._leading_row = leading_row
        self.drafted: list[tuple[int, ...]] = []

    def check(self, trunk: Trunk, depth: int) -> None:
        """See :class:`DrafterMaker`."""
        self._drafting.check(trunk, depth)

    def make(self, trunk: Trunk, size: Size, depth: int) -> Drafter:
        """See :class:`DrafterMaker`."""
        roomier = size._replace(capacity=size.capacity + 1)
        return _Recorder(self._drafting.make(trunk, roomier, depth), self.drafted, self._leading_row)


def decode(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    depth: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
    leading_row: bool,
) -> list[Text]:
    """Decode each prompt by itself, greedily, and return every round of it.

    Args:
        subject: What decodes.
        prompts: Their tokens.
        depth: Drafts per round.
        max_new_tokens: Limit of each text.
        eos_ids: Tokens that end a text.
        leading_row: Whether the head reads one more row, of the first token and a hidden state of zeros, before all.
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
