"""The bare limits: what this machine can do at best, in the same round as the loaders.

    C   one core reads the samples one by one and copies each once into a reused array
    T   one core calls `numpy.take` into a reused array
    P   as many bare processes as there are workers only call ``__getitem__``: no batch, no transport
    S   as many bare threads as the workload has only sleep
    N   ``import numpy`` in a fresh interpreter (measured in `benchmarks.child`)
    R   one core reads records one by one, in plain Python: no limit, but what reading in batches is compared with

Each function runs for ``span`` seconds after ``warm`` seconds and returns samples per second. None does more than
its line says: a batch that nobody could train on is no reason to be slower.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.workloads import LATENCY, MAX_TOKENS, RepeatedBatches, Source, Workload

CEILINGS = {
    "C": "one core, one copy",
    "T": "numpy.take",
    "P": "bare processes",
    "S": "bare sleeping threads",
    "N": "import numpy",
    "R": "a plain reader",
}


def measure_ceiling(
    name: str, workload: Workload, source: Source, batches: RepeatedBatches, workers: int, warm: float, span: float
) -> float:
    """Samples per second of ceiling ``name``."""
    if name == "P":
        return _bare_processes(source.rows, batches, workers, warm, span)
    if name == "S":
        return _bare_threads(workers, warm, span)
    if name == "T":
        return _repeat(_take(source.columns, workload.batch_size), _first(batches, 1000), warm, span)
    if name == "R":
        return _repeat(_read_all(source.rows), [batch.tolist() for batch in _first(batches, 1000)], warm, span)
    copy = _copy_padded if workload.padded else _copy
    lists = [batch.tolist() for batch in _first(batches, 1000)]
    return _repeat(copy(source.rows, workload.batch_size), lists, warm, span)


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


def _bare_processes(dataset: Any, batches: RepeatedBatches, workers: int, warm: float, span: float) -> float:
    """Every process counts by itself between two moments that all know; the rates add up."""
    context = multiprocessing.get_context("fork")
    rates = context.SimpleQueue()
    indices = [index for batch in _first(batches, 64) for index in batch.tolist()]
    begin = time.perf_counter() + 0.05 + warm

    def read(number: int) -> None:
        done = 0
        at = number
        started = None
        while True:
            dataset[indices[at % len(indices)]]
            at += workers
            now = time.perf_counter()
            if started is None and now >= begin:
                started = now
            elif started is not None:
                done += 1
                if now >= begin + span:
                    break
        rates.put(done / (now - started))
        os._exit(0)

    processes = [context.Process(target=read, args=(number,), daemon=True) for number in range(workers)]
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
