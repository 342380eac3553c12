"""A head joins a GGUF file of its trunk and leaves it again; the trunk's bytes are untouched."""

from __future__ import annotations

import glob
import shlex
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from checkpoints import all_tensors
from gguf_files import add_fields, checkpoint_with_head, exported, finish, metadata, values, write_whole, writer_of
from mtp_inference import SpeculativeDecoder
from mtp_train import inspect, rescue
from mtp_train.checkpoints.gguf.model_file import open_gguf, with_modules
from mtp_train.checkpoints.locations import open_location
from mtp_train.runs.pipeline import RunResult
from runs import Capture, paste, refusal, run_command
from tiny import IS_OLD

LAYERS = 4
"""Of the tiny Qwen3.5."""


def write_trunk(path: Path, head: gguf.GGUFReader, parts: int = 1) -> list[Path]:
    """Write the metadata of a head's file without the head, and blocks of a quantised trunk, as one file or splits."""
    arch = head.get_field("general.architecture").contents()
    names = [f"{path.stem}-{part + 1:05}-of-{parts:05}.gguf" for part in range(parts)] if parts > 1 else [path.name]
    generator = np.random.default_rng(0)
    for part, name in enumerate(names):
        writer = gguf.GGUFWriter(path.with_name(name), arch)
        if part == 0:
            add_fields(writer, head, LAYERS)
        if parts > 1:
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", parts)
            writer.add_int32("split.tensors.count", LAYERS)
        for block in range(part, LAYERS, parts):
            matrix = generator.standard_normal((8, 256)).astype(np.float32)
            stored = gguf.quants.quantize(matrix, gguf.GGMLQuantizationType.Q4_0)
            writer.add_tensor(f"blk.{block}.ssm_out.weight", stored, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
        finish(writer)
    return [path.with_name(name) for name in names]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return checkpoint_with_head(tmp_path / "base", "qwen3_5")


@pytest.fixture
def head(base: Path, tmp_path: Path) -> gguf.GGUFReader:
    """The head in a file of its own, which other tests compare with llama.cpp's converter."""
    return exported(base, tmp_path / "alone", "f32")


@pytest.fixture
def trunk(head: gguf.GGUFReader, tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return write_trunk(tmp_path / "model" / "tuned.gguf", head)[0]


def raw(path: Path) -> dict[str, tuple[Any, bytes]]:
    return raw_of(gguf.GGUFReader(path))


def test_a_head_of_a_checkpoint_joins_its_trunk(
    base: Path, head: gguf.GGUFReader, trunk: Path, tmp_path: Path, capsys: Capture
) -> None:
    before = trunk.read_bytes()
    out = tmp_path / "whole.gguf"
    stripped = inspect(trunk)
    assert (stripped.status, stripped.cure) == ("none", f"mtp-train graft {trunk} --from BASE --out tuned-mtp.gguf")
    pasted = stripped.cure.replace("BASE", str(base)).replace("tuned-mtp.gguf", str(out))
    assert paste(f"{pasted} --head f32") == Path("f32")
    assert f"llama-server -m {out} --spec-type draft-mtp" in capsys.readouterr().out
    assert trunk.read_bytes() == before
    assert raw(out).items() >= raw(trunk).items()
    assert raw(out) == raw(trunk) | {name: one for name, one in raw_of(head).items() if name.startswith("blk.")}
    # All that the converter writes for a whole model, in a file whose trunk was converted without a head.
    told = metadata(gguf.GGUFReader(out))
    assert told["qwen35.block_count"] == LAYERS + 1
    assert told["qwen35.nextn_predict_layers"] == 1
    assert told == {**metadata(head), **{key: told[key] for key in told if key.startswith("GGUF.")}}
    found = inspect(out)
    assert (found.status, found.head.declared_modules, found.head.present_modules) == ("healthy", 1, 1)
    assert found.cure is None


@pytest.mark.parametrize("old_modules", [0, 1])
def test_lists_by_block_keep_the_trunk_s_own_values(old_modules: int, tmp_path: Path) -> None:
    """A fine-tune may differ from the model that the head is from. An old head's entries go with it."""
    path = tmp_path / "tuned.gguf"
    writer = gguf.GGUFWriter(path, "qwen35")
    writer.add_block_count(LAYERS + old_modules)
    writer.add_nextn_predict_layers(old_modules)
    writer.add_head_count_kv(2)
    writer.add_feed_forward_length([8, 16, 24, 32, *[99] * old_modules])
    writer.add_array("qwen35.attention.recurrent_layers", [True, False, True, False, *[True] * old_modules])
    writer.add_tensor("blk.0.ffn_up.weight", np.ones((2, 32), dtype=np.float32))
    finish(writer)
    donor: dict[str, Any] = {
        **{"attention.head_count_kv": [1, 1, 1, 1, 4, 5], "feed_forward_length": [1, 2, 3, 4, 5, 6]},
        **{"attention.recurrent_layers": [True] * 4 + [False] * 2, "swiglu_clamp_exp": [0.0] * 5 + [7.0]},
        # Neither of these has a value for each block.
        **{"rope.dimension_sections": [11, 11, 10, 0, 1], "attention.sliding_window_pattern": [True] * LAYERS},
        "embedding_length": 32,
    }
    assert with_modules(open_gguf(path), donor, 2) == {
        **{"block_count": 6, "nextn_predict_layers": 2},
        **{"attention.head_count_kv": [2, 2, 2, 2, 4, 5], "feed_forward_length": [8, 16, 24, 32, 5, 6]},
        "attention.recurrent_layers": [True, False, True, False, False, False],
        # The trunk has no such list, and so the donor's values for its blocks.
        "swiglu_clamp_exp": [0.0] * 5 + [7.0],
    }


def raw_of(reader: gguf.GGUFReader) -> dict[str, tuple[Any, bytes]]:
    return {one.name: (one.tensor_type, one.data.tobytes()) for one in reader.tensors}


@pytest.mark.parametrize(
    ("kind", "stored", "step"),
    [("q8_0", "Q8_0", 1 / 127), ("q4_0", "Q4_0", 1 / 7), ("bf16", "BF16", 2**-7), (None, "F32", 0)],
)
def test_a_head_of_a_gguf_file_is_copied_or_stored_anew(
    kind: str | None, stored: str, step: float, head: gguf.GGUFReader, trunk: Path, tmp_path: Path
) -> None:
    source = tmp_path / "alone" / "mtp-base.gguf"
    out = tmp_path / "whole.gguf"
    flags = [] if kind is None else ["--head", kind]
    assert run_command("graft", trunk, "--from", source, "--out", out, *flags) == 0
    reader = gguf.GGUFReader(out)
    found = {one.name: one.tensor_type.name for one in reader.tensors}
    assert found[f"blk.{LAYERS}.nextn.eh_proj.weight"] == stored
    assert found[f"blk.{LAYERS}.nextn.enorm.weight"] == "F32"
    name = f"blk.{LAYERS}.nextn.eh_proj.weight"
    error = np.abs(values(reader)[name] - values(head)[name]).max()
    largest = np.abs(values(head)[name]).max()
    assert error <= step * largest
    # No more steps than the kind has.
    assert step == 0 or error > 0
    assert metadata(reader)["qwen35.attention.recurrent_layers"] == [True, True, True, False, False]


def test_a_head_leaves_its_file_as_it_came(head: gguf.GGUFReader, base: Path, trunk: Path, tmp_path: Path) -> None:
    out = tmp_path / "whole.gguf"
    assert run_command("graft", trunk, "--from", base, "--out", out, "--head", "f32") == 0
    assert run_command("export", out, "--head-only", "--out", tmp_path / "taken") == 0
    taken = gguf.GGUFReader(tmp_path / "taken" / "mtp-whole.gguf")
    blocks = {name: one for name, one in raw_of(head).items() if name.startswith("blk.")}
    assert raw_of(taken) == blocks
    assert inspect(tmp_path / "taken" / "mtp-whole.gguf").status == "healthy"


def test_splits_are_kept(base: Path, head: gguf.GGUFReader, tmp_path: Path) -> None:
    first, second = write_trunk(tmp_path / "tuned.gguf", head, parts=2)
    out = tmp_path / "whole.gguf"
    # Any split names the model.
    assert run_command("graft", second, "--from", base, "--out", out) == 0
    written = [tmp_path / f"whole-0000{part}-of-00002.gguf" for part in (1, 2)]
    assert written[1].samefile(second)
    assert raw(written[0]).items() >= raw(first).items()
    told = metadata(gguf.GGUFReader(written[0]))
    assert told["split.tensors.count"] == len(raw(written[0])) + len(raw(second))
    assert inspect(written[1]).status == "healthy"
    second.unlink()
    assert not out.exists()


def test_a_missing_split_is_named(head: gguf.GGUFReader, tmp_path: Path, capsys: Capture) -> None:
    first, second = write_trunk(tmp_path / "tuned.gguf", head, parts=2)
    second.unlink()
    assert f"{second.name} not found; expected a GGUF file with all of its splits" in refusal(
        ["inspect", first], capsys
    )


def test_a_head_of_another_shape_or_architecture_is_refused(trunk: Path, tmp_path: Path, capsys: Capture) -> None:
    other = checkpoint_with_head(tmp_path / "other", "glm4_moe")
    told = refusal(["graft", trunk, "--from", other, "--out", tmp_path / "whole.gguf"], capsys)
    assert "its head is for glm4moe with 3 layers of 32 channels; expected qwen35 with 4 of 32" in told
    assert not (tmp_path / "whole.gguf").exists()


def test_a_head_that_cannot_work_is_no_healthy_one(base: Path, trunk: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "whole.gguf"
    assert run_command("graft", trunk, "--from", base, "--out", out, "--head", "f32") == 0
    reader = gguf.GGUFReader(out, "r+")
    name = f"blk.{LAYERS}.nextn.eh_proj.weight"
    (matrix,) = (one.data for one in reader.tensors if one.name == name)
    kept = matrix.copy()
    for value, problem in ((0.0, f"all zeros: {name}"), (np.nan, f"NaN or infinite values: {name}")):
        matrix[:] = value
        matrix.flush()
        found = inspect(out)
        assert (found.status, found.problems) == ("damaged", (problem,))
        assert found.serves["llama.cpp"] == f"no: {problem}"
    assert problem in refusal(["graft", trunk, "--from", out, "--out", tmp_path / "again.gguf"], capsys)
    matrix[:] = kept
    matrix.flush()
    assert inspect(out).status == "healthy"


def test_a_head_with_a_reduced_vocabulary_is_refused(
    head: gguf.GGUFReader, trunk: Path, tmp_path: Path, capsys: Capture
) -> None:
    reduced = tmp_path / "reduced.gguf"
    name = f"blk.{LAYERS}.nextn.shared_head_head.weight"
    writer = writer_of(head, reduced)
    writer.add_tensor(name, np.ones((100, 32), dtype=np.float32))
    finish(writer)
    told = refusal(["graft", trunk, "--from", reduced, "--out", tmp_path / "out.gguf"], capsys)
    assert f"{name} is [100, 32], in the trunk [272, 32]; expected a GGUF file with a complete head" in told
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03")
    assert "cut.gguf: cannot be read as GGUF" in refusal(["inspect", tmp_path / "cut.gguf"], capsys)


needs_reader = pytest.mark.skipif(IS_OLD, reason="reading qwen35 from GGUF needs transformers 5.23")


@needs_reader
def test_a_gguf_file_is_a_checkpoint_like_any_other(
    base: Path,
    head: gguf.GGUFReader,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    whole = tmp_path / "whole.gguf"
    write_whole(base, head, whole)
    expected = all_tensors(base)
    opened = open_location(str(whole))
    found = all_tensors(opened.path)
    assert found.keys() == expected.keys()
    for key, value in found.items():
        # One added to a norm's weight and taken away again, a logarithm of an exponential: fp32's rounding.
        np.testing.assert_allclose(value.numpy(), expected[key].numpy(), atol=1e-6, rtol=1e-6)
    decoders = [SpeculativeDecoder.from_pretrained(source, dtype=torch.float32) for source in (base, whole)]
    (one,), (other,) = (decoder.generate([[65, 66, 67]], 12) for decoder in decoders)
    assert one.token_ids == other.token_ids
    # Dequantised once, and anew where the file changed.
    assert open_location(str(whole)).path == opened.path
    whole.touch()
    assert open_location(str(whole)).path != opened.path


@needs_reader
def test_a_quantised_value_is_rounded_once(
    base: Path, head: gguf.GGUFReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers computes values of blocks in the dtype that is asked for, which rounds scales and products too."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    write_whole(base, head, tmp_path / "exact.gguf")
    finish(writer_of(gguf.GGUFReader(tmp_path / "exact.gguf"), tmp_path / "packed.gguf", packed=True))
    stored = values(gguf.GGUFReader(tmp_path / "packed.gguf"))
    found = all_tensors(open_location(str(tmp_path / "packed.gguf")).path)
    for name, key in {
        "token_embd": "model.embed_tokens.weight",
        "blk.0.attn_gate": "model.layers.0.linear_attn.in_proj_z.weight",
        "blk.3.ffn_down": "model.layers.3.mlp.down_proj.weight",
        f"blk.{LAYERS}.attn_q": "mtp.layers.0.self_attn.q_proj.weight",
    }.items():
        assert torch.equal(found[key], torch.tensor(stored[f"{name}.weight"]).bfloat16()), name


@needs_reader
def test_an_architecture_that_transformers_does_not_read_is_named(tmp_path: Path, capsys: Capture) -> None:
    other = exported(checkpoint_with_head(tmp_path / "other", "glm4_moe"), tmp_path / "alone")
    assert other is not None
    file = tmp_path / "alone" / "mtp-other.gguf"
    told = refusal(["generate", file, "--prompt", "abc"], capsys)
    assert "does not read the architecture glm4moe from GGUF" in told
    assert "mtp-train inspect and graft work with this file" in told


@needs_reader
def test_a_rescue_of_a_gguf_file_ends_in_one(
    base: Path, head: gguf.GGUFReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    # What is measured on so small a model recommends no number of drafts.
    monkeypatch.setattr("mtp_train.report.wording.serving_depth", lambda _report: 2)
    whole = tmp_path / "tuned.gguf"
    out = tmp_path / "rescued"
    write_whole(base, head, whole)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "text {index} of {index * index}"}}\n' for index in range(24)))
    settings = {"train.max_steps": 1, "train.warmup_steps": 0, "train.tokens_per_step": 64, "data.seq_len_tokens": 64}
    settings |= {"data.regenerate.max_new_tokens": 8, "evaluate.max_new_tokens": 8, "evaluate.prompts": 2}
    rescued = rescue(whole, base, out, data=[prompts], overrides=settings | {"gate.enabled": False})
    assert (rescued.out, rescued.head) == (out / "tuned-mtp.gguf", "retrained")
    command = f"llama-server -m {rescued.out} --spec-type draft-mtp --spec-draft-n-max 2"
    assert rescued.serves == {"llama.cpp": command}
    found = inspect(rescued.out)
    # Rows of 48 numbers fill no block of Q8_0.
    assert (found.status, str(found.note).partition("; ")[2]) == ("healthy", "the head is Q8_0 (7), F32 (7), F16 (1)")
    trunk = {name: one for name, one in raw(whole).items() if not name.startswith(f"blk.{LAYERS}.")}
    assert raw(rescued.out).items() >= trunk.items()
    page = (out / "report.html").read_text()
    assert command in page
    assert "convert_hf_to_gguf" not in page
    # A run of a recipe writes no GGUF file: its command does, or writes the head for a trunk that has none.
    monkeypatch.chdir(tmp_path)
    stripped = write_trunk(tmp_path / "stripped.gguf", head)[0]
    recipe = out / "recipe.yaml"
    for file, flag in ((whole, "-m"), (stripped, "-md")):
        recipe.write_text(recipe.read_text().replace(str(whole), str(file)))
        write, serve = str(RunResult(0, "done", "", "done", out).serves["llama.cpp"]).split(" && ")
        paste(write)
        words = shlex.split(serve)
        (written,) = glob.glob(words[words.index(flag) + 1])
        assert inspect(written).status == "healthy"
        assert words[-4:] == ["--spec-type", "draft-mtp", "--spec-draft-n-max", "2"]
    assert words[:3] == ["llama-server", "-m", str(stripped)]
