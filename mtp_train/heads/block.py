"""What every module of a head is, whatever its kind, and the kinds that are not DeepSeek's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from mtp_train.families import Family
from mtp_train.families.drafts import NUM_EAGLE3_LAYERS


class Block(nn.Module):
    """One module of a head: what goes into its layer, the layer, and what comes out."""

    layer: nn.Module

    def __init__(self) -> None:
        super().__init__()
        self.final_norm: nn.Module = nn.Identity()
        self.lm_head: nn.Module | None = None
        self.embedding: nn.Module | None = None

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return what depth 1 takes of the trunk's states as they come."""
        return trunk_BTD

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return the input of the layer."""
        raise NotImplementedError

    def finish(self, block: Tensor, norm: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Return what the lm_head reads of the layer's output, and that output, both (B, T, D)."""
        return norm(block), block

    def project(self, state: Tensor, shared: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the logits of ``finish``'s first result: by its own lm_head if it has one, else by ``shared``."""
        logits: Tensor = shared(state) if self.lm_head is None else self.lm_head(state)
        return logits


class EagleModule(Block):
    """EAGLE (arXiv:2401.15077): ``z = layer(fc [e, h])``, read by the trunk's lm_head as it is."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.proj = nn.Linear(2 * layer_config.hidden_size, layer_config.hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return ``fc [e, h]``, (B, T, D)."""
        fused_BTD: Tensor = self.proj(torch.cat([embed_BTD, hidden_BTD], dim=-1))
        return fused_BTD


class Eagle3Module(Block):
    """EAGLE-3 (arXiv:2503.01840): ``z = layer([e, h])``, ``o = norm(z)``; of the trunk ``h = fc [h_1, h_2, h_3]``."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.fc = nn.Linear(NUM_EAGLE3_LAYERS * layer_config.hidden_size, layer_config.hidden_size, bias=False)
        self.layer = family.classes.make_layer(layer_config, module_idx)
        self.final_norm = family.classes.make_norm(layer_config)

    def read(self, trunk_BTD: Tensor) -> Tensor:
        """Return ``h`` of the states of the trunk's layers, side by side: (B, T, layers * D) to (B, T, D)."""
        hidden_BTD: Tensor = self.fc(trunk_BTD)
        return hidden_BTD

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return embedding and state side by side, (B, T, 2 D): the layer has a norm for each."""
        return torch.cat([embed_BTD, hidden_BTD], dim=-1)


class MedusaModule(Block):
    """Medusa (arXiv:2401.10774): a residual block of the trunk's state; which tokens were drafted it does not know."""

    def __init__(self, family: Family, layer_config: PretrainedConfig, module_idx: int) -> None:
        super().__init__()
        self.layer = family.classes.make_layer(layer_config, module_idx)

    def fuse(self, hidden_BTD: Tensor, embed_BTD: Tensor) -> Tensor:
        """Return the state, (B, T, D)."""
        return hidden_BTD
