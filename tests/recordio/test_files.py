"""Promises of sharded_loader.recordio: MXNet's bytes, any thread, any process, and damage that is named."""

from __future__ import annotations

import errno
import gc
import io
import json
import math
import os
import pickle
import random
import re
import struct
import subprocess
import sys
import threading
import tracemalloc
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import pytest
from conftest import METHODS
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader import recordio
from sharded_loader.recordio import (
    IRHeader,
    MXIndexedRecordIO,
    MXRecordIO,
    RecordFileDataset,
    RecordIOError,
    pack,
    pack_img,
    unpack,
    unpack_img,
)
from tests import damaged_records
from tests import reference_recordio as reference
from tests.fuzz import run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MAGIC = reference.MAGIC

# What mxnet 1.9.1 wrote for each of these payloads.
MXNET = {
    MAGIC: "0a23d7ce00000020 0a23d7ce00000060",
    MAGIC * 2: "0a23d7ce00000020 0a23d7ce00000040 0a23d7ce00000060",
    b"a" + MAGIC + b"bc": "0a23d7ce07000000 610a23d7ce626300",
    b"abcd" + MAGIC: "0a23d7ce04000020 61626364 0a23d7ce00000060",
    MAGIC + b"x": "0a23d7ce00000020 0a23d7ce01000060 78000000",
    b"abcdefgh" + MAGIC + b"zz" + MAGIC * 2 + b"12": "0a23d7ce08000020 6162636465666768 0a23d7ce0c000060 "
    "7a7a0a23d7ce0a23d7ce3132",
    MAGIC[:3]: "0a23d7ce03000000 0a23d700",
    b"": "0a23d7ce00000000",
}

words = st.one_of(st.just(MAGIC), st.just(MAGIC[:3]), st.binary(max_size=5), st.binary(min_size=4, max_size=4))
payloads = st.lists(words, max_size=12).map(b"".join)


def write(path: Path, records: list[bytes], index: bool = True) -> list[int]:
    """Writes the records (keys 0, 1, ...) and returns the offset of each, and of the end."""
    with MXIndexedRecordIO(path.with_suffix(".idx"), path, "w") as file:
        offsets = []
        for key, record in enumerate(records):
            offsets.append(file.tell())
            file.write_idx(key, record)
        offsets.append(file.tell())
    if not index:
        path.with_suffix(".idx").unlink()
    return offsets


def read_all(path: Path) -> list[bytes]:
    with MXRecordIO(path, "r") as file:
        return list(iter(file.read, None))


def golden(name: str) -> Any:
    cases = json.loads((GOLDEN / "recordio.json").read_text())
    return next(case for case in cases if case["id"] == name)


def unhex(value: dict[str, str]) -> bytes:
    return bytes.fromhex(value["__bytes_hex__"])


def descriptors(path: Path) -> int:
    """How many descriptors of this process are open on the file."""
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("counts descriptors in /proc")
    return [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")].count(str(path))


def in_forked_child(check: Any) -> None:
    """Runs `check` in a forked child and fails if it raises there."""
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            check()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


# -- the same bytes as MXNet -------------------------------------------------------------------------------------------


def test_files_are_those_of_mxnet(tmp_path: Path) -> None:
    case = golden("rec_plain")
    expected = case["expected"]["__dict__"]
    rec, idx = tmp_path / "plain.rec", tmp_path / "plain.idx"
    records, tells = list(map(bytes.fromhex, case["params"]["records_hex"])), []
    with MXIndexedRecordIO(idx, rec, "w") as file:
        for number, record in enumerate(records):
            file.write_idx(number * 10, record)
            tells.append(file.tell())
    assert tells == expected["tells"]
    content, offsets = reference.write(records)
    assert content == rec.read_bytes() == (GOLDEN / "plain.rec").read_bytes() == bytes.fromhex(expected["rec_hex"])
    assert reference.read(content) == (records, offsets[:-1], None)
    assert idx.read_bytes() == (GOLDEN / "plain.idx").read_bytes() == expected["idx_text"].encode()
    assert records == [unhex(record) for record in expected["records"]]
    with MXIndexedRecordIO(idx, rec, "r") as file, RecordFileDataset(rec) as dataset:
        assert file.keys == expected["keys"]
        assert [file.read_idx(key) for key in file.keys] == records == read_all(rec) == list(dataset)


@pytest.mark.parametrize("payload", MXNET, ids=lambda payload: payload.hex() or "empty")
def test_magic_in_a_payload_is_cut_as_by_mxnet(tmp_path: Path, payload: bytes) -> None:
    write(tmp_path / "a.rec", [payload])
    assert (tmp_path / "a.rec").read_bytes() == bytes.fromhex(MXNET[payload])
    assert read_all(tmp_path / "a.rec") == [payload]


def test_headers_have_the_bytes_and_the_values_of_mxnet() -> None:
    assert pack(IRHeader(5, 4.0, 2574, 1), b"img") == unhex(golden("pack_scalar")["expected"])
    assert pack((0, [1, 2, 3], 7, 0), b"img") == unhex(golden("pack_vec")["expected"])
    assert len(pack((0, 0, 0, 0), b"")) == golden("ir_size")["expected"]
    for name, label_given, id2 in (("scalar", 3.5, 9), ("vec", np.array([1.5, 2.5]), 0)):
        wanted = golden(f"unpack_{name}")["expected"]["__dict__"]
        header, body = unpack(pack(IRHeader(0, label_given, 9, id2), b"body"))
        assert (header.flag, header.id, header.id2, body) == (wanted["flag"], wanted["id"], id2, unhex(wanted["s"]))
        if name == "scalar":
            assert header.label == wanted["label"]
        else:
            label = wanted["label"]["__dict__"]
            assert (str(header.label.dtype), list(header.label.shape)) == (label["dtype"], label["shape"])
            assert header.label.tolist() == label["data"]
            header.label[0] = 5  # it is the user's


# -- what is written is read -------------------------------------------------------------------------------------------


floats = st.floats(width=32, allow_nan=False)


@given(record=payloads, label=st.one_of(floats, st.lists(floats, min_size=1)), key=st.integers(0, 2**64 - 1))
def test_packed_header_comes_back(record: bytes, label: Any, key: int) -> None:
    header, payload = unpack(pack(IRHeader(0, label, key, 3), record))
    assert (np.asarray(header.label).tolist(), header.id, header.id2, payload) == (label, key, 3, record)


def test_read_goes_on_after_seek_and_read_idx_and_sees_what_is_appended(tmp_path: Path) -> None:
    offsets = write(tmp_path / "a.rec", [b"a", b"b", b"c", b"d"])
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r") as file:
        file.seek(2)
        assert (file.tell(), file.read()) == (offsets[2], b"c")
        assert (file.read_idx(0), file.read()) == (b"a", b"b")
        file.reset()
        assert file.read() == b"a"
    with MXRecordIO(tmp_path / "b.rec", "w") as out, MXRecordIO(tmp_path / "b.rec", "r") as file:
        assert file.read() is None
        out.write(b"late")
        assert (file.read(), file.read()) == (b"late", None)


def test_interrupted_writer_leaves_every_finished_record(tmp_path: Path) -> None:
    script = (
        "import os, sys; from sharded_loader.recordio import MXIndexedRecordIO\n"
        "f = MXIndexedRecordIO(sys.argv[1], sys.argv[2], 'w')\n"
        "for i in range(3): f.write_idx(i, b'x' * i)\n"
        "os._exit(9)"
    )
    args = [sys.executable, "-c", script, str(tmp_path / "a.idx"), str(tmp_path / "a.rec")]
    assert subprocess.run(args, check=False).returncode == 9
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert list(dataset) == [b"", b"x", b"xx"]


def test_failed_write_leaves_no_part_of_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call = "pwrite" if hasattr(os, "pwrite") else "write"
    really, steps = getattr(os, call), iter([10])

    def full_disk(fd: int, data: memoryview, *where: int) -> Any:
        for size in steps:
            return really(fd, data[:size], *where)
        raise OSError(errno.ENOSPC, "No space left on device")

    with MXRecordIO(tmp_path / "a.rec", "w") as file:
        file.write(b"before")
        with monkeypatch.context() as patched:
            patched.setattr(os, call, full_disk)
            with pytest.raises(OSError, match=r"No space left.*a\.rec"):
                file.write(b"lost" * 9)
        file.write(b"after")
    assert read_all(tmp_path / "a.rec") == [b"before", b"after"]


# -- keys --------------------------------------------------------------------------------------------------------------


def test_negative_key_is_a_key_like_any_other_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w") as file:
        file.write_idx(5, b"five")
        file.write_idx(-3, b"minus three")
        with pytest.raises(ValueError, match=r"a\.idx: 5 cannot be a key .* written before, at offset 0"):
            file.write_idx(5, b"again")
    assert read_all(tmp_path / "a.rec") == [b"five", b"minus three"]
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r") as file:
        assert file.read_idx(-3) == b"minus three"
        with pytest.raises(KeyError, match=r"a\.idx: no key -1 of type int; it has 2 keys, the first are 5, -3"):
            file.read_idx(-1)
        with pytest.raises(KeyError, match="no key '0' of type str"):
            file.read_idx("0")
        with pytest.raises(KeyError, match="no key 7"):
            file.seek(7)


@pytest.mark.parametrize(
    ("kind", "kept", "refused"),
    [
        (str, ["Straße 1"], {"a\tb": "tab or a line end", "a\nb": "tab or a line end", " ": "tab or a line end"}),
        (int, ["5", 6.0, np.int64(7)], dict.fromkeys((5.7, "five", None), r"be a key of type int: .*key_type=str")),
    ],
)
def test_a_key_that_would_become_another_one_is_refused(tmp_path: Path, kind: Any, kept: Any, refused: Any) -> None:
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w", key_type=kind) as file:
        for key, said in refused.items():
            with pytest.raises(ValueError, match=rf"a\.idx: .*{said}"):
                file.write_idx(key, b"lost")
        for key in kept:
            file.write_idx(key, b"kept")
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r", key_type=kind) as file:
        assert file.keys == [kind(key) for key in kept] and file.read_idx(kept[-1]) == b"kept"
        with pytest.raises(KeyError, match=rf"no key \[5\] of type list; it has {len(kept)} keys"):
            file.read_idx([5])  # type: ignore[arg-type]
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert list(dataset) == [b"kept"] * len(kept)


def test_duplicate_keys_in_a_file_are_told_and_lose_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"a", b"b", b"c"])
    (tmp_path / "a.idx").write_text("4\t0\n4\t12\n5\t24\n")
    with pytest.warns(UserWarning, match="1 keys occur more than once") as caught:
        file = MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r")
    assert caught[0].filename == __file__
    with file:
        assert file.read_idx(4) == b"b"  # MXNet's answer
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert list(dataset) == [b"a", b"b", b"c"]


def test_an_index_that_names_a_record_twice_is_told(tmp_path: Path) -> None:
    """So is one that was cut within an offset, if another record begins at what is left of it."""
    offsets = write(tmp_path / "a.rec", [bytes(112)] * 11)
    assert offsets[10] == 1200
    (tmp_path / "a.idx").write_text("".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets[:11]))[:-2])
    for read in (lambda path: MXIndexedRecordIO(path.with_suffix(".idx"), path, "r"), RecordFileDataset):
        with pytest.warns(UserWarning, match=r"a\.idx: 1 lines name a record that another line names") as caught:
            read(tmp_path / "a.rec").close()
        assert caught[0].filename == __file__


def test_dataset_counts_from_both_ends_and_no_further(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"a", b"b"])
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert (len(dataset), dataset[-2], dataset[np.int64(1)]) == (2, b"a", b"b")
        for index in (2, -3):
            for read in (dataset.__getitem__, lambda i: dataset.get_batch([0, i]), lambda i: dataset.__getitems__([i])):
                with pytest.raises(IndexError, match=f"{index} is out of range for a dataset of 2 samples"):
                    read(index)
        with pytest.raises(TypeError, match="integers"):
            dataset.get_batch([0.5])


# -- damage ------------------------------------------------------------------------------------------------------------


def test_missing_empty_and_foreign_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.rec"):
        RecordFileDataset(tmp_path / "none.rec")
    with pytest.raises(FileNotFoundError, match=r"none\.rec"):
        MXRecordIO(tmp_path / "none.rec", "r")
    (tmp_path / "folder.rec").mkdir()
    for read in (read_all, RecordFileDataset):
        with pytest.raises(OSError, match=r"folder\.rec"):  # on Windows a PermissionError
            read(tmp_path / "folder.rec")
        with pytest.raises(OSError, match="it is not a file"):  # a named pipe would wait for a writer
            read(os.devnull)
    (tmp_path / "empty.rec").touch()
    assert read_all(tmp_path / "empty.rec") == []
    with RecordFileDataset(tmp_path / "empty.rec") as dataset:
        assert len(dataset) == 0
    (tmp_path / "photo.rec").write_bytes(b"\x89PNG\r\n\x1a\n" * 9)
    for read in (read_all, RecordFileDataset):
        with pytest.raises(RecordIOError, match=r"photo\.rec, offset 0: .*Is it a RecordIO file\?"):
            read(tmp_path / "photo.rec")
    with pytest.raises(ValueError, match="unknown flag 'a'"):
        MXRecordIO(tmp_path / "empty.rec", "a")


def test_rebuilt_index_ends_at_the_damage_which_raises_when_it_is_read(tmp_path: Path) -> None:
    rec = tmp_path / "a.rec"
    offsets = write(rec, [b"a", b"b", b"c", b"d"], index=False)
    data = bytearray(rec.read_bytes())
    data[offsets[2]] ^= 1
    rec.write_bytes(data)
    with pytest.warns(UserWarning, match=f"offset {offsets[2]}: .* 2 records were found before") as caught:
        dataset = RecordFileDataset(rec)
    assert caught[0].filename == __file__
    with dataset:
        assert dataset.__getitems__([0, 1]) == [b"a", b"b"]
        assert len(dataset) == 3
        with pytest.raises(RecordIOError, match="0xced7230b stands for the magic 0xced7230a"):
            dataset[2]
    with pytest.warns(UserWarning, match="2 records") as caught:
        file = MXIndexedRecordIO(tmp_path / "a.idx", rec, "r")
    with file:
        assert (file.keys, file.read_idx(1)) == ([0, 1, 2], b"b")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([0xCED7230A, 4 << 29], "flag 4"),
        ([0xCED7230A, 2 << 29], "flag 2"),
        ([0xCED7230A, 3 << 29], "flag 3"),
        ([0xCED7230A, 1 << 29, 0xCED7230A, 0], "the part at 20 has flag 0"),
        ([0xCED7230A, 1 << 29, 0xCED7230A, 1 << 29], "the part at 20 has flag 1"),
        ([0xCED7230A, 1 << 29, 0, 0], "no record at 20: 0x00000000"),
        ([0xCED7230A, 1 << 29], "the file ends at 20, within a record"),
        ([0xCED7230A], "the file ends at 16, within a record"),
        ([0xCED7230A, 5, 0], "the part at 12 says 5 bytes, the file ends at 24"),
    ],
)
def test_each_kind_of_damage_is_told(tmp_path: Path, words: list[int], problem: str) -> None:
    rec = tmp_path / "a.rec"
    write(rec, [b"good"], index=False)
    with open(rec, "ab") as file:
        file.write(struct.pack(f"<{len(words)}I", *words))
    with MXRecordIO(rec, "r") as reader:
        assert reader.read() == b"good"
        with pytest.raises(RecordIOError, match=rf"a\.rec, offset 12: .*{problem}") as caught:
            reader.read()
    error = pickle.loads(pickle.dumps(caught.value))  # it travels between processes
    assert (error.path, error.offset, str(error)) == (str(rec), 12, str(caught.value))


@pytest.mark.parametrize("line", ["zero\t0", "0", "0\tx", "0\t-4", "0\t0\t0", "0\t\t4", "0\t1_0", f"0\t{1 << 63}"])
def test_malformed_index_line_is_named(tmp_path: Path, line: str) -> None:
    write(tmp_path / "a.rec", [b"a"])
    (tmp_path / "a.idx").write_text(f"7\t0\n{line}\n")
    with pytest.raises(ValueError, match=r"a\.idx, line 2: .*delete the file to have it rebuilt"):
        MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r")


def test_index_of_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"aaaaaaaaa"])
    (tmp_path / "a.idx").write_text("0\t4\r\n\r\n1\t400\r\n2\t0\r\n")
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        for index, problem in enumerate(["offset 4: no record at 4", "offset 400: the file ends at"]):
            with pytest.raises(RecordIOError, match=f"{problem}.*delete the .idx"):
                dataset[index]
        assert dataset[2] == b"aaaaaaaaa"
    (tmp_path / "a.idx").write_text("")
    with pytest.raises(ValueError, match=r"a\.idx is empty, .*a\.rec has 20 bytes: delete the \.idx"):
        RecordFileDataset(tmp_path / "a.rec")


def peak_of(read: Callable[[], Any]) -> int:
    """How many bytes a read takes at once."""
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_no_memory_is_taken_for_a_length_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(MAGIC + struct.pack("<I", 2**29 - 1) + b"x" * 100)
    with MXRecordIO(tmp_path / "a.rec", "r") as file:

        def refused() -> None:
            with pytest.raises(RecordIOError, match="says 536870911 bytes, the file ends at 108"):
                file.read()

        assert peak_of(refused) < 1 << 20


@pytest.mark.slow
def test_many_tiny_parts_take_no_more_memory_than_the_file(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [MAGIC * 50_000])
    with MXRecordIO(tmp_path / "a.rec", "r") as file:
        assert peak_of(file.read) < os.path.getsize(tmp_path / "a.rec")


def test_too_long_a_record_is_refused_and_any_other_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with MXRecordIO(tmp_path / "a.rec", "w") as file:
        said = "a record of 536870912 bytes is too long, RecordIO has room for 536870911"
        with pytest.raises(ValueError, match=rf"a\.rec: {said}"):
            file.write(np.zeros(2**27, np.uint32).data)  # pages that nobody touches
        monkeypatch.setattr(recordio, "MAX_LENGTH", 7)
        file.write(b"1234567")
        with pytest.raises(ValueError, match="a record of 8 bytes is too long"):
            file.write(b"12345678")
        with pytest.raises(TypeError, match="a record is bytes, not str"):
            file.write("text")  # type: ignore[arg-type]
    assert read_all(tmp_path / "a.rec") == [b"1234567"]
    monkeypatch.undo()
    payload = b"ab" + MAGIC + b"cd" + MAGIC * 2
    with MXRecordIO(tmp_path / "a.rec", "w") as file:
        for each in (payload, bytearray(payload), memoryview(payload), memoryview(payload)[::2], memoryview(b"")):
            file.write(each)
    assert read_all(tmp_path / "a.rec") == [payload, payload, payload, payload[::2], b""]


# -- threads and processes ---------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("positioned", [True, False], ids=["pread", "lock and seek"])
def test_threads_share_one_open_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, positioned: bool) -> None:
    if not positioned:
        monkeypatch.delattr(os, "pread", raising=False)
    records = [bytes([number % 251]) * (number * 7 % 500) for number in range(200)]
    write(tmp_path / "a.rec", records)
    with (
        RecordFileDataset(tmp_path / "a.rec") as dataset,
        MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r") as file,
        ThreadPoolExecutor(8) as pool,
    ):

        def check(seed: int) -> None:
            order = random.Random(seed).choices(range(200), k=300)
            for index in order:
                assert dataset[index] == records[index]
                assert file.read_idx(index) == records[index]
            for begin in range(0, 300, 40):
                few = order[begin : begin + 40]
                assert dataset.get_batch(few) == [records[index] for index in few]

        list(pool.map(check, range(8)))
        file.reset()
        shared = pool.map(lambda _: list(iter(file.read, None)), range(8))
        assert sorted(record for part in shared for record in part) == sorted(records)  # each to one thread


def test_threads_write_whole_records_under_their_keys(tmp_path: Path) -> None:
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w") as file, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: file.write_idx(key, b"%d" % key * (key % 7)), range(800)))
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r") as file:
        assert sorted(file.keys) == list(range(800))
        assert all(file.read_idx(key) == b"%d" % key * (key % 7) for key in file.keys)


def test_close_waits_for_no_reader_and_spoils_none(tmp_path: Path) -> None:
    records = [bytes([number]) * 1000 for number in range(50)]
    write(tmp_path / "a.rec", records)
    for _ in range(20):
        dataset = RecordFileDataset(tmp_path / "a.rec")
        begun = threading.Barrier(3)

        def read(dataset: RecordFileDataset = dataset, begun: threading.Barrier = begun) -> None:
            begun.wait()
            try:
                for index in range(50):
                    assert dataset[index] == records[index]
            except ValueError as error:
                assert "is closed" in str(error)

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            begun.wait()
            dataset.close()
            for reader in readers:
                reader.result()
        assert descriptors(tmp_path / "a.rec") == 0


def read_in_child(dataset: RecordFileDataset, file: MXIndexedRecordIO, result: Any) -> None:
    result.send((list(dataset), dataset.get_batch([2, 0]), file.read_idx(1), file.read()))
    result.close()


# A forkserver's children unpickle as those of spawn do, and its server would stay behind.
@METHODS
def test_each_process_reads_for_itself(tmp_path: Path, method: str) -> None:
    write(tmp_path / "a.rec", [b"a", b"b", b"c"])
    context = multiprocess.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    with (
        RecordFileDataset(tmp_path / "a.rec") as dataset,
        MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r") as file,
        receiver,
        sender,
    ):
        assert file.read() == dataset.get_batch([0])[0] == b"a"
        process = context.Process(target=read_in_child, args=(dataset, file, sender))
        process.start()
        assert receiver.poll(60)
        assert receiver.recv() == ([b"a", b"b", b"c"], [b"c", b"a"], b"b", b"c")
        process.join()
        process.close()
        assert file.read() == b"b"  # the child's reading moved nothing here


def test_forked_child_lets_go_of_the_parents_descriptor_and_lock(tmp_path: Path) -> None:
    write(tmp_path / "a.rec", [b"a", b"b"])
    with MXRecordIO(tmp_path / "a.rec", "r") as file:
        assert file.read() == b"a"

        def check() -> None:
            assert file.read() == b"a"  # from the beginning, as in MXNet
            assert descriptors(tmp_path / "a.rec") == 1
            file.close()
            assert descriptors(tmp_path / "a.rec") == 0

        with file._turn:  # as if another thread were reading at the moment of the fork
            in_forked_child(check)
        assert file.read() == b"b"


def test_forked_child_cannot_write_and_spoils_nothing(tmp_path: Path) -> None:
    with MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w") as file:
        file.write_idx(0, b"a")

        def check() -> None:
            for write_again in (lambda: file.write_idx(1, b"child"), lambda: file.write(b"child"), file.reset):
                with pytest.raises(RuntimeError, match=r"a\.rec was opened for writing by process"):
                    write_again()

        in_forked_child(check)
        file.write_idx(1, b"b")
    assert read_all(tmp_path / "a.rec") == [b"a", b"b"]
    assert (tmp_path / "a.idx").read_text() == "0\t0\n1\t12\n"


def test_a_relative_path_is_meant_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader is pickled by its path, and a writer not at all."""
    monkeypatch.chdir(tmp_path)
    with MXIndexedRecordIO("a.idx", "a.rec", "w") as out:
        monkeypatch.chdir("/")
        out.write_idx(0, b"old")
        out.reset()  # empties it
        for key in (0, 1):
            out.write_idx(key, b"ab"[key : key + 1])
        with pytest.raises(TypeError, match="cannot be pickled"):
            pickle.dumps(out)
    assert (tmp_path / "a.idx").read_text() == "0\t0\n1\t12\n"
    (tmp_path / "a.idx").unlink()
    monkeypatch.chdir(tmp_path)
    with RecordFileDataset("a.rec") as dataset, MXIndexedRecordIO("a.idx", "a.rec", "r") as file:
        file.read()
        sent = pickle.dumps((dataset, file))
    monkeypatch.chdir("/")  # a worker may be elsewhere
    dataset, file = pickle.loads(sent)
    with dataset, file:
        assert (list(dataset), file.read(), file.read_idx(1)) == ([b"a", b"b"], b"a", b"b")


def test_reading_records_needs_no_torch() -> None:
    code = "import sys, sharded_loader.recordio; sys.exit('torch' in sys.modules or 'PIL' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_files_close_when_told_and_when_forgotten_and_if_they_cannot_be_opened(tmp_path: Path) -> None:
    rec, idx = tmp_path / "a.rec", tmp_path / "a.idx"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for forget in (False, True):
            for make in (
                lambda: MXIndexedRecordIO(idx, rec, "w"),
                lambda: MXIndexedRecordIO(idx, rec, "r"),
                lambda: MXRecordIO(rec, "r"),
                lambda: RecordFileDataset(rec),
            ):
                opened = make()
                assert descriptors(rec) == 1
                if not forget:
                    opened.close()
                    opened.close()
                    assert descriptors(rec) + descriptors(idx) == 0
                del opened
                if forget:
                    gc.collect()
                assert descriptors(rec) + descriptors(idx) == 0
    write(rec, [b"a"])
    idx.write_text("broken")
    for make in (lambda: MXIndexedRecordIO(idx, rec, "r"), lambda: RecordFileDataset(rec)):
        with pytest.raises(ValueError, match="line 1"):
            make()
    gc.collect()
    assert descriptors(rec) + descriptors(idx) == 0


def test_use_after_close_and_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    file = MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "w")
    assert file.is_open
    file.write_idx(0, b"a")
    for read in (file.read, lambda: file.read_idx(0), lambda: file.seek(0)):
        with pytest.raises(io.UnsupportedOperation, match="opened with flag 'w', which cannot read"):
            read()
    file.close()
    assert not file.is_open

    def all_closed(*uses: Callable[[], Any]) -> None:
        for use in uses:
            with pytest.raises(ValueError, match=r"a\.rec is closed"):
                use()

    all_closed(lambda: file.write(b"b"), lambda: file.write_idx(1, b"b"), file.tell, file.reset)
    file = MXIndexedRecordIO(tmp_path / "a.idx", tmp_path / "a.rec", "r")
    with pytest.raises(io.UnsupportedOperation, match="opened with flag 'r', which cannot write"):
        file.write_idx(1, b"b")
    file.close()
    dataset = RecordFileDataset(tmp_path / "a.rec")
    dataset.close()
    all_closed(file.read, lambda: dataset[0], lambda: dataset.get_batch([0]))
    assert (repr(file), len(dataset)) == (f"MXIndexedRecordIO({str(tmp_path / 'a.rec')!r}, 'r', closed)", 1)
    file.open()
    assert file.read() == b"a"
    file.close()


# -- headers and images ------------------------------------------------------------------------------------------------


HEADERS: list[Any] = [
    *((0, 1.0, key, 0) for key in (-1, 2**64, float("nan"), 1.5, "7")),
    *((0, 1.0, 0, key) for key in (-1, 2**64, float("nan"), 1.5, "7")),
    *((0, label, 0, 0) for label in (1e300, "cat", ["cat"], [[1], [2, 3]])),
]


@pytest.mark.parametrize("header", HEADERS, ids=str)
def test_header_that_does_not_fit_is_refused(header: Any) -> None:
    for one in (header, IRHeader(*header)):
        with pytest.raises(ValueError, match="does not fit"):
            pack(one, b"")


@pytest.mark.parametrize(
    ("read", "record", "said"),
    [
        (unpack, b"12345", "a record of 5 bytes has no IRHeader"),
        (unpack, pack((0, [1.0, 2.0], 77, 0), b"")[:-1], "id 77: its header promises a label of 2 numbers, but only 7"),
        (unpack_img, pack((0, 1.0, 31, 0), b"not a jpg"), "record with id 31: its 9 bytes do not decode as an image"),
        (unpack_img, lambda: pack_img((0, 1.0, 32, 0), np.zeros((64, 64, 3), np.uint8))[:-200], "record with id 32"),
    ],
)
def test_a_record_that_is_no_packed_one_is_named(read: Any, record: Any, said: str) -> None:
    if read is unpack_img:
        pytest.importorskip("PIL")
    with pytest.raises(ValueError, match=said):
        read(record() if callable(record) else record)


TOO_LARGE = [
    2**24 + 1,
    -(2**24) - 1,
    16777217.0,
    np.int64(123456789),
    np.uint64(2**64 - 1),
    2**53 + 1,
    2**70 + 1,
    1e300,
    -1e39,
]


@pytest.mark.parametrize("label", TOO_LARGE)
@pytest.mark.parametrize("among", [lambda one: one, lambda one: [one], lambda one: np.array([one, one])])
def test_a_label_that_would_be_stored_as_another_number_is_named(label: Any, among: Any) -> None:
    name = re.escape(str(among(label).item(1) if isinstance(among(label), np.ndarray) else label))
    with pytest.raises(ValueError, match=rf"does not fit \(the label {name} would be stored as .*Give a large whole"):
        pack((0, among(label), 1, 0), b"")


@pytest.mark.parametrize(
    "label", [2**24, -(2**24) - 2, 2**60, 0.1, True, float("inf"), 16777217.5, 1e30, np.float16(7)]
)
def test_a_label_that_float32_holds_and_a_fraction_are_stored_as_float32(label: Any) -> None:
    for one in (label, [label, 1]):
        stored = unpack(pack((0, one, 1, 0), b""))[0].label
        assert np.array_equal(stored, np.float32(one))
    assert np.isnan(unpack(pack((0, float("nan"), 1, 0), b""))[0].label)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("reference")


@given(records=st.lists(payloads, max_size=5))
@settings(deadline=None)
def test_what_is_written_is_what_the_reference_writes(folder: Path, records: list[bytes]) -> None:
    content, offsets = reference.write(records)
    with MXIndexedRecordIO(folder / "ours.idx", folder / "ours.rec", "w") as file:
        for key, record in enumerate(records):
            file.write_idx(key, record)
    assert (folder / "ours.rec").read_bytes() == content
    lines = [f"{key}\t{offset}\n" for key, offset in enumerate(offsets[:-1])]
    assert (folder / "ours.idx").read_bytes() == "".join(lines).encode()
    assert reference.read(content) == (records, offsets[:-1], None)


@given(records=st.lists(payloads, max_size=5))
@settings(deadline=None)
def test_what_the_reference_writes_is_read(folder: Path, records: list[bytes]) -> None:
    content, offsets = reference.write(records)
    (folder / "theirs.rec").write_bytes(content)
    with MXIndexedRecordIO(folder / "theirs.idx", folder / "theirs.rec", "r") as file:  # its index is made
        assert list(iter(file.read, None)) == records
        assert list(file.idx.values()) == offsets[:-1]
    with RecordFileDataset(folder / "theirs.rec") as dataset:
        assert dataset.get_batch(range(len(records))) == records


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=3 * settings.default.max_examples // 2)
def test_a_damaged_file_is_read_up_to_the_damage_which_is_named(folder: Path, rng: random.Random) -> None:
    damaged_records.check_file(folder, rng)


@pytest.mark.slow
def test_many_damaged_files_are_read_as_the_reference_reads_them(capsys: Any, monkeypatch: Any) -> None:
    assert run.run(range(200), "records", math.inf) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cases", "200"] in lines and ["differences", "0"] in lines
    monkeypatch.setattr(RecordFileDataset, "__getitems__", lambda self, indices: [b""] * len(indices))
    assert run.run(range(20), "records", math.inf) == 1


def test_the_comparison_notices_a_read_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with open(tmp_path / "a", "rb") as file, damaged_records.reads_within(10):
        assert os.pread(file.fileno(), 10, 0) == b"0123456789"
        with pytest.raises(AssertionError, match="a read of 11 bytes from a file of 10"):
            os.pread(file.fileno(), 11, 0)
