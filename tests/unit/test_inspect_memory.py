"""``inspect`` looks for NaN in every weight of a shard of any size: in blocks, never mapped, never copied whole."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from checkpoints import base_and_finetune, wrap_as_vision_language

BIG_BYTES = 3 << 29
KEY = "model.visual.merger.weight"
SCRIPT = """
import sys
import mtp_train as mtp

def peak():
    # Of this program: the peak that getrusage knows includes that of the process which started it.
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

small = mtp.inspect(sys.argv[1])
before = peak()
big = mtp.inspect(sys.argv[2])
grown = peak() - before
with open(sys.argv[2] + "/model.safetensors", "rb") as file:
    import mmap
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[place] for place in range(0, 1 << 30, 4096))
print(len(small.weights.non_finite_keys), len(big.weights.non_finite_keys), grown, peak() - before)
"""


def enlarge(checkpoint: Path) -> None:
    """Make one tensor as large as a shard of a large model: zeros that take no space on the disk, and one NaN."""
    file = checkpoint / "model.safetensors"
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header[KEY] = {
        "dtype": "F32",
        "shape": [1024, BIG_BYTES // 4096],
        "data_offsets": [len(data), len(data) + BIG_BYTES],
    }
    written = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(written)) + written + data)
    os.truncate(file, file.stat().st_size + BIG_BYTES - 4)
    with file.open("ab") as out:
        out.write(struct.pack("<f", float("nan")))


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak of memory as Linux tells it")
def test_inspect_reads_a_shard_that_is_larger_than_its_memory(tmp_path: Path) -> None:
    paths = []
    for name in ("small", "big"):
        (tmp_path / name).mkdir()
        paths.append(wrap_as_vision_language(base_and_finetune(tmp_path / name, "qwen3_5")[0]))
    enlarge(paths[1])
    done = subprocess.run([sys.executable, "-c", SCRIPT, *map(str, paths)], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    in_small, in_big, grown, mapped = map(int, done.stdout.split())
    assert (in_small, in_big) == (0, 1)
    # A block has 4 Mi elements; some are alive at a time.
    assert grown < 8 * (4 << 22)
    # The control: a mapping of the first GiB counts as memory here.
    assert mapped > 1 << 29
