"""Damaged RecordIO files by the hundred thousand, read in every way, against a second reader.

    reference_recordio: records --write--> a file --damage--> a broken file --read--> what must be found in it
    the library:                                              the same file, by each class, with and without an index

`check_file` is one file. What holds for each: the records before the damage are read, each reader stops at the same
offset and says so with the file's name, nothing but `RecordIOError` or (for an index) ValueError is raised, and no read
asks for more bytes than the file has, so that no allocation exceeds it. Seed and number give the same file again.
"""

import functools
import os
import random
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, RecordFileDataset, RecordIOError
from tests import reference_recordio as reference
from tests.fuzz.steps import Program


@contextmanager
def reads_within(size: int) -> Iterator[None]:
    """No positioned read in the block asks for more than ``size`` bytes, or a header's."""
    really = getattr(os, "pread", None)
    if really is None:  # Windows
        yield
        return

    def pread(fd: int, count: int, offset: int) -> bytes:
        assert count <= max(size, 8), f"a read of {count} bytes from a file of {size}"
        return really(fd, count, offset)

    os.pread = pread
    try:
        yield
    finally:
        os.pread = really


def draw(rng: random.Random) -> tuple[bytes, list[bytes], bytes | None]:
    """A damaged file, the records before the damage, and an index for it, perhaps a damaged one."""
    records = [reference.random_record(rng) for _ in range(rng.choice([1, 2, 5, 20]))]
    whole, offsets = reference.write(records)
    content, first = reference.damage(whole, rng)
    untouched = sum(offset <= first for offset in offsets[1:])
    index = b"".join(b"%d\t%d\n" % (key, offset) for key, offset in enumerate(offsets[:-1]))
    kind = rng.choice(["none", "fits", "damaged"])
    if kind == "damaged":
        index = reference.damage_index(index, rng)
    return content, records[:untouched], None if kind == "none" else index


def check_file(folder: Path, rng: random.Random) -> str:
    """Write one damaged file and read it in every way; says how it was damaged.

    Raises:
        AssertionError: it was not read as it must be.
    """
    content, before, index = draw(rng)
    rec, idx = folder / "fuzz.rec", folder / "fuzz.idx"
    rec.write_bytes(content)
    idx.unlink(missing_ok=True)
    records, offsets, damaged = reference.read(content)
    assert records[: len(before)] == before, "the reference itself"
    with reads_within(len(content)), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with MXRecordIO(rec, "r") as file:
            assert [file.read() for _ in records] == records
            check(file.read, rec, damaged)
        check_rebuilt(rec, records, offsets, damaged, rng)
        if index is not None:
            idx.write_bytes(index)
            check_index(rec, idx, content, rng)
    return f"{'damaged' if damaged is not None else 'still readable'}, {'no index' if index is None else 'index'}"


def check_rebuilt(rec: Path, records: list[bytes], offsets: list[int], damaged: int | None, rng: random.Random) -> None:
    if damaged == 0:
        return check(lambda: RecordFileDataset(rec), rec, 0)
    with RecordFileDataset(rec) as dataset:
        assert len(dataset) == len(records) + (damaged is not None)
        order = rng.choices(range(len(records)), k=rng.choice([1, 7, 30])) if records else []
        for _ in range(2):  # the second time sizes are known
            assert dataset.get_batch(order) == [records[index] for index in order]
            assert dataset.__getitems__(range(len(records))) == records
        if damaged is not None:
            check(lambda: dataset[-1], rec, damaged)
            check(lambda: dataset.get_batch([*order, -1]), rec, damaged)
    with MXIndexedRecordIO(rec.with_suffix(".idx"), rec, "r") as file:
        assert list(file.idx.values())[: len(records)] == offsets


def check_index(rec: Path, idx: Path, content: bytes, rng: random.Random) -> None:
    try:
        dataset, file = RecordFileDataset(rec), MXIndexedRecordIO(idx, rec, "r")
    except ValueError as error:
        assert not isinstance(error, RecordIOError) and str(idx) in str(error), error
        return
    with dataset, file:
        places = [int(line.partition(b"\t")[2].decode()) for line in idx.read_bytes().split(b"\n") if line.strip()]
        assert len(dataset) == len(places)
        # Of each place the record, or the place itself if there is none.
        wanted: list[Any] = [(reference.read_at(content, place) or [place])[0] for place in places]
        for number, one in enumerate(wanted):
            check(functools.partial(dataset.__getitem__, number), rec, one)
        order = rng.choices(range(len(places)), k=rng.choice([1, 7, 30])) if places else []
        batch = [wanted[number] for number in order]
        for _ in range(2):
            check(lambda: dataset.get_batch(order), rec, next((one for one in batch if isinstance(one, int)), batch))
        for key, place in file.idx.items():
            found = reference.read_at(content, place)
            check(lambda key=key: (file.read_idx(key), file.tell()), rec, place if found is None else found)


def check(read: Any, rec: Path, wanted: Any) -> None:
    """What is read; an offset: there is damage, which the error names."""
    try:
        got = read()
    except RecordIOError as error:
        assert (error.path, error.offset) == (str(rec), wanted), f"{error}, not {wanted}"
        assert f"{rec}, offset {wanted}: " in str(error)
    else:
        assert not isinstance(wanted, int) and got == wanted, f"{wanted!r:.200} was read as {got!r:.200}"


class DamagedFile(Program):
    """One damaged file, in a folder of its own."""

    def run(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.counts[check_file(Path(folder), self.rng)] += 1
