"""Acceptance: counts, intervals over groups of prompts, and the gate."""
