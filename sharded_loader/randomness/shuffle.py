"""Shuffles of any size, each a pure function of its key; and the indices of a part of one.

    shuffled(n, *key)                   the whole permutation as one array
    shuffle(n, *key)                    positions -> indices: that array up to 2**24 (16 M) indices, a bijection above
    Bijection(n, *key)(positions)       positions -> indices, each computed by itself
    Bijections(*key)(positions, n, by)  the same for many small shuffles at once, each with an n and a number of its own
    uniforms_at(*key)(positions)        positions -> random numbers in [0, 1), each computed by itself
    taken(indices, positions)           the indices at these positions
    composed(outer, inner)              the indices of a part of a part

Up to `IN_MEMORY` indices a shuffle is an array of random keys, sorted. Above, position p holds ``bijection(p)``. That
takes constant memory and the same time for any position, so resuming at sample 10**12 costs nothing. The bijection
mixes the b bits of a position by rounds of "add, multiply by an odd number, fold the upper half onto the lower". Each
step is invertible modulo 2**b, so the whole is one to one. 2**b is the next power of two: results past the end go round
again until they fall inside.

The indices of a part (`Selection`) are a range, which takes no memory, or an array. They are never changed.

Only the raw words of Philox are used, which NumPy guarantees to stay as they are. The streams of
``Generator.permutation`` and the like may change from one NumPy release to the next, and a resumed run must not depend
on that.

What can go wrong: a position out of range, which is not checked. The bijection is a shuffle, not cryptography: among
(2**b)! orders it reaches at most 2**128. Among the few orders of `FEW` indices or less it would prefer some, so
`Bijections` ranks random words there: all orders are equally likely.

Source of the idea: cycle walking (Black and Rogaway, "Ciphers with arbitrary finite domains", 2002) over the
multiply and xor-shift rounds of integer hash finalisers (Steele et al., SplitMix, 2014).
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

# Past this an array of the order (8 bytes an index, twice while sorting) costs more than 256 MB.
IN_MEMORY = 2**24

# With three rounds neighbours are correlated (chi-square of differences, 30 of 1,260 tests fail by more than
# 4 sigma, the worst by 970); with four, five and six none is. Two more than needed.
ROUNDS = 6

# The rounds mix 2 or 3 bits badly: of the 24 orders of 4 indices, chi-square per degree of freedom was 4.5 over 40,000.
FEW = 8


def random_words(count: int, *key: Hashable) -> Words:
    """``count`` random 64-bit words keyed by ``key``."""
    words: Words = philox(*key).bit_generator.random_raw(count)
    return words


def uniforms(count: int, *key: Hashable) -> npt.NDArray[np.float64]:
    """``count`` random float64 in [0, 1) keyed by ``key``."""
    return (random_words(count, *key) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def uniforms_at(*key: Hashable) -> Callable[[Indices], npt.NDArray[np.float64]]:
    """Random float64 in [0, 1) keyed by ``key``, one at each position below 2**62: 10 us for 256 positions.

    Example:
        >>> draws = uniforms_at(7, "draws")
        >>> bool(draws(np.array([10**15]))[0] == draws(np.array([3, 10**15]))[1])
        True
    """
    mixed = Bijection(MAX_LENGTH, *key)
    return lambda positions: (mixed(positions) >> 9).astype(np.float64) * np.float64(2.0**-53)


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

    def _mix(self, values: Words) -> Words:
        """One pass over the domain of 2**bits, in place."""
        folded = np.empty_like(values)
        for addend, odd in self._rounds:
            values += addend
            values *= odd
            values &= self._mask
            np.right_shift(values, self._fold, out=folded)
            values ^= folded
        return values


class Bijections:
    """Many keyed one-to-one maps at once: each position goes through the map that its number names.

    Each map has a range of its own. So a window of samples here and another one there are shuffled in one step, without
    a loop over the windows: 32,768 positions in 2,048 windows take as long as in one.

    Args:
        *key: what decides all maps, together with their numbers.

    Example:
        >>> shuffle = Bijections(7, "windows")
        >>> first = shuffle(np.arange(3), np.array([3, 3, 3]), np.array([0, 0, 0]))
        >>> sorted(first.tolist())
        [0, 1, 2]
    """

    def __init__(self, *key: Hashable) -> None:
        self._addend, *self._odd = random_words(3 + 2 * ROUNDS, *key) | np.uint64(1)

    def __call__(self, positions: Indices, lengths: Indices, numbers: Indices) -> Indices:
        """Where each position goes.

        Args:
            positions: int64, 1-D; position i lies in ``range(lengths[i])``.
            lengths: of the map that position i goes through.
            numbers: which map that is. Equal numbers come with equal lengths.
        """
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
            if (numbers == numbers[0]).all():  # what a rank with few lanes asks for: one key for all
                keys = keys[:1]
            return self._mixed(values, limits, keys, max(most, 1)).view(np.int64)
        # The bits that the greatest position has. NumPy shifts by one number ten times as fast as by many.
        bits = np.maximum(np.frexp((limits - np.uint64(1)).astype(np.float64))[1], 1)
        for each in range(max(least, 1), int(bits.max()) + 1):
            here = np.flatnonzero(bits == each)
            values[here] = self._mixed(values[here], limits[here], keys[here], each)
        return values.view(np.int64)

    def _mixed(self, values: Words, limits: Words, keys: Words, bits: int) -> Words:
        """Mix positions of ``bits`` bits, each through its own map."""
        if 1 << bits <= FEW:
            return self._ranked(values, limits, keys, bits)
        values = self._mix(values, keys, bits)
        outside = np.flatnonzero(values >= limits)
        while outside.size:
            again = self._mix(values[outside], keys if len(keys) == 1 else keys[outside], bits)
            values[outside] = again
            outside = outside[again >= limits[outside]]
        return values

    def _ranked(self, values: Words, limits: Words, keys: Words, bits: int) -> Words:
        """Each position of a map has a random word, and goes to the rank of its word. No two words are equal."""
        steps = np.arange(1 << bits, dtype=np.uint64) * self._odd[2]
        own, ranks = self._words(keys + steps[values]), np.zeros_like(values)
        for position, step in enumerate(steps):
            ranks += (self._words(keys + step) < own) & (np.uint64(position) < limits)
        return ranks

    def _words(self, words: Words) -> Words:
        for odd, fold in zip(self._odd[3:5], (32, 29), strict=True):
            words = words * odd
            words ^= words >> np.uint64(fold)
        return words

    def _mix(self, values: Words, keys: Words, bits: int) -> Words:
        """One pass of each value over its domain of 2**bits, in place. A product's top bits depend on the whole key."""
        one, top = np.uint64(1), np.uint64(64 - bits)
        mask, fold = np.uint64((1 << bits) - 1), np.uint64((bits + 1) // 2)
        for addend, odd in zip(self._odd[2::2], self._odd[3::2], strict=True):
            values += (keys * addend) >> top
            values *= ((keys * odd) >> top) | one
            values &= mask
            values ^= values >> fold
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


# -- the indices of a part ---------------------------------------------------------------------------------------------


Selection = range | Indices
"""The indices of a part of a dataset: a ``range``, or an array of int64."""


def composed(outer: Selection, inner: Selection) -> Selection:
    """The indices of a part of a part: ``outer`` at the positions ``inner``, which are not checked.

    It takes no memory where both are ranges.

    Example:
        >>> composed(range(100, 200, 10), range(5, 0, -2)), composed(range(100, 200, 10), np.array([3, 0]))
        (range(150, 100, -20), array([130, 100]))
    """
    if isinstance(inner, range):
        found: Selection = outer[slice(inner.start, inner.stop if inner.stop >= 0 else None, inner.step)]
        return found
    return taken(outer, inner)


def taken(indices: Selection, positions: Indices) -> Indices:
    """The indices at these positions, which are not checked.

    Example:
        >>> taken(range(10**12, 0, -2), np.array([0, 3]))
        array([1000000000000,  999999999994])
    """
    return indices.start + indices.step * positions if isinstance(indices, range) else indices[positions]
