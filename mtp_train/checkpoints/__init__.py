"""Checkpoints on disk: read them, map head keys, merge adapters, and write exports that keep the head."""
