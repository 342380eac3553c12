"""Tiny block drafters of every published form, and their drafts written out: a whole text for each draft, no cache.

Their layers are transformers' (``muse_glimmer_assistant``), called with masks that each form's definition gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModel

from assistants import randomise
from scripted import PlainTexts, plain_texts, random_prompt
from tiny import VOCAB_SIZE, tiny_trunk

MODEL_TYPE = "muse_glimmer_assistant"
MASK, READ, WINDOW = 5, [0, 2], 6
"""The mask token, the layers whose output is read, as DFlash's authors count, and the window of sliding layers."""
RANK, TOP, TAPS, GROUP = 8, 5, 2, 8
CHOSEN = torch.arange(0, VOCAB_SIZE, 2)
FULL, SLIDING = "full_attention", "sliding_attention"
MIXED = [SLIDING, FULL, SLIDING, SLIDING, FULL]
PROMPTS = [random_prompt(length, seed=length) for length in (3, 21, 9, 14, 1)]
TRUNK = tiny_trunk("qwen3", num_layers=5)
LAYERS = {**TRUNK.config.to_dict(), "architectures": ["DFlashDraftModel"]}
"""The config of a drafter's layers, which are as many and as wide as the trunk's."""
Sees = Callable[[Tensor, Tensor, int], Tensor]
"""Positions of tokens and keys and that of the block's first token, to whether a token attends to a key."""
SEES: dict[str, Sees] = {
    "speculators": lambda token, key, anchor: (key >= anchor - WINDOW) & (key <= token),
    "speculators, bidirectional": lambda token, key, anchor: key >= anchor - WINDOW,
    "authors": lambda token, key, anchor: (key <= token) & (key > token - WINDOW),
    "authors, bidirectional": lambda token, key, anchor: (token - key).abs() < WINDOW,
    "everything": lambda token, key, anchor: key >= 0,
}
"""The sliding layers of each form."""
SETTINGS: dict[str, dict[str, Any]] = {
    "speculators, bidirectional": {"sliding_window_non_causal": True},
    "authors, bidirectional": {"is_causal": False},
}


@functools.cache
def texts() -> PlainTexts:
    return plain_texts(TRUNK, PROMPTS, 90)


def reference(block_size: int, layers: Sequence[int] = READ, mask: int = MASK, **changes: Any) -> Any:
    """Return transformers' drafter, its attention sharp enough that the drafts of a block differ."""
    fields = {"block_size": block_size, "mask_token_id": mask, "target_layer_ids": [*layers], "sliding_window": 8}
    config = CONFIG_MAPPING[MODEL_TYPE].from_dict({**LAYERS, "model_type": MODEL_TYPE, **fields, **changes})
    model = AutoModel.from_config(config).eval()
    randomise(model, 3)
    for layer in model.requires_grad_(False).layers:
        layer.self_attn.q_norm.weight *= 8
    return model


def own_names(model: Any) -> dict[str, Tensor]:
    """Return the tensors of transformers' drafter with the names of DFlash's authors."""
    renames = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
    return {renames.get(name, name): value for name, value in model.state_dict().items()}


@dataclass(frozen=True)
class BlockForm:
    """A drafter. Those that differ in the fields behind ``block_size`` have equal weights."""

    kind: str
    """``dflash``, ``dflash2``, or the Markov head of DSpark: ``vanilla``, ``gated`` or ``rnn``."""
    form: str = "speculators"
    chosen: bool = False
    """Whether it drafts from CHOSEN alone."""
    block_size: int = 4
    anchor: bool = False
    """Whether the block's first row gives the first draft."""
    mask: int = MASK
    layers: tuple[int, ...] = tuple(READ)
    corrects: bool = True

    def __str__(self) -> str:
        return f"{self.kind}-{self.form}-{self.block_size}"

    @property
    def is_spark(self) -> bool:
        return self.kind in ("vanilla", "gated", "rnn")

    @property
    def depth(self) -> int:
        return self.block_size - (not self.anchor)

    @functools.cached_property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors beside those of the layers."""
        hidden = TRUNK.config.hidden_size
        generator = torch.Generator().manual_seed(7)
        rows = len(CHOSEN) if self.chosen else VOCAB_SIZE
        shapes: dict[str, tuple[int, ...]] = {"lm_head.weight": (rows, hidden)} if self.chosen else {}
        if self.is_spark:
            read = hidden + RANK
            shapes |= {"markov_head.markov_w1.weight": (VOCAB_SIZE, RANK), "markov_head.markov_w2.weight": (rows, RANK)}
            shapes |= {"confidence_head.proj.weight": (1, read), "confidence_head.proj.bias": (1,)}
            gate = {"gated": ("gate_proj", RANK, read), "rnn": ("joint_proj", 3 * RANK, RANK + read)}.get(self.kind)
            if gate is not None:
                shapes |= {f"markov_head.{gate[0]}.weight": gate[1:], f"markov_head.{gate[0]}.bias": gate[1:2]}
        if self.kind == "dflash2":
            shapes |= {
                f"candidate_selector.{side}_codebook": (VOCAB_SIZE, RANK) for side in ("predecessor", "successor")
            }
            shapes["candidate_selector.hidden_projection.weight"] = (RANK, hidden)
            for name in (f"layers.{number}.{part}_conv." for number in range(5) for part in ("attention", "mlp")):
                shapes[f"{name}base_kernel"] = (2, TAPS, hidden)
                shapes[f"{name}kernel_projection.weight"] = (2 * TAPS * hidden // GROUP, hidden)
        tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        small = {name: value / 4 for name, value in tensors.items() if "proj" in name}
        return tensors | small | ({"d2t": CHOSEN - torch.arange(len(CHOSEN))} if self.chosen else {})

    @property
    def config(self) -> dict[str, Any]:
        own: dict[str, Any] = {"mask_token_id": self.mask, "sample_from_anchor": self.anchor}
        own |= {"block_size": self.block_size, **SETTINGS.get(self.form, {})}
        if self.is_spark:
            own |= {"markov_rank": RANK, "markov_head_type": self.kind, "enable_confidence_head": True}
        if self.kind == "dflash2":
            own |= {"selector_rank": RANK, "selector_top_k": TOP, "conv_kernel_size": TAPS, "conv_group_size": GROUP}
        layers = {**LAYERS, "layer_types": MIXED, "sliding_window": WINDOW, "use_sliding_window": True}
        kind = "dspark" if self.is_spark else self.kind
        name = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DSparkDraftModel"}[kind]
        if self.form.startswith("authors"):
            return {**layers, "architectures": [name], **own, "target_layer_ids": [*self.layers]}
        return {
            "architectures": [name],
            "speculators_model_type": kind,
            "sliding_window_non_causal": False,
            "aux_hidden_state_layer_ids": [layer + 1 for layer in self.layers],
            "draft_vocab_size": len(CHOSEN) if self.chosen else VOCAB_SIZE,
            "transformer_layer_config": layers,
            **own,
        }

    @torch.no_grad()
    def drafted(self, text: Sequence[int], num_drafts: int, choose: Callable[[Tensor], int]) -> list[int]:
        """Draft after a text; ``choose`` gets the logits (V,) of each draft."""
        states_TD = self._states(text)
        memory_R = torch.zeros(RANK)
        drafts = []
        first = 0 if self.anchor else 1
        for row in range(first + num_drafts):
            before = drafts[-1] if drafts else text[-1]
            logits_V, memory_R = self._corrected(states_TD[row], before, memory_R)
            if row >= first:
                drafts.append(choose(logits_V))
        return drafts

    def best(self, text: Sequence[int], num_drafts: int) -> list[int]:
        return self.drafted(text, num_drafts, lambda logits_V: int(logits_V.argmax()))

    def _states(self, text: Sequence[int]) -> Tensor:
        """Return the states of the whole block, (T, D)."""
        target = TRUNK.causal_lm
        num_read = len(text) - 1
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
        block = torch.tensor([[text[-1], *[self.mask] * (self.block_size - 1)]])
        positions = torch.arange(num_read + self.block_size)
        sees = SEES[self.form](positions[num_read:, None], positions, num_read)[None, None]
        model = reference(self.block_size, layer_types=MIXED)
        if self.kind == "dflash2":
            self._convolve(model)
        return model(
            noise_embeds=target.get_input_embeddings()(block),
            context_hidden_states=torch.cat([states[layer + 1] for layer in self.layers], dim=-1),
            position_ids=positions[None],
            attention_mask={FULL: torch.ones_like(sees), SLIDING: sees},
        ).last_hidden_state[0]

    def _convolve(self, model: Any) -> None:
        """Convolve what each attention and each MLP reads of the block, and what it returns."""
        for number, layer in enumerate(model.layers):
            for name, part in (("attention", layer.self_attn), ("mlp", layer.mlp)):
                own = (self.tensors[f"layers.{number}.{name}_conv.{rest}"] for rest in _CONVOLUTION)
                part.forward = _convolved(part.forward, *own)

    def _corrected(self, state_D: Tensor, before: int, memory_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits (V,) of a row after a token, and the recurrent state after it."""
        own = self.tensors
        logits = own["lm_head.weight"] @ state_D if self.chosen else TRUNK.causal_lm.lm_head(state_D)
        if self.corrects and self.is_spark:
            markov = {name.removeprefix("markov_head."): value for name, value in own.items()}
            read_R = markov["markov_w1.weight"][before]
            if self.kind == "gated":
                gate = markov["gate_proj.weight"] @ torch.cat([state_D, read_R]) + markov["gate_proj.bias"]
                read_R = torch.sigmoid(gate) * read_R
            if self.kind == "rnn":
                joint = markov["joint_proj.weight"] @ torch.cat([memory_R, read_R, state_D])
                gate, candidate, output = (joint + markov["joint_proj.bias"]).chunk(3)
                memory_R = torch.sigmoid(gate) * memory_R + (1 - torch.sigmoid(gate)) * torch.tanh(candidate)
                read_R = torch.tanh(output)
            logits = logits + markov["markov_w2.weight"] @ read_R
        if self.corrects and self.kind == "dflash2":
            selector = {name.removeprefix("candidate_selector."): value for name, value in own.items()}
            context_R = selector["predecessor_codebook"][before] * (selector["hidden_projection.weight"] @ state_D)
            scored = torch.full_like(logits, -torch.inf)
            for token in logits.argsort(descending=True)[:TOP].tolist():
                scored[token] = logits[token] + selector["successor_codebook"][token] @ context_R
            logits = scored
        if self.chosen:
            logits = torch.full((VOCAB_SIZE,), -torch.inf).index_copy(0, CHOSEN, logits)
        return logits, memory_R


_CONVOLUTION = ("base_kernel", "kernel_projection.weight")


def _convolved(part: Callable[..., Any], base: Tensor, projection: Tensor) -> Callable[..., Any]:
    """Return a part of a layer between two convolutions."""

    def forward(hidden_states: Tensor, **options: Any) -> Any:
        length = hidden_states.shape[1]
        deltas = (hidden_states @ projection.T).view(length, 2, TAPS, -1).repeat_interleave(GROUP, dim=-1)
        output = part(_convolution(hidden_states, base[0] + deltas[:, 0]), **options)
        after_TKD = base[1] + deltas[:, 1]
        if isinstance(output, tuple):
            return _convolution(output[0], after_TKD), output[1]
        return _convolution(output, after_TKD)

    return forward


def _convolution(hidden_1TD: Tensor, kernel_TKD: Tensor) -> Tensor:
    result = torch.zeros_like(hidden_1TD)
    for place in range(hidden_1TD.shape[1]):
        for back in range(min(TAPS, place + 1)):
            result[:, place] += hidden_1TD[:, place - back] * kernel_TKD[place, back]
    return result
