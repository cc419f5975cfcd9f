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


class NegativeArray(Negative, ArrayDataset):
    pass


class NegativeSimple(Negative, SimpleDataset):
    pass


class NegativeConcat(Negative, ConcatDataset):
    pass


class NegativeSubset(Negative, SubsetDataset):
    pass


class NegativeStored(Negative, StoredDataset):
    pass


class NegativeTransform(Negative, TransformDataset):
    pass


class NegativeTorchConcat(Negative, TorchConcat):
    pass


class NegativeNdarray(Negative, np.ndarray):
    pass


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


class NegativeOthers(Negative, BulkBase):
    pass


class NegativeItems(BulkBase):
    """Overrides what torch's DataLoader reads."""

    def __getitem__(self, index: int) -> int:
        return -1 - index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-1 - index for index in indices]


class Delegating:
    """The usual wrapper."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return -1 - self.inner[index]

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


def column() -> Any:
    return np.arange(N)


OVERRIDING: dict[str, Callable[[], Any]] = {
    "ArrayDataset": lambda: NegativeArray(column()),
    "ArrayDataset of a subclass of ndarray": lambda: ArrayDataset(column().view(NegativeNdarray)),
    "ndarray": lambda: column().view(NegativeNdarray),
    "SimpleDataset of an array": lambda: NegativeSimple(column()),
    "SimpleDataset of an ArrayDataset": lambda: NegativeSimple(ArrayDataset(column())),
    "ConcatDataset": lambda: NegativeConcat([ArrayDataset(column()[:3]), ArrayDataset(column()[3:])]),
    "SubsetDataset": lambda: NegativeSubset(ArrayDataset(column()), range(N)),
    "StoredDataset": lambda: NegativeStored(ArrayDataset(column()), "1 MB"),
    "TransformDataset": lambda: NegativeTransform(ArrayDataset(column()), int),
    "torch's ConcatDataset": lambda: NegativeTorchConcat([ArrayDataset(column())]),
    "of others": NegativeOthers,
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
        assert next(iter(DataLoader(wrapped, N))).tolist() == list(range(-1, -1 - N, -1))


def test_every_pool_reads_the_override(pool: Any) -> None:
    dataset = OVERRIDING["SimpleDataset of an ArrayDataset"]()
    with ShardedDataLoader(dataset, N, pool=pool) as loader:
        assert next(iter(loader)).tolist() == list(range(-1, -1 - N, -1))


def test_an_override_is_not_kept_on_the_device() -> None:
    dataset = NegativeArray(column())
    assert next(iter(ShardedDataLoader(dataset, N, device=Placement("cpu", resident="auto")))).tolist() == list(
        range(-1, -N - 1, -1)
    )
    own = ArrayDataset(column())
    own.get_batch = lambda indices: -1 - np.asarray(indices)  # type: ignore[method-assign]
    for whole in (
        own,
        dataset,
        SubsetWithBatches(ArrayDataset(column()), range(2)),
        dataset.take(2),
        Subset(dataset, [0]),
        NegativeTensors(torch.arange(N)),
    ):
        with pytest.raises(TypeError, match="this dataset reads something else"):
            ShardedDataLoader(whole, 1, device=Placement("cpu", resident=True))
    columns = ArrayDataset(column().view(NegativeNdarray))
    loader = ShardedDataLoader(columns, N, device=Placement("cpu", resident="auto"))
    assert next(iter(loader)).tolist() == list(range(-1, -N - 1, -1))
    with pytest.raises(TypeError, match="column 0 is a NegativeNdarray"):
        ShardedDataLoader(columns, N, device=Placement("cpu", resident=True))


def test_a_tensor_subclass_reads_its_own_rows() -> None:
    class Halved(torch.Tensor):
        def __getitem__(self, index: Any) -> Any:
            return self.as_subclass(torch.Tensor)[index] / 2

    rows = torch.arange(4.0).as_subclass(Halved)
    for dataset in (ArrayDataset(rows), SimpleDataset(rows), rows):
        assert next(iter(ShardedDataLoader(dataset, 4))).tolist() == [0.0, 0.5, 1.0, 1.5]


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
        assert next(iter(ShardedDataLoader(kind(column()), 3))).tolist() == [0, 10, 20]
        assert next(iter(ShardedDataLoader(kind(column()).take(3), 3))).tolist() == [0, 10, 20]
        assert Both.calls == 2


def test_get_batch_alone_may_be_overridden() -> None:
    class Only(ArrayDataset):
        def get_batch(self, indices: Any) -> Any:
            return super().get_batch(indices) + 100

    for dataset in (
        Only(column()),
        Only(column()).take(N),
        SimpleDataset(Only(column())),
        ArrayDataset(Only(column())),
    ):
        assert next(iter(ShardedDataLoader(dataset, 3))).tolist() == [100, 101, 102]


def test_items_that_are_overridden_come_before_an_inherited_get_batch() -> None:
    class Items(ArrayDataset):
        def __getitems__(self, indices: Any) -> list[Any]:
            return [item + 100 for item in super().__getitems__(indices)]

    for dataset in (Items(column()), Items(column()).take(N), Subset(Items(column()), range(N))):
        assert next(iter(ShardedDataLoader(dataset, 3))).tolist() == [100, 101, 102]
        assert next(iter(DataLoader(dataset, 3))).tolist() == [100, 101, 102]


def test_an_inherited_bulk_method_says_why_it_is_absent() -> None:
    dataset = NegativeArray(column())
    assert not hasattr(dataset, "get_batch")
    with pytest.raises(
        AttributeError, match=r"write get_batch in NegativeArray too, or call ArrayDataset\.get_batch\("
    ):
        dataset.get_batch([1])
    assert ArrayDataset.get_batch(dataset, [1, 2]).tolist() == [1, 2]
    assert dataset.__getitems__([1, 2]) == [-2, -3]


def test_a_method_of_the_object_itself_is_used() -> None:
    dataset = SimpleDataset([1, 2, 3])
    dataset.get_batch = lambda indices: np.array(indices) + 50  # type: ignore[method-assign]
    assert next(iter(ShardedDataLoader(dataset, 3))).tolist() == [50, 51, 52]


def test_torchs_stack_dataset_does_not_bring_an_ignored_override_back() -> None:
    stacked = StackDataset(NegativeArray(column()), TensorDataset(torch.arange(N)))
    assert [int(x) for x in next(iter(ShardedDataLoader(stacked, 3)))[0]] == [-1, -2, -3]
    others = StackDataset(x=NegativeOthers(), y=TensorDataset(torch.arange(N)))
    assert next(iter(ShardedDataLoader(others, 3)))["x"].tolist() == [-1, -2, -3]


class DoubledStack(Stack):
    def __call__(self, samples: Any) -> Any:
        return 2 * super().__call__(samples)


class DoubledDefault(DefaultBatchify):
    def __call__(self, samples: Any) -> Any:
        return 2 * super().__call__(samples)


class DoubledPad(Pad):
    def __call__(self, samples: Any) -> Any:
        return 2 * super().__call__(samples)


class DelegatingBatchify:
    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __call__(self, samples: Any) -> Any:
        return 2 * self.inner(samples)

    def __getattr__(self, name: str) -> Any:
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize(
    "fn", [DoubledStack(), DoubledDefault(), DelegatingBatchify(Stack())], ids=["Stack", "default", "wrapper"]
)
def test_an_overridden_call_of_a_batchify_function_makes_the_batch(fn: Any) -> None:
    assert next(iter(ShardedDataLoader(range(3), 3, batchify_fn=fn))).tolist() == [0, 2, 4]


@METHODS
def test_an_overridden_call_makes_the_batch_in_a_worker(method: str) -> None:
    with ShardedDataLoader(range(3), 3, batchify_fn=DoubledStack(), pool=ProcessPool(1, start_method=method)) as loader:
        assert next(iter(loader)).tolist() == [0, 2, 4]


def test_an_overridden_call_counts_inside_others_too() -> None:
    samples = [(1, [1]), (2, [2, 2])]
    one, two = Tuple(DoubledStack(), DoubledPad())(samples)
    assert one.tolist() == [2, 4]
    assert two.tolist() == [[2, 0], [4, 4]]
    with ShardedDataLoader(samples, 2, batchify_fn=Tuple(DoubledStack(), DoubledPad())) as loader:
        batch = next(iter(loader))
    assert batch[0].tolist() == [2, 4] and batch[1].tolist() == [[2, 0], [4, 4]]
