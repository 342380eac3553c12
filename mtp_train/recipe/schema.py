"""Define the recipe: its sections, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from mtp_train.head_kinds import find_head_kind
from mtp_train.recipe.sections import (
    Baseline,
    DataSection,
    EvaluateSection,
    ExportSection,
    GateSection,
    HeadSection,
    ModelSection,
    ObjectiveSection,
    RecipeSection,
    StudySection,
    Text,
    TrackSection,
    TrainSection,
)


class Recipe(RecipeSection):
    """One run: from a trunk and training text to an exported head."""

    run_dir: Text
    """The directory of all outputs. The same recipe with the same inputs resumes there; another recipe is refused."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of the held-out split, the order of the data and random weights."""
    model: ModelSection
    head: HeadSection = Field(default_factory=HeadSection)
    data: DataSection
    objective: ObjectiveSection = Field(default_factory=ObjectiveSection)
    train: TrainSection
    evaluate: EvaluateSection
    gate: GateSection = Field(default_factory=GateSection)
    export: ExportSection = Field(default_factory=ExportSection)
    track: TrackSection = Field(default_factory=TrackSection)
    study: StudySection | None = None
    """Run a study with several retrained heads; null is the usual run with one head, a gate and an export."""

    @property
    def gate_baseline(self) -> Baseline:
        """The arm that the retrained head must beat, with ``auto`` resolved."""
        if self.gate.baseline != "auto":
            return self.gate.baseline
        if self.head.init == "native":
            return "native"
        return "none" if self.model.head_from is None else "graft"

    @property
    def draft_depth(self) -> int:
        """Drafts per round of the run's arms."""
        return self.head.num_depths if self.evaluate.depth is None else self.evaluate.depth

    @property
    def fresh_modules(self) -> int:
        """Number of modules of a new head: one, or one per depth where the modules are parallel."""
        return self.head.num_depths if find_head_kind(self.head.kind).parallel else 1

    @property
    def regenerates(self) -> bool:
        """Whether the trunk generates the responses in the training text."""
        return self.data.answered is not None

    @property
    def decodes(self) -> bool:
        """Whether a run decodes with the trunk, so that each process has to hold all of it."""
        answered = self.data.answered
        return self.gate.enabled or (answered is not None and answered.endpoint is None)

    def contradictions(self) -> Iterator[str]:
        yield from self._of_arms()
        yield from self._of_the_head()
        yield from self._of_training()
        yield from self._of_the_study()

    def _of_arms(self) -> Iterator[str]:
        donor, arms, baseline, init = self.model.head_from, self.evaluate.arms, self.gate_baseline, self.head.init
        if init == "graft" and donor is None:
            yield (
                "head.init: 'graft' while model.head_from is null; expected a checkpoint to take the head from. Name "
                "the fine-tune's base in model.head_from, or write head.init: native (the trunk has a head) or "
                "copy_last_layer (it has none)."
            )
        for arm in ("graft", "vanilla"):
            if arm in arms and donor is None:
                yield (
                    f"evaluate.arms: {arm!r} while model.head_from is null; expected a checkpoint with a head. Name it "
                    "in model.head_from, or remove the arm."
                )
        if donor is not None and not {init, baseline, *arms} & {"graft", "vanilla"}:
            yield (
                f"model.head_from: {donor!r}, which nothing uses; expected head.init: graft, or an arm 'graft' or "
                "'vanilla'. Write one of the three, or model.head_from: null."
            )
        if self.export.enabled and "retrained" not in arms:
            yield (
                "evaluate.arms: no 'retrained' while export.enabled is true; expected an arm that measures the head "
                "before its export. Add 'retrained', or write export.enabled: false."
            )
        if self.gate.baseline == "graft" and init == "native":
            yield (
                "gate.baseline: 'graft' with head.init: native; expected the head from which training starts. Write "
                "gate.baseline: auto."
            )
        elif "retrained" in arms and baseline not in arms:
            origin = f" ({baseline!r})" if self.gate.baseline == "auto" else ""
            yield (
                f"gate.baseline: {self.gate.baseline!r}{origin}, which is not in evaluate.arms; expected one of these "
                f"arms. Add {baseline!r} to evaluate.arms."
            )

    def _of_the_head(self) -> Iterator[str]:
        head, objective = self.head, self.objective
        if find_head_kind(head.kind).parallel and objective.unroll != "exact":
            yield (
                f"objective.unroll: {objective.unroll!r} with head.kind: {head.kind}, which has no attention; expected "
                "exact. Write objective.unroll: exact."
            )

        depth = self.evaluate.depth
        if find_head_kind(head.kind).parallel and (depth or 0) > head.num_depths:
            yield (
                f"evaluate.depth: {depth} with head.kind: {head.kind} and head.num_depths: {head.num_depths}; expected "
                f"at most {head.num_depths}, because each depth has its own module. Lower it, or raise head.num_depths."
            )

    def _of_training(self) -> Iterator[str]:
        tokens, seq_len = self.train.tokens_per_step, self.data.seq_len_tokens
        sequences = self.train.micro_batch_sequences
        unit = seq_len * sequences
        if tokens % unit:
            below = tokens // unit * unit
            values = f"{below} or {below + unit}" if below else str(unit)
            yield (
                f"train.tokens_per_step: {tokens}; expected a multiple of {unit} (data.seq_len_tokens {seq_len} x "
                f"train.micro_batch_sequences {sequences}). Write {values}."
            )
        # Depth k at row t predicts token t + k + 1, so row 0 needs num_depths + 2 tokens.
        least = self.head.num_depths + 2
        if seq_len < least:
            yield (
                f"data.seq_len_tokens: {seq_len}; expected {least} or more, so that depth {self.head.num_depths} has a "
                "target. Raise it, or lower head.num_depths."
            )

    def _of_the_study(self) -> Iterator[str]:
        if self.study is None:
            return
        missing = [arm for arm in ("graft", "retrained", "vanilla") if arm not in self.evaluate.arms]
        if missing:
            yield (
                f"evaluate.arms: no {missing[0]!r} in a study; expected all three arms that its verdict compares. "
                "Write evaluate.arms: [graft, retrained, vanilla]."
            )
        if self.head.convention != "auto":
            yield (
                f"head.convention: {self.head.convention!r} in a study, whose heads have the usual wiring of their "
                "family; expected auto. Write head.convention: auto."
            )
        if self.model.offload is not None:
            yield (
                f"model.offload: {self.model.offload!r} in a study, which measures trunks that are whole on the "
                "device; expected null. Write model.offload: null, or model.quantization: 4bit."
            )
        if self.export.enabled:
            yield (
                "export.enabled: true in a study, which has several heads and no gate; expected false. Write "
                "export.enabled: false; a recipe without a study exports."
            )
        if not self.gate.enabled:
            yield "gate.enabled: false with study, which measures in any case; expected true. Leave it out."
