"""Heads of other kinds than MTP, which are draft models beside their trunk: one file a kind."""
