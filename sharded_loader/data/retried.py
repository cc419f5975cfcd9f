"""How many requests to servers this process has tried again.

    note()             a request is tried again (`storage.stores`)
    total() -> int     all of them; a worker adds to each result what came since the one before

Any thread calls these. Nothing here imports anything, so that a worker without such a dataset pays nothing for it.
"""

from __future__ import annotations

_notes: list[None] = []


def note() -> None:
    """A request is tried again.

    Example:
        >>> before = total()
        >>> note()
        >>> total() - before
        1
    """
    _notes.append(None)  # no lock is needed, and none can be held by another thread when the process is forked


def total() -> int:
    """How many there were since the process began, those of the process that it was forked from among them."""
    return len(_notes)
