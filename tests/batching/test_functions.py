"""Samples become a batch by the rules; what cannot is refused with the field, the shapes and advice."""

import dataclasses
import json
import pickle
import subprocess
import sys
from collections import OrderedDict, namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from sharded_loader.batchify import Dict, List, NamedTuple, Pad, Stack, Tuple, default_batchify_fn
from sharded_loader.batching.protocol import assemble
from sharded_loader.batching.tree import map_leaves

GOLDEN = {c["id"]: c for c in json.loads((Path(__file__).parents[1] / "golden" / "batchify.json").read_text())}
MyNT = namedtuple("MyNT", "data label")
ROWS = [(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)]

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


@pytest.mark.parametrize(
    ("samples", "dtype", "values"),
    [
        ([1, 2], "int64", [1, 2]),
        ([1.0, 2], "float64", [1.0, 2.0]),
        ([True, 2], "int64", [1, 2]),
        ([1j, 2], "complex128", [1j, 2 + 0j]),
        ([2**63, 1], "uint64", [2**63, 1]),
        ([[2**63, 1], [0, 2]], "uint64", [[2**63, 1], [0, 2]]),
        ([np.float32(1), np.float32(2)], "float32", [1.0, 2.0]),
        ([np.int8(1), np.int8(2)], "int8", [1, 2]),
        ([[1, 2.5], [3, 4]], "float64", [[1.0, 2.5], [3.0, 4.0]]),
        ([[[1], [2]], [[3], [4]]], "int64", [[[1], [2]], [[3], [4]]]),
        ([[(1, 2)], [(3, 4)]], "int64", [[[1, 2]], [[3, 4]]]),
        ([[], []], "float64", [[], []]),
        ([torch.tensor(1.5), np.array(2.0)], "float64", [1.5, 2.0]),
        ([np.zeros(1, ">f4"), np.ones(1, ">f4")], "float32", [[0.0], [1.0]]),
    ],
)
def test_numbers_get_the_dtype_that_holds_them(samples, dtype, values):
    batch = default_batchify_fn(samples)
    assert str(batch.dtype) == f"torch.{dtype}"
    assert batch.tolist() == values


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_tensors_keep_their_dtype_in_memory_that_was_given(dtype, shape):
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    tensors = [torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)]
    batch = default_batchify_fn(tensors)
    assert batch.dtype == dtype and batch.float().tolist() == torch.stack([t.float() for t in tensors]).tolist()
    result = default_batchify_fn.assemble(tensors, empty)
    pointer = result.data_ptr() if isinstance(result, torch.Tensor) else result.ctypes.data
    assert len(given) == 1 and (pointer == given[0].ctypes.data or not given[0].size)


def test_views_and_subclasses_of_tensors_stack():
    base = torch.arange(6).reshape(2, 3).t()
    assert default_batchify_fn([base, base]).tolist() == [base.tolist()] * 2
    sparse = torch.eye(2).to_sparse()
    assert default_batchify_fn([sparse, sparse]).is_sparse
    meta = torch.zeros(2, device="meta")
    assert default_batchify_fn([meta, meta]).shape == (2, 2)


@given(
    npst.arrays(
        npst.scalar_dtypes().filter(lambda d: d.kind in "biufc" and d.itemsize <= 16 and d.char not in "gG"),
        npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    )
)
def test_stacking_rows_gives_the_array_back(array):
    if len(array) == 0:
        return
    samples = [np.array(row) for row in array]
    stacked = default_batchify_fn.assemble(samples, np.empty)
    np.testing.assert_array_equal(stacked, array)
    assert stacked.dtype == array.dtype.newbyteorder("=")


@given(st.lists(st.lists(st.integers(-(2**31), 2**31), max_size=9), min_size=1, max_size=6), st.integers(1, 8))
def test_pad_keeps_every_value_and_fills_the_rest(lists, round_to):
    padded, lengths = Pad(pad_val=-1, ret_length=True, dtype="int64", round_to=round_to)(lists)
    assert padded.shape[1] % round_to == 0 and padded.shape[1] - max(map(len, lists)) < round_to
    assert lengths.dtype == torch.int32 and lengths.tolist() == [len(x) for x in lists]
    for row, original in zip(padded.tolist(), lists, strict=True):
        assert row == original + [-1] * (len(row) - len(original))


def test_pad_of_integer_lists_is_int64_and_never_warns(recwarn):
    assert Pad()([[1, 2], [3], []]).dtype == torch.int64
    assert not recwarn.list


def test_pad_of_large_rows_is_the_same_as_of_small_ones():
    long = [np.arange(n, dtype=np.float64) for n in (5000, 3000)]
    padded = Pad(pad_val=7)(long)
    assert padded[1, :3000].tolist() == long[1].tolist() and set(padded[1, 3000:].tolist()) == {7.0}


def test_pad_takes_tensors_of_every_dtype():
    rows = [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)]
    padded, lengths = Pad(axis=-1, ret_length=True)(rows)
    assert (
        padded.dtype == torch.bfloat16 and padded[1].tolist() == [[1, 0, 0], [1, 0, 0]] and lengths.tolist() == [3, 1]
    )
    assert Pad(axis=1, dtype="float32")(rows).dtype == torch.float32
    assert Pad()([torch.ones(2), torch.ones(1)]).tolist() == [[1, 1], [1, 0]]


@pytest.mark.parametrize("fn", [default_batchify_fn, Stack()])
@pytest.mark.parametrize(
    "samples", [[np.zeros(3), np.zeros(5)], [torch.zeros(3), torch.zeros(5)], [[1, 2, 3], [1, 2, 3, 4, 5]]]
)
def test_ragged_samples_are_refused_with_shapes_and_advice(fn, samples):
    with pytest.raises(ValueError, match=r"\(3,\).*\(5,\).*Pad"):
        fn(samples)


def test_rows_whose_sizes_add_up_by_chance_are_still_ragged():
    with pytest.raises(ValueError, match=r"\(2,\).*\(1,\).*\(3,\)"):
        default_batchify_fn([np.zeros(2), np.zeros(1), np.zeros(3)])
    with pytest.raises(ValueError, match="different shapes"):
        default_batchify_fn([np.zeros((2, 3)), np.zeros((2, 4))])
    with pytest.raises(ValueError, match="different shapes"):
        default_batchify_fn([np.zeros((2,)), np.zeros(())])


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
        ([(1, 2), (1, 2, 3)], r"lengths: 2 in sample 0, 3 in sample 1"),
        ([(1, np.zeros(2)), (1, None)], r"types: ndarray in sample 0, NoneType in sample 1.*\[1\].*List"),
        ([(1, 2), {"a": 1}], "tuple in sample 0, dict in sample 1"),
        ([MyNT(1, 2), Pad], "types"),
        ([2**70, 1], "int64 nor uint64"),
        ([-1, 2**63], "int64 nor uint64"),
        ([torch.ones(1, requires_grad=True)] * 2, "detach"),
        ([], "no samples"),
    ],
)
def test_samples_that_do_not_fit_together_are_refused(samples, message):
    with pytest.raises(ValueError, match=message):
        default_batchify_fn(samples)


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
        (lambda: NamedTuple(MyNT, [Stack()]), "2 fields, 1 functions"),
        (lambda: NamedTuple(tuple, [Stack()]), "namedtuple class"),
        (lambda: Tuple(Stack(), Dict({"k": Stack()}))([(0, {"k": [1]}), (0, {"k": [1, 2]})]), r"\[1\]\['k'\]"),
    ],
)
def test_bad_input_to_the_functions_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_stack_also_takes_strings_and_mappings():
    assert Stack()(["a", "b"]) == ["a", "b"]
    assert Stack()([{"x": 1}, {"x": 2}])["x"].tolist() == [1, 2]
    assert Stack()([(1, 2), (3, 4)]).tolist() == [[1, 2], [3, 4]]
    assert Stack("int32")([np.array([1.7]), np.array([2.2])]).tolist() == [[1], [2]]


def test_own_and_user_functions_compose_in_both_ways():
    fn = Tuple(Dict({"t": Pad(), "n": len}), NamedTuple(MyNT, [Stack(), lambda labels: "".join(labels)]))
    samples = [({"t": [1, 2], "n": 0}, MyNT(1.5, "a")), ({"t": [3], "n": 0}, MyNT(2.5, "b"))]
    called = fn(samples)
    assembled = assemble(fn, samples, np.empty)
    assert isinstance(called[0]["t"], torch.Tensor) and isinstance(assembled[0]["t"], np.ndarray)

    def plain(tree):
        return map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, tree)

    assert plain(called) == plain(assembled)
    assert called[0]["n"] == 2 and called[1].label == "ab"


def test_every_array_comes_from_the_allocator():
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    samples = [(np.zeros(3), i, [i, i], np.float32(i)) for i in range(4)]
    for field in default_batchify_fn.assemble(samples, empty):
        assert any(field is array for array in given)
    padded, lengths = Pad(ret_length=True).assemble([[1], [2, 3]], empty)
    assert any(padded is array for array in given) and any(lengths is array for array in given)


def test_functions_pickle_and_say_what_they_are():
    fn = Tuple(Pad(axis=1, round_to=8), Dict({"a": Stack("float16")}), NamedTuple(MyNT, [List(), default_batchify_fn]))
    assert repr(pickle.loads(pickle.dumps(fn))) == repr(fn)
    assert repr(fn).startswith("Tuple(Pad(axis=1, round_to=8), Dict({'a': Stack(float16)}), NamedTuple(MyNT, {'data'")
    assert pickle.loads(pickle.dumps(default_batchify_fn)) is default_batchify_fn


def test_errors_survive_pickling():
    with pytest.raises(ValueError, match="in field") as caught:
        default_batchify_fn([(np.zeros(1),), (np.zeros(2),)])
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_numpy_samples_are_assembled_without_torch():
    code = """
import sys, numpy as np
from sharded_loader import ArrayDataset, SimpleDataset, ConcatDataset
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import assemble
from sharded_loader.batchify import Tuple, Stack, Pad
dataset = ArrayDataset(x=np.zeros((8, 3)), y=list(range(8)), name=list("abcdefgh"))
dataset = (dataset.shard(2, 0) + dataset.take(2)).cache().transform(lambda s: s)
assemble(default_batchify_fn, dataset.__getitems__([0, 5]), np.empty)
assemble(Tuple(Stack(), Pad()), [(1, [1]), (2, [1, 2])], np.empty)
ArrayDataset(np.zeros((8, 3))).get_batch([1, 2])
assert "torch" not in sys.modules, "torch was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_nested_and_compressed_sparse_tensors_are_refused_with_advice():
    for sample in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(3).to_sparse_csr()):
        with pytest.raises(ValueError, match="List"):
            default_batchify_fn([sample, sample])


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4), st.integers(1, 3)), min_size=1, max_size=5),
    st.sampled_from([None, 4]),
)
def test_pad_of_every_axis_keeps_every_value_and_fills_the_rest(shapes, round_to):
    arrays = [np.arange(1, 1 + np.prod(shape), dtype=np.float32).reshape(shape) for shape in shapes]
    longest = [max(lengths) for lengths in zip(*shapes, strict=True)]
    wanted = [length if round_to is None else -(-length // round_to) * round_to for length in longest]
    fn = Pad(axis=None, pad_val=-1, ret_length=True, round_to=round_to)
    for samples in (arrays, [torch.from_numpy(a).bfloat16() for a in arrays]):
        batch, lengths = fn(samples)
        assert list(batch.shape) == [len(shapes), *wanted]
        assert lengths.dtype == torch.int32 and lengths.tolist() == [list(shape) for shape in shapes]
        for row, array in zip(batch.float().numpy(), arrays, strict=True):
            corner = tuple(map(slice, array.shape))
            assert (row[corner] == array).all()
            assert (row == -1).sum() == row.size - array.size


def test_pad_of_every_axis_refuses_other_numbers_of_axes():
    with pytest.raises(ValueError, match=r"Pad\(axis=None\) pads samples of the same number of axes"):
        Pad(axis=None)([[1], [[1]]])
    with pytest.raises(ValueError, match="no axis to pad: use Stack"):
        Pad(axis=None)([1, 2])
    with pytest.raises(ValueError, match=r"along every axis with Pad\(axis=None\)"):
        Pad()([np.zeros((2, 3)), np.zeros((3, 2))])


def test_stack_of_tuples_says_that_fields_need_a_function_each():
    with pytest.raises(ValueError, match=r"tuples of 2 fields, .*Tuple\(Stack\(\), Stack\(\)\)"):
        Stack()([(np.zeros(3), 1), (np.ones(3), 2)])
