"""What a user's class overrides is what the loader reads: no faster method of a base class takes its place."""

import numpy as np
import pytest
import torch
from conftest import covering
from torch.utils.data import ConcatDataset as TorchConcat
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset

from sharded_loader import (
    ArrayDataset,
    ConcatDataset,
    Dataset,
    Placement,
    SequentialSampler,
    ShardedDataLoader,
    SimpleDataset,
)
from sharded_loader.batchify import Pad, Stack, Tuple
from sharded_loader.batching.default import DefaultBatchify
from sharded_loader.caching.dataset import StoredDataset
from sharded_loader.data.datasets import SubsetDataset, TransformDataset

N = 8
COLUMN = np.arange(N)


class Negative:
    """Overrides the samples, as a mixin."""

    def __getitem__(self, index):
        return -1 - super().__getitem__(index)


class NegativeSimple(Negative, SimpleDataset):
    """Of a name, so that it can be pickled."""


def negative(base):
    """A subclass that overrides the samples."""
    return type(f"Negative{base.__name__}", (Negative, base), {})


NegativeArray = negative(ArrayDataset)


class NegativeTensors(TensorDataset):
    def __getitem__(self, index):
        return tuple(-1 - tensor[index] for tensor in self.tensors)


class NegativeRows(torch.Tensor):
    def __getitem__(self, index):
        return -1 - self.as_subclass(torch.Tensor)[index]


class BulkBase(Dataset):
    """Others' bulk methods, both of them."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return index

    def __getitems__(self, indices):
        return list(indices)

    def get_batch(self, indices):
        return np.array(indices)


class NegativeItems(Negative, BulkBase):
    """Overrides what torch's DataLoader reads."""

    def __getitems__(self, indices):
        return [-1 - index for index in indices]


class Delegates:
    """The usual wrapper."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Delegating(Delegates):
    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return -1 - self.inner[index]


def first(dataset, batch_size=N, **options):
    """The first batch, as lists."""
    return next(iter(ShardedDataLoader(dataset, batch_size, **options))).tolist()


NEGATIVE = list(range(-1, -1 - N, -1))


OVERRIDING = {
    "ArrayDataset": lambda: NegativeArray(COLUMN),
    "ArrayDataset of a subclass of ndarray": lambda: ArrayDataset(COLUMN.view(negative(np.ndarray))),
    "tensor": lambda: torch.arange(N).as_subclass(NegativeRows),
    "ArrayDataset of a subclass of Tensor": lambda: ArrayDataset(torch.arange(N).as_subclass(NegativeRows)),
    "ndarray": lambda: COLUMN.view(negative(np.ndarray)),
    "SimpleDataset of an array": lambda: NegativeSimple(COLUMN),
    "SimpleDataset of an ArrayDataset": lambda: NegativeSimple(ArrayDataset(COLUMN)),
    "ConcatDataset": lambda: negative(ConcatDataset)([ArrayDataset(COLUMN[:3]), ArrayDataset(COLUMN[3:])]),
    "SubsetDataset": lambda: negative(SubsetDataset)(ArrayDataset(COLUMN), range(N)),
    "StoredDataset": lambda: negative(StoredDataset)(ArrayDataset(COLUMN), "1 MB"),
    "TransformDataset": lambda: negative(TransformDataset)(ArrayDataset(COLUMN), int),
    "torch's ConcatDataset": lambda: negative(TorchConcat)([ArrayDataset(COLUMN)]),
    "of others": lambda: negative(BulkBase)(),
    "of others, __getitems__": NegativeItems,
    "a delegating wrapper": lambda: Delegating(ArrayDataset(COLUMN)),
    "a delegating wrapper of others": lambda: Delegating(BulkBase()),
    "a delegating wrapper of torch's": lambda: Delegating(Subset(ArrayDataset(COLUMN), range(N))),
}
PATHS = {
    "bare": lambda d: d,
    "transform": lambda d: SimpleDataset(d).transform(int),
    "transform_first": lambda d: SimpleDataset(d).transform_first(int),
    "take": lambda d: SimpleDataset(d).take(N),
    "shard": lambda d: SimpleDataset(d).shard(1, 0),
    "filter": lambda d: SimpleDataset(d).filter(lambda x: True),
    "sample": lambda d: SimpleDataset(d).sample(SequentialSampler(N)),
    "split": lambda d: SimpleDataset(d).split([N, 0], seed=1)[0],
    "cache": lambda d: SimpleDataset(d).cache(),
    "ours, directly": lambda d: SubsetDataset(d, range(N)),
    "torch's Subset": lambda d: Subset(d, list(range(N))),
    "Subset of ours": lambda d: Subset(SubsetDataset(d, range(N)), range(N)),
    "ours of Subset": lambda d: SimpleDataset(Subset(d, range(N))).take(N),
    "concatenated": lambda d: ConcatDataset([d, ArrayDataset(COLUMN[:0])]),
    "concatenated by torch": lambda d: TorchConcat([d, ArrayDataset(COLUMN)]),
    "a column": lambda d: ArrayDataset(d),
}


@covering(name=OVERRIDING, path=PATHS, on_error=["raise", "skip"])
def test_an_overridden_getitem_is_what_every_path_reads(name, path, on_error):
    dataset = PATHS[path](OVERRIDING[name]())
    expected = [int(dataset[i]) for i in range(N)]
    assert sorted(expected) == list(range(-N, 0))
    loader = ShardedDataLoader(dataset, 5, on_error=on_error)
    assert [int(x) for batch in list(loader) for x in batch][:N] == expected
    assert loader.peek().tolist() == expected[:5]
    assert [int(loader.read(i)) for i in range(N)] == expected
    if "others" not in name and "wrapper" not in name:  # torch's own loader reads our classes so too
        assert next(iter(DataLoader(dataset, N))).tolist() == expected


def test_every_pool_reads_the_override_of_a_dataset_and_of_a_batchify_function(pool):
    dataset = NegativeSimple(ArrayDataset(COLUMN))
    with ShardedDataLoader(dataset, N, batchify_fn=DoubledStack(), pool=pool) as loader:
        assert next(iter(loader)).tolist() == [2 * value for value in NEGATIVE]


def test_an_override_is_not_kept_on_the_device():
    dataset, columns = NegativeArray(COLUMN), ArrayDataset(COLUMN.view(negative(np.ndarray)))
    for one in (dataset, columns):
        assert first(one, device=Placement("cpu", resident="auto")) == NEGATIVE
    own = ArrayDataset(COLUMN)
    own.get_batch = lambda indices: -1 - np.asarray(indices)
    with_batches = type("SubsetWithBatches", (Subset,), {"get_batch": lambda _, indices: -1 - np.asarray(indices)})
    subset, tensors = with_batches(ArrayDataset(COLUMN), range(2)), NegativeTensors(torch.arange(N))
    for whole in (own, dataset, subset, dataset.take(2), Subset(dataset, [0]), tensors):
        with pytest.raises(TypeError, match="this dataset reads something else"):
            ShardedDataLoader(whole, 1, device=Placement("cpu", resident=True))
    with pytest.raises(TypeError, match="column 0 is a Negativendarray"):
        ShardedDataLoader(columns, N, device=Placement("cpu", resident=True))


class OnlyBatches(ArrayDataset):
    def get_batch(self, indices):
        return np.asarray(indices) + 100


class OnlyItems(ArrayDataset):
    """Items that are overridden come before an inherited get_batch."""

    def __getitems__(self, indices):
        return [index + 100 for index in indices]


class Both(OnlyBatches):
    """Knows its override."""

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    def get_batch(self, indices):
        return np.asarray(indices) + 100


class Further(Both):
    pass


@pytest.mark.parametrize("kind", [OnlyBatches, OnlyItems, Both, Further])
@pytest.mark.parametrize("wrap", ["bare", "take", "torch's Subset", "a column"])
def test_a_bulk_method_that_is_overridden_and_knows_an_override_of_samples_is_used(kind, wrap):
    dataset = PATHS[wrap](kind(COLUMN))
    if (kind, wrap) != (OnlyItems, "a column"):
        assert first(dataset, 3) == [100, 101, 102]
    if kind is OnlyItems and wrap != "a column":
        assert next(iter(DataLoader(dataset, 3))).tolist() == [100, 101, 102]


def test_an_inherited_bulk_method_says_why_it_is_absent():
    dataset = NegativeArray(COLUMN)
    assert not hasattr(dataset, "get_batch")
    with pytest.raises(
        AttributeError, match=r"write get_batch in NegativeArrayDataset too, or call ArrayDataset\.get_batch\("
    ):
        dataset.get_batch([1])
    assert ArrayDataset.get_batch(dataset, [1, 2]).tolist() == [1, 2]
    assert dataset.__getitems__([1, 2]) == [-2, -3]


def test_a_method_of_the_object_itself_is_used_and_no_ignored_one_inside_torchs_stack_dataset():
    dataset = SimpleDataset([1, 2, 3])
    dataset.get_batch = lambda indices: np.array(indices) + 50
    assert first(dataset, 3) == [50, 51, 52]
    for inner in (NegativeArray(COLUMN), OVERRIDING["of others"]()):
        stacked = StackDataset(x=inner, y=TensorDataset(torch.arange(N)))
        assert next(iter(ShardedDataLoader(stacked, 3)))["x"].tolist() == [-1, -2, -3]


class Doubled:
    """Overrides what a batchify function makes, as a mixin."""

    def __call__(self, samples):
        return 2 * super().__call__(samples)


class DoubledStack(Doubled, Stack):
    """Of a name, so that it can be pickled."""


class DelegatingBatchify(Delegates):
    def __call__(self, samples):
        return 2 * self.inner(samples)


def test_an_overridden_call_of_a_batchify_function_makes_the_batch_also_inside_others():
    doubled_default, doubled_pad = (type("Own", (Doubled, kind), {})() for kind in (DefaultBatchify, Pad))
    for fn in (DoubledStack(), doubled_default, DelegatingBatchify(Stack())):
        assert first(range(3), 3, batchify_fn=fn) == [0, 2, 4]
    samples, fn = [(1, [1]), (2, [2, 2])], Tuple(DoubledStack(), doubled_pad)
    for one, two in (fn(samples), next(iter(ShardedDataLoader(samples, 2, batchify_fn=fn)))):
        assert one.tolist() == [2, 4] and two.tolist() == [[2, 0], [4, 4]]
