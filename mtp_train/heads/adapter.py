"""Put a peft adapter on a loaded trunk, unmerged, and check that all of it took effect."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from mtp_train.errors import CheckpointError


def put_on(model: Any, adapter: Path) -> Any:
    """Return a model with an adapter put on it by peft.

    peft passes over tensors without a module and modules without a tensor with at most a warning.

    Args:
        model: A transformers model.
        adapter: The adapter's directory, see :func:`mtp_train.weights.adapter.locate_adapter`.

    Raises:
        CheckpointError: peft refuses the adapter, or a tensor or an adapted module has no counterpart.
    """
    from peft import PeftModel

    try:
        with warnings.catch_warnings():
            # What peft warns of here is an error below.
            warnings.simplefilter("ignore")
            wrapped: Any = PeftModel.from_pretrained(model, str(adapter))
            # A second time, for what is matched and what is not: `from_pretrained` keeps that to itself.
            names = getattr(model, "_checkpoint_conversion_mapping", {})
            result: Any = wrapped.load_adapter(str(adapter), wrapped.active_adapter, key_mapping=names)
    # What peft raises for a config or a shape that does not fit the model.
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "size mismatch" not in str(error):
            raise
        reason = " ".join(str(error).split())
        raise CheckpointError(
            f"{adapter}: peft cannot put it on the trunk ({type(error).__name__}: {reason}); expected an adapter of "
            "this model. Use the base that the adapter was trained on."
        ) from None
    for problem, keys in (
        ("holds {}, for which the trunk has no adapted module", result.unexpected_keys),
        ("holds nothing for {}, which its config adapts", result.missing_keys),
    ):
        if keys:
            raise CheckpointError(
                f"{adapter}: {problem.format(min(keys))} ({len(keys)} such tensors); expected a tensor for every "
                "adapted module of this trunk, and no others. Use the base that the adapter was trained on, or save "
                "the adapter again."
            )
    return wrapped
