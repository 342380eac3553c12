"""Refuse what a recipe asks of a model, its data or its machine that cannot work, before anything is written.

:func:`refusals` is the list that ``check`` and ``run`` share. ``run`` adds those that need weights.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console

from mtp_inference import NgramDrafting, SpeculativeDecoder, compare, fault_of
from mtp_train.acceptance.gate import min_gate_groups
from mtp_train.acceptance.names import NATIVE
from mtp_train.answers.store import COPIED_FILE, response_files
from mtp_train.checkpoints.demo import PREFIX, demo_path
from mtp_train.checkpoints.files import Checkpoint, read_json
from mtp_train.checkpoints.identity import Contents, changed_files
from mtp_train.checkpoints.locations import RECIPE_FILE, is_run
from mtp_train.checkpoints.quantised import quant_method
from mtp_train.data.groups import holdout_of
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import CheckpointError, DataError, MtpError, NotLosslessError, RecipeError, UnsupportedModelError
from mtp_train.families import Family
from mtp_train.families.served_states import states_refusal
from mtp_train.heads.diagnose import diagnose_head, named_rejections, text_config_of
from mtp_train.heads.lora import require_lora_targets
from mtp_train.recipe.schema import Recipe
from mtp_train.recipe.shipped import accelerate_file
from mtp_train.runs.settings import plan_of, run_settings, tracking_of
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.quantise import require_bitsandbytes, require_quantizable
from mtp_train.trunk.whole import require_whole_trunk

CHECK_PROMPTS, CHECK_PROMPT_TOKENS, CHECK_NEW_TOKENS = 8, 512, 64
"""Prompts of the check of the decoder, the most tokens of each, and the tokens decoded after them."""

Check = Callable[[], object]
"""Raises an MtpError, or does nothing."""


@dataclass(frozen=True)
class HeadOnTrunk:
    """A trunk, and the head that is to be trained on it."""

    trunk: Checkpoint
    """Without tensors where its weights are not at hand: its config decides."""
    family: Family
    """Of the head."""
    num_modules: int

    @cached_property
    def text_config(self) -> Any:
        return text_config_of(self.trunk)

    def lora_parameters(self, recipe: Recipe) -> int | None:
        """Return the number of LoRA's weights; None for a recipe without LoRA. Refuse targets that it does not have."""
        if recipe.head.lora is None:
            return None
        convention = self.family.convention(recipe.head.convention)
        return require_lora_targets(recipe.head.lora, self.family, self.text_config, self.num_modules, convention)


def refusals(recipe: Recipe, model: HeadOnTrunk, world_size: int) -> list[MtpError]:
    """Return every problem of a recipe with its model, its inputs and the number of processes; reads no weights."""
    # Raises if the head is not supported by the installed transformers.
    _ = model.family.classes
    checks: list[Check] = [
        partial(plan_of, recipe, world_size),
        partial(require_answers, recipe, Path(recipe.run_dir)),
        tracking_of(recipe).require,
        partial(_require_packing, recipe, model.trunk, world_size),
        partial(model.lora_parameters, recipe),
    ]
    with named_rejections(model.trunk.path):
        found = _errors_of(checks)
    return [*_of_the_head(recipe, model), *_of_states(recipe, model), *_of_the_demo(recipe, model.trunk.path), *found]


def require_trainable(trunk: Family) -> None:
    """Raise an UnsupportedModelError for a trunk whose own drafter is decoded with, and not trained."""
    if not trunk.kind.starts:
        raise UnsupportedModelError(
            f"model.trunk: {trunk.title}, whose {trunk.kind.title} drafter is decoded with and not trained; expected a "
            "trunk with an MTP head, or with none. Use mtp-train graft, evaluate or probe, which do not train it."
        )


def weight_refusals(recipe: Recipe, finetune: Checkpoint, base: Checkpoint | None, world_size: int) -> list[MtpError]:
    """Return every problem of a recipe with its checkpoints, by their indices; ``base`` is None if nothing loads it."""
    # Served settings: an error now, not after training.
    checks: list[Check] = [
        partial(require_arms, recipe, finetune),
        partial(run_settings, recipe, finetune),
    ]
    if recipe.model.quantization is not None:
        checks.append(partial(require_bitsandbytes, recipe.model.quantization))
    if base is not None:
        checks.append(partial(_require_packing, recipe, base, world_size))
    for checkpoint in filter(None, (finetune, base)):
        checks.append(partial(require_whole_trunk, checkpoint))
    return _errors_of(checks)


def raise_together(problems: Sequence[MtpError]) -> None:
    """Raise problems, if there are any: one as it is, several as one error that lists them."""
    if len(problems) == 1:
        raise problems[0]
    if problems:
        raise RecipeError(*(str(problem) for problem in problems))


def _errors_of(checks: Sequence[Check]) -> list[MtpError]:
    found = []
    for check in checks:
        try:
            check()
        except MtpError as error:
            found.append(error)
    return found


def _require_packing(recipe: Recipe, checkpoint: Checkpoint, world_size: int) -> None:
    """Check that a checkpoint can be quantised or offloaded, if the recipe does one of the two."""
    if recipe.model.quantization is not None:
        require_quantizable(recipe.model.quantization, checkpoint)
    if recipe.model.offload is not None:
        require_offload(world_size, checkpoint)


def _of_states(recipe: Recipe, model: HeadOnTrunk) -> Iterator[RecipeError]:
    reason = None if recipe.train.states is None else states_refusal(model.family, model.trunk.config)
    if reason is not None:
        yield RecipeError(
            f"train.states: vLLM has no hidden states of {model.trunk.path}: {reason}; expected a trunk of which it "
            "has. Write train.states: null."
        )


def _of_the_head(recipe: Recipe, model: HeadOnTrunk) -> Iterator[RecipeError]:
    convention = model.family.convention(recipe.head.convention)
    if recipe.objective.unroll == "fastmtp" and model.num_modules > 1 and convention.modules == "each":
        yield RecipeError(
            f"objective.unroll: 'fastmtp' with a head of {model.num_modules} chained modules, whose depths attend "
            "to their own rows anyway; expected exact. Write objective.unroll: exact."
        )
    asked = recipe.head.draft_vocab
    vocab_size = model.text_config.vocab_size
    if asked is not None and asked >= vocab_size:
        yield RecipeError(
            f"head.draft_vocab: {asked}; expected fewer than the trunk's {vocab_size} tokens. Write null for all."
        )


def _of_the_demo(recipe: Recipe, trunk: Path) -> Iterator[RecipeError]:
    """Refuse the demo's data for a trunk whose tokenizer has another vocabulary than the demo's and its copies."""
    for number, source in enumerate(recipe.data.sources):
        if source.path.startswith(PREFIX) and _vocabulary(trunk) != _vocabulary(demo_path("base")):
            at = f"data.sources.{number}.path"
            yield RecipeError(
                f"{at}: {source.path}, the demo's data, while model.trunk is {recipe.model.trunk}; expected text like "
                f"the model will serve. Add {at}=chats.jsonl data.group_field=null with a file of your own, or use "
                "mtp-train init, which fits a recipe to the model."
            )


def _vocabulary(checkpoint: Path) -> object:
    file = checkpoint / "tokenizer.json"
    model = read_json(file).get("model") if file.is_file() else None
    return model.get("vocab") if isinstance(model, dict) else None


def require_offload(world_size: int, checkpoint: Checkpoint) -> None:
    """Check that a run has one process, and a checkpoint whose layers accelerate can load one at a time."""
    if world_size > 1:
        raise RecipeError(
            f"model.offload: cpu, with {world_size} processes; expected one process. Launch with "
            f"{accelerate_file('single')}; or write model.offload: null and use {accelerate_file('fsdp2')}."
        )
    method = quant_method(checkpoint.config)
    if method is not None:
        raise CheckpointError(
            f"{checkpoint.path}: quantised with {method}, while model.offload is cpu; expected plain weights. Write "
            "model.offload: null, or point model.trunk at the unquantised checkpoint."
        )


def require_arms(recipe: Recipe, finetune: Checkpoint) -> None:
    found = diagnose_head(finetune)
    if NATIVE in recipe.evaluate.arms and not found.complete:
        raise CheckpointError(
            f"evaluate.arms: native, but {finetune.path} {found.describe()}; expected a head of its own. Remove native "
            "from evaluate.arms."
        )


def require_groups(recipe: Recipe, groups: Sequence[str]) -> None:
    """Check that records, by their groups, can be split into enough groups to train on and to measure."""
    found = len(set(groups))
    needed = _measured_groups(recipe) + 1
    if found < needed:
        raise DataError(
            f"data: {len(groups)} records of {found} group(s); expected at least {needed} groups, to train on and to "
            f"measure on others. Add records of {needed - found} more: near-duplicate prompts are of one group, and so "
            "are the paragraphs of a .txt file, but not the `text` of the rows of a .jsonl file."
        )


def _measured_groups(recipe: Recipe) -> int:
    """Return the fewest groups of prompts to measure on: those that can show a gain. A study has no gate."""
    return min_gate_groups(recipe.gate.confidence) if recipe.gate.enabled and recipe.study is None else 1


def require_gate_groups(recipe: Recipe, held_out: Sequence[Prompt], groups: Collection[str]) -> None:
    """Check that the evaluation prompts are of enough groups to show a gain: before training, not after it.

    Args:
        groups: Of all records.
    """
    needed = _measured_groups(recipe)
    found = len({prompt.group for prompt in held_out})
    if found < needed:
        more = "" if recipe.evaluate.prompts >= needed else f" evaluate.prompts={needed}"
        share = max(recipe.data.holdout, holdout_of(groups, needed, recipe.seed))
        raise DataError(
            f"data.holdout: {recipe.data.holdout} gives {len(held_out)} evaluation prompts of {found} group(s); "
            f"expected at least {needed} groups, the fewest that can show a gain at gate.confidence="
            f"{recipe.gate.confidence:g}. Add data.holdout={share}{more}, or records of other groups."
        )


def require_embedded(prompts: Sequence[Prompt], documents: Sequence[Document], vocab_size: int, tokenizer: Any) -> None:
    """Check that the trunk has an embedding for every token of the text.

    Tokenizers may have added tokens without one: Gemma 3's text models have a token for images.
    """
    largest_ids = [(prompt.id, max(prompt.prompt_ids)) for prompt in prompts]
    largest_ids += [(document.id, int(document.input_ids.max())) for document in documents]
    for name, largest in largest_ids:
        if largest >= vocab_size:
            source, _, number = name.rpartition("#")
            raise DataError(
                f"{source}, record {number}: has the token {tokenizer.convert_ids_to_tokens(largest)!r} with the id "
                f"{largest}; expected ids below {vocab_size}, for which the trunk has embeddings. Remove the token or "
                "the record."
            )


def check_decoder(
    trunk: Trunk, prompts: Sequence[Sequence[int]], eos_ids: Collection[int], depth: int, console: Console
) -> float:
    """Decode some prompts plainly and with drafts from the prompt, check the texts, and return the seconds of a token.

    Raises:
        NotLosslessError: The decoder changes the text of this trunk.
    """
    chosen = [list(prompt)[-CHECK_PROMPT_TOKENS:] for prompt in prompts[:CHECK_PROMPTS]]
    begun = time.perf_counter()
    drafted, plain = (
        SpeculativeDecoder(trunk, drafting, depth, eos_ids, records=True).generate(chosen, CHECK_NEW_TOKENS)
        for drafting in (NgramDrafting(), None)
    )
    seconds = time.perf_counter() - begun
    checks = compare(drafted, plain, trunk)
    fault = fault_of(checks)
    if fault is not None:
        raise NotLosslessError(
            f"decoder: {fault}; expected the texts of plain decoding but for near ties. Acceptance measured with it "
            "would mean nothing, so nothing was trained. Please report it with the trunk's config.json."
        )
    console.print(
        f"Decoder checked on {len(chosen)} prompts: lossless. In {trunk.dtype_name}, rounding moves the logits of "
        f"contenders for a token by up to {checks[-1].error:.2g}."
    )
    return seconds / (2 * CHECK_NEW_TOKENS)


# Responses of another run


DATA, SETTINGS_FILE = "data", "settings.json"


TrunkContents = tuple[Contents, Contents | None]
"""The contents of a trunk and of its adapter."""


def require_answers(recipe: Recipe, run_dir: Path, trunk: TrunkContents | None = None) -> None:
    """Check that ``data.responses`` names a run with responses, of ``trunk`` if given, unless they are copied."""
    if recipe.data.responses is not None and not any(run_dir.glob(f"{DATA}/responses-*/{COPIED_FILE}")):
        answers_of(recipe.data.responses, trunk)


def answers_of(location: str, trunk: TrunkContents | None) -> list[tuple[Path, dict[str, Any]]]:
    """Return the directories of the responses that a run generated, of a trunk if given, and their settings."""

    def refused(found: str, expected: str, instead: str) -> DataError:
        return DataError(
            f"data.responses: {location} {found}; expected {expected}. {instead}, or write data.responses: null."
        )

    run = Path(location).expanduser()
    if not is_run(run):
        expected = "the directory of a run with responses"
        raise refused(f"is no run ({RECIPE_FILE} is missing)", expected, "Check the path")
    found = [
        (path.parent, read_json(path))
        for path in sorted(run.glob(f"{DATA}/responses-*/{SETTINGS_FILE}"))
        if response_files(path.parent)
    ]
    if not found:
        raise refused(f"has no responses (in {run / DATA})", "a run with data.regenerate", "Name such a run")
    same = [one for one in found if trunk in (None, (one[1].get("trunk"), one[1].get("adapter")))]
    if trunk is not None and not same:
        recorded = found[0][1].get("trunk")
        names = changed_files(recorded, trunk[0]) if isinstance(recorded, dict) else []
        differs = f"{', '.join(names[:3])} differ" if names else "the adapter differs"
        other = f"has responses of another trunk than model.trunk ({differs})"
        raise refused(other, "the same content", "Name a run on this trunk")
    return same
