"""A head joins a GGUF file only if llama.cpp loads the result, and reads the trunk's own embedding there."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from gguf_files import VOCAB_SIZE, checkpoint_with_head, finish, metadata, write_trunk_of, writer_of
from mtp_train import inspect
from mtp_train.checkpoints.gguf.model_file import open_gguf, with_modules
from mtp_train.cli.main import main
from runs import Capture, paste, refusal, run_command
from tiny import ALL_FAMILIES

FLOAT = gguf.GGUFValueType.FLOAT32
MORE = VOCAB_SIZE + 64
"""Tokens of a fine-tune that added some."""
BY_TOKEN = ("nextn.embed_tokens.weight", "nextn.shared_head_head.weight")
REPEATING = [one for one in ("glm4_moe", "deepseek_v3", "cohere2_moe") if one in ALL_FAMILIES]


def loads(path: Path) -> bool:
    """Return whether llama.cpp loads a file with its head; True where it is not installed."""
    try:
        import llama_cpp
    except ImportError:
        return True
    options = llama_cpp.llama_model_default_params()
    options.load_mtp = True
    model = llama_cpp.llama_model_load_from_file(str(path).encode(), options)
    if model:
        llama_cpp.llama_model_free(model)
    return bool(model)


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a base, its trunk as a GGUF file, and its head in a file of its own."""
    directory = tmp_path_factory.mktemp("glm")
    write_trunk_of(checkpoint_with_head(directory / "base", "glm4_moe"), directory / "tuned.gguf")
    (directory / "tuned.head" / "mtp-base.gguf").rename(directory / "head.gguf")
    return directory


@pytest.mark.parametrize("family_name", REPEATING)
def test_a_head_reads_the_embedding_and_the_lm_head_of_its_new_trunk(family_name: str, tmp_path: Path) -> None:
    base = checkpoint_with_head(tmp_path / "base", family_name)
    tuned = checkpoint_with_head(tmp_path / "tuned", family_name, vocab_size=MORE)
    trunk = write_trunk_of(tuned, tmp_path / "tuned.gguf")
    assert run_command("export", base, "--out", tmp_path / "alone", "--gguf", "f32") == 0
    for number, donor in enumerate((base, tmp_path / "alone" / "mtp-base.gguf")):
        out = tmp_path / f"{number}.gguf"
        assert run_command("graft", trunk, "--from", donor, "--out", out) == 0
        assert not [one.name for one in gguf.GGUFReader(out).tensors if one.name.endswith(BY_TOKEN)]
        assert inspect(out).status == "healthy"
        assert loads(out)


@pytest.mark.skipif("step3p7" not in ALL_FAMILIES, reason="this transformers does not run Step-3.5")
def test_a_head_s_own_lm_head_stays_and_has_the_trunk_s_tokens(tmp_path: Path, capsys: Capture) -> None:
    base = checkpoint_with_head(tmp_path / "base", "step3p7")
    tuned = checkpoint_with_head(tmp_path / "tuned", "step3p7", vocab_size=MORE)
    same = write_trunk_of(base, tmp_path / "same.gguf")
    more = write_trunk_of(tuned, tmp_path / "more.gguf")
    assert run_command("graft", same, "--from", base, "--out", tmp_path / "out.gguf") == 0
    name = f"blk.3.{BY_TOKEN[1]}"
    assert name in {one.name for one in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert loads(tmp_path / "out.gguf")
    told = refusal(["graft", more, "--from", base, "--out", tmp_path / "no.gguf"], capsys)
    assert f"{name} is [{VOCAB_SIZE}, 32], in the trunk [{MORE}, 32]; expected a head for {more}" in told


def test_a_head_with_other_experts_is_refused(glm: Path, tmp_path: Path, capsys: Capture) -> None:
    donor = checkpoint_with_head(tmp_path / "six", "glm4_moe", num_experts=6)
    told = refusal(["graft", glm / "tuned.gguf", "--from", donor, "--out", tmp_path / "out.gguf"], capsys)
    assert f"{donor}: blk.3.exp_probs_b.bias is [6], in the trunk [4]; expected a head for {glm}" in told
    assert not (tmp_path / "out.gguf").exists()


def test_a_row_in_one_file_is_a_vector_in_another(tmp_path: Path) -> None:
    """Converters write the gate of a shared expert in both ways, and llama.cpp reads both."""
    base = checkpoint_with_head(tmp_path / "base", "qwen3_5_moe")
    trunk = tmp_path / "tuned.gguf"
    writer = gguf.GGUFWriter(trunk, "qwen35moe")
    writer.add_block_count(4)
    writer.add_embedding_length(32)
    writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", np.ones(32, dtype=np.float32))
    finish(writer)
    assert run_command("graft", trunk, "--from", base, "--out", tmp_path / "whole.gguf") == 0


def changed(source: Path, path: Path, name: str, shape: tuple[int, ...]) -> Path:
    """Write a GGUF file with zeros of another shape in the place of a tensor."""
    writer = writer_of(gguf.GGUFReader(source), path)
    for tensors in writer.tensors:
        tensors.pop(name, None)
    writer.add_tensor(name, np.zeros(shape, dtype=np.float32))
    finish(writer)
    return path


@pytest.mark.parametrize(
    ("name", "shape", "own"),
    [
        ("attn_k.weight", (48, 32), [16, 32]),
        ("ffn_down_shexp.weight", (32, 24), [32, 16]),
        ("attn_norm.weight", (48,), [32]),
    ],
)
def test_a_head_of_other_sizes_is_refused(
    name: str, shape: tuple[int, ...], own: list[int], glm: Path, tmp_path: Path, capsys: Capture
) -> None:
    donor = changed(glm / "head.gguf", tmp_path / "donor.gguf", f"blk.3.{name}", shape)
    told = refusal(["graft", glm / "tuned.gguf", "--from", donor, "--out", tmp_path / "out.gguf"], capsys)
    assert f"{donor}: blk.3.{name} is {list(shape)}, in the trunk {own}; expected a head for" in told
    assert not (tmp_path / "out.gguf").exists()


def test_a_file_that_llama_cpp_refuses_is_not_called_healthy(glm: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole.gguf"
    name = "blk.3.ffn_down_exps.weight"
    command = ["graft", str(glm / "tuned.gguf"), "--from", str(glm / "base"), "--out", str(whole), "--head", "f32"]
    assert main(command) == 0
    found = inspect(changed(whole, tmp_path / "six.gguf", name, (6, 32, 16)))
    problem = f"{name} is [6, 32, 16], in the trunk [4, 32, 16]"
    assert (found.status, found.problems) == ("damaged", (problem,))
    assert found.serves["llama.cpp"] == f"no: {problem}"
    assert found.cure is not None


@pytest.mark.parametrize("name", ["general.languages", "glm4moe.swiglu_clamp_exp"])
def test_an_empty_list_is_copied(name: str, glm: Path, tmp_path: Path) -> None:
    trunk = write_trunk_of(glm / "base", tmp_path / "tuned.gguf", **{name: "four"})
    written = trunk.read_bytes()
    at = written.index(name.encode()) + len(name)
    # The package writes none; a text of four letters takes as many bytes.
    trunk.write_bytes(written[:at] + struct.pack("<IIQ", gguf.GGUFValueType.ARRAY, FLOAT, 0) + written[at + 16 :])
    # An empty list says nothing of the blocks.
    bounds = [0.0, 0.0, 0.0, 7.0]
    assert with_modules(open_gguf(trunk), {"swiglu_clamp_exp": bounds}, 1)["swiglu_clamp_exp"] == bounds
    out = tmp_path / "whole.gguf"
    assert run_command("graft", trunk, "--from", glm / "base", "--out", out) == 0
    found = gguf.GGUFReader(out)
    assert metadata(found)[name] == []
    assert found.get_field(name).parts[3] == FLOAT
    assert metadata(found) == metadata(gguf.GGUFReader(trunk)) | {
        "glm4moe.block_count": 4,
        "glm4moe.nextn_predict_layers": 1,
        **{key: value for key, value in metadata(found).items() if key.startswith("GGUF.")},
    }


# Names


@pytest.mark.parametrize(("tuned", "out"), [("tuned.gguf", "out"), ("tuned.gguf", "out.bin"), ("base", "out.gguf")])
def test_an_output_is_named_as_its_input_is(tuned: str, out: str, glm: Path, tmp_path: Path, capsys: Capture) -> None:
    command = ["graft", glm / tuned, "--from", glm / "base", "--out"]
    told = refusal([*command, tmp_path / out], capsys)
    assert not any(tmp_path.iterdir())
    named = re.search(r"Use --out (\S+)\.$", told)
    assert named is not None, told
    assert run_command(*map(str, command), named[1]) == 0
    assert inspect(named[1]).status == "healthy"


@pytest.mark.parametrize("more", [[], ["--gguf", "q8_0"]])
def test_the_head_of_a_gguf_file_is_exported_by_the_command_that_is_named(
    more: list[str], glm: Path, tmp_path: Path, capsys: Capture
) -> None:
    whole = tmp_path / "whole.gguf"
    assert run_command("graft", glm / "tuned.gguf", "--from", glm / "base", "--out", whole) == 0
    told = refusal(["export", whole, "--out", tmp_path / "head", *more], capsys)
    assert inspect(paste(told.split("'")[1]) / "mtp-whole.gguf").status == "healthy"


def test_a_folder_of_gguf_files_names_them(glm: Path, tmp_path: Path, capsys: Capture) -> None:
    named = glm / "tuned.gguf"
    (tmp_path / named.name).symlink_to(named)
    for command in (["inspect", tmp_path], ["graft", glm / "base", "--from", tmp_path, "--out", tmp_path / "out"]):
        told = refusal(command, capsys)
        assert told.endswith(f"or the name of a GGUF file. Use {tmp_path / named.name}.\n")
    # A config, without weights, is no checkpoint either.
    (tmp_path / "config.json").write_text((glm / "base" / "config.json").read_text())
    assert f"Use {tmp_path / named.name}." in refusal(["generate", tmp_path, "--prompt", "a"], capsys)
    # Files beside a checkpoint are nobody's business.
    (glm / "base" / named.name).symlink_to(named)
    assert inspect(glm / "base").status == "healthy"
    (glm / "base" / named.name).unlink()
