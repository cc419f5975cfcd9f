"""Shuffles of any size, each a pure function of its key, and selections of indices.

    shuffled(n, *key)                   -> the whole permutation as one array
    shuffle(n, *key)                    positions -> indices: that array up to 2**24 (16 M) indices, else a bijection
    Bijection(n, *key)(positions)       positions -> indices, computed independently
    Bijections(*key)(positions, n, by)  the same for many small shuffles at once, each with its own n and number

Up to `IN_MEMORY` indices a shuffle is a sorted array of random keys. Above, position p holds ``bijection(p)``, which
takes constant memory and time, so resuming at sample 10**12 costs nothing. The bijection mixes the b bits of a position
by rounds of "add, multiply by an odd number, fold the upper half onto the lower". Each step is invertible modulo 2**b,
the next power of two; results past the end are mixed again until they fall inside. It is not cryptographic: of (2**b)!
orders it reaches at most 2**128. Positions are not range-checked.

Only raw words of Philox are used, which NumPy guarantees to be stable; streams such as ``Generator.permutation``'s may
change between releases, and a resumed run must not depend on that.

Source of the idea: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) over the multiply
and xor-shift rounds of integer hash finalisers (Steele et al., SplitMix, 2014).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.randomness.rng import philox

Indices = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

MAX_LENGTH = 2**62

# Above this an array of the order (8 bytes per index, twice while sorting) takes more than 256 MB.
IN_MEMORY = 2**24

# With three rounds neighbours are correlated (chi-square of differences: 30 of 1,260 tests fail by more than 4 sigma,
# the worst by 970); with four, five and six none are. So two more than needed.
ROUNDS = 6

# The rounds mix 2 or 3 bits badly: over 40,000 draws of the 24 orders of 4 indices, chi-square per degree of freedom
# was 4.5. `Bijections` therefore ranks random words up to here, which makes all orders equally likely.
FEW = 8


def random_words(count: int, *key: Hashable) -> Words:
    """Return ``count`` random 64-bit words keyed by ``key``."""
    words: Words = philox(*key).bit_generator.random_raw(count)
    return words


def uniforms(count: int, *key: Hashable) -> npt.NDArray[np.float64]:
    """Return ``count`` random float64 in [0, 1) keyed by ``key``."""
    return (random_words(count, *key) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def uniforms_at(*key: Hashable) -> Callable[[Indices], npt.NDArray[np.float64]]:
    """Return a keyed function from positions below 2**62 to random float64 in [0, 1): 10 us for 256 positions.

    Example:
        >>> draws = uniforms_at(7, "draws")
        >>> bool(draws(np.array([10**15]))[0] == draws(np.array([3, 10**15]))[1])
        True
    """
    mixed = Bijection(MAX_LENGTH, *key)
    return lambda positions: (mixed(positions) >> 9).astype(np.float64) * np.float64(2.0**-53)


def shuffled(length: int, *key: Hashable) -> Indices:
    """Return a random permutation of ``range(length)`` as an int64 array, keyed by ``key``.

    Example:
        >>> sorted(shuffled(5, 7, "order").tolist())
        [0, 1, 2, 3, 4]
    """
    # Random upper bits and the index in the lower bits, sorted as numbers: all differ, so any sorting algorithm gives
    # the same order (one core: 1 M indices in 0.05 s, 16 M in 0.75 s; Generator.permutation takes 0.02 and 0.63 s).
    index_bits = np.uint64((1 << max(length - 1, 0).bit_length()) - 1)
    words = random_words(length, *key)
    words &= ~index_bits
    words |= np.arange(length, dtype=np.uint64)
    words.sort()
    words &= index_bits
    return words.view(np.int64)


class Bijection:
    """A keyed permutation of ``range(length)``, for lengths of 1 to 2**62.

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
        """Map positions (any integer dtype, 1-D) to indices (int64)."""
        values = self._mix(positions.astype(np.uint64))
        outside = np.flatnonzero(values >= self._length)
        while outside.size:
            remixed = self._mix(values[outside])
            values[outside] = remixed
            outside = outside[remixed >= self._length]
        return values.view(np.int64)

    def _mix(self, values: Words) -> Words:
        """Mix values over the domain of 2**bits once, in place."""
        folded = np.empty_like(values)
        for addend, odd in self._rounds:
            values += addend
            values *= odd
            values &= self._mask
            np.right_shift(values, self._fold, out=folded)
            values ^= folded
        return values


class Bijections:
    """Many keyed permutations, each with its own range, applied at once.

    Shuffling 32,768 positions in 2,048 windows takes as long as in one. Equal numbers must have equal lengths.

    Example:
        >>> shuffle = Bijections(7, "windows")
        >>> first = shuffle(np.arange(3), np.array([3, 3, 3]), np.array([0, 0, 0]))
        >>> sorted(first.tolist())
        [0, 1, 2]
    """

    def __init__(self, *key: Hashable) -> None:
        self._addend, *self._odd = random_words(3 + 2 * ROUNDS, *key) | np.uint64(1)

    def __call__(self, positions: Indices, lengths: Indices, numbers: Indices) -> Indices:
        """Map each position (int64, 1-D), below its length, through the permutation of its length and number."""
        limits = lengths.view(np.uint64)
        keys = numbers.view(np.uint64) + self._addend
        for odd, fold in zip(self._odd[:2], (32, 29), strict=True):
            keys = keys * odd
            keys ^= keys >> np.uint64(fold)
        values = positions.astype(np.uint64)
        if not len(values):
            return values.view(np.int64)
        least, most = int(lengths.min() - 1).bit_length(), int(lengths.max() - 1).bit_length()
        if least == most:
            if (numbers == numbers[0]).all():  # one key for all, typical of a rank with few lanes
                keys = keys[:1]
            return self._mixed(values, limits, keys, max(most, 1)).view(np.int64)
        # Bits of the largest position. NumPy shifts by a scalar ten times as fast as by an array.
        bits = np.maximum(np.frexp((limits - np.uint64(1)).astype(np.float64))[1], 1)
        for count in range(max(least, 1), int(bits.max()) + 1):
            here = np.flatnonzero(bits == count)
            values[here] = self._mixed(values[here], limits[here], keys[here], count)
        return values.view(np.int64)

    def _mixed(self, values: Words, limits: Words, keys: Words, bits: int) -> Words:
        """Mix positions of ``bits`` bits, each through its own permutation."""
        if 1 << bits <= FEW:
            return self._ranked(values, limits, keys, bits)
        values = self._mix(values, keys, bits)
        outside = np.flatnonzero(values >= limits)
        while outside.size:
            remixed = self._mix(values[outside], keys if len(keys) == 1 else keys[outside], bits)
            values[outside] = remixed
            outside = outside[remixed >= limits[outside]]
        return values

    def _ranked(self, values: Words, limits: Words, keys: Words, bits: int) -> Words:
        """Map each position to the rank of its random word among those of its permutation. All words are distinct."""
        steps = np.arange(1 << bits, dtype=np.uint64) * self._odd[2]
        words, ranks = self._words(keys + steps[values]), np.zeros_like(values)
        for position, step in enumerate(steps):
            ranks += (self._words(keys + step) < words) & (np.uint64(position) < limits)
        return ranks

    def _words(self, words: Words) -> Words:
        for odd, fold in zip(self._odd[3:5], (32, 29), strict=True):
            words = words * odd
            words ^= words >> np.uint64(fold)
        return words

    def _mix(self, values: Words, keys: Words, bits: int) -> Words:
        """Mix each value over its domain of 2**bits once, in place. A product's top bits depend on the whole key."""
        one, top = np.uint64(1), np.uint64(64 - bits)
        mask, fold = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
        for addend, odd in zip(self._odd[2::2], self._odd[3::2], strict=True):
            values += (keys * addend) >> top
            values *= ((keys * odd) >> top) | one
            values &= mask
            values ^= values >> fold
        return values


def shuffle(length: int, *key: Hashable) -> Callable[[Indices], Indices]:
    """Return a random permutation of ``range(length)`` as a function from positions to indices (int64).

    Above `IN_MEMORY` one core computes 54 M indices/s at worst, and 270 M/s if ``length`` is a power of two.

    Example:
        >>> shuffle(10**15, 7, "order")(np.array([0, 10**14])) < 10**15
        array([ True,  True])
    """
    if length <= IN_MEMORY:
        return shuffled(length, *key).take
    return Bijection(length, *key)


# -- selections of indices ---------------------------------------------------------------------------------------------


Selection = range | Indices
"""Indices of a part of a dataset: a ``range``, which takes no memory, or an int64 array. Never modified."""


def composed(outer: Selection, inner: Selection) -> Selection:
    """Return the indices of a part of a part, ``outer[inner]``, unchecked; a range if both are ranges.

    Example:
        >>> composed(range(100, 200, 10), range(5, 0, -2)), composed(range(100, 200, 10), np.array([3, 0]))
        (range(150, 100, -20), array([130, 100]))
    """
    if isinstance(inner, range):
        selection: Selection = outer[slice(inner.start, inner.stop if inner.stop >= 0 else None, inner.step)]
        return selection
    return taken(outer, inner)


def taken(indices: Selection, positions: Indices) -> Indices:
    """Return the indices at these positions, unchecked.

    Example:
        >>> taken(range(10**12, 0, -2), np.array([0, 3]))
        array([1000000000000,  999999999994])
    """
    return indices.start + indices.step * positions if isinstance(indices, range) else indices[positions]
