"""Relative-distance attention and short convolutions, for batches whose rows are at different positions.

transformers' layers assume that a key's slot is its position, the same in all rows of a batch. The two differ in the
training unroll, where the rows of later depths follow all rows of depth 1 and packed documents follow one another, and
in decoding, where the rows of a batch are at different positions. There attention masks contain the distance of each
key (int64, -1 for a masked key), and the cache passes each convolution the inputs before its own.

Shapes: B rows, T queries, S keys, H heads, E distances, C channels, W kernel width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicLayer

from mtp_train.upstream.transformers_private import CACHE

CONVOLVED_CACHE_LAYERS = ("LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer")
"""transformers' cache classes for such layers, by name, because older releases lack one of them."""


class RelativeProfiles(nn.Module):
    """The bias of attention scores by distance: a bank of profiles, mixed by the query.

    Args:
        stock: transformers' module of the layer; its weights are reused under the same names.
        floor, alpha: Scores at position p grow by ``1 + alpha log(max((p + 1) / floor, 1))``; not without a floor.
    """

    def __init__(self, stock: Any, floor: int | None = None, alpha: float = 0.0) -> None:
        super().__init__()
        self.proj = stock.proj
        self.rel_extent = stock.rel_extent
        self.floor = floor
        self.alpha = alpha
        self._by_place = type(stock).forward

    def forward(self, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return the bias of every key by its slot, (B, H, T, S), like transformers' module.

        A cache with positions of its own passes no key positions. The result is then the profiles, (B, H, T, E), for
        :meth:`at_distances`.
        """
        if key_positions.numel():
            return self._by_place(self, relative_states, query_positions, key_positions)
        return (relative_states @ self.proj).transpose(1, 2)

    def at_distances(self, query: Tensor, profile_BHTE: Tensor, distance_B1TS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled queries, and the bias to add to their scores.

        Args:
            profile_BHTE: The result of :meth:`forward`.
            distance_B1TS: int64, broadcast to (B, 1, T, S), -1 for a masked key.
        """
        extent = profile_BHTE.shape[-1]
        index_BHTS = distance_B1TS.clamp(0, extent - 1).expand(*profile_BHTE.shape[:2], -1, -1)
        bias_BHTS = profile_BHTE.gather(-1, index_BHTS).masked_fill(distance_B1TS >= extent, 0.0)
        if self.floor is not None:
            # A layer with scaling attends to all keys, and its first slot is position 0.
            end_B1T1 = (distance_B1TS[..., :1] + 1).float() / self.floor
            scale_B1T1 = 1.0 + self.alpha * torch.log(end_B1T1.clamp(min=1.0))
            query = (query.float() * scale_B1T1).to(query.dtype)
            bias_BHTS = (bias_BHTS.float() * scale_B1T1).to(bias_BHTS.dtype)
        return query, torch.where(distance_B1TS >= 0, bias_BHTS, torch.finfo(bias_BHTS.dtype).min)


class ShortConvolution(nn.Module):
    """A causal depthwise convolution over a few rows, added to its input.

    Args:
        stock: transformers' module of the layer; its weights are reused under the same names.
    """

    def __init__(self, stock: Any) -> None:
        super().__init__()
        self.conv1d = stock.conv1d
        self.layer_idx, self.conv_idx, self.width = stock.layer_idx, stock.conv_idx, stock.conv_kernel_size

    def forward(self, hidden_states: Tensor, **given: Any) -> Tensor:
        """Run the convolution, (B, T, C) to (B, T, C); arguments as in transformers' module."""
        inputs_BTC = hidden_states.float()
        cache = given.get(CACHE)
        if cache is None:
            taps = [shifted(inputs_BTC, back) for back in range(self.width)]
        else:
            layer: Any = cache.layers[self.layer_idx]
            taps = layer.taps(inputs_BTC, self.conv_idx, self.width)
        weight_WC = self.conv1d.weight.float()[:, 0].T
        output_BTC = inputs_BTC
        for back, tap_BTC in enumerate(taps):
            output_BTC = output_BTC + tap_BTC * weight_WC[self.width - 1 - back]
        return output_BTC.to(hidden_states.dtype)


def shifted(inputs_BTC: Tensor, back: int) -> Tensor:
    """Return the inputs ``back`` rows before each row, 0 before the first row."""
    return nn.functional.pad(inputs_BTC, (0, 0, back, 0))[:, : inputs_BTC.shape[1]]


class UnrolledRows(DynamicLayer):
    """Cache of keys and convolution inputs in an unroll, with the depths one after the other.

    Args:
        place_BT: int, number of depth-1 rows before each row in its document.
    """

    def __init__(self, place_BT: Tensor) -> None:
        super().__init__()
        self.place_BT = place_BT
        self._inputs: dict[int, tuple[Tensor, ...]] = {}

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return no key sizes: the masks contain the distances of keys."""
        return 0, 0

    def taps(self, inputs_BTC: Tensor, conv_idx: int, width: int) -> list[Tensor]:
        """Append a depth's inputs; return the last ``width`` inputs at each row, the row's own first.

        A row of depth k follows its own start's rows of depth 1 to k-1, which follow the earlier rows of depth 1.
        """
        depths = (*self._inputs.get(conv_idx, ()), inputs_BTC)
        # A new mapping, because a shallow copy of this layer may be run again from its earlier state.
        self._inputs = {**self._inputs, conv_idx: depths}
        own = list(depths[::-1][:width])
        return own + [self._before(depths[0], back) for back in range(1, width - len(own) + 1)]

    def _before(self, inputs_BTC: Tensor, back: int) -> Tensor:
        return shifted(inputs_BTC, back).masked_fill((self.place_BT < back)[..., None], 0.0)
