"""Find the module or parameter that made logits NaN or infinite, by running the request again.

The second run is without a cache, and every module is watched. The decoder reports non-finite logits together with the
outcome of a round, so that healthy rounds do not wait for the check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from mtp_train.checkpoints.files import all_finite
from mtp_train.errors import CheckpointError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.step import unroll
from mtp_train.trunk.load import Trunk

Source = Literal["trunk", "drafter"]


@torch.inference_mode()
def non_finite_error(
    source: Source, trunk: Trunk, drafter: object, token_ids: Sequence[int], depth: int
) -> CheckpointError:
    """Return the error for non-finite logits, which names the first module or parameter that caused them.

    A parameter that is not finite is found without a forward. Only the head of an MTP drafter can be searched.

    Args:
        source: Whether they are the trunk's logits or the drafter's.
        drafter: The batch's drafter; None without one.
        token_ids: The tokens before the logits, rejected drafts left out.
        depth: Number of drafts per round.
    """
    tokens_1T = torch.tensor([list(token_ids)], device=trunk.lm_head_VD.device)
    # This package cannot import the drafters' classes, which are further up.
    head = getattr(drafter, "head", None)
    if source == "trunk":
        name, parts = "trunk", dict(trunk.causal_lm.named_modules())
        found = _named(parts, lambda: trunk.logits(trunk.hidden(tokens_1T)[:, -1:]))
    elif isinstance(head, MtpHead):
        name, parts = "head", dict(head.named_modules())
        found = _named(parts, lambda: _draft(trunk, head, tokens_1T, depth))
    else:
        name, found = type(drafter).__name__, None
    place = f"{name}: its logits after {len(token_ids)} tokens are NaN or infinite ({trunk.dtype_name})"
    if found is None:
        return CheckpointError(
            f"{place}, and a forward without a cache does not show where they come from; expected finite logits. Load "
            "the model in a dtype of larger range, or report this with the prompt."
        )
    return CheckpointError(
        f"{place}; expected finite logits. {found}. Restore its weights, or load the model in a dtype of larger range."
    )


def _named(modules: Mapping[str, nn.Module], forward: Callable[[], object]) -> str | None:
    """Return a sentence that names the first parameter or module of a forward that is not finite, None without one."""
    for name, module in modules.items():
        for field, value in module.named_parameters(recurse=False):
            if not value.is_meta and not all_finite(value):
                return f"The parameter {'.'.join(filter(None, (name, field)))} holds NaN or infinite values"
    found: list[str] = []
    hooks = [
        module.register_forward_hook(partial(_look, found, name), with_kwargs=True) for name, module in modules.items()
    ]
    try:
        forward()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _look(
    found: list[str], name: str, module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any], output: Any
) -> None:
    """Record the first module that returned non-finite values for finite inputs.

    A forward hook. Inner modules end before outer ones, so the record is the innermost module.
    """
    # Masks are excluded: they may contain minus infinity.
    given = [inputs, [value for key, value in named.items() if "mask" not in key]]
    if not found and not _finite(output) and _finite(given):
        found.append(
            f"The first such values leave {name or 'the model'} ({type(module).__name__}), whose inputs are finite"
        )


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return all_finite(value)
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return all(map(_finite, value)) if isinstance(value, (list, tuple)) else True


def _draft(trunk: Trunk, head: MtpHead, tokens_1T: Tensor, depth: int) -> None:
    """Run the head over a text as in training, with drafts from every position."""
    weight = next(head.parameters())
    unroll(
        head,
        trunk.head_input(trunk.hidden(tokens_1T), head.convention).to(weight.dtype),
        tokens_1T,
        lambda tokens_BT: head.embedding(trunk.embed)(tokens_BT).to(weight.dtype),
        num_depths=depth,
        positions_BT=torch.arange(tokens_1T.shape[1], device=tokens_1T.device)[None],
        document_BT=torch.zeros_like(tokens_1T),
    )
