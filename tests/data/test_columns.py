"""Columns of other libraries are read by position. Masks and missing values, which no batch can hold, are refused."""

import types
from collections.abc import MutableMapping
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from torch.utils.data import DataLoader

from sharded_loader import (
    ArrayDataset,
    ConcatDataset,
    FilterSampler,
    ShardedDataLoader,
    SimpleDataset,
    SubsetDataset,
    default_batchify_fn,
    recordio,
    split_and_load,
    split_data,
)
from sharded_loader import torch as torchs
from sharded_loader.batchify import Dict, List, Pad, Stack, Tuple


class FakeSeries:
    """What is characteristic of a pandas Series: it is indexed by labels, iterated and converted by position."""

    iloc = property(lambda self: self)

    def __init__(self, values, labels=None, numpy_dtype=None, missing=0):
        self.values = np.asarray(values)
        self.labels = list(range(len(self.values)))[::-1] if labels is None else list(labels)
        self.dtype = types.SimpleNamespace(numpy_dtype=numpy_dtype)
        self.missing = missing

    def __len__(self):
        return len(self.values)

    def __getitem__(self, label):
        return self.values[self.labels.index(label)]

    def __iter__(self):
        return iter(self.values)

    def isna(self):
        return np.arange(len(self)) < self.missing

    def to_numpy(self, dtype=None):
        return self.values.astype(dtype or self.values.dtype)


class FakeFrame:
    iloc = property(lambda self: self)
    columns = property(lambda self: list(self.names))

    def __init__(self, names, columns):
        self.names, self.held = names, columns

    def __len__(self):
        return len(self.held[0])

    def __getitem__(self, name):
        return self.held[self.names.index(name)]

    def keys(self):
        return self.names


class FakeArrow:
    """What is characteristic of an Arrow column: its items are scalars of its own."""

    def __init__(self, values):
        self.held = values
        self.type = types.SimpleNamespace(num_fields=0)
        self.null_count = values.count(None)

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        return object()

    def to_pylist(self):
        return self.held

    def to_numpy(self, zero_copy_only=True):
        assert not zero_copy_only
        return np.array([float("nan") if one is None else one for one in self.held])


def first(dataset, **options):
    with made(dataset, 4, **options) as loader:
        return next(iter(loader))


def test_a_series_beside_an_array_keeps_its_rows(pool):
    dataset = ArrayDataset(np.arange(4), FakeSeries([0, 10, 20, 30]), FakeSeries(list("abcd")))
    x, y, s = first(dataset, pool=pool, shuffle=True, seed=1)
    assert y.tolist() == (x * 10).tolist() and s == ["abcd"[i] for i in x.tolist()]


def test_nullable_columns_keep_their_dtype_or_are_refused():
    assert first(ArrayDataset(FakeSeries([1, 2, 3, 4], numpy_dtype=np.int8))).dtype == torch.int8
    with pytest.raises(ValueError, match=r"column y has 2 missing values, .* int8 .* series\.fillna\(0\)"):
        ArrayDataset(y=FakeSeries([1, 2, 3, 4], numpy_dtype=np.int8, missing=2))
    with pytest.raises(ValueError, match=r"column array\[1\] has 1 missing values, .* column\.fill_null\(0\)"):
        ArrayDataset([1, 2], FakeArrow([1, None]))


TABLES = {
    "frame": lambda: FakeFrame(["x", "y"], [FakeSeries([1, 2]), FakeSeries([3, 4])]),
    "dict": lambda: {"x": np.array([1, 2]), "y": FakeSeries([3, 4])},
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_a_table_is_its_columns_by_name(make):
    for dataset in (ArrayDataset(make()), ArrayDataset(**make())):
        assert dataset[1] == {"x": 2, "y": 4}
        batch = first(dataset)
        assert {name: values.tolist() for name, values in batch.items()} == {"x": [1, 2], "y": [3, 4]}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_a_table_is_no_column_and_no_dataset_and_the_error_says_what_to_write(make):
    with pytest.raises(TypeError, match=r"column array\[1\] is a .*: give ArrayDataset\(table\) alone"):
        ArrayDataset([1, 2], make())
    with pytest.raises(TypeError, match=r"column z is a .*: give ArrayDataset\(table\) alone"):
        ArrayDataset(z=make())
    with pytest.raises(TypeError, match=r"give ArrayDataset\((table|data)\)"):
        ShardedDataLoader(make(), 2)
    frame = TABLES["frame"]()
    wraps = [SimpleDataset, lambda d: SubsetDataset(d, [0]), lambda d: ConcatDataset([d]), SimpleDataset([1]).__add__]
    for wrap in wraps:
        with pytest.raises(TypeError, match=r"was given a FakeFrame, .* ArrayDataset\(table\)"):
            wrap(frame)
    with pytest.raises(ValueError, match="several columns 'x': rename"):
        ArrayDataset(FakeFrame(["x", "x"], frame.held))


def test_dicts_by_position_are_datasets_and_functions_and_filters_read_a_series_by_position():
    samples = {0: 10, 1: 11, 2: 12, 3: 13}
    assert first(samples).tolist() == first(ArrayDataset(samples)).tolist() == [10, 11, 12, 13]
    assert first({"a": 1, "b": 2}, sampler=["b", "a"]).tolist() == [2, 1]
    series = FakeSeries([5, 6, 7, 8])
    assert default_batchify_fn(series).tolist() == Stack()(series).tolist() == [5, 6, 7, 8]
    assert list(FilterSampler(lambda value: value > 6, series)) == [2, 3]


def test_real_pandas():
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame({"x": np.arange(6.0), "y": np.arange(6) * 10, "s": list("abcdef")})
    frame = frame.sample(frac=1, random_state=0)
    order = frame.x.astype(int).tolist()
    x, y = first(ArrayDataset(frame[["x"]].to_numpy(), frame["y"]), shuffle=True, seed=2)
    assert y.tolist() == (x[:, 0] * 10).int().tolist()
    batch = first(ArrayDataset(frame), num_workers=1)
    assert batch["y"].tolist() == [10 * i for i in order[:4]] and batch["s"] == ["abcdef"[i] for i in order[:4]]
    assert first(frame["y"]).tolist() == first(SimpleDataset(frame["y"])).tolist() == [10 * i for i in order[:4]]
    assert default_batchify_fn(frame["y"]).tolist() == [10 * i for i in order]
    for dtype, wanted in (("Int8", torch.int8), ("boolean", torch.bool), ("Float32", torch.float32)):
        assert first(ArrayDataset(pd.Series([1, 0], dtype=dtype))).dtype == wanted
        with pytest.raises(ValueError, match="1 missing values"):
            ArrayDataset(pd.Series([1, None], dtype=dtype))
    assert first(ArrayDataset(pd.Series(["u", "v"], dtype="category"))) == ["u", "v"]
    for dtype in (object, "string", "category"):
        assert first(ArrayDataset(pd.Series(["u", None, "v"], dtype=dtype))) == ["u", None, "v"]
    for refused in (SimpleDataset, lambda d: ShardedDataLoader(d, 2), lambda d: ArrayDataset([0] * 6, d)):
        with pytest.raises(TypeError, match=r"DataFrame.*ArrayDataset\(table\)"):
            refused(frame)


def test_real_pyarrow():
    pa = pytest.importorskip("pyarrow")
    vectors = pa.array([[1.0, 2.0]] * 3, pa.list_(pa.float32(), 2))
    table = pa.table({"x": [1.0, 2.0, 3.0], "s": ["a", "b", "c"], "v": vectors, "r": [[1], [2], [3]]})
    for dataset in (ArrayDataset(table), ArrayDataset(table.to_batches()[0])):
        batch = first(dataset)
        assert batch["x"].tolist() == [1, 2, 3] and batch["s"] == ["a", "b", "c"]
        assert batch["v"].dtype == torch.float32 and batch["v"].shape == (3, 2) and batch["r"].shape == (3, 1)
    x, s = first(ArrayDataset(table["x"], table["s"].combine_chunks()))
    assert x.tolist() == [1, 2, 3] and s == ["a", "b", "c"]
    assert first(table["x"]).tolist() == [1, 2, 3]
    sliced = ArrayDataset(pa.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], pa.list_(pa.float32(), 2))[1:])
    assert first(sliced).tolist() == [[3, 4], [5, 6]]
    for column in (pa.array([1, None]), pa.array([0.5, None]), pa.array([1, None]).dictionary_encode()):
        for held in (column, pa.chunked_array([column, column])):
            with pytest.raises(ValueError, match="missing values"):
                ArrayDataset(held)
    assert first(ArrayDataset(pa.array(["a", None]).dictionary_encode())) == ["a", None]
    with pytest.raises(ValueError, match="samples of different"):
        first(ArrayDataset(pa.array([[1, 2], [3, None]])))
    with pytest.raises(TypeError, match=r"Table.*ArrayDataset\(table\)"):
        ShardedDataLoader(table, 2)


def test_real_polars():
    pl = pytest.importorskip("polars")
    frame = pl.DataFrame({"y": [1, 2], "s": ["a", "b"], "r": [[1], [2]]}, schema_overrides={"y": pl.Int8})
    batch = first(ArrayDataset(frame))
    assert batch["y"].dtype == torch.int8 and batch["s"] == ["a", "b"] and batch["r"].tolist() == [[1], [2]]
    with pytest.raises(ValueError, match="1 missing values"):
        ArrayDataset(pl.Series([1, None]))
    with pytest.raises(TypeError, match=r"DataFrame.*ArrayDataset\(table\)"):
        SimpleDataset(frame)


# -- masked values --------------------------------------------------------------------------------------------


def masked(*shape):
    array = np.ma.array(np.arange(np.prod(shape), dtype=float).reshape(shape))
    array[(0,) * len(shape)] = np.ma.masked
    return array


MASKED_BATCHES = type("MaskedBatches", (SimpleDataset,), {"get_batch": lambda _, indices: masked(len(indices))})
REFUSED = {
    "loader": lambda: first(masked(4, 2)),
    "column": lambda: ArrayDataset(masked(4, 2)),
    "named column": lambda: ArrayDataset(x=masked(4)),
    "SimpleDataset": lambda: first(SimpleDataset(masked(4))),
    "transform": lambda: first(SimpleDataset(masked(4, 2)).transform(lambda x: x + 1)),
    "sample": lambda: first([masked(2), masked(2)]),
    "field": lambda: first([(masked(2), 1), (masked(2), 2)]),
    "the constant": lambda: first([1.0, np.ma.masked]),
    "the constant in a list": lambda: first([[1.0, np.ma.masked]]),
    "a structure": lambda: first([np.ma.array([(1, 2)], mask=[(True, False)], dtype="i4,i4")]),
    "worker": lambda: first([masked(2)], num_workers=1),
    "batchify_fn": lambda: first([1, 2], batchify_fn=lambda samples: masked(2)),
    "get_batch": lambda: first(MASKED_BATCHES(range(4))),
    "Stack": lambda: Stack()([masked(2)]),
    "Stack, dtype": lambda: Stack("float32")([masked(2)]),
    "Pad": lambda: Pad()([masked(2), np.zeros(3)]),
    "Pad, every axis": lambda: Pad(axis=None)([masked(2), np.zeros(3)]),
    "List": lambda: List()([masked(2)]),
    "Tuple": lambda: Tuple(Stack(), Pad())([(1, masked(2))]),
    "Dict": lambda: Dict({"x": Stack()})([{"x": masked(2)}]),
    "split_data": lambda: split_data(masked(4), 2),
    "split_data of a structure": lambda: split_data({"x": masked(4)}, 2),
    "split_and_load": lambda: split_and_load(masked(4), ["cpu", "cpu"]),
    "label": lambda: recordio.pack((0, masked(3), 1, 0), b""),
    "image": lambda: recordio.pack_img((0, 1.0, 1, 0), masked(3, 3).astype(np.uint8)),
    "masked tensors, padded": lambda: Pad()([torch.masked.masked_tensor(torch.arange(3.0), torch.arange(3) != 1)] * 2),
}


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
@pytest.mark.parametrize("make", REFUSED.values(), ids=REFUSED)
def test_masked_values_are_refused_with_advice(make):
    with pytest.raises(ValueError, match=r"mask(.|\n)*(filled\(0\)|get_data\(\))"):
        make()


def test_a_masked_array_is_an_array_as_long_as_nothing_is_masked():
    whole = np.ma.array(np.arange(4.0))
    for dataset in (whole, ArrayDataset(whole), SimpleDataset(whole), list(whole)):
        assert first(dataset).tolist() == [0, 1, 2, 3]
    assert [part.tolist() for part in split_data(whole, 2)] == [[0, 1], [2, 3]]
    array = masked(4)  # data and mask may be columns
    batch = first(ArrayDataset(x=array.data, mask=np.ma.getmaskarray(array)))
    assert batch["mask"].tolist() == [True, False, False, False]
    whole = np.ma.array(np.arange(4.0))
    dataset = ArrayDataset(whole)
    whole[2] = np.ma.masked
    for how in ({}, {"device": "cpu", "resident": "auto"}):
        with pytest.raises(ValueError, match="masked values"):
            first(dataset, **how)


def test_batches_of_size_0_are_alike_from_every_pool(new_pool):
    arrays = {"f4": np.zeros((0, 3), "f4"), "i8": np.zeros((3, 0), "i8"), "u1": np.zeros((2, 0, 4), "u1")}
    samples = [{**arrays, "t": torch.zeros(0, 3), "b": torch.zeros(2, 0, dtype=torch.bfloat16)}] * 4
    fns = {"f4": lambda samples: np.asfortranarray(np.stack(samples)), "t": torch.stack}
    for batchify_fn in (None, Dict(fns, rest="drop")):
        with ShardedDataLoader(samples, 4, pool="inline", batchify_fn=batchify_fn) as loader:
            wanted = next(iter(loader))
        with ShardedDataLoader(samples, 4, pool=new_pool(), batchify_fn=batchify_fn) as loader:
            batch = next(iter(loader))
        for name in wanted:
            assert batch[name].stride() == wanted[name].stride() == torch.empty(wanted[name].shape).stride()
            assert (batch[name].dtype, batch[name].shape) == (wanted[name].dtype, wanted[name].shape)
    array_dataset = ArrayDataset(np.zeros((4, 0), np.float32), torch.zeros(4, 0, dtype=torch.bfloat16))
    assert [x.stride() for x in first(array_dataset)] == [x.stride() for x in next(iter(DataLoader(array_dataset, 4)))]


# -- a mapping that is read by rows ------------------------------------------------------------------------------------


class Rows(MutableMapping[str, Any]):
    """Tensors under names, read by rows, as a TensorDict: it has no truth, and ``in`` is an error."""

    __torch_function__ = None

    def __init__(self, tensors):
        self.tensors = tensors

    def __getitem__(self, index):
        if isinstance(index, str):
            return self.tensors[index]
        return Rows({name: tensor[index] for name, tensor in self.tensors.items()})

    def __setitem__(self, name, value):
        self.tensors[name] = value

    def __delitem__(self, name):
        del self.tensors[name]

    def __iter__(self):
        return (self[index] for index in range(len(self)))

    def __len__(self):
        return len(self.tensors["x"])

    def __bool__(self):
        raise RuntimeError("Converting a tensordict to boolean value is not permitted")

    def __contains__(self, key):
        raise NotImplementedError("use keys()")

    def keys(self):
        return self.tensors.keys()


def rows_stacked(samples):
    return Rows({name: torch.stack([one[name] for one in samples]) for name in ("x", "y")})


ROWS = Rows({"x": torch.arange(6), "y": torch.arange(12).reshape(6, 2)})


@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "drop-in"])
def test_a_mapping_of_rows_is_a_dataset_and_a_batch(kind):
    arguments = {"threads": {"thread_pool": True, "num_workers": 1}, "processes": {"num_workers": 1}}
    made = torchs.DataLoader if kind == "drop-in" else ShardedDataLoader
    batches = list(made(ROWS, 4, collate_fn=rows_stacked, **arguments.get(kind, {})))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert [type(batch) for batch in batches] == [Rows, Rows]


def test_a_mapping_of_rows_stays_a_sample():
    assert [[int(one["x"]) for one in batch] for batch in ShardedDataLoader(ROWS, 3)] == [[0, 1, 2], [3, 4, 5]]
    assert ArrayDataset(ROWS, list("abcdef"))[4][1] == "e" and int(ArrayDataset(ROWS)[4]["x"]) == 4


# -- arrays of other libraries -----------------------------------------------------------------------------------------


class Lazy:
    """As zarr's and tensorstore's arrays: a shape, and no length."""

    kinds = (int, slice, np.ndarray)  # of indices

    def __init__(self, values):
        self.values, self.asked = values, []
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, index):
        if not isinstance(index, self.kinds):
            raise TypeError(f"no {type(index)}")
        self.asked.append(index)
        if isinstance(index, np.ndarray) and not (np.diff(index) > 0).all():
            raise TypeError("Indexing elements must be in increasing order")
        found = self.values[index]
        return Lazy(found) if found.ndim == self.values.ndim else found

    def __array__(self, dtype=None, copy=None):
        return self.values


class OnlyRows(Lazy):
    kinds = (int,)
    __array__ = None


class WithLength(Lazy):
    """As h5py's, xarray's and dask's."""

    def __len__(self):
        return len(self.values)


NUMBERS = np.arange(16, dtype=np.float32).reshape(8, 2)
HOLDERS = {
    "Series": FakeSeries(np.arange(8.0)),
    "Arrow": FakeArrow([*range(8)]),
    **{kind.__name__: kind(NUMBERS) for kind in (Lazy, OnlyRows, WithLength)},
}
READERS = {
    "itself": lambda held: held,
    "SimpleDataset": SimpleDataset,
    "parts": lambda held: SimpleDataset(held).take(8).shard(1, 0).filter(lambda row: np.max(row) >= 0),
    "ArrayDataset": ArrayDataset,
    "by name": lambda held: ArrayDataset(x=held).transform(lambda row: row["x"]),
    "transformed": lambda held: SimpleDataset(held).transform(lambda row: row + 0),
    "cached": lambda held: SimpleDataset(held).cache(),
    "sum": lambda held: SimpleDataset(held).take(3) + SubsetDataset(held, range(3, 8)),
    "ConcatDataset": lambda held: ConcatDataset([SimpleDataset(held).take(0), held]),
    "+": lambda held: SimpleDataset(held).take(0) + held,
}


BY_TORCH = ("itself", "Series"), ("itself", "Arrow")
"""The drop-in indexes what has a length as torch does: by the labels of a series, and with Arrow's scalars."""


EACH = [
    (reader, loader, holder)
    for loader in (ShardedDataLoader, torchs.DataLoader)
    for reader, holder in product(READERS, HOLDERS)
    if loader is ShardedDataLoader or (reader, holder) not in BY_TORCH
]


@pytest.mark.parametrize(("reader", "loader", "holder"), EACH)
def test_columns_and_arrays_of_other_libraries_are_read_by_position_and_have_the_length_of_their_shape(
    reader, loader, holder
):
    wanted = NUMBERS.tolist() if holder in ("Lazy", "OnlyRows", "WithLength") else list(range(8))
    dataset = READERS[reader](HOLDERS[holder])
    made = loader(dataset, 5)
    batches = list(made)
    assert [batch.tolist() for batch in batches] == [wanted[:5], wanted[5:]]
    assert {type(batch) for batch in batches} == {torch.Tensor}
    shuffled = torch.cat(list(loader(dataset, 3, shuffle=True, num_workers=2, thread_pool=True)))
    assert sorted(shuffled.tolist()) == wanted
    if loader is ShardedDataLoader:
        assert [np.asarray(made.read(i)).tolist() for i in range(8)] == wanted


def test_rows_are_read_at_once_where_the_array_can_and_with_a_sampler_it_keeps_its_samples():
    for make in (ArrayDataset, SimpleDataset):
        lazy = Lazy(NUMBERS)
        dataset = make(lazy)
        rows = dataset.__getitems__([5, 1, 1])
        assert [row.tolist() for row in rows] == NUMBERS[[5, 1, 1]].tolist()
        rows[1][:] = -1
        assert rows[2].tolist() == NUMBERS[1].tolist() == dataset[-7].tolist()
        assert [index.tolist() for index in lazy.asked[:1]] == [[1, 5]]
        dataset.__getitems__([3, 2, 4])
        assert lazy.asked[-1] == slice(2, 5)
        with pytest.raises(IndexError, match="dataset of 8 samples"):
            dataset[8]

    class Keys:
        shape = (2, 3)

        def __getitem__(self, key):
            return key * 2

    for loader in (ShardedDataLoader, torchs.DataLoader):
        assert list(loader(Keys(), 2, sampler=["a", "b"])) == [["aa", "bb"]]
        assert [batch.tolist() for batch in loader(Lazy(NUMBERS), 2, sampler=[3, 1])] == [NUMBERS[[3, 1]].tolist()]
    with pytest.raises(TypeError, match="without a length"):
        ArrayDataset(Lazy(np.array(3)))
