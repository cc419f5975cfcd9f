"""Parquet and Arrow shards: any row, out of groups that are decoded once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import serving

from sharded_loader.storage.files import LocalFile, RemoteFile
from sharded_loader.storage.parquet import KEPT, Arrow, Parquet
from sharded_loader.storage.stores import ShardError, Store

KINDS = {"parquet": Parquet, "arrow": Arrow}


def write(path: Path, kind: str, rows: int = 10, group: int = 4) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table(
        {
            "x": pyarrow.array(np.arange(rows, dtype=np.float32)),
            "name": [f"row {i}" for i in range(rows)],
            "image": [bytes([i]) * i for i in range(rows)],
            "maybe": [None if i % 3 else i for i in range(rows)],
            "tokens": [list(range(i)) for i in range(rows)],
        }
    )
    if kind == "parquet":
        import pyarrow.parquet

        pyarrow.parquet.write_table(table, path, row_group_size=group)
    else:
        with pyarrow.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=group)


def check(found: list[Any], rows: list[int]) -> None:
    assert [one["x"] for one in found] == rows and {type(one["x"]) for one in found} <= {np.float32}
    assert [one["name"] for one in found] == [f"row {i}" for i in rows]
    assert [one["image"] for one in found] == [bytes([i]) * i for i in rows]
    assert [one["maybe"] for one in found] == [None if i % 3 else i for i in rows]
    assert [list(one["tokens"]) for one in found] == [list(range(i)) for i in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_is_read_local_or_remote(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"a.{kind}", [9, 0, 3, 4, 8, 0]
    write(path, kind)
    file = LocalFile(str(path))
    index = KINDS[kind]().index(file)
    assert int(index["length"]) == 10
    check(KINDS[kind]().read(file, index, rows), rows)
    assert len(file.kept["groups"]) <= KEPT
    file.close()
    with serving() as served:
        served.files["/a"] = path.read_bytes()
        store, url = Store(), f"{served.url}/a"
        remote = RemoteFile(store, url, store.stat(url))
        check(KINDS[kind]().read(remote, KINDS[kind]().index(remote), rows), rows)
        remote.close()
        store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_table_is_named(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.bin").write_bytes(b"nonsense" * 100)
    file = LocalFile(str(tmp_path / "a.bin"))
    with pytest.raises(ShardError, match=rf"a\.bin is no {kind} file"):
        KINDS[kind]().index(file)
    file.close()


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    file = LocalFile(str(tmp_path / "a.parquet"))
    with pytest.raises(ShardError, match="pip install pyarrow"):
        Parquet().index(file)
    file.close()
