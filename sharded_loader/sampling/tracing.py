"""What has been read of a foreign sampler, and how to get there again.

    with trace:                                 iter_epoch(foreign sampler, ...) asks `current_trace()`
        batch = next(batches)                       -> trace.read(epoch, start, open) -> items, taken down as they pass
    mark = trace.mark()                         after each batch: epoch, items, checksum, the sampler's own state

A sampler of this library is a pure function and jumps to any place; it has no trace. A foreign one gets back to
a mark by its own ``load_state_dict``, if it (or its iterator) has ``state_dict`` as well; otherwise it is started
anew and the items before the mark are passed over. Their checksum says whether they are those of then. No data is
read for either.

The sampler is read ahead of what is delivered, so a mark is taken after each batch that is read, and kept until
the batch after it is delivered (`sharded_loader.sampling.reading`).

What can go wrong: a sampler that yields others on the way back: refused, by name. A sampler with
``state_dict`` keeps one place; two iterators that are alive at once disturb each other in it. Before the first batch of
an epoch there is no mark: interrupted there, a sampler is started again. One that goes on where it stopped, or draws
another order each time, does so then.

Source of the idea: ``StatefulDataLoader`` of torchdata.
"""

from __future__ import annotations

import array
import copy
import operator
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, filterfalse, islice
from typing import Any

_current = threading.local()

# Items passed over between two updates of the checksum.
_PART = 1 << 16


@dataclass(frozen=True, slots=True)
class Mark:
    """A place in one epoch of a foreign sampler.

    Attributes:
        epoch: number of the epoch that the sampler was told.
        items: how many it had yielded.
        checksum: CRC-32 of them.
        rank: of a sampler that yields its rank's part (torch's DistributedSampler); None: the same on all ranks.
        finished: it had no more.
        state: its own, or None; of one that is finished, some state before that.
    """

    epoch: int
    items: int
    checksum: int
    rank: int | None = None
    finished: bool = False
    state: Any = None


class Trace:
    """Follows one foreign sampler through one run.

    Args:
        sampler: the sampler.
        rank: see `Mark`.
        mark: where it is to go on; None: at the beginning.
    """

    def __init__(self, sampler: Any, rank: int | None = None, mark: Mark | None = None) -> None:
        self._sampler = sampler
        self._rank = rank
        self._mark = mark
        self._epoch = 0
        self._items = 0
        self._checksum = 0
        self._fresh: list[Any] = []
        self._finished = False
        self._length: int | None = None
        self._stateful: Any = None
        self._good: Any = None
        self._rest = _Rest(iter(()))
        self._before: Trace | None = None

    def __enter__(self) -> None:
        # A sampler may read another loader, whose trace is then the current one for a while.
        self._before = current_trace()
        _current.trace = self

    def __exit__(self, *_: object) -> None:
        _current.trace = self._before

    def follows(self, sampler: Any) -> bool:
        """Whether this is the sampler."""
        return sampler is self._sampler

    def read(
        self, epoch: int, start: int, begin: Callable[[int, Any], tuple[Iterator[Any], Any]], length: int | None
    ) -> Iterator[Any]:
        """The items of an epoch from ``start`` on, by way of the mark if it lies on the way.

        Args:
            epoch: which epoch.
            start: how many items to leave out.
            begin: ``(epoch, own state or None) -> the items from there, and what has a state_dict or None``.
            length: items in the epoch, if that is known.

        Raises:
            ValueError: the items passed over are not those of the mark.
        """
        mark, self._mark = self._mark, None
        self._epoch, self._items, self._checksum, self._finished, self._length = epoch, 0, 0, False, length
        self._fresh, self._stateful = [], None
        if mark is not None and mark.finished and mark.state is not None and mark.epoch <= epoch:
            # To the end of its epoch by way of the sampler itself, so that it goes on from there to the next one.
            for _ in begin(mark.epoch, copy.deepcopy(mark.state))[0]:
                pass
        if mark is None or mark.epoch != epoch or mark.items > start or not mark.items:
            mark = None
        elif mark.finished:
            self._items, self._checksum, self._finished, self._good = mark.items, mark.checksum, True, mark.state
            return iter(())
        state = None if mark is None else copy.deepcopy(mark.state)
        items, self._stateful = begin(epoch, state)
        jumped = mark is not None and state is not None and self._stateful is not None
        if mark is not None and jumped:
            self._items, self._checksum = mark.items, mark.checksum
        told = None if length is None or length < self._items else length - self._items
        self._rest = _Rest(items)
        # list.append returns None, so every item passes: 20 ns an item, a generator of our own takes 60.
        taken = filterfalse(self._fresh.append, chain(islice(items, told), self._rest, self._end()))
        self._good = self._own_state()
        if mark is not None and not jumped:
            self._pass_over(taken, mark.items)
            if mark.rank == self._rank and (self._items, self._checksum) != (mark.items, mark.checksum):
                raise ValueError(self._refusal(mark))
        self._pass_over(taken, start - self._items)
        return taken

    def mark(self) -> Mark:
        """The place after what has been read."""
        self._count()
        finished = self._finished
        if not finished:
            state = self._own_state()
            finished = self._items == self._length and self._rest.is_empty()
            # At the end a sampler may show the state of a new epoch: the last one before it is the one to go by.
            if not finished:
                self._good = state
        return Mark(self._epoch, self._items, self._checksum, self._rank, finished, self._good)

    def _own_state(self) -> Any:
        # A copy: some return the dict that they go on changing.
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def _end(self) -> Iterator[Any]:
        self._finished = True
        yield from ()

    def _pass_over(self, items: Iterator[Any], count: int) -> None:
        end = self._items + count
        while self._items < end and not self._finished:
            for _ in islice(items, min(_PART, end - self._items)):
                pass
            self._count()

    def _count(self) -> None:
        self._checksum = zlib.crc32(_encode(self._fresh), self._checksum)
        self._items += len(self._fresh)
        self._fresh.clear()

    def _refusal(self, mark: Mark) -> str:
        name = type(self._sampler).__name__
        found = (
            f"yields only {self._items} items in epoch {mark.epoch}, where it had yielded {mark.items}"
            if self._items < mark.items
            else f"yields other indices in epoch {mark.epoch} than the {mark.items} that were read before the state "
            f"was saved"
        )
        return (
            f"the state cannot be resumed: the sampler, a {name}, {found}. Make it with the same arguments and the "
            f"same seed as then; if its order depends on what it yielded before, give it state_dict() and "
            f"load_state_dict()"
        )


class _Rest(Iterator[Any]):
    """What a sampler yields after as many items as its length says: nothing, if the length is right."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items
        self._ahead: list[Any] = []
        self._error: Exception | None = None

    def is_empty(self) -> bool:
        """Look whether there is another item; an error counts as one, and is raised in its turn."""
        if not self._ahead and self._error is None:
            try:
                self._ahead = list(islice(self._items, 1))
            except Exception as error:
                self._error = error
        return not self._ahead and self._error is None

    def __next__(self) -> Any:
        if self.is_empty():
            raise StopIteration
        if self._error is not None:
            raise self._error
        return self._ahead.pop()


def _encode(items: list[Any]) -> bytes:
    """Bytes that depend on the items, not on where one list of them ends and the next begins."""
    if set(map(type, items)) == {int}:
        try:
            numbers = array.array("q", items)
        except OverflowError:
            pass
        else:
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tobytes()
    return b"".join(map(_encode_one, items))


def _encode_one(item: Any) -> bytes:
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, list | tuple):
        return len(item).to_bytes(8, "little") + _encode(list(item))
    try:
        return operator.index(item).to_bytes(8, "little", signed=True)
    except (TypeError, OverflowError):
        return repr(item).encode()


def current_trace() -> Trace | None:
    """The trace under which this thread reads."""
    trace: Trace | None = getattr(_current, "trace", None)
    return trace


@contextmanager
def untraced() -> Iterator[None]:
    """Read something out of the way: the beginning of an epoch again, for padding."""
    before = current_trace()
    _current.trace = None
    try:
        yield
    finally:
        _current.trace = before
