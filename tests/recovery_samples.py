"""Loaders and workers that fail at a place of one's choice, and what they yield. Torch-free: spawn starts fast."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from failures import nothing
from samples import Drawing, DrawingInBatches, DrawingInItems

LENGTH = 40


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
        from sharded_loader.pools.process.link import Link

        send = Link.send

        def send_and_fail(link: Link, *message: Any, **more: Any) -> None:
            Link.send = send  # type: ignore[method-assign]
            send(link, *message, **more)
            self.fail()

        Link.send = send_and_fail  # type: ignore[assignment, method-assign]


class DiesWhileSending:
    """A worker_init_fn: the worker fails when half of a batch is in the pipe."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __call__(self, number: int) -> None:
        from sharded_loader.pools.process.link import RESULTS, make_link

        kind: Any = make_link.__globals__["PortableLink" if make_link.__globals__["PORTABLE"] else "Link"]
        write = kind._write

        def write_half(link: Any, data: memoryview, descriptor: int | None) -> int:
            half = len(data) // 2
            if data[:1] != RESULTS:
                return int(write(link, data, descriptor))
            end = link._conn.fileno() if hasattr(link, "_conn") else link.waitable
            if hasattr(link, "_conn"):
                os.write(end, struct.pack("!i", len(data)))
            os.write(end, data[:half])
            self.fail()
            os.write(end, data[half:])
            return len(data)

        kind._write = write_half


def loader_arguments(where: str, fail: Callable[[], Any]) -> dict[str, Any]:
    """``dataset`` and ``batchify_fn`` of a loader that fails there."""
    if where == "reading":
        return {"dataset": Drawing(LENGTH, [17], fail)}
    if where == "__getitems__":
        return {"dataset": DrawingInItems(LENGTH, [17], fail)}
    if where == "get_batch":
        return {"dataset": DrawingInBatches(LENGTH, [17], fail)}
    if where == "batchify_fn":
        return {"dataset": Drawing(LENGTH, [17], nothing), "batchify_fn": BadBatch(fail)}
    return {"dataset": Drawing(LENGTH, [17], nothing), "batchify_fn": BadTravel(fail)}


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
