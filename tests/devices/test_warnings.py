"""What a user of devices is told: whose error it was, whose GPU it is, what cannot be done."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from devices_samples import place_now
from simulated import Machine, SimulatedStreams, Stream

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader, SimpleDataset
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.devices import accelerator, placement
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool

DATA = ArrayDataset(np.arange(64))
WHOLE = [list(range(i, i + 4)) for i in range(0, 64, 4)]


def notes(error: BaseException) -> str:
    return "\n".join(notes_of(error))


# -- errors of earlier work -----------------------------------------------------------------------------------

LATE = [RuntimeError("CUDA error: device-side assert triggered"), RuntimeError("HIP error: invalid device function")]
if hasattr(torch, "AcceleratorError"):
    LATE.append(torch.AcceleratorError("an illegal memory access was encountered"))


@pytest.mark.costly(2)
@pytest.mark.parametrize("error", LATE, ids=repr)
@pytest.mark.parametrize("where", ["copy", "wait"])
def test_an_error_of_an_earlier_kernel_is_not_blamed_on_the_batch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, error: RuntimeError, where: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=pool) as loader:
        batches = iter(loader)
        next(batches)
        machine.finish()
        with monkeypatch.context() as patch:
            patch.setattr(*{"copy": (SimulatedStreams, "copy"), "wait": (Stream, "wait_event")}[where], fail)
            # What was begun before is handed out still.
            with pytest.raises(type(error)) as caught:
                for _ in range(4):
                    next(batches)
    text = notes(caught.value)
    assert "the cause may be an earlier kernel" in text
    assert text.count("CUDA_LAUNCH_BLOCKING=1") == 1
    assert "raised while the batch was copied" not in text
    assert "loader.read(" not in text  # no sample is the cause
    assert "epoch 0, batch" in text  # when it was noticed


@pytest.mark.parametrize("pool", ["inline", "thread"], indirect=True)
def test_an_error_that_comes_up_when_memory_is_pinned_is_not_blamed_on_the_batch_either(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    def fail(*arguments: Any) -> None:
        raise LATE[0]

    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", fail)
    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=pool) as loader:
        with pytest.raises(RuntimeError, match="CUDA error") as caught:
            next(iter(loader))
    assert "the cause may be an earlier kernel" in notes(caught.value)
    assert "loader.read(" not in notes(caught.value)


def test_a_batch_that_cannot_be_made_a_tensor_is_no_error_of_the_device(machine: Machine) -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(BatchifyError, match="masked") as caught:
        place_now(Placer([machine.devices[0]], pin_memory=False), [masked])
    assert notes(caught.value) == ""


# -- graph captures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_next_inside_a_graph_capture_is_rejected_and_loses_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, resident: bool
) -> None:
    monkeypatch.setattr(accelerator, "capture_probe", {"privateuseone": lambda: capturing}.get)
    with ShardedDataLoader(DATA, 4, device=Placement(machine.devices[0], resident=resident), pool=pool) as loader:
        capturing, batches = False, iter(loader)
        seen = [next(batches)]
        capturing, before = True, list(machine.log)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"graph is being captured.*static\.copy_\(next\(batches\)\)"):
                next(batches)
        with pytest.raises(RuntimeError, match="graph is being captured"):
            loader.peek()
        assert machine.log == before  # nothing has been done that could break the capture
        capturing = False
        seen += batches
        machine.finish()
    assert [batch.tolist() for batch in seen] == WHOLE


def test_threads_read_on_beside_a_capture_and_touch_no_stream(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a capture with ``capture_error_mode="thread_local"`` allows: only the thread that captures is held to it."""
    gate, pins, pin = threading.Event(), threading.Semaphore(0), machine.pin

    def gated(index: int) -> int:
        assert index < 8 or gate.wait(60)
        return index

    def watched(nbytes: int) -> torch.Tensor:
        if gate.is_set():
            pins.release()
        return pin(nbytes)

    capturing: int | None = None
    monkeypatch.setattr(machine, "pin", watched)
    monkeypatch.setattr(accelerator, "capture_probe", lambda kind: lambda: threading.get_ident() == capturing)
    data, device = SimpleDataset(range(64)).transform(gated), machine.devices[0]
    with ShardedDataLoader(data, 4, device=device, num_workers=2, thread_pool=True) as loader:
        batches = iter(loader)
        seen = [next(batches)]
        capturing, before = threading.get_ident(), list(machine.log)
        gate.set()
        assert pins.acquire(timeout=60) and pins.acquire(timeout=60)  # threads make two batches meanwhile
        with pytest.raises(RuntimeError, match="graph is being captured"):
            next(batches)
        assert machine.log == before
        capturing = None
        seen += batches
        machine.finish()
    assert [batch.tolist() for batch in seen] == WHOLE


def test_pinning_inside_a_capture_is_rejected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(accelerator, "capture_probe", {"cuda": lambda: True}.get)
    batches = iter(ShardedDataLoader(DATA, 4, pin_memory=True))
    with pytest.raises(RuntimeError, match="graph is being captured"):
        next(batches)


def test_a_torch_without_the_accelerator_captures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> bool:
        raise RuntimeError("torch was not compiled with CUDA")

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", probe)
    placed = Placer(None, pin_memory=True)
    placed.check_not_capturing()
    assert placed.capture_probes == []


def test_batches_in_host_memory_may_be_read_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "capture_probe", lambda kind: lambda: True)
    assert next(iter(ShardedDataLoader(DATA, 4))).tolist() == [0, 1, 2, 3]


# -- one process per GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_a_loader_warns_once(machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, resident: bool) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device, first = torch.device("privateuseone"), machine.devices[0]
    monkeypatch.setattr(placement, "indexed", lambda device: first)
    with (
        pytest.warns(UserWarning, match="several processes would share privateuseone:0") as caught,
        ShardedDataLoader(DATA, 4, device=Placement(device, resident=resident), pool=pool) as loader,
    ):
        for _ in range(2):
            list(loader)
    assert len(caught) == 1


# -- a Mac ----------------------------------------------------------------------------------------------------


def test_pin_memory_on_a_mac_is_one_warning_and_has_no_effect(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    def pin(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mps has no pinned memory")

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("mps", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with (
        pytest.warns(UserWarning, match="pin_memory=True has no effect.*mps") as caught,
        ShardedDataLoader(DATA, 4, pin_memory=True, pool=pool) as loader,
    ):
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert len(caught) == 1


def test_pin_memory_beside_a_device_warns_of_no_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("mps", 0)])
    Placer([torch.device("cpu")], pin_memory=True)  # warnings are errors
