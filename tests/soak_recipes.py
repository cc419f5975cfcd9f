"""What the soak reads: datasets and orders of every kind, and what an undisturbed loader makes of them.

Recipe.draw(rng) -> Recipe --dataset(), loader(...)--> a loader, with whatever pool
                    Recipe --Reference(...).epoch(epoch, version)--> what it must deliver
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sharded_loader import (
    ArrayDataset,
    FixedBucketSampler,
    RandomSampler,
    SequentialSampler,
    ShardedDataLoader,
    SortedBucketSampler,
    WeightedRandomSampler,
    batchify,
    sample_rng,
)

# -- datasets: each sample tells its index, what it draws, and the state of the dataset ------------------------------


class Plain:
    """Samples are (index, drawn number, version); some are slow, those in ``bad`` raise."""

    def __init__(self, length: int, bad: frozenset[int] = frozenset()) -> None:
        self.length, self.bad, self.version = length, bad, 0

    def __len__(self) -> int:
        return self.length

    def numbers(self, index: int, rng: np.random.Generator) -> Any:
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        if index % 17 == 3:
            time.sleep(0.002)
        return np.array([index, rng.integers(1 << 30), self.version])

    def __getitem__(self, index: int) -> Any:
        return self.numbers(index, sample_rng())


class Wide(Plain):
    """Samples that fill slots of shared memory."""

    def __getitem__(self, index: int) -> Any:
        return np.resize(super().__getitem__(index), 4000), index


class Dicts(Plain):
    def __getitem__(self, index: int) -> Any:
        return {"numbers": super().__getitem__(index), "name": f"sample {index}", "float": index / 7}


class Ragged(Plain):
    def __getitem__(self, index: int) -> Any:
        return np.resize(super().__getitem__(index), 3 + index % 5 * 40)


class Batches(Plain):
    """Read in bulk: whole batches."""

    def get_batch(self, indices: Sequence[int]) -> Any:
        return torch.from_numpy(np.stack([self.numbers(index, sample_rng(index)) for index in map(int, indices)]))


class Items(Plain):
    """Read in bulk: lists of samples."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self.numbers(index, sample_rng(index)) for index in indices]


def _columns(length: int, bad: frozenset[int]) -> Any:
    return ArrayDataset(np.arange(length * 50, dtype=np.float32).reshape(length, 50), list(range(length)))


DATASETS: tuple[Any, ...] = (Plain, Wide, Dicts, Ragged, Batches, Items, _columns)


# -- one configuration, and what it must deliver ---------------------------------------------------------------------


@dataclass(frozen=True)
class Recipe:
    """All that decides the stream; pool, workers and prefetch do not."""

    kind: Any
    length: int
    bad: frozenset[int]
    seed: int
    on_error: str
    num_shards: int | None
    order: str
    batch_size: int
    last_batch: str

    @classmethod
    def draw(cls, rng: random.Random) -> Recipe:
        length = rng.choice([1, 7, 40, 100, 300])
        bad = frozenset(i for i in range(length) if rng.random() < 0.03) if rng.random() < 0.4 else frozenset()
        orders = ["in order", "shuffled", "sampler", "weighted", "buckets", "sorted buckets", "torch"]
        return cls(
            kind=rng.choice(DATASETS),
            length=length,
            bad=bad,
            seed=rng.randrange(1 << 40),
            on_error=rng.choice(["raise", "skip", "replace"]),
            num_shards=rng.choice([None, None, 1, 2, 3]),
            order=rng.choice(orders),
            batch_size=rng.choice([1, 3, 4, 16, 64]),
            last_batch=rng.choice(["keep", "discard", "rollover"]),
        )

    def dataset(self) -> Any:
        return self.kind(self.length, self.bad)

    def loader(
        self, dataset: Any, *, sampler: Any = None, batch_sampler: Any = None, **reading: Any
    ) -> ShardedDataLoader:
        """A loader; with the samplers of another one, over those."""
        order: dict[str, Any] = {"batch_size": self.batch_size, "last_batch": self.last_batch}
        lengths = [3 + index % 5 * 40 for index in range(self.length)]
        if self.order == "shuffled":
            order["shuffle"] = True
        elif self.order == "sampler":
            order["sampler"] = RandomSampler(self.length) if self.seed % 2 else SequentialSampler(self.length)
        elif self.order == "weighted":
            order["sampler"] = WeightedRandomSampler([1.0 + i % 3 for i in range(self.length)], self.length)
        elif self.order == "torch":
            order["sampler"] = torch.utils.data.RandomSampler(range(self.length))
        elif self.order == "buckets":
            order = {"batch_sampler": FixedBucketSampler(lengths, self.batch_size, num_buckets=3, shuffle=True)}
        elif self.order == "sorted buckets":
            order = {"batch_sampler": SortedBucketSampler(lengths, self.batch_size, shuffle=True)}
        if "batch_sampler" in order and batch_sampler is not None:
            order["batch_sampler"] = batch_sampler
        elif sampler is not None:
            order |= {"sampler": sampler, "shuffle": False}
        if self.kind is Ragged:
            order["batchify_fn"] = batchify.Pad(pad_val=-1)
        return ShardedDataLoader(
            dataset, num_shards=self.num_shards, seed=self.seed, on_error=self.on_error, **order, **reading
        )


def frozen(batch: Any) -> Any:
    """A batch as a value that can be compared, and that no later write can change."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.numpy().tobytes()
    if isinstance(batch, dict):
        return {name: frozen(part) for name, part in batch.items()}
    return [frozen(part) for part in batch] if isinstance(batch, list) else batch


def outcome(iterator: Iterator[Any], take: Callable[[Any], object] = lambda batch: None) -> Any:
    """The next batch, frozen, or the error in its place; None at the end."""
    try:
        batch = next(iterator)
    except StopIteration:
        return None
    except ValueError as error:
        return f"ValueError: {error}"
    take(batch)
    return frozen(batch)


class Reference:
    """What each epoch must deliver, read by an `InlinePool` that nothing disturbs."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._epochs: dict[tuple[int, int], list[Any]] = {}

    def epoch(self, epoch: int, version: int) -> list[Any]:
        if (epoch, version) not in self._epochs:
            dataset = self._recipe.dataset()
            dataset.version = version
            with self._recipe.loader(dataset, pool="inline") as loader:
                loader.set_epoch(epoch)
                iterator = iter(loader)
                self._epochs[epoch, version] = list(iter(lambda: outcome(iterator), None))
        return self._epochs[epoch, version]
