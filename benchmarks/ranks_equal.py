"""How much longer the slowest rank of a step takes than the mean, by orders: buckets, random, and by costs.

    python -m benchmarks.ranks equal

16,000 lognormal lengths (sigma 0.9, clipped at 4,000). A batch costs the sum of its lengths, or of their squares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from sharded_loader import FixedBucketSampler, SortedBucketSampler
from sharded_loader.randomness.rng import philox
from sharded_loader.sampling.order import MapOrder

TITLE = "Time of the slowest rank over the mean of a step, mean of all steps"


def lengths_of(count: int) -> Any:
    """Lognormal lengths with a mean of about 600."""
    return np.clip(np.exp(philox(0, "benchmark: lengths").normal(6, 0.9, count)), 1, 4000).astype(np.int64)


def steps_of(count: int, ranks: int, **given: Any) -> list[list[Any]]:
    """The batches of all ranks, by steps."""
    common: dict[str, Any] = {"batch_size": None, "shuffle": False, "sampler": None, "last_batch": None}
    common |= {"batch_sampler": None, "seed": 0, **given}
    orders = [MapOrder(count, num_replicas=ranks, rank=rank, **common).epoch(0) for rank in range(ranks)]
    return [[epoch.task(step).shards[0] for epoch in orders] for step in range(orders[0].length())]  # type: ignore[union-attr]


def slowest(steps: list[list[Any]], costs: Any) -> float:
    """The slowest rank over the mean; the last step may be incomplete, and is left out."""
    work = np.array([[costs[np.asarray(batch)].sum() for batch in step] for step in steps[:-1]], float)
    return float((work.max(axis=1) / work.mean(axis=1)).mean())


class Alone:
    """A batch sampler as if there were no ranks: it is not made for them."""

    def __init__(self, sampler: Any) -> None:
        self.batches = list(sampler.iter_epoch(0))

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def orders_of(count: int, lengths: Any, ranks: int, size: int) -> dict[str, Callable[[Any], list[list[Any]]]]:
    """The steps of each order, by what samples cost."""

    def fixed() -> Any:
        return FixedBucketSampler(lengths, size, shuffle=True, seed=0)

    def in_sorted() -> Any:
        return SortedBucketSampler(lengths, size, shuffle=True, seed=0)

    return {
        "FixedBucketSampler, each rank another bucket": lambda _: steps_of(count, ranks, batch_sampler=Alone(fixed())),
        "FixedBucketSampler": lambda _: steps_of(count, ranks, batch_sampler=fixed()),
        "SortedBucketSampler, each rank another bucket": lambda _: steps_of(
            count, ranks, batch_sampler=Alone(in_sorted())
        ),
        "SortedBucketSampler": lambda _: steps_of(count, ranks, batch_sampler=in_sorted()),
        "`shuffle=True`": lambda _: steps_of(count, ranks, batch_size=size, shuffle=True),
        "`costs=`": lambda costs: steps_of(count, ranks, batch_size=size, costs=costs),
    }


def rows(quick: bool) -> Iterable[dict[str, object]]:
    """One row for each order, number of ranks and batch size."""
    count = 2000 if quick else 16_000
    lengths = lengths_of(count)
    for ranks, size in ((8, 32), (8, 8), (64, 8)):
        for name, order in orders_of(count, lengths, ranks, size).items():
            found = [slowest(order(costs), costs) for costs in (lengths.astype(float), lengths.astype(float) ** 2)]
            yield {
                "order": name,
                "ranks": ranks,
                "batch": size,
                "cost = length": f"{found[0]:.3f}",
                "cost = length squared": f"{found[1]:.3f}",
            }
