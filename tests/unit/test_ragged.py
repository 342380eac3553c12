"""Batches whose texts end at different times: finished rows are dropped, and the others keep their texts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

import mtp_inference.batch
import mtp_inference.decoder
import mtp_inference.session
from calls import calls_of
from mtp_inference import GenerationResult, Request, Sampling, SpeculativeDecoder
from mtp_inference.batch import Batch
from mtp_inference.sampling.chooser import DraftSampling
from mtp_inference.session import Session
from scripted import DRAFTING, ScriptedDrafting, plain_texts, random_prompt
from tiny import tiny_trunk

LIMITS = (3, 34, 9, 24, 1, 14)
PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((6, 6, 11, 6, 2, 9))]


trunk_of = functools.cache(tiny_trunk)


def requests_of(*, heat: float = 0.0) -> list[Request]:
    """Return requests that end at different times, each with its own seed."""
    return [
        Request(
            prompt_ids=prompt_ids,
            max_new_tokens=limit,
            sampling=Sampling(temperature=heat, seed=10 + number),
        )
        for number, (prompt_ids, limit) in enumerate(zip(PROMPTS, LIMITS, strict=True))
    ]


def outcome(result: GenerationResult) -> tuple[object, ...]:
    return result.token_ids, result.round_log, result.accepted_per_pos


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    return calls_of(monkeypatch, Batch, "run_window")


def take(forwards: list[Any]) -> list[int]:
    """Return the number of rows of every round since the last look."""
    rows = [len(window_BT) for *_, window_BT in forwards]
    forwards.clear()
    return rows


def never_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mtp_inference.session, "is_worth_dropping", lambda *_unused: False)


@pytest.mark.parametrize("draft_sampling", ["argmax", "sampled"])
@pytest.mark.parametrize("drafter", [*DRAFTING, "plain"])
def test_dropped_rows_change_no_text_and_no_draft(
    drafter: str, draft_sampling: DraftSampling, forwards: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every kind of cache in test_decoder_fuzz.py."""
    trunk = trunk_of("qwen3_5")
    requests = requests_of(heat=0.8)
    drafting = None if drafter == "plain" else DRAFTING[drafter](trunk)
    decoder = SpeculativeDecoder(trunk, drafting, 3, (), draft_sampling=draft_sampling)
    found = [outcome(result) for result in decoder.generate(requests)]
    with_dropping = take(forwards)
    assert len(set(with_dropping)) >= 3
    never_drop(monkeypatch)
    assert found == [outcome(result) for result in decoder.generate(requests)]
    assert take(forwards) == [len(requests)] * len(with_dropping)


def test_a_state_left_in_its_old_row_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: where only the tokens move, and not the keys, texts change."""
    decoder = SpeculativeDecoder(trunk_of("qwen3_5"), None, 0, ())
    right = decoder.generate(requests_of())
    with monkeypatch.context() as patched:
        keep_rows = mtp_inference.batch.WindowCache.keep_rows
        patched.setattr(
            mtp_inference.batch.WindowCache, "keep_rows", lambda cache, rows_R: keep_rows(cache, rows_R.flip(0))
        )
        wrong = decoder.generate(requests_of())
    assert [result.token_ids for result in wrong] != [result.token_ids for result in right]


def test_finished_rows_are_not_computed(forwards: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of 3, 34, 9, 24, 1 and 14 tokens: plain rounds, after the token that prefill gives."""
    decoder = SpeculativeDecoder(trunk_of("glm4_moe"), None, 0, ())
    decoder.generate(requests_of())
    # One text ends in prefill and one after 2 rounds, which are a third of the rows.
    assert take(forwards) == [6] * 2 + [4] * 6 + [3] * 5 + [2] * 10 + [1] * 10
    never_drop(monkeypatch)
    decoder.generate(requests_of())
    assert take(forwards) == [6] * 33


def test_rows_are_kept_while_requests_wait_and_before_the_end(forwards: list[Any]) -> None:
    decoder = SpeculativeDecoder(trunk_of("glm4_moe"), None, 0, (), max_batch=2)
    decoder.generate([[1, 2, 3]] * 4, max_new_tokens=12)
    assert set(take(forwards)) == {2}


def drafted(requests: Sequence[Request], monkeypatch: pytest.MonkeyPatch, chosen: int) -> list[GenerationResult]:
    """Decode with drafts that are all right, where the decoder chooses one depth."""
    monkeypatch.setattr(mtp_inference.session, "batch_depth", lambda *_unused: chosen)
    trunk = trunk_of("glm4_moe")
    texts = plain_texts(trunk, [request.prompt_ids for request in requests], 40)
    decoder = SpeculativeDecoder(trunk, ScriptedDrafting(texts, [7]), 3, ())
    results = decoder.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert list(result.token_ids) == texts[tuple(request.prompt_ids)][: request.max_new_tokens]
    return results


def test_every_row_has_its_own_depth(monkeypatch: pytest.MonkeyPatch, forwards: list[Any]) -> None:
    """A row drafts no more than its request allows, and no more than it can still commit."""
    base = Request(prompt_ids=PROMPTS[0], max_new_tokens=14, mtp="auto")
    requests = [
        base,
        dataclasses.replace(base, prompt_ids=PROMPTS[1], depth=1),
        dataclasses.replace(base, prompt_ids=PROMPTS[2], mtp="off"),
        dataclasses.replace(base, prompt_ids=PROMPTS[3], max_new_tokens=7),
    ]
    results = drafted(requests, monkeypatch, chosen=3)
    depths = [[one.num_drafted for one in result.round_log] for result in results]
    # 13, 13, 13 and 6 tokens after the first; the last round of a row drafts one token less than it needs.
    assert depths == [[3, 3, 3, 0], [1] * 6 + [0], [0] * 13, [3, 1]]
    assert all(one.num_drafted == one.num_accepted for result in results for one in result.round_log)


def test_a_round_is_as_deep_as_its_rows_need(monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[int] = []
    launch = Session._launch

    def noted(session: Session) -> None:
        launch(session)
        plans.append(session.in_flight[-1].plan.depth)

    monkeypatch.setattr(Session, "_launch", noted)
    request = Request(prompt_ids=PROMPTS[0], max_new_tokens=8, mtp="auto")
    drafted([request, dataclasses.replace(request, prompt_ids=PROMPTS[1], max_new_tokens=6)], monkeypatch, chosen=3)
    # 7 and 5 tokens after the first: 4 and 4, then 3 and 1.
    assert plans == [3, 2]


class CostlyRounds:
    """Time that passes by hand: a round takes ``1 + 0.6 * depth``, with any number of rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        launch = Session._launch

        def timed(session: Session) -> None:
            launch(session)
            self.now += 1.0 + 0.6 * session.in_flight[-1].plan.depth

        monkeypatch.setattr(Session, "_launch", timed)
        clocks = SimpleNamespace(perf_counter=lambda: self.now, thread_time=lambda: self.now)
        monkeypatch.setattr(mtp_inference.session, "time", clocks)


@pytest.mark.parametrize("num_right", [0, 1, 3], ids=["none right", "one right", "all right"])
def test_auto_costs_little_where_one_row_accepts_nothing(num_right: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows accept some drafts, the eighth none, and all texts are equally long."""
    prompts = [random_prompt(5, seed) for seed in range(8)]
    texts = plain_texts(trunk_of("glm4_moe"), prompts, 136)
    script = ScriptedDrafting(texts, [num_right])
    # The last text is not in the script: its drafts belong to another text.
    script.texts = {**texts, tuple(prompts[-1]): [(token + 1) % 7 for token in texts[tuple(prompts[0])]]}
    decoder = SpeculativeDecoder(trunk_of("glm4_moe"), script, 3, ())
    clock = CostlyRounds(monkeypatch)
    seconds = []
    for mtp in ("off", "auto", "auto", "on"):
        started = clock.now
        requests = [Request(prompt_ids=prompt, max_new_tokens=128, mtp=mtp) for prompt in prompts]
        results = decoder.generate(requests)
        assert [list(result.token_ids) for result in results] == [texts[tuple(prompt)][:128] for prompt in prompts]
        seconds.append(clock.now - started)
    plain, first, second, fixed = seconds
    assert plain / first >= 0.97
    assert plain / second >= 0.97
    assert plain / fixed < 0.6, "the negative control: a fixed depth loses"
