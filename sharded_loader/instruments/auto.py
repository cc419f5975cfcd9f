"""``num_workers="auto"``: finds the number of workers while a program trains, and how many batches are prefetched.

    Meter.stats(), now and a while ago -> observe -> Observed      what one setting has given
    choose(what was seen, cores, most) -> Setting                  the whole policy, a pure function
    Tuner.look                          at the end of a step: observes, chooses, and tells the pipeline

The policy tries settings and keeps the cheapest of those that are about as fast as the fastest. While the program waits
for workers, it tries up to twice as many: as many as wait for input, and as cores can run. While the program waits for
single samples and other batches are finished, it tries a larger prefetch with them. If that gains nothing, it tries
fewer. If half of the workers have nothing to do, it keeps those that are at work.

What comes does not depend on any of it: the order of the batches is a function of seed and epoch. A `Tuner` owns what
it has seen, and no worker: the pool starts and ends those, in the next step. What can go wrong: times are disturbed,
and a setting looks worse than it is. It is tried again when that is forgotten, after `KEPT` other looks.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

from sharded_loader.extend import Pipeline
from sharded_loader.extend.engine import PER_WORKER
from sharded_loader.extend.tools import SMALL, cores_for_workers, free_bytes, logger, ranks_here, ranks_on_cores
from sharded_loader.instruments.stats import LoaderStats, Meter

START = 2
"""Workers at the start, on every machine: iterable data has this many parts, so its batches are the same everywhere."""

MOST = 32
"""Workers, on machines with fewer cores. Those that wait for input take no core, but memory and connections."""

DEEPEST, AHEAD = 16, 128
"""Batches in flight for each worker, and for all together if that is more than `PER_WORKER` for each."""

ENOUGH = 0.03
"""If the program waits for workers for a smaller share of the time, more of them gain nothing."""

MUCH, TWICE = 0.25, 2
"""If it waits for such a share, a setting that gained nothing is tried twice: times are disturbed."""

WORTH = 0.04
"""More workers, or more batches in flight, must make the rate larger by this share."""

SPARE = 1.25
"""How many times the workers that are at work are kept: batches take turns to be slow."""

WINDOW, LEAST = 1.2, 12
"""One look: seconds in epochs, and batches. If batches take long, four times the seconds will do."""

STARTING = 0.2
"""Seconds between two looks while workers start: what they do then does not count."""

PATIENCE = 4.0
"""Seconds after which a worker that has given no batch is not waited for: it may have nothing to do."""

PAUSE, PAUSES = 1.0, 10
"""Seconds between two looks, and how many times the mean of a step: the program did something else, such as an
evaluation."""

KEPT = 20
"""Looks that count."""


class Setting(NamedTuple):
    """What is chosen. The smaller one of two is the cheaper one.

    Attributes:
        workers: how many.
        depth: batches in flight for each worker; 0: the user has set ``prefetch``.
    """

    workers: int = START
    depth: int = PER_WORKER


class Observed(NamedTuple):
    """One look. Shares are of the time in epochs, without the start of workers.

    Attributes:
        setting: with which workers read.
        rate: samples per second.
        waits: share in which the program waited for data.
        hungry: of this, for what workers do. The rest is the main process's own work.
        late: of this, in which finished batches waited for one before them, for each worker.
        reading: how many workers were in a batch, on average.
        running: of these, how many ran or waited for a core. The others waited for input.
    """

    setting: Setting
    rate: float
    waits: float = 0.0
    hungry: float = 0.0
    late: float = 0.0
    reading: float = 0.0
    running: float = 0.0


def choose(seen: Sequence[Observed], cores: int, most: int) -> Setting:
    """The setting to read with from now on.

    Args:
        seen: what was observed, the newest last. Of one setting the median of the last three rates counts.
        cores: how many this process and its workers may use.
        most: how many workers there may be: there is memory for them.

    Example:
        Workers that compute, and the program waits: there is a core for a third one. A fourth one has none.

        >>> two = Observed(Setting(2), rate=100.0, waits=0.9, hungry=0.9, reading=2.0, running=2.0)
        >>> choose([two], cores=3, most=32).workers
        3
        >>> three = Observed(Setting(3), rate=150.0, waits=0.9, hungry=0.9, reading=3.0, running=3.0)
        >>> choose([two, three], cores=3, most=32).workers
        3
    """
    looks = Counter(one.setting for one in seen)
    rates = {setting: median([one.rate for one in seen if one.setting == setting][-3:]) for setting in looks}
    now, highest = seen[-1], max(rates.values())
    if now.waits < ENOUGH:  # the loop sets the rate: no setting is faster, whatever another one has given before
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
    if now.hungry >= ENOUGH:
        # At most the cores run, and what waits for a core neither computes nor waits for input.
        ran = min(now.running, cores)
        share = ran / (ran + max(0.0, now.reading - now.running)) if ran else 0.0
        room = math.floor(cores * (2 - share) / share) if share else most  # for those that only compute: the cores
        count = max(1, min(2 * workers, room, most))
        deep = min(2 * depth, DEEPEST) if 2 * now.late > now.hungry else depth
        more = Setting(count, min(deep, max(PER_WORKER, AHEAD // count)))
        tries.append(more)
        if more.workers > workers and more in rates and best == min(rates):
            tries.append(Setting(max(1, workers // 2), depth))
    elif 2 * need <= workers + 1 and not any(need <= setting.workers < workers for setting in rates):
        tries.append(Setting(min(need, workers), depth))
    for setting in tries:
        often = TWICE if now.hungry >= MUCH and setting > best else 1
        if setting != best and looks[setting] < often:
            return setting
    return best


def observe(before: LoaderStats, after: LoaderStats, setting: Setting) -> Observed | None:
    """What happened between two looks; None if that is too little."""
    causes = {name: seconds - before.causes[name] for name, seconds in after.causes.items()}
    seconds = after.seconds - before.seconds - causes["start"]
    if seconds < WINDOW or (after.batches - before.batches < LEAST and seconds < 4 * WINDOW):
        return None
    hungry, waits = causes["compute"] + causes["input"], sum(causes.values()) - causes["start"]
    reading, running, behind = (now - then for now, then in zip(_at_work(after), _at_work(before), strict=True))
    amounts = after.samples - before.samples, waits, hungry, min(hungry, behind / setting.workers), reading, running
    return Observed(setting, *(amount / seconds for amount in amounts))


def _at_work(stats: LoaderStats) -> tuple[float, float, float]:
    """The seconds in which workers were in batches, in which they ran, and in which batches waited for others."""
    workers = [worker for number, worker in stats.workers.items() if number >= 0]
    behind = stats.stages["behind"].seconds if stats.stages else 0.0
    return sum(worker.seconds for worker in workers), sum(worker.processor_seconds for worker in workers), behind


class Tuner:
    """Observes one loader, and sets the number of its workers. Under the pipeline's lock.

    It does not hold the meter, which calls it: the dataset would wait for the garbage collector.

    Attributes:
        workers: how many there are to be.
    """

    workers = START

    def __init__(self, meter: Meter) -> None:
        meter.tune, meter.tune_at = self.look, 0.0
        self._setting: Setting | None = None
        self._seen: deque[Observed] = deque(maxlen=KEPT)
        self._before = LoaderStats()
        self._looked = self._since = 0.0  # the last look; the one that `_before` is of
        self._starts = math.inf  # until when workers may start; infinite: they have started
        self._memory, self._each = (0, 1 << 30), SMALL  # bytes that were free, with how many workers; bytes of one

    def look(self, meter: Meter, pipeline: Pipeline | None, now: float) -> None:
        """A step has ended, at ``now``. The next step makes the change."""
        assert pipeline is not None  # it was a step of its
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
        """How many worker processes there is memory for. Those that started last tell how much one takes."""
        free, (before, were) = free_bytes().nbytes // ranks_here(), self._memory
        if setting.workers > were:
            self._each = max(SMALL, (before - free) // (setting.workers - were))
        self._memory = free, setting.workers
        return min(max(MOST, cores), setting.workers + (free - SMALL) // self._each)
