"""The errors of shards, and what messages show of a URL: no password, no key, no signature.

    ShardError                             a shard cannot be read; MissingShardError, ForbiddenShardError
    missing_or_forbidden(name, error, ..)  which of the two an error of a file system means
    shown(url)                             without user, password and query
    redacted(text, options)                without the values of the options, and without what URLs in it hide

No message of this folder has the library's own error as its cause, because that may show a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


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
        return MissingShardError(
            f"{name}: the shard is missing ({said}). Check its name. If it was moved or deleted, put it back, or make "
            "the dataset again without it"
        )
    if isinstance(error, PermissionError) or status in (401, 403):
        return ForbiddenShardError(
            f"{name}: this process may not read the shard ({said}). Check its permissions, or storage_options="
        )
    return None


def shown(url: str) -> str:
    """A URL without user, password and query.

    Example:
        >>> shown("https://me:secret@host/a.tar?X-Amz-Signature=abc"), shown("/data/a.tar")
        ('https://host/a.tar', '/data/a.tar')
    """
    if "://" not in url:
        return url
    return re.sub(r"://[^/@]*@", "://", url.partition("?")[0])


def redacted(text: str, options: Mapping[str, Any]) -> str:
    """A text without what must not be shown: values of the options, users and queries in URLs.

    Example:
        >>> redacted("no s3cret at http://h/x?sig=1 for me", {"secret": "s3cret"})
        'no *** at http://h/x for me'
    """
    for secret in _words(options):
        text = text.replace(secret, "***")
    return re.sub(r"(://)[^/@\s]*@|\?[^\s'\"<>)]*", lambda match: match[1] or "", text)


def _words(options: Any) -> Iterable[str]:
    """The texts of nested options that are long enough to be a secret, the longest first."""
    found: list[str] = []
    todo = [options]
    while todo:
        one = todo.pop()
        if isinstance(one, Mapping):
            todo += one.values()
        elif isinstance(one, (list, tuple)):
            todo += one
        elif isinstance(one, str) and len(one) >= 4:
            found.append(one)
    return sorted(found, key=len, reverse=True)
