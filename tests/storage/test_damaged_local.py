"""Damaged tar shards, RecordIO files and indexes: the right samples, or an error that names the file and the offset."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from mutations import Subject, assert_noticed, read_shards

DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}

# -- tar --------------------------------------------------------------------------------------------------------------


def tar_of(dialect: str, more: int = 0) -> bytes:
    """Samples with long names, links to them and, where the dialect has them, extended headers.

    It has an odd number of records: if larger ones were possible, more zeros at the end would be right.
    """
    content = io.BytesIO()
    headers = {"pax_headers": {"comment": "for all members"}} if dialect == "pax" else {}
    with tarfile.open(fileobj=content, mode="w", format=DIALECTS[dialect], **headers) as tar:
        for i in range(9):
            folder = "long/" * 25 if i % 3 == 1 else "" if dialect == "ustar" or i % 3 else "länger/" * 40
            picture, number, link = (tarfile.TarInfo(f"{folder}{i:03}.{end}") for end in ("jpg", "cls", "same.jpg"))
            picture.size, number.size = 100 + 300 * (i % 4) + more, 1
            picture.pax_headers = {"mtime": f"{i}.25"}
            tar.addfile(picture, io.BytesIO(bytes(range(50, 250)) * 30))
            tar.addfile(number, io.BytesIO(b"%d" % i))
            if i % 4 == 0 and not (folder and dialect == "ustar"):
                link.type = tarfile.LNKTYPE if i % 8 else tarfile.SYMTYPE
                link.linkname = picture.name if i % 8 else f"{i:03}.jpg"
                tar.addfile(link)
    return content.getvalue() if len(content.getvalue()) // 10_240 % 2 else tar_of(dialect, more + 512)


def samples_of_tar(content: bytes) -> list[Any] | None:
    """The samples as tarfile reads them, if the end mark follows the last member, and no more zeros than it writes."""
    samples: list[dict[str, Any]] = []
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                key, dot, extension = base.partition(".")
                if not dot or not (member.isfile() or member.islnk() or member.issym()):
                    continue
                if not samples or samples[-1]["__key__"] != folder + slash + key:
                    samples.append({"__key__": folder + slash + key})
                part = tar.extractfile(member)
                samples[-1][extension.lower()] = part.read() if part else None
            rest = content[tar.offset :]
    except (tarfile.TarError, KeyError, ValueError, OverflowError):
        return None
    return None if rest.strip(b"\0") or not 1024 <= len(rest) < 1024 + 10_240 else samples


def tar_subject(dialect: str) -> Subject:
    return Subject(f"{dialect}.tar", tar_of(dialect), reference=samples_of_tar)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_damaged_tar_shards_are_noticed(dialect: str, tmp_path: Path) -> None:
    assert read_shards(str(write(tmp_path / "a.tar", tar_of(dialect)))) == samples_of_tar(tar_of(dialect))
    assert_noticed(tar_subject(dialect), range(120), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECTS)
def test_thousands_of_damaged_tar_shards_are_noticed(dialect: str, tmp_path: Path) -> None:
    assert_noticed(tar_subject(dialect), range(1000, 2700), tmp_path)


# -- helpers ----------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
