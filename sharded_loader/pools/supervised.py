"""Base class of pools with out-of-process workers: the only place that starts, replaces and gives up workers.

    _start(job)               send the job to all workers, and launch missing ones
    replace(worker)           find the task that a worker died over, launch a worker of its number, requeue its tasks
    renew(worker)             launch another worker for a live worker's number; the old one drains
    resize(num_workers)       launch more workers, or drain surplus ones
    tell_of_wait(text, task)  report on stderr who has a task, its progress, and its stack
    kill_stalled_workers()    kill workers without progress; `replace` follows
    close()                   end all workers

A `Transport` and its workers encapsulate the difference between processes on pipes and Ray actors: how to launch, kill
and query a worker, and its last words (`deaths.Death`). Decisions are made here, by the counts of `pools.deaths`:

    death during start           too many: workers cannot start (`PoolBroken`)
    death in a batch             the batch is retried, and given up after ``restarts`` deaths
    death in an unknown task     (an actor of Ray, which leaves no heartbeat) all its tasks become crash suspects, which
                                 `RayPool` sends alone
    death between batches        too many without a result: something else ends workers (`PoolBroken`)
    death of the machine         no blame

A worker is *ready* when it has the job, *stalled* without progress for ``timeout`` seconds, and *hung* when killed for
that. A *draining* worker has lost its number, answers what it was sent, and ends. *Requeued* tasks wait for a worker. A
batch that cannot be sent or read has an error as its result.

Workers belong to the transport, which a finalizer may close without the pool.
"""

from __future__ import annotations

import pickle
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Generic, TypeVar

import cloudpickle
import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import Location
from sharded_loader.base.interrupts import pass_on, uninterrupted
from sharded_loader.base.system import write_to_stderr
from sharded_loader.engine.heartbeat import UNUSED, is_at
from sharded_loader.engine.messages import NOTHING, BatchTimes, Grouping, Job, Result, Task, unpack_result
from sharded_loader.engine.pool import PoolBroken, WorkerPool
from sharded_loader.memory.arena import RecentSizes
from sharded_loader.memory.codec import HostParts, decode_error
from sharded_loader.memory.publish import script_by_value
from sharded_loader.pools.deaths import Death, Deaths, Watch

_PLAIN = {int, str}


class Worker(ABC):
    """One worker, as the main process knows it.

    Attributes:
        number: from 0; its replacement gets the same number.
        tasks: unanswered tasks by (run, seq), oldest first.
        hung: it stalled, and was killed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[tuple[int, int], Task] = {}
        self.ready = False
        self.hung = False

    @property
    def who(self) -> str:
        return f"worker {self.number}"

    @abstractmethod
    def where(self) -> Sequence[int] | None:
        """Return its heartbeat; empty during start, None while it has nothing to do and is not watched."""

    @abstractmethod
    def cancel(self, run: int) -> None:
        """Drop the tasks of a run that have not begun."""

    @abstractmethod
    def tell(self) -> None:
        """Make it write what it reads, and its stack, to stderr. Impossible if it is stopped, or holds the GIL in C."""

    @abstractmethod
    def kill_stalled(self, seconds: float) -> None:
        """Make it write its stacks, and kill it, after this many seconds without progress."""


W = TypeVar("W", bound=Worker)

Init = Callable[[int], Any]
"""``worker_init_fn``."""


class Transport(ABC, Generic[W]):
    """Mechanism that starts and ends workers of one kind, without any policy.

    Attributes:
        num_workers: intended number of workers.
        workers: by number; empty before `start` and after `close`, which makes a new list.
        draining: workers that end when they have answered their tasks. They get no more.
    """

    num_workers: int
    workers: list[W]
    draining: list[W]

    @abstractmethod
    def start(self, job: Job) -> list[Task]:
        """Launch missing workers, and send the job to running ones. Return the tasks of relaunched workers."""

    def launch_all(self, job: Job) -> None:
        while len(self.workers) < self.num_workers:
            with uninterrupted():
                self.launch_as(len(self.workers), job)

    def launch_as(self, number: int, job: Job) -> None:
        """Launch the worker of this number, and put it into the list (a new one after a concurrent close)."""
        self.workers[number : number + 1] = [self.launch(number, job)]

    @abstractmethod
    def launch(self, number: int, job: Job) -> W:
        """Start one worker. It has the job, or is sent it."""

    @abstractmethod
    def drain(self, worker: W) -> None:
        """Drain a worker whose number is taken, or stop it at once if workers cannot drain."""

    @abstractmethod
    def explain_death(self, worker: W, error: BaseException | None) -> Death:
        """Return what is known of a worker that has ended, and reap it. ``error`` reported its end."""

    @abstractmethod
    def release(self, worker: W) -> None:
        """Release the resources of a dead worker."""

    def goes_on_without(self, worker: W, error: Exception) -> bool:
        """Return True if other workers continue without one that cannot start and is not replaced."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End all workers and release their resources."""


class SupervisedPool(WorkerPool, Generic[W]):
    """A pool of supervised out-of-process workers.

    Attributes:
        requeued: tasks that wait for a worker; those of the last worker that ended come first.
        rebuilt: (run, seq) of tasks whose worker ended, until another has done them; counted by the statistics.
    """

    shares_dataset = False
    _transport: Transport[W]

    def __init__(
        self, num_workers: int, worker_init_fn: Init | None, timeout: float | None, restarts: int, grouping: Grouping
    ) -> None:
        super().__init__(num_workers, worker_init_fn, timeout)
        self.restarts = check_int("restarts", restarts, 0, "a batch that kills this number of workers is given up")
        self._watch = Watch(self.timeout)
        self._grouping = grouping
        self._sizes = RecentSizes()
        self._reset()

    def _reset(self) -> None:
        self.requeued: deque[Task] = deque()
        self.deaths = Deaths(self.restarts)
        self.rebuilt: set[tuple[int, int]] = set()
        self._rejected: list[Result] = []  # results of tasks that could not be sent
        self._job: Job | None = None  # the workers' job
        self._cancelled: set[int] = set()
        self.room = 0

    def _start(self, job: Job) -> None:
        """Start the workers. Running ones get the new job before any later task."""
        self._job = job
        # Batches on their way need them after a notebook cell has defined others under their names. Not `isinstance`,
        # which asks a proxy object for its class.
        self._of_main = [cls for cls in [*vars(sys.modules["__main__"]).values()] if issubclass(type(cls), type)]
        self.deaths.begin_starts(proven=False)
        try:
            self.take_back(self._transport.start(job))
        except BaseException:
            self.close()
            raise
        self._count_room()

    @abstractmethod
    def _count_room(self) -> None:
        """Set `room`, and everything else that depends on the tasks of the workers."""

    def close(self) -> None:
        self._transport.close()
        self._reset()

    def record_start(self, worker: W) -> None:
        worker.ready = True
        self.deaths.begin_starts(proven=True)

    def _have(self, num_workers: int) -> None:
        transport, job, before = self._transport, self._job, self._transport.num_workers
        transport.num_workers = num_workers
        try:
            if job is None or not transport.workers:
                return
            while len(transport.workers) > num_workers:
                with uninterrupted():
                    self._drain(transport.workers.pop())
            if job.stream is not None and num_workers < job.stream.parts <= before:
                # Each worker reads one part from the dataset itself; to read several it needs copies of a fresh one.
                for worker in list(transport.workers):
                    self.renew(worker)
            transport.launch_all(job)
        except Exception:
            transport.num_workers = len(transport.workers)
            raise
        finally:
            self.num_workers = transport.num_workers
            self._count_room()

    def renew(self, worker: W) -> None:
        """Launch a replacement for a live worker, which drains."""
        assert self._job is not None  # set while workers run
        with uninterrupted():
            self._transport.launch_as(worker.number, self._job)
            self._drain(worker)

    def _drain(self, worker: W) -> None:
        self._transport.drain(worker)
        if worker not in self._transport.draining:
            self.take_back(worker.tasks.values())
            worker.tasks.clear()

    def cancel(self, run: int) -> None:
        self.requeued = deque(task for task in self.requeued if task.run != run)
        workers = [*self._transport.workers, *self._transport.draining]
        self._cancelled |= {run}
        self._cancelled &= {task.run for worker in workers for task in worker.tasks.values()}
        for worker in workers:
            if any(task.run == run for task in worker.tasks.values()):
                worker.cancel(run)

    def take_back(self, tasks: Iterable[Task]) -> None:
        """Requeue tasks that were sent, before those that were never sent."""
        self.requeued.extendleft(reversed([task for task in tasks if task.run not in self._cancelled]))

    # -- workers that end, or stand still -------------------------------------------------------------------

    def replace(self, worker: W, error: BaseException | None = None) -> list[Result]:
        """Replace a worker that has ended, once, and requeue its tasks. Draining workers have no successor.

        Returns:
            The error of a batch that has killed too many workers, and empty results for batches lost with it.

        Raises:
            PoolBroken: workers die during start or between batches, without a result in between. The pool is closed.
        """
        transport = self._transport
        is_draining = worker in transport.draining
        if not is_draining and worker not in transport.workers:
            return []
        with uninterrupted():
            death = transport.explain_death(worker, error)
        if self._job is None:
            return []  # a signal handler, or another thread, has closed the pool
        results: list[Result] = []
        if death.is_of_machine or (is_draining and not worker.tasks):
            pass
        elif not worker.ready:
            if self.deaths.record_start_death(death):
                return self.give_up_worker(worker, death.error_in_start())
        elif death.heartbeat is None and worker.tasks:
            self.deaths.suspect(worker.tasks)
        elif task := next((one for one in worker.tasks.values() if is_at(death.heartbeat or UNUSED, one)), None):
            results = self._retry_or_give_up(worker, task, death)
        elif self.deaths.record_idle_death(worker.number):
            return self.give_up_worker(worker, death.error_between_batches())
        with uninterrupted():
            transport.release(worker)
            self.rebuilt.update(worker.tasks)
            if is_draining:
                transport.draining.remove(worker)
            else:
                transport.launch_as(worker.number, self._job)
            self.take_back(worker.tasks.values())
        if not is_draining:
            fate = f"{death.who} made no progress for too long (timeout), and was killed" if death.hung else death
            self.notices.record("replaced_workers", f"{fate}. Another worker has its place")
        return results

    def give_up_worker(self, worker: W, error: Exception) -> list[Result]:
        """Continue without a worker that cannot work and would be replaced in vain, or close and raise PoolBroken."""
        if self._transport.goes_on_without(worker, error):
            return []
        self.close()
        raise PoolBroken(error)

    def _retry_or_give_up(self, worker: W, task: Task, death: Death) -> list[Result]:
        """Handle a death over a task. Return the results of abandoned batches."""
        if not self.deaths.record_batch_death(task):
            # Also if the sample is known: another worker, whose heartbeat the error will quote, may die elsewhere.
            worker.tasks[task.run, task.seq] = replace(task, is_suspect=True)
            return []
        lost = []
        # Later batches of the same part can only be reached by reading this one again. Lanes of a map-style dataset
        # with a state are not parts.
        if self._job is not None and self._job.stream is not None and task.part is not None:
            waiting = [*self.requeued, *worker.tasks.values()]
            lost = [other for other in waiting if task.part.is_same(other.part) and other is not task]
        results = [Result(task.run, task.seq, error=death.error_over(task, max(1, self.restarts), self.timeout))]
        results += [Result(other.run, other.seq, NOTHING) for other in lost]
        ended = {(result.run, result.seq) for result in results}
        self.requeued = deque(other for other in self.requeued if (other.run, other.seq) not in ended)
        for run, seq in ended:
            worker.tasks.pop((run, seq), None)
            self.deaths.resolve(run, seq)
        return results

    def tell_of_wait(self, text: str, task: Task | None) -> None:
        # Draining workers first: they have had their tasks longest.
        workers, key = [*self._transport.draining, *self._transport.workers], task and (task.run, task.seq)
        has = next((one for one in workers if key in one.tasks), None)
        worker = has or max(workers, key=lambda one: len(one.tasks))  # not empty during a wait
        text += f", which {worker.who} has" if has else f". No worker has it yet: all are busy, such as {worker.who}"
        if not worker.ready:
            text += ". It is not ready: it imports modules, unpickles the dataset, or runs worker_init_fn"
        write_to_stderr(f"{text}. Its stack:\n")
        worker.tell()

    def kill_stalled_workers(self) -> None:
        """Kill stalled workers. `replace` follows when they have ended."""
        if self.timeout is None:
            return
        watched: list[tuple[W, Sequence[int]]] = []
        for worker in (*self._transport.workers, *self._transport.draining):
            heartbeat = None if worker.hung else worker.where()
            if heartbeat is not None:
                watched.append((worker, heartbeat))
        for worker in self._watch.stalled(watched):
            worker.hung = True
            worker.kill_stalled(self.timeout)

    # -- what is sent, and what has come --------------------------------------------------------------------

    def _reject(self, task: Task, raised: Exception) -> None:
        """Turn an exception while sending a task into the result of its batch."""
        error = task.error(raised, "while the batch was sent to a worker")
        self._rejected.append(Result(task.run, task.seq, error=error))

    def _result(self, reply: tuple[Any, ...], buffers: list[Any], task: Task | None) -> Result:
        """Decode a reply (`messages.unpack_reply`) with its buffers."""
        run, seq, wanted, _, pickled, _, times = reply
        result = decode_result(run, seq, pickled, buffers, task, times)
        if self.rebuilt and (run, seq) in self.rebuilt:
            self.rebuilt.discard((run, seq))
            result = replace(result, rebuilt=True)
        if result.seconds:  # not dropped
            self._sizes.note(wanted)
            self.group = self._grouping.note(result.seconds, self._sizes.wanted)
        if self.deaths.unresolved:
            self.deaths.resolve(run, seq)
        return result


def fields_of(task: Task, *, forked: bool) -> bytes | tuple[Any, ...]:
    """Return the fields of a task to send (`messages.task_of`), pickled if it has keys of the user's own classes.

    Pickling them separately makes an unreadable one that batch's error; otherwise all tasks of a message share a
    pickle. A ``forked`` worker has the dataset's classes; a spawned one lacks the script, so they are sent by value.
    """
    known = (isinstance(shard, np.ndarray) or _PLAIN.issuperset(map(type, shard)) for shard in task.shards)
    if (task.part is not None and task.part.point.state is None) or all(known):
        return task.fields
    try:
        if forked:
            try:
                return pickle.dumps(task.fields, protocol=5)
            except Exception as error:  # a class that cannot be imported is sent by value
                pass_on(error)
        with script_by_value():
            return bytes(cloudpickle.dumps(task.fields, protocol=5))
    except Exception as error:
        pass_on(error)
        text = f"the indices of a batch cannot be sent to a worker process ({error}): let the sampler yield"
        raise TypeError(f"{text} integers or strings, or read with threads (thread_pool=True)") from error


def decode_result(
    run: int, seq: int, pickled: memoryview, buffers: list[Any], task: Task | None, times: BatchTimes | None = None
) -> Result:
    """Return the result in a reply. If it cannot be unpickled here, that is its batch's error."""
    try:
        reply = pickle.loads(pickled, buffers=buffers)  # made by `codec.encode`
        if type(reply) is tuple:
            return unpack_result(run, seq, reply, buffers, times)
    except Exception as error:
        pass_on(error)
        failure = TypeError(
            f"the batch left its worker, but cannot be unpickled in this process ({type(error).__name__}: {error}): "
            f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
        )
        failure.__cause__ = error
        if task is not None:
            Location(task.epoch, seq).note(failure, samples=task.shards[0])
        return Result(run, seq, error=failure)
    result: Any = reply.reply if type(reply) is HostParts else reply
    failed = None if result.error is None else decode_error(result.error)
    skipped = tuple((index, decode_error(encoded)) for index, encoded in result.skipped)
    return replace(result, error=failed, skipped=skipped, times=times)  # type: ignore[no-any-return]
