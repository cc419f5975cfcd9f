"""The time that the last of 4,096 ranks takes to plan one step, by samplers.

    python -m benchmarks.ranks plans

The first step has what an epoch needs once, such as a shuffle; it is told apart. The other steps are timed together.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.ranks_equal import lengths_of
from sharded_loader import BoundedBudgetSampler, FixedBucketSampler, SortedBucketSampler
from sharded_loader.sampling.order import MapOrder

TITLE = "Planning one step for rank 4,095 of 4,096"

RANKS, SIZE = 4096, 8


def planned(count: int, **given: Any) -> tuple[int, float, float]:
    """Steps, seconds of the first one, seconds of each later one."""
    common: dict[str, Any] = {"batch_size": None, "shuffle": False, "sampler": None, "last_batch": None}
    common |= {"batch_sampler": None, "seed": 0, **given}
    epoch = MapOrder(count, num_replicas=RANKS, rank=RANKS - 1, **common).epoch(0)
    epoch.limit = count
    began = time.perf_counter()
    epoch.task(0)
    first = time.perf_counter() - began
    steps = min(epoch.length(), 400)
    half = steps // 2  # what each bucket needs once comes in the first half
    for step in range(1, half):
        epoch.task(step)
    began = time.perf_counter()
    for step in range(half, steps):
        epoch.task(step)
    return steps, first, (time.perf_counter() - began) / (steps - half)


def rows(quick: bool) -> Iterable[dict[str, object]]:
    """One row for each sampler."""
    count = 1_000_000 if quick else 16_000_000
    lengths = lengths_of(count)
    samplers: dict[str, Callable[[], dict[str, Any]]] = {
        "`shuffle=True`": lambda: {"batch_size": SIZE, "shuffle": True},
        "`costs=`": lambda: {"batch_size": SIZE, "costs": lengths},
        "FixedBucketSampler": lambda: {"batch_sampler": FixedBucketSampler(lengths, SIZE, shuffle=True, seed=0)},
        "SortedBucketSampler": lambda: {"batch_sampler": SortedBucketSampler(lengths, SIZE, shuffle=True, seed=0)},
        "BoundedBudgetSampler": lambda: {"batch_sampler": BoundedBudgetSampler(lengths, 8000, seed=0)},
    }
    for name, make in samplers.items():
        began = time.perf_counter()
        steps, first, each = planned(count, **make())
        made = time.perf_counter() - began
        yield {
            "order": name,
            "steps": steps,
            "us per step": f"{each * 1e6:.0f}",
            "first step": f"{first:.2f} s",
            "in all": f"{made:.1f} s",
        }
