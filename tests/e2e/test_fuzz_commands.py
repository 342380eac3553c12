"""Commands on randomly damaged inputs: exit 0 with a result, or exit 2 with one message; no source changes."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st

from adapters import write_adapter
from mtp_train.cli.main import main
from mtp_train.heads.build import graft_plan
from mtp_train.weights.artifact import Artifact, save_artifact
from mtp_train.weights.files import open_checkpoint
from random_damage import Damage, damages, fuzz
from runs import tree, write_inputs, write_recipe

Capture = pytest.CaptureFixture[str]
MESSAGE = re.compile(r"mtp-train: (?:[^\n]+; expected [^\n]+\. [A-Z][^\n]+[.?]\n)+")
"""One message; for a recipe, a line for each of its problems."""
CHECKPOINT_FILES = (
    *("config.json", "model.safetensors", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("chat_template.jinja", "README.md"),
)
FILES = {
    "base": CHECKPOINT_FILES,
    "finetune": CHECKPOINT_FILES,
    "lora": ("adapter_config.json", "adapter_model.safetensors"),
    "head": ("head_config.json", "head.safetensors"),
    ".": ("chats.jsonl", "recipe.yaml"),
}
MEASURE = "--suite chats.jsonl --prompts-per-task 2 --temperatures 0 --depths 1 --max-new-tokens 2 --no-costs --out OUT"
COMMANDS: dict[str, tuple[str, ...]] = {
    # What is damaged, and the commands that read it; OUT does not exist before.
    "base": (
        "inspect base",
        "inspect finetune --base base",
        "graft finetune --from base --out OUT",
        "merge base --adapter lora --out OUT",
        "check recipe.yaml",
        "init OUT --trunk finetune --base base --data chats.jsonl",
        "generate base --prompt hello --max-new-tokens 2",
        "export base --gguf f32 --out OUT",
        "export base --head-only --out OUT",
    ),
    "finetune": (
        "inspect finetune",
        "inspect finetune --base base",
        "graft finetune --from base --out OUT",
        "check recipe.yaml",
        "init OUT --trunk finetune --base base --data chats.jsonl",
        "generate finetune --head base --prompt hello --max-new-tokens 2",
        f"evaluate finetune --head base {MEASURE}",
        f"compare base finetune+base {MEASURE}",
        "rescue finetune --from base --data chats.jsonl --out OUT --set train.max_steps=1 evaluate.prompts=1",
    ),
    "lora": (
        "merge base --adapter lora --out OUT",
        "init OUT --trunk lora --base base --data chats.jsonl",
    ),
    "head": (
        "generate finetune --head head --prompt hello --max-new-tokens 2",
        f"evaluate finetune --head head {MEASURE}",
    ),
    ".": (
        f"evaluate finetune --head head {MEASURE}",
        "check recipe.yaml",
        "init OUT --trunk finetune --base base --data chats.jsonl",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("fuzz") / "in", num_records=40)
    write_adapter(directory / "base", directory / "lora", target_modules=["q_proj"])
    for name in ("base", "finetune"):
        (directory / name / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
        (directory / name / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    base, finetune = (open_checkpoint(directory / name) for name in ("base", "finetune"))
    plan = graft_plan(finetune, base, "auto")
    save_artifact(Artifact(plan.family, plan.layout, 1, 3, plan.convention, plan.template, {}), directory / "head")
    write_recipe(directory / "recipe.yaml", Path(), Path("run"))
    return directory


def outcome_of(inputs: Path, damage: Damage, part: str, command: str, capfd: Capture) -> int:
    """Damage a copy of the inputs, run a command, check what it leaves, and return its exit code."""
    with tempfile.TemporaryDirectory() as name:
        work, home = Path(name), os.getcwd()
        shutil.copytree(inputs, work, dirs_exist_ok=True)
        damage(work / part)
        before = tree(work)
        os.chdir(work)
        try:
            capfd.readouterr()
            code = main([*command.split(" "), "--json"] if "rescue" not in command else command.split(" "))
        finally:
            os.chdir(home)
        printed, after = capfd.readouterr(), tree(work)
        kept = {path: content for path, content in after.items() if Path(path).parts[0] not in ("OUT", "run")}
        assert kept == before
        if code == 0:
            assert json.loads(printed.out)
        else:
            assert code == 2
            assert MESSAGE.fullmatch(printed.err), printed.err
            # A rescue tells its settings before it reads the weights.
            assert printed.out == "" or command.startswith("rescue")
            # A refused run records why, and a comparison keeps what it measured of other models.
            left = {path for path in after if path.startswith("OUT/")}
            assert command.startswith("compare") or left <= {"OUT/outcome.json"}
        return code


# One evaluation prompt is too few for a rescue: it shows refusals alone.
USED = [
    (part, command) for part, commands in COMMANDS.items() for command in commands if not command.startswith("rescue")
]


@pytest.mark.parametrize(("part", "command"), USED)
def test_intact_inputs_are_used(part: str, command: str, inputs: Path, capfd: Capture) -> None:
    assert outcome_of(inputs, lambda directory: None, part, command, capfd) == 0


def check_case(inputs: Path, part: str, case: tuple[Damage, str], capfd: Capture) -> None:
    damage, command = case
    assert outcome_of(inputs, damage, part, command, capfd) in (0, 2)


@pytest.mark.parametrize("part", COMMANDS)
@pytest.mark.parametrize("examples", [50, pytest.param(600, marks=pytest.mark.slow)])
def test_a_damaged_input_is_used_or_refused(part: str, examples: int, inputs: Path, capfd: Capture) -> None:
    cases = st.tuples(damages(FILES[part]), st.sampled_from(COMMANDS[part]))
    fuzz(examples, cases, lambda case: check_case(inputs, part, case, capfd))
