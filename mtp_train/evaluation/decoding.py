"""The measuring engine: decode prompts with every arm of one trunk at every setting, one record each.

All prompts are decoded in ragged batches, for acceptance and for the texts, which must equal those of plain decoding. A
few of them are decoded again, one at a time, for the speed. Every figure of a report is computed from these records
(``mtp_train.evaluation.statistics``).

Plain decoding runs through the same decoder at depth 0. A prompt has the same noise seed everywhere, so that every text
must equal the plain one, unless its drafts were sampled: such a text follows the same distribution with other noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mtp_inference import GenerationResult, Request, SpeculativeDecoder, compare
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.requests import Round
from mtp_train.acceptance.names import PLAIN
from mtp_train.answers.generate import noise_seed
from mtp_train.data.tokenize import choose_evenly
from mtp_train.evaluation.prompt_records import PromptRecord, Setting, TaskPrompt
from mtp_train.evaluation.store import Store
from mtp_train.trunk.load import Trunk

Prompts = Mapping[int | None, Sequence[TaskPrompt]]
"""Prompts by the context length that they were extended to; None: as they are."""
ArmRecords = dict[str, dict[Setting, list[PromptRecord]]]
"""Records by arm and setting, in the order of the prompts; those of plain decoding at :attr:`Setting.plain`."""
Lane = tuple[str, Setting]
"""An arm at a setting."""
MAX_BATCH, MAX_BATCH_TOKENS = 16, 65_536
"""Most prompts decoded together, and the most positions of their caches."""
BATCHES_AT_A_TIME = 4
"""Batches that are decoded in one call, whose rows go to waiting prompts, and stored after it."""
SPEED_PROMPTS = 8
"""Prompts that are timed: round times vary little between prompts."""
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
    batch: int = MAX_BATCH
    """Most prompts decoded together."""
    seq_len_tokens: int = 8192
    """Longest text for teacher-forced metrics, prompt included; a longer text is cut at its end."""
    dense_tokens: int | None = None
    """Most tokens of these texts; None for no limit."""

    def rows(self, prompts: Sequence[TaskPrompt]) -> int:
        """Return how many of these prompts to decode together."""
        longest = max(len(one.prompt_ids) for one in prompts) + self.max_new_tokens
        return max(1, min(self.batch, len(prompts), MAX_BATCH_TOKENS // longest))


@dataclass(frozen=True)
class TrunkArms:
    """A trunk in memory, with what drafts for it."""

    trunk: Trunk
    name: str
    """The trunk as the report names it."""
    drafting: Mapping[str, Drafting]
    """The drafters, by arm."""
    head_names: Mapping[str, str]
    """The drafters as the report names them, by arm."""
    plain_arm: str = PLAIN
    """Name of plain decoding."""

    def lanes(self, settings: Iterable[Setting]) -> list[Lane]:
        """Return every drafter at every setting."""
        return [(arm, setting) for setting in settings for arm in self.drafting]

    def by_plain(self, lanes: Iterable[Lane]) -> dict[Setting, list[Lane]]:
        """Return lanes by their plain setting, each list headed by plain decoding."""
        found: dict[Setting, list[Lane]] = {}
        for arm, setting in lanes:
            found.setdefault(setting.plain, [(self.plain_arm, setting.plain)]).append((arm, setting))
        return found

    def num_decodings(self, lanes: Iterable[Lane], prompts: Prompts) -> int:
        """Return how often ``on_prompt`` is called while lanes are decoded or timed."""
        return sum(len(prompts[plain.context_tokens]) * len(some) for plain, some in self.by_plain(lanes).items())

    def decoder(self, arm: str, setting: Setting, options: DecodingOptions, rows: int) -> SpeculativeDecoder:
        """Return the decoder of an arm at a setting, for so many prompts at a time."""
        return SpeculativeDecoder(
            self.trunk,
            self.drafting.get(arm),
            setting.depth,
            options.eos_ids,
            draft_sampling="sampled" if setting.rule == "sampled" else "argmax",
            max_batch=rows,
        )


def decode_prompts(
    arms: TrunkArms,
    prompts: Prompts,
    lanes: Iterable[Lane],
    options: DecodingOptions,
    *,
    store: Store | None = None,
    on_prompt: Callable[[], object] = lambda: None,
) -> ArmRecords:
    """Decode every prompt with drafters and without, in ragged batches.

    Settings that differ only in depth and rule share one plain decoding.

    Args:
        arms: The trunk and its drafters.
        prompts: The prompts of every context of the settings.
        lanes: The drafters and their settings.
        options: Limits, seed and batch size.
        store: Holds records of an interrupted study, which are not decoded again, and receives the new ones.
        on_prompt: Called for each prompt of each lane and of plain decoding (:meth:`TrunkArms.num_decodings`).
    """
    records: ArmRecords = {arm: {} for arm in (arms.plain_arm, *arms.drafting)}
    for plain, some in arms.by_plain(lanes).items():
        given = prompts[plain.context_tokens]
        for arm, setting in some:
            found = {} if store is None else store.read(arm, setting)
            missing = [prompt for prompt in given if prompt.id not in found]
            for _ in range(len(given) - len(missing)):
                on_prompt()
            references = {one.prompt_id: one for one in records[arms.plain_arm].get(plain, ())}
            for group, results in _decode(arms, arm, setting, missing, options):
                done = [record_of(*pair) for pair in zip(group, results, strict=True)]
                if setting.rule in ("greedy", "argmax"):
                    pairs = zip(group, done, strict=True)
                    done = [_compared(arms, one, setting, mine, references[one.id], options) for one, mine in pairs]
                found |= {one.prompt_id: one for one in done}
                if store is not None:
                    store.add(arm, setting, done)
                for _ in done:
                    on_prompt()
            records[arm][setting] = [found[prompt.id] for prompt in given]
    return records


def _decode(
    arms: TrunkArms, arm: str, setting: Setting, prompts: Sequence[TaskPrompt], options: DecodingOptions
) -> Iterator[tuple[Sequence[TaskPrompt], list[GenerationResult]]]:
    """Yield some batches of prompts at a time, with their results."""
    if not prompts:
        return
    rows = options.rows(prompts)
    decoder = arms.decoder(arm, setting, options, rows)
    for start in range(0, len(prompts), BATCHES_AT_A_TIME * rows):
        group = prompts[start : start + BATCHES_AT_A_TIME * rows]
        yield group, decoder.decode([request_of(prompt, setting, options) for prompt in group])


def _compared(
    arms: TrunkArms,
    prompt: TaskPrompt,
    setting: Setting,
    drafted: PromptRecord,
    plain: PromptRecord,
    options: DecodingOptions,
) -> PromptRecord:
    """Return a record with the verdict of its comparison with the plain text of the same prompt."""
    sampling = setting.sampling(noise_seed(prompt.id, options.seed))
    rounds = [Round(*counts) for counts in zip(drafted.drafted, drafted.accepted, strict=True)]
    found = compare(drafted.token_ids, plain.token_ids, arms.trunk, prompt.prompt_ids, sampling=sampling, rounds=rounds)
    return replace(drafted, same_as_plain=found.verdict, noise=found.noise)


def time_prompts(
    arms: TrunkArms,
    prompts: Prompts,
    lanes: Iterable[Lane],
    options: DecodingOptions,
    *,
    store: Store | None = None,
    on_prompt: Callable[[], object] = lambda: None,
) -> ArmRecords:
    """Decode prompts with drafters and without, one at a time; arguments as for :func:`decode_prompts`.

    Lanes take turns prompt by prompt, so that a machine that slows down slows all of them down alike.
    """
    records: ArmRecords = {arm: {} for arm in (arms.plain_arm, *arms.drafting)}
    for plain, some in arms.by_plain(lanes).items():
        given = prompts[plain.context_tokens]
        found = {lane: {} if store is None else store.read(*lane, timed=True) for lane in some}
        decoders: dict[Lane, SpeculativeDecoder] = {}
        for prompt in given:
            for lane in some:
                if prompt.id not in found[lane]:
                    if lane not in decoders:
                        decoders[lane] = arms.decoder(*lane, options, 1)
                        # Lazy initialisation happens in the first call, which is therefore not timed.
                        _timed(decoders[lane], prompt, lane[1], options, min(WARM_UP_TOKENS, options.max_new_tokens))
                    one = _timed(decoders[lane], prompt, lane[1], options, options.max_new_tokens)
                    found[lane][prompt.id] = one
                    if store is not None:
                        store.add(*lane, [one], timed=True)
                on_prompt()
        for (arm, setting), by_prompt in found.items():
            records[arm][setting] = [by_prompt[prompt.id] for prompt in given]
    return records


def _timed(
    decoder: SpeculativeDecoder, prompt: TaskPrompt, setting: Setting, options: DecodingOptions, max_new_tokens: int
) -> PromptRecord:
    request = replace(request_of(prompt, setting, options), max_new_tokens=max_new_tokens)
    (result,) = decoder.decode([request])
    return replace(
        record_of(prompt, result), seconds_prefill=result.seconds_prefill, seconds_decode=result.seconds_decode
    )


def speed_prompts(prompts: Prompts, seed: int) -> Prompts:
    """Return the prompts to time, as evenly over their groups as possible, in the order of the prompts."""
    chosen = {
        context: {prompt.id for prompt in choose_evenly(some, SPEED_PROMPTS, seed)} for context, some in prompts.items()
    }
    return {context: [one for one in some if one.id in chosen[context]] for context, some in prompts.items()}


def joined(parts: Sequence[ArmRecords], prompts: Prompts) -> ArmRecords:
    """Return the records of all processes, each of which decoded some of the prompts, in the order of the prompts."""
    whole: ArmRecords = {arm: {} for arm in parts[0]}
    for arm, settings in parts[0].items():
        for setting in settings:
            by_prompt = {one.prompt_id: one for part in parts for one in part[arm][setting]}
            whole[arm][setting] = [by_prompt[prompt.id] for prompt in prompts[setting.context_tokens]]
    return whole


def request_of(prompt: TaskPrompt, setting: Setting, options: DecodingOptions) -> Request:
    """Return the request of a prompt at a setting."""
    sampling = setting.sampling(noise_seed(prompt.id, options.seed))
    return Request(prompt_ids=prompt.prompt_ids, max_new_tokens=options.max_new_tokens, sampling=sampling)


def record_of(prompt: TaskPrompt, result: GenerationResult) -> PromptRecord:
    """Return the record of a decoded prompt, without times."""
    return PromptRecord(
        prompt_id=prompt.id,
        group=prompt.group,
        task=prompt.task,
        prompt_tokens=len(prompt.prompt_ids),
        token_ids=tuple(result.token_ids),
        drafted=tuple(one.num_drafted for one in result.round_log),
        accepted=tuple(one.num_accepted for one in result.round_log),
    )
