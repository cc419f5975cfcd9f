"""Splits: sizes that sum to the whole, and parts with equal shares of each class."""

from __future__ import annotations

from collections import Counter, namedtuple
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import ArrayDataset, ShardedDataLoader, SimpleDataset
from sharded_loader.data import splits
from sharded_loader.data.splits import split_sizes, stratified_parts

LABELS = list("aaaaaaaabbbbcc") * 5  # 40 a, 20 b, 10 c
RATIOS = [0.7, 0.2, 0.1]


def indices(parts: Any) -> list[list[int]]:
    return [part.indices.tolist() for part in parts]


def sequence() -> Any:
    return SimpleDataset(range(len(LABELS)))


@given(
    st.lists(st.integers(1, 12), max_size=12),
    st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    st.integers(0, 2**40),
)
def test_every_part_has_its_share_of_every_class_to_within_one(
    counts: list[int], weights: list[int], seed: int
) -> None:
    labels = [name for name, count in enumerate(counts) for _ in range(count)]
    np.random.default_rng(seed).shuffle(labels)
    sizes = split_sizes(len(labels), [weight / sum(weights) for weight in weights])
    parts = stratified_parts(labels, labels, sizes, seed)
    assert [len(part) for part in parts] == sizes
    assert sorted(index for part in parts for index in part.tolist()) == list(range(len(labels)))
    for part, size in zip(parts, sizes, strict=True):
        found = Counter(labels[index] for index in part)
        for name, count in enumerate(counts):
            assert abs(found[name] - Fraction(count * size, len(labels))) <= 1


def test_shares_that_are_whole_numbers_are_exact() -> None:
    for seed in range(20):
        parts = sequence().split(RATIOS, seed=seed, stratify=LABELS)
        assert [Counter(LABELS[index] for index in part) for part in parts] == [
            {"a": 28, "b": 14, "c": 7},
            {"a": 8, "b": 4, "c": 2},
            {"a": 4, "b": 2, "c": 1},
        ]


def test_a_split_is_a_function_of_the_labels_and_the_seed() -> None:
    first = indices(sequence().split(RATIOS, seed=1, stratify=LABELS))
    assert first == indices(sequence().split(RATIOS, seed=1, stratify=LABELS))
    assert first == indices(sequence().split([49, 14, 7], seed=1, stratify=[ord(label) for label in LABELS]))
    assert len({str(indices(sequence().split(RATIOS, seed=seed, stratify=LABELS))) for seed in range(20)}) == 20
    torch.manual_seed(3)
    drawn = indices(sequence().split(RATIOS, stratify=LABELS))
    torch.manual_seed(3)
    assert drawn == indices(sequence().split(RATIOS, stratify=LABELS)) != first


def test_a_part_is_in_random_order_and_classes_are_mixed() -> None:
    train, *_ = sequence().split(RATIOS, seed=1, stratify=LABELS)
    assert train.indices.tolist() != sorted(train.indices.tolist())
    changes = sum(LABELS[a] != LABELS[b] for a, b in pairwise(train.indices))
    assert changes > 15


def test_every_sample_comes_into_every_part() -> None:
    """Which samples a part has is random, also where it is open which class gives one more."""
    seen: list[Counter[int]] = [Counter(), Counter()]
    labels = [0, 0, 0, 1, 2, 2, 2, 3]
    for seed in range(400):
        for part, found in zip(SimpleDataset(labels).split([4, 4], seed=seed, stratify=labels), seen, strict=True):
            found.update(part.indices.tolist())
    assert all(abs(seen[1][index] - 200) < 80 for index in range(8)), seen


def test_a_class_of_one_sample_is_in_one_part() -> None:
    parts = SimpleDataset(range(10)).split([5, 5], seed=1, stratify=list("aaaaaaaaab"))
    assert sorted(sum(index == 9 for index in part) for part in parts) == [0, 1]
    each = SimpleDataset(range(10)).split([0.8, 0.2], seed=1, stratify=range(10))
    assert [len(part) for part in each] == [8, 2]


def test_an_empty_dataset_and_empty_parts_are_split_too() -> None:
    assert indices(SimpleDataset([]).split([0.5, 0.5], seed=1, stratify=[])) == [[], []]
    assert [len(part) for part in sequence().split([1.0, 0.0], seed=1, stratify=LABELS)] == [70, 0]


# -- what says the class -----------------------------------------------------------------------------------------------

Row = namedtuple("Row", "label")


class Labelled(SimpleDataset):
    """Samples with a label; it counts what is read."""

    reads = 0

    def __getitem__(self, index: Any) -> Any:
        self.reads += 1
        return {"image": index, "label": LABELS[index]}


GIVEN: dict[str, Any] = {
    "list": lambda: (sequence(), LABELS),
    "tuple": lambda: (sequence(), tuple(LABELS)),
    "array of strings": lambda: (sequence(), np.array(LABELS)),
    "array of objects": lambda: (sequence(), np.array(LABELS, object)),
    "array of numbers": lambda: (sequence(), np.array([-ord(label) for label in LABELS], np.int8)),
    "array of floats": lambda: (sequence(), np.array([ord(label) / 7 for label in LABELS])),
    "tensor": lambda: (sequence(), torch.tensor([ord(label) for label in LABELS])),
    "list of tensors": lambda: (sequence(), [torch.tensor(ord(label)) for label in LABELS]),
    "list of NumPy's numbers": lambda: (sequence(), [np.int64(ord(label)) for label in LABELS]),
    "tuples": lambda: (sequence(), [(label, 1) for label in LABELS]),
    "function": lambda: (SimpleDataset(LABELS), str.upper),
    "name": lambda: (Labelled(LABELS), "label"),
    "column": lambda: (ArrayDataset(x=np.arange(70), label=LABELS), "label"),
    "column of an array": lambda: (ArrayDataset(x=np.arange(70), label=np.array(LABELS)), "label"),
    "column of a tensor": lambda: (ArrayDataset(label=torch.tensor([ord(label) for label in LABELS])), "label"),
    "field of a transform": lambda: (SimpleDataset(LABELS).transform(lambda label: {"label": label}), "label"),
    "column of a part": lambda: (ArrayDataset(label=["x", *LABELS, "y"]).take(None)[1:-1], "label"),
    "column of an array of a part": lambda: (ArrayDataset(label=np.array(["x", *LABELS])).take(None)[1:], "label"),
    "column in a simple dataset": lambda: (SimpleDataset(ArrayDataset(label=LABELS)).take(70), "label"),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_labels_come_in_many_ways(kind: str) -> None:
    dataset, labels = GIVEN[kind]()
    wanted = indices(sequence().split(RATIOS, seed=1, stratify=LABELS))
    offset = kind.count("part")
    assert indices(dataset.split(RATIOS, seed=1, stratify=labels)) == [[i + offset for i in one] for one in wanted]


def test_functions_and_names_read_every_sample_once_and_columns_none() -> None:
    dataset = Labelled(LABELS)
    dataset.split(RATIOS, seed=1, stratify="label")
    assert dataset.reads == 70
    dataset.split(RATIOS, seed=1, stratify=lambda sample: sample["label"])
    assert dataset.reads == 140

    class Unread(list):  # type: ignore[type-arg]
        def __getitem__(self, index: Any) -> Any:
            raise AssertionError("a sample was read")

    columns = ArrayDataset(image=Unread(range(70)), label=np.array(LABELS))
    assert len(columns.take(60).split([0.5, 0.5], seed=1, stratify="label")) == 2


def test_a_subclass_that_changes_its_samples_is_read_by_its_samples() -> None:
    class Swapped(ArrayDataset):
        def __getitem__(self, index: Any) -> Any:
            return {"label": super().__getitem__(index)["other"]}

    dataset = Swapped(label=["same"] * 70, other=LABELS)
    assert indices(dataset.split(RATIOS, seed=1, stratify="label")) == indices(
        sequence().split(RATIOS, seed=1, stratify=LABELS)
    )


def test_a_column_of_hugging_face_is_read_as_a_column() -> None:
    class Table:
        """As ``datasets.Dataset`` answers."""

        column_names = ("image", "label")

        def __len__(self) -> int:
            return 70

        def __getitem__(self, index: Any) -> Any:
            assert index == "label", "a sample was read"
            return LABELS

    parts = SimpleDataset(Table()).split(RATIOS, seed=1, stratify="label")
    assert indices(parts) == indices(sequence().split(RATIOS, seed=1, stratify=LABELS))


@pytest.mark.parametrize(
    ("labels", "error", "message"),
    [
        (LABELS[1:], ValueError, "69 labels for 70 samples: give one label per sample"),
        (np.zeros(71), ValueError, "71 labels for 70 samples"),
        (np.zeros((70, 3)), TypeError, r"array of shape \(70, 3\): give one label per sample"),
        (torch.zeros(70, 1), TypeError, r"array of shape \(70, 1\)"),
        (3, TypeError, "an int: give one label per sample, the name of a field, or a function"),
        ([[1, 2]] * 70, TypeError, "a label cannot be compared"),
        ([np.zeros(2)] * 70, TypeError, r"a label cannot be compared \(it is an array of shape \(2,\)\)"),
        ("label", TypeError, "sample 0, an int, has no field 'label': give a function of a sample"),
        ({"label": 1}, TypeError, "dict"),
    ],
    ids=range(9),
)
def test_bad_labels_are_refused(labels: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        sequence().split(RATIOS, seed=1, stratify=labels)


def test_a_name_that_no_sample_has_is_refused() -> None:
    for dataset in (ArrayDataset(label=LABELS), Labelled(LABELS), ArrayDataset(label=LABELS).take(9)):
        with pytest.raises(TypeError, match="a dict, has no field 'lable': give a function of a sample"):
            dataset.split([1.0], seed=1, stratify="lable")


def test_counts_do_not_overflow() -> None:
    classes = np.array([2**40, 2**41 + 1, 1])
    sizes = np.array([2**41, int(classes.sum()) - 2**41])
    counts = splits._counts(classes, sizes, 1)
    assert counts.sum(axis=0).tolist() == sizes.tolist() and counts.sum(axis=1).tolist() == classes.tolist()


def test_the_parts_are_the_same_in_every_release() -> None:
    parts = SimpleDataset(range(8)).split([0.5, 0.25, 0.25], seed=7, stratify=list("aabbaabb"))
    assert indices(parts) == PINNED


PINNED = [[0, 5, 3, 6], [1, 2], [4, 7]]


def test_parts_are_read_alike_in_every_pool(pool: Any) -> None:
    dataset = ArrayDataset(x=np.arange(70), label=np.array([ord(label) for label in LABELS]))
    _, test, _ = dataset.split(RATIOS, seed=1, stratify="label")
    with ShardedDataLoader(test, 5, pool=pool) as loader:
        found = [index for batch in loader for index in batch["x"].tolist()]
    assert found == test.indices.tolist()
