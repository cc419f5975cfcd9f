"""The functions to compose batches from: Gluon's answers, fields, padding, and clear refusals."""

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
from calls import calls_of
from conftest import covering
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import ShardedDataLoader
from sharded_loader.batchify import Dict, List, NamedTuple, Pad, Stack, Tuple, default_batchify_fn
from sharded_loader.batching.default import COPIED_AT_ONCE, JOINED_BYTES
from sharded_loader.batching.protocol import assembler
from sharded_loader.batching.tree import map_leaves

MyNT = namedtuple("MyNT", "data label")
ROWS = [(np.array([1.0, 2.0]), 0), (np.array([3.0, 4.0]), 1)]
NAMED = [{"tokens": [1, 2], "id": "a", "w": 0.5}, {"tokens": [3], "w": 1.5, "id": "b"}]
DIFFERENT = r"different keys: \{'x', 'y'\} in sample 0 of the batch, .* in sample 1.*rest='drop'"


def decoded(entry):
    if "__array__" in entry:
        return Array(entry["dtype"], entry["shape"], entry["data"])
    return tuple(entry["__tuple__"]) if "__tuple__" in entry else entry


def encoded(leaf):
    if isinstance(leaf, torch.Tensor):
        return Array(str(leaf.dtype).removeprefix("torch."), list(leaf.shape), leaf.flatten().tolist())
    return leaf


Array = namedtuple("Array", "dtype shape data")
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "batchify.json").read_text(), object_hook=decoded)
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


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["id"])
def test_answers_are_gluons(case):
    run, expected = call_of(case), case["expected"]
    if isinstance(expected, dict) and "__error__" in expected:
        with pytest.raises((ValueError, TypeError)):
            run(case["params"])
    else:
        found = map_leaves(encoded, run(case["params"]))
        assert found == expected and type(found) is type(expected)


REFUSED = [
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
    (lambda: NamedTuple(MyNT, [Stack()]), r"exactly one function for each of \['data', 'label'\]"),
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
    (lambda: Pad(max_length=0), r"max_length=0\) must be at least 1.*give a positive int"),
    (lambda: Pad(max_length=2.5), "max_length=2.5.*give a positive int", TypeError),
    (lambda: Pad(max_length=10, round_to=8), "max_length=10, round_to=8.*multiple of round_to"),
    (lambda: Pad(max_length=4, truncate="left"), "truncate is 'left'.*choose 'end' or 'start'"),
    (lambda: Pad(mask=1), "mask=1.*True", TypeError),
    (lambda: Pad(max_length=4)([1, 2]), "no axis 0.*Stack"),
    (lambda: Pad(2, max_length=4)([np.zeros((1, 2))]), "no axis 2"),
    (lambda: Pad(-3, max_length=4)([np.zeros((1, 2))]), "no axis -3"),
    (lambda: Pad(None, max_length=4)([1, 2]), "no axis to pad: use Stack"),
    (lambda: Pad(axis=None)([[1], [[1]]]), r"Pad\(axis=None\) makes only what it pads equal"),
    (lambda: Pad()([np.zeros((2, 3)), np.zeros((3, 2))]), r"along every axis with Pad\(axis=None\)"),
    (lambda: Pad(max_length=1)([np.zeros((2, 2)), np.zeros((2, 3))]), "different shapes"),
]


@pytest.mark.parametrize(("call", "message", "error"), [(*row, ValueError)[:3] for row in REFUSED])
def test_bad_arguments_and_samples_are_refused(call, message, error):
    with pytest.raises(error, match=message):
        call()


def test_own_and_user_functions_compose_and_other_keys_are_dropped_kept_or_go_through_a_function():
    batch = Dict({"tokens": Pad()}, rest="drop")([*NAMED, {"tokens": []}])
    assert list(batch) == ["tokens"] and batch["tokens"].tolist() == [[1, 2], [3, 0], [0, 0]]
    batch = Dict({"tokens": Pad()}, rest="keep")(NAMED)
    assert list(batch) == ["tokens", "id", "w"]
    assert batch["id"] == ["a", "b"] and torch.equal(batch["w"], torch.tensor([0.5, 1.5], dtype=torch.float64))
    assert Dict({"tokens": Pad()}, rest=List())(NAMED)["w"] == [0.5, 1.5]
    assert Dict({"tokens": Pad()}, rest=len)(NAMED)["id"] == 2
    fn = Tuple(Dict({"t": Pad(), "n": len}), NamedTuple(MyNT, [Stack(), lambda labels: "".join(labels)]))
    samples = [({"t": [1, 2], "n": 0}, MyNT(1.5, "a")), ({"t": [3], "n": 0}, MyNT(2.5, "b"))]
    called = fn(samples)
    assembled = assembler(fn)(samples, np.empty)
    assert isinstance(called[0]["t"], torch.Tensor) and isinstance(assembled[0]["t"], np.ndarray)

    def plain(tree):
        return map_leaves(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, tree)

    assert plain(called) == plain(assembled)
    assert called[0]["n"] == 2 and called[1].label == "ab"


def test_fields_limits_and_masks_are_alike_in_every_pool(new_pool):
    fn = Dict({"tokens": Pad(pad_val=-1, ret_length=True, max_length=2, mask=True)}, rest="keep")
    samples = [*NAMED, {"tokens": [4, 5, 6], "w": 2.5, "id": "c"}]
    with ShardedDataLoader(samples, 3, batchify_fn=fn, pool=new_pool()) as loader:
        (batch,) = loader
    assert type(batch["tokens"]) is tuple and all(map(torch.equal, batch["tokens"], fn(samples)["tokens"]))
    assert batch["tokens"][0].tolist() == [[1, 2], [3, -1], [4, 5]] and batch["id"] == ["a", "b", "c"]
    with ShardedDataLoader(samples, 3, batchify_fn=Dict({"tokens": Pad()}), pool=new_pool()) as loader:
        with pytest.raises(ValueError, match=r"has no function: 'id', 'w'.*rest='drop'"):
            next(iter(loader))


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


def test_pad_takes_tensors_of_every_dtype_and_all_it_makes_lies_in_the_memory_that_is_given(recwarn):
    rows = [torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 1, dtype=torch.bfloat16)]
    padded, lengths = Pad(axis=-1, ret_length=True)(rows)
    assert padded.dtype == torch.bfloat16 and padded[1].tolist() == [[1, 0, 0]] * 2 and lengths.tolist() == [3, 1]
    assert Pad(axis=1, dtype="float32")(rows).dtype == torch.float32
    assert Pad()([torch.ones(2), torch.ones(1)]).tolist() == [[1, 1], [1, 0]]
    assert Pad()([[1, 2], [3], []]).dtype == torch.int64 and not recwarn.list
    padded, mask = Pad(mask=True)([[], [1]])
    assert padded.tolist() == [[0], [1]] and mask.tolist() == [[False], [True]]
    padded, mask = Pad(mask=True)([[], []])
    assert padded.shape == mask.shape == (2, 0)
    assert Pad(max_length=9)([[1], [2, 3]]).tolist() == [[1, 0], [2, 3]]
    given = []
    made = Pad(ret_length=True, max_length=2, mask=True).assemble(
        [[1, 2, 3], [4]], lambda shape, dtype: given.append(np.empty(shape, dtype)) or given[-1]
    )
    assert type(made) is tuple and len(made) == len(given) == 3
    assert all(one is array for one, array in zip(made, given, strict=True))
    fn = Pad(max_length=8, truncate="start", mask=True)
    assert repr(pickle.loads(pickle.dumps(fn))) == repr(fn) == "Pad(max_length=8, truncate='start', mask=True)"


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


@given(
    st.lists(st.lists(st.integers(-9, 9), max_size=9), min_size=1, max_size=6),
    st.integers(1, 6) | st.none(),
    st.sampled_from(["end", "start"]),
    st.integers(1, 8),
    st.sampled_from(["list", "numpy", "torch", "bfloat16"]),
)
def test_values_are_kept_up_to_the_limit_and_marked_by_the_mask(lists, limit, truncate, round_to, kind):
    make = {
        "list": list,
        "numpy": lambda x: np.array(x, np.int64),
        "torch": lambda x: torch.tensor(x, dtype=torch.int64),
        "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    }[kind]
    most = None if limit is None else limit * round_to
    fn = Pad(pad_val=99, ret_length=True, round_to=round_to, max_length=most, truncate=truncate, mask=True)
    padded, lengths, mask = fn(list(map(make, lists)))
    kept = [x if most is None else x[:most] if truncate == "end" else x[-most:] for x in lists]
    assert padded.shape == mask.shape and 0 <= padded.shape[1] - max(map(len, kept)) < round_to
    assert padded.shape[1] % round_to == 0 and lengths.dtype == torch.int32
    assert mask.dtype == torch.bool and lengths.tolist() == [len(x) for x in kept] == mask.sum(1).tolist()
    for row, marked, original in zip(padded, mask, kept, strict=True):
        assert row[marked].tolist() == original
        assert set(row[~marked].tolist()) <= {99}
        assert marked.tolist() == sorted(marked.tolist(), reverse=True), "values come first"


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
@pytest.mark.parametrize("truncate", ["end", "start"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_axis_that_is_padded_is_cut(axis, truncate, dtype):
    shape = [3, 3, 3]
    samples = []
    for length in (2, 5):
        shape[axis] = length
        samples.append(torch.arange(1, 1 + np.prod(shape)).reshape(shape).to(dtype))
    padded, mask = Pad(axis, max_length=4, truncate=truncate, mask=True)(samples)
    shape[axis] = 4
    assert list(padded.shape) == [2, *shape] and mask.tolist() == [[True, True, False, False], [True] * 4]
    begin = 0 if truncate == "end" else 1
    assert torch.equal(padded[1], samples[1].narrow(axis, begin, 4))
    assert torch.equal(padded[0].narrow(axis, 0, 2), samples[0]) and not padded[0].narrow(axis, 2, 2).any()


@pytest.mark.parametrize("truncate", ["end", "start"])
def test_every_axis_is_cut_and_masked_where_every_axis_is_padded(truncate):
    samples = [np.arange(1, 13).reshape(2, 6), np.arange(1, 13).reshape(4, 3)]
    padded, shapes, mask = Pad(None, ret_length=True, max_length=3, truncate=truncate, mask=True)(samples)
    assert padded.shape == mask.shape == (2, 3, 3) and shapes.tolist() == [[2, 3], [3, 3]]
    first, second = (samples[0][:, :3], samples[1][:3]) if truncate == "end" else (samples[0][:, 3:], samples[1][1:])
    assert padded[0][mask[0]].tolist() == first.ravel().tolist() and padded[1].tolist() == second.tolist()
    assert mask[0].tolist() == [[True] * 3, [True] * 3, [False] * 3] and mask[1].all()


# -- rows joined as bytes, and rows written one by one -------------------------------------------------------------

KINDS = {
    "int64": lambda n: np.arange(n),
    "float16": lambda n: np.arange(n, dtype=np.float16),
    "bool": lambda n: np.arange(n) % 2 == 0,
    "complex64": lambda n: np.arange(n, dtype=np.complex64),
    "long double": lambda n: np.arange(n, dtype="g"),
    "big-endian": lambda n: np.arange(n, dtype=">i4"),
    "with gaps": lambda n: np.arange(2 * n)[::2],
    "backwards": lambda n: np.arange(n)[::-1],
    "read-only": lambda n: np.frombuffer(np.arange(n).tobytes(), np.int64) if n else np.zeros(0, np.int64),
    "mixed": lambda n: np.arange(n, dtype=(np.int32, np.int64)[n % 2]),
}


@covering(kind=KINDS, lengths=[[3, 1, 0, 5], [4, 4], [0, 0], [0], [700, 5, 2999]], round_to=[None, 8])
def test_rows_of_any_kind_are_padded_alike_in_new_and_in_given_memory(kind, lengths, round_to):
    rows = [KINDS[kind](length) for length in lengths]
    fn = Pad(pad_val=1, round_to=round_to)
    wanted = np.ones((len(rows), -(-max(lengths) // (round_to or 1)) * (round_to or 1)), np.result_type(*rows))
    for row, values in zip(wanted, rows, strict=True):
        row[: len(values)] = values
    for empty in (np.empty, lambda shape, dtype: np.empty(shape, dtype)):
        found = fn.assemble(rows, empty)
        assert found.dtype == wanted.dtype.newbyteorder("=") and found.flags.writeable and found.flags.c_contiguous
        np.testing.assert_array_equal(found, wanted)


def test_short_rows_of_one_dtype_are_joined_but_large_batches_are_not_copied_a_second_time():
    def written_one_by_one(rows, empty=np.empty, dtype=None):
        return "_write" in calls_of(lambda: Pad(dtype=dtype).assemble(rows, empty))

    assert not written_one_by_one([np.arange(100), np.arange(3)])
    assert written_one_by_one([np.arange(100), np.arange(3)], dtype="int32")
    assert written_one_by_one([np.arange(JOINED_BYTES), np.arange(3)])
    for more in (0, 1):
        rows = [np.zeros(1024, np.uint8)] * (COPIED_AT_ONCE // 1024 + more)
        assert written_one_by_one(rows, lambda shape, dtype: np.empty(shape, dtype)) == bool(more)
