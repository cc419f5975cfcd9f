"""A list, a tuple or a range as the sampler: read as a table, not item by item.

    Listed(items, mark).epoch_table(epoch) -> Table;  checkpoint(epoch, items) -> Checkpoint

A list may change between two epochs, so it has the checkpoints of a sampler of another library, with a checksum. What
can go wrong: the items before the checkpoint are not those of then (ValueError).
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.foreign import check_passed
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import Table, bytes_of

BLOCK = 4096
"""Items that are read at once."""


class Listed:
    """A list, a tuple or a range as the sampler: read in blocks, at any place, with a foreign sampler's checkpoints.

    Args:
        items: what was given.
        mark: the epoch goes on here; None: it begins.
    """

    def __init__(self, items: Sequence[Any], mark: Checkpoint | None) -> None:
        self._items, self._mark = items, mark
        self._passed = 0, 0  # so many items have this checksum: the next one goes on from there

    def epoch_table(self, epoch: int) -> Table:
        mark = self._mark
        if mark is not None and mark.epoch == epoch and mark.items:
            check_passed(self._items, mark, min(mark.items, len(self._items)), self._checksum(mark.items))
        return Table(len(self._items), self._at, BLOCK)

    def len_epoch(self, epoch: int) -> int:
        return len(self._items)

    def _at(self, positions: Indices) -> Any:
        first, last = int(positions[0]), int(positions[-1])
        if last - first + 1 == len(positions):
            found = self._items[first : last + 1]
        else:
            found = [self._items[position] for position in positions.tolist()]
        if set(map(type, found)) == {int}:
            with contextlib.suppress(OverflowError):  # out of any range: the plan says so
                return np.array(found, np.int64)
        return list(found)

    def checkpoint(self, epoch: int, items: int) -> Checkpoint:
        """The position after so many items, or after all of them."""
        items = min(items, len(self._items))
        return Checkpoint(epoch, items, self._checksum(items), None, items == len(self._items), None)

    def _checksum(self, items: int) -> int:
        count, checksum = self._passed if self._passed[0] <= items else (0, 0)
        checksum = zlib.crc32(bytes_of(self._items[count:items]), checksum)
        self._passed = items, checksum
        return checksum
