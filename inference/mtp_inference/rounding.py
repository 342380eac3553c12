"""Measure how far rounding moves the logits of a trunk in the dtype that it decodes in.

Only the contenders for a token count: the largest logits of either side at a new token. Over the whole vocabulary the
largest error lies on some token of no probability, mostly at a token of the chat template, and is several times larger.

Errors are differences from a reference: one forward over the text without a cache, in fp32 where the weights can be
converted layer by layer.

Shapes: T tokens, P new tokens of a text, V vocabulary, N contenders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mtp_inference.record import Contenders, FloatArray, TextRecord
from mtp_inference.sampling.chooser import choose
from mtp_inference.sampling.distributions import SamplingRows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.precision import HALF_DTYPES

MEASURED_TEXTS, MEASURED_NEW_TOKENS, MEASURED_TOKENS = 16, 64, 8192
"""Largest numbers of texts that errors are measured at, of new tokens of each, and of tokens of all together, prompts
included. One text is measured whatever its length."""
QUANTILE, HALF_RATIO, FP32_RATIO = 0.9, 1.5, 4.0
"""An error is over the limit if it exceeds this quantile of the errors of correct decoding by a ratio. In fp32 it is
larger: plain decoding itself is the measure there, whose errors depend on the size of its batch, and any fault moves
logits by much more."""
LEAST_SHARE = 0.01
"""Smallest share of errors over the limit to assume of correct decoding, as few tokens are measured."""
MOST_FP32_STEPS = 4096
"""Largest error of plain decoding in fp32, in units of fp32's rounding of the largest logit; 300 at most was measured
in 14 tiny families. More is an error of the model or of its cache and no rounding."""

Text = tuple[tuple[int, ...], TextRecord]
"""New token ids, and what their rounds decided on."""
IntArray = NDArray[np.int64]


class Forward(NamedTuple):
    """A forward over a text, at its first new tokens."""

    best: Contenders
    choices_P: IntArray
    """The tokens that its logits give, with the random numbers of the text."""


@torch.inference_mode()
def forward(trunk: Trunk, text: Text, *, in_fp32: bool) -> Forward:
    """Run transformers' forward over a text without a cache."""
    tokens, record = text
    ids = [*record.prompt_ids, *tokens[: MEASURED_NEW_TOKENS - 1]]
    with trunk.computing_in(torch.float32) if in_fp32 else nullcontext():
        hidden_TD = trunk.hidden(torch.tensor([ids], device=trunk.lm_head_VD.device))[0]
        logits_PV = trunk.logits(hidden_TD[len(record.prompt_ids) - 1 :]).float()
    # The forward has a logit more where the text has ended before.
    logits_PV = logits_PV[: len(tokens)]
    position_1P = len(record.prompt_ids) + torch.arange(len(logits_PV), device=logits_PV.device)[None]
    choices_1P, _ = choose(logits_PV[None], SamplingRows.stack([record.sampling], logits_PV.device), position_1P)
    return Forward(Contenders.of(logits_PV), choices_1P[0].cpu().numpy())


def distances(best: Contenders, other: Contenders) -> FloatArray:
    """Return the largest difference of a logit at each position, (P,), over the contenders of both.

    The logit of a contender that the other side does not list is at most the smallest that it lists.
    """
    is_same_PNN = best.ids_PN[:, :, None] == other.ids_PN[:, None, :]
    return np.maximum(_one_way(best, other, is_same_PNN), _one_way(other, best, is_same_PNN.swapaxes(1, 2)))


def _one_way(best: Contenders, other: Contenders, is_same_PNN: NDArray[np.bool_]) -> FloatArray:
    listed_PN = np.take_along_axis(other.values_PN, is_same_PNN.argmax(-1), axis=1)
    bound_PN = np.minimum(best.values_PN, other.values_PN[:, -1:])
    # Equal infinities, of tokens that the model excludes, have no difference.
    with np.errstate(invalid="ignore"):
        difference_PN = np.abs(best.values_PN - np.where(is_same_PNN.any(-1), listed_PN, bound_PN))
    return np.nan_to_num(difference_PN, nan=0.0).max(-1)


class Rounding:
    """How far rounding moves the logits of a trunk along texts of plain decoding, and how often it changes a token.

    Args:
        texts: Texts of plain decoding with one setting. The first few of them are measured.
    """

    def __init__(self, trunk: Trunk, texts: Sequence[Text]) -> None:
        self._trunk = trunk
        self._widens = trunk.lm_head_VD.dtype in HALF_DTYPES and not trunk.offloaded
        lengths = [len(record.prompt_ids) + min(len(tokens), MEASURED_NEW_TOKENS) for tokens, record in texts]
        fits = np.cumsum(lengths[:MEASURED_TEXTS]) <= MEASURED_TOKENS
        measured = texts[: max(1, int(fits.sum()))]
        self.references = [self.reference(text) for text in measured]
        plain = [errors(text, reference) for text, reference in zip(measured, self.references, strict=True)]
        self.plain_errors = plain
        """Those of each measured text."""
        plain_flips = _num_flips([tokens for tokens, _ in measured], self.references)
        largest_logit = max(float(np.abs(one.best.values_PN[:, 0]).max()) for one in self.references)
        step = torch.finfo(trunk.lm_head_VD.dtype).eps * largest_logit
        if self._widens:
            # transformers' own forward in this dtype is correct, whatever the decoder does.
            stock = [forward(trunk, text, in_fp32=False) for text in measured]
            correct = [distances(one.best, other.best)[1:] for one, other in zip(stock, self.references, strict=True)]
            stock_flips = _num_flips([one.choices_P for one in stock], self.references)
        else:
            # It is the reference, without an error of its own.
            correct = plain
            stock_flips = 0
        # Texts of a single token have no errors.
        correct_errors = np.concatenate([*correct, [step]])
        ratio = HALF_RATIO if self._widens else FP32_RATIO
        self.limit = ratio * max(step, float(np.quantile(correct_errors, QUANTILE)))
        """The error in a window that few tokens may exceed."""
        # Packed weights may be multiplied in fewer bits, whatever the dtype of the other weights.
        computes_fp32 = all(parameter.dtype is torch.float32 for parameter in trunk.causal_lm.parameters())
        exact_limit = MOST_FP32_STEPS * step if computes_fp32 else math.inf
        self.plain_limit = self.limit if self._widens else exact_limit
        """The same for plain decoding. Where it is measured against transformers' forward in the same dtype, only fp32
        has a limit."""
        self.share_over_limit = max(LEAST_SHARE, float((correct_errors > self.limit).mean()))
        """Share of new tokens of correct decoding with an error over the limit."""
        self.largest = float(np.concatenate([*plain, correct_errors]).max())
        """Largest error of a contender's logit in correct decoding, at least the rounding of the largest logit."""
        flips = plain_flips + max(plain_flips, stock_flips)
        self.most_flips = (flips + 2 * math.sqrt(flips + 1) + 1) / max(1, sum(map(len, plain)))
        """Upper bound of the share of new tokens that are another one in correct windows than in plain decoding: the
        tokens of both may differ from the reference's."""

    def reference(self, text: Text) -> Forward:
        return forward(self._trunk, text, in_fp32=self._widens)


def errors(text: Text, reference: Forward, num_tokens: int = MEASURED_NEW_TOKENS) -> FloatArray:
    """Return the errors of a text's logits at its first new tokens but the very first, which no window decides."""
    tokens, record = text
    best = record.best(min(num_tokens, len(tokens), len(reference.choices_P)))
    return distances(best, reference.best.part(0, len(best)))[1:]


def _num_flips(choices: Sequence[Sequence[int] | IntArray], references: Sequence[Forward]) -> int:
    """Return how many new tokens, but the first ones, are another one than the reference's."""
    return sum(
        int((np.array(chosen[: len(reference.choices_P)]) != reference.choices_P)[1:].sum())
        for chosen, reference in zip(choices, references, strict=True)
    )
