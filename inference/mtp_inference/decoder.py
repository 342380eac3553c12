"""The public API: load files and decode prompts. ``round.py`` has the algorithm."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mtp_inference.batch import Batch
from mtp_inference.cache.model_cache import PREFILL_CHUNK
from mtp_inference.capture import Rounds
from mtp_inference.compiled_layers import CompiledLayers
from mtp_inference.cpu_layers import CpuLayers
from mtp_inference.depth import Acceptance, DepthController, RoundCosts
from mtp_inference.drafters.drafter import BatchSize, Drafting, TrainedDrafting
from mtp_inference.opening import (
    OWN,
    OpenModel,
    open_model,
    prompt_tokens,
    refuse_images,
)
from mtp_inference.requests import Chunk, GenerationResult, MtpMode, Prompt, Request, require_depth
from mtp_inference.sampling.chooser import DraftSampling
from mtp_inference.sampling.distributions import GREEDY, Sampling
from mtp_inference.session import Lane, Session
from mtp_inference.text import TextStream
from mtp_train.checkpoints.tokenizer import eos_token_ids, load_tokenizer
from mtp_train.errors import DataError, MtpError
from mtp_train.heads.head import Head
from mtp_train.trunk.load import Trunk
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
        tokenizer: Needed for text prompts, and for the text of results.
        prefill_chunk: Prompt tokens of one forward.
        captures: Whether to capture rounds as CUDA graphs; has no effect on other devices.
        records: Whether results record what their rounds decided on, for :func:`mtp_inference.compare`.
        image_ids: Token ids that stand for images or videos: a text prompt with one of these is refused.

    Raises:
        MtpError: ``depth`` is out of range.
        UnsupportedModelError: The drafter cannot draft as many tokens, or the trunk's cache cannot be rolled back.

    Example:
        >>> from mtp_inference import SpeculativeDecoder
        >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
        >>> result = decoder.generate("def area(width, height):", max_new_tokens=16)[0]
        >>> len(result.token_ids), result.num_draft_tokens == 3 * result.num_drafts
        (16, True)
        >>> plain = decoder.generate("def area(width, height):", max_new_tokens=16, mtp="off")[0]
        >>> plain.text == result.text
        True
    """

    def __init__(
        self,
        trunk: Trunk,
        drafting: Head | Drafting | None,
        depth: int,
        eos_ids: Collection[int],
        *,
        draft_sampling: DraftSampling = "argmax",
        max_batch: int = 16,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        captures: bool = True,
        records: bool = False,
        image_ids: Collection[int] = (),
    ) -> None:
        self.trunk = trunk
        self.drafting: Drafting | None = (
            drafting.family.kind.draft_with(drafting, None) if isinstance(drafting, Head) else drafting
        )
        self.depth = depth if drafting is not None else 0
        self.eos_ids = frozenset(eos_ids)
        self.draft_sampling = draft_sampling
        self.max_batch = max_batch
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.captures = captures
        self.records = records
        self.image_ids = frozenset(image_ids)
        self.costs = RoundCosts()
        self.acceptance = Acceptance()
        heads = [self.drafting.head] if isinstance(self.drafting, TrainedDrafting) else []
        models = [trunk.causal_lm, *heads]
        self._layers = CompiledLayers(models, trunk.family) if self._on_gpu else CpuLayers(models)
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
        **options: Any,
    ) -> SpeculativeDecoder:
        """Load a checkpoint, its tokenizer and a drafter.

        On a CPU, torch's number of threads is left as it is: for models with a hidden size under 512,
        ``torch.set_num_threads(1)`` is fastest.

        Args:
            checkpoint: A checkpoint directory, a run directory (for its export), a hub id or ``demo:base``.
            head: The drafter: a head directory, a run directory (for its head), a checkpoint with a head, an EAGLE,
                EAGLE-3 or Medusa draft model, an assistant model, a block drafter, or ``ngram`` (prompt lookup). None
                for the checkpoint's own MTP head.
            adapter: A peft adapter directory or hub id to apply to the trunk, unmerged.
            depth: Drafts per round, 0 to 7 for most drafters, for block drafters up to those of a block. At 0 no head
                is loaded, and decoding is plain.
            device: A torch device; None for the accelerator that torch finds, else the CPU.
            dtype: Of trunk and head; None for the stored dtype, on a CPU for fp32 if that fits in memory.
            options: ``draft_sampling``, ``max_batch``, ``captures`` and ``records``, as in the class.

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
        name = str(head) if head is not None else OWN if depth else None
        model = open_model(str(checkpoint), name, adapter=None if adapter is None else str(adapter))
        require_whole_trunk(model.checkpoint)
        found = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
        return cls.from_open_model(
            model,
            load_tokenizer(model.checkpoint, adapter=model.adapter),
            depth=depth,
            device=found or torch.device("cpu"),
            dtype=dtype,
            **options,
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
        require_depth(depth, model.most_drafts)
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
        prompts: str | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        sampling: Sampling = GREEDY,
        chat: bool = False,
        mtp: MtpMode = "on",
    ) -> list[GenerationResult]:
        """Decode prompts together, to their ends.

        Args:
            prompts: A text, or several prompts: each a text, token ids, or a request, which has its own settings in
                place of the other arguments.
            max_new_tokens: Limit of each text, at least 1.
            sampling: Sampling settings, greedy by default; the seed grows by 1 with each further prompt.
            chat: Whether to apply the chat template to texts, as the user's message.
            mtp: As in :class:`Request`.

        Raises:
            MtpError: A text needs a tokenizer that the decoder does not have, or a number is out of range.
            DataError: A prompt has no token or contains an image token, or there is no chat template.
            TrainingError: Processes that share the trunk got different prompts.
            CheckpointError: Logits are NaN or infinite.

        Example:
            >>> from mtp_inference import Request, Sampling, SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> warm = Sampling(temperature=0.7, seed=1)
            >>> first, second = decoder.generate(["import ", "def add("], max_new_tokens=8, sampling=warm)
            >>> len(second.token_ids), second.finish_reason
            (8, 'length')
            >>> requests = [Request(prompt_ids=[4, 5], max_new_tokens=8, mtp="auto"), [4, 5, 6]]
            >>> [len(result.token_ids) for result in decoder.generate(requests, max_new_tokens=4)]
            [8, 4]
        """
        chunks = self.stream(prompts, max_new_tokens, sampling=sampling, chat=chat, mtp=mtp)
        results = {chunk.index: chunk.result for chunk in chunks if chunk.result is not None}
        return [results[index] for index in sorted(results)]

    def stream(
        self,
        prompts: str | Sequence[Prompt],
        max_new_tokens: int = 128,
        *,
        sampling: Sampling = GREEDY,
        chat: bool = False,
        mtp: MtpMode = "on",
    ) -> Iterator[Chunk]:
        """Decode prompts together; yield a chunk for each text that prefill or a round extends.

        Arguments and errors are those of :meth:`generate`; wrong arguments raise before anything is decoded. The chunks
        of a prompt, joined, have the text and the tokens of its result, which its last chunk contains. The text lags
        behind the tokens while a character may be incomplete.

        Example:
            >>> from mtp_inference import SpeculativeDecoder
            >>> decoder = SpeculativeDecoder.from_pretrained("demo:base", device="cpu")
            >>> pieces = [chunk.text for chunk in decoder.stream("import ", max_new_tokens=12)]
            >>> "".join(pieces) == decoder.generate("import ", max_new_tokens=12)[0].text
            True
        """
        lanes = []
        for number, prompt in enumerate([prompts] if isinstance(prompts, str) else prompts):
            if not isinstance(prompt, Request):
                prompt = Request(
                    prompt_ids=self._tokens(prompt, chat, f"prompt {number + 1}"),
                    max_new_tokens=max_new_tokens,
                    sampling=replace(sampling, seed=sampling.seed + number),
                    mtp=mtp,
                )
            lanes.append(self._lane(number, prompt))
        return self._session(lanes).run() if lanes else iter(())

    @property
    def captured_rounds(self) -> int:
        """Number of CUDA graphs of rounds captured so far; at 0 every round ran one operation at a time."""
        return self._captured_before + (self._rounds.num_captured if self._rounds is not None else 0)

    def _tokens(self, prompt: str | Sequence[int], chat: bool, where: str) -> Sequence[int]:
        if not isinstance(prompt, str):
            return prompt
        if self.tokenizer is None:
            raise MtpError(
                f"{where}: text, and the decoder has no tokenizer; expected one. Give SpeculativeDecoder a tokenizer, "
                "or pass token ids."
            )
        prompt_ids = prompt_tokens(self.tokenizer, prompt, chat=chat, where=where)
        refuse_images(prompt_ids, self.image_ids, where)
        return prompt_ids

    def _session(self, lanes: list[Lane]) -> Session:
        # Equal lengths next to each other are prefilled together. The longest prompts come first: a long text that
        # begins last would run alone at the end.
        lanes = sorted(lanes, key=lambda lane: -len(lane.request.prompt_ids))
        size = self._batch_size(lanes)
        # A session drops rows at its end.
        rounds = self._rounds
        if rounds is None or rounds.batch.cache.num_rows != size.num_rows or not rounds.batch.size.covers(size):
            self._captured_before = self.captured_rounds
            rounds = self._rounds = None  # Free its buffers before allocating new ones.
            batch = Batch(
                self.trunk,
                self.drafting,
                size,
                self.draft_sampling,
                self.prefill_chunk,
                self._layers,
                records=self.records,
            )
            rounds = self._rounds = Rounds(batch, captures=self._on_gpu and self.captures)
        rounds.batch.reset()
        return Session(rounds, lanes, self.costs, max_in_flight=1 if self._on_gpu else 0)

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
        text = TextStream(self.tokenizer, request.prompt_ids) if self.tokenizer is not None else None
        return Lane(
            index=index,
            request=request,
            depth=depth,
            stops=self.eos_ids | request.stop_token_ids,
            text_stream=text,
            controller=DepthController(depth, self.acceptance) if request.mtp == "auto" and depth else None,
            started=time.perf_counter(),
        )
