"""Measure acceptance and speed of arms over prompts, settings and servers."""
