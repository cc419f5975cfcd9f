"""What the tests of the drop-in read, and how they compare it with what torch's own loader gives."""

from __future__ import annotations

import copy
import json
import os
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

from sharded_loader.torch import DataLoader

TORCHS = torch.utils.data.DataLoader


# -- comparing ----------------------------------------------------------------------------------------------------


def assert_same(found: Any, expected: Any, where: str = "batch") -> None:
    """The same values, dtypes and types, all the way down."""
    assert type(found) is type(expected), f"{where}: {type(found)} instead of {type(expected)}"
    if isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype and found.shape == expected.shape, (where, found, expected)
        assert found.requires_grad == expected.requires_grad, where
        if expected.is_sparse:
            found, expected = found.to_dense(), expected.to_dense()
        assert torch.equal(_bits(found), _bits(expected)), (where, found, expected)
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype and found.shape == expected.shape, (where, found, expected)
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict):
        assert list(found) == list(expected), where
        for key in expected:
            assert_same(found[key], expected[key], f"{where}[{key!r}]")
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected), (where, found, expected)
        for number, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_same(one, other, f"{where}[{number}]")
    else:
        assert found == expected or (found != found and expected != expected), (where, found, expected)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Such that NaN equals itself."""
    plain = tensor.detach().resolve_conj().resolve_neg().as_subclass(torch.Tensor)
    if plain.is_floating_point():
        plain = plain.to(torch.float64)
    return torch.nan_to_num(plain, nan=77.0) if plain.is_floating_point() or plain.is_complex() else plain


def outcome(make: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call returns, or the error that it raises."""
    try:
        return make(), None
    except Exception as error:
        return None, error.with_traceback(None)  # it leads to the iterator, whose workers are to end


def first_epochs(dataset: Any, make: Callable[[], dict[str, Any]] = dict, **arguments: Any) -> tuple[Any, Any]:
    """The batches of an epoch of this loader, and of torch's own.

    Args:
        dataset, arguments: of both.
        make: makes those arguments that each must have for itself.
    """
    epochs = []
    for kind in (DataLoader, TORCHS):
        torch.manual_seed(3)
        loader: Any = kind(dataset, **arguments, **make())
        epochs.append(list(loader))
    return epochs[0], epochs[1]


def assert_as_torchs(dataset: Any, make: Callable[[], dict[str, Any]] = dict, **arguments: Any) -> None:
    """The batches of the first epoch are those of torch's own loader."""
    found, expected = first_epochs(dataset, make, **arguments)
    assert_same(found, expected)


def plain(batches: Iterable[Any]) -> list[Any]:
    """Batches as lists of numbers."""
    return [batch.tolist() if hasattr(batch, "tolist") else batch for batch in batches]


def flat(batches: Iterable[Any]) -> list[Any]:
    return [value for batch in plain(batches) for value in batch]


def some(iterator: Iterator[Any], count: int) -> list[Any]:
    """The first batches, as lists of numbers; fewer where there are fewer."""
    return plain(batch for _, batch in zip(range(count), iterator, strict=False))


def assert_resumes(
    make: Callable[[int], Any],
    *,
    saved: int,
    loaded: int,
    before: int,
    count: int | None,
    as_json: bool = True,
    epochs: int = 3,
    unordered: bool = False,
) -> None:
    """A state goes on exactly: the rest of the epoch, and the epochs after it.

    Args:
        make: makes a loader of so many workers.
        saved, loaded: how many workers the loader has that the state is taken from, and the one that loads it.
        before: how many epochs there are before the state's.
        count: how many batches of its epoch there are before the state. None: all of them, and the end is seen.
        as_json: the state becomes JSON on its way.
        epochs: how many epochs are compared behind it.
        unordered: batches come in any order.
    """
    torch.manual_seed(1)
    loader = make(saved)
    for _ in range(before):
        list(loader)
    begun = None
    if count is None:
        list(loader)
    elif count:
        begun = iter(loader)
        if len(some(begun, count)) < count:
            begun = None  # the end was seen
    state = loader.state_dict()
    if as_json:
        state = json.loads(json.dumps(state))
    generator = torch.get_rng_state()
    expected = [] if begun is None else [plain(begun)]
    expected += [plain(loader) for _ in range(epochs)]
    torch.manual_seed(99)
    other = make(loaded)
    other.load_state_dict(copy.deepcopy(state))
    torch.set_rng_state(generator)  # a trainer puts the global generator back
    found = [plain(other) for _ in expected]
    if unordered:
        found, expected = [sorted(epoch) for epoch in found], [sorted(epoch) for epoch in expected]
    assert found == expected, f"{found} instead of {expected}"


# -- map-style datasets -------------------------------------------------------------------------------------------


class Squares(Dataset[Any]):
    """Tuples of an array, a tensor and a number."""

    def __init__(self, length: int = 17) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.full(3, index, np.float32), torch.tensor([index, index**2]), index


class Listed(Dataset[Any]):
    """Samples from a list."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def told_and_drawn(info: Any) -> list[Any]:
    """What a worker is told, and what the generators of Python and NumPy give it."""
    return [
        info.id,
        info.num_workers,
        info.seed % 2**32,
        torch.initial_seed() % 2**32,
        random.random(),
        float(np.random.random()),
    ]


class Seeds(Dataset[Any]):
    """What a worker is told, and what its generators give; -1 in the main process."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        if info is None:
            return [-1.0] * 4
        assert info.dataset is not None and type(info.dataset) is Seeds
        return [*told_and_drawn(info), torch.rand((), dtype=torch.float64).item()]


class WhichWorker(Dataset[Any]):
    """Of each sample the number of its worker, and the worker's process."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return -1 if info is None else info.id, os.getpid()


class Changing(Dataset[Any]):
    """Samples that show an attribute."""

    scale = 1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * self.scale


class Counting(Dataset[Any]):
    """Counts its reads, and says how many there were: its state is that count."""

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        return 1000 * self.reads + index

    def state_dict(self) -> dict[str, int]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.reads = state["reads"]


# -- iterable datasets --------------------------------------------------------------------------------------------


class Uneven(IterableDataset[Any]):
    """Parts of different lengths: worker i of any number yields 100 i, 100 i + 1, ..."""

    lengths = (11, 4, 7, 0, 5)

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        return (100 * number + place for place in range(self.lengths[number]))


class Shared(IterableDataset[Any]):
    """Sample i comes from worker i % num_workers."""

    def __init__(self, length: int = 17) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length)) if info is None else iter(range(info.id, self.length, info.num_workers))

    def __len__(self) -> int:
        return self.length


class StatefulStream(IterableDataset[Any]):
    """A stream that says where it is, and counts the samples of all its epochs."""

    def __init__(self, length: int = 11) -> None:
        self.length, self.place, self.total = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        while self.place < self.length - number:
            self.place += 1
            self.total += 1
            yield 10_000 * number + 100 * self.total + self.place
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "total": self.total}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.total = state["place"], state["total"]


class StatefulItems(IterableDataset[Any]):
    """A stream whose iterators have a state."""

    def __iter__(self) -> Any:
        info = get_worker_info()
        return Items(0 if info is None else 100 * info.id)


class Items:
    def __init__(self, base: int) -> None:
        self.base, self.place = base, 0

    def __iter__(self) -> Items:
        return self

    def __next__(self) -> int:
        if self.place == 9:
            raise StopIteration
        self.place += 1
        return self.base + self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


# -- samplers -----------------------------------------------------------------------------------------------------


class Backwards(Sampler[int]):
    """From the last to the first."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length - 1, -1, -1))

    def __len__(self) -> int:
        return self.length


class Eager(Sampler[Any]):
    """Draws its order when it is asked for its iterator, not with the first index."""

    def __init__(self, length: int, size: int | None = None) -> None:
        self.length, self.size = length, size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.length).tolist()
        size = self.size
        return iter(order if size is None else [order[i : i + size] for i in range(0, self.length, size)])

    def __len__(self) -> int:
        return self.length if self.size is None else -(-self.length // self.size)


class Resets(Sampler[int]):
    """A stateful sampler that starts over at its end. Each epoch begins with another index."""

    def __init__(self, length: int = 13) -> None:
        self.length, self.place, self.epoch = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.place < self.length:
            self.place += 1
            yield (self.place + 3 * self.epoch) % self.length
        self.place, self.epoch = 0, self.epoch + 1

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


class StartsOver(Resets):
    """A stateful sampler that starts over at its beginning, unless it has been loaded."""

    def __init__(self, length: int = 13) -> None:
        super().__init__(length)
        self.loaded = True

    def __iter__(self) -> Iterator[int]:
        if not self.loaded:
            self.place, self.epoch = 0, self.epoch + 1
        self.loaded = False
        while self.place < self.length:
            self.place += 1
            yield (self.place + 3 * self.epoch) % self.length

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.loaded = True


class ItsOwnIterator(Sampler[list[int]]):
    """A batch sampler that is its own iterator, and begins again each time that it is asked for one: as Lightning's."""

    def __iter__(self) -> Iterator[list[int]]:
        self.items = iter(BatchSampler(RandomSampler(range(13)), 3, False))
        return self

    def __next__(self) -> list[int]:
        return next(self.items)


class StatefulIterators(Sampler[int]):
    """The iterators have the state; their order comes from one draw."""

    def __iter__(self) -> Any:
        return Permuted(torch.randperm(13).tolist())

    def __len__(self) -> int:
        return 13


class Permuted:
    def __init__(self, order: list[int]) -> None:
        self.order, self.place = order, 0

    def __iter__(self) -> Permuted:
        return self

    def __next__(self) -> int:
        if self.place == len(self.order):
            raise StopIteration
        self.place += 1
        return self.order[self.place - 1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.place = state["order"], state["place"]


class Pair(NamedTuple):
    first: Any
    second: Any


# -- the orders of a loader: arguments that each loader gets anew ------------------------------------------------

DATA = range(13)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(5)


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
    "backwards": lambda: {"sampler": Backwards(13), "batch_size": 3},
    "random": lambda: {"sampler": RandomSampler(DATA), "batch_size": 3},
    "random, own generator": lambda: {"sampler": RandomSampler(DATA, generator=seeded()), "batch_size": 3},
    "random, one generator": of_one_generator,
    "replacement": lambda: {"sampler": RandomSampler(DATA, True, 40, generator=seeded()), "batch_size": 3},
    "more than there are": lambda: {"sampler": RandomSampler(DATA, num_samples=40), "batch_size": 3},
    "subset": lambda: {"sampler": SubsetRandomSampler([3, 9, 4, 1, 8]), "batch_size": 2},
    "weighted": lambda: {"sampler": WeightedRandomSampler([1.0] * 13, 13), "batch_size": 3},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(DATA), 4, False)},
    "listed batches": lambda: {"batch_sampler": [[1, 2], [3], [7, 5, 2], [4]]},
    "its own iterator": lambda: {"batch_sampler": ItsOwnIterator()},
    "eager": lambda: {"sampler": Eager(13), "batch_size": 3},
    "eager batches": lambda: {"batch_sampler": Eager(13, 3)},
    "eager, one by one": lambda: {"batch_size": None, "sampler": Eager(13)},
    "stateful": lambda: {"sampler": Resets(), "batch_size": 3},
    "stateful, over at its beginning": lambda: {"sampler": StartsOver(), "batch_size": 3},
    "stateful batches": lambda: {"batch_sampler": BatchSampler(Resets(), 3, False)},
    "stateful iterators": lambda: {"sampler": StatefulIterators(), "batch_size": None},
}
