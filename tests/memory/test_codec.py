"""Whatever a batch is made of arrives as it left: through a slot, through half a slot, through the pipe."""

import collections
import contextlib
import functools
import gc
import pickle
import sys
import threading
import warnings
import weakref
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from calls import calls_of
from failures import TwoArguments
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader.base.errors import SampleReadError, WorkerTraceback, add_note, notes_of
from sharded_loader.engine.messages import Result, pack_result, unpack_result
from sharded_loader.memory.codec import (
    IN_BAND_BYTES,
    IN_SLOT_BYTES,
    EncodedError,
    SlotWriter,
    class_reference,
    decode,
    decode_error,
    encode,
    encode_error,
    is_findable,
    is_plain,
    resolve_class,
)
from sharded_loader.memory.publish import publish

pytestmark = pytest.mark.filterwarnings("ignore:(Sparse|ComplexHalf|TypedStorage|torch.quantize):UserWarning")


Pair = collections.namedtuple("Pair", "x y")


@dataclass
class Record:
    x: Any
    y: Any = None


class Attributes(dict):
    """The dict whose keys are attributes, as many write it. Python 3.10 itself cannot pickle it."""

    __getattr__ = dict.__getitem__


class Plain:
    def __init__(self, x):
        self.x = x


def slot_of(nbytes):
    """Memory that begins at a cache line, full of what an earlier batch left."""
    raw = np.full(nbytes + 64, 0xAB, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes]


def buffers_of(encoded, memory):
    """What the main process finds in the slot, and what comes through the pipe."""
    piped = iter(encoded.buffers)
    buffers = [
        np.frombuffer(bytearray(next(piped)), np.uint8) if offset < 0 else memory[offset : offset + nbytes]
        for offset, nbytes in encoded.places
    ]
    assert next(piped, None) is None
    return buffers


def receive(encoded, memory):
    """What the main process makes of it."""
    return decode(encoded.pickled, buffers_of(encoded, memory))


def through(obj, nbytes):
    memory = None if nbytes is None else slot_of(nbytes)
    return receive(encode(obj, SlotWriter(memory)), memory)


SLOTS = [None, 0, 100, 5_000, 1 << 22]


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and a.shape == b.shape and a.layout == b.layout
        if a.layout is not torch.strided:
            a, b = a.to_dense(), b.to_dense()
        if a.is_quantized:
            a, b = a.int_repr(), b.int_repr()
        a, b = (t.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
        assert bytes(a.view(torch.uint8).numpy()) == bytes(b.view(torch.uint8).numpy())
    elif isinstance(a, np.ndarray):
        # In band NumPy itself makes the byte order native.
        assert a.dtype.newbyteorder("=") == b.dtype.newbyteorder("=") and a.shape == b.shape
        if a.dtype.hasobject:
            assert a.tolist() == b.tolist()
        else:
            assert _values(a) == _values(b)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, (Record, Plain)):
        assert_same(vars(a), vars(b))
    else:
        assert a == b or (a != a and b != b)


def _values(array):
    """The bits of the values, without what lies between the fields of a structure."""
    if array.dtype.names:
        return b"".join(_values(array[name]) for name in array.dtype.names)
    return array.astype(array.dtype.newbyteorder("=")).tobytes()


STRUCTURE = np.dtype([("id", "<i8"), ("at", "M8[ns]"), ("name", "U7"), ("xy", ">f4", (2, 3))])
PLAIN = [*"?bBhHiIlLqQefdFD", ">f4", ">i8"]
DTYPES = [*PLAIN, "g", "G", "M8[s]", "m8[ns]", "M8[D]", "S5", "U7", "V3", STRUCTURE]
DTYPES.append(np.dtype([("a", "i1"), ("b", "f8")], align=True))
SHAPES = [(), (0,), (1,), (3, 0, 2), (7,), (40, 3), (33, 17, 5)]


def an_array(dtype, shape, seed=0):
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 2 if dtype.kind == "?" else 100, (*shape, dtype.itemsize), np.uint8)
    if dtype.kind == "U" or dtype.fields:
        raw[...] = 0  # other bytes are no text
        raw[..., 0] = 65
    return raw.view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_of_every_dtype_and_shape_and_plain_ones_without_the_user_s_reductions(dtype):
    arrays = [an_array(dtype, shape) for shape in SHAPES]
    assert all(map(is_plain, arrays)) == (dtype in PLAIN)
    for nbytes in SLOTS:
        assert_same(arrays, through(arrays, nbytes))
        memory = None if nbytes is None else slot_of(nbytes)
        encoded = pack_result(Result(0, 0, arrays, 3, seconds=0.5), SlotWriter(memory))
        if dtype in PLAIN:
            assert encoded is not None
            got = unpack_result(0, 0, receive(encoded, memory), buffers_of(encoded, memory))
            assert_same(arrays, got.batch)
            assert [array.dtype for array in got.batch] == [array.dtype for array in arrays]
            assert (got.samples, got.seconds) == (3, 0.5) and all(array.flags.writeable for array in got.batch)


OTHERS = [{"x": np.zeros(3)}, [np.zeros(3)], 1, np.zeros((4, 4)).T, np.zeros(8)[::2], np.ma.array([1, 2])]
OTHERS += [np.zeros(3, object), np.float32(3), torch.zeros(3)]


@pytest.mark.parametrize("batch", OTHERS, ids=lambda batch: type(batch).__name__)
def test_everything_else_is_not_plain(batch):
    assert not is_plain(batch)


TORCH_NAMES = """
    float16 float32 float64 bfloat16 complex32 complex64 complex128 bool uint8 int8 int16 int32 int64
    uint16 uint32 uint64 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e8m0fnu
"""
TORCH_DTYPES = [getattr(torch, name) for name in TORCH_NAMES.split() if hasattr(torch, name)]


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_tensors_of_every_dtype_and_shape(dtype):
    tensors = []
    for shape in SHAPES:
        raw = an_array("?" if dtype is torch.bool else "u1", (int(np.prod(shape)) * dtype.itemsize,))
        tensors.append(
            torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)
            if raw.size
            else torch.empty(shape, dtype=dtype)
        )
    for nbytes in SLOTS:
        got = through(tensors, nbytes)
        assert_same(tensors, got)
        for tensor in got:
            tensor.copy_(tensor.clone())  # the user may write to a batch


LAYOUTS = {
    "gaps": lambda a: a[::2, 1:],
    "backwards": lambda a: a[::-1, ::-1],
    "transposed": lambda a: a.transpose(2, 0, 1),
    "transposed gaps": lambda a: a[::2].transpose(1, 2, 0)[:, ::-1],
    "fortran": np.asfortranarray,
    "broadcast": lambda a: np.broadcast_to(a[0], (5, *a.shape[1:])),
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
    "unaligned": lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
    "a scalar": lambda a: a[1, 2, 3],
    "0-d": lambda a: a[1, 2, 3, ...],
    "one column": lambda a: a[:, 0, 0],
}
IN_ITS_SLOT = {"gaps", "backwards", "transposed", "transposed gaps", "fortran", "one column"}


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", ">i2", STRUCTURE, "U7"], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_arrays_of_every_layout_and_neither_gaps_nor_dates_keep_one_out_of_its_slot(layout, dtype):
    array = LAYOUTS[layout](an_array(dtype, (300 if dtype in ("f8", "M8[s]") else 30, 20, 10)))
    for nbytes in SLOTS:
        assert_same(array, through(array, nbytes))
    if dtype in ("f8", "M8[s]") and layout in IN_ITS_SLOT:
        memory = slot_of(1 << 20)
        encoded = encode(array, SlotWriter(memory))
        assert [offset for offset, _ in encoded.places] == [0] and len(encoded.pickled) < 500
        got = receive(encoded, memory)
        assert np.shares_memory(got, memory)
        assert got.strides == array.strides or layout not in ("transposed", "fortran")


@pytest.mark.parametrize("nbytes", SLOTS)
def test_tensors_of_every_layout(nbytes):
    base = torch.arange(6000.0).reshape(30, 20, 10)
    wave = torch.arange(4000).to(torch.complex64)
    tensors = [
        *(base[::2, 1:], base.permute(2, 0, 1), base[:, 0, 0], base[1, 2, 3], base[0:0], base.expand(2, 30, 20, 10)),
        *(wave.conj(), wave.conj().imag, wave.real, torch._neg_view(base)),
        base.to_sparse(),
        base[0].to_sparse_csr(),
        torch.quantize_per_tensor(base, 0.5, 3, torch.qint8),
    ]
    assert_same(tensors, through(tensors, nbytes))
    images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert through(images, nbytes).is_contiguous(memory_format=torch.channels_last)
    # One element is contiguous whatever its stride: the last batch of a batchify function that takes a column.
    columns = [torch.arange(2.0)[1:].as_strided((1,), (2,), 1), torch.ones(1, 4, 6)[:, 0, 0], torch.zeros(0, 4)[:, 0]]
    columns += [torch.ones(1, dtype=torch.bfloat16).as_strided((1, 1), (7, 5)), torch.ones(1, 3)[:, :1]]
    assert_same(columns, through(columns, nbytes))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ragged = torch.nested.nested_tensor([torch.zeros(3000), torch.ones(4000)])
        assert_same(list(ragged.unbind()), list(through(ragged, nbytes).unbind()))


sizes = st.sampled_from([0, 1, 3, 31, 33, 300, 1025, 3000])
arrays = st.builds(
    lambda dtype, n, seed: an_array(dtype, (n,), seed), st.sampled_from(DTYPES), sizes, st.integers(0, 9)
)
tensors = st.builds(lambda dtype, n: torch.zeros(n).to(dtype) + 1, st.sampled_from(TORCH_DTYPES[:13]), sizes)
objects = st.builds(lambda values: np.array(values, dtype=object), st.lists(st.text(max_size=3), max_size=5))
others = st.sampled_from([b"x" * 20_000, "y" * 20_000, bytearray(9000), np.float32(2), np.datetime64("2020"), Ellipsis])
scalars = [st.none(), st.booleans(), st.integers(-(2**200), 2**200), st.floats(), st.complex_numbers()]
texts = [st.text(max_size=20), st.binary(max_size=20), st.sets(st.integers(), max_size=4)]
changed = [arrays.map(lambda a: a[::2]), arrays.map(lambda a: np.stack([a, a]).T)]
leaves = st.one_of(arrays, tensors, objects, others, *changed, *scalars, *texts)


def nest(inner):
    return st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(), st.none()), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(
            Attributes if sys.version_info >= (3, 11) else dict
        ),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Record, inner, inner),
        st.builds(Plain, inner),
    )


@settings(max_examples=max(250 * (settings.default.max_examples // 100), 12))
@given(obj=st.recursive(leaves, nest, max_leaves=12), nbytes=st.sampled_from([*SLOTS, 20_000]))
def test_random_nested_structures(obj, nbytes):
    assert_same(obj, through(obj, nbytes))


@settings(max_examples=80, deadline=None)
@given(obj=st.recursive(leaves, nest, max_leaves=8))
def test_random_datasets_are_published_as_they_are(obj):
    encoded = publish(obj)
    assert_same(obj, decode(encoded.pickled, [np.frombuffer(bytearray(raw), np.uint8) for raw in encoded.buffers]))


@pytest.mark.parametrize("nbytes", SLOTS)
@pytest.mark.parametrize("count", [10, 50, 5000])
def test_the_same_array_twice_stays_one_and_views_keep_their_values(count, nbytes):
    array, tensor = np.zeros(count), torch.zeros(count)
    gaps = np.zeros((count, 2))[:, 0]
    a, b, t, u, g, h = through([array, array, tensor, tensor, gaps, gaps], nbytes)
    assert a is b and t is u and g is h
    a[0] = t[0] = 5
    assert (b[0], u[0]) == (5, 5)
    base, like = np.arange(4000), torch.arange(4000)
    views = [base[:3000], base[1000:], base[::2], like[:3000], like[1000:]]
    assert_same(views, through(views, nbytes))  # which overlap


# -- where the bytes go ---------------------------------------------------------------------------------------


def test_a_batch_made_in_its_slot_is_not_copied_unless_that_is_read_only():
    memory = slot_of(100_000)
    writer = SlotWriter(memory)
    x, y = writer.empty((10, 300), "f4"), writer.empty((10,), np.int64)
    x[...], y[...] = 3, 4
    elsewhere = np.full(500, 5.0)
    encoded = encode({"x": x, "part": x[2:4], "y": y, "elsewhere": elsewhere}, writer)
    assert encoded.buffers == ()
    # x; its part, where it lies; elsewhere, behind y at the next cache line. y is too small for a place.
    assert encoded.places == ((0, 12_000), (2400, 2400), (12_160, 4000))
    got = receive(encoded, memory)
    assert np.shares_memory(got["x"], memory) and np.shares_memory(got["part"], got["x"])
    assert_same(got, {"x": x, "part": x[2:4], "y": y, "elsewhere": elsewhere})
    assert writer.wanted == 12_160 + 4032  # whole cache lines
    assert np.shares_memory(SlotWriter(memory[:6400]).empty((100, 16), "f4"), memory), "it fills the slot"
    memory = slot_of(1 << 16)
    encoded = encode(torch.ones(5000), SlotWriter(memory))
    memory.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        receive(encoded, memory)[0] = 2


def test_every_array_in_a_slot_begins_at_a_cache_line_and_nothing_is_written_beyond_it():
    memory = slot_of(3 << 14)
    memory[:] = 7
    writer = SlotWriter(memory[1 << 14 : 2 << 14])
    made = [writer.empty((n,), dtype) for n, dtype in ((1, "u1"), (77, "f8"), (300, "u1"), (3, "c16"), (9000, "u1"))]
    for array in made:
        array[...] = 1
    encoded = encode([*made, *(np.ones(n, np.uint8) for n in (257, 1000, 5000, 300))], writer)
    assert all(array.ctypes.data % 64 == 0 for array in made)
    writer.empty((9000,), np.uint8)[...] = 1  # there is no room for that, nor for the array of 5000
    places = encoded.places
    assert all(offset % 64 == 0 for offset, _ in places) and len(places) == 6
    ends = [offset + nbytes for offset, nbytes in places]
    assert all(end <= start for end, (start, _) in zip(ends, places[1:], strict=False))
    assert (memory[: 1 << 14] == 7).all() and (memory[2 << 14 :] == 7).all()


@pytest.mark.parametrize("nbytes", [0, 100, 30_000])
def test_a_slot_that_is_too_small_says_how_large_the_next_must_be(nbytes):
    memory = slot_of(nbytes)
    writer = SlotWriter(memory)
    x = writer.empty((50, 100), "f4")
    x[...] = 1
    batch = [x, np.ones((50, 100), "f4"), torch.ones(50, 100)]
    encoded = encode(batch, writer)
    assert_same(batch, receive(encoded, memory))
    assert len(encoded.buffers) == (2 if nbytes == 30_000 else 3)
    assert 60_000 <= writer.wanted < 60_000 + 3 * 64  # and no larger
    large = slot_of(writer.wanted)
    again = SlotWriter(large)
    x = again.empty((50, 100), "f4")
    x[...] = 1
    assert encode([x, *batch[1:]], again).buffers == ()


def test_small_arrays_go_in_band_large_ones_and_objects_with_buffers_out_of_it():
    small, medium, large = (np.zeros(n, np.uint8) for n in (IN_SLOT_BYTES - 1, IN_SLOT_BYTES, IN_BAND_BYTES))
    assert encode([small, medium]).places == ()
    assert encode([small, medium, large]).places == ((-1, IN_BAND_BYTES),)
    writer = SlotWriter(slot_of(1 << 20))
    assert [n for _, n in encode([small, medium, large], writer).places] == [IN_SLOT_BYTES, IN_BAND_BYTES]
    assert through(Plain(open), None).x is open  # and functions go by name
    payload = pickle.PickleBuffer(bytearray(b"z" * 20_000))
    memory = slot_of(1 << 16)
    encoded = encode([payload], SlotWriter(memory))
    assert [n for _, n in encoded.places] == [20_000]
    assert bytes(receive(encoded, memory)[0]) == b"z" * 20_000


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", "U3", "U0", STRUCTURE, "O"], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (4, 0), (4, 3)])
def test_empty_is_numpy_s(dtype, shape):
    for memory in (None, slot_of(10), slot_of(10_000)):
        array = SlotWriter(memory).empty(shape, dtype)
        assert (array.shape, array.dtype) == (shape, np.empty(shape, dtype).dtype)
        assert array.flags.writeable and array.flags.c_contiguous
        array[...] = np.zeros(shape, dtype)


@pytest.mark.parametrize("change", [lambda t: t * 2, torch.Tensor.to_sparse])
def test_a_tensor_with_a_gradient_function_is_refused_with_advice(change):
    with pytest.raises(ValueError, match=r"gradient function.*\.detach\(\)"):
        encode({"x": [change(torch.ones(3).requires_grad_())]})


@pytest.mark.parametrize("change", [torch.Tensor.requires_grad_, torch.nn.Parameter])
@pytest.mark.parametrize("size", [3, 10_000])
def test_a_leaf_that_requires_grad_is_one_behind_the_pipe_too(change, size):
    leaf = change(torch.ones(2, size).t())
    found, again = through([leaf, leaf], None)
    assert found is again and type(found) is type(leaf) and found.is_leaf and found.requires_grad
    assert torch.equal(found, leaf) and found.stride() == leaf.stride()


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_pickled_does_not_wait_for_the_collector(fails):
    class Watched(np.ndarray[Any, Any]):
        def __reduce__(self):
            return len, (threading.Lock() if fails else "",)

    array = np.zeros(100_000).view(Watched)
    gone = weakref.ref(array)
    gc.disable()
    try:
        with pytest.raises(TypeError, match="cannot pickle") if fails else contextlib.nullcontext():
            encode([array, np.zeros(100_000)], SlotWriter(slot_of(100_000)))
        del array
        assert gone() is None
    finally:
        gc.enable()


# -- a class that a worker names is the very class of this process ----------------------------------------------------


class Outer:
    class Inner:
        pass


def make_class():
    class Local:
        pass

    return Local


def resolved(cls):
    function, arguments = class_reference(cls)
    assert function is resolve_class
    return resolve_class(*arguments)


def test_what_is_found_under_its_name_is_what_still_has_it(monkeypatch):
    outer = Outer
    assert all(map(is_findable, (outer, Outer.Inner, make_class, len)))
    assert not any(map(is_findable, (make_class(), lambda: None)))
    monkeypatch.setattr(sys.modules[__name__], "Outer", make_class())
    assert not is_findable(outer)


def test_classes_arrive_by_name_or_by_their_tracker_or_by_their_address():
    assert resolved(Outer) is Outer and resolved(Outer.Inner) is Outer.Inner
    cls = make_class()
    assert resolved(cloudpickle.loads(cloudpickle.dumps(cls))) is cls
    other = make_class()
    assert resolved(cls) is cls and resolved(other) is other
    with pytest.raises(AttributeError, match=r"Local, used by a worker .* top level of a module"):
        resolve_class(cls.__module__, cls.__qualname__, None, 1)
    only = type("Only", (), {})  # the only one of its name, whatever its address
    assert resolve_class(only.__module__, only.__qualname__, None, 1) is only


def test_a_class_that_was_looked_for_is_found_at_once_from_then_on_and_is_not_kept_alive():
    """To look for it among all classes would cost each batch 15 ms."""
    cls = make_class()
    assert resolved(cls) is cls
    assert "_all_classes" not in calls_of(functools.partial(resolved, cls))
    gone = weakref.ref(cls)
    del cls
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(("base", "expected"), [(object, "first"), (ValueError, "second")])
def test_a_cell_that_runs_again_takes_the_name_of_an_error_only(monkeypatch, base, expected):
    """The loop catches errors under their new name; batches that are on their way keep their class."""
    made = {
        name: type("Cell", (base,), {"__module__": "__main__", "__qualname__": "Cell"}) for name in ("first", "second")
    }
    monkeypatch.setattr(sys.modules["__main__"], "Cell", made["second"], raising=False)
    assert resolved(made["first"]) is made[expected] and resolved(made["second"]) is made["second"]


# -- an exception arrives as itself, or as its text; nothing here raises ----------------------------------------------


class OwnNew(Exception):
    def __new__(cls, *, code):
        error = super().__new__(cls)
        error.code = code
        return error

    def __init__(self, *, code):
        super().__init__(f"code {code}")


class Prefixed(ValueError):
    """Made again from its arguments, it would have another text."""

    def __init__(self, text):
        super().__init__(f"text: {text}")


class Longer(Exception):
    """Made again from its arguments, it would have one more, and the same text."""

    def __init__(self, *args):
        super().__init__(*args, "more")

    def __str__(self):
        return "the same"


class EmptyNew(Exception):
    """Its ``__new__`` does not keep the arguments."""

    def __new__(cls, *_):
        return super().__new__(cls)

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


class Nasty(Exception):
    """Every method of it raises."""

    def __str__(self):
        raise RuntimeError("no text")

    def __reduce__(self):
        sys.exit(1)

    def __getattr__(self, name):
        raise RuntimeError(name)


class HoldsLock(Exception):
    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()
        self.kept = "kept"


def raised(error):
    try:
        raise error
    except BaseException as caught:
        return caught


def sent(error):
    encoded = encode_error(raised(error))
    return decode_error(pickle.loads(pickle.dumps(encoded)))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x", 3),
        KeyError("k"),
        FileNotFoundError(2, "No such file", "name.txt"),
        UnicodeDecodeError("utf-8", b"abc\xff", 3, 4, "invalid"),
        TwoArguments(1, 2),
        StopIteration(5),
        SystemExit(3),
        OwnNew(code=7),
        Prefixed("x"),
        Longer(1),
        EmptyNew(1, 2),
        ModuleNotFoundError("No module named 'x'", name="x"),
        ValueError(np.arange(100_000)),
        ExceptionGroup("several", [ValueError(1)]) if sys.version_info >= (3, 11) else ValueError(1),  # noqa: F821
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_arrives_as_itself(error):
    got = sent(error)
    assert type(got) is type(error)
    assert (str(got), [repr(arg) for arg in got.args]) == (str(error), [repr(arg) for arg in error.args])
    assert vars(got) == vars(error)
    assert getattr(got, "name", None) == getattr(error, "name", None)  # not in ``vars``


def test_what_cannot_be_pickled_stays_behind_alone_and_where_it_cannot_arrive_its_text_does():
    got = sent(HoldsLock("text"))
    assert type(got) is HoldsLock
    assert (str(got), got.kept, hasattr(got, "lock")) == ("text", "kept", False)
    encoded = encode_error(raised(type("Local", (Exception,), {"__module__": "nowhere"})("text")))
    gc.collect()  # the class is gone
    got = decode_error(encoded)
    assert isinstance(got, SampleReadError) and str(got) == "Local: text"
    got = decode_error(EncodedError(b"no pickle", "KeyError: 'k'", "Traceback: there", ("note",)))
    assert isinstance(got, SampleReadError) and str(got) == "KeyError: 'k'" and notes_of(got) == ["note"]
    got = sent(Nasty("x"))  # does no harm
    assert type(got) is Nasty or isinstance(got, SampleReadError)


def test_the_worker_s_traceback_and_the_notes_travel_and_the_remedy_for_cuda_after_a_fork(monkeypatch):
    error = raised(ValueError("x"))
    add_note(error, "a note")
    got = sent(error)
    assert isinstance(got.__cause__, WorkerTraceback) and "in raised" in str(got.__cause__)
    assert notes_of(got) == ["a note"]
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(RuntimeError, match="re-initialize CUDA") as caught:
        torch.cuda._lazy_init()  # torch's own words, without a GPU
    arrived = decode_error(encode_error(caught.value))
    assert type(arrived) is RuntimeError and str(arrived) == str(caught.value)
    (note,) = arrived.__notes__
    assert "give the loader device=" in note and 'start_method="spawn"' in note
    assert notes_of(sent(ValueError("the repository was forked"))) == []
