"""`loader.grow` and `loader.without`: samples are added and removed in mid-epoch, and what was read stays read.

    GrownSampler.grow(epochs, steps, dataset), .without(epochs, indices)   -> a `SizeChange`, at the loader's position
    GrownSampler(sampler, changes)                                         -> the order of each epoch after them
    GrownSampler.loading(order, state)                                     -> the changes of a state, while it is loaded

An epoch is a chain of levels, each a function of positions. Level 0 is the ordinary order of the samples that there
were when the epoch began, less those removed before. A change at position p begins the next level. The positions before
p stay. From p on, there is a keyed shuffle of the rest of the level before and the new samples, or both in order
without ``shuffle``. After a removal, the rest comes without the samples that were removed. So the order is a pure
function of (seed, epoch, changes), for any number of ranks, and a state has only the changes. The sampler owns no data.

What can go wrong: an order that is not the loader's own, or epochs that share passes (TypeError); fewer samples, or new
ones with other fields (ValueError).
"""

from __future__ import annotations

import json
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import RandomSampler, SequentialSampler
from sharded_loader.extend import Int64s, Position, reader_for
from sharded_loader.extend.data import digest_of_read, mixture_of, takes_arrays
from sharded_loader.extend.engine import At, dataset_given, length
from sharded_loader.extend.order import Bijection, IndexSampler, MapOrder, seeded_globals, shuffle
from sharded_loader.extend.tools import an, brief, uninterrupted
from sharded_loader.samplers.inverse import inverted

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
        rows = (row for _, text in grown for row in json.loads(text))
        return [SizeChange._make([*map(int, row), [*map(int, gone)]]) for *row, gone in rows]
    except (TypeError, ValueError) as error:
        text = f"the state's {GROWN!r} is {brief(grown)}: give what state_dict() of a ShardedDataLoader returned"
        raise ValueError(text) from error


class GrownSampler(IndexSampler):
    """Order of a loader whose dataset has changed in mid-epoch; ``sampler`` is the ordinary one over all samples."""

    def __init__(self, sampler: RandomSampler | SequentialSampler, grown: Grown) -> None:
        self._sampler, self._changes, self._length = sampler, changes_of(grown), len(sampler)
        self.seed, self._given = sampler.seed, (sampler, grown)
        self._chain = lru_cache(maxsize=2)(self._make_chain)

    def __reduce__(self) -> Any:
        return GrownSampler, self._given

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        return self._chain(epoch).at

    def len_epoch(self, epoch: int) -> int:
        return self._chain(epoch).length

    def positions_of(self, index: int, epoch: int) -> list[int]:
        return [*self._chain(epoch).positions_of(np.array([index])).tolist()]

    def _make_chain(self, epoch: int) -> _Chain:
        later = [one for one in self._changes if one[:2] > (epoch, 0)]
        gone = {index for one in self._changes if one[:2] <= (epoch, 0) for index in one.removed}
        first = SizeChange(epoch, 0, 0, later[0].before if later else self._length, sorted(gone))
        chain = _Chain(self._sampler, [first, *(one for one in later if one.epoch == epoch)])
        MADE.append(chain)
        return chain

    # -- in a loader ----------------------------------------------------------------------------------------

    @staticmethod
    def grow(epochs: Any, steps: Any, given: Any, then: Callable[[], None]) -> None:
        """Take in the samples that were appended, and call ``then``; see `ShardedDataLoader.grow`."""
        dataset, unread = epochs.dataset if given is None else dataset_given(given), list[int]()

        def change(before: int) -> tuple[int, list[int]]:
            now = length(dataset, needed=True) or 0
            if now < before:
                text = f"grow: the dataset has {now} samples, and had {before}"
                raise ValueError(f"{text}: give the old ones with new ones behind them, or call without(indices)")
            if 0 < before < now and not unread:
                unread.append(before)
                raise _FieldsUnknown
            epochs.job, epochs.dataset = replace(epochs.job, dataset=dataset), dataset
            steps.dataset, epochs.order.arrays = dataset, epochs.batchify_fn is None and takes_arrays(dataset)
            epochs.known.forget(dataset)
            return now, []

        def take_in() -> None:
            with uninterrupted():  # halfway, the order would not be that of the dataset
                _replan(epochs, "grow", change)
                if epochs.pipeline.pool.started or epochs.pipeline.runs:
                    epochs.pipeline.start(epochs.job_now())  # to the running workers: they read the rest
                else:
                    epochs.stale = True
                then()

        with suppress(_FieldsUnknown):
            take_in()
        if unread:  # a Ctrl-C while samples are read changes nothing
            _check_fields(epochs, steps, dataset, *unread)
            take_in()

    @staticmethod
    def without(epochs: Any, indices: Iterable[int]) -> None:
        """Leave out samples; see `ShardedDataLoader.without`."""
        removed = set(map(operator.index, indices))

        def change(before: int) -> tuple[int, list[int]]:
            gone = {one for row in changes_of(epochs.order.sampling.grown) for one in row.removed}
            if not all(0 <= one < before for one in removed) or len(gone | removed) == before:
                text = f"without: the dataset has {before} samples, from 0 on"
                raise IndexError(f"{text}: give indices of some, but not all: {brief(sorted(removed))}")
            return before, sorted(removed - gone)

        _replan(epochs, "without", change)

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
        _check(order, "load_state_dict")
        try:
            order.sampling.grown = grown
            order.resize(order.dataset_length)
            yield
        except BaseException:
            order.sampling.grown = before
            order.resize(order.dataset_length)
            raise


class _FieldsUnknown(Exception):
    """Two samples must be read before the dataset can grow."""


def _check(order: Any, doing: str, is_resident: bool = False) -> None:
    sampling = getattr(order, "sampling", None)
    if sampling is None or order.rolls_over or is_resident or not sampling.read is sampling.costs is None:
        text = f"{doing}: only the order of shuffle=True or False can change: no sampler, mixture, costs="
        raise TypeError(f"{text}, steps_per_epoch=, rollover, iterable data, or data resident on devices")


def _replan(epochs: Any, doing: str, change: Callable[[int], tuple[int, list[int]]]) -> None:
    """Add a change at the loader's position. Those behind it, of epochs that are read again, are dropped.

    ``change`` gets the number of samples that the epoch knows, and returns the new one, and the indices to remove.
    """
    order, progress = epochs.order, epochs.progress
    epochs.pipeline.check_open()
    _check(order, doing, epochs.resident is not None or mixture_of(epochs.dataset) is not None)

    def apply(epoch: int, position: int) -> None:
        changes, pending = changes_of(order.sampling.grown), progress.pending if progress.now is At.LOADED else None
        done = [one for one in changes if one[:2] <= (epoch, position)]
        before = changes[len(done)].before if changes[len(done) :] else order.signature(epoch).dataset_length or 0
        after, removed = change(before)
        done += [SizeChange(epoch, position, before, after, removed)] if after > before or removed else []
        grown = ((GROWN, json.dumps(done, separators=(",", ":"))),) if done else ()
        order.grow(grown, epochs.dataset, length(epochs.dataset), Position(epoch, position))
        if pending is not None:
            progress.begin_at(pending)

    epochs.replan(apply)


def _check_fields(epochs: Any, steps: Any, dataset: Any, before: int) -> None:
    """Raise a ValueError if the first new sample has other fields than sample 0; errors of reading are for later."""
    epoch, forms = epochs.progress.at()[0], list[str]()
    reader = reader_for(replace(epochs.job_now(), dataset=dataset), readers=0)

    def read(index: int) -> None:
        sample = reader.read_sample(index, epoch)
        fields = sorted(map(str, sample)) if isinstance(sample, Mapping) else isinstance(sample, tuple) and len(sample)
        forms.append(f"{an(type(sample))} with the fields {fields or 'none'}")

    with steps.in_epoch(epoch), seeded_globals(1):
        digest_of_read(partial(read, 0)), digest_of_read(partial(read, before))
    if len({*forms}) == 2:
        text = f"grow: sample {before}, the first new one, is {forms[1]}, and sample 0 is {forms[0]}"
        raise ValueError(f"{text}: give samples of the same fields")


# -- one epoch ---------------------------------------------------------------------------------------------------------


Level = tuple[int, int, int, int, Any, Int64s]
"""The positions of the level before from ``begin`` on, and ``added`` ones behind its ``end``: samples ``first``, ...

``order()`` shuffles them; without ``order`` they stay. ``skipped``: places among them that are left out, ascending. It
is a tuple (begin, end, first, added, order, skipped).
"""


class _Chain:
    """One epoch: the level of its ordinary order, which takes in all samples at position 0, and those above it."""

    def __init__(self, sampler: RandomSampler | SequentialSampler, changes: list[SizeChange]) -> None:
        self.length, self._levels, is_random = 0, list[Level](), isinstance(sampler, RandomSampler)
        self._facts, done = (is_random, sampler.seed, changes), 0
        for known in MADE.copy():  # mostly, one change was added to those of before
            kind, seed, made = known._facts
            if (kind, seed) == self._facts[:2] and done < len(made) and made == changes[: len(made)]:
                done, self.length, self._levels = len(made), known.length, [*known._levels]
        for number, (epoch, begin, before, after, removed) in enumerate(changes[done:], done):
            gone = np.array(removed, np.int64)
            old = self.positions_of(gone[gone < before]) if removed else gone
            places = np.append(old, self.length + gone[gone >= before] - before)
            skipped = places[places >= begin] - begin
            rest, key = self.length + after - before - len(skipped), (sampler.seed, "grown", epoch, number)
            if self._levels and self._levels[-1][4] is None and not (is_random and after > before):
                # Without a shuffle it is one level with the one before: what it skips lies behind its begin.
                start, end, first, added, _, gaps = self._levels[-1]
                skipped = np.sort(np.append(gaps, _shifted(skipped + begin - start, gaps)))
                self._levels[-1], self.length = (start, end, first, added + after - before, None, skipped), rest
                continue
            order: Any = None
            if is_random and after > before:
                make = shuffle if rest - begin <= SMALL else Bijection
                order = cache(partial(make, rest - begin, *key))
                if not self._levels:
                    order = cache(partial(RandomSampler(rest, sampler.seed)._order, epoch))
            self._levels.append((begin, self.length, before, after - before, order, skipped))
            self.length = rest

    def at(self, positions: Int64s) -> Int64s:
        found, places = np.full(len(positions), -1, np.int64), positions.copy()
        for begin, end, first, _, order, skipped in reversed(self._levels):
            late = np.flatnonzero((places >= begin) & (found < 0))
            within = places[late] - begin if order is None else order()(places[late] - begin)
            places[late] = begin + _shifted(within, skipped)
            new = late[places[late] >= end]
            found[new] = first + places[new] - end
        return found

    def positions_of(self, indices: Int64s) -> Int64s:
        """Return the positions of those indices that the epoch has, ascending."""
        places = np.zeros(0, np.int64)
        for begin, end, first, added, order, skipped in self._levels:
            new = indices[(indices >= first) & (indices < first + added)]
            places = np.append(places, end + new - first)
            late = places >= begin
            within = np.setdiff1d(places[late] - begin, skipped)
            moved = inverted(order and order(), within - np.searchsorted(skipped, within))
            places = np.append(places[~late], begin + moved)
        return np.sort(places)


MADE: deque[_Chain] = deque(maxlen=2)
"""The chains that were made last, of this epoch and the next."""


def _shifted(within: Int64s, skipped: Int64s) -> Int64s:
    """Return the places of items that are counted without the ``skipped`` places.

    Example:
        >>> _shifted(np.arange(3), np.array([1, 2]))
        array([0, 3, 4])
    """
    found: Int64s = within + np.searchsorted(skipped - np.arange(len(skipped)), within, side="right")
    return found
