"""Processes that read: one pipe each, supervised, replaced when they end.

    main process                                        worker i (pools/process/worker.py)
    submit -> a worker's link        =======socket==>   receiver thread -> inbox -> Reader
              (and a slot of the arena)                                               | writes
    wait <- inbox of each link            <==socket==   encoded result      arena slot v
         <- arrays over the slot, lent out

How large a slot must be is learned from the batches that have come lately (`memory.arena`). The first batches, and what
does not fit, travel through the pipe. A slot belongs to its worker until the worker has answered or has ended. Then it
belongs to the user until nothing refers to it.

Not a ``Pool`` of ``multiprocess``: that one replaces a dead worker and forgets its task, and the caller waits for ever.
Here no lock or queue is shared between processes, so a worker can die anywhere and stops no other.

A worker holds at most one task beyond the one that it does. While batches are cheap, it holds groups of tasks, and each
group is one message (`engine.messages`).

What can go wrong, and what then:
  * a worker dies: another takes its place and builds its batches again (`pools.supervised`). A batch that has killed
    ``restarts`` workers is a `WorkerDiedError` in its place. `wait` returns 3 ms (spawn) or 9 ms (fork) after the kill;
    the kernel needs most of that time for the process that ends;
  * a worker takes more memory than ``max_worker_memory``: another gets its number, and it ends when it has answered
    what it has. If workers do so with their first batch, that is an error, and the pool is closed;
  * a worker stands still for ``timeout`` seconds: it is killed, and then as above, even if that does not end it;
  * a worker cannot start (unpicklable dataset, ``worker_init_fn`` raises): that error, and the pool is closed;
  * an exception strikes inside a verb (a Ctrl-C): the pipeline closes the pool and starts it again;
  * a reply cannot be unpickled here: that is the error of its batch, and iteration goes on.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from sharded_loader.base.checks import bytes_of_text, check_int
from sharded_loader.base.errors import as_exception
from sharded_loader.base.limits import own_bytes, processes_here, warn_of_workers
from sharded_loader.base.notices import logger
from sharded_loader.batching.protocol import Empty
from sharded_loader.data.inspection import warn_of_open_file
from sharded_loader.engine.messages import HELD, Grouping, Job, Result, Task, unpack_reply
from sharded_loader.engine.pool import check_num_workers
from sharded_loader.memory.arena import Arena, RecentSizes, Register
from sharded_loader.memory.codec import decode, decode_error
from sharded_loader.memory.segments import chosen_backend
from sharded_loader.pools.deaths import too_large
from sharded_loader.pools.process.link import FAILED, FLUSH, GROWN, READY, RESULTS, TASKS, Poller
from sharded_loader.pools.process.start import choose_start_method
from sharded_loader.pools.process.transport import ProcessTransport, ProcessWorker
from sharded_loader.pools.supervised import SupervisedPool, fields_of

SLOT_BYTES = 32768
"""Batches below this go through the pipe: a slot saves them one copy, which costs less than its bookkeeping."""


ArenaInUse = tuple[Arena, RecentSizes]
"""Shared memory that a pool has left, and how large its batches were."""


class ProcessPool(SupervisedPool[ProcessWorker]):
    """Read in worker processes.

    Args:
        num_workers: the number of processes.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``. None: what was set with
            ``multiprocessing.set_start_method``, otherwise fork on Linux and spawn elsewhere.
        worker_init_fn: a function that each worker calls with its number, once, before it reads.
        timeout: the number of seconds that a worker may spend on one sample without progress. Then the pool kills the
            worker, and another worker builds the batch again. The seconds count while `next` waits for a batch. None:
            no limit. A worker that starts has at least ten minutes.
        restarts: the number of workers that a batch may kill. Then `next` raises `WorkerDiedError` or
            `WorkerTimeoutError` instead of the batch. 0 and 1: at the first death.
        max_bytes: the limit of the shared memory for batches, in bytes. None: a quarter of what is free at the first
            epoch, divided by LOCAL_WORLD_SIZE. Above the limit, the loader copies batches out of shared memory.
        max_worker_memory: the memory that a worker may take, in bytes, or a text such as ``"2 GB"``. Shared memory does
            not count. Another worker replaces one that takes more, between two batches, so a leak cannot fill the
            machine. ``stats().recycled_workers`` counts. None: no limit.

    Raises:
        ValueError: A number is out of its range, or this system does not have the start method.
        TypeError: An argument has a wrong type, or ``worker_init_fn`` cannot be called.

    Example:
        >>> from sharded_loader import ProcessPool, ShardedDataLoader
        >>> pool = ProcessPool(2, start_method="spawn")
        >>> with ShardedDataLoader(range(8), 4, pool=pool) as loader:
        ...     print([batch.tolist() for batch in loader])
        [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source of the idea: the supervised executor of loky, the per-worker pipes of PyTorch's and SeqTools'
    loaders.
    """

    _transport: ProcessTransport

    def __init__(
        self,
        num_workers: int,
        *,
        start_method: Literal["fork", "forkserver", "spawn"] | None = None,
        worker_init_fn: Callable[[int], object] | None = None,
        timeout: float | None = None,
        restarts: int = 3,
        max_bytes: int | None = None,
        max_worker_memory: int | str | None = None,
    ) -> None:
        super().__init__(num_workers, worker_init_fn, timeout, restarts, Grouping())
        chosen_backend()  # both ask the environment: what is wrong there is said now, not in mid-epoch
        if max_bytes is None:
            processes_here()
        else:
            max_bytes = check_int("max_bytes", max_bytes, 0, "bytes of shared memory, or None")
        self.max_bytes = max_bytes
        self.max_worker_memory: int | None = None
        if max_worker_memory is not None:
            self.max_worker_memory = bytes_of_text(max_worker_memory, name="max_worker_memory")
            try:
                own_bytes()
            except ImportError as error:
                raise ImportError("max_worker_memory needs psutil on this system: pip install psutil") from error
        self.start_method = choose_start_method(start_method)
        self._transport = ProcessTransport(self.num_workers, self.start_method, max_bytes)
        self._poller: Poller | None = None  # of the workers: it keeps them, and goes with them
        self._looks = 0  # for messages, in a row, that found none
        # False: they live for one epoch. A template takes as long as a worker, so there is none before one dies.
        self.workers_last = True

    def use_memory(self, empty: Empty, register: Register, *, pinned: Empty | None = None) -> None:
        self._transport.arena.register, self._transport.arena.pinned = register, pinned

    def hand_over(self) -> ArenaInUse:
        """End the workers. What is returned lets another pool go on with the shared memory, which stays pinned."""
        return self._transport.hand_over(), self._sizes

    def take_over(self, used: ArenaInUse) -> None:
        """Go on with the shared memory of another pool, before `use_memory`."""
        self._transport.arena, self._sizes = used

    @property
    def started(self) -> bool:
        return bool(self._transport.workers)

    @property
    def workers(self) -> list[ProcessWorker]:
        """The worker processes, by number; empty before the first epoch and after `close`."""
        return self._transport.workers

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [worker.pid for worker in self.workers]

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        if self.start_method == "fork" and self.num_workers > 1:
            warn_of_open_file(job.dataset, "forked processes")
        notes = self.timeout is not None or self.restarts <= 1  # otherwise a task is read a second time
        init, most = self.worker_init_fn, self.max_worker_memory
        self._start(replace(job, worker_init_fn=init, notes_samples=notes, max_memory=most))
        self.unsettled = self.start_method == "fork" and self.workers_last

    def settle(self) -> None:
        super().settle()
        if self._job and self.started:
            self._transport.make_template(self._job)

    def resize(self, num_workers: int) -> None:
        if check_num_workers(num_workers) > self.num_workers:
            warn_of_workers(num_workers)
        super().resize(num_workers)

    def adopt(self) -> None:
        # One change at a time: a program that changes its mind faster than workers start would have hundreds of them.
        if all(worker.ready for worker in self._transport.leaving):
            super().adopt()

    def _have(self, num_workers: int) -> None:
        if self.start_method == "fork" and self.num_workers == 1 < num_workers and self._job:
            warn_of_open_file(self._job.dataset, "forked processes")
        super()._have(num_workers)

    def submit(self, tasks: Sequence[Task]) -> None:
        workers, arena, group, wanted = self._transport.workers, self._transport.arena, self.group, self._sizes.wanted
        unsent: dict[ProcessWorker, list[tuple[object, ...]]] = {}
        for task in tasks:
            if task.lane is not None:
                chosen = workers[task.lane % len(workers)]
            else:
                chosen, least = workers[0], len(workers[0].tasks) // group
                for worker in workers:
                    if len(worker.tasks) // group < least:
                        chosen, least = worker, len(worker.tasks) // group
            slot = None
            try:
                if type(indices := task.shards[0]) is np.ndarray:
                    # As bytes: a tenth of the time that an array takes.
                    before, after = task.fields[:4], task.fields[5:]
                    fields: object = (*before, (indices.tobytes(),), *after)
                else:
                    fields = fields_of(task, forked=self.start_method == "fork")
                if wanted >= SLOT_BYTES and (slot := arena.take(wanted)) is None:
                    self.notices.happened(
                        "slow_batches",
                        f"a batch of {wanted:,} bytes finds no room in shared memory (max_bytes={self.max_bytes}, "
                        f"{arena.nbytes:,} bytes in use, your program holds {arena.lent} batches), and goes through "
                        f"the pipe, which is slower: look for a list or a graph that keeps batches, use smaller ones "
                        f"or a smaller prefetch, or raise ProcessPool(max_bytes=)",
                    )
            except Exception as raised:
                self._reject(task, raised)
                continue
            while slot is not None and slot.segment >= chosen.link.segments:
                chosen.link.send_segment(arena.segments[chosen.link.segments])
                chosen.link.segments += 1
            chosen.tasks[task.run, task.seq] = task
            chosen.slots[task.run, task.seq] = slot
            unsent.setdefault(chosen, []).append((task.run, task.seq, None if slot is None else tuple(slot), fields))
            self.room -= 1
        for worker, packed in unsent.items():
            worker.link.send(TASKS, content=pickle.dumps(packed, protocol=5))

    def wait(self, block: bool = True) -> Sequence[Result]:
        transport = self._transport
        workers, poller = transport.workers, self._poller
        if not workers:
            return ()
        watched = [*workers, *transport.leaving]
        # Taken away while it is used: a signal handler may call `next`, and a poller cannot be used twice at a time.
        self._poller = None
        if poller is None or poller.workers != watched:
            assert transport.waker is not None  # there are workers
            poller = Poller(watched, transport.waker[0])
        self.waiting = True
        try:
            ready, ended = poller.wait(self._watch.step if block and not self._rejected else 0.0)
        except (OSError, ValueError):
            if workers is transport.workers:
                raise
        self.waiting = False
        if workers is not transport.workers:
            return ()  # a signal handler has closed the pool
        watched = [*workers, *transport.leaving]
        if poller.workers == watched:  # otherwise a step inside this one has replaced a worker
            self._poller = poller
        results, self._rejected = self._rejected, []
        self._looks = 0 if ready or ended or results else self._looks + block
        # After 1, 2, 4 ... seconds of waiting. Not after each: a worker in C code that holds the GIL reads no messages,
        # and a portable link blocks when the pipe is full.
        if block and self._looks.bit_count() == 1:
            for worker in workers:
                if len(worker.tasks) > 1:  # one that is finished may wait there for a slow one
                    worker.link.send(FLUSH)
        for worker in watched:
            worker.has_ended |= worker.sentinel in ended
            if worker.has_ended or worker in ready:
                self._receive(worker, results)
        if self.timeout is not None:
            self.stop_late()
        self._count_room()
        if requeued := self.requeued:
            again = [requeued.popleft() for _ in range(min(self.room + len(requeued), len(requeued)))]
            self.room += len(again)
            self.submit(again)
        return results

    def _receive(self, worker: ProcessWorker, results: list[Result]) -> None:
        """Deal with what a worker has sent, and with its end."""
        link = worker.link
        if link.outbox:
            link.send()
        while link.read():
            pass
        while link.inbox:
            message = link.inbox.popleft()
            kind, content, following = message.kind, message.content, iter(message.buffers)
            if kind == FAILED:
                self.give_up_worker(worker, as_exception(decode_error(decode(content)), "while a worker started"))
            elif kind == READY:
                self.record_start(worker)
            elif kind == GROWN:
                self._recycle(worker, message.run, message.seq)
            while kind == RESULTS and len(content):
                reply = unpack_reply(content)
                run, seq, _, count, _, content, _ = reply
                buffers = list(itertools.islice(following, count))
                task, slot = worker.tasks.pop((run, seq), None), worker.slots.pop((run, seq), None)
                if slot is not None:
                    # Also if nothing lies in it: then it comes back at once.
                    buffers = self._transport.arena.lend(slot, buffers)
                if task is not None:  # otherwise it is not wanted any more
                    results.append(self._result(reply, buffers, task))
        if link.ended or (worker.has_ended and worker.is_over()):
            results += self.replace(worker)

    def _count_room(self) -> None:
        """What has come back goes out again first."""
        self.room = HELD * self.group * len(self._transport.workers) - len(self.requeued)
        for worker in self._transport.workers:
            self.room -= len(worker.tasks)

    def _recycle(self, worker: ProcessWorker, nbytes: int, batches: int) -> None:
        """A worker takes more memory than it may. One at a time is replaced: two workers need the memory of two."""
        transport, limit = self._transport, self.max_worker_memory
        if limit is None or worker not in transport.workers:
            return
        if not worker.has_grown and self.deaths.record_growth(worker.number, batches):
            self.give_up_worker(worker, too_large(worker.number, nbytes, limit))
        worker.has_grown = True
        if transport.leaving:
            return  # it says so again
        self.renew(worker)
        self.notices.counts["recycled_workers"] += 1
        logger.info("worker %d (pid %d) took %d bytes, and was replaced", worker.number, worker.pid, nbytes)

    def close(self) -> None:
        super().close()
        self._poller = None

    def wake(self) -> None:
        self._transport.wake()

    def closer(self) -> Callable[[], None]:
        return self._transport.close
