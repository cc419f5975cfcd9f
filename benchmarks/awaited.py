"""A store that answers after 20 ms, read by an ``async def``: ``python -m benchmarks.awaited``. A minute.

    bare        asyncio.gather of 64 samples at a time, and nothing else
    the rest    by the pool, with its number of workers, and the size of a batch

The table shows samples per second, and the share of the bare rate: the best of three rounds, in each of which all are
read in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, ThreadPool

SAMPLES, LATENCY, AT_A_TIME, ROUNDS = 4_096, 0.02, 64, 3


class Store:
    """Samples of 4 KB."""

    def __len__(self) -> int:
        return SAMPLES

    async def __getitem__(self, index: int) -> Any:
        await asyncio.sleep(LATENCY)
        return np.full(1024, index, np.float32)


async def bare(store: Store) -> None:
    """Read all samples by hand."""
    for begin in range(0, SAMPLES, AT_A_TIME):
        await asyncio.gather(*[store[index] for index in range(begin, begin + AT_A_TIME)])


def seconds_of(read: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    read()
    return time.perf_counter() - began


def main() -> None:
    """Print the table."""
    store = Store()
    rows: dict[str, ShardedDataLoader[Any]] = {}
    for batch_size in (16, 64, 256):
        for pool in (ProcessPool(2), ThreadPool(4), InlinePool()):
            loader = ShardedDataLoader(store, batch_size, pool=pool)
            rows[f"{type(pool).__name__}({pool.num_workers or ''}), batches of {batch_size}"] = loader
            sum(1 for _ in loader)
    found: dict[str, list[float]] = {name: [] for name in ("bare", *rows)}
    for _ in range(ROUNDS):
        found["bare"].append(seconds_of(lambda: asyncio.run(bare(store))))
        for name, loader in rows.items():
            found[name].append(seconds_of(lambda: sum(1 for _ in loader)))  # noqa: B023 - called at once
    for loader in rows.values():
        loader.close()
    whole = min(found["bare"])
    print("| how | samples/s | of bare |\n|---|---|---|")
    for name, seconds in found.items():
        print(f"| {name} | {SAMPLES / min(seconds):,.0f} | {whole / min(seconds):.2f} |")


if __name__ == "__main__":
    main()
