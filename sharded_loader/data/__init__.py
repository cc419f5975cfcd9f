"""Datasets, and how they are read. No module imports torch: a worker that does not need it saves 1 s and 150 MB."""
