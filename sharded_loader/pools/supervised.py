"""Pools whose workers are other processes, and the one place where those are started, replaced and given up.

    _start(job)               every worker has the job, or is sent it; those that are lacking are launched
    replace(worker)           a worker has ended: it is buried, blamed or not, and another gets its number and its tasks
    renew(worker)             a worker lives, but another gets its number; that one answers what it has, and ends
    resize(num_workers)       more are launched; those that are too many answer what they have, and end
    tell_of_wait(text, task)  who has a task, what it is at, and its stack, on stderr
    stop_late()               workers that stand still are killed; `replace` follows
    close()                   no worker runs

    fields_of(task) -> what is sent of it
    reply (`messages.pack_reply`) -> decode_result -> Result, its exceptions as exceptions

A `Transport` and its workers do what differs between processes on pipes and actors of Ray: a worker is launched, killed
and asked, and has its last words (`deaths.Death`). What a death means is decided here, by the counts of `pools.deaths`:

    it was starting                     too many of these: workers cannot start (`PoolBroken`)
    it was in a batch                   the batch is built again; after ``restarts`` deaths it is given up
    nobody knows in which of its tasks  all of them are suspects, and travel alone from now on
    it was between batches              too many of these, and no batch: something else ends workers (`PoolBroken`)
    its machine has gone                nobody is to blame

Words of all pools: a *worker* reads. To *launch* one is to start it. It is *ready* when it has the job. One that makes
no progress for ``timeout`` seconds is *late*; it is *hung* when it was killed for that. A dead worker is *replaced*. A
batch that has killed too many workers is *given up*. Tasks that wait for a worker are *requeued*. A worker that has no
number any more and answers what it was sent is *leaving*. A batch that cannot be sent or read has an error as its
result.

Workers belong to the transport, which a finalizer may close without the pool.
"""

from __future__ import annotations

import pickle
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
from sharded_loader.memory.codec import SetApart, decode_error
from sharded_loader.memory.publish import script_by_value
from sharded_loader.pools.deaths import Death, Deaths, Watch

_PLAIN = {int, str}


class Worker(ABC):
    """One worker, as the main process knows it.

    Attributes:
        number: from 0. The worker that replaces it has the same.
        tasks: what it was sent and has not answered, by run and seq, the oldest first.
        ready: it has its job.
        hung: it was late, and was killed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.tasks: dict[tuple[int, int], Task] = {}
        self.ready = False
        self.hung = False

    @property
    def who(self) -> str:
        """How messages name it."""
        return f"worker {self.number}"

    @abstractmethod
    def where(self) -> Sequence[int] | None:
        """Its heartbeat; empty: it is in its start. None: it is not watched, because it has nothing to do."""

    @abstractmethod
    def cancel(self, run: int) -> None:
        """Have it drop the tasks of a run that have not begun."""

    @abstractmethod
    def tell(self) -> None:
        """Have it write to stderr what it reads, and its stack. One that is stopped, or holds the GIL in C, cannot."""

    @abstractmethod
    def kill_late(self, seconds: float) -> None:
        """Have it write its stacks, and kill it: it has made no progress for so long."""


W = TypeVar("W", bound=Worker)

Init = Callable[[int], Any]
"""``worker_init_fn``."""


class Transport(ABC, Generic[W]):
    """How workers of one kind are started and ended. It decides nothing.

    Attributes:
        num_workers: how many there are to be.
        workers: the workers, by number; empty before `start` and after `close`, which makes a new list.
        leaving: those that end when they have answered what they were sent. They get no other task.
    """

    num_workers: int
    workers: list[W]
    leaving: list[W]

    @abstractmethod
    def start(self, job: Job) -> list[Task]:
        """Launch the workers that are lacking, and send the job to those that run.

        Returns:
            Tasks of workers that could not take another job, and were launched again.
        """

    def launch_all(self, job: Job) -> None:
        """Launch those that are lacking."""
        while len(self.workers) < self.num_workers:
            with uninterrupted():
                self.launch_as(len(self.workers), job)

    def launch_as(self, number: int, job: Job) -> None:
        """Launch the worker of this number, and put it into the list.

        If another thread has closed the transport meanwhile, that is its new list, which the end of the step closes.
        """
        self.workers[number : number + 1] = [self.launch(number, job)]

    @abstractmethod
    def launch(self, number: int, job: Job) -> W:
        """Start one worker, which has the job, or is sent it."""

    @abstractmethod
    def retire(self, worker: W) -> None:
        """Another worker has the number of this one. It is `leaving`; where workers cannot, it is stopped at once."""

    @abstractmethod
    def last_words(self, worker: W, error: BaseException | None) -> Death:
        """What is known of a worker that has ended. It is reaped, if that is for this process to do.

        Args:
            worker: the one.
            error: what told of its end.
        """

    @abstractmethod
    def release(self, worker: W) -> None:
        """Give back what a worker has left."""

    def goes_on_without(self, worker: W, error: Exception) -> bool:
        """Whether the others read without a worker that cannot start, and is not replaced."""
        return False

    @abstractmethod
    def close(self) -> None:
        """End all workers, and give back what belongs to them."""


class SupervisedPool(WorkerPool, Generic[W]):
    """A pool whose workers are other processes. It keeps them running.

    Args:
        num_workers, worker_init_fn, timeout, restarts: of the pool.
        grouping: how many tasks travel together.

    Attributes:
        requeued: tasks that wait for a worker, the oldest first.
        deaths: what workers have died of.
        rebuilt: run and seq of the tasks that a worker had when it ended, until they are done.

    Raises:
        ValueError, TypeError: as a `WorkerPool`, and for ``restarts``.
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
        self._forget()

    def _forget(self) -> None:
        """There are no workers, and nothing is to be done."""
        self.requeued: deque[Task] = deque()
        self.deaths = Deaths(self.restarts)
        self.rebuilt: set[tuple[int, int]] = set()
        self._rejected: list[Result] = []  # of tasks that could not be sent
        self._job: Job | None = None  # what the workers start with
        self._cancelled: set[int] = set()
        self.room = 0

    def _start(self, job: Job) -> None:
        """Start the workers. Those that run already get the new job before any later task."""
        self._job = job
        self.deaths.begin_starts(proven=False)
        try:
            self.take_back(self._transport.start(job))
        except BaseException:
            self.close()
            raise
        self._count_room()

    @abstractmethod
    def _count_room(self) -> None:
        """Set `room`, and what else follows from the tasks that the workers have."""

    def close(self) -> None:
        self._transport.close()
        self._forget()

    def record_start(self, worker: W) -> None:
        """A worker has its job, and may be sent tasks."""
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
                    self._retire(transport.workers.pop())
            if job.stream is not None and num_workers < job.stream.parts <= before:
                # Each of them reads one part, of the dataset itself. To read several it needs copies of a new one.
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
        """Another worker takes the number of one that lives."""
        assert self._job is not None  # its workers run
        with uninterrupted():
            self._transport.launch_as(worker.number, self._job)
            self._retire(worker)

    def _retire(self, worker: W) -> None:
        self._transport.retire(worker)
        if worker not in self._transport.leaving:
            self.take_back(worker.tasks.values())
            worker.tasks.clear()

    def cancel(self, run: int) -> None:
        self.requeued = deque(task for task in self.requeued if task.run != run)
        workers = [*self._transport.workers, *self._transport.leaving]
        self._cancelled |= {run}
        self._cancelled &= {task.run for worker in workers for task in worker.tasks.values()}
        for worker in workers:
            if any(task.run == run for task in worker.tasks.values()):
                worker.cancel(run)

    def take_back(self, tasks: Iterable[Task]) -> None:
        """Tasks that were sent wait again. They are older than all that wait."""
        self.requeued.extendleft(reversed([task for task in tasks if task.run not in self._cancelled]))

    # -- workers that end, or stand still -------------------------------------------------------------------

    def replace(self, worker: W, error: BaseException | None = None) -> list[Result]:
        """A worker has ended: another gets its number, and its tasks wait.

        Args:
            worker: the one. If it was replaced before, nothing happens. If it was leaving, no other one is launched.
            error: what told of its end.

        Returns:
            The error of the batch that has killed too many workers, and no batch for those that end with it.

        Raises:
            PoolBroken: workers die without having done anything; they are closed.
        """
        transport = self._transport
        is_leaving = worker in transport.leaving
        if not is_leaving and worker not in transport.workers:
            return []
        with uninterrupted():
            death = transport.last_words(worker, error)
        if self._job is None:
            return []  # a signal handler, or another thread, has closed the pool
        results: list[Result] = []
        if death.is_of_machine or (is_leaving and not worker.tasks):
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
            if is_leaving:
                transport.leaving.remove(worker)
            else:
                transport.launch_as(worker.number, self._job)
            self.take_back(worker.tasks.values())
        if not is_leaving:
            self.notices.happened("replaced_workers", f"{death.fate}. Another worker has its place")
        return results

    def give_up_worker(self, worker: W, error: Exception) -> list[Result]:
        """A worker cannot do anything, and would be replaced for nothing.

        Raises:
            PoolBroken: no other one reads without it.
        """
        if self._transport.goes_on_without(worker, error):
            return []
        self.close()
        raise PoolBroken(error)

    def _retry_or_give_up(self, worker: W, task: Task, death: Death) -> list[Result]:
        """A worker died over a task. The results of those that are given up."""
        if not self.deaths.record_batch_death(task):
            # Also if the sample is known: the last worker, whose heartbeat the error quotes, may record no samples.
            worker.tasks[task.run, task.seq] = replace(task, isolated=True)
            return []
        lost = []
        # To reach later batches of the same part, a worker would have to read this one again. The lanes of a map-style
        # dataset with a state are no parts.
        if self._job is not None and self._job.stream is not None and task.part is not None:
            waiting = [*self.requeued, *worker.tasks.values()]
            lost = [other for other in waiting if task.part.is_same(other.part) and other is not task]
        results = [Result(task.run, task.seq, error=death.error_over(task, max(1, self.restarts), self.timeout))]
        results += [Result(other.run, other.seq, NOTHING) for other in lost]
        ended = {(result.run, result.seq) for result in results}
        self.requeued = deque(other for other in self.requeued if (other.run, other.seq) not in ended)
        for run, seq in ended:
            worker.tasks.pop((run, seq), None)
            self.deaths.settle(run, seq)
        return results

    def tell_of_wait(self, text: str, task: Task | None) -> None:
        # First those that are late: they have it for longest.
        workers, key = [*self._transport.leaving, *self._transport.workers], task and (task.run, task.seq)
        has = next((one for one in workers if key in one.tasks), None)
        worker = has or max(workers, key=lambda one: len(one.tasks))  # while it waits there are some
        text += f", which {worker.who} has" if has else f". No worker has it yet: all are busy, such as {worker.who}"
        if not worker.ready:
            text += ". It is not ready: it imports modules, unpickles the dataset, or runs worker_init_fn"
        write_to_stderr(f"{text}. Its stack:\n")
        worker.tell()

    def stop_late(self) -> None:
        """Kill the workers that stand still. `replace` follows when they have ended."""
        if self.timeout is None:
            return
        watched: list[tuple[W, Sequence[int]]] = []
        for worker in (*self._transport.workers, *self._transport.leaving):
            heartbeat = None if worker.hung else worker.where()
            if heartbeat is not None:
                watched.append((worker, heartbeat))
        for worker in self._watch.late(watched):
            worker.hung = True
            worker.kill_late(self.timeout)

    # -- what is sent, and what has come --------------------------------------------------------------------

    def _reject(self, task: Task, raised: Exception) -> None:
        """A task cannot be sent to a worker: that is the error of its batch."""
        error = task.error(raised, "while the batch was sent to a worker")
        self._rejected.append(Result(task.run, task.seq, error=error))

    def _result(self, reply: tuple[Any, ...], buffers: list[Any], task: Task | None) -> Result:
        """The result in a reply (`messages.unpack_reply`), whose buffers are here."""
        run, seq, wanted, _, pickled, _, times = reply
        result = decode_result(run, seq, pickled, buffers, task, times)
        if self.rebuilt and (run, seq) in self.rebuilt:
            self.rebuilt.discard((run, seq))
            result = replace(result, rebuilt=True)
        if result.seconds:  # it was not dropped
            self._sizes.note(wanted)
            self.group = self._grouping.note(result.seconds, self._sizes.wanted)
        if self.deaths.unsettled:
            self.deaths.settle(run, seq)
        return result


def fields_of(task: Task, *, forked: bool) -> bytes | tuple[Any, ...]:
    """What a worker is sent of a task, for `messages.task_of`: its pickle, if it holds keys of the user's own classes.

    So one that cannot be read is that batch's error. The others of a message go into one pickle.

    Args:
        task: what a worker is sent.
        forked: the worker was forked, and has the very classes that the dataset knows. One that was spawned does not
            have the script that they come from: they go by value, as they did with the dataset.
    """
    known = (isinstance(shard, np.ndarray) or _PLAIN.issuperset(map(type, shard)) for shard in task.shards)
    if (task.part is not None and task.part.point.state is None) or all(known):
        return task.fields
    try:
        if forked:
            try:
                return pickle.dumps(task.fields, protocol=5)
            except Exception as error:  # a class that has no name to be found by goes by value
                pass_on(error)
        with script_by_value():
            return bytes(cloudpickle.dumps(task.fields, protocol=5))
    except Exception as error:
        pass_on(error)
        raise TypeError(
            f"the indices of a batch cannot be sent to a worker process ({error}): let the sampler yield integers "
            f"or strings, or read with threads (thread_pool=True)"
        ) from error


def decode_result(
    run: int, seq: int, pickled: memoryview, buffers: list[Any], task: Task | None, times: BatchTimes | None = None
) -> Result:
    """The result in a reply; if it cannot be unpickled here, that is its batch's error."""
    try:
        reply = pickle.loads(pickled, buffers=buffers)  # what `codec.encode` has made
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
    result: Any = reply.reply if type(reply) is SetApart else reply
    failed = None if result.error is None else decode_error(result.error)
    skipped = tuple((index, decode_error(encoded)) for index, encoded in result.skipped)
    return replace(result, error=failed, skipped=skipped, times=times)  # type: ignore[no-any-return]
