"""What a loader knows of its data: digests of samples, which are the same everywhere."""

from __future__ import annotations

import datetime
import decimal
import enum
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

from sharded_loader.data.known import digest_of

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
    one, same, other = map(digest_of, ROWS[row])
    assert one == same != other
    assert len(one) == 16


def test_the_digests_are_the_same_in_every_process() -> None:
    sample = "{'x': np.arange(3), 'y': (1.5, {'b', 'a'}, np.float32(2)), 'z': '/a/b.png'}"
    program = f"import numpy as np; from sharded_loader.data.known import digest_of; print(digest_of({sample}))"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["864762ac51cff9f1"]
