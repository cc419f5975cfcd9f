"""What the library asks of an accelerator: its errors, its streams, rows gathered there."""

from __future__ import annotations

import math

import pytest
import torch

from sharded_loader.devices.streams import LATE_NOTE, Streams, capture_probe, is_late, note_late, streams_of


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
