"""Speculative decoding says exactly what plain decoding says, and leaves exactly its state."""

from __future__ import annotations

import pytest
import torch

import mtp_inference.decoder
from mtp_inference import SpeculativeDecoder, compare, plain_greedy
from mtp_inference.cache import RollbackCache
from scripted import STATE_TOLERANCE, ScriptedDecoder, random_prompt, state_errors
from tiny import FAMILY_NAMES, tiny_head, tiny_trunk

NEW_TOKENS = 24
# Drafts to get right per round; 9 means all, whatever the depth.
SCRIPTS = {"always_right": [9], "always_wrong": [0], "alternating": [9, 0], "mixed": [1, 9, 0, 2, 0, 3, 9, 9, 1]}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_greedy_speculative_equals_plain(family_name: str, tied: bool) -> None:
    for seed, num_prompt_tokens in enumerate((1, 2, 3, 9)):
        trunk = tiny_trunk(family_name, seed, tied)
        head = tiny_head(trunk, seed)
        prompt = random_prompt(num_prompt_tokens, seed)
        plain = plain_greedy(trunk, prompt, NEW_TOKENS, ())
        assert len(set(plain)) >= 6, "a text that loops proves little"
        for depth in range(8) if num_prompt_tokens == 9 else (0, 3):
            result = SpeculativeDecoder(trunk, head, depth, ()).generate(prompt, NEW_TOKENS)
            assert compare(result.token_ids, plain, trunk, prompt).verdict == "identical", (seed, depth)


@pytest.mark.parametrize("depth", range(1, 8))
@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_no_drafter_changes_the_text(family_name: str, script: str, depth: int) -> None:
    trunk = tiny_trunk(family_name, seed=depth)
    accepted = [min(depth, num_right) for num_right in SCRIPTS[script]]
    prompt = random_prompt(4, seed=depth)
    decoder = ScriptedDecoder(trunk, tiny_head(trunk), depth, prompt=prompt, accepted=accepted, num_text_tokens=40)
    result = decoder.generate(prompt, NEW_TOKENS)
    assert list(result.token_ids) == decoder.plain[:NEW_TOKENS]
    rounds = [accepted[index % len(accepted)] for index in range(result.rounds)]
    assert result.num_draft_tokens == depth * result.rounds
    assert result.num_accepted_tokens == sum(rounds), "the script was not followed"


def run_rounds(family_name: str, depths: list[int], script: str) -> tuple[bool, list[dict[str, float]]]:
    """Decode nine rounds as scripted; say whether the text is plain, and the state's errors after each round."""
    trunk = tiny_trunk(family_name, seed=2)
    prompt = random_prompt(2, seed=2)
    decoder = ScriptedDecoder(trunk, tiny_head(trunk), max(depths), prompt=prompt, accepted=SCRIPTS[script])
    state = decoder.prefill(prompt)
    errors = []
    for index in range(9):
        decoder.run_round(state, depths[index % len(depths)])
        errors.append(state_errors(state.trunk_cache, trunk, state.tokens[:-1]))
    return state.new_tokens == decoder.plain[: len(state.new_tokens)], errors


# The last changes depth from round to round: a round without drafts follows an accepting one.
@pytest.mark.parametrize("depths", [[1], [3], [7], [3, 0, 0, 2, 0, 5]], ids=str)
@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_every_round_leaves_the_state_of_a_plain_forward(family_name: str, depths: list[int]) -> None:
    is_plain, rounds = run_rounds(family_name, depths, "mixed")
    assert is_plain
    for index, errors in enumerate(rounds):
        assert max(errors.values()) < STATE_TOLERANCE, (index, errors)


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_without_rollback_the_text_and_every_state_are_wrong(family_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = RollbackCache.commit
    monkeypatch.setattr(RollbackCache, "commit", lambda cache, num_rejected: commit(cache, num_rejected=0))
    is_plain, rounds = run_rounds(family_name, [3], "alternating")
    assert not is_plain
    assert min(rounds[-1].values()) > 1000 * STATE_TOLERANCE, rounds[-1]


def test_accepting_a_wrong_draft_changes_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mtp_inference.decoder, "accept_greedy", lambda drafts, _: torch.full(drafts.shape[:-1], drafts.shape[-1])
    )
    trunk = tiny_trunk("qwen3_5")
    prompt = random_prompt(4)
    result = SpeculativeDecoder(trunk, tiny_head(trunk), 3, ()).generate(prompt, NEW_TOKENS)
    plain = plain_greedy(trunk, prompt, NEW_TOKENS, ())
    assert compare(result.token_ids, plain, trunk, prompt).verdict == "divergence"
