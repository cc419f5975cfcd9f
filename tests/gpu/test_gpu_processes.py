"""On a GPU: worker processes beside a CUDA context, and other devices."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, made, make_pool
from on_cuda import needs_cuda, needs_two, run_program, sleep

from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader
from sharded_loader.parallel import split_and_load

pytestmark = [pytest.mark.gpu, needs_cuda]

COUNT, WIDTH = 128, 8192


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH), np.arange(COUNT))


def check(batch: Any, number: int, size: int = 8) -> None:
    values, labels = batch
    wanted = torch.arange(number * size, number * size + size, device=labels.device)
    assert torch.equal(labels, wanted)
    columns = torch.arange(WIDTH, device=labels.device)
    assert torch.equal(values, (wanted[:, None] * WIDTH + columns).float())


@pytest.mark.parametrize("start_method", PROCESS_POOLS)
def test_workers_beside_a_cuda_context(cuda: torch.device, start_method: str) -> None:
    busy = torch.ones(1000, 1000, device=cuda)
    with ShardedDataLoader(dataset(), 8, device=cuda, pool=make_pool(start_method)) as loader:
        for _ in range(3):
            for number, batch in enumerate(loader):
                busy = (busy @ busy).clamp_(0, 1)
                check(batch, number)
    assert busy.sum().item() == 1_000_000


class Part:
    """Iterable data: every row of a part. While ``kills`` has a file, the worker that reads row 20 of part 1 is killed.

    Args:
        kills: taken away by the worker that it kills.
    """

    def __init__(self, kills: Path) -> None:
        self.kills = kills

    def __call__(self, part: int, parts: int) -> Iterator[Any]:
        data = dataset()
        for number, index in enumerate(range(part, COUNT, parts)):
            if (part, number) == (1, 20) and self.kills.exists():
                self.kills.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            yield data[index]


def check_rows(batch: Any, labels: Any) -> None:
    assert batch[1].tolist() == labels
    columns = torch.arange(WIDTH, device=batch[1].device)
    assert torch.equal(batch[0], (batch[1][:, None] * WIDTH + columns).float())


@pytest.mark.parametrize("ahead", [False, True], ids=["this epoch", "the next epoch too"])
@pytest.mark.parametrize("killed", [False, True], ids=["whole", "killed"])
def test_iterable_data_and_the_next_epoch_arrive(cuda: torch.device, tmp_path: Path, ahead: bool, killed: bool) -> None:
    part = Part(tmp_path / "kills")
    # A batch of each part in turn.
    expected = [list(range(first + part, first + part + 16, 2)) for first in range(0, COUNT, 16) for part in range(2)]
    options: dict[str, Any] = {"device": cuda, "num_workers": 2, "prefetch_epochs": ahead}
    with made(part, 8, streams=2, **options) as loader:
        for epoch in range(3):
            if killed and epoch != 1:
                part.kills.touch()  # with `ahead` the workers read the next epoch already
            for labels, batch in zip(expected, loader, strict=True):
                sleep(400_000)
                check_rows(batch, labels)
    assert not part.kills.exists()


@pytest.mark.parametrize("ahead", [False, True], ids=["this epoch", "the next epoch too"])
@pytest.mark.parametrize("start_method", PROCESS_POOLS)
def test_a_worker_killed_in_an_epoch_or_beside_its_end_while_segments_are_locked_is_replaced(
    cuda: torch.device, ahead: bool, start_method: str
) -> None:
    pool = ProcessPool(2, start_method=start_method)
    with made(dataset(), 8, device=cuda, pool=pool, prefetch_epochs=ahead) as loader:
        for epoch in range(4):
            for number, batch in enumerate(loader):
                if number == (3 if epoch % 2 else COUNT // 8 - 2):
                    os.kill(pool.pids[0], signal.SIGKILL)
                sleep(400_000)
                check(batch, number)


def test_a_thread_gets_batches_on_its_own_stream(cuda: torch.device) -> None:
    wrong: list[BaseException] = []
    with ShardedDataLoader(dataset(), 8, device=cuda, num_workers=2) as loader:

        def consume() -> None:
            try:
                with torch.cuda.stream(torch.cuda.Stream(cuda)):
                    for number, batch in enumerate(loader):
                        check(batch, number)
            except BaseException as error:
                wrong.append(error)

        for _ in range(3):
            thread = threading.Thread(target=consume)
            thread.start()
            thread.join()
    assert wrong == []


@needs_two
def test_every_shard_is_on_its_own_device(cuda: torch.device) -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    with ShardedDataLoader(dataset(), 16, devices=devices, num_workers=2) as loader:
        for number, shards in enumerate(loader):
            for place, shard in enumerate(shards):
                assert {field.device for field in shard} == {devices[place]}
                check(shard, 2 * number + place)


@needs_two
@pytest.mark.parametrize("share", [True, 0.5])
def test_results_of_rows_that_each_device_keeps_are_gathered_on_the_first(cuda: torch.device, share: Any) -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    with ShardedDataLoader(dataset(), 16, devices=Placement(devices, resident=share)) as loader:
        for number, shards in enumerate(loader):
            for place, shard in enumerate(shards):
                assert {field.device for field in shard} == {devices[place]}
            values, labels = loader.gather(shards)
            assert {values.device, labels.device} == {devices[0]}
            check([values, labels], number, 16)


NO_OTHER_CONTEXT = """
import numpy, torch
from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader
from sharded_loader.torch import DataLoader
data = ArrayDataset(numpy.zeros((64, 8192), numpy.float32))
def read(device, **options):
    kind = options.pop("kind", ShardedDataLoader)
    loader = kind(data, 8, **{"device": device} | options)
    for epoch in range(3):
        torch.cuda._sleep(20_000_000)  # copies are under way when the epoch ends, or the loop is left
        for number, batch in enumerate(loader):
            assert batch.device.index == (None if options.get("pin_memory") else 1)
            if epoch == 2 and number == 3:
                break
def read_all(device):
    read(device, pool=ProcessPool(2))
    read(device, thread_pool=True, num_workers=2)
    read(device)
    read(Placement(device, resident=True))
    read(device, kind=DataLoader, num_workers=2)
EACH
torch.cuda.synchronize(1)
print([torch._C._cuda_hasPrimaryContext(number) for number in range(2)])
"""

WITHOUT_SET_DEVICE = """
sleep = torch.cuda._sleep
def on_its_own(cycles):
    with torch.cuda.device(1):
        sleep(cycles)
torch.cuda._sleep = on_its_own
read_all("cuda:1")
"""

WITH_SET_DEVICE = """
torch.cuda.set_device(1)
read_all("cuda")
read(None, pin_memory=True, num_workers=2)
read(None, pin_memory=True, num_workers=2, kind=DataLoader)
"""

FULL = """
with torch.cuda.device(1):
    device = torch.device("cuda", 1)
    torch.zeros(1, device=device)
    held = torch.cuda.memory_reserved(1)
    torch.cuda.set_per_process_memory_fraction(
        (held + 4 * 262_144) / torch.cuda.get_device_properties(1).total_memory, 1)
kept = []
with ShardedDataLoader(data, 8, device="cuda:1", num_workers=2) as loader:
    try:
        for batch in loader:
            kept.append(batch)
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("the device has room for all of it")
"""


@needs_two
@pytest.mark.parametrize("each", [WITHOUT_SET_DEVICE, WITH_SET_DEVICE, FULL], ids=["named", "set_device", "full"])
def test_no_context_appears_on_a_device_that_nobody_named(each: str) -> None:
    done = run_program(NO_OTHER_CONTEXT.replace("EACH", each), 100)
    assert (done.stdout.split("\n"), done.returncode) == (["[False, True]", ""], 0), done.stderr


@needs_two
def test_the_gpu_of_another_rank_is_warned_of_once(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.warns(UserWarning, match=r"several processes would share cuda:0.*set_device\(1\)") as caught:
        with ShardedDataLoader(dataset(), 8, device="cuda", num_workers=2) as loader:
            list(loader)
    assert sum("would share" in str(warning.message) for warning in caught) == 1


@pytest.mark.parametrize("second", [0, pytest.param(1, marks=needs_two)])
def test_split_and_load_goes_straight_to_each_device(cuda: torch.device, second: int) -> None:
    devices = [cuda, torch.device("cuda", second)]
    data = torch.arange(10).pin_memory()
    parts = split_and_load({"x": data, "name": "n"}, devices, even_split=False)
    assert [part["x"].device for part in parts] == devices
    assert [part["x"].tolist() for part in parts] == [list(range(5)), list(range(5, 10))]
