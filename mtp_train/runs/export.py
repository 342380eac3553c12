"""Write an export and its model card: the trunk with its MTP head, or a draft model for EAGLE and Medusa heads.

The card states where the parts are from, what was measured, and how to serve and upload the export.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from mtp_train import __version__
from mtp_train.checkpoints.adapter import plan_merge, read_adapter
from mtp_train.checkpoints.artifact import Artifact, load_artifact
from mtp_train.checkpoints.draft_checkpoint import write_draft_checkpoint
from mtp_train.checkpoints.export import LinkMode, write_checkpoint
from mtp_train.checkpoints.files import Checkpoint, is_gguf, open_checkpoint, read_json
from mtp_train.checkpoints.gguf.model_file import open_gguf
from mtp_train.checkpoints.locations import EXPORT, RECIPE_FILE
from mtp_train.checkpoints.writing import write_text
from mtp_train.evaluation.results import REPORT_FILE, UNJUDGED_SENTENCE, Report, load_report
from mtp_train.families import Family
from mtp_train.families.engines import EngineSupport, engine_commands
from mtp_train.head_kinds import HeadKind
from mtp_train.heads.diagnose import text_config_of
from mtp_train.recipe.loading import dump_yaml, load_recipe
from mtp_train.report import wording
from mtp_train.runs.inputs import require_exportable
from mtp_train.runs.run_directory import PROVENANCE_FILE

Identity = Mapping[str, Any]
CARD_FILE, _TAG = "README.md", "speculative-decoding"
_PURPOSE = (
    "The head drafts the next tokens and the model verifies them in one pass. Generation is faster, with an unchanged "
    "distribution of the output; in bf16, near ties between tokens may fall otherwise."
)
_UNTRAINED = "It was not trained for these weights. `mtp-train evaluate .` measures its acceptance on them."
_UPLOAD = """## Upload it

This uploads every file of this directory. First add the `license` of the base model to the metadata above.

```bash
hf upload OWNER/NAME . --private
```
"""


def write_export(
    trunk: Checkpoint,
    artifact: Artifact,
    out: Path,
    *,
    adapter: Path | None,
    link: LinkMode,
    progress: Progress,
) -> str | None:
    """Write a head to a new directory: an MTP head inside its trunk's checkpoint, other kinds as a draft model.

    An ``adapter`` is merged into the exported trunk. Returns what :func:`write_checkpoint` found of the trunk.
    """
    if not artifact.kind.has_file:
        merge = None if adapter is None else plan_merge(trunk, read_adapter(adapter))
        return write_checkpoint(trunk, artifact.head, out, link=link, progress=progress, merge=merge)
    require_exportable(trunk, artifact.kind, adapter)
    write_draft_checkpoint(
        trunk,
        replace(artifact, layout=replace(trunk.layout, family=artifact.family)),
        artifact.family.classes.config(text_config_of(trunk), artifact.num_modules),
        out,
    )
    return None


def serves_of(
    export: Path,
    family: Family,
    depth: int,
    report: Report | None = None,
    *,
    trunk: Path | None = None,
    gguf: str | None = None,
) -> dict[str, str]:
    """Return, per engine, the command that serves an export: a checkpoint with an MTP head, or a draft model.

    Args:
        family: The head's.
        depth: Drafts a round, unless the report of the export's run recommends a number, as its card does.
        trunk: The checkpoint that the export will be written from; None for an export that exists.
        gguf: The command that serves a GGUF file with the head in it, up to the drafter's options; None for a run,
            whose recipe names the trunk, and for checkpoints.
    """
    if report is not None:
        depth = wording.serving_depth(report) or depth
    engines = family.serving if family.kind.has_file else open_checkpoint(trunk or export).engines
    commands = engine_commands(engines, str(export), depth)
    gguf = gguf or _gguf_command(export, family.kind)
    if gguf is not None and engines["llama.cpp"].supported:
        commands["llama.cpp"] = f"{gguf} --spec-type draft-{family.kind.name} --spec-draft-n-max {depth}"
    return commands


def _gguf_command(export: Path, kind: HeadKind) -> str | None:
    """Return how llama.cpp serves a run's trunk that is a GGUF file, with the run's head; None for another export."""
    run_dir = export.parent
    # A recipe beside another output may be any.
    if export.name != EXPORT or not (run_dir / PROVENANCE_FILE).is_file():
        return None
    trunk = Path(load_recipe(run_dir / RECIPE_FILE).model.trunk)
    if not is_gguf(trunk):
        return None
    run, head, whole, file = map(shlex.quote, (str(run_dir), f"{run_dir}-head", f"{trunk.stem}-mtp.gguf", str(trunk)))
    if not kind.has_file and trunk.is_file() and open_gguf(trunk).head:
        # llama.cpp takes a head in the file or one beside it, not both.
        return f"mtp-train graft {file} --from {run} --out {whole} && llama-server -m {whole}"
    return f"mtp-train export {run} --out {head} --gguf q8_0 && llama-server -m {file} -md {head}/{kind.name}-*.gguf"


def write_card(run_dir: Path, out: Path) -> None:
    recipe = load_recipe(run_dir / RECIPE_FILE)
    provenance = read_json(run_dir / PROVENANCE_FILE)
    report = load_report(run_dir / REPORT_FILE)
    trunk = provenance["trunk"]
    base = provenance["head_from"]
    tool = f"mtp-train {provenance['versions']['mtp-train']}"
    if not recipe.kind.has_file:
        engines = open_checkpoint(out).engines
        title = f"{_name(trunk)}, with its MTP head"
        start = f"the head of `{_name(base)}`" if recipe.head.init == "graft" else f"`head.init: {recipe.head.init}`"
        origin = f"The weights of `{_name(trunk)}`{_state(recipe.model.adapter)}, and a multi-token-prediction head "
        origin += f"that was retrained for them with {tool}, started from {start}."
    else:
        engines = load_artifact(run_dir / "head").family.serving
        base = None
        title = f"{recipe.kind.title} draft model for {_name(trunk)}"
        origin = f"A head that was trained for `{_name(trunk)}` with {tool}, to be served beside it."
    # The depth that the report recommends, which the commands must not contradict.
    depth = wording.serving_depth(report) or recipe.head.num_depths
    measured = [UNJUDGED_SENTENCE]
    if report.gate is not None:
        reason = wording.capitalised(report.gate.reason)
        lossless = wording.lossless_sentence(report.lossless)
        told = f"{reason}. {lossless} {wording.held_out_sentence(report.settings)}".rstrip()
        measured = [f"## Acceptance: {report.gate.outcome}", told]
    parts = [f"{origin} {_PURPOSE}", *measured, *_serving(engines, depth)]
    _write(out, title, [recipe.head.kind, _TAG], [trunk, base], parts)


def write_untrained_card(
    out: Path, trunk: Identity, head_from: Identity | None, adapter: str | None, num_depths: int
) -> None:
    """Write the card of a graft or a merge: the identities of trunk and head (None: no head), the merged adapter."""
    title = f"{_name(trunk)}, with an adapter merged"
    tags = list[str]()
    parts = list[str]()
    origin = f"Written by mtp-train {__version__}: the weights of `{_name(trunk)}`{_state(adapter)}"
    if head_from is not None:
        title = f"{_name(trunk)}, with an MTP head"
        tags = ["mtp", _TAG]
        origin += f", and the multi-token-prediction head of `{_name(head_from)}` as it is"
        parts = [f"{_PURPOSE} {_UNTRAINED}", *_serving(open_checkpoint(out).engines, num_depths)]
    _write(out, title, tags, [trunk, head_from], [f"{origin}.", *parts])


def _write(out: Path, title: str, tags: Sequence[str], bases: Sequence[Identity | None], parts: Sequence[str]) -> None:
    """Write the card in place of the trunk's; its ``base_model`` is the first of ``bases`` that is on the hub."""
    hub_id = next((base["name"] for base in bases if base is not None and base["revision"]), None)
    fields = {"base_model": hub_id, "library_name": "transformers", "tags": tags}
    header = dump_yaml({name: value for name, value in fields.items() if value})
    # `write_text` renames a new file into place: the existing one may be a hard link to the trunk's card.
    if not (out / CARD_FILE).is_dir():
        write_text(out / CARD_FILE, "\n\n".join([f"---\n{header}---", f"# {title}", *parts, _UPLOAD]))


def _serving(engines: Mapping[str, EngineSupport], num_depths: int) -> list[str]:
    known = {name: engines[name] for name in ("vllm", "sglang", "llama.cpp") if engines[name].supported}
    commands = "\n".join(f"# {name}\n{line}" for name, line in engine_commands(known, ".", num_depths).items())
    where = "In this directory; elsewhere replace `.` by the model's name. TRUNK is the target model of a draft model."
    return ["## Serve it", where, f"```bash\n{commands}\n```"] if commands else []


def _state(adapter: str | None) -> str:
    return f", with the adapter `{Path(adapter).name}` merged into them" if adapter else ", bit for bit"


def _name(identity: Identity) -> str:
    """Return the id on the hub, or the last part of a path of this machine: the card may be published."""
    name = identity["name"]
    revision = identity["revision"]
    return f"{name}@{revision[:7]}" if revision else Path(name).resolve().name
