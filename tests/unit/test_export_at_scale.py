"""Checkpoints far larger than memory: export, graft and merge hold a block of them, not a model.

The files are sparse: a header, and zeros that take no place on the disk until something is written.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

from json_files import read_json, write_json
from launching import environment
from mtp_train.checkpoints.files import INDEX_FILE, open_checkpoint
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.families import family_for
from mtp_train.heads.diagnose import diagnose_head, empty_head

MAX_RESIDENT_BYTES = 2e9
# The command line, with its peak memory as the last line on stderr. `ru_maxrss` would start at the memory of the parent
# process.
MEASURED = """
import re, sys
from pathlib import Path
from mtp_train.cli.main import main
code = main()
print(1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]), file=sys.stderr)
sys.exit(code)
"""
BF16_ONE = (0x3F80).to_bytes(2, "little")
# The widths of a 27B model, and as many of its layers as make up the size.
LARGE = {"hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 24, "num_key_value_heads": 4}
SIZES: dict[str, tuple[dict[str, int], int, float]] = {
    "4 GB": (LARGE | {"num_hidden_layers": 4}, 2, 4e9),
    "40 GB": (LARGE | {"num_hidden_layers": 48}, 10, 40e9),
}


def write_sparse(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bf16 zeros that takes few blocks on the disk: the first value of a tensor is 1."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, shape in shapes.items():
        start = end
        end = end + 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded)
    os.truncate(path, 8 + len(encoded) + end)
    with path.open("r+b") as file:
        for key in shapes:
            file.seek(8 + len(encoded) + header[key]["data_offsets"][0])
            file.write(BF16_ONE)


def write_checkpoint(path: Path, config: Qwen3_5TextConfig, num_shards: int, *, head: bool) -> int:
    """Write a checkpoint of a config, sharded; return the bytes its tensors stand for."""
    config.save_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    trunk = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    raw = read_json(path / "config.json") | {"architectures": ["Qwen3_5ForCausalLM"]}
    # The config does not declare the head: export declares it.
    raw.pop("mtp_num_hidden_layers", None)
    write_json(path / "config.json", raw)
    family = family_for(raw, where="test")
    layout = HeadLayout(family, "model.", config.num_hidden_layers)
    own = layout.native_shapes(empty_head(family, config, 1)) if head else {}
    keys = [*trunk, *own]
    files = {key: f"model-{1 + place * num_shards // len(keys):05d}.safetensors" for place, key in enumerate(keys)}
    for file in set(files.values()):
        write_sparse(path / file, {key: (trunk | own)[key] for key in keys if files[key] == file})
    write_json(path / INDEX_FILE, {"metadata": {}, "weight_map": files})
    return sum(2 * torch.Size(shape).numel() for shape in (trunk | own).values())


def measured(argv: list[Any]) -> int:
    """Run a command in a process of its own; return the most memory it held, in bytes."""
    command = [sys.executable, "-c", MEASURED, *map(str, argv)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.splitlines()[-1])


def disk_bytes(path: Path) -> int:
    """Return the bytes of a directory on disk: linked files count once, holes do not count."""
    return sum({file.stat().st_ino: 512 * file.stat().st_blocks for file in path.iterdir()}.values())


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="memory is read from Linux's /proc")
@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_a_checkpoint_larger_than_memory_is_written_in_two_gigabytes(size: str, tmp_path: Path) -> None:
    fields, num_shards, least_bytes = SIZES[size]
    config = Qwen3_5TextConfig(vocab_size=248320, head_dim=256, tie_word_embeddings=False, dtype="bfloat16", **fields)
    total = write_checkpoint(tmp_path / "base", config, num_shards, head=True)
    write_checkpoint(tmp_path / "finetune", config, num_shards, head=False)
    assert total > least_bytes
    assert disk_bytes(tmp_path / "base") < 1e7
    name = f"base_model.model.model.layers.{config.num_hidden_layers - 1}.self_attn.q_proj"
    save_adapter(tmp_path / "lora", name, config)
    commands: dict[str, list[Any]] = {
        "exported": ["export", tmp_path / "base"],
        "grafted": ["graft", tmp_path / "finetune", "--from", tmp_path / "base"],
        "merged": ["merge", tmp_path / "base", "--adapter", tmp_path / "lora"],
    }
    for out, command in commands.items():
        held = measured([*command, "--out", tmp_path / out])
        assert held < MAX_RESIDENT_BYTES, f"{out}: {held / 1e9:.2f} GB"
        assert diagnose_head(open_checkpoint(tmp_path / out)).complete
        # Only what had to change was written.
        linked = [file.stat().st_nlink for file in (tmp_path / out).glob("*.safetensors")]
        assert sum(count == 1 for count in linked) == {"exported": 0, "grafted": 1, "merged": 1}[out]


def save_adapter(path: Path, module: str, config: Qwen3_5TextConfig) -> None:
    path.mkdir()
    write_json(path / "adapter_config.json", {"peft_type": "LORA", "r": 8, "lora_alpha": 16})
    rows = 2 * config.num_attention_heads * config.head_dim
    pair = {
        f"{module}.lora_A.weight": torch.ones(8, config.hidden_size),
        f"{module}.lora_B.weight": torch.ones(rows, 8),
    }
    save_file(pair, path / "adapter_model.safetensors")
