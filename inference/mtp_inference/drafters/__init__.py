"""Drafters: MTP heads, draft models, n-gram lookup and external assistants."""
