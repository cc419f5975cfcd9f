"""Samples in one memory or file mapped by all processes: the storage of ``dataset.cache(...)``.

    open_store(path, max_bytes, length, key, first) -> Store     in the process that makes the cache
    Store.read(index) -> sample | MISSING                        in any process that inherits it, or unpickles it
    Store.write(index, sample)                                   stores a sample if there is room
    Store.rows(where) -> rows of ``Store.columns`` | None        many samples at once, if all are there

The layout is the same in anonymous memory (`system.open_memory`) and in a file:

    64 bytes   MAGIC, size and checksum of the text; counters: rows and log bytes in use, last sample written
    text       JSON: the values of `Header`
    entries    for each sample its place, its length in the log, its checksum
    columns    one for each leaf of the first sample: samples of the same structure are rows
    log        all other samples, one after the other: structure and leaves. No pickle.

A place of 0 means missing, r + 1 row r, -1 - o byte o of the log. Nothing is moved or evicted. Rows and log are sparse
until written. Entries are allocated at once, because they are written through the mapping, where a full disk is SIGBUS.

*Samples* are flattened to a node, and leaves: C-contiguous arrays. A node is a text or None, standing for itself, or:

    ["dict", keys, nodes]   ["list", nodes]   ["tuple", nodes]   ["big", digits]      keys: texts, or JSON of others too
    [kind, dtype, shape]    an array, a tensor (with its dtype as torch calls it), bytes, a number, or a list of numbers

Types and values are restored exactly; arrays come back C-contiguous, and own their memory. Other types, subclasses
included, are a TypeError that names the field. Unlike a pickle, stored data cannot run code.

*Writers* hold the file lock, which ends with the process. They write sample, checksum, place (one 8-byte store) and
then the counters. A writer that dies before the place has used nothing; after it, the next writer finds the place of
the last sample and counts it. Samples are written by `write_at`, where a full disk is an error.

*Readers* of a file share a `Session` with a byte for each sample whose checksum is verified or that one of them wrote,
so other programs' samples are verified once. Memory needs no checksums. A corrupt sample counts as missing.

*Ranks* of a machine share one memory with ``shared`` (`shared.meet`), bounded by the rank that made it. Each has its
own session, so it counts its own hits.

*Files* get their MAGIC last, under the lock; if the maker dies, the next process takes over. Files that are no cache,
or that another user owns or may write to, are rejected.

When disk or memory fills up later, the store stops accepting samples, and logs it once. If another program truncates
the file, its readers get a SIGBUS. A process that cannot reach the memory unpickles a store that keeps nothing.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import shutil
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

import numpy as np

from sharded_loader.caching.shared import PROCESSES, Opened, Zeros, is_own, join_first, locked, meet, open_nameless
from sharded_loader.extend import Array
from sharded_loader.extend.data import NUMPY_NAMES, as_numpy, dtype_name, exact, is_plain, is_tensor
from sharded_loader.extend.engine import aligned
from sharded_loader.extend.tools import SMALL, Limit, an, blake2b, bytes_of_text, free_bytes, logger
from sharded_loader.recordio.positioned import BINARY, read_at, write_at

VERSION = 1
"""Version of the layout. Files of other versions are rejected."""

MAGIC, UNFINISHED = b"SLsample", b"SLnosmpl"
_HEAD = struct.Struct("<8sII")
_COUNTERS, _TEXT = 16, 64
_ENTRY = np.dtype([("place", np.int64), ("length", np.uint32), ("checksum", np.uint32)])
_SIZE = struct.Struct("<I")

Path = str | os.PathLike[str] | None

MISSING: Final = object()
"""Returned by `Store.read` for a sample that is not stored."""

LOOK = 32 << 20
"""Bytes of memory written between two checks of free memory, which take 0.1 ms."""

SHARE = 0.75
"""Share of the free memory that an unbounded cache may take. The rest is for batches and the program."""

MOST = (1 << 32) - 1
"""Maximum bytes of a sample, whose length has 32 bits."""


class CacheMismatchError(ValueError):
    """The file of a cache belongs to another dataset, or is not a cache.

    Example:
        >>> issubclass(CacheMismatchError, ValueError)
        True
    """


def bytes_of(array: Array) -> memoryview:
    """Return the memory of a C-contiguous array."""
    return array.reshape(-1).view(np.uint8).data


def checksum(leaves: Iterable[Array]) -> int:
    """Return a 32-bit checksum of some arrays.

    Example:
        >>> checksum([np.arange(3)]) == checksum([np.arange(3)]) != checksum([np.arange(4)])
        True
    """
    found = 0
    for leaf in leaves:
        found = zlib.crc32(bytes_of(leaf), found)
    return found


# -- samples as text and arrays ----------------------------------------------------------------------------------------


Node = list[Any] | str | None

MANY = 8
"""Minimum length of a list of numbers of one type to become one leaf."""

text_of = json.JSONEncoder(separators=(",", ":")).encode
"""Encode a node. `json.dumps` would make an encoder for each sample."""

_NUMBERS: dict[type, type[np.generic]] = {int: np.int64, float: np.float64, bool: np.bool_, complex: np.complex128}
_KEYS = {str, int, bool, type(None)}
_KEPT = "biufcSUmM"
_STACKED = "biufc"


def flat(sample: object) -> tuple[Node, list[Array]]:
    """Return the node of a sample, and its leaves. Raises a TypeError that names a field of another type.

    Example:
        >>> node, leaves = flat({"x": np.zeros(2, np.float32), "name": "a", "label": 3})
        >>> text_of(node), leaves
        ('["dict",["x","name","label"],[["array","<f4",[2]],"a",["int","<i8",[]]]]', [array([0., 0.], ...), array(3)])
    """
    leaves: list[Array] = []
    return _flat(sample, (), leaves), leaves


def _flat(value: object, path: tuple[object, ...], leaves: list[Array]) -> Node:
    """Return the node of a value, and append its leaves. ``path``: its container's path, and its key or position there.

    This code is cold after a JPEG was decoded: 0.5 us become 10.
    """
    if value is None or type(value) is str:
        return value
    if type(value) is dict and _KEYS.issuperset(kinds := set(map(type, value))):
        keys = list(value) if kinds <= {str} else text_of(list(value))  # 1 == True
        return ["dict", keys, [_flat(part, (path, key), leaves) for key, part in value.items()]]
    if (leaf := _leaf(value)) is not None:
        kind, array, *rest = leaf
        leaves.append(np.asarray(array, order="C"))
        return [kind, array.dtype.str, list(array.shape), *rest]
    if type(value) in (list, tuple):
        parts: Any = value
        return [type(value).__name__, [_flat(part, (path, number), leaves) for number, part in enumerate(parts)]]
    if type(value) is int:
        return ["big", str(value)]
    where = f"field {_shown(path)} of the sample" if path else "the sample"
    advice = "make it an array, a tensor, a number, a string, bytes, or a dict, list or tuple of these"
    raise TypeError(f"{where} is {_described(value)}, which a cache cannot store: {advice}, before cache(...)")


def _shown(path: tuple[Any, ...]) -> str:
    return f"{_shown(path[0])}[{path[1]!r}]" if path else ""


def _described(value: Any) -> str:
    """Describe a value that cannot be stored, and why if others of its type can."""
    kind = type(value)
    if kind is dict:
        return f"a dict with {an(type(next(key for key in value if type(key) not in _KEYS)))} as a key"
    if is_tensor(value) and value.requires_grad:
        return f"{an(kind)} that requires grad (call .detach())"
    names = ("dtype", "layout", "device") if is_tensor(value) else ("dtype",)
    details = ", ".join(str(getattr(value, name)) for name in names if hasattr(value, name))
    return f"{an(kind)} ({details})" if details else an(kind)


def _leaf(value: Any) -> tuple[Any, ...] | None:
    """Return the kind, the array, and extra data to restore the value; None if it is not a leaf."""
    kind = type(value)
    if kind in (np.ndarray, np.memmap):
        return ("array", value) if value.dtype.kind in _KEPT else None
    try:
        if kind in _NUMBERS:
            return kind.__name__, np.array(value, _NUMBERS[kind])
        if kind in (list, tuple):
            types = set(map(type, value)) if len(value) >= MANY else set()
            one = types.pop() if len(types) == 1 else None
            return (f"{kind.__name__} of numbers", np.array(value, _NUMBERS[one])) if one in _NUMBERS else None
    except OverflowError:  # an int beyond 64 bits
        return None
    if kind is bytes:
        return "bytes", np.frombuffer(value, np.uint8)
    if isinstance(value, np.generic) and value.dtype.kind in _KEPT:
        array = np.asarray(value)
        # NumPy drops zeros at the end of texts.
        is_cut = isinstance(value, (np.str_, np.bytes_)) and len(array[()]) < len(value)
        return None if is_cut else ("scalar", array)
    if is_tensor(value) and is_plain([value]) and not value.requires_grad:
        return "tensor", as_numpy(value.resolve_conj().resolve_neg().contiguous()), dtype_name(value.dtype)
    return None


def _tensor(array: Array, name: str) -> object:
    import torch

    return torch.from_numpy(array).view(getattr(torch, name))  # NumPy has the dtype, or integers of its size


_BUILD: dict[str, Callable[..., object]] = {
    **{kind.__name__: np.ndarray.item for kind in _NUMBERS},
    "list of numbers": np.ndarray.tolist,
    "tuple of numbers": lambda array: tuple(array.tolist()),
    "bytes": np.ndarray.tobytes,
    "array": lambda array: array,
    "scalar": lambda array: array[()],
    "tensor": _tensor,
}


def _keys(found: str | list[str]) -> Any:
    return json.loads(found) if isinstance(found, str) else found


def unflatten(node: Node, take: Callable[[str, list[int]], Array]) -> object:
    """Rebuild a sample from its node.

    ``take`` returns the next leaf, of a given dtype and shape; arrays of the sample are not copied from it.

    Example:
        >>> node, leaves = flat((np.arange(3), "a", [0.5] * 9))
        >>> rest = iter(leaves)
        >>> unflatten(node, lambda dtype, shape: next(rest))
        (array([0, 1, 2]), 'a', [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    """
    if not isinstance(node, list):
        return node
    kind, first, *rest = node
    if kind == "dict":
        return dict(zip(_keys(first), [unflatten(part, take) for part in rest[0]], strict=True))
    if kind in ("list", "tuple"):
        parts = [unflatten(part, take) for part in first]
        return parts if kind == "list" else tuple(parts)
    if kind == "big":
        return int(first)
    shape, *extra = rest
    return _BUILD[kind](take(first, shape), *extra)


def fits_columns(node: Node) -> bool:
    """Return True if `batched` builds from columns the same batch as the default batchify from samples.

    Example:
        >>> fits_columns(flat((1, "a"))[0]), fits_columns(flat([1, 2])[0])
        (True, False)
    """
    if not isinstance(node, list):
        return node is not None
    kind, first, *rest = node
    if kind in ("dict", "tuple"):
        parts = rest[0] if kind == "dict" else first
        return bool(parts) and all(map(fits_columns, parts))
    if kind == "tensor":
        return rest[1] in NUMPY_NAMES
    return kind in ("array", "scalar", *(one.__name__ for one in _NUMBERS)) and np.dtype(first).kind in _STACKED


def batched(node: Node, columns: Iterator[Array], count: int) -> object:
    """Return the batch of ``count`` samples of one structure, whose leaves are these columns.

    Example:
        >>> batched(flat((1, "a"))[0], iter([np.array([1, 2])]), 2)
        [array([1, 2]), ['a', 'a']]
    """
    if not isinstance(node, list):
        return [node] * count
    kind, first, *rest = node
    if kind == "dict":
        return {key: batched(part, columns, count) for key, part in zip(_keys(first), rest[0], strict=True)}
    return [batched(part, columns, count) for part in first] if kind == "tuple" else next(columns)


# -- the store ---------------------------------------------------------------------------------------------------------


class Session(Zeros):
    """State shared by processes that have inherited or unpickled one store.

    Attributes:
        full: an array of one number: 1 if the store accepts no more samples.
        counts: hits and misses, by process.
        sound: per sample, 1 if its checksum has been verified.
    """

    def __init__(self, length: int, name: str = "", token: bytes = b"") -> None:
        begin = 16 * (PROCESSES + 2)
        super().__init__("cache-session", begin + length, name, token)
        numbers = self.memory[16:begin].view(np.int64).reshape(-1, 2)
        self.full, self.counts, self.sound = numbers[0, :1], numbers[1:], self.memory[begin:]

    def __reduce__(self) -> Any:
        return Session, (self.sound.size, self.name, self.token)


class Header(NamedTuple):
    """Text of a store: layout version, dataset length, user's key, digest and structure of sample 0, dtypes and shapes.

    ``rows`` is the capacity in rows, and ``bound`` the maximum bytes of samples; ``least_free`` bytes of memory must
    stay free for the store to grow.
    """

    version: int
    length: int
    key: str | None
    first: str
    structure: str
    leaves: list[list[Any]]
    rows: int = 0
    bound: int = 0
    least_free: int = 0


OWN = 6
"""Number of fields of a header that say what the samples are, and not how many have room."""


class Layout:
    """Offsets of the parts of a store. The log ends the header and the mapping. ``text_bytes``: size of the header."""

    def __init__(self, header: Header, text_bytes: int) -> None:
        self.header = header
        nbytes = [_nbytes(*leaf) for leaf in header.leaves]
        self.row_bytes = sum(nbytes)
        sizes = [header.length * _ENTRY.itemsize, *(header.rows * size for size in nbytes)]
        begins = accumulate(map(aligned, sizes), initial=aligned(_TEXT + text_bytes))
        self.entries, *self.columns, self.log = begins


class Store:
    """Samples, by index, in a file or memory whose header is written.

    ``max_bytes`` limits the samples; ``path`` is None for memory, and ``session`` None for a new one.
    """

    def __init__(
        self, opened: Opened, layout: Layout, max_bytes: int, path: str | None = None, session: Session | None = None
    ) -> None:
        self._opened, self.fd, self.name = opened, opened.fd, opened.name
        self.max_bytes, self.path, self._layout, header = max_bytes, path, layout, layout.header
        self.node: Node = json.loads(header.structure)
        self._in_bulk = fits_columns(self.node)
        memory = opened.map(layout.log)
        self._counters = memory[_COUNTERS : _COUNTERS + 24].view(np.int64)
        self._entries = np.ndarray(header.length, _ENTRY, memory, layout.entries)
        self.places = self._entries["place"]
        self.columns = [
            np.ndarray((header.rows, *shape), dtype, memory, begin)
            for (dtype, shape), begin in zip(header.leaves, layout.columns, strict=True)
        ]
        self.session = session or Session(header.length)
        if path is None:
            self.session.sound[:] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return attach, (self.name, self._layout.header, self.max_bytes, self.path, self.session)

    @property
    def used_bytes(self) -> int:
        """Bytes taken by the stored samples."""
        rows, end = self._taken()
        return rows * self._layout.row_bytes + end

    def _taken(self) -> tuple[int, int]:
        """Return the rows and log bytes in use. The last writer may have died before counting its sample."""
        rows, end, last = self._counters.tolist()
        place = int(self.places[last]) if last < self._layout.header.length else 0
        if place < 0:
            end = max(end, int(self._entries["length"][last]) - 1 - place)
        return max(rows, place), end

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, index: int) -> object:
        """Return a sample, or `MISSING`."""
        place = int(self.places[index])
        if place == 0:
            return MISSING
        found = self._row(index, place - 1) if place > 0 else self._record(index, -1 - place)
        if found is MISSING:  # corrupt: it is read and stored again
            with locked(self.fd) as alone:
                if alone and self.places[index] == place:  # no other program has stored it since
                    self.places[index] = 0
            logger.warning("sample %d of %s is damaged in the cache: it is read again", index, self.path or "memory")
        return found

    def rows(self, where: Array) -> Array | None:
        """Return the rows of samples; None unless all are rows."""
        places = self.places[where]
        if not self._in_bulk or not where.size or int(places.min()) <= 0:
            return None
        for index in where[self.session.sound[where] == 0].tolist():
            if self.read(index) is MISSING:
                return None
        places -= 1
        return places

    def _row(self, index: int, row: int) -> object:
        leaves = [column[row, ...].copy() for column in self.columns] if row < self._layout.header.rows else None
        if leaves is None or not self._is_sound(index, leaves):
            return MISSING
        rest = iter(leaves)
        return unflatten(self.node, lambda dtype, shape: next(rest))

    def _record(self, index: int, offset: int) -> object:
        nbytes = int(self._entries["length"][index])
        at = min(self._layout.log + offset, 1 << 62)  # beyond all files, if a place is damaged
        raw = np.frombuffer(read_at(self.fd, nbytes, at), np.uint8)
        if raw.size < _SIZE.size or not self._is_sound(index, [raw]):
            return MISSING
        at = _SIZE.size + _SIZE.unpack_from(raw.data)[0]

        def take(dtype: str, shape: list[int]) -> Array:
            nonlocal at
            begin, at = at, at + _nbytes(dtype, shape)
            return np.ndarray(shape, dtype, raw[begin:at].copy())

        return unflatten(json.loads(raw[_SIZE.size : at].tobytes()), take)

    def _is_sound(self, index: int, leaves: list[Array]) -> bool:
        sound = self.session.sound
        if not sound[index] and checksum(leaves) == int(self._entries["checksum"][index]):
            sound[index] = 1
        return bool(sound[index])

    # -- writing ---------------------------------------------------------------------------------------------

    def write(self, index: int, sample: object) -> None:
        """Store a sample, if there is room and it is not stored. Raises a TypeError that names an unsupported field."""
        full = self.session.full
        if full[0] or self.places[index]:
            return
        node, leaves = flat(sample)
        is_row = node == self.node and self._taken()[0] < self._layout.header.rows
        if not is_row:
            text = text_of(node).encode()
            record = b"".join([_SIZE.pack(len(text)), text, *map(bytes_of, leaves)])
            leaves = [np.frombuffer(record, np.uint8)]
        found = 0 if self.path is None else checksum(leaves)
        with locked(self.fd) as alone:  # the system writes for one process at a time, in any case
            try:
                if alone and not self.places[index] and not full[0]:
                    self._write(index, leaves, found, is_row)
            except OSError as error:
                full[0] = 1
                what = self.path or "memory"
                logger.warning("the cache in %s is full (%s): it takes no more samples", what, error.strerror)

    def _write(self, index: int, leaves: list[Array], found: int, is_row: bool) -> None:
        layout, (rows, end) = self._layout, self._taken()
        nbytes, before = sum(leaf.nbytes for leaf in leaves), rows * layout.row_bytes + end
        if before + nbytes > self.max_bytes or nbytes > MOST or (is_row and rows >= layout.header.rows):
            usual = layout.row_bytes if rows else 0
            if self.max_bytes - before <= max(usual, before // 64):  # checking for each sample takes 20 to 60 us
                self.session.full[0] = 1
            return
        if self.path is None and (before + nbytes) // LOOK > before // LOOK:
            limit = free_bytes()
            if limit.nbytes < max(SMALL, layout.header.least_free):
                raise OSError(errno.ENOMEM, f"{limit.what} leaves {limit.nbytes:,} bytes")
        begins = [begin + rows * leaf.nbytes for begin, leaf in zip(layout.columns, leaves, strict=False)]
        for begin, leaf in zip(begins if is_row else [layout.log + end], leaves, strict=True):
            write_at(self.fd, bytes_of(leaf), begin)
        self._entries["length"][index], self._entries["checksum"][index] = nbytes, found
        self.session.sound[index] = 1
        self._counters[:] = rows, end, index  # the sample before may not have been counted
        self.places[index] = rows + 1 if is_row else -1 - end
        self._counters[:2] = self._taken()


def _nbytes(dtype: str, shape: Iterable[int]) -> int:
    return np.dtype(dtype).itemsize * math.prod(shape)


# -- making and opening ------------------------------------------------------------------------------------------------


_calls: Counter[str] = Counter()
"""Number of requests for memory by this process, by request: the n-th equal requests on all ranks belong together."""


def open_store(
    path: Path, max_bytes: int | str | None, length: int, key: str | None, first: object, shared: str | None = None
) -> Store:
    """Open the store of a dataset: new, from the file, or shared with another rank.

    Args:
        path: file, created if absent; None: in memory.
        max_bytes: bytes, a text such as "8 GB", or "50%" of the free space; None: see `bound_of`.
        length: of the dataset.
        key: user's name for what the loader cannot see.
        first: sample 0 of the dataset.
        shared: text that identifies this dataset on the ranks of this machine, which share one memory; None: private.

    Raises:
        CacheMismatchError: the file belongs to another dataset, or is not a cache.
        TypeError: the sample cannot be stored.
        ValueError: ``max_bytes`` is invalid, or more than the machine has.
        OSError: the file cannot be created.
    """
    node, leaves = flat(first)
    structure, row_bytes = text_of(node), sum(leaf.nbytes for leaf in leaves)
    specs = [[leaf.dtype.str, list(leaf.shape)] for leaf in leaves]
    header = Header(VERSION, length, key, exact((structure, leaves)), structure, specs)

    def with_bound(bound: int) -> Header:
        # Another unbounded cache, made before this one was filled, may count on the same bytes.
        least_free = bound // 6 if max_bytes is None and path is None else 0
        return header._replace(rows=min(length, bound // max(1, row_bytes)), bound=bound, least_free=least_free)

    def make(label: str) -> Store:
        opened = open_nameless(label)
        bound = bound_of(max_bytes, None, opened.name)
        return Store(opened, make_header(opened.fd, with_bound(bound)), bound)

    if path is not None:
        place = os.path.abspath(os.fspath(path))
        bound = bound_of(max_bytes, place)
        return open_file(place, with_bound(bound), bound)
    if shared is None:
        return make("cache")
    asked = json.dumps([shared, header, str(max_bytes)])
    _calls[asked] += 1
    told = f"{_calls[asked]} {asked}".encode(errors="replace")
    return meet(f"cache-{blake2b(told, digest_size=16).hexdigest()}", partial(join, header[:OWN]), make)


def bound_of(max_bytes: int | str | None, path: str | None, memory: str = "") -> int:
    """Return the maximum bytes of a store. ``max_bytes``: see `open_store`; None: `SHARE` of memory, or all of the
    disk.

    ``memory`` names the shared memory, whose file system may be smaller, such as /dev/shm; a memfd has none. Raises
    ValueError if ``max_bytes`` is invalid or too large, OSError if the folder does not exist.
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
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", str(max_bytes))
    if share is not None and 0 < float(share[1]) <= 100:
        return int(free * float(share[1]) / 100)
    bound = bytes_of_text(max_bytes, 0, allowed)
    if bound > free:
        raise ValueError(
            f"max_bytes is {max_bytes!r}, and {what} leaves {free:,} bytes: give less, or a share, such as '50%'"
        )
    return bound


def make_header(fd: int, header: Header) -> Layout:
    """Write the header of an empty store, its MAGIC last."""
    text = json.dumps(header).encode()
    layout = Layout(header, len(text))
    os.ftruncate(fd, 0)
    write_at(fd, UNFINISHED, 0)
    os.ftruncate(fd, layout.log)
    write_at(fd, bytes(header.length * _ENTRY.itemsize), layout.entries)
    write_at(fd, _HEAD.pack(UNFINISHED, len(text), zlib.crc32(text)), 0)
    write_at(fd, text, _TEXT)
    write_at(fd, MAGIC, 0)
    return layout


def read_layout(fd: int) -> Layout | None:
    """Read the header; None if the store is not complete."""
    magic, size, found = _HEAD.unpack(read_at(fd, _HEAD.size, 0).ljust(_HEAD.size, b"\0"))
    text = read_at(fd, size, _TEXT) if magic == MAGIC and size < 1 << 30 else b""
    values = json.loads(text) if text and zlib.crc32(text) == found else ()
    return Layout(Header(*values), size) if len(values) == len(Header._fields) else None


def open_file(path: str, header: Header, max_bytes: int) -> Store:
    """Open the store in a file, and create it if absent."""
    is_new = False
    try:
        opened = Opened(os.open(path, os.O_RDWR | os.O_CREAT | BINARY | getattr(os, "O_NOFOLLOW", 0), 0o600), path)
        is_mine = is_own(os.fstat(opened.fd))
        with locked(opened.fd):
            head = read_at(opened.fd, len(MAGIC), 0)
            is_new = is_mine and head in (b"", UNFINISHED)
            layout = make_header(opened.fd, header) if is_new else None
    except OSError as error:
        if is_new:
            del opened  # Windows deletes no open file
            with contextlib.suppress(OSError):
                os.unlink(path)
        why = f"the cache file cannot be opened ({error.strerror}): give a path that you can write to, with free space"
        raise type(error)(error.errno, why, path) from None
    if not is_mine:
        text = f"the cache file {path} belongs to another user, or other users may write to it"
        raise PermissionError(f"{text}: give a path in a folder of your own")
    if layout is None and head != MAGIC:
        raise CacheMismatchError(f"{path} is there, and is no cache of samples: give another path")
    return Store(opened, layout or _checked_layout(opened.fd, path, header), max_bytes, path)


def _checked_layout(fd: int, path: str, header: Header) -> Layout:
    """Return the layout of an existing file. Raises a CacheMismatchError that says how it differs from this dataset."""
    layout, size, clear = read_layout(fd), os.fstat(fd).st_size, "delete it, or give another path"
    if layout is None or size < layout.log:
        raise CacheMismatchError(f"the cache file {path} is damaged, or was cut off: {clear}")
    facts = ("version of the layout", "number of samples", "key", "digest of the first sample")
    for fact, was, now in zip(facts, layout.header, header, strict=False):
        if was != now:
            raise CacheMismatchError(f"the {fact} of the cache file {path} is {was!r}, and here {now!r}: {clear}")
    # After a power failure, the places of samples may be on disk without the counters.
    with locked(fd):
        entries = np.frombuffer(read_at(fd, header.length * _ENTRY.itemsize, layout.entries), _ENTRY)
        places, ends = entries["place"], entries["length"] - entries["place"] - 1
        rows = places[(places > 0) & (places <= layout.header.rows)].max(initial=0)
        end = ends[(places < 0) & (ends >= 0) & (ends <= size - layout.log)].max(initial=0)
        counted = np.frombuffer(read_at(fd, 16, _COUNTERS), np.int64)
        write_at(fd, bytes_of(np.array([*np.maximum(counted, [rows, end]), 0], np.int64)), _COUNTERS)
    return layout


def join(header: tuple[Any, ...], opened: Opened, *more: Any) -> Store | None:
    """Return the store in opened memory, if its header begins with these values; ``more`` goes to `Store`."""
    layout = read_layout(opened.fd)
    if layout is None or layout.header[: len(header)] != header or os.fstat(opened.fd).st_size < layout.log:
        return None
    return Store(opened, layout, *(more or [layout.header.bound]))


def attach(name: str, header: Header, max_bytes: int, path: str | None, session: Session) -> Store:
    """Open the store of another process, or one that keeps nothing if it is out of reach."""
    found = join_first([name], lambda opened: join(header, opened, max_bytes, path, session))
    if found is None:
        opened = open_nameless("cache")
        found = Store(opened, make_header(opened.fd, header._replace(rows=0, bound=0)), 0)
    return found
