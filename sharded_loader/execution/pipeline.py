"""Keeps batches in flight and hands them out in order. The consumer's own thread does all of it.

    EpochPlan --fill--> window of entries --dispatch--> pool --receive--> entries filled in --next--> in order

A pool without workers has nothing in flight: `next` has the head of the plan read, and the window is empty but
for a batch whose handing out was interrupted.

There is no background thread in the trainer that would compete for its GIL: planning, dispatch and reordering
happen inside `next`, under one lock. Several iterators, several threads and `close` from elsewhere meet at
that lock. One thread at a time (the leader) waits on the pool, without the lock; the others wait for the
leader. Results are filed with the run (the iterator) that they belong to.

Every step can be interrupted by a KeyboardInterrupt without losing a batch:
  * `next` leaves the entry in the window; `done` takes it out as its last step, `undo` puts it back;
  * a task counts as dispatched after the pool has it; dispatched twice, it is done twice, and filed once;
  * a result leaves the pool after it has been filed.

Owns: the windows. Does not own: the pool's workers (the pool does), batches handed out (the user does).
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from typing import NoReturn

from sharded_loader.errors import LoaderClosedError, Place
from sharded_loader.execution.messages import Job, Result, Task
from sharded_loader.execution.pools.base import Pool
from sharded_loader.execution.pools.inline import InlinePool
from sharded_loader.execution.run import Entry, Run


class Pipeline:
    """The windows of all live iterators of one loader, over one pool.

    Args:
        pool: who reads.
        prefetch: how many batches of a run are kept in flight. May be changed at any time.
        deepens: keep so many groups in flight, where batches are so cheap that several are submitted together.

    Attributes:
        at_hand: the pool is asked for more when not so many batches are finished.
        is_shut: `close` is over: the pool is closed, and nobody here uses it again.
    """

    def __init__(self, pool: Pool, prefetch: int, *, deepens: bool = False) -> None:
        self.pool = pool
        self.prefetch = prefetch
        self.deepens = deepens
        self.at_hand = 2
        self.closed = False
        self.is_shut = False
        self._pid = os.getpid()
        self._numbers = itertools.count()
        self._runs: dict[int, Run] = {}
        self._ended: deque[int] = deque()
        # Reentrant: a signal handler or a finalizer may close the loader in the middle of `next`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._leader: int | None = None
        self._followers = 0

    # -- runs -----------------------------------------------------------------------------------------------

    def new_number(self) -> int:
        """A number for a run that is going to be opened."""
        return next(self._numbers)

    def open(self, run: Run, job: Job, *, renew: bool = False) -> None:
        """Begin a run: start the pool if it does not run, and put the first batches in flight.

        Args:
            run: the new run.
            job: what the workers are to read.
            renew: send ``job`` to workers that run already.
        """
        self.check_open()
        with self._lock:
            self.check_open()
            try:
                self._drop_ended()
                if renew or not self.pool.started:
                    self.pool.start(job)
                    self._wake_others()
                self._runs[run.number] = run
                self._fill(run, self._depth())
                self._dispatch()
            except Exception:
                self._check_not_closed()
                raise
            finally:
                if self.closed:
                    self.shut()

    def end(self, number: int) -> None:
        """A run's iterator is gone. Called while it is collected, so it must not wait for the lock.

        If another thread, or this one further up the stack, is at work, the run is dropped at the next step.
        """
        self._ended.append(number)
        if os.getpid() == self._pid and not self._in_a_step() and self._lock.acquire(blocking=False):
            try:
                if not self.closed:
                    self._drop_ended()
            finally:
                self._lock.release()

    def _in_a_step(self) -> bool:
        """Whether a signal handler or the garbage collector has interrupted a step of this very thread.

        Read off the stack: a flag or the ownership of the lock would be left wrong by a KeyboardInterrupt.
        """
        frame = sys._getframe(1)
        while frame is not None:
            if frame.f_code in _STEPS and frame.f_locals.get("self") is self:
                return True
            frame = frame.f_back  # type: ignore[assignment]
        return False

    def close(self) -> None:
        """Stop the pool. Any thread; twice; while another thread waits in `next`, which then raises.

        In a signal handler, in the middle of a step of this very thread, the step is let to its end first.
        """
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the workers
        me = threading.get_ident()
        in_a_step = self._in_a_step()
        with self._changed:
            if self.closed:
                return
            self.closed = True
            self._wake_others()
            if in_a_step:
                return  # the step goes on from here, when it is over
            # The leader looks at what the pool owns; it leaves as soon as it wakes (an inline or
            # thread-pool leader that is in the user's code: after its sample, and it needs nothing of ours).
            self._followers += 1
            self._changed.wait_for(lambda: self._leader in (None, me), timeout=1.0)
            self._followers -= 1
            self.shut()

    def shut(self) -> None:
        """What `close` does when nobody is at work."""
        if not self.is_shut:  # another loader may have the pool since
            self.pool.close()
            self._runs.clear()
            self.is_shut = True

    def check_open(self) -> None:
        """Raise if the loader cannot be used. Takes no lock: in a forked child nobody would release it."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this loader was made in process {self._pid}, and this is its forked child {os.getpid()}, which has "
                f"no workers: make a loader in the child"
            )
        self._check_not_closed()

    def _check_not_closed(self) -> None:
        if self.closed:
            raise _closed()

    # -- the loop -------------------------------------------------------------------------------------------

    def next(self, run: Run) -> Entry:
        """The run's next batch, finished. It stays in the window until `done`.

        Raises:
            StopIteration: after the last one.
            Exception: an error that is raised out of order (a worker died), or that ends the run.
            LoaderClosedError: the loader was closed.
        """
        self.check_open()
        if isinstance(self.pool, InlinePool):
            return self._read_here(run, self.pool)
        me = threading.get_ident()
        try:
            while True:
                with self._lock:
                    self._check_not_closed()
                    entry = self._advance(run)
                    if entry is not None:
                        return entry
                    if self._leader not in (None, me):
                        self._followers += 1
                        try:
                            self._changed.wait()
                        finally:
                            self._followers -= 1
                        continue
                    self._leader = me
                self.pool.wait()
        finally:
            if self._leader == me:
                with self._lock:
                    self._leader = None
                    if self._followers:
                        self._changed.notify_all()

    def done(self, run: Run, entry: Entry) -> None:
        """The batch is being handed out: put another in flight, and take this one out of the window."""
        with self._lock:
            try:
                window = run.window
                if isinstance(self.pool, InlinePool):
                    if run.plan.taken == entry.seq:
                        run.plan.advance()
                elif not self.closed:
                    self._refill(run, self._depth() + 1)
                    if self._waits(run):
                        self._dispatch()
                run.delivered = entry.seq + 1
                if window and window[0] is entry:
                    window.popleft()
            except Exception:
                self._check_not_closed()
                raise
            finally:
                if self.closed:
                    self.shut()

    def finished(self, run: Run, count: int) -> list[Entry]:
        """Of the ``count`` batches behind the next one, those that are finished up to the first that is not."""
        with self._lock:
            behind = itertools.islice(run.window, 1, 1 + count)
            return list(itertools.takewhile(lambda entry: entry.result is not None, behind))

    def undo(self, run: Run, entry: Entry) -> None:
        """Handing out was interrupted: the batch is the next one again."""
        with self._lock:
            if not run.window or run.window[0].seq > entry.seq:
                run.window.appendleft(entry)
            run.delivered = entry.seq

    def _read_here(self, run: Run, pool: InlinePool) -> Entry:
        """The run's next batch, read by this thread: 5 us less than through the window and the pool's verbs."""
        if self._ended:
            with self._lock:
                self._drop_ended()
        if run.dead is not None:
            self._raise_dead(run)
        if run.window:
            return run.window[0]
        planned = run.plan.head()
        if planned is None:
            raise StopIteration
        seq = run.plan.taken
        if not isinstance(planned, Task):
            return Entry(seq, None, Result(run.number, seq, error=planned))
        try:
            task = run.plan.split(planned)
        except Exception as error:
            return Entry(seq, planned, _refused(planned, error))
        result = pool.read(task)
        if result is None or self.closed:
            raise _closed()
        return Entry(seq, task, result)

    def _advance(self, run: Run) -> Entry | None:
        """Do all that can be done without waiting. Returns the run's next entry if it is finished."""
        window = run.window
        try:
            if self._ended:
                self._drop_ended()
            if run.dead is not None:
                self._raise_dead(run)
            # With some batches at hand nobody need ask the pool now: a system call per worker.
            elif not self._has_at_hand(window):
                self._refill(run, self._depth() or 1)
                if self._waits(run):
                    self._dispatch()
                if self._receive(run) and self._waits(run):
                    self._dispatch()
            if run.urgent:
                raise run.urgent.popleft()
            if not window:
                raise StopIteration
            return window[0] if window[0].result is not None else None
        except Exception:
            self._check_not_closed()
            raise
        finally:
            if self.closed:
                self.shut()

    def _has_at_hand(self, window: deque[Entry]) -> bool:
        return len(window) >= self.at_hand and all(window[i].result is not None for i in range(self.at_hand))

    @staticmethod
    def _raise_dead(run: Run) -> NoReturn:
        if run.urgent:
            raise run.urgent.popleft()
        raise RuntimeError(f"this iterator has failed ({run.dead}): begin an epoch with iter(loader)")

    def _waits(self, run: Run) -> bool:
        """Whether a batch of the run, or perhaps of another one, waits for a worker.

        Entries of a run are dispatched in order, so its last one tells.
        """
        return len(self._runs) != 1 or (bool(run.window) and not run.window[-1].dispatched)

    def _depth(self) -> int:
        return self.prefetch * self.pool.group if self.deepens else self.prefetch

    def _refill(self, run: Run, depth: int) -> None:
        """Fill the window, a group of batches at a time."""
        missing = depth - len(run.window)
        # Of a small window that the user asked for, one at a time.
        if missing >= min(self.pool.group, depth // 4) or missing == depth:
            self._fill(run, depth)

    @staticmethod
    def _fill(run: Run, depth: int) -> None:
        plan, window = run.plan, run.window
        if window and window[-1].seq == plan.taken:
            plan.advance()  # an interruption came between the two last steps below
        while len(window) < depth:
            planned = plan.head()
            if planned is None:
                return
            seq = plan.taken
            if isinstance(planned, Task):
                window.append(Entry(seq, planned))
            else:
                window.append(Entry(seq, None, Result(run.number, seq, error=planned)))
            plan.advance()

    def _dispatch(self) -> None:
        """Give waiting tasks to the pool, those that are needed soonest first."""
        waiting = [
            (distance, run, entry)
            for run in self._runs.values()
            for distance, entry in enumerate(run.window)
            if not entry.dispatched
        ]
        if not waiting:
            return
        if len(self._runs) > 1:
            waiting.sort(key=_distance)
        room = self.pool.capacity()
        for _, run, entry in waiting:
            if entry.task is None:
                entry.dispatched = True  # an error in its place
                continue
            if room <= 0:
                break
            room -= 1
            try:
                task = entry.task = run.plan.split(entry.task)
                self.pool.submit(task)
            except Exception as error:
                entry.result = _refused(entry.task, error)
            entry.dispatched = True
        self.pool.send()
        self._wake_others()

    def _receive(self, current: Run) -> bool:
        """File what has come; whether anything has."""
        came = False
        try:
            for result in self.pool.receive():
                self._file(result, current)
                came = True
        except Exception as error:
            # The pool cannot work; a new epoch starts it again.
            self.pool.close()
            for run in self._runs.values():
                run.dead = f"{type(error).__name__}: {error}"
                if run is not current:
                    run.urgent.append(error)
            self._runs.clear()
            self._wake_others()
            raise
        return came

    def _file(self, result: Result, current: Run) -> None:
        run = self._runs.get(result.run)
        if run is None:
            return
        window = run.window
        number = result.seq - window[0].seq if window else -1
        if 0 <= number < len(window):
            entry = window[number]
            if entry.result is None:
                entry.result = result
        if run is not current:
            self._wake_others()

    def _wake_others(self) -> None:
        """Something changed that a thread which waits may wait for.

        The leader too: it waits for the pool, and this thread may just have taken what it would wake for, or
        left the pool something to send.
        """
        if self._followers:
            self._changed.notify_all()
        if self._leader not in (None, threading.get_ident()) and self.pool.started:
            self.pool.wake()

    def _drop_ended(self) -> None:
        while self._ended:
            number = self._ended[0]
            run = self._runs.pop(number, None)
            if run is not None:
                run.window.clear()
                if self.pool.started:
                    self.pool.cancel(number)
            # By its number: the collector may have come by here in between, over another iterator.
            with contextlib.suppress(ValueError):
                self._ended.remove(number)


def _closed() -> LoaderClosedError:
    return LoaderClosedError("the loader is closed: make a new ShardedDataLoader")


def _refused(task: Task, error: Exception) -> Result:
    """A task could not be split, or not be given to a worker: that is its batch's error."""
    Place(task.epoch, task.seq).note(error, samples=task.shards[0])
    return Result(task.run, task.seq, error=error)


def _distance(waiting: tuple[int, Run, Entry]) -> int:
    return waiting[0]


# A `close` that comes in the middle of one of these, from a signal handler, is done at its end.
_STEPS = {function.__code__ for function in (Pipeline.open, Pipeline.done, Pipeline._advance)}
