"""How many batches travel in one message, and how many are kept in flight: a pure policy.

    seconds that a worker took for each batch -> Grouping.note -> Grouping.size

To send a message and to wake the process that waits for it costs 20 to 50 us on each side. A small batch takes less
to read. So cheap batches go in groups, each about `GROUP_SECONDS` of work. Workers hold `HELD` groups, so that none
waits for the next. A batch that takes longer is a group by itself. Then a worker holds one batch beyond the one that it
does: with more, uneven batches would leave one worker with work while others idle.

Measured (2 workers, 2 cores, medians of 8 epochs in turns; CPU time of the main process, and time, both per batch):

    a group takes                    0.3 ms         1 ms           2 ms           4 ms
    images, 256 of 3 KB              166, 508 us    143, 521 us    106, 472 us    96, 464 us
    rows of 64 float32, 1,024        145, 272       106, 215       101, 209       98, 206
    64 padded texts                  147, 359        86, 264        69, 236       54, 209
    16 numbers                        51, 113        42, 100        43, 104       40, 99

More than 2 ms saves little, and for so long a batch that is finished may wait in its worker.
"""

from __future__ import annotations

from math import inf

GROUP_SECONDS = 2e-3
"""Work in one message."""

MAX_GROUP = 64
"""Batches in one message. 16 numbers a batch, 24 turns: 1.09 times as fast with 32 as with 16, 1.23 with 64."""

HELD = 2
"""Groups that a worker holds: the one it does and one more."""

_MEMORY = 0.1
"""Weight of the newest batch in the mean."""


class Grouping:
    """Learns from the batches that have come how many go together.

    Args:
        seconds: work in one message.
        most: batches in one message.
        most_bytes: bytes in one message.
        patient: one batch that took eight times as long as usual does not count, only the second in a row does. Where
            more processes run than there are cores, a batch may take long because its worker had to wait.

    Attributes:
        size: batches in a group, at least 1.

    Example:
        >>> grouping = Grouping()
        >>> for _ in range(100): size = grouping.note(190e-6)
        >>> grouping.size
        10
        >>> for _ in range(100): size = grouping.note(5e-3)
        >>> grouping.size
        1
    """

    def __init__(
        self, seconds: float = GROUP_SECONDS, most: int = MAX_GROUP, *, most_bytes: float = inf, patient: bool = False
    ) -> None:
        self._seconds, self._most, self._most_bytes, self._patient = seconds, most, most_bytes, patient
        self._mean = seconds
        self._was_long = False
        self.size = 1

    def note(self, seconds: float, nbytes: int = 0) -> int:
        """A worker took so long for a batch; how many batches of ``nbytes`` go together from now on."""
        is_long, was_long = seconds > 8 * self._mean, self._was_long
        self._was_long = is_long
        if is_long and (was_long or not self._patient):
            # It counts in full: the next ones may take as long, and the main process waits for them.
            self._mean = seconds
        elif not is_long:
            self._mean += _MEMORY * (seconds - self._mean)
        most = min(self._most, self._most_bytes / max(nbytes, 1), self._seconds / max(self._mean, 1e-9))
        self.size = max(1, int(most))
        return self.size
