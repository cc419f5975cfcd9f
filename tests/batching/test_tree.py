"""Structures keep their shape, types and sharing; arrays become tensors without a copy where torch allows it."""

import dataclasses
import gc
import warnings
import weakref
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from calls import calls_of
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader.batching.tree import children, map_leaves, rebuild, to_torch

Pair = namedtuple("Pair", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
    y: int = dataclasses.field(init=False)


class Lazy(Mapping):
    """Makes its values on access."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter("ab")

    def __getitem__(self, key):
        return [key]


def plus_one(leaf):
    return leaf + 1


TREES = st.recursive(
    st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
        | st.builds(Pair, inner, inner)
    ),
    max_leaves=12,
)


@given(TREES)
def test_mapping_back_and_forth_changes_nothing(tree):
    there = map_leaves(str, tree)
    assert map_leaves(int, there) == tree
    assert type(there) is (type(tree) if not isinstance(tree, int) else str)


def test_containers_keep_their_types_and_attributes():
    assert type(map_leaves(plus_one, OrderedDict(a=1))) is OrderedDict
    mapped = map_leaves(plus_one, defaultdict(list, a=1))
    assert mapped["a"] == 2 and mapped["missing"] == []
    assert map_leaves(plus_one, UserDict(a=1)) == UserDict(a=2)
    assert map_leaves(plus_one, Pair(1, [2])) == Pair(2, [3])
    size = torch.Size([1, 2])
    assert map_leaves(lambda leaf: leaf, size) is size
    value = Frozen(1)  # with a field that is not in __init__, and is not set
    assert not hasattr(map_leaves(plus_one, value), "y")
    object.__setattr__(value, "y", 5)
    mapped = map_leaves(plus_one, value)
    assert (mapped.x, mapped.y) == (2, 6) and (value.x, value.y) == (1, 5)
    tagged = type("Tagged", (list,), {})([1, 2])
    tagged.tag = "x"
    again = map_leaves(plus_one, tagged)
    assert type(again) is type(tagged) and again == [2, 3] and again.tag == "x" and tagged == [1, 2]
    assert map_leaves(str.upper, Lazy()) == {"a": ["A"], "b": ["B"]}  # it is read once


def test_arrays_share_their_memory_and_their_place_and_what_torch_lacks_stays():
    array = np.zeros(3, np.float32)
    first, second = to_torch([array, {"again": array}])
    assert second["again"] is first
    first[0] = 7
    assert array[0] == 7
    inner = [np.zeros(1)]
    a, b = to_torch([inner, inner])
    assert a is b
    for array in (np.array(["a"]), np.array([None]), np.array(["2020-01-01"], "M8[D]")):
        assert to_torch(array) is array
    tree = {"name": "x", "t": torch.ones(1), "o": object()}
    assert to_torch(tree) is tree and to_torch(np.float32(2)).dtype == torch.float32
    for dtype in "?bhiqBHIQefdFD":
        assert str(to_torch(np.zeros(2, dtype)).dtype) == f"torch.{np.dtype(dtype).name}"


@pytest.mark.parametrize(
    "array",
    [
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(4)[::-1],
        np.arange(3, dtype=">i4"),
        np.frombuffer(b"\0" * 9, np.uint8)[1:].view(np.int64),
        np.zeros(3, [("a", "i1"), ("b", "i8")])["b"],
        np.zeros((0, 3)),
        np.array(4),
    ],
    ids=["read-only", "negative stride", "big-endian", "unaligned", "odd stride", "empty", "0-d"],
)
def test_awkward_arrays_become_tensors_without_a_warning(array):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = to_torch(array)
    assert tensor.shape == array.shape
    assert np.array_equal(tensor.numpy(), array)
    tensor.add_(1)  # writable


def test_empty_arrays_lie_in_host_memory_and_what_has_no_parts_is_a_leaf():
    torch.set_default_device("meta")
    try:
        tensors = to_torch([np.empty((0, 3)), np.zeros((2, 0), np.int64)])
    finally:
        torch.set_default_device(None)
    assert [(one.device.type, tuple(one.shape)) for one in tensors] == [("cpu", (0, 3)), ("cpu", (2, 0))]
    for leaf in ("ab", b"ab", 3, None, np.zeros(2), {1, 2}, Frozen):
        assert children(leaf) is None
    assert children(Frozen(1)) == [1] and children([]) == []


@pytest.mark.parametrize("tree", [[1, 2], (1, 2), Pair(1, 2), OrderedDict(b=1, a=2), UserDict(b=1, a=2)], ids=repr)
def test_parts_come_in_the_order_in_which_they_are_rebuilt(tree):
    assert children(tree) == [1, 2]
    again = rebuild(tree, children(tree))
    assert again == tree and type(again) is type(tree) and list(again) == list(tree)


def test_a_walk_leaves_nothing_for_the_collector_and_takes_a_few_calls_for_each_structure():
    tree = {"x": [np.zeros(3)]}
    seen = weakref.ref(tree["x"][0])
    gc.disable()
    try:
        map_leaves(lambda leaf: leaf + 1, tree)
        to_torch(tree)
        del tree
        assert seen() is None
    finally:
        gc.enable()
    tree = {"a": [np.zeros(1), {"b": (np.ones(2), np.ones(3), "text")}], "c": np.zeros(4)}
    assert len(calls_of(lambda: to_torch(tree))) <= 2 * 4 + 3 * 4 + 1 + 2


@pytest.mark.parametrize("make", [list, tuple, lambda arrays: dict(zip("ab", arrays, strict=True))])
def test_flat_arrays_become_tensors_without_a_walk(make):
    tree = make([np.arange(3), np.zeros((2, 2))])
    assert len(calls_of(lambda: to_torch(tree))) <= 1
    tensors = to_torch(tree)
    assert type(tensors) is type(tree) and list(tensors) == (list(tree) if type(tree) is dict else list(tensors))
    for tensor, array in zip(children(tensors), children(tree), strict=True):
        assert tensor.data_ptr() == array.ctypes.data and tensor.shape == array.shape
    again = make([array := np.arange(3), array])
    first, second = children(to_torch(again))
    assert first is second
