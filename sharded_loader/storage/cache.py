"""Cache of whole shards on a local disk, shared by all processes that use the same folder.

    <hash>-<size>.shard    a shard; the hash covers URL, size and tag, so each version has a name of its own
    <hash>-<size>.sum      its checksum; the mtime of this file is the shard's priority
    <hash>-<size>.part     a download in progress; counted with its final size, renamed once it is complete on disk
    locks/                 locks for groups of shards, and one for free space; released if their process dies
    readers/               register of prefetching readers (`read_ahead`)

If several processes want the same shard, one downloads it and the others wait. Eviction deletes the shard first that is
needed last, as far as a loader has announced it (`ShardCache.let_go`), then the least recently used one, or an unlocked
``.part``. A shard whose priority lies in the future is needed now: it goes last, with a log line, and never for a
prefetch. An open shard stays readable after its deletion (on Windows it cannot be deleted while open).

`seal` sets the mtime of a shard to `SEALED_MTIME`, which any write changes, and records its ctime, which programs
cannot set. Only if either differs does `is_intact` read the file (0.3 s per GB) to compare the checksum. Damaged shards
are fetched again. All errors are a `ShardError` that names the file or folder.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import math
import os
import re
import shutil
import stat as modes
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sharded_loader.extend.tools import NO_SPACE, bytes_of_text, host_clock, logger, refuse_arguments
from sharded_loader.recordio.positioned import lock_at
from sharded_loader.storage.files import LocalFile, ShardError, Stat, shown

LOCKS = 1024
"""Number of lock files. Shards with the same lock are fetched one after the other: 0.1 pairs out of 16 concurrent
shards (1.9 with 64 lock files)."""

TRIES = 10
"""Attempts to open a shard that other processes delete right after its download."""

DELETE_SECONDS = 30.0 if os.name == "nt" else 0.0
"""Seconds to wait for an undeletable file. Windows deletes a file only when no process has it open."""

SEALED_MTIME = 10**9
"""mtime of intact shards (in 2001): older than any checksum file, except those of shards that were let go."""

HOLD_SECONDS = 10.0
"""Seconds for which a shard stays needed after `ShardCache.keep`, which readers call every second (up to 6 seconds late
on a heavily oversubscribed machine)."""

Fetch = Callable[[BinaryIO], "int | None"]
"""Function that writes the bytes of a shard into a file. It returns their CRC-32, or None if it has not computed it."""

TIMES_SECONDS = 1.0
"""Seconds for which the times of last use stay known: reading those of 5,000 shards takes 16 ms, in which no other
process can make room."""

_NAME = re.compile(r"[0-9a-f]{40}-(\d+)\.(shard|part)")


class ShardCache:
    """Disk cache for the shards of a `ShardDataset` in an object store.

    Any number of processes may share the folder, each through its own object.

    Args:
        folder: directory for the shards, created if missing. Network file systems must support locks.
        max_bytes: limit of disk space: a number of bytes, or a text such as ``"100 GB"`` or ``"20 GiB"``.

    Attributes:
        fetched: number of shards that this object has downloaded.
        evicted: number of shards that this object has deleted to free space.
        read_only: True if this process cannot write to the folder. All shards must then be in the cache already.

    Raises:
        ShardError: The folder is not writable, and contains no shards.
        TypeError: ``max_bytes`` is missing, or an argument is unknown.
        ValueError: ``max_bytes`` is not a size.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     cache = ShardCache(folder, "1 MB")
        ...     cache.max_bytes, cache.used_bytes
        (1000000, 0)
    """

    def __init__(self, folder: str | os.PathLike[str], max_bytes: int | str | None = None, **unknown: NoReturn) -> None:
        refuse_arguments("ShardCache", unknown, type(self).__init__)
        if max_bytes is None:
            raise TypeError('ShardCache needs max_bytes, the limit of disk space: ShardCache(folder, "100 GB")')
        self.folder, self.max_bytes = Path(folder).absolute(), bytes_of_text(max_bytes)
        self.fetched = self.evicted = 0
        self.read_only = False
        self._times: dict[str, float] = {}  # name of a file -> its last use, as read since `_read_at`
        self._read_at = -math.inf
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            with self._lock("room"):
                pass
        except (OSError, NotImplementedError) as error:  # NotImplementedError: file system without locks
            refused = getattr(error, "errno", 0) in (errno.EACCES, errno.EPERM, errno.EROFS)
            self.read_only = refused and bool(self._files())
            if not self.read_only:
                text = f"the cache folder {self.folder} cannot be written to ({error}): give another one"
                raise ShardError(text) from None

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "_times": {}, "_read_at": -math.inf}  # another machine has another clock

    def __repr__(self) -> str:
        return f"ShardCache({str(self.folder)!r}, {self.max_bytes})"

    @property
    def limit_text(self) -> str:
        """Description of the size limit, for error messages."""
        return f"the cache {self.folder} may take {self.max_bytes:,}"

    @property
    def used_bytes(self) -> int:
        """Bytes of all shards in the cache, including downloads in progress."""
        return sum(self._files().values())

    def open(self, url: str, stat: Stat, fetch: Fetch) -> LocalFile:
        """Open a shard, downloading it with ``fetch`` if needed.

        Raises:
            ShardError: The shard does not fit, or is missing in a read-only folder.
            OSError: Raised by ``fetch``.
        """
        path = self._path(url, stat)
        for _ in range(1 if self.read_only else TRIES):
            with self._naming_folder(url):
                found = self._open_cached(path, url, stat, is_locked=self.read_only)
                if found is None and not self.read_only:
                    with self._lock(_lock_name(path.name)):
                        # Another process may have fetched it meanwhile.
                        found = self._open_cached(path, url, stat, is_locked=True)
                        if found is None:
                            self._fetch(path, url, stat, fetch)
                if found is not None:
                    return found
        if self.read_only:
            text = f"{shown(url)} is missing or damaged in the cache folder {self.folder}, which is read-only"
            raise ShardError(f"{text}: fill the folder where it can be written to, or give another one")
        advice = "give a larger max_bytes, or a folder that no other program cleans"
        raise ShardError(f"{shown(url)} was deleted from {self.folder} at once, by others: {advice}")

    def prepare(self, url: str, stat: Stat, fetch: Fetch, is_wanted: Callable[[], bool]) -> bool:
        """Prefetch a shard, unless that would evict needed ones. Return True if it is in the cache and was wanted.

        ``is_wanted`` is asked again with the lock held.
        """
        path = self._path(url, stat)
        if not path.exists() and not self.read_only:  # in a read-only folder, `open` reports it
            with self._naming_folder(url), self._lock(_lock_name(path.name)):
                if is_wanted() and not path.exists():
                    self._fetch(path, url, stat, fetch, is_ahead=True)
        if not is_wanted():
            return False
        is_there = self.keep(url, stat)  # also if a worker has fetched it meanwhile
        if not is_wanted():  # the reader moved on between both calls
            self.let_go(url, stat)
        return is_there

    def keep(self, url: str, stat: Stat) -> bool:
        """Protect a shard from eviction for `HOLD_SECONDS` seconds. Return True if it is in the cache."""
        return self._touch(self._path(url, stat), time.time() + HOLD_SECONDS)

    def let_go(self, url: str, stat: Stat, batches: int | None = None) -> None:
        """Release a shard for eviction; ``batches`` is the number of batches before its next use, None if unknown."""
        self._touch(self._path(url, stat), 0 if batches is None else max(1, SEALED_MTIME - batches))

    def _touch(self, path: Path, seconds: float) -> bool:
        try:
            self._times.pop(path.name, None)
            os.utime(checksum_path(path), (seconds, seconds))
        except OSError:
            return False
        return path.exists()

    def _path(self, url: str, stat: Stat) -> Path:
        key = "\0".join((url, str(stat.size), stat.tag)).encode(errors="surrogatepass")
        name = hashlib.sha256(key).hexdigest()[:40]
        return self.folder / f"{name}-{stat.size}.shard"

    def _open_cached(self, path: Path, url: str, stat: Stat, is_locked: bool) -> LocalFile | None:
        """Open a cached shard if it is intact. With its lock, compare checksums and delete a damaged shard."""
        try:
            if not modes.S_ISREG(os.stat(path).st_mode):
                raise ShardError(f"{shown(url)}: {path} is in its place in the cache, and is not a file: delete it")
            if not is_intact(path, stat.size, is_locked):
                if is_locked and not self.read_only:
                    _delete(path)
                return None
            file = LocalFile(str(path), f"{shown(url)} (cached as {path})")
        except FileNotFoundError:
            return None
        if self._last_used(path.name) < time.time():  # keep priorities that lie in the future: a reader needs the shard
            self._touch(path, time.time())
        return file

    def _fetch(self, path: Path, url: str, stat: Stat, fetch: Fetch, is_ahead: bool = False) -> None:
        """Download a shard, with its lock held. If the disk runs full, evict others and retry once."""
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)  # another program may have deleted the folder
        part = path.with_suffix(".part")
        for is_full in (False, True):
            try:
                if not self._make_room(part, url, stat.size, is_ahead, is_full):
                    return
                # Not "wb", which truncates: where locks have no effect, another machine may be writing the same bytes.
                # Leftovers of a dead process are overwritten.
                with open(part, "r+b") as file:
                    checksum = fetch(file)
                    written = file.tell()
                    file.flush()
                    os.fsync(file.fileno())
                    if written != stat.size:
                        text = f"{shown(url)} has {written:,} bytes, and had {stat.size:,}: make the dataset again"
                        raise ShardError(text)
                    if not os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                        return  # the locks were deleted, and another process downloads this shard as well
                seal(part, path, checksum)
                self.fetched += 1
                return
            except BaseException as error:
                with contextlib.suppress(OSError):
                    part.unlink()
                if isinstance(error, FileNotFoundError) and self._is_inside(error):
                    return  # the download or the folder was deleted: `open` retries
                if type(error) is not OSError:  # our own errors are subclasses
                    raise
                if error.errno not in NO_SPACE or is_full or not self._files():
                    said = f"{shown(url)} cannot be written to {self.folder} ({error}): free some space"
                    raise ShardError(said) from None

    def _make_room(self, part: Path, url: str, size: int, is_ahead: bool, is_full: bool) -> bool:
        """Evict shards until ``size`` bytes fit, and reserve them. Return False if a prefetch does not fit.

        ``is_full``: as many bytes go as come, because the free space of the disk does not show a quota.
        """
        if size > self.max_bytes:
            raise ShardError(f"{shown(url)} has {size:,} bytes, and {self.limit_text}: give a larger max_bytes")
        until = host_clock.now() + DELETE_SECONDS
        while True:
            with self._lock("room"):
                found, now, is_waiting, stuck = self._files(), time.time(), False, ""
                missing = max(self._excess_bytes(found, size), size * is_full)
                # No system calls if there is room: each may wait 5 ms for the GIL.
                files = self._by_last_use(found) if missing > 0 else []
                if is_ahead and missing > 0:
                    old = [name for used, name in files if used <= now and self._may_go(name, part)]
                    if missing > sum(map(found.__getitem__, old)):
                        return False
                for used, name in files:
                    if missing <= 0:
                        break
                    try:
                        is_current = self._times.pop(name, None) == self._last_used(name)
                        if not is_current or not self._may_go(name, part):
                            is_waiting = True
                            continue
                        _delete(self.folder / name)
                    except OSError as error:
                        stuck = f"{self.folder / name} cannot be deleted ({error})"
                        continue
                    self.evicted += 1
                    missing -= found[name]
                    if used > now:
                        _warn_of_eviction(self.limit_text)
                if missing <= 0 or not (is_waiting or stuck):  # the write reports a full disk
                    part.touch()
                    return True
            if not is_waiting and host_clock.now() >= until:
                advice = "Delete this file, or give another folder"
                raise ShardError(f"{shown(url)} has no room in the cache: {stuck}. {advice}")
            time.sleep(0.02)  # other downloads are in progress

    def _excess_bytes(self, found: Mapping[str, int], size: int) -> int:
        """Return how many bytes to evict from these files before a file of ``size`` bytes fits."""
        missing, disk = sum(found.values()) + size - self.max_bytes, shutil.disk_usage(self.folder)
        unwritten = sum(taken for name, taken in found.items() if name.endswith(".part"))
        return max(missing, unwritten + size - disk.free) if disk.total else missing  # total is 0 if unknown

    def _may_go(self, name: str, part: Path) -> bool:
        """Return True if a file is a shard, or a download whose process has died."""
        if name.endswith(".shard") or _lock_name(name) == _lock_name(part.name):  # the caller holds the lock of `part`
            return True
        try:
            with self._lock(_lock_name(name)).acquire(timeout=0):
                return (self.folder / name).exists()  # False if it was renamed to a shard meanwhile
        except TimeoutError:
            return False

    def _files(self) -> dict[str, int]:
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:  # another program may have deleted the folder
            return {}
        return {match[0]: int(match[1]) for match in map(_NAME.fullmatch, names) if match is not None}

    def _by_last_use(self, names: Iterable[str]) -> list[tuple[float, str]]:
        """Return times of last use in order, with the names. They may be `TIMES_SECONDS` old."""
        now, times = host_clock.now(), self._times.copy()
        if now - self._read_at > TIMES_SECONDS:
            times, self._read_at = {}, now
        times |= {name: self._last_used(name) for name in names if name not in times}
        found = sorted([(times[name], name) for name in names])
        self._times = times  # last, because other threads remove what they change
        return found

    def _last_used(self, name: str) -> float:
        try:
            found = os.stat(f"{self.folder}{os.sep}{name.replace('.shard', '.sum')}").st_mtime
        except FileNotFoundError:
            return 0.0
        return found if found < time.time() + 2 * HOLD_SECONDS else 0.0  # later: the clock was put back

    def _is_inside(self, error: OSError) -> bool:
        return str(error.filename).startswith(str(self.folder))

    @contextlib.contextmanager
    def _naming_folder(self, url: str) -> Iterator[None]:
        """Convert errors about this folder into a `ShardError` that names it."""
        try:
            yield
        except OSError as error:
            if not self._is_inside(error):
                raise
            raise ShardError(f"{shown(url)}: the cache folder {self.folder} cannot be used ({error})") from None

    def _lock(self, name: str) -> Any:
        return lock_at(self.folder / "locks" / name)


@lru_cache
def _warn_of_eviction(limit_text: str) -> None:
    """Log the eviction of a needed shard, once per cache."""
    advice = "Give a larger max_bytes, free disk space, or use a smaller window (this is shown once)"
    text = "a shard was deleted from the cache that a reader still needs, and is fetched again: %s. %s"
    logger.warning(text, limit_text, advice)


def _lock_name(name: str) -> str:
    return str(int(name[:8], 16) % LOCKS)


def _delete(path: Path) -> None:
    path.unlink(missing_ok=True)  # first, so that a failed unlink leaves the checksum in place
    if not path.exists():  # otherwise another process has already fetched it again
        checksum_path(path).unlink(missing_ok=True)


# -- integrity of cached shards ----------------------------------------------------------------------------------------


def checksum_path(path: Path) -> Path:
    return path.with_suffix(".sum")


def seal(part: Path, path: Path, checksum: int | None = None) -> None:
    """Rename a finished download to ``path``, and store its checksum."""
    checksum = _checksum(part) if checksum is None else checksum
    checksum_path(path).touch()  # shards without this file are evicted first
    os.replace(part, path)
    _note(path, checksum)


def _note(path: Path, checksum: int) -> None:
    with contextlib.suppress(OSError):  # file systems without mtimes: each opening compares the checksum
        os.utime(path, (SEALED_MTIME, SEALED_MTIME))
    checksum_path(path).write_text(f"{checksum:08x} {os.stat(path).st_ctime_ns}")


def is_intact(path: Path, size: int, may_read: bool) -> bool:
    """Return True if a shard still has its sealed content. Without ``may_read``, unexpected timestamps mean False."""
    try:
        checksum, changed = checksum_path(path).read_text().split()
        found = os.stat(path)
        if found.st_size != size:
            return False
        if (found.st_mtime, found.st_ctime_ns) == (SEALED_MTIME, int(changed)):
            return True
        if not may_read or _checksum(path) != int(checksum, 16):
            return False
    except (FileNotFoundError, ValueError):
        return False
    with contextlib.suppress(OSError):  # owned by another user
        _note(path, int(checksum, 16))
    return True


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(4 << 20):
            found = zlib.crc32(chunk, found)
    return found
