"""Policy for the number of batches in one message, and in flight.

Sending a message and waking the receiver costs 20 to 50 us on each side, more than reading a small batch. So cheap
batches travel in groups of about `GROUP_SECONDS` of work, and a worker holds `HELD` groups so that it never waits. An
expensive batch is a group of its own: with more in its queue, one worker would be busy while others idle.

Measured (2 workers, 2 cores, medians of 8 epochs in turns; CPU time of the main process, and time, both per batch);
more than 2 ms gains little, and delays finished batches by as much:

    a group takes                    0.3 ms         1 ms           2 ms           4 ms
    images, 256 of 3 KB              166, 508 us    143, 521 us    106, 472 us    96, 464 us
    rows of 64 float32, 1,024        145, 272       106, 215       101, 209       98, 206
    64 padded texts                  147, 359        86, 264        69, 236       54, 209
    16 numbers                        51, 113        42, 100        43, 104       40, 99
"""

from __future__ import annotations

GROUP_SECONDS = 2e-3
"""Work in one message."""

MAX_GROUP = 64
"""Batches in one message. 16 numbers a batch, 24 turns: 1.09 times as fast with 32 as with 16, 1.23 with 64."""

HELD = 2
"""Groups that a worker holds: one in work, one queued."""

_MEMORY = 0.1


class Grouping:
    """Group size, learned from the time that workers take for a batch.

    Args:
        seconds: work in one message.
        most: maximum number of batches in one message.
        patient: ignore a single batch that takes eight times the mean; the second in a row counts. Set where processes
            outnumber cores, so that a batch may be slow because its worker waited for one.

    Example:
        >>> grouping = Grouping()
        >>> for _ in range(100): size = grouping.note(190e-6)
        >>> grouping.size
        10
        >>> for _ in range(100): size = grouping.note(5e-3)
        >>> grouping.size
        1
    """

    def __init__(self, seconds: float = GROUP_SECONDS, most: int = MAX_GROUP, *, patient: bool = False) -> None:
        self._seconds, self._most, self._patient = seconds, most, patient
        self._mean = seconds
        self._was_long = False
        self.size = 1

    def note(self, seconds: float) -> int:
        """Record the seconds that a worker took for a batch, and return the new group size."""
        is_long, was_long = seconds > 8 * self._mean, self._was_long
        self._was_long = is_long
        if is_long and (was_long or not self._patient):
            # Replaces the mean: the next ones may take as long, and the main process waits for them.
            self._mean = seconds
        elif not is_long:
            self._mean += _MEMORY * (seconds - self._mean)
        self.size = min(self._most, max(1, int(self._seconds / max(self._mean, 1e-9))))
        return self.size
