"""Many small shuffles at once, and random numbers by their position: pure functions of a key.

    Bijections(*key)(positions, n, by)  -> indices, by a permutation of ``range(n)`` for each number in ``by``
    Bijections(*key).inverse(index, n, by)  -> the position that has an index; `unmixed` for a `Bijection`
    uniforms_at(*key)(positions)        -> floats in [0, 1), computed independently
    uniforms(count, *key)               -> floats in [0, 1), at once

A shuffle of windows, classes or buckets is thousands of short permutations, of which a batch needs a few positions
each. They mix the bits of a position as `sharded_loader.randomness.rng.Bijection` does, with a key of its own for each.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s
from sharded_loader.extend.order import MAX_LENGTH, ROUNDS, Bijection, random_words

Words = npt.NDArray[np.uint64]

# The rounds mix 2 or 3 bits badly: over 40,000 draws of the 24 orders of 4 indices, chi-square per degree of freedom
# was 4.5. `Bijections` therefore ranks random words up to here, which makes all orders equally likely.
FEW = 8


def uniforms(count: int, *key: Hashable) -> npt.NDArray[np.float64]:
    """Return ``count`` random float64 in [0, 1) keyed by ``key``."""
    return (random_words(count, *key) >> np.uint64(11)).astype(np.float64) * np.float64(2.0**-53)


def uniforms_at(*key: Hashable) -> Callable[[Int64s], npt.NDArray[np.float64]]:
    """Return a keyed function from positions below 2**62 to random float64 in [0, 1): 10 us for 256 positions.

    Example:
        >>> draws = uniforms_at(7, "draws")
        >>> bool(draws(np.array([10**15]))[0] == draws(np.array([3, 10**15]))[1])
        True
    """
    mixed = Bijection(MAX_LENGTH, *key)
    return lambda positions: (mixed(positions) >> 9).astype(np.float64) * np.float64(2.0**-53)


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

    def __call__(self, positions: Int64s, lengths: Int64s, numbers: Int64s) -> Int64s:
        """Map each position (int64, 1-D), below its length, through the permutation of its length and number."""
        limits, keys = lengths.view(np.uint64), self._keys(numbers)
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

    def inverse(self, index: int, length: int, number: int) -> int:
        """Return the position that the permutation of this length and number maps to an index: 20 us.

        Example:
            >>> shuffle = Bijections(7, "windows")
            >>> [int(shuffle(np.array([shuffle.inverse(n, 20, 3)]), np.array([20]), np.array([3]))[0]) for n in (0, 19)]
            [0, 19]
        """
        bits = max((length - 1).bit_length(), 1)
        if 1 << bits <= FEW:
            found = self(np.arange(length), np.full(length, length), np.full(length, number))
            return int(np.flatnonzero(found == index)[0])
        key = int(self._keys(np.array([number], np.int64))[0])
        words = [(key * int(odd) & 0xFFFFFFFFFFFFFFFF) >> (64 - bits) for odd in self._odd[2:]]
        return unmixed(index, length, [(addend, odd | 1) for addend, odd in zip(words[::2], words[1::2], strict=True)])

    def _keys(self, numbers: Int64s) -> Words:
        return self._stirred(numbers.view(np.uint64) + self._addend, 0)

    def _stirred(self, words: Words, first: int) -> Words:
        """Return words that depend on all bits of the given ones, by two of the odd factors."""
        for odd, fold in zip(self._odd[first : first + 2], (32, 29), strict=True):
            words = words * odd
            words ^= words >> np.uint64(fold)
        return words

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
        words, ranks = self._stirred(keys + steps[values], 3), np.zeros_like(values)
        for position, step in enumerate(steps):
            ranks += (self._stirred(keys + step, 3) < words) & (np.uint64(position) < limits)
        return ranks

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


def unmixed(index: int, length: int, rounds: Iterable[tuple[int, int]]) -> int:
    """Return the position below ``length`` that rounds of "add, multiply, fold" map to an index.

    The rounds are inverted one by one, as often as results lie past the end: the way back along the walk that led here.
    ``rounds`` has the addend and the odd factor of each.

    Example:
        >>> shuffle = Bijection(10**15, 7, "order")
        >>> unmixed(int(shuffle(np.array([12345]))[0]), 10**15, shuffle.rounds)
        12345
    """
    bits = max((length - 1).bit_length(), 1)
    mask, fold = (1 << bits) - 1, (bits + 1) // 2
    back = [(int(addend), pow(int(odd), -1, mask + 1)) for addend, odd in rounds][::-1]
    while True:
        for addend, factor in back:
            index ^= index >> fold
            index = (index * factor - addend) & mask
        if index < length:
            return index
