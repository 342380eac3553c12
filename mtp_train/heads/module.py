"""Define a head as torch modules, for every kind of head.

A :class:`~mtp_train.families.kinds.kind.Block` is one module of a head, with one class for each kind in
``families/kinds/``. Their decoder layers, norms and rotary embeddings come from transformers.

Shapes: B rows, T tokens, D hidden, R rows of an output matrix, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from mtp_train.families import Convention, Family
from mtp_train.families.kinds.kind import Block
from mtp_train.families.mechanisms.trained_length import keep_dynamic_frequencies
from mtp_train.heads import step
from mtp_train.heads.attention import HEAD_ATTENTION
from mtp_train.heads.experts import GROUPED_EXPERTS
from mtp_train.heads.head import Head
from mtp_train.upstream.transformers_private import DynamicSlidingWindowLayer, set_attention, set_experts


class OutputRows(nn.Module):
    """Compute logits for a part of the vocabulary. All other tokens get q = 0, so verification stays exact.

    Reading the whole output matrix is most of the cost of a draft where the vocabulary is large: FR-Spec
    (arXiv:2502.14856), FastMTP (arXiv:2509.18362) and EAGLE-3 read a part.

    Args:
        weight_RD: The rows of the output matrix; frozen.
        token_ids_R: int, the token of each row; None where the rows are the whole vocabulary in order.
    """

    def __init__(self, weight_RD: Tensor, token_ids_R: Tensor | None, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_RD, requires_grad=False)
        ids = None if token_ids_R is None else token_ids_R.to(weight_RD.device, torch.long)
        self.token_ids_R: Tensor | None
        self.register_buffer("token_ids_R", ids, persistent=False)
        self.vocab_size = vocab_size

    def forward(self, state: Tensor) -> Tensor:
        """Return logits (..., V) of states (..., D), minus infinity for tokens without a row."""
        return self.placed(state @ self.weight.T)

    def placed(self, logits: Tensor) -> Tensor:
        """Return logits of the rows, (..., R), as logits of the vocabulary, (..., V)."""
        if self.token_ids_R is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.token_ids_R] = logits
        return whole


def _centred(state_BTD: Tensor) -> Tensor:
    """Subtract the mean over the last axis, in fp32 as norms do."""
    exact_BTD = state_BTD.float()
    return (exact_BTD - exact_BTD.mean(-1, keepdim=True)).to(state_BTD.dtype)


Chaining = Literal["recursive", "chained", "chained_drafts", "parallel"]


def chaining_of(family: Family, convention: Convention, num_modules: int) -> Chaining:
    """Return how the depths of a head depend on each other.

    - ``recursive``: one module drafts every depth.
    - ``chained``: depth k uses module k. Over the text too, the rows of module k read the output of module k-1.
    - ``chained_drafts``: depth k uses module k. Only drafts read the output of module k-1; over the text, the rows of
      every module read the trunk's states, as in the first module.
    - ``parallel``: depth k uses module k, on the trunk's state alone.
    """
    if family.kind.parallel:
        return "parallel"
    if num_modules == 1 or convention.modules == "first":
        return "recursive"
    return "chained" if convention.prefix == "chained" else "chained_drafts"


class MtpHead(Head):
    """The modules of a head of any kind, which may be fewer than the draft depth, wired by ``convention``."""

    def __init__(
        self, family: Family, text_config: PretrainedConfig, *, num_modules: int, convention: Convention
    ) -> None:
        super().__init__()
        self.family = family
        self.convention = convention
        self.classes = family.classes
        self.config = self.classes.config(text_config, num_modules)
        # transformers sets both when it builds a model; the head's layers are built without one.
        set_attention(self.config, HEAD_ATTENTION)
        set_experts(self.config, GROUPED_EXPERTS)
        make_module = family.kind.load_parts().module
        self.blocks = nn.ModuleList(make_module(family, self.config, index) for index in range(num_modules))
        rotary = self.classes.rotary
        self.rotary = None if rotary is None else self.classes.cls(self.classes.prefix + rotary)(config=self.config)
        keep_dynamic_frequencies(self.rotary)
        self.rotary_takes_layer_type = (
            self.rotary is not None and "layer_type" in inspect.signature(self.rotary.forward).parameters
        )
        self.logit_divisor = family.divisor(text_config)
        self.trunk_layers = family.wiring.trunk_layers(text_config)
        self._stock_layers = DynamicCache(config=self.config).layers

    @property
    def chaining(self) -> Chaining:
        return chaining_of(self.family, self.convention, len(self.blocks))

    unroll = step.unroll

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return the hidden input of depth 1, (B, T, D).

        Args:
            trunk_BTD: The result of :meth:`mtp_train.trunk.load.Trunk.head_input`.
        """
        return self.module_for(1).read(trunk_BTD)

    def module_index(self, depth: int) -> int:
        """Return the index of the module that drafts at ``depth`` (1-based)."""
        return 0 if self.chaining == "recursive" else depth - 1

    def module_for(self, depth: int) -> Block:
        """Return the module that drafts at ``depth`` (1-based)."""
        return cast(Block, self.blocks[self.module_index(depth)])

    def project(self, depth: int, state: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        return self.module_for(depth).project(state, shared)

    def freeze_unused(self, num_depths: int) -> None:
        for module in set(self.blocks) - {self.module_for(depth) for depth in range(1, num_depths + 1)}:
            module.requires_grad_(False)

    @property
    def state_width(self) -> int:
        """The width of the states that the head reads and recycles."""
        return self.family.state_width(self.config)

    def norm_for(self, depth: int) -> Callable[[Tensor], Tensor]:
        norm = self.module_for(1 if self.family.has_chain_norm(self.config) else depth).final_norm
        return (lambda state_BTD: norm(_centred(state_BTD))) if self.convention.centred else norm

    def own_lm_heads(self, num_depths: int) -> list[Tensor] | None:
        modules = [self.module_for(depth).lm_head for depth in range(1, num_depths + 1)]
        return None if modules[0] is None else [cast(nn.Linear, module).weight for module in modules]

    def embedding(self, shared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        own = self.module_for(1).embedding
        return shared if own is None else own

    def sliding_window(self, depth: int) -> int | None:
        """Return how many positions a query of ``depth`` attends to, None for all."""
        layer = self._stock_layers[self.module_index(depth)]
        return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
