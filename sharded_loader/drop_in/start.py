"""How a sampler of the user's is started: at its beginning, at the beginning of a later epoch, or in the middle of one.

    SamplerStart(sampler, state, finished)     loads what a state says of the epoch's end
    begin()                                    the sampler is asked for its items, from its beginning
    started(checkpoint)                        its items, from there or from where the state was taken
    state, own, end_state()                    what decides the order of this epoch, and of those after it

`SamplerStart.started` is a `Start` of `sharded_loader.sampling.foreign`, which reads the items and checks those before
a state. Nothing of the sampler is a function of (seed, epoch) here: it draws from the generators that it draws from
under torch. So those generators are noted before it is started, and put back for the start if a state is loaded.

What can go wrong: the sampler raises an error at its first item. It comes as the error of that item.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from sharded_loader.data.inspection import is_stateful
from sharded_loader.drop_in.sampler import EpochCount, InOrderSampler, ShuffleSampler
from sharded_loader.sampling.base import nested
from sharded_loader.sampling.foreign import first_of, loaded
from sharded_loader.sampling.state import Checkpoint

_PLAIN = (BatchSampler, SequentialSampler, InOrderSampler, list, tuple, range)
"""Samplers whose order is always the same."""

_DRAW_AT_FIRST = (
    *(*_PLAIN, ShuffleSampler, RandomSampler),
    *(SubsetRandomSampler, WeightedRandomSampler, DistributedSampler),
)
"""Samplers that draw from the global generators at their first item only."""


def tellable(sampler: Any) -> list[Any]:
    """The samplers that take their epoch from ``set_epoch`` and keep it, as torch's `DistributedSampler`."""
    return [
        one
        for one in nested(sampler)
        if not isinstance(one, ShuffleSampler)
        and isinstance(getattr(one, "epoch", None), int)
        and hasattr(one, "set_epoch")
    ]


def generator_state(generator: torch.Generator) -> str:
    """The state of a generator as text, for a state that may become JSON."""
    return bytes(generator.get_state().numpy()).hex()


def set_generator(generator: torch.Generator, state: str) -> None:
    """Give a generator a state that `generator_state` has returned."""
    generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))


def next_draws(count: int) -> list[int]:
    """The next numbers that torch's default generator will give to loaders and samplers."""
    generator = torch.Generator()
    generator.set_state(torch.get_rng_state())
    return [int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()) for _ in range(count)]


class SamplerStart:
    """Starts a sampler.

    What it draws from is noted at two moments: when it is asked for its iterator, and when that is asked for its first
    item. Samplers of torch draw at the second one. In between, the loader may draw the seed of its workers.

    Args:
        sampler: the user's: of batches, or of single indices.
        state: what `TorchEpoch.state` has returned; None: at its beginning.
        finished: the state was taken at the end of its epoch, and the next one begins.
        epochs: counts the loader's epochs.

    Attributes:
        state: what decides the order of this epoch.
        own: the sampler's own state at the beginning of this epoch; None if it has none.
        loaded: the state of the middle of an epoch; None: the sampler starts at its beginning.
        may_draw: it may draw from the global generators for any of its items. So the order may depend on what the user
            draws between two batches, and the loader must ask for each item when torch does.
        may_be_told: it has ``set_epoch``, which may come between ``iter(loader)`` and the first ``next``.
    """

    def __init__(self, sampler: Any, state: dict[str, Any] | None, finished: bool, epochs: EpochCount) -> None:
        self.sampler, self._epochs = sampler, epochs
        self.shuffle = next((one for one in nested(sampler) if type(one) is ShuffleSampler), None)
        plain = all(type(one) in _PLAIN or one is self.shuffle for one in nested(sampler))
        self.stateful = None if plain else next(filter(is_stateful, nested(sampler)), None)
        self._draws = not plain and self.stateful is None
        self.may_draw = not all(type(one) in _DRAW_AT_FIRST for one in nested(sampler))
        self.may_be_told = any(hasattr(one, "set_epoch") for one in nested(sampler))
        self._tellable = tellable(sampler)
        found = [value for one in nested(sampler) if one is not self.shuffle for value in _attributes(one)]
        own = {id(one): one for one in found if isinstance(one, torch.Generator)}
        self._sources = [torch.default_generator, *own.values()]
        self.loaded = None if finished else state
        self.state: dict[str, Any] = {}
        self.own: Any = None
        self._asked: Iterator[Any] = iter(())
        if state is not None and finished:
            self._load_end(state)
        elif state is not None:
            self.state = {name: value for name, value in state.items() if name in ("shuffle", "rng", "epochs")}
            self.own = state.get("state")
        self._note()

    def _load_end(self, state: dict[str, Any]) -> None:
        if self.shuffle is not None and "shuffle" in state:
            self.shuffle.load_end_state(state["shuffle"])
        if self.stateful is not None and state.get("state") is not None:
            self._load_between(state["state"])
        _set_all(self._sources[1:], state.get("generators", ()))

    def _load_between(self, own: Any) -> None:
        """Load a state from between two epochs: asked for an iterator, the sampler begins the next epoch.

        It may be a state of the end. Some samplers, asked for an iterator then, first go on there, which is nothing.
        """
        assert self.stateful is not None  # otherwise there is no such state
        self.stateful.load_state_dict(copy.deepcopy(own))
        with contextlib.suppress(Exception):
            if list(itertools.islice(self.stateful, 1)):
                self.stateful.load_state_dict(copy.deepcopy(own))

    def _note(self) -> None:
        """Before the sampler is asked for its iterator."""
        if self.loaded is None:
            if self._draws:
                self.state["rng"] = [list(map(generator_state, self._sources))]
            if self.stateful is not None:
                self.own = copy.deepcopy(self.stateful.state_dict())

    def begin(self, items: Any = None) -> None:
        """Ask the sampler for its items, from its beginning. ``items``: somebody has asked already."""
        if items is None:
            self._note()
            items = iter(self.sampler)
        self._asked = items

    def settle(self) -> None:
        """What the sampler that shuffles draws is drawn now. `ShuffleSampler.set_epoch` may still come.

        A loaded state says the epoch, whatever ``set_epoch`` has named: Fabric counts from 0 after a resume.
        """
        if self.loaded is not None:
            for one, epoch in zip(self._tellable, self.state.get("epochs", ()), strict=False):
                one.set_epoch(epoch)
        elif self.shuffle is not None:
            self.state["shuffle"] = self.shuffle.begin_state()

    def first(self, items: Iterator[Any]) -> Iterator[Any]:
        """The same items; what the sampler draws for the first one is drawn now."""
        if self.loaded is None and self._tellable:
            self.state["epochs"] = [one.epoch for one in self._tellable]
        if self._draws and self.loaded is None:
            now = list(map(generator_state, self._sources))
            self.state["rng"] += [now] if now not in self.state["rng"] else []
        if is_stateful(items) or not self._draws:
            return items
        try:
            return first_of(self._told(items))[1]
        except Exception as error:
            return _raising(error)

    def _told(self, items: Iterator[Any]) -> Iterator[Any]:
        """The items of the epoch that ``set_epoch`` has named since the sampler was asked for them."""
        if not self.may_be_told or isinstance(items, GeneratorType):  # a generator has not begun
            return items
        before = list(map(generator_state, self._sources))
        again: Iterator[Any] = iter(self.sampler)
        if before == list(map(generator_state, self._sources)):
            return again
        _set_all(self._sources, before)  # it draws when it is asked: torch asks once
        return items

    def epoch(self, counted: int) -> int:
        """The number of the epoch: what ``set_epoch`` has named before the first batch, or what the loader counted."""
        named = self._epochs.named(self.sampler)
        if self.shuffle is not None and self.shuffle.seed is not None:
            return int(self.state.get("shuffle", {}).get("epoch", counted))
        if named is None or self.loaded is not None:
            return counted
        self._epochs.next = named + 1
        return named

    def end_state(self) -> dict[str, Any]:
        """What decides the epochs after this one, when it is over."""
        state: dict[str, Any] = {}
        if self.shuffle is not None:
            state["shuffle"] = self.shuffle.end_state()
        if self._draws and self._sources[1:]:
            state["generators"] = list(map(generator_state, self._sources[1:]))
        return state

    @contextlib.contextmanager
    def started(self, mark: Checkpoint | None) -> Iterator[tuple[Iterator[Any], Any]]:
        """The items, and the object that can tell the sampler's own state, or None; see `sampling.foreign.Start`.

        Args:
            mark: where the state was taken; None: the epoch begins, with the items of `begin`.
        """
        if mark is None:
            items = self.first(self._asked)
            yield items, self.stateful or (items if is_stateful(items) else None)
            return
        if self.shuffle is not None and "shuffle" in self.state:
            self.shuffle.load_begin_state(self.state["shuffle"])
        if mark.state is not None and self.stateful is not None:
            if mark.finished or not mark.items:
                self._load_between(mark.state)
                yield iter(() if mark.finished else self.sampler), self.stateful
            else:
                yield loaded(self.sampler, self.stateful, copy.deepcopy(mark.state))
            return
        before = torch.get_rng_state()
        noted = self.state.get("rng") if self._draws else None
        try:
            _set_all(self._sources, noted[0] if noted else ())
            items, stateful = loaded(self.sampler, self.stateful, copy.deepcopy(mark.state))
            if mark.state is None or stateful is None:
                _set_all(self._sources, noted[-1] if noted else ())
                items = self.first(items)
            yield items, stateful
        finally:
            torch.set_rng_state(before)


def _attributes(sampler: Any) -> list[Any]:
    """What a sampler has: ``generator`` first, as in states of before."""
    return [getattr(sampler, "generator", None), *getattr(sampler, "__dict__", {}).values()]


def _set_all(generators: Iterable[torch.Generator], states: Iterable[str]) -> None:
    for generator, state in zip(generators, states, strict=False):
        set_generator(generator, state)


def _raising(error: Exception) -> Iterator[Any]:
    raise error
    yield
