"""Iterable data that the tests read in workers. Torch-free: torch is imported where a part asks it for its number."""

import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from sharded_loader import sample_rng

LENGTHS = (7, 0, 3, 12)  # samples in each part: one is empty, and only in the last a batch of 4 ends with the part


class Parts:
    """A function of (part, parts): sample ``place`` of a part is ``100 * part + place``.

    A sample of each part may take ``seconds``. ``before`` is called before each sample, with part and place.
    """

    def __init__(self, lengths: Sequence[int] = LENGTHS, seconds: Sequence[float] = (), before: Any = None) -> None:
        self.lengths, self.seconds, self.before = lengths, seconds, before

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        assert parts == len(self.lengths)
        for place in range(self.lengths[part]):
            yield self.sample(part, place)

    def sample(self, part: int, place: int) -> Any:
        if part < len(self.seconds):
            time.sleep(self.seconds[part])
        if self.before is not None:
            self.before(part, place)
        return 100 * part + place


class Rows:
    def __init__(self, parts: Parts, part: int) -> None:
        self.parts, self.part, self.place = parts, part, 0

    def __iter__(self) -> "Rows":
        return self

    def __next__(self) -> Any:
        if self.place >= self.parts.lengths[self.part]:
            raise StopIteration
        self.place += 1
        return self.parts.sample(self.part, self.place - 1)


class StatefulRows(Rows):
    """An iterator that can say where it is. It gives one dict, which it goes on changing."""

    def __init__(self, parts: Parts, part: int) -> None:
        super().__init__(parts, part)
        self.state: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        self.state["place"] = self.place
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class GoOn(Parts):
    """Its iterators are objects, which go on with the next sample after an error."""

    rows = Rows

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        return self.rows(self, part)


class WithStatefulRows(GoOn):
    rows = StatefulRows


class Own:
    """An object with ``__iter__``. It asks torch for its part when it is begun, as torch's users do."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[Any]:
        part = part_of_torch(len(self.lengths))
        for place in range(self.lengths[part]):
            yield 100 * part + place


def part_of_torch(parts: int | None = None) -> int:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    if info is None and parts in (None, 1):
        return 0  # one part in the main process is everything, and nobody is a worker
    assert info is not None and (parts is None or info.num_workers == parts)
    return int(info.id)


class Stateful(Own):
    """The place is in the dataset itself, as in torchdata's examples, and ``__iter__`` goes on from it."""

    def __init__(self, lengths: Sequence[int] = LENGTHS) -> None:
        super().__init__(lengths)
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        part = part_of_torch(len(self.lengths))
        while self.place < self.lengths[part]:
            self.place += 1
            yield 100 * part + self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Told(Own):
    """Another order in each epoch, which it is told."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        part = part_of_torch(len(self.lengths))
        order = np.random.default_rng([self.epoch, part]).permutation(self.lengths[part])
        for place in order:
            yield 1000 * self.epoch + 100 * part + int(place)


class ItsOwnIterator(Own):
    """``__iter__`` returns the dataset itself, from its beginning."""

    def __iter__(self) -> Iterator[Any]:
        self.part, self.place = part_of_torch(len(self.lengths)), 0
        return self

    def __next__(self) -> Any:
        if self.place >= self.lengths[self.part]:
            raise StopIteration
        self.place += 1
        return 100 * self.part + self.place - 1


class Late(Own):
    """Asks for its part before each sample, as chains of datasets do where one ends and the next one begins."""

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while place < self.lengths[part_of_torch(len(self.lengths))]:
            yield 100 * part_of_torch() + place
            place += 1


class Draws(Parts):
    """A sample of everything random."""

    def sample(self, part: int, place: int) -> Any:
        value = super().sample(part, place)
        return np.array([value, sample_rng().random(), random.random(), np.random.random()])


class DrawsOwn(Parts):
    """Samples that draw only by `sample_rng`, the first of them before anything is yielded."""

    def sample(self, part: int, place: int) -> Any:
        return np.array([super().sample(part, place), sample_rng().integers(1 << 40)])


class Changing:
    """Samples that are others each time."""

    def __init__(self, length: int = 20) -> None:
        self.length = length

    def __call__(self) -> Iterator[Any]:
        return iter([random.SystemRandom().randrange(1 << 40) for _ in range(self.length)])


class CannotSay(StatefulRows):
    """Its state raises an error in the second batch."""

    def state_dict(self) -> dict[str, Any]:
        if self.place > 4:
            raise LookupError("no state")
        return super().state_dict()


class WithoutState(GoOn):
    rows = CannotSay


class NoIterator:
    def __iter__(self) -> Any:
        return 3


def stops_early(part: int, parts: int) -> Iterator[int]:
    yield part
    raise StopIteration("too early")


def exits(part: int, parts: int) -> Iterator[int]:
    yield from range(6)
    sys.exit(3)


class At:
    """Does something before one sample."""

    def __init__(self, how: Callable[[], Any], part: int, place: int) -> None:
        self.how, self.at = how, (part, place)

    def __call__(self, part: int, place: int) -> None:
        if (part, place) == self.at:
            self.how()


def batches_of(lengths: Sequence[int], size: int, drop: bool = False, parts: Sequence[int] | None = None) -> list[Any]:
    """The batches of `Parts`, as the promise has them: from the part that has given the fewest, of several the first.

    With ``drop`` short batches are left out; a rank has some parts.
    """
    rows = [range(100 * part, 100 * part + lengths[part]) for part in (range(len(lengths)) if parts is None else parts)]
    cut = [[list(row[at : at + size]) for at in range(0, len(row), size)] for row in rows]
    found = [batch for turn in itertools.zip_longest(*cut) for batch in turn if batch is not None]
    return [batch for batch in found if not drop or len(batch) == size]


def endless_of(lengths: Sequence[int], size: int, count: int, parts: Sequence[int] | None = None) -> list[Any]:
    """The first batches of an endless order, in which parts that have ended start over."""
    mine = list(range(len(lengths)) if parts is None else parts)
    turns = [(number // len(mine), mine[number % len(mine)]) for number in range(count)]
    return [[100 * part + (turn * size + i) % lengths[part] for i in range(size)] for turn, part in turns]


def values(batch: Any) -> Any:
    """A batch, flat or in shards, as lists."""
    return [values(part) for part in batch] if isinstance(batch, list) else np.asarray(batch).tolist()
