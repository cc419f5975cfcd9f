"""Batches of kinds: what it costs to plan a step, and to go on with a shuffle buffer.

    python -m benchmarks.ranks kinds

The first table is `benchmarks.ranks_plans` for the samplers of kinds: rank 4,095 of 4,096. The second one reads a
stream through a `ShuffleBuffer` to its middle, saves the state, and goes on in a new buffer.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from benchmarks.ranks_plans import SIZE, planned
from sharded_loader import (
    ClassBalancedBatchSampler,
    GroupedBatchSampler,
    RepeatedSampler,
    ShuffleBuffer,
)

TITLE = "Kinds: planning one step for rank 4,095 of 4,096, and resuming a shuffle buffer"

KINDS = 1000


def rows(quick: bool) -> Iterable[dict[str, object]]:
    """One row for each sampler, then one for each stream."""
    count = 1_000_000 if quick else 16_000_000
    labels = np.random.default_rng(0).integers(0, KINDS, count)
    samplers: dict[str, Callable[[], dict[str, Any]]] = {
        "RepeatedSampler(3)": lambda: {"batch_size": SIZE, "shuffle": True, "sampler": RepeatedSampler(3)},
        f"GroupedBatchSampler, {KINDS:,} kinds": lambda: {"batch_sampler": GroupedBatchSampler(labels, SIZE, seed=0)},
        "ClassBalancedBatchSampler, 4 x 2": lambda: {"batch_sampler": ClassBalancedBatchSampler(labels, 4, 2, seed=0)},
    }
    for name, make in samplers.items():
        steps, first, each = planned(count, **make())
        yield {"order": name, "steps": steps, "us per step": f"{each * 1e6:.0f}", "first step": f"{first:.2f} s"}
    yield from buffers(100_000 if quick else 2_000_000)


class Numbers:
    """A stream of numbers that knows where it is."""

    def __init__(self, count: int) -> None:
        self.count, self.place = count, 0

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.place >= self.count:
            raise StopIteration
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def buffers(count: int) -> Iterable[dict[str, object]]:
    """How long a buffer of 10,000 samples takes, and how long it takes to go on in the middle."""
    streams: dict[str, Callable[[], Any]] = {
        "with a state": lambda: Numbers(count),
        "without a state": lambda: iter(range(count)),
    }
    for name, make in streams.items():
        rates, resumed = [], []
        for _ in range(3):
            samples = iter(ShuffleBuffer(make, 10_000))
            began = time.perf_counter()
            for _ in range(count // 2):
                next(samples)
            rates.append(count / 2 / (time.perf_counter() - began))
            text = json.dumps(samples.state_dict())
            other = iter(ShuffleBuffer(make, 10_000))
            began = time.perf_counter()
            other.load_state_dict(json.loads(text))
            assert next(other) == next(samples)
            resumed.append(time.perf_counter() - began)
        yield {
            "stream": name,
            "samples": f"{count:,}",
            "samples per second": f"{statistics.median(rates):,.0f}",
            "goes on after": f"{statistics.median(resumed) * 1e3:.0f} ms",
            "bytes of the state": len(text),
        }
