"""The kinds of heads: one file each."""
