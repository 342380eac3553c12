"""Hidden states from a server: every reply is the states of the tokens that were sent, or one message."""

from __future__ import annotations

import fcntl
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from byte_tokenizer import byte_tokenizer
from mtp_train.answers.endpoint import Endpoint
from mtp_train.answers.states import StatesServer, prove
from mtp_train.errors import DataError
from openai_server import Reply, Served, openai_server
from states_engine import Edit, Engine

TOKENIZER = byte_tokenizer()
EOS = int(TOKENIZER.eos_token_id)
LAYERS, WIDTH, VOCAB_SIZE = [2, 4], 8, 259
TEXTS = [[5, 6, 7], [8], [9, 10]]
COMMAND = "vllm serve the-trunk"
STATES_VLD = torch.randn(VOCAB_SIZE, len(LAYERS), WIDTH, generator=torch.Generator().manual_seed(0))
LM_HEAD_VD = torch.randn(VOCAB_SIZE, WIDTH, generator=torch.Generator().manual_seed(1))
ANSWER = [40, 41, EOS]


def top_of(token: int) -> int:
    return int((LM_HEAD_VD @ STATES_VLD[token, -1]).argmax())


Connect = Callable[..., tuple[StatesServer, Served]]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path, lambda token_ids: (STATES_VLD[token_ids], [*map(top_of, token_ids)]), ANSWER)


@pytest.fixture
def connect(engine: Engine) -> Iterator[Connect]:
    """Start the engine's server and open it; waiting is not done."""
    with ExitStack() as stack:

        def opened(reply: Callable[[dict[str, Any]], Reply] = engine, **settings: Any) -> tuple[StatesServer, Served]:
            served = stack.enter_context(openai_server(reply, owner="vllm", shows={"/version": lambda: "0.32.0"}))
            endpoint = Endpoint(served.url, TOKENIZER, {EOS}, VOCAB_SIZE, **settings)
            stack.callback(endpoint.close)
            endpoint.choose_model(None)
            server = StatesServer(endpoint, LAYERS, WIDTH, command=COMMAND)
            server.wait = endpoint.wait = lambda seconds: None
            return server, served

        yield opened


def test_states_are_those_of_the_tokens_sent_and_leave_no_file(connect: Connect, engine: Engine) -> None:
    server, served = connect(concurrency=2)
    found = dict(server.states(TEXTS))
    assert sorted(found) == [0, 1, 2]
    for number, text in enumerate(TEXTS):
        assert torch.equal(found[number], STATES_VLD[text])
    assert sorted(payload["prompt"] for payload in served.payloads) == TEXTS
    assert all(payload["max_tokens"] == 1 for payload in served.payloads)
    assert not list(engine.directory.iterdir())


def test_no_text_is_sent_further_ahead_than_the_concurrency(connect: Connect) -> None:
    server, _ = connect(concurrency=2)
    sent = itertools.count()
    arriving = server.states([next(sent) % 200 + 1] for _ in range(9))
    for taken in range(1, 9):
        next(arriving)
        assert next(sent) <= taken + 1 + taken
    assert len(list(arriving)) == 1


def without(name: str) -> Edit:
    return lambda document: {key: value for key, value in document.items() if key != name}


def at(position: int, value: float) -> Edit:
    return lambda states: states.index_fill(0, torch.tensor(position), value)


@pytest.mark.parametrize(
    ("part", "edit", "message"),
    [
        ("tensors", lambda file: file | {"token_ids": file["token_ids"] + 1}, r"of 3 other tokens; expected the 3"),
        ("tensors", lambda file: file | {"token_ids": file["token_ids"][1:]}, r"of 2 other tokens; expected the 3"),
        ("states", lambda states: states[1:].clone(), r"returns 2 states; expected 3: .*--no-enable-prefix-caching"),
        ("states", at(1, float("nan")), r"NaN, infinite or 0 at positions \[1\] of 3; expected finite"),
        ("states", at(2, float("inf")), r"NaN, infinite or 0 at positions \[2\] of 3"),
        ("states", at(0, 0.0), r"NaN, infinite or 0 at positions \[0\] of 3"),
        ("states", lambda states: states[..., 1:].clone(), r"states of \[2, 7\] in torch.float32; expected \[2, 8\]"),
        ("states", lambda states: states[:, 1:].clone(), r"states of \[1, 8\] in .*; expected \[2, 8\]"),
        ("reply", without("kv_transfer_params"), r"answers without states; expected kv_transfer_params\.hidden"),
    ],
    ids=["tokens", "cut", "prefix-caching", "nan", "inf", "unwritten", "width", "layers", "no-states"],
)
def test_states_of_something_else_are_refused(
    connect: Connect, engine: Engine, part: str, edit: Edit, message: str
) -> None:
    setattr(engine, part, edit)
    server, served = connect()
    with pytest.raises(DataError, match=rf"{served.url}: .*{message}.*Start it as: {COMMAND}"):
        list(server.states(TEXTS[:1]))


def test_all_states_are_of_the_dtype_of_the_first(connect: Connect, engine: Engine) -> None:
    server, _ = connect()
    list(server.states(TEXTS))
    engine.states = torch.Tensor.bfloat16
    with pytest.raises(DataError, match=r"in torch.bfloat16; expected .* in torch.float32"):
        list(server.states(TEXTS))


def test_a_directory_that_is_not_here_is_not_waited_for(connect: Connect, engine: Engine) -> None:
    engine.reply = lambda document: document | {"kv_transfer_params": {"hidden_states_path": "/nowhere/at/all.x"}}
    server, _ = connect()
    server.wait = lambda seconds: pytest.fail("waits")
    with pytest.raises(DataError, match=r"writes to /nowhere/at, which is no directory here; expected one that both"):
        list(server.states(TEXTS))


def test_a_file_that_stays_away_is_asked_for_again_and_waited_for_visibly(connect: Connect, engine: Engine) -> None:
    engine.write = lambda tensors, path: None
    server, served = connect()
    waits = list[float]()
    reasons = list[str]()
    server.wait = waits.append
    server.endpoint.on_wait = reasons.append
    with pytest.raises(DataError, match=r"has not written .*1\.safetensors; expected it within a minute"):
        list(server.states(TEXTS[:1]))
    assert len(served.payloads) == 2
    assert 120 < sum(waits) < 130
    assert "has not written" in reasons[0]


def test_a_server_that_ended_before_its_file_is_asked_again(connect: Connect, engine: Engine) -> None:
    def write(tensors: dict[str, Tensor], path: Path) -> None:
        engine.write = save_file

    engine.write = write
    server, _ = connect()
    ((_, found),) = server.states(TEXTS[:1])
    assert torch.equal(found, STATES_VLD[TEXTS[0]])


@pytest.mark.parametrize("locked", [True, False])
def test_a_file_is_read_once_it_is_complete(connect: Connect, engine: Engine, locked: bool) -> None:
    with ExitStack() as held:

        def write(tensors: dict[str, Tensor], path: Path) -> None:
            save_file(tensors, path)
            whole = path.read_bytes()
            if locked:
                fcntl.flock(held.enter_context(Path(f"{path}.lock").open("w")), fcntl.LOCK_EX)
                # A valid file, which the lock alone tells from a complete one.
                save_file({name: tensor[:0].clone() for name, tensor in tensors.items()}, path)
            else:
                path.write_bytes(whole[:-1])
            held.callback(path.write_bytes, whole)

        engine.write = write
        server, _ = connect()
        server.wait = lambda seconds: held.close()
        ((_, found),) = server.states(TEXTS[:1])
    assert torch.equal(found, STATES_VLD[TEXTS[0]])


def test_a_text_that_the_server_refuses_is_an_error(connect: Connect) -> None:
    server, _ = connect(lambda payload: Reply(400, b"maximum context length is 2"))
    with pytest.raises(DataError, match=r"refuses a text of 3 tokens \(answers 400 \(maximum context length is 2\)\)"):
        list(server.states(TEXTS))


def test_a_server_that_comes_back_is_waited_for_and_another_one_is_refused(connect: Connect, engine: Engine) -> None:
    replies = iter([engine, lambda payload: Reply(503), engine, engine])
    engine.fingerprints = iter(["one", "one", "two"])
    server, served = connect(lambda payload: next(replies)(payload))
    reasons = list[str]()
    arrived = list[tuple[int, Tensor]]()
    server.endpoint.on_wait = reasons.append
    with pytest.raises(DataError, match=r"changed its settings \(fingerprint two\); expected one, as before"):
        arrived.extend(server.states(TEXTS))
    assert len(arrived) == 2
    assert reasons == [f"{served.url}: answers 503 (Service Unavailable)"]


def test_the_identity_names_model_and_settings_and_not_the_address(connect: Connect, engine: Engine) -> None:
    one, again, other = (connect()[0] for _ in range(3))
    engine.fingerprints = iter(["bf16", "bf16", "fp8"])
    for server in (one, again, other):
        list(server.states(TEXTS[:1]))
    assert one.identity() == again.identity() == ["vllm", "0.32.0", "None", "bf16", "torch.float32"]
    assert other.identity() == ["vllm", "0.32.0", "None", "fp8", "torch.float32"]


# The proof


def logits(states_TD: Tensor) -> Tensor:
    return states_TD @ LM_HEAD_VD.T


def test_the_proof_finds_that_a_servers_choices_are_those_of_its_states(connect: Connect) -> None:
    assert prove(connect()[0], TEXTS, logits) == (6, 6)


@pytest.mark.parametrize(
    ("texts", "gap", "found"),
    [
        ([[token] for token in range(20, 120)], 0.03, None),
        (TEXTS, 0.03, r"at 83\.3% of 6 positions, and a far one at 0 "),
        ([[token] for token in range(20, 120)], 0.04, r"at 99\.0% of 100 positions, and a far one at 1 \(text:.* 0:0 "),
    ],
)
def test_the_proof_lets_one_near_tie_in_a_hundred_pass(
    connect: Connect, texts: list[list[int]], gap: float, found: str | None
) -> None:
    first = STATES_VLD[texts[0][0], -1]

    def tied(states_TD: Tensor) -> Tensor:
        """Prefer the last token to the server's choice for the first state of all."""
        logits_TV = logits(states_TD)
        if torch.equal(states_TD[0], first):
            logits_TV[0, -1] = logits_TV[0].max() / (1 - gap)
        return logits_TV

    if found is None:
        assert prove(connect()[0], texts, tied) == (100, 99)
    else:
        with pytest.raises(DataError, match=found):
            prove(connect()[0], texts, tied)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_choice_that_rounding_to_the_servers_dtype_decides_agrees(
    connect: Connect, engine: Engine, dtype: torch.dtype
) -> None:
    engine.states = lambda states: states.to(dtype)
    server, _ = connect()
    server.dtype = dtype

    def close(states_TD: Tensor) -> Tensor:
        logits_TV = logits(states_TD.float())
        logits_TV[:, -1] = logits_TV.amax(-1) * 1.005
        return logits_TV

    if dtype == torch.bfloat16:
        assert prove(server, TEXTS, close) == (6, 6)
    else:
        with pytest.raises(DataError, match=r"at 0\.0% of 6 positions, and a far one at 0 "):
            prove(server, TEXTS, close)


@pytest.mark.parametrize(
    "wrong",
    [lambda states_TD: logits(states_TD.roll(1, -1)), lambda states_TD: logits(states_TD).roll(1, -1)],
    ids=["state", "lm_head"],
)
def test_the_proof_refuses_another_state_or_another_lm_head(connect: Connect, wrong: Edit) -> None:
    with pytest.raises(DataError, match=r"prefers .* at 0\.0% of 6 positions, and a far one at 6 \(text:position 0:0 "):
        prove(connect()[0], TEXTS, wrong)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"prompt_logprobs": None}, "returns no prompt_logprobs"),
        ({"prompt_logprobs": [None, {}, {"1": {}}]}, "returns no prompt_logprobs"),
        ({"prompt_logprobs": [None]}, "returns no prompt_logprobs"),
        ({"prompt_logprobs": [None, *[{"-7": {"logprob": 0}}, {"99999": {"logprob": 0}}]]}, "0:0 -7, .* 0:1 99999, "),
    ],
)
def test_the_proof_needs_a_server_that_returns_its_choices(
    connect: Connect, engine: Engine, choice: dict[str, Any], message: str
) -> None:
    engine.reply = lambda document: document | {"choices": [document["choices"][0] | choice]}
    with pytest.raises(DataError, match=message):
        prove(connect()[0], TEXTS[:1], logits)
