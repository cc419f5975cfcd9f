"""Segments are page-locked once and in time; where that is refused, batches still arrive."""

from __future__ import annotations

import gc
import mmap
import sys
from typing import Any

import numpy as np
import pytest
import torch
from devices_samples import copies_on, streams_on
from injection import InterruptAt
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import accelerator as pinning
from sharded_loader.devices.accelerator import Registrar, address_of, clear_error, pinned_empty
from sharded_loader.engine.pool import Pool

DATA = ArrayDataset(np.arange(256 * 1024, dtype=np.float32).reshape(256, 1024))


def on(machine: Machine, pool: Pool | None = None, **options: Any) -> ShardedDataLoader:
    """A loader of the first device."""
    return ShardedDataLoader(DATA, 32, device=machine.devices[0], **({"pool": pool} if pool else options))


def registered(machine: Machine, drain: Any = lambda: True) -> tuple[Registrar, mmap.mmap]:
    return Registrar(streams_on(machine), drain), mmap.mmap(-1, 4096)  # type: ignore[arg-type]


def read_all(machine: Machine, loader: ShardedDataLoader) -> None:
    for number, batch in enumerate(loader):
        machine.finish()
        assert batch[:, 0].tolist() == [1024.0 * (32 * number + i) for i in range(32)]


def test_a_segment_is_locked_once_and_unlocked_when_the_loader_is_closed(
    machine: Machine, process_pool: ProcessPool
) -> None:
    with on(machine, process_pool) as loader:
        for _ in range(3):
            read_all(machine, loader)
        assert machine.registered
    assert machine.registered == {}


@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_memory_is_unlocked_only_when_no_copy_reads_it(machine: Machine, process_pool: ProcessPool, how: str) -> None:
    loader = on(machine, process_pool)
    batches = iter(loader)
    held = [next(batches) for _ in range(5)]
    assert machine.registered
    if how == "closed":  # in the middle of copies
        loader.close()
    else:
        del batches, loader
        gc.collect()
    assert (machine.registered, machine.faults) == ({}, [])
    machine.finish()
    assert [batch[0, 0].item() for batch in held] == [1024.0 * 32 * number for number in range(5)]


@pytest.mark.parametrize("code", [1, 2, 712, 801])
@pytest.mark.costly
def test_a_refusal_is_one_warning_and_batches_go_through_pinned_memory(machine: Machine, code: int) -> None:
    machine.refuse = code
    pool = ProcessPool(2)
    with (
        pytest.warns(UserWarning, match=rf"could not be pinned .*error {code}.*ProcessPool") as caught,
        on(machine, pool) as loader,
    ):
        for _ in range(3):
            read_all(machine, loader)
    assert len(caught) == 1
    assert "ulimit" not in str(caught[0].message)  # NVIDIA's driver does not count pinned memory against it
    assert machine.cleared == 1  # else it would come up in the next call of somebody else


@pytest.mark.costly(2)
@pytest.mark.parametrize("code", [700, 710, 719])
def test_after_a_failed_kernel_no_limit_is_blamed(machine: Machine, code: int) -> None:
    """The copy of the batch says what has happened. Warnings are errors here."""
    machine.refuse = code
    with on(machine, ProcessPool(1)) as loader:
        read_all(machine, loader)
        assert machine.registered == {}


def test_a_runtime_that_cannot_be_had_is_the_same(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def runtime(self: SimulatedStreams) -> Any:
        raise RuntimeError("no driver")

    monkeypatch.setattr(SimulatedStreams, "runtime", runtime)
    with (
        pytest.warns(UserWarning, match=r"could not be pinned \(no driver\)"),
        on(machine, ProcessPool(2)) as loader,
    ):
        read_all(machine, loader)


def test_devices_that_lock_nothing_in_place_are_no_reason_to_warn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SimulatedStreams, "runtime", lambda self: None)
    with on(machine, ProcessPool(2)) as loader:  # warnings are errors
        read_all(machine, loader)


def test_threads_and_the_loop_write_into_pinned_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(self: SimulatedStreams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        raise AssertionError("a batch was copied once more")

    monkeypatch.setattr(SimulatedStreams, "pin", pin)
    for workers in (0, 2):
        options: dict[str, Any] = {"num_workers": workers, "thread_pool": workers > 0}
        with on(machine, **options) as loader:
            read_all(machine, loader)


def test_a_host_shard_beside_a_device_s_does_not_lie_in_locked_memory(
    machine: Machine, process_pool: ProcessPool
) -> None:
    devices = [machine.devices[0], torch.device("cpu")]
    with ShardedDataLoader(DATA, 32, devices=devices, pool=process_pool) as loader:
        for number, (_, shard) in enumerate(loader):
            assert not machine.holds(shard.data_ptr(), shard.nbytes)
            assert shard[0, 0].item() == 1024.0 * (32 * number + 16)


@pytest.mark.parametrize("dtype", ["f4", "u1", "M8[ns]", "U5", "?"])
def test_pinned_memory_takes_every_dtype_and_leaves_objects_to_numpy(machine: Machine, dtype: str) -> None:
    streams: Any = streams_on(machine)
    array = pinned_empty(streams, (3, 2), np.dtype(dtype))
    assert (array.shape, array.dtype) == ((3, 2), np.dtype(dtype))
    assert array.__array_interface__["data"][0] in machine.pinned
    assert pinned_empty(streams, (2,), np.dtype(object)).tolist() == [None, None]
    assert pinned_empty(streams, (0, 4), np.dtype(dtype)).shape == (0, 4)


@pytest.mark.filterwarnings("default")
def test_where_torch_can_pin_no_more_batches_lie_in_plain_memory(
    machine: Machine, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(streams: SimulatedStreams, nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", full)
    monkeypatch.setattr(machine, "refuse", 2)  # shared memory is not pinned either
    found: list[list[float]] = []
    with pytest.warns(UserWarning) as caught:
        with ShardedDataLoader(np.arange(3000.0).reshape(30, 100), 5, device=machine.devices[0], pool=pool) as loader:
            for batch in loader:
                machine.kernel(machine.devices[0], batch, lambda values: found.append(values[:, 0].tolist()))
                del batch
            machine.finish()
    assert found == [[100.0 * (first + row) for row in range(5)] for first in range(0, 30, 5)]
    assert sum("batches could not be pinned" in str(warning.message) for warning in caught) == 1
    assert {fault.split(":")[0] for fault in machine.faults} == {"a copy from memory that is not pinned"}
    machine.faults.clear()


@pytest.mark.parametrize("small", [False, True], ids=["one tensor", "several small ones"])
def test_an_error_of_another_cause_is_not_taken_for_a_lack_of_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, small: bool
) -> None:
    def broken(streams: SimulatedStreams, nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", broken)
    with pytest.raises(RuntimeError, match="device-side assert"):
        copies_on(machine).begin([torch.ones(3), torch.ones(3)] if small else torch.ones(3))


def test_a_mapping_can_be_closed_after_its_address_was_taken() -> None:
    mapping = mmap.mmap(-1, 8192)
    address, nbytes = address_of(mapping)
    assert (address % mmap.PAGESIZE, nbytes) == (0, 8192)
    mapping.close()


def test_where_the_runtime_cannot_be_asked_a_kernel_takes_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*size: int, device: str) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: invalid argument")

    launched: list[str] = []
    monkeypatch.setattr(pinning.torch, "zeros", zeros)
    clear_error(object())
    assert launched == ["cuda"]


def test_unlocking_that_fails_is_cleared_too_and_comes_after_the_wait(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(machine, "cudaHostRegister", lambda *arguments: calls.append(arguments[1:]) or 0)
    monkeypatch.setattr(machine, "cudaHostUnregister", lambda address: calls.append("unregister") or 4)
    registrar, mapping = registered(machine, lambda: calls.append("drain"))
    undo = registrar.register(mapping)
    assert undo is not None
    undo()
    assert (calls, machine.cleared) == ([(4096, 1), "drain", "unregister"], 1)


def test_unlocking_in_a_broken_context_is_no_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(machine: Machine, address: int) -> int:
        raise RuntimeError("CUDA error: device-side assert triggered")

    registrar, mapping = registered(machine)
    undo = registrar.register(mapping)
    monkeypatch.setattr(Machine, "cudaHostUnregister", broken)
    assert undo is not None and undo()


def test_closing_from_a_pool_that_never_started_is_fine(machine: Machine, pool: Pool) -> None:
    on(machine, pool).close()


def test_a_segment_that_was_unlocked_can_be_locked_again(machine: Machine) -> None:
    """A later mapping may lie at the same address."""
    registrar, mapping = registered(machine)
    for _ in range(2):
        undo = registrar.register(mapping)
        assert undo is not None and len(machine.registered) == 1
        assert undo()


def test_who_is_interrupted_while_a_segment_is_locked_gets_the_same_undo(machine: Machine) -> None:
    line, fired, before = 0, True, sys.gettrace()
    while fired:
        line += 1
        registrar, mapping = registered(machine)
        tracer = InterruptAt(line, ("accelerator.py",))
        try:
            sys.settrace(tracer)
            registrar.register(mapping)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        fired = tracer.fired
        undo = registrar.register(mapping)
        assert undo is not None and undo()
        assert (machine.registered, machine.faults) == ({}, [])
    assert line > 5


def test_at_the_programs_end_segments_are_left_to_the_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def drain() -> bool:
        raise AssertionError("the device is waited for")

    registrar, mapping = registered(machine, drain)
    undo = registrar.register(mapping)
    monkeypatch.setattr(pinning, "program_ends", lambda: True)
    assert undo is not None and undo() is False
    assert len(machine.registered) == 1
