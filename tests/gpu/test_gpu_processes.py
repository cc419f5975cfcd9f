"""On a GPU: worker processes beside a CUDA context, other devices, and the end of a program.

A program ends whatever the device does, and a Ctrl-C arrives. On a pretended GPU the programs run to their ends too,
but only a real driver can be slow to give a device up.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, made
from on_cuda import PRETENDED, SECONDS, needs_cuda, needs_two, run_program, sleep

from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader
from sharded_loader.devices.copies import CLOSING_SECONDS
from sharded_loader.parallel import split_and_load

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(120)]

COUNT, WIDTH = 128, 8192


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(COUNT * WIDTH, dtype=np.float32).reshape(COUNT, WIDTH), np.arange(COUNT))


def check(batch: Any, number: int, size: int = 8) -> None:
    values, labels = batch
    wanted = torch.arange(number * size, number * size + size, device=labels.device)
    assert torch.equal(labels, wanted)
    columns = torch.arange(WIDTH, device=labels.device)
    assert torch.equal(values, (wanted[:, None] * WIDTH + columns).float())


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
                    with contextlib.suppress(ProcessLookupError):  # not noticed yet that it has died before
                        os.kill(pool.pids[0], signal.SIGKILL)
                sleep(400_000)
                check(batch, number)


def test_a_thread_gets_batches_on_its_own_stream(cuda: torch.device) -> None:
    with ShardedDataLoader(dataset(), 8, device=cuda, num_workers=2) as loader:

        def consume() -> None:
            with torch.cuda.stream(torch.cuda.Stream(cuda)):
                for number, batch in enumerate(loader):
                    check(batch, number)

        for _ in range(3):
            with ThreadPoolExecutor(1) as threads:
                threads.submit(consume).result()


@needs_two
@pytest.mark.parametrize("share", [False, True, 0.5])
def test_every_shard_is_on_its_own_device_and_results_are_gathered_on_the_first(cuda: torch.device, share: Any) -> None:
    devices = [torch.device("cuda", number) for number in range(2)]
    with ShardedDataLoader(dataset(), 16, devices=Placement(devices, resident=share), num_workers=2) as loader:
        for number, shards in enumerate(loader):
            for place, shard in enumerate(shards):
                assert {field.device for field in shard} == {devices[place]}
                check(shard, 2 * number + place)
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


@pytest.mark.parametrize("second", [0, pytest.param(1, marks=needs_two)])
def test_split_and_load_goes_straight_to_each_device(cuda: torch.device, second: int) -> None:
    devices = [cuda, torch.device("cuda", second)]
    data = torch.arange(10).pin_memory()
    parts = split_and_load({"x": data, "name": "n"}, devices, even_split=False)
    assert [part["x"].device for part in parts] == devices
    assert [part["x"].tolist() for part in parts] == [list(range(5)), list(range(5, 10))]


# -- the end of a program ---------------------------------------------------------------------------------------

PATIENCE = 60 if PRETENDED else 20
"""Seconds for a program that imports torch, makes a context, starts workers and ends. A busy machine may take long for
all but the end."""

PROGRAM = """
import sys, time, numpy, torch
from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader, ThreadPool
data = ArrayDataset(numpy.zeros((512, 65536), numpy.float32))  # 2 MB for a batch of 8
def begin(pool):
    loader = ShardedDataLoader(data, 8, device="cuda", pool=pool)
    batches = iter(loader)
    next(batches)
    torch.cuda.synchronize()
    return loader, batches
"""

HUNG = """
loader, batches = begin(POOL)
torch.cuda._sleep(10**12)  # some ten minutes
for _ in range(2):  # a third one may wait for the device
    next(batches)
print(time.monotonic(), flush=True)
sys.exit()
"""

FAILED = """
loader, batches = begin(POOL)
torch._assert_async(torch.zeros((), device="cuda"))
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(str(error).splitlines()[0], flush=True)
try:
    while True:
        next(batches)
except RuntimeError as error:
    print(str(error).splitlines()[0], flush=True)
END
"""

POOLS = {"ProcessPool(2)": "workers", "ThreadPool(2)": "no_processes", '"inline"': "alone"}


@pytest.mark.parametrize("pool", POOLS, ids=POOLS.get)
def test_a_program_ends_while_the_device_is_busy_for_minutes(cuda: torch.device, pool: str) -> None:
    done = run_program(PROGRAM + HUNG.replace("POOL", pool), PATIENCE)
    assert time.monotonic() - float(done.stdout) < 0.8 * CLOSING_SECONDS  # the device was not waited for
    assert ("Traceback" in done.stderr, "has not done" in done.stderr, done.returncode) == (False, False, 0)


@pytest.mark.parametrize("end", ["sys.exit()", "loader.close()", "del loader, batches"])
@pytest.mark.parametrize("pool", POOLS, ids=POOLS.get)
def test_a_program_ends_after_a_kernel_has_failed(cuda: torch.device, pool: str, end: str) -> None:
    done = run_program(PROGRAM + FAILED.replace("POOL", pool).replace("END", end), PATIENCE)
    assert [line.startswith("CUDA error: device-side assert") for line in done.stdout.splitlines()] == [True] * 2
    # CUDA tells of the failed assertion, and torch warns of what it cannot free.
    assert ("Traceback" in done.stderr, done.returncode) == (False, 0), done.stderr


def test_ctrl_c_ends_the_wait_for_a_busy_device(cuda: torch.device) -> None:
    """It arrives at once, and nothing is lost."""
    data = ArrayDataset(np.repeat(np.arange(256, dtype=np.float32)[:, None], 16_384, 1))
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    with ShardedDataLoader(data, 8, device=cuda, pool=ProcessPool(2)) as loader:
        batches = iter(loader)
        got = [next(batches)]
        torch.cuda.synchronize(cuda)
        sleep(4 * SECONDS)
        busy = torch.cuda.Event()
        busy.record()
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        try:
            with pytest.raises(KeyboardInterrupt):
                while True:
                    got.append(next(batches))
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
        assert not busy.query()  # so the wait has ended before the device's work
        got += batches
    assert [batch[0, 0].item() for batch in got] == list(range(0, 256, 8))
