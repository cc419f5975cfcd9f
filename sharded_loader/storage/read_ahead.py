"""Fetches shards in the order in which they will be needed, before they are.

    batches(number) -> indices        the loader's own order, read a second time: it is a function of the epoch
    position() -> number | None       the batch that the user receives next; None: nobody reads this epoch any more

A `ReadAhead` walks through the batches in front of the position, as far as their shards fit into the cache, and has
them fetched, `CONNECTIONS` at a time. What has been passed goes first when room is needed; what is still needed is kept
young, so that other processes that share the folder spare it. Whoever needs a shard earlier fetches it himself, and
waits for nobody but the one that fetches it already.

All threads are daemons, and end with `stop`, with the epoch, or when nobody reads it any more. What goes wrong here is
not told: the one who reads the shard will meet it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial

from sharded_loader.storage.stores import CONNECTIONS

PAUSE = 0.005
"""Seconds between two looks at the position."""

YOUNG = 1.0
"""Seconds after which the shards that are needed are kept young again."""

MOST_BATCHES = 100_000
"""How far the walk goes at most: small shards, and a large cache."""


class ReadAhead:
    """Fetches the shards of one epoch ahead of the position.

    Args:
        needs: the shards of a batch, by its number; None after the last.
        position: see above.
        sizes: of all shards, in bytes.
        room: how many bytes of the cache may be used.
        fetch: fetches a shard if it is not there, and if what it is given says that the shard is still needed.
        keep: tells the cache that a shard is needed; whether it is there.
        let_go: tells the cache that it is not needed any more.

    Attributes:
        error: the last one, of a fetch or of the walk, which it has ended; None: nothing has gone wrong.
    """

    def __init__(
        self,
        needs: Callable[[int], Sequence[int] | None],
        position: Callable[[], int | None],
        sizes: Sequence[int],
        room: int,
        fetch: Callable[[int, Callable[[], bool]], None],
        keep: Callable[[int], bool],
        let_go: Callable[[int], None],
    ) -> None:
        self._needs, self._position, self._sizes, self._room = needs, position, sizes, room
        self._fetch, self._keep, self._let_go = fetch, keep, let_go
        self._needed: Counter[int] = Counter()  # by how many batches; only the walk changes it
        self._asked: set[int] = set()  # that wait to be fetched, or are being fetched
        self.error: Exception | None = None
        self._stopped = threading.Event()
        self._wanted: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._fetch_all, daemon=True) for _ in range(CONNECTIONS)]
        self._threads.append(threading.Thread(target=self._walk, name="sharded_loader-read-ahead", daemon=True))

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        """End; what is being fetched is waited for no longer than ``timeout`` seconds."""
        self._stopped.set()
        for thread in self._threads:
            if thread is not threading.current_thread() and thread.is_alive():
                thread.join(timeout)

    def _fetch_all(self) -> None:
        while (shard := self._wanted.get()) is not None:
            try:
                self._fetch(shard, partial(self._is_needed, shard))
            except Exception as error:
                self.error = error
            self._asked.discard(shard)

    def _is_needed(self, shard: int) -> bool:
        return shard in self._needed and not self._stopped.is_set()

    def _ask_for(self, shard: int) -> None:
        if shard not in self._asked:
            self._asked.add(shard)
            self._wanted.put(shard)

    def _walk(self) -> None:
        try:
            self._walk_on()
        except Exception as error:  # an order that cannot be read twice: each shard is fetched when it is needed
            self.error = error
        finally:
            for _ in range(CONNECTIONS):
                self._wanted.put(None)

    def _walk_on(self) -> None:
        window: deque[tuple[int, Sequence[int]]] = deque()
        needed = self._needed
        used, number, young = 0, self._position(), time.monotonic()
        ahead: Sequence[int] | None = ()
        while not self._stopped.is_set():
            now = self._position()
            if now is None or number is None:
                return
            while window and window[0][0] < now:
                for shard in window.popleft()[1]:
                    needed[shard] -= 1
                    if not needed[shard]:
                        del needed[shard]
                        used -= self._sizes[shard]
                        self._let_go(shard)
            while ahead is not None and len(window) < MOST_BATCHES:
                ahead = ahead or self._needs(number)
                new = [shard for shard in ahead or () if shard not in needed]
                size = sum(self._sizes[shard] for shard in new)
                if ahead is None or (window and used + size > self._room):
                    break
                needed.update(ahead)
                used += size
                window.append((number, ahead))
                for shard in new:
                    self._ask_for(shard)
                number, ahead = number + 1, ()
            if ahead is None and not window:
                return
            if time.monotonic() - young > YOUNG:
                young = time.monotonic()
                for shard in list(needed):
                    if not self._keep(shard):  # others have deleted it
                        self._ask_for(shard)
            self._stopped.wait(PAUSE)
