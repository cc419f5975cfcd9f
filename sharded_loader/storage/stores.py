"""The bytes of files: on this machine, or wherever fsspec reaches (s3, gcs, http, hf, memory).

    ObjectStore(options).find("s3://bucket/train-*.tar") -> {url: Stat}
    store.stat(url)                        -> Stat(size, tag): another tag means another file
    store.stats(urls)                      -> the same of many files, by lists of their folders or side by side
    store.beginning(url, nbytes)           -> the first bytes of a file of unknown size
    store.ranges(url, begins, ends, stat)  -> a list of bytes; neighbours are one request, requests run side by side
    store.fetch(url, file, stat)           -> the whole file, in pieces; `CONNECTIONS` are always on their way

Each answer is compared with ``stat`` (`parts`). If an answer has no tag, the store asks for the tag once more after
the last part. So all bytes are those of one version, or there is an error.

A request that fails, or stalls for `STALL` seconds, is tried again `TRIES` times, with growing pauses, or after the
seconds that the server asks for (``Retry-After``); `ObjectStore.retries` counts. What cannot be helped is not tried
again: a file that is missing or has changed, no permission. s3fs and botocore do not try again themselves: otherwise
one failure would be up to 150 requests.

At first `CONNECTIONS` requests run side by side, one more after each answer, and `IN_ALL` at last. A small server lets
few connections wait. It drops the others, and each of these would come a second later.

A store owns a file system per server. File systems do not survive a fork, so each process makes its own, when it first
needs one. Threads may share a store.

What can go wrong: a `ShardError`, which is also a FileNotFoundError or PermissionError where it fits. No message shows
a password, a key or the query of a URL, and none has the library's own error as its cause, because that may show them.
"""

from __future__ import annotations

import contextlib
import glob
import os
import random
import re
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from itertools import islice
from typing import Any, BinaryIO, TypeVar

from sharded_loader.extend.tools import close_session, note_retry, path_of, write_whole
from sharded_loader.storage import files
from sharded_loader.storage.files import Options, ShardError, ShardFile, Stat, Trust, local_path, shown
from sharded_loader.storage.parts import UNKNOWN, Changed, FastS3, Unfit, bound, is_same, part, tag_of

TRIES = 6
PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds before the second try, and at most before any."""

LONGEST_WAIT = 60.0
"""Seconds to wait at most, if the server asks to wait."""

STALL = 30.0
"""Seconds without an answer, after which a request is given up."""

PIECE = 8 << 20
"""Bytes of one request for a part of a whole file."""

CONNECTIONS = 4
"""Requests for one file that run side by side."""

LEAST_PIECE = 1 << 20
"""Bytes of one request, at least, for a file that is waited for."""

IN_ALL = 4 * CONNECTIONS
"""Requests of a process that run side by side."""

LISTED = 16
"""Files of a folder, above which its list is asked for: that takes one request for each 1,000 files."""

GAP = 64 << 10
"""Neighbours are read in one request if no more bytes than these lie between them."""

Result = TypeVar("Result")


class ObjectStore:
    """Reads files by their URLs.

    Args:
        options: for the file system of fsspec, such as ``{"key": ..., "secret": ...}`` or ``{"anon": True}``.
        trust: what files may name elsewhere, with the options for it.

    Attributes:
        retries: how many requests were tried again.
        requests: how many there were.

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
        self._given: set[str | None] | None = None
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        self._systems: dict[object, Any] = {}
        self._fast: dict[object, FastS3] = {}
        self._lock = threading.Lock()
        self._places, self._turns = CONNECTIONS, threading.Semaphore(CONNECTIONS)
        self.retries = self.requests = 0
        _live.add(self)

    def __getstate__(self) -> dict[str, object]:
        return {"_options": self._options, "trust": self.trust, "_given": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin()

    def close(self) -> None:
        """Close the connections. The store may be used again, and opens new ones."""
        with self._lock:
            systems, self._systems = self._systems, {}
        for system in systems.values():
            if os.getpid() == self._pid:
                close_session(system)

    def give(self, urls: Iterable[str]) -> None:
        """Have the hosts of these URLs get the options. Without any call, all hosts get them."""
        self._given = (self._given or set()) | (set(map(files.host_of, urls)) - {None})

    # -- what there is ------------------------------------------------------------------------------------------------

    def find(self, pattern: str) -> dict[str, Stat]:
        """The files that a pattern with ``*`` and ``?`` means, or the one file of a plain URL, in order of their names.

        On this machine, what exists as it is written is a name: a folder ``run[1]`` too, in which a pattern is looked
        for.

        Raises:
            FileNotFoundError: there are none.
        """
        is_local = local_path(pattern) is not None
        begin = existing(pattern, "*?[") if is_local else ""
        if begin == pattern or not is_pattern(pattern):
            return {pattern: self.stat(pattern)}
        if not is_local:
            stats = self._listed(pattern)
        else:
            folder = begin + "/" if pattern[len(begin)] == "/" else ""
            names = sorted(glob.glob(pattern[len(folder) :], root_dir=folder or None, recursive=True))
            paths = [folder + name.replace(os.sep, "/") for name in names]
            stats = {path: files.local_stat(path) for path in paths if os.path.isfile(path)}
        if not stats:
            raise files.MissingShardError(f"no files match {shown(pattern)}: check the pattern")
        return stats

    def _listed(self, pattern: str) -> dict[str, Stat]:
        system, path = self._open(pattern)
        try:
            found = self._try(pattern, lambda: system.glob(path, detail=True))
        except PermissionError as error:
            advice = "If the server only forbids lists: give the names of the shards, or a file that lists them"
            raise type(error)(f"{error}. {advice}") from None
        found = {name: found[name] for name in sorted(found) if found[name].get("type") != "directory"}
        stats = {_url_like(pattern, path, system, name): _stat_of(info) for name, info in found.items()}
        vague = [url for url, stat in stats.items() if stat.size < 0]  # lists of http say no sizes
        return {**stats, **dict(zip(vague, self._stats(vague), strict=True))}

    def stats(self, urls: Sequence[str]) -> list[Stat]:
        """The sizes and tags of files. Of many in one folder, they come from its list, if the server has one."""
        listed: dict[str, Stat] = {}
        for folder, count in Counter(url.rpartition("/")[0] for url in urls).items():
            if count > LISTED and not is_pattern(folder) and re.match("(?!https?|file)[a-z0-9+.-]+://", folder):
                with contextlib.suppress(ShardError):  # a bucket may forbid lists
                    found = self.find(f"{folder}/*").items()
                    listed.update({f"{folder}/{url.rpartition('/')[2]}": stat for url, stat in found})
        left = [url for url in urls if url not in listed]
        listed.update(zip(left, self._stats(left), strict=True))
        return [listed[url] for url in urls]

    def _stats(self, urls: Sequence[str]) -> list[Stat]:
        with ThreadPoolExecutor(IN_ALL) as threads:
            return list(threads.map(self.stat, urls))

    def stat(self, url: str) -> Stat:
        """The size and the tag of a file."""
        system, path = self._open(url)
        found = _stat_of(self._try(url, lambda: system.info(path)))
        if found.size < 0:
            raise ShardError(f"{shown(url)}: the server does not say how large it is, so no part of it can be read")
        if not found.tag and found.size and url.startswith("http"):  # fsspec before 2025.12 leaves out Last-Modified
            return found._replace(tag=self._try(url, lambda: part(system, path, 0, 1, None, STALL))[1])
        return found

    # -- bytes --------------------------------------------------------------------------------------------------------

    def beginning(self, url: str, nbytes: int) -> bytes:
        """The first bytes of a file of any version; fewer if it is shorter. One request."""
        return self._part(url, 0, nbytes, None, may_end=True)[0]

    def write(self, url: str, content: bytes) -> None:
        """Write a file whole, or not at all.

        Raises:
            OSError: it cannot be written.
        """
        path = local_path(url)
        if path is not None:
            write_whole(path, content)
            return
        system, there = self._open(url)
        self._try(url, lambda: system.pipe_file(there, content))

    def ranges(self, url: str, begins: Sequence[int], ends: Sequence[int], stat: Stat | None = None) -> list[bytes]:
        """Parts of a file, in the order in which they are asked for.

        Args:
            url: of the file.
            begins, ends: where each part begins and ends, in bytes.
            stat: of the file, as it was. None: of any version.

        Raises:
            ShardError: it is another file now.
        """
        if not begins:
            return []
        spans, where = merged(begins, ends, GAP)
        if len(spans) == 1:
            answers = [self._part(url, *spans[0], stat)]
        else:
            with ThreadPoolExecutor(min(len(spans), IN_ALL)) as threads:
                answers = list(threads.map(lambda span: self._part(url, span[0], span[1], stat), spans))
        self._compare(url, stat, all(is_sure for _, is_sure in answers))
        parts = [(answers[number][0], spans[number][0]) for number in where]
        return [content[begin - at : end - at] for (content, at), begin, end in zip(parts, begins, ends, strict=True)]

    def fetch(self, url: str, file: BinaryIO, stat: Stat, *, is_waited_for: bool = False) -> None:
        """Write a whole file into another one. Each piece is written when it comes, and the next one is asked for.

        Args:
            url, stat: of the file.
            file: the other one.
            is_waited_for: use all connections for it, also if it is small. For many files side by side, that would be
                four times as many requests.

        Raises:
            ShardError: it is another file now.
        """
        piece = min(PIECE, max(LEAST_PIECE, -(-stat.size // CONNECTIONS))) if is_waited_for else PIECE
        begins, all_are_sure = iter(range(0, stat.size, piece)), True
        running: dict[Future[tuple[bytes, bool]], int] = {}
        threads = ThreadPoolExecutor(max(1, min(pieces_of(stat.size, piece), CONNECTIONS)))
        try:
            while True:
                for begin in islice(begins, CONNECTIONS - len(running)):  # no more than these lie in memory
                    end = min(begin + piece, stat.size)
                    running[threads.submit(self._part, url, begin, end, stat)] = begin
                if not running:
                    break
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    file.seek(running.pop(done))
                    content, is_sure = done.result()
                    file.write(content)
                    all_are_sure = all_are_sure and is_sure
        finally:
            threads.shutdown(cancel_futures=True)
        file.seek(0, os.SEEK_END)
        self._compare(url, stat, all_are_sure)

    def _compare(self, url: str, stat: Stat | None, are_sure: bool) -> None:
        """After reading: if not all answers had the tag, see whether the file is still the same."""
        if stat is None or are_sure or not stat.tag or stat.tag.startswith(UNKNOWN):
            return
        if re.match(r"hf://[^*?]*@[0-9a-f]{40}/", url):  # a commit of Hugging Face never changes
            return
        system, path = self._open(url)
        system.invalidate_cache(path)
        now = self.stat(url)
        if now.size != stat.size or is_same(stat.tag, now.tag) is False:
            raise _changed(url, "another version is there now")

    def _part(self, url: str, begin: int, end: int, stat: Stat | None, may_end: bool = False) -> tuple[bytes, bool]:
        """A part, and whether its answer said that it is of this version."""
        if begin == end:  # which no request can say
            return b"", True
        system, path = self._open(url)
        fast_s3 = self._fast[self._access(url)[0]]

        def read() -> tuple[bytes, bool]:
            fast = fast_s3.read(path, begin, end, STALL) if url.startswith("s3://") else None
            found, tag = fast or part(system, path, begin, end, stat, STALL)
            same = None if stat is None else is_same(stat.tag, tag)
            if same is False:
                raise Changed("another version is there now")
            if len(found) > end - begin:  # a file system that does not know requests for parts
                found = found[begin:end]
            if len(found) != end - begin and not may_end:
                said = f"{len(found):,} bytes came where {end - begin:,} were asked for"
                raise Unfit(f"{said}: the file may have been cut")
            return found, bool(same)

        return self._try(url, read)

    # -- requests -----------------------------------------------------------------------------------------------------

    def _open(self, url: str) -> tuple[Any, str]:
        """The file system of a URL, and its path there."""
        from fsspec.core import url_to_fs

        if os.getpid() != self._pid:
            self._begin()
        key, options = self._access(url)
        with self._lock:
            if key not in self._systems:
                self._fast.setdefault(key, FastS3(options))
                if url.startswith("s3://"):
                    config = {"retries": {"total_max_attempts": 1}, **options.get("config_kwargs", {})}
                    options = {**options, "config_kwargs": config}
                try:
                    system = url_to_fs(url, skip_instance_cache=True, **bound(url, options))[0]
                except Exception as error:  # no such protocol, its library is missing, no connection
                    said = files.redacted(f"{type(error).__name__}: {error}", options)
                    raise ShardError(f"{shown(url)}: {said}. Check the URL, and storage_options=") from None
                if url.startswith("s3://"):
                    system.retries = 1  # the number of tries
                self._systems[key] = system
            system = self._systems[key]
        return system, path_of(system, url)

    def _access(self, url: str) -> tuple[object, Options]:
        """What tells the file system of a URL from others, and its options."""
        if "://" not in url:
            return None, {}
        server, host = url[: (url + "/").index("/", url.index("://") + 3)], files.host_of(url)
        if self._given is None or host in self._given:
            return server, self._options
        place = files.trusted(url, self.trust)
        return (server, place), {} if isinstance(self.trust, bool) or place is None else self.trust[place]

    def _try(self, url: str, request: Callable[[], Result]) -> Result:
        """The answer to a request, which is tried again if it fails."""
        message, headers = "", None
        for number in range(TRIES):
            if number:
                time.sleep(pause(number, headers))
                self.retries += 1
                note_retry()
            self.requests += 1
            try:
                with self._turns:
                    answer = request()
                with self._lock:
                    if self._places < IN_ALL:  # one more request may run beside the others
                        self._places += 1
                        self._turns.release()
                return answer
            except Changed as changed:
                raise _changed(url, str(changed)) from None
            except Exception as raised:
                error = _reason(raised)
                said = str(error) if isinstance(error, Unfit) else f"{type(error).__name__}: {error}"
                message, headers = files.redacted(said, [self._options, self.trust]), getattr(error, "headers", None)
                found = files.missing_or_forbidden(shown(url), error, message)
                if found is None and isinstance(error, _HOPELESS):
                    found = ShardError(f"{shown(url)}: {message}")
                if found is not None:
                    raise found from None
        advice = "Check the server, and the network between this machine and the server"
        raise ShardError(f"{shown(url)}: {message} (tried {TRIES} times). {advice}")


class RemoteFile(ShardFile):
    """A file of a server.

    Args:
        store: reads it.
        url: where it lies.
        stat: what it was when it was found.
    """

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
_of_the_parent: list[dict[object, Any]] = []


def _after_fork_in_child() -> None:
    """Keep the file systems that the child has inherited, for ever.

    If they were collected, the child would close their connections, and so take them out of the selector that it shares
    with its parent. The parent's requests would then never be answered.
    """
    _of_the_parent.extend(store._systems for store in list(_live))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def is_pattern(url: str) -> bool:
    """Whether a URL stands for all files that match it.

    Example:
        >>> is_pattern("s3://bucket/train-*.tar"), is_pattern("https://host/a.tar?key=1")
        (True, False)
    """
    return any(sign in url for sign in ("*[" if re.match("https?:", url) else "*?["))  # ? begins a query there


def existing(path: str, signs: str) -> str:
    """The longest beginning of a path that exists as it is written, or that has none of these signs."""
    while any(sign in path for sign in signs) and not os.path.exists(path):
        path = path.rpartition("/")[0]
    return path


def pieces_of(size: int, piece: int = PIECE) -> int:
    """In how many pieces a file of this size is fetched."""
    return -(-size // piece)


def _changed(url: str, how: str) -> ShardError:
    advice = "If the shards have an index file, write that again before: sharded-loader index"
    return ShardError(f"{shown(url)} has changed since the dataset was made ({how}): make the dataset again. {advice}")


def pause(number: int, headers: Mapping[str, str] | None) -> float:
    """Seconds before a try.

    Args:
        number: of the try, from 1 on.
        headers: of the answer to the try before; ``Retry-After`` may say how long to wait.

    Example:
        >>> pause(2, None) <= 0.4, pause(2, {"Retry-After": "5"}), pause(2, {"Retry-After": "3600"})
        (True, 5.0, 60.0)
    """
    asked = str((headers or {}).get("Retry-After", ""))
    backoff: float = min(LONGEST_PAUSE, PAUSE * 2 ** (number - 1)) * random.uniform(0.5, 1)
    return max(min(float(asked), LONGEST_WAIT) if asked.isdigit() else 0.0, backoff)


def _reason(error: Exception) -> Exception:
    """What the server said. For http, fsspec calls each error of ``info`` a missing file."""
    cause = error.__cause__
    is_of_http = isinstance(cause, TimeoutError) or type(cause).__module__.startswith("aiohttp")
    return cause if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and is_of_http else error


_HOPELESS = (ImportError, NotImplementedError, TypeError, ValueError, IsADirectoryError)
"""Errors of requests that will not succeed later."""


def _stat_of(info: Mapping[str, Any]) -> Stat:
    size = info.get("size")
    return Stat(-1 if size is None else int(size), tag_of(info))


def _url_like(pattern: str, inside: str, system: Any, path: str) -> str:
    """A path that a file system has named, as a URL of the pattern's kind; ``inside``: the pattern as a path there."""
    if "://" not in pattern or "://" in path:
        return path
    # Before what is the same there is a host, which paths lack.
    same = len(os.path.commonprefix([pattern[::-1], inside[::-1]]))  # noqa: RUF071  # by letters
    begin = inside[: len(inside) - same]
    if same and path.startswith(begin):
        return pattern[: len(pattern) - same] + path[len(begin) :]
    return f"{pattern.partition('://')[0]}://{path if system.root_marker else path.lstrip('/')}"


def merged(begins: Sequence[int], ends: Sequence[int], gap: int) -> tuple[list[tuple[int, int]], list[int]]:
    """Neighbouring stretches as one.

    Args:
        begins, ends: of the stretches, in any order.
        gap: how many bytes may lie between neighbours.

    Returns:
        Longer stretches in ascending order, and for each given one the number of the one that it lies in.

    Example:
        >>> merged([100, 0, 12], [110, 10, 20], 5)
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
