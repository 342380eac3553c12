"""A head that was never trained is named from its own tensors, and written by no command; a trained one never is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_whole_trunk import takers
from torch import Tensor

from checkpoints import Tensors, base_and_finetune, rewrite, save_stripped, save_with_head
from gguf_files import checkpoint_with_head
from mtp_train import export, graft, inspect
from mtp_train.checkpoints.export import write_checkpoint
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.cli.main import main
from mtp_train.heads.build import fresh_plan, graft_plan, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.initial import is_drawn
from mtp_train.runs.display import quiet_progress
from runs import Capture, paste, refusal
from tiny import tiny_head, tiny_trunk

# Norms multiply by 1 + w in the first, the third and the last; experts are stored one by one in the second.
FAMILIES = ("qwen3_5", "glm4_moe", "qwen3_next", "deepseek_v3", "mimo", "cohere2_moe", "llama", "gemma3_text")
DRAWS: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "normal": lambda shape: 0.02 * torch.randn(shape),
    "uniform": lambda shape: torch.rand(shape) - 0.5,
    "truncated": lambda shape: torch.nn.init.trunc_normal_(torch.empty(shape), std=0.02, a=-0.04, b=0.04),
    "bf16": lambda shape: (0.02 * torch.randn(shape)).bfloat16().float(),
}


def drawn(family_name: str, directory: Path) -> Path:
    """Write a checkpoint whose head is as transformers makes one: norms at their initial value, matrices drawn."""
    torch.manual_seed(0)
    trunk = tiny_trunk(family_name)
    head = tiny_head(trunk)
    plain = type(head)(trunk.family, trunk.config, num_modules=len(head.blocks), convention=head.convention)
    for name, value in head.named_parameters():
        is_norm = name.endswith("norm.weight")
        value.data.copy_(
            plain.get_parameter(name) if is_norm or value.ndim < 2 else DRAWS["normal"](tuple(value.shape))
        )
    return save_with_head(trunk, head, directory)


@pytest.mark.parametrize("family_name", FAMILIES)
def test_an_untrained_head_is_named_from_its_own_tensors(family_name: str, tmp_path: Path) -> None:
    found = inspect(drawn(family_name, tmp_path / "drawn"))
    assert found.status == "untrained"
    assert found.serves["vllm"].startswith("no: its head was never trained: its matrices look drawn at random")
    assert found.cure == (
        f"mtp-train rescue {tmp_path}/drawn --from {tmp_path}/drawn --set train.max_steps=500 "
        f"--out {tmp_path}/drawn-rescued"
    )


@pytest.mark.parametrize("family_name", ["qwen3_5", "glm4_moe"])
def test_an_untrained_head_is_cured_by_a_base_with_a_trained_one(family_name: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    path = drawn(family_name, tmp_path / "drawn")
    found = inspect(path, base)
    assert (found.status, found.head_difference and found.head_difference.kind) == ("untrained", "unrelated")
    assert inspect(paste(found.cure), base).status == "healthy"
    # A base with the same head is no cure.
    assert (inspect(path, path).cure or "").startswith("mtp-train rescue ")


@pytest.mark.parametrize("zero", [False, True])
def test_a_head_that_drafts_nothing_is_written_by_no_command(
    zero: bool, tmp_path: Path, out: Path, capfd: Capture
) -> None:
    path = checkpoint_with_head(tmp_path / "base", "qwen3_5")
    finetune = save_stripped(tiny_trunk("qwen3_5", vocab_size=272), tmp_path / "finetune")

    def reset(tensors: Tensors) -> None:
        for key, value in tensors.items():
            if key.startswith("mtp."):
                tensors[key] = torch.zeros_like(value) if zero or value.ndim < 2 else torch.randn_like(value)

    rewrite(path, reset)
    assert inspect(path).status == ("miswired" if zero else "untrained")
    for argv in (["graft", finetune, "--from", path, "--out", out], *takers(path, out)[1:]):
        message = refusal(argv, capfd)
        assert "expected a trained head" in message
        assert ("zero everywhere" if zero else "was never trained") in message
        # The message names the command that prints the cure.
        assert main(["inspect", str(path)]) == 0
    assert not out.exists()


def test_norms_or_matrices_alone_are_a_note(base: Path, tmp_path: Path) -> None:
    found = inspect(base)
    assert found.status == "healthy"
    assert "the head's matrices look drawn at random" in (found.note or "")
    trained = with_training(drawn("qwen3_5", tmp_path / "drawn"))
    found = inspect(trained)
    assert (found.status, found.serves["vllm"][:4]) == ("healthy", "vllm")
    assert "the head's norms are at their initial value" in (found.note or "")


def with_training(path: Path) -> Path:
    """Add to one matrix of a head what training adds first: a direction that all rows share, of little size."""

    def train(tensors: Tensors) -> None:
        weight_MN = tensors["mtp.layers.0.mlp.up_proj.weight"]
        rows, columns = weight_MN.shape
        direction_MN = torch.outer(torch.randn(rows), torch.randn(columns)) / (rows * columns) ** 0.5
        weight_MN.add_(direction_MN * weight_MN.std() * 2 * (rows**0.5 + columns**0.5))

    return rewrite(path, train)


def test_drawn_matrices_under_the_norms_of_the_base_are_untrained(base: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)

    def draw(tensors: Tensors) -> None:
        head = {key: value for key, value in tensors.items() if key.startswith("mtp.") and value.ndim > 1}
        tensors |= {key: 0.02 * torch.randn_like(value) for key, value in head.items()}

    path = save_with_head(tiny_trunk("qwen3_5"), tiny_head(tiny_trunk("qwen3_5")), tmp_path / "kept")
    found = inspect(rewrite(path, draw), base)
    assert found.status == "untrained"
    assert str(found.head_difference) == "has nothing of the base's, but its norms: correlation near 0"


@pytest.mark.parametrize(("family_name", "kind"), [("qwen3_5", "retrained"), ("glm4_moe", "zero")])
def test_zero_norms_are_a_fault_only_where_norms_do_not_add_one(family_name: str, kind: str, tmp_path: Path) -> None:
    base, _ = base_and_finetune(tmp_path, family_name)
    path = save_with_head(tiny_trunk(family_name), tiny_head(tiny_trunk(family_name)), tmp_path / "zeroed")
    layout = open_checkpoint(path).layout

    def zero(tensors: Tensors) -> None:
        norms = [key for key in tensors if layout.is_head_key(key) and key.endswith("norm.weight")]
        tensors |= {key: torch.zeros_like(tensors[key]) for key in norms}

    found = inspect(rewrite(path, zero), base)
    assert found.head_difference is not None
    assert found.head_difference.kind == kind
    assert found.status == ("healthy" if kind == "retrained" else "miswired")


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("shape", [(16, 64), (48, 32), (512, 1024), (1024, 96)])
def test_drawn_matrices_look_drawn_and_trained_ones_do_not(draw: str, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight_MN = DRAWS[draw](shape)
    assert is_drawn(weight_MN)
    rows, columns = shape
    edge = float(weight_MN.std()) * (rows**0.5 + columns**0.5)
    shared_MN = torch.outer(torch.randn(rows), torch.randn(columns)) / (rows * columns) ** 0.5
    # Training changes few directions (a low rank), or some entries by much.
    assert not is_drawn(weight_MN + 2 * edge * shared_MN)
    assert not is_drawn(weight_MN * torch.randn(shape).exp())
    assert is_drawn(torch.zeros(shape)) is None


def test_heads_that_were_trained_here_are_marked_and_the_mark_stays_with_the_head(tmp_path: Path) -> None:
    """A head that a run trained too briefly to show it."""
    base = drawn("qwen3_5", tmp_path / "base")
    finetune = save_stripped(tiny_trunk("qwen3_5"), tmp_path / "finetune")
    source = open_checkpoint(finetune)
    progress = quiet_progress()
    plan = graft_plan(source, open_checkpoint(base), "auto")
    state = plan.layout.join({one.key: one.load() for one in plan.head.tensors})
    trained = tmp_path / "trained"
    write_checkpoint(source, trained_head(plan, state), trained, link="hard", progress=progress)
    copies = [trained, graft(finetune, trained, tmp_path / "grafted").out, export(trained, tmp_path / "again").out]
    copies += [export(trained, tmp_path / "alone", head_only=True).out]
    assert {inspect(path).status for path in copies} == {"healthy"}
    # Another head in its place is not marked.
    other = open_checkpoint(trained)
    plan = graft_plan(other, open_checkpoint(base), "auto")
    write_checkpoint(other, plan.head, tmp_path / "other", link="hard", progress=progress)
    assert inspect(tmp_path / "other").status == "untrained"


def test_a_fresh_head_of_a_copied_layer_is_not_untrained(tmp_path: Path, out: Path) -> None:
    trunk = tiny_trunk("llama")
    source = open_checkpoint(save_stripped(trunk, tmp_path / "trunk"))
    plan = fresh_plan(source, text_config_of(source), "auto", seed=0, start="copy_last_layer")
    write_checkpoint(source, plan.head, out, link="hard", progress=quiet_progress())
    assert inspect(out).status == "healthy"


def test_the_demo_s_trained_head_has_no_such_sign() -> None:
    found = inspect("demo:base")
    assert (found.status, "drawn" in str(found.note), "initial" in str(found.note)) == ("healthy", False, False)
    assert "wiring was not checked" in str(found.note)
    assert inspect("demo:base", "demo:base").note is None
