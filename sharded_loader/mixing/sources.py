"""``with_source=True``: the source and the index of each sample, given with its batch.

    task and result of a batch -> Sources -> SampleSource of each shard

A module of its own, because workers that read a mixture import no torch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from sharded_loader.extend import Order, Result, Task
from sharded_loader.extend.data import mixture_of
from sharded_loader.extend.engine import plain_indices
from sharded_loader.mixing import in_order
from sharded_loader.mixing.schedule import EACH


class SampleSource(NamedTuple):
    """Source and index of each sample of a batch, in host memory; ``with_source=True`` gives it with the batch.

    Attributes:
        source: Number of the dataset in `interleave`, otherwise 0; of iterable data the part, or the dataset of a
            mixture. An int64 tensor of shape (batch,).
        index: Index of the sample as `ShardedDataLoader.indices` shows it, in a mixture that in its dataset; of
            iterable data the running number in the part. An int64 tensor of shape (batch,), or a list if indices are no
            numbers.

    With `PackSampler`, the documents of the rows count, in their order, and a cut document several times.

    Example:
        >>> from sharded_loader import ShardedDataLoader, interleave
        >>> both = interleave([[10, 11, 12], [20, 21, 22]])
        >>> for batch, origin in ShardedDataLoader(both, 4, with_source=True):
        ...     print(batch.tolist(), origin.source.tolist(), origin.index.tolist())
        [20, 10, 11, 21] [1, 0, 0, 1] [0, 0, 1, 1]
        [22, 12] [1, 0] [2, 2]
    """

    source: torch.Tensor
    index: Any


class Sources:
    """Sources of the batches of a loader over a dataset, in an order.

    The main process knows the samples of a batch before it is read: the task has their indices, and the result has
    others where ``on_error`` left out or replaced some, or where a part of iterable data ended. So workers, collate
    functions and messages do no more than without it. A TypeError if the streams of a mixture drop out or start over:
    their order is known only where they are read.
    """

    def __init__(self, dataset: Any, order: Order[Any]) -> None:
        self._dataset, self._order, self._mixture = dataset, order, mixture_of(dataset)
        if isinstance(dataset, in_order.InterleavedIterable) and (dataset.stop == EACH or order.steps is not None):
            text = "with_source: streams that drop out, or start over with steps_per_epoch=, have an order known only"
            raise TypeError(f"{text} where they are read: let each stream yield its number with its samples")

    def __call__(self, task: Task, result: Result) -> SampleSource | list[SampleSource]:
        shards = [SampleSource(*self._of_shard(task, indices)) for indices in result.read or task.shards]
        return shards if task.sharded or len(shards) > 1 else shards[0]

    def _of_shard(self, task: Task, given: Any) -> tuple[torch.Tensor, Any]:
        if task.part is not None:
            part, places, stream = task.part.number, [place for _, place in given], self._order.stream
            found = [part] * len(places)
            if isinstance(self._dataset, in_order.InterleavedIterable) and stream is not None:
                found = self._dataset.sources_at(places, part, stream.parts)
            return torch.tensor(found, device="cpu"), torch.tensor(places, device="cpu")
        indices = np.array(plain_indices(given))
        if self._mixture is not None:
            source, index = torch.tensor(self._mixture.pairs(indices, task.epoch), device="cpu").T
            return source, index
        is_key = indices.dtype.kind not in "iu"
        source = torch.zeros(len(indices), dtype=torch.int64, device="cpu")
        return source, indices.tolist() if is_key else torch.from_numpy(indices)
