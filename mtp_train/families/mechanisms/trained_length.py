"""Keep the rotary frequencies of texts up to the trained length, and refuse longer texts.

LongRoPE (arXiv:2402.13753) in Phi has one set of rotary frequencies for short texts, another for long texts; dynamic
frequencies are scaled with the length of a text. transformers selects them by the last position of each forward, for
all of its rows. A draft beyond the limit, or another row of the batch, would change a token's keys. Here those for
short texts are always used.
"""

from __future__ import annotations

import copy
import sys
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.upstream.transformers_private import CACHE


def short_factors(config: PretrainedConfig) -> PretrainedConfig:
    """Return a config whose rotary embedding has the frequencies for short texts only: a copy, or the config itself if
    it has no LongRoPE."""
    rope = config.rope_parameters
    if rope["rope_type"] != "longrope":
        return config
    changed = copy.deepcopy(config)
    changed.rope_parameters = {**rope, "long_factor": rope["short_factor"]}
    return changed


def keep_short_factors(decoder: Any) -> None:
    """Fix a trunk's frequencies to the set for short texts, and make its forward raise for longer texts.

    The forward has to be called with ``input_ids`` as a keyword. It raises an UnsupportedModelError.
    """
    rope = decoder.config.rope_parameters
    if rope["rope_type"] != "longrope":
        return
    # transformers computes the set for long texts from this config, at the first forward.
    decoder.rotary_emb.config = short_factors(decoder.config)
    _refuse_longer(decoder, int(rope["original_max_position_embeddings"]), "original_max_position_embeddings")


def keep_dynamic_frequencies(rotary: Any) -> bool:
    """Fix the frequencies of a rotary embedding that scales them with the length of a text (``dynamic``).

    Up to the trained length, transformers scales none.

    Returns:
        Whether it is such an embedding.
    """
    kinds = getattr(rotary, "rope_type", None)
    is_dynamic = "dynamic" in (kinds.values() if isinstance(kinds, dict) else (kinds,))
    if is_dynamic:
        # It scales beyond the first, and goes back below the second.
        rotary.max_seq_len_cached = rotary.original_max_seq_len = sys.maxsize
    return is_dynamic


def keep_trained_length(decoder: Any) -> None:
    """Fix a trunk's frequencies if they are dynamic, and make its forward raise for texts beyond the trained length."""
    if keep_dynamic_frequencies(getattr(decoder, "rotary_emb", None)):
        _refuse_longer(decoder, int(decoder.config.max_position_embeddings), "max_position_embeddings")


def _refuse_longer(decoder: Any, limit: int, field: str) -> None:
    def refuse_longer(_decoder: nn.Module, _arguments: tuple[Any, ...], given: dict[str, Any]) -> None:
        num_tokens = given["input_ids"].shape[1]
        cache = given.get(CACHE)
        # get_mask_sizes returns the number of keys and the first position without a device synchronisation. Their sum
        # bounds the length of the longest row's text, this window included.
        last = num_tokens if cache is None else sum(cache.layers[0].get_mask_sizes(num_tokens))
        # A window that begins within the limit may end beyond it: its last tokens may be drafts that are rejected.
        if last - num_tokens >= limit or num_tokens > limit:
            raise UnsupportedModelError(
                f"trunk: a text of up to {last} tokens; expected at most {limit} ({field}): "
                "beyond it this model has other rotary frequencies. Shorten prompts, max_new_tokens or "
                "data.seq_len_tokens."
            )

    decoder.register_forward_pre_hook(refuse_longer, with_kwargs=True)
