"""Drafters and measures for decoder tests: drafts that go as scripted, and how far a cache is off."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from mtp_inference.decoder import SpeculativeDecoder
from mtp_inference.draft import Drafter, make_drafter
from mtp_inference.reference import plain_greedy
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from tiny import VOCAB_SIZE

STATE_TOLERANCE = 5e-5
"""On the tiny trunks, transformers' own states after 40 single tokens and after one forward differ by up to 1e-5."""


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


class ScriptedDrafter:
    """Draft the plain text, with one wrong token where the script says.

    Beside it a real drafter sees the same rows; what it would have drafted is in ``real_drafts``.

    Args:
        text: Prompt and plain continuation.
        accepted: Drafts to get right in each round, repeated for ever.
        real: The drafter that goes along.
    """

    def __init__(self, text: Sequence[int], accepted: Sequence[int], real: Drafter) -> None:
        self.text = list(text)
        self.accepted = accepted
        self.real = real
        self.real_drafts: list[Tensor] = []
        self.num_rounds = 0
        self.num_committed = 1

    def extend(self, hidden_BTD: Tensor, next_tokens_BT: Tensor) -> None:
        self.num_committed += next_tokens_BT.shape[1]
        self.real.extend(hidden_BTD, next_tokens_BT)

    def draft(self, depth: int) -> Tensor:
        self.real_drafts.append(self.real.draft(depth))
        drafts = self.text[self.num_committed : self.num_committed + depth]
        assert len(drafts) == depth, "the scripted text is too short"
        num_right = self.accepted[self.num_rounds % len(self.accepted)]
        if num_right < depth:
            drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
        self.num_rounds += 1
        return torch.tensor([drafts])


class ScriptedDecoder(SpeculativeDecoder):
    """A decoder whose drafts are right or wrong as scripted, for one prompt."""

    def __init__(
        self,
        trunk: Trunk,
        head: MtpHead,
        depth: int,
        *,
        prompt: Sequence[int],
        accepted: Sequence[int],
        eos_ids: Sequence[int] = (),
        num_text_tokens: int = 60,
    ) -> None:
        self.plain = plain_greedy(trunk, prompt, num_text_tokens, ())
        self.text = [*prompt, *self.plain]
        self.accepted = accepted
        super().__init__(trunk, head, depth, eos_ids)

    def new_drafter(self) -> Drafter | None:
        assert self.head is not None
        return ScriptedDrafter(self.text, self.accepted, make_drafter(self.trunk, self.head, self.depth))


def state_errors(cache: Cache, trunk: Trunk, tokens: Sequence[int]) -> dict[str, float]:
    """Compare a cache with transformers' own after one plain forward over ``tokens``.

    Returns:
        The largest difference of each kind of state, relative to the largest value; infinite where shapes differ.
    """
    plain = DynamicCache(config=trunk.config)
    with torch.inference_mode():
        trunk.hidden(torch.tensor([list(tokens)]), cache=plain)
    errors: dict[str, float] = {}

    def note(kind: str, ours: Tensor, expected: Tensor) -> None:
        same_shape = ours.shape == expected.shape
        error = float((ours - expected).abs().max() / expected.abs().max()) if same_shape else float("inf")
        errors[kind] = max(error, errors.get(kind, 0.0))

    for ours, expected in zip(cache.layers, plain.layers, strict=True):
        if isinstance(expected, LinearAttentionLayer):
            conv = ours.conv_states[0]
            # transformers pads the inputs of short texts on the left, a recording layer does not.
            padded = torch.nn.functional.pad(conv, (expected.conv_states[0].shape[-1] - conv.shape[-1], 0))
            note("conv", padded, expected.conv_states[0])
            note("recurrent", ours.recurrent_states[0], expected.recurrent_states[0])
        else:
            note("keys", ours.keys, expected.keys)
            note("values", ours.values, expected.values)
    return errors
