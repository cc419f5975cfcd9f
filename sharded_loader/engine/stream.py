"""What tasks and results say of iterable data. It is cut into parts, and each part is read in its own order.

Stream       how it is cut                         in the `Job`
PartBatch    which batch of which part             in a `Task`
PartIndices  the indices of its samples            ``Task.shards``
PartPoint    how far the part has got              in a `Result`, and from there in later tasks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple


class Stream(NamedTuple):
    """How iterable data is cut into batches.

    Attributes:
        parts: how many parts there are.
        batch_size: samples in a batch; all of a batch come from one part.
        drops_last: leave out what does not fill a batch at the end of a part.
        endless: a part that has ended starts over, and no batch is short.
        tells_epoch: call the dataset's ``set_epoch`` when a part is opened.
    """

    parts: int
    batch_size: int
    drops_last: bool = False
    endless: bool = False
    tells_epoch: bool = True


class PartPoint(NamedTuple):
    """How far a part of iterable data has been read: between two batches.

    Attributes:
        batches: how many batches have been read.
        passes: which pass over the part this is. It is the epoch, unless parts start over.
        samples: how many samples of this pass have been read.
        checksum: of the first sample of each batch; see `streams.parts`.
        ended: the part has no more samples.
        state: of the dataset's own ``state_dict``; None: it has none.
        asked: the dataset has asked which part it is to read. Not in a saved state.
    """

    batches: int = 0
    passes: int = 0
    samples: int = 0
    checksum: int = 0
    ended: bool = False
    state: Any = None
    asked: bool = False


class PartBatch(NamedTuple):
    """Which batch of iterable data a task asks for.

    Attributes:
        stream: number of the reading. Its parts are opened once, and stay open from batch to batch.
        oldest: readings of smaller numbers are over: their parts are closed.
        number: which part.
        batch: which batch of the part, from 0.
        point: a point at or before this batch. A worker that does not have the part open goes on from there.
    """

    stream: int
    oldest: int
    number: int
    batch: int
    point: PartPoint

    def is_same(self, other: PartBatch | None) -> bool:
        """Whether it is a batch of the same part, in the same reading."""
        return other is not None and (other.stream, other.number) == (self.stream, self.number)


class PartIndices(Sequence[Any]):
    """The indices of samples of one part: ``(part, 0)``, ``(part, 1)``, ... A slice is again such a sequence.

    Example:
        >>> indices = PartIndices(3, range(8, 12))
        >>> indices[0], indices[1:3].places, len(indices)
        ((3, 8), range(9, 11), 4)
        >>> [one.places for one in indices.cut([3, 0, 1])]
        [range(8, 11), range(11, 12)]
    """

    __slots__ = ("part", "places")

    def __init__(self, part: int, places: range) -> None:
        self.part, self.places = part, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        found = self.places[place]
        return PartIndices(self.part, found) if isinstance(place, slice) else (self.part, found)

    def cut(self, sizes: Iterable[int]) -> list[PartIndices]:
        """Pieces of these sizes, one behind the other, without those of size 0."""
        ends = list(accumulate(sizes, initial=0))
        return [self[begin:end] for begin, end in pairwise(ends) if begin < end]

    def __reduce__(self) -> Any:
        return PartIndices, (self.part, self.places)
