"""A head from a checkpoint, from a base, or fresh; and a trained one back in the checkpoint's own layout."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from checkpoints import (
    all_tensors,
    base_and_finetune,
    fuse_experts,
    holds,
    rewrite,
    save_stripped,
    save_with_head,
    set_fields,
)
from mtp_train.checkpoints.files import Checkpoint, open_checkpoint
from mtp_train.errors import CheckpointError, UnsupportedModelError
from mtp_train.heads.build import HeadPlan, build_head, fresh_plan, graft_plan, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.module import MtpHead
from tiny import ALL_FAMILIES, FAMILY_NAMES, tiny_head, tiny_trunk

BIAS = "layers.3.mlp.gate.e_score_correction_bias"


def with_head(family_name: str, path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    trunk = tiny_trunk(family_name)
    return open_checkpoint(save_with_head(trunk, tiny_head(trunk), path, dtype))


def without_head(family_name: str, path: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    trunk = tiny_trunk(family_name)
    trunk.model.to(dtype)
    return open_checkpoint(save_stripped(trunk, path))


def build(plan: HeadPlan, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> MtpHead:
    return build_head(plan, text_config_of(checkpoint), dtype=dtype)


def stored(plan: HeadPlan) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {pending.key: (pending.dtype, pending.shape) for pending in plan.head.tensors}


@pytest.mark.parametrize("fused", ["neither", "base", "both"])
def test_a_head_keeps_the_expert_layout_that_it_has(fused: str, tmp_path: Path) -> None:
    base, finetune = base_and_finetune(tmp_path, "qwen3_5_moe")
    expected = build(graft_plan(open_checkpoint(base), open_checkpoint(base), "auto"), open_checkpoint(base))
    if fused != "neither":
        fuse_experts(base)
    if fused == "both":
        fuse_experts(finetune)
    plan = graft_plan(open_checkpoint(finetune), open_checkpoint(base), "auto")
    stacked = {key for key in stored(plan) if key.endswith(("experts.gate_up_proj", "experts.down_proj"))}
    assert len(stacked) == (0 if fused == "neither" else 2)
    head = build(plan, open_checkpoint(finetune))
    assert_same_weights(head, expected)
    written = {pending.key: pending.load() for pending in trained_head(plan, head.state_dict()).tensors}
    original = all_tensors(base)
    assert holds(original, written)


def assert_same_weights(head: MtpHead, expected: MtpHead) -> None:
    torch.testing.assert_close(head.state_dict(), expected.state_dict(), atol=0, rtol=0)


def test_a_graft_is_refused_a_wiring_that_no_engine_has(saved: Path) -> None:
    base, finetune = (open_checkpoint(saved / name) for name in ("base", "finetune"))
    with pytest.raises(UnsupportedModelError, match=r"head\.convention: 'vlm'; expected one of auto, "):
        graft_plan(finetune, base, "vlm")


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_a_weight_that_is_not_finite_is_refused(value: float, tmp_path: Path) -> None:
    path = tmp_path / "base"
    with_head("qwen3_5", path, torch.bfloat16)
    broken = open_checkpoint(rewrite(path, lambda tensors: tensors["mtp.norm.weight"][3:4].fill_(value)))
    with pytest.raises(CheckpointError, match=r"mtp\.norm\.weight: holds NaN or infinite values"):
        build(graft_plan(broken, broken, "auto"), broken)


@pytest.mark.parametrize(("family_name", "identity"), [("qwen3_5", 0.0), ("glm4_moe", 1.0)])
def test_fresh_norms_are_the_identity_of_their_flavour(family_name: str, identity: float, tmp_path: Path) -> None:
    checkpoint = without_head(family_name, tmp_path / "trunk")
    head = build(fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=1), checkpoint)
    norms = {name: value for name, value in head.named_parameters() if "norm" in name}
    assert len(norms) >= 5
    assert all((value == identity).all() for value in norms.values())
    input_BTD = torch.randn(1, 1, 32)
    normed_BTD = head.blocks[0].final_norm(input_BTD)
    torch.testing.assert_close(normed_BTD, input_BTD * input_BTD.square().mean().rsqrt(), rtol=1e-4, atol=1e-4)


def test_a_fresh_head_depends_on_its_seed_alone(tmp_path: Path) -> None:
    without_head("glm4_moe", tmp_path / "trunk")
    # As GLM-4.5's attention has them.
    set_fields(tmp_path / "trunk", {"attention_bias": True})
    checkpoint = open_checkpoint(tmp_path / "trunk")
    heads = []
    for seed in (1, 1, 2):
        torch.randn(3)  # the state of torch's own generator must not matter
        plan = fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=seed)
        heads.append(build(plan, checkpoint))
    assert any(name.endswith("q_proj.bias") for name in heads[0].state_dict())
    assert not torch.equal(heads[0].blocks[0].proj.weight, heads[2].blocks[0].proj.weight)
    assert_same_weights(heads[0], heads[1])


@pytest.mark.skipif("mimo_v2_flash" not in ALL_FAMILIES, reason="this transformers has no MiMo-V2")
def test_fresh_sinks_draw_as_a_score_of_zero(tmp_path: Path) -> None:
    """Their layer makes them of whatever the memory held."""
    checkpoint = without_head("mimo_v2_flash", tmp_path / "trunk")
    used = [torch.full((length,), torch.nan) for length in range(1, 64)]
    del used
    head = build(fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=1), checkpoint)
    sinks = {name: value for name, value in head.state_dict().items() if name.endswith("sinks")}
    assert sinks
    assert [name for name, value in sinks.items() if value.any()] == []


def test_a_fresh_head_has_the_trunks_dtype_and_declares_itself(tmp_path: Path) -> None:
    checkpoint = without_head("glm4_moe", tmp_path / "trunk", torch.bfloat16)
    plan = fresh_plan(checkpoint, text_config_of(checkpoint), "auto", seed=1)
    dtypes = {key: dtype for key, (dtype, _) in stored(plan).items()}
    assert dtypes.pop(f"model.{BIAS}") == "F32"
    assert set(dtypes.values()) == {"BF16"}
    assert plan.head.config_fields == {"num_nextn_predict_layers": 1}


def test_the_routers_bias_is_never_rounded(tmp_path: Path) -> None:
    path = tmp_path / "base"
    with_head("glm4_moe", path, torch.bfloat16)
    precise = torch.tensor([1.0, 1.0 + 2**-20, -0.3, 7.7])
    assert not torch.equal(precise.bfloat16().float(), precise)
    checkpoint = open_checkpoint(rewrite(path, lambda tensors: tensors.update({f"model.{BIAS}": precise})))
    plan = graft_plan(checkpoint, checkpoint, "auto")
    head = build(plan, checkpoint, torch.bfloat16)
    name, bias = next((name, value) for name, value in head.state_dict().items() if name.endswith("correction_bias"))
    assert bias.dtype == torch.float32
    assert torch.equal(bias, precise)
    assert {value.dtype for value in head.parameters()} == {torch.bfloat16}
    written = {pending.key: pending for pending in trained_head(plan, head.state_dict()).tensors}
    assert written[f"model.{BIAS}"].dtype == "F32"
    assert torch.equal(written[f"model.{BIAS}"].load(), precise), name


@pytest.mark.parametrize("family_name", FAMILY_NAMES)
def test_a_head_trained_in_fp32_is_written_as_it_was_stored(family_name: str, tmp_path: Path) -> None:
    checkpoint = with_head(family_name, tmp_path / "base", torch.bfloat16)
    plan = graft_plan(checkpoint, checkpoint, "auto")
    head = build(plan, checkpoint)
    with torch.no_grad():
        head.blocks[0].proj.weight.mul_(2)
    written = trained_head(plan, head.state_dict())
    assert {pending.key: (pending.dtype, pending.shape) for pending in written.tensors} == stored(plan)
    assert {pending.dtype for pending in written.tensors} == {"BF16"}
    assert (written.shared_keys, written.config_fields) == (plan.head.shared_keys, plan.head.config_fields)
    proj = "mtp.fc.weight" if family_name == "qwen3_5" else "model.layers.3.eh_proj.weight"
    for pending in written.tensors:
        factor = 2 if pending.key == proj else 1
        assert torch.equal(pending.load().bfloat16(), factor * checkpoint.read(pending.key)), pending.key
