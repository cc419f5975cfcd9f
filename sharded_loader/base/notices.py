"""What goes wrong quietly: said once for each loader, and counted.

    Notices.happened("replaced_workers", text)   the first time a line of the logger at WARNING, then at INFO; counted
    Notices.counts                               -> `LoaderStats`, the loader's repr
    Notices.warn("length", text)                 a `LoaderWarning`, the first time
    note_retry()                                 a request to a server is tried again: one more in `RETRIES`

Which of the two a notice is:

- A `LoaderWarning` says that the program probably does not do what is meant. It comes before samples are read: when the
  loader is made, when a state is loaded, when an epoch begins. If warnings are errors, the program stops in time. In
  mid-epoch there are two: samples are lost (a whole batch or shard, the rest of a part), or each sample of iterable
  data comes once for each part.
- A line of the logger ``sharded_loader`` says what happened while batches were read. The loader has dealt with it. Such
  a line is never an exception. Python prints lines at WARNING to stderr if the program has not set up logging.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections import Counter

logger = logging.getLogger("sharded_loader")


class LoaderWarning(UserWarning):
    """The category of the loader's warnings, for ``warnings.filterwarnings(..., category=LoaderWarning)``.

    Example:
        >>> issubclass(LoaderWarning, UserWarning)
        True
    """


_BETWEEN = os.path.join("torch", "utils", "data", "dataloader.py")
"""torch's loader, which is between the drop-in and the user's line."""

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
"""The folder of the package."""


def is_ours(filename: str) -> bool:
    """Whether a source file belongs to this library."""
    return filename.startswith(_OURS)


def warn(text: str) -> None:
    """Warn at the line of the user's program that has called the library."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and (is_ours(name := frame.f_code.co_filename) or name.endswith(_BETWEEN)):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, LoaderWarning, stacklevel=level)


class Notices:
    """The notices of one loader.

    Attributes:
        counts: how often each kind has happened. The kinds are names of `LoaderStats`.

    Example:
        >>> notices = Notices()
        >>> notices.happened("slow_batches", "a batch took the slow way")
        >>> notices.counts["slow_batches"]
        1
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._warned: set[str] = set()

    def happened(self, kind: str, text: str) -> None:
        """Count something that has happened, and log it."""
        self.counts[kind] += 1
        first = self.counts[kind] == 1
        more = " (shown once; the logger 'sharded_loader' shows the others at level INFO)"
        logger.log(logging.WARNING if first else logging.INFO, "%s%s", text, more if first else "")

    def settle(self, kind: str) -> None:
        """There is no reason to warn of this kind."""
        self._warned.add(kind)

    def warn(self, kind: str, text: str) -> None:
        """Warn, once of each kind."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(text)


RETRIES: list[None] = []
"""One entry for each retry in this process, and before that in the one it was forked from. A reader takes its length
for each batch, which calls no function."""


def note_retry() -> None:
    """A request to a server is tried again (`storage.stores`). Any thread may call it.

    Example:
        >>> before = len(RETRIES)
        >>> note_retry()
        >>> len(RETRIES) - before
        1
    """
    RETRIES.append(None)  # no lock is needed, and none can be held by another thread when the process is forked
