"""Which files are packed, with which labels; both output files appear or neither. What a record file holds."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharded_loader import RecordFileDataset
from sharded_loader.cli.output import CannotRun
from sharded_loader.cli.record_files import (
    FileToPack,
    examine,
    find_folder,
    find_list,
    pack_files,
    read_labels,
    write_index,
    write_labels,
)
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, pack, unpack


def files(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"bytes of {name}".encode())
    return folder


def shown(entries: object, root: Path) -> list[tuple[int, object, str]]:
    return [(one.key, one.label, one.path.relative_to(root).as_posix()) for one in entries]  # type: ignore[attr-defined]


def test_each_sub_folder_is_a_class(tmp_path: Path) -> None:
    files(tmp_path, "dog/1.jpg", "cat/2.jpg", "cat/more/deep.PNG", "cat/.hidden", ".git/x", "readme.txt")
    (tmp_path / "hollow").mkdir()
    found = find_folder(tmp_path)
    assert found.names == {"cat": 0, "dog": 1}
    assert shown(found.entries, tmp_path) == [(0, 0, "cat/2.jpg"), (1, 0, "cat/more/deep.PNG"), (2, 1, "dog/1.jpg")]
    assert found.left_out == 1


def test_only_files_with_a_suffix_are_taken(tmp_path: Path) -> None:
    files(tmp_path, "cat/1.jpg", "cat/1.txt", "cat/2.JPG", "dog/1.txt")
    found = find_folder(tmp_path, [".jpg"])
    assert shown(found.entries, tmp_path) == [(0, 0, "cat/1.jpg"), (1, 0, "cat/2.JPG")]
    assert found.names == {"cat": 0}


def test_a_folder_without_sub_folders_has_no_classes(tmp_path: Path) -> None:
    found = find_folder(files(tmp_path, "b.jpg", "a.jpg"))
    assert (shown(found.entries, tmp_path), found.names) == ([(0, 0, "a.jpg"), (1, 0, "b.jpg")], {})


def test_classes_keep_the_numbers_of_a_label_file(tmp_path: Path) -> None:
    write_labels(tmp_path / "labels.txt", {"dog": 0, "a bird": 7, "cat": 5})
    names = read_labels(tmp_path / "labels.txt")
    assert names == {"dog": 0, "a bird": 7, "cat": 5}
    found = find_folder(files(tmp_path / "data", "cat/1", "dog/1"), names=names)
    assert [entry.label for entry in found.entries] == [5, 0]


@pytest.mark.parametrize("line", ["cat", "cat\tone", "\t1", "dog\t2", "cat\t-1"])
def test_a_wrong_line_of_a_label_file_is_named(line: str, tmp_path: Path) -> None:
    (tmp_path / "labels.txt").write_text(f"dog\t0\n\n{line}\n")
    with pytest.raises(CannotRun, match=r"labels.txt, line 3: .* is not name<TAB>number with a new name"):
        read_labels(tmp_path / "labels.txt")


def test_a_list_of_paths_takes_the_class_from_the_folder(tmp_path: Path) -> None:
    files(tmp_path, "dog/1.jpg", "cat/2.jpg")
    (tmp_path / "list.txt").write_text("dog/1.jpg\n\n  cat/2.jpg\n")
    found = find_list(tmp_path / "list.txt")
    assert shown(found.entries, tmp_path) == [(0, 1, "dog/1.jpg"), (1, 0, "cat/2.jpg")]
    assert found.names == {"cat": 0, "dog": 1}


def test_a_list_of_mxnet_has_keys_and_labels(tmp_path: Path) -> None:
    files(tmp_path / "images", "a.jpg", "b b.jpg")
    (tmp_path / "train.lst").write_text("7\t1.5\ta.jpg\n3\t0\t2\tb b.jpg\n")
    found = find_list(tmp_path / "train.lst", tmp_path / "images")
    assert shown(found.entries, tmp_path / "images") == [(7, 1.5, "a.jpg"), (3, (0, 2), "b b.jpg")]
    assert found.names == {}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"list.txt is empty: write a path on each line"),
        ("dog/1.jpg\nx/2.jpg\nx/3.jpg\n", r"list.txt, line 2: there is no file .*2.jpg \(1 more are missing\)"),
        ("1\t0\tdog/1.jpg\n1\t0\tdog/1.jpg\n", r"list.txt, line 2: the key 1 is also in line 1"),
        ("1\tdog\tdog/1.jpg\n", r"list.txt, line 1: .* is not key<TAB>label<TAB>path"),
        ("one\t0\tdog/1.jpg\n", r"list.txt, line 1: .* is not key<TAB>label<TAB>path"),
        ("-1\t0\tdog/1.jpg\n", r"list.txt, line 1: .* is not key<TAB>label<TAB>path"),
        ("1\tdog/1.jpg\n", r"list.txt, line 1: .* is not key<TAB>label<TAB>path"),
    ],
)
def test_a_wrong_list_is_named_with_its_line(text: str, said: str, tmp_path: Path) -> None:
    (files(tmp_path, "dog/1.jpg") / "list.txt").write_text(text)
    with pytest.raises(CannotRun, match=said):
        find_list(tmp_path / "list.txt")


def test_what_is_no_list_is_said(tmp_path: Path) -> None:
    (tmp_path / "image.jpg").write_bytes(b"\xff\xd8\xff")
    with pytest.raises(CannotRun, match=r"image.jpg is not a text file: give a folder, or a list"):
        find_list(tmp_path / "image.jpg")


@pytest.mark.parametrize(
    ("suffixes", "said"), [((), r"has no files: "), ((".gif",), r"has no files that end in .gif: ")]
)
def test_a_folder_without_files_is_said(suffixes: tuple[str, ...], said: str, tmp_path: Path) -> None:
    if suffixes:
        files(tmp_path, "cat/1.jpg")
    with pytest.raises(CannotRun, match=said):
        find_folder(tmp_path, suffixes)


def test_a_class_without_a_number_is_named(tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match=r"no number for 'cat' in the file of --labels: add it there"):
        find_folder(files(tmp_path, "cat/1", "dog/1"), names={"dog": 1})


def test_the_bytes_and_the_labels_come_back(tmp_path: Path) -> None:
    files(tmp_path, "a.jpg", "b.jpg")
    done: list[int] = []
    entries = [FileToPack(9, 3.0, tmp_path / "a.jpg"), FileToPack(4, (1.0, 2.0), tmp_path / "b.jpg")]
    size = pack_files(entries, tmp_path / "out.rec", done.append)
    assert size == (tmp_path / "out.rec").stat().st_size
    assert done == [1, 2]
    with RecordFileDataset(tmp_path / "out.rec") as records:
        (one, first), (two, second) = map(unpack, records)
    assert (first, second) == (b"bytes of a.jpg", b"bytes of b.jpg")
    assert (one.label, one.id, list(two.label), two.id) == (3.0, 9, [1.0, 2.0], 4)
    assert sorted(os.listdir(tmp_path)) == ["a.jpg", "b.jpg", "out.idx", "out.rec"]


def test_if_a_file_cannot_be_read_nothing_is_written_and_nothing_replaced(tmp_path: Path) -> None:
    files(tmp_path, "a.jpg", "out.rec", "out.idx")
    with pytest.raises(OSError):
        pack_files(
            [FileToPack(0, 0.0, tmp_path / "a.jpg"), FileToPack(1, 0.0, tmp_path / "gone.jpg")], tmp_path / "out.rec"
        )
    assert sorted(os.listdir(tmp_path)) == ["a.jpg", "out.idx", "out.rec"]
    assert (tmp_path / "out.rec").read_bytes() == b"bytes of out.rec"


def test_a_file_that_is_too_large_for_a_record_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_loader.recordio.files.MAX_LENGTH", 30)
    with pytest.raises(CannotRun, match=r"a.jpg: it has 14 bytes, and a record has room for 30"):
        pack_files([FileToPack(0, 0.0, files(tmp_path, "a.jpg") / "a.jpg")], tmp_path / "out.rec")


@pytest.mark.parametrize("label", ["1e300", "16777217", "9007199254740993", "5\t123456789"])
def test_a_label_that_does_not_fit_is_named(tmp_path: Path, label: str) -> None:
    files(tmp_path, "a.jpg")
    (tmp_path / "list.lst").write_text(f"0\t{label}\ta.jpg\n")
    number = label.split("\t")[-1].replace("e", r"e\+")
    with pytest.raises(CannotRun, match=rf"a.jpg: .*does not fit \(the label {number} would be stored as"):
        pack_files(find_list(tmp_path / "list.lst").entries, tmp_path / "out.rec")


def test_large_numbers_of_classes_stay_what_they_are(tmp_path: Path) -> None:
    rec = tmp_path / "out.rec"
    pack_files(
        [FileToPack(0, 16777214, files(tmp_path, "a.jpg") / "a.jpg"), FileToPack(1, 0.1, tmp_path / "a.jpg")], rec
    )
    assert examine(rec)[0].labels == {"16777214": 1, "0.1": 1}


def test_an_index_has_a_key_for_each_offset(tmp_path: Path) -> None:
    write_index(tmp_path / "x.rec", [0, 16, 40])
    assert (tmp_path / "x.idx").read_bytes() == b"0\t0\n1\t16\n2\t40\n"


# -- what is in a record file ------------------------------------------------------------------------------------------

JPEG, PNG = b"\xff\xd8\xff\xe0 a photo", b"\x89PNG\r\n\x1a\n a drawing"


def write_records(path: Path, *records: bytes) -> list[int]:
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
    offsets = write_records(path, *records)
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
    offsets = write_records(path, b"one", b"two", b"three")
    content = bytearray(path.read_bytes())
    content[offsets[damaged]] ^= 0xFF
    path.write_bytes(content)
    found, _ = examine(path)
    assert (found.records, found.damage_offset) == (damaged, offsets[damaged])
    assert found.damage is not None and found.damage.startswith(f"no record at {offsets[damaged]}: ")
    assert ("Is it a RecordIO file?" in found.damage) == (damaged == 0)


def test_a_file_that_ends_too_soon_is_damaged(tmp_path: Path) -> None:
    path = tmp_path / "some.rec"
    offsets = write_records(path, b"one", b"two")
    path.write_bytes(path.read_bytes()[:-2])
    found, _ = examine(path)
    assert (found.records, found.damage_offset) == (1, offsets[1])
    assert found.damage is not None and "the file ends at" in found.damage


def test_a_file_without_records_has_none(tmp_path: Path) -> None:
    write_records(tmp_path / "some.rec")
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
    assert write_records(tmp_path / "some.rec", b"one", b"two") == [0, 12]
    (tmp_path / "some.idx").write_text(index)
    found, _ = examine(tmp_path / "some.rec")
    assert said in found.index
    assert found.index_is_wrong == wrong


def test_an_index_of_the_librarys_own_is_right(tmp_path: Path) -> None:
    with MXIndexedRecordIO(tmp_path / "x.idx", tmp_path / "x.rec", "w") as file:
        file.write_idx(5, b"five")
    found, _ = examine(tmp_path / "x.rec")
    assert (found.index, found.index_is_wrong) == ("x.idx: 1 key", False)
