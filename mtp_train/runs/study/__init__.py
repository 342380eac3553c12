"""Compare a vanilla and a distilled model: a recipe with a section ``study``."""
