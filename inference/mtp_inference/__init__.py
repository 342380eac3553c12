"""A lossless speculative decoder for MTP heads, and the plain one it is checked against."""

from __future__ import annotations

from mtp_inference.assistant_drafter import AssistantDrafting as AssistantDrafting
from mtp_inference.decoder import SpeculativeDecoder as SpeculativeDecoder
from mtp_inference.head_drafter import HeadDrafting as HeadDrafting
from mtp_inference.reference import NEAR_TIE_GAP as NEAR_TIE_GAP
from mtp_inference.reference import Comparison as Comparison
from mtp_inference.reference import compare as compare
from mtp_inference.reference import generate_equal_length as generate_equal_length
from mtp_inference.reference import plain_greedy as plain_greedy
from mtp_inference.requests import MAX_DEPTH as MAX_DEPTH
from mtp_inference.requests import Chunk as Chunk
from mtp_inference.requests import Request as Request
from mtp_inference.sampling import Sampling as Sampling
from mtp_inference.stats import GenerationResult as GenerationResult
