"""Block drafters: drafts are transformers' own or those of the definition, and the text stays the trunk's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import CONFIG_MAPPING, GenerationConfig

from block_drafters import (
    CHOSEN,
    LAYERS,
    MASK,
    MIXED,
    MODEL_TYPE,
    PROMPTS,
    READ,
    TOP,
    TRUNK,
    BlockForm,
    own_names,
    reference,
    texts,
)
from checkpoints import save_stripped, save_tensors
from json_files import write_json
from mtp_inference import Sampling, SpeculativeDecoder
from mtp_inference.opening import OpenModel, open_model
from mtp_train.errors import MtpError
from mtp_train.heads.module import OutputRows
from mtp_train.trunk.load import Trunk
from runs import Capture, document
from scripted import PassingDrafting, drafted_in_rounds
from tiny import VOCAB_SIZE, tiny_trunk

pytestmark = pytest.mark.skipif(MODEL_TYPE not in CONFIG_MAPPING, reason="this transformers has no block drafters")
if MODEL_TYPE in CONFIG_MAPPING:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

OUTPUT = OutputRows(torch.randn(len(CHOSEN), 32, generator=torch.Generator().manual_seed(3)), CHOSEN, VOCAB_SIZE)
AUTHORS = {**LAYERS, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ}}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": MASK,
    "draft_vocab_size": len(CHOSEN),
    "transformer_layer_config": LAYERS,
}
SLIDES = {"layer_types": MIXED, "sliding_window": 4}
TRANSFORMERS = {
    **{**LAYERS, "architectures": ["MuseGlimmerAssistantModel"], "model_type": MODEL_TYPE},
    **{**SLIDES, "mask_token_id": MASK, "target_layer_ids": READ},
}
FORMS = (
    BlockForm("dflash"),
    BlockForm("dflash", "speculators, bidirectional", chosen=True, block_size=16),
    BlockForm("dflash", "authors", block_size=16),
    BlockForm("dflash", "authors, bidirectional", block_size=8),
    BlockForm("dflash2", "speculators, bidirectional"),
    BlockForm("dflash2", "authors", block_size=8),
    BlockForm("vanilla", "authors", anchor=True),
    BlockForm("vanilla", chosen=True),
    BlockForm("gated", chosen=True, block_size=16, anchor=True),
    BlockForm("rnn", block_size=8),
    BlockForm("rnn", "speculators, bidirectional", anchor=True),
)
BLOCKS = (FORMS[5], FORMS[7], FORMS[8])
"""A form of DFlash 2, one of DSpark, and one of DSpark that drafts from the anchor too."""


def opened_draft(path: Path, config: dict[str, Any], tensors: dict[str, Tensor], target: Trunk = TRUNK) -> OpenModel:
    """Write a trunk and a drafter, and open both."""
    directory = path / "draft"
    directory.mkdir()
    write_json(directory / "config.json", config)
    save_tensors(tensors, directory / "model.safetensors")
    return open_model(str(save_stripped(target, path / "trunk")), str(directory))


def opened(
    path: Path, block_size: int, fields: dict[str, Any] = AUTHORS, target: Trunk = TRUNK, **changes: Any
) -> OpenModel:
    """Write a trunk and a drafter as a release has it, of speculators with an output matrix; open both."""
    model = reference(block_size)
    tensors = dict(model.state_dict()) if fields is TRANSFORMERS else own_names(model)
    if fields is SPECULATORS:
        tensors |= {"lm_head.weight": OUTPUT.weight, "d2t": CHOSEN - torch.arange(len(CHOSEN))}
    return opened_draft(path, {**fields, "block_size": block_size, **changes}, tensors, target)


def opened_form(path: Path, form: BlockForm, target: Trunk = TRUNK) -> OpenModel:
    return opened_draft(path, form.config, own_names(reference(form.block_size)) | form.tensors, target)


@torch.no_grad()
def stock_drafts(model: Any, text: Sequence[int], output: Any) -> list[int]:
    """Return what transformers drafts after a text, the last token of which the trunk has not read."""
    target = TRUNK.causal_lm
    ids = torch.tensor([text])
    ends = target.get_input_embeddings(), output or target.lm_head
    generator = DFlashTokenCandidateGenerator(model, *ends, GenerationConfig(max_length=1000))
    places = {"position_ids": torch.arange(len(text))[None], "attention_mask": torch.ones_like(ids)}
    read = target(ids[:, :-1], output_hidden_states=True)
    candidates, _ = generator.get_candidates(ids, places, read, is_first_iteration=False, n_last_matches=0)
    return candidates[0, len(text) :].tolist()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="the generator of transformers 5.17 drafts otherwise"
)
@pytest.mark.parametrize(("fields", "output"), [(AUTHORS, None), (SPECULATORS, OUTPUT), (TRANSFORMERS, None)])
@pytest.mark.parametrize(("block_size", "depths"), [(4, (3,) * 4), (16, (15,) * 4), (16, (3, 0, 0, 2))])
def test_drafts_are_those_of_transformers(
    block_size: int, depths: Sequence[int], fields: Any, output: Any, tmp_path: Path
) -> None:
    """Shallow rounds draft the first tokens of a whole block; rounds without drafts are not forgotten."""
    drafting = opened(tmp_path, block_size, fields).load_drafting(TRUNK)
    seen = drafted_in_rounds(TRUNK, drafting, texts(), depths)
    slides = SLIDES if fields is TRANSFORMERS else {}
    models = (
        reference(block_size, **slides),
        reference(block_size, [1, 3], **slides),
        reference(block_size, mask=MASK + 1, **slides),
        reference(block_size, **{**slides, "sliding_window": 3} if slides else {"layer_types": MIXED}),
    )
    equal, *others = (
        sum(drafts == stock_drafts(model, text, output)[: len(drafts)] for text, drafts in seen) for model in models
    )
    assert equal == len(seen) > 2 * max(others)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_drafts_are_those_of_the_definition(form: BlockForm, tmp_path: Path) -> None:
    """No other first row, mask token, layers, window or correction gives them."""
    drafting = opened_form(tmp_path, form).load_drafting(TRUNK)
    seen = drafted_in_rounds(TRUNK, drafting, texts(), (form.depth, 0, 0, 2, form.depth))
    changes: list[dict[str, Any]] = [{}, {"mask": MASK + 1}, {"layers": (1, 3)}, {"anchor": not form.anchor}]
    changes += [{"form": "everything"}, *([] if form.kind == "dflash" else [{"corrects": False}])]
    equal, *others = (
        sum(drafts[: one.depth] == one.best(text, min(one.depth, len(drafts))) for text, drafts in seen)
        for one in (replace(form, **change) for change in changes)
    )
    assert equal == len(seen) > 2 * max(others)


@pytest.mark.parametrize("form", BLOCKS, ids=str)
def test_drafts_are_drawn_from_what_the_correction_leaves(form: BlockForm, tmp_path: Path) -> None:
    rounds: list[tuple[int, list[int], Tensor]] = []

    def seen(plan: Any, newest_B1: Tensor, drafts: Any) -> Any:
        rounds.append((int(newest_B1), drafts.tokens_BK[0].tolist(), drafts.q_BKV[0]))
        return drafts

    drafting = PassingDrafting(opened_form(tmp_path, form).load_drafting(TRUNK), seen)
    decoder = SpeculativeDecoder(TRUNK, drafting, form.depth, (), draft_sampling="sampled")
    for seed in range(4):
        decoder.generate([PROMPTS[1]], max_new_tokens=2, sampling=Sampling(temperature=0.8, seed=seed))
    for newest, drafts, q_KV in rounds:
        expected: list[Tensor] = []

        def given(logits_V: Tensor, drafts: list[int] = drafts, expected: list[Tensor] = expected) -> int:
            expected.append((logits_V / 0.8).softmax(-1))
            return drafts[len(expected) - 1]

        form.drafted([*PROMPTS[1], newest], len(drafts), given)
        torch.testing.assert_close(q_KV, torch.stack(expected), atol=1e-4, rtol=0)
    assert len({tuple(drafts) for _, drafts, _ in rounds}) > 1


@pytest.mark.parametrize("form", [FORMS[0], FORMS[2], *BLOCKS], ids=str)
def test_the_text_is_the_trunks_at_the_deepest_of_each_kind(form: BlockForm, tmp_path: Path) -> None:
    model = opened_form(tmp_path, form)
    assert model.deepest == form.depth
    decoder = SpeculativeDecoder(TRUNK, model.load_drafting(TRUNK), form.depth, (), max_batch=2)
    for text, result in zip(texts().values(), decoder.generate(PROMPTS, max_new_tokens=24), strict=True):
        assert list(result.token_ids) == text[:24]
        assert result.num_draft_tokens == form.depth * result.num_drafts > 0


@pytest.mark.parametrize("form", [None, BLOCKS[2]], ids=str)
def test_recurrent_layers_bound_the_depth(form: BlockForm | None, tmp_path: Path) -> None:
    target = tiny_trunk("qwen3_5", num_layers=4)
    model = opened(tmp_path, 16, target=target) if form is None else opened_form(tmp_path, form, target)
    assert model.deepest == 7
    drafting = model.load_drafting(target)
    with pytest.raises(MtpError, match=r"depth: 8 .* expected at most 7, as its recurrent layers"):
        SpeculativeDecoder(target, drafting, 8, ())
    drafted, plain = (
        [result.token_ids for result in SpeculativeDecoder(target, drafting, depth, ()).generate(PROMPTS, 9)]
        for depth in (7, 0)
    )
    assert drafted == plain


def test_its_block_bounds_the_depth_and_inspect_names_it(tmp_path: Path, capfd: Capture) -> None:
    model = opened(tmp_path, 4)
    assert model.deepest == model.load_drafting(TRUNK).deepest == 3
    found = document(["inspect", tmp_path / "draft", "--base", tmp_path / "trunk"], capfd)
    assert f"layers 1, 3, drafts blocks of 4 tokens with mask token {MASK}, from {VOCAB_SIZE}" in found["note"]
    assert '"num_speculative_tokens":3' in found["serves"]["vllm"]


@pytest.mark.parametrize(
    ("form", "noted", "served"),
    [
        (FORMS[0], ", with sliding layers (3, causal) that reach 6 tokens back,", {"vllm": "; it masks some layers"}),
        (FORMS[1], ", with sliding layers (3) that reach 6", {"llama.cpp": "no: its converter reads the auth"}),
        (FORMS[2], ", with sliding layers (3, causal) that reach 5", {"llama.cpp": "; it masks some layers"}),
        (FORMS[5], f"a selector of {TOP} tokens", {"vllm": '"method":"dflash"'}),
        (FORMS[7], "a Markov head (vanilla) of rank 8; its conf", {"vllm": "; it masks some layers"}),
        (BLOCKS[2], "a Markov head (gated) of rank 8", dict.fromkeys(("vllm", "llama.cpp"), "no: has vanilla")),
    ],
    ids=str,
)
def test_inspect_names_what_it_has_and_what_engines_make_of_it(
    form: BlockForm, noted: str, served: dict[str, str], tmp_path: Path, capfd: Capture
) -> None:
    opened_form(tmp_path, form)
    found = document(["inspect", tmp_path / "draft", "--base", tmp_path / "trunk"], capfd)
    assert noted in found["note"]
    assert f"layers 1, 3, drafts blocks of {form.block_size} tokens with mask token {MASK}" in found["note"]
    for engine, text in {"transformers": "no: drafts with Muse", **served}.items():
        assert text in found["serves"][engine]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}}, r"it reads is \(1, 5\), in"),
        ({"dflash_config": {"mask_token_id": VOCAB_SIZE, "target_layer_ids": READ}}, r"mask_token_id is"),
        ({"layer_types": MIXED, "sliding_window": None}, r"sliding_window: None; expected the window"),
        ({"is_neox_style": False}, r"is_neox_style = False, a form of DFlash draft model that"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(MtpError, match=said):
        opened(tmp_path, 4, **changes)
