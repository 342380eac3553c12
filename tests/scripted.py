"""Drafters and measures for decoder tests: drafts that go as scripted, rounds by hand, and how far a cache is off."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

import mtp_inference.decoder
from mtp_inference import HeadDrafting, Sampling
from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import AttentionStore, CompressedStore, ConvolvedStore, WindowCache
from mtp_inference.cache.recurrent import RecurrentStore
from mtp_inference.depth import RoundCosts
from mtp_inference.drafters.drafter import BatchSize, Drafter, Drafting, RoundPlan, state_at
from mtp_inference.drafters.ngram_drafter import NgramDrafter, NgramDrafting
from mtp_inference.round import prefill, run_round
from mtp_inference.sampling.chooser import Chooser, DraftChoice, Drafts
from mtp_inference.session import Lane, Session
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from plain_decoding import hidden_after, plain_greedy
from tiny import VOCAB_SIZE, chained_head, tiny_head
from tolerances import num_terms, rounding

DRAFTING: dict[str, Callable[[Trunk], Drafting]] = {
    "recursive": lambda trunk: HeadDrafting(tiny_head(trunk)),
    "chained": lambda trunk: HeadDrafting(chained_head(trunk, 3)),
    "chained_drafts": lambda trunk: HeadDrafting(chained_head(trunk, 3, drafts_only=True)),
    "ngram": lambda _: NgramDrafting(),
}
"""Ways to draft up to 3 tokens for a trunk."""
PlainTexts = Mapping[tuple[int, ...], Sequence[int]]
TextsAndDrafts = list[tuple[list[int], list[int]]]


def random_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    return torch.randint(VOCAB_SIZE, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def plain_texts(trunk: Trunk, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[tuple[int, ...], list[int]]:
    """Return the plain continuation of every prompt."""
    return {tuple(prompt): plain_greedy(trunk, prompt, num_tokens, ()) for prompt in prompts}


class ScriptedDrafting:
    """Draft the plain texts, with one wrong token at the script's places. Waits for the device.

    Args:
        texts: The plain continuation of every prompt that may come, some drafts longer than what will be committed.
        num_right: Drafts to get right in each round, repeated for ever; the text that is listed as the n-th begins with
            the n-th of them, so that the rows of a batch go apart.
        beside: Makes a real drafter that sees the same rows; what it would have drafted is in ``real_drafts``.
    """

    def __init__(self, texts: PlainTexts, num_right: Sequence[int], beside: Drafting | None = None) -> None:
        self.texts = texts
        self.num_right = num_right
        self.beside = beside
        self.real_drafts: list[Tensor] = []

    def check(self, trunk: Trunk, depth: int) -> None:
        if self.beside is not None:
            self.beside.check(trunk, depth)

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        real = None if self.beside is None else self.beside.make(trunk, size, cache)
        return ScriptedDrafter(self, size.num_rows, real)


class ScriptedDrafter(Drafter):
    """Follow every row's text and how much of it is committed."""

    def __init__(self, script: ScriptedDrafting, num_rows: int, real: Drafter | None) -> None:
        self.script = script
        self.real = real
        self.text: list[Sequence[int]] = [()] * num_rows
        self.committed = [0] * num_rows
        self.num_drafts = [0] * num_rows

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        known = list(self.script.texts)
        for row, prompt in enumerate(prompt_RT.tolist(), start=rows.start):
            self.text[row] = self.script.texts[tuple(prompt)]
            self.committed[row] = 1
            self.num_drafts[row] = known.index(tuple(prompt))
        if self.real is not None:
            self.real.start(rows, hidden_RTD, prompt_RT, first_R)

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        self.committed = [known + kept for known, kept in zip(self.committed, num_kept_B.tolist(), strict=True)]
        if self.real is not None:
            self.real.observe(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        if self.real is not None:
            real = self.real.draft(plan, choice).tokens_BK
            self.script.real_drafts += [real] if plan.depth else []
        rows = range(len(self.text) if plan.depth else 0)
        return Drafts(torch.tensor([self._draft_row(row, plan.depth) for row in rows]))

    def keep_rows(self, rows_R: Tensor) -> None:
        super().keep_rows(rows_R)
        rows = rows_R.tolist()
        self.text = [self.text[row] for row in rows]
        self.committed = [self.committed[row] for row in rows]
        self.num_drafts = [self.num_drafts[row] for row in rows]

    def _draft_row(self, row: int, depth: int) -> list[int]:
        if not self.text[row]:
            return [0] * depth
        drafts = list(self.text[row][self.committed[row] : self.committed[row] + depth])
        assert len(drafts) == depth, "the scripted text is too short"
        num_right = self.script.num_right[self.num_drafts[row] % len(self.script.num_right)]
        if num_right < depth:
            drafts[num_right] = (drafts[num_right] + 1) % VOCAB_SIZE
        self.num_drafts[row] += 1
        return drafts


class PassingDrafting:
    """Draft as another maker does; a function of the plan, the newest tokens and the drafts may change each draft."""

    def __init__(self, maker: Drafting, change: Callable[[RoundPlan, Tensor, Drafts], Drafts]) -> None:
        self.maker = maker
        self.change = change

    def check(self, trunk: Trunk, depth: int) -> None:
        self.maker.check(trunk, depth)

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return PassingDrafter(self.maker.make(trunk, size, cache), self.change)


class PassingDrafter(Drafter):
    def __init__(self, drafter: Drafter, change: Callable[[RoundPlan, Tensor, Drafts], Drafts]) -> None:
        self.inner = drafter
        self.change = change

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None:
        self.inner.start(rows, hidden_RTD, prompt_RT, first_R)

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None:
        self.inner.observe(hidden_BTD, tokens_BT, num_kept_B)

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        newest_B1 = choice.last_B1
        return self.change(plan, newest_B1, self.inner.draft(plan, choice))


class RereadingDrafting(Drafting):
    """Draft as a model does that reads the whole text again for every draft, without a cache."""

    def __init__(self, model: Trunk) -> None:
        self.model = model

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return RereadingDrafter(self.model, size)


class RereadingDrafter(NgramDrafter):
    """Stores the texts like prompt lookup."""

    def __init__(self, model: Trunk, size: BatchSize) -> None:
        super().__init__(size, model.lm_head_VD.device)
        self.model = model

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        end_B = self.length_B.clamp(min=1)
        for _ in range(plan.depth):
            # What is behind the end of a text changes nothing before it.
            hidden_BSD = self.model.hidden(self.text_BS)
            choice.add(self.model.logits(state_at(hidden_BSD, end_B - 1)))
            self.text_BS.scatter_(1, end_B[:, None], choice.last_B1)
            end_B = end_B + 1
        return choice.result()


class RandomDrafting(Drafting):
    """Draft any tokens, whatever the text."""

    def make(self, trunk: Trunk, size: BatchSize, cache: WindowCache) -> Drafter:
        return RandomDrafter()


class RandomDrafter(Drafter):
    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def start(self, rows: slice, hidden_RTD: Tensor, prompt_RT: Tensor, first_R: Tensor) -> None: ...

    def observe(self, hidden_BTD: Tensor, tokens_BT: Tensor, num_kept_B: Tensor) -> None: ...

    def draft(self, plan: RoundPlan, choice: DraftChoice) -> Drafts:
        return Drafts(torch.randint(VOCAB_SIZE, (len(choice.length_B), plan.depth), generator=self.generator))


def made(drafting: Drafting, trunk: Trunk, size: BatchSize) -> Drafter:
    """Return a drafter outside of a batch."""
    sizes = {"num_rows": size.num_rows, "capacity": size.capacity, "max_window": size.max_window}
    cache = WindowCache(trunk.config, **sizes, max_undecided=size.max_window)
    return drafting.make(trunk, size, cache)


class BatchRun:
    """A batch whose rounds the test plans itself, one row per prompt, none of which ends."""

    def __init__(
        self,
        trunk: Trunk,
        drafting: Drafting | None,
        prompts: Sequence[Sequence[int]],
        depth: int,
        prefill_chunk: int = 16,
    ) -> None:
        size = BatchSize(len(prompts), 128, depth, max_window=max(prefill_chunk, depth + 1, 8), num_stops=1)
        self.batch = Batch(trunk, drafting, size, prefill_chunk=prefill_chunk)
        self.cache = self.batch.cache
        self.drafter = self.batch.drafter
        self.batch.depth_B.fill_(depth)
        self.tokens = [list(prompt) for prompt in prompts]
        self.pending = [1] * len(prompts)
        for row, prompt in enumerate(prompts):
            rows = slice(row, row + 1)
            self.batch.set_rows(rows, [Sampling()], [size.capacity], [frozenset()])
            self.tokens[row] += prefill(self.batch, rows, torch.tensor([prompt]))[:, 0].tolist()

    def run_round(self, depth: int) -> None:
        """Run a round; a round without drafts leaves what is committed pending."""
        for row, (*tokens, num_kept, _, _) in enumerate(run_round(self.batch, self.plan(depth)).tolist()):
            self.tokens[row] += tokens[:num_kept]
            self.pending[row] = num_kept + (0 if depth else self.pending[row])

    def plan(self, depth: int) -> RoundPlan:
        """Return the plan of a round, its bounds as tight as they can be."""
        lengths = [len(tokens) for tokens in self.tokens]
        start = lengths[0] - 1 if len(set(lengths)) == 1 else None
        return RoundPlan(depth, max(lengths) + depth, max(self.pending), start)


def run_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look at every round one round late, as on a GPU."""

    def session(
        rounds: mtp_inference.decoder.Rounds, lanes: list[Lane], costs: RoundCosts, max_in_flight: int
    ) -> Session:
        assert max_in_flight == 0
        return Session(rounds, lanes, costs, max_in_flight=1)

    monkeypatch.setattr(mtp_inference.decoder, "Session", session)


def rounds_of(
    trunk: Trunk, drafting: Drafting, texts: PlainTexts, depths: Sequence[int], num_right: Sequence[int], deepest: int
) -> list[TextsAndDrafts]:
    """Run rounds at given depths over a ragged batch, with as many drafts accepted as a script sets.

    Returns:
        For each round with drafts and each row, the text before it and what was drafted.
    """
    script = ScriptedDrafting(texts, num_right, drafting)
    run = BatchRun(trunk, script, list(texts), deepest)
    seen = []
    for depth in depths:
        before = [list(tokens) for tokens in run.tokens]
        run.run_round(depth)
        if depth:
            seen.append(list(zip(before, script.real_drafts[-1].tolist(), strict=True)))
    return seen


def drafted_in_rounds(trunk: Trunk, drafting: Drafting, texts: PlainTexts, depths: Sequence[int]) -> TextsAndDrafts:
    """Run rounds of every outcome; return the texts before those with drafts, and what a drafter drafted after each."""
    deepest = max(depths)
    return [*chain.from_iterable(rounds_of(trunk, drafting, texts, depths, (0, deepest, 1, 2), deepest))]


def greedy_chooser(num_rows: int) -> Chooser:
    """Return the choices of a batch that decodes greedily."""
    device = torch.device("cpu")
    return Chooser([Sampling()] * num_rows, "argmax", device)


def state_bound(trunk: Trunk) -> float:
    """Return the largest of :func:`state_errors` that rounding explains."""
    return rounding(1.0, num_terms(trunk))


def state_errors(cache: WindowCache, trunk: Trunk, tokens: Sequence[int], row: int = 0) -> dict[str, float]:
    """Compare one row of a cache with transformers' own after one plain forward over ``tokens``.

    Returns:
        The largest difference of each kind of state, relative to the largest value.
    """
    plain = DynamicCache(config=trunk.config)
    with torch.inference_mode():
        hidden_after(trunk, torch.tensor([list(tokens)]), plain)
    errors: dict[str, float] = {}

    def note(kind: str, ours: Tensor, expected: Tensor) -> None:
        assert ours.shape == expected.shape, kind
        error = float((ours - expected).abs().max() / expected.abs().max()) if expected.numel() else 0.0
        errors[kind] = max(error, errors.get(kind, 0.0))

    for ours, expected in zip(cache.layers, plain.layers, strict=True):
        if isinstance(ours, RecurrentStore):
            assert isinstance(expected, LinearAttentionLayer)
            assert ours.conv_BCW is not None
            assert ours.state_BHKV is not None
            note("conv", ours.conv_BCW[row], expected.conv_states[0][0])
            note("recurrent", ours.state_BHKV[row], expected.recurrent_states[0][0])
        elif isinstance(ours, AttentionStore):
            # A sliding layer of transformers' holds the last positions only.
            slots = torch.arange(len(tokens) - expected.keys.shape[2], len(tokens)) % ours.size
            note("keys", ours.keys[row, :, slots], expected.keys[0])
            note("values", ours.values[row, :, slots], expected.values[0])
            if isinstance(ours, CompressedStore):
                for name, entries_1EX in expected.compressed_kv.items():
                    note("entries", ours.buffers_BZ[f"{name} entries"][row, : entries_1EX.shape[1]], entries_1EX[0])
                    # What has not filled a group yet.
                    inputs_1NX = torch.cat([expected.buffer_kv[name], expected.buffer_gate[name]], dim=-1)
                    places = torch.arange(len(tokens) - inputs_1NX.shape[1], len(tokens)) % ours.num_inputs
                    note("inputs", ours.buffers_BZ[f"{name} inputs"][row, places], inputs_1NX[0])
        if isinstance(ours, ConvolvedStore):
            for number, expected_1CW in expected.conv_states.items():
                inputs_ZC = ours.buffers_BZ[number][row]
                places = torch.arange(len(tokens) - min(len(tokens), expected_1CW.shape[2]), len(tokens))
                note("conv", inputs_ZC[places % len(inputs_ZC)].T, expected_1CW[0, :, -len(places) :])
    assert errors, "some layer keeps a state"
    return errors


def spied_drafts(
    trunk: Trunk, head: MtpHead, depths: Sequence[int], draft_vocab_R: Tensor | None = None, deepest: int = 4
) -> list[TextsAndDrafts]:
    """Return what a head drafts in the rounds of a batch of two rows."""
    texts = plain_texts(trunk, [random_prompt(num_tokens, seed=3) for num_tokens in (1, 6)], 40)
    return rounds_of(trunk, HeadDrafting(head, draft_vocab_R), texts, depths, [4, 0, 1, 2, 3], deepest)
