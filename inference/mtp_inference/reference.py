"""Plain greedy decoding with transformers' own cache.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import DynamicCache

from mtp_train.trunk.load import Trunk


def plain_greedy(trunk: Trunk, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Collection[int]) -> list[int]:
    """Decode one prompt greedily, token by token.

    Args:
        trunk: The target model.
        prompt_ids: Token ids, at least one.
        max_new_tokens: At least 1.
        eos_ids: Token ids that end a text.

    Returns:
        The new token ids, the EOS that ended the text included.

    Raises:
        ValueError: The prompt is empty.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, plain_greedy
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> len(plain_greedy(trunk, [4, 5, 6], 8, eos_ids=()))
        8
    """
    return generate_equal_length(trunk, [prompt_ids], max_new_tokens, eos_ids)[0]


@torch.inference_mode()
def generate_equal_length(
    trunk: Trunk, prompts: Sequence[Sequence[int]], max_new_tokens: int, eos_ids: Collection[int]
) -> list[list[int]]:
    """Decode prompts of one length together, greedily and without drafts.

    All rows run until every text has ended; tokens after a row's EOS are dropped.

    Args:
        trunk: The target model.
        prompts: Token ids of B prompts, all of the same length, at least one token each.
        max_new_tokens: At least 1.
        eos_ids: Token ids that end a text.

    Returns:
        The new token ids of each prompt, the EOS that ended the text included.

    Raises:
        ValueError: The prompts differ in length, or are empty.

    Example:
        >>> from mtp_inference import SpeculativeDecoder, generate_equal_length
        >>> trunk = SpeculativeDecoder.from_pretrained("demo:base", depth=0, device="cpu").trunk
        >>> [len(text) for text in generate_equal_length(trunk, [[4, 5], [6, 7]], 3, eos_ids=())]
        [3, 3]
    """
    lengths = sorted({len(prompt) for prompt in prompts})
    if len(lengths) != 1 or lengths[0] == 0:
        raise ValueError(f"prompts: lengths {lengths}; expected one length above 0. Group the prompts by length.")
    eos = frozenset(eos_ids)
    cache = DynamicCache(config=trunk.config)
    tokens_BT = torch.tensor([list(prompt) for prompt in prompts], device=trunk.lm_head_VD.device)
    texts: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        tokens_BT = trunk.logits(trunk.hidden(tokens_BT, cache=cache)[:, -1:]).argmax(dim=-1)
        for text, token in zip(texts, tokens_BT[:, 0].tolist(), strict=True):
            if not text or text[-1] not in eos:
                text.append(token)
        if all(text[-1] in eos for text in texts):
            break
    return texts
