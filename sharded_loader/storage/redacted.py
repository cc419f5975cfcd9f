"""What messages show of a URL and of an error: no password, no key, no signature.

    shown(url)                 without user, password and query
    redacted(text, options)    without the values of the options, and without what URLs in it hide

Nothing can go wrong here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any


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
