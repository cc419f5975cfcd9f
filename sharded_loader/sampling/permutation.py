"""Shuffles of any size, each a pure function of its key.

    shuffled(n, *key)                  the whole permutation as one array         up to 2**24 (16 M) indices
    permuted_chunks(n, key, start)     the same order in chunks from any place    above: a keyed bijection

Up to `IN_MEMORY` indices a shuffle is an array of random keys, sorted. Above, position p holds
``bijection(p)``: constant memory (one chunk), and any position in constant time, so resuming at sample
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

from collections.abc import Hashable, Iterator

import numpy as np
import numpy.typing as npt

from sharded_loader.rng import philox
from sharded_loader.sampling.base import Indices

MAX_LENGTH = 2**62

# Past this an array of the order (8 bytes an index, twice while sorting) costs more than 256 MB.
IN_MEMORY = 2**24

# 256 KB of indices: a chunk and its temporaries stay in the second-level cache.
CHUNK = 2**15

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
        >>> positions = np.arange(3, dtype=np.uint64)
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

    def __call__(self, positions: npt.NDArray[np.uint64]) -> Indices:
        """Where each position goes: uint64 in, int64 out, same shape (1-D)."""
        values = self._mix(positions.copy())
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


def permuted_chunks(length: int, key: tuple[Hashable, ...], start: int = 0) -> Iterator[Indices]:
    """A random permutation of ``range(length)`` from position ``start`` on, in int64 arrays.

    Up to `IN_MEMORY` indices it equals ``shuffled(length, *key)[start:]``; above it is made chunk by chunk
    (one core: 270 M indices/s where ``length`` is a power of two, 54 M/s just above one, the worst case).
    """
    if start >= length:
        return
    if length <= IN_MEMORY:
        order = shuffled(length, *key)
        for begin in range(start, length, CHUNK):
            yield order[begin : begin + CHUNK]
        return
    bijection = Bijection(length, *key)
    for begin in range(start, length, CHUNK):
        yield bijection(np.arange(begin, min(begin + CHUNK, length), dtype=np.uint64))
