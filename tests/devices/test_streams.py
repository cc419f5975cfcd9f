"""What the library asks of an accelerator: its errors, its streams, rows gathered there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharded_loader.devices.accelerator import LATE_NOTE, Streams, capture_probe, is_late, note_late, streams_of


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_devices_without_streams(name: str) -> None:
    assert streams_of(torch.device(name)) is None


def test_no_memory_is_not_an_error_of_earlier_work() -> None:
    assert not is_late(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert not is_late(RuntimeError("CUDA error: out of memory"))
    assert not is_late(ValueError("CUDA error"))


def test_a_late_error_is_noted_once() -> None:
    error = RuntimeError("CUDA error: device-side assert triggered")
    assert note_late(error) and note_late(error)
    assert error.__notes__ == [LATE_NOTE]
    assert not note_late(RuntimeError("cannot pin"))


def test_an_accelerator_that_captures_nothing_has_no_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe() -> bool:
        return False

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", probe)
    assert capture_probe("cuda") is probe
    assert capture_probe("no such kind") is None


# -- what is asked of torch: stand-ins say how they were called -------------------------------------------------


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
    pinned, empty_strided, empty = [], torch.empty_strided, torch.empty

    def noted(make: Any) -> Any:
        def made(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            pinned.append(pin_memory)
            return make(*arguments, **options)

        return made

    monkeypatch.setattr(torch, "empty_strided", noted(empty_strided))
    monkeypatch.setattr(torch, "empty", noted(empty))
    copied = cuda.pin(torch.arange(6).reshape(2, 3), (1, 2))
    assert (copied.tolist(), copied.stride()) == ([[0, 1, 2], [3, 4, 5]], (1, 2))
    assert cuda.pinned_bytes(5).shape == (5,)
    assert pinned == [True, True]


def test_only_cuda_pins_memory_in_place(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: "the runtime")
    assert cuda.runtime() == "the runtime"
    assert Streams(torch.device("xpu", 0)).runtime() is None
