from __future__ import annotations

import pytest

from mtp_train.data.endpoint import Arrival, Streamed
from mtp_train.evaluation.prompt_records import TaskPrompt
from mtp_train.evaluation.served.asking import Answered
from mtp_train.evaluation.served.measure import latencies, two_lengths


def answered(name: str, *arrivals: tuple[float, int | None], tokens: int) -> Answered:
    prompt = TaskPrompt(id=name, group=name, prompt_ids=(1, 2), task="math")
    streamed = Streamed(document={}, arrivals=tuple(Arrival(*one) for one in arrivals), seconds=10.0)
    return Answered(prompt=prompt, streamed=streamed, token_ids=(), tokens=tokens, counts=None)


def response(name: str, tokens: int, *, first_token: float, per_token: float) -> Answered:
    """Return a response whose first chunk has three tokens, which the server does not report."""
    return answered(name, (first_token, None), (first_token + per_token * (tokens - 3), None), tokens=tokens)


def test_decoding_speed_is_free_of_prefill_and_of_what_the_first_piece_held() -> None:
    speeds = {name: 0.015 + 0.005 * (number % 3) for number, name in enumerate("abcdefghi")}
    short = [response(name, 8, first_token=5.0, per_token=speed) for name, speed in speeds.items()]
    long = [response(name, 40, first_token=0.1, per_token=speed) for name, speed in speeds.items()]
    found = two_lengths(short, long)
    assert found is not None
    assert (found["prompts"], found["tokens"]) == (9, 288)
    assert found["ms_per_token"] == pytest.approx(20.0)
    assert found["tokens_per_second"] == pytest.approx(50.0)
    low, high = found["ms_per_token_ci95"]
    # Student's t of 8 degrees of freedom times the standard error of nine prompts: three of 15, of 20 and of 25 ms.
    half = 2.306 * (18.75 / 9) ** 0.5
    assert [low, high] == pytest.approx([20 - half, 20 + half], abs=1e-3)
    assert found["tokens_per_second_ci95"] == pytest.approx([1000 / high, 1000 / low])
    # The naive figure is off by the tokens of the first piece, and, prefill included, by far more.
    assert 1000 * sum(one.seconds_decode or 0 for one in long) / sum(one.tokens for one in long) < 19.0


def test_prompts_without_two_lengths_are_left_out() -> None:
    ended = [response("a", 5, first_token=1.0, per_token=0.01)]
    assert two_lengths(ended, ended) is None
    assert two_lengths(ended, [response("b", 40, first_token=1.0, per_token=0.01)]) is None
    assert two_lengths([answered("a", tokens=5)], [answered("a", tokens=40)]) is None
    one = two_lengths(ended, [response("a", 40, first_token=1.0, per_token=0.01)])
    assert one is not None
    assert one["ms_per_token_ci95"] is None


def test_latencies_count_tokens_not_pieces() -> None:
    rounds = answered("a", (0.5, 1), (0.7, 4), (0.9, 5), tokens=5)
    # The same rounds, their tokens in pieces of their own.
    apart = answered("b", (0.5, 1), (0.7, 2), (0.7, 3), (0.7, 4), (0.9, 5), tokens=5)
    for one in (rounds, apart):
        found = latencies([one])
        assert found["first_token_ms"]["p50"] == pytest.approx(500.0)
        assert found["per_token_ms"]["mean"] == pytest.approx(100.0)
    assert latencies([rounds])["between_pieces_ms"]["p99"] == pytest.approx(200.0)
    silent = latencies([response("a", 8, first_token=0.5, per_token=0.1)])
    assert silent["per_token_ms"] is None
    assert latencies([answered("a", tokens=3)]) == dict.fromkeys(found)
