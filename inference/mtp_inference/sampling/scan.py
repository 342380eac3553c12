"""Find the token at which a cumulative sum over the vocabulary passes a threshold, without a scan over the vocabulary.

The sums of blocks of tokens are scanned to choose a block, and then the tokens of this block. On a GPU one processor
scans a row, while all processors sum blocks.

Shapes: B rows of the batch, T positions, V vocabulary, N blocks, S tokens of a block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCKS = (512, 256, 128)
"""Values of S, near the square root of a vocabulary of 250,000 tokens, so that both scans are short. The first one that
divides the vocabulary is taken; sizes of released models are multiples of 128, with few exceptions."""


def in_blocks(values_BTV: Tensor, padding: float = 0.0) -> Tensor:
    """Return a vocabulary in blocks, (B, T, N, S): a view, or a padded copy if no size of blocks divides it."""
    vocab = values_BTV.shape[-1]
    size = next((size for size in BLOCKS if vocab % size == 0), min(BLOCKS[0], vocab))
    missing = -vocab % size
    if missing:
        values_BTV = torch.nn.functional.pad(values_BTV, (0, missing), value=padding)
    return values_BTV.unflatten(-1, (-1, size))


def first_over(weights_BTNS: Tensor, sums_BTN: Tensor, threshold_BT1: Tensor) -> Tensor:
    """Return the first token at which the sum of the weights so far exceeds a threshold.

    Args:
        weights_BTNS: Weights of 0 or more in blocks, fp32, or bool to count.
        sums_BTN: The sums of the blocks, fp32.
        threshold_BT1: fp32. A threshold from the total on counts as a little less than the total.

    Returns:
        int64 (B, T, 1), never a token of weight 0, unless all weights are 0.
    """
    num_blocks, size = weights_BTNS.shape[-2:]
    if num_blocks == 1:
        block_BT1, inside_BTS = None, weights_BTNS[..., 0, :]
    else:
        block_BT1, sums_so_far_BTN = _first_over(sums_BTN, threshold_BT1)
        # Sums may fall in a parallel scan, so the sum before the block is not the entry before.
        threshold_BT1 = threshold_BT1 - (sums_so_far_BTN - sums_BTN).gather(-1, block_BT1)
        inside_BTS = weights_BTNS.gather(-2, block_BT1[..., None].expand(-1, -1, -1, size))[..., 0, :]
    token_BT1 = _first_over(inside_BTS.float(), threshold_BT1)[0]
    return token_BT1 if block_BT1 is None else token_BT1.add(block_BT1, alpha=size)


def _first_over(weights_BTN: Tensor, threshold_BT1: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of the first sum over the threshold, and the sums."""
    # A parallel scan sums each entry in its own order, so sums may change at a weight of 0, and may even fall.
    # Therefore weights of 0 are masked out, and the total is the largest sum, not the last.
    sums_BTN = weights_BTN.cumsum(-1).masked_fill_(weights_BTN <= 0.0, -math.inf)
    total_BT1 = sums_BTN.amax(-1, keepdim=True)
    # The next number after the threshold, at most the total. A threshold may reach the total by rounding; no sum would
    # exceed it.
    least_BT1 = threshold_BT1.minimum(total_BT1).nextafter(total_BT1)
    return (sums_BTN >= least_BT1).view(torch.uint8).argmax(-1, keepdim=True), sums_BTN
