"""Splitting: Gluon's answers, dtypes kept, structures cut as one, fewer slices for fewer rows; and joining again."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sharded_loader.parallel import gather, split_and_load, split_data

GOLDEN = {c["id"]: c for c in json.loads((Path(__file__).parents[1] / "golden" / "split_data.json").read_text())}
X = np.arange(20, dtype=np.int32).reshape(10, 2)


def answer(case):
    p = case["params"]
    if case["id"] == "split_31_8":
        return [len(s) for s in split_data(torch.zeros(31), 8, even_split=False)]
    if case["id"] == "sal_uneven_err":
        return split_and_load(X, ["cpu"] * 3)
    return split_data(X, p["num_slice"], p["batch_axis"], p["even_split"])


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN.keys())
def test_answers_are_gluons(case):
    expected = case["expected"]
    if isinstance(expected, dict):
        with pytest.raises(ValueError, match="cannot be evenly split into 3 slices along axis 0"):
            answer(case)
        return
    got = answer(case)
    assert len(got) == len(expected)
    for value, e in zip(got, expected, strict=True):
        if isinstance(e, int):
            assert value == e
        else:
            assert str(value.dtype) == "torch." + e["dtype"]
            assert list(value.shape) == e["shape"] and value.flatten().tolist() == e["data"]


@given(st.integers(1, 40), st.integers(1, 9), st.integers(-2, 1))
def test_slices_put_together_are_the_batch(rows, parts, axis):
    data = torch.arange(rows * 3).reshape((rows, 3) if axis in (0, -2) else (3, rows))
    slices = split_data(data, parts, axis, even_split=False)
    assert torch.equal(torch.cat(slices, axis), data)
    loaded = split_and_load(data, ["cpu"] * parts, axis, even_split=False)
    assert len(loaded) == min(rows, parts) and torch.equal(torch.cat(loaded, axis), data)


def test_structures_are_cut_as_one():
    batch = {"x": X, "y": [torch.arange(10.0), list("abcdefghij")]}
    first, second = split_and_load(batch, ["cpu", "cpu"])
    assert first["x"].dtype == torch.int32 and first["x"].tolist() == X[:5].tolist()
    assert second["y"][0].tolist() == [5, 6, 7, 8, 9] and second["y"][1] == list("fghij")


class Copies(TorchDispatchMode):
    """Between devices: from where to where, and how many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((args[0].device.type, str(kwargs["device"]), len(args[0])))
        return func(*args, **(kwargs or {}))


@pytest.mark.last
def test_each_slice_goes_straight_to_its_device():
    meta = torch.device("meta")
    with Copies() as copies:
        slices = split_and_load(torch.ones(5, 2), ctx_list=[meta, "cpu", meta], even_split=False)
    assert copies.seen == [("cpu", "meta", 2), ("cpu", "meta", 1)]
    assert [(part.device.type, len(part)) for part in slices] == [("meta", 2), ("cpu", 2), ("meta", 1)]


@dataclasses.dataclass
class Output:
    scores: torch.Tensor
    names: list


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(10),
        X * 2.5,
        {"x": X, "y": [torch.arange(10.0), list("abcdefghij")], "none": None, "empty": ()},
        (np.array(list("abcdefghij")), torch.arange(10).to(torch.bfloat16), X % 2 == 0),
        Output(torch.arange(10), list("abcdefghij")),
    ],
    ids=["tensor", "array", "dict", "tuple", "dataclass"],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_what_was_split_is_gathered(batch, parts):
    joined = gather(split_data(batch, parts, even_split=False), "cpu")
    (whole,) = split_data(batch, 1)
    assert type(joined) is type(whole)
    assert str(joined) == str(whole)  # dtypes of all but the default, and all values


def test_numbers_and_tensors_without_axes_are_one_row_each():
    assert torch.equal(gather([0.5, 2], "cpu"), torch.tensor([0.5, 2.0]))
    assert torch.equal(gather([np.float64(0.5), np.float64(1)], "cpu"), torch.tensor([0.5, 1.0], dtype=torch.float64))
    assert torch.equal(gather([torch.tensor(3), torch.tensor([4, 5])], "cpu"), torch.tensor([3, 4, 5]))
    assert torch.equal(gather([True, False], "cpu"), torch.tensor([True, False]))


def test_gradients_flow_back_to_each_shard():
    shards = [torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)]
    (gather(shards, "cpu") * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
    assert [shard.grad.tolist() for shard in shards] == [[1.0, 2.0], 3.0]


@pytest.mark.last
def test_each_result_goes_straight_to_the_one_device():
    with Copies() as copies:
        joined = gather([torch.ones(3), torch.ones(2), torch.ones(1, device="meta")], torch.device("meta"))
    assert copies.seen == [("cpu", "meta", 3), ("cpu", "meta", 2)]
    assert (joined.device.type, len(joined)) == ("meta", 6)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: split_data(X, 0), ValueError, "num_slice"),
        (lambda: split_data(X, 2, 5), ValueError, "no axis 5"),
        (lambda: split_data(X, 2, "0"), TypeError, "batch_axis must be an integer, got '0'"),
        (lambda: split_data({"a": X, "b": X[:3]}, 1), ValueError, "different lengths"),
        (lambda: split_data(3, 1), ValueError, "no rows"),
        (lambda: split_and_load(X[:0], ["cpu"]), ValueError, "no rows"),
        (lambda: split_and_load(X), TypeError, "not told where to: give devices"),
        (lambda: split_and_load(X, ["cpu"], ctx_list=["cpu"]), TypeError, "Gluon's name for the same: give one"),
        (lambda: split_and_load(X, []), ValueError, "empty"),
        (lambda: split_and_load(X, 2), ValueError, r"int alone.*give a list such as \[0, 1\], or"),
        (lambda: split_and_load(X, "cpu"), TypeError, "devices is .cpu., and must be a list: give one such as"),
        (lambda: split_and_load(X, ["gpu0"]), ValueError, "gpu0.*sees: cpu"),
        (lambda: split_and_load(X, ["cuda:99"]), ValueError, "cuda:99.*sees: cpu"),
        (lambda: split_and_load(X, [99]), ValueError, "99.*sees: cpu"),
        (lambda: gather([], "cpu"), ValueError, "no shards to gather"),
        (
            lambda: gather([{"a": X}, {"b": X}], "cpu"),
            ValueError,
            "> and <dict of length 1> cannot be joined: .*shards",
        ),
        (lambda: gather([[X, X], [X]], "cpu"), ValueError, r"\] and \[<torch.Tensor of length 10>\] cannot be joined"),
        (lambda: gather([(X,), [X]], "cpu"), ValueError, "cannot be joined"),
        (lambda: gather([X, 3], "cpu"), ValueError, "<torch.Tensor of length 10> and 3 cannot be joined"),
        (lambda: gather([X, None], "cpu"), ValueError, "and None cannot be joined"),
        (lambda: gather([{"a": [X, object()]}] * 2, "cpu"), ValueError, "<object> and <object> .*: give tensors"),
        (lambda: gather(["a", "b"], "cpu"), ValueError, "'a' and 'a' cannot be joined"),
    ],
)
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()
