"""`MixtureSampler`: the order of a mixture whose datasets are shuffled, or whose weights change.

    interleave(datasets, shuffle=True) -> sampler_of(dataset) -> MixtureSampler
    epoch, position -> plan of the epoch -> mixture.codes(positions) -> numbers that the mixture takes as indices
    loader.set_weights(weights) -> MixtureSampler.set_weights(weights, epoch, position)

A loader makes this sampler if the user gives no other order. The main process then computes which sample is where, and
workers only look it up. So weights that change reach no worker, and the order is exact where an epoch of the loader
ends in the middle of an epoch of the mixture (``steps_per_epoch``, ``last_batch="rollover"``).

The sampler owns the weights that were set while training, each with the epoch and the position from which it holds. A
state of the loader has them as ``set_weights``. They decide the order together with what the mixture was given: a state
may be loaded on any number of ranks. The mixture itself is not changed, and several loaders may read it.

What can go wrong: weights that do not fit the mixture; a state with other ones. A ValueError says what to give.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

from sharded_loader.data.interleave import InterleavedDataset, has_shuffled, mixture_of
from sharded_loader.data.schedule import Change, Plan, whole_numbers
from sharded_loader.sampling.index_samplers import IndexSampler
from sharded_loader.sampling.state import WEIGHTS_SET

Moment = tuple[int, int, list[int]]
"""Weights that were set while training: the epoch and the position from which they hold, and whole numbers."""


class MixtureSampler(IndexSampler):
    """The samples of a mixture in its own order, as numbers that say which sample it is; see the module.

    Args:
        mixture: what `interleave` returned for datasets that are read by index.

    Example:
        >>> from sharded_loader import interleave
        >>> mixed = interleave([[*"abcd"], [*"xy"]], stop="each_once", shuffle=True)
        >>> sampler = MixtureSampler(mixed)
        >>> [mixed[number] for number in sampler], [mixed[number] for number in sampler]
        (['y', 'a', 'c', 'x', 'b', 'd'], ['x', 'c', 'a', 'y', 'b', 'd'])
    """

    decided_by = (
        ("weights", "_start"),
        ("seed", "_seed"),
        ("stop", "_stop"),
        ("shuffle", "_on"),
        ("sizes", "_sizes"),
    )

    def __init__(self, mixture: InterleavedDataset) -> None:
        self._mixture, self._length = mixture, len(mixture)
        self._start, self._seed = mixture.schedule.weights, mixture.schedule.seed
        self._stop, self._on, self._sizes = mixture.stop, mixture.shuffles, mixture.sizes
        self._set: tuple[Moment, ...] = ()

    def _order(self, epoch: int) -> Any:
        return partial(self._mixture.codes, epoch=epoch, plan=self._plan(epoch, self._set))

    def _plan(self, epoch: int, given: tuple[Moment, ...]) -> Plan | None:
        """The plan of an epoch; None: that of the mixture."""
        given = tuple(one for one in given if one[0] <= epoch)
        if not given:
            return None
        before = [Change(0, weights) for number, _, weights in given if number < epoch]
        changes = before[-1:] or self._mixture.changes
        for begin, weights in (one[1:] for one in given if one[0] == epoch):
            changes = [*(change for change in changes if change.begin < begin), Change(begin, weights)]
        return self._mixture.replanned(changes)

    def set_weights(self, weights: Any, epoch: int, position: int) -> None:
        """Mix by these weights from a position of an epoch on, and in the epochs after it.

        Raises:
            ValueError: weights that do not fit. Nothing has changed then.
        """
        found = whole_numbers(weights, self._mixture.number, "set_weights")
        before = [one for one in self._set if one[0] < epoch][-1:]  # what decides this epoch and those after it
        before += [one for one in self._set if one[0] == epoch and one[1] < position]
        given = (*before, (epoch, position, found))
        self._plan(epoch, given), self._plan(epoch + 1, given)
        self._set = given

    @property
    def weights_set(self) -> str:
        """The weights that were set, for a state."""
        return json.dumps(self._set)

    def adopt(self, arguments: dict[str, Any]) -> None:
        """Take over the weights that were set, from a state.

        Raises:
            ValueError: they are no such weights. Nothing has changed then.
        """
        before, self._set = self._set, ()
        try:
            for epoch, position, weights in json.loads(arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", "[]")):
                self.set_weights(weights, int(epoch), int(position))
        except (TypeError, ValueError) as error:
            self._set = before
            raise ValueError(f"load_state_dict: the weights of the state do not fit the mixture: {error}") from error


def sampler_of(dataset: Any, is_given: bool, rolls_over: bool) -> MixtureSampler | None:
    """The sampler of a mixture whose order a loader plans; None: the dataset is no such mixture.

    Args:
        dataset: the loader's.
        is_given: whether the user has given another order.
        rolls_over: whether an epoch of the loader may begin inside an epoch of the dataset.

    Raises:
        ValueError: a shuffled mixture that has to know its epoch, and batches that belong to two epochs.
    """
    mixture = None if is_given else mixture_of(dataset)
    mixture = mixture if mixture is not None and mixture.is_planned else None
    if rolls_over and (has_shuffled(dataset) if mixture is None else any(map(has_shuffled, mixture._inside))):
        raise ValueError(
            "interleave(shuffle=True) inside another dataset, or under a sampler, with steps_per_epoch or rollover: "
            "the mixture would be shuffled anew before all of its samples were read. Give the loader the mixture "
            "itself without a sampler, or leave out steps_per_epoch and rollover"
        )
    return None if mixture is None else MixtureSampler(mixture)


NO_WEIGHTS = (
    "set_weights needs what interleave() returned for datasets that are read by index, or a transform of it, as the "
    "dataset of a loader without a sampler and without shuffle=True. Make it with interleave(..., shuffle=True), or "
    "with a schedule, weights=[(0, [...])]. Iterable data can only have a schedule that is given from the start"
)
