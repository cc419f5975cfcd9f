"""Random numbers and shuffles determined only by a seed and a position."""
