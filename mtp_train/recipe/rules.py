"""Check the rules between the fields of a recipe; each violation has a message with a hint."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mtp_train.head_kinds import find_head_kind
from mtp_train.losses.catalogue import find_loss
from mtp_train.recipe.json_schema import shown
from mtp_train.recipe.schema import AUTO, Recipe

Check = Callable[[Recipe], Iterator[str]]
MIN_TEMPERATURE = 1e-3
"""Lowest temperature above 0 that the decoder samples at (``mtp_inference.sampling.distributions``)."""


@dataclass(frozen=True)
class Rule:
    """A check, and the dotted paths of all fields that it reads: it is skipped if one of them has no usable value."""

    reads: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def _reads(*paths: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(paths, check))
        return check

    return register


def contradictions(recipe: Recipe, usable: Callable[[tuple[str, ...]], bool]) -> list[str]:
    """Return one line per contradiction, ``"{path}: {found}; expected {rule}. {hint}"``.

    Args:
        recipe: The recipe; some of its fields may have no usable value.
        usable: Returns whether the values at some dotted paths are usable.
    """
    return [problem for rule in RULES if usable(rule.reads) for problem in rule.check(recipe)]


MAX_TOKENS = 2**53
"""Most tokens of a training. Reports store counts in JSON, whose readers represent larger numbers inexactly."""


@_reads("train.max_steps", "train.tokens_per_step")
def _tokens_can_be_counted(recipe: Recipe) -> Iterator[str]:
    tokens = recipe.train.max_steps * recipe.train.tokens_per_step
    if tokens > MAX_TOKENS:
        yield (
            f"train.max_steps: {shown(recipe.train.max_steps)} x train.tokens_per_step "
            f"{shown(recipe.train.tokens_per_step)}; expected at most {MAX_TOKENS} tokens in all (2**53), which JSON "
            "counts exactly. Lower train.max_steps."
        )


@_reads("run_dir", "model.trunk", "model.head_from", "model.adapter", "data.sources", "data.responses")
def _paths_have_no_nul(recipe: Recipe) -> Iterator[str]:
    model = recipe.model
    paths = {"run_dir": recipe.run_dir, "model.trunk": model.trunk, "model.head_from": model.head_from}
    paths |= {"model.adapter": model.adapter, "data.responses": recipe.data.responses}
    paths |= {f"data.sources.{number}.path": source.path for number, source in enumerate(recipe.data.sources)}
    for field, path in paths.items():
        if "\0" in (path or ""):
            yield f"{field}: {shown(path)} contains a NUL character; expected a path. Remove the character."


@_reads("head.kind", "head.init")
def _other_kinds_start_from_random_weights(recipe: Recipe) -> Iterator[str]:
    if recipe.head.kind != "mtp" and recipe.head.init != "random":
        yield (
            f"head.init: {recipe.head.init!r} with head.kind: {recipe.head.kind}; expected 'random', because no layer "
            "of a trunk fits into such a head. Write head.init: random."
        )


@_reads("head.kind", "head.num_depths", "evaluate.depth")
def _parallel_modules_draft_no_deeper_than_their_number(recipe: Recipe) -> Iterator[str]:
    if find_head_kind(recipe.head.kind).parallel and (recipe.evaluate.depth or 0) > recipe.head.num_depths:
        yield (
            f"evaluate.depth: {recipe.evaluate.depth} with head.kind: {recipe.head.kind} and head.num_depths: "
            f"{recipe.head.num_depths}; expected at most {recipe.head.num_depths}, because each depth has its own "
            "module. Lower it, or raise head.num_depths."
        )


@_reads("head.kind", "objective.unroll")
def _parallel_modules_have_no_attention_to_mask(recipe: Recipe) -> Iterator[str]:
    if find_head_kind(recipe.head.kind).parallel and recipe.objective.unroll != "exact":
        yield (
            f"objective.unroll: {recipe.objective.unroll!r} with head.kind: {recipe.head.kind}, which has no "
            "attention; expected exact. Write objective.unroll: exact."
        )


@_reads("head.init", "model.head_from")
def _graft_has_a_donor(recipe: Recipe) -> Iterator[str]:
    if recipe.head.init == "graft" and recipe.model.head_from is None:
        yield (
            "head.init: 'graft' while model.head_from is null; expected a checkpoint to take the head from. Name the "
            "fine-tune's base in model.head_from, or write head.init: native (the trunk has a head) or copy_last_layer "
            "(it has none)."
        )


@_reads("model.offload", "model.quantization")
def _quantized_trunks_stay_on_the_device(recipe: Recipe) -> Iterator[str]:
    if recipe.model.offload is not None and recipe.model.quantization is not None:
        yield (
            f"model.offload: {recipe.model.offload!r} with model.quantization: {recipe.model.quantization!r}; expected "
            "one of them. Write null for the other."
        )


@_reads("head.init", "head.lora")
def _lora_has_a_trained_head(recipe: Recipe) -> Iterator[str]:
    if recipe.head.lora is not None and recipe.attaches:
        yield (
            f"head.lora: set with head.init: {recipe.head.init}, a new head whose own weights would never be "
            "trained; expected an existing head. Write head.lora: null, or head.init: graft or native."
        )


@_reads("evaluate.arms", "model.head_from")
def _arms_have_their_model(recipe: Recipe) -> Iterator[str]:
    for arm in ("graft", "vanilla"):
        if arm in recipe.evaluate.arms and recipe.model.head_from is None:
            yield (
                f"evaluate.arms: {arm!r} while model.head_from is null; expected a checkpoint with a head. Name it "
                "in model.head_from, or remove the arm."
            )


@_reads("model.head_from", "head.init", "evaluate.arms", "gate.baseline")
def _donor_is_used(recipe: Recipe) -> Iterator[str]:
    wanted = {recipe.head.init, recipe.gate_baseline, *recipe.evaluate.arms}
    if recipe.model.head_from is not None and not wanted & {"graft", "vanilla"}:
        yield (
            f"model.head_from: {recipe.model.head_from!r}, which nothing uses; expected head.init: graft, or an arm "
            "'graft' or 'vanilla'. Write one of the three, or model.head_from: null."
        )


@_reads("evaluate.arms")
def _arms_differ(recipe: Recipe) -> Iterator[str]:
    arms = recipe.evaluate.arms
    for arm in dict.fromkeys(arm for arm in arms if arms.count(arm) > 1):
        yield f"evaluate.arms: {arm!r} {arms.count(arm)} times; expected each arm once. Remove the repeats."


@_reads("export.enabled", "evaluate.arms")
def _export_is_measured(recipe: Recipe) -> Iterator[str]:
    if recipe.export.enabled and "retrained" not in recipe.evaluate.arms:
        yield (
            "evaluate.arms: no 'retrained' while export.enabled is true; expected an arm that measures the head "
            "before its export. Add 'retrained', or write export.enabled: false."
        )


@_reads("gate.baseline", "head.init", "model.head_from", "evaluate.arms")
def _baseline_is_measured(recipe: Recipe) -> Iterator[str]:
    arms, baseline = recipe.evaluate.arms, recipe.gate_baseline
    if "retrained" in arms and baseline not in arms:
        origin = f" ({baseline!r})" if recipe.gate.baseline == "auto" else ""
        yield (
            f"gate.baseline: {recipe.gate.baseline!r}{origin}, which is not in evaluate.arms; expected one of "
            f"these arms. Add {baseline!r} to evaluate.arms."
        )


@_reads("gate.baseline", "head.init")
def _baseline_fits_the_start(recipe: Recipe) -> Iterator[str]:
    if recipe.gate.baseline == "graft" and recipe.head.init == "native":
        yield (
            "gate.baseline: 'graft' with head.init: native; expected the head from which training starts. Write "
            "gate.baseline: auto."
        )


@_reads("train.tokens_per_step", "train.micro_batch_sequences", "data.seq_len_tokens")
def _step_holds_whole_batches(recipe: Recipe) -> Iterator[str]:
    tokens = recipe.train.tokens_per_step
    unit = recipe.data.seq_len_tokens * recipe.train.micro_batch_sequences
    if tokens % unit:
        below = tokens // unit * unit
        values = f"{below} or {below + unit}" if below else str(unit)
        yield (
            f"train.tokens_per_step: {tokens}; expected a multiple of {unit} (data.seq_len_tokens "
            f"{recipe.data.seq_len_tokens} x train.micro_batch_sequences {recipe.train.micro_batch_sequences}). "
            f"Write {values}."
        )


@_reads("train.warmup_steps", "train.max_steps")
def _warm_up_ends(recipe: Recipe) -> Iterator[str]:
    if recipe.train.warmup_steps >= recipe.train.max_steps:
        yield (
            f"train.warmup_steps: {recipe.train.warmup_steps}; expected fewer than train.max_steps "
            f"({recipe.train.max_steps}). Lower it, or train longer."
        )


@_reads("data.seq_len_tokens", "head.num_depths")
def _sequences_reach_every_depth(recipe: Recipe) -> Iterator[str]:
    # Depth k at row t predicts token t + k + 1, so row 0 needs num_depths + 2 tokens.
    least = recipe.head.num_depths + 2
    if recipe.data.seq_len_tokens < least:
        yield (
            f"data.seq_len_tokens: {recipe.data.seq_len_tokens}; expected {least} or more, so that depth "
            f"{recipe.head.num_depths} has a target. Raise it, or lower head.num_depths."
        )


@_reads("objective.temperature", "objective.loss")
def _temperature_is_used(recipe: Recipe) -> Iterator[str]:
    if recipe.objective.temperature != 1.0 and not find_loss(recipe.objective.loss).distils:
        yield (
            f"objective.temperature: {recipe.objective.temperature} with objective.loss: {recipe.objective.loss}, "
            "which has none; expected 1.0. Leave it out, or write objective.loss: kl."
        )


@_reads("objective.vocab", "head.draft_vocab")
def _draft_vocab_is_named(recipe: Recipe) -> Iterator[str]:
    if recipe.objective.vocab == "draft" and recipe.head.draft_vocab is None:
        yield (
            "objective.vocab: 'draft' while head.draft_vocab is null; expected the size of the draft vocabulary. Set "
            "head.draft_vocab, or write objective.vocab: all."
        )


@_reads("objective.on_policy", "head.num_depths")
def _on_policy_has_a_second_depth(recipe: Recipe) -> Iterator[str]:
    if recipe.objective.on_policy and recipe.head.num_depths == 1:
        yield (
            "objective.on_policy: true with head.num_depths: 1, where the head reads no draft; expected 2 depths or "
            "more. Write objective.on_policy: false."
        )


@_reads("data.regenerate", "data.sources")
def _sources_can_be_answered(recipe: Recipe) -> Iterator[str]:
    for index, source in enumerate(recipe.data.sources):
        if recipe.regenerates and source.format == "text":
            yield (
                f"data.sources.{index}.format: 'text' while data.regenerate is on; expected records with a "
                "prompt. Write data.regenerate: null, or use chats or records with prompt and response."
            )


@_reads("data.responses", "data.regenerate")
def _responses_of_a_run_are_used(recipe: Recipe) -> Iterator[str]:
    if recipe.data.responses is not None and not recipe.regenerates:
        yield (
            f"data.responses: {recipe.data.responses!r} while data.regenerate is off; expected it on, as the trunk "
            "answers the prompts that the run did not. Write data.regenerate.enabled: true, or data.responses: null."
        )


@_reads("evaluate.temperature", "evaluate.top_p", "evaluate.top_k", "evaluate.rule")
def _settings_are_used(recipe: Recipe) -> Iterator[str]:
    evaluate = recipe.evaluate
    filters: dict[str, object] = {"top_p": evaluate.top_p, "top_k": evaluate.top_k, "rule": evaluate.rule}
    for name, values in {"temperature": evaluate.temperature, **filters}.items():
        if isinstance(values, tuple) and len(set(values)) < len(values):
            yield f"evaluate.{name}: {list(values)} has a value twice; expected each value once. Remove the repeats."
    temperatures = () if isinstance(evaluate.temperature, str) else evaluate.temperature
    if temperatures and not any(temperatures):
        for name, values in filters.items():
            if values != AUTO:
                yield (
                    f"evaluate.{name}: {shown(values)} with evaluate.temperature: 0, which takes the most probable "
                    "token in any case; expected auto. Leave it out, or add a temperature above 0."
                )
    for value in temperatures:
        if 0.0 < value < MIN_TEMPERATURE:
            yield (
                f"evaluate.temperature: {value:g}; expected 0 or a number from {MIN_TEMPERATURE:g}. Write 0 for greedy "
                "decoding."
            )


@_reads("data.sources")
def _mixture_is_whole(recipe: Recipe) -> Iterator[str]:
    sources = recipe.data.sources
    weighted = [index for index, source in enumerate(sources) if source.weight is not None]
    if weighted and len(sources) == 1:
        yield (
            "data.sources.0.weight: set on the only source; expected a second source to mix it with. Leave it "
            "out; data.max_documents limits the number of records."
        )
    elif weighted and len(weighted) < len(sources):
        bare = next(index for index in range(len(sources)) if index not in weighted)
        yield (
            f"data.sources.{bare}.weight: null while data.sources.{weighted[0]}.weight is set; expected a weight on "
            "every source or on none. Add it, or remove the others."
        )


@_reads("data.sources", "data.max_documents")
def _stream_has_an_end(recipe: Recipe) -> Iterator[str]:
    for index, source in enumerate(recipe.data.sources):
        if not source.streaming:
            continue
        if recipe.data.max_documents is None:
            yield (
                f"data.sources.{index}.streaming: true while data.max_documents is null; expected the number of "
                "records to read. Set data.max_documents."
            )
        if "[" in source.split:
            yield (
                f"data.sources.{index}.split: {source.split!r} of a stream; expected a whole split. Leave the slice "
                "out; data.max_documents limits the number of records."
            )


def _address_problems(field: str, address: str, key_field: str) -> Iterator[str]:
    if not address.startswith(("http://", "https://")):
        yield (
            f"{field}: {address!r}; expected an address that starts with http:// or https://. Write, for example, "
            "http://localhost:8000/v1."
        )
    if re.search(r"://[^/]*@|[?#]", address):
        yield (
            f"{field}: an address with a name, a password or parameters; expected none, as the recipe is written to "
            f"files. Put the key into a variable, and name it in {key_field}."
        )


@_reads("gate.enabled", "study")
def _gate_is_used(recipe: Recipe) -> Iterator[str]:
    if recipe.study is not None and not recipe.gate.enabled:
        yield "gate.enabled: false with study, which measures in any case; expected true. Leave it out."


@_reads("data.regenerate")
def _server_settings_are_used(recipe: Recipe) -> Iterator[str]:
    settings = recipe.data.regenerate
    if settings is None:
        return
    if settings.endpoint is not None and settings.batch_size is not None:
        yield (
            f"data.regenerate.batch_size: {settings.batch_size} with data.regenerate.endpoint, whose server makes its "
            "own batches; expected null. Use data.regenerate.concurrency."
        )
    if settings.endpoint is not None:
        yield from _address_problems("data.regenerate.endpoint", settings.endpoint, "data.regenerate.api_key_env")
    of_servers = {
        "model": settings.model,
        "concurrency": settings.concurrency,
        "api_key_env": settings.api_key_env,
        "request_timeout_seconds": settings.request_timeout_seconds,
    }
    for name, value in of_servers.items():
        if settings.endpoint is None and value is not None:
            yield (
                f"data.regenerate.{name}: {value!r} while data.regenerate.endpoint is null; expected the address "
                "of a server. Set data.regenerate.endpoint, or leave it out."
            )


@_reads("data.regenerate")
def _filters_are_used(recipe: Recipe) -> Iterator[str]:
    settings = recipe.data.regenerate
    if settings is None or settings.temperature > 0:
        return
    for name, value, off in (
        ("top_p", settings.top_p, 1.0),
        ("top_k", settings.top_k, 0),
        ("min_p", settings.min_p, 0.0),
    ):
        if value != off:
            yield (
                f"data.regenerate.{name}: {value} with data.regenerate.temperature: 0, which takes the most probable "
                f"token in any case; expected {off}. Leave it out, or raise the temperature."
            )


@_reads("train.select", "train.max_steps")
def _selection_measures_during_training(recipe: Recipe) -> Iterator[str]:
    select = recipe.train.select
    if select is not None and select.every_steps > recipe.train.max_steps:
        yield (
            f"train.select.every_steps: {select.every_steps} with train.max_steps: {recipe.train.max_steps}; expected "
            f"at most {recipe.train.max_steps}. Lower it, or write train.select: null."
        )


@_reads("train.select", "train.hidden_cache")
def _decoding_needs_the_trunk(recipe: Recipe) -> Iterator[str]:
    select = recipe.train.select
    if select is not None and select.prompts and recipe.train.hidden_cache is not None:
        yield (
            f"train.select.prompts: {select.prompts} with train.hidden_cache, which removes the trunk from memory; "
            "expected 0 or null. Write null, or train.hidden_cache: null."
        )


@_reads("study", "model.head_from", "evaluate.arms")
def _study_has_both_sides(recipe: Recipe) -> Iterator[str]:
    if recipe.study is None:
        return
    missing = [arm for arm in ("graft", "retrained", "vanilla") if arm not in recipe.evaluate.arms]
    if missing:
        yield (
            f"evaluate.arms: no {missing[0]!r} in a study; expected all three arms that its verdict compares. "
            "Write evaluate.arms: [graft, retrained, vanilla]."
        )


@_reads("study", "head.convention", "model.offload")
def _study_measures_as_usual(recipe: Recipe) -> Iterator[str]:
    if recipe.study is None:
        return
    if recipe.head.convention != "auto":
        yield (
            f"head.convention: {recipe.head.convention!r} in a study, whose heads have the usual wiring of their "
            "family; expected auto. Write head.convention: auto."
        )
    if recipe.model.offload is not None:
        yield (
            f"model.offload: {recipe.model.offload!r} in a study, which measures trunks that are whole on the device; "
            "expected null. Write model.offload: null, or model.quantization: 4bit."
        )


@_reads("study", "export.enabled")
def _study_exports_nothing(recipe: Recipe) -> Iterator[str]:
    if recipe.study is not None and recipe.export.enabled:
        yield (
            "export.enabled: true in a study, which has several heads and no gate; expected false. Write "
            "export.enabled: false; a recipe without a study exports."
        )


@_reads("study")
def _study_settings_fit_together(recipe: Recipe) -> Iterator[str]:
    study = recipe.study
    if study is None:
        return
    lists = {
        "objectives": study.objectives,
        "temperatures": study.temperatures,
        "rules": study.rules,
        "depths": study.depths,
    }
    for name, values in lists.items():
        if len(set(values)) < len(values):
            yield f"study.{name}: {list(values)} has a value twice; expected each value once. Remove the repeats."
    for temperature in study.temperatures:
        if not any((rule == "greedy") == (temperature == 0) for rule in study.rules):
            wanted = "greedy" if temperature == 0 else "sampled"
            yield (
                f"study.rules: {list(study.rules)} has no rule for temperature {temperature:g}; expected one. "
                f"Add {wanted!r}, or remove the temperature."
            )
