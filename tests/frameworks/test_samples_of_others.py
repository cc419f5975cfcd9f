"""Graphs of PyTorch Geometric, images of timm and of four libraries that augment them, batches that move themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, seen
from simulated import SimulatedStreams
from torch.nn.utils.rnn import pack_sequence

from sharded_loader import RepeatedSampler, ShardedDataLoader, SimpleDataset
from sharded_loader.devices.copies import CopyStream

pytestmark = IN_FRAMEWORKS


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


def encoding() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.BatchEncoding({name: torch.ones(2, 3) for name in ("input_ids", "attention_mask")})


def two_graphs() -> Any:
    return pytest.importorskip("torch_geometric.data").Batch.from_data_list(graphs(2))


def dictionary() -> Any:
    return pytest.importorskip("tensordict").TensorDict({"x": torch.ones(2, 3)}, batch_size=[2])


@pytest.mark.parametrize(
    "make", [encoding, two_graphs, dictionary, lambda: pack_sequence([torch.ones(3), torch.ones(2)])]
)
def test_they_move_on_the_copy_stream(machine: Any, monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> None:
    streams, own = SimulatedStreams(machine, machine.devices[0]), make()
    copies, asked = CopyStream(streams), []

    def noted(batch: Any, *arguments: Any, **named: Any) -> Any:
        asked.append(streams.caller_stream().name)
        return batch

    monkeypatch.setattr(type(own), "to", noted)
    monkeypatch.setattr(copies, "_stage", lambda leaf: leaf)  # these pin themselves, which needs an accelerator
    copies.begin([own, torch.arange(100_000)])
    assert asked == [copies._stream.name]
    machine.finish()
    copies.drain()
