"""What every family keeps, on one tiny model of each, loaded once from a checkpoint in the released layout.

A test that changes the trunk or the head works on a copy.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from test_draft_kinds import by_hand, draft_models
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.cache_utils import MtpCache
from transformers.masking_utils import create_sliding_window_causal_mask

from adapters import assert_like_peft, write_adapter
from checkpoints import (
    all_tensors,
    assert_lossless,
    holds,
    own_head,
    save_stripped,
    save_tensors,
    save_with_head,
    shared_by_the_head,
)
from heads_by_hand import HANDS, forward_by_hand
from mtp_train import graft, inspect, merge
from mtp_train.checkpoints.export import write_checkpoint
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.data.pack import PackedBatch
from mtp_train.heads.alignment import PADDING_DOCUMENT
from mtp_train.heads.build import graft_plan, trained_head
from mtp_train.heads.experts import GROUPED_EXPERTS, is_stacked
from mtp_train.heads.lora import is_lora, merged_weights, put_on_lora
from mtp_train.heads.module import MtpHead
from mtp_train.recipe.sections import LoraSection
from mtp_train.runs.display import quiet_progress
from mtp_train.train.head_training import HeadTraining, MicroBatch
from mtp_train.trunk.load import Trunk, load_trunk
from mtp_train.trunk.states import Segment, TrunkStates, isolated_hidden, segments
from mtp_train.trunk.whole import diagnose_trunk
from mtp_train.upstream.transformers_private import CACHE, kept_in_fp32
from products import EXPERT_TOKENS, computed
from redrafted import unrolled
from scripted import spied_drafts
from tiny import ALL_FAMILIES, IS_OLD, family_of, random_tokens, rows_on, tiny_head, tiny_trunk
from tolerances import FAR, assert_differs, assert_same, num_terms, rounding

mtp_module = pytest.importorskip("transformers.modeling_layers")
HAS_MTP_MODEL = hasattr(getattr(mtp_module, "MtpModel", None), "forward_layer")
NUM_TOKENS, NUM_DEPTHS = 11, 3
CPU = torch.device("cpu")


class Built(NamedTuple):
    """A tiny trunk and its head, and the checkpoint that both were loaded from."""

    trunk: Trunk
    head: MtpHead
    path: Path

    @property
    def name(self) -> str:
        return self.trunk.family.name


def load(path: Path) -> Built:
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    return Built(trunk, own_head(checkpoint), path)


def build(name: str, directory: Path, **fields: object) -> Built:
    trunk = tiny_trunk(name)
    for field, value in fields.items():
        setattr(trunk.config, field, value)
    return load(save_with_head(trunk, tiny_head(trunk), directory / "checkpoint"))


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(request.param, tmp_path_factory.mktemp(request.param))


# The head's forward against one that is independent of ours


@torch.inference_mode()
def test_the_head_computes_what_an_independent_forward_does(built: Built) -> None:
    """And halves of its projection that are swapped are found."""
    if built.name in HANDS:
        check_by_hand(built)
    elif built.name in CHAINED:
        check_chain(built, None)
    elif HAS_MTP_MODEL:
        check_by_mtp_model(built)


def swapped(head: MtpHead) -> MtpHead:
    """Return the head with embedding and hidden state taken for each other."""
    other = copy.deepcopy(head)
    for block in other.blocks:
        module: Any = block
        if module.sums:
            module.token_proj, module.hidden_proj = module.hidden_proj, module.token_proj
        module.embed_first = not module.embed_first
    return other


def check_by_hand(built: Built) -> None:
    trunk = built.trunk
    tokens_1T = random_tokens(NUM_TOKENS)
    if IS_OLD and built.name == "glm_ocr":
        pytest.skip("rotary embeddings of this transformers take positions of three axes, and this forward has one")
    head = copy.deepcopy(built.head)
    head.convention = dataclasses.replace(head.convention, zero_first_embedding=False)
    hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
    expected_1SD = forward_by_hand(trunk, all_tensors(built.path), hidden_1TD[:, :-1], tokens_1T[:, 1:])
    for one, check in ((head, assert_same), (swapped(head), assert_differs)):
        (found_1TD,) = unrolled(one, hidden_1TD, tokens_1T, one.embedding(trunk.embed), 1)
        check(found_1TD[:, :-1] * (head.logit_divisor or 1.0), expected_1SD, num_terms(head))


# ``MtpModel`` never re-uses its one layer, so the oracle for depths 2 and 3 calls that layer again over all rows so
# far: the depth-1 rows of the prefix, then one row appended per depth. Rows stand one position later there (t + 1, not
# t), which rotary attention does not see.
INDEXED = "indexed_attention"
# What transformers' loader calls the final norm that these releases call final_layernorm.
RENAMED = {"final_layernorm.": "shared_head.norm."}


def check_by_mtp_model(built: Built) -> None:
    trunk, head, tokens_1T = built.trunk, built.head, random_tokens(NUM_TOKENS)
    oracle = load_oracle(built)
    hidden_1TD = trunk.hidden(tokens_1T)
    found = unrolled(head, hidden_1TD, tokens_1T, trunk.embed, NUM_DEPTHS)
    for start in range(NUM_TOKENS - NUM_DEPTHS):
        for depth, expected_D in enumerate(oracle_depths(oracle, trunk, hidden_1TD[0], tokens_1T[0], start)):
            found_D = found[depth][0, start] * (head.logit_divisor or 1.0)
            assert_same(found_D, expected_D, NUM_DEPTHS * num_terms(head))
            if depth == 0 and start == 4:
                (wrong_1TD,) = unrolled(swapped(head), hidden_1TD, tokens_1T, trunk.embed, 1)
                assert_differs(wrong_1TD[0, start], expected_D, num_terms(head))


def load_oracle(built: Built) -> Any:
    """Load transformers' own head of a checkpoint that its class does not list by name."""
    layout = open_checkpoint(built.path).layout
    tensors = load_file(built.path / SINGLE_FILE)
    renamed = shutil.copytree(built.path, built.path.with_name("renamed"), dirs_exist_ok=True)
    for old, new in RENAMED.items():
        tensors = {key.replace(old, new) if layout.is_head_key(key) else key: one for key, one in tensors.items()}
    save_tensors(tensors, renamed / SINGLE_FILE)
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
            **{CACHE: None},
        )
        states.append(output_1SD[0, -1])
        hidden_1SD = torch.cat([hidden_1SD, output_1SD[:, -1:]], dim=1)
    return states


CHAINED = ("inkling",)
"""Those whose modules ``MtpModel`` runs one after the other, with keys and convolutions of their own."""


def check_chain(built: Built, spoilt: str | None) -> None:
    # transformers 5.23 masks a sliding module as a full one, though its trunk's layers of the kind slide.
    kinds = mtp_module.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING["hybrid_sliding"]
    trunk = copy.deepcopy(built.trunk)
    head = built.head
    tokens_1T = random_tokens(24)
    # As vLLM: only the trunk's scores are scaled.
    trunk.config.log_scaling_n_floor = None
    trunk.config.name_or_path = str(built.path)
    hidden_1TD = trunk.hidden(tokens_1T)
    embed = trunk.embed
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(kinds, "sliding_attention", create_sliding_window_causal_mask)
        oracle = mtp_module.MtpModel.from_pretrained(trunk.causal_lm).eval()
        expected = oracle_chain(oracle, hidden_1TD, embed(tokens_1T))
    if spoilt == "halves_swapped":
        head = swapped(head)
    elif spoilt == "raw_embedding":
        # What transformers' own loop reads; the modules were trained on the trunk's normed embedding.
        embed = oracle.embed_tokens
    elif spoilt == "no_divisor":
        head = copy.deepcopy(head)
        head.logit_divisor = None
    bound = rounding(1.0, num_terms(head))
    states = unrolled(head, hidden_1TD, tokens_1T, embed, len(head.blocks))
    for state_1TD, expected_1SV in zip(states, expected, strict=True):
        difference = (trunk.project(state_1TD[:, : expected_1SV.shape[1]]) - expected_1SV).abs().max()
        error = difference / expected_1SV.abs().max()
        assert error < bound if spoilt is None else error > FAR * bound


def oracle_chain(oracle: Any, hidden_1TD: Tensor, embeds_1TD: Tensor) -> list[Tensor]:
    """Return the oracle's logits of each module at every row whose tokens are all known."""
    num_rows = hidden_1TD.shape[1] - len(oracle.layers)
    cache = MtpCache(config=oracle.config)
    hidden_1SD = hidden_1TD[:, :num_rows]
    logits = []
    for module in range(len(oracle.layers)):
        rows = slice(module + 1, module + 1 + num_rows)
        positions_1S = torch.arange(hidden_1TD.shape[1])[None, rows]
        hidden_1SD = oracle.forward_layer(module, hidden_1SD, positions_1S, cache, inputs_embeds=embeds_1TD[:, rows])
        logits.append(oracle._project_to_logits(hidden_1SD))
    return logits


@pytest.mark.parametrize("chain_norm", [False, True], ids=["plain_chain", "normed_chain"])
@pytest.mark.parametrize("family_name", [name for name in CHAINED if name in ALL_FAMILIES])
@torch.inference_mode()
def test_a_chain_is_found_that_is_wired_otherwise(family_name: str, chain_norm: bool, tmp_path: Path) -> None:
    chain = build(family_name, tmp_path, chain_hidden_post_norm=chain_norm)
    for spoilt in (None, "halves_swapped", "raw_embedding", "no_divisor"):
        check_chain(chain, spoilt)


@torch.inference_mode()
def test_where_all_rows_stand_changes_nothing(built: Built) -> None:
    """llama.cpp counts positions from the token and not from the hidden state."""
    trunk = built.trunk
    head = copy.deepcopy(built.head)
    tokens_1T = random_tokens(NUM_TOKENS)
    hidden_1TD = trunk.head_input(trunk.hidden(tokens_1T), head.convention)
    embed = head.embedding(trunk.embed)
    plain = unrolled(head, hidden_1TD, tokens_1T, embed, NUM_DEPTHS)
    head.convention = dataclasses.replace(head.convention, position_offset=1)
    moved = unrolled(head, hidden_1TD, tokens_1T, embed, NUM_DEPTHS)
    torch.testing.assert_close(moved, plain, atol=2e-4, rtol=0)


@pytest.mark.parametrize("family_name", [name for name in ALL_FAMILIES if family_of(name).attached])
@torch.inference_mode()
def test_a_trunk_without_a_head_is_read_between_its_layers(family_name: str) -> None:
    trunk, head = draft_models(family_name, "eagle3")
    forward = by_hand(trunk, head)
    ((one, other),) = spied_drafts(trunk, head, [2])
    for tokens, drafts in (one, other):
        assert drafts == [int(trunk.project(state_D).argmax()) for state_D in forward(tokens, 2)]


# The trunk

P = PADDING_DOCUMENT
# Two rows: three documents and padding; a document as long as the row.
DOCUMENT_BT = torch.tensor([[0] * 5 + [1] * 3 + [2] * 2 + [P] * 2, [0] * 12])


def test_packed_documents_have_the_states_they_have_alone(built: Built) -> None:
    """And reach one another where the whole row runs at once."""
    trunk = copy.deepcopy(built.trunk).requires_grad_()
    tokens_BT = random_tokens(12, 2)
    isolated_BTD = isolated_hidden(trunk, tokens_BT, DOCUMENT_BT)
    through_BTD = trunk.hidden(tokens_BT).detach()
    assert not isolated_BTD.requires_grad
    places = segments(DOCUMENT_BT.numpy())
    assert places[1:3] == [Segment(0, 5, 3), Segment(0, 8, 2)]
    for row, start, length in places:
        alone_LD = trunk.hidden(tokens_BT[row : row + 1, start : start + length])[0].detach()
        assert_same(isolated_BTD[row, start : start + length], alone_LD, num_terms(trunk))
    assert not isolated_BTD[0, 10:].any()
    assert_same(through_BTD[0, :5], isolated_BTD[0, :5], num_terms(trunk))
    for _, start, length in places[1:3]:
        for place in range(start, start + length):
            assert_differs(through_BTD[0, place], isolated_BTD[0, place], num_terms(trunk))


@torch.no_grad()
def test_a_widened_trunk_computes_what_it_does_in_fp32(built: Built) -> None:
    tokens_1T = random_tokens(NUM_TOKENS)
    half = copy.deepcopy(built.trunk).to(torch.bfloat16)
    full = copy.deepcopy(half).float()
    held = {key: (id(value), value.dtype) for key, value in half.named_parameters()}
    with half.computing_in(torch.float32):
        hidden = half.hidden(tokens_1T)
        logits = half.logits(hidden)
    expected = full.hidden(tokens_1T)
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)
    torch.testing.assert_close(logits, full.logits(expected), rtol=0, atol=0)
    assert {key: (id(value), value.dtype) for key, value in half.named_parameters()} == held
    # By itself it rounds.
    assert half.hidden(tokens_1T).dtype is torch.bfloat16


@torch.no_grad()
def test_a_trunk_held_in_fp32_computes_in_bf16_what_it_does_loaded_in_bf16(built: Built) -> None:
    if IS_OLD and built.name == "deepseek_v4":
        pytest.skip("an older transformers cannot run DeepSeek V4 that is loaded in bf16")
    tokens_1T = random_tokens(NUM_TOKENS)
    loaded = copy.deepcopy(built.trunk)
    held = copy.deepcopy(built.trunk)
    kept = kept_in_fp32(held.causal_lm)
    for trunk, dtype in ((loaded, torch.bfloat16), (held, torch.float32)):
        for key, value in trunk.named_parameters():
            if not any(part in key for part in kept):
                value.data = value.data.bfloat16().to(dtype)
    expected = loaded.hidden(tokens_1T)
    with held.computing_in(torch.bfloat16):
        hidden = held.hidden(tokens_1T)
        logits = held.logits(hidden)
    assert hidden.dtype is torch.bfloat16
    torch.testing.assert_close(hidden, expected, rtol=0, atol=0)
    # Some keep their lm_head in fp32.
    torch.testing.assert_close(logits, loaded.logits(expected), rtol=0, atol=0)


@torch.inference_mode()
def test_an_offloaded_trunk_says_the_same_and_holds_one_layer_at_a_time(built: Built) -> None:
    tokens_BT = random_tokens(19, 2)
    trunk = copy.deepcopy(built.trunk)
    # Of the same tensors: where a copy lies in memory may change the last bit.
    expected = trunk.logits(trunk.hidden(tokens_BT))
    trunk.offload_layers(CPU)
    seen: list[list[str]] = []
    for layer in trunk.layers:
        inner = next(child for child in layer.modules() if child is not layer and not list(child.children()))
        inner.register_forward_pre_hook(lambda *_: seen.append(places_of(trunk)))
    assert torch.equal(trunk.logits(trunk.hidden(tokens_BT)), expected)
    assert seen
    assert all(places.count("cpu") == 1 for places in seen)
    assert set(places_of(trunk)) == {"meta"}
    assert trunk.lm_head_VD.device == trunk.causal_lm.get_input_embeddings().weight.device == CPU


def places_of(trunk: Trunk) -> list[str]:
    """Return the device of each layer; of one that is partly there, the CPU."""
    return [min(parameter.device.type for parameter in layer.parameters()) for layer in trunk.layers]


def test_a_trunk_is_whole_until_a_tensor_is_lost_or_cut(built: Built, tmp_path: Path) -> None:
    path = Path(shutil.copytree(built.path, tmp_path / "trunk"))
    assert diagnose_trunk(open_checkpoint(path)).problems == ()
    tensors = load_file(path / SINGLE_FILE)
    layout = open_checkpoint(path).layout
    of_layers = [key for key, value in sorted(tensors.items()) if value.ndim > 1 and "layers." in key]
    matrices = [key for key in of_layers if not layout.is_head_key(key)]
    key = matrices[len(matrices) // 2]
    value = tensors.pop(key)
    save_tensors(tensors, path / SINGLE_FILE)
    assert diagnose_trunk(open_checkpoint(path)).problems
    save_tensors({**tensors, key: value[..., :-1].clone()}, path / SINGLE_FILE)
    assert diagnose_trunk(open_checkpoint(path)).shape_errors


# Training


def test_the_heads_experts_compute_what_transformers_loop_does(built: Built) -> None:
    head = copy.deepcopy(built.head)
    stacked = [key.rpartition(".")[0] for key, value in head.named_parameters() if is_stacked(key, value.shape)]
    assert bool(stacked) == any(".experts." in key for key in head.state_dict())
    for experts in map(head.get_submodule, stacked[:1]):
        assert experts.config._experts_implementation == GROUPED_EXPERTS  # type: ignore[arg-type]
        terms = EXPERT_TOKENS * num_terms(experts)
        found, loop, other = (
            computed(experts, function, seed) for function, seed in ((GROUPED_EXPERTS, 0), ("eager", 0), ("eager", 1))
        )
        for one, expected, wrong in zip(found, loop, other, strict=True):
            assert_same(one, expected, terms)
            assert_differs(one, wrong, terms)


def batch() -> PackedBatch:
    """Return rows of a document each, padded, whose first tokens are no targets."""
    tokens_BT = random_tokens(16, 4)
    positions_BT = torch.arange(16).expand(4, 16)
    document_BT = torch.where(positions_BT < torch.tensor([[16], [9], [14], [11]]), 0, P)
    return PackedBatch(tokens_BT, positions_BT, document_BT, (document_BT == 0) & (positions_BT > 3))


def module_of(built: Built, **options: Any) -> HeadTraining:
    head = copy.deepcopy(built.head)
    return HeadTraining(TrunkStates(built.trunk), head, num_depths=NUM_DEPTHS, kind="kl", temperature=1.0, **options)


def gradient_of(module: HeadTraining) -> dict[str, Tensor]:
    """Return the gradient of a loss over all depths."""
    module.train()(MicroBatch(batch(), torch.tensor([0.5, 0.3, 0.2]))).total.backward()
    return {name: value.grad for name, value in module.head.named_parameters() if value.grad is not None}


def test_every_parameter_that_is_trained_gets_a_gradient(built: Built) -> None:
    """Processes that train together stop at the second step if one of them lacks one."""
    module = module_of(built)
    gradient = gradient_of(module)
    assert gradient.keys() == {name for name, value in module.head.named_parameters() if value.requires_grad}
    assert not any(".indexer." in name for name in gradient)
    # Running the head once more for the backward pass changes none.
    recomputed = gradient_of(module_of(built, recompute=True))
    torch.testing.assert_close(recomputed, gradient, atol=1e-6, rtol=1e-4)


def test_lora_matrices_and_nothing_else_are_trained_and_merged(built: Built) -> None:
    """Merged weights have the names of a head without matrices, and draft as the matrices did; a start changes none."""
    spec = LoraSection(r=4, alpha=8)
    plain = module_of(built)
    module = module_of(built)
    put_on_lora(module.head, spec, seed=0)
    before = drafted(plain)
    torch.testing.assert_close(drafted(module), before)
    generator = torch.Generator().manual_seed(7)
    matrices = {name: value for name, value in module.head.named_parameters() if value.requires_grad}
    assert matrices
    assert all(is_lora(name) for name in matrices)
    assert not any(".indexer." in name or ".lm_head." in name for name in matrices)
    for value in matrices.values():
        # B starts as zeros.
        value.data.copy_(0.3 * torch.randn(value.shape, generator=generator))
    found = drafted(module)
    terms = NUM_DEPTHS * num_terms(module.head)
    assert_differs(found, before, terms)
    merged = merged_weights(copy.deepcopy(built.head), spec, matrices)
    assert {name: value.shape for name, value in merged.items()} == {
        name: value.shape for name, value in plain.head.state_dict().items()
    }
    plain.head.load_state_dict(merged)
    assert_same(drafted(plain), found, terms)
    assert gradient_of(module).keys() == matrices.keys()
    assert all(value.grad is None for value in built.trunk.parameters())


@torch.no_grad()
def drafted(module: HeadTraining) -> Tensor:
    """Return the head's states of every depth."""
    return rows_on(module.eval().ends, module.head, batch(), NUM_DEPTHS).student_KND


# Export and decoding


def test_a_fine_tune_is_exported_with_its_own_trunk_and_decodes_losslessly(built: Built, tmp_path: Path) -> None:
    finetune = save_stripped(tiny_trunk(built.name, seed=1), tmp_path / "finetune")
    assert inspect(finetune, built.path).status in ("declared_but_missing", "stripped")
    base = open_checkpoint(built.path)
    tuned = open_checkpoint(finetune)
    layout = base.layout
    own = {
        key: value
        for key, value in all_tensors(built.path).items()
        if layout.is_head_key(key) and layout.shared_key(key) is None
    }
    graft(finetune, built.path, tmp_path / "graft")
    assert_holds(tmp_path / "graft", finetune, built.path, own)
    grafted = inspect(tmp_path / "graft", built.path)
    assert (grafted.status, grafted.runs_here, grafted.stale) == ("healthy", "yes", True)

    plan = graft_plan(tuned, base, "auto")
    trained = {name: value + 0.1 * torch.randn_like(value) for name, value in built.head.state_dict().items()}
    write_checkpoint(tuned, trained_head(plan, trained), tmp_path / "export", link="hard", progress=quiet_progress())
    parts = {key: part for name, value in trained.items() for key, part in layout.split(name, value)}
    assert_holds(tmp_path / "export", finetune, built.path, parts)
    exported = inspect(tmp_path / "export", built.path)
    assert (exported.status, exported.stale) == ("healthy", False)
    assert_lossless(tmp_path / "export")


def assert_holds(out: Path, finetune: Path, base: Path, own: Mapping[str, Tensor]) -> None:
    """The trunk is the fine-tune's bit for bit; keys and config fields of the head are the base's."""
    written = all_tensors(out)
    tuned = all_tensors(finetune)
    original = all_tensors(base)
    layout = open_checkpoint(base).layout
    assert holds(written, tuned)
    assert written.keys() - tuned.keys() == {key for key in original if layout.is_head_key(key)}
    assert holds(written, own)
    shared_by_the_head(out)
    fields = open_checkpoint(base).family.declaration.fields
    ours, theirs = (open_checkpoint(path).text_config for path in (out, base))
    assert all(ours.get(field) == theirs.get(field) for field in fields)


# peft refuses to adapt a part of Mamba layers.
TARGETS: dict[str, Any] = {"nemotron_h": ["q_proj", "in_proj", "up_proj"]}
# No AutoModel loads and saves their trunk under the names of the releases; of Hunyuan 4 transformers' save_pretrained
# gets some names wrong (every gate_proj becomes a linear_gate). test_merge.py has what the last two need.
OTHERWISE_SAVED = ("mimo", "step3p7", "hy_v4", "hy_v4_vl", "minimax_m3", "inkling")


def test_what_peft_adapts_by_all_linear_is_merged_as_peft_merges_it(built: Built, tmp_path: Path, out: Path) -> None:
    if built.name in OTHERWISE_SAVED:
        return
    auto = AutoModelForImageTextToText if built.trunk.family.trunk.only_with_vision else AutoModelForCausalLM
    targets = TARGETS.get(built.name, "all-linear")
    model = write_adapter(built.path, tmp_path / "lora", auto, target_modules=targets)
    merge(built.path, tmp_path / "lora", out)
    assert_like_peft(out, model)
