"""Prefetching of shards into a cache, in reading order.

One thread of a `ReadAhead` looks at the order of the coming batches and moves them through two queues:

    looked at  -->  requested, as far as their shards fit into the cache  -->  passed by the user

Others download requested shards, and save their indexes, with about `MAX_REQUESTS` requests in total. The shards of the
first batch come alone; until the user has that batch, only `EARLY_DOWNLOADS` more are downloaded at a time.

The cache is told which shards are needed (they stay), and when a passed shard is needed next, in this epoch or the
following one. So it can evict the shard that is needed last, which is optimal (L. A. Belady, 1966). If all shards fit,
the next epoch is not examined.

Readers that share a cache get equal shares of its space. They count each other every second, by files in a register
that each of them touches, and give up what they need last if others have joined.

Workers fetch a shard themselves if they need it earlier, unless it is being downloaded. All threads are daemons and end
with `stop`, or with the epoch. Errors are not raised here: the reader of the shard will meet them.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import uuid
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NamedTuple

from sharded_loader.extend.tools import host_clock, processes_here, warn
from sharded_loader.storage.stores import CONNECTIONS, MAX_REQUESTS, PIECE

if TYPE_CHECKING:
    from sharded_loader.storage.dataset import Shards

POLL_SECONDS = 0.005
"""Seconds between checks of the position."""

RENEW_SECONDS = 1.0
"""Seconds between renewals of the protection of needed shards."""

LOOKAHEAD_BATCHES = 50
"""Batches to look at between two checks of the position: 0.5 to 3 ms."""

EARLY_DOWNLOADS = 2
"""Concurrent downloads during the first batch: 16 delayed it by 60 ms on two cores."""

MOST_USES = 200_000
"""Limit of the lookahead: uses of shards by batches, about 100 bytes each."""

DEAD_SECONDS = 10.0
"""Seconds after which a silent reader counts as dead: renewals were up to 6 s late on a heavily oversubscribed
machine."""

Needs = Callable[[int], "Sequence[int] | None"]
"""Function from a batch number to its shards, or None after the last batch."""


class _Batch(NamedTuple):
    """Batch with its shards. Numbers continue into the next epoch."""

    number: int
    shards: set[int]


class _ShardPlan:
    """Plan of which shards are needed now, and when the others will be.

    ``order`` yields batch numbers and their shards, in this epoch and then the next. ``let_go`` is called with a shard
    that is not needed now, and the number of the batch that uses it next.

    Attributes:
        room: maximum bytes of the needed shards; those of the first batch always fit.
        end: first batch number of the next epoch, or None while unknown.
        needed: shards of the batches in ``window``; changed by one thread only.
        looked, window: batches not yet requested; batches requested and not yet passed.
        uses: number of uses of shards by batches in both queues.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        order: Iterator[tuple[int, Iterable[int]]],
        let_go: Callable[[int, int | None], object],
    ) -> None:
        self._sizes, self._order, self._let_go = sizes, order, let_go
        self.room = 0
        self.end: int | None = None
        self.needed = set[int]()
        self.looked, self.window = deque[_Batch](), deque[_Batch]()
        self.uses = self._returns = self._used = 0  # _used: bytes of the needed shards
        self._next_uses: defaultdict[int, deque[int]] = defaultdict(deque)  # shard -> batches that will use it

    def size_of(self, shards: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, shards))

    def look(self) -> bool:
        """Look at the next batch of the order. Return False at its end."""
        number, shards = next(self._order, (0, None))
        if shards is None:
            return False
        found = _Batch(number, set(shards))
        for shard in found.shards:
            if not self._next_uses[shard]:
                self._let_go(shard, number)  # it may be in the cache
            self._next_uses[shard].append(number)
        self.uses += len(found.shards)
        self.looked.append(found)
        return True

    def take(self, is_busy: bool) -> set[int] | None:
        """Move the next batch into the window, if there is room, and return its shards that were not needed before.

        While ``is_busy``, only an empty window accepts a batch.
        """
        if not self.looked or (self.end is not None and self.looked[0].number >= self.end):
            return None
        new = self.looked[0].shards - self.needed
        size = self.size_of(new)
        if self.window and (is_busy or self._used + size > self.room):
            return None
        self.needed |= new
        self._used += size
        self.window.append(self.looked.popleft())
        return new

    def give_back(self) -> None:
        """Move batches for which there is no room back from the window."""
        while self._used > self.room and len(self.window) > 1:
            self.looked.appendleft(self.window.pop())
            for shard in self.looked[0].shards:
                self._drop_unless_needed(shard)

    def pass_by(self, now: int) -> int | None:
        """Release the shards that only batches before ``now`` have needed.

        If as many shards as there are have been released and come back in this epoch, return the batch that uses the
        last one.
        """
        back_to = None
        while self.window and self.window[0].number < now:
            shards = self.window.popleft().shards
            self.uses -= len(shards)
            for shard in shards:
                self._next_uses[shard].popleft()
                again = self._drop_unless_needed(shard)
                if again is not None and (self.end is None or again < self.end):
                    self._returns += 1
                    back_to = again if self._returns == len(self._sizes) else back_to
        return back_to

    def _drop_unless_needed(self, shard: int) -> int | None:
        """Release a shard that no batch of the window uses. Return the next batch that uses it."""
        again = next(iter(self._next_uses[shard]), None)
        if again is not None and self.window and again <= self.window[-1].number:
            return None
        self.needed.discard(shard)
        self._used -= self._sizes[shard]
        self._let_go(shard, again)
        return again


class ReadAhead:
    """Threads that prefetch the shards of one epoch. ``error`` is the last exception that occurred in any of them."""

    def __init__(self, shards: Shards, needs: Needs, position: Callable[[], int | None], later: Needs) -> None:
        assert shards.cache is not None
        self._shards, self._cache, self._position = shards, shards.cache, position
        self._versions = list(zip(shards.urls, shards.stats, strict=True))  # at the start of the epoch
        sizes = [stat.size for stat in shards.stats]
        self._plan = _ShardPlan(sizes, self._order(needs, later), self._let_go)
        self._total_bytes = sum(sizes)
        self._in_progress: set[int] = set()  # queued or running downloads
        self._has_first = False  # True once the shards of the first batch are cached
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._requests: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        pieces = -(-(self._total_bytes // max(1, len(sizes))) // PIECE)  # of a mean shard
        at_once = MAX_REQUESTS // max(1, min(pieces, CONNECTIONS))
        self._threads = [threading.Thread(target=self._fetch_all, daemon=True) for _ in range(at_once)]
        self._threads.append(threading.Thread(target=self._run, name="sharded_loader-read-ahead", daemon=True))

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """End the threads; wait at most ``timeout`` seconds for downloads in progress."""
        self._stopped.set()
        for _ in self._threads:  # a Ctrl-C in `start` may have come before the thread that sends these
            self._requests.put(None)
        until = host_clock.now() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, until - host_clock.now()))

    def _fetch_all(self) -> None:
        while (shard := self._requests.get()) is not None:
            try:
                self._fetch(shard)
            except Exception as error:
                self.error = error
            self._in_progress.discard(shard)

    def _fetch(self, shard: int) -> None:
        (url, stat), fetch = self._versions[shard], self._shards.store.fetch

        def is_wanted() -> bool:
            return shard in self._plan.needed and not self._stopped.is_set()

        def download(to: BinaryIO) -> int | None:
            return fetch(url, to, stat, is_waited_for=not self._has_first)

        if self._cache.prepare(url, stat, download, is_wanted):
            self._shards.index_ahead(shard)

    def _let_go(self, shard: int, again: int | None) -> None:
        self._cache.let_go(*self._versions[shard], again)

    def _request_shards(self, shards: Iterable[int]) -> None:
        for shard in shards:
            if not self._cache.keep(*self._versions[shard]) and shard not in self._in_progress:
                self._in_progress.add(shard)
                self._requests.put(shard)

    def _order(self, needs: Needs, later: Needs) -> Iterator[tuple[int, Iterable[int]]]:
        number = self._position() or 0
        while (shards := needs(number)) is not None:
            yield number, shards
            number += 1
        self._plan.end = number
        for ahead in count():  # the next epoch, unless the cache has room for all shards
            found = later(ahead) if self._total_bytes > self._plan.room else None
            if found is None:
                return
            yield number + ahead, found

    def _run(self) -> None:
        try:
            with nullcontext(lambda: 1) if self._cache.read_only else reading(self._cache.folder / "readers") as count:
                self._follow_order(count)
        except Exception as error:  # the order cannot be read twice: shards are fetched on demand
            self.error = error
        finally:
            for shard in self._plan.needed:
                self._let_go(shard, 0)
            for _ in self._threads:
                self._requests.put(None)

    def _follow_order(self, count: Callable[[], int]) -> None:
        plan, first, young, readers = self._plan, self._position(), -math.inf, 1
        while first is not None and not self._stopped.is_set():
            now = self._position()
            if now is None:
                return
            if host_clock.now() - young > RENEW_SECONDS:
                young, before, readers = host_clock.now(), readers, count()
                # The larger of two counts: a reader may be between two epochs.
                plan.room = self._cache.max_bytes // max(before, readers, processes_here())
                plan.give_back()
                self._request_shards(list(plan.needed))  # other processes may have evicted some
            if plan.window and plan.window[0].number < now:  # the user has the first batch
                self._has_first = True
            if (back_to := plan.pass_by(now)) is not None:
                self._warn_of_returns(back_to)
            for _ in range(LOOKAHEAD_BATCHES):
                if plan.uses > MOST_USES or not plan.look():
                    break
                self._request_batches(now > first)
            self._request_batches(now > first)
            if not plan.window and plan.end is not None and (not plan.looked or plan.looked[0].number >= plan.end):
                return
            self._stopped.wait(POLL_SECONDS)

    def _request_batches(self, has_begun: bool) -> None:
        """Request the shards of the next batches that fit; ``has_begun``: the user has received a batch."""
        self._has_first = self._has_first or bool(self._plan.window and not self._in_progress)
        while True:
            is_busy = not self._has_first or (not has_begun and len(self._in_progress) >= EARLY_DOWNLOADS)
            new = self._plan.take(is_busy)
            if new is None:
                return
            self._request_shards(new)

    def _warn_of_returns(self, number: int) -> None:
        """Warn that the cache is too small: the order returns to the evicted shards of this batch."""
        between = {shard for batch in self._plan.looked if batch.number <= number for shard in batch.shards}
        needs = f"{self._plan.size_of(between | self._plan.needed):,} bytes of shards at once"
        text = f"the order returns to shards that had to go: it needs {needs}, and {self._cache.limit_text}"
        advice = "Give a larger max_bytes, or give ShardShuffleSampler a smaller window"
        warn(f"{text}. So shards are fetched again and again. {advice}")


# -- register of the readers of one cache, in all processes ------------------------------------------------------------


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[], int]]:
    """Register a reader inside the block, which calls the yielded function every second to count all readers.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, reading(Path(name)) as count:
        ...     with reading(Path(name)) as other:
        ...         _ = other(), count()
        ...         both = count()
        ...     both, count()
        (2, 1)
    """
    mine = folder / uuid.uuid4().hex

    def count() -> int:
        found = 1
        with suppress(OSError):  # the folder is being deleted, or not writable
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
            for other in folder.iterdir():
                with suppress(FileNotFoundError):  # the other reader has just ended
                    lives = abs(time.time() - other.stat().st_mtime) < DEAD_SECONDS  # or the clock was put back
                    found += lives and other != mine
                    if not lives:
                        other.unlink()
        return found

    try:
        yield count
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
