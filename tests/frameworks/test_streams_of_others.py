"""Streams of other libraries: every sample comes once, in one order whoever reads, and reading is resumed exactly.

webdataset, litdata, MosaicML streaming and Hugging Face datasets, whose shuffle buffers and epochs are resumed too.
"""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

import sharded_loader
from sharded_loader import ShardedDataLoader
from sharded_loader.storage.dataset import ShardDataset
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


def table(length: int = LENGTH) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": list(range(length)), "y": [[i, -i] for i in range(length)]})


def sharded(length: int = LENGTH, shards: int = 4) -> Any:
    return table(length).to_iterable_dataset(num_shards=shards)


def shuffled(shards: int = 4, size: int = 10) -> Any:
    return sharded(64, shards).shuffle(seed=1, buffer_size=size)


def of_hugging_face(folder: Path) -> Callable[[], Any]:
    return lambda: sharded().with_format("torch")


def of_a_shuffled_stream(folder: Path) -> Callable[[], Any]:
    return lambda: shuffled().with_format("torch")


IN_THIS_PROCESS = (of_webdataset, of_hugging_face)
KINDS = (*IN_THIS_PROCESS, of_litdata)


def found(loader: Any) -> list[list[int]]:
    return [(batch["x"] if isinstance(batch, dict) else batch[0]).tolist() for batch in loader]


# -- in what order -----------------------------------------------------------------------------------------------------


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
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_table_of_hugging_face_makes_the_batches_of_torchs_loader(make: Any, num_workers: int) -> None:
    data = table().with_format("torch")
    expected = list(torch.utils.data.DataLoader(data, batch_size=5))
    batches = list(make(data, batch_size=5, num_workers=num_workers))
    assert len(batches) == len(expected) == 5
    for ours, theirs in zip(batches, expected, strict=True):
        assert set(ours) == {"x", "y"}
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@BOTH
def test_each_epoch_of_a_shuffled_stream_is_another_and_can_be_set_on_the_loader(make: Any) -> None:
    loader = make(shuffled().with_format("torch"), batch_size=4, num_workers=2)
    orders = [found(loader) for _ in range(3)] if make is ShardedDataLoader else []
    for epoch in (0, 1, 2):
        loader.set_epoch(epoch)
        orders.append(found(loader))
    loader.set_epoch(0)
    assert orders[:3] == orders[-3:] and found(loader) == orders[0]
    assert orders[0] != orders[1] != orders[2]


def test_a_pipeline_of_webdataset_goes_on_behind_the_drop_in(tmp_path: Path) -> None:
    import webdataset

    batched = of_webdataset(tmp_path)().batched(4)
    loader = DataLoader(batched, batch_size=None, num_workers=2)
    pipeline = webdataset.DataPipeline(loader, webdataset.unbatched(), webdataset.batched(8))
    assert sorted(int(number) for batch in pipeline for number in batch[0]) == list(range(LENGTH))


# MosaicML's datasets keep shared memory until their process ends.
OF_MOSAICML = """
import json, sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, sys.argv[1])
from indices import LOADERS
import streaming

if __name__ == "__main__":
    folder, name, num_workers = sys.argv[2], sys.argv[3], int(sys.argv[4])
    with streaming.MDSWriter(out=folder, columns={"x": "int"}, size_limit=128) as writer:
        for index in range(24):
            writer.write({"x": index})
    data = streaming.StreamingDataset(local=folder, batch_size=4)
    loader = LOADERS[name](data, batch_size=4, num_workers=num_workers)
    print(json.dumps([[batch["x"].tolist() for batch in loader] for _ in range(2)]))
"""


@pytest.mark.skipif(importlib.util.find_spec("streaming") is None, reason="needs mosaicml-streaming")
@pytest.mark.parametrize("name", ["drop-in", "sharded"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_every_sample_of_mosaicml_comes_once(name: str, num_workers: int, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OF_MOSAICML, encoding="utf-8")
    command = [sys.executable, "program.py", str(Path(__file__).parent), str(tmp_path / "mds"), name, str(num_workers)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=100)
    assert done.returncode == 0, done.stderr
    for batches in json.loads(done.stdout.splitlines()[-1]):
        assert sorted(sum(batches, [])) == list(range(LENGTH))
        assert name == "drop-in" or sum(batches, []) == list(range(LENGTH))  # by index


# -- from a state ------------------------------------------------------------------------------------------------------


class Holds(torch.utils.data.IterableDataset[Any]):
    """A dataset of the user's around a stream, which passes its state on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self) -> Any:
        return iter(self.stream)


def of_one_node(stream: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=1, world_size=2)


def joined(how: str, streams: list[Any], **options: Any) -> Any:
    return getattr(pytest.importorskip("datasets"), f"{how}_datasets")(streams, **options)


STREAMS: dict[str, Callable[[Path], Callable[[], Any]]] = {
    "webdataset": of_webdataset,
    "without a buffer": of_hugging_face,
    "shuffled": lambda _: shuffled,
    "one shard": lambda _: lambda: shuffled(shards=1),
    "a buffer of one": lambda _: lambda: shuffled(size=1),
    "mapped after that": lambda _: lambda: shuffled().map(lambda row: {"x": row["x"] + 1}),
    "interleaved": lambda _: lambda: joined("interleave", [shuffled(), shuffled()], probabilities=[0.4, 0.6], seed=2),
    "concatenated": lambda _: lambda: joined("concatenate", [shuffled(), sharded(shards=1)]),
    "concatenated, without a buffer": lambda _: lambda: joined("concatenate", [sharded(32), sharded(32)]),
    "of one node": lambda _: lambda: of_one_node(shuffled()),
    "held by another dataset": lambda _: lambda: Holds(shuffled()),
    "in a mixture of ours": lambda _: lambda: sharded_loader.interleave([shuffled(), shuffled()], weights=[1, 2]),
}


@BOTH
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("stream", STREAMS)
def test_reading_is_resumed_exactly(make: Any, num_workers: int, epoch: int, stream: str, tmp_path: Path) -> None:
    """The state that a dataset with a shuffle buffer gives leaves out its samples, or cannot be loaded."""
    data = STREAMS[stream](tmp_path)
    first, resumed = (make(data(), batch_size=3, num_workers=num_workers) for _ in range(2))
    first.set_epoch(epoch)
    batches = iter(first)
    for done in range(1, 6):
        next(batches)
        if done in (1, 3, 5):
            resumed.load_state_dict(first.state_dict())
            rest = found(resumed)
    assert rest == found(batches)
    assert len(rest) > 2


@BOTH
def test_a_stream_that_draws_its_own_seed_cannot_be_resumed_elsewhere(make: Any) -> None:
    first, resumed = (make(sharded(shards=1).shuffle(buffer_size=24), batch_size=4) for _ in range(2))
    batches = iter(first)
    next(batches)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="other samples"):
        found(resumed)


# -- shards that other libraries have written --------------------------------------------------------------------------

SAMPLES = 11


def test_tar_shards_of_webdataset(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.ShardWriter(str(tmp_path / "s-%03d.tar"), maxcount=4, verbose=0) as writer:
        for i in range(SAMPLES):
            writer.write({"__key__": f"key{i:04}", "cls": i, "npy": np.arange(i), "txt": f"text {i}"})
    urls = sorted(map(str, tmp_path.glob("*.tar")))
    expected = list(webdataset.WebDataset(urls, shardshuffle=False))
    found = list(ShardDataset(str(tmp_path / "*.tar"), index_folder=tmp_path / "indexes"))
    names = ("__key__", "cls", "npy", "txt")
    assert [{name: one[name] for name in names} for one in expected] == found
    assert len(found) == SAMPLES


def test_mds_shards_of_mosaicml_streaming(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming")
    image = pytest.importorskip("PIL.Image").fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    columns: dict[str, tuple[str, Callable[[int], Any]]] = {
        "label": ("int", lambda i: i - 3),
        "small": ("uint16", lambda i: np.uint16(i * 1000)),
        "weight": ("float32", lambda i: np.float32(i / 3)),
        "text": ("str", lambda i: "é" * i),
        "raw": ("bytes", lambda i: bytes([i]) * i),
        "free": ("ndarray", lambda i: np.arange(i + 1, dtype=np.int8).reshape(1, -1)),
        "typed": ("ndarray:int32", lambda i: np.arange((i + 1) * 300, dtype=np.int32).reshape(-1, i + 1)),
        "fixed": ("ndarray:float64:2,3", lambda i: np.full((2, 3), i, dtype=np.float64)),
        "config": ("json", lambda i: {"i": [i]}),
        "exact": ("str_decimal", lambda i: Decimal(i) / 8),
        "image": ("png", lambda i: image),
        "pixels": ("pil", lambda i: image),
    }

    def sample(i: int) -> dict[str, Any]:
        return {name: make(i) for name, (_, make) in columns.items()}

    folder, types = str(tmp_path / "mds"), {name: kind for name, (kind, _) in columns.items()}
    with streaming.MDSWriter(out=folder, columns=types, size_limit=20_000) as writer:
        for i in range(SAMPLES):
            writer.write(sample(i))
    dataset = ShardDataset(f"{folder}/*.mds", index_folder=tmp_path / "indexes")
    assert len(dataset.lengths) > 1 and len(dataset) == SAMPLES
    for i, found in enumerate(dataset):
        expected = sample(i)
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            if isinstance(value, np.ndarray) or name in ("image", "pixels"):
                assert np.array_equal(np.asarray(found[name]), np.asarray(value)), name
                assert np.asarray(found[name]).dtype == np.asarray(value).dtype, name
            else:
                assert found[name] == value and type(found[name]) is type(value), name
