"""What the random tests draw: datasets and orders of every kind.

draw_kind(rng, length)         -> Kind     a dataset, what its samples are made into, where a batch shows its indices
draw_order(rng, kind, length)  -> Order    samplers or batch samplers, ours and others', and what they must yield
"""

import copy
import itertools
import os
import random
import time
from collections import namedtuple
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.utils.data as torch_data
from samples import Drawing, DrawingInItems, Foreign, GluonStyle
from stream_samples import StatefulRows

import sharded_loader as ours
from sharded_loader import SimpleDataset, batchify, sample_generator, sample_rng
from tests.naive import collate, shares


class BadSample(ValueError):
    """Cannot be made from its text alone."""

    def __init__(self, index: int, what: str) -> None:
        super().__init__(index, what)
        self.index = index


HOME = os.getpid()  # of the loaders; a spawned worker takes itself for it
CHANCE = random.SystemRandom()  # the global generators belong to the samples


class Plain(Drawing):
    """Samples are (index, drawn number + version); those in ``bad`` raise."""

    version, left = 0, b""  # of the data, which may change between two epochs; what a worker has left behind
    pause, slow = 0.0, 0.0  # seconds that some samples take, and that each does
    late = 0.0  # the share of readings that stand still for a while: chance decides, not the sample
    leak = 0  # bytes that each sample leaves behind in a forked worker, up to 100 MB

    def read(self, index: int, rng: np.random.Generator) -> Any:
        if index in self.bad:
            raise BadSample(index, "is bad")
        if self.pause and index % 17 == 3:
            time.sleep(self.pause)
        if self.slow:
            time.sleep(self.slow)
        if self.late and CHANCE.random() < self.late:
            time.sleep(0.2)
        if self.leak and os.getpid() != HOME and len(self.left) < 100 << 20:
            self.left += b"x" * self.leak
        return super().read(index, rng) + [0, self.version]


class Wide(Plain):
    """Samples that fill slots of shared memory."""

    def __getitem__(self, index: int) -> Any:
        return np.resize(super().__getitem__(index), 4000), index


class Dicts(Plain):
    def __getitem__(self, index: int) -> Any:
        torchs = torch.randint(1 << 30, (2, 2), generator=sample_generator())
        inner = {"name": f"sample {index}", "third": index / 3}
        return {"numbers": super().__getitem__(index), "inner": inner, 5: torchs}


class Ragged(Plain):
    def __getitem__(self, index: int) -> Any:
        return np.resize(super().__getitem__(index), 2 + index % 5)


class Batches(Plain):
    """Read in bulk: whole batches. Uses up the list that it is given."""

    def get_batch(self, indices: Any) -> Any:
        rows = [self.read(index, sample_rng(index)) for index in map(int, indices)]
        if isinstance(indices, list):
            indices.clear()
        return torch.from_numpy(np.stack(rows))


class Items(DrawingInItems, Plain):
    """Read in bulk: lists of samples."""


class Told(Plain):
    """Wants to know the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), self.epoch


class OfTorch(torch_data.IterableDataset[Any]):
    """Iterable data as torch has it: each worker has a part."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts)


Point = namedtuple("Point", "x y")


@dataclass
class Item:
    name: str
    value: Any = None


def drawn(number: int) -> Any:
    return np.float32([number, sample_rng().random()])


def drawn_from_globals(number: int) -> Any:
    return [number, random.random(), float(np.random.random()), torch.rand(()).item()]


def as_pair(number: int) -> Any:
    return np.full(3, number, np.float32), number


def as_record(number: int) -> Any:
    """Each third one has another structure than the first."""
    return {"x": np.full(4, number), "name": "even" if number % 3 else f"sample {number}"}


def doubled(samples: list[Any]) -> Any:
    """A batchify function of the user's own."""
    return {"twice": torch.stack([torch.as_tensor(sample) * 2 for sample in samples]), "count": len(samples)}


def with_draw(samples: list[Any]) -> Any:
    """Draws a number of the batch's own."""
    return {"batch": torch.stack(list(map(torch.as_tensor, samples))), "drawn": int(sample_rng().integers(1 << 40))}


def padded(samples: list[Any]) -> Any:
    """What `batchify.Pad` promises to make of 1-D samples."""
    longest = max(map(len, samples))
    return torch.tensor([[*sample.tolist(), *[-1] * (longest - len(sample))] for sample in samples])


@dataclass
class Kind:
    """A dataset, and how its batches are read."""

    name: str
    make: Callable[[], Any]  # the dataset, a new one each time
    keys: list[Any] | None = None  # the indices that it takes; None: 0 to its length
    bad: frozenset[int] = frozenset()  # samples that raise
    # The loader's ``batchify_fn``, and what the naive loader calls in its place.
    batchify: tuple[Any, Callable[[list[Any]], Any]] = (None, collate)
    # A batch, or shard of one -> the indices of its samples.
    where: Callable[[Any], list[int]] = lambda batch: batch[:, 0].tolist()
    takes_epoch: bool = False  # it has ``set_epoch``


def _floats(n: int) -> Any:
    return np.arange(n * 3, dtype=np.float32).reshape(n, 3)


def _tensors(n: int) -> Any:
    return torch_data.TensorDataset(torch.arange(n * 2.0).reshape(n, 2), torch.arange(n))


WITHOUT_ERRORS: dict[str, Callable[[int], Any]] = {
    "list of ints": lambda n: [i * 7 - 3 for i in range(n)],
    "list of tuples": lambda n: [(i / 3, f"name {i}") for i in range(n)],
    "list of lists": lambda n: [[i, i + 1] for i in range(n)],
    "range": range,
    "array": _floats,
    "tensor": lambda n: torch.arange(n * 2).reshape(n, 2),
    "columns": lambda n: ours.ArrayDataset(_floats(n), [i * 5 for i in range(n)]),
    "named columns": lambda n: ours.ArrayDataset(
        image=np.arange(n * 4, dtype=np.uint8).reshape(n, 2, 2), label=np.arange(n)
    ),
    "TensorDataset": _tensors,
    "Subset": lambda n: torch_data.Subset(_tensors(n + 5), list(range(n))[::-1]),
    "Subset of what draws": lambda n: torch_data.Subset(Plain(n + 5), [i + 3 for i in range(n)]),
    "ConcatDataset": lambda n: torch_data.ConcatDataset([_tensors(n // 3), _tensors(n - n // 3)]),
    "sum": lambda n: SimpleDataset(list(range(n // 2))) + SimpleDataset([i * 2 for i in range(n - n // 2)]),
    "transform": lambda n: SimpleDataset(list(range(n))).transform(drawn),
    "seeded transform": lambda n: SimpleDataset(list(range(n))).transform(drawn_from_globals, seeded=True),
    "transform_first": lambda n: SimpleDataset([(i, i + 1) for i in range(n)]).transform_first(drawn),
    "transform of columns": lambda n: ours.ArrayDataset(*[np.arange(n)] * 2).transform(lambda i, j: (drawn(i), j)),
    "part": lambda n: SimpleDataset(list(range(2 * n + 4))).filter(lambda i: i % 2 == 0).take(n),
    "shard": lambda n: SimpleDataset(list(range(2 * n))).shard(2, 1).transform(drawn),
    "cached": lambda n: SimpleDataset(list(range(n))).transform(as_pair).cache(),
    "stored": lambda n: SimpleDataset(list(range(n))).transform(as_pair).cache("1 MB"),
    "stored, not all": lambda n: SimpleDataset(list(range(n))).transform(as_pair).cache(300),
    "stored records": lambda n: SimpleDataset(list(range(n))).transform(as_record).cache("1 MB"),
    "stored below draws": lambda n: SimpleDataset(range(n)).cache("1 MB").transform(drawn_from_globals, seeded=True),
    "shard of what is stored": lambda n: SimpleDataset(list(range(2 * n))).cache("1 MB").shard(2, 1).transform(drawn),
    "named tuples": lambda n: SimpleDataset(list(range(n))).transform(lambda i: Point(i, [i, i + 1])),
    "dataclasses": lambda n: SimpleDataset(list(range(n))).transform(lambda i: Item(f"{i}", np.uint8([i % 256] * 3))),
}


MAY_FAIL: dict[str, tuple[type[Plain], dict[str, Any]]] = {
    "plain": (Plain, {}),
    "dicts": (Dicts, {"where": lambda batch: batch["numbers"][:, 0].tolist()}),
    "ragged": (Ragged, {"batchify": (batchify.Pad(pad_val=-1), padded)}),
    "batches": (Batches, {}),
    "items": (Items, {}),
    "told": (Told, {"where": lambda batch: batch[0][:, 0].tolist(), "takes_epoch": True}),
    "own batchify_fn": (Plain, {"batchify": (doubled,) * 2, "where": lambda it: (it["twice"][:, 0] // 2).tolist()}),
    "drawing batchify_fn": (Plain, {"batchify": (with_draw, doubled)}),
    "wide": (Wide, {"where": lambda batch: batch[0][:, 0].tolist()}),
}
"""Samples of them may be bad: the class, and what else there is to say of the kind."""


def draw_kind(rng: random.Random, length: int, wide: bool = False) -> Kind:
    """Any dataset of that many samples; if wanted, also one with large samples."""
    bad = frozenset(i for i in range(length) if rng.random() < rng.choice([0.03, 0.1, 0.5]))
    if rng.random() < 0.4:
        bad = frozenset()
    if rng.random() < 0.5:
        name = rng.choice(list(WITHOUT_ERRORS))
        return Kind(name, lambda: WITHOUT_ERRORS[name](length))
    if rng.random() < 0.1:
        keys: list[Any] = [f"key {i}" for i in range(length)]
        return Kind("mapping", lambda: {key: len(key) + at for at, key in enumerate(keys)}, keys)
    name = rng.choice([name for name in MAY_FAIL if wide or name != "wide"])
    made, more = MAY_FAIL[name]
    bad = bad if name != "drawing batchify_fn" else frozenset()
    return Kind(name, lambda: made(length, bad), bad=bad, **more)


class ByEpoch:
    """Another library's sampler: a shuffle by the epoch that it was told. Neither shows its epoch nor has a length."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items, self._epoch = items, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def of(self, epoch: int) -> list[Any]:
        return random.Random(epoch).sample(list(self.items), len(self.items))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.of(self._epoch))


class Showing(ByEpoch):
    """Shows its epoch, and has a length."""

    epoch = property(lambda self: self._epoch)

    def __len__(self) -> int:
        return len(self.items)


class WithState(Showing):
    """Its iterators know where they are."""

    def __iter__(self) -> Iterator[Any]:
        items = self.of(self._epoch)
        return StatefulRows(SimpleNamespace(lengths=[len(items)], sample=lambda part, place: items[place]), 0)


def of_its_kind(sampler: Any, epoch: int, seed: int) -> list[Any]:
    """What a sampler must yield in an epoch, by the loader's seed. No loader has seen it."""
    if isinstance(sampler, ours.Sampler):
        return list(sampler.iter_epoch(epoch))
    if isinstance(sampler, ByEpoch):
        return sampler.of(epoch)
    if isinstance(sampler, list | np.ndarray):
        return list(sampler)
    # A foreign one is started by seed and epoch: as our `BatchSampler` starts it.
    return [item for part in ours.BatchSampler(sampler, 1, seed=seed).iter_epoch(epoch) for item in part]


@dataclass
class Order:
    """What comes in which order."""

    name: str
    make: Callable[[], Any] | None = None  # a new sampler; None: the loader makes it, and ``shuffle`` says which
    of: Callable[[Any, int, int], list[Any]] = of_its_kind  # what it must yield
    batches: bool = False  # it is a batch sampler
    shuffle: bool = False  # as the loader's
    sized: bool = True  # it has a length
    distributed: bool = False  # it deals out to ranks by itself


def draw_order(rng: random.Random, kind: Kind, length: int) -> Order:
    """Any order of a dataset of that many samples."""
    if kind.keys is not None:
        keys = rng.sample(kind.keys, length)
        if rng.random() < 0.3:
            return Order("a list of batches of keys", lambda: _cut(keys, 3), batches=True)
        return Order("a list of keys", lambda: list(keys))
    if rng.random() < 0.35:
        shuffle = rng.random() < 0.6
        return Order("shuffle" if shuffle else "in order", shuffle=shuffle)
    return _draw_batches(rng, length) if rng.random() < 0.35 else _draw_items(rng, length)


def _cut(items: Sequence[Any], size: int) -> list[list[Any]]:
    return [list(items[at : at + size]) for at in range(0, len(items), size)]


def _draw_items(rng: random.Random, n: int) -> Order:
    seed: Any = rng.choice([None, rng.randrange(1 << 40)])
    some = [rng.randrange(n) for _ in range(rng.randrange(n + 3))] if n else []
    weights = [rng.choice([0.0, 1.0, 2.5]) for _ in range(n)]
    parts = min(rng.choice([1, 2, 3]), max(n, 1))
    negative = [index - n * (rng.random() < 0.3) for index in some]
    orders = [
        Order("SequentialSampler", lambda: ours.SequentialSampler(n)),
        Order("RandomSampler", lambda: ours.RandomSampler(n, seed=seed)),
        Order("SubsetRandomSampler", lambda: ours.SubsetRandomSampler(some, seed=seed)),
        Order("SortedSampler", lambda: ours.SortedSampler([i * 7 % 11 for i in range(n)])),
        Order("FilterSampler", lambda: ours.FilterSampler(lambda i: i % 2 == 0, range(n))),
        Order("SplitSampler", lambda: ours.SplitSampler(n, parts, parts - 1, seed=seed)),
        Order("a list", lambda: list(negative)),
        Order("an array", lambda: np.array(some, np.int64)),
        Order("Showing", lambda: Showing(some)),
        Order("WithState", lambda: WithState(some)),
        Order("ByEpoch", lambda: ByEpoch(some), sized=False),
        Order("FromGlobals", lambda: Foreign(lambda: random.sample(some, len(some)), len(some))),
        Order("GluonStyle", lambda: GluonStyle(lambda: some[::-1], len(some)), lambda *_: some[::-1]),
    ]
    if n:
        orders.append(Order("IntervalSampler", lambda: ours.IntervalSampler(n, min(3, n))))
        orders += _samplers_of_torch(range(n), some, rng.randrange(1 << 30))
    if any(weights):
        once = {"num_samples": sum(weight > 0 for weight in weights), "replacement": False, "seed": seed}
        orders += [
            Order("WeightedRandomSampler", lambda: ours.WeightedRandomSampler(weights, n + 3, seed=seed)),
            Order("WeightedRandomSampler without replacement", lambda: ours.WeightedRandomSampler(weights, **once)),
            Order("torch.WeightedRandomSampler", lambda: torch_data.WeightedRandomSampler(weights, n)),
        ]
    return rng.choice(orders)


def _samplers_of_torch(numbers: range, some: list[int], generator: int) -> list[Order]:
    def shuffled(**options: Any) -> Any:
        return torch_data.RandomSampler(numbers, **options)

    makers: dict[str, Callable[[], Any]] = {
        "RandomSampler": shuffled,
        "RandomSampler with a generator": lambda: shuffled(generator=torch.Generator().manual_seed(generator)),
        "RandomSampler with replacement": lambda: shuffled(replacement=True, num_samples=len(numbers) + 5),
        "SequentialSampler": lambda: torch_data.SequentialSampler(numbers),
        "SubsetRandomSampler": lambda: torch_data.SubsetRandomSampler(some),
        "DistributedSampler": lambda: torch_data.DistributedSampler(numbers, num_replicas=2, rank=1, seed=3),
    }
    return [Order(f"torch.{name}", make, distributed=name[0] == "D") for name, make in makers.items()]


def _draw_batches(rng: random.Random, n: int) -> Order:
    seed: Any = rng.choice([None, rng.randrange(1 << 40)])
    size, shards = rng.choice([1, 2, 3, 5, 8]), rng.choice([1, 2, 3])
    last = rng.choice(["keep", "discard", "rollover"])
    lengths = [1 + i * 7 % 11 for i in range(n)]
    weights = rng.choice([None, [1, 2, 9][:shards]])
    flat = _cut(rng.sample(range(n), n), size)
    # Some are no batches: empty, with an index out of range, with an empty shard.
    odd = [rng.choice([[], [n + 5], batch, batch, batch, batch]) for batch in flat]
    sharded = [_cut(batch, -(-len(batch) // shards)) for batch in flat]
    odd_shards = [rng.choice([[batch[0], []], [[n + 5]], batch, batch, batch]) for batch in sharded]

    def plain() -> Any:
        return ours.BatchSampler(ours.RandomSampler(n, seed=seed), size, last)

    def split(sampler: Any, epoch: int, seed: int) -> list[Any]:
        batches = sampler.batch_sampler.iter_epoch(epoch)
        return [_cut_by(batch, shares(len(batch), shards, weights)) for batch in batches]

    orders = [
        Order("BatchSampler", plain),
        Order("ShardedBatchSampler", lambda: ours.ShardedBatchSampler(plain(), shards, weights), split),
        Order("ShardedBatchSampler by cost", lambda: ours.ShardedBatchSampler(plain(), shards, costs=lengths or None)),
        Order("a list of batches", lambda: [list(batch) for batch in odd]),
        Order("a list of arrays", lambda: [np.array(batch) for batch in flat]),
        Order("a list of tuples of shards", lambda: [tuple(map(tuple, batch)) for batch in odd_shards]),
        Order("Showing of batches", lambda: Showing(copy.deepcopy(flat))),
        Order("Showing of shards", lambda: Showing(copy.deepcopy(sharded))),
        Order("ByEpoch of batches", lambda: ByEpoch(copy.deepcopy(odd)), sized=False),
    ]
    if n:
        orders += _batches_of_many(lengths, size, last, seed)
    order = rng.choice(orders)
    order.batches = True
    return order


def _batches_of_many(lengths: list[int], size: int, last: str, seed: Any) -> list[Order]:
    """Orders that need samples."""

    def shuffled() -> Any:
        return torch_data.RandomSampler(range(len(lengths)))

    def whole(sampler: Any, epoch: int, seed: int) -> list[Any]:
        batches = _cut(of_its_kind(sampler.sampler, epoch, seed), size)
        return [batch for batch in batches if len(batch) == size or last != "discard"]

    buckets = {"num_buckets": 3, "shuffle": seed is not None, "seed": seed}
    return [
        Order("FixedBucketSampler", lambda: ours.FixedBucketSampler(lengths, size, **buckets)),
        Order("SortedBucketSampler", lambda: ours.SortedBucketSampler(lengths, size, mult=2, shuffle=True, seed=seed)),
        Order("BoundedBudgetSampler", lambda: ours.BoundedBudgetSampler(lengths, 20, seed=seed)),
        Order("torch.BatchSampler", lambda: torch_data.BatchSampler(shuffled(), size, last == "discard"), whole),
        Order("BatchSampler of torch.RandomSampler", lambda: ours.BatchSampler(shuffled(), size, last, seed=seed)),
    ]


def _cut_by(batch: list[Any], sizes: list[int]) -> list[list[Any]]:
    items = iter(batch)
    return [list(itertools.islice(items, size)) for size in sizes if size]
