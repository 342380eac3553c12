"""Generate responses to prompts with the trunk, in batches; responses stored before a kill are kept."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from mtp_inference.requests import Request
from mtp_inference.sampling.distributions import Sampling
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore
from mtp_train.data.groups import stable_share
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError

RESPONSE_ROOM_TOKENS = 16
"""Least room for a response: prompts that leave less in a sequence are skipped."""
PROMPTS_PER_ROW = 4
"""Prompts of a batch per row of the decoder: a row whose response ends early takes the next prompt."""

MAX_SEED = 2**31
"""Upper bound of seeds; every server accepts seeds below it."""


GenerateFn = Callable[[list[Request]], list[Sequence[int]]]
"""From requests to responses, each including its end-of-text token."""


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How prompts are answered."""

    max_new_tokens: int
    seq_len_tokens: int
    """Limit of prompt and response together."""
    eos_ids: Collection[int] = ()
    sampling: Sampling = field(default_factory=Sampling)
    """With the run's seed; with the prompt's id it gives the seed of a response."""

    def request(self, prompt: Prompt) -> Request:
        """Return the request of a prompt, limited by the room that it leaves in a sequence."""
        return Request(
            prompt_ids=prompt.prompt_ids,
            max_new_tokens=min(self.max_new_tokens, self.seq_len_tokens - len(prompt.prompt_ids)),
            sampling=replace(self.sampling, seed=noise_seed(prompt.id, self.sampling.seed)),
        )

    def row(self, prompt: Prompt, response_ids: Sequence[int]) -> RegeneratedRow:
        """Return the row to store for a response, cut after its first end-of-text token."""
        ends = [index for index, token in enumerate(response_ids) if token in self.eos_ids]
        kept = tuple(int(token) for token in (response_ids[: ends[0] + 1] if ends else response_ids))
        return RegeneratedRow(
            prompt.id,
            prompt.group,
            prompt.prompt_ids,
            kept,
            finished=bool(ends),
            seed=noise_seed(prompt.id, self.sampling.seed),
        )


def noise_seed(prompt_id: str, seed: int) -> int:
    """Return the seed of a prompt's sampling noise, derived from its id and the run's seed."""
    return int(stable_share(f"noise of {prompt_id}", seed) * MAX_SEED)


def regenerate(
    prompts: Sequence[Prompt],
    store: RegeneratedStore,
    generate_fn: GenerateFn,
    answering: Answering,
    *,
    batch_size: int,
    on_batch: Callable[[int, int, int, int], object] = lambda done, total, answered, tokens: None,
) -> int:
    """Generate responses to prompts with the trunk and store them; prompts with a stored response are skipped.

    The batches do not depend on the number of processes or on the stored responses, because in bf16 a response may
    depend on the other rows of its batch. A process takes every ``store.world``-th batch.

    Args:
        prompts: The prompts of all processes, in any order.
        batch_size: Prompts that are decoded together; a batch has ``PROMPTS_PER_ROW`` times as many.
        on_batch: Called with the number of prompts done and in all, of this process, and with the number of those that
            were answered now and of the tokens of their responses.

    Returns:
        The number of prompts that this process answered now.
    """
    fitting = fitting_prompts(prompts, answering.seq_len_tokens)
    stored = {row.id for row in store}
    own_batches = batches_by_length(fitting, PROMPTS_PER_ROW * batch_size)[store.rank :: store.world]
    total, done, generated, tokens = sum(map(len, own_batches)), 0, 0, 0
    for batch in own_batches:
        missing = [prompt for prompt in batch if prompt.id not in stored]
        if missing:
            responses = generate_fn([answering.request(prompt) for prompt in batch])
            rows = [answering.row(prompt, ids) for prompt, ids in zip(batch, responses, strict=True)]
            new = [row for row in rows if row.id not in stored]
            store.append(new)
            generated += len(new)
            tokens += sum(len(row.response_ids) for row in new)
        done += len(batch)
        on_batch(done, total, generated, tokens)
    return generated


def fitting_prompts(prompts: Sequence[Prompt], seq_len_tokens: int) -> list[Prompt]:
    """Return the prompts that leave room for a response.

    Raises:
        DataError: No prompt does.
    """
    fitting = [prompt for prompt in prompts if len(prompt.prompt_ids) + RESPONSE_ROOM_TOKENS <= seq_len_tokens]
    if not fitting:
        raise DataError(
            f"data.regenerate: {len(prompts)} prompts, none of at most {seq_len_tokens - RESPONSE_ROOM_TOKENS} tokens; "
            "expected prompts that leave room for a response. Raise data.seq_len_tokens, or use shorter prompts."
        )
    return fitting


def missing_prompts(prompts: Sequence[Prompt], store: RegeneratedStore, seq_len_tokens: int) -> list[Prompt]:
    """Return the prompts of a process that have no response yet: every ``store.world``-th, from ``store.rank``."""
    fitting = sorted(fitting_prompts(prompts, seq_len_tokens), key=lambda prompt: prompt.id)
    stored = {row.id for row in store}
    return [prompt for prompt in fitting[store.rank :: store.world] if prompt.id not in stored]


def batches_by_length(prompts: Sequence[Prompt], batch_size: int) -> list[list[Prompt]]:
    """Divide prompts into batches of similar length, the longest first, so that a lack of memory shows at once."""
    ordered = sorted(prompts, key=lambda prompt: (-len(prompt.prompt_ids), prompt.id))
    return [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
