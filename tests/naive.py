"""A loader that is too simple to be wrong: plain lists, one sample after the other, nothing read ahead.

    order(epoch) -> NaiveLoader.batches(epoch, done) -> read(...) -> the batch, or the Failure in its place
    iterate() -> NaiveIterator.next()                   epoch, position, length, place, load, set_epoch

It is written from what the documentation promises, and it shares no code with the library. What it asks the library
for is what it does not check: the order that a sampler gives an epoch, and the random numbers that a sample draws.

A place is ``(epoch, done)``: so many items of the epoch's global order are done. Items are indices, or batches where
a batch sampler was given. With ``rollover`` ``done`` is negative while items of earlier epochs are still due.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from sharded_loader import SampleError


@dataclass
class Failure:
    """An error in the place of a batch: its class, and the samples that it may name."""

    kind: type[BaseException]
    indices: Sequence[Any] = ()


def shares(count: int, shards: int, weights: Sequence[float] | None) -> list[int]:
    """How many samples each shard gets: the exact share rounded down, and one more for the largest remainders.

    Then a shard that has none takes one from the shard that is furthest above its share. Weights are positive here.
    """
    if count < shards:
        return [1] * count + [0] * (shards - count)
    parts = [Fraction(str(weight)) for weight in weights or [1] * shards]
    exact = [count * part / sum(parts) for part in parts]
    sizes = [math.floor(share) for share in exact]
    for shard in sorted(range(shards), key=lambda shard: sizes[shard] - exact[shard])[: count - sum(sizes)]:
        sizes[shard] += 1
    while 0 in sizes:
        above = [size - share if size > 1 else -math.inf for size, share in zip(sizes, exact, strict=True)]
        sizes[above.index(max(above))] -= 1
        sizes[sizes.index(0)] = 1
    return sizes


def collate(samples: list[Any]) -> Any:
    """What the default batchify promises to make of samples."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        names = [one.name for one in dataclasses.fields(first)]
        return type(first)(**{name: collate([getattr(sample, name) for sample in samples]) for name in names})
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(collate(list(column)) for column in zip(*samples, strict=True)))
    numbers = isinstance(first, list) and all(isinstance(one, int | float) for one in first)
    if isinstance(first, list | tuple) and not numbers:
        return [collate(list(column)) for column in zip(*samples, strict=True)]
    if isinstance(first, str | bytes) or first is None:
        return list(samples)
    return torch.from_numpy(np.stack([np.asarray(sample) for sample in samples]))


Choose = Callable[[int | None, int, list[Any]], Any]
"""``on_error="replace"``: which of the good samples of a batch stands at this place of this shard (None: no shards)."""


@dataclass
class NaiveLoader:
    """One rank's loader.

    Args:
        order: epoch -> all items of the epoch, as all ranks share them.
        sample: (index, epoch) -> the sample.
        length: samples in the dataset; None: any index is fine.
        batch_size: samples per batch of this rank; None: the items are batches.
        replicated: whether ranks were asked for, be it only one.
        num_shards: into how many shards flat batches are split; None: they are not.
        max_shards: how many shards a batch may have.
        sized: whether the sampler has a length. Otherwise the end of an epoch shows only when it is read.
        on_error, weights, last_batch, replicas, rank, batchify: as the loader's.
    """

    order: Callable[[int], Sequence[Any]]
    sample: Callable[[Any, int], Any]
    length: int | None
    batch_size: int | None
    last_batch: str = "keep"
    replicas: int = 1
    rank: int = 0
    replicated: bool = False
    sized: bool = True
    num_shards: int | None = None
    max_shards: int | None = None
    weights: Sequence[float] | None = None
    on_error: Any = "raise"
    batchify: Callable[[list[Any]], Any] = collate

    def __post_init__(self) -> None:
        self.next_place = (0, self.begin(0))
        self.shown: NaiveIterator | None = None
        self.loaded = self.again = False
        self.skipped = 0

    # -- which samples --------------------------------------------------------------------------------------

    def boundary(self, epoch: int) -> int:
        """With rollover: items of the endless order before the epoch's first batch, all ranks together."""
        length, size = len(self.order(0)), self.batch_size or 1
        rows = -(-length // self.replicas)
        row = epoch * rows // size * size
        return row // rows * length + row % rows * self.replicas if rows else 0

    def begin(self, epoch: int) -> int:
        """What is done where the epoch begins."""
        return self.boundary(epoch) - epoch * len(self.order(0)) if self.last_batch == "rollover" else 0

    def dealt(self, epoch: int, begin: int, end: int) -> list[tuple[Any, int]]:
        """This rank's part of a stretch of one epoch: each item, and what is done after it."""
        order = self.order(epoch)
        if self.last_batch == "discard":
            end -= (end - begin) % self.replicas
        rows = range(begin, end, self.replicas)
        return [(order[(row + self.rank) % len(order)], min(row + self.replicas, end)) for row in rows]

    def items(self, epoch: int, done: int) -> list[tuple[Any, int]]:
        length = len(self.order(epoch))
        if self.last_batch != "rollover" or not length:
            return self.dealt(epoch, done, length)
        begin, end = epoch * length + done, self.boundary(epoch + 1)
        return [
            (item, after + (other - epoch) * length)
            for other in range(begin // length, -(-end // length))
            for item, after in self.dealt(other, max(begin - other * length, 0), min(end - other * length, length))
        ]

    def batches(self, epoch: int, done: int) -> list[tuple[Any, int]]:
        """This rank's batches of an epoch, and what is done after each."""
        items = self.items(epoch, done)
        if self.batch_size is None:
            return items
        cut = [items[at : at + self.batch_size] for at in range(0, len(items), self.batch_size)]
        whole = [part for part in cut if len(part) == self.batch_size or self.last_batch != "discard"]
        return [([item for item, _ in part], part[-1][1]) for part in whole]

    def number(self, epoch: int, done: int) -> int:
        """The number of the batch that comes next: so many whole ones come before it."""
        return sum(after <= done for _, after in self.items(epoch, self.begin(epoch))) // (self.batch_size or 1)

    # -- what is in them ------------------------------------------------------------------------------------

    def shards(self, batch: Any) -> tuple[list[list[Any]], bool]:
        """The shards of a batch, and whether they are handed out as a list."""
        if self.batch_size is None and isinstance(batch[0], list | tuple | np.ndarray):
            return [list(shard) for shard in batch], True
        batch = list(batch)
        if self.num_shards is None:
            return [batch], False
        sizes = shares(len(batch), self.num_shards, self.weights)
        ends = [sum(sizes[: shard + 1]) for shard in range(self.num_shards)]
        return [batch[end - size : end] for size, end in zip(sizes, ends, strict=True) if size], True

    def read(self, epoch: int, number: int, batch: Any, choose: Choose) -> Any:
        """The batch; a `Failure`; None if it is left out."""
        if len(batch) == 0:
            return Failure(ValueError)
        shards, listed = self.shards(batch)
        if not all(shards) or (self.max_shards is not None and len(shards) > self.max_shards):
            return Failure(ValueError)
        flat = [index for shard in shards for index in shard]
        if self.length is not None and any(not -self.length <= index < self.length for index in flat):
            return Failure(IndexError)
        errors = [[self.error(index, epoch) for index in shard] for shard in shards]
        if self.on_error != "raise":
            self.skipped += sum(error is not None for raised in errors for error in raised)
        good = [
            index
            for shard, raised in zip(shards, errors, strict=True)
            for index, error in zip(shard, raised, strict=True)
            if error is None
        ]
        made = []
        for at, (shard, raised) in enumerate(zip(shards, errors, strict=True)):
            kept = []
            for place, (index, error) in enumerate(zip(shard, raised, strict=True)):
                if error is None:
                    kept.append(self.sample(index, epoch))
                elif self.on_error == "raise":
                    return Failure(type(error), [index])
                elif callable(self.on_error):
                    kept.append(self.on_error(SampleError(index, epoch, number, at if listed else None, error)))
                elif self.on_error == "replace" and good:
                    kept.append(self.sample(choose(at if listed else None, place, good), epoch))
            if kept:
                made.append(self.batchify(kept))
            elif self.replicated:
                self.skipped -= 1  # this one is raised
                return Failure(Exception, shard)
        return None if not made else made if listed else made[0]

    def error(self, index: Any, epoch: int) -> Exception | None:
        try:
            self.sample(index, epoch)
        except Exception as error:
            return error.with_traceback(None)  # or it keeps every frame up to the loader's iterator
        return None

    # -- where it is ----------------------------------------------------------------------------------------

    @property
    def place(self) -> tuple[int, int]:
        """What a state tells."""
        last = self.told_by()
        return self.next_place if last is None else (last.epoch, last.done)

    def told_by(self) -> NaiveIterator | None:
        """The iterator that delivered last, as long as it matters. Not after a state was loaded, until it is used."""
        last = self.shown
        if last is None or last.ended or self.loaded:
            return None
        return last if last.alive or last.epoch + 1 == self.next_place[0] else None

    @property
    def position(self) -> int:
        last = self.told_by()
        return self.number(*self.next_place) if last is None else last.number

    def batches_in_epoch(self) -> int:
        """``len``: those before the place where the epoch was gone on with are counted."""
        last = self.told_by()
        if last is not None:
            return last.first + len(last.batches)
        return self.number(*self.next_place) + len(self.batches(*self.next_place))

    def set_epoch(self, epoch: int) -> None:
        if epoch != self.next_place[0]:
            self.next_place, self.loaded = (epoch, self.begin(epoch)), False
        self.again = True
        if self.told_by() is None:
            self.pass_end()  # nobody doubts any more which epoch is next

    def after(self, epoch: int, done: int) -> tuple[int, int]:
        """Where the next epoch begins: with rollover behind its beginning, if more is done already."""
        carried = done - len(self.order(epoch)) if self.last_batch == "rollover" else 0
        return epoch + 1, max(self.begin(epoch + 1), carried)

    def load(self, place: tuple[int, int]) -> None:
        """Go on at a place. One at the end of an epoch is the beginning of the next."""
        self.next_place, self.shown, self.loaded, self.again = place, None, True, False
        if self.sized:
            self.pass_end()

    @property
    def at_end(self) -> bool:
        return self.next_place[1] > self.begin(self.next_place[0]) and not self.batches(*self.next_place)

    @property
    def may_be_over(self) -> bool:
        """Whether it depends on what was read which of two epochs is told: the one that is over, or the next."""
        return not self.sized and self.told_by() is None and self.at_end

    def pass_end(self) -> None:
        """The next epoch, if the place is at the end of one; the same once more, if `set_epoch` has asked for it."""
        epoch, done = self.next_place
        if self.at_end:
            self.next_place = (epoch, self.begin(epoch)) if self.again else self.after(epoch, done)
            self.pass_end()

    def iterate(self) -> NaiveIterator:
        return NaiveIterator(self)


class NaiveIterator:
    """One way through an epoch, which begins when the first batch is asked for."""

    def __init__(self, loader: NaiveLoader) -> None:
        self.loader = loader
        self.begun = self.ended = False
        self.alive = True

    def start(self) -> None:
        loader = self.loader
        loader.pass_end()
        self.begun = True
        self.epoch, self.done = loader.next_place
        self.batches = loader.batches(self.epoch, self.done)
        self.first = self.number = loader.number(self.epoch, self.done)
        loader.next_place, loader.loaded = loader.after(self.epoch, self.done), False

    def next(self, choose: Choose = lambda shard, place, good: good[0]) -> Any:
        """The next batch or `Failure`.

        Raises:
            StopIteration: there is none.
        """
        loader = self.loader
        if not self.begun:
            self.start()
        loader.shown = self
        while self.number - self.first < len(self.batches):
            batch, self.done = self.batches[self.number - self.first]
            self.number += 1
            read = loader.read(self.epoch, self.number - 1, batch, choose)
            if read is not None:
                return read
        self.ended = True
        raise StopIteration
