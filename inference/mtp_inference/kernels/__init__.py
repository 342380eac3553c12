"""Triton kernels for the rounds of a decoder: each replaces a chain of small operations by one launch."""
