"""Measure one arm of a run on a server that serves it: the records that the built-in decoder would have made.

Prompts are sent one at a time, so that the server's counts of drafts belong to one prompt. The statistics are then the
ones of every run (:mod:`mtp_train.evaluation.statistics`). Records of servers differ in two things: a server reports
how many rounds accepted how many drafts, not in which order, and nothing compares its texts with plain decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from mtp_inference import Sampling
from mtp_train.errors import DataError
from mtp_train.evaluation.prompt_records import Decoded, Setting, TaskPrompt
from mtp_train.evaluation.served.asking import Answered, Asking, Block
from mtp_train.evaluation.served.measure import is_exact, require_own
from mtp_train.evaluation.served.metrics import NOTHING, SpecCounts
from mtp_train.evaluation.store import Store

START_PROMPTS, START_TOKENS, PROBE_TOKENS = 16, 8, 16
MIN_SAME_STARTS = 0.5
"""Least share of prompts whose greedy responses begin with the same tokens on two servers of one trunk. Rounding may
change a token at a near tie; another trunk changes nearly all beginnings."""


@dataclass(frozen=True)
class Starts:
    """The beginnings of a server's greedy responses, by prompt id, which show whether two servers have one trunk."""

    tokens: Mapping[str, tuple[int, ...]]

    def same_share(self, other: Starts) -> float:
        """Return the share of common prompts whose beginnings are equal; 1.0 without common prompts."""
        common = self.tokens.keys() & other.tokens.keys()
        same = sum(self.tokens[prompt] == other.tokens[prompt] for prompt in common)
        return same / len(common) if common else 1.0


def greedy_starts(asking: Asking, prompts: Sequence[TaskPrompt], depth: int) -> Starts:
    """Ask for the beginnings of greedy responses to some prompts, and check the server's drafts before any is kept.

    Raises:
        DataError: The server refuses a prompt, or does not draft ``depth`` tokens a round.
    """
    records = []
    for prompt in prompts[:START_PROMPTS]:
        block = asking.block([prompt], Sampling(), PROBE_TOKENS, _nothing)
        records.append(served_record(asking, block, prompt, depth))
    require_depth(asking.endpoint.url, records, depth)
    return Starts({one.prompt_id: one.token_ids[:START_TOKENS] for one in records})


def measure_arm(
    asking: Asking,
    arm: str,
    prompts: Sequence[TaskPrompt],
    settings: Sequence[Setting],
    max_new_tokens: int,
    store: Store,
    on_prompt: Callable[[], None],
) -> dict[Setting, list[Decoded]]:
    """Return the records of an arm at its settings. Those in the store are not asked for again; new ones are added.

    Args:
        asking: The server of the arm, with one request at a time.
        arm: Name of the arm in the store.
        prompts: The prompts.
        settings: The arm's own settings: with drafts, or plain ones of a server without drafts.
        max_new_tokens: Limit of every response.
        store: Holds the records of an interrupted run.
        on_prompt: Called for each prompt at each setting.

    Raises:
        DataError: The server refuses a prompt, does not report its drafts, drafts more or fewer than the setting's
            depth, serves other clients, or fails for good.
    """
    found: dict[Setting, list[Decoded]] = {}
    for setting in settings:
        stored = store.read(arm, setting)
        sampling = Sampling(temperature=setting.temperature, top_p=setting.top_p, top_k=setting.top_k)
        for prompt in prompts:
            if prompt.id not in stored:
                block = asking.block([prompt], sampling, max_new_tokens, _nothing)
                stored[prompt.id] = served_record(asking, block, prompt, setting.depth)
                store.add(arm, setting, [stored[prompt.id]])
            on_prompt()
        found[setting] = [stored[prompt.id] for prompt in prompts]
    return found


def _nothing() -> None:
    """Serve as a callback where nothing is shown."""


def _answered(asking: Asking, block: Block) -> Answered:
    if block.failed:
        failed = block.failed[0]
        raise DataError(
            f"gate.endpoint: {asking.endpoint.url} refuses prompt {failed.prompt.id} ({failed.reason}); expected a "
            "response to every held-out prompt. Check the server's log and its context length; the same command "
            "resumes from here."
        )
    return block.answered[0]


def served_record(asking: Asking, block: Block, prompt: TaskPrompt, depth: int) -> Decoded:
    """Return the record of a response.

    Args:
        asking: The server, for messages.
        block: The response, and the increase of the server's counters.
        prompt: Its prompt.
        depth: Drafts per round; 0 for a server without drafts.

    Raises:
        DataError: See :func:`measure_arm`.
    """
    answered = _answered(asking, block)
    require_own(asking, [block], prompt.task)
    drafted, accepted = rounds_of(_counts(asking, block, depth), answered.tokens, depth)
    prefill = answered.seconds_first or 0.0
    return Decoded(
        prompt_id=prompt.id,
        group=prompt.group,
        task=prompt.task,
        prompt_tokens=len(prompt.prompt_ids),
        token_ids=answered.token_ids,
        drafted=drafted,
        accepted=accepted,
        seconds_prefill=prefill,
        seconds_decode=max(answered.streamed.seconds - prefill, 0.0),
        same_as_plain=None,
    )


def _counts(asking: Asking, block: Block, depth: int) -> SpecCounts:
    """Return the draft counts of one response: its own, else the increase of the server's counters."""
    (answered,) = block.answered
    counts = answered.counts if is_exact(answered) else block.gained.drafts if block.gained is not None else None
    if counts is None:
        if answered.tokens <= 1 or not depth:
            return NOTHING
        raise DataError(
            f"gate.endpoint: {asking.endpoint.url} does not report the rounds of a response; expected a server that "
            "drafts, and its counts of drafts. Start it with the printed command; llama-server needs --metrics."
        )
    if counts.rounds and not depth:
        raise DataError(
            f"gate.endpoint.baseline: {asking.endpoint.url} drafts; expected a server without drafts, for "
            "gate.baseline: none. Start it with the printed command."
        )
    if counts.accepted_tokens and counts.accepted_per_pos is None:
        raise DataError(
            f"gate.endpoint: {asking.endpoint.url} does not report at which positions drafts were accepted; expected "
            "a histogram or a counter for each position. Use a newer release of the server."
        )
    if counts.draft_tokens > counts.rounds * depth:
        _refuse_depth(asking.endpoint.url, -(-counts.draft_tokens // counts.rounds), depth)
    return counts


def rounds_of(counts: SpecCounts, tokens: int, depth: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return drafted and accepted tokens of each round, those that accepted most first.

    A step without drafts is a round that drafted and accepted nothing, as in the built-in decoder; servers leave it out
    of their counts. Such steps are the tokens that prefill and the counted rounds do not explain.

    Args:
        counts: The counts of one response.
        tokens: Its number of new tokens.
        depth: Drafts per round.
    """
    reached = (counts.rounds, *(counts.accepted_per_pos or ()), 0)
    exactly = [more - fewer for more, fewer in pairwise(reached)]
    accepted = [number for number in range(len(exactly) - 1, -1, -1) for _ in range(exactly[number])]
    rest = (0,) * max(0, tokens - 1 - counts.rounds - counts.accepted_tokens)
    return (*_spread(counts.draft_tokens, accepted, depth), *rest), (*accepted, *rest)


def _spread(draft_tokens: int, accepted: Sequence[int], depth: int) -> list[int]:
    """Return drafted tokens of each round: as even as the accepted ones allow, at most ``depth``."""
    drafted, left = list(accepted), draft_tokens - sum(accepted)
    for level in range(1, depth + 1):
        for number in reversed(range(len(drafted))):
            if left and drafted[number] < level:
                drafted[number] += 1
                left -= 1
    return drafted


def require_depth(url: str, records: Sequence[Decoded], depth: int) -> None:
    """Check that a server drafted as many tokens a round as the settings say. Near the end of a text it drafts fewer.

    Raises:
        DataError: It drafted more or fewer.
    """
    found = max((number for one in records for number in one.drafted), default=0)
    if found != depth and any(len(one.token_ids) > 1 for one in records):
        _refuse_depth(url, found, depth)


def _refuse_depth(url: str, found: int, depth: int) -> None:
    raise DataError(
        f"gate.endpoint: {url} drafts {found} tokens a round; expected {depth} (evaluate.depth, or "
        "head.num_depths). Start it with the printed command."
    )
