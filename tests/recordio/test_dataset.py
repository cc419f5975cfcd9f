"""`RecordFileDataset`: batches in few reads; damage is named; a file that was written again is an error."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import METHODS, covering, make_pool
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import RecordFileDataset, ShardedDataLoader
from sharded_loader.engine.pool import Pool
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, RecordIOError, positioned
from sharded_loader.recordio import files as recordfile
from sharded_loader.recordio.files import LARGE_MEAN, framed
from sharded_loader.recordio.positioned import checksums, stable_stat, tag_of
from tests import reference_recordio as reference
from tests.damaged_records import reads_within

rng = random.Random(3)
KINDS = {
    "small": [rng.randbytes(rng.randrange(40)) for _ in range(50)],
    "cut at magics": [reference.random_record(rng) for _ in range(50)],
    "one large": [b"a", rng.randbytes(9 * LARGE_MEAN), b"b", b"", *[b"c" * 99] * 40],
    "all large": [rng.randbytes(LARGE_MEAN + number) for number in range(1, 9)],
    "none": [],
}


def write(path: Path, records: list[bytes], index: bool = True) -> list[int]:
    """The file; returns the offset of each record, and of the end."""
    content, offsets = reference.write(records)
    path.write_bytes(content)
    if index:
        lines = [f"{key}\t{offset}\n" for key, offset in enumerate(offsets[:-1])]
        path.with_suffix(".idx").write_text("".join(lines))
    return offsets


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all positioned reads."""
    if not hasattr(os, "pread"):
        pytest.skip("needs os.pread")
    really, sizes = os.pread, []

    def pread(fd: int, size: int, offset: int) -> bytes:
        sizes.append(size)
        return really(fd, size, offset)

    monkeypatch.setattr(os, "pread", pread)
    return sizes


@pytest.mark.costly(2)
@covering(2, kind=KINDS, index=[True, False], way=["pread", "lock and seek"])
def test_a_batch_is_what_one_by_one_gives(tmp_path: Path, kind: str, index: bool, way: str, monkeypatch: Any) -> None:
    if way == "lock and seek":  # as on Windows, which has no positioned reads
        monkeypatch.delattr(os, "pread", raising=False)
    records = KINDS[kind]
    write(tmp_path / "a.rec", records, index)
    everything = range(len(records))
    with RecordFileDataset(tmp_path / "a.rec") as dataset, reads_within(os.path.getsize(tmp_path / "a.rec")):
        for _ in range(2):  # the second time sizes are known
            orders: list[Any] = [[], everything, everything[::-1], everything[::3], everything[5:20]]
            if records:
                orders += [rng.choices(everything, k=60), [0, 0, 0], [-1, 0, -1], np.array([1, 0], np.int32)]
            for order in orders:
                wanted = [records[number] for number in order]
                assert dataset.get_batch(order) == wanted
                assert dataset.__getitems__(order) == wanted
                assert list(map(dataset.__getitem__, order)) == wanted


def test_an_index_that_lists_a_few_records_costs_little_more(tmp_path: Path, reads: list[int]) -> None:
    records = [bytes([number]) * 1000 for number in range(200)]
    offsets = write(tmp_path / "a.rec", records)
    (tmp_path / "a.idx").write_text("".join(f"{number}\t{offsets[number]}\n" for number in (150, 20, 70)))
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        reads.clear()
        assert dataset.get_batch([0, 1, 2]) == [records[150], records[20], records[70]]
        assert sum(reads) == 3 * 1008  # not all that lies between


def test_offsets_that_are_no_multiples_of_4_are_read_where_a_record_begins_there(tmp_path: Path) -> None:
    content, _ = reference.write([b"abc"])
    (tmp_path / "a.rec").write_bytes(b"x" + content + b"yz" + content)
    (tmp_path / "a.idx").write_text("0\t1\n1\t15\n2\t4\n")
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert dataset.get_batch([1, 0]) == [b"abc", b"abc"]
        with pytest.raises(RecordIOError, match=r"a\.rec, offset 4: "):
            dataset.get_batch([0, 2])
    write(tmp_path / "b.rec", [b"abcd", b"abcd", b"abcd"])
    (tmp_path / "b.idx").write_text("0\t0\n1\t14\n")  # a header begins two bytes before
    with RecordFileDataset(tmp_path / "b.rec") as dataset:
        with pytest.raises(RecordIOError, match=r"b\.rec, offset 14: "):
            dataset.get_batch([0, 1])


def test_records_in_a_row_are_one_read_by_a_loader_too(tmp_path: Path, reads: list[int]) -> None:
    records = [b"%d" % number * 9 for number in range(500)]
    offsets = write(tmp_path / "a.rec", records)
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        near = list(range(0, 500, 3))
        for order, count in (
            (list(range(100, 356)), 1),
            (near[::-1], 1),  # gaps of two small records
            ([0, 499, 1, 250], 3),
        ):
            reads.clear()
            assert dataset.get_batch(order) == [records[number] for number in order]
            assert len(reads) == count and (order[0] != 100 or reads == [offsets[356] - offsets[100]])
        for wrapped in (dataset, dataset.take(100), dataset + dataset):
            reads.clear()
            with ShardedDataLoader(wrapped, 50) as loader:
                assert next(iter(loader)) == records[:50]
            assert reads == [offsets[50]]


def test_the_first_damaged_record_of_a_batch_is_named_and_the_others_are_readable(tmp_path: Path) -> None:
    records = [b"%d" % number * 30 for number in range(100)]
    offsets = write(tmp_path / "a.rec", records)
    content = bytearray((tmp_path / "a.rec").read_bytes())
    for bad in (40, 60):
        content[offsets[bad] + 7] ^= 0xFF  # its flag
    (tmp_path / "a.rec").write_bytes(content)
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        for order, first in (([3, 60, 40], 60), (range(100), 40)):
            with pytest.raises(RecordIOError) as caught:
                dataset.get_batch(order)
            assert (caught.value.path, caught.value.offset) == (str(tmp_path / "a.rec"), offsets[first])
        good = [number for number in range(100) if number not in (40, 60)]
        assert dataset.get_batch(good) == [records[number] for number in good]


@pytest.mark.parametrize("last", [30, 48], ids=["in the middle", "in the last record"])
def test_a_file_that_shrinks_meanwhile_gives_no_wrong_bytes(tmp_path: Path, monkeypatch: Any, last: int) -> None:
    records = [bytes([number]) * 100 for number in range(1, 50)]
    offsets = write(tmp_path / "a.rec", records)
    really = recordfile.RecordFile.read_ranges

    def shrinking(file: Any, begins: list[int], sizes: list[int]) -> list[bytes]:
        os.truncate(tmp_path / "a.rec", offsets[last] + 50)  # after its size was looked at
        return really(file, begins, sizes)

    for order in (range(49), [7, 3, last, 29]):
        write(tmp_path / "a.rec", records)
        with RecordFileDataset(tmp_path / "a.rec") as dataset:
            with monkeypatch.context() as patched:
                patched.setattr(recordfile.RecordFile, "read_ranges", shrinking)
                with pytest.raises(RecordIOError, match=rf"a\.rec, offset {offsets[last]}: "):
                    dataset.get_batch(order)
            assert dataset.get_batch(range(last)) == records[:last]


def test_offsets_near_the_largest_number_are_an_error_like_any_other(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"a"])
    (tmp_path / "a.idx").write_text(f"0\t0\n1\t{2**63 - 1}\n2\t{2**63 - 9}\n")
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        for index in (1, 2):
            for read in (lambda index=index: dataset[index], lambda index=index: dataset.get_batch([0, index])):
                with pytest.raises(RecordIOError, match="the file ends at 12, before it"):
                    read()


def test_a_subclass_with_samples_of_its_own_is_read_by_them(tmp_path: Path) -> None:
    class Lengths(RecordFileDataset):
        """What Gluon's ImageRecordDataset is: a subclass that makes something of a record."""

        def __getitem__(self, index: int) -> int:
            return len(super().__getitem__(index))

    write(tmp_path / "a.rec", [b"x" * number for number in range(12)])
    with Lengths(tmp_path / "a.rec") as dataset, RecordFileDataset(tmp_path / "a.rec") as plain:
        assert hasattr(plain, "get_batch") and not hasattr(dataset, "get_batch")
        assert dataset.__getitems__([3, 5]) == [3, 5]
        with ShardedDataLoader(dataset, 4) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


@pytest.mark.slow
def test_a_worker_reads_batches_of_a_large_index(tmp_path: Path, process_pool: Pool) -> None:
    records = [b"%d" % number for number in range(20_000)]  # offsets and sizes lie in shared memory
    offsets = write(tmp_path / "a.rec", records)
    (tmp_path / "a.idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets[:-1:2])))
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        with ShardedDataLoader(dataset, 1000, pool=process_pool) as loader:
            assert [record for batch in loader for record in batch] == records[::2]


@pytest.mark.costly(2)
def test_a_damaged_record_is_named_by_a_loader_or_left_out(tmp_path: Path, new_pool: Callable[..., Pool]) -> None:
    records = [b"%d" % number * 20 for number in range(20)]
    offsets = write(tmp_path / "a.rec", records)
    content = bytearray((tmp_path / "a.rec").read_bytes())
    content[offsets[7]] ^= 1
    (tmp_path / "a.rec").write_bytes(content)
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        with ShardedDataLoader(dataset, 5, pool=new_pool()) as loader:
            batches = iter(loader)
            assert next(batches) == records[:5]
            with pytest.raises(RecordIOError, match=rf"a\.rec, offset {offsets[7]}: ") as caught:
                next(batches)
            assert "sample 7" in str(caught.value) + "".join(getattr(caught.value, "__notes__", ()))
            assert list(batches) == [records[10:15], records[15:]]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with ShardedDataLoader(dataset, 5, pool=new_pool(), on_error="skip") as loader:
                assert list(loader) == [records[:5], records[5:7] + records[8:10], records[10:15], records[15:]]


FIRST = [b"%03d" % i * 4 for i in range(100)]
OTHER = [b"%03d" % (i + 500) * 4 for i in range(100)]
LONG_AGO = (10**9, 10**9)


def rewrite(path: Path, records: list[bytes]) -> None:
    with MXRecordIO(path, "w") as file:
        for record in records:
            file.write(record)
    os.utime(path, LONG_AGO)


IN_PLACE = {"later": (1, True), "at its old time": (1, False), "with more records": (2, True)}


@pytest.mark.parametrize("change", IN_PLACE)
def test_a_file_that_was_written_again_is_an_error(tmp_path: Path, change: str) -> None:
    path, (times, touched) = tmp_path / "a.rec", IN_PLACE[change]
    rewrite(path, FIRST)
    keyed = MXIndexedRecordIO(tmp_path / "a.idx", path, "r")
    with RecordFileDataset(path) as dataset, keyed:
        assert dataset[7] == keyed.read_idx(7) == FIRST[7]
        rewrite(path, OTHER * times)
        os.utime(path, None if touched else LONG_AGO)
        reads = [lambda: dataset[7], lambda: dataset.get_batch([3, 1, 70]), lambda: dataset.get_batch(range(100))]
        for read in [*reads, lambda: keyed.read_idx(7)]:
            with pytest.raises(RecordIOError, match=r"a\.rec, offset 0: the file was replaced or written again"):
                read()
    with RecordFileDataset(path) as dataset:
        assert dataset[7] == OTHER[7]


def test_appended_records_and_a_new_mode_are_no_change(tmp_path: Path) -> None:
    path = tmp_path / "a.rec"
    rewrite(path, FIRST)
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
@METHODS
def test_a_replaced_file_is_read_to_its_end_where_it_is_open_and_never_by_workers(tmp_path: Path, method: str) -> None:
    path = tmp_path / "a.rec"
    rewrite(path, FIRST)
    with RecordFileDataset(path) as dataset:
        rewrite(tmp_path / "new", OTHER)
        os.replace(tmp_path / "new", path)
        assert list(dataset) == FIRST
        with ShardedDataLoader(dataset, 10, pool=make_pool(method), batchify_fn=list) as loader:
            with pytest.raises(RecordIOError, match=r"a\.rec, offset 0: the file was replaced or written again"):
                list(loader)
        path.unlink()
        assert list(dataset) == FIRST


def test_a_change_in_the_tick_of_the_clock_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    for round in range(10):
        path.write_bytes(b"%d" % round)
        found = tag_of(stable_stat(str(path)))
        path.write_bytes(b"x")
        assert tag_of(stable_stat(str(path))) != found


def test_a_clock_of_whole_seconds_is_waited_for_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    second, slept = 1_700_000_000 * 10**9, list[float]()
    now = lambda: second + 5 * 10**8 + int(sum(slept) * 1e9)  # noqa: E731
    for clock, waits in ((now, [1.5]), (lambda: second, None)):  # the second one stands still: it is always written
        slept.clear()
        written = SimpleNamespace(st_mtime_ns=second, st_ctime_ns=second)
        monkeypatch.setattr(positioned, "os", SimpleNamespace(stat=lambda path, written=written: written))
        monkeypatch.setattr(positioned, "time", SimpleNamespace(time_ns=clock, sleep=slept.append))
        assert positioned.stable_stat("a.tar").st_mtime_ns == second
        assert waits is None or slept == waits


@given(content=st.binary(min_size=1, max_size=40_000), data=st.data())
def test_what_is_left_of_a_file_has_the_checksums_that_it_had(content: bytes, data: st.DataObject) -> None:
    def read(begin: int, size: int) -> bytes:
        return content[begin : begin + size]

    whole = checksums(read, len(content))
    end = data.draw(st.integers(0, len(content)))
    left = checksums(read, len(content), end)
    assert left == whole[: len(left)] and len(whole) == 8
    other = bytes(byte ^ 255 for byte in content)
    assert checksums(lambda begin, size: other[begin : begin + size], len(content)) != whole
