"""A family's way from a stripped fine-tune to a checkpoint that is healthy again; ``test_families.py`` has its stages.

Random tiny checkpoints in the released layout: key names and expert layout are what transformers' own
``save_pretrained`` and the family's key rules make of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import all_tensors
from mtp_inference import HeadDrafting, SpeculativeDecoder, compare, plain_greedy
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.heads.build import build_head, graft_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.recipe.loading import load_recipe
from mtp_train.trunk.load import load_trunk
from runs import LEARNS, document, run_quietly, write_inputs, write_recipe
from tiny import ALL_FAMILIES

NEW_TOKENS = 24
PROMPT = [5, 9, 3, 44, 60]
SHORT = {**LEARNS, "train__max_steps": 40, "evaluate__arms": ["none", "graft", "retrained"]}
# Its divided logits leave a random trunk nearly without preferences: there is less to learn from a token.
LONGER = {"inkling": {"train__max_steps": 80}}


# The fast tier goes the whole way with a mixture whose head is one more layer, and with one of several streams (the run
# of conftest.py has a recurrent state and its head beside the trunk); the slow tier with all others.
QUICK = ("glm4_moe", "deepseek_v4")
EVERY_ONE = [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in ALL_FAMILIES]


@pytest.mark.parametrize("family_name", EVERY_ONE)
def test_a_stripped_fine_tune_gets_a_head_that_is_better_than_the_graft(
    family_name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    inputs = write_inputs(tmp_path / "in", family_name)
    base, finetune, run_dir = inputs / "base", inputs / "finetune", tmp_path / "run"
    healthy = inspected(capfd, base)
    assert (healthy["status"], healthy["runs_here"]) == ("healthy", "yes")
    stripped = inspected(capfd, finetune, "--base", base)
    assert stripped["status"] in ("declared_but_missing", "stripped")
    assert stripped["cure"].startswith(f"mtp-train graft {finetune} --from {base}")
    document(["graft", finetune, "--from", base, "--out", tmp_path / "graft"], capfd)
    grafted = inspected(capfd, tmp_path / "graft", "--base", base)
    assert (grafted["status"], grafted["stale"]) == ("healthy", True)

    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, run_dir, **SHORT | LONGER.get(family_name, {}))
    assert document(["check", recipe], capfd)["disk_bytes"] > 0
    assert run_quietly(load_recipe(recipe)).stage == "done"
    report = json.loads((run_dir / "report.json").read_text())
    assert report["gate"]["passed"] is True
    lossless = report["lossless"]
    assert lossless["identical"] + lossless["near_tie_divergences"] == lossless["checked"] > 0

    export = run_dir / "export"
    written = all_tensors(export)
    assert all(torch.equal(written[key], value) for key, value in all_tensors(finetune).items())
    exported = inspected(capfd, export, "--base", base)
    assert (exported["status"], exported["stale"]) == ("healthy", False)
    assert_lossless(export)


def inspected(capfd: pytest.CaptureFixture[str], checkpoint: Path, *more: object) -> Any:
    return document(["inspect", checkpoint, *more], capfd)


@torch.inference_mode()
def assert_lossless(path: Path) -> None:
    """A checkpoint decodes with its own head as without, at every depth that a head of one to three modules has."""
    checkpoint = open_checkpoint(path)
    trunk = load_trunk(path, checkpoint.family, dtype=torch.float32)
    head = build_head(
        graft_plan(checkpoint, checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32
    ).eval()
    plain = plain_greedy(trunk, PROMPT, NEW_TOKENS, ())
    for depth in (1, 2, 3):
        (result,) = SpeculativeDecoder(trunk, HeadDrafting(head), depth, ()).generate([PROMPT], NEW_TOKENS)
        assert result.num_drafts > 0
        assert compare(result.token_ids, plain, trunk, PROMPT).verdict == "identical", depth
