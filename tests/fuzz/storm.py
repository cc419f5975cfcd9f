"""A storm on a simulated cluster: ``python -m tests.fuzz --nodes --minutes 10`` where `make test-ray` runs.

Three nodes, five actors. Every few seconds an actor is killed, and twice a minute a node, which another one replaces.
Every epoch is compared with the one that this process reads alone.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from typing import Any

import numpy as np

from benchmarks.on_ray import QUICK
from sharded_loader import RayPool, ShardedDataLoader, sample_rng
from tests.samples import ByEpoch


class Rows:
    """Some batches are small and cheap, some lie in the object store and take a while."""

    def __len__(self) -> int:
        return 3000

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        if index % 7 == 0:
            time.sleep(0.002)
        return np.full(100 if index < 1500 else 9000, index) + sample_rng().integers(1000)


class Batches(ByEpoch):
    """Small samples with small ones, large ones with large ones, in an order of the epoch."""

    def __iter__(self) -> Any:
        order = np.random.default_rng(self.epoch)
        halves = [order.permutation(1500), 1500 + order.permutation(1500)]
        found = [half[at : at + 10].tolist() for half in halves for at in range(0, 1500, 10)]
        order.shuffle(found)
        return iter(found)


def loader_of(pool: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(Rows(), batch_sampler=Batches(300), seed=9, pool=pool)


def run(seed: int, minutes: float) -> int:
    """Run the storm, and print what happened; the exit status is 1 if a batch differs."""
    import ray
    from ray.cluster_utils import Cluster

    dice = random.Random(seed)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
    memory = 200 << 20
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "object_store_memory": memory, "_system_config": QUICK}
    )
    nodes = [cluster.add_node(num_cpus=2, object_store_memory=memory) for _ in range(3)]
    ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
    actors = killed_nodes = batches = epochs = different = 0
    longest, end = 0.0, time.monotonic() + 60 * minutes
    next_actor, next_node = time.monotonic() + 2, time.monotonic() + 20
    pool = RayPool(5, restarts=1000)
    with loader_of(pool) as loader, loader_of("inline") as alone:
        while time.monotonic() < end:
            before = time.monotonic()
            for batch, same in zip(loader, alone, strict=True):
                now = time.monotonic()
                longest = max(longest, now - before)
                batches += 1
                different += batch.numpy().tobytes() != same.numpy().tobytes()
                if now > next_actor:
                    next_actor = now + dice.uniform(1, 5)
                    ready = [worker.pid for worker in pool.workers if worker.pid is not None]
                    with contextlib.suppress(ProcessLookupError, IndexError):  # it has died already, or all have
                        os.kill(dice.choice(ready), signal.SIGKILL)
                        actors += 1
                if now > next_node:
                    next_node = now + dice.uniform(20, 40)
                    cluster.remove_node(nodes.pop(dice.randrange(3)), allow_graceful=False)
                    nodes.append(cluster.add_node(num_cpus=2, object_store_memory=memory))
                    killed_nodes += 1
                before = time.monotonic()
            epochs += 1
    ray.shutdown()
    cluster.shutdown()
    print(f"{epochs} epochs, {batches} batches, {actors} actors and {killed_nodes} nodes killed")
    print(f"{different} batches differ; longest wait {longest:.1f} s")
    return 1 if different else 0
