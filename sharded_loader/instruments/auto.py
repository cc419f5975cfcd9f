"""``num_workers="auto"``: tunes the number of workers and the prefetch depth while a program trains.

    Meter.stats(), now and at the last look -> observe -> Observed      performance of one setting
    choose(observations, cores, most) -> Setting                        the whole policy, a pure function
    Tuner.look                          at the end of a step: observes, chooses, and updates the pipeline

The policy keeps the cheapest setting that is about as fast as the fastest. While the program waits for workers, it
tries up to twice as many, limited by cores and by the share of time in which workers block on I/O. If single slow
samples hold up finished batches, it also tries a larger prefetch. Otherwise it tries fewer, and drops idle workers. The
order of batches never depends on this. Measurements are noisy, so a setting that looked bad is tried again once that
look is forgotten.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sharded_loader.extend import Pipeline
from sharded_loader.extend.engine import PER_WORKER
from sharded_loader.extend.tools import SMALL, cores_for_workers, free_bytes, logger, processes_here, ranks_on_cores
from sharded_loader.instruments.stats import LoaderStats, Meter

START = 2
"""Workers at the start, on every machine. Iterable data is split into this many parts, so batches are reproducible."""

MOST = 32
"""Maximum number of workers on machines with fewer cores: one that blocks on I/O takes memory, but no core."""

DEEPEST, AHEAD = 16, 128
"""Maximum batches in flight per worker, and in total if that exceeds `PER_WORKER` for each."""

ENOUGH = 0.03
"""Share of time spent waiting for workers below which more workers gain nothing."""

MUCH, TWICE = 0.25, 2
"""Share of waiting from which an unsuccessful setting is tried twice, because measurements are noisy."""

WORTH = 0.04
"""Minimum relative gain in rate that justifies more workers or more batches in flight."""

SPARE = 1.25
"""Workers to keep, as a multiple of the busy ones: slow batches alternate."""

WINDOW, LEAST = 1.2, 12
"""Minimum length of a look: seconds inside epochs, and batches. For slow batches, four times the seconds suffice."""

STARTING = 0.2
"""Seconds between looks while workers start; that time is not measured."""

PATIENCE = 4.0
"""Seconds to wait for the first batch of a new worker, which may have nothing to do."""

PAUSE, PAUSES = 1.0, 10
"""A gap longer than these seconds, or this multiple of the mean step, is ignored (for example, an evaluation ran)."""

KEPT = 20
"""Looks that are remembered."""


class Setting(NamedTuple):
    """Number of workers, and batches in flight per worker (0: set by ``prefetch``). Sorts from cheap to expensive."""

    workers: int = START
    depth: int = PER_WORKER


class Observed(NamedTuple):
    """One look: setting, samples per second, and shares of the time inside epochs without worker start-up.

    Attributes:
        waits, starved: share spent waiting for data; part of it caused by the workers, not by the main process.
        late: part of ``starved`` in which finished batches waited for an earlier one, per worker.
        reading, running: mean number of busy workers; of those on a core or waiting for one, not blocked on I/O.
    """

    setting: Setting
    rate: float
    waits: float = 0.0
    starved: float = 0.0
    late: float = 0.0
    reading: float = 0.0
    running: float = 0.0


def choose(seen: Sequence[Observed], cores: int, most: int) -> Setting:
    """Return the setting to use from now on.

    Args:
        seen: observations, newest last. The rate of a setting is the median of its last three.
        cores: cores available to this process and its workers.
        most: maximum number of workers that fit into memory.

    Example:
        The program waits for workers that compute: there is a core for a third one, but none for a fourth.

        >>> two = Observed(Setting(2), rate=100.0, waits=0.9, starved=0.9, reading=2.0, running=2.0)
        >>> choose([two], cores=3, most=32).workers
        3
        >>> three = Observed(Setting(3), rate=150.0, waits=0.9, starved=0.9, reading=3.0, running=3.0)
        >>> choose([two, three], cores=3, most=32).workers
        3
    """
    looks = Counter(one.setting for one in seen)
    rates = {setting: median([one.rate for one in seen if one.setting == setting][-3:]) for setting in looks}
    now, highest = seen[-1], max(rates.values())
    if now.waits < ENOUGH:  # the loop is the bottleneck: no setting is faster, even if an earlier look says so
        rates = {setting: rate for setting, rate in rates.items() if setting <= now.setting}
        highest = rates[now.setting]
    best = min(setting for setting, rate in rates.items() if rate >= (1 - WORTH) * highest)
    stays = len(seen) > 1 and seen[-2].setting == now.setting  # it was chosen before, and times are disturbed
    if stays and rates[now.setting] >= (1 - 2 * WORTH) * highest and now.waits >= ENOUGH:
        best = now.setting
    workers, depth = best
    if most < now.setting.workers:
        return best._replace(workers=max(1, min(workers, most)))
    if now.setting != best:
        return best
    need, tries = max(1, math.ceil(SPARE * now.reading)), list[Setting]()
    if now.starved >= ENOUGH:
        # Processes waiting for a core neither compute nor wait for input.
        ran = min(now.running, cores)
        share = ran / (ran + max(0.0, now.reading - now.running)) if ran else 0.0
        room = math.floor(cores * (2 - share) / share) if share else most  # for those that only compute: the cores
        count = max(1, min(2 * workers, room, most))
        deep = min(2 * depth, DEEPEST) if 2 * now.late > now.starved else depth
        more = Setting(count, min(deep, max(PER_WORKER, AHEAD // count)))
        tries.append(more)
        if more.workers > workers and more in rates and best == min(rates):
            tries.append(Setting(max(1, workers // 2), depth))
    elif 2 * need <= workers + 1 and not any(need <= setting.workers < workers for setting in rates):
        tries.append(Setting(min(need, workers), depth))
    for setting in tries:
        often = TWICE if now.starved >= MUCH and setting > best else 1
        if setting != best and looks[setting] < often:
            return setting
    return best


def observe(before: LoaderStats, after: LoaderStats, setting: Setting) -> Observed | None:
    """Compare two snapshots of the statistics; None if too little happened in between."""
    causes = {name: seconds - before.causes[name] for name, seconds in after.causes.items()}
    seconds = after.seconds - before.seconds - causes["start"]
    if seconds < WINDOW or (after.batches - before.batches < LEAST and seconds < 4 * WINDOW):
        return None
    starved, waits = causes["compute"] + causes["input"], sum(causes.values()) - causes["start"]
    reading, running, behind = (now - then for now, then in zip(_at_work(after), _at_work(before), strict=True))
    amounts = after.samples - before.samples, waits, starved, min(starved, behind / setting.workers), reading, running
    return Observed(setting, *(amount / seconds for amount in amounts))


def _at_work(stats: LoaderStats) -> tuple[float, float, float]:
    """Return the workers' busy seconds, their running seconds, and the seconds batches waited for earlier ones."""
    workers = [worker for number, worker in stats.workers.items() if number >= 0]
    behind = stats.stages["behind"].seconds if stats.stages else 0.0
    return sum(worker.seconds for worker in workers), sum(worker.processor_seconds for worker in workers), behind


class Tuner:
    """Observes one loader and sets its number of workers, under the pipeline's lock.

    It does not hold the meter, which calls it: a reference cycle would keep the dataset until garbage collection.
    """

    workers = START

    def __init__(self, meter: Meter) -> None:
        meter.tune, meter.tune_at = self.look, 0.0
        self._setting: Setting | None = None
        self._seen: deque[Observed] = deque(maxlen=KEPT)
        self._before = LoaderStats()
        self._looked = self._since = 0.0  # time of the last look; time of `_before`
        self._starts = math.inf  # deadline for workers to start; inf: started
        self._memory, self._each = (0, 1 << 30), SMALL  # bytes that were free, with how many workers; bytes of one

    def look(self, meter: Meter, pipeline: Pipeline, now: float) -> None:
        """Observe the step that ended at ``now``. A change takes effect in the next step."""
        pool, scheduler, before = pipeline.pool, pipeline.scheduler, self._before
        setting = Setting(pool.num_workers, scheduler.per_worker if scheduler.scale_by_group else 0)
        gap, self._looked, meter.tune_at = now - self._looked, now, now + STARTING
        is_settled = setting == self._setting and self._starts == math.inf
        if not pool.num_workers or (is_settled and gap <= PAUSE and now - self._since < WINDOW):
            return  # `stats` takes 1 to 3 ms
        stats, since = meter.stats(), self._since
        self._since = now
        if setting != self._setting:
            added = 0 if self._setting is None else setting.workers - self._setting.workers
            self._setting, self._before, self._starts = setting, stats, now + PATIENCE * (added > 0)
        elif self._starts < math.inf:
            idle = {(number, worker.batches) for number, worker in before.workers.items()}
            gave = [each for each in stats.workers.items() if (each[0], each[1].batches) not in idle]
            if now >= self._starts or len(gave) >= setting.workers:
                self._before, self._starts = stats, math.inf
        elif gap > max(PAUSE, PAUSES * stats.seconds / max(1, stats.batches)):
            self._before = stats
        elif (observed := observe(before, stats, setting)) is None:
            self._since = since
        else:
            self._before = stats
            self._seen.append(observed)
            cores = max(1, cores_for_workers() // ranks_on_cores())
            wanted = choose(self._seen, cores, max(MOST, cores) if pool.shares_dataset else self._most(setting, cores))
            if wanted != setting:
                logger.info('num_workers="auto": %s, so %s', observed, wanted)
                self.workers = wanted.workers
                pool.wanted, scheduler.per_worker = wanted.workers, wanted.depth or scheduler.per_worker
                scheduler.update_prefetch(pool)

    def _most(self, setting: Setting, cores: int) -> int:
        """Return the number of worker processes that fit into memory, judged by the last ones that started."""
        free, (before, were) = free_bytes().nbytes // processes_here(), self._memory
        if setting.workers > were:
            self._each = max(SMALL, (before - free) // (setting.workers - were))
        self._memory = free, setting.workers
        return min(max(MOST, cores), setting.workers + (free - SMALL) // self._each)
