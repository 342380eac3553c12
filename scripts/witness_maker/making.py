"""Make, train and save a trunk and its head, with noise in the head so that some drafts are wrong.

Shapes: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PretrainedConfig

from mtp_train.checkpoints.artifact import Artifact
from mtp_train.checkpoints.draft_checkpoint import write_draft_checkpoint
from mtp_train.checkpoints.export import add_in_place
from mtp_train.checkpoints.files import SINGLE_FILE, Checkpoint, open_checkpoint, read_json
from mtp_train.checkpoints.native import trunk_tensors
from mtp_train.checkpoints.writing import write_json
from mtp_train.families import FAMILIES, Family
from mtp_train.families.kinds.assistant import GEMMA4
from mtp_train.heads.assistant import AssistantHead
from mtp_train.heads.build import fresh_plan, trained_head
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.head import Head
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk, load_trunk
from witness_maker.assistant import random_assistant, save_assistant
from witness_maker.block import make_block_drafter
from witness_maker.chain import CORRECTIONS, SMALL, TRAINED_DEPTHS, Chain, chained_loss, random_head, stir, train
from witness_maker.shapes import SHAPES, WitnessShape
from witness_maker.variants import beside_a_trunk, for_sglang
from witness_maker.words import WORDS, word_tokenizer

PROMPTS_FILE = "prompts.json"
NUM_PROMPTS, PROMPT_TOKENS = 12, 24
NOISE = 0.05
"""Probability that a text leaves its Markov chain at a token."""
MOST_RIGHT = 0.7
"""Upper limit of correct first drafts: noise is added above it, since engines must agree on wrong drafts too."""
SPOILING_STEP = 0.25
MOST_STEPS_OF_SPOILING = 40
MORE_THAN_SCORES = 2.0
"""A correction bias above any expert score, since scores are shares or probabilities."""


def make_witness(
    name: str,
    directory: Path,
    *,
    num_steps: int,
    seed: int,
    kind: str = "mtp",
    num_drafted: int | None = None,
    sglang: bool = False,
    sizes: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, float]:
    """Write a checkpoint of a family, with its head, a tokenizer and prompts for it.

    A head of another kind than ``mtp`` is written to ``draft``, as a draft model.

    Args:
        name: The family.
        directory: The output directory, without a checkpoint.
        num_steps: Training steps.
        seed: Seed of weights and texts.
        kind: Kind of the head.
        num_drafted: Size of the draft vocabulary of a head of another kind; None for all tokens.
        sglang: Whether SGLang's CPU kernels must be able to run it.
        sizes: Fields of the text config to change.

    Returns:
        The last loss, the noise in the head, and its share of correct first drafts with that noise.
    """
    shape = SHAPES[name] if kind in ("mtp", "assistant") else beside_a_trunk(SHAPES[name], kind)
    if sglang:
        shape = for_sglang(shape)
    shape = replace(shape, fields={**shape.fields, **sizes})
    family = next(family for family in (*FAMILIES, GEMMA4) if family.name == name)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    trunk = random_trunk(family, shape)
    head = random_assistant(trunk) if kind == "assistant" else random_head(trunk, shape.num_modules, kind)
    trunk.show_to(head)
    for module in (trunk, head):
        stir(module, generator)
        if shape.always_chosen:
            _choose_always(module, shape.always_chosen, generator)
    chain = Chain.one_cycle(len(WORDS), NOISE, generator)
    loss = train([trunk, head], partial(chained_loss, trunk, head), chain, num_steps, generator)
    if not head.reads_keys:
        _give_lm_heads(trunk, head, shape.num_modules, generator)
    spoiling, right = spoil(trunk, head, chain, generator)
    trunk.causal_lm.to(torch.bfloat16).save_pretrained(directory)
    if isinstance(head, AssistantHead):
        save_assistant(head, directory / "draft")
    else:
        vocab_R = None if num_drafted is None else torch.randperm(len(WORDS), generator=generator)[:num_drafted]
        save_head(family, head, shape, directory, vocab_R)
    word_tokenizer().save_pretrained(directory)
    write_json(directory / PROMPTS_FILE, chain.draw(NUM_PROMPTS, PROMPT_TOKENS, generator).tolist())
    return {"loss": loss, "spoiling": spoiling, "right": right}


def random_trunk(family: Family, shape: WitnessShape) -> Trunk:
    """Return an untrained trunk in fp32."""
    config = _config(family, shape)
    if family.trunk.stand_in is not None:
        model: Any = family.trunk.stand_in.model_class()(config)
    else:
        auto = AutoModelForImageTextToText if family.trunk.only_with_vision else AutoModelForCausalLM
        model = auto.from_config(config, dtype=torch.float32)
    return Trunk(model, family).eval()


def _config(family: Family, shape: WitnessShape) -> PretrainedConfig:
    if family.trunk.stand_in is not None:
        return CONFIG_MAPPING[family.trunk.stand_in.model_type](**shape.fields)
    kind = shape.config_type or family.model_types[0]
    fields = shape.fields if shape.wrapper is None else {"text_config": dict(shape.fields), **shape.wrapper}
    config: PretrainedConfig = AutoConfig.for_model(kind, **fields)
    return config


def _choose_always(module: nn.Module, number: int, generator: torch.Generator) -> None:
    """Set the correction biases so that all tokens use the same experts, of one half since routers may use groups."""
    for name, bias in [*module.named_parameters(), *module.named_buffers()]:
        if name.endswith(CORRECTIONS):
            bias_E = bias.data.view(-1)
            half = len(bias_E) // 2
            start = half * int(torch.randint(2, (), generator=generator))
            bias_E[start + torch.randperm(half, generator=generator)[:number]] += MORE_THAN_SCORES


def _give_lm_heads(trunk: Trunk, head: Head, num_modules: int, generator: torch.Generator) -> None:
    """Set a head's own output matrices, if it has any, to the trunk's with a little noise."""
    for weight_VD in head.own_lm_heads(num_modules) or []:
        weight_VD.data.copy_(trunk.lm_head_VD).add_(_noise_like(weight_VD, generator), alpha=SMALL)


def spoil(trunk: Trunk, head: Head, chain: Chain, generator: torch.Generator) -> tuple[float, float]:
    """Increase the noise in a head's matrices until its share of correct first drafts is at most ``MOST_RIGHT``.

    Returns:
        The noise as a multiple of each matrix's standard deviation, and the share of correct first drafts.
    """
    tokens_BT = chain.draw(16, 64, generator)
    matrices = {name: value for name, value in head.named_parameters() if value.ndim > 1 and "lm_head" not in name}
    trained = {name: value.clone() for name, value in matrices.items()}
    noise = {name: _noise_like(value, generator) for name, value in matrices.items()}
    for step in range(MOST_STEPS_OF_SPOILING):
        for name, value in matrices.items():
            value.data.copy_(trained[name]).add_(noise[name], alpha=step * SPOILING_STEP)
        right = share_right(trunk, head, chain, tokens_BT)
        if right <= MOST_RIGHT:
            break
    return step * SPOILING_STEP, right


def _noise_like(value: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(value.shape, generator=generator) * value.std()


@torch.no_grad()
def share_right(trunk: Trunk, head: Head, chain: Chain, tokens_BT: Tensor) -> float:
    """Return the share of first drafts that equal the successor, in the chain, of the token that the head reads."""
    hidden_BTD = trunk.head_input(trunk.hidden(tokens_BT), head.convention)
    (state_BTD,) = head.unroll(
        hidden_BTD,
        tokens_BT,
        head.embedding(trunk.embed),
        num_depths=1,
        positions_BT=torch.arange(tokens_BT.shape[1]).expand_as(tokens_BT),
        document_BT=torch.zeros_like(tokens_BT),
    )
    drafted_BT = head.project(1, state_BTD, trunk.project).argmax(dim=-1)[:, :-1]
    return (drafted_BT == chain.successor_V[tokens_BT[:, 1:]]).float().mean().item()


def save_head(family: Family, head: MtpHead, shape: WitnessShape, directory: Path, vocab_R: Tensor | None) -> None:
    """Bring a saved trunk into the layout of a release, and write its head into it, or beside it if of another kind."""
    _set_released(directory / "config.json", shape.released)
    if family.keys.saved_names:
        _rename_as_released(directory)
    for name, text in shape.code.items():
        (directory / name).write_text(text, encoding="utf-8")
    checkpoint = open_checkpoint(directory)
    artifact = _artifact(checkpoint, head, shape, vocab_R)
    if not artifact.family.kind.has_file:
        add_in_place(checkpoint, artifact.head)
    else:
        write_draft_checkpoint(checkpoint, artifact, head.config, directory / "draft")


def _rename_as_released(directory: Path) -> None:
    """Rename a trunk's tensors from transformers' names to the names of its release, which have no prefix."""
    checkpoint, tensors = open_checkpoint(directory), load_file(directory / SINGLE_FILE)
    layout = checkpoint.layout
    names = {**trunk_tensors(checkpoint), layout.lm_head_key: layout.lm_head_key}
    save_file({name: tensors[key] for name, key in names.items()}, directory / SINGLE_FILE, metadata={"format": "pt"})


def _artifact(checkpoint: Checkpoint, head: MtpHead, shape: WitnessShape, vocab_R: Tensor | None) -> Artifact:
    kind, text_config = head.family.kind, text_config_of(checkpoint)
    plan = fresh_plan(checkpoint, text_config, "auto", seed=0, kind=kind.name, num_modules=shape.num_modules)
    native = trained_head(plan, head.to(torch.bfloat16).state_dict())
    layout, modules = plan.layout, range(plan.num_modules)
    # Releases repeat these tensors of the trunk.
    shared = [
        key.format(trunk=layout.trunk_prefix, layer=layout.num_hidden_layers + module, module=module)
        for key in head.family.keys.shared
        for module in modules
    ]
    return Artifact(
        layout=layout,
        num_modules=plan.num_modules,
        num_depths=TRAINED_DEPTHS,
        convention="auto",
        head=replace(native, shared_keys=tuple(shared)),
        notes={},
        draft_vocab=None if vocab_R is None else vocab_R.sort().values.int(),
    )


def add_head(directory: Path, kind: str, out: Path, *, num_steps: int, seed: int) -> float:
    """Train another head on the trunk of a witness, which stays as it is, and write its draft model.

    Args:
        directory: The witness.
        kind: Kind of the head: one that is trained here, or ``dflash``.
        out: The new directory of the draft model.
        num_steps: Training steps.
        seed: Seed of weights and texts.

    Returns:
        The last loss.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    checkpoint = open_checkpoint(directory)
    trunk = load_trunk(checkpoint, dtype=torch.float32)
    chain = Chain.of_trunk(trunk, NOISE)
    if kind == "dflash":
        return make_block_drafter(checkpoint, trunk, out, chain, num_steps, generator)
    shape = beside_a_trunk(SHAPES[checkpoint.family.name], kind)
    head = random_head(trunk, shape.num_modules, kind)
    trunk.show_to(head)
    stir(head, generator)
    loss = train([head], partial(chained_loss, trunk, head), chain, num_steps, generator)
    _give_lm_heads(trunk, head, shape.num_modules, generator)
    spoil(trunk, head, chain, generator)
    write_draft_checkpoint(checkpoint, _artifact(checkpoint, head, shape, None), head.config, out)
    return loss


def _set_released(path: Path, released: Mapping[str, Any]) -> None:
    config = read_json(path)
    text_config = config.get("text_config", config)
    text_config.update(released)
    for name in (name for name, value in released.items() if value is None):
        del text_config[name]
    write_json(path, config)
