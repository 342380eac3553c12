"""DFlash drafters: the drafts are transformers' own, in both released formats, and the text stays the trunk's."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import CONFIG_MAPPING, AutoModel, GenerationConfig

from assistants import randomise
from checkpoints import save_stripped, save_tensors
from json_files import write_json
from mtp_inference import SpeculativeDecoder
from mtp_inference.opening import OpenModel, open_model
from mtp_train.errors import MtpError
from mtp_train.heads.module import OutputRows
from mtp_train.trunk.load import Trunk
from runs import Capture, document
from scripted import PlainTexts, drafted_in_rounds, plain_texts, random_prompt
from tiny import VOCAB_SIZE, tiny_trunk

MODEL_TYPE = "muse_glimmer_assistant"
pytestmark = pytest.mark.skipif(MODEL_TYPE not in CONFIG_MAPPING, reason="this transformers has no block drafters")
if MODEL_TYPE in CONFIG_MAPPING:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

MASK, READ = 5, [0, 2]
"""The mask token, and the layers whose output the drafter reads, as its authors count."""
CHOSEN = torch.arange(0, VOCAB_SIZE, 2)
OUTPUT = OutputRows(torch.randn(len(CHOSEN), 32, generator=torch.Generator().manual_seed(3)), CHOSEN, VOCAB_SIZE)
PROMPTS = [random_prompt(length, seed=length) for length in (3, 21, 9, 14, 1)]
TRUNK = tiny_trunk("qwen3", num_layers=5)
LAYERS = {**TRUNK.config.to_dict(), "architectures": ["DFlashDraftModel"]}
"""The config of a drafter's layers, which are as many and as wide as the trunk's."""
AUTHORS = {**LAYERS, "dflash_config": {"mask_token_id": MASK, "target_layer_ids": READ}}
SPECULATORS = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": MASK,
    "draft_vocab_size": len(CHOSEN),
    "transformer_layer_config": LAYERS,
}


@functools.cache
def texts() -> PlainTexts:
    return plain_texts(TRUNK, PROMPTS, 90)


def reference(block_size: int, layers: Sequence[int] = READ, mask: int = MASK) -> Any:
    """Return transformers' drafter, its attention sharp enough that the drafts of a block differ."""
    fields = {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": layers, "sliding_window": 8}
    config = CONFIG_MAPPING[MODEL_TYPE].from_dict({**LAYERS, "model_type": MODEL_TYPE, **fields})
    model = AutoModel.from_config(config).eval()
    randomise(model, 3)
    for layer in model.requires_grad_(False).layers:
        layer.self_attn.q_norm.weight *= 8
    return model


def opened(
    path: Path, block_size: int, fields: dict[str, Any] = AUTHORS, target: Trunk = TRUNK, **changes: Any
) -> OpenModel:
    """Write a trunk and a drafter as a release has it, of speculators with an output matrix; open both."""
    directory = path / "draft"
    directory.mkdir()
    write_json(directory / "config.json", {**fields, "block_size": block_size, **changes})
    renames = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    tensors = {renames.get(name, name): value for name, value in reference(block_size).state_dict().items()}
    if fields is SPECULATORS:
        tensors |= {"lm_head.weight": OUTPUT.weight, "d2t": CHOSEN - torch.arange(len(CHOSEN))}
    save_tensors(tensors, directory / "model.safetensors")
    return open_model(str(save_stripped(target, path / "trunk")), str(directory))


@torch.no_grad()
def stock_drafts(model: Any, text: Sequence[int], output: Any) -> list[int]:
    """Return what transformers drafts after a text, the last token of which the trunk has not read."""
    target, ids = TRUNK.causal_lm, torch.tensor([text])
    ends = target.get_input_embeddings(), output or target.lm_head
    generator = DFlashTokenCandidateGenerator(model, *ends, GenerationConfig(max_length=1000))
    places = {"position_ids": torch.arange(len(text))[None], "attention_mask": torch.ones_like(ids)}
    read = target(ids[:, :-1], output_hidden_states=True)
    candidates, _ = generator.get_candidates(ids, places, read, is_first_iteration=False, n_last_matches=0)
    return candidates[0, len(text) :].tolist()


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.24"), reason="the generator of transformers 5.17 drafts otherwise"
)
@pytest.mark.parametrize(("fields", "output"), [(AUTHORS, None), (SPECULATORS, OUTPUT)])
@pytest.mark.parametrize(("block_size", "depths"), [(4, (3,) * 4), (16, (15,) * 4), (16, (3, 0, 0, 2))])
def test_drafts_are_those_of_transformers(
    block_size: int, depths: Sequence[int], fields: Any, output: Any, tmp_path: Path
) -> None:
    """Shallow rounds draft the first tokens of a whole block; rounds without drafts are not forgotten."""
    drafting = opened(tmp_path, block_size, fields).load_drafting(TRUNK)
    seen = drafted_in_rounds(TRUNK, drafting, texts(), depths)
    models = reference(block_size), reference(block_size, [1, 3]), reference(block_size, mask=MASK + 1)
    equal, *others = (
        sum(drafts == stock_drafts(model, text, output)[: len(drafts)] for text, drafts in seen) for model in models
    )
    assert equal == len(seen) > 2 * max(others)


@pytest.mark.parametrize(("block_size", "depth"), [(4, 3), (16, 15)])
def test_the_text_is_the_trunks(block_size: int, depth: int, tmp_path: Path) -> None:
    drafting = opened(tmp_path, block_size).load_drafting(TRUNK)
    decoder = SpeculativeDecoder(TRUNK, drafting, depth, (), max_batch=2)
    for text, result in zip(texts().values(), decoder.generate(PROMPTS, max_new_tokens=24), strict=True):
        assert list(result.token_ids) == text[:24]
        assert result.num_draft_tokens == depth * result.num_drafts > 0


def test_recurrent_layers_bound_the_depth(tmp_path: Path) -> None:
    target = tiny_trunk("qwen3_5", num_layers=4)
    model = opened(tmp_path, 16, target=target)
    assert model.deepest == 7
    drafting = model.load_drafting(target)
    with pytest.raises(MtpError, match=r"depth: 8 .* expected at most 7, as its recurrent layers"):
        SpeculativeDecoder(target, drafting, 8, ())
    assert SpeculativeDecoder(target, drafting, 7, ()).generate(PROMPTS, max_new_tokens=9)


def test_its_block_bounds_the_depth_and_inspect_names_it(tmp_path: Path, capfd: Capture) -> None:
    model = opened(tmp_path, 4)
    assert model.deepest == model.load_drafting(TRUNK).deepest == 3
    found = document(["inspect", tmp_path / "draft", "--base", tmp_path / "trunk"], capfd)
    assert f"layers 1, 3, drafts blocks of 4 tokens with mask token {MASK}, from {VOCAB_SIZE}" in found["note"]
    assert '"num_speculative_tokens":3' in found["serves"]["vllm"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}}, r"it reads is \(1, 5\), in"),
        ({"dflash_config": {"mask_token_id": VOCAB_SIZE, "target_layer_ids": READ}}, r"mask_token_id is"),
        ({"layer_types": ["sliding_attention"] * 5}, r"layer_types: has sliding_attention"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(MtpError, match=said):
        opened(tmp_path, 4, **changes)
