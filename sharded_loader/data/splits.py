"""Sizes of splits.

split_sizes(length, ratios)       -> a size per subset, from sizes or ratios
apportioned(total, shares)        -> integers with this total, each a share rounded down or up
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np


def split_sizes(length: int, parts: list[Any]) -> list[int]:
    """Return sizes that sum to ``length``, from sizes or ratios, or raise ValueError.

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
    """Round exact shares to integers that sum to ``total``.

    The largest remainders are rounded up; of equal ones, the earlier. ``digits`` limits the decimal places of
    remainders that count (with 9, 0.29 * 100 is a whole 29); None: all.

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
