"""Any sampler as a table of one epoch; the only module that knows about third-party samplers.

    table_of(sampler, epoch, seed)               the epoch as a table
    len_epoch(sampler, epoch)                    its number of items
    RecordedSampler(sampler, seed, checkpoint)   a third-party sampler, from a checkpoint on
    ThirdPartyItems(sampler, start, checkpoint)  its items, with count, checksum and the sampler's own state
    ListSampler(items, checkpoint)               a list, a tuple or a range, with random access and checkpoints
    with undisturbed(samplers):                  read samplers and restore them afterwards
    read_twice(read, sampler, epoch)             read an epoch, and verify that the result is reproducible

Third-party samplers are torch's, plain iterables, and subclasses of `Sampler` that override only ``__iter__``. A
`Start` starts one. `start_seeded` does so in a fixed environment, which it restores after the first item, because a
generator function runs nothing before it:

    1. ``set_epoch(epoch)`` is called on the sampler and its inner samplers (``.sampler``, ``.batch_sampler``);
    2. torch generators that they carry are replaced by ones seeded from (seed, their own seed, epoch);
    3. ``random``, NumPy and torch are seeded from (seed, epoch).

After that the sampler is read no further than the requested batch. A `Checkpoint` stores how far. To get back there,
the sampler loads its own state, or is restarted and skips the items before; a checksum verifies them.

What can go wrong: a sampler that draws from global generators later, or counts epochs itself, is rejected if it yields
other items after a restart. An iterator that is its own ``iter()`` serves only one epoch. A sampler with ``state_dict``
has one position, so two live iterators interfere.
"""

from __future__ import annotations

import copy
import os
import random
import sys
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import numpy as np

from sharded_loader.base.checks import fast_method
from sharded_loader.base.described import an
from sharded_loader.base.errors import as_batch_error
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.data.inspection import is_stateful
from sharded_loader.engine.epoch_requests import last_requests, restore_requests
from sharded_loader.engine.order import process_group
from sharded_loader.randomness.rng import Indices, derive_key, seed_torch, seeded_globals
from sharded_loader.sampling.base import ONE_SHOT, announce_epoch, is_own, is_wrapper, nested
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import LazyTable, Table, as_numbers, bytes_of

Found = TypeVar("Found")

_CHECKSUM_CHUNK = 1 << 16  # items skipped between two updates of the checksum

MOST_BYTES = 64 << 20
"""Larger arrays are assumed to be data, not an order shuffled in place, and not copied. List items count 8 bytes."""


def table_of(sampler: Any, epoch: int, seed: int) -> Table:
    """Return an epoch of any sampler or re-iterable object as a table. ``seed`` starts third-party samplers, now.

    Raises:
        TypeError: an iterator was exhausted by an earlier epoch.

    Example:
        >>> import random
        >>> class Shuffle:
        ...     def __iter__(self): return iter(random.sample(range(100), 3))
        >>> list(table_of(Shuffle(), 1, seed=7).items()) == list(table_of(Shuffle(), 1, seed=7).items())
        True
    """
    if not is_own(sampler):
        return ReplayTable(sampler, epoch, seed)
    if fast_method(type(sampler), "epoch_table", ["iter_epoch"]) is not None:
        table: Table = sampler.epoch_table(epoch)
        return table
    return LazyTable(partial(sampler.iter_epoch, epoch))


def len_epoch(sampler: Any, epoch: int, announce: bool = True) -> int:
    """Return the number of items in an epoch of any sampler. TypeError if its ``__len__`` is missing or fails.

    With ``announce``, ``set_epoch`` is called on third-party samplers first, and undone afterwards.
    """
    if is_own(sampler):
        return int(sampler.len_epoch(epoch))
    text = f"the sampler, {an(type(sampler))}, has no length"
    if not hasattr(type(sampler), "__len__"):
        raise TypeError(f"{text}: give its class a __len__ that returns the number of items in an epoch")
    listeners = [one for one in nested(sampler) if callable(getattr(one, "set_epoch", None))]
    try:
        # Copying the attributes takes long for large lists, and a training loop may ask at each step.
        if not announce or all(getattr(one, "epoch", None) == epoch for one in listeners):
            return len(sampler)
        with uninterrupted(), undisturbed(nested(sampler)):
            announce_epoch(sampler, epoch)
            return len(sampler)
    except Exception as error:  # third-party samplers raise any error if a length is unknown
        raise TypeError(f"{text}: its __len__ raised {type(error).__name__}: {error}") from error


def known_length(sampler: object, epoch: int, announce: bool = True) -> int | None:
    """Return `len_epoch`, or None if it is unknown or would take a pass over the data."""
    if getattr(sampler, "counts_by_pass", False):
        return None
    try:
        return len_epoch(sampler, epoch, announce)
    except (TypeError, NotImplementedError):
        return None


Start = Callable[[Checkpoint | None], AbstractContextManager[tuple[Iterator[Any], Any]]]
"""``with start(checkpoint) as (items, stateful)`` starts a third-party sampler.

The items begin at the sampler's own state in the checkpoint. Without one they begin with the epoch, and the caller
skips the items before the checkpoint inside the context. ``stateful`` is the object with the sampler's state, or None.
"""


@contextmanager
def start_seeded(
    sampler: object, epoch: int, seed: int, checkpoint: Checkpoint | None = None
) -> Iterator[tuple[Iterator[Any], Any]]:
    """Start a third-party sampler from (seed, epoch) and draw its first item; a `Start` once these are bound."""
    state = None if checkpoint is None else copy.deepcopy(checkpoint.state)
    # set_epoch also needs the lock of seeded_globals: two threads must not start one sampler at once.
    with seeded_globals(derive_key(seed, "foreign sampler", epoch)), _replaced_generators(sampler, epoch, seed):
        before = last_requests(nested(sampler))
        try:
            announce_epoch(sampler, epoch)
        finally:
            restore_requests(before)
        items, stateful = loaded(sampler, sampler if is_stateful(sampler) else None, state)
        first, rest = first_of(items)
    if not first and items is sampler and state is None:
        raise TypeError(f"the sampler, {an(type(sampler))}, has no items left for epoch {epoch}: {ONE_SHOT}")
    yield rest, stateful


def loaded(sampler: Any, stateful: Any, state: Any) -> tuple[Iterator[Any], Any]:
    """Return a sampler's iterator and its stateful object, both advanced to ``state`` (None: the epoch's beginning).

    ``stateful`` is the sampler or an inner one with a state; if None, the iterator is checked for one.
    """
    if state is not None and stateful is not None:
        stateful.load_state_dict(state)
    try:
        items = iter(sampler)
    except StopIteration as error:  # it would become a RuntimeError in the calling generator
        raise as_batch_error(error, "by the sampler") from error
    if stateful is None and is_stateful(items):
        stateful = items
        if state is not None:
            stateful.load_state_dict(state)
    return items, stateful


def first_of(items: Iterator[object]) -> tuple[list[Any], Iterator[Any]]:
    """Draw the first item. Return it in a list, and an iterator over all items."""
    # Not chain(first, items): it calls iter(items), which restarts some iterators.
    rest = map(next, repeat(items))
    first = list(islice(rest, 1))
    return first, chain(first, rest)


def _is_torch_generator(value: object) -> bool:
    return type(value).__module__ == "torch._C" and hasattr(value, "initial_seed")


@contextmanager
def _replaced_generators(sampler: object, epoch: int, seed: int) -> Iterator[None]:
    """Replace torch generators carried by third-party samplers (``RandomSampler(..., generator=g)``).

    ``g`` advances with every epoch, so the order would depend on history. Its initial seed still matters.
    """
    exchanged = []
    try:
        for each in nested(sampler):
            generator: Any = getattr(each, "generator", None)
            if _is_torch_generator(generator):
                key = derive_key(seed, "foreign generator", generator.initial_seed(), epoch)
                twin = type(generator)(device=generator.device)
                seed_torch(twin, key)
                exchanged.append((each, generator))  # before the exchange, in case of a Ctrl-C
                each.generator = twin
        yield
    finally:
        for each, generator in exchanged:
            each.generator = generator


@contextmanager
def undisturbed(samplers: Iterable[object], but: object = None) -> Iterator[None]:
    """Allow reading third-party samplers inside the context, and restore their attributes afterwards.

    Inside, random generators, lists, dicts, sets and arrays among the attributes are copies, except the object ``but``
    (the dataset). State kept elsewhere (a file, a nested object, compiled code) is not protected.
    """
    found: list[Any] = [vars(sampler) for sampler in samplers if isinstance(getattr(sampler, "__dict__", None), dict)]
    originals: list[Any] = [*map(dict, found)]
    restore = chain(map(dict.clear, found), map(dict.update, found, originals))
    try:
        for attributes, before in zip(found, originals, strict=True):
            attributes.update((name, _copy_if_mutable(value)) for name, value in before.items() if value is not but)
        yield
    finally:
        deque(restore, 0)  # one call, in C: no Ctrl-C comes between


def _copy_if_mutable(value: Any) -> Any:
    """Copy a random generator or container; return any other value, and large data, unchanged."""
    if isinstance(value, random.Random | np.random.RandomState | np.random.Generator):
        return value if isinstance(value, random.SystemRandom) else copy.deepcopy(value)
    if _is_torch_generator(value):
        twin = type(value)(device=value.device)
        twin.set_state(value.get_state())
        return twin
    if type(value) in (list, dict, set, deque, np.ndarray):
        size = value.nbytes if isinstance(value, np.ndarray) else 8 * len(value)
        return value.copy() if size <= MOST_BYTES else value
    return value


def read_twice(read: Callable[[int], Found], sampler: object, epoch: int) -> Found:
    """Return ``read(1)``, or raise a ValueError if ``read(2)`` differs for this epoch of a third-party sampler.

    The global generators are seeded differently each time, because later items may depend on them too.
    """
    with seeded_globals(1):
        found = read(1)
    with seeded_globals(2):
        again = read(2)
    if bytes_of([found]) != bytes_of([again]):
        raise ValueError(
            f"epoch {epoch} cannot be looked up: the sampler, {an(type(sampler))}, yields other indices when it is "
            f"read again. It draws from a global generator, or goes on from the epoch before: make its order depend "
            f"on set_epoch(epoch) alone, or write down the indices while you train"
        )
    return found


def check_reproduced(sampler: object, checkpoint: Checkpoint, items: int, checksum: int) -> None:
    """Reject a sampler that has not reproduced the items before a checkpoint: their number and checksum."""
    if checkpoint.rank != rank_of(sampler) or (items, checksum) == (checkpoint.items, checkpoint.checksum):
        return
    found = f"other indices in epoch {checkpoint.epoch} than the {checkpoint.items} before the state was saved"
    if items < checkpoint.items:
        found = f"only {items} items in epoch {checkpoint.epoch}, where it had yielded {checkpoint.items}"
    advice = "Make it with the same batch size, arguments and seed, or give it state_dict() and load_state_dict()"
    raise ValueError(f"the state cannot be resumed: the sampler, {an(type(sampler))}, yields {found}. {advice}")


class ThirdPartyItems:
    """Items of a third-party sampler, read once, from a checkpoint on; ValueError if it does not get there again.

    Attributes:
        count, checksum: number of items read or skipped, and their CRC-32.
        rest: remaining items. A caller that takes them directly, without `read`, must count them.
        head: first items read, if the epoch was read from its beginning.
    """

    def __init__(self, sampler: object, start: Start, checkpoint: Checkpoint | None = None) -> None:
        self.count = self.checksum = 0
        self.ended, self.head = False, list[Any]()
        self.rest: Iterator[Any] = iter(())
        self.stateful: Any = None
        if checkpoint is not None and checkpoint.finished:
            self.count, self.checksum, self.ended = checkpoint.items, checkpoint.checksum, True
            if checkpoint.state is None:
                return
        with start(checkpoint) as (self.rest, self.stateful):
            if self.ended:  # exhaust it, so that it advances to the next epoch
                deque(self.rest, maxlen=0)
            elif checkpoint is not None and checkpoint.state is not None and self.stateful is not None:
                self.count, self.checksum = checkpoint.items, checkpoint.checksum
            elif checkpoint is not None:
                self.skip_to(checkpoint.items)
                check_reproduced(sampler, checkpoint, self.count, self.checksum)

    def own_state(self) -> Any:
        # A copy, because some samplers keep changing the dict they return.
        return None if self.stateful is None else copy.deepcopy(self.stateful.state_dict())

    def read(self, count: int) -> list[Any]:
        items = islice(self.rest, count)
        found = list(map(_copy_batch, islice(items, 1)))
        is_index = bool(found) and type(found[0]) is int  # nothing to copy: saves 50 ns per item
        found += items if is_index else map(_copy_batch, items)
        self.checksum = zlib.crc32(bytes_of(found), self.checksum)
        if not self.head and not self.count:
            self.head = found
        self.count, self.ended = self.count + len(found), len(found) < count
        return found

    def skip_to(self, items: int) -> None:
        while self.count < items and not self.ended:
            self.read(min(_CHECKSUM_CHUNK, items - self.count))

    def is_over(self) -> bool:
        """Return True if no item is left. Draws the next item."""
        ahead = list(islice(self.rest, 1))
        self.ended, self.rest = not ahead, chain(ahead, self.rest)
        return self.ended


class ReplayTable(LazyTable):
    """One epoch of a third-party sampler, read once, from a checkpoint or the beginning."""

    def __init__(self, sampler: object, epoch: int, seed: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(lambda start: iter(()))
        self._sampler, self.epoch, self._seed = sampler, epoch, seed
        self._rank, self._known_length = rank_of(sampler), known_length(sampler, epoch)
        begin = checkpoint or Checkpoint(epoch, 0, 0, None, False, None)
        resumes = begin.epoch == epoch and begin.items > 0
        if begin.finished and begin.epoch <= epoch and not resumes:
            ThirdPartyItems(sampler, partial(start_seeded, sampler, begin.epoch, seed), begin)
        self._reader = ThirdPartyItems(sampler, partial(start_seeded, sampler, epoch, seed), begin if resumes else None)
        self._base, self._ended = self._reader.count, self._reader.ended
        self._resume_state = begin.state if resumes and begin.finished else self._reader.own_state()

    def checkpoint(self) -> Checkpoint:
        items = self._reader
        if not self._ended:
            state = items.own_state()
            # Draw one more item only if the length says that the epoch ends here.
            self._ended = items.count == self._known_length and items.is_over()
            # At its end a sampler may return the state of a new epoch, so the last one before it counts.
            if not self._ended:
                self._resume_state = state
        return Checkpoint(self.epoch, items.count, items.checksum, self._rank, self._ended, self._resume_state)

    def _read(self, count: int) -> list[Any]:
        return self._reader.read(count)

    def _skip_to(self, begin: int) -> None:
        self._reader.skip_to(begin)
        self._base, self._buffer, self._ended = self._reader.count, [], self._reader.ended

    def _reread(self, positions: Indices) -> list[Any]:
        head = self._reader.head  # rank padding wraps around to the epoch's beginning
        if positions[-1] < len(head):
            return [head[position] for position in positions.tolist()]
        found = ReplayTable(self._sampler, self.epoch, self._seed).at(positions)
        if len(found) == len(positions):
            return found
        where = f"item {positions[0]} of epoch {self.epoch}, which the sampler, {an(type(self._sampler))}"
        raise ValueError(f"the state cannot be resumed: it goes on at {where}, has passed and does not yield again")


class RecordedSampler:
    """Adapter that gives a third-party sampler an `epoch_table`, and records how far wrappers have read it.

    The first epoch continues at ``checkpoint``, in the open table of ``before`` if there is one; this avoids reading
    the items before it again.
    """

    def __init__(self, sampler: Any, seed: int, checkpoint: Checkpoint | None, before: RecordedSampler | None) -> None:
        self.sampler, self._seed, self._checkpoint = sampler, seed, checkpoint
        self._table: ReplayTable | None = None
        self._open = None if before is None else before._table

    def epoch_table(self, epoch: int) -> Table:
        (checkpoint, self._checkpoint), (table, self._open) = (self._checkpoint, None), (self._open, None)
        if table is None or table.epoch != epoch:
            table = ReplayTable(self.sampler, epoch, self._seed, checkpoint)
        self._table = table
        return table

    def checkpoint(self) -> Checkpoint | None:
        """Return the position after the items read so far; None if no epoch is open."""
        return None if self._table is None else self._table.checkpoint()

    def in_wrappers(self, sampler: object) -> Any:
        """Return the wrappers of the recorded sampler, around this adapter."""
        return sampler.over(self.in_wrappers(sampler.inner)) if is_wrapper(sampler) else self

    def len_epoch(self, epoch: int) -> int:
        return len_epoch(self.sampler, epoch)


LIST_BLOCK = 4096
"""Items of a list that are read at once."""


class ListSampler:
    """A list, a tuple or a range as a sampler: random access in blocks, with checkpoints."""

    def __init__(self, items: Sequence[object], checkpoint: Checkpoint | None) -> None:
        self._items, self._begin = items, checkpoint
        self._checksummed = 0, 0  # number of items and their checksum, to continue from

    def epoch_table(self, epoch: int) -> Table:
        begin = self._begin
        if begin is not None and begin.epoch == epoch and begin.items:
            check_reproduced(self._items, begin, min(begin.items, len(self._items)), self._checksum(begin.items))
        return Table(len(self._items), self._at, LIST_BLOCK)

    def len_epoch(self, epoch: int) -> int:
        return len(self._items)

    def _at(self, positions: Indices) -> Any:
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):  # 7 us for 4,096 items, instead of 150
            return as_numbers(list(self._items[first : last + 1]))
        return as_numbers([self._items[position] for position in positions.tolist()])

    def checkpoint(self, epoch: int, items: int) -> Checkpoint:
        items = min(items, len(self._items))
        return Checkpoint(epoch, items, self._checksum(items), None, items == len(self._items), None)

    def _checksum(self, items: int) -> int:
        count, checksum = self._checksummed if self._checksummed[0] <= items else (0, 0)
        checksum = zlib.crc32(bytes_of(self._items[count:items]), checksum)
        self._checksummed = items, checksum
        return checksum


def name_of(sampler: object) -> str:
    return type(sampler.sampler if isinstance(sampler, RecordedSampler) else sampler).__name__


def rank_of(sampler: object) -> int | None:
    """Return the rank of a sampler that yields one rank's share (torch's DistributedSampler, Accelerate's), or None."""
    names = ("rank", "process_index")
    found = (getattr(each, name, None) for each in nested(sampler) for name in names)
    return next((rank for rank in found if isinstance(rank, int)), None)


def text_if_ranks_repeat(samplers: Iterable[object], environ: Mapping[str, str] = os.environ) -> str | None:
    """Return a warning if all ranks of a process group, or of WORLD_SIZE, would read the same samples; otherwise None.

    Example:
        >>> text_if_ranks_repeat([], {"WORLD_SIZE": "2"})
        'this process is one of 2 ranks (WORLD_SIZE), and each reads the whole dataset: '
    """
    distributed, world_size = process_group(), environ.get("WORLD_SIZE", "").strip()
    ranks, known_from = int(world_size) if world_size.isdecimal() else 1, "(WORLD_SIZE)"
    if distributed is not None:
        ranks, known_from = int(distributed.get_world_size()), "(torch.distributed)"
    counts = ("num_replicas", "num_processes")  # the second: Accelerate's samplers
    for one in samplers if ranks > 1 else ():
        if rank_of(one) is not None or getattr(one, "is_part", False) or any(hasattr(one, name) for name in counts):
            return None
    text = f"this process is one of {ranks} ranks {known_from}, and each reads the whole dataset: "
    return text if ranks > 1 else None


def refuse_distributed_sampler(sampler: object) -> None:
    """Reject a torch DistributedSampler where the loader already splits the samples."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DistributedSampler", ())
    if any(isinstance(one, kind) for one in nested(sampler)):
        raise ValueError("num_replicas and a torch DistributedSampler would share out the samples twice: leave out one")


def _copy_batch(item: object) -> Any:
    """Return a copy of a batch, because the sampler may reuse its list while the batch waits."""
    if type(item) is list:
        return [inner if type(inner) is int else _copy_batch(inner) for inner in item]
    return item.copy() if isinstance(item, np.ndarray) else item
