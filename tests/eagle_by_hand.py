"""EAGLE heads written out in plain torch from the names that engines load, one text at a time and without a cache.

Nothing of the package is used here: what it trains, exports and drafts with is compared with this.

Shapes: T rows, A = three trunk states beside each other, D hidden, V the draft vocabulary, H heads, C of a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu


def _normed(weights: Mapping[str, Tensor], config: Mapping[str, Any], name: str, state_TD: Tensor) -> Tensor:
    return rms_norm(state_TD, state_TD.shape[-1:], weights[f"{name}.weight"], config["rms_norm_eps"])


def _rotated(state_HTC: Tensor, theta: float) -> Tensor:
    half = state_HTC.shape[-1] // 2
    angle_TC = torch.arange(state_HTC.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    first_HTC, second_HTC = state_HTC.split(half, dim=-1)
    cos_TC, sin_TC = angle_TC.cos(), angle_TC.sin()
    return torch.cat([first_HTC * cos_TC - second_HTC * sin_TC, second_HTC * cos_TC + first_HTC * sin_TC], dim=-1)


def _attention(weights: Mapping[str, Tensor], config: Mapping[str, Any], layer: str, read_TX: Tensor) -> Tensor:
    names = ("q_proj", "k_proj", "v_proj")
    split = [
        linear(read_TX, weights[f"{layer}.self_attn.{name}.weight"]).unflatten(-1, (-1, config["head_dim"]))
        for name in names
    ]
    query_HTC, key_HTC, value_HTC = (part_THC.transpose(0, 1) for part_THC in split)
    theta = config["rope_parameters"]["rope_theta"]
    mixed_HTC = torch.nn.functional.scaled_dot_product_attention(
        _rotated(query_HTC, theta)[None],
        _rotated(key_HTC, theta)[None],
        value_HTC[None],
        is_causal=True,
        enable_gqa=True,
    )[0]
    return linear(mixed_HTC.transpose(0, 1).flatten(1), weights[f"{layer}.self_attn.o_proj.weight"])


def _mlp(weights: Mapping[str, Tensor], layer: str, read_TD: Tensor) -> Tensor:
    gate, up, down = (weights[f"{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return linear(silu(linear(read_TD, gate)) * linear(read_TD, up), down)


def eagle3_rows(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    embeds_TD: Tensor,
    state_TD: Tensor,
    layer: str = "midlayer",
) -> Tensor:
    """Return what the next rows read, (T, D), of a text whose row 0 stands at position 0.

    Args:
        weights: As exported.
        config: The exported one.
        embeds_TD: Of each row's token.
        state_TD: Three trunk states after ``fc``, or what this function gave for the row before.
        layer: How the layer's names begin.
    """
    both_TX = torch.cat(
        [
            _normed(weights, config, f"{layer}.input_layernorm", embeds_TD),
            _normed(weights, config, f"{layer}.hidden_norm", state_TD),
        ],
        dim=-1,
    )
    state_TD = state_TD + _attention(weights, config, layer, both_TX)
    return state_TD + _mlp(weights, layer, _normed(weights, config, f"{layer}.post_attention_layernorm", state_TD))


def eagle3_logits(weights: Mapping[str, Tensor], config: Mapping[str, Any], state_TD: Tensor) -> Tensor:
    """Return the logits (T, V) of rows that ``eagle3_rows`` gave."""
    return linear(_normed(weights, config, "norm", state_TD), weights["lm_head.weight"])


def eagle_rows(weights: Mapping[str, Tensor], config: Mapping[str, Any], embeds_TD: Tensor, state_TD: Tensor) -> Tensor:
    """Return what the next rows read and the trunk's lm_head turns into logits, (T, D), of an EAGLE head."""
    layer = "layers.0"
    state_TD = linear(torch.cat([embeds_TD, state_TD], dim=-1), weights["fc.weight"])
    state_TD = state_TD + _attention(weights, config, layer, state_TD)
    return state_TD + _mlp(weights, layer, _normed(weights, config, f"{layer}.post_attention_layernorm", state_TD))


def eagle3_drafts(
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    embed_VD: Tensor,
    aux_TA: Tensor,
    token_ids: list[int],
    depth: int,
) -> list[int]:
    """Return the drafts after a text, the most likely ones.

    Args:
        weights: As exported.
        config: The exported one.
        embed_VD: The trunk's embedding.
        aux_TA: What the head reads of the trunk after each token but the last.
        token_ids: T + 1 of them.
        depth: How many drafts.
    """
    state_TD = linear(aux_TA, weights["fc.weight"])
    tokens = token_ids[1:]
    for _ in range(depth):
        last_D = eagle3_rows(weights, config, embed_VD[torch.tensor(tokens)], state_TD)[-1:]
        draft = int(eagle3_logits(weights, config, last_D).argmax())
        offset = int(weights["d2t"][draft]) if "d2t" in weights else 0
        tokens = [*tokens, draft + offset]
        state_TD = torch.cat([state_TD, last_D])
    return tokens[-depth:]
