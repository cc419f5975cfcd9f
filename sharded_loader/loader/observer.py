"""What an iterator tells while it reads, and what the loader itself needs of it: which samples were left out.

    counts()             when an iterator's first batch is asked for: what `step` is to count in
    begin(epoch, counts) when that batch is handed out: the epoch has begun
    step(counts, ...)    for each batch, or an error in its place, that is handed out
    skip(samples, ...)   ``on_error`` has left samples out -> the error, if they are too many

Iterators call it one at a time, under the pipeline's lock. `Observer` measures nothing: with it, a loader reads just as
well. The one that measures is given by name (`sharded_loader.instruments`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_loader.base.errors import HAS_ENDED, TooManySkippedError, notes_of, text_of
from sharded_loader.base.notices import Notices
from sharded_loader.engine.pipeline import Entry, Pipeline

Stamps = tuple[float, float, float, float, bool]
"""The ``turn``, ``asked``, ``taken``, ``behind`` and ``starts`` of a batch: see `BatchTimes`."""


class Observer:
    """Knows what ``on_error`` has left out of one loader, and what went wrong quietly.

    Args:
        dataset: what is read.
        max_skipped: how many samples of an epoch ``on_error`` may skip or replace; None: any number.

    Attributes:
        times: `step` is called, with stamps. Otherwise nothing is timed.
        notices: what the loader and its pool count.
        skipped: ``(index, error)`` of the last samples that ``on_error`` skipped or replaced.
    """

    KEPT = 1000
    times = False

    def __init__(self, dataset: Any = None, max_skipped: int | None = None) -> None:
        self.dataset, self.max_skipped, self.notices = dataset, max_skipped, Notices()
        self.skipped: list[tuple[Any, BaseException]] = []

    def counts(self) -> Any:
        """What one iterator's batches are counted in."""

    def begin(self, epoch: int, counts: Any) -> None:
        """An iterator delivers its first batch of an epoch, and will add to these counts."""

    def step(self, counts: Any, entry: Entry, stamps: Stamps, pipeline: Pipeline) -> None:
        """A batch, or an error in its place, is handed out.

        Args:
            counts: what `begin` was given.
            entry: the batch.
            stamps: when.
            pipeline: that has read it.
        """

    def skip(self, skipped: Sequence[tuple[Any, BaseException]], where: str = "", before: int = 0) -> Exception | None:
        """Samples were skipped or replaced.

        Args:
            skipped: the index and the error of each.
            where: epoch and batch, in words.
            before: how many there were in this epoch before.

        Returns:
            The error to raise, if they are too many.
        """
        self.skipped.extend(skipped)
        del self.skipped[: -self.KEPT]
        for index, error in skipped:
            why = f"{type(error).__name__}: {text_of(error)}"
            for note in (note for note in notes_of(error) if note.endswith(HAS_ENDED)):
                self.notices.warn(note, f"{note} (in {where}; {why})")
            self.notices.happened("skipped_samples", f"on_error skipped or replaced sample {index!r} in {where}: {why}")
        count, limit = before + len(skipped), self.max_skipped
        return None if limit is None or count <= limit else TooManySkippedError(count, limit, where, *skipped[-1])
