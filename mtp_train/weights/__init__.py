"""Reading checkpoints, mapping head keys, and writing head-preserved exports."""
