"""`ShuffleBuffer`: iterable data in a shuffled order, which resumes exactly.

    dataset -> Source -> blocks of ``size`` samples -> each block in a shuffled order

While the samples of one block are given, those of the next block are read: one for each. So there are ``size`` samples
in memory, and each sample that is given costs one that is read. The order inside block k is a pure function of (seed,
epoch, part, k). A state has a point of the dataset at the beginning of a block, and how many samples were given since.
To go on there, at most twice ``size`` samples are read again. A buffer whose samples may wait for any time, as Hugging
Face's, would have to save its samples, or to read all of them again.

Random numbers that the dataset draws from `sample_rng` belong to the sample, not to the moment when it is read.

An iterator owns the block and the next one. What can go wrong: a dataset that can be read only once, which is rejected;
a state of another buffer. An exception of the dataset passes as it is. It comes in place of a sample, and none is lost.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sharded_loader.base.checks import check_int, refuse_class
from sharded_loader.base.described import an, brief
from sharded_loader.base.entries import dict_of, differing, entry, integer, parsed, written
from sharded_loader.data.inspection import is_indexed, is_stream, known_parts, this_worker
from sharded_loader.data.interleave import BEGINNING, END, InOrder, Source, SourcePoint, is_divided
from sharded_loader.randomness import rng
from sharded_loader.randomness.shuffle import shuffled

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
        refuse_class("ShuffleBuffer: the dataset", dataset)
        kind = type(dataset)
        if isinstance(dataset, (str, bytes)) or not (is_indexed(dataset) or is_stream(dataset)):
            raise TypeError(
                f"ShuffleBuffer: the dataset is {an(kind)}, which cannot be read: give an object with __iter__, or a "
                "function that returns an iterator"
            )
        if hasattr(kind, "__next__") and not hasattr(kind, "state_dict"):
            raise TypeError(
                f"ShuffleBuffer: the dataset is {an(kind)}, which can be read only once: give a function that makes a "
                "new one, or an object whose __iter__ begins again"
            )
        self._dataset = dataset
        self.size = check_int("size", size, 1, "give the number of samples in the buffer")
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer")
        self.epoch = 0
        if (shards := known_parts(dataset)) is not None:
            self.num_shards = shards
        super().__init__()

    def set_epoch(self, epoch: int) -> None:
        """Make the next iterator begin this epoch. The dataset is told, if it has ``set_epoch``."""
        self.epoch = epoch
        if callable(tell := getattr(self._dataset, "set_epoch", None)):
            tell(epoch)

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
        failed: how many errors the dataset has raised since then. They are not raised again.
        source: the dataset at the beginning of the block.
    """

    size: int = entry(integer(1), "size was {was}, and is {now}")
    seed: int = entry(integer(), "seed was {was}, and is {now}")
    epoch: int = entry(integer(0))
    block: int = entry(integer(0))
    given: int = entry(integer(0))
    failed: int = entry(integer(0))
    source: SourcePoint = entry(dict_of(SourcePoint), write=written)  # noqa: RUF009 - it makes a field


def _part() -> int:
    """The number of the part that is read. Inside a loader this does not count as a question of the dataset's."""
    part = getattr(getattr(rng.reading.scope, "indices", None), "part", None)
    if part is None:
        part = (this_worker() or (0, 1))[0]
    return int(part)


class _BufferedSource(Source):
    name = "ShuffleBuffer: the dataset"


class ShuffledIterator(Iterator[Any]):
    """One iteration over a `ShuffleBuffer`; it begins when the first sample is asked for."""

    def __init__(self, dataset: Any, size: int, seed: int, epoch: int) -> None:
        self._dataset, self._size, self._seed, self._epoch = dataset, size, seed, epoch
        self._worker = this_worker() if is_divided(dataset) else None  # other datasets ask themselves, if they do
        self._open(BEGINNING, 0)

    def _open(self, point: SourcePoint, number: int, failed: int = 0) -> None:
        """Begin with a block."""
        self._source: Source = _BufferedSource(0, self._dataset, point, self._worker)
        self._block: list[Any] = []
        self._coming: list[Any] = []
        self._number, self._place = number, 0
        self._order: Any = None  # the block is not read yet
        self._point, self._first, self._given, self._failed = point, number, 0, 0
        self._next: tuple[SourcePoint, int] | None = None  # where the block that is coming begins
        self._failed_coming, self._forgiven = 0, failed

    def __next__(self) -> Any:
        if self._order is None:
            self._fill(self._size)
            self._turn_over(self._number)
        elif self._place == len(self._block):
            self._turn_over(self._number + 1)
        if not self._block:
            raise StopIteration
        self._fill(min(self._place + 1, self._size))
        place = int(self._order[self._place])
        self._place, self._given = self._place + 1, self._given + 1
        sample, self._block[place] = self._block[place], None
        return sample

    def _turn_over(self, number: int) -> None:
        """The next block is read: its samples are given now."""
        self._order = shuffled(len(self._coming), self._seed, "shuffle buffer", self._epoch, _part(), number)
        self._number, self._place = number, 0
        self._block, self._coming = self._coming, []
        if self._next is None:
            self._failed += self._failed_coming
        else:
            (self._point, self._first), self._given, self._failed = self._next, 0, self._failed_coming
        # A dataset without a state is read from its beginning again: an error on the way must not stop it.
        point = self._source.state()
        has_state = is_indexed(self._dataset) or point.dataset is not None or point.iterator is not None
        # A copy: some return the dict that they go on changing.
        self._next, self._failed_coming = (copy.deepcopy(point), number + 1) if has_state else None, 0

    def _fill(self, count: int) -> None:
        """Read samples of the next block, until there are ``count`` of them."""
        scope, source, part = rng.reading.scope, self._source, _part()
        try:
            while len(self._coming) < count:
                if scope is not None:
                    index = part, source.taken, self._epoch
                    rng.reading.scope = rng.SampleScope(
                        scope.seed, scope.epoch, index, scope.indices, owners=scope.owners
                    )
                try:
                    sample = source.read()
                except Exception:
                    self._failed_coming += 1
                    if not self._forgiven:
                        raise
                    self._forgiven -= 1
                    continue
                if sample is END:
                    return
                self._coming.append(sample)
        finally:
            rng.reading.scope = scope

    def state_dict(self) -> dict[str, Any]:
        """Where the iteration is: a small dict, without samples."""
        failed = self._failed + self._failed_coming
        return written(
            _BufferPosition(self._size, self._seed, self._epoch, self._first, self._given, failed, self._point)
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was taken. Reads the samples of the block again.

        Raises:
            TypeError, ValueError: no state, or one of another buffer; says what differs.
        """
        if not isinstance(state, Mapping):
            raise TypeError(
                f"ShuffleBuffer: the state is {brief(state)}, {an(type(state))}; it must be a dict: {_ADVICE}"
            )
        point = parsed(_BufferPosition, state, _ADVICE, "ShuffleBuffer: the state")
        if found := differing(point, _BufferPosition(self._size, self._seed, 0, 0, 0, 0, BEGINNING)):
            raise ValueError(f"ShuffleBuffer: the state is that of another one: {', '.join(found.values())}")
        self._epoch = point.epoch
        self._open(point.source, point.block, point.failed)
        for _ in range(point.given):
            if next(self, END) is END:
                raise ValueError(
                    f"ShuffleBuffer: the dataset, {an(type(self._dataset))}, has fewer samples than when the state was "
                    "saved: give the data that it was saved with"
                )
