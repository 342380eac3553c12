"""A model whose releases have no head, its way to an export that has one, and what reads that export."""

from __future__ import annotations

import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_every_family import assert_lossless, inspected

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, save_with_head, set_fields
from mtp_train.checkpoints.locations import open_location
from mtp_train.families import FAMILIES
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs.checkpoint_tools.inspect import SUGGESTED_DEPTH
from mtp_train.runs.resolve import recipe_of
from runs import BYTE_VOCAB_SIZE, LEARNS, document, overrides_of, run_quietly, write_inputs, write_recipe
from tiny import tiny_head, tiny_trunk
from wrapped import save_wrapped

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "recipes" / "attach.md"
ATTACHED = {family.name: family for family in FAMILIES if family.attached}
# What transformers' head has of the trunk's that ours has not: windows that its cache forgets beyond, and dropout.
ON_TERMS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0},
}
ATTACH = {
    **LEARNS,
    "model__head_from": None,
    "head__init": "copy_last_layer",
    "head__num_depths": SUGGESTED_DEPTH,
    "evaluate__arms": ["none", "retrained"],
    "gate__baseline": "none",
    # By the clock, heads of tiny trunks cost more than they bring. Tau above 1 decides.
    "gate__break_even_tau": 1.0,
}


def write_headless(
    directory: Path, family_name: str, num_layers: int | None = None, wrapper: str | None = None
) -> Path:
    """Write chats and, in the place of the fine-tune, a model as its release has it: no head, no word of one.

    It may be inside of a vision-language model.
    """
    write_inputs(directory)
    path = directory / "finetune"
    for old in path.iterdir():
        old.unlink()
    if wrapper is not None:
        save_wrapped(path, wrapper, family_name, tied=wrapper == "gemma3", vocab_size=BYTE_VOCAB_SIZE)
        # Mistral Small has no window.
        set_fields(path, ON_TERMS.get(family_name, {}))
    else:
        tiny_trunk(family_name, vocab_size=BYTE_VOCAB_SIZE, num_layers=num_layers).causal_lm.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("family_name", "wrapper"),
    [
        # test_families.py has the stages of all of them.
        ("gemma3_text", "gemma3"),
        ("gpt_oss", None),
        pytest.param("mistral", "mistral3", marks=pytest.mark.slow),
    ],
)
def test_a_model_without_a_head_gets_one(
    family_name: str,
    wrapper: str | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trunk, run_dir = write_headless(tmp_path / "in", family_name, wrapper=wrapper), tmp_path / "run"
    before = inspected(capfd, trunk)
    assert (before["family"], before["status"]) == (family_name, "none")
    monkeypatch.chdir(tmp_path)
    init, launch = (shlex.split(command) for command in before["cure"].split(" && "))
    document([*init[1:], "--data", tmp_path / "in" / "chats.jsonl"], capfd)
    assert launch[:4] == ["accelerate", "launch", "-m", "mtp_train"]
    assert recipe_of(launch[4]).model.trunk == str(trunk)

    recipe = write_recipe(tmp_path / "recipe.yaml", tmp_path / "in", run_dir, **ATTACH)
    promised = document(["check", recipe], capfd)["serves"]
    assert run_quietly(load_recipe(recipe)).stage == "done"
    report = json.loads((run_dir / "report.json").read_text())
    assert (report["gate"]["passed"], report["gate"]["baseline"]) == (True, "none")
    assert report["lossless"]["identical"] == report["lossless"]["checked"] > 0

    export = run_dir / "export"
    after = inspected(capfd, export)
    assert (after["status"], after["serves"]) == ("healthy", promised)
    written = all_tensors(export)
    assert all(torch.equal(written[key], value) for key, value in all_tensors(trunk).items())
    assert_lossless(export)
    if ATTACHED[family_name].serving["transformers"].supported:
        assert_transformers_drafts_the_same(export, monkeypatch)


def assert_transformers_drafts_the_same(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock transformers loads the head from the export, and says, drafts and accepts what our decoder does."""
    modeling = pytest.importorskip("transformers.modeling_layers")
    if not hasattr(getattr(modeling, "MtpModel", None), "forward_layer"):
        return
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "engines" / "programs"))
    from run_transformers import load, rounds_of

    from engines.launch import ENGINES
    from engines.witness import Task, compare_decoding

    prompts = torch.randint(BYTE_VOCAB_SIZE, (3, 7), generator=torch.Generator().manual_seed(3)).tolist()
    task = Task(
        engine=ENGINES["transformers"],
        kind="decode",
        checkpoint=open_location(str(export)),
        prompts=prompts,
        max_new_tokens=24,
        dtype="float32",
        python=sys.executable,
        files={},
        work=export,
    )
    model = load({"checkpoint": str(export), "dtype": "float32"})
    texts = [rounds_of(model, prompt_ids, task.max_new_tokens) for prompt_ids in prompts]
    theirs: dict[str, Any] = {"engine": "transformers", "texts": texts, "eos_ids": [], "counters": {}}
    entry = compare_decoding(task, 1, theirs)
    assert (entry["verdict"], entry["ours"]) == ("equal", entry["theirs"])
    assert entry["ours"]["draft_tokens"] > 10


@pytest.mark.parametrize(
    "family_name", [name for name, one in ATTACHED.items() if one.serving["transformers"].supported]
)
def test_transformers_drafts_with_every_head_that_it_is_said_to_draft_with(
    family_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trunk = tiny_trunk(family_name, vocab_size=BYTE_VOCAB_SIZE)
    path = save_with_head(trunk, tiny_head(trunk), tmp_path / "model")
    set_fields(path, ON_TERMS.get(family_name, {}))
    assert_transformers_drafts_the_same(path, monkeypatch)


def test_the_how_to_runs_as_it_is_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny model, with settings that suit it, and without the launcher."""
    monkeypatch.chdir(tmp_path)
    trunk = write_headless(tmp_path / "in", "llama")
    names = {"my-model": str(trunk), "chats.jsonl": str(tmp_path / "in" / "chats.jsonl")}
    tiny = {**LEARNS, "data__holdout": 0.4, "data__seq_len_tokens": 96, "train__precision": "fp32"}
    tiny |= {"train__micro_batch_sequences": 1, "train__warmup_steps": 0, "gate__break_even_tau": 1.0}
    block, *_ = re.findall(r"```bash\n(.*?)```", HOW_TO.read_text(encoding="utf-8"), flags=re.DOTALL)
    statuses = []
    for line in block.replace("\\\n", " ").splitlines():
        words = [re.sub("my-model|chats.jsonl", lambda found: names[found[0]], word) for word in shlex.split(line)]
        argv = ["run", *words[4:]] if words[0] == "accelerate" else words[1:]
        more = overrides_of(**tiny, track__wandb="off") if argv[0] in ("run", "check") else []
        statuses.append(document([*argv, *more], capfd).get("status"))
    assert statuses == ["none", None, None, None, "healthy"]
