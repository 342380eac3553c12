"""MTP heads, which are stored in their trunk's checkpoint and are described by its family's own record.

Shapes: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families.kinds.kind import Block, KindParts
from mtp_train.families.spec import Family


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
        hidden_size = layer_config.hidden_size
        streams = family.trunk.streams
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
            hidden_BTD = hidden_BTD.reshape(*hidden_BTD.shape[:-1], -1, embed_BTD.shape[-1])
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


MTP = KindParts(module=HeadModule)
