"""Damaged tar shards, RecordIO files and indexes: the right samples, or an error that names the file and the offset."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from mutations import Subject, assert_noticed, read_shards, verdicts

from sharded_loader import ShardDataset
from tests import reference_recordio as reference

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


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
    assert_noticed(tar_subject(dialect), range(1000, 2700), tmp_path)


RECORDS = [
    *(b"%d" % i * (3 * i) for i in range(12)),
    *(reference.MAGIC * 2 + b"parts" + reference.MAGIC, b"", b"x" * 700, b"four", b"y" * 2000, b"last one"),
]


def whole_records(content: bytes) -> list[bytes] | None:
    """The records of a file that is as a writer leaves it, filling bytes and all; None of another one."""
    records, _, damage = reference.read(content)
    return records if damage is None and reference.write(records)[0] == content else None


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 1900), marks=pytest.mark.slow)])
def test_damaged_record_shards_are_noticed(seeds: range, tmp_path: Path) -> None:
    assert_noticed(Subject("a.rec", reference.write(RECORDS)[0], reference=whole_records), seeds, tmp_path)


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


@pytest.mark.slow
def test_damaged_indexes_are_made_again(tmp_path: Path) -> None:
    counts, defects = verdicts(index_subject(tmp_path), range(1000, 2700), tmp_path)
    assert counts == {"right": 1700}, defects[:20]


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
