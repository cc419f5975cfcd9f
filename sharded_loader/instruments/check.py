"""`ShardedDataLoader.check`: which samples are others when they are read again, and why; what a worker costs.

    some samples --read by one worker--> digests, memory    in the reverse order
                 --read here--> digests                     in order, and again in the reverse order
    those that differ --read again here, one source of randomness held at a time--> a sentence each

The worker is of a pool of its own, which is closed at the end: the loader, its epoch and its state stay what they are.
Random generators are watched: the global ones, and those that the dataset refers to. The time and
``os.urandom`` are held by replacing the functions for the moment of a read: only samples that differ are read so.

What can go wrong: the worker cannot start, or cannot read. That is a sentence of the result. An error of a sample
counts as its value. What a library draws in C (``random.Random()``, ``datetime.now()``) is not found.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.data.inspection import digest_of_read, exact, look_in_worker, text_with_type
from sharded_loader.data.seeding import generators
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken
from sharded_loader.loader.lookup import KnownSteps
from sharded_loader.memory.publish import publish
from sharded_loader.pools.local import ThreadPool
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.randomness.rng import seeded_globals

Functions = list[tuple[ModuleType, str, Callable[..., Any]]]

GLOBALS: dict[str, Callable[[], Any]] = {
    "Python's random": random.getstate,
    "NumPy's global generator": np.random.get_state,
    "torch's global generator": torch.get_rng_state,
}

HELD: dict[str, Functions] = {
    "the time": [(time, "time", lambda: 1.5), (time, "time_ns", lambda: 1)],
    "os.urandom, from which new generators are seeded": [(os, "urandom", bytes), (random, "_urandom", bytes)],
}
"""Functions that are replaced while a sample is read. The engine needs none of them."""

ADVICE = "Draw from sample_rng(), or use dataset.transform(fn, seeded=True)"


@dataclass(frozen=True)
class LoaderCheck:
    """What `ShardedDataLoader.check` has found. As a text it is a few lines for people.

    Attributes:
        samples: How many samples were read.
        worker: Who read them beside the main process.
        differing: The index of each sample that differs, and why, in words.
        failed: Why the worker could not read; None: it could.
        pickled: The bytes of the pickled dataset; or why it cannot be pickled.
        worker_bytes: The memory that the worker process had for itself after these samples; None: it is not known.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> found = ShardedDataLoader(range(8), 4, num_workers=2, thread_pool=True).check()
        >>> found.differing, found.failed
        ((), None)
    """

    samples: int
    worker: str
    differing: tuple[tuple[Any, str], ...]
    failed: str | None
    pickled: int | str
    worker_bytes: int | None

    def __str__(self) -> str:
        lines = [f"{self.samples} samples were read twice here, and by {self.worker}."]
        if not self.samples:
            lines = ["The epoch has no samples to read."]
        for why in dict.fromkeys(why for _, why in self.differing):
            alike = ", ".join(str(index) for index, of_index in self.differing if of_index == why)
            lines.append(f"Other values each time: {alike}. {why}.")
        if self.failed is not None:
            lines.append(f"The worker could not read: {self.failed}")
        elif self.samples and not self.differing:
            lines.append("All are the same each time.")
        is_pickled = isinstance(self.pickled, int)
        lines.append(f"The pickled dataset has {self.pickled:,} bytes." if is_pickled else f"Pickled: {self.pickled}.")
        if self.worker_bytes is not None:
            lines.append(f"After these samples the worker had {self.worker_bytes:,} bytes of its own.")
        return "\n".join(lines)


def check_loader(steps: KnownSteps, number: int, samples: int, own: Pool) -> LoaderCheck:
    """Read some samples of an epoch again and again. ``own``: the pool of the loader, or one that has not started.

    Raises:
        TypeError, ValueError, IndexError: as of `KnownSteps`.
    """
    samples = check_int("samples", samples, 1, "give the number of samples to read")
    try:
        last = max(steps.length(number) - 1, 0)
    except TypeError:  # it is not known
        last = 0
    indices = steps.some_indices(number, sorted({0, last // 2, last}), -(-samples // 3))[:samples]
    pool = _pool_like(own)
    # First: a forked worker would share the files that a dataset opens when it is read.
    there, worker_bytes, failed = _read_there(steps, pool, indices[::-1], number) if indices else ({}, None, None)
    ends = failed is not None and failed.startswith((WorkerDiedError.__name__, WorkerTimeoutError.__name__))
    here = [] if ends else indices  # otherwise this process would end, or hang
    first = {index: steps.digest(index, number) for index in here}
    second = {index: steps.digest(index, number, key=2) for index in reversed(here)}
    differing = tuple(
        (index, _why(steps, index, number, first[index] == second[index]))
        for index in here
        if len({first[index], second[index], there.get(index, first[index])}) > 1
    )
    pickled: int | str
    try:
        encoded = publish(steps.dataset, dataset=steps.dataset)
        pickled = len(encoded.head) + sum(buffer.nbytes for buffer in encoded.buffers)
    except TypeError as error:
        pickled = str(error).partition(". What to do")[0]
    return LoaderCheck(len(indices), repr(pool), differing, failed, pickled, worker_bytes)


# -- a worker ----------------------------------------------------------------------------------------------------------


def _pool_like(own: Pool) -> Pool:
    """A pool of one worker, like those of a loader; a process, if it has none, or has them on other machines."""
    if isinstance(own, ThreadPool):
        return ThreadPool(1, worker_init_fn=own.worker_init_fn, timeout=own.timeout)
    method = getattr(own, "start_method", None)
    return ProcessPool(1, start_method=method, worker_init_fn=own.worker_init_fn, timeout=own.timeout)


def _read_there(
    steps: KnownSteps, pool: Pool, indices: list[Any], number: int
) -> tuple[dict[Any, Any], Any, str | None]:
    """What a worker reads: the digests by index, the bytes that it takes, and why it could not."""
    results: Sequence[Result] = ()
    try:
        with steps.in_epoch(number):
            pool.start(replace(steps.job_now(), batchify_fn=look_in_worker, on_error="raise"))
            pool.submit([Task(0, 0, number, 0, (indices,), False)])
            while not results:
                results = pool.wait()
        if results[0].error is not None:
            raise results[0].error
        *digests, nbytes = results[0].batch
        return dict(zip(indices, digests, strict=True)), None if pool.shares_dataset else nbytes, None
    except Exception as raised:
        error = raised.error if isinstance(raised, PoolBroken) else raised
        if is_from_outside(error):
            raise
        return {}, None, text_with_type(error)
    finally:
        pool.close()


# -- reasons -----------------------------------------------------------------------------------------------------------


def _why(steps: KnownSteps, index: Any, number: int, same_here: bool) -> str:
    """Why a sample differs. ``same_here``: it does not if it is read here."""
    own = {path: partial(_state_of, one) for path, one in generators(steps.dataset, "dataset")}
    with seeded_globals(1):
        before = {name: exact(state()) for name, state in (GLOBALS | own).items()}
        first = digest_of_read(lambda: steps.sample(index, number))
        drawn = [name for name, state in (GLOBALS | own).items() if exact(state()) != before[name]]
    is_random = first != steps.digest(index, number)
    sources = [name for name in drawn if (name in own) is is_random]
    if sources:
        return f"Each draws from {' and '.join(sources)}. {ADVICE}"
    if not is_random and same_here:
        return "The worker reads others. They depend on the process: its number, hash() of a text, the environment"
    for name, functions in HELD.items() if is_random else ():
        with _replaced(functions):
            if steps.digest(index, number) == steps.digest(index, number):
                return f"Each depends on {name}. {ADVICE}"
    return "Each depends on what was read before it, or on something that changes: a counter, datetime.now(), a file"


def _state_of(generator: Any) -> Any:
    for name in ("getstate", "get_state"):
        if hasattr(generator, name):
            return getattr(generator, name)()
    return generator.bit_generator.state


@contextlib.contextmanager
def _replaced(functions: Functions) -> Iterator[None]:
    """Inside, modules have other functions."""
    before = [(module, name, getattr(module, name)) for module, name, _ in functions]
    try:
        for module, name, function in functions:
            setattr(module, name, function)
        yield
    finally:
        for module, name, function in before:
            setattr(module, name, function)
