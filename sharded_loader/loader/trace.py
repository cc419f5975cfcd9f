"""The last batches as a Chrome trace: what ran when, in the main process and in each worker.

    trace_of(rows, name) -> the content of a JSON file, for ui.perfetto.dev or chrome://tracing

    lane "next()"     a slice for each ``next``; in it "placing"
    lane "tasks"      a slice where tasks were given to the workers
    lane "worker 0"   a slice for each batch; in it "read", "collate" and "write"

An arrow leads from each task to the worker that read the batch, and from there to the ``next`` that returned it. The
slices of a lane lie in each other or apart, in whole nanoseconds: viewers drop others.

Source of the idea and the format: "Trace Event Format", the document of Chrome's trace viewer.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from sharded_loader.loader.times import BatchTimes

NEXT, TASKS, MAIN_PROCESS, FIRST_WORKER = range(4)
"""Numbers of the lanes. In the third one the main process reads, if there are no workers."""

TASK_NS = 20_000
"""The length of the slice of a task: an arrow has to begin in a slice."""


class _Trace:
    """The events so far.

    Args:
        start: the stamp from which on times count.
    """

    def __init__(self, start: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._start, self._ends = start, dict[int, int]()

    def ns(self, stamp: float) -> int:
        return round(1e9 * (stamp - self._start))

    def add(self, kind: str, name: str, lane: int, at: int = 0, **more: Any) -> None:
        event = {"ph": kind, "name": name, "cat": "batch", "pid": os.getpid(), "tid": lane, "ts": at / 1000}
        self.events.append(event | more)

    def slice(self, name: str, lane: int, began: int, ended: int, **args: Any) -> tuple[int, int]:
        """A slice, behind the one before in its lane: clocks of other machines are not exact. When it is."""
        began = max(began, self._ends.get(lane, began))
        self._ends[lane] = ended = max(began, ended)
        self.add("X", name, lane, began, dur=(ended - began) / 1000, args=args)
        return began, ended

    def parts(self, lane: int, whole: tuple[int, int], names: Sequence[str], *cuts: int) -> None:
        """Slices inside the one that was added last, one behind the other."""
        cuts = tuple(min(max(cut, whole[0]), whole[1]) for cut in cuts)
        for name, (began, ended) in zip(names, pairwise(cuts), strict=True):
            if began < ended:
                self.add("X", name, lane, began, dur=(ended - began) / 1000)


def trace_of(rows: Sequence[BatchTimes], name: str) -> dict[str, Any]:
    """A trace.

    Args:
        rows: the batches, in the order in which they were handed out.
        name: of the process.

    Example:
        >>> [event["args"]["name"] for event in trace_of([], "rank 0")["traceEvents"]]
        ['rank 0', 'next()', 'tasks']
    """
    made = _Trace(min((stamp for row in rows for stamp in (row.asked, row.sent, row.began) if stamp), default=0.0))
    lanes = {NEXT: "next()", TASKS: "tasks"}
    for worker in sorted({row.worker for row in rows if row.began}):
        lanes[FIRST_WORKER + worker] = f"worker {worker}" if worker >= 0 else "main process"
    made.add("M", "process_name", NEXT, args={"name": name})
    for lane, title in lanes.items():
        made.add("M", "thread_name", lane, args={"name": title})
    tasks = sorted({made.ns(row.sent) for row in rows if row.sent})
    for at, following in pairwise([*tasks, tasks[-1] + TASK_NS] if tasks else []):
        made.slice("task", TASKS, at, min(at + TASK_NS, following))
    for number, row in enumerate(rows):
        batch, lane = f"batch {row.step}", FIRST_WORKER + row.worker
        about = {"epoch": row.epoch, "step": row.step, "samples": row.samples}
        taken = made.ns(row.taken)
        whole = made.slice("next", NEXT, made.ns(row.asked), taken, **about, waited_seconds=row.waited, cause=row.cause)
        made.parts(NEXT, whole, ["placing"], made.ns(row.taken - row.placing), taken)
        if not row.began:
            continue
        began, ended, written = map(made.ns, (row.began, row.ended, row.written))
        read = made.slice(batch, lane, began, written, **about)
        made.parts(lane, read, ["read", "collate", "write"], began, made.ns(row.ended - row.collate), ended, written)
        sent, come = made.ns(row.sent), max(whole[0], min(read[1], whole[1] - 1))  # inside ``next``
        if row.sent and sent <= read[0] <= come:
            for kind, place, at in (("s", TASKS, sent), ("t", lane, read[0]), ("f", NEXT, come)):
                made.add(kind, "batch", place, at, id=number, **{"bp": "e"} if kind == "f" else {})
    return {"traceEvents": made.events, "displayTimeUnit": "ms"}
