"""The actor that reads: the worker side of `RayPool`.

    begin(published) -> Begun                       receives the dataset, over memory shared by its node's workers
    follow(run, position, published)                its dataset prefetches by this order, for all actors of the node
    read(tasks, run, position) -> Group             the group's batches, which Ray puts into its object store
    where(), stacks(), cancel(run)                  answered by a second thread while the first one reads

A group is assembled in one block of this process's memory, which Ray copies into the object store when `read` returns,
so the block is reused. The driver maps the copy (`ray.cluster`). `begin` returns an error if the job is unusable;
errors of tasks are replies. Ray ends the process when the driver is gone.
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
"""Size of a group's memory, as a multiple of the largest recent group. Untouched pages take no memory."""


class Begun(NamedTuple):
    """Reply of a worker that has its job: process, node id and address, and an encoded error if the job is unusable."""

    pid: int
    node: str
    host: str
    failure: bytes | None = None


Group = tuple[bytes, "list[tuple[int, int]]", Array, "list[Array]"]
"""Concatenated replies; offset (-1: in the rest) and size of each buffer; the memory; the rest."""


class _ActorReader(TaskReader):
    """Explains errors that are typical of cluster nodes."""

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
    """One worker, ``number`` of ``num_workers``; ``threads`` limits BLAS and OpenMP."""

    def __init__(self, number: int, num_workers: int, threads: int) -> None:
        self._threads = threads
        self._node, self._host = here()
        self._reading = _ActorReader(number, num_workers, f"worker {number} (pid {os.getpid()} on {self._host})")
        self._memory: Array = np.empty(0, np.uint8)
        self._sizes, self._groups = RecentSizes(), RecentSizes()
        self._positions: dict[int, int] = {}  # by run: position in the order that the dataset prefetches

    def begin(self, published: tuple[bytes, Sequence[Array]]) -> Begun:
        """Take a job: its pickle, and its read-only buffers in the object store."""
        import threadpoolctl

        threadpoolctl.threadpool_limits(self._threads)  # for this thread, which reads
        self._positions.clear()
        failure = self._reading.begin(lambda: decode(*published))
        return Begun(os.getpid(), self._node, self._host, failure)

    def follow(self, run: int, position: int, published: tuple[bytes, Sequence[Array]]) -> None:
        """Announce the order of samples on all machines to the dataset, so that it prefetches them.

        ``published`` is an `Ahead`, and ``position`` the batch that the user receives next. Cancelling ``run``, or
        another order, ends it.
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
        """Read a group of tasks: a pickle of their run, seq and fields. ``position``: the user's progress in a run."""
        if run in self._positions:
            self._positions[run] = position
        reading, tasks = self._reading, decode(content)
        nbytes = max(self._sizes.wanted * len(tasks), self._groups.wanted)
        if not nbytes <= self._memory.nbytes <= SPARE * SPARE * nbytes:  # filling new memory takes four times as long
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
