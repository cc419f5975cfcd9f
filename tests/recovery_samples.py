"""Datasets and batchify functions that fail where, how and as often as a test wants. Torch-free: spawn starts fast."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sharded_loader import sample_rng

LENGTH = 40


class Unpicklable(Exception):
    """Cannot travel: it holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"cannot travel {self.lock.locked()}"  # its twin has no lock


def raises() -> None:
    raise LookupError("of the test")


def raises_unpicklable() -> None:
    raise Unpicklable


def exits() -> None:
    sys.exit(5)


def leaves() -> None:
    os._exit(5)


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's faulthandler is inherited by forked workers
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs() -> None:
    time.sleep(1000)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def hangs_with_the_gil() -> None:
    while True:  # a signal, such as the one that asks for stacks, ends one sleep
        ctypes.PyDLL(None).sleep(30)


class Fails:
    """Fails when called, or only in the first call that any process makes."""

    def __init__(self, how: Callable[[], Any], count_in: Path, times: int = 1_000_000) -> None:
        self.how = how
        self.count_in = count_in
        self.times = times

    def __call__(self) -> None:
        with self.count_in.open("a+") as file:
            file.write("x")
            file.flush()
            count = self.count_in.stat().st_size
        if count <= self.times:
            self.how()

    @property
    def count(self) -> int:
        """How often it was called."""
        return self.count_in.stat().st_size if self.count_in.exists() else 0


class OneByOne:
    """Sample 17 fails."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return LENGTH

    def read(self, index: int) -> Any:
        if index == 17:
            self.fail()
        return np.array([index, sample_rng(index).integers(1000)])

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


class ItemsAtOnce(OneByOne):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.read(index) for index in indices]


class BatchAtOnce(OneByOne):
    def get_batch(self, indices: Any) -> Any:
        return np.stack([self.read(index) for index in indices])


class BadBatch:
    """A batchify function that fails for the batch of sample 17."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, samples: list[Any]) -> Any:
        if any(int(sample[0]) == 17 for sample in samples):
            self.fail()
        return np.stack(samples)


class FailsToPickle:
    """A batch that fails when it is encoded."""

    def __init__(self, rows: Any, fail: Callable[[], Any]) -> None:
        self.rows = rows
        self.fail = fail

    def __reduce__(self) -> Any:
        self.fail()
        return np.array, (self.rows.tolist(),)


class BadTravel(BadBatch):
    def __call__(self, samples: list[Any]) -> Any:
        rows = np.stack(samples)
        return FailsToPickle(rows, self.fail) if 17 in rows[:, 0] else rows


class Wide:
    """Samples that go through slots."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return np.full(20_000, index)


class BadStart:
    """A worker_init_fn."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, number: int) -> None:
        self.fail()


class ReadyToDie:
    """A worker_init_fn: the worker fails when it has said that it is ready."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, number: int) -> None:
        from sharded_loader.pools.process import link

        send = link.send_message

        def send_and_fail(*message: Any) -> None:
            link.send_message = send
            send(*message)
            self.fail()

        link.send_message = send_and_fail


class DiesWhileSending:
    """A worker_init_fn: the worker fails when half of a batch is in the pipe."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, number: int) -> None:
        from sharded_loader.pools.process import link

        send = link.send_message

        def send_half(conn: Any, head: bytes, places: Any, buffers: Any) -> None:
            if head[:1] == link.RESULTS:
                frame = link.head_frame(head, places)
                os.write(conn.fileno(), struct.pack("!i", len(frame)) + frame[: len(frame) // 2])
                self.fail()
                os.write(conn.fileno(), frame[len(frame) // 2 :])
                for buffer in buffers:
                    conn.send_bytes(buffer)
            else:
                send(conn, head, places, buffers)

        link.send_message = send_half


def nothing() -> None:
    """Does not fail."""


def loader_arguments(where: str, fail: Callable[[], Any]) -> dict[str, Any]:
    """``dataset`` and ``batchify_fn`` of a loader that fails there."""
    if where == "reading":
        return {"dataset": OneByOne(fail)}
    if where == "__getitems__":
        return {"dataset": ItemsAtOnce(fail)}
    if where == "get_batch":
        return {"dataset": BatchAtOnce(fail)}
    if where == "batchify_fn":
        return {"dataset": OneByOne(nothing), "batchify_fn": BadBatch(fail)}
    return {"dataset": OneByOne(nothing), "batchify_fn": BadTravel(fail)}


class Random:
    """Samples of everything random, at a pace that leaves time to be killed."""

    def __init__(self, length: int = 200, seconds: float = 0.005) -> None:
        self.length = length
        self.seconds = seconds

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return np.array([index, sample_rng().random(), random.random(), np.random.random()])


class DiesInSetState:
    """Kills the worker that unpickles it."""

    def __init__(self, fail: Fails) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.fail()


class Noted:
    """Its own numbers; a file has those that were read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            file.write(f"{index} ")
        return index


class Parents:
    """Sample: a value of the dataset, the reader's pid and its parent's."""

    def __init__(self) -> None:
        self.value = 1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return np.array([index, self.value, os.getpid(), os.getppid()])


def values_of(batch: Any) -> list[Any]:
    """A batch, flat or sharded, as lists."""
    return [
        np.asarray(getattr(part, "rows", part)).tolist() for part in (batch if isinstance(batch, list) else [batch])
    ]


def until_the_end(iterator: Iterator[Any]) -> tuple[list[Any], list[BaseException]]:
    """What an epoch yields and raises, to its end; a list of an epoch's length at most."""
    batches: list[Any] = []
    errors: list[BaseException] = []
    while len(errors) < 50:
        try:
            batches.append(values_of(next(iterator)))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error)
    raise AssertionError(f"the epoch does not end: {errors[-1]!r}")
