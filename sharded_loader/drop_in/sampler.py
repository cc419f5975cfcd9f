"""The sampler of ``shuffle=True``: torch's `RandomSampler`, which also knows epochs and can be resumed.

    ShuffleSampler(dataset, generator).set_epoch(e); begin_state(); load_begin_state(state)

Without a generator, the first epoch has the order that torch's own sampler has: both draw one seed from torch's default
generator. Later epochs follow from that seed and the epoch, so a state of two numbers says all of them. A generator of
the user's is used as torch uses it, and its state is part of the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import RandomSampler

from sharded_loader.rng import derive_key
from sharded_loader.sampling.base import check_int
from sharded_loader.sampling.foreign import check_torchs_list


class ShuffleSampler(RandomSampler):
    """Indices in random order, another one for each epoch.

    Args:
        data_source: has a length.
        generator: as torch's sampler has it.
        seed: instead of a drawn one.

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

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next ``iter()`` begins."""
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)

    def __iter__(self) -> Iterator[int]:
        # A generator function, as torch's: the seed is drawn with the first index.
        check_torchs_list(self.data_source, "RandomSampler")
        if self.generator is not None and self.seed is None:
            yield from super().__iter__()
            return
        if self.seed is None:
            self.seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        # torch takes no other numbers for a seed.
        is_torchs = self.epoch == 0 and -(1 << 63) <= self.seed < 1 << 64
        generator.manual_seed(self.seed if is_torchs else derive_key(self.seed, "shuffle", self.epoch) >> 65)
        self.epoch += 1
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()

    def begin_state(self) -> dict[str, Any]:
        """What decides the next epoch and those after it."""
        if self.generator is not None and self.seed is None:
            return {"generator": self.generator.get_state().tolist()}
        if self.seed is None:
            self.seed = int(torch.empty((), dtype=torch.int64).random_().item())
        return {"seed": self.seed, "epoch": self.epoch}

    def load_begin_state(self, state: dict[str, Any]) -> None:
        """Make the next epoch the one of a state that `begin_state` has returned."""
        if "generator" in state:
            if self.generator is None:
                self.generator = torch.Generator()
            self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))
        else:
            self.seed, self.epoch = state["seed"], state["epoch"]
