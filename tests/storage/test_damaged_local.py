"""Damaged tar shards, RecordIO files and indexes: the right samples, or an error that names the file and the offset."""

from __future__ import annotations

import contextlib
import io
import struct
import tarfile
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from mutations import Subject, assert_noticed, damaged, read_shards, verdicts

from sharded_loader import RecordFileDataset, ShardDataset
from sharded_loader.recordio import RecordIOError
from sharded_loader.recordio.files import MAGIC_NUMBER, framed
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.tar import Tar

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


class InMemory(ShardFile):
    """A shard of these bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.name, self.size, self.content = "in memory", len(content), content

    def ranges(self, begins: Any, ends: Any) -> list[bytes]:
        return [self.content[begin:end] for begin, end in zip(begins, ends, strict=True)]


# -- tar --------------------------------------------------------------------------------------------------------------


def tar_of(dialect: str, more: int = 0) -> bytes:
    """Samples with long names and, where the dialect has them, extended headers.

    It has an odd number of records: if larger ones were possible, more zeros at the end would be right.
    """
    content = io.BytesIO()
    headers = {"pax_headers": {"comment": "for all members"}} if dialect == "pax" else {}
    with tarfile.open(fileobj=content, mode="w", format=DIALECTS[dialect], **headers) as tar:
        for i in range(9):
            folder = "long/" * 25 if i % 3 == 1 else "" if dialect == "ustar" or i % 3 else "länger/" * 40
            picture, number = (tarfile.TarInfo(f"{folder}{i:03}.{end}") for end in ("jpg", "cls"))
            picture.size, number.size = 100 + 300 * (i % 4) + more, 1
            picture.pax_headers = {"mtime": f"{i}.25"}
            tar.addfile(picture, io.BytesIO(bytes(range(50, 250)) * 30))
            tar.addfile(number, io.BytesIO(b"%d" % i))
    return content.getvalue() if len(content.getvalue()) // 10_240 % 2 else tar_of(dialect, more + 512)


def samples_of_tar(content: bytes) -> list[Any] | None:
    """The samples as tarfile reads them, if the end mark follows the last member, and no more zeros than it writes."""
    samples: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                key, dot, extension = base.partition(".")
                if not dot or not member.isfile():
                    continue
                sample = samples.setdefault(folder + slash + key, {"__key__": folder + slash + key})
                if extension.lower() in sample:
                    return None
                part = tar.extractfile(member)
                sample[extension.lower()] = part.read() if part else None
            rest = content[tar.offset :]
    except (tarfile.TarError, KeyError, ValueError, OverflowError):
        return None
    return None if rest.strip(b"\0") or not 1024 <= len(rest) < 1024 + 10_240 else list(samples.values())


def tar_subject(dialect: str) -> Subject:
    return Subject(f"{dialect}.tar", tar_of(dialect), reference=samples_of_tar)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.slow
def test_damaged_tar_shards_are_noticed(dialect: str, tmp_path: Path) -> None:
    assert read_shards(str(write(tmp_path / "a.tar", tar_of(dialect)))) == samples_of_tar(tar_of(dialect))
    assert_noticed(tar_subject(dialect), range(120), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_thousands_of_damaged_tar_shards_are_noticed(dialect: str, tmp_path: Path) -> None:
    assert_noticed(tar_subject(dialect), range(1000, 2700), tmp_path)


def test_no_damage_gives_a_tar_shard_more_samples_than_it_has() -> None:
    """Names that stand in headers have checksums, and a copy of a member has the name of another one."""
    content, found = tar_of("ustar"), Counter[int]()
    for seed in range(60, 160):
        with contextlib.suppress(ShardError):
            found[int(Tar().index(InMemory(damaged(content, seed)[1]))["length"])] += 1
    assert max(found) == 9 and found[9] > 10


# -- RecordIO ---------------------------------------------------------------------------------------------------------

MAGIC = MAGIC_NUMBER.to_bytes(4, "little")
RECORDS = [
    *(b"%d" % i * (3 * i) for i in range(12)),
    *(MAGIC * 2 + b"parts" + MAGIC, b"", b"x" * 700, b"four", b"y" * 2000, b"last one"),
]


def rec() -> tuple[bytes, bytes]:
    """A file of records, and its index."""
    frames = [framed(record) for record in RECORDS]
    lines = [f"{i}\t{sum(map(len, frames[:i]))}\n" for i in range(len(frames))]
    return b"".join(frames), "".join(lines).encode()


def records_in(content: bytes, as_mxnet: bool = False) -> list[bytes] | None:
    """The records as the format's description says; None if it does not fit.

    MXNet does not look at what fills a record up, and reads a part within a part as bytes.
    """
    records: list[bytes] = []
    at, is_open = 0, False
    while at < len(content):
        magic, word = struct.unpack_from("<II", content.ljust(at + 8, b"\0"), at)
        flag, length = word >> 29, word & (1 << 29) - 1
        end = at + 8 + length
        filling = content[end : end + (-length & 3)]
        if magic != MAGIC_NUMBER or is_open != (flag in (2, 3)) or flag > 3 or len(filling) != -length & 3:
            return None
        part = content[at + 8 : end]
        if not as_mxnet and (any(filling) or any(part[i : i + 4] == MAGIC for i in range(0, len(part), 4))):
            return None
        if is_open:
            records[-1] += MAGIC + part
        else:
            records.append(part)
        at, is_open = end + len(filling), flag in (1, 2)
    return None if is_open else records


def read_record_file(path: str) -> list[bytes]:
    """All records by `RecordFileDataset`: shuffled in batches, in a row, and one by one; they have to agree."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with RecordFileDataset(path) as dataset:
                order = list(range(len(dataset)))
                shuffled = order[::2] + order[1::2]
                found = dict(zip(shuffled, dataset.get_batch(shuffled), strict=True))
                singles = [dataset[i] for i in order]
                assert [found[i] for i in order] == list(dataset.get_batch(order)) == singles
                return singles
        except RecordIOError as error:
            raise ShardError(str(error)) from None
        except ValueError as error:
            if ".idx" not in str(error):
                raise
            raise ShardError(f"{path}: its index, row 0: {error}") from None


def listed_records(index: bytes) -> list[bytes] | None:
    """The records that an index lists; None if it lists what is none."""
    frames = [framed(record) for record in RECORDS]
    by_offset = {sum(map(len, frames[:i])): record for i, record in enumerate(RECORDS)}
    try:
        lines = [line for line in index.decode("utf-8", "surrogateescape").split("\n") if line.strip()]
        return [by_offset[int(line.rstrip("\r").partition("\t")[2])] for line in lines]
    except (KeyError, ValueError):
        return None


def read_beside(path: str) -> list[bytes]:
    """The records of the file beside an index."""
    try:
        return read_record_file(str(Path(path).with_suffix(".rec")))
    except ShardError as error:
        raise ShardError(f"{path}: {error}") from None


SUBJECTS = {
    "shard": Subject("a.rec", rec()[0], reference=records_in),
    "file": Subject("a.rec", rec()[0], reference=partial(records_in, as_mxnet=True), read=read_record_file),
    "idx": Subject("a.idx", rec()[1], reference=listed_records, read=read_beside, beside=(("a.rec", rec()[0]),)),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", SUBJECTS)
def test_damaged_record_files_are_noticed(kind: str, tmp_path: Path) -> None:
    assert_noticed(SUBJECTS[kind], range(100), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("shard", 900), ("file", 700), ("idx", 900)])
def test_thousands_of_damaged_record_files_are_noticed(kind: str, count: int, tmp_path: Path) -> None:
    assert_noticed(SUBJECTS[kind], range(1000, 1000 + count), tmp_path)


# -- kept indexes -----------------------------------------------------------------------------------------------------


def read_by_index(path: str) -> list[Any]:
    """The samples of the shard beside a kept index, which takes the place of the one that is made."""
    folder = Path(path).parent
    shard, indexes = folder / "a.tar", folder / "indexes"
    ShardDataset(shard, index_folder=indexes).close()
    [index] = indexes.glob("*.arrays")
    index.write_bytes(Path(path).read_bytes())
    found = ShardDataset(shard, index_folder=indexes)
    samples = found.__getitems__(range(len(found)))
    found.close()
    assert samples == read_shards(str(shard)), "the index was not made again"
    return samples


def index_subject(folder: Path) -> Subject:
    """A kept index, and its shard."""
    ShardDataset(write(folder / "a.tar", tar_of("pax")), index_folder=folder / "indexes").close()
    [index] = (folder / "indexes").glob("*.arrays")
    content = index.read_bytes()
    return Subject("a.npz", content, read=read_by_index, beside=(("a.tar", tar_of("pax")),))


def assert_all_right(subject: Subject, seeds: range, folder: Path) -> None:
    counts, defects = verdicts(subject, seeds, folder)
    assert counts == {"right": len(seeds)}, defects[:20]


@pytest.mark.slow
def test_damaged_indexes_are_made_again(tmp_path: Path) -> None:
    assert_all_right(index_subject(tmp_path), range(60), tmp_path)


@pytest.mark.slow
def test_thousands_of_damaged_indexes_are_made_again(tmp_path: Path) -> None:
    assert_all_right(index_subject(tmp_path), range(1000, 2700), tmp_path)


# -- helpers ----------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
