"""Drafters: what each of them proposes, alone and inside the decoder."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

import mtp_inference.drafters.drafter
import mtp_inference.drafters.head_drafter
import mtp_inference.session
from mtp_inference import HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan
from mtp_inference.drafters.ngram_drafter import NgramDrafter, NgramDrafting
from mtp_inference.sampling.chooser import Chooser, DraftChoice, Drafts, DraftSampling
from mtp_train.errors import UnsupportedModelError
from mtp_train.heads.module import Chaining
from plain_decoding import plain_greedy
from scripted import DRAFTING, PassingDrafting, RereadingDrafting, made, random_prompt
from tiny import CACHE_KINDS, CHAININGS, VOCAB_SIZE, chained_head, head_of, tiny_trunk

SOME_IDS = torch.tensor([3, 60, 14, 15, 9, 2, 6, 53, 58, 40, 7, 33])


trunk_of = functools.cache(tiny_trunk)


def prompt(num_tokens: int) -> list[int]:
    return random_prompt(num_tokens, 1000 * num_tokens)


@functools.cache
def plain_text(name: str, prompt_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    return tuple(plain_greedy(trunk_of(name), prompt_ids, num_tokens, ()))


def assert_plain(name: str, decoder: SpeculativeDecoder, requests: Sequence[Request]) -> list[tuple[int, int]]:
    """Decode, compare every text with plain decoding, and return how many tokens were drafted and accepted."""
    results = decoder.generate(requests)
    for request, result in zip(requests, results, strict=True):
        assert result.token_ids == plain_text(name, tuple(request.prompt_ids), request.max_new_tokens)
    return [(result.num_draft_tokens, result.num_accepted_tokens) for result in results]


def ragged(depths: Sequence[int], max_new_tokens: int = 24) -> list[Request]:
    return [
        Request(prompt_ids=prompt(2 + 5 * index), max_new_tokens=max_new_tokens, depth=depth)
        for index, depth in enumerate(depths)
    ]


class Recorded(PassingDrafting):
    """Make drafters as another maker does, and keep every draft."""

    def __init__(self, maker: Drafting) -> None:
        super().__init__(maker, self.note)
        self.drafts: list[Drafts] = []
        self.num_settled = 0

    def note(self, plan: RoundPlan, _newest_B1: Tensor, drafts: Drafts) -> Drafts:
        if plan.depth:
            self.drafts.append(drafts)
        else:
            self.num_settled += 1
        return drafts


def scheduled(depths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make requests whose depth is the decoder's choice follow a schedule, repeated for ever."""
    left: list[int] = []

    def batch_depth(*_unused: object) -> int:
        left.extend(() if left else depths)
        return left.pop(0)

    monkeypatch.setattr(mtp_inference.session, "batch_depth", batch_depth)


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set how many committed tokens may wait for a drafter."""

    def set_places(number: int) -> None:
        for module in (mtp_inference.session, mtp_inference.drafters.drafter):
            monkeypatch.setattr(module, "PENDING_PLACES", number)

    return set_places


def adaptive(lengths: Sequence[int], limits: Sequence[int], depth: int) -> list[Request]:
    return [
        Request(prompt_ids=prompt(length), max_new_tokens=limit, mtp="auto", depth=depth)
        for length, limit in zip(lengths, limits, strict=True)
    ]


@pytest.mark.parametrize("name", CACHE_KINDS.values())
def test_after_a_long_plain_stretch_the_trunk_itself_is_still_right(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two rows, the second of them filled again in the stretch: it has 24 tokens less to take in than its neighbour.
    scheduled([3, *[0] * 40, 3, 0, 1, 0, 0, 3, 3], monkeypatch)
    record = Recorded(RereadingDrafting(trunk_of(name)))
    decoder = SpeculativeDecoder(trunk_of(name), record, 3, (), max_batch=2)
    requests = adaptive([9, 6, 4], [70, 12, 50], depth=3)
    for drafted, accepted in assert_plain(name, decoder, requests):
        assert accepted == drafted > 0
    assert record.num_settled > 0


@pytest.mark.parametrize("maker", DRAFTING)
def test_drafts_do_not_hang_on_when_pending_tokens_are_taken_in(
    maker: str, monkeypatch: pytest.MonkeyPatch, places: Callable[[int], None]
) -> None:
    trunk = trunk_of("qwen3_5")
    requests = adaptive([9, 6, 4], [40, 12, 30], depth=3)
    drafted: dict[int, list[list[int]]] = {}
    for number in (32, 5, 2):
        places(number)
        scheduled([0, 0, 0, 0, 0, 0, 0, 3, 0, 2, 0, 0, 3, 1], monkeypatch)
        record = Recorded(DRAFTING[maker](trunk))
        decoder = SpeculativeDecoder(trunk, record, 3, (), max_batch=2)
        assert_plain("qwen3_5", decoder, requests)
        # The second row is idle at the end, when its drafts are anything.
        drafted[number] = [draft.tokens_BK[0].tolist() for draft in record.drafts]
        assert (record.num_settled == 0) == (number == 32)
    assert drafted[32] == drafted[5] == drafted[2]


def plan_too_low(session: mtp_inference.session.Session, depth: int) -> RoundPlan:
    return dataclasses.replace(PLAN(session, depth), pending=1)


PLAN = mtp_inference.session.Session._plan
FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "pending tokens are lost": lambda patch: patch.setattr(
        mtp_inference.session, "settle_drafter", lambda batch, _: batch.drafter.inner.pending.clear()
    ),
    "a bound is too low": lambda patch: patch.setattr(mtp_inference.session.Session, "_plan", plan_too_low),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_drafter_that_misses_a_stretch_drafts_otherwise(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafted = []
    for is_sound in (True, False):
        monkeypatch.setattr(mtp_inference.session, "PENDING_PLACES", 2)
        scheduled([0, 0, 0, 0, 3], monkeypatch)
        record = Recorded(DRAFTING["recursive"](trunk_of("qwen3_5")))
        if not is_sound:
            FAULTS[fault](monkeypatch)
        decoder = SpeculativeDecoder(trunk_of("qwen3_5"), record, 3, ())
        assert_plain("qwen3_5", decoder, adaptive([9], [40], depth=3))
        drafted.append([draft.tokens_BK.tolist() for draft in record.drafts])
    assert drafted[0] != drafted[1]


@pytest.mark.parametrize("maker", ["recursive", "chained", "chained_drafts"])
def test_a_wide_plan_at_the_end_of_the_buffers_drafts_the_same(maker: str) -> None:
    trunk = trunk_of("qwen3_5")
    prompt_1T = torch.tensor([prompt(12)])
    first_1 = torch.tensor([5])
    chooser = Chooser([Sampling()], "argmax", torch.device("cpu"))
    drafted = []
    with torch.inference_mode():
        hidden_1TD = trunk.hidden(prompt_1T)
        for pending in (1, 33):
            drafter = made(DRAFTING[maker](trunk), trunk, BatchSize(1, 16, 3, 16))
            drafter.start(slice(0, 1), hidden_1TD, prompt_1T, first_1)
            choice = DraftChoice(chooser, first_1, torch.tensor([12]))
            drafted.append(drafter.draft(RoundPlan(3, 16, pending, None), choice).tokens_BK.tolist())
    assert drafted[0] == drafted[1]


def ngrams(text: Sequence[int]) -> list[int]:
    """Return what is drafted after a text, the last token of which is the trunk's."""
    drafter = made(NgramDrafting(), trunk_of("glm4_moe"), BatchSize(1, 32, 3, 32))
    start_ngrams(drafter, text)
    return drafted_ngrams(drafter)[0]


def start_ngrams(drafter: Drafter, text: Sequence[int], row: int = 0) -> None:
    no_hidden = torch.empty(1, len(text) - 1, 0)
    drafter.start(slice(row, row + 1), no_hidden, torch.tensor([text[:-1]]), torch.tensor(text[-1:]))


def drafted_ngrams(drafter: Drafter) -> list[list[int]]:
    assert isinstance(drafter, NgramDrafter)
    device = torch.device("cpu")
    chooser = Chooser([Sampling()] * len(drafter.length_B), "argmax", device)
    drafts = drafter.draft(RoundPlan(3, 0, 0, None), DraftChoice(chooser, drafter.length_B, drafter.length_B))
    assert drafts.num_drafted_B is not None
    assert drafts.tokens_BK.shape == (len(drafter.length_B), 3)
    pairs = zip(drafts.tokens_BK.tolist(), drafts.num_drafted_B.tolist(), strict=True)
    return [tokens[:number] for tokens, number in pairs]


@pytest.mark.parametrize(
    ("text", "drafted"),
    [
        ([5, 6, 7, 8, 9, 1, 5, 6, 7], [8, 9, 1]),
        # No token comes twice.
        ([5, 6, 7, 8], []),
        ([5, 6], []),
        # The three last tokens decide, not the last one, which stood before a 9 more recently.
        ([1, 2, 3, 4, 9, 9, 3, 9, 9, 1, 2, 3], [4, 9, 9]),
        # Two tokens, where three are not found.
        ([2, 3, 4, 3, 5, 1, 2, 3], [4, 3, 5]),
        # Of equal matches the most recent one.
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        # What follows the match may end before the draft does.
        ([1, 2, 1, 2], [1, 2]),
        ([4, 4, 4], [4]),
        ([4, 4], [4]),
    ],
)
def test_what_followed_the_last_tokens_is_drafted(text: list[int], drafted: list[int]) -> None:
    assert ngrams(text) == drafted


def test_rows_search_their_own_committed_texts() -> None:
    drafter = made(NgramDrafting(), trunk_of("glm4_moe"), BatchSize(3, 32, 3, 32))
    for row, text in enumerate(([1, 2, 3, 1], [0, 0, 3, 3, 3], [7, 8, 5, 9])):
        start_ngrams(drafter, text, row)
    assert drafted_ngrams(drafter) == [[2, 3, 1], [3], []]
    # Two tokens of the first row count, none of the second, four of the third.
    window_BT = torch.tensor([[2, 8, 8, 8], [0, 0, 0, 0], [6, 6, 7, 8]])
    drafter.observe(torch.empty(3, 4, 0), window_BT, torch.tensor([2, 0, 4]))
    assert drafted_ngrams(drafter) == [[], [3], [5, 9, 6]]
    drafter.observe(torch.empty(3, 4, 0), window_BT, torch.tensor([1, 1, 1]))
    assert drafted_ngrams(drafter) == [[8, 2], [3, 3, 3], [7, 8, 6]]
    start_ngrams(drafter, [4, 4, 5, 6], row=0)
    assert drafted_ngrams(drafter) == [[], [3, 3, 3], [7, 8, 6]]


def test_only_what_was_found_counts_as_drafted() -> None:
    record = Recorded(NgramDrafting())
    requests = ragged([3, 2, 5, 0], max_new_tokens=40)
    decoder = SpeculativeDecoder(trunk_of("glm4_moe"), record, 3, (), max_batch=4)
    results = decoder.generate(requests)
    assert_plain("glm4_moe", decoder, requests)
    drafted, rounds, accepted = (
        [getattr(result, name) for result in results] for name in ("num_draft_tokens", "rounds", "num_accepted_tokens")
    )
    # The texts of this trunk run into loops.
    assert all(0 < number < depth * count for number, count, depth in zip(drafted, rounds, (3, 2, 5), strict=False))
    assert drafted[3] == accepted[3] == 0
    assert sum(accepted) > 20
    assert sum(rounds[:3]) < 3 * 39 - sum(accepted) + 3


def outside(ids_R: Tensor) -> Tensor:
    return torch.ones(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids_R, False)


@pytest.mark.parametrize("draft_sampling", ["argmax", "sampled"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "at_temperature"])
@pytest.mark.parametrize("kind", CHAININGS)
def test_a_reduced_vocabulary_bounds_the_drafts_and_not_the_text(
    kind: Chaining, sampled: bool, draft_sampling: DraftSampling
) -> None:
    trunk = trunk_of("qwen3_5")
    head = head_of(trunk, kind, 3)
    settings = [Sampling(temperature=0.9, top_k=30, seed=seed) for seed in range(3)]
    requests = [
        Request(prompt_ids=prompt(4 + row), max_new_tokens=20, sampling=settings[row] if sampled else Sampling())
        for row in range(3)
    ]
    plain = [result.token_ids for result in SpeculativeDecoder(trunk, None, 0, ()).generate(requests)]
    drafted: dict[str, set[int]] = {}
    for name, ids_R in (("all", None), ("some", SOME_IDS)):
        record = Recorded(HeadDrafting(head, ids_R))
        decoder = SpeculativeDecoder(trunk, record, 3, (), draft_sampling=draft_sampling)
        texts = [result.token_ids for result in decoder.generate(requests)]
        # Drafts that are drawn change which text is drawn, not how probable it is.
        assert (texts == plain) == (not sampled or draft_sampling == "argmax")
        drafted[name] = {token for draft in record.drafts for token in draft.tokens_BK.flatten().tolist()}
        for draft in record.drafts:
            assert (draft.q_BKV is None) == (not sampled or draft_sampling == "argmax")
            if draft.q_BKV is not None and ids_R is not None:
                assert bool((draft.q_BKV[..., outside(ids_R)] == 0.0).all())
                torch.testing.assert_close(draft.q_BKV.sum(-1), torch.ones(draft.q_BKV.shape[:2]))
    assert drafted["some"] <= set(SOME_IDS.tolist())
    assert not drafted["all"] <= set(SOME_IDS.tolist())


def test_what_cannot_draft_is_refused() -> None:
    trunk = trunk_of("glm4_moe")
    chained = chained_head(trunk, 2)
    with pytest.raises(UnsupportedModelError, match=r"depth: 3; expected at most 2, as this .* head has one module"):
        SpeculativeDecoder(trunk, chained, 3, ())
    decoder = SpeculativeDecoder(trunk, chained, 2, ())
    with pytest.raises(UnsupportedModelError, match="depth: 3; expected at most 2"):
        decoder.stream([Request(prompt_ids=[1], max_new_tokens=4, depth=3)])
