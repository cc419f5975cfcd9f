"""The workers of a process pool: started, given a job, replaced when they end.

    start(new_job)  workers run, and have the job; those that ran already under fork are replaced
    bury(handle)    a worker has ended -> another takes its place and its tasks; the error of a batch that is given up
    stop_late()     workers that stand still for too long are killed; `bury` follows
    close()         no worker runs, and nothing that belongs to them is left

Which batch is to blame for a death, and when it is given up, is `pools.deaths`. What the workers own in the
system belongs to `pools.process.resources`, which holds no job, so that a finalizer may hold it.

What can go wrong: workers die before they can do anything (`PoolBroken`). The workers are closed then.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from typing import Any

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.engine.board import IN_BULK, ONE_BY_ONE, SAMPLE, is_at
from sharded_loader.engine.messages import JOB, NOTHING, NewJob, Result, Task, pack_head
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.memory import publish
from sharded_loader.memory.classes import classes_of_main
from sharded_loader.memory.inherit import Inherited
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
from sharded_loader.pools.process.link import Link
from sharded_loader.pools.process.resources import WorkerHandle, WorkerResources
from sharded_loader.pools.process.start import launch, send_segment, start_forkserver


class Workforce:
    """Keeps the workers of a pool running.

    Args:
        num_workers, start_method, restarts, timeout, max_bytes: of the `ProcessPool`.

    Attributes:
        resources: what the workers own in the system; its `handles` are the workers.
        requeued: tasks of workers that have ended, for others.
        ended: sentinels of workers that have ended, and were not replaced yet.
        deaths: what the workers have died of.
        watch: how long each of them has stood still.
    """

    def __init__(
        self,
        num_workers: int,
        start_method: str,
        restarts: int,
        timeout: float | None,
        max_bytes: int | None,
    ) -> None:
        self.num_workers = num_workers
        self.start_method = start_method
        self.restarts = restarts
        self.resources = WorkerResources(max_bytes)
        self.requeued: deque[Task] = deque()
        self.ended: set[int] = set()
        self.deaths = Deaths(restarts)
        self.watch = Watch(timeout)
        self._new_job: NewJob | None = None
        # Negative, unlike those of batches, and each its own: a worker that is in a sample may get two in a row.
        self._publications = itertools.count(1)
        self._classes: list[type] = []

    def start(self, new: NewJob) -> None:
        """Start the workers. Those that run already are sent the new job before any later task."""
        self._new_job = new
        self._classes = classes_of_main()
        self.deaths.new_job()
        resources = self.resources
        if resources.handles and self.start_method != "fork":
            self._publish(new)
            self._send_jobs()
            return
        if self.start_method == "forkserver":
            start_forkserver(self._publish(new))
        # Forked workers hold the dataset as it was: new ones are born with the new one, and do what was begun.
        begun = [task for handle in resources.handles for task in handle.tasks.values()]
        try:
            with uninterrupted():
                resources.stop_workers()
                self.ended.clear()
                self.requeued.extend(begun)
                resources.open(self.num_workers)
                for number in range(self.num_workers):
                    resources.handles.append(self._launch(number))
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
        except BaseException:
            self.close()
            raise

    def _start_with_inheritance(self, new: NewJob) -> None:
        """Start the workers again, with the descriptors of the locks and shared values in the job."""
        resources = self.resources
        with uninterrupted():
            resources.stop_workers()
            resources.inherited = inherited = Inherited()
            self._publish(new, inherited)
            for number in range(self.num_workers):
                resources.handles.append(self._launch(number))

    def _launch(self, number: int) -> WorkerHandle:
        assert self._new_job is not None  # the workers are being started, or have been
        return launch(number, self.num_workers, self.start_method, self.resources, self._new_job)

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
        for handle in self.resources.handles:
            self._send_job(handle.link)

    def _send_job(self, link: Link) -> None:
        published = self.resources.published
        if published is not None:
            if published.segment is not None:
                send_segment(link, published.segment)
            link.send(pack_head(JOB, published.number, 0, published.head), published.buffers, places=published.places)

    def close(self) -> None:
        """Stop the workers, and give back what belongs to them."""
        self.resources.close()
        self.requeued.clear()
        self.ended.clear()
        self.deaths = Deaths(self.restarts)
        self._new_job = None
        self._classes = []

    # -- workers that end, or stand still -------------------------------------------------------------------

    def bury(self, handle: WorkerHandle) -> list[Result]:
        """A worker has ended: another takes its place and its tasks.

        Returns:
            The error of the batch that has killed too many workers; nothing if there is no such batch. With it ends the
            part of iterable data that it belongs to: to get past the batch, a worker would have to read it.

        Raises:
            PoolBroken: workers die without having done anything; they are closed.
        """
        with uninterrupted():
            handle.wait(0.0 if handle.hung else 1.0)
            handle.release()
        results: list[Result] = []
        given_up = self._count_death(handle)
        if given_up is not None:
            key = given_up.run, given_up.seq
            self.deaths.settle(*key)
            assert self._new_job is not None  # its workers read it
            task = handle.tasks.pop(key)
            ended = unreachable_after(task, [*self.requeued, *handle.tasks.values()], self._new_job.job)
            if ended:
                handle.tasks = {at: task for at, task in handle.tasks.items() if task not in ended}
                self.requeued = deque(task for task in self.requeued if task not in ended)
            results = [given_up, *(Result(task.run, task.seq, NOTHING) for task in ended)]
        with uninterrupted():
            resources = self.resources
            resources.poller = None
            self.ended.discard(handle.sentinel)
            new = self._launch(handle.number)
            self.requeued.extend(handle.tasks.values())
            resources.handles[resources.handles.index(handle)] = new
            handle.link.close()
            resources.free_slots(handle)
            if self.start_method != "fork":
                self._send_job(new.link)
        return results

    def fate(self, handle: WorkerHandle) -> str:
        """How a worker has ended, in words."""
        if handle.hung:
            return f"worker {handle.number} (pid {handle.pid}) made no progress for too long (timeout), and was killed"
        return str(self._death(handle))

    def _death(self, handle: WorkerHandle) -> Death:
        return Death(handle.number, handle.pid, handle.exitcode, self.resources.oom_kills())

    def _count_death(self, handle: WorkerHandle) -> Result | None:
        words, death = list(handle.board), self._death(handle)
        if not handle.ready:
            if self.deaths.record_start_death(handle.number, 1 if handle.hung else handle.exitcode):
                self.close()
                raise PoolBroken(died_in_start(death, hung=handle.hung, traceback=handle.last_words))
            self.deaths.print_once(death, handle.last_words)
            return None
        task = next((task for task in handle.tasks.values() if is_at(words, task)), None)
        if task is None:
            if self.deaths.record_idle_death(handle.number):
                self.close()
                raise PoolBroken(died_idle(death))
            return None
        if self.deaths.record_batch_death(task):
            return Result(task.run, task.seq, error=self._blame(handle, death, task, words))
        if words[SAMPLE] in (IN_BULK, ONE_BY_ONE):
            handle.tasks[task.run, task.seq] = task._replace(careful=True)
        return None

    def _blame(self, handle: WorkerHandle, death: Death, task: Task, words: list[int]) -> Exception:
        tries = max(1, self.restarts)
        if handle.hung and self.watch.timeout is not None:
            who = f"worker {handle.number} (pid {handle.pid})"
            return timed_out(who, self.watch.timeout, task, words, tries, killed=True)
        return died(death, task, words, tries)

    def stop_late(self) -> None:
        """Kill the workers that stand still. Their deaths are dealt with as such."""
        watched: list[tuple[WorkerHandle, Any]] = []
        for handle in self.resources.handles:
            if not handle.hung and (handle.tasks or not handle.ready):  # a hung one has been killed
                watched.append((handle, handle.board if handle.ready else ()))
        for handle in self.watch.late(watched):
            handle.hung = True
            with uninterrupted():
                late = f"worker {handle.number} (pid {handle.pid}) made no progress for {self.watch.timeout:g} s"
                with contextlib.suppress(OSError):  # descriptor 2, where the worker writes too: not a notebook's cell
                    os.write(2, f"sharded_loader: {late}. Its stacks:\n".encode())
                handle.dump_stacks()
                handle.kill()
            self.ended.add(handle.sentinel)
