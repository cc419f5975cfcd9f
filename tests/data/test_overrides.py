"""What a user's class overrides is what the loader reads: no faster method of a base class takes its place."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import METHODS, covering
from torch.utils.data import ConcatDataset as TorchConcat
from torch.utils.data import DataLoader, StackDataset, Subset, TensorDataset

from sharded_loader import (
    ArrayDataset,
    ConcatDataset,
    Dataset,
    Placement,
    ProcessPool,
    SequentialSampler,
    ShardedDataLoader,
    SimpleDataset,
)
from sharded_loader.batchify import Pad, Stack, Tuple
from sharded_loader.batching.default import DefaultBatchify
from sharded_loader.caching.dataset import StoredDataset
from sharded_loader.data.datasets import SubsetDataset, TransformDataset

N = 8


class Negative:
    """Overrides the samples, as a mixin."""

    def __getitem__(self, index: Any) -> Any:
        return -1 - super().__getitem__(index)  # type: ignore[misc]


class NegativeSimple(Negative, SimpleDataset):
    """Of a name, so that it can be pickled."""


def negative(base: type) -> Any:
    """A subclass that overrides the samples."""
    return type(f"Negative{base.__name__}", (Negative, base), {})


NegativeArray = negative(ArrayDataset)


class NegativeTensors(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        return tuple(-1 - tensor[index] for tensor in self.tensors)


class SubsetWithBatches(Subset):
    def get_batch(self, indices: list[int]) -> Any:
        return -1 - np.asarray(indices)


class BulkBase(Dataset):
    """Others' bulk methods, both of them."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return list(indices)

    def get_batch(self, indices: list[int]) -> Any:
        return np.array(indices)


class NegativeItems(BulkBase):
    """Overrides what torch's DataLoader reads."""

    def __getitem__(self, index: int) -> int:
        return -1 - index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-1 - index for index in indices]


class Delegates:
    """The usual wrapper."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


class Delegating(Delegates):
    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return -1 - self.inner[index]


def column() -> Any:
    return np.arange(N)


def first(dataset: Any, batch_size: int = N, **options: Any) -> Any:
    """The first batch, as lists."""
    return next(iter(ShardedDataLoader(dataset, batch_size, **options))).tolist()


NEGATIVE = list(range(-1, -1 - N, -1))


OVERRIDING: dict[str, Callable[[], Any]] = {
    "ArrayDataset": lambda: NegativeArray(column()),
    "ArrayDataset of a subclass of ndarray": lambda: ArrayDataset(column().view(negative(np.ndarray))),
    "ndarray": lambda: column().view(negative(np.ndarray)),
    "SimpleDataset of an array": lambda: NegativeSimple(column()),
    "SimpleDataset of an ArrayDataset": lambda: NegativeSimple(ArrayDataset(column())),
    "ConcatDataset": lambda: negative(ConcatDataset)([ArrayDataset(column()[:3]), ArrayDataset(column()[3:])]),
    "SubsetDataset": lambda: negative(SubsetDataset)(ArrayDataset(column()), range(N)),
    "StoredDataset": lambda: negative(StoredDataset)(ArrayDataset(column()), "1 MB"),
    "TransformDataset": lambda: negative(TransformDataset)(ArrayDataset(column()), int),
    "torch's ConcatDataset": lambda: negative(TorchConcat)([ArrayDataset(column())]),
    "of others": lambda: negative(BulkBase)(),
    "of others, __getitems__": NegativeItems,
    "a delegating wrapper": lambda: Delegating(ArrayDataset(column())),
    "a delegating wrapper of others": lambda: Delegating(BulkBase()),
    "a delegating wrapper of torch's": lambda: Delegating(Subset(ArrayDataset(column()), range(N))),
}
PATHS: dict[str, Callable[[Any], Any]] = {
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
    "concatenated": lambda d: ConcatDataset([d, ArrayDataset(column()[:0])]),
    "concatenated by torch": lambda d: TorchConcat([d, ArrayDataset(column())]),
    "a column": lambda d: ArrayDataset(d),
}


@covering(name=OVERRIDING, path=PATHS, on_error=["raise", "skip"])
def test_an_overridden_getitem_is_what_every_path_reads(name: str, path: str, on_error: str) -> None:
    dataset = PATHS[path](OVERRIDING[name]())
    expected = [int(dataset[i]) for i in range(N)]
    assert sorted(expected) == list(range(-N, 0))
    loader = ShardedDataLoader(dataset, 5, on_error=on_error)
    assert [int(x) for batch in list(loader) for x in batch][:N] == expected
    assert loader.peek().tolist() == expected[:5]
    assert [int(loader.read(i)) for i in range(N)] == expected


@pytest.mark.parametrize("name", [name for name in OVERRIDING if "others" not in name and "wrapper" not in name])
def test_torchs_own_loader_reads_the_override_of_our_classes_too(name: str) -> None:
    dataset = OVERRIDING[name]()
    for wrapped in (dataset, Subset(dataset, range(N))):
        assert next(iter(DataLoader(wrapped, N))).tolist() == NEGATIVE


def test_every_pool_reads_the_override(pool: Any) -> None:
    with ShardedDataLoader(NegativeSimple(ArrayDataset(column())), N, pool=pool) as loader:
        assert next(iter(loader)).tolist() == NEGATIVE


def test_an_override_is_not_kept_on_the_device() -> None:
    dataset, columns = NegativeArray(column()), ArrayDataset(column().view(negative(np.ndarray)))
    for one in (dataset, columns):
        assert first(one, device=Placement("cpu", resident="auto")) == NEGATIVE
    own = ArrayDataset(column())
    own.get_batch = lambda indices: -1 - np.asarray(indices)  # type: ignore[method-assign]
    subset, tensors = SubsetWithBatches(ArrayDataset(column()), range(2)), NegativeTensors(torch.arange(N))
    for whole in (own, dataset, subset, dataset.take(2), Subset(dataset, [0]), tensors):
        with pytest.raises(TypeError, match="this dataset reads something else"):
            ShardedDataLoader(whole, 1, device=Placement("cpu", resident=True))
    with pytest.raises(TypeError, match="column 0 is a Negativendarray"):
        ShardedDataLoader(columns, N, device=Placement("cpu", resident=True))


def test_a_tensor_subclass_reads_its_own_rows() -> None:
    class Halved(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            return self.as_subclass(torch.Tensor)[index] / 2

    rows = torch.arange(4.0).as_subclass(Halved)
    for dataset in (ArrayDataset(rows), SimpleDataset(rows), rows):
        assert first(dataset, 4) == [0.0, 0.5, 1.0, 1.5]


def test_a_bulk_method_that_knows_the_override_is_used() -> None:
    class Both(ArrayDataset):
        calls = 0

        def __getitem__(self, index: Any) -> Any:
            return super().__getitem__(index) * 10

        def get_batch(self, indices: Any) -> Any:
            Both.calls += 1
            return super().get_batch(indices) * 10

    class Further(Both):
        pass

    for kind in (Both, Further):
        Both.calls = 0
        assert first(kind(column()), 3) == first(kind(column()).take(3), 3) == [0, 10, 20]
        assert Both.calls == 2


class OnlyBatches(ArrayDataset):
    def get_batch(self, indices: Any) -> Any:
        return super().get_batch(indices) + 100


class OnlyItems(ArrayDataset):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [item + 100 for item in super().__getitems__(indices)]


@pytest.mark.parametrize("kind", [OnlyBatches, OnlyItems])
@pytest.mark.parametrize("wrap", ["bare", "take", "torch's Subset", "a column"])
def test_a_bulk_method_alone_may_be_overridden(kind: Any, wrap: str) -> None:
    """Items that are overridden come before an inherited get_batch."""
    dataset = PATHS[wrap](kind(column()))
    if (kind, wrap) != (OnlyItems, "a column"):
        assert first(dataset, 3) == [100, 101, 102]
    if kind is OnlyItems and wrap != "a column":
        assert next(iter(DataLoader(dataset, 3))).tolist() == [100, 101, 102]


def test_an_inherited_bulk_method_says_why_it_is_absent() -> None:
    dataset = NegativeArray(column())
    assert not hasattr(dataset, "get_batch")
    with pytest.raises(
        AttributeError, match=r"write get_batch in NegativeArrayDataset too, or call ArrayDataset\.get_batch\("
    ):
        dataset.get_batch([1])
    assert ArrayDataset.get_batch(dataset, [1, 2]).tolist() == [1, 2]
    assert dataset.__getitems__([1, 2]) == [-2, -3]


def test_a_method_of_the_object_itself_is_used() -> None:
    dataset = SimpleDataset([1, 2, 3])
    dataset.get_batch = lambda indices: np.array(indices) + 50  # type: ignore[method-assign]
    assert first(dataset, 3) == [50, 51, 52]


def test_torchs_stack_dataset_does_not_bring_an_ignored_override_back() -> None:
    for inner in (NegativeArray(column()), OVERRIDING["of others"]()):
        stacked = StackDataset(x=inner, y=TensorDataset(torch.arange(N)))
        assert next(iter(ShardedDataLoader(stacked, 3)))["x"].tolist() == [-1, -2, -3]


class Doubled:
    """Overrides what a batchify function makes, as a mixin."""

    def __call__(self, samples: Any) -> Any:
        return 2 * super().__call__(samples)  # type: ignore[misc]


class DelegatingBatchify(Delegates):
    def __call__(self, samples: Any) -> Any:
        return 2 * self.inner(samples)


class DoubledStack(Doubled, Stack):
    """Of a name, so that it can be pickled."""


class DoubledDefault(Doubled, DefaultBatchify): ...


class DoubledPad(Doubled, Pad): ...


@pytest.mark.parametrize(
    "fn", [DoubledStack(), DoubledDefault(), DelegatingBatchify(Stack())], ids=["Stack", "default", "wrapper"]
)
def test_an_overridden_call_of_a_batchify_function_makes_the_batch(fn: Any) -> None:
    assert first(range(3), 3, batchify_fn=fn) == [0, 2, 4]


@METHODS
def test_an_overridden_call_makes_the_batch_in_a_worker(method: str) -> None:
    with ShardedDataLoader(range(3), 3, batchify_fn=DoubledStack(), pool=ProcessPool(1, start_method=method)) as loader:
        assert next(iter(loader)).tolist() == [0, 2, 4]


def test_an_overridden_call_counts_inside_others_too() -> None:
    samples, fn = [(1, [1]), (2, [2, 2])], Tuple(DoubledStack(), DoubledPad())
    for one, two in (fn(samples), next(iter(ShardedDataLoader(samples, 2, batchify_fn=fn)))):
        assert one.tolist() == [2, 4] and two.tolist() == [[2, 0], [4, 4]]
