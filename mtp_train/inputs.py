"""Everything a run reads, opened and checked before anything is written or trained."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rich.progress import Progress
from transformers import PretrainedConfig

from mtp_train.data.groups import join_near_duplicates
from mtp_train.data.mixture import mix
from mtp_train.data.prompts import Prompt, build_prompts, choose_evenly, choose_prompts, continuation_prompts
from mtp_train.data.records import PlainText, Record
from mtp_train.data.regenerated import RESPONSE_ROOM_TOKENS
from mtp_train.data.sources import load_records
from mtp_train.data.split import split_by_group
from mtp_train.data.tokenize import Document, tokenize_records
from mtp_train.demo import GROUP_FIELD, home_source, resolve
from mtp_train.errors import CheckpointError, DataError, RecipeError
from mtp_train.exporting import require_exportable
from mtp_train.families import Convention, Family
from mtp_train.heads.attach import HeadPlan, graft_plan
from mtp_train.heads.diagnose import diagnose_head, stored_dtype, text_config_of
from mtp_train.heads.flex import why_dense
from mtp_train.heads.fresh import fresh_plan
from mtp_train.heads.lora import require_lora_targets
from mtp_train.heads.offload import require_offload
from mtp_train.heads.precision import held_dtype
from mtp_train.heads.quantization import require_bitsandbytes, require_quantizable
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.recipe import Recipe
from mtp_train.serving import served_settings
from mtp_train.train.plan import Plan, make_plan
from mtp_train.weights.adapter import (
    ADAPTER_CONFIG_FILE,
    is_adapter,
    locate_adapter,
    merge_command,
)
from mtp_train.weights.artifact import HEAD_CONFIG_FILE
from mtp_train.weights.files import (
    TORCH_DTYPES,
    Checkpoint,
    locate_checkpoint,
    open_checkpoint,
    read_json,
)
from mtp_train.weights.finite import require_finite_checkpoint
from mtp_train.weights.identity import Contents

HOME_PROMPTS = 12
"""Most prompts that the vanilla model decodes of its own kind, each of another group: it writes code up to the limit,
which takes longer than all other arms together."""


@dataclass(frozen=True)
class Inputs:
    """A run's checked inputs."""

    finetune: Checkpoint
    base: Checkpoint | None
    adapter: Path | None
    plan: Plan
    head_plan: HeadPlan
    tokenizer: Any
    eos_ids: frozenset[int]
    documents: Sequence[Document]
    """What to train on; empty where the trunk is to write it."""
    prompts: Sequence[Prompt]
    """What the trunk is to answer; empty where the sources' own responses are trained on."""
    held_out: Sequence[Prompt]
    """Evaluation prompts; none shares its group with anything trained on."""
    home: Sequence[Prompt] = ()
    """What the vanilla model decodes instead, text of its own kind; empty where it decodes the held-out prompts."""
    contents: Mapping[str, Contents] = field(default_factory=dict)
    """By recipe field, the identity of what was read, once the run directory is claimed."""


def open_location(location: str) -> Checkpoint:
    """Open a checkpoint given as a path, a hub id or ``demo:NAME``.

    Raises:
        CheckpointError: It is none; an adapter is named as one.
    """
    path = locate_checkpoint(resolve(location))
    refuse_adapter(path, location)
    return open_checkpoint(path)


def is_head_directory(path: Path) -> bool:
    """Whether a directory holds a head of ours, and no checkpoint."""
    return (path / HEAD_CONFIG_FILE).is_file()


def refuse_adapter(path: Path, location: str) -> None:
    """Raise a CheckpointError where an adapter stands in the place of a checkpoint."""
    if not is_adapter(path):
        return
    config = read_json(path / ADAPTER_CONFIG_FILE)
    base = config.get("base_model_name_or_path") or "BASE"
    raise CheckpointError(
        f"{location}: a peft adapter ({config.get('peft_type')}) of {base}, without a model; expected a checkpoint. "
        f"Run '{merge_command(str(base), location)}', or train on it unmerged with model.trunk={base} "
        f"model.adapter={location}."
    )


def gather_inputs(recipe: Recipe, world_size: int, progress: Progress) -> Inputs:
    """Open and check everything a run reads. Writes nothing, loads no trunk.

    Raises:
        MtpError: Something does not fit; the message says what.
    """
    plan = make_plan(recipe, world_size)
    finetune = open_location(recipe.model.trunk)
    base = open_location(recipe.model.head_from) if recipe.model.head_from else None
    # Raises where the head cannot be run.
    _ = finetune.family.classes
    head_plan = plan_head(recipe, finetune, base)
    convention = head_plan.family.convention(head_plan.convention)
    require_unroll(recipe, convention, head_plan.num_modules)
    text_config = text_config_of(finetune, trust_remote_code=recipe.model.trust_remote_code)
    require_attention(recipe, head_plan.family, text_config, head_plan.num_modules)
    for checkpoint in [finetune] if base is None or "vanilla" not in recipe.evaluate.arms else [finetune, base]:
        _require_packable(recipe, checkpoint, world_size)
    if recipe.head.lora is not None:
        require_lora_targets(recipe.head.lora, head_plan.family, text_config, head_plan.num_modules, convention)
    require_arms(recipe, finetune)
    require_rows(recipe)
    require_draft_vocab(recipe, text_config.vocab_size)
    # Raises where the trunk cannot be measured at the settings it is served with: before training, not after.
    served_settings(recipe.evaluate, finetune)
    tokenizer = load_tokenizer(finetune, recipe.model.trust_remote_code)
    train_records, held_out_records = split_records(recipe, progress)
    held_out = evaluation_prompts(recipe, held_out_records, tokenizer)
    documents: Sequence[Document] = ()
    prompts: Sequence[Prompt] = ()
    if recipe.regenerates:
        prompts = prompts_to_answer(recipe, train_records, tokenizer)
    else:
        documents, _ = tokenize_records(train_records, tokenizer, recipe.data.seq_len_tokens)
    adapter = locate_adapter(recipe.model.adapter, recipe.model.trunk) if recipe.model.adapter else None
    if recipe.export.enabled:
        require_exportable(finetune, recipe.head.kind, adapter)
    for checkpoint in [finetune] if base is None or "vanilla" not in recipe.evaluate.arms else [finetune, base]:
        require_whole_trunk(checkpoint, trust_remote_code=recipe.model.trust_remote_code)
    for checkpoint in [finetune] if base is None else [finetune, base]:
        require_finite_checkpoint(checkpoint, progress)
    home = home_prompts(recipe, tokenizer)
    # Last: a refusal is one message.
    if PartialState().is_main_process:
        progress.console.print(split_sentence(train_records, held_out_records, held_out))
    return Inputs(
        finetune=finetune,
        base=base,
        adapter=adapter,
        plan=plan,
        head_plan=head_plan,
        tokenizer=tokenizer,
        eos_ids=eos_token_ids(finetune, tokenizer),
        documents=documents,
        prompts=prompts,
        held_out=held_out,
        home=home,
    )


def _require_packable(recipe: Recipe, checkpoint: Checkpoint, world_size: int) -> None:
    if recipe.model.quantization is not None:
        require_quantizable(recipe.model.quantization, checkpoint.config, where=checkpoint.path)
        require_bitsandbytes(recipe.model.quantization)
    if recipe.model.offload is not None:
        require_offload(recipe.model.offload, world_size, checkpoint.config, where=checkpoint.path)


def plan_head(recipe: Recipe, finetune: Checkpoint, base: Checkpoint | None) -> HeadPlan:
    """Say what the head starts from and how it is written."""
    convention = recipe.head.convention
    if recipe.head.init in ("copy_last_layer", "random"):
        text_config = text_config_of(finetune, trust_remote_code=recipe.model.trust_remote_code)
        kind, count = recipe.head.kind, recipe.fresh_modules
        return fresh_plan(
            finetune, text_config, convention, seed=recipe.seed, start=recipe.head.init, kind=kind, num_modules=count
        )
    # A graft without a base is refused when the recipe is read.
    donor = finetune if recipe.head.init == "native" or base is None else base
    return graft_plan(finetune, donor, convention)


def require_unroll(recipe: Recipe, convention: Convention, num_modules: int) -> None:
    """Check that the depths of the head can see one another as the recipe says.

    Raises:
        RecipeError: They cannot.
    """
    if recipe.objective.unroll == "fastmtp" and num_modules > 1 and convention.modules == "each":
        raise RecipeError(
            [
                f"objective.unroll: 'fastmtp' with a head of {num_modules} chained modules, whose depths see rows "
                "of their own anyway; expected exact. Write objective.unroll: exact."
            ]
        )


def require_attention(recipe: Recipe, family: Family, text_config: PretrainedConfig, num_modules: int) -> None:
    """Check that the head can be unrolled without masks where the recipe says so.

    Raises:
        RecipeError: It cannot.
    """
    if recipe.train.attention == "dense":
        return
    reason = why_dense(family, family.head_layer_config(text_config, num_modules))
    if reason is not None:
        raise RecipeError(
            [
                f"train.attention: 'flex' with a head of {family.title}, {reason}; expected dense. Write "
                "train.attention: dense."
            ]
        )


def require_arms(recipe: Recipe, finetune: Checkpoint) -> None:
    """Check that the fine-tune holds a head where the recipe wants to measure it.

    Raises:
        CheckpointError: ``native`` is asked for and there is none.
    """
    if "native" in recipe.evaluate.arms and not diagnose_head(finetune).complete:
        raise CheckpointError(
            f"evaluate.arms: native, but {finetune.path} {diagnose_head(finetune).describe()}; expected a head of its "
            "own. Take native out of evaluate.arms."
        )


def require_draft_vocab(recipe: Recipe, vocab_size: int) -> None:
    """Check that the tokens that may be drafted are a part of the vocabulary.

    Raises:
        RecipeError: They are all of it, or more.
    """
    asked = recipe.head.draft_vocab
    if asked is not None and asked >= vocab_size:
        raise RecipeError(
            [f"head.draft_vocab: {asked}; expected fewer than the trunk's {vocab_size} tokens. Write null for all."]
        )


def require_rows(recipe: Recipe) -> None:
    """Check that what the recipe has losses computed in is there, for the device that trains.

    Raises:
        RecipeError: It is not.
    """
    if recipe.objective.rows == "torch":
        return
    if importlib.util.find_spec("triton") is None:
        raise RecipeError(
            [
                "objective.rows: 'triton', which is not installed; expected it, as torch for GPUs on Linux brings it. "
                "Install such a torch, or write objective.rows: torch."
            ]
        )
    from mtp_train.losses_triton import kernel_device

    found, device = kernel_device(), PartialState().device.type
    if found != device:
        raise RecipeError(
            [
                f"objective.rows: 'triton', whose kernels run on {found or 'no device'} here, while training runs on "
                f"{device}; expected a GPU for both. Train on one, or write objective.rows: torch."
            ]
        )


def load_tokenizer(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    """Load the tokenizer beside the weights.

    Raises:
        CheckpointError: There is none that transformers can load.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(checkpoint.path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{checkpoint.path}: no tokenizer that loads ({error}); expected tokenizer files beside the weights. Copy "
            "them from the base."
        ) from None


def eos_token_ids(checkpoint: Checkpoint, tokenizer: Any) -> frozenset[int]:
    """Return every token that ends a response: the generation config's, else the config's, and the tokenizer's."""
    from transformers import GenerationConfig

    found: set[int] = set()
    try:
        declared = GenerationConfig.from_pretrained(checkpoint.path).eos_token_id
    except OSError:
        declared = checkpoint.text_config.get("eos_token_id")
    found.update([declared] if isinstance(declared, int) else declared or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return frozenset(found)


def split_records(recipe: Recipe, progress: Progress | None = None) -> tuple[list[Record], list[Record]]:
    """Return the records to train on and those held out. No group is on both sides.

    Raises:
        DataError: A source cannot be read, or a side would be empty.
    """
    return split_by_group(read_records(recipe, progress), recipe.data.holdout, recipe.seed)


def split_sentence(training: Sequence[Record], held_out: Sequence[Record], prompts: Sequence[Prompt]) -> str:
    """Say how many groups are on each side, and how many the evaluation prompts come from."""
    sides = [f"{len(side)} records in {len({one.group for one in side})} groups" for side in (training, held_out)]
    chosen = len({prompt.group for prompt in prompts})
    return (
        f"data: training on {sides[0]}, {sides[1]} held out; evaluating on {len(prompts)} prompts of {chosen} groups."
    )


def read_records(recipe: Recipe, progress: Progress | None = None) -> list[Record]:
    """Read every source of the recipe, in its order, and mix them where they have weights.

    Without a group field, records with near-duplicate prompts share a group.
    """
    sources = [
        load_records(
            resolve(source.path),
            config=source.config,
            split=source.split,
            format=source.format,
            group_field=recipe.data.group_field,
            name=f"data.sources.{number} ({source.path})",
            max_records=recipe.data.max_documents,
            streaming=source.streaming,
        )
        for number, source in enumerate(recipe.data.sources)
    ]
    weights = [source.weight for source in recipe.data.sources if source.weight is not None]
    records = mix(sources, weights, recipe.seed) if weights else [record for some in sources for record in some]
    if recipe.data.group_field is not None:
        return records
    if progress is None:
        return join_near_duplicates(records)
    task = progress.add_task("looking for near-duplicate prompts", total=len({record.group for record in records}))
    joined = join_near_duplicates(records, lambda count: progress.advance(task, count))
    progress.remove_task(task)
    return joined


def prompts_to_answer(recipe: Recipe, records: Sequence[Record], tokenizer: Any) -> list[Prompt]:
    """Return the prompts that the trunk answers before training.

    Raises:
        DataError: A record has no prompt, or no prompt leaves room for a response.
    """
    prompts = build_prompts(records, tokenizer)
    if recipe.data.regenerate is not None and recipe.data.regenerate.max_prompts is not None:
        prompts = choose_prompts(prompts, recipe.data.regenerate.max_prompts, recipe.seed)
    needed = min(len(prompt.prompt_ids) for prompt in prompts) + RESPONSE_ROOM_TOKENS
    if needed > recipe.data.seq_len_tokens:
        raise DataError(
            f"data.seq_len_tokens: {recipe.data.seq_len_tokens} leaves no room to answer any of {len(prompts)} "
            f"prompts; expected at least {needed}. Raise it, or use shorter prompts."
        )
    return prompts


def evaluation_prompts(recipe: Recipe, records: Sequence[Record], tokenizer: Any) -> list[Prompt]:
    """Return the held-out prompts that every arm decodes, as many from each group as there can be.

    Raises:
        DataError: There is none.
    """
    prompts = choose_evenly(prompts_of(records, tokenizer), recipe.evaluate.prompts, recipe.seed)
    if not prompts:
        raise DataError(
            f"data.holdout: {recipe.data.holdout} holds out {len(records)} texts, none of them long enough to "
            "continue; expected at least one of two tokens. Hold out more, or use longer texts."
        )
    return prompts


def home_prompts(recipe: Recipe, tokenizer: Any) -> list[Prompt]:
    """Return prompts of the kind that the vanilla model was made for, where they come with it; else none."""
    source = home_source(recipe.model.head_from)
    if source is None or "vanilla" not in recipe.evaluate.arms:
        return []
    records = load_records(resolve(source), group_field=GROUP_FIELD, name=source)
    return choose_evenly(prompts_of(records, tokenizer), min(recipe.evaluate.prompts, HOME_PROMPTS), recipe.seed)


def prompts_of(records: Sequence[Record], tokenizer: Any) -> list[Prompt]:
    """Return the prompts of held-out records; plain text is continued from its first half."""
    texts = [record for record in records if isinstance(record.content, PlainText)]
    others = [record for record in records if not isinstance(record.content, PlainText)]
    return build_prompts(others, tokenizer) + continuation_prompts(texts, tokenizer)


def trunk_dtype(recipe: Recipe, device: torch.device, checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that a trunk is held in: the recipe's; on ``auto`` that of :func:`automatic_dtype`."""
    if recipe.model.dtype != "auto":
        return {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.model.dtype]
    return automatic_dtype(checkpoint, checkpoint.family, device)


def automatic_dtype(checkpoint: Checkpoint, family: Family, device: torch.device) -> torch.dtype:
    """Return the dtype that a trunk is held in where nobody names one; see ``heads.precision.held_dtype``."""
    num_weights = sum(math.prod(info.shape) for info in checkpoint.tensors.values())
    return held_dtype(TORCH_DTYPES[stored_dtype(checkpoint, family)], num_weights, device)
