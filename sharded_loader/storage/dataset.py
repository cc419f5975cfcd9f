"""`ShardDataset`: the samples of many shards by one index, wherever the shards lie.

    pattern, list, file that lists shards --> URLs --format_of--> a format --format.index--> lengths
    index --search in the sums of lengths--> shard, row --format.read(file, index, rows)--> sample

The shards and their lengths are known when the dataset is made: each shard is indexed once, and the indexes are kept
(`indexes`). A process opens a shard when it first reads one of its samples, and keeps the last `OPEN` ones open, each
with its index. The dataset travels to workers as its URLs, lengths and tags. Paths are absolute from the beginning.

After each read, the dataset compares the time, size and inode of a shard on this machine with those that it had. So a
shard that was replaced or changed is an error, and no sample is cut out of it by the index of another.

With a cache, the loader tells the dataset which samples come (`follow`), and a thread of the main process fetches their
shards ahead (`read_ahead`). Workers only open what is there, or fetch it themselves.

Known lists of shards are MosaicML's ``index.json``, the lists of WebDataset's ``wids``, and a plain JSON list of names.
Names that are no URLs lie beside the list. Lengths and sizes in the list are not used: each shard is indexed anyway, so
a list that is older than its shards does no harm.

What can go wrong: a shard that is missing, has changed, or is of another format (`ShardError`, which may also be a
FileNotFoundError or PermissionError); the message names the shard. A file that is no list of shards, or a list of
compressed ones (`ShardError`). A format that is unknown, or file names that do not tell one format (ValueError).
"""

from __future__ import annotations

import json
import os
import platform
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from sharded_loader.base.checks import refuse_arguments
from sharded_loader.base.notices import warn
from sharded_loader.base.private import path_of
from sharded_loader.data.bulk import Int64s, bulk, checked_index, checked_indices
from sharded_loader.data.datasets import Dataset
from sharded_loader.data.files import checksums, is_rewritten
from sharded_loader.storage.cache import TRIES, ShardCache
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile, Stat, local_stat, shown
from sharded_loader.storage.indexes import Format, Index, Indexes, by_part, default_folder
from sharded_loader.storage.parts import with_tags
from sharded_loader.storage.read_ahead import ReadAhead
from sharded_loader.storage.records import MDS, Lines, RecordIO
from sharded_loader.storage.stores import ObjectStore, RemoteFile
from sharded_loader.storage.tables import Arrow, Parquet
from sharded_loader.storage.tar import Tar

OPEN = 32
"""Shards that a process keeps open."""

AT_ONCE = 16
"""Shards that are indexed side by side."""


class ShardDataset(Dataset):
    """The samples of shards, on this machine or in an object store.

    Args:
        urls: a pattern such as ``"s3://bucket/train-*.tar"``, or a list of URLs and paths. The order of shards is that
            of the list, or of the names. A name that ends in ``.json`` is a file that lists shards: MosaicML's
            ``index.json``, a list of WebDataset's ``wids``, or a JSON list of names.
        format: "tar", "parquet", "arrow", "mds", "records" or "lines", or an object with ``index`` and ``read``. None:
            by the file names.
        storage_options: for the file system, as fsspec takes them.
        cache: where whole shards of an object store are kept. None: the bytes of each sample are read by themselves.
        index_folder: where indexes are kept. None: beside the cache, or in the user's cache folder.

    Attributes:
        lengths: how many samples each shard has; for `ShardShuffleSampler`.
        retries: how many requests of this process had to be tried again.

    Raises:
        ShardError: a shard cannot be indexed. Also a FileNotFoundError if no file matches or a shard is missing, and a
            PermissionError if a shard must not be read.

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
        **unknown: NoReturn,
    ) -> None:
        refuse_arguments("ShardDataset", unknown, type(self).__init__)
        if cache is not None and not isinstance(cache, ShardCache):
            raise TypeError(f"cache is {cache!r}; give a ShardCache: ShardCache(folder, max_bytes)")
        self._store, self._cache = ObjectStore(storage_options), cache
        patterns = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
        found: dict[str, Stat | None] = {}
        for pattern in patterns:
            for url, stat in self._store.find(absolute(os.fspath(pattern))).items():
                if url.endswith(LIST_SUFFIX):
                    [content] = self._store.ranges(url, [0], [stat.size], stat)
                    found.update(dict.fromkeys(map(absolute, urls_in(url, content))))
                else:
                    found[url] = stat
        if not found:
            raise ValueError("ShardDataset was given no shards: give a pattern, or a list of URLs")
        self._urls = list(found)
        self._stats = with_tags({url: self._stat(url, stat) for url, stat in found.items()})
        self._format = format_of(format, self._urls)
        folder = cache.folder / "indexes" if cache is not None else default_folder()
        self._indexes = Indexes(folder if index_folder is None else Path(index_folder))
        # If not all shards fit into the cache, what is fetched now would be gone before it is read.
        self._index_in_parts = self._excess(range(len(self._urls))) is not None
        with ThreadPoolExecutor(AT_ONCE) as threads:
            lengths = list(threads.map(lambda shard: int(self._index(shard)["length"]), range(len(self._urls))))
        self.lengths: Int64s = np.array(lengths, np.int64)
        self._ends = np.cumsum(self.lengths)
        self._begin()

    def _begin(self) -> None:
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._open: OrderedDict[tuple[int, bool], tuple[ShardFile, Index]] = OrderedDict()
        self._ahead: ReadAhead | None = None

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name not in ("_pid", "_lock", "_open", "_ahead")}
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
        return repr([*zip(names, tags, [stat.size for stat in self._stats], self.lengths.tolist(), strict=True)])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self.__getitems__([checked_index(index, len(self))])[0]

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once: those of one shard are one call of its format."""
        where = checked_indices(indices, len(self))
        samples: list[Any] = [None] * len(where)
        rows_by_shard = by_part(where, self._ends)
        in_parts = self._excess([shard for shard, _, _ in rows_by_shard]) is not None
        for shard, positions, rows in rows_by_shard:
            for position, sample in zip(positions, self._read(shard, in_parts, rows), strict=True):
                samples[position] = sample
        return samples

    def _read(self, shard: int, in_parts: bool, rows: list[int]) -> list[Any]:
        """The samples at these rows of a shard."""
        for _ in range(TRIES):
            file, index = self._shard(shard, in_parts)
            try:
                found = self._format.read(file, index, rows)
            except Exception:
                if self._check(shard, file, index):  # first: what a changed shard raises, or gives, says nothing
                    raise
            else:
                if self._check(shard, file, index):
                    return found
            with self._lock:
                self._open.pop((shard, in_parts), None)
        raise ShardError(f"{file.name} is written to again and again by another program: give another cache folder")

    def __repr__(self) -> str:
        return f"ShardDataset({len(self._urls)} {self._format.name} shards, {len(self)} samples)"

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
        )
        self._ahead.start()

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
        size = sum(self._stats[shard].size for shard in shards if local_path(self._urls[shard]) is None)
        return size if size > self._cache.max_bytes else None

    def _stop_following(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop()

    def close(self) -> None:
        """Close the open shards and the connections. A sample that is read later opens its shard again."""
        self._stop_following()
        with self._lock:
            opened, self._open = self._open, OrderedDict()
        for file, _ in opened.values():
            file.close()
        self._store.close()

    # -- shards ---------------------------------------------------------------------------------------------------

    def _shard(self, shard: int, in_parts: bool) -> tuple[ShardFile, Index]:
        """A shard, open, with its index; ``in_parts``: not from the cache."""
        if self._pid != os.getpid():
            self._begin()
        key = shard, in_parts
        with self._lock:
            found = self._open.get(key)
            if found is not None:
                self._open.move_to_end(key)
                return found
        file, index = self._file(shard, in_parts), self._index(shard)  # may take long: other threads read other shards
        self._check(shard, file, index)
        if int(index["length"]) != self.lengths[shard]:
            raise ShardError(f"{file.name} has {index['length']} samples, and had {self.lengths[shard]} {_SINCE}")
        with self._lock:
            found = self._open.setdefault(key, (file, index))
            while len(self._open) > OPEN:
                self._open.popitem(last=False)  # its readers hold it
        return found

    def _index(self, shard: int) -> Index:
        return self._indexes.of(
            self._format.name, self._urls[shard], self._stats[shard], partial(self._make_index, shard)
        )

    def _make_index(self, shard: int) -> Index:
        file = self._file(shard, self._index_in_parts)
        try:
            return self._indexed(shard, file)
        finally:
            self._check(shard, file)
            file.close()

    def _indexed(self, shard: int, file: ShardFile) -> Index:
        index = self._format.index(file)
        if local_path(self._urls[shard]) is not None:
            content = checksums(lambda begin, size: file.ranges([begin], [begin + size])[0], file.size)
            index = {**index, "checksums": np.array(content)}
        return index

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

    def _stat(self, url: str, found: Stat | None = None) -> Stat:
        path = local_path(url)
        return local_stat(path) if path is not None else found or self._store.stat(url)

    def _file(self, shard: int, in_parts: bool = False) -> ShardFile:
        url, stat = self._urls[shard], self._stats[shard]
        path = local_path(url)
        if path is None and self._cache is not None and not in_parts:
            return self._cache.open(url, stat, lambda file: self._store.fetch(url, file, stat))
        if path is None:
            return RemoteFile(self._store, url, stat)
        if not stat.tag:
            self._stats[shard] = Stat(stat.size, local_stat(path).tag)
        return LocalFile(path)


_SINCE = "when the dataset was made: make the dataset again"


def absolute(url: str) -> str:
    """A path as it is from any folder; another URL as it is."""
    if local_path(url) is None:
        return url
    from fsspec.implementations.local import LocalFileSystem

    return path_of(LocalFileSystem, url)


def local_path(url: str) -> str | None:
    """Where a URL lies on this machine; None if it does not.

    Example:
        >>> local_path("/data/a.tar"), local_path("file:///data/a.tar"), local_path("s3://bucket/a.tar")
        ('/data/a.tar', '/data/a.tar', None)
    """
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file://") else None


# -- which shards, and of which format ---------------------------------------------------------------------------------


FORMATS: tuple[type[Format], ...] = (Tar, Parquet, Arrow, MDS, RecordIO, Lines)


def format_of(format: str | Format | None, urls: Sequence[str]) -> Format:
    """The format that was named, or the one of the file names.

    Raises:
        ValueError: it is unknown, or the shards are of several formats.
    """
    names = [kind.name for kind in FORMATS]
    if isinstance(format, str) and format not in names:
        raise ValueError(f"format {format!r} is unknown: give one of {names}, or an object with index() and read()")
    if isinstance(format, str):
        return FORMATS[names.index(format)]()
    if format is not None:
        return format
    kinds = {next((kind for kind in FORMATS if shown(url).endswith(kind.suffixes)), None) for url in urls}
    if len(kinds) > 1 or None in kinds:
        raise ValueError(
            f"the names of the shards, such as {shown(urls[0])}, do not tell one format: give format=, one of {names}. "
            "Compressed files, such as .tar.gz, must be decompressed first"
        )
    [kind] = kinds
    assert kind is not None
    return kind()


LIST_SUFFIX = ".json"


def urls_in(url: str, content: bytes) -> list[str]:
    """The shards that a file lists.

    Raises:
        ShardError: it lists none that can be read.

    Example:
        >>> urls_in("s3://bucket/set/index.json", b'["a.tar", "s3://other/b.tar"]')
        ['s3://bucket/set/a.tar', 's3://other/b.tar']
    """
    try:
        names = _names(json.loads(content))
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(
            f"{shown(url)} is no list of shards ({type(error).__name__}: {error}): give a JSON list of names, the "
            f"index.json of MosaicML, or a list of WebDataset's wids"
        ) from None
    if not names:
        raise ShardError(f"{shown(url)} lists no shards")
    folder = url.rpartition("/")[0] + "/" if "://" in url else os.path.dirname(url)
    return [name if "://" in name or os.path.isabs(name) else os.path.join(folder, name) for name in names]


def _names(listed: Any) -> list[str]:
    """The names of shards in a list, as it was parsed."""
    if not isinstance(listed, Mapping):
        names = list(listed)
    elif "shardlist" in listed:  # of WebDataset's wids
        names = [shard["url"] for shard in listed["shardlist"]]
    else:
        shards = listed["shards"]
        if any(shard.get("raw_data") is None or shard.get("zip_data") for shard in shards):
            raise ValueError("its shards are compressed, or of several files each: decompress them first")
        names = [shard["raw_data"]["basename"] for shard in shards]
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a name is no string")
    return names
