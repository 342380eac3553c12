"""Measure the cost of decoding and the gain of drafts: ``python -m mtp_inference.bench --help``."""
