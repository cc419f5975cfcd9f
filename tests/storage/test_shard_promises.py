"""The promises over shards behind a server: one order in every pool, resume, kills, ranks, shards that are gone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import METHODS, POOLS, PROCESS_POOLS, make_pool
from served import Served, serving
from shards import tar_of_numbers

from sharded_loader import ProcessPool, ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler, sample_rng
from sharded_loader.storage import stores

SHARDS, LENGTH, BATCH = 8, 24, 6
TOTAL = SHARDS * LENGTH


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Eight shards of 24 samples; sample i is the number i."""
    paths = [tmp_path_factory.mktemp("shards") / f"{shard}.tar" for shard in range(SHARDS)]
    for shard, path in enumerate(paths):
        path.write_bytes(tar_of_numbers(range(LENGTH * shard, LENGTH * (shard + 1))))
    return paths


@pytest.fixture
def served(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server of the shards."""
    monkeypatch.setattr(stores, "PAUSE", 0.01)
    with serving() as found:
        found.files.update({f"/{path.name}": path.read_bytes() for path in files})
        yield found


@pytest.fixture(params=["cached", "in parts"])
def shards(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> Iterator[ShardDataset]:
    """With a cache that has room for half of the shards, and without one."""
    size = len(served.files["/0.tar"])
    cache = ShardCache(tmp_path / "cache", SHARDS // 2 * size) if request.param == "cached" else None
    urls = [f"{served.url}/{shard}.tar" for shard in range(SHARDS)]
    made = ShardDataset(urls, cache=cache, index_folder=tmp_path / "indexes")
    yield made
    made.close()


def number(sample: dict[str, Any]) -> tuple[int, int]:
    """A sample, and a random number that is the sample's own."""
    return int(sample["txt"]), int(sample_rng().integers(1 << 30))


def loader_of(shards: ShardDataset, **options: Any) -> ShardedDataLoader[Any]:
    order = ShardShuffleSampler(shards.lengths, window=2, lanes=2, seed=4)
    return ShardedDataLoader(shards.transform(number), BATCH, sampler=order, seed=4, **options)


def listed(batches: Any) -> list[Any]:
    return [[one.tolist() for one in batch] for batch in batches]


@pytest.fixture(scope="module")
def expected(files: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two epochs, read from this machine's disk without workers."""
    shards = ShardDataset([str(path) for path in files], index_folder=tmp_path_factory.mktemp("indexes"))
    with contextlib.closing(shards), loader_of(shards) as loader:
        return [listed(loader) for _ in range(2)]


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.costly
def test_every_pool_reads_the_same(shards: ShardDataset, expected: list[Any], name: str) -> None:
    with loader_of(shards, pool=make_pool(name)) as loader:
        assert [listed(loader) for _ in range(2)] == expected
    assert sorted(index for batch in expected[0] for index in batch[0]) == list(range(TOTAL))


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize(
    "delivered", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow), 13, TOTAL // BATCH]
)
@pytest.mark.costly
def test_a_state_continues_exactly(shards: ShardDataset, expected: list[Any], name: str, delivered: int) -> None:
    with loader_of(shards, pool=make_pool(name)) as loader:
        batches = iter(loader)
        for _ in range(delivered):
            next(batches)
        state = loader.state_dict()
    with loader_of(shards, num_workers=1, thread_pool=True) as loader:
        loader.load_state_dict(state)
        whole = delivered == TOTAL // BATCH
        assert listed(loader) == (expected[1] if whole else expected[0][delivered:])


@pytest.mark.costly
@METHODS
def test_kills_change_nothing(shards: ShardDataset, expected: list[Any], method: str) -> None:
    dice, pool = random.Random(1), ProcessPool(2, start_method=method, restarts=100)
    found = []
    with loader_of(shards, pool=pool) as loader:
        for place, batch in enumerate(loader):
            found += listed([batch])
            if place % 8 == 3:
                os.kill(dice.choice(pool.pids), getattr(signal, "SIGKILL", signal.SIGTERM))
    assert found == expected[0]


@pytest.mark.costly
@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_read_one_order(shards: ShardDataset, expected: list[Any], ranks: int) -> None:
    parts = []
    for rank in range(ranks):
        with loader_of(shards, num_replicas=ranks, rank=rank, num_workers=2, thread_pool=True) as loader:
            parts.append([index for batch in listed(loader) for index in batch[0]])
    order = [index for batch in expected[0] for index in batch[0]]
    assert [index for row in zip(*parts, strict=True) for index in row] == order


@pytest.mark.parametrize("name", ["inline", "thread", *PROCESS_POOLS[:1]])
@pytest.mark.slow
def test_a_shard_that_is_gone_costs_its_own_samples(shards: ShardDataset, served: Served, name: str) -> None:
    lost = set(range(5 * LENGTH, 6 * LENGTH))
    assert len(shards) == TOTAL
    del served.files["/5.tar"]
    with loader_of(shards, pool=make_pool(name), on_error="skip") as loader:
        found = [index for batch in loader for index in batch[0].tolist()]
        assert set(found) == set(range(TOTAL)) - lost
        assert {index for index, _ in loader.skipped} == lost
        assert all("5.tar" in str(error) for _, error in loader.skipped)
