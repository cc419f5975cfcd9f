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
looks how many there are. If others have come, it gives back what it needs last. The register of readers is a folder
with a file for each, which the reader touches at each look, and deletes when it ends. A file that was not touched for
`GONE` seconds is of a dead reader, and the next look of another one deletes it.

A worker that needs a shard earlier fetches the shard itself. It waits only if the shard is being fetched already.

All threads are daemons. They end with `stop`, with the epoch, or when the epoch is not read any more. Errors are not
raised here: the reader of the shard meets them.
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
from typing import TYPE_CHECKING, NamedTuple

from sharded_loader.extend.tools import host_clock, processes_here, warn
from sharded_loader.storage.stores import CONNECTIONS, IN_ALL, pieces_of

if TYPE_CHECKING:
    from sharded_loader.storage.dataset import Shards

PAUSE = 0.005
"""Seconds between two looks at the position."""

YOUNG = 1.0
"""Seconds after which the shards that are needed are marked as needed again."""

LOOKS = 50
"""Batches that are looked at between two looks at the position: 0.5 to 3 ms."""

EARLY = 2
"""Shards that are fetched at a time while the first batch is made: 16 at a time cost it 60 ms on two cores."""

MOST_USES = 200_000
"""How far the thread looks at most: uses of shards by batches, about 100 bytes each."""

GONE = 10.0
"""Seconds without a look, after which a reader is dead. On a machine that runs far more than it has cores for, a look
was up to 6 seconds late."""

Needs = Callable[[int], "Sequence[int] | None"]
"""The shards of a batch, by its number; None after the last batch."""


class _Batch(NamedTuple):
    """A batch and the shards that it needs. The numbers of the next epoch go on from those of this one."""

    number: int
    shards: set[int]


class _ShardPlan:
    """Which shards are needed now, and when the others will be.

    Args:
        sizes: of the shards.
        order: numbers of batches, and the shards that they need: of this epoch, and then of the next.
        let_go: called with a shard that is not needed now, and the number of the batch that needs it again.

    Attributes:
        room: bytes that the needed shards may have together. Those of the first batch always fit.
        end: the first number of the next epoch; None: not known yet.
        needed: shards that the window needs. Only one thread changes it.
        looked, window: what was looked at and is not asked for; what is asked for and not passed.
        uses: of shards by batches, in both lines.
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
        self.uses = self._returns = self._used = 0  # the last one: bytes of what is needed
        self._coming: defaultdict[int, deque[int]] = defaultdict(deque)  # by shard, the batches that need it

    def size_of(self, shards: Iterable[int]) -> int:
        return sum(map(self._sizes.__getitem__, shards))

    def look(self) -> bool:
        """Look at the next batch of the order. Returns whether there is one."""
        number, shards = next(self._order, (0, None))
        if shards is None:
            return False
        found = _Batch(number, set(shards))
        for shard in found.shards:
            if not self._coming[shard]:
                self._let_go(shard, number)  # it may lie in the cache
            self._coming[shard].append(number)
        self.uses += len(found.shards)
        self.looked.append(found)
        return True

    def take(self, is_busy: bool) -> set[int] | None:
        """The shards of the next batch that were not needed before; None if there is none, or no room for it.

        Args:
            is_busy: no batch beside another one may be taken yet.
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
        """Give back what there is no room for. It is taken again later."""
        while self._used > self.room and len(self.window) > 1:
            self.looked.appendleft(self.window.pop())
            for shard in self.looked[0].shards:
                self._drop_unless_needed(shard)

    def pass_by(self, now: int) -> int | None:
        """Let the shards go that were needed by batches before ``now`` alone.

        Returns:
            When this epoch comes back to a shard that was let go, for the n-th time of n shards: to which batch.
        """
        back_to = None
        while self.window and self.window[0].number < now:
            shards = self.window.popleft().shards
            self.uses -= len(shards)
            for shard in shards:
                self._coming[shard].popleft()
                again = self._drop_unless_needed(shard)
                if again is not None and (self.end is None or again < self.end):
                    self._returns += 1
                    back_to = again if self._returns == len(self._sizes) else back_to
        return back_to

    def _drop_unless_needed(self, shard: int) -> int | None:
        """Let a shard go if no batch of the window needs it. Returns which batch needs it again."""
        again = next(iter(self._coming[shard]), None)
        if again is not None and self.window and again <= self.window[-1].number:
            return None
        self.needed.discard(shard)
        self._used -= self._sizes[shard]
        self._let_go(shard, again)
        return again


class ReadAhead:
    """Fetches the shards of one epoch ahead of the position.

    Args:
        shards: with a cache.
        needs: the order of this epoch.
        position: see above.
        later: the order of the next epoch, from 0 on.

    Attributes:
        error: the last one, of a fetch or of the order, which has ended the thread; None: nothing has gone wrong.
    """

    def __init__(self, shards: Shards, needs: Needs, position: Callable[[], int | None], later: Needs) -> None:
        assert shards.cache is not None
        self._shards, self._cache, self._position = shards, shards.cache, position
        self._facts = list(zip(shards.urls, shards.stats, strict=True))  # as they were when the epoch began
        sizes = [stat.size for stat in shards.stats]
        self._plan = _ShardPlan(sizes, self._order(needs, later), self._let_go)
        self._whole = sum(sizes)
        self._in_progress: set[int] = set()  # shards that are queued for download, or are being downloaded
        self._has_first = False  # whether the shards of the first batch are there
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        at_once = IN_ALL // max(1, min(pieces_of(self._whole // max(1, len(sizes))), CONNECTIONS))
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

    def _fetch_all(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._fetch(shard)
            except Exception as error:
                self.error = error
            self._in_progress.discard(shard)

    def _fetch(self, shard: int) -> None:
        (url, stat), fetch = self._facts[shard], self._shards.store.fetch

        def is_wanted() -> bool:
            return shard in self._plan.needed and not self._stopped.is_set()

        self._cache.prepare(url, stat, lambda to: fetch(url, to, stat, is_waited_for=not self._has_first), is_wanted)

    def _let_go(self, shard: int, again: int | None) -> None:
        self._cache.let_go(*self._facts[shard], again)

    def _ask_for(self, shards: Iterable[int]) -> None:
        for shard in shards:
            if not self._cache.keep(*self._facts[shard]) and shard not in self._in_progress:
                self._in_progress.add(shard)
                self._wanted.put(shard)

    def _order(self, needs: Needs, later: Needs) -> Iterator[tuple[int, Iterable[int]]]:
        number = self._position() or 0
        while (shards := needs(number)) is not None:
            yield number, shards
            number += 1
        self._plan.end = number
        for ahead in count():  # of the next epoch; not if the cache has room for all shards
            found = later(ahead) if self._whole > self._plan.room else None
            if found is None:
                return
            yield number + ahead, found

    def _walk(self) -> None:
        try:
            with nullcontext(lambda: 1) if self._cache.read_only else reading(self._cache.folder / "readers") as count:
                self._walk_on(count)
        except Exception as error:  # an order that cannot be read twice: each shard is fetched when it is needed
            self.error = error
        finally:
            for shard in self._plan.needed:
                self._let_go(shard, 0)
            for _ in self._threads:
                self._wanted.put(None)

    def _walk_on(self, count: Callable[[], int]) -> None:
        plan, first, young, readers = self._plan, self._position(), -math.inf, 1
        while first is not None and not self._stopped.is_set():
            now = self._position()
            if now is None:
                return
            if host_clock.now() - young > YOUNG:
                young, before, readers = host_clock.now(), readers, count()
                # What was asked for beyond the share of this reader is asked for later. One may be between two epochs.
                plan.room = self._cache.max_bytes // max(before, readers, processes_here())
                plan.give_back()
                self._ask_for(list(plan.needed))  # others may have deleted it
            if plan.window and plan.window[0].number < now:  # a worker fetched it
                self._has_first = True
            if (back_to := plan.pass_by(now)) is not None:
                self._warn_of_returns(back_to)
            for _ in range(LOOKS):
                if plan.uses > MOST_USES or not plan.look():
                    break
                self._ask(now > first)
            self._ask(now > first)
            if not plan.window and plan.end is not None and (not plan.looked or plan.looked[0].number >= plan.end):
                return
            self._stopped.wait(PAUSE)

    def _ask(self, has_begun: bool) -> None:
        """Have the shards of the next batches fetched, as far as there is room; ``has_begun``: the user has a batch."""
        self._has_first = self._has_first or bool(self._plan.window and not self._in_progress)
        while True:
            is_busy = not self._has_first or (not has_begun and len(self._in_progress) >= EARLY)
            new = self._plan.take(is_busy)
            if new is None:
                return
            self._ask_for(new)

    def _warn_of_returns(self, number: int) -> None:
        """Say that the cache is too small for the order, which comes back to the shards of this batch."""
        between = {shard for batch in self._plan.looked if batch.number <= number for shard in batch.shards}
        needs = f"{self._plan.size_of(between | self._plan.needed):,} bytes of shards at once"
        text = f"the order returns to shards that had to go: it needs {needs}, and {self._cache.limit_text}"
        advice = "Give a larger max_bytes, or give ShardShuffleSampler a smaller window"
        warn(f"{text}. So shards are fetched again and again. {advice}")


# -- who reads ahead into one cache, in all processes ------------------------------------------------------------------


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[], int]]:
    """Be in the register inside the block, which calls the function that it gets each second.

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
    mine = folder / uuid.uuid4().hex

    def count() -> int:
        """The readers, this one included."""
        found = 1
        with suppress(OSError):  # another program deletes the folder, or it cannot be written to
            folder.mkdir(parents=True, exist_ok=True)
            mine.touch()
            for other in folder.iterdir():
                with suppress(FileNotFoundError):  # it has ended at this moment
                    lives = time.time() - other.stat().st_mtime < GONE
                    found += lives and other != mine
                    if not lives:
                        other.unlink()
        return found

    try:
        yield count
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
