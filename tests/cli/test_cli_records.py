"""``sharded-loader records``: pack, index, and what each says about bad input."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from sharded_loader import RecordFileDataset
from sharded_loader.cli import main
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, unpack

PICTURES = {"cat/1.jpg": b"\xff\xd8\xff cat", "cat/2.jpg": b"\xff\xd8\xff cat 2", "dog/1.jpg": b"\xff\xd8\xff dog"}


@pytest.fixture(autouse=True)
def pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in PICTURES.items():
        path = tmp_path / "pictures" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def packed() -> Path:
    assert main(["records", "pack", "pictures", "out.rec", "-q"]) == 0
    return Path("out.rec")


def damaged() -> Path:
    """A file whose second record is damaged, and without an index."""
    path = packed()
    offset = int(path.with_suffix(".idx").read_text().splitlines()[1].split("\t")[1])
    content = bytearray(path.read_bytes())
    content[offset] ^= 0xFF
    path.write_bytes(content)
    path.with_suffix(".idx").unlink()
    return path


def test_a_folder_is_packed_and_says_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("readme.txt", "cat/.hidden", ".git/x"):
        Path("pictures", name).parent.mkdir(exist_ok=True)
        Path("pictures", name).write_text("not packed")
    assert main(["records", "pack", "pictures", "out.rec"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "out.rec: 3 records, 124 bytes; index in out.idx",
        "labels: 0 cat, 1 dog",
    ]
    assert shown.err == ""
    with RecordFileDataset("out.rec") as records:
        found = list(map(unpack, records))
    assert [payload for _, payload in found] == list(PICTURES.values())
    assert [header.label for header, _ in found] == [0, 0, 1]


def test_a_folder_without_sub_folders_has_no_classes() -> None:
    assert main(["records", "pack", "pictures/cat", "out.rec", "-q"]) == 0
    with RecordFileDataset("out.rec") as records:
        assert [(header.label, header.id) for header, _ in map(unpack, records)] == [(0, 0), (0, 1)]


def test_a_file_that_is_too_large_for_a_record_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sharded_loader.recordio.MAX_LENGTH", 30)
    assert main(["records", "pack", "pictures", "out.rec"]) == 2
    assert "1.jpg: " in (error := capsys.readouterr().err) and "is too long, RecordIO has room for 30" in error


def test_an_output_that_exists_is_replaced_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    before = packed().read_bytes()
    Path("hollow").mkdir()
    options = ["records", "pack", "hollow", "out.rec"]
    assert main(options) == 2
    assert "there is already out.rec and out.idx: give another name, or --force" in capsys.readouterr().err
    assert main([*options, "--force"]) == 2  # there are no files, so nothing is replaced
    assert Path("out.rec").read_bytes() == before
    assert main(["records", "pack", "pictures/cat", "out.rec", "--force"]) == 0
    with RecordFileDataset("out.rec") as records:
        assert len(records) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent", "a.rec"], "Directory 'absent' does not exist."),
        (["pictures", "a.bin"], "a.bin: give a name that ends in .rec"),
        (["pictures", "absent/a.rec"], "No such file or directory"),
        (["list.txt", "a.rec"], "Directory 'list.txt' is a file."),
        (["hollow", "a.rec"], "hollow has no files: give a folder"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("hollow").mkdir()
    Path("list.txt").write_text("absent.jpg\n")
    before = sorted(os.listdir("."))
    assert main(["records", "pack", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1
    assert sorted(os.listdir(".")) == before


def test_a_full_disk_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MXIndexedRecordIO, "write_idx", no_room)
    assert main(["records", "pack", "pictures", "out.rec"]) == 2
    assert capsys.readouterr().err == "sharded-loader records pack: out.rec: No space left on device\n"
    assert os.listdir(".") == ["pictures"]


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("kind", ["other bytes", "cut"])
def test_damage_is_named_with_its_offset(number: int, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    offsets = []
    with MXRecordIO("some.rec", "w") as file:
        for record in (b"one", b"two", b"three"):
            offsets.append(file.tell())
            file.write(record)
    content = bytearray(Path("some.rec").read_bytes())
    content[offsets[number]] ^= 0xFF
    Path("some.rec").write_bytes(content if kind == "other bytes" else content[: offsets[number] + 6])
    assert main(["records", "index", "some.rec", "-q"]) == 1
    [where] = capsys.readouterr().err.splitlines()
    assert f"some.rec, offset {offsets[number]}: " in where and f"damaged after {number} record" in where


def test_an_index_is_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    index = packed().with_suffix(".idx")
    before = index.read_text()
    assert main(["records", "index", "out.rec"]) == 2
    assert "there is already out.idx: give another name, or --force to replace it" in capsys.readouterr().err
    index.write_text("wrong")
    assert main(["records", "index", "out.rec", "--force"]) == 0
    assert capsys.readouterr().out == "out.idx: 3 keys\n"
    assert index.read_text() == before


def test_no_index_is_written_for_a_damaged_file(capsys: pytest.CaptureFixture[str]) -> None:
    damaged()
    assert main(["records", "index", "out.rec"]) == 1
    assert "out.rec, offset 40: no record at 40: " in capsys.readouterr().err
    assert not Path("out.idx").exists()


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records", "index", "absent.rec"]) == 2
    said = "Invalid value for 'FILE.rec': File 'absent.rec' does not exist."
    assert capsys.readouterr().err == f"sharded-loader records index: {said}\n"
