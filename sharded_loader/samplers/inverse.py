"""`loader.when`: the steps and ranks that read a sample, from the order alone, without a search.

    positions_of(sampler, index, epoch)  -> positions in an epoch of a sampler: its order, inverted
    places_of(order, index, epoch)       -> `SamplePlace`: epoch, step, rank, place in the batch

A keyed bijection is inverted round by round, which takes 50 us for 10**12 samples; an order that is held in memory is
searched. A position becomes a step, a rank and a place by the arithmetic with which the ranks take their samples:
padding, steps that are left out, passes under ``steps_per_epoch``, and positions before a resume included.

What can go wrong: the order has no known inverse, as that of draws with replacement (TypeError). Other ranks have read
the sample, before the position that the loader continued from (ValueError).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import BatchSampler, RandomSampler, SequentialSampler
from sharded_loader.extend import Int64s
from sharded_loader.extend.engine import plain_index
from sharded_loader.extend.order import Bijection, MapOrder, has_weights, len_epoch, nested, parts
from sharded_loader.extend.tools import an, check_int, fast_method
from sharded_loader.samplers.bijections import unmixed

_ORDERS = ("epoch_table", "iter_epoch", "__iter__", "_order")
"""Methods that decide an order. A subclass that overrides one has another inverse."""


def inverted(order: Any, indices: Int64s) -> Int64s:
    """Return the positions that a `shuffle` maps to some indices, ascending; those themselves if it is None.

    Example:
        >>> order = Bijection(10**12, 7, "order")
        >>> inverted(order, order(np.array([41])))
        array([41])
    """
    if isinstance(order, Bijection):
        found = (unmixed(index, int(order.length), order.rounds) for index in indices.tolist())
        return np.array(sorted(found), np.int64)
    return indices if order is None else found_in(order.__self__, indices)  # `take` of an array


def found_in(items: Any, indices: Any) -> Int64s:
    """Return the positions in a range, a list or an array that have one of some indices, ascending.

    Example:
        >>> found_in(range(0, 10**12, 3), [9]), found_in([4, 1, 4], [4])
        (array([3]), array([0, 2]))
    """
    if isinstance(items, range):
        # A range compares each of its items with a subclass of int, such as the index of a copy.
        numbers = (int(index) if isinstance(index, int) else index for index in indices)
        return np.array(sorted(items.index(number) for number in numbers if number in items), np.int64)
    return np.flatnonzero(np.isin(items, indices))


def positions_of(sampler: Any, index: Any, epoch: int) -> list[int]:
    """Return the positions of an index in an epoch of a sampler of single indices; a TypeError if none can be computed.

    A sampler of your own has a method of this name, with the arguments ``index`` and ``epoch``.

    Example:
        >>> from sharded_loader import RandomSampler
        >>> sampler = RandomSampler(10**12, seed=7)
        >>> positions_of(sampler, next(sampler.iter_epoch(3, start=41)), epoch=3)
        [41]
    """
    kind, order = type(sampler), None
    if fast_method(kind, "positions_of", _ORDERS) is not None:
        return list(sampler.positions_of(index, epoch))
    if kind in (RandomSampler, SequentialSampler):
        check_int("when: the index", index, 0, "give the index of a sample, as loader.indices shows it")
    if kind is RandomSampler:
        given, order = range(len(sampler)), sampler._order(epoch)
    elif kind is SequentialSampler:
        given = range(sampler._first, sampler._first + len(sampler))
    elif kind in (range, list, tuple, np.ndarray) and not np.ndim(next(iter(sampler), 0)):  # no batches
        given = sampler
    else:
        text = f"when: no inverse is known of the order of {an(kind)}, so only a search would find the sample"
        raise TypeError(f"{text}: look for it in loader.indices(epoch, step), step by step")
    return [*inverted(order, found_in(given, [index])).tolist()]


class SamplePlace(NamedTuple):
    """Place of a sample in an epoch; returned by ``loader.when(index)``.

    Attributes:
        epoch, step: epoch and number of the batch in it, as in ``loader.indices(epoch, step)``.
        rank: rank that reads it.
        place: position in the batch of that rank, with its shards joined.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> ShardedDataLoader(range(6), 2, num_replicas=2, rank=0).when(5)
        [SamplePlace(epoch=0, step=1, rank=1, place=0)]
    """

    epoch: int
    step: int
    rank: int
    place: int


def places_of(order: MapOrder, mixture: Any, index: Any, number: object) -> list[SamplePlace]:
    """Return the places of an index in an epoch of a loader, ascending; see `Instruments.when`."""
    number, length = check_int("epoch", number, 0, "epochs count from 0"), order.dataset_length
    index = tuple(map(plain_index, index)) if isinstance(index, tuple) else plain_index(index)
    source, targets = order.epoch(number).source, [index]
    if mixture is not None:
        if not (isinstance(index, tuple) and len(index) == 2):
            raise TypeError(f"when: {index!r} is no sample of a mixture: give (number of the dataset, index in it)")
        if not any(map(has_weights, nested(source.items))):
            targets = mixture.positions_of(*index, number)
    elif isinstance(index, int) and length is not None and not 0 <= index < length:
        raise IndexError(f"when: sample {index} does not exist: the dataset has {length} samples, from 0 on")

    def items(epoch: int) -> list[tuple[int, int]]:
        """Return the items of the order that have the sample, and its place in each: items may be batches."""
        sampler: Any = source.items
        size = 1
        if type(sampler) is BatchSampler and sampler.last_batch != "rollover":
            sampler, size = sampler.sampler, sampler.batch_size
        return [divmod(one, size) for target in targets for one in positions_of(sampler, target, epoch)]

    known: Any = None
    with suppress(ValueError):  # the rest of the epoch, or all of it if its beginning was for these ranks too
        known = order.epoch_at(number, sys.maxsize)
        whole = order.epoch_at(number, -1)
        known = whole if whole.reached(known.first) == known.reached(known.first) else known
    found = [] if known is None else sorted(_places(known, items))
    if not found and (known is None or known.in_mid_epoch):
        text = f"when: sample {index} was read in epoch {number} by other ranks, or in other batches"
        raise ValueError(f"{text}, before this loader went on: ask a loader with the original arguments")
    found = [one for one in found if not any(one.step in skipped for skipped in source.skips)]
    is_cut = order.order_ranks() != order.replicas()  # global batches
    return sorted(place for one in found for place in (_in_shares(order, one) if is_cut else [one]))


def _in_shares(order: MapOrder, one: SamplePlace) -> list[SamplePlace]:
    """Return the places in the shares of a global batch for a place in the whole batch; see `parallel.shares`."""
    epoch, ranks = order.epoch_at(one.epoch, one.step).again(), order.replicas()[0]
    epoch.source = replace(epoch.source, cut=None)
    task: Any = epoch.task(one.step)
    count = min(ranks, sum(map(len, task.shards)))
    place, number = divmod(one.place, count)
    turns = ((rank, (rank - task.position) % ranks) for rank in range(ranks))
    return [one._replace(rank=rank, place=place) for rank, turn in turns if turn % count == number]


def _places(epoch: Any, items: Callable[[int], list[tuple[int, int]]]) -> Iterator[SamplePlace]:
    """Yield the places in the steps from ``epoch.first`` on, by the passes over the sampler that these contain."""
    source, steps, before = epoch.source, epoch.length(), 0
    own, ranks, size = source.signature, source.replicas, source.signature.batch_size or 1
    (first, done), end = epoch.reached(epoch.first), epoch.reached(steps)
    for number in range(first, end[0] + 1):
        here, length = items(number), len_epoch(source.items, number)
        turns = parts(length - done, ranks, cut=False)  # of all ranks, in each of which a rank takes an item
        last = length if source.evaluates else done + turns * ranks  # the beginning comes again, for some ranks
        for item, within in (one for one in here if one[0] < length):
            for position in range(item, last, length):
                turn, rank = divmod(position - done, ranks)
                step, place = divmod(before + turn, size)
                is_read = epoch.first + step < steps and not (own.rolls_over and (number, position) >= end)
                if turn >= 0 and is_read:
                    yield SamplePlace(epoch.number, epoch.first + step, rank, place + within)
        before, done = before + turns, 0
