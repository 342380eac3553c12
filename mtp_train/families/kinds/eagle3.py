"""EAGLE-3 heads (arXiv:2503.01840): one Llama layer that reads the states of three layers of the trunk.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.engines import Convention, no
from mtp_train.families.kinds import llama
from mtp_train.families.kinds.kind import Block, DraftFormat, DraftParts
from mtp_train.families.layouts import key_rules
from mtp_train.families.spec import Family, HeadLayer, RawConfig, Wiring

_NUM_STATES = 3


class Eagle3Layer(nn.Module):
    """The layer, whose attention reads the embedding and the hidden state, concatenated.

    Args:
        layer: A pre-norm decoder layer like Llama's. The input of its attention is widened to twice its width.
        hidden_norm: Norm of the hidden state. The layer's own first norm becomes the norm of the embedding.
        adds_normed: Whether the attention's output is added to the normed hidden state (``norm_before_residual``, which
            speculators sets in many checkpoints) or, as in the paper, to the hidden state itself.
    """

    def __init__(self, layer: Any, hidden_norm: nn.Module, *, adds_normed: bool) -> None:
        super().__init__()
        self.adds_normed = adds_normed
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = hidden_norm
        self.self_attn = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = self.self_attn.get_submodule(name)
            wide = nn.Linear(2 * narrow.in_features, narrow.out_features, bias=narrow.bias is not None)
            self.self_attn.set_submodule(name, wide)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp

    def forward(self, embedding_and_state: Tensor, **of_attention: Any) -> Tensor:
        """Run the layer: (B, T, 2 D), embedding first, to (B, T, D); other arguments as in transformers' layers."""
        embed_BTD, hidden_BTD = embedding_and_state.chunk(2, dim=-1)
        normed_BTD = self.hidden_norm(hidden_BTD)
        read_BTD = torch.cat([self.input_layernorm(embed_BTD), normed_BTD], dim=-1)
        attended, _ = self.self_attn(hidden_states=read_BTD, **of_attention)
        hidden_BTD = (normed_BTD if self.adds_normed else hidden_BTD) + attended
        return hidden_BTD + self.mlp(self.post_attention_layernorm(hidden_BTD))


class Eagle3Module(Block):
    """``z = layer([e, h])``, ``o = norm(z)``. At depth 1, ``h = fc [h_1, h_2, h_3]``, states of three trunk layers."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.fc = nn.Linear(_NUM_STATES * layer_config.hidden_size, layer_config.hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)
        self.final_norm = family.classes.make_norm(layer_config)

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return ``h`` from the concatenated states of the trunk's layers: (B, T, layers * D) to (B, T, D)."""
        return self.fc(trunk_BTD)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return embedding and state concatenated, (B, T, 2 D): the layer has a norm for each."""
        return torch.cat([embed_BTD, hidden_BTD], dim=-1)


def _reading_two(classes: HeadLayer, config: PretrainedConfig, layer_idx: int) -> nn.Module:
    # Only third-party checkpoints set it; ours must do without, for SGLang.
    adds_normed = getattr(config, "norm_before_residual", False)
    return Eagle3Layer(classes.stock_layer(config, layer_idx), classes.make_norm(config), adds_normed=adds_normed)


def _trunk_layers(text_config: PretrainedConfig) -> tuple[int, ...]:
    """Return the layers whose input the head reads: an early, the middle and a late layer, the same as in engines.

    The input of layer k is the state after k layers: transformers' ``hidden_states[k]``.
    """
    count = text_config.num_hidden_layers
    if count < _NUM_STATES:
        raise UnsupportedModelError(
            f"head.kind: eagle3 for a trunk of {count} layers; expected at least {_NUM_STATES}, because the head "
            "reads an early, a middle and a late layer. Write head.kind: mtp."
        )
    return (2, count // 2, count - 3)


def _config(
    layer_config: PretrainedConfig, num_modules: int, trunk: RawConfig, num_drafted: int | None
) -> dict[str, Any]:
    # It does not name the layers whose states the head reads: engines agree on the default, but count named layers from
    # different ends.
    return {
        **llama.draft_config(layer_config, trunk),
        "draft_vocab_size": num_drafted or layer_config.vocab_size,
        "target_hidden_size": layer_config.hidden_size,
        # Always written: vLLM's default for a missing field is true.
        "norm_before_residual": bool(getattr(layer_config, "norm_before_residual", False)),
    }


class Eagle3Parts(DraftParts):
    """An EAGLE-3 head."""

    def described(self, family: Family, config: RawConfig) -> Family:
        described = super().described(family, config)
        if not config.get("norm_before_residual"):
            return described
        # SGLang 0.5.23 adds the attention's output to the state itself.
        return replace(described, engines={**described.engines, "sglang": no("does not read norm_before_residual")})


EAGLE3 = Eagle3Parts(
    prefixes=("fc.", "midlayer.", "norm."),
    rules=key_rules(
        "", {"fc.weight": "fc.weight", "norm.weight": "final_norm.weight", "midlayer.{rest}": "layer.{rest}"}
    ),
    module=Eagle3Module,
    layer=llama.draft_layer(build_layer=_reading_two),
    wiring=Wiring(trunk_layers=_trunk_layers, default=Convention(hidden="of_layers", recycle="before_final_norm")),
    serving={
        "vllm": (llama.in_vllm("eagle3"), llama.STATES_IN_VLLM),
        "sglang": (llama.in_sglang("EAGLE3"), llama.STATES_IN_SGLANG),
        "llama.cpp": (llama.in_llama_cpp("eagle3"), llama.STATES_IN_LLAMA_CPP),
    },
    other_trunks=no("does not pass the states between this model's layers to a head"),
    other_engines=llama.NO_EAGLE,
    format=DraftFormat(
        written_as=("LlamaForCausalLMEagle3",),
        read_as=("Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"),
        config=_config,
        drafted_field="draft_vocab_size",
        draft_vocab=True,
        is_in_gguf=True,
        plain_settings=llama.PLAIN_SETTINGS,
        renames={"layers.0.": "midlayer."},
    ),
)
