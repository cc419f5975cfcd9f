"""Where a worker is, written so that it can be read when the worker is dead.

    worker, at each step of a batch:      board[SHARD], board[SAMPLE] = ...        40 ns
    main process, over a dead one:        sample_in(task, words) -> index, or phase(words)

A board is a few integers: in shared memory for a process, a list for a thread. They name the task (run, seq), the
shard, and the place of the sample in it; not the index, which may be any object: the main process has the task.

Each sample is noted only where it has to be known (`Reader`): under ``timeout=``, where a batch is given up at its
first death, and in a task that is read again because a worker has died over it. Otherwise the board says `ONE_BY_ONE`.

Nothing is locked. A worker that dies between two writes leaves a place that is one sample old.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any

import numpy as np

from sharded_loader.engine.messages import Task

RUN, SEQ, SHARD, SAMPLE = range(4)
TOLD = 4  # how often a worker process has written its stack because it was asked to

# Instead of a sample's place:
IN_BULK, IN_BATCHIFY, SENDING, IDLE, BEGINNING, ONE_BY_ONE, IN_BATCH = -1, -2, -3, -4, -5, -6, -7

WORDS = 8
"""int64 words per worker: a cache line, so that workers do not share one."""

UNUSED = 0, 0, 0, IDLE, 0

Board = MutableSequence[int]


def new_board() -> Board:
    """A board that only this process sees."""
    return list(UNUSED)


def board_in(memory: Any, number: int) -> Any:
    """The board of worker ``number`` in shared memory."""
    size = WORDS * 8
    return memoryview(memory)[number * size : (number + 1) * size].cast("q")


def is_at(words: Sequence[int], task: Task) -> bool:
    """Whether the worker is busy with this task."""
    return words[SAMPLE] != IDLE and (words[RUN], words[SEQ]) == (task.run, task.seq)


def sample_in(task: Task, words: Sequence[int]) -> list[Any]:
    """The index that is being read, in a list of one; empty if no single sample is.

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
    """What the worker was doing, where that was not reading a single sample."""
    return _PHASES.get(words[SAMPLE], "reading a sample")
