"""A shard as randomly accessible bytes, its version, and the errors of shards.

Formats see only `ShardFile`, so local, cached and remote shards are read alike. A `LocalFile` holds a descriptor, so a
deleted file stays readable (Windows does not delete open files). Threads may share a file; forked children open theirs.

Messages contain no password, key or signature (`shown`, `redacted`). Errors of remote shards do not chain the library's
own exception, because it may contain one. Files that are missing, forbidden or truncated are a `ShardError`.
"""

from __future__ import annotations

import io
import os
import re
import stat
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping, Sequence, ValuesView
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import unquote

from sharded_loader.recordio.positioned import PositionedFile, stable_stat, tag_of, walk


class Stat(NamedTuple):
    """Version of a file: its size in bytes, and the server's ETag or modification time (empty if it has neither)."""

    size: int
    tag: str


# -- files -------------------------------------------------------------------------------------------------------------


class ShardFile(ABC):
    """Base class of files with random access. Its descriptor closes with its last reference: a thread may read.

    Attributes:
        name: name in error messages.
        size: in bytes.
        path: local path, or None for remote files.
        kept: state of a format for this file, until it is closed.
        shared: state of a format for all open files of a dataset in this process.
    """

    name: str
    size: int
    path: str | None = None
    _buffered = 1 << 16  # buffer size of streams, in bytes

    def __init__(self) -> None:
        self.kept: dict[str, Any] = {}
        self.shared: dict[str, Any] = {}

    @abstractmethod
    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        """Return the bytes of each range, in the order of the arguments."""

    @property
    def guess(self) -> int:
        """Number of bytes to read before the length of a header or footer is known: 0.03 % of the file."""
        return min(self.size, 64 + min(self.size >> 12, 1 << 14))

    def close(self) -> None:
        self.kept.clear()

    def stream(self) -> io.BufferedReader:
        """Return a seekable, buffered binary file for libraries that need one."""
        return io.BufferedReader(_ShardStream(self), self._buffered)


class LocalFile(ShardFile):
    """File on this machine; errors show ``name``, by default the path."""

    def __init__(self, path: str, name: str | None = None) -> None:
        super().__init__()
        self.path, self.name = path, name or path
        try:
            self._file = PositionedFile(path)
        except OSError as error:
            why = str(error.strerror)
            found = missing_or_forbidden(self.name, error, why)
            raise found or ShardError(f"{self.name} cannot be opened: {why}") from error
        self._opened_stat = self._file.stat()
        self.size = self._opened_stat.st_size

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        return list(map(self._range, begins, ends))

    def stat(self) -> Stat:
        """Return the version of the file at the path now, or of the open one if that was deleted."""
        try:
            return _stat_of(os.stat(str(self.path)))
        except FileNotFoundError:
            return _stat_of(self._file.stat())

    def is_touched(self) -> bool:
        """Return True if another program has written to the open file. Its deletion alone does not count."""
        now, then = self._file.stat(), self._opened_stat
        is_other = (now.st_mtime_ns, now.st_size) != (then.st_mtime_ns, then.st_size)
        return is_other or (now.st_nlink > 0 and now.st_ctime_ns != then.st_ctime_ns)

    @property
    def is_deleted(self) -> bool:
        """True if the open file was unlinked, so that its disk space is freed when it is closed."""
        return self._file.stat().st_nlink == 0

    def _range(self, begin: int, end: int) -> bytes:
        size = min(end, self.size) - begin
        found = self._file.bytes_at(begin, size) if begin >= 0 <= size else b""
        if len(found) != end - begin or not 0 <= end <= self.size:  # a truncated shard, or the index of another one
            found_text = f"ends within bytes {begin} to {end}, of which {len(found)} are there"
            advice = "Copy it again. If it is to be so, make the dataset again"
            raise ShardError(f"{self.name} {found_text}: it is shorter than when it was indexed. {advice}")
        return found


def local_stat(path: str) -> Stat:
    """Return the version of a local file; any later change changes the tag. Only regular files are accepted."""
    found = stable_stat(path)
    if not stat.S_ISREG(found.st_mode):
        raise ShardError(f"{path} is not a file: give the names of shards, or a pattern such as {path}/*.tar")
    return _stat_of(found)


def check_loops(folder: str) -> None:
    """Raise `ShardError` for a link in or below a folder that leads back to a folder that it is in."""
    try:
        deque(walk(folder), 0)
    except OSError as error:
        raise ShardError(
            f"{error.filename}: {error.strerror}. Remove this link, or give a pattern without **"
        ) from None


def _stat_of(found: os.stat_result) -> Stat:
    return Stat(found.st_size, tag_of(found))


class _ShardStream(io.RawIOBase):
    """Adapter from `ShardFile` to a seekable raw stream."""

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
    """Error for a shard that cannot be read. The message names the shard and a remedy.

    Missing shards raise a subclass that is also a `FileNotFoundError`, forbidden ones a `PermissionError`.

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
        ...         print("is not a plain tar file" in str(error))
        True
    """


class MissingShardError(ShardError, FileNotFoundError):
    """Error for a shard that does not exist."""


class ForbiddenShardError(ShardError, PermissionError):
    """Error for a shard that this process may not read."""


def missing_or_forbidden(name: str, error: Exception, said: str) -> ShardError | None:
    """Convert an error to one of the classes above, by its type or HTTP status; return None for others."""
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status in (404, 410):
        advice = "Check its name. If it was moved or deleted, put it back, or make the dataset again without it"
        return MissingShardError(f"{name}: the shard is missing ({said}). {advice}")
    if isinstance(error, PermissionError) or status in (401, 403):
        advice = "Check its permissions, storage_options=, and whether a signed URL has expired"
        return ForbiddenShardError(f"{name}: this process may not read the shard ({said}). {advice}")
    return None


def local_path(url: str) -> str | None:
    """Return the local path of a URL, or None if it is remote.

    Example:
        >>> local_path("/data/a.tar"), local_path("file:///data/a.tar"), local_path("s3://bucket/a.tar")
        ('/data/a.tar', '/data/a.tar', None)
    """
    if "://" not in url:
        return url
    return url.removeprefix("file://") if url.startswith("file://") else None


def host_of(url: str) -> str | None:
    """Return protocol and host or bucket of a URL; None for paths, and for hosts that libraries parse differently.

    Example:
        >>> host_of("https://me:secret@host:80/a.tar"), host_of("s3://bucket/a.tar"), host_of("/data/a.tar")
        ('https://host:80', 's3://bucket', None)
    """
    found = re.match(r"([^/]*://)(?:[^/?#\\\s]*@)?([^/?#\\\s]*)(?=[/?#]|$)", url)
    return found and found[1] + found[2]


def without_ip(url: str) -> str:
    """Return a URL without an IPv6 address, whose ``[`` would make it a pattern, and whose ``::`` a chain.

    Example:
        >>> without_ip("http://[::1]:80/a.tar")
        'http://ip:80/a.tar'
    """
    return re.sub(r"(?<=://)\[[0-9a-fA-F:.]*\]", "ip", url)


Options = Mapping[str, Any]
"""Options of an fsspec file system."""

Trust = bool | Mapping[str, Options]
"""True for all places, or URLs and paths, with storage options, where lists may name shards outside their own place."""


def trusted(url: str, trust: Trust) -> str | None:
    """Return the place in ``trust`` that contains a URL, or None.

    Example:
        >>> trusted("s3://b/set/a.tar", {"s3://b/set": {}}), trusted("s3://b-2/a.tar", {"s3://b": {}})
        ('s3://b/set', None)
    """
    places = () if isinstance(trust, bool) else trust
    return next((place for place in places if f"{url}/".startswith(place.rstrip("/") + "/")), None)


def normal(path: str) -> str:
    """Return a path without ``..``, resolving links as the system does: the parent of a link is that of its target.

    Example:
        >>> normal("/data/./set//")
        '/data/set'
    """
    return (os.path.realpath if ".." in path else os.path.normpath)(path).replace(os.sep, "/")


def joined(url: str, names: Iterable[str], trust: Trust = False) -> list[str]:
    """Resolve the names in a file to URLs, relative to the file's folder.

    Raises:
        ShardError: A name is neither below that folder, nor on the same host or in the same bucket, nor trusted.

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
        is_chain = "::" in without_ip(name)  # of file systems
        is_url = "://" in name or is_chain
        path = local_path(name) if is_here or is_url or os.path.isabs(name) else None
        leaves = re.search(r"[\0-\x1f]|(?<![^/\\])\.\.(?![^/\\?#;])", unquote(unquote(name))) is not None
        if path is not None and not is_chain:
            full = os.path.normpath(os.path.join(folder if is_here else "", path)).replace(os.sep, "/")
            leaves = any(sign < " " for sign in path)
            is_own = is_here and trusted(full, {folder: {}}) is not None
        elif is_url:
            full, is_own = name, not is_chain and host is not None and host_of(name) == host
        else:
            full, is_own = f"{folder}/{name}", True
        if trust is not True and (leaves or not (is_own or trusted(full, trust))):
            how = True if leaves else (host_of(full) or os.path.dirname(full)).rstrip("/") + "/"
            rule = "A file may name only what lies below its own folder, and URLs of its own host or bucket"
            advice = f"If you trust this name, give ShardDataset(..., trust={how!r})"
            raise ShardError(f"{shown(url)} names {shown(name)!r}. {rule}. {advice}")
        found.append(full)
    return found


def shown(url: str) -> str:
    """Return a URL without user, password and query.

    Example:
        >>> shown("https://me:secret@host/a.tar?X-Amz-Signature=abc"), shown("/data/a.tar")
        ('https://host/a.tar', '/data/a.tar')
    """
    if "://" not in url:
        return url
    return re.sub(r"://[^/]*@", "://", url.partition("?")[0])


def redacted(text: str, options: object) -> str:
    """Remove secrets from a text: option values, and users and queries of URLs.

    Example:
        >>> redacted("no s3cret at http://h/x?sig=1 for me", {"secret": "s3cret"})
        'no *** at http://h/x for me'
    """
    for secret in _secrets(options):
        text = text.replace(secret, "***")
    return re.sub(r"(://)[^/\s]*@|\?[^\s'\"<>)]*", lambda match: match[1] or "", text)


def _secrets(options: object) -> list[str]:
    """Return the strings in nested options that could be secrets (four characters or more), longest first."""
    if isinstance(options, str):
        return [options] if len(options) >= 4 else []
    values = options.values() if isinstance(options, Mapping) else options
    found = map(_secrets, values) if isinstance(values, (ValuesView, list, tuple)) else ()
    return sorted(chain.from_iterable(found), key=len, reverse=True)
