"""Tiny random models of every family, built in memory.

Weights are large enough that greedy decoding does not fall into a loop, and recurrent states forget slowly enough that
a wrong state shows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from mtp_train.data.pack import PackedBatch
from mtp_train.families import FAMILIES, Family, of_kind
from mtp_train.heads.head import Head
from mtp_train.heads.module import Chaining, MtpHead
from mtp_train.train.packed_rows import AlignedRows, aligned_rows
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.states import isolated_hidden
from tiny_configs import SLIDING_WINDOW as SLIDING_WINDOW, VOCAB_SIZE as VOCAB_SIZE, tiny_config

IS_OLD = Version(transformers.__version__) < Version("5.23")
"""Whether transformers is older than the one that most figures of the tests are of."""


def _runs(family: Family) -> bool:
    needed = family.trunk.needs_transformers or "0"
    return family.layer is not None and Version(transformers.__version__) >= Version(needed)


ALL_FAMILIES = tuple(family.name for family in FAMILIES if _runs(family))
"""Those whose head runs with the transformers that is installed."""
FAMILY_NAMES = ("qwen3_5", "glm4_moe")
"""A head beside the trunk and one after it: enough for what no record can change."""
WEIGHT_STD = 0.3
MANY_EXPERTS = 12
"""More than ten, so that the order of their names (0, 1, 10, 11, 2) is not the order of their numbers."""
CACHE_KINDS = {
    "full": "glm4_moe",
    "recurrent": "qwen3_5",
    "sliding": "mistral",
    "mixed": "qwen2",
    "latent": "deepseek_v3",
    "indexed": "deepseek_v32",
    "channels": "bailing_hybrid",
    "sinks": "mimo_v2_flash",
    "mamba": "nemotron_h",
    "blocks": "minimax_m3",
    "compressed": "deepseek_v4",
    "convolved": "inkling",
    "pools": "glm5_next",
    "ngrams": "qwen4_exp",
}
CACHE_KINDS = {kind: name for kind, name in CACHE_KINDS.items() if name in ALL_FAMILIES}
"""What a trunk keeps, and the name of a tiny trunk that keeps it."""


def tiny_trunk(
    name: str,
    seed: int = 0,
    tied: bool = False,
    vocab_size: int = VOCAB_SIZE,
    num_layers: int | None = None,
    width: int | None = None,
    num_experts: int | None = None,
) -> Trunk:
    """Return a trunk of a few thousand parameters, fp32 on CPU, frozen and in eval mode."""
    model = tiny_model(name, tiny_config(name, tied, vocab_size, num_layers, width, num_experts), seed)
    return Trunk(model.requires_grad_(False).eval(), family_of(name))


def tiny_model(name: str, config: PretrainedConfig, seed: int = 0) -> Any:
    """Return the model of a tiny trunk as transformers makes it, in training mode."""
    family = family_of(name)
    if family.trunk.stand_in is not None:
        model = family.trunk.stand_in.model_class()(config.get_text_config())
    else:
        auto = AutoModelForImageTextToText if family.trunk.only_with_vision else AutoModelForCausalLM
        model = auto.from_config(config)
    _randomize(model, seed)
    model.tie_weights()
    return model


def nearly_tiny(name: str, seed: int = 0, vocab_size: int = VOCAB_SIZE, noise: float = 0.1) -> Trunk:
    """Return a model whose greedy text mostly equals the tiny trunk's of a name."""
    model = tiny_trunk(name, seed, vocab_size=vocab_size)
    noise_VD = torch.randn(model.lm_head_VD.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model.lm_head_VD.add_(noise * noise_VD)
    return model


def random_tokens(num_tokens: int, num_rows: int = 1, seed: int = 3) -> Tensor:
    """Return rows of random tokens."""
    return torch.randint(VOCAB_SIZE, (num_rows, num_tokens), generator=torch.Generator().manual_seed(seed))


def rows_on(trunk: Trunk, head: Head, batch: PackedBatch, num_depths: int, **options: Any) -> AlignedRows:
    """Return a head's aligned rows on the states that a trunk computes."""
    trunk.show_to(head)
    hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
    return aligned_rows(trunk, head, batch, hidden_BTD, num_depths, **options)


def tiny_head(trunk: Trunk, seed: int = 0, num_modules: int | None = None) -> MtpHead:
    """Return a random head for a tiny trunk, in eval mode, of as many modules as its family's releases have."""
    num_modules = num_modules or num_released_modules(trunk)
    head = MtpHead(trunk.family, trunk.config, num_modules=num_modules, convention=trunk.family.wiring.default)
    _randomize(head, seed + 1000)
    for weight_VD in head.own_lm_heads(num_modules) or []:
        # As releases have it: close to the trunk's.
        weight_VD.data.mul_(0.1).add_(trunk.lm_head_VD)
    if trunk.family.wiring.own_embedding:
        head.get_parameter("blocks.0.embedding.weight").data.mul_(0.1).add_(
            trunk.causal_lm.get_input_embeddings().weight
        )
    return head.eval()


def draft_head(trunk: Trunk, kind: str, num_modules: int = 1) -> MtpHead:
    """Return a random head of another kind for a tiny trunk, in eval mode."""
    family = of_kind(trunk.family, kind)
    head = MtpHead(family, trunk.config, num_modules=num_modules, convention=family.wiring.default)
    _randomize(head, 1000)
    return head.eval()


def num_released_modules(trunk: Trunk) -> int:
    """Return the number of modules in a tiny checkpoint with a head: its config's, else one."""
    config = trunk.config.to_dict()
    # A wrapper's section is told to the text model under this name.
    return trunk.family.declared_modules(config) or config.get("num_mtp_layers") or 1


def chained_head(trunk: Trunk, num_modules: int, drafts_only: bool = False) -> MtpHead:
    """Return a random head with a module for each depth, in eval mode; ``drafts_only``: no rows over a text chain."""
    head = tiny_head(trunk, num_modules=num_modules)
    head.convention = replace(head.convention, prefix="trunk" if drafts_only else "chained")
    return head


CHAININGS: tuple[Chaining, ...] = ("recursive", "chained", "chained_drafts")


def head_of(trunk: Trunk, chaining: Chaining, num_modules: int) -> MtpHead:
    """Return a random head whose depths go on from one another in this way; of one module where that is all it has."""
    if chaining == "recursive":
        return tiny_head(trunk, num_modules=1)
    return chained_head(trunk, num_modules, drafts_only=chaining == "chained_drafts")


def family_of(name: str) -> Family:
    """Return the record of a family."""
    return next(family for family in FAMILIES if family.name == name)


def _randomize(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(noise - 3)
            elif parameter.ndim > 1:
                parameter.copy_(WEIGHT_STD * noise)
            elif name.endswith(("bias", "sinks", "base", "scale")):
                # These start at random, or as whatever the memory held.
                parameter.copy_(0.1 * noise + name.endswith("scale"))
            else:
                parameter.add_(0.1 * noise)
        for name, buffer in module.named_buffers():
            if name.endswith("tid2eid"):
                # Which experts a token goes to: different ones.
                first_V1 = torch.randint(4, (len(buffer), 1), generator=generator)
                buffer.copy_((first_V1 + torch.arange(buffer.shape[1])) % 4)
