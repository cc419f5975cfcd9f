"""Who reads the shards of `benchmarks.remote_beside`: ours, MosaicML's streaming, litdata and WebDataset.

    write(folder, samples, per_shard)      the shards of each library that is installed, and a checksum of each sample
    LOADERS[name].open(url, own, room)     -> Opened(batches, close); ``own``: an empty folder for a cache

The bucket ``data`` of the server has a folder for each format. MosaicML's and litdata's clients speak S3 with it, ours
and WebDataset's HTTP.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import os
import tarfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cached_loaders import as_pairs, litdata_batches, mosaic_batches, write_litdata, write_mosaic
from benchmarks.ranks_tokens import without_operators
from sharded_loader import ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler

BATCH, WORKERS = 256, 2
WINDOW = 4
"""Shards over which is shuffled."""


class Noise:
    """Samples of noise with their indices, as a job of `benchmarks.cached_loaders`."""

    dtype, batch_size = "uint8", BATCH

    def __init__(self, count: int, size: int, version: int = 0) -> None:
        self.count, self.shape, self.version = count, [size], version

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Any, int]:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return np.random.default_rng((self.version, index)).integers(0, 256, self.shape, np.uint8), index


def write_members(path: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """A tar file of these names and contents."""
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def write(folder: Path, samples: Noise, per_shard: int) -> None:
    """Write the shards of all formats, and a checksum of each sample."""
    data = folder / "data"
    (data / "tar").mkdir(parents=True)
    for shard, first in enumerate(range(0, len(samples), per_shard)):
        rows = range(first, first + per_shard)
        write_members(data / "tar" / f"{shard:03}.tar", ((f"{row:06}.bin", samples[row][0].tobytes()) for row in rows))
    ShardDataset(str(data / "tar" / "*.tar"), index_folder=folder / "indexes").write_index()
    with suppress(ImportError):
        write_litdata(samples, data / "litdata", 0, chunk_size=per_shard)
    with suppress(ImportError):
        kept = without_operators()
        write_mosaic(
            samples, data / "mosaic", 0, size_limit=per_shard * (samples.shape[0] + 12) + 2048, progress_bar=False
        )
        del kept
    np.save(folder / "sums.npy", [sample.view(np.uint64).sum() for sample, _ in samples])


# -- who reads them ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Opened:
    """A loader that was made.

    Attributes:
        batches: an epoch each time that it is iterated.
        close: ends its processes; those of torch's loader end when nothing refers to the loader.
    """

    batches: Any
    close: Callable[[], None]


def _of_tar(sample: dict[str, Any]) -> dict[str, Any]:
    return {"x": np.frombuffer(sample["bin"], np.uint8), "index": int(sample["__key__"])}


def _ours(shards: str, own: Path, room: int) -> Opened:
    dataset = ShardDataset(shards, cache=ShardCache(own, room))
    order = ShardShuffleSampler(dataset.lengths, WINDOW, seed=0)
    samples = dataset.transform(_of_tar) if shards.endswith(".index") else dataset
    loader = ShardedDataLoader(samples, BATCH, sampler=order, num_workers=WORKERS)

    def close() -> None:
        loader.close()
        dataset.close()

    return Opened(loader, close)


def ours_tar(url: str, own: Path, room: int) -> Opened:
    """Ours, of tar files with an index file."""
    return _ours(f"{url}/data/tar/shards.index", own, room)


def ours_mds(url: str, own: Path, room: int) -> Opened:
    """Ours, of MosaicML's shards."""
    return _ours(f"{url}/data/mosaic/index.json", own, room)


def _of_torch(batches: Any) -> Opened:
    return Opened(batches, lambda: None)  # its workers end with it


def mosaic(url: str, own: Path, room: int) -> Opened:
    """MosaicML's streaming, with the same number of samples to shuffle over."""
    _speak_s3(url)
    where: dict[str, Any] = {"remote": "s3://data/mosaic", "local": str(own), "cache_limit": room}
    return _of_torch(mosaic_batches(BATCH, WORKERS, shuffle_block_size=WINDOW * 512, **where))


def litdata(url: str, own: Path, room: int) -> Opened:
    """litdata."""
    from litdata.streaming import downloader

    _speak_s3(url)
    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = "true"  # there is no other way to let it read without TLS
    where: dict[str, Any] = {"cache_dir": str(own), "max_cache_size": room, "force_override_state_dict": True}
    return _of_torch(litdata_batches(BATCH, WORKERS, "s3://data/litdata", **where))


def webdataset(url: str, own: Path, room: int) -> Opened:
    """WebDataset without its cache, with a buffer of the same number of samples."""
    import webdataset
    from torch.utils.data import DataLoader

    count = json.loads(own.parent.joinpath("sizes").read_text())[0]
    urls = [f"{url}/data/tar/{shard:03}.tar" for shard in range(count)]
    samples = webdataset.WebDataset(urls, shardshuffle=count, seed=0).shuffle(WINDOW * 512).map(_of_tar)
    return _of_torch(DataLoader(samples, BATCH, num_workers=WORKERS, persistent_workers=True, collate_fn=as_pairs))


def _speak_s3(url: str) -> None:
    os.environ.update(AWS_ACCESS_KEY_ID="a", AWS_SECRET_ACCESS_KEY="b", AWS_DEFAULT_REGION="us-east-1")
    os.environ.update(AWS_ENDPOINT_URL=url, S3_ENDPOINT_URL=url)


@dataclass(frozen=True)
class Remote:
    """One row of the tables.

    Attributes:
        open: makes the loader.
        modules: what is imported before the clock starts.
        package: its name for pip; None: there is nothing to install.
    """

    open: Callable[[str, Path, int], Opened]
    modules: tuple[str, ...]
    package: str | None = None

    @property
    def missing(self) -> str:
        """What a row says instead of figures; empty if everything is installed."""
        known = {"mosaicml-streaming": "streaming"}
        is_missing = self.package and importlib.util.find_spec(known.get(self.package, self.package)) is None
        return f"not installed: {self.package}" if is_missing else ""

    def load(self) -> Any:
        """Import what it needs; keep what this returns."""
        kept = without_operators() if self.package == "mosaicml-streaming" else None
        for module in self.modules:
            importlib.import_module(module)
        return kept


OURS, WEBDATASET = "ours, tar, index file", "WebDataset, tar"

_CLIENT = ("torch", "fsspec.implementations.http", "aiohttp")

LOADERS = {
    OURS: Remote(ours_tar, _CLIENT),
    "ours, MDS": Remote(ours_mds, _CLIENT, "mosaicml-streaming"),
    "litdata": Remote(litdata, ("torch", "litdata"), "litdata"),
    "MosaicML streaming, MDS": Remote(mosaic, ("torch", "streaming"), "mosaicml-streaming"),
    WEBDATASET: Remote(webdataset, ("torch", "webdataset"), "webdataset"),
}
