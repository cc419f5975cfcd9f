"""Samplers of the drop-in, the start of any sampler, and one epoch of it: as in torch, or from a saved state.

    InOrderSampler(dataset).set_epoch(e)              without ``shuffle``: e selects the random numbers
    ShuffleSampler(dataset, generator).set_epoch(e); begin_state(); load_begin_state(state); end_state()
    EpochCount.next_epoch; named(sampler)             number of the epoch, if the shuffling sampler does not count
    SamplerState                                      entries of a state about the sampler
    SamplerStart(sampler, state, finished, epochs)    starts a sampler; `started` is a `sampling.third_party.Start`
    DrawnItems(start)                                 items of the sampler, and its position after each
    TorchEpoch(start, ...)                            batches of them, and the states of the workers' datasets
    TorchEpoch.task(seq) -> Task                      batch i is read by worker i % num_workers, as in torch

With ``seed=``, the seed and the number of the epoch decide the order of ``shuffle=True``. Otherwise it is torch's: the
user's generator, or a seed from the default one for each epoch, and ``set_epoch`` has no influence.

The user's sampler is no function of (seed, epoch): it draws from the same generators as under torch. `SamplerStart`
saves the states of those generators before the start, and restores them to resume. An error of the sampler's start is
raised in the place of its first item.
"""

# ruff: noqa: RUF009 - entries make fields

from __future__ import annotations

import contextlib
import copy
import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import Any, NamedTuple

import torch
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, SequentialSampler
from torch.utils.data.sampler import SubsetRandomSampler, WeightedRandomSampler

from sharded_loader.extend import NOTHING, Epoch, Nothing, PartPoint, Position, Result, Sampler, Task
from sharded_loader.extend import order as core
from sharded_loader.extend.data import is_stateful
from sharded_loader.extend.engine import EpochRequest, PartBatch, new_request, sampler_error
from sharded_loader.extend.tools import an, brief, check_fits, check_int, entries, is_from_outside, pass_on


class ShuffleSampler(RandomSampler):
    """Indices in random order, another one for each epoch.

    ``seed`` decides all epochs, whatever the generators say. ``is_named`` is True if `set_epoch` has chosen ``epoch``,
    the next one, since a state was loaded.

    Example:
        >>> sampler = ShuffleSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first
        True
    """

    def __init__(self, data_source: Any, generator: Any = None, seed: int | None = None) -> None:
        super().__init__(data_source, generator=generator)
        self.seed, self.epoch, self.is_named = seed, 0, False
        self._expected: int | None = None  # replaces the next drawn seed
        self._next: tuple[int, int] | None = None  # seed and number of the next epoch, once drawn

    def set_epoch(self, epoch: int) -> None:
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        self.is_named = True

    def __iter__(self) -> Iterator[int]:
        # As with torch's generator function, the seed is drawn with the first index. But no Python function runs for
        # each index: `BatchSampler` takes a batch of 256 in 4 us of CPU time. With a generator function it takes 9 us.
        return itertools.chain.from_iterable(self._orders())

    def _orders(self) -> Iterator[Iterable[int]]:
        self.is_named = False
        if self.generator is not None and self.seed is None:
            yield super().__iter__()
            return
        seed, epoch = self._decided()
        self._next, self.epoch = None, self.epoch + 1
        count, advice = len(self.data_source), "give num_replicas=1, whose shuffle needs none of it"
        check_fits(48 * count, f"torch's shuffle has all {count:,} indices in memory", advice)
        generator = torch.Generator()
        # torch accepts seeds in this range only.
        is_torchs = epoch == 0 and -(1 << 63) <= seed < 1 << 64
        generator.manual_seed(seed if is_torchs else core.derive_key(seed, "shuffle", epoch) >> 65)
        yield torch.randperm(count, generator=generator, device="cpu").tolist()

    def _decided(self) -> tuple[int, int]:
        """Return the seed and the number that decide the next epoch; number 0 is torch's order."""
        if self.seed is not None:
            return self.seed, self.epoch
        if self._next is None:
            drawn = draw_seed()  # always, to advance the generator
            self._next, self._expected = (drawn if self._expected is None else self._expected, 0), None
        return self._next

    def load_end_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch the one after a state of `end_state`, or the one named by ``set_epoch``."""
        is_named, epoch = self.is_named, self.epoch
        self.load_begin_state(state)
        if is_named:
            self.set_epoch(epoch)

    def expect(self, seed: int | None) -> None:
        """Use this seed next, unless the user's seed decides. None: draw one."""
        self._next, self._expected = None, seed  # discard the draw of an iterator that has read nothing

    def begin_state(self, before: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the facts that decide the next epoch; a seed it needs is drawn now, once.

        ``before`` is the previous result for the same iterator: others may have drawn, or begun, since.
        """
        self._next = (before or {}).get("next", self._next)
        draws = self.generator is None and self.seed is None
        return {"next": list(self._decided())} if draws else self.end_state()

    def end_state(self) -> dict[str, Any]:
        """Return the facts that decide the epochs after this one, as far as its end determines them. Draws nothing."""
        if self.seed is not None:
            return {"seed": self.seed, "epoch": self.epoch}
        return {} if self.generator is None else {"generator": self.generator.get_state().tolist()}

    def load_begin_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch the one of a state returned by `begin_state` or `end_state`."""
        if "generator" in state:
            if self.generator is None:
                self.generator = torch.Generator()
            set_generator(self.generator, state["generator"])
        if "seed" in state:
            self.seed, self.epoch = state["seed"], state["epoch"]
        self._next, self.is_named = tuple(state["next"]) if "next" in state else None, False


class InOrderSampler(SequentialSampler):
    """Indices in order, with the ``set_epoch`` that trainers call; random numbers of samples depend on ``epoch``."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)


class EpochCount:
    """Counter of a loader's epochs, which continues from the epoch that ``set_epoch`` of a sampler names.

    ``request`` is the last call of ``set_epoch`` of the loader, or None.
    """

    def __init__(self) -> None:
        self.next_epoch = self._seen = 0
        self.request: EpochRequest | None = None

    def note(self, epoch: int) -> None:
        self.request, self.next_epoch = new_request(epoch), epoch

    def set_epoch(self, epoch: int) -> None:
        self.next_epoch = epoch

    def named(self, sampler: object) -> int | None:
        """Return the epoch newly named by ``set_epoch`` of an `InOrderSampler` or `DistributedSampler`, or None."""
        kinds = (InOrderSampler, DistributedSampler)
        found = next((int(one.epoch) for one in core.nested(sampler) if isinstance(one, kinds)), self._seen)
        is_new, self._seen = found != self._seen, found
        return found if is_new else None


# -- how a sampler starts ----------------------------------------------------------------------------------------------


def _list_of(read: entries.Reader) -> entries.Reader:
    """Read a list, as `entries.list_of` does, as a new list."""
    return lambda what, value, advice: list(entries.list_of(read)(what, value, advice))


def pair(what: str, value: Any, advice: str) -> list[int]:
    """Read a list of two numbers."""
    found: list[int] = _list_of(entries.integer())(what, value, advice)
    if len(found) != 2:
        raise ValueError(f"{what} is {brief(value)}; it must be a list of two numbers: {advice}")
    return found


def _shuffle(what: str, value: Any, advice: str) -> dict[str, Any]:
    """Read what `ShuffleSampler.begin_state` or ``end_state`` returned."""
    readers = {"next": pair, "generator": _list_of(entries.integer(0))}
    readers |= {"seed": entries.integer(), "epoch": entries.integer(0)}
    given = entries.instance(dict, "a dict")(what, value, advice)
    found = {name: entries.read_entry(given, name, readers[name], advice, what) for name in given if name in readers}
    if ("seed" in found) != ("epoch" in found):
        raise ValueError(f"{what} is {brief(value)}, without seed or epoch: {advice}")
    return found


@dataclass
class SamplerState:
    """Entries of a state about the sampler and the workers' datasets, under ``_sampler``.

    Attributes:
        yielded: Number of items delivered before the first that was not.
        checksum: CRC-32 of those items.
        rank: Rank of a sampler that yields its rank's items; the checksum is valid for that rank only.
        shuffle: Facts that decide the order of `ShuffleSampler` in this epoch; at its end, in later ones.
        rng: States of the generators when the sampler was asked for its iterator, and for its first item.
        epochs: Epochs named by ``set_epoch`` of the samplers.
        ahead: Numbers of items delivered out of order, beyond one that was not.
        over: True if no item is left; only for a sampler with a state.
        own: The sampler's own state.
        generators: States of the sampler's own generators at the end of the epoch.
        datasets: State of each worker's dataset.
        weights: Weights that were changed, of samplers of this library.
    """

    yielded: int = entries.entry(entries.integer(0))
    checksum: int = entries.entry(entries.integer(0))
    rank: int | None = entries.entry(entries.anything, default=None)
    shuffle: dict[str, Any] | None = entries.entry(entries.optional(_shuffle), default=None)
    rng: list[list[str]] | None = entries.entry(entries.optional(_list_of(_list_of(entries.string))), default=None)
    epochs: list[int] | None = entries.entry(entries.optional(_list_of(entries.integer())), default=None)
    ahead: list[int] | None = entries.entry(entries.optional(_list_of(entries.integer(0))), default=None)
    over: bool | None = entries.entry(entries.optional(entries.true_or_false), default=None)
    own: Any = entries.entry(entries.anything, write=copy.deepcopy, name="state", default=None)
    generators: list[str] | None = entries.entry(entries.optional(_list_of(entries.string)), default=None)
    datasets: list[Any] | None = entries.entry(
        entries.optional(_list_of(entries.anything)), write=copy.deepcopy, default=None
    )
    weights: dict[str, str] | None = entries.entry(entries.optional(entries.instance(dict, "a dict")), default=None)


_PLAIN = (BatchSampler, SequentialSampler, InOrderSampler, list, tuple, range)
"""Samplers whose order never changes."""

_DRAW_ONCE = (*_PLAIN, ShuffleSampler, RandomSampler, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that draw from the global generators at their first item only."""


def keep_epochs(sampler: object) -> list[Any]:
    """Return the samplers that keep the epoch of their ``set_epoch``, such as torch's `DistributedSampler`."""
    others = (one for one in core.nested(sampler) if hasattr(one, "set_epoch") and not isinstance(one, ShuffleSampler))
    return [one for one in others if isinstance(getattr(one, "epoch", None), int)]


def generator_state(generator: torch.Generator) -> str:
    """Return the state of a generator as text, for states in JSON."""
    return bytes(generator.get_state().numpy()).hex()


def set_generator(generator: torch.Generator, state: str | list[int]) -> None:
    """Restore a generator from the result of `generator_state`, or from its bytes as a list."""
    try:
        found = bytearray.fromhex(state) if isinstance(state, str) else bytearray(state)
        generator.set_state(torch.frombuffer(found, dtype=torch.uint8))
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"the state of a generator, in the loader's state, is {brief(state)}"
        raise ValueError(f"{text}: give what state_dict() has returned ({error})") from None


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Draw a seed as torch does, from its default generator or another one, whatever the default device is."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def next_draws(count: int) -> list[int]:
    """Return the next numbers that torch's default generator will give to loaders and samplers."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return [draw_seed(generator) for _ in range(count)]


class SamplerStart:
    """Start of a sampler, at the beginning of an epoch or at a saved state.

    Generator states are saved twice: when the sampler is asked for its iterator, and when that is asked for its first
    item. torch's samplers draw at the second moment; in between, the loader may draw the seed of its workers.

    Args:
        state: Position to continue at. None: begin an epoch.
        finished: The state was saved at the end of its epoch, and the next one begins.

    Attributes:
        state: Beginning of this iteration, and the facts that decide its order.
        resumes: The sampler continues in the middle of an epoch.
        may_draw: The sampler may draw from the global generators for any item. The order may then depend on draws of
            the program between batches, so each item must be asked for when torch does.
        has_set_epoch: The program may call ``set_epoch`` between ``iter(loader)`` and the first ``next``.
    """

    def __init__(self, sampler: Any, state: SamplerState | None, finished: bool, epochs: EpochCount) -> None:
        self.sampler, self._epochs = sampler, epochs
        self.shuffle = next((one for one in core.nested(sampler) if type(one) is ShuffleSampler), None)
        plain = all(type(one) in _PLAIN or one is self.shuffle for one in core.nested(sampler))
        self.stateful = None if plain else next(filter(is_stateful, core.nested(sampler)), None)
        self._draws = not plain and self.stateful is None
        self.may_draw = not all(type(one) in _DRAW_ONCE for one in core.nested(sampler))
        self.has_set_epoch = any(hasattr(one, "set_epoch") for one in core.nested(sampler))
        self._keep_epochs = keep_epochs(sampler)
        # Samplers of this library count on when asked for their items: keep the epoch that they begin.
        self._counted = [(one, one.epoch) for one in self._keep_epochs if isinstance(one, Sampler) and core.is_own(one)]
        # ``generator`` comes first for each sampler, whatever the order of its attributes: states rely on this order.
        others = [one for one in core.nested(sampler) if one is not self.shuffle]
        attributes = [(getattr(one, "generator", None), *getattr(one, "__dict__", {}).values()) for one in others]
        values = itertools.chain([torch.default_generator], *attributes)
        self._sources = list({id(value): value for value in values if isinstance(value, torch.Generator)}.values())
        self.resumes = state is not None and not finished
        if state is not None and finished:
            if self.shuffle is not None and state.shuffle is not None:
                self.shuffle.load_end_state(state.shuffle)
            if self.stateful is not None and state.own is not None:
                self._load_between(state.own)
            _set_all(self._sources[1:], state.generators)
            before = dict(zip(map(id, self._keep_epochs), state.epochs or (), strict=False))
            self._counted = [(one, before.get(id(one), epoch - 1) + 1) for one, epoch in self._counted]
            self._set_counted()
        self.state = state if state is not None and self.resumes else SamplerState(0, 0)
        self._asked: Iterator[Any] = iter(())
        self._has_begun = False  # the draws for the first item may have been made
        self._parts = [*core.nested(sampler)]
        self._note()

    @property
    def is_outdated(self) -> bool:
        """True if a sampler inside was replaced. Accelerate does so after it has asked for the loader's state."""
        now = [*core.nested(self.sampler)]
        return len(now) != len(self._parts) or any(one is not part for one, part in zip(now, self._parts, strict=True))

    def _set_counted(self, done: int = 0) -> None:
        for sampler, epoch in self._counted:
            sampler.epoch = epoch + done

    def put_back(self) -> None:
        """Undo that samplers without a state count on when asked for items: they do so with the first item."""
        if self._draws:
            self._set_counted()

    def _load_between(self, own: object) -> None:
        """Load a state from between two epochs, so that the sampler's next iterator begins the next epoch.

        After a state from the end, the first iterator of some samplers continues at that end, and is empty.
        """
        assert self.stateful is not None  # otherwise there is no such state
        self.stateful.load_state_dict(copy.deepcopy(own))
        with contextlib.suppress(Exception):
            if list(itertools.islice(self.stateful, 1)):
                self.stateful.load_state_dict(copy.deepcopy(own))

    def again(self, items: int, checksum: int, own: object) -> SamplerStart:
        """Return a start that begins the epoch again and skips ``items``; the arguments are those of `SamplerState`."""
        if items == self.state.yielded and not self._has_begun:
            return self
        state = replace(self.state, yielded=items, checksum=checksum, rank=core.rank_of(self.sampler), own=own)
        return SamplerStart(self.sampler, state, False, self._epochs)

    def _note(self) -> None:
        """Save the states of the generators, or of the sampler, before its iterator is created."""
        if not self.resumes and self._draws:
            self.state.rng = [self._generator_states()]
        elif not self.resumes and self.stateful is not None:
            self.state.own = copy.deepcopy(self.stateful.state_dict())

    def _generator_states(self) -> list[str]:
        return list(map(generator_state, self._sources))

    def begin(self, items: Any = None) -> None:
        """Ask the sampler for its items from its beginning, unless torch's iterator has already (``items``)."""
        if items is None:
            self._note()
            self._set_counted()
            items = iter(self.sampler)
            self.put_back()
        self._asked = items

    def draw_seed(self) -> None:
        """Have the `ShuffleSampler` draw its seed now; its ``set_epoch`` may still follow.

        After a resume, give the samplers the epoch of the state, because Fabric names epochs from 0 on.
        """
        if self.resumes:
            for sampler, epoch in zip(self._keep_epochs, self.state.epochs or (), strict=False):
                sampler.set_epoch(epoch)
        elif self.shuffle is not None:
            self.state.shuffle = self.shuffle.begin_state(self.state.shuffle)

    def first(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the same items, after the sampler has made the draws for its first one."""
        if not self.resumes and self._keep_epochs:
            ahead = int(not self._draws)
            may_be_updated = self._draws and any(map(core.has_weights, core.nested(self.sampler)))
            # set_epoch was called since, or perhaps update
            if may_be_updated or any(one.epoch != epoch + ahead for one, epoch in self._counted):
                self._counted = [(one, one.epoch) for one, _ in self._counted]
                items = iter(self.sampler)
                self.put_back()
            counted = {id(one): epoch for one, epoch in self._counted}
            self.state.epochs = [counted.get(id(one), one.epoch) for one in self._keep_epochs]
        if not self.resumes and self.state.rng is not None and (now := self._generator_states()) not in self.state.rng:
            self.state.rng.append(now)
        self._has_begun = True
        if is_stateful(items) or not self._draws:
            return items
        try:
            items = core.first_of(self._of_named_epoch(items))[1]
        except Exception as error:
            pass_on(error)
            items = raising(error)
        if not self.resumes:
            self._set_counted(1)
        return items

    def _of_named_epoch(self, items: Iterator[Any]) -> Iterator[Any]:
        """Return the items of the epoch named by ``set_epoch`` since the sampler was asked for them."""
        if not self.has_set_epoch or isinstance(items, GeneratorType):  # a generator has not begun
            return items
        before = self._generator_states()
        again: Iterator[Any] = iter(self.sampler)
        if before == self._generator_states():
            return again
        _set_all(self._sources, before)  # its iterator draws when created: torch creates one
        return items

    def epoch_of_seed(self) -> int | None:
        """Return the epoch of the sampler that shuffles by a seed; None without one."""
        if self.shuffle is None or self.shuffle.seed is None:
            return None
        return int((self.state.shuffle or {}).get("epoch", self.shuffle.epoch))

    def epoch(self, counted: int) -> int:
        """Return the number of the epoch: named by ``set_epoch``, or counted by the loader."""
        named, seeded = self._epochs.named(self.sampler), self.epoch_of_seed()
        if seeded is not None or named is None or self.resumes:
            return counted if seeded is None else seeded
        self._epochs.next_epoch += named - counted  # one more only if the epoch has begun: a state may ask
        return named

    def set_end(self, state: SamplerState) -> None:
        """Add the facts that decide later epochs to a state of the epoch's end."""
        if self.shuffle is not None:
            state.shuffle = self.shuffle.end_state()
        if self._draws and self._sources[1:]:
            state.generators = self._generator_states()[1:]

    @contextlib.contextmanager
    def started(self, mark: core.Checkpoint | None) -> Iterator[tuple[Iterator[Any], Any]]:
        """Yield the items, and the object with the sampler's state or None; see `sampling.third_party.Start`."""
        if mark is not None and self.shuffle is not None and self.state.shuffle is not None:
            self.shuffle.load_begin_state(self.state.shuffle)
        if mark is None:
            items = self.first(self._asked)
            yield items, self.stateful or (items if is_stateful(items) else None)
        elif mark.state is None or self.stateful is None:
            saved = (self.state.rng if self._draws else None) or [[]]
            with torch.random.fork_rng(devices=[]):
                _set_all(self._sources, saved[0])
                items, stateful = core.loaded(self.sampler, self.stateful, copy.deepcopy(mark.state))
                if mark.state is None or stateful is None:
                    _set_all(self._sources, saved[-1])
                    items = self.first(items)
                yield items, stateful
        elif mark.finished or not mark.items:
            self._load_between(mark.state)
            yield iter(() if mark.finished else self.sampler), self.stateful
        else:
            yield core.loaded(self.sampler, self.stateful, copy.deepcopy(mark.state))


# -- one epoch ---------------------------------------------------------------------------------------------------------


class DrawnItems:
    """Items of a sampler, drawn one by one, and its position after each of them.

    Attributes:
        start: Start of the sampler; after an interruption, at the interrupted item.
        number: Number of the next item.
        marks: By the number of the next item: the checksum of those before it, and the sampler's state there.
        length: Total number of items, if the sampler has a length and is started.
        has_ended: No item is left, or the sampler has raised an error.
        is_open: An item was asked for, but not recorded: at the next request, the sign of an interrupt (Ctrl-C,
            signal).
    """

    def __init__(self, start: SamplerStart) -> None:
        state = start.state
        self.start, self.number = start, state.yielded
        self.marks: dict[int, tuple[int, Any]] = {state.yielded: (state.checksum, state.own)}
        self.items: core.ThirdPartyItems | None = None
        self.length: int | None = None
        self.is_started = self.has_ended = self.is_open = False

    def begin(self, epoch: int) -> None:
        """Start the sampler, unless it has started; it makes the draws for its first item now."""
        if self.is_started:
            return
        self.is_started = self.has_ended = self.is_open = True  # unless it starts
        mark, at = None, self.start.state
        if self.start.resumes:
            mark = core.Checkpoint(epoch, at.yielded, at.checksum, at.rank, bool(at.over), at.own)
        try:
            self.items = core.ThirdPartyItems(self.start.sampler, self.start.started, mark)
        except Exception as error:
            self.is_open = is_from_outside(error)
            raise
        self.length = core.known_length(self.start.sampler, epoch, announce=False)
        self.has_ended = self.is_open = False

    def again(self) -> None:
        """Have `begin` restart the sampler at the interruption, because an interrupted generator has ended."""
        self.start = self.start.again(self.number, *self.marks[self.number])
        self.start.draw_seed()
        self.is_started = False

    def draw(self, items: core.ThirdPartyItems) -> Any:
        """Return the next item, or `NOTHING` at the end; the draw is complete when `number` is set behind it."""
        self.is_open = True
        try:
            item = next(items.rest)
            items.checksum = zlib.crc32(core.bytes_of_one(item), items.checksum)
        except StopIteration:
            self.has_ended, self.is_open = True, False
            return NOTHING
        except Exception as error:
            self.has_ended, self.is_open = True, is_from_outside(error)
            raise
        self.marks[self.number + 1] = items.checksum, None if items.stateful is None else items.own_state()
        return item

    def look_for_end(self, items: core.ThirdPartyItems) -> None:
        """Ask the sampler for its end, once as many items were drawn as it has.

        Some samplers draw at their end: a loop that never asks for more than the last batch, and a resumed loop, which
        must, then go on alike. Not for samplers whose epochs trainers name, and which they read in between.
        """
        if items.stateful is None and not keep_epochs(self.start.sampler):
            try:
                self.has_ended = items.is_over()
            except Exception as error:  # raised with the next batch
                pass_on(error)
                items.rest = raising(error)


class _Planned(NamedTuple):
    """Batch in flight.

    Attributes:
        number: Number of the sampler's item.
        lane: Worker that reads it, if the dataset has a state.
        turn: Number of batches that this worker had before.
        point: Position of the worker after it, with the state of its dataset, once received.
    """

    number: int
    item: Any
    lane: int
    turn: int
    left_out: bool = False
    point: PartPoint | None = None


Points = Mapping[int, PartPoint]
"""Position of each worker, with the state of its dataset; new workers are missing."""

Skips = Callable[[int], Sequence[range]]
"""Function from an epoch's number to the item numbers to leave out."""


class TorchEpoch(Epoch):
    """One epoch of the user's sampler, read as torch reads it: once, from its beginning, in this process.

    An error of the sampler is raised in the batch's place, and ends the epoch. A sampler resumes when the first batch
    is asked for, because trainers call its ``set_epoch`` after ``iter(loader)``.

    Args:
        lanes: Number of workers, at least 1.
        batched: Whether an item is a list of indices; otherwise a single index.
        points: Positions of the workers at the beginning.
        keeps_state: The dataset has a state, which each worker keeps.
    """

    takes_turns = True

    def __init__(
        self, start: SamplerStart, lanes: int, batched: bool, points: Points, keeps_state: bool, skips: Skips
    ) -> None:
        self.drawn, self._batched, self._skips = DrawnItems(start), batched, skips
        self._left_out: Sequence[range] = ()
        state = start.state
        self.first = self._low = self._coming = self._passed = state.yielded
        self.number = 0
        self._planned: dict[int, _Planned] = {}  # by seq
        # Items delivered beyond one that was not, with in_order=False.
        self._ahead: set[int] = set(state.ahead or ())
        self._keeps_state = keeps_state
        self._unread: Any = None
        self._points = {**dict.fromkeys(range(lanes), PartPoint()), **points}
        self._turns = [self._points[lane].batches for lane in range(lanes)]  # batches of each worker so far

    def task(self, seq: int) -> Task | Exception | Nothing | None:
        """Return batch ``seq`` as a task, its error, `NOTHING` if left out, or None after the last one."""
        try:
            planned = self.batch(seq)
        except Exception as raised:
            return sampler_error(raised, f" at batch {seq}")
        if planned is None or planned.left_out:
            return None if planned is None else NOTHING
        indices = planned.item if self._batched else (planned.item,)
        if type(indices) is not tuple and not hasattr(indices, "cut"):
            try:
                indices = list(indices)  # a sampler may reuse its list
            except TypeError:
                text = f"epoch {self.number}, batch {seq}: the batch sampler yielded {brief(indices)}"
                return TypeError(f"{text}, {an(type(indices))}; it must yield lists of indices")
        # With any order, or a changing number of workers, a batch goes to the least busy worker.
        lane: int | None = seq % len(self._turns) if self.takes_turns and not self.any_order else None
        part: PartBatch | None = None
        if self._keeps_state:  # the state that the worker's dataset must have before this batch
            lane = planned.lane
            part = PartBatch(0, 0, lane, planned.turn, self.points_after(seq)[lane])
        return Task(self.run, seq, self.number, seq, (indices,), False, False, lane, part)

    def batch(self, seq: int) -> _Planned | None:
        """Read the sampler up to batch ``seq`` and return it; None after the last one."""
        drawn = self.drawn
        if drawn.is_open:
            drawn.again()
        if drawn.number == self.first or drawn.is_open:
            self.begin()
        items = drawn.items
        while items is not None and self._coming <= seq and not drawn.has_ended:
            number, coming, item = drawn.number, self._coming, drawn.draw(items)
            if drawn.has_ended:
                break
            # In one statement: an interruption before it restarts the sampler before this item.
            if number in self._ahead:
                drawn.number, drawn.is_open = number + 1, False
            else:
                lane = coming % len(self._turns)
                turn = self._turns[lane]
                left_out = bool(self._left_out) and any(number in one for one in self._left_out)
                self._planned[coming] = _Planned(number, item, lane, turn, left_out)
                following = turn + (not left_out), coming + 1, number + 1, False
                self._turns[lane], self._coming, drawn.number, drawn.is_open = following
            if drawn.number == drawn.length:
                drawn.look_for_end(items)
        return self._planned.get(seq)

    def ends_after(self, delivered: int) -> bool:
        """Return True if no batch is left. A sampler with a state may yield more than its length."""
        drawn, items = self.drawn, self.drawn.items
        is_at_end = items is not None and items.stateful is None and drawn.number == drawn.length
        return (drawn.has_ended or is_at_end) and delivered == self._coming

    def begin(self) -> None:
        drawn = self.drawn
        if drawn.number == self.first and not drawn.has_ended:
            drawn.start.draw_seed()
            self.number = drawn.start.epoch(self.number)
            self._left_out = self._skips(self.number)
        drawn.begin(self.number)

    def record_result(self, seq: int, result: Result) -> Result:
        """Record the state of the worker's dataset that came with a batch."""
        if result.point is not None:
            self._planned[seq] = self._planned[seq]._replace(point=result.point)
        return result

    def primed(self, dataset: Any) -> None:
        """Note the dataset in this process, whose state before the first batch is asked for when the loader's is."""
        self._unread = dataset

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        return (self._planned,)

    def forget(self, delivered: int) -> None:
        """Drop the records of batches before the last delivered one."""
        for seq in range(self._passed, delivered - 1):  # safe to repeat after an interruption
            planned = self._planned.get(seq)
            if planned is not None and planned.number >= self._low:
                self._ahead.add(planned.number)
            if planned is not None and planned.point is not None:
                self._points[planned.lane] = planned.point
            while (low := self._low) in self._ahead:
                self._low = low + 1
                self.drawn.marks.pop(low, None)
                self._ahead.discard(low)
            self._planned.pop(seq, None)
            self._passed = seq + 1

    # -- positions ------------------------------------------------------------------------------------------

    def length(self) -> int:
        return len(self.drawn.start.sampler)

    def discarded(self) -> tuple[int, str]:
        one = self.drawn.start.sampler
        # Only torch's own class: subclasses may choose batches differently, or lack these attributes.
        cuts = type(one) is BatchSampler and one.drop_last and self.drawn.has_ended
        count = (core.known_length(one.sampler, 0, announce=False) or 0) % one.batch_size if cuts else 0
        return count, "" if self.drawn.number else "the whole epoch"

    def points_after(self, delivered: int) -> dict[int, PartPoint]:
        """Return the position of each worker after ``delivered`` batches, with the state of its dataset."""
        points = dict(self._points)
        for seq in sorted(self._planned) if self._keeps_state else ():
            planned = self._planned[seq]
            if seq < delivered and planned.point is not None:
                points[planned.lane] = planned.point
        return points

    def position(self, delivered: int, finished: bool = False) -> Position:
        """Return the position after ``delivered`` batches, with the state of each worker's dataset.

        A sampler that has drawn nothing draws now. ``finished``: the user has seen the end of the epoch.
        """
        points, drawn, start = self.points_after(delivered), self.drawn, self.drawn.start
        if start.resumes and not drawn.is_started:
            return Position(self.number, self.first, start.state, {}, points)
        self.begin()
        if self._unread is not None and points[0].state is None:  # now, as a sampler may share its random numbers
            points[0] = PartPoint(state=copy.deepcopy(self._unread.state_dict()))
        low = self._low
        ahead = self._ahead | {planned.number for seq, planned in self._planned.items() if seq < delivered}
        while low in ahead:
            low += 1
        checksum, own = drawn.marks[low]
        state = replace(start.state, yielded=low, checksum=checksum, rank=core.rank_of(start.sampler), own=own)
        state.ahead = sorted(number for number in ahead if number > low) or None
        state.over = state.generators = state.datasets = None  # leftovers of the loaded state
        state.weights = dict(core.weights_set(core.nested(start.sampler))) or None
        if finished:
            state.own = None if drawn.items is None else drawn.items.own_state()
            start.set_end(state)
        elif own is not None and start.stateful is not None and low == drawn.number > 0:
            # After a short batch the sampler has passed its end, and its state is that of the next epoch.
            state.over = self.batch(delivered) is None
        if self._keeps_state:
            state.datasets = [point.state for point in points.values()]
        return Position(self.number, low, state, {}, points)

    def state(self, position: Position) -> dict[str, Any]:
        return entries.to_state(position.mark)


def _set_all(generators: Iterable[torch.Generator], states: Iterable[str] | None) -> None:
    for generator, state in zip(generators, states or (), strict=False):
        set_generator(generator, state)


def raising(error: Exception) -> Iterator[Any]:
    """Return an iterator whose first item is this error."""
    raise error
    yield
