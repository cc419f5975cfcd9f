"""Where the time of a training loop goes: waiting for data, or in the loop.

    the iterator -> Meter.step -> sums in the Counts of its epoch; of a batch that is not cheap its `BatchTimes`, too
    with_rows(stats, rows) -> LoaderStats     `KEPT_BATCHES` at a time, and when somebody asks
    Counts.report() -> LoaderStats of an epoch; sum_of them: what the user sees -> as_dict() -> TensorBoard, W&B, tqdm
    `times` says how long each stage of a batch took, and why ``next`` waited

Only the time inside epochs counts, from the first ``next`` to the last batch; not what happens between epochs. The
times of several iterators add up in the sum. In the counts of one epoch only the newest iterator of this epoch counts.

Iterators add one at a time, under the pipeline's lock. Readers take no lock: `stats` may be called in a signal handler.
A reader finds a `LoaderStats`, which never changes, and a list of batches, which only grows. Nothing can go wrong.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nlargest
from itertools import chain, zip_longest
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader import WorkerDiedError, WorkerTimeoutError
from sharded_loader.extend import BatchTimes, Cache, Entry, Observer, Pipeline, Result
from sharded_loader.extend.data import mixture_of, nested
from sharded_loader.extend.engine import KEPT_SAMPLES, Stamps, plain_indices
from sharded_loader.extend.tools import cores_for_workers
from sharded_loader.instruments import times
from sharded_loader.instruments.times import CAUSES, STAGES, Histograms, SlowSample, StageTimes, WorkerTimes


@dataclass(frozen=True)
class Sums:
    """What is summed over batches; see `LoaderStats`."""

    batches: int = 0
    samples: int = 0
    seconds: float = 0.0
    waiting_seconds: float = 0.0
    reading_seconds: float = 0.0
    placing_seconds: float = 0.0
    device_seconds: float = 0.0
    device_waiting_seconds: float = 0.0


@dataclass(frozen=True)
class Totals:
    """What the pool and the dataset count, not each batch; see `LoaderStats`."""

    retries: int = 0
    replaced_workers: int = 0
    skipped_samples: int = 0
    slow_batches: int = 0
    recycled_workers: int = 0
    discarded_samples: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True)
class LoaderStats(Totals, Sums):
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

    sources: tuple[int, ...] = ()
    causes: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0.0), hash=False)
    slowest: tuple[SlowSample, ...] = ()
    _timed: Histograms = field(default_factory=Histograms, repr=False, compare=False)
    _share: float = field(default=1.0, repr=False, compare=False)  # of the workers' time in which they computed, lately

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
        return times.verdict(self)

    @property
    def advice(self) -> str:
        """What to do about the `verdict`, in one sentence. Empty if that is not known."""
        return times.ADVICE.get(times.limit_of(self), "")

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
        scalars = *NUMBERS, "samples_per_second", "waiting_share"
        known: dict[str, float] = {name: getattr(self, name) for name in scalars}
        if not names or not set(names).issubset(known):
            known |= self._measured()
        if unknown := [name for name in names if name not in known]:
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


SUMS, TOTALS = (tuple(one.name for one in dataclasses.fields(kind)) for kind in (Sums, Totals))
NUMBERS = *SUMS[:6], *TOTALS[:4], *SUMS[6:], *TOTALS[4:]
"""The attributes of `LoaderStats` that are numbers. Files and tables of users depend on their order."""


def quiet_counts(stats: LoaderStats) -> list[str]:
    """What has gone wrong without an error, in words.

    Example:
        >>> quiet_counts(LoaderStats(replaced_workers=1, skipped_samples=20))
        ['1 worker replaced', '20 samples skipped or replaced']
    """
    words = (
        (stats.replaced_workers, "worker", "workers", "replaced"),
        (stats.skipped_samples, "sample", "samples", "skipped or replaced"),
        (stats.slow_batches, "batch", "batches", "too large for shared memory"),
    )
    return [f"{count} {one if count == 1 else many} {fate}" for count, one, many, fate in words if count]


COUNTED = "retries", *reversed(SUMS)
"""The numbers that each batch adds to. Read in this order in another thread, a part never exceeds its whole."""

NOTED_SECONDS = 2e-4
"""Of a batch that is read faster, only sums are kept, unless it was measured (`messages.BatchTimes`) or waited for for
long. To note it takes 2 us: 5 % of a batch of `tiny`."""

KEPT_BATCHES = 1000
"""The last batches whose times are kept. Those of an epoch are added up 1,000 at a time, in a third of the time."""

_numbers_of = attrgetter(*NUMBERS)


def sum_of(parts: Sequence[LoaderStats]) -> LoaderStats:
    """All parts together."""
    columns = zip(*map(_numbers_of, parts), strict=True)
    numbers: dict[str, Any] = dict(zip(NUMBERS, map(sum, columns), strict=True))
    return LoaderStats(
        **numbers,
        sources=tuple(map(sum, zip_longest(*(part.sources for part in parts), fillvalue=0))),
        causes={name: sum(part.causes[name] for part in parts) for name in CAUSES},
        slowest=tuple(
            nlargest(KEPT_SAMPLES, chain.from_iterable(part.slowest for part in parts), attrgetter("seconds"))
        ),
        _timed=sum((part._timed for part in parts if part._timed.num_workers), Histograms()),
        _share=parts[-1]._share,
    )


def with_rows(stats: LoaderStats, rows: Sequence[BatchTimes]) -> LoaderStats:
    """With the causes, stages and slow samples of some more batches."""
    if not rows:
        return stats
    share, causes, slowest = times.compute_share(rows, stats._share), dict.fromkeys(CAUSES, 0.0), list[SlowSample]()
    for row in rows:
        indices = list(chain.from_iterable(map(plain_indices, row.shards)))
        slowest += [SlowSample(indices[at], took, row.epoch, row.worker) for at, took in row.slow if indices]
        for cause, seconds in times.causes_of(row, share):
            causes[cause] += seconds
    timed = Histograms().adding(rows)
    return sum_of([stats, LoaderStats(causes=causes, slowest=tuple(slowest), _timed=timed, _share=share)])


class Counts:
    """What one iterator has delivered in its epoch.

    Attributes:
        number: of the epoch.
        state: causes, stages and slow samples, without ``placing`` and the main process's own work; and the batches
            that were noted, and have not been added to them yet.
        for_workers: seconds in which ``next`` waited for workers, of the batches that were not noted.
        batches, samples, seconds, waiting_seconds, reading_seconds, placing_seconds, device_seconds, retries: of all
            batches, as in `LoaderStats`.
        device_waiting_seconds, sources: as in `LoaderStats`.
        began: `Meter.totals` when the epoch began. ended: those when the next one began.
    """

    number = -1
    ended: Totals | None = None
    sources: npt.NDArray[np.int64] | None = None
    batches = samples = retries = 0
    seconds = waiting_seconds = reading_seconds = placing_seconds = device_seconds = 0.0
    for_workers = device_waiting_seconds = 0.0

    def __init__(self, began: Totals = Totals()) -> None:
        self.began = began
        self.state: tuple[LoaderStats, list[BatchTimes]] = LoaderStats(), []

    def add_up(self) -> None:
        """Add up the batches that were noted."""
        self.state = with_rows(*self.state), []  # in one step: another thread may look

    def report(self, totals: Totals = Totals()) -> LoaderStats:
        """The counts so far. ``totals``: as `Meter.totals` returns them."""
        (stats, rows), after = self.state, self.ended or totals
        stats = with_rows(stats, rows[:])
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTED}
        for name in TOTALS:
            counts[name] = counts.get(name, 0) + getattr(after, name) - getattr(self.began, name)
        causes = {**stats.causes, "placing": counts["placing_seconds"]}
        causes["compute"] += stats._share * self.for_workers
        causes["input"] += (1 - stats._share) * self.for_workers
        causes["main_process"] += max(0.0, counts["waiting_seconds"] - sum(causes.values()))
        sources = () if self.sources is None else tuple(self.sources.tolist())
        return dataclasses.replace(stats, **counts, causes=causes, sources=sources)


class Meter(Observer):
    """The counts of one loader. Iterators add to them, one at a time: they hold the pipeline's lock.

    A batch is counted once, for its epoch: that takes half the time of counting it for the loader too. The sum over all
    epochs is made when it is asked for.

    Args:
        dataset: what is read. It may count the requests that this process tries again; see `retries_of`.
        max_skipped: as of `Observer`.

    Attributes:
        epochs: the counts of the last epochs, by their numbers.
        mixture: the mixture whose samples are read, or None.
        tune: called at the end of a step from `tune_at` on, a stamp of `host_clock.now`, with this object, the
            pipeline and the stamp.
    """

    tune: Callable[[Meter, Pipeline | None, float], None]
    tune_at = math.inf

    times = True
    KEPT_EPOCHS = 1000
    KEPT_TIMES = 10
    """Epochs whose histograms are kept: they take 20 KB for each worker."""

    def __init__(self, dataset: Any = None, max_skipped: int | None = None) -> None:
        super().__init__(dataset, max_skipped)
        self.mixture = mixture_of(dataset)
        self.epochs: dict[int, Counts] = {}
        self._last = deque([Counts()])  # of the last iterators
        self._sum, self._late = LoaderStats(), Counts()  # of those before them, and what these still add
        self._late.ended = Totals()
        self._rows: deque[BatchTimes] = deque(maxlen=KEPT_BATCHES)
        self._cores = cores_for_workers()

    def counts(self) -> Counts:
        return Counts(self.totals())

    def begin(self, epoch: int, counts: Counts) -> None:
        self._last[-1].ended = counts.began
        self._last[-1].add_up()
        counts.number = epoch
        self.epochs[epoch] = counts
        self._last.append(counts)
        if len(self._last) > self.KEPT_TIMES:
            old = self._last[-self.KEPT_TIMES - 1]
            old.add_up()
            stats = old.state[0]
            self._sum = sum_of([self._sum, LoaderStats(slowest=stats.slowest, _timed=stats._timed)])
            old.state = dataclasses.replace(stats, _timed=Histograms(), slowest=()), []
        if len(self._last) > self.KEPT_EPOCHS:
            old = self._last.popleft()
            self._sum = sum_of([self._sum, old.report()])
            if self.epochs.get(old.number) is old:
                del self.epochs[old.number]
            old.__dict__ = self._late.__dict__  # its iterator may still be there, and add to it

    def step(self, counts: Counts, entry: Entry, stamps: Stamps, pipeline: Pipeline) -> None:
        """Count it. Unless it was cheap, keep how it was on its way."""
        (turn, asked, taken, behind, starts), result, waited = stamps, entry.result, 0.0
        assert result is not None  # it is handed out
        error, row = result.error, result.times
        if entry.waited is not None:
            waited = entry.waited[1] - entry.waited[0]
        counts.seconds += taken - turn  # first: see `COUNTED`
        counts.waiting_seconds += taken - asked - behind
        counts.device_seconds += behind
        if error is None:
            counts.batches += 1
            counts.samples += result.samples
        counts.reading_seconds += result.seconds
        counts.placing_seconds += entry.placing - behind
        counts.retries += result.retries
        if row is None and not (starts or result.seconds >= NOTED_SECONDS or waited >= 5 * NOTED_SECONDS):
            counts.for_workers += waited if result.worker >= 0 else result.seconds
        else:
            row = row or BatchTimes()
            row.__dict__.update(turn=turn, asked=asked, taken=taken, placing=entry.placing, behind=behind)
            row.starts, row.epoch = starts, counts.number
            self._fill_in(row, entry, result, pipeline)
            self._rows.append(row)
            counts.state[1].append(row)
            if len(counts.state[1]) >= KEPT_BATCHES:
                counts.add_up()
        if self.mixture is not None and error is None and entry.task is not None:
            self.add_sources(counts, entry.task.shards)
        if taken >= self.tune_at:
            self.tune(self, pipeline, taken)

    def _fill_in(self, row: BatchTimes, entry: Entry, result: Result, pipeline: Pipeline) -> None:
        """What is known of a batch beside the stamps of ``next``."""
        error, pool, runs = result.error, pipeline.pool, pipeline.runs
        row.__dict__.update(sent=entry.sent, worker=result.worker, began=result.began, seconds=result.seconds)
        row.step, row.samples = entry.seq, result.samples if error is None else -1
        row.is_lost = result.rebuilt or isinstance(error, (WorkerDiedError, WorkerTimeoutError))
        if row.slow and entry.task is not None:
            row.shards = entry.task.shards
        if entry.waited is not None:
            row.wait_began, row.wait_ended = entry.waited
            row.threads = pool.num_workers if pool.shares_dataset else 1
            row.per_core = pool.num_workers / self._cores
            in_flight = waiting = 0
            for run in runs.values():
                in_flight, waiting = in_flight + len(run.window), waiting + len(run.waiting)
            own = runs.get(result.run)
            lacks = in_flight < pool.num_workers and own is not None and not (own.exhausted or own.epoch.takes_turns)
            row.lacks_tasks = lacks or (waiting > 0 and in_flight - waiting < pool.num_workers)

    def rows(self) -> list[BatchTimes]:
        """The last 1,000 batches that were handed out, of all epochs, the oldest first."""
        rows = list(self._rows)
        times.name_causes(rows)
        return rows

    def add_sources(self, counts: Counts, shards: Sequence[object]) -> None:
        """Count where the samples of a batch of a mixture came from: 20 us."""
        assert self.mixture is not None  # it was asked before
        came = np.sum([self.mixture.sources_of(shard) for shard in shards], 0)
        counts.sources = came if counts.sources is None else came + counts.sources

    def totals(self) -> Totals:
        """What has been counted so far: retried requests of this process for the dataset, the notices, the caches."""
        noted = [self.notices.counts[name] for name in TOTALS[1:-3]]
        return Totals(*[retries_of(self.dataset), *noted, *held_by_caches(self.dataset)])

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """The counts of all epochs, or of one; all zeros if it has delivered no batch yet."""
        totals = self.totals()
        if epoch is not None:
            counts = self.epochs.get(epoch)
            return LoaderStats() if counts is None else counts.report(totals)
        return sum_of([self._sum, *(counts.report(totals) for counts in (self._late, *self._last))])


def held_by_caches(dataset: object) -> tuple[int, int, int]:
    """The hits and misses of the caches of a dataset, and of those inside it, and the bytes that they hold.

    Example:
        >>> from sharded_loader import SimpleDataset
        >>> cached = SimpleDataset([1, 2]).cache("1 MB")
        >>> list(cached), held_by_caches(cached.take(1) + [3])
        ([1, 2], (0, 2, 16))
    """
    counts = [one.counts for one in nested(dataset) if isinstance(one, Cache)]
    hits, misses, nbytes = map(sum, zip((0, 0, 0), *counts, strict=True))
    return hits, misses, nbytes


def retries_of(dataset: object) -> int:
    """The number of requests that a dataset, and those inside it, have tried again in this process.

    Example:
        >>> retries_of([1, 2])
        0
    """
    counts = [getattr(one, "retries", 0) for one in nested(dataset) if callable(getattr(one, "follow", None))]
    return sum(count for count in counts if isinstance(count, int))
