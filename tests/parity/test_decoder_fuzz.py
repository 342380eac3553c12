"""Whatever is decoded together, however it is drafted: every text is plain greedy decoding's, cut where it must end.

Cases are drawn by hypothesis, always the same ones: kind of trunk, drafter, rows, prefill in parts, rounds in step or
one ahead, and up to six requests that differ in length, limit, depth, mode and stop token.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, seed, settings, strategies as st

import mtp_inference.sampling.chooser
from mtp_inference import GenerationResult, HeadDrafting, Request, SpeculativeDecoder, compare
from mtp_inference.cache.model_cache import WindowCache
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.sampling.chooser import Verdict
from mtp_train.trunk.load import Trunk
from plain_decoding import plain_greedy
from scripted import RandomDrafting, RereadingDrafting, random_prompt, run_ahead
from tiny import ALL_FAMILIES, CACHE_KINDS, chained_head, nearly_tiny, tiny_head, tiny_trunk

LONGEST_PROMPT, MOST_TOKENS = 40, 30


@functools.cache
def trunk_of(name: str) -> Trunk:
    return tiny_trunk(name, seed=3)


def prompt(length: int) -> tuple[int, ...]:
    return tuple(random_prompt(length, length))


@functools.cache
def plain_text(name: str, length: int) -> list[int]:
    return plain_greedy(trunk_of(name), prompt(length), MOST_TOKENS, ())


MAKERS: dict[str, Callable[[str], Drafting]] = {
    "random": lambda name: RandomDrafting(),
    "right": lambda name: RereadingDrafting(trunk_of(name)),
    "nearly right": lambda name: RereadingDrafting(nearly_tiny(name, seed=3)),
    "ngram": lambda name: NgramDrafting(),
    "head": lambda name: HeadDrafting(tiny_head(trunk_of(name), num_modules=1)),
    "chained": lambda name: HeadDrafting(chained_head(trunk_of(name), 7)),
    "chained_drafts": lambda name: HeadDrafting(chained_head(trunk_of(name), 7, drafts_only=True)),
}


ONE_MODULE = ("nemotron_h",)
"""Families whose layout has no place for a second module's keys."""


@functools.cache
def maker_of(name: str, drafting: str) -> Drafting:
    return MAKERS[drafting](name)


@dataclass(frozen=True)
class Case:
    """One call of a decoder."""

    name: str
    drafting: str
    rows: int
    prefill_chunk: int
    is_ahead: bool
    requests: tuple[Request, ...]


@st.composite
def cases(draw: st.DrawFn, name: str) -> Case:
    headless = () if name in ALL_FAMILIES else ("head",)
    unchained = () if name in ALL_FAMILIES and name not in ONE_MODULE else ("chained", "chained_drafts")
    known = [drafting for drafting in MAKERS if drafting not in (*headless, *unchained)]

    def request() -> Request:
        length = draw(st.integers(1, LONGEST_PROMPT))
        stop_place = draw(st.none() | st.integers(0, MOST_TOKENS - 1))
        return Request(
            prompt_ids=prompt(length),
            max_new_tokens=draw(st.integers(1, MOST_TOKENS)),
            mtp=draw(st.sampled_from(["on", "on", "off", "auto"])),
            depth=draw(st.none() | st.integers(0, 7)),
            stop_token_ids=frozenset() if stop_place is None else frozenset([plain_text(name, length)[stop_place]]),
        )

    return Case(
        name=name,
        drafting=draw(st.sampled_from(known)),
        rows=draw(st.integers(1, 4)),
        prefill_chunk=draw(st.integers(3, 64)),
        is_ahead=draw(st.booleans()),
        requests=tuple(request() for _ in range(draw(st.integers(1, 6)))),
    )


DEPTH = 3


def decode(case: Case) -> list[GenerationResult]:
    decoder = SpeculativeDecoder(
        trunk_of(case.name),
        maker_of(case.name, case.drafting),
        DEPTH,
        (),
        max_batch=case.rows,
        prefill_chunk=case.prefill_chunk,
        records=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        if case.is_ahead:
            run_ahead(patch)
        return decoder.generate(case.requests)


def cut(plain: list[int], request: Request) -> tuple[int, ...]:
    ends = [place for place, token in enumerate(plain) if token in request.stop_token_ids]
    return tuple(plain[: min([request.max_new_tokens, *(place + 1 for place in ends)])])


def check_text(case: Case, request: Request, result: GenerationResult) -> None:
    expected = cut(plain_text(case.name, len(request.prompt_ids)), request)
    if result.token_ids != expected:
        # Where rounding may decide, texts may part.
        trunk = trunk_of(case.name)
        plain = SpeculativeDecoder(trunk, None, 0, (), records=True).generate([request])
        assert compare([result], plain, trunk)[0].verdict == "near_tie", (result.token_ids, expected)
        return
    is_stopped = expected[-1] in request.stop_token_ids
    assert result.finish_reason == ("stop" if is_stopped else "length")


def check_counts(case: Case, request: Request, result: GenerationResult) -> None:
    depth = 0 if request.mtp == "off" else DEPTH if request.depth is None else request.depth
    per_pos = result.accepted_per_pos
    committed = 1 + result.rounds + result.num_accepted_tokens
    assert len(per_pos) == depth
    assert list(per_pos) == sorted(per_pos, reverse=True)
    assert max(per_pos, default=0) <= result.rounds
    # Each round was needed, and only the last one may have gone past the end.
    assert len(result.token_ids) <= committed <= len(result.token_ids) + depth
    assert result.num_accepted_tokens <= result.num_draft_tokens <= depth * result.rounds
    if request.mtp == "on" and case.drafting != "ngram":
        assert result.num_draft_tokens == depth * result.rounds
    if case.drafting == "right":
        assert result.num_accepted_tokens == result.num_draft_tokens


def check(case: Case) -> None:
    for request, result in zip(case.requests, decode(case), strict=True):
        check_text(case, request, result)
        check_counts(case, request, result)


FAST_EXAMPLES = 8
"""Of each kind of trunk."""
ALWAYS_THE_SAME = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


def check_each(name: str, num_examples: int, do: Callable[[Case], None]) -> None:
    """Do something with each of the cases that are drawn for a trunk."""
    drawn = given(case=cases(name))(do)
    # Of each kind others.
    seed(zlib.crc32(name.encode()))(settings(ALWAYS_THE_SAME, max_examples=num_examples)(drawn))()


@pytest.mark.parametrize("name", CACHE_KINDS.values())
def test_every_text_is_plain_decodings(name: str) -> None:
    check_each(name, FAST_EXAMPLES, check)


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHE_KINDS.values())
def test_every_text_of_many_more_is_plain_decodings(name: str) -> None:
    check_each(name, 70, check)


@pytest.mark.parametrize("name", CACHE_KINDS.values())
def test_plain_texts_are_worth_comparing(name: str) -> None:
    varied = [len(set(plain_text(name, length))) for length in (1, 5, 17, 40)]
    assert min(varied) >= 6


@pytest.mark.parametrize("name", ["qwen3_5", "glm4_moe"])
def test_a_round_that_keeps_too_much_is_found_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = tuple(Request(prompt_ids=prompt(length), max_new_tokens=30) for length in (5, 9))
    case = Case(name, "nearly right", 2, 64, False, requests)
    check(case)
    if name == "qwen3_5":
        commit = WindowCache.commit
        monkeypatch.setattr(WindowCache, "commit", lambda cache, num_kept_B: commit(cache, None))
    else:
        monkeypatch.setattr(
            mtp_inference.sampling.chooser,
            "verify_matching",
            lambda drafts_BK, choices_BT, limit_B: Verdict(limit_B, choices_BT),
        )
    with pytest.raises(AssertionError):
        check(case)


def test_a_case_of_every_kind_is_drawn() -> None:
    drawn: list[Case] = []
    for name in CACHE_KINDS.values():
        check_each(name, FAST_EXAMPLES, lambda case: drawn.append(case))
    assert {case.drafting for case in drawn} == set(MAKERS)
    assert {case.is_ahead for case in drawn} == {False, True}
    requests = [request for case in drawn for request in case.requests]
    assert {request.mtp for request in requests} == {"on", "off", "auto"}
    assert {request.depth for request in requests} == {None, *range(8)}
    assert sum(len(case.requests) > case.rows for case in drawn) > 10
    assert sum(len(request.prompt_ids) > case.prefill_chunk for case in drawn for request in case.requests) > 10


@pytest.mark.skipif("blocks" not in CACHE_KINDS, reason="this transformers has no MiniMax-M3")
@pytest.mark.parametrize("drafting", ["right", "head"])
def test_a_long_text_that_ends_first_stands_in_nobodys_way(drafting: str) -> None:
    """Its row runs along, at positions that the others have yet to reach."""
    requests = tuple(
        Request(prompt_ids=prompt(length), max_new_tokens=new) for length, new in [(35, 3), (10, 23), (1, 20)]
    )
    check(Case(CACHE_KINDS["blocks"], drafting, 3, 14, True, requests))
