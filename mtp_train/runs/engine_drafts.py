"""``mtp-train probe CKPT --drafts FILE``: name the wiring in which an engine drafts with a head.

The drafts that an engine made are compared with those of our head after the same tokens, under our wiring and under
known wrong ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, ConfigDict, TypeAdapter, ValidationError
from rich.progress import Progress

from mtp_inference.opening import OWN, open_model
from mtp_train.errors import DataError
from mtp_train.runs.display import Shown, quiet_progress
from mtp_train.runs.engine_wirings import OURS, TIE, Replayed, load_known, named

MOST_ROUNDS, FITS = 64, 0.99
"""The most rounds that are compared, and the share of equal drafts from which a wiring reproduces an engine's."""


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

    @property
    def replayed(self) -> Replayed:
        last = len(self.token_ids) - 1
        return Replayed(self.token_ids + self.drafts, range(last, last + 1), len(self.drafts))


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
    model = open_model(str(checkpoint), str(head or OWN))
    rounds = read_drafts(Path(drafts), int(model.checkpoint.text_config["vocab_size"]))
    probed = load_known(model)
    num_drafts = [len(one.drafts) for one in rounds]
    probed.drafting.check(probed.trunk, max(num_drafts))
    margins = probed.margins([one.replayed for one in rounds], progress or quiet_progress())
    equal = {
        name: float((torch.cat([one[:, 0] for one in found]) >= -TIE).float().mean()) for name, found in margins.items()
    }
    fits = [name for name, share in equal.items() if share >= FITS]
    return DraftsResult(named(fits, is_ours=OURS in fits), len(rounds), sum(num_drafts), equal, fits)


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
        where = f"{where}, {'.'.join(map(str, wrong['loc'] or ['JSON']))}"
        found = wrong["msg"]
    raise DataError(
        f'{where}: {found}; expected a round in every line, {{"token_ids": [1, 2], "drafts": [3]}}. Write the file as '
        "recipes/acceptance.md shows."
    )
