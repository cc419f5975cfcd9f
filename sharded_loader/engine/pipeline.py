"""Keep batches in flight and hand them out in order, on the consumer's own thread.

One `Pipeline.next` of a run:

    Scheduler.tasks       plan batches of the epoch until enough are in flight, in the run's window
    Pool.submit           give their tasks to the pool, as many as it has room for
    Pool.wait             block until results arrive, in any order; ReorderBuffer.store puts them into their entries
    deliver               once the first entry of the window has its result, make the user's batch of it
    Scheduler.tasks       plan and submit the next tasks, then return the batch

All of it runs inside `next`, under one lock that iterators in several threads share: no background thread competes for
the GIL. If a worker dies, the pool replaces it and reads its tasks again: the pipeline just waits longer, and gets an
error as the result of a task that has killed several workers. If no worker can run (`PoolBroken`), every run ends with
the pool's error, and a new epoch starts the pool again.

Everything in flight is a cache. The only truth is the number of batches delivered (`Run.delivered`). If an exception
from outside, such as Ctrl-C, interrupts a step, `fail` leaves the step open. The next step then rolls back: it discards
all that is in flight, restarts the pool, and plans from that number. While the pool only waits (`Pool.waiting`), an
interruption costs nothing.

A run owns its entries, and an entry owns its batch until it is handed out. The pool owns the workers.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from sharded_loader.base import errors, host_clock
from sharded_loader.base.interrupts import note_handlers
from sharded_loader.base.notices import Notices
from sharded_loader.engine.messages import NOTHING, Job, Nothing, Result, Task
from sharded_loader.engine.order import Epoch
from sharded_loader.engine.pool import Pool, PoolBroken
from sharded_loader.engine.split import Split

CLOSING_SECONDS = 1.0
"""Timeout of `close` for a thread inside ``next``, which may be in the user's code."""

SLACK = 2
"""Factor on the cheap batches in flight, so that workers do not wait while the consumer works through a group.
Measured (medians of 20 to 24 turns, of the rate with 1): `images` 1.05 to 1.13, `columns` 1.05, `tiny` 1.08, `tokens`
1.05; 3 gains nothing more. Where workers take turns, one that is ahead waits for the others: `images` 1.11.
"""

PATIENCE = 30.0
"""Seconds of waiting after which ``next`` reports on stderr which worker it waits for."""

PER_WORKER = 2
"""Default number of batches in flight per worker."""

_FAR = 1 << 40  # added to the distance of prefetched runs; more than any epoch has batches


@dataclass(slots=True, eq=False)
class Entry:
    """A batch in flight. Owns the batch until it is handed out.

    Attributes:
        result: from the pool. Once the batch is handed out, with the error in its place, if any.
        begun: copies of its shards to their devices, under way.
        sent: stamp (`host_clock.now`) of submission to the pool; 0: not submitted, or nothing is timed.
        waited: stamps of the start and end of the wait of ``next``; None: it did not wait.
        placing: seconds of conversion and placement on devices.
    """

    seq: int
    task: Task | None
    result: Result | None = None
    begun: Any = None
    batch: Any = None
    sent: float = 0.0
    waited: tuple[float, float] | None = None
    placing: float = 0.0


@dataclass(eq=False)
class Run:
    """One iterator's pass over one epoch.

    Attributes:
        number: identifies the run in tasks and results.
        rollback_point: the loader's position before it chose the run.
        delivered: batches that the user has received, including errors in a batch's place. The only truth: all fields
            below can be discarded and built again from it.
        planned: index of the first batch that is not in the window yet.
        window, waiting: batches in flight, in order; those that were not submitted yet.
        dead: the pool's error that ended the run. Once raised, only its text: an exception would keep frames alive.
        ended, exhausted: the user has seen the end; all batches have been planned.
        is_ahead, next: the epoch before it is still being consumed; the prefetched run behind this one.
        awaited: entries without results, by the seq of their tasks.
        waits_since: stamp since which this ``next`` has waited for workers; 0: it has not.
    """

    number: int
    epoch: Epoch
    rollback_point: Any = None
    window: deque[Entry] = field(default_factory=deque)
    waiting: deque[Entry] = field(default_factory=deque)
    dead: str | Exception | None = None
    ended: bool = False
    exhausted: bool = False
    is_ahead: bool = False
    next: Run | None = None
    awaited: dict[int, Entry] = field(default_factory=dict)
    waits_since: float = 0.0

    def __post_init__(self) -> None:
        self.epoch.run, self.delivered, self.planned = self.number, self.epoch.first, self.epoch.first

    def move_finished_to_front(self) -> None:
        """Move the first finished batch to the front of the window. Those it overtakes keep their order."""
        window = self.window
        finished = next((entry for entry in window if entry.result is not None), None)
        if finished is not None and finished is not window[0]:
            first_seq = window[0].seq
            self.epoch.move(finished.seq, first_seq)
            window.remove(finished)
            window.appendleft(finished)
            for seq, entry in enumerate(window, first_seq):
                entry.seq = seq

    def empty_if_abandoned(self, entry: Entry) -> bool:
        """Make the batch empty if its part was abandoned before it; returns True then."""
        part = None if entry.task is None else entry.task.part
        is_abandoned = part is not None and part.batch > self.epoch.abandoned.get(part.number, part.batch)
        if is_abandoned:
            entry.result = self.epoch.record_result(entry.seq, Result(self.number, entry.seq, NOTHING))
        return is_abandoned

    def distance(self) -> float:
        """Number of batches to deliver before the first one not submitted. Prefetched runs come last."""
        if not self.waiting:
            return math.inf
        return self.waiting[0].seq - self.delivered + (_FAR if self.is_ahead else 0)

    def rollback(self) -> None:
        """Discard what is in flight. It is planned again from `delivered`."""
        self.exhausted = False
        for copy in [copy for entry in list(self.window) for copy in entry.begun or ()]:
            copy.drop()
        self.window.clear()
        self.waiting.clear()
        self.awaited.clear()
        self.planned = self.delivered


class ReorderBuffer(dict[int, Run]):
    """The open runs, by their numbers. Sorts results, which arrive in any order, into their windows."""

    def store(self, results: Sequence[Result]) -> None:
        """Put results into their entries. Ignores those of a run that is gone, and second results of a batch."""
        for result in results:
            run = self.get(result.run)
            if run is not None and (entry := run.awaited.pop(result.seq, None)) is not None:
                is_of_part = entry.task is not None and entry.task.part is not None
                entry.result = run.epoch.record_result(entry.seq, result) if is_of_part else result

    def fail(self, error: Exception) -> None:
        """End all runs with the error of a broken pool."""
        self.rollback()
        for run in self.values():
            run.dead = error
        self.clear()

    def rollback(self) -> None:
        for run in self.values():
            run.rollback()


class Scheduler:
    """Decides which batches to plan next, and when to submit them. Calls no pool, and changes only windows.

    Attributes:
        prefetch: batches of a run kept in flight; 0 for a pool without workers. May be set at any time.
        per_worker: factor by which `prefetch` follows the number of workers; 0: fixed.
        scale_by_group: `prefetch` counts groups of batches (`Pool.group`).
        one_by_one: plan one batch for each one delivered, so that draws of the epoch do not depend on timing.
    """

    def __init__(self, split: Split, runs: ReorderBuffer) -> None:
        self.split, self._runs = split, runs
        self.prefetch = self.per_worker = 0
        self.scale_by_group = self.one_by_one = self.is_timed = False

    def update_prefetch(self, pool: Pool) -> None:
        if self.per_worker:
            self.prefetch = self.per_worker * pool.num_workers

    def tasks(self, run: Run, pool: Pool, least: int = 0, before: int = 0) -> list[Task]:
        """Fill a run's window, and return the tasks to submit now, most urgent first.

        Batches are planned by the group (for each worker, if they take turns); a small window is filled one by one. The
        window holds at least ``least`` batches. ``before`` batches of the run before this one count against `prefetch`.
        """
        window, group, workers = run.window, pool.group, pool.num_workers
        if workers:
            scale = group * (SLACK if group > 1 else 1) if self.scale_by_group and not self.one_by_one else 1
            unit, share = (group * workers, 2) if run.epoch.takes_turns and group > 1 else (group, 4)
            depth = max(least, self.prefetch * scale)
            missing = depth - before - len(window)
            if not (self.one_by_one or missing >= min(unit, depth // share) or missing == depth):
                missing = 0
        else:
            missing = least - len(window)
        for seq in range(run.planned, run.planned + missing):
            planned = run.epoch.task(seq)
            if planned is None:
                run.exhausted = True
                break
            if self.split.num_shards is not None and isinstance(planned, Task):
                try:
                    planned = self.split.sharded(planned)
                except Exception as raised:
                    planned = planned.error(raised, "while the batch was split into shards")
            if isinstance(planned, Task):
                entry = Entry(seq, planned)
                run.waiting.append(entry)
                run.awaited[seq] = entry
            else:
                error = None if isinstance(planned, Nothing) else planned
                # The error's frames refer to the calling iterator, which could not be freed while the window holds
                # them. Only the batch that this step waits for (``least``) leaves the window at once.
                if error is not None and (window or run.is_ahead or not least):
                    errors.leave_frames(error)
                entry = Entry(seq, None, Result(run.number, seq, NOTHING, error=error))
                del error
            window.append(entry)
            run.planned = seq + 1
            del planned, entry  # breaks a cycle, as in `Pipeline.next`
        tasks: list[Task] = []
        now = host_clock.now() if self.is_timed and workers else 0.0
        while len(tasks) < pool.room:
            if len(self._runs) > 1:
                run = min(self._runs.values(), key=Run.distance)
            if not run.waiting:
                break
            entry = run.waiting.popleft()
            if entry.task is not None and not (run.epoch.abandoned and run.empty_if_abandoned(entry)):
                tasks.append(entry.task)
                entry.sent = now
        return tasks


class Pipeline:
    """The windows of all live iterators of one loader, over one pool.

    Attributes:
        dropped: numbers of runs whose iterators are gone.
        lock: held during `next`, and until `fail` after an interruption. Reentrant for signal handlers.
        min_ready: poll the pool only while fewer finished batches than this wait.
        is_open_step: a step is under way on this thread's stack, or was interrupted.
        closed, is_shut: `close` was called; the pool was given back.
        pid: of the process that owns the workers. A forked child has none.
    """

    def __init__(self, pool: Pool, split: Split) -> None:
        self.pool, self.split = pool, split
        self.runs = ReorderBuffer()
        self.dropped: deque[int] = deque()
        self.scheduler = Scheduler(split, self.runs)
        self.min_ready = 2
        self.lock = threading.RLock()
        self.is_open_step = self.closed = self.is_shut = False
        self._job: Job | None = None
        self.pid = os.getpid()

    # -- steps ----------------------------------------------------------------------------------------------

    def _begin_step(self, is_nested: bool) -> bool:
        """Begin a step: roll back an interrupted one, drop dead runs, and finish deferred work of the pool.

        Returns True inside another step that only waits: in a signal handler, or a dataset that iterates over the
        loader. A RuntimeError says that the other step is in the middle of its work.
        """
        is_inner = self.is_open_step and self.pool.waiting
        if self.is_open_step and not is_inner:
            if is_nested:
                text = "next() was called inside next() of the same loader, by a signal handler or a sampler, while"
                raise RuntimeError(f"{text} the loader was at work: set a flag there, and call next() in your loop")
            self._rollback()
        self.is_open_step = True
        if self.dropped:
            self._drop_runs()
        if self.pool.start_unfinished:
            self.pool.finish_start()
        return is_inner

    def fail(self) -> None:
        """Handle an exception that has left the step. Unless the pool only waited, the next step rolls back.

        If the loader was closed meanwhile, release what the step has created since: once, as others may get the pool.
        """
        was_open = self.is_open_step
        self.is_open_step, self.pool.waiting = not self.closed and not self.pool.waiting, False
        if self.closed and was_open:
            self.shut()

    def resize(self, pool: Pool) -> None:
        """Change the number of workers, now if none runs, otherwise in the next step. Callable from any thread."""
        if pool.started or not self._call_between_steps(partial(self._apply_resize, pool)):
            pool.wake()

    def _apply_resize(self, pool: Pool) -> None:
        pool.adopt()
        self.scheduler.update_prefetch(pool)

    def _call_between_steps(self, do: Callable[[], None]) -> bool:
        """Call ``do`` unless a step is under way in any thread, or was interrupted. Returns True if called."""
        if not self.lock.acquire(blocking=False):
            return False
        try:
            if self.is_open_step or self.closed:
                return False
            self.is_open_step = True
            do()
            self.is_open_step = False
            return True
        finally:
            self.lock.release()

    def _rollback(self) -> None:
        self.runs.rollback()
        self.pool.close()
        if self._job is not None and self.runs:
            self.pool.start(self._job)

    # -- runs -----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        with self.lock:
            self._begin_step(is_nested=False)
            self._job = job
            self.pool.start(job)
            self.is_open_step = False

    def open(self, run: Run, job: Job, *, renew: bool = False, pool: Pool | None = None) -> None:
        """Add a run, inside a step, and start the pool if necessary.

        ``renew`` sends the job to running workers. ``pool`` switches to this pool, which reads again what is in flight.
        """
        note_handlers()
        if pool is not None and pool is not self.pool:
            self.runs.rollback()
            self.pool.close()
            self.pool = pool
        if renew or not self.pool.started:
            self._job = job
            self.pool.start(job)
        self.runs[run.number] = run

    def replace(self, run: Run, by: Run) -> None:
        """Read another run in place of one, whose batches in flight are dropped."""
        self.drop(run.number)
        self.runs[by.number] = by

    def drop(self, number: int) -> None:
        """Drop a run whose iterator is gone, now or in the next step. Called by the collector, so it cannot wait."""
        self.dropped.append(number)
        if os.getpid() == self.pid:
            self._call_between_steps(self._drop_runs)

    def _drop_runs(self) -> None:
        while self.dropped:
            if (run := self.runs.pop(self.dropped.popleft(), None)) is not None:
                run.rollback()
                if self.pool.started:
                    self.pool.cancel(run.number)

    # -- batches --------------------------------------------------------------------------------------------

    def next(
        self,
        run: Run,
        deliver: Callable[[Run, Entry], bool],
        is_nested: bool = False,
        first: Callable[[Run], None] | None = None,
        ahead: Callable[[Run], None] | None = None,
    ) -> Entry | Exception | None:
        """Run one step: return the run's next batch, or None after the last one. Blocks.

        Returns an error if no batch is to blame: the loader was closed meanwhile, or the pool is broken.

        Args:
            deliver: makes the user's batch of a finished entry. Returns False if it is empty: the next one is tried.
            is_nested: this thread is inside another step.
            first: called first, to `open` the run.
            ahead: called once all batches of the run are planned, to open the run of the next epoch.

        Raises:
            RuntimeError: another step of this thread is in the middle of its work.
            LoaderClosedError: the loader was closed in the middle of this step.
        """
        is_inner = False
        if self.is_open_step or self.dropped or self.pool.start_unfinished:
            is_inner = self._begin_step(is_nested)
        self.is_open_step, self.pool.waiting = True, False
        if first is not None:
            first(run)
        window, least, run.waits_since, is_empty = run.window, self.min_ready, 0.0, True
        head: Entry | Exception | None = None
        while is_empty:
            pool = self.pool
            is_ready = len(window) >= least and window[least - 1].result is not None and window[0].result is not None
            if not is_ready or run.epoch.any_order or (pool.wanted is not None and pool.wanted != pool.num_workers):
                head = self._await_head(run)
            if head is not None or not window:
                break
            head = window[0]
            if run.epoch.abandoned and head.result is not None and head.result.error is not None:
                run.empty_if_abandoned(head)  # it arrived before the error that ended its part
            is_empty = not deliver(run, head)
            window.popleft()
            if is_empty:
                head = None
            if self.pool.num_workers:
                if tasks := self.scheduler.tasks(run, self.pool):
                    self.pool.submit(tasks)
                if run.exhausted and run.next is None and ahead is not None:
                    ahead(run)
                prefetched = run.next if run.next is not None and run.next.is_ahead else None
                if prefetched and (tasks := self.scheduler.tasks(prefetched, self.pool, before=len(window))):
                    self.pool.submit(tasks)
        if self.closed:
            self.fail()
            raise errors.LoaderClosedError()
        self.is_open_step = self.pool.waiting = is_inner
        if is_inner:
            self.pool.wake()  # the outer step may wait for results that this one has received
        try:
            return head
        finally:
            del head  # breaks the cycle error -> traceback -> this frame -> error

    def _await_head(self, run: Run) -> Exception | None:
        """Receive until the window begins with a finished batch, or is empty. Returns the error that ends the run."""
        window, due = run.window, run.waits_since and run.waits_since + PATIENCE
        while True:
            pool = self.pool
            if self.closed:
                return errors.LoaderClosedError()
            if pool.wanted is not None and pool.wanted != pool.num_workers:
                self._apply_resize(pool)
            if isinstance(failure := run.dead, Exception):
                run.dead = f"{type(failure).__name__}: {failure}"
                return failure
            if run.dead is not None:
                return RuntimeError(f"this iterator has failed ({run.dead}): begin an epoch with iter(loader)")
            if tasks := self.scheduler.tasks(run, pool, 1):
                pool.submit(tasks)
            if not window:
                return None
            blocks = window[0].result is None
            if run.epoch.any_order:
                blocks = all(entry.result is None for entry in window)
            if blocks and not run.waits_since and pool.num_workers:
                run.waits_since = host_clock.now()
                due = run.waits_since + PATIENCE
            try:
                results = pool.wait(blocks)
            except PoolBroken as broken:
                self.runs.fail(broken.error)
                continue
            self.runs.store(results)
            if not results and not pool.started:
                self._rollback()  # the user closed the pool
            del results
            if not window:
                continue
            if run.epoch.any_order:
                run.move_finished_to_front()
            if window[0].result is not None:
                if run.waits_since:
                    window[0].waited = run.waits_since, host_clock.now()
                return None
            if due and (now := host_clock.now()) >= due:
                due, entry = math.inf, window[0]
                text = f"sharded_loader: next() has waited {now - run.waits_since:.0f} s for epoch {run.epoch.number}, "
                pool.tell_of_wait(f"{text}batch {entry.seq}", entry.task)

    # -- life -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop the pool. Callable from any thread, repeatedly; a thread waiting in ``next`` raises.

        If a signal handler closes the loader in a step, the step ends with a `LoaderClosedError`.
        """
        if os.getpid() != self.pid or self.is_shut:
            return  # a forked child has no workers
        self.closed = True
        self.pool.wake()
        is_locked = self.lock.acquire(timeout=CLOSING_SECONDS)
        try:
            if not self.is_shut:  # another thread may have shut it, and another loader may have the pool
                self.shut()
        finally:
            if is_locked:
                self.lock.release()

    def shut(self) -> None:
        """Give back what the pool owns. Called at the end of a step in which the loader was closed, too."""
        self.runs.clear()
        self.pool.close()
        self.is_shut = True

    def check_open(self) -> None:
        """Raise if the loader cannot be used. Takes no lock: in a forked child no thread would release it."""
        if os.getpid() != self.pid:
            text = f"this loader was made in process {self.pid}, and this is its forked child {os.getpid()}"
            raise RuntimeError(f"{text}, which has no workers: make a loader in the child")
        if self.closed:
            raise errors.LoaderClosedError()


# -- the observer of all batches ---------------------------------------------------------------------------------------

Stamps = tuple[float, float, float, float, bool]
"""The ``turn``, ``asked``, ``taken``, ``behind`` and ``starts`` of a batch: see `BatchTimes`."""


class Observer:
    """Receives each batch that is handed out, and records skipped samples and silent problems of one loader.

    Iterators call it one at a time, under the pipeline's lock. It measures nothing; the observer that does is looked up
    by name (`sharded_loader.instruments`), and a loader reads just as well without it.

    Args:
        max_skipped: maximum number of samples of an epoch that ``on_error`` may skip or replace; None: no limit.

    Attributes:
        times: call `step`, with stamps. Otherwise nothing is timed.
        notices: counts of the loader and its pool.
        skipped: ``(index, error)`` of the last samples that ``on_error`` skipped or replaced.
    """

    KEPT = 1000
    times = False

    def __init__(self, dataset: Any = None, max_skipped: int | None = None) -> None:
        self.dataset, self.max_skipped, self.notices = dataset, max_skipped, Notices()
        self.skipped: list[tuple[Any, BaseException]] = []

    def counts(self) -> Any:
        """Return an object for the counts of one iterator. Called with the iterator's first batch."""

    def begin(self, epoch: int, counts: Any) -> None:
        """Called when an iterator delivers its first batch of an epoch, which later ones add to ``counts``."""

    def step(self, counts: Any, entry: Entry, stamps: Stamps, pipeline: Pipeline) -> None:
        """Called when ``entry``, a batch or an error in its place, is handed out. ``counts`` as in `begin`."""

    def skip(self, skipped: Sequence[tuple[Any, BaseException]], where: str = "", before: int = 0) -> Exception | None:
        """Record skipped or replaced samples, and return the error to raise if they are too many.

        Args:
            skipped: index and error of each.
            where: epoch and batch, in words.
            before: number of those skipped earlier in this epoch.
        """
        self.skipped.extend(skipped)
        del self.skipped[: -self.KEPT]
        for index, error in skipped:
            why = f"{type(error).__name__}: {errors.text_of(error)}"
            for note in (note for note in errors.notes_of(error) if note.endswith(errors.HAS_ENDED)):
                self.notices.warn(note, f"{note} (in {where}; {why})")
            self.notices.record("skipped_samples", f"on_error skipped or replaced sample {index!r} in {where}: {why}")
        count, most = before + len(skipped), self.max_skipped
        return None if most is None or count <= most else errors.TooManySkippedError(count, most, where, *skipped[-1])
