"""The CPU table: every arm in turn, ratios within a repeat, and figures on the page that the recorded run has."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from benchmarks.cpu_table import (
    DEPTHS,
    GLM_DEPTHS,
    RAGGED,
    SMALL,
    SPEEDS,
    LlamaCppArm,
    main,
    measure,
    ratios,
    table,
    write_trunk,
)
from mtp_inference.bench.subject import shape_subject

PAGE = Path(__file__).parents[2] / "inference" / "benchmarks" / "cpu"
OURS = [("ours", depth) for depth in DEPTHS]


def test_every_arm_is_measured_and_printed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.cpu_table.bf16_support", lambda _device: (True, "a stand-in"))
    main(["--small", "--out", str(tmp_path)])
    *printed, last = capsys.readouterr().out.splitlines()
    document = json.loads(last)
    assert json.loads((tmp_path / "table.json").read_text()) == document
    assert table(document).splitlines() == printed[:-1]
    assert document["skipped"].keys() == {"llama.cpp"}
    found: dict[tuple[Any, ...], list[Any]] = {}
    for row in document["decoding"]:
        found.setdefault((row["model"], row["precision"], row["batch"]), []).append((row["arm"], row["depth"]))
        assert len(row[SPEEDS]) == SMALL.repeats
        assert min(row[SPEEDS]) > 0
    arms = [*OURS, ("transformers", None)]
    shape_cells = {("tiny-qwen", one, batch): arms for one in ("fp32", "bf16") for batch in (1, 8)}
    deep = [("ours", depth) for depth in GLM_DEPTHS]
    glm = {("tiny-glm", "fp32", 1): [*deep, ("transformers", None), ("transformers use_mtp", None)]}
    assert found == shape_cells | glm
    assert [row["cell"] for row in document["ragged"]] == list(RAGGED)
    assert document["ratios"] == ratios(document["decoding"], document["ragged"])
    assert len(document["ratios"]) == len(shape_cells) + len(GLM_DEPTHS[1:]) + len(RAGGED)


def test_a_ratio_is_taken_within_each_repeat() -> None:
    def row(arm: str, depth: int | None, speeds: list[float]) -> dict[str, Any]:
        return {"model": "64m", "precision": "fp32", "batch": 1, "arm": arm, "depth": depth, SPEEDS: speeds}

    decoding = [row("ours", 0, [2.0, 6.0, 4.0]), row("ours", 1, [9.0] * 3), row("transformers", None, [1.0, 6.0, 2.0])]
    (found,) = ratios(decoding, [])
    assert found["ratio"] == "plain / transformers, 64m, fp32, batch 1"
    assert (found["median"], found["least"], found["most"], found["met"]) == (2.0, 1.0, 2.0, True)
    slower = [{**one, SPEEDS: [speed / 2 for speed in one[SPEEDS]]} for one in decoding[:2]]
    assert not ratios([*slower, decoding[2]], [])[0]["met"]


def test_llama_cpp_decodes_the_same_number_of_tokens_in_one_thread(tmp_path: Path) -> None:
    program, log = tmp_path / "llama-batched-bench", tmp_path / "log"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nopen({str(log)!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
    )
    program.chmod(0o755)
    run = LlamaCppArm(program, tmp_path / "trunk.gguf").run([[0] * 5] * 2, 7)
    # The first token of each text comes with the prompt.
    assert run.decode_tokens == 2 * 6
    assert min(run.seconds_prefill, run.seconds) > 0
    for line, new_tokens in zip(log.read_text().splitlines(), (1, 7), strict=True):
        words = line.split()
        asked = dict(zip(words[::2], words[1::2], strict=True))
        assert asked["-m"] == str(tmp_path / "trunk.gguf")
        assert [asked[name] for name in ("-t", "-tb", "-npp", "-ntg", "-npl")] == ["1", "1", "5", str(new_tokens), "2"]
        assert int(asked["-c"]) >= 2 * (5 + new_tokens)


def test_a_llama_cpp_that_fails_is_not_measured(tmp_path: Path) -> None:
    program = tmp_path / "llama-batched-bench"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    with pytest.raises(Exception, match="exit status 1"):
        LlamaCppArm(program, tmp_path / "trunk.gguf").run([[0]], 2)


def test_the_file_for_llama_cpp_has_the_whole_trunk_in_fp32(tmp_path: Path) -> None:
    trunk = shape_subject("tiny-qwen", dtype=torch.bfloat16, device=torch.device("cpu"), seed=0).trunk
    write_trunk(tmp_path / "trunk.gguf", trunk)
    reader = gguf.GGUFReader(tmp_path / "trunk.gguf")
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    found = {tensor.name: tensor.data.reshape(tensor.shape[::-1]) for tensor in reader.tensors}
    assert sum(value.size for value in found.values()) == sum(one.numel() for one in trunk.causal_lm.parameters())
    layer = trunk.layers[0]
    expected = {
        "blk.0.attn_norm.weight": layer.input_layernorm.weight + 1,
        "blk.0.ssm_norm.weight": layer.linear_attn.norm.weight,
        "blk.0.ssm_a": -layer.linear_attn.A_log.exp(),
        "blk.0.ssm_conv1d.weight": layer.linear_attn.conv1d.weight.squeeze(1),
        "blk.3.attn_q.weight": trunk.layers[3].self_attn.q_proj.weight,
        "output.weight": trunk.lm_head_VD,
    }
    for name, value in expected.items():
        assert np.array_equal(found[name], value.float().numpy()), name
    fields = {key: field.contents() for key, field in reader.fields.items()}
    assert fields["qwen35.block_count"] == 4
    assert fields["qwen35.attention.recurrent_layers"] == [True, True, True, False]
    assert fields["qwen35.vocab_size"] == 512


def test_the_page_has_the_figures_of_the_recorded_run() -> None:
    page = (PAGE / "README.md").read_text(encoding="utf-8")
    document = json.loads((PAGE / "table.json").read_text(encoding="utf-8"))
    assert table(document) in page
    assert document["hardware"]["processor"] in page
    changed = document | {"decoding": document["decoding"][1:]}
    assert table(changed) not in page


def test_what_is_left_out_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.cpu_table.bf16_support", lambda _device: (False, "a stand-in"))
    monkeypatch.setattr("benchmarks.cpu_table.use_mtp_cells", lambda _sizes: [])
    # Called for llama.cpp only.
    monkeypatch.setattr("benchmarks.cpu_table.write_trunk", None)
    found = measure(SMALL, None)
    assert found["skipped"] == {"bf16": "a stand-in", "llama.cpp": "no --llama-batched-bench"}
    assert {(row["arm"], row["precision"]) for row in found["decoding"]} == {("ours", "fp32"), ("transformers", "fp32")}
