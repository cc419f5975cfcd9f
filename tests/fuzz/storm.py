"""Storms on a simulated cluster of Ray: ``python -m tests.fuzz --nodes --minutes 10`` where `make test-ray` runs.

Three nodes, five actors. Every few seconds an actor is killed, and twice a minute a node, which another one replaces.
Every epoch is compared with the one that this process reads alone. A storm has ten.
"""

import contextlib
import os
import signal
import sys
import time
from typing import Any

import numpy as np

from sharded_loader import RayPool, ShardedDataLoader, SimpleDataset, sample_rng
from tests.fuzz.steps import Difference, Program
from tests.samples import ByEpoch


def row(index: int) -> Any:
    """Some batches are small and cheap, some lie in the object store and take a while."""
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


class Storm(Program):
    """Actors and nodes that are killed."""

    def run(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        from benchmarks.on_ray import QUICK

        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), *sys.path]))
        room = {"object_store_memory": 200 << 20}
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": QUICK, **room})
        nodes = [cluster.add_node(num_cpus=2, **room) for _ in range(3)]
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        next_actor, next_node = time.monotonic() + 2, time.monotonic() + 20
        pools: list[Any] = [RayPool(5, restarts=1000), "inline"]
        rows = SimpleDataset(range(3000)).transform(row)
        loaders = [ShardedDataLoader(rows, batch_sampler=Batches(300), seed=9, pool=pool) for pool in pools]
        with loaders[0], loaders[1]:
            for _ in range(10):
                for batch, same in zip(*loaders, strict=True):
                    self.last_sign = now = time.monotonic()
                    self.counts["batches compared"] += 1
                    if batch.numpy().tobytes() != same.numpy().tobytes():
                        raise Difference(f"{batch} instead of {same}")
                    if now > next_actor:
                        next_actor = now + self.rng.uniform(1, 5)
                        ready = [worker.pid for worker in pools[0].workers if worker.pid is not None]
                        with contextlib.suppress(ProcessLookupError, IndexError):  # it has died already, or all have
                            os.kill(self.rng.choice(ready), signal.SIGKILL)
                            self.counts["fault: actor killed"] += 1
                    if now > next_node:
                        next_node = now + self.rng.uniform(20, 40)
                        cluster.remove_node(nodes.pop(self.rng.randrange(3)), allow_graceful=False)
                        nodes.append(cluster.add_node(num_cpus=2, **room))
                        self.counts["fault: node killed"] += 1
        ray.shutdown()
        cluster.shutdown()
