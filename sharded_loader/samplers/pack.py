"""`Pack`: documents side by side in rows of one length, with what a model needs to keep them apart.

    Packed: documents, and the place of each     samplers/packing.py -> a task -> the reader's scope
    Pack(samples) -> dict of arrays              it looks its places up there; called alone, it fills row after row

A `Packed` is a batch's list of indices, so datasets, errors and states see plain numbers. Beside each number it knows
the row, the tokens of the document that go there, and how many tokens the document has. It can be cut into shards, and
parts of it can be left out. Rows stay whole where it is cut. The arrays of a batch are written once, into memory from
the caller's allocator.

What can go wrong, each a `BatchifyError`: a document has another length than the sampler has for it, is longer than
a row, is no sequence of integers, or has labels of another length. `Pack` keeps nothing of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an, call_of
from sharded_loader.batching.default import Batchify, as_array
from sharded_loader.batching.protocol import Array, BatchifyError, Empty, check_not_empty
from sharded_loader.engine.messages import RowIndices
from sharded_loader.randomness.rng import reading

IGNORED = -100
"""The label that losses of PyTorch leave out."""

Places = npt.NDArray[np.int64]
"""Of each document: its row, its first token there, the token behind its last one, and how many tokens it has."""


class Packed(RowIndices):
    """The indices of documents that are packed into rows, in the order of the rows.

    Args:
        documents: the indices. One comes several times if several pieces of it do.
        places: of each, as an array of shape (documents, 4).
        rows: how many rows there are.

    Example:
        >>> batch = Packed([7, 3, 5], np.array([[0, 0, 4, 4], [0, 0, 2, 2], [1, 0, 6, 6]]), 2)
        >>> batch.cut([1, 1]), batch.taken([0, 2]).places[:, 0].tolist()
        ([[7, 3], [5]], [0, 1])
    """

    __slots__ = ("places",)

    def __init__(self, documents: Iterable[int], places: Places, rows: int) -> None:
        super().__init__(documents)
        self.places, self.rows = places, rows

    def taken(self, positions: Sequence[int]) -> Packed:
        return Packed([self[position] for position in positions], self.places[positions], self.rows)

    def cut(self, sizes: Iterable[int]) -> list[RowIndices]:
        found: list[RowIndices] = []
        for begin, end in pairwise(accumulate(sizes, initial=0)):
            first, last = np.searchsorted(self.places[:, 0], [begin, end]).tolist()
            if begin < end:
                places = self.places[first:last].copy()
                places[:, 0] -= begin
                found.append(Packed(self[first:last], places, end - begin))
        return found

    def __reduce__(self) -> Any:
        return Packed, (list(self), self.places, self.rows)


class Pack(Batchify):
    """Put documents side by side into rows of ``tokens`` tokens, as `PackSampler` has planned it.

    A document is a 1-D array, list or tensor of token ids, or a mapping with ``"input_ids"`` and perhaps ``"labels"``,
    as tokenised Hugging Face datasets give. Other keys are not used. Pass `Pack` itself as ``batchify_fn``, together
    with ``batch_sampler=PackSampler(...)``. You may also call it in a function of your own, with all samples. Called
    outside a loader, it puts documents into one row as long as they fit, and then begins the next row.

    Args:
        tokens: The length of a row. Give `PackSampler` the same number.
        pad_id: What fills up ``input_ids`` behind the last document of a row.

    Returns:
        Calling it gives a dict of tensors. The first four are int64, of shape (rows, tokens):

        - ``input_ids``: the tokens.
        - ``position_ids``: 0, 1, 2, ... in each document; 0 in fillers.
        - ``segment_ids``: the number of the document in its row, from 1; 0 in fillers.
        - ``labels``: the document's own, or its tokens. -100 in fillers and at the first token of each document.
          Models of transformers shift labels themselves, so these are not shifted.
        - ``cu_seqlens``: int32, of shape (documents + 1,): where each document begins in
          ``input_ids[segment_ids > 0]``, and where the last one ends.

        A piece of a document that `PackSampler` has cut counts as a document.

    Raises:
        TypeError, ValueError: ``tokens`` is no integer of at least 1, or ``pad_id`` is no integer. On a call: a
            document is empty, too long, no sequence of integers, or has another length than `PackSampler` has for it.

    Example:
        >>> batch = Pack(tokens=6)([[11, 12, 13], [21, 22], [31, 32, 33, 34]])
        >>> batch["input_ids"]
        tensor([[11, 12, 13, 21, 22,  0],
                [31, 32, 33, 34,  0,  0]])
        >>> [batch[name][0].tolist() for name in ("labels", "position_ids", "segment_ids")]
        [[-100, 12, 13, -100, 22, -100], [0, 1, 2, 0, 1, 0], [1, 1, 1, 2, 2, 0]]
        >>> batch["cu_seqlens"]
        tensor([0, 3, 5, 9], dtype=torch.int32)

    Source of the idea: ``transformers.DataCollatorWithFlattening``, whose values these are.
    """

    def __init__(self, tokens: int, pad_id: int = 0) -> None:
        self._tokens = check_int("tokens", tokens, 1, "give the number of tokens in a row")
        self._pad_id = check_int("pad_id", pad_id, -(2**63), "give the token that fills up a row")

    def assemble(self, samples: Sequence[Any], empty: Empty) -> dict[str, Array]:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        tokens = [_ids_of(sample, "input_ids", position) for position, sample in enumerate(samples)]
        scope = reading.get()
        planned = None if scope is None else scope.indices
        if isinstance(planned, Packed) and len(planned) == len(samples):
            _check_lengths(tokens, planned)
        else:
            planned = _filled(tokens, self._tokens)
        row, begin, end, _ = planned.places.T
        sizes = end - begin
        bounds = np.concatenate([[0], np.cumsum(sizes)])
        filled = np.bincount(row, sizes, planned.rows).astype(np.int64)
        if (most := int(filled.max())) > self._tokens:
            raise BatchifyError(
                f"PackSampler has planned a row of {most} tokens, and Pack makes rows of {self._tokens}",
                f"write the same number in both, PackSampler(lengths, tokens={self._tokens}, ...)",
            )
        ids, given = _joined(tokens, begin, end), self._labels(samples)
        labels = ids.copy() if given is None else _joined(given, begin, end)
        labels[bounds[:-1]] = IGNORED
        in_row = np.arange(len(row)) - np.searchsorted(row, row)
        values = {
            "input_ids": (self._pad_id, ids),
            "position_ids": (0, np.arange(len(labels)) - np.repeat(bounds[:-1], sizes)),
            "segment_ids": (0, np.repeat(in_row + 1, sizes)),
            "labels": (IGNORED, labels),
        }
        batch: dict[str, Array] = {}
        for name, (fill, value) in values.items():
            batch[name], done = empty((planned.rows, self._tokens), np.dtype(np.int64)), 0
            for line, count in zip(batch[name], filled.tolist(), strict=True):
                line[:count], line[count:] = value[done : done + count], fill
                done += count
        batch["cu_seqlens"] = empty(bounds.shape, np.dtype(np.int32))
        batch["cu_seqlens"][...] = bounds
        return batch

    def _labels(self, samples: Sequence[Any]) -> Sequence[Array] | None:
        """The labels of each document, if they have some."""
        given = [isinstance(sample, Mapping) and "labels" in sample for sample in samples]
        if not any(given):
            return None
        if not all(given):
            raise BatchifyError(
                f"sample {given.index(False)} of the batch has no labels, and sample {given.index(True)} has some",
                "give all documents labels, or none",
            )
        labels = [_ids_of(sample, "labels", position) for position, sample in enumerate(samples)]
        wanted, found = [len(sample["input_ids"]) for sample in samples], list(map(len, labels))
        if found != wanted:
            raise BatchifyError(
                f"documents of {wanted} input_ids have {found} labels",
                "give each token one label; -100 leaves it out of the loss",
            )
        return labels

    def __repr__(self) -> str:
        return call_of(self, tokens=(self._tokens, None), pad_id=(self._pad_id, 0))


def _ids_of(sample: Any, key: str, position: int) -> Array:
    """The token ids of a document, or its labels."""
    if isinstance(sample, Mapping):
        if key not in sample:
            raise BatchifyError(
                f"sample {position} of the batch has no {key!r} (it has keys {list(sample)})",
                "give documents as arrays, lists or tensors of token ids, or as mappings with 'input_ids'",
            )
        sample = sample[key]
    array = None if isinstance(sample, str | bytes) else as_array(sample)
    if array is None or array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        what = "" if array is None else f" of shape {array.shape} and dtype {array.dtype}"
        raise BatchifyError(
            f"sample {position} of the batch is {an(type(sample))}{what}",
            "give each document as a list, 1-D array or tensor of at least one integer. Tokenise texts first",
        )
    return array


def _joined(arrays: Sequence[Array], begin: Places, end: Places) -> Array:
    """A part of each array, one behind the other."""
    pieces = [array[first:last] for array, first, last in zip(arrays, begin.tolist(), end.tolist(), strict=True)]
    return np.concatenate(pieces, dtype=np.int64, casting="unsafe")


def _check_lengths(tokens: Sequence[Array], planned: Packed) -> None:
    """Reject documents that have not the lengths that they were planned with."""
    for document, ids, length in zip(planned, tokens, planned.places[:, 3].tolist(), strict=True):
        if len(ids) != length:
            raise BatchifyError(
                f"document {document} has {len(ids)} tokens, and PackSampler has the length {length} for it",
                "give PackSampler the lengths of this dataset's documents, in their order",
            )


def _filled(tokens: Sequence[Array], most: int) -> Packed:
    """Documents row after row: one that does not fit into the row begins the next."""
    places, row, used = np.zeros((len(tokens), 4), np.int64), 0, 0
    for document, ids in enumerate(tokens):
        if len(ids) > most:
            raise BatchifyError(
                f"sample {document} of the batch has {len(ids)} tokens, and a row has {most}",
                'cut it, or let PackSampler(..., long="cut") do so and give Pack itself as batchify_fn',
            )
        row, used = (row, used + len(ids)) if used + len(ids) <= most else (row + 1, len(ids))
        places[document] = row, 0, len(ids), len(ids)
    return Packed(range(len(tokens)), places, row + 1)
