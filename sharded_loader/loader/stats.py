"""Where the time of a training loop goes: waiting for data, or in the loop.

    the iterator adds to a Meter for each batch -> Counts, of each epoch; the sum of all is made when it is asked for
    Counts.report() -> LoaderStats, what the user sees -> as_dict() -> TensorBoard, W&B, tqdm

Only the time inside epochs counts, from the first ``next`` to the last batch; not what happens between epochs. The
times of several iterators add up in the sum. In the counts of one epoch only the newest iterator of this epoch counts.

Iterators add one at a time, under the pipeline's lock. Readers take no lock: `stats` may be called in a signal handler.
What can go wrong: numbers read in the middle of a ``next`` of another thread may be one batch apart from each other.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import HAS_ENDED, TooManySkippedError, notes_of, text_of
from sharded_loader.base.notices import Notices
from sharded_loader.data.datasets import retries_of
from sharded_loader.data.interleave import mixture_of
from sharded_loader.engine.messages import Result


@dataclass(frozen=True)
class LoaderStats:
    """What a loader has done so far, in all epochs or in one: what `ShardedDataLoader.stats` returns.

    Attributes:
        batches: batches delivered.
        samples: samples in them.
        seconds: time spent in epochs, by the loop and by the loader.
        waiting_seconds: of these, time spent inside ``next``, waiting for data.
        reading_seconds: time the workers spent reading and batching, summed over all workers.
        placing_seconds: of the waiting time, spent on conversion and on copies to the devices.
        retries: requests to a server that had to be tried again, in this process and in workers (`ShardDataset`).
        replaced_workers: workers that died, or stood still for longer than ``timeout``, and were replaced.
        skipped_samples: samples that ``on_error`` skipped or replaced.
        slow_batches: batches that did not fit into shared memory (``max_bytes``), and took a slower way.
        device_seconds: of ``seconds``, time spent inside ``next``, waiting for a device that is some batches behind. It
            is no waiting for data: a faster loader would not help.
        device_waiting_seconds: time in which a device had nothing to do because its batch was not there, summed over
            the devices. The devices measure it themselves; a batch counts when they have reached it. The first batch of
            a loader does not count.
        recycled_workers: workers that took more memory than ``max_worker_memory``, and were replaced.
        sources: of a mixture (`interleave`), how many samples came from each of its datasets to this rank. Samples that
            ``on_error`` skipped or replaced count for their dataset. Empty if the loader's dataset is no mixture that
            is read by index, nor a transform of one.

    Example:
        >>> stats = LoaderStats(batches=10, samples=640, seconds=2.0, waiting_seconds=0.5)
        >>> print(stats)
        640 samples in 10 batches, 320 samples/s, 25% of the time waiting for data
        >>> stats.as_dict("samples_per_second", "waiting_share")
        {'samples_per_second': 320.0, 'waiting_share': 0.25}
    """

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    reading_seconds: float = 0.0
    placing_seconds: float = 0.0
    retries: int = 0
    replaced_workers: int = 0
    skipped_samples: int = 0
    slow_batches: int = 0
    device_seconds: float = 0.0
    device_waiting_seconds: float = 0.0
    recycled_workers: int = 0
    sources: tuple[int, ...] = ()

    @property
    def shares(self) -> tuple[float, ...]:
        """Of a mixture, the share of each dataset in the samples of this rank; see ``sources``.

        Example:
            >>> LoaderStats(sources=(30, 10)).shares
            (0.75, 0.25)
        """
        return tuple(count / sum(self.sources) for count in self.sources)

    @property
    def samples_per_second(self) -> float:
        """Samples delivered per second of the epochs."""
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def waiting_share(self) -> float:
        """Share of the epochs' time that the loop waited for data, from 0 (never) to 1."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0

    def as_dict(self, *names: str, prefix: str = "") -> dict[str, float]:
        """The numbers by name, as floats: for TensorBoard, Weights & Biases, a progress bar, or a log file.

        Args:
            *names: Which numbers: attributes and properties of this class. None given: all of them.
            prefix: A text to put before each name.

        Returns:
            A new dict. The names never change: the attributes but ``sources``, then ``samples_per_second`` and
            ``waiting_share``.

        Raises:
            ValueError: There is no number of this name.

        Example:
            >>> stats = LoaderStats(batches=10, samples=640)
            >>> list(stats.as_dict("batches", "samples", prefix="data/").items())
            [('data/batches', 10.0), ('data/samples', 640.0)]
        """
        known = (*NUMBERS, "samples_per_second", "waiting_share")
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"as_dict: there is no number {unknown[0]!r}: choose from {', '.join(known)}")
        return {f"{prefix}{name}": float(getattr(self, name)) for name in names or known}

    def __str__(self) -> str:
        parts = [
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:,.0f} samples/s",
            f"{self.waiting_share:.0%} of the time waiting for data",
        ]
        if self.device_seconds:
            parts.append(f"{self.device_seconds / self.seconds:.0%} of it waiting for the device")
        return ", ".join([*parts, *quiet_counts(self)])


NUMBERS = tuple(field.name for field in dataclasses.fields(LoaderStats) if field.name != "sources")
"""The attributes of `LoaderStats` that are numbers."""


def quiet_counts(stats: LoaderStats) -> list[str]:
    """What has gone wrong without an error, in words.

    Example:
        >>> quiet_counts(LoaderStats(replaced_workers=1, skipped_samples=20))
        ['1 worker replaced', '20 samples skipped or replaced']
    """
    words = {
        "worker": (stats.replaced_workers, "replaced"),
        "sample": (stats.skipped_samples, "skipped or replaced"),
        "batch": (stats.slow_batches, "too large for shared memory"),
    }
    plural = {"batch": "batches"}
    return [f"{n} {one if n == 1 else plural.get(one, one + 's')} {fate}" for one, (n, fate) in words.items() if n]


class PoolTotals(NamedTuple):
    """Retried requests, replaced workers and the like since the loader was made. Fields of `LoaderStats`."""

    retries: int = 0
    replaced_workers: int = 0
    skipped_samples: int = 0
    slow_batches: int = 0
    recycled_workers: int = 0


NO_TOTALS = PoolTotals()


class Counts:
    """What one iterator has delivered in its epoch.

    Attributes:
        batches, samples, seconds, waiting_seconds, and the others: as in `LoaderStats`.
        began, ended: the totals when the epoch began, and when the next one began.
        sum: of an old epoch, the counts that take what its iterator still adds; otherwise None.
    """

    began = NO_TOTALS
    ended: PoolTotals | None = None
    sum: Counts | None = None

    def __init__(self) -> None:
        self.batches = self.samples = self.retries = 0
        self.replaced_workers = self.skipped_samples = self.slow_batches = self.recycled_workers = 0
        self.seconds = self.waiting_seconds = self.reading_seconds = self.placing_seconds = 0.0
        self.device_seconds = self.device_waiting_seconds = 0.0
        self.sources: Any = None  # an array, if there are any

    def merge(self, other: Counts) -> None:
        """Add what another one has counted."""
        for name in reversed(NUMBERS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.sources is not None:
            self.sources = other.sources + (0 if self.sources is None else self.sources)

    def report(self, totals: PoolTotals = NO_TOTALS) -> LoaderStats:
        """The counts so far. ``totals`` are as `Meter.totals` returns them."""
        counts = {name: getattr(self, name) for name in reversed(NUMBERS)}
        for name, before, now in zip(PoolTotals._fields, self.began, self.ended or totals, strict=True):
            counts[name] += now - before
        return LoaderStats(**counts, sources=() if self.sources is None else tuple(self.sources.tolist()))


class Meter:
    """The counts of one loader. Iterators add to them, one at a time: they hold the pipeline's lock.

    A batch is counted once, for its epoch: that takes half the time of counting it for the loader too. The sum over all
    epochs is made when it is asked for.

    Args:
        dataset: what is read. It may count the requests that this process tries again; see `retries_of`.
        notices: what the loader and its pool count.
        max_skipped: how many samples of an epoch ``on_error`` may skip or replace; None: any number.

    Attributes:
        epochs: the counts of the last epochs, by their numbers.
        skipped: ``(index, error)`` of the last samples that ``on_error`` skipped or replaced.
        notices, max_skipped: as above.
        mixture: the mixture whose samples are read, or None.
        looks: what the first batch looked like; None before it.
    """

    KEPT = KEPT_EPOCHS = 1000

    def __init__(self, dataset: Any = None, notices: Notices | None = None, max_skipped: int | None = None) -> None:
        self._dataset, self.notices, self.max_skipped = dataset, notices or Notices(), max_skipped
        self.mixture = mixture_of(dataset)
        self.epochs: dict[int, Counts] = {}
        self._sum = Counts()  # of the iterators before the last ones
        self._last: deque[tuple[int, Counts]] = deque([(-1, Counts())])
        self.skipped: list[tuple[Any, BaseException]] = []
        self.looks: str | None = None

    def begin(self, epoch: int, totals: PoolTotals, counts: Counts) -> None:
        """An iterator delivers its first batch of an epoch, and will `add` to these counts."""
        self._last[-1][1].ended = totals
        counts.began = totals
        self.epochs[epoch] = counts
        self._last.append((epoch, counts))
        if len(self._last) > self.KEPT_EPOCHS:
            number, old = self._last.popleft()
            self._sum.merge(old)
            old.sum = self._sum
            if self.epochs.get(number) is old:
                del self.epochs[number]

    def add(self, epoch: Counts, inside: float, seconds: float, placing: float, behind: float, result: Result) -> None:
        """An iterator has come to a batch, or to an error in its place.

        Args:
            epoch: what `begin` was given.
            inside: seconds in ``next``.
            seconds: of these and of the loop since the batch before.
            placing: those in ``next`` of conversion and of copies.
            behind: of these, in which the host waited for a device.
            result: of the batch.
        """
        # Another thread may read them meanwhile, from the last field to the first: a part never exceeds its whole.
        epoch.seconds += seconds
        epoch.waiting_seconds += inside - behind
        epoch.device_seconds += behind
        if result.error is None:
            epoch.batches += 1
            epoch.samples += result.samples
            epoch.reading_seconds += result.seconds
            epoch.retries += result.retries
            epoch.placing_seconds += placing - behind
        if epoch.sum is not None:
            self.add(epoch.sum, inside, seconds, placing, behind, result)

    def count_sources(self, epoch: Counts, shards: Sequence[Any]) -> None:
        """Count which datasets of the mixture the samples of a batch came from: 20 us."""
        assert self.mixture is not None  # it was asked for
        came = sum(map(self.mixture.sources_of, shards))
        for counts in (epoch, epoch.sum):
            if counts is not None:
                counts.sources = came if counts.sources is None else counts.sources + came

    def look(self, batch: Any) -> None:
        """Note what the first batch looks like."""
        try:
            self.looks = describe(batch)
        except Exception:  # a batch of the user's own class may not want to be looked at
            self.looks = type(batch).__name__

    @property
    def num_skipped(self) -> int:
        """The number of samples that ``on_error`` has skipped or replaced."""
        return self.notices.counts["skipped_samples"]

    def skip(self, skipped: Sequence[tuple[Any, BaseException]], where: str = "", before: int = 0) -> Exception | None:
        """Samples were skipped or replaced.

        Args:
            skipped: the index and the error of each.
            where: epoch and batch, in words.
            before: how many there were in this epoch before.

        Returns:
            The error to raise, if they are too many.
        """
        self.skipped.extend(skipped)
        del self.skipped[: -self.KEPT]
        for index, error in skipped:
            why = f"{type(error).__name__}: {text_of(error)}"
            for note in (note for note in notes_of(error) if note.endswith(HAS_ENDED)):
                self.notices.warn(note, f"{note} (in {where}; {why})")
            self.notices.happened("skipped_samples", f"on_error skipped or replaced sample {index!r} in {where}: {why}")
        count, limit = before + len(skipped), self.max_skipped
        return None if limit is None or count <= limit else TooManySkippedError(count, limit, where, *skipped[-1])

    def totals(self) -> PoolTotals:
        """What has been counted so far: requests that this process has tried again for the dataset, and the notices."""
        return PoolTotals(retries_of(self._dataset), *(self.notices.counts[name] for name in PoolTotals._fields[1:]))

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """The counts of all epochs, or of one; all zeros if it has delivered no batch yet."""
        if epoch is not None:
            counts = self.epochs.get(epoch)
            return LoaderStats() if counts is None else counts.report(self.totals())
        total = Counts()
        for one in (self._sum, *(counts for _, counts in tuple(self._last))):
            total.merge(one)
        return total.report(self.totals())


class Metered:
    """A loader with a `Meter`, as users see it."""

    def _count_with(self, meter: Meter) -> None:
        self._meter = meter

    @property
    def skipped(self) -> list[tuple[Any, BaseException]]:
        """``(index, error)`` of the last 1,000 samples that ``on_error`` skipped or replaced."""
        return self._meter.skipped

    @property
    def num_skipped(self) -> int:
        """The number of samples that ``on_error`` has skipped or replaced."""
        return self._meter.num_skipped

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """Samples per second, the share of time spent waiting for data, where the time went.

        You can call it at any time: in the middle of an epoch, after its end, from another thread.

        Args:
            epoch: The epoch to tell about. None: all epochs together. If you read an epoch several times, the newest
                iterator counts. After `load_state_dict`, an epoch counts from the loaded position on. The loader
                keeps the numbers of the last 1,000 epochs.

        Returns:
            The numbers, all zeros if the epoch has delivered no batch yet. `LoaderStats.as_dict` makes a dict of them.

        Raises:
            TypeError, ValueError: ``epoch`` is not an integer of at least 0.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for epoch in range(2):
            ...     for batch in loader: pass
            ...     print(loader.stats(epoch).as_dict("batches", "samples"))
            {'batches': 3.0, 'samples': 10.0}
            {'batches': 3.0, 'samples': 10.0}
            >>> loader.stats().samples
            20
        """
        return self._meter.stats(None if epoch is None else check_int("epoch", epoch, 0, "epochs count from 0"))


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
