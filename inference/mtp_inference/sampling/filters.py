"""Top-k and top-p: by a sort on an accelerator, without one on a CPU, where a sort takes longer than a layer.

Both keep the tokens from an edge on: all tokens with a larger score than the edge, and some of the tokens with the
edge's own score. The result is that of transformers' processors, which sort the scores in ascending order. Top-k keeps
every token that ties with the k-th. Top-p drops tokens one by one while the probabilities dropped so far sum to at most
``1 - top_p``: of equal scores the first in the vocabulary first, and never the last token of the order. Where a whole
number of equal tokens makes up this sum, rounding decides about one of them, as it does in a sort.

A CPU finds the edge of top-p among the largest scores: a row whose top-k is at most ``LISTED`` in those that ``topk``
lists, another one in a list that grows until all other tokens may be dropped. A row's way depends on its own settings
and scores, never on other rows.

Shapes: B rows of the batch, T positions, V vocabulary, N blocks of S tokens, M listed scores (M1 = M + 1), R = B x T.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtp_inference.sampling.scan import first_over, in_blocks

LISTED = 1024
"""Number of largest scores in a list. On a CPU, ``topk`` takes as long for 64 of 250,000 scores as for 1024."""
GROWTH = 16
"""Factor between the lengths of lists."""


class Edge(NamedTuple):
    """The score of the edge, and the number of tokens with this score that are dropped, fp32 (B, T, 1) each."""

    score_BT1: Tensor
    dropped_BT1: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class TopRows:
    """The settings of top-k and top-p of a batch: one entry per row, and flags for the steps that a row needs."""

    kth_B: Tensor
    """int64, ``top_k - 1``: the place of the last score that top-k keeps; 0 if top-k is off."""
    keeps_any_k_B: Tensor
    """bool: top-k is off."""
    is_listed_B: Tensor
    """bool: top-k keeps at most ``LISTED`` scores."""
    top_p_tail_B: Tensor
    """fp32, ``1 - top_p``: subtracted in double like in transformers, as rounding decides ties at the edge."""
    any_top_k: bool
    any_top_p: bool
    any_listed: bool
    """Whether a row with top-p is listed."""
    any_searched: bool
    """Whether a row with top-p is not listed."""
    top_k_width: int
    """Number of scores that top-k lists; 0 if no row has a top-k."""


def listed_width(top_k: int) -> int:
    """Return the number of scores to list for the largest top-k of a batch."""
    width = LISTED
    while width < top_k:
        width *= GROWTH
    return width


def keep_top(scores_BTV: Tensor, rows: TopRows) -> Tensor:
    """Apply top-k, then top-p, in place: set the scores of dropped tokens to minus infinity."""
    if not reads_values(scores_BTV.device):
        return keep_top_by_sort(scores_BTV, rows)
    if rows.any_top_k:
        top_BTM = scores_BTV.topk(min(rows.top_k_width, scores_BTV.shape[-1])).values
        kth_B11 = rows.kth_B.clamp(max=top_BTM.shape[-1] - 1)[:, None, None]
        least_BT1 = top_BTM.gather(-1, kth_B11.expand(-1, top_BTM.shape[1], -1))
        least_BT1.masked_fill_(rows.keeps_any_k_B[:, None, None], -math.inf)
        if not rows.any_top_p or rows.any_searched:
            scores_BTV.masked_fill_(scores_BTV < least_BT1, -math.inf)
        if not rows.any_top_p:
            return scores_BTV
    else:
        least_BT1 = torch.full_like(scores_BTV[..., :1], -math.inf)
    edge, is_listed_B11 = Edge(least_BT1, torch.zeros_like(least_BT1)), rows.is_listed_B[:, None, None]
    tail_B11 = _rounding_to(rows.top_p_tail_B[:, None, None])
    if rows.any_searched:
        edge = _chosen(is_listed_B11, edge, edge_of_growing_lists(scores_BTV, tail_B11))
    if rows.any_listed:
        num_kept_BT1 = (scores_BTV >= least_BT1).sum(-1, keepdim=True)
        edge = _chosen(is_listed_B11, listed_edge(top_BTM[..., :LISTED], least_BT1, num_kept_BT1, tail_B11), edge)
    return _keep_from(edge, scores_BTV)


def keep_top_by_sort(scores_BTV: Tensor, rows: TopRows) -> Tensor:
    """Apply top-k, then top-p, in place and in fixed shapes, without reading a value: a CUDA graph can capture it."""
    vocab = scores_BTV.shape[-1]
    # Ascending as in transformers, but stable: of equal scores at the edge of top-p the first are dropped.
    sorted_BTV, order_BTV = scores_BTV.sort(dim=-1, stable=True)
    if rows.any_top_k:
        place_B11 = (vocab - 1 - rows.kth_B).clamp(min=0)[:, None, None]
        least_BT1 = sorted_BTV.gather(-1, place_B11.expand(-1, scores_BTV.shape[1], 1))
        least_BT1.masked_fill_(rows.keeps_any_k_B[:, None, None], -math.inf)
        sorted_BTV.masked_fill_(sorted_BTV < least_BT1, -math.inf)
    if rows.any_top_p:
        is_dropped_BTV = sorted_BTV.softmax(-1).cumsum_(-1) <= rows.top_p_tail_B[:, None, None]
        is_dropped_BTV[..., -1] = False
        sorted_BTV.masked_fill_(is_dropped_BTV, -math.inf)
    return scores_BTV.scatter_(-1, order_BTV, sorted_BTV)


def reads_values(device: torch.device) -> bool:
    """Whether the host can read values of the device's tensors without waiting."""
    return device.type == "cpu"


def _rounding_to(tail_B11: Tensor) -> Tensor:
    """Return the largest number that rounds to the tail in fp32, in fp64.

    Compared with it, sums in fp64 are rounded to fp32, like transformers' sums on a CPU.
    """
    next_B11 = tail_B11.nextafter(torch.full_like(tail_B11, math.inf))
    return (tail_B11.double() + next_B11.double()) / 2


def _chosen(is_first_B11: Tensor, first: Edge, second: Edge) -> Edge:
    return Edge(*(torch.where(is_first_B11, one, other) for one, other in zip(first, second, strict=True)))


def _keep_from(edge: Edge, scores_BTV: Tensor) -> Tensor:
    is_edge_BTV = scores_BTV == edge.score_BT1
    is_edge_BTNS = in_blocks(is_edge_BTV)
    first_BT1 = first_over(is_edge_BTNS, is_edge_BTNS.sum(-1).float(), edge.dropped_BT1)
    is_early_BTV = torch.arange(scores_BTV.shape[-1], device=scores_BTV.device) < first_BT1
    return scores_BTV.masked_fill_((scores_BTV < edge.score_BT1) | (is_edge_BTV & is_early_BTV), -math.inf)


def _edge(score_BT1: Tensor, one_BT1: Tensor, below_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Return the edge at a score, from the probability of one token with it, and the sum of those below."""
    return Edge(score_BT1, ((tail_B11 - below_BT1) / one_BT1).floor().float())


def listed_edge(top_BTM: Tensor, least_BT1: Tensor, num_kept_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge of top-p among the tokens that top-k keeps.

    Args:
        top_BTM: The largest scores, in descending order.
        least_BT1: The least score that top-k keeps, which the list contains.
        num_kept_BT1: Number of tokens that top-k keeps. Those that are not listed tie with the least.
        tail_B11: ``1 - top_p``.
    """
    is_below_BTM = top_BTM < least_BT1
    num_below_BT1 = is_below_BTM.sum(-1, keepdim=True)
    # Add the tokens that are not listed as one entry, after the others.
    outside_BT1 = least_BT1 + (num_kept_BT1 + num_below_BT1 - top_BTM.shape[-1]).log()
    p_BTM1 = torch.cat([top_BTM.masked_fill(is_below_BTM, -math.inf), outside_BT1], dim=-1).softmax(-1)
    p_BTM1 = p_BTM1.to(tail_B11.dtype)
    # Entries below the least have no probability. Where the entry of the other tokens exceeds the tail, the edge is the
    # least, not this entry.
    return _edge_in(torch.cat([top_BTM, least_BT1], dim=-1), p_BTM1, num_below_BT1 + 1, tail_B11)


def _edge_in(scores_BTM1: Tensor, p_BTM1: Tensor, num_passed_BT1: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge in a list.

    Args:
        scores_BTM1: Scores in descending order, but that of the last entry, which is at most the edge's.
        p_BTM1: Their probabilities. The last entry is the sum of tokens that are not listed.
        num_passed_BT1: Number of entries at the end of the list that are not the edge.
        tail_B11: ``1 - top_p``.
    """
    num_dropped_BT1 = (p_BTM1.flip(-1).cumsum(-1) <= tail_B11).sum(-1, keepdim=True).maximum(num_passed_BT1)
    place_BT1 = (p_BTM1.shape[-1] - 1 - num_dropped_BT1).clamp(min=0)
    score_BT1 = scores_BTM1.gather(-1, place_BT1)
    below_BT1 = (p_BTM1 * (scores_BTM1 < score_BT1)).sum(-1, keepdim=True)
    return _edge(score_BT1, p_BTM1.gather(-1, place_BT1), below_BT1, tail_B11)


def edge_of_growing_lists(scores_BTV: Tensor, tail_B11: Tensor) -> Edge:
    """Find the edge of top-p in a list of the largest scores. A row whose list is too short gets a longer one.

    Reads values on the host.

    Args:
        scores_BTV: The scores.
        tail_B11: ``1 - top_p``, fp64. Rows whose tail rounds to 0 in fp32 keep all tokens.
    """
    scores_RV = scores_BTV.flatten(0, 1)
    tail_R1 = tail_B11.expand(-1, scores_BTV.shape[1], -1).flatten(0, 1)
    edges = Edge(torch.full_like(scores_RV[:, :1], -math.inf), torch.zeros_like(scores_RV[:, :1]))
    waiting = [((tail_R1[:, 0].float() > 0.0).nonzero()[:, 0], LISTED)]
    while waiting:
        open_R, width = waiting.pop()
        # Most often all rows are open.
        top_RM1, p_RM1 = _list_of(scores_RV if len(open_R) == len(scores_RV) else scores_RV[open_R], width)
        found = _edge_in(top_RM1, p_RM1, torch.ones_like(open_R)[:, None], tail_R1[open_R])
        # All other tokens may be dropped, and none of them ties with the edge.
        is_found_R = ((p_RM1[:, -1:] <= tail_R1[open_R]) & (found.score_BT1 > top_RM1[:, -2:-1]))[:, 0]
        is_found_R |= width >= scores_RV.shape[-1]
        for values, new in zip(edges, found, strict=True):
            values[open_R[is_found_R]] = new[is_found_R]
        # One row at a time: long lists of several rows do not fit into the cache.
        waiting += [(row_1, GROWTH * width) for row_1 in open_R[~is_found_R][:, None]]
    return Edge(*(values.view_as(scores_BTV[..., :1]) for values in edges))


def _list_of(scores_RV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores in descending order and their probabilities, as :func:`_edge_in` takes them.

    Probabilities are fp64, as that of the other tokens is the difference of two sums near 1.
    """
    if width >= scores_RV.shape[-1]:
        top_RM = scores_RV.sort(descending=True).values
        p_RM = top_RM.softmax(-1).double()
        outside_R1 = torch.zeros_like(p_RM[:, :1])
    else:
        top_RM, token_RM = scores_RV.topk(width)
        p_RV = scores_RV.softmax(-1)
        p_RM = p_RV.gather(-1, token_RM).double()
        sum_R1 = p_RV.sum(-1, keepdim=True, dtype=torch.float64)
        outside_R1 = (sum_R1 - p_RM.sum(-1, keepdim=True)).clamp_(min=0.0)
    least_R1 = torch.full_like(top_RM[:, :1], -math.inf)
    return torch.cat([top_RM, least_R1], dim=-1), torch.cat([p_RM, outside_R1], dim=-1)
