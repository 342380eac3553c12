"""Heads that transformers' ``MtpModel`` cannot load: their forward written out from the released key names.

Nothing of a family's record is used here: keys, order and norms are spelled out, only the decoder layers are
transformers' own, or put together from its parts.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.trunk.load import Trunk


class InTurn(nn.ModuleList):
    def forward(self, state: Tensor, attention_mask: Tensor, **_unused: object) -> Tensor:
        for block in self:
            state = block(state, attention_mask=attention_mask)
        return state


class AttentionThenMlp(nn.Module):
    def __init__(self, attention: Any, mlp: Any, norm: Any, config: Any) -> None:
        super().__init__()
        self.self_attn = attention(config, 0)
        self.mlp = mlp(config)
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


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Where one family's release keeps the first module, and what its layer is called in transformers.

    - ``classes``: the layer's model in transformers, where its name differs from the family's.
    - ``norms``: of the embedding, of the hidden state, and the final one (None: there is none).
    - ``proj``: two are one for the embedding and one for every stream of the hidden state. The layer takes the streams
      side by side where they are ``joined``.
    - ``renamed``: parts of the layer's keys that have another name in the release.
    - ``embedding``: the head's own.
    """

    layer: str | Callable[[Any, Any], nn.Module]
    layer_prefix: str
    classes: str | None = None
    norms: tuple[str, str, str | None] = ("enorm", "hnorm", "shared_head.norm")
    proj: str | tuple[str, str] = "eh_proj"
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    hidden_first: bool = False
    plus_one: bool = False
    centred: bool = False
    eps: str = "rms_norm_eps"
    rotary_type: str | None = None
    window: int | None = None
    rotates: bool = True
    joined: bool = False
    embedding: str | None = None


BESIDE = ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
SLIDING = ["sliding_attention"] * 3
MIMO = ByHand(
    classes="qwen2",
    layer="Qwen2DecoderLayer",
    norms=("token_layernorm", "hidden_layernorm", "final_layernorm"),
    proj="input_proj",
    layer_prefix="model.mtp_layers.0.",
    hidden_first=True,
)
"""A head that is attached to a Qwen2 has this layout too."""
HANDS = {
    "mimo": MIMO,
    "qwen2": MIMO,
    "mimo_v2_flash": ByHand(
        layer="MiMoV2FlashDecoderLayer",
        norms=("enorm", "hnorm", "final_layernorm"),
        layer_prefix="model.mtp.layers.0.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["dense"]},
        renamed={"pre_mlp_layernorm": "post_attention_layernorm", "attention_sink_bias": "sinks"},
        rotary_type="sliding_attention",
        window=8,
    ),
    "exaone_moe": ByHand(
        layer="ExaoneMoeDecoderLayer",
        norms=BESIDE,
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["dense"]},
        window=8,
    ),
    "exaone4_5": ByHand(
        classes="exaone4",
        layer="Exaone4DecoderLayer",
        norms=BESIDE,
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": SLIDING},
        window=8,
    ),
    "glm_ocr": ByHand(
        layer="GlmOcrTextDecoderLayer",
        layer_prefix="model.language_model.layers.3.",
    ),
    "ernie4_5_moe": ByHand(
        layer="Ernie4_5_MoeDecoderLayer",
        norms=("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", None),
        proj="model.mtp_linear_proj.0",
        layer_prefix="model.mtp_block.0.",
        config={"moe_layer_start_index": 99},
    ),
    "nemotron_h": ByHand(
        layer=lambda classes, config: InTurn(classes.NemotronHBlock(config, number) for number in range(2)),
        norms=("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
        proj="mtp.layers.0.eh_proj",
        layer_prefix="mtp.layers.",
        config={"layers_block_type": ["full_attention", "moe"]},
        eps="layer_norm_epsilon",
        rotates=False,
    ),
    "step3p7": ByHand(
        layer="Step3p7DecoderLayer",
        norms=("enorm", "hnorm", "transformer.shared_head.norm"),
        layer_prefix="model.layers.3.",
        config={
            "layer_types": SLIDING,
            "mlp_layer_types": ["dense"] * 3,
            "per_layer_config": {number: {"num_attention_heads": 4} for number in range(3)},
        },
        plus_one=True,
        rotary_type="sliding_attention",
        window=8,
    ),
    "longcat_flash": ByHand(
        layer=lambda classes, config: AttentionThenMlp(
            classes.LongcatFlashMLA, classes.LongcatFlashMLP, classes.LongcatFlashRMSNorm, config
        ),
        norms=("enorm.m", "hnorm.m", "model.mtp.norm"),
        layer_prefix="model.mtp.layers.0.",
        renamed={"transformer_layer.mlp": "mlp"},
    ),
    "hy_v4": ByHand(
        layer=lambda classes, config: AttentionThenMlp(
            classes.HYV4Attention, classes.HYV4MoE, classes.HYV4RMSNorm, config
        ),
        norms=("enorm", "hnorm", "final_layernorm"),
        layer_prefix="model.mtp_layers.0.",
        config={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        renamed={"learnable_sink_param": "sinks", "linear_gate": "gate_proj"},
    ),
    "minimax_m3": ByHand(
        classes="minimax_m3_vl",
        layer="MiniMaxM3VLDecoderLayer",
        norms=("enorm", "hnorm", "final_layernorm"),
        layer_prefix="language_model.model.mtp.layers.0.",
        config={"layer_types": ["minimax_m3_sparse"], "mlp_layer_types": ["sparse"]},
        renamed={
            "transformer_layer.": "",
            "block_sparse_moe.e_score": "mlp.gate.e_score",
            "block_sparse_moe": "mlp",
            "self_attn.index_": "self_attn.indexer.",
            ".w1.": ".gate_proj.",
            ".w3.": ".up_proj.",
            ".w2.": ".down_proj.",
        },
        plus_one=True,
    ),
    "deepseek_v4": ByHand(
        layer="DeepseekV4DecoderLayer",
        norms=("enorm", "hnorm", "norm"),
        proj=("e_proj", "h_proj"),
        layer_prefix="mtp.0.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["moe"]},
        renamed={
            "attn_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "hc_attn_": "attn_hc.",
            "hc_ffn_": "ffn_hc.",
            "attn.attn_sink": "attn.sinks",
            "attn.q_norm": "attn.q_a_norm",
            "attn.wkv": "attn.kv_proj",
            "attn.wq_a": "attn.q_a_proj",
            "attn.wq_b": "attn.q_b_proj",
            "attn.wo_a": "attn.o_a_proj",
            "attn.wo_b": "attn.o_b_proj",
            "attn.": "self_attn.",
            "ffn.gate.bias": "ffn.gate.e_score_correction_bias",
            "ffn.": "mlp.",
            ".w1.": ".gate_proj.",
            ".w3.": ".up_proj.",
            ".w2.": ".down_proj.",
        },
        rotary_type="main",
        window=8,
    ),
    "glm_moe_dsa": ByHand(
        layer="GlmMoeDsaDecoderLayer",
        layer_prefix="model.layers.3.",
        config={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    ),
    "qwen4_exp": ByHand(
        layer="Qwen4ExpTextDecoderLayer",
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None),
        proj=("mtp.fc_embedding", "mtp.fc_hidden"),
        layer_prefix="mtp.layers.0.",
        config={"layer_types": ["indexed_attention"], "ple_layer_ids": []},
        plus_one=True,
        joined=True,
    ),
    "glm5_next": ByHand(
        layer=lambda classes, config: OfAllKeys(
            classes.Glm5NextTextAttention, classes.Glm5NextTextMoE, classes.Glm5NextTextRMSNorm, config
        ),
        layer_prefix="model.language_model.layers.3.",
        config={"indexer_types": ["full"]},
        rotates=False,
    ),
    "dots3_note": ByHand(
        layer="Dots3NoteTextDecoderLayer",
        layer_prefix="model.layers.3.",
        config={"mlp_layer_types": ["dense"]},
        rotary_type="sliding_attention",
        window=8,
        embedding="model.mtp.embed_tokens.weight",
    ),
    "cohere": ByHand(
        layer="CohereDecoderLayer",
        norms=BESIDE,
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        centred=True,
        eps="layer_norm_eps",
    ),
    "cohere2": ByHand(
        layer="Cohere2DecoderLayer",
        norms=BESIDE,
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": ["full_attention"]},
        centred=True,
        eps="layer_norm_eps",
    ),
    "cohere2_moe": ByHand(
        # Wide enough for every position: the layer then rotates, as llama.cpp's graph does.
        layer="Cohere2MoeDecoderLayer",
        layer_prefix="model.layers.3.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["sparse"]},
        centred=True,
        eps="layer_norm_eps",
    ),
}

HANDS["hy_v4_vl"] = dataclasses.replace(
    HANDS["hy_v4"],
    layer=lambda classes, config: AttentionThenMlp(
        classes.HYV4VLAttention, classes.HYV4VLMoE, classes.HYV4VLRMSNorm, config
    ),
)


def forward_by_hand(trunk: Trunk, tensors: Mapping[str, Tensor], hidden: Tensor, tokens_1S: Tensor) -> Tensor:
    """Return the final state of depth 1 at every row, which reads a hidden state and the token after it."""
    hand = HANDS[trunk.family.name]
    embeds = trunk.embed(tokens_1S) if hand.embedding is None else tensors[hand.embedding][tokens_1S]
    config = copy.deepcopy(trunk.config)
    for name, value in hand.config.items():
        setattr(config, name, value)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    name = hand.classes or trunk.family.name
    classes = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    layer = getattr(classes, hand.layer)(config, 0) if isinstance(hand.layer, str) else hand.layer(classes, config)
    prefix = hand.layer_prefix
    own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    for released, ours in hand.renamed.items():
        own = {key.replace(released, ours): value for key, value in own.items()}
    for joined in {name for name in layer.state_dict() if name.endswith("gate_up_proj.weight")} - own.keys():
        own[joined] = torch.cat([own[joined.replace("gate_up", part)] for part in ("gate", "up")])
    missing = layer.load_state_dict(stack_experts(own), strict=False).missing_keys
    assert not missing, "every weight of the layer comes from the checkpoint"

    def part(name: str) -> Tensor:
        key = f"{name}.weight"
        return tensors[key] if key in tensors else tensors[prefix + key]

    has_streams = isinstance(hand.proj, tuple)
    if has_streams and not hand.joined:
        hidden = hidden.unflatten(-1, (-1, embeds.shape[-1]))
        embeds = embeds[:, :, None]
    eps = config.to_dict()[hand.eps]

    def norm(state: Tensor, name: str) -> Tensor:
        centred = state - state.mean(-1, keepdim=True) if hand.centred else state
        return rms_norm(centred, part(name), eps, hand.plus_one)

    embed_norm, hidden_norm, last_norm = hand.norms
    halves = [norm(embeds, embed_norm), norm(hidden, hidden_norm)]
    if hand.joined:
        halves = [halves[0][:, :, None], halves[1].unflatten(-1, (-1, embeds.shape[-1]))]
    if isinstance(hand.proj, tuple):
        state = sum(half @ part(name).T for half, name in zip(halves, hand.proj, strict=True))
    else:
        state = torch.cat(halves[::-1] if hand.hidden_first else halves, dim=-1) @ part(hand.proj).T
    if hand.joined:
        state = state.flatten(2)
    num_rows = state.shape[1]
    seen = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
    if hand.window is not None:
        seen = seen.triu(1 - hand.window)
    mask = torch.zeros(1, 1, num_rows, num_rows).masked_fill(~seen, torch.finfo(torch.float32).min)
    rest: dict[str, Any] = {"attention_mask": mask, "position_ids": torch.arange(num_rows)[None]}
    if hand.rotates:
        kind = () if hand.rotary_type is None else (hand.rotary_type,)
        rotated = trunk.decoder.rotary_emb(state, rest["position_ids"], *kind)
        rest["position_embeddings"] = {hand.rotary_type: rotated} if has_streams and not hand.joined else rotated
    output = layer.eval()(state, **rest)
    output = output[0] if isinstance(output, tuple) else output
    if has_streams:
        output = mixed(hand, output, tensors, config)
    return output if last_norm is None else norm(output, last_norm)


def mixed(hand: ByHand, streams: Tensor, tensors: Mapping[str, Tensor], config: Any) -> Tensor:
    if hand.joined:
        return mix_joined(streams, *(tensors[f"mtp.hyper_connection_mixer.{name}.weight"] for name in MIXER), config)
    return mix_streams(streams, *(tensors[f"mtp.0.hc_head_{one}"] for one in ("fn", "scale", "base")), config)
