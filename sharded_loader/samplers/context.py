"""Context parallelism: the part of packed rows that one rank of a group reads.

    (rank, size), or a mesh -> `context_of`
    documents and their places in rows -> `part_of` -> tokens, labels and positions of this rank; where documents begin

The ranks of a group share a row. Each document is filled up to a multiple of 2 * size tokens and cut into as many equal
chunks. Rank r has chunks r and 2 * size - 1 - r, so that all ranks compute equally much causal attention. The filler at
the end of a row belongs to its last document. This is the THD layout of Transformer Engine and Megatron, which take
``cu_seqlens`` and ``cu_seqlens_padded`` of whole rows. A rank has tokens / size tokens of each row.

Only the part is copied. All errors are raised when `Pack` is made, or name the numbers that do not fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sharded_loader.extend import Array, Empty, Int64s
from sharded_loader.extend.tools import brief, check_int


def context_of(context: Any, tokens: int) -> tuple[int, int]:
    """Return rank and size of a group that shares rows of ``tokens`` tokens, from a pair or a mesh.

    Example:
        >>> context_of((1, 2), 8)
        (1, 2)
    """
    if hasattr(context, "get_coordinate"):
        names, place = context.mesh_dim_names or (), context.get_coordinate()
        if "cp" not in names or place is None:
            text = f"this process has no place in the mesh of context=, with the dimensions {brief(names)}"
            raise ValueError(f"{text}: give context=(rank, size), or a mesh with the dimension 'cp'")
        context = place[names.index("cp")], context.size(names.index("cp"))
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


def part_of(
    values: Mapping[str, tuple[int, Int64s]],
    row: Int64s,
    sizes: Int64s,
    shape: tuple[int, int],
    context: tuple[int, int],
    empty: Empty,
) -> dict[str, Array]:
    """Return the part of a batch that the rank of ``context`` reads.

    ``values`` are filler and values of each field, of the tokens of all documents, one after the other. ``row`` and
    ``sizes``, int64, are those of each document, in the order of the rows. ``shape`` is that of whole rows.

    Example:
        >>> values = {"input_ids": (-1, np.arange(11, 18))}
        >>> part = part_of(values, np.array([0, 0]), np.array([5, 2]), (1, 12), (0, 2), np.empty)
        >>> part["input_ids"].tolist(), part["cu_seqlens_padded"].tolist()
        ([[11, 12, -1, -1, 16, -1]], [0, 8, 12])
    """
    (rows, tokens), (rank, size), multiple = shape, context, multiple_of(context[1])
    lost = np.setdiff1d(np.arange(rows), row)  # rows whose documents could not be read have one of length 0
    at = np.searchsorted(row, lost)
    row, sizes = np.insert(row, at, lost), np.insert(sizes, at, 0)
    padded = -(-sizes // multiple) * multiple
    is_last = np.append(row[1:] != row[:-1], True)
    padded[is_last] += tokens - np.bincount(row, padded, rows).astype(np.int64)[row[is_last]]
    number, bounds = np.repeat(np.arange(len(row)), padded), np.append(0, np.cumsum(padded))
    place = np.arange(len(number)) - bounds[number]
    chunk = place // (padded // multiple)[number]
    mine = (chunk == rank) | (chunk == multiple - 1 - rank)
    number, place = number[mine], place[mine]
    real, batch = place < sizes[number], dict[str, Array]()
    token = ((np.cumsum(sizes) - sizes)[number] + place)[real]
    for name, (filler, value) in values.items():
        batch[name] = empty((rows, tokens // size), np.dtype(np.int64))
        batch[name][...] = filler
        batch[name].reshape(-1)[real] = value[token]
    for name, lengths in ("cu_seqlens", sizes), ("cu_seqlens_padded", padded):
        batch[name] = empty((len(lengths) + 1,), np.dtype(np.int32))
        batch[name][...] = np.append(0, np.cumsum(lengths))
    return batch
