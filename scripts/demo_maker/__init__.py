"""Parts of ``make_demo.py``, which makes the checkpoints and prompts of ``mtp_train.checkpoints.demo``."""
