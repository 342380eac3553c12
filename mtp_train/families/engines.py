"""Serving engines: how each wires a head, and the commands that serve one, or why an engine does not use it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from mtp_train.head_kinds import head_kinds


@dataclass(frozen=True, kw_only=True)
class Convention:
    """One engine's wiring of a head, in the points where engines disagree."""

    hidden: Literal["after_final_norm", "before_final_norm", "of_layers", "with_keys"] = "after_final_norm"
    """The trunk's hidden state that the head reads: after or before the final norm. ``of_layers``: the inputs of the
    layers in ``Wiring.trunk_layers``, concatenated along the feature axis. ``with_keys``: the state after the final
    norm, and the keys and values of ``TrunkTraits.key_shapes``."""
    recycle: Literal["after_final_norm", "before_final_norm", "trunk"] = "after_final_norm"
    """The hidden input of depth k + 1: the state of depth k after or before the head's final norm, or the trunk's
    hidden state again."""
    zero_first_embedding: bool = False
    """Whether the row at position 0 gets a zero embedding (before the norm of the embedding)."""
    modules: Literal["each", "first"] = "each"
    """Module of depth k in a head with several modules: module k (``each``), or always the first one (``first``)."""
    prefix: Literal["chained", "trunk"] = "chained"
    """Input of a later module's rows over the given text. ``chained``: the output of the module before it at the same
    row, and the token one position further on. ``trunk``: the input of the first module's rows (the trunk's hidden
    state and the next token); only drafted rows are chained. Over a prompt, ``trunk`` needs no more than the keys and
    values of every module, whereas ``chained`` runs all modules but the last in full. In training ``trunk`` needs more
    passes; see ``heads.step.unroll``."""
    position_offset: int = 0
    """Added to every position in the head's rotary embedding. Rotary attention itself depends on differences of
    positions only: llama.cpp's positions, which are one higher in every row, need no offset here."""
    centred: bool = False
    """Whether the head's final norm is a LayerNorm, which first subtracts the mean of the state."""


ZERO_FIRST = Convention(zero_first_embedding=True)
BEFORE_NORM = Convention(hidden="before_final_norm", recycle="before_final_norm")
ALIKE = dict.fromkeys(("vllm", "sglang", "llama.cpp"), Convention())
"""The conventions of a head that all engines wire alike."""


@dataclass(frozen=True)
class EngineSupport:
    """Whether an engine loads the head (None: not verified by this project), with the command or the reason.

    In commands, ``{path}`` is the checkpoint and ``{depth}`` the number of drafts per round; :func:`engine_commands`
    lists all placeholders.
    """

    supported: bool | None
    text: str


Engines = Mapping[str, EngineSupport]
"""Engine to its support for a head."""
VLLM = EngineSupport(
    True,
    'vllm serve {path} --speculative-config \'{{"method":"mtp","num_speculative_tokens":{depth}}}\'',
)
SGLANG_DRAFTS = (
    "--speculative-num-steps {depth} --speculative-eagle-topk 1 --speculative-num-draft-tokens {depth_plus_1}"
)
SGLANG = EngineSupport(
    True,
    f"python -m sglang.launch_server --model-path {{path}} --speculative-algorithm NEXTN {SGLANG_DRAFTS}",
)


def _sidecar(options: str) -> EngineSupport:
    return EngineSupport(
        True,
        f"python convert_hf_to_gguf.py {{path}} {options}--outfile model.gguf && "
        "mtp-train export {path} --out model-head --gguf f16 && "
        "llama-server -m model.gguf -md model-head/mtp-*.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
    )


LLAMA_CPP_SIDECAR = _sidecar("--no-mtp ")
"""For heads that llama.cpp's converter writes in a form that its graph does not load."""
LLAMA_CPP_BESIDE = _sidecar("")
"""For heads that llama.cpp's converter leaves out and its graph loads."""
USE_MTP = EngineSupport(True, "model.generate(..., use_mtp=True): batch 1, one draft a round for each module")


def use_mtp_named(pattern: str) -> EngineSupport:
    """Return the entry of a head whose keys transformers' class does not list, so that the caller has to name them."""
    named = f"once loaded, model._keys_to_ignore_on_load_unexpected = [r'{pattern}']; {USE_MTP.text}"
    return EngineSupport(True, named.replace("{", "{{").replace("}", "}}"))


UNVERIFIED = EngineSupport(None, "not verified by this project")
NO_RECURRENT_ROLLBACK = EngineSupport(
    False, "generate(use_mtp=True) refuses models with recurrent state; the trunk itself loads"
)


def no(reason: str) -> EngineSupport:
    """Return the entry of an engine that does not use the head."""
    return EngineSupport(False, reason)


def remarked(support: EngineSupport, remark: str) -> EngineSupport:
    """Return an engine's entry with a remark behind its text."""
    return replace(support, text=support.text + remark)


DSPARK = {
    "vllm": EngineSupport(
        None,
        "not verified: vllm serve {path} "
        '--speculative-config \'{{"method":"dspark","num_speculative_tokens":{depth}}}\'',
    ),
    "sglang": EngineSupport(
        None, "not verified: python -m sglang.launch_server --model-path {path} --speculative-algorithm DSPARK"
    ),
    "llama.cpp": no("its converter reads a DSpark drafter from a directory of its own"),
}
"""Engines that draft with a DSpark drafter inside of its trunk's checkpoint; ``{depth}`` is the size of its block."""
MLX_ALONE = {
    "mlx": EngineSupport(None, "not verified: mlx_lm.server --model {path}"),
    **dict.fromkeys(("vllm", "sglang", "llama.cpp", "exllamav3", "transformers"), no("does not read MLX's layout")),
}
LLAMA_CPP_KEEPS = no("keeps the head's tensors and has no graph for them")


_DEFAULTS: Engines = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": EngineSupport(
        True,
        "python convert_hf_to_gguf.py {path} --outfile model.gguf && "
        "llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
    ),
    "ollama / lm studio": EngineSupport(
        None, "not verified: loads the GGUF that llama.cpp's converter writes; drafting depends on the llama.cpp inside"
    ),
    "mlx": UNVERIFIED,
    "exllamav3": UNVERIFIED,
    "transformers": EngineSupport(False, "loads the trunk and ignores the head"),
}
"""Every engine with its support for heads that have no entry of their own, in the order in which tables list them."""


def complete(own: Engines) -> dict[str, EngineSupport]:
    """Return a table with an entry for every engine.

    Args:
        own: The entries of a family, a draft model or an external drafter; they take precedence over the defaults.
    """
    table = {**_DEFAULTS, **own}
    if not table["llama.cpp"].supported:
        table["ollama / lm studio"] = no("needs llama.cpp's support")
    return table


def engine_commands(engines: Engines, path: str, depth: int) -> dict[str, str]:
    """Return, per engine, the command that serves with drafts, or why there is none.

    Args:
        engines: The complete table of a family, or of an external drafter.
        path: The checkpoint, complete with its head; or the external drafter.
    """
    draft_model = {"model": path, "num_speculative_tokens": depth}
    words = {
        "path": shlex.quote(path),
        "python_path": repr(path),
        "vllm_config": quoted_json(draft_model),
        **{f"vllm_{kind.name}": quoted_json({"method": kind.name, **draft_model}) for kind in head_kinds()},
        "depth": depth,
        "depth_plus_1": depth + 1,
    }
    return {
        name: f"no: {one.text}" if one.supported is False else one.text.format(**words) for name, one in engines.items()
    }


def quoted_json(content: object) -> str:
    """Return compact JSON, quoted for a shell."""
    return shlex.quote(json.dumps(content, separators=(",", ":")))
