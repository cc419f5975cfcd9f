"""`RecordFileDataset`: the records of a ``.rec`` file by their place in its index, one by one or a batch at once.

    train.idx --or a scan of train.rec--> offsets --[i]--> RecordFile.read --> bytes
                                                  --get_batch--> recordbatch.read_records --> many

The offsets are one array that travels with the dataset to its workers, as do the sizes of the records: guesses by
the next offset, put right as records are read (two threads that put the same one right write the same). The file is
opened by each process for itself, and serves all its threads.

What can go wrong: a damaged record raises `RecordIOError` with file and offset, also in a batch.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from sharded_loader.batching.protocol import Empty
from sharded_loader.data.bulk import Indices, bulk, checked_indices
from sharded_loader.data.datasets import Dataset
from sharded_loader.recordio.batches import LARGE, Records, guessed_sizes, read_records
from sharded_loader.recordio.files import RecordFile, load_index

if TYPE_CHECKING:
    from typing_extensions import Self


class RecordFileDataset(Dataset):
    """The records of a ``.rec`` file as a dataset: ``dataset[i]`` is the i-th record of its index, as bytes.

    The index is the ``.idx`` beside it (``train.rec``, ``train.idx``); where there is none the file is scanned, once,
    and the offsets travel with the dataset to the workers. Records that an index does not list are not read: delete it
    where files were joined. Keys do not matter here, so none may be lost by being a duplicate. Safe in threads, after a
    fork, and pickled.

    Args:
        filename: the ``.rec`` file.

    Raises:
        OSError: it cannot be opened.
        ValueError: the index is malformed, or is empty while the file is not.
        RecordIOError: no RecordIO file; in ``dataset[i]``, a damaged record.

    Example:
        >>> import os, tempfile
        >>> from sharded_loader.recordio import MXRecordIO
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "letters.rec")
        >>> with MXRecordIO(path, "w") as file:
        ...     for record in (b"a", b"b", b"c"):
        ...         file.write(record)
        >>> with RecordFileDataset(path) as dataset:
        ...     len(dataset), dataset[0], dataset[-1], list(dataset.get_batch([2, 0]))
        (3, b'a', b'c', [b'c', b'a'])
        >>> folder.cleanup()

    Source: ``mxnet.gluon.data.RecordFileDataset``.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        self.filename = os.fspath(filename)
        self._file = RecordFile(self.filename)
        idx_path = os.path.splitext(self.filename)[0] + ".idx"
        if os.path.exists(idx_path):
            _, offsets = load_index(idx_path, str)
            if not offsets and self._file.size:
                raise ValueError(
                    f"{idx_path} is empty, {self.filename} has {self._file.size} bytes: "
                    "delete the .idx to have it rebuilt"
                )
        else:
            offsets = self._file.scan(stacklevel=3)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._sizes = guessed_sizes(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.filename}: index {number} is out of range, it has {len(self)} records")
        return self._file.read(int(self._offsets[number]))[0]

    @bulk
    def __getitems__(self, indices: Iterable[int]) -> list[bytes]:
        """Many records, as `get_batch` reads them."""
        return list(self._read(list(indices)))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty | None = None) -> Sequence[bytes]:
        """Many records, read together: for records of a few hundred bytes several times as fast as one by one.

        Args:
            indices: of the records, in any order; negative ones count from the end.
            empty: given by a loader, whose batch is a list, as of any bytes. It is not used.

        Returns:
            The same as ``[dataset[i] for i in indices]``, to be read only. Small records lie in one buffer, and the
            ``bytes`` objects are made when they are asked for.

        Raises:
            RecordIOError: the first damaged record, with its file and offset.
            IndexError: an index is out of range.

        A subclass that has a ``__getitem__`` of its own has no ``get_batch``, unless it writes one.
        """
        records = self._read(indices)
        return records if empty is None else list(records)

    def _read(self, indices: Indices) -> Records | list[bytes]:
        numbers = checked_indices(indices, len(self))
        guesses = self._sizes[numbers]
        records, sizes = read_records(self._file, self._offsets[numbers], guesses)
        if sizes is not guesses and self._sizes.flags.writeable:  # only news: after a fork each page is copied for it
            self._sizes[numbers] = np.minimum(sizes, LARGE)
        return records

    def close(self) -> None:
        """Closes the file, in this process. Again is no error."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"RecordFileDataset({self.filename!r}, {len(self)} records)"
