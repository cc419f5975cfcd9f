"""Leases: batches that are finished in any order, each once per epoch, whatever is killed in between.

    loader.lease()      -> Lease                  the next batch of the order, or one that comes again; None: epoch over
    lease.done(), lease.refuse(), lease.again()   finished; finished without use; back in
    loader.state_dict()["leases"]                 this rank's next batch and its open ones, of each epoch
    load_state_dict([state of each rank, ...])    the open batches of all ranks, shared out among the ranks of today

The global order is cut into batches, numbered from 0 in each epoch, and rank r of R ranks takes the batches r, r + R,
r + 2 R and so on. So the samples of a batch depend on no rank, a group of samples stays whole, and its number is enough
to read a batch again, with the same random numbers. Ranks take batches at their own pace, and nothing is padded.

`Ledger` owns what is open on this rank, and what waits to come again. `LeaseEpoch` is an epoch of this rank's new
batches, which the workers read ahead as usual. Batches that come again are read in the main process.

What can go wrong: a batch raises an error, which ``lease()`` raises; the batch stays open, and comes again after a
state is loaded. A batch whose samples were all left out by ``on_error`` counts as finished.

A state has the differences between the numbers of open batches: 2,000 of 10^9 take 1 to 2 KB. A bitmap would grow with
the distance to the oldest.
"""

from __future__ import annotations

import base64
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Generic

import numpy as np

from sharded_loader import LoaderClosedError
from sharded_loader.extend import NOTHING, Entry, Pipeline, Position, Run, Table, Task
from sharded_loader.extend import engine as core
from sharded_loader.extend import order as orders
from sharded_loader.extend.engine import Batch
from sharded_loader.extend.tools import add_note, brief
from sharded_loader.extend.tools import entries as saved

_ADVICE = "give what state_dict() of a loader with leases has returned, or a list of the states of all ranks"


# -- states ------------------------------------------------------------------------------------------------------------


def pack(numbers: Iterable[int]) -> str:
    """Return numbers as a short text: their differences, byte by byte, compressed.

    Example:
        >>> sorted(unpack("", pack({10**9, 3, 10**9 + 1}), ""))
        [3, 1000000000, 1000000001]
    """
    steps = np.diff(np.array(sorted(numbers), "<i8"), prepend=0)
    return base64.b85encode(zlib.compress(steps.view(np.uint8).reshape(-1, 8).T.tobytes(), 9)).decode()


def unpack(what: str, text: Any, advice: str) -> set[int]:
    try:
        planes = np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint8).reshape(8, -1)
    except (ValueError, TypeError, zlib.error) as error:
        raise ValueError(f"{what} is {brief(text)}, which is damaged ({error}): {advice}") from None
    return set(np.cumsum(np.ascontiguousarray(planes.T).view("<i8")).tolist())


@dataclass(eq=False)
class Share:
    """This rank's batches of one epoch.

    Attributes:
        next: this rank takes batch ``next`` + rank next.
        open: numbers of the batches before that one that are not finished.
        has_begun: batches were handed out, or another epoch was current when the state was saved.
        source: what its new batches were read from.
    """

    epoch: int = saved.entry(saved.integer(0))
    next: int = saved.entry(saved.integer(0))
    open: set[int] = saved.entry(unpack, write=pack)  # noqa: RUF009 - it makes a field
    has_begun: bool = False
    source: orders.SamplerSource | None = None


@dataclass
class RankState:
    """The entry ``leases`` of a rank's state. The last share is that of its current, or next, epoch."""

    ranks: int = saved.entry(saved.integer(1))
    rank: int = saved.entry(saved.integer(0))
    shares: tuple[Share, ...] = saved.entry(
        saved.list_of(saved.dict_of(Share)), write=lambda shares: [*map(saved.to_state, shares)]
    )


def has_leases(state: object) -> bool:
    return isinstance(state, Mapping) and "leases" in state


def load(order: orders.MapOrder, states: list[Any]) -> tuple[list[Share], Any]:
    """Return this rank's shares from the states of all ranks, or its own, and the state of the newest epoch."""
    found = [saved.read_entry(one, "leases", saved.dict_of(RankState), _ADVICE) for one in states if has_leases(one)]
    if len(found) < len(states) or not all(one.shares for one in found):
        raise ValueError(f"load_state_dict: the state of a rank has no leases: {_ADVICE}")
    own, *was = (
        replace(signature, num_replicas=None, step_ranks=None, sampler_length=None)  # they may change
        for signature in (order.signature(order.next_epoch), *(orders.parse(one)[1] for one in states))
    )
    phrases = [*orders.differences(was[0], own), *orders.other_arguments(was[0], own)]
    if phrases or any(other != was[0] for other in was):
        text = f"load_state_dict: leases of other batches: {', '.join(phrases) or 'the states are of different runs'}"
        raise ValueError(f"{text}. The number of ranks may change, but nothing else")
    (ranks, rank), here = (found[0].ranks, found[0].rank), order.replicas()
    given = sorted(one.rank for one in found)
    if (len(found) > 1 or (ranks, rank) != here) and given != [*range(ranks)]:
        text = f"load_state_dict: there were {ranks} ranks, and here are the states of ranks {given}"
        raise ValueError(f"{text}: each rank saves its own leases, so load a list of the states of all {ranks}")
    shares = [*found[0].shares] if given == [rank] != [*range(ranks)] else [*merged(order, found, *here)]
    for share in shares[:-1]:
        share.has_begun = True
    return shares, max(states, key=lambda one: int(one["epoch"]))


def merged(order: orders.MapOrder, found: list[RankState], replicas: int, rank: int) -> Iterator[Share]:
    """Iterate over the shares of a rank of today: every open batch of the ranks before is in one of them."""
    ranks, currents = len(found), [one.shares[-1].epoch for one in found]
    newest = max(currents)
    # Between the epochs of the slowest and the fastest rank, the fastest may have nothing open.
    for epoch in sorted({*range(min(currents), newest), *(share.epoch for one in found for share in one.shares)}):
        shares = {one.rank: share for one in found for share in one.shares if share.epoch == epoch}
        nexts, total = [share.next for share in shares.values()] or [0], total_of(order.source(epoch), epoch)
        if any((next - nexts[0]) % ranks for next in nexts):
            raise ValueError(f"load_state_dict: the states of the ranks do not belong together: {_ADVICE}")
        end = nexts[0] + orders.parts(max(total - nexts[0], 0), ranks, cut=False) * ranks
        begin = end if epoch < newest else max(nexts)
        # A rank without this epoch has left it, or not begun it.
        begins = {one.rank: end if one.shares[-1].epoch > epoch else 0 for one in found}
        begins |= {number: share.next for number, share in shares.items()}
        behind = chain(*(range(next + one, min(begin + one, total), ranks) for one, next in begins.items()))
        undone = sorted(number for number in chain(behind, *(one.open for one in shares.values())) if number < total)
        yield Share(epoch, begin, set(undone[rank::replicas]))


# -- what is open ------------------------------------------------------------------------------------------------------


def total_of(source: orders.SamplerSource, epoch: int) -> int:
    """Return the number of batches of an epoch, of all ranks together."""
    own, items = source.signature, orders.for_ranks(source.items, 1)
    return orders.parts(orders.len_epoch(items, epoch), own.batch_size or 1, own.drops_last)


class LeaseEpoch(orders.MapEpoch):
    """The new batches of a share; with ``only``, just this batch. Only a `LeaseIterator` may begin it."""

    def __init__(self, ledger: Ledger, share: Share, source: orders.SamplerSource, only: int | None = None) -> None:
        super().__init__(source, share.epoch, None)
        begin, total = (share.next + source.rank, total_of(source, self.number)) if only is None else (only, only + 1)
        self.ledger, self.share, self._numbers = ledger, share, range(begin, total, source.replicas)
        self.resumed, self._size = True, source.signature.batch_size or 1
        self._table: Table | None = None

    def batch(self, seq: int) -> tuple[Any, int] | None:
        ready = self._batches.ready
        if seq not in ready:
            table = self._table = self._table or self._opened()
            numbers = self._numbers[seq : seq + table.block]
            found = table.at(np.array(numbers)) if numbers else ()
            ready.clear()
            ready.update(enumerate(zip(found, (number * self._size for number in numbers), strict=True), seq))
        return ready.get(seq)

    def _opened(self) -> Table:
        own, arrays = self.source.signature, self.source.arrays
        # As for one rank: ranks take batches at their own pace, so nothing has to be equal in a step.
        table = orders.table_of(orders.for_ranks(self.source.items, 1), self.number, own.seed)
        is_cut = own.batch_size is None
        return table if is_cut else orders.BatchedTable(table, self._size, own.drops_last, arrays=True, convert=arrays)

    def again(self) -> LeaseEpoch:
        epoch = LeaseEpoch(self.ledger, self.share, self.source)
        epoch._numbers = self._numbers
        return epoch

    def opened_by(self, iterator: object) -> None:
        if not isinstance(iterator, LeaseIterator):
            text = "this loader gives out its batches by lease(), and an iterator would give them a second time"
            raise RuntimeError(f"{text}: make another loader for the loop, or load a state without leases")
        self.ledger.begin(self.share)

    def hand_out(self, seq: int, has_batch: bool) -> None:
        with self.ledger.lock:
            self.share.next = max(self.share.next, self._numbers[seq] - self.source.rank + self.source.replicas)
            self.share.open.add(self._numbers[seq])
            if not has_batch:
                self.ledger.finish(self.share, self._numbers[seq])

    def lease(self, batch: Any, task: Task, dataset: Any) -> Lease[Any]:
        indices = [one for shard in task.shards for one in core.shown_indices(dataset, shard, self.number)]
        name = f"{self.number}-{task.position}"
        return Lease(batch, indices, name, self.ledger, self.share, task.position // self._size)

    def length(self) -> int:
        return len(self._numbers)

    def reached(self, delivered: int) -> tuple[int, int]:
        text = "the order of a loader with leases cannot change: load the states of all ranks, as a list"
        raise TypeError(f"{text}, into loaders with the new ranks")

    def position(self, delivered: int) -> Position:
        return Position(self.number, min(self.share.next * self._size, self.source.signature.sampler_length or 0))

    def state(self, position: Position) -> dict[str, Any]:
        return {**super().state(position), "leases": self.ledger.state(self.share, self.source)}


class Ledger:
    """What is open on this rank. It knows no loader and no iterator, so it keeps none of them alive.

    Attributes:
        shares: by epoch, the current one and those with open batches.
        first, last: batches that come again, before and after what is new.
        lock, turn: held for a change, and by a thread in `Leasing.lease`.
        reason: why leases can no longer be finished; empty: they can.
    """

    def __init__(self, pipeline: Pipeline | None = None, shares: Iterable[Share] = ()) -> None:
        self.shares = {share.epoch: share for share in shares}
        self.first = deque((share, number) for share in self.shares.values() for number in sorted(share.open))
        self.last = deque[tuple[Share, int]]()
        self.lock, self.turn, self.reason = threading.RLock(), threading.RLock(), ""
        self.current: Share | None = None
        self._pipeline: Any = weakref.ref(pipeline) if pipeline is not None else None

    def __reduce__(self) -> Any:
        return Ledger, ()  # other machines only ask for the order

    def epoch(self, source: orders.SamplerSource, number: int, position: Position | None) -> LeaseEpoch:
        """Return an epoch of this rank's batches: `MapOrder.make_epoch`."""
        if source.skips:
            raise ValueError("lease() and skip= contradict each other: refuse() the leases that you do not want")
        share, size = self.shares.get(number), source.signature.batch_size or 1
        if share is None:
            done = 0 if position is None else position.done
            if done % size and done != source.signature.sampler_length:
                text = f"lease() gives batches of {size} samples, and {done} samples of epoch {number} are done"
                raise ValueError(f"{text}: give the batch size with which the state was saved")
            share = Share(number, orders.parts(done, size, cut=False), set())
        share.source = share.source or source
        return LeaseEpoch(self, share, source)

    def begin(self, share: Share) -> None:
        with self.lock:
            if share.has_begun and share is not self.current:
                text = f"epoch {share.epoch} cannot begin again while {len(share.open)} of its leases are open"
                raise ValueError(f"{text}: finish them, or call set_epoch with another epoch")
            share.has_begun, self.current, self.shares[share.epoch] = True, share, share

    def end(self) -> None:
        with self.lock:
            share, self.current = self.current, None
            assert share is not None  # it has begun
            self.finish(share)

    def finish(self, share: Share, number: int = -1) -> None:
        share.open.discard(number)
        if share.has_begun and share is not self.current and not share.open:
            self.shares.pop(share.epoch, None)

    def close(self, lease: Lease[Any], how: str) -> None:
        pipeline = self._pipeline()
        if pipeline is None or pipeline.closed:
            text = f"{how}() of lease {lease.name}: the loader is closed"
            raise LoaderClosedError(f"{text}, and its last state says if the lease is open")
        with self.lock:
            if self.reason or lease.ended:
                text = self.reason or f"it was finished before, by {lease.ended}()"
                raise RuntimeError(f"{how}() of lease {lease.name}: {text}")
            lease.ended = how
            if how != "again":
                self.finish(lease._share, lease._number)
            elif lease._share is self.current:
                self.last.append((lease._share, lease._number))
            else:
                self.first.append((lease._share, lease._number))

    def state(self, current: Share, source: orders.SamplerSource) -> dict[str, Any]:
        with self.lock:
            shares = (*(share for share in self.shares.values() if share.open and share is not current), current)
            return saved.to_state(RankState(source.replicas, source.rank, shares))


# -- handing out -------------------------------------------------------------------------------------------------------


class Lease(Generic[Batch]):
    """A batch that was handed out by `ShardedDataLoader.lease`, to be finished in any order, in any thread.

    Attributes:
        batch: the batch, as ``next(iter(loader))`` would return it.
        indices: indices of its samples, in all shards together; for a mixture, pairs (source, index).
        epoch: its epoch.
        name: epoch, and position of its first sample in the global order (with a batch sampler, of the batch):
            ``"0-24"``. The same in every run with this seed, on any number of ranks.
        ended: ``"done"``, ``"again"`` or ``"refuse"`` once it was called, else an empty string.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> loader = ShardedDataLoader(range(4), batch_size=2)
        >>> one, two = loader.lease(), loader.lease()
        >>> two.done(), one.again(), loader.lease().name
        (None, None, '0-0')
        >>> two.done()
        Traceback (most recent call last):
        ...
        RuntimeError: done() of lease 0-2: it was finished before, by done()
    """

    def __init__(self, batch: Batch, indices: list[Any], name: str, ledger: Ledger, share: Share, number: int) -> None:
        self.batch, self.indices, self.epoch, self.name, self.ended = batch, indices, share.epoch, name, ""
        self._ledger, self._share, self._number = ledger, share, number

    def __repr__(self) -> str:
        return f"Lease({self.name}{self.ended and f', {self.ended}'}: {brief(self.indices)})"

    def done(self) -> None:
        """Finish the lease: its samples do not come again in this epoch, whatever is killed after the next state.

        Raises:
            RuntimeError: The lease was finished before, or is older than the state that the loader has loaded.
            LoaderClosedError: The loader is closed.
        """
        self._ledger.close(self, "done")

    def refuse(self) -> None:
        """Finish the lease without use, as `done`: the next one of the order takes its place."""
        self._ledger.close(self, "refuse")

    def again(self) -> None:
        """Put the samples back: another lease with this name comes when the epoch has nothing new.

        In the next epoch, it comes first. Raises what `done` raises.
        """
        self._ledger.close(self, "again")


class LeaseIterator(core.EpochIterator[Batch]):
    """Iterator over a `LeaseEpoch`. It records what it hands out; ``task`` is the last batch's."""

    task: Task | None = None

    def _choose_run(self) -> Run:
        while not isinstance((run := super()._choose_run()).epoch, LeaseEpoch):  # read ahead before the first lease
            self._pipeline.drop(run.number)
        return run

    def _deliver(self, run: Run, entry: Entry) -> bool:
        has_batch, self.task, epoch = super()._deliver(run, entry), entry.task, run.epoch
        assert isinstance(epoch, LeaseEpoch)  # it was chosen
        epoch.hand_out(entry.seq, has_batch)
        return has_batch

    def lease(self, dataset: Any) -> Lease[Batch] | None:
        """Return the next batch as a lease; None at the end of the epoch."""
        batch = None if self.run is not None and self.run.ended else next(self, None)
        run: Any = self.run
        return None if run.ended else run.epoch.lease(batch, self.task, dataset)


class Leasing(Generic[Batch]):
    """Methods of a loader that hand out leases."""

    _epochs: core.Epochs
    _meter: Any
    _known_steps: core.LookUp
    _leases: Ledger | None = None
    _lease_iterator: LeaseIterator[Batch] | None = None

    def lease(self) -> Lease[Batch] | None:
        """Return the next batch as a `Lease`, which is finished in any order; from any thread.

        First come leases that were put back in an earlier epoch, or were open when the loaded state was saved. Then
        come the new ones of the epoch, prefetched, and at last those that were put back in it. Each batch of an epoch
        is finished once, by `Lease.done` or `Lease.refuse`, on one of the ranks, whatever is killed: a lease that was
        open when a state was saved comes again after `load_state_dict`. Each rank saves its own state, and a list of
        the states of all ranks loads on any number of ranks.

        Returns:
            None once at the end of each epoch, when nothing waits to come again. The next call begins the next epoch,
            also while leases are open. Ranks get as many leases as they ask for, are not in step, and nothing is
            padded.

        Raises:
            TypeError: Iterable data, or a sampler of another library: their batches cannot be looked up again.
            ValueError: ``evaluate``, ``costs``, ``steps_per_epoch``, ``skip`` or ``last_batch="rollover"``, which need
                steps.
            RuntimeError: An iterator over the loader is in the middle of an epoch.
            Exception: Any error of the samples. That batch stays open, and comes again when a state is loaded.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(6), batch_size=2)
            >>> while (lease := loader.lease()) is not None:
            ...     print(lease.name, lease.batch)
            ...     lease.done()
            0-0 tensor([0, 1])
            0-2 tensor([2, 3])
            0-4 tensor([4, 5])
        """
        epochs, pipeline = self._epochs, self._epochs.pipeline
        pipeline.check_open()
        with pipeline.lock:
            if self._leases is None:
                order, self._leases = self._checked_order(alone=True), Ledger(pipeline)
                order.make_epoch = self._leases.epoch
            ledger = self._leases
        with ledger.turn:
            if self._lease_iterator is None:
                self._checked_order(alone=True)
                self._lease_iterator = LeaseIterator(epochs, self._meter)
            # While threads read a dataset that can be in one epoch only, batches of another one have to wait.
            is_shared = pipeline.pool.shares_dataset and pipeline.pool.num_workers and epochs.set_epoch_of_data()
            found = None if is_shared and epochs.reading() else self._again(ledger, ledger.first)
            found = found or self._lease_iterator.lease(self._known_steps.dataset)
            found = found or self._again(ledger, ledger.first) or self._again(ledger, ledger.last)
            if found is None:
                self._lease_iterator = None
                ledger.end()
            return found

    def _again(self, ledger: Ledger, queue: deque[tuple[Share, int]]) -> Lease[Batch] | None:
        """Return the first lease that comes again, read here."""
        while queue:
            share, number = queue[0]
            epoch = LeaseEpoch(ledger, share, share.source or self._checked_order().source(share.epoch), only=number)
            task: Any = epoch.task(0)
            try:
                batch = self._known_steps.batch_of(epoch, 0)
            except Exception as error:
                queue.popleft()
                add_note(error, f"sharded_loader: raised for lease {epoch.number}-{task.position}, which stays open")
                raise
            queue.popleft()
            if batch is not NOTHING:
                return epoch.lease(batch, task, self._known_steps.dataset)
            with ledger.lock:
                ledger.finish(share, number)
        return None

    def _checked_order(self, alone: bool = False) -> orders.MapOrder:
        """Return the order, if it can give leases; with ``alone``, if no iterator over the loader is in progress."""
        order = self._epochs.order
        if isinstance(order, core.StreamOrder):
            text = "lease() needs a dataset that is read by index: iterable data cannot give a sample a second time"
            raise TypeError(f"{text}. Give it __getitem__ and __len__, or write it to shards and read a ShardDataset")
        wrong = {"costs": order.sampling.costs is not None, "evaluate": order.sampling.evaluate, "skip": order.skip}
        wrong |= {
            "global_batch": order.order_ranks() != order.replicas(),
            "steps_per_epoch": order.steps is not None,
            "last_batch='rollover'": order.rolls_over,
        }
        if found := [name for name, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(f"lease() gives batches without steps, so {found[0]} has no meaning: leave it out")
        other = orders.find_third_party(order.sampling.items, 0)[0]
        if other is not None or order.signature(order.next_epoch).sampler_length is None:
            text = f"lease() looks batches up by their position, which {type(order.sampling.given).__name__} cannot do"
            raise TypeError(f"{text}: give shuffle=True, or a sampler of this library with a length")
        if alone and self._epochs.reading():
            text = "lease() gives out the batches of this loader, and an iterator is in the middle of an epoch"
            raise RuntimeError(f"{text}: finish its loop before, or make another loader for it")
        return order

    @contextmanager
    def _taking_leases(self, state: Any) -> Iterator[Any]:
        """Take over the leases of a state that is loaded inside the context, which gets the state of the position."""
        order, before, ledger = self._epochs.order, self._leases, None
        states = [*state] if isinstance(state, list | tuple) else [state]
        if isinstance(order, core.StreamOrder) or not (before or any(map(has_leases, states))):
            yield state
            return
        if any(map(has_leases, states)):
            shares, state = load(self._checked_order(), states)
            ledger = Ledger(self._epochs.pipeline, shares)
        kept, order.make_epoch = order.make_epoch, orders.MapEpoch if ledger is None else ledger.epoch
        try:
            yield state
        except BaseException:
            order.make_epoch = kept
            raise
        self._leases, self._lease_iterator = ledger, None
        if before is not None:
            before.reason = "the loader has loaded a state since, in which it is open or finished"
