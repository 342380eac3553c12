"""``mtp-train generate``: decode prompts with the built-in speculative decoder and count what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from mtp_inference import MAX_DEPTH, GenerationResult, Request, Sampling, SpeculativeDecoder
from mtp_inference.chooser import DraftSampling
from mtp_inference.requests import MtpMode
from mtp_train.data.chat import chat_prompt_tokens, raw_tokens
from mtp_train.errors import DataError
from mtp_train.heads.whole import require_whole_trunk
from mtp_train.inputs import eos_token_ids, load_tokenizer
from mtp_train.study.arms import OWN, ArmSpec, load_arm_trunk, load_drafting, local_device, open_arm
from mtp_train.weights.files import Checkpoint
from mtp_train.weights.finite import require_finite_checkpoint

IMAGE_FIELDS = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id")


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """What to decode, and how."""

    checkpoint: str
    head: str | None
    """What drafts, as :class:`mtp_train.study.arms.ArmSpec` takes it; None for the checkpoint's own head."""
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
    depth = 0 if request.mtp == "off" else request.depth
    # Plain decoding needs no head, but a drafter that is named may be what says how to load its trunk.
    head = OWN if request.head is None and depth else request.head
    arm = open_arm(ArmSpec("generate", request.checkpoint, head, request.adapter))
    require_whole_trunk(arm.checkpoint, arm.family)
    if arm.draft_model is not None and depth:
        require_whole_trunk(arm.draft_model)
    for one in (arm.checkpoint, *(arm.draft_checkpoints if depth else ())):
        require_finite_checkpoint(one, progress)
    tokenizer = load_tokenizer(arm.checkpoint, trust_remote_code=False)
    prompts = [_tokens(tokenizer, request, number) for number in range(len(request.prompts))]
    _refuse_images(arm.checkpoint, prompts)
    device = local_device()
    trunk = load_arm_trunk(arm, device)
    drafting = load_drafting(arm, trunk)[0] if depth else None
    if arm.external is not None and depth:
        drafter = arm.external
        progress.console.print(f"drafting with {drafter.checkpoint.path}, a {drafter.title}", highlight=False)
    decoder = SpeculativeDecoder(
        trunk,
        drafting,
        depth,
        eos_token_ids(arm.checkpoint, tokenizer),
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
        "external_drafter": None if arm.external is None else arm.external.title,
        "dtype": str(trunk.lm_head_VD.dtype).removeprefix("torch."),
        "device": str(device),
        "captured_rounds": decoder.captured_rounds,
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
