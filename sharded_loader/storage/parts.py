"""Reads a part of a remote file, and sees of which version the answer is.

    tag_of(info)                                      -> "abc", or "last-modified Wed, 21 Oct ...", or ""
    part(system, path, begin, end, stat, seconds)     -> the bytes and the tag of the answer, through fsspec
    FastS3(options).read(path, begin, end, seconds)   -> the same through obstore; None: ask fsspec

The tag is the ETag, otherwise the time of the last change; each file system has names of its own for them. Servers of
http send the tag with each answer, and so does obstore. Others are asked for the tag after reading.

obstore needs a fifth of the processor time that s3fs needs: one request, against a server in another process, median of
5: 0.74 ms for 1,000 bytes (s3fs: 3.6), 3.7 ms for 4 MB (s3fs: 6.6). In these cases `FastS3` answers None:

- obstore is not installed, or it does not know an option.
- The process was forked after its parent had used obstore. A request would never be answered there.
- The first request for a bucket failed: obstore may look for credentials or a region in fewer places than s3fs. After a
  first success, errors are those of the bucket, and go to the caller.

obstore does not read http: after a redirect it would send the headers of the user to the other host.

Names, sizes and tags of files come from fsspec.

What can go wrong: `Changed` if the file is another one now, `Unfit` for an answer that is not what was asked for, and
what the file system raises.
"""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sharded_loader.extend.tools import logger, warn
from sharded_loader.storage.files import Options, Stat, shown

_NAMES = (
    *("etag", "generation", "blobid", "xethash", "md5hash", "sha", "sha256", "hex", "checksum", "contenthash", "crc"),
    *("lastmodified", "updated", "modified", "mtime", "modificationtime", "modifiedtime", "lastwritetime", "modify"),
    "created",
)
"""What file systems call a tag or a time, the best first. s3, abfs, gcs and http say etag or last-modified, Hugging
Face blob_id and xet_hash, git and GitHub hex and sha, sftp mtime, ftp modify, memory created."""

UNKNOWN = "unknown "
"""How the tag begins that a dataset gives to a file of which the server says none."""


class Changed(Exception):
    """The file is another one now."""


class Unfit(Exception):
    """An answer that is not what was asked for. Another try may be better."""


def tag_of(info: Mapping[str, object]) -> str:
    """What a file system says of the version of a file; empty: nothing.

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
    """What is known of files by their URLs. A file without a tag gets one that no other dataset has, and a warning."""
    bare = [url for url, stat in stats.items() if not stat.tag]
    if bare:
        named = f"{shown(bare[0])} (and of {len(bare) - 1} more shards): the loader cannot see when it is replaced"
        text = f"the server says neither an ETag nor the time of the last change of {named}"
        warn(f"{text}. So its index and its copy in a ShardCache serve this dataset only")
    return [stat if stat.tag else stat._replace(tag=UNKNOWN + uuid.uuid4().hex) for stat in stats.values()]


def is_same(tag: str, other: str) -> bool | None:
    """Whether two tags are of one version; None: they cannot be compared, as one is an etag and one is a time.

    Example:
        >>> is_same("abc", "abd"), is_same("abc", "lastmodified Wed, 21 Oct 2015 07:28:00 GMT"), is_same("abc", "")
        (False, None, None)
    """
    kind, other_kind = (text.partition(" ")[0] if " " in text else "" for text in (tag, other))
    return None if not tag or not other or kind != other_kind else tag == other


def part(system: Any, path: str, begin: int, end: int, stat: Stat | None, seconds: float) -> tuple[bytes, str]:
    """A part of a file. An asynchronous file system fails after ``seconds``; the others cannot be interrupted.

    Args:
        system, path: of fsspec.
        begin, end: the part, in bytes.
        stat: of the file, as it was; None: of any version.
        seconds: see above.

    Returns:
        The bytes, and the tag of the answer. Of most file systems it is empty: fsspec does not pass it on.
    """
    how: dict[str, Any] = {"timeout": seconds} if getattr(system, "async_impl", False) else {}
    if not how or "http" not in (system.protocol if isinstance(system.protocol, tuple) else (system.protocol,)):
        return system.cat_file(path, start=begin, end=end, **how), ""
    seen: list[Any] = []

    async def look(answer: object) -> None:
        seen.append(answer)

    how.update(headers={**system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}, raise_for_status=look)
    try:
        found = system.cat_file(path, start=begin, end=end, **how)
    finally:
        for answer in seen:
            check_answer(answer.status, answer.headers, begin, end, stat)
    if seen and seen[0].status == 200:  # a server that does not know requests for parts sends the whole file
        if stat is not None and len(found) != stat.size:
            raise Unfit(f"{len(found):,} bytes came for the whole file, which has {stat.size:,}")
        if len(found) > end - begin:
            _note_whole_files(shown(path).rpartition("/")[0])
        found = found[begin:end]
    return found, tag_of(seen[0].headers) if seen else ""  # without an answer: from a cache of fsspec


_whole_files: dict[str, object] = {}


def _note_whole_files(folder: str) -> None:
    """Warn once per folder, also if several threads find out at the same time."""
    if _whole_files.setdefault(folder, this_call := object()) is not this_call:
        return
    text = "the server of %s ignores requests for parts of a file and sends whole files, so each sample costs a shard. "
    logger.warning(text + "Give the dataset a ShardCache, or let the server answer ranges", folder)


def bound(url: str, options: Options) -> Options:
    """Options for a file system of http, with which nothing of them goes to another server after a redirect.

    By itself, aiohttp then drops some headers, but not the others, nor the password and the cookies of the session.
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

    given = options.get(kind, {}) if chain else options  # of several file systems, each has options of its own
    given = {**given, "client_kwargs": {"request_class": Request, **given.get("client_kwargs", {})}}
    return {**options, kind: given} if chain else given


_PLAIN = ("Accept", "Accept-Encoding", "Range", "User-Agent")
"""Headers that another server may see."""


def check_answer(status: int, headers: Mapping[str, str], begin: int, end: int, stat: Stat | None) -> None:
    """Check which bytes a server of http is about to send.

    Raises:
        Changed: of a file of another size.
        Unfit: others than were asked for.
    """
    if status == 416:
        raise Changed(f"it has no bytes {begin:,} to {end:,} any more (HTTP 416)")
    coding = headers.get("Content-Encoding", "identity")
    if status in (200, 206) and coding not in ("identity", ""):
        raise Unfit(f"the server sends it compressed (Content-Encoding: {coding}), so no part of it can be read")
    if status == 206:
        said = headers.get("Content-Range", "")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+|\*)", said)
        if match is None or int(match[1]) != begin or int(match[2]) >= end:
            text = f"bytes {begin}-{end - 1} were asked for, and the server says that it sends {said or 'others'!r}"
            raise Unfit(text)
        if stat is not None and match[3] not in ("*", str(stat.size)):
            raise Changed(f"it has {int(match[3]):,} bytes, and had {stat.size:,}")


# -- through obstore ---------------------------------------------------------------------------------------------------


_SETTINGS = {"anon": "skip_signature", "key": "access_key_id", "secret": "secret_access_key", "region_name": "region"}
"""What obstore calls the options of s3fs, if it calls them otherwise."""


class FastS3:
    """Buckets of S3, read with obstore where that works.

    Args:
        options: for fsspec's file system of S3.

    Example:
        >>> FastS3({"requester_pays": True}).read("bucket/a.tar", 0, 4, 30.0) is None
        True
    """

    _used_in: int | None = None  # the process that has used obstore

    def __init__(self, options: Options) -> None:
        self._settings = settings_of(options)
        self._buckets: dict[str, Any] = {}  # None: fsspec reads it

    def read(self, path: str, begin: int, end: int, seconds: float) -> tuple[bytes, str] | None:
        """A part of a file and the tag of the answer, or None if fsspec has to read it.

        Args:
            path: bucket and key, ``"bucket/folder/file"``.
            begin, end: the part, in bytes.
            seconds: after which the request fails.

        Raises:
            FileNotFoundError: there is no such file.
            Exception: what obstore raises.
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
        limits = {"timeout": f"{seconds:.0f}s", "connect_timeout": f"{min(seconds, 5):.0f}s", "allow_http": plain}
        return S3Store(name, client_options=limits, retry_config={"max_retries": 0}, **self._settings)


def settings_of(options: Options) -> dict[str, Any]:
    """The options of s3fs as settings of obstore, which does not open a bucket with a setting that it does not know.

    Example:
        >>> settings_of({"key": "k", "secret": "s", "client_kwargs": {"region_name": "eu-west-1"}})
        {'access_key_id': 'k', 'secret_access_key': 's', 'region': 'eu-west-1'}
    """
    given = {**options, **options.get("client_kwargs", {})}
    return {_SETTINGS.get(name, name): value for name, value in given.items() if name != "client_kwargs"}
