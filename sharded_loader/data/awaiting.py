"""Samples that an ``async def`` reads: those of a batch are awaited together, by one event loop of the process.

    is_awaited(dataset)             whether it, or one inside it, has an ``async def``
    each(fn, items, keys, limit)    ``await fn(item)`` of each item, at most ``limit`` at a time
    many(dataset) -> read(indices)  a ``__getitems__`` for a dataset with an ``async def __getitem__`` (`bulk_method`)
    Awaited(dataset)[index]         one sample, here and now; while the object lives, so does the event loop

The event loop has a thread of its own: a notebook already runs one in the main thread. All readers of a process share
it, because objects such as HTTP sessions belong to one loop. It ends with the last reader. Each sample is a task with
its own `rng.reading`, so `sample_rng()` knows it. The thread that reads waits for the whole batch, and calls what is no
``async def`` afterwards.

Owns the event loop and its thread. What can go wrong: a coroutine that blocks the loop stops all others too. One that
never ends is late, as any sample may be (``timeout=``). Where a coroutine raises, those beside it are cancelled, and
the reader reads the samples again one at a time, so the error names the sample.

Source of the idea: the event loop in a thread of fsspec.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from inspect import iscoroutinefunction
from types import CoroutineType
from typing import TYPE_CHECKING, Any

from sharded_loader.base.checks import check_int
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.data.seeding import keys_of
from sharded_loader.randomness.global_generators import lent
from sharded_loader.randomness.rng import SampleScope, reading

if TYPE_CHECKING:  # it takes 40 ms: imported where something is awaited
    import asyncio

CONCURRENCY = 64
"""Samples that are awaited at a time, unless the dataset has an attribute ``concurrency``."""

STEP_SECONDS = 1.0
"""Between two looks for a Ctrl-C: on Windows it does not end a wait."""

CLOSING_GRACE = 0.2
"""Seconds that the end of the last reader waits for the event loop: a coroutine may go on when it is cancelled."""


class EventLoop:
    """An event loop in a thread. It ends when this object is collected."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        over, name = threading.Event(), "sharded_loader-event-loop"
        self.thread = threading.Thread(target=_run, args=[self.loop, over], name=name, daemon=True)
        self.thread.start()
        weakref.finalize(self, _end, self.loop, over, self.thread.ident, os.getpid())


_loops: weakref.WeakValueDictionary[int, EventLoop] = weakref.WeakValueDictionary()
"""The event loop of a process, by its id: a forked child has no thread of its parent's."""


def _run(loop: asyncio.AbstractEventLoop, over: threading.Event) -> None:
    import asyncio

    asyncio.set_event_loop(loop)
    is_over = False
    while not is_over:
        with suppress(SystemExit, KeyboardInterrupt):  # of a task: they belong to its sample
            loop.run_forever()
            is_over = True
    for task in (tasks := asyncio.all_tasks(loop)):
        task.cancel()
    loop.run_until_complete(asyncio.gather(*tasks, loop.shutdown_asyncgens(), return_exceptions=True))
    loop.close()
    over.set()


def _end(loop: asyncio.AbstractEventLoop, over: threading.Event, ident: int | None, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(loop.stop)
        if ident != threading.get_ident():
            over.wait(CLOSING_GRACE)  # not `join`: in a thread that is at its end, that leaves an entry behind for ever


def _event_loop() -> EventLoop:
    return _loops.get(os.getpid()) or _loops.setdefault(os.getpid(), EventLoop())


def resolved(found: Any) -> Any:
    """What was found, awaited if need be. Blocks.

    Raises:
        RuntimeError: this is the event loop, which would wait for itself.

    Example:
        >>> async def read(): return 7
        >>> resolved(read()), resolved(8)
        (7, 8)
    """
    if type(found) is not CoroutineType:
        return found
    events = _event_loop()
    if threading.current_thread() is events.thread:
        found.close()
        raise RuntimeError("samples are read here by an async def that is awaited itself: await dataset[index]")
    import asyncio
    from concurrent.futures import wait

    future, error = None, None
    try:
        with uninterrupted():  # a Ctrl-C between the two would leave it running
            future = asyncio.run_coroutine_threadsafe(found, events.loop)
        while not future.done():
            with lent():
                wait([future], STEP_SECONDS)
        if (error := future.exception()) is not None:
            raise error  # not by `result`, whose frames are no user's
        return future.result()
    finally:
        if future is None:
            found.close()
        else:
            future.cancel()
        del future, error  # otherwise error -> traceback -> this frame -> error


def each(
    fn: Callable[[Any], Any], items: Sequence[Any], keys: Sequence[SampleScope] | None, limit: int = CONCURRENCY
) -> list[Any]:
    """``fn(item)`` of each item, awaited together. Blocks.

    Args:
        fn: an ``async def``, or what may return a coroutine.
        items: what it is called with.
        keys: which sample each of them is; None: the one that is read anyway.
        limit: how many are awaited at a time.
    """

    async def together() -> list[Any]:
        import asyncio

        room = asyncio.Semaphore(limit)

        async def one(position: int) -> Any:
            if keys is not None:
                reading.set(keys[position])
            async with room:
                found = fn(items[position])
                return await found if type(found) is CoroutineType else found

        tasks = [asyncio.ensure_future(one(position)) for position in range(len(items))]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # nothing of this batch runs any more

    made: list[Any] = resolved(together())
    return made


# -- datasets ----------------------------------------------------------------------------------------------------------


def is_awaited(dataset: Any) -> bool:
    """Whether a dataset, or one inside it, reads or transforms samples with an ``async def``.

    Example:
        >>> class Store:
        ...     async def __getitem__(self, index): return index
        >>> is_awaited(Store()), is_awaited([1, 2])
        (True, False)
    """
    methods = [getattr(type(dataset), name, None) for name in ("__getitem__", "__getitems__")]
    if any(map(iscoroutinefunction, methods)):
        return True
    inside: Iterable[Any] = ()
    module = getattr(methods[0], "__module__", None) or ""
    if module.startswith("sharded_loader."):  # a class of the user's over it may await by itself
        if getattr(dataset, "_is_async", False):
            return True
        inside = getattr(dataset, "_inside", ())
    elif module == "torch.utils.data.dataset":
        inside = [getattr(dataset, "dataset", None)]
    return any(map(is_awaited, inside))


def many(dataset: Any) -> Callable[[Sequence[Any]], list[Any]]:
    """How to read many samples of a dataset whose ``dataset[index]`` is to be awaited.

    Raises:
        TypeError, ValueError: its ``concurrency`` is no number above 0.
    """
    advice = "the number of samples of a batch that are awaited at a time"
    limit = check_int("concurrency of the dataset", getattr(dataset, "concurrency", CONCURRENCY), 1, advice)
    return lambda indices: each(dataset.__getitem__, indices, keys_of(indices), limit)


class Awaited:
    """Stands in for a dataset that is awaited. While it lives, the event loop lives on between two batches."""

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._events = dataset, _event_loop()

    def __getitem__(self, index: Any) -> Any:
        return resolved(self._dataset[index])
