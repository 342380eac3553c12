"""The measuring engine: decode prompts with every arm of one trunk at every setting, one record each.

Run reports, ``evaluate``, ``compare`` and studies decode with :func:`decode_prompts` and compute every figure from its
records (``mtp_train.evaluation.statistics``).

Arms and settings take turns prompt by prompt, so that a machine that slows down slows all of them down alike. Plain
decoding runs through the same decoder at depth 0. A prompt has the same noise seed everywhere, so that every text must
equal the plain one, unless its drafts were sampled: such a text follows the same distribution with other noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mtp_inference import Comparison, GenerationResult, Request, Sampling, SpeculativeDecoder, compare
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.requests import Round
from mtp_train.answers.generate import noise_seed
from mtp_train.evaluation.prompt_records import Decoded, Setting, TaskPrompt
from mtp_train.evaluation.store import Store
from mtp_train.trunk.load import Trunk

PLAIN = "none"
"""Name of the arm that decodes without drafts."""
Prompts = Mapping[int | None, Sequence[TaskPrompt]]
"""Prompts by the context length that they were extended to; None: as they are."""
WARM_UP_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class DecodingOptions:
    """Limits, seed and batch size of all arms and settings."""

    max_new_tokens: int
    """Limit per prompt."""
    eos_ids: Collection[int]
    """Tokens that end a text."""
    seed: int
    """With a prompt's id, the seed of its noise."""
    batch: int = 1
    """Prompts decoded together."""


@dataclass
class RecordTable:
    """Records of every arm of one trunk."""

    decoded: dict[str, dict[Setting, list[Decoded]]]
    """By arm and setting, in the order of the prompts; plain decoding at the settings' :attr:`Setting.plain`."""
    captured_rounds: int = 0
    """Captured CUDA graphs of all decoders (:attr:`SpeculativeDecoder.captured_rounds`)."""


@dataclass
class _Block:
    """The settings that share one plain decoding, while they are decoded."""

    trunk: Trunk
    drafting: Mapping[str, Drafting]
    options: DecodingOptions
    decoders: dict[tuple[str, Setting], SpeculativeDecoder] = field(default_factory=dict)


def decode_prompts(
    trunk: Trunk,
    drafting: Mapping[str, Drafting],
    prompts: Prompts,
    settings: Sequence[Setting],
    options: DecodingOptions,
    *,
    plain_arm: str | None = PLAIN,
    store: Store | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> RecordTable:
    """Decode every prompt with every arm at every setting, and without drafts.

    Settings that differ only in depth and rule share one plain decoding.

    Args:
        trunk: The trunk.
        drafting: Arm name to its drafter.
        prompts: The prompts of every context of the settings.
        settings: Settings with drafts.
        options: Limits, seed and batch size.
        plain_arm: Name of plain decoding in the table; None to leave it out, and with it every comparison.
        store: Holds records of an interrupted study, which are not decoded again, and receives the new ones.
        on_prompt: Called for each prompt of each arm and setting, :func:`num_decodings` times in all.
    """
    table = RecordTable({arm: {} for arm in (plain_arm, *drafting) if arm is not None})
    for plain, drafted in _by_plain(settings).items():
        lanes = [(arm, setting) for setting in drafted for arm in drafting]
        if plain_arm is not None:
            lanes.insert(0, (plain_arm, plain))
        found = {lane: {} if store is None else store.read(*lane) for lane in lanes}
        block, given = _Block(trunk, drafting, options), prompts[plain.context_tokens]
        for start in range(0, len(given), options.batch):
            group = given[start : start + options.batch]
            for lane in lanes:
                if any(prompt.id not in found[lane] for prompt in group):
                    decoded = _decode_group(block, lane, group, None if plain_arm is None else found[plain_arm, plain])
                    if store is not None:
                        store.add(*lane, decoded)
                    found[lane].update({one.prompt_id: one for one in decoded})
                for _ in group:
                    on_prompt()
        for (arm, setting), by_prompt in found.items():
            table.decoded[arm][setting] = [by_prompt[prompt.id] for prompt in given]
        table.captured_rounds += sum(decoder.captured_rounds for decoder in block.decoders.values())
    return table


def joined(tables: Sequence[RecordTable], order: Sequence[str]) -> RecordTable:
    """Return the records of all processes, each of which decoded some of the prompts, in the order of prompt ids."""
    whole = RecordTable({arm: {} for arm in tables[0].decoded})
    for arm, settings in tables[0].decoded.items():
        for setting in settings:
            by_prompt = {one.prompt_id: one for table in tables for one in table.decoded[arm][setting]}
            whole.decoded[arm][setting] = [by_prompt[prompt_id] for prompt_id in order]
    whole.captured_rounds = sum(table.captured_rounds for table in tables)
    return whole


def num_decodings(num_arms: int, prompts: Prompts, settings: Sequence[Setting]) -> int:
    """Return how often :func:`decode_prompts` calls ``on_prompt`` for so many drafting arms and plain decoding."""
    return sum(
        len(prompts[plain.context_tokens]) * (1 + num_arms * len(drafted))
        for plain, drafted in _by_plain(settings).items()
    )


def _by_plain(settings: Sequence[Setting]) -> dict[Setting, list[Setting]]:
    """Return settings with drafts by their plain setting."""
    found: dict[Setting, list[Setting]] = {}
    for setting in settings:
        found.setdefault(setting.plain, []).append(setting)
    return found


def _decode_group(
    block: _Block, lane: tuple[str, Setting], group: Sequence[TaskPrompt], plain: Mapping[str, Decoded] | None
) -> list[Decoded]:
    """Decode prompts together, and compare each text with the plain one of the same prompt."""
    (arm, setting), options = lane, block.options
    if lane not in block.decoders:
        block.decoders[lane] = SpeculativeDecoder(
            block.trunk,
            block.drafting.get(arm),
            setting.depth,
            options.eos_ids,
            draft_sampling="sampled" if setting.rule == "sampled" else "argmax",
            max_batch=options.batch,
        )
        # Lazy initialisation happens in the first call, which is therefore not timed.
        _generate(block.decoders[lane], group, setting, options, min(WARM_UP_TOKENS, options.max_new_tokens))
    results, seconds = _generate(block.decoders[lane], group, setting, options, options.max_new_tokens)
    decoded = [_record(prompt, result, seconds, len(group)) for prompt, result in zip(group, results, strict=True)]
    if plain is None or setting.rule not in ("greedy", "argmax"):
        return decoded
    return [
        _compared(block, prompt, setting, one, plain[prompt.id]) for prompt, one in zip(group, decoded, strict=True)
    ]


def sampling_of(setting: Setting, seed: int) -> Sampling:
    """Return a setting's sampling parameters in the decoder's form."""
    return Sampling(temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k, seed=seed)


def _generate(
    decoder: SpeculativeDecoder,
    group: Sequence[TaskPrompt],
    setting: Setting,
    options: DecodingOptions,
    max_new_tokens: int,
) -> tuple[list[GenerationResult], float]:
    """Decode prompts together; return the results and the wall time of the call."""
    requests = [
        Request(
            prompt_ids=prompt.prompt_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling_of(setting, noise_seed(prompt.id, options.seed)),
        )
        for prompt in group
    ]
    started = time.perf_counter()
    results = decoder.decode(requests)
    return results, time.perf_counter() - started


def _record(prompt: TaskPrompt, result: GenerationResult, seconds: float, num_rows: int) -> Decoded:
    """Return a prompt's record; the rows of a batch share its wall time equally."""
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


def _compared(block: _Block, prompt: TaskPrompt, setting: Setting, drafted: Decoded, plain: Decoded) -> Decoded:
    """Return a record with the verdict of its comparison with the plain text of the same prompt."""
    found = compare_records(
        drafted, plain, block.trunk, prompt, sampling_of(setting, noise_seed(prompt.id, block.options.seed))
    )
    return replace(drafted, same_as_plain=found.verdict, noise=found.noise)


def compare_records(
    drafted: Decoded, plain: Decoded, trunk: Trunk, prompt: TaskPrompt, sampling: Sampling
) -> Comparison:
    """Compare a text whose drafts were not sampled with plain decoding of the same prompt and sampling parameters."""
    rounds = [Round(*counts) for counts in zip(drafted.drafted, drafted.accepted, strict=True)]
    return compare(drafted.token_ids, plain.token_ids, trunk, prompt.prompt_ids, sampling=sampling, rounds=rounds)
