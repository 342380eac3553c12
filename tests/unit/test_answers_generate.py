from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from mtp_inference import Request, Sampling
from mtp_train.answers.generate import Answering, batches_by_length, regenerate
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError

EOS = 0
PROMPTS = [Prompt(f"f#{number:02d}", f"g{number}", (number + 1,) * (1 + number % 3)) for number in range(20)]


class Speaker:
    """Answer ``[7, length, first token, EOS, 99]``; record the batches, and fail after a number of them."""

    def __init__(self, num_batches: int = 1000) -> None:
        self.batches: list[list[Request]] = []
        self.num_batches = num_batches

    def __call__(self, requests: list[Request]) -> list[Sequence[int]]:
        if len(self.batches) == self.num_batches:
            raise KeyboardInterrupt
        self.batches.append(requests)
        return [[7, len(one.prompt_ids), one.prompt_ids[0], EOS, 99] for one in requests]


def answer(
    store: RegeneratedStore,
    speaker: Speaker,
    prompts: list[Prompt] = PROMPTS,
    *,
    seq_len_tokens: int = 64,
    seed: int = 0,
) -> int:
    sampling = Sampling(seed=seed)
    answering = Answering(max_new_tokens=32, seq_len_tokens=seq_len_tokens, eos_ids={EOS}, sampling=sampling)
    return regenerate(prompts, store, speaker, answering, batch_size=1)


def rows(store: RegeneratedStore) -> list[RegeneratedRow]:
    return sorted(store, key=lambda row: row.id)


def test_batches_hold_prompts_of_like_length_whatever_the_order() -> None:
    batches = batches_by_length(PROMPTS, 4)
    lengths = [[len(prompt.prompt_ids) for prompt in batch] for batch in batches]
    assert lengths == [[3, 3, 3, 3], [3, 3, 2, 2], [2, 2, 2, 2], [2, 1, 1, 1], [1, 1, 1, 1]]
    assert sorted((prompt for batch in batches for prompt in batch), key=lambda prompt: prompt.id) == PROMPTS
    assert batches_by_length(PROMPTS[::-1], 4) == batches


@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_batches_do_not_depend_on_the_number_of_processes(tmp_path: Path, world: int) -> None:
    alone = Speaker()
    answer(RegeneratedStore(tmp_path / "alone"), alone)
    shared = [Speaker() for _ in range(world)]
    for rank, speaker in enumerate(shared):
        answer(RegeneratedStore(tmp_path / "shared", rank=rank, world=world), speaker)
    assert sorted((batch for speaker in shared for batch in speaker.batches), key=str) == sorted(alone.batches, key=str)
    assert rows(RegeneratedStore(tmp_path / "shared")) == rows(RegeneratedStore(tmp_path / "alone"))


def test_responses_end_with_their_first_end_of_text_and_are_unfinished_without(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path / "ended")
    endless = RegeneratedStore(tmp_path / "endless")
    assert answer(store, Speaker()) == 20
    assert [(r.response_ids, r.finished) for r in rows(store)[:2]] == [((7, 1, 1, EOS), True), ((7, 2, 2, EOS), True)]
    answering = Answering(max_new_tokens=3, seq_len_tokens=64, eos_ids={EOS})
    regenerate(PROMPTS[:1], endless, lambda requests: [[5, 5, 5] for _ in requests], answering, batch_size=1)
    assert [(r.response_ids, r.finished) for r in endless] == [((5, 5, 5), False)]


def test_no_response_goes_past_the_sequence(tmp_path: Path) -> None:
    speaker = Speaker()
    answer(RegeneratedStore(tmp_path), speaker, seq_len_tokens=20)
    limits = {one.max_new_tokens for batch in speaker.batches for one in batch}
    assert sorted(limits) == [17, 18, 19]


def test_every_prompt_has_noise_of_its_own_whatever_it_is_answered_with(tmp_path: Path) -> None:
    speaker = Speaker()
    answer(RegeneratedStore(tmp_path / "all"), speaker)
    seeds = [one.sampling.seed for batch in speaker.batches for one in batch]
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**31 for seed in seeds)
    answer(RegeneratedStore(tmp_path / "some"), Speaker(), PROMPTS[7:])
    stored = {row.id: row.seed for row in RegeneratedStore(tmp_path / "all")}
    assert set(stored.values()) == set(seeds)
    some = {row.id: row.seed for row in RegeneratedStore(tmp_path / "some")}
    assert some.items() < stored.items()
    answer(RegeneratedStore(tmp_path / "other"), Speaker(), seed=1)
    assert set(stored.values()).isdisjoint(row.seed for row in RegeneratedStore(tmp_path / "other"))


def test_a_killed_run_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    unbroken = Speaker()
    answer(RegeneratedStore(tmp_path / "unbroken"), unbroken)
    with pytest.raises(KeyboardInterrupt):
        answer(RegeneratedStore(tmp_path / "killed"), Speaker(num_batches=2))
    path = RegeneratedStore(tmp_path / "killed").path
    path.write_bytes(path.read_bytes()[:-5])
    resumed = Speaker()
    # The batch with the torn line is generated as a whole again, so that its rows come out as in an unbroken run.
    counts = answer(RegeneratedStore(tmp_path / "killed"), resumed)
    assert resumed.batches == unbroken.batches[1:]
    assert counts == 13
    assert rows(RegeneratedStore(tmp_path / "killed")) == rows(RegeneratedStore(tmp_path / "unbroken"))
    assert len(path.read_text().splitlines()) == 20


def test_a_run_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(RegeneratedStore(tmp_path, rank=1, world=2), Speaker(num_batches=1))
    speaker = Speaker()
    counts = answer(RegeneratedStore(tmp_path), speaker)
    assert counts == 16
    assert len(speaker.batches) == 4
    assert len(rows(RegeneratedStore(tmp_path))) == 20


def test_prompts_without_room_for_a_response_are_counted_or_refused(tmp_path: Path) -> None:
    counts = answer(RegeneratedStore(tmp_path), Speaker(), seq_len_tokens=18)
    assert counts == 14
    with pytest.raises(DataError, match=r"20 prompts, none of at most 0 tokens; expected prompts that leave room"):
        answer(RegeneratedStore(tmp_path / "none"), Speaker(), seq_len_tokens=16)
