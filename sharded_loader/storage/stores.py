"""Bytes of files, on this machine or wherever fsspec reaches (s3, gcs, http, hf, memory).

Every answer is compared with the expected version (`parts`). If answers have no tag, the store asks for the tag once
more after the last one. So all bytes belong to one version, or there is an error.

A request that fails, or stalls for `STALL` seconds, is tried up to `TRIES` times, with exponential backoff or after the
server's ``Retry-After``. Missing or changed files and denied access are not retried. Retries of s3fs and botocore are
switched off: together, one failure would cost up to 150 requests.

Answers of web servers are written into a fetched file chunk by chunk, in the thread of fsspec, and are summed up there:
1.7 ms of processor time per MB, all of a cached shard included. To join the chunks, write them in another thread and
read the file again for its checksum took 2.6 ms. But a cache on a slow disk slows down all requests of the process.
Reading through `http.client`, in the threads that ask, brought 1.15 times the rate at best (16 connections of 50 MB/s),
0.9 on a quiet machine, and less over HTTPS.

At first, `CONNECTIONS` requests run in parallel, one more after each answer, up to `MAX_REQUESTS`: small servers drop
connections beyond their backlog, and each of these would take a second longer.

A store owns one file system per server. They do not survive a fork, so each process creates its own. Threads may share
a store. Errors are a `ShardError`; neither their messages nor their causes contain passwords, keys or URL queries.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any, BinaryIO, TypeVar

from sharded_loader.extend.tools import RETRIES, after_fork, close_session, path_of, write_whole
from sharded_loader.recordio.positioned import regular
from sharded_loader.storage import files, parts
from sharded_loader.storage.files import Options, ShardError, ShardFile, Stat, Trust, local_path, shown

TRIES = 6
PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before the first retry, and at most before any."""

LONGEST_WAIT = 60.0
"""Maximum seconds to wait for ``Retry-After``."""

STALL = 30.0
"""Seconds in which nothing comes before a request is abandoned."""

PIECE = 8 << 20
"""Bytes per request for a whole file."""

CONNECTIONS = 4
"""Parallel requests per file."""

LEAST_PIECE = 1 << 20
"""Minimum bytes per request for a file that someone waits for."""

MAX_REQUESTS = 4 * CONNECTIONS
"""Parallel requests per process."""

LIST_THRESHOLD = 16
"""Number of files in a folder above which a list is requested, at one request per 1,000 files."""

GAP = 64 << 10
"""Maximum bytes between two ranges that are read in one request."""

Result = TypeVar("Result")

Write = Callable[[int, bytes], object]
"""Function that writes bytes at a position of a file."""


class ObjectStore:
    """Access to files by URL, with retries.

    Args:
        options: options of the fsspec file system, such as ``{"key": ..., "secret": ...}`` or ``{"anon": True}``.
        trust: other places that files may refer to, with their options.

    Attributes:
        retries, requests: number of requests that were retried, and of all attempts.

    Example:
        >>> import os, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with open(os.path.join(folder, "a.bin"), "wb") as file:
        ...         _ = file.write(b"0123456789")
        ...     store = ObjectStore()
        ...     [(url, stat)] = store.find(os.path.join(folder, "*.bin")).items()
        ...     stat.size, store.ranges(url, [1, 7], [3, 9])
        (10, [b'12', b'78'])
    """

    def __init__(self, options: Options | None = None, trust: Trust = False) -> None:
        self._options, self.trust = dict(options or {}), trust
        self._own_hosts: set[str | None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._systems: dict[object, Any] = {}
        self._fast: dict[object, parts.FastS3] = {}
        self._lock = threading.Lock()
        self._slot_count, self._slots = CONNECTIONS, threading.Semaphore(CONNECTIONS)
        self.retries = self.requests = 0
        _live.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {"_options": self._options, "trust": self.trust, "_own_hosts": self._own_hosts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def close(self) -> None:
        """Close the connections. Later requests open new ones."""
        with self._lock:
            systems, self._systems = self._systems, {}
        for system in systems.values():
            close_session(system)

    def limit_options(self, urls: Iterable[str]) -> None:
        """Restrict the options to the hosts of these URLs and of earlier calls."""
        self._own_hosts = (self._own_hosts or set()) | (set(map(files.host_of, urls)) - {None})

    # -- what there is ------------------------------------------------------------------------------------------------

    def find(self, pattern: str) -> dict[str, Stat]:
        """Return the versions of the files that match a pattern or URL, in order of names; there must be some.

        Existing local names take precedence over patterns, such as a folder ``run[1]``.
        """
        is_local = local_path(pattern) is not None
        begin = existing_prefix(pattern, "*?[") if is_local else ""
        if begin == pattern or not is_pattern(pattern):
            return {pattern: self.stat(pattern)}
        if not is_local:
            stats = self._listed(pattern)
        else:
            if "**" in pattern:  # glob would give each file 40 times, or as good as never end
                files.check_loops(begin)
            names = sorted(glob.glob(glob.escape(begin) + pattern[len(begin) :], recursive=True))
            stats = {name.replace(os.sep, "/"): files.local_stat(name) for name in names if os.path.isfile(name)}
        if not stats:
            raise files.MissingShardError(f"no files match {shown(pattern)}: check the pattern")
        return stats

    def _listed(self, pattern: str) -> dict[str, Stat]:
        system, path = self._open(pattern)
        try:
            found = self._with_retries(pattern, lambda: system.glob(path, detail=True))
        except PermissionError as error:
            advice = "If the server only forbids lists: give the names of the shards, or a file that lists them"
            raise type(error)(f"{error}. {advice}") from None
        found = {name: found[name] for name in sorted(found) if found[name].get("type") != "directory"}
        stats = {_url_like(pattern, path, system, name): _stat_of(info) for name, info in found.items()}
        vague = [url for url, stat in stats.items() if stat.size < 0]  # HTTP lists have no sizes
        return {**stats, **dict(zip(vague, self._stats(vague), strict=True))}

    def stats(self, urls: Sequence[str]) -> list[Stat]:
        """Return the versions of files, from folder lists if there are many in one folder."""
        listed: dict[str, Stat] = {}
        for folder, count in Counter(url.rpartition("/")[0] for url in urls).items():
            if count > LIST_THRESHOLD and not is_pattern(folder) and re.match("(?!https?|file)[a-z0-9+.-]+://", folder):
                with contextlib.suppress(ShardError):  # a bucket may forbid lists
                    found = self.find(f"{folder}/*").items()
                    listed.update({f"{folder}/{url.rpartition('/')[2]}": stat for url, stat in found})
        left = [url for url in urls if url not in listed]
        listed.update(zip(left, self._stats(left), strict=True))
        return [listed[url] for url in urls]

    def _stats(self, urls: Sequence[str]) -> list[Stat]:
        with ThreadPoolExecutor(MAX_REQUESTS) as threads:
            return list(threads.map(self.stat, urls))

    def stat(self, url: str) -> Stat:
        """Return the version of a file."""
        system, path = self._open(url)
        how = {"timeout": 2 * STALL} if url.startswith("http") else {}  # other systems take no such argument
        found = _stat_of(self._with_retries(url, lambda: system.info(path, **how)))
        if found.size < 0:
            raise ShardError(f"{shown(url)}: the server does not say how large it is, so no part of it can be read")
        if url.startswith("http") and not (found.size and found.tag):
            # Some servers answer HEAD as if all files were empty, and fsspec before 2025.12 leaves out Last-Modified.
            content, tag = self._with_retries(url, lambda: parts.read(system, path, 0, 1, None, STALL))
            if content and not found.size:
                raise ShardError(f"{shown(url)}: the server says that it has 0 bytes (HEAD), and sends some (GET)")
            return found._replace(tag=found.tag or tag)
        return found

    # -- bytes --------------------------------------------------------------------------------------------------------

    def beginning(self, url: str, nbytes: int) -> bytes:
        """Return up to ``nbytes`` first bytes of a file of any version, with one request."""
        return bytes(self._part(url, 0, nbytes, None, may_end=True)[0])

    def write(self, url: str, content: bytes) -> None:
        """Write a file atomically."""
        path = local_path(url)
        if path is not None:
            try:
                return write_whole(path, content)
            except OSError as error:
                raise ShardError(f"{path} cannot be written ({error}): free space, or give another name") from None
        system, there = self._open(url)
        self._with_retries(url, lambda: system.pipe_file(there, content))

    def ranges(self, url: str, begins: Sequence[int], ends: Sequence[int], stat: Stat | None = None) -> list[bytes]:
        """Return byte ranges of a file, in the order of the arguments; near ones share a request.

        Without ``stat``, any version will do. Raises `ShardError` if the file is another version.
        """
        if not begins:
            return []
        spans, where = merge_ranges(begins, ends, GAP)
        if len(spans) == 1:
            answers = [self._part(url, *spans[0], stat)]
        else:
            with ThreadPoolExecutor(min(len(spans), MAX_REQUESTS)) as threads:
                answers = list(threads.map(lambda span: self._part(url, span[0], span[1], stat), spans))
        self._check_version(url, stat, all(is_sure for _, is_sure in answers))
        found = [(answers[number][0], spans[number][0]) for number in where]
        return [content[begin - at : end - at] for (content, at), begin, end in zip(found, begins, ends, strict=True)]

    def fetch(self, url: str, file: BinaryIO, stat: Stat, *, is_waited_for: bool = False) -> int:
        """Download a whole file into ``file``, with `CONNECTIONS` requests in flight. Return the CRC-32 of its bytes.

        ``is_waited_for`` uses all connections for small files, too. For many concurrent files, that would be four times
        as many requests. Raises `ShardError` if the file is another version.
        """
        piece = min(PIECE, max(LEAST_PIECE, -(-stat.size // CONNECTIONS))) if is_waited_for else PIECE
        spans = [(begin, min(begin + piece, stat.size)) for begin in range(0, stat.size, piece)]
        lock = threading.Lock()

        def write(at: int, chunk: bytes) -> None:
            with lock:
                file.seek(at)
                file.write(chunk)

        threads = ThreadPoolExecutor(CONNECTIONS)
        try:
            running = [threads.submit(self._part, url, *span, stat, write=write) for span in spans]
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            threads.shutdown(cancel_futures=True)
        answers = [one.result() for one in running]  # a failed part comes before the cancelled ones
        file.seek(0, os.SEEK_END)
        self._check_version(url, stat, all(is_sure for _, is_sure in answers))
        found = 0
        for (begin, end), (checksum, _) in zip(spans, answers, strict=True):
            found = parts.joined(found, checksum, end - begin)
        return found

    def _check_version(self, url: str, stat: Stat | None, are_sure: bool) -> None:
        """If not all answers were tagged, check that the file is still the same version."""
        if stat is None or are_sure or not stat.tag or stat.tag.startswith(parts.UNKNOWN):
            return
        if re.match(r"hf://[^*?]*@[0-9a-f]{40}/", url):  # Hugging Face commits are immutable
            return
        system, path = self._open(url)
        system.invalidate_cache(path)
        now = self.stat(url)
        if now.size != stat.size or parts.is_same(stat.tag, now.tag) is False:
            raise _changed(url, "another version is there now")

    def _part(
        self, url: str, begin: int, end: int, stat: Stat | None, may_end: bool = False, write: Write | None = None
    ) -> tuple[Any, bool]:
        """Return a byte range, and True if its answer had the tag of this version.

        With ``write``, the bytes go there, with their position in the file, and their CRC-32 is returned instead.
        """
        if begin == end:  # cannot be expressed as a range request
            return b"", True
        system, path = self._open(url)
        fast_s3 = self._fast[self._access(url)[0]]

        def read() -> tuple[Any, bool]:
            if "://" not in url:
                regular(url)
            landing = None if write is None else parts.Landing(write, begin, end)
            fast = fast_s3.read(path, begin, end, STALL) if url.startswith("s3://") else None
            found, tag = fast or parts.read(system, path, begin, end, stat, STALL, landing)
            same = None if stat is None else parts.is_same(stat.tag, tag)
            if same is False:
                raise parts.Changed("another version is there now")
            if len(found) > end - begin:  # the file system ignores ranges
                found = found[begin:end]
            if landing is not None and found:
                landing.take(found)
            size = len(found) if landing is None else landing.at - begin
            if size != end - begin and not may_end:
                said = f"{size:,} bytes came where {end - begin:,} were asked for"
                raise parts.BadResponse(f"{said}: the file may have been cut")
            return found if landing is None else landing.checksum, bool(same)

        return self._with_retries(url, read)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _open(self, url: str) -> tuple[Any, str]:
        """Return the file system of a URL, and its path there."""
        from fsspec.core import url_to_fs

        key, options = self._access(url)
        with self._lock:
            if key not in self._systems:
                self._fast.setdefault(key, parts.FastS3(options))
                if url.startswith("s3://"):
                    config = {"retries": {"total_max_attempts": 1}, **options.get("config_kwargs", {})}
                    options = {**options, "config_kwargs": config}
                try:
                    bound, plain = parts.bind_credentials(url, options, STALL), files.without_ip(url)
                    system = url_to_fs(plain, skip_instance_cache=True, **bound)[0]
                except Exception as error:  # no such protocol, its library is missing, no connection
                    said = files.redacted(f"{type(error).__name__}: {error}", options)
                    package = error.name if isinstance(error, ImportError) else None
                    advice = f"pip install {package}" if package else "Check the URL, and storage_options="
                    raise ShardError(f"{shown(url)}: {said}. {advice}") from None
                if url.startswith("s3://"):
                    system.retries = 1  # attempts, not retries
                self._systems[key] = system
            system = self._systems[key]
        return system, path_of(system, url)

    def _access(self, url: str) -> tuple[object, Options]:
        """Return a key for the file system of a URL, and the options to open it with."""
        if "://" not in url:
            return None, {}
        server, host = url[: (url + "/").index("/", url.index("://") + 3)], files.host_of(url)
        if self._own_hosts is None or host in self._own_hosts:
            return server, self._options
        place = files.trusted(url, self.trust)
        return (server, place), {} if isinstance(self.trust, bool) or place is None else self.trust[place]

    def _with_retries(self, url: str, request: Callable[[], Result]) -> Result:
        """Return the result of a request, with retries."""
        message, headers = "", None
        for number in range(TRIES):
            if number:
                time.sleep(pause(number, headers))
                self.retries += 1
                RETRIES.append(None)
            self.requests += 1
            try:
                with self._slots:
                    answer = request()
                with self._lock:
                    if self._slot_count < MAX_REQUESTS:  # after a success, allow one more parallel request
                        self._slot_count += 1
                        self._slots.release()
                return answer
            except parts.Changed as changed:
                raise _changed(url, str(changed)) from None
            except parts.NotWritten as failed:
                raise failed.__cause__ or failed from None
            except Exception as raised:
                error = _reason(raised)
                text = str(error) or "the answer took too long, or broke off"
                said = text if isinstance(error, parts.BadResponse) else f"{type(error).__name__}: {text}"
                message, headers = files.redacted(said, [self._options, self.trust]), getattr(error, "headers", None)
                found = files.missing_or_forbidden(shown(url), error, message)
                is_permanent = isinstance(error, _PERMANENT_ERRORS) or getattr(error, "errno", 0) == errno.EINVAL
                if found is not None or is_permanent:
                    raise found or ShardError(f"{shown(url)}: {message}") from None
        advice = "Check the server, and the network between this machine and the server"
        raise ShardError(f"{shown(url)}: {message} (tried {TRIES} times). {advice}")


class RemoteFile(ShardFile):
    """File on a server, in the version ``stat``."""

    _buffered = PIECE

    def __init__(self, store: ObjectStore, url: str, stat: Stat) -> None:
        super().__init__()
        self._store, self._url, self._stat = store, url, stat
        self.name, self.size = shown(url), stat.size

    def ranges(self, begins: Sequence[int], ends: Sequence[int]) -> list[bytes]:
        if not all(0 <= begin <= end <= self.size for begin, end in zip(begins, ends, strict=True)):
            raise ShardError(f"{self.name} has {self.size:,} bytes, and its index names others: make the dataset again")
        return self._store.ranges(self._url, begins, ends, self._stat)


_live: weakref.WeakSet[ObjectStore] = weakref.WeakSet()
_inherited_systems: list[dict[object, Any]] = []


@after_fork
def _begin_afresh() -> None:
    """In a forked child, let each store open file systems of its own, and keep the inherited ones alive.

    Garbage collection would close their connections, which removes them from the selector that the child shares with
    its parent: the parent's requests would hang.
    """
    for store in list(_live):
        _inherited_systems.append(store._systems)
        store._begin()


def is_pattern(url: str) -> bool:
    """Return True if a URL contains wildcards.

    Example:
        >>> is_pattern("s3://bucket/train-*.tar"), is_pattern("https://host/a.tar?key=1")
        (True, False)
    """
    signs = "*[" if re.match("https?:", url) else "*?["  # ? begins a query there
    return any(sign in files.without_ip(url) for sign in signs)


def existing_prefix(path: str, signs: str) -> str:
    """Return the longest beginning of a path that exists literally, or contains none of ``signs``."""
    while any(sign in path for sign in signs) and not os.path.exists(path):
        path = path.rpartition("/")[0]
    return path


def _changed(url: str, how: str) -> ShardError:
    advice = "If the shards have an index file, write that again before: sharded-loader index"
    return ShardError(f"{shown(url)} has changed since the dataset was made ({how}): make the dataset again. {advice}")


def pause(number: int, headers: Mapping[str, str] | None) -> float:
    """Return the seconds to wait before retry ``number`` (from 1), with the headers of the failed answer.

    Example:
        >>> pause(2, None) <= 0.4, pause(2, {"Retry-After": "5"}), pause(2, {"Retry-After": "3600"})
        (True, 5.0, 60.0)
    """
    asked = str((headers or {}).get("Retry-After", ""))
    backoff: float = min(LONGEST_PAUSE, PAUSE * 2 ** (number - 1)) * random.uniform(0.5, 1)
    return max(min(float(asked), LONGEST_WAIT) if asked.isdecimal() else 0.0, backoff)


def _reason(error: Exception) -> Exception:
    """Return the server's error. For HTTP, fsspec reports each failed ``info`` as a missing file."""
    cause = error.__cause__
    is_of_http = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_of_http else error


_PERMANENT_ERRORS = (ImportError, NotImplementedError, TypeError, ValueError, IsADirectoryError)
"""Errors that a retry cannot fix."""


def _stat_of(info: Mapping[str, Any]) -> Stat:
    size = info.get("size")
    return Stat(-1 if size is None else int(size), parts.tag_of(info))


def _url_like(pattern: str, inside: str, system: Any, path: str) -> str:
    """Convert a file system's path to a URL like ``pattern``, whose own path there is ``inside``."""
    if "://" not in pattern or "://" in path:
        return path
    # The common suffix is preceded by a host in URLs, but not in paths.
    same = len(os.path.commonprefix([pattern[::-1], inside[::-1]]))  # noqa: RUF071  # by letters
    begin = inside[: len(inside) - same]
    if same and path.startswith(begin):
        return pattern[: len(pattern) - same] + path[len(begin) :]
    return f"{pattern.partition('://')[0]}://{path if system.root_marker else path.lstrip('/')}"


def merge_ranges(begins: Sequence[int], ends: Sequence[int], gap: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Merge byte ranges with at most ``gap`` bytes between them.

    Returns the merged ranges in ascending order, and for each argument the number of the range that contains it.

    Example:
        >>> merge_ranges([100, 0, 12], [110, 10, 20], 5)
        ([(0, 20), (100, 110)], [1, 0, 0])
    """
    where = [0] * len(begins)
    spans: list[tuple[int, int]] = []
    for number in sorted(range(len(begins)), key=begins.__getitem__):
        begin, end = begins[number], ends[number]
        if spans and begin - spans[-1][1] <= gap:
            spans[-1] = spans[-1][0], max(spans[-1][1], end)
        else:
            spans.append((begin, end))
        where[number] = len(spans) - 1
    return spans, where
