"""DFlash drafters: the drafts are transformers' own, in both released formats, and the text stays the trunk's."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GenerationConfig

from block_drafters import HAS_BLOCK_DRAFTERS, LAYER, MASK, READ, reference, speculators, write_drafter
from checkpoints import save_stripped
from mtp_inference import SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.opening import open_model
from mtp_train.errors import MtpError, RecipeError, UnsupportedModelError
from mtp_train.heads.module import OutputRows
from mtp_train.trunk.load import Trunk
from plain_decoding import plain_greedy
from runs import Capture, document, tiny_recipe
from scripted import BatchRun, ScriptedDrafting, random_prompt
from tiny import VOCAB_SIZE, tiny_trunk

pytestmark = pytest.mark.skipif(not HAS_BLOCK_DRAFTERS, reason="this transformers has no block drafters")
if HAS_BLOCK_DRAFTERS:
    from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator

CHOSEN = torch.tensor([0, 3, 4, 9, 20, 33, 34, 50, 66])
PROMPTS = [random_prompt(length, seed=length) for length in (3, 21, 9, 14, 1)]


@functools.cache
def trunk() -> Trunk:
    return tiny_trunk("qwen3", num_layers=5)


@functools.cache
def plain() -> list[list[int]]:
    """Return the plain texts, as long as four rounds and what they draft beyond."""
    return [plain_greedy(trunk(), prompt, 90, ()) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stripped(trunk(), tmp_path_factory.mktemp("trunk") / "trunk")


def drafting(files: Path, drafter: Path) -> Drafting:
    found = open_model(str(files), str(drafter)).load_drafting(trunk())
    assert found is not None
    return found


def stock_drafts(model: Any, text: Sequence[int], output: nn.Module | None = None) -> list[int]:
    """Return what transformers drafts after a text, the last token of which the trunk has not read."""
    target, ids = trunk().causal_lm, torch.tensor([text])
    ends = target.get_input_embeddings(), output or target.get_output_embeddings()
    generator = DFlashTokenCandidateGenerator(model, *ends, GenerationConfig(max_length=1000))
    places = {"position_ids": torch.arange(len(text))[None], "attention_mask": torch.ones_like(ids)}
    with torch.no_grad():
        read = target(ids[:, :-1], output_hidden_states=True)
        candidates, _ = generator.get_candidates(ids, places, read, is_first_iteration=False, n_last_matches=0)
    return candidates[0, len(text) :].tolist()


def rounds(drafting: Drafting, *depths: int) -> list[tuple[list[int], list[int]]]:
    """Run rounds of every outcome; return the texts before those with drafts, and what each was drafted."""
    texts = {tuple(prompt): text for prompt, text in zip(PROMPTS, plain(), strict=True)}
    script = ScriptedDrafting(texts, (0, max(depths), 1, 2), drafting)
    run = BatchRun(trunk(), script, PROMPTS, depth=max(depths))
    seen = []
    for depth in depths:
        before = copy.deepcopy(run.tokens)
        run.run_round(depth)
        if depth:
            seen += list(zip(before, script.real_drafts[-1].tolist(), strict=True))
    return seen


@pytest.mark.parametrize("fields", [{}, speculators()], ids=["authors", "speculators"])
@pytest.mark.parametrize(("block_size", "depths"), [(4, (3,) * 4), (16, (15,) * 4), (16, (3, 0, 0, 3, 2))])
def test_drafts_are_those_of_transformers(
    block_size: int, depths: Sequence[int], fields: dict[str, Any], files: Path, tmp_path: Path
) -> None:
    """Shallow rounds draft the first tokens of a whole block; rounds without drafts are not forgotten."""
    seen = rounds(drafting(files, write_drafter(tmp_path / "draft", block_size, **fields)), *depths)
    assert len({tuple(drafts) for _, drafts in seen}) > len(PROMPTS)
    for text, drafts in seen:
        assert drafts == stock_drafts(reference(block_size), text)[: len(drafts)]


@pytest.mark.parametrize("changes", [{"layers": [one + 1 for one in READ]}, {"mask": MASK + 1}])
def test_other_layers_or_mask_tokens_draft_otherwise(changes: dict[str, Any], files: Path, tmp_path: Path) -> None:
    seen, other = rounds(drafting(files, write_drafter(tmp_path / "draft", 4)), 3, 3), reference(4, **changes)
    assert sum(drafts != stock_drafts(other, text) for text, drafts in seen) > len(seen) / 2


def test_a_draft_vocabulary_has_an_output_matrix_of_its_own(files: Path, tmp_path: Path) -> None:
    rows_RD = torch.randn(len(CHOSEN), LAYER["hidden_size"], generator=torch.Generator().manual_seed(3))
    more = {"lm_head.weight": rows_RD, "d2t": CHOSEN - torch.arange(len(CHOSEN))}
    more["embed_tokens.weight"] = trunk().causal_lm.get_input_embeddings().weight
    drafter = write_drafter(tmp_path / "draft", 4, more, **speculators(draft_vocab_size=len(CHOSEN)))
    output = OutputRows(rows_RD, CHOSEN, VOCAB_SIZE)
    assert all(d == stock_drafts(reference(4), text, output) for text, d in rounds(drafting(files, drafter), 3, 3))


@pytest.mark.parametrize(("block_size", "depth", "max_batch"), [(4, 3, 2), (16, 15, 3), (16, 5, 1)])
def test_the_text_is_the_trunks(block_size: int, depth: int, max_batch: int, files: Path, tmp_path: Path) -> None:
    drafter = write_drafter(tmp_path / "draft", block_size)
    assert open_model(str(files), str(drafter)).deepest == block_size - 1
    decoder = SpeculativeDecoder(trunk(), drafting(files, drafter), depth, (), max_batch=max_batch)
    for text, result in zip(plain(), decoder.generate(PROMPTS, max_new_tokens=24), strict=True):
        assert list(result.token_ids) == text[:24]
        assert result.num_draft_tokens == depth * result.num_drafts > 0
    with pytest.raises(MtpError, match=f"expected 0 to {block_size - 1}"):
        SpeculativeDecoder(trunk(), decoder.drafting, block_size, ())


def test_recurrent_layers_bound_the_depth(tmp_path: Path) -> None:
    target = tiny_trunk("qwen3_5", num_layers=4)
    files = save_stripped(target, tmp_path / "trunk")
    model = open_model(str(files), str(write_drafter(tmp_path / "draft", 16)))
    assert model.deepest == 7
    drafter = model.load_drafting(target)
    with pytest.raises(UnsupportedModelError, match=r"depth: 8 .* expected at most 7, as its recurrent layers"):
        SpeculativeDecoder(target, drafter, 8, ())
    result = SpeculativeDecoder(target, drafter, 7, ()).generate([PROMPTS[1]], max_new_tokens=12)[0]
    assert list(result.token_ids) == plain_greedy(target, PROMPTS[1], 12, ())


def test_inspect_names_what_is_read_and_commands_take_it(files: Path, tmp_path: Path, capfd: Capture) -> None:
    drafter = write_drafter(tmp_path / "draft", 4)
    found = document(["inspect", drafter, "--base", files], capfd)
    assert (found["family"], found["status"], found["missing_keys"]) == ("dflash", "healthy", [])
    assert f"layers 1, 3, drafts blocks of 4 tokens with mask token {MASK}, from {VOCAB_SIZE}" in found["note"]
    assert '"method":"dflash"' in found["serves"]["vllm"]
    assert '"num_speculative_tokens":3' in found["serves"]["vllm"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"vocab_size": 7}, r"vocab_size is 7"),
        ({"num_target_layers": 6}, r"num_target_layers is 6, in .* it is 5"),
        ({"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 4]}}, r"it reads is \(1, 5\), in"),
        ({"dflash_config": {"target_layer_ids": [0, 2]}}, r"mask_token_id"),
        ({"sample_from_anchor": True}, r"sample_from_anchor = True"),
        ({"layer_types": ["sliding_attention"] * 2}, r"layer_types: has sliding_attention"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], said: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises(MtpError, match=said):
        open_model(str(files), str(write_drafter(tmp_path / "draft", 4, **changes)))


def test_a_recipe_cannot_train_one() -> None:
    with pytest.raises(RecipeError, match=r"kind: 'dflash', which can be decoded with and not trained"):
        tiny_recipe(Path("anywhere"), Path("anywhere"), head__kind="dflash")
