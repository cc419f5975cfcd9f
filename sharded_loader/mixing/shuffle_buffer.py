"""`ShuffleBuffer`: iterable data in a shuffled order, which resumes exactly.

    dataset -> Source -> blocks of ``size`` samples -> each block in a shuffled order

While the samples of one block are given, those of the next block are read: one for each. So there are ``size`` samples
in memory, and each sample that is given costs one that is read. The order inside block k is a pure function of (seed,
epoch, part, k). A state has a point of the dataset at the beginning of a block, and how many samples were given since.
To go on there, at most twice ``size`` samples are read again. A buffer whose samples may wait for any time, as Hugging
Face's, would have to save its samples, or to read all of them again.

Random numbers that the dataset draws from `sample_rng` belong to the sample, not to the moment when it is read.

An iterator owns the block and the next one. What can go wrong: a dataset that can be read only once, which is rejected;
a state of another buffer. An exception of the dataset takes the place of a sample in the block. It is raised when its
turn comes, and no sample is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an, brief
from sharded_loader.base.entries import dict_of, differing, entry, instance, integer, parsed, written
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.data.datasets import tell_epoch
from sharded_loader.data.inspection import is_indexed, known_parts, this_worker
from sharded_loader.mixing.interleave import BEGINNING, END, InOrder, Source, SourcePoint, check_source, is_divided
from sharded_loader.randomness import rng
from sharded_loader.randomness.shuffle import shuffled

_NAME = "ShuffleBuffer: the dataset"
_ADVICE = "give what state_dict() of an iterator of a ShuffleBuffer returned"


class ShuffleBuffer(InOrder):
    """Iterable data, shuffled by a buffer of ``size`` samples. It is iterable data too.

    The dataset is read in blocks of ``size`` samples, and each block is shuffled. So a sample moves by less than
    ``size`` positions. Shuffle the list of files too, in the dataset's ``set_epoch``.

    A `ShardedDataLoader` resumes it exactly, in any pool. If the dataset, or its iterator, has ``state_dict`` and
    ``load_state_dict``, at most ``2 * size`` samples are read again. Any other dataset is read again from its
    beginning. Each part of a loader has a buffer of its own.

    Args:
        dataset: an object with ``__iter__``, or a function that returns an iterable. The function may take the number
            of the part, and the number of parts. A dataset with ``__getitem__`` is divided among the parts.
        size: the number of samples in the buffer.
        seed: with the epoch and the number of the part, it decides the order.

    Attributes:
        num_shards: of the dataset. Missing where it has none.

    Raises:
        TypeError: ``dataset`` can be read only once, or not at all.
        ValueError: ``size`` is below 1.

    Example:
        >>> buffer = ShuffleBuffer(lambda: iter(range(8)), size=4, seed=1)
        >>> list(buffer)
        [3, 1, 2, 0, 6, 4, 7, 5]
        >>> samples = iter(buffer)
        >>> next(samples), next(samples)
        (3, 1)
        >>> resumed = iter(buffer)
        >>> resumed.load_state_dict(samples.state_dict())
        >>> list(resumed)
        [2, 0, 6, 4, 7, 5]

    Source of the idea: ``tf.data.Dataset.shuffle``; the block shuffle of Mosaic's streaming datasets (``py1b``).
    """

    num_shards: int

    def __init__(self, dataset: Any, size: int, seed: int = 0) -> None:
        self._dataset = check_source(dataset, _NAME)
        self._inside = (self._dataset,)
        self.size = check_int("size", size, 1, "give the number of samples in the buffer")
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer")
        self.epoch = 0
        if (shards := known_parts(dataset)) is not None:
            self.num_shards = shards
        super().__init__()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator begin this epoch. The dataset is told, if it has ``set_epoch``."""
        self.epoch = epoch
        tell_epoch(self._dataset, epoch)

    def __iter__(self) -> ShuffledIterator:
        return ShuffledIterator(self._dataset, self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return f"ShuffleBuffer({brief(self._dataset)}, size={self.size}, seed={self.seed})"


@dataclass(frozen=True)
class _BufferPosition:
    """Where an iteration goes on: the state of a `ShuffledIterator`.

    Attributes:
        size, seed, epoch: of the buffer.
        block: the number of a block.
        given: how many samples were given since it began.
        source: the dataset at the beginning of the block.
    """

    size: int = entry(integer(1), "size was {was}, and is {now}")
    seed: int = entry(integer(), "seed was {was}, and is {now}")
    epoch: int = entry(integer(0))
    block: int = entry(integer(0))
    given: int = entry(integer(0))
    source: SourcePoint = entry(dict_of(SourcePoint), write=written)  # noqa: RUF009 - it makes a field


class _BufferedSource(Source):
    name = _NAME


class _FailedRead:
    """An error of the dataset, in the place of a sample."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class ShuffledIterator(Iterator[Any]):
    """One iteration over a `ShuffleBuffer`; it begins when the first sample is asked for."""

    def __init__(self, dataset: Any, size: int, seed: int, epoch: int) -> None:
        self._dataset = dataset
        self._worker = this_worker() if is_divided(dataset) else None  # other datasets ask themselves, if they do
        self._go_to(_BufferPosition(size, seed, epoch, 0, 0, BEGINNING))

    def _go_to(self, at: _BufferPosition) -> None:
        """Begin with a block."""
        self._source: Source = _BufferedSource(0, self._dataset, at.source, self._worker)
        self._at, self._given = at, 0
        self._block: list[Any] = []
        self._order: list[int] = []  # of the samples of the block that were not given yet, the last one first
        self._coming: list[Any] = []
        self._coming_at: _BufferPosition | None = at

    def __next__(self) -> Any:
        sample = self._take()
        if sample is END:
            raise StopIteration
        if isinstance(sample, _FailedRead):
            raise sample.error
        return sample

    def _take(self) -> Any:
        """What comes next: a sample, an error, or `END`."""
        if not self._order:
            self._turn_over()
        if not self._order:
            return END
        self._fill(len(self._block) - len(self._order) + 1)
        place, self._given = self._order.pop(), self._given + 1
        sample, self._block[place] = self._block[place], None
        return sample

    def _turn_over(self) -> None:
        """The block that is coming is the one whose samples are given now."""
        self._fill(self._at.size)
        if self._coming_at is not None:
            self._at, self._given = self._coming_at, 0
        number = self._at.block + self._given // self._at.size
        key = self._at.seed, "shuffle buffer", self._at.epoch, _part(), number
        self._block, self._coming = self._coming, []
        self._order = shuffled(len(self._block), *key)[::-1].tolist()
        point = self._source.state()
        has_state = is_indexed(self._dataset) or point.dataset is not None or point.iterator is not None
        # A copy: some return the dict that they go on changing. Without a state it is read from the beginning again.
        following = replace(self._at, block=number + 1, source=copy.deepcopy(point))
        self._coming_at = following if has_state else None

    def _fill(self, count: int) -> None:
        """Read samples of the next block, until there are ``count`` of them."""
        scope, source, part = rng.reading.get(), self._source, _part()
        try:
            while len(self._coming) < count:
                if scope is not None:
                    index = part, source.taken, self._at.epoch
                    rng.reading.set(replace(scope, index=index, items=None, drawn=None))
                try:
                    sample = source.read()
                except Exception as error:
                    if is_from_outside(error):
                        raise
                    sample = _FailedRead(error)
                if sample is END:
                    return
                self._coming.append(sample)
        finally:
            rng.reading.set(scope)

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: a small dict, without samples."""
        return written(replace(self._at, given=self._given))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Reads the samples of the block again.

        Raises:
            TypeError, ValueError: no state, or one of another buffer; says what differs.
        """
        at = parsed(_BufferPosition, instance(Mapping, "a dict")("the state", state, _ADVICE), _ADVICE)
        if found := differing(at, self._at):
            raise ValueError(f"ShuffleBuffer: the state is that of another one: {', '.join(found.values())}")
        self._go_to(replace(at, given=0))
        self._source._open()  # if it cannot go on there, that is no error of a sample
        for _ in range(at.given):
            if self._take() is END:
                raise ValueError(
                    f"{_NAME}, {an(type(self._dataset))}, has fewer samples than when the state was saved: give the "
                    "data that it was saved with"
                )


def _part() -> int:
    """The number of the part that is read. Inside a loader this does not count as a question of the dataset's."""
    part = getattr(getattr(rng.reading.get(), "indices", None), "part", None)
    return int((this_worker() or (0, 1))[0] if part is None else part)
