"""A file of records that is replaced or written again is an error; records that are appended are none."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import make_pool

from sharded_loader import RecordFileDataset, ShardedDataLoader
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, RecordIOError
from sharded_loader.recordio.files import framed

FIRST = [b"%03d" % i * 4 for i in range(100)]
OTHER = [b"%03d" % (i + 500) * 4 for i in range(100)]
LONG_AGO = (10**9, 10**9)


def write(path: Path, records: list[bytes]) -> None:
    with MXRecordIO(path, "w") as file:
        for record in records:
            file.write(record)
    os.utime(path, LONG_AGO)


def at_another_time(path: Path, records: list[bytes]) -> None:
    write(path, records)
    os.utime(path)


def longer(path: Path, records: list[bytes]) -> None:
    write(path, records * 2)
    os.utime(path)


def replaced(path: Path, records: list[bytes]) -> None:
    write(path.with_suffix(".new"), records)
    os.replace(path.with_suffix(".new"), path)


IN_PLACE = {"in place": at_another_time, "in place with its old time": write, "with more records": longer}


@pytest.mark.parametrize("change", IN_PLACE.values(), ids=IN_PLACE)
def test_a_file_that_was_written_again_is_an_error(tmp_path: Path, change: Callable[[Path, list[bytes]], None]) -> None:
    path = tmp_path / "a.rec"
    write(path, FIRST)
    keyed = MXIndexedRecordIO(tmp_path / "a.idx", path, "r")
    with RecordFileDataset(path) as dataset, keyed:
        assert dataset[7] == keyed.read_idx(7) == FIRST[7]
        change(path, OTHER)
        reads = [lambda: dataset[7], lambda: dataset.get_batch([3, 1, 70]), lambda: dataset.get_batch(range(100))]
        for read in [*reads, lambda: keyed.read_idx(7)]:
            with pytest.raises(RecordIOError, match=r"a\.rec, offset 0: the file was replaced or written again"):
                read()
    with RecordFileDataset(path) as dataset:
        assert dataset[7] == OTHER[7]


def test_appended_records_and_a_new_mode_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path, FIRST)
    with RecordFileDataset(path) as dataset:
        for _ in range(3):
            with open(path, "ab") as file:
                file.write(framed(b"one more"))
            path.chmod(0o600)
            os.link(path, path.with_suffix(".link"))
            assert list(dataset) == list(dataset.get_batch(range(100))) == FIRST
            path.with_suffix(".link").unlink()
    with RecordFileDataset(path) as dataset:
        assert len(dataset) == 103


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be replaced")
def test_a_file_that_was_replaced_is_read_to_its_end_where_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    write(path, FIRST)
    with RecordFileDataset(path) as dataset:
        replaced(path, OTHER)
        assert list(dataset) == FIRST
        path.unlink()
        assert list(dataset) == FIRST


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be replaced")
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_workers_do_not_read_another_version_than_the_main_process(tmp_path: Path, method: str) -> None:
    path = tmp_path / "a.rec"
    write(path, FIRST)
    dataset = RecordFileDataset(path)
    replaced(path, OTHER)
    with ShardedDataLoader(dataset, 10, pool=make_pool(method), batchify_fn=list) as loader:
        with pytest.raises(RecordIOError, match=r"a\.rec, offset 0: the file was replaced or written again"):
            list(loader)
    dataset.close()
