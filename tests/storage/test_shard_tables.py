"""Parquet and Arrow shards: any row, out of groups that are decoded once. Where the messages of an Arrow file lie."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import Subject, assert_noticed
from served import serving
from shards import closed  # noqa: F401

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage.files import LocalFile, ShardError
from sharded_loader.storage.stores import ObjectStore, RemoteFile
from sharded_loader.storage.tables import Arrow, Parquet, _column

pyarrow, _ = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")

KINDS = {"parquet": Parquet, "arrow": Arrow, "stream": Arrow}


def write(path: Path, kind: str, rows: int = 10, group: int = 4, has_checksums: bool = False) -> None:
    table = pyarrow.table(
        {
            "x": pyarrow.array(np.arange(rows, dtype=np.float32)),
            "name": [f"row {i}" for i in range(rows)],
            "image": [bytes([i]) * i for i in range(rows)],
            "maybe": [None if i % 3 else i for i in range(rows)],
            "tokens": [list(range(i)) for i in range(rows)],
            "kind": pyarrow.array([f"kind {i % 2}" for i in range(rows)]).dictionary_encode(),
        }
    )
    write_table(table, path, kind, group, has_checksums)


def write_table(table: Any, path: Path, kind: str, group: int, has_checksums: bool = False) -> None:
    if kind == "parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=group, write_page_checksum=has_checksums)
    else:
        new = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
        with new(path, table.schema) as file:
            file.write_table(table, max_chunksize=group)


def check(found: list[Any], rows: list[int]) -> None:
    assert [one["x"] for one in found] == rows and {type(one["x"]) for one in found} <= {np.float32}
    assert [one["name"] for one in found] == [f"row {i}" for i in rows]
    assert [one["image"] for one in found] == [bytes([i]) * i for i in rows]
    assert [one["maybe"] for one in found] == [None if i % 3 else i for i in rows]
    assert [list(one["tokens"]) for one in found] == [list(range(i)) for i in rows]
    assert [one["kind"] for one in found] == [f"kind {i % 2}" for i in rows]


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_is_read_local_or_remote(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"a.{kind}", [9, 0, 3, 4, 8, 0]
    write(path, kind)
    file = LocalFile(str(path))
    index = KINDS[kind]().index(file)
    assert int(index["length"]) == 10
    check(KINDS[kind]().read(file, index, rows), rows)
    file.close()
    with serving() as served:
        served.files["/a"] = path.read_bytes()
        store, url = ObjectStore(), f"{served.url}/a"
        remote = RemoteFile(store, url, store.stat(url))
        check(KINDS[kind]().read(remote, KINDS[kind]().index(remote), rows), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_table_is_named(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.bin").write_bytes(b"nonsense" * 100)
    file = LocalFile(str(tmp_path / "a.bin"))
    with pytest.raises(ShardError, match=rf"a\.bin is not a valid {KINDS[kind].name} file, or damaged"):
        KINDS[kind]().index(file)
    file.close()


@pytest.mark.parametrize("kind", KINDS)
def test_threads_share_a_shard(tmp_path: Path, kind: str) -> None:
    path, count = tmp_path / f"a.{KINDS[kind].name}", 2000
    table = pyarrow.table({"x": np.arange(count), "s": [str(i) for i in range(count)]})
    write_table(table, path, kind, 20)
    dataset = ShardDataset(path, index_folder=tmp_path)
    order = np.random.default_rng(1).integers(0, count, 3000).tolist()
    with ShardedDataLoader(dataset, 8, sampler=order, num_workers=8, thread_pool=True) as loader:
        found = [(int(x), int(s)) for batch in loader for x, s in zip(batch["x"], batch["s"], strict=True)]
    assert found == [(index, index) for index in order]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_cut_while_it_is_open_is_an_error(tmp_path: Path, kind: str) -> None:
    """A mapped file would end the process with SIGBUS."""
    path = tmp_path / f"a.{kind}"
    write_table(pyarrow.table({"x": np.random.default_rng(1).random(100_000)}), path, kind, 50_000)
    file, shards = LocalFile(str(path)), KINDS[kind]()
    index = shards.index(file)
    first = shards.read(file, index, [5])
    os.truncate(path, file.size // 2)
    with pytest.raises(ShardError, match=rf"a\.{kind} ends within bytes .* shorter than when it was indexed"):
        shards.read(file, index, [99_999])
    assert shards.read(file, index, [5]) == first  # it was decoded before
    file.close()


TROUBLE = {"is missing": {"refuses": 404}, "may not read": {"refuses": 403}, "has changed": {"tag": "second"}}


@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_of_a_server_that_goes_or_changes_is_no_damage(tmp_path: Path, kind: str, trouble: str) -> None:
    path = tmp_path / f"a.{'arrow' if kind == 'stream' else kind}"
    write(path, kind)
    with serving() as served:
        served.files["/" + path.name] = path.read_bytes()
        dataset = ShardDataset(f"{served.url}/{path.name}", index_folder=tmp_path)
        assert len(dataset) == 10
        vars(served).update(TROUBLE[trouble])
        with pytest.raises(ShardError, match=rf"{path.name}.* {trouble}") as caught:
            dataset[5]
        dataset.close()
    assert "damaged" not in str(caught.value)
    kinds = {"is missing": FileNotFoundError, "may not read": PermissionError}
    assert isinstance(caught.value, kinds.get(trouble, ShardError))


@pytest.mark.parametrize("grows", [True, False])
def test_a_dictionary_that_grows_or_is_replaced_on_the_way(tmp_path: Path, grows: bool) -> None:
    path = tmp_path / "a.arrow"
    words = [["a", "b"], ["a", "b", "c"] if grows else ["x", "y"], ["a", "b", "c"] if grows else ["a"]]
    batches = [
        pyarrow.record_batch({"w": pyarrow.DictionaryArray.from_arrays([len(one) - 1, 0], one)}) for one in words
    ]
    options = pyarrow.ipc.IpcWriteOptions(emit_dictionary_deltas=grows)
    with pyarrow.ipc.new_stream(path, batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    dataset = ShardDataset(path, index_folder=tmp_path)
    assert [dataset[i]["w"] for i in (5, 4, 3, 2, 1, 0)] == [w for one in words[::-1] for w in (one[0], one[-1])]


@pytest.mark.parametrize("writes_all", [True, False])
def test_batches_without_rows_and_compressed_ones_are_read(tmp_path: Path, writes_all: bool) -> None:
    path = tmp_path / "a.feather"
    batch = pyarrow.record_batch({"x": [1, 2], "s": ["a", "b"]})
    options = None if writes_all else pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(path, batch.schema, options=options) as writer:
        for one in (batch[:0], batch, batch[:0], batch[1:]):
            writer.write_batch(one)
    dataset = ShardDataset(path, index_folder=tmp_path)
    assert [dataset[i]["s"] for i in range(len(dataset))] == ["a", "b", "b"]


def other_reader(content: bytes) -> list[Any] | None:
    """What pyarrow makes of a table: None if it is damaged."""
    try:
        if content[:4] == b"PAR1":
            source = pyarrow.parquet.ParquetFile(io.BytesIO(content))
            tables = [source.read_row_group(number, use_threads=False) for number in range(source.num_row_groups)]
        elif content[:6] == b"ARROW1":
            opened = pyarrow.ipc.open_file(content)
            tables = [opened.get_batch(number) for number in range(opened.num_record_batches)]
        else:
            tables = list(pyarrow.ipc.open_stream(content))
        for table in tables:
            table.validate(full=True)
        columns = [{name: _column(table.column(name), name) for name in table.schema.names} for table in tables]
        return [
            {name: column[row] for name, column in one.items()}
            for one, table in zip(columns, tables, strict=True)
            for row in range(table.num_rows)
        ]
    except Exception:
        return None


def subject(folder: Path, kind: str, has_checksums: bool) -> Subject:
    path = folder / f"a.{KINDS[kind].name}"
    write(path, kind, rows=40, group=10, has_checksums=has_checksums)
    content = path.read_bytes()
    if kind == "parquet":
        footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
        return Subject(path.name, content, [] if has_checksums else [(4, footer)], other_reader)
    return Subject(path.name, content, bodies_of(content), other_reader)


def bodies_of(content: bytes) -> list[tuple[int, int]]:
    """Where the values of the messages of an Arrow file lie."""
    source, found = io.BytesIO(content), []
    begin = source.seek(8 if content.startswith(b"ARROW1") else 0)
    for _ in pyarrow.ipc.MessageReader.open_stream(source):
        found.append((begin + 8 + int.from_bytes(content[begin + 4 : begin + 8], "little"), source.tell()))
        begin = source.tell()
    return found


@pytest.mark.parametrize(
    ("kind", "has_checksums"), [("parquet", False), ("parquet", True), ("arrow", False), ("stream", False)]
)
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 2500), marks=pytest.mark.slow)])
def test_damage_is_noticed(tmp_path: Path, kind: str, has_checksums: bool, seeds: range) -> None:
    """Values have no checksum, except in Parquet files written so. What pyarrow does not notice passes too."""
    assert_noticed(subject(tmp_path, kind, has_checksums), seeds, tmp_path)


@pytest.mark.parametrize("content", [b"", b"ARROW1\0\0", b"nonsense" * 20, b"\xff" * 4 + b"\0" * 4, b"ARROW1" * 20])
def test_what_is_no_arrow_file_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(ShardError, match=r"a\.arrow is not a valid arrow file, or damaged within bytes 0 to \d+"):
        ShardDataset(tmp_path / "a.arrow", index_folder=tmp_path)


@pytest.mark.parametrize("cut", [8, 300])
def test_a_stream_without_its_end_is_an_error(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a.arrow"
    write(path, "stream")
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(ShardError, match=r"a\.arrow is not a valid arrow file, or damaged"):
        ShardDataset(path, index_folder=tmp_path)
