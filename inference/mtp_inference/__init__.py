"""Decode speculatively with MTP heads, without changing the text.

:class:`SpeculativeDecoder` is the entry point: ``from_pretrained`` loads files, ``generate`` returns results, and
``stream`` yields them piece by piece.
"""

from mtp_inference.decoder import SpeculativeDecoder
from mtp_inference.drafters.assistant_drafter import AssistantDrafting
from mtp_inference.drafters.head_drafter import HeadDrafting
from mtp_inference.drafters.ngram_drafter import NgramDrafting
from mtp_inference.lossless import TextCheck, compare, fault_of
from mtp_inference.requests import MAX_DEPTH, Chunk, GenerationResult, Request
from mtp_inference.sampling.distributions import Sampling

__all__ = [
    "MAX_DEPTH",
    "AssistantDrafting",
    "Chunk",
    "GenerationResult",
    "HeadDrafting",
    "NgramDrafting",
    "Request",
    "Sampling",
    "SpeculativeDecoder",
    "TextCheck",
    "compare",
    "fault_of",
]
