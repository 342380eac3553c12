"""Fine-tune the trunk with its head kept: a recipe with a section ``sft``."""
