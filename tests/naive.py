"""A loader that is too simple to be wrong: plain lists, one sample after the other, nothing read ahead.

    order(epoch) -> NaiveLoader.batches(epoch, done) -> read(...) -> the batch, or the Failure in its place
    iterate() -> NaiveIterator.next()                   epoch, position, length, place, load, set_epoch

It is written from what the documentation promises, and it shares no code with the library. What it asks the library
for is what it does not check: the order that a sampler gives an epoch, and the random numbers that a sample draws.

A place is ``(epoch, done)``: so many items of the epoch's global order are done. Items are indices, or batches where
a batch sampler was given. With ``rollover`` ``done`` is negative while items of earlier epochs are still due.
"""

import dataclasses
import itertools
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
    if dataclasses.is_dataclass(first):
        columns = collate([vars(sample) for sample in samples])
        return type(first)(**columns)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(collate(list(column)) for column in zip(*samples, strict=True)))
    numbers = isinstance(first, list) and all(isinstance(one, int | float) for one in first)
    if isinstance(first, list | tuple) and not numbers:
        return [collate(list(column)) for column in zip(*samples, strict=True)]
    if isinstance(first, str | bytes) or first is None:
        return list(samples)
    return torch.from_numpy(np.stack([np.asarray(sample) for sample in samples]))


# ``on_error="replace"``: which of the good samples of a batch stands at this place of this shard (None: no shards).
Choose = Callable[[int | None, int, list[Any]], Any]


@dataclass
class NaiveLoader:
    """One rank's loader."""

    order: Callable[[int], Sequence[Any]]  # epoch -> all items of the epoch, as all ranks share them
    sample: Callable[[Any, int], Any]  # (index, epoch) -> the sample
    length: int | None  # samples in the dataset; None: any index is fine
    sized: bool  # whether the sampler has a length; otherwise the end of an epoch shows only when it is read
    batchify: Callable[[list[Any]], Any]  # samples -> a batch
    options: dict[str, Any]  # arguments of the loader that it is compared with

    def __post_init__(self) -> None:
        given, devices = self.options.get, len(self.options.get("devices", ())) or None
        self.batch_size, self.last_batch = given("batch_size"), given("last_batch") or "keep"
        self.on_error, self.weights = given("on_error"), given("shard_weights")
        self.replicas, self.rank, self.replicated = given("num_replicas", 1), given("rank", 0), "rank" in self.options
        self.num_shards, self.max_shards = given("num_shards", devices), 1 if given("device") else devices
        self.next_place = (0, self.begin(0))
        self.shown: NaiveIterator | None = None
        self.loaded, self.again, self.skipped = False, False, 0

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

    def shards(self, batch: Any) -> tuple[list[list[Any]], bool]:
        """The shards of a batch, and whether they are handed out as a list."""
        if self.batch_size is None and isinstance(batch[0], list | tuple | np.ndarray):
            return [list(shard) for shard in batch], True
        batch = list(batch)
        if self.num_shards is None:
            return [batch], False
        items, sizes = iter(batch), shares(len(batch), self.num_shards, self.weights)
        return [list(itertools.islice(items, size)) for size in sizes if size], True

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
        tried = [[(index, self.error(index, epoch)) for index in shard] for shard in shards]
        good = [index for shard in tried for index, error in shard if error is None]
        if self.on_error != "raise":
            self.skipped += len(flat) - len(good)
        made = []
        for at, shard in enumerate(tried):
            kept = []
            for place, (index, error) in enumerate(shard):
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
                return Failure(Exception, shards[at])
        return None if not made else made if listed else made[0]

    def error(self, index: Any, epoch: int) -> Exception | None:
        try:
            self.sample(index, epoch)
        except Exception as error:
            return error.with_traceback(None)  # or it keeps every frame up to the loader's iterator
        return None

    @property
    def place(self) -> tuple[int, int]:
        """What a state tells."""
        last = self.told_by()
        return self.next_place if last is None else (last.epoch, last.done)

    def told_by(self) -> "NaiveIterator | None":
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
        if self.sized and self.told_by() is None:  # otherwise the loader learns in `next` that the epoch is over
            self.pass_end()

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


class NaiveIterator:
    """One way through an epoch, which begins when the first batch is asked for."""

    def __init__(self, loader: NaiveLoader) -> None:
        self.loader, self.alive = loader, True
        self.begun = self.ended = False

    def next(self, choose: Choose) -> Any:
        """The next batch or `Failure`; `StopIteration` if there is none."""
        loader = self.loader
        if not self.begun:
            loader.pass_end()
            self.begun, (self.epoch, self.done) = True, loader.next_place
            self.batches = loader.batches(self.epoch, self.done)
            self.first = self.number = loader.number(self.epoch, self.done)
            loader.next_place, loader.loaded = loader.after(self.epoch, self.done), False
        loader.shown = self
        while self.number - self.first < len(self.batches):
            batch, self.done = self.batches[self.number - self.first]
            self.number += 1
            read = loader.read(self.epoch, self.number - 1, batch, choose)
            if read is not None:
                return read
        self.ended = True
        raise StopIteration
