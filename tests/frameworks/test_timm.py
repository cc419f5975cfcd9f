"""timm: its samplers, its mixup and the loader that normalises, with the loaders of this library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS, Numbered, seen

from sharded_loader import RepeatedSampler, ShardedDataLoader, SimpleDataset

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def data() -> Any:
    pytest.importorskip("torchvision")
    return pytest.importorskip("timm.data")


@BOTH
def test_repeated_augmentation_and_ordered_samplers_share_the_samples(data: Any, make: Any) -> None:
    from timm.data.distributed_sampler import OrderedDistributedSampler, RepeatAugSampler

    for rank in range(2):
        ordered = OrderedDistributedSampler(Numbered(10), num_replicas=2, rank=rank)
        assert sum(seen(make(Numbered(10), batch_size=2, sampler=ordered)), []) == list(range(rank, 10, 2))
        repeated = RepeatAugSampler(
            Numbered(), num_replicas=2, rank=rank, num_repeats=2, selected_round=0, selected_ratio=1
        )
        assert sum(seen(make(Numbered(), batch_size=4, sampler=repeated, num_workers=2)), []) == list(repeated)


@BOTH
def test_the_epoch_of_a_sampler_of_timm_is_set_through_the_loader(data: Any, make: Any) -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    def sampler() -> Any:
        return RepeatAugSampler(Numbered(), num_replicas=1, rank=0, selected_round=0)

    loader, alone = make(Numbered(), batch_size=4, sampler=sampler()), sampler()
    for epoch in (2, 0):
        loader.set_epoch(epoch)
        alone.set_epoch(epoch)
        assert sum(seen(loader), []) == list(alone)


def test_create_loader_makes_a_loader_of_torchs_class(data: Any) -> None:
    samples = torch.utils.data.TensorDataset(torch.zeros(4, 3, 8, 8), torch.zeros(4))
    loader = data.create_loader(samples, (3, 8, 8), 2, use_prefetcher=False, num_workers=1, persistent_workers=False)
    assert type(loader) is torch.utils.data.DataLoader


@BOTH
def test_the_prefetch_loader_of_timm_normalizes_the_batches(data: Any, make: Any) -> None:
    from timm.data.loader import PrefetchLoader, fast_collate

    samples = SimpleDataset([(np.full((3, 4, 4), 255, np.uint8), i) for i in range(8)])
    loader = make(samples, batch_size=4, num_workers=2, collate_fn=fast_collate)
    batches = list(PrefetchLoader(loader, mean=(0, 0, 0), std=(1, 1, 1), device=torch.device("cpu")))
    assert [target.tolist() for _, target in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert all(torch.allclose(images, torch.ones(4, 3, 4, 4)) for images, _ in batches)


@BOTH
def test_mixup_as_a_collate_function(data: Any, make: Any) -> None:
    mixup = data.FastCollateMixup(mixup_alpha=1.0, num_classes=8)
    samples = [(np.full((3, 4, 4), 16 * i, np.uint8), i) for i in range(8)]
    for images, targets in make(samples, batch_size=4, num_workers=2, collate_fn=mixup):
        assert images.shape == (4, 3, 4, 4)
        assert torch.allclose(targets.sum(1), torch.ones(4))


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_copies_go_to_the_ranks_that_timm_sends_them_to(replicas: int) -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    for rank in range(replicas):
        theirs = RepeatAugSampler(
            range(10), replicas, rank, shuffle=False, num_repeats=3, selected_round=0, selected_ratio=replicas / 3
        )
        loader = ShardedDataLoader(range(10), 4, sampler=RepeatedSampler(3), num_replicas=replicas, rank=rank)
        ours = [index for batch in loader for index in batch.tolist()]
        assert ours[: len(theirs)] == list(theirs) and len(ours) >= len(theirs) >= 10 * 3 // replicas
