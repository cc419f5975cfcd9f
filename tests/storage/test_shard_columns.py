"""Batches of Parquet and Arrow shards are read in columns, and are what the default rules make of the samples."""

from __future__ import annotations

import datetime
import decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, make_pool
from served import serving
from shards import closed  # noqa: F401
from test_shard_tables import KINDS, write_table

from sharded_loader import ShardDataset, ShardedDataLoader, ShardShuffleSampler
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk
from sharded_loader.storage import tables
from sharded_loader.storage.files import ShardError
from sharded_loader.torch import DataLoader

pyarrow = pytest.importorskip("pyarrow")

ROWS, GROUP = 10, 4


DAY = datetime.datetime(2024, 1, 1)
NUMBERS = list(range(ROWS))
COLUMNS = {
    "int8": pyarrow.array(NUMBERS, "int8"),
    "uint64": pyarrow.array(NUMBERS, "uint64"),
    "float16": pyarrow.array(np.arange(ROWS, dtype=np.float16)),
    "float32": pyarrow.array(NUMBERS, "float32"),
    "bool": pyarrow.array([i % 2 == 0 for i in NUMBERS]),
    "some nulls": pyarrow.array([None if i % 3 else i for i in NUMBERS]),
    "nulls in one group": pyarrow.array([None if i == 9 else i for i in NUMBERS]),
    "all null": pyarrow.nulls(ROWS),
    "strings": [f"row {i}" for i in NUMBERS],
    "strings and nulls": [None if i % 3 else str(i) for i in NUMBERS],
    "bytes": [bytes([i]) * i for i in NUMBERS],
    "lists of one length": [[i, i + 1] for i in NUMBERS],
    "lists of lengths": [list(range(i)) for i in NUMBERS],
    "lists of strings": [["a", str(i)] for i in NUMBERS],
    "fixed lists": pyarrow.array([[i, i + 1] for i in NUMBERS], pyarrow.list_(pyarrow.float32(), 2)),
    "structs": [{"a": i, "b": {"c": [str(i)]}} for i in NUMBERS],
    "dictionary": pyarrow.array([f"kind {i % 2}" for i in NUMBERS]).dictionary_encode(),
    "dictionary of numbers": pyarrow.array([i % 2 for i in NUMBERS]).dictionary_encode(),
    "timestamps": [DAY + datetime.timedelta(days=i) for i in NUMBERS],
    "decimals": [decimal.Decimal(i) / 4 for i in NUMBERS],
}


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
@pytest.mark.parametrize("kind", COLUMNS)
def test_a_batch_of_columns_is_the_default_batch_of_its_samples(tmp_path: Path, format: str, kind: str) -> None:
    if format == "parquet" and kind == "float16" and int(pyarrow.__version__.split(".")[0]) < 15:
        pytest.skip("this pyarrow writes no float16")
    table = pyarrow.table({"x": COLUMNS[kind], "y": np.arange(ROWS)})
    for shard in range(2):
        write_table(table, tmp_path / f"{shard}.{KINDS[format].name}", format, GROUP)
    dataset = ShardDataset(str(tmp_path / f"*.{KINDS[format].name}"), index_folder=tmp_path)
    read = as_bulk(dataset)
    assert read is not None
    for indices in ([3], [19, 0, 7, 8, 9, 0, -1], list(range(20))):
        found = outcome(partial(read, indices, np.empty))
        expected = outcome(partial(default_batchify_fn.assemble, [dataset[i] for i in indices], np.empty))
        # Numbers and None in one column: the samples are read, and their error names them.
        assert found == (made_of(NOT_IN_BULK) if found == made_of(NOT_IN_BULK) else expected)
        assert found == expected or kind == "nulls in one group"
    order = list(range(19, -1, -1))
    with ShardedDataLoader(dataset, 4, sampler=order) as loader:
        batches = outcome(lambda: list(loader))
    expected = outcome(lambda: [default_batchify_fn([dataset[i] for i in order[j : j + 4]]) for j in range(0, 20, 4)])
    assert batches[0] == expected[0] and (batches == expected or issubclass(batches[0], Exception))


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
    "structs": ("struct({'a': int8()})", [{"a": i} for i in range(8)]),
}
"""Columns of eight rows by name: their types in pyarrow, and their values."""


def written(path: Path, format: str, null: Any = None, columns: Any = None) -> ShardDataset:
    """A shard of these columns in two groups. In the row 5 stands ``null(name of the column)``, if it is given."""
    names, table = {**vars(pyarrow)}, {}
    for name, (kind, values) in TYPED.items():
        rows = [null(name) if null and i == 5 else value for i, value in enumerate(values)]
        table[name] = pyarrow.array(rows, eval(kind, names))
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


def test_a_subclass_that_reads_in_its_own_way_is_read_by_it(tmp_path: Path) -> None:
    class Negative(ShardDataset):
        def __getitem__(self, index: Any) -> Any:
            return -super().__getitem__(index)["x"]

    table_of(tmp_path / "a.parquet", {"x": np.arange(10)})
    dataset = Negative(tmp_path / "a.parquet", index_folder=tmp_path)
    assert next(iter(ShardedDataLoader(dataset, 5))).tolist() == [0, -1, -2, -3, -4]


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
def test_only_chosen_columns_are_read(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{KINDS[format].name}"
    rng = np.random.default_rng(1)
    table = pyarrow.table({"x": np.arange(2000), "big": [rng.bytes(500) for _ in range(2000)], "y": rng.random(2000)})
    write_table(table, path, format, 1000)
    with serving() as served:
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
        assert read < 50_000 or format != "parquet"  # of 1 MB; the record batches of Arrow files are read whole


@pytest.mark.parametrize("format", KINDS)
def test_a_column_that_is_unknown_or_there_twice_is_named(tmp_path: Path, format: str) -> None:
    path = tmp_path / f"a.{KINDS[format].name}"
    table_of(path, {"x": [1, 2], "s": [{"a": 1}, {"a": 2}]}, format=format)
    for name in ("z", "s.a", ""):
        dataset = ShardDataset(path, index_folder=tmp_path, columns=["x", name])
        for _ in range(2):
            with pytest.raises(ShardError, match=rf"has no column '{name}': give columns= names of its columns, s, x"):
                dataset[0]
    write_table(pyarrow.table([[1], [2], [3]], names=["x", "x", "y"]), path, format, 4)
    for columns in (None, ["x"]):
        with pytest.raises(ShardError, match="has several columns 'x': give columns= names of its columns, y"):
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
        with pytest.raises(Exception, match=r"1\.\w+ has no column 'label': .* names of its columns, lable, x"):
            next(batches)


@pytest.mark.parametrize("columns", ["x", [], [1], 3])
def test_columns_that_are_no_names_are_rejected(tmp_path: Path, columns: Any) -> None:
    with pytest.raises(TypeError, match="give a list of the names of columns"):
        table_of(tmp_path / "a.parquet", {"x": [1, 2]}, columns=columns)
