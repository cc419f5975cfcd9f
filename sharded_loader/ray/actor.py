"""A worker on Ray, from its first call to its last.

    begin(published) -> Begun                       it has the dataset, over memory that its node's workers share
    follow(run, position, published)                its dataset fetches ahead by this order, for all actors of the node
    read(tasks, run, position) -> Group             the group's batches, which Ray puts into its object store
    where() -> words of the heartbeat                   answered by a second thread, while the first one reads
    stacks(), cancel(run)                           likewise

The batches of a group are put together in one stretch of this process's memory. Ray copies it into the object store
when `read` returns, so the next group may lie there again. The driver maps it (`ray.cluster`).

What can go wrong: the job cannot be taken (`begin` returns the error). What goes wrong with one task is its reply. Ray
ends the process when the driver has gone.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from sharded_loader.extend import Array, TaskReader
from sharded_loader.extend.data import follow
from sharded_loader.extend.engine import IDLE, SAMPLE, RecentSizes, decode, write_stacks
from sharded_loader.extend.tools import add_note
from sharded_loader.ray.cluster import here

SPARE = 2
"""The memory of a group is this many times as large as the largest group lately. What is not used takes no memory."""


class Begun(NamedTuple):
    """What a worker says when it has its job.

    Attributes:
        pid: its process.
        node: id of its node.
        host: address of its node.
        failure: an encoded error, if it cannot take the job.
    """

    pid: int
    node: str
    host: str
    failure: bytes | None = None


Group = tuple[bytes, "list[tuple[int, int]]", Array, "list[Array]"]
"""Replies, one after the other; of each buffer its offset in the memory (-1: it is the next of the rest) and its size;
the memory; the rest."""


class _ActorReader(TaskReader):
    """Knows what goes wrong on the nodes of a cluster."""

    def explain(self, error: BaseException, *, in_start: bool) -> None:
        note = None
        if in_start and isinstance(error, ModuleNotFoundError):
            note = (
                "the node does not have this module. Send it along: RayPool(n, "
                'runtime_env={"working_dir": "."}), or {"py_modules": [module]}, or {"pip": ["package"]}'
            )
        elif in_start and isinstance(error, FileNotFoundError):
            note = "each node opens the dataset's files: put them where all nodes see them"
        elif not in_start and isinstance(error, ValueError) and "read-only" in str(error):
            note = (
                "on Ray the dataset's arrays lie in memory that all workers of a node share, so they "
                "cannot be written to: copy the array first, in __getitem__ or in worker_init_fn"
            )
        if note is not None:
            add_note(error, f"sharded_loader: {note}")


class LoaderActor:
    """One worker.

    Args:
        number: from 0.
        num_workers: how many there are to be.
        threads: that BLAS and OpenMP may use.
    """

    def __init__(self, number: int, num_workers: int, threads: int) -> None:
        self._threads = threads
        self._node, self._host = here()
        self._reading = _ActorReader(number, num_workers, f"worker {number} (pid {os.getpid()} on {self._host})")
        self._memory: Array = np.empty(0, np.uint8)
        self._sizes, self._groups = RecentSizes(), RecentSizes()
        self._positions: dict[int, int] = {}  # by run, of the order that the dataset fetches ahead by

    def begin(self, published: tuple[bytes, Sequence[Array]]) -> Begun:
        """Take a job: its pickle and its buffers, which lie in the object store and cannot be written to."""
        import threadpoolctl

        threadpoolctl.threadpool_limits(self._threads)  # of this thread, which reads
        self._positions.clear()
        failure = self._reading.begin(lambda: decode(*published))
        return Begun(os.getpid(), self._node, self._host, failure)

    def follow(self, run: int, position: int, published: tuple[bytes, Sequence[Array]]) -> None:
        """Tell the dataset which samples come, on all machines together, so that it fetches them ahead.

        Args:
            run: whose order it is. If it is cancelled, or another one comes, the dataset ends that.
            position: the number of the batch that the user receives next.
            published: an `Ahead`.
        """
        job = self._reading.job
        assert job is not None  # it comes first
        ahead = decode(*published)
        self._positions.clear()
        self._positions[run] = position
        if run in self._reading.cancelled:
            self._positions.clear()
        follow(job.dataset, ahead.batches, partial(self._positions.get, run), ahead.later)

    def read(self, content: bytes, run: int = -1, position: int = 0) -> Group:
        """Read a group of tasks.

        Args:
            content: the pickle of run, seq and fields of each.
            run, position: of the order that is fetched ahead by, how far the user is.
        """
        if run in self._positions:
            self._positions[run] = position
        reading, tasks = self._reading, decode(content)
        nbytes = max(self._sizes.wanted * len(tasks), self._groups.wanted)
        if not nbytes <= self._memory.nbytes <= SPARE * SPARE * nbytes:  # new memory takes four times as long to fill
            self._memory = np.empty(SPARE * nbytes, np.uint8)
        memory, used = self._memory, 0
        replies: list[bytes] = []
        places: list[tuple[int, int]] = []
        rest: list[Array] = []
        for run, seq, fields in tasks:
            reply, encoded, slot = reading.answer(run, seq, fields, memory[used:])
            replies.append(reply)
            # A negative size marks an object. If the main process pins the memory, it copies the object's arrays out.
            places += [(-1 if offset < 0 else used + offset, size) for offset, size in encoded.places]
            rest += [np.frombuffer(buffer, np.uint8) for buffer in encoded.buffers]
            self._sizes.note(slot.wanted)
            used += slot.used
        reading.heartbeat[SAMPLE] = IDLE
        self._groups.note(used)
        return b"".join(replies), places, memory[:used], rest

    def where(self) -> list[int]:
        """Return the words of the heartbeat."""
        return list(self._reading.heartbeat)

    def stacks(self) -> None:
        """Write the user's frames of all threads to stderr."""
        write_stacks(__file__)

    def cancel(self, run: int) -> None:
        """Drop the tasks of this run that have not begun."""
        self._reading.cancelled.add(run)
        self._positions.pop(run, None)
