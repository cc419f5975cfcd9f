"""Under torchrun the global order is the same, however the ranks lie on hosts. Hosts are groups of processes here."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

RANK = """
import json, os, sys
import torch.distributed as dist
from sharded_loader import ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler

folder, out, host = sys.argv[1:]
dist.init_process_group("gloo")
cache = ShardCache(os.path.join(out, "cache-" + host), "1 MB")
shards = ShardDataset(os.path.join(folder, "*.tar"), cache=cache)
dataset = shards.transform(lambda sample: int(sample["txt"]))
order = ShardShuffleSampler(shards.lengths, window=2, lanes=4, seed=1)
with ShardedDataLoader(dataset, 5, sampler=order, num_replicas="auto", num_workers=1) as loader:
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
with open(os.path.join(out, f"rank-{dist.get_rank()}.json"), "w") as file:
    json.dump(epochs, file)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    for shard in range(8):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(20 * shard, 20 * shard + 20):
                member = tarfile.TarInfo(f"{number}.txt")
                member.size = len(str(number))
                tar.addfile(member, io.BytesIO(str(number).encode()))
    return folder


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def read(shards: Path, out: Path, hosts: int, ranks: int) -> list[Any]:
    """What each rank reads in two epochs."""
    out.mkdir()
    script, port = out / "rank.py", free_port()
    script.write_text(RANK)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={hosts}", f"--nproc-per-node={ranks}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}"]
    running = [
        subprocess.Popen(
            [*command, f"--node-rank={host}", str(script), str(shards), str(out), str(host)], env=environment
        )
        for host in range(hosts)
    ]
    assert [one.wait(100) for one in running] == [0] * hosts
    assert sorted(path.name for path in out.glob("cache-*")) == [f"cache-{host}" for host in range(hosts)]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(hosts * ranks)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_ranks_read_the_same_on_one_two_and_four_hosts(shards: Path, tmp_path: Path) -> None:
    one, two, four = (read(shards, tmp_path / f"{hosts}", hosts, 4 // hosts) for hosts in (1, 2, 4))
    assert one == two == four
    for epoch in range(2):
        assert sorted(index for rank in one for batch in rank[epoch] for index in batch) == list(range(160))
    shards_of = [{index // 20 for batch in rank[0] for index in batch} for rank in one]
    assert sum(map(len, shards_of)) == 8  # four lanes: no shard is read by two ranks
