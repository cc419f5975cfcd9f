"""`GroupReads` at random: orders, windows, bounds, pools, ranks, resume and kills, against plain reading.

seed -> a dataset of groups, an order, a window, a bound -> loaders of some ranks, step by step, with random numbers
     -> each batch is compared with the one that a loader without workers reads from the dataset itself
     -> without faults, and with room for all samples: no sample is read more often than it is delivered
"""

import contextlib
import os
import random
import signal
import time
from typing import Any

import numpy as np

from sharded_loader import ShardedDataLoader, SortedSampler, WeightedRandomSampler, sample_rng
from sharded_loader.caching.groups import GroupReads
from sharded_loader.data.datasets import Dataset
from tests import conftest
from tests.fuzz.steps import Difference, Program


class Grouped(Dataset):
    """Groups of random sizes. Some samples raise."""

    def __init__(self, sizes: list[int], bad: set[int]) -> None:
        self.owners, self.bad = np.repeat(np.arange(len(sizes)), sizes).tolist(), bad

    def __len__(self) -> int:
        return len(self.owners)

    def group_of(self, index: int) -> Any:
        return self.owners[index] if self.owners[index] % 2 else ("chunk", self.owners[index])

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return np.full(1 + 7 * (index % 3), index, np.int32), {"name": f"{index}"}


class InOrder(Grouped):
    def __getitems__(self, indices: list[int]) -> Any:
        if indices != sorted(set(indices)) or len({self.owners[index] for index in indices}) != 1:
            raise Difference(f"{indices} are not those of one group, in order")
        return [self[index] for index in indices]


def drawing(numbers: Any, other: Any) -> Any:
    return numbers.tolist(), other, sample_rng().random(), random.random()


class Groups(Program):
    """Loaders of all ranks over grouped reads, and over the dataset."""

    def __init__(self, seed: int, processes: bool = True) -> None:
        super().__init__(seed, processes)
        rng = self.rng
        sizes = [rng.choice([1, 3, 10, 40]) for _ in range(rng.choice([1, 3, 12]))]
        bad = set(rng.sample(range(sum(sizes)), min(sum(sizes), rng.choice([0, 0, 0, 2]))))
        self.data, self.plain = rng.choice([Grouped, InOrder])(sizes, bad), Grouped(sizes, bad)
        self.window, self.batch_size = rng.choice([1, 2, 7, 32, 1000]), rng.choice([1, 3, 8, 50])
        self.max_bytes = rng.choice([0, 500, 5000, "1 MB", "1 MB", "100 MB"])
        self.pool = rng.choice(
            ["inline", "thread", "fork", "fork", "fork"] + ["forkserver", "spawn"] * (rng.random() < 0.03)
        )
        self.num_workers, self.ranks = rng.choice([1, 2, 4]), rng.choice([1, 1, 2, 3])
        self.kills = rng.choice([0, 0, 0.1, 0.3]) if self.pool not in ("inline", "thread") else 0
        self.order, self.prefetch = rng.choice(["shuffle", "in order", "weighted", "sorted"]), rng.choice([None, 1, 30])
        self.on_error, self.seed = rng.choice(["raise", "skip", "replace"]), rng.randrange(1 << 40)
        self.sharing = rng.random() < 0.3  # the ranks share one object

    def __str__(self) -> str:
        return ", ".join(
            f"{name}={value!r}" for name, value in vars(self).items() if name not in ("data", "plain", "rng", "workers")
        )

    def loader(self, dataset: Any, rank: int, ranks: int, pool: Any) -> ShardedDataLoader:
        options: dict[str, Any] = {"on_error": self.on_error, "seed": self.seed, "collate_fn": list}
        options |= {"num_replicas": ranks, "rank": rank, "pool": pool, "num_workers": 0}
        if self.prefetch and self.pool != "inline":
            options["prefetch"] = self.prefetch
        if self.order == "weighted":
            options["sampler"] = WeightedRandomSampler(np.arange(len(self.data)) + 1.0, 2 * len(self.data))
        elif self.order == "sorted":
            options["sampler"] = SortedSampler([-(index * 7919 % 97) for index in range(len(self.data))])
        else:
            options["shuffle"] = self.order == "shuffle"
        return ShardedDataLoader(dataset, self.batch_size, **options)

    def run(self) -> None:
        rng, state, shared = self.rng, None, GroupReads(self.data, self.window, self.max_bytes)
        for _ in range(rng.choice([1, 2, 3])):
            ranks = rng.choice([1, 2, 3]) if self.ranks > 1 else 1
            grouped = [
                shared if self.sharing else GroupReads(self.data, self.window, self.max_bytes) for _ in range(ranks)
            ]
            pairs = []
            for rank, base in enumerate(grouped):
                options: dict[str, Any] = {"restarts": 1000} if self.pool not in ("inline", "thread") else {}
                pool = conftest.make_pool(self.pool, self.num_workers, **options)
                both = [self.loader(base.transform(drawing, seeded=True), rank, ranks, pool)]
                both.append(
                    self.loader(self.plain.transform(drawing, seeded=True), rank, ranks, conftest.make_pool("inline"))
                )
                for loader in both if state is not None else ():
                    loader.load_state_dict(state, strict=False)
                pairs.append(both)
            try:
                state = self.step(pairs)
                if (
                    not (self.kills or self.data.bad or self.sharing or self.max_bytes != "100 MB")
                    and self.pool == "inline"
                ):
                    self.check_reads(grouped)
            finally:
                for loader in (loader for both in pairs for loader in both):
                    loader.close()

    def step(self, pairs: list[Any]) -> Any:
        rng, limit = self.rng, self.rng.choice([3, 20, 1000])
        for _ in range(rng.choice([1, 2, 3])):
            if rng.random() < 0.2:
                epoch = rng.randrange(5)
                for loader in (loader for both in pairs for loader in both):
                    loader.set_epoch(epoch)
            iterators = [[iter(loader) for loader in both] for both in pairs]
            for _ in range(limit):
                ended = [self.compare(both) for both in iterators]
                if self.kills and rng.random() < self.kills:
                    pids = [pid for both in pairs for pid in both[0]._pipeline.pool.pids]
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(rng.choice(pids), signal.SIGKILL)
                        self.counts["fault: worker killed"] += 1
                if any(ended):
                    break
        states = [[loader.state_dict() for loader in both] for both in pairs]
        if any(one != other for one, other in states):
            raise Difference(f"states {states}")
        return states[0][0]

    def compare(self, both: list[Any]) -> bool:
        found = []
        for iterator in both:
            try:
                found.append(next(iterator, None))
            except ValueError as error:
                found.append(f"{error}")
        self.last_sign = time.monotonic()
        self.counts["batches compared"] += 1
        if found[0] != found[1]:
            raise Difference(f"{found[0]} instead of {found[1]}")
        return found[0] is None

    def check_reads(self, grouped: list[GroupReads]) -> None:
        """Each sample was delivered, or is read ahead for the batches of its window."""
        for one in grouped:
            found, read, _ = one.counts
            if one.reads > read or (self.window == 1 and found):
                raise Difference(f"{one.reads} reads of {read} samples, {found} found")
