"""The functions to compose batches from: Gluon's answers, fields, and clear refusals."""

import json
import pickle
import subprocess
import sys
from collections import namedtuple
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.batchify import Dict, List, NamedTuple, Pad, Stack, Tuple, default_batchify_fn
from sharded_loader.batching.protocol import assembler
from sharded_loader.batching.tree import map_leaves

GOLDEN = {c["id"]: c for c in json.loads((Path(__file__).parents[1] / "golden" / "batchify.json").read_text())}


MyNT = namedtuple("MyNT", "data label")


ROWS = [(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)]


NAMED = [{"tokens": [1, 2], "id": "a", "w": 0.5}, {"tokens": [3], "w": 1.5, "id": "b"}]
DIFFERENT = r"different keys: \{'x', 'y'\} in sample 0 of the batch, .* in sample 1.*rest='drop'"


CALLS = {
    "pad_axis-1": lambda p: Pad(p["axis"], p["pad_val"], p["ret_length"])([np.array(x) for x in p["data"]]),
    "pad_np_float64": lambda p: Pad(pad_val=1)([np.array(x, p["in_dtype"]) for x in p["data"]]),
    "pad_axis_type_err": lambda p: Pad(axis=p["axis"]),
    "stack_ints": lambda p: Stack()(p["data"]),
    "stack_dtype": lambda p: Stack(p["dtype"])(p["data"]),
    "tuple_bad_mixed": lambda p: Tuple([Pad()], Stack()),
    "tuple_wrong_arity": lambda p: Tuple(Pad(), Stack())([(1, 2, 3)]),
    "list": lambda p: List()(["a", "b"]),
    "dict_err_callable": lambda p: Dict({"a": 1}),
    "namedtuple_err_missing": lambda p: NamedTuple(MyNT, {"data0": Stack(), "label": Stack()}),
    "namedtuple_err_extra": lambda p: NamedTuple(MyNT, {"data": Stack(), "label": Stack(), "x": Stack()}),
    "namedtuple_err_type": lambda p: NamedTuple(MyNT, [Stack(), Stack()])([(1, 2)]),
    "tuple": lambda p: default_batchify_fn(ROWS),
    "list_sample": lambda p: default_batchify_fn([[1, 2], [3, 4]]),
    "nd": lambda p: default_batchify_fn([torch.tensor([1, 2], dtype=torch.int32), torch.tensor([3, 4]).int()]),
    "bool": lambda p: default_batchify_fn([True, False]),
}


def call_of(case):
    name = case["id"]
    if name.startswith("pad_lists"):
        return lambda p: Pad(pad_val=p["pad_val"], dtype=p["dtype"])(p["data"])
    if name.startswith("default_"):
        kind = name.rsplit("_", 1)[1]
        return CALLS["list_sample" if kind == "list" else kind]
    return CALLS[name]


def check(value, expected):
    if isinstance(expected, dict) and "__array__" in expected:
        assert isinstance(value, torch.Tensor)
        assert str(value.dtype) == "torch." + expected["dtype"]
        assert list(value.shape) == expected["shape"]
        assert value.flatten().tolist() == expected["data"]
    elif isinstance(expected, dict) and "__tuple__" in expected:
        assert type(value) is tuple and len(value) == len(expected["__tuple__"])
        for v, e in zip(value, expected["__tuple__"], strict=True):
            check(v, e)
    elif isinstance(expected, list):
        assert type(value) is list and len(value) == len(expected)
        for v, e in zip(value, expected, strict=True):
            check(v, e)
    else:
        assert value == expected


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN.keys())
def test_answers_are_gluons(case):
    run = call_of(case)
    if isinstance(case["expected"], dict) and "__error__" in case["expected"]:
        with pytest.raises((ValueError, TypeError)):
            run(case["params"])
    else:
        check(run(case["params"]), case["expected"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Pad()(["ab", "c"]), "string.*List"),
        (lambda: Pad()([]), "no samples"),
        (lambda: Pad()([1, 2]), "no axis 0.*Stack"),
        (lambda: Pad(axis=2)([np.zeros((1, 2))]), "no axis 2"),
        (lambda: Pad()([np.zeros((1, 2)), np.zeros((1, 3))]), r"\(1, 2\).*\(1, 3\).*Pad\(axis=0\)"),
        (lambda: Pad()([np.zeros(2), np.zeros((2, 2))]), "different shapes"),
        (lambda: Pad(pad_val=-1)([np.zeros(2, np.uint8)]), "pad_val=-1.*uint8"),
        (lambda: Pad(pad_val=0.5)([[1], [2]]), "pad_val=0.5"),
        (lambda: Pad(round_to=0), "round_to"),
        (lambda: Pad()([torch.ones(1, requires_grad=True)]), "detach"),
        (lambda: Stack()([]), "no samples"),
        (lambda: Stack()([object(), object()]), "object.*List"),
        (lambda: Tuple(Stack(), Stack())([(1, 2), 5]), "sample 1.*int"),
        (lambda: Tuple(Stack(), Stack())([]), "no samples"),
        (lambda: Tuple(Stack(), 3), "not callable"),
        (lambda: Dict({"a": Stack()})([{"a": 1}, {"b": 1}]), "sample 1.*'a'.*'b'"),
        (lambda: Dict([Stack()]), "give a dict"),
        (lambda: Dict({"a": Stack()})([3]), "sample 0.*is an int.*'a'"),
        (lambda: Dict({}, rest="all"), r"rest='all'.*'keep', 'drop', a function, or None"),
        (lambda: Dict({}, rest=True), "rest=True"),
        (lambda: NamedTuple(MyNT, [Stack()]), "2 fields, 1 functions"),
        (lambda: NamedTuple(tuple, [Stack()]), "namedtuple class"),
        (lambda: Tuple(Stack(), Dict({"k": Stack()}))([(0, {"k": [1]}), (0, {"k": [1, 2]})]), r"\[1\]\['k'\]"),
        (lambda: Stack()([(np.zeros(3), 1), (np.ones(3), 2)]), r"tuples of 2 fields, .*Tuple\(Stack\(\), Stack\(\)\)"),
        (lambda: Dict({"tokens": Pad()})(NAMED), r"sample 0 .* has keys.*: 'id', 'w': .*rest='keep'.*rest='drop'"),
        (lambda: Dict({"x": Stack()})([{"x": 1}, {"x": 2, "extra": 3}]), r"sample 1 .*: 'extra'"),
        (lambda: Tuple(Stack(), Dict({"tokens": Pad()}))([(0, one) for one in NAMED]), r"'id', 'w', in field \[1\]"),
        (lambda: Dict({}, rest=Stack("int8"))([{"id": object()}]), r"cannot become an array.*in field \['id'\]"),
        *(
            (partial(Dict({"x": Stack()}, rest=rest), [{"x": 1, "y": 1}, {"x": 2, **other}]), DIFFERENT)
            for rest in ("keep", List())
            for other in ({}, {"z": 3}, {"y": 3, "z": 4})
        ),
    ],
)
def test_bad_input_to_the_functions_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_keys_without_a_function_are_dropped_kept_behind_the_others_or_go_through_a_function():
    batch = Dict({"tokens": Pad()}, rest="drop")([*NAMED, {"tokens": []}])
    assert list(batch) == ["tokens"] and batch["tokens"].tolist() == [[1, 2], [3, 0], [0, 0]]
    batch = Dict({"tokens": Pad()}, rest="keep")(NAMED)
    assert list(batch) == ["tokens", "id", "w"]
    assert batch["id"] == ["a", "b"] and torch.equal(batch["w"], torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert Dict({"tokens": Pad()}, rest=List())(NAMED)["w"] == [0.5, 1.5]
    assert Dict({"tokens": Pad()}, rest=len)(NAMED)["id"] == 2


def test_other_keys_are_treated_alike_in_every_pool(new_pool):
    fn = Dict({"tokens": Pad(pad_val=-1)}, rest="keep")
    with ShardedDataLoader(NAMED, 2, batchify_fn=fn, pool=new_pool()) as loader:
        (batch,) = loader
    assert batch["tokens"].tolist() == [[1, 2], [3, -1]] and batch["id"] == ["a", "b"]
    with ShardedDataLoader(NAMED, 2, batchify_fn=Dict({"tokens": Pad()}), pool=new_pool()) as loader:
        with pytest.raises(ValueError, match=r"has no function: 'id', 'w'.*rest='drop'"):
            next(iter(loader))


def test_own_and_user_functions_compose_in_both_ways():
    fn = Tuple(Dict({"t": Pad(), "n": len}), NamedTuple(MyNT, [Stack(), lambda labels: "".join(labels)]))
    samples = [({"t": [1, 2], "n": 0}, MyNT(1.5, "a")), ({"t": [3], "n": 0}, MyNT(2.5, "b"))]
    called = fn(samples)
    assembled = assembler(fn)(samples, np.empty)
    assert isinstance(called[0]["t"], torch.Tensor) and isinstance(assembled[0]["t"], np.ndarray)

    def plain(tree):
        return map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, tree)

    assert plain(called) == plain(assembled)
    assert called[0]["n"] == 2 and called[1].label == "ab"


def test_every_array_comes_from_the_allocator_once():
    given = []

    def empty(shape, dtype):
        given.append(np.full(shape, 99, dtype))
        return given[-1]

    def check_given(fields, expected):
        assert len(fields) == len(given) == len(expected)
        for field, array, values in zip(fields, given, expected, strict=True):
            assert field is array and field.tolist() == values
        given.clear()

    samples = [(np.zeros(3), i, [i, i], np.float32(i)) for i in range(2)]
    check_given(default_batchify_fn.assemble(samples, empty), [[[0.0] * 3] * 2, [0, 1], [[0, 0], [1, 1]], [0.0, 1.0]])
    check_given(Pad(ret_length=True).assemble([[1], [2, 3]], empty), [[[1, 0], [2, 3]], [1, 2]])
    check_given([Stack("float16").assemble([1, 2], empty)], [[1.0, 2.0]])
    kept = Dict({"tokens": Pad()}, rest="keep").assemble(NAMED, empty)
    check_given([kept["tokens"], kept["w"]], [[[1, 2], [3, 0]], [0.5, 1.5]])
    assert Stack()(["a", "b"]) == ["a", "b"] and Stack()([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    assert Stack()([(1, 2), (3, 4)]).tolist() == [[1, 2], [3, 4]]
    assert Stack("int32")([np.array([1.7]), np.array([2.2])]).tolist() == [[1], [2]]


def test_functions_pickle_and_say_what_they_are():
    rest = Dict({"a": List()}, rest="keep")
    assert repr(pickle.loads(pickle.dumps(rest))) == repr(rest) == "Dict({'a': List()}, rest='keep')"
    fn = Tuple(Pad(axis=1, round_to=8), Dict({"a": Stack("float16")}), NamedTuple(MyNT, [List(), default_batchify_fn]))
    assert repr(pickle.loads(pickle.dumps(fn))) == repr(fn)
    assert repr(fn).startswith("Tuple(Pad(axis=1, round_to=8), Dict({'a': Stack(float16)}), NamedTuple(MyNT, {'data'")
    assert pickle.loads(pickle.dumps(default_batchify_fn)) is default_batchify_fn


def test_numpy_samples_are_assembled_without_torch():
    code = """
import sys, numpy as np
from sharded_loader import ArrayDataset, SimpleDataset, ConcatDataset
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import assembler
from sharded_loader.batchify import Tuple, Stack, Pad
dataset = ArrayDataset(x=np.zeros((8, 3)), y=list(range(8)), name=list("abcdefgh"))
dataset = (dataset.shard(2, 0) + dataset.take(2)).cache().transform(lambda s: s)
assembler(default_batchify_fn)(dataset.__getitems__([0, 5]), np.empty)
assembler(Tuple(Stack(), Pad()))([(1, [1]), (2, [1, 2])], np.empty)
ArrayDataset(np.zeros((8, 3))).get_batch([1, 2])
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
