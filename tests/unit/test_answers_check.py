"""Answers of a server are checked as they come: another model behind the same address is noticed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from byte_tokenizer import byte_tokenizer
from mtp_inference.sampling.distributions import Sampling, distribution_of
from mtp_train.answers import served as checked
from mtp_train.answers.endpoint import Endpoint
from mtp_train.answers.generate import Answering, missing_prompts
from mtp_train.answers.served import (
    AnswerFit,
    CheckedStore,
    JudgeFn,
    allowance,
    fit_of,
    probe,
    regenerate_served,
)
from mtp_train.answers.store import RegeneratedRow, RegeneratedStore
from mtp_train.data.tokenize import Prompt
from mtp_train.errors import CheckpointError, DataError
from mtp_train.trunk.load import Trunk
from openai_server import DECODING, Reply, ReplyFn, openai_server, served_by
from tiny import tiny_trunk

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
VOCAB_SIZE = 259
PROMPTS = [Prompt(f"f#{number:02d}", "g", (10 + number, 20, 30)) for number in range(18)]
GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SAMPLED = {"temperature": 0.4, "top_p": 0.95, "top_k": 0, "min_p": 0.0}
EVERY = 6


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked, "CHECK_EVERY", EVERY)
    monkeypatch.setattr(checked, "SAMPLE", 5)


@pytest.fixture(scope="module")
def trunk() -> Trunk:
    return tiny_trunk("llama", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def other() -> Trunk:
    return tiny_trunk("llama", seed=1, vocab_size=VOCAB_SIZE)


def judge_of(trunk: Trunk, sampling: dict[str, Any]) -> JudgeFn:
    distribution = distribution_of(Sampling(**sampling), torch.device("cpu"))

    def judge(read: Sequence[RegeneratedRow]) -> AnswerFit:
        with DECODING:
            return fit_of(
                trunk,
                [(row.prompt_ids, row.response_ids) for row in read],
                distribution,
                is_greedy=sampling["temperature"] == 0.0,
                eos_ids=[EOS],
            )

    return judge


@contextlib.contextmanager
def connected(reply: ReplyFn) -> Iterator[Endpoint]:
    with openai_server(reply) as served:
        endpoint = Endpoint(served.url, TOKENIZER, {EOS}, VOCAB_SIZE, wait=lambda seconds: None)
        endpoint.choose_model(None)
        yield endpoint
        endpoint.close()


def answer(
    directory: Path,
    trunk: Trunk,
    reply: ReplyFn,
    sampling: dict[str, Any],
    *,
    proves: bool = False,
    judge: JudgeFn | None = None,
) -> int:
    store = RegeneratedStore(directory)
    with connected(reply) as endpoint:
        watched = CheckedStore(store, judge or judge_of(trunk, sampling), endpoint.url)
        watched.check()
        if proves:
            probe(endpoint, trunk, PROMPTS[:1], seq_len_tokens=32)
        return regenerate_served(
            missing_prompts(PROMPTS, store, 64),
            watched,
            endpoint,
            sampling,
            Answering(max_new_tokens=32, seq_len_tokens=64, eos_ids={EOS}),
            lambda done, total: None,
        ).generated


def switching(first: ReplyFn, second: ReplyFn, after: int) -> ReplyFn:
    """Answer as one model, and after so many requests as another."""
    asked: list[None] = []

    def reply(payload: dict[str, Any]) -> Reply:
        asked.append(None)
        return (first if len(asked) <= after else second)(payload)

    return reply


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_server_that_switches_its_model_after_the_proof_is_noticed(
    sampling: dict[str, Any], trunk: Trunk, other: Trunk, tmp_path: Path
) -> None:
    own, others = served_by(trunk, [EOS]), served_by(other, [EOS])
    # One request is the proof's; then come two whole blocks.
    with pytest.raises(
        DataError,
        match=r"answers that are not the trunk's: over 5 of its last 6 .*mean probability of 0\.\d+; expected \d\.\d+ "
        r"within 0\.\d+\. These 6 are dropped, and 12 that were checked before are kept",
    ):
        answer(tmp_path, trunk, switching(own, others, 1 + 2 * EVERY), sampling, proves=True)
    assert len(RegeneratedStore(tmp_path).rows()) == 12
    assert answer(tmp_path, trunk, own, sampling) == 6, "the same command goes on from there"
    assert len(RegeneratedStore(tmp_path).rows()) == 18


def test_a_server_with_a_temperature_of_its_own_is_noticed(
    trunk: Trunk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checked, "CHECK_EVERY", 12)
    monkeypatch.setattr(checked, "SAMPLE", 12)
    own = served_by(trunk, [EOS])
    with pytest.raises(DataError, match="answers that are not the trunk's"):
        answer(tmp_path, trunk, lambda payload: own(payload | GREEDY), {**SAMPLED, "temperature": 0.6})


def test_what_a_kill_left_unchecked_is_checked_first(trunk: Trunk, other: Trunk, tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def dies(rows: Any) -> AnswerFit:
        raise Killed

    store = RegeneratedStore(tmp_path)
    with pytest.raises(Killed):
        answer(tmp_path, trunk, served_by(other, [EOS]), GREEDY, judge=dies)
    assert len(store.rows()) == EVERY, "a kill loses none"
    # With another number of processes the first one checks the file.
    again = RegeneratedStore(tmp_path, world=2)
    assert again.files_of_others() == [store.path]
    with pytest.raises(DataError, match="These 6 are dropped, and 0 that were checked"):
        CheckedStore(again, judge_of(trunk, GREEDY), "server", again.files_of_others())
    assert store.rows() == []
    assert answer(tmp_path, trunk, served_by(trunk, [EOS]), GREEDY) == 18


def test_which_of_several_tokens_ended_a_response_does_not_count(trunk: Trunk) -> None:
    def fit(ended_by: int, eos_ids: list[int]) -> AnswerFit:
        return fit_of(trunk, [((1, 2), (ended_by,))], certain, is_greedy=True, eos_ids=eos_ids)

    def certain(logits_TV: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(logits_TV).index_fill(1, torch.tensor([7]), 1.0)

    assert fit(7, [7, 9]).found == fit(9, [7, 9]).found == 1.0
    assert fit(9, [7]).found == 0.0


def test_logits_that_are_not_finite_are_the_trunks_fault() -> None:
    broken = tiny_trunk("llama", vocab_size=VOCAB_SIZE)
    with torch.no_grad():
        broken.layers[0].mlp.down_proj.weight[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match="trunk: its logits after 4 tokens are NaN"):
        judge_of(broken, GREEDY)([RegeneratedRow("a", "g", (1, 2), (3, 4), False, 0)])


@pytest.mark.parametrize("rate", [0.2, 0.01])
def test_the_false_alarm_rate_holds(rate: float) -> None:
    """Over 20,000 texts of 50 tokens from sharp and flat distributions; half the allowance is too little."""
    generator = torch.Generator().manual_seed(0)
    p_TV = (torch.randn(50, 20, generator=generator) * torch.linspace(0, 6, 50)[:, None]).softmax(-1).double()
    mean_T = p_TV.square().sum(-1)
    variance = float((p_TV.pow(3).sum(-1) - mean_T.square()).sum())
    said_TN = torch.multinomial(p_TV, 20_000, replacement=True, generator=generator)
    off_N = (p_TV.gather(1, said_TN) - mean_T[:, None]).sum(0).abs()
    assert float((off_N > allowance(variance, rate)).double().mean()) <= rate
    assert float((off_N > 0.4 * allowance(variance, rate)).double().mean()) > rate
