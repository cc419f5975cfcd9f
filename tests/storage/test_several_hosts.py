"""Under torchrun the global order is the same, however the ranks lie on hosts. Hosts are groups of processes here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import serving
from shards import tar_of_numbers

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


@pytest.fixture
def urls() -> Iterator[str]:
    """Eight shards of 20 numbers, behind a server."""
    with serving() as served:
        for shard in range(8):
            served.files[f"/{shard}.tar"] = tar_of_numbers(range(20 * shard, 20 * shard + 20))
        yield " ".join(f"{served.url}{name}" for name in sorted(served.files))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read(urls: str, out: Path, hosts: int, ranks: int) -> list[Any]:
    """What each rank reads in two epochs."""
    out.mkdir()
    script, port = out / "rank.py", free_port()
    script.write_text(RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    running = [
        subprocess.Popen([*command, f"--node-rank={host}", str(script), urls, str(out), str(host)], env=environment)
        for host in range(hosts)
    ]
    assert [one.wait(100) for one in running] == [0] * hosts
    assert all(any((out / f"cache-{host}").glob("*.shard")) for host in range(hosts))  # each host has fetched its own
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(hosts * ranks)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks_read_the_same_on_one_two_and_four_hosts(urls: str, tmp_path: Path) -> None:
    one, two, four = (read(urls, tmp_path / f"{hosts}", hosts, 4 // hosts) for hosts in (1, 2, 4))
    assert one == two == four
    for epoch in range(2):
        assert sorted(index for rank in one for batch in rank[epoch] for index in batch) == list(range(160))
    shards_of = [{index // 20 for batch in rank[0] for index in batch} for rank in one]
    assert sum(map(len, shards_of)) == 8  # four lanes: no shard is read by two ranks
