"""``mtp-train probe CKPT --endpoint URL``: name the wiring in which a server drafts, from its counts alone.

The server answers the built-in prompts greedily, one at a time. On each answer the rounds of greedy decoding are
replayed in every known wiring: a round drafts after the text so far, and commits the drafts that equal the text and one
token more. A wiring reproduces an answer if it gives the server's numbers of rounds and of accepted drafts. Drafts
within ``TIE`` of the best logit may be accepted or not, and so may those beyond the end of an answer: some servers
count them.

Shapes: K drafts of a round, N places in an answer where a round may begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import le
from pathlib import Path

from rich.progress import Progress

from mtp_inference.opening import OWN, open_model
from mtp_train.answers.draft_counts import SpecCounts
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.errors import DataError
from mtp_train.evaluation.grid import EvaluationGrid
from mtp_train.evaluation.served import ServedRecord, Server, ask, judged
from mtp_train.evaluation.statistics import Served
from mtp_train.runs.display import Rows, Shown, quiet_progress
from mtp_train.runs.engine_wirings import OURS, TIE, Probed, Replayed, load_known, named

PROMPTS_PER_TASK, NEW_TOKENS, FITS = 2, 64, 0.9
"""Of the prompts that are sent, and the share of answers from which a wiring reproduces a server's counts."""


Counts = tuple[int, ...]
"""Numbers of rounds, then of accepted drafts by position: (1 + K,)."""


@dataclass(frozen=True)
class CountsResult(Shown):
    """Result of :func:`probe_endpoint`."""

    verdict: str
    """``as ours``, the wiring that reproduces the server's counts where ours does not, ``undecided`` where several do,
    or ``none of the known``."""
    answers: int
    """The answers that were replayed."""
    depth: int
    """Drafts of a round."""
    served: Counts
    """The server's; of accepted drafts in all, where it does not count these by position."""
    expected: dict[str, Counts]
    """The same numbers by wiring, ours first, with every first choice as the draft."""
    equal: dict[str, float]
    """The share of answers whose numbers are reproduced, by wiring."""
    fits: list[str]
    """The wirings that reproduce the counts."""
    warnings: list[str]
    """Whether the answers are not the trunk's own, and the like."""

    def _title(self) -> str:
        taus = [1.0 + sum(counts[1:]) / max(1, counts[0]) for counts in (self.served, self.expected[OURS])]
        return (
            f"{self.verdict}: tau is {taus[0]:.2f} at the server, {taus[1]:.2f} in our wiring, which gives the counts "
            f"of {self.equal[OURS]:.1%} of {self.answers} answers; reproduced: {' / '.join(self.fits)}"
        )

    def _rows(self) -> Rows:
        return (("warning", one) for one in self.warnings)


def probe_endpoint(
    checkpoint: str | Path,
    endpoint: str,
    *,
    head: str | Path | None = None,
    served_model: str | None = None,
    api_key_env: str | None = None,
    progress: Progress | None = None,
) -> CountsResult:
    """Compare a server's counts of drafts with those that a head gives on the server's answers, and name its wiring.

    Args:
        checkpoint: The trunk that is served: a directory, a hub id or ``demo:NAME``.
        endpoint: URL of a server that counts its drafts (vLLM, SGLang, llama-server): ``http://host:port/v1``.
        head: The head that the server drafts with, as for :func:`generate`. None for the checkpoint's own.
        served_model: The model's name at the server; None where it serves only one.
        api_key_env: Environment variable with the server's key.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        MtpError: The server counts no drafts, the head does not fit the checkpoint, or its wirings are not known.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.probe_endpoint("my-27b-mtp", "http://localhost:8000/v1").verdict
        'as ours'
    """
    progress = progress or quiet_progress()
    place = str(checkpoint)
    model = open_model(place, str(head or OWN))
    server = Server(
        url=endpoint,
        checkpoint=place,
        model=served_model,
        api_key_env=api_key_env,
    )
    found, told = _asked(server, progress)
    probed = load_known(model)
    eos_ids = eos_token_ids(model.checkpoint, load_tokenizer(model.checkpoint))
    warnings = judged(found, probed.trunk, eos_ids).document["warnings"]
    whole = [one for one in told if one[0].num_tokens == NEW_TOKENS or one[0].token_ids[-1] in eos_ids]
    if len(whole) < len(told):
        # Their last rounds have fewer drafts, by each server's own rule.
        warnings.append(f"{len(told) - len(whole)} answers end with the server's context, and are not compared.")
        told = whole or told
    total = sum((counts for _, counts in told), SpecCounts())
    depth = total.depth
    probed.drafting.check(probed.trunk, depth)
    if total.draft_tokens < (total.rounds - 2 * len(told)) * depth:
        warnings.append(f"Some rounds have fewer than {depth} drafts: let the server draft as many in each.")
    expected, equal = _compared(probed, told, depth, progress)
    fits = [name for name, share in equal.items() if share >= FITS]
    # Where no draft is accepted, several wirings may give this, and ours among them says nothing.
    is_ours = OURS in fits and equal[OURS] == max(equal.values()) and (total.accepted_tokens or not fits[1:])
    verdict = named(fits, is_ours=bool(is_ours))
    served = (total.rounds, *(total.accepted_per_pos or (total.accepted_tokens,)))
    return CountsResult(verdict, len(told), depth, served, expected, equal, fits, warnings)


def _asked(server: Server, progress: Progress) -> tuple[Served, list[tuple[ServedRecord, SpecCounts]]]:
    """Return the measurements of a server, and its answers that have drafts, with their counts."""
    grid = EvaluationGrid(temperatures=[0.0], prompts_per_task=PROMPTS_PER_TASK, max_new_tokens=NEW_TOKENS)
    found = ask([server], grid.settled([], [server.checkpoint]), progress)[server.name]
    records = [one for some in found.arm.decoded.values() for one in some if isinstance(one, ServedRecord)]
    # Of servers that send text alone, some answers have other tokens here.
    told = [(one, one.told) for one in records if one.told and one.told.rounds and len(one.token_ids) == one.num_tokens]
    if not told:
        raise DataError(
            f"{server.url}: counts no drafts in {len(records)} answers; expected a server that drafts, and counts it "
            "(vLLM, SGLang, llama-server). Start it with its drafter, or compare its drafts: probe --drafts."
        )
    return found, told


def _compared(
    probed: Probed, told: Sequence[tuple[ServedRecord, SpecCounts]], depth: int, progress: Progress
) -> tuple[dict[str, Counts], dict[str, float]]:
    """Return the expected numbers, and the share of answers whose numbers are reproduced, by wiring."""
    texts = [
        Replayed(text := one.prompt_ids + one.token_ids, range(one.prompt_tokens, len(text) - 1), depth)
        for one, _ in told
    ]
    expected = {}
    equal = {}
    for name, margins in probed.margins(texts, progress).items():
        of_answers = [one.T.tolist() for one in margins]
        firsts = [next(iter(replayed([[min(one)] for one in lengths(answer)], depth))) for answer in of_answers]
        expected[name] = tuple(map(sum, zip(*firsts, strict=True)))
        equal[name] = sum(map(reproduces, of_answers, [counts for _, counts in told])) / len(told)
    return expected, equal


def reproduces(margins: Sequence[Sequence[float]], told: SpecCounts) -> bool:
    """Return whether the rounds of an answer may have the counts that the server has for it.

    Args:
        margins: Of the answer's tokens as drafts, N rows of K: number k of row n, from 1 on, is of token n + k.
    """
    num_depths = len(margins[0])
    options = lengths(margins, TIE)
    if told.accepted_per_pos is None:
        # The number of rounds is derived from this one.
        return told.accepted_tokens in {sum(counts[1:]) for counts in replayed(options, num_depths)}
    counts = (told.rounds, *told.accepted_per_pos, *[0] * num_depths)[: 1 + num_depths]
    return counts in replayed(options, num_depths, counts)


def lengths(margins: Sequence[Sequence[float]], tie: float = 0.0) -> list[list[int]]:
    """Return how many drafts a round may accept that begins at each of N places of an answer, ascending."""
    return [[*_lengths(row, len(margins) - start, tie)] for start, row in enumerate(margins)]


def _lengths(margins: Sequence[float], left: int, tie: float) -> Iterator[int]:
    for number, margin in enumerate(margins, start=1):
        # The last token may be the trunk's own after fewer drafts, or a draft that others follow.
        if number >= left or margin <= tie:
            yield number - 1
        if number <= left and margin < -tie:
            return
    yield len(margins)


def replayed(options: Sequence[Sequence[int]], num_depths: int, most: Counts | None = None) -> set[Counts]:
    """Return all numbers that the rounds of an answer may have.

    Args:
        options: The result of :func:`lengths`.
        most: No number is above these.
    """
    found: list[set[Counts]] = [{(0,) * (1 + num_depths)}, *(set() for _ in options)]
    for start, accepted in enumerate(options):
        for counts, length in product(found[start], accepted):
            more = tuple(count + (place <= length) for place, count in enumerate(counts))
            if most is None or all(map(le, more, most)):
                found[min(start + length + 1, len(options))].add(more)
    return found[-1]
