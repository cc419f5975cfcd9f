"""``sharded-loader index`` writes the file by which shards open with one request, and names what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from sharded_loader import ShardDataset
from sharded_loader.cli import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of two lines each."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for shard in range(3):
        (tmp_path / f"{shard}.txt").write_text("one\ntwo\n")
    return tmp_path


def test_it_writes_one_file_beside_the_shards(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", str(folder / "*.txt")]) == 0
    assert capsys.readouterr().out == f"{folder / 'shards.index'}: 3 shards, 6 samples\n"
    (folder / "3.txt").write_text("three\n")
    assert main(["index", str(folder / "*.txt"), "-q"]) == 0  # without a warning about the file that is replaced
    assert capsys.readouterr() == ("", "")
    assert list(ShardDataset(folder / "shards.index"))[-2:] == ["two", "three"]


def test_another_place_format_and_options(folder: Path) -> None:
    where = folder / "other.index"
    (folder / "0.csv").write_text("a,b\n")
    options = ["--format", "lines", "--storage-options", '{"auto_mkdir": true}', "--output", str(where)]
    assert main(["index", str(folder / "0.csv"), *options, "-q"]) == 0
    assert list(ShardDataset(where, format="lines")) == ["a,b"]


def test_a_list_names_other_places_that_are_trusted(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "lists").mkdir()
    (folder / "lists" / "l.json").write_text('["../0.txt"]')
    given = ["index", str(folder / "lists" / "l.json"), "--output", str(folder / "lists" / "x.index"), "-q"]
    assert main(given) == 2
    assert "names '../0.txt'" in capsys.readouterr().err
    assert main([*given, "--trust", "s3://b/", "--trust", str(folder)]) == 0


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
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    text: str,
) -> None:
    monkeypatch.chdir(folder)
    assert main(["index", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and text in shown.err and shown.err.count("\n") == 1
