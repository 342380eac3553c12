"""The suggested draft vocabulary: rounds worked out by hand, text that is not judged by itself, and real decoding."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import numpy as np
import pytest
import torch

from mtp_inference import HeadDrafting
from mtp_inference.drafters.drafter import DrafterMaker
from mtp_train.acceptance.intervals import t_quantile
from mtp_train.data.frequency import load_counts, ranks, save_counts, target_counts
from mtp_train.data.tokenize import Document
from mtp_train.evaluation import draft_vocab
from mtp_train.evaluation.arms import load_arm_trunk, open_arm, parse_arm
from mtp_train.evaluation.costs import draft_head
from mtp_train.evaluation.decoding import decode_prompts
from mtp_train.evaluation.draft_vocab import CountedText, DraftHead, kept_drafts, suggest_draft_vocab
from mtp_train.evaluation.grid import Grid, grid_prompts
from mtp_train.evaluation.prompt_records import Decoded, Setting
from mtp_train.evaluation.results import DraftVocab
from mtp_train.evaluation.statistics import MeasuredArm
from mtp_train.heads.module import MtpHead, OutputRows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from tiny import tiny_head, tiny_trunk
from witness_maker.chain import random_head

if TYPE_CHECKING:
    from mtp_train.heads.build import HeadPlan

VOCAB, SIZES = 40, (4, 8, 16)
SETTING = Setting(0.0, None, 2, "greedy")
ROUND_SECONDS, PLAIN_SECONDS = 0.010, 0.004


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_vocab, "SIZES", SIZES)
    monkeypatch.setattr(draft_vocab, "MIN_ACCEPTED", 6)
    monkeypatch.setattr(draft_vocab, "MIN_GROUPS", 2)


def record(tokens: Sequence[int], accepted: Sequence[int], group: str = "g", depth: int = 2) -> Decoded:
    """Return a prompt's record, with fixed times of a round."""
    return Decoded(
        prompt_id=f"{group}-{len(tokens)}",
        group=group,
        task="any",
        prompt_tokens=3,
        token_ids=tuple(tokens),
        drafted=(depth,) * len(accepted),
        accepted=tuple(accepted),
        seconds_prefill=0.1,
        seconds_decode=(ROUND_SECONDS if depth else PLAIN_SECONDS) * len(accepted),
        same_as_plain=None,
    )


def measured(records: Sequence[Decoded]) -> MeasuredArm:
    plain = [replace(one, accepted=(0,) * 5, drafted=(0,) * 5, seconds_decode=5 * PLAIN_SECONDS) for one in records]
    return MeasuredArm("mine", "trunk", "head", {SETTING: records, SETTING.plain: plain})


HEAD = DraftHead(
    vocab_size=VOCAB,
    num_drafted=None,
    own_output=False,
    readers=(),
    output_times={40: 0.5, 16: 0.2, 8: 0.1, 4: 0.05},
)
# Ranks are ids: token t is in the vocabularies of more than t tokens.
BY_ID = np.arange(VOCAB, 0, -1, dtype=np.int64)


def test_a_round_keeps_the_accepted_drafts_before_the_first_one_outside() -> None:
    # 9 is prefill's; then rounds: 1 2 and the trunk's 30; 5 3 and 30; none and 2; 3 accepted, 20 and 30.
    one = record([9, 1, 2, 30, 5, 3, 30, 2, 3, 20, 30], [2, 2, 0, 2])
    kept_XK = kept_drafts(one, np.arange(VOCAB), SIZES, depth=2)
    # Of 4 tokens: 1 2, not 5 and so not 3, then 3. Of 8 and 16 tokens: 5 3 too. 20 is in none.
    assert kept_XK.tolist() == [[2, 1], [3, 2], [3, 2]]


def test_drafts_after_the_end_of_a_text_count_with_those_before_them() -> None:
    ends_inside, ends_after_a_miss = record([9, 1], [2]), record([9, 30], [2])
    assert kept_drafts(ends_inside, np.arange(VOCAB), SIZES, depth=2)[0].tolist() == [1, 1]
    assert kept_drafts(ends_after_a_miss, np.arange(VOCAB), SIZES, depth=2)[0].tolist() == [0, 0]


def two_groups() -> list[Decoded]:
    # Group a: 5 rounds, 8 accepted drafts, of which 6 remain with 4 tokens. Group b: 5 rounds, 6 and 5.
    return [
        record([0, 1, 2, 39, 1, 2, 39, 1, 30, 39, 1, 30, 39, 39], [2, 2, 2, 2, 0], "a"),
        record([0, 1, 2, 39, 1, 2, 39, 1, 39, 30, 39, 39], [2, 2, 1, 1, 0], "b"),
    ]


def test_a_suggestion_by_hand() -> None:
    text = CountedText.apart(BY_ID, "the training text", ["a", "b"], always=())
    found = suggest_draft_vocab(HEAD, measured(two_groups()), SETTING, text)
    four = found.sizes[0]
    assert [one.size for one in found.sizes] == list(SIZES)
    assert (four.kept, four.tau) == (pytest.approx(11 / 14), pytest.approx(1 + 11 / 10))
    # All seven drafts at the first position but one, four of six at the second.
    assert four.marginal == (pytest.approx(7 / 10), pytest.approx(4 / 10))
    # Two drafts a round each save 0.45 of a plain round's 0.004 seconds.
    assert four.round_time == pytest.approx((0.010 - 2 * 0.0018) / 0.010)
    assert four.speed == pytest.approx((10 + 11) / (10 + 14) / four.round_time)
    # Jackknife: without one group the ratio is that of the other.
    ratio, others = 21 / 24, (10 / 11, 11 / 13)
    error = np.sqrt((2 - 1) / 2 * sum((one - ratio) ** 2 for one in others))
    low = (ratio - t_quantile(1) * error) / four.round_time
    assert four.speed_ci95 is not None
    assert four.speed_ci95[0] == pytest.approx(max(low, 0.0))


def test_the_fastest_size_that_is_shown_to_pay_is_suggested_with_the_line_of_the_recipe() -> None:
    groups = [replace(one, group=f"{one.group}{n}", prompt_id=f"{n}") for n in range(8) for one in two_groups()]
    text = CountedText.apart(BY_ID, "the training text", [one.group for one in groups], always=())
    found = suggest_draft_vocab(HEAD, measured(groups), SETTING, text)
    # 30 is in none of them, so they keep alike, and the smallest reads the fewest rows.
    assert (found.size, found.override) == (4, "head.draft_vocab=4")
    assert found.reason.startswith("head.draft_vocab=4 is expected to decode at 1.37 [")
    assert (
        "78.6 % of the accepted drafts are among the 4 most frequent tokens of the training text (820" in found.reason
    )
    assert found.reason.endswith(
        "Only the built-in decoder drafts from fewer tokens with a head of this kind; engines draft from all."
    )
    by_engines = suggest_draft_vocab(replace(HEAD, readers=("vllm", "sglang")), measured(groups), SETTING, text)
    assert by_engines.reason.endswith("vllm, sglang draft from these tokens too.")
    # Rounds that get no faster: nothing to gain.
    same = replace(HEAD, output_times=dict.fromkeys(HEAD.output_times, 0.5))
    none = suggest_draft_vocab(same, measured(groups), SETTING, text)
    assert (none.size, none.override) == (None, None)
    assert none.reason.startswith("None suggested: no size is shown to gain 5%. 4 tokens come nearest, with 0.88 [")
    assert none.sizes[0].round_time == 1.0


def test_no_round_is_expected_to_be_faster_than_a_plain_one() -> None:
    text = CountedText.apart(BY_ID, "the training text", ["a", "b"], always=())
    slow = replace(HEAD, output_times={**HEAD.output_times, 40: 100.0})
    found = suggest_draft_vocab(slow, measured(two_groups()), SETTING, text)
    assert found.sizes[0].round_time == pytest.approx(PLAIN_SECONDS / ROUND_SECONDS)


def test_a_group_is_not_judged_by_its_own_text() -> None:
    # Each of ten groups has a token of its own, and all share token 3.
    answers = [record([20 + n] * 30 + [3] * 10, [2] * 10, group=f"g{n}") for n in range(10)]
    text = CountedText.across_groups(answers, VOCAB, always={7})
    for n, one in enumerate(answers):
        ranks_V = text.ranks[one.group]
        assert (ranks_V[7], ranks_V[3]) == (0, 1)
        # Its own token was not counted, so it comes after all counted ones, and after the lower ids.
        others = [20 + m for m in range(10) if m % draft_vocab.FOLDS != n % draft_vocab.FOLDS]
        assert ranks_V[20 + n] > max(ranks_V[token] for token in others)
    assert text.num_tokens == 8 * 40
    found = suggest_draft_vocab(HEAD, measured(answers), SETTING, text)
    # Counted on the measured text itself, the tokens would all be in the vocabulary of 16.
    own = CountedText.apart(target_counts_of(answers), "the measured text", [one.group for one in answers], always={7})
    biased = suggest_draft_vocab(HEAD, measured(answers), SETTING, own)
    assert (found.sizes[-1].kept, biased.sizes[-1].kept) == (pytest.approx(0.0), pytest.approx(1.0))


def target_counts_of(answers: Sequence[Decoded]) -> np.ndarray:
    return np.bincount([token for one in answers for token in one.token_ids], minlength=VOCAB).astype(np.int64)


def test_why_there_is_no_suggestion() -> None:
    text = CountedText.apart(BY_ID, "the training text", ["a", "b"], always=())
    arm = measured(two_groups())

    def reason(head: DraftHead = HEAD, arm: MeasuredArm = arm, text: CountedText = text) -> str:
        found = suggest_draft_vocab(head, arm, SETTING, text)
        assert (found.size, found.override, found.sizes) == (None, None, ())
        return found.reason

    assert "an output matrix of its own" in reason(replace(HEAD, own_output=True))
    assert "drafts from 12 of 40 tokens already" in reason(replace(HEAD, num_drafted=12))
    assert "the vocabulary of 7 tokens is small" in reason(replace(HEAD, vocab_size=7))
    short = replace(text, num_tokens=3, name="the trunk's answers")
    assert "3 tokens (the trunk's answers) are too few to choose 4 by" in reason(text=short)
    few = measured([record([0, 1, 2, 39], [2], group) for group in "ab"])
    assert "4 accepted drafts on 2 groups of prompts are too few; expected 6 on 2" in reason(arm=few)
    alone = measured([replace(one, group="a") for one in two_groups()])
    assert "on 1 groups" in reason(arm=alone)


def test_a_size_is_estimated_only_by_as_long_a_text() -> None:
    text = replace(CountedText.apart(BY_ID, "a text", ["a", "b"], always=()), num_tokens=9)
    found = suggest_draft_vocab(HEAD, measured(two_groups()), SETTING, text)
    assert [one.size for one in found.sizes] == [4, 8]


def test_counts_are_kept_whole(tmp_path: Path) -> None:
    document = Document((3, 3, 5, 5, 5, 9), (False, True, True, True, False, True), "g", "d")
    counts_V = target_counts([document], VOCAB)
    assert {token: int(count) for token, count in enumerate(counts_V) if count} == {3: 1, 5: 2, 9: 1}
    assert ranks(counts_V, always={30})[[30, 5, 3, 9, 0]].tolist() == [0, 1, 2, 3, 4]
    path = tmp_path / "data" / "counts.npz"
    save_counts(counts_V, path)
    assert np.array_equal(load_counts(path, VOCAB), counts_V)
    assert load_counts(path, VOCAB + 1) is None
    assert load_counts(tmp_path / "none.npz", VOCAB) is None
    path.write_bytes(path.read_bytes()[:40])
    assert load_counts(path, VOCAB) is None


def test_a_head_and_a_suggestion_read_back_as_they_were_written() -> None:
    head = replace(HEAD, readers=("vllm",))
    assert DraftHead.from_json(json.loads(json.dumps(head.to_json()))) == head


def head_of(trunk: Trunk, head: MtpHead, tokens_R: torch.Tensor | None = None) -> DraftHead:
    plan = cast("HeadPlan", SimpleNamespace(family=head.family))
    return draft_head(trunk, HeadDrafting(head, tokens_R), plan, [[1, 2, 3], [4, 5]])


def test_the_output_matrix_of_a_draft_is_timed_whole_and_in_part() -> None:
    trunk = tiny_trunk("qwen3_5", vocab_size=VOCAB)
    found = head_of(trunk, tiny_head(trunk))
    assert (found.vocab_size, found.num_drafted, found.own_output, found.readers) == (VOCAB, None, False, ())
    assert list(found.output_times) == [VOCAB, *SIZES]
    # A plain round does more than that.
    assert all(0.0 < times < 1.0 for times in found.output_times.values())
    reduced = head_of(trunk, tiny_head(trunk), torch.arange(12))
    assert (reduced.num_drafted, reduced.output_times) == (12, {})
    small = tiny_trunk("qwen3_5", vocab_size=7)
    assert head_of(small, tiny_head(small)).output_times == {}


def test_a_head_with_an_output_matrix_of_its_own_is_known() -> None:
    trunk = tiny_trunk("qwen3_5", vocab_size=VOCAB)
    head = tiny_head(trunk)
    head.give_output(OutputRows(trunk.lm_head_VD.detach().clone(), None, VOCAB))
    found = head_of(trunk, head)
    assert (found.own_output, found.output_times) == (True, {})


def test_engines_that_read_a_draft_vocabulary_are_those_of_its_kind() -> None:
    trunk = tiny_trunk("llama", vocab_size=VOCAB, num_layers=8)
    assert head_of(trunk, random_head(trunk, kind="eagle3")).readers == ("vllm", "sglang", "llama.cpp")
    assert head_of(trunk, random_head(trunk, kind="eagle")).readers == ()


def test_the_expected_tau_is_at_most_that_of_decoding_with_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the demo's base, with a vocabulary counted on half of the groups and judged by the other half.

    Drafts that replace a wrong one are not counted, so the expectation is a little low.
    """
    size = 128
    monkeypatch.setattr(draft_vocab, "SIZES", (size,))
    arm = open_arm(parse_arm("demo:base"))
    trunk = load_arm_trunk(arm, torch.device("cpu"))
    maker, head = arm.model.load_drafting(trunk)
    assert maker is not None
    assert head is not None
    tokenizer = load_tokenizer(arm.model.checkpoint, trust_remote_code=False)
    grid = Grid(
        suite="demo",
        tasks=None,
        prompts_per_task=12,
        temperatures=(0.0,),
        contexts=(None,),
        depths=(3,),
        rules=("greedy",),
        max_new_tokens=32,
        batch=12,
        seed=0,
    )
    prompts, setting = grid_prompts(grid, tokenizer, grid.contexts)[None], grid.headline
    options = grid.options(eos_token_ids(arm.model.checkpoint, tokenizer))
    groups = list(dict.fromkeys(one.group for one in prompts))
    judged = {None: [one for one in prompts if groups.index(one.group) % 2]}
    counted = {None: [one for one in prompts if one not in judged[None]]}
    answers = decode_prompts(trunk, {}, counted, [setting], options).decoded["none"][setting.plain]
    counts_V = np.bincount([token for one in answers for token in one.token_ids], minlength=2048).astype(np.int64)
    text = CountedText.apart(counts_V, "the other answers", groups, options.eos_ids)

    def decoded(drafting: DrafterMaker) -> dict[Setting, list[Decoded]]:
        return decode_prompts(trunk, {"one": drafting}, judged, [setting], options, plain_arm=None).decoded["one"]

    def tau(records: Sequence[Decoded]) -> float:
        return 1 + sum(sum(one.accepted) for one in records) / sum(len(one.accepted) for one in records)

    every = decoded(maker)
    # Times of plain decoding do not matter here.
    both = MeasuredArm("one", "trunk", "head", {**every, setting.plain: every[setting]})
    basis = replace(HEAD, vocab_size=2048, output_times={2048: 0.0, size: 0.0})
    (expected,) = suggest_draft_vocab(basis, both, setting, text).sizes
    ids_R = torch.from_numpy(np.flatnonzero(text.ranks[groups[0]] < size))
    found = tau(decoded(HeadDrafting(head, ids_R))[setting])
    assert tau(every[setting]) - found > 0.1, "this vocabulary loses nothing"
    assert found - 0.15 < expected.tau < found + 0.02


def test_a_suggestion_has_the_settings_of_its_estimate() -> None:
    text = CountedText.apart(BY_ID, "a text", ["a", "b"], always=())
    found = suggest_draft_vocab(HEAD, measured(two_groups()), SETTING, text)
    assert isinstance(found, DraftVocab)
    assert (found.arm, found.temperature, found.depth, found.rule) == ("mine", 0.0, 2, "greedy")
    assert (found.counted_on, found.counted_tokens) == ("a text", int(BY_ID.sum()))
