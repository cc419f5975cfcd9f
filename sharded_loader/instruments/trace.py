"""The last batches as a Chrome trace: what ran when, in the main process and in each worker.

    trace_of(rows, name) -> the content of a JSON file, for ui.perfetto.dev or chrome://tracing
    stages_in_worker(row) -> the stages of a batch in its worker, for plots too

    lane "next()"     a slice "next" for each batch
    lane "tasks"      a slice "task" where tasks were given to the workers
    lane "worker 0"   the slices "read", "collate" and "write" of each batch

An arrow leads from each task to the worker that read the batch, and from there to the ``next`` that returned it. The
slices of a lane lie one behind the other, in whole nanoseconds: viewers drop those that overlap.

Source of the idea and the format: "Trace Event Format", the document of Chrome's trace viewer.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from sharded_loader.engine.messages import BatchTimes

NEXT, TASKS, MAIN_PROCESS, FIRST_WORKER = range(4)
"""Numbers of the lanes. In the third one the main process reads, if there are no workers."""

TASK_SECONDS = 2e-5
"""The length of the slice of a task: an arrow has to begin in a slice."""


def stages_in_worker(row: BatchTimes) -> Iterable[tuple[str, float, float]]:
    """The name, the beginning and the end of what its worker did with a batch; nothing if no worker had it."""
    cuts = (row.began, row.ended - row.collate, row.ended, row.written)
    return ((name, *cut) for name, cut in zip(("read", "collate", "write"), pairwise(cuts), strict=True) if row.began)


class _Trace:
    """The events so far.

    Args:
        start: the stamp from which on times count.
    """

    def __init__(self, start: float) -> None:
        self.events: list[dict[str, Any]] = []
        self._start, self._ends = start, dict[int, int]()

    def add(self, kind: str, name: str, lane: int, at: int = 0, **more: Any) -> None:
        """An event at a time in nanoseconds."""
        event = {"ph": kind, "name": name, "cat": "batch", "pid": os.getpid(), "tid": lane, "ts": at / 1000}
        self.events.append(event | more)

    def slice(self, name: str, lane: int, began: float, ended: float, **args: Any) -> tuple[int, int]:
        """A slice, behind the one before in its lane. When it is, in nanoseconds."""
        first, last = (round(1e9 * (stamp - self._start)) for stamp in (began, ended))
        first = max(first, self._ends.get(lane, first))
        self._ends[lane] = last = max(first, last)
        if first < last:
            self.add("X", name, lane, first, dur=(last - first) / 1000, args=args)
        return first, last


def trace_of(rows: Sequence[BatchTimes], name: str) -> dict[str, Any]:
    """A trace.

    Args:
        rows: the batches, in the order in which they were handed out.
        name: of the process.

    Example:
        >>> [event["args"]["name"] for event in trace_of([], "rank 0")["traceEvents"]]
        ['rank 0', 'next()', 'tasks']
    """
    trace = _Trace(min((stamp for row in rows for stamp in (row.asked, row.sent, row.began) if stamp), default=0.0))
    lanes = {NEXT: "next()", TASKS: "tasks"}
    for worker in sorted({row.worker for row in rows if row.began}):
        lanes[FIRST_WORKER + worker] = f"worker {worker}" if worker >= 0 else "main process"
    trace.add("M", "process_name", NEXT, args={"name": name})
    for lane, title in lanes.items():
        trace.add("M", "thread_name", lane, args={"name": title})
    sent = sorted({row.sent for row in rows if row.sent})
    tasks = {
        at: trace.slice("task", TASKS, at, min(at + TASK_SECONDS, then))[0] for at, then in pairwise([*sent, 1e99])
    }
    calls = []
    for number, row in enumerate(rows):
        about = {"epoch": row.epoch, "step": row.step, "samples": max(0, row.samples)}
        waited = {"waited_seconds": row.waited, "placing_seconds": row.placing, "cause": row.cause}
        calls.append((row.began, number, about, trace.slice("next", NEXT, row.asked, row.taken, **about, **waited)))
    for _, number, about, (asked, taken) in sorted(calls, key=lambda call: call[0]):  # as the workers had them
        row = rows[number]
        read = [trace.slice(stage, FIRST_WORKER + row.worker, *at, **about) for stage, *at in stages_in_worker(row)]
        if not (row.sent and read):
            continue
        came = max(asked, min(read[-1][1], taken - 1))  # inside ``next``
        arrow = {"s": (TASKS, tasks[row.sent]), "t": (FIRST_WORKER + row.worker, read[0][0]), "f": (NEXT, came)}
        if tasks[row.sent] <= read[0][0] <= came:  # clocks of other machines are not exact
            for kind, (lane, at) in arrow.items():
                trace.add(kind, "batch", lane, at, id=number, **{"bp": "e"} if kind == "f" else {})
    return {"traceEvents": trace.events, "displayTimeUnit": "ms"}
