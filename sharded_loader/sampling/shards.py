"""`ShardedBatchSampler`: splits the batches of another batch sampler into shards, as `engine.split` says.

What can go wrong: weights that are no weights, costs that do not cover an index; a batch that is empty, or sharded
already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.engine.split import check_shares, is_sharded, split_batch
from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.base import WrapperSampler
from sharded_loader.sampling.foreign import len_epoch, table_of
from sharded_loader.sampling.tables import Table


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
        self._block = 1
        self._batches, self._split = batches, split

    def upto(self, begin: int, end: int) -> int:
        return self._batches.upto(begin, end)

    def at(self, positions: Indices) -> list[list[list[int]]]:
        return list(map(self._split, self._batches.at(positions), positions.tolist()))
