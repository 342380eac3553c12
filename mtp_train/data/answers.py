"""Tell whether answers are a trunk's: the tokens that were said against the trunk's own distribution.

A token y drawn from p has probability p(y), whose mean is sum p^2 and whose variance is sum p^3 - (sum p^2)^2. Over the
tokens of a text the differences p(y) - sum p^2 add up to a martingale with steps of at most 1, so that Freedman's
inequality bounds their sum: by more than ``allowance`` it is off with probability ``FALSE_ALARM``. Another model says
tokens that the trunk finds less probable than its own; a lower temperature, more probable ones. Greedily all
probabilities are 0 or 1, and the share of the trunk's own first choices is what is left.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_train.heads.non_finite import non_finite_error
from mtp_train.heads.trunk import Trunk

FALSE_ALARM = 1e-6
"""Of one check of answers that are the trunk's, beyond what rounding makes."""
SLACK, GREEDY_SLACK = 0.02, 0.05
"""Mean differences that rounding may make: another precision moves probabilities a little, and near ties."""
ROWS_AT_A_TIME = 256

DistributionFn = Callable[[Tensor], Tensor]
"""From logits (T, V) to what each token is drawn from."""
Answer = tuple[Sequence[int], Sequence[int]]
"""The tokens of a prompt, and those of the response."""


class AnswerFit(NamedTuple):
    """How probable answers are to the trunk."""

    answers: int
    tokens: int
    found: float
    """Mean probability of the tokens that were said."""
    expected: float
    """Mean probability of tokens that the trunk itself would draw in their places."""
    allowed: float
    """Largest difference of the two that chance and rounding explain."""

    @property
    def is_trunks(self) -> bool:
        """Whether the answers can be the trunk's."""
        return abs(self.found - self.expected) <= self.allowed

    @property
    def can_tell(self) -> bool:
        """Whether tokens that the trunk finds impossible would have been noticed."""
        return self.allowed < self.expected


def allowance(variance: float, rate: float = FALSE_ALARM) -> float:
    """Return what a sum of martingale differences of at most 1 exceeds, on either side, with probability ``rate``."""
    log = math.log(2 / rate)
    return log / 3 + math.sqrt((log / 3) ** 2 + 2 * variance * log)


@torch.no_grad()
def fit_of(
    trunk: Trunk,
    answers: Sequence[Answer],
    distribution: DistributionFn,
    *,
    is_greedy: bool,
    eos_ids: Collection[int],
) -> AnswerFit:
    """Let the trunk read answers.

    Args:
        trunk: The trunk.
        answers: Prompts and responses, at least one token among these.
        distribution: How the trunk's tokens would be drawn.
        is_greedy: Whether that is its first choice.
        eos_ids: The tokens that end a response, which count as one: servers leave out which of them it was.

    Raises:
        CheckpointError: The trunk's logits are NaN or infinite.
    """
    tokens, sums = 0, [0.0, 0.0, 0.0]
    for prompt_ids, response_ids in answers:
        tokens_1T = torch.tensor([[*prompt_ids, *response_ids]], device=trunk.lm_head_VD.device)
        hidden_TD = trunk.hidden(tokens_1T)[0, len(prompt_ids) - 1 : -1]
        said_T = tokens_1T[0, len(prompt_ids) :]
        tokens += len(said_T)
        for start in range(0, len(said_T), ROWS_AT_A_TIME):
            part = slice(start, start + ROWS_AT_A_TIME)
            logits_TV = trunk.logits(hidden_TD[part])
            if not logits_TV.amax().isfinite():
                raise non_finite_error("trunk", trunk, None, tokens_1T[0].tolist(), 1)
            more = _moments(distribution(logits_TV).double(), said_T[part], sorted(eos_ids))
            sums = [one + other for one, other in zip(sums, more, strict=True)]
    found, expected, variance = sums
    allowed = allowance(max(variance, 0.0)) / tokens + (GREEDY_SLACK if is_greedy else SLACK)
    return AnswerFit(len(answers), tokens, found / tokens, expected / tokens, allowed)


def _moments(p_TV: Tensor, said_T: Tensor, eos_ids: Sequence[int]) -> list[float]:
    """Return the sums of the tokens' probabilities, of their means and of their variances."""
    if eos_ids:
        first, *others = eos_ids
        said_T = torch.where(torch.isin(said_T, said_T.new_tensor(eos_ids)), first, said_T)
        p_TV[:, first] += p_TV[:, others].sum(-1)
        p_TV[:, others] = 0.0
    mean_T = p_TV.square().sum(-1)
    variance_T = p_TV.pow(3).sum(-1) - mean_T.square()
    found_T = p_TV.gather(-1, said_T[:, None])[:, 0]
    return [float(one.sum()) for one in (found_T, mean_T, variance_T)]
