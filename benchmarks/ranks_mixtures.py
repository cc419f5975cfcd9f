"""Mixtures over ranks: how far the shares of a rank are from those that were promised, and what a step costs to plan.

Run it alone: ``python -m benchmarks.ranks_mixtures [--quick]``.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from typing import Any

import numpy as np

from sharded_loader import ShardedDataLoader, interleave
from sharded_loader.mixing.interleave import sampler_of

TITLE = "Mixtures: shares of a rank, and the time that planning takes"

MIXTURES: dict[str, Any] = {
    "1:1:1": [1, 1, 1],
    "5:3:2": [5, 3, 2],
    "13:8:5:3:2": [13, 8, 5, 3, 2],
    "5:3:2, then 1:1:8": [(0, [5, 3, 2]), (0.5, [1, 1, 8])],  # from the middle of what is measured on
}
RANKS = (1, 2, 3, 8, 15, 16, 64, 144, 512, 4096)


def pieces_of(weights: Any, samples: int) -> list[Any]:
    """Weights as a schedule."""
    pieces = [(0, weights)] if isinstance(weights[0], int) else weights
    return [(int(begin * samples), numbers) for begin, numbers in pieces]


def mixture_of(weights: Any, samples: int) -> Any:
    pieces = pieces_of(weights, samples)
    return interleave([range(10**9)] * len(pieces[0][1]), pieces, stop=samples, shuffle=True)


def furthest(weights: Any, ranks: int, samples: int) -> float:
    """How many samples a dataset is away from its share, after any number of samples of the worst of some ranks."""
    mixed, worst = mixture_of(weights, samples * ranks), 0.0
    pieces = pieces_of(weights, samples * ranks)
    for rank in {0, ranks // 3, ranks - 1}:
        positions = rank + ranks * np.arange(samples)
        sources = mixed.schedule.owners(positions)
        given = np.cumsum(sources[:, None] == np.arange(len(pieces[0][1])), axis=0)
        shares = np.zeros_like(given, float)
        for begin, numbers in pieces:
            shares[positions >= begin] = np.array(numbers) / sum(numbers)
        worst = max(worst, float(np.abs(given - np.cumsum(shares, axis=0)).max()))
    return worst


def planned(weights: Any, ranks: int, batch_size: int, steps: int) -> float:
    """Microseconds of one step, with all that is made at once for later steps: the median of some stretches."""
    order = sampler_of(mixture_of(weights, 8 * ranks * 5 * steps), None, False, False)
    loader = ShardedDataLoader(range(1), batch_size, sampler=order, num_replicas=ranks, rank=ranks - 1)
    epoch = loader._order.epoch(0)
    times = []
    for stretch in range(5):
        began = time.perf_counter()
        for seq in range(stretch * steps, (stretch + 1) * steps):
            assert epoch.task(seq) is not None
        times.append((time.perf_counter() - began) / steps)
    return 1e6 * statistics.median(times)


def rows(quick: bool) -> list[dict[str, object]]:
    """One row for each mixture and number of ranks."""
    samples, steps = 2_000 if quick else 20_000, 4_096
    found: list[dict[str, object]] = []
    for (name, weights), ranks in itertools.product(MIXTURES.items(), (1, 8, 4096) if quick else RANKS):
        row: dict[str, object] = {"weights": name, "ranks": ranks, "samples of a rank": samples}
        row["furthest from its share"] = round(furthest(weights, ranks, samples), 1)
        row["us per step of 8, last rank"] = round(planned(weights, ranks, 8, steps), 1)
        found.append(row)
    return found


if __name__ == "__main__":
    table = rows("--quick" in sys.argv)
    print(TITLE, *table, sep="\n")
