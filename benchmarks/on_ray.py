"""`RayPool` measured: ``python -m benchmarks.on_ray``. Five minutes, with the extras ``bench`` and ``bench-more``.

    one machine    RayPool(2) and ProcessPool(2) open in one process and read in turns, as `benchmarks.turns`; then Ray
                   Data alone, because it reads on while it is not asked
    a cluster      simulated: each node is a group of Ray's processes on this machine
      scaling      samples that sleep 5 ms, read by 1 and by 16 actors on four nodes
      bandwidth    batches of 38 MB from two nodes
      failures     an actor and a node are killed in mid-epoch: the longest wait for a batch, and whether all came
      break        leave an epoch, begin another one: until its first batch

Every number is a median over rounds. Nodes that share two cores say nothing about real networks: what they show is the
work of Ray and of this library.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.loaders import LOADERS
from benchmarks.plans import Plan
from benchmarks.turns import rate
from benchmarks.workloads import WORKLOADS
from sharded_loader import ProcessPool, RayPool, ShardedDataLoader

WORK = ("images", "tiny", "jpeg", "large")
TURNS = 5
WARM, SPAN = 0.3, 0.8
"""Seconds of a turn that do not count, and that do."""

QUICK = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 3}
"""Ray notices a dead node after 1.5 s; by default, after 15."""


class Sleeping:
    """5 ms each: a disk far away."""

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> int:
        time.sleep(0.005)
        return index


class Large:
    """602 KB each, from 64 in memory."""

    def __init__(self) -> None:
        self.rows = np.random.default_rng(0).random((64, 3, 224, 224), dtype=np.float32)

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        return self.rows[index % 64]


class Numbered:
    """50 KB each, 2 ms."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        time.sleep(0.002)
        return np.full(6000, index)


# -- one machine -------------------------------------------------------------------------------------------------------


def side_by_side(name: str) -> tuple[float, float]:
    """The rate of `RayPool` divided by that of `ProcessPool`, and in samples per second."""
    workload = WORKLOADS[name]
    plan = Plan(workload, workload.build(), 2, 4 * TURNS * (WARM + SPAN))
    pools = ProcessPool(2), RayPool(2, num_cpus=0)
    loaders = [
        ShardedDataLoader(plan.source.rows, workload.batch_size, sampler=plan.sampler, pool=pool) for pool in pools
    ]
    batches = [iter(loader) for loader in loaders]
    for one in batches:
        rate(one, 2 * SPAN)
    ratios, rates = [], []
    for turn in range(TURNS):
        found = [0.0, 0.0]
        for which in (0, 1) if turn % 2 else (1, 0):
            rate(batches[which], WARM)
            found[which] = rate(batches[which], SPAN)
        ratios.append(found[1] / found[0])
        rates.append(found[1])
    batches.clear()
    for loader in loaders:
        loader.close()
    return statistics.median(ratios), statistics.median(rates) * workload.batch_size


def ray_data(name: str) -> float:
    """Samples per second of Ray Data, in the form of `benchmarks.other_loaders`. It starts a Ray of its own."""
    workload = WORKLOADS[name]
    plan = Plan(workload, workload.build(), 2, 4 * TURNS * (WARM + SPAN))
    batches = iter(LOADERS["ray"].open(plan))
    rate(batches, 4 * SPAN)
    return statistics.median(rate(batches, SPAN) for _ in range(TURNS)) * workload.batch_size


# -- a cluster ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cluster(nodes: int, cpus: int) -> Iterator[Any]:
    """A head for this process and some nodes that read."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[1]), *sys.path)))
    memory = 600 << 20
    made = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory, "_system_config": QUICK}
    )
    made.readers = [made.add_node(num_cpus=cpus, object_store_memory=memory) for _ in range(nodes)]
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    try:
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def scaling() -> float:
    """The rate of 16 actors on four nodes, divided by 16 times the rate of one."""
    rates = {}
    with cluster(4, 4):
        for actors in (1, 16):
            with ShardedDataLoader(Sleeping(), 32, pool=RayPool(actors)) as loader:
                batches = iter(loader)
                rate(batches, 6)
                rates[actors] = statistics.median(rate(batches, 4) for _ in range(3))
                del batches
    return rates[16] / (16 * rates[1])


def bandwidth() -> float:
    """Bytes per second of batches of 38 MB from two nodes."""
    with cluster(2, 1), ShardedDataLoader(Large(), 64, pool=RayPool(2)) as loader:
        batches = iter(loader)
        nbytes = next(batches).numpy().nbytes
        rate(batches, 3)
        found = statistics.median(rate(batches, 2) for _ in range(5))
        del batches
    return found * nbytes


def longest_wait(kill: Callable[[Any, RayPool], None]) -> tuple[float, bool]:
    """How long the loop waits for a batch at most after something is killed, and whether all batches came."""
    with cluster(2, 2) as nodes:
        pool, longest, found = RayPool(4), 0.0, []
        with ShardedDataLoader(Numbered(), 8, pool=pool) as loader:
            last = time.perf_counter()
            for number, batch in enumerate(loader):
                now = time.perf_counter()
                if number > 60:
                    longest = max(longest, now - last)
                found.append(int(batch[0, 0]))
                if number == 60:
                    kill(nodes, pool)
                last = time.perf_counter()
    return longest, found == list(range(0, 4096, 8))


def kill_actor(nodes: Any, pool: RayPool) -> None:
    """SIGKILL."""
    pid = next(worker.pid for worker in pool.workers if worker.pid is not None)
    os.kill(pid, signal.SIGKILL)


def kill_node(nodes: Any, pool: RayPool) -> None:
    """All processes of the node."""
    nodes.remove_node(nodes.readers.pop(), allow_graceful=False)


def after_break() -> float:
    """Seconds from leaving an epoch to the first batch of another one; batches take 0.1 s of one actor."""
    found = []
    with cluster(1, 4), ShardedDataLoader(Sleeping(), 20, shuffle=True, seed=0, pool=RayPool(4)) as loader:
        for epoch in range(6):
            loader.set_epoch(7 * epoch)
            began = time.perf_counter()
            batches = iter(loader)
            next(batches)
            found.append(time.perf_counter() - began)
            for _ in range(10):
                next(batches)
            del batches
    return statistics.median(found[1:])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.on_ray", description="RayPool measured.")
    parser.add_argument("--part", choices=("machine", "cluster"), help="only this part")
    part = parser.parse_args().part
    if part != "cluster":
        import ray

        ray.init(num_cpus=2, object_store_memory=1500 << 20, logging_level="ERROR", log_to_driver=False)
        print("| two workers on one machine | of `ProcessPool(2)` | samples/s |\n|---|---|---|")
        rates = {}
        for name in WORK:
            of, rates[name] = side_by_side(name)
            print(f"| `{name}` | {of:.2f} | {rates[name]:,.0f} |", flush=True)
        ray.shutdown()
        data = ray_data("images")
        print(
            f"\nRay Data reads {data:,.0f} `images` per second, `RayPool` {rates['images'] / data:.1f} times as many."
        )
        ray.shutdown()
    if part != "machine":
        print("\n| a simulated cluster | measured |\n|---|---|")
        print(f"| samples that sleep 5 ms: 16 actors on 4 nodes, of 16 times one actor | {scaling():.2f} |", flush=True)
        print(f"| batches of 38 MB from two nodes | {bandwidth() / 1e9:.2f} GB/s |", flush=True)
        print(f"| leave an epoch, first batch of another | {after_break():.2f} s |", flush=True)
        for name, kill in (("an actor", kill_actor), ("a node", kill_node)):
            waits = [longest_wait(kill) for _ in range(3)]
            same = "all batches the same" if all(came for _, came in waits) else "BATCHES DIFFER"
            print(f"| {name} is killed: longest wait | {statistics.median(wait for wait, _ in waits):.1f} s, {same} |")


if __name__ == "__main__":
    main()
