"""Sampling and the verification of drafts."""
