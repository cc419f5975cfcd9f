"""What ``bench`` measures, with datasets of every kind and rows that fail; and what it recommends."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import get_worker_info

from sharded_loader import SimpleDataset
from sharded_loader.cli.measure import ROUNDS, DatasetFailed, Measurement, Row, measure, recommend, rows_of

INLINE, THREADS, PROCESSES = Row("inline", 0), Row("thread", 2), Row("process", 2)
QUICK = {"batch_size": 4, "seconds": 0.03}


class Counting:
    """Iterable data of 30 samples."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 30, info.num_workers) if info else range(30))


class Once:
    """Iterable data that is used up."""

    def __init__(self) -> None:
        self.items = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self.items


def nothing() -> list[int]:
    return []


class FailsInWorkers:
    def __init__(self) -> None:
        self.pid = os.getpid()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        if os.getpid() != self.pid:
            raise OSError("no files here")
        return index


def test_rows_are_measured_in_turn_in_every_round() -> None:
    turns: list[tuple[int, Row]] = []
    rows = [INLINE, THREADS]
    measured = measure(range(100), rows, shuffle=True, on_turn=lambda *turn: turns.append(turn), **QUICK)
    assert turns == list(enumerate(rows * ROUNDS))
    assert [(one.pool, one.workers, one.error) for one in measured] == [("inline", 0, None), ("thread", 2, None)]
    assert all(one.samples_per_second > 0 and one.ms_per_batch > 0 for one in measured)


@pytest.mark.parametrize(
    "dataset", [[1, 2], Counting(), lambda part, parts: range(part, 5, parts)], ids=["short", "iterable", "function"]
)
@pytest.mark.costly
def test_data_of_every_kind_is_measured_in_every_pool(dataset: Any) -> None:
    measured = measure(dataset, [INLINE, THREADS, PROCESSES], shuffle=False, **QUICK)
    assert [one.error for one in measured] == [None, None, None]


def test_speed_and_time_per_batch_are_counted_from_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every look at the clock takes a second.
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    [one] = measure(range(1000), [INLINE], shuffle=False, batch_size=10, seconds=60)
    assert one.samples_per_second * one.ms_per_batch / 1000 == pytest.approx(10)
    assert one.ms_per_batch >= 1000


def test_a_slow_dataset_is_measured_for_a_batch_of_each_worker() -> None:
    read: list[int] = []
    data = SimpleDataset(range(10**6)).transform(lambda index: read.append(index) or index)
    measure(data, [Row("thread", 3)], shuffle=False, batch_size=1, seconds=1e-9)
    assert len(read) >= ROUNDS * (1 + 2 * 3 + 3)


def test_what_the_dataset_raises_inline_ends_it_with_the_sample() -> None:
    with pytest.raises(DatasetFailed, match=r"^ZeroDivisionError: division by zero \(in epoch 0, batch 1, sample 5\)$"):
        measure(_Divides(), [INLINE, THREADS], shuffle=False, **QUICK)


class _Divides:
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> float:
        return 1 / (index - 5)


def test_what_fails_only_in_workers_ends_only_their_row() -> None:
    inline, processes = measure(FailsInWorkers(), [INLINE, PROCESSES], shuffle=False, **QUICK)
    assert inline.error is None
    assert processes.error is not None and processes.error.startswith("OSError: no files here (in epoch 0, batch ")
    assert processes.samples_per_second == 0


@pytest.mark.parametrize(
    ("dataset", "said"), [(nothing, "it gives no samples"), (Once(), "it gives its samples only once")]
)
def test_data_without_samples_is_an_error(dataset: Any, said: str) -> None:
    with pytest.raises(DatasetFailed, match=said):
        measure(dataset, [INLINE], shuffle=False, **QUICK)


def test_inline_is_one_row_and_comes_first() -> None:
    assert rows_of(["thread", "inline"], [1, 2]) == [INLINE, Row("thread", 1), Row("thread", 2)]


INLINE_ROW = Measurement("inline", 0, 1000.0, 64.0)


def rows(*speeds: tuple[str, int, float]) -> list[Measurement]:
    return [Measurement(pool, workers, speed, 64000 / speed) for pool, workers, speed in speeds]


@pytest.mark.parametrize(
    ("measured", "cores", "said"),
    [
        # Workers gain nothing.
        (rows(("process", 1, 900), ("process", 2, 1100)), 2, "Inline is enough, so leave out num_workers"),
        (rows(("process", 1, 900), ("process", 2, 1100)), 2, "with workers it is at best 1.10 times as fast"),
        # The fewest workers that are nearly as fast as the best ones.
        (rows(("process", 2, 1900), ("process", 4, 3800), ("process", 8, 4000)), 8, "Use num_workers=4: 3.8 times"),
        (rows(("process", 2, 1900), ("process", 4, 1950)), 8, "Use num_workers=2: 1.9 times"),
        # Nearly as fast as the best ones, but not worth it beside inline.
        (rows(("process", 1, 1150), ("process", 2, 1250)), 8, "Use num_workers=2: 1.2 times"),
        # The faster pool, and how to choose it.
        (rows(("process", 2, 1500), ("thread", 2, 1900)), 2, "Use num_workers=2, thread_pool=True: 1.9 times"),
        (rows(("process", 2, 1900), ("thread", 2, 1890)), 2, "Use num_workers=2: 1.9 times"),
        (rows(("ray", 2, 1900)), 2, 'Use num_workers=2, pool="ray": 1.9 times'),
        # Says when inline is enough all the same, or that more could be measured.
        (rows(("process", 2, 1900)), 2, "inline is enough if your training step takes far longer than 64 ms"),
        (rows(("process", 2, 1900)), 8, "more may be faster, so measure with --workers 2,4"),
    ],
)
def test_it_names_the_arguments_and_the_reason(measured: list[Measurement], cores: int, said: str) -> None:
    advice = recommend([INLINE_ROW, *measured], cores)
    assert said in advice
    assert advice.endswith(".") and "\n" not in advice


def test_inline_alone_is_compared_with_nothing() -> None:
    assert recommend([INLINE_ROW], 8) == (
        "Only inline was measured, 64 ms per batch: add --pools inline,thread,process to compare."
    )


def test_without_inline_the_best_row_is_named() -> None:
    assert recommend(rows(("process", 1, 900), ("process", 2, 1800)), 8).startswith("Use num_workers=2: ")


def test_rows_that_failed_do_not_count() -> None:
    failed = Measurement("thread", 8, error="boom")
    assert recommend([INLINE_ROW, failed, *rows(("process", 2, 1900))], 2).startswith("Use num_workers=2: ")


def spread(pool: str, workers: int, lowest: float, median: float, highest: float) -> Measurement:
    return Measurement(pool, workers, median, 64000 / median, lowest=lowest, highest=highest)


def test_rounds_that_overlap_have_no_clear_winner() -> None:
    inline = spread("inline", 0, 600, 1000, 1500)
    advice = recommend([inline, spread("process", 2, 1300, 1900, 2000)], 2)
    assert advice.startswith("No clear winner: the rounds of num_workers=2 and inline overlap.")
    assert "--seconds" in advice
    assert recommend([inline, spread("process", 2, 1600, 1900, 2000)], 2).startswith("Use num_workers=2: ")


def test_rows_that_are_alike_need_no_winner() -> None:
    two, four = spread("process", 2, 1800, 1900, 2000), spread("process", 4, 1850, 1950, 2050)
    assert recommend([INLINE_ROW, two, four], 8).startswith("Use num_workers=2: ")
    slower = spread("thread", 2, 990, 1010, 1200)
    assert recommend([INLINE_ROW, slower], 2).startswith("Inline is enough")
