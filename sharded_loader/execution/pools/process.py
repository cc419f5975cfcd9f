"""Processes that read: one pipe each, supervised, replaced when interrupted.

    trainer                                             worker i (execution/worker.py)
    submit -> least loaded worker's link  ==socket==>   receiver thread -> inbox -> Reader
              (and a slot of the arena)                                               | writes
    receive <- inbox of each link         <==socket==   encoded result      arena slot v
            <- arrays over the slot, lent out
    wait    on all links, all sentinels and the waker: the only place that blocks

How large a slot must be is learned from the batches that have come lately (`memory.sizes`): the first ones, and
what does not fit, travel through the pipe. A slot belongs to its worker until that has answered or is reaped, then
to the user until nothing refers to it.

Not a ``Pool`` of ``multiprocess``: that one replaces a dead worker and forgets its task, and the caller waits
for ever. Here no lock or queue is shared between processes, so a worker can die anywhere and stops nobody.

A worker holds at most one task beyond the one it is doing: with a longer backlog, uneven samples leave one
worker with work while others idle.

What can go wrong, and what then:
  * a worker dies: at once a `WorkerDiedError` for the batch it was reading; its other task goes to another;
  * a worker cannot start (unpicklable dataset, ``worker_init_fn`` raises): that error, and the pool is closed;
  * KeyboardInterrupt between a system call and its bookkeeping: the link is torn; the worker is replaced and
    all its tasks are done again, without an error;
  * a reply cannot be unpickled here: that is the error of its batch, and iteration goes on.
"""

from __future__ import annotations

import itertools
import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import multiprocess

from sharded_loader.errors import Place, WorkerDiedError, describe_exit, read_again
from sharded_loader.execution import worker
from sharded_loader.execution.messages import (
    ANY_RUN,
    CANCEL,
    FAILED,
    JOB,
    READY,
    SEGMENT,
    TASK,
    Job,
    NewJob,
    Reply,
    Result,
    Task,
    pack_head,
    pack_slot,
    unpack_head,
    unpack_wanted,
)
from sharded_loader.execution.pools import spawning
from sharded_loader.execution.pools.base import Pool, check_init_fn, check_num_workers, check_reserved
from sharded_loader.execution.pools.crew import Crew, WorkerHandle
from sharded_loader.execution.pools.link import Link, Message, make_link, wait_for_any
from sharded_loader.execution.pools.starting import (
    choose_start_method,
    forget_process,
    start_forkserver,
    starting_worker,
    uninterrupted,
)
from sharded_loader.memory import publish
from sharded_loader.memory.codec import decode, decode_error
from sharded_loader.memory.segments import Segment
from sharded_loader.memory.sizes import RecentSizes

SLOT_BYTES = 32768
"""Batches below this go through the pipe: a slot saves them one copy, which costs less than its bookkeeping."""

HELD = 2
"""Tasks a worker holds: the one it does and one more, so that it never waits for the next."""


class ProcessPool(Pool):
    """Read in worker processes.

    Args:
        num_workers: how many processes.
        start_method: ``"fork"``, ``"forkserver"`` or ``"spawn"``. None: what was set with
            ``multiprocessing.set_start_method``, else fork on Linux and spawn elsewhere.
        worker_init_fn: called with the worker's number, once in each, before it reads.
        timeout: reserved (seconds without progress on one sample); this version takes only None.
        restarts: reserved (how often a batch whose worker died is made again). In this version a worker
            that dies raises at once.
        max_bytes: bound on the shared memory that batches lie in. None: a quarter of what is free at the first
            epoch, divided by LOCAL_WORLD_SIZE. Past it batches are copied out, and the loader goes on.

    Raises:
        TypeError, ValueError: a bad number of workers or start method.

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
        check_reserved("ProcessPool", timeout=timeout)
        if max_bytes is not None and (isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 0):
            raise ValueError(f"max_bytes is {max_bytes!r}; it must be an int of at least 0, or None")
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            raise ValueError(f"restarts is {restarts!r}; it must be an int of at least 0")
        self.start_method = choose_start_method(start_method)
        self.worker_init_fn = worker_init_fn
        self.restarts = restarts
        self._context = multiprocess.get_context(self.start_method)
        self._new_job: NewJob | None = None
        self._published: publish.Published | None = None
        self._crew = Crew(max_bytes)
        # Negative, unlike those of batches, and each its own: a worker that is in a sample may get two in a row.
        self._publications = itertools.count(1)
        self._sizes = RecentSizes()
        self._requeued: deque[Task] = deque()
        self._ended: set[int] = set()

    def __repr__(self) -> str:
        return f"ProcessPool({self.num_workers}, start_method={self.start_method!r})"

    @property
    def _workers(self) -> list[WorkerHandle]:
        return self._crew.handles

    @property
    def started(self) -> bool:
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by number; empty before the first epoch and after `close`."""
        return [handle.process.pid for handle in self._workers]

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        self._new_job = NewJob(job, self.worker_init_fn)
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
                self._crew.stop_workers()
                self._ended.clear()
                self._requeued.extend(begun)
                self._crew.open()
                for number in range(self.num_workers):
                    self._workers.append(self._launch(number))
            if self.start_method != "fork":
                # While they start: that takes as long as to publish 150 MB.
                if self._published is None:
                    self._publish(self._new_job)
                self._send_jobs()
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
        before, self._published = self._published, publish.share(encoded, -next(self._publications))
        if before is not None:
            before.close()
        return encoded.modules

    def capacity(self) -> int:
        return sum(HELD - len(handle.tasks) for handle in self._workers) - len(self._requeued)

    def submit(self, task: Task) -> None:
        handle = min(self._workers, key=_load)
        pickled = _pickle_task(task)
        key = task.run, task.seq
        slot, wanted = None, self._sizes.wanted
        # A task that is sent again, after an interruption, may be done twice: only the first has a slot.
        if key not in handle.slots and wanted >= SLOT_BYTES:
            # Noted at once, before it is used, and with its worker: free again when that has replied or is reaped.
            slot = handle.slots[key] = self._crew.arena.take(wanted)
            if slot is not None:
                self._send_segments(handle, slot.segment)
        # Sent before it is noted: an interruption in between makes a batch twice, the other order never.
        handle.link.send(pack_head(TASK, *key, pack_slot(slot) + pickled))
        handle.tasks[key] = task

    def receive(self) -> Iterator[Result]:
        for handle in list(self._workers):
            if not handle.link.torn:
                handle.link.flush()
                handle.link.receive()
            if handle.link.torn:
                # What it has sent is done again too: a message may have been interrupted in being decoded.
                self._replace(handle)
                continue
            yield from self._take(handle)
            if handle.link.torn:
                self._replace(handle)
            elif handle.link.ended or (handle.sentinel in self._ended and handle.has_ended()):
                yield from self._bury(handle)
        while self._requeued and self.capacity() + len(self._requeued) > 0:
            self.submit(self._requeued[0])
            self._requeued.popleft()

    def wait(self) -> None:
        handles, waker = list(self._workers), self._crew.wake_reader
        if not handles:
            return
        try:
            self._ended |= wait_for_any(
                [handle.link for handle in handles], [handle.sentinel for handle in handles], waker
            )
            while waker.poll():
                waker.recv_bytes()
        except (OSError, EOFError, ValueError):
            # Workers were closed or replaced under us; the caller looks before it waits again.
            if handles == self._workers:
                raise

    def wake(self) -> None:
        self._crew.wake()

    def cancel(self, run: int) -> None:
        self._requeued = deque(task for task in self._requeued if task.run != run)
        for handle in self._workers:
            # The last task of a worker may not have begun; the worker answers for each that it drops.
            if any(task.run == run for task in handle.tasks.values()):
                handle.link.send(pack_head(CANCEL, run))

    def close(self) -> None:
        self._crew.close()
        self._requeued.clear()
        self._ended.clear()
        if self._published is not None:
            self._published.close()
        self._published = self._new_job = None

    def closer(self) -> Callable[[], None]:
        return self._crew.close

    # -- workers --------------------------------------------------------------------------------------------

    def _launch(self, number: int) -> WorkerHandle:
        ours, theirs = multiprocess.Pipe(duplex=True)
        link = make_link(ours)
        try:
            process: Any
            if self.start_method == "spawn" and spawning.AVAILABLE:
                process = spawning.SpawnedProcess(number, self.num_workers, theirs)
            else:
                process = self._context.Process(
                    target=worker.main,
                    args=(theirs, number, self.num_workers, self._new_job if self.start_method == "fork" else None),
                    name=f"sharded_loader-worker-{number}",
                    daemon=True,
                )
            with starting_worker(self.start_method):
                process.start()
            forget_process(process)
        except BaseException:
            link.close()
            raise
        finally:
            theirs.close()
        return WorkerHandle(number, process, link)

    def _send_jobs(self) -> None:
        for handle in self._workers:
            self._send_job(handle.link)

    def _send_job(self, link: Link) -> None:
        published = self._published
        if published is not None:
            if published.segment is not None:
                _send_segment(link, published.segment)
            link.send(pack_head(JOB, published.number, 0, published.head), published.buffers, places=published.places)

    def _take(self, handle: WorkerHandle) -> Iterator[Result]:
        """Deal with the messages of a worker; each leaves the inbox after the caller has filed it."""
        while handle.link.inbox:
            message = handle.link.inbox[0]
            kind, run, seq, content = unpack_head(message.head)
            if kind == FAILED:
                self.close()
                raise decode_error(decode(content))
            if kind == READY:
                handle.ready = True
            else:
                if message.result is None:
                    # Decoding lends the slot out, which must not happen twice: torn, if interrupted.
                    handle.link.torn = True
                    message.result = self._decode(handle, run, seq, content, message)
                    handle.link.torn = False
                yield message.result
                handle.tasks.pop((run, seq), None)
            handle.link.inbox.popleft()

    def _decode(self, handle: WorkerHandle, run: int, seq: int, content: memoryview, message: Message) -> Result:
        """The result in a message. Its slot is lent out with it, or free again if nothing lies in it."""
        wanted, content = unpack_wanted(content)
        self._sizes.note(wanted)
        slot = handle.slots.get((run, seq))
        if slot is not None:
            # Also if nothing lies in it: then it comes back at once. And noted last: as long as it is not lent, an
            # interruption leaves it with its worker (`Crew.free_slots`).
            whole = self._crew.arena.lend(slot)
            message.buffers = [
                whole[place[0] : sum(place)] if isinstance(place, tuple) else place for place in message.buffers
            ]
        handle.slots.pop((run, seq), None)
        return _decode_result(run, seq, content, message, handle.tasks.get((run, seq)))

    def _send_segments(self, handle: WorkerHandle, number: int) -> None:
        """Let the worker know the segments up to this one."""
        for segment in self._crew.arena.segments[handle.segments : number + 1]:
            _send_segment(handle.link, segment)
            handle.segments = segment.number + 1

    def _replace(self, handle: WorkerHandle) -> None:
        """A new worker in place of this one; what it had to do is done again."""
        with uninterrupted():
            self._ended.discard(handle.sentinel)
            new = self._launch(handle.number)
            self._send_job(new.link)
            self._requeued.extend(handle.tasks.values())
            self._workers[self._workers.index(handle)] = new
            handle.link.close()
            handle.release()
            self._crew.free_slots(handle)

    def _bury(self, handle: WorkerHandle) -> Iterator[Result]:
        """A worker has ended by itself: say so, and put another in its place."""
        handle.process.join(1.0)
        exitcode = handle.process.exitcode
        who = f"worker {handle.number} (pid {handle.process.pid}) died: {describe_exit(exitcode)}"
        if not handle.ready:
            self.close()
            raise WorkerDiedError(
                f"{who}. It had not begun to read: it died while it started, unpickled the dataset or ran "
                f"worker_init_fn; its own output on stderr may say more",
                worker=handle.number,
                exitcode=exitcode,
            )
        first = next(iter(handle.tasks.values()), None)
        if first is None:
            yield Result(
                ANY_RUN,
                0,
                error=WorkerDiedError(
                    f"{who}. It was idle, no batch is lost; another has taken its place and iteration can go on",
                    worker=handle.number,
                    exitcode=exitcode,
                ),
                at_once=True,
            )
        else:
            yield Result(
                first.run,
                first.seq,
                error=WorkerDiedError(
                    f"{who}. It was reading epoch {first.epoch}, batch {first.seq}; that batch is lost, iteration "
                    f"can go on with the others. To look for the sample that did it, in this process: "
                    f"{read_again([index for shard in first.shards for index in shard], first.epoch)}",
                    worker=handle.number,
                    exitcode=exitcode,
                    batch=first.seq,
                ),
                at_once=True,
            )
            handle.tasks.pop((first.run, first.seq), None)
        self._replace(handle)


def _send_segment(link: Link, segment: Segment) -> None:
    name = (segment.name or "").encode()
    link.send(pack_head(SEGMENT, segment.number, segment.nbytes, name), descriptor=None if segment.name else segment.fd)


def _load(handle: WorkerHandle) -> int:
    return len(handle.tasks)


def _pickle_task(task: Task) -> bytes:
    """Keys of the user's own classes go by value: a spawned worker does not have the script they come from."""
    if all(set(map(type, shard)) <= {int, str} for shard in task.shards):
        return pickle.dumps(task, protocol=5)
    try:
        return bytes(cloudpickle.dumps(task, protocol=5))
    except Exception as error:
        raise TypeError(
            f"the indices of a batch cannot be sent to a worker process ({error}): let the sampler yield integers "
            f"or strings, or read with threads (thread_pool=True)"
        ) from error


def _decode_result(run: int, seq: int, content: Any, message: Message, task: Task | None) -> Result:
    """The result in a message; if it cannot be unpickled here, that is its batch's error."""
    try:
        reply: Reply = decode(content, message.buffers)
    except Exception as error:
        failure = TypeError(
            f"the batch left its worker, but cannot be unpickled in this process ({type(error).__name__}: {error}): "
            f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
        )
        failure.__cause__ = error
        if task is not None:
            Place(task.epoch, seq).note(failure, samples=task.shards[0])
        return Result(run, seq, error=failure)
    if reply.error is None and not reply.skipped:
        return reply.result
    return reply.result._replace(
        error=None if reply.error is None else decode_error(reply.error),
        skipped=tuple((index, decode_error(error)) for index, error in reply.skipped),
    )
