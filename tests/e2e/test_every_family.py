"""Every family's way from a stripped fine-tune to a checkpoint that is healthy again, in one test for all.

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
from mtp_train.heads.build import build_head, native_plan
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.recipe.loading import load_recipe
from mtp_train.trunk.load import load_trunk
from runs import LEARNS, document, run_quietly, write_inputs, write_recipe
from tiny import ALL_FAMILIES, CACHE_KINDS

NEW_TOKENS = 24
PROMPT = [5, 9, 3, 44, 60]
SHORT = {**LEARNS, "train__max_steps": 40, "evaluate__arms": ["none", "graft", "retrained"]}
# Its divided logits leave a random trunk nearly without preferences: there is less to learn from a token.
LONGER = {"inkling": {"train__max_steps": 80}}


# The fast tier goes the whole way with one family of each kind of cache; the slow tier with the others.
EVERY_ONE = [pytest.param(name, marks=[pytest.mark.slow] * (name not in CACHE_KINDS.values())) for name in ALL_FAMILIES]


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
    assert_export_is_faithful(export, finetune, base)
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
    head = build_head(native_plan(checkpoint, "auto"), text_config_of(checkpoint), dtype=torch.float32).eval()
    plain = plain_greedy(trunk, PROMPT, NEW_TOKENS, ())
    for depth in (1, 2, 3):
        (result,) = SpeculativeDecoder(trunk, HeadDrafting(head), depth, ()).decode([PROMPT], NEW_TOKENS)
        assert result.num_drafts > 0
        assert compare(result.token_ids, plain, trunk, PROMPT).verdict == "identical", depth


def assert_export_is_faithful(export: Path, finetune: Path, base: Path) -> None:
    """Trunk bits are the fine-tune's; head keys, shapes, dtypes and config fields are the base's."""
    written, tuned, original = all_tensors(export), all_tensors(finetune), all_tensors(base)
    assert all(torch.equal(written[key], value) for key, value in tuned.items())
    layout = layout_of(open_checkpoint(base))
    head_keys = {key for key in original if layout.is_head_key(key)}
    assert written.keys() - tuned.keys() == head_keys
    for key in head_keys:
        assert (written[key].shape, written[key].dtype) == (original[key].shape, original[key].dtype)
    trained = [key for key in head_keys if not torch.equal(written[key], original[key])]
    assert len(trained) > len(head_keys) // 2
    fields = open_checkpoint(base).family.declaration.fields
    written_config, base_config = (json.loads((path / "config.json").read_text()) for path in (export, base))
    assert all(written_config.get(field) == base_config.get(field) for field in fields)
