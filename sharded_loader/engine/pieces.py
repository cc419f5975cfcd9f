"""Slow batches: several workers read pieces of one, or two read the same one. Policy as pure functions.

    limit_of(usual, busy, workers) -> seconds      may the worker of a batch answer with the samples that it has?
    cuts(begin, end, seconds, workers) -> places   where a batch is cut into pieces
    late_after(usual, samples) -> seconds          how long a worker stands still that is late
    BatchPieces                                    what has come of such batches

**Pieces**, while there are fewer batches than workers:

    task, with a limit      ->  a batch: it was cheap, or it has to be read by one worker
                            ->  its first samples  ->  pieces, for all workers  ->  samples  ->  task, with these

A task with a limit goes to one worker. If the batch takes long there, the worker answers with the samples that it has.
All workers then read a piece of the rest. At last one worker gets the samples, and puts the batch together as if it had
read them all: `Reader` has no other way to make a batch. It reads what it was not given. So a piece in which anything
goes wrong is left out: a sample raises an error, a worker dies, a sample cannot be pickled or is too large. The error
is then that of one reader. A worker keeps the whole batch if a sample has drawn from the global generators: samples
that come later would draw other numbers in another worker. Samples go through the main process as bytes. It neither
reads nor makes any. While the consumer waits for such a batch, a worker holds one task: otherwise a piece would wait
behind a batch.

**Late workers.** If a worker stands still while the consumer waits, another one reads its task too. Both answer it, and
`BatchPieces.is_first` lets the first answer through. The other one is new: it takes the place of the late one, which
ends after its sample. If that does not pay, because late ones have answered first lately, or where to start a worker
takes long, it is one that is idle. The more often others answer first, the sooner a worker counts as late.

The pipeline's lock guards a `BatchPieces`. It owns samples until they are sent on. Samples that are awaited are neither
shared out nor read twice: one worker awaits many of them already.
"""

from __future__ import annotations

import bisect
import math
import statistics
import weakref
from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from sharded_loader.batching.pack import Packed
from sharded_loader.engine.messages import PIECE, Result, Task, Times

SLOW_SECONDS = 2e-2
"""A batch that takes less is read by one worker: to share it out costs three messages, 0.3 ms each."""

FIRST_SECONDS = 1e-2
"""Nothing is known of the first batches. A worker reads one for so long before it answers with what it has."""

LATE = 4
"""A batch is late that takes this many times as long as the median."""

LATE_SECONDS, SOONEST_SECONDS = 1e-1, 2e-2
"""No worker is late before that: a core that is busy elsewhere explains it. The second one: as long as it pays."""

LOOK_SECONDS = 5e-3
"""Between two looks at where the workers are, while the consumer waits."""

PAYS = 3
"""The most that `BatchPieces.pays` becomes. If 3 late workers in a row answer first, it is 0."""

PIECE_SECONDS = 2e-3
"""Work in a piece, at least."""

MANY = 1 << 30
"""More tasks than there are."""

NOTED = 16
"""Batches whose median counts."""


def limit_of(usual: float | None, busy: int, workers: int, lead: float = 0.0) -> float | None:
    """After how many seconds the worker of a batch may answer with the samples that it has; None: it may not.

    Args:
        usual: seconds that batches took; None: none has come.
        busy: how many batches other workers have.
        workers: how many workers there are.
        lead: seconds until the consumer asks for the batch. Pieces are read only while it waits: one worker may be done
            before that.

    Example:
        >>> limit_of(None, 0, 8), limit_of(1.3, 7, 8), limit_of(1.3, 8, 8), limit_of(0.001, 0, 8)
        (0.01, 0.0, None, None)
        >>> limit_of(1.3, 0, 8, lead=1.0), limit_of(1.3, 0, 8, lead=2.0)
        (0.0, None)
    """
    if workers < 2 or busy >= workers or lead > (usual or math.inf):
        return None
    if usual is None:
        return FIRST_SECONDS
    return 0.0 if usual >= SLOW_SECONDS else None


def cuts(begin: int, end: int, seconds: float, workers: int) -> list[int]:
    """Where the rest of a batch is cut into equal pieces.

    Args:
        begin: the place of the first sample that has not been read.
        end: how many samples the batch has.
        seconds: what a sample took.
        workers: how many workers there are.

    Returns:
        The places at which pieces begin, and the end.

    Example:
        >>> cuts(1, 64, 0.02, 8)
        [1, 8, 16, 24, 32, 40, 48, 56, 64]
        >>> cuts(4, 16, 0.0005, 8)
        [4, 8, 12, 16]
    """
    count = max(1, min(workers, end - begin, math.ceil((end - begin) * seconds / PIECE_SECONDS)))
    return [begin + (end - begin) * number // count for number in range(count + 1)]


def late_after(usual: float, samples: int, *, pays: bool) -> float:
    """For how many seconds a worker stands still that is late.

    Args:
        usual: seconds that batches took.
        samples: how many its batch has, if the worker is at a single sample; otherwise 0.
        pays: see `BatchPieces`.

    Returns:
        4 times as long as a batch or a sample takes. Unless it pays, as long as a batch at least: samples differ.

    Example:
        >>> [late_after(0.1, samples, pays=False) for samples in (0, 64, 1)], late_after(0.1, 16, pays=True)
        ([0.4, 0.1, 0.4], 0.025)
    """
    return max(SOONEST_SECONDS if pays else LATE_SECONDS, usual * max(LATE / (samples or 1), 0.0 if pays else 1.0))


@dataclass
class SharedOut:
    """A batch that is shared out, or that may be.

    Attributes:
        task: the batch.
        left: places of the pieces that have not come yet, by their numbers.
        given: places, and the samples that have come.
        out: how many of its tasks the workers have.
        began: when a worker began with it; 0: none has.
        seconds: of all workers.
        retries, times: of its pieces; see `Result`.
        is_whole: no piece was left out.
    """

    task: Task
    left: dict[int, int] = field(default_factory=dict)
    given: list[tuple[int, Any]] = field(default_factory=list)
    out: int = 0
    began: float = 0.0
    seconds: float = 0.0
    retries: int = 0
    times: list[Times] = field(default_factory=list)
    is_whole: bool = True


class BatchPieces:
    """The batches of one pool that are shared out.

    Attributes:
        recent: seconds of the last batches.
        open: batches that are shared out, or may be, by run and number, until they have come.
        twice: when another worker was given a task, by run and seq, and how many were; None: one of them has answered.
        relieved: late workers, each with the task that another one was given.
        pays: one more for each second worker that has answered first, one less for each late one; 0 to `PAYS`.
        ready: tasks that follow from what has come, the first batch first.
    """

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=NOTED)
        self.open: dict[tuple[int, int], SharedOut] = {}
        self.ready: list[Task] = []
        self.twice: dict[tuple[int, int], tuple[float, int] | None] = {}
        self.relieved: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        self.pays = 1
        self._sample_seconds = 0.0
        self._is_trusted = False  # the last batch that was shared out came whole: the next one needs no limit

    def forget(self, run: int | None = None) -> None:
        """The batches of a run, or of all runs, are dropped."""
        self.open = {} if run is None else {key: shared for key, shared in self.open.items() if key[0] != run}
        self.ready = [task for task in self.ready if (task.run, task.number) in self.open]
        self.twice = {} if run is None else {key: came for key, came in self.twice.items() if key[0] != run}

    def usual(self) -> float | None:
        """The median of the seconds that batches took; None: none has come."""
        return statistics.median(self.recent) if self.recent else None

    def new_job(self) -> None:
        """The workers read something else from now on: nothing is known of it."""
        self.forget()
        self.recent.clear()
        self._is_trusted, self.pays = False, 1

    def is_first(self, result: Result) -> bool:
        """Whether no other worker has answered this task before."""
        key = result.run, result.seq
        if key not in self.twice or (result.samples < 0 and result.seq < PIECE):  # or it is to be shared out
            return True
        asked, self.twice[key] = self.twice[key], None
        if asked is None:
            return False
        self.pays = max(0, min(PAYS, self.pays + (1 if result.began >= asked[0] else -1)))
        return True

    def given_to_another(self, key: tuple[int, int], late: Any, now: float) -> None:
        """Another worker was given the task of a late one."""
        asked = self.twice.get(key)
        self.twice[key], self.relieved[late] = (now, 1 if asked is None else asked[1] + 1), key

    def may_be_given(self, key: tuple[int, int], late: Any) -> bool:
        """Whether another worker may be given the task of a late one: once; as long as that pays, three times."""
        asked = self.twice.get(key, (0.0, 0))
        return self.relieved.get(late) != key and asked is not None and asked[1] < max(1, self.pays)

    def room(self, busy: int, workers: int) -> int:
        """How many tasks the workers may be given now.

        Args:
            busy: how many batches they have.
            workers: how many there are.
        """
        if self.recent and not self.open:
            return MANY
        return workers - busy + len(self.open) - sum(shared.out for shared in self.open.values())

    def shared(self, task: Task, busy: int, workers: int, lead: float, *, by_any: bool) -> list[Task]:
        """The tasks that a batch is given to the workers as; none: they are `ready`.

        Args:
            task: the batch.
            busy: how many batches the workers have.
            workers: how many there are.
            lead: see `limit_of`.
            by_any: a batch may go to any worker, whatever its lane is.
        """
        is_free = task.part is None and (task.lane is None or by_any) and type(task.shards[0]) is not Packed
        limit = limit_of(self.usual(), busy, workers, lead)
        if limit is None or task.seq < 0 or not is_free or sum(map(len, task.shards)) < 2:
            return [task]
        shared = self.open[task.run, task.seq] = SharedOut(task)
        if self._is_trusted and limit == 0:
            self._cut(shared, 0, workers)
            return []
        shared.out = 1
        return [task._replace(limit=limit)]

    def take(self, waits: bool) -> Task | None:
        """The first of the tasks that are ready. It is given to a worker now.

        None: a worker has just begun with a batch before it, whose pieces come first, as the consumer waits for them.
        """
        key = self.ready[0].run, self.ready[0].number
        if waits and any(shared.out and not shared.began for other, shared in self.open.items() if other < key):
            return None
        self.open[key].out += 1
        return self.ready.pop(0)

    def came(self, result: Result, workers: int) -> Result | None:
        """Take what has come from the pool, while there are open batches.

        Returns:
            The result of a batch; None: it was only a piece.
        """
        number = result.seq % PIECE if result.seq >= PIECE else result.seq
        shared = self.open.get((result.run, number))
        if result.seq < PIECE and result.samples >= 0:
            self.recent.append(result.seconds if shared is None else shared.seconds + result.seconds)
            if shared is not None:
                result = self._done(shared, result)
            return result
        if shared is None:  # the batch was dropped or given up
            return None
        shared.out -= 1
        if result.seq >= PIECE and result.seq not in shared.left:  # two workers have read it
            return None
        shared.began = shared.began or result.began
        shared.seconds += result.seconds
        shared.retries += result.retries
        count, begin = -result.samples, shared.left.pop(result.seq, 0)
        if result.times is not None:
            slow = [(begin + place, seconds) for place, seconds in result.times.slow]
            shared.times.append(result.times._replace(slow=tuple(slow)))
        if count > 0:
            shared.given.append((begin, result.batch))
            self._sample_seconds = result.seconds / count
        else:
            shared.is_whole = False
        if result.seq < PIECE:
            self.recent.append(self._sample_seconds * sum(map(len, shared.task.shards)))
            self._cut(shared, count, workers)
        elif not shared.left:
            # Careful, where a piece is lacking: a worker may have died over it.
            whole = shared.task._replace(shards=tuple(map(_listed, shared.task.shards)), given=tuple(shared.given))
            self._is_next(whole._replace(careful=not shared.is_whole))
        return None

    def _is_next(self, task: Task) -> None:
        """A task is ready. The first batch comes first, and in front of its pieces."""
        bisect.insort(self.ready, task, key=lambda one: (one.run, one.number, one.seq))

    def _cut(self, shared: SharedOut, begin: int, workers: int) -> None:
        """Make the pieces of the rest of a batch."""
        indices = [index for shard in shared.task.shards for index in _listed(shard)]
        places = cuts(begin, len(indices), self._sample_seconds, workers)
        for number, (start, end) in enumerate(pairwise(places), 1):
            seq = shared.task.seq + number * PIECE
            piece = shared.task._replace(seq=seq, shards=(indices[start:end],), sharded=False, lane=None)
            shared.left[seq] = start
            self._is_next(piece)

    def _done(self, shared: SharedOut, result: Result) -> Result:
        del self.open[result.run, result.seq]
        self.ready = [task for task in self.ready if (task.run, task.number) in self.open]  # not needed any more
        if not shared.began:
            return result
        self._is_trusted = shared.is_whole and result.error is None
        if shared.left:  # it was given up, or a second worker has read all of it
            return result
        seconds = result.began + result.seconds - shared.began
        times = _joined([*shared.times, result.times or Times()], min(1.0, seconds / (shared.seconds + result.seconds)))
        retries = shared.retries + result.retries
        return result._replace(began=shared.began, seconds=seconds, times=times, retries=retries)


def _joined(times: list[Times], share: float) -> Times:
    """What was measured of a batch, from that of its pieces.

    Args:
        times: of the pieces; the last one made the batch.
        share: how long the batch took, of the seconds of all its workers.
    """
    known = [one for one in times if one.processor >= 0]
    return Times(
        times[0].idle,
        share * sum(one.processor for one in known) if known else -1.0,
        share * sum(one.queued for one in known),
        times[-1].collate,
        times[-1].write,
        max(one.longest for one in times),
        sum(one.retries for one in times),
        is_first=any(one.is_first for one in times),
        slow=tuple(one for some in times for one in some.slow),
    )


def _listed(indices: Any) -> Any:
    return indices.tolist() if isinstance(indices, np.ndarray) else indices
