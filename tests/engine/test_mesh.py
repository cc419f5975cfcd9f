"""``mesh=``: the dimensions of data parallelism are ranks; processes that differ in other dimensions read the same."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.engine.order import MODEL_DIMS, ranks_of_mesh


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
    assert ranks_of_mesh(mesh_of((3,), (4,))) == (4, 3)
    assert ranks_of_mesh(mesh_of((3,), (4,), "workers")) == (4, 3)
    for name in MODEL_DIMS:
        with pytest.raises(ValueError, match=f"dimensions '{name}', and none is known as one of data parallelism"):
            ranks_of_mesh(mesh_of((3,), (4,), name))


@pytest.mark.parametrize(
    ("mesh", "error", "words"),
    [
        (mesh_of((0, 0), (2, 2), "tp", "pp"), ValueError, "the dimensions 'tp', 'pp', and none is known"),
        (mesh_of((0, 0), (2, 2)), ValueError, "give that dimension, mesh=mesh"),
        (mesh_of(None, (2,), "dp"), ValueError, "this process is not in the mesh"),
        ("dp", TypeError, "must be a DeviceMesh"),
        ([2, 2], TypeError, "must be a DeviceMesh"),
    ],
)
def test_a_mesh_that_says_nothing_of_ranks_is_refused_at_once(mesh: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ShardedDataLoader(range(8), 2, mesh=mesh)


def test_mesh_and_ranks_contradict_each_other() -> None:
    mesh = mesh_of((0,), (2,), "dp")
    for given in ({"num_replicas": 2}, {"rank": 0}, {"num_replicas": "auto"}):
        with pytest.raises(ValueError, match="leave out num_replicas and rank"):
            ShardedDataLoader(range(8), 2, mesh=mesh, **given)  # type: ignore[arg-type]


def test_the_loader_reads_as_the_rank_of_its_mesh() -> None:
    by_mesh = ShardedDataLoader(range(12), 2, shuffle=True, mesh=mesh_of((1, 0), (2, 2), "dp", "tp"))
    by_rank = ShardedDataLoader(range(12), 2, shuffle=True, num_replicas=2, rank=1)
    assert [batch.tolist() for batch in by_mesh] == [batch.tolist() for batch in by_rank]
    assert by_mesh.state_dict() == by_rank.state_dict()
    by_mesh.rescale(1, 0, batch_size=4)
    assert "mesh" not in by_mesh.arguments


@pytest.mark.slow
def test_eight_processes_on_gloo(tmp_path: Path) -> None:
    program = Path(__file__).with_name("mesh_ranks.py")
    done = subprocess.run([sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "each replica its part\n"), done.stderr
