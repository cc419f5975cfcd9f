"""What brings batches to a device: ours, torch's loader, and copies without any loader.

    Feed: next(feed) -> a batch on the device, or on its way there; without end.  feed.close() -> workers gone

The data costs the workers as little as can be, so that they are not what is measured: `Blocks` only allocates, `Images`
gathers. torch's loader reads them in bulk as well (``__getitems__``), and has persistent workers and pinned memory.

A worker of ours imports this module, and of it NumPy alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sharded_loader import empty

Array = np.ndarray[Any, Any]

ROW = 16_384
"""float32 in a row of `Blocks`: 64 KB."""

EPOCH = 1 << 20
"""Batches in an epoch that is never over."""


class Blocks:
    """Rows of 64 KB. A batch is memory that nobody has written but for its first number, which says where it begins."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Array:
        return np.full(ROW, index, np.float32)

    def get_batch(self, indices: Sequence[int]) -> Array:
        """A batch, in the memory that it is going to be copied from."""
        batch = empty((len(indices), ROW), np.float32)
        batch[0, 0] = indices[0]
        return batch


class Images:
    """Photographs, as far as their size is concerned: 3 x side x side uint8, and labels.

    Args:
        side: in pixels.
        kinds: how many different ones.
    """

    def __init__(self, side: int, kinds: int = 256) -> None:
        self._images = np.random.default_rng(0).integers(0, 256, (kinds, 3, side, side), np.uint8)

    def __len__(self) -> int:
        return EPOCH

    def __getitem__(self, index: int) -> Any:
        return self._images[index % len(self._images)], index % 10

    def get_batch(self, indices: Sequence[int]) -> Any:
        """Images and labels, each image copied once."""
        where = np.asarray(indices)
        batch = empty((len(where), *self._images.shape[1:]), np.uint8)
        np.take(self._images, where % len(self._images), 0, batch, "clip")
        return batch, where % 10


class Bulk:
    """A dataset of these for torch: its "list of samples" is the finished batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._dataset.get_batch(indices)


def to_tensors(batch: Any) -> Any:
    """A collate function: the batch is finished, as one array or several."""
    import torch

    return torch.from_numpy(batch) if isinstance(batch, np.ndarray) else [torch.from_numpy(field) for field in batch]


class Feed:
    """Batches without end.

    Args:
        batches: makes an iterator of them.
        close: stops the workers.
    """

    def __init__(self, batches: Callable[[], Iterator[Any]], close: Callable[[], None] = lambda: None) -> None:
        self._batches: Iterator[Any] | None = batches()
        self._close = close

    def __next__(self) -> Any:
        assert self._batches is not None
        return next(self._batches)

    def close(self) -> None:
        """The iterator goes first: torch's workers end with it."""
        self._batches = None
        self._close()


@dataclass(frozen=True)
class Depth:
    """How many batches are in flight.

    Attributes:
        workers: processes or threads.
        each: batches per worker.
    """

    workers: int
    each: int

    @property
    def batches(self) -> int:
        """All together."""
        return self.workers * self.each


def depth_for(nbytes: int, workers: int, room: int) -> Depth:
    """Two batches per worker, fewer where they would take more than ``room`` bytes; never fewer than two."""
    fitting = max(2, room // max(1, nbytes))
    if fitting >= 2 * workers:
        return Depth(workers, 2)
    return Depth(workers, 1) if fitting >= workers else Depth(fitting, 1)


def shared_room(most: int) -> int:
    """Bytes of shared memory for batches in flight: torch's workers need them in /dev/shm."""
    try:
        return min(most, shutil.disk_usage("/dev/shm").free // 3)
    except OSError:
        return most


def ours(dataset: Any, batch_size: int, depth: Depth, threads: bool = False, **options: Any) -> Feed:
    """A `ShardedDataLoader`; ``options`` say where its batches go."""
    from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool

    pool: Any = "inline"
    if depth.workers:
        pool = ThreadPool(depth.workers) if threads else ProcessPool(depth.workers)
    options = {"prefetch": depth.batches} | options if depth.workers else options
    loader = ShardedDataLoader(dataset, batch_size, pool=pool, **options)

    def batches() -> Iterator[Any]:
        while True:
            yield from loader

    return Feed(batches, loader.close)


def torch_loader(dataset: Any, batch_size: int, depth: Depth, device: Any) -> Feed:
    """torch's `DataLoader` as its documentation recommends it, and the user's own copies."""
    from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

    bulk = Bulk(dataset)
    loader: Any = DataLoader(
        bulk,  # type: ignore[arg-type]
        batch_sampler=BatchSampler(SequentialSampler(bulk), batch_size, drop_last=True),
        num_workers=depth.workers,
        prefetch_factor=depth.each,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
        collate_fn=to_tensors,
        timeout=60,
    )

    def batches() -> Iterator[Any]:
        while True:
            for batch in loader:
                if isinstance(batch, list):
                    yield [field.to(device, non_blocking=True) for field in batch]
                else:
                    yield batch.to(device, non_blocking=True)

    return Feed(batches)


def always(batch: Any) -> Feed:
    """The same batch again and again: it is there already."""

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    return Feed(batches)
