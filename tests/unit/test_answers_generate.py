from __future__ import annotations

from pathlib import Path

import pytest

from mtp_train.answers.generate import Answering, Question, batches_by_length, regenerate
from mtp_train.answers.store import RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import DataError

EOS = 0
PROMPTS = [Prompt(f"f#{number:02d}", f"g{number}", (number + 1,) * (1 + number % 3)) for number in range(20)]


class Speaker:
    """Answer ``[7, length, first token, EOS, 99]``; record the batches, and fail after a number of them."""

    def __init__(self, num_batches: int = 1000) -> None:
        self.batches: list[list[Question]] = []
        self.num_batches = num_batches

    def __call__(self, questions: list[Question]) -> list[list[int]]:
        if len(self.batches) == self.num_batches:
            raise KeyboardInterrupt
        self.batches.append(questions)
        return [[7, len(question.prompt_ids), question.prompt_ids[0], EOS, 99] for question in questions]


def answer(
    store: RegeneratedStore,
    speaker: Speaker,
    prompts: list[Prompt] = PROMPTS,
    *,
    seq_len_tokens: int = 64,
    seed: int = 0,
) -> int:
    answering = Answering(max_new_tokens=32, seq_len_tokens=seq_len_tokens, eos_ids={EOS}, seed=seed)
    return regenerate(prompts, store, speaker, answering, batch_size=1)


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
    assert sorted(batch for speaker in shared for batch in speaker.batches) == sorted(alone.batches)
    assert RegeneratedStore(tmp_path / "shared").rows() == RegeneratedStore(tmp_path / "alone").rows()


def test_responses_end_with_their_first_end_of_text(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    counts = answer(store, Speaker())
    assert counts == 20
    assert [(r.response_ids, r.finished) for r in store.rows()[:2]] == [((7, 1, 1, EOS), True), ((7, 2, 2, EOS), True)]


def test_a_response_without_an_end_is_unfinished(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    regenerate(
        PROMPTS[:1],
        store,
        lambda questions: [[5] * question.max_new_tokens for question in questions],
        Answering(max_new_tokens=3, seq_len_tokens=64, eos_ids={EOS}),
        batch_size=1,
    )
    assert store.rows()[0].response_ids == (5, 5, 5)
    assert not store.rows()[0].finished


def test_no_response_goes_past_the_sequence(tmp_path: Path) -> None:
    speaker = Speaker()
    answer(RegeneratedStore(tmp_path), speaker, seq_len_tokens=20)
    limits = {question.max_new_tokens for batch in speaker.batches for question in batch}
    assert sorted(limits) == [17, 18, 19]


def test_every_prompt_has_noise_of_its_own_whatever_it_is_answered_with(tmp_path: Path) -> None:
    speaker = Speaker()
    answer(RegeneratedStore(tmp_path / "all"), speaker)
    seeds = [question.seed for batch in speaker.batches for question in batch]
    assert len(set(seeds)) == 20
    assert all(0 <= seed < 2**31 for seed in seeds)
    answer(RegeneratedStore(tmp_path / "some"), Speaker(), PROMPTS[7:])
    rows = {row.id: row.seed for row in RegeneratedStore(tmp_path / "all").rows()}
    assert set(rows.values()) == set(seeds)
    some = {row.id: row.seed for row in RegeneratedStore(tmp_path / "some").rows()}
    assert some.items() < rows.items()
    answer(RegeneratedStore(tmp_path / "other"), Speaker(), seed=1)
    assert set(rows.values()).isdisjoint(row.seed for row in RegeneratedStore(tmp_path / "other").rows())


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
    assert RegeneratedStore(tmp_path / "killed").rows() == RegeneratedStore(tmp_path / "unbroken").rows()
    assert len(path.read_text().splitlines()) == 20


def test_a_run_resumes_with_another_number_of_processes(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        answer(RegeneratedStore(tmp_path, rank=1, world=2), Speaker(num_batches=1))
    speaker = Speaker()
    counts = answer(RegeneratedStore(tmp_path), speaker)
    assert counts == 16
    assert len(speaker.batches) == 4
    assert len(RegeneratedStore(tmp_path).rows()) == 20


def test_prompts_without_room_for_a_response_are_counted_or_refused(tmp_path: Path) -> None:
    counts = answer(RegeneratedStore(tmp_path), Speaker(), seq_len_tokens=18)
    assert counts == 14
    with pytest.raises(DataError, match=r"20 prompts, none of at most 0 tokens; expected prompts that leave room"):
        answer(RegeneratedStore(tmp_path / "none"), Speaker(), seq_len_tokens=16)


def test_responses_to_other_prompts_are_not_reused(tmp_path: Path) -> None:
    store = RegeneratedStore(tmp_path)
    answer(store, Speaker())
    changed = [Prompt(PROMPTS[0].id, PROMPTS[0].group, (9, 9)), *PROMPTS[1:]]
    with pytest.raises(DataError, match="the stored response of f#00 answers another prompt; expected"):
        answer(store, Speaker(), changed)
