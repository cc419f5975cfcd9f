"""Some samples of a dataset, by their indices: what `SubsetDataset` does.

    Chosen(dataset, indices)[i] -> dataset[indices[i]]

A part of a part is made a part of the dataset at once, so reading a sample takes one look-up, however often a dataset
was cut. A part owns its array of indices, which nobody can change. What can go wrong: indices that do not fit the
dataset, which are rejected with an error when the part is made.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharded_loader.base.described import brief
from sharded_loader.data.bulk import Indices, Int64s, checked_index, checked_indices
from sharded_loader.data.columns import check_dataset
from sharded_loader.data.wrappers import View
from sharded_loader.randomness.indices import IndexView, Selection, bound_of, composed, taken


class Chosen(View):
    """The samples of a dataset at some indices.

    Args:
        dataset, indices: see `SubsetDataset`.
        looks_through: The dataset is a plain `SubsetDataset`: choose from the dataset inside.
    """

    def __init__(self, dataset: Any, indices: Any, looks_through: bool) -> None:
        dataset = check_dataset(dataset, "SubsetDataset")
        chosen: Selection
        if isinstance(indices, range | IndexView):
            if len(indices):
                checked_indices([indices[0], indices[-1], bound_of(indices) - 1], len(dataset))
            chosen = indices
        else:
            # A copy: the caller may shuffle an array of indices again, for another subset.
            chosen = np.array(checked_indices(indices, len(dataset)))
        if looks_through and vars(dataset).keys() == {"_dataset", "_indices"}:  # no method of its own
            dataset, chosen = dataset._dataset, composed(dataset._indices, chosen)
        if isinstance(chosen, np.ndarray):
            chosen.flags.writeable = False
        self._dataset, self._indices = dataset, chosen

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def dataset(self) -> Any:
        """The dataset that the samples are taken from.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").take(4)[2:].dataset
            SimpleDataset(5 samples of str)
        """
        return self._dataset

    @property
    def indices(self) -> Selection:
        """Where the samples are in `dataset`: a range, an array of int64, or an `IndexView`. All are read-only.

        The samples are ``[dataset[index] for index in indices]``. So the labels of a part are ``labels[part.indices]``,
        if ``labels`` is an array of the labels of the whole dataset.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").shard(2, 1).indices
            range(3, 5)
            >>> train, test = SimpleDataset("abcde").split([3, 2], seed=1)
            >>> sorted([*train.indices.tolist(), *test.indices.tolist()])
            [0, 1, 2, 3, 4]
        """
        return self._indices

    def _one(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._dataset[int(self._indices[checked_index(index, len(self._indices))])]

    def _inner(self, indices: Indices) -> Int64s:
        where = checked_indices(indices, len(self._indices))
        if isinstance(self._indices, range):  # `taken`, without a call
            return self._indices.start + self._indices.step * where
        return taken(self._indices, where)

    def __repr__(self) -> str:
        return f"<{len(self)} of {brief(self._dataset)}>"
