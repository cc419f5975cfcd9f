"""Batches that are cut into slices for several devices."""

from sharded_loader.parallel.split import split_and_load, split_data

__all__ = ["split_and_load", "split_data"]
