"""Parquet and Arrow shards: any row, out of groups that are decoded once. Where the messages of an Arrow file lie."""

from __future__ import annotations

import decimal
import io
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, make_pool
from mutations import Subject, assert_noticed
from shards import Served, closed, read_rows, serves  # noqa: F401

from sharded_loader import ArrayDataset, ShardDataset, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk
from sharded_loader.storage import tables
from sharded_loader.storage.files import LocalFile, ShardError
from sharded_loader.storage.tables import Arrow, Parquet, _column
from sharded_loader.torch import DataLoader

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


@pytest.mark.parametrize("kind", KINDS)
def test_any_row_is_read(tmp_path: Path, kind: str) -> None:
    rows = [9, 0, 3, 4, 8, 0]
    write(tmp_path / f"a.{kind}", kind)
    found = read_rows(KINDS[kind](), tmp_path / f"a.{kind}", rows)
    assert [one["x"] for one in found] == rows and {type(one["x"]) for one in found} <= {np.float32}
    assert [one["name"] for one in found] == [f"row {i}" for i in rows]
    assert [one["image"] for one in found] == [bytes([i]) * i for i in rows]
    assert [one["maybe"] for one in found] == [None if i % 3 else i for i in rows]
    assert [list(one["tokens"]) for one in found] == [list(range(i)) for i in rows]
    assert [one["kind"] for one in found] == [f"kind {i % 2}" for i in rows]


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


class Emptied(dict[str, Any]):
    """What a file keeps, if another thread closes it all the time."""

    def __setitem__(self, name: str, value: object) -> None:
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_thread_reads_on_while_another_closes_the_shard(tmp_path: Path, kind: str) -> None:
    write(tmp_path / f"a.{kind}", kind)
    format, file = KINDS[kind](), LocalFile(str(tmp_path / f"a.{kind}"))
    index = format.index(file)
    file.kept = Emptied()
    assert [row["x"] for row in format.read(file, index, [0, 9])] == [0, 9]


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
def test_a_shard_that_goes_or_changes_is_no_damage(served: Served, tmp_path: Path, kind: str, trouble: str) -> None:
    path = tmp_path / f"a.{'arrow' if kind == 'stream' else kind}"
    write(path, kind)
    served.files["/" + path.name] = path.read_bytes()
    dataset = ShardDataset(f"{served.url}/{path.name}", index_folder=tmp_path)
    assert len(dataset) == 10
    vars(served).update(TROUBLE[trouble])
    with pytest.raises(ShardError, match=rf"{path.name}.* {trouble}") as caught:
        dataset[5]
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
    content, payload = path.read_bytes(), list[tuple[int, int]]()
    if kind == "parquet":
        payload = [] if has_checksums else [(4, len(content) - 8 - int.from_bytes(content[-8:-4], "little"))]
    else:  # the values of the messages of an Arrow file
        source = io.BytesIO(content)
        begin = source.seek(8 if content.startswith(b"ARROW1") else 0)
        for _ in pyarrow.ipc.MessageReader.open_stream(source):
            payload.append((begin + 8 + int.from_bytes(content[begin + 4 : begin + 8], "little"), source.tell()))
            begin = source.tell()
    return Subject(path.name, content, payload, other_reader)


@pytest.mark.parametrize(
    ("kind", "has_checksums"), [("parquet", False), ("parquet", True), ("arrow", False), ("stream", False)]
)
@pytest.mark.parametrize("seeds", [range(150), pytest.param(range(1000, 2500), marks=pytest.mark.slow)])
def test_damage_is_noticed(tmp_path: Path, kind: str, has_checksums: bool, seeds: range) -> None:
    """Values have no checksum, except in Parquet files written so. What pyarrow does not notice passes too."""
    assert_noticed(subject(tmp_path, kind, has_checksums), seeds, tmp_path)


NO_TABLE: dict[str, list[bytes]] = {
    "arrow": [b"", b"ARROW1\0\0", b"nonsense" * 20, b"\xff" * 4 + b"\0" * 4, b"ARROW1" * 20],
    "parquet": [b"", b"nonsense" * 100],
}


@pytest.mark.parametrize("kind", NO_TABLE)
def test_what_is_no_table_is_an_error(tmp_path: Path, kind: str) -> None:
    path, said = tmp_path / f"a.{kind}", rf"a\.{kind} is not a valid {kind} file, or damaged"
    for content in NO_TABLE[kind]:
        path.write_bytes(content)
        with pytest.raises(ShardError, match=said + r" within bytes 0 to \d+" * (kind == "arrow")):
            ShardDataset(path, index_folder=tmp_path)
    if kind == "arrow":
        write(path, "stream")
        for cut in (8, 300):  # its end
            os.truncate(path, path.stat().st_size - cut)
            with pytest.raises(ShardError, match=said):
                ShardDataset(path, index_folder=tmp_path)


pyarrow = pytest.importorskip("pyarrow")


LISTS: list[list[int]] = [[], *([i, i] for i in range(1, 8))]

TYPED: dict[str, tuple[str, list[Any]]] = {
    **{name: (f"{name}()", list(range(8))) for name in ("int8", "int32", "int64", "uint8", "uint64", "float32")},
    "float16": ("float16()", list(np.arange(8, dtype=np.float16))),
    "bool": ("bool_()", [True, False] * 4),
    "strings": ("string()", list("abcdefgh")),
    "times": ("timestamp('us')", list(range(8))),
    "days": ("date32()", list(range(8))),
    "dictionary": ("dictionary(int8(), float32())", [1.5, 2.5] * 4),
    "lists": ("list_(float32())", LISTS),
    "large lists": ("large_list(int16())", LISTS),
    "lists of bool": ("list_(bool_())", [[one > 3 for one in row] for row in LISTS]),
    "lists of strings": ("list_(string())", [list(map(str, row)) for row in LISTS]),
    "lists of lists": ("list_(list_(int8()))", [[row] for row in LISTS]),
    "fixed lists": ("list_(float32(), 2)", [[i, -i] for i in range(8)]),
    "bytes": ("binary()", [bytes([i]) * i for i in range(8)]),
    "decimals": ("decimal128(9, 2)", [decimal.Decimal(i) / 4 for i in range(8)]),
    "words": ("dictionary(int8(), string())", ["a", "b"] * 4),
    "structs in structs": ("struct({'a': struct({'b': list_(string())})})", [{"a": {"b": [str(i)]}} for i in range(8)]),
    "structs": ("struct({'a': int8()})", [{"a": i} for i in range(8)]),
}
"""Columns of eight rows by name: their types in pyarrow, and their values."""

HOLED: dict[str, tuple[str, list[Any]]] = {
    "some nulls": ("int64()", [None if i % 3 else i for i in range(8)]),
    "nulls in one group": ("int64()", [*range(7), None]),
    "all null": ("null()", [None] * 8),
    "strings and nulls": ("string()", [None if i % 3 else str(i) for i in range(8)]),
}


def column(kind: str, values: list[Any]) -> Any:
    return pyarrow.array(values, eval(kind, {**vars(pyarrow)}))


def made_of(batch: Any) -> Any:
    """What is compared: types, dtypes, shapes and values."""
    if hasattr(batch, "dtype"):
        return type(batch), batch.dtype, tuple(batch.shape), np.asarray(batch).tolist()
    if isinstance(batch, dict):
        return {name: made_of(field) for name, field in batch.items()}
    return (type(batch), [made_of(one) for one in batch]) if isinstance(batch, (list, tuple)) else (type(batch), batch)


def outcome(make: Any) -> Any:
    """What comes out: a batch, or an error."""
    try:
        return made_of(make())
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("kind", [*TYPED, *HOLED])
def test_a_batch_of_columns_is_the_default_batch_of_its_samples(tmp_path: Path, format: str, kind: str) -> None:
    if format == "parquet" and kind == "float16" and int(pyarrow.__version__.split(".")[0]) < 15:
        pytest.skip("this pyarrow writes no float16")
    table = pyarrow.table({"x": column(*(TYPED | HOLED)[kind]), "y": np.arange(8)})
    for shard in range(2):
        write_table(table, tmp_path / f"{shard}.{KINDS[format].name}", format, 4)
    dataset = ShardDataset(str(tmp_path / f"*.{KINDS[format].name}"), index_folder=tmp_path)
    read = as_bulk(dataset)
    assert read is not None
    for indices in ([3], [15, 0, 5, 6, 7, 0, -1], list(range(16))):
        found = outcome(partial(read, indices, np.empty))
        expected = outcome(partial(default_batchify_fn.assemble, [dataset[i] for i in indices], np.empty))
        # Numbers and None in one column: the samples are read, and their error names them.
        assert found == (made_of(NOT_IN_BULK) if found == made_of(NOT_IN_BULK) else expected)
        assert found == expected or kind == "nulls in one group"
    order = list(range(15, -1, -1))
    with ShardedDataLoader(dataset, 4, sampler=order) as loader:
        batches = outcome(lambda: list(loader))
    expected = outcome(lambda: [default_batchify_fn([dataset[i] for i in order[j : j + 4]]) for j in range(0, 16, 4)])
    assert batches[0] == expected[0] and (batches == expected or issubclass(batches[0], Exception))


@pytest.mark.parametrize("format", ["arrow", "stream"])
def test_columns_that_pyarrow_makes_no_arrays_of_are_objects_of_python(tmp_path: Path, format: str) -> None:
    """To ask pyarrow 26 for an array of calendar intervals ends the process."""
    spans: list[Any] = [pyarrow.MonthDayNano([i, 0, 1]) for i in range(8)]
    runs = pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([3, 8], pyarrow.int32()), pyarrow.array(["a", "b"]))
    columns = {"span": spans, "spans": [[span] * 2 for span in spans], "holed": [None, *spans[1:]], "run": runs}
    columns["pair"] = pyarrow.array(columns["spans"], pyarrow.list_(pyarrow.month_day_nano_interval(), 2))
    table = pyarrow.table(columns)
    write_table(table, tmp_path / "a.arrow", format, 4)
    dataset = ShardDataset(tmp_path / "a.arrow", index_folder=tmp_path)
    assert list(dataset) == table.to_pylist()
    assert list(ArrayDataset(table)) == table.to_pylist()


def written(path: Path, format: str, null: Any = None, columns: Any = None) -> ShardDataset:
    """A shard of these columns in two groups. In the row 5 stands ``null(name of the column)``, if it is given."""
    table = {}
    for name, (kind, values) in TYPED.items():
        table[name] = column(kind, [null(name) if null and i == 5 else value for i, value in enumerate(values)])
    file = path.with_suffix(f".{KINDS[format].name}")
    write_table(pyarrow.table(table), file, format, 4)
    return ShardDataset(file, index_folder=path.parent, columns=columns)


NULLS: dict[str, Any] = {"null": lambda name: None, "within": lambda name: [None, None] if "lists" in name else None}
"""A null in each column, and lists with nulls inside."""


@pytest.mark.parametrize("format", KINDS)
@pytest.mark.parametrize("null", NULLS)
def test_a_null_changes_no_other_row(tmp_path: Path, format: str, null: str) -> None:
    whole, holed = written(tmp_path / "whole", format), written(tmp_path / "holed", format, NULLS[null])
    for row in (0, 1, 2, 3, 4, 6, 7):
        assert made_of(holed[row]) == made_of(whole[row])
    row = {
        name: None if isinstance(value, np.generic) and np.isnat(value) else value for name, value in holed[5].items()
    }
    assert row == {name: NULLS[null](name) for name in TYPED} and type(holed[5]["times"]) is np.datetime64
    with pytest.raises(ValueError, match=r"samples of different types: int8 in sample 0 of the batch, NoneType in sam"):
        next(iter(ShardedDataLoader(holed, 2, sampler=[4, 5])))
    for order in ([6, 7, 4], [3, 7, 1], [4, 1], [1, 2, 3], [0]):
        batches = [made_of(next(iter(ShardedDataLoader(one, 4, sampler=order)))) for one in (whole, holed)]
        assert batches[0] == batches[1]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")  # torch says so once in a process
@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize("null", NULLS)
def test_a_null_changes_no_other_batch_in_any_pool(tmp_path: Path, null: str, pool: str) -> None:
    columns = ["int8", "float16", "float32", "bool", "dictionary", "fixed lists", "structs"]
    order, batches = [6, 7, 0, 4, 1, 2], list[Any]()
    for name, hole in (("whole", None), ("holed", NULLS[null])):
        dataset = written(tmp_path / name, "parquet", hole, columns)
        with ShardedDataLoader(dataset, 2, sampler=order, pool=make_pool(pool, 2)) as loader:
            batches.append([made_of(batch) for batch in loader])
        workers = 0 if pool == "inline" else 2
        if pool != "thread":
            method = None if pool == "inline" else pool
            drop_in = DataLoader(dataset, 2, sampler=order, num_workers=workers, multiprocessing_context=method)
            batches.append([made_of(batch) for batch in drop_in])
        dataset.close()
    assert batches[: len(batches) // 2] == batches[len(batches) // 2 :]


@pytest.mark.parametrize("pool", POOLS)
def test_windows_of_groups_are_read_whole_in_every_pool(tmp_path: Path, pool: str) -> None:
    for shard in range(3):
        rows = np.arange(shard * 100, shard * 100 + 100)
        write_table(
            pyarrow.table({"id": rows, "s": list(map(str, rows))}), tmp_path / f"{shard}.parquet", "parquet", 30
        )
    dataset = ShardDataset(str(tmp_path / "*.parquet"), index_folder=tmp_path)
    assert dataset.group_lengths.tolist() == [30, 30, 30, 10] * 3
    order = ShardShuffleSampler(dataset.group_lengths, window=2, seed=3)
    with ShardedDataLoader(dataset, 16, sampler=order, pool=make_pool(pool, 2)) as loader:
        found = [(int(i), s) for batch in loader for i, s in zip(batch["id"], batch["s"], strict=True)]
    assert [i for i, _ in found] == list(order.iter_epoch(0)) and all(s == str(i) for i, s in found)


def table_of(path: Path, columns: Any, /, group: int = 4, format: str = "parquet", **options: Any) -> ShardDataset:
    """A shard with these columns."""
    write_table(pyarrow.table(columns), path, format, group)
    return ShardDataset(path, index_folder=path.parent, **options)


def test_no_samples_are_made_for_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = table_of(tmp_path / "a.parquet", {"x": np.arange(10)})
    doubled = dataset.transform(lambda sample: sample["x"] * 2)
    with ShardedDataLoader(doubled, 5) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
    monkeypatch.setattr(tables.TableFormat, "read", None)
    with ShardedDataLoader(dataset.take(8), 5) as loader:
        assert [batch["x"].tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7]]


def test_a_subclass_that_reads_in_its_own_way_is_read_by_it_and_columns_are_names(tmp_path: Path) -> None:
    class Negative(ShardDataset):
        def __getitem__(self, index: Any) -> Any:
            return -super().__getitem__(index)["x"]

    table_of(tmp_path / "a.parquet", {"x": np.arange(10)})
    dataset = Negative(tmp_path / "a.parquet", index_folder=tmp_path)
    assert next(iter(ShardedDataLoader(dataset, 5))).tolist() == [0, -1, -2, -3, -4]
    for columns in ("x", [], [1], 3):
        with pytest.raises(TypeError, match="give a list of the names of columns"):
            ShardDataset(tmp_path / "a.parquet", index_folder=tmp_path, columns=columns)  # type: ignore[arg-type]


def test_shards_with_other_columns_are_told_as_before(tmp_path: Path) -> None:
    for name, columns in {
        "a": {"x": [1, 2], "y": [3, 4]},
        "b": {"y": [5.0, 6.0], "x": [7, 8]},
        "c": {"x": [9]},
    }.items():
        table_of(tmp_path / f"{name}.parquet", columns)
    dataset = ShardDataset(str(tmp_path / "*.parquet"), index_folder=tmp_path)
    batches = iter(ShardedDataLoader(dataset, 2, sampler=[0, 3, 1, 4]))
    assert {name: field.tolist() for name, field in next(batches).items()} == {"x": [1, 8], "y": [3.0, 6.0]}
    with pytest.raises(ValueError, match="samples of different keys"):
        next(batches)


def test_groups_are_kept_up_to_a_number_of_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = table_of(tmp_path / "a.parquet", {"x": np.arange(1000)}, group=100)
    read = as_bulk(dataset)
    assert read is not None
    for limit, kept in ((1 << 20, 10), (4 * 800, 4), (1, tables.KEPT)):
        monkeypatch.setattr(tables, "KEPT_BYTES", limit)
        assert read(range(999, -1, -1), np.empty)["x"].tolist() == list(range(999, -1, -1))
        assert len(dataset._shards._shared["groups"]._groups) == kept
        dataset.close()


@pytest.mark.parametrize("format", KINDS)
def test_only_chosen_columns_are_read(served: Served, tmp_path: Path, format: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(tables, "FAR", 1 << 16)
    path = tmp_path / f"a.{KINDS[format].name}"
    rng = np.random.default_rng(1)
    table = pyarrow.table({"x": np.arange(2000), "big": [rng.bytes(500) for _ in range(2000)], "y": rng.random(2000)})
    write_table(table, path, format, 1000)
    served.files[f"/{path.name}"] = path.read_bytes()
    dataset = ShardDataset(f"{served.url}/{path.name}", index_folder=tmp_path, columns=["y", "x"])
    served.asked.clear()
    with ShardedDataLoader(dataset, 1000) as loader:
        batches = list(loader)
    assert [list(batch) for batch in batches] == [["y", "x"]] * 2
    assert np.concatenate([batch["x"] for batch in batches]).tolist() == list(range(2000))
    assert dataset[3] == {"y": table["y"][3].as_py(), "x": 3}
    spans = [part.removeprefix("bytes=").split("-") for _, part in served.asked if part]
    read = sum(int(end) - int(begin) + 1 for begin, end in spans)
    assert read < 60_000 or format == "stream"  # of 1 MB; a stream is read whole


@pytest.mark.parametrize("format", KINDS)
def test_a_column_that_is_unknown_or_there_twice_is_named(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{KINDS[format].name}"
    table_of(path, {"x": [1, 2], "s": [{"a": 1}, {"a": 2}]}, format=format)
    for name in ("z", "s.a", ""):
        dataset = ShardDataset(path, index_folder=tmp_path, columns=["x", name])
        for _ in range(2):
            with pytest.raises(ShardError, match=rf"has 0 columns '{name}': give columns= names of its columns, s, x"):
                dataset[0]
    write_table(pyarrow.table([[1], [2], [3]], names=["x", "x", "y"]), path, format, 4)
    for columns in (None, ["x"]):
        with pytest.raises(ShardError, match="has 2 columns 'x': give columns= names of its columns, y"):
            ShardDataset(path, index_folder=tmp_path, columns=columns)[0]
    assert ShardDataset(path, index_folder=tmp_path, columns=["y", "y"])[0] == {"y": 3}


@pytest.mark.parametrize("pool", POOLS)
def test_a_column_that_one_shard_lacks_is_the_same_error_in_every_pool(tmp_path: Path, pool: str) -> None:
    for shard, name in enumerate(["label", "lable"]):
        table_of(tmp_path / f"{shard}.parquet", {"x": [1, 2], name: [3, 4]})
    dataset = ShardDataset(str(tmp_path / "*.parquet"), index_folder=tmp_path, columns=["x", "label"])
    with ShardedDataLoader(dataset, 2, pool=make_pool(pool, 1)) as loader:
        batches = iter(loader)
        assert next(batches)["label"].tolist() == [3, 4]
        with pytest.raises(Exception, match=r"1\.\w+ has 0 columns 'label': .* names of its columns, lable, x"):
            next(batches)
