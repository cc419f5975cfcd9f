"""The one place where workers are started, replaced and given up: processes on pipes, and actors of Ray alike.

    start(new_job)            every worker has the job, or is sent it; those that are lacking are launched
    settle(worker, run, seq)  a task is done
    replace(worker)           a worker has ended: it is buried, blamed or not, and another gets its number and its tasks
    renew(worker)             a worker lives, but another gets its number; that one answers what it has, and ends
    resize(num_workers)       more are launched; those that are too many answer what they have, and end
    tell_of_wait(text, task)  who has a task, what it is at, and its stack, on stderr
    stop_late()               workers that stand still are killed; `replace` follows
    close()                   no worker runs

A `Transport` does what differs: it launches a worker, kills it, and knows its last words (`deaths.Death`). What a death
means is decided here, by the counts of `pools.deaths`:

    it was starting                     too many of these: workers cannot start (`PoolBroken`)
    it was in a batch                   the batch is built again; after ``restarts`` deaths it is given up
    nobody knows in which of its tasks  all of them are suspects, and travel alone from now on
    it was between batches              too many of these, and no batch: something else ends workers (`PoolBroken`)
    its machine has gone                nobody is to blame

Words of all pools: a *worker* reads. To *launch* one is to start it. It is *ready* when it has the job. One that makes
no progress for ``timeout`` seconds is *late*; it is *hung* when it was killed for that. A dead worker is *replaced*. A
batch that has killed too many workers is *given up*. Tasks that wait for a worker are *requeued*. A worker that has no
number any more and answers what it was sent is *leaving*.

Owns no bytes and no threads: workers belong to the transport, which a finalizer may close without this object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.notices import Notices
from sharded_loader.base.system import write_to_stderr
from sharded_loader.engine.board import is_at
from sharded_loader.engine.messages import NOTHING, Job, NewJob, Result, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.memory.codec import classes_of_main
from sharded_loader.pools.deaths import (
    Death,
    Deaths,
    Watch,
    died,
    died_idle,
    died_in_start,
    timed_out,
    unreachable_after,
)


class Worker:
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


W = TypeVar("W", bound=Worker)


class Transport(ABC, Generic[W]):
    """How workers of one kind are reached. It decides nothing.

    Attributes:
        num_workers: how many there are to be.
        workers: the workers, by number; empty before `start` and after `close`, which makes a new list.
        leaving: those that end when they have answered what they were sent. They get no other task.
    """

    num_workers: int
    workers: list[W]
    leaving: list[W]

    @abstractmethod
    def start(self, new: NewJob) -> list[Task]:
        """Launch the workers that are lacking, and send the job to those that run.

        Returns:
            Tasks of workers that could not take another job, and were launched again.
        """

    def launch_all(self, new: NewJob) -> None:
        """Launch those that are lacking."""
        while len(self.workers) < self.num_workers:
            with uninterrupted():
                self.launch_as(len(self.workers), new)

    def launch_as(self, number: int, new: NewJob) -> None:
        """Launch the worker of this number, and put it into the list.

        If another thread has closed the transport meanwhile, that is its new list, which the end of the step closes.
        """
        self.workers[number : number + 1] = [self.launch(number, new)]

    @abstractmethod
    def launch(self, number: int, new: NewJob) -> W:
        """Start one worker, which has the job, or is sent it."""

    @abstractmethod
    def retire(self, worker: W) -> None:
        """Another worker has the number of this one. It is `leaving`; where workers cannot, it is stopped at once."""

    @abstractmethod
    def send_cancel(self, worker: W, run: int) -> None:
        """Have a worker drop the tasks of a run that have not begun."""

    @abstractmethod
    def where(self, worker: W) -> Sequence[int] | None:
        """The board of a worker; empty: it is in its start. None: it is not watched, because it has nothing to do."""

    @abstractmethod
    def tell(self, worker: W) -> Callable[[], None] | None:
        """Have a worker write to stderr what it reads, and its stack.

        Returns:
            What to call `ANSWER_SECONDS` later: it looks whether the worker has done so. None: that is not known.
        """

    @abstractmethod
    def kill_late(self, late: Sequence[W], seconds: float) -> None:
        """Have workers that made no progress for so long write their stacks, and kill them."""

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


class Supervisor(Generic[W]):
    """Keeps the workers of a pool running.

    Args:
        transport: reaches the workers.
        restarts, timeout: of the pool.

    Attributes:
        requeued: tasks that wait for a worker, the oldest first.
        deaths: what workers have died of.
        notices: is told of each worker that is replaced.
        rebuilt: run and seq of the tasks that a worker had when it ended, until they are done.
        new: what the workers start with; None: none run.
    """

    def __init__(self, transport: Transport[W], restarts: int, timeout: float | None) -> None:
        self.requeued: deque[Task] = deque()
        self.deaths = Deaths(restarts)
        self.watch = Watch(timeout)
        self.notices = Notices()
        self.rebuilt: set[tuple[int, int]] = set()
        self._transport = transport
        self._restarts = restarts
        self.new: NewJob | None = None
        self._classes: list[type] = []
        self._cancelled: set[int] = set()

    def start(self, new: NewJob) -> None:
        """Start the workers. Those that run already get the new job before any later task."""
        self.new, self._classes = new, classes_of_main()
        self.deaths.new_job()
        try:
            self.take_back(self._transport.start(new))
        except BaseException:
            self.close()
            raise

    @property
    def job(self) -> Job | None:
        """What the workers read; None: none run."""
        return None if self.new is None else self.new.job

    @property
    def num_workers(self) -> int:
        """How many workers there are, or are to be when they start."""
        return self._transport.num_workers

    def close(self) -> None:
        """Stop the workers, and forget what they had to do."""
        self._transport.close()
        self.requeued.clear()
        self.rebuilt.clear()
        self.deaths = Deaths(self._restarts)
        self.new, self._classes = None, []
        self._cancelled.clear()

    def record_start(self, worker: W) -> None:
        """A worker has its job, and may be sent tasks."""
        worker.ready = True
        self.deaths.record_start()

    def resize(self, num_workers: int) -> None:
        """Have another number of workers.

        Raises:
            Exception: another one cannot be started. There are as many as the transport says.
        """
        transport, new, before = self._transport, self.new, self._transport.num_workers
        transport.num_workers = num_workers
        if new is None or not transport.workers:
            return
        while len(transport.workers) > num_workers:
            with uninterrupted():
                self._retire(transport.workers.pop())
        try:
            if new.job.stream is not None and num_workers < new.job.stream.parts <= before:
                # Each of them reads one part, of the dataset itself. To read several it needs copies of a new one.
                for worker in list(transport.workers):
                    self.renew(worker)
            transport.launch_all(new)
        except Exception:
            transport.num_workers = len(transport.workers)
            raise

    def renew(self, worker: W) -> None:
        """Another worker takes the number of one that lives."""
        assert self.new is not None  # its workers run
        with uninterrupted():
            self._transport.launch_as(worker.number, self.new)
            self._retire(worker)

    def _retire(self, worker: W) -> None:
        self._transport.retire(worker)
        if worker not in self._transport.leaving:
            self.take_back(worker.tasks.values())
            worker.tasks.clear()

    def cancel(self, run: int) -> None:
        """Drop the tasks of a run that have not begun."""
        self.requeued = deque(task for task in self.requeued if task.run != run)
        workers = [*self._transport.workers, *self._transport.leaving]
        self._cancelled |= {run}
        self._cancelled &= {task.run for worker in workers for task in worker.tasks.values()}
        for worker in workers:
            if any(task.run == run for task in worker.tasks.values()):
                self._transport.send_cancel(worker, run)

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
        if self.new is None:
            return []  # a signal handler, or another thread, has closed the pool
        results: list[Result] = []
        if death.is_of_machine or (is_leaving and not worker.tasks):
            pass
        elif not worker.ready:
            if self.deaths.record_start_death(death):
                return self.give_up_worker(worker, died_in_start(death))
        elif death.board is None and worker.tasks:
            self.deaths.suspect(worker.tasks)
        elif (task := _task_at(death.board, worker.tasks.values())) is not None:
            results = self._retry_or_give_up(worker, task, death)
        elif self.deaths.record_idle_death(worker.number):
            return self.give_up_worker(worker, died_idle(death))
        with uninterrupted():
            transport.release(worker)
            self.rebuilt.update(worker.tasks)
            if is_leaving:
                transport.leaving.remove(worker)
            else:
                transport.launch_as(worker.number, self.new)
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
        key, board = (task.run, task.seq), death.board or ()
        if not self.deaths.record_batch_death(task):
            # Also where the sample is known: the last worker, whose board the error quotes, may note no cheap samples.
            worker.tasks[key] = task._replace(careful=True)
            return []
        assert self.new is not None  # its workers read
        tries, timeout = max(1, self._restarts), self.watch.timeout
        if death.hung and timeout is not None:
            error: Exception = timed_out(death.who, timeout, task, board, tries, killed=True)
        else:
            error = died(death, task, board, tries)
        del worker.tasks[key]
        lost = unreachable_after(task, [*self.requeued, *worker.tasks.values()], self.new.job)
        results = [Result(task.run, task.seq, error=error)]
        results += [Result(other.run, other.seq, NOTHING) for other in lost]
        ended = {(result.run, result.seq) for result in results}
        self.requeued = deque(other for other in self.requeued if (other.run, other.seq) not in ended)
        for run, seq in ended:
            worker.tasks.pop((run, seq), None)
            self.deaths.settle(run, seq)
        return results

    def tell_of_wait(self, text: str, task: Task | None) -> Callable[[], None] | None:
        """See `Pool.tell_of_wait`."""
        # First those that are late: they have it for longest.
        workers, key = [*self._transport.leaving, *self._transport.workers], task and (task.run, task.seq)
        has = next((one for one in workers if key in one.tasks), None)
        worker = has or max(workers, key=lambda one: len(one.tasks))  # while it waits there are some
        at = _task_at(self._transport.where(worker), worker.tasks.values())
        text += f", which {worker.who} has" if has else f". No worker has it yet: all are busy, such as {worker.who}"
        if not worker.ready:
            text += ". It is not ready: it imports modules, unpickles the dataset, or runs worker_init_fn"
        elif at is not None and (at.run, at.seq) != key:
            text += f". It is still at epoch {at.epoch}, batch {at.seq}"
        write_to_stderr(f"{text}. Its stack:\n")
        return self._transport.tell(worker)

    def stop_late(self) -> None:
        """Kill the workers that stand still. `replace` follows when they have ended."""
        if (timeout := self.watch.timeout) is None:
            return
        watched: list[tuple[W, Sequence[int]]] = []
        for worker in (*self._transport.workers, *self._transport.leaving):
            board = None if worker.hung else self._transport.where(worker)
            if board is not None:
                watched.append((worker, board))
        if late := self.watch.late(watched):
            for worker in late:
                worker.hung = True
            self._transport.kill_late(late, timeout)


def _task_at(board: Sequence[int] | None, tasks: Iterable[Task]) -> Task | None:
    """The task that a board names; None if it names none of these."""
    return next((task for task in tasks if is_at(board, task)), None) if board else None
