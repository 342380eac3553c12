"""Make small trained checkpoints of every family, in the layout of its releases, for tests of engines."""
