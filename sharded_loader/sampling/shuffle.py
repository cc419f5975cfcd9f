"""Orders: shuffles of any size, each a pure function of its key, and sorting by keys of any kind.

    shuffled(n, *key)    the whole permutation as one array
    shuffle(n, *key)     positions -> indices: that array up to 2**24 (16 M) indices, a keyed bijection above
    sort_order(sortable(keys), reverse)

Up to `IN_MEMORY` indices a shuffle is an array of random keys, sorted. Above, position p holds
``bijection(p)``: constant memory, and any position in constant time, so resuming at sample
10**12 costs nothing. The bijection mixes the b bits of a position by rounds of "add, multiply by an odd
number, fold the upper half onto the lower" (each step is invertible modulo 2**b, so the whole is one to
one), with 2**b the next power of two; results past the end go round again until they fall inside.

Only the raw words of Philox are used, which NumPy guarantees to stay as they are; the streams of
``Generator.permutation`` and the like may change from one NumPy release to the next, and a resumed run must
not depend on that.

What can go wrong: nothing that depends on the data. The bijection is a shuffle, not cryptography: among
(2**b)! orders it reaches at most 2**128.

Source of the idea: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) over the
multiply and xor-shift rounds of integer hash finalisers (Steele et al., SplitMix, 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.rng import philox
from sharded_loader.sampling.tables import Indices

MAX_LENGTH = 2**62

# Past this an array of the order (8 bytes an index, twice while sorting) costs more than 256 MB.
IN_MEMORY = 2**24

# With three rounds neighbours are correlated (chi-square of differences, 30 of 1,260 tests fail by more than
# 4 sigma, the worst by 970); with four, five and six none is. Two more than needed.
ROUNDS = 6


def random_words(count: int, *key: Hashable) -> npt.NDArray[np.uint64]:
    """``count`` random 64-bit words keyed by ``key``."""
    words: npt.NDArray[np.uint64] = philox(*key).bit_generator.random_raw(count)
    return words


def uniforms(count: int, *key: Hashable) -> npt.NDArray[np.float64]:
    """``count`` random float64 in [0, 1) keyed by ``key``."""
    return (random_words(count, *key) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def shuffled(length: int, *key: Hashable) -> Indices:
    """A random permutation of ``range(length)`` as an int64 array, keyed by ``key``.

    Example:
        >>> sorted(shuffled(5, 7, "order").tolist())
        [0, 1, 2, 3, 4]
    """
    # Random bits above, the index below, sorted as plain numbers: no two are equal, so every sorting
    # algorithm gives the same order (one core: 1 M indices in 0.05 s, 16 M in 0.75 s; Generator.permutation,
    # whose stream may change, takes 0.02 and 0.63 s).
    index_bits = np.uint64((1 << max(length - 1, 0).bit_length()) - 1)
    words = random_words(length, *key)
    words &= ~index_bits
    words |= np.arange(length, dtype=np.uint64)
    words.sort()
    words &= index_bits
    return words.view(np.int64)


class Bijection:
    """A keyed one-to-one map of ``range(length)`` onto itself.

    Args:
        length: 1 to 2**62.
        *key: what decides the map.

    Example:
        >>> shuffle = Bijection(10**15, 7, "order")
        >>> positions = np.arange(3)
        >>> bool((shuffle(positions) < 10**15).all())
        True
    """

    def __init__(self, length: int, *key: Hashable) -> None:
        bits = max((length - 1).bit_length(), 1)
        words = random_words(2 * ROUNDS, *key)
        self._length = np.uint64(length)
        self._mask = np.uint64((1 << bits) - 1)
        self._fold = np.uint64((bits + 1) // 2)
        self._rounds = [(words[2 * i], words[2 * i + 1] | np.uint64(1)) for i in range(ROUNDS)]

    def __call__(self, positions: npt.NDArray[Any]) -> Indices:
        """Where each position goes: integers in, int64 out, same shape (1-D)."""
        values = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            again = self._mix(values[outside])
            values[outside] = again
            outside = outside[again >= self._length]
        return values.view(np.int64)

    def _mix(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        """One pass over the domain of 2**bits, in place."""
        folded = np.empty_like(values)
        for addend, odd in self._rounds:
            values += addend
            values *= odd
            values &= self._mask
            np.right_shift(values, self._fold, out=folded)
            values ^= folded
        return values


def shuffle(length: int, *key: Hashable) -> Callable[[Indices], Indices]:
    """A random permutation of ``range(length)``: positions (int64) -> indices (int64).

    Up to `IN_MEMORY` indices it is the array ``shuffled(length, *key)``. Above, each position is computed (one core:
    270 M indices/s where ``length`` is a power of two, 54 M/s just above one, the worst case).

    Example:
        >>> shuffle(10**15, 7, "order")(np.array([0, 10**14])) < 10**15
        array([ True,  True])
    """
    if length <= IN_MEMORY:
        return shuffled(length, *key).take
    return Bijection(length, *key)


def order_of_ratios(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """The stable ascending order of ``above / below``, positive numbers whose ratios may lie beyond any float64.

    Weights go from 5e-324 to 1.8e308, so their ratios overflow and underflow. Mantissas and exponents are divided
    apart: the order is the one of the plain division wherever that is exact (1 M: 0.30 s, by division 0.19 s).

    Example:
        >>> order_of_ratios(np.array([1.0, 1.0, 1.0]), np.array([5e-324, 1e308, 1e-307])).tolist()
        [1, 2, 0]
    """
    mantissa_above, exponent_above = np.frexp(above)
    mantissa_below, exponent_below = np.frexp(below)
    mantissa, exponent = np.frexp(mantissa_above / mantissa_below)
    return np.lexsort((mantissa, exponent + exponent_above - exponent_below))


def sortable(keys: Any) -> npt.NDArray[Any]:
    """Keys of any kind that Python can compare, as a numeric array of the same order."""
    if not isinstance(keys, np.ndarray) and hasattr(keys, "__array__"):
        try:
            keys = np.asarray(keys)  # a pandas Series would be read by its labels
        except (TypeError, RuntimeError):  # a tensor of another dtype, or on a device
            keys = list(keys)
    if len(keys) == 0:
        return np.zeros(0, dtype=np.int64)
    if isinstance(keys, np.ndarray) or isinstance(keys[0], int | float | np.number):
        array = np.asarray(keys)
        # As float64, integers beyond 2**53 that differ may look equal: those are ranked as Python compares them.
        exact = array.dtype.kind in "iub" or isinstance(keys, np.ndarray)
        if array.ndim == 1 and array.dtype.kind in "iufb" and (exact or np.all(np.abs(array) <= 2.0**53)):
            return array
        if isinstance(keys, np.ndarray):
            keys = keys.tolist()
    ranks = np.empty(len(keys), dtype=np.int64)
    order = sorted(range(len(keys)), key=keys.__getitem__)
    rank = 0
    for place, index in enumerate(order):
        rank += place > 0 and keys[order[place - 1]] < keys[index]
        ranks[index] = rank
    return ranks


def sort_order(keys: npt.NDArray[Any], reverse: bool) -> Indices:
    """The stable order of numeric keys; in reverse, equal keys keep their order too, as in ``sorted``."""
    if not reverse:
        return np.argsort(keys, kind="stable")
    return len(keys) - 1 - np.argsort(keys[::-1], kind="stable")[::-1]
