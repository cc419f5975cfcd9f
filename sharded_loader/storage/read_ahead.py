"""Fetches the shards of a cache in the order in which they will be needed, before they are.

    needs(number) -> shards           of a batch: the loader's own order, read a second time
    position() -> number | None       the batch that the user receives next; None: this epoch is not read any more
    later(number) -> shards           of a batch of the next epoch

A `ReadAhead` runs a thread that looks at the batches to come and keeps three lines of them:

    looked at  -->  asked for, as far as their shards fit into the cache  -->  passed by the user

Other threads fetch what is asked for: at most `IN_ALL` shards at a time, and fewer if a shard is fetched in several
pieces, so that about `IN_ALL` requests run side by side. The first batch waits for its shards, so these come alone:
no other shard is asked for until they are there, and only `EARLY` at a time until the user has the batch.

The cache learns which shards are needed (they stay), which were passed, and when a passed shard will be needed again,
in this epoch or in the next. So the cache can delete the shard that is needed last. That is the best rule there is
(L. A. Belady, 1966). If the cache has room for all shards, the next epoch is not looked at.

Several readers may use one cache, each with its own shards. Each takes the same share of the room. Once a second, it
looks how many there are. If others have come, it gives back what it needs last. The register of readers is a folder:

    <hex>     a file for each reader, which the reader keeps locked until it ends or dies
    all       the lock for a look at the register

A file without a holder of its lock is of a dead reader, and the next count deletes it. The lock is a local variable of
the thread that reads. A forked child has no such thread, so the child never gives the lock of its parent back.

A worker that needs a shard earlier fetches the shard itself. It waits only if the shard is being fetched already.

All threads are daemons. They end with `stop`, with the epoch, or when the epoch is not read any more. Errors are not
raised here: the reader of the shard meets them.
"""

from __future__ import annotations

import os
import queue
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import lru_cache
from pathlib import Path

from sharded_loader.base import host_clock
from sharded_loader.base.limits import processes_here
from sharded_loader.base.notices import warn
from sharded_loader.base.system import job_of_ranks, lock_at
from sharded_loader.storage.cache import ShardCache
from sharded_loader.storage.files import Stat
from sharded_loader.storage.stores import CONNECTIONS, IN_ALL, ObjectStore, pieces_of

PAUSE = 0.005
"""Seconds between two looks at the position."""

YOUNG = 1.0
"""Seconds after which the shards that are needed are marked as needed again."""

LOOKS = 50
"""Batches that are looked at between two looks at the position: 0.5 to 3 ms."""

EARLY = 2
"""Shards that are fetched at a time while the first batch is made: 16 at a time cost it 60 ms on two cores."""

MOST_USES = 200_000
"""How far the thread looks at most: uses of shards by ranges, about 100 bytes each."""

SETTLE = 2.0
"""Seconds in which the ranks of a machine join, after the first read."""

Needs = Callable[[int], "Sequence[int] | None"]
"""The shards of a batch, by its number; None after the last batch."""


class _BatchRange:
    """Neighbouring batches that need the same shards.

    Attributes:
        first, last: numbers of the batches. Those of the next epoch go on from those of this one.
        next: by shard, the batch that needs it after this range; None: not known.
    """

    __slots__ = ("first", "last", "next")

    def __init__(self, number: int, shards: Sequence[int]) -> None:
        self.first = self.last = number
        self.next: dict[int, int | None] = dict.fromkeys(shards)


class ReadAhead:
    """Fetches the shards of one epoch ahead of the position.

    Args:
        cache: keeps the shards.
        store: reads them.
        shards: the URL of each shard, and what it was when the dataset was made.
        needs: the order of this epoch.
        position: see above.
        later: the order of the next epoch, from 0 on.
        register: the folder in which the readers of the cache know each other. None: this one is alone.
        then: called with each shard that has been fetched.

    Attributes:
        error: the last one, of a fetch or of the order, which has ended the thread; None: nothing has gone wrong.
    """

    def __init__(
        self,
        cache: ShardCache,
        store: ObjectStore,
        shards: Sequence[tuple[str, Stat]],
        needs: Needs,
        position: Callable[[], int | None],
        later: Needs = lambda number: None,
        register: Path | None = None,
        then: Callable[[int], object] = lambda shard: None,
    ) -> None:
        self._then = then
        self._cache, self._store, self._shards = cache, store, shards
        self._needs, self._position, self._later = needs, position, later
        self._register, self._processes, self._readers = register, processes_here(), 1
        self._whole = self._size_of(range(len(shards)))
        self._room = cache.max_bytes // self._processes
        self._returns = 0  # to shards of this epoch that had to go
        self._looked: deque[_BatchRange] = deque()  # looked at, and not asked for
        self._window: deque[_BatchRange] = deque()  # asked for, and not passed
        self._latest: dict[int, _BatchRange] = {}  # by shard, the last range that is known to need it
        self._uses = 0  # in both lines
        self._next = 0  # the batch that is looked at next
        self._end: int | None = None  # the first number of the next epoch
        self._all_is_known = False
        self._needed: Counter[int] = Counter()  # by how many ranges of the window; only one thread changes it
        self._used = 0  # bytes of what is needed
        self._in_progress: set[int] = set()  # shards that are queued for download, or are being downloaded
        self._has_first = False  # whether the shards of the first range are there
        self._has_begun = False  # whether the user has the first batch
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        pieces = pieces_of(self._whole // max(1, len(shards)))
        at_once = IN_ALL // max(1, min(pieces, CONNECTIONS))
        self._threads = [threading.Thread(target=self._fetch_all, daemon=True) for _ in range(at_once)]
        self._threads.append(threading.Thread(target=self._walk, name="sharded_loader-read-ahead", daemon=True))

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """End; what is being fetched is waited for no longer than ``timeout`` seconds."""
        self._stopped.set()
        until = host_clock.now() + timeout
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(max(0.0, until - host_clock.now()))

    # -- fetching ---------------------------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._fetch(shard)
                self._in_progress.discard(shard)
                self._then(shard)
            except Exception as error:
                self.error = error
            self._in_progress.discard(shard)

    def _fetch(self, shard: int) -> None:
        url, stat = self._shards[shard]
        self._cache.prepare(
            url,
            stat,
            lambda file: self._store.fetch(url, file, stat, is_waited_for=not self._has_first),
            lambda: shard in self._needed and not self._stopped.is_set(),
        )

    def _ask_for(self, shard: int) -> None:
        if not self._cache.keep(*self._shards[shard]) and shard not in self._in_progress:
            self._in_progress.add(shard)
            self._wanted.put(shard)

    # -- the order --------------------------------------------------------------------------------------------

    def _walk(self) -> None:
        try:
            with nullcontext(lambda: 1) if self._register is None else reading(self._register) as count:
                self._walk_on(count)
        except Exception as error:  # an order that cannot be read twice: each shard is fetched when it is needed
            self.error = error
        finally:
            for shard in self._needed:
                self._cache.let_go(*self._shards[shard], 0)
            for _ in self._threads:
                self._wanted.put(None)

    def _walk_on(self, count: Callable[[], int]) -> None:
        number = self._position()
        if number is None:
            return
        self._next, young = number, host_clock.now()
        self._divide(count())
        while not self._stopped.is_set():
            now = self._position()
            if now is None:
                return
            self._pass(now)
            self._has_begun = now > number
            for _ in range(LOOKS):
                all_fit = self._whole <= self._room
                if self._all_is_known or self._uses > MOST_USES or (all_fit and self._end is not None):
                    break
                self._look()
                self._ask()
            self._ask()
            if not self._window and self._end is not None and (not self._looked or self._looked[0].first >= self._end):
                return
            if host_clock.now() - young > YOUNG:
                young = host_clock.now()
                self._divide(count())
                for shard in list(self._needed):  # others may have deleted it
                    self._ask_for(shard)
            self._stopped.wait(PAUSE)

    def _divide(self, readers: int) -> None:
        """Take the share of the room that this reader has. What was asked for beyond it is asked for later."""
        before, self._readers = self._readers, readers
        share = self._cache.max_bytes // max(before, readers, self._processes)  # a reader may be between two epochs
        if self._register is not None and self._whole > self._cache.max_bytes and is_settling(self._register):
            share = 0  # the first range is always asked for
        self._room = share
        while self._used > share and len(self._window) > 1:
            batches = self._window.pop()
            for shard in batches.next:
                self._unneed(shard, batches.first)
            self._looked.appendleft(batches)

    def _unneed(self, shard: int, again: int | None) -> bool:
        """One range of the window does not need this shard any more. Returns whether none does."""
        self._needed[shard] -= 1
        if self._needed[shard]:
            return False
        del self._needed[shard]
        self._used -= self._size_of([shard])
        self._cache.let_go(*self._shards[shard], again)
        return True

    def _look(self) -> None:
        """Take the next batch of the order into the line of those that were looked at."""
        number = self._next
        shards = self._needs(number) if self._end is None else self._later(number - self._end)
        if shards is None:
            if self._end is None:
                self._end = number
            else:
                self._all_is_known = True
            return
        self._next += 1
        last = self._looked[-1] if self._looked else self._window[-1] if self._window else None
        if last is not None and last.last == number - 1 and number != self._end and last.next.keys() == set(shards):
            last.last = number
            return
        batches = _BatchRange(number, shards)
        for shard in batches.next:
            before = self._latest.get(shard)
            if before is not None:
                before.next[shard] = number
            elif shard not in self._needed:
                self._cache.let_go(*self._shards[shard], number)  # it may lie in the cache
            self._latest[shard] = batches
        self._uses += len(batches.next)
        self._looked.append(batches)

    def _ask(self) -> None:
        """Have the shards of the next ranges fetched, as far as there is room."""
        self._has_first = self._has_first or (bool(self._window) and not self._in_progress)
        while self._looked and (self._end is None or self._looked[0].first < self._end):
            batches = self._looked[0]
            new = [shard for shard in batches.next if shard not in self._needed]
            size = self._size_of(new)
            is_busy = not self._has_first or (not self._has_begun and len(self._in_progress) >= EARLY)
            if self._window and (is_busy or self._used + size > self._room):
                return
            self._needed.update(batches.next.keys())
            self._used += size
            self._window.append(self._looked.popleft())
            for shard in new:
                self._ask_for(shard)

    def _pass(self, now: int) -> None:
        """Let the shards go that were needed by batches before ``now`` alone."""
        while self._window and self._window[0].last < now:
            self._has_first = True  # a worker may have fetched them
            batches = self._window.popleft()
            self._uses -= len(batches.next)
            for shard, again in batches.next.items():
                if self._latest.get(shard) is batches:
                    del self._latest[shard]
                if self._unneed(shard, again) and again is not None and (self._end is None or again < self._end):
                    self._note_return(again)

    def _note_return(self, number: int) -> None:
        """This epoch comes back to a shard that was let go. If that goes on, the cache is too small for the order."""
        self._returns += 1
        if self._returns == len(self._shards):
            between = {shard for batches in self._looked if batches.first <= number for shard in batches.next}
            size = self._size_of(between | self._needed.keys())
            warn(
                f"the order returns to shards that had to go: it needs {size:,} bytes of shards at once, and "
                f"{self._cache.limit_text}. So shards are fetched again and again. Give a larger max_bytes, or give "
                "ShardShuffleSampler a smaller window"
            )

    def _size_of(self, shards: Iterable[int]) -> int:
        return sum(self._shards[shard][1].size for shard in shards)


# -- who reads ahead into one cache, in all processes ------------------------------------------------------------------


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[], int]]:
    """Be in the register inside the block.

    Args:
        folder: of the register. It is made if it does not exist.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as name, reading(Path(name)) as count:
        ...     with reading(Path(name)) as other:
        ...         _ = other(), count()
        ...         both = count()
        ...     both, count()
        (2, 1)
    """
    path = folder / uuid.uuid4().hex
    mine = lock_at(path)

    def count() -> int:
        found = 1
        with suppress(OSError):  # another program deletes the folder, or it cannot be written to
            folder.mkdir(parents=True, exist_ok=True)
            with lock_at(folder / "all"):
                if not path.exists():
                    mine.release(force=True)
                    mine.acquire()
                found += sum(_lives(other) for other in folder.iterdir() if other not in (path, folder / "all"))
        return found

    try:
        yield count
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)
        mine.release(force=True)


def _lives(path: Path) -> bool:
    """Whether a reader holds the lock of its file. The file of a dead one is deleted."""
    try:
        with lock_at(path).acquire(timeout=0), suppress(OSError):
            path.unlink()
    except TimeoutError:
        return True
    return False


def is_settling(folder: Path, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether other ranks of this machine may still join the register. torchrun says how many there are."""
    if environ.get("LOCAL_WORLD_SIZE") or job_of_ranks(environ) is None:
        return False
    return host_clock.now() < _first_read(folder, os.getpid()) + SETTLE


@lru_cache
def _first_read(folder: Path, pid: int) -> float:
    """When this process asked first."""
    return host_clock.now()
