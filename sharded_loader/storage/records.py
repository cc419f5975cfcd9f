"""RecordIO shards: records of bytes, as MXNet and this library write them.

    Records().read(file, index, rows) -> [b"...", ...]

An index is the offset of each record; it is made by reading the headers. ``.idx`` files are not looked at.

What can go wrong: a damaged file is a `ShardError` with the shard and the offset, when it is indexed or read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sharded_loader.recordio.files import (
    HEAD_SIZE,
    MAGIC_NUMBER,
    RecordBytes,
    RecordFile,
    RecordIOError,
    framed,
    padded,
)
from sharded_loader.storage.errors import ShardError
from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index


class _Whole(RecordBytes):
    """A shard, of which parts are read when they are asked for."""

    def __init__(self, file: ShardFile) -> None:
        super().__init__(b"")
        self._file, self.size = file, file.size

    def bytes_at(self, offset: int, size: int) -> bytes:
        end = min(offset + size, self.size)
        return self._file.ranges([offset], [end])[0] if end > offset else b""


class Records:
    """The format of ``.rec`` shards."""

    name = "records"
    suffixes: tuple[str, ...] = (".rec",)

    def index(self, file: ShardFile) -> Index:
        """The offset of each record, and the end of the file."""
        try:
            offsets = RecordFile(file.name, _Whole(file)).scan(None, file.stream())
        except RecordIOError as error:
            raise ShardError(str(error)) from None
        return {"offsets": np.array([*offsets, file.size], np.int64), "length": np.array(len(offsets))}

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The records at these rows of the shard."""
        offsets, where = index["offsets"], np.array(rows, np.int64)
        begins = offsets[where].tolist()
        parts = file.ranges(begins, offsets[where + 1].tolist())
        records = []
        try:
            for part, begin in zip(parts, begins, strict=True):
                record, _ = RecordFile(file.name, RecordBytes(part, begin)).read(begin)
                if not _is_written(part, record):
                    raise ShardError(f"{file.name}, offset {begin}: the record is not as a writer leaves it. {_ADVICE}")
                records.append(record)
        except RecordIOError as error:
            raise ShardError(str(error)) from None
        return records


_ADVICE = "The length of a part is damaged, or what follows the part. Copy or write the shard again"


def _is_written(part: bytes, record: bytes) -> bool:
    """Whether a writer makes these bytes of the record: zeros fill it up, and no part begins within another."""
    if len(part) == HEAD_SIZE + padded(len(record)):
        has_one_part = np.count_nonzero(np.frombuffer(part, "<u4") == MAGIC_NUMBER) == 1
        return bool(has_one_part) and not part[HEAD_SIZE + len(record) :].strip(b"\0")
    return framed(record) == part
