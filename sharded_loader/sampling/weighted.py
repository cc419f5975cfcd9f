"""Indices drawn by weight: `WeightedRandomSampler`.

In: one weight per sample, how many to draw. Out: indices, with or without replacement. With replacement,
draws come in chunks that are each keyed by (seed, epoch, chunk), so any place is reached at once.

What can go wrong: arguments, all refused in the constructor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.sampling.base import IndexSampler, Indices, check_int, resolve_seed
from sharded_loader.sampling.permutation import CHUNK, uniforms
from sharded_loader.sampling.samplers import slices


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    Args:
        weights: 1-D, one non-negative number per sample; they need not sum to one.
        num_samples: how many to draw per epoch.
        replacement: whether an index may be drawn more than once in an epoch. A sample that is drawn again in the
            epoch has the same `sample_rng`, so it is augmented in the same way.
        seed: with the epoch it decides what is drawn. None draws one from torch's default generator.

    Raises:
        ValueError: if weights are negative, not finite or all zero, or if fewer than ``num_samples`` of
            them are positive with ``replacement=False``.

    Example:
        >>> set(WeightedRandomSampler([0, 1, 0, 3], 50, seed=7))
        {1, 3}

    Source of the idea: `torch.utils.data.WeightedRandomSampler`; without replacement, exponential races
    (Efraimidis and Spirakis, 2006).
    """

    decided_by = (("weights", "_weights"), ("replacement", "_replacement"))

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any],
        num_samples: int,
        replacement: bool = True,
        seed: int | None = None,
    ) -> None:
        array = np.asarray(weights, dtype=np.float64)
        if array.ndim != 1:
            raise ValueError(f"weights must be 1-D, got shape {array.shape}: give one number per sample")
        bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
        if bad.size:
            raise ValueError(
                f"weights must be finite and at least 0, but weights[{bad[0]}] is {array[bad[0]]}: "
                "give 0 to samples that must not be drawn"
            )
        self._num_samples = check_int("num_samples", num_samples, 0, "give how many indices an epoch draws")
        positive = int(np.count_nonzero(array))
        if self._num_samples and not positive:
            raise ValueError("weights are all zero, nothing can be drawn: give a positive weight to some sample")
        if not replacement and self._num_samples > positive:
            raise ValueError(
                f"num_samples is {self._num_samples}, but only {positive} weights are positive and "
                "replacement=False draws each index at most once: draw fewer, or set replacement=True"
            )
        self._weights = array
        self._replacement = bool(replacement)
        self.seed = resolve_seed(seed)

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        draw = self._with_replacement if self._replacement else self._without_replacement
        return draw((self.seed, "weighted", epoch), start)

    def _with_replacement(self, key: tuple[Any, ...], start: int) -> Iterator[Indices]:
        if start >= self._num_samples:
            return
        bounds = np.cumsum(self._weights / self._weights.max())
        # Rounding may put a draw on the very end: it belongs to the last index that can be drawn.
        last = np.flatnonzero(self._weights)[-1]
        for number in range(start // CHUNK, -(-self._num_samples // CHUNK)):
            begin = number * CHUNK
            draws = uniforms(CHUNK, *key, number)[max(start - begin, 0) : self._num_samples - begin]
            yield np.minimum(np.searchsorted(bounds, draws * bounds[-1], side="right"), last).astype(np.int64)

    def _without_replacement(self, key: tuple[Any, ...], start: int) -> Iterator[Indices]:
        candidates = np.flatnonzero(self._weights)
        # A uniform of 0 stands for the middle of the first step: its logarithm would be no number.
        races = np.maximum(-np.log1p(-uniforms(len(self._weights), *key)), 2.0**-54)
        first = _order_of_ratios(races[candidates], self._weights[candidates])[: self._num_samples]
        yield from slices(candidates[first].astype(np.int64, copy=False), start)

    def len_epoch(self, epoch: int) -> int:
        return self._num_samples


def _order_of_ratios(above: npt.NDArray[np.float64], below: npt.NDArray[np.float64]) -> npt.NDArray[np.intp]:
    """The stable ascending order of ``above / below``, positive numbers whose ratios may lie beyond any float64.

    Weights go from 5e-324 to 1.8e308, so their ratios overflow and underflow. Mantissas and exponents are divided
    apart: the order is the one of the plain division wherever that is exact (1 M: 0.30 s, by division 0.19 s).

    Example:
        >>> _order_of_ratios(np.array([1.0, 1.0, 1.0]), np.array([5e-324, 1e308, 1e-307])).tolist()
        [1, 2, 0]
    """
    mantissa_above, exponent_above = np.frexp(above)
    mantissa_below, exponent_below = np.frexp(below)
    mantissa, exponent = np.frexp(mantissa_above / mantissa_below)
    return np.lexsort((mantissa, exponent + exponent_above - exponent_below))
