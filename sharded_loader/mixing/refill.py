"""Batches that stay full: samples that fail or are rejected make room for the next ones of the order.

    ShardedDataLoader(dataset, keep=fn, on_error="refill") -> refilled(...) -> reads a `Refill` in place of the dataset
    part i of n --one of each n positions, of all epochs--> dataset[index] --keep--> samples without an end

A `Refill` is iterable data: a batch is the next samples that a part yields, so it is full, and the state of a part is
the number of samples that it has read. Positions are counted over all epochs of the sampler, so that parts never end,
and each has its share of every epoch.

Failed samples are listed in ``loader.skipped``; rejected ones are not. A part that yields nothing for a long time is a
ValueError, which says how many samples it has read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from sharded_loader.extend import Sampler
from sharded_loader.extend.data import Mixture, announce_epoch, await_value, is_stream, nested
from sharded_loader.extend.engine import BatchScope, resolve_replicas
from sharded_loader.extend.order import Bijection, DrawnSeed, SampleScope, reading, table_of, with_seeds
from sharded_loader.extend.order import nested as samplers_in
from sharded_loader.extend.tools import check_function, entries, pass_on
from sharded_loader.mixing.in_order import InOrder, held, this_worker

MOST_LOST = 100_000
"""Samples in a row, at most, that a part may leave out; with less data than this, as many as there are, or 1,000."""

_ADVICE = "give what state_dict() of the loader returned"


def refilled(dataset: Any, order: Any, size: Any, steps: int | None, ranks: Any) -> tuple[Any, int | None]:
    """Return what a loader reads in place of a dataset, and ``steps_per_epoch``, by default that without a filter.

    ``order`` has the other arguments of `Refill`, ``size`` is the batch size.
    """
    made, replicas = Refill(dataset, *order), resolve_replicas(*ranks)[0]
    if isinstance(size, int):
        batches = made.length // max(1, size)
        made.num_shards = max(replicas, batches // 2)  # no more parts than have some batches in each epoch
        steps = max(1, batches // replicas) if steps is None else steps
    return made, steps


class Refill(InOrder):
    """The samples of a dataset that ``keep`` does not reject, in an order without an end.

    Args:
        keep: function of a sample; None: all are kept.
        leaves_out: leave out samples that fail.
        shuffle, sampler: of the order. Its seed is that of the loader that reads it.
    """

    seed = 0

    def __init__(self, dataset: Any, keep: Any, leaves_out: bool, shuffle: Any, sampler: Any) -> None:
        check_function("keep", keep, "of a sample that returns False to reject it")
        has_no_order = is_stream(dataset) or any(isinstance(inner, Mixture) for inner in nested(dataset))
        if has_no_order or (sampler is not None and (shuffle or not isinstance(sampler, Sampler))):
            text = (
                "keep= and on_error='refill' look up any position of the order: give shuffle=True alone, or a sampler"
            )
            raise TypeError(f"{text} of this library. Filter iterable data, and the datasets of a mixture, themselves")
        super().__init__((), ())
        self.length = len(dataset) if sampler is None else sampler.len_epoch(0)
        if not self.length:
            raise ValueError("the dataset has no samples, so that no batch can be full: give some")
        self.keep, self.leaves_out, self._held = keep, leaves_out, held(dataset)
        self.shuffle, self.sampler = shuffle, sampler
        for one in samplers_in(sampler):
            if hasattr(one, "read_in_parts"):
                one.read_in_parts(self)

    @property
    def dataset(self) -> Any:
        """Dataset that is read."""
        return self._held.dataset

    def set_epoch(self, epoch: int) -> None:
        """Do nothing: there is one order over all epochs, and each part tells the dataset which one it reads."""

    def indices_of(self, epoch: int) -> Callable[[Any], Any]:
        """Return a function from positions in an epoch to indices."""
        if self.sampler is not None:
            return table_of(self.sampler, epoch, 0).at
        return Bijection(self.length, self.seed, "refill", epoch) if self.shuffle else np.asarray

    def __iter__(self) -> Iterator[Any]:
        twin = copy.copy(self)
        if (scope := reading.get()) is not None:  # its seed takes the place of those that were drawn
            drawn = (isinstance(getattr(one, "seed", None), DrawnSeed) for one in samplers_in(self.sampler))
            seeds = [scope.seed if one else None for one in drawn]
            twin.seed, twin.sampler = scope.seed, with_seeds(self.sampler, seeds)
        return _Samples(twin)

    def __repr__(self) -> str:
        order = f"seed={self.seed}" if self.shuffle else "in order" if self.sampler is None else repr(self.sampler)
        return f"Refill of {self.length} samples, {order}"


class _Samples(Iterator[Any]):
    """Iteration over a part of a `Refill`. Its state is how many samples it has read, in all epochs."""

    def __init__(self, refill: Refill) -> None:
        self._refill, self._dataset, self._read, self._epoch = refill, refill.dataset, 0, -1
        self._part, self._parts = this_worker() or (0, 1)

    def __next__(self) -> Any:
        refill, outer, begin = self._refill, reading.get(), self._read
        try:
            while self._read < begin + min(max(refill.length, 1000), MOST_LOST):
                index = self._following()
                reading.set(outer and SampleScope(outer.seed, self._epoch, index, outer.owners, outer.is_cached))
                try:
                    sample = await_value(self._dataset[index])
                    if refill.keep is None or refill.keep(sample):
                        return sample
                except Exception as error:
                    pass_on(error)
                    if not refill.leaves_out:
                        raise
                    if isinstance(outer, BatchScope):  # the loader counts it
                        outer.skipped += ((index, error.with_traceback(None)),)
        finally:
            reading.set(outer)
        text = f"keep has rejected {self._read - begin} samples in a row, or reading failed, in part {self._part}"
        advice = "Look at what keep returns, and at loader.skipped"
        raise ValueError(f"{text}, which has read {self._read}: the batch cannot be filled. {advice}")

    def _following(self) -> Any:
        """Return the index of the next sample."""
        # Places in a turn rotate: a fixed one would be the same few indices, if the parts divide the length.
        turn = self._read * self._parts + (self._part + self._read) % self._parts
        epoch, position = divmod(turn, self._refill.length)
        if self._epoch != epoch:
            self._epoch, self._indices = epoch, self._refill.indices_of(epoch)
            announce_epoch(self._dataset, epoch)
        self._read += 1
        (index,) = self._indices(np.array([position]))
        return index.item() if isinstance(index, np.integer) else index

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small dict."""
        return {"version": entries.VERSION, "order": repr(self._refill), "read": self._read}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position; a ValueError if it is that of another order."""
        entries.check_version(state, _ADVICE, unnumbered=1)
        order = entries.read_entry(state, "order", entries.string, _ADVICE)
        if order != repr(self._refill):
            raise ValueError(f"the state is that of another order: it was {order}, and is {self._refill!r}")
        self._read, self._epoch = entries.read_entry(state, "read", entries.integer(0), _ADVICE), -1
