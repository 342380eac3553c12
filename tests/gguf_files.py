"""Exporting a tiny checkpoint's head as GGUF, and reading the file back."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from byte_tokenizer import byte_tokenizer
from checkpoints import all_tensors, save_with_head
from mtp_train.checkpoints.export import with_fields
from mtp_train.checkpoints.files import open_checkpoint
from mtp_train.checkpoints.gguf.architectures import GGUF_HEADS
from mtp_train.checkpoints.gguf.sidecar import head_tensors
from mtp_train.checkpoints.native import NativeHead, exact_tensor
from mtp_train.cli.main import main
from mtp_train.runs.checkpoint_tools.gguf_files import config_of
from tiny import tiny_head, tiny_trunk

VOCAB_SIZE = 272


def checkpoint_with_head(
    path: Path, family_name: str, num_experts: int | None = None, vocab_size: int = VOCAB_SIZE
) -> Path:
    trunk = tiny_trunk(family_name, vocab_size=vocab_size, num_experts=num_experts)
    save_with_head(trunk, tiny_head(trunk), path)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["[gMASK]", "<|user|>", "<|observation|>", "<|endoftext|>"]}
    )
    tokenizer.save_pretrained(path)
    return path


def exported(checkpoint: Path, out: Path, kind: str = "f16") -> gguf.GGUFReader:
    assert main(["export", str(checkpoint), "--out", str(out), "--gguf", kind]) == 0
    assert [file.name for file in out.iterdir()] == [f"mtp-{checkpoint.name}.gguf"]
    return gguf.GGUFReader(out / f"mtp-{checkpoint.name}.gguf")


def values(reader: gguf.GGUFReader) -> dict[str, np.ndarray[Any, Any]]:
    """Return every tensor, dequantised, in torch's order of axes."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        for tensor in reader.tensors
    }


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    return {key: field.contents() for key, field in reader.fields.items()}


def add_fields(writer: gguf.GGUFWriter, head: gguf.GGUFReader, num_layers: int) -> None:
    """Add the fields of a head's file as its trunk alone has them."""
    arch = head.get_field("general.architecture").contents()
    for key, field in head.fields.items():
        value = field.contents()
        if key == f"{arch}.block_count":
            value = num_layers
        elif key.startswith(arch) and isinstance(value, list):
            value = value[:num_layers]
        if not key.startswith("GGUF.") and not key.endswith((".architecture", ".nextn_predict_layers")):
            writer.add_key_value(key, value, field.types[0], sub_type=field.types[-1])


def write_trunk_of(checkpoint: Path, path: Path, **added: Any) -> Path:
    """Write a trunk without its head, for a family whose heads are named as layers; ``added`` are further fields."""
    opened = open_checkpoint(checkpoint)
    layout = opened.layout
    config = config_of(opened)
    record = GGUF_HEADS[opened.text_config["model_type"]]
    layers = f"{layout.trunk_prefix}layers."
    head = exported(checkpoint, path.with_suffix(".head"), "f32")
    writer = gguf.GGUFWriter(path, record.arch)
    add_fields(writer, head, config["num_hidden_layers"])
    for name, value in added.items():
        writer.add_key_value(name, value, gguf.GGUFValueType.get_type(value))
    keys = [key for key in opened.tensors if key.startswith(layers) and not layout.is_head_key(key)]
    stored = NativeHead(tuple(exact_tensor(opened, key, key) for key in keys), (), {})
    # As if every layer was one of a head.
    none_before = replace(opened, config=with_fields(opened, {"num_hidden_layers": 0}))
    for one in head_tensors(none_before, stored, record, {**config, "num_hidden_layers": 0}):
        writer.add_tensor(one.key, one.load().float().numpy())
    for tensor in head.tensors:
        if not tensor.name.startswith("blk."):
            writer.add_tensor(tensor.name, tensor.data)
    finish(writer)
    return path


def finish(writer: gguf.GGUFWriter) -> None:
    """Write a file whose fields and tensors were added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def writer_of(head: gguf.GGUFReader, path: Path, *, packed: bool = False) -> gguf.GGUFWriter:
    """Return the writer of a file with the fields and tensors of another, which more tensors may join.

    Args:
        packed: Store matrices in Q4_0 where their rows fill its blocks.
    """
    writer = gguf.GGUFWriter(path, head.get_field("general.architecture").contents())
    for key, field in head.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=field.types[-1])
    for tensor in head.tensors:
        data = tensor.data
        stored = tensor.tensor_type
        if packed and len(tensor.shape) > 1 and tensor.shape[0] % 32 == 0:
            stored = gguf.GGMLQuantizationType.Q4_0
            data = gguf.quants.quantize(data, stored)
        writer.add_tensor(tensor.name, data, raw_dtype=stored)
    return writer


def write_whole(checkpoint: Path, head: gguf.GGUFReader, path: Path) -> None:
    """Write a tiny Qwen3.5 with its head as llama.cpp's converter does, in fp32; it has one key head to reorder for."""
    writer = writer_of(head, path)
    for key, value in all_tensors(checkpoint).items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", key)
        if match is not None:
            name = f"blk.{match[1]}.{LAYER_NAMES[match[2]]}"
            values = value.float().numpy()
            if name.endswith("ssm_a"):
                values = -np.exp(values)
            elif name.endswith("norm.weight") and not name.endswith("ssm_norm.weight"):
                values = values + 1
            writer.add_tensor(name, values.squeeze(1) if "conv1d" in name else values)
    finish(writer)


LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    **{f"mlp.{part}_proj.weight": f"ffn_{part}.weight" for part in ("gate", "up", "down")},
    **{f"self_attn.{part}_proj.weight": f"attn_{part}.weight" for part in "qkv"},
    "self_attn.o_proj.weight": "attn_output.weight",
    **{f"self_attn.{part}_norm.weight": f"attn_{part}_norm.weight" for part in "qk"},
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
}
