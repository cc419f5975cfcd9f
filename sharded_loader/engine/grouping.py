"""How many batches travel in one message, and how many are kept in flight: a pure policy.

    seconds that a worker took for each batch -> Grouping.note -> Grouping.size

To send a message and to wake the process that waits for it costs as much as to make a small batch (20-50 us on
each side, rows of 16 float32 in batches of 16 take 15 us). So cheap batches go in groups, each about
`GROUP_SECONDS` of work, and workers hold `HELD` groups, so that none waits for the next. A batch that takes longer
than that is a group by itself: then a worker holds one batch beyond the one it does, because with a longer backlog
uneven batches leave one worker with work while others idle.

Measured (2 workers, 2 cores, rows of 16 float32 in batches of 16): 91 us per batch one by one, 37 in groups.
"""

from __future__ import annotations

GROUP_SECONDS = 300e-6
"""Work in one message."""

MAX_GROUP = 16
"""Batches in one message; more save nothing that is left to save."""

HELD = 2
"""Groups that a worker holds: the one it does and one more."""

_MEMORY = 0.1
"""Weight of the newest batch in the mean."""


class Grouping:
    """Learns from the batches that have come how many go together.

    Attributes:
        size: batches in a group, at least 1.

    Example:
        >>> grouping = Grouping()
        >>> for _ in range(100): size = grouping.note(29e-6)
        >>> grouping.size
        10
        >>> for _ in range(100): size = grouping.note(5e-3)
        >>> grouping.size
        1
    """

    def __init__(self) -> None:
        self._mean = GROUP_SECONDS
        self.size = 1

    def note(self, seconds: float) -> int:
        """A worker took so long for a batch; how many batches go together from now on."""
        # A batch that took long counts in full: the next ones may do too, and somebody waits for them.
        self._mean = seconds if seconds > 8 * self._mean else self._mean + _MEMORY * (seconds - self._mean)
        self.size = min(MAX_GROUP, max(1, int(GROUP_SECONDS / max(self._mean, 1e-9))))
        return self.size
