"""Write the model card of an export: measured acceptance, origin of the weights, and commands to serve it.

The export starts from the trunk's own card. Its text and its header stay byte for byte: we append the fields that the
hub needs, and a section between two markers, which a second call replaces. ``ModelCard`` of huggingface_hub cannot
write such a card: it dumps the whole header again, without its comments, and rejects one that is not valid YAML.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import metadata_load
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from mtp_train import __version__
from mtp_train.evaluation.results import REPORT_FILE, UNJUDGED, UNJUDGED_SENTENCE, RunReport, load_report
from mtp_train.families.engines import EngineSupport, engine_commands
from mtp_train.head_kinds import find_head_kind
from mtp_train.job.run_dir import PROVENANCE_FILE
from mtp_train.recipe.loading import dump_recipe, dump_yaml, load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.report.wording import (
    COLUMNS,
    apart_sentence,
    arm_cells,
    capitalised,
    group_arms,
    held_out_sentence,
    lossless_sentence,
    serving_depth,
)
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.demo import PREFIX
from mtp_train.weights.files import open_checkpoint, read_json
from mtp_train.weights.run_export import RECIPE_FILE
from mtp_train.weights.writing import write_text

Identity = Mapping[str, Any]
_DATA_SUFFIX = r"\.(?:jsonl?|parquet|arrow|csv|tsv|txt|gz|zst|bz2|xz|zip)$"
CARD_FILE = "README.md"
OPENING, CLOSING = "<!-- mtp-train -->", "<!-- /mtp-train -->"
TAGS = ("mtp", "speculative-decoding")
_FIELDS: Mapping[str, Any] = {"library_name": "transformers", "tags": [*TAGS]}
LICENCE_FIELDS = ("license", "license_name", "license_link")
# ValueError: not UTF-8, not a mapping, or no such date. RecursionError: nested too deep.
_UNREADABLE = (OSError, ValueError, RecursionError, yaml.YAMLError)
_PURPOSE = (
    "The head drafts the next tokens and the model verifies them in one pass. Generation is faster, with an unchanged "
    "distribution of the output; in bf16, near ties between tokens may fall otherwise."
)


def write_card(run_dir: Path, out: Path) -> tuple[str, ...]:
    """Write the card of a run's export, starting from the trunk's card that was copied or linked there.

    Args:
        run_dir: Directory of an evaluated run.
        out: Directory of its export.

    Returns:
        What to correct in the card before it is published, a sentence each; empty for a readable card.
    """
    recipe, provenance = load_recipe(run_dir / RECIPE_FILE), read_json(run_dir / PROVENANCE_FILE)
    report, trunk = load_report(run_dir / REPORT_FILE), provenance["trunk"]
    if recipe.head.kind == "mtp":
        section = _section(recipe, provenance, report, open_checkpoint(out).engines)
        return _write(out, section, trunk, provenance["head_from"])
    family = load_artifact(run_dir / "head").family
    name = find_head_kind(family.kind).title
    title = f"{name} draft model for {_name(trunk)}"
    section = _section(recipe, provenance, report, family.serving)
    return _write(out, section, trunk, trunk, title, {"tags": [name, TAGS[-1]]})


def write_graft_card(
    out: Path, trunk: Identity, head_from: Identity, adapter: str | None, num_depths: int
) -> tuple[str, ...]:
    """Write the card of a checkpoint with the untrained head of another one.

    Args:
        out: Directory of the checkpoint.
        trunk: Origin of its trunk, as returned by ``mtp_train.job.run_dir.checkpoint_identity``.
        head_from: Origin of its head.
        adapter: Path of the adapter that was merged into the trunk; None without one.
        num_depths: Drafts per round in the serving commands.

    Returns:
        See :func:`write_card`.
    """
    made_of = (
        f"The weights of `{_name(trunk)}`{_state(adapter)}, and the multi-token-prediction head of "
        f"`{_name(head_from)}` as it is, added by mtp-train {__version__}."
    )
    return _write(out, _as_it_is(out, made_of, num_depths), trunk, head_from)


def write_merge_card(out: Path, checkpoint: Identity, adapter: str, num_depths: int | None) -> tuple[str, ...]:
    """Write the card of a checkpoint that an adapter was merged into.

    Args:
        out: Directory of the merged checkpoint.
        checkpoint: Origin of the checkpoint before the merge.
        adapter: Path of the merged adapter.
        num_depths: Drafts per round in the serving commands; None for a checkpoint without a head.

    Returns:
        See :func:`write_card`.
    """
    merged = f"The weights of `{_name(checkpoint)}`{_state(adapter)} by mtp-train {__version__}"
    if num_depths is not None:
        section = _as_it_is(out, f"{merged}, and its multi-token-prediction head as it is.", num_depths)
        return _write(out, section, checkpoint, None)
    section = "\n\n".join([OPENING, "## Merged adapter", f"{merged}.", CLOSING])
    title = f"{_name(checkpoint)}, with an adapter merged"
    return _write(out, section, checkpoint, None, title, {"library_name": _FIELDS["library_name"]})


def _as_it_is(out: Path, made_of: str, num_depths: int) -> str:
    """Return the section of a checkpoint whose head was not trained for its weights."""
    parts = [
        OPENING,
        "## MTP head",
        f"{made_of} {_PURPOSE}",
        "It was not trained for these weights. `mtp-train evaluate .` measures its acceptance on them.",
        *_serving(open_checkpoint(out).engines, num_depths),
        CLOSING,
    ]
    return "\n\n".join(parts)


def _write(
    out: Path,
    section: str,
    trunk: Identity,
    head_from: Identity | None,
    title: str | None = None,
    fields: Mapping[str, Any] = _FIELDS,
) -> tuple[str, ...]:
    """Insert or replace our section in the card, and append the fields that its header lacks.

    Returns:
        See :func:`write_card`.
    """
    card = out / CARD_FILE
    if card.is_dir():
        return (f"{card}: a directory; expected a model card. Rename it, and write a card before you publish this.",)
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    notes = _unreadable_parts(card)
    match = REGEX_YAML_BLOCK.match(text)
    header, body = (match[2], text[match.end() :]) if match else ("", text)
    if not body.strip():
        body = f"\n# {title or f'{_name(trunk)}, with its MTP head'}\n"
    # A function as the replacement: `re` would interpret backslashes of a string.
    body, replaced = re.subn(f"{OPENING}.*{CLOSING}", lambda _: section, body, flags=re.DOTALL)
    if not replaced:
        body = f"{body.rstrip()}\n\n{section}\n"
    # `write_text` renames a new file into place: the existing one may be a hard link to the trunk's card.
    header = _completed(header, _metadata(card), trunk, head_from, fields)
    write_text(card, f"---\n{header}---\n{body}")
    return notes


def _unreadable_parts(card: Path) -> tuple[str, ...]:
    """Return what is wrong with a card that came with the trunk, a sentence each."""
    if not card.is_file():
        return ()
    try:
        card.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return (
            f"{card}: byte {error.start} of the trunk's card is not UTF-8; such bytes became U+FFFD. Correct the text "
            "before you publish it.",
        )
    try:
        metadata_load(card)
    except _UNREADABLE as error:
        reason = " ".join(str(error).split())
        return (
            f"{card}: the header of the trunk's card is not a YAML mapping ({reason:.200}); it was kept, and ours "
            "follows in it. Correct the header before you publish it.",
        )
    return ()


def _completed(
    header: str, known: Mapping[str, Any], trunk: Identity, base: Identity | None, fields: Mapping[str, Any]
) -> str:
    """Return a card's header with the missing fields appended; all other lines stay as they are.

    Args:
        header: The YAML text of the card.
        known: Its parsed fields.
        trunk: Origin of the trunk; a model of the hub becomes the ``base_model``.
        base: Origin of the head; names the ``base_model`` and the licence where the card and the trunk name none.
        fields: Further fields, added where the card lacks them.
    """
    lines = header.rstrip().splitlines()
    added: dict[str, Any] = {}
    if _hub_id(trunk):
        # The export derives from this trunk, so an older `base_model` is replaced. The pattern covers the key's line
        # and the indented lines and list items of its value.
        kept = re.sub(r"^base_model:.*(?:\n(?:[ \t]+|- ).*)*\n?", "", "\n".join(lines) + "\n", flags=re.MULTILINE)
        lines = kept.rstrip().splitlines()
        added["base_model"] = _hub_id(trunk)
    elif "base_model" not in known and base is not None and _hub_id(base):
        added["base_model"] = _hub_id(base)
    if "license" not in known and base is not None:
        theirs = _metadata(Path(base["path"]) / CARD_FILE)
        added |= {name: theirs[name] for name in LICENCE_FIELDS if name in theirs}
    added |= {name: value for name, value in fields.items() if name not in known}
    return "".join(f"{line}\n" for line in lines) + (dump_yaml(added) if added else "")


def _metadata(card: Path) -> dict[str, Any]:
    """Return the fields of a card's header; none where the file is missing or the header is not a YAML mapping."""
    try:
        return metadata_load(card) or {}
    except _UNREADABLE:
        return {}


def _section(
    recipe: Recipe, provenance: Mapping[str, Any], report: RunReport, engines: Mapping[str, EngineSupport]
) -> str:
    version = provenance["versions"]["mtp-train"]
    drafts = recipe.head.kind != "mtp"
    opening = _drafting if drafts else _retrained if recipe.sft is None else _fine_tuned
    parts = [
        OPENING,
        f"## {find_head_kind(recipe.head.kind).title} head",
        *opening(recipe, provenance, report, f"mtp-train {version}"),
        "### Acceptance",
        *_measured(report),
        # The depth that the report recommends, which the commands must not contradict.
        *_serving(engines, serving_depth(report) or recipe.head.num_depths),
        f"<details><summary>Recipe</summary>\n\n```yaml\n{_public_recipe(recipe)}```\n\n</details>",
        CLOSING,
    ]
    return "\n\n".join(parts)


def _measured(report: RunReport) -> list[str]:
    if report.settings.get("gate") == UNJUDGED:
        return [UNJUDGED_SENTENCE]
    return [
        _table(report),
        f"Lossless: {lossless_sentence(report.lossless)}",
        *([f"Gate: {capitalised(report.gate.reason)}."] if report.gate else []),
        f"Measured with mtp-train's own decoder: {_settings(report)}.",
    ]


def _retrained(recipe: Recipe, provenance: Mapping[str, Any], report: RunReport, tool: str) -> tuple[str, str]:
    """Return the sentence and the list that describe a retrained head: its trunk, start and training data."""
    trunk, base, adapter = provenance["trunk"], provenance["head_from"], recipe.model.adapter
    grafted = recipe.head.init == "graft" and base is not None
    start = f"the head of `{_name(base)}`" if grafted else f"`head.init: {recipe.head.init}`"
    said = "the model's own answers to the prompts of" if recipe.regenerates else "the text of"
    return (
        f"The weights of `{_name(trunk)}`{_state(adapter)}, and a multi-token-prediction head that was retrained for "
        f"them with {tool}. {_PURPOSE}",
        f"- started from: {start}\n- trained on: {said} {_sources(recipe)}",
    )


def _drafting(recipe: Recipe, provenance: Mapping[str, Any], report: RunReport, tool: str) -> tuple[str, str]:
    """Return the sentence and the list that describe a draft model: its trunk, vocabulary and training data."""
    trunk, size = provenance["trunk"], recipe.head.draft_vocab
    said = "the model's own answers to the prompts of" if recipe.regenerates else "the text of"
    return (
        f"A head that was trained for `{_name(trunk)}` with {tool}, to be served beside it. {_PURPOSE}",
        f"- drafts: {'all tokens' if size is None else f'the {size} tokens most frequent in its training text'}\n"
        f"- trained on: {said} {_sources(recipe)}",
    )


def _fine_tuned(recipe: Recipe, provenance: Mapping[str, Any], report: RunReport, tool: str) -> tuple[str, str]:
    """Return the sentence and the list that describe a fine-tuned trunk: method, head and training data."""
    trunk, donor = provenance["trunk"], provenance["head_from"] or provenance["trunk"]
    how = "all of them" if recipe.sft is None or recipe.sft.lora is None else "by LoRA, merged"
    passed = report.gate is not None and report.gate.passed
    became = "trained further beside the weights" if passed else "as it was: stale"
    return (
        f"The weights of `{_name(trunk)}`, fine-tuned with {tool} ({how}), and a multi-token-prediction head. "
        f"{_PURPOSE}",
        f"- head: from `{_name(donor)}`, {became}\n- trained on: the text of {_sources(recipe)}",
    )


def _sources(recipe: Recipe) -> str:
    return ", ".join(dict.fromkeys(f"`{_public_data(source.path)}`" for source in recipe.data.sources))


def _table(report: RunReport) -> str:
    groups = group_arms(report)
    rows = [("arm", *COLUMNS), ("---",) * (1 + len(COLUMNS))]
    marked = ((groups.alike, ""), (groups.apart, " \\*"), (groups.recorded, " +"))
    rows += [(name + mark, *arm_cells(arm)) for arms, mark in marked for name, arm in arms.items()]
    notes = [f"\\* {apart_sentence(groups, report.settings)}"] if groups.apart else []
    notes += ["\\+ Recorded earlier with settings of its own."] if groups.recorded else []
    notes += [held_out_sentence(report.settings)] if "held_out" in report.settings else []
    return "\n\n".join(["\n".join(f"| {' | '.join(row)} |" for row in rows), *notes])


def _settings(report: RunReport) -> str:
    shown = ("temperature", "depth", "verify_rule", "draft_sampling", "dtype", "device", "max_new_tokens")
    return ", ".join(f"{name} {report.settings[name]}" for name in shown if name in report.settings)


def _state(adapter: str | None) -> str:
    return f", with the adapter `{_public(adapter)}` merged into them" if adapter else ", bit for bit"


def _serving(engines: Mapping[str, EngineSupport], num_depths: int) -> list[str]:
    """Return the section of serving commands; empty where no engine is known to use the head."""
    known = {name: engines[name] for name in ("vllm", "sglang", "llama.cpp") if engines[name].supported}
    commands = [f"# {name}\n{command}" for name, command in engine_commands(known, ".", num_depths).items()]
    where = "In this directory; elsewhere replace `.` by the model's name:"
    if any("TRUNK" in command for command in commands):
        where = f"TRUNK is the target model. {where}"
    return ["### Serve it", where, "```bash\n{}\n```".format("\n".join(commands))] if commands else []


def _public_recipe(recipe: Recipe) -> str:
    plain: dict[str, Any] = yaml.safe_load(dump_recipe(recipe))
    for source in plain["data"]["sources"]:
        source["path"] = _public_data(source["path"])
    return dump_yaml(_without_paths(plain))


def _public_data(path: str) -> str:
    """Return a data set's id on the hub; the name of a file of one's own may be private."""
    of_hub = re.fullmatch(r"[\w.-]+/[\w.-]+", path) and not re.search(_DATA_SUFFIX, path) and not Path(path).exists()
    return path if path.startswith(PREFIX) or of_hub else "(a file)"


def _without_paths(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_without_paths(item) for item in value]
    return _public(value) if isinstance(value, str) else value


def _public(text: str) -> str:
    """Return a path or address without details of this machine: the card may be published."""
    if "://" in text:
        return "(an address)"
    return Path(text).name if text.startswith(("/", "~", "..")) else text


def _name(identity: Identity) -> str:
    hub_id = _hub_id(identity)
    return f"{hub_id}@{identity['revision'][:7]}" if hub_id else _public(identity["name"])


def _hub_id(identity: Identity) -> str | None:
    """Return a checkpoint's repository id on the hub; None for a local one."""
    return str(identity["name"]) if identity["revision"] else None
