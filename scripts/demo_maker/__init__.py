"""The parts of ``make_demo.py``: how the two tiny checkpoints and the prompts of ``mtp_train.demo`` came to be."""
