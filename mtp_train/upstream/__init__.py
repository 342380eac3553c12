"""Undocumented parts of other packages, a module for each; ``tests/unit/test_upstream.py`` looks all of them up."""
