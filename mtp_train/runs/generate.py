"""``mtp-train generate``: decode prompts with the built-in speculative decoder and count drafts and acceptances."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.progress import Progress
from rich.text import Text

from mtp_inference import MAX_DEPTH, GenerationResult, Request, Sampling, SpeculativeDecoder
from mtp_inference.opening import OWN, OpenModel, open_model, prompt_tokens, refuse_images
from mtp_inference.requests import MtpMode
from mtp_inference.sampling.chooser import DraftSampling
from mtp_inference.text import marked_pieces
from mtp_train.checkpoints.values import require_finite_checkpoint
from mtp_train.errors import DataError, printable
from mtp_train.evaluation.arms import local_device
from mtp_train.runs.display import html_table, quiet_progress
from mtp_train.train.machine import use_threads
from mtp_train.trunk.tokenizer import load_tokenizer, require_variables
from mtp_train.trunk.whole import require_whole_trunk

_KWARGS = "--chat-template-kwargs"


@dataclass(frozen=True)
class GenerateResult:
    """New text and counters of each prompt, as :func:`generate` returns them."""

    requests: tuple[GenerationResult, ...]
    """One result per prompt: ``text``, ``token_ids``, ``num_drafts`` (rounds), ``accepted_per_pos``, ``tau``."""
    settings: dict[str, Any]
    """Checkpoint, head, depth, sampling, dtype, device and the like."""
    pieces: tuple[tuple[tuple[str, bool], ...], ...] = field(default=(), repr=False)
    """Each text in pieces, with True for accepted drafts and False for the trunk's own tokens."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, as ``mtp-train generate --json`` prints them; counters have vLLM's names."""
        return {"requests": [_document(one) for one in self.requests], "settings": self.settings}

    @property
    def tau(self) -> float:
        """Mean tokens per round of all prompts, 1 for plain decoding."""
        rounds = sum(one.rounds for one in self.requests)
        return 1.0 + sum(one.num_accepted_tokens for one in self.requests) / max(1, rounds)

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all prompts, which are decoded together, per second of the longest, prefill included."""
        seconds = max(one.seconds_prefill + one.seconds_decode for one in self.requests)
        return sum(len(one.token_ids) for one in self.requests) / max(seconds, 1e-9)

    @property
    def summary(self) -> str:
        """Tau and speed in a line."""
        tokens, rounds = (sum(len(one.token_ids) for one in self.requests), sum(one.rounds for one in self.requests))
        return f"{tokens} tokens in {rounds} rounds: tau {self.tau:.2f}, {self.tokens_per_second:.1f} tokens/s"

    def __str__(self) -> str:
        if len(self.requests) == 1:
            return self.requests[0].text
        return "\n".join(f"--- prompt {number}\n{one.text}" for number, one in enumerate(self.requests, start=1))

    def marked(self, *, brackets: bool = False) -> Text:
        """Return the texts for a rich console, with accepted drafts in green; also between brackets on request."""
        marked = Text()
        for number, pieces in enumerate(self.pieces, start=1):
            if len(self.pieces) > 1:
                marked.append(f"{chr(10) * (number > 1)}--- prompt {number}\n")
            for text, is_draft in pieces:
                shown = printable(text)
                marked.append(f"[{shown}]" if is_draft and brackets else shown, "green" if is_draft else "")
        return marked

    def _repr_html_(self) -> str:
        columns = ("text", "new tokens", "rounds", "accepted drafts", "tokens per round")
        rows = [
            (one.text, len(one.token_ids), one.num_drafts, one.num_accepted_tokens, f"{one.tau:.2f}")
            for one in self.requests
        ]
        return html_table(f"{self.settings['checkpoint']}, depth {self.settings['depth']}", columns, rows)


def generate(
    checkpoint: str | Path,
    prompts: str | Sequence[str],
    *,
    head: str | Path | None = None,
    adapter: str | Path | None = None,
    chat: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    max_new_tokens: int = 128,
    depth: int = 3,
    mtp: MtpMode = "on",
    sampling: Sampling | None = None,
    stop: Sequence[str] = (),
    draft_sampling: DraftSampling = "sampled",
    on_text: Callable[[str], None] | None = None,
    progress: Progress | None = None,
) -> GenerateResult:
    """Decode prompts together with a checkpoint's speculative decoder. The text equals plain decoding.

    The checkpoint is loaded on every call; for many calls, use ``mtp_inference.SpeculativeDecoder``.

    Args:
        checkpoint: A directory, a hub id or ``demo:NAME``.
        prompts: One prompt or several, raw text.
        head: What drafts, as for :func:`evaluate`, or an external drafter. None for the checkpoint's own head.
        adapter: A peft adapter to apply to the trunk without merging.
        chat: Put each prompt through the chat template as a user's message.
        chat_template_kwargs: With ``chat``, variables for the template: ``{"enable_thinking": False}``.
        max_new_tokens: Limit per prompt, at least 1.
        depth: Draft tokens per round, 0 to 7; 0 is plain decoding.
        mtp: ``"on"`` drafts ``depth`` tokens every round, ``"off"`` none, ``"auto"`` as many as pay, up to ``depth``.
        sampling: Temperature, top-k, top-p, min-p, repetition penalty and seed; None is greedy. Prompt i has seed + i.
        stop: Strings that end the text; it is cut before them.
        draft_sampling: ``"argmax"`` or ``"sampled"`` drafts above temperature 0; sampled ones are accepted more often.
        on_text: Called with the text of a single prompt piece by piece, as it becomes certain; not for several.
        progress: A started rich progress bar; None shows nothing.

    Raises:
        DataError: A number is out of range, or a prompt has no token or contains an image.
        CheckpointError: A weight is missing or not finite, or the checkpoint has no head to draft with.

    Example:
        >>> import mtp_train as mtp
        >>> mtp.generate("demo:base", "import os", max_new_tokens=32).requests[0].text
    """
    options = _Options(
        checkpoint=str(checkpoint),
        prompts=(prompts,) if isinstance(prompts, str) else tuple(prompts),
        head=None if head is None else str(head),
        adapter=None if adapter is None else str(adapter),
        chat=chat,
        chat_template_kwargs=dict(chat_template_kwargs or {}),
        max_new_tokens=max_new_tokens,
        depth=depth,
        mtp=mtp,
        sampling=sampling or Sampling(),
        stop=tuple(stop),
        draft_sampling=draft_sampling,
    )
    return _decode(options, on_text, progress or quiet_progress())


@dataclass(frozen=True, kw_only=True)
class _Options:
    """The arguments of :func:`generate`."""

    checkpoint: str
    prompts: tuple[str, ...]
    head: str | None
    adapter: str | None
    chat: bool
    chat_template_kwargs: dict[str, Any]
    max_new_tokens: int
    depth: int
    mtp: MtpMode
    sampling: Sampling
    stop: tuple[str, ...]
    draft_sampling: DraftSampling

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_DEPTH:
            raise DataError(f"--depth: {self.depth}; expected 0 to {MAX_DEPTH}. 0 is plain decoding.")
        if self.max_new_tokens < 1:
            raise DataError(f"--max-new-tokens: {self.max_new_tokens}; expected at least 1. Ask for more tokens.")
        if self.chat_template_kwargs and not self.chat:
            raise DataError(f"{_KWARGS}: given without --chat; expected a chat, which the template writes. Add --chat.")
        if self.mtp == "off":
            object.__setattr__(self, "depth", 0)

    def settings(self) -> dict[str, Any]:
        """Return the options, those of sampling among the others, for the result's ``settings``."""
        given = asdict(self)
        del given["prompts"], given["sampling"]
        return {**given, **asdict(self.sampling), "stop": list(self.stop)}

    def request(self, number: int, prompt_ids: Sequence[int]) -> Request:
        """Return the decoder's request for one prompt."""
        return Request(
            prompt_ids=prompt_ids,
            max_new_tokens=self.max_new_tokens,
            sampling=replace(self.sampling, seed=self.sampling.seed + number),
            mtp=self.mtp,
            stop=self.stop,
        )


def _decode(options: _Options, on_text: Callable[[str], None] | None, progress: Progress) -> GenerateResult:
    depth = options.depth
    # Depth 0 needs no head. A named external drafter is opened all the same: its record loads the trunk.
    head = OWN if options.head is None and depth else options.head
    model = open_model(options.checkpoint, head, adapter=options.adapter)
    _require_weights(model, depth, progress)
    device = local_device()
    if device.type == "cpu":
        use_threads(model.checkpoint.text_config)
    tokenizer = load_tokenizer(model.checkpoint, trust_remote_code=False, adapter=model.adapter)
    variables = options.chat_template_kwargs
    require_variables(tokenizer, variables, _KWARGS)
    prompts = [
        prompt_tokens(tokenizer, prompt, chat=options.chat, where=f"--prompt {number}", variables=variables)
        for number, prompt in enumerate(options.prompts, start=1)
    ]
    for number, prompt_ids in enumerate(prompts, start=1):
        refuse_images(prompt_ids, model.image_ids, f"--prompt {number}")
    if model.drafter is not None and model.assistant is not None and depth:
        progress.console.print(f"drafting with {model.drafter.path}, a {model.assistant.title}", highlight=False)
    decoder = SpeculativeDecoder.from_open_model(
        model, tokenizer, depth=depth, device=device, draft_sampling=options.draft_sampling
    )
    requests = [options.request(number, prompt_ids) for number, prompt_ids in enumerate(prompts)]
    results: dict[int, GenerationResult] = {}
    for chunk in decoder.decode_chunks(requests):
        if on_text is not None and chunk.text and len(requests) == 1:
            on_text(chunk.text)
        if chunk.result is not None:
            results[chunk.index] = chunk.result
    ordered = tuple(results[index] for index in range(len(requests)))
    pieces = tuple(
        marked_pieces(tokenizer, prompt_ids, one.token_ids, one.from_drafts, options.stop)
        for prompt_ids, one in zip(prompts, ordered, strict=True)
    )
    settings = options.settings() | {
        "external_drafter": None if model.assistant is None else model.assistant.title,
        "dtype": decoder.trunk.dtype_name,
        "device": str(device),
        "captured_rounds": decoder.captured_rounds,
    }
    return GenerateResult(ordered, settings, pieces)


def _require_weights(model: OpenModel, depth: int, progress: Progress) -> None:
    """Check that the trunk, and with drafts the drafter, has all its tensors and only finite values."""
    require_whole_trunk(model.checkpoint, model.family)
    require_finite_checkpoint(model.checkpoint, progress)
    if model.drafter is not None and depth:
        if model.assistant is None:
            require_whole_trunk(model.drafter)
        require_finite_checkpoint(model.drafter, progress)


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
