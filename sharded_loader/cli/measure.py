"""How fast is a dataset read by each kind of pool? The measurement itself, without a terminal.

    rows_of(pools, workers) -> Rows
    measure(dataset, rows, ...) -> a Measurement for each row: the medians of several rounds, and their spread

Rounds are interleaved: every row is measured once, then every row again. So a disturbance of the machine hits all rows
alike. Each turn has a new loader. Its first batches are not counted: workers start, and fill what is prefetched. A turn
measures at least as many batches as it has workers, even if that takes longer than asked for.

`measure` owns one loader at a time and closes it. What can go wrong: the dataset raises. In the main process that ends
the measurement; with workers it ends only that row.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sharded_loader.cli.target import say_error

ROUNDS = 5
"""Of three rounds on a busy machine, the median is often a disturbed one."""


@dataclass(frozen=True)
class Row:
    """What is measured: a pool (``inline``, ``thread``, ``process`` or ``ray``) and its number of workers."""

    pool: str
    workers: int

    def __str__(self) -> str:
        return "inline" if self.pool == "inline" else f"{self.workers} x {self.pool}"


@dataclass(frozen=True)
class Measurement:
    """How fast a row was.

    Attributes:
        pool, workers: the row.
        samples_per_second: the median over the rounds; 0 if it failed.
        ms_per_batch: milliseconds from one batch to the next, the median over the rounds.
        error: why it failed; None if it did not.
        lowest, highest: samples per second of the slowest and of the fastest round. None: the median.
    """

    pool: str
    workers: int
    samples_per_second: float = 0.0
    ms_per_batch: float = 0.0
    error: str | None = None
    lowest: float | None = None
    highest: float | None = None

    @property
    def range(self) -> tuple[float, float]:
        """Samples per second of the slowest and of the fastest round."""
        median = self.samples_per_second
        return median if self.lowest is None else self.lowest, median if self.highest is None else self.highest

    @property
    def spread(self) -> float:
        """Half the way from the slowest to the fastest round, as a share of the median.

        Example:
            >>> Measurement("inline", 0, 100.0, lowest=90.0, highest=120.0).spread
            0.15
        """
        lowest, highest = self.range
        return (highest - lowest) / 2 / self.samples_per_second if self.samples_per_second else 0.0


class DatasetFailed(Exception):
    """The dataset raised in the main process; the message says what and at which sample."""


def rows_of(pools: Sequence[str], workers: Sequence[int]) -> list[Row]:
    """The rows to measure: inline first, then each pool with each number of workers.

    Example:
        >>> [str(row) for row in rows_of(["process", "inline"], [2, 4])]
        ['inline', '2 x process', '4 x process']
    """
    inline = [Row("inline", 0)] if "inline" in pools else []
    return inline + [Row(pool, count) for pool in pools if pool != "inline" for count in workers]


def measure(
    dataset: Any,
    rows: Sequence[Row],
    *,
    batch_size: int,
    seconds: float,
    shuffle: bool,
    batchify_fn: Callable[[list[Any]], Any] | None = None,
    on_turn: Callable[[int, Row], object] = lambda number, row: None,
) -> list[Measurement]:
    """Measure every row in several rounds.

    Args:
        dataset: what to read.
        rows: as from `rows_of`.
        batch_size: samples per batch.
        seconds: for each row, all rounds together, without what is not counted.
        shuffle: read in random order.
        batchify_fn: makes a batch of a list of samples, as for the loader; None: the default.
        on_turn: called before each turn with its number, from 0, and its row.

    Returns:
        A measurement for each row, in their order.

    Raises:
        DatasetFailed: the dataset raised in the main process, or it has no samples.
    """
    arguments = {"dataset": dataset, "batch_size": batch_size, "shuffle": shuffle, "batchify_fn": batchify_fn}
    turns: dict[Row, list[tuple[float, float]]] = {row: [] for row in rows}
    errors: dict[Row, str] = {}
    for number in range(ROUNDS * len(rows)):
        row = rows[number % len(rows)]
        on_turn(number, row)
        if row in errors:
            continue
        try:
            turns[row].append(_turn(row, seconds / ROUNDS, arguments))
        except DatasetFailed:
            raise
        except Exception as error:
            if row.pool == "inline":
                raise DatasetFailed(say_error(error)) from error
            errors[row] = say_error(error)
    return [
        Measurement(row.pool, row.workers, error=errors[row]) if row in errors else _summed_up(row, turns[row])
        for row in rows
    ]


def _summed_up(row: Row, turns: list[tuple[float, float]]) -> Measurement:
    speeds, times = zip(*turns, strict=True)
    middle = statistics.median(speeds), statistics.median(times)
    return Measurement(row.pool, row.workers, *middle, lowest=min(speeds), highest=max(speeds))


def _turn(row: Row, seconds: float, arguments: dict[str, Any]) -> tuple[float, float]:
    """Samples per second and milliseconds per batch, of a loader with these arguments."""
    from sharded_loader import ShardedDataLoader

    pool: Any = row.pool
    with ShardedDataLoader(num_workers=row.workers, pool=pool, seed=0, **arguments) as loader:
        batches = _without_end(loader)
        for _ in range(1 + 2 * row.workers):
            next(batches)
        before, begin, count = loader.stats().samples, time.perf_counter(), 0
        while count < max(2, row.workers) or time.perf_counter() - begin < seconds:
            next(batches)
            count += 1
        took = time.perf_counter() - begin
        return (loader.stats().samples - before) / took, 1000 * took / count


def _without_end(loader: Any) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    epoch = 0
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise DatasetFailed(
                "it gives no samples: give a dataset that has some"
                if epoch == 0
                else "it gives its samples only once: return a new iterator from __iter__"
            )
        epoch += 1
