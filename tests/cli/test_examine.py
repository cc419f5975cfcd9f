"""What a record file holds, and where it is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharded_loader.cli.examine import examine
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, pack

JPEG, PNG = b"\xff\xd8\xff\xe0 a photo", b"\x89PNG\r\n\x1a\n a drawing"


def write(path: Path, *records: bytes) -> list[int]:
    """The records as a file; where each begins."""
    offsets = []
    with MXRecordIO(path, "w") as file:
        for record in records:
            offsets.append(file.tell())
            file.write(record)
    return offsets


def test_sizes_labels_and_contents_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "some.rec"
    records = [
        pack((0, 1.0, 7, 0), JPEG),
        pack((0, [1.0, 0.5], 8, 0), PNG),
        pack((0, 1.0, 9, 0), b""),
        JPEG,
        b"plain text of some length, without a header",
    ]
    offsets = write(path, *records)
    seen: list[int] = []
    found, begins = examine(path, 2, seen.append)
    assert (found.records, found.headers, found.nbytes) == (5, 3, path.stat().st_size)
    assert (found.smallest, found.median, found.largest) == (0, len(JPEG), len(records[4]))
    assert found.labels == {"1": 2, "1 0.5": 1}
    assert found.contents == {"JPEG": 2, "PNG": 1, "empty": 1, "other": 1}
    assert [(one.offset, one.nbytes, one.label, one.id, one.content) for one in found.first] == [
        (0, len(JPEG), "1", 7, "JPEG"),
        (offsets[1], len(PNG), "1 0.5", 8, "PNG"),
    ]
    assert (found.damage, found.damage_offset, found.index) == (None, None, "none")
    assert seen == list(begins) == offsets


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_damage_is_found_at_its_offset_and_what_comes_before_is_counted(damaged: int, tmp_path: Path) -> None:
    path = tmp_path / "some.rec"
    offsets = write(path, b"one", b"two", b"three")
    content = bytearray(path.read_bytes())
    content[offsets[damaged]] ^= 0xFF
    path.write_bytes(content)
    found, _ = examine(path)
    assert (found.records, found.damage_offset) == (damaged, offsets[damaged])
    assert found.damage is not None and found.damage.startswith(f"no record at {offsets[damaged]}: ")
    assert ("Is it a RecordIO file?" in found.damage) == (damaged == 0)


def test_a_file_that_ends_too_soon_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "some.rec"
    offsets = write(path, b"one", b"two")
    path.write_bytes(path.read_bytes()[:-2])
    found, _ = examine(path)
    assert (found.records, found.damage_offset) == (1, offsets[1])
    assert found.damage is not None and "the file ends at" in found.damage


def test_a_file_without_records_has_none(tmp_path: Path) -> None:
    write(tmp_path / "some.rec")
    found, _ = examine(tmp_path / "some.rec")
    assert (found.records, found.damage, found.contents, found.median) == (0, None, {}, 0)


@pytest.mark.parametrize(
    ("index", "said", "wrong"),
    [
        ("0\t0\n1\t12\n", "some.idx: 2 keys", False),
        ("0\t12\n", "some.idx: 1 key; 1 record has no key", False),
        ("0\t0\n1\t16\n", "some.idx: 1 of 2 keys lead to no whole record", True),
        ("0\tzero\n", "is no line 'key<TAB>offset'", True),
    ],
)
def test_the_index_is_compared_with_the_records(index: str, said: str, wrong: bool, tmp_path: Path) -> None:
    assert write(tmp_path / "some.rec", b"one", b"two") == [0, 12]
    (tmp_path / "some.idx").write_text(index)
    found, _ = examine(tmp_path / "some.rec")
    assert said in found.index
    assert found.index_is_wrong == wrong


def test_an_index_of_the_librarys_own_is_right(tmp_path: Path) -> None:
    with MXIndexedRecordIO(tmp_path / "x.idx", tmp_path / "x.rec", "w") as file:
        file.write_idx(5, b"five")
    found, _ = examine(tmp_path / "x.rec")
    assert (found.index, found.index_is_wrong) == ("x.idx: 1 key", False)
