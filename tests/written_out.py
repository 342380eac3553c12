"""Parts of heads' forwards that are written out, and layers put together from transformers' parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

BY_HAND = (
    *("mimo", "qwen2", "mimo_v2_flash", "exaone_moe", "exaone4_5", "glm_ocr", "ernie4_5_moe", "nemotron_h", "step3p7"),
    *("longcat_flash", "hy_v4", "minimax_m3", "deepseek_v4", "glm_moe_dsa", "qwen4_exp", "glm5_next", "dots3_note"),
    *("cohere", "cohere2", "cohere2_moe"),
)
"""Families whose layers or keys ``MtpModel`` has no place for; ``test_head_by_hand.py`` has a forward of each."""


class InTurn(nn.ModuleList):
    def forward(self, state: Tensor, attention_mask: Tensor, **_unused: object) -> Tensor:
        for block in self:
            state = block(state, attention_mask=attention_mask)
        return state


class AttentionThenMlp(nn.Module):
    def __init__(self, attention: Any, mlp: Any, norm: Any, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = attention(config, 0), mlp(config)
        self.input_layernorm, self.post_attention_layernorm = (
            norm(config.hidden_size, eps=config.rms_norm_eps) for _ in range(2)
        )

    def forward(self, state: Tensor, **rest: Any) -> Tensor:
        state = state + self.self_attn(self.input_layernorm(state), **rest)[0]
        return state + self.mlp(self.post_attention_layernorm(state))


class OfAllKeys(AttentionThenMlp):
    """With an attention that builds its mask itself, from one for padding."""

    def forward(self, state: Tensor, **_unused: Any) -> Tensor:
        return super().forward(state, attention_mask=torch.ones(state.shape[:2], dtype=torch.bool))


def rms_norm(state: Tensor, weight: Tensor, eps: float, plus_one: bool) -> Tensor:
    scaled = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + eps)
    return scaled * (weight + 1 if plus_one else weight)


def stack_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Replace experts that are stored one by one by what transformers' layers hold."""
    single = {key: value for key, value in tensors.items() if ".experts." in key and key.endswith(".weight")}
    found = {key: value for key, value in tensors.items() if key not in single}
    for place in {key.split(".experts.")[0] for key in single}:
        count = len({key.split(".experts.")[1].split(".")[0] for key in single})
        parts = {
            name: torch.stack([single[f"{place}.experts.{number}.{name}.weight"] for number in range(count)])
            for name in {key.rsplit(".", 2)[1] for key in single}
        }
        if "gate_proj" in parts:
            found[f"{place}.experts.gate_up_proj"] = torch.cat([parts.pop("gate_proj"), parts.pop("up_proj")], dim=1)
        found |= {f"{place}.experts.{name}": value for name, value in parts.items()}
    return found


def mix_streams(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, config: Any) -> Tensor:
    joined = streams.flatten(2)
    weights = torch.sigmoid(rms_norm(joined, torch.ones(()), config.rms_norm_eps, False) @ fn.T * scale + base)
    return ((weights + config.hc_eps)[..., None] * streams).sum(2)


MIXER = ("hc_norm", "input_mix_weight_down", "input_mix_weight_up")


def mix_joined(joined: Tensor, norm: Tensor, down: Tensor, up: Tensor, config: Any) -> Tensor:
    shape = (config.hc_count, config.hidden_size)
    streams = rms_norm(joined.unflatten(-1, shape), norm.view(shape), config.rms_norm_eps, True)
    low = torch.nn.functional.silu(streams.flatten(2) @ down.T / config.hc_count)
    return (torch.sigmoid(low @ up.T).unflatten(-1, shape) * streams).mean(2)
