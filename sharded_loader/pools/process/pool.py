"""Worker processes: one pipe each, supervised, replaced when they end.

    main process                                        worker i (pools/process/worker.py)
    submit -> a worker's link        =======socket==>   receiver thread -> inbox -> Reader
              (and a slot of the arena)                                               | writes
    wait <- inbox of each link            <==socket==   encoded result      arena slot v
         <- arrays over the slot, borrowed

The size of slots follows recent batches (`memory.arena`). With the first batches, and with larger ones, a worker waits
for a slot of their size; without room for one they go through the pipe. A slot belongs to its worker until the batch
arrives, then to the user while anything refers to it, then to the arena. If the worker dies before that, the slot
returns to the arena, unless the process could not be reaped.

A ``Pool`` of ``multiprocess`` replaces a dead worker but forgets its task, so the caller hangs. Here processes share no
lock or queue, so a worker may die anywhere without blocking others. A worker holds at most one task, or one group of
cheap tasks in one message (`engine.messages`), beyond the current one.

What can go wrong, and what happens:
  * a worker dies: it is replaced, and its batches are retried (`pools.supervised`); after ``restarts`` deaths a batch
    is a `WorkerDiedError`. `wait` returns 3 ms (spawn) or 9 ms (fork) after the kill, mostly the kernel's time;
  * a worker exceeds ``max_worker_memory``: it is replaced and drains. If this happens with first batches, the pool is
    closed with an error;
  * a worker stalls for ``timeout`` seconds: it is killed and replaced, even if it survives the signal (in the kernel);
  * a worker cannot start (unpicklable dataset, ``worker_init_fn`` raises): the pool is closed with that error;
  * an exception strikes inside a verb (a Ctrl-C): the pipeline restarts the pool;
  * a reply cannot be unpickled here: an error of its batch.
"""

from __future__ import annotations

import itertools
import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from sharded_loader.base.checks import bytes_of_text
from sharded_loader.base.errors import as_exception
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.limits import own_bytes, processes_here, warn_of_workers
from sharded_loader.base.notices import logger
from sharded_loader.batching.protocol import Empty
from sharded_loader.data.inspection import warn_of_open_file
from sharded_loader.engine.messages import HELD, Grouping, Job, Result, Task, unpack_reply
from sharded_loader.engine.pool import check_num_workers
from sharded_loader.memory.arena import Arena, RecentSizes, Register
from sharded_loader.memory.codec import decode, decode_error
from sharded_loader.memory.segments import Slot, chosen_backend
from sharded_loader.pools.deaths import too_large
from sharded_loader.pools.process import link as wire
from sharded_loader.pools.process.start import choose_start_method
from sharded_loader.pools.process.transport import ProcessTransport, ProcessWorker
from sharded_loader.pools.supervised import SupervisedPool, fields_of

TOUCHED_BYTES = 1 << 20
"""A worker touches the pages of new slots of this size when it gets them, 0.1 ms per MB, not while it fills them."""

TOUCH_SECONDS = 0.3e-9
"""Seconds per byte of the first touch of memory, on an H200's host. A worker with a slot of its own gets a batch even
if it has one more task than another: 23 touches of 20 slots instead of 40 (8 workers, 16 MB). Not if the program waits
for batches, and touching adds less than a tenth to the reading: 1 MB that takes 20 ms to read would cost 7 %."""

ArenaInUse = tuple[Arena, RecentSizes]
"""Shared memory handed over by a pool, and the sizes of its batches."""


class ProcessPool(SupervisedPool[ProcessWorker]):
    """Read in worker processes.

    Args:
        num_workers: number of processes.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``. None: the method set with
            ``multiprocessing.set_start_method``, otherwise fork on Linux and spawn elsewhere.
        worker_init_fn: function called in each worker, with its number, before it reads; again with a changed dataset.
        timeout: seconds that a worker may spend on one sample without progress; None: no limit. After that the pool
            kills the worker, and another one builds the batch again. Only time in which `next` waits for a batch
            counts. A starting worker has at least ten minutes.
        restarts: number of workers that a batch may kill before `next` raises `WorkerDiedError` or `WorkerTimeoutError`
            instead of the batch. 0 and 1: at the first death.
        max_bytes: limit of the shared memory for batches, in bytes, or a text such as ``"2 GB"``. None: a quarter of
            the memory that is free when it is first needed, divided by LOCAL_WORLD_SIZE. Above the limit, batches go
            through a pipe, which is slower.
        max_worker_memory: private memory limit of a worker, in bytes, or a text such as ``"2 GB"``; None: no limit. A
            worker above it is replaced between two batches, so a leak cannot fill the machine.
            ``stats().recycled_workers`` counts these.

    Raises:
        ValueError: a number is out of range, or this system does not have the start method.
        TypeError: an argument has a wrong type, or ``worker_init_fn`` cannot be called.

    Example:
        >>> from sharded_loader import ProcessPool, ShardedDataLoader
        >>> pool = ProcessPool(2, start_method="spawn")
        >>> with ShardedDataLoader(range(8), 4, pool=pool) as loader:
        ...     print([batch.tolist() for batch in loader])
        [[0, 1, 2, 3], [4, 5, 6, 7]]

    Source of the idea: the supervised executor of loky, the per-worker pipes of PyTorch's and SeqTools' loaders.
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
        max_bytes: int | str | None = None,
        max_worker_memory: int | str | None = None,
    ) -> None:
        super().__init__(num_workers, worker_init_fn, timeout, restarts, Grouping())
        chosen_backend()  # both read the environment: report errors there now rather than in mid-epoch
        if max_bytes is None:
            processes_here()
        self.max_bytes = None if max_bytes is None else bytes_of_text(max_bytes, 0, "0 or more")
        self.max_worker_memory: int | None = None
        if max_worker_memory is not None:
            self.max_worker_memory = bytes_of_text(max_worker_memory, name="max_worker_memory")
            try:
                own_bytes()
            except ImportError as error:
                raise ImportError("max_worker_memory needs psutil on this system: pip install psutil") from error
        self.start_method = choose_start_method(start_method)
        self._transport = ProcessTransport(self.num_workers, self.start_method, self.max_bytes)
        self._poller: wire.Poller | None = None  # keeps the workers alive, and is replaced with them
        self._empty_waits = 0  # consecutive waits without a message
        self._is_late = True  # the program waits for a batch
        # False: workers live for one epoch. A zygote takes as long to start as a worker, so it is made after a death.
        self.workers_last = True

    def use_memory(self, empty: Empty, register: Register, *, pinned: Empty | None = None) -> None:
        self._transport.arena.register, self._transport.arena.pinned = register, pinned

    def hand_over(self) -> ArenaInUse:
        """End the workers, and return the shared memory, still pinned, for `take_over` of another pool."""
        return self._transport.hand_over(), self._sizes

    def take_over(self, used: ArenaInUse) -> None:
        """Continue with the shared memory of another pool. Call it before `use_memory`."""
        self._transport.arena, self._sizes = used

    @property
    def started(self) -> bool:
        return bool(self._transport.workers)

    @property
    def workers(self) -> list[ProcessWorker]:
        """Worker processes by number; empty before the first epoch and after `close`."""
        return self._transport.workers

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers."""
        return [worker.pid for worker in self.workers]

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        if self.start_method == "fork" and self.num_workers > 1:
            warn_of_open_file(job.dataset, "forked processes")
        notes = self.timeout is not None or self.restarts <= 1  # otherwise the task is read again
        init, most = self.worker_init_fn, self.max_worker_memory
        self._start(replace(job, worker_init_fn=init, notes_samples=notes, max_memory=most))
        self.start_unfinished = self.start_method == "fork" and self.workers_last

    def finish_start(self) -> None:
        super().finish_start()
        if self._job and self.started:
            self._transport.make_zygote(self._job)

    def resize(self, num_workers: int) -> None:
        if check_num_workers(num_workers) > self.num_workers:
            warn_of_workers(num_workers)
        super().resize(num_workers)

    def adopt(self) -> None:
        # One change at a time: frequent changes, faster than workers start, would leave hundreds of them.
        if all(worker.ready for worker in self._transport.draining):
            super().adopt()

    def _have(self, num_workers: int) -> None:
        if self.start_method == "fork" and self.num_workers == 1 < num_workers and self._job:
            warn_of_open_file(self._job.dataset, "forked processes")
        super()._have(num_workers)

    def submit(self, tasks: Sequence[Task]) -> None:
        workers, arena, group, wanted = self._transport.workers, self._transport.arena, self.group, self._sizes.wanted
        returned, is_late = arena.returned, self._is_late and self._grouping.mean > 10 * TOUCH_SECONDS * wanted
        unsent: dict[ProcessWorker, list[tuple[object, ...]]] = {}
        for task in tasks:
            if task.lane is not None:
                chosen = workers[task.lane % len(workers)]
            else:
                chosen, least = workers[0], math.inf
                for worker in workers:
                    load: float = len(worker.tasks) // group
                    if returned[worker.number]:
                        load -= 0.5 if is_late else 1.5
                    if load < least:
                        chosen, least = worker, load
            slot = None
            try:
                if type(indices := task.shards[0]) is np.ndarray and not task.sharded:
                    # Bytes pickle ten times as fast as an array.
                    of_batch = task.sharded, task.is_suspect, task.lane, task.part
                    fields: object = task.run, task.seq, task.epoch, task.position, (indices.tobytes(),), *of_batch
                else:
                    fields = fields_of(task, forked=self.start_method == "fork")
                if (own := returned[chosen.number]) and own[0].resource.nbytes == wanted:
                    slot = own.popleft().resource
                elif wanted >= wire.SLOT_BYTES:
                    slot = self._take_slot(chosen, wanted)
            except Exception as raised:
                self._reject(task, raised)
                continue
            chosen.tasks[task.run, task.seq] = task
            chosen.slots[task.run, task.seq] = slot
            unsent.setdefault(chosen, []).append((task.run, task.seq, None if slot is None else tuple(slot), fields))
            self.room -= 1
        for worker, packed in unsent.items():
            worker.link.send(wire.TASKS, content=pickle.dumps(packed, protocol=5))

    def wait(self, block: bool = True) -> Sequence[Result]:
        transport = self._transport
        workers, poller = transport.workers, self._poller
        if not workers:
            return ()
        watched = [*workers, *transport.draining]
        # Removed while in use: a signal handler may call `next`, and a poller is not reentrant.
        self._poller = None
        if poller is None or poller.workers != watched:
            assert transport.waker is not None  # set while there are workers
            poller = wire.Poller(watched, transport.waker[0])
        self.waiting, self._is_late = True, block
        try:
            ready, ended = poller.wait(self._watch.step if block and not self._rejected else 0.0)
        except (OSError, ValueError) as error:
            if workers is transport.workers or is_from_outside(error):
                raise
        self.waiting = False
        if workers is not transport.workers:
            return ()  # a signal handler has closed the pool
        watched = [*workers, *transport.draining]
        if poller.workers == watched:  # otherwise a nested step has replaced a worker
            self._poller = poller
        results, self._rejected = self._rejected, []
        self._empty_waits = 0 if ready or ended or results else self._empty_waits + block
        # After 1, 2, 4 ... seconds of waiting. Not more often: a worker that holds the GIL in C code reads no messages,
        # and a portable link blocks when the pipe is full.
        if block and self._empty_waits.bit_count() == 1:
            for worker in workers:
                if len(worker.tasks) > 1:  # a finished task may wait there for a slow one
                    worker.link.send(wire.FLUSH)
        for worker in watched:
            worker.has_ended |= worker.sentinel in ended
            if worker.has_ended or worker in ready:
                self._receive(worker, results)
        if self.timeout is not None:
            self.kill_stalled_workers()
        self._count_room()
        if requeued := self.requeued:
            again = [requeued.popleft() for _ in range(min(self.room + len(requeued), len(requeued)))]
            self.room += len(again)
            self.submit(again)
        return results

    def _receive(self, worker: ProcessWorker, results: list[Result]) -> None:
        """Handle the messages of a worker, and its end."""
        link = worker.link
        if link.outbox:
            link.send()
        while link.read():
            pass
        while link.inbox:
            message = link.inbox.popleft()
            kind, content, following = message.kind, message.content, iter(message.buffers)
            if kind == wire.FAILED:
                self.give_up_worker(worker, as_exception(decode_error(decode(content)), "while a worker started"))
            elif kind == wire.READY:
                del worker.unread[:1]
                self.record_start(worker)
            elif kind == wire.GROWN:
                self._replace_grown(worker, message.run, message.seq)
            elif kind == wire.SLOT:
                self._send_slot(worker, message.run, message.seq, int(bytes(content)))
            while kind == wire.RESULTS and len(content):
                reply = unpack_reply(content)
                run, seq, _, count, _, content, _ = reply
                buffers = list(itertools.islice(following, count))
                task, slot = worker.tasks.pop((run, seq), None), worker.slots.pop((run, seq), None)
                if slot is not None:
                    # Without buffers in it, the slot is free again at once.
                    buffers = self._transport.arena.lend(slot, buffers, worker.number)
                if (smaller := worker.slots.pop((run, ~seq), None)) is not None:
                    self._transport.arena.give(smaller)
                if task is not None:  # otherwise cancelled
                    results.append(self._result(reply, buffers, task))
        if link.ended or (worker.has_ended and worker.is_over()):
            results += self.replace(worker)

    def _take_slot(self, worker: ProcessWorker, nbytes: int, waiting: int = 0) -> Slot | None:
        """Take a slot for a worker, and have the worker touch its pages before the task arrives."""
        arena, link = self._transport.arena, worker.link
        slot = arena.take(nbytes, worker.number, waiting)
        if slot is not None:
            for segment in arena.segments[link.segments :]:
                link.send_segment(segment)
                link.segments += 1
            if nbytes >= TOUCHED_BYTES:
                link.send(wire.TOUCH, content=pickle.dumps(tuple(slot)))
        return slot

    def _send_slot(self, worker: ProcessWorker, run: int, seq: int, nbytes: int) -> None:
        """Send a slot, or None, to a worker that waits because its batch exceeds its own, or is the first."""
        arena, slot, task = self._transport.arena, None, worker.tasks.get((run, seq))
        if task is not None:  # otherwise cancelled
            self._sizes.note(nbytes)
            try:
                waiting = sum(slot is None for each in self._transport.workers for slot in each.slots.values())
                slot = self._take_slot(worker, self._sizes.wanted, waiting)
                if slot is None:
                    self.notices.record(
                        "slow_batches",
                        f"a batch of {nbytes:,} bytes finds no room in shared memory (max_bytes={self.max_bytes}, "
                        f"{arena.nbytes:,} bytes in use, your program holds {arena.lent} batches), and goes through "
                        f"the pipe, which is slower: look for a list or a graph that keeps batches, use smaller ones "
                        f"or a smaller prefetch, or raise ProcessPool(max_bytes=)",
                    )
                elif (smaller := worker.slots[run, seq]) is not None:
                    worker.slots[run, ~seq] = smaller  # the worker copies from it until the result is here
                worker.slots[run, seq] = slot or worker.slots[run, seq]
            except MemoryError as error:
                del worker.tasks[run, seq]
                self._reject(task, error)
        worker.link.send(wire.SLOT, content=pickle.dumps(None if slot is None else tuple(slot)))

    def _count_room(self) -> None:
        """Set `room`. Requeued tasks come first."""
        self.room = HELD * self.group * len(self._transport.workers) - len(self.requeued)
        for worker in self._transport.workers:
            self.room -= len(worker.tasks)

    def _replace_grown(self, worker: ProcessWorker, nbytes: int, batches: int) -> None:
        """Replace a worker above its memory limit, one at a time: two workers need the memory of two."""
        transport, limit = self._transport, self.max_worker_memory
        if limit is None or worker not in transport.workers:
            return
        if not worker.has_grown and self.deaths.record_growth(worker.number, batches):
            self.give_up_worker(worker, too_large(worker.number, nbytes, limit))
        worker.has_grown = True
        if transport.draining:
            return  # it will report again
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
