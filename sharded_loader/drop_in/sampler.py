"""The samplers that the drop-in makes: torch's, which also know epochs.

    InOrderSampler(dataset).set_epoch(e)              without ``shuffle``: e decides random numbers
    EpochCount.next; named(sampler)                   the epoch, where the sampler that shuffles does not count
    ShuffleSampler(dataset, generator).set_epoch(e); begin_state(); load_begin_state(state); end_state()

What decides the order of an epoch:

    seed=                        the seed and the number of the epoch
    a generator of the user's    the generator, as in torch
    set_epoch(e)                 the first seed that was drawn, and e
    otherwise                    a seed from torch's default generator for each epoch, as in torch

Without ``seed`` and a generator, every epoch draws one number, also where ``set_epoch`` decides. So the default
generator goes on as under torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from sharded_loader.base.checks import check_int
from sharded_loader.randomness.rng import derive_key
from sharded_loader.sampling.base import nested
from sharded_loader.sampling.foreign import check_torchs_list


class ShuffleSampler(RandomSampler):
    """Indices in random order, another one for each epoch.

    Args:
        data_source: has a length.
        generator: as torch's sampler has it.
        seed: decides all epochs, whatever the generators say.

    Attributes:
        epoch: the epoch that the next ``iter()`` begins.

    Example:
        >>> sampler = ShuffleSampler(range(5), seed=1)
        >>> first, second = list(sampler), list(sampler)
        >>> sampler.set_epoch(0)
        >>> list(sampler) == first
        True
    """

    def __init__(self, data_source: Any, generator: Any = None, seed: int | None = None) -> None:
        super().__init__(data_source, generator=generator)
        self.seed = seed
        self.epoch = 0
        self._is_told = False  # `set_epoch` decides the next epoch
        self._first: int | None = None  # the seed that was drawn first
        self._expected: int | None = None  # takes the place of the seed that is drawn next
        self._next: tuple[int, int] | None = None  # the seed and the number that decide the next epoch, once drawn

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next ``iter()`` begins."""
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        self._is_told = True

    def __iter__(self) -> Iterator[int]:
        # As with torch's generator function, the seed is drawn with the first index. But no Python function runs for
        # each index: `BatchSampler` takes a batch of 256 in 6 us of CPU time. With a generator function it takes 11 us.
        return itertools.chain.from_iterable(self._orders())

    def _orders(self) -> Iterator[Iterable[int]]:
        """The indices of the epoch, in one iterable."""
        check_torchs_list(self.data_source, "RandomSampler")
        if self.generator is not None and self.seed is None:
            yield super().__iter__()
            return
        seed, epoch = self._decided()
        self._next, self._is_told = None, False
        self.epoch += 1
        generator = torch.Generator()
        # torch takes no other numbers for a seed.
        is_torchs = epoch == 0 and -(1 << 63) <= seed < 1 << 64
        generator.manual_seed(seed if is_torchs else derive_key(seed, "shuffle", epoch) >> 65)
        yield torch.randperm(len(self.data_source), generator=generator).tolist()

    def _decided(self) -> tuple[int, int]:
        """The seed and the number that decide the next epoch. Number 0 is torch's order."""
        if self.seed is not None:
            return self.seed, self.epoch
        if self._next is None:
            drawn = int(torch.empty((), dtype=torch.int64).random_().item())  # always: the generator must go on
            self._next, self._expected = (drawn if self._expected is None else self._expected, 0), None
        if self._first is None:
            self._first = self._next[0]
        return (self._first, self.epoch) if self._is_told else self._next

    def forget_epoch(self) -> None:
        """A state is loaded: it decides the next epoch, unless ``set_epoch`` comes after it."""
        self._is_told = False

    def load_end_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch the one after a state that `end_state` has returned, or the one of ``set_epoch``."""
        is_told, epoch = self._is_told, self.epoch
        self.load_begin_state(state)
        if is_told:
            self.set_epoch(epoch)

    def expect(self, seed: int | None) -> None:
        """Make this the next seed, unless ``set_epoch`` or a seed of the user's decides. None: a drawn one."""
        self._expected = None if self._is_told else seed

    def begin_state(self) -> dict[str, Any]:
        """What decides the next epoch. What it draws is drawn now, once."""
        if self.generator is not None and self.seed is None:
            return {"generator": self.generator.get_state().tolist()}
        seed, epoch = self._decided()
        return {"seed": seed, "epoch": epoch} if self.seed is not None else {**self.end_state(), "next": [seed, epoch]}

    def told_beside(self, state: dict[str, Any]) -> tuple[int, int]:
        """The epoch that `set_epoch` has named, and the one of a state of `begin_state`. The same where nothing was."""
        epoch = state["next"][1] if "next" in state else state.get("epoch", self.epoch)
        return self.epoch if self._is_told else epoch, epoch

    def end_state(self) -> dict[str, Any]:
        """What is known of the epochs after this one, when it is over. It draws nothing."""
        if self.generator is not None or self.seed is not None:
            return self.begin_state()
        return {"first": self._first, "told": self.epoch if self._is_told else None}

    def load_begin_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch the one of a state that `begin_state` or `end_state` has returned."""
        if "generator" in state:
            if self.generator is None:
                self.generator = torch.Generator()
            self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        elif "seed" in state:
            self.seed, self.epoch = state["seed"], state["epoch"]
        else:
            self._first, told = state["first"], state["told"]
            self._next, self._is_told = None, told is not None
            self.epoch = self.epoch if told is None else told
            if "next" in state:
                self._next, self._is_told = tuple(state["next"]), False


class InOrderSampler(SequentialSampler):
    """Indices in order. Trainers call its ``set_epoch``, and the random numbers of samples depend on the epoch.

    Attributes:
        epoch: what ``set_epoch`` has named.
    """

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next ``iter()`` begins."""
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)


class EpochCount:
    """Counts the epochs of a loader, from the one on that ``set_epoch`` of a sampler has named.

    Attributes:
        next: the epoch that the next ``iter()`` begins.
    """

    def __init__(self) -> None:
        self.next = self._seen = 0

    def named(self, sampler: Any) -> int | None:
        """The epoch that `InOrderSampler` or torch's `DistributedSampler` was told since the last call, if any."""
        kinds = (InOrderSampler, DistributedSampler)
        found = next((int(one.epoch) for one in nested(sampler) if isinstance(one, kinds)), self._seen)
        is_new, self._seen = found != self._seen, found
        return found if is_new else None
