"""Read a recipe in any of its forms, and derive its settings that are ``auto`` from model, data and machine.

The rules follow published trainings of MTP heads: FastMTP (arXiv:2509.18362, section 3: 3 epochs, 5 % warm-up), the MTP
training of speculators (3 epochs, learning rate 1e-4 at 4096 channels), SpecForge (up to 10 epochs of small data).
Learning rates fall with the width, as those of hidden matrices do in maximal update parametrisation (arXiv:2203.03466).
``inference/benchmarks/auto.md`` compares the rules with tuned settings.

Most fields are resolved before a run starts (:func:`automatic_values`). The length of training depends on the number of
tokens, which is known once the trunk has answered the prompts (:func:`resolve_training`).
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PretrainedConfig

from mtp_train.acceptance.gate import min_gate_groups
from mtp_train.data.groups import is_held_out
from mtp_train.data.records import PlainText, has_response
from mtp_train.data.tokenize import Document, build_prompts, tokenize_records
from mtp_train.errors import DataError
from mtp_train.heads.diagnose import text_config_of
from mtp_train.recipe.json_schema import shown
from mtp_train.recipe.loading import RecipeLike, load_recipe
from mtp_train.recipe.schema import Recipe
from mtp_train.runs.inputs import grouped_records, open_trunk, recipe_tokenizer
from mtp_train.runs.run_directory import RunDirectory
from mtp_train.runs.settings import memory_options
from mtp_train.train.machine import Device, device_named
from mtp_train.train.plan import activation_bytes

Overrides = Mapping[str, Any] | Sequence[str]

SAMPLE_RECORDS = 512
"""Records whose tokens are counted, taken at even distances."""
LEAST_HELD_OUT, MOST_HELD_OUT = 0.05, 0.3
EVALUATION_PROMPTS, EVALUATION_GROUPS = 64, 12
"""Prompts and groups to hold out: the gate's intervals are over groups."""
MOST_PROMPTS = 20_000
MOST_NEW_TOKENS, LEAST_SEQ_LEN, MOST_SEQ_LEN = 1024, 512, 4096
STEPS_PER_EPOCH, LEAST_SEQUENCES, MOST_TOKENS_PER_STEP = 20, 4, 65_536
EPOCHS, MOST_EPOCHS, LEAST_STEPS = 3, 10, 100
"""Passes over the text; up to the second number of them where the first gives fewer steps than the third."""
NEW_HEAD = 2
"""Factor of the steps for a head that starts from random weights or from a copied layer."""
WARMUP_SHARE = 0.05
LEARNING_RATE, WIDTH = 1e-4, 4096
LORA_FACTOR = 10
GOOD_OVERLAP, GOOD_FACTOR = 0.8, 0.2
"""A head that starts with at least this overlap of p and q at depth 1 is trained with this part of the rate
(``inference/benchmarks/auto.md``)."""
CPU_MICRO_BATCH_TOKENS, MICRO_BATCH_TOKENS = 2048, 16_384
"""Most tokens of a micro-batch; larger ones are not faster."""
ROWS = 64
"""Most prompts of a batch that the built-in decoder answers (``inference/benchmarks/auto.md``)."""
CACHE_SHARE, ACTIVATION_SHARE = 0.3, 0.5
"""Shares of the memory beside the weights, for keys and values of answers and for activations of training."""


class Choice(NamedTuple):
    """A setting that was ``auto``, its value and the reason for it."""

    field: str
    value: int | float | None
    reason: str

    @property
    def shown(self) -> str:
        return f"{self.value:.3g}" if isinstance(self.value, float) else shown(self.value)

    def __str__(self) -> str:
        return f"{self.field}: {self.shown} ({self.reason})"


def values_of(choices: Sequence[Choice]) -> str:
    """Return the values that were chosen in one line, and where their reasons are."""
    values = ", ".join(f"{choice.field}={choice.shown}" for choice in choices)
    return f"{values}; reasons: mtp-train check RECIPE --show recipe"


def recipe_of(recipe: RecipeLike, overrides: Overrides = ()) -> Recipe:
    return resolved_recipe(recipe, overrides)[0]


def resolved_recipe(
    recipe: RecipeLike,
    overrides: Overrides = (),
    *,
    world_size: int | None = None,
    device: Device | None = None,
) -> tuple[Recipe, tuple[Choice, ...]]:
    """Return a checked recipe from any of its forms, with fields that are ``auto`` resolved, and how they were.

    A recipe without any is returned as it is. ``world_size`` is the number of processes that will train, by default
    ``train.processes``, else that of the launcher; ``device`` what they will run on, by default this machine's.
    An error lists all problems.
    """
    if isinstance(recipe, Recipe) and not overrides and not recipe.automatic:
        return recipe, ()
    known = load_recipe(recipe, override_texts(overrides))
    if not known.automatic:
        return known, ()
    choices = automatic_values(
        known,
        known.automatic,
        world_size or known.train.processes or launched_processes(),
        device or device_named(None),
    )
    return load_recipe(known.replaced({one.field: one.value for one in choices})), choices


def override_texts(overrides: Overrides) -> list[str]:
    if not isinstance(overrides, Mapping):
        return list(overrides)
    return [f"{field}={json.dumps(value, default=str, ensure_ascii=False)}" for field, value in overrides.items()]


def launched_processes() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


class Lengths(NamedTuple):
    """Lengths of texts in tokens; ``long`` is the 95th percentile."""

    mean: float
    long: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Lengths:
        return cls(sum(lengths) / len(lengths), sorted(lengths)[math.ceil(0.95 * len(lengths)) - 1])


class TextFacts(NamedTuple):
    """Groups of the records, and their lengths."""

    groups: Mapping[str, int]
    """Each group's number of records."""
    prompt: Lengths
    response: Lengths | None
    """None where the records have no responses."""
    whole: Lengths

    @property
    def num_records(self) -> int:
        return sum(self.groups.values())

    def num_held_out(self, recipe: Recipe) -> int:
        """Return the number of records that the recipe holds out."""
        return sum(
            count for group, count in self.groups.items() if is_held_out(group, recipe.data.holdout, recipe.seed)
        )


class ModelFacts(NamedTuple):
    """Sizes of the model, and the machine that runs it."""

    hidden_size: int
    max_positions: int
    cache_bytes: int
    """See :func:`keys_and_values`."""
    device: str
    spare_bytes: int
    """Memory of the device beside a whole trunk; 0 or less if the trunk does not fit."""
    sharded_bytes: int
    """Memory of the device beside the part of the trunk that is there in training: in shards if it does not fit."""
    world_size: int


class _Chosen:
    """A recipe whose fields that are ``auto`` are chosen one after the other: each rule reads the values before it."""

    def __init__(self, recipe: Recipe, fields: Collection[str]) -> None:
        self.recipe = recipe
        self.fields = fields
        self.choices: tuple[Choice, ...] = ()

    def choose(self, field: str, value: int | float | None, reason: str) -> None:
        """Set a field that is to be chosen; others keep the value of the user."""
        if field in self.fields:
            self.choices += (Choice(field, value, reason),)
            self.recipe = self.recipe.replaced({field: value})


def automatic_values(recipe: Recipe, fields: Collection[str], world_size: int, device: Device) -> tuple[Choice, ...]:
    """Return the values of fields that are ``auto``: those that the run directory records, or by the rules."""
    recorded = RunDirectory(Path(recipe.run_dir)).recipe
    if recorded is not None:
        return tuple(Choice(field, attrgetter(field)(recorded), f"recorded in {recipe.run_dir}") for field in fields)
    model = model_facts(recipe, world_size, device)
    text = text_facts(recipe)
    chosen = _Chosen(recipe, fields)
    _choose_for_text(chosen, model, text)
    _choose_for_training(chosen, model, *_expected_text(chosen.recipe, text))
    return chosen.choices


def resolve_training(
    recipe: Recipe, fields: Collection[str], documents: Sequence[Document], world_size: int
) -> tuple[Choice, ...]:
    """Return the length of training for the text that a recipe trains on."""
    tokens = sum(len(document.input_ids) for document in documents)
    if not recipe.data.pack:
        tokens = len(documents) * recipe.data.seq_len_tokens
    chosen = _Chosen(recipe, fields)
    model = model_facts(recipe, world_size, device_named(None))
    _choose_for_training(chosen, model, tokens, f"{tokens} tokens of training text")
    return chosen.choices


def model_facts(recipe: Recipe, world_size: int, device: Device) -> ModelFacts:
    checkpoint = open_trunk(recipe)
    text_config = text_config_of(checkpoint)
    # On a CPU the weights are in fp32. Offloaded layers are on the device one at a time, beside embedding and lm_head.
    weights = (
        checkpoint.num_bytes
        * (1 if device.kind == "cuda" else 2)
        // {None: 1, "8bit": 2, "4bit": 3}[recipe.model.quantization]
    )
    if recipe.model.offload is not None:
        weights = weights // text_config.num_hidden_layers + 4 * text_config.vocab_size * text_config.hidden_size
    spare = device.memory_bytes - weights
    return ModelFacts(
        hidden_size=text_config.hidden_size,
        max_positions=int(text_config.to_dict().get("max_position_embeddings") or MOST_SEQ_LEN),
        cache_bytes=keys_and_values(text_config, device),
        device=device.kind,
        spare_bytes=spare,
        sharded_bytes=spare if spare > 0 else device.memory_bytes - weights // world_size,
        world_size=world_size,
    )


def keys_and_values(text_config: PretrainedConfig, device: Device) -> int:
    """Return the most bytes that a token takes in the cache of the trunk: less with sliding windows or latents."""
    fields = text_config.to_dict()
    kinds = fields.get("layer_types") or ["attention"] * text_config.num_hidden_layers
    layers = sum("attention" in kind and "linear" not in kind for kind in kinds)
    heads = fields.get("num_key_value_heads") or text_config.num_attention_heads
    head_dim = fields.get("head_dim") or text_config.hidden_size // text_config.num_attention_heads
    return int(layers * 2 * heads * head_dim) * (2 if device.kind == "cuda" else 4)


def text_facts(recipe: Recipe) -> TextFacts:
    records = grouped_records(recipe)
    tokenizer = recipe_tokenizer(recipe, open_trunk(recipe))
    sample = records[:: max(1, len(records) // SAMPLE_RECORDS)][:SAMPLE_RECORDS]
    asked = [record for record in sample if not isinstance(record.content, PlainText)]
    prompts = [len(prompt.prompt_ids) for prompt in build_prompts(asked, tokenizer)] or [0]
    told = [record for record in sample if has_response(record.content)]
    try:
        documents = tokenize_records(told, tokenizer, 1 << 30)[0] if told else []
    except DataError:
        if recipe.data.regenerate is None:
            raise
        # The trunk answers the prompts: the template has to write these alone.
        documents = []
    responses = [int(document.loss_mask.sum()) for document in documents]
    return TextFacts(
        groups=Counter(record.group for record in records),
        prompt=Lengths.of(prompts),
        response=Lengths.of(responses) if responses else None,
        whole=Lengths.of([len(document.input_ids) for document in documents] or prompts),
    )


def _power_of_two(least: float) -> int:
    return 1 << math.ceil(math.log2(max(1.0, least)))


def _choose_for_text(chosen: _Chosen, model: ModelFacts, text: TextFacts) -> None:
    """Choose what the data's lengths and the model decide before the trunk answers."""
    num_records = text.num_records
    num_groups = len(text.groups)
    wanted = max(EVALUATION_PROMPTS / num_records, EVALUATION_GROUPS / num_groups)
    # Each group is held out by chance: twice the fewest that the gate needs, of very little data up to a half.
    fewest = min_gate_groups(chosen.recipe.gate.confidence)
    most = max(MOST_HELD_OUT, min(0.5, 2 * fewest / num_groups))
    aim = f"aims at {EVALUATION_PROMPTS} records in {EVALUATION_GROUPS} groups, of {num_records} in {num_groups}"
    share = round(min(most, max(LEAST_HELD_OUT, wanted)), 3)
    chosen.choose("data.holdout", share, f"{aim}; from {LEAST_HELD_OUT:g} to {most:.3g}")

    held_out = text.num_held_out(chosen.recipe)
    told = f"of {held_out} held-out records, at most {EVALUATION_PROMPTS}"
    chosen.choose("evaluate.prompts", min(EVALUATION_PROMPTS, max(1, held_out)), told)

    training = num_records - held_out
    told = f"of {training} records for training, at most {MOST_PROMPTS}"
    chosen.choose("data.regenerate.max_prompts", min(MOST_PROMPTS, max(1, training)), told)

    limit = min(MOST_NEW_TOKENS, model.max_positions // 2)
    told = f"at most {MOST_NEW_TOKENS} and half of the positions; no response of a record is known"
    if text.response is not None:
        limit = min(limit, max(128, _power_of_two(2 * text.response.long)))
        told = f"twice the records' long responses, {text.response.long} tokens, at most {MOST_NEW_TOKENS}"
    chosen.choose("data.regenerate.max_new_tokens", limit, told)

    answered = chosen.recipe.data.regenerate
    longest = text.whole.long if answered is None else text.prompt.long + answered.max_new_tokens
    length = min(model.max_positions, MOST_SEQ_LEN, max(LEAST_SEQ_LEN, _power_of_two(longest)))
    told = f"for texts of up to {longest} tokens, from {LEAST_SEQ_LEN} to {MOST_SEQ_LEN}"
    chosen.choose("data.seq_len_tokens", length, told)

    chosen.choose("data.regenerate.batch_size", *_rows(chosen.recipe, model))
    chosen.choose(*lr_choice(chosen.recipe, model.hidden_size))


def _rows(recipe: Recipe, model: ModelFacts) -> tuple[int | None, str]:
    """Return how many prompts the built-in decoder answers at a time, and why."""
    if recipe.data.regenerate is not None and recipe.data.regenerate.endpoint is not None:
        return None, "the server of data.regenerate.endpoint makes its own batches"
    per_row = model.cache_bytes * recipe.data.seq_len_tokens
    if model.spare_bytes <= 0:
        return 1, "the trunk itself does not fit on a process"
    fitting = max(1, int(CACHE_SHARE * model.spare_bytes / per_row))
    return min(ROWS, fitting), f"keys and values of {fitting} rows fit; at most {ROWS}"


def lr_choice(recipe: Recipe, hidden_size: int, overlap: float | None = None) -> Choice:
    """Return the automatic learning rate; ``overlap``: of p and q at depth 1 before the first step, once measured."""
    rate = LEARNING_RATE * WIDTH / hidden_size
    reason = f"{LEARNING_RATE:g} x {WIDTH} / {hidden_size} channels"
    if recipe.head.lora is not None:
        rate = LORA_FACTOR * rate
        reason = f"{reason} x {LORA_FACTOR} for LoRA"
    if overlap is not None and overlap >= GOOD_OVERLAP:
        rate = GOOD_FACTOR * rate
        reason = f"{reason} x {GOOD_FACTOR:g}: the head starts with overlap {overlap:.2f}"
    return Choice("train.lr", rate, reason)


def _expected_text(recipe: Recipe, text: TextFacts) -> tuple[int, str]:
    """Estimate the training text before the trunk has answered: its answers are as long as the records' responses."""
    training = text.num_records - text.num_held_out(recipe)
    spec = recipe.data.regenerate
    if spec is None:
        tokens = round(training * text.whole.mean)
        return tokens, f"about {tokens} tokens of training text"
    answer = spec.max_new_tokens if text.response is None else min(text.response.mean, spec.max_new_tokens)
    tokens = round(min(training, spec.max_prompts or training) * (text.prompt.mean + answer))
    known = "at most" if text.response is None else "about"
    return tokens, f"{known} {tokens} tokens of training text; fixed once they are generated"


FROM_TEXT = ("train.tokens_per_step", "train.max_steps", "train.micro_batch_sequences", "train.warmup_steps")
"""Fields that are resolved once the training text exists, in this order."""


def _choose_for_training(chosen: _Chosen, model: ModelFacts, tokens: int, told: str) -> None:
    """Choose the length of training for a text of so many tokens; ``told``: how their number is known."""
    seq_len = chosen.recipe.data.seq_len_tokens
    unit = model.world_size
    if "train.micro_batch_sequences" not in chosen.fields:
        unit *= chosen.recipe.train.micro_batch_sequences
    nearest = 1 << max(0, round(math.log2(max(1.0, tokens / STEPS_PER_EPOCH / seq_len))))
    wanted = min(max(1, MOST_TOKENS_PER_STEP // seq_len), max(LEAST_SEQUENCES, nearest))
    sequences = math.ceil(wanted / unit) * unit
    reason = f"{sequences} sequences: about {STEPS_PER_EPOCH} steps per pass over {told}"
    chosen.choose("train.tokens_per_step", sequences * seq_len, reason)

    per_step = chosen.recipe.train.tokens_per_step
    per_pass = tokens / per_step
    steps = max(EPOCHS * per_pass, min(LEAST_STEPS, MOST_EPOCHS * per_pass))
    factor, new = (NEW_HEAD, ", twice for a new head") if chosen.recipe.head.is_new else (1, "")
    whole = max(1, math.ceil(steps * factor))
    chosen.choose("train.max_steps", whole, f"{whole / per_pass:.3g} passes over {told}{new}")

    sequences = max(1, per_step // seq_len // model.world_size)
    most_tokens = CPU_MICRO_BATCH_TOKENS if model.device == "cpu" else MICRO_BATCH_TOKENS
    per_sequence = activation_bytes(memory_options(chosen.recipe), model.hidden_size, seq_len, seq_len, model.device)
    fitting = int(ACTIVATION_SHARE * max(0, model.sharded_bytes) / per_sequence)
    most = max(1, min(most_tokens // seq_len, fitting))
    count = max(number for number in range(1, sequences + 1) if number <= most and sequences % number == 0)
    reason = f"activations of {fitting} sequence(s) fit; at most {most_tokens} tokens on {model.device}"
    chosen.choose("train.micro_batch_sequences", count, reason if fitting else "no activations fit beside the trunk")

    max_steps = chosen.recipe.train.max_steps
    warmup = min(round(WARMUP_SHARE * max_steps), max_steps - 1)
    chosen.choose("train.warmup_steps", warmup, f"{WARMUP_SHARE:.0%} of the steps")
