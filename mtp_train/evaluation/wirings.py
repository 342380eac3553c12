"""Find out whether a head fits its trunk better in another known form, or under another convention, than ours.

A checkpoint may hold a head in a form that no engine expects (halves swapped, norms shifted by one), and an engine may
wire it otherwise than the trainer did. Each is tried on the trunk's own text, teacher-forced, where one pass of the
trunk serves all of them.

Shapes: K depths, D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace

import torch
from rich.progress import Progress

from mtp_inference import HeadDrafting
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.families import Convention
from mtp_train.heads.module import MtpHead
from mtp_train.train.packed_rows import PackedBatch, aligned_rows, isolated_hidden
from mtp_train.train.teacher_forced import many_rows, target_figures
from mtp_train.trunk.load import Trunk

_GAIN = 0.05
"""The gain in overlap from which a wiring is better: some wiring is better by a hundredth by chance."""
_SURE, _LIKELY = 4.0, 2.0
"""The mean gain over the texts, in standard errors, that overlap and the share of right drafts need. With a flat q the
overlap alone may rise, where q was wrong."""


def better_wiring(
    trunk: Trunk, drafting: HeadDrafting, texts: Sequence[Document], num_depths: int, progress: Progress
) -> str | None:
    """Return a sentence about the wiring under which a head drafts best, None if none is shown to be better than ours.

    Args:
        trunk: The trunk.
        drafting: Its head.
        texts: Texts that the trunk wrote.
        num_depths: K.
        progress: Shows the texts.
    """
    with torch.inference_mode(), many_rows(trunk, drafting.head) as head:
        heads = {"": head, **{name: change(deepcopy(head)) for name, change in wirings(head).items()}}
        overlaps: dict[str, list[float]] = {name: [] for name in heads}
        right: dict[str, list[float]] = {name: [] for name in heads}
        num_drafts = 0
        for text in progress.track(texts, description="trying other wirings of the head"):
            columns = collate(pack_documents([text], len(text.input_ids), pack=False, seed=0, epoch=0))
            batch = PackedBatch(*(column.to(trunk.lm_head_VD.device) for column in columns.values()))
            trunk.show_layers(head.trunk_layers)
            hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
            for name, one in heads.items():
                rows = aligned_rows(trunk, one, batch, num_depths, hidden_BTD=hidden_BTD)
                found = target_figures(rows, trunk, one, draft_vocab_R=drafting.draft_vocab_R)
                overlaps[name].append(float(found.overlap_KN[rows.valid_KN].mean()))
                right[name].append(float(found.agreed_KN[rows.valid_KN].float().mean()))
            num_drafts += int(rows.valid_KN.sum())
    best = max(heads, key=lambda name: sum(overlaps[name]))
    gains = _in_errors(overlaps[best], overlaps[""]), _in_errors(right[best], right[""])
    gain = (sum(overlaps[best]) - sum(overlaps[""])) / len(texts)
    if gain < _GAIN or gains[0] < _SURE or gains[1] < _LIKELY:
        return None
    shares = [sum(right[name]) / len(texts) for name in (best, "")]
    return f"The head drafts better {best}: {shares[0]:.0%} of {num_drafts} drafts are right instead of {shares[1]:.0%}"


def _in_errors(mine: Sequence[float], own: Sequence[float]) -> float:
    """Return the mean gain over texts in standard errors; 0 for too few texts."""
    gains = torch.tensor(mine) - torch.tensor(own)
    error = float(gains.std()) / math.sqrt(len(own)) if len(own) > 2 else 0.0
    return float(gains.mean()) / error if error else 0.0


def wirings(head: MtpHead) -> Mapping[str, Callable[[MtpHead], MtpHead]]:
    """Return the known wrong forms of a head, and its conventions in other engines, each as a change of a copy."""
    ours = head.convention
    conventions = {
        f"wired as {engine} does": one
        for engine, one in head.family.conventions.items()
        if replace(one, position_offset=ours.position_offset) != ours
    }
    if ours.hidden == "after_final_norm":
        conventions["reading the hidden state before the final norm"] = replace(ours, hidden="before_final_norm")
    if ours.hidden == "before_final_norm":
        conventions["reading the hidden state after the final norm"] = replace(ours, hidden="after_final_norm")
    if ours.recycle == "after_final_norm":
        conventions["recycling its state before its final norm"] = replace(ours, recycle="before_final_norm")
    if ours.recycle == "before_final_norm":
        conventions["recycling its state after its final norm"] = replace(ours, recycle="after_final_norm")
    forms: dict[str, Callable[[MtpHead], MtpHead]] = {
        "with the halves of its projection swapped": _with_halves_swapped,
        "with its square matrices transposed": _transposed,
    }
    for sign, word in ((-1.0, "minus"), (1.0, "plus")):
        forms[f"with the norms before its projection {word} one"] = _shifted(sign, ("embed_norm", "hidden_norm"))
        forms[f"with all its norms {word} one"] = _shifted(sign, ("norm",))
    return {name: _wired(one) for name, one in conventions.items()} | forms


def _wired(convention: Convention) -> Callable[[MtpHead], MtpHead]:
    def change(head: MtpHead) -> MtpHead:
        head.convention = convention
        return head

    return change


def _with_halves_swapped(head: MtpHead) -> MtpHead:
    for name, parameter in head.named_parameters():
        if name.endswith(".proj.weight") and ".layer." not in name:
            first_DD, second_DD = parameter.data.chunk(2, dim=1)
            parameter.data = torch.cat([second_DD, first_DD], dim=1)
    return head


def _transposed(head: MtpHead) -> MtpHead:
    for parameter in head.parameters():
        if parameter.ndim == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.T.contiguous()
    return head


def _shifted(sign: float, norms: tuple[str, ...]) -> Callable[[MtpHead], MtpHead]:
    def change(head: MtpHead) -> MtpHead:
        for name, parameter in head.named_parameters():
            if parameter.ndim == 1 and name.endswith(tuple(f"{norm}.weight" for norm in norms)):
                parameter.data = parameter.data + sign
        return head

    return change
