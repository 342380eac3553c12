"""Plain decoding by transformers' own cache, which the decoder's texts are compared with."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from mtp_train.trunk.load import Trunk
from mtp_train.upstream.transformers_private import CACHE


def hidden_after(trunk: Trunk, tokens_BT: Tensor, cache: Cache) -> Tensor:
    """Return the hidden states of tokens after those of a cache, which gets the state of these tokens too."""
    return trunk.last_state(trunk.decoder(input_ids=tokens_BT, use_cache=True, **{CACHE: cache}))


@torch.inference_mode()
def plain_greedy(trunk: Trunk, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Decode one prompt of at least one token greedily, token by token.

    Returns:
        The new token ids, the EOS that ended the text included.
    """
    cache = DynamicCache(config=trunk.config)
    tokens_1T = torch.tensor([list(prompt_ids)], device=trunk.lm_head_VD.device)
    text: list[int] = []
    while len(text) < max_new_tokens and not (text and text[-1] in eos_ids):
        tokens_1T = trunk.logits(hidden_after(trunk, tokens_1T, cache)[:, -1:]).argmax(dim=-1)
        text.append(int(tokens_1T))
    return text
