"""A lossless speculative decoder for trunks with an MTP head."""

from __future__ import annotations

from mtp_inference.decoder import MAX_DEPTH as MAX_DEPTH
from mtp_inference.decoder import DecodeState as DecodeState
from mtp_inference.decoder import SpeculativeDecoder as SpeculativeDecoder
from mtp_inference.reference import Comparison as Comparison
from mtp_inference.reference import compare as compare
from mtp_inference.reference import generate_equal_length as generate_equal_length
from mtp_inference.reference import plain_greedy as plain_greedy
from mtp_inference.stats import GenerationResult as GenerationResult
