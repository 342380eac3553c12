"""A family's way from a model without its head, or that never had one, to a checkpoint with one that drafts.

``test_families.py`` has the stages of all families.

Random tiny checkpoints in the released layout: key names and expert layout are what transformers' own
``save_pretrained`` and the family's key rules make of them.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from checkpoints import all_tensors, assert_lossless, holds
from json_files import read_json
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline
from repository import RECIPES
from runs import LEARNS, Capture, document, overrides_of, passed_report, write_headless, write_inputs, write_recipe
from tiny import ALL_FAMILIES

SHORT = {**LEARNS, "train__max_steps": 40, "evaluate__arms": ["none", "graft", "retrained"]}
# Its divided logits leave a random trunk nearly without preferences: there is less to learn from a token.
LONGER = {"inkling": {"train__max_steps": 80}}


# The fast tier goes the whole way with a mixture whose head is one more layer, and with one of several streams (the run
# of conftest.py has a recurrent state and its head beside the trunk); the slow tier with all others.
QUICK = ("glm4_moe", "deepseek_v4")
EVERY_ONE = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ALL_FAMILIES]


@pytest.mark.parametrize("family_name", EVERY_ONE)
def test_a_stripped_fine_tune_gets_a_head_that_is_better_than_the_graft(
    family_name: str, tmp_path: Path, new_run: Path, capfd: Capture
) -> None:
    inputs = write_inputs(tmp_path / "in", family_name)
    base = inputs / "base"
    finetune = inputs / "finetune"
    healthy = inspected(capfd, base)
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", "yes")
    stripped = inspected(capfd, finetune, "--base", base)
    assert stripped["status"] in ("declared_but_missing", "stripped")
    assert stripped["cure"].startswith(f"mtp-train graft {finetune} --from {base}")
    document(["graft", finetune, "--from", base, "--out", tmp_path / "graft"], capfd)
    grafted = inspected(capfd, tmp_path / "graft", "--base", base)
    assert (grafted["status"], grafted["stale"]) == ("healthy", True)

    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, new_run, **SHORT | LONGER.get(family_name, {}))
    assert document(["check", recipe], capfd)["disk_bytes"] > 0
    assert pipeline.run(load_recipe(recipe)).stage == "done"
    report = read_json(new_run / "report.json")
    assert report["gate"]["passed"] is True
    lossless = report["lossless"]
    assert lossless["identical"] + lossless["near_tie_divergences"] == lossless["checked"] > 0

    export = new_run / "export"
    written = all_tensors(export)
    assert holds(written, all_tensors(finetune))
    exported = inspected(capfd, export, "--base", base)
    assert (exported["status"], exported["stale"]) == ("healthy", False)
    assert_lossless(export)


HOW_TO = RECIPES / "attach.md"


@pytest.mark.parametrize(
    ("family_name", "wrapper"),
    [("gemma3_text", "gemma3"), ("gpt_oss", None), pytest.param("mistral", "mistral3", marks=pytest.mark.slow)],
)
def test_a_model_that_never_had_a_head_gets_one_as_the_how_to_says(
    family_name: str,
    wrapper: str | None,
    tmp_path: Path,
    capfd: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On tiny models, with settings that suit them, and without the launcher."""
    trunk = write_headless(tmp_path / "in", family_name, wrapper=wrapper)
    monkeypatch.chdir(tmp_path)
    names = {"my-model": str(trunk), "chats.jsonl": str(tmp_path / "in" / "chats.jsonl")}
    tiny = {**LEARNS, "data__holdout": 0.4, "data__seq_len_tokens": 96, "train__precision": "fp32"}
    tiny |= {"train__micro_batch_sequences": 1, "train__warmup_steps": 0, "gate__break_even_tau": 1.0}
    # For some models init chooses EAGLE-3, which test_other_kinds.py has.
    tiny |= {"head__kind": "mtp", "head__init": "copy_last_layer", "track__wandb": "off"}
    block, *_ = re.findall(r"```bash\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for line in block.splitlines():
        words = [names.get(word, word) for word in shlex.split(line)]
        argv = ["run", *words[4:]] if words[0] == "accelerate" else words[1:]
        found.append(document([*argv, *(overrides_of(**tiny) if argv[0] in ("run", "check") else [])], capfd))
    before, written, planned, done, after = found
    assert (before["family"], before["status"]) == (family_name, "none")
    assert shlex.split(before["cure"])[:2] == ["mtp-train", "init"]
    assert written["content"].startswith("it trains a new head ")
    assert done["exit_code"] == 0
    assert (after["status"], after["serves"]) == ("healthy", planned["serves"])

    run_dir = tmp_path / "runs" / "attached"
    passed_report(run_dir, "none")
    exported = all_tensors(run_dir / "export")
    assert holds(exported, all_tensors(trunk))
    assert_lossless(run_dir / "export")


def inspected(capfd: Capture, checkpoint: Path, *more: object) -> Any:
    return document(["inspect", checkpoint, *more], capfd)
