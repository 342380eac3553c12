"""``mtp-train rescue``: from a fine-tune without its head, or with a stale one, to a checkpoint that decodes faster.

One recipe, made of the two checkpoints with defaults for everything: the fine-tune answers prompts, the base's head is
retrained on the answers, both heads are measured on prompts held out, and the better one is exported. Where retraining
is not shown to help, that is the base's, as ``mtp-train graft`` puts it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from mtp_train.commands.inspect import serving_commands
from mtp_train.demo import PREFIX, resolve
from mtp_train.errors import GateRefusedError, MtpError
from mtp_train.evaluation import GRAFT_INSTEAD
from mtp_train.heads.attach import graft_plan
from mtp_train.heads.diagnose import diagnose_head, layout_of
from mtp_train.inputs import open_location
from mtp_train.model_card import write_graft_card
from mtp_train.pipeline import EXPORT, run
from mtp_train.recipe import Recipe
from mtp_train.recipe_io import recipe_from_mapping
from mtp_train.report.schema import REPORT_FILE, load_report
from mtp_train.run_dir import checkpoint_identity
from mtp_train.study.suites import BUILTIN_FILE
from mtp_train.weights.adapted import write_adapted
from mtp_train.weights.adapter import is_adapter, locate_adapter
from mtp_train.weights.files import locate_checkpoint, open_checkpoint

Plain = dict[str, Any]

# As recipes/retrain_head.yaml has them, measured on the demo.
_DEMO: Plain = {
    "data": {
        "sources": [{"path": "demo:prompts"}],
        "regenerate": {"max_prompts": 560, "max_new_tokens": 128, "batch_size": 32},
        "seq_len_tokens": 512,
        "holdout": 0.2,
        "group_field": "group",
    },
    "train": {
        "max_steps": 100,
        "tokens_per_step": 3072,
        "micro_batch_sequences": 3,
        "lr": 6.0e-3,
        "warmup_steps": 5,
        "save_steps": 25,
    },
    "evaluate": {"prompts": 36, "max_new_tokens": 128},
}
# FastMTP's way of sampling and learning rate (arXiv:2509.18362, section 3), at lengths that one GPU answers in hours.
_REAL: Plain = {
    "data": {
        "regenerate": {"max_prompts": 20000, "max_new_tokens": 1024, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
        "seq_len_tokens": 4096,
        "holdout": 0.05,
    },
    "train": {"max_steps": 500, "tokens_per_step": 65536, "lr": 5.0e-5, "warmup_steps": 25, "save_steps": 50},
    "evaluate": {"prompts": 64, "max_new_tokens": 256},
}
_OWN_PROMPTS = {"sources": [{"path": str(BUILTIN_FILE)}], "holdout": 0.3}
"""Of the built-in suite a third is held out: 20 prompts in a hundred would say too little."""


@dataclass(frozen=True)
class Rescued:
    """What came of it."""

    out: str
    head: str
    """``retrained``, or ``graft`` where that is not shown to be worse."""
    reason: str
    serves: dict[str, str]
    """Engine to the command that serves ``out``."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return vars(self)

    def to_text(self) -> str:
        """Return it for a reader."""
        commands = "\n".join(f"{engine}: {command}" for engine, command in self.serves.items())
        return f"{self.reason}.\nWrote {self.out}, with the {self.head} head.\n{commands}"


def rescue(
    finetune: str, base: str, out: Path, data: Sequence[str], overrides: Sequence[str], console: Console
) -> Rescued:
    """Put a head on a fine-tune, or on a LoRA adapter's merged model, retrained if that helps.

    Args:
        finetune: The fine-tune: a checkpoint, or a peft adapter of ``base``.
        base: The checkpoint that it came from, with its head.
        out: The run's directory; ``out/export`` is the checkpoint. The same command goes on where it was broken off.
        data: Prompts like those it will serve, as ``data.sources[].path``; none for built-in ones.
        overrides: Of the recipe that this makes, ``section.field=value``.
        console: Where the run prints its table.

    Raises:
        MtpError: The two do not fit, the data cannot be read, or ``out`` holds something else.
    """
    recipe = rescue_recipe(finetune, base, out, data, overrides)
    # A refusal is no end here: the base's head is what is left.
    with contextlib.suppress(GateRefusedError):
        run(recipe, console)
    gate = load_report(out / REPORT_FILE).gate
    refused = gate is not None and not gate.passed
    export = out / EXPORT
    if refused and not export.exists():
        write_graft(recipe, export)
    checkpoint = open_checkpoint(export)
    serves = serving_commands(checkpoint, diagnose_head(checkpoint), "healthy")
    # The graft that the verdict proposes is written by now.
    reason = "" if gate is None else gate.reason.partition(f". {GRAFT_INSTEAD}")[0]
    return Rescued(str(export), "graft" if refused else "retrained", reason, serves)


def rescue_recipe(finetune: str, base: str, out: Path, data: Sequence[str], overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a rescue.

    Raises:
        MtpError: A location cannot be opened, or an override is wrong.
    """
    adapter = finetune if is_adapter(locate_checkpoint(resolve(finetune))) else None
    trunk = finetune if adapter is None else base
    is_demo = trunk.startswith(PREFIX)
    sizes = _DEMO if is_demo else _REAL
    sources = {"sources": [{"path": path} for path in data]} if data else {} if is_demo else _OWN_PROMPTS
    return recipe_from_mapping(
        {
            "run_dir": str(out),
            "model": {"trunk": trunk, "head_from": base, "adapter": adapter},
            **sizes,
            "data": {**sizes["data"], **sources, **({"group_field": None} if data else {})},
            "evaluate": {**sizes["evaluate"], "arms": ["none", "graft", "retrained"]},
        },
        overrides,
    )


def write_graft(recipe: Recipe, out: Path) -> None:
    """Write the recipe's trunk with the base's own head, an adapter merged."""
    model = recipe.model
    if model.head_from is None or recipe.gate_baseline != "graft":
        raise MtpError(
            f"gate.baseline: {recipe.gate_baseline} in a rescue; expected graft, which is what a head that got no "
            "better is replaced by. Leave the override out."
        )
    finetune = open_location(model.trunk)
    base = open_location(model.head_from)
    plan = graft_plan(finetune, base, recipe.head.convention)
    adapter = locate_adapter(model.adapter, model.trunk) if model.adapter else None
    with Progress(disable=True) as progress:
        write_adapted(
            finetune,
            layout_of(finetune),
            plan.template,
            out,
            adapter=adapter,
            link=recipe.export.link,
            progress=progress,
        )
    identities = checkpoint_identity(model.trunk, finetune), checkpoint_identity(model.head_from, base)
    write_graft_card(out, *identities, model.adapter, recipe.head.num_depths)
