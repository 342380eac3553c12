"""Speculative decoding: draft, verify, accept, commit, until every text has ended.

Whatever is drafted, the text is the trunk's own: verify runs the trunk over the last committed token and all drafts at
once, and accepts by a rule that leaves the text as it would be without drafts (see ``verify.py``). Plain decoding is
the same loop with no drafts.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from mtp_inference.batch import Batch, choose_widening
from mtp_inference.cache import WindowCache
from mtp_inference.capture import Rounds
from mtp_inference.capture_probe import why_not_captured
from mtp_inference.chooser import Chooser, DraftSampling
from mtp_inference.depth import Acceptance, DepthController, RoundCosts
from mtp_inference.draft import DrafterMaker, Size
from mtp_inference.forward import PREFILL_CHUNK
from mtp_inference.head_drafter import HeadDrafting
from mtp_inference.requests import Chunk, Request, require_depth
from mtp_inference.sampling import Sampling
from mtp_inference.session import PENDING_PLACES, Lane, Session
from mtp_inference.stats import GenerationResult
from mtp_inference.text import TextStream
from mtp_train.errors import MtpError
from mtp_train.heads.module import MtpHead
from mtp_train.heads.trunk import Trunk

GPU_CAPACITY_STEP = 1024
"""Positions are rounded up to it on a GPU, so that calls share buffers and captured rounds."""


class Needs(NamedTuple):
    """What a batch must be made for. Equal needs are served by the same buffers, and the same captured rounds."""

    num_rows: int
    capacity: int
    max_window: int
    depth: int
    num_stops: int
    penalises: bool


def rounded_capacity(num_positions: int, on_gpu: bool) -> int:
    """Return how many positions to make room for."""
    step = GPU_CAPACITY_STEP if on_gpu else 1
    return -(-num_positions // step) * step


def make_batch(
    trunk: Trunk, drafting: DrafterMaker | None, needs: Needs, draft_sampling: DraftSampling, prefill_chunk: int
) -> Batch:
    """Make a batch and its buffers; nothing drafts at depth 0."""
    weight = trunk.lm_head_VD
    widening = choose_widening(trunk, needs.num_rows)
    chooser = Chooser(
        [Sampling()] * needs.num_rows,
        draft_sampling,
        vocab_size=weight.shape[0],
        device=weight.device,
        penalises=needs.penalises,
    )
    cache = WindowCache(
        trunk.config,
        num_rows=needs.num_rows,
        capacity=needs.capacity,
        max_window=needs.max_window,
        max_undecided=needs.depth + 1,
        dtype=None if not widening.prefill or widening.rounds else weight.dtype,
    )
    if not cache.converts:
        widening = widening._replace(prefill=widening.rounds)
    drafter = None
    if drafting is not None and needs.depth:
        size = Size(needs.num_rows, needs.capacity, PENDING_PLACES + needs.depth + 1)
        drafter = drafting.make(trunk, size, needs.depth)
    return Batch(trunk, drafter, chooser, cache, prefill_chunk, needs.num_stops, widening)


class SpeculativeDecoder:
    """Decode prompts, several at a time, each with drafts or without.

    The trunk and the head are used in the mode they are in: put both in ``eval()``.

    Args:
        trunk: The trunk, whose tokens count.
        drafting: What drafts: a head (on the trunk's device; its dtype may differ), another maker of drafters, or None
            to decode plainly.
        depth: Drafts per round of a request that names no depth, 0 to 7.
        eos_ids: Tokens that end a text.
        draft_sampling: How drafts are chosen where tokens are sampled: ``argmax`` or ``sampled``.
        max_batch: Most requests that are decoded together; the others wait.
        tokenizer: Needed for text and for stop strings.
        prefill_chunk: Prompt tokens of one forward.
        captures: Whether rounds are captured as CUDA graphs; other devices never do.

    Raises:
        MtpError: The depth is out of range.
        UnsupportedModelError: The head cannot draft that deep, or the trunk cannot take back a rejected draft.
    """

    def __init__(
        self,
        trunk: Trunk,
        drafting: MtpHead | DrafterMaker | None,
        depth: int,
        eos_ids: Collection[int],
        *,
        draft_sampling: DraftSampling = "argmax",
        max_batch: int = 16,
        tokenizer: PreTrainedTokenizerBase | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        captures: bool = True,
    ) -> None:
        require_depth(depth)
        self.trunk = trunk
        self.drafting: DrafterMaker | None = HeadDrafting(drafting) if isinstance(drafting, MtpHead) else drafting
        self.depth = depth if drafting is not None else 0
        self.eos_ids = frozenset(eos_ids)
        self.draft_sampling = draft_sampling
        self.max_batch = max_batch
        self.tokenizer = tokenizer
        self.prefill_chunk = prefill_chunk
        self.captures = captures
        self.costs = RoundCosts()
        self.acceptance = Acceptance()
        self._rounds: Rounds | None = None
        self._needs_met: Needs | None = None
        self._captured_before = 0
        if self.drafting is not None:
            self.drafting.check(trunk, self.depth)

    def generate(
        self,
        prompts: Sequence[Request] | Sequence[Sequence[int]],
        max_new_tokens: int | None = None,
        sampling: Sampling | None = None,
    ) -> list[GenerationResult]:
        """Decode prompts to their ends.

        Args:
            prompts: Requests, or plain token lists, which then share the other arguments.
            max_new_tokens: Limit of each token list.
            sampling: How their tokens are chosen; None is greedy.

        Returns:
            A result per prompt, in order.

        Raises:
            MtpError: A request is out of range, or asks for what this decoder cannot do.
        """
        requests = _requests(prompts, max_new_tokens, sampling)
        results = {chunk.index: chunk.result for chunk in self.stream(requests) if chunk.result is not None}
        return [results[index] for index in range(len(requests))]

    def stream(self, requests: Sequence[Request]) -> Iterator[Chunk]:
        """Decode requests; yield tokens and text as they come, of all requests in turn.

        Raises:
            MtpError: A request asks for what this decoder cannot do; raised before anything is decoded.
        """
        lanes = [self._lane(index, request) for index, request in enumerate(requests)]
        return self._session(lanes).run() if lanes else iter(())

    @property
    def captured_rounds(self) -> int:
        """Graphs of rounds that were captured so far; 0 says that every round ran one operation at a time."""
        return self._captured_before + (self._rounds.num_captured if self._rounds is not None else 0)

    def _session(self, lanes: list[Lane]) -> Session:
        # Prompts of one length are prefilled together, and long texts should not begin last.
        lanes = sorted(lanes, key=lambda lane: -len(lane.request.prompt_ids))
        needs = self._needs(lanes)
        if self._rounds is None or self._needs_met != needs:
            self._captured_before = self.captured_rounds
            self._rounds = None  # Its buffers go before new ones come.
            batch = make_batch(self.trunk, self.drafting, needs, self.draft_sampling, self.prefill_chunk)
            why_not = partial(why_not_captured, self.trunk, needs.num_rows)
            self._rounds = Rounds(batch, captures=self._on_gpu and self.captures, why_not=why_not)
            self._needs_met = needs
        self._rounds.batch.reset()
        return Session(self._rounds, lanes, self.costs, needs.depth, max_in_flight=1 if self._on_gpu else 0)

    def _needs(self, lanes: Sequence[Lane]) -> Needs:
        depth = max(lane.depth for lane in lanes)
        # A round in flight beyond the limit, and its window.
        capacity = max(len(lane.request.prompt_ids) + lane.request.max_new_tokens for lane in lanes) + 2 * (depth + 1)
        longest_prompt = max(len(lane.request.prompt_ids) for lane in lanes)
        return Needs(
            num_rows=min(self.max_batch, len(lanes)),
            capacity=rounded_capacity(capacity, self._on_gpu),
            max_window=self.prefill_chunk if self._on_gpu else max(min(longest_prompt, self.prefill_chunk), depth + 1),
            depth=depth,
            num_stops=max(len(lane.stops) for lane in lanes),
            penalises=any(lane.request.sampling.repetition_penalty != 1.0 for lane in lanes),
        )

    @property
    def _on_gpu(self) -> bool:
        # A captured graph reads weights where they were: offloaded ones are elsewhere each time.
        return self.trunk.lm_head_VD.device.type == "cuda" and not self.trunk.offloaded

    def _lane(self, index: int, request: Request) -> Lane:
        if request.stop and self.tokenizer is None:
            raise MtpError(
                f"stop: {list(request.stop)}, and no tokenizer; expected one, as the decoder sees tokens only. Give "
                "SpeculativeDecoder a tokenizer, or use stop_token_ids."
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
            controller=DepthController(self.costs, depth, self.acceptance) if request.mtp == "auto" and depth else None,
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
                    "generate: requests and settings beside them; expected settings inside the requests. Leave "
                    "max_new_tokens and sampling out."
                )
            requests.append(prompt)
        elif max_new_tokens is None:
            raise MtpError("max_new_tokens: none; expected a limit for token lists. Pass max_new_tokens.")
        else:
            requests.append(Request(prompt_ids=prompt, max_new_tokens=max_new_tokens, sampling=sampling or Sampling()))
    return requests
