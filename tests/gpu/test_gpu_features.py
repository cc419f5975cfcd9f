"""On a GPU: functions, containers and small tensors on the copy stream; the drop-in gives the batches of torch's."""

from __future__ import annotations

import gc
import random
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from on_cuda import LONG, PART, SHORT, Cudart, Late, Rows, needs_cuda, sleep
from stress import rows
from torch.utils.data import IterableDataset, get_worker_info

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader
from sharded_loader.engine.pool import Pool
from sharded_loader.torch import DataLoader

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(300)]

COUNT, WIDTH, BATCH = 512, 16_384, 32
EPOCHS = max(1, 20 // PART)


def columns() -> ArrayDataset:
    return ArrayDataset(x=np.repeat(np.arange(COUNT), WIDTH).reshape(COUNT, WIDTH), y=np.arange(COUNT))


class Checks(Late):
    """The device is behind."""

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        sleep(SHORT)
        self.expect(found, expected)

    def compare_rows(self, x: torch.Tensor, y: torch.Tensor, number: int, added: int = 0, factor: int = 1) -> None:
        first = torch.arange(BATCH, device=self.device) + number * BATCH
        self.compare(x, (first * factor + added)[:, None])
        self.compare(y, first)


def prepare(batch: Any, rng: Any) -> Any:
    added = int(rng.integers(1000))
    between = batch["x"] * 2
    return between + added, batch["y"], added


def test_a_function_runs_on_the_copy_stream(cuda: torch.device, pool: Pool) -> None:
    wrong, streams = Checks(cuda), set()

    def noted(batch: Any, rng: Any) -> Any:
        streams.add(torch.cuda.current_stream(cuda).cuda_stream)
        return prepare(batch, rng)

    with ShardedDataLoader(
        columns(), BATCH, seed=1, device=Placement(cuda, device_transform=noted), pool=pool
    ) as loader:
        for _ in range(EPOCHS):
            for number, (x, y, added) in enumerate(loader):
                wrong.compare_rows(x, y, number, added, 2)
                shapes = [(x.shape, x.dtype), (y.shape, y.dtype)]
                del x, y
                wrong.poison(shapes)
    assert wrong.differing() == 0
    assert len(streams) == 1 and torch.cuda.default_stream(cuda).cuda_stream not in streams


def test_its_numbers_are_those_of_the_cpu(cuda: torch.device) -> None:
    options: dict[str, Any] = {"seed": 5, "shuffle": True, "device_transform": prepare}
    with made(columns(), BATCH, device=cuda, **options) as loader:
        on_device = [added for _, _, added in loader]
    assert on_device == [added for _, _, added in made(columns(), BATCH, **options)]


def test_the_memory_of_its_results_is_bounded(cuda: torch.device) -> None:
    with ShardedDataLoader(columns(), BATCH, device=Placement(cuda, device_transform=prepare)) as loader:
        for x, _, _ in loader:  # what torch keeps for the streams
            sleep(SHORT)
            del x
        torch.cuda.synchronize(cuda)
        before = torch.cuda.memory_reserved(cuda)
        for _ in range(EPOCHS):
            for x, _, _ in loader:
                sleep(SHORT)
                del x
        torch.cuda.synchronize(cuda)
        assert torch.cuda.memory_reserved(cuda) <= 2 * before


def test_host_fields_stay_on_the_host(cuda: torch.device, pool: Pool) -> None:
    with ShardedDataLoader(columns(), BATCH, device=Placement(cuda, host_fields=["y"]), pool=pool) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].device == cuda and not batch["y"].is_pinned()
            assert batch["y"].tolist() == list(range(number * BATCH, (number + 1) * BATCH))


class Encoding(UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's."""

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        return Encoding({name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()})


def encoding(samples: list[Any]) -> Any:
    return Encoding({name: torch.from_numpy(np.stack([one[name] for one in samples])) for name in ("x", "y")})


def test_a_container_that_moves_itself_is_copied_ahead(cuda: torch.device, pool: Pool) -> None:
    wrong = Checks(cuda)
    with ShardedDataLoader(columns(), BATCH, device=cuda, pool=pool, collate_fn=encoding) as loader:
        for _ in range(EPOCHS):
            for number, batch in enumerate(loader):
                wrong.compare_rows(batch["x"], batch["y"], number)
                shapes = [(field.shape, field.dtype) for field in batch.values()]
                del batch
                wrong.poison(shapes)
    assert wrong.differing() == 0


def test_many_small_tensors_are_intact(cuda: torch.device, pool: Pool) -> None:
    dtypes, wrong = [np.float32, np.int64, np.uint8, np.float16, np.bool_], Checks(cuda)
    columns = {f"{k}": np.arange(COUNT * (1 + k % 5)).reshape(COUNT, -1).astype(dtypes[k % 5]) for k in range(256)}
    on_device = {name: torch.from_numpy(column).to(cuda) for name, column in columns.items()}
    with ShardedDataLoader(ArrayDataset(**columns), BATCH, device=cuda, pool=pool) as loader:
        for number, batch in enumerate(loader):
            for name, field in batch.items():
                wrong.expect(field, on_device[name][number * BATCH : (number + 1) * BATCH])
            del batch, field
    assert wrong.differing() == 0


def test_another_stream_waits_for_the_ready_event(cuda: torch.device, pool: Pool) -> None:
    other, wrong = torch.cuda.Stream(cuda), Checks(cuda)
    torch.cuda.synchronize(cuda)
    with ShardedDataLoader(columns(), BATCH, device=cuda, pool=pool) as loader:
        for number, batch in enumerate(loader):
            other.wait_event(loader.ready_event)
            with torch.cuda.stream(other):
                wrong.compare(batch["y"], torch.arange(BATCH, device=cuda) + number * BATCH)
            batch["y"].record_stream(other)
            del batch
    assert wrong.differing() == 0


# -- the drop-in for torch's DataLoader ------------------------------------------------------------------------


LONGER = 1024 // min(PART, 2)


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same rows without an index: each worker yields its part."""

    def __iter__(self) -> Iterator[Any]:
        info, data = get_worker_info(), rows(LONGER, WIDTH)
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (data[index] for index in range(first, LONGER, step))


def loader_of(kind: str, **options: Any) -> DataLoader[Any]:
    if kind == "iterable":
        return DataLoader(Stream(), BATCH, **options)
    return DataLoader(rows(LONGER, WIDTH), BATCH, shuffle=True, seed=3, **options)


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
    for epoch in range(2):
        for values, labels in loader:
            sleep(rng.randrange(SHORT, LONG))
            target.compare(values, labels)
        seen, differing = target.result()
        assert (sorted(seen), differing) == (list(range(LONGER)), 0)
        if kind == "map" and options.get("in_order", True):
            expected = DataLoader(range(LONGER), BATCH, shuffle=True, seed=3)
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
    for _ in range(2):
        for batch in loader:
            assert all(field.is_pinned() for field in batch)
            sleep(rng.randrange(SHORT, LONG))
            values, labels = [field.to(cuda, non_blocking=True) for field in batch]
            del batch
            target.compare(values, labels)
        seen, differing = target.result()
        assert (sorted(seen), differing) == (list(range(LONGER)), 0)
