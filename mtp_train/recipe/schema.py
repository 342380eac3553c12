"""Define the recipe: its sections, and the rules between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from mtp_train.head_kinds import HeadKind, find_head_kind
from mtp_train.recipe.sections import (
    AUTOMATIC,
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
    is_auto,
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
    def automatic(self) -> list[str]:
        """The fields that are still to be chosen."""

        def value_of(field: str) -> object:
            value: object = self
            for name in field.split("."):
                value = getattr(value, name, None)
            return value

        return [field for field in AUTOMATIC if is_auto(value_of(field))]

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
    def kind(self) -> HeadKind:
        return find_head_kind(self.head.kind)

    @property
    def fresh_modules(self) -> int:
        """Number of modules of a new head: one, or one per depth where the modules are parallel."""
        return self.head.num_depths if self.kind.parallel else 1

    @property
    def decodes(self) -> bool:
        """Whether a run decodes with the trunk, so that each process has to hold all of it."""
        answers = self.data.regenerate
        return self.gate.enabled or (answers is not None and answers.endpoint is None)

    def contradictions(self) -> Iterator[str]:
        yield from self._of_arms()
        yield from self._of_states()
        yield from self._of_the_head()
        yield from self._of_the_study()

    def _of_arms(self) -> Iterator[str]:
        donor = self.model.head_from
        arms = self.evaluate.arms
        baseline = self.gate_baseline
        init = self.head.init
        if init == "graft" and donor is None:
            yield (
                "head.init: 'graft' while model.head_from is null; expected the checkpoint that has the head. Name it, "
                "or write head.init: native (the trunk has a head) or copy_last_layer (it has none)."
            )
        for arm in ("graft", "vanilla"):
            if arm in arms and donor is None:
                yield f"evaluate.arms: {arm!r} while model.head_from is null; expected a checkpoint. Name it."
        if donor is not None and not {init, baseline, *arms} & {"graft", "vanilla"}:
            yield f"model.head_from: {donor!r}, which nothing uses; expected null. Write model.head_from: null."
        if self.export.enabled and "retrained" not in arms:
            yield "evaluate.arms: no 'retrained' while export.enabled is true; expected it. Add it to the arms."
        if self.gate.baseline == "graft" and init == "native":
            added = "" if "native" in arms else ", and add native to evaluate.arms"
            yield f"gate.baseline: 'graft' with head.init: native; expected native. Write gate.baseline: auto{added}."
        elif "retrained" in arms and baseline not in arms:
            yield f"gate.baseline: {baseline!r}, which is not in evaluate.arms; expected one of these. Add it there."

    def _of_states(self) -> Iterator[str]:
        cures = {
            "adapter": "Merge it (mtp-train merge), and serve what that writes",
            "offload": "Leave it out, as no layer is loaded here",
            "quantization": "Leave it out, and let the server quantise",
        }
        for name, cure in cures.items():
            value = getattr(self.model, name)
            if self.train.states is not None and value is not None:
                yield f"model.{name}: {value!r} with train.states, whose server runs the trunk; expected null. {cure}."

    def _of_the_head(self) -> Iterator[str]:
        head, unroll, depth = self.head, self.objective.unroll, self.evaluate.depth
        most = self.kind.deepest
        studied = 0 if self.study is None else max(self.study.depths)
        fields = {"head.num_depths": head.num_depths, "evaluate.depth": depth or 0, "study.depths": studied}
        for field, asked in fields.items():
            if asked > most:
                yield f"{field}: {asked} with head.kind: {head.kind}; expected {most} or less. Write {field}: {most}."
        if not self.kind.apart and unroll != "exact":
            yield f"objective.unroll: {unroll!r} with head.kind: {head.kind}; expected exact. Leave it out."
        if self.kind.parallel and (depth or 0) > head.num_depths:
            yield f"evaluate.depth: {depth} with head.kind: {head.kind}; expected head.num_depths or less. Lower it."

        seq_len = self.data.seq_len_tokens
        # Depth k at row t predicts token t + k + 1, so row 0 needs num_depths + 2 tokens.
        least = head.num_depths + 2
        if not is_auto(seq_len) and seq_len < least:
            yield f"data.seq_len_tokens: {seq_len}; expected {least} or more. Raise it, or lower head.num_depths."

    def _of_the_study(self) -> Iterator[str]:
        if self.study is None:
            return
        missing = [arm for arm in ("graft", "retrained", "vanilla") if arm not in self.evaluate.arms]
        if missing:
            yield f"evaluate.arms: no {missing[0]!r} in a study; expected graft, retrained and vanilla. Add it."
        if self.head.convention != "auto":
            yield f"head.convention: {self.head.convention!r} in a study; expected auto. Leave it out."
        if self.model.offload is not None:
            yield f"model.offload: {self.model.offload!r} in a study; expected null. Use model.quantization instead."
        if self.export.enabled:
            yield "export.enabled: true in a study of several heads; expected false. Write export.enabled: false."
        if not self.gate.enabled:
            yield "gate.enabled: false with study, which measures in any case; expected true. Leave it out."
