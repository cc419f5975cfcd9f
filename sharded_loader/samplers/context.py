"""Context parallelism: the part of packed rows that one rank of a group reads.

    (rank, size), or a mesh -> `context_of`
    documents and their places in rows -> `RankPart` -> tokens, labels and positions of this rank; where documents begin

The ranks of a group share a row. Each document is filled up to a multiple of 2 * size tokens and cut into as many equal
chunks. Rank r has chunks r and 2 * size - 1 - r, so that all ranks compute equally much causal attention. The filler at
the end of a row belongs to its last document. This is the THD layout of Transformer Engine and Megatron, which take
``cu_seqlens`` and ``cu_seqlens_padded`` of whole rows. A rank has tokens / size tokens of each row.

Only the part is copied. All errors are raised when `Pack` is made, or name the numbers that do not fit.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharded_loader.extend import Array, Empty, Int64s
from sharded_loader.extend.tools import check_int

DIMS = ("cp", "context")
"""Names of the dimension of a mesh whose processes share rows."""


def context_of(context: Any, tokens: int) -> tuple[int, int]:
    """Return rank and size of a group that shares rows of ``tokens`` tokens, from a pair or a mesh.

    Example:
        >>> context_of((1, 2), 8)
        (1, 2)
    """
    if hasattr(context, "get_coordinate"):
        names = context.mesh_dim_names or ()
        dims = [place for place, name in enumerate(names) if name in DIMS]
        if not dims:
            text = f"the mesh of context= has the dimensions {', '.join(map(repr, names)) or 'none'}"
            raise ValueError(f"{text}, and none is called 'cp': give context=(rank, size)")
        if context.get_coordinate() is None:
            raise ValueError("this process is not in the mesh of context=: make no loader here, or give (rank, size)")
        context = context.get_coordinate()[dims[0]], context.size(dims[0])
    if not isinstance(context, tuple | list) or len(context) != 2:
        raise TypeError(f"context is {context!r}: give (rank, size), or a mesh with the dimension 'cp'")
    size = check_int("the size of context", context[1], 1, "give the number of ranks that share a row")
    rank = check_int("the rank of context", context[0], 0, "ranks count from 0")
    if rank >= size:
        raise ValueError(f"context is rank {rank} of {size}: give a rank below the size")
    if tokens % multiple_of(size):
        text = f"a row has {tokens} tokens, and {size} ranks cut it into {multiple_of(size)} chunks"
        raise ValueError(f"{text}: give a multiple of {multiple_of(size)} as tokens=")
    return rank, size


def multiple_of(size: int) -> int:
    """Return the number of chunks of a document, to a multiple of which its length is rounded up."""
    return 2 * size if size > 1 else 1


class RankPart:
    """The part of rows of ``tokens`` tokens that the rank of ``context`` reads.

    ``row`` and ``sizes``, int64, are those of the documents, in the order of the rows; each row has a document.

    Example:
        >>> part = RankPart(np.array([0, 0]), np.array([5, 2]), 1, 12, (0, 2))
        >>> part.padded.tolist(), part.place.tolist()
        ([8, 4], [0, 1, 6, 7, 0, 3])
    """

    def __init__(self, row: Int64s, sizes: Int64s, rows: int, tokens: int, context: tuple[int, int]) -> None:
        rank, size = context
        multiple = multiple_of(size)
        self._row, self._sizes, self._shape = row, sizes, (rows, tokens // size)
        self.padded = -(-sizes // multiple) * multiple
        is_last = np.append(row[1:] != row[:-1], True)
        self.padded[is_last] += tokens - np.bincount(row, self.padded, rows).astype(np.int64)[row[is_last]]
        self._chunk = self.padded // multiple
        self._first = self._chunk[:, None] * np.unique([rank, multiple - 1 - rank])
        self.chunks: int = self._first.shape[1]  # of each document
        lengths = np.repeat(self._chunk, self.chunks)
        within = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        self.place: Int64s = np.repeat(self._first.ravel(), lengths) + within
        """Position in its document of each token of the part."""
        self._number = np.repeat(np.arange(len(sizes)), self._chunk * self.chunks)

    def edges(self, ahead: int) -> tuple[Int64s, Int64s]:
        """Return where this rank's chunks begin and end in their documents, ``ahead`` tokens later. Both are flat."""
        ends = self._first + self._chunk[:, None]
        first, last = (np.minimum(edge + ahead, self._sizes[:, None]).ravel() for edge in (self._first, ends))
        return first, last

    def batch(self, ids: Array, labels: Array, pad_id: int, ignored: int, empty: Empty) -> dict[str, Array]:
        """Return the batch. ``ids`` and ``labels`` are those of `edges` of 0 and 1, one chunk after the other."""
        size, in_row = self._sizes[self._number], np.arange(len(self._row)) - np.searchsorted(self._row, self._row)
        real, has_next = self.place < size, self.place + 1 < size
        values = {
            "input_ids": (pad_id, real, ids),
            "position_ids": (0, real, self.place[real]),
            "segment_ids": (0, real, in_row[self._number][real] + 1),
            "labels": (ignored, has_next, labels),
        }
        batch: dict[str, Array] = {}
        for name, (fill, mask, value) in values.items():
            batch[name] = empty(self._shape, np.dtype(np.int64))
            flat = batch[name].reshape(-1)
            flat[...] = fill
            flat[mask] = value
        for name, lengths in ("cu_seqlens", self._sizes), ("cu_seqlens_padded", self.padded):
            batch[name] = empty((len(lengths) + 1,), np.dtype(np.int32))
            batch[name][...] = np.append(0, np.cumsum(lengths))
        return batch
