"""Indices drawn by weight: one weight per sample, or per group of samples.

    WeightedRandomSampler(weights, n).epoch_table(epoch).at(positions) -> indices

With replacement each draw is a random number of its own, so any position takes the same time, and nothing is kept but
the weights. A draw among groups takes two numbers: for the group, and for the sample in it. Without replacement the
epoch's draws are made when it is opened.

What can go wrong: arguments, all rejected in the constructor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.base.limits import check_fits
from sharded_loader.randomness.shuffle import Indices, uniforms
from sharded_loader.sampling.base import resolve_seed
from sharded_loader.sampling.index_samplers import IndexSampler
from sharded_loader.sampling.shard_shuffle import lengths_of
from sharded_loader.sampling.sorting import order_of_ratios

DRAWS = 2**15
"""Draws are keyed in blocks of this size. Another size would be another order."""


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities.

    Args:
        weights: 1-D, one non-negative number per sample, or per group of samples; they need not sum to one.
        num_samples: the number of samples to draw in each epoch.
        replacement: whether an index may be drawn more than once in an epoch. A sample that is drawn again in the
            epoch has the same `sample_rng`, so it is augmented in the same way.
        seed: with the epoch it decides what is drawn. None draws one from torch's default generator.
        lengths: of groups of samples, in the order of the dataset's indices, such as the shards of a dataset. Each
            sample of group i then has the weight ``weights[i]``, as with ``np.repeat(weights, lengths)``, which takes
            8 bytes per sample. Only with replacement.

    Raises:
        TypeError: ``lengths`` are no integers.
        ValueError: if weights are negative, not finite or all zero, if fewer than ``num_samples`` of them are positive
            with ``replacement=False``, or if ``lengths`` do not go with ``weights``.
        MemoryError: there are more weights than fit into memory.

    Example:
        >>> set(WeightedRandomSampler([0, 1, 0, 3], 50, seed=7))
        {1, 3}
        >>> rare, common = 2.0, 0.5
        >>> sampler = WeightedRandomSampler([rare, common], 1000, seed=7, lengths=[10, 10**12])
        >>> drawn = list(sampler)
        >>> len(drawn), max(drawn) < 10**12 + 10
        (1000, True)

    Source of the idea: `torch.utils.data.WeightedRandomSampler`; without replacement, exponential races
    (Efraimidis and Spirakis, 2006).
    """

    decided_by = (("weights", "_told"), ("replacement", "_replacement"))
    shown = (("weights", "_weights"), ("replacement", "_replacement"), ("lengths", "_lengths"))

    def __init__(
        self,
        weights: Sequence[float] | npt.NDArray[Any],
        num_samples: int,
        replacement: bool = True,
        seed: int | None = None,
        lengths: Sequence[int] | npt.NDArray[Any] | None = None,
    ) -> None:
        check_fits(
            16 * operator.length_hint(weights),
            f"there are {operator.length_hint(weights):,} weights",
            "give one weight per group of samples, with lengths=",
        )
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
        self._lengths = None if lengths is None else _checked_lengths(lengths, len(array), replacement)
        # How likely each sample, or group, is. Weights go up to 1.8e308: divided first, no product overflows.
        self._shares = array / (array.max() if array.size and array.max() else 1.0)
        if self._lengths is not None:
            self._shares = self._shares * self._lengths
        can_be_drawn = array > 0 if self._lengths is None else (array > 0) & (self._lengths > 0)
        positive = int(np.count_nonzero(can_be_drawn))
        if self._num_samples and not positive:
            raise ValueError("weights are all zero, nothing can be drawn: give a positive weight to some sample")
        if not replacement and self._num_samples > positive:
            raise ValueError(
                f"num_samples is {self._num_samples}, but only {positive} weights are positive and "
                "replacement=False draws each index at most once: draw fewer, or set replacement=True"
            )
        self._weights = array
        self._told = array if self._lengths is None else [array, self._lengths]
        self._replacement = bool(replacement)
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        key = (self.seed, "weighted", epoch)
        if not self._replacement:
            return self._without_replacement(key).take
        bounds, lengths = np.cumsum(self._shares), self._lengths
        # Rounding may put a draw on the very end: it belongs to the last index that can be drawn.
        last = np.flatnonzero(self._weights if lengths is None else self._shares)[-1:]
        firsts = None if lengths is None else np.cumsum(lengths) - lengths
        per_draw = 1 if lengths is None else 2

        def at(positions: Indices) -> Indices:
            # Draws are keyed in blocks: a rank that needs one draw of a block makes the block (0.1 ms).
            draws = np.empty((per_draw, len(positions)))
            blocks = positions // DRAWS
            for block in np.unique(blocks):
                here = blocks == block
                found = uniforms(per_draw * DRAWS, *key, int(block)).reshape(per_draw, DRAWS)
                draws[:, here] = found[:, positions[here] % DRAWS]
            chosen: Indices = np.asarray(
                np.minimum(np.searchsorted(bounds, draws[0] * bounds[-1], side="right"), last), np.int64
            )
            if lengths is None or firsts is None:
                return chosen
            # A second draw inside the group: one number of 53 bits would not reach each of 10**16 samples.
            inside: Indices = (draws[1] * lengths[chosen]).astype(np.int64)
            found_at: Indices = firsts[chosen] + np.minimum(inside, lengths[chosen] - 1)
            return found_at

        return at

    def _without_replacement(self, key: tuple[Any, ...]) -> Indices:
        candidates = np.flatnonzero(self._weights)
        # A uniform of 0 stands for the middle of the first step: its logarithm would be no number.
        races = np.maximum(-np.log1p(-uniforms(len(self._weights), *key)), 2.0**-54)
        first = order_of_ratios(races[candidates], self._weights[candidates])[: self._num_samples]
        found: Indices = candidates[first].astype(np.int64, copy=False)
        return found

    def len_epoch(self, epoch: int) -> int:
        return self._num_samples


def _checked_lengths(lengths: Any, count: int, replacement: bool) -> Indices:
    """The lengths of ``count`` groups; see `WeightedRandomSampler`."""
    if not replacement:
        raise ValueError(
            "lengths go with replacement=True: without replacement each sample needs a weight of its own, "
            "np.repeat(weights, lengths)"
        )
    array = lengths_of(lengths)
    if len(array) != count:
        raise ValueError(f"there are {count} weights and {len(array)} lengths: give one of each per group of samples")
    return array
