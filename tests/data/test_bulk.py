"""Reading in bulk changes nothing but the time: the batch is that of the samples, and its lists may be changed."""

import sys
import tracemalloc
import types
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import Foreign
from torch.utils.data import ConcatDataset, SequentialSampler, Subset, TensorDataset, random_split

from sharded_loader import ArrayDataset, ShardedDataLoader, SimpleDataset, sample_rng
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.tree import map_leaves, to_torch
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk, as_items, composed, gather_rows, taken
from sharded_loader.data.datasets import SubsetDataset
from sharded_loader.data.seeding import KeyedIndices, keys_of
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import SlotWriter
from sharded_loader.randomness.rng import SampleScope

N = 12


def numbers(dtype, *shape):
    values = np.random.default_rng(1).integers(0, 2 if dtype == "bool" else 100, (N, *shape))
    return values.astype(dtype)


ARRAYS = {
    **{
        name: numbers(name) for name in ("bool", "uint8", "int16", "int64", "uint64", "float16", "float64", "complex64")
    },
    "rows": numbers("float32", 3, 2),
    "empty rows": numbers("float32", 0, 2),
    "big-endian": numbers(">i4"),
    "big-endian rows": numbers(">f8", 2),
    "strided": numbers("int32", 6)[:, ::-2],
    "transposed": np.asfortranarray(numbers("float32", 3, 4)),
    "longlong": numbers(np.longlong, 2),
    "read-only": np.frombuffer(bytes(range(N)), np.uint8),
    "packed": numbers("u1", 9).view([("a", "u1"), ("b", "<f8")])["b"].reshape(N),  # unaligned
}
TENSORS = {
    **{name: torch.from_numpy(numbers(name)) for name in ("bool", "uint8", "uint16", "int64", "float32", "complex128")},
    "bfloat16": torch.arange(N * 3).reshape(N, 3).to(torch.bfloat16),
    "float8": torch.arange(N).to(torch.float8_e4m3fn),
    "rows": torch.arange(N * 6.0).reshape(N, 2, 3),
    "transposed": torch.arange(N * 6.0).reshape(6, N).T,
    "empty rows": torch.zeros(N, 0),
    "conjugate": torch.arange(N * 2).reshape(N, 2).to(torch.complex64).conj(),
    "negative view": torch.arange(N * 2).reshape(N, 2).to(torch.complex64).conj().imag,
}
PLAIN = [name for name in TENSORS if name not in ("conjugate", "negative view")]
DATASETS = {
    **{f"array, {name}": array for name, array in ARRAYS.items()},
    **{f"tensor, {name}": TENSORS[name] for name in PLAIN},
    "TensorDataset": TensorDataset(*(TENSORS[name] for name in PLAIN)),
    "TensorDataset of one": TensorDataset(TENSORS["rows"]),
    "ArrayDataset": ArrayDataset(*ARRAYS.values(), *TENSORS.values()),
    "ArrayDataset of lists": ArrayDataset(x=list(range(N)), y=list("abcdefghijkl"), z=[[i, i + 0.5] for i in range(N)]),
    "ArrayDataset of one": ArrayDataset(ARRAYS["rows"]),
    "ArrayDataset of datasets": ArrayDataset(TensorDataset(TENSORS["rows"]), ArrayDataset(ARRAYS["rows"])),
    "ArrayDataset of texts and rows": ArrayDataset(np.array(list("abcdefghijkl")), torch.eye(N).unbind()),
}
WRAPPERS = {
    "bare": lambda d: d,
    "SimpleDataset": SimpleDataset,
    "SubsetDataset": lambda d: SubsetDataset(d, [5, 3, 3, 11, 0]),
    "range": lambda d: SubsetDataset(d, range(1, N, 2)),
    "Subset": lambda d: Subset(d, [5, -3, 3, 11, 0]),
    "Subset, array": lambda d: Subset(d, np.array([5, 3, 3, 11, 0])),
    "Subset, tensor": lambda d: Subset(d, torch.tensor([5, 3, 11, 0])),
    "Subset, range": lambda d: Subset(d, range(2, 9)),
    "Subset of Subset": lambda d: Subset(Subset(d, range(2, 9)), [3, 1, 0]),
    "Subset of ours": lambda d: Subset(SimpleDataset(d).take(7), [3, 1, 0]),
    "ours of ours": lambda d: SimpleDataset(d).take(9).shard(2, 1),
    "ours of Subset": lambda d: SimpleDataset(Subset(d, [3, 1, 0])).shard(1, 0),
    "sampled": lambda d: SimpleDataset(d).sample(SequentialSampler(range(N))),
    "random_split": lambda d: random_split(d, [5, N - 5])[0],
}


class OneByOne:
    """Hides everything but the samples."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index]


def one_by_one(dataset, indices):
    return default_batchify_fn([dataset[index] for index in indices])


def described(batch):
    """A batch as something that can be compared: structure, types, dtypes, bytes."""

    def leaf(value):
        if isinstance(value, torch.Tensor):
            raw = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            return "tensor", str(value.dtype), tuple(value.shape), bytes(raw.numpy())
        if isinstance(value, np.ndarray):
            return "array", str(value.dtype), value.shape, value.tolist()
        return type(value).__name__, value

    return repr(map_leaves(leaf, to_torch(batch)))


def patterns(length):
    one = st.integers(-length, length - 1)
    runs = st.tuples(st.integers(0, length - 1), st.integers(1, length)).map(
        lambda run: list(range(run[0], min(length, run[0] + run[1])))
    )
    return st.one_of(st.lists(one, min_size=1, max_size=9), runs, runs.map(lambda run: run[::-1]))


def check_bulk_reads(dataset, data):
    """Each of its ways to read in bulk gives the batch of the samples."""
    indices = data.draw(patterns(len(dataset)))
    expected = described(one_by_one(dataset, indices))
    assert described(as_bulk(dataset)(indices, np.empty)) == expected
    if hasattr(dataset, "get_batch"):
        assert described(dataset.get_batch(np.array(indices))) == expected
    if hasattr(dataset, "__getitems__"):
        assert described(default_batchify_fn(dataset.__getitems__(indices))) == expected


@pytest.mark.costly(14)
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
@given(wrapper=st.sampled_from(list(WRAPPERS)), data=st.data())
@settings(max_examples=settings.default.max_examples * 3 // 10)
def test_a_bulk_read_is_the_batch_of_the_samples(dataset, wrapper, data):
    check_bulk_reads(WRAPPERS[wrapper](dataset), data)


class NoSamples(ArrayDataset):
    """Fails where a sample is read that should be read in bulk."""

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    __getitems__ = __getitem__

    def get_batch(self, indices, empty=np.empty):
        return super().get_batch(indices, empty)


@pytest.mark.parametrize("wrap", [*WRAPPERS.values(), lambda d: d.take(4) + d.shard(2, 1)])
def test_wrappers_read_batches_by_get_batch_alone(wrap):
    rows, numbers = next(iter(ShardedDataLoader(wrap(NoSamples(ARRAYS["rows"], np.arange(N))), 3)))
    assert torch.equal(rows, torch.from_numpy(ARRAYS["rows"][numbers.numpy()])) and len(numbers) == 3


def test_a_batch_never_shares_memory_with_the_dataset_whose_tensors_may_be_replaced():
    for dataset in (ARRAYS["rows"].copy(), TENSORS["rows"].clone(), TensorDataset(TENSORS["rows"].clone())):
        before = described(one_by_one(dataset, range(N)))
        for indices in ([2, 3, 4], [4, 2], [1]):
            map_leaves(lambda leaf: leaf.fill_(7), to_torch(as_bulk(dataset)(indices, np.empty)))
        assert described(one_by_one(dataset, range(N))) == before
    dataset = TensorDataset(torch.zeros(4))
    loader = ShardedDataLoader(dataset, 4)
    assert next(iter(loader))[0].tolist() == [0, 0, 0, 0]
    dataset.tensors = (torch.ones(4),)
    assert next(iter(loader))[0].tolist() == [1, 1, 1, 1]
    dataset.tensors = (torch.full((4,), 2.0).to_sparse(),)  # from here on by samples
    assert next(iter(loader))[0].tolist() == [2, 2, 2, 2]


class Odd(TensorDataset):
    def __getitem__(self, index):
        return index


class Sub(Subset):
    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return indices


GRAD = torch.zeros(4, 2, requires_grad=True)
REFUSED = {
    "list": [1, 2],
    "strings": np.array(["a", "b"]),
    "objects": np.array([1, None]),
    "dates": np.array([1, 2], "M8[s]"),
    "masked": np.ma.masked_array([1, 2]),
    "scalar": np.array(3),
    "grad": GRAD,
    "grad column": TensorDataset(torch.zeros(4), GRAD),
    "conj": TENSORS["conjugate"],
    "neg": TENSORS["negative view"],
    "sparse": torch.eye(3).to_sparse(),
    "parameter": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
    "meta": torch.zeros(3, device="meta"),
    "subclass": Odd(torch.zeros(3)),
    "Subset subclass": Sub(TensorDataset(torch.zeros(3)), [0]),
    "Subset of a list": Subset([1, 2], [0]),
    "ConcatDataset": ConcatDataset([TensorDataset(torch.zeros(3))]),
    "ours over a list": SimpleDataset([1, 2]).take(1),
}


@pytest.mark.parametrize("dataset", REFUSED.values(), ids=REFUSED)
def test_what_reads_in_its_own_way_is_left_to_it(dataset):
    assert as_bulk(dataset) is None


@pytest.mark.parametrize("keys", [[(0, 1), (2, 1)], [[0, 1], [1]], [True, False], ["a"], [1.0, 2.0], [2**70, 1]])
def test_indices_that_are_no_integers_are_the_datasets_affair(keys):
    for dataset in (ARRAYS["rows"], TENSORS["rows"], TensorDataset(TENSORS["rows"]), SimpleDataset(ARRAYS["rows"])):
        assert as_bulk(dataset)(keys, np.empty) is NOT_IN_BULK


def test_an_index_out_of_range_is_named_by_the_dataset():
    for dataset in (ARRAYS["rows"], TensorDataset(TENSORS["rows"]), Subset(TensorDataset(TENSORS["rows"]), [0, 99])):
        wrong = 1 if isinstance(dataset, Subset) else 99
        with pytest.raises(IndexError) as expected:
            dataset[wrong]
        result = Reader(Job(dataset, None, 0)).read(Task(0, 0, 0, 0, ([0, wrong],), False))
        assert isinstance(result.error, IndexError) and str(expected.value) in str(result.error)
        assert any(f"sample {wrong}" in note for note in notes_of(result.error))


def test_every_pool_delivers_it(pool):
    parts = SimpleDataset(np.arange(100)).split([0.5, 0.5], seed=1)[0][::-1].filter(lambda sample: sample % 3)
    dataset = Subset(ArrayDataset(*ARRAYS.values(), *TENSORS.values(), parts.take(N)), range(3, N))
    with ShardedDataLoader(dataset, 4, shuffle=True, seed=1, pool=pool) as loader:
        batches = list(loader)
    expected = list(ShardedDataLoader(OneByOne(dataset), 4, shuffle=True, seed=1))
    assert list(map(described, batches)) == list(map(described, expected))


def noisy(index):
    return index, sample_rng().random()


class NoisyInBulk(SimpleDataset):
    def __getitem__(self, index):
        return noisy(index)


NOISY = [
    lambda: SimpleDataset(range(12)).transform(noisy),
    lambda: NoisyInBulk(range(12)),
    lambda: SimpleDataset(ArrayDataset(np.arange(12))).transform(noisy),
    lambda: OneByOne(SimpleDataset(range(12)).transform(noisy)),
]


@pytest.mark.parametrize("make", NOISY)
@pytest.mark.parametrize("nested", [False, True])
def test_random_numbers_through_torchs_subset_are_those_of_the_loaders_index(make, nested):
    subset = Subset(make(), [5, 3, 9, 7])
    if nested:
        subset = Subset(subset, [0, 1, 2, 3])
    loader = ShardedDataLoader(subset, 4, shuffle=True, seed=3)
    order = next(iter(ShardedDataLoader(range(4), 4, shuffle=True, seed=3))).tolist()
    index, drawn = next(iter(loader))
    samples = [loader.read(i, epoch=0) for i in order]
    assert index.tolist() == [i for i, _ in samples]
    assert drawn.tolist() == [d for _, d in samples]


def test_bulk_items_are_looked_for_inside_torchs_subset():
    alone = OneByOne([0, 1, 2])
    assert as_items(Subset(alone, [1])) is None
    assert as_items(Subset(Sub(alone, [1, 2]), [1]))([0]) == [1]
    assert list(as_items(Subset(Subset(ArrayDataset(np.arange(5)), [4, 2]), [1, 0]))([0, 1])) == [2, 4]


PARTS = {
    "two alike": lambda: ArrayDataset(ARRAYS["rows"]) + ArrayDataset(ARRAYS["rows"] * 2),
    "fields": lambda: (
        ArrayDataset(*ARRAYS.values(), *TENSORS.values()) + ArrayDataset(*ARRAYS.values(), *TENSORS.values())
    ),
    "names": lambda: (
        ArrayDataset(x=ARRAYS["int64"], y=list("abcdefghijkl")) + ArrayDataset(x=ARRAYS["int64"], y=["é"] * N)
    ),
    "subsets": lambda: (
        ArrayDataset(ARRAYS["rows"]).take(5) + SimpleDataset(ArrayDataset(ARRAYS["rows"])).shard(2, 1).take(4)
    ),
    "dtypes": lambda: ArrayDataset(ARRAYS["int16"]) + ArrayDataset(ARRAYS["float64"]),
    "byte orders": lambda: ArrayDataset(numbers("i4")) + ArrayDataset(ARRAYS["big-endian"]),
    "kinds": lambda: ArrayDataset(TENSORS["int64"]) + ArrayDataset(ARRAYS["int64"]) + ArrayDataset(list(range(N))),
    "lists": lambda: ArrayDataset([1, 2, 3]) + ArrayDataset([0.5, 1.5]),
    "columns of datasets": lambda: ArrayDataset(SimpleDataset(range(5))) + ArrayDataset(SimpleDataset(range(7))),
}


@pytest.mark.costly(3)
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_batch_from_several_parts_is_the_batch_of_the_samples(make, data):
    check_bulk_reads(make(), data)


# -- Hugging Face ---------------------------------------------------------------------------------------------


class FakeHuggingFace:
    """What `datasets.Dataset` does, as far as reading goes: columns, and rows made of them."""

    def __init__(self, columns, form=list):
        self.columns, self.form, self.reads = columns, form, []

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key):
        self.reads.append(key)
        if isinstance(key, int):
            return {name: column[0] for name, column in self[[key]].items()}
        picked = {name: [column[i] for i in key] for name, column in self.columns.items()}
        return {name: self.form(column) for name, column in picked.items()}

    def __getitems__(self, keys):
        batch = self[keys]
        return [{name: column[i] for name, column in batch.items()} for i in range(len(keys))]


def as_arrays(column):
    try:
        return np.array(column)
    except ValueError:
        made = np.empty(len(column), object)
        made[:] = [np.array(value) for value in column]
        return made


def as_tensors(column):
    return torch.tensor(column) if isinstance(column[0], (int, float)) else column


COLUMNS = {
    "id": list(range(N)),
    "score": [i / 4 for i in range(N)],
    "text": list("abcdefghijkl"),
    "tokens": [[i, i + 1] for i in range(N)],
    "flag": [i % 2 == 0 for i in range(N)],
    "meta": [{"a": i, "b": [str(i)]} for i in range(N)],
}


@pytest.fixture
def hugging_face():
    """A module and class of the names that the real one has."""
    module = types.ModuleType("datasets.arrow_dataset")
    module.Dataset = FakeHuggingFace
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "datasets.arrow_dataset", module)
        yield FakeHuggingFace


@pytest.mark.costly
@pytest.mark.parametrize("form", [list, as_arrays, as_tensors])
@given(data=st.data())
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_hugging_face_columns_are_the_batch_of_its_samples(hugging_face, form, data):
    dataset = hugging_face(COLUMNS, form)
    for wrapped in (dataset, Subset(dataset, [3, 1, 4]), SimpleDataset(dataset).take(5)):
        indices = data.draw(patterns(len(wrapped)))
        dataset.reads.clear()
        batch = as_bulk(wrapped)(indices, np.empty)
        assert len(dataset.reads) == 1
        items = as_items(wrapped)
        samples = [wrapped[i] for i in indices] if items is None else list(items(indices))
        assert described(batch) == described(default_batchify_fn(samples))
        assert list(batch) == list(COLUMNS)


def test_what_is_no_hugging_face_column_is_read_by_samples_and_ragged_ones_are_refused(hugging_face):
    for form in (list, as_arrays):
        dataset = hugging_face({"id": [0, 1], "tokens": [[1], [1, 2]]}, form)
        with pytest.raises(ValueError, match=r"shapes.*\['tokens'\]"):
            list(ShardedDataLoader(dataset, 2))

    class Rows(hugging_face):
        def __getitem__(self, key):
            return {"x": key} if isinstance(key, int) else ["not", "columns"]

    assert as_bulk(Rows({"x": [1, 2]})) is None  # reads in its own way
    assert as_bulk(hugging_face({}, list))([0], np.empty) is NOT_IN_BULK
    uneven = hugging_face({"x": [1, 2, 3]}, lambda column: column[:-1])
    assert as_bulk(uneven)([0, 1], np.empty) is NOT_IN_BULK


def test_the_real_hugging_face_dataset(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(pytest.importorskip("tqdm").tqdm, "monitor_interval", 0)  # a thread of its progress bars
    for form in (None, "numpy", "torch"):
        dataset = datasets.Dataset.from_dict({**COLUMNS, "none": [None] * N}).with_format(form)
        shuffled = dataset.select([3, 1, 4, 0])
        for wrapped in (dataset, shuffled, Subset(dataset, [3, 1, 4])):
            for indices in ([0, 1, 2], [2, 0], [1, 1]):
                batch = as_bulk(wrapped)(indices, np.empty)
                assert described(batch) == described(default_batchify_fn(list(wrapped.__getitems__(indices))))
        loaded = next(iter(ShardedDataLoader(dataset, 4)))
        assert torch.is_tensor(loaded["id"]) and loaded["text"] == list("abcd")


@pytest.mark.parametrize("where", [[3, 1, 1], [4, 5, 6], [2], []], ids=str)
def test_rows_are_gathered_into_one_piece_of_memory_for_each_column(where):
    columns = [np.arange(24).reshape(8, 3), np.arange(8, dtype=">i4"), torch.arange(8).to(torch.bfloat16)]
    given = []
    rows = gather_rows(columns, np.array(where, np.int64), lambda *what: given.append(np.empty(*what)) or given[-1])
    assert len(given) == 3 and rows[0] is given[0] and rows[1] is given[1]
    for row, column in zip(rows, columns, strict=True):
        assert row.tolist() == [column[i].tolist() for i in where]
    assert rows[1].dtype.isnative


WIDE = np.zeros((50_000, 4, 8), np.float32)
VIEWS = {
    "transposed": WIDE.transpose(0, 2, 1),
    "Fortran": np.asfortranarray(WIDE),
    "some columns": WIDE[:, :, :5],
    "every second": WIDE[::2],
    "unaligned": np.zeros(50_000, [("a", "u1"), ("b", "<f4", (32,))])["b"],
    "tensor": torch.from_numpy(WIDE).permute(0, 2, 1),
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_batch_of_a_view_copies_its_rows_and_not_the_whole_column(name):
    dataset = TensorDataset(VIEWS[name]) if name == "tensor" else ArrayDataset(VIEWS[name])
    tracemalloc.start()
    try:
        as_bulk(dataset)([3, 1, 20_000], np.empty)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20  # the column: 6 MB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("wrap", ["bare", "Subset", "ours of ours", "random_split"])
def test_parts_write_their_rows_into_the_memory_that_is_given(wrap):
    memory = np.zeros(1 << 12, np.uint8)
    batch = as_bulk(WRAPPERS[wrap](ArrayDataset(np.arange(12.0), torch.arange(12))))(
        [1, 0, 0], SlotWriter(memory).empty
    )
    assert all(np.shares_memory(np.asarray(field), memory) for field in batch)


# -- no list of ours, and none of the batch sampler's ------------------------------------------------------------------


class UsesUp:
    """A reader that sorts its indices and takes them out of the list, by either protocol. One sample is bad."""

    def __init__(self, name, bad=None):
        self.bad = bad
        self.__dict__[name] = self.read if name == "__getitems__" else lambda indices: np.array(self.read(indices))

    def __len__(self):
        return 20

    def __getitem__(self, index):
        if index == self.bad:
            raise OSError("disk")
        return index

    def read(self, indices):
        indices.sort(reverse=True)
        return [self[indices.pop()] for _ in range(len(indices))]


AROUND = {
    "bare": lambda d: d,
    "SimpleDataset": SimpleDataset,
    "take": lambda d: SimpleDataset(d).take(20),
    "transform": lambda d: SimpleDataset(d).transform(int),
    "cache": lambda d: SimpleDataset(d).cache(),
    "concatenated": lambda d: SimpleDataset(d) + ArrayDataset(np.arange(0)),
    "torch's Subset": lambda d: Subset(d, range(20)),
    "a column": ArrayDataset,
}
EVENS_FIRST = [*range(0, 20, 2), *range(1, 20, 2)]
PROTOCOLS = ["get_batch", "__getitems__"]


@covering(name=PROTOCOLS, wrapper=AROUND, on_error=["skip", "replace"])
def test_a_reader_that_uses_its_indices_up_and_fails_loses_no_sample(name, wrapper, on_error):
    loader = ShardedDataLoader(AROUND[wrapper](UsesUp(name, bad=7)), 5, sampler=EVENS_FIRST, on_error=on_error)
    batches = [batch.tolist() for batch in loader]
    assert {x for batch in batches for x in batch} == set(range(20)) - {7}
    assert [len(batch) for batch in batches] == ([5, 5, 4, 5] if on_error == "skip" else [5, 5, 5, 5])
    assert [index for index, _ in loader.skipped] == [7]
    assert loader.stats().samples == sum(map(len, batches))


@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("pool", POOLS[:3])
def test_a_reader_that_uses_its_indices_up_reads_all_and_its_errors_name_the_sample(name, pool):
    with ShardedDataLoader(UsesUp(name), 5, sampler=EVENS_FIRST, pool=make_pool(pool)) as loader:
        assert [batch.tolist() for batch in loader][:2] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
        assert loader.stats().samples == 20
    with ShardedDataLoader(UsesUp(name, bad=7), 20, pool=make_pool(pool)) as loader:
        with pytest.raises(OSError, match="disk") as caught:
            next(iter(loader))
    assert any("sample 7" in note for note in notes_of(caught.value))


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_users_batch_sampler_keeps_its_lists(name):
    flat, shards = [[3, 1, 2], [6, 5, 4]], [[[3, 1], [2]], [[6], [5, 4]]]
    batches = [sorted(batch.tolist()) for batch in ShardedDataLoader(UsesUp(name), batch_sampler=flat)]
    assert batches == [[1, 2, 3], [4, 5, 6]]
    loader = ShardedDataLoader(UsesUp(name), batch_sampler=shards)
    assert [[sorted(shard.tolist()) for shard in batch] for batch in loader] == [[[1, 3], [2]], [[6], [4, 5]]]
    loader.peek()
    assert flat == [[3, 1, 2], [6, 5, 4]] and shards == [[[3, 1], [2]], [[6], [5, 4]]]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_batch_sampler_may_fill_one_list_again_and_again(sharded, pool):
    def fill():
        batch = []
        for begin in range(0, 20, 5):
            batch[:] = range(begin, begin + 5)
            yield [batch] if sharded else batch

    with ShardedDataLoader(range(20), batch_sampler=Foreign(fill, 4), pool=pool, prefetch=4) as loader:
        batches = [batch[0] if sharded else batch for batch in loader]
        assert [batch.tolist() for batch in batches] == [list(range(begin, begin + 5)) for begin in range(0, 20, 5)]


def test_a_batchify_function_may_empty_its_list_and_places_of_a_changed_one_are_not_believed():
    def empties(samples):
        found = [samples.pop() for _ in range(len(samples))]
        if 7 in found:
            raise ValueError("seven")
        return np.array(found)

    batches = iter(ShardedDataLoader(range(20), 5, batchify_fn=empties))
    assert next(batches).tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(ValueError, match="seven"):
        next(batches)
    assert next(batches).tolist() == [14, 13, 12, 11, 10]
    for change in (list.sort, list.reverse, list.pop, lambda indices: indices.append(4)):
        keys = [SampleScope(seed, 0) for seed in range(3)]
        indices = KeyedIndices([7, 8, 2], keys)
        assert keys_of(indices) is keys
        change(indices)
        assert keys_of(indices) is None


def selections(draw: Any, length: int) -> Any:
    """Some indices below ``length``: a range, or an array."""
    if draw(st.booleans()) or not length:
        return np.array(draw(st.lists(st.integers(0, length - 1), max_size=9)) if length else [], np.int64)
    return range(length)[draw(st.slices(length))]


@given(st.data())
def test_a_part_of_a_part_of_a_part_is_plain_indexing(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    found: Any = range(length)
    wanted = list(found)
    for _ in range(data.draw(st.integers(1, 4))):
        inner = selections(data.draw, len(found))
        found, wanted = composed(found, inner), [wanted[index] for index in inner]
        assert list(map(int, found)) == wanted and len(found) == len(wanted)
        assert taken(found, np.arange(len(found))).tolist() == wanted
    where = np.array([3, 0, 3])
    for indices in (np.array([5, 6, 7, 8]), range(5, 9), range(20, 0, -5)):
        assert taken(indices, where).tolist() == [indices[3], indices[0], indices[3]]
