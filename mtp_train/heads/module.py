"""The head's modules: two norms, a projection, a borrowed decoder layer and a final norm."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families import Convention, Family


class HeadModule(nn.Module):
    """One module of a head, as DeepSeek-V3 (arXiv:2412.19437, equations 21 to 23) describes it.

    ``u = proj([embed_norm(e), hidden_norm(h)])`` (or the other order), ``z = layer(u)``, ``o = final_norm(z)``. The
    embedding and the lm_head are the trunk's and are not held here.
    """

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        hidden_size = layer_config.hidden_size
        self.embed_norm = family.borrowed.make_norm(layer_config)
        self.hidden_norm = family.borrowed.make_norm(layer_config)
        self.proj = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = family.borrowed.make_layer(layer_config, module_idx)
        self.final_norm = family.borrowed.make_norm(layer_config)
        self.embed_first = family.concat == "embed_first"

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``u``, the input of the decoder layer."""
        halves = [self.embed_norm(embed_BTD), self.hidden_norm(hidden_BTD)]
        return self.proj(torch.cat(halves if self.embed_first else halves[::-1], dim=-1))


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
        # Left unset, transformers falls back to an attention that ADDS the mask: ours are boolean. A config that never
        # went through a model has neither set.
        self.config._attn_implementation = "sdpa"
        self.config._experts_implementation = "eager"
        self.blocks = nn.ModuleList(HeadModule(family, self.config, index) for index in range(num_modules))
        self.rotary = family.borrowed.make_rotary(self.config)

    def module_for(self, depth: int) -> HeadModule:
        """Return the module that drafts at ``depth`` (1-based)."""
        return cast(HeadModule, self.blocks[0 if self.family.unroll == "recursive" else depth - 1])
