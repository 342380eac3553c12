"""Check that texts decoded with drafts are those of plain decoding, in every dtype.

Two questions are asked of every text:

- Did the rule do what it says? :mod:`mtp_inference.rule` decides every token again, from what the rounds recorded.
  There is no tolerance.
- Are the logits of the decoder's windows those of the trunk? Windows multiply other shapes than plain decoding, so that
  logits differ in their last bits, and two tokens that are nearly as good may change places. Three limits follow from
  the rounding of this trunk in this dtype (:mod:`mtp_inference.rounding`):

  - At the first difference of two texts, the contenders' logits differ by no more than :data:`TIE_RATIO` times the
    largest error of correct decoding: a near tie.
  - Few errors in windows are larger than those of correct decoding (``Rounding.limit``).
  - Texts part no more often than rounding changes tokens (``Rounding.most_flips``).

A fault that moves the contenders' logits by less than rounding does is not found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from mtp_inference.record import FloatArray
from mtp_inference.requests import GenerationResult
from mtp_inference.rounding import Rounding, Text, distances, errors
from mtp_inference.rule import first_broken
from mtp_train.errors import MtpError
from mtp_train.trunk.load import Trunk

TIE_RATIO = 2.0
"""Each of two logits may be wrong by the largest error."""
OVER_RATIO, SPARE_TOKENS = 2.5, 12
"""Tokens over the limit of errors that count as rounding: the ratio to those of correct decoding, and so many that a
few texts have by chance. In bf16, correct windows of 14 tiny families had at most 53 % of this number in 8 texts."""
CheckVerdict = Literal["identical", "near_tie", "sampled", "plain", "divergence"]
"""What was found of a text.

- ``identical``: it is the text of plain decoding.
- ``near_tie``: rounding decides between the two tokens of the first difference.
- ``sampled``: its drafts were sampled, so that it has the distribution of plain decoding and other noise.
- ``plain``: it is a text of plain decoding.
- ``divergence``: a bug. The rule does not give it, or it differs by more than rounding.
"""


@dataclass(frozen=True, kw_only=True)
class TextCheck:
    """The result of checking one text."""

    verdict: CheckVerdict
    position: int | None = None
    """Index of the first new token that differs from plain decoding, or that the rule does not give."""
    follows_rule: bool = True
    error: float | None = None
    """Largest difference of the contenders' logits from plain decoding, at the first difference of the texts. Of a
    plain text: largest error in correct decoding of the measured texts."""
    measured: int = 0
    """Number of new tokens at which the text's logits were compared with the reference."""
    over_limit: int = 0
    """Number of these with an error over ``Rounding.limit``."""
    expected_over_limit: float = 0.0
    """Number of such tokens in correct decoding."""
    expected_differences: float = 0.0
    """Upper bound of the expected number of differences that rounding makes up to the first one."""


class PlainTexts:
    """Texts of plain decoding with one setting, which texts with drafts are checked against.

    Args:
        trunk: The target model that decoded them.
        results: Results without drafts, of a decoder with ``records=True``.
    """

    def __init__(self, trunk: Trunk, results: Sequence[GenerationResult]) -> None:
        self._texts = [_text_of(one) for one in results]
        self._rounding = Rounding(trunk, self._texts)
        self.checks = [self._check_plain(index) for index in range(len(results))]
        """A check of each of these texts."""

    def _check_plain(self, index: int) -> TextCheck:
        text = self._texts[index]
        rounding = self._rounding
        found = replace(_check_rule(text, "plain"), error=rounding.largest)
        if index >= len(rounding.plain_errors):
            return found
        return self._counted(found, rounding.plain_errors[index], rounding.plain_limit)

    def check(self, index: int, drafted: GenerationResult) -> TextCheck:
        """Check a text with drafts against the plain text at this index, of the same prompt with the same settings."""
        text, plain, rounding = _text_of(drafted), self._texts[index], self._rounding
        if replace(text[1], rounds=()) != replace(plain[1], rounds=()):
            raise MtpError(
                f"compare: result {index + 1} has another prompt or other settings than its plain text; expected the "
                "same request. Decode the same requests with drafts and without."
            )
        found = _check_rule(text, "sampled" if text[1].samples_drafts else "identical")
        if not found.follows_rule:
            return found
        reference = rounding.references[index] if index < len(rounding.references) else None
        num_shared = len(text[0])
        if found.verdict == "sampled":
            # No other text has the same tokens.
            reference = reference and rounding.reference(text)
        else:
            found, num_shared = self._beside(found, text, plain)
        return self._counted(found, errors(text, reference, num_shared), rounding.limit) if reference else found

    def _counted(self, found: TextCheck, errors_P: FloatArray, limit: float) -> TextCheck:
        expected = self._rounding.share_over_limit * len(errors_P)
        over_limit = int((errors_P > limit).sum())
        return replace(found, measured=len(errors_P), over_limit=over_limit, expected_over_limit=expected)

    def _beside(self, found: TextCheck, text: Text, plain: Text) -> tuple[TextCheck, int]:
        """Return the check of a text beside the plain one, and the number of tokens up to their first difference."""
        pairs = enumerate(zip(text[0], plain[0], strict=False))
        position = next((index for index, (one, other) in pairs if one != other), None)
        num_shared = len(text[0]) if position is None else position + 1
        found = replace(found, expected_differences=self._rounding.most_flips * (num_shared - 1))
        if position is None:
            return found, num_shared
        own, other = (record.best(num_shared).part(position) for _, record in (text, plain))
        error = float(distances(own, other)[0])
        verdict: CheckVerdict = "near_tie" if error <= TIE_RATIO * self._rounding.largest else "divergence"
        return replace(found, verdict=verdict, position=position, error=error), num_shared


def compare(drafted: Sequence[GenerationResult], plain: Sequence[GenerationResult], trunk: Trunk) -> list[TextCheck]:
    """Check texts decoded with drafts against plain decoding of the same prompts with the same settings.

    Args:
        drafted: Results of a decoder with ``records=True``.
        plain: Results of such a decoder for the same prompts, without drafts.
        trunk: The target model that decoded both.

    Returns:
        The checks of the drafted texts, then those of the plain ones. :func:`fault_of` judges them together.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, compare, fault_of
        >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu", records=True)
        >>> drafted, plain = (decoder.generate(["import ", "def add("], 16, mtp=mtp) for mtp in ("on", "off"))
        >>> checks = compare(drafted, plain, decoder.trunk)
        >>> [one.verdict for one in checks], fault_of(checks)
        (['identical', 'identical', 'plain', 'plain'], None)
    """
    texts = PlainTexts(trunk, plain)
    return [*(texts.check(index, one) for index, one in enumerate(drafted)), *texts.checks]


def fault_of(checks: Sequence[TextCheck]) -> str | None:
    """Return what is wrong with the decoder, judged by the checks of one setting; None if it is lossless."""
    broken = sum(not one.follows_rule for one in checks)
    far = sum(one.verdict == "divergence" for one in checks)
    for count, told in (
        (broken, "have a token that the round's own logits and drafts do not give"),
        (far, "differ from plain decoding where the logits differ by more than rounding"),
    ):
        if count:
            return f"{count} of {len(checks)} texts {told}"
    for name, is_plain in (("windows", False), ("plain decoding", True)):
        some = [one for one in checks if (one.verdict == "plain") is is_plain]
        over_limit = sum(one.over_limit for one in some)
        if over_limit > OVER_RATIO * sum(one.expected_over_limit for one in some) + SPARE_TOKENS:
            measured = sum(one.measured for one in some)
            return f"the logits of {name} have larger errors than rounding makes, at {over_limit} of {measured} tokens"
    parted = sum(one.verdict == "near_tie" for one in checks)
    expected = sum(one.expected_differences for one in checks)
    # A number of independent events exceeds this with a probability of about 1e-5.
    if parted > expected + 4.3 * math.sqrt(expected) + 3:
        return f"{parted} texts part from plain decoding, where rounding makes at most {expected:.1f} part"
    return None


def _text_of(result: GenerationResult) -> Text:
    if result.record is None:
        raise MtpError(
            "compare: a result without a record of its rounds; expected results of a decoder with records. Create it "
            "by SpeculativeDecoder(..., records=True)."
        )
    return result.token_ids, result.record


def _check_rule(text: Text, verdict: CheckVerdict) -> TextCheck:
    position = first_broken(*text)
    if position is None:
        return TextCheck(verdict=verdict)
    return TextCheck(verdict="divergence", position=position, follows_rule=False)
