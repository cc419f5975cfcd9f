"""Samples in one memory or file that all processes map: what ``dataset.cache(...)`` writes and reads.

    open_store(path, max_bytes, length, key, first) -> Store     in the process that makes the cache
    Store.read(index) -> sample | MISSING                        in any process that inherits it, or unpickles it
    Store.write(index, sample)                                   keeps a sample if there is room
    Store.rows(where) -> rows of ``Store.columns`` | None        many samples at once, if all are there

One layout, in memory without a name (`system.open_memory`) or in a file:

    64 bytes   MAGIC, size and checksum of the text; two counters: rows taken, bytes of the log taken; and which sample
               is being written: its number + 1 (0: none), and the counters before it
    text       JSON: version, length, key, digest of the first sample, its structure, number of rows
    entries    for each sample its place, its length in the log, its checksum
    columns    one for each leaf of the first sample: samples of the same structure are rows
    log        all other samples, one after the other: structure and leaves (`caching.flat`). No pickle.

The place is 0: the sample is missing. r + 1: row r. -1 - o: byte o of the log. Nothing is ever moved or evicted. Rows
and log are holes until they are written, and take no room. The entries are written at once, since they are changed
through the mapping: on a full disk, to change a hole so is a SIGBUS.

*Writers.* A writer has the lock of the file, which ends with its process. It writes the sample, then its checksum,
takes the row or the piece of the log, and then writes the place, in one store of 8 bytes. If a writer dies before that,
the next one gives back what it had taken, so nothing is lost. Samples are written by `system.write_at`: a full disk is
an error there, and a SIGBUS in a mapping.

*Readers.* The processes that inherit a store share a `Session`: a byte for each sample whose checksum is known to be
right. A writer sets it, so only samples of other programs are compared, once. On processors that may show two stores
in another order than they were made, the first reader compares too. On others, memory needs no checksums. A wrong
sample counts as missing.

*Ranks.* With ``shared``, `rendezvous.meet` gives the ranks of a machine one memory: the first one makes it, within its
bound, and the others map it. Each rank has a session of its own, so it counts its own hits.

*Files.* A file gets its MAGIC last, under its lock. If the process that makes it dies, the next one makes it. A file
that is no cache, that belongs to another user, or that other users may write to, is rejected with an error.

What can go wrong: another dataset with the same path (`CacheMismatchError`), a path that cannot be written to
(OSError), more bytes than the machine has (ValueError). A full disk, or full memory, later on: the store takes no more
samples, and logs that once. If a program shortens the file, its readers get a SIGBUS. A process of another machine, or
one that outlives the memory, unpickles None.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat as modes
import struct
import zlib
from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from typing import Any

import numpy as np

from sharded_loader.base.checks import bytes_of_text
from sharded_loader.base.limits import SMALL, Limit, free_bytes
from sharded_loader.base.notices import logger
from sharded_loader.base.private import blake2b
from sharded_loader.base.system import close_locked, locked, read_at, write_at
from sharded_loader.batching.protocol import Array
from sharded_loader.caching.flat import fits_columns, flat, flatten, parsed, text_of, unflatten
from sharded_loader.caching.rendezvous import Opened, is_private, meet, name_of, open_named, open_nameless
from sharded_loader.data.inspection import exact
from sharded_loader.memory.codec import aligned

VERSION = 1
"""Of the layout. A file of another version is rejected."""

MAGIC, UNFINISHED = b"SLsample", b"SLnosmpl"
_HEAD = struct.Struct("<8sII")
_COUNTERS, _BEGUN, _TEXT = 16, 32, 64
_ENTRY = np.dtype([("place", np.int64), ("length", np.uint32), ("checksum", np.uint32)])
_SIZE = struct.Struct("<I")

MISSING: Any = object()
"""What `Store.read` returns for a sample that is not there."""

_MACHINE = os.uname().machine if hasattr(os, "uname") else os.environ.get("PROCESSOR_ARCHITECTURE", "")
KEEPS_ORDER = _MACHINE.lower() in ("x86_64", "amd64", "i386", "i686", "x86")
"""Whether all processors see stores in the order in which they were made."""

LOOK = 32 << 20
"""Bytes of memory that are written before it is asked again how much is free: 0.1 ms."""

SHARE = 0.75
"""Of the memory that is free, what a cache without a bound may take. The rest is for batches, and for the program."""

MOST = (1 << 32) - 1
"""Bytes that a sample may have: its length is a number of 32 bits."""

WORD_ROWS = 64
"""The checksum of a large leaf is that of the sums of every 64th word: 150 KB take 12 us, and 50 by crc32 alone."""


class CacheMismatchError(ValueError):
    """The file of a cache belongs to another dataset, or is no cache.

    Example:
        >>> issubclass(CacheMismatchError, ValueError)
        True
    """


def bytes_of(array: Array) -> memoryview:
    """The memory of a C-contiguous array.

    Example:
        >>> bytes(bytes_of(np.zeros((1, 2), np.int8)))
        b'\\x00\\x00'
    """
    try:
        return array.data.cast("B")  # in a fourth of the time
    except (TypeError, ValueError):  # a date, another byte order, no bytes
        return array.reshape(-1).view(np.uint8).data


def checksum(leaves: Iterable[Array]) -> int:
    """A number of 32 bits for these bytes.

    Example:
        >>> checksum([np.arange(3)]) == checksum([np.arange(3)]) != checksum([np.arange(4)])
        True
    """
    found = 0
    for leaf in leaves:
        raw = np.frombuffer(bytes_of(leaf), np.uint8)
        words = raw.size - raw.size % (8 * WORD_ROWS)
        if words >= 8192:
            found = zlib.crc32(raw[:words].view(np.uint64).reshape(-1, WORD_ROWS).sum(0).data, found)
            raw = raw[words:]
        found = zlib.crc32(raw.data, found)
    return found


class Session(Opened):
    """What the processes share that have inherited or unpickled one store.

    Args:
        length: the number of samples.
        name: of another process's session; None: a new one.

    Attributes:
        full: an array of one number: 1 if the store takes no more samples.
        counts: of each process, the samples that it found in the store, and those that it did not.
        sound: of each sample, whether its checksum is known to be right.
    """

    PROCESSES = 1024
    """Each process counts in the row of its number, so two of them may lose a count if that is the same row."""

    def __init__(self, length: int, name: str | None = None) -> None:
        opened = open_nameless("cache-session") if name is None else (open_named(name), name)
        super().__init__(*opened, is_temporary=name is None)
        begin = 16 * (self.PROCESSES + 1)
        if name is None:
            write_at(self.fd, bytes_of(np.zeros(begin + length, np.uint8)), 0)
        memory = self.map(begin + length)
        numbers = memory[:begin].view(np.int64).reshape(-1, 2)
        self.full, self.counts, self.sound = numbers[0, :1], numbers[1:], memory[begin:]

    def count(self, found: int, missed: int) -> None:
        """Samples were found, or not. NumPy adds them at once: threads need no lock."""
        mine = self.counts[os.getpid() % self.PROCESSES]
        mine += (found, missed)


# -- the store ---------------------------------------------------------------------------------------------------------


class Store(Opened):
    """Samples, by index.

    Args:
        fd: of the memory or the file, taken over. Its header is written.
        name: by which other processes open it.
        max_bytes: what samples may take.
        path: of the file; None: it is memory.
        session: the name of another process's; None: a new one.

    Attributes:
        length: the number of samples, stored or not.
        node: the structure of the samples that are rows.
        columns: their leaves, over the shared memory.
        session: see `Session`.
    """

    def __init__(self, fd: int, name: str, max_bytes: int, path: str | None, session: str | None = None) -> None:
        super().__init__(fd, name, is_temporary=path is None and session is None)
        self.max_bytes, self.path = max_bytes, path
        about = read_about(fd)
        assert about is not None  # it was made, or looked at
        self._about, self.length = about, about["length"]
        self.node, self._most_rows = json.loads(about["structure"]), about["rows"]
        self._row_node = parsed(about["structure"])
        self._in_bulk = fits_columns(self.node)
        (entries, *self._begins), self._log = layout_of(about)
        memory = self.map(self._log)
        self._counters = memory[_COUNTERS : _COUNTERS + 16].view(np.int64)
        self._begun = memory[_BEGUN : _BEGUN + 24].view(np.int64)
        fields = np.ndarray(self.length, _ENTRY, memory, entries)
        self.places, self._lengths, self._checksums = fields["place"], fields["length"], fields["checksum"]
        self._row_bytes = sum(_nbytes(*leaf) for leaf in about["leaves"])
        self.columns = [
            np.ndarray((about["rows"], *shape), dtype, memory, begin)
            for (dtype, shape), begin in zip(about["leaves"], self._begins, strict=True)
        ]
        try:
            self.session = Session(self.length, session)
        except (OSError, ValueError):  # its process has ended
            self.session = Session(self.length)
        self._compares = path is not None or not KEEPS_ORDER
        if not self._compares:
            self.session.sound[:] = 1

    def __reduce__(self) -> Any:
        return attach, (self.name, self.max_bytes, self.path, self._about, self.session.name)

    @property
    def used_bytes(self) -> int:
        """What the stored samples take."""
        rows, end = self._counters.tolist()
        return int(rows * self._row_bytes + end)

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, index: int) -> Any:
        """The sample; `MISSING` if it is not there."""
        place = int(self.places[index])
        if place == 0:
            return MISSING
        found = self._row(index, place - 1) if place > 0 else self._record(index, -1 - place)
        if found is MISSING:
            self._damaged(index, place)
        return found

    def rows(self, where: Array) -> Array | None:
        """The rows of the samples at these indices; None unless all are rows."""
        places = self.places[where]
        if not self._in_bulk or not where.size or int(places.min()) <= 0:
            return None
        if not self.session.sound[where].all():
            for index in where[self.session.sound[where] == 0].tolist():
                if self.read(index) is MISSING:
                    return None
        places -= 1
        return places

    def _row(self, index: int, row: int) -> Any:
        if row >= self._most_rows:
            return MISSING
        leaves = [column[row, ...].copy() for column in self.columns]
        if not self._is_sound(index, leaves):
            return MISSING
        rest = iter(leaves)
        return unflatten(self.node, lambda dtype, shape: next(rest))

    def _record(self, index: int, offset: int) -> Any:
        raw = np.frombuffer(read_at(self.fd, int(self._lengths[index]), self._log + offset), np.uint8)
        if raw.size < _SIZE.size or not self._is_sound(index, [raw]):
            return MISSING
        at = _SIZE.size + _SIZE.unpack_from(raw.data)[0]

        def take(dtype: str, shape: list[int]) -> Array:
            nonlocal at
            begin, at = at, at + _nbytes(dtype, shape)
            return np.ndarray(shape, dtype, raw[begin:at].copy())

        return unflatten(json.loads(raw[_SIZE.size : at].tobytes()), take)

    def _is_sound(self, index: int, leaves: list[Array]) -> bool:
        if not self.session.sound[index]:
            if checksum(leaves) != int(self._checksums[index]):
                return False
            self.session.sound[index] = 1
        return True

    def _damaged(self, index: int, place: int) -> None:
        """Forget a sample whose checksum is wrong: it is read, and stored, again."""
        with locked(self.fd) as alone:
            if alone and self.places[index] == place:  # no other program has stored it since
                self.places[index] = 0
        logger.warning("sample %d of %s is damaged in the cache: it is read again", index, self.path or "memory")

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, index: int, sample: Any) -> None:
        """Store a sample, if there is room and it is not there.

        Raises:
            TypeError: it cannot be stored; names the field.
        """
        if self.session.full[0] or self.places[index]:
            return
        node, leaves = flat(sample)
        if self._begun[0]:  # another process is at work, or has died
            with locked(self.fd) as alone:
                if alone:
                    self._give_back()
        rows, end = self._counters.tolist()
        is_row = rows < self._most_rows and node == self._row_node
        if not is_row:
            text = text_of(node).encode()
            parts: list[Any] = [_SIZE.pack(len(text)), text, *map(bytes_of, leaves)]
            leaves = [np.frombuffer(b"".join(parts), np.uint8)]
        nbytes, before = self._row_bytes if is_row else leaves[0].nbytes, rows * self._row_bytes + end
        if before + nbytes > self.max_bytes or nbytes > MOST:
            usual = self._row_bytes if rows else 0
            if self.max_bytes - before <= max(usual, before // 64):  # to ask for each sample takes 20 to 60 us
                self.session.full[0] = 1
            return
        found = checksum(leaves) if self._compares else 0
        with locked(self.fd) as alone:  # the system writes for one process at a time, in any case
            try:
                if alone and not self.places[index] and not self.session.full[0]:
                    self._write(index, leaves, nbytes, found, is_row)
            except OSError as error:
                self.session.full[0] = 1
                what = self.path or "memory"
                logger.warning("the cache in %s is full (%s): it takes no more samples", what, error.strerror)

    def _give_back(self) -> None:
        """Give back what a writer had taken that died before the place was written. Only under the lock."""
        index, *before = self._begun.tolist()
        if index and not self.places[index - 1]:
            self._counters[:] = before
        self._begun[0] = 0

    def _write(self, index: int, leaves: list[Array], nbytes: int, found: int, is_row: bool) -> None:
        self._give_back()
        rows, end = self._counters.tolist()
        before = rows * self._row_bytes + end
        if before + nbytes > self.max_bytes or (is_row and rows >= self._most_rows):
            return
        if self.path is None and (before + nbytes) // LOOK > before // LOOK:
            limit = free_bytes()
            if limit.nbytes < max(SMALL, self._about.get("least_free", 0)):
                raise OSError(errno.ENOMEM, f"{limit.what} leaves {limit.nbytes:,} bytes")
        if is_row:
            for begin, leaf in zip(self._begins, leaves, strict=True):
                write_at(self.fd, bytes_of(leaf), begin + rows * leaf.nbytes)
        else:
            write_at(self.fd, bytes_of(leaves[0]), self._log + end)
        self._lengths[index], self._checksums[index] = nbytes, found
        self.session.sound[index] = KEEPS_ORDER
        self._begun[1:] = rows, end
        self._begun[0] = index + 1
        if is_row:
            self._counters[0] = rows + 1
        else:
            self._counters[1] = end + nbytes
        self.places[index] = rows + 1 if is_row else -1 - end
        self._begun[0] = 0


def _nbytes(dtype: str, shape: Iterable[int]) -> int:
    count = np.dtype(dtype).itemsize
    for size in shape:
        count *= size
    return count


def layout_of(about: dict[str, Any]) -> tuple[list[int], int]:
    """Where the entries and the columns begin, and where the log begins."""
    sizes = [about["length"] * _ENTRY.itemsize, *(about["rows"] * _nbytes(*leaf) for leaf in about["leaves"])]
    *begins, end = accumulate(map(aligned, sizes), initial=aligned(_TEXT + about["text"]))
    return begins, end


# -- making and opening ------------------------------------------------------------------------------------------------


_calls: Counter[str] = Counter()
"""How often this process has asked for memory, by what it asked for. On all ranks the n-th calls mean the same."""


def open_store(path: Any, max_bytes: Any, length: int, key: str | None, first: Any, shared: str | None = None) -> Store:
    """The store of a dataset: new, or that of the file, or that of another rank.

    Args:
        path: of a file, which is made if it does not exist; None: in memory.
        max_bytes: what samples may take: bytes, a text such as "8 GB", or "50%" of what is free; None: see `bound_of`.
        length: of the dataset.
        key: the user's name for what the loader cannot see.
        first: sample 0 of the dataset.
        shared: a text that the ranks of this machine have in common, and no other dataset of theirs has. They share one
            memory then. None: it is not shared.

    Raises:
        CacheMismatchError: the file belongs to another dataset, or is no cache.
        TypeError: the sample cannot be stored.
        ValueError: ``max_bytes`` means no number of bytes, or more than the machine has.
        OSError: the file cannot be made.
    """
    structure, leaves = flatten(first)
    specs = [(leaf.dtype.str, list(leaf.shape)) for leaf in leaves]
    place = None if path is None else os.path.abspath(os.fspath(path))
    if place is not None and not os.path.isdir(folder := os.path.dirname(place)):
        raise FileNotFoundError(f"path={path!r} of the cache: there is no folder {folder}: create it first")
    about: dict[str, Any] = {"version": VERSION, "length": length, "key": key, "first": exact((structure, leaves))}
    about |= {"structure": structure, "leaves": specs}

    def with_rows(bound: int) -> dict[str, Any]:
        return about | {"rows": min(length, bound // max(1, sum(leaf.nbytes for leaf in leaves))), "bound": bound}

    def make(label: str) -> Store:
        fd, name = open_nameless(label)
        try:
            bound = bound_of(max_bytes, None, name)
            # Another cache without a bound, made before this one was filled, may count the same bytes.
            make_header(fd, with_rows(bound) | ({"least_free": bound // 6} if max_bytes is None else {}))
        except BaseException:
            close_locked(fd)
            raise
        return Store(fd, name, bound, None)

    def join(fd: int) -> Store | None:
        found = read_about(fd)
        try:
            check_same("memory", MAGIC, found, about, os.fstat(fd).st_size)
        except CacheMismatchError:
            return None
        return None if found is None else Store(fd, name_of(fd), found["bound"], None)

    if place is not None:
        bound = bound_of(max_bytes, place)
        return Store(open_file(place, with_rows(bound)), place, bound, place)
    if shared is None:
        return make("cache")
    asked = json.dumps([shared, about, str(max_bytes)])
    _calls[asked] += 1
    told = f"{_calls[asked]} {asked}".encode(errors="replace")
    return meet(f"cache-{blake2b(told, digest_size=16).hexdigest()}", join, make)


def bound_of(max_bytes: Any, path: str | None, memory: str = "") -> int:
    """A number of bytes, of what the memory or the disk has.

    Args:
        max_bytes: see `open_store`. None: `SHARE` of the memory, all of the disk.
        path: of a file; None: in memory.
        memory: its name. It may have a file system of its own with less room, such as /dev/shm; a memfd has none.

    Raises:
        ValueError: it is none, or there is not as much.
        OSError: there is no such folder.
    """
    if path is None:
        limit, room = free_bytes(), shutil.disk_usage(memory)
        free, what = min(limit, Limit(room.free, "the file system of shared memory")) if room.total else limit
    else:
        free, what = shutil.disk_usage(os.path.dirname(path)).free, f"the disk of {path}"
        with contextlib.suppress(OSError):
            free += os.stat(path).st_blocks * 512 if hasattr(os.stat_result, "st_blocks") else os.stat(path).st_size
    if max_bytes is None:
        return int(free * SHARE) if path is None else free
    allowed = "0 or more, a share of what is free, such as '50%'"
    if isinstance(max_bytes, str) and (share := re.fullmatch(r"(\d+(?:\.\d+)?)%", max_bytes)) is not None:
        if not 0 < float(share[1]) <= 100:
            raise ValueError(f"max_bytes is {max_bytes!r}: give more than 0% and at most 100%")
        return int(free * float(share[1]) / 100)
    bound = bytes_of_text(max_bytes, 0, allowed)
    if bound > free:
        raise ValueError(
            f"max_bytes is {max_bytes!r}, and {what} leaves {free:,} bytes: give less, or a share, such as '50%'"
        )
    return bound


def make_header(fd: int, about: dict[str, Any]) -> None:
    """Write the header of an empty store, its MAGIC last."""
    text = json.dumps(about).encode()
    os.ftruncate(fd, 0)
    write_at(fd, UNFINISHED, 0)
    begins, end = layout_of(about | {"text": len(text)})
    os.ftruncate(fd, end)
    write_at(fd, bytes_of(np.zeros(about["length"], _ENTRY).view(np.uint8)), begins[0])
    write_at(fd, _HEAD.pack(UNFINISHED, len(text), zlib.crc32(text)), 0)
    write_at(fd, text, _TEXT)
    write_at(fd, MAGIC, 0)


def read_about(fd: int) -> dict[str, Any] | None:
    """What the header says; None if it is not that of a whole store."""
    head = read_at(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, size, found = _HEAD.unpack(head)
    text = read_at(fd, size, _TEXT) if magic == MAGIC and size < 1 << 30 else b""
    if not text or zlib.crc32(text) != found:
        return None
    about: dict[str, Any] = json.loads(text)
    about["text"] = size
    return about


def open_file(path: str, about: dict[str, Any]) -> int:
    """A descriptor of the file of a cache, which is made if it is not there."""
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    try:
        fd = os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
    except OSError as error:
        raise type(error)(
            error.errno, f"the cache file cannot be opened ({error.strerror}): give a path that you can write to", path
        ) from None
    try:
        check_private(fd, path)
        with locked(fd):
            head = read_at(fd, len(MAGIC), 0)
            if head in (b"", UNFINISHED):
                _make_file(fd, path, about)
            else:
                found = read_about(fd)
                check_same(path, head, found, about, os.fstat(fd).st_size)
                _count_again(fd, found)
    except BaseException:
        close_locked(fd)
        raise
    return fd


def _make_file(fd: int, path: str, about: dict[str, Any]) -> None:
    try:
        make_header(fd, about)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.unlink(path)
        raise OSError(
            error.errno, f"the cache has no room ({error.strerror}): free some, or give another path", path
        ) from None


def _count_again(fd: int, about: Any) -> None:
    """Take what is stored, after a writer has died. A machine that loses power may have written the places of samples,
    and not the counters.
    """
    entries, size = entries_of(fd, about), os.fstat(fd).st_size - layout_of(about)[1]
    places, ends = entries["place"], entries["length"] - entries["place"] - 1
    rows = places[(places > 0) & (places <= about["rows"])].max(initial=0)
    end = ends[(places < 0) & (ends >= 0) & (ends <= size)].max(initial=0)
    counted = np.frombuffer(read_at(fd, 40, _COUNTERS), np.int64)
    begun = int(counted[2])
    counted = counted[3:] if 0 < begun <= places.size and not places[begun - 1] else counted[:2]
    write_at(fd, bytes_of(np.array([*np.maximum(counted, [rows, end]), 0], np.int64)), _COUNTERS)


def entries_of(fd: int, about: dict[str, Any]) -> Array:
    """The entries of the samples, as they are now."""
    return np.frombuffer(read_at(fd, about["length"] * _ENTRY.itemsize, layout_of(about)[0][0]), _ENTRY)


def check_private(fd: int, path: str) -> None:
    """Reject a file that is not this user's own.

    Raises:
        PermissionError: it belongs to another user, or others may write to it.
        CacheMismatchError: it is no file.
    """
    found = os.fstat(fd)
    if not modes.S_ISREG(found.st_mode):
        raise CacheMismatchError(f"{path} is no file: give another path for the cache")
    if not is_private(found):
        raise PermissionError(
            f"the cache file {path} belongs to another user, or other users may write to it: give a path in a folder "
            "of your own"
        )


def check_same(path: str, head: bytes, found: dict[str, Any] | None, about: dict[str, Any], size: int) -> None:
    """Reject a file that is not the cache of this dataset.

    Raises:
        CacheMismatchError: says what differs.
    """
    if head != MAGIC:
        raise CacheMismatchError(f"{path} is there, and is no cache of samples: give another path")
    clear = "delete it, or give another path"
    if found is None:
        raise CacheMismatchError(f"the cache file {path} is damaged: {clear}")
    names = {
        "version": "in version {} of the layout, and this library writes version {}",
        "length": "for a dataset of {} samples, and this one has {}",
        "key": "with key={!r}, and now key={!r} is given",
        "first": "for another dataset: the digest of its first sample is {}, and now it is {}",
    }
    for name, text in names.items():
        if found.get(name) != about[name]:
            raise CacheMismatchError(
                f"the cache file {path} was made {text.format(found.get(name), about[name])}: {clear}"
            )
    if size < layout_of(found)[1]:
        raise CacheMismatchError(f"the cache file {path} was cut off: {clear}")


def attach(name: str, max_bytes: int, path: str | None, about: dict[str, Any], session: str) -> Store | None:
    """The store of another process; None where this one cannot reach it, and reads uncached."""
    try:
        fd = open_named(name)
    except OSError:
        return None
    is_same = False
    with contextlib.suppress(OSError):  # something else, on another machine
        is_same = read_about(fd) == about and os.fstat(fd).st_size >= layout_of(about)[1]
    if is_same:
        return Store(fd, name, max_bytes, path, session)
    close_locked(fd)
    return None
