"""Samples that an ``async def`` reads: awaited many at a time, by one event loop of the process.

    dataset[index] -> coroutine, or Later(coroutine, fn)        a wrapper applies fn to what is awaited (`then`)
    Awaiter.begin(calls) -> futures --outcome--> sample         at most `limit` samples at a time, the first call first
    resolved(found) -> sample                                   one, here and now

    reading thread:  begin ------------------------- outcome: fn(sample), in the order of the indices
    event loop:      dataset[index], await, await, ...

The event loop has a thread of its own: a notebook already runs one in the main thread. All readers of a process share
it, because objects such as HTTP sessions belong to one loop. It ends with the last reader. Each sample is a task with
its own `rng.reading`, so `sample_rng()` knows it. Functions that are no ``async def`` run in the thread that reads: the
loop goes on meanwhile, and the global generators are drawn from in the order of the indices.

Owns the event loop and its thread, and the tasks on it. What runs when an `Awaiter` is dropped, or is no longer wanted,
is cancelled. What can go wrong: a coroutine that blocks the loop stops all others too. One that never ends is late, as
any sample may be (``timeout=``). What it raises is raised by `outcome`.

Source of the idea: the event loop in a thread of fsspec.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from inspect import iscoroutinefunction
from types import CoroutineType
from typing import TYPE_CHECKING, Any, NamedTuple

from sharded_loader.base import host_clock
from sharded_loader.base.checks import check_int
from sharded_loader.randomness.global_generators import lent
from sharded_loader.randomness.rng import SampleScope, reading

if TYPE_CHECKING:  # they take 40 ms: imported where something is awaited
    import asyncio
    from concurrent.futures import Future

CONCURRENCY = 64
"""Samples that a worker awaits at a time, unless the dataset has an attribute ``concurrency``."""

STEP_SECONDS = 1.0
"""Between two looks for a Ctrl-C: on Windows it does not end a wait."""

CLOSING_GRACE = 0.2
"""Seconds that the end of the last reader waits for the event loop: a coroutine may go on when it is cancelled."""


# -- what is still to be awaited ---------------------------------------------------------------------------------------


class Later:
    """What a function makes of a sample that is still to be awaited. It can be awaited itself.

    Args:
        found: a coroutine, or another `Later`.
        fn: the function.
        scope: which sample is read while ``found`` runs; None: the one that is read anyway.
    """

    __slots__ = ("fn", "found", "scope")

    def __init__(self, found: Any, fn: Callable[[Any], Any], scope: SampleScope | None = None) -> None:
        self.found, self.fn, self.scope = found, fn, scope

    def __await__(self) -> Any:
        return self._made().__await__()

    async def _made(self) -> Any:
        before = reading.get()
        try:
            reading.set(self.scope or before)
            found = await self.found
        finally:
            reading.set(before)
        made = self.fn(found)
        return await made if type(made) in AWAITED else made

    def close(self) -> None:
        """It is not awaited: Python is not to warn of that."""
        self.found.close()


AWAITED = (CoroutineType, Later)


def then(found: Any, fn: Callable[[Any], Any], scope: SampleScope | None = None) -> Any:
    """``fn(found)``, or a `Later` where ``found`` is still to be awaited.

    Example:
        >>> then(3, str)
        '3'
    """
    return Later(found, fn, scope) if type(found) in AWAITED else fn(found)


async def together(
    found: Sequence[Any], keys: Sequence[SampleScope] | None = None, limit: int = CONCURRENCY
) -> list[Any]:
    """All of these, those that are still to be awaited at a time.

    Args:
        found: samples, or lists of samples.
        keys: which sample each of them is; None: the one that is read anyway.
        limit: how many are awaited at a time.
    """
    import asyncio

    room = asyncio.Semaphore(limit)

    async def one(position: int) -> Any:
        if keys is not None:
            reading.set(keys[position])
        async with room:
            return await found[position] if type(found[position]) in AWAITED else found[position]

    return await asyncio.gather(*map(one, range(len(found))))


def at_a_time(dataset: Any) -> int:
    """How many samples of a dataset are awaited at a time; 0: it does not read with an ``async def``.

    Raises:
        TypeError, ValueError: its ``concurrency`` is no number above 0.

    Example:
        >>> class Store:
        ...     concurrency = 8
        ...     async def __getitem__(self, index): return index
        >>> at_a_time(Store()), at_a_time([1, 2])
        (8, 0)
    """
    methods = [getattr(type(dataset), name, None) for name in ("__getitem__", "__getitems__")]
    if any(map(iscoroutinefunction, methods)):
        advice = "the number of samples that a worker awaits at a time"
        return check_int("concurrency of the dataset", getattr(dataset, "concurrency", CONCURRENCY), 1, advice)
    inside: Iterable[Any] = ()
    module = getattr(methods[0], "__module__", None) or ""
    if module.startswith("sharded_loader."):  # a class of the user's over it may await by itself
        inside = getattr(dataset, "_inside", ())
    elif module == "torch.utils.data.dataset":
        inside = [getattr(dataset, "dataset", None)]
    return max(map(at_a_time, inside), default=0)


# -- the event loop ----------------------------------------------------------------------------------------------------


class EventLoop:
    """An event loop in a thread. It ends when this object is collected."""

    def __init__(self) -> None:
        import asyncio

        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run, args=[self.loop], name="sharded_loader-event-loop", daemon=True)
        self.thread.start()
        weakref.finalize(self, _end, self.loop, self.thread, os.getpid())


_loops: weakref.WeakValueDictionary[int, EventLoop] = weakref.WeakValueDictionary()
"""The event loop of a process, by its id: a forked child has no thread of its parent's."""


def _run(loop: asyncio.AbstractEventLoop) -> None:
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


def _end(loop: asyncio.AbstractEventLoop, thread: threading.Thread, pid: int) -> None:
    if os.getpid() == pid:
        with suppress(RuntimeError):  # it is closed
            loop.call_soon_threadsafe(loop.stop)
        if thread is not threading.current_thread():
            thread.join(CLOSING_GRACE)


# -- reading -----------------------------------------------------------------------------------------------------------


class Read(NamedTuple):
    """What has been awaited.

    Attributes:
        found: a sample, or several.
        steps: the functions that are still to be applied, the last one first; and which sample is read meanwhile.
        seconds: how long it took.
    """

    found: Any
    steps: list[tuple[Callable[[Any], Any], SampleScope]]
    seconds: float


class ReadCall(NamedTuple):
    """What is to be read: ``get(index)``.

    Attributes:
        scope: which sample it is.
        weight: how many samples it reads.
    """

    scope: SampleScope | None
    get: Callable[[Any], Any]
    index: Any
    weight: int = 1


async def _read(call: ReadCall) -> Read:
    began, scope = host_clock.now(), call.scope
    steps: list[Any] = []
    reading.set(scope)
    found = call.get(call.index)
    while type(found) is Later:
        steps.append((found.fn, scope))
        scope, found = found.scope or scope, found.found
    if type(found) is CoroutineType:
        reading.set(scope)
        found = await found
    return Read(found, steps, host_clock.now() - began)


class _Queue:
    """The calls of one `Awaiter`. Used on the event loop only, and refers to no object that ends it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.loop, self.limit, self.used = loop, limit, 0
        self.waiting: deque[tuple[Future[Read], ReadCall]] = deque()
        self.running: dict[Future[Read], asyncio.Task[Read]] = {}

    def add(self, calls: Sequence[tuple[Future[Read], ReadCall]]) -> None:
        self.waiting.extend(calls)
        self.start()

    def start(self) -> None:
        while self.waiting and (not self.used or self.used + self.waiting[0][1].weight <= self.limit):
            future, call = self.waiting.popleft()
            if not future.done():
                self.used += call.weight
                task = self.running[future] = self.loop.create_task(_read(call))
                task.add_done_callback(partial(self.end, future, call.weight))

    def end(self, future: Future[Read], weight: int, task: asyncio.Task[Read]) -> None:
        import asyncio

        del self.running[future]
        self.used -= weight
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            future.set_result(task.result())
        else:
            future.set_exception(error)
        self.start()

    def cancel(self, futures: Sequence[Future[Read]] | None = None) -> None:
        """They are no longer wanted; None: all of them."""
        import asyncio

        for future in [*(future for future, _ in self.waiting), *self.running] if futures is None else futures:
            if future in self.running:
                self.running[future].cancel()
            elif not future.done():
                future.set_exception(asyncio.CancelledError())


class Awaiter:
    """Awaits the samples of one reader.

    Args:
        limit: how many at a time.
    """

    def __init__(self, limit: int) -> None:
        self._events = _loops.get(os.getpid()) or _loops.setdefault(os.getpid(), EventLoop())
        self._queue = _Queue(self._events.loop, limit)
        weakref.finalize(self, _call, self._queue.loop, self._queue.cancel)

    def begin(self, calls: Sequence[ReadCall]) -> list[Future[Read]]:
        """Read these, when it is their turn. Any thread.

        Raises:
            RuntimeError: this is the event loop, which would wait for itself.
        """
        if threading.current_thread() is self._events.thread:
            raise RuntimeError("samples are read here by an async def that is awaited itself: await dataset[index]")
        from concurrent.futures import Future

        futures: list[Future[Read]] = [Future() for _ in calls]
        self._queue.loop.call_soon_threadsafe(self._queue.add, list(zip(futures, calls, strict=True)))
        return futures

    def cancel(self, futures: Sequence[Future[Read]] | None = None) -> None:
        """They are no longer wanted; None: all of them. Any thread."""
        _call(self._queue.loop, self._queue.cancel, futures)


def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., Any], *arguments: Any) -> None:
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(function, *arguments)


def outcome(future: Future[Read]) -> tuple[Any, float]:
    """The sample, and how long it took. Blocks.

    Raises:
        BaseException: what the user's code has raised; or the call is no longer wanted.
    """
    while not future.done():
        from concurrent.futures import TimeoutError as NotYet  # before Python 3.11 it is a class of its own

        with suppress(NotYet), lent():
            future.exception(STEP_SECONDS)
    began, before, error = host_clock.now(), reading.get(), None
    try:
        if (error := future.exception()) is not None:
            raise error  # not by `result`, whose frames are no user's
        found, steps, seconds = future.result()
        for fn, scope in reversed(steps):
            reading.set(scope)
            found = resolved(fn(found))
        return resolved(found), seconds + host_clock.now() - began
    finally:
        reading.set(before)
        del future, error  # otherwise error -> traceback -> this frame -> error


def resolved(found: Any) -> Any:
    """What was found, awaited if need be. Blocks.

    Example:
        >>> async def read(): return 7
        >>> resolved(read()), resolved(8)
        (7, 8)
    """
    if type(found) not in AWAITED:
        return found
    awaiter = Awaiter(1)  # while it lives nothing is cancelled
    try:
        return outcome(awaiter.begin([ReadCall(reading.get(), lambda found: found, found)])[0])[0]
    finally:
        del awaiter  # the traceback of an error has this frame


def each_sample(dataset: Any) -> Iterator[Any]:
    """The samples of a dataset in order. Those of an ``async def`` are awaited many at a time.

    Example:
        >>> list(each_sample("abc"))
        ['a', 'b', 'c']
    """
    limit = at_a_time(dataset)
    for begin in range(0, len(dataset), limit or 1):
        found = [dataset[index] for index in range(begin, min(begin + (limit or 1), len(dataset)))]
        yield from resolved(together(found, limit=limit)) if limit else map(resolved, found)
