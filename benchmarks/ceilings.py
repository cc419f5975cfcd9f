"""The bare limits: what this machine can do at best, in the same round as the loaders.

    C   one core reads the samples one by one and copies each once into a reused array
    J   one core reads the samples one by one and joins their bytes into new memory for each batch
    D   as many bare processes as there are workers copy each sample once, each into two arrays of its own in turn
    T   one core calls `numpy.take` into a reused array
    P   as many bare processes as there are workers only call ``__getitem__``: no batch, no transport
    S   as many bare threads as the workload has only sleep
    N   ``import numpy`` in a fresh interpreter (measured in `benchmarks.child`)
    R   one core reads records one by one, in plain Python: no limit, but what reading in batches is compared with

Each function runs for ``span`` seconds after ``warm`` seconds and returns samples per second. None does more than
its line says, and none but C, J and T makes a batch that somebody could train on.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.samples import LATENCY, MAX_TOKENS, Source
from benchmarks.workloads import RepeatedBatches, Workload

CEILINGS = {
    "C": "one core, one copy",
    "J": "one core, joined",
    "D": "bare copying processes",
    "T": "numpy.take",
    "P": "bare processes",
    "S": "bare sleeping threads",
    "N": "import numpy",
    "R": "a plain reader",
}


def measure_ceiling(
    name: str, workload: Workload, source: Source, batches: RepeatedBatches, workers: int, warm: float, span: float
) -> float:
    """Samples per second of a bare limit.

    Args:
        name: its letter.
        workload: the row of the report.
        source: the data.
        batches: the indices of each batch.
        workers: processes or threads, for the limits that have several.
        warm: seconds before the stretch that counts.
        span: seconds of that stretch.
    """
    rows = source.rows
    if name == "S":
        return _bare_threads(workers, warm, span)
    if name == "T":
        return _repeat(_take(source.columns, workload.batch_size), _first(batches, 1000), warm, span)
    if name == "P":
        return _bare_processes(_reader(rows, batches, workers), workers, warm, span)
    if name == "D":
        return _bare_processes(_copier(rows, batches, workload.batch_size, workers), workers, warm, span)
    if name == "R":
        step = _read_all(rows)
    elif name == "J":
        step = _join(rows)
    else:
        step = (_copy_padded if workload.padded else _copy)(rows, workload.batch_size)
    return _repeat(step, [batch.tolist() for batch in _first(batches, 1000)], warm, span)


def _first(batches: RepeatedBatches, count: int) -> list[Any]:
    return [batches[number] for number in range(count)]


def _repeat(step: Callable[[Any], None], batches: list[Any], warm: float, span: float) -> float:
    """Samples per second of ``step`` on one batch after the other, from the first one again after the last."""
    done = 0
    number = 0
    began = time.perf_counter() + warm
    warming = True
    while True:
        batch = batches[number]
        number = (number + 1) % len(batches)
        step(batch)
        done += len(batch)
        now = time.perf_counter()
        if warming and now >= began:
            warming, done, began = False, 0, now
        elif not warming and now >= began + span:
            return done / (now - began)


def _copy(dataset: Any, batch_size: int) -> Callable[[list[int]], None]:
    sample = dataset[0]
    out = np.empty((batch_size, *sample.shape), sample.dtype)

    def step(batch: list[int]) -> None:
        for row, index in enumerate(batch):
            out[row] = dataset[index]

    return step


def _join(dataset: Any) -> Callable[[list[int]], None]:
    sample = dataset[0]
    shape, dtype = sample.shape, sample.dtype

    def step(batch: list[int]) -> None:
        np.frombuffer(bytearray().join([dataset[index] for index in batch]), dtype).reshape(-1, *shape)

    return step


def _copy_padded(dataset: Any, batch_size: int) -> Callable[[list[int]], None]:
    out = np.empty((batch_size, MAX_TOKENS), dataset[0].dtype)

    def step(batch: list[int]) -> None:
        out.fill(0)
        for row, index in enumerate(batch):
            sample = dataset[index]
            out[row, : len(sample)] = sample

    return step


def _read_all(dataset: Any) -> Callable[[list[int]], None]:
    def step(batch: list[int]) -> None:
        [dataset[index] for index in batch]

    return step


def _take(column: Any, batch_size: int) -> Callable[[Any], None]:
    out = np.empty((batch_size, *column.shape[1:]), column.dtype)

    def step(batch: Any) -> None:
        # With mode="raise" NumPy gathers into a buffer of its own first: 3.3 M rows a second instead of 4.6 M.
        np.take(column, batch, axis=0, out=out, mode="clip")

    return step


def _reader(dataset: Any, batches: RepeatedBatches, workers: int) -> Callable[[int], Callable[[], int]]:
    """For each process its share of the samples; nothing is done with a sample."""
    indices = [index for batch in _first(batches, 64) for index in batch.tolist()]

    def for_process(number: int) -> Callable[[], int]:
        mine = itertools.cycle(indices[number::workers])

        def step() -> int:
            dataset[next(mine)]
            return 1

        return step

    return for_process


def _copier(
    dataset: Any, batches: RepeatedBatches, batch_size: int, workers: int
) -> Callable[[int], Callable[[], int]]:
    """For each process its share of the batches; each is copied into one of two arrays, which take turns."""
    lists = [batch.tolist() for batch in _first(batches, 64)]

    def for_process(number: int) -> Callable[[], int]:
        mine = itertools.cycle(lists[number::workers])
        copies = itertools.cycle([_copy(dataset, batch_size), _copy(dataset, batch_size)])

        def step() -> int:
            next(copies)(next(mine))
            return batch_size

        return step

    return for_process


def _bare_processes(for_process: Callable[[int], Callable[[], int]], workers: int, warm: float, span: float) -> float:
    """The sum of the rates of processes that begin to count at the same moment.

    Args:
        for_process: the number of a process -> what the process repeats: a function that returns how many samples
            it has dealt with.
        workers, warm, span: as for `measure_ceiling`.
    """
    context = multiprocessing.get_context("fork")
    rates = context.SimpleQueue()
    begin = time.perf_counter() + 0.05 + warm

    def work(number: int) -> None:
        step = for_process(number)
        done = 0
        started = None
        while True:
            samples = step()
            now = time.perf_counter()
            if started is None and now >= begin:
                started = now
            elif started is not None:
                done += samples
                if now >= begin + span:
                    break
        rates.put(done / (now - started))
        os._exit(0)

    processes = [context.Process(target=work, args=(number,), daemon=True) for number in range(workers)]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return float(total)


def _bare_threads(workers: int, warm: float, span: float) -> float:
    begin = time.perf_counter() + warm
    rates: list[float] = []

    def sleep() -> None:
        done = 0
        started = None
        while True:
            time.sleep(LATENCY)
            now = time.perf_counter()
            if started is None and now >= begin:
                started = now
            elif started is not None:
                done += 1
                if now >= begin + span:
                    break
        rates.append(done / (now - started))

    threads = [threading.Thread(target=sleep) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)
