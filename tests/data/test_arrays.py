"""Reading in bulk changes nothing but the time: the batch is what the default batchify makes of the samples."""

import sys
import types

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Subset, TensorDataset, random_split

from sharded_loader import ArrayDataset, ShardedDataLoader, SimpleDataset, sample_rng
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.tree import map_leaves, to_torch
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk, as_items
from sharded_loader.data.datasets import SubsetDataset
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import SlotWriter

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


@pytest.mark.costly(14)
@pytest.mark.parametrize("dataset", DATASETS.values(), ids=DATASETS)
@given(wrapper=st.sampled_from(list(WRAPPERS)), data=st.data())
@settings(max_examples=settings.default.max_examples * 3 // 10)
def test_a_bulk_read_is_the_batch_of_the_samples(dataset, wrapper, data):
    wrapped = WRAPPERS[wrapper](dataset)
    read = as_bulk(wrapped)
    assert read is not None
    indices = data.draw(patterns(len(wrapped)))
    batch = read(indices, np.empty)
    assert described(batch) == described(one_by_one(wrapped, indices))


def test_a_batch_never_shares_memory_with_the_dataset():
    for dataset in (ARRAYS["rows"].copy(), TENSORS["rows"].clone(), TensorDataset(TENSORS["rows"].clone())):
        before = described(one_by_one(dataset, range(N)))
        for indices in ([2, 3, 4], [4, 2], [1]):
            map_leaves(lambda leaf: leaf.fill_(7), to_torch(as_bulk(dataset)(indices, np.empty)))
        assert described(one_by_one(dataset, range(N))) == before


class Odd(TensorDataset):
    def __getitem__(self, index):
        return index


class Sub(Subset):
    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return indices


def refused():
    grad = torch.zeros(4, 2, requires_grad=True)
    return {
        "list": [1, 2],
        "strings": np.array(["a", "b"]),
        "objects": np.array([1, None]),
        "dates": np.array([1, 2], "M8[s]"),
        "masked": np.ma.masked_array([1, 2]),
        "scalar": np.array(3),
        "grad": grad,
        "grad column": TensorDataset(torch.zeros(4), grad),
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


@pytest.mark.parametrize("name", refused())
def test_what_reads_in_its_own_way_is_left_to_it(name):
    assert as_bulk(refused()[name]) is None


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


def test_tensors_may_be_replaced_between_epochs():
    dataset = TensorDataset(torch.zeros(4))
    loader = ShardedDataLoader(dataset, 4)
    assert next(iter(loader))[0].tolist() == [0, 0, 0, 0]
    dataset.tensors = (torch.ones(4),)
    assert next(iter(loader))[0].tolist() == [1, 1, 1, 1]
    dataset.tensors = (torch.full((4,), 2.0).to_sparse(),)  # from here on by samples
    assert next(iter(loader))[0].tolist() == [2, 2, 2, 2]


def test_every_pool_delivers_it(pool):
    dataset = Subset(DATASETS["ArrayDataset"], range(3, N))
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


# -- columns ---------------------------------------------------------------------------------------------------


def test_bulk_indices_out_of_range_are_refused():
    dataset = ArrayDataset(ARRAYS["rows"])
    for indices in ([0, 12], [-13]):
        with pytest.raises(IndexError, match="12 samples"):
            dataset.get_batch(indices)
    with pytest.raises(TypeError, match="integers"):
        dataset.get_batch([0.5])
    assert dataset.get_batch([]).shape == (0, 3, 2)


# -- a + b ----------------------------------------------------------------------------------------------------

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
    dataset = make()
    indices = data.draw(patterns(len(dataset)))
    assert described(as_bulk(dataset)(indices, np.empty)) == described(one_by_one(dataset, indices))


def test_parts_that_do_not_fit_are_refused_as_their_samples_are():
    ragged = ArrayDataset(np.zeros((3, 2))) + ArrayDataset(np.zeros((3, 4)))
    named = ArrayDataset(x=np.zeros(3)) + ArrayDataset(y=np.zeros(3))
    for dataset, said in ((ragged, "different shapes"), (named, "different keys")):
        with pytest.raises(ValueError, match=said):
            dataset.get_batch([1, 4])


# -- Hugging Face ---------------------------------------------------------------------------------------------


class FakeHuggingFace:
    """What `datasets.Dataset` does, as far as reading goes: columns, and rows made of them."""

    def __init__(self, columns, form=list):
        self.columns, self.form = columns, form
        self.reads = []

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


def test_a_ragged_hugging_face_column_is_refused_as_its_samples_are(hugging_face):
    for form in (list, as_arrays):
        dataset = hugging_face({"id": [0, 1], "tokens": [[1], [1, 2]]}, form)
        with pytest.raises(ValueError, match=r"shapes.*\['tokens'\]"):
            list(ShardedDataLoader(dataset, 2))


def test_what_is_no_column_read_is_read_by_samples(hugging_face):
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


@pytest.mark.parametrize(
    "wrap", [lambda data: Subset(data, range(9)), lambda data: data.take(9), lambda data: data.split([9, 3], seed=0)[0]]
)
def test_parts_write_their_rows_into_the_memory_that_is_given(wrap):
    memory = np.zeros(1 << 12, np.uint8)
    batch = as_bulk(wrap(ArrayDataset(np.arange(12.0), torch.arange(12))))([3, 1, 1], SlotWriter(memory).empty)
    assert all(np.shares_memory(np.asarray(field), memory) for field in batch)
