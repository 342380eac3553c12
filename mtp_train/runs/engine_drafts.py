"""``mtp-train probe CKPT --drafts FILE``: name the wiring in which an engine drafts with a head.

The drafts that an engine made are compared with those of our head after the same tokens, under our wiring and under
known wrong ones. A draft of depth k is computed after the engine's own earlier drafts of its round, so that one other
draft does not hide those after it.

Shapes: T tokens, K drafts of a round, N rounds, D hidden, R tokens that may be drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from rich.progress import Progress
from torch import Tensor
from torch.nn.functional import pad

from mtp_inference import HeadDrafting
from mtp_inference.opening import OWN, open_model
from mtp_train.errors import DataError
from mtp_train.evaluation.arms import load_arm_trunk, local_device
from mtp_train.evaluation.dense import wirings
from mtp_train.families import Convention
from mtp_train.heads.module import MtpHead
from mtp_train.runs.display import Shown, quiet_progress
from mtp_train.train.teacher_forced import many_rows
from mtp_train.trunk.ends import draft_logits
from mtp_train.trunk.load import Trunk

OURS, UNDECIDED, NONE = "as ours", "undecided", "none of the known"
MOST_ROUNDS, FITS = 64, 0.99
"""The most rounds that are compared, and the share of equal drafts from which a wiring reproduces an engine's."""
_TIE = 2.0**-6
"""How far below the best logit, as a part of it, an equal draft may be: two to four steps of bf16."""


def _in_vocabulary(token: int, info: Any) -> int:
    if token not in info.context:
        raise ValueError(f"token {token} is not in {info.context}, the vocabulary")
    return token


_Ids = tuple[Annotated[int, AfterValidator(_in_vocabulary)], ...]


@dataclass(frozen=True)
class DraftedRound:
    """The drafts of a round, and all tokens before them: the prompt and what was committed."""

    token_ids: _Ids
    drafts: _Ids

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True)
class DraftsResult(Shown):
    """Result of :func:`probe_drafts`."""

    verdict: str
    """``as ours``, the wiring that reproduces the drafts where ours does not, ``undecided`` where several do, or ``none
    of the known``."""
    rounds: int
    """The rounds that were compared."""
    drafts: int
    equal: dict[str, float]
    """The share of equal drafts by wiring, ours first."""
    fits: list[str]
    """The wirings that reproduce the drafts."""

    def _title(self) -> str:
        return (
            f"{self.verdict}: of {self.drafts} drafts of {self.rounds} rounds, {self.equal[OURS]:.1%} are as ours; "
            f"reproduced: {' / '.join(self.fits)}"
        )


def probe_drafts(
    checkpoint: str | Path, drafts: str | Path, *, head: str | Path | None = None, progress: Progress | None = None
) -> DraftsResult:
    """Compare an engine's drafts with a head's after the same tokens, and name the wiring that reproduces them.

    Args:
        checkpoint: The trunk: a directory, a hub id or ``demo:NAME``.
        drafts: A file with one round a line, see ``recipes/acceptance.md``.
        head: The head that the engine drafts with, as for :func:`generate`. None for the checkpoint's own.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        DataError: The file cannot be read, or is not of the format.
        MtpError: The checkpoint and the head do not fit, or the head's wirings are not known.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.probe_drafts("my-27b-mtp", "drafts.jsonl").verdict
        'with the halves of its projection swapped'
    """
    model = open_model(str(checkpoint), OWN if head is None else str(head))
    family = model.family
    rounds = read_drafts(Path(drafts), int(model.checkpoint.text_config["vocab_size"]))
    # Both states can be read from the one before the final norm.
    default = replace(family.wiring.default, hidden="before_final_norm")
    family = replace(family, wiring=replace(family.wiring, default=default))
    trunk = load_arm_trunk(replace(model, family=family), local_device())
    drafting = model.load_drafting(trunk)
    if not isinstance(drafting, HeadDrafting):
        raise DataError(f"--head: {head} has no known wirings; expected an MTP head or a draft model. Name one.")
    num_drafts = [len(one.drafts) for one in rounds]
    drafting.check(trunk, max(num_drafts))
    equal = _compare(trunk, drafting, rounds, progress or quiet_progress())
    fits = [name for name, share in equal.items() if share >= FITS]
    verdict = OURS if OURS in fits else UNDECIDED if fits[1:] else [*fits, NONE][0]
    return DraftsResult(verdict, len(rounds), sum(num_drafts), equal, fits)


def read_drafts(path: Path, vocab_size: int) -> list[DraftedRound]:
    """Return the rounds of a file that have drafts, evenly chosen.

    Raises:
        DataError: The file cannot be read, a line is no round, or no round has drafts.
    """
    where, found, rounds = str(path), "no drafts", list[DraftedRound]()
    try:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            where = f"{path}, line {number}"
            rounds.append(TypeAdapter(DraftedRound).validate_json(line, context=range(vocab_size)))
        # A head needs two tokens.
        if rounds := [one for one in rounds if one.drafts and one.token_ids[1:]]:
            return rounds[:: 1 + len(rounds) // MOST_ROUNDS]
    except OSError as error:
        found = str(error.strerror)
    except ValidationError as invalid:
        wrong = invalid.errors()[0]
        where, found = f"{where}, {'.'.join(map(str, wrong['loc'] or ['JSON']))}", wrong["msg"]
    raise DataError(
        f'{where}: {found}; expected a round in every line, {{"token_ids": [1, 2], "drafts": [3]}}. Write the file as '
        "recipes/acceptance.md shows."
    )


@torch.inference_mode()
def _compare(
    trunk: Trunk, drafting: HeadDrafting, rounds: Sequence[DraftedRound], progress: Progress
) -> dict[str, float]:
    """Return the share of drafts that are the head's first choices, or nearly, by wiring."""
    found = {}
    with many_rows(trunk, drafting.head) as head:
        near = {layer + step for layer in head.trunk_layers for step in (-1, 0, 1)}
        trunk.show_layers(tuple(sorted(near & {*range(len(trunk.layers))})))
        tokens = [torch.tensor([one.token_ids + one.drafts], device=trunk.lm_head_VD.device) for one in rounds]
        hidden = [*map(trunk.hidden, tokens)]
        logits = draft_logits(trunk, drafting.draft_vocab_R, hidden[0].dtype)
        for name, change in progress.track(_changes(trunk, head).items(), description="drafting in known wirings"):
            changed, equal = change(deepcopy(head)), list[Tensor]()
            for one, tokens_1T, hidden_1TD in zip(rounds, tokens, hidden, strict=True):
                read_1TD = trunk.head_input(hidden_1TD, changed.convention)
                if changed.trunk_layers:
                    parts = read_1TD.chunk(len(trunk.shown_layers), dim=-1)
                    read_1TD = torch.cat(
                        [parts[trunk.shown_layers.index(layer)] for layer in changed.trunk_layers], dim=-1
                    )
                states = changed.unroll(
                    read_1TD,
                    tokens_1T,
                    changed.embedding(trunk.embed),
                    num_depths=len(one.drafts),
                    positions_BT=torch.arange(tokens_1T.shape[1], device=tokens_1T.device)[None],
                    document_BT=torch.zeros_like(tokens_1T),
                )
                for depth, (draft, state_1TD) in enumerate(zip(one.drafts, states, strict=True), start=1):
                    # The head's row before the last token of the text.
                    logits_V = changed.project(depth, state_1TD[0, len(one.token_ids) - 2], logits)
                    equal.append(logits_V[draft].isclose(logits_V.max(), rtol=_TIE))
            found[name] = float(torch.stack(equal).float().mean())
    return found


def _changes(trunk: Trunk, head: MtpHead) -> dict[str, Callable[[MtpHead], MtpHead]]:
    """Return the known wirings, each as a change of a copy of the head; some change nothing in some heads."""
    values: dict[str, Any] = {
        "reading the state of one token earlier": (
            "read",
            lambda state_BTD: head.read(pad(state_BTD[:, :-1], (0, 0, 1, 0))),
        ),
        "drafting the token after each of its tokens": (
            "project",
            lambda depth, state, shared: head.project(depth, state, shared).roll(1, dims=-1),
        ),
    }
    if head.convention.hidden == "after_final_norm":
        values["reading the hidden state normed twice"] = (
            "read",
            lambda state_BTD: head.read(trunk.head_input(state_BTD, Convention())),
        )
    for step in (-1, 1):
        layers = tuple(layer + step for layer in head.trunk_layers)
        if layers and {*layers} <= {*trunk.shown_layers}:
            values[f"reading layers {layers}"] = ("trunk_layers", layers)
    if head.rotary is not None:
        for name, wrong in (("rope_theta", 10000.0), ("partial_rotary_factor", 1.0)):
            config = deepcopy(head.rotary.config)
            given = config.rope_parameters
            # Factors and sections of channels would be too few for more of them.
            if given.get("mrope_interleaved", not given.keys() & {"mrope_section", "short_factor"}):
                given[name] = wrong
                rotary = type(head.rotary)(config=config).to(trunk.lm_head_VD.device)
                values[f"with {name} {wrong:g}"] = ("rotary", rotary)
    forms = {name: partial(_with, *change) for name, change in values.items()}
    return {OURS: lambda head: head, **wirings(head), **forms}


def _with(name: str, value: Any, head: MtpHead) -> MtpHead:
    setattr(head, name, value)
    return head
