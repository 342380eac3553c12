"""Teacher-forced figures on rows made by hand: four tokens, the hidden state of a row is its logits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from mtp_train.data.pack import collate, count_targets, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.train.packed_rows import AlignedRows
from mtp_train.train.teacher_forced import dense_sums
from summed_metrics import DenseMetrics, dense_metrics, metrics_of, ratios_of
from tiny import FAMILY_NAMES, VOCAB_SIZE, rows_on, tiny_head, tiny_trunk

A = [0.7, 0.1, 0.1, 0.1]
B = [0.1, 0.7, 0.1, 0.1]
C = [0.4, 0.3, 0.2, 0.1]
UNIFORM = [0.25] * 4


class LogitModel:
    """A trunk, and a head, whose states are logits already."""

    lm_head_VD = torch.eye(4)

    def project(self, *states: Any) -> Tensor:
        """Return the trunk's only argument, or the second of the head's: depth, state and the trunk's function."""
        return states[:2][-1]


def measure(*batches: AlignedRows) -> DenseMetrics:
    """Return the metrics of rows as they come out of trunk and head."""
    model: Any = LogitModel()
    return metrics_of(model, model, batches)


def rows(p: list[list[float]], q: list[list[list[float]]], valid: list[str], starts: str | None = None) -> AlignedRows:
    """Give p of each row, q and validity (x) of each depth and row, and where decoding can begin a round (x)."""
    valid_KN = torch.tensor([[letter == "x" for letter in line] for line in valid])
    starts_N = torch.ones(len(p), dtype=torch.bool) if starts is None else torch.tensor([one == "x" for one in starts])
    targets_N = torch.zeros(len(p), dtype=torch.long)
    return AlignedRows(torch.tensor(q).log(), torch.tensor(p).log(), targets_N, valid_KN, starts_N)


def test_figures_by_hand() -> None:
    metrics = measure(rows([A, B, C], [[A, A, A], [B, B, C]], ["xxx", ".xx"]))
    assert metrics.num_targets == [3, 2]
    assert metrics.agreement == pytest.approx([2 / 3, 1.0])  # C's largest is A's
    assert metrics.overlap == pytest.approx([(1.0 + 0.4 + 0.7) / 3, 1.0])
    assert metrics.target_entropy == pytest.approx(
        -sum(value * math.log(value) for row in (A, B, C) for value in row) / 3
    )


def test_sums_are_taken_over_batches_before_the_ratio() -> None:
    one = rows([A], [[A]], ["x"])
    three = rows([A, A, A], [[B, B, B]], ["xxx"])
    metrics = measure(one, three)
    assert metrics.num_targets == [4]
    assert metrics.agreement == [0.25]
    assert metrics.overlap == pytest.approx([(1 + 3 * 0.4) / 4])


def test_a_draft_counts_in_tau_only_where_those_before_it_are_accepted() -> None:
    # Depth 1 of starts 0, 1, 2 is at rows 1, 2, 3, depth 2 of starts 0, 1 at rows 2, 3. Start 1 misses at depth 1.
    p = [UNIFORM, A, A, A]
    found = measure(rows(p, [[A, A, B, A], [A, A, A, A]], [".xxx", "..xx"]))
    assert found.agreement == pytest.approx([2 / 3, 1.0])
    assert found.tau_greedy == pytest.approx(1 + 2 / 3 + 1 / 2)
    # A and B overlap by 0.4.
    assert found.tau_sampled == pytest.approx(1 + 2.4 / 3 + 1.4 / 2)
    both = measure(rows(p, [[A, B, A, A], [A, A, A, A]], [".xxx", "..xx"]))
    assert both.agreement == pytest.approx(found.agreement)
    # The miss is start 0's now: start 1 goes on, as far as there are targets.
    assert both.tau_greedy == pytest.approx(1 + 2 / 3 + 1 / 2)
    neither = measure(rows(p, [[A, B, B, A], [A, A, A, A]], [".xxx", "..xx"]))
    assert neither.tau_greedy == pytest.approx(1 + 1 / 3)


def test_rounds_inside_the_prompt_are_no_misses() -> None:
    """Tokens ``P P P P a b c``: four of prompt, three of response; the head is right everywhere.

    Rows 0 to 6 follow tokens P P P P a b c. Targets b and c are met by depth 1 from rows 3 and 4 (after the first
    response token, which prefill gives, is read) and c by depth 2 from row 3. Depth 1 from row 2 would draft a, depth
    2 from row 1 too, and depth 2 from row 2 would draft b: rounds that decoding never has.
    """
    valid = ["...xxx.", "...xxx."]  # targets a, b, c sit at rows 3, 4, 5, for depth 1 and depth 2 alike
    perfect = [[A] * 7, [A] * 7]
    found = measure(rows([A] * 7, perfect, valid, starts="...xxx."))
    assert found.num_targets == [3, 3]
    assert found.agreement == [1.0, 1.0]
    assert (found.tau_greedy, found.tau_sampled) == (3.0, pytest.approx(3.0))
    # A miss at row 4 costs depth 1 from row 3, and depth 2 from there with it; not a round from row 2.
    missed = [[A, A, A, A, B, A, A], [A] * 7]
    assert measure(rows([A] * 7, missed, valid, starts="...xxx.")).tau_greedy == 1 + 1 / 2 + 0 / 1


@pytest.mark.parametrize("prompt_length", [1, 2, 6])
def test_tau_of_a_short_answer_is_what_rounds_from_each_of_its_tokens_accept(prompt_length: int) -> None:
    """A head that is right everywhere commits depth + 1 tokens a round, however short answers are."""
    num_depths = 3
    answer = 4
    trunk = tiny_trunk("qwen3_5")
    length = prompt_length + answer
    document = Document(tuple(range(1, 1 + length)), tuple(i >= prompt_length for i in range(length)), "g", "d")
    batch = collate(pack_documents([document], 16, pack=True, seed=0, epoch=0))
    found = rows_on(trunk, tiny_head(trunk), batch, num_depths)
    right = found._replace(student_KND=found.teacher_ND.expand_as(found.student_KND).clone())
    head: Any = SharedOutput()
    sums = dense_sums(right, trunk, head)
    metrics = ratios_of(sums)
    # Rounds begin after the answer's tokens 1 to 3; depth 1, 2 and 3 have 3, 2 and 1 of them to meet.
    assert sums.reached_K.tolist() == [3.0, 2.0, 1.0]
    # The control: over all targets of the text, rounds inside the prompt would be misses.
    if prompt_length > num_depths:
        assert 1.0 + float((sums.chained_K / sums.targets_K).sum()) == 1.0 + (3 + 2 + 1) / 4
    assert metrics.tau_greedy == pytest.approx(1.0 + num_depths)
    assert metrics.tau_sampled == pytest.approx(1.0 + num_depths, abs=1e-4)


class SharedOutput:
    """A head that has no output matrix of its own."""

    def project(self, _depth: int, state: Tensor, shared: Any) -> Tensor:
        return shared(state)


def test_a_depth_without_targets_has_no_figures() -> None:
    metrics = measure(rows([A, A], [[A, A], [B, B]], ["xx", ".."]))
    assert metrics.num_targets == [2, 0]
    assert metrics.agreement == [1.0, None]
    assert metrics.overlap == [pytest.approx(1.0), None]
    nothing = measure(rows([A], [[A]], ["."]))
    assert (nothing.target_entropy, nothing.agreement) == (None, [None])


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_real_rows_are_those_that_training_counts(family_name: str) -> None:
    """The teacher's row is the trunk's own next prediction at the place that the depth predicts from."""
    trunk = tiny_trunk(family_name)
    documents = [
        Document(tuple(range(first, first + length)), (False, *[True] * (length - 1)), str(first), "g")
        for first, length in ((1, 7), (20, 4), (40, 2))
    ]
    sequences = pack_documents(documents, 16, pack=True, seed=0, epoch=0)
    batch = collate(sequences)
    metrics = dense_metrics(trunk, tiny_head(trunk), [batch], 3)
    counts = [count_targets(sequence, 3) for sequence in sequences]
    assert metrics.num_targets == [sum(column) for column in zip(*counts, strict=True)] == [7, 5, 3]
    assert all(value is not None and 0 < value < 1 for value in metrics.overlap)
    entropies = []
    for document in documents:
        tokens_1T = torch.from_numpy(document.input_ids)[None].long()
        log_p_TV = torch.log_softmax(trunk.logits(trunk.hidden(tokens_1T))[0], dim=-1)
        entropies += (-(log_p_TV.exp() * log_p_TV).sum(-1))[1:-1].tolist()
    assert len(entropies) == 7
    assert metrics.target_entropy == pytest.approx(sum(entropies) / 7, rel=1e-4)
    assert 0 < sum(entropies) / 7 < math.log(VOCAB_SIZE)
