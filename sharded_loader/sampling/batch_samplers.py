"""Batches of indices: of any sampler's, split into shards, or of samples of similar length.

    BatchSampler           any sampler's items, ``batch_size`` at a time
    ShardedBatchSampler    each batch of another batch sampler, split into shards (`sharded_loader.engine.split`)
    SortedBucketSampler    sorted within large random buckets
    BoundedBudgetSampler   as many samples as a budget of padded tokens allows

Out: lists of Python ints, one list per batch. Batch k of an epoch is a pure function of (seed, epoch, k).
With ``last_batch="rollover"`` the epochs follow each other without end, and are cut into batches. With N items per
epoch and B items per batch, epoch e owns the batches floor(e*N/B) to floor((e+1)*N/B) - 1. Example: of 5 items in twos
epoch 0 owns batches 0 and 1, and epoch 1 owns batches 2 to 4. These are the batches that Gluon gives, but they do not
depend on what was iterated before.

What can go wrong: with rollover, a sampler of another library yields more or fewer items than its ``len``: ValueError.
Weights or costs do not fit the shards, or a batch is empty or sharded already.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.engine.split import check_shares, is_sharded, split_batch
from sharded_loader.randomness.shuffle import Indices, shuffled
from sharded_loader.sampling.base import BalancedSampler, WrapperSampler, check_choice, resolve_seed, underscored
from sharded_loader.sampling.foreign import len_epoch, name_of, table_of
from sharded_loader.sampling.index_samplers import sort_order, sortable
from sharded_loader.sampling.tables import BATCHES, Batched, Rolling, Table, in_step, parts

# Any count of tokens fits below.
MAX_TOKENS = 2**62

MOST_RANKS = 64
"""A sorted bucket grows with the ranks up to this number. A larger one would be sorted for seconds."""

LAST_BATCH = ("keep", "discard", "rollover")


class BatchSampler(WrapperSampler[list[int]]):
    """Items of another sampler, ``batch_size`` at a time.

    Args:
        sampler: any sampler, or an iterable that can be read again and again.
        batch_size: items per batch.
        last_batch: what happens to the items that do not fill a batch. ``"keep"``: a smaller last batch;
            ``"discard"``: left out; ``"rollover"``: first in the next epoch.
        seed: starts ``sampler`` if it is foreign (torch's, say). None draws one from torch's default
            generator if it is needed.

    Raises:
        TypeError, ValueError: for a ``batch_size`` that is not an integer of at least 1, an unknown
            ``last_batch``, and a ``sampler`` that can be read only once.

    Example:
        >>> from sharded_loader import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(5), 2, "rollover")
        >>> list(batches), list(batches)
        ([[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]])

    Source of the idea: `mxnet.gluon.data.BatchSampler`.
    """

    decided_by = (("batch_size", "batch_size"), ("last_batch", "last_batch"))
    sampler: Iterable[Any]

    def __init__(
        self, sampler: Iterable[Any], batch_size: int, last_batch: str = "keep", *, seed: int | None = None
    ) -> None:
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self.last_batch = check_choice("last_batch", last_batch, LAST_BATCH, "BatchSampler")
        super().__init__(sampler, seed)

    @property
    def drop_last(self) -> bool:
        """torch's name for ``last_batch == "discard"``."""
        return self.last_batch == "discard"

    def epoch_table(self, epoch: int) -> Table:
        if self.last_batch != "rollover":
            return Batched(table_of(self.sampler, epoch, self.seed), self.batch_size, self.drop_last)
        open_epoch = partial(table_of, self.sampler, seed=self.seed)
        return self._rolling(epoch).table(open_epoch, 0, name_of(self.sampler))

    def len_epoch(self, epoch: int) -> int:
        if self.last_batch == "rollover":
            return self._rolling(epoch).length()
        return parts(len_epoch(self.sampler, epoch), self.batch_size, self.drop_last)

    def _rolling(self, epoch: int) -> Rolling:
        return Rolling(len_epoch(self.sampler, epoch), self.batch_size, epoch)


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
        seed: starts ``batch_sampler`` if it is foreign. None draws one if it is needed.

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

    def _split(self, batch: Any, number: int) -> list[list[int]]:
        if is_sharded(batch):
            raise ValueError(
                f"batch {number} is sharded already, ShardedBatchSampler splits flat batches: "
                "give its batch_sampler to the loader as it is"
            )
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

    def at(self, positions: Indices) -> list[list[list[int]]]:
        return list(map(self._split, self._batches.at(positions), positions.tolist()))


class SortedBucketSampler(BalancedSampler[list[int]]):
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
    shown = tuple((name.replace(" ", "_"), attribute) for name, attribute in decided_by)

    def __init__(
        self,
        sort_keys: Sequence[Any] | npt.NDArray[Any],
        batch_size: int,
        mult: float = 100,
        reverse: bool = True,
        shuffle: bool = False,
        seed: int | None = None,
    ) -> None:
        self._sort_keys = sortable(sort_keys)
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        if not mult >= 1:
            raise ValueError(f"mult must be at least 1, got {mult}: a bucket holds mult * batch_size samples")
        self._bucket_size = min(int(min(mult * batch_size, 2.0**62)), max(len(self._sort_keys), 1))
        self._reverse = bool(reverse)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None

    def epoch_table(self, epoch: int) -> Table:
        key = (self.seed, "sorted bucket", epoch)
        count, size = len(self._sort_keys), self.batch_size
        order = shuffled(count, *key) if self._shuffle else np.arange(count, dtype=np.int64)
        per_bucket = parts(self._whole_bucket, size, cut=False)

        @lru_cache(maxsize=1)
        def bucket(begin: int) -> tuple[Indices, Indices]:
            """The indices of a bucket, sorted, and the order of its batches."""
            indices = order[begin : begin + self._whole_bucket]
            indices = indices[sort_order(self._sort_keys[indices], self._reverse)]
            batches = parts(len(indices), size, cut=False)
            length, batch = in_step(
                batches,
                self.ranks,
                lambda groups: shuffled(groups, *key, begin) if self._shuffle else np.arange(groups),
            )
            return indices, batch(np.arange(length))

        def batch(position: int) -> Any:
            number, in_bucket = divmod(position, per_bucket)
            indices, batches = bucket(number * self._whole_bucket)
            begin = int(batches[in_bucket]) * size
            return indices[begin : begin + size].tolist()

        return Table(self.len_epoch(epoch), lambda positions: list(map(batch, positions.tolist())), BATCHES)

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


class BoundedBudgetSampler(BalancedSampler[list[int]]):
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

    decided_by = (("lengths", "_order"), ("budget", "_bounds"), ("shuffle", "_shuffle"))
    shown = underscored("max_num_tokens", "max_num_sentences", "required_batch_size_multiple", "shuffle")

    def __init__(
        self,
        lengths: Sequence[Any] | npt.NDArray[Any],
        max_num_tokens: int = -1,
        max_num_sentences: int = -1,
        required_batch_size_multiple: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        table = length_table(lengths, "give the number of tokens of each sample")
        array = table.max(axis=1) if table.size else table.reshape(-1)
        if array.size and array.min() < 0:
            index = int(array.argmin())
            raise ValueError(f"lengths[{index}] is {array[index]}: give the number of tokens, 0 or more")
        tokens = check_int("max_num_tokens", max_num_tokens, -MAX_TOKENS, "give the budget, or -1 for none")
        sentences = check_int("max_num_sentences", max_num_sentences, -MAX_TOKENS, "give the budget, or -1 for none")
        multiple = check_int("required_batch_size_multiple", required_batch_size_multiple, 1, "1 asks for nothing")
        if tokens <= 0 and sentences <= 0:
            raise ValueError(
                "there is no budget: give max_num_tokens (padded tokens per batch), max_num_sentences, or both"
            )
        if tokens > 0 and array.size and array.max() > tokens:
            index = int(array.argmax())
            raise ValueError(
                f"sample {index} has {array[index]} tokens, more than max_num_tokens={tokens}: "
                "raise the budget, cut the sample, or leave it out of the dataset"
            )
        self._max_num_tokens, self._max_num_sentences = tokens, sentences
        self._required_batch_size_multiple = multiple
        self._order: Indices = np.argsort(array, kind="stable")
        self._bounds = _bounds(array[self._order].tolist(), tokens, sentences, multiple)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None

    def epoch_table(self, epoch: int) -> Table:
        key = (self.seed, "budget", epoch)
        length, batch = in_step(
            len(self._bounds) - 1,
            self.ranks,
            lambda groups: shuffled(groups, *key) if self._shuffle else np.arange(groups),
        )
        order, bounds = self._order, self._bounds

        def at(positions: Indices) -> list[list[int]]:
            return [order[bounds[n] : bounds[n + 1]].tolist() for n in batch(positions).tolist()]

        return Table(length, at, BATCHES)

    def len_epoch(self, epoch: int) -> int:
        return parts(len(self._bounds) - 1, self.ranks, cut=False) * self.ranks


def length_table(lengths: Any, advice: str) -> Indices:
    """Lengths of samples, of one part or of several, as an int64 array of shape (samples, parts).

    Raises:
        ValueError: they are something else; ``advice`` ends the message.
    """
    try:
        array = np.asarray(lengths)
    except ValueError:
        raise ValueError(
            "lengths have rows of different sizes: give one integer per sample, or the same number for each"
        ) from None
    if array.ndim not in (1, 2) or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(
            f"lengths must be integers of shape (n,) or (n, k), got shape {array.shape} and dtype {array.dtype}: "
            f"{advice}"
        )
    table: Indices = array.astype(np.int64).reshape(len(array), -1 if array.size else 1)
    return table


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
