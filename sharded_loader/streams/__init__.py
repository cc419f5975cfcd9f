"""Iterable data: its parts, their order, and how they are read."""
