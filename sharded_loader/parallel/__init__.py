"""Data-parallel training in one process: a batch is split over the devices, a copy of the model runs on each.

batch -> `split_and_load` (or a loader with ``devices=``) -> shards[i] on devices[i] -> `Replicas` -> one gradient
"""

from sharded_loader.parallel.replicas import Replicas
from sharded_loader.parallel.split import split_and_load, split_data

__all__ = ["Replicas", "split_and_load", "split_data"]
