"""Batches of indices: `BatchSampler`, and batches of samples of like length.

    BatchSampler           any sampler's items, ``batch_size`` at a time
    SortedBucketSampler    sorted within large random buckets
    BoundedBudgetSampler   as many samples as a budget of padded tokens allows

Out: lists of Python ints, one list per batch. Batch k of an epoch is a pure function of (seed, epoch, k).
With ``last_batch="rollover"`` the epochs are one endless stream cut into batches: of N items each and B to
a batch, epoch e owns the batches floor(e*N/B) to floor((e+1)*N/B) - 1. These are the batches that Gluon
gives, but they do not depend on what was iterated before.

What can go wrong: a foreign sampler whose ``len`` is not the number of items that it yields: ValueError.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.sampling.base import Indices, Sampler, check_int, check_start, resolve_seed
from sharded_loader.sampling.foreign import WrapperSampler, has_chunks, len_epoch, plain_index
from sharded_loader.sampling.permutation import shuffled
from sharded_loader.sampling.samplers import sort_order, sortable

# Any count of tokens fits below.
MAX_TOKENS = 2**62

LAST_BATCH = ("keep", "discard", "rollover")


class BatchSampler(WrapperSampler[list[int]]):
    """Items of another sampler, ``batch_size`` at a time.

    Args:
        sampler: any sampler, or an iterable that can be read again and again.
        batch_size: items per batch.
        last_batch: what happens to the items that do not fill a batch. ``"keep"``: a smaller last batch;
            ``"discard"``: left out; ``"rollover"``: first in the next epoch.
        seed: starts ``sampler`` if it is foreign (torch's, say). None draws one from torch's default
            generator if it is needed.

    Raises:
        TypeError, ValueError: for a ``batch_size`` that is not an integer of at least 1, an unknown
            ``last_batch``, and a ``sampler`` that can be read only once.

    Example:
        >>> from sharded_loader.sampling import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(5), 2, "rollover")
        >>> list(batches), list(batches)
        ([[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]])

    Source of the idea: `mxnet.gluon.data.BatchSampler`.
    """

    decided_by = (("batch_size", "batch_size"), ("last_batch", "last_batch"))

    def __init__(
        self, sampler: Iterable[Any], batch_size: int, last_batch: str = "keep", *, seed: int | None = None
    ) -> None:
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        if last_batch not in LAST_BATCH:
            raise ValueError(
                f"last_batch is {last_batch!r}, which BatchSampler does not know: "
                "choose 'keep', 'discard' or 'rollover'"
            )
        super().__init__(sampler, seed, "sampler")
        self.sampler = sampler
        self.last_batch = last_batch

    @property
    def drop_last(self) -> bool:
        """torch's name for ``last_batch == "discard"``."""
        return self.last_batch == "discard"

    def iter_epoch(self, epoch: int, start: int = 0, *, offset: int = 0, arrays: bool = False) -> Iterator[Any]:
        """The batches of an epoch.

        Args:
            epoch: which epoch.
            start: how many batches to leave out.
            offset: how many items of ``sampler``'s global order to leave out before the first of those batches
                (not with ``"rollover"``: see `stretch`).
            arrays: batches may be int64 arrays instead of lists, for who gathers by them.

        Example:
            >>> list(BatchSampler([5, 6, 7], 2).iter_epoch(0, arrays=True))
            [array([5, 6]), array([7])]
        """
        check_start(start)
        size = self.batch_size
        if self.last_batch == "rollover":
            first, last = self._rollover_bounds(epoch)
            first = min(first + start, last)
            at, begin = divmod(first * size, max(len_epoch(self.sampler, 0), 1))
            return self.stretch(at, begin, (last - first) * size, arrays=arrays)
        batches = self._batches(self._items(epoch, start * size, offset), arrays)
        if self.last_batch == "discard":
            return (batch for batch in batches if len(batch) == size)
        return batches

    def stretch(self, epoch: int, start: int, count: int, *, offset: int = 0, arrays: bool = False) -> Iterator[Any]:
        """Batches of a stretch of the endless stream of epochs; the last is smaller if ``count`` is no multiple.

        Args:
            epoch: where the stretch begins: in this epoch,
            start: after this many items of it.
            count: items in the stretch.
            offset: as in `iter_epoch`: left out of ``epoch`` before ``start`` counts.
            arrays: as in `iter_epoch`.
        """
        if count <= 0:
            return iter(())
        length = len_epoch(self.sampler, 0)
        if has_chunks(self.sampler):
            chunks = self._counted(self._inner_chunks(epoch, start, offset), len, epoch, start, offset, length)
            return self._batches(_cut(chunks, count), arrays)
        # One item at a time: a foreign sampler is to be read no further than the batch that is asked for.
        items = self._counted(self._inner_items(epoch, start, offset), _one, epoch, start, offset, length)
        return self._batches(_lists(islice(items, count), self.batch_size), arrays)

    def len_epoch(self, epoch: int, *, offset: int = 0) -> int:
        """How many batches an epoch has, after ``offset`` items of ``sampler``'s global order."""
        if self.last_batch == "rollover":
            first, last = self._rollover_bounds(epoch)
            return last - first
        items = self._inner_length(epoch, offset)
        return items // self.batch_size if self.drop_last else -(-items // self.batch_size)

    def _rollover_bounds(self, epoch: int) -> tuple[int, int]:
        items = len_epoch(self.sampler, epoch)
        return epoch * items // self.batch_size, (epoch + 1) * items // self.batch_size

    def _items(self, epoch: int, start: int, offset: int) -> Iterator[Any]:
        """Items of one epoch: arrays where the sampler has them, else lists of one batch's size."""
        if has_chunks(self.sampler):
            return self._inner_chunks(epoch, start, offset)
        return _lists(self._inner_items(epoch, start, offset), self.batch_size)

    def _counted(
        self, parts: Iterator[Any], measure: Callable[[Any], int], epoch: int, start: int, offset: int, length: int
    ) -> Iterator[Any]:
        """The endless stream that begins with ``parts``, which have been opened: nothing waits for the first next()."""
        open_epoch = self._inner_chunks if measure is len else self._inner_items
        left = self._inner_length(epoch, offset) - start
        while True:
            for part in parts:
                left -= measure(part)
                yield part
            if left:
                raise ValueError(
                    f"the sampler, a {type(self.sampler).__name__}, yielded {length - left} items in epoch {epoch}, "
                    f"but its length is {length}: correct its __len__, or use last_batch='keep' instead of 'rollover'"
                )
            epoch, left = epoch + 1, length
            parts = open_epoch(epoch)

    def _batches(self, parts: Iterator[Any], arrays: bool) -> Iterator[Any]:
        batches = self._lists_of(parts, arrays)
        return map(_to_array, batches) if arrays else batches

    def _lists_of(self, parts: Iterator[Any], arrays: bool) -> Iterator[Any]:
        size = self.batch_size
        rest: list[int] = []
        for part in parts:
            begin = size - len(rest) if rest else 0
            if rest:
                rest.extend(_to_list(part[:begin]))
                if len(rest) < size:
                    continue
                yield rest
            whole = begin + max(len(part) - begin, 0) // size * size
            if isinstance(part, np.ndarray):
                rows = part[begin:whole].reshape(-1, size)
                yield from rows if arrays else rows.tolist()
            elif begin < whole:
                yield part[begin:whole]
            rest = _to_list(part[whole:])
        if rest:
            yield rest


def _to_array(batch: Any) -> Any:
    if type(batch) is list and set(map(type, batch)) == {int}:
        try:
            return np.array(batch, np.int64)
        except OverflowError:
            return batch  # out of any range: the plan says so
    return batch


def _to_list(part: Any) -> list[int]:
    items: list[int] = part.tolist() if isinstance(part, np.ndarray) else part
    return items


def _lists(items: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while part := list(islice(items, size)):
        yield part if set(map(type, part)) == {int} else [plain_index(item) for item in part]


def _one(item: Any) -> int:
    return 1


def _cut(chunks: Iterator[Indices], count: int) -> Iterator[Indices]:
    """The first ``count`` indices."""
    while count > 0:
        chunk = next(chunks)[:count]
        count -= len(chunk)
        yield chunk


class SortedBucketSampler(Sampler[list[int]]):
    """Batches of similar keys: samples are cut into large buckets, and sorted and batched within each.

    Args:
        sort_keys: one key per sample: numbers, or anything that can be compared.
        batch_size: samples per batch.
        mult: a bucket has ``int(mult * batch_size)`` samples; at least 1.
        reverse: greatest key first within a bucket.
        shuffle: fill the buckets at random, and shuffle the batches of a bucket, anew each epoch.
        seed: with the epoch it decides the shuffles. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: for a ``batch_size`` or ``mult`` below 1.

    Example:
        >>> list(SortedBucketSampler([3, 9, 4, 1, 7], 2, mult=2))
        [[1, 2], [0, 3], [4]]

    Source of the idea: `gluonnlp.data.SortedBucketSampler`.
    """

    decided_by = (
        ("sort_keys", "_keys"),
        ("batch_size", "batch_size"),
        ("bucket size", "_bucket_size"),
        ("reverse", "_reverse"),
        ("shuffle", "_shuffle"),
    )
    shown = tuple((name.replace(" ", "_"), attribute) for name, attribute in decided_by)

    def __init__(
        self,
        sort_keys: Sequence[Any] | npt.NDArray[Any],
        batch_size: int,
        mult: float = 100,
        reverse: bool = True,
        shuffle: bool = False,
        seed: int | None = None,
    ) -> None:
        self._keys = sortable(sort_keys)
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        if not mult >= 1:
            raise ValueError(f"mult must be at least 1, got {mult}: a bucket holds mult * batch_size samples")
        self._bucket_size = min(int(min(mult * batch_size, 2.0**62)), max(len(self._keys), 1))
        self._reverse = bool(reverse)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        return self._batches((self.seed, "sorted bucket", epoch), check_start(start))

    def _batches(self, key: tuple[Any, ...], start: int) -> Iterator[list[int]]:
        count, size = len(self._keys), self.batch_size
        order = shuffled(count, *key) if self._shuffle else np.arange(count, dtype=np.int64)
        bucket, skip = divmod(start, -(-self._bucket_size // size))
        for begin in range(bucket * self._bucket_size, count, self._bucket_size):
            indices = order[begin : begin + self._bucket_size]
            indices = indices[sort_order(self._keys[indices], self._reverse)]
            batches = np.arange(-(-len(indices) // size))
            if self._shuffle:
                batches = shuffled(len(batches), *key, begin)
            for batch in batches[skip:].tolist():
                yield indices[batch * size : (batch + 1) * size].tolist()
            skip = 0

    def len_epoch(self, epoch: int) -> int:
        full, rest = divmod(len(self._keys), self._bucket_size)
        return full * -(-self._bucket_size // self.batch_size) - (-rest // self.batch_size)


class BoundedBudgetSampler(Sampler[list[int]]):
    """Batches as large as a budget allows: padded tokens (longest length x samples), samples, or both.

    Samples are sorted by length and cut greedily, so that a batch holds samples of like length.

    Args:
        lengths: shape (n,), or (n, k) for samples of several parts, of which the longest counts; in tokens.
        max_num_tokens: most tokens of a batch after padding; -1 for no limit.
        max_num_sentences: most samples of a batch; -1 for no limit.
        required_batch_size_multiple: cut batches that are larger to a multiple of this (8 suits GPUs). The
            last batch, and smaller ones, stay as they are.
        shuffle: shuffle the batches anew each epoch; without it short samples come first.
        seed: with the epoch it decides that order. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: if there is neither limit, or a sample is longer than ``max_num_tokens``.

    Example:
        >>> list(BoundedBudgetSampler([5, 1, 2, 4, 2], max_num_tokens=6, shuffle=False))
        [[1, 2, 4], [3], [0]]

    Source of the idea: `gluonnlp.data.BoundedBudgetSampler`, fairseq's batching by size.
    """

    decided_by = (("lengths", "_order"), ("budget", "_bounds"), ("shuffle", "_shuffle"))
    shown = (("max_num_tokens", "_max_num_tokens"), ("max_num_sentences", "_max_num_sentences"), decided_by[-1])

    def __init__(
        self,
        lengths: Sequence[Any] | npt.NDArray[Any],
        max_num_tokens: int = -1,
        max_num_sentences: int = -1,
        required_batch_size_multiple: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        array = np.asarray(lengths)
        if array.ndim == 2 and array.shape[1]:
            array = array.max(axis=1)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise ValueError(
                f"lengths must be integers of shape (n,) or (n, k), got shape {array.shape} and dtype {array.dtype}: "
                "give the number of tokens of each sample"
            )
        if array.size and array.min() < 0:
            index = int(array.argmin())
            raise ValueError(f"lengths[{index}] is {array[index]}: give the number of tokens, 0 or more")
        tokens = check_int("max_num_tokens", max_num_tokens, -MAX_TOKENS, "give the budget, or -1 for none")
        sentences = check_int("max_num_sentences", max_num_sentences, -MAX_TOKENS, "give the budget, or -1 for none")
        multiple = check_int("required_batch_size_multiple", required_batch_size_multiple, 1, "1 asks for nothing")
        if tokens <= 0 and sentences <= 0:
            raise ValueError(
                "there is no budget: give max_num_tokens (padded tokens per batch), max_num_sentences, or both"
            )
        if tokens > 0 and array.size and array.max() > tokens:
            index = int(array.argmax())
            raise ValueError(
                f"sample {index} has {array[index]} tokens, more than max_num_tokens={tokens}: "
                "raise the budget, cut the sample, or leave it out of the dataset"
            )
        self._max_num_tokens, self._max_num_sentences = tokens, sentences
        self._order: Indices = np.argsort(array, kind="stable")
        self._bounds = _bounds(array[self._order].tolist(), tokens, sentences, multiple)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or seed is not None else None

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[list[int]]:
        return self._batches((self.seed, "budget", epoch), check_start(start))

    def _batches(self, key: tuple[Any, ...], start: int) -> Iterator[list[int]]:
        count = self.len_epoch(0)
        batches = shuffled(count, *key) if self._shuffle else np.arange(count)
        for batch in batches[start:].tolist():
            yield self._order[self._bounds[batch] : self._bounds[batch + 1]].tolist()

    def len_epoch(self, epoch: int) -> int:
        return len(self._bounds) - 1


def _bounds(lengths: list[int], tokens: int, sentences: int, multiple: int) -> list[int]:
    """Where batches begin in ascending lengths, and the end of the last."""
    bounds = [0]
    total = len(lengths)
    while (begin := bounds[-1]) < total:
        most = min(total - begin, sentences) if sentences > 0 else total - begin
        size = most
        if tokens > 0:
            if lengths[begin]:
                most = min(most, tokens // lengths[begin])
            # Padded tokens of the first n only grow with n.
            size = bisect_left(range(1, most + 1), True, key=lambda n: n * lengths[begin + n - 1] > tokens)
        if begin + size < total and size > multiple:
            size -= size % multiple
        bounds.append(begin + size)
    return bounds
