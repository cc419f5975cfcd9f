"""What the death or the silence of a worker means: which batch is to blame, and when to give it up. Policy only.

    Deaths.record_batch_death(task)   -> whether this batch has killed too many workers
    Deaths.record_start_death(worker) -> whether workers cannot start
    Deaths.record_idle_death(worker)  -> whether workers die between batches again and again
    Deaths.record_growth(worker, ...) -> whether a worker needs more memory than it may take
    Watch.late(workers)               -> those that have stood still for too long
    Death.error_over(task, ...), timed_out(...), ...
                                      -> the errors, with batch, sample, worker, and how to see it again

A batch is built again by another worker, unless it has killed ``restarts`` of them. The clock of a silent worker runs
only while the main process looks, in small steps. So a worker is not late because the main process was busy elsewhere,
or because the program was stopped (Ctrl-Z).
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, TypeVar

from sharded_loader.base import host_clock
from sharded_loader.base.errors import Location, WorkerDiedError, WorkerTimeoutError, WorkerTraceback, describe_exit
from sharded_loader.engine.heartbeat import SAMPLE, SHARD, UNUSED, phase, sample_in
from sharded_loader.engine.messages import Task

E = TypeVar("E", bound=BaseException)
K = TypeVar("K")

IDLE_DEATHS = 10
"""Deaths of workers of one number, between batches, that are too many if no batch has come from any worker since."""

LOOK_SECONDS = 1.0
"""Between two looks at the workers while `next` waits for them, at most."""

GROWN = 3
"""Workers of one number that take too much memory with their first batch: then it is no leak."""

PROVEN = 10
"""How many times more often a worker may be killed in its start, if another one has been seen to start."""

START_SECONDS = 600.0
"""Seconds that a worker gets to start, at least: it may import for minutes from a disk far away. One that hangs is
known by its silence alone."""


class Deaths:
    """Counts the workers that batches, and starting, have killed.

    A worker that ends by itself in its start (an exit code, a segmentation fault) will do so again: ``restarts`` of
    them, of whatever numbers, are too many. One that is killed there (out of memory, by another program) may be
    unlucky: of these, ``restarts`` of the same number are too many, or `PROVEN` times as many if any worker has been
    ready.

    Args:
        restarts: the number of deaths that is too many; 0 counts as 1.

    Attributes:
        suspects: run and seq of the tasks that travel alone: a worker has died over them, or over others of its group.
        unsettled: a worker has died, and since then not every batch that it may have died of is done.

    Example:
        >>> deaths = Deaths(2)
        >>> deaths.record_start_death(Death(0, 71, 1)), deaths.record_start_death(Death(1, 72, 1))
        (False, True)
    """

    def __init__(self, restarts: int) -> None:
        self._limit = max(1, restarts)
        self._by_batch: Counter[tuple[int, int]] = Counter()
        self._idle_by_worker: Counter[int] = Counter()
        self._start_by_worker: Counter[int] = Counter()
        self._grown_by_worker: Counter[int] = Counter()
        self._proven = False
        self.suspects: set[tuple[int, int]] = set()
        self.unsettled = False

    def record_batch_death(self, task: Task) -> bool:
        """A worker died over the task. True if it has killed too many: it is given up."""
        key = task.run, task.seq
        self._by_batch[key] += 1
        self.suspects.add(key)
        self.unsettled = True
        return self._by_batch[key] >= self._limit

    def suspect(self, keys: Iterable[tuple[int, int]]) -> None:
        """A worker died over one of these tasks, and it is not known over which."""
        self.suspects.update(keys)
        self.unsettled = True

    def settle(self, run: int, seq: int) -> None:
        """The task is done, or has been given up. Only needed while there is something `unsettled`."""
        self._idle_by_worker.clear()
        self._by_batch.pop((run, seq), None)
        self.suspects.discard((run, seq))
        self.unsettled = bool(self.suspects)

    def record_idle_death(self, worker: int) -> bool:
        """A worker died between batches. True if workers of this number did so too often."""
        self._idle_by_worker[worker] += 1
        self.unsettled = True
        return self._idle_by_worker[worker] >= IDLE_DEATHS

    def record_growth(self, worker: int, batches: int) -> bool:
        """A worker takes too much memory. True if those of this number do so with their first batch, or before it."""
        self._grown_by_worker[worker] = 0 if batches > 1 else self._grown_by_worker[worker] + 1
        return self._grown_by_worker[worker] >= GROWN

    def record_start_death(self, death: Death) -> bool:
        """A worker died before it could read. True if no other one is tried."""
        killed = not death.hung and (death.exitcode is None or death.exitcode in _FROM_OUTSIDE)
        who = death.worker if killed else -1  # all that end by themselves count together
        self._start_by_worker[who] += 1
        limit = self._limit * (PROVEN if killed and self._proven else 1)
        return death.is_final or self._start_by_worker[who] >= limit

    def begin_starts(self, *, proven: bool) -> None:
        """Count from 0: a worker has started, so others can (``proven``), or what they get is another from now on."""
        self._start_by_worker.clear()
        self._proven = proven


_FROM_OUTSIDE = {-int(number) for name in ("SIGHUP", "SIGTERM", "SIGKILL") if (number := getattr(signal, name, None))}
"""Exit codes of workers that another program has killed. One that is not known is taken for such."""


class Watch:
    """Looks for workers that stand still.

    Also between batches: a worker that was stopped there never begins the one that it has been sent.

    Args:
        timeout: seconds without progress; None: workers are never late.

    Attributes:
        step: seconds until the next look.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.step = LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, timeout / 8)
        self._looked = 0.0
        self._seen: dict[object, tuple[tuple[int, ...], float]] = {}

    def late(self, workers: Iterable[tuple[K, Sequence[int]]]) -> list[K]:
        """Those of the workers that have stood still for ``timeout`` seconds.

        Args:
            workers: those that have something to do, each with its heartbeat, which is empty while it
                starts. The clock of a worker that is left out starts again from 0.
        """
        if self.timeout is None:
            return []
        now = host_clock.now()
        # No more is counted between two looks: the main process may have been away.
        passed, self._looked = min(now - self._looked, 2 * self.step), now
        before, self._seen = self._seen, {}
        late = []
        for who, words in workers:
            at = tuple(words[: SAMPLE + 1])
            was_at, seconds = before.get(who, (None, 0.0))
            seconds = seconds + passed if at == was_at else 0.0
            self._seen[who] = at, seconds
            if seconds >= (self.timeout if at else max(self.timeout, START_SECONDS)):
                late.append(who)
        return late


class Death(NamedTuple):
    """The last words of a worker: what is known of one that has ended.

    Attributes:
        worker: its number.
        pid: of its process.
        exitcode: None if it is not known.
        oom_kills: what `ProcessTransport.oom_kills` said then.
        host, cause: where another program runs the workers: the address of its machine, and what that program says.
        hung: it was killed because it was late.
        heartbeat: where it was; None: that is not known.
        is_of_machine: its machine has gone: no batch is to blame.
        is_final: it could not be made; nor could another one.
    """

    worker: int
    pid: int
    exitcode: int | None
    oom_kills: int | None = None
    host: str = ""
    cause: str = ""
    hung: bool = False
    heartbeat: Sequence[int] | None = UNUSED
    is_of_machine: bool = False
    is_final: bool = False

    @property
    def who(self) -> str:
        """How errors name the worker."""
        return f"worker {self.worker} (pid {self.pid}{self.host and f' on {self.host}'})"

    @property
    def fate(self) -> str:
        """How it has ended, in words."""
        return f"{self.who} made no progress for too long (timeout), and was killed" if self.hung else str(self)

    def __str__(self) -> str:
        return f"{self.who} died: {self.cause or describe_exit(self.exitcode, self.oom_kills)}"

    def _error(self, text: str, **where: object) -> WorkerDiedError:
        return WorkerDiedError(text, worker=self.worker, exitcode=self.exitcode, pid=self.pid, **where)

    def error_over(self, task: Task, tries: int, timeout: float | None) -> Exception:
        """The error for a batch that has killed too many workers, of which this is the last.

        Args:
            task: the batch.
            tries: how many there were.
            timeout: seconds that they were given.
        """
        heartbeat = self.heartbeat or ()
        if self.hung and timeout is not None:
            return timed_out(self.who, timeout, task, heartbeat, tries, killed=True)
        return _stopped_too_many(self._error, self.who, str(self), task, heartbeat, tries, "", ", which it may end too")

    def error_in_start(self) -> WorkerDiedError:
        """The error for workers that cannot start."""
        fate, how = f"{self}.", "It had not begun to read: it died while it started"
        if self.hung:
            fate = f"{self.who} hung for minutes and was killed."
            how = "It had not begun to read: it hung while it started"
        more = "its own output on stderr may say more"
        if self.cause:
            more = f"it raised {self.cause.splitlines()[-1]}"
        error = self._error(
            f"{fate} {how}, unpickled the dataset or ran worker_init_fn, and so did those before it; {more}"
        )
        error.__cause__ = WorkerTraceback(self.cause) if self.cause else None
        return error

    def error_between_batches(self) -> WorkerDiedError:
        """The error for workers that die again and again although no batch is to blame."""
        return self._error(
            f"{self}. It was between batches, as were many before it, and no batch has come from any: something else "
            f"in the worker ends it (a thread of the dataset, a limit)"
        )


def too_large(worker: int, nbytes: int, limit: int) -> MemoryError:
    """The error for workers that cannot do with the memory that they may take."""
    return MemoryError(
        f"worker {worker} takes {nbytes:,} bytes with its first batch, and max_worker_memory allows {limit:,}. So did "
        f"the {GROWN - 1} workers before it, and another one would not help: give a larger max_worker_memory"
    )


def timed_out(who: str, timeout: float, task: Task, words: Sequence[int], tries: int, *, killed: bool) -> Exception:
    """The error for a batch over which workers have stood still.

    Args:
        who: the worker.
        timeout: seconds that it was given.
        task: the batch.
        words: the worker's heartbeat.
        tries: how many workers stood still.
        killed: whether it could be stopped; a thread cannot.
    """
    what = f"{who} made no progress for {timeout:g} s"
    fate = "It was killed; its stack is on stderr" if killed else "A thread cannot be stopped; another has its place"
    return _stopped_too_many(WorkerTimeoutError, who, what, task, words, tries, f". {fate}", ", which may hang too")


def _stopped_too_many(
    make: Callable[..., E], who: str, what: str, task: Task, words: Sequence[int], tries: int, fate: str, but: str
) -> E:
    """The error for a batch that has stopped too many workers: what happened, where, and how to see it again."""
    sample = sample_in(task, words)
    doing = f"reading sample {sample[0]!r}" if sample else phase(words)
    again = "" if tries <= 1 else f", which has now stopped {tries} workers"
    text = f"{what}. It was {doing}, in epoch {task.epoch}, batch {task.seq}{again}{fate}"
    index = sample[0] if sample else None
    error = make(f"{text}; iteration goes on with the next batch", batch=task.seq, epoch=task.epoch, index=index)
    shard = words[SHARD] if task.sharded else None
    indices = task.shards[min(words[SHARD], len(task.shards) - 1)]
    Location(task.epoch, task.seq, shard, who).note(error, sample or None, samples=indices, but=but)
    return error
