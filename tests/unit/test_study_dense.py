"""Teacher-forced figures by target: equal to a run's where both are summed, and each prompt's own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from mtp_inference import HeadDrafting
from mtp_train.answers.store import answer_document
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Prompt
from mtp_train.evaluation.dense import DenseRows, dense_rows
from mtp_train.evaluation.prompt_records import PromptRecord
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from simulated_drafters import decoded
from summed_metrics import DenseMetrics, dense_metrics
from tiny import FAMILY_NAMES, VOCAB_SIZE, tiny_head, tiny_trunk

DEPTHS = 3
LENGTHS = ((7, 9), (2, 5), (12, 1), (4, 6))
"""Tokens of each prompt and of its output."""


def texts() -> tuple[list[Prompt], list[PromptRecord]]:
    rng = np.random.default_rng(0)
    prompts = []
    outputs = []
    for number, (length, new) in enumerate(LENGTHS):
        ids = tuple(rng.integers(0, VOCAB_SIZE, length).tolist())
        task = ("code", "prose")[number % 2]
        prompts.append(Prompt(id=f"p{number}", group="g", prompt_ids=ids, task=task))
        output = tuple(rng.integers(0, VOCAB_SIZE, new).tolist())
        outputs.append(replace(decoded([], f"p{number}", task), token_ids=output, prompt_tokens=length))
    return prompts, outputs


def model(family: str = "glm4_moe") -> tuple[Trunk, MtpHead]:
    trunk = tiny_trunk(family)
    return trunk, tiny_head(trunk)


def rows_of(family: str = "glm4_moe", temperature: float = 1.0) -> DenseRows:
    trunk, head = model(family)
    return dense_rows(trunk, HeadDrafting(head), *texts(), DEPTHS, temperature, 32)


def metrics_of(trunk: Trunk, head: MtpHead, seq_len_tokens: int = 32) -> DenseMetrics:
    prompts, outputs = texts()
    pairs = zip(prompts, outputs, strict=True)
    documents = [answer_document(prompt, one.token_ids, seq_len_tokens) for prompt, one in pairs]
    sequences = pack_documents(documents, seq_len_tokens, pack=True, seed=0, epoch=0)
    assert len(sequences) < len(documents)
    return dense_metrics(trunk, head, [collate(sequences)], DEPTHS)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_summed_they_are_the_figures_of_a_run(family: str) -> None:
    """Although those come from packed rows: prompts do not see each other in either."""
    rows = rows_of(family)
    metrics = metrics_of(*model(family))
    valid_KN = rows.valid_KN
    assert valid_KN.sum(axis=1).tolist() == metrics.num_targets
    assert np.bincount(rows.prompt_N).tolist() == [new for _, new in LENGTHS]
    assert [rows.agreed_KN[k, valid_KN[k]].mean() for k in range(DEPTHS)] == pytest.approx(metrics.agreement)
    assert [rows.overlap_KN[k, valid_KN[k]].mean() for k in range(DEPTHS)] == pytest.approx(metrics.overlap, rel=1e-4)
    assert rows.entropy_N[valid_KN[0]].mean() == pytest.approx(metrics.target_entropy, rel=1e-4)


def test_a_depth_has_no_target_before_the_prompt_is_long_enough() -> None:
    """Depth 3 starts three tokens before the token that its target follows; a prompt of two has no such place."""
    rows = rows_of()
    assert rows.valid_KN[:, rows.prompt_N == 1].tolist() == [[True] * 5, [False] + [True] * 4, [False] * 2 + [True] * 3]
    assert rows.valid_KN[:, rows.prompt_N == 0].all()


def test_p_is_the_trunks_at_the_temperature() -> None:
    trunk, _ = model()
    (prompt, *_), (output, *_) = texts()
    ids_1T = torch.tensor([prompt.prompt_ids + output.token_ids])
    logits_TV = trunk.logits(trunk.hidden(ids_1T))[0, len(prompt.prompt_ids) - 1 : -1]
    for temperature in (0.5, 1.0):
        p_TV = torch.softmax(logits_TV / temperature, dim=-1)
        entropy_T = -(p_TV * p_TV.log()).sum(-1)
        found = rows_of(temperature=temperature)
        assert found.entropy_N[found.prompt_N == 0] == pytest.approx(entropy_T.numpy(), rel=1e-4)
    warm = rows_of(temperature=1.0)
    cold = rows_of(temperature=0.5)
    greedy = rows_of(temperature=0.0)
    assert not np.allclose(warm.overlap_KN, cold.overlap_KN, atol=1e-2)
    assert (warm.agreed_KN == cold.agreed_KN).all()
    assert (warm.overlap_KN == greedy.overlap_KN).all()


def test_a_reduced_vocabulary_drafts_nothing_else() -> None:
    """With a single token q is 1 there, so the overlap is p of that token: it adds up to 1 over all tokens."""
    trunk, head = model()
    whole = rows_of()
    # As heads are stored with it.
    stored_R = torch.arange(VOCAB_SIZE, dtype=torch.int32)
    everything = dense_rows(trunk, HeadDrafting(head, stored_R), *texts(), DEPTHS, 1.0, 32)
    assert everything.overlap_KN == pytest.approx(whole.overlap_KN)
    single = [
        dense_rows(trunk, HeadDrafting(head, torch.tensor([token])), *texts(), 1, 1.0, 32)
        for token in range(VOCAB_SIZE)
    ]
    assert sum(one.overlap_KN for one in single) == pytest.approx(np.ones_like(single[0].overlap_KN), rel=1e-4)
    assert sum(one.agreed_KN.astype(int) for one in single).tolist() == np.ones_like(single[0].agreed_KN).tolist()


def test_texts_are_cut_and_others_left_out() -> None:
    trunk, head = model()
    prompts, outputs = texts()
    cut = dense_rows(trunk, HeadDrafting(head), prompts, outputs[:3], DEPTHS, 1.0, 12)
    assert cut.prompts == prompts[:3]
    assert np.bincount(cut.prompt_N, minlength=3).tolist() == [5, 5, 0]
    few = dense_rows(trunk, HeadDrafting(head), prompts, outputs, DEPTHS, 1.0, 32, 23)
    assert few.prompts == prompts[:2]
    whole = rows_of()
    assert cut.overlap_KN[:, :5] == pytest.approx(whole.overlap_KN[:, :5], rel=1e-4)
