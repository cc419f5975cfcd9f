"""Byte ranges of remote files, checked against the expected version of the file.

The tag of a version is the ETag, otherwise the modification time; file systems spell both differently. HTTP servers
and obstore send it with each range. For others, the caller asks again after reading.

S3 is read through obstore if possible, for a fifth of s3fs's CPU time. A request to a server in another process takes
0.74 ms for 1,000 bytes (s3fs: 3.6) and 3.7 ms for 4 MB (6.6; medians of 5). `FastS3` leaves these cases to fsspec:

- obstore is not installed, or does not know an option.
- The parent process of a fork has used obstore: requests would hang.
- The first request to a bucket failed: obstore looks for credentials and regions in fewer places than s3fs. Later
  errors are raised.

HTTP stays with fsspec: after a redirect, obstore would send the user's headers to the other host.
"""

from __future__ import annotations

import os
import re
import uuid
import zlib
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any

from sharded_loader.extend.tools import logger, warn
from sharded_loader.storage.files import Options, Stat, shown

_NAMES = (
    *("etag", "generation", "blobid", "xethash", "md5hash", "sha", "sha256", "hex", "checksum", "contenthash", "crc"),
    *("lastmodified", "updated", "modified", "mtime", "modificationtime", "modifiedtime", "lastwritetime", "modify"),
    "created",
)
"""Names of tags and times, best first. s3, abfs, gcs and http say etag or last-modified, Hugging Face blob_id and
xet_hash, git and GitHub hex and sha, sftp mtime, ftp modify, memory created."""

UNKNOWN = "unknown "
"""Prefix of the tag that a dataset invents for a file whose server sends none."""


SLOWEST = 20_000
"""Bytes per second below which a request is abandoned."""


class Changed(Exception):
    """Raised if the file is another version now."""


class BadResponse(Exception):
    """Raised for an answer that does not match the request; worth a retry."""


def tag_of(info: Mapping[str, object]) -> str:
    """Return the tag in a file system's description of a file, or an empty string.

    Example:
        >>> tag_of({"size": 5, "ETag": '"abc"'}), tag_of({"Last-Modified": "Wed, 21 Oct 2015 07:28:00 GMT"})
        ('abc', 'lastmodified Wed, 21 Oct 2015 07:28:00 GMT')
    """
    said = {re.sub("[^a-z0-9]", "", str(name).lower()): value for name, value in info.items()}
    for name in _NAMES:
        value = said.get(name)
        if value not in (None, ""):
            value = value.timestamp() if isinstance(value, datetime) else value
            text = str(value).removeprefix("W/").strip('"')
            return text.replace(" ", "") if name == "etag" else f"{name} {text}"
    return ""


def with_tags(stats: Mapping[str, Stat]) -> list[Stat]:
    """Give files without a tag one that no other dataset has, with a warning."""
    bare = [url for url, stat in stats.items() if not stat.tag]
    if bare:
        named = f"{shown(bare[0])} (and of {len(bare) - 1} more shards): the loader cannot see when it is replaced"
        text = f"the server says neither an ETag nor the time of the last change of {named}"
        warn(f"{text}. So its index and its copy in a ShardCache serve this dataset only")
    return [stat if stat.tag else stat._replace(tag=UNKNOWN + uuid.uuid4().hex) for stat in stats.values()]


def is_same(tag: str, other: str) -> bool | None:
    """Compare two tags; return None if they are of different kinds, such as an ETag and a time.

    Example:
        >>> is_same("abc", "abd"), is_same("abc", "lastmodified Wed, 21 Oct 2015 07:28:00 GMT"), is_same("abc", "")
        (False, None, None)
    """
    kind, other_kind = (text.partition(" ")[0] if " " in text else "" for text in (tag, other))
    return None if not tag or not other or kind != other_kind else tag == other


def read(
    system: Any, path: str, begin: int, end: int, stat: Stat | None, seconds: float, landing: Landing | None = None
) -> tuple[bytes, str]:
    """Read a byte range through fsspec; return it with the tag of the answer, which is empty except for HTTP.

    Only asynchronous file systems can be interrupted: after ``seconds``, plus the transfer time at `SLOWEST`. Without
    ``stat``, any version will do. HTTP bodies go to the ``landing`` chunk by chunk, so that each is copied once; then
    the returned bytes are empty.
    """
    limit = seconds + (end - begin) / SLOWEST
    how: dict[str, Any] = {"timeout": limit} if getattr(system, "async_impl", False) else {}
    if not how or "http" not in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
        return system.cat_file(path, start=begin, end=end, **how), ""
    seen: list[Any] = []

    async def look(answer: Any) -> None:
        seen.append(answer)
        try:
            check_answer(answer.status, answer.headers, begin, end, stat)
            is_other = stat is not None and is_same(stat.tag, tag_of(answer.headers)) is False
            if landing is not None and answer.status == 206 and not is_other:
                async for chunk in answer.content.iter_any():
                    landing.take(chunk)
        except BaseException:
            answer.close()  # aiohttp does not, so early
            raise

    how.update(headers={**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}, raise_for_status=look)
    try:
        found = system.cat_file(path, start=begin, end=end, **how)
    except BaseException as error:
        if landing is not None:
            landing.is_over = True
        if getattr(error, "status", 0) == 416:
            return b"", tag_of(seen[0].headers)
        raise
    if seen and seen[0].status == 200:  # servers without range support send the whole file
        if stat is not None and len(found) != stat.size:
            raise BadResponse(f"{len(found):,} bytes came for the whole file, which has {stat.size:,}")
        if len(found) > end - begin:
            _note_whole_files(shown(path).rpartition("/")[0])
        found = found[begin:end]
    elif seen and len(found) > end - begin:  # which of them are right is not known
        raise BadResponse(f"{len(found):,} bytes came where {end - begin:,} were asked for")
    return found, tag_of(seen[0].headers) if seen else ""  # no answer: the range came from fsspec's cache


class NotWritten(Exception):
    """Raised if a file here cannot be written to, by the `OSError` that is its cause."""


class Landing:
    """Place of a byte range in a file, for one attempt to read it. Chunks are written as they come.

    ``write`` is called with a position in the file and bytes. ``checksum`` is the CRC-32 of all bytes so far. Once the
    attempt ``is_over``, nothing is written: fsspec's thread may go on for a while with a request that was given up.
    """

    is_over = False

    def __init__(self, write: Callable[[int, bytes], object], begin: int, end: int) -> None:
        self._write, self.at, self._end = write, begin, end
        self.checksum = 0

    def take(self, chunk: bytes) -> None:
        if self.is_over or len(chunk) > self._end - self.at:
            raise BadResponse(f"more bytes came than were asked for, up to {self._end:,}")
        try:
            self._write(self.at, chunk)
        except OSError as error:
            raise NotWritten from error
        self.at += len(chunk)
        self.checksum = zlib.crc32(chunk, self.checksum)


def joined(first: int, second: int, nbytes: int) -> int:
    """Return the CRC-32 of two byte strings in a row, from their own ones and the length of the second.

    Each byte that follows multiplies a CRC by x^8, as a polynomial over GF(2) with the lowest power in the highest bit.

    Example:
        >>> joined(zlib.crc32(b"some "), zlib.crc32(b"bytes"), 5) == zlib.crc32(b"some bytes")
        True
    """
    power = 1 << 31 - 8
    while nbytes:
        first = _product(first, power) if nbytes & 1 else first
        power, nbytes = _product(power, power), nbytes >> 1
    return first ^ second


def _product(first: int, second: int) -> int:
    """Multiply two polynomials modulo that of CRC-32."""
    product = 0
    for power in range(32):
        product ^= second if first << power & 1 << 31 else 0
        second = second >> 1 ^ (0xEDB88320 if second & 1 else 0)
    return product


_whole_files: dict[str, object] = {}


def _note_whole_files(folder: str) -> None:
    """Warn once per folder, also if several threads notice at the same time."""
    if _whole_files.setdefault(folder, this_call := object()) is not this_call:
        return
    text = "the server of %s ignores requests for parts of a file and sends whole files, so each sample costs a shard. "
    logger.warning(text + "Give the dataset a ShardCache, or let the server answer ranges", folder)


def bind_credentials(url: str, options: Options, seconds: float) -> Options:
    """Return options for fsspec that keep an HTTP server's credentials from other hosts after a redirect.

    By itself, aiohttp drops only some headers, and neither the session's password nor its cookies. Its requests fail
    after ``seconds`` in which nothing comes; by itself, any takes up to 5 minutes.
    """
    http = re.match(r"(?:(.*)::)?((https?)://.*)", url)
    if http is None:
        return options
    import aiohttp
    from yarl import URL

    chain, address, kind = http.groups()

    class Request(aiohttp.ClientRequest):
        def __init__(self, method: str, url: URL, **how: Any) -> None:
            if url.origin() != (own := URL(address).origin()):
                if own.scheme == "https" != url.scheme:
                    raise aiohttp.InvalidURL(f"{url}: the server of an https URL redirects there, without encryption")
                headers = how.get("headers") or {}
                plain = {name: headers[name] for name in _PLAIN if name in headers}
                how = {**how, "headers": plain, "auth": None, "cookies": None}
            super().__init__(method, url, **how)

    given = options.get(kind, {}) if chain else options  # chained file systems have options by protocol
    defaults: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(sock_connect=seconds, sock_read=seconds)}
    defaults |= {"request_class": Request, "read_bufsize": 1 << 18}  # of 64 KB, reading pauses after each 128 KB
    given = {**given, "client_kwargs": {**defaults, **given.get("client_kwargs", {})}}
    return {**options, kind: given} if chain else given


_PLAIN = ("Accept", "Accept-Encoding", "Range", "User-Agent")
"""Headers that are sent to other hosts as well."""


def check_answer(status: int, headers: Mapping[str, str], begin: int, end: int, stat: Stat | None) -> None:
    """Check the byte range of an HTTP answer: `Changed` for another file size, `BadResponse` for another range."""
    if status == 416 and (begin or stat is not None):  # otherwise the file is empty
        raise Changed(f"it has no bytes {begin:,} to {end:,} any more (HTTP 416)")
    coding = headers.get("Content-Encoding", "identity")
    if status in (200, 206) and coding not in ("identity", ""):
        raise BadResponse(f"the server sends it compressed (Content-Encoding: {coding}), so no part of it can be read")
    if status < 400 and status not in (200, 206):  # a redirect to nowhere, for one
        raise BadResponse(f"an answer without bytes came (HTTP {status})")
    if status == 206:
        said = headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", said)
        if match is None or int(match[1]) != begin or int(match[2]) >= end:
            text = f"bytes {begin}-{end - 1} were asked for, and the server says that it sends {said or 'others'!r}"
            raise BadResponse(text)
        if stat is not None and match[3] not in ("*", str(stat.size)):
            raise Changed(f"it has {int(match[3]):,} bytes, and had {stat.size:,}")


# -- through obstore ---------------------------------------------------------------------------------------------------


_SETTINGS = {"anon": "skip_signature", "key": "access_key_id", "secret": "secret_access_key", "region_name": "region"}
"""obstore's names of s3fs options, where they differ."""


class FastS3:
    """Reader of S3 buckets through obstore, where that works; ``options`` are those of s3fs.

    Example:
        >>> FastS3({"requester_pays": True}).read("bucket/a.tar", 0, 4, 30.0) is None
        True
    """

    _used_in: int | None = None  # id of the process that has used obstore

    def __init__(self, options: Options) -> None:
        self._settings = settings_of(options)
        self._buckets: dict[str, Any] = {}  # None: left to fsspec

    def read(self, path: str, begin: int, end: int, seconds: float) -> tuple[bytes, str] | None:
        """Return a byte range of ``"bucket/key"`` and its tag, or None if fsspec has to read it.

        obstore's errors are raised once a request to the bucket has succeeded, a FileNotFoundError always.
        """
        bucket, _, key = path.partition("/")
        is_first = bucket not in self._buckets
        store: Any = self._buckets.get(bucket)
        if FastS3._used_in not in (None, os.getpid()) or (store is None and not is_first):
            return None
        try:
            store = self._opened(bucket, seconds) if is_first else store
            answer = store.get(key, options={"range": (begin, end)})
            found = bytes(answer.bytes()), tag_of(answer.meta)
        except Exception as error:
            if not is_first or isinstance(error, FileNotFoundError):
                raise
            found, store = None, None
        self._buckets[bucket] = store
        return found

    def _opened(self, name: str, seconds: float) -> Any:
        from obstore.store import S3Store

        FastS3._used_in = os.getpid()
        plain = str(self._settings.get("endpoint_url", "")).startswith("http://")
        limits = {"read_timeout": f"{seconds:.0f}s", "connect_timeout": f"{min(seconds, 5):.0f}s", "allow_http": plain}
        limits["timeout"] = "1h"  # of a whole request
        return S3Store(name, client_options=limits, retry_config={"max_retries": 0}, **self._settings)


def settings_of(options: Options) -> dict[str, Any]:
    """Translate s3fs options to obstore's; unknown ones make obstore fail to open a bucket.

    Example:
        >>> settings_of({"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}})
        {'access_key_id': 'k', 'secret_access_key': 's', 'region': 'eu-west-1'}
    """
    given = {**options, **options.get("client_kwargs", {})}
    return {_SETTINGS.get(name, name): value for name, value in given.items() if name != "client_kwargs"}
