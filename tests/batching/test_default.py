"""The default rules: what samples become a batch, and what is refused with the field, the shapes and advice."""

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from calls import calls_of

from sharded_loader.batchify import List, Pad, Stack, default_batchify_fn
from sharded_loader.batching.default import DefaultBatchify

MyNT = namedtuple("MyNT", "data label")


class Flag(int):
    pass


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: list
    name: str


def test_structures_are_kept():
    batch = default_batchify_fn([{"a": (1, np.zeros(2)), "n": "x"}, {"a": (2, np.ones(2)), "n": "y"}])
    assert type(batch) is dict and type(batch["a"]) is list and batch["n"] == ["x", "y"]
    assert batch["a"][0].tolist() == [1, 2] and batch["a"][1].shape == (2, 2)
    assert type(default_batchify_fn([OrderedDict(a=1)])) is OrderedDict
    named = default_batchify_fn([MyNT(1, "a"), MyNT(2, "b")])
    assert type(named) is MyNT and named.data.tolist() == [1, 2] and named.label == ["a", "b"]
    data = default_batchify_fn([Sample([1, 2], "a"), Sample([3, 4], "b")])
    assert type(data) is Sample and data.tokens.tolist() == [[1, 2], [3, 4]] and data.name == ["a", "b"]


def test_lists_that_hold_more_than_numbers_are_fields():
    fields = default_batchify_fn([[np.zeros(2), "a"], [np.ones(2), "b"]])
    assert fields[0].shape == (2, 2) and fields[1] == ["a", "b"]


def test_text_and_objects_stay_apart():
    marker = object()
    assert default_batchify_fn(["a", "b"]) == ["a", "b"]
    assert default_batchify_fn([b"a", b"b"]) == [b"a", b"b"]
    assert default_batchify_fn([None, "b", marker]) == [None, "b", marker]
    assert default_batchify_fn([(1, None), (2, None)])[1] == [None, None]


def test_objects_that_offer_an_array_are_arrays():
    class Image:
        @property
        def __array_interface__(self):
            return np.arange(4, dtype=np.uint8).reshape(2, 2).__array_interface__

    assert default_batchify_fn([Image(), Image()]).shape == (2, 2, 2)


@pytest.mark.parametrize("fn", [default_batchify_fn, Stack()])
@pytest.mark.parametrize(
    "samples", [[np.zeros(3), np.zeros(5)], [torch.zeros(3), torch.zeros(5)], [[1, 2, 3], [1, 2, 3, 4, 5]]]
)
def test_ragged_samples_are_refused_with_shapes_and_advice(fn, samples):
    with pytest.raises(ValueError, match=r"\(3,\).*\(5,\).*Pad"):
        fn(samples)


@pytest.mark.parametrize(
    ("samples", "field"),
    [
        ([(0, np.zeros(1)), (0, np.zeros(2))], r"in field \[1\]"),
        ([{"t": [1]}, {"t": [1, 2]}], r"in field \['t'\]"),
        ([Sample([1], "a"), Sample([1, 2], "b")], r"in field \.tokens"),
        ([MyNT(1, ({"k": [1]},)), MyNT(1, ({"k": [1, 2]},))], r"in field \.label\[0\]\['k'\]"),
    ],
)
def test_the_field_is_named(samples, field):
    with pytest.raises(ValueError, match=field):
        default_batchify_fn(samples)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([{"a": 1}, {"a": 1}, {"b": 1}], r"keys.*'a'.*sample 0.*'b'.*sample 2"),
        ([(1, 2), (1, 2, 3)], r"lengths: 2 in sample 0 of the batch, 3 in sample 1"),
        ([(1, np.zeros(2)), (1, None)], r"types: ndarray in sample 0 of the batch, NoneType in sample 1.*\[1\].*List"),
        ([(1, 2), {"a": 1}], "tuple in sample 0 of the batch, dict in sample 1"),
        ([MyNT(1, 2), Pad], "types"),
        ([2**70, 1], "int64 nor uint64"),
        ([-1, 2**63], "int64 nor uint64"),
        ([Flag(2**70), Flag(1)], "int64 nor uint64"),
        ([torch.ones(1, requires_grad=True)] * 2, "detach"),
        ([], "no samples"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        default_batchify_fn(samples)


def test_fields_of_arrays_and_numbers_take_few_calls():
    samples = [(np.zeros(2), i, {"x": 1.5}) for i in range(50)]
    names = calls_of(lambda: default_batchify_fn.assemble(samples, np.empty))
    assert names.count("assemble") == 2  # the tuple and the dict
    assert names.count("stack_arrays") == 1 and names.count("stack_numbers") == 2
    assert len(names) <= 14  # five of them look at what a dict is


def test_fields_of_a_subclass_follow_the_default_rules():
    class Tagged(DefaultBatchify):
        def assemble(self, samples, empty):
            return ["tag", super().assemble(samples, empty)]

    tag, (first, second) = Tagged()([(1, "a"), (2, "b")])
    assert tag == "tag" and first.tolist() == [1, 2] and second == ["a", "b"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Pad(num_shards=2), r"Pad has no argument 'num_shards'; it has axis, .*Loader\(num_shards=2"),  # type: ignore[call-arg]
        (lambda: Stack(use_shared_mem=True), "Stack has no argument 'use_shared_mem'; it has dtype"),  # type: ignore[call-arg]
        (lambda: List(3), "List has no argument 3; it has none"),  # type: ignore[call-arg]
    ],
)
def test_an_argument_that_is_none_gets_advice(make: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        make()


def test_a_subclass_takes_what_its_own_constructor_takes() -> None:
    class Scaled(Stack):
        def __init__(self, factor: int, **more: Any) -> None:
            super().__init__(**more)
            self.factor = factor

    assert Scaled(factor=3, dtype="float32").factor == 3
