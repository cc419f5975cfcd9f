"""A shard as bytes by their position, what tells it from a later one, and the errors of shards.

    ShardFile             LocalFile(path), or `stores.RemoteFile`
        .ranges(begins, ends) -> list of bytes        .stream() -> a binary file for libraries that want one
    Stat(size, tag)       what tells a file from a later one at the same place; of this machine: local_stat(path)
    ShardError            a shard cannot be read; also MissingShardError, ForbiddenShardError
    shown(url)            without user, password and query
    redacted(text, ...)   without the values of options, and without what URLs in the text hide
    local_path(url)       where a URL lies on this machine; host_of(url): its protocol, and its host or bucket
    joined(url, names)    names in a file as URLs. Only those are allowed that the file may name, or that are trusted

Formats see nothing else, so each of them reads local shards, cached ones and remote ones in the same way. A local file
is held by a descriptor: if it is deleted meanwhile, it can still be read (not on Windows, where it cannot be
deleted meanwhile). Threads may share a file; a forked child opens its own.

No message shows a password, a key or a signature. No error of a remote shard has the library's own error as its cause,
because that may show one of them.

What can go wrong: `ShardError` for a file that is missing, must not be read, or is shorter than it was.
"""

from __future__ import annotations

import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from sharded_loader.recordio.positioned import PositionedFile, settled, tag_of


class Stat(NamedTuple):
    """What tells a file from a later one at the same place.

    Attributes:
        size: in bytes.
        tag: the server's etag, or the time of the last change. Empty: the server says neither.
    """

    size: int
    tag: str


# -- files -------------------------------------------------------------------------------------------------------------


class ShardFile(ABC):
    """A file of which any part can be read.

    Attributes:
        name: how errors name it.
        size: in bytes.
        path: where it lies on this machine; None if it does not.
        kept: what a format keeps of the file while it is open.
        shared: what a format keeps for all open files of a dataset in a process.
    """

    name: str
    size: int
    path: str | None = None
    _buffered = 1 << 16  # bytes that a stream reads at once

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}

    @abstractmethod
    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Parts of the file, in the order in which they are asked for."""

    @property
    def guess(self) -> int:
        """How many bytes of a head or a footer are read at first, before its length is known: 0.03 % of the file."""
        return min(self.size, 64 + min(self.size >> 12, 1 << 14))

    def close(self) -> None:
        """Give the file back."""
        self.kept.clear()

    def stream(self) -> io.BufferedReader:
        """The file for libraries that read from a binary file: it seeks, and has a buffer."""
        return io.BufferedReader(_ShardStream(self), self._buffered)


class LocalFile(ShardFile):
    """A file of this machine.

    Args:
        path: where it lies.
        name: how errors name it.
    """

    def __init__(self, path: str, name: str | None = None) -> None:
        super().__init__()
        self.path, self.name = path, name or path
        try:
            self._file = PositionedFile(path)
        except OSError as error:
            found = missing_or_forbidden(self.name, error, str(error.strerror))
            if found is None:
                raise
            raise found from error
        self._found = self._file.stat()
        self.size = self._found.st_size

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        return list(map(self._part, begins, ends))

    def stat(self) -> Stat:
        """What lies at the path now; the open file, if it was deleted."""
        try:
            return _stat_of(os.stat(str(self.path)))
        except FileNotFoundError:
            return _stat_of(self._file.stat())

    def is_touched(self) -> bool:
        """Whether another program has written to the open file. Only that it was deleted does not count."""
        now, then = self._file.stat(), self._found
        is_other = (now.st_mtime_ns, now.st_size) != (then.st_mtime_ns, then.st_size)
        return is_other or (now.st_nlink > 0 and now.st_ctime_ns != then.st_ctime_ns)

    @property
    def is_deleted(self) -> bool:
        """Whether the open file has no name any more. Then the disk keeps its bytes only for those who have it open."""
        return self._file.stat().st_nlink == 0

    def _part(self, begin: int, end: int) -> bytes:
        size = min(end, self.size) - begin
        found = self._file.bytes_at(begin, size) if begin >= 0 <= size else b""
        if len(found) != end - begin or not 0 <= end <= self.size:  # a shard that was cut, or the index of another
            found_text = f"ends within bytes {begin} to {end}, of which {len(found)} are there"
            advice = "Copy it again. If it is to be so, make the dataset again"
            raise ShardError(f"{self.name} {found_text}: it is shorter than when it was indexed. {advice}")
        return found

    def close(self) -> None:
        super().close()
        self._file.close()


def local_stat(path: str) -> Stat:
    """The size of a file of this machine, and a tag that any later change changes.

    Raises:
        ShardError: it is no file.
    """
    found = settled(path)
    if not stat.S_ISREG(found.st_mode):
        raise ShardError(f"{path} is no file: give the names of shards, or a pattern such as {path}/*.tar")
    return _stat_of(found)


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, tag_of(found))


class _ShardStream(io.RawIOBase):
    """A `ShardFile` that is read from a position on."""

    def __init__(self, file: ShardFile) -> None:
        self._file, self._position = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._file.size}[whence]
        self._position = max(0, begin + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._file.size)
        if end <= self._position:
            return 0
        [found] = self._file.ranges([self._position], [end])
        buffer[: len(found)] = found
        self._position = end
        return len(found)


# -- errors ------------------------------------------------------------------------------------------------------------


class ShardError(OSError):
    """A shard cannot be read. The message names it, and says what to do.

    If a shard is missing, it is also a FileNotFoundError; if it must not be read, a PermissionError.

    Example:
        >>> import os, tempfile
        >>> from sharded_loader import ShardDataset
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = os.path.join(folder, "train.tar")
        ...     with open(path, "wb") as file:
        ...         _ = file.write(b"no tar file" * 100)
        ...     try:
        ...         ShardDataset(path, index_folder=folder)
        ...     except ShardError as error:
        ...         print("is no plain tar file" in str(error))
        True
    """


class MissingShardError(ShardError, FileNotFoundError):
    """A shard is missing."""


class ForbiddenShardError(ShardError, PermissionError):
    """This process may not read a shard."""


def missing_or_forbidden(name: str, error: Exception, said: str) -> ShardError | None:
    """The error to raise if a shard is missing, or this process may not read it; otherwise None.

    Args:
        name: of the shard.
        error: what was raised.
        said: its text, without secrets.
    """
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        advice = "Check its name. If it was moved or deleted, put it back, or make the dataset again without it"
        return MissingShardError(f"{name}: the shard is missing ({said}). {advice}")
    if isinstance(error, PermissionError) or status in (401, 403):
        advice = "Check its permissions, or storage_options="
        return ForbiddenShardError(f"{name}: this process may not read the shard ({said}). {advice}")
    return None


def local_path(url: str) -> str | None:
    """Where a URL lies on this machine; None if it does not.

    Example:
        >>> local_path("/data/a.tar"), local_path("file:///data/a.tar"), local_path("s3://bucket/a.tar")
        ('/data/a.tar', '/data/a.tar', None)
    """
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file://") else None


def host_of(url: str) -> str | None:
    """The protocol and the host or bucket of a URL; None for a path, and for a host that libraries read differently.

    Example:
        >>> host_of("https://me:secret@host:80/a.tar"), host_of("s3://bucket/a.tar"), host_of("/data/a.tar")
        ('https://host:80', 's3://bucket', None)
    """
    found = re.match(r"([^/]*://)(?:[^/?#\\\s]*@)?([^/?#\\\s]*)(?=[/?#]|$)", url)
    return found and found[1] + found[2]


Options = Mapping[str, Any]
"""For a file system of fsspec."""

Trust = bool | Mapping[str, Options]
"""What files may name beside what lies at their own place: True, or URLs and paths, each with storage options."""


def trusted(url: str, trust: Trust) -> str | None:
    """The URL or path in ``trust`` under which a URL lies.

    Example:
        >>> trusted("s3://b/set/a.tar", {"s3://b/set": {}}), trusted("s3://b-2/a.tar", {"s3://b": {}})
        ('s3://b/set', None)
    """
    places = () if isinstance(trust, bool) else trust
    return next((place for place in places if f"{url}/".startswith(place.rstrip("/") + "/")), None)


def normal(path: str) -> str:
    """A path without ``..``, as the system reads it: the parent of a link is that of the folder that it names.

    Example:
        >>> normal("/data/./set//")
        '/data/set'
    """
    return (os.path.realpath if ".." in path else os.path.normpath)(path).replace(os.sep, "/")


def joined(url: str, names: Iterable[str], trust: Trust = False) -> list[str]:
    """The names in a file as URLs: names that are no URLs lie beside the file.

    Raises:
        ShardError: a name is elsewhere: not below the folder of the file, and no URL of the same host or bucket.

    Example:
        >>> joined("s3://bucket/set/index.json", ["a.tar", "s3://bucket/b.tar"])
        ['s3://bucket/set/a.tar', 's3://bucket/b.tar']
        >>> joined("/data/index.json", ["s3://other/c.tar"], {"s3://other": {}})
        ['s3://other/c.tar']
    """
    host, is_here, found = host_of(url), "://" not in url, []
    folder = url.partition("?")[0].rpartition("/")[0] if url.startswith("http") else url.rpartition("/")[0]
    folder = normal(folder + "/") if is_here else folder
    for name in names:
        is_url = "://" in name or "::" in name  # :: joins file systems
        path = local_path(name) if is_here or is_url or os.path.isabs(name) else None
        leaves = re.search(r"[\0-\x1f]|(?<![^/\\])\.\.(?![^/\\?#;])", unquote(unquote(name))) is not None
        if path is not None and "::" not in path:
            full = os.path.normpath(os.path.join(folder if is_here else "", path)).replace(os.sep, "/")
            leaves = any(sign < " " for sign in path)
            is_own = is_here and trusted(full, {folder: {}}) is not None
        elif is_url:
            full, is_own = name, "::" not in name and host is not None and host_of(name) == host
        else:
            full, is_own = f"{folder}/{name}", True
        if trust is not True and (leaves or not (is_own or trusted(full, trust))):
            how = True if leaves else (host_of(full) or os.path.dirname(full)).rstrip("/") + "/"
            raise ShardError(
                f"{shown(url)} names {shown(name)!r}. A file may name only what lies below its own folder, and URLs "
                f"of its own host or bucket. If you trust this name, give ShardDataset(..., trust={how!r})"
            )
        found.append(full)
    return found


def shown(url: str) -> str:
    """A URL without user, password and query.

    Example:
        >>> shown("https://me:secret@host/a.tar?X-Amz-Signature=abc"), shown("/data/a.tar")
        ('https://host/a.tar', '/data/a.tar')
    """
    if "://" not in url:
        return url
    return re.sub(r"://[^/]*@", "://", url.partition("?")[0])


def redacted(text: str, options: object) -> str:
    """A text without what must not be shown: values of the options, users and queries in URLs.

    Example:
        >>> redacted("no s3cret at http://h/x?sig=1 for me", {"secret": "s3cret"})
        'no *** at http://h/x for me'
    """
    for secret in _words(options):
        text = text.replace(secret, "***")
    return re.sub(r"(://)[^/\s]*@|\?[^\s'\"<>)]*", lambda match: match[1] or "", text)


def _words(options: object) -> list[str]:
    """The texts of nested options that are long enough to be a secret, the longest first."""
    if isinstance(options, str):
        return [options] if len(options) >= 4 else []
    values = options.values() if isinstance(options, Mapping) else options
    found = map(_words, values) if isinstance(values, (ValuesView, list, tuple)) else ()
    return sorted(chain.from_iterable(found), key=len, reverse=True)
