"""A session: more requests than rows, each with its own end and its own drafts, and none that notices the others.

Tokens of the tiny trunks are single characters of the byte tokenizer, so that texts can be cut by hand. Most drafts
come from a model whose texts are nearly the trunk's: rounds keep different numbers of tokens, and rows go apart.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Iterator, Sequence

import pytest

import mtp_inference.decoder
import mtp_inference.session
from byte_tokenizer import byte_tokenizer
from calls import calls_of
from mtp_inference import GenerationResult, HeadDrafting, Request, SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting, RoundPlan
from mtp_inference.sampling.chooser import DraftChoice, Drafts
from mtp_inference.session import Session
from mtp_train.errors import MtpError
from plain_decoding import plain_greedy
from scripted import RereadingDrafter, RereadingDrafting, random_prompt, run_ahead
from tiny import FAMILY_NAMES, nearly_tiny, tiny_head, tiny_trunk

TOKENIZER = byte_tokenizer()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random_prompt(num_tokens, 100 * num_tokens + seed)


trunk_of = functools.cache(tiny_trunk)
nearly = functools.cache(nearly_tiny)


def decoder_of(name: str, drafting: Drafting | None, *, depth: int = 3, rows: int = 3) -> SpeculativeDecoder:
    return SpeculativeDecoder(trunk_of(name), drafting, depth, (), max_batch=rows, tokenizer=TOKENIZER, prefill_chunk=8)


def right(name: str, rows: int = 3) -> SpeculativeDecoder:
    """Return a decoder whose every draft is accepted."""
    return decoder_of(name, RereadingDrafting(trunk_of(name)), rows=rows)


def letters(tokens: Sequence[int]) -> str:
    return TOKENIZER.decode(list(tokens))


@functools.cache
def long_text(name: str, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    return plain_greedy(trunk_of(name), prompt_ids, num_tokens, ())


def plain_text(name: str, prompt_ids: Sequence[int], num_tokens: int = 28) -> list[int]:
    return long_text(name, tuple(prompt_ids), num_tokens)


def cut(plain: Sequence[int], request: Request) -> tuple[tuple[int, ...], str, str]:
    """Return the expected result of a request, given plain decoding: tokens, text and why it ended."""
    for end in range(1, request.max_new_tokens + 1):
        tokens = tuple(plain[:end])
        text = letters(plain[:end])
        if tokens[-1] in request.stop_token_ids:
            return tokens, text, "stop"
    return tokens, text, "length"


def said(result: GenerationResult) -> tuple[tuple[int, ...], str, str]:
    return result.token_ids, result.text, result.finish_reason


def counts(result: GenerationResult) -> tuple[int, int, int, tuple[int, ...]]:
    return result.num_drafts, result.num_draft_tokens, result.num_accepted_tokens, result.accepted_per_pos


@functools.cache
def mixed_requests(name: str) -> list[Request]:
    """Return nine requests, most of which differ in length, limit, depth, mode and end."""
    requests = [
        Request(prompt_ids=prompt(5), max_new_tokens=28),
        Request(prompt_ids=prompt(5, seed=1), max_new_tokens=7, depth=1),
        Request(prompt_ids=prompt(5, seed=2), max_new_tokens=12, mtp="off"),
        Request(prompt_ids=prompt(19), max_new_tokens=1),
        Request(prompt_ids=prompt(2), max_new_tokens=18, depth=5),
        Request(prompt_ids=prompt(1), max_new_tokens=16, mtp="auto", depth=4),
        Request(prompt_ids=prompt(9), max_new_tokens=11, depth=0),
        Request(prompt_ids=prompt(8), max_new_tokens=28, depth=2),
        Request(prompt_ids=prompt(12), max_new_tokens=28, depth=7),
    ]
    for index, place in ((0, 20), (8, 11)):  # or earlier, in a text that has all its tokens by then
        plain = plain_text(name, requests[index].prompt_ids)
        fresh = (token for start in range(place, 0, -1) for token in plain[start:] if token not in plain[:start])
        requests[index] = dataclasses.replace(requests[index], stop_token_ids=frozenset([next(fresh)]))
    return requests


@functools.cache
def alone(name: str) -> list[GenerationResult]:
    """Return the texts of the mixed requests one by one, and check that it is plain decoding's."""
    decoder = decoder_of(name, RereadingDrafting(nearly(name)))
    results = [decoder.generate([request])[0] for request in mixed_requests(name)]
    for request, result in zip(mixed_requests(name), results, strict=True):
        assert said(result) == cut(plain_text(name, request.prompt_ids), request), request
    return results


def assert_same(results: Sequence[GenerationResult], expected: Sequence[GenerationResult]) -> None:
    """Compare the results of mixed requests, counts included where they do not rest on the clock."""
    assert [said(result) for result in results] == [said(result) for result in expected]
    fixed = [index for index, request in enumerate(mixed_requests("qwen3_5")[: len(results)]) if request.mtp != "auto"]
    assert [counts(results[index]) for index in fixed] == [counts(expected[index]) for index in fixed]


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in_step", "one_ahead"])
@pytest.mark.parametrize("name", [*FAMILY_NAMES, "mistral"])
def test_every_row_says_what_it_says_alone(name: str, is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_ahead:
        run_ahead(monkeypatch)
    together = decoder_of(name, RereadingDrafting(nearly(name))).generate(mixed_requests(name))
    assert_same(together, alone(name))
    accepted = [result.num_accepted_tokens for result in together]
    assert sum(accepted) > 20
    assert (accepted[2], accepted[6]) == (0, 0)


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in_step", "one_ahead"])
def test_a_drafter_is_told_no_fewer_tokens_than_are_pending(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_ahead:
        run_ahead(monkeypatch)
    request = Request(prompt_ids=prompt(5), max_new_tokens=28)
    lengths = [len(request.prompt_ids)]
    bounds = []
    draft = RereadingDrafter.draft

    def watched(drafter: RereadingDrafter, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        lengths.append(int(drafter.length_B))
        bounds.append(plan.pending)
        return draft(drafter, plan, choice)

    monkeypatch.setattr(RereadingDrafter, "draft", watched)
    decoder_of("qwen3_5", RereadingDrafting(nearly("qwen3_5"))).generate([request])
    pending = [after - before for before, after in itertools.pairwise(lengths)]
    assert len(set(pending)) > 2, "rounds keep different numbers of tokens"
    # In step, the bound is the number itself.
    assert all(bound >= number if is_ahead else bound == number for number, bound in zip(pending, bounds, strict=True))


@pytest.mark.parametrize("is_ahead", [False, True], ids=["in_step", "one_ahead"])
def test_streamed_pieces_add_up(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_ahead:
        run_ahead(monkeypatch)
    requests = mixed_requests("glm4_moe")
    chunks = list(decoder_of("glm4_moe", RereadingDrafting(nearly("glm4_moe"))).stream(requests))
    for index, expected in enumerate(alone("glm4_moe")):
        own = [chunk for chunk in chunks if chunk.index == index]
        assert [chunk.result is None for chunk in own] == [True] * (len(own) - 1) + [False]
        result = own[-1].result
        assert result is not None
        assert tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in own)) == result.token_ids
        assert "".join(chunk.text for chunk in own) == result.text
        assert said(result) == said(expected)
        # One for prefill and one for each round.
        assert len(own) == 1 + result.num_drafts
        assert all(chunk.token_ids for chunk in own)


def test_requests_are_streamed_in_turn_and_refilled_rows_start_later() -> None:
    requests = [Request(prompt_ids=prompt(4, seed), max_new_tokens=20 + seed) for seed in range(3)]
    chunks = list(right("glm4_moe", rows=2).stream(requests))
    order = [chunk.index for chunk in chunks]
    assert order[:6] == [0, 1, 0, 1, 0, 1]
    assert order.index(2) > order.index(0) + 2
    ended = [chunk.index for chunk in chunks if chunk.result is not None]
    assert order.index(2) > max(place for place, index in enumerate(order) if index == ended[0])


def test_prompts_of_a_length_are_prefilled_together_up_to_a_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    prefills = calls_of(monkeypatch, mtp_inference.session, "prefill")
    monkeypatch.setattr(mtp_inference.session, "MAX_PREFILL_TOKENS", 10)
    requests = [Request(prompt_ids=prompt(length, seed), max_new_tokens=3) for seed, length in enumerate((5, 19, 5, 5))]
    decoder_of("glm4_moe", None, depth=0, rows=4).generate(requests)
    # A prompt that is longer by itself comes alone.
    assert [prompt_RT.shape for *_, prompt_RT in prefills] == [(1, 19), (2, 5), (1, 5)]


def test_without_a_tokenizer_there_is_no_text() -> None:
    decoder = SpeculativeDecoder(trunk_of("glm4_moe"), None, 0, ())
    chunks = list(decoder.stream([Request(prompt_ids=[1, 2], max_new_tokens=4)]))
    assert {chunk.text for chunk in chunks} == {""}
    assert [chunk.result.text for chunk in chunks if chunk.result is not None] == [""]


@pytest.mark.parametrize("num_chunks", [1, 4, 11])
def test_a_stream_may_be_left_and_the_decoder_used_again(num_chunks: int) -> None:
    decoder = decoder_of("qwen3_5", RereadingDrafting(nearly("qwen3_5")))
    left = decoder.stream(mixed_requests("qwen3_5")[:5])
    assert len(list(itertools.islice(left, num_chunks))) == num_chunks
    assert_same(decoder.generate(mixed_requests("qwen3_5")[:5]), alone("qwen3_5")[:5])
    assert_same(decoder.generate(mixed_requests("qwen3_5")[:2]), alone("qwen3_5")[:2])


def test_a_batch_that_covers_later_requests_is_kept_and_freed_with_its_decoder() -> None:
    decoder = right("glm4_moe", rows=2)

    def decode(*lengths: int, max_new_tokens: int = 5) -> None:
        decoder.generate([Request(prompt_ids=prompt(length), max_new_tokens=max_new_tokens) for length in lengths])

    decode(2, 11)
    rounds = decoder._rounds
    decode(3, 5)
    assert decoder._rounds is rounds
    decode(3, 11, max_new_tokens=9)
    assert decoder._rounds is not rounds
    kept = weakref.ref(decoder._rounds.batch) if decoder._rounds is not None else None
    gc.collect()
    gc.disable()
    try:
        del decoder._rounds, rounds
        assert kept is not None
        assert kept() is None
    finally:
        gc.enable()


def test_plain_requests_run_without_the_drafter_of_the_requests_before() -> None:
    """Otherwise its prefill would slow down the baseline of every speedup."""
    decoder = right("glm4_moe", rows=1)
    decoder.generate([Request(prompt_ids=prompt(7), max_new_tokens=9, mtp="on")])
    assert decoder._rounds is not None
    assert decoder._rounds.batch.drafter is not None
    decoder.generate([Request(prompt_ids=prompt(5), max_new_tokens=5, mtp="off")])
    assert decoder._rounds.batch.drafter is None


class Clock:
    """Time that passes by hand: a round takes what its depth costs, and other work interrupts plain rounds."""

    def __init__(self, seconds_per_draft: float, seconds_interrupted: float = 0.0) -> None:
        self.worked = self.interrupted = 0.0
        self.seconds_per_draft = seconds_per_draft
        self.seconds_interrupted = seconds_interrupted

    def perf_counter(self) -> float:
        return self.worked + self.interrupted

    def thread_time(self) -> float:
        return self.worked

    def of_round(self, depth: int) -> None:
        self.worked += 1.0 + self.seconds_per_draft * depth
        self.interrupted += 0.0 if depth else self.seconds_interrupted


def timed(decoder: SpeculativeDecoder, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Let rounds take their time by the clock; yield the depth of every round while decoding one text."""
    monkeypatch.setattr(mtp_inference.session, "time", clock)
    depths: list[int] = []
    launch = Session._launch

    def launch_and_wait(session: Session) -> None:
        launch(session)
        depths.append(session.in_flight[-1].plan.depth)
        clock.of_round(depths[-1])

    monkeypatch.setattr(Session, "_launch", launch_and_wait)
    request = Request(prompt_ids=prompt(4), max_new_tokens=60, mtp="auto", depth=4)
    (result,) = decoder.generate([request])
    assert said(result) == cut(plain_text("qwen3_5", prompt(4), 60), request)
    assert result.num_draft_tokens == sum(depths)
    assert len(result.accepted_per_pos) == 4
    yield from depths


def test_auto_drafts_deeply_where_drafts_are_right_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    depths = list(timed(right("qwen3_5"), Clock(seconds_per_draft=0.01), monkeypatch))
    # The last round drafts what the text still lacks.
    assert depths[-2] == 4
    assert len(depths) < 30


def test_auto_stops_drafting_where_drafts_are_wrong_or_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = decoder_of("qwen3_5", HeadDrafting(tiny_head(trunk_of("qwen3_5"))))
    assert list(timed(wrong, Clock(seconds_per_draft=0.3), monkeypatch)).count(0) > 30
    assert list(timed(right("qwen3_5"), Clock(seconds_per_draft=2.0), monkeypatch)).count(0) > 30


def test_other_work_on_the_cpu_does_not_make_auto_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    # By the wall clock a round without drafts would be dearer than one with four.
    busy = Clock(seconds_per_draft=2.0, seconds_interrupted=20.0)
    assert list(timed(right("qwen3_5"), busy, monkeypatch)).count(0) > 30


def test_what_cannot_be_served_is_refused_before_anything_is_decoded() -> None:
    trunk = trunk_of("glm4_moe")
    decoder = SpeculativeDecoder(trunk, None, 0, ())
    good = Request(prompt_ids=[1], max_new_tokens=2)
    for wrong, complaint in (
        ({"prompt_ids": []}, "prompt: no token"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0; expected 1 or more"),
        ({"mtp": "sometimes"}, "mtp: 'sometimes'; expected on, off or auto"),
        ({"depth": -1}, "depth: -1; expected 0 to "),
    ):
        with pytest.raises(MtpError, match=complaint):
            dataclasses.replace(good, **wrong)
    assert decoder.generate([good])[0].token_ids == tuple(plain_greedy(trunk, [1], 2, ()))
