"""The fields of a recipe that may be ``auto``, and their replacement by values.

A recipe is read in two steps where it has such fields: once with stand-ins, so that its other fields can be read, and
then with the values that :mod:`mtp_train.runs.resolve` derives from the model, the data and the machine.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import reduce
from operator import getitem
from typing import Any

from mtp_train.recipe.sections import AUTO

STAND_INS: Mapping[str, int | float | None] = {
    "data.regenerate.max_prompts": 1,
    "data.regenerate.max_new_tokens": 1,
    "data.regenerate.batch_size": None,
    "data.seq_len_tokens": 512,
    "data.holdout": 0.05,
    "train.max_steps": 1,
    "train.tokens_per_step": 512,
    "train.lr": 1e-4,
    "train.micro_batch_sequences": 1,
    "train.warmup_steps": 0,
    "evaluate.prompts": 1,
}
"""Every field that may be ``auto`` and is resolved here, with a value that stands in for it while the rest is read.

Other fields with ``auto``, such as ``train.precision``, are resolved by their own stage."""
FROM_TEXT = ("train.tokens_per_step", "train.max_steps", "train.micro_batch_sequences", "train.warmup_steps")
"""The fields among them that are resolved once the training text exists, in this order."""


def auto_fields(data: object) -> tuple[str, ...]:
    """Return the fields of a recipe's plain values that are ``auto``."""
    return tuple(field for field in STAND_INS if _value(data, field) == AUTO)


def with_values(data: object, values: Mapping[str, Any]) -> Any:
    """Return a copy of a recipe's plain values with some fields, which it contains, replaced."""
    changed: Any = copy.deepcopy(data)
    for field, value in values.items():
        *parents, name = field.split(".")
        reduce(getitem, parents, changed)[name] = value
    return changed


def _value(data: Any, field: str) -> object:
    for part in field.split("."):
        data = data.get(part) if isinstance(data, Mapping) else None
    return data
