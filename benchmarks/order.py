"""What an order costs, and how well it mixes: ``python -m benchmarks.order``.

Three tables, in half a minute:

    planning    a loader over 10**12 samples: microseconds per batch of 256, by sampler and by the number of ranks
    mixing      shards that have to be at hand at once, and shards in a batch, by window and lanes
    downloads   how many shards all ranks fetch together, divided by the number of shards, by lanes and ranks

Planning is what the main process does before a batch is read. It is timed on one rank, the last one.
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
)
from sharded_loader.randomness.rng import philox
from sharded_loader.sampling.tables import StridedTable

TRILLION = 10**12
BATCH = 256
BATCHES = 4000
ROUNDS = 5

SHARDS, LENGTH = 1024, 1000
"""For mixing and downloads."""

Indices = np.ndarray[Any, Any]

PLANNED: dict[str, Callable[[], dict[str, Any]]] = {
    "`SequentialSampler`": lambda: {"sampler": SequentialSampler(TRILLION), "batch_size": BATCH},
    "`RandomSampler`": lambda: {"sampler": RandomSampler(TRILLION, seed=1), "batch_size": BATCH},
    "`BatchSampler` of it": lambda: {"batch_sampler": BatchSampler(RandomSampler(TRILLION, seed=1), BATCH)},
    "`ShardShuffleSampler`, 10^8 shards, 4,096 lanes": lambda: {
        "sampler": ShardShuffleSampler(np.broadcast_to(10**4, TRILLION // 10**4), lanes=4096, seed=1),
        "batch_size": BATCH,
    },
}


def planning(make: Callable[[], dict[str, Any]], ranks: int) -> tuple[float, float, int]:
    """Microseconds per batch, seconds until the first batch is planned, and the most bytes in use, on the last rank."""
    tracemalloc.start()
    began = time.perf_counter()
    loader = ShardedDataLoader(range(TRILLION), **make(), num_replicas=ranks, rank=ranks - 1)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    epoch = batches.run.epoch
    times = []
    for number in range(ROUNDS):
        began = time.perf_counter()
        for seq in range(1 + number * BATCHES, 1 + (number + 1) * BATCHES):
            epoch.task(seq)
        times.append((time.perf_counter() - began) / BATCHES * 1e6)
    return statistics.median(times), first, most


def shards_at_hand(order: Indices) -> tuple[int, float]:
    """The most shards that are begun and not over at one moment of an order, and the mean number in a batch."""
    shards = order // LENGTH
    places = np.arange(len(shards))
    first, last = np.full(SHARDS, len(shards)), np.zeros(SHARDS, np.int64)
    np.minimum.at(first, shards, places)
    np.maximum.at(last, shards, places)
    steps = np.zeros(len(shards) + 1, np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    batches = shards[: len(shards) // BATCH * BATCH].reshape(-1, BATCH)
    return int(np.cumsum(steps).max()), statistics.mean(len(set(batch)) for batch in batches.tolist())


def downloads(sampler: Sampler[int], ranks: int) -> float:
    """Shards that all ranks fetch in an epoch together, if each keeps a shard while it needs it, by the shards."""
    table = sampler.epoch_table(0)
    fetched = 0
    for rank in range(ranks):
        mine = StridedTable(table, ranks, rank)
        fetched += len(np.unique(mine.at(np.arange(mine.upto(0, len(sampler)))) // LENGTH))
    return fetched / SHARDS


def reservoir(size: int) -> Indices:
    """The order of a shuffle buffer that reads the shards one after the other, in shuffled order."""
    rng = philox(1, "benchmark: reservoir")
    line = (rng.permutation(SHARDS)[:, None] * LENGTH + np.arange(LENGTH)).ravel().tolist()
    buffer, order = line[:size], []
    for index in line[size:]:
        place = int(rng.integers(size))
        order.append(buffer[place])
        buffer[place] = index
    return np.array([*order, *rng.permutation(buffer).tolist()])


def whole(sampler: Sampler[int]) -> Indices:
    """One epoch as an array."""
    return np.asarray(sampler.epoch_table(0).at(np.arange(len(sampler))))


def main() -> None:
    """Print the tables."""
    print(f"| planning, {TRILLION:,} samples | ranks | us per batch of {BATCH} | first batch | memory |")
    print("|---|---|---|---|---|")
    for name, make in PLANNED.items():
        for ranks in (1, 64, 4096):
            each, first, most = planning(make, ranks)
            print(f"| {name} | {ranks:,} | {each:.1f} | {first * 1e3:.0f} ms | {most / 1e6:.1f} MB |", flush=True)
    count = SHARDS * LENGTH
    orders: dict[str, Callable[[], Indices]] = {
        "`RandomSampler`": lambda: whole(RandomSampler(count, seed=1)),
        "a shuffle buffer of 16,000 samples": lambda: reservoir(16_000),
    }
    for window, lanes in ((16, 1), (4, 4), (1, 16), (64, 1)):
        sampler = ShardShuffleSampler([LENGTH] * SHARDS, window, lanes, seed=1)
        name = f"`ShardShuffleSampler`, window {window}, {lanes} lane{'s' * (lanes > 1)}"
        orders[name] = lambda sampler=sampler: whole(sampler)  # type: ignore[misc]
    print(f"\n| {SHARDS:,} shards of {LENGTH:,} samples | shards at hand, most | shards in a batch of {BATCH} |")
    print("|---|---|---|")
    for name, order in orders.items():
        most_at_hand, in_batch = shards_at_hand(order())
        print(f"| {name} | {most_at_hand:,} | {in_batch:.0f} |", flush=True)
    print("\n| downloads / shards | 1 rank | 4 ranks | 12 ranks | 16 ranks |\n|---|---|---|---|---|")
    for lanes in (1, 16):
        sampler = ShardShuffleSampler([LENGTH] * SHARDS, 16, lanes, seed=1)
        found = " | ".join(f"{downloads(sampler, ranks):.1f}" for ranks in (1, 4, 12, 16))
        print(f"| {lanes} lane{'s' * (lanes > 1)} | {found} |", flush=True)


if __name__ == "__main__":
    main()
