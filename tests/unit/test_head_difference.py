"""A head that cannot work is named: known wrong forms of the base's head, other drafters, other names and layouts."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoints import Tensors, all_tensors, base_and_finetune, same, save_tensors, save_with_head, set_fields
from json_files import read_json, write_json
from left_over import head_of
from mtp_train import CheckpointError, MtpError, export, graft, inspect
from mtp_train.checkpoints.files import INDEX_FILE, SINGLE_FILE, open_checkpoint
from runs import paste, tree
from tiny import tiny_head, tiny_trunk

FC, NORM = "mtp.fc.weight", "mtp.pre_fc_norm_hidden.weight"


def with_tensors(path: Path, out: Path, change: Callable[[Tensors], Tensors], **metadata: str) -> Path:
    """Write a copy of a checkpoint with other tensors, in a single file."""
    shutil.copytree(path, out, ignore=shutil.ignore_patterns("*.safetensors", INDEX_FILE))
    tensors = {key: value.contiguous().clone() for key, value in change(all_tensors(path)).items()}
    save_file(tensors, out / SINGLE_FILE, {"format": "pt", **metadata})
    return out


def of_head(change: Callable[[str, Tensor], Tensor]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        key: change(key, value) if key.startswith("mtp.") else value for key, value in tensors.items()
    }


def swapped(key: str, value: Tensor) -> Tensor:
    return torch.cat([*reversed(value.chunk(2, dim=1))], dim=1) if key == FC else value


WRONG: dict[str, tuple[Callable[[str, Tensor], Tensor], list[str]]] = {
    "zero": (lambda key, value: torch.zeros_like(value), [FC, "mtp.layers.0.mlp.up_proj.weight"]),
    "halves swapped": (swapped, [FC]),
    "norms shifted": (lambda key, value: value + 1 if "pre_fc_norm" in key else value, [NORM]),
    "transposed": (lambda key, value: value.T if key in (FC, "mtp.layers.0.self_attn.o_proj.weight") else value, [FC]),
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", WRONG)
def test_a_known_wrong_form_of_the_base_s_head_is_named_and_cured(
    kind: str, trained: bool, base: Path, tmp_path: Path
) -> None:
    change, keys = WRONG[kind]
    torch.manual_seed(0)

    def damage(key: str, value: Tensor) -> Tensor:
        # A head that was trained before its form became wrong: 5 % of every matrix.
        moved = trained and value.ndim == 2
        return change(key, value + 0.05 * value.std() * torch.randn_like(value) if moved else value)

    broken = with_tensors(base, tmp_path / "broken", of_head(damage))
    found = inspect(broken, base)
    assert found.status == "miswired"
    assert found.head_difference is not None
    assert found.head_difference.kind == kind
    assert {*keys} <= {key for some in found.head_difference.keys.values() for key in some}
    assert found.serves["vllm"].startswith(f"no: {next(iter(found.head_difference.keys.values()))[0]}")
    assert found.to_json()["head_difference"]["kind"] == kind
    cured = paste(found.cure)
    assert same(all_tensors(cured), all_tensors(base))
    assert inspect(cured, base).status == "healthy"


@pytest.mark.parametrize("shift", [0.0, 0.01, 0.5])
def test_a_trained_head_is_healthy_and_its_distance_is_right(shift: float, base: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    moved = with_tensors(
        base, tmp_path / "moved", of_head(lambda key, value: value + shift * value.std() * torch.randn_like(value))
    )
    found = inspect(moved, base)
    assert found.status == "healthy"
    assert found.head_difference is not None
    assert found.head_difference.kind == ("retrained" if shift else "equal")
    old, new = (torch.cat([value.flatten() for _, value in sorted(head_of(path).items())]) for path in (base, moved))
    assert found.head_difference.relative_change == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-4)


def test_a_wrong_form_on_a_fine_tune_is_cured_by_retraining(saved: Path, tmp_path: Path) -> None:
    grafted = graft(saved / "finetune", saved / "base", tmp_path / "grafted").out
    broken = with_tensors(grafted, tmp_path / "broken", of_head(swapped))
    found = inspect(broken, saved / "base")
    assert (found.status, found.stale) == ("miswired", False)
    assert found.cure == f"mtp-train rescue {broken} --from {saved / 'base'} --out {broken}-rescued"
    assert inspect(grafted, saved / "base").stale


# Other drafters, names and layouts


MARKOV = {"mtp.2.markov_head.markov_w1": torch.zeros(64, 8), "mtp.2.main_norm.weight": torch.zeros(8)}
MISTRAL = {"mtp_dspark.layers.0.attention.wq.weight": torch.zeros(8, 8)}
LARGE_4 = {"model_type": "mistral_large4", "text_config": {"model_type": "mistral_large4_text"}}


@pytest.mark.parametrize(
    ("block", "config", "named"),
    [
        (MARKOV, {"dspark_block_size": 4}, "(mtp.2.m"),
        (MISTRAL, {}, "(mtp_dspark.layers.0.att"),
        # A trunk of which no record knows the keys.
        (MISTRAL, LARGE_4, "(mtp_dspark.layers.0.att"),
    ],
    ids=["under the head's prefix", "its own prefix", "an unknown trunk"],
)
def test_a_drafter_beside_a_trunk_of_any_family_is_named(
    block: Tensors, config: dict[str, Any], named: str, saved: Path, tmp_path: Path, out: Path
) -> None:
    other = with_tensors(saved / "finetune", tmp_path / "other", lambda tensors: tensors | block)
    if config is LARGE_4:
        write_json(other / "config.json", config)
    else:
        set_fields(other, config)
    found = inspect(other)
    before = tree(other)
    assert (found.status, found.cure, {*found.head.found_keys}) == ("foreign", None, {*block})
    assert not found.head.unexpected_keys
    assert f"DSpark drafter {named}" in found.runs_here
    assert '"method":"dspark"' in found.serves["vllm"]
    if config == {"dspark_block_size": 4}:
        assert '"num_speculative_tokens":4}' in found.serves["vllm"]
        assert "dspark_block_size 4" in found.runs_here
    with pytest.raises(MtpError, match="DSpark drafter"):
        graft(other, saved / "base", out)
    with pytest.raises(MtpError):
        graft(saved / "finetune", other, out)
    assert tree(other) == before


@pytest.mark.parametrize("prefix", ["language_model.", "model.", "bare"])
def test_a_head_under_other_names_is_named_where_all_of_it_is_there(prefix: str, base: Path, tmp_path: Path) -> None:
    """With a longer prefix, or in a file of its own without any."""
    head = head_of(base)
    renamed = {key.removeprefix("mtp.") if prefix == "bare" else prefix + key: value for key, value in head.items()}
    other = with_tensors(
        base, tmp_path / "other", lambda tensors: {key: value for key, value in tensors.items() if key not in head}
    )
    file = other / ("mtp.safetensors" if prefix == "bare" else SINGLE_FILE)
    trunk = {} if prefix == "bare" else load_file(file)
    save_tensors(trunk | renamed, file)
    found = inspect(other, base)
    assert found.status == "declared_but_missing"
    assert {*found.head.other_names} == {*renamed}
    assert "the 15 tensors of one have other names" in found.serves["vllm"]
    assert inspect(paste(found.cure)).status == "healthy"
    del renamed[next(iter(renamed))]
    save_tensors(trunk | renamed, file)
    assert not inspect(other, base).head.other_names


@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe", "mimo"])
@pytest.mark.parametrize("bare", [False, True])
def test_a_head_without_a_trunk_is_called_one(bare: bool, family_name: str, tmp_path: Path, out: Path) -> None:
    """Also where its keys lost their prefix, and are then named like those of an EAGLE draft."""
    path = save_with_head(tiny_trunk(family_name), tiny_head(tiny_trunk(family_name)), tmp_path / "whole")
    layout = open_checkpoint(path).layout
    prefix = {"qwen3_5": "mtp.", "glm4_moe": "model.layers.3.", "mimo": "model.mtp_layers.0."}[family_name] * bare

    def alone(tensors: Tensors) -> Tensors:
        return {key.removeprefix(prefix): value for key, value in tensors.items() if layout.is_head_key(key)}

    lone = with_tensors(path, tmp_path / "lone", alone)
    for read in (lambda: inspect(lone), lambda: graft(path, lone, out)):
        with pytest.raises(CheckpointError, match=r"an MTP head of .* without a trunk; expected the checkpoint of a"):
            read()


def test_a_reduced_output_matrix_is_named_and_the_head_beside_it_is_whole(
    saved: Path, tmp_path: Path, out: Path
) -> None:
    reduced = {"mtp.draft_lm_head.weight": torch.ones(8, 32), "mtp.d2t": torch.arange(8)}
    held = with_tensors(saved / "base", tmp_path / "held", lambda tensors: tensors | reduced)
    found = inspect(held, saved / "base")
    assert (found.status, found.cure) == ("healthy", None)
    assert "mtp.d2t (2 in all): an output matrix of fewer tokens" in (found.note or "")
    export(held, out)
    assert same(all_tensors(out), all_tensors(held))
    assert graft(saved / "finetune", held, tmp_path / "grafted").notes == (
        f"Left out, as it is of {held}'s own tokens: mtp.d2t (2 in all).",
    )


@pytest.mark.parametrize("sign", ["format", "quantization"])
def test_mlx_s_layout_is_named_in_one_sentence_by_every_command(
    sign: str, saved: Path, tmp_path: Path, out: Path
) -> None:
    metadata = {"format": "mlx"} if sign == "format" else {}
    other = with_tensors(saved / "base", tmp_path / "other", dict, **metadata)
    if sign == "quantization":
        set_fields(other, {"quantization": {"group_size": 64, "bits": 4}})
    found = inspect(other, saved / "base")
    assert (found.status, found.problems) == ("foreign", ())
    assert found.cure == f"hf download ORIGINAL --local-dir {other}-original --force-download"
    assert "in MLX's layout (" in (found.note or "")
    with pytest.raises(CheckpointError, match=r"in MLX's layout .* expected transformers' layout. Use the checkpoint"):
        graft(other, saved / "base", out)
    (other / "README.md").write_text("---\nlibrary_name: mlx\nbase_model: Qwen/Qwen3.5-4B\n---\n")
    assert (inspect(other).cure or "").startswith("hf download Qwen/Qwen3.5-4B ")


# Files and flags that engines read otherwise


def test_an_lm_head_that_is_not_tied_as_the_config_says_is_a_problem(tmp_path: Path, out: Path) -> None:
    base, _ = base_and_finetune(tmp_path, "qwen3_5", tied=True)
    embedding = load_file(base / SINGLE_FILE)["model.embed_tokens.weight"]
    equal = with_tensors(base, tmp_path / "equal", lambda tensors: tensors | {"lm_head.weight": embedding.clone()})
    assert inspect(equal, base).status == "healthy"
    other = with_tensors(base, tmp_path / "other", lambda tensors: tensors | {"lm_head.weight": 2 * embedding})
    found = inspect(other, base)
    assert found.status == "damaged"
    assert "lm_head.weight differs from the embedding, while tie_word_embeddings is true" in found.problems[0]
    with pytest.raises(CheckpointError, match="expected a flag that fits the weights") as refused:
        graft(other, base, out)
    assert found.cure is not None
    assert str(refused.value).endswith(found.cure)
    subprocess.run(found.cure, shell=True, check=True)
    assert inspect(other, base).status == "healthy"


SINGLE_NAMES = [f"mtp.layers.0.self_attn.{name}_proj" for name in "qkvo"] + [
    f"mtp.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")
]
FUSED_NAMES = ["mtp.layers.0.self_attn.qkv_proj", "mtp.layers.0.mlp.gate_up_proj"]


@pytest.mark.parametrize(
    ("ignore", "serves"),
    [
        (["lm_head", "mtp.fc", *SINGLE_NAMES], False),
        (["lm_head", "mtp.fc", *SINGLE_NAMES, *FUSED_NAMES], True),
        (["lm_head", "re:.*mtp.*"], True),
    ],
    ids=["single names", "fused names too", "pattern"],
)
def test_single_names_that_sglang_fuses_are_warned_of_and_exported_as_a_pattern(
    ignore: list[str], serves: bool, base: Path, tmp_path: Path
) -> None:
    listed = Path(shutil.copytree(base, tmp_path / "listed"))
    settings: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ignore}
    set_fields(listed, {"quantization_config": settings})
    found = inspect(listed)
    assert found.status == "healthy"
    assert found.serves["vllm"].startswith("vllm serve")
    assert found.serves["sglang"].startswith("python -m" if serves else "no: reads mtp.layers.0.")
    if serves:
        assert found.cure is None
        return
    cured = paste(found.cure)
    assert same(all_tensors(cured), all_tensors(base))
    written = read_json(cured / "config.json")["quantization_config"]["ignore"]
    assert written == [*ignore, r"re:.*mtp\..*"]
    assert inspect(cured).cure is None
