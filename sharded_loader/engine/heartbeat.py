"""Heartbeat of a worker: the step that it recorded last, readable after the worker has died.

    worker, at each step of a batch:      heartbeat[SHARD], heartbeat[SAMPLE] = ...       40 ns
    main process, for a dead worker:      sample_in(task, words) -> [index], or phase(words)

A heartbeat is a few integers, in shared memory for a process and in a list for a thread: the task (run, seq), the
shard, and the sample's position in it. Positions of single samples are recorded if there may be no second look: under
``timeout=``, with ``restarts`` of at most 1, and in suspect tasks, which a worker has died over already. Other tasks
record `ONE_BY_ONE`. Writes take no lock, so the position may be one sample old.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np

from sharded_loader.engine.messages import Task

RUN, SEQ, SHARD, SAMPLE = range(4)

# Steps other than a single sample, in place of its position:
IN_BULK, IN_BATCHIFY, SENDING, IDLE, BEGINNING, ONE_BY_ONE, IN_BATCH = -1, -2, -3, -4, -5, -6, -7

WORDS = 8
"""int64 words per worker: one cache line, so that no two workers write to the same line."""

UNUSED = 0, 0, 0, IDLE

Heartbeat = MutableSequence[int]


def heartbeat_in(memory: Any, number: int) -> Any:
    """Return the heartbeat of worker ``number`` in shared memory."""
    size = WORDS * 8
    return memoryview(memory)[number * size : (number + 1) * size].cast("q")


def is_at(words: Sequence[int], task: Task) -> bool:
    """Return True if the worker is busy with this task."""
    return words[SAMPLE] != IDLE and (words[RUN], words[SEQ]) == (task.run, task.seq)


def sample_in(task: Task, words: Sequence[int]) -> list[Any]:
    """Return the index that is being read, in a list; an empty list if the worker is not at a single sample.

    Example:
        >>> task = Task(0, 5, 0, 0, ([7, 8], [9]), True)
        >>> sample_in(task, [0, 5, 0, 1]), sample_in(task, [0, 5, 1, IN_BULK])
        ([8], [])
    """
    shard, sample = words[SHARD], words[SAMPLE]
    if sample < 0 or shard >= len(task.shards) or sample >= len(task.shards[shard]):
        return []
    index = task.shards[shard][sample]
    return [int(index) if isinstance(index, np.integer) else index]


_PHASES = {
    IN_BULK: "reading several samples at once",
    IN_BATCHIFY: "making the batch (collate_fn)",
    SENDING: "sending the batch",
    IDLE: "between batches",
    ONE_BY_ONE: "reading its samples",
    IN_BATCH: "reading the batch",
    BEGINNING: "beginning (indices, generators, dataset.set_epoch)",
}


def phase(words: Sequence[int]) -> str:
    """Describe the worker's step if it is not reading a single sample."""
    return _PHASES.get(words[SAMPLE], "reading a sample")
