"""The order of a loader over iterable data: its parts, its epochs, its states.

Rank r of R reads the parts r, r + R, ... With ``steps_per_epoch``, parts that have ended start over, and an epoch is
that number of steps of an endless order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an
from sharded_loader.base.imports import provided
from sharded_loader.base.notices import warn
from sharded_loader.data.inspection import known_parts
from sharded_loader.data.seeding import epoch_listeners
from sharded_loader.engine.messages import Stream
from sharded_loader.engine.order import Epoch, Order, Position
from sharded_loader.streams.epoch import SharedParts, StreamEpoch, length_of_epoch
from sharded_loader.streams.state import StreamSignature, differences, parse

MOST_PARTS = 32
"""Maximum number of parts if ``streams`` is not given: all of them are open at the same time."""


NO_SKIP = (
    "skip leaves out steps of a dataset that is read by index. Iterable data must be read up to a step anyway: do "
    "without skip, and go on to the next batch in your loop"
)


class StreamOrder(Order[StreamSignature]):
    """Order of a loader over iterable data.

    Args:
        batch_size, last_batch, num_workers: of the loader.
        streams: number of parts; None: the number of the dataset's shards, or of workers.
        given: see `Order`.

    Attributes:
        is_bound: reject states with another number of parts.
        last: epoch that has begun last; None before the first, and after a state was loaded.
    """

    def __init__(
        self,
        dataset: object,
        *,
        batch_size: object,
        streams: object,
        num_workers: int,
        last_batch: str | None = None,
        **given: object,
    ) -> None:
        self._size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        if last_batch not in (None, "keep", "discard"):
            text = f'last_batch is {last_batch!r}; for iterable data it must be "keep" or "discard"'
            raise ValueError(f"{text}. With steps_per_epoch= no batch is short")
        super().__init__(last_batch, **given)
        self._given = None if streams is None else check_int("streams", streams, 1, "give the number of parts")
        self.is_bound = streams is not None
        self._requests.listen(epoch_listeners(dataset))
        self._dataset, self._workers, self._shared = dataset, num_workers, SharedParts(dataset)
        self.last: StreamEpoch | None = None
        self._warned = False
        if streams is not None:
            self.parts  # noqa: B018 - each rank must have one

    @property
    def sampler(self) -> SimpleNamespace:
        """Object with the ``set_epoch`` that other libraries look for on a sampler."""
        return SimpleNamespace(set_epoch=partial(provided("trainer", "named"), self))

    # -- parts ----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """Number of parts."""
        replicas, given = self.replicas()[0], self._given
        if given is not None and given < replicas:
            raise ValueError(f"streams is {given}, but there are {replicas} ranks, and each needs a part: give more")
        known = known_parts(self._dataset) if given is None else None
        if known is None:
            return replicas * max(1, self._workers) if given is None else given
        if known < replicas:
            raise ValueError(
                f"the dataset, {an(type(self._dataset))}, has {known} shards, but there are {replicas} ranks, and each "
                f"needs one: write it in more shards, or give streams= if its samples can be shared out in another way"
            )
        return min(known, max(MOST_PARTS, replicas))

    @property
    def stream(self) -> Stream:
        return self.signature().stream

    def settle_replicas(self) -> None:
        """Fix the number of parts and ranks, at the start of an epoch."""
        super().settle_replicas()
        self._given = self.parts
        if self.replicas()[0] > 1 and self.steps is None and not self._warned:
            self._warned = True
            warn(
                "each rank reads parts of its own, and one may have fewer batches than the others, which would "
                "then hang: give steps_per_epoch=, or stop all ranks at the same step"
            )

    def resize(self, length: int | None) -> None:
        """Forget the progress of the parts: the dataset has changed."""
        self._shared.progress.clear()

    # -- epochs ---------------------------------------------------------------------------------------------

    def epoch(self, number: int, position: Position | None = None) -> StreamEpoch:
        signature = self.signature()
        begin = position or self._beginning(number, signature.parts_of_rank())
        return StreamEpoch(self._shared, signature, begin, resumed=position is not None)

    def begun(self, epoch: Epoch) -> None:
        """Keep the parts of an epoch open while its iterator lives; the next epoch follows this one."""
        if isinstance(epoch, StreamEpoch):
            self._shared.register(epoch)
            self.last = epoch

    def _beginning(self, epoch: int, parts: range) -> Position:
        """Return the beginning of an epoch: in an endless order, the end of the one before."""
        if self.steps is None:
            return Position(epoch)
        done = epoch * self.steps
        counts: Mapping[int, int] = {part: max(0, -(-(done - i) // len(parts))) for i, part in enumerate(parts)}
        last = self.last
        if last is not None and last.number + 1 == epoch:
            counts = last.counts_at_end()
        points = {part: point for part, point in self._shared.progress.items() if point.batches <= counts.get(part, 0)}
        return Position(epoch, 0, None, counts, points)

    def no_steps(self) -> TypeError:
        """Return the error for a step that is to be looked up."""
        text = f"the dataset, {an(type(self._dataset))}, is iterable data: which samples a step has is known when it is"
        return TypeError(f"{text} read. To read a step again, load a state that was saved before it")

    def add_skip(self, skip: object) -> None:
        if skip is not None:
            raise TypeError(NO_SKIP)

    def facts(self, number: int) -> None:
        """Return None: the batches of an epoch are not known in advance."""

    def length(self, number: int) -> int:
        return length_of_epoch(self._dataset, self.signature())

    # -- state ----------------------------------------------------------------------------------------------

    def signature(self) -> StreamSignature:
        """Return the parameters that a position depends on."""
        kind, last_batch = type(self._dataset).__name__, "discard" if self.drops_last else "keep"
        return StreamSignature(self.seed, kind, self.parts, self._size, last_batch, self.steps, *self.replicas())

    def _parsed(self, state: object) -> tuple[Position, StreamSignature]:
        return parse(state, self.replicas())

    def _differences(self, saved: StreamSignature, position: Position, strict: bool) -> list[str]:
        own = self.signature()
        if not self.is_bound:
            own = replace(own, streams=saved.streams)
        return differences(saved, own, position, strict)

    def _adopt(self, saved: StreamSignature, position: Position) -> bool:
        changed = (saved.seed, saved.streams) != (self.seed, self._given)
        self.seed, self._given = saved.seed, saved.streams
        self._shared.progress.clear()
        self.last = None
        return changed
