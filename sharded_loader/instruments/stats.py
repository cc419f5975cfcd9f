"""Where the time of a training loop goes: waiting for data, or in the loop.

    the iterator -> Meter.step -> sums in the Counts of its epoch; and `BatchTimes` of a batch that is not cheap
    Counts.report() -> LoaderStats of an epoch -> sum_of -> as_dict() -> TensorBoard, W&B, tqdm

Only time inside epochs counts, from the first ``next`` to the last batch. Iterators write under the pipeline's lock.
Readers, even in a signal handler, take no lock: a `LoaderStats` is immutable, and a list of batches only grows.
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
    """Numbers summed over batches; see `LoaderStats`."""

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
    """Numbers counted by the pool and the dataset; see `LoaderStats`."""

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
    """Statistics of a loader, over all epochs or one; returned by `ShardedDataLoader.stats`.

    Attributes:
        batches, samples: batches delivered, and samples in them.
        seconds: time spent in epochs, by the loop and by the loader.
        waiting_seconds: part of ``seconds`` spent inside ``next``, waiting for data.
        reading_seconds: time spent reading and batching, summed over all workers.
        placing_seconds: part of ``waiting_seconds`` spent on conversion and on copies to the devices.
        retries: retried requests to a server, in this process and in workers (`ShardDataset`).
        replaced_workers: workers replaced because they died or stalled for longer than ``timeout``.
        recycled_workers: workers replaced because they exceeded ``max_worker_memory``.
        skipped_samples: samples that ``on_error`` skipped or replaced.
        slow_batches: batches too large for shared memory (``max_bytes``), which took a slower way.
        device_seconds: part of ``seconds`` spent inside ``next``, waiting for a device that is some batches behind. A
            faster loader would not reduce it.
        device_waiting_seconds: time in which devices were idle because their batch was missing, summed over and
            measured by the devices. A batch counts once they have reached it; the first batch of a loader does not.
        discarded_samples: samples of incomplete batches left out at the end of an epoch, or of a part of iterable data
            (``last_batch="discard"``), and counted then. Those of your own batch sampler do not count.
        cache_hits, cache_misses, cache_bytes: samples found in the dataset's caches (``dataset.cache(...)``), samples
            read instead, and bytes held (for one epoch: added). Counted when read or prefetched, for all loaders
            together.
        sources: for a mixture (`interleave`) read by index, or a transform of one, samples of this rank by dataset,
            skipped and replaced ones included; otherwise empty.
        causes: seconds of waiting by cause; they add up to ``waiting_seconds``. ``"compute"``: workers compute.
            ``"input"``: they wait for a disk or a network. ``"main_process"``: workers have no task, or the main
            process works. ``"placing"``: conversion and copies. ``"start"``: workers start, or an epoch begins.
        slowest: the 20 samples slowest to read, slowest first: index, seconds, epoch, worker. Timed if the dataset
            reads samples one by one and a sample takes 20 us or more on average.

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
    _share: float = field(default=1.0, repr=False, compare=False)  # recent share of the workers' time spent computing

    @cached_property
    def stages(self) -> Mapping[str, StageTimes]:
        """Time batches spent in each stage, over the last 10 epochs: the sum of seconds, quantiles, and the longest.

        The stages are ``"queued"`` (waits for a worker), ``"read"``, ``"collate"``, ``"write"`` (into shared memory),
        ``"behind"`` (finished before an earlier batch), ``"ready"`` (waits for your program) and ``"placing"``.
        """
        return self._timed.stages()

    @cached_property
    def workers(self) -> Mapping[int, WorkerTimes]:
        """Times of each worker, by its number; -1 is the main process. Kept as long as `stages`."""
        return self._timed.workers()

    @property
    def verdict(self) -> str:
        """The bottleneck, in one sentence. Empty if unknown.

        Example:
            >>> LoaderStats(batches=10, seconds=2.0, waiting_seconds=0.01).verdict
            'The training loop is the limit: it waits for data for 0% of the time.'
        """
        return times.verdict(self)

    @property
    def advice(self) -> str:
        """Advice on the `verdict`, in one sentence. Empty if unknown."""
        return times.ADVICE.get(times.limit_of(self), "")

    @property
    def shares(self) -> tuple[float, ...]:
        """Share of each dataset of a mixture in this rank's samples; see ``sources``.

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
        """Share of the epochs' time spent waiting for data, from 0 to 1."""
        return self.waiting_seconds / self.seconds if self.seconds else 0.0

    def as_dict(self, *names: str, prefix: str = "") -> dict[str, float]:
        """Return the numbers by name, as floats, for TensorBoard, Weights & Biases, a progress bar or a log file.

        Args:
            *names: Attributes and properties of this class. Default: all.
            prefix: Text to put before each name.

        Returns:
            A new dict with stable names: the numeric attributes, ``samples_per_second``, ``waiting_share``, causes
            (``cause_compute``), stages (``stage_read_p99``), ``slowest_seconds`` and workers
            (``worker_0_idle_seconds``).

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
        """Return causes, stages, samples and workers, by the names of `as_dict`."""
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
"""Numeric attributes of `LoaderStats`. Files and tables of users depend on their order."""


def quiet_counts(stats: LoaderStats) -> list[str]:
    """Describe what went wrong without an error.

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
"""Numbers that each batch adds to. Read in this order by another thread, a part never exceeds its whole."""

NOTED_SECONDS = 1e-3
"""Minimum reading time of a recorded batch, unless measured or waited for long. A record takes 8 us, a tenth of what
the main process spends on a batch of `images`."""

KEPT_BATCHES = 1000
"""Batches whose times are kept. Those of an epoch are added up 1,000 at a time, in a third of the time."""

_numbers_of = attrgetter(*NUMBERS)


def sum_of(parts: Sequence[LoaderStats]) -> LoaderStats:
    """Add up statistics."""
    columns = zip(*map(_numbers_of, parts), strict=True)
    numbers: dict[str, Any] = dict(zip(NUMBERS, map(sum, columns), strict=True))
    slow = chain.from_iterable(part.slowest for part in parts)
    return LoaderStats(
        **numbers,
        sources=tuple(map(sum, zip_longest(*(part.sources for part in parts), fillvalue=0))),
        causes={name: sum(part.causes[name] for part in parts) for name in CAUSES},
        slowest=tuple(nlargest(KEPT_SAMPLES, slow, attrgetter("seconds"))),
        _timed=sum((part._timed for part in parts if part._timed.num_workers), Histograms()),
        _share=parts[-1]._share,
    )


def with_rows(stats: LoaderStats, rows: Sequence[BatchTimes]) -> LoaderStats:
    """Add the causes, stages and slow samples of more batches."""
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
    """Counts of one iterator in its epoch, as in `LoaderStats`; `began`, `ended`: `Meter.totals` at its start and end.

    `state`: causes, stages and slow samples, without ``placing`` and the main process's own work; batches to be added.
    `for_workers`: seconds that ``next`` waited for workers, over unrecorded batches.
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
        self._reported: tuple[Any, LoaderStats] = None, LoaderStats()  # the last report, with the facts behind it

    def add_up(self) -> None:
        self.state = with_rows(*self.state), []  # one atomic assignment: another thread may read it

    def report(self, totals: Totals = Totals()) -> LoaderStats:
        """Return the counts so far. ``totals``: from `Meter.totals`."""
        (stats, rows), after = self.state, self.ended or totals
        counts: dict[str, Any] = {name: getattr(self, name) for name in COUNTED}
        facts = *counts.values(), self.for_workers, id(self.sources), stats, len(rows), after
        if facts == self._reported[0]:  # of 1,000 epochs, all but one have ended
            return self._reported[1]
        stats = with_rows(stats, rows[:])
        for name in TOTALS:
            counts[name] = counts.get(name, 0) + getattr(after, name) - getattr(self.began, name)
        causes = {**stats.causes, "placing": counts["placing_seconds"]}
        causes["compute"] += stats._share * self.for_workers
        causes["input"] += (1 - stats._share) * self.for_workers
        causes["main_process"] += max(0.0, counts["waiting_seconds"] - sum(causes.values()))
        sources = () if self.sources is None else tuple(self.sources.tolist())
        self._reported = facts, dataclasses.replace(stats, **counts, causes=causes, sources=sources)
        return self._reported[1]


class Meter(Observer):
    """Counts of one loader, updated under the pipeline's lock. From `tune_at` on, ``tune`` is called after a step.

    A batch is counted once, in its epoch, and totals are summed on request: half the cost of counting it twice.
    """

    tune: Callable[[Meter, Pipeline, float], None]
    tune_at = math.inf

    times = True
    KEPT_EPOCHS = 1000
    KEPT_TIMES = 10
    """Epochs whose histograms are kept: 20 KB per worker each."""

    def __init__(self, dataset: Any = None, max_skipped: int | None = None) -> None:
        super().__init__(dataset, max_skipped)
        self.mixture = mixture_of(dataset)
        self._last = deque([Counts()])  # of the last iterators
        self._sum, self._late = LoaderStats(), Counts()  # of earlier iterators; `_late`: what they still add
        self._late.ended = Totals()
        self._rows: deque[BatchTimes] = deque(maxlen=KEPT_BATCHES)

    @cached_property
    def _cores(self) -> int:  # 0.3 ms, which loaders without workers need not spend
        return cores_for_workers()

    def counts(self) -> Counts:
        return Counts(self.totals())

    def begin(self, epoch: int, counts: Counts) -> None:
        self._last[-1].ended = counts.began
        self._last[-1].add_up()
        counts.number = epoch
        self._last.append(counts)
        if len(self._last) > self.KEPT_TIMES:
            old = self._last[-self.KEPT_TIMES - 1]
            old.add_up()
            stats = old.state[0]
            self._sum = sum_of([self._sum, LoaderStats(slowest=stats.slowest, _timed=stats._timed)])
            old.state = dataclasses.replace(stats, _timed=Histograms(), slowest=()), []
            old._reported = None, LoaderStats()  # it had the histograms
        if len(self._last) > self.KEPT_EPOCHS:
            old = self._last.popleft()
            self._sum = sum_of([self._sum, old.report()])
            old.__dict__ = self._late.__dict__  # its iterator may still be alive and add to it

    def step(self, counts: Counts, entry: Entry, stamps: Stamps, pipeline: Pipeline) -> None:
        """Count a batch, and record its times unless it was cheap."""
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
        if row is None and not (starts or result.seconds >= NOTED_SECONDS or waited >= NOTED_SECONDS):
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
        if self.mixture is not None and error is None and entry.task is not None:  # 20 us
            came = np.sum([self.mixture.sources_of(shard) for shard in entry.task.shards], 0)
            counts.sources = came if counts.sources is None else came + counts.sources
        if taken >= self.tune_at:
            self.tune(self, pipeline, taken)

    def _fill_in(self, row: BatchTimes, entry: Entry, result: Result, pipeline: Pipeline) -> None:
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
        """Return the last 1,000 batches delivered, of all epochs, oldest first."""
        rows = list(self._rows.copy())  # without the GIL, only the copy is atomic
        times.name_causes(rows)
        return rows

    def totals(self) -> Totals:
        """Return retried requests of this process, notices and cache counts so far."""
        noted = [self.notices.counts[name] for name in TOTALS[1:-3]]
        return Totals(*[retries_of(self.dataset), *noted, *held_by_caches(self.dataset)])

    def stats(self, epoch: int | None = None) -> LoaderStats:
        """Return the statistics of one epoch or all; zeros if no batch was delivered."""
        totals = self.totals()
        if epoch is not None:
            counts = next((one for one in reversed(self._last.copy()) if one.number == epoch), None)
            return LoaderStats() if counts is None else counts.report(totals)
        return sum_of([self._sum, *(counts.report(totals) for counts in (self._late, *self._last.copy()))])


def held_by_caches(dataset: object) -> tuple[int, int, int]:
    """Return hits, misses and bytes of the caches of a dataset and of those nested in it.

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
    """Return the number of requests retried in this process by a dataset and those nested in it."""
    counts = [getattr(one, "retries", 0) for one in nested(dataset) if callable(getattr(one, "follow", None))]
    return sum(count for count in counts if isinstance(count, int))
