"""Where the time of a training loop goes: waiting for data, or the loop itself.

    the iterator adds to a Meter for each batch -> Meter.report() -> LoaderStats, what the user sees

Only the time inside epochs counts, from the first ``next`` to the last batch; not what happens between epochs. The
times of several iterators add up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done so far.

    Attributes:
        batches: batches delivered.
        samples: samples in them.
        seconds: time spent in epochs, by the loop and by the loader.
        waiting_seconds: of these, time spent inside ``next``, waiting for data.
        reading_seconds: time the workers spent reading and batching, all workers added up.
        placing_seconds: of the waiting time, spent on conversion and on copies to the devices.
        retries: requests to a server that had to be tried again, in this process and in workers (`ShardDataset`).

    Example:
        >>> stats = LoaderStats(batches=10, samples=640, seconds=2.0, waiting_seconds=0.5)
        >>> print(stats)
        640 samples in 10 batches, 320 samples/s, 25% of the time waiting for data
    """

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    reading_seconds: float = 0.0
    placing_seconds: float = 0.0
    retries: int = 0

    @property
    def samples_per_second(self) -> float:
        """Samples delivered per second of the epochs."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the epochs' time that the loop waited for data, from 0 (never) to 1."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        return (
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:,.0f} samples/s, "
            f"{self.waiting_share:.0%} of the time waiting for data"
        )


class Meter:
    """The counts of one loader. Iterators add to them, one at a time: they hold the pipeline's lock.

    Attributes:
        batches, samples, seconds, waiting_seconds, reading_seconds, placing_seconds, retries: as in `LoaderStats`.
        skipped: ``(index, error)`` of the last samples that ``on_error`` skipped or replaced.
        num_skipped: how many samples in all.
        looks: what the first batch looked like; None before it.
    """

    KEPT = 1000

    def __init__(self) -> None:
        self.batches = self.samples = self.retries = 0
        self.seconds = self.waiting_seconds = self.reading_seconds = self.placing_seconds = 0.0
        self.skipped: list[tuple[Any, BaseException]] = []
        self.num_skipped = 0
        self.looks: str | None = None

    def look(self, batch: Any) -> None:
        """Note what the first batch looks like."""
        try:
            self.looks = describe(batch)
        except Exception:  # a batch of the user's own class may not want to be looked at
            self.looks = type(batch).__name__

    def skip(self, skipped: Sequence[tuple[Any, BaseException]]) -> None:
        """Samples were skipped or replaced."""
        self.skipped.extend(skipped)
        self.num_skipped += len(skipped)
        del self.skipped[: -self.KEPT]

    def report(self) -> LoaderStats:
        """The counts so far."""
        return LoaderStats(**{field.name: getattr(self, field.name) for field in dataclasses.fields(LoaderStats)})


def describe(batch: Any) -> str:
    """What a batch looks like, in one line: ``[float32[64, 1, 8, 8], int64[64]]``.

    Example:
        >>> import numpy as np
        >>> describe({"x": np.zeros((2, 3), np.float32), "name": ["a", "b"]})
        "{'x': float32[2, 3], 'name': [2 x str]}"
    """
    if hasattr(batch, "shape") and hasattr(batch, "dtype"):
        device = getattr(batch, "device", None)
        where = "" if str(device) in ("None", "cpu") else f" on {device}"
        return f"{str(batch.dtype).removeprefix('torch.')}[{', '.join(map(str, batch.shape))}]{where}"
    if isinstance(batch, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe(value)}" for key, value in batch.items()) + "}"
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = ", ".join(f"{f.name}={describe(getattr(batch, f.name))}" for f in dataclasses.fields(batch))
        return f"{type(batch).__name__}({fields})"
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        fields = ", ".join(f"{name}={describe(value)}" for name, value in zip(batch._fields, batch, strict=True))
        return f"{type(batch).__name__}({fields})"
    if isinstance(batch, (list, tuple)):
        kinds = {type(item).__name__ for item in batch}
        if len(kinds) == 1 and not hasattr(batch[0], "shape") and not isinstance(batch[0], (list, tuple, Mapping)):
            return f"[{len(batch)} x {kinds.pop()}]"
        inside = ", ".join(map(describe, batch))
        return f"[{inside}]" if isinstance(batch, list) else f"({inside})"
    return type(batch).__name__
