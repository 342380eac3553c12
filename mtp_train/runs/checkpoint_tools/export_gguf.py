"""``mtp-train export --gguf``: write a head as a GGUF file of its own, to load beside a trunk in GGUF."""

from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from mtp_train.checkpoints.gguf.model_types import gguf_head_for
from mtp_train.checkpoints.gguf.sidecar import GgufKind, write_gguf
from mtp_train.checkpoints.gguf.tensors import gguf_tensors
from mtp_train.checkpoints.native import native_head_of
from mtp_train.checkpoints.writing import new_directory, refuse_existing
from mtp_train.heads.diagnose import layout_of, text_config_of
from mtp_train.runs.checkpoint_tools.head_to_export import head_to_export
from mtp_train.trunk.tokenizer import load_tokenizer


def export_gguf(source: Path, out: Path, *, kind: GgufKind, progress: Progress) -> tuple[Path, Path]:
    """Write ``mtp-NAME.gguf`` into a new directory, named after the trunk.

    Args:
        source: A run directory or a checkpoint that holds a head, as for ``export``.
        out: The new directory.
        kind: Storage type of matrices.
        progress: A started progress bar.

    Returns:
        Path of the trunk's checkpoint and path of the file.

    Raises:
        OutputExistsError: ``out`` exists.
        UnsupportedModelError: llama.cpp has no known graph for the head.
        CheckpointError: See :func:`head_to_export`; or the tokenizer does not fit.
        GateRefusedError: The run's head is not better than its baseline.
    """
    refuse_existing(out, what="the GGUF file")
    found = head_to_export(source, progress, alone=True)
    trunk, layout = found.trunk, layout_of(found.holder)
    # A checkpoint may store its head in FP8; read without ``verbatim``, the tensors are plain floats.
    head = native_head_of(found.holder, layout, layout) if found.artifact is None else found.head
    record = gguf_head_for(trunk.family, str(trunk.text_config.get("model_type")), where=str(trunk.path))
    text_config = text_config_of(trunk)
    # The raw config has fields that transformers drops. A config that lists its layers one by one has no layer count.
    config = {**trunk.text_config, **text_config.to_dict(), "num_hidden_layers": text_config.num_hidden_layers}
    tensors = gguf_tensors(trunk, layout, head, record, config)
    tokenizer = load_tokenizer(trunk, trust_remote_code=False)
    name = f"mtp-{checkpoint_name(trunk.path)}.gguf"
    with new_directory(out, what="the GGUF file") as directory:
        write_gguf(
            directory / name,
            record,
            tensors,
            kind=kind,
            trunk=trunk.path,
            config=config,
            tokenizer=tokenizer,
            progress=progress,
        )
    return trunk.path, out / name


def checkpoint_name(path: Path) -> str:
    """Return the name of a checkpoint's directory; in the hub's cache, with its hashes, the model's name."""
    path = path.resolve()
    if path.parent.name == "snapshots":
        return path.parents[1].name.rsplit("--", 1)[-1]
    return path.name
