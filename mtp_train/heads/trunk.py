"""The frozen trunk: load it, and take from it only what the head needs.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Cache, PretrainedConfig

from mtp_train.errors import CheckpointError
from mtp_train.families import Family


class Trunk(nn.Module):
    """A decoder whose tokens count, with its hidden states open to the head.

    Args:
        model: A transformers causal language model, possibly wrapped by peft.
        family: Its record.
    """

    def __init__(self, model: Any, family: Family) -> None:
        super().__init__()
        self.model: Any = model
        self.family = family

    @property
    def causal_lm(self) -> Any:
        """The transformers model itself, also where peft wraps it."""
        return self.model.base_model.model if hasattr(self.model, "peft_config") else self.model

    @property
    def config(self) -> PretrainedConfig:
        """The text config."""
        config: PretrainedConfig = self.causal_lm.config.get_text_config()
        return config

    @property
    def lm_head_VD(self) -> Tensor:
        """The output matrix, shape (V, D)."""
        weight: Tensor = self.causal_lm.get_output_embeddings().weight
        return weight

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Return the input embedding of tokens, shape (B, T, D)."""
        embedded: Tensor = self.causal_lm.get_input_embeddings()(tokens_BT)
        return embedded

    def hidden(self, tokens_BT: Tensor, *, mask_BT: Tensor | None = None, cache: Cache | None = None) -> Tensor:
        """Return the hidden state after the final norm, which both the lm_head and the head read. Shape (B, T, D).

        Args:
            tokens_BT: int tokens.
            mask_BT: 1 on tokens, 0 on right padding; None where there is none.
            cache: Earlier tokens' state; updated in place.
        """
        output = self.causal_lm.model(
            input_ids=tokens_BT, attention_mask=mask_BT, past_key_values=cache, use_cache=cache is not None
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def window_hidden(
        self, tokens_BT: Tensor, *, positions_BT: Tensor, masks: Mapping[str, Tensor | None], cache: Cache
    ) -> Tensor:
        """Return the hidden states of tokens at given positions, each row at its own. Shape (B, T, D).

        Args:
            tokens_BT: int tokens.
            positions_BT: int, their positions.
            masks: Layer type to a bool mask (B, 1, T, S), True where a token sees a key; None is plain causal.
            cache: Earlier tokens' state; it knows where the window goes.
        """
        by_type = self.family.masks_by_layer_type
        output = self.causal_lm.model(
            input_ids=tokens_BT,
            position_ids=positions_BT,
            attention_mask=masks if by_type else next(iter(masks.values())),
            past_key_values=cache,
            use_cache=True,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states of any leading shape."""
        logits: Tensor = self.causal_lm.lm_head(hidden)
        return logits


def load_trunk(
    path: Path,
    family: Family,
    *,
    dtype: torch.dtype | str,
    device: torch.device | str = "cpu",
    adapter: Path | None = None,
    trust_remote_code: bool = False,
) -> Trunk:
    """Load the language model of a checkpoint, frozen and in eval mode.

    Args:
        path: A checkpoint directory; a vision-language wrapper gives its text model.
        family: The record that ``family_for`` picked.
        dtype: A torch dtype, or ``"auto"`` for the checkpoint's own.
        device: A torch device name.
        adapter: A peft adapter directory, applied unmerged.
        trust_remote_code: Whether code beside the weights may run.

    Raises:
        CheckpointError: Weights of the trunk are missing or do not fit.
    """
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=trust_remote_code, output_loading_info=True, low_cpu_mem_usage=True
    )
    missing = sorted(info["missing_keys"])
    if missing:
        raise CheckpointError(
            f"{path}: trunk weights {', '.join(missing[:5])} are missing ({len(missing)} in all); expected every "
            "weight of the decoder. Point model.trunk at the complete checkpoint."
        )
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    model.requires_grad_(False)
    return Trunk(model.to(device), family).eval()
