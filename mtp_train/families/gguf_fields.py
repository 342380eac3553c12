"""How a model's config becomes GGUF metadata: small readers, and the tables that architectures share.

A field is named without its architecture's prefix. Names and defaults are those of llama.cpp's converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mtp_train.errors import UnsupportedModelError
from mtp_train.families.spec import RawConfig

Value = int | float | bool | str | list[int] | list[bool] | list[float]
Field = Callable[[RawConfig], Value | None]
"""A text config, defaults filled in, to a value; None writes nothing. The Python type decides the stored one."""

NUM_MODULES = "num_head_modules"
"""Where the writer puts the number of head modules into the config that fields read."""
DEFAULT_SECTIONS = [11, 11, 10, 0]
_FULL = "full_attention"
_ROUTERS = {"softmax": 1, "sigmoid": 2, "sqrtsoftplus": 4}
_ROUTER_FIELDS = ("score_function", "scoring_func", "score_func", "moe_router_activation", "expert_selection_fn")


def whole(*names: str, default: int | None = None) -> Field:
    """Read an integer: the first of these config fields that is there."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else int(value)

    return read


def real(*names: str, default: float | None = None) -> Field:
    """Read a float: the first of these config fields that is there."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else float(value)

    return read


def flag(*names: str, default: bool | None = None) -> Field:
    """Read a boolean: the first of these config fields that is there."""

    def read(config: RawConfig) -> Value | None:
        value = next((config[name] for name in names if name in config), default)
        return None if value is None else bool(value)

    return read


def total(*names: str) -> Field:
    """Add up integers."""
    return lambda config: sum(int(config[name]) for name in names)


def product(*names: str) -> Field:
    """Multiply integers."""

    def read(config: RawConfig) -> Value:
        result = 1
        for name in names:
            result *= int(config[name])
        return result

    return read


def rotated(dims: str, partial: float) -> Field:
    """Count a head's rotated dimensions, the share ``partial`` of them where the config does not say how many."""

    def read(config: RawConfig) -> Value:
        size = config.get(dims) or config["hidden_size"] // config["num_attention_heads"]
        # A release's own field first: transformers may leave it aside.
        share = config.get("partial_rotary_factor") or rope_of(config).get("partial_rotary_factor", partial)
        return int(size * share)

    return read


def sections(config: RawConfig) -> Value | None:
    """Read the split of the rotary dimensions over time, height and width, padded to four."""
    found = rope_of(config).get("mrope_section")
    return None if found is None else ([int(size) for size in found] + [0] * 4)[:4]


def sections_always(config: RawConfig) -> Value:
    """Read them where the loader insists on having them."""
    return sections(config) or DEFAULT_SECTIONS


def recurrent_layers(config: RawConfig) -> Value | None:
    """Say of each layer whether it keeps a recurrent state; head modules never do."""
    kinds = config.get("layer_types")
    if kinds is None:
        return None
    return [kind == "linear_attention" for kind in kinds] + [False] * config[NUM_MODULES]


def full_indexers(config: RawConfig) -> Value | None:
    """Say of each layer whether it computes a sparse selection of its own."""
    kinds = config.get("indexer_types")
    return None if kinds is None else [kind == "full" for kind in kinds]


def yarn_log_multiplier(config: RawConfig) -> Value | None:
    """Read what yarn multiplies attention by, in the form that llama.cpp keeps for this architecture."""
    scale = rope_of(config).get("mscale_all_dim")
    return None if scale is None else 0.1 * float(scale)


def router(default: str | None = None) -> Field:
    """Read the function that turns a router's logits into weights, as llama.cpp numbers it."""

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
    """Read a boolean that is left out where it is false."""
    return lambda config: True if config.get(name) else None


def either(*fields: Field) -> Field:
    """Read the first of these that says anything."""
    return lambda config: next((value for read in fields if (value := read(config)) is not None), None)


def limits(name: str) -> Field:
    """Read one bound a block; 0 says that there is none, as of the blocks that the config does not name."""

    def read(config: RawConfig) -> Value | None:
        found = config.get(name)
        blocks = config["num_hidden_layers"] + config[NUM_MODULES]
        return None if found is None else [float(bound or 0.0) for bound in [*found, *[0.0] * blocks][:blocks]]

    return read


def always(value: Value) -> Field:
    """Write the same for every model."""
    return lambda config: value


def rope_of(config: RawConfig, kind: str = _FULL) -> RawConfig:
    """Return the rotary embedding's parameters: those of one kind of layer, where kinds have their own."""
    parameters: RawConfig = config.get("rope_parameters") or {}
    nested: RawConfig = parameters.get(kind, parameters)
    return nested


def _rope_real(*names: str, kinds: tuple[str, ...] = (), of: str = _FULL) -> Field:
    """Read a float of the rotary embedding; where ``kinds`` are named, only under such a scaling."""

    def read(config: RawConfig) -> Value | None:
        rope = rope_of(config, of)
        value = next((rope[name] for name in names if name in rope), None)
        wanted = not kinds or rope.get("rope_type") in kinds
        return float(value) if wanted and value is not None else None

    return read


def window_theta(config: RawConfig) -> Value | None:
    """Read the base of the rotary embedding in layers with a sliding window."""
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
    """Return what describes how the rotary embedding is stretched in one kind of layer."""
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
