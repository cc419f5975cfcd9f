"""Segments are page-locked once; where that is refused, batches still arrive. What else an accelerator is asked."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from devices_samples import copies_on, streams_on
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import accelerator
from sharded_loader.devices.accelerator import (
    LATE_NOTE,
    Registrar,
    Streams,
    capture_probe,
    clear_error,
    is_late,
    note_late,
    pinned_empty,
)
from sharded_loader.engine.pool import Pool

DATA = ArrayDataset(np.arange(256 * 1024, dtype=np.float32).reshape(256, 1024))
FAILED = RuntimeError("CUDA error: device-side assert triggered")


def on(machine: Machine, pool: Pool | None = None, **options: Any) -> ShardedDataLoader:
    """A loader of the first device."""
    return ShardedDataLoader(DATA, 32, device=machine.devices[0], **({"pool": pool} if pool else options))


def read_all(machine: Machine, loader: ShardedDataLoader) -> None:
    for number, batch in enumerate(loader):
        machine.finish()
        assert batch[:, 0].tolist() == [1024.0 * (32 * number + i) for i in range(32)]


# -- segments -------------------------------------------------------------------------------------------------


def test_a_segment_is_locked_once_and_unlocked_when_the_loader_is_closed(
    machine: Machine, process_pool: ProcessPool
) -> None:
    with on(machine, process_pool) as loader:
        for _ in range(3):
            read_all(machine, loader)
        assert machine.registered
    assert machine.registered == {}


def raising(error: Exception) -> Callable[..., Any]:
    def fail(*arguments: Any, **named: Any) -> Any:
        raise type(error)(*error.args)

    return fail


@pytest.mark.costly(3)
@pytest.mark.parametrize(
    ("code", "runtime", "message"),
    [
        *[(code, None, rf"could not be pinned .*error {code}.*ProcessPool") for code in (1, 801)],
        (0, raising(RuntimeError("no driver")), r"could not be pinned \(no driver\)"),
        # Warnings are errors. After a failed kernel the copy of the batch says what has happened.
        *[(code, None, None) for code in (700, 710, 719)],
        (0, raising(FAILED), None),
        (0, lambda streams: None, None),  # a device that locks nothing in place
    ],
)
def test_a_refusal_is_one_warning_at_most_and_batches_go_through_pinned_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, code: int, runtime: Any, message: str | None
) -> None:
    machine.refuse = code
    if runtime is not None:
        monkeypatch.setattr(SimulatedStreams, "runtime", runtime)
    expected = pytest.warns(UserWarning, match=message) if message else contextlib.nullcontext([])
    with expected as caught, on(machine, ProcessPool(2)) as loader:
        for _ in range(3):
            read_all(machine, loader)
        assert machine.registered == {}
    assert len(caught) == bool(message)
    assert "ulimit" not in str([*caught])  # NVIDIA's driver does not count pinned memory against it
    if message and code:
        assert machine.cleared == 1  # else it would come up in the next call of somebody else


def test_unlocking_waits_for_the_copies_first_and_a_later_mapping_may_lie_at_the_same_address(machine: Machine) -> None:
    calls, mapping = list[Any](), mmap.mmap(-1, 4096)
    registrar = Registrar(streams_on(machine), lambda: calls.append(len(machine.registered)))  # type: ignore[arg-type]
    for _ in range(2):
        undo = registrar.register(mapping)
        assert undo is not None and registrar.register(mapping) is undo  # who was interrupted asks again
        assert (undo(), machine.registered) == (True, {})
    assert calls == [1, 1]
    machine.refuse = 2
    with pytest.warns(UserWarning, match="could not be pinned") as caught:
        assert [registrar.register(mmap.mmap(-1, 4096)) for _ in range(2)] == [None, None]
    assert len(caught) == 1


@pytest.mark.parametrize("broken", [False, True], ids=["refused", "broken context"])
def test_unlocking_that_fails_is_cleared_and_no_error(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    monkeypatch.setattr(machine, "cudaHostUnregister", raising(FAILED) if broken else lambda address: 4)
    undo = Registrar(streams_on(machine), lambda: True).register(mmap.mmap(-1, 4096))  # type: ignore[arg-type]
    assert undo is not None and undo()
    assert machine.cleared == (not broken)


def test_at_the_programs_end_segments_are_left_to_the_driver(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    drain = raising(AssertionError("the device is waited for"))
    undo = Registrar(streams_on(machine), drain).register(mmap.mmap(-1, 4096))  # type: ignore[arg-type]
    monkeypatch.setattr(accelerator, "program_ends", lambda: True)
    assert undo is not None and undo() is False
    assert len(machine.registered) == 1


def test_where_the_runtime_cannot_be_asked_a_kernel_takes_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = mock.Mock(side_effect=RuntimeError("CUDA error: invalid argument"))
    monkeypatch.setattr(accelerator.torch, "zeros", launched)
    clear_error(object())
    launched.assert_called_once_with(1, device="cuda")


def test_closing_from_a_pool_that_never_started_is_fine(machine: Machine, pool: Pool) -> None:
    on(machine, pool).close()


def test_a_host_shard_beside_a_device_s_does_not_lie_in_locked_memory(
    machine: Machine, process_pool: ProcessPool
) -> None:
    devices = [machine.devices[0], torch.device("cpu")]
    with ShardedDataLoader(DATA, 32, devices=devices, pool=process_pool) as loader:
        for number, (_, shard) in enumerate(loader):
            assert not machine.holds(shard.data_ptr(), shard.nbytes)
            assert shard[0, 0].item() == 1024.0 * (32 * number + 16)


# -- memory that torch pins -----------------------------------------------------------------------------------


def test_threads_and_the_loop_write_into_pinned_memory(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedStreams, "pin", raising(AssertionError("a batch was copied once more")))
    for workers in (0, 2):
        with on(machine, num_workers=workers, thread_pool=workers > 0) as loader:
            read_all(machine, loader)


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
    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", raising(RuntimeError("CUDA error: out of memory")))
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


@pytest.mark.parametrize("count", [1, 2])
def test_an_error_of_another_cause_is_not_taken_for_a_lack_of_memory(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", raising(FAILED))
    with pytest.raises(RuntimeError, match="device-side assert"):
        copies_on(machine).begin([torch.ones(3)] * count).finish()


# -- what is asked of torch: stand-ins say how they were called -------------------------------------------------


@pytest.mark.parametrize(
    ("error", "late"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), False),
        (RuntimeError("CUDA error: out of memory"), False),
        (ValueError("CUDA error"), False),
        (RuntimeError("cannot pin"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), True),
    ],
    ids=repr,
)
def test_a_late_error_is_noted_once_and_a_lack_of_memory_is_none(error: Exception, late: bool) -> None:
    assert (is_late(error), note_late(error), note_late(error)) == (late, late, late)
    assert getattr(error, "__notes__", []) == [LATE_NOTE] * late


def test_an_accelerator_that_captures_nothing_or_is_not_there_has_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    for probe, found in ((lambda: False, True), (raising(RuntimeError("torch was not compiled with CUDA")), False)):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", probe)
        assert capture_probe("cuda") is (probe if found else None)
    assert capture_probe("no such kind") is None


@pytest.fixture
def cuda() -> Streams:
    return Streams(torch.device("cuda", 1))  # this asks nothing of a device


def test_a_copy_does_not_wait(cuda: Streams) -> None:
    asked = []

    class Target(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            asked.append((func.__name__, kwargs))

    cuda.copy(torch.zeros(2).as_subclass(Target), torch.ones(2))
    assert asked == [("copy_", {"non_blocking": True})]


def test_tensors_are_recorded_on_the_stream_that_uses_them(cuda: Streams) -> None:
    recorded: list[Any] = []
    devices = [cuda.device, torch.device("cpu"), cuda.device]
    tensors: Any = [SimpleNamespace(record_stream=recorded.append, device=device) for device in devices]
    cuda.record_use(tensors, "a stream")
    assert recorded == ["a stream"] * 2  # a tensor on the host has no stream


def test_pinned_memory_is_torchs_with_the_values_and_strides(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned, real = [], {name: getattr(torch, name) for name in ("empty_strided", "empty")}
    for name, make in real.items():

        def made(*arguments: Any, pin_memory: bool = False, make: Any = make, **options: Any) -> torch.Tensor:
            pinned.append(pin_memory)
            return make(*arguments, **options)

        monkeypatch.setattr(torch, name, made)
    copied = cuda.pin(torch.arange(6).reshape(2, 3), (1, 2))
    assert (copied.tolist(), copied.stride()) == ([[0, 1, 2], [3, 4, 5]], (1, 2))
    assert cuda.pinned_bytes(5).shape == (5,)
    assert pinned == [True, True]


def test_only_cuda_pins_memory_in_place(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: "the runtime")
    assert cuda.runtime() == "the runtime"
    assert Streams(torch.device("xpu", 0)).runtime() is None
