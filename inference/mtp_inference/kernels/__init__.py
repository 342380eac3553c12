"""Triton kernels for the rounds of a decoder: each replaces a chain of small operations by one launch."""

TORCH_DEVICES = ("cpu", "meta")
"""Devices on which the operations compute with torch. A round on the meta device has the launches of one on a GPU."""
