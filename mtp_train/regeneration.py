"""The stage in which the trunk answers the training prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator
from rich.progress import Progress

from mtp_inference import Request, Sampling, SpeculativeDecoder
from mtp_train.data.regenerated import Question, regenerate
from mtp_train.data.responses import RegeneratedStore, ResponseCounts, settings_key
from mtp_train.data.tokenize import Document
from mtp_train.heads.trunk import Trunk
from mtp_train.inputs import Inputs
from mtp_train.recipe import Recipe, RegenerateSpec
from mtp_train.run_dir import checkpoint_identity
from mtp_train.weights.writing import write_json

DATA = "data"
SETTINGS_FILE, COUNTS_FILE = "settings.json", "counts.json"
BATCH_SIZE = 16


def regenerate_stage(
    recipe: Recipe,
    settings: RegenerateSpec,
    run_dir: Path,
    inputs: Inputs,
    trunk: Trunk,
    accelerator: Accelerator,
    progress: Progress,
) -> tuple[list[Document], ResponseCounts]:
    """Let the trunk answer the training prompts, and return what is learnt from its responses.

    Prompts answered before, with the same settings, are left alone.

    Raises:
        DataError: No prompt fits, or no response can be learnt from.
    """
    deciding = deciding_settings(recipe, settings, inputs)
    directory = run_dir / DATA / f"responses-{settings_key(deciding)}"
    store = RegeneratedStore(directory, rank=accelerator.process_index, world=accelerator.num_processes)
    if accelerator.is_main_process:
        write_json(directory / SETTINGS_FILE, deciding)
    task = progress.add_task("regenerating responses", total=None)
    regenerate(
        inputs.prompts,
        store,
        decoder_fn(settings, inputs, trunk),
        seq_len_tokens=recipe.data.seq_len_tokens,
        batch_size=settings.batch_size or BATCH_SIZE,
        max_new_tokens=settings.max_new_tokens,
        eos_ids=inputs.eos_ids,
        seed=recipe.seed,
        rank=accelerator.process_index,
        world=accelerator.num_processes,
        on_batch=lambda done, total: progress.update(task, completed=done, total=total),
    )
    accelerator.wait_for_everyone()
    documents, counts = store.to_documents(
        recipe.data.seq_len_tokens,
        max_repeated=settings.max_repeated,
        special_ids=frozenset(inputs.tokenizer.all_special_ids),
    )
    if accelerator.is_main_process:
        write_json(directory / COUNTS_FILE, asdict(counts))
        progress.console.print(f"Responses: {', '.join(f'{value} {name}' for name, value in shown(counts).items())}.")
    return documents, counts


def deciding_settings(recipe: Recipe, settings: RegenerateSpec, inputs: Inputs) -> dict[str, object]:
    """Return all that decides what the trunk says to a prompt, as plain JSON values."""
    return {
        "trunk": checkpoint_identity(recipe.model.trunk, inputs.finetune)["sha256"],
        "adapter": recipe.model.adapter,
        "seq_len_tokens": recipe.data.seq_len_tokens,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k,
        "min_p": settings.min_p,
        "seed": recipe.seed if settings.temperature else None,
    }


def decoder_fn(settings: RegenerateSpec, inputs: Inputs, trunk: Trunk) -> Callable[[list[Question]], list[list[int]]]:
    """Return the built-in decoder as what answers a batch of questions."""
    decoder = SpeculativeDecoder(trunk, None, 0, inputs.eos_ids, max_batch=settings.batch_size or BATCH_SIZE)

    def generate(questions: list[Question]) -> list[list[int]]:
        requests = [
            Request(
                prompt_ids=question.prompt_ids,
                max_new_tokens=question.max_new_tokens,
                sampling=Sampling(
                    temperature=settings.temperature,
                    top_p=settings.top_p,
                    top_k=settings.top_k,
                    min_p=settings.min_p,
                    seed=question.seed,
                ),
            )
            for question in questions
        ]
        return [list(result.token_ids) for result in decoder.generate(requests)]

    return generate


def shown(counts: ResponseCounts) -> dict[str, int]:
    """Return the counts that say something, by name."""
    return {name.replace("_", " "): value for name, value in asdict(counts).items() if value}
