"""Data of other libraries: streams, shards, graphs, images, and batches that move themselves.

Every sample of a stream comes once, in one order whoever reads, and reading is resumed exactly.
"""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, seen
from simulated import SimulatedStreams
from torch.nn.utils.rnn import pack_sequence

import sharded_loader
from sharded_loader import RepeatedSampler, ShardedDataLoader, SimpleDataset
from sharded_loader.devices.copies import CopyStream
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
    # Seeds drawn by Hugging Face begin with the same sample once in 24 times.
    first, resumed = (make(sharded(shards=1).shuffle(seed=seed, buffer_size=24), batch_size=4) for seed in (1, 2))
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


# -- graphs of PyTorch Geometric ---------------------------------------------------------------------------------------


def graphs(count: int = 10) -> list[Any]:
    """Graph i is a path of i + 1 nodes."""
    data = pytest.importorskip("torch_geometric.data")
    edges = [torch.stack([torch.arange(i), torch.arange(i) + 1]) for i in range(count)]
    return [data.Data(x=torch.full((i + 1, 2), float(i)), edge_index=one, number=i) for i, one in enumerate(edges)]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_graphs_are_those_of_the_librarys_own_loader(make: Any, num_workers: int) -> None:
    data = graphs()
    from torch_geometric.loader import DataLoader
    from torch_geometric.loader.dataloader import Collater

    expected = list(DataLoader(data, batch_size=4))
    found = list(make(data, batch_size=4, num_workers=num_workers, collate_fn=Collater(data)))
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert type(ours) is type(theirs)
        assert all(torch.equal(ours[name], theirs[name]) for name in ("x", "edge_index", "batch", "ptr", "number"))
        assert ours.to_data_list()[-1].num_nodes == theirs.to_data_list()[-1].num_nodes


@BOTH
def test_a_batch_sampler_that_counts_nodes(make: Any) -> None:
    data = graphs()
    from torch_geometric.loader import DynamicBatchSampler
    from torch_geometric.loader.dataloader import Collater

    sampler = DynamicBatchSampler(data, max_num=20, mode="node", shuffle=False)
    loader = make(data, batch_sampler=sampler, num_workers=2, collate_fn=Collater(data))
    batches = [batch for batch in loader]  # noqa: C416  # list() asks for the length, which the sampler does not know
    assert [batch.number.tolist() for batch in batches] == [list(one) for one in sampler]
    assert all(batch.num_nodes <= 20 for batch in batches)


# -- timm --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def timm() -> Any:
    """Its module ``data``."""
    pytest.importorskip("torchvision")
    return pytest.importorskip("timm.data")


@BOTH
def test_repeated_augmentation_and_ordered_samplers_share_the_samples(timm: Any, make: Any) -> None:
    from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler

    for rank in range(2):
        ordered = OrderedDistributedSampler(Numbered(10), num_replicas=2, rank=rank)
        assert sum(seen(make(Numbered(10), batch_size=2, sampler=ordered)), []) == list(range(rank, 10, 2))
        repeated = RepeatAugSampler(
            Numbered(), num_replicas=2, rank=rank, num_repeats=2, selected_round=0, selected_ratio=1
        )
        assert sum(seen(make(Numbered(), batch_size=4, sampler=repeated, num_workers=2)), []) == list(repeated)


@BOTH
def test_the_epoch_of_a_sampler_of_timm_is_set_through_the_loader(timm: Any, make: Any) -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    one, alone = (RepeatAugSampler(Numbered(), num_replicas=1, rank=0, selected_round=0) for _ in range(2))
    loader = make(Numbered(), batch_size=4, sampler=one)
    for epoch in (2, 0):
        loader.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert sum(seen(loader), []) == list(alone)


def test_create_loader_makes_a_loader_of_torchs_class(timm: Any) -> None:
    samples = torch.utils.data.TensorDataset(torch.zeros(4, 3, 8, 8), torch.zeros(4))
    loader = timm.create_loader(samples, (3, 8, 8), 2, use_prefetcher=False, num_workers=1, persistent_workers=False)
    assert type(loader) is torch.utils.data.DataLoader


@BOTH
def test_the_prefetch_loader_of_timm_normalizes_the_batches(timm: Any, make: Any) -> None:
    from timm.data.loader import PrefetchLoader, fast_collate

    samples = SimpleDataset([(np.full((3, 4, 4), 255, np.uint8), i) for i in range(8)])
    loader = make(samples, batch_size=4, num_workers=2, collate_fn=fast_collate)
    batches = list(PrefetchLoader(loader, mean=(0, 0, 0), std=(1, 1, 1), device=torch.device("cpu")))
    assert [target.tolist() for _, target in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(torch.allclose(images, torch.ones(4, 3, 4, 4)) for images, _ in batches)


@BOTH
def test_mixup_as_a_collate_function(timm: Any, make: Any) -> None:
    mixup = timm.FastCollateMixup(mixup_alpha=1.0, num_classes=8)
    samples = [(np.full((3, 4, 4), 16 * i, np.uint8), i) for i in range(8)]
    for images, targets in make(samples, batch_size=4, num_workers=2, collate_fn=mixup):
        assert images.shape == (4, 3, 4, 4)
        assert torch.allclose(targets.sum(1), torch.ones(4))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_copies_go_to_the_ranks_that_timm_sends_them_to(timm: Any, replicas: int) -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    for rank in range(replicas):
        theirs = RepeatAugSampler(
            range(10), replicas, rank, shuffle=False, num_repeats=3, selected_round=0, selected_ratio=replicas / 3
        )
        loader = ShardedDataLoader(range(10), 4, sampler=RepeatedSampler(3), num_replicas=replicas, rank=rank)
        ours = [index for batch in loader for index in batch.tolist()]
        assert ours[: len(theirs)] == list(theirs) and len(ours) >= len(theirs) >= 10 * 3 // replicas


# -- libraries that augment images -------------------------------------------------------------------------------------


def of_albumentations() -> Any:
    library = pytest.importorskip("albumentations")
    pipeline = library.Compose([library.GaussNoise(p=1.0), library.HorizontalFlip(p=0.5)])
    return lambda image: pipeline(image=image)["image"]


def of_monai() -> Any:
    library = pytest.importorskip("monai.transforms")
    pipeline = library.Compose([library.RandGaussianNoise(prob=1.0), library.RandFlip(prob=0.5)])
    return lambda image: pipeline(image.astype("float32"))


def of_torchvision() -> Any:
    v2 = pytest.importorskip("torchvision.transforms.v2")
    return v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32), v2.GaussianNoise(0, 0.1, False)])


def of_timm() -> Any:
    image, data = pytest.importorskip("PIL.Image"), pytest.importorskip("timm.data")
    transform = data.create_transform(8, is_training=True, auto_augment="rand-m9-mstd0.5", re_prob=1.0, re_mode="pixel")
    noise = image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 3), dtype=np.uint8))
    return lambda _: transform(noise)


@pytest.fixture(scope="module", params=[of_albumentations, of_monai, of_torchvision, of_timm])
def images(request: pytest.FixtureRequest) -> Iterator[Callable[[], Any]]:
    """Makes grey images that one of the libraries augments: what differs between two of them is their augmentation."""
    with pytest.MonkeyPatch.context() as patch:
        # Otherwise albumentations asks the network for its latest version.
        patch.setenv("NO_ALBUMENTATIONS_UPDATE", "1")
        request.param()
        grey = SimpleDataset([np.full((8, 8, 3), 128, dtype=np.uint8)] * 16)
        yield lambda: grey.transform(request.param(), seeded=True)


@BOTH
def test_augmentations_differ_in_and_between_epochs_and_not_with_the_workers(images: Any, make: Any) -> None:
    loaders = [make(images(), batch_size=4, seed=1, num_workers=count) for count in (0, 1, 3)]
    epochs = [np.asarray(image).tobytes() for batch in [*loaders[0], *loaders[0]] for image in batch]
    assert len(set(epochs)) == len(epochs) == 32
    for loader in loaders[1:]:
        assert [np.asarray(image).tobytes() for batch in loader for image in batch] == epochs[:16]


# -- batches that move themselves --------------------------------------------------------------------------------------


OWN: dict[str, Callable[[], Any]] = {
    "encoding": lambda: pytest.importorskip("transformers").BatchEncoding({"input_ids": torch.ones(2, 3)}),
    "graphs": lambda: pytest.importorskip("torch_geometric.data").Batch.from_data_list(graphs(2)),
    "dictionary": lambda: pytest.importorskip("tensordict").TensorDict({"x": torch.ones(2, 3)}, batch_size=[2]),
    "packed sequence": lambda: pack_sequence([torch.ones(3), torch.ones(2)]),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_they_move_on_the_copy_stream(machine: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    streams, own = SimulatedStreams(machine, machine.devices[0]), make()
    copies, asked = CopyStream(streams), []

    def noted(batch: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(streams.caller_stream().name)
        return batch

    monkeypatch.setattr(type(own), "to", noted)
    monkeypatch.setattr(copies, "_stage", lambda leaf: leaf)  # these pin themselves, which needs an accelerator
    copies.begin([own, torch.arange(100_000)])
    machine.run(0)  # what was begun is enqueued
    assert asked == [copies._stream.name]
    machine.finish()
    copies.drain()
