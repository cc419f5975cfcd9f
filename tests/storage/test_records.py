"""RecordIO shards: every record, also one that holds the magic number; a damaged file is named with the offset."""

from __future__ import annotations

from pathlib import Path

import pytest
from served import serving

from sharded_loader import RecordFileDataset
from sharded_loader.recordio import MXRecordIO, RecordIOError
from sharded_loader.storage.files import LocalFile, RemoteFile, ShardFile
from sharded_loader.storage.records import Records
from sharded_loader.storage.stores import Store

MAGIC = (0xCED7230A).to_bytes(4, "little")
RECORDS = [b"a", b"", b"with" + MAGIC + b"inside" + MAGIC, b"x" * 3000, MAGIC * 3, b"last"]


def write(path: Path) -> None:
    with MXRecordIO(str(path), "w") as file:
        for record in RECORDS:
            file.write(record)


def read(file: ShardFile, rows: list[int]) -> list[bytes]:
    try:
        return Records().read(file, Records().index(file), rows)
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
        store, url = Store(), f"{served.url}/a.rec"
        assert read(RemoteFile(store, url, store.stat(url)), rows) == [RECORDS[row] for row in rows]
        store.close()


def test_a_damaged_file_is_named_with_the_offset(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path)
    path.write_bytes(path.read_bytes()[:-3])
    file = LocalFile(str(path))
    with pytest.warns(UserWarning, match=r"a\.rec, offset \d+.*5 records were found before"):
        index = Records().index(file)
    assert Records().read(file, index, [4]) == [RECORDS[4]]
    with pytest.raises(RecordIOError, match=r"a\.rec, offset \d+: "):
        Records().read(file, index, [5])
    file.close()
    (tmp_path / "b.rec").write_bytes(b"nonsense" * 9)
    with pytest.raises(RecordIOError, match=r"b\.rec, offset 0: .*Is it a RecordIO file"):
        read(LocalFile(str(tmp_path / "b.rec")), [0])
