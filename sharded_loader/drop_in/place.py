"""Where a loader is: what ``state_dict`` of the drop-in returns. It looks like a state of torchdata's loader.

    Place(reading, run, order, ...).state_dict()      a dict; the reading and the run say how far the epoch is
    at_told_epoch(state, loader)                      the state, or the beginning of the epoch that set_epoch has named
    next_epoch(position)                              the beginning of the epoch after a position
    stream_of(loader, seed, state, ...)               iterable data from a state on

A place outlives its iterator: the loader keeps it after a ``break``, when the workers have gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sharded_loader.base.private import fetched_by_lightning
from sharded_loader.drop_in.sampler import ShuffleSampler
from sharded_loader.drop_in.start import generator_state, next_draws, tellable
from sharded_loader.engine.order import Position
from sharded_loader.engine.pipeline import Run
from sharded_loader.engine.stream import PartPoint
from sharded_loader.sampling.base import nested
from sharded_loader.streams.order import StreamOrder
from sharded_loader.streams.state import differences


class Place:
    """Where an epoch is. The loader keeps it when the iterator has gone, after a ``break``.

    Args:
        reading, run: of the epoch.
        order: of iterable data; None: the reading is of a sampler.
        loader: the loader.
        base_seed: what the workers' generators were seeded with.
        yielded: how many batches of the epoch were received before.
        before: of parts of iterable data, how the workers that live on have left them.
    """

    def __init__(
        self,
        reading: Any,
        run: Run,
        order: StreamOrder | None,
        loader: Any,
        base_seed: int,
        yielded: int,
        before: Mapping[int, PartPoint],
    ) -> None:
        self._before = before
        self.reading, self.run, self.order, self._num_workers = reading, run, order, loader.num_workers
        self.base_seed, self._generator = base_seed, loader.generator
        self.yielded, self.finished = yielded, False
        self._lives_on = loader.persistent_workers and loader.num_workers > 0
        self._epoch_of_dataset = None if order is None else getattr(loader.dataset, "epoch", None)

    def state_dict(self) -> dict[str, Any]:
        """The position, with the states of the workers' datasets. It looks like a state of torchdata's loader."""
        ahead, is_over = fetched_by_lightning()
        delivered = max(self.reading.first, self.run.delivered - ahead)
        finished = self.finished or is_over
        state: dict[str, Any] = {"_num_yielded": max(0, self.yielded - ahead), "_iterator_finished": finished}
        state["_base_seed"] = self.base_seed
        if isinstance(self._epoch_of_dataset, int):
            state["_epoch_of_dataset"] = self._epoch_of_dataset
        if self._generator is not None:
            state["_generator"] = generator_state(self._generator)
        elif finished:
            # A new iterator draws the loader's seed, and then the sampler one of its own.
            state["_next"] = [self.base_seed, *next_draws(1)] if self._lives_on else next_draws(2)
        if self.order is None:
            state["_sampler"] = found = self.reading.state(self.reading.position(delivered), finished)
            datasets = found.get("datasets", [None] * max(1, self._num_workers))
            snapshots = [{"dataset_state": one, "fetcher_state": None} for one in datasets]
        else:
            position = self.reading.position(delivered)
            if is_over:  # Lightning goes on with the next epoch, and that begins with new datasets
                position = replace(position, points={})
            if not position.counts:
                position = self.reading.at_beginning()
            missing = {part: point for part, point in self._before.items() if not position.counts[part]}
            position = replace(position, points={**position.points, **missing})
            state["_stream"] = self.reading.state(position)
            snapshots = [_snapshot(position, part) for part in position.counts]
        state["_epoch"] = self.reading.number
        if self._num_workers == 0:
            return {**state, **snapshots[0]}
        workers = {f"worker_{i}": {"worker_id": i, **one} for i, one in enumerate(snapshots)}
        return {**state, "_snapshot": {"_worker_snapshots": workers}}

    def after(self) -> dict[int, PartPoint]:
        """How the parts, or the workers' datasets, are when the next epoch begins.

        Empty if it is not known: of iterable data the end was not seen.
        """
        if self.order is None:
            points: dict[int, PartPoint] = self.reading.points_after(self.run.delivered)
            return points
        if not self.finished:
            return {}
        return dict(next_epoch(self.reading.position(self.run.delivered)).points)


def at_told_epoch(state: dict[str, Any], loader: Any) -> dict[str, Any]:
    """The state, unless its epoch has no batch left and ``set_epoch`` has named another one: then that one begins.

    A loop that begins with epoch ``step // len(loader)`` loads a checkpoint of the last step so.
    """
    found, sampler, count = state["_sampler"], loader._index_sampler, loader._epochs
    try:
        is_over = found["yielded"] >= len(sampler)
    except (TypeError, NotImplementedError):  # a sampler without a length
        return state
    if state["_iterator_finished"] or not is_over:
        return state
    pairs = [(count.next, state.get("_epoch", count.next))]
    pairs += zip((one.epoch for one in tellable(sampler)), found.get("epochs", ()), strict=False)
    pairs += [one.told_beside(found["shuffle"]) for one in nested(sampler) if isinstance(one, ShuffleSampler)]
    named = next((now for now, before in pairs if now != before), None)
    if named is None:
        return state
    count.next = named
    return {**state, "_iterator_finished": True}


def next_epoch(position: Position) -> Position:
    """The beginning of an epoch that goes on with the datasets as they are at a position."""
    points = {}
    for part, point in position.points.items():
        state = None if point.state is None else (*point.state[:2], "next")
        points[part] = point._replace(batches=0, samples=0, checksum=0, ended=False, state=state)
    return Position(0, 0, None, dict.fromkeys(position.counts, 0), points)


def stream_of(
    loader: Any, seed: int, state: Any, finished: bool, points: dict[int, PartPoint]
) -> tuple[StreamOrder, Any]:
    """The order and the reading of an epoch of iterable data.

    Args:
        loader: the loader.
        seed: of the epoch.
        state: where it goes on; None: at its beginning, with parts at ``points``.
        finished: the state was taken at the end of its epoch.
        points: of parts that no worker has.
    """
    order = StreamOrder(
        loader.dataset,
        batch_size=loader.batch_size or 1,
        last_batch="discard" if loader.drop_last else None,
        num_replicas=None,
        rank=None,
        seed=seed,
        steps_per_epoch=None,
        streams=loader.streams or max(1, loader.num_workers),
        num_workers=loader.num_workers,
    )
    if state is None:
        return order, order.epoch(0, Position(0, 0, None, {}, points) if points else None)
    position, signature = order.parse(state)
    own = replace(order.signature(), streams=signature.streams)
    found = differences(signature, own, position if any(position.counts.values()) else Position(0), strict=False)
    if found:
        raise ValueError(
            f"the state cannot be resumed, it was saved by another loader: {', '.join(found)}. Make the loader as it "
            f"was then"
        )
    order._adopt(signature)
    return order, order.epoch(0, next_epoch(position) if finished else replace(position, epoch=0))


def _snapshot(position: Position, part: int) -> dict[str, Any]:
    """The state of one part as torchdata's loader shows it."""
    point = position.points.get(part)
    of_dataset, of_items, *_ = (point.state if point is not None else None) or (None, None)
    ended = point is not None and point.ended
    return {
        "dataset_state": of_dataset,
        "fetcher_state": {"dataset_iter_state": of_items, "fetcher_ended": ended},
    }
