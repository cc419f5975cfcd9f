"""Warnings for silent problems: emitted once per loader, and counted.

- A `LoaderWarning` means that the program probably does not do what was intended. It is emitted before samples are
  read (constructor, loaded state, start of an epoch), so that a program that turns warnings into errors stops early.
  Only two occur mid-epoch: lost samples, and samples of iterable data repeated by each part.
- A line of the logger ``sharded_loader`` reports a problem during reading that the loader has handled: the first of its
  kind at WARNING, later ones at INFO. It never raises. Python prints it to stderr if logging is not configured.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter

logger = logging.getLogger("sharded_loader")


class LoaderWarning(UserWarning):
    """Category of the loader's warnings, for ``warnings.filterwarnings(..., category=LoaderWarning)``.

    Example:
        >>> issubclass(LoaderWarning, UserWarning)
        True
    """


_TORCH_LOADER = os.path.join("torch", "utils", "data", "dataloader.py")
"""File of torch's loader, which lies between the drop-in and the user's line."""

_PACKAGE_FOLDER = os.path.dirname(os.path.dirname(__file__)) + os.sep


def is_ours(filename: str) -> bool:
    """Return True if a source file belongs to this library."""
    return filename.startswith(_PACKAGE_FOLDER)


def warn(text: str) -> None:
    """Emit a `LoaderWarning` at the line of the user's program that called the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (is_ours(name := frame.f_code.co_filename) or name.endswith(_TORCH_LOADER)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, LoaderWarning, stacklevel=level)


class Notices:
    """Notices of one loader.

    Attributes:
        counts: number of occurrences by kind. The kinds are names of `LoaderStats`.

    Example:
        >>> notices = Notices()
        >>> notices.record("slow_batches", "a batch took the slow way")
        >>> notices.counts["slow_batches"]
        1
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def record(self, kind: str, text: str) -> None:
        """Count an occurrence, and log it."""
        self.counts[kind] += 1
        first = self.counts[kind] == 1
        more = " (shown once; the logger 'sharded_loader' shows the others at level INFO)"
        logger.log(logging.WARNING if first else logging.INFO, "%s%s", text, more if first else "")

    def suppress(self, kind: str) -> None:
        """Suppress later warnings of this kind."""
        self._warned.add(kind)

    def warn(self, kind: str, text: str) -> None:
        """Warn, once per kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)


RETRIES: list[None] = []
"""One item per retried request to a server (`storage.stores`) in this process and, before a fork, its parent.

Its length is read per batch, without a call. ``append`` is atomic: a lock could be held by another thread when the
process forks.
"""
