from __future__ import annotations

import numpy as np
import pytest

from mtp_train.data import pack as pack_module
from mtp_train.data.pack import PackedSequence, count_targets, full_batches, global_batches, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.errors import DataError


def document(name: str, *token_ids: int, mask: str = "") -> Document:
    wanted = tuple(letter == "x" for letter in mask) if mask else (True,) * len(token_ids)
    return Document(token_ids, wanted, name, name)


def of_lengths(*lengths: int) -> list[Document]:
    """Return documents that can be told apart: the tokens of document i are all i + 1."""
    return [document(str(index), *[index + 1] * length) for index, length in enumerate(lengths)]


def contents(sequences: list[PackedSequence]) -> list[list[int]]:
    return [sequence.input_ids_T.tolist() for sequence in sequences]


def row(document_T: list[int], mask: str) -> PackedSequence:
    num_tokens = len(document_T)
    zeros_T = np.zeros(num_tokens, dtype=np.int64)
    return PackedSequence(zeros_T, zeros_T, np.array(document_T), np.array([letter == "x" for letter in mask]), ())


def test_a_packed_row_is_the_one_written_by_hand() -> None:
    documents = [document("a", 11, 12, 13, mask=".xx"), document("b", 21, 22, mask="x.")]
    (sequence,) = pack_documents(documents, 7, pack=True, seed=0, epoch=0)
    order = sequence.input_ids_T[0]
    expected = {
        11: ([11, 12, 13, 21, 22, 0, 0], [0, 1, 2, 0, 1, 0, 0], [0, 0, 0, 1, 1, -1, -1], ".xxx..."),
        21: ([21, 22, 11, 12, 13, 0, 0], [0, 1, 0, 1, 2, 0, 0], [0, 0, 1, 1, 1, -1, -1], "x..xx.."),
    }[int(order)]
    assert sequence.input_ids_T.tolist() == expected[0]
    assert sequence.positions_T.tolist() == expected[1]
    assert sequence.document_T.tolist() == expected[2]
    assert sequence.loss_mask_T.tolist() == [letter == "x" for letter in expected[3]]


def test_a_document_goes_where_it_leaves_the_least_room(monkeypatch: pytest.MonkeyPatch) -> None:
    class InOrder:
        def permutation(self, number: int) -> np.ndarray:
            return np.arange(number)

    monkeypatch.setattr(pack_module, "_generator", lambda seed, epoch: InOrder())
    documents = of_lengths(1, 3, 2, 1, 5)
    # Longest first: 5, then 3 and 2 together; the first 1 joins the sequence of 5, the last 1 the sequence of 3 and 2.
    rows = contents(pack_documents(documents, 6, pack=True, seed=0, epoch=0))
    assert rows == [[5, 5, 5, 5, 5, 1], [2, 2, 2, 3, 3, 4]]
    # Documents of another pool are not waited for.
    monkeypatch.setattr(pack_module, "POOLED_DOCUMENTS", 2)
    rows = contents(pack_documents(documents, 6, pack=True, seed=0, epoch=0))
    assert rows == [[2, 2, 2, 1, 0, 0], [3, 3, 4, 0, 0, 0], [5, 5, 5, 5, 5, 0]]


def test_little_of_a_sequence_stays_empty() -> None:
    lengths = np.clip(np.random.default_rng(0).lognormal(4.0, 0.7, 6000), 4, 256).astype(int)
    documents = of_lengths(*lengths.tolist())

    def used(epoch: int) -> tuple[float, list[PackedSequence]]:
        sequences = pack_documents(documents, 256, pack=True, seed=0, epoch=epoch)
        return sum(lengths) / (256 * len(sequences)), sequences

    share, sequences = used(0)
    assert share > 0.99
    # Neither the order of the sequences nor the company of a document goes by length or repeats.
    longest = [int(sequence.positions_T.max()) for sequence in sequences]
    assert abs(np.corrcoef(longest, np.arange(len(longest)))[0, 1]) < 0.1
    together = [{frozenset(row) for row in contents(used(epoch)[1])} for epoch in (0, 1)]
    assert len(together[0] & together[1]) < len(together[0]) / 4


def test_no_document_is_split_or_lost() -> None:
    documents = of_lengths(*[1 + (7 * index) % 9 for index in range(60)])
    sequences = pack_documents(documents, 10, pack=True, seed=3, epoch=2)
    found = []
    for sequence in sequences:
        for number in range(sequence.document_T.max() + 1):
            found.append(tuple(sequence.input_ids_T[sequence.document_T == number].tolist()))
    assert sorted(found) == sorted(tuple(document.input_ids.tolist()) for document in documents)
    assert len(sequences) < 40


def test_without_packing_every_document_has_its_own_sequence() -> None:
    sequences = pack_documents(of_lengths(2, 1, 3), 4, pack=False, seed=0, epoch=0)
    assert sorted(contents(sequences)) == [[1, 1, 0, 0], [2, 0, 0, 0], [3, 3, 3, 0]]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    documents = of_lengths(*range(1, 9))

    def rows(seed: int, epoch: int) -> list[list[int]]:
        return contents(pack_documents(documents, 8, pack=False, seed=seed, epoch=epoch))

    assert rows(0, 0) == rows(0, 0)
    assert rows(0, 0) != rows(0, 1)
    assert rows(0, 0) != rows(1, 0)
    assert sorted(rows(0, 0)) == sorted(rows(-5, 7))


@pytest.mark.parametrize(
    ("document_T", "mask", "expected"),
    [
        # depth 1 of rows 0..2 predicts tokens 2..4, depth 2 of rows 0, 1 tokens 3, 4, depth 3 of row 0 token 4
        ([0, 0, 0, 0, 0], "xxxxx", (3, 2, 1)),
        ([0, 0, 0, 0, 0], "...x.", (1, 1, 0)),
        ([0, 0, 0, 0, 0], "xx...", (0, 0, 0)),
        # two documents of three tokens: one target each, at depth 1
        ([0, 0, 0, 1, 1, 1], "xxxxxx", (2, 0, 0)),
        ([0, 0, 0, 1, 1, 1], "xxx...", (1, 0, 0)),
        ([0, 0, 0, 0, -1, -1], "xxxxxx", (2, 1, 0)),
    ],
)
def test_targets_are_counted_as_by_hand(document_T: list[int], mask: str, expected: tuple[int, ...]) -> None:
    assert count_targets(row(document_T, mask), 3) == expected


def test_batches_are_the_epochs_in_a_row_wherever_a_run_resumes() -> None:
    documents = of_lengths(5, 4, 3, 3, 2, 2, 1)
    batch, resumed = (
        global_batches(documents, seq_len_tokens=6, pack=True, sequences_per_step=3, seed=1) for _ in range(2)
    )
    stream = [row for step in range(8) for row in contents(batch(step))]
    epochs = [
        row for epoch in range(9) for row in contents(pack_documents(documents, 6, pack=True, seed=1, epoch=epoch))
    ]
    assert stream == epochs[:24]
    assert [contents(resumed(step)) for step in (7, 1, 4)] == [epochs[3 * step : 3 * step + 3] for step in (7, 1, 4)]
    assert len(epochs) > 24


def test_an_empty_text_is_refused() -> None:
    with pytest.raises(DataError, match="data: no document; expected at least one to train on"):
        global_batches([], seq_len_tokens=4, pack=True, sequences_per_step=1, seed=0)


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_the_last_of_full_batches_is_filled_up_with_what_counts_nowhere(size: int) -> None:
    sequences = pack_documents(of_lengths(2, 3, 1, 4, 2), 4, pack=False, seed=0, epoch=0)
    batches = full_batches(sequences, size)
    assert [len(batch) for batch in batches] == [size] * -(-5 // size)
    rows = [sequence for batch in batches for sequence in batch]
    assert contents(rows[:5]) == contents(sequences)
    assert [count_targets(one, 2) for one in rows[:5]] == [count_targets(one, 2) for one in sequences]
    assert [count_targets(one, 2) for one in rows[5:]] == [(0, 0)] * (len(rows) - 5)
    assert full_batches([], size) == []
