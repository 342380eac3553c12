"""What the decoder returns and counts, and what it drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

import mtp_inference.drafters.head_drafter
import mtp_inference.session
from mtp_inference import (
    GenerationResult,
    HeadDrafting,
    Request,
    SpeculativeDecoder,
)
from mtp_inference.drafters.drafter import BatchSize, RoundPlan
from mtp_inference.drafters.head_drafter import ChainedDrafter, ChainedDraftsDrafter, RecursiveDrafter
from mtp_inference.sampling.chooser import DraftChoice
from mtp_train.errors import MtpError
from mtp_train.heads.module import Chaining
from mtp_train.trunk.load import Trunk
from redrafted import drafts_from_scratch, drafts_of_training
from scripted import BatchRun, ScriptedDrafting, greedy_chooser, made, plain_texts, random_prompt, spied_drafts
from tiny import ALL_FAMILIES, CHAININGS, FAMILY_NAMES, head_of, tiny_head, tiny_trunk

PROMPT = random_prompt(5)
OTHER_PROMPT = random_prompt(8, seed=1)
Texts = dict[tuple[int, ...], list[int]]
Decode = Callable[..., GenerationResult]


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("glm4_moe")


@pytest.fixture(scope="module")
def texts(trunk: Trunk) -> Texts:
    return plain_texts(trunk, [PROMPT, OTHER_PROMPT], 60)


@pytest.fixture(scope="module")
def plain(texts: Texts) -> list[int]:
    return texts[tuple(PROMPT)]


@pytest.fixture
def scripted(trunk: Trunk, texts: Texts) -> Decode:
    """Decode the prompt at depth 3, alone and beside another one that goes on for longer; nothing may differ."""

    def decode(num_right: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] = ()) -> GenerationResult:
        decoder = SpeculativeDecoder(trunk, ScriptedDrafting(texts, num_right), 3, ())
        request = Request(prompt_ids=PROMPT, max_new_tokens=max_new_tokens, stop_token_ids=frozenset(eos_ids))
        longer = Request(prompt_ids=OTHER_PROMPT, max_new_tokens=20)
        result, _ = decoder.generate([request, longer])
        (alone,) = decoder.generate([request])
        assert (result.token_ids, counts(result)) == (alone.token_ids, counts(alone))
        return result

    return decode


def counts(result: GenerationResult) -> tuple[int, int, tuple[int, ...]]:
    return result.rounds, result.num_draft_tokens, result.accepted_per_pos


def test_counts_are_marginal_and_leave_the_first_token_out(scripted: Decode) -> None:
    result = scripted([2, 0, 3], max_new_tokens=9)
    # 1 from prefill, then 3 + 1 + 4.
    assert len(result.token_ids) == 9
    assert counts(result) == (3, 9, (2, 2, 1))
    assert (result.num_drafts, result.num_accepted_tokens, result.finish_reason) == (3, 5, "length")


def test_a_limit_inside_a_draft_cuts_the_text_and_not_the_counts(scripted: Decode, plain: list[int]) -> None:
    result = scripted([2, 0, 3], max_new_tokens=6)
    assert list(result.token_ids) == plain[:6]
    assert counts(result) == (3, 9, (2, 2, 1))


def test_eos_inside_a_draft_ends_the_text_and_not_the_counts(scripted: Decode, plain: list[int]) -> None:
    # The first of three drafts that the second round accepts.
    assert {plain[5], plain[7]}.isdisjoint(plain[:5])
    result = scripted([3], max_new_tokens=40, eos_ids=[plain[5], plain[7]])
    assert list(result.token_ids) == plain[:6]
    assert result.finish_reason == "stop"
    assert counts(result) == (2, 6, (2, 2, 2))


def test_the_decoders_eos_ends_texts_as_a_requests_does(trunk: Trunk, plain: list[int]) -> None:
    request = Request(prompt_ids=PROMPT, max_new_tokens=20, stop_token_ids=frozenset([plain[9]]))
    for eos, length in ((plain[5], 6), (plain[22], 10)):
        (result,) = SpeculativeDecoder(trunk, None, 0, [eos]).generate([request])
        assert list(result.token_ids) == plain[:length]


def test_a_row_whose_text_has_ended_commits_nothing(trunk: Trunk, texts: Texts, plain: list[int]) -> None:
    run = BatchRun(trunk, ScriptedDrafting(texts, [3]), [PROMPT, OTHER_PROMPT, PROMPT], 3)
    other = texts[tuple(OTHER_PROMPT)]
    assert plain[2] not in plain[:2]
    # The first ends by a stop token and the second by its limit, both inside the first draft.
    run.batch.stop_BN[0, 0] = plain[2]
    run.batch.room_B[1] = 2
    for _ in range(2):
        run.run_round(3)
    assert run.tokens == [PROMPT + plain[:5], OTHER_PROMPT + other[:5], PROMPT + plain[:9]]
    assert run.batch.active_B.tolist() == [False, False, True]
    assert run.batch.length_B.tolist() == [0, 0, len(PROMPT) + 8]


PLACED = ("inkling", "glm5_next", "qwen4_exp", "dots3_note")
"""Heads that know places of keys by other means than a rotary embedding, and one that embeds by itself."""
SCHEDULES = {"fixed": [4] * 4, "changing": [4, 0, 0, 2, 1, 0, 4, 3]}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("chaining", CHAININGS)
@pytest.mark.parametrize("family_name", [*FAMILY_NAMES, *(name for name in PLACED if name in ALL_FAMILIES)])
def test_drafts_equal_a_full_recomputation_and_the_training_unroll(
    family_name: str, chaining: Chaining, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if schedule == "changing":
        # And prompts that the head reads in several calls.
        monkeypatch.setattr(mtp_inference.drafters.head_drafter, "KEYS_CHUNK", 2)
    trunk = tiny_trunk(family_name)
    head = head_of(trunk, chaining, 4)
    with torch.inference_mode():
        for index, rows in enumerate(spied_drafts(trunk, head, SCHEDULES[schedule])):
            for tokens, drafts in rows:
                assert drafts == drafts_from_scratch(trunk, head, tokens, len(drafts)), index
                assert drafts == drafts_of_training(trunk, head, tokens, drafts), index


@pytest.mark.parametrize("chaining", CHAININGS)
def test_drafts_follow_the_heads_convention(chaining: Chaining, trunk: Trunk) -> None:
    head = head_of(trunk, chaining, 4)
    default = spied_drafts(trunk, head, [4])
    # Recycles the state before the final norm and reads no embedding at position 0.
    head.convention = replace(trunk.family.wiring.conventions["vllm"], prefix=head.convention.prefix)
    (ours,) = spied_drafts(trunk, head, [4])
    assert [ours] != default
    with torch.inference_mode():
        for tokens, drafts in ours:
            assert drafts == drafts_from_scratch(trunk, head, tokens, 4)


def drafts_along(
    drafter: RecursiveDrafter | ChainedDrafter | ChainedDraftsDrafter, trunk: Trunk, text: Sequence[int], spoil: int
) -> list[list[int]]:
    """Draft after every fourth token of a text; ``spoil`` rows of each draft are taken for committed ones."""
    hidden_BTD = trunk.hidden(torch.tensor([text]))
    drafter.start(slice(0, 1), hidden_BTD[:, :4], torch.tensor([text[:4]]), torch.tensor([text[4]]))
    drafted = []
    for end in range(4, 24, 4):
        choice = DraftChoice(greedy_chooser(1), torch.tensor([text[end]]), torch.tensor([end]))
        drafted.append(drafter.draft(RoundPlan(4, 64, 4 if end > 4 else 1, None), choice).tokens_BK[0].tolist())
        drafter.pending.first_B += spoil
        drafter.observe(hidden_BTD[:, end : end + 4], torch.tensor([text[end + 1 : end + 5]]), torch.tensor([4]))
    return drafted


@pytest.mark.parametrize("chaining", CHAININGS)
def test_a_stale_row_in_the_heads_cache_shows(chaining: Chaining) -> None:
    trunk = tiny_trunk("qwen3_5")
    head = head_of(trunk, chaining, 4)
    text = random_prompt(25)
    expected = [drafts_from_scratch(trunk, head, text[: end + 1], 4) for end in range(4, 24, 4)]
    for spoil, is_right in ((0, True), (1, False)):
        drafter = made(HeadDrafting(head), trunk, BatchSize(1, 64, 4, 64))
        assert (drafts_along(drafter, trunk, text, spoil) == expected) is is_right, spoil


def test_a_fp32_head_drafts_for_a_bf16_trunk() -> None:
    trunk = tiny_trunk("qwen3_5")
    head = tiny_head(trunk)
    (result,) = SpeculativeDecoder(trunk.bfloat16(), head, 3, ()).generate([PROMPT], max_new_tokens=8)
    assert len(result.token_ids) == 8
    assert next(head.parameters()).dtype == torch.float32


def test_a_call_that_another_one_overtook_says_so(trunk: Trunk, plain: list[int]) -> None:
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    overtaken = decoder.stream([Request(prompt_ids=PROMPT, max_new_tokens=8)])
    next(overtaken)
    (result,) = decoder.generate([PROMPT], max_new_tokens=8)
    assert list(result.token_ids) == plain[:8]
    with pytest.raises(MtpError, match="another call of this decoder began"):
        next(overtaken)
