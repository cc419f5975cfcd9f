"""Worker processes, as `pools.supervisor` reaches them: launched, given the job, killed, and asked why they ended.

    start(new_job)     fork: workers are launched with the job. spawn, forkserver: it is published once, and sent
    kill_late(workers) they write their stacks to stderr, and are killed
    last_words(worker) reaped: its exit code, its board, the traceback that it has sent

What the workers own in the system belongs to `pools.process.resources`, which holds no job, so that a finalizer may
hold it. What can go wrong: no process, descriptor or memory (OSError, MemoryError), a job that cannot be
pickled.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Sequence

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.engine.messages import CANCEL, JOB, NewJob, Task, pack_head
from sharded_loader.memory import publish
from sharded_loader.memory.references import Inherited
from sharded_loader.pools.deaths import Death
from sharded_loader.pools.process.link import Link
from sharded_loader.pools.process.resources import ProcessWorker, WorkerResources
from sharded_loader.pools.process.start import launch, send_segment, start_forkserver
from sharded_loader.pools.supervisor import Transport


class ProcessTransport(Transport[ProcessWorker]):
    """Worker processes, and the pipes to them.

    Args:
        num_workers, start_method, max_bytes: of the `ProcessPool`.

    Attributes:
        resources: what the workers own in the system; its `workers` are the workers.
        ended: sentinels of workers that have ended, and were not replaced yet.
    """

    def __init__(self, num_workers: int, start_method: str, max_bytes: int | None) -> None:
        self.num_workers = num_workers
        self.start_method = start_method
        self.resources = WorkerResources(max_bytes)
        self.ended: set[int] = set()
        self._new_job: NewJob | None = None
        # Negative, unlike those of batches, and each its own: a worker that is in a sample may get two in a row.
        self._publications = itertools.count(1)

    @property
    def workers(self) -> list[ProcessWorker]:
        return self.resources.workers

    def start(self, new: NewJob) -> list[Task]:
        self._new_job = new
        resources = self.resources
        if resources.workers and self.start_method != "fork":
            self._publish(new)
            self._send_jobs()
            return []
        if self.start_method == "forkserver":
            start_forkserver(self._publish(new))
        # Forked workers hold the dataset as it was: new ones are born with the new one, and do what was begun.
        begun = [task for worker in resources.workers for task in worker.tasks.values()]
        with uninterrupted():
            resources.stop_workers()
            self.ended.clear()
            resources.open(self.num_workers)
            self.launch_all()
        if self.start_method != "fork":
            # While they start: that takes as long as to publish 150 MB.
            if resources.published is None:
                try:
                    self._publish(new)
                except publish.NeedsInheritanceError:
                    if self.start_method != "spawn":
                        raise
                    self._start_with_inheritance(new)
            self._send_jobs()
        return begun

    def _start_with_inheritance(self, new: NewJob) -> None:
        """Start the workers again, with the descriptors of the locks and shared values in the job."""
        with uninterrupted():
            self.resources.stop_workers()
            self.resources.inherited = inherited = Inherited()
            self._publish(new, inherited)
            self.launch_all()

    def launch(self, number: int) -> ProcessWorker:
        assert self._new_job is not None  # the workers are being started, or have been
        worker = launch(number, self.num_workers, self.start_method, self.resources, self._new_job)
        if len(self.workers) == self.num_workers and self.start_method != "fork":  # it replaces another one
            self._send_job(worker.link)
        return worker

    def _publish(self, new: NewJob, inherited: Inherited | None = None) -> frozenset[str]:
        """Pickle the job for the workers; the modules that it needs there."""
        encoded = publish.publish(
            new,
            inherited,
            dataset=new.job.dataset,
            batchify_fn=new.job.batchify_fn,
            on_error=new.job.on_error,
            worker_init_fn=new.worker_init_fn,
        )
        with uninterrupted():
            before = self.resources.published
            self.resources.published = publish.share(encoded, -next(self._publications))
            if before is not None:
                before.close()
        return encoded.modules

    def _send_jobs(self) -> None:
        for worker in self.workers:
            self._send_job(worker.link)

    def _send_job(self, link: Link) -> None:
        published = self.resources.published
        if published is not None:
            if published.segment is not None:
                send_segment(link, published.segment)
            link.send(pack_head(JOB, published.number, 0, published.head), published.buffers, places=published.places)

    def send_cancel(self, worker: ProcessWorker, run: int) -> None:
        worker.link.send(pack_head(CANCEL, run))  # its last task may not have begun; it answers for each that it drops

    def where(self, worker: ProcessWorker) -> Sequence[int] | None:
        if not worker.ready:
            return ()
        return worker.board if worker.tasks else None

    def kill_late(self, late: Sequence[ProcessWorker], seconds: float) -> None:
        for worker in late:
            with uninterrupted():
                text = f"{self._death(worker).who} made no progress for {seconds:g} s"
                with contextlib.suppress(OSError):  # descriptor 2, where the worker writes too: not a notebook's cell
                    os.write(2, f"sharded_loader: {text}. Its stacks:\n".encode())
                worker.dump_stacks()
                worker.kill()
            self.ended.add(worker.sentinel)

    def last_words(self, worker: ProcessWorker, error: BaseException | None) -> Death:
        worker.wait(0.0 if worker.hung else 1.0)
        worker.release()
        return self._death(worker)

    def _death(self, worker: ProcessWorker) -> Death:
        return Death(
            worker.number,
            worker.pid,
            worker.exitcode,
            self.resources.oom_kills(),
            hung=worker.hung,
            board=list(worker.board),
            traceback=worker.traceback,
        )

    def release(self, worker: ProcessWorker) -> None:
        self.resources.poller = None
        self.ended.discard(worker.sentinel)
        worker.link.close()
        self.resources.free_slots(worker)

    def close(self) -> None:
        self.resources.close()
        self.ended.clear()
        self._new_job = None
