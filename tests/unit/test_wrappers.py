"""Trunks inside of vision-language models: what is told by their config, loaded, adapted, and given a head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rich.progress import Progress
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from adapters import write_adapter
from checkpoints import all_tensors, save_tensors, set_fields
from draft_models import CHOSEN, NUM_LAYERS
from json_files import write_json
from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.files import SINGLE_FILE, open_checkpoint
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.errors import UnsupportedModelError
from mtp_train.families.registry import WRAPPERS
from mtp_train.heads.build import fresh_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.runs.export import write_export
from mtp_train.trunk.load import Trunk, load_trunk
from tiny import random_tokens, tiny_trunk
from wrapped import save_wrapped

TOKENS_1T = random_tokens(12)
AROUND = {
    "gemma3": "gemma3_text",
    "mistral3": "ministral3",
    "llava": "llama",
    "llava_next": "mistral",
    "aya_vision": "cohere2",
    "internvl": "qwen3_moe",
}


def loaded(path: Path, **settings: Path) -> Trunk:
    return load_trunk(open_checkpoint(path), dtype=torch.float32, **settings)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("wrapper", AROUND)
@torch.inference_mode()
def test_the_language_model_is_found_and_is_what_it_is_alone(wrapper: str, tied: bool, tmp_path: Path) -> None:
    path = save_wrapped(tmp_path / "model", wrapper, AROUND[wrapper], tied=tied)
    checkpoint = open_checkpoint(path)
    alone = tiny_trunk(AROUND[wrapper], tied=tied)
    assert (checkpoint.family.wrapper, checkpoint.family.title.endswith(WRAPPERS[wrapper])) == (wrapper, True)
    layout = checkpoint.layout
    assert (layout.trunk_prefix, layout.lm_head_key in checkpoint.tensors) == ("language_model.model.", not tied)
    trunk = loaded(path)
    hidden = trunk.hidden(TOKENS_1T)
    torch.testing.assert_close(hidden, alone.hidden(TOKENS_1T))
    torch.testing.assert_close(trunk.logits(hidden), alone.logits(hidden))


@pytest.mark.parametrize("wrapper", ["gemma3", "mistral3"])
def test_so_it_is_by_the_names_that_transformers_once_saved(wrapper: str, tmp_path: Path) -> None:
    path = save_wrapped(tmp_path / "model", wrapper, AROUND[wrapper])
    expected = loaded(path).logits(loaded(path).hidden(TOKENS_1T))
    tensors = load_file(path / SINGLE_FILE)
    names = {"language_model.lm_head.": "lm_head.", "language_model.model.": "model.language_model."}
    renamed = {}
    for key, value in tensors.items():
        old = next((old for old in names if key.startswith(old)), None)
        renamed[f"model.{key}" if old is None else key.replace(old, names[old])] = value
    save_tensors(renamed, path / SINGLE_FILE)
    layout = open_checkpoint(path).layout
    assert (layout.trunk_prefix, layout.lm_head_key) == ("model.language_model.", "lm_head.weight")
    assert torch.equal(loaded(path).logits(loaded(path).hidden(TOKENS_1T)), expected)


def test_an_adapter_of_the_whole_model_is_worn_and_merged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from mtp_train.cli.main import main

    path = save_wrapped(tmp_path / "model", "mistral3", "mistral")
    worn = write_adapter(
        path,
        tmp_path / "adapter",
        AutoModelForImageTextToText,
        target_modules=r".*language_model.*(q_proj|up_proj)",
        modules_to_save=["lm_head"],
    ).eval()
    with torch.inference_mode():
        expected = worn(input_ids=TOKENS_1T).logits
        wearing = loaded(path, adapter=tmp_path / "adapter")
        torch.testing.assert_close(wearing.logits(wearing.hidden(TOKENS_1T)), expected)
        argv = ["merge", str(path), "--adapter", str(tmp_path / "adapter"), "--out", str(tmp_path / "merged")]
        assert main(argv) == 0, capfd.readouterr().err
        merged = loaded(tmp_path / "merged")
        torch.testing.assert_close(merged.logits(merged.hidden(TOKENS_1T)), expected, atol=1e-4, rtol=1e-4)
        plain = loaded(path)
        assert (plain.logits(plain.hidden(TOKENS_1T)) - expected).abs().max() > 1e-2
    assert all_tensors(tmp_path / "merged").keys() == all_tensors(path).keys()


def test_a_draft_model_repeats_the_lm_head_where_the_wrapper_has_it(tmp_path: Path, out: Path) -> None:
    checkpoint = open_checkpoint(save_wrapped(tmp_path / "model", "mistral3", "mistral", num_layers=NUM_LAYERS))
    plan = fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=0, kind="eagle3")
    artifact = Artifact(
        layout=HeadLayout(plan.family, "model.", NUM_LAYERS),
        num_modules=1,
        num_depths=3,
        convention="auto",
        head=plan.head,
        notes={},
        draft_vocab=CHOSEN,
    )
    write_export(checkpoint, artifact, out, adapter=None, link="hard", progress=Progress(disable=True))
    stored = load_file(checkpoint.path / SINGLE_FILE)["language_model.lm_head.weight"]
    assert torch.equal(load_file(out / SINGLE_FILE)["lm_head.weight"], stored[CHOSEN.long()])
    serves = {engine: support.supported for engine, support in plan.family.serving.items() if support.supported}
    assert serves == {"vllm": True}


def test_a_config_that_leaves_sizes_to_transformers_is_read(tmp_path: Path) -> None:
    # As Gemma 3's releases do.
    path = save_wrapped(tmp_path / "model", "gemma3", "gemma3_text", vocab_size=262208)
    set_fields(path, {"vocab_size": None})
    assert text_config_of(open_checkpoint(path)).vocab_size == 262208


@pytest.mark.parametrize(
    ("wrapper", "family_name", "reason"),
    [
        ("paligemma", "gemma2", "paligemma"),
        ("internvl", "qwen2", "architecture's name"),
    ],
)
def test_others_are_refused_with_the_reason(wrapper: str, family_name: str, reason: str, tmp_path: Path) -> None:
    text_config = {"model_type": family_name, "num_hidden_layers": 2}
    write_json(tmp_path / "config.json", {"model_type": wrapper, "text_config": text_config})
    save_tensors({"x": torch.zeros(1)}, tmp_path / SINGLE_FILE)
    with pytest.raises(UnsupportedModelError, match=reason):
        _ = open_checkpoint(tmp_path).family
