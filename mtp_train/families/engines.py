"""What serving engines need to use a head: exact commands where known, the reason where not.

``{path}`` is the checkpoint, ``{depth}`` the drafts per round; :func:`engine_commands` fills them in, and what else may
stand there.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class EngineSupport:
    """Whether an engine loads the head (None: not verified here), with its command or the reason."""

    supported: bool | None
    text: str
    plain: str | None = None
    """The command that serves the same checkpoint without drafts; None where there is nothing to turn off."""


VLLM = EngineSupport(
    True,
    'vllm serve {path} --speculative-config \'{{"method":"mtp","num_speculative_tokens":{depth}}}\'',
    plain="vllm serve {path}",
)
SGLANG = EngineSupport(
    True,
    "python -m sglang.launch_server --model-path {path} --speculative-algorithm NEXTN --speculative-num-steps {depth} "
    "--speculative-eagle-topk 1 --speculative-num-draft-tokens {depth_plus_1}",
    plain="python -m sglang.launch_server --model-path {path}",
)
_LLAMA_CPP_PLAIN = "python convert_hf_to_gguf.py {path} --outfile model.gguf && llama-server -m model.gguf"
LLAMA_CPP = EngineSupport(
    True,
    f"{_LLAMA_CPP_PLAIN} --spec-type draft-mtp --spec-draft-n-max {{depth}}",
    plain=_LLAMA_CPP_PLAIN,
)


def _sidecar(options: str) -> EngineSupport:
    return EngineSupport(
        True,
        f"python convert_hf_to_gguf.py {{path}} {options}--outfile model.gguf && "
        "mtp-train export {path} --out model-head --gguf f16 && "
        "llama-server -m model.gguf -md model-head/mtp-*.gguf --spec-type draft-mtp --spec-draft-n-max {depth}",
        plain=_LLAMA_CPP_PLAIN,
    )


LLAMA_CPP_SIDECAR = _sidecar("--no-mtp ")
"""Where its converter writes a head that its graph does not take."""
LLAMA_CPP_BESIDE = _sidecar("")
"""Where its converter leaves out a head that its graph takes."""
USE_MTP = EngineSupport(
    True, "model.generate(..., use_mtp=True): batch 1, one draft a round for each module", plain="model.generate(...)"
)
_GGUF_FRONT_END = EngineSupport(
    None, "not verified: loads the GGUF that llama.cpp's converter writes; drafting depends on the llama.cpp inside"
)
_UNVERIFIED = EngineSupport(None, "not verified by this project")
NO_RECURRENT_ROLLBACK = EngineSupport(
    False, "generate(use_mtp=True) refuses models with recurrent state; the trunk itself loads"
)
HEAD_IGNORED = EngineSupport(False, "loads the trunk and ignores the head")


def no(reason: str) -> EngineSupport:
    """Return that an engine does not use the head, and why."""
    return EngineSupport(False, reason)


LLAMA_CPP_KEEPS = no("keeps the head's tensors and has no graph for them")


def engine_table(
    *,
    transformers: EngineSupport,
    vllm: EngineSupport = VLLM,
    sglang: EngineSupport = SGLANG,
    llama_cpp: EngineSupport = LLAMA_CPP,
) -> Mapping[str, EngineSupport]:
    """Return the table of a family, every engine named; the ones left out load the head."""
    return {
        "vllm": vllm,
        "sglang": sglang,
        "llama.cpp": llama_cpp,
        "ollama / lm studio": _GGUF_FRONT_END if llama_cpp.supported else no("needs llama.cpp's support"),
        "mlx": _UNVERIFIED,
        "exllamav3": _UNVERIFIED,
        "transformers": transformers,
    }


def engine_commands(engines: Mapping[str, EngineSupport], path: str, depth: int) -> dict[str, str]:
    """Return, per engine, the command that serves with drafts, or why there is none.

    Args:
        engines: The table of a family, or of an external drafter.
        path: The checkpoint, complete with its head; or the external drafter.
        depth: Drafts per round; at 0 the commands serve without drafts, and only engines that can draft are named.
    """
    draft_model = {"model": path, "num_speculative_tokens": depth}
    words = {
        "path": shlex.quote(path),
        "python_path": repr(path),
        "vllm_config": _json(draft_model),
        **{f"vllm_{method}": _json({"method": method, **draft_model}) for method in ("eagle", "eagle3", "medusa")},
        "depth": depth,
        "depth_plus_1": depth + 1,
    }
    if depth == 0:
        return {name: one.plain.format(**words) for name, one in engines.items() if one.plain is not None}
    return {
        name: one.text.format(**words) if one.supported else f"no: {one.text}" if one.supported is False else one.text
        for name, one in engines.items()
    }


def _json(content: object) -> str:
    """Return JSON as one word of a shell."""
    return shlex.quote(json.dumps(content, separators=(",", ":")))
