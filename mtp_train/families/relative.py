"""Layers that see how far keys are away, and short convolutions, with every row at a place of its own.

transformers' layers count places along the row, the same in all rows of a batch. In the training unroll the rows of
later depths lie after all of the first, and packed documents one after the other; in decoding the rows of a batch stand
at different positions. There the masks that attention gets say how far away each key is (int64, -1 where it is not
seen), and the cache hands each convolution the inputs that come before its own.

Shapes: B rows, T queries, S keys, H heads, E distances, C channels, W kernel width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer

CONVOLVED_CACHE_LAYERS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""The classes of transformers' caches for such layers; by name, as older releases lack one of them."""


class LogScaling(NamedTuple):
    """Scores grow with the position p: by ``1 + alpha log(max((p + 1) / floor, 1))``."""

    floor: int
    alpha: float


class RelativeProfiles(nn.Module):
    """What a query adds to its scores, by distance: a bank of profiles that the query mixes.

    Args:
        stock: transformers' module of the layer; its weights are taken over under their names.
        log_scaling: Of the layer's scores; None for none.
    """

    def __init__(self, stock: Any, log_scaling: LogScaling | None) -> None:
        super().__init__()
        self.proj = stock.proj
        self.rel_extent = stock.rel_extent
        self.log_scaling = log_scaling
        self._by_place = type(stock).forward

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bias of every key by its place, (B, H, T, S), as transformers' module does.

        A cache that knows places better shows no keys: then the profiles themselves, (B, H, T, E), for
        :meth:`at_distances`.
        """
        if key_positions.numel():
            bias: Tensor = self._by_place(self, relative_states, query_positions, key_positions)
            return bias
        return (relative_states @ self.proj).transpose(1, 2)

    def at_distances(self, query: Tensor, profile_BHTE: Tensor, distance_B1TS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the queries, scaled, and what is to be added to their scores.

        Args:
            query: Shape (B, H, T, width).
            profile_BHTE: What :meth:`forward` returned.
            distance_B1TS: int64, broadcast to (B, 1, T, S), -1 where a key is not seen.
        """
        extent = profile_BHTE.shape[-1]
        index_BHTS = distance_B1TS.clamp(0, extent - 1).expand(*profile_BHTE.shape[:2], -1, -1)
        bias_BHTS = profile_BHTE.gather(-1, index_BHTS).masked_fill(distance_B1TS >= extent, 0.0)
        if self.log_scaling is not None:
            # Such a layer sees everything, and its first slot is position 0.
            end_B1T1 = (distance_B1TS[..., :1] + 1).float() / self.log_scaling.floor
            scale_B1T1 = 1.0 + self.log_scaling.alpha * torch.log(end_B1T1.clamp(min=1.0))
            query = (query.float() * scale_B1T1).to(query.dtype)
            bias_BHTS = (bias_BHTS.float() * scale_B1T1).to(bias_BHTS.dtype)
        return query, torch.where(distance_B1TS >= 0, bias_BHTS, torch.finfo(bias_BHTS.dtype).min)


class ShortConvolution(nn.Module):
    """A causal convolution over a few rows, each channel on its own, added to its input.

    Args:
        stock: transformers' module of the layer; its weights are taken over under their names.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.conv1d = stock.conv1d
        self.layer_idx, self.conv_idx, self.width = stock.layer_idx, stock.conv_idx, stock.conv_kernel_size

    def forward(
        self, hidden_states: Tensor, past_key_values: Cache | None = None, conv_mask: Tensor | None = None
    ) -> Tensor:
        """Run it; arguments and result as of transformers' module, (B, T, C)."""
        inputs_BTC = hidden_states.float()
        if past_key_values is None:
            taps = [shifted(inputs_BTC, back) for back in range(self.width)]
        else:
            layer: Any = past_key_values.layers[self.layer_idx]
            taps = layer.taps(inputs_BTC, self.conv_idx, self.width)
        weight_WC = self.conv1d.weight.float()[:, 0].T
        output_BTC = inputs_BTC
        for back, tap_BTC in enumerate(taps):
            output_BTC = output_BTC + tap_BTC * weight_WC[self.width - 1 - back]
        return output_BTC.to(hidden_states.dtype)


def shifted(inputs_BTC: Tensor, back: int) -> Tensor:
    """Return what lies so many rows before each row, 0 before the first."""
    num_rows = inputs_BTC.shape[1]
    return nn.functional.pad(inputs_BTC, (0, 0, back, 0))[:, :num_rows]


class UnrolledRows(DynamicLayer):
    """Keys and convolution inputs of all depths of an unroll, one after the other.

    Args:
        place_BT: int, how many rows of depth 1 come before each in its document.
    """

    def __init__(self, place_BT: Tensor) -> None:
        super().__init__()
        self.place_BT = place_BT
        self._inputs: dict[int, tuple[Tensor, ...]] = {}

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Show no keys: masks say where they are."""
        return 0, 0

    def taps(self, inputs_BTC: Tensor, conv_idx: int, width: int) -> list[Tensor]:
        """Append a depth's inputs; return the last ``width`` before each row, itself first.

        Before a row of depth k come its own start's rows of depth k-1 to 1, then the rows of depth 1 before that one.
        """
        depths = (*self._inputs.get(conv_idx, ()), inputs_BTC)
        # A new mapping: a copy of this layer may be run again from where it stood.
        self._inputs = {**self._inputs, conv_idx: depths}
        own = list(depths[::-1][:width])
        return own + [self._before(depths[0], back) for back in range(1, width - len(own) + 1)]

    def _before(self, inputs_BTC: Tensor, back: int) -> Tensor:
        return shifted(inputs_BTC, back).masked_fill((self.place_BT < back)[..., None], 0.0)
