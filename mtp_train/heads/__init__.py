"""The head: its modules, its one forward, and the alignment of draft depths with tokens."""
