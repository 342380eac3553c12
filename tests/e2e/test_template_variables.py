"""Answers are given to the prompts that a server of the trunk would render, tools and variables included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from byte_tokenizer import THINKS, byte_tokenizer
from mtp_train.answers.store import stored_rows
from mtp_train.cli.main import main
from runs import Capture, document, refusal, write_recipe

TOOLS = [{"type": "function", "function": {"name": "lookup"}}]


@pytest.mark.usefixtures("own_datasets_cache")
def test_prompts_are_answered_as_the_trunk_is_served(
    own_inputs: Path, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    inputs = own_inputs
    tokenizer = byte_tokenizer(THINKS)
    tokenizer.save_pretrained(inputs / "finetune")
    asked = [[{"role": "user", "content": f"Weather in {place}?"}] for place in range(40)]
    with (inputs / "prompts.jsonl").open("w") as file:
        file.writelines(json.dumps({"prompt": one, "tools": json.dumps(TOOLS)}) + "\n" for one in asked)
    data: dict[str, Any] = {
        "sources": [{"path": str(inputs / "prompts.jsonl")}],
        "holdout": 0.4,
        "seq_len_tokens": 192,
        "regenerate": {"temperature": 0.0, "max_new_tokens": 4},
    }
    recipe = write_recipe(tmp_path / "a.yaml", inputs, new_run, data=data)
    document(["regenerate", recipe, "data.chat_template_kwargs.enable_thinking=false"], capfd)
    (directory,) = new_run.glob("data/responses-*")
    rendered = {"tools": TOOLS, "enable_thinking": False, "add_generation_prompt": True, "return_dict": False}
    expected = {tuple(tokenizer.apply_chat_template(one, **rendered)) for one in asked}
    found = {row.prompt_ids for row in stored_rows(directory)}
    assert found
    assert found <= expected
    # Served with thinking, they are answers to other prompts: no run takes them over.
    assert "data.chat_template_kwargs" in refusal(["regenerate", recipe], capfd)
    other = write_recipe(tmp_path / "b.yaml", inputs, tmp_path / "other", data={**data, "responses": str(new_run)})
    assert main(["regenerate", str(other)]) == 2
    assert "has no response to any of the" in capfd.readouterr().err


def test_generate_writes_the_prompt_with_the_variables(own_inputs: Path, capfd: Capture) -> None:
    finetune = own_inputs / "finetune"
    tokenizer = byte_tokenizer(THINKS)
    tokenizer.save_pretrained(finetune)
    short = ["generate", finetune, "--depth", 0, "--max-new-tokens", 4, "--prompt"]
    variables = ["--chat-template-kwargs", "enable_thinking=false", f"tools={json.dumps(TOOLS)}"]
    chat = document([*short, "hi", "--chat", *variables], capfd)
    assert chat["settings"]["chat_template_kwargs"] == {"enable_thinking": False, "tools": TOOLS}
    rendered = {"tools": TOOLS, "enable_thinking": False, "add_generation_prompt": True, "tokenize": False}
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], **rendered)
    assert document([*short, text], capfd)["requests"] == chat["requests"]
    # Control: without the variables it is another prompt.
    assert document([*short, "hi", "--chat"], capfd)["requests"] != chat["requests"]
    assert "given without --chat; expected a chat" in refusal([*short, "hi", *variables], capfd)
    with pytest.raises(SystemExit):
        main([*map(str, short), "hi", "--chat", "--chat-template-kwargs", "enable_thinking"])
    assert "'enable_thinking'; expected NAME=VALUE" in capfd.readouterr().err
