"""`ShardDataset`: the samples of many shards by one index, wherever the shards lie.

    patterns, lists, index files --find_shards (`lists`)--> URLs, sizes, tags, format, and lengths as far as known
    a shard --format.index, or its part of the index file--> where its samples lie
    index --search in the sums of lengths--> shard, row --format.read(file, index, rows)--> sample

Opening reads no samples. If a list or an index file says how many samples a shard has, the shard is indexed when it is
first read. Otherwise, it is indexed at opening, from its head or footer. The index of some formats is made by reading
the whole shard (``scans``). If such a shard lies in a store, it is indexed when the program asks for `lengths`, as a
loader does.

Each shard is indexed once, and the indexes are kept (`indexes`). A process opens a shard when it first reads one of its
samples, and keeps the last `OPEN` ones open, each with its index. Those that the cache has deleted, and that were not
read for `IDLE` seconds, are closed when the next one is opened. The dataset travels to workers as its URLs, lengths and
tags. Paths are absolute from the beginning.

After each read, the dataset compares the time, size and inode of a shard on this machine with those that it had. So a
shard that was replaced or changed is an error, and no sample is cut out of it by the index of another.

With a cache, the loader tells the dataset which samples come (`follow`), and a thread of the main process fetches their
shards ahead (`read_ahead`). Workers only open what is there, or fetch it themselves.

What can go wrong: a shard that is missing, has changed, is of another format, or has another length than its list says.
All are a `ShardError` that names the shard, and may also be a FileNotFoundError or PermissionError. And what
`find_shards` raises.
"""

from __future__ import annotations

import os
import platform
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sharded_loader.base import host_clock
from sharded_loader.base.checks import refuse_arguments
from sharded_loader.base.notices import warn
from sharded_loader.batching.protocol import Empty
from sharded_loader.data.bulk import NOT_IN_BULK, Int64s, bulk, bulk_method, checked_index, checked_indices
from sharded_loader.data.datasets import Dataset
from sharded_loader.data.files import checked_parts, is_rewritten
from sharded_loader.storage import index_file
from sharded_loader.storage.cache import TRIES, ShardCache
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile, Stat, local_path, local_stat, shown
from sharded_loader.storage.indexes import Format, Index, Indexes, ascending_by_part, by_part, default_folder, dumped
from sharded_loader.storage.lists import FORMATS, absolute, find_shards, places_of
from sharded_loader.storage.parts import UNKNOWN, is_same, with_tags
from sharded_loader.storage.read_ahead import ReadAhead
from sharded_loader.storage.stores import ObjectStore, RemoteFile
from sharded_loader.storage.tables import TableFormat, batch_of

OPEN = 32
"""Shards that a process keeps open."""

IDLE = 10.0
"""Seconds after which a shard is closed that the cache has deleted: the disk keeps its bytes as long as it is open. Not
at once: a window of shards that is larger than the cache would be fetched again for each sample."""

AT_ONCE = 16
"""Shards that are indexed side by side."""

COSTLY = 32 << 20
"""Bytes that are read to count samples, above which a warning says so: a second on a usual connection."""


class ShardDataset(Dataset):
    """The samples of shards, on this machine or in an object store.

    Args:
        urls: a pattern such as ``"s3://bucket/train-*.tar"``, or a list of URLs and paths. The order of shards is that
            of the list, or of the names. A name that ends in ``.json`` is a file that lists shards: MosaicML's
            ``index.json``, a list of WebDataset's ``wids``, or a JSON list of names. A name that ends in ``.index`` is
            an index file (`write_index`).
        format: "tar", "parquet", "arrow", "mds", "records" or "lines", or an object with ``index`` and ``read``. None:
            by the file names.
        storage_options: for the file system, as fsspec takes them.
        cache: where whole shards of an object store are kept. None: the bytes of each sample are read by themselves.
        index_folder: where indexes are kept. None: beside the cache, or in the user's cache folder.
        columns: of Parquet and Arrow files, the names of the columns to read. None: all. Of a Parquet file, no bytes of
            other columns are read.
        trust: what a list or an index file may name outside its own folder and host: a URL or path, or a list of them,
            whatever lies below it is allowed; a dict gives storage options to each; True allows all. None of these gets
            ``storage_options``, which are for the hosts of ``urls``.

    Attributes:
        retries: how many requests of this process had to be tried again.

    Raises:
        ShardError: a shard cannot be indexed. Also a FileNotFoundError if no file matches or a shard is missing, and a
            PermissionError if a shard must not be read.
        TypeError, ValueError: ``columns`` is no list of names, or the shards are no tables.

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

    def __init__(
        self,
        urls: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        format: str | Format | None = None,
        storage_options: Mapping[str, Any] | None = None,
        cache: ShardCache | None = None,
        index_folder: str | os.PathLike[str] | None = None,
        columns: Iterable[str] | None = None,
        trust: bool | str | os.PathLike[str] | Iterable[str] | Mapping[str, Mapping[str, Any]] = False,
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments("ShardDataset", unknown, type(self).__init__)
        if cache is not None and not isinstance(cache, ShardCache):
            raise TypeError(f"cache is {cache!r}; give a ShardCache: ShardCache(folder, max_bytes)")
        self._store, self._cache = ObjectStore(storage_options, places_of(trust)), cache
        patterns = [urls] if isinstance(urls, (str, bytes, os.PathLike)) else list(urls)
        self._format, stats, self._known_lengths, self._entries = find_shards(self._store, patterns, format)
        if columns is not None:
            if not isinstance(self._format, TableFormat):
                raise ValueError(
                    f"columns={columns!r}: shards of the format {self._format.name} have no columns; leave it out"
                )
            self._format = self._format.with_columns(columns)
        self._urls, self._stats = list(stats), with_tags(stats)
        self._scans = getattr(self._format, "scans", True)
        folder = cache.folder / "indexes" if cache is not None else default_folder()
        self._indexes = Indexes(folder if index_folder is None else Path(index_folder))
        if not (self._scans and any(local_path(self._urls[shard]) is None for shard in self._uncounted())):
            _ = self.lengths  # from heads and footers, or from shards on this machine
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[tuple[int, bool], tuple[ShardFile, Index]] = OrderedDict()
        self._read_at: dict[tuple[int, bool], float] = {}
        self._ahead: ReadAhead | None = None
        self._shared: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        own = ("_pid", "_lock", "_open", "_read_at", "_ahead", "_shared")
        kept = {name: value for name, value in vars(self).items() if name not in own}
        return {**kept, "_machine": platform.node()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_machine") != platform.node():  # which has copies of the shards, with other times and inodes
            state["_stats"] = [
                stat if local_path(url) is None else Stat(stat.size, "")
                for url, stat in zip(state["_urls"], state["_stats"], strict=True)
            ]
        vars(self).update(state)
        self._begin()

    @property
    def _fingerprint(self) -> str:
        """For `data.inspection`: names and sizes of the shards, and tags of stores. Folders and times may change."""
        names = [url.split("?")[0].replace("\\", "/").rsplit("/", 1)[-1] for url in self._urls]
        tags = [stat.tag if local_path(url) is None else "" for url, stat in zip(self._urls, self._stats, strict=True)]
        columns = getattr(self._format, "columns", None)
        shards = zip(names, tags, [stat.size for stat in self._stats], self.lengths.tolist(), strict=True)
        return repr([*shards, *(() if columns is None else columns)])

    @cached_property
    def lengths(self) -> Int64s:
        """The number of samples in each shard; for `ShardShuffleSampler`.

        If no list and no index file says it, each shard is indexed now. For the tar, RecordIO and text files of a
        store, that reads all their bytes once.
        """
        lengths: Int64s = np.array(self._known_lengths, np.int64)
        uncounted, size = self._uncounted(), self._cost_of_length()
        if size > COSTLY:
            warn(
                f"to count the samples, {size:,} bytes of {len(uncounted):,} shards are read once, such as "
                f"{shown(self._urls[uncounted[0]])}. Write an index file beside the shards, and later runs read a few "
                "kilobytes: sharded-loader index"
            )
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = threads.map(lambda shard: int(self._index(shard, self._index_in_parts)["length"]), uncounted)
            lengths[uncounted] = list(found)
        return lengths

    @property
    def group_lengths(self) -> Int64s:
        """The number of samples in each row group or record batch of all shards; for `ShardShuffleSampler`.

        With them, the sampler mixes the rows of ``window`` groups, and not of ``window`` files. Of a format without
        groups, these are the `lengths`. The indexes of all shards are read.
        """
        if not isinstance(self._format, TableFormat):
            return self.lengths
        with ThreadPoolExecutor(AT_ONCE) as threads:
            return np.concatenate(list(threads.map(self._groups_of, range(len(self._urls)))))

    def _groups_of(self, shard: int) -> Int64s:
        index = self._index(shard, self._index_in_parts)
        try:
            return self._format.group_lengths(index)  # type: ignore[attr-defined, no-any-return]
        except Exception as error:
            self._blame(shard, error)
            raise

    @cached_property
    def _ends(self) -> Int64s:
        return np.cumsum(self.lengths)

    def _uncounted(self) -> list[int]:
        """The shards whose length is not known yet."""
        return [shard for shard, length in enumerate(self._known_lengths) if length < 0]

    def _cost_of_length(self) -> int:
        """How many bytes of a store are read to learn `lengths`."""
        if not self._scans or "lengths" in vars(self):
            return 0
        name = self._format.name
        return self._size_in_store(
            [n for n in self._uncounted() if not self._indexes.path(name, self._urls[n], self._stats[n]).exists()]
        )

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        # Of a subclass with a __getitem__ of its own, which calls this one, __getitems__ would call that again.
        read = type(self).__getitems__ if bulk_method(self, "__getitems__") else ShardDataset.__getitems__
        return read(self, [checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once: those of one shard are one call of its format."""
        where = checked_indices(indices, len(self))
        samples: list[Any] = [None] * len(where)
        rows_by_shard = by_part(where, self._ends)
        in_parts = self._excess([shard for shard, _, _ in rows_by_shard]) is not None
        for shard, positions, rows in rows_by_shard:
            for position, sample in zip(positions, self._read(shard, in_parts, rows, self._format.read), strict=True):
                samples[position] = sample
        return samples

    def _in_columns(self, indices: Any, empty: Empty) -> Any:
        """A finished batch of tables, in memory from ``empty``: the default batchify of its samples."""
        where = checked_indices(indices, len(self))
        if not isinstance(self._format, TableFormat) or not len(where):
            return NOT_IN_BULK
        order = where.argsort(kind="stable")
        rows_by_shard = ascending_by_part(where[order], self._ends)
        in_parts = self._excess([shard for shard, _ in rows_by_shard]) is not None
        picked = (self._read(shard, in_parts, rows, self._format.pick) for shard, rows in rows_by_shard)
        return batch_of(list(chain.from_iterable(picked)), order, empty)

    def _read(
        self, shard: int, in_parts: bool, rows: Any, read: Callable[[ShardFile, Index, Any], list[Any]]
    ) -> list[Any]:
        """What a method of the format reads at these rows of a shard."""
        for _ in range(TRIES):
            file, index = self._shard(shard, in_parts)
            try:
                found = read(file, index, rows)
            except Exception as error:
                if self._check(shard, file, index):  # first: what a changed shard raises, or gives, says nothing
                    self._blame(shard, error)
                    raise
            else:
                if self._check(shard, file, index):
                    return found
            with self._lock:
                self._open.pop((shard, in_parts), None)
        raise ShardError(f"{file.name} is written to again and again by another program: give another cache folder")

    def _blame(self, shard: int, error: Exception) -> None:
        """Raise an error of a format as one that names the index file too, if the shard was read by one."""
        entry = self._entries.get(self._urls[shard])
        if entry is None or type(self._format) not in FORMATS or isinstance(error, ImportError):
            return
        kind, said = (type(error), error) if isinstance(error, ShardError) else (ShardError, repr(error))
        raise kind(
            f"{shown(self._urls[shard])}: {said}. It was read by its index in {shown(entry.file)}: if the shard is "
            "whole, write that file again (sharded-loader index), or delete it"
        ) from error

    def __repr__(self) -> str:
        size = self._cost_of_length()
        count = f"not counted yet: len() reads {size:,} bytes" if size else f"{len(self)} samples"
        return f"ShardDataset({len(self._urls)} {self._format.name} shards, {count})"

    @property
    def retries(self) -> int:
        """How many requests of this process had to be tried again. `ShardedDataLoader.stats` adds those of workers."""
        return self._store.retries

    def follow(
        self,
        batches: Callable[[int], Any],
        position: Callable[[], int | None],
        later: Callable[[int], Any] = lambda number: None,
    ) -> None:
        """Fetch shards into the cache ahead of the order that is read. `ShardedDataLoader` calls this for each epoch.

        Args:
            batches: number of a batch -> its indices; None after the last one. Called by another thread.
            position: the number of the batch that comes next; None if this epoch is not read any more.
            later: as ``batches``, of the next epoch.
        """
        self._stop_following()
        cache = self._cache
        if cache is None or all(map(local_path, self._urls)):
            return

        first = self._fetched_for(batches, position() or 0) or []
        excess = self._excess(first)
        if excess is not None:
            warn(
                f"a batch needs {len(first)} shards of {excess:,} bytes together, and {cache.limit_text}: so samples "
                "are read one by one from the store, which is slower. Give a larger max_bytes, or read with "
                "ShardShuffleSampler and a smaller window"
            )
            return
        self._ahead = ReadAhead(
            cache,
            self._store,
            list(zip(self._urls, self._stats, strict=True)),
            partial(self._fetched_for, batches),
            position,
            partial(self._fetched_for, later),
            None if cache.read_only else cache.folder / "readers",
            self._keep_index,
        )
        self._ahead.start()

    def _keep_index(self, shard: int) -> None:
        """Have the index of a shard in the folder of indexes before a worker needs it, if an index file has it."""
        if self._urls[shard] in self._entries:
            self._index(shard, in_parts=False)

    def _fetched_for(self, order: Callable[[int], Any], number: int) -> list[int] | None:
        """The shards of the store that a batch of an order needs; None after the last batch."""
        try:
            found = order(number)
            if found is None:
                return None
            shards = np.unique(np.searchsorted(self._ends, checked_indices(found, len(self)), side="right"))
        except (IndexError, TypeError):
            return []  # a bad index: the reader of this batch reports it
        return [shard for shard in shards.tolist() if local_path(self._urls[shard]) is None]

    def _excess(self, shards: Sequence[int]) -> int | None:
        """How large these shards are together, if the cache cannot hold them at once; otherwise None."""
        if self._cache is None:
            return None
        size = self._size_in_store(shards)
        return size if size > self._cache.max_bytes else None

    def _size_in_store(self, shards: Sequence[int]) -> int:
        return sum(self._stats[shard].size for shard in shards if local_path(self._urls[shard]) is None)

    def _stop_following(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def close(self) -> None:
        """Close the open shards and the connections. A sample that is read later opens its shard again."""
        self._stop_following()
        with self._lock:
            opened, self._open, self._shared = self._open, OrderedDict(), {}
        for file, _ in opened.values():
            file.close()
        self._store.close()

    # -- shards ---------------------------------------------------------------------------------------------------

    def _shard(self, shard: int, in_parts: bool) -> tuple[ShardFile, Index]:
        """A shard, open, with its index; ``in_parts``: not from the cache."""
        if self._pid != os.getpid():
            self._begin()
        key, now = (shard, in_parts), host_clock.now()
        with self._lock:
            self._read_at[key] = now
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
            self._close_deleted(now - IDLE)  # this one may need their place on the disk
        # May take long: other threads read other shards. Of a store the index first: the file may be on its way.
        index = self._index(shard, in_parts) if local_path(self._urls[shard]) is None else {}
        file = self._file(shard, in_parts)
        index = index or self._index(shard, in_parts)
        file.shared = self._shared
        self._check(shard, file, index)
        if int(index["length"]) != self.lengths[shard]:
            is_listed = self._known_lengths[shard] >= 0
            since = "in the list that names it: correct the list, or give the names of shards" if is_listed else _SINCE
            raise ShardError(f"{file.name} has {index['length']} samples, and had {self.lengths[shard]} {since}")
        with self._lock:
            found = self._open.setdefault(key, (file, index))
            while len(self._open) > OPEN:
                self._open.popitem(last=False)  # its readers hold it
        return found

    def _close_deleted(self, before: float) -> None:
        """Close shards that the cache has deleted, and that were not read since then."""
        idle = [key for key in self._open if self._read_at[key] < before and local_path(self._urls[key[0]]) is None]
        for key in idle:
            file = self._open[key][0]
            if isinstance(file, LocalFile) and file.is_deleted:
                del self._open[key]

    @property
    def _index_in_parts(self) -> bool:
        """Whether indexes are made without the cache. What is scanned is fetched anyway, and kept if all of it fits."""
        return not self._scans or self._excess(range(len(self._urls))) is not None

    def _index(self, shard: int, in_parts: bool) -> Index:
        return self._indexes.of(
            self._format.name, self._urls[shard], self._stats[shard], partial(self._make_index, shard, in_parts)
        )

    def _make_index(self, shard: int, in_parts: bool) -> Index:
        entry = self._entries.get(self._urls[shard])
        index = None if entry is None else index_file.index_of(self._store, entry)
        if entry is not None and index is None:
            self._entries = {}  # nothing else is read from that file
        if entry is not None and index is not None and is_same(entry.stat.tag, self._stats[shard].tag):
            return index
        file = self._file(shard, in_parts)
        try:
            if entry is None or index is None:
                return self._indexed(shard, file)
            if not np.array_equal(_content(file), index.get("checksums", ())):
                raise ShardError(
                    f"{file.name} has changed since {shown(entry.file)} was written: write that file again "
                    "(sharded-loader index), and make the dataset again"
                )
            return index
        finally:
            self._check(shard, file)
            file.close()

    def _indexed(self, shard: int, file: ShardFile) -> Index:
        index = self._format.index(file)
        if local_path(self._urls[shard]) is not None:
            index = {**index, "checksums": _content(file)}
        return index

    def write_index(
        self, url: str | os.PathLike[str] | None = None, progress: Callable[[int], None] = lambda done: None
    ) -> str:
        """Write one file with the indexes of all shards, which later datasets open with one small request.

        A dataset finds the file if it lies beside its shards, as ``shards.index``. You can also make a dataset from the
        URL of the file alone. Call it again after you have added or replaced shards: it reads only those.

        Args:
            url: where to write it; the name must end in ``.index``. None: ``shards.index`` in the innermost folder that
                has all shards.
            progress: called with the number of shards that are done.

        Returns:
            Where it is.

        Raises:
            OSError: it cannot be written there, or a shard cannot be indexed.
            ValueError: the shards have no folder in common, or the name ends in something else.

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
        where = absolute(os.fspath(index_file.place_of(self._urls) or "" if url is None else url))
        if not where.endswith(index_file.SUFFIX):
            raise ValueError(f"give the index file a name that ends in {index_file.SUFFIX}, not {where!r}")
        with ThreadPoolExecutor(AT_ONCE) as threads:
            found = []
            for one in threads.map(self._portable_index, range(len(self._urls))):
                found.append(one)
                progress(len(found))
        self._store.write(where, index_file.content(where, self._format.name, self._urls, self._stats, found))
        return where

    def _portable_index(self, shard: int) -> tuple[int, bytes]:
        """The length of a shard, and its index for an index file, with checksums: it may be copied to a disk."""
        name, stat = shown(self._urls[shard]), self._stats[shard]
        if stat.tag.startswith(UNKNOWN):
            raise ShardError(f"{name}: its server names no versions, so an index file cannot tell when it is replaced")
        index = self._index(shard, self._index_in_parts)
        if "checksums" not in index:
            index = {**index, "checksums": _content(self._file(shard, self._index_in_parts))}
        return int(index["length"]), dumped(index)

    def _check(self, shard: int, file: ShardFile, index: Index | None = None) -> bool:
        """Check that a shard of this machine is still the one of this index; None: of the one that is being made.

        Returns:
            False if it is a file in the cache that was written to: it must be opened again.
        """
        stat = self._stats[shard]
        if not isinstance(file, LocalFile):
            return True
        if local_path(self._urls[shard]) is None:
            return not file.is_touched()
        if file.stat() == stat:
            return True
        now = file.stat()
        if now.size != stat.size:
            raise ShardError(f"{file.name} has {now.size:,} bytes, and had {stat.size:,} {_SINCE}")
        if is_rewritten(stat.tag, now.tag):
            raise ShardError(f"{file.name} was replaced or written again: its modification time has changed {_SINCE}")
        if index is not None:
            again = self._indexed(shard, file)
            if again.keys() != index.keys() or not all(np.array_equal(again[name], index[name]) for name in index):
                raise ShardError(f"{file.name} was written again: it had other bytes {_SINCE}")
        self._stats[shard] = now
        return True

    def _file(self, shard: int, in_parts: bool = False) -> ShardFile:
        url, stat = self._urls[shard], self._stats[shard]
        path = local_path(url)
        if path is None and self._cache is not None and not in_parts:
            return self._cache.open(url, stat, lambda file: self._store.fetch(url, file, stat, is_waited_for=True))
        if path is None:
            return RemoteFile(self._store, url, stat)
        if not stat.tag:
            self._stats[shard] = Stat(stat.size, local_stat(path).tag)
        return LocalFile(path)


_SINCE = "when the dataset was made: make the dataset again"


def _content(file: ShardFile) -> Int64s:
    """Checksums of some parts of a shard, which are read at once."""
    begins, width = checked_parts(file.size)
    return np.array(list(map(zlib.crc32, file.ranges(begins, [begin + width for begin in begins]))))
