"""Heads that transformers' ``MtpModel`` cannot load, against their forward written out from the released key names.

Nothing of a family's record is used here: keys, order and norms are spelled out, only the decoder layers are
transformers' own.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from checkpoints import all_tensors, save_with_head
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.heads.build import build_head, native_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import ALL_FAMILIES, IS_OLD, VOCAB_SIZE, tiny_head, tiny_trunk
from tolerances import assert_differs, assert_same, num_terms
from written_out import (
    BY_HAND,
    MIXER,
    AttentionThenMlp,
    InTurn,
    OfAllKeys,
    mix_joined,
    mix_streams,
    rms_norm,
    stack_experts,
)

NUM_TOKENS = 11


@dataclasses.dataclass(frozen=True)
class ByHand:
    """Where one family's release keeps the first module, and what its layer is called in transformers.

    ``norms`` are the embedding's, the hidden state's and the last one (None: there is none); two ``proj`` are one for
    the embedding and one for every stream of the hidden state, which the layer takes side by side where they are
    ``joined``; ``renamed`` are parts of the layer's keys that the release calls otherwise; ``embedding`` is the head's
    own.
    """

    classes: str
    layer: Callable[[Any, Any], nn.Module]
    norms: tuple[str, str, str | None]
    proj: str | tuple[str, str]
    layer_prefix: str
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


SLIDING = ["sliding_attention"] * 3
MIMO = ByHand(
    classes="qwen2",
    layer=lambda classes, config: classes.Qwen2DecoderLayer(config, 0),
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
        classes="mimo_v2_flash",
        layer=lambda classes, config: classes.MiMoV2FlashDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "final_layernorm"),
        proj="eh_proj",
        layer_prefix="model.mtp.layers.0.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["dense"]},
        renamed={"pre_mlp_layernorm": "post_attention_layernorm", "attention_sink_bias": "sinks"},
        rotary_type="sliding_attention",
        window=8,
    ),
    "exaone_moe": ByHand(
        classes="exaone_moe",
        layer=lambda classes, config: classes.ExaoneMoeDecoderLayer(config, 0),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["dense"]},
        window=8,
    ),
    "exaone4_5": ByHand(
        classes="exaone4",
        layer=lambda classes, config: classes.Exaone4DecoderLayer(config, 0),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": SLIDING},
        window=8,
    ),
    "glm_ocr": ByHand(
        classes="glm_ocr",
        layer=lambda classes, config: classes.GlmOcrTextDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "shared_head.norm"),
        proj="eh_proj",
        layer_prefix="model.language_model.layers.3.",
    ),
    "ernie4_5_moe": ByHand(
        classes="ernie4_5_moe",
        layer=lambda classes, config: classes.Ernie4_5_MoeDecoderLayer(config, 0),
        norms=("model.mtp_emb_norm.0", "model.mtp_hidden_norm.0", None),
        proj="model.mtp_linear_proj.0",
        layer_prefix="model.mtp_block.0.",
        config={"moe_layer_start_index": 99},
    ),
    "nemotron_h": ByHand(
        classes="nemotron_h",
        layer=lambda classes, config: InTurn(classes.NemotronHBlock(config, number) for number in range(2)),
        norms=("mtp.layers.0.enorm", "mtp.layers.0.hnorm", "mtp.layers.1.final_layernorm"),
        proj="mtp.layers.0.eh_proj",
        layer_prefix="mtp.layers.",
        config={"layers_block_type": ["full_attention", "moe"]},
        eps="layer_norm_epsilon",
        rotates=False,
    ),
    "step3p7": ByHand(
        classes="step3p7",
        layer=lambda classes, config: classes.Step3p7DecoderLayer(config, 0),
        norms=("enorm", "hnorm", "transformer.shared_head.norm"),
        proj="eh_proj",
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
        classes="longcat_flash",
        layer=lambda classes, config: AttentionThenMlp(
            classes.LongcatFlashMLA, classes.LongcatFlashMLP, classes.LongcatFlashRMSNorm, config
        ),
        norms=("enorm.m", "hnorm.m", "model.mtp.norm"),
        proj="eh_proj",
        layer_prefix="model.mtp.layers.0.",
        renamed={"transformer_layer.mlp": "mlp"},
    ),
    "hy_v4": ByHand(
        classes="hy_v4",
        layer=lambda classes, config: AttentionThenMlp(
            classes.HYV4Attention, classes.HYV4MoE, classes.HYV4RMSNorm, config
        ),
        norms=("enorm", "hnorm", "final_layernorm"),
        proj="eh_proj",
        layer_prefix="model.mtp_layers.0.",
        config={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
        renamed={"learnable_sink_param": "sinks", "linear_gate": "gate_proj"},
    ),
    "minimax_m3": ByHand(
        classes="minimax_m3_vl",
        layer=lambda classes, config: classes.MiniMaxM3VLDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "final_layernorm"),
        proj="eh_proj",
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
        classes="deepseek_v4",
        layer=lambda classes, config: classes.DeepseekV4DecoderLayer(config, 0),
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
        classes="glm_moe_dsa",
        layer=lambda classes, config: classes.GlmMoeDsaDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "shared_head.norm"),
        proj="eh_proj",
        layer_prefix="model.layers.3.",
        config={"mlp_layer_types": ["sparse"], "indexer_types": ["full"]},
    ),
    "qwen4_exp": ByHand(
        classes="qwen4_exp",
        layer=lambda classes, config: classes.Qwen4ExpTextDecoderLayer(config, 0),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", None),
        proj=("mtp.fc_embedding", "mtp.fc_hidden"),
        layer_prefix="mtp.layers.0.",
        config={"layer_types": ["indexed_attention"], "ple_layer_ids": []},
        plus_one=True,
        joined=True,
    ),
    "glm5_next": ByHand(
        classes="glm5_next",
        layer=lambda classes, config: OfAllKeys(
            classes.Glm5NextTextAttention, classes.Glm5NextTextMoE, classes.Glm5NextTextRMSNorm, config
        ),
        norms=("enorm", "hnorm", "shared_head.norm"),
        proj="eh_proj",
        layer_prefix="model.language_model.layers.3.",
        config={"indexer_types": ["full"]},
        rotates=False,
    ),
    "dots3_note": ByHand(
        classes="dots3_note",
        layer=lambda classes, config: classes.Dots3NoteTextDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "shared_head.norm"),
        proj="eh_proj",
        layer_prefix="model.layers.3.",
        config={"mlp_layer_types": ["dense"]},
        rotary_type="sliding_attention",
        window=8,
        embedding="model.mtp.embed_tokens.weight",
    ),
    "cohere": ByHand(
        classes="cohere",
        layer=lambda classes, config: classes.CohereDecoderLayer(config, 0),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        centred=True,
        eps="layer_norm_eps",
    ),
    "cohere2": ByHand(
        classes="cohere2",
        layer=lambda classes, config: classes.Cohere2DecoderLayer(config, 0),
        norms=("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        proj="mtp.fc",
        layer_prefix="mtp.layers.0.",
        config={"layer_types": ["full_attention"]},
        centred=True,
        eps="layer_norm_eps",
    ),
    "cohere2_moe": ByHand(
        classes="cohere2_moe",
        # Wide enough for every position: the layer then rotates, as llama.cpp's graph does.
        layer=lambda classes, config: classes.Cohere2MoeDecoderLayer(config, 0),
        norms=("enorm", "hnorm", "shared_head.norm"),
        proj="eh_proj",
        layer_prefix="model.layers.3.",
        config={"layer_types": SLIDING, "mlp_layer_types": ["sparse"]},
        centred=True,
        eps="layer_norm_eps",
    ),
}


def test_every_family_has_an_independent_forward() -> None:
    # All others are compared with transformers' MtpModel.
    assert set(HANDS) == set(BY_HAND)


def forward_by_hand(
    hand: ByHand, trunk: Trunk, tensors: Mapping[str, Tensor], hidden: Tensor, embeds: Tensor
) -> Tensor:
    """Return the final state of depth 1 at every row."""
    config = copy.deepcopy(trunk.config)
    for name, value in hand.config.items():
        setattr(config, name, value)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    layer = hand.layer(importlib.import_module(f"transformers.models.{hand.classes}.modeling_{hand.classes}"), config)
    own = {
        key.removeprefix(hand.layer_prefix): value
        for key, value in tensors.items()
        if key.startswith(hand.layer_prefix)
    }
    for released, ours in hand.renamed.items():
        own = {key.replace(released, ours): value for key, value in own.items()}
    for joined in {name for name in layer.state_dict() if name.endswith("gate_up_proj.weight")} - own.keys():
        own[joined] = torch.cat([own[joined.replace("gate_up", part)] for part in ("gate", "up")])
    missing = layer.load_state_dict(stack_experts(own), strict=False).missing_keys
    assert not missing, "every weight of the layer comes from the checkpoint"

    def part(name: str) -> Tensor:
        key = f"{name}.weight"
        return tensors[key] if key in tensors else tensors[hand.layer_prefix + key]

    has_streams = isinstance(hand.proj, tuple)
    if has_streams and not hand.joined:
        hidden, embeds = hidden.unflatten(-1, (-1, embeds.shape[-1])), embeds[:, :, None]
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


def swap_halves(head: MtpHead) -> None:
    module: Any = head.blocks[0]
    if module.sums:
        module.token_proj, module.hidden_proj = module.hidden_proj, module.token_proj
    module.embed_first = not module.embed_first


def load(family_name: str, path: Path) -> tuple[Trunk, MtpHead]:
    random_trunk = tiny_trunk(family_name)
    save_with_head(random_trunk, tiny_head(random_trunk), path)
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(path, checkpoint.family, dtype=torch.float32)
    return trunk, build_head(native_plan(checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32).eval()


@pytest.mark.parametrize("spoilt", [False, True], ids=["as_it_is", "halves_swapped"])
@pytest.mark.parametrize("family_name", [name for name in HANDS if name in ALL_FAMILIES])
@torch.inference_mode()
def test_depth_1_is_the_forward_written_out(family_name: str, spoilt: bool, tmp_path: Path) -> None:
    if IS_OLD and family_name == "glm_ocr":
        pytest.skip("rotary embeddings of this transformers take positions of three axes, and this forward has one")
    trunk, head = load(family_name, tmp_path / "checkpoint")
    head.convention = dataclasses.replace(head.convention, zero_first_embedding=False)
    tokens_1T = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))
    hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
    if spoilt:
        swap_halves(head)
    (ours_1TD,) = unroll(
        head,
        hidden_1TD,
        tokens_1T,
        head.embedding(trunk.embed),
        num_depths=1,
        positions_BT=torch.arange(NUM_TOKENS)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    tensors = all_tensors(tmp_path / "checkpoint")
    hand = HANDS[family_name]
    read_1S = tokens_1T[:, 1:]
    embeds_1SD = trunk.embed(read_1S) if hand.embedding is None else tensors[hand.embedding][read_1S]
    theirs_1SD = forward_by_hand(hand, trunk, tensors, hidden_1TD[:, :-1], embeds_1SD)
    (assert_differs if spoilt else assert_same)(
        ours_1TD[:, :-1] * (head.logit_divisor or 1.0), theirs_1SD, num_terms(head)
    )
