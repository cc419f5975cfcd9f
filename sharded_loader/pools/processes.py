"""Processes that read: one pipe each, supervised, replaced when interrupted.

    trainer                                             worker i (workers/worker.py)
    submit -> a worker's link        =======socket==>   receiver thread -> inbox -> Reader
              (and a slot of the arena)                                               | writes
    wait <- inbox of each link            <==socket==   encoded result      arena slot v
         <- arrays over the slot, lent out

How large a slot must be is learned from the batches that have come lately (`memory.arena`): the first ones, and
what does not fit, travel through the pipe. A slot belongs to its worker until that has answered or is reaped, then
to the user until nothing refers to it.

Not a ``Pool`` of ``multiprocess``: that one replaces a dead worker and forgets its task, and the caller waits
for ever. Here no lock or queue is shared between processes, so a worker can die anywhere and stops nobody.

A worker holds at most one task beyond the one it is doing; while batches are cheap it is groups of tasks, each of
which goes in one message (`engine.grouping`).

What can go wrong, and what then:
  * a worker dies: another takes its place and makes its batches again; a batch that has killed ``restarts`` of them
    is a `WorkerDiedError` in its place (`workers.supervision`). `wait` returns 3 ms (spawn) or 9 ms (fork) after the
    kill, most of them the kernel's for the process that ends, on two cores with three times as much to do;
  * a worker stands still for ``timeout`` seconds: it is killed, and then as above, even if that does not end it;
  * a worker cannot start (unpicklable dataset, ``worker_init_fn`` raises): that error, and the pool is closed;
  * an exception strikes inside a verb (a Ctrl-C): the pipeline closes the pool and starts it again;
  * a reply cannot be unpickled here: that is the error of its batch, and iteration goes on.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sharded_loader.batching.protocol import Empty
from sharded_loader.engine.board import IN_BULK, SAMPLE, is_at
from sharded_loader.engine.grouping import HELD, Grouping
from sharded_loader.engine.messages import (
    CANCEL,
    CRASHED,
    FAILED,
    JOB,
    READY,
    Job,
    NewJob,
    Result,
    Task,
    pack_head,
    pack_tasks,
    unpack_head,
    unpack_reply,
)
from sharded_loader.engine.pool import Pool, PoolBroken, check_init_fn, check_num_workers, check_timeout
from sharded_loader.errors import Location, as_batch_error, as_exception
from sharded_loader.interrupts import uninterrupted
from sharded_loader.memory import publish
from sharded_loader.memory.arena import RecentSizes, Register
from sharded_loader.memory.classes import classes_of_main
from sharded_loader.memory.codec import decode
from sharded_loader.memory.exceptions import decode_error
from sharded_loader.memory.segments import Slot, chosen_backend
from sharded_loader.pools.translation import decode_result, own_pickle
from sharded_loader.sampling.base import check_int
from sharded_loader.system import processes_here
from sharded_loader.workers.link import Link, Poller
from sharded_loader.workers.resources import WorkerHandle, WorkerResources
from sharded_loader.workers.start import choose_start_method, launch, send_segment, start_forkserver
from sharded_loader.workers.supervision import (
    Death,
    Deaths,
    Silent,
    Watch,
    died,
    died_idle,
    died_in_start,
    timed_out,
)

SLOT_BYTES = 32768
"""Batches below this go through the pipe: a slot saves them one copy, which costs less than its bookkeeping."""


class ProcessPool(Pool):
    """Read in worker processes.

    Args:
        num_workers: how many processes.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``. None: what was set with
            ``multiprocessing.set_start_method``, else fork on Linux and spawn elsewhere.
        worker_init_fn: called with the worker's number, once in each, before it reads.
        timeout: seconds without progress on one sample, after which its worker is killed and the batch made again.
            Counted while the loop waits for a batch. None: never. A worker that starts is given ten minutes, if
            that is longer.
        restarts: a batch that kills so many workers is given up: `WorkerDiedError`, or `WorkerTimeoutError`, in its
            place. 0 and 1: at the first death.
        max_bytes: bound on the shared memory that batches lie in. None: a quarter of what is free at the first
            epoch, divided by LOCAL_WORLD_SIZE. Past it batches are copied out, and the loader goes on.

    Raises:
        ValueError: a number out of its range, or no such start method here.
        TypeError: a number that is none, or a ``worker_init_fn`` that cannot be called.

    Example:
        >>> from sharded_loader import ProcessPool, ShardedDataLoader
        >>> with ShardedDataLoader(range(8), 4, pool=ProcessPool(2, start_method="spawn")) as loader:
        ...     print([batch.tolist() for batch in loader])
        [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source of the idea: the supervised executor of loky, the per-worker pipes of PyTorch's and SeqTools'
    loaders.
    """

    shares_dataset = False

    def __init__(
        self,
        num_workers: int,
        *,
        start_method: str | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float | None = None,
        restarts: int = 3,
        max_bytes: int | None = None,
    ) -> None:
        self.num_workers = check_num_workers(num_workers)
        check_init_fn(worker_init_fn)
        self._watch = Watch(check_timeout(timeout))
        chosen_backend()  # both ask the environment: what is wrong there is said now, not in mid-epoch
        if max_bytes is None:
            processes_here()
        else:
            max_bytes = check_int("max_bytes", max_bytes, 0, "bytes of shared memory, or None")
        self.restarts = check_int("restarts", restarts, 0, "a batch that kills so many workers is given up")
        self.start_method = choose_start_method(start_method)
        self.worker_init_fn = worker_init_fn
        self._new_job: NewJob | None = None
        self._resources = WorkerResources(max_bytes)
        # Negative, unlike those of batches, and each its own: a worker that is in a sample may get two in a row.
        self._publications = itertools.count(1)
        self._sizes = RecentSizes()
        self._grouping = Grouping()
        self._deaths = Deaths(restarts)
        self._requeued: deque[Task] = deque()
        self._refused: list[Result] = []
        self._ended: set[int] = set()
        self._classes: list[type] = []

    def __repr__(self) -> str:
        return f"ProcessPool({self.num_workers}, start_method={self.start_method!r})"

    def __reduce__(self) -> Any:
        # A dataset may refer to the pool that it is being sent to: there it is one that has not been started.
        make = functools.partial(
            ProcessPool,
            self.num_workers,
            start_method=self.start_method,
            worker_init_fn=self.worker_init_fn,
            timeout=self._watch.timeout,
            restarts=self.restarts,
            max_bytes=self._resources.max_bytes,
        )
        return make, ()

    def use_memory(self, empty: Empty, register: Register) -> None:
        self._resources.register = self._resources.arena.register = register

    @property
    def _workers(self) -> list[WorkerHandle]:
        return self._resources.handles

    @property
    def started(self) -> bool:
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by number; empty before the first epoch and after `close`."""
        return [handle.pid for handle in self._workers]

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        self._new_job = NewJob(job, self.worker_init_fn)
        self._classes = classes_of_main()
        self._deaths.new_job()
        if self._workers and self.start_method != "fork":
            self._publish(self._new_job)
            self._send_jobs()
            return
        if self.start_method == "forkserver":
            start_forkserver(self._publish(self._new_job))
        # Forked workers hold the dataset as it was: new ones are born with the new one, and do what was begun.
        begun = [task for handle in self._workers for task in handle.tasks.values()]
        try:
            with uninterrupted():
                self._resources.stop_workers()
                self._ended.clear()
                self._requeued.extend(begun)
                self._resources.open(self.num_workers)
                for number in range(self.num_workers):
                    self._workers.append(self._launch(number))
            if self.start_method != "fork":
                # While they start: that takes as long as to publish 150 MB.
                if self._resources.published is None:
                    self._publish(self._new_job)
                self._send_jobs()
            self._count_room()
            self.room -= len(self._requeued)
        except BaseException:
            self.close()
            raise

    def _publish(self, new: NewJob) -> frozenset[str]:
        """Pickle the job for the workers; the modules that it needs there."""
        encoded = publish.publish(
            new,
            dataset=new.job.dataset,
            batchify_fn=new.job.batchify_fn,
            on_error=new.job.on_error,
            worker_init_fn=new.worker_init_fn,
        )
        with uninterrupted():
            before, self._resources.published = (
                self._resources.published,
                publish.share(encoded, -next(self._publications)),
            )
            if before is not None:
                before.close()
        return encoded.modules

    def submit(self, tasks: Sequence[Task]) -> None:
        handles, group = self._resources.handles, self.group
        forked = self.start_method == "fork"
        for task in tasks:
            chosen, least = handles[0], len(handles[0].tasks) // group
            for handle in handles:
                if len(handle.tasks) // group < least:
                    chosen, least = handle, len(handle.tasks) // group
            try:
                own = own_pickle(task, forked=forked)
                slot = self._take_slot(chosen)
            except Exception as raised:
                error = as_batch_error(raised, "while the batch was sent to a worker")
                Location(task.epoch, task.seq).note(error, samples=task.shards[0])
                self._refused.append(Result(task.run, task.seq, error=error))
                continue
            key = task.run, task.seq
            chosen.tasks[key] = task
            chosen.slots[key] = slot
            chosen.unsent.append((slot, task, own))
            self.room -= 1
        for handle in handles:
            if handle.unsent:
                handle.link.send(pack_tasks(handle.unsent))
                handle.unsent.clear()

    def _take_slot(self, handle: WorkerHandle) -> Slot | None:
        """Memory for the next batch, which the worker knows; None if the batch is to go through the pipe."""
        wanted = self._sizes.wanted
        slot = self._resources.arena.take(wanted) if wanted >= SLOT_BYTES else None
        if slot is not None and slot.segment >= handle.segments:
            for segment in self._resources.arena.segments[handle.segments : slot.segment + 1]:
                send_segment(handle.link, segment)
            handle.segments = slot.segment + 1
        return slot

    def wait(self, block: bool = True) -> Sequence[Result]:
        resources = self._resources
        handles = resources.handles
        if not handles:
            return ()
        if resources.poller is None:
            resources.poller = Poller(handles, resources.wake_reader)
        self.waiting = True
        try:
            ready, ended = resources.poller.wait(self._watch.step if block and not self._refused else 0.0)
        except (OSError, ValueError):
            if handles is resources.handles:
                raise
        self.waiting = False
        if handles is not resources.handles:
            return ()  # a signal handler has closed the pool
        self._ended |= ended
        results, self._refused = self._refused, []
        for handle in list(handles) if self._ended else ready:
            link = handle.link
            if link.outbox:
                link.flush()
            link.receive()
            if link.inbox:
                self._take(handle, results)
            if link.ended or (self._ended and handle.is_over(self._ended)):
                self._bury(handle, results)
        if self._watch.timeout is not None:
            self._stop_late()
        self._count_room()
        if self._requeued:
            self.submit([self._requeued.popleft() for _ in range(min(self.room, len(self._requeued)))])
            self.room -= len(self._requeued)
        return results

    def _count_room(self) -> None:
        self.room = HELD * self.group * len(self._resources.handles)
        for handle in self._resources.handles:
            self.room -= len(handle.tasks)

    def wake(self) -> None:
        self._resources.wake()

    def cancel(self, run: int) -> None:
        self._requeued = deque(task for task in self._requeued if task.run != run)
        for handle in self._workers:
            # The last task of a worker may not have begun; the worker answers for each that it drops.
            if any(task.run == run for task in handle.tasks.values()):
                handle.link.send(pack_head(CANCEL, run))

    def close(self) -> None:
        self._resources.close()
        self.room = 0
        self._requeued.clear()
        self._refused.clear()
        self._ended.clear()
        self._deaths = Deaths(self.restarts)
        self._new_job = None
        self._classes = []

    def closer(self) -> Callable[[], None]:
        return self._resources.close

    # -- workers --------------------------------------------------------------------------------------------

    def _launch(self, number: int) -> WorkerHandle:
        assert self._new_job is not None  # the pool is being started, or has been
        return launch(number, self.num_workers, self.start_method, self._resources, self._new_job)

    def _send_jobs(self) -> None:
        for handle in self._workers:
            self._send_job(handle.link)

    def _send_job(self, link: Link) -> None:
        published = self._resources.published
        if published is not None:
            if published.segment is not None:
                send_segment(link, published.segment)
            link.send(pack_head(JOB, published.number, 0, published.head), published.buffers, places=published.places)

    def _take(self, handle: WorkerHandle, results: list[Result]) -> None:
        """Deal with the messages of a worker."""
        while handle.link.inbox:
            message = handle.link.inbox.popleft()
            kind, _, _, content = unpack_head(message.head)
            if kind == FAILED:
                self.close()
                raise PoolBroken(as_exception(decode_error(decode(content)), "while a worker started"))
            if kind == READY:
                handle.ready = True
                self._deaths.ready()
            elif kind == CRASHED:
                handle.last_words = bytes(content).decode(errors="replace")
            else:
                while len(content):
                    result, content = self._decode(handle, content, message.buffers)
                    results.append(result)

    def _decode(self, handle: WorkerHandle, replies: memoryview, places: deque[Any]) -> tuple[Result, memoryview]:
        """The first of some results, and the others. The batch's slot is lent out with it."""
        run, seq, wanted, count, pickled, rest = unpack_reply(replies)
        self._sizes.note(wanted)
        buffers = [places.popleft() for _ in range(count)]
        task, slot = handle.tasks.pop((run, seq), None), handle.slots.pop((run, seq), None)
        if slot is not None:
            # Also if nothing lies in it: then it comes back at once.
            buffers = self._resources.arena.lend(slot, buffers)
        result = decode_result(run, seq, pickled, buffers, task)
        self.group = self._grouping.note(result.seconds)
        self._deaths.settle(run, seq)
        return result, rest

    def _replace(self, handle: WorkerHandle) -> None:
        """A new worker in place of one that has ended; what that had to do is done again."""
        with uninterrupted():
            self._resources.poller = None
            self._ended.discard(handle.sentinel)
            new = self._launch(handle.number)
            self._requeued.extend(handle.tasks.values())
            self._workers[self._workers.index(handle)] = new
            handle.link.close()
            handle.release()
            self._resources.free_slots(handle)
            if self.start_method != "fork":
                self._send_job(new.link)

    def _bury(self, handle: WorkerHandle, results: list[Result]) -> None:
        """A worker has ended: another takes its place and its tasks, but for one that has killed too many."""
        with uninterrupted():
            handle.wait(0.0 if handle.hung else 1.0)
            handle.release()
        given_up = self._count_death(handle)
        if given_up is not None:
            results.append(given_up)
            self._deaths.settle(given_up.run, given_up.seq)
            handle.tasks.pop((given_up.run, given_up.seq), None)
        self._replace(handle)

    def _count_death(self, handle: WorkerHandle) -> Result | None:
        """The error in place of a batch that is given up.

        Raises:
            PoolBroken: workers die without having done anything; the pool is closed.
        """
        words = list(handle.board)
        death = Death(handle.number, handle.pid, handle.exitcode, self._resources.oom_kills())
        if not handle.ready:
            if self._deaths.in_start(handle.number, 1 if handle.hung else handle.exitcode):
                self.close()
                raise PoolBroken(died_in_start(death, hung=handle.hung, traceback=handle.last_words))
            self._deaths.tell(death, handle.last_words)
            return None
        task = next((task for task in handle.tasks.values() if is_at(words, task)), None)
        if task is None:
            if self._deaths.of_nothing(handle.number):
                self.close()
                raise PoolBroken(died_idle(death))
            return None
        key = task.run, task.seq
        if self._deaths.of_batch(task):
            return Result(*key, error=self._blame(handle, death, task, words))
        if words[SAMPLE] == IN_BULK:
            handle.tasks[key] = task._replace(careful=True)
        return None

    def _blame(self, handle: WorkerHandle, death: Death, task: Task, words: list[int]) -> Exception:
        tries = max(1, self.restarts)
        if handle.hung and self._watch.timeout is not None:
            who = f"worker {handle.number} (pid {handle.pid})"
            return timed_out(who, self._watch.timeout, task, words, tries, killed=True)
        return died(death, task, words, tries)

    def _stop_late(self) -> None:
        """Kill the workers that stand still; their deaths are dealt with as such."""
        watched: list[tuple[WorkerHandle, Silent, Any]] = []
        for handle in self._workers:
            if handle.hung:
                continue  # it has been killed
            if handle.tasks or not handle.ready:
                watched.append((handle, handle.silent, handle.board if handle.ready else ()))
            else:
                handle.silent = Silent()
        for handle in self._watch.late(watched):
            handle.hung = True
            with uninterrupted():
                handle.dump_stacks()
                handle.kill()
            self._ended.add(handle.sentinel)
