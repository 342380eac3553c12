"""Jobs from end to end: runs, studies, fine-tunes, and operations on checkpoints."""
