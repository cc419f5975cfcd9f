"""``mesh=``: the dimensions of data parallelism are ranks; processes that differ in other dimensions read the same."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh

from sharded_loader import ShardedDataLoader
from sharded_loader.parallel import MODEL_DIMS, ranks_of_mesh


def mesh_of(place: tuple[int, ...] | None, shape: tuple[int, ...], *names: str) -> Any:
    """What a `DeviceMesh` tells a process at this place."""
    return SimpleNamespace(
        ndim=len(shape), mesh_dim_names=names or None, get_coordinate=lambda: place, size=lambda dim: shape[dim]
    )


def test_the_dimensions_of_data_parallelism_are_ranks() -> None:
    places = list(itertools.product(range(2), range(3), range(2)))
    for names, found in {
        ("dp", "tp", "cp"): [(2, place[0]) for place in places],
        ("pp", "dp", "tp"): [(3, place[1]) for place in places],
        ("dp_replicate", "dp_shard", "tp"): [(6, 3 * place[0] + place[1]) for place in places],
        ("dp_replicate", "tp", "dp_shard"): [(4, 2 * place[0] + place[2]) for place in places],
    }.items():
        assert [ranks_of_mesh(mesh_of(place, (2, 3, 2), *names)) for place in places] == found


def test_a_mesh_of_one_dimension_is_of_data_parallelism_unless_its_name_says_otherwise() -> None:
    assert ranks_of_mesh(mesh_of((3,), (4,))) == ranks_of_mesh(mesh_of((3,), (4,), "workers")) == (4, 3)
    for name in MODEL_DIMS:
        with pytest.raises(ValueError, match=f"dimensions '{name}', and none is known as one of data parallelism"):
            ranks_of_mesh(mesh_of((3,), (4,), name))


@pytest.mark.parametrize(
    ("mesh", "ranks", "error", "words"),
    [
        (mesh_of((0, 0), (2, 2), "tp", "pp"), {}, ValueError, "the dimensions 'tp', 'pp', and none is known"),
        (mesh_of((0, 0), (2, 2)), {}, ValueError, "give that dimension, mesh=mesh"),
        (mesh_of(None, (2,), "dp"), {}, ValueError, "this process is not in the mesh"),
        ("dp", {}, TypeError, "must be a DeviceMesh"),
        ([2, 2], {}, TypeError, "must be a DeviceMesh"),
        (mesh_of((0,), (2,), "dp"), {"num_replicas": 2}, ValueError, "leave out num_replicas and rank"),
        (mesh_of((0,), (2,), "dp"), {"rank": 0}, ValueError, "leave out num_replicas and rank"),
        (mesh_of((0,), (2,), "dp"), {"num_replicas": "auto"}, ValueError, "leave out num_replicas and rank"),
    ],
)
def test_a_mesh_that_says_nothing_of_ranks_or_contradicts_them_is_refused_at_once(
    mesh: Any, ranks: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ShardedDataLoader(range(8), 2, mesh=mesh, **ranks)


def test_the_loader_reads_as_the_rank_of_its_mesh() -> None:
    by_mesh = ShardedDataLoader(range(12), 2, shuffle=True, mesh=mesh_of((1, 0), (2, 2), "dp", "tp"))
    by_rank = ShardedDataLoader(range(12), 2, shuffle=True, num_replicas=2, rank=1)
    assert [batch.tolist() for batch in by_mesh] == [batch.tolist() for batch in by_rank]
    assert by_mesh.state_dict() == by_rank.state_dict()
    by_mesh.rescale(1, 0, batch_size=4)
    assert "mesh" not in by_mesh.arguments


def read(rank: int, folder: str) -> None:
    """What one process reads, by the mesh and by one dimension of it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=8)
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_replicate", "dp_shard", "tp"))
    found = [
        [batch.tolist() for batch in ShardedDataLoader(range(64), 4, shuffle=True, seed=3, mesh=given)]
        for given in (mesh, mesh["dp_shard"])
    ]
    with pytest.raises(ValueError, match="'tp'"):
        ShardedDataLoader(range(64), 4, mesh=mesh["tp"])
    torch.save((mesh.get_coordinate(), found), f"{folder}/{rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_eight_processes_on_gloo_read_two_replicas_of_two_shards(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(read, (str(tmp_path),), nprocs=8)
    whole: dict[Any, Any] = {}
    dimension: dict[Any, Any] = {}
    for rank in range(8):
        (replicate, shard, _), found = torch.load(tmp_path / f"{rank}.pt")
        # The two ranks of a tensor-parallel group have equal batches.
        assert whole.setdefault((replicate, shard), found[0]) == found[0]
        assert dimension.setdefault(shard, found[1]) == found[1]
    for ranks in (whole, dimension):
        assert sorted(index for batches in ranks.values() for batch in batches for index in batch) == list(range(64))
