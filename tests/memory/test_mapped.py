"""A memmap on its way to spawned workers: by name where the worker finds the same file, else by value."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import SPAWNED, covering

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.memory import publish as mapped_module
from sharded_loader.memory.codec import decode
from sharded_loader.memory.publish import publish

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
OFFSET = 5000
"""No multiple of the page size."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(OFFSET) + np.arange(300_000, dtype=np.int32).tobytes())
    return path


def mapped(file: Path, mode: Any = "r") -> np.memmap[Any, Any]:
    return np.memmap(file, np.int32, mode, OFFSET, (3000, 100))


def bytes_of(obj: Any) -> int:
    encoded = publish(obj)
    return len(encoded.head) + sum(buffer.nbytes for buffer in encoded.buffers)


def reopened(obj: Any) -> Any:
    encoded = publish(obj)
    return decode(encoded.head, [np.frombuffer(bytearray(raw), np.uint8) for raw in encoded.buffers])


VIEWS: dict[str, Any] = {
    "whole": lambda m: m,
    "slice": lambda m: m[100:200],
    "row": lambda m: m[17],
    "backwards": lambda m: m[::-2, 50:3:-1],
    "transposed": lambda m: m.T,
    "array": lambda m: np.asarray(m),
    "slice of an array": lambda m: np.asarray(m)[5:, ::3],
    "other dtype": lambda m: m.view(np.uint8)[:, 1::4],
    "repeated": lambda m: np.broadcast_to(m[3], (7, 100)),
    "element": lambda m: m[2999:, 99:],
    "windows": lambda m: np.lib.stride_tricks.sliding_window_view(m, 20, axis=0),
    "part of windows": lambda m: np.lib.stride_tricks.sliding_window_view(m.reshape(-1), 50)[1000::7],
    "strided": lambda m: np.lib.stride_tricks.as_strided(m, (20, 20), (800, 4)),
    "strided memmap": lambda m: np.lib.stride_tricks.as_strided(m, (20, 20), (800, 4), subok=True),
    "memoryview": lambda m: np.asarray(memoryview(m)),
    "buffer": lambda m: np.frombuffer(m, np.uint16),
}


@covering(mode=["r", "r+", "c"], view=VIEWS)
def test_views_arrive_the_same_and_go_by_name(file: Path, mode: str, view: str) -> None:
    array = VIEWS[view](mapped(file, mode))
    got = reopened(array)
    assert (type(got), got.dtype, got.shape) == (type(array), array.dtype, array.shape)
    assert (got == array).all()
    assert bytes_of(array) < 2000
    assert (got.strides, got.flags.writeable) == (array.strides, array.flags.writeable)


def test_what_only_comes_from_a_memmap_goes_by_value(file: Path) -> None:
    whole = mapped(file)
    for array in (whole + 1, whole.copy(), np.sort(whole), whole[[1, 2, 3]], whole.sum(), whole[:0]):
        got = reopened(array)
        assert type(got) is type(array) and np.array_equal(got, array) and got.dtype == array.dtype


def test_views_of_one_mapping_stay_views_of_one_mapping(file: Path) -> None:
    whole = mapped(file, "r+")
    one, other, third = reopened([whole[:10], np.asarray(whole)[5:], mapped(file, "r+")])
    one[7, 0] = -1
    assert other[2, 0] == -1 and third[7, 0] == -1  # the last one through the file
    assert np.shares_memory(one, other) and not np.shares_memory(one, third)


def test_many_slices_are_described_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, described = mapped(file), []
    real = mapped_module.Mapping
    monkeypatch.setattr(mapped_module, "Mapping", lambda *args: (described.append(1), real(*args))[1])
    rows = list(whole)
    assert bytes_of(rows) < 200 * len(rows)
    assert len(described) == 1


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_what_is_written_to_a_writable_file_is_written_to_that_file(file: Path, mode: str) -> None:
    whole = mapped(file, mode)
    whole[5] = 3
    got = reopened(whole)
    assert (got[5] == 3).all()
    got[7] = 4
    got.flush()
    assert (whole[7] == 4).all()
    assert (np.fromfile(file, np.int32, offset=OFFSET).reshape(3000, 100)[7] == 4).all()


def test_copy_on_write_keeps_what_the_trainer_has_written(file: Path) -> None:
    whole = mapped(file, "c")
    whole[5] = 3
    got = reopened(whole)
    assert (got == whole).all() and (got[5] == 3).all()
    assert bytes_of(whole) > whole.nbytes and bytes_of(whole[6:]) < 2000  # what it has not written goes by name
    got[7] = 4
    assert (whole[7] != 4).all()


@linux
@pytest.mark.parametrize("what", ["deleted", "replaced", "shortened"])
def test_a_file_that_is_no_longer_there_goes_by_value(file: Path, what: str) -> None:
    whole = mapped(file)[:500]
    expected = np.array(whole)
    if what == "deleted":
        file.unlink()
    elif what == "replaced":
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
    else:
        os.truncate(file, OFFSET + expected.nbytes)
    got = reopened(whole)
    assert type(got) is np.memmap and (got == expected).all()
    # Out of band, so that workers share it.
    assert sum(buffer.nbytes for buffer in publish(whole).buffers) == expected.nbytes


def test_a_file_without_a_name_goes_by_value(tmp_path: Path) -> None:
    import tempfile

    with tempfile.TemporaryFile(dir=tmp_path) as file:
        whole = np.memmap(file, np.int32, "w+", shape=(3000,))
        whole[:] = range(3000)
        assert (reopened(whole) == whole).all()


@pytest.mark.slow
@linux
@SPAWNED
def test_a_large_memmap_costs_workers_nothing(tmp_path: Path, method: str) -> None:
    nbytes = 100 << 20
    whole: Any = np.memmap(tmp_path / "large.bin", np.int64, "w+", shape=(nbytes // 8192, 1024))
    whole[:, 0] = np.arange(len(whole))
    data = SimpleDataset(whole[100:])
    assert bytes_of(data) < 2000
    pool = ProcessPool(2, start_method=method)
    with ShardedDataLoader(data, 1000, pool=pool) as loader:
        for number, rows in enumerate(loader):
            assert rows[:, 0].tolist() == [*range(100 + 1000 * number, 100 + 1000 * number + len(rows))]
            assert not rows[:, 1:].any()
        for pid in pool.pids:
            assert psutil.Process(pid).memory_full_info().uss < nbytes // 2  # none has a copy of its own
