"""Our side of a comparison: a checkpoint, its head with an engine's wiring, and our decoder with recorded drafts.

Shapes: R rows that start together, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.traces import Round, Text, cut
from mtp_inference import Request, SpeculativeDecoder
from mtp_inference.drafters.drafter import BatchSize
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.draft_model import draft_model, draft_plan
from mtp_train.heads.head import Head
from mtp_train.trunk.load import Trunk, load_trunk


@dataclass(frozen=True)
class Subject:
    """A trunk and its head, in the same dtype."""

    trunk: Trunk
    head: Head


def load_subject(checkpoint: Checkpoint, convention: str, dtype: torch.dtype, draft: Path | None = None) -> Subject:
    """Load a checkpoint with its own head, or with a draft model, on the CPU.

    Args:
        checkpoint: The checkpoint of the trunk.
        convention: The convention of an engine's wiring of an own head; draft models are wired alike by all engines.
        dtype: Dtype of trunk and head.
        draft: A draft model.

    Raises:
        MtpError: There is no head, or the family has no such convention.
    """
    found = None if draft is None else draft_model(open_checkpoint(draft))
    plan = graft_plan(checkpoint, checkpoint, convention) if found is None else draft_plan(found, checkpoint)
    trunk = load_trunk(checkpoint, dtype=dtype)
    return Subject(trunk, build_head(plan, text_config_of(checkpoint), dtype=dtype).eval())


def make_with_leading_row(make: Callable[..., Any], trunk: Trunk, size: BatchSize, cache: Any) -> Any:
    """Return the drafter of a batch, with an extra first row in each text."""
    drafter = make(trunk, size._replace(capacity=size.capacity + 1), cache)
    drafter.start = partial(start_with_leading_row, drafter.start)
    return drafter


def start_with_leading_row(
    start: Callable[..., None], rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor
) -> None:
    """Start texts with an extra first row: their first token with a hidden state of zeros."""
    # A row pairs a hidden state with the token after it: the added row pairs zeros with the first token. All rows move
    # by one position, which does not change rotary attention.
    hidden_RTD = torch.cat([torch.zeros_like(hidden_RTD[:, :1]), hidden_RTD], dim=1)
    start(rows, hidden_RTD, torch.cat([prompt_RT[:, :1], prompt_RT], dim=1), first_R)


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
    drafting = subject.head.family.kind.draft_with(subject.head, None)
    if leading_row:
        drafting.make = partial(make_with_leading_row, drafting.make)
    decoder = SpeculativeDecoder(subject.trunk, drafting, depth, eos_ids, max_batch=1, records=True)
    texts = []
    for prompt_ids in prompts:
        (result,) = decoder.generate([Request(prompt_ids=prompt_ids, max_new_tokens=max_new_tokens)])
        # A window is the last committed token, and the drafts.
        rounds = tuple(Round(tuple(one.window[1:]), one.tokens[: one.num_kept]) for one in result.record.rounds)
        texts.append(cut(Text(tuple(prompt_ids), rounds), max_new_tokens, eos_ids))
    return texts
