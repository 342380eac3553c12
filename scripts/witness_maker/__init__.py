"""Small trained checkpoints of every family, in the layout of its releases, for engines to load."""
