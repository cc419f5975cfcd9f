"""What the library asks of an accelerator: its errors, its streams, rows gathered there."""

from __future__ import annotations

import math
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


DTYPES = ["float32", "float64", "bool", "complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn"]


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(12,), (12, 3)])
def test_rows_of_every_dtype_are_gathered(name: str, shape: tuple[int, ...]) -> None:
    """On the CPU, which has no kernels for some of them either."""
    dtype: torch.dtype = getattr(torch, name)
    column = (torch.arange(36)[: math.prod(shape)] % 7).reshape(shape).to(dtype)
    taken = Streams.take(None, column, torch.tensor([11, 0, 3]))  # type: ignore[arg-type]
    assert taken.dtype == dtype
    assert taken.tolist() == [column.tolist()[row] for row in (11, 0, 3)]


def test_rows_of_columns_in_another_layout_are_gathered() -> None:
    column = torch.arange(12.0).reshape(3, 4).T
    taken = Streams.take(None, column, torch.tensor([3, 1]))  # type: ignore[arg-type]
    assert taken.tolist() == [[3.0, 7.0, 11.0], [1.0, 5.0, 9.0]]


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
    cuda.used_on(tensors, "a stream")
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


def test_what_is_loaded_is_there_before_anybody_uses_it(cuda: Streams) -> None:
    log: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: log.append("waited"))
    cuda.caller_stream = lambda: SimpleNamespace(record_event=lambda: log.append("recorded") or event)
    target: Any = SimpleNamespace(copy_=lambda host: log.append(("copied", host)))
    host: Any = "rows"
    cuda.load(target, host)
    assert log == [("copied", "rows"), "recorded", "waited"]


WORDS = ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2", "float32", "complex64", "complex128"]


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 0), (6, 2, 2)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_rows_of_every_dtype_are_taken_and_put(cuda: Streams, name: str, shape: tuple[int, ...]) -> None:
    column = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, name))
    taken = cuda.take(column, torch.tensor([5, 0, 0]))
    assert (taken.dtype, taken.tolist()) == (column.dtype, [column.tolist()[row] for row in (5, 0, 0)])
    cuda.put(column, torch.tensor([1, 4, 3]), taken)
    assert [column.tolist()[row] for row in (1, 4, 3)] == taken.tolist()
    assert column.tolist()[2] == torch.arange(1, math.prod(shape) + 1).reshape(shape).to(column.dtype).tolist()[2]


def test_the_memory_that_torch_has_cached_can_be_used(cuda: Streams) -> None:
    asked: dict[str, Any] = {"memory_reserved": lambda device: 30, "memory_allocated": lambda device: 20}
    cuda._module = SimpleNamespace(mem_get_info=lambda device: (100, 200), **asked)
    assert cuda.memory() == (110, 200)
    cuda._module = SimpleNamespace(**asked)
    assert cuda.memory() is None


def test_only_cuda_pins_memory_in_place(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: "the runtime")
    assert cuda.runtime() == "the runtime"
    assert Streams(torch.device("xpu", 0)).runtime() is None
