"""What is compared: our decoder at a depth, and transformers' own ``generate`` on the same trunk.

Everything is greedy, and no token ends a text: all arms make the same number of tokens.

Shapes: B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.modeling_layers import MtpModel

from mtp_inference.bench.clock import now
from mtp_inference.bench.prompts import Group
from mtp_inference.decoder import SpeculativeDecoder
from mtp_inference.requests import Request
from mtp_inference.stats import GenerationResult
from mtp_train.acceptance import PromptCounts
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk

Texts = list[tuple[int, ...]]


class Run(NamedTuple):
    """One group of prompts continued."""

    seconds_prefill: float
    """Until the first token of every row was known."""
    seconds: float
    """In all."""
    texts: Texts
    """New tokens."""
    counts: tuple[PromptCounts, ...] = ()
    """What was drafted and accepted; empty for others' decoders, which do not say."""

    @property
    def num_tokens(self) -> int:
        """New tokens of all rows."""
        return sum(len(text) for text in self.texts)

    @property
    def decode_seconds(self) -> float:
        """After prefill."""
        return self.seconds - self.seconds_prefill

    @property
    def decode_tokens(self) -> int:
        """New tokens after the first of each row, which prefill makes."""
        return self.num_tokens - len(self.texts)

    @property
    def rounds(self) -> int:
        """Rounds that the batch ran: those of its slowest row."""
        return max((count.rounds for count in self.counts), default=0)


class Arm(Protocol):
    """One of the things that are compared."""

    name: str
    depth: int | None
    """Drafts per round; None where it is not ours to choose."""

    def run(self, group: Group, new_tokens: int) -> Run:
        """Continue a group of prompts."""


class OurArm:
    """Our decoder.

    Args:
        decoder: Whose own depth is measured.
    """

    name = "ours"

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self.depth: int | None = decoder.depth

    @property
    def captured_rounds(self) -> int:
        """Graphs of rounds captured so far."""
        return self.decoder.captured_rounds

    def run(self, group: Group, new_tokens: int) -> Run:
        """See :class:`Arm`."""
        device = self.decoder.trunk.lm_head_VD.device
        requests = [Request(prompt_ids=ids, max_new_tokens=new_tokens) for ids in group]
        results: dict[int, GenerationResult] = {}
        waiting = set(range(len(group)))
        prefilled = started = now(device)
        for chunk in self.decoder.stream(requests):
            # Rounds begin when every row has its first token.
            if chunk.index in waiting:
                waiting.discard(chunk.index)
                prefilled = now(device)
            if chunk.result is not None:
                results[chunk.index] = chunk.result
        seconds = now(device) - started
        ordered = [results[index] for index in range(len(group))]
        counts = tuple(result.counts(str(index), str(index)) for index, result in enumerate(ordered))
        return Run(prefilled - started, seconds, [result.token_ids for result in ordered], counts)


class TransformersArm:
    """transformers' ``generate`` on the trunk that our decoder runs.

    Its prefill is timed as a call of its own, for one token. With a head, its first round reads the prompt with the
    head; ours does so in prefill.

    Args:
        trunk: The trunk; its generation config is replaced.
        head: Draft with ``use_mtp=True`` and these weights, one draft for each module; None decodes plainly.
    """

    depth: int | None = None

    def __init__(self, trunk: Trunk, head: MtpHead | None) -> None:
        self.name = "transformers" if head is None else "transformers use_mtp"
        self.model = trunk.causal_lm
        self.device = trunk.lm_head_VD.device
        # What a checkpoint declares (stop tokens, sampling) would fill the gaps of ours.
        self.model.generation_config = GenerationConfig()
        self.drafter = None if head is None else their_head(trunk, head)

    @staticmethod
    def can_draft(trunk: Trunk) -> bool:
        """Whether transformers drafts with a head of this family, one text at a time."""
        return bool(trunk.family.engines["transformers"].supported)

    def run(self, group: Group, new_tokens: int) -> Run:
        """See :class:`Arm`."""
        prompt_BT = torch.tensor(group, device=self.device)
        started = now(self.device)
        self._generate(prompt_BT, 1)
        prefilled = now(self.device)
        output_BT = self._generate(prompt_BT, new_tokens)
        ended = now(self.device)
        texts: Texts = [tuple(row) for row in output_BT[:, prompt_BT.shape[1] :].tolist()]
        return Run(prefilled - started, ended - prefilled, texts)

    def _generate(self, prompt_BT: Tensor, new_tokens: int) -> Tensor:
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            pad_token_id=0,
            use_mtp=self.drafter is not None,
        )
        mask_BT = torch.ones_like(prompt_BT)
        with _reading_no_file(self.drafter):
            output: Tensor = self.model.generate(prompt_BT, attention_mask=mask_BT, generation_config=config)
        return output


def their_head(trunk: Trunk, head: MtpHead) -> Any:
    """Return transformers' own model of a head, with the weights of ours.

    Built from memory: what transformers loads from files depends on layer numbers that it knows of released sizes only.
    """
    names = {
        "embed_norm": "enorm",
        "hidden_norm": "hnorm",
        "proj": "eh_proj",
        "layer": "mtp_block",
        "final_norm": "post_norm",
    }
    weight = trunk.lm_head_VD
    with torch.device(weight.device):
        model = MtpModel(trunk.causal_lm, len(head.blocks))
    state = {}
    for name, value in head.state_dict().items():
        _, module, part, *rest = name.split(".")
        state[".".join(["layers", module, names[part], *rest])] = value
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    # The embedding and the output matrix are the trunk's.
    own = [key for key in missing if key.startswith("layers.")]
    if own or unexpected:
        raise RuntimeError(f"transformers' head: {[*own, *unexpected]} do not fit ours; expected the same parts.")
    model.tie_with_main_model(trunk.causal_lm)
    return model.eval()


@contextmanager
def _reading_no_file(drafter: Any | None) -> Iterator[None]:
    """Hand ``generate`` a ready head: it would read the head from files in every call, and take the time for it."""
    if drafter is None:
        yield
        return
    stock = MtpModel.__dict__["from_pretrained"]
    MtpModel.from_pretrained = lambda *_unused, **_also_unused: drafter
    try:
        yield
    finally:
        MtpModel.from_pretrained = stock


def identical(texts: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> int:
    """Count the texts that are the same, token for token."""
    return sum(one == other for one, other in zip(texts, others, strict=True))
