"""Synthetic text, a random head, and a brief training of trunk and head on it, so that drafts are accepted.

Shapes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mtp_train.families import of_kind
from mtp_train.heads.head import Head
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from witness_maker.words import WORDS

ROWS, TOKENS = 16, 32
TRAINED_DEPTHS = 3
LEARNING_RATE = 4e-3
SMALL, LARGE = 0.1, 0.3
CORRECTIONS = ("correction_bias", "expert_bias")
ROUTING = (*CORRECTIONS, "sinks", "hc.base", "hc_base", "position_bias")
"""Suffixes of tensors that start at zero, or uninitialised, and that training hardly changes."""


@dataclass(frozen=True)
class Chain:
    """A source of text in which each token has a fixed successor, except for random noise.

    Args:
        successor_V: int64, the successor of each token.
        noise: Probability that a random token follows instead, 0 to 1.
    """

    successor_V: Tensor
    noise: float

    @classmethod
    def one_cycle(cls, vocab_size: int, noise: float, generator: torch.Generator) -> Chain:
        """Return a chain whose successors form one cycle through all tokens, so that greedy text repeats late."""
        order_V = torch.randperm(vocab_size, generator=generator)
        successor_V = torch.empty_like(order_V)
        successor_V[order_V] = order_V.roll(-1)
        return cls(successor_V, noise)

    @classmethod
    @torch.no_grad()
    def of_trunk(cls, trunk: Trunk, noise: float) -> Chain:
        """Return the chain that a trunk has learned."""
        words_V1 = torch.arange(len(WORDS))[:, None]
        return cls(trunk.logits(trunk.hidden(words_V1))[:, 0, : len(WORDS)].argmax(dim=-1), noise)

    def draw(self, num_rows: int, num_tokens: int, generator: torch.Generator) -> Tensor:
        """Return texts, int64 (B, T)."""
        any_BT = torch.randint(len(self.successor_V), (num_rows, num_tokens), generator=generator)
        is_any_BT = torch.rand(num_rows, num_tokens, generator=generator) < self.noise
        columns = [any_BT[:, 0]]
        for any_B, is_any_B in zip(any_BT.T[1:], is_any_BT.T[1:], strict=True):
            columns.append(torch.where(is_any_B, any_B, self.successor_V[columns[-1]]))
        return torch.stack(columns, dim=1)


def train(
    trained: Sequence[nn.Module],
    loss_of: Callable[[Tensor], Tensor],
    chain: Chain,
    num_steps: int,
    generator: torch.Generator,
) -> float:
    """Train modules on a chain; freeze them afterwards.

    Args:
        trained: A trunk, not quantised, and its head, or a head alone, in fp32.
        loss_of: Returns the loss of texts, int64 (B, T).
        chain: Source of the training text.
        num_steps: Number of steps of ``ROWS`` texts of ``TOKENS`` tokens.
        generator: Random generator of the texts.

    Returns:
        The last loss, in nats.
    """
    parameters = [one for module in trained for one in module.requires_grad_(True).parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    # Decay linearly to 0, so that the last texts have little weight.
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
    loss = torch.zeros(())
    for _ in range(num_steps):
        loss = loss_of(chain.draw(ROWS, TOKENS, generator).to(parameters[0].device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    for module in trained:
        module.requires_grad_(False)
    return float(loss.detach())


def chained_loss(trunk: Trunk, head: Head, tokens_BT: Tensor) -> Tensor:
    """Return the cross-entropy, mean over the trunk and the head's depths; no gradient flows between the two."""
    hidden_BTD = trunk.hidden(tokens_BT)
    num_tokens = tokens_BT.shape[1]
    states = head.unroll(
        trunk.head_input(hidden_BTD.detach(), head.convention),
        tokens_BT,
        head.embedding(trunk.embed),
        num_depths=TRAINED_DEPTHS,
        positions_BT=torch.arange(num_tokens, device=tokens_BT.device).expand_as(tokens_BT),
        document_BT=torch.zeros_like(tokens_BT),
    )
    # The trunk's row t predicts token t + 1, the head's depth k token t + k + 1.
    # Other heads than assistants have the trunk's lm_head here, or get their own from it after training.
    own = [partial(head.project, depth, shared=trunk.project) for depth in range(1, TRAINED_DEPTHS + 1)]
    projects = [trunk.project, *(own if head.reads_keys else [trunk.project] * TRAINED_DEPTHS)]
    all_states = [trunk.normed(hidden_BTD), *states]
    losses = [
        cross_entropy(project(state_BTD[:, : num_tokens - ahead]).flatten(0, 1), tokens_BT[:, ahead:].flatten())
        for ahead, (project, state_BTD) in enumerate(zip(projects, all_states, strict=True), start=1)
    ]
    return torch.stack(losses).mean()


def random_head(trunk: Trunk, num_modules: int = 1, kind: str = "mtp") -> MtpHead:
    """Return a head whose matrices have transformers' initialisation of the trunk, and whose norms are the identity.

    Attention sinks and the parameters that mix residual streams get transformers' initial values here, as their layers
    do not initialise them.
    """
    weight, family = trunk.lm_head_VD, of_kind(trunk.family, kind)
    with torch.device(weight.device):
        head = MtpHead(family, trunk.config, num_modules=num_modules, convention=family.wiring.default)
    for name, parameter in head.named_parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=trunk.config.initializer_range)
        elif name.endswith(("sinks", "base")):
            torch.nn.init.zeros_(parameter)
        elif name.endswith("scale"):
            torch.nn.init.ones_(parameter)
        # Parameters only: buffers (a router's correction bias) stay in fp32.
        parameter.data = parameter.data.to(weight.dtype)
    return head.eval()


def stir(module: nn.Module, generator: torch.Generator) -> None:
    """Randomise tensors that would otherwise be the identity or zero, so that an engine that ignores them is found."""
    with torch.no_grad():
        for part in module.modules():
            kind = type(part).__name__
            if kind.endswith("Norm") and hasattr(part, "weight"):
                part.weight.add_(LARGE * torch.randn(part.weight.shape, generator=generator))
            if kind.endswith("HashRouter"):
                # A hash-routing table with other experts for every token.
                chances_VE = torch.rand(len(part.tid2eid), part.num_experts, generator=generator)
                part.tid2eid.copy_(chances_VE.topk(part.top_k).indices)
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if name.endswith(ROUTING):
                value.copy_(SMALL * torch.randn(value.shape, generator=generator))
