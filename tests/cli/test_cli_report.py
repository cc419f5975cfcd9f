"""``sharded-loader report``: one file is told, those of all ranks are joined, anything else is a line on stderr."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.cli.main import CANNOT_RUN, main


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The reports of two ranks."""
    found = []
    for rank in range(2):
        with ShardedDataLoader(range(12), 3, num_replicas=2, rank=rank) as loader:
            list(loader)
            found.append(str(tmp_path / f"rank{rank}.html"))
            loader.report(found[-1])
    return found


def test_one_file_is_printed_as_the_loader_prints_it(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", files[0]]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("6 samples in 2 batches")
    assert "<range of length" not in shown and "num_replicas  2" in shown
    assert main(["report", "--quiet", files[0]]) == 0
    assert shown.startswith(capsys.readouterr().out.rstrip("\n"))


def test_files_of_all_ranks_are_joined(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", *files]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 ranks" in shown
    assert [line.split()[0] for line in shown.splitlines()[-2:]] == ["0", "1"]
    assert main(["report", "-q", *files]) == 0
    assert "2 of 2 ranks" not in capsys.readouterr().out


def test_what_is_no_report_is_one_line(files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other, damaged, binary = tmp_path / "other.html", tmp_path / "damaged.html", tmp_path / "binary.html"
    other.write_text("<h1>Hello</h1>")
    damaged.write_text(Path(files[1]).read_text(encoding="utf-8")[:-50])
    binary.write_bytes(os.urandom(500) + b"\xff")
    no_report = "give files that loader.report(path) has written"
    cases = [
        ([str(other)], no_report),
        ([files[0], str(damaged)], no_report),
        ([str(binary)], no_report),
        ([str(tmp_path / "missing.html")], "give files that exist"),
        ([str(tmp_path)], "cannot be read"),
        ([], "FILES"),
    ]
    for given, why in cases:
        assert main(["report", *given]) == CANNOT_RUN
        shown = capsys.readouterr()
        assert shown.out == "" and len(shown.err.splitlines()) == 1
        assert shown.err.startswith("sharded-loader report: ") and why in shown.err
