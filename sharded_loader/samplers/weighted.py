"""`WeightedRandomSampler`: indices drawn by weights, which may change while you train.

    weights, updates (epoch, position, indices, values) -> the weights at any position of any epoch
        -> with replacement: cumulative sums -> the draw at a position, computed alone
        -> without replacement: exponential races -> the draws of a segment, after those before it
    update -> the loaders that read the sampler -> replan: batches not delivered are dropped, and drawn again

A draw is a pure function of (seed, epoch, position, updates), so any rank computes any step, before or after an update.

Each loader reads a copy of the user's sampler, with a `_History`: the weights given first, and all updates since. An
update enters the history at the loader's position, and states contain it. All copies share the list of loaders. If an
update fails in one of them, none has changed. The memory is that of two arrays of weights, the cumulative sums or draws
of the last versions, and the updates. Beyond `KEPT` changed weights, or the number of samples, the older half of the
updates is joined: steps before it are forgotten.

What can go wrong: ranks that make different updates draw from different weights, which only a comparison of their
states or fingerprints shows.
"""

from __future__ import annotations

import base64
import math
import operator
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Table
from sharded_loader.extend.order import BLOCK, WEIGHTS_SET, BatchSampler, IndexSampler, parts, resolve_seed
from sharded_loader.extend.tools import brief, check_fits, check_int
from sharded_loader.samplers.batch_samplers import ShardedBatchSampler
from sharded_loader.samplers.bijections import uniforms, uniforms_at
from sharded_loader.samplers.index_samplers import Numbers, RepeatedSampler, integers, underscored

Floats = npt.NDArray[np.float64]

KEPT = 2**20
"""Changed weights that are kept one by one, at least."""

SMALL_BLOCK = 2**6
"""Indices computed at once after an update: with frequent updates, most of a larger block would be dropped."""

FEW = 2**14
"""Draws made at once after an update, without replacement."""

CACHED = 4
"""Versions of the weights whose cumulative sums, or draws, are cached."""


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
        array = np.asarray(_on_host(weights), np.float64).copy()  # yours may change
        if array.ndim != 1:
            raise ValueError(f"weights must be 1-D, got shape {array.shape}: give one number per sample")
        _check_numbers("weights", array)
        self._length = check_int("num_samples", num_samples, 0, "give how many indices an epoch draws")
        _check_draws(array, self._length, bool(replacement))
        self._weights, self._replacement = array, bool(replacement)
        self._history, self._readers = _History(array, self._replacement), _Readers()
        self.order_version = 2 if replacement else 1
        self.seed = resolve_seed(seed)

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._order(epoch), SMALL_BLOCK if self._history.updates else BLOCK)

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        history, key = self._history, (self.seed, "weighted", epoch)
        if not self._replacement:
            first = partial(history.first, key, epoch, self._length)
            return lambda positions: first(int(positions.max(initial=-1)) + 1).take(positions)
        draw = uniforms_at(*key, "choice")
        return lambda positions: history.chosen(epoch, positions, draw(positions))

    # -- changes --------------------------------------------------------------------------------------------

    @property
    def weights(self) -> Any:
        if "weights" in vars(self):  # a subclass has an attribute of its own
            return vars(self)["weights"]
        view = self._history.now.view()
        view.flags.writeable = False
        return view

    @weights.setter
    def weights(self, weights: Any) -> None:
        names = ("__iter__", "iter_epoch", "epoch_table", "_order")
        kind, own = type(self), WeightedRandomSampler
        if "_history" in vars(self) and all(getattr(kind, name) is getattr(own, name) for name in names):
            self.update(np.arange(len(self._weights)), np.atleast_1d(_on_host(weights)))
        else:
            vars(self)["weights"] = weights

    def update(self, indices: Any, values: Any) -> None:
        """Change weights, from the next batch of each loader that reads the sampler on, and for later epochs.

        Prefetched batches are dropped and drawn again, so collect the changes of several steps if reading is slow. Call
        it in the main process, on all ranks, after the same step and with the same arguments. Later states have the new
        weights. Steps before stay known: ``loader.indices(epoch, step)`` draws them from the weights of that time, for
        the last million changes or more.

        In two cases, the new weights hold from the sampler's next epoch on: without a `ShardedDataLoader` (``for index
        in sampler``, or torch's order in the drop-in), and inside a wrapper other than `BatchSampler` (without
        rollover), `ShardedBatchSampler` and `RepeatedSampler`.

        Args:
            indices: numbers of samples, 1-D: an array, list or tensor. If one comes twice, its last value counts.
            values: their weights, as many as indices, or one number for all.

        Raises:
            ValueError: Unknown indices, values that are negative or not finite, different lengths, or too few positive
                weights for the draws that are left. Nothing has changed.
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
        numbers = np.asarray(_on_host(values), np.float64)
        if numbers.shape not in ((), found.shape):
            text = f"there are {len(found)} indices, and values of shape {numbers.shape}"
            raise ValueError(f"{text}: give one number for each index, or one for all")
        bad = found[(found < 0) | (found >= len(self._weights))]
        if bad.size:
            raise ValueError(f"index {bad[0]} is unknown, there are {len(self._weights)} weights: {advice}")
        numbers = np.broadcast_to(numbers, found.shape)
        _check_numbers("values", numbers)
        found, last = np.unique(found[::-1], return_index=True)  # the last value of each
        self._change(self._loaders(), found, numbers[::-1][last])

    def _change(self, loaders: list[_Loader], indices: Int64s, values: Floats) -> None:
        """Change the weights in these loaders: first check all of them, then change all of them."""
        commits: list[Callable[[], None]] = []

        def change(others: list[_Loader]) -> None:
            if not others:
                for commit in commits:
                    commit()
                return

            def at(epoch: int, position: int) -> None:
                commits.append(reader._prepared(*_inside(wrappers, epoch, position), indices, values))
                change(rest)

            (epochs, wrappers, reader), *rest = others
            epochs.replan(at)

        if not loaders:
            commits.append(self._prepared(self.epoch, 0, indices, values))
        change(loaders)

    def _prepared(self, epoch: int, position: int, indices: Int64s, values: Floats) -> Callable[[], None]:
        """Return a function that changes the weights from a position on; a ValueError if they cannot be."""
        history = self._history
        version = history.version(epoch, position)
        weights = history.weights_of(version)
        differ = weights[indices] != values
        if not differ.any():
            return lambda: None
        update = _made(epoch, position, indices[differ], values[differ])
        weights = weights.copy()
        weights[indices] = values
        _check_draws(weights, self._length, self._replacement)
        return partial(history.add, version, update, weights)

    # -- loaders --------------------------------------------------------------------------------------------

    def _loaders(self) -> list[_Loader]:
        """Return the open loaders that read the sampler, or a copy of it."""
        found: list[_Loader] = []
        for epochs in [epochs for one in self._readers if (epochs := one()) is not None]:
            if not hasattr(epochs, "order"):
                text = f"a loader with keep= or on_error='refill' reads {brief(epochs)}"
                raise TypeError(f"{text}, and cannot follow changes of its weights: make another sampler and loader")
            samplers = epochs.order.sampling.samplers
            for depth, one in enumerate(samplers if not epochs.pipeline.closed else ()):
                if getattr(one, "_readers", None) is self._readers:
                    found.append((epochs, samplers[:depth], one))
        return found

    def read_by(self, epochs: Any) -> None:
        """Note a loader that reads this copy, by its `Epochs`. It begins with the current weights."""
        weights = self._history.now
        if any(reader._history is self._history for _, _, reader in self._loaders()):
            self._history = _History(self._weights, self._replacement)  # the other loader is at another position
        self._history.restart(weights)
        self._readers[:] = [one for one in self._readers if one() is not None] + [weakref.ref(epochs)]

    def read_in_parts(self, reader: Any) -> None:
        """Note a reader that cannot follow changes: `update` is an error while it lives."""
        self._readers.append(weakref.ref(reader))

    def forgets(self, wrappers: Sequence[Any], epoch: int, position: int) -> bool:
        """Return True if the weights at a position of the outermost sampler are not known any more."""
        return _inside(wrappers, epoch, position, following=0) < self._history.forgotten

    @property
    def weights_set(self) -> str | None:
        """The updates as text for a state, or None."""
        return self._history.as_text()

    def adopt(self, arguments: Mapping[str, str]) -> None:
        """Replace the updates by those of a state; raise ValueError, changing nothing, if they are invalid."""
        forgotten, *texts = arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", "0:0").split(",")
        try:
            updates, weights = list(map(_parsed, texts)), self._weights.copy()
            for one in updates:
                weights[one.indices] = one.values
                _check_numbers("values", one.values)
            if any(before[:2] > after[:2] for before, after in pairwise(updates)):
                raise ValueError("the updates are not in order")
            _check_draws(weights, self._length, self._replacement)
            epoch, position = map(int, forgotten.split(":"))
        except (ValueError, IndexError, zlib.error) as error:
            raise ValueError(f"load_state_dict: the weights of the state do not fit the sampler: {error}") from error
        self._history.replace(updates, weights, (epoch, position))


_Loader = tuple[Any, Sequence[Any], WeightedRandomSampler]
"""`Epochs` of a loader, the samplers around the weighted one, outermost first, and the copy that the loader reads."""


class _Readers(list["weakref.ref[Any]"]):
    """The loaders that read a sampler or its copies, as weak references to their `Epochs`. Not pickled."""

    def __reduce__(self) -> Any:
        return _Readers, ()


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
    """Return a tensor as an array or a tensor that NumPy takes; anything else unchanged."""
    if not hasattr(numbers, "detach"):
        return numbers
    numbers = numbers.detach().cpu()
    return numbers.double() if numbers.is_floating_point() else numbers  # NumPy has no bfloat16


def _check_numbers(name: str, values: Floats) -> None:
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if bad.size:
        raise ValueError(f"{name}[{bad[0]}] is {values[bad[0]]}: give finite numbers, 0 for what is not drawn")


def _check_draws(weights: Floats, draws: int, replacement: bool) -> None:
    positive = int(np.count_nonzero(weights))
    if draws and not positive:
        raise ValueError("weights are all zero, nothing can be drawn: give a positive weight to some sample")
    if not replacement and draws > positive:
        text = f"num_samples is {draws}, but only {positive} weights are positive"
        raise ValueError(f"{text}: draw fewer, or set replacement=True to draw an index more than once")


# -- the weights at any position ---------------------------------------------------------------------------------------


class _Update(NamedTuple):
    """Weights that hold from a position of an epoch on, in ascending order of the indices; ``text`` is for states."""

    epoch: int
    position: int
    indices: Int64s
    values: Floats
    text: str


def _made(epoch: int, position: int, indices: Int64s, values: Floats) -> _Update:
    """Return an update with its text: numbers of few bytes, ordered by byte, compressed."""
    steps = np.diff(indices, prepend=0)
    steps = steps.astype(f"<u{np.min_scalar_type(int(steps.max())).itemsize}")
    with np.errstate(over="ignore"):
        numbers = values.astype("<f4")
    if (numbers != values).any():
        numbers = values.astype("<f8")
    columns = [one.view(np.uint8).reshape(len(one), -1).T.tobytes() for one in (steps, numbers)]
    packed = base64.b64encode(zlib.compress(b"".join(columns), 1)).decode()  # base85: 6 % shorter, far slower
    return _Update(epoch, position, indices, values, f"{epoch}:{position}:{steps.itemsize}{numbers.itemsize}:{packed}")


def _parsed(text: str) -> _Update:
    """Return the update of a text from `_made`."""
    epoch, position, sizes, packed = text.split(":")
    step, number = map(int, sizes)
    data = np.frombuffer(zlib.decompress(base64.b64decode(packed, validate=True)), np.uint8)
    end = step * (len(data) // (step + number))
    steps = np.ascontiguousarray(data[:end].reshape(step, -1).T).view(f"<u{step}").ravel()
    values = np.ascontiguousarray(data[end:].reshape(number, -1).T).view(f"<f{number}").ravel()
    return _Update(int(epoch), int(position), np.cumsum(steps, dtype=np.int64), values.astype(np.float64), text)


class _History:
    """Weights of a sampler at any position: the first ones, and all updates since. Version v has the first v updates.

    Attributes:
        now: the weights after all updates; never changed in place.
        forgotten: epoch and position before which the weights are not known any more.
    """

    def __init__(self, weights: Floats, replacement: bool) -> None:
        self._initial, self._replacement = weights, replacement
        self.replace([], weights, (0, 0))

    def replace(self, updates: list[_Update], weights: Floats, forgotten: tuple[int, int]) -> None:
        self.updates, self.now, self.forgotten = updates, weights, forgotten
        self._text: str | None = None
        self._cache: dict[Hashable, Any] = {}

    def restart(self, weights: Floats) -> None:
        """Let these weights hold from the beginning, and forget all updates."""
        self.replace(self._joined(0, 0, weights), weights, (0, 0))

    def _joined(self, epoch: int, position: int, weights: Floats) -> list[_Update]:
        changed = np.flatnonzero(weights != self._initial)
        return [_made(epoch, position, changed, weights[changed])] if len(changed) else []

    def version(self, epoch: int, position: float) -> int:
        return bisect_right(self.updates, (epoch, position), key=lambda one: one[:2])

    def weights_of(self, version: int) -> Floats:
        if version == len(self.updates):
            return self.now
        weights = self._initial.copy()
        for one in self.updates[:version]:
            weights[one.indices] = one.values
        return weights

    def add(self, version: int, update: _Update, weights: Floats) -> None:
        """Add an update after the first ``version`` ones. Later ones, of positions that come again, are dropped."""
        if version < len(self.updates):
            self._cache.clear()
        self.updates[version:], self.now, self._text = [update], weights, None
        if sum(len(one.indices) for one in self.updates[1:]) > max(KEPT, len(weights)):
            self._join()

    def _join(self) -> None:
        """Join the older half of the updates, without replacement those of whole epochs."""
        sizes = np.cumsum([len(one.indices) for one in self.updates[1:]])
        count = 2 + int(np.searchsorted(sizes, sizes[-1] / 2))
        forgotten = self.updates[count - 1][:2]
        if not self._replacement:  # a draw depends on those before it
            forgotten = forgotten[0], 0
            count = self.version(*forgotten)
        if count > 1:
            joined = self._joined(*self.updates[count - 1][:2], self.weights_of(count))
            self.replace(joined + self.updates[count:], self.now, forgotten)

    def as_text(self) -> str | None:
        if self._text is None and self.updates:
            begin = ":".join(map(str, self.forgotten))
            self._text = ",".join([begin, *(one.text for one in self.updates)])
        return self._text

    def _cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._cache:
            while len(self._cache) >= CACHED:
                self._cache.pop(next(iter(self._cache)), None)
            self._cache[key] = make()
        return self._cache[key]

    # -- draws ----------------------------------------------------------------------------------------------

    def chosen(self, epoch: int, positions: Int64s, draws: Floats) -> Int64s:
        """Return the indices at positions of an epoch, with replacement, from a uniform number for each."""
        first, end = self.version(epoch, 0), self.version(epoch, math.inf)
        if first == end:
            return self._found(first, draws)
        begins = [one.position for one in self.updates[first:end]]
        versions, found = first + np.searchsorted(begins, positions, side="right"), np.empty(len(positions), np.int64)
        for version in np.unique(versions).tolist():
            here = versions == version
            found[here] = self._found(version, draws[here])
        return found

    def _found(self, version: int, draws: Floats) -> Int64s:
        bounds, last = self._cached(version, lambda: _bounds(self.weights_of(version)))
        draws = draws * bounds[-1]
        # Searching in ascending order is four times as fast, among a million bounds.
        ascending = np.argsort(draws)
        found = np.empty(len(draws), np.int64)
        found[ascending] = np.minimum(np.searchsorted(bounds, draws[ascending], side="right"), last)
        return found

    def first(self, key: tuple[Hashable, ...], epoch: int, length: int, end: int) -> Int64s:
        """Return at least the first ``end`` draws of an epoch without replacement, in segments between updates."""
        updates = self.updates[self.version(epoch, 0) : self.version(epoch, math.inf)]
        begins = sorted({0, *(one.position for one in updates if one.position < length)})
        segments = [(*pair, self.version(epoch, pair[0])) for pair in pairwise([*begins, length]) if pair[0] < end]
        known = len(segments)
        while known and len(self._cache.get((key, segments[known - 1][2]), ())) < min(segments[known - 1][1], end):
            known -= 1
        drawn = self._cache[key, segments[known - 1][2]] if known else np.empty(0, np.int64)
        for begin, stop, version in segments[known:]:
            if begin and stop == length and (key, version) not in self._cache:
                stop = min(stop, max(end, begin + FEW))  # the next update may drop the others
            own_key = (*key, begin) if begin else key
            drawn = np.concatenate([drawn[:begin], self._raced(version, drawn[:begin], stop - begin, own_key)])
            self._cache.pop((key, version), None)
            self._cached((key, version), drawn.view)
        return drawn

    def _raced(self, version: int, before: Int64s, count: int, key: tuple[Hashable, ...]) -> Int64s:
        """Return the first indices of a race, in which those drawn before take no part."""
        weights = self.weights_of(version)
        takes_part = weights > 0
        takes_part[before] = False
        candidates = np.flatnonzero(takes_part)
        # A uniform of 0 is replaced by the middle of the first step, to avoid a race of 0.
        races = np.maximum(-np.log1p(-uniforms(len(weights), *key)), 2.0**-54)[candidates]
        with np.errstate(over="ignore"):
            races /= weights[candidates]
        if count < len(races):  # a partition is ten times as fast as sorting all
            near = np.flatnonzero(races <= np.partition(races, count - 1)[count - 1])
            candidates, races = candidates[near], races[near]
        drawn: Int64s = candidates[np.argsort(races, kind="stable")[:count]].astype(np.int64, copy=False)
        return drawn


def _bounds(weights: Floats) -> tuple[Floats, int]:
    """Return cumulative sums, and the last positive weight's index: rounding may put a draw on the very end."""
    shares = weights / (weights.max(initial=0) or 1.0)  # weights up to 1.8e308: avoids overflow of their sum
    return np.cumsum(shares), int(np.flatnonzero(weights)[-1:].sum())
