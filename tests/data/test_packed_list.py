"""`PackedList`: a list of strings, bytes or paths in two arrays, told from a list by nothing but its size."""

import pickle
import subprocess
import sys
from pathlib import Path, PurePosixPath

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader import ArrayDataset, PackedList, ShardedDataLoader

ITEMS = st.one_of(
    st.lists(st.text(st.characters())),  # surrogates too: names of files that are no UTF-8
    st.lists(st.binary()),
    st.lists(st.text("abé/", min_size=1).map(Path)),
)


@given(ITEMS, st.data())
@settings(deadline=None)
def test_it_answers_as_the_list_does(items, data):
    packed = PackedList(items)
    assert len(packed) == len(items) and list(packed) == items and packed == items
    assert [type(item) for item in packed] == [type(item) for item in items]
    for i in range(-len(items), len(items)):
        assert packed[i] == packed[np.int64(i)] == items[i]
    cut = data.draw(st.slices(max(1, len(items))))
    part = packed[cut]
    assert isinstance(part, PackedList) and part == items[cut] and list(part[::-1]) == items[cut][::-1]
    assert pickle.loads(pickle.dumps(part)) == part
    assert packed.nbytes == len(packed) * 8 + 8 + sum(len(i if isinstance(i, bytes) else _raw(i)) for i in items)
    for item in items:
        assert item in packed and packed.index(item) == items.index(item) and packed.count(item) == items.count(item)
    assert list(reversed(packed)) == items[::-1]


def _raw(item):
    return str(item).encode("utf-8", "surrogatepass")


def test_what_is_not_in_it():
    packed = PackedList(["ab", "c"])
    assert "b" not in packed and "abc" not in packed and b"ab" not in packed and 3 not in packed
    for index in (2, -3):
        with pytest.raises(IndexError, match="out of range for a dataset of 2 samples"):
            packed[index]
    with pytest.raises(TypeError, match="no integer"):
        packed["a"]
    with pytest.raises(TypeError):
        packed[0] = "x"
    with pytest.raises(TypeError):
        hash(packed)


def test_equality_knows_kinds():
    assert PackedList(["a"]) == PackedList(["a"]) != PackedList(["b"])
    assert PackedList(["a"]) != PackedList([b"a"]) and PackedList(["a"]) != PackedList([Path("a")])
    assert PackedList(["a", "bc"]) != PackedList(["ab", "c"])
    assert PackedList([]) == PackedList([b"a"])[:0] == []
    assert PackedList(["a"]) != ("a",) and PackedList(["a"]) != ["a", "b"]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        (["a", b"b"], "one kind: strings, .* item 1 is a bytes, item 0 a str: convert them"),
        ([Path("a"), "b"], "one kind: strings, .* item 1 is a str, item 0 a PosixPath"),
        (["a", 1], "item 1 is an int"),
        ([None], "item 0 is a NoneType"),
        ([PurePosixPath("a")], "item 0 is a PurePosixPath"),
        ([bytearray(b"a")], "item 0 is a bytearray"),
    ],
)
@pytest.mark.skipif(sys.platform == "win32", reason="names of path classes")
def test_other_and_mixed_items_are_named(items, said):
    with pytest.raises(TypeError, match=f"PackedList holds.*{said}"):
        PackedList(items)


def test_any_iterable_of_any_subclass_will_do():
    assert PackedList(c for c in "añb") == ["a", "ñ", "b"]
    packed = PackedList(np.array(["ab", "c"]))
    assert list(packed) == ["ab", "c"] and type(packed[0]) is str


def test_repr_shows_a_few():
    assert repr(PackedList(["a"] * 5)) == "PackedList(5 str, 53 bytes: ['a', 'a', 'a', ...])"
    assert repr(PackedList([])) == "PackedList(0 str, 8 bytes: [])"


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_it_travels_as_two_buffers_out_of_band(module):
    packed = PackedList(f"train/{i}.jpg" for i in range(10_000))
    buffers = []
    head = module.dumps(packed, protocol=5, buffer_callback=buffers.append)
    assert len(head) < 1000 and [b.raw().nbytes for b in buffers] == [packed._data.nbytes, packed._offsets.nbytes]
    received = [bytearray(b.raw()) for b in buffers]  # writable, as memory mapped by a worker
    twin = pickle.loads(head, buffers=received)
    assert twin == packed and twin[-1] == "train/9999.jpg"


def test_a_slice_takes_only_its_own_bytes_along():
    packed = PackedList(f"{i:04}" for i in range(1000))
    assert packed[500:502].nbytes == 8 + 24
    assert len(pickle.dumps(packed[500:502])) < 600


def test_it_is_smaller_than_the_list():
    names = [f"/data/train/n{i % 1000:08d}/n_{i:012d}.JPEG" for i in range(10_000)]
    assert PackedList(names).nbytes < 0.6 * (sys.getsizeof(names) + sum(map(sys.getsizeof, names)))


def test_every_pool_reads_it(pool):
    paths = [Path(f"{i}.jpg") for i in range(20)]
    with ShardedDataLoader(ArrayDataset(PackedList(paths), np.arange(20)), 8, pool=pool) as loader:
        assert [path for batch, _ in loader for path in batch] == paths
    with ShardedDataLoader(PackedList(map(str, paths)), 20) as loader:
        assert next(iter(loader)) == list(map(str, paths))


FORKED = """
import os, sys
from sharded_loader import PackedList
kind = sys.argv[1]
items = [f"/data/train/n{i % 1000:08d}/n_{i:012d}.JPEG" for i in range(200_000)]
if kind == "packed":
    items = PackedList(items)
def private():
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty"))
if os.fork() == 0:
    before = private()
    for item in items:
        pass
    print(private() - before, flush=True)
    os._exit(0)
os.wait()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_reading_it_copies_no_page_of_a_forked_worker():
    grown = {}
    for kind in ("list", "packed"):
        run = subprocess.run(
            [sys.executable, "-c", FORKED, kind], capture_output=True, text=True, timeout=300, check=True
        )
        grown[kind] = int(run.stdout)
    assert grown["list"] > 10_000 > 2_000 > grown["packed"], grown  # KB
