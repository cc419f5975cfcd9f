"""Any sampler at all as a table of its epoch: the one place that asks whether a sampler is ours.

    table_of(sampler, epoch, seed)    the epoch as a table
    len_epoch(sampler, epoch)         how many items it has
    Replay(sampler, seed, checkpoint) the same for one sampler of another library, from a checkpoint on
    find_foreign, over_replay         the sampler of another library inside our wrappers, and wrappers over its replay

There are three kinds. A sampler of ours has `epoch_table`. A user's sampler with `iter_epoch` is a pure function, and
jumps to any item (`sharded_loader.sampling.tables.Streamed`). All others are *foreign*: torch's samplers, plain
iterables, lists, and subclasses of `Sampler` that override ``__iter__`` alone.

A foreign sampler is read once, item after item, no further than the batch that is asked for. A `Checkpoint` says how
much was read. It gets back there by its own ``load_state_dict``, if it (or its iterator) has ``state_dict`` as well;
otherwise it is started again and the items before are passed over. Their checksum says whether they are the same items.
No data is read for either.

What can go wrong: a foreign sampler that yields other items on the way back: rejected, by name. A sampler with
``state_dict`` keeps one position; two iterators that are alive at once disturb each other in it. Before the first batch
of an epoch there is no checkpoint: interrupted there, a sampler is started again. One that goes on where it stopped, or
draws another order each time, does so then.

Source of the idea: ``StatefulDataLoader`` of torchdata.
"""

from __future__ import annotations

import array
import copy
import operator
import sys
import zlib
from collections.abc import Iterator
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np

from sharded_loader.sampling.base import Sampler, WrapperSampler, depth, is_own
from sharded_loader.sampling.borrowing import MAX_NESTING, length_or, nested, start
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import Indices, Streamed, Table

# Items passed over between two updates of the checksum.
_PART = 1 << 16


def table_of(sampler: Any, epoch: int, seed: int) -> Table:
    """An epoch of any sampler as a table.

    Args:
        sampler: any sampler, or any iterable that can be read again and again.
        epoch: which epoch, from 0.
        seed: seeds a foreign sampler, together with the epoch. Other samplers have theirs.

    Returns:
        The table. A foreign sampler has been started when this returns.

    Raises:
        TypeError: for an iterator that an earlier epoch has used up.

    Example:
        >>> import random
        >>> class Shuffle:
        ...     def __iter__(self): return iter(random.sample(range(100), 3))
        >>> list(table_of(Shuffle(), 1, seed=7).items()) == list(table_of(Shuffle(), 1, seed=7).items())
        True
    """
    if not is_own(sampler):
        return ReplayTable(sampler, epoch, seed)
    if depth(sampler, "epoch_table") <= depth(sampler, "iter_epoch"):
        table: Table = sampler.epoch_table(epoch)
        return table
    return Streamed(partial(sampler.iter_epoch, epoch))


def len_epoch(sampler: Any, epoch: int) -> int:
    """How many items an epoch of any sampler has.

    Raises:
        TypeError: if a foreign sampler has no ``__len__``, or one that raises: whatever it raises means that the
            length is unknown.

    Example:
        >>> len_epoch([4, 5, 6], 0)
        3
    """
    if is_own(sampler):
        length: int = sampler.len_epoch(epoch)
        return length
    if not hasattr(type(sampler), "__len__"):
        raise TypeError(
            f"the sampler, a {type(sampler).__name__}, has no length: give its class a __len__ that returns the "
            "number of items in an epoch"
        )
    try:
        return _foreign_length(sampler, epoch)
    except Exception as error:  # other libraries raise what they like where a length is unknown
        cause = f"its __len__ raised {type(error).__name__}: {error}"
        raise TypeError(f"the sampler, a {type(sampler).__name__}, has no length: {cause}") from error


def _foreign_length(sampler: Any, epoch: int) -> int:
    if not isinstance(sampler, Sampler):
        return len(sampler)
    # A subclass of ours that overrides __iter__: its inherited length is that of the pending epoch.
    pending = sampler.epoch
    try:
        sampler.epoch = epoch
        return len(sampler)
    finally:
        sampler.epoch = pending


class ReplayTable(Streamed):
    """One epoch of a foreign sampler, read once.

    Args:
        sampler, epoch, seed: as `table_of`.
        checkpoint: where to go on; None: at the beginning.

    Raises:
        ValueError: the items before the checkpoint are not those of then.
    """

    def __init__(self, sampler: Any, epoch: int, seed: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(lambda start: iter(()))
        self._sampler, self._epoch, self._seed = sampler, epoch, seed
        self._rank = _rank_of(sampler)
        self._length = length_or(sampler, -1)
        self._begin(checkpoint)

    def _begin(self, checkpoint: Checkpoint | None) -> None:
        epoch, seed, sampler = self._epoch, self._seed, self._sampler
        self._base = self._resumed = self._checksum = 0
        self._buffer, self._yields_ints, self._ended = [], False, False
        self._head: list[Any] = []
        self._stateful: Any = None
        state, finished = (None, False) if checkpoint is None else (checkpoint.state, checkpoint.finished)
        if checkpoint is not None and finished and state is not None and checkpoint.epoch <= epoch:
            # To the end of its epoch by way of the sampler itself, so that it goes on from there to the next one.
            for _ in start(sampler, checkpoint.epoch, seed, copy.deepcopy(state))[0]:
                pass
        if checkpoint is None or checkpoint.epoch != epoch or not checkpoint.items:
            self._items, self._stateful = start(sampler, epoch, seed)
            self._good = self._own_state()
            return
        self._resumed = checkpoint.items
        if finished:
            self._base, self._checksum, self._ended, self._good = checkpoint.items, checkpoint.checksum, True, state
            return
        self._items, self._stateful = start(sampler, epoch, seed, copy.deepcopy(state))
        self._good = self._own_state()
        if state is not None and self._stateful is not None:
            self._base, self._checksum = checkpoint.items, checkpoint.checksum
            return
        self._jump(checkpoint.items)
        if checkpoint.rank == self._rank and (self._base, self._checksum) != (checkpoint.items, checkpoint.checksum):
            raise ValueError(self._refusal(checkpoint))

    def upto(self, begin: int, end: int) -> int:
        if begin < self._resumed:  # other ranks had read a little further than the position
            self._begin(None)
        return super().upto(begin, end)

    def checkpoint(self) -> Checkpoint:
        """The position after what has been read."""
        items = self._base + len(self._buffer)
        if not self._ended:
            state = self._own_state()
            if items == self._length:
                self._look_ahead()
            # At the end a sampler may show the state of a new epoch: the last one before it is the one to go by.
            if not self._ended:
                self._good = state
        return Checkpoint(self._epoch, items, self._checksum, self._rank, self._ended, self._good)

    def _look_ahead(self) -> None:
        """Whether the sampler ends where its length says; an error counts as an item, and is raised in its turn."""
        try:
            ahead = list(islice(self._items, 1))
        except Exception as error:
            self._items = _raising(error)
        else:
            self._ended = not ahead
            self._items = chain(ahead, self._items)

    def _own_state(self) -> Any:
        # A copy: some return the dict that they go on changing.
        return None if self._stateful is None else copy.deepcopy(self._stateful.state_dict())

    def _read(self, count: int) -> list[Any]:
        items = islice(self._items, count)
        found = list(items) if self._yields_ints else list(map(_copied, items))
        self._yields_ints = bool(found) and type(found[0]) is int  # then there is nothing to copy, at 50 ns an item
        self._checksum = zlib.crc32(_encode(found), self._checksum)
        if not self._head and not self._base:
            self._head = found  # for the padding of ranks, which wraps round to the epoch's beginning
        return found

    def _jump(self, begin: int) -> None:
        self._base, self._buffer = self._base + len(self._buffer), []
        while self._base < begin and not self._ended:
            wanted = min(_PART, begin - self._base)
            found = len(self._read(wanted))
            self._base, self._ended = self._base + found, found < wanted

    def _again(self, positions: Indices) -> list[Any]:
        if positions[-1] < len(self._head):
            return [self._head[position] for position in positions.tolist()]
        return ReplayTable(self._sampler, self._epoch, self._seed).at(positions)

    def _refusal(self, checkpoint: Checkpoint) -> str:
        name, epoch, items = type(self._sampler).__name__, checkpoint.epoch, checkpoint.items
        if self._base < items:
            found = f"yields only {self._base} items in epoch {epoch}, where it had yielded {items}"
        else:
            found = f"yields other indices in epoch {epoch} than the {items} that were read before the state was saved"
        return (
            f"the state cannot be resumed: the sampler, a {name}, {found}. Make it with the same arguments and the "
            f"same seed as then; if its order depends on what it yielded before, give it state_dict() and "
            f"load_state_dict()"
        )


class Replay:
    """A foreign sampler that looks like one of ours: wrappers read it, and it remembers how far they have read.

    Args:
        sampler, seed: as `table_of`.
        checkpoint: where the first epoch that is read goes on.
    """

    def __init__(self, sampler: Any, seed: int, checkpoint: Checkpoint | None) -> None:
        self.sampler, self._seed, self._checkpoint = sampler, seed, checkpoint
        self._table: ReplayTable | None = None

    def epoch_table(self, epoch: int) -> Table:
        checkpoint, self._checkpoint = self._checkpoint, None
        self._table = ReplayTable(self.sampler, epoch, self._seed, checkpoint)
        return self._table

    def checkpoint(self) -> Checkpoint | None:
        """The position after what has been read; None if no epoch was opened."""
        return None if self._table is None else self._table.checkpoint()

    def len_epoch(self, epoch: int) -> int:
        return len_epoch(self.sampler, epoch)


def find_foreign(sampler: Any, seed: int) -> tuple[Any, int]:
    """The foreign sampler at the end of a chain of wrappers, or None; and the seed that it is started with."""
    for _ in range(MAX_NESTING):
        if not (isinstance(sampler, WrapperSampler) and is_own(sampler)):
            break
        sampler, seed = sampler.inner, sampler.seed
    return None if is_own(sampler) else sampler, seed


def over_replay(sampler: Any, replay: Replay) -> Any:
    """The wrappers of a foreign sampler, over its replay."""
    if isinstance(sampler, WrapperSampler) and is_own(sampler):
        return sampler.over(over_replay(sampler.inner, replay))
    return replay


def name_of(sampler: Any) -> str:
    """What an error calls a sampler."""
    return type(sampler.sampler if isinstance(sampler, Replay) else sampler).__name__


def _rank_of(sampler: Any) -> int | None:
    """The rank of a sampler that yields only its rank's items, as torch's DistributedSampler does."""
    found = (one.rank for one in nested(sampler) if isinstance(getattr(one, "rank", None), int))
    return next(found, None)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _copied(item: Any) -> Any:
    """A batch of the sampler's own: it may fill its list again for the next batch while this one waits."""
    if type(item) is list:
        return [one if type(one) is int else _copied(one) for one in item]
    return item.copy() if isinstance(item, np.ndarray) else item


def _encode(items: list[Any]) -> bytes:
    """Bytes that depend on the items, not on where one list of them ends and the next begins."""
    if set(map(type, items)) == {int}:
        try:
            numbers = array.array("q", items)
        except OverflowError:
            pass
        else:
            if sys.byteorder == "big":
                numbers.byteswap()
            return numbers.tobytes()
    return b"".join(map(_encode_one, items))


def _encode_one(item: Any) -> bytes:
    if hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, list | tuple):
        return len(item).to_bytes(8, "little") + _encode(list(item))
    try:
        return operator.index(item).to_bytes(8, "little", signed=True)
    except (TypeError, OverflowError):
        return repr(item).encode()
