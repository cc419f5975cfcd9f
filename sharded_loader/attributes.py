"""What can be read of a loader, and changed, as a plain attribute.

    loader.prefetch = 4 -> checked -> the loader's parts

Most go by the names that other libraries look for. Owns nothing: the parts are the loader's. What can go wrong: a
wrong value, which is refused; all that decides which samples come, in which order, is read-only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sharded_loader.arguments import check_count, check_prefetch, check_shard_weights
from sharded_loader.devices.placement import Placement
from sharded_loader.engine.pipeline import Pipeline
from sharded_loader.engine.plan import Split
from sharded_loader.engine.pool import Pool
from sharded_loader.progress import Progress
from sharded_loader.sampling.order import EpochOrder
from sharded_loader.stats import Meter


class LoaderAttributes:
    """The attributes of a `ShardedDataLoader`, which sets the parts."""

    _batch_size: int | None
    _order: EpochOrder
    _split: Split
    _placement: Placement
    _pipeline: Pipeline
    _workers: Pool
    _prefetch: int
    _progress: Progress
    _meter: Meter

    @property
    def sampler(self) -> Any:
        """The sampler of single indices."""
        return self._order.sampler

    @property
    def batch_sampler(self) -> Any:
        """The sampler of batches: the one that was given, or this rank's."""
        return self._order.batch_sampler

    @property
    def batch_size(self) -> int | None:
        """Samples per step; None with a given ``batch_sampler``. Read-only: make a new loader for another."""
        return self._batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out. Read-only."""
        return self._order.drops_last

    @property
    def num_workers(self) -> int:
        """How many workers read at the same time; 0 if the loop reads itself."""
        return self._workers.num_workers

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self._order.seed

    @property
    def pool(self) -> Pool:
        """Who reads."""
        return self._workers

    @property
    def prefetch(self) -> int:
        """Batches in flight, from the next batch on."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int | None) -> None:
        self._pipeline.scale_by_group = prefetch is None
        self._prefetch = check_prefetch(prefetch, self.num_workers)
        # Without workers nothing is read ahead, whatever was asked for.
        self._pipeline.prefetch = self._prefetch if self._pipeline.pool.num_workers else 0

    @property
    def device_prefetch(self) -> int:
        """Batches copied to the accelerators ahead, from the next batch on; 2, and 0 where there are none."""
        return self._placement.ahead

    @device_prefetch.setter
    def device_prefetch(self, ahead: int) -> None:
        self._placement.copy_ahead(check_count("device_prefetch", ahead))
        # Not asking the pool for more would leave nothing to be copied ahead.
        self._pipeline.min_ready = max(2, 1 + self._placement.ahead)

    @property
    def shard_weights(self) -> list[float] | None:
        """Shares of the shards, from the next batch dispatched on; None: equal ones."""
        return None if self._split.weights is None else list(self._split.weights)

    @shard_weights.setter
    def shard_weights(self, weights: Sequence[float] | None) -> None:
        self._split.weights = check_shard_weights(weights, self._split)

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the one that begins next."""
        return self._progress.at()[0]

    @property
    def position(self) -> int:
        """Batches delivered in `epoch`."""
        return self._progress.at()[1]

    @property
    def skipped(self) -> list[tuple[Any, BaseException]]:
        """``(index, error)`` of the last 1,000 samples that ``on_error`` skipped or replaced."""
        return self._meter.skipped

    @property
    def num_skipped(self) -> int:
        """How many samples ``on_error`` has skipped or replaced."""
        return self._meter.num_skipped
