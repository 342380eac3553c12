from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from checkpoints import base_and_finetune
from mtp_train.job import model_card
from mtp_train.job.model_card import write_card, write_graft_card, write_merge_card
from mtp_train.recipe.loading import dump_recipe
from report_samples import SAMPLE, at_depths
from runs import tiny_recipe

HEADER = """\
license: mit
# what is written here stays as it is
language:
- no
base_model:
- someone/older
- someone/oldest
datasets: [a/b]
"""


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
    (tmp_path / "report.json").write_text(json.dumps(SAMPLE.to_json()))
    record(tmp_path)
    return tmp_path


def record(directory: Path, trunk: str | None = None, base: str | None = None) -> None:
    """Write the provenance; a name stands for a checkpoint of the hub."""
    found = {
        "trunk": identity(trunk or str(directory / "finetune"), directory / "finetune", trunk and "c0ffee1234"),
        "head_from": identity(base or str(directory / "base"), directory / "base", base and "abc"),
        "versions": {"mtp-train": "1.2"},
    }
    (directory / "provenance.json").write_text(json.dumps(found))


def written(directory: Path) -> tuple[dict[str, Any], str, str]:
    """Write the card; return its header as values and as text, and what is below it."""
    write_card(directory, directory / "export")
    _, header, body = (directory / "export" / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(header), header, body


def test_a_card_tells_acceptance_data_engines_and_recipe(directory: Path) -> None:
    fields, _, body = written(directory)
    assert fields == {"library_name": "transformers", "tags": ["mtp", "speculative-decoding"]}
    assert body.startswith("\n# finetune, with its MTP head\n")
    assert "| arm | tau [95 %] | groups | by position | tokens/s | speedup | repeats | entropy |" in body
    assert "| retrained | 3.44 [3.38, 3.50] | 12 | .88 .82 .74 | 1,691.2 | 2.21x | 0.2 % | 0.38 |" in body
    assert "| vanilla \\* | 2.41 " in body
    assert "| ceiling + | 3.58 " in body
    assert "Lossless: 48 of 48 outputs equal plain decoding token for token." in body
    assert "Gate: Tau 3.44 against 1.33: the gain lies above 0." in body
    assert "- started from: the head of `base`\n- trained on: the model's own answers to the prompts of" in body
    assert "to the prompts of `(a file)`" in body
    assert """vllm serve . --speculative-config '{"method":"mtp","num_speculative_tokens":2}'""" in body
    assert "max_steps: 4" in body


def test_the_commands_of_a_card_draft_as_many_tokens_as_its_report_recommends(directory: Path) -> None:
    report = at_depths(SAMPLE, {1: (1.1, 1.3), 3: (0.9, 1.2)})
    (directory / "report.json").write_text(json.dumps(report.to_json()))
    assert '"num_speculative_tokens":1}' in written(directory)[2]


def test_a_card_says_nothing_of_the_machine(directory: Path) -> None:
    assert str(directory) in (directory / "recipe.yaml").read_text()
    _, header, body = written(directory)
    assert str(directory.parent) not in header + body
    assert "10.0.0.1" not in body
    assert "chats.jsonl" not in body


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("HuggingFaceH4/ultrachat_200k", "HuggingFaceH4/ultrachat_200k"),
        ("demo:prompts", "demo:prompts"),
        ("customers/acme.jsonl", "(a file)"),
        ("customers.parquet", "(a file)"),
        ("/data/customers", "(a file)"),
        ("s3://bucket/customers", "(a file)"),
        ("data/customers/acme", "(a file)"),
    ],
)
def test_a_card_names_data_sets_of_the_hub_only(path: str, named: str) -> None:
    assert model_card._public_data(path) == named


def test_a_directory_of_ones_own_is_no_data_set_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "customers" / "acme").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert model_card._public_data("customers/acme") == "(a file)"


def test_the_trunks_own_card_stays_and_the_linked_file_is_not_written_to(directory: Path) -> None:
    own = directory / "finetune" / "README.md"
    own.write_text(f"---\n{HEADER}---\n# Mine\n\nWords \\1 of mine.\n")
    (directory / "export" / "README.md").hardlink_to(own)
    before = own.read_text()
    fields, header, body = written(directory)
    assert own.read_text() == before
    assert header.startswith(HEADER)
    assert (fields["license"], fields["tags"]) == ("mit", ["mtp", "speculative-decoding"])
    assert body.startswith("# Mine\n\nWords \\1 of mine.\n\n<!-- mtp-train -->\n")
    once = (directory / "export" / "README.md").read_text()
    written(directory)
    assert (directory / "export" / "README.md").read_text() == once


@pytest.mark.parametrize("entry", ["base_model: x/y", "base_model:\n- x/y", "base_model:\n  - x/y\n  - z/w"])
def test_a_trunk_of_the_hub_is_the_base_model(entry: str, directory: Path) -> None:
    record(directory, trunk="someone/tuned", base="maker/base")
    (directory / "export" / "README.md").write_text(f"---\nlicense: mit\n{entry}\ntags:\n- mine\n---\n# Mine\n")
    fields, _, body = written(directory)
    expected = {"license": "mit", "tags": ["mine"], "base_model": "someone/tuned", "library_name": "transformers"}
    assert fields == expected
    assert "`someone/tuned@c0ffee1`" in body


def test_a_local_trunk_names_the_base_and_carries_its_licence_over(directory: Path) -> None:
    record(directory, base="maker/base")
    licence = "license: other\nlicense_name: maker-1\nlicense_link: https://maker/licence\n"
    (directory / "base" / "README.md").write_text(f"---\n{licence}pipeline_tag: text-generation\n---\n# Base\n")
    fields, header, _ = written(directory)
    assert fields["base_model"] == "maker/base"
    assert licence in header
    assert "pipeline_tag" not in fields


def test_a_header_that_is_no_yaml_loses_nothing(directory: Path) -> None:
    (directory / "export" / "README.md").write_text("---\nlicense: [mit\n---\n# Mine\n")
    write_card(directory, directory / "export")
    assert "license: [mit\n" in (directory / "export" / "README.md").read_text()


def test_a_graft_has_a_card_without_figures(directory: Path) -> None:
    licence = "license: other\nlicense_name: maker-1\n"
    (directory / "base" / "README.md").write_text(f"---\n{licence}---\n# Base\n")
    trunk = identity(str(directory / "finetune"), directory / "finetune")
    base = identity("maker/base", directory / "base", "c0ffee1234")
    for _ in range(2):
        write_graft_card(directory / "export", trunk, base, str(directory / "lora"), 2)
        text = (directory / "export" / "README.md").read_text()
        assert f"base_model: maker/base\n{licence}" in text
        assert "The weights of `finetune`, with the adapter `lora` merged into them" in text
        assert "head of `maker/base@c0ffee1` as it is" in text
        assert """vllm serve . --speculative-config '{"method":"mtp","num_speculative_tokens":2}'""" in text
        assert text.count("## MTP head") == 1
        assert "### Acceptance" not in text
        assert str(directory) not in text


def test_a_merged_checkpoint_has_a_card_with_or_without_a_head(directory: Path) -> None:
    card = directory / "export" / "README.md"
    for tags, depths in (("", None), ("tags:\n  - mtp\n  - speculative-decoding\n", 2)):
        card.write_text("---\nlicense: mit\n---\n# Mine\n")
        trunk = identity("maker/base", directory / "base", "c0ffee1234")
        write_merge_card(directory / "export", trunk, str(directory / "lora"), depths)
        text = card.read_text()
        header = f"license: mit\nbase_model: maker/base\nlibrary_name: transformers\n{tags}"
        assert text.startswith(f"---\n{header}---\n# Mine\n")
        assert "The weights of `maker/base@c0ffee1`, with the adapter `lora` merged into them" in text
        assert ("its multi-token-prediction head as it is" in text) is (depths is not None)
        assert ("vllm serve ." in text) is (depths is not None)
        assert str(directory) not in text


def test_a_report_without_a_gate_or_other_trunks_has_its_card(directory: Path) -> None:
    arms = {name: SAMPLE.arms[name] for name in ("none", "retrained")}
    report = replace(SAMPLE, arms=arms, gate=None)
    (directory / "report.json").write_text(json.dumps(report.to_json()))
    _, _, body = written(directory)
    assert "Gate:" not in body
    assert "Recorded earlier" not in body
