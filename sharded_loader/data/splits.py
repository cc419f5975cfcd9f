"""How a dataset is split into parts: their sizes, and which samples of each class belong to which part.

    split_sizes(length, ratios)                       -> a size per part
    stratified_parts(dataset, labels, sizes, seed)    -> the indices of each part, a pure function of labels and seed

A part of s out of n samples should have ``c * s / n`` of the c samples of a class. That number is rounded down first.
The samples that are left over are then given to the parts one by one. So classes and parts have their exact sizes, and
no part gets more than one extra sample of a class.

Nothing is kept. What can go wrong: sizes that do not sum to the whole, not one label per sample, labels that cannot be
compared. All are rejected with an error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.batching.protocol import known_to
from sharded_loader.batching.tree import as_numpy, is_column
from sharded_loader.data.bulk import each_sample, part_of
from sharded_loader.data.columns import as_column
from sharded_loader.randomness.shuffle import Indices, shuffled


def split_sizes(length: int, parts: list[Any]) -> list[int]:
    """Sizes of parts that sum to ``length``, from sizes or ratios.

    Raises:
        ValueError: they do not sum to the whole, or one is not a number of at least 0.

    Example:
        >>> split_sizes(11, [0.8, 0.2]), split_sizes(11, [8, 3])
        ([9, 2], [8, 3])
    """
    if not parts:
        raise ValueError("split([]): give at least one size or ratio")
    if any(isinstance(part, (bool, np.bool_, str)) or not 0 <= part < math.inf for part in parts):
        raise ValueError(f"split({parts}): sizes and ratios are numbers of 0 or more")
    if all(isinstance(part, (int, np.integer)) for part in parts):
        if sum(parts) == length:
            return parts
        advice = "make them sum to its length, or give ratios (floats) that sum to 1"
        raise ValueError(f"split({parts}): the sizes sum to {sum(parts)}, the dataset has {length} samples: {advice}")
    total = math.fsum(parts)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"split({parts}): the ratios sum to {total:g}: make them sum to 1, or give sizes (ints)")
    exact = [Fraction(float(part)) for part in parts]
    return apportioned(length, [part * length / sum(exact) for part in exact], digits=9)


def apportioned(total: int, shares: Sequence[Fraction], digits: int | None = None) -> list[int]:
    """Whole numbers with this total, each a share rounded down or up. The largest remainders are rounded up.

    Args:
        total: what the shares sum to.
        shares: of the total, exact.
        digits: decimal places of the remainders that count. So 0.29 * 100 counts as a whole 29. None: all.

    Returns:
        One number per share; of equal remainders, the earlier one is rounded up.

    Example:
        >>> apportioned(10, [Fraction(10, 3)] * 3)
        [4, 3, 3]
    """
    counts = list(map(math.floor, shares))
    exact = [count - share for count, share in zip(counts, shares, strict=True)]
    below: list[Any] = exact if digits is None else [round(float(one), digits) for one in exact]
    for number in sorted(range(len(counts)), key=below.__getitem__)[: total - sum(counts)]:
        counts[number] += 1
    return counts


def stratified_parts(dataset: Any, labels: Any, sizes: Sequence[int], seed: int) -> list[Indices]:
    """The indices of parts of these sizes, each with its share of every class to within one sample.

    Args:
        dataset: what is split.
        labels: see `Dataset.split`.
        sizes: of the parts; they sum to the length of the dataset.
        seed: decides the rest.

    Returns:
        An array of indices per part, in random order.

    Raises:
        TypeError: labels that cannot be compared.
        ValueError: there is not one label per sample.

    Example:
        >>> [sorted(part.tolist()) for part in stratified_parts("aaabbb", list("aaabbb"), [2, 4], seed=1)]
        [[1, 5], [0, 2, 3, 4]]
    """
    classes = _classes(dataset, labels)
    counts = _counts(np.bincount(classes), np.array(sizes, np.int64), seed)
    order = shuffled(len(classes), seed, "stratified split")
    by_class = order[np.argsort(classes[order], kind="stable")]
    owners = np.empty(len(classes), np.int64)
    owners[by_class] = np.repeat(np.tile(np.arange(len(sizes)), len(counts)), counts.ravel())
    return [order[owners[order] == part] for part in range(len(sizes))]


def _counts(classes: Indices, sizes: Indices, seed: int) -> Indices:
    """How many samples of each class (row) go to each part (column).

    Rows sum to the classes and columns to the sizes, exactly. Each number is the exact share rounded down, or one more.
    """
    total = max(int(sizes.sum()), 1)
    exact = np.outer(classes.astype(object), sizes.astype(object))  # Python's ints: no product overflows
    counts = np.array(exact // total, np.int64).reshape(len(classes), len(sizes))
    remainders = np.array(exact % total, np.int64).reshape(counts.shape)
    wanted = sizes - counts.sum(axis=0)
    # The parts that want most go first: then it always comes out even (Gale and Ryser, 1957, on 0-1 matrices).
    for row in shuffled(len(classes), seed, "stratified classes").tolist():
        extra = int(classes[row] - counts[row].sum())
        first = np.lexsort((-remainders[row], -wanted))[:extra]
        counts[row, first] += 1
        wanted[first] -= 1
    return counts


def _classes(dataset: Any, labels: Any) -> Indices:
    """The class of each sample as a number; classes count in the order in which they come first."""
    name = "split(stratify=...)"
    if isinstance(labels, str):
        labels = _field(dataset, labels)
    elif callable(labels) and not hasattr(labels, "__getitem__"):
        labels = [labels(sample) for sample in each_sample(dataset)]
    labels = as_column(labels, name)
    if is_column(labels):
        labels = as_numpy(labels)
    if not hasattr(labels, "__len__") or getattr(labels, "ndim", 1) != 1:
        found = f"an array of shape {tuple(labels.shape)}" if hasattr(labels, "shape") else an(type(labels))
        raise TypeError(f"{name} was given {found}: give one label per sample, the name of a field, or a function")
    if len(labels) != len(dataset):
        raise ValueError(f"{name} was given {len(labels)} labels for {len(dataset)} samples: give one label per sample")
    if isinstance(labels, np.ndarray) and labels.dtype.kind in "biufUSmM":
        _, first, classes = np.unique(labels, return_index=True, return_inverse=True)
        return np.argsort(np.argsort(first))[classes].astype(np.int64)
    known: dict[Any, int] = {}
    try:
        return np.array([known.setdefault(_plain(label), len(known)) for label in labels], np.int64)
    except TypeError as error:
        raise TypeError(f"{name}: a label cannot be compared ({error}): give numbers, strings or tuples") from None


def _plain(label: Any) -> Any:
    """A label that equals others of its value: NumPy's numbers do, but tensors do not."""
    if hasattr(label, "ndim") and hasattr(label, "item"):
        if label.ndim:
            raise TypeError(f"it is an array of shape {tuple(label.shape)}")
        return label.item()
    return label


def _field(dataset: Any, name: str) -> Any:
    """One field of all samples: a column, if the dataset reads from columns; otherwise read from each sample."""
    column = _column(dataset, name)
    if column is not None:
        return column
    found = []
    for index, sample in enumerate(each_sample(dataset)):
        try:
            found.append(sample[name])
        except (TypeError, KeyError, IndexError):
            raise TypeError(
                f"split(stratify={name!r}): sample {index}, {an(type(sample))}, has no field {name!r}: "
                "give a function of a sample, such as stratify=lambda sample: sample[1]"
            ) from None
    return found


def _column(dataset: Any, name: str) -> Any:
    """A column of an `ArrayDataset` or a Hugging Face dataset, or of a part of one; None if there is none."""
    if known_to(type(dataset), "columns", ["__getitem__"]) is not None and isinstance(dataset.columns, Mapping):
        return dataset.columns.get(name)
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset[name]
    inner, translate = part_of(dataset) or (None, None)
    column = None if translate is None else _column(inner, name)
    return column if translate is None or column is None else [column[i] for i in translate(np.arange(len(dataset)))]
