"""The public API: load files, decode text and requests. ``round.py`` has the algorithm."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mtp_inference.batch import Batch
from mtp_inference.capture import Rounds
from mtp_inference.cpu_layers import CpuLayers
from mtp_inference.depth import Acceptance, DepthController, RoundCosts
from mtp_inference.drafters.drafter import BatchSize, Drafting
from mtp_inference.drafters.head_drafter import HeadDrafting
from mtp_inference.forward import PREFILL_CHUNK
from mtp_inference.opening import (
    OWN,
    OpenModel,
    open_model,
    prompt_tokens,
    refuse_images,
    require_own_head,
)
from mtp_inference.requests import Chunk, GenerationResult, MtpMode, Request, require_depth
from mtp_inference.sampling.chooser import DraftSampling
from mtp_inference.sampling.distributions import Sampling
from mtp_inference.session import Lane, Session
from mtp_inference.text import TextStream
from mtp_train.errors import DataError, MtpError
from mtp_train.heads.module import MtpHead
from mtp_train.trunk.load import Trunk
from mtp_train.trunk.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.trunk.whole import require_whole_trunk

GPU_CAPACITY_STEP = 1024
"""On a GPU the number of positions is rounded up to a multiple of this, so that calls share buffers and graphs."""


class SpeculativeDecoder:
    """Decode prompts in batches, with drafts or without. The text is the same either way.

    Use :meth:`from_pretrained` for files, this constructor for modules in memory. The trunk and the head run in their
    current mode: call ``eval()`` on both. A decoder runs one call at a time, and a process one decoder at a time.

    Args:
        trunk: The target model.
        drafting: An MTP head on the trunk's device (its dtype may differ), another way of drafting, or None for plain
            decoding.
        depth: Drafts per round of requests that set no depth, 0 to 7.
        eos_ids: Token ids that end a text.
        draft_sampling: How drafts are chosen when tokens are sampled. ``argmax`` takes the drafter's first choice; the
            text then equals plain sampling with the same seed. ``sampled`` draws drafts from the drafter's
            distribution: more drafts are accepted, and the text follows the same distribution with other noise.
        max_batch: Largest number of requests decoded together; further requests wait for a free row.
        tokenizer: Needed for text prompts, for the text of results and for stop strings.
        prefill_chunk: Prompt tokens of one forward.
        captures: Whether to capture rounds as CUDA graphs; has no effect on other devices.
        image_ids: Token ids that stand for images or videos: a text prompt with one of these is refused.

    Raises:
        MtpError: ``depth`` is out of range.
        UnsupportedModelError: The drafter cannot draft as many tokens, or the trunk's cache cannot be rolled back.

    Example:
        >>> from mtp_inference import SpeculativeDecoder
        >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
        >>> result = decoder.generate("def area(width, height):", max_new_tokens=16, mtp="on")[0]
        >>> len(result.token_ids), result.num_draft_tokens == 3 * result.num_drafts
        (16, True)
        >>> plain = decoder.generate("def area(width, height):", max_new_tokens=16, mtp="off")[0]
        >>> plain.text == result.text
        True
    """

    def __init__(
        self,
        trunk: Trunk,
        drafting: MtpHead | Drafting | None,
        depth: int,
        eos_ids: Collection[int],
        *,
        draft_sampling: DraftSampling = "argmax",
        max_batch: int = 16,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        captures: bool = True,
        image_ids: Collection[int] = (),
    ) -> None:
        require_depth(depth)
        self.trunk = trunk
        self.drafting: Drafting | None = HeadDrafting(drafting) if isinstance(drafting, MtpHead) else drafting
        self.depth = depth if drafting is not None else 0
        self.eos_ids = frozenset(eos_ids)
        self.draft_sampling = draft_sampling
        self.max_batch = max_batch
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.captures = captures
        self.image_ids = frozenset(image_ids)
        self.costs = RoundCosts()
        self.acceptance = Acceptance()
        heads = [self.drafting.head] if isinstance(self.drafting, HeadDrafting) else []
        self._cpu_layers = CpuLayers([trunk.causal_lm, *heads])
        self._rounds: Rounds | None = None
        self._captured_before = 0
        if self.drafting is not None:
            self.drafting.check(trunk, self.depth)

    @classmethod
    def from_pretrained(
        cls,
        checkpoint: str | Path,
        *,
        head: str | Path | None = None,
        adapter: str | Path | None = None,
        depth: int = 3,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        draft_sampling: DraftSampling = "argmax",
        max_batch: int = 16,
        captures: bool = True,
    ) -> SpeculativeDecoder:
        """Load a checkpoint, its tokenizer and a drafter.

        On a CPU, torch's number of threads is left as it is: for models with a hidden size under 512,
        ``torch.set_num_threads(1)`` is fastest.

        Args:
            checkpoint: A checkpoint directory, a run directory (for its export), a hub id or ``demo:base``.
            head: The drafter: a head directory, a run directory (for its head), a checkpoint with a head, an EAGLE,
                EAGLE-3 or Medusa draft model, an assistant model, ``model:CKPT`` (a smaller model with the same
                tokenizer) or ``ngram`` (prompt lookup). None for the checkpoint's own MTP head.
            adapter: A peft adapter directory or hub id to apply to the trunk, unmerged.
            depth: Drafts per round, 0 to 7. At 0 no head is loaded, and decoding is plain.
            device: A torch device; None for the accelerator that torch finds, else the CPU.
            dtype: Of trunk and head; None for the stored dtype, on a CPU for fp32 if that fits in memory.
            draft_sampling: See the class, also for ``max_batch`` and ``captures``.

        Raises:
            CheckpointError: A file is missing or damaged, or the checkpoint has no head and none is named.
            UnsupportedModelError: The model type is not supported, or the head cannot draft ``depth`` tokens.
            MtpError: ``depth`` is out of range.

        Example:
            >>> from mtp_inference import SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:finetune", head="ngram", depth=2, device="cpu")
            >>> decoder.depth, decoder.trunk.lm_head_VD.dtype
            (2, torch.float32)
        """
        require_depth(depth)
        location = str(checkpoint)
        if depth and head is None:
            require_own_head(location)
        name = str(head) if head is not None else OWN if depth else None
        model = open_model(location, name, adapter=None if adapter is None else str(adapter))
        require_whole_trunk(model.checkpoint, model.family)
        found = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
        return cls.from_open_model(
            model,
            load_tokenizer(model.checkpoint, trust_remote_code=False, adapter=model.adapter),
            depth=depth,
            device=found or torch.device("cpu"),
            dtype=dtype,
            draft_sampling=draft_sampling,
            max_batch=max_batch,
            captures=captures,
        )

    @classmethod
    def from_open_model(
        cls,
        model: OpenModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        depth: int,
        device: torch.device,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load the weights of files that were opened and checked; ``options`` as in the class."""
        trunk = model.load_trunk(device, dtype)
        return cls(
            trunk,
            model.load_drafting(trunk) if depth else None,
            depth,
            eos_token_ids(model.checkpoint, tokenizer),
            tokenizer=tokenizer,
            image_ids=model.image_ids,
            **options,
        )

    def generate(
        self,
        prompts: str | Sequence[str],
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        mtp: MtpMode = "auto",
    ) -> list[GenerationResult]:
        """Continue text prompts, decoded together.

        Args:
            prompts: One prompt or several.
            max_new_tokens: Limit of each text, at least 1.
            temperature: 0 is greedy; else at least 0.001.
            top_p: Keep the most probable tokens whose probabilities reach this sum, in (0, 1].
            top_k: Keep the k most probable tokens; 0 keeps all.
            seed: Seed of the first prompt's noise; it grows by 1 with each further prompt.
            stop: A string or strings that end a text; it is cut before them.
            chat: Whether to apply the chat template, with the prompt as the user's message.
            mtp: ``on`` drafts ``depth`` tokens in every round, ``off`` drafts nothing, ``auto`` drafts the number of
                tokens, up to ``depth``, that is fastest by the costs and the acceptance measured so far.

        Raises:
            MtpError: The decoder has no tokenizer, or a number is out of range.
            DataError: A prompt has no token or contains an image token, or there is no chat template.
            CheckpointError: Logits are NaN or infinite.

        Example:
            >>> from mtp_inference import SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> first, second = decoder.generate(["import ", "def add("], max_new_tokens=8, temperature=0.7, seed=1)
            >>> len(second.token_ids), second.finish_reason
            (8, 'length')
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        texts = [prompts] if isinstance(prompts, str) else prompts
        return self.decode(self._text_requests(texts, max_new_tokens, sampling, stop, chat=chat, mtp=mtp))

    def stream(
        self,
        prompt: str,
        max_new_tokens: int = 128,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        chat: bool = False,
        mtp: MtpMode = "auto",
    ) -> Iterator[str]:
        """Continue one text prompt; yield its text piece by piece, as rounds commit tokens.

        The pieces joined are the ``text`` of :meth:`generate` with the same arguments. The text lags behind the
        committed tokens while a character or a stop string may be incomplete.

        Raises:
            MtpError: As for :meth:`generate`; raised before anything is decoded.

        Example:
            >>> from mtp_inference import SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> pieces = list(decoder.stream("import ", max_new_tokens=12))
            >>> "".join(pieces) == decoder.generate("import ", max_new_tokens=12)[0].text
            True
        """
        sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
        requests = self._text_requests([prompt], max_new_tokens, sampling, stop, chat=chat, mtp=mtp)
        chunks = self.decode_chunks(requests)
        return (chunk.text for chunk in chunks if chunk.text)

    def decode(
        self,
        prompts: Sequence[Request] | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[GenerationResult]:
        """Decode requests or token ids to their ends.

        Args:
            prompts: Requests, each with its own settings; or lists of token ids that share the other arguments.
            max_new_tokens: Limit for each list of token ids.
            sampling: Sampling settings for lists of token ids; None is greedy.

        Raises:
            MtpError: A value is out of range, or a request needs a tokenizer or a depth that the decoder does not have.
            CheckpointError: Logits are NaN or infinite.

        Example:
            >>> from mtp_inference import Request, Sampling, SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> sampled = Request(prompt_ids=[4, 5], max_new_tokens=8, sampling=Sampling(temperature=1.0, seed=2))
            >>> greedy = Request(prompt_ids=[4, 5, 6], max_new_tokens=4, mtp="off")
            >>> [len(result.token_ids) for result in decoder.decode([sampled, greedy])]
            [8, 4]
        """
        requests = _requests(prompts, max_new_tokens, sampling)
        results = {chunk.index: chunk.result for chunk in self.decode_chunks(requests) if chunk.result is not None}
        return [results[index] for index in range(len(requests))]

    def decode_chunks(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Decode requests; yield a chunk for each text that prefill or a round extends.

        Raises:
            MtpError: A request needs a tokenizer or a depth that the decoder does not have; raised before anything is
                decoded.
            TrainingError: Processes that share the trunk got different requests.
            CheckpointError: Logits are NaN or infinite.

        Example:
            >>> from mtp_inference import Request, SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> requests = [Request(prompt_ids=[4, 5], max_new_tokens=6), Request(prompt_ids=[7], max_new_tokens=3)]
            >>> counts = [0, 0]
            >>> for chunk in decoder.decode_chunks(requests):
            ...     counts[chunk.index] += len(chunk.token_ids)
            >>> counts
            [6, 3]
        """
        lanes = [self._lane(index, request) for index, request in enumerate(requests)]
        return self._session(lanes).run() if lanes else iter(())

    @property
    def captured_rounds(self) -> int:
        """Number of CUDA graphs of rounds captured so far; at 0 every round ran one operation at a time."""
        return self._captured_before + (self._rounds.num_captured if self._rounds is not None else 0)

    def _text_requests(
        self,
        prompts: Sequence[str],
        max_new_tokens: int,
        sampling: Sampling,
        stop: str | Sequence[str],
        *,
        chat: bool,
        mtp: MtpMode,
    ) -> list[Request]:
        if self.tokenizer is None:
            raise MtpError(
                "generate: a text prompt, and the decoder has no tokenizer; expected one. Give SpeculativeDecoder a "
                "tokenizer, or pass token ids to decode."
            )
        requests = []
        for number, prompt in enumerate(prompts):
            where = f"prompt {number + 1}"
            if not isinstance(prompt, str):
                raise MtpError(
                    f"{where}: {type(prompt).__name__}; expected text. Pass requests and token ids to decode."
                )
            prompt_ids = prompt_tokens(self.tokenizer, prompt, chat=chat, where=where)
            refuse_images(prompt_ids, self.image_ids, where)
            requests.append(
                Request(
                    prompt_ids=prompt_ids,
                    max_new_tokens=max_new_tokens,
                    sampling=replace(sampling, seed=sampling.seed + number),
                    mtp=mtp,
                    stop=(stop,) if isinstance(stop, str) else tuple(stop),
                )
            )
        return requests

    def _session(self, lanes: list[Lane]) -> Session:
        # Equal lengths next to each other are prefilled together. The longest prompts come first: a long text that
        # begins last would run alone at the end.
        lanes = sorted(lanes, key=lambda lane: -len(lane.request.prompt_ids))
        size = self._batch_size(lanes)
        # A session drops rows at its end.
        kept = self._rounds is not None and self._rounds.batch.cache.num_rows == size.num_rows
        if self._rounds is None or not kept or not self._rounds.batch.size.covers(size):
            self._captured_before = self.captured_rounds
            self._rounds = None  # Free its buffers before allocating new ones.
            batch = Batch(self.trunk, self.drafting, size, self.draft_sampling, self.prefill_chunk, self._cpu_layers)
            self._rounds = Rounds(batch, captures=self._on_gpu and self.captures)
        self._rounds.batch.reset()
        return Session(self._rounds, lanes, self.costs, size.depth, max_in_flight=1 if self._on_gpu else 0)

    def _batch_size(self, lanes: Sequence[Lane]) -> BatchSize:
        depth = max(lane.depth for lane in lanes)
        # Room for a round in flight past the limit, and for its window.
        capacity = max(len(lane.request.prompt_ids) + lane.request.max_new_tokens for lane in lanes) + 2 * (depth + 1)
        step = GPU_CAPACITY_STEP if self._on_gpu else 1
        longest_prompt = max(len(lane.request.prompt_ids) for lane in lanes)
        return BatchSize(
            num_rows=min(self.max_batch, len(lanes)),
            capacity=-(-capacity // step) * step,
            max_window=self.prefill_chunk if self._on_gpu else max(min(longest_prompt, self.prefill_chunk), depth + 1),
            depth=depth,
            num_stops=max(len(lane.stops) for lane in lanes),
        )

    @property
    def _on_gpu(self) -> bool:
        # A captured graph reads weights at fixed addresses; offloaded weights are at another address each time.
        return self.trunk.lm_head_VD.device.type == "cuda" and not self.trunk.offloaded

    def _lane(self, index: int, request: Request) -> Lane:
        if request.stop and self.tokenizer is None:
            raise MtpError(
                f"stop: {list(request.stop)}, and no tokenizer; expected one, to find stop strings in text. Give "
                "SpeculativeDecoder a tokenizer, or use stop_token_ids."
            )
        rows = self.trunk.causal_lm.get_input_embeddings().weight.shape[0]
        beyond = next((token for token in request.prompt_ids if not 0 <= token < rows), None)
        if beyond is not None:
            raise DataError(
                f"prompt {index + 1}: has the token id {int(beyond)}; expected ids from 0 to {rows - 1}, the rows of "
                "the trunk's embedding. Use the tokenizer of this trunk."
            )
        depth = self.depth if request.depth is None else request.depth
        if self.drafting is None or request.mtp == "off":
            depth = 0
        elif depth > self.depth:
            self.drafting.check(self.trunk, depth)
        text = TextStream(self.tokenizer, request.prompt_ids, request.stop) if self.tokenizer is not None else None
        return Lane(
            index=index,
            request=request,
            row=-1,
            depth=depth,
            stops=self.eos_ids | request.stop_token_ids,
            text_stream=text,
            controller=DepthController(depth, self.acceptance) if request.mtp == "auto" and depth else None,
            started=time.perf_counter(),
        )


def _requests(
    prompts: Sequence[Request] | Sequence[Sequence[int]], max_new_tokens: int | None, sampling: Sampling | None
) -> list[Request]:
    requests = []
    for prompt in prompts:
        if isinstance(prompt, Request):
            if max_new_tokens is not None or sampling is not None:
                raise MtpError(
                    "decode: requests and settings beside them; expected settings inside the requests. Leave "
                    "max_new_tokens and sampling out."
                )
            requests.append(prompt)
        elif isinstance(prompt, str):
            raise MtpError("decode: text; expected token ids or requests. Pass text to generate or stream.")
        elif max_new_tokens is None:
            raise MtpError("max_new_tokens: none; expected a limit for token lists. Pass max_new_tokens.")
        else:
            requests.append(Request(prompt_ids=prompt, max_new_tokens=max_new_tokens, sampling=sampling or Sampling()))
    return requests
