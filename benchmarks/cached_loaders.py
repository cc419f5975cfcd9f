"""Who reads the jobs of `benchmarks.cached`: ours with and without a cache, torch, other caches, and other formats.

    LOADERS[name].open(job, folder, workers) -> epochs      a generator of epochs, each an iterable of batches

A batch is a pair: samples, and their indices. A format is written while the first epoch is asked for, so epoch 1
includes that; torch's workers decode for it. Each library shuffles in its own way, and has a folder to itself.

    torch + lmdb, diskcache     a dataset that looks into the cache, and else decodes and stores a pickle
    MONAI                       `PersistentDataset`: a file for each sample
    Mosaic, litdata             their own formats, without compression
    TurboLoader                 JPEGs only, by its own decoder, as float32: `cache_decoded=True`, in the main process
"""

from __future__ import annotations

import importlib
import os
import pickle
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cached_jobs import Job
from benchmarks.ranks_tokens import without_operators
from sharded_loader import ArrayDataset, Dataset, ShardedDataLoader, SimpleDataset, batchify

Epochs = Iterator[Iterable[Any]]


# -- ours --------------------------------------------------------------------------------------------------------------


def _ours(dataset: Any, job: Job, workers: int) -> Epochs:
    padded = batchify.Tuple(batchify.Pad(), batchify.Stack()) if job.shape is None else None
    options: dict[str, Any] = {"shuffle": True, "seed": 0, "num_workers": workers, "batchify_fn": padded}
    with ShardedDataLoader(dataset, job.batch_size, **options) as loader:
        while True:
            yield loader


def ours(**arguments: Any) -> Callable[[Job, Path, int], Epochs]:
    """Our loader; with these arguments of `Dataset.cache`, and without a cache if there are none."""

    def open_it(job: Job, folder: Path, workers: int) -> Epochs:
        dataset: Dataset = SimpleDataset(job)
        if "path" in arguments:
            dataset = dataset.cache(path=folder / arguments["path"])
        elif "share" in arguments:
            dataset = dataset.cache(int(arguments["share"] * job.nbytes))
        elif arguments:
            dataset = dataset.cache(**arguments)
        return _ours(dataset, job, workers)

    return open_it


def arrays(job: Job, folder: Path, workers: int) -> Epochs:
    """Our loader over the decoded samples in an array: the limit of a cache."""
    if job.shape is None:
        raise NotImplementedError("its samples have several shapes")
    return _ours(ArrayDataset(np.array(job.arrays()), np.arange(len(job))), job, workers)


# -- torch, with a cache of samples ------------------------------------------------------------------------------------


def _pad(samples: list[Any]) -> Any:
    import torch

    parts = [torch.as_tensor(sample) for sample, _ in samples]
    return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True), torch.tensor([index for _, index in samples])


def as_pairs(samples: list[Any]) -> Any:
    """A batch of samples that are dicts, as the formats have them."""
    import torch

    pairs = [(sample["x"], sample["index"]) for sample in samples]
    ragged = len({len(sample) for sample, _ in pairs}) > 1
    return _pad(pairs) if ragged else torch.utils.data.default_collate(pairs)


def torch(job: Any, folder: Path, workers: int, of: Any = None) -> Epochs:
    """torch's DataLoader over a dataset of pairs: the job itself, or what ``of`` makes of it."""
    from torch.utils.data import DataLoader

    data = job if of is None else of(job, folder)
    collate = _pad if job.shape is None else None
    loader = DataLoader(
        data, job.batch_size, shuffle=True, num_workers=workers, persistent_workers=True, collate_fn=collate
    )
    while True:
        yield loader


class _Opened:
    """A dataset with a cache that each process opens for itself."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder = job, str(folder)
        self._cache: tuple[int, Any] = (0, None)

    def __len__(self) -> int:
        return len(self.job)

    def open(self) -> Any:
        if self._cache[0] != os.getpid():
            self._cache = os.getpid(), self.opened()
        return self._cache[1]

    def opened(self) -> Any:
        raise NotImplementedError


class InLmdb(_Opened):
    def opened(self) -> Any:
        import lmdb

        return lmdb.open(self.folder, map_size=2 * self.job.nbytes + (1 << 28), sync=False, readahead=False)

    def __getitem__(self, index: int) -> Any:
        key = str(index).encode()
        with self.open().begin() as reading:
            found = reading.get(key)
        if found is not None:
            return pickle.loads(found)
        sample = self.job[index]
        with self.open().begin(write=True) as writing:
            writing.put(key, pickle.dumps(sample, pickle.HIGHEST_PROTOCOL))
        return sample


class InDiskcache(_Opened):
    def opened(self) -> Any:
        import diskcache

        return diskcache.Cache(self.folder, size_limit=1 << 40, eviction_policy="none")

    def __getitem__(self, index: int) -> Any:
        sample = self.open().get(index)
        if sample is None:
            sample = self.job[index]
            self.open().set(index, sample)
        return sample


class ToTensors:
    """The transform of MONAI's dataset, whose samples are their indices."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def __call__(self, index: int) -> Any:
        from torch import tensor

        return tensor(self.job[index][0]), index


def _in_monai(job: Job, folder: Path) -> Any:
    from monai.data import PersistentDataset
    from monai.transforms import Transform

    Transform.register(ToTensors)  # MONAI keeps nothing of other transforms: they might be random
    return PersistentDataset(list(range(len(job))), ToTensors(job), folder)


# -- formats -----------------------------------------------------------------------------------------------------------


def _decoded(job: Any, workers: int) -> Iterator[dict[str, Any]]:
    """All samples in order, decoded by torch's workers."""
    from torch.utils.data import DataLoader

    for array, index in DataLoader(job, None, num_workers=workers, collate_fn=_same):
        yield {"x": array, "index": index}


def _same(sample: Any) -> Any:
    return sample


def write_mosaic(job: Any, folder: Path, workers: int, **options: Any) -> None:
    """Write MosaicML's shards of all samples."""
    from streaming import MDSWriter

    shape = "" if job.shape is None else ":" + ",".join(map(str, job.shape))
    columns = {"x": f"ndarray:{np.dtype(job.dtype).name}{shape}", "index": "int"}
    with MDSWriter(out=str(folder), columns=columns, **options) as writer:
        for sample in _decoded(job, workers):
            writer.write(sample)


def mosaic_batches(batch_size: int, workers: int, **options: Any) -> Iterable[Any]:
    """Batches of MosaicML's shards."""
    from streaming import StreamingDataset
    from torch.utils.data import DataLoader

    data: Any = StreamingDataset(shuffle=True, batch_size=batch_size, **options)
    return DataLoader(data, batch_size, num_workers=workers, persistent_workers=workers > 0, collate_fn=as_pairs)


def mosaic(job: Job, folder: Path, workers: int) -> Epochs:
    """MosaicML's shards of samples."""
    kept = without_operators()
    write_mosaic(job, folder, workers)
    loader = mosaic_batches(job.batch_size, workers, local=str(folder))
    while kept:
        yield loader


def write_litdata(job: Any, folder: Path, workers: int, **options: Any) -> None:
    """Write litdata's chunks of all samples."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), **options)
    for number, sample in enumerate(_decoded(job, workers)):
        writer[number] = sample
    writer.done()
    writer.merge()


def litdata_batches(batch_size: int, workers: int, folder: str, **options: Any) -> Iterable[Any]:
    """Batches of litdata's chunks."""
    from litdata import StreamingDataLoader, StreamingDataset

    data = StreamingDataset(folder, shuffle=True, **options)
    of_workers: dict[str, Any] = {"num_workers": workers, "persistent_workers": True, "collate_fn": as_pairs}
    loader: Iterable[Any] = StreamingDataLoader(data, batch_size=batch_size, **of_workers)
    return loader


def litdata(job: Job, folder: Path, workers: int) -> Epochs:
    """litdata's chunks of samples."""
    write_litdata(job, folder, workers, chunk_bytes="64MB")
    loader = litdata_batches(job.batch_size, workers, str(folder))
    while True:
        yield loader


def turbo(job: Job, folder: Path, workers: int) -> Epochs:
    """TurboLoader, with its cache."""
    import turboloader

    if not job.tar.exists():
        raise NotImplementedError("it reads only photographs")
    loader = turboloader.DataLoader(
        str(job.tar),
        batch_size=job.batch_size,
        num_workers=workers,
        shuffle=True,
        image_size=job.shape[0] if job.shape else None,
        output_format="numpy",
        antialias=True,
        cache_decoded=True,
    )

    def batches(epoch: int) -> Iterator[Any]:
        loader.set_epoch(epoch)
        for images, about in loader:
            yield images, about["indices"]

    epoch = 0
    while True:
        yield batches(epoch)
        epoch += 1


# -- the list ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loader:
    """One row of the table.

    Attributes:
        open: makes its epochs; NotImplementedError says why it cannot read a job.
        modules: what is imported before the clock starts. ImportError: it is not installed.
        package: its name for pip.
        is_exact: whether its samples must be equal. Otherwise they are compared with a tolerance.
    """

    open: Callable[[Job, Path, int], Epochs]
    modules: tuple[str, ...] = ("torch",)
    package: str | None = None
    is_exact: bool = True

    def load(self) -> Any:
        """Import what it needs; keep what this returns."""
        kept = without_operators() if self.package == "mosaicml-streaming" else None
        for module in self.modules:
            importlib.import_module(module)
        return kept


def _with(of: Any) -> Callable[[Job, Path, int], Epochs]:
    return lambda job, folder, workers: torch(job, folder, workers, of)


OURS, UNCACHED, PART, LIMIT, TURBO = "cache, memory", "no cache", "cache for 40 %", "ArrayDataset", "TurboLoader"

LOADERS = {
    UNCACHED: Loader(ours()),
    OURS: Loader(ours(max_bytes="90%")),
    "cache, file": Loader(ours(path="it.cache")),
    PART: Loader(ours(share=0.4)),
    LIMIT: Loader(arrays),
    "torch": Loader(torch),
    "torch + LMDB": Loader(_with(InLmdb), ("torch", "lmdb"), "lmdb"),
    "torch + diskcache": Loader(_with(InDiskcache), ("torch", "diskcache"), "diskcache"),
    "MONAI PersistentDataset": Loader(_with(_in_monai), ("torch", "monai.data"), "monai"),
    "MosaicML streaming": Loader(mosaic, ("torch", "streaming"), "mosaicml-streaming"),
    "litdata": Loader(litdata, ("torch", "litdata"), "litdata"),
    TURBO: Loader(turbo, ("torch", "turboloader"), "turboloader", is_exact=False),
}
