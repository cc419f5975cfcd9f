"""A sample that was made flat comes back as it was; what cannot come back is an error that names the field."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.caching.flat import batched, fits_columns, flat, text_of, unflatten

Point = namedtuple("Point", "x y")


def there_and_back(sample: Any) -> Any:
    node, leaves = flat(sample)
    rest = iter(leaves)
    found = unflatten(json.loads(text_of(node)), lambda dtype, shape: np.array(next(rest), dtype).reshape(shape))
    assert next(rest, None) is None
    return found


def same(a: Any, b: Any) -> bool:
    """Equal types, values, dtypes and shapes."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())
    if isinstance(a, np.ndarray | np.generic):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


SAMPLES: dict[str, Any] = {
    "array": np.arange(6, dtype=np.float32).reshape(2, 3),
    "array of another order": np.arange(6).reshape(2, 3).T.copy("F"),
    "array without dimensions": np.array(3.5),
    "empty array": np.zeros((0, 3), np.int16),
    "big-endian array": np.arange(3, dtype=">i4"),
    "array of texts": np.array(["a", "bcd"]),
    "array of dates": np.array(["2020-01-01"], "M8[D]"),
    "array of long doubles": np.arange(2, dtype=np.longdouble),
    "view": np.arange(100)[10:20:3],
    "NumPy numbers": [np.float32(1.5), np.bool_(True), np.datetime64("2020-01-01")],
    "tensor": torch.arange(6).reshape(2, 3).T,
    "bfloat16": torch.ones(2, 3, dtype=torch.bfloat16),
    "number tensor": torch.tensor(2.5, dtype=torch.bfloat16),
    "empty tensor": torch.zeros(0, 2),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "numbers": (1, -1.5, float("nan"), float("-inf"), -0.0, True, 1 + 2j, 2**70, -(2**63)),
    "many numbers": [list(range(50)), tuple([0.5] * 9), [True] * 8, [1, 2.5] * 8, [2**70] * 9],
    "texts": ["", "é\udc80\x00", "a" * 1000, b"", b"\x00\xff", None],
    "dict": {"a": {"b": [1, (2,)]}, 3: None, None: [], True: {}},
    "nothing": (),
}


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_a_sample_comes_back_with_its_types_and_values(sample: Any) -> None:
    found = there_and_back(sample)
    assert same(found, there_and_back(found))
    assert same(found, sample)
    node = flat(sample)[0]
    assert node == json.loads(text_of(node))


def test_keys_that_are_equal_and_differ_are_told_apart() -> None:
    assert flat({1: 2})[0] != flat({True: 2})[0] and flat({"1": 2})[0] != flat({1: 2})[0]


REFUSED: dict[str, tuple[Any, str]] = {
    "object": ({"a": [0, object()]}, r"field \['a'\]\[1\] of the sample is an object"),
    "objects in an array": ((1, np.array([None])), r"field \[1\] of the sample is an? ndarray \(object\)"),
    "structured array": (np.zeros(1, "i4,f4"), r"the sample is an? ndarray \(\[\('f0', '<i4'\)"),
    "text that ends with a zero": (np.bytes_(b"ab\0"), "the sample is a bytes_"),
    "masked array": (np.ma.array([1], mask=[True]), "the sample is a MaskedArray"),
    "namedtuple": ([Point(1, 2)], r"field \[0\] of the sample is a Point"),
    "subclass": (OrderedDict(a=1), "the sample is an OrderedDict"),
    "set": ({1}, "the sample is a set"),
    "key": ({"a": {(1, 2): 3}}, r"field \['a'\] of the sample is a dict with a tuple as a key"),
    "parameter": (torch.nn.Parameter(torch.zeros(1)), "the sample is a Parameter"),
    "requires grad": (
        {"x": torch.zeros(2, requires_grad=True)},
        r"field \['x'\] of the sample is a Tensor that requires grad \(call .detach\(\)\)",
    ),
    "sparse": (torch.eye(2).to_sparse(), r"the sample is a Tensor \(torch.float32, torch.sparse_coo, cpu\)"),
    "without values": (torch.zeros(2, device="meta"), r"the sample is a Tensor \(torch.float32, torch.strided, meta\)"),
    "class": (int, "the sample is a type"),
}


@pytest.mark.parametrize(("sample", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_stored_is_named(sample: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text + ".*cannot store.*make it an array"):
        flat(sample)


COLUMNS: dict[str, list[Any]] = {
    "arrays": [np.full((2, 3), i, np.uint8) for i in range(3)],
    "numbers": [(i, i / 2, bool(i), 1j * i, np.float32(i), np.int8(i)) for i in range(3)],
    "tensors": [{"x": torch.full((2,), i), "y": (i, "same")} for i in range(3)],
    "without dimensions": [(np.array(i), torch.tensor(i)) for i in range(3)],
    "big-endian": [np.full(2, i, ">f4") for i in range(3)],
}


@pytest.mark.parametrize("samples", COLUMNS.values(), ids=COLUMNS)
def test_columns_become_the_batch_of_the_samples(samples: list[Any]) -> None:
    nodes, leaves = zip(*map(flat, samples), strict=True)
    node = nodes[0]
    assert all(one == node for one in nodes) and fits_columns(node)
    columns = [np.array(column) for column in zip(*leaves, strict=True)]
    columns = [column.astype(column.dtype.newbyteorder("=")) for column in columns]
    batch = batched(node, iter(columns), len(samples))
    assert same(batch, default_batchify_fn.assemble(samples, np.empty))


@pytest.mark.parametrize(
    "sample", [[1, 2], [0.5] * 9, None, b"a", np.array(["a"]), {}, (), torch.ones(1, dtype=torch.bfloat16)]
)
def test_what_is_batched_otherwise_is_read_one_by_one(sample: Any) -> None:
    assert not fits_columns(flat(sample)[0])
