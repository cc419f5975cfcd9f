"""Where the kernel or a container refuses a system call, the loader uses another way: with the same batches."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import METHODS, PROCESS_POOLS, covering
from inside import transport_of
from refusing import CALLS, ERRORS, FCNTL, can_refuse, in_child, refuse
from samples import Filled, StartsAndDies
from test_orphans import assert_gone

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.base import system
from sharded_loader.pools.process import transport

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")

seccomp = pytest.mark.skipif(not can_refuse(), reason="this machine has no seccomp")

USED = ("pidfd_open", "memfd_create", "fallocate", "sendmsg", "recvmsg", "sigaltstack", *FCNTL)

REFUSED = {
    **{call: (call,) for call in USED},
    "everything": tuple(call for call in (*CALLS, *FCNTL) if call != "fcntl"),
}
"""Each optional call that the library makes, alone; and these with others that it might come to use, together."""


def read_and_lose_a_worker(method: str, length: int = 160) -> list[int]:
    """The first numbers of all batches of an epoch in which a worker is killed."""
    pool = ProcessPool(2, start_method=method)
    with ShardedDataLoader(Filled(length), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        os.kill(pool.pids[0], signal.SIGKILL)
        got += iterator
        assert all(batch.shape == (4, 4096) for batch in got)
    assert pool.pids == []
    return [int(batch[0, 0]) for batch in got]


@seccomp
@covering(1, method=PROCESS_POOLS, call=REFUSED, error=ERRORS)
@pytest.mark.filterwarnings("ignore:this system does not pass descriptors:RuntimeWarning")
@pytest.mark.costly(2)
def test_a_refused_call_changes_no_batch_and_no_worker_is_lost(method: str, call: str, error: str) -> None:
    def work() -> object:
        refuse(REFUSED[call], error)
        return read_and_lose_a_worker(method)

    assert in_child(work) == str(list(range(0, 160, 4)))


@seccomp
@covering(1, method=PROCESS_POOLS, call=["memfd_create", "recvmsg", "fallocate", "everything"])
@pytest.mark.filterwarnings("ignore:this system does not pass descriptors:RuntimeWarning")
@pytest.mark.costly
def test_a_large_dataset_reaches_its_workers_without_the_call(method: str, call: str) -> None:
    def work() -> object:
        refuse(REFUSED[call], "EPERM")
        data = ArrayDataset(np.arange(200_000.0))
        with ShardedDataLoader(data, 50_000, pool=ProcessPool(2, start_method=method)) as loader:
            return [batch[-1].item() for batch in loader]

    assert in_child(work) == str([49_999.0, 99_999.0, 149_999.0, 199_999.0])


@seccomp
def test_batches_lie_in_shared_memory_also_where_memfd_create_is_refused() -> None:
    def work() -> object:
        refuse(["memfd_create"], "ENOSYS")
        pool = ProcessPool(1, start_method="fork")
        with ShardedDataLoader(Filled(40), 4, pool=pool) as loader:
            list(loader)
            return len(transport_of(pool).arena.segments) > 0

    assert in_child(work) == "True"


@seccomp
@METHODS
def test_workers_go_with_a_killed_trainer_where_the_kernel_sends_no_signal(method: str) -> None:
    """F_SETSIG is refused: the receiver thread of the worker has to end it."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            refuse(["F_SETSIG"], "EPERM")
            pool = ProcessPool(2, start_method=method)
            iterator = iter(ShardedDataLoader(range(8), 1, pool=pool))
            next(iterator)
            os.write(writer, " ".join(map(str, pool.pids)).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as stream:
        pids = [int(pid) for pid in os.read(stream.fileno(), 1000).split()]
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert len(pids) == 2
    assert_gone(pids)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


@pytest.mark.costly
@covering(1, spawned=True, method=PROCESS_POOLS, how=["fork", "program"], known=["by pidfd", "by pipe"])
def test_a_dead_worker_is_noticed_while_a_process_that_it_started_lives(
    method: str, how: str, known: str, folder: Path
) -> None:
    def work() -> object:
        if known == "by pipe":
            transport.open_pidfd = lambda pid: None
        with ShardedDataLoader(StartsAndDies(how, folder), 4, pool=ProcessPool(2, start_method=method)) as loader:
            return [index for batch in loader for index in batch.tolist()]

    assert in_child(work, 30) == str(list(range(40)))
    assert (folder / "started").exists()


def test_a_pidfd_that_is_refused_only_sometimes_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a descriptor in one moment, room in the next."""
    calls = []

    def every_other(pid: int) -> Any:
        calls.append(pid)
        return None if len(calls) % 2 else system.open_pidfd(pid)

    monkeypatch.setattr(transport, "open_pidfd", every_other)
    assert read_and_lose_a_worker("fork") == list(range(0, 160, 4))
    assert len(calls) == 3
