"""Ranks that share a cache, in memory or in a file, while they are killed at random and the disk is full at random.

seed -> a dataset, a bound, memory or a file -> ranks (forked processes), each with its own loader and workers
     -> the ranks compare every sample; the parent kills some, and starts others in their place
     -> at the end: every rank that was not killed has exit status 0, no process holds memory of a cache, and the
        folder has the file alone, from which another process reads the same samples
"""

import contextlib
import gc
import itertools
import os
import resource
import signal
import tempfile
import time
import traceback
from typing import Any

import numpy as np

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.caching.shared import links_of
from sharded_loader.torch import DataLoader
from tests import conftest
from tests.fuzz.steps import Difference, Program

RANKS = 3


def column(index: int) -> Any:
    return np.full((50, 20), index, np.int32), index


def record(index: int) -> Any:
    """Every third one is like the first, a row; the others have a length and a text of their own."""
    return np.full(1000 if index % 3 == 0 else 500 + index, index, np.int32), "a" if index % 3 == 0 else f"{index}"


def held() -> list[str]:
    """The memory of caches that this program's processes hold."""
    found = []
    for link in links_of("sharded_loader-cache"):
        with contextlib.suppress(ProcessLookupError):
            found += [link] * (os.getpgid(int(link.split("/")[2])) == os.getpgrp())
    return found


class Round(Program):
    """What the ranks of one round do."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng, self.folder = self.rng, tempfile.TemporaryDirectory()
        self.seed, self.count = seed, rng.choice([50, 200, 600])
        self.decode = rng.choice([column, record])
        self.path = rng.choice([None, f"{self.folder.name}/it.cache"])
        self.max_bytes = rng.choice([100_000, 4 * 1000 * self.count // 2, "20 MB"])
        self.num_workers, self.epochs = rng.choice([0, 1, 2]), rng.choice([2, 5])
        self.full = rng.choice([None, None, 200_000]) if self.path else None
        self.drop_in = rng.random() < 0.3
        self.running: dict[int, int] = {}

    def __str__(self) -> str:
        shown = ("seed", "count", "path", "max_bytes", "num_workers", "epochs", "full", "drop_in")
        return f"{self.decode.__name__}, " + ", ".join(f"{name}={getattr(self, name)}" for name in shown)

    def dataset(self) -> Any:
        return SimpleDataset(range(self.count)).transform(self.decode).cache(self.max_bytes, self.path)

    def check(self, numbers: Any, other: Any) -> None:
        wanted = self.decode(int(np.asarray(numbers).flat[0]))
        if not np.array_equal(numbers, wanted[0]) or other != wanted[1]:
            raise Difference(f"{numbers} with {other}")

    def read(self, rank: int) -> None:
        """One rank, to its end."""
        os.environ |= {"RANK": str(rank), "MASTER_PORT": f"soak {os.getppid()} {self.seed}"}
        cached = self.dataset()
        if self.full:
            # The limit holds for the shared memory of the workers' heartbeat too.
            size = max(os.stat(str(self.path)).st_size + self.full // 10, 1 << 18)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        options: dict[str, Any] = {"shuffle": True, "collate_fn": list}
        if self.drop_in:
            loader: Any = DataLoader(cached, 7, num_workers=self.num_workers, **options)
        else:
            options |= {"num_replicas": RANKS, "rank": rank, "seed": self.seed, "num_workers": 0}
            pool = ProcessPool(self.num_workers, start_method="fork") if self.num_workers else None
            loader = ShardedDataLoader(cached, 7, pool=pool, **options)
        for batch in itertools.chain.from_iterable(itertools.repeat(loader, self.epochs)):
            for numbers, other in batch:
                self.check(numbers, other)
        if not self.drop_in:
            loader.close()
        for index in range(self.count):
            self.check(*cached[index])

    def start(self, rank: int) -> None:
        pid = os.fork()
        if pid == 0:
            try:
                self.read(rank)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        self.running[pid] = rank

    def run(self) -> None:
        with self.folder:
            try:
                self.disturb()
            finally:
                for pid in self.running:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            self.check_left()

    def disturb(self) -> None:
        for rank in range(RANKS):
            self.start(rank)
        for _ in range(self.rng.choice([0, 2, 5])):
            time.sleep(self.rng.random() * 0.3)
            pid = self.rng.choice(list(self.running))
            os.kill(pid, signal.SIGKILL)
            self.end(pid, signal.SIGKILL, 0)
            self.counts["fault: rank killed"] += 1
            self.start(self.rng.randrange(RANKS))
        for pid in list(self.running):
            self.end(pid, 0)

    def end(self, pid: int, *allowed: int) -> None:
        del self.running[pid]
        self.last_sign, status = time.monotonic(), os.waitpid(pid, 0)[1]
        if status not in allowed:
            raise Difference(f"a rank has ended with status {status}")

    def check_left(self) -> None:
        gc.collect()
        conftest.until(lambda: not held(), 30)
        found = [*held(), *os.listdir(self.folder.name)]
        if found != ([] if self.path is None else ["it.cache"]):
            raise Difference(f"left: {found}")
        if self.path is not None:
            for index, sample in enumerate(self.dataset()):
                assert self.decode(index)[1] == sample[1]
                self.check(*sample)
