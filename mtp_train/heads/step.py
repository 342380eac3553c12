"""Run the one MTP forward: :func:`unroll` for training and :func:`mtp_step` with a cache for the decoder.

Shapes: B rows, T tokens of this call, S keys (cached and new), D hidden, K depths, P start rows of each row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import Cache, DynamicCache, DynamicLayer, PretrainedConfig

from mtp_train.families import Convention
from mtp_train.families.kinds.kind import Block
from mtp_train.families.mechanisms.key_blocks import BLOCK_CACHE_LAYER, UnrolledBlocks
from mtp_train.families.mechanisms.key_pools import UnrolledPools
from mtp_train.families.mechanisms.relative_positions import CONVOLVED_CACHE_LAYERS, UnrolledRows
from mtp_train.families.spec import HeadLayer
from mtp_train.heads.alignment import UnrollMask, at_starts, input_tokens, unroll_distances
from mtp_train.heads.attention import without_cudnn_attention
from mtp_train.upstream.transformers_private import CACHE, DynamicIndexedLayer, DynamicSlidingWindowLayer


class ModularHead(Protocol):
    """What this module uses of an ``MtpHead``, which imports it."""

    convention: Convention
    classes: HeadLayer
    config: PretrainedConfig
    rotary: Any
    rotary_takes_layer_type: bool
    logit_divisor: float | None

    @property
    def chaining(self) -> str: ...
    def read(self, trunk_BTD: Tensor) -> Tensor: ...
    def module_index(self, depth: int) -> int: ...
    def module_for(self, depth: int) -> Block: ...
    def norm_for(self, depth: int) -> Callable[[Tensor], Tensor]: ...
    def sliding_window(self, depth: int) -> int | None: ...


class StepOutput(NamedTuple):
    """The result of one depth."""

    logit_hidden_BTD: Tensor
    """The state that the lm_head reads."""
    recycled_BTD: Tensor
    """The state that is the next depth's hidden input."""


class KeysWritten(Exception):
    """Raised by a cache in keys-only mode, to end a forward once its keys and values are stored."""


@without_cudnn_attention()
def mtp_step(
    head: ModularHead,
    hidden_BTD: Tensor,
    embed_BTD: Tensor,
    *,
    depth: int,
    positions_BT: Tensor,
    mask_BTS: Tensor | UnrollMask | None,
    cache: Cache | None,
) -> StepOutput:
    """Run one depth of the head.

    Args:
        hidden_BTD: The trunk's hidden states (depth 1), or the recycled states of the depth before.
        embed_BTD: The trunk's embedding of the token that each row reads.
        depth: 1-based depth; selects the module.
        positions_BT: int, row t of depth k has position t+k-1.
        mask_BTS: bool, True where a query attends to a key; None is plain causal attention (a single row attends to
            every key). An ``UnrollMask`` is built for some queries at a time. For a family with ``masks_of_distances``
            and a cache: int64, the distance to each key, -1 where a query does not attend.
        cache: Keys and values of earlier rows; the new ones are appended. None for a first and only depth.

    Returns:
        The state for the logits and the state to recycle, each of shape (B, T, D). In a trunk with residual streams,
        the states to read and to recycle have the width of all streams.
    """
    module = head.module_for(depth)
    if head.convention.zero_first_embedding:
        embed_BTD = embed_BTD.masked_fill((positions_BT == 0)[..., None], 0.0)
    fused_BTD = module.fuse(hidden_BTD, embed_BTD)
    block_BTD = module.layer(
        fused_BTD,
        position_embeddings=_position_embeddings(head, depth, fused_BTD, positions_BT),
        attention_mask=mask_BTS[:, None] if isinstance(mask_BTS, Tensor) else mask_BTS,
        position_ids=positions_BT,
        **{CACHE: cache},
    )
    if isinstance(block_BTD, tuple):
        # Some layers return more than the hidden state.
        block_BTD = block_BTD[0]
    normed_BTD, block_BTD = module.finish(block_BTD, head.norm_for(depth))
    recycled = {"after_final_norm": normed_BTD, "before_final_norm": block_BTD, "trunk": hidden_BTD}
    logit_BTD = normed_BTD if head.logit_divisor is None else normed_BTD / head.logit_divisor
    return StepOutput(logit_BTD, recycled[head.convention.recycle])


def _position_embeddings(
    head: ModularHead, depth: int, fused_BTD: Tensor, positions_BT: Tensor
) -> tuple[Tensor, Tensor] | dict[str, tuple[Tensor, Tensor]] | None:
    if head.rotary is None:
        return None
    positions_BT = positions_BT + head.convention.position_offset
    if head.classes.rotary_axes > 1:
        positions_BT = positions_BT.expand(head.classes.rotary_axes, -1, -1)
    kind = head.classes.rotary_kind
    if kind is not None:
        return {kind: head.rotary(fused_BTD, positions_BT, kind)}
    if head.rotary_takes_layer_type:
        return head.rotary(fused_BTD, positions_BT, head.config.layer_types[head.module_index(depth)])
    return head.rotary(fused_BTD, positions_BT)


def unroll(
    head: ModularHead,
    hidden_BTD: Tensor,
    tokens_BT: Tensor,
    embed: Callable[[Tensor], Tensor],
    *,
    num_depths: int,
    positions_BT: Tensor,
    document_BT: Tensor,
    apart: bool = False,
    recompute: bool = False,
    starts_BP: Tensor | None = None,
) -> list[Tensor]:
    """Draft ``num_depths`` tokens from every row at once; each depth attends to the same rows as in decoding.

    Tokens are teacher-forced. Which rows a query attends to depends on the head (:func:`chaining_of`):

    - ``recursive``: one module for all depths. Depth k attends to the depth-1 rows of the prefix and to its own start's
      rows of depth 2..k.
    - ``chained``: module k attends to its own rows.
    - ``chained_drafts``: depth k attends to the same rows as in a recursive head, but with the keys of module k. That
      takes K(K-1)/2 passes more than the K of a chain; they end at keys and values.
    - ``parallel``: no attention.

    With ``apart`` the depths of a recursive head are independent: each attends to rows of its own depth, and positions
    do not advance. FastMTP trains in this way (arXiv:2509.18362, section 3.2); in decoding there are no such rows.

    Args, beside those of :meth:`mtp_train.heads.head.Head.unroll`:
        apart: See above; no effect on a head with a module for each depth.
        recompute: Keep only the results and keys of each depth, and recompute its activations in the backward pass.
        starts_BP: int, ascending: the start rows to draft from; None for all. The other rows of the text are run up to
            their keys and values, unless later rows read more of them: the states of a ``chained`` head or of
            independent depths, and the keys that a layer chooses from.

    Returns:
        K tensors (B, T, D), or (B, P, D): the state for the logits of depth k at each start row.
    """
    hidden_BTD = head.read(hidden_BTD)
    apart = apart and head.chaining == "recursive"
    cache = _unroll_cache(head, positions_BT)
    needs_keys_alone = not apart and head.chaining != "chained" and _is_of_keys(head, cache)
    some_BP = starts_BP if needs_keys_alone else None
    inputs: list[_Inputs] = []
    outputs: list[Tensor] = []
    for depth in range(1, num_depths + 1):
        if apart:
            cache = _unroll_cache(head, positions_BT)
        alone = apart or head.chaining in ("chained", "parallel")
        own_BP = some_BP if depth > 1 else None
        embed_BTD = embed(at_starts(input_tokens(tokens_BT, depth), own_BP))
        read_BT = at_starts(positions_BT if apart else positions_BT + (depth - 1), own_BP)
        inputs.append(_Inputs(hidden_BTD, embed_BTD, read_BT, 1 if alone else depth, own_BP))
        unread = _unread(head, inputs, some_BP)
        run = partial(_run_depth, head, depth, document_BT)
        step = checkpoint(_rerunnable(run, cache), unread, use_reentrant=False) if recompute else run(unread, cache)
        hidden_BTD = step.recycled_BTD
        outputs.append(step.logit_hidden_BTD)
    return outputs if needs_keys_alone else [at_starts(one, starts_BP) for one in outputs]


class _Inputs(NamedTuple):
    """The inputs of one depth."""

    hidden_BTD: Tensor
    embed_BTD: Tensor
    positions_BT: Tensor
    seen_depths: int
    """The number of depths whose rows are attended to, the own depth included."""
    starts_BP: Tensor | None = None
    """The start rows; None for all."""
    adds_keys: bool = True
    """Whether the keys of these rows are not in the cache yet."""

    def at(self, starts_BP: Tensor) -> _Inputs:
        """Return the inputs of some of all start rows, whose keys are in the cache."""
        hidden_BPD, embed_BPD, positions_BP = (at_starts(one, starts_BP) for one in self[:3])
        return _Inputs(hidden_BPD, embed_BPD, positions_BP, self.seen_depths, starts_BP, adds_keys=False)


def _unread(head: ModularHead, inputs: Sequence[_Inputs], starts_BP: Tensor | None) -> Sequence[_Inputs]:
    """Return the inputs that the module of the last depth has not processed; those of the text end at their keys."""
    if starts_BP is None or len(inputs) > 1:
        return inputs[0 if head.chaining == "chained_drafts" else -1 :]
    drafts = inputs[0].at(starts_BP)
    return [drafts] if head.chaining == "parallel" else [*inputs, drafts]


def _run_depth(
    head: ModularHead, depth: int, document_BT: Tensor, unread: Sequence[_Inputs], cache: Cache
) -> StepOutput:
    """Run the module of a depth over the rows that it has not processed yet; return the output of the last ones."""

    def run(rows: _Inputs, keys_only: bool) -> StepOutput:
        for layer in cache.layers:
            if isinstance(layer, _UnrolledKeys):
                layer.keys_only = keys_only
                layer.adds_keys = rows.adds_keys
        mask = UnrollMask(document_BT, rows.seen_depths, head.sliding_window(depth), rows.starts_BP)
        mask_BTS: Tensor | UnrollMask = mask
        if head.classes.masks_of_distances:
            mask_BTS = unroll_distances(mask.whole(), rows.seen_depths)
        elif not _is_of_keys(head, cache):
            # Layers that choose keys read the mask of all queries.
            mask_BTS = mask.whole()
        return mtp_step(
            head,
            rows.hidden_BTD,
            rows.embed_BTD,
            depth=depth,
            positions_BT=rows.positions_BT,
            mask_BTS=mask_BTS,
            cache=cache,
        )

    for rows in unread[:-1]:
        with suppress(KeysWritten):
            run(rows, keys_only=True)
    return run(unread[-1], keys_only=False)


def _rerunnable(run: Callable[..., StepOutput], cache: Cache) -> Callable[[Sequence[_Inputs]], StepOutput]:
    """Return ``run`` in a form that the backward pass can repeat, each time on the cache as it was before the call."""
    # A shallow copy is enough: cache layers append by building a new tensor, which leaves the copy unchanged.
    layers = [copy(layer) for layer in cache.layers]
    caches = iter([cache])

    def rerun(unread: Sequence[_Inputs]) -> StepOutput:
        return run(unread, next(caches, None) or Cache(layers=[copy(layer) for layer in layers]))

    return rerun


def _unroll_cache(head: ModularHead, positions_BT: Tensor) -> Cache:
    # Later depths attend to keys that are outside of the last row's window: no layer slides.
    return Cache(layers=[_unrolled(layer, positions_BT) for layer in DynamicCache(config=head.config).layers])


def _is_of_keys(head: ModularHead, cache: Cache) -> bool:
    """Return whether layers read keys, values and the attention mask, and nothing else of other rows."""
    return not head.classes.masks_of_distances and all(isinstance(layer, _UnrolledKeys) for layer in cache.layers)


def _unrolled(layer: Any, positions_BT: Tensor) -> Any:
    if type(layer).__name__ == BLOCK_CACHE_LAYER:
        return UnrolledBlocks()
    if type(layer).__name__ in CONVOLVED_CACHE_LAYERS:
        return UnrolledRows(positions_BT)
    if type(layer) is DynamicIndexedLayer:
        return UnrolledPools(positions_BT)
    return _UnrolledKeys() if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) else layer


class _UnrolledKeys(DynamicLayer):
    """Keys and values of all rows so far."""

    keys_only = False
    """Whether to end a forward once its keys and values are stored. Layers that store more have no such end."""
    adds_keys = True
    """Whether to store the keys and values of a forward, which are stored already if not."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *_unused: object, **_also_unused: object
    ) -> tuple[Tensor, Tensor]:
        if not self.adds_keys:
            return self.keys, self.values
        keys_and_values = super().update(key_states, value_states)
        if self.keys_only:
            raise KeysWritten
        return keys_and_values
