"""What messages and reports propose runs as it is printed, from an empty directory, on tiny models.

``proposals()`` reads every proposal of a command or of a change of a recipe from the product's source. A new one fails
here by its text until a test pastes it.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import mtp_train as mtp
from adapters import write_adapter
from byte_tokenizer import CHATML, byte_tokenizer
from checkpoints import set_fields
from documents import sentence
from json_files import write_rows
from mtp_train.checkpoints.suggestions import download_command
from mtp_train.cli.main import build_parser, main, parse
from mtp_train.data.tokenize import Document
from mtp_train.errors import OutOfMemoryError
from mtp_train.recipe.loading import load_recipe
from mtp_train.runs import pipeline, rescue, run
from mtp_train.runs.training import part_documents
from proposals import COVERED, PASTED, changes_of, made_of, pastes, proposals
from runs import (
    Capture,
    document,
    overrides_of,
    refusal,
    shorten_probes,
    tiny_recipe,
    write_headless,
    write_inputs,
    write_recipe,
)

# The built-in prompts are long for a tokenizer of bytes; all else is as small as it can be.
TINY = overrides_of(
    head__num_depths=1,
    data__regenerate={"max_prompts": 4, "max_new_tokens": 4, "temperature": 0.0},
    data__seq_len_tokens=2048,
    data__holdout=0.4,
    train__max_steps=1,
    train__tokens_per_step=2048,
    train__warmup_steps=0,
    train__precision="fp32",
    evaluate__prompts=6,
    evaluate__max_new_tokens=4,
    track__wandb="off",
)
_FIT = "unit/test_check_memory.py::test_a_run_that_does_not_fit_names_settings_that_do_and_nothing_else"
_OF_A_DRAFT = "e2e/test_other_kinds.py::test_what_the_grafted_head_decides_is_refused_with_what_to_write"
_GGUF = "unit/test_gguf_draft.py::test_a_run_on_a_gguf_file_is_told_to_export_one"
ELSEWHERE = {
    # Proposal, and the test that pastes it.
    "Write head.draft_vocab: null.": _OF_A_DRAFT,
    "Write head.num_depths: {}.": _OF_A_DRAFT,
    **dict.fromkeys(
        (
            *("data.regenerate.endpoint=http://localhost:8000/v1", "data.regenerate.batch_size=null"),
            *("gate.enabled=false", "model.offload=null", "model.offload=cpu", "model.quantization={}", "head.lora={}"),
            *("train.micro_batch_sequences=1", "train.gradient_checkpointing=true", "train.processes={}"),
            "train.states.endpoint=http://localhost:8000/v1",
        ),
        _FIT,
    ),
    "mtp-train generate {} --show-drafts --chat": (
        "e2e/test_generate.py::test_a_conversation_reads_its_turns_from_stdin"
    ),
    "mtp-train generate TRUNK --head {} --prompt Hello": (
        "e2e/test_other_kinds.py::test_it_is_trained_and_its_export_is_a_draft_model_that_drafts_losslessly"
    ),
    "Use --out {}.": "unit/test_gguf_fit.py::test_an_output_is_named_as_its_input_is",
    "mtp-train export {} --out {} --gguf q8_0 && llama-server -m {} -md {}/{}-*.gguf": _GGUF,
    "mtp-train export {} --head-only --out {}": (
        "unit/test_gguf_fit.py::test_the_head_of_a_gguf_file_is_exported_by_the_command_that_is_named"
    ),
    "Start llama-server with --spec-type draft-mtp (draft-eagle3 with -md), both with --metrics or neither; ask vLLM "
    "for one answer at a time first: --concurrency 1 4.": (
        "unit/test_study_endpoint.py::test_requests_side_by_side_have_a_speed_though_no_counts"
    ),
    "Add --chat.": "e2e/test_template_variables.py::test_generate_writes_the_prompt_with_the_variables",
    "mtp-train graft {} --from BASE --out {}": "unit/test_gguf_model.py::test_a_head_of_a_checkpoint_joins_its_trunk",
}
_PACKAGE = "installs a package"
_PLACES = "has placeholders alone"
_LATE = "of a stage of a run, a server or another drafter"
NOT_PASTED = {
    "{}; reasons: mtp-train check RECIPE --show recipe": _PLACES,
    "mtp-train probe FINE_TUNE --from BASE --data chats.jsonl": _PLACES,
    # Proposal, and why no test runs it; its words are parsed all the same.
    "compressed by Zstandard: pip install zstandard": _PACKAGE,
    "Run 'pip install bitsandbytes', or use the unquantised weights.": _PACKAGE,
    'Run pip install "mtp-train[deepspeed]".': _PACKAGE,
    "Run pip install 'transformers>={}'.": _PACKAGE,
    "Run pip install 'transformers>=5.24'.": _PACKAGE,
    "Run pip install -U flash-linear-attention.": _PACKAGE,
    "Run pip install flash-linear-attention where you train.": _PACKAGE,
    "Run 'pip install {}'.": _PACKAGE,
    "Run a recipe by its name: mtp-train run NAME, or on several processes accelerate launch --config_file PATH -m "
    "mtp_train NAME.": _PLACES,
    "Name it beside its trunk: 'mtp-train evaluate TRUNK --head {} --out evaluation'.": _PLACES,
    "Write one of these, or give the drafter to generate, evaluate or compare by --head.": "names options, see "
    "unit/test_head_kinds.py",
    "Pass it to generate as --head, and to rescue as --from.": "names options, see e2e/test_assistant_run.py",
    "mtp-train evaluate {}{} --out {}": _LATE,
    "Add --endpoint URL.": _LATE,
    "Add --num_processes {} to accelerate launch (on CPUs with cpu_ddp.yaml).": _LATE,
    "Name the trunk: --tokenizer CKPT.": _LATE,
    "Use --gguf q8_0.": "for weights that f16 does not hold",
    "Write it as --chat-template-kwargs NAME=VALUE.": _LATE,
    "mtp-train graft {} --from {} --out {} && llama-server -m {}": "needs llama-server",
    "train.max_steps=500": "takes hours of training",
    "sed -i {} {}": "edits a config, see unit/test_whole_trunk.py",
    "`head.init: {}`": "tells what a head was made from",
    "train.precision={}": "is not printed",
    "Write {}: and its file, or the id of its dataset on the hub.": "names a suite",
    "Launch with {}, or write model.offload: null.": _LATE,
    "Name another directory in train.hidden_cache.directory, take fewer documents, or write train.hidden_cache: "
    "null.": _LATE,
    "Start a new head with head.init: random.": _LATE,
    "Write head.init: random.": _LATE,
    "To retrain the head all the same, choose another --out and add --set train.max_steps=500": _LATE,
    "Look at it with {}, or train all the same with --set train.max_steps=500.": _LATE,
    "Write data.responses: null.": _LATE,
    "Write head.convention: {}.": _LATE,
    "Write objective.unroll: exact.": _LATE,
    "wired in another way on {} than it is trained and measured here, so that fewer drafts may be accepted there; "
    "head.convention={} trains and measures for {}": _LATE,
}
LAUNCH = ["accelerate", "launch", "-m", "mtp_train"]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")


def paste(command: str) -> list[int]:
    """Run a printed command in this process, a run with tiny settings; return the exit code of each part."""
    PASTED.append(command)
    codes = []
    for part in command.split(" && "):
        words = shlex.split(part)
        if words[:4] == LAUNCH:
            # The gate may refuse a head after one step.
            codes.append(main([*words[4:], *TINY]))
        else:
            assert words[0] == "mtp-train"
            codes.append(main([*words[1:], *(["--set", *TINY] if words[1] == "rescue" else [])]))
    return codes


def probes_say_retrain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten probes, and fix their verdict: the random head of a base is no fault, and what they find is chance."""
    shorten_probes(monkeypatch)
    monkeypatch.setattr(rescue, "is_at_fault", lambda own: False)
    monkeypatch.setattr(rescue, "judge", lambda found: ("retrain", "as the test says"))


def cure(checkpoint: Path, base: Path | None = None) -> str:
    found = mtp.inspect(checkpoint, base).cure
    assert found is not None
    return found


@pastes("mtp-train inspect {}{}")
def test_a_head_that_a_tool_dropped_with_its_declaration_is_found_by_the_base(own_inputs: Path, tmp_path: Path) -> None:
    inputs = own_inputs
    set_fields(inputs / "finetune", {"mtp_num_hidden_layers": 0})
    proposed = cure(inputs / "finetune")
    assert proposed == f"mtp-train inspect {inputs / 'finetune'} --base BASE"
    assert paste(proposed.replace("BASE", str(inputs / "base"))) == [0]
    assert cure(inputs / "finetune", inputs / "base").startswith("mtp-train graft ")
    # A new head would be second best, as its recipe states.
    written = mtp.write_recipe("new.yaml", inputs / "finetune", data=[inputs / "chats.jsonl"])
    assert "If this model's base has one, write the recipe with --base BASE." in str(written)
    headless = write_headless(tmp_path / "llama", "llama")
    assert mtp.write_recipe("llama.yaml", headless, data=[inputs / "chats.jsonl"]).notes == ()
    assert cure(headless).startswith("mtp-train init ")


@pastes(
    "mtp-train graft {} --from {} --out {}", "mtp-train probe {} --from {}", "mtp-train rescue {} --from {}{} --out {}"
)
def test_a_lost_head_is_grafted_measured_and_retrained_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    probes_say_retrain(monkeypatch)
    inputs = write_inputs(tmp_path / "in puts")
    grafting = cure(inputs / "finetune", inputs / "base")
    assert paste(grafting) == [0]
    probing = cure(Path(shlex.split(grafting)[-1]), inputs / "base")
    capsys.readouterr()
    assert paste(probing) == [0]
    retraining = capsys.readouterr().out.splitlines()[-1].removeprefix("next: ")
    assert paste(retraining) == [0]
    assert mtp.inspect(Path(shlex.split(retraining)[-1]) / "export", inputs / "base").status == "healthy"


@pastes("mtp-train export {} --out {}")
def test_an_undeclared_head_is_declared_as_printed(own_inputs: Path) -> None:
    base = own_inputs / "base"
    set_fields(base, {"mtp_num_hidden_layers": None})
    found = mtp.inspect(base)
    assert (found.status, found.head.declared_modules, found.head.present_modules) == ("undeclared", 0, 1)
    assert found.serves["vllm"] == "no: the head is there but config.json does not declare it"
    command = cure(base)
    assert paste(command) == [0]
    assert mtp.inspect(shlex.split(command)[-1]).status == "healthy"


@pastes("mtp-train init {} --trunk {} && accelerate launch -m mtp_train {}")
def test_a_graft_from_a_model_without_a_head_names_the_command_that_attaches_one(tmp_path: Path) -> None:
    trunk = write_headless(tmp_path / "inputs", "llama")
    with pytest.raises(mtp.CheckpointError) as refused:
        mtp.graft(trunk, trunk, "grafted")
    (command,) = re.findall(r"Attach one: (mtp-train .*)", str(refused.value))
    assert paste(command.partition(" && ")[0]) == [0]
    PASTED.append(command)
    assert main(["check", "finetune.yaml"]) == 0


def test_a_server_answers_the_prompts_of_a_recipe_that_was_written_before(inputs: Path) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"])
    for recipe in ("my.yaml", "retrain_head"):
        assert mtp.check(recipe, ["data.regenerate.endpoint=http://localhost:8000/v1"]).room.problem is None


@pastes(
    "mtp-train run {}",
    "mtp-train check {}{}",
    "# Check: mtp-train check THIS_FILE --processes N prints plan, memory, the engines that serve the result, the",
)
def test_the_launch_line_starts_the_run_that_was_planned(inputs: Path) -> None:
    written = mtp.write_recipe(
        "my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"], processes=4
    )
    assert paste(written.cure or "") == [0]
    planned = mtp.check("my.yaml", ["train.lr=1e-3"], processes=2, device="h100")
    assert planned.launch is not None
    words = shlex.split(planned.launch)
    assert words[:2] == LAUNCH[:2]
    assert Path(words[words.index("--config_file") + 1]).is_file()
    assert words[words.index("--num_processes") + 1] == "2"
    launched = mtp.check("my.yaml", words[words.index("mtp_train") + 2 :], device="h100")
    # The header of the recipe, and what it prints.
    PASTED.append(Path("my.yaml").read_text())
    assert paste("mtp-train check my.yaml --processes 4") == [0]
    alone = mtp.check(write_recipe(Path("tiny.yaml"), inputs, Path("run"), train__max_steps=1), {"train.select": None})
    assert alone.launch is not None
    assert paste(alone.launch) in ([0], [3])
    assert (launched.plan, launched.recipe.train) == (planned.plan, planned.recipe.train.replaced({"processes": 2}))


@pastes("mtp-train run {}")
def test_a_run_that_exported_nothing_is_finished_as_printed(inputs: Path, capfd: Capture) -> None:
    mtp.write_recipe("my.yaml", inputs / "finetune", inputs / "base", data=[inputs / "chats.jsonl"])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(pipeline, "_export", Mock(side_effect=RuntimeError("a crash")))
        with pytest.raises(RuntimeError, match="a crash"):
            mtp.run("my.yaml", [*TINY, "gate.enabled=false", "run_dir=half done"])
    assert main(["inspect", "half done"]) == 2
    message = capfd.readouterr().err
    (command,) = re.findall(r"Finish it with '(.*)', or name", message)
    PASTED.append(message)
    assert paste(command) == [0]
    assert main(["inspect", "half done"]) == 0


@pastes("mtp-train rescue {} --data {} --out rescued")
def test_the_demo_is_rescued_as_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_probes(monkeypatch)
    said = str(mtp.demo("my demo"))
    PASTED.append(said)
    assert paste(said.splitlines()[-1]) in ([0], [3])


@pastes(
    "mtp-train merge {} --adapter {} --out {}",
    "Run '{}' for a head that drafts for it, '{}' to see first whether that helps, or '{}'; in a recipe write "
    "model.trunk={} model.adapter={}.",
)
def test_an_adapter_in_the_place_of_a_model_is_probed_rescued_and_merged_as_printed(
    own_inputs: Path, monkeypatch: pytest.MonkeyPatch, capfd: Capture
) -> None:
    probes_say_retrain(monkeypatch)
    write_adapter(own_inputs / "base", Path("lora"))
    message = refusal(["inspect", "lora"], capfd)
    PASTED.append(message)
    commands = re.findall(r"'(mtp-train [^']*)'", message)
    assert [command.split(" ")[1] for command in commands] == ["rescue", "probe", "merge"]
    for command in commands[::-1]:
        # The adapter was made of a checkpoint that a user may write beside.
        assert paste(command) == [0], command
    recipe = write_recipe(Path("recipe.yaml"), own_inputs, Path("run"))
    changes = message.partition("in a recipe write ")[2].rstrip().removesuffix(".").split(" ")
    assert main(["check", str(recipe), *changes]) == 0


@pastes("Add 'data.regenerate={}': the trunk answers the prompts.")
def test_a_template_that_cannot_place_the_answers_leaves_them_to_the_trunk(own_inputs: Path, capfd: Capture) -> None:
    opened = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>bot\n")
    byte_tokenizer(opened).save_pretrained(own_inputs / "finetune")
    longer = {"train__tokens_per_step": 2048}
    check = ["check", write_recipe(Path("r.yaml"), own_inputs, Path("run"), **longer), "data.seq_len_tokens=1024"]
    message = refusal(check, capfd)
    PASTED.append(message)
    assert document([*check, *changes_of(message)], capfd)["fits"]


@pastes(
    "Name one, --head BASE, or --head ngram, which needs none; generate decodes without drafts by --mtp off.",
    "Add --base {}; if that has no head either, train a new one with the recipe attach_head.",
)
def test_a_model_without_its_head_is_decoded_and_planned_for_with_what_is_named(inputs: Path, capfd: Capture) -> None:
    generate = ["generate", str(inputs / "finetune"), "--prompt", "say 1", "--max-new-tokens", "2"]
    PASTED.append(refusal(generate, capfd))
    for words in ("--head BASE", "--head ngram", "--mtp off"):
        assert words in PASTED[-1]
        assert main([*generate, *words.replace("BASE", str(inputs / "base")).split(" ")]) == 0
    init = ["init", "r.yaml", "--trunk", str(inputs / "finetune"), "--data", str(inputs / "chats.jsonl")]
    PASTED.append(refusal([*init, "data.group_field=group"], capfd))
    assert main([*init, "data.group_field=group", "--base", str(inputs / "base")]) == 0


@pastes("Write data.regenerate: {}.")
def test_answers_alone_are_generated_as_printed(inputs: Path, capfd: Capture) -> None:
    recipe = write_recipe(Path("recipe.yaml"), inputs, Path("run"), train__tokens_per_step=2048)
    message = refusal(["regenerate", recipe], capfd)
    PASTED.append(message)
    short = ["data.regenerate.max_new_tokens=4", "data.regenerate.max_prompts=4", "data.seq_len_tokens=1024"]
    assert document(["regenerate", recipe, *changes_of(message), *short], capfd)["responses"] == 4


@pastes(
    "Write train.micro_batch_sequences: 1, then train.gradient_checkpointing: true; neither changes a result",
    "Write model.dtype: bfloat16, or model.offload: cpu; or launch with {} on several GPUs, which puts the trunk in "
    "shards.",
)
def test_what_needs_less_memory_is_a_recipe(inputs: Path) -> None:
    recipe = tiny_recipe(inputs, Path("run"), train__micro_batch_sequences=2)
    with pytest.raises(OutOfMemoryError) as found, run.memory_is_named(lambda: "train"):
        raise MemoryError
    PASTED.append(str(found.value))
    words = re.findall(r"([a-z]+\.[a-z_]+): (\w+)", PASTED[-1])
    assert len(words) == 4
    for field, value in words:
        assert load_recipe(recipe, [f"{field}={value}"]) != recipe


@pastes("  or with head.kind={}{}", " head.init=random")
def test_the_kinds_of_a_new_head_that_a_plan_lists_are_planned(tmp_path: Path, capfd: Capture) -> None:
    trunk = write_headless(tmp_path / "llama", "llama", num_layers=8)
    mtp.write_recipe("new.yaml", trunk, data=[tmp_path / "llama" / "chats.jsonl"])
    listed = str(mtp.check("new.yaml"))
    PASTED.append(listed)
    kinds = re.findall(r"^  or with (.*?): ", listed, re.MULTILINE)
    assert kinds
    for words in kinds:
        assert document(["check", "new.yaml", "head.draft_vocab=null", *words.split(" ")], capfd)["launch"], words


@pastes("Add data, or write train.select: null.")
def test_text_of_one_group_is_trained_on_whole_as_printed(inputs: Path) -> None:
    recipe = tiny_recipe(inputs, Path("run"), train__select={"every_steps": 2})
    documents = [Document([1, 2, 3], [True] * 3, "one", str(number)) for number in range(2)]
    with pytest.raises(mtp.MtpError) as refused:
        part_documents(recipe, documents)
    PASTED.append(str(refused.value))
    assert part_documents(load_recipe(recipe, changes_of(str(refused.value))), documents) == ([0, 1], [])


NEW = "model.head_from=null head.init=random evaluate.arms=[none,retrained] gate.baseline=none"
OF_ITS_OWN = "model.trunk=BASE model.head_from=null head.init=native evaluate.arms=[none,native,retrained]"
CHANGES = {
    # Proposal of a message, and what a recipe has in which it is printed.
    "Add data.holdout={}.": "data.holdout=1e-9 gate.enabled=false",
    "Add data.holdout={}{}, or records of other groups.": "data.holdout=0.15 gate.confidence=0.97",
    " evaluate.prompts={}": "data.holdout=0.15 gate.confidence=0.97 evaluate.prompts=2",
    "{}.columns={}": "data.sources.0.path=asked.jsonl data.group_field=null",
    "Add 'data.regenerate={}', and the trunk answers them, or name their column in columns.": (
        "data.sources.0.path=prompts.jsonl data.group_field=null data.seq_len_tokens=2048 train.tokens_per_step=2048"
    ),
    "Add data.regenerate=null to train on the text itself, or convert the source.": (
        "data.sources.0.path=texts.jsonl data.group_field=null data.regenerate={}"
    ),
    "Add {}=chats.jsonl data.group_field=null with a file of your own, or use mtp-train init, which fits a recipe to "
    "the model.": "data.sources.0.path=demo:prompts",
    "For example: train.lr=1.0e-3.": "train.lr",
    "Name it, or write head.init: native (the trunk has a head) or copy_last_layer (it has none).": (
        f"{OF_ITS_OWN} head.init=graft"
    ),
    "Write model.head_from: null.": f"{OF_ITS_OWN} model.head_from=BASE",
    "Write gate.baseline: auto{}.": (
        f"{OF_ITS_OWN} model.head_from=BASE gate.baseline=graft evaluate.arms=[none,native,graft,retrained]"
    ),
    "Write export.enabled: false.": (
        "study.objectives=[kl,ce] evaluate.arms=[graft,retrained,vanilla] model.trunk=BASE head.init=graft"
    ),
    "Write model.offload: null, or point model.trunk at the unquantised checkpoint.": (
        f"{OF_ITS_OWN} model.trunk=PACKED model.offload=cpu"
    ),
    "Write model.quantization: null, or point model.trunk at the unquantised checkpoint.": (
        f"{OF_ITS_OWN} model.trunk=PACKED model.quantization=8bit"
    ),
    "Write train.states: null.": (
        f'{OF_ITS_OWN} model.trunk=STREAMS train.states={{"endpoint":"http://localhost:8000/v1"}}'
    ),
    "Write {}: {}.": f"{NEW} head.num_depths=8",
    "Write head.lora: null.": f"{NEW} head.lora={{}}",
    "Write head.init: {}.": f"{NEW} head.kind=eagle head.init=copy_last_layer",
    "Write head.kind: mtp.": f"{NEW} head.kind=eagle3 model.trunk=SHALLOW",
    "Write head.kind: mtp: this family's releases have an MTP head.": f"{NEW} head.kind=eagle model.trunk=OTHER",
    "Write head.kind: {}, or head.init: random for a new head.": "head.kind=eagle",
    "Launch with {}; or write model.offload: null and use {}.": "model.offload=cpu --processes 2",
    "Write data.loss_positions: null for all.": "data.loss_positions=96",
    "Write one of these, or head.lora.targets: null for all.": 'head.lora.targets=["nope"]',
    "{}, or write data.responses: null.": "data.regenerate={} data.responses=nowhere data.seq_len_tokens=2048 "
    "train.tokens_per_step=4096",
    ", or write evaluate.arms: [{}]": "model.head_from=HEAD evaluate.arms=[none,graft,retrained,vanilla]",
}


@pytest.mark.parametrize("proposal", CHANGES)
def test_a_change_that_a_message_proposes_mends_the_recipe(
    proposal: str, inputs: Path, run_dir: Path, capfd: Capture
) -> None:
    for name, columns in (("asked", ("question", "answer")), ("prompts", ("prompt",)), ("texts", ("text",))):
        rows = [{column: sentence(f"{column} {row}") for column in columns} for row in range(16)]
        write_rows(Path(f"{name}.jsonl"), rows)
    Path("chats.jsonl").write_text(Path("prompts.jsonl").read_text().replace('"prompt"', '"text"'))
    places = {
        "BASE": inputs / "base",
        "HEAD": run_dir / "head",
        "OTHER": Path("other/base"),
        "STREAMS": Path("streams/base"),
        "SHALLOW": Path("other/finetune"),
        "PACKED": Path("packed"),
    }
    if "PACKED" in CHANGES[proposal]:
        shutil.copytree(inputs / "base", "packed")
        set_fields(Path("packed"), {"quantization_config": {"quant_method": "fp8"}})
    if "OTHER" in CHANGES[proposal]:
        write_inputs(Path("other"), "glm4_moe")
    if "STREAMS" in CHANGES[proposal]:
        write_inputs(Path("streams"), "deepseek_v4")
    if "SHALLOW" in CHANGES[proposal]:
        write_headless(Path("other"), "llama", num_layers=2)
    words = CHANGES[proposal]
    for name, place in places.items():
        words = words.replace(name, str(place))
    given = words.split(" ")
    check = ["check", str(write_recipe(Path("recipe.yaml"), inputs, Path("run")))]
    message = refusal([*check, *given], capfd)
    assert made_of(proposal, message), message
    changes = changes_of(message)
    assert changes
    changed = {word.partition("=")[0] for word in changes}
    kept = [word for word in given if word.partition("=")[0] not in changed]
    assert main([*check, *kept, *changes]) == 0, changes


@pytest.mark.parametrize("proposal", [one for one, why in NOT_PASTED.items() if why in (_PLACES, _LATE)])
def test_a_proposal_that_is_not_run_is_well_formed(proposal: str, inputs: Path) -> None:
    """A command in the grammar of the command line, a change in that of a recipe."""
    for command in re.findall(r"mtp-train ([a-z]+ [^,.']*)", proposal):
        words = command.replace("{}", "x").split()
        assert parse(build_parser(), words).command == words[0]
    values = {"head.convention={}": "head.convention=auto"}
    for change in changes_of(f"; expected x. {proposal}"):
        assert load_recipe(tiny_recipe(inputs, Path("run")), [values.get(change, change)]).run_dir == "run"


def test_no_proposal_is_forgotten() -> None:
    covered = {*COVERED, *CHANGES, *ELSEWHERE, *NOT_PASTED}
    assert sorted(proposals() - covered) == [], "paste them in a test, and name them here"
    assert sorted(covered - proposals()) == [], "no longer proposed"
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert f"def {name}(" in (Path(__file__).parents[1] / file).read_text()


@pastes("hf download {} --local-dir {} --force-download", "hf upload OWNER/NAME . --private")
def test_the_hubs_commands_are_commands_of_its_tool() -> None:
    """Without a network they fail (1), and as wrong usage they would end in 2."""
    Path("my model").mkdir()
    PASTED.extend(("hf upload OWNER/NAME . --private", download_command(Path("my model"), "OWNER/NAME")))
    for command in PASTED:
        assert by_hub(command) == (1, True)
    # A control.
    assert by_hub("hf download OWNER/NAME --localdir .")[0] == 2


def by_hub(command: str) -> tuple[int, bool]:
    argv = [sys.executable, "-m", "huggingface_hub.cli.hf", *shlex.split(command)[1:]]
    done = subprocess.run(argv, env={**os.environ, "HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False)
    return done.returncode, "offline mode" in done.stderr
