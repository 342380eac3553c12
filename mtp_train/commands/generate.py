"""``mtp-train generate``: decode prompts with the built-in speculative decoder and count what it did."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from mtp_inference.decoder import SpeculativeDecoder
from mtp_train.data.chat import chat_prompt_tokens, raw_tokens
from mtp_train.errors import CheckpointError, DataError
from mtp_train.heads.attach import HeadPlan, artifact_plan, build_head, graft_plan, native_plan
from mtp_train.heads.diagnose import text_config_of
from mtp_train.heads.trunk import load_trunk
from mtp_train.inputs import eos_token_ids, load_tokenizer, open_location
from mtp_train.weights.artifact import HEAD_CONFIG_FILE, load_artifact
from mtp_train.weights.files import TORCH_DTYPES, Checkpoint
from mtp_train.weights.finite import require_finite_checkpoint

MAX_DEPTH = 7


@dataclass(frozen=True)
class GenerateRequest:
    """What to decode, and how."""

    checkpoint: str
    head: str | None
    prompts: tuple[str, ...]
    chat: bool
    max_new_tokens: int
    depth: int


def generate(request: GenerateRequest, progress: Progress) -> dict[str, Any]:
    """Decode every prompt greedily, one after the other.

    Returns:
        ``{"requests": [...], "settings": {...}}``; a request has its new text and tokens, and vLLM's counters.

    Raises:
        MtpError: A number is out of range, a weight is not finite, or the checkpoint has no head to draft with.
    """
    if not 0 <= request.depth <= MAX_DEPTH:
        raise DataError(f"--depth: {request.depth}; expected 0 to {MAX_DEPTH}. 0 is plain decoding.")
    if request.max_new_tokens < 1:
        raise DataError(f"--max-new-tokens: {request.max_new_tokens}; expected at least 1. Ask for more tokens.")
    checkpoint = open_location(request.checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else _stored_dtype(checkpoint)
    plan = _head_plan(checkpoint, request.head) if request.depth else None
    require_finite_checkpoint(checkpoint, progress)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    trunk = load_trunk(checkpoint.path, checkpoint.family, dtype=dtype, device=device)
    head = build_head(plan, text_config_of(checkpoint), dtype=dtype).to(device).eval() if plan else None
    eos_ids = eos_token_ids(checkpoint, tokenizer)
    decoder = SpeculativeDecoder(trunk, head, depth=request.depth, eos_ids=eos_ids)
    requests = []
    for number, prompt in enumerate(request.prompts):
        where = f"--prompt {number + 1}"
        messages = [{"role": "user", "content": prompt}]
        prompt_ids = chat_prompt_tokens(tokenizer, messages, where) if request.chat else raw_tokens(tokenizer, prompt)
        if not prompt_ids:
            raise DataError(f"{where}: no token; expected some text. Write a prompt.")
        result = decoder.generate(prompt_ids, max_new_tokens=request.max_new_tokens)
        requests.append(
            {
                "text": tokenizer.decode(result.token_ids, skip_special_tokens=True),
                "token_ids": list(result.token_ids),
                "num_drafts": result.num_drafts,
                "num_draft_tokens": result.num_draft_tokens,
                "num_accepted_tokens": result.num_accepted_tokens,
                "accepted_per_pos": list(result.accepted_per_pos),
            }
        )
    settings = {
        "checkpoint": request.checkpoint,
        "head": request.head,
        "depth": request.depth,
        "max_new_tokens": request.max_new_tokens,
        "chat": request.chat,
        "temperature": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }
    return {"requests": requests, "settings": settings}


def _head_plan(checkpoint: Checkpoint, head: str | None) -> HeadPlan:
    if head is None:
        return native_plan(checkpoint, "auto")
    if (Path(head) / HEAD_CONFIG_FILE).is_file():
        artifact = load_artifact(Path(head))
        if artifact.family.name != checkpoint.family.name:
            raise CheckpointError(
                f"{head}: a head for {artifact.family.title}; expected one for {checkpoint.family.title}. Use a head "
                "of this model."
            )
        return artifact_plan(artifact)
    return graft_plan(checkpoint, open_location(head), "auto")


def _stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    stored = {info.dtype for key, info in checkpoint.tensors.items() if key.endswith("embed_tokens.weight")}
    return TORCH_DTYPES[sorted(stored)[0]]
