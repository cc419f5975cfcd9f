"""Leases: batches that are finished in any order, each once per epoch, whatever is killed in between.

    loader.lease()      -> Lease                  the next batch of the order, or one that comes again; None: epoch over
    lease.done(), lease.refuse(), lease.again()   finished; finished without use; back in
    loader.state_dict()["leases"]                 this rank's next batch and its open ones, of each epoch
    load_state_dict([state of each rank, ...])    the open batches of all ranks, shared out among the ranks of today

The global order is cut into batches, numbered from 0 in each epoch, and rank r of R ranks takes the batches r, r + R,
r + 2 R and so on. So the samples of a batch depend on no rank, a group of samples stays whole, and its number is enough
to read a batch again, with the same random numbers. Ranks take batches at their own pace, and nothing is padded.

`Ledger` owns what is open on this rank, and what waits to come again. `LeaseEpoch` is an epoch of this rank's new
batches, which the workers read ahead as usual. Batches that come again are read in the main process: what a state has
brought before the new ones, what was put back after them.

What can go wrong: a batch raises an error, which ``lease()`` raises; the batch stays open, and comes again after a
state is loaded. A batch whose samples were all left out by ``on_error`` counts as finished.

A state has the differences between the numbers of open batches: 2,000 of 10^9 take 1 to 2 KB. A bitmap would grow with
the distance to the oldest.
"""

from __future__ import annotations

import base64
import json
import threading
import weakref
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain
from operator import index
from typing import Any, Generic

import numpy as np

from sharded_loader import LoaderClosedError
from sharded_loader.extend import NOTHING, Entry, Pipeline, Position, Run, Table
from sharded_loader.extend import engine as core
from sharded_loader.extend import order as orders
from sharded_loader.extend.engine import Batch
from sharded_loader.extend.tools import add_note, brief
from sharded_loader.extend.tools import entries as saved

_ADVICE = "give what state_dict() of a loader with leases has returned, or a list of the states of all ranks"


# -- states ------------------------------------------------------------------------------------------------------------


def pack(numbers: Iterable[int]) -> str:
    """Return numbers as a short text: their differences, compressed.

    Example:
        >>> sorted(unpack("", pack({10**9, 3, 10**9 + 1}), ""))
        [3, 1000000000, 1000000001]
    """
    steps = json.dumps(np.diff(sorted(numbers), prepend=0).tolist())
    return base64.b85encode(zlib.compress(steps.encode(), 9)).decode()


def unpack(what: str, text: Any, advice: str) -> set[int]:
    try:
        return set(map(index, accumulate(json.loads(zlib.decompress(base64.b85decode(text))))))
    except (ValueError, TypeError, zlib.error) as error:
        raise ValueError(f"{what} is {brief(text)}, which is damaged ({error}): {advice}") from None


@dataclass
class Share:
    """This rank's batches of one epoch.

    Attributes:
        next: number of its next new batch.
        open: numbers of the batches before that one that are not finished.
        ended: all of them were handed out.
        source: what its new batches were read from.
    """

    epoch: int = saved.entry(saved.integer(0))
    next: int = saved.entry(saved.integer(0))
    open: set[int] = saved.entry(unpack, write=pack)  # noqa: RUF009 - it makes a field
    ended: bool = False
    source: orders.SamplerSource | None = None


@dataclass
class RankState:
    """The entry ``leases`` of a rank's state: its current, or next, epoch, and earlier ones with open batches."""

    ranks: int = saved.entry(saved.integer(1))
    rank: int = saved.entry(saved.integer(0))
    current: Share = saved.entry(saved.dict_of(Share), write=saved.to_state)  # noqa: RUF009
    earlier: tuple[Share, ...] = saved.entry(
        saved.list_of(saved.dict_of(Share)), write=lambda shares: [*map(saved.to_state, shares)]
    )

    def check(self, share: Share, total: int) -> None:
        """Raise a ValueError if a share has other numbers than those of its epoch's ``total`` batches."""
        if share.next >= total + self.ranks or not all(0 <= number < min(share.next, total) for number in share.open):
            text = f"open batches {brief(sorted(share.open))} and next batch {share.next} of rank {self.rank}"
            raise ValueError(
                f"load_state_dict: {text} are not of the {total} batches of epoch {share.epoch}: {_ADVICE}"
            )

    def share(self, epoch: int, total: int) -> Share:
        """Return the share of any epoch, which has ``total`` batches: one that is over, or has not begun, too."""
        found = next((one for one in (*self.earlier, self.current) if one.epoch == epoch), None)
        return found or Share(epoch, total if epoch < self.current.epoch else self.rank, set())


def load(order: orders.MapOrder, states: list[Any]) -> tuple[list[Share], Any]:
    """Return this rank's shares from the states of all ranks, or its own, and the state of the newest epoch."""
    signatures = [order.signature(order.next_epoch), *(orders.parse(one)[1] for one in states)]
    # What is None here may change.
    own, *was = (replace(one, num_replicas=None, step_ranks=None, sampler_length=None) for one in signatures)
    phrases = [*orders.differences(was[0], own), *orders.other_arguments(was[0], own)]
    if phrases or any(other != was[0] for other in was):
        text = f"load_state_dict: leases of other batches: {', '.join(phrases) or 'the states are of different runs'}"
        raise ValueError(f"{text}. The number of ranks may change, but nothing else")
    found = [saved.read_entry(one, "leases", saved.dict_of(RankState), _ADVICE) for one in states]
    for rank_state in found:
        for share in (*rank_state.earlier, rank_state.current):
            rank_state.check(share, total_of(order.source(share.epoch), share.epoch))
    ranks, given = found[0].ranks, sorted((one.rank, one.ranks) for one in found)
    if given == [(rank, ranks) for rank in range(ranks)]:
        shares = [*merged(order, found, *order.replicas())]
    elif len(found) == 1 and order.replicas() == (ranks, found[0].rank):
        shares = [*found[0].earlier, found[0].current]
    else:
        text = f"there were {ranks} ranks, and here are the states of ranks {[rank for rank, _ in given]}"
        raise ValueError(f"load_state_dict: {text}: load a list of the states of all {ranks}")
    for share in shares[:-1]:
        share.ended = True
    return shares, max(states, key=lambda one: int(one["epoch"]))


def merged(order: orders.MapOrder, found: list[RankState], replicas: int, rank: int) -> Iterator[Share]:
    """Iterate over the shares of a rank of today: every open batch of the ranks before is in one of them."""
    currents = [one.current.epoch for one in found]
    newest = max(currents)
    # Between the epochs of the slowest and the fastest rank, the fastest may have nothing open.
    for epoch in sorted({*range(min(currents), newest + 1), *(share.epoch for one in found for share in one.earlier)}):
        total = total_of(order.source(epoch), epoch)
        shares = [one.share(epoch, total) for one in found]
        begin = min(max(share.next for share in shares), total) if epoch == newest else total
        behind = (range(share.next, begin, len(found)) for share in shares)
        undone = sorted(chain(*behind, *(share.open for share in shares)))
        yield Share(epoch, begin + rank, set(undone[rank::replicas]))


# -- what is open ------------------------------------------------------------------------------------------------------


def total_of(source: orders.SamplerSource, epoch: int) -> int:
    """Return the number of batches of an epoch, of all ranks together."""
    own, items = source.signature, orders.for_ranks(source.items, 1)
    return orders.parts(orders.len_epoch(items, epoch), own.batch_size or 1, own.drops_last)


class LeaseEpoch(orders.MapEpoch):
    """Batches of a share, by their numbers. Only a `LeaseIterator` may begin it."""

    def __init__(self, ledger: Ledger, share: Share, source: orders.SamplerSource, numbers: Sequence[int]) -> None:
        super().__init__(source, share.epoch, None)
        self.ledger, self.share, self.numbers, self.resumed = ledger, share, numbers, True
        self.size = source.signature.batch_size or 1

    @cached_property
    def _table(self) -> Table:
        own, arrays = self.source.signature, self.source.arrays
        # As for one rank: ranks take batches at their own pace, so nothing has to be equal in a step.
        table = orders.table_of(orders.for_ranks(self.source.items, 1), self.number, own.seed)
        is_cut = own.batch_size is None
        return table if is_cut else orders.BatchedTable(table, self.size, own.drops_last, arrays=True, convert=arrays)

    def batch(self, seq: int) -> tuple[Any, int] | None:
        if seq >= len(self.numbers):
            return None
        return self._table.at(np.array(self.numbers[seq : seq + 1]))[0], self.numbers[seq] * self.size

    def again(self) -> LeaseEpoch:
        return LeaseEpoch(self.ledger, self.share, self.source, self.numbers)

    def opened_by(self, iterator: object) -> None:
        if not isinstance(iterator, LeaseIterator):
            text = "this loader gives out its batches by lease(), and an iterator would give them a second time"
            raise RuntimeError(f"{text}: make another loader for the loop, or load a state without leases")
        if self.share.ended:
            text = f"epoch {self.number} cannot begin again while {len(self.share.open)} of its leases are open"
            raise ValueError(f"{text}: finish them, or call set_epoch with another epoch")
        self.ledger.shares[self.number] = self.share

    def length(self) -> int:
        return len(self.numbers)

    def reached(self, delivered: int) -> tuple[int, int]:
        text = "the order of a loader with leases cannot change: load the states of all ranks, as a list"
        raise TypeError(f"{text}, into loaders with the new ranks")

    def position(self, delivered: int) -> Position:
        return Position(self.number)  # the leases say what is done

    def state(self, position: Position) -> dict[str, Any]:
        with self.ledger.lock:
            earlier = tuple(one for one in self.ledger.shares.values() if one.open and one is not self.share)
            own = saved.to_state(RankState(self.source.replicas, self.source.rank, self.share, earlier))
        return {**super().state(position), "leases": own}


class Ledger:
    """Open leases of this rank. Holds no reference to the loader or an iterator, so it keeps neither alive.

    Attributes:
        shares: by epoch, the current one and those with open batches.
        loaded, back: batches that come again: those of a state, and those that were put back since.
        lock, turn: held for a change, and by a thread in `Leasing.lease`.
        pipeline: weak reference to the loader's.
        reason: why leases can no longer be finished; empty: they can.
    """

    def __init__(self, pipeline: Pipeline | None = None, shares: Iterable[Share] = ()) -> None:
        self.shares = {share.epoch: share for share in shares}
        self.loaded = deque((share, number) for share in self.shares.values() for number in sorted(share.open))
        self.back = deque[tuple[Share, int]]()
        self.lock, self.turn, self.reason = threading.RLock(), threading.RLock(), ""
        self.pipeline: Any = None if pipeline is None else weakref.ref(pipeline)

    def __reduce__(self) -> Any:
        return Ledger, ()  # other machines only ask for the order

    def epoch(self, source: orders.SamplerSource, number: int, position: Position | None) -> LeaseEpoch:
        """Return an epoch of this rank's batches: `MapOrder.make_epoch`."""
        share, size = self.shares.get(number), source.signature.batch_size or 1
        if share is None or (share.ended and not share.open):
            done = 0 if position is None else position.done
            if done % size and done != source.signature.sampler_length:
                text = f"lease() gives batches of {size} samples, and {done} samples of epoch {number} are done"
                raise ValueError(f"{text}: give the batch size with which the state was saved")
            share = Share(number, orders.parts(done, size, cut=False) + source.rank, set())
        share.source = share.source or source
        return LeaseEpoch(self, share, source, range(share.next, total_of(source, number), source.replicas))

    def end(self, run: Any) -> None:
        with self.lock:
            run.epoch.share.ended = True
            self.shares = {one.epoch: one for one in self.shares.values() if one.open}

    def close(self, lease: Lease[Any], how: str) -> None:
        pipeline, doing = self.pipeline(), f"{how}() of lease {lease.name}"
        if pipeline is None or pipeline.closed:
            raise LoaderClosedError(f"{doing}: the loader is closed, and its last state says if the lease is open")
        with self.lock:
            if self.reason or lease.ended:
                raise RuntimeError(f"{doing}: {self.reason or f'it was finished before, by {lease.ended}()'}")
            lease.ended = how
            if how == "again":
                self.back.append((lease._share, lease._number))
            else:
                lease._share.open.discard(lease._number)


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

    def __init__(self, batch: Batch, task: Any, epoch: LeaseEpoch, dataset: Any) -> None:
        self.indices = [one for shard in task.shards for one in core.shown_indices(dataset, shard, epoch.number)]
        self.batch, self.epoch, self.name, self.ended = batch, epoch.number, f"{epoch.number}-{task.position}", ""
        self._ledger, self._share, self._number = epoch.ledger, epoch.share, epoch.numbers[task.seq]

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

        If its epoch is over, it comes at the end of the next one. Raises what `done` raises.
        """
        self._ledger.close(self, "again")


class LeaseIterator(core.EpochIterator[Lease[Batch]]):
    """Iterator over a `LeaseEpoch`, which makes a lease of each batch, and records it."""

    def _choose_run(self) -> Run:
        while not isinstance((run := super()._choose_run()).epoch, LeaseEpoch):  # read ahead before the first lease
            self._pipeline.drop(run.number)
        return run

    def _deliver(self, run: Run, entry: Entry) -> bool:
        has_batch, epoch = super()._deliver(run, entry), run.epoch
        assert isinstance(epoch, LeaseEpoch)  # it was chosen
        number = epoch.numbers[entry.seq]
        with epoch.ledger.lock:
            epoch.share.next = max(epoch.share.next, number + epoch.source.replicas)
            if has_batch:
                epoch.share.open.add(number)
        if entry.result is not None and entry.result.error is None and has_batch:
            entry.batch = Lease(entry.batch, entry.task, epoch, self._epochs.dataset)
        return has_batch


class Leasing(Generic[Batch]):
    """Methods of a loader that hand out leases."""

    _epochs: core.Epochs
    _meter: Any
    _known_steps: core.LookUp
    _leases: Ledger | None = None
    _lease_iterator: LeaseIterator[Batch] | None = None

    def lease(self) -> Lease[Batch] | None:
        """Return the next batch as a `Lease`, which is finished in any order; from any thread.

        First come leases that were open when the loaded state was saved, then the new ones of the epoch, prefetched,
        and at last those that were put back. Each batch of an epoch is finished once, by `Lease.done` or
        `Lease.refuse`, on one of the ranks, whatever is killed: a lease that was open when a state was saved comes
        again after `load_state_dict`. Each rank saves its own state, and a list of the states of all ranks loads on any
        number of ranks.

        Returns:
            None once at the end of each epoch, when nothing waits to come again. The next call begins the next epoch,
            also while leases are open. Ranks get as many leases as they ask for, are not in step, and nothing is
            padded.

        Raises:
            TypeError: Iterable data, or a sampler of another library: their batches cannot be looked up again.
            ValueError: ``evaluate``, ``costs``, ``steps_per_epoch``, ``skip``, ``last_batch="rollover"``, or
                ``global_batch`` on several ranks, which need steps.
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
                ledger = Ledger(pipeline)
                self._checked_order().make_epoch, self._leases = ledger.epoch, ledger
            ledger = self._leases
        found: Lease[Batch] | None = None
        try:
            with ledger.turn:
                if self._lease_iterator is None:
                    self._checked_order()
                    self._lease_iterator = LeaseIterator(epochs, self._meter)
                iterator = self._lease_iterator
                found = self._again(ledger, ledger.loaded)
                if found is None and not (iterator.run and iterator.run.ended):
                    with suppress(StopIteration):
                        found = iterator.__next__()  # no `next`: a Ctrl-C behind that call would lose the lease
                if found is None:
                    found = self._again(ledger, ledger.back)
                if found is None:
                    ledger.end(iterator.run)
                    self._lease_iterator = None
        except BaseException:
            if found is not None:  # a Ctrl-C: the next call hands it out
                ledger.loaded.appendleft((found._share, found._number))
            raise
        return found

    def _again(self, ledger: Ledger, queue: deque[tuple[Share, int]]) -> Lease[Batch] | None:
        """Return the first lease that comes again, read here."""
        while queue:
            share, number = queue[0]
            order: Any = self._epochs.order
            epoch = LeaseEpoch(ledger, share, share.source or order.source(share.epoch), [number])
            try:
                batch, dataset = self._known_steps.batch_of(epoch, 0), self._known_steps.dataset
                lease = None if batch is NOTHING else Lease(batch, epoch.task(0), epoch, dataset)
            except Exception as error:
                queue.popleft()
                name = f"{share.epoch}-{number * epoch.size}"
                add_note(error, f"sharded_loader: raised for lease {name}, which stays open")
                raise
            del queue[0]  # no call, as in `lease`
            if lease is not None:
                return lease
            with ledger.lock:
                share.open.discard(number)
        return None

    def _checked_order(self) -> orders.MapOrder:
        """Return the order, if it can give leases, and no other iterator is in the middle of an epoch."""
        order = self._epochs.order
        if isinstance(order, core.StreamOrder) or order.signature(order.next_epoch).sampler_length is None:
            text = "lease() looks batches up by their position: give a dataset that is read by index, and shuffle=True"
            raise TypeError(f"{text}, or a sampler of this library with a length")
        sampling = order.sampling
        has_steps = sampling.costs is not None or sampling.evaluate or order.skip or order.rolls_over
        if has_steps or order.order_ranks() != order.replicas():
            text = "lease() gives batches without steps: leave out costs, evaluate, skip, steps_per_epoch, global_batch"
            raise ValueError(f"{text} and last_batch='rollover'")
        if any(not isinstance(run.epoch, LeaseEpoch) for run in self._epochs.reading()):
            text = "lease() gives out the batches of this loader, and an iterator is in the middle of an epoch"
            raise RuntimeError(f"{text}: finish its loop before, or make another loader for it")
        return order

    @contextmanager
    def _taking_leases(self, state: Any) -> Iterator[Any]:
        """Take over the leases of a state that is loaded inside the context, which gets the state of the position."""
        before, ledger = self._leases, None
        states = [*state] if isinstance(state, list | tuple) else [state]
        if any(isinstance(one, Mapping) and "leases" in one for one in states):
            shares, state = load(self._checked_order(), states)
            ledger = Ledger(self._epochs.pipeline, shares)
        yield state
        if before is not None or ledger is not None:
            order: Any = self._epochs.order
            order.make_epoch = orders.MapEpoch if ledger is None else ledger.epoch
            self._leases, self._lease_iterator = ledger, None
        if before is not None:
            before.reason = "the loader has loaded a state since, in which it is open or finished"
