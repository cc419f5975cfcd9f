"""RecordIO shards: every record, also one that holds the magic number; a damaged file is named with the offset."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import serving

from sharded_loader import RecordFileDataset
from sharded_loader.recordio import MXRecordIO
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile
from sharded_loader.storage.records import RecordIO
from sharded_loader.storage.stores import ObjectStore, RemoteFile

MAGIC = (0xCED7230A).to_bytes(4, "little")
RECORDS = [b"a", b"", b"with" + MAGIC + b"inside" + MAGIC, b"x" * 3000, MAGIC * 3, b"last"]


def write(path: Path) -> None:
    with MXRecordIO(str(path), "w") as file:
        for record in RECORDS:
            file.write(record)


def read(file: ShardFile, rows: list[int]) -> list[bytes]:
    try:
        return RecordIO().read(file, RecordIO().index(file), rows)
    finally:
        file.close()


def test_records_are_those_of_the_file_local_or_remote(tmp_path: Path) -> None:
    path, rows = tmp_path / "a.rec", [5, 2, 0, 1, 4, 3, 2]
    write(path)
    assert list(RecordFileDataset(path)) == RECORDS
    assert read(LocalFile(str(path)), rows) == [RECORDS[row] for row in rows]
    assert read(LocalFile(str(path)), []) == []
    with serving() as served:
        served.files["/a.rec"] = path.read_bytes()
        store, url = ObjectStore(), f"{served.url}/a.rec"
        assert read(RemoteFile(store, url, store.stat(url)), rows) == [RECORDS[row] for row in rows]
        store.close()


def test_a_damaged_file_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path)
    whole = path.read_bytes()
    file = LocalFile(str(path))
    index = RecordIO().index(file)
    path.write_bytes(whole[:12] + b"nonsense" + whole[20:])
    with pytest.raises(ShardError, match=r"a\.rec, offset 12: no record at 12"):
        RecordIO().read(file, index, [1])
    file.close()
    path.write_bytes(whole[:9] + b"x" + whole[10:])
    with pytest.raises(ShardError, match=r"a\.rec, offset 0: the record is not as a writer leaves it"):
        read(LocalFile(str(path)), [0])
    path.write_bytes(whole[:-3])
    with pytest.raises(ShardError, match=r"a\.rec, offset \d+: the part at .* the file ends at"):
        read(LocalFile(str(path)), [0])
    path.write_bytes(b"nonsense" * 9)
    with pytest.raises(ShardError, match=r"a\.rec, offset 0: .*Is it a RecordIO file"):
        read(LocalFile(str(path)), [0])
