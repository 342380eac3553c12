"""The frozen trunk: load it, check it, run it, and choose where and in which precision it runs."""
