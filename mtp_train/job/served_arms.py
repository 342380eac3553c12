"""The arms of ``gate.endpoint``: what each server has to serve, under which name, and the commands that start it.

The name of an arm contains a digest of its weights. So a server that still runs with an earlier head, or two servers
whose addresses were swapped, are refused by their name, and records belong to the weights that made them.
"""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from rich.progress import Progress

from mtp_train.evaluation.decoding import PLAIN
from mtp_train.evaluation.settings import draft_depth
from mtp_train.families import Family
from mtp_train.families.engines import NAMED_BY, EngineSupport, engine_commands
from mtp_train.heads.build import HeadPlan, native_plan
from mtp_train.job.export_run import write_export
from mtp_train.job.inputs import Inputs
from mtp_train.recipe.schema import GateServers, Recipe
from mtp_train.weights.artifact import load_artifact
from mtp_train.weights.identity import directory_files, hash_inputs
from mtp_train.weights.lora_merge import write_adapted
from mtp_train.weights.run_export import HEAD

RETRAINED = "retrained"
SERVE = "serve"
"""Directory of a run with the checkpoints to serve; removed after the verdict."""
_DIGEST_CHARS = 8
_LOCAL = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class ServedArm:
    """One arm that a server measures."""

    arm: str
    """``retrained``, or the gate's baseline."""
    field: str
    """The field of the recipe with its address."""
    url: str
    name: str
    """The name that the server must have for the model."""
    path: Path
    """The checkpoint to serve."""
    commands: Mapping[str, str]
    """Engine to the command that serves it."""

    def to_start(self) -> str:
        """Return the commands, a line each."""
        return "\n".join(f"  {engine}: {command}" for engine, command in self.commands.items())


def served_arms(
    recipe: Recipe, servers: GateServers, run_dir: Path, inputs: Inputs, progress: Progress
) -> list[ServedArm]:
    """Return the baseline and the retrained head of a run, in this order."""
    head = hash_inputs({HEAD: directory_files(run_dir / HEAD)}, {}, progress)[HEAD].contents
    depth, retrained = draft_depth(recipe), _named(RETRAINED, {**inputs.contents, HEAD: head})
    baseline = _named(recipe.gate_baseline, inputs.contents)
    # Absolute: a server may be started from anywhere.
    place, trunk_path = (run_dir / SERVE).resolve(), inputs.finetune.path.resolve()
    paths = {RETRAINED: place / retrained, "graft": place / baseline}
    paths["native"] = trunk_path if inputs.adapter is None else place / baseline
    # An MTP head is in the trunk's own checkpoint, which engines also serve without drafts.
    paths[PLAIN] = paths[RETRAINED] if recipe.head.kind == "mtp" else trunk_path
    family = inputs.head_plan.family

    def arm(name: str, field: str, url: str, served_as: str) -> ServedArm:
        found = engine_commands(_servers(family), str(paths[name]), 0 if name == PLAIN else depth)
        # Draft models are served beside their trunk.
        trunk = f" {shlex.quote(str(trunk_path))}"
        commands = {
            engine: f"{text.replace(' TRUNK', trunk)} {NAMED_BY[engine].format(served_as)} {_listening_at(url)}"
            for engine, text in found.items()
        }
        return ServedArm(name, f"gate.endpoint.{field}", url, served_as, paths[name], commands)

    return [
        arm(recipe.gate_baseline, "baseline", servers.baseline, baseline),
        arm(RETRAINED, "retrained", servers.retrained, retrained),
    ]


def _named(arm: str, contents: Mapping[str, Mapping[str, str]]) -> str:
    digest = hashlib.sha256(json.dumps({key: dict(one) for key, one in contents.items()}, sort_keys=True).encode())
    return f"{arm}-{digest.hexdigest()[:_DIGEST_CHARS]}"


def _listening_at(url: str) -> str:
    """Return the options, the same for all engines, with which a server listens at an address."""
    place = urlsplit(url)
    port = place.port or (443 if place.scheme == "https" else 80)
    # SGLang and llama.cpp are reached from their own machine only by default.
    return f"--port {port}" if place.hostname in _LOCAL else f"--host 0.0.0.0 --port {port}"


def _servers(family: Family) -> dict[str, EngineSupport]:
    return {engine: one for engine, one in family.serving.items() if engine in NAMED_BY and one.supported}


def write_served(recipe: Recipe, run_dir: Path, inputs: Inputs, arms: Sequence[ServedArm], progress: Progress) -> None:
    """Write the checkpoints to serve that are not there yet, and remove those of earlier heads."""
    place, link = (run_dir / SERVE).resolve(), recipe.export.link
    wanted = {one.path for one in arms}
    for stale in set(place.iterdir() if place.is_dir() else ()) - wanted:
        shutil.rmtree(stale)
    for one in arms:
        if one.path.exists():
            continue
        if one.arm in (RETRAINED, PLAIN):
            artifact = load_artifact(run_dir / HEAD)
            write_export(inputs.finetune, artifact, one.path, adapter=inputs.adapter, link=link, progress=progress)
            continue
        plan = _baseline_plan(recipe, inputs, one.arm)
        write_adapted(
            inputs.finetune, plan.layout, plan.template, one.path, adapter=inputs.adapter, link=link, progress=progress
        )


def _baseline_plan(recipe: Recipe, inputs: Inputs, arm: str) -> HeadPlan:
    graft = inputs.graft(recipe) if arm == "graft" else None
    return graft or native_plan(inputs.finetune, recipe.head.convention)


def remove_served(run_dir: Path) -> None:
    """Remove the checkpoints to serve; servers that run keep the files that they have open."""
    shutil.rmtree(run_dir / SERVE, ignore_errors=True)
