"""Teacher-forced metrics of every target position, by prompt, for intervals and for comparisons at equal entropy.

The trunk's own plain outputs pass through the MTP forward as in ``mtp_train.train.teacher_forced``, one prompt at a
time. :func:`better_wiring` compares a head with itself in other known forms and conventions.

Shapes: K depths, N target positions of all prompts together, R drafted vocabulary, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress
from torch import Tensor

from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import TrainedDrafting
from mtp_train.answers.store import answer_document
from mtp_train.data.pack import PackedBatch, collate, one_row
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.evaluation.prompt_records import PromptRecord
from mtp_train.heads.head import Head
from mtp_train.heads.module import MtpHead
from mtp_train.train.packed_rows import AlignedRows, aligned_rows
from mtp_train.train.teacher_forced import TargetFigures, many_rows, target_figures
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import isolated_hidden


@dataclass(frozen=True, eq=False)
class DenseRows:
    """Metrics of every target position of some outputs; positions of a prompt are contiguous and in order."""

    prompts: Sequence[Prompt]
    """The prompts, including those without a target position."""
    prompt_N: NDArray[np.int64]
    """Index into :attr:`prompts` of each position's prompt."""
    entropy_N: NDArray[np.float32]
    overlap_KN: NDArray[np.float32]
    """``sum_v min(p, q)``."""
    agreed_KN: NDArray[np.bool_]
    """Whether argmax q = argmax p."""
    valid_KN: NDArray[np.bool_]
    """Whether the depth has a target at the position: the depth's start must lie in the text too."""


@torch.inference_mode()
def dense_rows(
    trunk: Trunk,
    drafting: TrainedDrafting,
    prompts: Sequence[Prompt],
    plain: Sequence[PromptRecord],
    num_depths: int,
    temperature: float,
    seq_len_tokens: int,
    max_tokens: int | None = None,
) -> DenseRows:
    """Return a head's teacher-forced metrics on its trunk's plain outputs.

    Args:
        drafting: The head, and the tokens that it may draft.
        prompts: The prompts; prompts without a record are ignored.
        temperature: p and q are ``softmax(logits / temperature)``. Temperature 0, where acceptance depends on the
            argmax tokens alone, is measured at 1.
        seq_len_tokens: Longest text; a longer text is cut at its end.
        max_tokens: Prompts whose texts exceed it together are left out, except for the first; None for no limit.
    """
    outputs = {one.prompt_id: one for one in plain}
    decoded = [prompt for prompt in prompts if prompt.id in outputs]
    texts = [answer_document(prompt, outputs[prompt.id].token_ids, seq_len_tokens) for prompt in decoded]
    if max_tokens is not None:
        ends = np.cumsum([len(text.input_ids) for text in texts])
        num_texts = max(1, int((ends <= max_tokens).sum()))
        decoded = decoded[:num_texts]
        texts = texts[:num_texts]
    parts = []
    with many_rows(trunk, drafting.head) as head:
        for text in texts:
            ((rows, found),) = _measured(trunk, [head], text, num_depths, drafting.draft_vocab_R, temperature or 1.0)
            kept_N = rows.valid_KN.any(dim=0)
            parts.append(
                [
                    one[..., kept_N].cpu().numpy()
                    for one in (found.entropy_N, found.overlap_KN, found.agreed_KN, rows.valid_KN)
                ]
            )
            # Before the next text's states are computed.
            del rows, found
    entropies, overlaps, agreed, valid = zip(*parts, strict=True)
    return DenseRows(
        prompts=decoded,
        prompt_N=np.repeat(np.arange(len(parts)), [len(entropy_N) for entropy_N in entropies]),
        entropy_N=np.concatenate(entropies),
        overlap_KN=np.concatenate(overlaps, axis=1),
        agreed_KN=np.concatenate(agreed, axis=1),
        valid_KN=np.concatenate(valid, axis=1),
    )


def replayed(rows: DenseRows, plain: Sequence[PromptRecord], depth: int) -> list[PromptRecord]:
    """Return the rounds of greedy decoding at a depth, as the drafts at every position of the plain texts give them.

    A round drafts the same tokens here as in decoding: those after its last committed token. Rounds that reach past the
    end of a text are left out with their tokens.

    Args:
        rows: Metrics of the plain texts at temperature 0, of this depth at least.
    """
    texts = {one.prompt_id: one for one in plain}
    found = []
    for number, prompt in enumerate(rows.prompts):
        text = texts[prompt.id]
        of_text_N = rows.prompt_N == number
        agreed_KT = (rows.agreed_KN & rows.valid_KN)[:depth, of_text_N]
        last = 0
        accepted = list[int]()
        # No depth predicts the first new token of a prompt of one token, which has no start.
        while text.prompt_tokens > 1 and last + depth < agreed_KT.shape[1]:
            accepted.append(int(agreed_KT[np.arange(depth), last + 1 + np.arange(depth)].cumprod().sum()))
            last += accepted[-1] + 1
        found.append(
            replace(
                text,
                token_ids=text.token_ids[: last + 1],
                drafted=(depth,) * len(accepted),
                accepted=tuple(accepted),
                check=None,
            )
        )
    return found


def _measured(
    trunk: Trunk,
    heads: Sequence[Head],
    text: Document,
    num_depths: int,
    draft_vocab_R: Tensor | None,
    temperature: float = 1.0,
) -> Iterator[tuple[AlignedRows, TargetFigures]]:
    """Yield the rows of each head on one text, in a batch of its own without padding, and the figures of these rows.

    One pass of the trunk serves all heads, which read the same of its layers.
    """
    columns = collate([one_row([text], [0], len(text.input_ids))])
    batch = PackedBatch(*(column.to(trunk.lm_head_VD.device) for column in columns))
    trunk.show_to(heads[0])
    hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
    for head in heads:
        rows = aligned_rows(trunk, head, batch, hidden_BTD, num_depths)
        yield rows, target_figures(rows, trunk, head, temperature=temperature, draft_vocab_R=draft_vocab_R)


_GAIN, _RIGHT = 0.05, 0.08
"""The gains in overlap and in the share of right drafts from which a wiring is better. Some wiring gains a hundredth by
chance, and on answers that are nearly one text a sharper q gained 0.07 and 0.06. Known wrong forms lose 0.1 or more."""
_SURE, _LIKELY = 4.0, 2.0
"""The mean gain over the texts, in standard errors, that overlap and the share of right drafts need. With a flat q the
overlap alone may rise, where q was wrong."""


def better_wiring(
    trunk: Trunk,
    drafting: HeadDrafting,
    texts: Sequence[Document],
    num_depths: int,
    progress: Progress,
    gather: Callable[[list[Any]], list[Any]] = list,
) -> str | None:
    """Return a sentence about the wiring under which a head drafts best, None if none is shown to be better than ours.

    A checkpoint may hold a head in a form that no engine expects (halves swapped, norms shifted by one), and an engine
    may wire it otherwise than the trainer did. Each is tried on texts that the trunk wrote, where one pass of the trunk
    serves all of them. ``gather`` returns the items of all processes, each of which has texts of its own.
    """
    with torch.inference_mode(), many_rows(trunk, drafting.head) as head:
        heads = {"": head, **{name: change(deepcopy(head)) for name, change in wirings(head).items()}}
        # Of each text and head: its overlap, its share of right drafts, and their number.
        own = []
        for text in progress.track(texts, description="trying other wirings of the head"):
            measured = _measured(trunk, list(heads.values()), text, num_depths, drafting.draft_vocab_R)
            own.append(
                [
                    [
                        *(float(one[rows.valid_KN].float().mean()) for one in (found.overlap_KN, found.agreed_KN)),
                        int(rows.valid_KN.sum()),
                    ]
                    for rows, found in measured
                ]
            )
    of_texts = torch.tensor(gather(own))
    figures = dict(zip(heads, of_texts.permute(1, 2, 0), strict=True))
    best = max(heads, key=lambda name: float(figures[name][0].sum()))
    gains = (figures[best] - figures[""])[:2]
    in_errors = (gains.mean(dim=1) / (gains.std(dim=1) / math.sqrt(len(of_texts)))).nan_to_num(posinf=0.0)
    least = torch.tensor([_GAIN, _RIGHT])
    if len(of_texts) < 3 or bool((gains.mean(dim=1) < least).any()) or in_errors[0] < _SURE or in_errors[1] < _LIKELY:
        return None
    shares = [float(figures[name][1].mean()) for name in (best, "")]
    num_drafts = int(figures[""][2].sum())
    return f"The head drafts better {best}: {shares[0]:.0%} of {num_drafts} drafts are right instead of {shares[1]:.0%}"


def wirings(head: MtpHead) -> Mapping[str, Callable[[MtpHead], MtpHead]]:
    """Return the known wrong forms of a head, and its conventions in other engines, each as a change of a copy."""
    ours = head.convention
    conventions = {
        f"wired as {engine} does": one for engine, one in head.family.wiring.conventions.items() if one != ours
    }
    other = {"after_final_norm": "before_final_norm", "before_final_norm": "after_final_norm"}
    for field, words in (("hidden", "reading the hidden state {} the"), ("recycle", "recycling its state {} its")):
        # Residual streams and their mixture have other widths.
        if (norm := other.get(getattr(ours, field))) and head.family.trunk.streams is None:
            name = f"{words.format(norm.removesuffix('_final_norm'))} final norm"
            changed: Any = {field: norm}
            conventions[name] = replace(ours, **changed)
    # Of equal conventions the first name stays.
    names = {one: name for name, one in reversed(conventions.items())}
    forms: dict[str, Callable[[MtpHead], MtpHead]] = {
        "with the halves of its projection swapped": _with_halves_swapped,
        "with its square matrices transposed": _transposed,
    }
    for sign, word in ((-1.0, "minus"), (1.0, "plus")):
        before = partial(_shifted, sign, ("embed_norm.weight", "hidden_norm.weight"))
        forms[f"with the norms before its projection {word} one"] = before
        forms[f"with all its norms {word} one"] = partial(_shifted, sign, ("norm.weight",))
    return {name: partial(rewired, "convention", one) for one, name in names.items()} | forms


def rewired(attribute: str, value: Any, head: Any) -> Any:
    """Replace an attribute of a head, and return the head."""
    setattr(head, attribute, value)
    return head


def _with_halves_swapped(head: MtpHead) -> MtpHead:
    for name, parameter in head.named_parameters():
        if name.endswith(".proj.weight") and ".layer." not in name:
            parameter.data = parameter.data.roll(parameter.shape[1] // 2, dims=1)
    return head


def _transposed(head: MtpHead) -> MtpHead:
    for parameter in head.parameters():
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.T.contiguous()
    return head


def _shifted(sign: float, norms: tuple[str, ...], head: MtpHead) -> MtpHead:
    for name, parameter in head.named_parameters():
        if parameter.ndim == 1 and name.endswith(norms):
            parameter.data = parameter.data + sign
    return head
