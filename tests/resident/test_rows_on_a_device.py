"""What `resident` asks of a device: rows that are copied there, gathered and put; how much memory it has."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sharded_loader.devices.accelerator import Streams
from sharded_loader.resident import load_rows, memory_of, put_rows, take_rows


def test_rows_of_columns_in_another_layout_are_gathered() -> None:
    column = torch.arange(12.0).reshape(3, 4).T
    taken = take_rows(column, torch.tensor([3, 1]))
    assert taken.tolist() == [[3.0, 7.0, 11.0], [1.0, 5.0, 9.0]]


@pytest.fixture
def cuda() -> Streams:
    return Streams(torch.device("cuda", 1))  # this asks nothing of a device


def test_what_is_loaded_is_there_before_anybody_uses_it(cuda: Streams) -> None:
    log: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: log.append("waited"))
    cuda.caller_stream = lambda: SimpleNamespace(record_event=lambda: log.append("recorded") or event)
    target: Any = SimpleNamespace(copy_=lambda host: log.append(("copied", host)))
    host: Any = "rows"
    load_rows(cuda, target, host)
    assert log == [("copied", "rows"), "recorded", "waited"]


WORDS = ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 0), (6, 2, 2)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_rows_of_every_dtype_are_taken_and_put(name: str, shape: tuple[int, ...]) -> None:
    column = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, name))
    taken = take_rows(column, torch.tensor([5, 0, 0]))
    assert (taken.dtype, taken.tolist()) == (column.dtype, [column.tolist()[row] for row in (5, 0, 0)])
    put_rows(column, torch.tensor([1, 4, 3]), taken)
    assert [column.tolist()[row] for row in (1, 4, 3)] == taken.tolist()
    assert column.tolist()[2] == torch.arange(1, math.prod(shape) + 1).reshape(shape).to(column.dtype).tolist()[2]


def test_the_memory_that_torch_has_cached_can_be_used(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**functions: Any) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))

    asked: dict[str, Any] = {"memory_reserved": lambda device: 30, "memory_allocated": lambda device: 20}
    answer(mem_get_info=lambda device: (100, 200), **asked)
    assert memory_of(cuda) == (110, 200)
    answer(**asked)
    assert memory_of(cuda) is None
