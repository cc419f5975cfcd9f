"""Eight processes on gloo: two replicas of two shards, each a tensor-parallel group of two. `test_mesh` starts this.

python mesh_ranks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from sharded_loader import ShardedDataLoader


def read(rank: int, folder: str) -> None:
    """What one process reads, by the mesh and by one dimension of it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    found = {
        name: [batch.tolist() for batch in ShardedDataLoader(range(64), 4, shuffle=True, seed=3, mesh=given)]
        for name, given in {"whole": mesh, "dimension": mesh["dp_shard"]}.items()
    }
    try:
        ShardedDataLoader(range(64), 4, mesh=mesh["tp"])
    except ValueError as error:
        assert "'tp'" in str(error), error
    else:
        raise AssertionError("a mesh without data parallelism was taken")
    torch.save((mesh.get_coordinate(), found), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(folder: str) -> None:
    torch.multiprocessing.spawn(read, (folder,), nprocs=8)
    results = [torch.load(Path(folder) / f"{rank}.pt") for rank in range(8)]
    whole: dict[tuple[int, int], Any] = {}
    dimension: dict[int, Any] = {}
    for (replicate, shard, _), found in results:
        # The two ranks of a tensor-parallel group have equal batches.
        assert whole.setdefault((replicate, shard), found["whole"]) == found["whole"]
        assert dimension.setdefault(shard, found["dimension"]) == found["dimension"]
    for ranks in (whole, dimension):
        assert sorted(index for batches in ranks.values() for batch in batches for index in batch) == list(range(64))
    print("each replica its part")


if __name__ == "__main__":
    main(sys.argv[1])
