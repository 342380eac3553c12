"""Acceptance: the rule that counts it, the figures made of the counts, and the gate that rests on them.

Words. A round drafts K tokens and accepts a prefix of them. ``accepted_per_pos[i]`` counts the rounds that accepted at
least ``i + 1`` drafts. *Marginal* acceptance divides it by the rounds, *conditional* acceptance by its predecessor.
``tau`` is the mean number of tokens a round commits, bonus token included: ``1 + accepted / rounds``.

Every interval resamples *prompts*, never rounds: the rounds of one prompt are alike, so that an interval over rounds
is far too narrow. Two heads are compared on the same prompts, pair by pair. The percentiles are expanded for the few
prompts there are (Hesterberg, "What teachers should know about the bootstrap", arXiv:1411.5279): with 5
prompts the plain ones call an unchanged head better in 8 % of cases instead of 2.5 %.

Shape letters: N rows, V vocabulary, K depths (K1 = K + 1), P prompts, R resamples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FloatArray = npt.NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class PromptCounts:
    """What decoding one prompt counted.

    Attributes:
        prompt_id: Name of the prompt, the same for every arm.
        rounds: Number of decoding rounds; the first token comes from prefill, outside any round.
        num_draft_tokens: Drafted tokens, ``rounds * K`` at a fixed depth K.
        accepted_per_pos: Rounds in which at least ``i + 1`` drafts were accepted, for i in 0..K-1.
        new_tokens: Tokens returned to the caller.
        seconds: Wall time of the decoding, or None where it was not taken.
    """

    prompt_id: str
    rounds: int
    num_draft_tokens: int
    accepted_per_pos: tuple[int, ...]
    new_tokens: int
    seconds: float | None

    def __post_init__(self) -> None:
        chain = (self.rounds, *self.accepted_per_pos, 0)
        if any(later > earlier for earlier, later in pairwise(chain)):
            raise ValueError(
                f"prompt {self.prompt_id!r}: {self.rounds} rounds, accepted_per_pos {list(self.accepted_per_pos)}; "
                "expected counts of 0 or more that never rise. Count the rounds that reached each position."
            )
        if self.num_accepted_tokens > self.num_draft_tokens:
            raise ValueError(
                f"prompt {self.prompt_id!r}: {self.num_accepted_tokens} accepted of {self.num_draft_tokens} drafted; "
                "expected no more accepted than drafted. Leave the bonus token out of the accepted ones."
            )

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted drafts, bonus tokens excluded."""
        return sum(self.accepted_per_pos)


@dataclass(frozen=True)
class GateVerdict:
    """Whether the retrained head may be exported, and why.

    Attributes:
        passed: True when the lower bound of the gain in tau lies above 0.
        baseline: Arm the retrained head was compared with.
        delta_tau_ci95: Paired 95 % interval of tau(retrained) - tau(baseline), whatever confidence the gate used; None
            where there is none to state.
        reason: One sentence with the figures that decided, without its full stop: a caller may add a command to copy.
    """

    passed: bool
    baseline: str
    delta_tau_ci95: Interval | None
    reason: str


def tau(counts: Sequence[PromptCounts]) -> float:
    """Return the mean tokens committed per round, pooled over prompts; 1.0 where nothing was drafted."""
    _require_prompts(counts)
    rounds = sum(c.rounds for c in counts)
    return 1.0 + sum(c.num_accepted_tokens for c in counts) / rounds if rounds else 1.0


def acceptance_rate(counts: Sequence[PromptCounts]) -> float | None:
    """Return accepted over drafted tokens, pooled over prompts; None where nothing was drafted."""
    drafted = sum(c.num_draft_tokens for c in counts)
    return sum(c.num_accepted_tokens for c in counts) / drafted if drafted else None


def marginal(counts: Sequence[PromptCounts]) -> list[float]:
    """Return, for each position, the share of rounds that accepted it. Its sum is ``tau - 1``.

    Example:
        FastMTP (arXiv:2509.18362) reports .81 .56 .36 and tau 2.73 = 1 + .81 + .56 + .36: marginal figures. The same
        head in conditional figures reads .81 .69 .64.

    Returns:
        K shares; empty where nothing was drafted.
    """
    rounds = sum(c.rounds for c in counts)
    return [float(total) / rounds for total in _accepted_PK(counts).sum(axis=0)] if rounds else []


def conditional(counts: Sequence[PromptCounts]) -> list[float | None]:
    """Return, for each position, the share of the rounds that reached it which accepted it.

    Returns:
        K shares, None at a position that no round reached; empty where nothing was drafted.
    """
    rounds = sum(c.rounds for c in counts)
    if not rounds:
        return []
    chain = [float(rounds), *_accepted_PK(counts).sum(axis=0).tolist()]
    return [later / earlier if earlier else None for earlier, later in pairwise(chain)]


def tau_interval(
    counts: Sequence[PromptCounts], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Interval | None:
    """Return the bootstrap interval of tau over prompts; None for a single prompt, which shows no spread."""
    weights_RP = _resampled_weights(len(counts), resamples, seed)
    return _interval(_resampled_tau(counts, weights_RP), confidence, len(counts))


def marginal_intervals(
    counts: Sequence[PromptCounts], confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> list[Interval | None]:
    """Return the bootstrap interval over prompts of each entry of :func:`marginal`."""
    weights_RP = _resampled_weights(len(counts), resamples, seed)
    rounds_R = np.maximum(weights_RP @ _rounds_P(counts), 1)
    shares_RK = (weights_RP @ _accepted_PK(counts)) / rounds_R[:, None]
    return [_interval(shares_R, confidence, len(counts)) for shares_R in shares_RK.T]


def delta_tau_interval(
    a: Sequence[PromptCounts],
    b: Sequence[PromptCounts],
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval | None:
    """Return the paired bootstrap interval of ``tau(a) - tau(b)``: each resample takes the same prompts of both.

    Raises:
        ValueError: The two were not decoded on the same prompts.
    """
    b = _paired(a, b)
    weights_RP = _resampled_weights(len(a), resamples, seed)
    return _interval(_resampled_tau(a, weights_RP) - _resampled_tau(b, weights_RP), confidence, len(a))


def min_gate_prompts(confidence: float = 0.95) -> int:
    """Return the fewest prompts that can show a gain: luck alone favours one head on all n with chance 2 ** -n."""
    _require_confidence(confidence)
    return max(2, math.ceil(-math.log2(1.0 - confidence)))


def decide_gate(
    retrained: Sequence[PromptCounts], baseline: Sequence[PromptCounts], baseline_name: str, confidence: float = 0.95
) -> GateVerdict:
    """Decide whether a retrained head is better than its baseline.

    It passes when the lower bound of the paired, prompt-clustered interval of the gain in tau lies above 0, on at least
    :func:`min_gate_prompts` prompts.

    Args:
        retrained: Counts of the retrained head.
        baseline: Counts of the baseline on the same prompts.
        baseline_name: The baseline's arm.
        confidence: Confidence of the two-sided interval that decides.
    """
    needed = min_gate_prompts(confidence)
    if not sum(c.rounds for c in retrained):
        reason = "the retrained head decoded no round: there is nothing to judge it by. Raise evaluate.max_new_tokens"
        return GateVerdict(False, baseline_name, None, reason)
    ci95 = delta_tau_interval(retrained, baseline)
    interval = delta_tau_interval(retrained, baseline, confidence)
    figures = f"tau {tau(retrained):.2f} against {tau(baseline):.2f} ({baseline_name}) on {len(retrained)} prompts"
    if interval is None or len(retrained) < needed:
        reason = f"{figures}; {confidence:.4g} confidence needs at least {needed} prompts. Raise evaluate.prompts"
        return GateVerdict(False, baseline_name, ci95, reason)
    low, high = interval
    passed = low > 0.0
    rule = f"the {100 * confidence:.4g} % interval of the gain, [{low:+.3f}, {high:+.3f}],"
    reason = f"{figures}: {rule} {'lies' if passed else 'does not lie'} above 0"
    return GateVerdict(passed, baseline_name, ci95, reason)


def repeated_ngram_share(token_lists: Iterable[Sequence[int]], n: int = 8) -> float | None:
    """Return the share of n-grams that already occurred earlier in the same output, pooled over outputs.

    Greedy loops are easy to draft, so that a high share means an inflated tau.

    Returns:
        The share in 0..1; None where no output has n tokens.
    """
    total = repeated = 0
    for tokens in token_lists:
        grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        total += len(grams)
        repeated += len(grams) - len(set(grams))
    return repeated / total if total else None


def accept_greedy(draft_K: Tensor, target_K1: Tensor) -> Tensor:
    """Count the drafts that greedy decoding accepts: the longest prefix equal to the trunk's own choices.

    Stays on the tensors' device, without synchronising.

    Example:
        draft ``[5, 7, 9]``, trunk ``[5, 7, 2, 4]``: 2 are accepted and token 2 is committed after them.

    Args:
        draft_K: Drafted ids, shape (..., K).
        target_K1: The trunk's argmax after the last committed token and after each draft, shape (..., K + 1).

    Returns:
        Number of accepted drafts in 0..K, int64, shape (...); a 0-d tensor for a single row.
    """
    return (draft_K == target_K1[..., :-1]).cumprod(-1).sum(-1)


def overlap(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """Return ``sum_v min(p, q)`` for each row: the chance that rejection sampling accepts a draft from q.

    Leviathan et al. (arXiv:2211.17192), Theorem 3.5: the expectation, free of sampling noise.
    """
    return p_NV.minimum(q_NV).sum(-1)


def entropy(p_NV: Tensor) -> Tensor:
    """Return the entropy of each row in nats; entries of probability 0 add nothing."""
    return -p_NV.xlogy(p_NV).sum(-1)


def _require_prompts(counts: Sequence[PromptCounts]) -> None:
    if not counts:
        raise ValueError("acceptance: no prompts; expected at least one. Evaluate on more prompts.")


def _require_confidence(confidence: float) -> None:
    if not 0.0 < confidence < 1.0:
        raise ValueError(f"confidence: {confidence}; expected a number between 0 and 1. Use 0.95.")


def _rounds_P(counts: Sequence[PromptCounts]) -> FloatArray:
    return np.array([c.rounds for c in counts], dtype=np.float64)


def _accepted_PK(counts: Sequence[PromptCounts]) -> FloatArray:
    depths = sorted({len(c.accepted_per_pos) for c in counts if c.rounds})
    if len(depths) > 1:
        raise ValueError(
            f"acceptance: prompts decoded at depths {depths}; expected one depth, as per-position figures of different "
            "depths do not compare. Evaluate each depth on its own."
        )
    width = depths[0] if depths else 0
    # A prompt that ended at prefill has no round, and may bring no positions either.
    return np.array([c.accepted_per_pos if c.rounds else (0,) * width for c in counts], dtype=np.float64)


def _paired(a: Sequence[PromptCounts], b: Sequence[PromptCounts]) -> list[PromptCounts]:
    """Return b in the order of a's prompts."""
    by_id = {c.prompt_id: c for c in b}
    names = [c.prompt_id for c in a]
    if len(by_id) != len(b) or len(set(names)) != len(names) or by_id.keys() != set(names):
        odd = sorted(by_id.keys() ^ set(names))
        raise ValueError(
            f"paired comparison: {len(a)} and {len(b)} prompts, {len(odd)} without a partner {odd[:3]}; expected each "
            "prompt once in both. Decode both arms on the same prompts."
        )
    return [by_id[name] for name in names]


def _resampled_weights(num_prompts: int, resamples: int, seed: int) -> FloatArray:
    """Draw how often each prompt occurs in each resample, shape (R, P)."""
    if not num_prompts:
        raise ValueError("interval: no prompts; expected at least one. Evaluate on more prompts.")
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=resamples).astype(np.float64)


def _resampled_tau(counts: Sequence[PromptCounts], weights_RP: FloatArray) -> FloatArray:
    accepted_P = np.array([c.num_accepted_tokens for c in counts], dtype=np.float64)
    # A resample without any round accepted nothing either: 1 + 0 / 1.
    tau_R: FloatArray = 1.0 + (weights_RP @ accepted_P) / np.maximum(weights_RP @ _rounds_P(counts), 1.0)
    return tau_R


def _interval(values_R: FloatArray, confidence: float, num_prompts: int) -> Interval | None:
    """Return the expanded percentile interval of bootstrap values over ``num_prompts`` prompts."""
    _require_confidence(confidence)
    if num_prompts < 2:
        return None
    # A bootstrap spreads like a normal with variance divided by n; the honest spread is a t with n - 1.
    scale = math.sqrt(num_prompts / (num_prompts - 1)) * _t_quantile((1.0 + confidence) / 2.0, num_prompts - 1)
    tail = NormalDist().cdf(-scale)
    low, high = np.quantile(values_R, [tail, 1.0 - tail])
    return float(low), float(high)


def _t_quantile(share: float, freedom: int) -> float:
    """Return Student's t quantile by its expansion in 1 / freedom (Abramowitz and Stegun 26.7.5)."""
    z = NormalDist().inv_cdf(share)
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )
