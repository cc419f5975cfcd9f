"""Batches that stay full: samples that fail or are rejected make room for the next ones of the order.

    ShardedDataLoader(dataset, keep=fn, on_error="refill") -> refilled(...) -> reads a `Refill` in place of the dataset
    part i of n --one of each n positions, of all epochs--> dataset[index] --keep--> samples without an end

A `Refill` is iterable data: a batch is the next samples that a part yields, so it is full, and the state of a part is
the number of samples that it has read. Positions are counted over all epochs of the sampler, so that parts never end,
and each has its share of every epoch. Iterable data is filtered in its own order, and ends as it does.

Failed samples are listed in ``loader.skipped``; rejected ones are not. A part that yields nothing for a long time is a
ValueError, which says how many samples it has read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharded_loader.extend import Sampler
from sharded_loader.extend.data import Mixture, announce_epoch, is_stream, nested
from sharded_loader.extend.engine import BatchScope, resolve_replicas
from sharded_loader.extend.order import Bijection, SampleScope, reading
from sharded_loader.extend.tools import an, brief, entries, pass_on
from sharded_loader.mixing.in_order import BEGINNING, END, InOrder, Source, SourcePoint, held, is_divided, this_worker

MOST_LOST = 100_000
"""Samples in a row, at most, that a part may leave out; with less data than this, as many as there are, or 1,000."""


def refilled(dataset: Any, order: Any, size: Any, steps: int | None, ranks: Any) -> tuple[Any, int | None]:
    """Return what a loader reads in place of a dataset, and ``steps_per_epoch``, by default that without a filter.

    ``order`` has the other arguments of `Refill`, ``size`` is the batch size.
    """
    made, replicas = Refill(dataset, *order), resolve_replicas(*ranks)[0]
    if made.length and isinstance(size, int):
        batches = made.length // max(1, size)
        made.num_shards = max(replicas, batches // 2)  # no more parts than have some batches in each epoch
        steps = max(1, batches // replicas) if steps is None else steps
    return made, steps


class Refill(InOrder):
    """The samples of a dataset that ``keep`` does not reject, in an order without an end.

    Args:
        keep: function of a sample; None: all are kept.
        leaves_out: leave out samples that fail.
        seed, shuffle, sampler: of the order.
    """

    def __init__(
        self, dataset: Any, keep: Any, leaves_out: bool, seed: int | None, shuffle: bool, sampler: Any
    ) -> None:
        if keep is not None and not callable(keep):
            raise TypeError(f"keep is {brief(keep)}; it must be a function of a sample that returns False to reject it")
        is_mixture = any(isinstance(inner, Mixture) for inner in nested(dataset))
        if is_mixture or (sampler is not None and (shuffle or not isinstance(sampler, Sampler))):
            text = "that of interleave" if is_mixture else f"the sampler is {an(type(sampler))}"
            raise TypeError(
                f"keep= and on_error='refill' need to look up the order at any position, and {text}: give shuffle=True "
                "alone, or a sampler of this library. Filter the datasets of a mixture one by one"
            )
        super().__init__((), (dataset,) if is_stream(dataset) else ())
        self.keep, self.leaves_out, self.length, self.epoch = keep, leaves_out, 0, 0
        self.seed, self.shuffle, self.sampler = seed or 0, shuffle, sampler
        for one in () if sampler is None else nested(sampler):
            if hasattr(one, "read_in_parts"):
                one.read_in_parts(self)
        self._dataset = held(dataset)
        if not is_stream(dataset):
            self.length = len(dataset) if sampler is None else sampler.len_epoch(0)
            if not self.length:
                raise ValueError("the dataset has no samples, so that no batch can be full: give some")

    @property
    def dataset(self) -> Any:
        """Dataset that is read."""
        return self._dataset.dataset

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iterator of iterable data. Other data has one order over all epochs."""
        self.epoch = epoch
        announce_epoch(self.dataset, epoch)

    def indices_of(self, epoch: int) -> Callable[[Any], Any]:
        """Return a function from positions in an epoch to indices."""
        key = self.seed, "refill", epoch
        if self.sampler is not None:
            return self.sampler.epoch_table(epoch).at
        return Bijection(self.length, *key) if self.shuffle else np.asarray

    def __iter__(self) -> Iterator[Any]:
        return _Samples(self)

    def __repr__(self) -> str:
        order = f"seed={self.seed}" if self.shuffle else "in order" if self.sampler is None else repr(self.sampler)
        return f"Refill of {self.length or 'iterable'} samples, {order}"


@dataclass(frozen=True)
class _RefillPosition:
    """State of `_Samples`: how many a part has read, in all epochs."""

    order: str = entries.entry(entries.string, "it was {was}, and is {now}")
    read: int = entries.entry(entries.integer(0))
    source: Any = entries.entry(entries.dict_of(SourcePoint), write=entries.to_state, default=BEGINNING)  # noqa: RUF009


class _Samples(Iterator[Any]):
    """Iteration over a `Refill`."""

    def __init__(self, refill: Refill) -> None:
        self._refill, self._dataset, self._epoch = refill, refill.dataset, refill.epoch
        self._worker = this_worker() if refill.length or is_divided(self._dataset) else None
        self._begin_at(_RefillPosition(repr(refill), 0))

    def _begin_at(self, place: _RefillPosition) -> None:
        self._read, self._yields, self._opened = place.read, place.read > 0, -1
        self._source = Source("the dataset", self._dataset, place.source, self._worker)

    def __next__(self) -> Any:
        refill, outer, lost, sample = self._refill, reading.get(), 0, None
        most = min(max(refill.length or MOST_LOST, 1000), MOST_LOST)
        try:
            while lost < most and sample is not END:
                index, self._read = self._index(), self._read + 1
                reading.set(outer and SampleScope(outer.seed, self._epoch, index, outer.owners, outer.is_cached))
                try:
                    sample = self._dataset[index] if refill.length else self._source.read()
                    if sample is not END and (refill.keep is None or refill.keep(sample)):
                        self._yields = True
                        return sample
                except Exception as error:
                    pass_on(error)
                    if not refill.leaves_out:
                        raise
                    if isinstance(outer, BatchScope):  # the loader counts it
                        outer.skipped += ((index, error.with_traceback(None)),)
                lost += sample is not END
        finally:
            reading.set(outer)
        if sample is END and (self._yields or not lost):
            raise StopIteration
        where = f"part {self._worker[0] if self._worker else 0}, which has read {self._read - (sample is END)}"
        raise ValueError(
            f"keep has rejected {lost} samples in a row, or they could not be read, in {where}: the batch cannot be "
            "filled. Look at what keep returns, and at loader.skipped"
        )

    def _index(self) -> Any:
        """Return the index of the next sample; of iterable data, its part and place."""
        part, count = self._worker or (0, 1)
        if not self._refill.length:
            return part, self._read
        # Places in a turn rotate: a fixed one would be the same few indices, if the parts divide the length.
        turn = self._read * count + (part + self._read) % count
        self._epoch, position = divmod(turn, self._refill.length)
        if self._opened != self._epoch:
            self._opened, self._indices = self._epoch, self._refill.indices_of(self._epoch)
            announce_epoch(self._dataset, self._epoch)
        (index,) = self._indices(np.array([position]))
        return index.item() if isinstance(index, np.integer) else index

    def state_dict(self) -> dict[str, Any]:
        """Return the position as a small dict."""
        return entries.to_state(_RefillPosition(repr(self._refill), self._read, self._source.state()))

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue at a saved position; a ValueError if it is that of another order."""
        place = entries.from_state(_RefillPosition, state, "give what state_dict() of the loader returned")
        if found := entries.differences(place, _RefillPosition(repr(self._refill), 0)):
            raise ValueError(f"the state is that of another order: {', '.join(found.values())}")
        self._begin_at(place)
