"""An external drafter on the trunk's own keys: what it proposes, and that the text stays the trunk's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import DynamicCache, GenerationConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from assistants import (
    CHOSEN_CENTROIDS,
    HAS_ASSISTANTS,
    NUM_CENTROIDS,
    ORDERED_VOCAB_SIZE,
    VARIANTS,
    assistant_head,
    tiny_assistant,
    tiny_gemma_trunk,
)
from checkpoints import rewrite
from mtp_inference import AssistantDrafting, Sampling, SpeculativeDecoder
from mtp_inference.drafters.drafter import RoundPlan
from mtp_inference.opening import head_plan
from mtp_inference.sampling.chooser import Chooser, DraftChoice
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.errors import CheckpointError, MtpError
from mtp_train.heads import assistant as assistant_module
from mtp_train.heads.build import build_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.trunk.load import Trunk
from plain_decoding import hidden_after
from scripted import BatchRun, RandomDrafting, TextsAndDrafts, drafted_in_rounds, plain_texts, state_bound, state_errors
from tiny import SLIDING_WINDOW, VOCAB_SIZE

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
needs_witness = pytest.mark.skipif(
    "input_ids" in inspect.signature(SinglePositionMultiTokenCandidateGenerator).parameters,
    reason="this transformers drafts from another state after the prompt",
)
LENGTHS = (3, 21, 9, 14, 2)
"""Of prompts: shorter and longer than the sliding window."""


@functools.cache
def trunk(variant: str = "shared", vocab_size: int = VOCAB_SIZE) -> Trunk:
    return tiny_gemma_trunk(variant, vocab_size=vocab_size)


@functools.cache
def assistant(variant: str = "shared", vocab_size: int = VOCAB_SIZE, ordered: bool = False) -> Any:
    return tiny_assistant(variant, vocab_size=vocab_size, ordered=ordered)


class Pair(NamedTuple):
    """A trunk and its drafter."""

    trunk: Trunk
    model: Any

    def drafting(self) -> AssistantDrafting:
        return AssistantDrafting(assistant_head(self.model))


def pair(name: str = "shared") -> Pair:
    """Return the pair of a variant, or ``ordered``: the first variant, the drafter with centroids."""
    if name == "ordered":
        return Pair(trunk(vocab_size=ORDERED_VOCAB_SIZE), assistant(vocab_size=ORDERED_VOCAB_SIZE, ordered=True))
    return Pair(trunk(name), assistant(name))


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(ORDERED_VOCAB_SIZE, (length,), generator=generator).tolist() for length in lengths]


def stock_drafts(pair: Pair, text: Sequence[int], depth: int) -> list[int]:
    """Return what transformers drafts after a text, the last token of which the trunk has not read."""
    pair.model.generation_config.num_assistant_tokens = depth
    generator = SinglePositionMultiTokenCandidateGenerator(
        pair.model, pair.trunk.causal_lm.get_input_embeddings(), GenerationConfig(max_length=1000)
    )
    ids = torch.tensor([list(text)])
    with torch.no_grad():
        # Read anew, without a cache: transformers leaves the keys of rejected drafts in sight.
        read = pair.trunk.causal_lm(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
        candidates, _ = generator.get_candidates(ids, {}, read, is_first_iteration=False, n_last_matches=0)
    return candidates[0, len(text) :].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_decoding_equals_transformers_own(variant: str) -> None:
    short_and_long = prompts(LENGTHS[:3])
    decoder = SpeculativeDecoder(trunk(variant), None, 0, (), max_batch=2)
    for prompt, result in zip(short_and_long, decoder.generate(short_and_long, max_new_tokens=24), strict=True):
        model = trunk(variant).causal_lm
        stock = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        assert list(result.token_ids) == stock[0, len(prompt) :].tolist()
        assert len(set(result.token_ids)) > 4


@pytest.mark.parametrize("variant", VARIANTS)
def test_rejected_drafts_leave_no_trace_in_the_trunks_keys(variant: str) -> None:
    run = BatchRun(trunk(variant), RandomDrafting(), prompts((3, 21)), depth=3)
    for _ in range(6):
        run.run_round(3)
    for row, tokens in enumerate(run.tokens):
        errors = state_errors(run.cache, trunk(variant), tokens[:-1], row)
        assert errors.keys() == {"keys", "values"}
        assert max(errors.values()) < state_bound(trunk(variant))


@functools.cache
def plain(name: str) -> dict[tuple[int, ...], list[int]]:
    """Return the plain texts, as long as seven rounds and what they draft beyond."""
    return plain_texts(pair(name).trunk, prompts(), 32)


@pytest.mark.parametrize(("depth", "max_batch"), [(1, 2), (2, 1), (3, 2)])
@pytest.mark.parametrize("name", [*VARIANTS, "ordered"])
def test_the_text_is_the_trunks(depth: int, max_batch: int, name: str) -> None:
    decoder = SpeculativeDecoder(pair(name).trunk, pair(name).drafting(), depth, (), max_batch=max_batch)
    results = decoder.generate(prompts(LENGTHS[:3]), max_new_tokens=20)
    for text, result in zip(plain(name).values(), results, strict=False):
        assert list(result.token_ids) == text[:20]
        assert result.num_draft_tokens == depth * result.num_drafts > 0


def rounds(name: str, depths: Sequence[int] = (3,) * 7) -> TextsAndDrafts:
    return drafted_in_rounds(pair(name).trunk, pair(name).drafting(), plain(name), depths)


@needs_witness
@pytest.mark.parametrize(
    ("name", "depths"), [("shared", (3,) * 7), ("ordered", (3,) * 7), ("shared", (3, 0, 0, 3, 3, 3, 0, 3))]
)
def test_drafts_are_those_of_transformers(name: str, depths: Sequence[int]) -> None:
    """Rounds without drafts are not forgotten."""
    seen = rounds(name, depths)
    assert max(len(text) for text, _ in seen) > 3 * SLIDING_WINDOW
    for text, drafts in seen:
        assert drafts == stock_drafts(pair(name), text, 3)


@needs_witness
@pytest.mark.parametrize(("constant", "other"), [("POSITION_OFFSET", 0), ("MORE_SLIDING_KEYS", -1)])
def test_another_placing_drafts_otherwise(constant: str, other: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assistant_module, constant, other)
    assert not all(drafts == stock_drafts(pair(), text, 3) for text, drafts in rounds("shared"))


def test_a_trunk_that_shares_no_keys_is_read_at_the_last_layers() -> None:
    """transformers hands out no keys of such a trunk: take them from its cache, which holds short texts whole."""
    both = pair("values_are_keys")
    short = [(text, drafts) for text, drafts in rounds("values_are_keys") if len(text) < SLIDING_WINDOW]
    assert len(short) > 2
    for text, drafts in short:
        cache = DynamicCache(config=both.trunk.config)
        with torch.no_grad():
            hidden_1TD = hidden_after(both.trunk, torch.tensor([text[:-1]]), cache)
            layers = dict(zip(both.trunk.config.layer_types, cache.layers, strict=True))
            keys = {kind: (layer.keys, layer.values) for kind, layer in layers.items()}
            state, token, expected = hidden_1TD[:, -1:], torch.tensor([text[-1:]]), []
            for _ in drafts:
                inputs = torch.cat([both.trunk.embed(token), state], dim=-1)
                place = torch.tensor([[len(text) - 1]])
                step = both.model(inputs_embeds=inputs, position_ids=place, shared_kv_states=keys, use_cache=False)
                state = step.last_hidden_state
                token = step.logits.argmax(-1)
                expected.append(token.item())
        assert drafts == expected


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [("shared", VOCAB_SIZE), ("ordered", CHOSEN_CENTROIDS * ORDERED_VOCAB_SIZE // NUM_CENTROIDS)],
)
def test_q_is_zero_outside_the_chosen_centroids(name: str, num_tokens: int) -> None:
    run = BatchRun(pair(name).trunk, pair(name).drafting(), prompts(), depth=2)
    hot = [Sampling(temperature=20.0)] * len(prompts())
    chooser = Chooser(hot, "sampled", torch.device("cpu"))
    assert run.drafter is not None
    choice = DraftChoice(chooser, run.batch.last_B, run.batch.length_B)
    with torch.inference_mode():
        q_BKV = run.drafter.draft(RoundPlan(2, 32, 0, None), choice).q_BKV
    assert q_BKV is not None
    assert torch.equal((q_BKV > 0).sum(-1), torch.full((len(prompts()), 2), num_tokens))


@pytest.mark.parametrize("name", [*VARIANTS, "ordered"])
def test_it_is_loaded_whole_or_not_at_all(name: str, tmp_path: Path) -> None:
    one = pair(name)
    directory = tmp_path / "assistant"
    one.trunk.causal_lm.save_pretrained(tmp_path / "trunk")
    one.model.save_pretrained(directory)
    target = open_checkpoint(tmp_path / "trunk")
    plan = head_plan(target, str(directory))
    loaded = build_head(plan, text_config_of(target), dtype=torch.float32)
    stored = one.model.state_dict()
    del stored["lm_head.weight"]
    assert loaded.model.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in loaded.model.state_dict().items())
    rewrite(directory, lambda tensors: tensors.pop("post_projection.weight"))
    with pytest.raises(CheckpointError, match=r"keys missing: post_projection.weight"):
        head_plan(target, str(directory))


def test_a_trunk_it_was_not_made_for_is_refused() -> None:
    with pytest.raises(MtpError, match=r"size of 32 and 67 tokens; found a trunk of 32 and 64"):
        SpeculativeDecoder(pair("ordered").trunk, pair().drafting(), 3, ())


@torch.inference_mode()
def test_a_trunk_s_logits_are_bounded_as_transformers_bounds_them() -> None:
    gemma = trunk()
    tokens_1T = torch.arange(7)[None]
    expected = gemma.causal_lm(tokens_1T).logits
    bare = gemma.causal_lm.lm_head(gemma.hidden(tokens_1T))
    torch.testing.assert_close(gemma.logits(gemma.hidden(tokens_1T)), expected, atol=1e-5, rtol=0)
    assert (bare - expected).abs().max() > 1e-3
