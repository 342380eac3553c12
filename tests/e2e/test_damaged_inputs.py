"""Commands on damaged inputs: exit 0 with a result, or exit 2 with one message; sources stay, nothing is half-written.

Random damages follow from a seed: the fast tier has a table of them, the slow tier draws more.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from adapters import write_adapter
from checkpoints import rewrite
from json_files import read_json, write_json, write_rows
from mtp_train.checkpoints.artifact import Artifact, save_artifact
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.heads.build import graft_plan
from runs import Capture, document, refusal, tree, write_inputs, write_recipe
from tiny import ALL_FAMILIES

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


VALUES = (None, True, -1, 0, 3, 10**30, 0.5, float("nan"), "", "../x", "/", "\ud800", [], [[1]], {}, {"a": 1})
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
            write_json(path, fields)
        case "whole":
            write_json(path, random.choice(VALUES))


def places_of(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place in a tree of JSON: the object or list, and the key."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, inner in list(items):
        yield node, key
        yield from places_of(inner)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = write_inputs(tmp_path_factory.mktemp("fuzz") / "in", num_records=40)
    write_adapter(directory / "base", directory / "lora")
    for name in ("base", "finetune"):
        (directory / name / "generation_config.json").write_text('{"temperature": 0.7, "top_p": 0.9}')
        (directory / name / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    base, finetune = (open_checkpoint(directory / name) for name in ("base", "finetune"))
    plan = graft_plan(finetune, base, "auto")
    save_artifact(Artifact(**vars(plan), num_depths=3, notes={}), directory / "head")
    write_recipe(directory / "recipe.yaml", Path(), Path("run"))
    return directory


def at_random(part: str, seed: int) -> Callable[[Path], None]:
    """Return what damages a file of a part as a seed decides."""

    def do(work: Path) -> None:
        random = Random(seed)
        damage(work / part / random.choice(FILES[part]), random)

    return do


def done(inputs: Path, damages: Callable[[Path], Any], command: str, capfd: Capture) -> tuple[int, str]:
    """Damage a copy of the inputs, run a command there, check what it leaves; return its exit code and message."""
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        work = Path(name)
        patched.chdir(work)
        shutil.copytree(inputs, work, dirs_exist_ok=True)
        damages(work)
        before = tree(work)
        capfd.readouterr()
        code = main([*command.split(" "), *([] if command.startswith("rescue") else ["--json"])])
        printed = capfd.readouterr()
        after = tree(work)
        assert {path: content for path, content in after.items() if path in before} == before
        assert {Path(path).parts[0] for path in after.keys() - before.keys()} <= {"OUT", "run"}
        if code == 0:
            assert json.loads(printed.out)
            return code, ""
        said = printed.err.removeprefix("1 process on cpu, no shards\n")
        assert code == 2
        assert MESSAGE.fullmatch(said), said
        # A rescue tells its settings before it reads the weights.
        assert printed.out == "" or command.startswith("rescue")
        left = {path for path in after.keys() - before.keys() if "/" in path}
        # A comparison keeps what it measured of other models.
        assert left <= {"OUT/outcome.json", "run/outcome.json"} or command.startswith("compare")
        for path in left & {"OUT/outcome.json", "run/outcome.json"}:
            recorded = read_json(work / path)
            assert f"mtp-train: {recorded.pop('message')}\n" == said
            assert recorded == {"exit_code": 2, "reason": "bad_input", "stage": "check"}
        return code, said


# One evaluation prompt is too few for a rescue: it shows refusals alone.
USED = [
    (part, command) for part, commands in COMMANDS.items() for command in commands if not command.startswith("rescue")
]


@pytest.mark.parametrize(("part", "command"), USED)
def test_intact_inputs_are_used(part: str, command: str, inputs: Path, capfd: Capture) -> None:
    assert done(inputs, lambda work: None, command, capfd) == (0, "")


EVERY = [(part, command) for part, commands in COMMANDS.items() for command in commands]
RANDOM_CASES = [(*EVERY[seed % len(EVERY)], seed) for seed in range(60)]


@pytest.mark.parametrize(("part", "command", "seed"), RANDOM_CASES)
def test_a_damaged_input_is_used_or_refused(part: str, command: str, seed: int, inputs: Path, capfd: Capture) -> None:
    code, said = done(inputs, at_random(part, seed), command, capfd)
    assert (code == 0) == (said == "")


@pytest.mark.slow
@pytest.mark.parametrize("part", COMMANDS)
def test_many_damaged_inputs_are_used_or_refused(part: str, inputs: Path, capfd: Capture) -> None:
    @settings(max_examples=600, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.sampled_from(COMMANDS[part]), st.integers(0, 2**32))
    def check(command: str, seed: int) -> None:
        done(inputs, at_random(part, seed), command, capfd)

    check()


# Damages with messages of their own


def poison(path: Path, key: str) -> None:
    rewrite(path, lambda tensors: tensors[key][-1:].fill_(torch.nan))


def shorten_held_out_texts(work: Path) -> None:
    rows = [{"text": chr(97 + number), "group": f"g{number}"} for number in range(8)]
    rows += [{"text": "long enough to learn", "group": "train"}] * 8
    write_rows(work / "chats.jsonl", rows)


BOTH = ("run recipe.yaml", "generate finetune --head base --prompt hello")
MLP = "model.layers.0.mlp.up_proj.weight"
NAMED: list[tuple[tuple[str, ...], Callable[[Path], Any], str]] = [
    (BOTH, lambda work: poison(work / "finetune", "model.norm.weight"), "finetune: model.norm.weight holds NaN or"),
    (BOTH, lambda work: poison(work / "base", "mtp.norm.weight"), "mtp.norm.weight.* holds NaN or infinite values"),
    (
        BOTH,
        lambda work: rewrite(work / "base", lambda tensors: tensors.update({MLP: tensors[MLP][:-1]})),
        r"base: trunk tensor layers\.0\.mlp\.up_proj\.weight is \[47, 32\], in .*finetune it is \[48, 32\]; "
        r"expected the same trunk shape\. Point at the base that the fine-tune came from\.",
    ),
    (
        BOTH[:1],
        shorten_held_out_texts,
        r"data\.holdout: 0\.4 holds out \d+ texts, none of them long enough to continue; expected",
    ),
]
NAMED_CASES = [(command, damages, message) for commands, damages, message in NAMED for command in commands]


@pytest.mark.parametrize(("command", "damages", "message"), NAMED_CASES)
def test_the_message_names_the_damage(
    command: str, damages: Callable[[Path], Any], message: str, inputs: Path, capfd: Capture
) -> None:
    code, said = done(inputs, damages, command, capfd)
    assert code == 2
    assert re.search(message, said)


@pytest.mark.skipif("step3p7" not in ALL_FAMILIES, reason="this transformers has no Step-3.7")
def test_a_chain_of_modules_is_not_trained_as_one(tmp_path: Path, capfd: Capture) -> None:
    inputs = write_inputs(tmp_path / "in", "step3p7")
    recipe = write_recipe(tmp_path / "recipe.yaml", inputs, tmp_path / "run", objective__unroll="fastmtp")
    said = refusal(["check", recipe], capfd)
    assert said.startswith("mtp-train: objective.unroll: 'fastmtp' with a head of 3 chained modules")


def test_check_and_run_report_the_same_problems_at_once(pristine: Path, tmp_path: Path, capfd: Capture) -> None:
    wrong = {"head__draft_vocab": 100_000, "data__responses": str(tmp_path / "no run"), "data__regenerate": {}}
    recipe = write_recipe(tmp_path / "recipe.yaml", pristine, tmp_path / "run", **wrong)
    said = []
    for command in ("check", "run"):
        assert main([command, str(recipe)]) == 2
        said.append(capfd.readouterr().err.splitlines()[-2:])
    assert said[0] == said[1]
    assert "head.draft_vocab: 100000; expected fewer" in said[0][0]
    assert said[0][1].startswith("data.responses: ")


def test_a_card_that_cannot_be_read_does_not_stop_the_copy(own_inputs: Path, out: Path, capfd: Capture) -> None:
    card = b"---\n[1, 2]\n---\n# Caf\xe9\n"
    (own_inputs / "finetune" / "README.md").write_bytes(card)
    document(["graft", own_inputs / "finetune", "--from", own_inputs / "base", "--out", out], capfd)
    assert "## Serve it" in (out / "README.md").read_text(encoding="utf-8")
    assert (own_inputs / "finetune" / "README.md").read_bytes() == card


def test_a_copy_whose_card_cannot_be_written_is_removed(
    pristine: Path, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("mtp_train.runs.export.write_text", fail)
    argv = ["graft", str(pristine / "finetune"), "--from", str(pristine / "base"), "--out", str(out)]
    with pytest.raises(RuntimeError, match="a bug"):
        main(argv)
    assert tree(tmp_path) == {}
