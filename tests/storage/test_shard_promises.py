"""The promises over shards behind a server: one order in every pool, resume, kills, ranks, shards that are gone."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import METHODS, POOLS, PROCESS_POOLS, make_pool
from shards import Served, closed, serves, tar_of_numbers  # noqa: F401

from sharded_loader import ProcessPool, ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler, sample_rng

SHARDS, LENGTH, BATCH = 8, 24, 6
SERVED = {f"/{shard}.tar": tar_of_numbers(range(LENGTH * shard, LENGTH * (shard + 1))) for shard in range(SHARDS)}
TOTAL = SHARDS * LENGTH


@pytest.fixture(params=["cached", "in parts"])
def shards(request: pytest.FixtureRequest, served: Served, tmp_path: Path) -> ShardDataset:
    """With a cache that has room for half of the shards, and without one."""
    room = SHARDS // 2 * len(SERVED["/0.tar"])
    cache = ShardCache(tmp_path / "cache", room) if request.param == "cached" else None
    return ShardDataset([f"{served.url}{name}" for name in SERVED], cache=cache, index_folder=tmp_path / "indexes")


def number(sample: dict[str, Any]) -> tuple[int, int]:
    """A sample, and a random number that is the sample's own."""
    return int(sample["txt"]), int(sample_rng().integers(1 << 30))


def loader_of(shards: ShardDataset, **options: Any) -> ShardedDataLoader[Any]:
    order = ShardShuffleSampler(shards.lengths, window=2, lanes=2, seed=4)
    return ShardedDataLoader(shards.transform(number), BATCH, sampler=order, seed=4, **options)


def listed(batches: Any) -> list[Any]:
    return [[one.tolist() for one in batch] for batch in batches]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """Two epochs, read from this machine's disk without workers."""
    folder = tmp_path_factory.mktemp("shards")
    for name, content in SERVED.items():
        Path(f"{folder}{name}").write_bytes(content)
    shards = ShardDataset(folder / "*.tar", index_folder=folder)
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


RANK = """
import json, os, sys
import torch.distributed as dist
from sharded_loader import ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler

urls, out, host = sys.argv[1:]
dist.init_process_group("gloo")
cache = ShardCache(os.path.join(out, "cache-" + host), 150_000)  # room for half of the shards
shards = ShardDataset(urls.split(), cache=cache)
dataset = shards.transform(lambda sample: int(sample["txt"]))
order = ShardShuffleSampler(shards.lengths, window=2, lanes=4, seed=1)
with ShardedDataLoader(dataset, 5, sampler=order, num_replicas="auto", num_workers=1) as loader:
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
with open(os.path.join(out, f"rank-{dist.get_rank()}.json"), "w") as file:
    json.dump(epochs, file)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks_read_the_same_on_one_two_and_four_hosts(served: Served, tmp_path: Path) -> None:
    """Hosts are groups of processes here."""
    urls, script = " ".join(f"{served.url}{name}" for name in SERVED), tmp_path / "rank.py"
    script.write_text(RANK)

    def read(hosts: int) -> list[Any]:
        """What each rank reads in two epochs."""
        (out := tmp_path / f"{hosts}").mkdir()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={4 // hosts}"]
        command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
        running = [
            subprocess.Popen(
                [*command, f"--node-rank={host}", str(script), urls, str(out), str(host)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for host in range(hosts)
        ]
        try:
            assert [one.wait(100) for one in running] == [0] * hosts
        finally:  # if that takes longer, none lives on into the next test
            for one in running:
                one.terminate()
                one.wait()
        assert all(any((out / f"cache-{host}").glob("*.shard")) for host in range(hosts))  # each has fetched its own
        return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(4)]

    one, two, four = map(read, (1, 2, 4))
    assert one == two == four
    for epoch in range(2):
        assert sorted(index for rank in one for batch in rank[epoch] for index in batch) == list(range(TOTAL))
    shards_of = [{index // LENGTH for batch in rank[0] for index in batch} for rank in one]
    assert sum(map(len, shards_of)) == SHARDS  # four lanes: no shard is read by two ranks
