"""Keeps batches in flight and hands them out in order. The consumer's own thread does all of it.

    Epoch --fill--> window of entries --dispatch--> pool --wait--> entries filled in --next--> in order

No background thread competes for the main process's GIL: planning, dispatch and reordering happen inside `next`, under
one lock. Iterators in several threads take turns at that lock.

What is in flight is a cache. A run's only truth is how many batches the user has received. One call of `next` is
one step. If an exception from outside strikes inside a step, such
as a Ctrl-C, `fail` leaves the step open. The next step then throws away everything in flight, starts the pool again,
and plans from the delivered count. While the pool only waits, nothing has to be thrown away (`Pool.waiting`).

Owns: the windows. Does not own: the pool's workers (the pool does), batches handed out (the user does).
What can go wrong: the pool breaks; then every run ends with the pool's error, and a new epoch starts the pool again.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from sharded_loader.base import host_clock
from sharded_loader.base.errors import LoaderClosedError, Location, as_batch_error, leave_frames
from sharded_loader.base.interrupts import note_handlers
from sharded_loader.base.limits import cores_for_workers
from sharded_loader.engine.messages import NOTHING, BatchTimes, Job, Nothing, Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken
from sharded_loader.engine.run import Entry, Run
from sharded_loader.engine.split import Split

CLOSING_SECONDS = 1.0
"""How long `close` waits for a thread that is in ``next``: in an inline pool it may be in the user's code."""

SLACK = 2
"""Cheap batches: twice as many are in flight, or workers wait while the consumer goes through a group that has come.
Measured (medians of 20 to 24 turns, of the rate with 1): `images` 1.05 to 1.13, `columns` 1.05, `tiny` 1.08, `tokens`
1.05; 3 gains nothing more. Where workers take turns, one that is ahead waits for the others: `images` 1.11."""

PATIENCE = 30.0
"""Seconds that ``next`` waits before it tells on stderr for whom."""

ANSWER_SECONDS = 2.0
"""Seconds in which a worker that was asked for its stack has written it, unless it cannot."""

PER_WORKER = 2
"""Batches in flight for each worker, unless the user says otherwise."""

NOTED_SECONDS = 2e-4
"""Of a batch that is read faster, only sums are kept, unless it was measured (`messages.BatchTimes`) or waited for for
long. To note it takes 2 us: 5 % of a batch of `tiny`."""


class Pipeline:
    """The windows of all live iterators of one loader, over one pool.

    Args:
        pool: reads the batches.
        split: how batches become shards, when they are given to the pool.

    Attributes:
        prefetch: how many batches of a run are kept in flight; of a pool without workers none is. May be set at any
            time.
        per_worker: `prefetch` follows the number of workers, by this factor; 0: it does not.
        scale_by_group: `prefetch` counts groups of batches instead of batches (`Pool.group`).
        one_by_one: for each batch that is taken, the epoch is asked for one: what it draws then depends on no clock.
        lock: one for all iterators. The thread that calls `begin` holds it until `end` or `fail`. It is reentrant: a
            signal handler may use the loader in the middle of a step.
        min_ready: poll the pool only while fewer than this many finished batches wait.
        is_open_step: a step is under way on this thread's stack, or was interrupted.
        closed: `close` was called.
        pid: the process whose pipeline this is. A forked child has the object, but no workers.
    """

    def __init__(self, pool: Pool, split: Split) -> None:
        self.pool, self.split = pool, split
        self.prefetch = self.per_worker = 0
        self.scale_by_group = self.one_by_one = False
        self.min_ready = 2
        self.lock = threading.RLock()
        self.is_open_step = False
        self.closed = False
        self.is_shut = False
        self._job: Job | None = None
        self._runs: dict[int, Run] = {}
        self._dropped: deque[int] = deque()
        self.pid = os.getpid()
        self._cores = cores_for_workers()

    # -- steps ----------------------------------------------------------------------------------------------

    def begin(self, is_nested: bool = False) -> bool:
        """Begin a step; throw away what an interrupted step has left.

        Args:
            is_nested: this thread is in another step already.

        Returns:
            Whether the step lies inside another one, which waits: in a signal handler, or in a dataset that iterates
            over the loader itself. `end` has to be told.

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
        self.pool.waiting = False
        if self._dropped:
            self._drop()
        if self.pool.unsettled:
            self.pool.settle()
        return inside

    def end(self, inside: bool) -> None:
        """The step is over.

        Raises:
            LoaderClosedError: the loader was closed in the middle of the step.
        """
        if self.closed:
            self.fail()
            raise LoaderClosedError()
        self.is_open_step = self.pool.waiting = inside
        if inside:
            self.pool.wake()  # the step around this one may wait for what this one has received

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
        if self.lock.acquire(blocking=False):
            try:
                if not (self.is_open_step or self.closed or pool.started):
                    self._adopt(pool)
                    return
            finally:
                self.lock.release()
        pool.wake()

    def _adopt(self, pool: Pool) -> None:
        pool.adopt()
        self.follow(pool)

    def follow(self, pool: Pool) -> None:
        """`prefetch` follows the number of workers, if it does."""
        if self.per_worker:
            self.prefetch = self.per_worker * pool.num_workers

    def use(self, pool: Pool) -> None:
        """Read with this pool from now on; called in a step, before `open`. It builds again what is in flight."""
        if pool is not self.pool:
            self._drop_work()
            self.pool = pool

    def _drop_work(self) -> None:
        for run in self._runs.values():
            run.forget_window()
        self.pool.close()

    def _recover(self) -> None:
        self._drop_work()
        if self._job is not None and self._runs:
            self.pool.start(self._job)

    # -- runs -----------------------------------------------------------------------------------------------

    def open(self, run: Run, job: Job, *, renew: bool = False) -> None:
        """Take up a run, in a step: start the pool if it does not run.

        Args:
            run: the new run.
            job: what the workers are to read.
            renew: send ``job`` to workers that run already.
        """
        note_handlers()
        if renew or not self.pool.started:
            self._job = job
            self.pool.start(job)
        self._runs[run.number] = run

    def replace(self, run: Run, by: Run) -> None:
        """Read another run in the place of one. The batches of the old one that are in flight are dropped."""
        self.drop(run.number)
        self._runs[by.number] = by

    def drop(self, number: int) -> None:
        """A run's iterator is gone. Called while it is collected, so it must not wait for the lock.

        If a step is under way, or was interrupted, the next step drops the run."""
        self._dropped.append(number)
        if os.getpid() == self.pid and self.lock.acquire(blocking=False):
            try:
                if not self.is_open_step and not self.closed:
                    self.is_open_step = True
                    self._drop()
                    self.is_open_step = False
            finally:
                self.lock.release()

    def _drop(self) -> None:
        while self._dropped:
            run = self._runs.pop(self._dropped.popleft(), None)
            if run is not None:
                run.forget_window()
                if self.pool.started:
                    self.pool.cancel(run.number)

    # -- batches --------------------------------------------------------------------------------------------

    def next(
        self,
        run: Run,
        deliver: Callable[[Run, Entry], Any],
        is_nested: bool = False,
        first: Callable[[Run], None] | None = None,
        ahead: Callable[[Run], None] | None = None,
    ) -> Any:
        """One step: what ``deliver`` makes of the run's next batch. None after the last one. Blocks.

        Args:
            run: whose batch.
            deliver: is given the head of the window, finished. None: it is empty, and the batch behind it comes.
            is_nested: this thread is in another step already.
            first: takes up the run (`open`), before anything else.
            ahead: all batches of the run are planned: puts those of the next epoch in flight.

        Returns:
            An error instead where no batch is to blame: the loader was closed meanwhile, or the pool is broken.
        """
        if self.is_open_step or self._dropped or self.pool.unsettled:
            inside = self.begin(is_nested)
        else:  # as `begin` does it, without a call
            inside, self.is_open_step, self.pool.waiting = False, True, False
        if first is not None:
            first(run)
        window, made, entry = run.window, None, self._head(run)
        while entry is not None:
            if isinstance(entry, Exception):
                made = entry
                break
            made = deliver(run, entry)
            window.popleft()
            if self.pool.num_workers:
                self._fill(run, 0)
                if run.next is not None:
                    self.fill_next(run)
                elif run.exhausted and ahead is not None:
                    ahead(run)
            if made is not None:
                break
            entry = self._head(run)
        if inside or self.closed:
            self.end(inside)
        else:  # as `end` does it, without a call
            self.is_open_step = self.pool.waiting = False
        try:
            return made
        finally:
            del made, entry  # frames of their errors lead to this one, and the loader would wait for the collector

    def _head(self, run: Run) -> Entry | Exception | None:
        """The run's next batch, finished; None after the last one. It stays in the window."""
        window, least = run.window, self.min_ready
        began, due = 0.0, math.inf
        look: Callable[[], None] | None = None
        while True:
            if self.closed:
                return LoaderClosedError()
            pool = self.pool
            if pool.wanted is not None and pool.wanted != pool.num_workers:
                self._adopt(pool)
            if run.dead is not None:
                failure, run.failure = run.failure, None
                return failure or RuntimeError(
                    f"this iterator has failed ({run.dead}): begin an epoch with iter(loader)"
                )
            if len(window) < least or window[least - 1].result is None or window[0].result is None:
                self._fill(run, 1)
                if not window:
                    return None
                if not pool.started:
                    self._recover()  # the pool itself was closed
                    continue
                blocks = not run.is_finished() if run.any_order else window[0].result is None
                if blocks and not began and pool.num_workers:
                    began = host_clock.now()
                    due = began + PATIENCE
                self._wait(run, block=blocks)
            if run.any_order and window:
                run.advance()
            if window and window[0].result is not None:
                if began:
                    self._note_wait(run, window[0], window[0].result, began)
                if run.epoch.given_up and window[0].result.error is not None:  # it came before the error of its part
                    run.leave_out(window[0])
                return window[0]
            if began and host_clock.now() >= due:
                due, look = self._tell_of_wait(run, began, look)

    def _tell_of_wait(
        self, run: Run, began: float, look: Callable[[], None] | None
    ) -> tuple[float, Callable[[], None] | None]:
        """The consumer has waited long: say for whom, once, and later look what came of it; see `Pool.tell_of_wait`.

        Returns:
            When to call this again, and with what as ``look``.
        """
        now = host_clock.now()
        if look is not None:
            look()
        elif run.window:
            entry = run.window[0]
            text = f"epoch {run.epoch.number}, batch {entry.seq}"
            text = f"sharded_loader: next() has waited {now - began:.0f} s for {text}"
            if (look := self.pool.tell_of_wait(text, entry.task)) is not None:
                return now + ANSWER_SECONDS, look
        return math.inf, None

    def _note_wait(self, run: Run, head: Entry, result: Result, began: float) -> None:
        """The consumer has waited for the first batch of a run. Which tasks had the workers?"""
        ended = host_clock.now()
        if result.batch is NOTHING and result.error is None:  # the batch that is handed out is waited for since then
            run.waited = run.waited or began
            return
        began, run.waited = run.waited or began, 0.0
        head.waited = ended - began
        if result.times is None and result.seconds < NOTED_SECONDS and head.waited < 5 * NOTED_SECONDS:
            return
        pool, in_flight, waiting = self.pool, len(run.window), len(run.waiting)
        if len(self._runs) > 1:
            in_flight = sum([len(one.window) for one in self._runs.values()])
            waiting = sum([len(one.waiting) for one in self._runs.values()])
        lacks = in_flight < pool.num_workers and not (run.exhausted or run.epoch.takes_turns)
        lacks = lacks or (waiting > 0 and in_flight - waiting < pool.num_workers)
        head.times = times = result.times or BatchTimes()
        times.wait_began, times.wait_ended, times.lacks_tasks = began, ended, lacks
        times.threads = pool.num_workers if pool.shares_dataset else 1
        times.per_core = pool.num_workers / self._cores

    def fill_next(self, run: Run) -> None:
        """Put batches of the prefetched run in flight, where this one has no more."""
        if run.next is not None and run.next.is_ahead:
            self._fill(run.next, 0, before=len(run.window))

    def _fill(self, run: Run, least: int, before: int = 0) -> None:
        """Fill the window, a group at a time (for each worker, if they take turns); a small window one at a time.

        Args:
            run: whose window.
            least: how many batches the window must hold, whatever `prefetch` says.
            before: how many batches of the run before this one are in flight: they count too.
        """
        window, group = run.window, self.pool.group
        scale = group * (SLACK if group > 1 else 1) if self.scale_by_group and not self.one_by_one else 1
        unit, share = (group * self.pool.num_workers, 2) if run.epoch.takes_turns and group > 1 else (group, 4)
        planned: Task | Exception | Nothing | None = None
        entry: Entry | None = None
        depth = max(least, self.prefetch * scale) if self.pool.num_workers else least
        missing = depth - before - len(window)
        if missing > 0 and (self.one_by_one or missing >= min(unit, depth // share) or missing == depth):
            for seq in range(run.planned, run.planned + missing):
                planned = run.epoch.task(seq)
                if planned is None:
                    run.exhausted = True
                    break
                if isinstance(planned, Task):
                    entry = Entry(seq, planned)
                    run.waiting.append(entry)
                elif isinstance(planned, Nothing):
                    entry = Entry(seq, None, Result(run.number, seq, planned))
                else:
                    # Its frames lead to the iterator whose step this is, which could not go before this window does.
                    # Only the batch that this step waits for (``least``) leaves the window at once.
                    if window or run.is_ahead or not least:
                        leave_frames(planned)
                    entry = Entry(seq, None, Result(run.number, seq, error=planned))
                window.append(entry)
                run.planned = seq + 1
            planned = entry = None  # as in `_wait`
        if run.waiting:
            self._dispatch(run)

    def _dispatch(self, run: Run) -> None:
        """Give waiting tasks of a run to the pool. Of several runs, those tasks that are needed soonest go first."""
        tasks: list[Task] = []
        room, splits = self.pool.room, self.split.num_shards is not None
        now = host_clock.now() if self.pool.num_workers else 0.0
        while len(tasks) < room:
            if len(self._runs) > 1:
                run = min(self._runs.values(), key=Run.distance)
            if not run.waiting:
                break
            entry = run.waiting.popleft()
            task = entry.task
            assert task is not None  # an error in a task's place does not wait
            if run.epoch.given_up and run.leave_out(entry):
                continue
            try:
                if splits:
                    entry.task = task = self.split.sharded(task)
                tasks.append(task)
                entry.sent = now
            except Exception as raised:
                error = as_batch_error(raised, "while the batch was split into shards")
                Location(run.epoch.number, entry.seq).note(error, samples=task.shards[0])
                leave_frames(error)  # as in `_fill`
                entry.result = Result(run.number, entry.seq, error=error)
        if tasks:
            self.pool.submit(tasks)

    def _wait(self, current: Run, *, block: bool) -> None:
        """File what comes from the pool, and dispatch again."""
        try:
            results = self.pool.wait(block)
        except PoolBroken as broken:
            for run in self._runs.values():
                run.dead, run.failure = f"{type(broken.error).__name__}: {broken.error}", broken.error
                run.forget_window()
            self._runs.clear()
            return
        result: Result | None = None
        for result in results:
            filed = self._runs.get(result.run)
            window = () if filed is None else filed.window
            number = -1
            if filed is not None and window:
                number = (filed.moved.pop(result.seq, result.seq) if filed.moved else result.seq) - window[0].seq
            if filed is not None and 0 <= number < len(window) and window[number].result is None:
                if (task := window[number].task) is not None and task.part is not None:
                    result = filed.epoch.came(window[number].seq, result)
                window[number].result = result
        # Their errors lead to this frame, and from there to the loader, which would wait for the collector.
        came, results, result = bool(results), (), None
        if came and (current.waiting or len(self._runs) > 1):
            self._dispatch(current)

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
        self._runs.clear()
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
