"""Check the decoder on the run's own trunk before anything is trained: in seconds, instead of at the evaluation."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from rich.console import Console

from mtp_inference import NgramDrafting, SpeculativeDecoder, compare
from mtp_inference.lossless import NOISE_RATIO, measure_errors
from mtp_train.errors import NotLosslessError
from mtp_train.trunk.load import Trunk

CHECK_PROMPTS, CHECK_PROMPT_TOKENS, CHECK_NEW_TOKENS = 3, 512, 16
"""Prompts, the most tokens of each, and the tokens decoded after them."""


def check_decoder(
    trunk: Trunk, prompts: Sequence[Sequence[int]], eos_ids: Collection[int], depth: int, console: Console
) -> None:
    """Decode some prompts plainly and with drafts from the prompt, and measure the errors of the decoder's windows.

    Args:
        trunk: The run's trunk, whole on this process or its group.
        prompts: Token ids of prompts; the first :data:`CHECK_PROMPTS` are decoded.
        eos_ids: Token ids that end a text.
        depth: Drafts a round.
        console: Where the measured noise is printed.

    Raises:
        NotLosslessError: The decoder changes a text, or its windows differ from the model by more than rounding.
    """
    chosen = [list(prompt)[-CHECK_PROMPT_TOKENS:] for prompt in prompts[:CHECK_PROMPTS]]
    plain = SpeculativeDecoder(trunk, None, 0, eos_ids).decode(chosen, CHECK_NEW_TOKENS)
    drafted = SpeculativeDecoder(trunk, NgramDrafting(), depth, eos_ids).decode(chosen, CHECK_NEW_TOKENS)
    noise = 0.0
    for number, prompt in enumerate(chosen):
        tokens = plain[number].token_ids
        found = compare(drafted[number].token_ids, tokens, trunk, prompt, rounds=drafted[number].round_log)
        errors = measure_errors(trunk, prompt, tokens[:-1])
        noise = max(noise, errors.noise)
        if found.verdict == "divergence" or not errors.is_rounding:
            ratio = max(one for one in (found.window_ratio, errors.window_ratio, 0.0) if one is not None)
            raise NotLosslessError(
                f"decoder: differs from this trunk by more than rounding (prompt {number + 1}: text {found.verdict}; "
                f"typical error of logits {ratio:.1f} times that of plain decoding); expected equal texts or near "
                f"ties, and at most {NOISE_RATIO:g} times. Acceptance measured with it would mean nothing, so nothing "
                "was trained. Please report it with the trunk's config.json."
            )
    dtype = str(trunk.lm_head_VD.dtype).removeprefix("torch.")
    console.print(
        f"Decoder checked on {len(chosen)} prompts: lossless. In {dtype}, rounding moves this trunk's logits by up to "
        f"{noise:.2g}."
    )
