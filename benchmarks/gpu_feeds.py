"""What brings batches to a device: ours, torch's loader, and copies without any loader.

    Feed: next(feed) -> a batch on the device, or on its way there; without end.  feed.close() -> workers gone
    fill(feeds)      -> when the workers of each have finished what they were asked for
    settle(feed)     -> when they write to memory that they have touched before

Workers fill each batch: they gather its rows, or images, from a few in memory, which a dataset makes before its loader
forks: processes and threads read the same ones. torch's loader reads the data in bulk as well (``__getitems__``), and
has persistent workers and pinned memory.

A worker of ours imports this module, and of it NumPy alone, but for `Objects`, which are torch's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sharded_loader import empty

Array = np.ndarray[Any, Any]

ROW = 16_384
"""float32 in a row of `Blocks`: 64 KB."""

KINDS = 256
"""Different rows, or images: more than a processor's caches hold."""

FIELDS = 256
"""Tensors in a batch of `Fields`."""

EPOCH = 1 << 20
"""Batches in an epoch that is never over."""


@functools.cache
def rows() -> Array:
    """The different rows: of this process and of those that it forks."""
    return np.random.default_rng(0).random((KINDS, ROW), np.float32)


class Blocks:
    """Rows of 64 KB; the first number of each is its index."""

    def __init__(self, count: int) -> None:
        self._count = count
        rows()  # before the fork: else each worker has its own, together more than the caches hold

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Array:
        return self.get_batch([index])[0]  # type: ignore[no-any-return]

    def get_batch(self, indices: Sequence[int]) -> Any:
        """A batch, in the memory that it is going to be copied from."""
        batch = empty((len(indices), ROW), np.float32)
        np.take(rows(), np.asarray(indices) % KINDS, 0, batch, "clip")
        batch[:, 0] = indices
        return batch


class Fields(Blocks):
    """The same, in as many arrays as there are `FIELDS`."""

    def get_batch(self, indices: Sequence[int]) -> Any:
        """A dictionary of arrays, each of a part of the columns."""
        parts, where = np.split(rows(), FIELDS, 1), np.asarray(indices) % KINDS
        batch = {f"field {number}": empty((len(indices), ROW // FIELDS), np.float32) for number in range(FIELDS)}
        for part, field in zip(parts, batch.values(), strict=True):
            np.take(part, where, 0, field, "clip")
        return batch


class Moving:
    """An object of another library: it pins and moves itself."""

    def __init__(self, values: Any, labels: Any) -> None:
        self.values, self.labels = values, labels

    def pin_memory(self) -> Moving:
        """As torch's loader asks for it."""
        return Moving(self.values.pin_memory(), self.labels.pin_memory())

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        """On the device."""
        return Moving(*(part.to(device, non_blocking=non_blocking) for part in (self.values, self.labels)))


class Objects(Blocks):
    """The same, as an object."""

    def get_batch(self, indices: Sequence[int]) -> Any:
        """An object of two tensors."""
        import torch

        return Moving(torch.from_numpy(super().get_batch(indices)), torch.tensor(list(indices)))


class Images:
    """Photographs, as far as their size is concerned: 3 x side x side uint8, and labels.

    Args:
        side: in pixels.
        kinds: how many different ones.
    """

    def __init__(self, side: int, kinds: int = KINDS) -> None:
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
        loader: an iterable, which is begun again at its end.
        close: stops the workers.
        through: what the user's program does with the loader's batches before it uses them.

    Attributes:
        loader: as given.
    """

    def __init__(
        self,
        loader: Iterable[Any],
        close: Callable[[], None] = lambda: None,
        through: Callable[[Iterator[Any]], Iterator[Any]] = iter,
    ) -> None:
        self.loader = loader
        self._close = close
        self._epoch: Any = None
        self._batches: Iterator[Any] | None = through(self._endless())

    def _endless(self) -> Iterator[Any]:
        while True:
            self._epoch = iter(self.loader)
            yield from self._epoch

    def __next__(self) -> Any:
        assert self._batches is not None
        return next(self._batches)

    def is_full(self) -> bool | None:
        """Whether the workers have finished all batches that they were asked for. None: it cannot be asked."""
        if self._epoch is None:
            return True
        ours = getattr(self._epoch, "_inner", self._epoch)
        if (run := getattr(ours, "run", None)) is not None:
            with ours._pipeline.lock:
                # Those that wait are given to the pool in the next step.
                if unfinished := any(entry.result is None for entry in run.window if entry not in run.waiting):
                    ours._pipeline.runs.store(ours._pipeline.pool.wait(False))
            return not unfinished
        try:
            return bool(self._epoch._data_queue.qsize() >= self._epoch._tasks_outstanding)
        except (AttributeError, NotImplementedError):  # no loader, or one of another version; a Mac
            return None

    def faults(self) -> int | None:
        """Minor page faults so far of the processes that fill its batches; None on a system without /proc."""
        pids = getattr(getattr(self.loader, "pool", None), "pids", None)
        pids = pids or [worker.pid for worker in getattr(self._epoch, "_workers", ())] or [os.getpid()]
        try:
            stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        except OSError:
            return None
        return sum(int(stat.rpartition(")")[2].split()[7]) for stat in stats)

    def close(self) -> None:
        """The iterators go first: torch's workers end with theirs."""
        self._batches = self._epoch = None
        self._close()


PATIENCE, REST = 5.0, 0.1
"""Seconds: that workers are waited for at most, and the rest for feeds that cannot be asked."""


def fill(feeds: Iterable[Feed]) -> None:
    """Wait until the workers of each feed have nothing to do: otherwise they would disturb what is measured."""
    until = time.monotonic() + PATIENCE
    for feed in feeds:
        while (full := feed.is_full()) is False and time.monotonic() < until:
            time.sleep(0.001)
        if full is None:
            time.sleep(REST)


FAULTS, WINDOW = 0.01, 64
"""Pages count as touched when so many batches cause fewer page faults than this, per page of a batch."""

MANY = 5
"""If batches went to workers at random, this many times workers x slots would leave 1 % of the pages untouched."""


def settle(feed: Feed, pages: float, depth: Depth, patience: float) -> dict[str, float | str]:
    """Take batches until the workers write to pages that they have touched before.

    Each worker touches each slot once for the first time. Where faults are not counted, workers x slots batches are
    taken. Otherwise at most `MANY` times as many and a window, for at most ``patience`` seconds: torch's workers
    allocate each batch, and never get there.

    Args:
        pages: of a batch.

    Returns:
        "batches" that were taken before the last `WINDOW`, or a text if pages were not touched then; and, if they are
        counted, "faults per page" of that window.
    """
    counts, until = deque([feed.faults()], WINDOW + 1), time.monotonic() + patience
    taken, found = 0, dict[str, float | str]()
    pairs = depth.workers * 2 * depth.batches  # slots: those in flight, those that the program holds, and spare ones
    most = pairs if counts[0] is None else WINDOW + MANY * pairs
    while taken < most and time.monotonic() < until:
        next(feed)
        counts.append(feed.faults())
        taken += 1
        first, last = counts[0], counts[-1]
        if first is not None and last is not None:
            found["faults per page"] = left = (last - first) / (len(counts) - 1) / pages
            if len(counts) > WINDOW and left < FAULTS:
                return {"batches": taken - WINDOW} | found
    return {"batches": f"not after {taken}" if found or taken < most else taken} | found


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
    with contextlib.suppress(OSError):  # torch's workers need shared memory in /dev/shm
        room = min(room, shutil.disk_usage("/dev/shm").free // 3)
    fitting = max(2, room // max(1, nbytes))
    if fitting >= 2 * workers:
        return Depth(workers, 2)
    return Depth(workers, 1) if fitting >= workers else Depth(fitting, 1)


def ours(dataset: Any, batch_size: int, depth: Depth, threads: bool = False, **options: Any) -> Feed:
    """A `ShardedDataLoader`; ``options`` say where its batches go."""
    from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool

    pool: Any = "inline"
    if depth.workers:
        pool = ThreadPool(depth.workers) if threads else ProcessPool(depth.workers)
    options = {"prefetch": depth.batches} | options if depth.workers else options
    loader = ShardedDataLoader(dataset, batch_size, pool=pool, **options)
    return Feed(loader, loader.close)


def torch_loader(
    dataset: Any,
    batch_size: int,
    depth: Depth,
    device: Any,
    through: Callable[..., Iterator[Any]] | None = None,
    drop_in: bool = False,
    copies: bool = False,
) -> Feed:
    """torch's `DataLoader` as its documentation recommends it, and the user's own copies.

    Args:
        through: what makes them: `copied` (also None), `copied_ahead`, or nothing (`iter`).
        drop_in: ours in the place of torch's; it reads the dataset in bulk by itself.
        copies: the drop-in makes them. Otherwise it pins, as torch's does.
    """
    import torch.utils.data
    from torch.utils.data import BatchSampler, SequentialSampler

    import sharded_loader.torch

    data = dataset if drop_in else Bulk(dataset)
    kind: Any = sharded_loader.torch.DataLoader if drop_in else torch.utils.data.DataLoader
    loader = kind(
        data,
        batch_sampler=BatchSampler(SequentialSampler(data), batch_size, drop_last=True),
        num_workers=depth.workers,
        prefetch_factor=depth.each,
        persistent_workers=True,
        pin_memory=device.type == "cuda" and not copies,
        collate_fn=None if drop_in else to_tensors,
        timeout=60,
        **({"device": device} if copies else {}),
    )
    return Feed(loader, through=iter if through is iter else functools.partial(through or copied, device))


def moved(batch: Any, device: Any) -> Any:
    """As users write it."""
    if isinstance(batch, list):
        return [field.to(device, non_blocking=True) for field in batch]
    return batch.to(device, non_blocking=True)


def copied(device: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """The copies stand in the stream of the steps."""
    for batch in batches:
        yield moved(batch, device)


def copied_ahead(device: Any, batches: Iterator[Any]) -> Iterator[Any]:
    """The prefetcher of NVIDIA's examples: a side stream, one batch ahead, ``record_stream``."""
    import torch

    if device.type != "cuda":
        yield from copied(device, batches)
    cuda: Any = torch.cuda
    side, ahead = cuda.Stream(device), None
    for batch in batches:
        if ahead is not None:
            home = cuda.current_stream(device)
            home.wait_stream(side)
            for field in ahead if isinstance(ahead, list) else [ahead]:
                field.record_stream(home)
        ready = ahead
        with cuda.stream(side):
            ahead = moved(batch, device)
        del batch
        if ready is not None:
            yield ready
            del ready
