"""``sharded-loader records``, ``index`` and ``diff``: the files that they write, and what they say of bad input."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from sharded_loader import RecordFileDataset, ShardDataset, ShardedDataLoader
from sharded_loader.cli import main
from sharded_loader.recordio import MXIndexedRecordIO, MXRecordIO, unpack
from sharded_loader.torch import DataLoader

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


def test_a_folder_is_packed_and_says_what_it_holds(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("readme.txt", "cat/.hidden", ".git/x"):
        Path("pictures", name).parent.mkdir(exist_ok=True)
        Path("pictures", name).write_text("not packed")
    assert main(["records", "pack", "pictures", "out.rec"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "out.rec: 3 records, 124 bytes; index in out.idx\nlabels: 0 cat, 1 dog\n" and shown.err == ""
    with RecordFileDataset("out.rec") as records:
        found = list(map(unpack, records))
    assert [payload for _, payload in found] == list(PICTURES.values())
    assert [header.label for header, _ in found] == [0, 0, 1]


def test_an_output_that_exists_is_replaced_only_by_force(capsys: pytest.CaptureFixture[str]) -> None:
    before = packed().read_bytes()
    Path("hollow").mkdir()
    options = ["records", "pack", "hollow", "out.rec"]
    assert main(options) == 2
    assert "there is already out.rec and out.idx: give another name, or --force" in capsys.readouterr().err
    assert main([*options, "--force"]) == 2  # there are no files, so nothing is replaced
    assert Path("out.rec").read_bytes() == before
    assert main(["records", "pack", "pictures/cat", "out.rec", "--force"]) == 0
    with RecordFileDataset("out.rec") as records:  # a folder without sub-folders has no classes
        assert [(header.label, header.id) for header, _ in map(unpack, records)] == [(0, 0), (0, 1)]


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
def test_bad_input_is_one_line_and_nothing_is_written(arguments: list[str], said: str, capsys: Any) -> None:
    Path("hollow").mkdir()
    Path("list.txt").write_text("absent.jpg\n")
    before = sorted(os.listdir("."))
    assert main(["records", "pack", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1
    assert sorted(os.listdir(".")) == before


def test_a_full_disk_or_too_large_a_file_is_one_line_and_leaves_nothing(monkeypatch: Any, capsys: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sharded_loader.recordio.MAX_LENGTH", 30)
        assert main(["records", "pack", "pictures", "out.rec"]) == 2
        assert "1.jpg: " in (said := capsys.readouterr().err) and "is too long, RecordIO has room for 30" in said
    no_room = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(MXIndexedRecordIO, "write_idx", no_room)
    assert main(["records", "pack", "pictures", "out.rec"]) == 2
    assert capsys.readouterr().err == "sharded-loader records pack: out.rec: No space left on device\n"
    assert os.listdir(".") == ["pictures"]


@pytest.mark.parametrize("moves", [0, 1])
def test_no_index_of_other_records_is_left_wherever_the_process_ends(moves: int, monkeypatch: Any) -> None:
    packed()
    Path("pictures/dog/2.jpg").write_bytes(b"two")
    replace, left = Path.replace, list(range(moves))

    def move(self: Path, target: Path) -> Path:
        if not left:
            raise KeyboardInterrupt
        left.pop()
        return replace(self, target)

    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, SystemExit)):
        patch.setattr(Path, "replace", move)
        raise SystemExit(main(["records", "pack", "pictures", "out.rec", "--force"]))
    with RecordFileDataset("out.rec") as records:
        assert len(records) == 3 + moves


def test_links_are_followed_but_not_in_a_circle_and_no_folder_is_left_out(monkeypatch: Any, capsys: Any) -> None:
    os.symlink("../pictures/dog", "pictures/wolf")
    assert packed().exists() and len(RecordFileDataset("out.rec")) == 4
    os.symlink("..", "pictures/dog/back")
    assert main(["records", "pack", "pictures", "out.rec", "--force"]) == 2
    assert "dog/back: this link leads back to a folder that it is in" in capsys.readouterr().err
    os.unlink("pictures/dog/back")
    scan = os.scandir

    def refuse(path: Any) -> Any:
        if str(path).endswith("dog"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert main(["records", "pack", "pictures", "out.rec", "--force"]) == 2
    assert "pictures/dog: Permission denied" in capsys.readouterr().err


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
    assert not Path("some.idx").exists()


def test_an_index_is_written_again(capsys: pytest.CaptureFixture[str]) -> None:
    index = packed().with_suffix(".idx")
    before = index.read_text()
    assert main(["records", "index", "out.rec"]) == 2
    assert "there is already out.idx: give another name, or --force to replace it" in capsys.readouterr().err
    index.write_text("wrong")
    assert main(["records", "index", "out.rec", "--force"]) == 0
    assert capsys.readouterr().out == "out.idx: 3 keys\n"
    assert index.read_text() == before
    assert main(["records", "index", "absent.rec"]) == 2
    said = "Invalid value for 'FILE.rec': File 'absent.rec' does not exist."
    assert capsys.readouterr().err == f"sharded-loader records index: {said}\n"


@pytest.fixture
def shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of two lines each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(3):
        (tmp_path / f"{shard}.txt").write_text("one\ntwo\n")
    return tmp_path


def test_it_writes_one_file_beside_the_shards_or_elsewhere(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(shards / "*.txt")]) == 0
    assert capsys.readouterr().out == f"{shards / 'shards.index'}: 3 shards, 6 samples\n"
    (shards / "3.txt").write_text("three\n")
    assert main(["index", str(shards / "*.txt"), "-q"]) == 0  # without a warning about the file that is replaced
    assert capsys.readouterr() == ("", "")
    assert list(ShardDataset(shards / "shards.index"))[-2:] == ["two", "three"]
    where = shards / "other.index"
    (shards / "0.csv").write_text("a,b\n")
    options = ["--format", "lines", "--storage-options", '{"auto_mkdir": true}', "--output", str(where)]
    assert main(["index", str(shards / "0.csv"), *options, "-q"]) == 0
    assert list(ShardDataset(where, format="lines")) == ["a,b"]


def test_a_list_names_other_places_that_are_trusted(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (shards / "lists").mkdir()
    (shards / "lists" / "l.json").write_text('["../0.txt"]')
    given = ["index", str(shards / "lists" / "l.json"), "--output", str(shards / "lists" / "x.index"), "-q"]
    assert main(given) == 2
    assert "names '../0.txt'" in capsys.readouterr().err
    assert main([*given, "--trust", "s3://b/", "--trust", str(shards)]) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gone.txt"], r"gone.txt: the shard is missing"),
        (["0.txt", "--output", "x.json"], "give the index file a name that ends in .index"),
        (["0.txt", "--storage-options", "x"], "Expecting value"),
        (["0.txt", "--format", "zip"], "format 'zip' is unknown"),
        (["0.txt", "--output", "no/folder/x.index"], "No such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(
    shards: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], text: str
) -> None:
    monkeypatch.chdir(shards)
    assert main(["index", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and text in shown.err and shown.err.count("\n") == 1


def run(capsys: pytest.CaptureFixture[str], *arguments: Any) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def dump(path: Path, content: Any) -> Path:
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_the_first_step_that_differs_is_named(kind: Any, tmp_path: Path, capsys: Any) -> None:
    loaders = [kind(range(40), 4, shuffle=True, seed=1, skip=skip) for skip in (None, [(3, 3)])]
    files = [dump(tmp_path / f"{n}.json", loader.fingerprint(0).as_dict()) for n, loader in enumerate(loaders)]
    code, out, err = run(capsys, "diff", *files)
    assert (code, err) == (1, "")
    assert out == "The first step that differs is step 3 of epoch 0.\nThe skip was (), and is ((3, 3),).\n"
    assert run(capsys, "diff", *files, "--quiet") == (1, "", "")
    assert run(capsys, "diff", files[0], files[0]) == (0, "No step differs.\n", "")
    code, _, err = run(capsys, "diff", files[0], dump(tmp_path / "state", loaders[1].state_dict()))
    assert (code, err.count("\n")) == (2, 1)
    assert "give a file with json.dumps(loader.fingerprint().as_dict())\n" in err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"fingerprint": 3}', '{"version": 99}'])
def test_what_is_no_run_is_one_line(content: str, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a").write_text(content)
    found = dump(tmp_path / "b", ShardedDataLoader(range(4), 2).fingerprint().as_dict())
    for files in ((tmp_path / "a", found), (found, tmp_path / "a")):
        code, out, err = run(capsys, "diff", *files)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert "a has no fingerprint" in err
    assert "does not exist" in run(capsys, "diff", found, tmp_path / "absent")[2]
