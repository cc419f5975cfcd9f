"""A loader for each road of a batch, and the process that measures them.

    open_loader(road) -> a loader, after one epoch
    measure_road(road, root) -> the figures of its `next()`, or why it is left out
    serve()                     the same for the process that asks: `benchmarks.road.Checkout`

Samples take so long that each batch travels in a message by itself. So every `next()` of a steady epoch does the same,
on a machine of any speed. Devices are pretended: see ``tests/simulated_cuda.py``. They change torch in this process, so
their roads are the last ones.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler, get_worker_info

from benchmarks.samples import NUM_IMAGES, Array
from benchmarks.walk import record_walks, summary_of
from benchmarks.workloads import WORKLOADS

WORKERS = 2
BATCHES = 24
"""Batches of an epoch whose calls are counted."""

BATCHES_OF_RAY = 96
"""A message to an actor holds 16 ms of work: more batches are in flight than half an epoch has otherwise."""

SLOW = 16
"""One sample of so many takes `SECONDS`: a batch of 256 takes 3 ms, and a message holds 2 ms of work."""

SECONDS = 2e-4


class Pairs:
    """Samples of the workload ``images``, with labels: ``(image, number)``.

    Args:
        images: the images.
        seconds: how long one sample of `SLOW` takes.
    """

    def __init__(self, images: Array, seconds: float = SECONDS) -> None:
        self._images, self._seconds = images, seconds

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        if self._seconds and index % SLOW == 0:
            time.sleep(self._seconds)
        return self._images[index], index % 10


class Parts(IterableDataset[Any]):
    """The same samples as iterable data. Each worker reads its part."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs

    def __iter__(self) -> Iterator[tuple[Array, int]]:
        worker, length = get_worker_info(), len(self._pairs)
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        return map(self._pairs.__getitem__, range(length * number // count, length * (number + 1) // count))


def open_loader(road: str) -> Any:
    """A loader that reads a few batches in an epoch, after one epoch.

    Args:
        road: one of `ROADS`.

    Raises:
        ImportError: the package or this environment does not have what the road needs.
    """
    batches = BATCHES_OF_RAY if road == "Ray" else BATCHES
    return _after_an_epoch(ROADS[road](Pairs(_images()[: batches * _BATCH_SIZE])))


def open_timed_loader() -> Any:
    """A loader over processes, after one epoch. It reads `NUM_IMAGES` samples, none of which takes long."""
    return _after_an_epoch(_map_style(Pairs(_images()[:NUM_IMAGES], 0), pool=_processes()))


def _after_an_epoch(loader: Any) -> Any:
    for _ in loader:
        pass
    return loader


@functools.cache
def _images() -> Array:
    images = WORKLOADS["images"].build().columns
    assert images is not None
    return images


_BATCH_SIZE = WORKLOADS["images"].batch_size


# -- the roads --------------------------------------------------------------------------------------------------


def _processes() -> Any:
    from sharded_loader import ProcessPool

    method = WORKLOADS["images"].start_method
    return ProcessPool(WORKERS, **{"start_method": method} if method in multiprocessing.get_all_start_methods() else {})


def _map_style(pairs: Any, **options: Any) -> Any:
    from sharded_loader import ShardedDataLoader

    shuffle = {} if "sampler" in options else {"shuffle": True}
    return ShardedDataLoader(pairs, _BATCH_SIZE, **shuffle, **options)


def _inline(pairs: Pairs) -> Any:
    from sharded_loader import InlinePool

    return _map_style(pairs, pool=InlinePool())


def _threads(pairs: Pairs) -> Any:
    from sharded_loader import ThreadPool

    return _map_style(pairs, pool=ThreadPool(WORKERS))


def _other_sampler(pairs: Pairs) -> Any:
    return _map_style(pairs, sampler=RandomSampler(pairs), pool=_processes())


def _iterable(pairs: Pairs) -> Any:
    from sharded_loader import ShardedDataLoader

    return ShardedDataLoader(Parts(pairs), _BATCH_SIZE, pool=_processes())


def _drop_in(pairs: Pairs) -> Any:
    from sharded_loader.torch import DataLoader

    return DataLoader(pairs, _BATCH_SIZE, shuffle=True, num_workers=WORKERS)


def _drop_in_iterable(pairs: Pairs) -> Any:
    from sharded_loader.torch import DataLoader

    return DataLoader(Parts(pairs), _BATCH_SIZE, num_workers=WORKERS)


def _ray(pairs: Pairs) -> Any:
    from sharded_loader import RayPool

    return _map_style(pairs, pool=RayPool(WORKERS))


def _pretend_devices() -> None:
    sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
    import simulated_cuda

    simulated_cuda.install()
    sys.path.pop()


def _device(pairs: Pairs) -> Any:
    _pretend_devices()
    return _map_style(pairs, pool=_processes(), device="cuda")


def _resident(pairs: Pairs) -> Any:
    from sharded_loader import ArrayDataset

    _pretend_devices()
    images = _images()[: len(pairs)]
    try:
        from sharded_loader import Placement
    except ImportError:  # an older checkout
        options: dict[str, Any] = {"device": "cuda", "resident": True}
    else:
        options = {"device": Placement("cuda", resident=True)}
    return _map_style(ArrayDataset(images, torch.arange(len(pairs)) % 10), **options)


ROADS: dict[str, Callable[[Pairs], Any]] = {
    "process": lambda pairs: _map_style(pairs, pool=_processes()),
    "threads": _threads,
    "inline": _inline,
    "torch's sampler": _other_sampler,
    "iterable": _iterable,
    "drop-in": _drop_in,
    "drop-in, iterable": _drop_in_iterable,
    "Ray": _ray,
    "device": _device,
    "resident": _resident,
}
"""What opens a loader, by the name of the road; two worker processes, if the name says nothing else."""


# -- the process that measures ----------------------------------------------------------------------------------


def measure_road(road: str, root: str) -> dict[str, Any]:
    """`summary_of` the recorded turns, or ``{"left out": the reason}``.

    Args:
        road: one of `ROADS`.
        root: the folder of the package.
    """
    try:
        loader = open_loader(road)
    except ImportError as error:
        return {"left out": str(error)}
    try:
        return summary_of(record_walks(loader, root))
    finally:
        getattr(loader, "close", lambda: None)()


def time_epoch(loader: Any) -> float:
    """Seconds of CPU time per batch, over one epoch without pauses.

    All threads of this process count, worker processes do not.
    """
    start = time.process_time()
    for _ in loader:
        pass
    return (time.process_time() - start) / len(loader)


def serve() -> None:
    """Answer each line of stdin, ``["walk", road]`` or ``["cpu"]``, with one line of JSON."""
    import sharded_loader

    torch.set_num_threads(1)  # two threads copy on two cores while workers read: a pretended copy took 7 ms
    root = str(Path(sharded_loader.__file__).parent)
    timed: Any = None
    print(json.dumps(root), flush=True)
    for line in sys.stdin:
        what, *road = json.loads(line)
        if what == "cpu":
            timed = timed or open_timed_loader()
        print(json.dumps(time_epoch(timed) if what == "cpu" else measure_road(*road, root)), flush=True)
    if timed is not None:
        timed.close()
