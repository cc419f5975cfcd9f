"""Random numbers and shuffles that depend on a seed and a position alone."""
