"""On a GPU, a program ends whatever the device does, and a Ctrl-C arrives.

On a pretended GPU these programs run to their ends too, but only a real driver can be slow to give a device up.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
import torch
from on_cuda import PRETENDED, SECONDS, needs_cuda, run_program, sleep

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices.copies import CLOSING_SECONDS

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(120)]

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
