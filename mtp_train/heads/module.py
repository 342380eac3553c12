"""The head's modules: two norms, a projection, a borrowed decoder layer and a final norm."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal, cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from mtp_train.families import Convention, Family, HeadKind
from mtp_train.heads.attention import HEAD_ATTENTION
from mtp_train.heads.block import Block, Eagle3Module, EagleModule, MedusaModule
from mtp_train.heads.output import OutputRows


class HeadModule(Block):
    """One module of a head, as DeepSeek-V3 (arXiv:2412.19437, equations 21 to 23) describes it.

    ``u = proj([embed_norm(e), hidden_norm(h)])`` (or the other order), ``z = layer(u)``, ``o = final_norm(z)`` (``z``
    where the family has no such norm; where one serves the whole chain, the first module holds it). The embedding is
    the trunk's and is not held here, nor is the lm_head, but where the family gives the head its own. Where the trunk
    has streams, each of them is such an ``h``, the layer hands on as many, and ``o`` is of what a mixer makes of them.
    """

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        hidden_size, streams = layer_config.hidden_size, family.streams
        self.joined = streams is not None and streams.joined
        self.embed_norm = family.classes.make_norm(layer_config)
        width = family.state_width(layer_config) if self.joined else hidden_size
        self.hidden_norm = family.classes.make_norm(layer_config, width)
        self.sums = family.concat == "sum"
        if self.sums:
            self.token_proj = nn.Linear(hidden_size, hidden_size, bias=False)
            self.hidden_proj = nn.Linear(hidden_size, hidden_size, bias=False)
        else:
            self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)
        self.mixer: nn.Module | None = None
        if streams is not None:
            self.mixer = family.classes.cls(streams.mixer)(layer_config, **streams.mixer_options)
        has_norm = family.final_norm or (module_idx == 0 and family.has_chain_norm(layer_config))
        self.final_norm = family.classes.make_norm(layer_config) if has_norm else nn.Identity()
        if family.own_lm_head:
            self.lm_head = nn.Linear(hidden_size, layer_config.vocab_size, bias=False).requires_grad_(False)
        if family.own_embedding and module_idx == 0:
            self.embedding = nn.Embedding(layer_config.vocab_size, hidden_size).requires_grad_(False)
        self.embed_first = family.concat == "embed_first"

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``u``, the input of the decoder layer: (B, T, D), or (B, T, streams, D), or these joined."""
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
        """Return ``o`` and ``z`` of the layer's output, (B, T, width): streams are mixed in ``o``, joined in ``z``."""
        if self.mixer is None:
            return norm(block), block
        return norm(self.mixer(block)), block if self.joined else block.flatten(-2)


def _centred(state_BTD: Tensor) -> Tensor:
    """Subtract the mean, in fp32 as norms compute."""
    exact_BTD = state_BTD.float()
    return (exact_BTD - exact_BTD.mean(-1, keepdim=True)).to(state_BTD.dtype)


MODULES: Mapping[HeadKind, Callable[[Family, PretrainedConfig, int], Block]] = {
    "mtp": HeadModule,
    "eagle": EagleModule,
    "eagle3": Eagle3Module,
    "medusa": MedusaModule,
}


Unroll = Literal["recursive", "chained", "chained_drafts", "parallel"]


def unroll_of(family: Family, convention: Convention, num_modules: int) -> Unroll:
    """Say how the depths of a head go on from one another.

    ``recursive``: one module drafts every depth. ``chained``: depth k uses module k, whose rows read what module k-1
    says of the same rows. ``chained_drafts``: it does, but over the text the rows of all modules read what those of the
    first do. ``parallel``: depth k uses module k, on the trunk's state alone.
    """
    if family.kind == "medusa":
        return "parallel"
    if num_modules == 1 or convention.modules == "first":
        return "recursive"
    return "chained" if convention.prefix == "chained" else "chained_drafts"


class MtpHead(nn.Module):
    """A head of one or several modules.

    Args:
        family: The record that wires it.
        text_config: The trunk's text config (transformers' object).
        num_modules: Modules that the checkpoint holds; not the depth drafted to.
        convention: Which of the engines' wirings to follow.
    """

    def __init__(
        self, family: Family, text_config: PretrainedConfig, *, num_modules: int, convention: Convention
    ) -> None:
        super().__init__()
        self.family = family
        self.convention = convention
        self.config = family.head_layer_config(text_config, num_modules)
        # A config that never went through a model has neither set.
        self.config._attn_implementation = HEAD_ATTENTION
        self.config._experts_implementation = "eager"
        make_module = MODULES[family.kind]
        self.blocks = nn.ModuleList(make_module(family, self.config, index) for index in range(num_modules))
        self.rotary = family.classes.make_rotary(self.config)
        self.logit_divisor = family.divisor(text_config)
        self.trunk_layers = family.trunk_layers(text_config)
        """The trunk's layers whose input it reads; none where the last state is all."""
        self._stock_layers = DynamicCache(config=self.config).layers

    @property
    def unroll(self) -> Unroll:
        """How its depths go on from one another."""
        return unroll_of(self.family, self.convention, len(self.blocks))

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return what depth 1 takes of what :meth:`mtp_train.heads.trunk.Trunk.head_input` hands over, (B, T, D)."""
        return self.module_for(1).read(trunk_BTD)

    def module_for(self, depth: int) -> Block:
        """Return the module that drafts at ``depth`` (1-based)."""
        return cast(Block, self.blocks[0 if self.unroll == "recursive" else depth - 1])

    @property
    def state_width(self) -> int:
        """The width of the states that it reads and recycles."""
        return self.family.state_width(self.config)

    def norm_for(self, depth: int) -> Callable[[Tensor], Tensor]:
        """Return the norm after the layer that drafts at ``depth``."""
        first = self.family.has_chain_norm(self.config)
        norm = (cast(Block, self.blocks[0]) if first else self.module_for(depth)).final_norm
        return (lambda state_BTD: norm(_centred(state_BTD))) if self.convention.centred else norm

    def own_lm_heads(self, num_depths: int) -> list[Tensor] | None:
        """Return the output matrix (V, D) of each depth, None where all depths use the trunk's."""
        if not self.family.own_lm_head:
            return None
        return [cast(nn.Linear, self.module_for(depth).lm_head).weight for depth in range(1, num_depths + 1)]

    def embedding(self, shared: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return what embeds the tokens that it reads: its own, or else ``shared``, the trunk's."""
        own = cast(Block, self.blocks[0]).embedding
        return shared if own is None else own

    @property
    def own_embedding_VD(self) -> Tensor | None:
        """The matrix of its own embedding; None where it reads the trunk's."""
        own = cast(Block, self.blocks[0]).embedding
        return None if own is None else cast(nn.Embedding, own).weight

    def give_output(self, output: OutputRows) -> None:
        """Have all depths read an output matrix of the head's own."""
        for block in self.blocks:
            cast(Block, block).lm_head = output

    def sliding_window(self, depth: int) -> int | None:
        """Return how many positions a row of ``depth`` sees, None for all."""
        layer = self._stock_layers[0 if self.unroll == "recursive" else depth - 1]
        return layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None

    def layer_type(self, depth: int) -> str:
        """Return the config's name for the kind of layer that drafts at ``depth``."""
        return str(self.config.layer_types[0 if self.unroll == "recursive" else depth - 1])
