"""Define a head as torch modules, for every kind of head.

A :class:`~mtp_train.families.drafts.record.Block` is one module of a head: :class:`HeadModule` for MTP, and one class
for each other kind in ``families/drafts/``. Their decoder layers, norms and rotary embeddings come from transformers.

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
from mtp_train.families.drafts.record import Block, parts_of
from mtp_train.head_kinds import find_head_kind
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
        logits = state @ self.weight.T
        if self.token_ids_R is None:
            return logits
        whole = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        whole[..., self.token_ids_R] = logits
        return whole


class HeadModule(Block):
    """One module of an MTP head, as DeepSeek-V3 (arXiv:2412.19437, equations 21 to 23) describes it.

    ``u = proj([embed_norm(e), hidden_norm(h)])`` (or the other order), ``z = layer(u)``, ``o = final_norm(z)``. Without
    a final norm in the family, ``o = z``. Where one norm serves the whole chain, the first module holds it. Embedding
    and lm_head are the trunk's and are not held here, unless the family gives the head its own.

    In a trunk with residual streams, each stream is such an ``h``, the layer returns as many streams, and ``o`` is
    computed from a mixture of them.
    """

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        hidden_size, streams = layer_config.hidden_size, family.trunk.streams
        self.joined = streams is not None and streams.joined
        self.embed_norm = family.classes.make_norm(layer_config)
        width = family.state_width(layer_config) if self.joined else hidden_size
        self.hidden_norm = family.classes.make_norm(layer_config, width)
        self.sums = family.wiring.concat == "sum"
        if self.sums:
            self.token_proj = nn.Linear(hidden_size, hidden_size, bias=False)
            self.hidden_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        else:
            self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)
        self.mixer: nn.Module | None = None
        if streams is not None:
            self.mixer = family.classes.cls(streams.mixer)(layer_config, **streams.mixer_options)
        has_norm = family.wiring.final_norm or (module_idx == 0 and family.has_chain_norm(layer_config))
        self.final_norm = family.classes.make_norm(layer_config) if has_norm else nn.Identity()
        if family.wiring.own_lm_head:
            self.lm_head = nn.Linear(hidden_size, layer_config.vocab_size, bias=False).requires_grad_(False)
        if family.wiring.own_embedding and module_idx == 0:
            self.embedding = nn.Embedding(layer_config.vocab_size, hidden_size).requires_grad_(False)
        self.embed_first = family.wiring.concat == "embed_first"

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``u``, the input of the decoder layer: (B, T, D).

        With residual streams, the shape is (B, T, streams, D), or (B, T, streams * D) where the family joins them.
        """
        if self.joined:
            token_BTD = self.token_proj(self.embed_norm(embed_BTD))
            hidden_BTSD = self.hidden_norm(hidden_BTD).unflatten(-1, (-1, token_BTD.shape[-1]))
            return (token_BTD.unsqueeze(-2) + self.hidden_proj(hidden_BTSD)).flatten(-2)
        if self.mixer is not None:
            hidden_BTD = hidden_BTD.unflatten(-1, (-1, embed_BTD.shape[-1]))
            embed_BTD = embed_BTD.unsqueeze(-2)
        halves = [self.embed_norm(embed_BTD), self.hidden_norm(hidden_BTD)]
        if self.sums:
            return self.token_proj(halves[0]) + self.hidden_proj(halves[1])
        return self.proj(torch.cat(halves if self.embed_first else halves[::-1], dim=-1))

    def finish(self, block: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return ``o`` and ``z`` from the layer's output, both (B, T, width).

        With residual streams, ``o`` is computed from a mixture of them, and ``z`` is their concatenation.
        """
        if self.mixer is None:
            return norm(block), block
        return norm(self.mixer(block)), block if self.joined else block.flatten(-2)


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
    if find_head_kind(family.kind).parallel:
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
        kind = find_head_kind(family.kind)
        make_module = HeadModule if kind.draft_parts is None else parts_of(kind).module
        self.blocks = nn.ModuleList(make_module(family, self.config, index) for index in range(num_modules))
        rotary = self.classes.rotary
        self.rotary = None if rotary is None else self.classes.cls(self.classes.prefix + rotary)(config=self.config)
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
