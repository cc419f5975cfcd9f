"""How large the next batch's slot should be: learned from the batches that have come.

    RecentSizes.note(nbytes)          a batch needed so much
    RecentSizes.wanted -> nbytes      a slot of this size held each of the last `WINDOW` batches

The largest of a window, not the mean: a slot that is too small costs a copy through the pipe, one that is too large
only memory. Of a window, not of all: one outlier would make every later slot as large as itself.

Pure: no memory is touched here.
"""

from __future__ import annotations

from collections import deque

WINDOW = 64
"""Batches: with sizes that vary at random, one in 64 does not fit, and costs one more copy of itself."""


class RecentSizes:
    """The largest of the last ``window`` sizes, and a sixteenth for the next one.

    Args:
        window: how many sizes are remembered.

    Example:
        >>> sizes = RecentSizes(window=2)
        >>> for nbytes in (1600, 160, 160):
        ...     sizes.note(nbytes)
        ...     print(sizes.wanted)
        1700
        1700
        170
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._count = 0
        # Falling sizes, each with the number that it came as: the first is the largest, and a size that a later one
        # exceeds is gone. So `note` takes constant time on average, whatever the window.
        self._falling: deque[tuple[int, int]] = deque()

    def note(self, nbytes: int) -> None:
        """A batch of ``nbytes`` has come."""
        self._count += 1
        while self._falling and self._falling[-1][1] <= nbytes:
            self._falling.pop()
        self._falling.append((self._count, nbytes))
        while self._falling[0][0] <= self._count - self._window:
            self._falling.popleft()

    @property
    def wanted(self) -> int:
        """Bytes; 0 before the first batch."""
        largest = self._falling[0][1] if self._falling else 0
        return largest + largest // 16
