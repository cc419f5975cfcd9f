"""Any sampler at all as a table of its epoch: the one place that knows samplers of other libraries.

    table_of(sampler, epoch, seed)       the epoch as a table
    len_epoch(sampler, epoch)            how many items it has
    Replay(sampler, seed, checkpoint)    one sampler of another library, from a checkpoint on
    ForeignItems(sampler, start, mark)   its items: how many, their checksum, and the sampler's own state
    Listed(items, mark)                  a list, a tuple or a range: any block of it, and checkpoints
    with undisturbed(samplers):          read them; afterwards they are what they were before
    read_twice(read, sampler, epoch)     what is read of an epoch, if it depends on nothing else

A sampler of ours has `epoch_table`. A user's sampler with `iter_epoch` is a pure function, and jumps to any item
(`sharded_loader.sampling.tables.Streamed`). All others are *foreign*: torch's samplers, plain iterables, and subclasses
of `Sampler` that override ``__iter__`` alone. Most lists are read as tables too (`Listed`). A list may change between
two epochs, so a saved position in it has a checkpoint too, with a checksum.

A `Start` starts a sampler that is foreign. The drop-in starts it as PyTorch does (`sharded_loader.drop_in.sampler`).
`keyed` starts it, with its first item, under these conditions, and puts back what was there before.

    1. ``set_epoch(epoch)`` is called on the sampler and on those inside it (``.sampler``, ``.batch_sampler``),
    2. a torch ``generator`` that it carries is replaced by one that is seeded by (seed, its own seed, epoch),
    3. ``random``, NumPy and torch are seeded by (seed, epoch).

The first item belongs to the start: a generator function runs nothing before it. Then the sampler is read no further
than the batch that is asked for. A `Checkpoint` says how far. The sampler gets back there by ``load_state_dict``, or is
started again and passes over the items before. A checksum says whether they are the same.

What can go wrong: a sampler that draws from global generators after its first item, or counts epochs by itself, is no
pure function. If it yields other items on the way back, it is rejected by name. An iterator that is its own ``iter()``
serves one epoch. A sampler with ``state_dict`` keeps one position, so two live iterators disturb each other. Before the
first batch of an epoch there is no checkpoint: interrupted there, a sampler is started again.
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

from sharded_loader.base.described import an
from sharded_loader.base.errors import as_batch_error
from sharded_loader.data.inspection import is_stateful
from sharded_loader.engine.epoch_requests import last_requests, restore_requests
from sharded_loader.engine.order import process_group
from sharded_loader.randomness.rng import derive_key, seed_torch, seeded_globals
from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.base import ONE_SHOT, depth, is_own, is_wrapper, nested, tell_epoch
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import Streamed, Table, as_numbers, bytes_of

Found = TypeVar("Found")

_PART = 1 << 16  # items passed over between two updates of the checksum

MOST_BYTES = 64 << 20
"""Arrays above this are data, not an order that is shuffled in place: they are not copied. Lists: items of 8 bytes."""


def table_of(sampler: Any, epoch: int, seed: int) -> Table:
    """An epoch of any sampler as a table.

    Args:
        sampler: any sampler, or any iterable that can be read again and again. One that is foreign is started now.
        epoch: which epoch, from 0.
        seed: seeds a sampler of another library, together with the epoch. Other samplers have theirs.

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
    """The number of items in an epoch of any sampler.

    Raises:
        TypeError: a sampler of another library has no ``__len__``, or one that raises an error. Any error means that
            the length is unknown.
    """
    if is_own(sampler):
        return int(sampler.len_epoch(epoch))
    text = f"the sampler, {an(type(sampler))}, has no length"
    if not hasattr(type(sampler), "__len__"):
        raise TypeError(f"{text}: give its class a __len__ that returns the number of items in an epoch")
    try:
        return len(sampler)
    except Exception as error:  # other libraries raise what they like where a length is unknown
        raise TypeError(f"{text}: its __len__ raised {type(error).__name__}: {error}") from error


def known_length(sampler: object, epoch: int) -> int | None:
    """`len_epoch`; None if the sampler has no length, or would count it in a pass over the data."""
    if getattr(sampler, "counts_by_pass", False):
        return None
    try:
        return len_epoch(sampler, epoch)
    except (TypeError, NotImplementedError):
        return None


Start = Callable[[Checkpoint | None], AbstractContextManager[tuple[Iterator[Any], Any]]]
"""``with start(checkpoint) as (items, stateful)`` starts a sampler of another library.

The items begin where the sampler's own state in the checkpoint says; otherwise with the epoch, and the items before the
checkpoint are passed over inside the context. ``stateful`` is the object that can tell the sampler's state, or None.
"""


@contextmanager
def keyed(
    sampler: object, epoch: int, seed: int, mark: Checkpoint | None = None
) -> Iterator[tuple[Iterator[Any], Any]]:
    """Start another library's sampler by (seed, epoch), with its first item. With the last argument free, a `Start`."""
    state = None if mark is None else copy.deepcopy(mark.state)
    # set_epoch comes under the lock of seeded_globals too: two threads must not start one sampler at once.
    with seeded_globals(derive_key(seed, "foreign sampler", epoch)), _own_generators(sampler, epoch, seed):
        before = last_requests(nested(sampler))
        try:
            tell_epoch(sampler, epoch)
        finally:
            restore_requests(before)
        items, stateful = loaded(sampler, sampler if is_stateful(sampler) else None, state)
        first, rest = first_of(items)
    if not first and items is sampler and state is None:
        raise TypeError(f"the sampler, {an(type(sampler))}, has no items left for epoch {epoch}: {ONE_SHOT}")
    yield rest, stateful


def loaded(sampler: Any, stateful: Any, state: Any) -> tuple[Iterator[Any], Any]:
    """A sampler's iterator, and the object that can tell the sampler's own state; both go on from a state.

    Args:
        sampler: the sampler.
        stateful: the sampler, or one inside it, that has a state; None: its iterator may have one.
        state: None: the epoch begins.
    """
    if state is not None and stateful is not None:
        stateful.load_state_dict(state)
    try:
        items = iter(sampler)
    except StopIteration as error:  # a generator calls this, in which it would lose its name
        raise as_batch_error(error, "by the sampler") from error
    if stateful is None and is_stateful(items):
        stateful = items
        if state is not None:
            stateful.load_state_dict(state)
    return items, stateful


def first_of(items: Iterator[object]) -> tuple[list[Any], Iterator[Any]]:
    """The first item, which is drawn now, in a list; and all items."""
    # Not chain(first, items), which would call iter(items): some begin again then.
    rest = map(next, repeat(items))
    first = list(islice(rest, 1))
    return first, chain(first, rest)


def _is_torch_generator(value: object) -> bool:
    return type(value).__module__ == "torch._C" and hasattr(value, "initial_seed")


@contextmanager
def _own_generators(sampler: object, epoch: int, seed: int) -> Iterator[None]:
    """Exchange torch generators that other libraries' samplers carry (``RandomSampler(..., generator=g)``).

    ``g`` advances with every epoch, so the order would depend on history. The seed that ``g`` was given still counts.
    """
    exchanged = []
    try:
        for each in nested(sampler):
            generator: Any = getattr(each, "generator", None)
            if _is_torch_generator(generator):
                key = derive_key(seed, "foreign generator", generator.initial_seed(), epoch)
                twin = type(generator)(device=generator.device)
                seed_torch(twin, key)
                exchanged.append((each, generator))  # before the exchange: a Ctrl-C may strike between the two
                each.generator = twin
        yield
    finally:
        for each, generator in exchanged:
            each.generator = generator


@contextmanager
def undisturbed(samplers: Iterable[object], but: object = None) -> Iterator[None]:
    """Inside, other libraries' samplers may be read; afterwards they are what they were before.

    Inside, each has copies of the random generators, lists, dicts, sets and arrays that are its attributes. It cannot
    be seen what a sampler keeps elsewhere (in a file, in an object inside it, in compiled code).

    Args:
        samplers: those of other libraries. Samplers of this library need nothing: they are pure functions.
        but: an object that is not copied where a sampler refers to it: the dataset.
    """
    held = [getattr(sampler, "__dict__", None) for sampler in samplers]
    kept = [(attributes, dict(attributes)) for attributes in held if isinstance(attributes, dict)]
    try:
        for attributes, before in kept:
            attributes.update((name, _apart(value)) for name, value in before.items() if value is not but)
        yield
    finally:
        for attributes, before in kept:
            attributes.clear()
            attributes.update(before)


def _apart(value: Any) -> Any:
    """A copy, if the value is something that an order may be kept in and that changes; otherwise the value itself."""
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
    """What ``read(1)`` returns of an epoch of another library's sampler, if ``read(2)`` returns the same.

    The global generators are seeded otherwise each time. Not only the start depends on them: what comes later may, too.

    Raises:
        ValueError: it returns something else.
    """
    with seeded_globals(1):
        found = read(1)
    with seeded_globals(2):
        again = read(2)
    if bytes_of([found]) != bytes_of([again]):
        raise other_indices(sampler, epoch)
    return found


def other_indices(sampler: object, epoch: int) -> ValueError:
    """The error for an epoch that another library's sampler does not yield again."""
    return ValueError(
        f"epoch {epoch} cannot be looked up: the sampler, {an(type(sampler))}, yields other indices when it is read "
        f"again. It draws from a global generator, or goes on from the epoch before: make its order depend on "
        f"set_epoch(epoch) alone, or write down the indices while you train"
    )


def check_passed(sampler: object, mark: Checkpoint, items: int, checksum: int) -> None:
    """Reject a sampler that does not get to a checkpoint.

    Args:
        sampler: the sampler.
        mark: the checkpoint.
        items: the number of items that it has yielded now.
        checksum: of them.
    """
    if mark.rank != rank_of(sampler) or (items, checksum) == (mark.items, mark.checksum):
        return
    found = f"other indices in epoch {mark.epoch} than the {mark.items} before the state was saved"
    if items < mark.items:
        found = f"only {items} items in epoch {mark.epoch}, where it had yielded {mark.items}"
    advice = "Make it with the same arguments and seed as then, or give it state_dict() and load_state_dict()"
    raise ValueError(f"the state cannot be resumed: the sampler, {an(type(sampler))}, yields {found}. {advice}")


class ForeignItems:
    """The items of a sampler of another library, read once, from a checkpoint on.

    Args:
        sampler: the sampler.
        start: starts it.
        mark: the checkpoint; None: the epoch begins.

    Attributes:
        count: how many items were read or passed over.
        checksum: CRC-32 of them.
        ended: no item is left.
        rest: the items that are left. If they are not taken by `read`, the caller counts them.
        head: the items that were read first, if the epoch was read from its beginning.
        stateful: the sampler, or its iterator, if it has a state; otherwise None.

    Raises:
        ValueError: the items before the checkpoint are not those of then.
    """

    def __init__(self, sampler: object, start: Start, mark: Checkpoint | None = None) -> None:
        self.count = self.checksum = 0
        self.ended, self.head = False, list[Any]()
        self.rest: Iterator[Any] = iter(())
        self.stateful: Any = None
        if mark is not None and mark.finished:
            self.count, self.checksum, self.ended = mark.items, mark.checksum, True
            if mark.state is None:
                return
        with start(mark) as (self.rest, self.stateful):
            if self.ended:  # from its end the sampler goes on to the next epoch
                deque(self.rest, maxlen=0)
            elif mark is not None and mark.state is not None and self.stateful is not None:
                self.count, self.checksum = mark.items, mark.checksum
            elif mark is not None:
                self.pass_over(mark.items)
                check_passed(sampler, mark, self.count, self.checksum)

    def own_state(self) -> Any:
        """The state of the sampler, or of its iterator; None if it has none."""
        # A copy: some return the dict that they go on changing.
        return None if self.stateful is None else copy.deepcopy(self.stateful.state_dict())

    def read(self, count: int) -> list[Any]:
        """The next items; fewer at the end."""
        items = islice(self.rest, count)
        found = list(map(_copied, islice(items, 1)))
        is_index = bool(found) and type(found[0]) is int  # then there is nothing to copy, at 50 ns an item
        found += items if is_index else map(_copied, items)
        self.checksum = zlib.crc32(bytes_of(found), self.checksum)
        if not self.head and not self.count:
            self.head = found
        self.count, self.ended = self.count + len(found), len(found) < count
        return found

    def pass_over(self, items: int) -> None:
        """Read the epoch up to this number of items, or up to its end."""
        while self.count < items and not self.ended:
            self.read(min(_PART, items - self.count))

    def is_over(self) -> bool:
        """Whether no item is left: the next one is drawn."""
        ahead = list(islice(self.rest, 1))
        self.ended, self.rest = not ahead, chain(ahead, self.rest)
        return self.ended


class ReplayTable(Streamed):
    """One epoch of another library's sampler, read once, from a checkpoint on (None: from the beginning).

    Raises ValueError if the items before the checkpoint are not those of then, or are asked for and not yielded again.
    """

    def __init__(self, sampler: object, epoch: int, seed: int, checkpoint: Checkpoint | None = None) -> None:
        super().__init__(lambda start: iter(()))
        self._sampler, self.epoch, self._seed = sampler, epoch, seed
        self._rank, self._known_length = rank_of(sampler), known_length(sampler, epoch)
        mark = checkpoint or Checkpoint(epoch, 0, 0, None, False, None)
        resumes = mark.epoch == epoch and mark.items > 0
        if mark.finished and mark.epoch <= epoch and not resumes:
            ForeignItems(sampler, partial(keyed, sampler, mark.epoch, seed), mark)
        self._read_items = ForeignItems(sampler, partial(keyed, sampler, epoch, seed), mark if resumes else None)
        self._base, self._ended = self._read_items.count, self._read_items.ended
        self._good = mark.state if resumes and mark.finished else self._read_items.own_state()

    def checkpoint(self) -> Checkpoint:
        """The position after what has been read."""
        items = self._read_items
        if not self._ended:
            state = items.own_state()
            # Does it end where its length says?
            self._ended = items.count == self._known_length and items.is_over()
            # At the end a sampler may show the state of a new epoch: the last one before it is the one to go by.
            if not self._ended:
                self._good = state
        return Checkpoint(self.epoch, items.count, items.checksum, self._rank, self._ended, self._good)

    def _read(self, count: int) -> list[Any]:
        return self._read_items.read(count)

    def _jump(self, begin: int) -> None:
        self._read_items.pass_over(begin)
        self._base, self._buffer, self._ended = self._read_items.count, [], self._read_items.ended

    def _again(self, positions: Indices) -> list[Any]:
        head = self._read_items.head  # for the padding of ranks, which wraps round to the epoch's beginning
        if positions[-1] < len(head):
            return [head[position] for position in positions.tolist()]
        found = ReplayTable(self._sampler, self.epoch, self._seed).at(positions)
        if len(found) == len(positions):
            return found
        where = f"item {positions[0]} of epoch {self.epoch}, which the sampler, {an(type(self._sampler))}"
        raise ValueError(f"the state cannot be resumed: it goes on at {where}, has passed and does not yield again")


class Replay:
    """Another library's sampler that looks like one of ours: wrappers read it, and it knows how far they have read.

    The first epoch that is read goes on at ``checkpoint``: in the table that ``before`` has read up to there, if there
    is one. The items in front of it are then not read again.
    """

    def __init__(self, sampler: object, seed: int, checkpoint: Checkpoint | None, before: Replay | None = None) -> None:
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
        """The position after what has been read; None if no epoch was opened."""
        return None if self._table is None else self._table.checkpoint()

    def len_epoch(self, epoch: int) -> int:
        return len_epoch(self.sampler, epoch)


def over_replay(sampler: object, replay: Replay) -> Any:
    """The wrappers of another library's sampler, over its replay."""
    return sampler.over(over_replay(sampler.inner, replay)) if is_wrapper(sampler) else replay


LISTED = 4096
"""Items of a list that are read at once."""


class Listed:
    """A list, a tuple or a range as the sampler: read in blocks, at any position, with checkpoints.

    Args:
        items: what was given.
        mark: the epoch goes on here; None: it begins.
    """

    def __init__(self, items: Sequence[object], mark: Checkpoint | None) -> None:
        self._items, self._mark = items, mark
        self._passed = 0, 0  # a number of items, and their checksum: the next one goes on from there

    def epoch_table(self, epoch: int) -> Table:
        mark = self._mark
        if mark is not None and mark.epoch == epoch and mark.items:
            check_passed(self._items, mark, min(mark.items, len(self._items)), self._checksum(mark.items))
        return Table(len(self._items), self._at, LISTED)

    def len_epoch(self, epoch: int) -> int:
        return len(self._items)

    def _at(self, positions: Indices) -> Any:
        return as_numbers([self._items[position] for position in positions.tolist()])

    def checkpoint(self, epoch: int, items: int) -> Checkpoint:
        """The position after a number of items, or after all of them."""
        items = min(items, len(self._items))
        return Checkpoint(epoch, items, self._checksum(items), None, items == len(self._items), None)

    def _checksum(self, items: int) -> int:
        count, checksum = self._passed if self._passed[0] <= items else (0, 0)
        checksum = zlib.crc32(bytes_of(self._items[count:items]), checksum)
        self._passed = items, checksum
        return checksum


def name_of(sampler: object) -> str:
    """What an error calls a sampler."""
    return type(sampler.sampler if isinstance(sampler, Replay) else sampler).__name__


def rank_of(sampler: object) -> int | None:
    """The rank of a sampler that yields only its rank's items, as torch's DistributedSampler and Accelerate's do."""
    names = ("rank", "process_index")
    found = (getattr(each, name, None) for each in nested(sampler) for name in names)
    return next((rank for rank in found if isinstance(rank, int)), None)


def text_if_ranks_repeat(samplers: Iterable[object], environ: Mapping[str, str] = os.environ) -> str | None:
    """What to say if the ranks of a process group, or of WORLD_SIZE, would all read the same samples; otherwise None.

    Example:
        >>> text_if_ranks_repeat([], {"WORLD_SIZE": "2"})
        'this process is one of 2 ranks (WORLD_SIZE), and each reads the whole dataset: '
    """
    distributed, given = process_group(), environ.get("WORLD_SIZE", "").strip()
    ranks, known_from = int(given) if given.isdecimal() else 1, "(WORLD_SIZE)"
    if distributed is not None:
        ranks, known_from = int(distributed.get_world_size()), "(torch.distributed)"
    counts = ("num_replicas", "num_processes")  # of Accelerate's samplers
    for one in samplers if ranks > 1 else ():
        if rank_of(one) is not None or getattr(one, "is_part", False) or any(hasattr(one, name) for name in counts):
            return None
    text = f"this process is one of {ranks} ranks {known_from}, and each reads the whole dataset: "
    return text if ranks > 1 else None


def refuse_distributed_sampler(sampler: object) -> None:
    """Reject a sampler of torch's that shares out the samples, where the loader does."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DistributedSampler", ())
    if any(isinstance(one, kind) for one in nested(sampler)):
        raise ValueError("num_replicas and a torch DistributedSampler would share out the samples twice: leave out one")


def _copied(item: object) -> Any:
    """A batch of the sampler's own: it may fill its list again for the next batch while this one waits."""
    if type(item) is list:
        return [inner if type(inner) is int else _copied(inner) for inner in item]
    return item.copy() if isinstance(item, np.ndarray) else item
