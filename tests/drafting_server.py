"""A server that drafts, in the dialect of an engine: its counters are what our own decoder did for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from mtp_inference import Request, Sampling, SpeculativeDecoder
from mtp_inference.drafters.drafter import Drafting
from mtp_inference.requests import GenerationResult
from mtp_train.trunk.load import Trunk
from openai_server import Reply

Dialect = Literal["vllm", "llamacpp", "sglang", "silent"]
PREFIX = {"vllm": "vllm:", "llamacpp": "llamacpp:"}
GENERATED = {"vllm": "generation_tokens_total", "llamacpp": "tokens_predicted_total"}


@dataclass
class DraftingServer:
    """Answers as an engine does; in the dialect ``silent`` with text and usage only."""

    trunk: Trunk
    drafting: Drafting | None
    depth: int
    eos_ids: Sequence[int]
    dialect: Dialect
    counts: bool = True
    """Whether it exposes counters."""
    foreign_tokens: int = 0
    """Generated for other clients during each request."""
    context: int = 1 << 20
    """The most tokens of a prompt and its answer."""
    results: list[GenerationResult] = field(default_factory=list)
    """Of every request; the first is the warm-up."""

    def __post_init__(self) -> None:
        self._decoder = SpeculativeDecoder(self.trunk, self.drafting, self.depth, self.eos_ids)
        self._lock = threading.Lock()
        self._counters = {"generated": 0}
        if self.drafting is not None:
            self._counters |= {"drafts": 0, "draft_tokens": 0, "accepted_tokens": 0}
            self._counters |= {f"accepted_tokens_per_pos {position}": 0 for position in range(self.depth)}

    @property
    def shows(self) -> dict[str, Callable[[], str]]:
        """Return what can be looked at beside the models."""
        return {"/metrics": self.metrics} if self.counts and self.dialect in PREFIX else {}

    def metrics(self) -> str:
        """Return the counters in the Prometheus format; for vLLM, as series of two engines."""
        prefix = PREFIX[self.dialect]
        lines = ["# HELP of this and that", f"{prefix}num_requests_running 0.0"]
        engines = [("", self._counters)]
        if self.dialect == "vllm":
            half = {name: value // 2 for name, value in self._counters.items()}
            rest = {name: value - half[name] for name, value in self._counters.items()}
            engines = [('engine="0",model_name="a b"', half), ('engine="1",model_name="a b"', rest)]
        for labels, counters in engines:
            for name, value in counters.items():
                series, _, position = name.partition(" ")
                told = [labels] if labels else []
                told += [f'position="{position}"'] if position else []
                full = GENERATED[self.dialect] if series == "generated" else f"spec_decode_num_{series}_total"
                label = f"{{{','.join(told)}}}" if told else ""
                number = float(value) if self.dialect == "vllm" else value
                lines += [f"{prefix}{full}{label} {number}", f"{prefix}{full[:-6]}_created{label} 1.79e+09"]
        return "\n".join(lines)

    def reply(self, payload: dict[str, Any]) -> Reply:
        """Answer a request."""
        native = "input_ids" in payload
        sampling = payload["sampling_params"] if native else payload
        request = Request(
            prompt_ids=payload["input_ids"] if native else payload["prompt"],
            max_new_tokens=min(
                sampling["max_new_tokens"] if native else sampling["max_tokens"],
                max(1, self.context - len(payload["input_ids"] if native else payload["prompt"])),
            ),
            sampling=Sampling(
                temperature=sampling["temperature"],
                top_p=sampling["top_p"],
                top_k=max(0, sampling["top_k"]),
                seed=sampling["sampling_seed"] if native else sampling["seed"],
            ),
        )
        with self._lock:
            (result,) = self._decoder.generate([request])
            self.results.append(result)
            self._count(result)
        make = self._sglang if self.dialect == "sglang" else self._completion
        return Reply(body=json.dumps(make(result, len(request.prompt_ids))).encode())

    def _count(self, result: GenerationResult) -> None:
        self._counters["generated"] += len(result.token_ids) + self.foreign_tokens
        if self.drafting is None:
            return
        self._counters["drafts"] += result.rounds
        self._counters["draft_tokens"] += result.num_draft_tokens
        self._counters["accepted_tokens"] += result.num_accepted_tokens
        for position, accepted in enumerate(result.accepted_per_pos):
            self._counters[f"accepted_tokens_per_pos {position}"] += accepted

    def _histogram(self, result: GenerationResult) -> list[int]:
        chain = (result.rounds, *result.accepted_per_pos, 0)
        return [more - fewer for more, fewer in pairwise(chain)]

    def _completion(self, result: GenerationResult, length: int) -> dict[str, Any]:
        choice: dict[str, Any] = {"text": "x" * len(result.token_ids), "finish_reason": result.finish_reason}
        if self.dialect == "vllm":
            choice["token_ids"] = list(result.token_ids)
        return {
            "choices": [choice],
            "usage": {"prompt_tokens": length, "completion_tokens": len(result.token_ids)},
        }

    def _sglang(self, result: GenerationResult, length: int) -> dict[str, Any]:
        told: dict[str, Any] = {"prompt_tokens": length, "completion_tokens": len(result.token_ids)}
        told["finish_reason"] = {"type": result.finish_reason}
        if self.drafting is not None and result.rounds:
            told["spec_verify_ct"] = result.rounds
            told["spec_num_proposed_drafts"] = result.num_draft_tokens
            told["spec_num_correct_drafts"] = result.num_accepted_tokens
            told["spec_correct_drafts_histogram"] = self._histogram(result)
        return {"text": "x" * len(result.token_ids), "output_ids": list(result.token_ids), "meta_info": told}
