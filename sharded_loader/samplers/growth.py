"""`loader.grow` and `loader.without`: samples are added and removed in mid-epoch, and what was read stays read.

    GrownSampler.grow(epochs, steps, dataset), .without(epochs, indices)   -> a `SizeChange`, at the loader's position
    GrownSampler(sampler, changes)                                         -> the order of each epoch after them
    GrownSampler.loading(order, state)                                     -> the changes of a state, while it is loaded

An epoch is a chain of levels, each a function of positions. Level 0 is the ordinary order of the samples that there
were when the epoch began. A change at position p begins the next level. The positions before p stay. From p on, there
is a keyed shuffle of the rest of the level before and the new samples, or both in order without ``shuffle``. After a
removal, the rest comes without the samples that were removed. So the order is a pure function of (seed, epoch,
changes), for any number of ranks, and a state has only the changes. The sampler owns no data.

What can go wrong: an order that is not the loader's own, or epochs that share passes (TypeError, ValueError); a dataset
that is not the old one with samples appended (ValueError).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import RandomSampler, SequentialSampler
from sharded_loader.extend import Int64s, Position, reader_for
from sharded_loader.extend.data import digest_of_read, mixture_of, takes_arrays
from sharded_loader.extend.engine import At, dataset_given, length
from sharded_loader.extend.order import (
    IN_MEMORY,
    Bijection,
    IndexSampler,
    MapOrder,
    seeded_globals,
    shuffle,
)
from sharded_loader.extend.tools import an, brief, check_int
from sharded_loader.samplers.inverse import inverted, positions_of

SMALL = 2**16
"""Items up to which a level is one shuffled array: its bijection mixes few bits badly, and it costs 4 ms."""


GROWN = "grown"
"""Name of the changes among the ``sampler_arguments`` of a state."""

Grown = tuple[tuple[str, str], ...]
"""The changes as JSON, with that name; empty: none."""


class SizeChange(NamedTuple):
    """Samples added or removed at a position of an epoch: the dataset's length before and after, indices removed."""

    epoch: int
    position: int
    before: int
    after: int
    removed: list[int]


def changes_of(grown: Grown) -> list[SizeChange]:
    """Return the changes of a state, or of `Sampling.grown`; a ValueError if they are damaged.

    Example:
        >>> changes_of((("grown", "[[2, 40, 100, 120, []]]"),))
        [SizeChange(epoch=2, position=40, before=100, after=120, removed=[])]
    """
    try:
        found = [SizeChange(*row) for _, text in grown for row in json.loads(text)]
        if all(type(one) is int and one >= 0 for row in found for one in (*row[:4], *row.removed)):
            return found
    except (TypeError, ValueError):
        pass
    raise ValueError(f"the state's {GROWN!r} is {brief(grown)}: give what state_dict() of a ShardedDataLoader returned")


class GrownSampler(IndexSampler):
    """Order of a loader whose dataset has changed in mid-epoch; ``sampler`` is the ordinary one over all samples."""

    def __init__(self, sampler: RandomSampler | SequentialSampler, grown: Grown) -> None:
        self._sampler, self._changes, self._length = sampler, changes_of(grown), len(sampler)
        self.seed = sampler.seed
        self._chain = lru_cache(maxsize=2)(self._make_chain)

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        return self._chain(epoch).at

    def len_epoch(self, epoch: int) -> int:
        return self._chain(epoch).length

    def positions_of(self, index: int, epoch: int) -> list[int]:
        return self._chain(epoch).positions_of(index)

    def samples_at(self, epoch: int, position: int) -> int:
        """Return the length of the dataset at a position of an epoch."""
        return next((one.before for one in self._changes if one[:2] > (epoch, position)), self._length)

    def _make_chain(self, epoch: int) -> _Chain:
        later = [one for one in self._changes if one[:2] > (epoch, 0)]
        gone = {index for one in self._changes if one[:2] <= (epoch, 0) for index in one.removed}
        chain = _Chain(self._sampler, epoch, later[0].before if later else self._length, sorted(gone))
        for change in later:
            if change.epoch == epoch:
                chain.add(change)
        return chain

    # -- in a loader ----------------------------------------------------------------------------------------

    @staticmethod
    def grow(epochs: Any, steps: Any, given: Any) -> None:
        """Take in the samples that were appended; see `ShardedDataLoader.grow`."""
        dataset = epochs.dataset if given is None else dataset_given(given)
        _check(epochs, "grow")
        now = length(dataset, needed=True) or 0

        def change(epoch: int, position: int) -> None:
            before = _samples_at(epochs.order, epoch, position)
            if now < before:
                text = f"grow: the dataset has {now} samples, and had {before}"
                raise ValueError(f"{text}: give the old ones with new ones behind them, or call without(indices)")
            _compare(epochs, steps, dataset, before, now)
            epochs.job, epochs.dataset = replace(epochs.job, dataset=dataset), dataset
            steps.dataset, epochs.order.arrays = dataset, epochs.batchify_fn is None and takes_arrays(dataset)
            epochs.known.forget(dataset)
            _apply(epochs, dataset, SizeChange(epoch, position, before, now, []))

        epochs.replan(change)
        job = epochs.job_now()
        if epochs.pipeline.pool.started or epochs.pipeline.runs:
            epochs.pipeline.start(job)  # to the running workers: they read the rest
        else:
            epochs.stale = True

    @staticmethod
    def without(epochs: Any, indices: Iterable[int]) -> None:
        """Leave out samples; see `ShardedDataLoader.without`."""
        _check(epochs, "without")
        advice = "give the indices of samples, as loader.indices shows them"
        removed = sorted({check_int("an index of without", one, 0, advice) for one in indices})

        def change(epoch: int, position: int) -> None:
            order = epochs.order
            before = _samples_at(order, epoch, position)
            if removed and removed[-1] >= before:
                raise IndexError(f"without: there is no sample {removed[-1]}: the dataset has {before}, from 0 on")
            gone = {one for row in changes_of(order.sampling.grown) for one in row.removed}
            if len(gone.union(removed)) >= before:
                raise ValueError(f"without: none of the {before} samples would be left: keep at least one")
            _apply(epochs, epochs.dataset, SizeChange(epoch, position, before, before, [*set(removed) - gone]))

        epochs.replan(change)

    @staticmethod
    @contextmanager
    def loading(order: Any, state: Any) -> Iterator[None]:
        """Take over the changes of a state inside the block, and go back to the own ones if the state does not fit."""
        before = order.sampling.grown if isinstance(order, MapOrder) else ()
        saved = state.get("sampler_arguments") if isinstance(state, Mapping) else None
        grown = ((GROWN, saved[GROWN]),) if isinstance(saved, Mapping) and GROWN in saved else ()
        if grown == before:
            yield
            return
        changes_of(grown)
        _check_order(order, "load_state_dict")
        try:
            order.sampling.grown = grown
            order.resize(order.dataset_length)
            yield
        except BaseException:
            order.sampling.grown = before
            order.resize(order.dataset_length)
            raise


def _check(epochs: Any, doing: str) -> None:
    epochs.pipeline.check_open()
    if epochs.resident is not None:
        raise TypeError(f"{doing}: the rows of the dataset stay on the devices: make the loader without resident=")
    _check_order(epochs.order, doing)
    if mixture_of(epochs.dataset) is not None:
        raise TypeError(f"{doing}: the dataset is a mixture, whose order would change: make another loader")


def _check_order(order: Any, doing: str) -> None:
    if not isinstance(order, MapOrder):
        raise TypeError(f"{doing}: the dataset is iterable data, which has no indices: let it yield what is new")
    sampling = order.sampling
    if sampling.read is not None or sampling.costs is not None:
        kind = "costs=" if sampling.read is None else an(type(sampling.read))
        text = f"{doing}: {kind} decides the order, and only that of shuffle=True or False can change in mid-epoch"
        raise TypeError(f"{text}. Begin the next epoch with another loader")
    if order.rolls_over:
        text = f'{doing}: with steps_per_epoch or last_batch="rollover" epochs share passes over the data'
        raise ValueError(f"{text}, whose length must stay: leave it out, or make another loader")


def _samples_at(order: MapOrder, epoch: int, position: int) -> int:
    """Return the number of samples that an epoch knows at a position, those that were removed included."""
    sampler = order.sampling.sampler
    if isinstance(sampler, GrownSampler):
        return sampler.samples_at(epoch, position)
    return order.signature(epoch).dataset_length or 0


def _apply(epochs: Any, dataset: Any, change: SizeChange) -> None:
    """Add a change at the loader's position. Those behind it, of epochs that are read again, are dropped."""
    order, progress = epochs.order, epochs.progress
    pending = progress.pending if progress.now is At.LOADED else None
    before = [one for one in changes_of(order.sampling.grown) if one[:2] <= change[:2]]
    after = [*before, change] if change.after > change.before or change.removed else before
    grown = ((GROWN, json.dumps(after, separators=(",", ":"))),) if after else ()
    order.grow(grown, dataset, length(dataset), Position(change.epoch, change.position))
    if pending is not None:
        progress.begin_at(pending)


def _compare(epochs: Any, steps: Any, dataset: Any, before: int, now: int) -> None:
    """Raise a ValueError if the first sample has changed, or a new one has another structure."""
    epoch = epochs.progress.at()[0]

    def read(job: Any, index: int) -> tuple[str, str | None]:
        forms, reader = [], reader_for(job, readers=0)

        def sample() -> Any:
            found = reader.read_sample(index, epoch)
            forms.append(_form(found))
            return found

        with steps.in_epoch(epoch), seeded_globals(1):
            return digest_of_read(sample), forms[0] if forms else None

    job = epochs.job_now()
    new = replace(job, dataset=dataset)
    was = read(job, 0) if before and dataset is not epochs.dataset else None
    if was is not None and was == read(job, 0) != read(new, 0):
        raise ValueError("grow: sample 0 is another one than before: give the old samples with new ones behind them")
    forms = [read(new, index)[1] for index in (0, before)] if 0 < before < now else [None]
    if None not in forms and forms[0] != forms[1]:
        text = f"grow: sample {before}, the first new one, is {forms[1]}, and sample 0 is {forms[0]}"
        raise ValueError(f"{text}: give samples of the same fields")


def _form(sample: Any) -> str:
    """Return the type and the fields of a sample as text."""
    if isinstance(sample, Mapping):
        return f"{an(type(sample))} of {sorted(map(str, sample))}"
    return f"{an(type(sample))} of {len(sample)}" if isinstance(sample, tuple) else an(type(sample))


# -- one epoch ---------------------------------------------------------------------------------------------------------


class _Level(NamedTuple):
    """Positions from ``begin`` on, by those of the level before: ``rest`` old items, and items ``first``, ... behind.

    ``order`` shuffles them; None: they stay in order. ``skipped`` are the positions of the rest that are left out.
    """

    begin: int
    rest: int
    first: int
    added: int
    order: Any
    skipped: Int64s

    def within(self, places: Int64s) -> Int64s:
        if self.order is not None:
            places = self.order(places)
        return _skip(places, self.skipped)

    def back(self, within: int) -> int | None:
        place = _unskip(within, self.skipped)
        return place if self.order is None or place is None else inverted(self.order, place)[0]


class _Chain:
    """One epoch: the ordinary order of ``count`` samples without those that are ``gone``, and the levels above it."""

    def __init__(self, sampler: RandomSampler | SequentialSampler, epoch: int, count: int, gone: list[int]) -> None:
        self._key = (sampler.seed, "grown", epoch) if isinstance(sampler, RandomSampler) else None
        self._count, self._gone, self._epoch = count, np.array(gone, np.int64), epoch
        left = count - len(gone)
        self._sampler = SequentialSampler(left) if self._key is None else RandomSampler(left, sampler.seed)
        self.length, self._levels = left, list[_Level]()

    @cached_property
    def _base(self) -> Callable[[Int64s], Int64s]:
        return self._sampler.epoch_table(self._epoch).at

    def add(self, change: SizeChange) -> None:
        begin, added, order, skipped = change.position, change.after - change.before, None, np.zeros(0, np.int64)
        rest = self.length - begin
        if added and self._key is not None:
            key, total = (*self._key, len(self._levels)), rest + added
            order = shuffle(total, *key) if total <= SMALL else Bijection(total, *key)
        if change.removed:
            skipped = self._places_of(change.removed, begin) - begin
        self._levels.append(_Level(begin, rest, change.before, added, order, skipped))
        self.length += added - len(skipped)

    def _places_of(self, removed: list[int], begin: int) -> Int64s:
        """Return the positions from ``begin`` on of some indices, ascending."""
        if self.length <= IN_MEMORY:
            places = np.arange(begin, self.length)
            return places[np.isin(self.at(places), removed)]
        found = (place for index in removed for place in self.positions_of(index))
        return np.array(sorted(place for place in found if place >= begin), np.int64)

    def at(self, positions: Int64s) -> Int64s:
        found, places = np.full(len(positions), -1, np.int64), positions.copy()
        for level in reversed(self._levels):
            late = np.flatnonzero((places >= level.begin) & (found < 0))
            within = level.within(places[late] - level.begin)
            is_new = within >= level.rest
            found[late[is_new]] = level.first + within[is_new] - level.rest
            places[late] = level.begin + within
        old = np.flatnonzero(found < 0)
        found[old] = _skip(self._base(places[old]), self._gone) if len(old) else 0
        return found

    def positions_of(self, index: int) -> list[int]:
        rank = _unskip(index, self._gone) if 0 <= index < self._count else None
        place = None if rank is None else positions_of(self._sampler, rank, self._epoch)[0]
        for level in self._levels:
            if level.first <= index < level.first + level.added:
                place = level.begin + level.rest + index - level.first
            if place is not None and place >= level.begin:
                back = level.back(place - level.begin)
                place = None if back is None else level.begin + back
        return [] if place is None else [place]


def _skip(places: Int64s, left_out: Int64s) -> Int64s:
    """Return the numbers at some places among those that are not left out (ascending)."""
    found: Int64s = places + np.searchsorted(left_out - np.arange(len(left_out)), places, side="right")
    return found


def _unskip(number: int, left_out: Int64s) -> int | None:
    place = int(np.searchsorted(left_out, number))
    return None if place < len(left_out) and left_out[place] == number else number - place
