"""What training measures on the way: the text that is kept from it, and decoding with the head as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from accelerate import Accelerator

from mtp_inference import HeadDrafting, SpeculativeDecoder
from mtp_train.acceptance import tau
from mtp_train.data.pack import PackedSequence, pack_documents
from mtp_train.data.split import split_by_group
from mtp_train.data.tokenize import Document
from mtp_train.errors import TrainingError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs
from mtp_train.recipe import Recipe, SelectSpec
from mtp_train.train.hidden_cache import HiddenCache
from mtp_train.train.select import Selection
from mtp_train.train.shard import shards_trunk

DECODED_PROMPTS = 4
MIN_PROMPT_TOKENS = 8
"""Plain text is a target from its start; it is continued after so many tokens."""


class Place(NamedTuple):
    """A document by its place among all, and what it is held out with."""

    place: int
    group: str


def part_documents(recipe: Recipe, documents: Sequence[Document]) -> tuple[list[int], list[int]]:
    """Return the places of the documents to train on and of those to choose among heads by.

    Raises:
        DataError: One of them would be empty.
    """
    if recipe.train.select is None:
        return list(range(len(documents))), []
    items = [Place(index, document.group) for index, document in enumerate(documents)]
    # By another seed: all of these lie beyond the share that the recipe's own holds out.
    seed = (recipe.seed + 1) % (1 << 32)
    training, measured = split_by_group(items, recipe.train.select.share, seed, "train.select.share")
    return [one.place for one in training], [one.place for one in measured]


def renumbered(sequences: Sequence[PackedSequence], places: Sequence[int]) -> list[PackedSequence]:
    """Name documents by their place among all where some of them were packed."""
    return [replace(one, members=tuple(places[index] for index in one.members)) for one in sequences]


def make_selection(
    recipe: Recipe,
    inputs: Inputs,
    trunk: Trunk,
    documents: Sequence[Document],
    measured: Sequence[int],
    cache: HiddenCache | None,
    state_dir: Path,
    accelerator: Accelerator,
) -> Selection | None:
    """Make what chooses among heads; None where the recipe takes the last.

    Raises:
        TrainingError: It asks to decode where no process holds a whole trunk.
    """
    spec, seq_len = recipe.train.select, recipe.data.seq_len_tokens
    if spec is None:
        return None
    text = [documents[index] for index in measured]
    sequences = pack_documents(text, seq_len, pack=recipe.data.pack, seed=recipe.seed, epoch=0)
    kept = renumbered(sequences[: max(1, spec.tokens // seq_len)], measured)
    number = _prompts_to_decode(spec, accelerator, cache)
    decode: Callable[[MtpHead], dict[str, float]] | None = None
    if number:
        decode = partial(_decode, trunk, inputs, recipe, [_prompt(document) for document in text[:number]])
    return Selection(spec, kept, measured_together(recipe), cache, state_dir, decode)


def measured_together(recipe: Recipe) -> int:
    """Return how many sequences are measured in one call: with flex_attention as many as are trained on in one.

    It is compiled for each shape, which takes a minute, and torch gives up after a few shapes.
    """
    return recipe.train.micro_batch_sequences if recipe.train.attention == "flex" else 1


def _prompts_to_decode(spec: SelectSpec, accelerator: Accelerator, cache: HiddenCache | None) -> int:
    in_shards = shards_trunk(accelerator)
    if in_shards and spec.prompts:
        raise TrainingError(
            f"train.select.prompts: {spec.prompts}, and {accelerator.distributed_type.value} puts the trunk in shards; "
            "expected 0 or null: nothing can be decoded meanwhile. Write null, or launch with ddp.yaml or zero2.yaml."
        )
    if spec.prompts is not None:
        return spec.prompts
    return 0 if in_shards or cache is not None else DECODED_PROMPTS


def _prompt(document: Document) -> list[int]:
    """Return what comes before the first target."""
    first = next(index for index, is_target in enumerate(document.loss_mask) if is_target)
    return [int(token) for token in document.input_ids[: max(first, MIN_PROMPT_TOKENS)]]


@torch.no_grad()
def _decode(
    trunk: Trunk, inputs: Inputs, recipe: Recipe, prompts: Sequence[Sequence[int]], head: MtpHead
) -> dict[str, float]:
    decoder = SpeculativeDecoder(trunk, HeadDrafting(head), recipe.head.num_depths, inputs.eos_ids)
    results = decoder.generate(prompts, recipe.evaluate.max_new_tokens)
    return {"decoded_tau": tau([result.counts(str(number), str(number)) for number, result in enumerate(results)])}
