"""Batches that are cut into slices for several devices.

For: programs that split a batch themselves, as with MXNet Gluon.
Costs: about 110 lines. A loader uses `gather` alone.
Tests: tests/parallel.
It goes when: programs have one process for each device.
"""

from sharded_loader.parallel.split import split_and_load, split_data

__all__ = ["split_and_load", "split_data"]
