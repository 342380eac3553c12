"""Measure a model behind a running inference server."""
