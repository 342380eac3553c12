"""``mtp-train generate``: what it prints, and what it counts."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import mtp_train as mtp
from byte_tokenizer import byte_tokenizer
from checkpoints import wrap_as_vision_language
from json_files import read_json, write_json
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.tokenizer import chat_prompt_tokens
from mtp_train.cli.main import DRAFT_STYLE, main
from mtp_train.errors import printable
from mtp_train.trunk.load import load_trunk
from plain_decoding import plain_greedy
from runs import Capture, document, refusal

# What the head of the run was trained for: its recipe's chats, through the template.
PROMPTS = tuple(f"<|im_start|>user\nsay {number}<|im_end|>\n<|im_start|>assistant\n" for number in (1, 4))
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_per_pos")
REQUEST_FIELDS = {"text", "token_ids", "finish_reason", *COUNTERS}


def requests(argv: list[Any], capfd: Capture) -> list[dict[str, Any]]:
    """Generate 24 tokens for each prompt."""
    prompts = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    return document(["generate", *argv, *prompts, "--max-new-tokens", 24], capfd)["requests"]


def texts(found: list[dict[str, Any]]) -> list[Any]:
    return [(one["text"], one["token_ids"]) for one in found]


def test_generate_prints_new_tokens_of_every_prompt_and_consistent_counters(run_dir: Path, capfd: Capture) -> None:
    tokenizer = byte_tokenizer()
    trunk = load_trunk(open_checkpoint(run_dir / "export"), dtype=torch.float32)
    found = requests([run_dir / "export", "--depth", 3], capfd)
    assert len(found) == len(PROMPTS)
    for prompt, one in zip(PROMPTS, found, strict=True):
        assert one.keys() == REQUEST_FIELDS
        plain = plain_greedy(trunk, tokenizer(prompt)["input_ids"], 24, {tokenizer.eos_token_id})
        assert one["token_ids"] == plain
        assert one["text"] == tokenizer.decode(plain, skip_special_tokens=True)
        assert one["num_draft_tokens"] == 3 * one["num_drafts"]
        marginal = one["accepted_per_pos"]
        assert len(marginal) == 3
        assert [one["num_drafts"], *marginal] == sorted([one["num_drafts"], *marginal], reverse=True)
        assert one["num_accepted_tokens"] == sum(marginal)
        # The first token comes from prefill; each round commits its accepted drafts and one token more.
        committed = 1 + one["num_drafts"] + one["num_accepted_tokens"]
        assert len(plain) <= committed <= len(plain) + 3
    assert sum(one["num_accepted_tokens"] for one in found) > 0
    for off in (["--depth", 0], ["--mtp", "off"]):
        plain = requests([run_dir / "export", *off], capfd)
        assert texts(plain) == texts(found)
        assert all(one["num_draft_tokens"] == 0 == sum(one["accepted_per_pos"]) for one in plain)


def test_generate_takes_a_head_from_a_run_and_from_a_base(inputs: Path, run_dir: Path, capfd: Capture) -> None:
    own = requests([run_dir / "export"], capfd)
    assert requests([inputs / "finetune", "--head", run_dir / "head"], capfd) == own
    stale = requests([inputs / "finetune", "--head", inputs / "base"], capfd)
    assert texts(stale) == texts(own)
    looked_up = requests([inputs / "finetune", "--head", "ngram"], capfd)
    assert texts(looked_up) == texts(requests([inputs / "finetune", "--depth", 0], capfd)) == texts(own)
    assert sum(one["num_draft_tokens"] for one in looked_up) > 0
    accepted = [sum(one["num_accepted_tokens"] for one in found) for found in (own, stale)]
    assert accepted[0] > accepted[1]


def test_generate_states_its_settings(inputs: Path, capfd: Capture) -> None:
    argv = ["generate", inputs / "base", "--prompt", "x", "--depth", 2, "--max-new-tokens", 1]
    named = {"checkpoint": str(inputs / "base"), "depth": 2, "max_new_tokens": 1, "mtp": "on"}
    used = {"temperature": 0.0, "seed": 0, "draft_sampling": "sampled", "dtype": "float32", "device": "cpu"}
    assert document(argv, capfd)["settings"].items() >= (named | used).items()


def test_generate_decodes_the_text_path_of_a_vision_language_checkpoint_and_refuses_images(
    own_inputs: Path, capfd: Capture
) -> None:
    expected = texts(requests([own_inputs / "base"], capfd))
    wrapped = wrap_as_vision_language(own_inputs / "base")
    config, image = read_json(wrapped / "config.json"), byte_tokenizer()("#")["input_ids"][-1]
    for field in ("image_token_id", "image_token_index"):
        write_json(wrapped / "config.json", config | {field: image})
        assert texts(requests([wrapped], capfd)) == expected
        message = refusal(["generate", wrapped, "--prompt", "x", "--prompt", "a#b"], capfd)
        assert f"--prompt 2: holds image or video token {image}; expected text, as only" in message


def printed(argv: list[Any], prompts: tuple[str, ...], capfd: Capture) -> tuple[str, str]:
    """Generate 24 tokens for each prompt; return what goes to stdout and to stderr."""
    words = [word for prompt in prompts for word in ("--prompt", prompt)]
    capfd.readouterr()
    assert main(["generate", *map(str, argv), *words, "--max-new-tokens", "24"]) == 0
    captured = capfd.readouterr()
    return captured.out, captured.err


def test_a_text_is_printed_as_it_is_decoded_and_then_tau_and_speed(
    run_dir: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = requests([run_dir / "export"], capfd)
    out, err = printed([run_dir / "export"], PROMPTS[:1], capfd)
    assert out == f"{printable(first['text'])}\n"
    rounds = first["num_drafts"]
    accepted = first["num_accepted_tokens"]
    told = f"{len(first['token_ids'])} tokens in {rounds} rounds: tau {1 + accepted / rounds:.2f}, "
    assert re.fullmatch(rf"{re.escape(told)}\d+\.\d tokens/s\n", err)
    out, _ = printed([run_dir / "export"], PROMPTS, capfd)
    assert out == printable(f"--- prompt 1\n{first['text']}\n--- prompt 2\n{second['text']}") + "\n"


def test_accepted_drafts_are_shown(run_dir: Path, capfd: Capture) -> None:
    (first, _) = requests([run_dir / "export"], capfd)
    out, _ = printed([run_dir / "export", "--show-drafts"], PROMPTS[:1], capfd)
    before, after = DRAFT_STYLE
    assert out.replace(before, "").replace(after, "") == f"{printable(first['text'])}\n"
    # A byte is a token here.
    drafted = "".join(part.partition(after)[0] for part in out.split(before)[1:])
    assert 0 < len(drafted) <= first["num_accepted_tokens"] < len(first["text"])
    assert before not in printed([run_dir / "export"], PROMPTS[:1], capfd)[0]


def test_a_conversation_reads_its_turns_from_stdin(
    run_dir: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["generate", str(run_dir / "export"), "--chat", "--max-new-tokens", "24"]
    alone = document([*command, "--prompt", "say 1"], capfd)["requests"][0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 1\n\nsay 4\n"))
    turns = document(command, capfd)["requests"]
    assert turns[0] == alone
    # The second turn is after the first one and its answer.
    tokenizer = byte_tokenizer()
    said = [("user", "say 1"), ("assistant", alone["text"]), ("user", "say 4")]
    prompt = chat_prompt_tokens(tokenizer, [{"role": role, "content": text} for role, text in said], "")
    trunk = load_trunk(open_checkpoint(run_dir / "export"), dtype=torch.float32)
    assert turns[1]["token_ids"] == plain_greedy(trunk, prompt, 24, {tokenizer.eos_token_id})
    # The line that a run ends with.
    rows = str(mtp.RunResult(0, "", "", "done", run_dir)).splitlines()
    (command,) = [row.partition(": mtp-train ")[2] for row in rows if row.startswith("try it: ")]
    monkeypatch.setattr(sys, "stdin", io.StringIO("say 1"))
    assert main([*shlex.split(command), "--max-new-tokens", "24"]) == 0
    shown = capfd.readouterr()
    for style in DRAFT_STYLE:
        shown = shown._replace(out=shown.out.replace(style, ""))
    assert shown.out == f"{printable(alone['text'])}\n"
    assert "tokens in" in shown.err


class Terminal:
    """A pseudo-terminal in place of stdout and stderr, and all that is written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._read_end, write_end = pty.openpty()
        self._file = os.fdopen(write_end, "w")
        self.writes = list[bytes]()
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, self._file)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # Linux reports the closed other end as an error.
        with contextlib.suppress(OSError):
            while data := os.read(self._read_end, 1 << 16):
                self.writes.append(data)

    def close(self) -> str:
        self._file.close()
        self._reader.join()
        os.close(self._read_end)
        return b"".join(self.writes).decode().replace("\r\n", "\n")


@pytest.mark.parametrize("quiet", [False, True])
@pytest.mark.parametrize("count", [1, 2])
def test_a_terminal_shows_texts_in_one_piece(
    count: int, quiet: bool, run_dir: Path, capfd: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [one["text"] for one in requests([run_dir / "export"], capfd)][:count]
    words = [word for prompt in PROMPTS[:count] for word in ("--prompt", prompt)]
    with monkeypatch.context() as patched:
        terminal = Terminal(patched)
        try:
            assert main(["generate", str(run_dir / "export"), *words, "--max-new-tokens", "24", *["-q"] * quiet]) == 0
        finally:
            shown = terminal.close()
    for text in expected:
        assert f"{printable(text)}\n" in shown
    if count == 1:
        assert len(terminal.writes) > 2, "the text came in one piece"
    # Bars move the cursor; nothing does once the first text has begun.
    before, _, after = shown.partition(printable(expected[0]))
    assert ("\x1b[" in before) != quiet
    assert "\x1b" not in after
