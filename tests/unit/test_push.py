from __future__ import annotations

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoConfig, AutoProcessor, CLIPImageProcessorPil, GenerationConfig, LlavaProcessor

from byte_tokenizer import CHATML, byte_tokenizer
from checkpoints import base_and_finetune, set_count, wrap_as_vision_language
from mtp_train.cli.main import main
from mtp_train.job.checkpoints.push import published_files
from mtp_train.weights.files import open_checkpoint


class Commit:
    commit_url = "https://huggingface.co/someone/model/commit/1"


class Hub:
    """Stands in for ``HfApi`` and keeps what it was asked for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def __call__(self) -> Hub:
        return self

    def create_repo(self, repo_id: str, **settings: Any) -> None:
        self.calls.append(("create_repo", {"repo_id": repo_id, **settings}))
        if self.error is not None:
            raise self.error

    def upload_folder(self, **settings: Any) -> Commit:
        self.calls.append(("upload_folder", settings))
        return Commit()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    stub = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", stub)
    return stub


@pytest.fixture
def export(tmp_path: Path) -> Path:
    base, _ = base_and_finetune(tmp_path, "qwen3_5")
    (base / "README.md").write_text("# card\n")
    for stray in ("optimizer.pt", ".hidden", "checkpoint-1/model.safetensors"):
        (base / stray).parent.mkdir(exist_ok=True)
        (base / stray).write_text("x")
    return base


def test_a_dry_run_says_what_would_be_uploaded_and_uploads_nothing(
    export: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(export), "someone/model"]) == 0
    printed = capsys.readouterr().out
    size = (export / "model.safetensors").stat().st_size
    assert f"{size:,}  model.safetensors" in printed
    assert "Nothing was uploaded. Add --yes" in printed
    assert "optimizer.pt" not in printed
    assert hub.calls == []


def test_yes_uploads_the_same_files_to_a_private_repository(
    export: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["push", str(export), "someone/model", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert main(["push", str(export), "someone/model", "--yes", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done == planned | {"uploaded": True, "url": Commit.commit_url}
    (created, creation), (uploaded, upload) = hub.calls
    assert (created, creation) == ("create_repo", {"repo_id": "someone/model", "private": True, "exist_ok": True})
    assert (uploaded, upload["repo_id"], upload["folder_path"]) == ("upload_folder", "someone/model", export)
    assert upload["allow_patterns"] == list(planned["files"])
    assert {"config.json", "model.safetensors", "README.md"} <= planned["files"].keys()
    assert planned["total_bytes"] == sum(planned["files"].values())


@pytest.mark.parametrize("yes", [[], ["--yes"]])
def test_a_checkpoint_without_a_healthy_head_is_refused(
    yes: list[str], export: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    finetune = export.parent / "finetune"
    assert main(["push", str(finetune), "someone/model", *yes]) == 2
    message = capsys.readouterr().err
    assert f"{finetune}: holds no head tensors" in message
    assert f"Run 'mtp-train graft {finetune} --from BASE" in message
    set_count(export, "mtp_num_hidden_layers", None)
    assert main(["push", str(export), "someone/model", *yes]) == 2
    message = capsys.readouterr().err
    assert "its config does not declare the head that it holds; expected" in message
    cure = shlex.split(message.split("Run '")[1].split("'")[0])
    assert main(cure[1:]) == 0
    assert main(["push", cure[-1], "someone/model", *yes]) == 0
    assert [name for name, _ in hub.calls] == (["create_repo", "upload_folder"] if yes else [])


def test_what_the_hub_refuses_is_told_with_the_way_to_log_in(
    export: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.error = OfflineModeIsEnabled("offline")
    assert main(["push", str(export), "someone/model", "--yes"]) == 2
    message = capsys.readouterr().err
    assert "someone/model: the hub refused the upload (OfflineModeIsEnabled: offline); expected" in message
    assert "hf auth login" in message
    assert main(["push", str(export), "some one/mo del"]) == 2
    assert "expected the name of a repository. Write OWNER/NAME." in capsys.readouterr().err


def test_only_what_a_model_repository_needs_is_uploaded_and_the_rest_is_named(
    export: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((export / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_own.Model", "AutoConfig": "other/repo--configuration.Config"}
    (export / "config.json").write_text(json.dumps(config))
    private = {
        "chats.jsonl": "secret",
        "notes/plan.md": "secret",
        "my_config.json": "{}",
        "train.py": "secret",
        "report.json": "{}",
        "model.safetensors.bak": "",
    }
    public = {
        "modeling_own.py": "from .layers_own import Layer\nfrom . import helpers\nimport torch",
        "layers_own.py": "",
        "helpers.py": "",
        "tokenizer.json": "{}",
        "vocab.json": "{}",
        "merges.txt": "",
        "preprocessor_config.json": "{}",
        "video_preprocessor_config.json": "{}",
        "chat_template.jinja": "",
        "additional_chat_templates/tools.jinja": "",
        "generation_config.json": "{}",
        "hf_quant_config.json": "{}",
        "LICENSE": "",
        "figures/tau.png": "",
        "README.md": "![tau](figures/tau.png)",
    }
    for name, content in {**private, **public}.items():
        (export / name).parent.mkdir(exist_ok=True)
        (export / name).write_text(content)
    assert main(["push", str(export), "someone/model", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["files"].keys() == {*public, "config.json", "model.safetensors"}
    assert sorted(planned["left_out"]) == sorted(private)
    assert main(["push", str(export), "someone/model"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed.split("Left out, as no model needs them: ")[1] for name in private)


OPENED: list[str] | None = None


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and OPENED is not None and isinstance(args[0], str | Path):
        OPENED.append(str(args[0]))


# A hook cannot be removed again.
sys.addaudithook(_note_open)


@contextmanager
def opened_files() -> Iterator[list[str]]:
    """Collect the paths of all files that Python opens in the block."""
    global OPENED
    OPENED = []
    try:
        yield OPENED
    finally:
        OPENED = None


def write_processor(directory: Path, *, in_one_file: bool) -> None:
    """Write a processor of images and text: as transformers 5 does, or with the files of older releases."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=28, image_mean=[0.1, 0.2, 0.3])
    if in_one_file:
        LlavaProcessor(images, tokenizer, patch_size=14, chat_template=CHATML).save_pretrained(directory)
        return
    tokenizer.save_pretrained(directory)
    images.save_pretrained(directory)
    file = directory / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"processor_class": "LlavaProcessor", "patch_size": 14}))
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": CHATML}))


def loaded(directory: Path) -> dict[str, Any]:
    """Load all but the weights of a vision-language model."""
    processor = AutoProcessor.from_pretrained(directory)
    text = processor.apply_chat_template([{"role": "user", "content": "<image> what?"}], add_generation_prompt=True)
    return {
        "images": processor.image_processor.to_dict(),
        "text": text,
        "tokens": processor.tokenizer(text)["input_ids"],
        "config": AutoConfig.from_pretrained(directory).to_dict(),
        "generation": GenerationConfig.from_pretrained(directory).to_dict(),
    }


@pytest.mark.parametrize("in_one_file", [True, False])
def test_all_files_that_load_a_vision_language_model_are_uploaded(tmp_path: Path, in_one_file: bool) -> None:
    export, _ = base_and_finetune(tmp_path, "qwen3_5")
    wrap_as_vision_language(export)
    write_processor(export, in_one_file=in_one_file)
    GenerationConfig(temperature=0.7, do_sample=True).save_pretrained(export)
    with opened_files() as opened:
        whole = loaded(export)
    checkpoint = open_checkpoint(export)
    sizes = {path.name: path.stat().st_size for path in export.iterdir()}
    published = published_files(checkpoint, sizes)
    read = {Path(path).name for path in opened if Path(path).parent == export}
    processor = "processor_config.json" if in_one_file else "preprocessor_config.json"
    assert {"config.json", "generation_config.json", processor} <= read
    assert read <= set(published)
    # Some readers are not Python's: what was published loads alone, and gives the same.
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in published:
        shutil.copy(export / name, copy / name)
    assert loaded(copy) | {"config": None} == whole | {"config": None}
    (copy / processor).unlink()
    with pytest.raises((OSError, ValueError)):
        loaded(copy)
