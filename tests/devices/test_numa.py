"""With two sockets, slots and workers are near the GPU: a pretended /sys, a simulated GPU, real workers."""

from __future__ import annotations

import errno
import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import METHODS
from simulated import Machine, pretended_sys

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.base.limits import Near, cpus_near
from sharded_loader.devices import placement
from sharded_loader.devices.placement import Placement
from sharded_loader.memory import segments
from sharded_loader.memory.arena import FIRST_SEGMENT
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two CPUs and their affinity"
)

ADDRESSES = ["0000:01:00.0", "0000:81:00.0"]
ROWS, SIZE, WIDTH = 96, 8, 8192


@pytest.fixture
def cpus(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Each of the first two CPUs of this machine is a node of its own, and each of the two devices is near one."""
    usable = sorted(os.sched_getaffinity(0))
    pretended_sys(tmp_path, {0: str(usable[0]), 1: str(usable[1])}, {ADDRESSES[0]: "0", ADDRESSES[1]: "1"})
    machine.addresses.update(zip(machine.devices, ADDRESSES, strict=True))
    monkeypatch.setattr(placement, "cpus_near", functools.partial(cpus_near, root=tmp_path))
    return usable


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The CPUs on which each segment is allocated."""
    seen, allocate = [], segments.allocate

    def watched(fd: int, nbytes: int) -> None:
        seen.append(os.sched_getaffinity(0))
        allocate(fd, nbytes)

    monkeypatch.setattr(segments, "allocate", watched)
    return seen


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH))


def read(loader: Any, machine: Machine) -> None:
    """Read an epoch, and compare it."""
    seen = [shard for batch in loader for shard in (batch if isinstance(batch, list) else [batch])]
    machine.finish()
    assert np.array_equal(np.concatenate([shard.numpy() for shard in seen]).reshape(-1), np.arange(ROWS * WIDTH))
    assert machine.faults == []


def where(pool: ProcessPool) -> list[set[int]]:
    """The CPUs of the workers' threads, each set once. A thread receives, one reads."""
    threads = [int(thread) for pid in pool.pids for thread in os.listdir(f"/proc/{pid}/task")]
    assert len(threads) >= 2 * pool.num_workers
    found: list[set[int]] = []
    for cpus in map(os.sched_getaffinity, threads):
        found += [] if cpus in found else [cpus]
    return found


@pytest.mark.costly
@METHODS
@pytest.mark.also_spawned
@pytest.mark.parametrize("number", [0, 1])
def test_slots_and_workers_are_at_the_node_of_the_gpu(
    machine: Machine, cpus: list[int], allocations: list[set[int]], method: str, number: int
) -> None:
    pool, own = ProcessPool(1, start_method=method), os.sched_getaffinity(0)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[number], pool=pool) as loader:
        read(loader, machine)
        assert where(pool) == [{cpus[number]}]
    assert allocations[-1] == {cpus[number]}
    assert os.sched_getaffinity(0) == own


@METHODS
@pytest.mark.also_spawned
@pytest.mark.slow
def test_a_worker_that_replaces_another_is_bound_too(machine: Machine, cpus: list[int], method: str) -> None:
    pool = ProcessPool(1, start_method=method)
    options = {"device": machine.devices[1], "pool": pool, "prefetch_epochs": False}
    with ShardedDataLoader(dataset(), SIZE, **options) as loader:
        read(loader, machine)
        os.kill(pool.pids[0], signal.SIGKILL)
        read(loader, machine)
        assert loader.stats().replaced_workers == 1
        assert where(pool) == [{cpus[1]}]
    assert os.sched_getaffinity(0) == set(cpus)


@pytest.mark.parametrize("numa", [True, False])
@pytest.mark.costly
def test_an_argument_turns_it_off(machine: Machine, cpus: list[int], allocations: list[set[int]], numa: bool) -> None:
    pool, wanted = ProcessPool(1, numa=numa), {cpus[1]} if numa else set(cpus)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], pool=pool) as loader:
        read(loader, machine)
        assert (where(pool), allocations[-1]) == ([wanted], wanted)


@pytest.mark.parametrize("numa", [True, False])
def test_the_drop_in_has_it_too(machine: Machine, cpus: list[int], allocations: list[set[int]], numa: bool) -> None:
    wanted = {cpus[1]} if numa else set(cpus)
    options = {"device": machine.devices[1], "num_workers": 1, "persistent_workers": True, "numa": numa}
    loader: Any = DataLoader(dataset(), SIZE, **options)
    read(loader, machine)
    assert (where(loader._iterator._pool), allocations[-1]) == ([wanted], wanted)


def test_more_workers_than_cores_there_run_anywhere(
    machine: Machine, cpus: list[int], allocations: list[set[int]]
) -> None:
    pool = ProcessPool(2)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], pool=pool) as loader:
        read(loader, machine)
        assert where(pool) == [set(cpus)]
    assert allocations[-1] == {cpus[1]}  # slots are there all the same


def test_gpus_on_two_nodes_change_nothing(machine: Machine, cpus: list[int], allocations: list[set[int]]) -> None:
    pool = ProcessPool(1)
    with ShardedDataLoader(dataset(), SIZE, devices=machine.devices, pool=pool) as loader:
        read(loader, machine)
        assert where(pool) == [set(cpus)]
    assert allocations[-1] == set(cpus)


def test_host_memory_has_no_node(machine: Machine, cpus: list[int], allocations: list[set[int]]) -> None:
    pool = ProcessPool(1)
    with ShardedDataLoader(dataset(), SIZE, pool=pool) as loader:
        read(loader, machine)
        assert where(pool) == [set(cpus)]
    assert allocations[-1] == set(cpus)


def test_what_worker_init_fn_has_bound_stays_there(machine: Machine, cpus: list[int]) -> None:
    pool = ProcessPool(1, worker_init_fn=lambda number: os.sched_setaffinity(0, cpus[:1]))
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], pool=pool) as loader:
        read(loader, machine)
        assert os.sched_getaffinity(pool.pids[0]) == {cpus[0]}


def test_where_memory_is_denied_the_main_process_stays_where_it_is(
    machine: Machine, cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []

    def denied(fd: int, nbytes: int) -> None:
        if nbytes >= FIRST_SEGMENT:  # what workers start with is smaller
            tried.append(os.sched_getaffinity(0))
            raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(segments, "allocate", denied)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], num_workers=1) as loader:
        with pytest.warns(UserWarning, match=r"of shared memory wanted.*broken"):
            list(loader)
    machine.finish()
    assert tried[0] == {cpus[1]}
    assert os.sched_getaffinity(0) == set(cpus)


def test_a_system_that_rejects_it_is_no_error(
    machine: Machine, cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def rejects(thread: int, cpus: Any) -> None:
        raise PermissionError(errno.EPERM, "not here")

    monkeypatch.setattr(os, "sched_setaffinity", rejects)
    pool = ProcessPool(1)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], pool=pool) as loader:
        read(loader, machine)
        assert where(pool) == [set(cpus)]


def test_a_pool_that_starts_again_is_near_too(machine: Machine, cpus: list[int]) -> None:
    pool = ProcessPool(1)
    with ShardedDataLoader(dataset(), SIZE, device=machine.devices[1], pool=pool) as loader:
        read(loader, machine)
        pool.close()  # as the pipeline does after a Ctrl-C
        assert pool._transport.arena.near() == Near(frozenset({cpus[1]}), 1)


def test_devices_are_asked_once_and_not_before_there_is_a_segment(
    machine: Machine, cpus: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(placement, "cpus_near", lambda addresses: asked.append(list(addresses)) or Near())
    placed = Placement([machine.devices[1]], pin_memory=False)
    assert asked == []  # a loader that is only constructed touches no device
    assert placed.near() == placed.near() == Near()
    assert asked == [[ADDRESSES[1]]]
