"""`ShardDataset`: random access to the samples of many shards, wherever they are.

    patterns, lists, index files --find_shards (`lists`)--> URLs, versions, format, and known lengths
    a shard --format.index, or its entry in an index file--> sample offsets
    index --search in the cumulative lengths--> shard, row --format.read(file, index, rows)--> sample

Opening reads no samples. Shards without a listed length are indexed when the dataset is made, from a header or footer.
Formats that must scan a whole shard (``scans``) do so only for local shards; remote ones wait for `lengths`.

A process opens a shard at its first read and keeps the last `MAX_OPEN` ones. Pickling sends URLs, lengths and tags;
workers open their own files. After each read, time, size and inode of a local shard are compared with those it was
indexed with. So replaced or modified shards raise an error instead of yielding wrong samples.

With a cache, the loader announces the order (`follow`), and a thread of the main process prefetches (`read_ahead`).
Workers open cached shards, and download missing ones themselves.

Errors are a `ShardError` that names the shard, also a FileNotFoundError or PermissionError where that applies.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, TypeVar

import numpy as np

from sharded_loader.extend import Dataset, Empty, Int64s
from sharded_loader.extend.data import NOT_IN_BULK, bulk, bulk_method, checked_index, checked_indices
from sharded_loader.extend.tools import host_clock, refuse_arguments, warn
from sharded_loader.recordio.positioned import checked_parts, is_rewritten
from sharded_loader.storage import indexes
from sharded_loader.storage.cache import TRIES, ShardCache
from sharded_loader.storage.files import LocalFile, Options, ShardError, ShardFile, Stat, local_path, local_stat, shown
from sharded_loader.storage.indexes import Format, Index, Indexes, by_part, in_order
from sharded_loader.storage.lists import FORMATS, FoundShards, Place, absolute, find_shards, parse_trust
from sharded_loader.storage.parts import UNKNOWN, is_same, with_tags
from sharded_loader.storage.read_ahead import ReadAhead
from sharded_loader.storage.stores import ObjectStore, RemoteFile
from sharded_loader.storage.tables import TableFormat, batch_of
from sharded_loader.vision import PictureDecoder

MAX_OPEN = 32
"""Maximum number of shards that a process keeps open."""

IDLE_SECONDS = 10.0
"""Seconds without a read before a shard that the cache has evicted is closed, to free its disk space. Closing at once
would download a shard for each sample if the window of shards exceeds the cache."""

INDEX_THREADS = 16
"""Threads that index shards."""

COSTLY_BYTES = 32 << 20
"""Bytes to read for counting samples above which a warning is given: a second on a common connection."""

Made = TypeVar("Made")


class ShardDataset(Dataset):
    """Map-style dataset over shards on local disks or in an object store.

    Args:
        urls: pattern such as ``"s3://bucket/train-*.tar"``, or list of URLs and paths, which also sets the order of the
            shards. A name ending in ``.json`` is a list of shards (MosaicML's ``index.json``, WebDataset's ``wids``, or
            an array of names), one ending in ``.index`` an index file (`write_index`).
        format: "tar", "parquet", "arrow", "mds", "records", "lines", or an object with ``index`` and ``read``. By
            default it is derived from the file names.
        storage_options: options of the fsspec file system.
        cache: keeps whole shards of an object store on disk. Without it, each sample is a range request.
        index_folder: directory for indexes; by default inside the cache, or the user's cache directory.
        columns: names of the columns to read from Parquet and Arrow files; by default all. Other columns of Parquet
            files are not transferred.
        trust: places outside their own folder and host that lists and index files may refer to: a URL or path prefix, a
            list, or a dict with storage options for each; True allows all. ``storage_options`` are only sent to the
            hosts of ``urls``.
        decode: ``"cpu"`` or ``"cuda"`` decodes the fields of tar samples that end in ``jpg``, ``jpeg``, ``png`` or
            ``webp``, as `ImageRecordDataset` does.
        size: as in `ImageFolderDataset`, with ``decode="cpu"``. It applies to all decoded fields, including masks.

    Attributes:
        retries: number of requests of this process that were retried.

    Raises:
        ShardError: A shard cannot be indexed. Also a FileNotFoundError if nothing matches or a shard is missing, and a
            PermissionError if access is denied.
        TypeError, ValueError: ``columns`` is not a list of names, or the shards are not tables. ``decode`` is unknown,
            or the shards are not tar files. Reading raises it for a picture that does not decode.
        ImportError: Pillow, or the decoder for CUDA, is not installed.

    Example:
        >>> import io, os, tarfile, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for shard in range(2):
        ...         with tarfile.open(os.path.join(folder, f"{shard}.tar"), "w") as tar:
        ...             for i in range(3):
        ...                 member = tarfile.TarInfo(f"{shard}{i}.txt")
        ...                 member.size = 1
        ...                 tar.addfile(member, io.BytesIO(str(i).encode()))
        ...     dataset = ShardDataset(os.path.join(folder, "*.tar"), index_folder=folder)
        ...     len(dataset), dataset.lengths.tolist(), dataset[4]
        (6, [3, 3], {'__key__': '11', 'txt': b'1'})
    """

    _ahead: ReadAhead | None = None

    def __init__(
        self,
        urls: Place | Iterable[Place],
        format: str | Format | None = None,
        storage_options: Options | None = None,
        cache: ShardCache | None = None,
        index_folder: Place | None = None,
        columns: Iterable[str] | None = None,
        trust: bool | Place | Iterable[str] | Mapping[str, Options] = False,
        decode: str | None = None,
        size: int | tuple[int, int] | None = None,
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments("ShardDataset", unknown, type(self).__init__)
        if cache is not None and not isinstance(cache, ShardCache):
            raise TypeError(f"cache is {cache!r}; give a ShardCache: ShardCache(folder, max_bytes)")
        store = ObjectStore(storage_options, parse_trust(trust))
        patterns = [urls] if isinstance(urls, (str, bytes, os.PathLike)) else list(urls)
        found = find_shards(store, patterns, format)
        if columns is not None:
            if not isinstance(found.format, TableFormat):
                name = found.format.name
                raise ValueError(f"columns={columns!r}: shards of the format {name} have no columns; leave it out")
            found = found._replace(format=found.format.with_columns(columns))
        if size is not None and decode is None:
            raise ValueError(f'size={size!r} is for pictures of tar shards: give decode="cpu", or leave it out')
        self._decode = None if decode is None else PictureDecoder(decode, size=size)
        if decode is not None and found.format.name != "tar":
            raise ValueError(
                f"decode={decode!r}: it is for tar shards, and these are {found.format.name}; leave it out"
            )
        folder = cache.folder / "indexes" if cache is not None else indexes.default_folder()
        kept = Indexes(folder if index_folder is None else Path(index_folder))
        self._shards = shards = Shards(found, store, cache, kept)
        if not shards.scans or all(shards.paths[shard] is not None for shard in shards.uncounted()):
            _ = self.lengths  # from heads and footers, or from shards on this machine

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_ahead"}

    @property
    def _fingerprint(self) -> str:
        """Identity of the data for `data.inspection`: names, sizes and store tags, but no folders or local times."""
        shards = self._shards
        names = [url.split("?")[0].replace("\\", "/").rsplit("/", 1)[-1] for url in shards.urls]
        tags = [stat.tag if path is None else "" for stat, path in zip(shards.stats, shards.paths, strict=True)]
        facts = zip(names, tags, [stat.size for stat in shards.stats], self.lengths.tolist(), strict=True)
        return repr([*facts, *(getattr(shards.format, "columns", None) or ())])

    @property
    def lengths(self) -> Int64s:
        """Number of samples in each shard, for `ShardShuffleSampler`.

        Shards without a listed length are indexed now. Remote tar, Arrow, RecordIO and text files are read completely,
        once.
        """
        return self._shards.lengths

    @property
    def group_lengths(self) -> Int64s:
        """Number of samples in each row group or record batch of all shards, for `ShardShuffleSampler`.

        Its ``window`` then counts groups instead of shards. For formats without groups, same as `lengths`.
        """
        if not isinstance(self._shards.format, TableFormat):
            return self.lengths
        return np.concatenate(list(_side_by_side(self._shards.groups_of, range(len(self._shards.urls)))))

    @cached_property
    def _ends(self) -> Int64s:
        return np.cumsum(self.lengths)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        # A subclass may override __getitem__ and call this one: its __getitems__ would recurse.
        read = type(self).__getitems__ if bulk_method(self, "__getitems__") else ShardDataset.__getitems__
        return read(self, [checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return many samples with one call of the format per shard."""
        numbers = checked_indices(indices, len(self))
        order, parts = by_part(numbers, self._ends)
        rows = [(shard, rows.tolist()) for shard, rows in parts]
        samples = in_order(order, self._shards.read(rows, self._shards.format.read))
        if self._decode is None:
            return samples
        places = [shown(self._shards.urls[shard]) for shard in np.searchsorted(self._ends, numbers, side="right")]
        return list(map(self._decode.in_fields, samples, places))

    def _in_columns(self, indices: object, empty: Empty) -> Any:
        """Return a batch of table rows in memory from ``empty``, equal to the default batchify of its samples."""
        tables = self._shards.format
        order, parts = by_part(checked_indices(indices, len(self)), self._ends)
        if not isinstance(tables, TableFormat) or not parts:
            return NOT_IN_BULK
        return batch_of(list(self._shards.read(parts, tables.pick)), order, empty)

    def __repr__(self) -> str:
        size = self._shards.cost_of_lengths()
        count = f"not counted yet: len() reads {size:,} bytes" if size else f"{len(self)} samples"
        return f"ShardDataset({len(self._shards.urls)} {self._shards.format.name} shards, {count})"

    @property
    def retries(self) -> int:
        """Number of requests of this process that were retried. `ShardedDataLoader.stats` includes the workers."""
        return self._shards.store.retries

    def follow(
        self,
        batches: Callable[[int], object],
        position: Callable[[], int | None],
        later: Callable[[int], object] = lambda number: None,
    ) -> None:
        """Start prefetching shards into the cache in reading order. `ShardedDataLoader` calls this for each epoch.

        Args:
            batches: function from a batch number to its indices, or None after the last batch. Called in another
                thread.
            position: function that returns the number of the next batch, or None once the epoch is abandoned.
            later: like ``batches``, for the next epoch.
        """
        self._stop_following()
        shards, cache = self._shards, self._shards.cache
        if cache is None or None not in shards.paths:
            return
        first = self._fetched_for(batches, position() or 0) or []
        if excess := shards.excess(first):
            advice = "Give a larger max_bytes, or read with ShardShuffleSampler and a smaller window"
            needed = f"a batch needs {len(first)} shards of {excess:,} bytes together, and {cache.limit_text}"
            return warn(f"{needed}: so samples are read one by one from the store, which is slower. {advice}")
        needs, needs_later = partial(self._fetched_for, batches), partial(self._fetched_for, later)
        self._ahead = ReadAhead(shards, needs, position, needs_later)
        self._ahead.start()

    def _fetched_for(self, order: Callable[[int], object], number: int) -> list[int] | None:
        """Return the remote shards that a batch needs; None after the last batch."""
        try:
            found = order(number)
            if found is None:
                return None
            needed = np.unique(np.searchsorted(self._ends, checked_indices(found, len(self)), side="right"))
        except (IndexError, TypeError):
            return []  # a bad index: the reader of this batch reports it
        return [shard for shard in needed.tolist() if self._shards.paths[shard] is None]

    def _stop_following(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def close(self) -> None:
        """Close all shards and connections. Later reads open them again."""
        self._stop_following()
        self._shards.close()

    def write_index(self, url: Place | None = None, progress: Callable[[int], None] = lambda done: None) -> str:
        """Write the indexes of all shards to one file, which later datasets open with one small request.

        A dataset finds ``shards.index`` beside its shards, or can be made from the file's URL alone. Run it again after
        adding or replacing shards: only those are read.

        Args:
            url: destination, ending in ``.index``; by default ``shards.index`` in the innermost common folder of the
                shards.
            progress: called with the number of finished shards.

        Returns:
            The URL of the file.

        Raises:
            OSError: It cannot be written, or a shard cannot be indexed.
            ValueError: The shards have no common folder, or the name has another ending.

        Example:
            >>> import os, tempfile
            >>> with tempfile.TemporaryDirectory() as folder:
            ...     for name in ("a.txt", "b.txt"):
            ...         with open(os.path.join(folder, name), "w") as file:
            ...             _ = file.write("one line\\nanother\\n")
            ...     dataset = ShardDataset(os.path.join(folder, "*.txt"), index_folder=folder)
            ...     written = dataset.write_index()
            ...     os.path.basename(written), len(ShardDataset(written, index_folder=folder))
            ('shards.index', 4)
        """
        shards, found = self._shards, list[tuple[int, bytes]]()
        where = absolute(os.fspath(indexes.index_url(shards.urls) or "" if url is None else url))
        if not where.endswith(indexes.SUFFIX):
            raise ValueError(f"give the index file a name that ends in {indexes.SUFFIX}, not {where!r}")
        for one in _side_by_side(shards.portable_index, range(len(shards.urls))):
            found.append(one)
            progress(len(found))
        shards.store.write(where, indexes.content(where, shards.format.name, shards.urls, shards.stats, found))
        return where


class Shards:
    """Shards with their indexes, and those that this process has open.

    ``paths`` has the local path of each shard, or None; ``scans`` is True if the format reads whole shards to index
    them.
    """

    def __init__(self, found: FoundShards, store: ObjectStore, cache: ShardCache | None, kept: Indexes) -> None:
        self.format, stats, self._listed, self._entries = found
        self.urls, self.stats, self.paths = list(stats), with_tags(stats), list(map(local_path, stats))
        self.store, self.cache, self._indexes = store, cache, kept
        self.scans: bool = getattr(self.format, "scans", True)
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock, self._shared = os.getpid(), threading.Lock(), dict[str, Any]()
        self._open: OrderedDict[tuple[int, bool], tuple[ShardFile, Index, float]] = OrderedDict()  # float: last read

    def __getstate__(self) -> dict[str, object]:
        own = ("_pid", "_lock", "_shared", "_open")
        return {name: value for name, value in vars(self).items() if name not in own} | {"machine": platform.node()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("machine") != platform.node():  # copies of the shards have other times and inodes
            places = zip(state["stats"], state["paths"], strict=True)
            state["stats"] = [stat if path is None else Stat(stat.size, "") for stat, path in places]
        vars(self).update(state)
        self._begin()

    def close(self) -> None:
        with self._lock:
            opened, self._open, self._shared = self._open, OrderedDict(), {}
        for file, _, _ in opened.values():
            file.close()
        self.store.close()

    # -- how many samples there are -----------------------------------------------------------------------------------

    @cached_property
    def lengths(self) -> Int64s:
        """Number of samples in each shard."""
        lengths: Int64s = np.array(self._listed, np.int64)
        uncounted, size = self.uncounted(), self.cost_of_lengths()
        if size > COSTLY_BYTES:
            first = shown(self.urls[uncounted[0]])
            read = f"{size:,} bytes of {len(uncounted):,} shards are read once, such as {first}"
            advice = "Write an index file beside the shards, and later runs read a few kilobytes: sharded-loader index"
            warn(f"to count the samples, {read}. {advice}")
        lengths[uncounted] = [int(index["length"]) for index in _side_by_side(self._index, uncounted)]
        return lengths

    def uncounted(self) -> list[int]:
        """Return the shards whose length is not listed."""
        return [shard for shard, length in enumerate(self._listed) if length < 0]

    def cost_of_lengths(self) -> int:
        """Return the number of bytes to read from a store to compute `lengths`."""
        if not self.scans or "lengths" in vars(self):
            return 0
        return self._size([shard for shard in self.uncounted() if not self._is_index_saved(shard)])

    def excess(self, shards: Sequence[int]) -> int:
        """Return the total bytes of these shards if the cache cannot hold them together, otherwise 0."""
        size = self._size(shards)
        return size if self.cache is not None and size > self.cache.max_bytes else 0

    @cached_property
    def _are_too_many(self) -> bool:
        return self.excess(range(len(self.urls))) > 0

    def _size(self, shards: Sequence[int]) -> int:
        return sum(self.stats[shard].size for shard in shards if self.paths[shard] is None)

    def groups_of(self, shard: int) -> Int64s:
        """Return the number of samples in each group of a table."""
        index = self._index(shard)
        try:
            return np.diff(index["ends"], prepend=0)
        except Exception as error:
            self._raise_naming_index(shard, error)

    # -- samples ------------------------------------------------------------------------------------------------------

    def read(self, parts: Sequence[tuple[int, object]], read: Callable[[ShardFile, Index, Any], Any]) -> Iterator[Any]:
        """Yield the results of ``read``, a method of the format, for rows of shards, one shard after the other."""
        in_parts = self.excess([shard for shard, _ in parts]) > 0
        for shard, rows in parts:
            for _ in range(TRIES):
                file, index = self._opened(shard, in_parts)
                try:
                    found = read(file, index, rows)
                except Exception as error:
                    if self._check(shard, file, index):  # first: errors of a changed shard are meaningless
                        self._raise_naming_index(shard, error)
                else:
                    if self._check(shard, file, index):
                        yield from found
                        break
                with self._lock:
                    self._open.pop((shard, in_parts), None)
            else:
                advice = "give another cache folder"
                raise ShardError(f"{file.name} is written to again and again by another program: {advice}")

    def _raise_naming_index(self, shard: int, error: Exception) -> NoReturn:
        """Raise a format's error; if the shard was read through an index file, as one that also names that file."""
        entry = self._entries.get(self.urls[shard])
        if entry is None or type(self.format) not in FORMATS or isinstance(error, ImportError):
            raise error
        kind, said = (type(error), error) if isinstance(error, ShardError) else (ShardError, repr(error))
        advice = "if the shard is whole, write that file again (sharded-loader index), or delete it"
        name, file = shown(self.urls[shard]), shown(entry.file)
        raise kind(f"{name}: {said}. It was read by its index in {file}: {advice}") from error

    def _opened(self, shard: int, in_parts: bool) -> tuple[ShardFile, Index]:
        """Return an open shard and its index; ``in_parts`` bypasses the cache."""
        if self._pid != os.getpid():
            self._begin()
        key, now = (shard, in_parts), host_clock.now()
        with self._lock:
            if key in self._open:
                file, index, _ = self._open.pop(key)  # move to the end
                self._open[key] = file, index, now
                return file, index
        self._close_deleted(now - IDLE_SECONDS)
        # Slow, so without the lock. For remote shards, index first: the file may be downloading meanwhile.
        index = self._index(shard, in_parts) if self.paths[shard] is None else {}
        file = self._file(shard, in_parts)
        index = index or self._index(shard, in_parts)
        file.shared = self._shared
        self._check(shard, file, index)
        if int(index["length"]) != self.lengths[shard]:
            is_listed = self._listed[shard] >= 0
            since = "in the list that names it: correct the list, or give the names of shards" if is_listed else _SINCE
            raise ShardError(f"{file.name} has {index['length']} samples, and had {self.lengths[shard]} {since}")
        with self._lock:
            file, index, _ = self._open.setdefault(key, (file, index, now))
            while len(self._open) > MAX_OPEN:
                self._open.popitem(last=False)  # not closed: readers may still use it
        return file, index

    def _close_deleted(self, before: float) -> None:
        """Close shards that the cache has deleted, last read ``before``: a new one may need their disk space."""
        with self._lock:
            for key, (held, _, last) in list(self._open.items()):
                if last < before and self.paths[key[0]] is None and isinstance(held, LocalFile) and held.is_deleted:
                    del self._open[key]

    # -- indexes ------------------------------------------------------------------------------------------------------

    def _index(self, shard: int, in_parts: bool | None = None) -> Index:
        if in_parts is None:  # a scan downloads the shards anyway: cache them if all fit
            in_parts = self.cache is None or not self.scans or self._are_too_many
        make = partial(self._make_index, shard, in_parts)
        return self._indexes.of(self.format.name, self.urls[shard], self.stats[shard], make)

    def index_ahead(self, shard: int) -> None:
        """Save the index of a cached shard out of an index file, which takes a worker up to three requests."""
        is_listed = self.urls[shard] in self._entries and not self.stats[shard].tag.startswith(UNKNOWN)
        if is_listed and not self._is_index_saved(shard):  # reading a saved one takes 4 ms
            self._index(shard, in_parts=False)

    def _is_index_saved(self, shard: int) -> bool:
        return self._indexes.path(self.format.name, self.urls[shard], self.stats[shard]).exists()

    def _make_index(self, shard: int, in_parts: bool) -> Index:
        entry = self._entries.get(self.urls[shard])
        index = None if entry is None else indexes.read_index(self.store, entry)
        if index is None:
            self._entries = {} if entry is not None else self._entries  # stop using an unreadable index file
        elif entry is not None and is_same(entry.stat.tag, self.stats[shard].tag):
            return index
        file = self._file(shard, in_parts)
        try:
            if entry is None or index is None:
                index = self.format.index(file)
                return index if self.paths[shard] is None else {**index, "checksums": _content(file)}
            if not np.array_equal(_content(file), index.get("checksums", ())):
                advice = "write that file again (sharded-loader index), and make the dataset again"
                raise ShardError(f"{file.name} has changed since {shown(entry.file)} was written: {advice}")
            return index
        finally:
            self._check(shard, file)
            file.close()

    def portable_index(self, shard: int) -> tuple[int, bytes]:
        """Return the length and the serialized index of a shard, with checksums that identify copies of it."""
        name, stat = shown(self.urls[shard]), self.stats[shard]
        if stat.tag.startswith(UNKNOWN):
            raise ShardError(f"{name}: its server names no versions, so an index file cannot tell when it is replaced")
        index = self._index(shard)
        if "checksums" not in index:
            index = {**index, "checksums": _content(self._file(shard, in_parts=True))}
        return int(index["length"]), indexes.dumped(index)

    # -- files --------------------------------------------------------------------------------------------------------

    def _check(self, shard: int, file: ShardFile, index: Index | None = None) -> bool:
        """Verify that a local shard is unchanged since it was indexed (``index``), or while it is being indexed (None).

        Return False if it is a cached file that was overwritten and must be opened again.
        """
        stat = self.stats[shard]
        if not isinstance(file, LocalFile):
            return True
        if self.paths[shard] is None:
            return not file.is_touched()
        now = file.stat()
        if now == stat:
            return True
        if now.size != stat.size:
            raise ShardError(f"{file.name} has {now.size:,} bytes, and had {stat.size:,} {_SINCE}")
        has_other_bytes = index is not None and not np.array_equal(_content(file), index["checksums"])
        if has_other_bytes or is_rewritten(stat.tag, now.tag):
            raise ShardError(f"{file.name} was replaced or written again: it had another time or other bytes {_SINCE}")
        self.stats[shard] = now
        return True

    def _file(self, shard: int, in_parts: bool) -> ShardFile:
        url, stat, path = self.urls[shard], self.stats[shard], self.paths[shard]
        if path is not None:
            if not stat.tag:
                self.stats[shard] = Stat(stat.size, local_stat(path).tag)
            return LocalFile(path)
        if self.cache is None or in_parts:
            return RemoteFile(self.store, url, stat)
        tries = count()

        def fetch(file: BinaryIO) -> int:
            if next(tries):  # the disk was full
                self._close_deleted(math.inf)
            return self.store.fetch(url, file, stat, is_waited_for=True)

        return self.cache.open(url, stat, fetch)


_SINCE = "when the dataset was made: make the dataset again"


def _content(file: ShardFile) -> Int64s:
    """Return checksums of a few ranges of a shard, read with one call."""
    begins, width = checked_parts(file.size)
    return np.array(list(map(zlib.crc32, file.ranges(begins, [begin + width for begin in begins]))))


def _side_by_side(make: Callable[[int], Made], shards: Iterable[int]) -> Iterator[Made]:
    """Apply ``make`` to each shard in `INDEX_THREADS` threads; yield the results in order."""
    with ThreadPoolExecutor(INDEX_THREADS) as threads:
        yield from threads.map(make, shards)
