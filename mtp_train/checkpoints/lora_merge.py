"""Merge a LoRA adapter into a checkpoint's own layout, tensor by tensor, without building the model.

``W + scale * left @ right`` is computed in fp32, a block of rows at a time, and rounded once to the stored dtype. Key
names, shards, dtypes and every byte of the other tensors stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtp_train.checkpoints.adapter import (
    ADAPTER_CONFIG_FILE,
    Adapter,
    LowRank,
    replaced_tokenizer_files,
    tokenizer_files,
)
from mtp_train.checkpoints.files import TORCH_DTYPES, Checkpoint, all_finite
from mtp_train.checkpoints.keymap import HeadLayout
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.checkpoints.writing import PendingTensor
from mtp_train.errors import CheckpointError

_FLOATS = ("F32", "F16", "BF16")
_OF_A_LAYER = re.compile(r"layers\.(?P<layer>\d+)\.(?P<tail>.+)\Z")
_EMBEDDINGS = ("embed_tokens.weight", "embeddings.weight")
_WRAPPERS = re.compile(r"(?:(?:model|language_model)\.)+")
_ONE_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\Z")
# The parts of a fused parameter, in the order of their rows.
_FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
LM_HEAD = "lm_head.weight"
_BLOCK_ROWS = 4096
Step = Callable[[int, Tensor], Tensor]
"""From the number of a block's first row, and the block in fp32, to the block that replaces it."""


@dataclass(frozen=True)
class Merge:
    """What a merge changes in a checkpoint."""

    tensors: Mapping[str, PendingTensor] = field(default_factory=dict)
    """Key of a stored tensor to the tensor that replaces it."""
    files: Mapping[str, Path | None] = field(default_factory=dict)
    """Path in the directory to the file of the adapter's tokenizer or chat template that is written there; None for a
    file that is left out."""
    config_fields: Mapping[str, Any] = field(default_factory=dict)
    """``vocab_size``, where the adapter's training resized the vocabulary."""


def plan_merge(source: Checkpoint, layout: HeadLayout, adapter: Adapter) -> Merge:
    """Return what merging an adapter changes in a checkpoint, without reading any tensor.

    The adapter's tokenizer and chat template replace the checkpoint's.

    Raises:
        CheckpointError: The adapter does not fit, adapts the head or one of two tied tensors, or the checkpoint is
            quantised.
    """
    method = quant_method(source.config)
    if method is not None:
        raise CheckpointError(
            f"{source.path}: quantised ({method}); expected plain weights, as the sum of quantised weights and an "
            "adapter would have to be quantised again. Merge into the checkpoint from which this one was quantised."
        )
    plan = _Plan(source, layout, adapter)
    for name, key in adapter.replacements.items():
        plan.replace(name, key)
    for pair in adapter.pairs:
        plan.add(pair)
    plan.repeat_in_shared_keys()
    plan.require_one_vocabulary()
    tokenizer = tokenizer_files(source.path, adapter.path)
    # Beside a model, transformers would apply the adapter a second time.
    left_out = {ADAPTER_CONFIG_FILE, *(replaced_tokenizer_files(source.path) if tokenizer else ())}
    rows = plan.rows.get(layout.embed_key)
    return Merge(
        {key: plan.changed(key) for key in plan.steps},
        {**dict.fromkeys(left_out), **tokenizer},
        {} if rows is None else {"vocab_size": rows},
    )


class _Plan:
    """The steps of the change of each stored tensor, and the stored keys of the modules in transformers' tree."""

    def __init__(self, source: Checkpoint, layout: HeadLayout, adapter: Adapter) -> None:
        self.source, self.layout, self.adapter = source, layout, adapter
        self.steps: dict[str, list[Step]] = {}
        self.rows: dict[str, int] = {}
        """Numbers of rows of the tensors whose vocabulary the adapter's training resized."""
        self._embedding = layout.embed_key
        self._tied = bool(source.config.get("tie_word_embeddings", source.text_config.get("tie_word_embeddings")))
        self._lm_head = layout.lm_head_key
        self._tied |= self.home(LM_HEAD) is None
        names = [*adapter.replacements, *(f"{pair.module}.weight" for pair in adapter.pairs)]
        self._embedding_is_adapted = any(self.home(name) == self._embedding for name in names)
        # peft also stores a resized embedding that it did not train.
        saved = tuple(adapter.stored.config.get("modules_to_save") or ())
        trained = [name for name in adapter.replacements if name.removesuffix(".weight").endswith(saved)]
        trained += [f"{pair.module}.weight" for pair in adapter.pairs]
        ends = (self._embedding, self._lm_head)
        self._trains_ends = any(self.home(name) in ends or name.endswith(LM_HEAD) for name in trained)

    def home(self, name: str) -> str | None:
        """Return the stored key of a parameter, None where there is none or its parts are stored separately.

        Keys may differ from transformers' names: wrappers add another prefix than text-only models have, and some
        releases name the embedding, or parts of a wrapper or of a layer, differently.
        """
        bare, of_rules = self._bare(name), self._of_rules(name)
        candidates = [name, self.layout.trunk_prefix + bare, bare]
        if len(of_rules) == 1:
            candidates += of_rules
        if bare in _EMBEDDINGS:
            candidates.append(self._embedding)
        if bare == LM_HEAD:
            candidates.append(self._lm_head)
        for ours, native in self.layout.family.keys.wrapper_names.items():
            if bare.startswith(ours):
                candidates.append(native + bare.removeprefix(ours))
        return next((key for key in candidates if key in self.source.tensors), None)

    def _rows_of(self, name: str, num_rows: int) -> Iterator[tuple[str, slice]]:
        """Yield the stored tensors of a parameter's rows.

        This is the parameter's name with all rows, or the key of each part with its rows where a release stores parts
        separately.
        """
        parts = [] if self.home(name) is not None else self._of_rules(name)
        keys = parts if all(key in self.source.tensors for key in parts) else []
        size = num_rows // max(1, len(keys))
        for place, key in enumerate(keys or [name]):
            yield key, slice(place * size, (place + 1) * size)

    def _bare(self, name: str) -> str:
        return _WRAPPERS.sub("", name, count=1) if _WRAPPERS.match(name) else name

    def _of_rules(self, name: str) -> list[str]:
        of_layer = _OF_A_LAYER.match(self._bare(name))
        return [] if of_layer is None else self.layout.trunk_layer_keys(int(of_layer["layer"]), of_layer["tail"])

    def replace(self, name: str, key: str) -> None:
        stored = self.adapter.stored
        num_rows, *columns = stored.tensors[key].shape
        whole = self.home(name)
        if whole in (self._embedding, self._lm_head) and num_rows != self.source.tensors[whole].shape[0]:
            self.rows[whole] = num_rows
        for home, rows in self._rows_of(name, num_rows):
            self.step(home, (rows.stop - rows.start, *columns), partial(_read_rows, stored, key, rows.start))

    def add(self, pair: LowRank) -> None:
        name = f"{pair.module}.{pair.parameter}"
        num_rows, num_columns = pair.shape
        if pair.num_experts is not None:
            self._add_experts(name, pair, pair.num_experts)
            return
        if pair.bias is not None:
            self.step(f"{pair.module}.bias", tuple(pair.bias.shape), partial(_add_rows, pair.bias))
        single = _ONE_EXPERT.match(pair.module)
        if single is not None and self.home(name) is None:
            self._add_to_stack(single["experts"], int(single["expert"]), single["part"], pair)
            return
        for home, rows in self._rows_of(name, num_rows):
            self.step(home, (rows.stop - rows.start, num_columns), partial(_add_product, pair, rows))

    def _add_to_stack(self, experts: str, expert: int, part: str, pair: LowRank) -> None:
        """Add the adapter of one expert's own layer, as engines and older peft store it, to stacked experts."""
        parameter, parts = next((name, parts) for name, parts in _FUSED.items() if part in parts)
        size, columns = pair.shape
        home = self.home(f"{experts}.{parameter}")
        count = 0 if home is None else self.source.tensors[home].shape[0]
        rows = slice(parts.index(part) * size, (parts.index(part) + 1) * size)
        shape = (max(count, expert + 1), size * len(parts), columns)
        self.step(f"{experts}.{parameter}", shape, partial(_add_to_expert, pair, expert, rows))

    def _add_experts(self, name: str, pair: LowRank, num_experts: int) -> None:
        """Add peft's adapter on a fused parameter, whose rank axis stacks the experts: A by expert, B by rank."""
        num_rows, num_columns = pair.shape
        if self.home(name) is not None:
            self.step(name, (num_experts, num_rows, num_columns), partial(_add_expert_products, pair, num_experts))
            return
        parts = self._of_rules(name) or [f"{pair.module}.{{expert}}.{part}.weight" for part in _FUSED[pair.parameter]]
        if self.home(parts[0].format(expert=num_experts)) is not None:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {num_experts} experts of {pair.module}, but {self.source.path} has more; "
                "expected the same number. Merge into the base that the adapter was trained on."
            )
        size = num_rows // len(parts)
        for expert in range(num_experts):
            for place, part in enumerate(parts):
                rows = slice(place * size, (place + 1) * size)
                step = partial(_add_expert_product, pair, num_experts, expert, rows)
                self.step(part.format(expert=expert), (size, num_columns), step)

    def step(self, name: str, shape: tuple[int, ...], step: Step) -> None:
        key = self.home(name)
        if self._tied and (key == self._embedding or name.endswith(LM_HEAD)):
            if self._trains_ends and not self.adapter.keeps_tied:
                raise CheckpointError(
                    f"{self.adapter.path}: adapts {name}, while {self.source.path} ties lm_head and embedding to one "
                    "tensor, which cannot hold two; expected an adapter that leaves both alone or keeps them tied. "
                    "Train it with ensure_weight_tying=True, or serve it unmerged."
                )
            # The two adapters of a tied pair are equal. The embedding's is merged, into both tensors where both are
            # stored.
            if name.endswith(LM_HEAD) and self._embedding_is_adapted:
                return
        if key is None:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {name}, for which {self.source.path} has no tensor; expected every "
                "adapted module in the checkpoint. Merge into the base that the adapter was trained on."
            )
        if self.layout.is_head_key(key):
            raise CheckpointError(
                f"{self.adapter.path}: adapts {key}, which belongs to the head; expected an adapter of the trunk. "
                "Merge without it, and retrain the head."
            )
        stored = self.source.tensors[key]
        if stored.dtype not in _FLOATS:
            raise CheckpointError(
                f"{self.source.path}: {key} is stored as {stored.dtype}; expected {', '.join(_FLOATS)}. Merge into the "
                "checkpoint that this one was quantised from."
            )
        if (self.rows.get(key, stored.shape[0]), *stored.shape[1:]) != shape:
            raise CheckpointError(
                f"{self.adapter.path}: adapts {key} as {list(shape)}, but in {self.source.path} it is "
                f"{list(stored.shape)}; expected the same shape. Merge into the base that the adapter was trained on."
            )
        self.steps.setdefault(key, []).append(step)

    def repeat_in_shared_keys(self) -> None:
        """Repeat the steps of trunk tensors in the head's copies of them."""
        for key in self.source.tensors:
            shared = self.layout.shared_key(key)
            trunk_key = None if shared is None else self.layout.trunk_key(shared, self.source.tensors)
            if trunk_key in self.steps:
                self._repeat(trunk_key, key)
        if self._tied and self._lm_head in self.source.tensors and self._embedding in self.steps:
            self._repeat(self._embedding, self._lm_head)

    def _repeat(self, key: str, copy: str) -> None:
        self.steps[copy] = self.steps[key]
        if key in self.rows:
            self.rows[copy] = self.rows[key]

    def require_one_vocabulary(self) -> None:
        """Check that embedding, lm_head and head have the adapter's number of tokens after the merge."""
        if not self.rows:
            return
        ends = [key for key in (self._embedding, self._lm_head) if key in self.source.tensors]
        rows = {self.rows.get(key, self.source.tensors[key].shape[0]) for key in ends}
        wiring = self.layout.family.wiring
        if len(rows) > 1 or wiring.own_lm_head or wiring.own_embedding:
            raise CheckpointError(
                f"{self.adapter.path}: resizes the vocabulary of {', '.join(sorted(self.rows))}, and "
                f"{self.source.path} has another matrix over it; expected all of them in the adapter, and a head "
                "without one. Save the adapter with peft's save_embedding_layers=True."
            )

    def changed(self, key: str) -> PendingTensor:
        """Return a stored tensor after its steps, which are computed in fp32 and rounded once."""
        stored, steps = self.source.tensors[key], self.steps[key]
        shape = (self.rows.get(key, stored.shape[0]), *stored.shape[1:])

        def blocks() -> Iterator[Tensor]:
            # The adapter's rows replace all rows of a resized tensor.
            before = torch.split(torch.zeros(()).expand(shape), _BLOCK_ROWS) if key in self.rows else ()
            first = 0
            for block in before or self.source.read_in_blocks(key):
                value = block.float()
                for step in steps:
                    value = step(first, value)
                first += len(block)
                value = value.to(TORCH_DTYPES[stored.dtype])
                if not all_finite(value):
                    raise CheckpointError(
                        f"{self.source.path}: {key} would contain NaN or infinite values in {stored.dtype}; expected "
                        "finite weights. Use an adapter that was trained on this base."
                    )
                yield value

        return PendingTensor(key, stored.dtype, shape, blocks)


def _read_rows(stored: Checkpoint, key: str, start: int, first: int, block: Tensor) -> Tensor:
    return stored.read_rows(key, start + first, start + first + len(block)).float()


def _add_product(pair: LowRank, rows: slice, first: int, block: Tensor) -> Tensor:
    """Return ``W + scale * left @ right``, where DoRA's magnitude then sets the norm of each row."""
    left, right = pair.matrices()
    of_block = slice(first, first + len(block))
    merged = block + pair.scale * (left[rows][of_block] @ right)
    if pair.magnitude is None:
        return merged
    return merged * (pair.magnitude[rows][of_block] / torch.linalg.vector_norm(merged, dim=1))[:, None]


def _add_rows(value: Tensor, first: int, block: Tensor) -> Tensor:
    return block + value[first : first + len(block)]


def _add_to_expert(pair: LowRank, expert: int, rows: slice, first: int, block: Tensor) -> Tensor:
    if first <= expert < first + len(block):
        block = block.clone()
        block[expert - first, rows] = _add_product(pair, slice(0, pair.shape[0]), 0, block[expert - first, rows])
    return block


def _by_expert(pair: LowRank, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the left and right matrices with the experts along the first axis."""
    left, right = pair.matrices()
    return left.view(len(left), -1, num_experts).permute(2, 0, 1), right.view(num_experts, -1, right.shape[1])


def _add_expert_products(pair: LowRank, num_experts: int, first: int, block: Tensor) -> Tensor:
    left, right = _by_expert(pair, num_experts)
    experts = slice(first, first + len(block))
    return block + pair.scale * torch.bmm(left[experts], right[experts])


def _add_expert_product(pair: LowRank, num_experts: int, expert: int, rows: slice, first: int, block: Tensor) -> Tensor:
    left, right = _by_expert(pair, num_experts)
    return block + pair.scale * (left[expert, rows][first : first + len(block)] @ right[expert])
