"""What the tests of the drop-in read, and how they compare it with what torch's own loader gives."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import (
    BatchSampler,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

TORCHS = torch.utils.data.DataLoader


# -- comparing ----------------------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, where: str = "batch") -> None:
    """The same values, dtypes and types, all the way down."""
    assert type(found) is type(expected), f"{where}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert found.requires_grad == expected.requires_grad, where
        torch.testing.assert_close(found.detach(), expected.detach(), rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, (where, found, expected)
        np.testing.assert_array_equal(found, expected, strict=True)
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


def assert_resumes(
    make: Callable[[int], Any], *, saved: int, loaded: int, before: int, count: int | None, epochs: int = 3
) -> None:
    """A state goes on exactly: the rest of the epoch, and the epochs after it.

    Args:
        make: makes a loader of so many workers.
        saved, loaded: how many workers the loader has that the state is taken from, and the one that loads it.
        before: how many epochs there are before the state's.
        count: how many batches of its epoch there are before the state. None: all of them, and the end is seen.
        epochs: how many epochs are compared behind it.
    """
    torch.manual_seed(1)
    loader, begun = make(saved), None
    for _ in range(before + (count is None)):
        list(loader)
    if count:
        begun = iter(loader)
        if len(some(begun, count)) < count:
            begun = None  # the end was seen
    state, generator = json.loads(json.dumps(loader.state_dict())), torch.get_rng_state()
    expected = [] if begun is None else [plain(begun)]
    expected += [plain(loader) for _ in range(epochs)]
    torch.manual_seed(99)
    other = make(loaded)
    other.load_state_dict(copy.deepcopy(state))
    torch.set_rng_state(generator)  # a trainer puts the global generator back
    assert [plain(other) for _ in expected] == expected


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


class Changing(Dataset[Any]):
    """Samples that show an attribute."""

    scale = 1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * self.scale


class Counting(Dataset[Any]):
    """Counts its reads, and says how many there were: its state is that count."""

    def __init__(self, length: int = 13) -> None:
        self.length, self.reads = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return 1000 * self.reads + index

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


# -- iterable datasets --------------------------------------------------------------------------------------------


class Parts(IterableDataset[Any]):
    """Part i of n has what a function gives for (i, n). Without workers it is part 0 of 1."""

    def __init__(self, read: Callable[[int, int], Iterable[Any]]) -> None:
        self.read = read

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        return iter(self.read(*((0, 1) if info is None else (info.id, info.num_workers))))


class Uneven(Parts):
    """Parts of different lengths: worker i of any number yields 100 i, 100 i + 1, ..."""

    def __init__(self) -> None:
        super().__init__(lambda number, count: range(100 * number, 100 * number + (11, 4, 7, 0, 5)[number]))


class Shared(Parts):
    """Sample i comes from worker i % num_workers."""

    def __init__(self, length: int = 17) -> None:
        super().__init__(lambda number, count: range(number, length, count))
        self.length = length

    def __len__(self) -> int:
        return self.length


class StatefulStream(Parts):
    """A stream that says where it is, and counts the samples of all its epochs."""

    def __init__(self, length: int = 11) -> None:
        super().__init__(self.samples)
        self.length, self.place, self.total = length, 0, 0

    def samples(self, number: int, count: int) -> Iterator[int]:
        while self.place < self.length - number:
            self.place += 1
            self.total += 1
            yield 10_000 * number + 100 * self.total + self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.total = state["place"], state["total"]


class Stateful:
    """An iterator with a state."""

    def __init__(self, items: Iterable[int]) -> None:
        self.items, self.place = list(items), 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> int:
        if self.place == len(self.items):
            raise StopIteration
        self.place += 1
        return self.items[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class StatefulItems(Parts):
    """A stream whose iterators have a state."""

    def __init__(self) -> None:
        super().__init__(lambda number, count: Stateful(range(100 * number + 1, 100 * number + 10)))


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


class Resets(Sampler[int]):
    """A stateful sampler that starts over at its end, with another index.

    Args:
        length: how much it yields.
        late: it starts over at its next beginning, unless it is loaded before.
    """

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

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epoch, self.goes_on = state["place"], state["epoch"], True


class Pair(NamedTuple):
    first: Any
    second: Any


# -- the orders of a loader: arguments that each loader gets anew ------------------------------------------------

DATA = range(13)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


def permuted() -> list[int]:
    return torch.randperm(13).tolist()


def of_one_generator() -> dict[str, Any]:
    generator = seeded()
    return {"generator": generator, "sampler": RandomSampler(DATA, generator=generator), "batch_size": 3}


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
    "random, one generator": of_one_generator,
    "replacement": lambda: {"sampler": RandomSampler(DATA, True, 40, generator=seeded()), "batch_size": 3},
    "more than there are": lambda: {"sampler": RandomSampler(DATA, num_samples=40), "batch_size": 3},
    "subset": lambda: {"sampler": SubsetRandomSampler([3, 9, 4, 1, 8]), "batch_size": 2},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 13, 13), "batch_size": 3},
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
