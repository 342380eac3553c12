"""Define, read, validate and write recipes."""
