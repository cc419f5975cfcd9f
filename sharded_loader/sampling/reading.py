"""One epoch's batches for this rank, from any place on, and the place after each of them.

    (epoch, Place or None) -> EpochReading.first, (number) -> batches from that number on    -> execution/plan.py
                              EpochReading.place(delivered) -> Place                         -> state.py

A `Place` counts in the global order, which all ranks share: samples, or batches if a batch sampler was given. So
it holds nothing of the rank, and what lies behind it can be dealt out to any number of ranks, in batches of any
size. Without a place an epoch is the sampler's own; from a place on

    keep, discard, given batches    the rest of the epoch's items, dealt out and padded anew, is cut into batches;
    rollover                        the endless stream goes on up to where epoch + 1 begins for this number of
                                    ranks and batch size. If those are others than before, the last batch may be
                                    smaller; and if the place lies behind the beginning of epoch + 1, the rest of
                                    the epoch is empty and epoch + 1 begins at the place (`carry`).

Batches keep their numbers: after k whole ones the next is number k, also where batches were of another size.

What can go wrong: the sampler; a foreign one that cannot get back to its mark (`sharded_loader.sampling.tracing`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sharded_loader.sampling.epochs import noted, put_back
from sharded_loader.sampling.foreign import find_foreign, iter_epoch, len_epoch, nested
from sharded_loader.sampling.signature import Signature
from sharded_loader.sampling.tracing import Mark, Trace

_END: Any = object()


@dataclass(frozen=True, slots=True)
class Place:
    """Where an epoch goes on.

    Attributes:
        epoch: number of the epoch.
        done: items of its global order that are done. With rollover it is negative while the last samples of the
            epoch before, which begin this one, are still due.
        mark: how a foreign sampler gets there; None: by (seed, epoch).
    """

    epoch: int
    done: int = 0
    mark: Mark | None = None


@dataclass(frozen=True)
class Source:
    """What an epoch is read from, as it is settled when the epoch begins.

    Attributes:
        batches: the sampler of this rank's batches.
        items: the sampler of the global order: of samples, or of batches.
        batch_size: samples per batch; None: ``items`` are batches.
        replicas, rank: how many ranks there are, and which is this one.
        dealt: whether ``batches`` deals out to ranks.
        seed: starts foreign samplers.
        arrays: batches may be int64 arrays instead of lists (only with ``batch_size``).
    """

    batches: Any
    items: Any
    batch_size: int | None
    replicas: int
    rank: int
    dealt: bool
    seed: int
    arrays: bool = False

    @property
    def cuts(self) -> bool:
        """Whether the last items of an epoch may belong to no batch of it."""
        return any(getattr(one, "last_batch", "keep") != "keep" for one in nested(self.batches))

    @property
    def rollover(self) -> bool:
        return self.batch_size is not None and self.batches.last_batch == "rollover"

    def open(self, epoch: int, start: int, offset: int) -> Iterator[Any]:
        """The batches of an epoch after ``offset`` items of the global order and ``start`` batches."""
        if self.batch_size is not None:
            own: Iterator[Any] = self.batches.iter_epoch(epoch, start, offset=offset, arrays=self.arrays)
            return own
        if self.dealt:
            batches: Iterator[Any] = self.batches.iter_epoch(epoch, start, offset=offset)
            return batches
        return iter_epoch(self.batches, epoch, self.seed, start + offset)

    def length(self, epoch: int, offset: int) -> int:
        """How many batches `open` gives."""
        if self.batch_size is not None or self.dealt:
            length: int = self.batches.len_epoch(epoch, offset=offset)
            return length
        return max(len_epoch(self.batches, epoch) - offset, 0)


class EpochReading:
    """One epoch's batches, from a place on.

    Args:
        source: the samplers.
        epoch: which epoch.
        place: where in it; None: at its beginning.
        signature: of the order, as it is settled when the epoch begins.

    Attributes:
        resumed: whether there was a place.
        first: number of the first batch.
        carry: where the next epoch begins, if that is not its own beginning.
    """

    def __init__(self, source: Source, epoch: int, place: Place | None, signature: Signature) -> None:
        self.epoch = epoch
        self.signature = signature
        self.resumed = place is not None
        self.carry: Place | None = None
        self._source = source
        self._place = place or Place(epoch)
        self._foreign = find_foreign(source.batches)
        self._marks: deque[tuple[int, Mark | None]] = deque()
        self._at_end: Mark | None = None
        self._course: _Fixed | _Rolling
        if source.rollover:
            self._course = _Rolling(source, epoch, place)
            if self._course.behind:
                self.carry = Place(epoch + 1, self._place.done - self._course.global_length, self._place.mark)
        else:
            self._course = _Fixed(source, epoch, self._place.done, self._foreign is None)
        self.first = self._course.first
        self._marks.append((self.first, self._place.mark))

    def __call__(self, batch: int) -> Iterator[Any]:
        """The epoch's batches from number ``batch`` on (at least `first`)."""
        skip = batch - self.first
        if self._foreign is None:
            return self._course.open(skip)
        return self._follow(batch, lambda: self._course.open(skip))

    def _follow(self, batch: int, start: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Read batches of a sampler of another library, and note a mark after each."""
        while self._marks[-1][0] > batch:
            self._marks.pop()  # read again after an interruption
        trace = Trace(self._foreign, _rank_of(self._foreign), self._marks[-1][1])
        batches: Iterator[Any] | None = None
        while True:
            before = noted(nested(self._foreign))
            try:
                with trace:
                    if batches is None:
                        batches = start()
                    items = next(batches, _END)
                    mark = trace.mark()
                put_back(before)
            except BaseException:  # also a Ctrl-C that comes while they are put back
                put_back(before)
                raise
            if items is _END:
                self._at_end = mark
                return
            batch += 1
            self._marks.append((batch, mark))
            yield items

    @property
    def in_mid_epoch(self) -> bool:
        """Whether some of the epoch's own items were done at the place."""
        return self._course.begun

    def is_over(self) -> bool:
        """Whether the place lies in mid-epoch and no batch is left there, as far as that can be known now."""
        if not self.in_mid_epoch:
            return False
        mark, source = self._place.mark, self._source
        if mark is not None and mark.finished and not source.rollover:
            return True
        if mark is not None and not source.cuts:
            return False  # a sampler of another library may yield more than its length says
        try:
            return self._course.length() == 0
        except Exception:
            return False  # it has no length

    def following(self) -> Place:
        """Where the next epoch begins, if this one `is_over`."""
        place = self._place
        if self._source.rollover:
            return Place(self.epoch + 1, place.done - self._course.global_length, place.mark)
        mark = place.mark
        # A sampler that goes on by a state of its own is led through the end of this epoch.
        return Place(self.epoch + 1, 0, None if mark is None or mark.state is None else replace(mark, finished=True))

    def length(self) -> int:
        """How many batches the epoch has, those before `first` included.

        Raises:
            TypeError: a foreign sampler has no ``__len__``.
        """
        return self.first + self._course.length()

    def position(self, batch: int) -> int:
        """Where in the global order the batch begins for this rank."""
        return self._course.done(batch - self.first) + self._source.rank

    def place(self, delivered: int) -> Place:
        """The place after so many batches of the epoch (as they are numbered: at least `first`)."""
        mark = dict(list(self._marks)).get(delivered)  # a copy, whole: another thread may be reading ahead
        done = self._course.done(delivered - self.first)
        return Place(self.epoch, done if delivered == self.first else self._course.clamp(done), mark)

    def after(self, place: Place) -> Place:
        """The place that the next epoch begins at, as a foreign sampler gets there when this epoch is over.

        That matters where the sampler goes on from it: with rollover, or by a state of its own.
        """
        mark = self._at_end
        if mark is None or place.mark is not None or (mark.state is None and not self._source.rollover):
            return place
        return Place(place.epoch, place.done, mark)

    def forget(self, delivered: int) -> None:
        """Marks before the last delivered batch are not needed again (that batch itself may be taken back)."""
        marks = self._marks
        while len(marks) > 1 and marks[0][0] < delivered - 1:
            marks.popleft()


class _Fixed:
    """Epochs on their own: keep, discard, given batches."""

    def __init__(self, source: Source, epoch: int, done: int, sized: bool) -> None:
        self._source, self._epoch, self._done = source, epoch, done
        self.begun = done > 0
        self.global_length = 0
        self._step = source.replicas * (source.batch_size or 1)
        self._sized = sized
        at_end = done > 0 and sized and done >= len_epoch(source.items, epoch)
        # At the end a short last batch counts as one.
        self.first = -(-done // self._step) if at_end else done // self._step

    def open(self, skip: int) -> Iterator[Any]:
        return self._source.open(self._epoch, skip, self._done)

    def length(self) -> int:
        return self._source.length(self._epoch, self._done)

    def done(self, batches: int) -> int:
        return self._done + batches * self._step

    def clamp(self, done: int) -> int:
        # A foreign sampler may yield more than its length.
        return min(done, len_epoch(self._source.items, self._epoch)) if self._sized else done


class _Rolling:
    """A stretch of the endless stream of epochs, of N samples each: n = ceil(N / replicas) for every rank.

    A *step* is a sample for each rank; step j of the stream as dealt from its beginning lies in epoch j // n.
    """

    def __init__(self, source: Source, epoch: int, place: Place | None) -> None:
        self._source, self._epoch = source, epoch
        self._batch: int = source.batch_size or 1
        self.global_length = len_epoch(source.items, 0)
        self._steps = -(-self.global_length // source.replicas)
        begin, end = (self._boundary(e) for e in (epoch, epoch + 1))
        total = begin if place is None else place.done + epoch * self.global_length
        self._at, self._offset = divmod(total, max(self.global_length, 1))
        self._total, self._until = total, end
        self.behind = total > end
        self.begun = total > begin
        self.first = max(0, (self._step(total) - self._step(begin)) // self._batch)
        self._left = self._ceil(self.global_length - self._offset)
        self._count = self._steps_between(total, end)

    def _boundary(self, epoch: int) -> int:
        """Samples of the stream before the epoch's own batches."""
        step = epoch * self._steps // self._batch * self._batch
        if not self._steps:
            return 0
        return step // self._steps * self.global_length + step % self._steps * self._source.replicas

    def _step(self, total: int) -> int:
        at, offset = divmod(total, max(self.global_length, 1))
        return at * self._steps + offset // self._source.replicas

    def _ceil(self, samples: int) -> int:
        return -(-samples // self._source.replicas)

    def _steps_between(self, begin: int, end: int) -> int:
        """Samples for each rank from ``begin`` to ``end``, where an epoch's rest is dealt out from ``begin`` on."""
        if begin >= end:
            return 0
        at, offset = divmod(end, self.global_length)
        if at == self._at:
            return self._ceil(offset - self._offset)
        return self._left + (at - self._at - 1) * self._steps + self._ceil(offset)

    def open(self, skip: int) -> Iterator[Any]:
        steps = skip * self._batch
        count = self._count - steps
        if count <= 0:
            return iter(())
        if steps < self._left:
            batches: Iterator[Any] = self._source.batches.stretch(
                self._at, steps, count, offset=self._offset, arrays=self._source.arrays
            )
            return batches
        epochs, start = divmod(steps - self._left, self._steps)
        batches = self._source.batches.stretch(self._at + 1 + epochs, start, count, arrays=self._source.arrays)
        return batches

    def length(self) -> int:
        return -(-self._count // self._batch)

    def done(self, batches: int) -> int:
        """Samples done after so many batches, counted from the epoch's own first."""
        steps = batches * self._batch
        if steps < self._left:
            total = self._total + steps * self._source.replicas
        else:
            epochs, start = divmod(steps - self._left, max(self._steps, 1))
            total = (self._at + 1 + epochs) * self.global_length + start * self._source.replicas
        return total - self._epoch * self.global_length

    def clamp(self, done: int) -> int:
        return min(done, max(self._until, self._total) - self._epoch * self.global_length)


def _rank_of(sampler: Any) -> int | None:
    """Whose part a sampler yields that deals out to ranks by itself, as torch's DistributedSampler does."""
    found = (one.rank for one in nested(sampler) if isinstance(getattr(one, "rank", None), int))
    return next(found, None)
