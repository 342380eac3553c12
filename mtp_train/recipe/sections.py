"""Define the sections of a recipe: fields with types, limits, defaults and descriptions, and the rules between them.

This is the only place where a field is defined: ``schema.json`` and the reference in ``recipes/fields.md`` are
generated from it. This module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from mtp_train.head_kinds import find_head_kind, head_kind_names, head_kinds
from mtp_train.losses.catalogue import find_loss, loss_choices, loss_names

AUTO: Any = "auto"
"""A value of a field of any type."""
AUTOMATIC = (
    "data.regenerate.max_prompts",
    "data.regenerate.max_new_tokens",
    "data.regenerate.batch_size",
    "data.seq_len_tokens",
    "data.holdout",
    "train.max_steps",
    "train.tokens_per_step",
    "train.lr",
    "train.micro_batch_sequences",
    "train.warmup_steps",
    "evaluate.prompts",
)
"""Every field that may be ``auto`` and that ``runs/resolve.py`` replaces before the recipe is used. Other fields with
``auto``, such as ``train.precision``, are resolved by their own stage."""
CONTRADICTION = "contradiction"
"""Type of pydantic's error for rules between fields; its context has the ``problems``."""
MIN_TEMPERATURE = 1e-3
"""Lowest temperature above 0 that the decoder samples at (``mtp_inference.sampling.distributions``)."""
T = TypeVar("T")
S = TypeVar("S", bound="RecipeSection")


class RecipeSection(BaseModel):
    """Base class of the sections. Unknown keys are refused, and no value is converted but a whole number to a float."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def contradictions(self) -> Iterator[str]:
        """Yield every broken rule between the fields: ``"{field}: {found}; expected {rule}. {hint}"``."""
        yield from ()

    @model_validator(mode="after")
    def _follows_its_rules(self: S) -> S:
        problems = list(self.contradictions())
        if problems:
            raise PydanticCustomError(CONTRADICTION, "fields contradict each other", {"problems": problems})
        return self

    def without_effect(self, cause: str, value: object, *names: str) -> Iterator[str]:
        """Yield a problem for each field that is away from its default, where another field leaves it no effect."""
        for name in names:
            given = getattr(self, name)
            default = type(self).model_fields[name].default
            if given != default:
                found = list(given) if isinstance(given, tuple) else given
                off = "null" if default is None else default
                yield f"{name}: {found!r} with {cause}: {value}; expected {off}. Leave it out."

    def repeats(self, *names: str) -> Iterator[str]:
        """Yield a problem for each list with a value twice."""
        for name in names:
            values = getattr(self, name)
            if values != AUTO and len(set(values)) < len(values):
                yield f"{name}: {list(values)} has a value twice; expected each value once. Remove the repeats."

    def replaced(self: S, values: Mapping[str, Any]) -> S:
        """Return a copy with other values of fields such as ``train.lr``; they are not checked."""
        copy = self
        for path, value in values.items():
            name, _, rest = path.partition(".")
            copy = copy.model_copy(update={name: getattr(copy, name).replaced({rest: value}) if rest else value})
        return copy


@dataclass(frozen=True)
class _OneOf:
    """Limit a text to choices that are read when a recipe is, since other packages may register more."""

    choices: Callable[[], tuple[str, ...]]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": list(self.choices()), "type": "string"}

    def _check(self, value: str) -> str:
        choices = self.choices()
        if value not in choices:
            raise PydanticCustomError("literal_error", "Input should be one of {all}", {"all": ", ".join(choices)})
        return value


def is_auto(*values: object) -> bool:
    """Return whether one of the values is still to be chosen."""
    return AUTO in values


def _auto_or(value: object, as_value: Callable[[object], object]) -> object:
    return value if value == AUTO else as_value(value)


def _listed(value: object) -> object:
    if value == AUTO:
        return value
    return tuple(value) if isinstance(value, list) else (value,)


def _or_auto(node: dict[str, Any]) -> None:
    """Add ``auto`` to a field's JSON Schema."""
    value = {key: node.pop(key) for key in list(node) if key not in ("default", "description")}
    node["anyOf"] = [{"const": AUTO}, *value.get("anyOf", [value])]


def _one_or_more(node: dict[str, Any]) -> None:
    """Add ``auto`` and one item in place of a list to a field's JSON Schema."""
    _or_auto(node)
    node["anyOf"].insert(1, node["anyOf"][1]["items"])


Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Depth = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
NonEmpty = Annotated[tuple[T, ...], Field(min_length=1)]
OrAuto = Annotated[T, WrapValidator(_auto_or), PlainSerializer(lambda value: value), Field(json_schema_extra=_or_auto)]
"""A value, or ``auto`` in a recipe that is not resolved yet: a recipe in use has values alone."""
OneOrMore = Annotated[OrAuto[NonEmpty[T]], BeforeValidator(_listed), Field(json_schema_extra=_one_or_more)]
"""A list, one item in place of a list, or ``auto``."""

Objective = Annotated[str, _OneOf(loss_names)]
InitKind = Literal["native", "graft", "copy_last_layer", "random"]
Arm = Literal["none", "graft", "native", "retrained", "vanilla"]
Baseline = Literal["graft", "native", "none"]


class ModelSection(RecipeSection):
    """The target model, called the trunk, and the checkpoint with its head."""

    trunk: Text
    """The fine-tuned checkpoint: a directory, a hub id, or `demo:NAME`. Its weights are frozen."""
    head_from: Text | None = None
    """The checkpoint whose head is grafted, usually the base of the fine-tune. Its own trunk with its own head is the
    arm `vanilla`. Or a run directory: its export, or if it has none (a refused run) its trained head.
    Or a draft model, for the other kinds of head."""
    adapter: Text | None = None
    """A peft LoRA adapter. The trunk is then `trunk` with this adapter, unmerged; the export contains the merged
    weights."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of the trunk's weights in memory. `auto`: the dtype of the checkpoint, on a CPU float32."""
    quantization: Literal["8bit", "4bit"] | None = None
    """Quantise the trunk's linear layers with bitsandbytes while they are loaded, to train and measure on a small GPU.
    Experts are not quantised. The export contains the original bytes of the checkpoint."""
    offload: Literal["cpu"] | None = None
    """Keep the trunk's layers in main memory, and copy them to the device one at a time. Slow, but needs little device
    memory; the results are the same. For one process."""
    trust_remote_code: bool = False
    """Whether transformers may run Python code that a checkpoint contains."""

    def contradictions(self) -> Iterator[str]:
        if self.offload is not None and self.quantization is not None:
            yield f"offload: {self.offload!r} with model.quantization: {self.quantization!r}; expected one. Remove one."


class LoraSection(RecipeSection):
    """LoRA on the head: low-rank matrices are trained beside frozen weights, and merged into them when saved.

    Norms, routers and all other modules that are no target are not trained.
    """

    r: Count = 16
    """The rank. Of stacked experts, the rank of each expert."""
    alpha: Count = 32
    """The product of the low-rank matrices is scaled by `alpha / r`."""
    targets: NonEmpty[Text] | None = None
    """Layers to adapt, by the last part of their names, such as `q_proj`; null adapts all linear layers and the experts
    of a mixture."""


class HeadSection(RecipeSection):
    """The head to train."""

    kind: Annotated[str, _OneOf(head_kind_names)] = "mtp"
    """The architecture. `mtp`: norms, a projection and a decoder layer of the trunk's own type, stored in the trunk's
    checkpoint. The other kinds are for models that never had a head, and are exported as a separate checkpoint.
    `eagle`: one Llama layer. `eagle3`: one Llama layer that reads the hidden states of three trunk layers. `medusa`:
    one residual block per depth, each of which reads the trunk's last hidden state only. `assistant`: Gemma 4's
    drafter, which attends to the trunk's keys and values; it is retrained from an existing one. `dflash`,
    `dflash2` and `dspark`: block drafters, which can be decoded with and not trained."""
    init: InitKind = "graft"
    """The initial weights. `native`: the head in `model.trunk`. `graft`: the head in `model.head_from`.
    `copy_last_layer`: a new head whose decoder layer is a copy of the trunk's last layer. `random`: a new head with
    random weights."""
    num_depths: Depth = 3
    """Number of draft depths that are trained. Independent of the number of MTP modules in the checkpoint."""
    lora: LoraSection | None = None
    """LoRA on the head; null trains all weights of the head."""
    convention: Text = "auto"
    """The engine whose wiring of the head is used, where engines differ: `vllm`, `sglang` or `llama.cpp`. `auto`: the
    usual wiring of the family. With `llama.cpp`, all modules of Step-3.5 and MiMo-V2-Flash read the same tokens as the
    first module, as in llama.cpp."""
    draft_vocab: Count | None = None
    """Size of the draft vocabulary: this number of the most frequent tokens of the training text; null drafts from all
    tokens. A smaller output matrix drafts faster and misses rare tokens. The built-in decoder uses it for every kind,
    engines for `eagle3` only, where p and q of the loss are over these tokens too."""

    def contradictions(self) -> Iterator[str]:
        kind = find_head_kind(self.kind)
        if not kind.starts:
            trained = ", ".join(one.name for one in head_kinds() if one.starts)
            yield (
                f"kind: {self.kind!r}, which can be decoded with and not trained; expected one of {trained}. Write one "
                "of these, or give the drafter to generate, evaluate or compare by --head."
            )
        elif self.init not in kind.starts:
            yield (
                f"init: {self.init!r} with head.kind: {self.kind}; expected {' or '.join(kind.starts)}. Write "
                f"head.init: {kind.starts[0]}."
            )
        if kind.has_output and self.draft_vocab is not None:
            yield (
                f"draft_vocab: {self.draft_vocab} with head.kind: {self.kind}, which has an output matrix of its own; "
                "expected null. Write head.draft_vocab: null."
            )
        if self.lora is not None and self.is_new:
            yield f"lora: set with head.init: {self.init}, a new head; expected an existing one. Write head.lora: null."

    @property
    def is_new(self) -> bool:
        """Whether the head is new, rather than loaded from a checkpoint."""
        return self.init in ("copy_last_layer", "random")


class SourceSpec(RecipeSection):
    """One source of training records."""

    path: Text
    """A .json, .jsonl, .csv, .parquet or .txt file (also compressed: .gz, .xz, .bz2, .zst), a directory or a glob of
    files of one type, a directory that `save_to_disk` of `datasets` wrote, the hub id of a dataset, or `demo:NAME`."""
    config: Text | None = None
    """The configuration of a hub dataset; null takes its default configuration."""
    split: Text = "train"
    """A split of the dataset. Slices such as `train[:1000]` are allowed."""
    columns: Mapping[str, Text] = Field(default={})
    """Names of columns in the source, by ours: `{instruction: question, output: answer}`. Ours are `messages` (a chat
    of OpenAI or ShareGPT), `prompt` and `response` (raw text on both sides, or messages on both), `instruction`,
    `input` and `output` (turns of a chat), `turns` (the first is asked), `text`, and beside a chat `system`, `tools`
    and `chat_template_kwargs`. For prompts that the chat template shall be applied to, write `{instruction: prompt}`.
    Of a source with columns of several of these layouts, name those of one: `{text: text}`."""


class RegenerateSpec(RecipeSection):
    """Replace the responses in the sources by responses that the trunk generates, sampled or greedy.

    The built-in decoder generates them. If `endpoint` is set, a server with an OpenAI-compatible API does (vLLM,
    SGLang, llama.cpp).
    """

    max_prompts: OrAuto[Count | None] = None
    """Number of prompts to respond to; null takes all. `auto`: all, at most 20000."""
    max_new_tokens: OrAuto[Count] = 256
    """Maximum length of a response, in tokens. `auto`: twice the 95th percentile of the records' own responses, at most
    1024."""
    batch_size: OrAuto[Count | None] = None
    """Prompts per batch of the built-in decoder on each process; null is 16. `auto`: 64, or as
    many as fit into memory. A server (`endpoint`) makes its own batches."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy. Above 0 every prompt has its own seed, derived from `seed` and recorded with
    the response. Sampled responses follow the distribution that a server samples from
    (`inference/benchmarks/objectives.md` compares sampled and greedy ones)."""
    top_p: UpToOne = 1.0
    """Sample from the smallest set of tokens whose probabilities sum to at least this value."""
    top_k: Natural = 0
    """Sample from the k most probable tokens; 0 samples from all."""
    min_p: BelowOne = 0.0
    """Sample from tokens with at least this probability, relative to the most probable token."""
    endpoint: Text | None = None
    """Address of the server, up to and including the API version: `http://localhost:8000/v1`. The server must serve the
    trunk: a sample of its responses is compared with those of the trunk, before they are stored. A run can be resumed
    with another address."""
    model: Text | None = None
    """The name of the trunk on the server; null if the server has one model."""
    concurrency: Count | None = None
    """Maximum number of concurrent requests to the server, over all processes; null is 32."""
    api_key_env: Text | None = None
    """Name of the environment variable with the API key of the server. The key itself is not written to any file."""

    def contradictions(self) -> Iterator[str]:
        if self.endpoint is not None:
            yield from _of_address(self.endpoint, "data.regenerate")
        else:
            yield from self.without_effect("data.regenerate.endpoint", "null", "model", "concurrency", "api_key_env")
        if self.temperature == 0:
            yield from self.without_effect("data.regenerate.temperature", 0, "top_p", "top_k", "min_p")


def _of_address(address: str, section: str) -> Iterator[str]:
    if not address.startswith(("http://", "https://")):
        yield f"endpoint: {address!r}; expected an address such as http://localhost:8000/v1. Correct it."
    if re.search(r"://[^/]*@|[?#]", address):
        yield f"endpoint: a password or parameters in the address; expected none. Use {section}.api_key_env."


class DataSection(RecipeSection):
    """The training text, and the part of it that is held out for evaluation."""

    sources: NonEmpty[SourceSpec]
    """The sources of the records, which are pooled. A slice as `split` takes a part of a source."""
    regenerate: RegenerateSpec | None = None
    """Train on responses that the trunk generates; null trains on the responses of the sources."""
    responses: Text | None = None
    """A run directory. Its responses, which the same trunk generated, are copied for prompts with the same tokens; the
    trunk generates only the missing ones. Dtype, seed and sampling settings of that run may differ."""
    chat_template_kwargs: Mapping[str, Any] = Field(default={})
    """Variables for the chat template, as the trunk is served: `{enable_thinking: false}`. A record's own
    `chat_template_kwargs` and `tools` win."""
    seq_len_tokens: OrAuto[Count] = 512
    """Length of a training sequence, in tokens. `auto`: a power of two for 95 % of the texts, from 512 to 4096."""
    loss_positions: Count | None = None
    """Train on the drafts from this number of positions of each sequence, for long sequences; the rest of the text is
    context. The positions are chosen evenly from those with a target, others in every epoch, and all depths of each are
    trained. Losses and gradients are those of these positions in training on all, which is null. Saves the lm_head and
    most of the head's forward at all other positions. A head of chained modules, `objective.unroll: fastmtp`, and
    layers that choose keys save the lm_head alone."""
    pack: bool = True
    """Whether to pack several documents into a sequence, with attention limited to each document. If false, a sequence
    has one document and padding."""
    holdout: OrAuto[Share] = 0.05
    """Share of the groups of records that is held out of training, for evaluation. `auto`: 64 records and 12
    groups, from 5 % to 30 %."""
    group_field: Text | None = None
    """Name of a record field. Records with the same value are one group, and groups are not joined. Null groups chats
    by their first user turn, pairs by their prompt and the paragraphs of a .txt by their file, and joins groups with
    near-duplicate prompts (about 2 minutes and 0.5 GB for a million prompts of 500 characters)."""

    def contradictions(self) -> Iterator[str]:
        if self.responses is not None and self.regenerate is None:
            yield f"responses: {self.responses!r} while data.regenerate is null; expected null. Leave it out."
        count = self.loss_positions
        length = self.seq_len_tokens
        if count is not None and not is_auto(length) and count >= length:
            yield (
                f"loss_positions: {count} of the {length} tokens of a sequence (data.seq_len_tokens); expected fewer. "
                "Write data.loss_positions: null for all."
            )


class ObjectiveSection(RecipeSection):
    """The loss of the head. p is the trunk's next-token distribution, q the head's."""

    loss: Annotated[str, _OneOf(loss_choices)] = "auto"
    """`ce`: cross-entropy with the token of the text. The other losses fit q to p. `kl` and `reverse_kl`: the two
    divergences. `tv`: the probability that a sampled draft is rejected. `lk`: moves from `kl` to `tv` as the overlap of
    p and q grows. `e2e_tv`: the probability that at least one of the drafts so far is rejected. `auto`: `kl`."""
    temperature: Positive = 1.0
    """Temperature of p and q, in all losses except `ce`."""
    depth_decay: UpToOne = 0.6
    """The weight of depth k is this value to the power k - 1. The weights are scaled to sum to 1."""
    unroll: Literal["exact", "fastmtp"] = "exact"
    """The teacher-forced rollout over the depths. `exact`: attention and positions as in decoding. `fastmtp`: a query
    attends only to keys of its own depth, and positions do not advance with the depth; for heads with one MTP module,
    and for comparison."""

    def contradictions(self) -> Iterator[str]:
        if not find_loss(self.loss).distils:
            yield from self.without_effect("objective.loss", self.loss, "temperature")


class HiddenCacheSpec(RecipeSection):
    """The trunk's hidden states on disk: computed once, then read in every epoch and by every run with the same text.

    The trunk's layers are removed from memory before the head is trained, whether the trunk is sharded or whole.
    """

    directory: Text | None = None
    """The directory of the caches. Each cache has a name derived from trunk, text and precision. Null is `hidden` in
    the run directory."""


class StatesSpec(RecipeSection):
    """Hidden states from a vLLM server of the trunk, whose layers are not loaded here.

    States are fetched while the head is trained, and kept on disk if there is more than one epoch (`hidden_cache`).
    """

    endpoint: Text
    """Address of the server, up to and including the API version: `http://localhost:8000/v1`. `mtp-train check` prints
    the command that starts it. A run can be resumed with another address."""
    model: Text | None = None
    """The name of the trunk on the server; null if the server has one model."""
    concurrency: Count = 16
    """Maximum number of concurrent requests to the server, over all processes."""
    api_key_env: Text | None = None
    """Name of the environment variable with the API key of the server. The key itself is not written to any file."""

    def contradictions(self) -> Iterator[str]:
        yield from _of_address(self.endpoint, "train.states")


class SelectSpec(RecipeSection):
    """Measure acceptance during training, on text that is kept out of training, and keep the best head.

    The head before the first step is measured too. If no later one is better, training gave no gain.
    """

    every_steps: Count | None = None
    """Steps between measurements; null is a tenth of the steps. The last step is always measured."""
    share: Share = 0.1
    """Largest share of the groups of training documents to keep out of training, one group at least."""
    tokens: Count = 8192
    """Number of tokens to measure on. No more groups are kept out than it needs."""
    patience: Count | None = None
    """Stop after this number of measurements without a better head; null trains all steps."""


class TrainSection(RecipeSection):
    """Length and speed of training. The values do not depend on the number of processes."""

    max_steps: OrAuto[Count]
    """Number of optimizer steps. `auto`: 3 passes over the text, up to 10 where they make fewer than 100 steps; twice
    as many for a new head."""
    tokens_per_step: OrAuto[Count]
    """Tokens per optimizer step over all processes, padding included. `auto`: 20 steps per pass over the text, from 4
    sequences to 65536 tokens."""
    lr: OrAuto[Positive]
    """Peak learning rate of AdamW. `auto`: 0.4096 / hidden size, ten times as much for `head.lora`; a fifth of it for a
    head that `train.select` finds good before the first step."""
    micro_batch_sequences: OrAuto[Count] = 1
    """Sequences per forward pass on one process. Changes memory use, not the result. `auto`: as many as fit into
    memory, at most 16384 tokens on a GPU and 2048 on a CPU."""
    processes: Count | None = None
    """Number of processes that the launcher must have started; null accepts any."""
    warmup_steps: OrAuto[Natural] = 0
    """Steps over which the learning rate rises linearly. `auto`: 5 % of the steps."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after the warm-up: a cosine down to 0, or constant."""
    gradient_checkpointing: bool = False
    """Whether to store less of the head's forward pass and recompute it in the backward pass: less memory, slower
    steps."""
    hidden_cache: HiddenCacheSpec | None = None
    """Store the trunk's hidden states on disk; null runs the trunk in every step. Saves time from the second epoch
    on."""
    states: StatesSpec | None = None
    """Take the trunk's hidden states from a server; null computes them here."""
    select: SelectSpec | None = None
    """Keep the head with the best acceptance of the training, its start included; null keeps the last."""
    weight_decay: NonNegative = 0.0
    """Weight decay of AdamW, on matrices only."""
    betas: Annotated[tuple[BelowOne, ...], Field(min_length=2, max_length=2)] = (0.9, 0.95)
    """The two decay rates of AdamW."""
    max_grad_norm: Positive = 1.0
    """Gradients with a larger norm are scaled down to this norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of matrix products. The head's weights are always fp32. `auto`: bf16 where the device multiplies it
    natively and faster than fp32, else fp32. The resolved value is written to the run directory, and a resumed run
    keeps it."""
    save_steps: Count = 100
    """Steps between saved training states. The last step is always saved."""
    log_steps: Count = 10
    """Steps between lines of `metrics.jsonl`."""

    def contradictions(self) -> Iterator[str]:
        if not is_auto(self.warmup_steps, self.max_steps) and self.warmup_steps >= self.max_steps:
            yield f"warmup_steps: {self.warmup_steps}; expected less than train.max_steps ({self.max_steps}). Lower it."


class EvaluateSection(RecipeSection):
    """The comparison after training, on held-out prompts."""

    arms: NonEmpty[Arm]
    """What to compare. On the trunk: no head (`none`), the grafted, the native or the retrained head. `vanilla`:
    `model.head_from` with its own head."""
    prompts: OrAuto[Count] = 64
    """Number of held-out prompts that each arm decodes. `auto`: all, at most 64."""
    temperature: OneOrMore[NonNegative] = AUTO
    """Sampling temperatures of the trunk; 0 is greedy. Each temperature above 0 is combined with every `top_p`, `top_k`
    and `rule`, and the gate tests every combination. `auto`: 0, and the temperature in the trunk's
    `generation_config.json` if that file enables sampling."""
    top_p: OneOrMore[UpToOne] = AUTO
    """Above temperature 0, sample from the smallest set of tokens whose probabilities sum to at least this value.
    `auto`: the value in `generation_config.json` if that file enables sampling, else 1."""
    top_k: OneOrMore[Natural] = AUTO
    """Above temperature 0, sample from the k most probable tokens; 0 samples from all. `auto`: the value in
    `generation_config.json` if that file enables sampling, else 0."""
    rule: OneOrMore[Literal["argmax", "sampled"]] = AUTO
    """How drafts are made and verified above temperature 0. `argmax`: the head's most probable token; the text is
    compared with plain sampling with the same seed. `sampled`: drawn from the head's distribution, and verified by
    rejection sampling. `auto`: `argmax`, as in most engines."""
    max_new_tokens: Count = 256
    """Maximum length of a response, in tokens."""
    depth: Depth | None = None
    """Number of tokens drafted per round; null takes `head.num_depths`."""
    dense_tokens: Count = 16384
    """Number of held-out tokens for the teacher-forced metrics (top-1 agreement, overlap of p and q)."""

    def contradictions(self) -> Iterator[str]:
        filters = "top_p", "top_k", "rule"
        yield from self.repeats("arms", "temperature", *filters)
        temperatures = () if is_auto(self.temperature) else self.temperature
        if temperatures and not any(temperatures):
            yield from self.without_effect("evaluate.temperature", 0, *filters)
        for value in temperatures:
            if 0.0 < value < MIN_TEMPERATURE:
                yield f"temperature: {value:g}; expected 0 or a number from {MIN_TEMPERATURE:g}. Write 0 for greedy."


class GateSection(RecipeSection):
    """The condition under which a retrained head is exported."""

    enabled: bool = True
    """Whether to measure the arms and judge the head. `false` exports it unjudged, for a trunk that is too large to
    decode with here, or where an engine measures it."""
    baseline: Literal["auto", "graft", "native", "none"] = "auto"
    """The arm that the retrained head must beat. `auto`: the best head that exists without training, or `none` if there
    is no such head."""
    confidence: Annotated[float, Field(gt=0.5, lt=1)] = 0.95
    """Confidence level of the interval of the gain in tau. The interval must be above 0 at one setting of `evaluate` at
    least, with Holm's correction over the settings, and must not lie below 0 at any setting. Against `none` the same
    holds for the measured speedup above 1, or for tau above `break_even_tau`."""
    break_even_tau: Annotated[float, Field(ge=1)] | None = None
    """Tau from which drafts pay in the engine that will serve the head, as the report of `mtp-train compare` or the
    engine's own benchmark gives it. Then it decides against `none`. Null: the speed measured here decides."""


class ExportSection(RecipeSection):
    """The checkpoint that is written if the gate is passed, or off."""

    enabled: bool = True
    """Whether to write it."""
    link: Literal["hard", "copy"] = "hard"
    """Whether unchanged files are hard-linked (where the file system supports it) or copied."""


class TrackSection(RecipeSection):
    """Experiment tracking, in addition to `metrics.jsonl`."""

    wandb: Literal["off", "offline", "online"] = "off"
    """The mode of Weights & Biases, which needs `pip install wandb`. `offline` needs no network: upload later with
    `wandb sync`. A resumed run goes on under its id in `tracked.json`."""
    tensorboard: bool = False
    """Whether to write events for TensorBoard to `run_dir/tensorboard`; needs `pip install tensorboard`."""
    trackio: bool = False
    """Whether to track with trackio; needs `pip install trackio`."""
    project: Text = "mtp-train"
    """The project in Weights & Biases and trackio."""


class StudySection(RecipeSection):
    """Compare `model.head_from` with its own head with `model.trunk` with the grafted head and with retrained heads.

    One head is retrained for each objective, with the same data, steps and seed. All of `evaluate.arms` decode the same
    prompts. The study tests the claim that retraining on the distilled distribution restores the vanilla acceptance.
    Nothing is exported.
    """

    objectives: NonEmpty[Objective] = ("kl", "ce")
    """The losses to retrain heads with, see `objective.loss`. Each is an arm, such as `retrained-kl`. The verdict is on
    the first; the others are compared with it."""
    temperatures: NonEmpty[NonNegative] = (0.0, 1.0)
    """Sampling temperatures; 0 is greedy."""
    rules: NonEmpty[Literal["greedy", "argmax", "sampled"]] = ("greedy", "sampled")
    """How drafts are made and verified. `greedy`: at temperature 0. Above it, `argmax`: the head's most probable token,
    or `sampled`: drawn from the head's distribution and verified by rejection sampling."""
    depths: NonEmpty[Depth] = (3,)
    """Numbers of tokens drafted per round."""
    batch: Count = 16
    """Most prompts decoded together, for acceptance. Speed is measured on 8 prompts, one at a time."""
    margin: Share = 0.05
    """Largest loss, as a share of the vanilla level, with which acceptance still counts as restored."""

    def contradictions(self) -> Iterator[str]:
        yield from self.repeats("objectives", "temperatures", "rules", "depths")
        for temperature in self.temperatures:
            if not any((rule == "greedy") == (temperature == 0) for rule in self.rules):
                wanted = "greedy" if temperature == 0 else "sampled"
                yield f"rules: {list(self.rules)} has none for temperature {temperature:g}; expected it. Add {wanted}."
