"""A head in a directory of its own that an engine loads as a draft model beside any copy of its trunk."""

from __future__ import annotations

import shutil
from pathlib import Path

from mtp_train.weights.export import patched_documents, shared_tensors, source_files
from mtp_train.weights.files import INDEX_FILE, SINGLE_FILE, Checkpoint
from mtp_train.weights.keymap import HeadLayout
from mtp_train.weights.native import NativeHead, stored_tensor
from mtp_train.weights.writing import new_directory, write_json, write_safetensors

# Everything beside the weights is small and may be needed: tokenizer, generation config, chat template, processor.
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".h5", ".msgpack", ".onnx", ".npz")


def write_head_only(source: Checkpoint, layout: HeadLayout, head: NativeHead, out: Path) -> None:
    """Write the head with what its engine needs to load it alone: embedding, lm_head, config and tokenizer.

    An engine puts the trunk's embedding and lm_head in the place of these, but does not start without them.

    Raises:
        OutputExistsError: ``out`` exists.
        CheckpointError: The disk is full, or a head tensor has another shape than its head says.
    """
    ends: tuple[str, ...] = (layout.embed_key, layout.lm_head_key.removesuffix("weight"))
    if layout.family.embed_norm_key is not None:
        ends = (*ends, layout.family.embed_norm_key.format(trunk=layout.trunk_prefix))
    tensors = [stored_tensor(source, key, key) for key in sorted(source.tensors) if key.startswith(ends)]
    tensors += [*head.tensors, *shared_tensors(source, layout, head)]
    documents = patched_documents(source, layout, head)
    files = source_files(source)
    with new_directory(out, what="the head") as directory:
        write_safetensors(directory / SINGLE_FILE, tensors)
        for file in files:
            kept = file.parent == source.path and file.suffix not in _WEIGHT_SUFFIXES and file.name != INDEX_FILE
            if kept and file.name not in documents:
                shutil.copyfile(file, directory / file.name)
        for name, document in documents.items():
            write_json(directory / name, document)
