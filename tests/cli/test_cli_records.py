"""``sharded-loader records``: pack, inspect, index, and what each says about bad input."""

from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path

import pytest

from sharded_loader import RecordFileDataset
from sharded_loader.cli.main import main
from sharded_loader.recordio import MXIndexedRecordIO, unpack

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
    Path("pictures/readme.txt").write_text("not packed")
    assert main(["records", "pack", "pictures", "out.rec", "--labels", "labels.txt"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "out.rec: 3 records, 124 bytes; index in out.idx",
        "labels: 0 cat, 1 dog",
        "left out: 1 file directly in pictures, in no class",
    ]
    assert shown.err == ""
    assert Path("labels.txt").read_text() == "cat\t0\ndog\t1\n"
    with RecordFileDataset("out.rec") as records:
        found = list(map(unpack, records))
    assert [payload for _, payload in found] == list(PICTURES.values())
    assert [header.label for header, _ in found] == [0, 0, 1]


def test_files_of_several_kinds_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pictures/cat/notes.txt").write_text("not a picture")
    assert main(["records", "pack", "pictures", "out.rec"]) == 0
    kinds = {path.suffix for path in map(Path, PICTURES)}
    assert len(kinds) == 1
    assert f"files: 3 {kinds.pop()}, 1 .txt. To pack one kind only, give --suffix" in capsys.readouterr().out


def test_the_numbers_of_a_label_file_are_used_and_it_stays(capsys: pytest.CaptureFixture[str]) -> None:
    Path("labels.txt").write_text("dog\t3\ncat\t4\nbird\t5\n")
    assert main(["records", "pack", "pictures", "out.rec", "--labels", "labels.txt", "-q"]) == 0
    assert capsys.readouterr().out == ""
    with RecordFileDataset("out.rec") as records:
        assert [unpack(record)[0].label for record in records] == [4, 4, 3]
    assert Path("labels.txt").read_text() == "dog\t3\ncat\t4\nbird\t5\n"


def test_a_list_is_packed() -> None:
    Path("train.lst").write_text("8\t2\tdog/1.jpg\n")
    assert main(["records", "pack", "train.lst", "out.rec", "--root", "pictures", "-q"]) == 0
    with RecordFileDataset("out.rec") as records:
        [(header, payload)] = map(unpack, records)
    assert (header.label, header.id, payload) == (2.0, 8, PICTURES["dog/1.jpg"])


def test_an_output_that_exists_is_replaced_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    before = packed().read_bytes()
    options = ["records", "pack", "pictures", "out.rec", "--suffix", "none"]
    assert main(options) == 2
    assert "there is already out.rec and out.idx: give another name, or --force" in capsys.readouterr().err
    assert main([*options, "--force"]) == 2  # there are no such files, so nothing is replaced
    assert Path("out.rec").read_bytes() == before
    assert main(["records", "pack", "pictures/cat", "out.rec", "--force"]) == 0
    with RecordFileDataset("out.rec") as records:
        assert len(records) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent", "a.rec"], "Path 'absent' does not exist."),
        (["pictures", "a.bin"], "a.bin: give a name that ends in .rec"),
        (["pictures", "absent/a.rec"], "absent: create it first"),
        (["pictures", "a.rec", "--suffix", "gif"], "pictures has no files that end in .gif"),
        (["hollow", "a.rec"], "hollow has no files: give a folder"),
        (["pictures", "a.rec", "--root", "x"], "--root is for lists, and pictures is a folder"),
        (["list.txt", "a.rec", "--suffix", "jpg"], "--suffix is for folders, and list.txt is a list"),
        (["list.txt", "a.rec"], "list.txt, line 1: there is no file absent.jpg"),
        (["pictures/cat", "a.rec", "--labels", "new.txt"], "has no class names for --labels new.txt"),
        (["pictures", "a.rec", "--labels", "list.txt"], "list.txt, line 1: 'absent.jpg' is not name<TAB>number"),
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


@pytest.mark.skipif(sys.platform == "win32", reason="folders there have no such permission")
def test_a_folder_that_cannot_be_written_to_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode, **options: mode != os.W_OK)  # root may write everywhere
    assert main(["records", "pack", "pictures", "out.rec"]) == 2
    assert "cannot be written to: choose another folder" in capsys.readouterr().err


def test_a_full_disk_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_room(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(MXIndexedRecordIO, "write_idx", no_room)
    assert main(["records", "pack", "pictures", "out.rec"]) == 2
    assert capsys.readouterr().err == "sharded-loader records pack: out.rec: No space left on device\n"
    assert os.listdir(".") == ["pictures"]


def test_a_record_file_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    packed()
    assert main(["records", "inspect", "out.rec", "--first", "1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines() == [
        "file      out.rec, 124 bytes",
        "records   3; 3 with a label header",
        "sizes     smallest 7 bytes, median 7 bytes, largest 9 bytes",
        "contents  JPEG (3)",
        "labels    0 (2), 1 (1)",
        "index     out.idx: 3 keys",
        "",
        "record  offset  bytes  label  id  content",
        "     0       0      7      0   0     JPEG",
    ]
    assert shown.err == ""


def test_a_description_can_be_json_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    packed()
    assert main(["records", "inspect", "out.rec", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["records"], found["labels"], len(found["first"])) == (3, {"0": 2, "1": 1}, 3)
    assert main(["records", "inspect", "out.rec", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_inspect_says_where_a_file_is_damaged(capsys: pytest.CaptureFixture[str]) -> None:
    damaged()
    assert main(["records", "inspect", "out.rec", "-q"]) == 1
    where, what = capsys.readouterr().err.splitlines()
    assert "sharded-loader records inspect: out.rec is damaged at offset 40: no record at 40: " in where
    assert what.endswith("1 whole record before that can be read: pack or copy the file again")


def test_inspect_says_that_an_index_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    packed().with_suffix(".idx").write_text("0\t4\n")
    assert main(["records", "inspect", "out.rec", "-q"]) == 1
    assert "Write it again: sharded-loader records index out.rec --force" in capsys.readouterr().err


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
    assert "out.rec is damaged at offset 40, no index was written" in capsys.readouterr().err
    assert not Path("out.idx").exists()


@pytest.mark.parametrize("verb", ["inspect", "index"])
def test_a_file_that_is_not_there_is_one_line(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["records", verb, "absent.rec"]) == 2
    said = "Invalid value for 'FILE.rec': File 'absent.rec' does not exist."
    assert capsys.readouterr().err == f"sharded-loader records {verb}: {said}\n"
