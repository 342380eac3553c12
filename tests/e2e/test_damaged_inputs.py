"""Commands on damaged inputs: exit 0 with a result, or exit 2 with one message; sources stay, nothing is half-written.

A damage follows from a seed: the fast tier has a table of them, the slow tier draws more.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from adapters import write_adapter
from mtp_train.checkpoints.artifact import Artifact, save_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.heads.build import graft_plan
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
MEASURE = "--suite chats.jsonl --prompts-per-task 2 --temperatures 0 --depths 1 --max-new-tokens 2 --out OUT"
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


VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    3,
    10**30,
    0.5,
    float("nan"),
    "",
    "../x",
    "/",
    "\ud800",
    [],
    [[1]],
    {},
    {"a": 1},
)
"""What may stand in the place of a value in JSON."""


def damage(path: Path, random: Random) -> None:
    """Change bytes of a file, cut it or remove it, or replace its JSON or a value in it."""
    whole = path.read_bytes()
    place = random.randrange(len(whole))
    match random.choice(["bytes", "cut", "remove", "value", "whole"] if path.suffix == ".json" else ["bytes", "cut"]):
        case "bytes":
            path.write_bytes(whole[:place] + random.randbytes(random.randint(1, 8)) + whole[place + 4 :])
        case "cut":
            path.write_bytes(whole[:place])
        case "remove":
            path.unlink()
        case "value":
            fields = json.loads(whole)
            inside, key = random.choice(list(places_of(fields)))
            inside[key] = random.choice(VALUES)
            path.write_text(json.dumps(fields))
        case "whole":
            path.write_text(json.dumps(random.choice(VALUES)))


def places_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a tree of JSON: the object or list, and the key."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in list(items):
        yield node, key
        yield from places_of(inner)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("fuzz") / "in", num_records=40)
    write_adapter(directory / "base", directory / "lora", target_modules=["q_proj"])
    for name in ("base", "finetune"):
        (directory / name / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
        (directory / name / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    base, finetune = (open_checkpoint(directory / name) for name in ("base", "finetune"))
    plan = graft_plan(finetune, base, "auto")
    save_artifact(Artifact(**vars(plan), num_depths=3, notes={}), directory / "head")
    write_recipe(directory / "recipe.yaml", Path(), Path("run"))
    return directory


def outcome_of(inputs: Path, part: str, command: str, seed: int | None, capfd: Capture) -> int:
    """Damage a file in a copy of the inputs, run a command, check what it leaves, and return its exit code."""
    with tempfile.TemporaryDirectory() as name:
        work, home = Path(name), os.getcwd()
        shutil.copytree(inputs, work, dirs_exist_ok=True)
        if seed is not None:
            random = Random(seed)
            damage(work / part / random.choice(FILES[part]), random)
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
    assert outcome_of(inputs, part, command, None, capfd) == 0


EVERY = [(part, command) for part, commands in COMMANDS.items() for command in commands]
CASES = [(*EVERY[seed % len(EVERY)], seed) for seed in range(60)]


@pytest.mark.parametrize(("part", "command", "seed"), CASES)
def test_a_damaged_input_is_used_or_refused(part: str, command: str, seed: int, inputs: Path, capfd: Capture) -> None:
    assert outcome_of(inputs, part, command, seed, capfd) in (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("part", COMMANDS)
def test_many_damaged_inputs_are_used_or_refused(part: str, inputs: Path, capfd: Capture) -> None:
    @settings(max_examples=600, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(COMMANDS[part]), st.integers(0, 2**32))
    def check(command: str, seed: int) -> None:
        assert outcome_of(inputs, part, command, seed, capfd) in (0, 2)

    check()
