"""`GroupReads`: samples of one group, such as the frames of a video, are read together for many batches.

    main process --Shelf.put--> indices and groups of the coming batches --take--> the worker that reads a group
    a worker     --Shelf.put--> samples of a group                       --take--> the workers that read the batches

A *window* is ``batches`` batches. Those of different groups begin at different batches, so that the work is even. The
worker that first needs a group in its window claims it, reads all its samples of the window in ascending order, and
puts them onto the *shelf*. Others first read groups without a claim, then wait for the rest. A claim lasts while its
holder reads, and a holder waits for no other claim: there is no deadlock. The claim ends with its process.

All shared memory is a cache: a sample that is not there is read. So no death of a worker and no error of the plan
changes a batch. The main process alone writes the plan, so it waits for no worker. Samples have checksums, as a worker
that was stopped may write into memory that another group has meanwhile. A piece is freed when the user has the batches
that it is for, or drops the iterator. Without room, samples of fewer batches are read together, in the end of one.

If that read raises, or the worker dies, the group is read by batch until its window ends: errors and deaths are those
of the batch that has the sample. Samples that draw random numbers are an error, as in a cache.

Source of the idea: reading in the order of the disk for an order known in advance, from external sorting.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import threading
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from itertools import chain, count, pairwise, product
from typing import Any

import numpy as np

from sharded_loader.caching.dataset import ReadOnce, drawn_since, global_states
from sharded_loader.caching.shared import LOCKED_BYTE, PROCESSES, Zeros, locked, set_lock, tally
from sharded_loader.extend import Array
from sharded_loader.extend.data import check_dataset, checked_indices, follow
from sharded_loader.extend.engine import ReplyPickler
from sharded_loader.extend.order import derive_key, reading
from sharded_loader.extend.tools import brief, bytes_of_text, check_int, pass_on
from sharded_loader.recordio.positioned import read_at, write_at

MOST_BATCHES = 1024
"""Limit of a window, whose batches are pieces of the plan."""

PIECES = 4096
"""Maximum number of pieces on a shelf."""

SHARE = 4
"""Divisor of ``max_bytes``: the most that a worker reads ahead at once, into its own memory."""

ITERATORS = 64
"""Iterators in progress, of all loaders of one dataset, whose samples are kept. Older ones read by batch."""

EPOCH = 1 << 40
"""The *clock* of a batch is its number, plus this for each iterator before its own."""

_PIECE = np.dtype([(name, np.int64) for name in ("key", "end", "begin", "head", "size", "checksum")])
_STATE = np.dtype(
    [
        ("token", "S16"),
        ("done", np.int64, ITERATORS),  # clocks of the batches that the users get next
        ("largest", np.int64, (1,)),  # bytes of a sample
        ("counts", np.int64, (PROCESSES, 3)),  # by process: samples found, samples read, reads
        ("pieces", _PIECE, PIECES),
    ]
)
_claims: defaultdict[tuple[int, int], threading.RLock] = defaultdict(threading.RLock)
"""Claims of the threads of a process, as the system's locks are between processes. A forked child has its own."""


def key_of(*parts: Any) -> int:
    """Return a positive key that is the same in all processes."""
    return derive_key(*parts) >> 66


class Shelf(Zeros):
    """Shared memory with pieces, each of some objects with an index.

    Args:
        max_bytes: limit of the pieces.
        clock: the shelf whose ``done`` says which pieces are free; None: its own.
        name, token: of the shelf, to open it in another process.
    """

    def __init__(self, max_bytes: int, clock: Shelf | None = None, name: str = "", token: bytes = b"") -> None:
        super().__init__("groups", _STATE.itemsize, name, token)
        self.max_bytes, self.clock = max_bytes, clock
        state: Any = self.memory.view(_STATE)[0]
        self.done, self.largest, self.counts, self.pieces = (state[name] for name in list(_STATE.fields or ())[1:])
        self.done = self.done if clock is None else clock.done

    def __reduce__(self) -> Any:
        return Shelf, (self.max_bytes, self.clock, self.name, self.token)

    def kept(self, key: int | None = None) -> Array:
        """Return the pieces, of a key or all, that have batches to come; rows of `_PIECE`."""
        pieces: Array = self.pieces if key is None else self.pieces[self.pieces["key"] == key]
        return pieces[~self._are_free(pieces)]

    def _are_free(self, pieces: Array) -> Array:
        are_free: Array = pieces["end"] <= self.done[pieces["end"] // EPOCH % ITERATORS]
        return are_free

    def gaps(self) -> tuple[Array, Array]:
        """Return begins and sizes of the free parts."""
        kept = np.sort(self.kept(), order="begin")
        begins = np.append(_STATE.itemsize, kept["begin"] + kept["size"])
        return begins, np.append(kept["begin"], _STATE.itemsize + self.max_bytes) - begins

    def take(self, key: int, wanted: Collection[int] | None = None) -> dict[int, Any]:
        """Return those objects that are there, or all of a key, as new ones."""
        found = dict[int, Any]()
        for _, _, begin, head, _, checksum in self.kept(key).tolist():
            raw = read_at(self.fd, head, begin)
            table = np.frombuffer(raw if zlib.crc32(raw) == checksum else b"", np.int64).reshape(-1, 4)
            if wanted is not None:
                table = table[np.isin(table[:, 0], [*wanted])]
            for index, offset, size, checksum in table.tolist():
                raw = read_at(self.fd, size, begin + head + offset)
                if zlib.crc32(raw) == checksum:
                    found[index] = pickle.loads(raw)
        return found

    def put(self, key: int, end: int, objects: dict[int, Any]) -> bool:
        """Keep objects, one or more, until the user has the batches before the clock ``end``; False without room."""
        stream, ends = io.BytesIO(), [0]
        for value in objects.values():
            ReplyPickler(stream, protocol=5).dump(value)
            ends.append(stream.tell())
        data, sizes = stream.getbuffer(), np.diff(ends)
        checksums = [zlib.crc32(data[begin:end]) for begin, end in pairwise(ends)]
        table = np.array([[*objects], ends[:-1], sizes, checksums], np.int64).T.tobytes()
        self.largest[:] = max(self.largest[0], sizes.max())
        with locked(self.fd) as alone:
            begins, rooms = self.gaps()
            free, fitting = np.flatnonzero(self._are_free(self.pieces)), np.flatnonzero(rooms >= len(table) + len(data))
            if not (alone and free.size and fitting.size):
                return False
            begin = int(begins[fitting[0]])
            self.pieces[free[0]] = key, end, begin, len(table), len(table) + len(data), zlib.crc32(table)
        write_at(self.fd, table, begin)
        write_at(self.fd, data, begin + len(table))
        return True

    @contextlib.contextmanager
    def claim(self, key: int, block: bool) -> Iterator[bool]:
        """Hold a key inside the block. Yields False if another thread or process holds it.

        With ``block``, wait for the other. False then says that the system has no locks, or suspects a deadlock.
        """
        lock, byte = _claims[os.getpid(), key % 64], LOCKED_BYTE + 1 + key % (1 << 40)
        with contextlib.ExitStack() as held:
            is_mine = lock.acquire(blocking=block)
            try:
                if is_mine:
                    held.callback(lock.release)
                    set_lock(self.fd, True, byte, block)
                    held.callback(set_lock, self.fd, False, byte)
            except OSError:
                is_mine = False
            yield is_mine


class GroupReads(ReadOnce):
    """The samples of a dataset, read by group: those of the next batches that share a group are read together, once.

    `ShardedDataLoader` wraps a dataset with ``group_of`` in it; wrap it yourself for the drop-in, before transforms,
    and for other limits. Batches and errors do not change. Random steps come after it:
    ``GroupReads(dataset).transform(augment)``. All workers of a loader share what is read, and each rank has its own.
    Groups are prefetched in the order of ``shuffle=`` or this library's samplers. With another library's sampler, in
    torch's order (the drop-in), and on other machines (`RayPool`), samples are grouped within a batch.

    Args:
        dataset: has ``group_of(index)``: the video, chunk, row group or archive of a sample, as an int, a text, or a
            tuple of them. The main process calls it as well, for each sample ahead, so it must be fast. The dataset's
            ``__getitems__(indices)``, if it has one, gets samples of one group, in ascending order.
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
        self._plan = Shelf(EPOCH)
        self._shelf = Shelf(bytes_of_text(max_bytes, 0, "0 or more"), self._plan)
        self._followed: list[tuple[int, Callable[[], int | None]]] = []

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_followed": []}

    @property
    def counts(self) -> tuple[int, int, int]:
        """Samples found in shared memory, samples read, and bytes in it; of all processes."""
        found, read, _ = self._shelf.counts.sum(0).tolist()
        return found, read, int(self._shelf.kept()["size"].sum())

    @property
    def reads(self) -> int:
        """Number of reads, each of one group, by all processes."""
        return int(self._shelf.counts[:, 2].sum())

    # -- the plan --------------------------------------------------------------------------------------------

    def follow(
        self, batches: Callable[[int], Any], position: Callable[[], int | None], later: Callable[[int], Any]
    ) -> Callable[[int], None]:
        """Plan an epoch; see `data.datasets.follow`. Return the function that plans ahead of a batch."""
        inside, planned, done = follow(self._dataset, batches, position, later), position() or 0, self._plan.done
        begin = int(done.max()) // EPOCH * EPOCH  # its first batches may have been read as those of `later`
        self._followed = [(begin, position), *self._followed[: ITERATORS // 2]]
        for clock in (begin, begin + EPOCH):
            done[clock // EPOCH % ITERATORS] = clock
        order = chain(self._planned(begin, batches, planned), self._planned(begin + EPOCH, later, 0))

        def announce(batch: int) -> None:
            nonlocal planned
            while planned <= batch + 2 * self._window:
                planned += 1
                next(order, None)
            for clock, where in self._followed:
                place = clock // EPOCH % ITERATORS
                if done[place] // EPOCH == clock // EPOCH:
                    done[place] = clock + (EPOCH - 1 if (reached := where()) is None else reached)
            for tell in inside:
                tell(batch)

        return announce

    def _planned(self, begin: int, batches: Callable[[int], Any], first: int) -> Iterator[None]:
        """Put one batch after the other onto the plan: its indices and the keys of their groups."""
        for number in count(first):
            try:
                if (found := batches(number)) is None:
                    return
                where = checked_indices(found, len(self)).tolist()
                groups = [key_of(self._dataset.group_of(index)) for index in where]
                ends, end = self._plan.pieces["end"], begin + number + 1
                ends[ends == end] = 0  # planned as a batch of `later`, perhaps before the order changed
                self._plan.put(number, end, {begin: np.array([where, groups])})
            except Exception as error:  # the batch itself raises it
                pass_on(error)
            yield

    # -- reading ---------------------------------------------------------------------------------------------

    def _samples(self, where: list[int]) -> list[Any]:
        task, groups, found = getattr(reading.get(), "task", None), defaultdict[int, list[int]](list), dict[int, Any]()
        for index in sorted({*where}):
            groups[key_of(self._dataset.group_of(index))].append(index)
        for block, (group, wanted) in product((False, True), groups.items()):
            key = key_of(-1 if task is None else task.epoch, group)
            if self._missing(key, wanted, found):
                with self._shelf.claim(key, block) as is_mine:
                    # Another worker may have read them meanwhile.
                    if (is_mine or block) and (missing := self._missing(key, wanted, found)):
                        coming = {} if task is None else self._coming(key, group, task.seq, {*where})
                        found |= self._read_group(key, missing, coming)
        # One that comes twice is two objects, because the user may modify a sample.
        return [found.pop(index) if index in found else self._read([index])[0] for index in where]

    def _missing(self, key: int, wanted: list[int], found: dict[int, Any]) -> list[int]:
        """Take samples from the shelf to those found; return the indices of those that are not there."""
        taken = self._shelf.take(key, [index for index in wanted if index not in found])
        tally(self._shelf.counts, len(taken), 0, 0)
        found |= taken
        return [index for index in wanted if index not in found]

    def _coming(self, key: int, group: int, batch: int, some: set[int]) -> dict[int, int]:
        """Return the indices of a group in the window of a batch, in order, each with the clock behind its batch.

        Includes earlier batches of the window, which other workers read at the same time. Empty if the batch with these
        indices is not planned, for instance with another library's sampler, or if the group was prefetched before, with
        or without success.
        """
        found = dict[int, int]()
        for begin, (indices, _) in self._plan.take(batch).items():
            if some.issubset(indices.tolist()):
                end = batch + self._window - (batch + group) % self._window
                ends = self._shelf.kept(key)["end"] - begin
                numbers = range(max(0, end - self._window, *ends[ends <= end].tolist()), end)
                for number in numbers if batch in numbers else ():
                    for where, groups in self._plan.take(number, [begin]).values():
                        for index in where[groups == group].tolist():
                            found.setdefault(index, begin + number + 1)
        return found

    def _read_group(self, key: int, wanted: list[int], coming: dict[int, int]) -> dict[int, Any]:
        """Read samples of a group for this batch, and as many of the coming ones as there is room for."""
        shelf = self._shelf
        room = min(int(shelf.gaps()[1].max()), shelf.max_bytes // SHARE) // max(1, int(shelf.largest[0]))
        extra = [index for index in coming if index not in wanted][: max(0, room - len(wanted))]
        # A piece without samples says that it was tried, until it is freed.
        if extra and shelf.put(key, end := coming[extra[-1]], {-1: None}):
            chosen = sorted([*wanted, *extra])
            try:
                samples = dict(zip(chosen, self._read(chosen), strict=True))
                shelf.put(key, end, samples)
                return {index: samples[index] for index in wanted}
            except Exception as error:  # samples of other batches may be to blame, or the memory is full
                pass_on(error)
        return dict(zip(wanted, self._read(wanted), strict=True))

    def _read(self, indices: list[int]) -> list[object]:
        """Read samples of one group; drawing random numbers meanwhile is an error."""
        # In the main process, other threads may draw meanwhile.
        is_alone = getattr(reading.get(), "worker", None) and threading.current_thread() is threading.main_thread()
        before = global_states() if is_alone else {}
        samples = super()._read(indices)
        drawn = drawn_since(before) if before else []
        reads = int(tally(self._shelf.counts, 0, len(indices), 1)[2])
        if reads > 1 and drawn:  # the first read may import a library, which may draw
            text = f"GroupReads reads the samples of many batches at once, and {brief(self._dataset)} draws from"
            advice = "move the transform that draws after it, GroupReads(...).transform(fn)"
            raise ValueError(f"{text} {', '.join(drawn)}: {advice}")
        return samples

    def __repr__(self) -> str:
        return f"GroupReads({brief(self._dataset)}, batches={self._window}, max_bytes={self._shelf.max_bytes})"
