"""Run the cells of the atlas: heads of one fine-tune that differ in one thing from a reference, measured alike."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from torch.nn.functional import kl_div, log_softmax

import mtp_train as mtp
from ablate import Bench, Counts, open_bench, tau
from atlas_maker.finetunes import FRESH, SAME, prompts_of
from demo_maker.install import prompt_lines, write_lines
from demo_maker.model import load_trunk_to_train
from demo_maker.texts import Texts
from mtp_train.acceptance.gate import decide_gate
from mtp_train.acceptance.speed import Pair
from mtp_train.checkpoints.files import read_json
from mtp_train.data.groups import stable_share
from mtp_train.data.pack import collate, pack_documents
from mtp_train.data.tokenize import Document
from mtp_train.recipe.loading import load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.resolve import lr_choice
from mtp_train.train.packed_rows import aligned_rows
from mtp_train.train.teacher_forced import DenseSums, dense_sums
from mtp_train.trunk.states import isolated_hidden
from recorded_ablation import prompt_counts

RECIPE = Path(__file__).parents[2] / "recipes" / "retrain_head.yaml"
TEMPERATURES = (0.0, 0.7)
OWN, CORPUS, CONTROL = "own", "corpus", "control"
"""Texts to train on: the fine-tune's own answers, answers of the kind that it was trained on, and the base's."""
FEW, SOME, MANY = 100, 400, 1300
KEPT_SHARE = 0.1
"""Share of the groups whose texts no head is trained on: scores are compared on them."""
SETTINGS = {
    "objective.loss": "kl",
    "data.holdout": 0.2,
    "data.regenerate.max_new_tokens": 160,
    "data.regenerate.batch_size": 64,
    "train.max_steps": 100,
    "train.tokens_per_step": 1536,
    "train.save_steps": 100,
    "evaluate.arms": "[graft, retrained]",
    "evaluate.prompts": 48,
    "evaluate.max_new_tokens": 96,
    "gate.enabled": "false",
    "export.enabled": "false",
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One training. Defaults are the reference."""

    loss: str = "kl"
    text: str = OWN
    rate: float = 1.0
    """Learning rate over that of the rule of ``train.lr: auto`` for a stale head."""
    answers: int = SOME
    seed: int = 0

    @property
    def name(self) -> str:
        return f"{self.text}-{self.answers}-{self.loss}-{self.rate:g}-{self.seed}"


REFERENCE = Cell()
FIFTH, TWENTY_FIFTH = Cell(rate=0.2), Cell(rate=0.04)
NAMES = (
    *("json", "style", "prose", "lora_mild", "lora_strong", "distilled", "pruned", "direction", "sharp", "flat"),
    *(SAME, FRESH),
)
BY_CELL: dict[Cell, Sequence[str]] = {
    REFERENCE: NAMES,
    FIFTH: NAMES,
    Cell(loss="ce"): NAMES,
    Cell(text=CORPUS): NAMES,
    Cell(text=CONTROL): NAMES[:-2],
    TWENTY_FIFTH: ("lora_mild", "distilled", "pruned", "direction", "sharp", "flat", SAME),
    Cell(loss="e2e_tv"): ("json", "prose", "lora_strong", "sharp", "flat"),
    Cell(answers=FEW): ("json", "style", "lora_strong"),
    Cell(answers=MANY): ("json", "style", "lora_strong"),
    Cell(seed=1): ("json", "style"),
    Cell(seed=2): ("json", "style"),
}
"""The design: which fine-tunes have a cell, in the order of work. 80 cells."""


BEFORE_RL = (REFERENCE, Cell(loss="ce"), Cell(loss="e2e_tv"))
AFTER_RL = (SAME, "sharp", "flat")
"""Heads of the base that are measured after its entropy has changed, as it may by RL; and, first, before."""


def cells_of(name: str) -> list[Cell]:
    return [cell for cell, names in BY_CELL.items() if name in names]


@dataclass(frozen=True)
class Place:
    """Where the base, the fine-tunes and their runs lie, and where records go."""

    work: Path
    records: Path
    texts: Texts

    @property
    def base(self) -> Path:
        return self.work / "base"

    def tuned(self, name: str) -> Path:
        return self.base if name == SAME else self.work / name / "finetune"

    def donor(self, name: str) -> Path:
        """Return what holds the head to begin with."""
        return self.tuned(name) if name == FRESH else self.base

    def prompts(self, name: str) -> Path:
        path = self.work / name / "prompts.jsonl"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_lines(path, prompt_lines(replace(self.texts, prompts=prompts_of(name, self.texts))))
        return path

    def recipe(self, name: str, trunk: Path, run: Path) -> Recipe:
        largest = max(cell.answers for cell in cells_of(name))
        changes = {
            **SETTINGS,
            "run_dir": run,
            "model.trunk": trunk,
            "model.head_from": self.donor(name),
            "data.sources.0.path": self.prompts(name),
            "data.regenerate.max_prompts": round(largest / (1 - KEPT_SHARE) * 1.1),
        }
        return load_recipe(RECIPE, [f"{field}={value}" for field, value in changes.items()])


def is_kept(document: Document) -> bool:
    return stable_share(document.group, 1) < KEPT_SHARE


class Study:
    """The cells of one fine-tune, and their record."""

    def __init__(self, place: Place, name: str, console: Console) -> None:
        self.place, self.name, self.console = place, name, console
        self.path = place.records / f"{name}.json"
        self.record: dict[str, Any] = read_json(self.path) if self.path.exists() else {}
        weights = sorted(place.base.glob("*.safetensors"))
        base = hashlib.sha256(b"".join(file.read_bytes() for file in weights)).hexdigest()
        if self.record.setdefault("base", base) != base:
            raise SystemExit(
                f"{self.path}: cells of another base, which this machine does not have; expected those of "
                f"{place.base}. Move the file away to begin this fine-tune again."
            )
        self.bench = self._open(name, place.tuned(name), place.work / name / "run")
        groups = [one.group for one in self.bench.run.inputs.text.held_out]
        if self.record.setdefault("groups", groups) != groups:
            raise SystemExit(f"{self.path}: cells of other prompts. Give --work as it was given for them.")

    def _open(self, name: str, trunk: Path, run: Path) -> Bench:
        with Progress(console=self.console, disable=True) as progress:
            bench = open_bench(self.place.recipe(name, trunk, run), run, progress)
        # In an order of their own, so that fewer answers are a part of more, and texts of the same prompts.
        own, corpus = (
            sorted(bench.texts[text], key=lambda document: stable_share(document.id, 2)) for text in ("self", "corpus")
        )
        return replace(bench, texts={OWN: own, CORPUS: corpus}, temperatures=TEMPERATURES)

    def text(self, cell: Cell) -> list[Document]:
        """Return a cell's training text."""
        if cell.text == CONTROL and CONTROL not in self.bench.texts:
            of_base = self._open(self.name, self.place.base, self.place.work / self.name / "control")
            self.bench.texts[CONTROL] = of_base.texts[OWN]
        return [one for one in self.bench.texts[cell.text] if not is_kept(one)][: cell.answers]

    def run(self) -> None:
        """Measure what comes before training, then run every cell that the record lacks."""
        if "graft" not in self.record:
            self.record["moved"] = moved(self.place, self.name, self.kept(OWN))
            self.record["graft"] = self._measured(None)
            self.save()
        if "probe" not in self.record:
            self.record["probe"] = probe(self.place, self.name)
            self.save()
        for cell in cells_of(self.name):
            if cell.name not in self.record.setdefault("cells", {}):
                self.record["cells"][cell.name] = {**asdict(cell), **self._cell(cell)}
                self.save()
        if self.name in AFTER_RL and "before_rl" not in self.record:
            before = self if self.name == SAME else Study(self.place, SAME, self.console)
            self.record["before_rl"] = {one.name: self._measured(before.trained(one)) for one in BEFORE_RL}
            self.save()

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.record) + "\n", encoding="utf-8")

    def kept(self, text: str) -> list[Document]:
        return [one for one in self.bench.texts[text] if is_kept(one)]

    def _cell(self, cell: Cell) -> dict[str, Any]:
        # A text may have to be written first.
        documents, started = len(self.text(cell)), time.process_time()
        directory = self.trained(cell)
        seconds = time.process_time() - started
        return {**self._measured(directory), "documents": documents, "train_cpu_seconds": round(seconds)}

    def trained(self, cell: Cell) -> Path:
        """Return the directory of a cell's head, which is trained unless it is there."""
        directory = self.place.work / self.name / cell.name
        recipe = self.bench.run.recipe
        rate = lr_choice(recipe, self.bench.trunk.lm_head_VD.shape[1]).value
        changes = {"seed": cell.seed, "objective.loss": cell.loss, "train.lr": rate * cell.rate}
        self.bench.train(recipe.replaced(changes), self.text(cell), directory)
        return directory

    def _measured(self, directory: Path | None) -> dict[str, Any]:
        """Return a head's counts of every held-out prompt, and its scores on the texts that no head is trained on."""
        counts = self.bench.measure(directory)
        head = "graft" if directory is None else directory.relative_to(self.place.work)
        self.console.print(
            f"{self.name}, {head}: " + ", ".join(f"T={t} tau {tau(found):.3f}" for t, found in counts.items())
        )
        return {
            "counts": counts,
            "scores": {text: scores(self.bench, directory, self.kept(text)) for text in (OWN, CORPUS)},
            "gate": None if directory is None else self._gate(counts),
        }

    def _gate(self, counts: Counts) -> str:
        """Return the gate's outcome against the graft."""
        both = counts, self.record["graft"]["counts"]
        pairs = {
            one: Pair(*(prompt_counts(of[one], enumerate(self.record["groups"])) for of in both)) for one in counts
        }
        return decide_gate(pairs, "graft").outcome


@torch.inference_mode()
def scores(bench: Bench, directory: Path | None, documents: Sequence[Document]) -> Mapping[str, float | None]:
    """Return a head's teacher-forced figures on texts, as ``train.select`` computes them."""
    recipe, drafting, trunk = bench.run.recipe, bench.drafting(directory), bench.trunk
    sums = []
    trunk.show_to(drafting.head)
    for one in pack_documents(documents, recipe.data.seq_len_tokens, pack=True, seed=0, epoch=0):
        batch = collate([one])
        hidden_BTD = isolated_hidden(trunk, batch.tokens_BT, batch.document_BT)
        rows = aligned_rows(trunk, drafting.head, batch, hidden_BTD, recipe.head.num_depths)
        sums.append(torch.stack(dense_sums(rows, trunk, drafting.head)))
    return DenseSums(*torch.stack(sums).sum(0)).figures()


@torch.inference_mode()
def moved(place: Place, name: str, documents: Sequence[Document]) -> dict[str, float]:
    """Return how far a fine-tune's distribution is from the base's, on the fine-tune's own answers."""
    base, tuned = (load_trunk_to_train(path).eval() for path in (place.base, place.tuned(name)))
    divergence, agreed, count = 0.0, 0, 0
    for document in documents:
        mask_T = torch.from_numpy(document.loss_mask).roll(-1)
        mask_T[-1] = False
        tokens_BT = torch.from_numpy(document.input_ids).long()[None]
        p_NV, q_NV = (log_softmax(model(input_ids=tokens_BT).logits[0][mask_T].float(), -1) for model in (tuned, base))
        divergence += float(kl_div(q_NV, p_NV, log_target=True, reduction="sum"))
        agreed += int((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
        count += len(p_NV)
    return {"kl": divergence / count, "same_top_token": agreed / count, "tokens": count}


def probe(place: Place, name: str) -> dict[str, Any]:
    """Return what ``mtp-train probe`` says before any training."""
    started = time.process_time()
    out = place.work / name / "probe"
    found = mtp.probe(place.tuned(name), place.donor(name), out, data=[place.prompts(name)])
    fields = ("verdict", "reason", "lost_overlap", "lost_overlap_ci95", "trained_tau", "gain_ci95", "trained_steps")
    return {
        **{field: getattr(found, field) for field in fields},
        "graft_tau": found.graft.tau,
        "base_tau": None if found.base is None else found.base.tau,
        "cpu_seconds": round(time.process_time() - started),
    }
