from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoints import base_and_finetune
from json_files import write_json
from mtp_train.recipe.loading import dump_recipe
from mtp_train.runs.export import write_card, write_untrained_card
from report_samples import SAMPLE, at_depths
from runs import tiny_recipe


def identity(name: str, path: Path, revision: str | None = None) -> dict[str, Any]:
    return {"name": name, "path": str(path), "revision": revision, "sha256": {}}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A base, a stand-in for a run's export, and the run's records."""
    base_and_finetune(tmp_path, "qwen3_5")
    (tmp_path / "base").rename(tmp_path / "export")
    (tmp_path / "base").mkdir()
    recipe = tiny_recipe(tmp_path, tmp_path / "run", data__regenerate={"endpoint": "http://10.0.0.1:8000/v1"})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
    write_json(tmp_path / "report.json", SAMPLE.to_json())
    record(tmp_path)
    return tmp_path


def record(directory: Path, trunk: str | None = None, base: str | None = None) -> None:
    """Write the provenance; a name stands for a checkpoint of the hub."""
    found = {
        "trunk": identity(trunk or str(directory / "finetune"), directory / "finetune", trunk and "c0ffee1234"),
        "head_from": identity(base or str(directory / "base"), directory / "base", base and "abc"),
        "versions": {"mtp-train": "1.2"},
    }
    write_json(directory / "provenance.json", found)


def card(directory: Path) -> tuple[dict[str, Any], str]:
    """Return the header of the export's card, and the text below it."""
    _, header, body = (directory / "export" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), body


def written(directory: Path) -> tuple[dict[str, Any], str]:
    """Write the card, and return it."""
    write_card(directory, directory / "export")
    return card(directory)


def test_a_card_tells_acceptance_engines_and_the_upload(directory: Path) -> None:
    fields, body = written(directory)
    assert fields == {"library_name": "transformers", "tags": ["mtp", "speculative-decoding"]}
    assert body.startswith("\n# finetune, with its MTP head\n")
    assert (
        "Tau 3.44 against 1.33: the gain lies above 0. 48 of 48 outputs equal plain decoding token for token." in body
    )
    assert "retrained for them with mtp-train 1.2, started from the head of `base`." in body
    assert """vllm serve . --speculative-config '{"method":"mtp","num_speculative_tokens":2}'""" in body
    assert body.endswith("hf upload OWNER/NAME . --private\n```\n")


def test_the_commands_of_a_card_draft_as_many_tokens_as_its_report_recommends(directory: Path) -> None:
    report = at_depths(SAMPLE, {1: (1.1, 1.3), 3: (0.9, 1.2)})
    write_json(directory / "report.json", report.to_json())
    assert '"num_speculative_tokens":1}' in written(directory)[1]


def test_a_card_says_nothing_of_the_machine(directory: Path) -> None:
    assert str(directory) in (directory / "recipe.yaml").read_text()
    written(directory)
    text = (directory / "export" / "README.md").read_text()
    assert str(directory.parent) not in text
    assert "10.0.0.1" not in text
    assert "chats.jsonl" not in text


def test_a_trunk_of_the_hub_is_the_base_model_and_before_it_the_heads(directory: Path) -> None:
    record(directory, base="maker/base")
    assert written(directory)[0]["base_model"] == "maker/base"
    record(directory, trunk="someone/tuned", base="maker/base")
    fields, body = written(directory)
    assert fields["base_model"] == "someone/tuned"
    assert "`someone/tuned@c0ffee1`" in body


def test_a_graft_has_a_card_without_figures(directory: Path) -> None:
    trunk = identity(str(directory / "finetune"), directory / "finetune")
    base = identity("maker/base", directory / "base", "c0ffee1234")
    write_untrained_card(directory / "export", trunk, base, str(directory / "lora"), 2)
    fields, body = card(directory)
    assert fields["base_model"] == "maker/base"
    assert "the weights of `finetune`, with the adapter `lora` merged into them" in body
    assert "head of `maker/base@c0ffee1` as it is" in body
    assert "It was not trained for these weights" in body
    assert """vllm serve . --speculative-config '{"method":"mtp","num_speculative_tokens":2}'""" in body
    assert "## Acceptance" not in body
    assert str(directory) not in body
