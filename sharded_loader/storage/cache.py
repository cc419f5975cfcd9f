"""Whole shards on this machine's disk, shared by all processes that name the same folder.

    ShardCache(folder, "100 GB").open(url, stat, fetch) -> LocalFile

    <hash>-<size>.shard    a shard; the hash is of its URL, size and tag, so another file has another name
    <hash>-<size>.sum      its checksum; the time of this file says when the shard is needed
    <hash>-<size>.part     a shard that a process fetches; its whole size counts
    locks/                 one lock for a few shards each, and one for the room: who dies loses his locks
    readers/               who fetches ahead (`read_ahead`)

A shard is renamed when the disk has all of it: half of one is never read. Of several processes that want the same
shard, one fetches it and the others wait. To make room, the cache deletes first the shard that is needed last, as far
as a loader has said so (`ShardCache.let_go`). Then it deletes the one that was not needed for the longest time, or a
part that no process locks. A shard whose time is in the future is needed now: it goes last, and a line of the logger
says so. A shard that is fetched ahead takes the place of no shard that is needed. The cache never touches files with
other names. A shard that is open somewhere can be read to its end after it has gone (on Windows it cannot go). A
damaged shard is deleted and fetched again.

`seal` gives a new shard its name, and notes its checksum. `is_sound` compares. A shard has the time `UNTOUCHED`, so
each write to it leaves another time. The time of its last change is noted too: no program can set that one back. The
whole file is compared only if it has other times: that takes 0.3 s for 1 GB.

What can go wrong: a shard that is larger than ``max_bytes``, a folder that cannot be written to, a full disk, a file
that must not be deleted. All are a `ShardError` that names the folder or the file.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat as modes
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from sharded_loader.extend.tools import bytes_of_text, host_clock, lock_at, logger, refuse_arguments
from sharded_loader.storage.files import LocalFile, ShardError, Stat, shown

LOCKS = 1024
"""Lock files. Two shards may share one: then they are fetched one after the other. Of 16 shards that are fetched side
by side, 0.1 pairs do so. With 64 files there were 1.9, and each pair took the time of two shards."""

TRIES = 10
"""How often a shard is fetched that others delete before it could be opened."""

STUCK = 30.0 if os.name == "nt" else 0.0
"""Seconds to wait for a file that cannot be deleted. Windows deletes a file when no process has it open any more."""

UNTOUCHED = 10**9
"""The time of each shard, in the year 2001: older than the time of a checksum, except of shards that were let go."""

HELD = 10.0
"""Seconds for which a shard is needed after a reader has said so. Readers say it each second. On a machine that runs
far more than it has cores for, it was up to 6 seconds. The shards of a reader that was killed stay needed as long."""

Fetch = Callable[[BinaryIO], None]
"""Writes the bytes of a shard into a file."""

_NAME = re.compile(r"[0-9a-f]{40}-(\d+)\.(shard|part)")


class ShardCache:
    """Keeps shards of object stores on disk. Give it to `ShardDataset`. Each process may make its own object.

    Args:
        folder: the folder for the shards. The cache creates it if it does not exist. Do not use a network file system
            without locks.
        max_bytes: the limit of disk space: a number of bytes, or a text such as "100 GB" or "20 GiB".

    Attributes:
        fetched: the number of shards that this object has fetched.
        evicted: the number of shards that it has deleted to make room.
        read_only: whether this process cannot write to the folder. Then each shard must be there already.

    Raises:
        ShardError: the folder cannot be written to, and has no shards.
        TypeError: ``max_bytes`` is missing, or there is no such argument.
        ValueError: ``max_bytes`` is no number of bytes.

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
        try:
            (self.folder / "locks").mkdir(parents=True, exist_ok=True)
            with self._lock("room"):
                pass
        except (OSError, NotImplementedError) as error:  # the second one: a file system without locks
            refused = getattr(error, "errno", 0) in (errno.EACCES, errno.EPERM, errno.EROFS)
            self.read_only = refused and bool(self._files())
            if not self.read_only:
                text = f"the cache folder {self.folder} cannot be written to ({error}): give another one"
                raise ShardError(text) from None

    def __repr__(self) -> str:
        return f"ShardCache({str(self.folder)!r}, {self.max_bytes})"

    @property
    def limit_text(self) -> str:
        """Part of a sentence: how much the cache may take."""
        return f"the cache {self.folder} may take {self.max_bytes:,}"

    @property
    def used_bytes(self) -> int:
        """What the shards take, those included that are being fetched."""
        return sum(self._files().values())

    def open(self, url: str, stat: Stat, fetch: Fetch) -> LocalFile:
        """A shard, which is fetched if it is not there.

        Args:
            url, stat: of the shard.
            fetch: writes its bytes into a file.

        Raises:
            ShardError: there is no room for it, or it is missing in a folder that is read-only.
            OSError: what ``fetch`` raises.
        """
        path = self._path(url, stat)
        for _ in range(1 if self.read_only else TRIES):
            with self._named(url):
                found = self._found(path, url, stat, is_locked=self.read_only)
                if found is None and not self.read_only:
                    with self._lock(_lock_of(path.name)):
                        found = self._found(path, url, stat, is_locked=True)  # another process may have fetched it
                        if found is None:
                            self._fetch(path, url, stat, fetch)
                if found is not None:
                    return found
        if self.read_only:
            text = f"{shown(url)} is missing or damaged in the cache folder {self.folder}, which is read-only"
            raise ShardError(f"{text}: fill the folder where it can be written to, or give another one")
        advice = "give a larger max_bytes, or a folder that no other program cleans"
        raise ShardError(f"{shown(url)} was deleted from {self.folder} at once, by others: {advice}")

    def prepare(self, url: str, stat: Stat, fetch: Fetch, is_wanted: Callable[[], bool]) -> None:
        """Fetch a shard that is not there, if it is still wanted when no other process fetches it any more.

        If there is no room without the shards that others need now, the shard is not fetched.

        Args:
            url, stat, fetch: as for `open`.
            is_wanted: asked when the turn has come: the user may have passed the shard meanwhile.

        Raises:
            OSError: as `open`.
        """
        path = self._path(url, stat)
        if not path.exists() and not self.read_only:  # `open` raises the error
            with self._named(url), self._lock(_lock_of(path.name)):
                if is_wanted() and not path.exists():
                    self._fetch(path, url, stat, fetch, is_ahead=True)
        if is_wanted():  # also one that a worker has fetched meanwhile
            self.keep(url, stat)
            if not is_wanted():  # the user has passed it at this moment
                self.let_go(url, stat)

    def keep(self, url: str, stat: Stat) -> bool:
        """Note that a shard is needed for `HELD` seconds: others go first.

        Returns:
            Whether it is there.
        """
        return self._touch(self._path(url, stat), time.time() + HELD)

    def let_go(self, url: str, stat: Stat, batches: int | None = None) -> None:
        """Note that a shard is not needed for some time. Such shards go first: first those that are needed last.

        Args:
            url, stat: of the shard.
            batches: after how many batches it is needed again. None: perhaps never.
        """
        self._touch(self._path(url, stat), 0 if batches is None else max(1, UNTOUCHED - batches))

    def _touch(self, path: Path, seconds: float) -> bool:
        try:
            os.utime(beside(path), (seconds, seconds))
        except OSError:
            return False
        return path.exists()

    def _path(self, url: str, stat: Stat) -> Path:
        name = hashlib.sha256("\0".join((url, str(stat.size), stat.tag)).encode()).hexdigest()[:40]
        return self.folder / f"{name}-{stat.size}.shard"

    def _found(self, path: Path, url: str, stat: Stat, is_locked: bool) -> LocalFile | None:
        """A shard that is there and sound. Who holds its lock compares the checksum, and deletes a damaged one."""
        try:
            if not modes.S_ISREG(os.stat(path).st_mode):
                raise ShardError(f"{shown(url)}: {path} is in its place in the cache, and is not a file: delete it")
            if not is_sound(path, stat.size, is_locked):
                if is_locked and not self.read_only:
                    _delete(path)
                return None
            file = LocalFile(str(path), f"{shown(url)} (cached as {path})")
        except FileNotFoundError:
            return None
        if _used(path) < time.time():  # otherwise a reader needs it
            self._touch(path, time.time())  # the shard with the oldest time goes first
        return file

    def _fetch(self, path: Path, url: str, stat: Stat, fetch: Fetch, is_ahead: bool = False) -> None:
        """Fetch a shard, under its lock. If the disk is full by then, delete others and try again."""
        (self.folder / "locks").mkdir(parents=True, exist_ok=True)  # another program may have deleted the folder
        part = path.with_suffix(".part")
        for may_try_again in (True, False):
            try:
                if not self._make_room(part, url, stat.size, is_ahead):
                    return
                # Not "wb", which empties the file: where locks have no effect, another machine may be writing the same
                # bytes into it. Bytes of a process that has died are written over.
                with open(part, "r+b") as file:
                    fetch(file)
                    written = file.tell()
                    file.flush()
                    os.fsync(file.fileno())
                    if written != stat.size:
                        text = f"{shown(url)} has {written:,} bytes, and had {stat.size:,}: make the dataset again"
                        raise ShardError(text)
                    if not os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                        return  # the locks were deleted, and another process fetches this shard too
                seal(part, path)
                self.fetched += 1
                return
            except BaseException as error:
                with contextlib.suppress(OSError):
                    part.unlink()
                if isinstance(error, FileNotFoundError) and self._is_inside(error):
                    return  # the part or the folder was deleted: `open` tries again
                if type(error) is not OSError:  # one of ours, and not of the disk
                    raise
                if error.errno != errno.ENOSPC or not may_try_again or not self._files():
                    said = f"{shown(url)} cannot be written to {self.folder} ({error}): free some space"
                    raise ShardError(said) from None

    def _make_room(self, part: Path, url: str, size: int, is_ahead: bool) -> bool:
        """Delete shards until one of this size fits, and take its place; False: there is no room for one ahead."""
        if size > self.max_bytes:
            raise ShardError(f"{shown(url)} has {size:,} bytes, and {self.limit_text}: give a larger max_bytes")
        until = host_clock.now() + STUCK
        while True:
            with self._lock("room"):
                found, now, is_waiting, stuck = self._files(), time.time(), False, ""
                missing = self._missing(found, size)
                # If there is room, no further call of the system: each may wait 5 ms for the interpreter.
                files = sorted((_used(self.folder / name), name) for name in found) if missing > 0 else []
                if is_ahead and missing > 0:
                    old = [name for used, name in files if used <= now and self._may_go(name, part)]
                    if missing > sum(map(found.__getitem__, old)):
                        return False
                for used, name in files:
                    if missing <= 0:
                        break
                    try:
                        if not self._may_go(name, part):
                            is_waiting = True
                            continue
                        _delete(self.folder / name)
                    except OSError as error:
                        stuck = f"{self.folder / name} cannot be deleted ({error})"
                        continue
                    self.evicted += 1
                    missing -= found[name]
                    if used > now:
                        _warn_of_needed(self.limit_text)
                if missing <= 0 or not (is_waiting or stuck):  # if the disk is full, the write says so
                    part.touch()
                    return True
            if not is_waiting and host_clock.now() >= until:
                advice = "Delete this file, or give another folder"
                raise ShardError(f"{shown(url)} has no room in the cache: {stuck}. {advice}")
            time.sleep(0.02)  # others are being fetched

    def _missing(self, found: Mapping[str, int], size: int) -> int:
        """How many bytes have to go before a file of this size fits, if these files are there."""
        missing, disk = sum(found.values()) + size - self.max_bytes, shutil.disk_usage(self.folder)
        unwritten = sum(taken for name, taken in found.items() if name.endswith(".part"))
        return max(missing, unwritten + size - disk.free) if disk.total else missing  # 0: the system does not know

    def _may_go(self, name: str, part: Path) -> bool:
        """Whether a file may be deleted: it is a shard, or a part whose fetcher has died."""
        if name.endswith(".shard") or _lock_of(name) == _lock_of(part.name):  # that lock is held for `part`
            return True
        try:
            with self._lock(_lock_of(name)).acquire(timeout=0):
                return (self.folder / name).exists()  # otherwise it has become a shard meanwhile
        except TimeoutError:
            return False

    def _files(self) -> dict[str, int]:
        """The names of shards, whole or in parts, with their sizes."""
        try:
            names = os.listdir(self.folder)
        except FileNotFoundError:  # another program may have deleted the folder
            return {}
        return {match[0]: int(match[1]) for match in map(_NAME.fullmatch, names) if match is not None}

    def _is_inside(self, error: OSError) -> bool:
        """Whether an error is about a file of this folder."""
        return str(error.filename).startswith(str(self.folder))

    @contextlib.contextmanager
    def _named(self, url: str) -> Iterator[None]:
        """An error of the folder names it."""
        try:
            yield
        except OSError as error:
            if not self._is_inside(error):
                raise
            raise ShardError(f"{shown(url)}: the cache folder {self.folder} cannot be used ({error})") from None

    def _lock(self, name: str) -> Any:
        return lock_at(self.folder / "locks" / name)


@lru_cache
def _warn_of_needed(limit_text: str) -> None:
    """Say it once for each cache."""
    advice = "Give a larger max_bytes, free disk space, or use a smaller window (this is shown once)"
    text = "a shard was deleted from the cache that a reader still needs, and is fetched again: %s. %s"
    logger.warning(text, limit_text, advice)


def _lock_of(name: str) -> str:
    """The lock of a shard, by the name of its file."""
    return str(int(name[:8], 16) % LOCKS)


def _used(path: Path) -> float:
    """When a shard, or a part of one, was opened last."""
    try:
        return os.stat(beside(path) if path.suffix == ".shard" else path).st_mtime
    except FileNotFoundError:
        return 0.0


def _delete(path: Path) -> None:
    """Delete a shard or a part."""
    path.unlink(missing_ok=True)  # first: if it must stay, its checksum stays too
    if not path.exists():  # no process has fetched it again
        beside(path).unlink(missing_ok=True)


# -- whether a shard still has the content that was fetched ------------------------------------------------------------


def beside(path: Path) -> Path:
    """Where the checksum of a shard is kept."""
    return path.with_suffix(".sum")


def seal(part: Path, path: Path) -> None:
    """Make ``part`` the shard ``path``, and note its content as the right one."""
    checksum = _checksum(part)
    beside(path).touch()  # a shard without this file is the first to go
    os.replace(part, path)
    _note(path, checksum)


def _note(path: Path, checksum: int) -> None:
    with contextlib.suppress(OSError):  # some file systems keep no times: then each opening compares the checksum
        os.utime(path, (UNTOUCHED, UNTOUCHED))
    beside(path).write_text(f"{checksum:08x} {os.stat(path).st_ctime_ns}")


def is_sound(path: Path, size: int, may_read: bool) -> bool:
    """Whether a shard has the content that was sealed; False also if that cannot be told without ``may_read``.

    Args:
        path: of the shard.
        size: that it must have, in bytes.
        may_read: compare the checksum, if another program may have changed the file.
    """
    try:
        checksum, changed = beside(path).read_text().split()
        found = os.stat(path)
        if found.st_size != size:
            return False
        if (found.st_mtime, found.st_ctime_ns) == (UNTOUCHED, int(changed)):
            return True
        if not may_read or _checksum(path) != int(checksum, 16):
            return False
    except (FileNotFoundError, ValueError):
        return False
    with contextlib.suppress(OSError):  # of another user
        _note(path, int(checksum, 16))
    return True


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while chunk := file.read(4 << 20):
            found = zlib.crc32(chunk, found)
    return found
