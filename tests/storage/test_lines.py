"""Lines of text files by index: plain text, TSV and JSON lines, here or in a store; a line is what an editor shows."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import pytest

from sharded_loader import ShardDataset, ShardError
from sharded_loader.storage import records


def made(path: Path, content: bytes, **more: Any) -> ShardDataset:
    path.write_bytes(content)
    return ShardDataset(path, index_folder=path.parent / "indexes", **more)


@pytest.mark.costly(16)
@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"one\ntwo", ["one", "two"]),
        (b"one\n\ntwo\n", ["one", "", "two"]),
        (b"one\r\ntwo\r\n\r\nthree", ["one", "two", "", "three"]),
        (b"a\rb\r\nc\r", ["a\rb", "c\r"]),
        ("grün\tschön\nélan\u2028 \x0b\n".encode(), ["grün\tschön", "élan\u2028 \x0b"]),
        (b"\xef\xbb\xbfmark\n\xef\xbb\xbfinside\n", ["mark", "\ufeffinside"]),
        (b"\0\n ", ["\0", " "]),
    ],
)
@pytest.mark.parametrize("piece", [1, 4, records.PIECE])
def test_line_i_is_sample_i(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, lines: list[str], piece: int
) -> None:
    monkeypatch.setattr(records, "PIECE", piece)
    dataset = made(tmp_path / "words.txt", content)
    assert list(dataset) == lines and dataset.lengths.tolist() == [len(lines)]
    assert dataset.__getitems__(range(len(lines))[::-1]) == lines[::-1]


def test_several_files_have_one_index_and_an_empty_one_has_no_lines(tmp_path: Path) -> None:
    long = "x" * (3 * records.PIECE + 17)  # larger than what is read at once
    for number, content in enumerate(["a\nb\n", "", f"c\n{long}"]):
        (tmp_path / f"{number}.tsv").write_text(content)
    dataset = ShardDataset(str(tmp_path / "*.tsv"), index_folder=tmp_path / "indexes")
    assert list(dataset) == ["a", "b", "c", long] and dataset.lengths.tolist() == [2, 0, 2]
    assert repr(dataset) == "ShardDataset(3 lines shards, 4 samples)"
    for name in ("a.txt", "a.tsv", "a.jsonl", "a.ndjson"):
        assert list(made(tmp_path / name, b"1\n2")) == ["1", "2"]
    assert list(made(tmp_path / "names", b"1\n2", format="lines")) == ["1", "2"]
    with pytest.raises(ValueError, match="'records', 'lines'"):
        made(tmp_path / "names", b"", format="line")


def test_the_index_is_kept_and_takes_four_bytes_for_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = made(tmp_path / "words.txt", b"word\n" * 10_000)
    [kept] = (tmp_path / "indexes").glob("*.arrays")
    assert kept.stat().st_size < 42_000
    monkeypatch.setattr(records.Lines, "index", None)  # not called again
    again = ShardDataset(tmp_path / "words.txt", index_folder=tmp_path / "indexes")
    assert len(again) == len(dataset) == 10_000 and again[9_999] == "word"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (gzip.compress(b"a\nb\n", mtime=0), " is gzip, no plain text: decompress it"),
        (b"\x28\xb5\x2f\xfd" + bytes(50), " is zstd, no plain text"),
        ("a\nb".encode("utf-16"), " is UTF-16, no plain text: decompress it, or write it as UTF-8"),
        (b"one\ntwo\ngr\xfcn\n", r", line 3, offset 10: this is not UTF-8 .*Convert the file"),
    ],
)
def test_a_file_that_is_no_plain_text_is_an_error(tmp_path: Path, content: bytes, text: str) -> None:
    with pytest.raises(ShardError, match=rf"words\.txt{text}"):
        dataset = made(tmp_path / "words.txt", content)
        assert b"two" in content and dataset[1] == "two"
        dataset[2]


@pytest.mark.parametrize("change", ["cut", "written", "grown"])
def test_a_file_that_was_changed_is_an_error(tmp_path: Path, change: str) -> None:
    path = tmp_path / "words.txt"
    dataset = made(path, b"one\ntwo\nthree\n")
    assert dataset[2] == "three"
    if change == "cut":
        os.truncate(path, 5)
    else:
        path.write_bytes(b"six\nten\nseven\n" if change == "written" else b"one\ntwo\nthree\nfour\n")
    with pytest.raises(ShardError, match=r"words\.txt (has|was) .* make the dataset again"):
        dataset[2]


def test_lines_have_no_columns_and_one_group_for_each_shard(tmp_path: Path) -> None:
    assert made(tmp_path / "a.txt", b"one\ntwo\n").group_lengths.tolist() == [2]
    with pytest.raises(ValueError, match=r"columns=\['x'\]: shards of the format lines have no columns"):
        ShardDataset(tmp_path / "a.txt", index_folder=tmp_path, columns=["x"])
