"""`WeightedRandomSampler`: indices drawn by weights, which may change while you train.

    weights, updates (epoch, position, indices, values) -> the weights at any position of any epoch
        -> with replacement: cumulative sums -> the draw at a position, computed alone
        -> without replacement: exponential races -> the draws of a segment, after those before it
    update -> the loaders that read the sampler -> replan: batches not delivered are dropped, and drawn again

A draw is a pure function of (seed, epoch, position, updates), so any rank computes any step, before or after an update.

Each loader reads a copy of the user's sampler. The copy has a `_History`: the weights given first, and a list of
updates, each with the place from which it holds. An update enters the history at the loader's position, and states
contain it. The copy of the newest loader shares its history with the user's sampler. The memory is that of two arrays
of weights, the cumulative sums or draws of one version, and the updates. Beyond `KEPT` changed weights, or the number
of samples, the older half of the updates becomes one: steps before it are forgotten.

What can go wrong: ranks that make different updates draw from different weights, which only a comparison of their
states or fingerprints shows.
"""

from __future__ import annotations

import copy
import json
import math
import operator
import weakref
from bisect import bisect_right
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Table
from sharded_loader.extend.order import BLOCK, WEIGHTS_SET, BatchSampler, IndexSampler, nested, parts, resolve_seed
from sharded_loader.extend.tools import brief, check_fits, check_int, fast_method
from sharded_loader.samplers.batch_samplers import ShardedBatchSampler
from sharded_loader.samplers.bijections import uniforms, uniforms_at
from sharded_loader.samplers.index_samplers import Numbers, RepeatedSampler, floats, integers, underscored

Floats = npt.NDArray[np.float64]

KEPT, UPDATES = 2**21, 2**12
"""Changed weights, and updates, that are kept one by one at most. If there are more, the older half is joined."""

FEW = 2**6
"""Indices computed at once after an update: with frequent updates, most of a larger block would be dropped."""

UNCHANGED = "[[0,0,[],[]]]"
"""Text of a history without changes."""

ORDERS = ("__iter__", "iter_epoch", "epoch_table", "_order")
"""Methods that decide the order; a subclass that overrides one may keep the weights for itself."""


class WeightedRandomSampler(IndexSampler):
    """Indices drawn with given probabilities, which may change while you train.

    Args:
        weights: one non-negative number per sample, 1-D; they need not sum to one.
        num_samples: number of draws per epoch.
        replacement: allow an index to be drawn several times per epoch. Its copies share one `sample_rng`, so they are
            augmented alike. Without replacement, ratios of weights below 1e-300 or above 1e290 are not exact.
        seed: decides the draws, together with the epoch; by default drawn from torch's default generator.

    Attributes:
        weights: The weights after the last `update`, or in the last loaded state. Setting them updates all of them.

    Raises:
        ValueError: Weights are negative, not finite or all zero; without replacement, also if fewer than
            ``num_samples`` are positive.
        MemoryError: The weights do not fit into memory.

    Example:
        >>> set(WeightedRandomSampler([0, 1, 0, 3], 50, seed=7))
        {1, 3}

    Source of the idea: `torch.utils.data.WeightedRandomSampler`; without replacement, exponential races
    (Efraimidis and Spirakis, 2006); `update`, prioritized experience replay (Schaul et al., 2016).
    """

    decided_by = underscored("weights", "replacement")
    shown = (("weights", "weights"), *underscored("replacement"))

    def __init__(self, weights: Numbers, num_samples: int, replacement: bool = True, seed: int | None = None) -> None:
        count, advice = operator.length_hint(weights), "mix groups of samples by weight, with interleave"
        check_fits(16 * count, f"there are {count:,} weights", advice)
        array = floats("weights", weights).copy()  # yours may change
        self._length = check_int("num_samples", num_samples, 0, "give how many indices an epoch draws")
        self._weights, self._replacement = array, bool(replacement)
        self._check(array)
        self._history = _History(array)
        self.order_version = 2 if replacement else 1
        self.seed = resolve_seed(seed)

    def _check(self, weights: Floats) -> None:
        bad = np.flatnonzero(~(np.isfinite(weights) & (weights >= 0)))
        if bad.size:
            raise ValueError(f"weights[{bad[0]}] is {weights[bad[0]]}: give finite numbers, 0 for what is not drawn")
        positive = int(np.count_nonzero(weights))
        if self._length and not positive:
            raise ValueError("weights are all zero, nothing can be drawn: give a positive weight to some sample")
        if not self._replacement and self._length > positive:
            text = f"num_samples is {self._length}, but only {positive} weights are positive"
            raise ValueError(f"{text}: draw fewer, or set replacement=True to draw an index more than once")

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._order(epoch), FEW if self._history.updates[1:] else BLOCK)

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        key = (self.seed, "weighted", epoch)
        if not self._replacement:
            return self._history.draws(key, epoch, self._length).take
        draw = uniforms_at(*key, "choice")
        return lambda positions: self._history.chosen(epoch, positions, draw(positions))

    # -- changes --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Any:
        if "weights" in vars(self):  # a subclass has an attribute of its own
            return vars(self)["weights"]
        return self._history.now

    @weights.setter
    def weights(self, weights: Any) -> None:
        if "_history" in vars(self) and fast_method(type(self), "update", ORDERS):
            self.update(np.arange(len(self._weights)), weights)
        else:
            vars(self)["weights"] = weights

    def update(self, indices: Any, values: Any) -> None:
        """Change weights, from the next batch of each loader that reads the sampler on, and for later epochs.

        Prefetched batches are dropped and drawn again, so collect the changes of several steps if reading is slow. Call
        it in the main process, on all ranks, after the same step and with the same arguments. Later states have the new
        weights. Steps before stay known: ``loader.indices(epoch, step)`` draws them from the weights of that time, for
        the last 2,000 updates, or the last million changed weights. Each open loader follows at its own position.

        In two cases, the new weights hold from the sampler's next epoch on: without a `ShardedDataLoader` (``for index
        in sampler``, or torch's order in the drop-in), and inside a wrapper other than `BatchSampler` (without
        rollover), `ShardedBatchSampler` and `RepeatedSampler`.

        Args:
            indices: numbers of samples, 1-D: an array, list or tensor. If one comes twice, its last value counts.
            values: their weights, as many as indices, or one number for all.

        Raises:
            ValueError: Unknown indices, values that are negative or not finite, different lengths, or too few positive
                weights for the draws that are left. The loader has not changed.
            RuntimeError: Called inside ``next`` of a loader.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> sampler = WeightedRandomSampler([1, 1, 1], 6, seed=0)
            >>> for batch in ShardedDataLoader([10, 20, 30], 2, sampler=sampler):
            ...     print(batch.tolist())
            ...     sampler.update([0, 1], 0)
            [20, 30]
            [30, 30]
            [30, 30]
        """
        advice = "give the numbers of samples in the dataset"
        found = integers("indices", _on_host(indices), "a 1-D sequence of integers", advice).astype(np.int64)
        numbers = floats("values", values, (0, 1))
        if numbers.shape not in ((), found.shape):
            text = f"there are {len(found)} indices, and values of shape {numbers.shape}"
            raise ValueError(f"{text}: give one number for each index, or one for all")
        bad = found[(found < 0) | (found >= len(self._weights))]
        if bad.size:
            raise ValueError(f"index {bad[0]} is unknown, there are {len(self._weights)} weights: {advice}")
        loaders = list(self._loaders())
        for epochs, wrappers, reader in loaders:
            epochs.replan(partial(reader._change, found, numbers, wrappers))
        if all(reader._history is not self._history for *_, reader in loaders):
            self._change(found, numbers, (), self.epoch, 0)

    def _change(self, indices: Int64s, values: Floats, wrappers: Sequence[Any], epoch: int, position: int) -> None:
        """Change weights from a position of the outermost sampler on, or raise a ValueError."""
        history, place = self._history, _inside(wrappers, epoch, position)
        before = history.weights_of(history.version(*place))
        after = before.copy()
        after[indices] = values
        self._check(after)
        history.add(_made(*place, before, after), after, self._replacement)

    # -- loaders --------------------------------------------------------------------------------------------

    def _loaders(self) -> Iterator[tuple[Any, list[Any], WeightedRandomSampler]]:
        """Yield the open loaders that read a copy of the sampler: `Epochs`, the samplers around the copy, the copy."""
        for epochs in list(_READERS):
            if not hasattr(epochs, "order"):
                if any(getattr(one, "_weights", None) is self._weights for one in nested(epochs.sampler)):
                    text = f"a loader with keep= or on_error='refill' reads {brief(epochs)}, and cannot follow changes"
                    raise TypeError(f"{text} of its weights: make another sampler and loader")
                continue
            samplers = epochs.order.sampling.samplers
            for depth, one in enumerate(samplers if not epochs.pipeline.closed else ()):
                if getattr(one, "_weights", None) is self._weights:  # copies share the weights given first
                    yield epochs, samplers[:depth], one

    def read_by(self, epochs: Any) -> None:
        """Note a loader that reads this copy, by its `Epochs`. It begins with the current weights."""
        for *_, reader in self._loaders():  # at other positions: they go on with histories of their own
            reader._history = copy.copy(reader._history)
        self._history.restart()
        _READERS[epochs] = None

    def read_in_parts(self, reader: Any) -> None:
        """Note a reader that cannot follow changes: `update` is an error while it lives."""
        _READERS[reader] = None

    def forgets(self, wrappers: Sequence[Any], epoch: int, position: int) -> bool:
        """Return True if the weights at a position of the outermost sampler are not known any more."""
        return _inside(wrappers, epoch, position, following=0) < self._history.updates[0][:2]

    @property
    def weights_set(self) -> str | None:
        """The updates as text for a state, or None."""
        text = f"[{','.join(one.text for one in self._history.updates)}]"
        return None if text == UNCHANGED else text

    def adopt(self, arguments: Mapping[str, str]) -> None:
        """Replace the updates by those of a state; raise ValueError, changing nothing, if they are invalid."""
        text, weights = arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", UNCHANGED), self._weights.copy()
        try:
            updates = [_update(int(epoch), int(position), *changes) for epoch, position, *changes in json.loads(text)]
            for one in updates:
                weights[one.indices] = one.values
            self._check(weights)
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(f"load_state_dict: the weights of the state do not fit the sampler: {error}") from error
        self._history.replace(updates, weights)


_READERS: weakref.WeakKeyDictionary[Any, None] = weakref.WeakKeyDictionary()
"""`Epochs` of the loaders that read a weighted sampler."""


def _inside(wrappers: Sequence[Any], epoch: int, position: int, following: int = 1) -> tuple[int, int]:
    """Return the position of the innermost sampler at a position of the outermost one.

    If that is unknown, it is the beginning of its next epoch, or with ``following=0`` of this one.
    """
    for one in wrappers:
        if isinstance(one, RepeatedSampler):
            position = parts(position, one.copies, cut=False)
        elif isinstance(one, BatchSampler) and one.last_batch != "rollover":
            position *= one.batch_size
        elif not isinstance(one, ShardedBatchSampler):
            return epoch + following, 0
    return epoch, position


def _on_host(numbers: Any) -> Any:
    """Return a tensor of any device and dtype as a list; anything else unchanged."""
    return numbers.tolist() if hasattr(numbers, "detach") else numbers


# -- the weights at any position ---------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """Weights that hold from a position of an epoch on; ``text`` is for states."""

    epoch: int
    position: int
    indices: Int64s
    values: Floats
    text: str


def _update(epoch: int, position: int, indices: list[int], values: list[float]) -> _Update:
    text = json.dumps([epoch, position, indices, values], separators=(",", ":"))
    return _Update(epoch, position, np.array(indices, np.int64), np.array(values, np.float64), text)


def _made(epoch: int, position: int, before: Floats, after: Floats) -> _Update:
    """Return the update that turns weights into others."""
    changed = np.flatnonzero(before != after)
    return _update(epoch, position, changed.tolist(), after[changed].tolist())


class _History:
    """Weights of a sampler at any position. Version v has the first v updates.

    Attributes:
        updates: in the order of their positions. The first one turns the weights given first into the oldest weights
            that are known.
        now: the weights after all updates, read-only.
    """

    def __init__(self, weights: Floats) -> None:
        self._first = self.now = weights
        self.restart()
        self._bounds: tuple[Floats, Floats, int] = np.empty(0), weights, 0
        self._drawn: tuple[Hashable, _Update, Int64s] = None, self.updates[0], np.empty(0, np.int64)

    def restart(self) -> None:
        """Let the current weights hold from the beginning."""
        self.replace([_made(0, 0, self._first, self.now)], self.now)

    def replace(self, updates: list[_Update], weights: Floats) -> None:
        weights.flags.writeable = False
        self.updates, self.now = updates, weights

    def version(self, epoch: int, position: float) -> int:
        return bisect_right(self.updates, (epoch, position), key=lambda one: one[:2])

    def weights_of(self, version: int) -> Floats:
        if version == len(self.updates):
            return self.now
        weights = self._first.copy()
        for one in self.updates[:version]:
            weights[one.indices] = one.values
        return weights

    def add(self, update: _Update, weights: Floats, replacement: bool) -> None:
        """Add an update. Those of later positions, which come again, are dropped."""
        self.replace([*self.updates[: self.version(*update[:2])], update], weights)
        changes = sum(len(one.indices) for one in self.updates[1:])
        if changes > max(KEPT, len(weights)) or len(self.updates) > UPDATES:
            # Join the older half, without replacement of whole epochs, as a draw depends on those before it.
            middle = self.updates[len(self.updates) // 2]
            place = middle.epoch, middle.position if replacement else 0
            count = self.version(*place)
            self.updates = [_made(*place, self._first, self.weights_of(count)), *self.updates[count:]]

    # -- draws ----------------------------------------------------------------------------------------------

    def chosen(self, epoch: int, positions: Int64s, draws: Floats) -> Int64s:
        """Return the indices at positions of an epoch, with replacement, from a uniform number for each."""
        first, end = self.version(epoch, 0), self.version(epoch, math.inf)
        begins = [one.position for one in self.updates[first:end]]
        versions, found = first + np.searchsorted(begins, positions, side="right"), np.empty(len(positions), np.int64)
        for version in np.unique(versions).tolist():
            here = versions == version
            found[here] = self._found(self.weights_of(version), draws[here])
        return found

    def _found(self, weights: Floats, draws: Floats) -> Int64s:
        known, bounds, last = self._bounds
        if known is not weights:
            shares = weights / (weights.max(initial=0) or 1.0)  # weights up to 1.8e308: avoids overflow of their sum
            # Rounding may put a draw on the very end, which belongs to the last index with a positive weight.
            bounds, last = np.cumsum(shares), int(np.flatnonzero(weights)[-1:].sum())
            self._bounds = weights, bounds, last
        draws = draws * bounds[-1]
        # Searching in ascending order is four times as fast, among a million bounds.
        ascending = np.argsort(draws)
        found = np.empty(len(draws), np.int64)
        found[ascending] = np.minimum(np.searchsorted(bounds, draws[ascending], side="right"), last)
        return found

    def draws(self, key: tuple[Hashable, ...], epoch: int, length: int) -> Int64s:
        """Return the draws of an epoch without replacement. After each update, a race among those left goes on."""
        first, end = self.version(epoch, 0), self.version(epoch, math.inf)
        known, last, drawn = self._drawn  # those of before are known up to an update
        done = [n for n in range(first, end + 1) if known == key and self.updates[n - 1] is last]
        for version in range(done[0] + 1 if done else first, end + 1):
            begin = self.updates[version - 1].position if version > first else 0
            weights = self.weights_of(version).copy()
            weights[drawn[:begin]] = 0
            raced = _raced(weights, (*key, begin) if begin else key)
            drawn = np.concatenate([drawn[:begin], raced])[:length]
        self._drawn = key, self.updates[end - 1], drawn
        return drawn


def _raced(weights: Floats, key: tuple[Hashable, ...]) -> Int64s:
    """Return the indices with positive weights in the order of their exponential races."""
    candidates = np.flatnonzero(weights)
    # A uniform of 0 is replaced by the middle of the first step, to avoid a race of 0.
    races = np.maximum(-np.log1p(-uniforms(len(weights), *key)), 2.0**-54)
    with np.errstate(over="ignore"):
        order = np.argsort(races[candidates] / weights[candidates], kind="stable")
    return candidates[order].astype(np.int64, copy=False)
