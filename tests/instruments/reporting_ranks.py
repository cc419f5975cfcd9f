"""Processes on gloo that gather their numbers. `test_report` starts this.

python reporting_ranks.py FOLDER RANKS RANK
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.torch import DataLoader


def main(folder: str, ranks: int, rank: int) -> None:
    distributed = torch.distributed
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    slow = SimpleDataset(range(80)).transform(lambda index: time.sleep(0.01 * (rank == 1)) or index)
    loaders: list[Any] = [ShardedDataLoader(slow, 2, num_replicas="auto"), DataLoader(slow, 2)]
    for loader in loaders:
        try:
            loader.stats_of_ranks()
        except RuntimeError as error:
            assert "rank 0 has delivered no batch yet" in str(error)
        for _ in loader:
            distributed.barrier()
        found = loader.stats_of_ranks()
        assert found.slowest == 1 and str(found).startswith("Rank 1 is slow: the others wait for it for"), str(found)
        assert list(found.stats) == list(range(ranks)) and f"Ranks: {ranks}" in found.text
        assert found.stats[rank] == loader.stats()
        told: list[Any] = [None] * ranks
        distributed.all_gather_object(told, found.text)
        assert set(told) == {found.text}
    group = distributed.new_group([0, 1])
    if rank < 2:
        assert list(loaders[0].stats_of_ranks(group).stats) == [0, 1]
    distributed.barrier()
    distributed.destroy_process_group()
    print("told")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
