"""`GroupReads`: samples of one group, such as the frames of a video, are read together for many batches.

    main process --Shelf.plan--> indices of the coming batches --planned--> the worker that reads a group
    a worker     --Shelf.put-->  samples of a group            --take-->    the workers that read the batches

A *window* is ``batches`` batches. Those of different groups begin at different batches, so that the work is even. The
worker that first needs a group in its window claims it, reads all its samples of the window in ascending order, and
puts them onto the *shelf*. Others first read groups without a claim, then wait for the rest. A claim lasts while its
holder reads, and a holder waits for no other claim: there is no deadlock. The claim ends with its process.

All shared memory is a cache: a sample that is not there is read. So no death of a worker and no error of the plan
changes a batch. The main process alone writes the plan, so it waits for no worker. Samples have checksums, as a worker
that was stopped may write into memory that another group has meanwhile. A piece is freed when the user has the batches
of its window, or drops the iterator. Without room, samples of fewer batches are read together, in the end of one.

If that read raises, or the worker dies, the group is read by batch until its window ends: errors and deaths are those
of the batch that has the sample. Samples that draw random numbers are an error, as in a cache.

Source of the idea: reading in the order of the disk for an order known in advance, from external sorting.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, count
from typing import Any

import numpy as np

from sharded_loader.caching.dataset import KEPT, global_states
from sharded_loader.caching.shared import LOCKED_BYTE, Opened, locked, open_named, open_nameless, set_lock
from sharded_loader.extend import Array, Cache
from sharded_loader.extend.data import bulk, check_dataset, checked_index, checked_indices, follow, read_many
from sharded_loader.extend.engine import ReplyPickler
from sharded_loader.extend.order import reading
from sharded_loader.extend.tools import blake2b, brief, bytes_of_text, check_int, pass_on
from sharded_loader.recordio.positioned import read_at, write_at

MOST_BATCHES = 1024
"""Limit of a window, whose batches are pieces of the plan."""

PIECES = 4096
"""Maximum number of pieces on a shelf."""

SHARE = 4
"""Divisor of ``max_bytes``: the most that a worker reads ahead at once, into its own memory."""

ITERATORS = 64
"""Iterators in progress, of all loaders of one dataset, whose samples are kept. Older ones read by batch."""

NEVER = sys.maxsize

_PIECE = np.dtype([("key", "i8"), ("iterator", "i8"), ("end", "i8"), ("begin", "i8"), ("size", "i8")])
_STATE = np.dtype(
    [
        ("token", "S16"),
        ("largest", "i8", 1),  # bytes of a sample
        ("done", "i8", (ITERATORS, 2)),  # an iterator, and the number of batches that its user has
        ("counts", "i8", (1024, 3)),  # by process: samples found, samples read, reads
        ("pieces", _PIECE, PIECES),
    ]
)
_BEGIN = _STATE.itemsize  # of the pieces
_HEAD, _ROW = 24, 32  # bytes of key, number of rows, and checksum; of a sample's index, offset, size and checksum

_NOTHING: Array = np.empty(0, np.int64)

_claims: defaultdict[tuple[int, int], threading.RLock] = defaultdict(threading.RLock)
"""Claims of the threads of a process, as the system's locks are between processes. A forked child has its own."""


def key_of(*parts: object) -> int:
    """Return a positive key that is the same in all processes.

    Example:
        >>> key_of(0, "video 7") == key_of(0, "video 7") != key_of(1, "video 7")
        True
    """
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1 or 1


class Shelf(Opened):
    """Shared memory with pieces, each of some objects with an index.

    Args:
        max_bytes: limit of the pieces.
        token: 16 bytes that no other shelf has.
        name: of the shelf, to open it in another process. One that is out of reach is replaced by an empty one.
    """

    def __init__(self, max_bytes: int, token: bytes, name: str = "") -> None:
        fd = -1
        with contextlib.suppress(OSError):  # its process has ended, or runs on another machine
            fd = open_named(name)
        if fd >= 0 and read_at(fd, 16, 0) != token:
            os.close(fd)
            fd = -1
        super().__init__(*(open_nameless("groups") if fd < 0 else (fd, name)), is_temporary=fd < 0)
        if fd < 0:
            write_at(self.fd, token.ljust(_BEGIN, b"\0"), 0)
        self.max_bytes, self.token = max_bytes, token
        state: Any = self.map(_BEGIN).view(_STATE)[0]
        self.largest, self.done, self.counts, self._pieces = (state[name] for name in list(_STATE.fields or ())[1:])

    def __reduce__(self) -> Any:
        return Shelf, (self.max_bytes, self.token, self.name)

    def find(self, key: int) -> Iterator[tuple[int, Array]]:
        """Yield begin and table of each piece with a key. Its rows: index, offset, size and checksum of an object."""
        for *_, begin, size in self._pieces[self._pieces["key"] == key].tolist():
            head = np.frombuffer(read_at(self.fd, _HEAD, _BEGIN + begin).ljust(_HEAD, b"\0"), np.int64).tolist()
            if head[0] == key and 0 <= head[1] * _ROW < size:
                table = read_at(self.fd, head[1] * _ROW, _BEGIN + begin + _HEAD)
                if zlib.crc32(table) == head[2]:
                    yield begin, np.frombuffer(table, np.int64).reshape(-1, 4)

    def indices(self, key: int) -> list[int]:
        return [index for _, table in self.find(key) for index in table[:, 0].tolist()]

    def take(self, key: int, wanted: Iterable[int]) -> dict[int, Any]:
        """Return those objects that are there, as new ones."""
        found = dict[int, Any]()
        for begin, table in self.find(key):
            for index, offset, size, checksum in table[np.isin(table[:, 0], [*wanted])].tolist():
                raw = read_at(self.fd, size, _BEGIN + begin + offset)
                if index not in found and zlib.crc32(raw) == checksum:
                    found[index] = pickle.loads(raw)
        return found

    def put(self, key: int, iterator: int, end: int, objects: dict[int, Any]) -> int:
        """Keep objects until an iterator's user has the batches before ``end``.

        Returns:
            The number of the piece; -1 if there is no room.
        """
        streams = [io.BytesIO() for _ in objects]
        for stream, value in zip(streams, objects.values(), strict=True):
            ReplyPickler(stream, protocol=5).dump(value)
        parts = [stream.getbuffer() for stream in streams]
        ends = np.cumsum([_HEAD + _ROW * len(parts), *map(len, parts)])
        table = np.array([[*objects], ends[:-1], np.diff(ends), [*map(zlib.crc32, parts)]], np.int64).T.tobytes()
        head = np.array([key, len(parts), zlib.crc32(table)], np.int64).tobytes()
        self.largest[:] = max([*self.largest, *map(len, parts)])
        piece = -1
        with locked(self.fd) as alone:
            if alone:
                kept = self._is_kept()
                begins, lasts = self._gaps(kept)
                fitting, free = np.flatnonzero(begins - lasts >= ends[-1]), np.flatnonzero(~kept)
                self._pieces[free] = 0
                if fitting.size and free.size:
                    piece, begin = int(free[0]), int(lasts[fitting[0]])
                    self._pieces[piece] = 0, iterator, end, begin, ends[-1]
        if piece >= 0:
            for part, at in zip((head, table, *parts), (0, _HEAD, *ends.tolist()), strict=False):
                write_at(self.fd, part, _BEGIN + begin + at)
            self._pieces["key"][piece] = key  # from here on it is found
        return piece

    def drop(self, piece: int) -> None:
        """Free a piece that this process has put."""
        self._pieces[piece] = 0

    def room(self) -> int:
        """Return the bytes of the largest gap between the pieces."""
        return int(np.max(np.subtract(*self._gaps(self._is_kept()))))

    @property
    def used_bytes(self) -> int:
        return int(self._pieces["size"][self._is_kept()].sum())

    def _is_kept(self) -> Array:
        pieces, done = self._pieces, self.done[self._pieces["iterator"] % ITERATORS]
        kept: Array = (pieces["size"] > 0) & (done[:, 0] == pieces["iterator"]) & (pieces["end"] > done[:, 1])
        return kept

    def _gaps(self, kept: Array) -> tuple[Array, Array]:
        begins, ends = self._pieces["begin"][kept], (self._pieces["begin"] + self._pieces["size"])[kept]
        return np.append(np.sort(begins), self.max_bytes), np.append(0, np.sort(ends))

    @contextlib.contextmanager
    def claim(self, key: int, block: bool) -> Iterator[bool]:
        """Hold a key inside the block. Yields False if another thread or process holds it.

        With ``block``, wait for the other. False then says that the system has no locks, or suspects a deadlock.
        """
        lock, byte, is_taken = _claims[os.getpid(), key % 64], LOCKED_BYTE + 1 + key % (1 << 40), False
        if not lock.acquire(blocking=block):
            yield False
            return
        try:
            with contextlib.suppress(OSError):
                set_lock(self.fd, True, byte, block)
                is_taken = True
            yield is_taken
        finally:
            if is_taken:
                set_lock(self.fd, False, byte)
            lock.release()


class GroupReads(Cache):
    """The samples of a dataset, read by group: those of the next batches that share a group are read together, once.

    Loaders wrap a dataset with ``group_of`` in it; wrap it yourself before transforms, and for other limits. Batches
    and errors stay what they are. Random steps come behind it: ``GroupReads(dataset).transform(augment)``. All workers
    of a loader share what is read, and each rank has its own. Groups are prefetched in the order of ``shuffle=`` or
    this library's samplers. With another library's sampler, in the drop-in, and on other machines (`RayPool`), samples
    are grouped within a batch.

    Args:
        dataset: has ``group_of(index)``: the video, chunk, row group or archive of a sample, as an int, a text, or a
            tuple of them. Its ``__getitems__(indices)``, if it has one, gets samples of one group, in ascending order.
        batches: number of batches in a window, 1 to 1024: samples of a group in one window are read together.
        max_bytes: limit of the samples in shared memory, in bytes or as a text such as "2 GB". A worker reads up to a
            quarter of it at once. If it is too small, groups are read more often.

    Raises:
        TypeError: The dataset has no ``group_of``.
        ValueError: An argument is out of range. Reading raises it if samples draw from `sample_rng`, and in
            worker processes from the global generators.

    Example:
        >>> from sharded_loader import ShardedDataLoader, SimpleDataset
        >>> class Videos(SimpleDataset):
        ...     def group_of(self, index): return index // 50
        >>> videos = GroupReads(Videos(range(100)), batches=5)
        >>> with ShardedDataLoader(videos, 20, shuffle=True, seed=1) as loader:
        ...     numbers = sorted(number for batch in loader for number in batch.tolist())
        >>> numbers == list(range(100)), videos.reads
        (True, 4)
    """

    _reads = ("__getitems__",)

    def __init__(self, dataset: Any, batches: int = 32, max_bytes: int | str = "1 GB") -> None:
        self._dataset = check_dataset(dataset, "GroupReads")
        if not callable(getattr(dataset, "group_of", None)):
            text = f"{brief(dataset)} has no group_of(index), which returns the video, chunk or file of a sample"
            raise TypeError(f"GroupReads: {text}: give the dataset itself, and call take or transform on the result")
        self._window = check_int("batches", batches, 1, f"and at most {MOST_BATCHES}")
        if self._window > MOST_BATCHES:
            raise ValueError(f"batches is {batches}: give at most {MOST_BATCHES}")
        size, token = bytes_of_text(max_bytes, 0, "0 or more"), os.urandom(8).hex().encode()
        self._shelf, self._plan = Shelf(size, token), Shelf(NEVER, token)
        self._followed: list[tuple[int, Callable[[], int | None]]] = []
        self._has_read = False

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_group"} | {"_followed": []}

    @functools.cached_property
    def _group(self) -> Callable[[int], Any]:
        return functools.lru_cache(1 << 16)(self._dataset.group_of)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples found in shared memory, samples read, and bytes in it; of all processes."""
        found, read, _ = self._shelf.counts.sum(0).tolist()
        return found, read, self._shelf.used_bytes

    @property
    def reads(self) -> int:
        """Number of reads, each of one group, by all processes."""
        return int(self._shelf.counts[:, 2].sum())

    def _count(self, *numbers: int) -> None:
        mine = self._shelf.counts[os.getpid() % len(self._shelf.counts)]
        mine += numbers  # at once, so threads need no lock

    # -- the plan --------------------------------------------------------------------------------------------

    def follow(
        self, batches: Callable[[int], Any], position: Callable[[], int | None], later: Callable[[int], Any]
    ) -> Callable[[int], None]:
        """Plan an epoch; see `data.datasets.follow`. Return the function that plans ahead of a batch."""
        inside, first = follow(self._dataset, batches, position, later), position() or 0
        iterator = int(self._plan.done[:, 0].max())  # its first batches may have been read as those of `later`
        self._followed = [(iterator, position), *self._followed[: ITERATORS // 2]]
        for shelf in (self._plan, self._shelf):
            for number in (iterator, iterator + 1):
                shelf.done[number % ITERATORS] = number, -1
        order = chain(self._planned(iterator, batches, first), self._planned(iterator + 1, later, 0))
        planned = first

        def announce(batch: int) -> None:
            nonlocal planned
            while planned <= batch + 2 * self._window:
                planned += 1
                if coming := next(order, None):
                    owner, number, indices = coming
                    self._plan.put(key_of(number), owner, number + 1, {owner: indices})
            for one, where in self._followed:
                reached = where()
                for shelf in (self._plan, self._shelf):
                    if shelf.done[one % ITERATORS, 0] == one:
                        shelf.done[one % ITERATORS, 1] = NEVER if reached is None else reached
            for tell in inside:
                tell(batch)

        return announce

    def _planned(self, iterator: int, batches: Callable[[int], Any], first: int) -> Iterator[tuple[int, int, Array]]:
        for number in count(first):
            try:
                if (found := batches(number)) is None:
                    return
                yield iterator, number, checked_indices(found, len(self))
            except Exception as error:  # the batch itself raises it
                pass_on(error)

    def _members(self, batch: int, window: range, some: set[int]) -> tuple[int, list[int]]:
        """Return the iterator whose batch has these indices, and those of its batches in the window, in order.

        Earlier batches of the window are those that other workers read now. Returns 0 and no indices if the batch is
        not planned, for instance with another library's sampler.
        """
        for iterator in sorted(self._plan.indices(key_of(batch)), reverse=True):
            parts = {number: self._plan.take(key_of(number), [iterator]).get(iterator, _NOTHING) for number in window}
            if some.issubset(parts[batch].tolist()):
                return iterator, np.concatenate(list(parts.values())).tolist()
        return 0, []

    # -- reading ---------------------------------------------------------------------------------------------

    def __getitem__(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._samples([checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[object]:
        """Return many samples."""
        return self._samples(checked_indices(indices, len(self)).tolist())

    def _samples(self, where: list[int]) -> list[object]:
        task, groups = getattr(reading.get(), "task", None), dict[Any, list[int]]()
        for index in sorted({*where}):
            groups.setdefault(self._group(index), []).append(index)
        keys = {group: key_of(-1 if task is None else task.epoch, group) for group in groups}
        found = self._taken(keys, groups)
        for block in (False, True):
            for group in [one for one, wanted in groups.items() if not found.keys() >= {*wanted}]:
                with self._shelf.claim(keys[group], block) as is_mine:
                    if is_mine or block:
                        missing = [index for index in groups[group] if index not in found]
                        found |= self._taken(keys, {group: missing})  # another worker may have read them meanwhile
                        if missing := [index for index in missing if index not in found]:
                            found |= self._read_group(keys[group], group, missing, where, task)
        # One that comes twice is two objects, because the user may modify a sample.
        return [found.pop(index) if index in found else self._read([index])[0] for index in where]

    def _taken(self, keys: dict[Any, int], groups: dict[Any, list[int]]) -> dict[int, Any]:
        found = {index: one for group in groups for index, one in self._shelf.take(keys[group], groups[group]).items()}
        self._count(len(found), 0, 0)
        return found

    def _read_group(self, key: int, group: object, wanted: list[int], where: list[int], task: Any) -> dict[int, Any]:
        """Read samples of a group for this batch, and those for the batches of its window if there is room."""
        shelf, extra = self._shelf, list[int]()
        if task is not None:
            end = task.seq + self._window - (task.seq + key_of(group)) % self._window
            iterator, coming = self._members(task.seq, range(end - self._window, end), {*where})
            known = {*wanted, *shelf.indices(key)}
            extra = [index for index in dict.fromkeys(coming) if index not in known and self._group(index) == group]
            room = min(shelf.room(), shelf.max_bytes // SHARE) // max(1, int(shelf.largest[0]))
            extra = extra[: max(0, room - len(wanted))]
        if extra and not any(shelf.find(tried := key_of(key, end))):  # not tried in vain before
            note, chosen, samples = shelf.put(tried, iterator, end, {}), sorted([*wanted, *extra]), dict[int, Any]()
            try:
                samples = dict(zip(chosen, self._read(chosen), strict=True))
                shelf.put(key, iterator, end, samples)
                shelf.drop(note)
            except Exception as error:  # samples of other batches may be to blame, or the memory is full
                pass_on(error)
            if samples:
                return {index: samples[index] for index in wanted}
        return dict(zip(wanted, self._read(wanted), strict=True))

    def _read(self, indices: list[int]) -> list[object]:
        """Read samples of one group; drawing random numbers meanwhile is an error."""
        scope = reading.get()
        # In the main process, other threads may draw meanwhile.
        is_alone = getattr(scope, "worker", None) and threading.current_thread() is threading.main_thread()
        before = global_states() if is_alone else {}
        try:
            reading.set(KEPT)
            samples = read_many(self._dataset, indices)
        finally:
            reading.set(scope)
        self._count(0, len(indices), 1)
        after = global_states() if before else {}
        drawn = ", ".join(name for name, state in after.items() if state != before.get(name, state))
        has_read, self._has_read = self._has_read, True
        if drawn and has_read:  # the first read may import a library, which may draw
            raise ValueError(
                f"GroupReads reads the samples of many batches at once, and {brief(self._dataset)} draws from {drawn}: "
                "move the transform that draws behind it, GroupReads(...).transform(fn)"
            )
        return samples

    def __repr__(self) -> str:
        return f"GroupReads({brief(self._dataset)}, batches={self._window}, max_bytes={self._shelf.max_bytes})"
