"""Packed rows beside those of TRL and Grain: what stays empty, and how fast. ``python -m benchmarks.ranks_packing``

Lognormal lengths of mean 600, rows of 8,192 tokens. Each way packs the same documents. *planned*: which document goes
where, from the lengths alone. *made*: rows of tokens, in one process. TRL and Grain have no way to plan alone. Their
rows appear if they are installed: ``pip install trl grain``. *published*: best fit decreasing as the paper has it, in
plain Python, over windows of 1,024 documents.

The last rows are of a rank of thousands: what it takes to find its own batch of each step, with the windows between.
"""

from __future__ import annotations

import statistics
import time
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader import PackSampler, ShardedDataLoader
from sharded_loader.batchify import Pack
from sharded_loader.sampling.tables import StridedTable

TITLE = "Packing: rows of 8,192 tokens, lognormal lengths of mean 600"
TOKENS, WINDOW, ROUNDS = 8192, 1024, 5

Lengths = npt.NDArray[np.int32]


def some_lengths(count: int) -> Lengths:
    return np.random.default_rng(0).lognormal(6.0, 0.9, count).clip(1, TOKENS).astype(np.int32)


def planned(lengths: Lengths) -> int:
    sampler = PackSampler(lengths, tokens=TOKENS, rows=4, seed=0)
    return sum(batch.rows for batch in sampler.iter_epoch(0))  # type: ignore[attr-defined]


def counted(lengths: Lengths) -> int:
    return PackSampler(lengths, tokens=TOKENS, seed=0).len_epoch(0)


def published(lengths: Lengths) -> int:
    order = np.random.default_rng(0).permutation(len(lengths))
    return sum(_best_fit(lengths[order[begin : begin + WINDOW]].tolist()) for begin in range(0, len(order), WINDOW))


def _best_fit(sizes: list[int]) -> int:
    spare: list[tuple[int, int]] = []
    rows: list[list[int]] = []
    for document in sorted(range(len(sizes)), key=lambda document: -sizes[document]):
        place = bisect_left(spare, (sizes[document], -1))
        left, row = spare.pop(place) if place < len(spare) else (TOKENS, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(document)
        insort(spare, (left - sizes[document], row))
    return len(rows)


def made(documents: list[Any]) -> int:
    sampler = PackSampler([len(document) for document in documents], tokens=TOKENS, rows=4, seed=0)
    loader = ShardedDataLoader(documents, batch_sampler=sampler, batchify_fn=Pack(TOKENS))
    return sum(len(batch["input_ids"]) for batch in loader)


def made_by_trl(documents: list[Any]) -> Callable[[], int]:
    from datasets import Dataset, disable_progress_bars  # type: ignore[import-not-found, unused-ignore]
    from trl.data_utils import pack_dataset  # type: ignore[import-not-found, unused-ignore]

    disable_progress_bars()
    dataset = Dataset.from_dict({"input_ids": documents})
    options = {"keep_in_memory": True, "load_from_cache_file": False}
    return lambda: len(pack_dataset(dataset, TOKENS, "bfd", options))


def made_by_grain(documents: list[Any]) -> Callable[[], int]:
    import grain  # type: ignore[import-not-found, unused-ignore]
    from grain.experimental import BestFitPackIterDataset  # type: ignore[import-not-found, unused-ignore]

    source = grain.MapDataset.source([{"input_ids": document} for document in documents]).shuffle(seed=0)

    def pack() -> int:
        packed = BestFitPackIterDataset(
            source.to_iter_dataset(), length_struct={"input_ids": TOKENS}, num_packing_bins=64
        )
        return sum(1 for _ in packed)

    return pack


def ways(count: int) -> Iterator[tuple[str, Lengths, Callable[[], int] | str]]:
    """What is measured: its name, the lengths, and a function that packs them all and counts the rows."""
    lengths = some_lengths(10 * count)
    yield "PackSampler, planned", lengths, lambda: planned(lengths)
    yield "PackSampler, len", lengths, lambda: counted(lengths)
    yield "published, planned", lengths, lambda: published(lengths)
    few = some_lengths(count)
    documents = [np.full(length, 7, np.int64) for length in few]
    yield "PackSampler and Pack, made", few, lambda: made(documents)
    for name, make in (("TRL, bfd, made", made_by_trl), ("Grain, best fit, 64 bins, made", made_by_grain)):
        try:
            pack: Callable[[], int] | str = make(documents)
        except Exception as error:
            pack = f"cannot be imported: {type(error).__name__}"
        yield name, few, pack


def far_rank(rows: int, steps: int) -> float:
    """Milliseconds of a step for rank 4,095 of 4,096."""
    lengths = np.tile(some_lengths(100_000), 100)
    table = StridedTable(PackSampler(lengths, tokens=TOKENS, rows=rows, seed=0).epoch_table(0), 4096, 4095)
    table.slice(0, table.block)
    began = time.process_time()
    for step in range(table.block, table.block + steps, table.block):
        table.slice(step, step + table.block)
    return (time.process_time() - began) / steps * 1e3


def rows(quick: bool) -> list[dict[str, object]]:
    """The table: medians of CPU time, measured in turn."""
    measured = list(ways(5_000 if quick else 20_000))
    seconds: dict[str, list[float]] = {name: [] for name, *_ in measured}
    counts: dict[str, int] = {}
    for _ in range(1 if quick else ROUNDS):
        for name, _, pack in measured:
            if not isinstance(pack, str):
                began = time.process_time()
                counts[name] = pack()
                seconds[name].append(time.process_time() - began)
    found: list[dict[str, object]] = []
    for name, lengths, pack in measured:
        row: dict[str, object] = {"way": name, "empty": "", "rows per second": pack}
        if not isinstance(pack, str):
            row["empty"] = f"{100 * (1 - int(lengths.sum()) / (counts[name] * TOKENS)):.2f} %"
            row["rows per second"] = f"{counts[name] / statistics.median(seconds[name]):,.0f}"
        found.append(row)
    for size in (1, 4):
        step = f"{far_rank(size, 4 if quick else 24):.1f} ms per step"
        found.append({"way": f"rank 4,095 of 4,096, {size} rows a batch", "empty": "", "rows per second": step})
    return found


if __name__ == "__main__":
    print(TITLE)
    for line in rows(quick=False):
        print(" | ".join(map(str, line.values())))
