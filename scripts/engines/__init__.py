"""Run a serving engine in its own Python environment, and compare its output with our decoder's."""
