"""``mtp-train generate``: decode prompts with the built-in speculative decoder and count what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from mtp_inference import MAX_DEPTH, GenerationResult, HeadDrafting, Request, Sampling, SpeculativeDecoder
from mtp_inference.chooser import DraftSampling
from mtp_inference.draft import DrafterMaker
from mtp_inference.requests import MtpMode
from mtp_train.data.chat import chat_prompt_tokens, raw_tokens
from mtp_train.errors import DataError
from mtp_train.external import external_drafter
from mtp_train.heads.attach import build_head
from mtp_train.heads.diagnose import stored_dtype, text_config_of
from mtp_train.heads.trunk import load_trunk
from mtp_train.inputs import eos_token_ids, load_tokenizer, open_location
from mtp_train.study.arms import head_plan
from mtp_train.weights.adapter import locate_adapter
from mtp_train.weights.files import TORCH_DTYPES, Checkpoint
from mtp_train.weights.finite import require_finite_checkpoint

IMAGE_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to decode, and how."""

    checkpoint: str
    head: str | None
    """A head directory, a checkpoint to take the head from, or an external drafter; None for the checkpoint's own."""
    prompts: tuple[str, ...]
    chat: bool
    max_new_tokens: int
    depth: int
    mtp: MtpMode = "on"
    sampling: Sampling = field(default_factory=Sampling)
    """Of the first prompt; each further one has the next seed."""
    stop: tuple[str, ...] = ()
    draft_sampling: DraftSampling = "sampled"
    adapter: str | None = None
    """A peft adapter that the trunk wears, unmerged."""


def generate(request: GenerateRequest, progress: Progress) -> dict[str, Any]:
    """Decode the prompts together.

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
    adapter = locate_adapter(request.adapter, request.checkpoint) if request.adapter else None
    external = external_drafter(request.head)
    family = checkpoint.family if external is None else external.trunk_family(checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device.type == "cpu" else TORCH_DTYPES[stored_dtype(checkpoint, family)]
    depth = 0 if request.mtp == "off" else request.depth
    plan = head_plan(checkpoint, request.head) if depth and external is None else None
    require_finite_checkpoint(checkpoint, progress)
    tokenizer = load_tokenizer(checkpoint, trust_remote_code=False)
    prompts = [_tokens(tokenizer, request, number) for number in range(len(request.prompts))]
    _refuse_images(checkpoint, prompts)
    trunk = load_trunk(checkpoint.path, family, dtype=dtype, device=device, adapter=adapter)
    drafting: DrafterMaker | None = None
    if plan is not None:
        head = build_head(plan, text_config_of(checkpoint), dtype=dtype).to(device).eval()
        drafting = HeadDrafting(head, plan.draft_vocab)
    elif external is not None and depth:
        require_finite_checkpoint(external.checkpoint, progress)
        drafting = external.drafting(dtype=dtype, device=device)
        progress.console.print(f"drafting with {external.checkpoint.path}, a {external.title}", highlight=False)
    decoder = SpeculativeDecoder(
        trunk,
        drafting,
        depth,
        eos_token_ids(checkpoint, tokenizer),
        draft_sampling=request.draft_sampling,
        tokenizer=tokenizer,
    )
    results = decoder.generate(
        [
            Request(
                prompt_ids=prompt_ids,
                max_new_tokens=request.max_new_tokens,
                sampling=replace(request.sampling, seed=request.sampling.seed + number),
                mtp=request.mtp,
                stop=request.stop,
            )
            for number, prompt_ids in enumerate(prompts)
        ]
    )
    settings = _settings(request, depth) | {
        "external_drafter": None if external is None else external.title,
        "dtype": str(dtype).removeprefix("torch."),
        "device": str(device),
    }
    return {"requests": [_document(result) for result in results], "settings": settings}


def _settings(request: GenerateRequest, depth: int) -> dict[str, Any]:
    return {
        "checkpoint": request.checkpoint,
        "head": request.head,
        "adapter": request.adapter,
        "depth": depth,
        "mtp": request.mtp,
        "max_new_tokens": request.max_new_tokens,
        "chat": request.chat,
        **asdict(request.sampling),
        "stop": list(request.stop),
        "draft_sampling": request.draft_sampling,
    }


def _tokens(tokenizer: PreTrainedTokenizerBase, request: GenerateRequest, number: int) -> list[int]:
    where, prompt = f"--prompt {number + 1}", request.prompts[number]
    if request.chat:
        return chat_prompt_tokens(tokenizer, [{"role": "user", "content": prompt}], where)
    prompt_ids = raw_tokens(tokenizer, prompt)
    if not prompt_ids:
        raise DataError(f"{where}: no token; expected some text. Write a prompt.")
    return prompt_ids


def _refuse_images(checkpoint: Checkpoint, prompts: Sequence[Sequence[int]]) -> None:
    """Raise a DataError where a prompt has a place for an image: the tower that would fill it is not loaded."""
    places = {int(checkpoint.config[name]) for name in IMAGE_FIELDS if name in checkpoint.config}
    for number, prompt_ids in enumerate(prompts, start=1):
        found = places.intersection(prompt_ids)
        if found:
            raise DataError(
                f"--prompt {number}: holds image or video token {min(found)}; expected text, as only the language "
                "model of a vision-language checkpoint is decoded here. Take the image out, or use an engine."
            )


def _document(result: GenerationResult) -> dict[str, Any]:
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "num_drafts": result.num_drafts,
        "num_draft_tokens": result.num_draft_tokens,
        "num_accepted_tokens": result.num_accepted_tokens,
        "accepted_per_pos": list(result.accepted_per_pos),
    }
