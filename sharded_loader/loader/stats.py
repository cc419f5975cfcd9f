"""Where the time of a training loop goes: waiting for data, or in the loop.

    the iterator -> Counts.count: sums of cheap batches;  Meter.note -> a BatchRow in the Counts of its epoch
    Sums.adding(rows) -> Sums     `KEPT_BATCHES` at a time, and when somebody asks
    Counts.report() -> LoaderStats, what the user sees -> as_dict() -> TensorBoard, W&B, tqdm
    `waits` says why ``next`` waited, `times` how long each stage of a batch took

Only the time inside epochs counts, from the first ``next`` to the last batch; not what happens between epochs. The
times of several iterators add up in the sum. In the counts of one epoch only the newest iterator of this epoch counts.

Iterators add one at a time, under the pipeline's lock. Readers take no lock: `stats` may be called in a signal handler.
A reader finds `Sums`, which never change, and a list of rows, which only grows. Nothing can go wrong.

Measured (inline `tiny`, 45 us for each batch, in short turns with a loader that only counts): 2 us more for each batch,
half of them in the reader. To note a batch takes 2 us more: see `engine.pipeline.NOTED_SECONDS`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import chain
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import (
    HAS_ENDED,
    TooManySkippedError,
    WorkerDiedError,
    WorkerTimeoutError,
    notes_of,
    text_of,
)
from sharded_loader.base.notices import Notices
from sharded_loader.data.datasets import counts_of, retries_of
from sharded_loader.data.interleave import mixture_of
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry, Wait
from sharded_loader.engine.reader import KEPT_SAMPLES, plain_indices
from sharded_loader.loader.times import STAGES, BatchRow, BatchTimes, Histograms, SlowSample, StageTimes, WorkerTimes
from sharded_loader.loader.waits import (
    CAUSES,
    Setup,
    advice,
    causes_of,
    compute_share,
    looked_at,
    verdict,
)


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
        discarded_samples: samples that filled no batch at the end of an epoch, or of a part of iterable data, and were
            left out (``last_batch="discard"``). They count at the end of the epoch, and not those that a batch sampler
            of yours leaves out.
        cache_hits, cache_misses: samples that workers found in the caches of the dataset, and those that they read
            instead (``dataset.cache(...)``). They count when a worker reads, also what is prefetched. All loaders
            over one cached dataset count together.
        cache_bytes: what the caches hold; of one epoch, what they took in.
        sources: of a mixture (`interleave`), how many samples came from each of its datasets to this rank. Samples that
            ``on_error`` skipped or replaced count for their dataset. Empty if the loader's dataset is no mixture that
            is read by index, nor a transform of one.
        causes: why your program waited: the seconds of each cause. They add up to ``waiting_seconds``.
        slowest: the 20 samples that took longest to read, the slowest first: index, seconds, epoch and worker. Samples
            are timed where one takes 20 us or more on average, and the dataset reads them one by one.

    These are the causes. ``"compute"``: workers compute. ``"input"``: they wait for a disk or a network.
    ``"main_process"``: workers have no task, or the main process works. ``"placing"``: conversion and copies.
    ``"start"``: workers start, or an epoch begins.

    Example:
        >>> causes = {"compute": 0.4, "placing": 0.1}
        >>> how_long = {"seconds": 2.0, "waiting_seconds": 0.5, "causes": causes}
        >>> stats = LoaderStats(batches=10, samples=640, **how_long)
        >>> print(stats)
        640 samples in 10 batches, 320 samples/s, 25% of the time waiting for data
        Training waits for the workers, which compute.
        Do less for each sample, or let num_workers="auto" find how many workers help.
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
    discarded_samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0
    sources: tuple[int, ...] = ()
    causes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0), hash=False)
    slowest: tuple[SlowSample, ...] = ()
    _timed: Histograms = field(default_factory=Histograms, repr=False, compare=False)
    _rows: Sequence[tuple[Any, ...]] = field(default=(), repr=False, compare=False)
    _setup: Setup | None = field(default=None, repr=False, compare=False)

    @cached_property
    def _batches(self) -> list[BatchTimes]:
        return looked_at(self._rows)

    @cached_property
    def stages(self) -> Mapping[str, StageTimes]:
        """How long batches took on their way: of each stage the sum of seconds, quantiles and the longest.

        The stages are: ``"queued"`` (waits for a worker), ``"read"``, ``"collate"``, ``"write"`` (into shared memory),
        ``"behind"`` (finished, while batches before it are not handed out), ``"ready"`` (waits for your program), and
        ``"placing"``. Empty before the first batch, and of all but the last 10 epochs.
        """
        return self._timed.stages()

    @cached_property
    def workers(self) -> Mapping[int, WorkerTimes]:
        """What each worker has done, by its number. The number -1 is the main process. Kept as long as `stages`."""
        return self._timed.workers()

    @property
    def verdict(self) -> str:
        """What limits the rate, in one sentence. Empty if that is not known.

        Example:
            >>> LoaderStats(batches=10, seconds=2.0, waiting_seconds=0.01).verdict
            'The training loop is the limit: it waits for data for 0% of the time.'
        """
        return verdict(self)

    @property
    def advice(self) -> str:
        """What to do about the `verdict`, in one sentence. Empty if that is not known."""
        return advice(self)

    @property
    def shares(self) -> tuple[float, ...]:
        """Of a mixture, the share of each dataset in the samples of this rank; see ``sources``.

        Example:
            >>> LoaderStats(sources=(30, 10)).shares
            (0.75, 0.25)
        """
        return tuple(count / max(1, sum(self.sources)) for count in self.sources)

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
            A new dict. The names never change: the attributes that are numbers, then ``samples_per_second`` and
            ``waiting_share``. After these the causes (``cause_compute``), what is known of the stages
            (``stage_read_seconds``, ``stage_read_p99``) and of the workers (``worker_0_idle_seconds``), and
            ``slowest_seconds``: of the slowest sample.

        Raises:
            ValueError: There is no number of this name.

        Example:
            >>> stats = LoaderStats(batches=10, samples=640)
            >>> list(stats.as_dict("batches", "samples", prefix="data/").items())
            [('data/batches', 10.0), ('data/samples', 640.0)]
        """
        known: dict[str, float] = {name: getattr(self, name) for name in _SCALARS}
        if not names or not set(names).issubset(known):
            known |= self._measured()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"as_dict: there is no number {unknown[0]!r}: choose from {', '.join(known)}")
        return {f"{prefix}{name}": float(known[name]) for name in names or known}

    def _measured(self) -> dict[str, float]:
        """What is known of causes, stages, samples and workers, by the names of `as_dict`."""
        found = {f"cause_{name}": seconds for name, seconds in self.causes.items()}
        nothing = StageTimes(0.0, 0.0, 0.0, 0.0, 0.0)
        for stage in STAGES:
            times = self.stages.get(stage, nothing)._asdict()
            found |= {f"stage_{stage}_{name}": seconds for name, seconds in times.items()}
        found["slowest_seconds"] = self.slowest[0].seconds if self.slowest else 0.0
        for number, worker in self.workers.items():
            found |= {f"worker_{number}_{name}": value for name, value in worker._asdict().items()}
        return found

    def __str__(self) -> str:
        parts = [
            f"{self.samples} samples in {self.batches} batches, {self.samples_per_second:,.0f} samples/s",
            f"{self.waiting_share:.0%} of the time waiting for data",
        ]
        if self.device_seconds:
            parts.append(f"{self.device_seconds / self.seconds:.0%} of it waiting for the device")
        numbers = ", ".join([*parts, *quiet_counts(self)])
        return "\n".join(filter(None, [numbers, self.verdict, self.advice]))


NUMBERS = tuple(one.name for one in dataclasses.fields(LoaderStats) if one.type in ("int", "float"))
"""The attributes of `LoaderStats` that are numbers."""

_SCALARS = *NUMBERS, "samples_per_second", "waiting_share"


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
    discarded_samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0


NO_TOTALS = PoolTotals()

KEPT_BATCHES = 1000
"""The last batches whose times are kept. They are added up 1,000 at a time, in a third of the time."""

COUNTED = tuple(name for name in NUMBERS if name not in (*PoolTotals._fields[1:], "device_waiting_seconds"))
"""The numbers that are sums over batches."""


NO_CAUSES = dict.fromkeys(CAUSES, 0.0)


class Sums(NamedTuple):
    """What the batches of an epoch add up to. It never changes.

    Attributes:
        numbers: of `COUNTED`.
        causes: the seconds of each cause.
        timed: the measured batches.
        slowest: the samples that took longest.
        share: of the time of the workers, in the last rows, in which they computed.
    """

    numbers: tuple[float, ...] = (0,) * len(COUNTED)
    causes: Mapping[str, float] = NO_CAUSES
    timed: Histograms = Histograms()
    slowest: tuple[SlowSample, ...] = ()
    share: float = 1.0

    def plus(self, other: Sums) -> Sums:
        """The sums of both."""
        causes = {name: self.causes[name] + other.causes[name] for name in CAUSES}
        slowest = nlargest(KEPT_SAMPLES, [*self.slowest, *other.slowest], key=attrgetter("seconds"))
        numbers = tuple(map(operator.add, self.numbers, other.numbers))
        return Sums(numbers, causes, self.timed + other.timed, tuple(slowest), other.share)

    def adding(self, rows: Sequence[tuple[Any, ...]]) -> Sums:
        """These, and some more batches: a `BatchRow` each."""
        if not rows:
            return self
        columns: dict[str, Any] = dict(zip(BatchRow._fields, zip(*rows, strict=True), strict=True))
        behind = sum(columns["behind"])
        known = {
            "batches": len(rows) - columns["samples"].count(-1),
            "samples": sum(columns["samples"]) + columns["samples"].count(-1),
            "seconds": sum(map(operator.sub, columns["taken"], columns["turn"])),
            "waiting_seconds": sum(map(operator.sub, columns["taken"], columns["asked"])) - behind,
            "reading_seconds": sum(columns["seconds"]),
            "placing_seconds": sum(columns["placing"]) - behind,
            "retries": sum(columns["retries"]),
            "device_seconds": behind,
        }
        numbers = tuple(known[name] for name in COUNTED)
        noted = list(map(BatchRow._make, rows))
        share = compute_share(noted, self.share)
        causes = dict.fromkeys(CAUSES, 0.0)
        for row in noted:
            for cause, seconds in causes_of(row, share):
                causes[cause] += seconds
        causes["placing"] += known["placing_seconds"]
        causes["main_process"] += max(0.0, known["waiting_seconds"] - sum(causes.values()))
        slow = tuple(chain.from_iterable(row.slow for row in noted))
        return self.plus(Sums(numbers, causes, Histograms().adding(noted), slow, share))


_EPOCH, _TAKEN = map(BatchRow._fields.index, ("epoch", "taken"))


class Counts:
    """What one iterator has delivered in its epoch.

    Attributes:
        number: of the epoch.
        state: what the batches that were noted add up to, and the rows of those that have not been added up yet.
        batches, samples, seconds, waiting_seconds, reading_seconds, placing_seconds, device_seconds: of the others,
            which are cheap, as in `LoaderStats`.
        for_workers: of their `waiting_seconds`, when a worker was waited for.
        device_waiting_seconds, sources: as in `LoaderStats`.
        began, ended: the totals when the epoch began, and when the next one began.
        sum: of an old epoch, the counts that take what its iterator still adds; otherwise None.
        setup: who reads.
    """

    number = -1
    began = NO_TOTALS
    ended: PoolTotals | None = None
    sum: Counts | None = None
    setup: Setup | None = None

    def __init__(self) -> None:
        self.state: tuple[Sums, list[tuple[Any, ...]]] = Sums(), []
        self.device_waiting_seconds = 0.0
        self.sources: Any = None  # an array, if there are any
        self.batches = self.samples = 0
        self.seconds = self.waiting_seconds = self.reading_seconds = self.placing_seconds = self.device_seconds = 0.0
        self.for_workers = 0.0

    def count(
        self, inside: float, seconds: float, placing: float, behind: float, result: Result, waited: float
    ) -> None:
        """Add a batch of which nothing else is kept, or an error in its place.

        Args:
            inside: seconds in ``next``.
            seconds: of these and of the loop since the batch before.
            placing: those in ``next`` of conversion and of copies.
            behind: of these, in which the host waited for a device.
            result: of the batch.
            waited: seconds in which ``next`` waited for workers.
        """
        # Another thread may read them meanwhile, from the last field to the first: a part never exceeds its whole.
        self.seconds += seconds
        self.waiting_seconds += inside - behind
        self.device_seconds += behind
        if result.error is None:
            self.batches += 1
            self.samples += result.samples
            self.reading_seconds += result.seconds
        self.placing_seconds += placing - behind
        self.for_workers += waited
        if self.sum is not None:
            self.sum.count(inside, seconds, placing, behind, result, waited)

    @property
    def sums(self) -> Sums:
        """Of all its batches."""
        sums, rows = self.state
        sums = sums.adding(rows[:])
        is_here = self.setup is not None and not self.setup.num_workers
        for_workers, placing = self.reading_seconds if is_here else self.for_workers, self.placing_seconds
        numbers = {name: getattr(self, name, 0) for name in reversed(COUNTED)}
        causes = dict.fromkeys(CAUSES, 0.0)
        causes |= {"compute": sums.share * for_workers, "input": (1 - sums.share) * for_workers, "placing": placing}
        causes["main_process"] = max(0.0, numbers["waiting_seconds"] - for_workers - placing)
        return sums.plus(Sums(tuple(numbers[name] for name in COUNTED), causes, share=sums.share))

    def merge(self, other: Counts) -> None:
        """Add what another one has counted."""
        sums, rows = self.state
        self.state = sums.adding(rows).plus(other.sums), []
        self.device_waiting_seconds += other.device_waiting_seconds
        if other.sources is not None:
            self.sources = other.sources + (0 if self.sources is None else self.sources)

    def report(self, totals: PoolTotals = NO_TOTALS, rows: Sequence[tuple[Any, ...]] = ()) -> LoaderStats:
        """The counts so far.

        Args:
            totals: as `Meter.totals` returns them.
            rows: the last batches.
        """
        sums = self.sums
        counts: dict[str, Any] = dict(zip(COUNTED, sums.numbers, strict=True))
        for name, before, now in zip(PoolTotals._fields, self.began, self.ended or totals, strict=True):
            counts[name] = counts.get(name, 0) + now - before
        counts["sources"] = () if self.sources is None else tuple(self.sources.tolist())
        counts |= {"causes": sums.causes, "slowest": sums.slowest, "_timed": sums.timed, "_rows": rows}
        return LoaderStats(**counts, device_waiting_seconds=self.device_waiting_seconds, _setup=self.setup)


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
        tune: called at the end of a step from `tune_at` on, a stamp of `host_clock.now`, with this object, the
            pipeline and the stamp.
    """

    tune: Callable[[Meter, Any, float], None]
    tune_at = math.inf

    KEPT = KEPT_EPOCHS = 1000
    KEPT_TIMES = 10
    """Epochs whose histograms are kept: they take 20 KB for each worker."""

    def __init__(self, dataset: Any = None, notices: Notices | None = None, max_skipped: int | None = None) -> None:
        self._dataset, self.notices, self.max_skipped = dataset, notices or Notices(), max_skipped
        self.mixture = mixture_of(dataset)
        self.epochs: dict[int, Counts] = {}
        self._sum = Counts()  # of the iterators before the last ones
        self._last: deque[tuple[int, Counts]] = deque([(-1, Counts())])
        self.skipped: list[tuple[Any, BaseException]] = []
        self.looks: str | None = None
        self._ring: list[tuple[Any, ...]] = []  # the rows that were added up last

    def begin(self, epoch: int, totals: PoolTotals, counts: Counts, setup: Setup | None = None) -> None:
        """An iterator delivers its first batch of an epoch, and will `add` to these counts. ``setup``: who reads."""
        self._last[-1][1].ended = totals
        self._add_up(self._last[-1][1])
        counts.began, counts.number, counts.setup = totals, epoch, setup
        self.epochs[epoch] = counts
        self._last.append((epoch, counts))
        if len(self._last) > self.KEPT_TIMES:
            old = self._last[-self.KEPT_TIMES - 1][1]
            self._add_up(old)
            measured = old.state[0]._replace(numbers=Sums().numbers, causes=NO_CAUSES)
            self._sum.state = self._sum.state[0].plus(measured), []
            old.state = old.state[0]._replace(timed=Histograms(), slowest=()), []
        if len(self._last) > self.KEPT_EPOCHS:
            number, old = self._last.popleft()
            self._sum.merge(old)
            old.sum = self._sum
            if self.epochs.get(number) is old:
                del self.epochs[number]

    def note(
        self,
        epoch: Counts,
        entry: Entry,
        result: Result,
        stamps: tuple[float, float, float, float, float, float, bool],
    ) -> None:
        """Keep how a batch, or an error in its place, was on its way.

        Args:
            epoch: what `begin` was given.
            entry: the batch.
            result: of the batch; an error, if the batch could not be handed out.
            stamps: fields of its `BatchRow`, from ``sent`` to ``starts``.
        """
        slow: tuple[SlowSample, ...] = ()
        read, samples = entry.result or result, result.samples
        wait = entry.wait if isinstance(entry.wait, Wait) else None
        is_lost, times = read.rebuilt, read.times
        if result.error is not None:
            samples, is_lost = -1, is_lost or isinstance(read.error, (WorkerDiedError, WorkerTimeoutError))
        if times is not None and times.slow and entry.task is not None:
            slow = self._name_slow(entry.task, read)
        who = epoch.number, entry.seq, samples, read.retries, read.worker, read.began, read.seconds
        row = (*who, *stamps, is_lost, wait, times, slow)
        rows = epoch.state[1]
        rows.append(row)
        if len(rows) >= KEPT_BATCHES:
            self._add_up(epoch)
        if epoch.sum is not None:
            epoch.sum.state = epoch.sum.state[0].adding([row]), []

    def _add_up(self, epoch: Counts) -> None:
        sums, rows = epoch.state
        epoch.state = sums.adding(rows), []  # in one step: another thread may look
        self._ring = [*self._ring, *rows][-KEPT_BATCHES:]

    def _name_slow(self, task: Task, read: Result) -> tuple[SlowSample, ...]:
        indices = list(chain.from_iterable(map(plain_indices, task.shards)))
        slow = () if read.times is None else read.times.slow
        return tuple([SlowSample(indices[place], seconds, task.epoch, read.worker) for place, seconds in slow])

    def _last_rows(self) -> list[tuple[Any, ...]]:
        """Those of the last batches that were handed out."""
        rows = [*self._ring, *chain.from_iterable(counts.state[1][:] for _, counts in tuple(self._last))]
        return sorted(rows, key=itemgetter(_TAKEN))[-KEPT_BATCHES:]

    def rows(self) -> list[BatchTimes]:
        """The last 1,000 batches that were handed out, of all epochs, the oldest first."""
        return looked_at(self._last_rows())

    def look(self, batch: Any, epoch: Counts, shards: Sequence[Any]) -> None:
        """Note what the first batch looks like, and of each batch of a mixture where its samples came from: 20 us."""
        if self.looks is None:
            try:
                self.looks = describe(batch)
            except Exception:  # a batch of the user's own class may not want to be looked at
                self.looks = type(batch).__name__
        if self.mixture is not None:
            came = sum(map(self.mixture.sources_of, shards))
            for counts in filter(None, (epoch, epoch.sum)):
                counts.sources = came if counts.sources is None else counts.sources + came

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
        """What has been counted so far: retried requests of this process for the dataset, the notices, the caches."""
        noted = (self.notices.counts[name] for name in PoolTotals._fields[1:-3])
        return PoolTotals._make((retries_of(self._dataset), *noted, *counts_of(self._dataset)))

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """The counts of all epochs, or of one; all zeros if it has delivered no batch yet."""
        rows = self._last_rows()
        if epoch is not None:
            counts, rows = self.epochs.get(epoch), [row for row in rows if row[_EPOCH] == epoch]
            return LoaderStats() if counts is None else counts.report(self.totals(), rows)
        total, last = Counts(), tuple(self._last)
        for one in (self._sum, *(counts for _, counts in last)):
            total.merge(one)
        total.setup = last[-1][1].setup
        return total.report(self.totals(), rows)


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
