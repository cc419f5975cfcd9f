"""Batch samplers: batches split among devices, of samples of similar length, or of balanced classes.

All yield lists of Python ints. Batch k of an epoch is a pure function of (seed, epoch, k).
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from typing import Any

import numpy as np

from sharded_loader.extend import Int64s, Sampler, Table, WrapperSampler
from sharded_loader.extend.engine import check_shares, is_sharded, split_batch
from sharded_loader.extend.order import len_epoch, parts, resolve_seed, shuffled, table_of
from sharded_loader.extend.tools import brief, check_int
from sharded_loader.samplers.bijections import Bijections
from sharded_loader.samplers.index_samplers import (
    Numbers,
    check_number,
    floats,
    integers,
    sort_order,
    sortable,
    underscored,
)

BATCHES = 64
"""Batches to compute at once: a call takes 12 us, whatever its size."""

# Any count of tokens fits below.
MAX_TOKENS = 2**62

MOST_RANKS = 64
"""Maximum factor by which ranks enlarge a sorted bucket; larger buckets would take seconds to sort."""


class NumberedBatches(Sampler[Any]):
    """Base class of batch samplers with random access. The ranks get similar batches in each step."""

    ranks, yields_batches = 1, True
    _at: Callable[[int], Callable[[Int64s], list[Any]]]
    """Returns a function from positions to batches of an epoch, after computing what the whole epoch needs."""

    def __init__(self, shuffle: bool, seed: int | None) -> None:
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None

    def for_ranks(self, ranks: int) -> NumberedBatches:
        if ranks == self.ranks:
            return self
        twin = copy.copy(self)
        twin.ranks = ranks
        return twin

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._at(epoch), BATCHES)

    def _order(self, count: int, *key: Hashable) -> Int64s:
        return shuffled(count, self.seed, *key) if self._shuffle else np.arange(count)


def in_step(count: int, ranks: int, order: Callable[[int], Int64s]) -> tuple[int, Callable[[Int64s], Int64s]]:
    """Arrange ``count`` items in steps of ``ranks`` neighbours; the last step is filled with the items before it.

    ``order`` returns the order of a number of steps. Returns the number of positions, a multiple of ``ranks``, and a
    function from positions to items.

    Example:
        >>> length, item = in_step(5, 2, lambda groups: np.arange(groups)[::-1])
        >>> item(np.arange(length))
        array([3, 4, 2, 3, 0, 1])
    """
    groups = parts(count, ranks, cut=False)
    numbers = order(groups)

    def at(positions: Int64s) -> Int64s:
        first = np.minimum(numbers[positions // ranks] * ranks, count - ranks)
        return (first + positions % ranks) % count

    return groups * ranks, at


class ShardedBatchSampler(WrapperSampler[list[list[int]]]):
    """Split each batch of another batch sampler into shards, one per device.

    Args:
        batch_sampler: yields flat batches of indices.
        num_shards: maximum number of shards. Small batches yield fewer, never empty ones; shard i always goes to device
            i.
        weights: relative size of each shard, such as ``[2, 1]`` for a fast and a slow device; by default equal.
            Positive weights get at least one sample, weights of 0 must come last. See `shard_sizes`.
        costs: cost of each sample of the dataset, such as its length. Samples are then assigned greedily, so that the
            most expensive shard is as cheap as possible.
        seed: seed for a ``batch_sampler`` of another library; drawn if needed.

    Raises:
        TypeError, ValueError: An argument is invalid; while iterating, a batch is empty or already sharded.

    Example:
        >>> from sharded_loader import BatchSampler, SequentialSampler
        >>> list(ShardedBatchSampler(BatchSampler(SequentialSampler(5), 4), 2))
        [[[0, 1], [2, 3]], [[4]]]

    Source of the idea: `gluonnlp.data.ShardedDataLoader`, which leaves the split to its sampler.
    """

    shown = (("num_shards", "num_shards"), ("weights", "weights"), ("costs", "costs"))
    _wraps, yields_batches = "batch_sampler", True
    batch_sampler: Iterable[Any]

    def __init__(
        self,
        batch_sampler: Iterable[Any],
        num_shards: int,
        weights: Sequence[float] | None = None,
        costs: Any = None,
        *,
        seed: int | None = None,
    ) -> None:
        self.num_shards = check_int("num_shards", num_shards, 1, "give how many shards a batch is split into")
        self.weights = None if weights is None else tuple(check_shares(weights, num_shards))
        # Reading single numbers from a list is several times faster than from an array or a tensor.
        is_listed = isinstance(costs, Sequence) or hasattr(costs, "__array__")
        self.costs = floats("costs", costs).tolist() if is_listed else costs
        if costs is not None and not hasattr(costs, "__getitem__"):
            raise TypeError(f"costs is {brief(costs)}: give one number per sample, in a list or an array")
        super().__init__(batch_sampler, seed)

    def epoch_table(self, epoch: int) -> Table:
        return _SplitTable(table_of(self.batch_sampler, epoch, self.seed), self._split)

    def resized(self, size: int, before: int) -> Any:
        inner = self.batch_sampler
        twin = inner.resized(size, before) if isinstance(inner, Sampler) else None
        return None if twin is None else self.over(twin)

    @property
    def samples_in_batch(self) -> object:
        return getattr(self.batch_sampler, "samples_in_batch", None)

    def _split(self, batch: Any, number: int) -> list[list[int]]:
        if not hasattr(batch, "__len__") or not getattr(batch, "ndim", 1):
            text = f"batch {number} is {brief(batch)}, no list of indices"
            raise TypeError(f"{text}: give a batch_sampler, such as BatchSampler(sampler, batch_size)")
        if is_sharded(batch):
            raise ValueError(f"batch {number} is sharded already: give its batch_sampler to the loader as it is")
        if len(batch) == 0:
            raise ValueError(f"batch {number} is empty: batches have at least one index, correct the batch_sampler")
        return split_batch(batch, self.num_shards, self.weights, self.costs)

    def len_epoch(self, epoch: int) -> int:
        return len_epoch(self.batch_sampler, epoch)


class _SplitTable(Table):
    """Table that splits each batch of another one into shards."""

    def __init__(self, batches: Table, split: Callable[[Any, int], list[list[int]]]) -> None:
        self._batches, self._split = batches, split

    def upto(self, begin: int, end: int) -> int:
        return self._batches.upto(begin, end)

    def at(self, positions: Int64s) -> list[list[list[int]]]:
        return list(map(self._split, self._batches.at(positions), positions.tolist()))


class SortedBucketSampler(NumberedBatches):
    """Batches of similar keys: samples are drawn into large buckets, then sorted and batched within each.

    With ``num_replicas``, the ranks have adjacent batches of one bucket in each step. Source of the idea:
    `gluonnlp.data.SortedBucketSampler`.

    Args:
        sort_keys: one comparable key per sample, usually its length.
        batch_size: samples per batch.
        mult: size of a bucket, as a multiple of ``batch_size``; at least 1, otherwise a ValueError.
        reverse: sort in descending order.
        shuffle: fill buckets at random and shuffle their batches, in a new order each epoch.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.

    Example:
        >>> list(SortedBucketSampler([3, 9, 4, 1, 7], 2, mult=2))
        [[1, 2], [0, 3], [4]]
    """

    _sizes = (("batch_size", "batch_size"), ("bucket size", "_bucket_size"))
    decided_by = (*underscored("sort_keys"), *_sizes, *underscored("reverse", "shuffle"))
    cut_by, sized_by = ("batch_size", "bucket size"), ("batch_size", "_in_bucket")
    shown = tuple((name.replace(" ", "_"), attribute) for name, attribute in decided_by)

    def __init__(
        self,
        sort_keys: Numbers,
        batch_size: int,
        mult: float = 100,
        reverse: bool = True,
        shuffle: bool = False,
        seed: int | None = None,
    ) -> None:
        self._sort_keys = sortable(sort_keys)
        self.dataset_length = len(self._sort_keys)
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        check_number("mult", mult, "at least 1", lambda number: number >= 1, "a bucket holds mult * batch_size samples")
        self._in_bucket = int(min(mult * batch_size, 2.0**62))
        self._reverse = bool(reverse)
        super().__init__(shuffle, seed)

    def _at(self, epoch: int) -> Callable[[Int64s], list[list[int]]]:
        key, size, whole = ("sorted bucket", epoch), self.batch_size, self._whole_bucket
        order, per_bucket = self._order(len(self._sort_keys), *key), parts(whole, size, cut=False)

        @lru_cache(maxsize=1)
        def bucket(begin: int) -> tuple[Int64s, Int64s]:
            indices = order[begin : begin + whole]
            indices = indices[sort_order(self._sort_keys[indices], self._reverse)]
            batches = parts(len(indices), size, cut=False)
            length, batch = in_step(batches, self.ranks, lambda groups: self._order(groups, *key, begin))
            return indices, batch(np.arange(length))

        def batch(position: int) -> list[int]:
            number, in_bucket = divmod(position, per_bucket)
            indices, batches = bucket(number * whole)
            begin = int(batches[in_bucket]) * size
            found: list[int] = indices[begin : begin + size].tolist()
            return found

        return lambda positions: list(map(batch, positions.tolist()))

    @property
    def _bucket_size(self) -> int:
        return min(self._in_bucket, max(len(self._sort_keys), 1))

    @property
    def plan(self) -> int:
        return min(self._whole_bucket, len(self._sort_keys))

    @property
    def _whole_bucket(self) -> int:
        """Samples per bucket: with ranks, whole steps, as many as one rank has batches in a bucket."""
        if self.ranks == 1:
            return self._bucket_size
        step = self.batch_size * self.ranks
        return parts(self._bucket_size * min(self.ranks, MOST_RANKS), step, cut=False) * step

    def len_epoch(self, epoch: int) -> int:
        full, rest = divmod(len(self._sort_keys), self._whole_bucket)
        per_bucket, last = (parts(size, self.batch_size, cut=False) for size in (self._whole_bucket, rest))
        return full * per_bucket + parts(last, self.ranks, cut=False) * self.ranks


class BoundedBudgetSampler(NumberedBatches):
    """Batches as large as a budget allows: padded tokens (longest length x samples), samples, or both.

    Samples are sorted by length and cut greedily, so the samples of a batch have similar lengths. With
    ``num_replicas``, the ranks have adjacent batches in each step. Source of the idea:
    `gluonnlp.data.BoundedBudgetSampler`, fairseq's batching by size.

    Args:
        lengths: tokens of each sample, shape (n,); or (n, k) for k parts, of which the longest counts.
        max_num_tokens: maximum tokens per batch after padding; -1 for no limit.
        max_num_sentences: maximum samples per batch; -1 for no limit.
        required_batch_size_multiple: larger batches are cut to a multiple of this (8 suits GPUs), except the last one.
        shuffle: shuffle the batches in a new order each epoch. Otherwise short samples come first.
        seed: decides the order, together with the epoch; by default drawn from torch's default generator.

    Raises:
        TypeError, ValueError: There is no limit, or a sample is longer than ``max_num_tokens``.

    Example:
        >>> list(BoundedBudgetSampler([5, 1, 2, 4, 2], max_num_tokens=6, shuffle=False))
        [[1, 2, 4], [3], [0]]
    """

    decided_by = (("lengths", "_sorted"), ("budget", "_bounds"), ("shuffle", "_shuffle"))
    cut_by = ("budget",)
    shown = underscored("max_num_tokens", "max_num_sentences", "required_batch_size_multiple", "shuffle")

    def __init__(
        self,
        lengths: Numbers,
        max_num_tokens: int = -1,
        max_num_sentences: int = -1,
        required_batch_size_multiple: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        array = length_table(lengths, "give the number of tokens of each sample").max(axis=1)
        if array.min(initial=0) < 0:
            raise ValueError(f"lengths[{array.argmin()}] is {array.min()}: give the number of tokens, 0 or more")
        tokens = check_int("max_num_tokens", max_num_tokens, -MAX_TOKENS, "give the budget, or -1 for none")
        sentences = check_int("max_num_sentences", max_num_sentences, -MAX_TOKENS, "give the budget, or -1 for none")
        multiple = check_int("required_batch_size_multiple", required_batch_size_multiple, 1, "1 asks for nothing")
        if tokens <= 0 and sentences <= 0:
            raise ValueError("there is no budget: give max_num_tokens (after padding), max_num_sentences, or both")
        if tokens > 0 and array.max(initial=0) > tokens:
            text = f"sample {array.argmax()} has {array.max()} tokens, more than max_num_tokens={tokens}"
            raise ValueError(f"{text}: raise the budget, cut the sample, or leave it out of the dataset")
        self._max_num_tokens, self._max_num_sentences = tokens, sentences
        self._required_batch_size_multiple = multiple
        self.dataset_length = len(array)
        self._sorted: Int64s = np.argsort(array, kind="stable")
        self._bounds = _bounds(array[self._sorted].tolist(), tokens, sentences, multiple)
        super().__init__(shuffle, seed)

    def _at(self, epoch: int) -> Callable[[Int64s], list[list[int]]]:
        indices, bounds = self._sorted, self._bounds
        _, batch = in_step(len(bounds) - 1, self.ranks, lambda groups: self._order(groups, "budget", epoch))
        return lambda positions: [indices[bounds[n] : bounds[n + 1]].tolist() for n in batch(positions).tolist()]

    def len_epoch(self, epoch: int) -> int:
        return parts(len(self._bounds) - 1, self.ranks, cut=False) * self.ranks


class ClassBalancedBatchSampler(Sampler[list[int]]):
    """Batches of ``classes`` distinct classes with ``samples`` samples each, for metric and contrastive learning.

    Classes take turns in rounds, and each class yields its samples in passes, both in new random orders. No class
    repeats within a round, no sample within a pass; both continue across epochs. If ``classes`` does not divide the
    number of classes, some sit out each round. With ``num_replicas``, each rank has whole batches, and those of a step
    are distinct. Source of the idea: pytorch-metric-learning's ``MPerClassSampler``, which draws each batch
    independently; "PK batches" (Hermans et al., "In defense of the triplet loss", 2017).

    Args:
        labels: class of each sample: a list, array or tensor of integers, strings or other hashable objects.
        classes: number of classes per batch.
        samples: number of samples of each class per batch; they are adjacent.
        batches: number of batches per epoch; by default about one pass over the data.
        repeat: let smaller classes repeat samples within a batch, instead of raising a ValueError.
        seed: decides all orders, together with the epoch; by default drawn from torch's default generator.

    Raises:
        TypeError, ValueError: Labels are not hashable, or there are too few classes or samples. The loader raises a
            ValueError if the number of labels differs from the dataset's length.

    Example:
        >>> labels = ["cat", "dog", "cat", "owl", "dog", "owl"]
        >>> sampler = ClassBalancedBatchSampler(labels, classes=2, samples=2, batches=3, seed=0)
        >>> for batch in sampler:
        ...     print([labels[index] for index in batch])
        ['owl', 'owl', 'cat', 'cat']
        ['owl', 'owl', 'cat', 'cat']
        ['cat', 'cat', 'dog', 'dog']
    """

    _numbers = (("classes", "classes"), ("samples", "samples"), ("batches", "_batches"), ("repeat", "_repeat"))
    decided_by = (("labels", "_members"), ("sizes of the classes", "_counts"), *_numbers)
    cut_by = ("classes", "samples", "batches")
    order_version, yields_batches = 2, True
    shown = (("labels", "dataset_length"), *_numbers)
    of_each = "label"

    def __init__(
        self,
        labels: Numbers,
        classes: int,
        samples: int,
        batches: int | None = None,
        repeat: bool = False,
        seed: int | None = None,
    ) -> None:
        kinds, numbers = kinds_of(labels, "labels")
        self.classes = check_int("classes", classes, 1, "give the number of classes in a batch")
        self.samples = check_int("samples", samples, 1, "give the number of samples of each class in a batch")
        self.dataset_length = len(numbers)
        if self.classes > len(kinds):
            raise ValueError(f"classes is {classes}, but the labels have {len(kinds)} classes: give at most that many")
        self._counts = np.bincount(numbers, minlength=len(kinds))
        small = np.flatnonzero(self._counts < self.samples)
        if small.size and not repeat:
            text = f"samples is {samples}, but class {brief(kinds[small[0]])} has {self._counts[small[0]]}, and"
            raise ValueError(f"{text} {small.size} classes have too few: give fewer, or repeat=True, or leave them out")
        if batches is None:
            batches = max(len(numbers) // (self.classes * self.samples), 1)
        self._batches = check_int("batches", batches, 0, "give the number of batches in an epoch")
        self._members = np.argsort(numbers, kind="stable")
        self._repeat = bool(repeat)
        self.seed = resolve_seed(seed)

    def epoch_table(self, epoch: int) -> Table:
        count, classes, samples = len(self._counts), self.classes, self.samples
        begins = np.cumsum(self._counts) - self._counts
        in_pass = np.maximum(self._counts // samples, 1)  # batches per pass over a class
        # Keyed bijections give single items of a shuffle, so the last rank needs no whole shuffle per batch.
        of_round, of_pass = Bijections(self.seed, "class round"), Bijections(self.seed, "class samples")

        def at(positions: Int64s) -> list[list[int]]:
            rounds, batch = np.divmod(positions + epoch * self._batches, count // classes)
            places = (batch[:, None] * classes + np.arange(classes)).ravel()
            rounds = np.repeat(rounds, classes)
            chosen = of_round(places, np.full_like(places, count), rounds)
            passes, turn = np.divmod(rounds, in_pass[chosen])
            sizes = np.repeat(self._counts[chosen], samples)
            # Classes with too few samples for a batch wrap around.
            inside = (turn[:, None] * samples + np.arange(samples)).ravel() % sizes
            found = of_pass(inside, sizes, np.repeat(passes * count + chosen, samples))
            indices = self._members[np.repeat(begins[chosen], samples) + found]
            batches: list[list[int]] = indices.reshape(len(positions), -1).tolist()
            return batches

        return Table(self._batches, at, BATCHES)

    def len_epoch(self, epoch: int) -> int:
        return self._batches


def kinds_of(labels: Any, name: str) -> tuple[list[Any], Int64s]:
    """Return the distinct labels, sorted if possible, and the number of each sample's label among them.

    Example:
        >>> kinds_of(["b", "a", "b"], "by")
        (['a', 'b'], array([1, 0, 1]))
    """
    if hasattr(labels, "__array__"):
        labels = np.asarray(labels)
        if labels.ndim != 1:
            raise ValueError(f"{name} has shape {labels.shape}: give one label per sample, of shape (samples,)")
        labels = labels.tolist()
    try:
        if isinstance(labels, Mapping | Set):
            raise TypeError("a dict or set has no order of samples")
        labels = labels if isinstance(labels, Sequence) else list(labels)
        seen = dict.fromkeys(labels)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of hashable labels, one per sample: {error}") from None
    try:
        kinds = sorted(seen)
    except TypeError:  # not comparable
        kinds = [*seen]
    numbers = {kind: number for number, kind in enumerate(kinds)}
    return kinds, np.fromiter(map(numbers.__getitem__, labels), np.int64)


def length_table(lengths: object, advice: str) -> Int64s:
    """Convert lengths, of one or several parts per sample, to an int64 array of shape (samples, parts)."""
    array = integers("lengths", lengths, "integers of shape (n,) or (n, k)", advice, (1, 2))
    return array.astype(np.int64).reshape(len(array), -1 if array.size else 1)


def _bounds(lengths: list[int], tokens: int, sentences: int, multiple: int) -> list[int]:
    bounds = [0]
    total = len(lengths)
    while (begin := bounds[-1]) < total:
        most = min(total - begin, sentences) if sentences > 0 else total - begin
        size = most
        if tokens > 0:
            if lengths[begin]:
                most = min(most, tokens // lengths[begin])
            # Padded tokens grow monotonically with n.
            size = bisect_left(range(1, most + 1), True, key=lambda n: n * lengths[begin + n - 1] > tokens)
        if begin + size < total and size > multiple:
            size -= size % multiple
        bounds.append(begin + size)
    return bounds
