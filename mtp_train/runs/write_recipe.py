"""``mtp-train init``: write a recipe for a model. ``rescue`` runs the same recipe without a file.

The recipe depends on where the head comes from: the base of the model (``graft``), the model itself (``native``), or
neither, for a model that never had a head (``attach``).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mtp_train.acceptance.names import PLAIN, RETRAINED
from mtp_train.checkpoints.adapter import ADAPTER_CONFIG_FILE, is_adapter
from mtp_train.checkpoints.demo import GROUP_FIELD, PREFIX, resolve
from mtp_train.checkpoints.files import Checkpoint, read_json
from mtp_train.checkpoints.locations import locate_checkpoint, open_location
from mtp_train.checkpoints.suggestions import command, named_base
from mtp_train.checkpoints.writing import full_disk_is_named, refuse_existing, write_text
from mtp_train.data.sources import load_records
from mtp_train.errors import CheckpointError, DataError, MtpError
from mtp_train.evaluation.suites import BUILTIN_FILE
from mtp_train.families import most_served_kind, raw_text_config
from mtp_train.head_kinds import find_head_kind
from mtp_train.heads.diagnose import diagnose_head
from mtp_train.recipe.loading import apply_override, dump_yaml, load_recipe
from mtp_train.recipe.sections import AUTO, AUTOMATIC
from mtp_train.recipe.shipped import SCHEMA_FILE
from mtp_train.runs.check import check
from mtp_train.runs.checkpoint_tools.write import WriteResult
from mtp_train.runs.inputs import LoneHead, open_head_source, open_trunk, plan_head
from mtp_train.runs.resolve import Overrides, override_texts

Plain = dict[str, Any]
Start = Literal["graft", "native", "attach"]

# Sampling of FastMTP (arXiv:2509.18362, section 3); the rest follows from model, data and machine.
_ANSWERS: Plain = {"temperature": 0.6, "top_k": 20, "top_p": 0.95}

_TRAINS: Mapping[Start, str] = {
    "graft": "the MTP head of model.head_from, grafted onto model.trunk, on the responses of model.trunk",
    "native": "the MTP head of model.trunk, on the responses of model.trunk",
    "attach": "a new head for model.trunk, which has none, on the responses of model.trunk",
}
_BUILTIN_NOTE = "Trains on the hundred built-in prompts, which is little: name chats or prompts of your own by --data."
_MAY_BE_LOST = "Releases of this family have a head. If this model's base has one, write the recipe with --base BASE."
_DRAFT_VOCAB = 32_000
"""Tokens that an EAGLE-3 head drafts from if the model has many more, as in the heads released with the paper
(arXiv:2503.01840)."""


def write_recipe(
    out: str | Path,
    trunk: str | Path,
    base: str | Path | None = None,
    *,
    data: Sequence[str | Path] = (),
    processes: int | None = None,
    device: str | None = None,
    overrides: Overrides = (),
) -> WriteResult:
    """Write a recipe that retrains a model's head, or trains a new one for a model without a head.

    Args:
        out: The new file.
        trunk: A checkpoint, or a peft adapter of ``base``: a directory, a hub id or ``demo:NAME``.
        base: The checkpoint that it was fine-tuned from, whose head is grafted and retrained. None takes the head of
            ``trunk``, or a new one if ``trunk`` never had one.
        data: Files of prompts or chats like those that the model will serve; empty for 100 built-in prompts.
        processes: Number of processes that the recipe must be launched with; None for any.
        device: What each of them will run on, as for :func:`check`; None for this machine's.
        overrides: Changes to the recipe before it is written, as for :func:`run`.

    Raises:
        OutputExistsError: ``out`` exists.
        MtpError: The model is unknown or incomplete, does not fit the base, or needs a base; or ``check`` would refuse
            the recipe.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.write_recipe("my-27b.yaml", "my-27b", "Qwen/Qwen3.6-27B", data=["chats.jsonl"]).cure
        'mtp-train check my-27b.yaml'
    """
    out = Path(out)
    refuse_existing(out, what="the recipe")
    if not out.parent.is_dir():
        raise MtpError(f"{out}: no directory {out.parent}; expected one to write the recipe to. Make it first.")
    donor = None if base is None else str(base)
    start = start_of(str(trunk), donor)
    settings = settings_of(start, str(trunk), donor, f"runs/{out.stem}", [str(path) for path in data])
    if processes is not None:
        settings["train"]["processes"] = processes
    for override in override_texts(overrides):
        apply_override(settings, override)
    found = check(settings, device=device)
    # ``check`` plans for a trunk without its weights too.
    open_trunk(found.recipe)
    with full_disk_is_named(out, what="the recipe"):
        write_text(out, _file_of(settings, start))
    notes = [] if found.room.problem is None else [f"Does not fit: {found.room.problem}."]
    if start == "attach" and not open_location(str(trunk)).family.attached:
        notes.append(_MAY_BE_LOST)
    if settings["data"]["sources"] == [{"path": str(BUILTIN_FILE)}]:
        notes.append(_BUILTIN_NOTE)
    return WriteResult(
        out=out,
        content=f"it trains {_TRAINS[start]}",
        notes=tuple(notes),
        cure=command("check", out, *(["--device", device] if device else ())),
    )


def start_of(trunk: str, base: str | None) -> Start:
    if base is not None:
        return "graft"
    path = locate_checkpoint(resolve(trunk))
    if is_adapter(path):
        named = read_json(path / ADAPTER_CONFIG_FILE).get("base_model_name_or_path")
        raise _lacks_base(trunk, "a peft adapter", str(named) if named else None)
    checkpoint = open_location(trunk)
    diagnosis = diagnose_head(checkpoint)
    if diagnosis.complete:
        return "native"
    if diagnosis.found_keys or diagnosis.declared_modules:
        raise _lacks_base(trunk, diagnosis.describe(), named_base(checkpoint.path))
    return "attach"


def _lacks_base(trunk: str, found: str, named: str | None) -> CheckpointError:
    base = shlex.quote(named) if named else "BASE"
    return CheckpointError(
        f"{trunk}: {found}, and no base is named; expected the checkpoint that it was fine-tuned from, with its head. "
        f"Add --base {base}; if that has no head either, train a new one with the recipe attach_head."
    )


def settings_of(start: Start, trunk: str, base: str | None, run_dir: str, data: Sequence[str]) -> Plain:
    adapter = None
    source = None if base is None else open_head_source(base)
    if base is not None and is_adapter(locate_checkpoint(resolve(trunk))):
        trunk, adapter = base, trunk
    paths = list(data) or ["demo:prompts" if trunk.startswith(PREFIX) else str(BUILTIN_FILE)]
    settings: Plain = {
        "run_dir": run_dir,
        "model": {"trunk": trunk},
        "head": {"init": start},
        "data": {"sources": [{"path": path} for path in paths], "regenerate": dict(_ANSWERS)},
        "train": {},
        "evaluate": {"arms": [PLAIN, start, RETRAINED]},
    }
    for field in AUTOMATIC:
        apply_override(settings, f"{field}={AUTO}")
    settings["data"]["group_field"] = _group_field(paths)
    settings["train"] |= {"save_steps": 50, "select": {"patience": 6}}
    if isinstance(source, LoneHead) and source.kind.has_file:
        settings["head"]["kind"] = source.kind.name
        if source.kind.parallel:
            settings["head"]["num_depths"] = min(source.stored.num_modules, source.kind.deepest)
    if start == "graft":
        settings["model"] |= {"head_from": base, **({} if adapter is None else {"adapter": adapter})}
    if start == "attach":
        settings["evaluate"]["arms"] = [PLAIN, RETRAINED]
        settings["head"] = _new_head(settings, open_location(trunk))
    return settings


def _group_field(paths: Sequence[str]) -> str | None:
    """Return the column that groups records if every file has it, as files of prompts for ``evaluate`` may."""
    try:
        for path in paths:
            load_records(resolve(path), split="train[:1]", group_field=GROUP_FIELD, name=path)
    except DataError:
        # No such column; what else is wrong is reported when the run reads the file.
        return None
    return GROUP_FIELD


def _new_head(settings: Plain, trunk: Checkpoint) -> Plain:
    """Return the ``head`` section of a new head, of the kind that most servers draft with.

    An MTP head starts from a copy of the trunk's last layer if one fits, else from random weights.
    """
    kind = most_served_kind(trunk.family)
    head: Plain = {"kind": kind, "init": "random"}
    if "copy_last_layer" not in find_head_kind(kind).starts:
        if int(raw_text_config(trunk.config)["vocab_size"]) > 2 * _DRAFT_VOCAB:
            head["draft_vocab"] = _DRAFT_VOCAB
        return head
    copied = {**head, "init": "copy_last_layer"}
    try:
        plan_head(load_recipe({**settings, "head": copied}), trunk, None)
    except CheckpointError:
        return head
    return copied


def _file_of(settings: Plain, start: Start) -> str:
    """Return a recipe as YAML, with a header like those of the package's recipes."""
    header = (
        f"# yaml-language-server: $schema={SCHEMA_FILE}",
        f"# Trains: {_TRAINS[start]}.",
        "# Check: mtp-train check THIS_FILE --processes N prints plan, memory, the engines that serve the result, the",
        "# values of fields that are auto (with --show recipe the reasons too), and the command that launches it.",
        "# Override a field by adding section.field=value to either. Every field: recipes/fields.md.",
    )
    return "\n".join([*header, "", *(dump_yaml({name: value}) for name, value in settings.items())])
