"""A recipe that is written for a model: its kind, its comments, and that it is what ``rescue`` runs."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

import mtp_train as mtp
from adapters import write_adapter
from checkpoints import set_fields
from json_files import read_json, write_rows
from mtp_train.cli.main import main
from mtp_train.runs.resolve import recipe_of
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.write_recipe import settings_of
from runs import Capture, document, refusal, tree, write_headless, write_inputs


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("with_data", [True, False])
def test_the_recipe_is_what_rescue_runs(inputs: Path, with_data: bool, capfd: Capture) -> None:
    finetune = inputs / "finetune"
    base = inputs / "base"
    data = [str(inputs / "chats.jsonl")] if with_data else []
    said = ["--trunk", finetune, "--base", base, *(["--data", *data] if with_data else [])]
    written = document(["init", "my model.yaml", *said], capfd)
    assert recipe_of("my model.yaml") == recipe_of(
        settings_of("graft", str(finetune), str(base), "runs/my model", data)
    )
    # Neither command changes anything but the one file.
    assert tree(Path()).keys() == {"my model.yaml"}
    assert shlex.split(written["cure"]) == ["mtp-train", "check", "my model.yaml"]


def test_an_adapter_is_trained_on_its_base(inputs: Path) -> None:
    write_adapter(inputs / "base", Path("lora"))
    data = [inputs / "chats.jsonl"]
    mtp.write_recipe("lora.yaml", "lora", inputs / "base", data=data)
    expected = recipe_of(settings_of("graft", "lora", str(inputs / "base"), "runs/lora", [str(data[0])]))
    assert recipe_of("lora.yaml") == expected
    assert (expected.model.trunk, expected.model.adapter) == (str(inputs / "base"), "lora")


def test_a_model_with_a_head_retrains_its_own(inputs: Path) -> None:
    mtp.write_recipe("own.yaml", inputs / "base", data=[inputs / "chats.jsonl"])
    recipe = recipe_of("own.yaml")
    assert (recipe.head.init, recipe.model.head_from, recipe.gate_baseline) == ("native", None, "native")
    assert recipe.evaluate.arms == ("none", "native", "retrained")


# Llama's MTP head is drafted with by transformers only, EAGLE-3 by three servers.
@pytest.mark.parametrize(
    ("family_name", "num_layers", "kind", "init"),
    [
        ("qwen3_5", None, "mtp", "copy_last_layer"),
        # As many servers draft with the one as with the other.
        ("qwen2", 8, "mtp", "copy_last_layer"),
        ("llama", 8, "eagle3", "random"),
        ("qwen3_moe", 8, "eagle3", "random"),
    ],
)
def test_a_model_that_never_had_a_head_gets_one_that_servers_draft_with(
    family_name: str, num_layers: int | None, kind: str, init: str, inputs: Path, tmp_path: Path
) -> None:
    if family_name == "qwen3_5":
        trunk = write_inputs(tmp_path / "plain") / "finetune"
        set_fields(trunk, {"mtp_num_hidden_layers": 0})
    else:
        trunk = write_headless(tmp_path / "plain", family_name, num_layers)
    mtp.write_recipe("new.yaml", trunk, data=[inputs / "chats.jsonl"])
    recipe = recipe_of("new.yaml")
    assert (recipe.head.kind, recipe.head.init, recipe.head.draft_vocab) == (kind, init, None)
    assert (recipe.gate_baseline, recipe.evaluate.arms) == ("none", ("none", "retrained"))


def test_a_new_head_of_a_large_vocabulary_drafts_a_part_of_it(inputs: Path, tmp_path: Path) -> None:
    trunk = write_headless(tmp_path / "plain", "llama", 8)
    set_fields(trunk, {"vocab_size": 128_256})
    mtp.write_recipe("new.yaml", trunk, data=[inputs / "chats.jsonl"])
    assert recipe_of("new.yaml").head.draft_vocab == 32_000


def test_check_lists_the_kinds_of_a_new_head(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    trunk = write_headless(tmp_path / "plain", "olmo2")
    mtp.write_recipe("new.yaml", trunk, data=[inputs / "chats.jsonl"])
    found = mtp.check("new.yaml")
    assert found.kinds == dict.fromkeys(("eagle", "eagle3", "medusa"), ("vllm",)) | {"mtp": ("transformers",)}
    assert "\n  or with head.kind=eagle head.init=random: vllm\n" in str(found)
    assert "head.kind=eagle3" not in str(found)
    # A head that is grafted has the kind that it has.
    assert mtp.check("retrain_head").kinds == {}


def test_a_family_whose_head_has_no_counterpart_in_the_trunk_starts_from_random_weights(
    inputs: Path, tmp_path: Path
) -> None:
    trunk = write_inputs(tmp_path / "plain", "longcat_flash") / "finetune"
    set_fields(trunk, {"num_nextn_predict_layers": 0})
    mtp.write_recipe("new.yaml", trunk, data=[inputs / "chats.jsonl"])
    assert recipe_of("new.yaml").head.init == "random"


def test_the_file_names_its_schema_and_is_checked(inputs: Path, capfd: Capture) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base")
    first = Path("my.yaml").read_text(encoding="utf-8").splitlines()[0]
    schema = first.removeprefix("# yaml-language-server: $schema=")
    assert read_json(Path(schema))["properties"].keys() >= {"model", "head"}
    assert main(["check", "my.yaml", "--show", "recipe"]) == 0
    assert "run_dir: runs/my\n" in capfd.readouterr().out


def test_records_are_shown_as_the_model_reads_them(inputs: Path, capfd: Capture) -> None:
    """Targets of the sources' own responses are marked; answers to come are empty."""
    turns = [("user", "What?"), ("assistant", "That."), ("user", "Why?"), ("assistant", "So.")]
    rows = [{"q": [{"role": role, "content": f"{text} {n}"} for role, text in turns], "group": n} for n in range(30)]
    write_rows(Path("a.jsonl"), rows)
    columns = ["--data", "a.jsonl", "--columns", "messages=q"]
    document(["init", "my.yaml", "--trunk", inputs / "finetune", "--base", inputs / "base", *columns], capfd)
    assert recipe_of("my.yaml").data.sources[0].columns == {"messages": "q"}
    assert main(["check", "my.yaml", "--show", "data", "data.regenerate=null"]) == 0
    first, *others = capfd.readouterr().out.split("--- ")[1:]
    assert len(others) == 2
    number = first.partition("What? ")[2].partition("<")[0]
    assert first.rstrip().endswith(
        f"<|im_start|>user\nWhat? {number}<|im_end|>\n<|im_start|>assistant\n«That. {number}<|im_end|>»\n"
        f"<|im_start|>user\nWhy? {number}<|im_end|>\n<|im_start|>assistant\n«So. {number}<|im_end|>»"
    ), first
    assert main(["check", "my.yaml", "--show", "data"]) == 0
    assert "assistant\n«»\n" in capfd.readouterr().out


def test_the_number_of_processes_is_planned_for_and_resumes_with_another(inputs: Path, capfd: Capture) -> None:
    document(["init", "my.yaml", "--trunk", inputs / "finetune", "--base", inputs / "base", "--processes", "2"], capfd)
    assert mtp.check("my.yaml").plan.world_size == 2
    run_dir = Path("run")
    RunDirectory(run_dir).claim(recipe_of("my.yaml", {"run_dir": "run"}), {}, {})
    RunDirectory(run_dir).require_ours(recipe_of("my.yaml", {"run_dir": "run", "train.processes": 4}))


def test_an_existing_file_is_refused(inputs: Path, capfd: Capture) -> None:
    Path("my.yaml").write_text("mine")
    said = ["--trunk", inputs / "finetune", "--base", inputs / "base"]
    assert "my.yaml: already exists; expected a new path for the recipe." in refusal(["init", "my.yaml", *said], capfd)
    assert Path("my.yaml").read_text() == "mine"


@pytest.mark.parametrize(
    ("out", "trunk", "more", "says"),
    [
        ("no/my.yaml", "finetune", ["--base", "base"], "no directory no; expected one to write the recipe to"),
        ("my.yaml", "nowhere", [], "nowhere"),
        ("my.yaml", "finetune", [], "Add --base BASE; if that has no head either"),
        ("my.yaml", "lora", [], "a peft adapter, and no base is named; expected the checkpoint"),
        ("my.yaml", "finetune", ["--base", "finetune"], "expected a complete head"),
        ("my.yaml", "finetune", ["--base", "base", "--data", "demo:prompts"], "the demo's data"),
    ],
)
def test_wrong_input_writes_nothing(
    out: str, trunk: str, more: list[str], says: str, inputs: Path, tmp_path: Path, capfd: Capture
) -> None:
    write_adapter(inputs / "base", tmp_path / "adapters" / "lora")
    places = {"lora": tmp_path / "adapters" / "lora", "base": inputs / "base", "finetune": inputs / "finetune"}
    argv = ["init", out, "--trunk", places.get(trunk, trunk), *(places.get(word, word) for word in more)]
    assert says in refusal(argv, capfd)
    assert list(tmp_path.glob("*.yaml")) == []


def test_a_base_that_the_card_names_is_proposed(inputs: Path, tmp_path: Path, capfd: Capture) -> None:
    trunk = write_inputs(tmp_path / "named") / "finetune"
    (trunk / "README.md").write_text("---\nbase_model: Qwen/Some-Model\n---\n")
    assert "Add --base Qwen/Some-Model; if" in refusal(["init", "my.yaml", "--trunk", trunk], capfd)
