"""The models to benchmark: a checkpoint with a head, or a model of random weights in a given shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from mtp_inference.bench.chain import Chain, train
from mtp_inference.drafters.head_drafter import HeadDrafting
from mtp_inference.opening import OWN, head_of_run, open_model
from mtp_train.errors import CheckpointError
from mtp_train.families import FAMILIES, Family, of_kind
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from mtp_train.weights.files import Checkpoint

EMBEDDING_SCALE = 1600.0
"""Scales transformers' initial standard deviation of 0.02 to 32, more than 32 random layers add to it."""
CHAIN_NOISE = 0.05


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, as config fields."""

    family: str
    fields: Mapping[str, Any]
    is_tiny: bool = True


_TINY = {
    "vocab_size": 512,
    "hidden_size": 96,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "tie_word_embeddings": False,
}
_SMALL = {
    "vocab_size": 32_768,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": False,
}
SHAPES: Mapping[str, Shape] = MappingProxyType(
    {
        "9b": Shape(
            "qwen3_5",
            {
                "vocab_size": 248_320,
                "hidden_size": 4096,
                "intermediate_size": 12_288,
                # Every fourth layer is full attention, the others are recurrent: the config's own pattern.
                "num_hidden_layers": 32,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "tie_word_embeddings": False,
            },
            is_tiny=False,
        ),
        "570m": Shape(
            "qwen3_5",
            {
                "vocab_size": 65_536,
                "hidden_size": 1024,
                "intermediate_size": 3584,
                "num_hidden_layers": 24,
                "num_attention_heads": 8,
                "num_key_value_heads": 2,
                "head_dim": 128,
                "linear_num_key_heads": 8,
                "linear_num_value_heads": 16,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "tie_word_embeddings": False,
            },
            is_tiny=False,
        ),
        "64m": Shape("qwen3_5", _SMALL | {"intermediate_size": 1536}, is_tiny=False),
        # Eight of the layers of Qwen3.5 35B-A3B.
        "7b-moe": Shape(
            "qwen3_5_moe",
            {
                "vocab_size": 248_320,
                "hidden_size": 2048,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
                "num_hidden_layers": 8,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "tie_word_embeddings": False,
            },
            is_tiny=False,
        ),
        "245m-moe": Shape(
            "qwen3_5_moe",
            _SMALL
            | {
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 128,
                "shared_expert_intermediate_size": 128,
            },
            is_tiny=False,
        ),
        "tiny-qwen": Shape(
            "qwen3_5",
            _TINY
            | {
                "num_hidden_layers": 4,
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 24,
                "linear_value_head_dim": 24,
            },
        ),
        "tiny-glm": Shape(
            "glm4_moe",
            _TINY
            | {
                "num_hidden_layers": 4,
                "moe_intermediate_size": 64,
                "n_routed_experts": 8,
                "num_experts_per_tok": 2,
                "first_k_dense_replace": 1,
                "num_nextn_predict_layers": 1,
            },
        ),
    }
)


@dataclass(frozen=True)
class Subject:
    """A trunk, its head, and a source of prompts."""

    trunk: Trunk
    head: MtpHead | None
    """None for plain decoding."""
    text: Chain
    """Source of prompts if the user gives none."""
    checkpoint: Checkpoint | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts for the settings of the report."""
    draft_vocab: Tensor | None = None
    """int32, token ids that the head may draft; None for all."""
    fuses: bool = True
    """Whether rounds run in fused kernels on devices that have them."""

    @property
    def drafting(self) -> HeadDrafting | None:
        """The maker of drafters; None without a head."""
        return None if self.head is None else HeadDrafting(self.head, self.draft_vocab)


def checkpoint_subject(
    name: str,
    head: str | None,
    *,
    adapter: str | None,
    dtype: torch.dtype | None,
    device: torch.device,
    drafts: bool,
) -> Subject:
    """Load a checkpoint and a head.

    Args:
        name: A directory, a hub id or ``demo:base``.
        head: A head directory, a run directory with a head, or a checkpoint with a head; None for the checkpoint's own.
        adapter: A peft adapter to apply to the trunk, unmerged.
        dtype: None for fp32 on a CPU and the stored dtype elsewhere.
        device: Device of trunk and head.
        drafts: Whether to load a head.

    Raises:
        CheckpointError: The checkpoint or the head is not complete, or they do not fit each other.
    """
    drafter = OWN if head is None else head_of_run(head)
    model = open_model(name, drafter if drafts else None, adapter=adapter)
    plan = model.plan
    if drafts and plan is None:
        raise CheckpointError(f"--head: {head} has no MTP head; expected a head to measure. Name a head directory.")
    # Decoding in fp32 is exact: take it on a CPU even if it does not fit in memory.
    trunk = model.load_trunk(device, torch.float32 if dtype is None and device.type == "cpu" else dtype)
    _, built = model.load_drafting(trunk)
    draft_vocab = None if plan is None else plan.draft_vocab
    facts = {
        "model": name,
        "adapter": adapter,
        "head": (head or "its own") if plan else None,
        "draft_vocab": None if draft_vocab is None else len(draft_vocab),
    }
    return Subject(trunk, built, Chain.random_text(trunk.lm_head_VD.shape[0]), model.checkpoint, facts, draft_vocab)


def shape_subject(name: str, *, dtype: torch.dtype | None, device: torch.device, seed: int) -> Subject:
    """Build a model of random weights whose greedy text is simple: token v is followed by v + 1.

    Logits of a random model are so close together that bf16 rounding gives a verify window another text than plain
    decoding. Here the next token wins by a wide margin, at the same cost: the embedding outweighs the layers' output,
    and the output matrix is the embedding shifted by one row.

    Args:
        name: A key of ``SHAPES``.
        dtype: None for fp32 on a CPU and bf16 elsewhere.
        device: Device of the weights.
        seed: Seed of the weights.
    """
    shape = SHAPES[name]
    if dtype is None:
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    torch.manual_seed(seed)
    trunk = _random_trunk(shape, dtype, device)
    head = random_head(trunk)
    with torch.no_grad():
        embedding_VD = trunk.causal_lm.get_input_embeddings().weight
        trunk.lm_head_VD.copy_(embedding_VD.roll(1, dims=0))
        embedding_VD.mul_(EMBEDDING_SCALE)
    trunk.requires_grad_(False)
    head.requires_grad_(False)
    facts = {"model": f"{name}, random weights", "head": "random weights"}
    return Subject(trunk, head, Chain.random_text(trunk.lm_head_VD.shape[0]), None, facts)


def trained_subject(
    name: str, num_steps: int, *, device: torch.device, seed: int, on_step: Callable[[], None]
) -> Subject:
    """Build a tiny fp32 model and train it, with its head, on a chain, so that most of its drafts are right."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    trunk = _random_trunk(SHAPES[name], torch.float32, device)
    head = random_head(trunk)
    chain = Chain.one_cycle(trunk.lm_head_VD.shape[0], CHAIN_NOISE, generator)
    loss = train(trunk, head, chain, num_steps, generator, on_step)
    facts = {"model": f"{name}, trained for {num_steps} steps", "head": "trained with it", "last_loss": round(loss, 3)}
    return Subject(trunk, head, chain, None, facts)


def _random_trunk(shape: Shape, dtype: torch.dtype, device: torch.device) -> Trunk:
    family: Family = next(family for family in FAMILIES if family.name == shape.family)
    config = AutoConfig.for_model(family.model_types[0], **shape.fields)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return Trunk(model, family).eval()


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
