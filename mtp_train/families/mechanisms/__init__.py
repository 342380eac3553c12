"""Attention mechanisms, position embeddings and residual streams that only some families have."""
