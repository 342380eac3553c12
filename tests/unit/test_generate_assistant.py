"""``mtp-train generate --head ASSISTANT``: an external drafter in the place of a head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from assistants import HAS_ASSISTANTS, assistant_head, tiny_assistant, tiny_gemma_trunk
from byte_tokenizer import byte_tokenizer
from checkpoints import rewrite
from gguf_files import VOCAB_SIZE
from json_files import read_json
from mtp_inference import AssistantDrafting, SpeculativeDecoder
from mtp_train.cli.main import main
from mtp_train.trunk.load import Trunk
from plain_decoding import plain_greedy
from runs import Capture, document, refusal
from tiny import tiny_trunk

pytestmark = pytest.mark.skipif(not HAS_ASSISTANTS, reason="this transformers has no external drafters")
PROMPTS = ("the quick brown fox jumps", "a")


@pytest.fixture
def trunk() -> Trunk:
    return tiny_gemma_trunk(vocab_size=VOCAB_SIZE)


@pytest.fixture
def saved_trunk(trunk: Trunk, tmp_path: Path) -> Path:
    return saved(trunk.causal_lm, tmp_path / "trunk")


@pytest.fixture
def saved_assistant(tmp_path: Path) -> Path:
    tiny_assistant(vocab_size=VOCAB_SIZE).save_pretrained(tmp_path / "assistant")
    return tmp_path / "assistant"


def saved(model: Any, path: Path) -> Path:
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def generated(trunk: Path, *words: object, capfd: Capture) -> Any:
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return document(["generate", trunk, *words, *prompts, "--max-new-tokens", 20], capfd)


def test_the_text_is_the_trunks_and_the_drafts_are_the_assistants(
    trunk: Trunk, saved_trunk: Path, saved_assistant: Path, capfd: Capture
) -> None:
    prompts = [byte_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS]
    eos = frozenset([byte_tokenizer().eos_token_id])
    drafting = AssistantDrafting(assistant_head(tiny_assistant(vocab_size=VOCAB_SIZE)))
    expected = SpeculativeDecoder(trunk, drafting, 2, eos).generate(prompts, max_new_tokens=20)
    found = generated(saved_trunk, "--head", saved_assistant, "--depth", 2, capfd=capfd)
    for prompt, one, other in zip(prompts, found["requests"], expected, strict=True):
        assert one["token_ids"] == plain_greedy(trunk, prompt, 20, eos)
        assert (one["num_drafts"], one["accepted_per_pos"]) == (other.num_drafts, list(other.accepted_per_pos))
        assert one["num_draft_tokens"] == 2 * one["num_drafts"] > 0
    plain = generated(saved_trunk, "--head", saved_assistant, "--mtp", "off", capfd=capfd)
    assert [one["token_ids"] for one in plain["requests"]] == [one["token_ids"] for one in found["requests"]]
    assert all(one["num_draft_tokens"] == 0 for one in plain["requests"])


def test_the_language_model_of_a_release_is_decoded(
    trunk: Trunk, saved_assistant: Path, tmp_path: Path, capfd: Capture
) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    vision = {**sizes, "num_key_value_heads": 1, "head_dim": 16, "global_head_dim": 16}
    config = CONFIG_MAPPING["gemma4"](text_config=trunk.config.to_dict(), vision_config=vision, audio_config=None)
    config.tie_word_embeddings = False
    whole = AutoModelForCausalLM.from_config(config)
    whole.get_decoder().load_state_dict(trunk.decoder.state_dict())
    whole.lm_head.load_state_dict(trunk.causal_lm.lm_head.state_dict())
    found = generated(saved(whole, tmp_path / "release"), "--head", saved_assistant, capfd=capfd)
    for prompt, one in zip(PROMPTS, found["requests"], strict=True):
        tokens = byte_tokenizer()(prompt)["input_ids"]
        assert one["token_ids"] == plain_greedy(trunk, tokens, 20, [byte_tokenizer().eos_token_id])
        assert one["num_draft_tokens"] > 0


def test_a_trunk_of_another_kind_is_refused_before_it_is_loaded(
    saved_assistant: Path, tmp_path: Path, capfd: Capture
) -> None:
    other = saved(tiny_trunk("glm4_moe", vocab_size=VOCAB_SIZE).causal_lm, tmp_path / "other")
    message = refusal(["generate", other, "--head", saved_assistant, "--prompt", "a"], capfd)
    assert "head.kind: assistant for a trunk of GLM" in message
    assert "expected Gemma 4 (gemma4_text" in message


def test_a_damaged_assistant_is_refused(saved_trunk: Path, saved_assistant: Path, capfd: Capture) -> None:
    command = ["generate", str(saved_trunk), "--head", str(saved_assistant), "--prompt", "a"]
    rewrite(saved_assistant, lambda tensors: tensors["pre_projection.weight"][0].fill_(torch.nan))
    assert main(command) == 2
    assert "pre_projection.weight: holds NaN" in capfd.readouterr().err
    rewrite(saved_assistant, lambda tensors: tensors.pop("pre_projection.weight"))
    assert main(command) == 2
    assert "keys missing: pre_projection.weight" in capfd.readouterr().err


def test_a_trunk_without_its_assistant_says_how_to_give_it(saved_trunk: Path, capfd: Capture) -> None:
    assert read_json(saved_trunk / "config.json")["model_type"] == "gemma4_text"
    message = refusal(["generate", saved_trunk, "--prompt", "a"], capfd)
    assert "the assistant. Pass it to generate as --head" in message
