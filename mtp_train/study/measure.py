"""Decode a grid of settings with every arm of one trunk, and keep what came of each prompt.

The arms and settings take turns prompt by prompt, so that a machine that slows down slows all of them down alike, and
each is timed beside plain decoding. The same prompt has the same seed everywhere.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mtp_inference import GenerationResult, Request, Sampling, SpeculativeDecoder
from mtp_inference.draft import DrafterMaker
from mtp_train.arms import compare_with_plain
from mtp_train.data.regenerated import noise_seed
from mtp_train.heads.trunk import Trunk
from mtp_train.study.records import Decoded, Rule, Setting, TaskPrompt
from mtp_train.study.store import Store
from mtp_train.study.suites import load_suite, suite_prompts

WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Which settings to measure, and on what."""

    suite: str
    tasks: tuple[str, ...] | None
    """None: all of the suite."""
    prompts_per_task: int
    temperatures: tuple[float, ...]
    contexts: tuple[int | None, ...]
    """Lengths that prompts are brought to; None leaves them as they are."""
    depths: tuple[int, ...]
    rules: tuple[Rule, ...]
    """``greedy`` goes with temperature 0, the others with those above."""
    max_new_tokens: int
    batch: int
    """Prompts decoded together."""
    seed: int

    def drafted(self, temperature: float, context_tokens: int | None) -> list[Setting]:
        """Return the settings of one temperature and context that draft."""
        rules = [rule for rule in self.rules if (rule == "greedy") == (temperature == 0.0)]
        return [Setting(temperature, context_tokens, depth, rule) for rule in rules for depth in self.depths]

    def settings(self) -> list[Setting]:
        """Return every setting that drafts."""
        return [one for context in self.contexts for t in self.temperatures for one in self.drafted(t, context)]

    @property
    def headline(self) -> Setting:
        """The setting that stands for all in one line: the lowest temperature, prompts as they are, depth 3."""
        context = None if None in self.contexts else min(one for one in self.contexts if one is not None)
        depth = max((one for one in self.depths if one <= 3), default=min(self.depths))
        settings = self.drafted(min(self.temperatures), context)
        return next(one for one in reversed(settings) if one.depth == depth)


def grid_prompts(grid: Grid, tokenizer: Any, contexts: Sequence[int | None]) -> dict[int | None, list[TaskPrompt]]:
    """Return the prompts of the grid's suite, by the length that they are brought to.

    Raises:
        DataError: There is no such suite or task, or it cannot be read.
    """
    suite = load_suite(grid.suite)
    return {
        context: suite_prompts(
            suite,
            tokenizer,
            context_tokens=context,
            prompts_per_task=grid.prompts_per_task,
            seed=grid.seed,
            tasks=grid.tasks,
        )
        for context in contexts
    }


def measure_block(
    trunk: Trunk,
    drafting: Mapping[str, DrafterMaker],
    prompts: Sequence[TaskPrompt],
    settings: Sequence[Setting],
    *,
    plain_arm: str,
    grid: Grid,
    eos_ids: Collection[int],
    store: Store,
    on_prompt: Callable[[], None],
) -> dict[str, dict[Setting, list[Decoded]]]:
    """Decode prompts under settings of one temperature and one context.

    Args:
        trunk: The trunk.
        drafting: Arm name to what drafts in it.
        prompts: What to decode.
        settings: Those that draft; plain decoding comes besides.
        plain_arm: What plain decoding on this trunk is called.
        grid: Batch, limit and seed.
        eos_ids: Tokens that end a text.
        store: Where results are kept, and found again.
        on_prompt: Called for each prompt of each arm and setting.

    Returns:
        For each arm and setting the prompts in their order; the plain arm's among them.
    """
    plain = settings[0].plain
    lanes = [(plain_arm, plain), *((arm, setting) for setting in settings for arm in drafting)]
    found = {lane: store.read(*lane) for lane in lanes}
    decoders: dict[tuple[str, Setting], SpeculativeDecoder] = {}
    for start in range(0, len(prompts), grid.batch):
        group = prompts[start : start + grid.batch]
        for lane in lanes:
            if any(prompt.id not in found[lane] for prompt in group):
                arm, setting = lane
                if lane not in decoders:
                    decoders[lane] = _decoder(trunk, drafting.get(arm), setting, grid, eos_ids)
                    # The first call pays for lazy initialisation; nobody should read that as decoding time.
                    _decode(decoders[lane], group, setting, min(WARM_UP_TOKENS, grid.max_new_tokens), grid.seed)
                results, seconds = _decode(decoders[lane], group, setting, grid.max_new_tokens, grid.seed)
                decoded = [
                    _record(prompt, result, seconds, len(group)) for prompt, result in zip(group, results, strict=True)
                ]
                if setting.rule in ("greedy", "argmax"):
                    decoded = [
                        _compared(trunk, prompt, one, found[lanes[0]][prompt.id], setting, grid.seed)
                        for prompt, one in zip(group, decoded, strict=True)
                    ]
                store.add(arm, setting, decoded)
                found[lane].update({one.prompt_id: one for one in decoded})
            for _ in group:
                on_prompt()
    measured: dict[str, dict[Setting, list[Decoded]]] = {arm: {} for arm in (plain_arm, *drafting)}
    for lane, by_prompt in found.items():
        arm, setting = lane
        measured[arm][setting] = [by_prompt[prompt.id] for prompt in prompts]
    return measured


def _decoder(
    trunk: Trunk, maker: DrafterMaker | None, setting: Setting, grid: Grid, eos_ids: Collection[int]
) -> SpeculativeDecoder:
    sampled = setting.rule == "sampled"
    return SpeculativeDecoder(
        trunk,
        maker,
        setting.depth,
        eos_ids,
        draft_sampling="sampled" if sampled else "argmax",
        max_batch=grid.batch,
    )


def _decode(
    decoder: SpeculativeDecoder, group: Sequence[TaskPrompt], setting: Setting, max_new_tokens: int, seed: int
) -> tuple[list[GenerationResult], float]:
    requests = [
        Request(
            prompt_ids=prompt.prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=Sampling(temperature=setting.temperature, seed=noise_seed(prompt.id, seed)),
        )
        for prompt in group
    ]
    started = time.perf_counter()
    results = decoder.generate(requests)
    return results, time.perf_counter() - started


def _record(prompt: TaskPrompt, result: GenerationResult, seconds: float, num_rows: int) -> Decoded:
    # Rows of a batch share its time; alone, a prompt has its own.
    prefill = result.seconds_prefill / num_rows
    return Decoded(
        prompt_id=prompt.id,
        group=prompt.group,
        task=prompt.task,
        prompt_tokens=len(prompt.prompt_ids),
        token_ids=tuple(result.token_ids),
        drafted=tuple(one.num_drafted for one in result.round_log),
        accepted=tuple(one.num_accepted for one in result.round_log),
        seconds_prefill=prefill,
        seconds_decode=max(seconds / num_rows - prefill, 0.0),
        same_as_plain=None,
    )


def _compared(
    trunk: Trunk, prompt: TaskPrompt, drafted: Decoded, plain: Decoded, setting: Setting, seed: int
) -> Decoded:
    sampling = Sampling(temperature=setting.temperature, seed=noise_seed(prompt.id, seed))
    comparison = compare_with_plain(drafted.token_ids, plain.token_ids, trunk, prompt.prompt_ids, sampling)
    return replace(drafted, same_as_plain=comparison.verdict)
