"""Digests of data, which are the same everywhere: exact ones, and of parts of large values."""

from __future__ import annotations

import datetime
import decimal
import enum
import io
import os
import subprocess
import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path, PureWindowsPath
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader.data.inspection import exact, sampled

Image = pytest.importorskip("PIL.Image")  # Pillow is optional

Pair = namedtuple("Pair", "x y")


@dataclass
class Boxes:
    corners: Any
    label: int


class Scan:
    """An object of the user's, which refers to itself."""

    def __init__(self, values: Any) -> None:
        self.values, self.self = values, self


class Color(enum.Enum):
    RED, BLUE = 1, 2


# Each row: a sample, an equal one made otherwise, another one.
ROWS: dict[str, tuple[Any, Any, Any]] = {
    "float": (1.5, 1.5, 1.25),
    "integer and float": (1, 1, 1.0),
    "integer and truth": (1, 1, True),
    "nothing": (None, None, 0),
    "text": ("a / b", "a / b", "x / b"),
    "bytes": (b"ab", b"ab", "ab"),
    "array": (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6).reshape(2, 3)), np.arange(6)),
    "byte order": (np.arange(3), np.arange(3).astype(">i8"), np.arange(3).astype(np.int32)),
    "strides": (np.arange(10)[::2], np.array([0, 2, 4, 6, 8]), np.arange(10)[1::2]),
    "scalar": (np.float32(1.5), np.float32(1.5), np.float32(2.5)),
    "objects": (np.array(["a", None], object), np.array(["a", None], object), np.array(["b", None], object)),
    "fields": (np.array([(1, 2.0)], "i4,f8"), np.array([(1, 2.0)], "i4,f8"), np.array([(2, 2.0)], "i4,f8")),
    "time": (np.datetime64("2020-01-01"), np.datetime64("2020-01-01"), np.datetime64("2020-01-02")),
    "tensor": (torch.arange(4), torch.arange(8)[:4].clone(), torch.arange(4) + 1),
    "bfloat16": (torch.ones(2, dtype=torch.bfloat16), torch.ones(2).bfloat16(), torch.zeros(2).bfloat16()),
    "conjugated": (torch.tensor([1 - 2j]), torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])),
    "sparse": (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), torch.zeros(2, 2).to_sparse()),
    "needs gradients": (torch.ones(2, requires_grad=True), torch.ones(2), torch.zeros(2)),
    "dict": ({"a": 1, "b": [2]}, {"b": [2], "a": 1}, {"a": [2], "b": 1}),
    "ordered": (OrderedDict(a=1), {"a": 1}, {"a": 2}),
    "set": ({"x", "y", "z"}, {"z", "y", "x"}, {"x", "y"}),
    "nested": ([[1], [2, 3]], ([1], [2, 3]), [[1, 2], [3]]),
    "empty": ([], (), {}),
    "named": (Pair(1, 2), Pair(1, 2), Pair(2, 1)),
    "dataclass": (Boxes(np.arange(2000), 1), Boxes(np.arange(2000), 1), Boxes(np.arange(2000) + 1, 1)),
    "object": (Scan(np.arange(2000)), Scan(np.arange(2000)), Scan(np.arange(2000) + 1)),
    "name": (Color.RED, Color.RED, Color.BLUE),
    "day": (datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 1), datetime.datetime(2020, 1, 2)),
    "decimal": (decimal.Decimal("1.5"), decimal.Decimal("1.5"), decimal.Decimal("1.6")),
    "picture": (Image.new("L", (3, 4), 5), Image.new("L", (3, 4), 5), Image.new("L", (4, 3), 5)),
    "moved folder": ("/data/x/1.jpg", "/mnt/1.jpg", "/mnt/2.jpg"),
    "path": (Path("/data/1.jpg"), PureWindowsPath("C:\\data\\1.jpg"), Path("/data/2.jpg")),
    "has no value": (object(), object(), lambda: 1),
}


@pytest.mark.parametrize("row", ROWS)
def test_equal_samples_have_equal_digests_and_others_have_others(row: str) -> None:
    one, same, other = map(exact, ROWS[row])
    assert one == same != other
    assert len(one) == 16


def test_the_digests_are_the_same_in_every_process() -> None:
    sample = "{'x': np.arange(3), 'y': (1.5, {'b', 'a'}, np.float32(2)), 'z': '/a/b.png'}"
    program = f"import numpy as np; from sharded_loader.data.inspection import exact; print(exact({sample}))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["864762ac51cff9f1"]


SAMPLES: list[Any] = [
    *(1, 2, True, 1.5, None, "a", b"a", 1j, [1], [], {"a": 1}, {"b": 1}, {"a": "b"}, [*range(40)], [*range(41)]),
    *(np.arange(3), np.arange(3, dtype=np.int32), np.arange(4), np.zeros((2, 0)), np.float32(1)),
    *(torch.arange(4, dtype=torch.int32), torch.arange(5.0), io.StringIO(), ValueError()),
    *([np.arange(2), {"x": torch.zeros(2)}], [np.arange(2), {"x": torch.ones(2)}]),
]


def test_samples_that_differ_have_other_digests_of_parts_and_equal_ones_the_same() -> None:
    found = [sampled(sample) for sample in SAMPLES]
    assert len(set(found)) == len(found)
    assert found == [sampled(sample) for sample in SAMPLES]


def test_what_cannot_be_looked_into_counts_by_its_class() -> None:
    assert sampled(torch.ones(3, device="meta")) == sampled(torch.ones(2, device="meta"))
    assert sampled(io.StringIO("a")) == sampled(io.StringIO("b"))
    assert sampled("\ud800") != sampled("a")


@pytest.mark.parametrize("kind", [np.asarray, torch.from_numpy])
def test_of_large_samples_parts_count(kind: Any) -> None:
    large = np.zeros((1 << 12, 1 << 12), np.uint8)
    before = sampled(kind(large))
    large[1000, 1] = 1
    assert sampled(kind(large)) == before != sampled(kind(large[:, :-1]))
    large[-1, -4] = 1
    assert sampled(kind(large)) != before
    long = np.zeros(1 << 17, np.uint8)
    before = sampled(kind(long))
    long[900] = 1
    assert sampled(kind(long)) != before
    assert sampled(kind(large)[:, ::2]) == sampled(kind(large[:, ::2].copy()))
