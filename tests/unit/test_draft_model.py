"""Draft models of third parties: the map from rows of the output matrix to tokens, and how the config names them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints import Tensors, rewrite, set_fields
from draft_models import CHOSEN, DraftModelToWrite
from mtp_inference.opening import head_plan
from mtp_train import inspect
from mtp_train.errors import CheckpointError, UnsupportedModelError
from tiny import VOCAB_SIZE

DAMAGES: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "out of range": (
        lambda all: all["d2t"].add_(60),
        f"d2t maps rows to tokens 60 to 126; expected tokens below {VOCAB_SIZE}",
    ),
    "below 0": (lambda all: all["d2t"].sub_(1), "d2t maps rows to tokens -1 to"),
    "too short": (
        lambda all: all.update(d2t=all["d2t"][:5].clone()),
        r"d2t is I64 \[5\]; expected one integer for .* 9",
    ),
    "floats": (lambda all: all.update(d2t=all["d2t"].float()), r"d2t is F32 \[9\]; expected one integer"),
    "repeats": (
        lambda all: all.update(d2t=all["d2t"].index_fill(0, torch.tensor([2]), 1)),
        "d2t maps 9 rows to 8 tokens; expected another token for each row",
    ),
    "another mask": (
        lambda all: all["t2d"].__setitem__(slice(3, 6), torch.tensor([True, False, True])),
        r"d2t and t2d choose other tokens \(4, 2 in all\); expected the same ones",
    ),
    "another mask of integers": (
        lambda all: all.update(t2d=all["t2d"].roll(1).long()),
        r"d2t and t2d choose other tokens \(1, 12 in all\)",
    ),
    "a mask of nothing": (lambda all: all["t2d"].zero_(), r"choose other tokens \(0, 9 in all\)"),
    "zeros": (
        lambda all: all.update({key: torch.zeros_like(value) for key, value in all.items() if value.ndim > 1}),
        "all 8 matrices are zero; expected a trained EAGLE-3 draft model",
    ),
    "missing": (lambda all: all.pop("d2t"), "no d2t for 9 of 67 tokens; expected an offset for each row"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_map_of_tokens_is_named_by_every_reader(damage: str, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    change, message = DAMAGES[damage]
    rewrite(written.out, change)
    with pytest.raises(CheckpointError, match=message):
        head_plan(written.source, str(written.out))
    for base in (None, written.source.path):
        found = inspect(written.out, base)
        assert found.status == "damaged"
        assert found.runs_here == f"no: {found.problems[0]}"
        assert found.cure is not None


SOUND: dict[str, Callable[[Tensors], object]] = {
    "as it is": lambda all: None,
    "without t2d": lambda all: all.pop("t2d", None),
    "with flags of bytes": lambda all: all.update({"t2d": all["t2d"].byte()} if "t2d" in all else {}),
    "with longer t2d": lambda all: all.update(
        {"t2d": torch.nn.functional.pad(all["t2d"], (0, 5))} if "t2d" in all else {}
    ),
}


@pytest.mark.parametrize("change", SOUND)
@pytest.mark.parametrize("vocab", [None, CHOSEN])
def test_a_sound_map_is_read(vocab: Tensor | None, change: str, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", vocab)
    written.write()
    rewrite(written.out, SOUND[change])
    output = head_plan(written.source, str(written.out)).output
    assert output is not None
    assert (output.token_ids_R is None) is (vocab is None)
    assert vocab is None or output.token_ids_R is None or output.token_ids_R.tolist() == vocab.tolist()
    assert inspect(written.out, written.source.path).status == "healthy"


def test_an_eagle3_draft_that_declares_the_class_of_its_trunk_is_one(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    set_fields(written.out, {"architectures": ["LlamaForCausalLM"]})
    assert inspect(written.out).family == "eagle3"
    assert head_plan(written.source, str(written.out)).family.kind.name == "eagle3"


def test_an_eagle_draft_that_declares_the_class_of_its_trunk_is_named(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle")
    written.write()
    set_fields(written.out, {"architectures": ["LlamaForCausalLM"]})
    for read in (lambda: inspect(written.out), lambda: head_plan(written.source, str(written.out))):
        with pytest.raises(CheckpointError, match=r"tensors of an EAGLE draft model, while config\.json declares"):
            read()


def test_a_form_that_is_not_supported_is_named_by_every_reader(tmp_path: Path) -> None:
    """EAGLE-3.1 feeds the normed state back."""
    written = DraftModelToWrite(tmp_path, "eagle3", CHOSEN)
    written.write()
    set_fields(written.out, {"norm_output": True})
    reason = "norm_output = True, a form of EAGLE-3 draft model that we do not support; expected False"
    for base in (None, written.source.path):
        assert inspect(written.out, base).runs_here == f"no: {reason}"
    with pytest.raises(UnsupportedModelError, match=reason):
        head_plan(written.source, str(written.out))


def test_sglang_is_not_offered_a_layer_that_adds_to_the_normed_state(tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3")
    written.write()
    assert inspect(written.out, written.source.path).serves["sglang"].startswith("python -m sglang")
    set_fields(written.out, {"norm_before_residual": True})
    serves = inspect(written.out, written.source.path).serves
    assert serves["sglang"] == "no: does not read norm_before_residual"
    assert serves["vllm"].startswith("vllm serve ")


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("mapped", [True, False])
def test_a_draft_of_the_whole_vocabulary_may_borrow_the_trunk_s_lm_head(
    mapped: bool, declared: bool, tmp_path: Path
) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3")
    written.write()
    rewrite(written.out, lambda all: all.pop("lm_head.weight"))
    if mapped:
        rewrite(written.out, lambda all: all.update(d2t=torch.zeros(VOCAB_SIZE, dtype=torch.long)))
    if not declared:
        set_fields(written.out, {"draft_vocab_size": None})
    found = inspect(written.out, written.source.path)
    assert (found.status, found.cure) == ("healthy", None)
    assert found.serves["vllm"].startswith("vllm serve ")
    assert found.serves["sglang"].startswith("no: " if declared else "python -m sglang")
    plan = head_plan(written.source, str(written.out))
    assert plan.output is None
    assert len(plan.head.tensors) == len(written.artifact.head.tensors)


@pytest.mark.parametrize("vocab", [CHOSEN, torch.arange(9, dtype=torch.int32)])
def test_a_draft_of_a_part_of_the_vocabulary_needs_an_lm_head(vocab: Tensor, tmp_path: Path) -> None:
    written = DraftModelToWrite(tmp_path, "eagle3", vocab)
    written.write()
    rewrite(written.out, lambda all: all.pop("lm_head.weight"))
    assert inspect(written.out).head.missing_keys == ("lm_head.weight",)
    with pytest.raises(CheckpointError, match=r"head keys missing: lm_head\.weight"):
        head_plan(written.source, str(written.out))
