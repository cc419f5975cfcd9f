"""The order of a loader over iterable data: its parts, its epochs, its states.

    StreamOrder.epoch(number, position) -> StreamEpoch            what `sampling.order` is for datasets with an index

Each rank has parts of its own: rank r of R has the parts r, r + R, ... With ``steps_per_epoch`` parts that have ended
start over, and an epoch is that number of steps of an endless order.

What can go wrong: arguments that iterable data cannot have; fewer parts than ranks; a state that does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an
from sharded_loader.base.imports import provided
from sharded_loader.base.notices import warn
from sharded_loader.data.inspection import known_parts
from sharded_loader.data.seeding import told_in
from sharded_loader.engine.messages import Stream
from sharded_loader.engine.order import Epoch, Order, Position
from sharded_loader.streams.epoch import SharedParts, StreamEpoch, length_of_epoch
from sharded_loader.streams.state import StreamSignature, differences, parse

MOST_PARTS = 32
"""Parts of a dataset that has more shards, if ``streams`` is not given. All parts are open at the same time."""


NO_SKIP = (
    "skip leaves out steps of a dataset that is read by index. Iterable data must be read up to a step anyway: do "
    "without skip, and go on to the next batch in your loop"
)


class StreamOrder(Order[StreamSignature]):
    """The order of a loader over iterable data.

    Args:
        dataset: the data.
        batch_size, last_batch, num_workers: of the loader.
        streams: how many parts; None: as many as the dataset has shards, or as there are workers.
        given: see `Order`. With ``steps_per_epoch`` each rank has that number of batches in an epoch; otherwise those
            of its parts.

    Attributes:
        is_bound: states of another number of parts are rejected.
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
            raise ValueError(
                f'last_batch is {last_batch!r}; for iterable data it must be "keep" or "discard". With '
                f"steps_per_epoch= no batch is short"
            )
        super().__init__(last_batch, **given)
        self._given = None if streams is None else check_int("streams", streams, 1, "give the number of parts")
        self.is_bound = streams is not None
        self._requests.listen(told_in(dataset))
        self._dataset, self._workers, self._shared = dataset, num_workers, SharedParts(dataset)
        self._last: StreamEpoch | None = None
        self._warned = False
        if streams is not None:
            self.parts  # noqa: B018 - each rank must have one

    @property
    def sampler(self) -> SimpleNamespace:
        """Stands where other libraries look for a sampler's ``set_epoch``."""
        return SimpleNamespace(set_epoch=self._note_epoch)

    def _note_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. Lightning says so after the first batch, without a length."""
        ahead, _ = provided("trainer", "fetched")("on_advance_start")
        begun = self._last
        if not ahead or begun is None:
            self.set_epoch(epoch)
        elif begun.number != epoch:
            warn(
                f"Lightning goes on with epoch {epoch}, but it has read the first batch of epoch {begun.number}: "
                f"it loads no position at the end of an epoch. Give the loader steps_per_epoch="
            )

    # -- parts ----------------------------------------------------------------------------------------------

    @property
    def parts(self) -> int:
        """How many parts the data is cut into."""
        replicas, given = self.replicas()[0], self._given
        if given is not None and given < replicas:
            raise ValueError(f"streams is {given}, but there are {replicas} ranks, and each needs a part")
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
        """How the data is cut into batches."""
        return self.signature().stream

    def settle_replicas(self) -> None:
        """An epoch begins: what is not known until then is settled."""
        super().settle_replicas()
        self._given = self.parts
        if self.replicas()[0] > 1 and self.steps is None and not self._warned:
            self._warned = True
            warn(
                "each rank reads parts of its own, and one may have fewer batches than the others, which would "
                "then hang: give steps_per_epoch=, or stop all ranks at the same step"
            )

    def resize(self, length: int | None) -> None:
        """The dataset has changed: what was known of its parts counts no more."""
        self._shared.reached.clear()

    # -- epochs ---------------------------------------------------------------------------------------------

    def epoch(self, number: int, position: Position | None = None) -> StreamEpoch:
        """An epoch's batches for this rank, from a position on."""
        signature = self.signature()
        begin = position or self._beginning(number, signature.parts_of_rank())
        return StreamEpoch(self._shared, signature, begin, resumed=position is not None)

    def begun(self, epoch: Epoch) -> None:
        """An epoch begins: its parts stay open while an iterator goes on with it, and the next one is behind it."""
        if isinstance(epoch, StreamEpoch):
            self._shared.begin(epoch)
            self._last = epoch

    def _beginning(self, epoch: int, parts: range) -> Position:
        """Where an epoch begins. An epoch of an endless order begins where the one before it ends."""
        if self.steps is None:
            return Position(epoch)
        done = epoch * self.steps
        counts: Mapping[int, int] = {part: max(0, -(-(done - i) // len(parts))) for i, part in enumerate(parts)}
        last = self._last
        if last is not None and last.number + 1 == epoch:
            counts = last.counts_behind()
        points = {part: point for part, point in self._shared.reached.items() if point.batches <= counts.get(part, 0)}
        return Position(epoch, 0, None, counts, points)

    def text_of_step(self, epoch: object, step: object) -> str:
        """The message for a step of iterable data: it cannot be looked up, but its part is known."""
        epoch = check_int("epoch", epoch, 0, "epochs count from 0")
        step = check_int("step", step, 0, "steps count from 0")
        parts = self.signature().parts_of_rank()
        turn, place = divmod(step + epoch * (self.steps or 0), len(parts))
        return (
            f"the dataset, {an(type(self._dataset))}, is iterable data: which samples a step has is known when it is "
            f"read. Unless a part has ended before, step {step} of epoch {epoch} is batch {turn} of part "
            f"{parts[place]} of {self.parts}: to read it again, load a state that was saved before it"
        )

    def add_skip(self, skip: object) -> None:
        if skip is not None:
            raise TypeError(NO_SKIP)

    def facts(self, number: int) -> None:
        """Nothing: whether two epochs have the same batches is not known."""

    def length(self, number: int) -> int:
        """The number of batches in an epoch for this rank; see `length_of_epoch`."""
        return length_of_epoch(self._dataset, self.signature())

    # -- state ----------------------------------------------------------------------------------------------

    def signature(self) -> StreamSignature:
        """What a position in this order is a position in."""
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
        self._shared.reached.clear()
        self._last = None
        return changed
