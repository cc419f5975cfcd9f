"""Policy for dead and stalled workers: which batch is to blame, and when to give up.

    Deaths.record_batch_death(task)        True if this batch has killed too many workers
    Deaths.record_start_death(worker)      True if workers cannot start
    Deaths.record_idle_death(worker)       True if workers keep dying between batches
    Deaths.record_growth(worker, ...)      True if workers exceed their memory limit with their first batch
    Watch.stalled(workers)                 workers without progress for too long
    Death.error_over(task, ...), timed_out(...), ...
                                           errors with batch, sample, worker, and how to reproduce the problem

A batch is retried on another worker, unless it has killed ``restarts`` of them. A worker's clock runs only while the
main process looks, in small steps: time in which that is busy or stopped (Ctrl-Z) does not count.
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
"""Deaths of workers of one number between batches after which the pool gives up. A result of any worker resets it."""

LOOK_SECONDS = 1.0
"""Maximum seconds between two checks for stalled workers during `next`."""

GROWN_LIMIT = 3
"""Workers of one number that exceed their memory limit with the first batch, after which it is not a leak."""

PROVEN = 10
"""Factor on the number of workers that may be killed during start, once any worker has started."""

START_SECONDS = 600.0
"""Minimum timeout in seconds for the start of a worker, which may import for minutes from a remote disk."""


class Deaths:
    """Counts worker deaths caused by batches, and during start.

    A worker that ends by itself during start (exit code, segmentation fault) would do so again: the pool gives up after
    ``restarts`` such deaths, whichever workers they hit. A worker killed during start (out of memory, another program)
    may be unlucky: ``restarts`` deaths have to hit the same worker number, or `PROVEN` times as many once a worker was
    ready. ``restarts=0`` is treated as 1.

    Attributes:
        crash_suspects: (run, seq) of tasks that may have ended a worker, until done. `RayPool` sends them alone.
        unresolved: True after any death, until a result arrives and no crash suspects are left.

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
        self.crash_suspects: set[tuple[int, int]] = set()
        self.unresolved = False

    def record_batch_death(self, task: Task) -> bool:
        """Record a death over a task. Return True if the task has killed too many workers."""
        key = task.run, task.seq
        self._by_batch[key] += 1
        self.crash_suspects.add(key)
        self.unresolved = True
        return self._by_batch[key] >= self._limit

    def suspect(self, keys: Iterable[tuple[int, int]]) -> None:
        """Record a death over one of several tasks."""
        self.crash_suspects.update(keys)
        self.unresolved = True

    def resolve(self, run: int, seq: int) -> None:
        """Record that a task is done or abandoned; needed only while deaths are `unresolved`."""
        self._idle_by_worker.clear()
        self._by_batch.pop((run, seq), None)
        self.crash_suspects.discard((run, seq))
        self.unresolved = bool(self.crash_suspects)

    def record_idle_death(self, worker: int) -> bool:
        """Record a death between batches. Return True if workers of this number died there too often."""
        self._idle_by_worker[worker] += 1
        self.unresolved = True
        return self._idle_by_worker[worker] >= IDLE_DEATHS

    def record_growth(self, worker: int, batches: int) -> bool:
        """Record a worker above its memory limit. Return True if first batches keep causing it."""
        self._grown_by_worker[worker] = 0 if batches > 1 else self._grown_by_worker[worker] + 1
        return self._grown_by_worker[worker] >= GROWN_LIMIT

    def record_start_death(self, death: Death) -> bool:
        """Record a death during start. Return True if no other worker is to be tried."""
        killed = not death.hung and (death.exitcode is None or death.exitcode in _FROM_OUTSIDE)
        who = death.worker if killed else -1  # deaths without outside cause count together
        self._start_by_worker[who] += 1
        limit = self._limit * (PROVEN if killed and self._proven else 1)
        return death.is_final or self._start_by_worker[who] >= limit

    def begin_starts(self, *, proven: bool) -> None:
        """Reset the start counters: a worker has started (``proven``), or the job has changed."""
        self._start_by_worker.clear()
        self._proven = proven


_FROM_OUTSIDE = {-int(number) for name in ("SIGHUP", "SIGTERM", "SIGKILL") if (number := getattr(signal, name, None))}
"""Exit codes of workers killed by another program. An unknown exit code is treated as one."""


class Watch:
    """Detects stalled workers, also between batches: a stopped worker never begins the task it was sent.

    ``timeout`` is in seconds without progress; None disables it. ``step`` is the number of seconds until the next
    check.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.step = LOOK_SECONDS if timeout is None else min(LOOK_SECONDS, timeout / 8)
        self._checked_at = 0.0
        self._seen: dict[object, tuple[tuple[int, ...], float]] = {}

    def stalled(self, workers: Iterable[tuple[K, Sequence[int]]]) -> list[K]:
        """Return the workers without progress for ``timeout`` seconds.

        ``workers`` are those with work to do, each with its heartbeat (empty during start). Others start again at 0.
        """
        if self.timeout is None:
            return []
        now = host_clock.now()
        # Count no more than this between two checks: the main process may have been busy or stopped.
        passed, self._checked_at = min(now - self._checked_at, 2 * self.step), now
        before, self._seen = self._seen, {}
        stalled = []
        for who, words in workers:
            at = tuple(words[: SAMPLE + 1])
            was_at, seconds = before.get(who, (None, 0.0))
            seconds = seconds + passed if at == was_at else 0.0
            self._seen[who] = at, seconds
            if seconds >= (self.timeout if at else max(self.timeout, START_SECONDS)):
                stalled.append(who)
        return stalled


class Death(NamedTuple):
    """Information about a worker that has ended.

    Attributes:
        oom_kills: `ProcessTransport.oom_kills` at that time.
        host, cause: address of its machine and explanation, if another program runs the workers.
        hung: it was killed because it stalled.
        heartbeat: its last progress; None if unknown.
        is_of_machine: the machine is gone, so no batch is to blame.
        is_final: the worker could not be created, nor could another one.
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
        return f"worker {self.worker} (pid {self.pid}{self.host and f' on {self.host}'})"

    def __str__(self) -> str:
        return f"{self.who} died: {self.cause or describe_exit(self.exitcode, self.oom_kills)}"

    def _error(self, text: str, **where: object) -> WorkerDiedError:
        return WorkerDiedError(text, worker=self.worker, exitcode=self.exitcode, pid=self.pid, **where)

    def error_over(self, task: Task, tries: int, timeout: float | None) -> Exception:
        """Return the error for a batch that has killed ``tries`` workers, this one last; ``timeout`` in seconds."""
        heartbeat = self.heartbeat or ()
        if self.hung and timeout is not None:
            return timed_out(self.who, timeout, task, heartbeat, tries, killed=True)
        return _stopped_too_many(self._error, self.who, str(self), task, heartbeat, tries, "", ", which it may end too")

    def error_in_start(self) -> WorkerDiedError:
        fate, how = (f"{self.who} hung for minutes and was killed", "hung") if self.hung else (str(self), "died")
        more = f"it raised {self.cause.splitlines()[-1]}" if self.cause else "its own output on stderr may say more"
        error = self._error(
            f"{fate}. It had not begun to read: it {how} while it started, unpickled the dataset or ran "
            f"worker_init_fn, and so did those before it; {more}"
        )
        error.__cause__ = WorkerTraceback(self.cause) if self.cause else None
        return error

    def error_between_batches(self) -> WorkerDiedError:
        return self._error(
            f"{self}. It was between batches, as were many before it, and no batch has come from any: something else "
            f"in the worker ends it (a thread of the dataset, a limit)"
        )


def too_large(worker: int, nbytes: int, limit: int) -> MemoryError:
    return MemoryError(
        f"worker {worker} takes {nbytes:,} bytes with its first batch, and max_worker_memory allows {limit:,}. So did "
        f"the {GROWN_LIMIT - 1} workers before it, and another one would not help: give a larger max_worker_memory"
    )


def timed_out(who: str, timeout: float, task: Task, words: Sequence[int], tries: int, *, killed: bool) -> Exception:
    """Return the error for a batch over which ``tries`` workers stalled for ``timeout`` seconds.

    ``words`` is the last worker's heartbeat. ``killed``: it could be stopped, unlike a thread.
    """
    what = f"{who} made no progress for {timeout:g} s"
    fate = "It was killed; its stack is on stderr" if killed else "A thread cannot be stopped; another has its place"
    return _stopped_too_many(WorkerTimeoutError, who, what, task, words, tries, f". {fate}", ", which may hang too")


def _stopped_too_many(
    make: Callable[..., E], who: str, what: str, task: Task, words: Sequence[int], tries: int, fate: str, but: str
) -> E:
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
