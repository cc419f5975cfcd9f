"""What does not fit a sampler is refused in words: arguments, datasets of another length, states of another order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    BucketScheme,
    ClassBalancedBatchSampler,
    ConstWidthBucket,
    ExpWidthBucket,
    FilterSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    IntervalSampler,
    LinearWidthBucket,
    PackSampler,
    RandomSampler,
    RepeatedSampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    ShuffleBuffer,
    SortedBucketSampler,
    SortedSampler,
    SubsetRandomSampler,
    TokenWindows,
    WeightedRandomSampler,
)
from sharded_loader.batchify import Pack
from sharded_loader.engine.order import resolve_replicas

LABELS = [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 3, 3, 3, 0, 1]
LENGTHS = [3, 5, 4, 6, 2, 7, 1, 8, 3, 5, 4, 6]
DOCUMENTS = [[11, 12, 13], [21, 22], [31, 32, 33, 34]]

fixed = partial(FixedBucketSampler, batch_size=8)
classes = partial(ClassBalancedBatchSampler, LABELS)
pack = partial(PackSampler, LENGTHS)


def loaded(batch_sampler: Any, samples: int = 4, **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(range(samples), batch_sampler=batch_sampler, **given)


def costly(costs: Any, **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(range(4), **({"batch_size": 2} | given), costs=costs)


def read_packed(documents: list[Any], lengths: list[int], rows_of: int, **given: Any) -> list[Any]:
    batches = PackSampler(lengths, shuffle=False, **given)
    return list(ShardedDataLoader(documents, batch_sampler=batches, batchify_fn=Pack(rows_of)))


class TooShort(BucketScheme):
    def keys(self, longest: int, shortest: int, num_buckets: int) -> list[int]:
        return [longest - 1]


BAD = (TypeError, ValueError)
NO_KEYS = "makes no buckets: override keys"
OF_DOCUMENT = "sample 0 of the batch "

AT_LEAST_ONE = (
    *(partial(IntervalSampler, 3), partial(GroupedBatchSampler, LABELS), partial(SortedBucketSampler, [1])),
    *(
        partial(classes, 1),
        lambda count: classes(count, 1),
        RepeatedSampler,
        pack,
        partial(pack, 9),
        Pack,
        partial(ShardShuffleSampler, [1]),
    ),
    partial(resolve_replicas, rank=0),
)

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    *((partial(make, 0), ValueError, "must be at least 1") for make in AT_LEAST_ONE),
    (lambda: classes(1, 1, -1), ValueError, "batches must be at least 0"),
    (lambda: RandomSampler(2.5), TypeError, "length must be an integer"),  # type: ignore[arg-type]
    (lambda: ShuffleBuffer(range(3), 2.5), TypeError, "size must be an integer"),  # type: ignore[arg-type]
    (lambda: TokenWindows(np.arange(9), 2.5), TypeError, "length must be an integer"),  # type: ignore[arg-type]
    # buckets
    (lambda: fixed([3, 0]), ValueError, r"lengths\[1\] is 0"),
    # NumPy 1.23 makes an array of objects.
    (lambda: fixed([[1, 2], [3]]), ValueError, r"rows of different sizes|shape \(2,\) and dtype object"),
    (lambda: fixed([1], last_group="x"), ValueError, "'keep', 'discard' or 'overlap'"),
    (lambda: fixed([1], num_shards=-1), ValueError, "num_shards must be at least 0"),
    (lambda: fixed([1], num_buckets=None), ValueError, "neither num_buckets nor bucket_keys"),
    (lambda: fixed([1], bucket_keys=5), TypeError, "bucket_keys is 5: give a list"),
    (lambda: fixed([1], bucket_keys=np.array([])), ValueError, "give a bucket key"),
    (lambda: fixed([1], bucket_keys=np.array([1.5])), TypeError, "give integers"),
    (lambda: fixed([1, 7], bucket_keys=[5]), ValueError, "sample 1 has length"),
    (lambda: fixed([[1, 7]], bucket_keys=[5]), ValueError, "1 numbers, but a length has 2"),
    (lambda: FixedBucketSampler([1, 2], [1, 2, 3], bucket_keys=[1, 2]), ValueError, "3 numbers, and there are 2"),
    (
        lambda: FixedBucketSampler([1, 2], [1, 2]),
        ValueError,
        "one number for each of bucket_keys",
    ),
    (lambda: FixedBucketSampler([1, 2], [1, 2], bucket_keys=[2, 2]), ValueError, "there are 1 bucket"),
    (lambda: FixedBucketSampler([1, 2], [1, 0], bucket_keys=[1, 2]), ValueError, "must be at least 1, got 0"),
    (lambda: fixed([1, 2], last_batch="no"), ValueError, "last_batch is 'no'"),
    (lambda: fixed(LENGTHS, bucket_scheme=TooShort()), ValueError, "1 samples fit no bucket: sample 7 has length"),
    (lambda: type("Nothing", (BucketScheme,), {})()(10, 1, 2), NotImplementedError, NO_KEYS),
    (lambda: BucketScheme().keys(10, 1, 2), NotImplementedError, NO_KEYS),
    *(
        (partial(scheme, 10, 1, number), BAD, "num_buckets")
        for scheme in (ConstWidthBucket(), LinearWidthBucket(), ExpWidthBucket(), TooShort())
        for number in (0, 2.5, "many", True)
    ),
    (lambda: fixed([1], ratio="x"), TypeError, "ratio must be a finite number of at least 0, got 'x'"),
    (lambda: fixed([1], ratio=-1), ValueError, "ratio must be a finite number"),
    (lambda: fixed([1], bucket_scheme="linear"), TypeError, "bucket_scheme is 'linear'; it must be a function"),
    (lambda: fixed([1], bucket_scheme=ConstWidthBucket), TypeError, "bucket_scheme is the class ConstWidthBucket"),
    (lambda: FixedBucketSampler([1], [[1], [2, 3]], bucket_keys=[1]), TypeError, "batch_size must be an integer"),
    (lambda: SortedBucketSampler([1], 2, "2"), TypeError, "mult must be at least 1, got '2'"),  # type: ignore[arg-type]
    # keys, indices and weights
    *(
        (partial(make, keys), TypeError, "sort_keys is .*give comparable keys, one per sample")
        for make in (SortedSampler, partial(SortedBucketSampler, batch_size=2))
        for keys in (None, 3, {0: 5, 1: 3}, {1, 2}, [1, "a"], [None, None], iter([1]), np.array(3))
    ),
    (lambda: SubsetRandomSampler([[1], [2, 3]]), ValueError, "indices must be a 1-D sequence"),
    (lambda: FilterSampler(bool, 5), TypeError, "FilterSampler needs an object with __getitem__"),
    *(
        (partial(WeightedRandomSampler, weights, 1), ValueError, "weights must be")
        for weights in ("ab", {1: 2}, [1, "a"], [[1], [2, 3]], 5, np.array(5))
    ),
    (lambda: WeightedRandomSampler([1], 1).update([0], "a"), ValueError, "values must be numbers"),
    # shards of a batch
    (lambda: list(ShardedBatchSampler([1, 2], 2)), TypeError, "batch 0 is 1, no list of indices: give a batch_sampler"),
    (lambda: list(ShardedBatchSampler(torch.arange(2), 2)), TypeError, "batch 0 is .*, no list of indices"),
    (lambda: ShardedBatchSampler([[0]], 2, costs=5), TypeError, "costs is 5: give one number per sample"),
    (lambda: ShardedBatchSampler([[0]], 2, costs=["a"]), ValueError, "costs must be numbers"),
    (lambda: ShardedBatchSampler([[0]], 2, costs=[[1], [2, 3]]), ValueError, "costs must be"),
    *(
        (
            partial(ShardedDataLoader, range(4), 2, sampler=sampler),
            TypeError,
            "yields batches: give it as batch_sampler=",
        )
        for sampler in (
            BatchSampler(RandomSampler(4), 2),
            FixedBucketSampler([1] * 4, 2, num_buckets=1),
            ClassBalancedBatchSampler([0] * 4, 1, 2),
            ShardedBatchSampler([[0]], 2),
        )
    ),
    # costs
    (lambda: costly([1, 2]), ValueError, "the dataset has 4 samples: give one number for each"),
    (lambda: costly(np.ones((1, 4))), ValueError, "shape"),
    (lambda: costly([1, 0, 2, 3]), ValueError, "cost of sample 1 is 0.0"),
    (lambda: costly([1, 2, 3, float("nan")]), ValueError, "cost of sample 3 is nan"),
    (lambda: costly("abcd"), TypeError, "costs must be numbers"),
    (lambda: costly(lambda index: "long"), TypeError, "costs must be numbers"),
    (lambda: costly([1] * 4, sampler=[0, 1]), ValueError, "costs= and sampler= both decide the order"),
    (lambda: costly([1] * 4, last_batch="rollover"), ValueError, "rollover"),
    (lambda: loaded([[0]], costs=[1] * 4), ValueError, "costs= and batch_sampler= both decide the order"),
    (
        lambda: ShardedDataLoader(lambda: iter(range(4)), 2, costs=[1] * 4),
        ValueError,
        "iterable data, which comes in its own order: leave out costs",
    ),
    # labels
    (lambda: GroupedBatchSampler(LABELS, {0: 1, 1: 1, 2: 1}), ValueError, "no number for the kind 3"),
    (lambda: GroupedBatchSampler(5, 2), TypeError, "by must be a sequence of hashable"),  # type: ignore[arg-type]
    (lambda: classes(5, 1), ValueError, "classes is 5, but the labels have 4 classes"),
    (lambda: classes(2, 4), ValueError, "samples is 4, but class 2 has 3, and 2 classes"),
    (lambda: ClassBalancedBatchSampler([], 1, 1), ValueError, "the labels have 0 classes"),
    (lambda: ClassBalancedBatchSampler([[1], [2]], 1, 1), TypeError, "labels must be a sequence of hashable"),
    (lambda: ClassBalancedBatchSampler(None, 1, 1), TypeError, "labels must be a sequence"),  # type: ignore[arg-type]
    (lambda: GroupedBatchSampler({0: 1, 1: 2}, 2), TypeError, "by must be a sequence of .*: a dict or set has no"),  # type: ignore[arg-type]
    (lambda: ClassBalancedBatchSampler(np.eye(3), 1, 1), ValueError, r"labels has shape \(3, 3\)"),
    # copies
    (lambda: RepeatedSampler(RandomSampler(4)), TypeError, "copies must be an integer"),  # type: ignore[arg-type]
    (lambda: RepeatedSampler(2, 5), TypeError, "sampler must be a sampler"),  # type: ignore[arg-type]
    (lambda: len(RepeatedSampler(2)), ValueError, r"give it to a loader as sampler=, or give it a sampler"),
    (lambda: iter(RepeatedSampler(2)), ValueError, "has no order to repeat"),
    (lambda: list(RepeatedSampler(2, [[1, 2], [3]])), TypeError, "repeats single integer indices"),
    (
        lambda: ShardedDataLoader([1], 1, shuffle=True, sampler=RepeatedSampler(2, SequentialSampler(1))),
        ValueError,
        "shuffle must not be specified",
    ),
    # shards
    (lambda: ShardShuffleSampler([1.5]), TypeError, "flat sequence of integers"),
    (lambda: ShardShuffleSampler([[1]]), TypeError, "flat sequence of integers"),  # type: ignore[list-item]
    (lambda: ShardShuffleSampler([1, -1]), ValueError, r"lengths\[1\] is -1"),
    (lambda: ShardShuffleSampler([2**62, 2**62]), ValueError, "2\\*\\*62"),
    (lambda: ShardShuffleSampler(np.broadcast_to(2**40, 2**30)), ValueError, "2\\*\\*62"),
    (lambda: ShardShuffleSampler([1], lanes=0.5), TypeError, "lanes must be an integer"),  # type: ignore[arg-type]
    # packed rows
    (lambda: PackSampler([3, 0, 2], 9), ValueError, "document 1 has 0 tokens, and a row has 1 to 9: leave it out"),
    (lambda: PackSampler([3, 33], 32), ValueError, r'document 1 has 33 tokens, .* 1 to 32: .*"drop".*long="cut"'),
    (lambda: PackSampler([3.5], 9), BAD, "lengths of tokens must be integers of shape"),
    (lambda: PackSampler([[3, 4]], 9), BAD, r"got shape \(1, 2\)"),
    (lambda: PackSampler(iter([3]), 9), BAD, "lengths of tokens must be integers"),
    (lambda: pack(2**31), ValueError, r"below 2\*\*31"),
    (lambda: pack(9, 2.5), TypeError, "rows must be an integer"),
    (lambda: pack(9, window=0), ValueError, "window must be at least 1"),
    (lambda: pack(9, long="split"), ValueError, "long is 'split', which PackSampler does not know: choose 'error', "),
    (lambda: pack(9, last_batch="rollover"), ValueError, "choose 'keep' or 'discard'"),
    (lambda: Pack(8, pad_id=None), TypeError, "pad_id must be an integer"),  # type: ignore[arg-type]
    (lambda: Pack(8, media=None), TypeError, "media is None: give names of fields"),  # type: ignore[arg-type]
    (lambda: Pack(3)(DOCUMENTS), ValueError, 'sample 2 of the batch has 4 tokens, and a row has 3: .*long="cut"'),
    (lambda: Pack(8)([]), ValueError, "a batch of no samples"),
    (lambda: Pack(8)([[1], []]), BAD, r"sample 1 of the batch is \[\], with .*\(0,\).*: give token ids"),
    (lambda: Pack(8)([[1], [2.5]]), BAD, r"sample 1 of the batch is \[2.5\], with .*float64"),
    (lambda: Pack(8)([np.ones((2, 2), int)]), BAD, rf"{OF_DOCUMENT}is .*\(2, 2\), 'int64'"),
    (lambda: Pack(8)([5]), BAD, f"{OF_DOCUMENT}is"),
    (lambda: Pack(8)(["text"]), BAD, f"{OF_DOCUMENT}is 'text', with .* no text"),
    (lambda: Pack(8)([{"text": "a"}]), BAD, f"{OF_DOCUMENT}is <dict .*, with {{}}: .*'input_ids'"),
    (
        lambda: Pack(8)([{"input_ids": np.zeros(0, int), "labels": [1]}]),
        BAD,
        r"'input_ids': \(\(0,\).*: give token ids",
    ),
    (lambda: Pack(8)([{"input_ids": [1, 2], "labels": [1]}]), BAD, r"'input_ids': \(\(2,\).*'labels': \(\(1,\)"),
    (
        lambda: read_packed([[*range(9)], [1, 2], [1, 2]], [9, 2, 3], 4, tokens=4, long="cut", rows=9),
        ValueError,
        "document 2 has 2 tokens, and PackSampler has the length 3 for it.*\n.*sample 2",
    ),
    (
        lambda: read_packed([[1] * 6, [2] * 2], [6, 2], 4, tokens=8),
        ValueError,
        "has planned a row of 8 tokens, and Pack makes rows of 4",
    ),
    # datasets of another length
    *(
        (partial(loaded, sampler, samples), ValueError, f"has 4 lengths, but the dataset has {samples} samples: give")
        for samples in (3, 5)
        for sampler in (
            FixedBucketSampler([3, 5, 4, 6], 2, num_buckets=1),
            SortedBucketSampler([3, 5, 4, 6], 2),
            BoundedBudgetSampler([3, 5, 4, 6], 20),
            PackSampler([3, 5, 4, 6], 9),
        )
    ),
    (lambda: loaded(GroupedBatchSampler(LABELS, 2), 16), ValueError, "15 labels, but the dataset has 16 samples"),
    (lambda: loaded(classes(1, 1), 9), ValueError, "15 labels, but the dataset has 9 samples"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_does_not_fit_a_sampler_is_refused_in_words(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert caught.match(message)


def test_kinds_of_a_generator_and_weights_of_any_dtype_of_torch_are_taken() -> None:
    assert sorted(map(sorted, GroupedBatchSampler(iter([0, 1, 0]), 2, seed=0))) == [[0, 2], [1]]  # type: ignore[arg-type]
    sampler = WeightedRandomSampler(torch.tensor([0, 3], dtype=torch.bfloat16), 2, seed=0)  # type: ignore[arg-type]
    sampler.update([0, 1], torch.tensor([1, 0], dtype=torch.bfloat16))
    assert list(sampler) == [0, 0]
    sampler.update([0, 1], torch.tensor(2.0))
    assert sampler.weights.tolist() == [2, 2]


def test_a_refresh_with_a_dataset_of_another_length_is_refused() -> None:
    documents = [[1, 2], [3]]
    loader = ShardedDataLoader(documents, batch_sampler=PackSampler([2, 1], 9), batchify_fn=Pack(9))
    documents.append([4])
    with pytest.raises(ValueError, match="has 2 lengths, but the dataset has 3"):
        loader.refresh()
