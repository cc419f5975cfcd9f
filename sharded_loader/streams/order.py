"""The order of a loader over iterable data: its parts, its epochs, its states.

    StreamOrder.read(epoch, position) -> StreamReading            what `sampling.order` is for datasets with an index

Each rank has parts of its own: rank r of R has the parts r, r + R, ... With ``steps_per_epoch`` parts that have ended
start over, and an epoch is so many steps of an endless order.

What can go wrong: arguments that iterable data cannot have; fewer parts than ranks; a state that does not fit.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an
from sharded_loader.base.notices import warn
from sharded_loader.base.private import fetched_by_lightning
from sharded_loader.data.inspection import known_parts
from sharded_loader.engine.stream import PartPoint, Stream
from sharded_loader.randomness.rng import draw_seed
from sharded_loader.sampling.order import check_steps
from sharded_loader.sampling.replicas import resolve_replicas
from sharded_loader.streams.reading import StreamReading
from sharded_loader.streams.state import StreamPosition, StreamSignature, differences, dump, parse

MOST_PARTS = 32
"""Parts of a dataset that has more shards, where nobody has chosen. All parts are open at the same time."""

# No two readings of a process have the same number: a pool that outlives an order tells their parts apart.
_numbers = itertools.count()


class StreamOrder:
    """The order of a loader over iterable data. It has what the loader asks an `EpochOrder` for.

    Args:
        dataset: the data.
        batch_size, last_batch, num_replicas, rank, seed: of the loader.
        streams: how many parts; None: as many as the dataset has shards, or as there are workers.
        steps_per_epoch: how many batches an epoch has on each rank; None: what the parts have.
        num_workers: of the loader.

    Attributes:
        steps: ``steps_per_epoch``.
    """

    batch_sampler = None
    given_batches = rolls_over = arrays = False
    dataset_length = None

    def __init__(
        self,
        dataset: Any,
        *,
        batch_size: Any,
        last_batch: str | None,
        num_replicas: Any,
        rank: Any,
        seed: int | None,
        streams: Any,
        steps_per_epoch: int | None,
        num_workers: int,
    ) -> None:
        self._size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        if last_batch not in (None, "keep", "discard"):
            raise ValueError(
                f'last_batch is {last_batch!r}; for iterable data it must be "keep" or "discard". With '
                f"steps_per_epoch= no batch is short"
            )
        self.drops_last = last_batch == "discard"
        self.replicated = num_replicas is not None or rank is not None
        if num_replicas != "auto" or rank is not None:
            num_replicas, rank = resolve_replicas(num_replicas, rank)
        self._replicas: tuple[Any, Any] = num_replicas, rank
        if seed is None:
            seed = 0 if self.replicated else draw_seed()
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer, or None")
        self.steps = check_steps(steps_per_epoch, last_batch)
        self._given = None if streams is None else check_int("streams", streams, 1, "give the number of parts")
        self._chosen = streams is not None  # otherwise the parts of a state are as good as ours
        self._dataset, self._kind, self._workers = dataset, type(dataset).__name__, num_workers
        self._next_epoch = 0
        self._live: weakref.WeakSet[StreamReading] = weakref.WeakSet()
        self._reached: dict[int, PartPoint] = {}
        self._last: StreamReading | None = None
        self._warned = False
        self._check()

    def _check(self) -> None:
        replicas, _ = self.replicas()
        if self._given is not None and self._given < replicas:
            raise ValueError(f"streams is {self._given}, but there are {replicas} ranks, and each needs a part")

    @property
    def sampler(self) -> EpochTold:
        """What Lightning tells the epoch. It loads no state where an epoch has ended."""
        return EpochTold(self)

    # -- parts ----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """How many parts the data is cut into."""
        if self._given is not None:
            return self._given
        replicas, _ = self.replicas()
        known = known_parts(self._dataset)
        if known is None:
            return replicas * max(1, self._workers)
        if known < replicas:
            raise ValueError(
                f"the dataset, {an(self._kind)}, has {known} shards, but there are {replicas} ranks, and each needs "
                f"one: write it in more shards, or give streams= if its samples can be shared out in another way"
            )
        return min(known, max(MOST_PARTS, replicas))

    @property
    def stream(self) -> Stream:
        """How the data is cut into batches."""
        return Stream(self.parts, self._size, self.drops_last, self.steps is not None)

    def replicas(self) -> tuple[int, int]:
        """``(num_replicas, rank)``, as far as is known now."""
        return resolve_replicas(*self._replicas)

    def settle_replicas(self) -> None:
        """An epoch begins: what is not known until then is settled."""
        self._replicas = self.replicas()
        self._given = self.parts
        self._check()
        if self.replicas()[0] > 1 and self.steps is None and not self._warned:
            self._warned = True
            warn(
                "each rank reads parts of its own, and one may have fewer batches than the others, which would "
                "then hang: give steps_per_epoch=, or stop all ranks at the same step"
            )

    def resize(self, length: int | None) -> None:
        """The dataset has changed: what was known of its parts counts no more."""
        self._reached.clear()

    def undisturbed(self, but: Any) -> AbstractContextManager[None]:
        """Inside, the order may be read."""
        return nullcontext()

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch that comes next."""
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next."""
        self._next_epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)

    def read(self, epoch: int, position: StreamPosition | None = None) -> StreamReading:
        """The epoch's batches for this rank, from a position on."""
        replicas, rank = self.replicas()
        stream = self.stream
        number = 0 if stream.endless else next(_numbers)
        return StreamReading(self, stream, range(rank, stream.parts, replicas), epoch, position, number)

    def begun(self, reading: StreamReading) -> None:
        """An epoch begins: its parts stay open as long as somebody goes on with it, and the next one is behind it."""
        self._live.add(reading)
        self._last = reading

    def oldest(self) -> int:
        """The number of the oldest reading that has begun and that somebody goes on with."""
        return min((one.number for one in self._live), default=0)

    def reached(self, part: int, point: PartPoint) -> None:
        """A part has been read up to this point."""
        if self.steps is not None:
            self._reached[part] = point

    def beginning(self, epoch: int, parts: range) -> StreamPosition:
        """Where an epoch begins. An epoch of an endless order begins where the one before it ends."""
        if self.steps is None:
            return StreamPosition(epoch)
        done = epoch * self.steps
        counts: Mapping[int, int] = {part: max(0, -(-(done - i) // len(parts))) for i, part in enumerate(parts)}
        last = self._last
        if last is not None and last.epoch + 1 == epoch:
            counts = last.counts_behind()
        points = {part: point for part, point in self._reached.items() if point.batches <= counts.get(part, 0)}
        return StreamPosition(epoch, 0, counts, points)

    def facts(self, epoch: int) -> None:
        """Nothing: whether two epochs have the same batches is not known."""

    def length(self, epoch: int) -> int:
        """How many batches an epoch has for this rank: ``steps_per_epoch``, or an estimate by the dataset's length."""
        if self.steps is not None:
            return self.steps
        try:
            length = len(self._dataset)
        except (TypeError, NotImplementedError):
            raise TypeError(
                f"the loader has no length: the number of batches of {an(self._kind)} is only known at its end. Give "
                f"steps_per_epoch=, or the dataset a __len__"
            ) from None
        share = -(-length // self.replicas()[0])
        return share // self._size if self.drops_last else -(-share // self._size)

    # -- state ----------------------------------------------------------------------------------------------

    def signature(self) -> StreamSignature:
        """What a position in this order is a position in."""
        replicas, rank = self.replicas()
        last_batch = "discard" if self.drops_last else "keep"
        return StreamSignature(self.seed, self._kind, self.parts, self._size, last_batch, self.steps, replicas, rank)

    def differences(self, saved: StreamSignature, position: StreamPosition, strict: bool) -> list[str]:
        """Why a state does not fit."""
        own = self.signature()
        if not self._chosen:
            own = replace(own, streams=saved.streams)
        return differences(saved, own, position, strict)

    def adopt(self, saved: StreamSignature) -> bool:
        """Take over seed and parts of a state that fits, and say whether the workers have to be told."""
        changed = (saved.seed, saved.streams) != (self.seed, self._given)
        self.seed, self._given = saved.seed, saved.streams
        self._reached.clear()
        self._last = None
        return changed

    dump = staticmethod(dump)

    def parse(self, state: Any) -> tuple[StreamPosition, StreamSignature]:
        """A state, or a list of the states of all ranks, as position and signature."""
        return parse(state, self.replicas())


class EpochTold:
    """Stands where other libraries look for a sampler's ``set_epoch``.

    Args:
        order: whose next epoch it is.
    """

    def __init__(self, order: StreamOrder) -> None:
        self._order = order

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next. Lightning says so after the first batch, without a length."""
        ahead, _ = fetched_by_lightning("on_advance_start")
        begun = self._order._last
        if not ahead or begun is None:
            self._order.set_epoch(epoch)
        elif begun.epoch != epoch:
            warn(
                f"Lightning goes on with epoch {epoch}, but it has read the first batch of epoch {begun.epoch}: "
                f"it loads no position at the end of an epoch. Give the loader steps_per_epoch=, or the "
                f"dataset a __len__"
            )
