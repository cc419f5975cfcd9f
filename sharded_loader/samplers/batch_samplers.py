"""Batches of indices: split into shards, of samples of similar length, or of some classes each.

    ShardedBatchSampler    each batch of another batch sampler, split into shards (`sharded_loader.engine.split`)
    SortedBucketSampler    sorted within large random buckets
    BoundedBudgetSampler   as many samples as a budget of padded tokens allows

Out: lists of Python ints, one list per batch. Batch k of an epoch is a pure function of (seed, epoch, k).

What can go wrong: weights or costs do not fit the shards, or a batch is empty or sharded already.
"""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sharded_loader.extend import Int64s, Sampler, Table, WrapperSampler
from sharded_loader.extend.engine import check_shares, is_sharded, split_batch
from sharded_loader.extend.order import Bijections, len_epoch, parts, resolve_seed, shuffled, table_of
from sharded_loader.extend.tools import brief, check_int
from sharded_loader.samplers.index_samplers import Numbers, integers, sort_order, sortable, underscored

BATCHES = 64
"""How many batches a batch sampler of ours makes at once: to ask for one takes 12 us, whatever its size."""

# Any count of tokens fits below.
MAX_TOKENS = 2**62

MOST_RANKS = 64
"""A sorted bucket grows with the ranks up to this number. A larger one would be sorted for seconds."""


class NumberedBatches(Sampler[Any]):
    """Base class of samplers that know each batch by its number: a subclass says what is in it.

    The order is made for a number of ranks, which have similar batches in each step.

    Args:
        shuffle: shuffle the batches in each epoch again.
        seed: with the epoch it decides the order. None draws one, if it is needed.
    """

    ranks = 1

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

    def _at(self, epoch: int) -> Callable[[Int64s], list[Any]]:
        """Positions -> batches. What the whole epoch needs is made now."""
        raise NotImplementedError

    def _order(self, count: int, *key: Hashable) -> Int64s:
        """An order of so many things, shuffled if this sampler shuffles."""
        return shuffled(count, self.seed, *key) if self._shuffle else np.arange(count)


def in_step(count: int, ranks: int, order: Callable[[int], Int64s]) -> tuple[int, Callable[[Int64s], Int64s]]:
    """Put neighbours into one step: groups of as many items as there are ranks, and the groups in any order.

    Args:
        count: the number of items.
        ranks: the size of a group. The items before fill the last group, so that it has items of its kind.
        order: how many groups there are -> the order of them.

    Returns:
        The number of positions, which ``ranks`` divides; and a function from positions to items.

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
    """Splits each batch of another batch sampler into shards, one per device.

    Args:
        batch_sampler: yields flat batches of indices.
        num_shards: most shards per batch. A batch with fewer samples gives fewer shards, the first ones, and never an
            empty one: shard i is always on device i.
        weights: one number per shard (``[2, 1]`` for a fast and a slow device); None for even shares. A positive
            weight gets at least one sample. Weights of 0 must come last. See `shard_sizes`.
        costs: one number per sample of the dataset, e.g. its length: the most expensive shard is then as
            cheap as greedy assignment makes it.
        seed: starts ``batch_sampler`` if it is third-party. None draws one if it is needed.

    Raises:
        TypeError, ValueError: for bad ``num_shards``, ``weights`` or ``costs``; while iterating, for a
            batch that is empty or sharded already.

    Example:
        >>> from sharded_loader import BatchSampler, SequentialSampler
        >>> list(ShardedBatchSampler(BatchSampler(SequentialSampler(5), 4), 2))
        [[[0, 1], [2, 3]], [[4]]]

    Source of the idea: `gluonnlp.data.ShardedDataLoader`, which leaves the split to its sampler.
    """

    shown = (("num_shards", "num_shards"), ("weights", "weights"), ("costs", "costs"))
    _wraps = "batch_sampler"
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
        # A list of floats is read several times faster, one number at a time, than an array or a tensor.
        self.costs = np.asarray(costs).tolist() if hasattr(costs, "__array__") else costs
        if isinstance(self.costs, Sequence) and self.costs and np.ndim(self.costs) != 1:
            raise ValueError(f"costs must be 1-D, got shape {np.shape(costs)}: give one number per sample")
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
        if is_sharded(batch):
            raise ValueError(f"batch {number} is sharded already: give its batch_sampler to the loader as it is")
        if len(batch) == 0:
            raise ValueError(f"batch {number} is empty: batches have at least one index, correct the batch_sampler")
        return split_batch(batch, self.num_shards, self.weights, self.costs)

    def len_epoch(self, epoch: int) -> int:
        return len_epoch(self.batch_sampler, epoch)


class _SplitTable(Table):
    """The batches of another table, each split into shards."""

    def __init__(self, batches: Table, split: Callable[[Any, int], list[list[int]]]) -> None:
        self._batches, self._split = batches, split

    def upto(self, begin: int, end: int) -> int:
        return self._batches.upto(begin, end)

    def at(self, positions: Int64s) -> list[list[list[int]]]:
        return list(map(self._split, self._batches.at(positions), positions.tolist()))


class SortedBucketSampler(NumberedBatches):
    """Batches of similar keys: samples are cut into large buckets, and sorted and batched within each.

    Under ``num_replicas`` all ranks have neighbours of one bucket in each step.

    Args:
        sort_keys: one key per sample: numbers, or anything that can be compared.
        batch_size: samples per batch.
        mult: a bucket has ``int(mult * batch_size)`` samples; at least 1.
        reverse: greatest key first within a bucket.
        shuffle: fill the buckets at random, and shuffle the batches of a bucket, in each epoch again.
        seed: with the epoch it decides the shuffles. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: for a ``batch_size`` or ``mult`` below 1.

    Example:
        >>> list(SortedBucketSampler([3, 9, 4, 1, 7], 2, mult=2))
        [[1, 2], [0, 3], [4]]

    Source of the idea: `gluonnlp.data.SortedBucketSampler`.
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
        if not mult >= 1:
            raise ValueError(f"mult must be at least 1, got {mult}: a bucket holds mult * batch_size samples")
        self._in_bucket = int(min(mult * batch_size, 2.0**62))
        self._reverse = bool(reverse)
        super().__init__(shuffle, seed)

    def _at(self, epoch: int) -> Callable[[Int64s], list[list[int]]]:
        key, size, whole = ("sorted bucket", epoch), self.batch_size, self._whole_bucket
        order, per_bucket = self._order(len(self._sort_keys), *key), parts(whole, size, cut=False)

        @lru_cache(maxsize=1)
        def bucket(begin: int) -> tuple[Int64s, Int64s]:
            """The indices of a bucket, sorted, and the order of its batches."""
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
        """The samples of a bucket: under ranks whole steps, and as many steps as one rank has batches of a bucket."""
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

    Samples are sorted by length and cut greedily, so that a batch holds samples of similar length. Under
    ``num_replicas`` all ranks have neighbours in each step.

    Args:
        lengths: shape (n,), or (n, k) for samples of several parts, of which the longest counts; in tokens.
        max_num_tokens: most tokens of a batch after padding; -1 for no limit.
        max_num_sentences: most samples of a batch; -1 for no limit.
        required_batch_size_multiple: cut batches that are larger to a multiple of this (8 suits GPUs). The
            last batch, and smaller ones, stay as they are.
        shuffle: shuffle the batches in each epoch again. Without it, short samples come first.
        seed: with the epoch it decides that order. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: if there is neither limit, or a sample is longer than ``max_num_tokens``.

    Example:
        >>> list(BoundedBudgetSampler([5, 1, 2, 4, 2], max_num_tokens=6, shuffle=False))
        [[1, 2, 4], [3], [0]]

    Source of the idea: `gluonnlp.data.BoundedBudgetSampler`, fairseq's batching by size.
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
    """Batches of ``classes`` different classes, with ``samples`` samples of each: for metric and contrastive learning.

    The classes take turns in rounds, each in a new random order: in a round no class comes twice. If ``classes`` does
    not divide the number of classes, other classes sit out in each round. A class gives its samples in passes, each in
    a new random order: in a pass no sample comes twice. Rounds and passes go on from epoch to epoch. Under
    ``num_replicas`` each rank has whole batches, and the batches of a step are different ones.

    Args:
        labels: the class of each sample: integers, texts or other hashable objects; an array, a tensor or a list.
        classes: the number of classes in a batch.
        samples: the number of samples of each class in a batch. The samples of a class stand together.
        batches: the number of batches in an epoch. None: as many as hold about as many samples as there are labels.
        repeat: let a class with fewer samples give each of them several times in a batch. False: it is an error.
        seed: decides all random orders. None draws one from torch's default generator.

    Raises:
        TypeError: ``labels`` are no sequence of hashable objects.
        ValueError: there are fewer classes than ``classes``, a class has fewer samples than ``samples``, or a number
            is below 1. The loader raises it if there is not one label per sample of its dataset.

    Example:
        >>> labels = ["cat", "dog", "cat", "owl", "dog", "owl"]
        >>> sampler = ClassBalancedBatchSampler(labels, classes=2, samples=2, batches=3, seed=0)
        >>> for batch in sampler:
        ...     print([labels[index] for index in batch])
        ['owl', 'owl', 'cat', 'cat']
        ['owl', 'owl', 'cat', 'cat']
        ['cat', 'cat', 'dog', 'dog']

    Source of the idea: ``MPerClassSampler`` of pytorch-metric-learning, which draws the samples of each batch
    independently, and repeats the samples of small classes. "PK batches" (Hermans et al., "In defense of the triplet
    loss", 2017).
    """

    _numbers = (("classes", "classes"), ("samples", "samples"), ("batches", "_batches"), ("repeat", "_repeat"))
    decided_by = (("labels", "_members"), ("sizes of the classes", "_counts"), *_numbers)
    cut_by = ("classes", "samples", "batches")
    order_version = 2
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
        in_pass = np.maximum(self._counts // samples, 1)  # the batches that a class has samples for
        # Small shuffles that are all computed in one step, so that the last rank needs no whole shuffle per batch.
        of_round, of_pass = Bijections(self.seed, "class round"), Bijections(self.seed, "class samples")

        def at(positions: Int64s) -> list[list[int]]:
            rounds, batch = np.divmod(positions + epoch * self._batches, count // classes)
            places = (batch[:, None] * classes + np.arange(classes)).ravel()
            rounds = np.repeat(rounds, classes)
            chosen = of_round(places, np.full_like(places, count), rounds)
            passes, turn = np.divmod(rounds, in_pass[chosen])
            sizes = np.repeat(self._counts[chosen], samples)
            # A class with fewer samples than a batch needs goes round.
            inside = (turn[:, None] * samples + np.arange(samples)).ravel() % sizes
            found = of_pass(inside, sizes, np.repeat(passes * count + chosen, samples))
            indices = self._members[np.repeat(begins[chosen], samples) + found]
            batches: list[list[int]] = indices.reshape(len(positions), -1).tolist()
            return batches

        return Table(self._batches, at, BATCHES)

    def len_epoch(self, epoch: int) -> int:
        return self._batches


def kinds_of(labels: Any, name: str) -> tuple[list[Any], Int64s]:
    """The different labels, in order if they have one, and the number of each sample's label among them.

    Raises:
        TypeError, ValueError: they are no sequence of hashable objects; ``name`` is that of the argument.

    Example:
        >>> kinds_of(["b", "a", "b"], "by")
        (['a', 'b'], array([1, 0, 1]))
    """
    if hasattr(labels, "__array__"):
        labels = np.asarray(labels)
        if labels.ndim != 1:
            raise ValueError(f"{name} has shape {labels.shape}: give one label per sample, of shape (samples,)")
        labels = labels.tolist()
    seen: dict[Any, int] = {}
    try:
        numbers = np.fromiter((seen.setdefault(label, len(seen)) for label in labels), np.int64)
    except TypeError as error:
        raise TypeError(f"{name} must be a sequence of hashable labels, one per sample: {error}") from None
    try:
        kinds = sorted(seen)
    except TypeError:  # they have no order
        return list(seen), numbers
    ranks = np.empty(len(kinds), np.int64)
    ranks[[seen[kind] for kind in kinds]] = np.arange(len(kinds))
    return kinds, ranks[numbers]


def length_table(lengths: object, advice: str) -> Int64s:
    """Lengths of samples, of one part or of several, as an int64 array of shape (samples, parts).

    Raises:
        ValueError: they are something else; ``advice`` ends the message.
    """
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError("lengths have rows of different sizes: give as many integers for each sample") from None
    array = integers("lengths", array, "integers of shape (n,) or (n, k)", advice, (1, 2))
    return array.astype(np.int64).reshape(len(array), -1 if array.size else 1)


def _bounds(lengths: list[int], tokens: int, sentences: int, multiple: int) -> list[int]:
    """Where batches begin in ascending lengths, and the end of the last."""
    bounds = [0]
    total = len(lengths)
    while (begin := bounds[-1]) < total:
        most = min(total - begin, sentences) if sentences > 0 else total - begin
        size = most
        if tokens > 0:
            if lengths[begin]:
                most = min(most, tokens // lengths[begin])
            # Padded tokens of the first n only grow with n.
            size = bisect_left(range(1, most + 1), True, key=lambda n: n * lengths[begin + n - 1] > tokens)
        if begin + size < total and size > multiple:
            size -= size % multiple
        bounds.append(begin + size)
    return bounds
