"""Streams of other libraries: every sample comes once, in one order whoever reads, and reading is resumed exactly."""

from __future__ import annotations

import importlib.util
import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS

LENGTH = 24


@pytest.fixture(scope="module", autouse=True)
def arrow_has_started() -> None:
    """What Arrow starts, it starts once in a process."""
    if importlib.util.find_spec("datasets") is not None:
        import datasets

        datasets.disable_progress_bars()
        datasets.Dataset.from_dict({"x": [0]}).with_format("torch")[0]


def of_webdataset(folder: Path) -> Callable[[], Any]:
    """Four tar files of six samples each."""
    webdataset = pytest.importorskip("webdataset")
    shards = [folder / f"{shard}.tar" for shard in range(4)]
    for shard, path in enumerate(shards):
        with tarfile.open(path, "w") as tar:
            for index in range(6 * shard, 6 * shard + 6):
                content = str(index).encode()
                member = tarfile.TarInfo(f"{index:04}.cls")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    urls = [str(path) for path in shards]
    return lambda: webdataset.WebDataset(urls, shardshuffle=False, empty_check=False).decode().to_tuple("cls")


def of_litdata(folder: Path) -> Callable[[], Any]:
    """Chunks of three samples. It leaves its files open in the processes that read them."""
    litdata = pytest.importorskip("litdata")
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(folder), chunk_size=3)
    for index in range(LENGTH):
        writer[index] = {"x": index}
    writer.done()
    writer.merge()
    return lambda: litdata.StreamingDataset(str(folder))


def of_hugging_face(folder: Path) -> Callable[[], Any]:
    """Four shards of a table."""
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": list(range(LENGTH))})
    return lambda: table.to_iterable_dataset(num_shards=4).with_format("torch")


def of_a_shuffled_stream(folder: Path) -> Callable[[], Any]:
    datasets = pytest.importorskip("datasets")
    table = datasets.Dataset.from_dict({"x": list(range(LENGTH))})
    return lambda: table.to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=6).with_format("torch")


IN_THIS_PROCESS = (of_webdataset, of_hugging_face)
KINDS = (*IN_THIS_PROCESS, of_litdata)


def found(loader: Any) -> list[list[int]]:
    return [(batch["x"] if isinstance(batch, dict) else batch[0]).tolist() for batch in loader]


@BOTH
@pytest.mark.parametrize(
    ("kind", "num_workers"), [(kind, n) for kind in KINDS for n in (0, 1, 2) if n or kind in IN_THIS_PROCESS]
)
def test_every_sample_comes_once(make: Any, kind: Any, num_workers: int, tmp_path: Path) -> None:
    batches = found(make(kind(tmp_path)(), batch_size=4, num_workers=num_workers))
    assert sorted(sum(batches, [])) == list(range(LENGTH))


@pytest.mark.parametrize("kind", [*KINDS, of_a_shuffled_stream])
def test_the_drop_in_reads_as_torchs_loader_does(kind: Any, tmp_path: Path) -> None:
    stream = kind(tmp_path)
    theirs = torch.utils.data.DataLoader(stream(), batch_size=4, num_workers=2)
    assert found(DataLoader(stream(), batch_size=4, num_workers=2)) == found(theirs)


@pytest.mark.parametrize("kind", IN_THIS_PROCESS)
def test_the_order_depends_on_the_streams_and_not_on_the_workers(kind: Any, tmp_path: Path) -> None:
    stream = kind(tmp_path)
    orders = [found(ShardedDataLoader(stream(), 4, streams=2, num_workers=n)) for n in (0, 1, 2)]
    assert orders[0] == orders[1] == orders[2]


@BOTH
@pytest.mark.parametrize("kind", IN_THIS_PROCESS)
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [1, 3])
def test_reading_is_resumed_exactly(make: Any, kind: Any, num_workers: int, done: int, tmp_path: Path) -> None:
    stream = kind(tmp_path)
    loaders = [make(stream(), batch_size=4, num_workers=num_workers) for _ in range(2)]
    batches = iter(loaders[0])
    for _ in range(done):
        next(batches)
    state, rest = loaders[0].state_dict(), found(batches)
    loaders[1].load_state_dict(state)
    assert rest
    assert found(loaders[1]) == rest


def test_a_pipeline_of_webdataset_goes_on_behind_the_drop_in(tmp_path: Path) -> None:
    import webdataset

    batched = of_webdataset(tmp_path)().batched(4)
    loader = DataLoader(batched, batch_size=None, num_workers=2)
    pipeline = webdataset.DataPipeline(loader, webdataset.unbatched(), webdataset.batched(8))
    assert sorted(int(number) for batch in pipeline for number in batch[0]) == list(range(LENGTH))
