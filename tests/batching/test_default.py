"""The default rules: what samples become a batch, and what is refused with the field, the shapes and advice."""

import dataclasses
import pickle
import subprocess
import sys
import threading
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from conftest import covering
from samples import halves

from sharded_loader import ShardedDataLoader, SimpleDataset, empty
from sharded_loader.batchify import List, Pad, Stack, Tuple, default_batchify_fn
from sharded_loader.batching.default import DefaultBatchify
from sharded_loader.batching.protocol import BatchifyError, assembler, call_with_empty, fast_method, in_fields, ragged
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import SlotWriter, encode
from sharded_loader.torch import DataLoader

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
    fields = default_batchify_fn([[np.zeros(2), "a"], [np.ones(2), "b"]])  # lists that hold more than numbers
    assert fields[0].shape == (2, 2) and fields[1] == ["a", "b"]


def test_text_and_objects_stay_apart_and_what_offers_an_array_is_one():
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


class Checked(dict):
    """As torchio's images: what it copies must be one sample."""

    tag = None

    def __copy__(self):
        assert isinstance(self["name"], str)
        again = type(self)(self)
        again.tag = self.tag
        return again


class CheckedWithSlots(dict):
    __slots__ = ()

    def __copy__(self):
        assert isinstance(self["name"], str)
        return type(self)(self)


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


def test_a_class_that_only_copies_samples_keeps_its_attributes():
    sample = Checked(name="a", x=np.zeros(2))
    sample.tag = "scan"
    batch = default_batchify_fn([sample, sample])
    assert batch.tag == "scan" and sample["name"] == "a" and type(sample["x"]) is np.ndarray
    batch = default_batchify_fn([CheckedFields("a", np.zeros(2))])
    assert type(batch) is CheckedFields and batch.name == ["a"] and batch.x.shape == (1, 2)


# -- what all batchify functions share ---------------------------------------------------------------------------------


class Base:
    def one(self): ...
    def many(self): ...


class OverridesOne(Base):
    def one(self): ...


class KnowsTheOverride(OverridesOne):
    def many(self): ...


class MixedInBehind(OverridesOne, Base):
    pass


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (Base, Base.many),
        (OverridesOne, None),
        (KnowsTheOverride, KnowsTheOverride.many),
        (MixedInBehind, None),
        (object, None),
    ],
)
def test_a_fast_method_is_used_only_if_it_knows_the_override(kind, found):
    assert fast_method(kind, "many", ["one"]) is found


def test_fields_of_fields_are_one_path():
    def fails(samples, empty):
        raise BatchifyError("no", "do")

    def len_of(samples, empty):
        return len(samples)

    def inner(samples, empty):
        return in_fields("x", "[{!r}]", [fails], [samples], empty)

    with pytest.raises(BatchifyError, match=r"^no, in field \[1\]\['x'\]: do$"):
        in_fields([0, 1], "[{}]", [len_of, inner], [[], []], np.empty)


def test_each_shape_is_shown_once_with_the_first_sample_that_has_it():
    assert ragged([(1,), (2,), (1,)]).problem.endswith(
        "cannot be stacked: (1,) (sample 0 of the batch), (2,) (sample 1 of the batch)"
    )
    assert ragged([(k,) for k in range(7)]).problem.endswith("(4,) (sample 4 of the batch), ... (7 in all)")


def test_a_users_function_finds_the_memory_in_empty():
    given = []

    def allocator(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    assert assembler(lambda samples: empty((2,), "i4"))([1, 2], allocator) is given[0]
    assert assembler(Stack())([1, 2], allocator) is given[1]


# -- `empty`: the batch's own memory for the user's functions, and plain memory everywhere else ------------------------


class Columns:
    """A user's dataset with a bulk read of its own."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.full(64, index)

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
    assert lies_in(read(Columns(), None, SlotWriter(memory)), memory)
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


def test_odd_shapes_and_dtypes_never_spoil_the_slot(memory):
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


def test_a_loader_inside_a_batchify_fn_uses_its_own_memory(memory):
    def nested(samples):
        inner = next(iter(ShardedDataLoader(range(2), 2, batchify_fn=halves)))["half"]
        mine = empty((2, 64), np.float32)
        mine[...] = inner.numpy()
        assert not lies_in(inner.numpy(), memory)
        return mine

    assert lies_in(read(range(10), nested, SlotWriter(memory)), memory)
