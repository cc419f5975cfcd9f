"""The default rules: what samples become a batch and how, what is refused with advice, and `empty` for the user's."""

import dataclasses
import pickle
import subprocess
import sys
import threading
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping, MutableMapping
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from calls import calls_of
from conftest import covering
from hypothesis import assume, given
from hypothesis.extra import numpy as npst
from samples import halves

from sharded_loader import ShardedDataLoader, SimpleDataset, empty, split_data
from sharded_loader.batchify import List, Pad, Stack, Tuple, default_batchify_fn
from sharded_loader.batching import default
from sharded_loader.batching.default import COPIED_AT_ONCE, COPIED_BYTES, JOINED_BYTES, DefaultBatchify
from sharded_loader.batching.protocol import BatchifyError, assembler, call_with_empty, in_fields, ragged
from sharded_loader.batching.tree import as_numpy, empty_tensor, is_plain
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import SlotWriter, encode
from sharded_loader.torch import DataLoader

MyNT = namedtuple("MyNT", "data label")


Flag = type("Flag", (int,), {})


@dataclasses.dataclass(frozen=True)
class Sample:
    tokens: list
    name: str


def test_structures_are_kept_text_and_objects_stay_apart_and_what_offers_an_array_is_one():
    batch = default_batchify_fn([{"a": (1, np.zeros(2)), "n": "x"}, {"a": (2, np.ones(2)), "n": "y"}])
    assert type(batch) is dict and type(batch["a"]) is list and batch["n"] == ["x", "y"]
    assert batch["a"][0].tolist() == [1, 2] and batch["a"][1].shape == (2, 2)
    assert type(default_batchify_fn([OrderedDict(a=1)])) is OrderedDict
    named = default_batchify_fn([MyNT(1, "a"), MyNT(2, "b")])
    assert type(named) is MyNT and named.data.tolist() == [1, 2] and named.label == ["a", "b"]
    data = default_batchify_fn([Sample([1, 2], "a"), Sample([3, 4], "b")])
    assert type(data) is Sample and data.tokens.tolist() == [[1, 2], [3, 4]] and data.name == ["a", "b"]
    fields = default_batchify_fn([[np.zeros(2), "a"], [np.ones(2), "b"]])  # lists that hold more than numbers
    assert fields[0].shape == (2, 2) and fields[1] == ["a", "b"]

    class Image:
        __array_interface__ = np.arange(4, dtype=np.uint8).reshape(2, 2).__array_interface__

    marker = object()
    for samples in (["a", "b"], [b"a", b"b"], [None, "b", marker]):
        assert default_batchify_fn(samples) == samples
    assert default_batchify_fn([(1, None), (2, None)])[1] == [None, None]
    assert default_batchify_fn([Image(), Image()]).shape == (2, 2, 2)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([np.zeros(3), np.zeros(5)], r"\(3,\).*\(5,\).*Pad"),
        ([torch.zeros(3), torch.zeros(5)], r"\(3,\).*\(5,\).*Pad"),
        ([[1, 2, 3], [1, 2, 3, 4, 5]], r"\(3,\).*\(5,\).*Pad"),
        ([(0, np.zeros(1)), (0, np.zeros(2))], r"in field \[1\]"),
        ([{"t": [1]}, {"t": [1, 2]}], r"in field \['t'\]"),
        ([Sample([1], "a"), Sample([1, 2], "b")], r"in field \.tokens"),
        ([MyNT(1, ({"k": [1]},)), MyNT(1, ({"k": [1, 2]},))], r"in field \.label\[0\]\['k'\]"),
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
    with pytest.raises(ValueError, match=message) as caught:
        default_batchify_fn(samples)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    if "Pad" in message:
        with pytest.raises(ValueError, match=message):
            Stack()(samples)


def test_fields_of_a_subclass_follow_the_default_rules_and_its_constructor_takes_what_it_likes():
    class Tagged(DefaultBatchify):
        def assemble(self, samples, empty):
            return ["tag", super().assemble(samples, empty)]

    class Scaled(Stack):
        def __init__(self, factor, **more):
            super().__init__(**more)
            self.factor = factor

    tag, (first, second) = Tagged()([(1, "a"), (2, "b")])
    assert tag == "tag" and first.tolist() == [1, 2] and second == ["a", "b"]
    assert Scaled(factor=3, dtype="float32").factor == 3
    for make in (lambda: Pad(num_shards=2), lambda: Stack(use_shared_mem=True), lambda: List(3)):
        with pytest.raises(TypeError):
            make()


class CheckedWithSlots(dict):
    """As torchio's images: what it copies must be one sample."""

    __slots__ = ()

    def __copy__(self):
        assert isinstance(self["name"], str)
        return type(self)(self)


class Checked(CheckedWithSlots):
    tag = None

    def __copy__(self):
        again = super().__copy__()
        again.tag = self.tag
        return again


class OwnInit(dict):
    def __init__(self, name, x):
        super().__init__(name=name, x=x)

    def __reduce__(self):
        return type(self), (self["name"], self["x"])


class OnlySamples(dict):
    def __setitem__(self, key, value):
        assert not isinstance(value, list), "a sample, please"
        super().__setitem__(key, value)

    def __reduce__(self):
        return type(self), (dict(self),)


class NoUpdate(dict):
    def update(self, *args):
        raise TypeError("no")


class ReadOnly(Mapping):
    def __init__(self, name, x):
        self.held = {"name": name, "x": x}

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)

    def __getitem__(self, key):
        return self.held[key]


@dataclasses.dataclass
class CheckedFields:
    name: Any
    x: Any

    def __copy__(self):
        assert isinstance(self.name, str)
        return type(self)(self.name, self.x)


OF_USERS = {
    "checks in __copy__": lambda: Checked(name="a", x=np.zeros(2)),
    "inside another": lambda: OrderedDict(name="a", x=Checked(name="a", x=np.zeros(2))),
    "checks, has slots": lambda: CheckedWithSlots(name="a", x=np.zeros(2)),
    "own __init__": lambda: OwnInit("a", np.zeros(2)),
    "own __setitem__": lambda: OnlySamples(name="a", x=np.zeros(2)),
    "no update": lambda: NoUpdate(name="a", x=np.zeros(2)),
    "read-only, own __init__": lambda: ReadOnly("a", np.zeros(2)),
    "with a factory": lambda: defaultdict(int, name="a", x=np.zeros(2)),
    "UserDict": lambda: UserDict(name="a", x=np.zeros(2)),
}


@covering(make=OF_USERS, pool=("inline", "thread", "fork"), device=(None, "cpu"))
def test_mappings_of_the_users_become_what_torch_makes_of_them(make, pool, device):
    samples = [OF_USERS[make](), OF_USERS[make]()]
    wanted = torch.utils.data.default_collate(samples)
    for loader in (ShardedDataLoader, DataLoader):
        options = {"num_workers": int(pool != "inline"), "thread_pool": pool == "thread", "device": device}
        [batch] = loader(samples, 2, **options)
        assert type(batch) is type(wanted) and repr(dict(batch)) == repr(dict(wanted))


def test_a_counter_has_its_counts_and_not_their_sums():
    batch = default_batchify_fn([Counter(a=1), Counter(a=3)])
    assert type(batch) is Counter and batch["a"].tolist() == [1, 3]
    counts = Counter(a=np.array([1, 3]))
    assert next(iter(ShardedDataLoader([0], 1, collate_fn=lambda samples: counts)))["a"].tolist() == [1, 3]


class AsAttributes(dict):
    def __init__(self, **items):
        super().__init__(items)
        self.__dict__ = self


def test_items_that_are_attributes_too_are_those_of_the_batch():
    for loader in (ShardedDataLoader, DataLoader):
        [batch] = loader(range(2), 2, collate_fn=lambda samples: AsAttributes(x=np.array(samples)), device="cpu")
        assert type(batch) is AsAttributes and batch.x is batch["x"] and batch.x.tolist() == [0, 1]
    batch = default_batchify_fn([AsAttributes(x=1.0, n=7), AsAttributes(x=2.0, n=7)])
    assert (batch.x.tolist(), batch.n.tolist()) == ([1, 2], [7, 7])


class Held(MutableMapping):
    """Keeps its items in an attribute, which a copy shares."""

    def __init__(self, **items):
        self.items_held = items

    def __getitem__(self, key):
        return self.items_held[key]

    def __setitem__(self, key, value):
        self.items_held[key] = value

    def __delitem__(self, key):
        del self.items_held[key]

    def __iter__(self):
        return iter(self.items_held)

    def __len__(self):
        return len(self.items_held)


@pytest.mark.parametrize("given", [{}, {"num_workers": 1, "thread_pool": True}])
def test_the_samples_of_a_mapping_are_left_as_they_are(given):
    samples = [Held(x=1), Held(x=2)]
    with ShardedDataLoader(samples, 2, **given) as loader:
        for _ in range(2):
            [batch] = loader
            assert type(batch) is Held and batch["x"].tolist() == [1, 2]
    assert [dict(sample) for sample in samples] == [{"x": 1}, {"x": 2}]


def test_shards_of_a_mapping_are_apart():
    whole = Held(x=torch.arange(4))
    assert [shard["x"].tolist() for shard in split_data(whole, 2)] == [[0, 1], [2, 3]]
    assert whole["x"].tolist() == [0, 1, 2, 3]


def test_a_class_that_only_copies_samples_keeps_its_attributes():
    sample = Checked(name="a", x=np.zeros(2))
    sample.tag = "scan"
    batch = default_batchify_fn([sample, sample])
    assert batch.tag == "scan" and sample["name"] == "a" and type(sample["x"]) is np.ndarray
    batch = default_batchify_fn([CheckedFields("a", np.zeros(2))])
    assert type(batch) is CheckedFields and batch.name == ["a"] and batch.x.shape == (1, 2)


# -- what all batchify functions share ---------------------------------------------------------------------------------


def test_an_error_has_one_path_to_the_field_and_shows_each_shape_once():
    def fails(samples, empty):
        raise BatchifyError("no", "do")

    def len_of(samples, empty):
        return len(samples)

    def inner(samples, empty):
        return in_fields("x", "[{!r}]", [fails], [samples], empty)

    with pytest.raises(BatchifyError, match=r"^no, in field \[1\]\['x'\]: do$"):
        in_fields([0, 1], "[{}]", [len_of, inner], [[], []], np.empty)
    assert ragged([(1,), (2,), (1,)]).problem.endswith(
        "cannot be stacked: (1,) (sample 0 of the batch), (2,) (sample 1 of the batch)"
    )
    assert ragged([(k,) for k in range(7)]).problem.endswith("(4,) (sample 4 of the batch), ... (7 in all)")


def test_a_users_function_finds_the_memory_in_empty():
    allocator = Allocator()
    assert assembler(lambda samples: empty((2,), "i4"))([1, 2], allocator) is allocator.given[0]
    assert assembler(Stack())([1, 2], allocator) is allocator.given[1]


# -- `empty`: the batch's own memory for the user's functions, and plain memory everywhere else ------------------------


class Columns(SimpleDataset):
    """A bulk read of its own."""

    def get_batch(self, indices):
        batch = empty((len(indices), 64), np.int64)
        batch[...] = np.asarray(indices)[:, None]
        return batch


def lies_in(array, memory):
    start = memory.__array_interface__["data"][0]
    return start <= array.__array_interface__["data"][0] < start + memory.nbytes


def read(dataset, batchify_fn, slot):
    result = Reader(Job(dataset, batchify_fn, 0)).read(Task(0, 0, 0, 0, ([3, 1],), False), "worker 0", slot.empty)
    if result.error is not None:
        raise result.error
    return result.batch


@pytest.fixture
def memory():
    return np.zeros(1 << 16, np.uint8)


def test_a_users_function_writes_where_the_batch_is_read_but_no_sample_lies_there(memory):
    batch = read(range(10), halves, SlotWriter(memory))
    assert lies_in(batch["half"], memory) and batch["half"][:, 0].tolist() == [1.5, 0.5]
    batch = read([(i, i) for i in range(5)], Tuple(Stack(), halves), SlotWriter(memory))  # inside one of ours
    assert lies_in(batch[1]["half"], memory)
    assert lies_in(read(Columns(range(20)), None, SlotWriter(memory)), memory)
    samples = SimpleDataset(range(5)).transform(lambda index: empty((4,), "i8"))  # a cache may keep them
    assert not any(lies_in(sample, memory) for sample in read(samples, List(), SlotWriter(memory)))
    slot = SlotWriter(memory[:100])  # a full slot is no error
    batch = read(range(10), halves, slot)
    assert not lies_in(batch["half"], memory) and batch["half"][:, 0].tolist() == [1.5, 0.5]
    encode(batch, slot)
    assert slot.wanted == 512  # the next slot is that large


def test_every_pool_delivers_what_was_written(pool):
    with ShardedDataLoader(range(40), 8, batchify_fn=halves, pool=pool) as loader:
        held = list(loader)
    assert torch.cat([batch["half"] for batch in held]).equal(torch.arange(40.0)[:, None].expand(40, 64) / 2)


def test_outside_of_a_loader_it_is_numpys():
    array = empty((2, 3), "int16")
    assert (array.shape, array.dtype, array.flags.owndata) == ((2, 3), np.int16, True)
    assert empty(3).dtype == np.float64 and empty(np.int64(3)).shape == (3,) and empty(()).shape == ()
    assert empty(torch.Size([2, 0])).shape == (2, 0)
    for bad, error in ((-1, ValueError), ((2, -3), ValueError), (2.5, TypeError), ("ab", TypeError)):
        with pytest.raises(error):
            empty(bad)
    code = "import sys, sharded_loader; sharded_loader.empty(3); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_neither_odd_shapes_nor_a_loader_inside_a_batchify_fn_spoil_the_slot(memory):
    slot = SlotWriter(memory)

    def make(wanted):
        return [empty(shape, dtype) for shape, dtype in wanted]

    with pytest.raises(ValueError):
        call_with_empty(make, [((2, -3), float)], slot.empty)
    nothing, texts, objects, swapped = call_with_empty(
        make, [((-0, 4), float), (2, "S"), (2, object), ([2, 2], ">f8")], slot.empty
    )
    assert nothing.shape == (0, 4) and texts.dtype == "S1" and objects.tolist() == [None, None]
    assert lies_in(swapped, memory) and slot.wanted < 256

    def nested(samples):
        inner = next(iter(ShardedDataLoader(range(2), 2, batchify_fn=halves)))["half"]
        mine = empty((2, 64), np.float32)
        mine[...] = inner.numpy()
        assert not lies_in(inner.numpy(), memory)
        return mine

    assert lies_in(read(range(10), nested, SlotWriter(memory)), memory)


def test_calls_nest_and_are_undone_by_errors(memory):
    outer, inner = SlotWriter(memory[:512]), SlotWriter(memory[512:])

    def fails(size):
        assert lies_in(empty(size), memory[512:])
        raise KeyError

    def nests(size):
        with pytest.raises(KeyError):
            call_with_empty(fails, size, inner.empty)
        assert lies_in(empty(size), memory[:512])
        found = []
        thread = threading.Thread(target=lambda: found.append(empty(size)))
        thread.start()
        thread.join()
        assert not lies_in(found[0], memory)  # another thread makes no part of this batch

    call_with_empty(nests, 4, outer.empty)
    assert not lies_in(empty(4), memory)


# -- many values become one array or tensor: dtypes, memory that was given, and shapes that do not fit ----------------


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


@given(
    npst.arrays(
        npst.scalar_dtypes().filter(lambda d: d.kind in "biufc" and d.itemsize <= 16 and d.char not in "gG"),
        npst.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4),
    )
)
def test_stacking_rows_gives_the_array_back(array):
    assume(len(array))
    samples = [np.array(row) for row in array]
    stacked = default_batchify_fn.assemble(samples, np.empty)
    np.testing.assert_array_equal(stacked, array)
    assert stacked.dtype == array.dtype.newbyteorder("=")


# -- memory that is new, and memory that was given: the same batch, and the same errors -------------------------------


class Allocator:
    """As a slot: not `numpy.empty` itself."""

    def __init__(self):
        self.given = []

    def __call__(self, shape, dtype):
        self.given.append(np.empty(shape, dtype))
        return self.given[-1]


def outcome(samples, empty):
    try:
        return default_batchify_fn.assemble(samples, empty)
    except ValueError as error:
        return str(error)


def check_alike(samples):
    """New memory, and given memory that is written with joining, get what given memory gets without."""
    with mock.patch.object(default, "JOINED_BYTES", 0):
        given = outcome(samples, Allocator())
    for new in outcome(samples, np.empty), outcome(samples, Allocator()):
        if isinstance(given, str):
            assert new == given
            continue
        assert (new.dtype, new.shape, type(new)) == (given.dtype, given.shape, np.ndarray) and type(given) is np.ndarray
        np.testing.assert_array_equal(new, given)
        assert new.flags.writeable and new.flags.c_contiguous
        assert not any(np.shares_memory(new, sample) for sample in samples if isinstance(sample, np.ndarray))


ROW = np.arange(12, dtype=np.int16).reshape(3, 4)
ODD = {
    "alike": [ROW, ROW + 1],
    "another dtype": [ROW, ROW.astype(np.int32)],
    "another dtype of the same size": [ROW, ROW.view(np.uint16)],
    "another byte order": [ROW, ROW.astype(">i2")],
    "all of the other byte order": [ROW.astype(">i2"), ROW.astype(">i2")],
    "another shape of the same size": [ROW, ROW.reshape(4, 3)],
    "another number of axes": [ROW, ROW.reshape(12)],
    "another size": [ROW, ROW[:2]],
    "a column": [ROW.reshape(12), ROW.reshape(12, 1)],
    "transposed": [ROW.T, ROW.T],
    "transposed, the second one": [ROW, np.asfortranarray(ROW)],
    "gaps": [ROW[:, ::2], ROW[:, ::2]],
    "backwards": [ROW[::-1], ROW],
    "repeated": [np.broadcast_to(ROW[:1], (3, 4)), ROW],
    "read-only": [np.frombuffer(ROW.tobytes(), np.int16).reshape(3, 4), ROW],
    "no axes": [ROW[0, 0:1].reshape(()), np.array(7, np.int16)],
    "no axes, and one": [np.array(7, np.int16), np.array([7], np.int16)],
    "empty": [ROW[:0], ROW[:0]],
    "empty, another shape": [ROW[:0], ROW[:, :0]],
    "a subclass": [ROW.view(np.matrix), ROW],
    "a subclass of recarray": [ROW.view(np.recarray), ROW],
    "dates": [np.array(["2020-01-01"], "M8[D]"), np.array(["2021-01-01"], "M8[D]")],
    "dates of another unit": [np.array(["2020-01-01"], "M8[D]"), np.array(["2021-01-01"], "M8[s]")],
    "structures": [np.zeros(2, [("x", "i4"), ("y", "f8")]), np.ones(2, [("x", "i4"), ("y", "f8")])],
    "strings": [np.array(["a", "bc"]), np.array(["d", "ef"])],
    "strings of another width": [np.array(["a", "bc"]), np.array(["def", "g"])],
    "objects": [np.array([1, "x"], object), np.array([2, "y"], object)],
    "bool": [ROW > 3, ROW > 5],
    "complex": [ROW + 1j, ROW - 1j],
    "long double": [ROW.astype("g"), ROW.astype("g")],
    "an int beside an array": [ROW[0], [1, 2, 3, 4]],
    "a masked array": [np.ma.masked_array([1, 2], [True, False]), np.array([1, 2])],
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("first", [0, 1])
def test_new_and_given_memory_get_the_same_batch_or_the_same_error(odd, first):
    check_alike([*ODD[odd][first:], *ODD[odd][:first]])
    check_alike([*ODD[odd][:1] * 20, *ODD[odd][first:]])


@pytest.mark.parametrize("nbytes", [1, 100, COPIED_BYTES, COPIED_BYTES + 1, JOINED_BYTES, JOINED_BYTES + 1])
def test_samples_of_any_size_are_stacked_alike(nbytes):
    samples = [np.full(nbytes, number, np.uint8) for number in range(40)]
    check_alike(samples)
    names = calls_of(lambda: default_batchify_fn.assemble(samples, np.empty))
    assert ("join" in names) == (nbytes <= JOINED_BYTES)  # the fast path is noticed if it is lost
    names = calls_of(lambda: default_batchify_fn.assemble(samples, Allocator()))
    assert ("join" in names) == (nbytes <= COPIED_BYTES)


def test_large_batches_are_not_copied_a_second_time_and_rows_whose_sizes_add_up_by_chance_are_ragged():
    for more, joins in ((0, True), (1, False)):
        samples = [np.zeros(COPIED_BYTES, np.uint8)] * (COPIED_AT_ONCE // COPIED_BYTES + more)
        assert ("join" in calls_of(lambda: default_batchify_fn.assemble(samples, Allocator()))) == joins  # noqa: B023
    for shapes in ([2, 1, 3], [(2, 3), (2, 4)], [(2,), ()]):
        with pytest.raises(ValueError, match="different shapes"):
            default_batchify_fn([np.zeros(shape) for shape in shapes])


# -- tensors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float16, torch.int32, torch.bool])
@pytest.mark.parametrize("shape", [(), (3,), (0, 2)])
def test_tensors_keep_their_dtype_in_memory_that_was_given(dtype, shape):
    allocator = Allocator()
    tensors = [torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)]
    batch = default_batchify_fn(tensors)
    assert batch.dtype == dtype and batch.float().tolist() == torch.stack([t.float() for t in tensors]).tolist()
    result = default_batchify_fn.assemble(tensors, allocator)
    pointer = result.data_ptr() if isinstance(result, torch.Tensor) else result.ctypes.data
    (given,) = allocator.given
    assert pointer == given.ctypes.data or not given.size


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
def test_tensors_of_odd_kinds_stack_or_are_refused_with_advice():
    sparse, labelled = torch.eye(2).to_sparse(), torch.ones(2).as_subclass(type("Labelled", (torch.Tensor,), {}))
    assert default_batchify_fn([sparse, sparse]).is_sparse
    assert type(default_batchify_fn([labelled, labelled])) is type(labelled)
    for sample in (torch.nested.nested_tensor([torch.ones(2)]), torch.eye(3).to_sparse_csr()):
        with pytest.raises(ValueError, match="List"):
            default_batchify_fn([sample, sample])
    with pytest.raises(ValueError, match=r"\(2,\) \(sample 0 of the batch\), \(3,\) \(sample 1 of the batch\)"):
        default_batchify_fn([torch.ones(2), torch.ones(3)])


@pytest.mark.last
def test_tensors_without_memory_stack():
    meta = torch.zeros(2, device="meta")
    assert default_batchify_fn([meta, meta]).shape == (2, 2)


@pytest.mark.parametrize("switch", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [0, 1])
def test_a_tensor_that_requires_grad_is_an_error_whatever_autograd_does(switch, place):
    tensors = [torch.ones(2), torch.ones(2)]
    tensors[place] = torch.ones(2, requires_grad=True)
    with switch(), pytest.raises(ValueError, match=rf"requires grad \(sample {place} of the batch\).*detach"):
        default_batchify_fn.assemble(tensors, np.empty)
    with switch():
        assert default_batchify_fn.assemble([one.detach() for one in tensors], np.empty).tolist() == [[1, 1], [1, 1]]


MIXED = {
    "dtypes": [torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.float64)],
    "conjugates": [torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j])],
    "negatives": [torch.tensor([1 + 2j]).conj().imag, torch.tensor([3.0])],
    "transposed": [torch.arange(6).reshape(2, 3).t(), torch.arange(6).reshape(3, 2)],
    "repeated": [torch.ones(1).expand(4), torch.zeros(4)],
    "numbers": [torch.tensor(1.5), torch.tensor(2.5)],
}


@pytest.mark.parametrize("what", MIXED)
def test_tensors_of_any_kind_stack_as_torch_stacks_them(what):
    tensors = MIXED[what]
    joint = torch.promote_types(tensors[0].dtype, tensors[1].dtype)
    wanted = torch.stack([one.to(joint) for one in tensors])
    found = default_batchify_fn(tensors)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensor_and_an_array_over_the_same_memory(dtype):
    array, tensor = empty_tensor((3, 2), dtype, np.empty)
    tensor.fill_(1)
    assert is_plain([tensor]) and tensor.shape == (3, 2) and tensor.dtype == dtype
    assert (array is None) == (dtype is torch.bfloat16)
    if array is not None:
        assert (array == 1).all() and np.shares_memory(array, as_numpy(tensor))
