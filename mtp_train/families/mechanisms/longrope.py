"""LongRoPE (arXiv:2402.13753) in Phi: one set of rotary frequencies for short texts, another for long texts.

transformers selects the set by the last position of each forward, for all of its rows. A draft beyond the limit, or
another row of the batch, would change a token's keys. Here the set for short texts is always used, and longer texts are
refused.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.errors import UnsupportedModelError


def short_factors(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config whose rotary embedding has the frequencies for short texts only: a copy, or the config itself if
    it has no LongRoPE."""
    rope = config.rope_parameters
    if rope["rope_type"] != "longrope":
        return config
    changed = copy.deepcopy(config)
    changed.rope_parameters = {**rope, "long_factor": rope["short_factor"]}
    return changed


def keep_short_factors(decoder: nn.Module) -> None:
    """Fix a trunk's frequencies to the set for short texts, and make its forward raise for longer texts.

    The forward has to be called with ``input_ids`` as a keyword. It raises an UnsupportedModelError.
    """
    trunk: Any = decoder
    rope = trunk.config.rope_parameters
    if rope["rope_type"] != "longrope":
        return
    # transformers computes the set for long texts from this config, at the first forward.
    trunk.rotary_emb.config = short_factors(trunk.config)
    limit = int(rope["original_max_position_embeddings"])

    def refuse_longer(_decoder: nn.Module, _arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        num_tokens, cache = given["input_ids"].shape[1], given.get("past_key_values")
        # get_mask_sizes returns the number of keys and the first position without a device synchronisation. Their sum
        # bounds the length of the longest row's text, this window included.
        last = num_tokens if cache is None else sum(cache.layers[0].get_mask_sizes(num_tokens))
        # A window that begins within the limit may end beyond it: its last tokens may be drafts that are rejected.
        if last - num_tokens >= limit or num_tokens > limit:
            raise UnsupportedModelError(
                f"trunk: a text of up to {last} tokens; expected at most {limit} (original_max_position_embeddings): "
                "beyond it this model has other rotary frequencies. Shorten prompts, max_new_tokens or "
                "data.seq_len_tokens."
            )

    decoder.register_forward_pre_hook(refuse_longer, with_kwargs=True)
