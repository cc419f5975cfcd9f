"""Iterable data, mixed or shuffled, which continues from a saved state.

    Source(name, dataset, point)     a dataset, read in order from any point
    InterleavedIterable              several of them, mixed by a plan; `interleave` makes it
    ShuffleBuffer                    one of them in shuffled order

*Sources.* Datasets or iterators with ``state_dict`` and ``load_state_dict`` restore their own state; other iterables
are read again up to the point. A state is loaded into a shallow copy, because some datasets would keep it for later
passes. With several workers, indexed datasets are divided, functions may take worker and number of workers, and others
call torch's ``get_worker_info``.

*Buffer.* While a block of ``size`` samples is yielded, the next block is read, one sample for each. Its order is a pure
function of (seed, epoch, part, block). So a state is a point of the dataset and a count, and resuming reads at most
twice ``size`` samples again. Unbounded delays, as in Hugging Face's buffer, would require saving or rereading all
samples. An exception of the dataset takes the place of a sample and is raised at its turn; no sample is lost.

Errors: TypeError for data that can be read only once; ValueError for empty datasets and states of other data.
"""

from __future__ import annotations

import copy
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Final

from sharded_loader.extend import data as core
from sharded_loader.extend.engine import current_part
from sharded_loader.extend.order import SampleScope, reading, shuffled
from sharded_loader.extend.tools import an, brief, call_after_import, check_int, entries, pass_on, refuse_class
from sharded_loader.mixing.schedule import ALL, EACH, FIRST, Plan


def this_worker() -> tuple[int, int] | None:
    """Return the number of this part or worker, and their total; None outside workers. Works without torch."""
    if (part := current_part()) is not None:
        return part.place
    torchs: Any = sys.modules.get("torch.utils.data")
    info = None if torchs is None else torchs.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


# -- one dataset -------------------------------------------------------------------------------------------------------


def is_indexed(dataset: object) -> bool:
    """Return True if a dataset is read by index and has a length.

    Example:
        >>> is_indexed([1, 2]), is_indexed({1, 2})
        (True, False)
    """
    return core.has_own(type(dataset), "__getitem__") and core.is_dataset(dataset)


def check_source(dataset: object, name: str) -> Any:
    """Return the dataset if it can be read by index or repeatedly; raise a TypeError otherwise."""
    kind = type(dataset)
    refuse_class(name, dataset)
    torchs = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
    starts_again = isinstance(dataset, torchs) or hasattr(kind, "set_epoch") or hasattr(kind, "state_dict")
    if isinstance(dataset, (str, bytes)):
        why = "not a dataset: give what it names, or list(text) for its items"
    elif is_indexed(dataset):
        return core.check_dataset(dataset, "interleave")
    elif hasattr(kind, "__next__") and not starts_again:
        why = "which can be read only once: give a function that makes a new one, or an object that begins again"
    elif isinstance(dataset, Set):
        why = "whose order is not defined: give sorted(dataset)"
    elif not hasattr(kind, "__iter__") and not callable(dataset):
        why = "which cannot be read: give one with __getitem__ and __len__, or __iter__, or a generator function"
    else:
        return dataset
    raise TypeError(f"{name} is {an(kind)}, {why}")


def no_samples(name: str, dataset: object) -> ValueError:
    """Return the error for a dataset that yields no sample in a pass."""
    text = (
        f"{name}, {an(type(dataset))}, gave no samples: leave it out, or give it weight 0. Each worker needs a sample"
    )
    return ValueError(f"{text} of it, and if it is read again, its __iter__ must start at the beginning")


Part = tuple[int, int] | None
"""Worker number and number of workers, as from `this_worker`."""

END: Final = object()
"""Result of `Source.read` at the end of a pass."""


def is_divided(dataset: Any) -> bool:
    """Return True if a source divides the dataset among workers. Others divide themselves."""
    return is_indexed(dataset) or (not hasattr(type(dataset), "__iter__") and core.takes_two(dataset))


@dataclass(frozen=True)
class SourcePoint:
    """Progress in a dataset: finished passes, samples taken in this pass, state of dataset or iterator."""

    passes: int = entries.entry(entries.integer(0), name="pass")
    taken: int = entries.entry(entries.integer(0))
    dataset: object = entries.entry(entries.anything, default=None)
    iterator: object = entries.entry(entries.anything, default=None)

    def is_read_again(self, dataset: object) -> bool:
        """Return True if the dataset has to be read up to the point."""
        return self.taken > 0 and self.dataset is None is self.iterator and not is_indexed(dataset)


BEGINNING: SourcePoint = SourcePoint(0, 0)
"""Point before the first sample."""


class Source:
    """One dataset in one iteration.

    Args:
        name: name in errors.
        dataset: indexed or iterable, or a function that returns an iterator.
        point: where to begin.
        worker: result of `this_worker` at the beginning of the iteration.
        is_alone: False if the mixture contains this object twice, so that its ``state_dict`` cannot be used.

    Example:
        >>> source = Source("letters", "abc", BEGINNING)
        >>> source.read(), source.read(), source.state().taken
        ('a', 'b', 2)
        >>> Source("letters", "abc", source.state()).read()
        'c'
    """

    def __init__(self, name: str, dataset: Any, point: SourcePoint, worker: Part = None, is_alone: bool = True) -> None:
        self.name, self.dataset = name, dataset
        self.passes, self.taken = point.passes, point.taken
        self._point, self._worker, self._has_own_state = point, worker or (0, 1), is_alone
        self._opened: Any = None  # the dataset, or a copy with a loaded state
        self._iterator: Any = None

    def read(self) -> object:
        """Return the next sample, or `END`."""
        if self._iterator is None:
            self.open()
        sample = next(self._iterator, END)
        self.taken += sample is not END
        return sample

    def start_over(self) -> None:
        self.passes, self.taken = self.passes + 1, 0
        self._point, self._iterator = SourcePoint(self.passes, 0), None

    def state(self) -> SourcePoint:
        """Return the point from which another source continues."""
        if self._iterator is None:
            return self._point
        point = SourcePoint(self.passes, self.taken)
        if self._iterator is not self._opened and core.is_stateful(self._iterator):
            return replace(point, iterator=self._iterator.state_dict())
        has_state = self._has_own_state and core.is_stateful(self._opened)
        return replace(point, dataset=self._opened.state_dict()) if has_state else point

    def open(self, enter: Callable[[int], object] = int) -> None:
        """Open the dataset at the point. Raise a ValueError if it has fewer samples than when the state was saved.

        ``enter`` is called before each sample that is read again, with its place.
        """
        point, dataset, skipped = self._point, self.dataset, self.taken
        if point.dataset is not None:
            dataset = copy.copy(dataset)
            if hasattr(dataset, "__dict__"):  # copies of Hugging Face datasets share it
                dataset.__dict__ = dict(vars(dataset))
            dataset.load_state_dict(point.dataset)
        if is_indexed(dataset):
            first, step = self._worker
            indices = range(first + self.taken * step, len(dataset), step)
            iterator: Any = (core.await_value(dataset[index]) for index in indices)
        else:
            enter(0)
            iterator = iter(core.iterable_of(dataset, lambda: self._worker))
            if point.iterator is not None:
                iterator.load_state_dict(point.iterator)
            elif point.dataset is None:
                skipped = 0
                while skipped < self.taken and next(iterator, END) is not END:
                    skipped += 1
                    enter(skipped)
        if skipped < self.taken:
            text = f"{self.name}, {an(type(dataset))}, has {skipped} samples, and the state was"
            raise ValueError(f"{text} saved after {self.taken}: give the data that it was saved with")
        self._opened, self._iterator = dataset, iterator
        self._has_own_state = self._has_own_state and not is_indexed(dataset) and core.is_stateful(dataset)


@dataclass(frozen=True)
class Held:
    """A dataset of which each part has a copy."""

    dataset: Any


class SharedByParts(Held):
    """An object that all parts in a process use."""

    shared_by_parts = True


def held(dataset: Any) -> Held:
    """Return a holder of a dataset: one that keeps its position or epoch in itself cannot be shared by parts."""
    return SharedByParts(dataset) if is_indexed(dataset) and not core.keeps_place(dataset) else Held(dataset)


class InOrder:
    """Base class of iterable data. torch's DataLoader recognizes it as an IterableDataset by ``isinstance``."""

    num_shards: int
    """Smallest number of shards of the iterable data inside; missing if none has shards."""

    def __init__(self, inside: Sequence[object], iterable: Iterable[object]) -> None:
        self._inside = inside
        shards = [number for number in map(core.known_parts, iterable) if number is not None]
        if shards:
            self.num_shards = min(shards)


call_after_import("torch.utils.data", lambda: sys.modules["torch.utils.data"].IterableDataset.register(InOrder))


# -- mixed -------------------------------------------------------------------------------------------------------------


_MIXTURES = "give what state_dict() of a mixture returned"


@dataclass(frozen=True)
class _MixPosition:
    """State of an `InterleavedIterable`: the mixture and the position in it."""

    schedule: int = entries.entry(entries.integer(), "the datasets took turns by another schedule")
    weights: tuple[int, ...] = entries.entry(
        entries.list_of(entries.integer(0)), "weights was {was}, and is {now}", write=list
    )
    seed: int = entries.entry(entries.integer(), "seed was {was}, and is {now}")
    stop: object = entries.entry(entries.anything, "stop was {was!r}, and is {now!r}")
    epoch: object = entries.entry(entries.anything)
    position: int = entries.entry(entries.integer(0))
    sources: tuple[SourcePoint, ...] = entries.entry(
        entries.list_of(entries.dict_of(SourcePoint)), write=lambda points: list(map(entries.to_state, points))
    )


class InterleavedIterable(InOrder):
    """Datasets that are read in order, mixed by a schedule; made by `interleave`."""

    def __init__(self, datasets: Sequence[object], schedule: Plan, stop: str | int) -> None:
        super().__init__(datasets, (one for one in map(datasets.__getitem__, schedule.sources) if not is_indexed(one)))
        self._schedule, self.stop = schedule, stop
        self.counts_all = not schedule.is_fixed or isinstance(stop, int)
        self.epoch: object = 0
        self._loaded: _MixPosition | None = None  # start of the next iteration
        self._last: Callable[[], _MixPosition] | None = None  # position of the most recently active iteration

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_last": None}  # iterators cannot be copied

    def __iter__(self) -> Iterator[Any]:
        """Yield the samples. The iteration begins with its first ``next``."""
        begin, self._loaded = self._loaded or self._beginning(), None
        schedule, stop, position = self._schedule, self.stop, begin.position
        # Calling this_worker declares that the data is divided here. Iterable datasets call it themselves, or are not.
        worker = this_worker() if self.counts_all or any(map(is_divided, self._inside)) else None
        part, parts = (worker or (0, 1)) if self.counts_all else (0, 1)
        sources = self._sources(begin, worker)

        def state() -> _MixPosition:
            return replace(begin, position=position, sources=tuple(source.state() for source in sources))

        self._last = state
        end = stop if isinstance(stop, int) else math.inf
        # `place` counts the samples of all workers, if they all have read equally many.
        while (place := position * parts + part) < end:
            source = sources[schedule.owner(position, place)]
            if stop == EACH and source.passes:  # it has dropped out
                position += 1
            elif (sample := source.read()) is not END:
                position += 1
                self._last = state
                yield sample
            elif not source.taken and stop != EACH:
                raise no_samples(source.name, source.dataset)
            elif stop == FIRST or (stop in (ALL, EACH) and all(one.passes or one is source for one in sources)):
                break
            else:
                source.start_over()
        if self._last is state:
            self._last = None

    def _sources(self, begin: _MixPosition, worker: Part) -> list[Source]:
        numbers, datasets = self._schedule.sources, self._inside
        times = Counter(map(id, datasets))  # two iterators of one object share its state
        return [
            Source(name_of_source(number), datasets[number], point, worker, times[id(datasets[number])] == 1)
            for number, point in zip(numbers, begin.sources, strict=True)
        ]

    def sources_at(self, positions: Iterable[int], part: int, parts: int) -> list[int]:
        """Return the sources of samples of a part; not for ``stop="each_once"``, where streams drop out."""
        places = [(one, one * parts + part if self.counts_all else one) for one in positions]
        return [self._schedule.sources[self._schedule.owner(*one)] for one in places]

    def set_epoch(self, epoch: Any) -> None:
        """Pass the epoch on to the datasets, and drop a loaded position of another epoch."""
        for dataset in self._inside:
            core.announce_epoch(dataset, epoch)
        if epoch != self.epoch:
            self.epoch, self._loaded, self._last = epoch, None, None

    def _position(self) -> _MixPosition:
        return self._loaded or self._beginning() if self._last is None else self._last()

    @property
    def needs_full_replay(self) -> bool:
        """True if a dataset has to be read again. Loaders then replay the whole mixture, with its random numbers."""
        datasets = map(self._inside.__getitem__, self._schedule.sources)
        return any(map(SourcePoint.is_read_again, self._position().sources, datasets))

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the most recently active iterator; see `interleave`."""
        return {"version": entries.VERSION, **entries.to_state(self._position())}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Let the next iteration continue at a saved position.

        Raises:
            ValueError, TypeError: The state is invalid, or of another mixture; the message lists the differences.
                Nothing has changed then.
        """
        entries.check_version(state, _MIXTURES, unnumbered=1)
        position = entries.from_state(_MixPosition, state, _MIXTURES, "interleave: the state")
        differences = list(entries.differences(position, self._beginning()).values())
        if not differences and len(position.sources) != len(self._schedule.sources):
            differences.append(f"it was one of {len(position.sources)} datasets")
        if differences:
            text = f"interleave: the state is that of another mixture: {', '.join(differences)}"
            raise ValueError(f"{text}. Make the mixture with the same arguments")
        if position.epoch != self.epoch:
            self.set_epoch(position.epoch)
        self._loaded, self._last = position, None

    def _beginning(self) -> _MixPosition:
        schedule = self._schedule
        sources = (BEGINNING,) * len(schedule.sources)
        return _MixPosition(schedule.step, tuple(schedule.weights), schedule.seed, self.stop, self.epoch, 0, sources)

    def __repr__(self) -> str:
        return f"interleave({brief(self._inside)}, weights={brief(self._schedule.weights)}, stop={self.stop!r})"


def name_of_source(number: int) -> str:
    return f"interleave: datasets[{number}]"


# -- read by windows ---------------------------------------------------------------------------------------------------


class FailedRead:
    """Error of the dataset in place of a sample."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Windows(Iterator[Any]):
    """Iteration over a dataset by windows: while the items of one are yielded, the next is read, a share with each.

    A position has the ``epoch``, the ``window`` and the ``source`` where it begins, and the number of items ``given``
    since. Each sample has random numbers of its own.

    Args:
        name: of the class in errors.
        dataset: as for `Source`.
        at: where to begin.
    """

    names_of: Callable[[Any], Sequence[int]]
    """Returns a name for each sample of the window at a position."""
    scope_of: Callable[[int, Any, int], tuple[int, Any]]
    """Returns epoch and index of a sample, for its random numbers: from its name, the scope around it, and the part."""
    items_of: Callable[[list[Any]], list[Any]]
    """Returns the items of the window at ``_at``, of which samples and errors were read."""
    following: Callable[[SourcePoint], Any]
    """Returns the position of the next window, or None: it has no point of its own, and is counted in ``given``."""

    def __init__(self, name: str, dataset: Any) -> None:
        self._name, self._dataset = name, dataset
        self._worker = this_worker() if is_divided(dataset) else None  # others call it themselves

    def read(self, name: int) -> Any:
        """Return a sample, or `END`."""
        return self._source.read()

    def _begin_at(self, at: Any) -> None:
        self._source = Source(f"{self._name}: the dataset", self._dataset, at.source, self._worker)
        self._at, self._next, self._given = at, at, 0
        self._names, self._read, self._items = self.names_of(at), list[Any](), list[Any]()

    def __next__(self) -> Any:
        item = self._advance()
        if item is END:
            raise StopIteration
        if isinstance(item, FailedRead):
            raise item.error
        return item

    def _advance(self) -> Any:
        """Return the next item or error, or `END`."""
        while not self._items:
            if not self._start():
                return END
        done = len(self._read)
        self._fill(done - (done - len(self._names)) // len(self._items))
        self._given += 1
        return self._items.pop()

    def _start(self) -> bool:
        """Start the next window. Return False after the last one."""
        self._fill(len(self._names))
        if not self._read:
            return False
        if self._next is not None:
            self._at, self._given = self._next, 0
        self._items = self.items_of(self._read)[::-1]
        # A copy, because some datasets keep changing the dict that they return.
        self._next = self.following(copy.deepcopy(self._source.state()))
        self._names, self._read = self.names_of(self._next or self._at), []
        return True

    def _fill(self, count: int) -> None:
        """Read the next window until it has ``count`` samples."""
        outer, part = reading.get(), part_here()
        try:
            while len(self._read) < count:
                name = self._names[len(self._read)]
                self._enter(name, outer, part)
                try:
                    sample = self.read(name)
                except Exception as error:
                    pass_on(error)
                    sample = FailedRead(error)
                if sample is END:
                    return
                self._read.append(sample)
        finally:
            reading.set(outer)

    def _enter(self, name: int, outer: Any, part: int) -> None:
        if outer is not None:
            place = self.scope_of(name, outer, part)
            reading.set(SampleScope(outer.seed, *place, outer.owners, outer.is_cached))

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small dict, without samples."""
        return {"version": entries.VERSION, **entries.to_state(replace(self._at, given=self._given))}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position, reading its window again; a ValueError if the state does not fit."""
        advice = "give what state_dict() of an iterator returned"
        entries.check_version(state, advice, unnumbered=1)
        at = entries.from_state(type(self._at), state, advice)
        if found := entries.differences(at, self._at):
            raise ValueError(f"{self._name}: the state is that of another one: {', '.join(found.values())}")
        self._begin_at(at)
        outer, part = reading.get(), part_here()
        try:
            if at.source != BEGINNING:  # otherwise with the first sample, whose random numbers it may draw
                # Raises here, not in place of a sample.
                self._source.open(lambda name: self._enter(name, outer, part))
        finally:
            reading.set(outer)
        for _ in range(at.given):
            if self._advance() is END or self._at is not at:
                text = f"{self._name}: the dataset, {an(type(self._dataset))}, has fewer samples"
                raise ValueError(f"{text} than when the state was saved: give the data that it was saved with")


# -- shuffled ----------------------------------------------------------------------------------------------------------


class ShuffleBuffer(InOrder):
    """Iterable data, shuffled by a buffer of ``size`` samples.

    The dataset is read in blocks of ``size`` samples, and each block is shuffled, so a sample moves by less than
    ``size`` positions. Shuffle the list of files as well, in the dataset's ``set_epoch``.

    A `ShardedDataLoader` resumes it exactly, in any pool. If the dataset or its iterator has ``state_dict`` and
    ``load_state_dict``, at most ``2 * size`` samples are read again, otherwise all since the beginning. Each part of a
    loader has its own buffer.

    Args:
        dataset: object with ``__iter__``, or a function that returns an iterable and may take the number of the part
            and the number of parts. A dataset with ``__getitem__`` is divided among the parts.
        size: number of samples in the buffer, at least 1.
        seed: decides the order, together with the epoch and the number of the part.

    Raises:
        TypeError: ``dataset`` can be read only once, or not at all.

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

    def __init__(self, dataset: object, size: int, seed: int = 0) -> None:
        self._dataset = check_source(dataset, "ShuffleBuffer: the dataset")
        super().__init__((dataset,), (dataset,))
        self.size = check_int("size", size, 1, "give the number of samples in the buffer")
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer")
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator, also for the dataset if it has ``set_epoch``."""
        self.epoch = epoch
        core.announce_epoch(self._dataset, epoch)

    def __iter__(self) -> ShuffledIterator:
        return ShuffledIterator(self._dataset, _BufferPosition(self.size, self.seed, self.epoch, 0, 0, BEGINNING))

    def __len__(self) -> int:
        return len(self._dataset)

    def __repr__(self) -> str:
        return f"ShuffleBuffer({brief(self._dataset)}, size={self.size}, seed={self.seed})"


@dataclass(frozen=True)
class _BufferPosition:
    """State of a `ShuffledIterator`: the source at the beginning of a block, and samples given since."""

    size: int = entries.entry(entries.integer(1), "size was {was}, and is {now}")
    seed: int = entries.entry(entries.integer(), "seed was {was}, and is {now}")
    epoch: int = entries.entry(entries.integer(0))
    window: int = entries.entry(entries.integer(0), name="block")
    given: int = entries.entry(entries.integer(0))
    source: SourcePoint = entries.entry(entries.dict_of(SourcePoint), write=entries.to_state)  # noqa: RUF009 - it makes a field


class ShuffledIterator(Windows):
    """Iteration over a `ShuffleBuffer`, which begins with its first ``next``."""

    def __init__(self, dataset: object, at: _BufferPosition) -> None:
        super().__init__("ShuffleBuffer", dataset)
        self._begin_at(at)

    def names_of(self, at: _BufferPosition) -> Sequence[int]:
        return range(at.size)

    def scope_of(self, name: int, outer: Any, part: int) -> tuple[int, Any]:
        return outer.epoch, (part, self._source.taken, self._at.epoch)

    def items_of(self, read: list[Any]) -> list[Any]:
        order = shuffled(len(read), self._at.seed, "shuffle buffer", self._at.epoch, part_here(), self._block())
        return [read[place] for place in order.tolist()]

    def following(self, source: SourcePoint) -> _BufferPosition | None:
        has_state = is_indexed(self._dataset) or source.dataset is not None or source.iterator is not None
        return replace(self._at, window=self._block() + 1, source=source) if has_state else None

    def _block(self) -> int:
        return int(self._at.window + self._given // self._at.size)


def part_here() -> int:
    """Return the number of this part; inside a loader, without a call of ``get_worker_info``."""
    part = getattr(getattr(reading.get(), "indices", None), "part", None)
    return int((this_worker() or (0, 1))[0] if part is None else part)
