"""Our one head step against transformers' own ``MtpModel``, loaded from the same checkpoint with the same tensors.

``MtpModel`` never re-uses its one layer, so the oracle for depths 2 and 3 calls that layer again over all rows so far:
the depth-1 rows of the prefix, then one row appended per depth. Rows stand one position later there (t + 1, not t),
which rotary attention does not see.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.masking_utils import create_sliding_window_causal_mask

from checkpoints import save_with_head
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.heads.build import build_head, native_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import ALL_FAMILIES, FAMILY_NAMES, VOCAB_SIZE, tiny_head, tiny_trunk
from tolerances import FAR, assert_differs, assert_same, num_terms, rounding
from written_out import BY_HAND

mtp_module = pytest.importorskip("transformers.modeling_layers")
if not hasattr(mtp_module, "MtpModel") or not hasattr(mtp_module.MtpModel, "forward_layer"):
    pytest.skip("this transformers has no MtpModel.forward_layer", allow_module_level=True)

NUM_TOKENS, NUM_DEPTHS = 11, 3
INDEXED = "indexed_attention"


# What transformers' loader calls the final norm that these releases call final_layernorm.
RENAMED = {"final_layernorm.": "shared_head.norm."}
CHAINED_FAMILIES = ("inkling",)
"""Those whose modules ``MtpModel`` runs one after the other, with keys and convolutions of their own."""
MTP_MODEL_FAMILIES = tuple(name for name in ALL_FAMILIES if name not in (*BY_HAND, *CHAINED_FAMILIES))


def load_oracle(path: Path, trunk: Trunk) -> Any:
    """Load transformers' own head of a checkpoint that its class does not know by name."""
    layout = layout_of(open_checkpoint(path))
    keys = [key for key in open_checkpoint(path).tensors if layout.is_head_key(key)]
    renamed = path.with_name("renamed")
    shutil.copytree(path, renamed)
    tensors = load_file(path / SINGLE_FILE)
    for old, new in RENAMED.items():
        tensors = {key.replace(old, new) if key in keys else key: value for key, value in tensors.items()}
    save_file(tensors, renamed / SINGLE_FILE, metadata={"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(renamed)
    prefix = rf"model\.layers\.{layout.num_hidden_layers}\." if layout.family.follows_the_trunk else r"^mtp\."
    model._keys_to_ignore_on_load_unexpected = [prefix]
    model.config.num_mtp_layers = 1
    fields = model.config.to_dict()
    kind = INDEXED if INDEXED in (fields.get("layer_types") or ()) else "full_attention"
    model.config.mtp_layer_types = fields.get("mtp_layer_types") or [kind]
    model.config.mtp_mlp_layer_types = ["sparse"]
    model.config.dtype = torch.float32
    return mtp_module.MtpModel.from_pretrained(model).eval()


def oracle_depths(oracle: Any, trunk: Trunk, hidden_TD: Tensor, tokens_T: Tensor, start: int) -> list[Tensor]:
    """Return the oracle's final state at each depth of the draft that starts at row ``start``."""
    hidden_1SD = hidden_TD[None, : start + 1]
    states = []
    for _ in range(NUM_DEPTHS):
        num_rows = hidden_1SD.shape[1]
        embeds_1SD = trunk.embed(tokens_T[None, 1 : num_rows + 1])
        positions_1S = torch.arange(1, num_rows + 1)[None]
        (kind,) = oracle.config.layer_types if oracle.has_per_layer_rope else ("full_attention",)
        by_kind = {"layer_type": kind} if oracle.has_per_layer_rope else {}
        causal = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()[None, None]
        if kind == "sliding_attention":
            causal = causal.triu(1 - oracle.config.sliding_window)
        if oracle.config._attn_implementation == "eager":
            causal = torch.zeros(causal.shape).masked_fill(~causal, torch.finfo(torch.float32).min)
        output_1SD = oracle.layers[0](
            embeds_1SD,
            hidden_1SD,
            position_embeddings=oracle.rotary_emb(embeds_1SD, position_ids=positions_1S, **by_kind),
            position_ids=positions_1S,
            attention_mask=causal,
            past_key_values=None,
        )
        states.append(output_1SD[0, -1])
        hidden_1SD = torch.cat([hidden_1SD, output_1SD[:, -1:]], dim=1)
    return states


def load_saved(tmp_path: Path, random_trunk: Trunk) -> tuple[Path, Trunk, MtpHead]:
    """Save a trunk with a random head, and load both from the checkpoint."""
    path = save_with_head(random_trunk, tiny_head(random_trunk), tmp_path / "checkpoint")
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(path, checkpoint.family, dtype=torch.float32)
    head = build_head(native_plan(checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32).eval()
    return path, trunk, head


def load_both(tmp_path: Path, family_name: str) -> tuple[Trunk, MtpHead, Any]:
    path, trunk, head = load_saved(tmp_path, tiny_trunk(family_name))
    return trunk, head, load_oracle(path, trunk)


@pytest.mark.parametrize("family_name", MTP_MODEL_FAMILIES)
@torch.inference_mode()
def test_unroll_equals_transformers_own_layer_over_three_depths(family_name: str, tmp_path: Path) -> None:
    trunk, head, oracle = load_both(tmp_path, family_name)
    tokens_1T = torch.randint(VOCAB_SIZE, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))
    hidden_1TD = trunk.hidden(tokens_1T)
    ours = unroll(
        head,
        hidden_1TD,
        tokens_1T,
        trunk.embed,
        num_depths=NUM_DEPTHS,
        positions_BT=torch.arange(NUM_TOKENS)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    for start in range(NUM_TOKENS - NUM_DEPTHS):
        for depth, expected_D in enumerate(oracle_depths(oracle, trunk, hidden_1TD[0], tokens_1T[0], start)):
            ours_D = ours[depth][0, start] * (head.logit_divisor or 1.0)
            assert_same(ours_D, expected_D, NUM_DEPTHS * num_terms(head))


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
@torch.inference_mode()
def test_the_comparison_would_see_a_swapped_concatenation(family_name: str, tmp_path: Path) -> None:
    trunk, head, oracle = load_both(tmp_path, family_name)
    head.blocks[0].embed_first = False
    tokens_1T = torch.arange(NUM_TOKENS)[None]
    hidden_1TD = trunk.hidden(tokens_1T)
    ours = unroll(
        head,
        hidden_1TD,
        tokens_1T,
        trunk.embed,
        num_depths=1,
        positions_BT=torch.arange(NUM_TOKENS)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    expected_D = oracle_depths(oracle, trunk, hidden_1TD[0], tokens_1T[0], 4)[0]
    assert_differs(ours[0][0, 4], expected_D, num_terms(head))


def load_chain(tmp_path: Path, family_name: str, chain_norm: bool) -> tuple[Trunk, MtpHead, Any]:
    random_trunk = tiny_trunk(family_name)
    random_trunk.config.chain_hidden_post_norm = chain_norm
    path, trunk, head = load_saved(tmp_path, random_trunk)
    # As vLLM: only the trunk's scores are scaled.
    trunk.config.log_scaling_n_floor = None
    trunk.config.name_or_path = str(path)
    return trunk, head, mtp_module.MtpModel.from_pretrained(trunk.causal_lm).eval()


def oracle_chain(oracle: Any, hidden_1TD: Tensor, embeds_1TD: Tensor) -> list[Tensor]:
    """Return the oracle's logits of each module at every row whose tokens are all known."""
    num_rows = hidden_1TD.shape[1] - len(oracle.layers)
    cache, hidden_1SD, logits = MtpCache(config=oracle.config), hidden_1TD[:, :num_rows], []
    for module in range(len(oracle.layers)):
        rows = slice(module + 1, module + 1 + num_rows)
        positions_1S = torch.arange(hidden_1TD.shape[1])[None, rows]
        hidden_1SD = oracle.forward_layer(module, hidden_1SD, positions_1S, cache, inputs_embeds=embeds_1TD[:, rows])
        logits.append(oracle._project_to_logits(hidden_1SD))
    return logits


@pytest.mark.parametrize("chain_norm", [False, True], ids=["plain_chain", "normed_chain"])
@pytest.mark.parametrize("spoilt", [None, "halves_swapped", "raw_embedding", "no_divisor"])
@pytest.mark.parametrize("family_name", [name for name in CHAINED_FAMILIES if name in ALL_FAMILIES])
@torch.inference_mode()
def test_a_chain_equals_transformers_own(
    family_name: str, spoilt: str | None, chain_norm: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers 5.23 masks a sliding module as a full one, though its trunk's layers of the kind slide.
    kinds = mtp_module.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
    monkeypatch.setitem(kinds, "sliding_attention", create_sliding_window_causal_mask)
    trunk, head, oracle = load_chain(tmp_path, family_name, chain_norm)
    tokens_1T = torch.randint(VOCAB_SIZE, (1, 24), generator=torch.Generator().manual_seed(3))
    hidden_1TD, embed = trunk.hidden(tokens_1T), trunk.embed
    expected = oracle_chain(oracle, hidden_1TD, embed(tokens_1T))
    if spoilt == "halves_swapped":
        for block in head.blocks:
            block.embed_first = True
    elif spoilt == "raw_embedding":
        # What transformers' own loop reads; the modules were trained on the trunk's normed embedding.
        embed = oracle.embed_tokens
    elif spoilt == "no_divisor":
        head.logit_divisor = None
    states = unroll(
        head,
        hidden_1TD,
        tokens_1T,
        embed,
        num_depths=len(head.blocks),
        positions_BT=torch.arange(24)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
    bound = rounding(1.0, num_terms(head))
    for state_1TD, expected_1SV in zip(states, expected, strict=True):
        difference = (trunk.project(state_1TD[:, : expected_1SV.shape[1]]) - expected_1SV).abs().max()
        error = difference / expected_1SV.abs().max()
        assert error < bound if spoilt is None else error > FAR * bound
