from __future__ import annotations

from mtp_train.data.pack import global_batches
from mtp_train.data.tokenize import Document
from mtp_train.data.trainer_rows import IGNORED, StepRows

DOCUMENTS = [
    Document([number] * (3 + number), [False] + [True] * (2 + number), f"g{number}", str(number)) for number in range(5)
]
STEPS, ROWS = 4, 2


def test_rows_stand_in_the_order_of_the_steps_whatever_is_asked_for_first() -> None:
    batches = global_batches(DOCUMENTS, seq_len_tokens=8, pack=False, sequences_per_step=ROWS, seed=3)
    rows = StepRows(batches, STEPS, ROWS)
    assert len(rows) == STEPS * ROWS
    expected = [int(sequence.input_ids_T[0]) for step in range(STEPS) for sequence in batches(step)]
    backwards = [int(rows[index]["input_ids"][0]) for index in reversed(range(len(rows)))]
    assert backwards[::-1] == expected
    # An epoch has them all once.
    assert sorted(expected[:5]) == list(range(5))


def test_a_row_is_its_document_alone_and_only_targets_are_learnt() -> None:
    batches = global_batches(DOCUMENTS, seq_len_tokens=8, pack=False, sequences_per_step=ROWS, seed=3)
    for row in (StepRows(batches, STEPS, ROWS)[index] for index in range(STEPS * ROWS)):
        number = int(row["input_ids"][0])
        length = 3 + number
        assert row["input_ids"].tolist() == [number] * length
        assert row["attention_mask"].tolist() == [1] * length
        assert row["labels"].tolist() == [IGNORED] + [number] * (length - 1)
