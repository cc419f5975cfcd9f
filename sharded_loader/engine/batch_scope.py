"""Where a reader is while it reads one batch, for `sample_rng()`, for errors, and for the loop around it."""

from __future__ import annotations

from typing import Any

from sharded_loader.base.errors import Location, as_exception, shorten
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.batching.protocol import Empty
from sharded_loader.engine.board import SHARD, Board
from sharded_loader.engine.messages import Task
from sharded_loader.engine.stream import PartPoint
from sharded_loader.randomness.rng import SampleScope


class BatchScope(SampleScope):
    """One task while it is read.

    Attributes:
        task, worker, empty, board: what `Reader.read` was given.
        misfit: positions of the sample that ``batchify_fn`` cannot use, or of two that do not fit together.
        skipped: the index and the error of each sample that was left out or replaced.
        dropped: how many samples were left out and not replaced.
        lost: the shards that have no sample left.
        point: see `Result`.
    """

    task: Task
    worker: str | None
    empty: Empty
    board: Board
    misfit: tuple[int, ...] = ()
    skipped: list[tuple[Any, BaseException]]
    dropped = 0
    lost: list[int]
    point: PartPoint | None = None

    def set_index(self, index: Any) -> None:
        """The samples are not read one by one from here on: `sample_rng()` goes by ``index``."""
        self.items, self.index, self.drawn = None, index, None

    def passes(self, error: BaseException) -> bool:
        """Whether an exception is no error of the batch, but is meant for the loop that reads in its own thread."""
        return self.worker is None and is_from_outside(error, reads=True)

    def noted(self, error: BaseException) -> Exception:
        """The exception as the error of the batch, with notes that say where the reader is."""
        task, indices, board = self.task, self.indices, self.board
        error = as_exception(error, "by the dataset or collate_fn")
        place = Location(task.epoch, task.seq, board[SHARD] if task.sharded else None, self.worker)
        found = [indices[position] for position in (self.misfit if self.items is None else (self.place,))]
        if len(found) == 2:
            place.note(error, misfit=(found[0], found[1]))
        else:
            place.note(error, found or None, samples=indices)
        shorten(error)
        return error
