"""Run a DSpark drafter: DFlash with a Markov head, which biases the logits of a draft by the token before it.

The bias is a matrix of low rank, from tokens of the trunk to those that may be drafted. It may depend on the state of
the draft's row too (``gated``), and on a recurrent state along the block (``rnn``).

Shapes: B rows, T tokens of a block, D hidden, R rank, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mtp_train.heads.dflash import Correct, DFlashHead


class MarkovHead(nn.Module):
    """The bias of one draft, with the names of the speculators package (``models/dspark/model_definitions.py``)."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        rank = config.markov_rank
        read = config.hidden_size + config.markov_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, getattr(config, "draft_vocab_size", None) or config.vocab_size, bias=False)
        kind = getattr(config, "markov_head_type", "vanilla")
        self.gate_proj = nn.Linear(read, rank) if kind == "gated" else None
        self.joint_proj = nn.Linear(rank + read, 3 * rank) if kind == "rnn" else None

    def forward(self, token_B1: Tensor, state_B1D: Tensor, memory_B1R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the bias, (B, 1, tokens that may be drafted), and the recurrent state of the next row."""
        read_B1R = self.markov_w1(token_B1)
        if self.gate_proj is not None:
            read_B1R = read_B1R * self.gate_proj(torch.cat([state_B1D, read_B1R], dim=-1)).sigmoid()
        elif self.joint_proj is not None:
            joint = self.joint_proj(torch.cat([memory_B1R, read_B1R, state_B1D], dim=-1))
            gate_B1R, candidate_B1R, read_B1R = joint.chunk(3, dim=-1)
            kept_B1R = gate_B1R.sigmoid()
            memory_B1R = kept_B1R * memory_B1R + (1 - kept_B1R) * candidate_B1R.tanh()
            read_B1R = read_B1R.tanh()
        return self.markov_w2(read_B1R), memory_B1R


class DSparkHead(DFlashHead):
    """A DSpark drafter as a head; with rank 0 it has no Markov head."""

    def __init__(self, *shape: Any, **wiring: Any) -> None:
        super().__init__(*shape, **wiring)
        self.module.markov_head = MarkovHead(self.config) if self.config.markov_rank else None

    def correcting(self, states_BTD: Tensor, anchor_B1: Tensor) -> Correct:
        markov = self.module.markov_head
        if markov is None:
            return super().correcting(states_BTD, anchor_B1)
        memory_B1R = states_BTD.new_zeros(len(states_BTD), 1, markov.markov_w1.embedding_dim)

        def corrected(row: int, logits_B1V: Tensor, token_B1: Tensor) -> Tensor:
            nonlocal memory_B1R
            bias, memory_B1R = markov(token_B1, states_BTD[:, row : row + 1], memory_B1R)
            output = self.module.lm_head
            return logits_B1V + (bias if output is None else output.placed(bias))

        if self.first_row:
            # The recurrent state begins with the anchor's row, although that row gives no draft.
            _, memory_B1R = markov(anchor_B1, states_BTD[:, :1], memory_B1R)
        return corrected


class InsideHead(DSparkHead):
    """A drafter from its trunk's checkpoint, whose layers have residual streams as the trunk's have."""

    def __init__(self, *shape: Any, **wiring: Any) -> None:
        super().__init__(*shape, **wiring)
        module = self.module
        config = self.config
        streams: Any = self.family.trunk.streams
        module.norm = nn.Sequential(self.family.classes.cls(streams.mixer)(config), module.norm)
        # It only cuts drafts short, and is not used here. A graft copies it.
        read = config.hidden_size + config.markov_rank
        module.confidence_head = nn.ModuleDict({"proj": nn.Linear(read, 1, bias=False)})

    def denoise(self, embed_BTD: Tensor, *block: Any) -> Tensor:
        """As in other drafters, where each residual stream starts as the embedding."""
        return super().denoise(embed_BTD[:, :, None].repeat(1, 1, self.config.hc_mult, 1), *block)
