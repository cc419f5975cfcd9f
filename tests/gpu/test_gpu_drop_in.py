"""On a GPU, the drop-in for torch's ``DataLoader`` gives the batches that torch's gives, whatever streams do."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from on_cuda import LONG, PART, SHORT, Cudart, Rows, needs_cuda, sleep
from stress import rows
from torch.utils.data import IterableDataset, get_worker_info

from sharded_loader.torch import DataLoader

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(300)]

COUNT, WIDTH, BATCH = 1024 // min(PART, 2), 16_384, 32  # 2 MB per batch
EPOCHS = 2


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same rows without an index: each worker yields its part."""

    def __iter__(self) -> Iterator[Any]:
        info, data = get_worker_info(), rows(COUNT, WIDTH)
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (data[index] for index in range(first, COUNT, step))


def loader_of(kind: str, **options: Any) -> DataLoader[Any]:
    if kind == "iterable":
        return DataLoader(Stream(), BATCH, **options)
    return DataLoader(rows(COUNT, WIDTH), BATCH, shuffle=True, seed=3, **options)


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "in_order": False},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "thread_pool": True},
        {},
    ],
    ids=["workers", "any_order", "persistent", "no_processes", "alone"],
)
def test_batches_on_the_device_are_intact_in_two_epochs(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    runtime, rng, target = Cudart(torch.cuda.cudart()), random.Random(1), Rows(cuda, WIDTH)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    loader = loader_of(kind, device=cuda, **options)
    for epoch in range(EPOCHS):
        for values, labels in loader:
            sleep(rng.randrange(SHORT, LONG))
            target.compare(values, labels)
        seen, differing = target.result()
        assert (sorted(seen), differing) == (list(range(COUNT)), 0)
        if kind == "map" and options.get("in_order", True):
            expected = DataLoader(range(COUNT), BATCH, shuffle=True, seed=3)
            expected.set_epoch(epoch)
            assert seen == [index for batch in expected for index in batch.tolist()]
    del loader, values, labels
    gc.collect()
    torch.cuda.synchronize(cuda)
    assert runtime.registered == {}
    if options.get("num_workers") and not options.get("thread_pool"):
        assert runtime.calls  # the segments of the workers were page-locked


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize("workers", [2, 0])
def test_the_users_own_copies_of_its_pinned_batches_are_intact(cuda: torch.device, kind: str, workers: int) -> None:
    """The host batch is dropped as soon as its copy has been asked for, and the copy comes late."""
    rng, target = random.Random(2), Rows(cuda, WIDTH)
    loader = loader_of(kind, pin_memory=True, num_workers=workers)
    for _ in range(EPOCHS):
        for batch in loader:
            assert all(field.is_pinned() for field in batch)
            sleep(rng.randrange(SHORT, LONG))
            values, labels = [field.to(cuda, non_blocking=True) for field in batch]
            del batch
            target.compare(values, labels)
        seen, differing = target.result()
        assert (sorted(seen), differing) == (list(range(COUNT)), 0)
