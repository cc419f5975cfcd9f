"""Loaders and workers that fail at a place of one's choice, and what they yield. Torch-free: spawn starts fast."""

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from samples import Drawing, DrawingInBatches, DrawingInItems

LENGTH = 40


class Failing:
    """Fails by this call when it is called itself."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail


class BadBatch(Failing):
    """A batchify function that fails for the batch of sample 17."""

    def __call__(self, samples: list[Any]) -> Any:
        if any(int(sample[0]) == 17 for sample in samples):
            self.fail()
        return np.stack(samples)


class FailsToPickle:
    """A batch that fails when it is encoded."""

    def __init__(self, rows: Any, fail: Callable[[], Any]) -> None:
        self.rows, self.fail = rows, fail

    def __reduce__(self) -> Any:
        self.fail()
        return np.array, (self.rows.tolist(),)


class BadTravel(BadBatch):
    def __call__(self, samples: list[Any]) -> Any:
        rows = np.stack(samples)
        return FailsToPickle(rows, self.fail) if 17 in rows[:, 0] else rows


class BadStart(Failing):
    """A worker_init_fn."""

    def __call__(self, number: int) -> None:
        self.fail()


class ReadyToDie(Failing):
    """A worker_init_fn: the worker fails when it has said that it is ready."""

    def __call__(self, number: int) -> None:
        from sharded_loader.pools.process.link import Link

        send = Link.send

        def send_and_fail(link: Link, *message: Any, **more: Any) -> None:
            Link.send = send  # type: ignore[method-assign]
            send(link, *message, **more)
            self.fail()

        Link.send = send_and_fail  # type: ignore[assignment, method-assign]


class DiesWhileSending(Failing):
    """A worker_init_fn: the worker fails when half of a batch is in the pipe."""

    def __call__(self, number: int) -> None:
        from sharded_loader.pools.process.link import RESULTS, Link

        send = Link.send

        def send_half(link: Any, kind: bytes = b"", *message: Any, **more: Any) -> None:
            if kind == RESULTS:
                link._socket = HalfSent(link._socket, self.fail)
            send(link, kind, *message, **more)

        Link.send = send_half  # type: ignore[method-assign]


class HalfSent:
    """A socket over which half of what is sent next goes, then the worker fails."""

    def __init__(self, socket: Any, fail: Callable[[], Any]) -> None:
        self.socket, self.fail = socket, fail

    def send(self, data: memoryview, flags: int) -> int:
        half, conn = len(data) // 2, getattr(self.socket, "conn", None)
        end = (conn or self.socket).fileno()
        if conn is not None:
            os.write(end, struct.pack("!i", len(data)))
        os.write(end, data[:half])
        self.fail()
        os.write(end, data[half:])
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.socket, name)


def loader_arguments(where: str, fail: Callable[[], Any]) -> dict[str, Any]:
    """``dataset`` and ``batchify_fn`` of a loader that fails there."""
    readers = {"reading": Drawing, "__getitems__": DrawingInItems, "get_batch": DrawingInBatches}
    if where in readers:
        return {"dataset": readers[where](LENGTH, [17], fail)}
    return {"dataset": Drawing(LENGTH), "batchify_fn": (BadBatch if where == "batchify_fn" else BadTravel)(fail)}


def values_of(batch: Any) -> list[Any]:
    """A batch, flat or sharded, as lists."""
    parts = batch if isinstance(batch, list) else [batch]
    return [np.asarray(getattr(part, "rows", part)).tolist() for part in parts]


def until_the_end(iterator: Iterator[Any]) -> tuple[list[Any], list[BaseException]]:
    """What an epoch yields and raises, to its end; a list of an epoch's length at most."""
    batches, errors = list[Any](), list[BaseException]()
    while len(errors) < 50:
        try:
            batches.append(values_of(next(iterator)))
        except StopIteration:
            return batches, errors
        except Exception as error:
            errors.append(error)
    raise AssertionError(f"the epoch does not end: {errors[-1]!r}")
