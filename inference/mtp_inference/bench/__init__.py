"""What decoding costs and what drafts gain, measured: ``python -m mtp_inference.bench --help``."""
