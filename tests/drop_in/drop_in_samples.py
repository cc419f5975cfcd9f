"""What the tests of the drop-in read, and how they compare it with what torch's own loader gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, Dataset, IterableDataset, RandomSampler, Sampler, get_worker_info

TORCHS = torch.utils.data.DataLoader


# -- comparing ----------------------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, where: str = "batch") -> None:
    """The same values, dtypes and types, all the way down."""
    assert type(found) is type(expected), f"{where}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert found.requires_grad == expected.requires_grad, where
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, np.ndarray):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (where, found, expected)
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict | list | tuple):
        assert len(found) == len(expected), (where, found, expected)
        named = isinstance(expected, dict)
        assert not named or list(found) == list(expected), where
        for key in expected if named else range(len(expected)):
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    else:
        assert found == expected or (found != found and expected != expected), (where, found, expected)


def outcome(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call returns, or the error that it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error.with_traceback(None)  # it leads to the iterator, whose workers are to end


def plain(batches: Iterable[Any]) -> list[Any]:
    """Batches as lists of numbers."""
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


def flat(batches: Iterable[Any]) -> list[Any]:
    return [value for batch in plain(batches) for value in batch]


def some(iterator: Iterator[Any], count: int) -> list[Any]:
    """The first batches, as lists of numbers; fewer where there are fewer."""
    return plain(batch for _, batch in zip(range(count), iterator, strict=False))


def workers(pool: str, count: int = 2) -> dict[str, Any]:
    """The arguments of a pool by the name that tests are parametrised with."""
    if pool == "inline":
        return {}
    return {"num_workers": count} | ({"thread_pool": True} if pool == "thread" else {"start_method": pool})


# -- map-style datasets -------------------------------------------------------------------------------------------


class Reads(Dataset[Any]):
    """Sample i is what a function gives for i."""

    def __init__(self, read: Callable[[int], Any], length: int) -> None:
        self.read, self.length = read, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def told_and_drawn(_: int = 0) -> list[Any]:
    """What a worker is told, and what the generators of Python, NumPy and torch give it; -1 in the main process."""
    info = get_worker_info()
    if info is None:
        return [-1.0] * 4
    assert isinstance(info.dataset, Seeds | Parts)
    told = [info.id, info.num_workers, info.seed % 2**32, torch.initial_seed() % 2**32]
    return [*told, random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()]


class Seeds(Reads):
    """What a worker is told, and what its generators give."""

    def __init__(self) -> None:
        super().__init__(told_and_drawn, 12)


class Keeps:
    """Has a state: these attributes."""

    kept: tuple[str, ...]

    def state_dict(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class Counting(Keeps, Reads):
    """Counts its reads: its state is that count."""

    kept = ("reads",)

    def __init__(self, length: int = 13) -> None:
        super().__init__(self.count, length)
        self.reads = 0

    def count(self, index: int) -> int:
        self.reads += 1
        return 1000 * self.reads + index


# -- iterable datasets --------------------------------------------------------------------------------------------


class Parts(IterableDataset[Any]):
    """Part i of n has what a function gives for (i, n). Without workers it is part 0 of 1."""

    def __init__(self, read: Callable[[int, int], Iterable[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(self.read(*((0, 1) if info is None else (info.id, info.num_workers))))


SEEDS = Parts(lambda number, count: (told_and_drawn() for _ in range(4)))
"""The same as iterable data."""


class Shared(Parts):
    """Sample i comes from worker i % num_workers."""

    def __init__(self, length: int = 17) -> None:
        super().__init__(lambda number, count: range(number, length, count))
        self.length = length

    def __len__(self) -> int:
        return self.length


class Stateful(Keeps):
    """An iterator with a state."""

    kept = ("items", "place")

    def __init__(self, items: Iterable[int]) -> None:
        self.items, self.place = list(items), 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> int:
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]


# -- samplers -----------------------------------------------------------------------------------------------------


class Order(Sampler[Any]):
    """Yields what a function gives, which is called when the sampler is asked for its iterator."""

    def __init__(self, items: Callable[[], Iterable[Any]], length: int = 13) -> None:
        self.items, self.length = items, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())

    def __len__(self) -> int:
        return self.length


class ItsOwnIterator(Order):
    """A batch sampler that is its own iterator, and begins again each time that it is asked for one: as Lightning's."""

    def __iter__(self) -> Iterator[Any]:
        self.begun = super().__iter__()
        return self

    def __next__(self) -> Any:
        return next(self.begun)


class Resets(Keeps, Sampler[int]):
    """A stateful sampler that starts over at its end, with another index.

    Args:
        length: how much it yields.
        late: it starts over at its next beginning, unless it is loaded before.
    """

    kept = ("place", "epoch")

    def __init__(self, length: int = 13, late: bool = False) -> None:
        self.length, self.place, self.epoch, self.late, self.goes_on = length, 0, 0, late, True

    def __iter__(self) -> Iterator[int]:
        if not self.goes_on:
            self.place, self.epoch = 0, self.epoch + 1
        self.goes_on = not self.late
        while self.place < self.length:
            self.place += 1
            yield (self.place + 3 * self.epoch) % self.length
        if not self.late:
            self.place, self.epoch = 0, self.epoch + 1

    def __len__(self) -> int:
        return self.length

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.goes_on = True


class Pair(NamedTuple):
    first: Any
    second: Any


# -- the orders of a loader: arguments that each loader gets anew ------------------------------------------------

DATA = range(13)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def permuted() -> list[int]:
    return torch.randperm(13).tolist()


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in turn": lambda: {"batch_size": 3},
    "shuffle": lambda: {"shuffle": True, "batch_size": 3},
    "shuffle, generator": lambda: {"shuffle": True, "batch_size": 3, "generator": seeded()},
    "shuffle, seed": lambda: {"shuffle": True, "batch_size": 3, "seed": 4},
    "shuffle, drop_last": lambda: {"shuffle": True, "batch_size": 3, "drop_last": True},
    "shuffle, one by one": lambda: {"shuffle": True, "batch_size": None},
    "backwards": lambda: {"sampler": Order(lambda: range(12, -1, -1)), "batch_size": 3},
    "random": lambda: {"sampler": RandomSampler(DATA), "batch_size": 3},
    "random, own generator": lambda: {"sampler": RandomSampler(DATA, generator=seeded()), "batch_size": 3},
    "random, one generator": lambda: {
        "generator": (one := seeded()),
        "sampler": RandomSampler(DATA, generator=one),
        "batch_size": 3,
    },
    "replacement": lambda: {"sampler": RandomSampler(DATA, True, 40, generator=seeded()), "batch_size": 3},
    "more than there are": lambda: {"sampler": RandomSampler(DATA, num_samples=40), "batch_size": 3},
    "subset": lambda: {"sampler": torch.utils.data.SubsetRandomSampler([3, 9, 4, 1, 8]), "batch_size": 2},
    "weighted": lambda: {"sampler": torch.utils.data.WeightedRandomSampler([1.0] * 13, 13), "batch_size": 3},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, False)},
    "listed batches": lambda: {"batch_sampler": [[1, 2], [3], [7, 5, 2], [4]]},
    "its own iterator": lambda: {
        "batch_sampler": ItsOwnIterator(lambda: BatchSampler(RandomSampler(DATA), 3, False), 5)
    },
    "eager": lambda: {"sampler": Order(permuted), "batch_size": 3},
    "eager batches": lambda: {"batch_sampler": Order(lambda: list(BatchSampler(permuted(), 3, False)), 5)},
    "eager, one by one": lambda: {"batch_size": None, "sampler": Order(permuted)},
    "stateful": lambda: {"sampler": Resets(), "batch_size": 3},
    "stateful, over at its beginning": lambda: {"sampler": Resets(late=True), "batch_size": 3},
    "stateful batches": lambda: {"batch_sampler": BatchSampler(Resets(), 3, False)},
    "stateful iterators": lambda: {"sampler": Order(lambda: Stateful(permuted())), "batch_size": None},
}
