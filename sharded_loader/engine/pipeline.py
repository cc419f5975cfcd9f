"""Keeps batches in flight and hands them out in order. The consumer's own thread does all of it.

    Scheduler.tasks      Epoch -> entries at the end of a run's window -> the tasks that the pool is given now
    ReorderBuffer.file   what comes from the pool -> the entries it is of, in any order
    Pipeline.next        the head of the window, once it is finished -> the user
    Observer             is told of each batch that is handed out

No background thread competes for the main process's GIL: planning, dispatch and reordering happen inside `next`, under
one lock. Iterators in several threads take turns at that lock.

What is in flight is a cache. A run's only truth is how many batches the user has received (`Run.delivered`). One call
of `next` is one step. If an exception from outside strikes inside a step, such as a Ctrl-C, `fail` leaves the step
open. The next step then throws away everything in flight, starts the pool again, and plans from the delivered count.
While the pool only waits, nothing has to be thrown away (`Pool.waiting`).

Owns: the windows. A run owns its entries, and an entry its batch until it is handed out. Does not own: the pool's
workers (the pool does), batches handed out (the user does).
What can go wrong: the pool breaks; then every run ends with the pool's error, and a new epoch starts the pool again.
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

from sharded_loader.base import host_clock
from sharded_loader.base.errors import (
    HAS_ENDED,
    LoaderClosedError,
    TooManySkippedError,
    leave_frames,
    notes_of,
    text_of,
)
from sharded_loader.base.interrupts import note_handlers
from sharded_loader.base.notices import Notices
from sharded_loader.engine.messages import NOTHING, Job, Nothing, Result, Task
from sharded_loader.engine.order import Epoch
from sharded_loader.engine.pool import Pool, PoolBroken
from sharded_loader.engine.split import Split

CLOSING_SECONDS = 1.0
"""How long `close` waits for a thread that is in ``next``: in an inline pool it may be in the user's code."""

SLACK = 2
"""Cheap batches: twice as many are in flight, or workers wait while the consumer goes through a group that has come.
Measured (medians of 20 to 24 turns, of the rate with 1): `images` 1.05 to 1.13, `columns` 1.05, `tiny` 1.08, `tokens`
1.05; 3 gains nothing more. Where workers take turns, one that is ahead waits for the others: `images` 1.11."""

PATIENCE = 30.0
"""Seconds that ``next`` waits before it tells on stderr for whom."""

PER_WORKER = 2
"""Batches in flight for each worker, unless the user says otherwise."""

_FAR = 1 << 40  # farther than any batch of a run whose epoch has begun


@dataclass(slots=True, eq=False)
class Entry:
    """A batch in flight: planned, perhaps finished, perhaps on its way to the devices (`begun`).

    An entry owns its batch until the batch is handed out. Stamps are of `host_clock.now`.

    Attributes:
        result: of the pool. When the batch is handed out, with the error that stands in its place, if one does.
        begun: the copies of its shards to their devices.
        batch: as the user gets it.
        sent: when the task was given to the pool; 0: it was not, or nothing is timed.
        waited: when ``next`` began and ended to wait for it; None: it has not.
        placing: seconds in which it was converted, and put on its devices.
    """

    seq: int
    task: Task | None
    result: Result | None = None
    begun: Any = None
    batch: Any = None
    sent: float = 0.0
    waited: tuple[float, float] | None = None
    placing: float = 0.0


class ShownRun:
    """Which run has handed out a batch, or its end, most recently.

    Attributes:
        shown: the run, whose position the loader tells.
    """

    shown: Run | None = None


@dataclass(eq=False)
class Run:
    """One iterator's way through one epoch.

    Attributes:
        number: identifies the run in tasks and results.
        epoch: its batches.
        mark: where the loader was when it chose the run.
        delivered: how many batches of the epoch the user has received, errors in a batch's place included. This is the
            only truth: everything below can be thrown away and built again from it.
        planned: the number of the batch behind the window.
        window: the batches in flight, in order.
        waiting: those of them that the pool has not been given yet.
        dead: why the run can never go on: the error of the pool that ended it, until its iterator has raised that;
            then text, because an exception would hold the frames that hold the run.
        ended: the user has seen the end.
        exhausted: all its batches have been planned.
        is_ahead: its epoch has not begun; it is read while the one before it is consumed.
        next: the prefetched run behind this one.
        awaited: the entries whose results have not come, by the numbers of their tasks.
        waits_since: since when this ``next`` has waited for workers; 0: it has not.
    """

    number: int
    epoch: Epoch
    mark: Any = None
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

    def advance(self) -> None:
        """Move the first finished batch to the head of the window. Those it overtakes keep their order."""
        window = self.window
        entry = next((one for one in window if one.result is not None), None)
        if entry is not None and entry is not window[0]:
            begin = window[0].seq
            self.epoch.move(entry.seq, begin)
            window.remove(entry)
            window.appendleft(entry)
            for seq, one in enumerate(window, begin):
                one.seq = seq

    def leave_out(self, entry: Entry) -> bool:
        """Whether the entry's part was given up before it. Then its batch is empty."""
        part = None if entry.task is None else entry.task.part
        is_given_up = part is not None and part.batch > self.epoch.given_up.get(part.number, part.batch)
        if is_given_up:
            entry.result = self.epoch.came(entry.seq, Result(self.number, entry.seq, NOTHING))
        return is_given_up

    def distance(self) -> float:
        """How many batches come before the first one that waits for the pool. A run that is ahead is last."""
        if not self.waiting:
            return math.inf
        return self.waiting[0].seq - self.delivered + (_FAR if self.is_ahead else 0)

    def forget_window(self) -> None:
        """Throw away what is in flight. It is planned again from `delivered`."""
        self.exhausted = False
        for entry in list(self.window):
            for copy in entry.begun or ():
                copy.drop()
        self.window.clear()
        self.waiting.clear()
        self.awaited.clear()
        self.planned = self.delivered


class ReorderBuffer(dict[int, Run]):
    """The runs that are open, by their numbers, with what is in flight of each. Results go to their places here."""

    def file(self, results: Sequence[Result]) -> None:
        """Put results into their places. Left out: those of a run that is gone, and second ones of a batch."""
        for result in results:
            run = self.get(result.run)
            if run is not None and (entry := run.awaited.pop(result.seq, None)) is not None:
                is_of_part = entry.task is not None and entry.task.part is not None
                entry.result = run.epoch.came(entry.seq, result) if is_of_part else result

    def fail(self, error: Exception) -> None:
        """The pool is broken: that ends all runs."""
        self.forget()
        for run in self.values():
            run.dead = error
        self.clear()

    def forget(self) -> None:
        """Throw away what is in flight."""
        for run in self.values():
            run.forget_window()


class Scheduler:
    """Decides what is read next, and when the pool is given more. It calls no pool, and changes nothing but windows.

    Args:
        split: how batches become shards, when they are planned.
        runs: all runs that are open.

    Attributes:
        split: as given.
        prefetch: how many batches of a run are kept in flight; of a pool without workers none is. May be set at any
            time.
        per_worker: `prefetch` follows the number of workers, by this factor; 0: it does not.
        scale_by_group: `prefetch` counts groups of batches instead of batches (`Pool.group`).
        one_by_one: for each batch that is taken, the epoch is asked for one: what it draws then depends on no clock.
        is_timed: note when tasks are given to the pool.
    """

    def __init__(self, split: Split, runs: ReorderBuffer) -> None:
        self.split, self._runs = split, runs
        self.prefetch = self.per_worker = 0
        self.scale_by_group = self.one_by_one = self.is_timed = False

    def follow(self, pool: Pool) -> None:
        """`prefetch` follows the number of workers, if it does."""
        if self.per_worker:
            self.prefetch = self.per_worker * pool.num_workers

    def tasks(self, run: Run, pool: Pool, least: int = 0, before: int = 0) -> list[Task]:
        """Fill a run's window, a group at a time (for each worker, if they take turns); a small one one at a time.

        Args:
            run: whose window.
            pool: its workers, group and room decide.
            least: how many batches the window must hold, whatever `prefetch` says.
            before: how many batches of the run before this one are in flight: they count too.

        Returns:
            The tasks to be given to the pool now. Of several runs, those that are needed soonest come first.
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
                # Its frames lead to the iterator whose step this is, which could not go before this window does.
                # Only the batch that this step waits for (``least``) leaves the window at once.
                if error is not None and (window or run.is_ahead or not least):
                    leave_frames(error)
                entry = Entry(seq, None, Result(run.number, seq, NOTHING, error=error))
                del error
            window.append(entry)
            run.planned = seq + 1
            del planned, entry  # as in `Pipeline.next`
        tasks: list[Task] = []
        now = host_clock.now() if self.is_timed and workers else 0.0
        while len(tasks) < pool.room:
            if len(self._runs) > 1:
                run = min(self._runs.values(), key=Run.distance)
            if not run.waiting:
                break
            entry = run.waiting.popleft()
            if entry.task is not None and not (run.epoch.given_up and run.leave_out(entry)):
                tasks.append(entry.task)
                entry.sent = now
        return tasks


class Pipeline:
    """The windows of all live iterators of one loader, over one pool.

    Args:
        pool: reads the batches.
        split: how batches become shards, when they are planned.

    Attributes:
        pool, split: as given.
        scheduler: decides what is read next.
        runs: those that are open, with what is in flight of each.
        dropped: the numbers of those whose iterators are gone.
        lock: one for all iterators. A thread holds it during `next`, and until it has called `fail` if that was
            interrupted. It is reentrant: a signal handler may use the loader in the middle of a step.
        min_ready: poll the pool only while fewer than this many finished batches wait.
        is_open_step: a step is under way on this thread's stack, or was interrupted.
        closed, is_shut: `close` was called; and the pool was given back.
        pid: the process whose pipeline this is. A forked child has the object, but no workers.
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

    def _settle(self, is_nested: bool) -> bool:
        """Throw away what an interrupted step has left, and do what was left for the next one.

        Returns:
            Whether this step lies inside another one, which waits: in a signal handler, or in a dataset that iterates
            over the loader itself.

        Raises:
            RuntimeError: the other step does not wait: it is in the middle of its work.
        """
        inside = self.is_open_step and self.pool.waiting
        if self.is_open_step and not inside:
            if is_nested:
                raise RuntimeError(
                    "next() was called inside next() of the same loader, by a signal handler or a sampler, while the "
                    "loader was at work: set a flag there, and call next() in your loop"
                )
            self._recover()
        self.is_open_step = True
        if self.dropped:
            self._drop()
        if self.pool.unsettled:
            self.pool.settle()
        return inside

    def fail(self) -> None:
        """An exception has left the step. Unless the pool only waited, the next step recovers.

        If the loader was closed in the middle of the step, what the step has made since is given back. This is done
        once: afterwards another loader may have the pool.
        """
        was_open = self.is_open_step
        self.is_open_step, self.pool.waiting = not self.closed and not self.pool.waiting, False
        if self.closed and was_open:
            self.shut()

    def resize(self, pool: Pool) -> None:
        """A pool of the loader is to have another number of workers: now if none runs, otherwise in a step. Any thread.

        Workers start and end in steps only. `close` does not wait for another thread that starts some.
        """
        if pool.started or not self._between_steps(partial(self._adopt, pool)):
            pool.wake()

    def _adopt(self, pool: Pool) -> None:
        pool.adopt()
        self.scheduler.follow(pool)

    def _between_steps(self, do: Callable[[], None]) -> bool:
        """Do something now, unless a step is under way in any thread, or was interrupted; whether it was done."""
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

    def _recover(self) -> None:
        self.runs.forget()
        self.pool.close()
        if self._job is not None and self.runs:
            self.pool.start(self._job)

    # -- runs -----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        """Start the pool before the first step."""
        with self.lock:
            self._settle(is_nested=False)
            self.pool.start(job)
            self.is_open_step = False

    def open(self, run: Run, job: Job, *, renew: bool = False, pool: Pool | None = None) -> None:
        """Take up a run, in a step: start the pool if it does not run.

        Args:
            run: the new run.
            job: what the workers are to read.
            renew: send ``job`` to workers that run already.
            pool: read with this one from now on. It builds again what is in flight.
        """
        note_handlers()
        if pool is not None and pool is not self.pool:
            self.runs.forget()
            self.pool.close()
            self.pool = pool
        if renew or not self.pool.started:
            self._job = job
            self.pool.start(job)
        self.runs[run.number] = run

    def replace(self, run: Run, by: Run) -> None:
        """Read another run in the place of one. The batches of the old one that are in flight are dropped."""
        self.drop(run.number)
        self.runs[by.number] = by

    def drop(self, number: int) -> None:
        """A run's iterator is gone. Called while it is collected, so it must not wait for the lock.

        If a step is under way, or was interrupted, the next step drops the run."""
        self.dropped.append(number)
        if os.getpid() == self.pid:
            self._between_steps(self._drop)

    def _drop(self) -> None:
        while self.dropped:
            run = self.runs.pop(self.dropped.popleft(), None)
            if run is not None:
                run.forget_window()
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
        """One step: the run's next batch. None after the last one. Blocks.

        Args:
            run: whose batch.
            deliver: is given the head of the window, finished. False: it is empty, and the batch behind it comes.
            is_nested: this thread is in another step already.
            first: takes up the run (`open`), before anything else.
            ahead: all batches of the run are planned: opens the run of the next epoch.

        Returns:
            An error instead where no batch is to blame: the loader was closed meanwhile, or the pool is broken.

        Raises:
            RuntimeError: another step is under way in this thread, and in the middle of its work.
            LoaderClosedError: the loader was closed in the middle of the step.
        """
        inside = False
        if self.is_open_step or self.dropped or self.pool.unsettled:
            inside = self._settle(is_nested)
        self.is_open_step, self.pool.waiting = True, False
        if first is not None:
            first(run)
        window, least, run.waits_since, is_empty = run.window, self.min_ready, 0.0, True
        found: Entry | Exception | None = None
        while is_empty:
            pool = self.pool
            is_ready = len(window) >= least and window[least - 1].result is not None and window[0].result is not None
            if not is_ready or run.epoch.any_order or (pool.wanted is not None and pool.wanted != pool.num_workers):
                found = self._await_head(run)
            if found is not None or not window:
                break
            found = window[0]
            if run.epoch.given_up and found.result is not None and found.result.error is not None:
                run.leave_out(found)  # it came before the error of its part
            is_empty = not deliver(run, found)
            window.popleft()
            if is_empty:
                found = None
            if self.pool.num_workers:
                if tasks := self.scheduler.tasks(run, self.pool):
                    self.pool.submit(tasks)
                if run.exhausted and run.next is None and ahead is not None:
                    ahead(run)
                coming = run.next if run.next is not None and run.next.is_ahead else None
                if coming and (tasks := self.scheduler.tasks(coming, self.pool, before=len(window))):
                    self.pool.submit(tasks)
        if self.closed:
            self.fail()
            raise LoaderClosedError()
        self.is_open_step = self.pool.waiting = inside
        if inside:
            self.pool.wake()  # the step around this one may wait for what this one has received
        try:
            return found
        finally:
            del found  # frames of its error lead to this one, and the loader would wait for the collector

    def _await_head(self, run: Run) -> Exception | None:
        """Receive until the run's next batch is finished, or there is none; the error that ends the run."""
        window, due = run.window, run.waits_since and run.waits_since + PATIENCE
        while True:
            pool = self.pool
            if self.closed:
                return LoaderClosedError()
            if pool.wanted is not None and pool.wanted != pool.num_workers:
                self._adopt(pool)
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
                blocks = all(one.result is None for one in window)
            if blocks and not run.waits_since and pool.num_workers:
                run.waits_since = host_clock.now()
                due = run.waits_since + PATIENCE
            try:
                results = pool.wait(blocks)
            except PoolBroken as broken:
                self.runs.fail(broken.error)
                continue
            self.runs.file(results)
            if not results and not pool.started:
                self._recover()  # the pool itself was closed
            del results
            if not window:
                continue
            if run.epoch.any_order:
                run.advance()
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
        """Stop the pool. Any thread; twice; while another thread waits in ``next``, which then raises.

        A step that a signal handler closes the loader in ends with a `LoaderClosedError`."""
        if os.getpid() != self.pid or self.is_shut:
            return  # a forked child has the object, but not the workers
        self.closed = True
        self.pool.wake()
        turn = self.lock.acquire(timeout=CLOSING_SECONDS)
        try:
            if not self.is_shut:  # in the meantime; another loader may have the pool now
                self.shut()
        finally:
            if turn:
                self.lock.release()

    def shut(self) -> None:
        """Give back what the pool owns. Also at the end of a step in which the loader was closed."""
        self.runs.clear()
        self.pool.close()
        self.is_shut = True

    def check_open(self) -> None:
        """Raise if the loader cannot be used. Takes no lock: in a forked child no thread would release it."""
        if os.getpid() != self.pid:
            raise RuntimeError(
                f"this loader was made in process {self.pid}, and this is its forked child {os.getpid()}, which has "
                f"no workers: make a loader in the child"
            )
        if self.closed:
            raise LoaderClosedError()


# -- what is told of it ------------------------------------------------------------------------------------------------

Stamps = tuple[float, float, float, float, bool]
"""The ``turn``, ``asked``, ``taken``, ``behind`` and ``starts`` of a batch: see `BatchTimes`."""


class Observer:
    """Knows what ``on_error`` has left out of one loader, and what went wrong quietly.

    Iterators call it one at a time, under the pipeline's lock. It measures nothing: with it, a loader reads just as
    well. The one that measures is given by name (`sharded_loader.instruments`).

    Args:
        dataset: what is read.
        max_skipped: how many samples of an epoch ``on_error`` may skip or replace; None: any number.

    Attributes:
        times: `step` is called, with stamps. Otherwise nothing is timed.
        notices: what the loader and its pool count.
        skipped: ``(index, error)`` of the last samples that ``on_error`` skipped or replaced.
    """

    KEPT = 1000
    times = False

    def __init__(self, dataset: Any = None, max_skipped: int | None = None) -> None:
        self.dataset, self.max_skipped, self.notices = dataset, max_skipped, Notices()
        self.skipped: list[tuple[Any, BaseException]] = []

    def counts(self) -> Any:
        """What one iterator's batches are counted in. It is asked for with the iterator's first batch."""

    def begin(self, epoch: int, counts: Any) -> None:
        """An iterator delivers its first batch of an epoch, and will add to these counts."""

    def step(self, counts: Any, entry: Entry, stamps: Stamps, pipeline: Pipeline) -> None:
        """A batch, or an error in its place, is handed out.

        Args:
            counts: what `begin` was given.
            entry: the batch.
            stamps: when.
            pipeline: that has read it.
        """

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
