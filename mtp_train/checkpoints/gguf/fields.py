"""Readers that turn fields of a model's config into GGUF metadata, and the tables that architectures share.

Field names lack the architecture's prefix. Names and defaults equal llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.spec import RawConfig

Value = int | float | bool | str | list[int] | list[bool] | list[float]
Field = Callable[[RawConfig], Value | None]
"""Text config (defaults filled in) to a value; None writes no field. The Python type determines the GGUF type."""

NUM_MODULES = "num_head_modules"
"""Key under which the writer adds the number of head modules to the config that the readers get."""
DEFAULT_SECTIONS = [11, 11, 10, 0]
_FULL = "full_attention"
_ROUTERS = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
_ROUTER_FIELDS = ("score_function", "scoring_func", "score_func", "moe_router_activation", "expert_selection_fn")


def whole(*names: str, default: int | None = None) -> Field:
    """Read an integer from the first of these fields that the config has."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else int(value)

    return read


def real(*names: str, default: float | None = None) -> Field:
    """Read a float from the first of these fields that the config has."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else float(value)

    return read


def flag(*names: str, default: bool | None = None) -> Field:
    """Read a boolean from the first of these fields that the config has."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else bool(value)

    return read


def total(*names: str) -> Field:
    """Add integer fields."""
    return lambda config: sum(int(config[name]) for name in names)


def product(*names: str) -> Field:
    """Multiply integer fields."""

    def read(config: RawConfig) -> Value:
        result = 1
        for name in names:
            result *= int(config[name])
        return result

    return read


def rotated(dims: str, partial: float) -> Field:
    """Compute the number of rotated dimensions of an attention head.

    Args:
        dims: Field with the head's size.
        partial: Rotated share if the config has none.
    """

    def read(config: RawConfig) -> Value:
        size = config.get(dims) or config["hidden_size"] // config["num_attention_heads"]
        # The release's own field comes first, because transformers may ignore it.
        share = config.get("partial_rotary_factor") or rope_of(config).get("partial_rotary_factor", partial)
        return int(size * share)

    return read


def sections(config: RawConfig) -> Value | None:
    """Read the split of the rotary dimensions over time, height and width, padded to four."""
    found = rope_of(config).get("mrope_section")
    return None if found is None else ([int(size) for size in found] + [0] * 4)[:4]


def sections_always(config: RawConfig) -> Value:
    """Read the same for loaders that require the field."""
    return sections(config) or DEFAULT_SECTIONS


def recurrent_layers(config: RawConfig) -> Value | None:
    """List for each layer whether it has a recurrent state; head modules have none."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    return [kind == "linear_attention" for kind in kinds] + [False] * config[NUM_MODULES]


def full_indexers(config: RawConfig) -> Value | None:
    """List for each layer whether it computes its own sparse selection."""
    kinds = config.get("indexer_types")
    return None if kinds is None else [kind == "full" for kind in kinds]


def yarn_log_multiplier(config: RawConfig) -> Value | None:
    """Read YaRN's attention multiplier in the form that llama.cpp stores for this architecture."""
    scale = rope_of(config).get("mscale_all_dim")
    return None if scale is None else 0.1 * float(scale)


def router(default: str | None = None) -> Field:
    """Read llama.cpp's number of the function that turns router logits into weights."""

    def read(config: RawConfig) -> Value | None:
        name = next((config[field] for field in _ROUTER_FIELDS if field in config), default)
        if name is not None and name not in _ROUTERS:
            raise UnsupportedModelError(
                f"config.json: router function '{name}' is unknown to GGUF; expected one of {', '.join(_ROUTERS)}. "
                "Export without --gguf."
            )
        return None if name is None else _ROUTERS[name]

    return read


def only_if_true(name: str) -> Field:
    """Read a boolean that is written only if it is true."""
    return lambda config: True if config.get(name) else None


def either(*fields: Field) -> Field:
    """Return the first value of these readers that is not None."""
    return lambda config: next((value for read in fields if (value := read(config)) is not None), None)


def limits(name: str) -> Field:
    """Read one bound per block; 0 means no bound, also for blocks beyond the config's list."""

    def read(config: RawConfig) -> Value | None:
        found = config.get(name)
        blocks = config["num_hidden_layers"] + config[NUM_MODULES]
        return None if found is None else [float(bound or 0.0) for bound in [*found, *[0.0] * blocks][:blocks]]

    return read


def always(value: Value) -> Field:
    """Return a reader of a constant."""
    return lambda config: value


def rope_of(config: RawConfig, kind: str = _FULL) -> RawConfig:
    """Return the rotary embedding's parameters, for layer type ``kind`` if layer types have different ones."""
    parameters: RawConfig = config.get("rope_parameters") or {}
    nested: RawConfig = parameters.get(kind, parameters)
    return nested


def _rope_real(*names: str, kinds: tuple[str, ...] = (), of: str = _FULL) -> Field:
    """Read a float from the rotary parameters; with ``kinds``, only if the scaling is one of these."""

    def read(config: RawConfig) -> Value | None:
        rope = rope_of(config, of)
        value = next((rope[name] for name in names if name in rope), None)
        wanted = not kinds or rope.get("rope_type") in kinds
        return float(value) if wanted and value is not None else None

    return read


def window_theta(config: RawConfig) -> Value | None:
    """Read the rotary base of layers with a sliding window."""
    theta = rope_of(config, "sliding_attention").get("rope_theta")
    return None if theta is None else float(theta)


def _rope_type(of: str) -> Field:
    def read(config: RawConfig) -> Value | None:
        kind = rope_of(config, of).get("rope_type", "default")
        if kind not in ("default", "linear", "yarn"):
            raise UnsupportedModelError(
                f"config.json: rope_type '{kind}' cannot be written to GGUF here; expected default, linear or yarn. "
                "Export without --gguf and use llama.cpp's own converter."
            )
        return None if kind == "default" else str(kind)

    return read


def _original_context(of: str) -> Field:
    def read(config: RawConfig) -> Value | None:
        rope = rope_of(config, of)
        return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "yarn" else None

    return read


def rope_scaling(of: str) -> Mapping[str, Field]:
    """Return the fields that describe the rotary scaling of one layer type."""
    return {
        "rope.scaling.type": _rope_type(of),
        "rope.scaling.factor": _rope_real("factor", kinds=("linear", "yarn"), of=of),
        "rope.scaling.original_context_length": _original_context(of),
        "rope.scaling.yarn_ext_factor": _rope_real("extrapolation_factor", kinds=("yarn",), of=of),
        "rope.scaling.yarn_attn_factor": _rope_real("attention_factor", "attn_factor", kinds=("yarn",), of=of),
        "rope.scaling.yarn_beta_fast": _rope_real("beta_fast", kinds=("yarn",), of=of),
        "rope.scaling.yarn_beta_slow": _rope_real("beta_slow", kinds=("yarn",), of=of),
    }


DECODER: Mapping[str, Field] = {
    "context_length": whole("max_position_embeddings"),
    "embedding_length": whole("hidden_size"),
    "feed_forward_length": whole("intermediate_size"),
    "attention.head_count": whole("num_attention_heads"),
    "attention.head_count_kv": whole("num_key_value_heads"),
    "attention.key_length": whole("head_dim"),
    "attention.value_length": whole("head_dim"),
    "attention.layer_norm_rms_epsilon": real("rms_norm_eps"),
    "rope.freq_base": _rope_real("rope_theta"),
    "rope.dimension_sections": sections,
    **rope_scaling(_FULL),
}
SIGMOID_ROUTER = always(_ROUTERS["sigmoid"])
EXPERTS: Mapping[str, Field] = {
    "expert_count": whole("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": whole("num_experts_per_tok"),
    "expert_group_count": whole("n_group"),
    "expert_group_used_count": whole("topk_group"),
    "expert_feed_forward_length": whole("moe_intermediate_size"),
    "expert_gating_func": router(),
}
