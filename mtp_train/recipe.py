"""What a recipe can say: every section and field, with type, limits, default and meaning.

This is the one place where a field is defined. Reading (``recipe_io``), the rules between fields (``recipe_rules``) and
the reference in ``recipes/README.md`` follow from it. No torch is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mtp_train.recipe_hints import Bound, OneOrMore
from mtp_train.recipe_sft import SftSection
from mtp_train.recipe_study import StudySection

Count = Annotated[int, Bound(min=1)]
Depth = Annotated[int, Bound(min=1, max=7)]
Share = Annotated[float, Bound(above=0, below=1)]
Positive = Annotated[float, Bound(above=0)]
UpToOne = Annotated[float, Bound(above=0, max=1)]
Momentum = Annotated[float, Bound(min=0, below=1)]
Auto = Literal["auto"]

InitKind = Literal["native", "graft", "copy_last_layer", "random"]
Arm = Literal["none", "graft", "native", "retrained", "vanilla"]
Baseline = Literal["graft", "native", "none"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSection:
    """The trunk, and where its head comes from."""

    trunk: str
    """The fine-tuned checkpoint, frozen throughout: a directory, a hub id, or `demo:NAME`."""
    head_from: str | None = None
    """The checkpoint whose head is grafted, and whose own trunk is the `vanilla` arm: usually the fine-tune's base."""
    adapter: str | None = None
    """A peft LoRA adapter: the trunk is then `trunk` with this adapter, unmerged; the export has it merged."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision in which the trunk's weights are held; `auto`: the checkpoint's own, on a CPU float32."""
    quantization: Literal["8bit", "4bit"] | None = None
    """Pack the trunk's linear layers into fewer bits as they are loaded, by bitsandbytes, for training and measuring on
    a small card; experts stay as they are. The export has the checkpoint's own bytes."""
    offload: Literal["cpu", "disk"] | None = None
    """Keep the trunk's layers in main memory, or in a folder of the run directory, and bring them to the device one at
    a time: slow, and small; the results are the same. For one process. The trunk is loaded through main memory either
    way."""
    trust_remote_code: bool = False
    """Whether a checkpoint may bring code of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSpec:
    """LoRA on the head: its weights stay, low-rank matrices beside them are trained, and are merged into what is saved.

    Norms, routers and whatever else is no target stay as they are.
    """

    r: Count = 16
    """The rank; of stacked experts, that of each one."""
    alpha: Count = 32
    """What the matrices add is scaled by this over `r`."""
    targets: Annotated[tuple[str, ...], Bound(min=1)] | None = None
    """Layers by the last part of their names, such as `q_proj`; null takes all linear layers and the experts of a
    mixture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadSection:
    """The head that is trained."""

    kind: Literal["mtp", "eagle", "eagle3", "medusa"] = "mtp"
    """The architecture. `mtp`: norms, a projection and a decoder layer of the trunk's own kind, kept in the trunk's
    checkpoint. For models that never had a head, each exported as a checkpoint of its own: `eagle`, a layer of Llama's
    kind; `eagle3`, one that reads three of the trunk's layers; `medusa`, a residual block for each depth, of the
    trunk's last state alone."""
    init: InitKind = "graft"
    """What it starts from: the head in `model.trunk`, the one in `model.head_from`, a new one around a copy of the
    trunk's last layer, or a new one of random weights."""
    num_depths: Depth = 3
    """How many tokens ahead it is trained to draft. Says nothing about how many modules the checkpoint holds."""
    lora: LoraSpec | None = None
    """LoRA on the head; null trains all of its weights."""
    convention: Literal["auto", "vllm", "sglang", "llama.cpp"] = "auto"
    """The engine whose reading of the head counts, where engines differ; `auto` takes the family's usual one. With
    `llama.cpp`, all modules of Step-3.5 and MiMo-V2-Flash read the text as the first one does, as in that engine."""
    draft_vocab: Count | None = None
    """How many tokens may be drafted: the most frequent ones of the training text; null drafts from all. A smaller
    output matrix drafts faster and misses rare tokens. For the built-in decoder, and of kind `eagle3` for engines too;
    of other kinds they draft from all tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceSpec:
    """One source of records."""

    path: str
    """A .json, .jsonl, .parquet or .txt file (.gz, .xz, .bz2 and .zst too), a directory or a glob of files of one kind,
    the hub id of a dataset, or `demo:NAME`."""
    config: str | None = None
    """The configuration of a hub dataset; null takes the one that it opens by default."""
    split: str = "train"
    """A split of the dataset; slices such as `train[:1000]` are allowed."""
    format: Literal["auto", "messages", "prompt_response", "text"] = "auto"
    """How the columns are read; `auto` goes by their names."""
    weight: Positive | None = None
    """Share of the records that come from this source, relative to the other weights: as many as can be without taking
    one twice, chosen by `seed`. On every source or on none; null takes all records of all sources."""
    streaming: bool = False
    """Whether to read no more of it than `data.max_documents`, without a copy in the cache: for a source that is too
    large to download."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RegenerateSpec:
    """Responses written by the trunk itself in place of those in the sources: sampled, or greedily.

    The built-in decoder writes them; or a server that speaks OpenAI's API (vLLM, SGLang, llama.cpp), where `endpoint`
    names one.
    """

    enabled: bool = True
    """Whether to regenerate; if not, the sources' own responses are trained on."""
    max_prompts: Count | None = None
    """Prompts to answer; null answers all."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    batch_size: Count | None = None
    """Prompts answered side by side by the built-in decoder on each process; null is 16."""
    temperature: Annotated[float, Bound(min=0)] = 1.0
    """0 is greedy. Above 0 every prompt has a seed of its own, made from `seed` and recorded with the response. Sampled
    responses follow the distribution that sampling serves (`inference/benchmarks/objectives.md` compares)."""
    top_p: UpToOne = 1.0
    """Sample from the fewest tokens whose probabilities reach this sum."""
    top_k: Annotated[int, Bound(min=0)] = 0
    """Sample from the k most probable tokens; 0 from all."""
    min_p: Annotated[float, Bound(min=0, below=1)] = 0.0
    """Sample from tokens at least this probable, relative to the most probable one."""
    max_repeated: UpToOne | None = None
    """Responses in which more than this share of the 8-grams occurred before are not trained on; null keeps them."""
    endpoint: str | None = None
    """The server's address up to and with its version, such as `http://localhost:8000/v1`. It must serve the trunk: its
    answers to a few prompts are compared with what the trunk would say, then a sample of every thousand answers. A run
    goes on at another address."""
    model: str | None = None
    """What the server calls the trunk; null where it serves one model."""
    concurrency: Count | None = None
    """Requests to the server in flight, over all processes; null is 32."""
    api_key_env: str | None = None
    """The environment variable with the server's key; the key itself is written nowhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """What is trained on, and what is held out of it."""

    sources: Annotated[tuple[SourceSpec, ...], Bound(min=1)]
    """Where the records come from; pooled, or mixed by `weight`."""
    regenerate: RegenerateSpec | None = None
    """Train on what the trunk says itself; null trains on the sources' own responses."""
    seq_len_tokens: Count = 512
    """Length of a training sequence, in tokens."""
    pack: bool = True
    """Whether a sequence holds several documents (which never see one another), or one and padding."""
    holdout: Share = 0.05
    """Share of the groups of records kept out of training, to evaluate on."""
    group_field: str | None = None
    """Records with the same value here are held out together, and nothing else is joined. Null groups chats by their
    first user turn, pairs by their prompt, the paragraphs of a .txt by their file, and joins groups whose prompts are
    near-duplicates (about 2 minutes and 0.5 GB for a million prompts of 500 characters)."""
    max_documents: Count | None = None
    """Records read from each source; null reads all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectiveSection:
    """What the head is trained towards."""

    loss: Literal["auto", "ce", "kl", "reverse_kl", "tv", "lk", "e2e_tv"] = "auto"
    """`ce`: the token that follows. The others draw q to the trunk's own distribution p: `kl` and `reverse_kl`
    divergences; `tv`: the chance that a sampled draft is rejected; `lk`: from `kl` to `tv` as they come to overlap;
    `e2e_tv`: the chance that not all drafts so far are accepted. `auto`: `kl`."""
    temperature: Positive = 1.0
    """Softens p and q, in every loss but `ce`."""
    depth_decay: Annotated[float, Bound(above=0, max=1)] = 0.6
    """Depth k weighs this to the power k - 1, all weights scaled to sum 1."""
    unroll: Literal["exact", "fastmtp"] = "exact"
    """How depths see one another in training. `exact`: as they do in decoding. `fastmtp`: each only rows of its own
    depth, at positions that do not advance; for heads of one module, and for comparison."""
    on_policy: bool = False
    """Let depth k + 1 read the head's own draft: what follows a wrong draft, and would be rejected, is left out."""
    vocab: Literal["all", "draft"] = "all"
    """The tokens p and q are distributions over: all, or the `head.draft_vocab` most frequent ones."""
    rows: Literal["torch", "triton"] = "torch"
    """What makes losses and gradients of the logits. `triton`: kernels that move a fraction of the bytes, for GPUs that
    Triton knows; tested in its interpreter, and measured on no GPU yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenCacheSpec:
    """The trunk's hidden states on disk: computed once, and read in every epoch and by every run that shares them.

    The trunk's layers leave the memory before the head trains, in shards or whole.
    """

    max_gib: Positive = 64.0
    """Most room that it may take; a run that needs more says so before it starts."""
    dtype: Literal["auto", "bf16", "fp8"] = "auto"
    """How a state is kept: as the trunk computes it, in 2 bytes a number, or in 1 with a scale for each token."""
    directory: str | None = None
    """Where caches lie, each under a name made of trunk, text and precision; null is `hidden` in the run directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SelectSpec:
    """Measure acceptance on the way, on text kept from training, and take the head that was best."""

    every_steps: Count = 50
    """Steps between measures; the last step is measured too."""
    share: Share = 0.05
    """Share of the groups of training documents that is kept from training."""
    tokens: Count = 16384
    """Most tokens of them that are measured on."""
    prompts: Annotated[int, Bound(min=0)] | None = None
    """How many are also decoded, for the log; null is 4, or 0 where no process holds a whole trunk (in shards, or with
    `train.hidden_cache`)."""
    patience: Count | None = None
    """Stop after so many measures without a better one; null goes on to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSection:
    """How long and how fast the head learns, whatever the number of processes."""

    max_steps: Count
    """Optimiser steps."""
    tokens_per_step: Count
    """Tokens of one optimiser step over all processes, padding included."""
    lr: Positive
    """Peak learning rate of AdamW."""
    micro_batch_sequences: Count = 1
    """Sequences in one forward pass of one process; costs memory, changes no result."""
    warmup_steps: Annotated[int, Bound(min=0)] = 0
    """Steps over which the learning rate rises linearly."""
    schedule: Literal["cosine", "constant"] = "cosine"
    """The learning rate after the warm-up: down to 0 along a cosine, or level."""
    gradient_checkpointing: bool = False
    """Keep less of the head's forward pass and run it a second time instead: less memory, slower steps."""
    attention: Literal["dense", "flex"] = "dense"
    """How the head's rows see one another: by masks of all rows and keys, whose memory grows with the square of
    `data.seq_len_tokens`; or by torch's flex_attention, without them, on GPUs. The results are the same."""
    hidden_cache: HiddenCacheSpec | None = None
    """Keep the trunk's hidden states on disk; null runs the trunk in every step. Pays from the second epoch on."""
    select: SelectSpec | None = None
    """Choose among the heads on the way by their acceptance; null takes the last."""
    weight_decay: Annotated[float, Bound(min=0)] = 0.0
    """AdamW's decay, on matrices only."""
    betas: tuple[Momentum, Momentum] = (0.9, 0.95)
    """AdamW's two decay rates."""
    max_grad_norm: Positive = 1.0
    """Longer gradients are scaled down to this norm."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Precision of the matrix products; the head's own weights stay in fp32. `auto`: bf16 where the device multiplies
    it natively, else fp32. The resolved value is written to the run directory, where a resumed run keeps it."""
    save_steps: Count = 100
    """Steps between resume states; the last step always leaves one."""
    log_steps: Count = 10
    """Steps between lines of `metrics.jsonl`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateSection:
    """What is compared after training, on held-out prompts."""

    arms: Annotated[tuple[Arm, ...], Bound(min=1)]
    """What to compare: no head, the grafted, native or retrained head on the trunk, or `model.head_from` by itself."""
    prompts: Count = 64
    """Held-out prompts each arm decodes."""
    temperature: Annotated[tuple[Annotated[float, Bound(min=0)], ...] | Auto, OneOrMore(min=1)] = "auto"
    """Sampling temperatures of the trunk; 0 is greedy. Each temperature above 0 is combined with every `top_p`, `top_k`
    and `rule`, and the gate judges every combination. `auto`: 0, and the temperature of the trunk's
    `generation_config.json` where that samples."""
    top_p: Annotated[tuple[UpToOne, ...] | Auto, OneOrMore(min=1)] = "auto"
    """Above temperature 0, sample from the fewest tokens whose probabilities reach this sum. `auto`: as
    `generation_config.json` has it where that samples, else 1."""
    top_k: Annotated[tuple[Annotated[int, Bound(min=0)], ...] | Auto, OneOrMore(min=1)] = "auto"
    """Above temperature 0, sample from the k most probable tokens; 0 from all. `auto`: as `generation_config.json` has
    it where that samples, else 0."""
    rule: Annotated[tuple[Literal["argmax", "sampled"], ...] | Auto, OneOrMore(min=1)] = "auto"
    """How drafts are made and verified above temperature 0: `argmax`, the head's first choice, whose text is compared
    with plain sampling of the same seed; or `sampled`, drawn from the head's distribution and verified by rejection
    sampling. `auto`: `argmax`, as most engines do."""
    max_new_tokens: Count = 256
    """Longest response, in tokens."""
    depth: Depth | None = None
    """Tokens drafted a round; null takes `head.num_depths`."""
    dense_tokens: Count = 16384
    """Held-out tokens for the figures that need no decoding (top-1 agreement, overlap of p and q)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GateSection:
    """When a retrained head is good enough to export."""

    baseline: Literal["auto", "graft", "native", "none"] = "auto"
    """The arm it must beat; `auto` takes the best head to be had without training, `none` where there is none."""
    confidence: Annotated[float, Bound(above=0.5, below=1)] = 0.95
    """Confidence of the interval of the gain in tau that must lie above 0 at one setting of `evaluate` at least, by
    Holm's correction over the settings, and may lie below 0 at none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportSection:
    """The checkpoint written when the gate is passed."""

    enabled: bool = True
    """Whether to write it."""
    link: Literal["hard", "copy"] = "hard"
    """Files that did not change are hard-linked (where the file system can) or copied."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackSection:
    """Where numbers go besides `metrics.jsonl`."""

    wandb: Literal["off", "offline", "online"] = "offline"
    """Weights & Biases; `offline` needs no network."""
    project: str = "mtp-train"
    """The Weights & Biases project."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """One run, from a trunk and data to an exported head."""

    run_dir: str
    """Where everything of the run goes. The same recipe with the same inputs resumes there; another one is refused."""
    seed: Annotated[int, Bound(min=0, max=2**32 - 1)] = 0
    """Fixes what is held out, the order of the data and random weights."""
    model: ModelSection
    head: HeadSection = field(default_factory=HeadSection)
    data: DataSection
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    train: TrainSection
    evaluate: EvaluateSection
    gate: GateSection = field(default_factory=GateSection)
    export: ExportSection = field(default_factory=ExportSection)
    track: TrackSection = field(default_factory=TrackSection)
    study: StudySection | None = None
    """A study in the place of a single retrained head; null is the usual run, with its gate and its export."""
    sft: SftSection | None = None
    """A fine-tune of the trunk in the place of a retrained head; null leaves the trunk frozen."""

    @property
    def gate_baseline(self) -> Baseline:
        """The arm the retrained head must beat, ``auto`` resolved, whatever the head started from."""
        if self.gate.baseline != "auto":
            return self.gate.baseline
        if self.sft is not None:
            # Whatever checkpoint it is from: on the trunk that was tuned it is a graft.
            return "graft"
        if self.head.init == "native":
            return "native"
        return "none" if self.model.head_from is None else "graft"

    @property
    def attaches(self) -> bool:
        """Whether the head is a new one, which no checkpoint has."""
        return self.head.init in ("copy_last_layer", "random")

    @property
    def fresh_modules(self) -> int:
        """Modules of a new head: one, but where each depth has its own."""
        return self.head.num_depths if self.head.kind == "medusa" else 1

    @property
    def regenerates(self) -> bool:
        """Whether responses are the trunk's own."""
        return self.data.regenerate is not None and self.data.regenerate.enabled
