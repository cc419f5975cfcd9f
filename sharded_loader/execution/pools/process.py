"""Processes that read: one pipe each, supervised, replaced when interrupted.

    trainer                                             worker i (execution/worker.py)
    submit -> least loaded worker's link  ==socket==>   receiver thread -> inbox -> Reader
    receive <- inbox of each link         <==socket==   encoded result
    wait    on all links, all sentinels and the waker: the only place that blocks

Not a ``Pool`` of ``multiprocess``: that one replaces a dead worker and forgets its task, and the caller waits
for ever. Here no lock or queue is shared between processes, so a worker can die anywhere and stops nobody.

A worker holds at most one task beyond the one it is doing: with a longer backlog, uneven samples leave one
worker with work while others idle.

What can go wrong, and what then:
  * a worker dies: at once a `WorkerDiedError` for the batch it was reading; its other task goes to another;
  * a worker cannot start (unpicklable dataset, ``worker_init_fn`` raises): that error, and the pool is closed;
  * KeyboardInterrupt between a system call and its bookkeeping: the link is torn; the worker is replaced and
    all its tasks are done again, without an error.

Start methods. ``multiprocess`` re-runs the user's script in a spawned worker, and in the forkserver. Not in
ours: the entries that say so are taken out of what it sends, and the dataset arrives by value. So a script
needs no ``if __name__ == "__main__"``, and classes and lambdas from a notebook work.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import multiprocess
from multiprocess import spawn

from sharded_loader.errors import WorkerDiedError, describe_exit
from sharded_loader.execution import worker
from sharded_loader.execution.pools.base import (
    ANY_RUN,
    Job,
    Pool,
    Result,
    Task,
    check_init_fn,
    check_num_workers,
    check_reserved,
)
from sharded_loader.execution.pools.link import Link, Message, make_link, wait_for_any
from sharded_loader.memory import publish
from sharded_loader.memory.codec import Encoded, decode, decode_error

HELD = 2
"""Tasks a worker holds: the one it does and one more, so that it never waits for the next."""

CLOSING_GRACE = 0.03
"""Seconds that workers get to end by themselves in `close`. An idle one needs 2 ms; one in the user's code
would not notice before the end of its sample."""


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
        max_bytes: reserved (bound on shared memory); this version takes only None.

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
        check_reserved("ProcessPool", timeout=timeout, max_bytes=max_bytes)
        if isinstance(restarts, bool) or not isinstance(restarts, int) or restarts < 0:
            raise ValueError(f"restarts is {restarts!r}; it must be an int of at least 0")
        self.start_method = choose_start_method(start_method)
        self.worker_init_fn = worker_init_fn
        self.restarts = restarts
        self._context = multiprocess.get_context(self.start_method)
        self._new_job: worker.NewJob | None = None
        self._published: Encoded | None = None
        self._workers: list[_WorkerHandle] = []
        self._requeued: deque[Task] = deque()
        self._ended: set[int] = set()
        self._wake_reader: Any = None
        self._wake_writer: Any = None

    def __repr__(self) -> str:
        return f"ProcessPool({self.num_workers}, start_method={self.start_method!r})"

    @property
    def started(self) -> bool:
        return bool(self._workers)

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, by number; empty before the first epoch and after `close`."""
        return [handle.process.pid for handle in self._workers]

    # -- verbs ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> None:
        self._new_job = worker.NewJob(job, self.worker_init_fn)
        if self._workers and self.start_method == "fork":
            self.close()  # forked workers hold the dataset as it was; new ones are born with the new one
        self._published = None
        if self.start_method != "fork":
            self._published = publish.publish(
                self._new_job, dataset=job.dataset, batchify_fn=job.batchify_fn, worker_init_fn=self.worker_init_fn
            )
        if self._workers:
            for handle in self._workers:
                self._send_job(handle.link)
            return
        self._wake_reader, self._wake_writer = multiprocess.Pipe(duplex=False)
        if self.start_method == "forkserver":
            start_forkserver()
        try:
            for number in range(self.num_workers):
                self._workers.append(self._launch(number))
        except BaseException:
            self.close()
            raise

    def capacity(self) -> int:
        return sum(HELD - len(handle.tasks) for handle in self._workers) - len(self._requeued)

    def submit(self, task: Task) -> None:
        handle = min(self._workers, key=_load)
        # Sent before it is noted: an interruption in between makes a batch twice, the other order never.
        handle.link.send(pickle.dumps(task, protocol=5))
        handle.tasks[task.run, task.seq] = task

    def receive(self) -> Iterator[Result]:
        for handle in list(self._workers):
            if not handle.link.torn:
                handle.link.flush()
                handle.link.receive()
            yield from self._take(handle)
            if handle.link.torn:
                self._replace(handle)
            elif handle.link.ended or handle.sentinel in self._ended:
                yield from self._bury(handle)
        while self._requeued and self.capacity() + len(self._requeued) > 0:
            self.submit(self._requeued[0])
            self._requeued.popleft()

    def wait(self) -> None:
        handles = list(self._workers)
        try:
            self._ended |= wait_for_any(
                [handle.link for handle in handles], [handle.sentinel for handle in handles], self._wake_reader
            )
            while self._wake_reader.poll():
                self._wake_reader.recv_bytes()
        except (OSError, EOFError, ValueError):
            # Another thread closed the pool under us; the caller looks before it waits again.
            if self._workers:
                raise

    def wake(self) -> None:
        if self._wake_writer is not None:
            self._wake_writer.send_bytes(b"")

    def cancel(self, run: int) -> None:
        self._requeued = deque(task for task in self._requeued if task.run != run)
        for handle in self._workers:
            # The last task of a worker may not have begun; the worker answers for each that it drops.
            if any(task.run == run for task in handle.tasks.values()):
                handle.link.send(pickle.dumps(worker.Cancel(run), protocol=5))

    def close(self) -> None:
        handles, self._workers = self._workers, []
        self._requeued.clear()
        self._ended.clear()
        self._published = None
        for handle in handles:
            handle.link.close()
        deadline = time.monotonic() + CLOSING_GRACE
        for handle in handles:
            handle.process.join(max(0.0, deadline - time.monotonic()))
        for handle in handles:
            handle.release()
        for end in (self._wake_reader, self._wake_writer):
            if end is not None:
                end.close()
        self._wake_reader = self._wake_writer = None

    # -- workers --------------------------------------------------------------------------------------------

    def _launch(self, number: int) -> _WorkerHandle:
        ours, theirs = multiprocess.Pipe(duplex=True)
        link = make_link(ours)
        try:
            process = self._context.Process(
                target=worker.main,
                args=(theirs, number, self.num_workers, self._new_job if self._published is None else None),
                name=f"sharded_loader-worker-{number}",
                daemon=True,
            )
            with _starting_worker():
                process.start()
        except BaseException:
            link.close()
            raise
        finally:
            theirs.close()
        handle = _WorkerHandle(number, process, link)
        self._send_job(link)
        return handle

    def _send_job(self, link: Link) -> None:
        if self._published is not None:
            buffers = (memoryview(self._published.head), *self._published.buffers)
            link.send(pickle.dumps(worker.JobFollows(), protocol=5), buffers)

    def _take(self, handle: _WorkerHandle) -> Iterator[Result]:
        """Deal with the messages of a worker; each leaves the inbox after the caller has filed it."""
        while handle.link.inbox:
            content = _decode_reply(handle.link.inbox[0])
            if isinstance(content, worker.Failed):
                self.close()
                raise decode_error(content.error)
            if isinstance(content, worker.Ready):
                handle.ready = True
            else:
                yield content
                handle.tasks.pop((content.run, content.seq), None)
            handle.link.inbox.popleft()

    def _replace(self, handle: _WorkerHandle) -> None:
        """A new worker in place of this one; what it had to do is done again."""
        self._ended.discard(handle.sentinel)
        new = self._launch(handle.number)
        self._workers[self._workers.index(handle)] = new
        self._requeued.extend(handle.tasks.values())
        handle.link.close()
        handle.release()

    def _bury(self, handle: _WorkerHandle) -> Iterator[Result]:
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
            samples = [index for shard in first.shards for index in shard]
            shown = ", ".join(map(repr, samples[:8])) + (", ..." if len(samples) > 8 else "")
            yield Result(
                first.run,
                first.seq,
                error=WorkerDiedError(
                    f"{who}. It was reading epoch {first.epoch}, batch {first.seq}, one of the samples ({shown}); "
                    f"that batch is lost, iteration can go on with the others. To look for the sample, read them "
                    f"in this process: loader.read(index, epoch={first.epoch})",
                    worker=handle.number,
                    exitcode=exitcode,
                    batch=first.seq,
                ),
                at_once=True,
            )
            handle.tasks.pop((first.run, first.seq), None)
        self._replace(handle)


class _WorkerHandle:
    """A worker as the trainer sees it. Owns the process object, the link and a descriptor of the process."""

    def __init__(self, number: int, process: Any, link: Link) -> None:
        self.number = number
        self.process = process
        self.link = link
        self.tasks: dict[tuple[int, int], Task] = {}
        self.ready = False
        self._pidfd: int | None = None
        # The sentinel of multiprocess is a pipe, which a process forked by the user's dataset keeps open
        # after the worker's death; a pidfd is the process itself.
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(process.pid)
        self.sentinel: int = process.sentinel if self._pidfd is None else self._pidfd

    def release(self) -> None:
        """End the process, if it has not ended, and give back what belongs to it."""
        if self.process.is_alive():
            self.process.kill()
        self.process.join()
        self.process.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


def _load(handle: _WorkerHandle) -> int:
    return len(handle.tasks)


def _decode_reply(message: Message) -> worker.Ready | worker.Failed | Result:
    reply = decode(message.head, message.buffers)
    if not isinstance(reply, worker.Reply):
        return reply  # type: ignore[no-any-return]
    if reply.error is None and not reply.skipped:
        return reply.result
    bare = reply.result
    return Result(
        bare.run,
        bare.seq,
        bare.batch,
        bare.samples,
        error=None if reply.error is None else decode_error(reply.error),
        skipped=tuple((index, decode_error(error)) for index, error in reply.skipped),
        seconds=bare.seconds,
    )


# -- starting -------------------------------------------------------------------------------------------------


def choose_start_method(start_method: str | None) -> str:
    """The start method to use: what is asked for, else what the user set for the process, else the default.

    Raises:
        ValueError: this platform does not have it.
    """
    known = multiprocess.get_all_start_methods()
    if start_method is None:
        chosen = multiprocessing.get_start_method(allow_none=True) or multiprocess.get_start_method(allow_none=True)
        return chosen or ("fork" if sys.platform.startswith("linux") else "spawn")
    if start_method not in known:
        raise ValueError(f"start_method is {start_method!r}; this platform has {', '.join(map(repr, known))}")
    return start_method


def start_forkserver() -> None:
    """Start the forkserver of ``multiprocess``, if none runs, with our modules imported: workers fork from it."""
    from multiprocess import forkserver

    if forkserver._forkserver._preload_modules == ["__main__"]:  # nobody has chosen otherwise
        forkserver.set_forkserver_preload(["sharded_loader.execution.worker"])
    with _starting_worker():
        forkserver.ensure_running()


_this_thread = threading.local()


def _preparation_data(name: str) -> dict[str, Any]:
    """``spawn.get_preparation_data``, without the user's script for our own workers."""
    data: dict[str, Any] = _original_preparation_data(name)
    if getattr(_this_thread, "starts_worker", False):
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


_original_preparation_data = spawn.get_preparation_data
spawn.get_preparation_data = _preparation_data


@contextlib.contextmanager
def _starting_worker() -> Iterator[None]:
    """Inside, this thread's processes start without the user's script and with SIGINT blocked.

    Blocked, because a Ctrl-C goes to the whole process group, and a worker that has not yet come to ignore
    it would end in a traceback.
    """
    block = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if block else set()
    _this_thread.starts_worker = True
    try:
        yield
    finally:
        _this_thread.starts_worker = False
        if block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
