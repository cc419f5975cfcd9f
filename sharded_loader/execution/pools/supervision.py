"""What the death or the silence of a worker means: which batch is to blame, and when to give it up. Policy only.

    Deaths.count(task)     -> this batch has killed enough workers
    Watch.observe(workers) -> those that have stood still for too long
    died, timed_out        -> the errors, with batch, sample, worker, and how to see it again

A batch is made again by another worker, unless it has killed ``restarts`` of them. The clock of a silent worker runs
only while the trainer looks, in small steps: neither a trainer that was busy elsewhere nor a program that was
stopped (Ctrl-Z) makes a worker late.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from sharded_loader.errors import Place, WorkerDiedError, WorkerTimeoutError, describe_exit
from sharded_loader.execution.board import SAMPLE, SHARD, phase, sample_in
from sharded_loader.execution.messages import Task


class Deaths:
    """Counts the workers that batches, and starting, have killed.

    Args:
        restarts: so many deaths are too many; 0 counts as 1.

    Example:
        >>> deaths = Deaths(2)
        >>> deaths.in_start(), deaths.in_start()
        (False, True)
    """

    def __init__(self, restarts: int) -> None:
        self._limit = max(1, restarts)
        self._of_batch: Counter[tuple[int, int]] = Counter()
        self._in_start = 0
        self._of_nothing = 0

    def of_batch(self, task: Task) -> bool:
        """A worker died over the task; whether it is given up."""
        key = task.run, task.seq
        self._of_batch[key] += 1
        return self._of_batch[key] >= self._limit

    def settle(self, run: int, seq: int) -> None:
        """The task is done, or has been given up."""
        self._of_nothing = 0
        if self._of_batch:
            self._of_batch.pop((run, seq), None)

    def of_nothing(self) -> bool:
        """A worker died between batches; whether so many have, with no batch from any, that it is no use."""
        self._of_nothing += 1
        return self._of_nothing >= 10 * self._limit

    def in_start(self) -> bool:
        """A worker died before it could read; whether it is no use to try again."""
        self._in_start += 1
        return self._in_start >= self._limit

    def ready(self) -> None:
        """A worker has started."""
        self._in_start = 0


class Silent:
    """How long one worker that has something to do has stood still, as far as anybody has looked.

    Also between batches: a worker that was stopped there never begins the one that it has been sent.
    """

    __slots__ = ("_at", "_words", "seconds")

    def __init__(self) -> None:
        self._words: Any = None
        self._at = 0.0
        self.seconds = 0.0

    def observe(self, words: Sequence[int], now: float, step: float) -> float:
        """Look at where the worker is; how many seconds it has been there.

        Args:
            words: its board.
            now: the time, in seconds.
            step: no more than this is counted between two looks.
        """
        place = tuple(words[: SAMPLE + 1])
        if place != self._words:
            self._words, self.seconds = place, 0.0
        else:
            self.seconds += min(now - self._at, step)
        self._at = now
        return self.seconds


class Watch:
    """Looks for workers that stand still.

    Args:
        timeout: seconds without progress; None: nobody looks.

    Attributes:
        step: seconds until the next look; None: never.
    """

    def __init__(self, timeout: float | None) -> None:
        self.timeout = timeout
        self.step = None if timeout is None else min(1.0, timeout / 8)

    def late(self, workers: Iterable[tuple[Any, Silent, Sequence[int]]]) -> list[Any]:
        """Those of the workers that have stood still for ``timeout`` seconds."""
        if self.timeout is None or self.step is None:
            return []
        now = time.monotonic()
        return [who for who, silent, words in workers if silent.observe(words, now, 2 * self.step) >= self.timeout]


def died(worker: int, pid: int, exitcode: int | None, task: Task, words: Sequence[int], deaths: int) -> WorkerDiedError:
    """The error for a batch that has killed too many workers.

    Args:
        worker, pid, exitcode: of the last one.
        task: the batch.
        words: the last one's board.
        deaths: how many there were.
    """
    sample = sample_in(task, words)
    error = WorkerDiedError(
        f"worker {worker} (pid {pid}) died: {describe_exit(exitcode)}. {_what(task, words, sample)}"
        f"{_tries(deaths)}; iteration goes on with the next batch",
        worker=worker,
        exitcode=exitcode,
        batch=task.seq,
        epoch=task.epoch,
        index=sample[0] if sample else None,
    )
    _note(error, task, words, sample, f"worker {worker} (pid {pid})", ", which it may end too")
    return error


def died_in_start(worker: int, pid: int, exitcode: int | None, deaths: int) -> WorkerDiedError:
    """The error for workers that cannot start."""
    return WorkerDiedError(
        f"worker {worker} (pid {pid}) died: {describe_exit(exitcode)}. It had not begun to read: it died while it "
        f"started, unpickled the dataset or ran worker_init_fn{'' if deaths == 1 else f', the {deaths}th in a row'}; "
        f"its own output on stderr may say more",
        worker=worker,
        exitcode=exitcode,
    )


def died_idle(worker: int, pid: int, exitcode: int | None) -> WorkerDiedError:
    """The error for workers that die again and again although no batch is to blame."""
    return WorkerDiedError(
        f"worker {worker} (pid {pid}) died: {describe_exit(exitcode)}. It was between batches, as were many before it, "
        f"and no batch has come from any: something else in the worker ends it (a thread of the dataset, a limit)",
        worker=worker,
        exitcode=exitcode,
    )


def timed_out(
    who: str, timeout: float, task: Task, words: Sequence[int], tries: int, *, killed: bool
) -> WorkerTimeoutError:
    """The error for a batch over which workers have stood still.

    Args:
        who: the worker.
        timeout: seconds that it was given.
        task: the batch.
        words: the worker's board.
        tries: how many workers stood still.
        killed: whether it could be stopped; a thread cannot.
    """
    sample = sample_in(task, words)
    fate = "It was killed; its stack is on stderr" if killed else "A thread cannot be stopped; another has its place"
    error = WorkerTimeoutError(
        f"{who} made no progress for {timeout:g} s. {_what(task, words, sample)}{_tries(tries)}. {fate}; "
        f"iteration goes on with the next batch",
        batch=task.seq,
        epoch=task.epoch,
        index=sample[0] if sample else None,
    )
    _note(error, task, words, sample, who, ", which may hang too")
    return error


def _what(task: Task, words: Sequence[int], sample: list[Any]) -> str:
    doing = f"reading sample {sample[0]!r}" if sample else phase(words)
    return f"It was {doing}, in epoch {task.epoch}, batch {task.seq}"


def _tries(count: int) -> str:
    return "" if count <= 1 else f", which has now stopped {count} workers"


def _note(error: BaseException, task: Task, words: Sequence[int], sample: list[Any], who: str, but: str) -> None:
    shard = words[SHARD] if task.sharded else None
    indices = task.shards[min(words[SHARD], len(task.shards) - 1)]
    Place(task.epoch, task.seq, shard, who).note(error, sample or None, samples=indices, but=but)
