"""The regeneration stage: the trunk generates responses to the training prompts, by the decoder or on a server."""

from __future__ import annotations

import contextlib
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mtp_inference import Sampling, SpeculativeDecoder
from mtp_train.answers.endpoint import Endpoint, read_api_key
from mtp_train.answers.generate import Answering, missing_prompts, regenerate
from mtp_train.answers.served import Judge, regenerate_served
from mtp_train.answers.store import (
    COPIED_FILE,
    RegeneratedRow,
    RegeneratedStore,
    ResponseCounts,
    file_rows,
    settings_key,
    stored_rows,
    write_copied,
)
from mtp_train.checkpoints.writing import write_json
from mtp_train.data.tokenize import Document, Prompt
from mtp_train.errors import DataError, MtpError
from mtp_train.evaluation.decoding import MAX_BATCH
from mtp_train.recipe.sections import RegenerateSpec
from mtp_train.runs.refusals import DATA, SETTINGS_FILE, TrunkContents, answers_of
from mtp_train.runs.run import Run, require_shared
from mtp_train.runs.run_directory import ADAPTER, TRUNK
from mtp_train.runs.trunks import answering_dtype, decoding_trunk, served_judge, trunk_in_shards
from mtp_train.train.launch import RunAccelerator
from mtp_train.train.machine import set_threads
from mtp_train.train.shard import gather_in, shards_trunk
from mtp_train.trunk.load import Trunk

COPIED_FROM_FILE = "copied.json"
CONCURRENCY = 32
"""Default of ``data.regenerate.concurrency``; that of ``batch_size`` is the batch of an evaluation."""


def data_stage(run: Run) -> list[Document]:
    """Return the documents to train on: the trunk's own responses, or the sources' text."""
    settings = run.recipe.data.regenerate
    if settings is None:
        return list(run.inputs.text.documents)
    return generate_responses(run, settings)[0]


def generate_responses(run: Run, settings: RegenerateSpec) -> tuple[list[Document], ResponseCounts]:
    """Generate responses to the training prompts, and return the documents made from them.

    Prompts with a stored response at the same settings are skipped. A trunk in shards only checks a server's
    responses: the first process asks the server.
    """
    recipe, inputs, accelerator, progress = run.recipe, run.inputs, run.accelerator, run.progress
    directory, deciding = responses_directory(run, settings)
    needs_one = settings.endpoint is None or recipe.decodes or recipe.train.states is not None
    is_shared = shards_trunk(accelerator) and not needs_one
    rank, world = (0, 1) if is_shared else (accelerator.process_index, accelerator.num_processes)
    store = RegeneratedStore(directory, rank=rank, world=world)
    if accelerator.is_main_process and not (directory / SETTINGS_FILE).is_file():
        write_json(directory / SETTINGS_FILE, deciding)
    if recipe.data.responses is not None:
        if accelerator.is_main_process:
            by = inputs.contents[TRUNK], inputs.contents.get(ADAPTER)
            for said in copy_answers(recipe.data.responses, directory, inputs.text.prompts, by):
                progress.console.print(said)
        require_shared(directory, [COPIED_FILE], accelerator)
    task = progress.add_task("regenerating responses", total=None)
    run.forecast.begin("answering")

    def on_served(done: int, total: int) -> None:
        progress.update(task, completed=done, total=total)
        run.forecast.update(done, total - done)

    def on_decoded(done: int, total: int, answered: int, tokens: int) -> None:
        progress.update(task, completed=done, total=total)
        if answered:
            run.forecast.wrote(tokens, answered, total - done, accelerator.num_processes)

    answering = Answering(
        max_new_tokens=settings.max_new_tokens,
        seq_len_tokens=recipe.data.seq_len_tokens,
        eos_ids=inputs.eos_ids,
        sampling=Sampling(**sampling_of(settings), seed=recipe.seed),
    )
    if settings.endpoint is None:
        rows = settings.batch_size or MAX_BATCH
        set_threads("answering prompts", rows, inputs.finetune, accelerator.device, progress.console)
        answer_by_decoder(run, store, answering, rows, on_decoded)
    else:
        answer = partial(answer_by_server, run, settings, store, answering, on_served)
        said = _judged(run, answer, is_shared=is_shared)
        if said and accelerator.is_main_process:
            progress.console.print(said)
    require_shared(directory, ["."], accelerator)
    documents, counts = store.to_documents(
        recipe.data.seq_len_tokens, {prompt.id: prompt.group for prompt in inputs.text.prompts}
    )
    if accelerator.is_main_process:
        found = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in asdict(counts).items() if value)
        progress.console.print(f"{directory}: {found}.")
    return documents, counts


def _judged(run: Run, answer: Callable[[Judge], str], *, is_shared: bool) -> str:
    """Let a server answer, judged by the trunk here or by the states of the server that has its layers."""
    if run.recipe.train.states is not None and run.held.whole is None:
        texts = [prompt.prompt_ids for prompt in run.inputs.text.prompts]
        with served_judge(run, run.recipe.train.states, texts) as judge:
            return answer(judge)
    if not is_shared:
        return answer(Judge.of(decoding_trunk(run)))
    trunk = trunk_in_shards(run)
    return with_followers(trunk, run.accelerator, partial(answer, Judge.of(trunk)))


def responses_directory(run: Run, settings: RegenerateSpec) -> tuple[Path, dict[str, object]]:
    """Return the directory of the responses, and every setting that a response depends on, as plain JSON values."""
    recipe = run.recipe
    contents = run.inputs.contents
    deciding: dict[str, object] = {
        "trunk": dict(contents[TRUNK]),
        "adapter": dict(contents[ADAPTER]) if run.inputs.adapter else None,
        "dtype": recipe.model.dtype,
        "seq_len_tokens": recipe.data.seq_len_tokens,
        "max_new_tokens": settings.max_new_tokens,
        **sampling_of(settings),
        "seed": recipe.seed if settings.temperature else None,
        "answered_by": "decoder" if settings.endpoint is None else "server",
        "served_model": None if settings.endpoint is None else settings.model,
    }
    # Absent where unset: responses of runs that had no such field are still found.
    later = {"quantization": recipe.model.quantization, "chat_template_kwargs": recipe.data.chat_template_kwargs}
    deciding |= {name: value for name, value in later.items() if value}
    return run.directory.path / DATA / f"responses-{settings_key(deciding)}", deciding


def sampling_of(settings: RegenerateSpec) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def answer_by_decoder(
    run: Run,
    store: RegeneratedStore,
    answering: Answering,
    batch_size: int,
    on_batch: Callable[[int, int, int, int], object],
) -> None:
    """Generate the responses to this process's prompts with the built-in decoder."""
    # Without copied responses: a batch with one missing response is decoded whole.
    copied = {row.id for row in file_rows(store.directory / COPIED_FILE)}
    prompts = [prompt for prompt in run.inputs.text.prompts if prompt.id not in copied]
    if not {prompt.id for prompt in prompts} - {row.id for row in store}:
        return
    decoder = SpeculativeDecoder(
        decoding_trunk(run, answering_dtype(run)), None, 0, answering.eos_ids, max_batch=batch_size
    )
    run.forecast.update(0.0, math.inf)
    regenerate(
        prompts,
        store,
        lambda requests: [result.token_ids for result in decoder.generate(requests)],
        answering,
        batch_size=batch_size,
        on_batch=on_batch,
    )


def with_followers(trunk: Trunk, accelerator: RunAccelerator, answer: Callable[[], str]) -> str:
    """Call a function in the first process, while the others run the trunk with it, each with its shards.

    Only the first process talks to the server, and its waiting for responses holds up no collective: before each
    forward, it sends the tokens to the others.
    The trunk is sharded in place, and run without a cache; it cannot train afterwards, as its decoder gathers the
    shards. Returns the function's result; empty in other processes.

    Raises:
        DataError: The function failed in the first process; every process raises its error.
    """
    gather_in(trunk.decoder, trunk, accelerator)
    if not accelerator.is_main_process:
        # Until the first process sends an error, or that it has finished.
        with torch.no_grad():
            while isinstance(heard := accelerator.said_by_main(), list):
                trunk.hidden(torch.tensor(heard, device=trunk.lm_head_VD.device))
        if heard is not None:
            raise DataError(heard)
        return ""

    def tell(_decoder: Any, _args: Any, given: dict[str, Any]) -> None:
        accelerator.said_by_main(given["input_ids"].tolist())

    # Before the hooks that gather the shards.
    hook = trunk.decoder.register_forward_pre_hook(tell, with_kwargs=True, prepend=True)
    try:
        said = answer()
    except (MtpError, OSError) as error:
        accelerator.said_by_main(str(error))
        raise
    finally:
        hook.remove()
    accelerator.said_by_main()
    return said


def answer_by_server(
    run: Run,
    settings: RegenerateSpec,
    store: RegeneratedStore,
    answering: Answering,
    on_progress: Callable[[int, int], None],
    judge: Judge,
) -> str:
    """Generate the responses to this process's prompts on the recipe's server.

    Returns a sentence about the result for the log; empty if no prompt was left.
    """
    inputs = run.inputs
    missing = missing_prompts(inputs.text.prompts, store, answering.seq_len_tokens)
    if not missing:
        return ""
    endpoint = Endpoint(
        str(settings.endpoint),
        inputs.tokenizer,
        inputs.eos_ids,
        len(judge.ends.lm_head_VD),
        api_key=read_api_key(settings.api_key_env),
        concurrency=max(1, (settings.concurrency or CONCURRENCY) // store.world),
    )
    with contextlib.closing(endpoint):
        endpoint.choose_model(settings.model)
        stored, refusals = regenerate_served(missing, store, endpoint, answering, judge, on_progress)
    facts = {"url": endpoint.url, "model": endpoint.model, "generated": stored, "refused": len(refusals)}
    write_json(store.directory / f"server-{store.rank:05d}-of-{store.world:05d}.json", facts)
    refused = f", {len(refusals)} refused ({refusals[-1]})" if refusals else ""
    return f"{endpoint.url}: {stored} prompts answered{refused}."


def copy_answers(location: str, directory: Path, prompts: Sequence[Prompt], trunk: TrunkContents) -> list[str]:
    """Copy the responses of another run to prompts of this run into this run's directory of responses.

    A response belongs to a prompt with the same tokens: ids contain the path of the data as the recipe spells it.
    A directory with a complete copy is left as it is. Returns sentences for the log.
    """
    if (directory / COPIED_FILE).is_file():
        return []
    unanswered: _Unanswered = defaultdict(dict)
    for prompt in prompts:
        unanswered[prompt.prompt_ids][prompt.id] = prompt
    matched = [
        (list(_matching(stored_rows(place), unanswered)), settings) for place, settings in answers_of(location, trunk)
    ]
    if not any(rows for rows, _ in matched):
        raise DataError(
            f"data.responses: {location} has no response to any of the {len(prompts)} prompts to train on; expected "
            "prompts in common, of the same data and chat template. Write data.responses: null."
        )
    copied = {"run": location, "responses": [{"count": len(rows), **settings} for rows, settings in matched]}
    write_json(directory / COPIED_FROM_FILE, copied)
    write_copied(directory, (row for rows, _ in matched for row in rows))
    return [
        f"{len(rows)} of {len(prompts)} prompts have responses of {location} (dtype {settings.get('dtype')}, "
        f"temperature {settings.get('temperature')})."
        for rows, settings in matched
        if rows
    ]


_Unanswered = dict[tuple[int, ...], dict[str, Prompt]]
"""Tokens to the prompts of these tokens, by id."""


def _matching(rows: Iterable[RegeneratedRow], unanswered: _Unanswered) -> Iterator[RegeneratedRow]:
    """Yield each row for a prompt with its tokens, preferably of its id, and remove that prompt."""
    for row in rows:
        same = unanswered.get(row.prompt_ids)
        if same:
            prompt = same.pop(row.id if row.id in same else next(iter(same)))
            yield replace(row, id=prompt.id, group=prompt.group)
