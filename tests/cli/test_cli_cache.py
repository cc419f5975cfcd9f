"""``sharded-loader cache`` tells what is in a file, and deletes nothing else than caches."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sharded_loader import SimpleDataset
from sharded_loader.cli.main import main


@pytest.fixture
def file(tmp_path: Path) -> Path:
    cached = SimpleDataset(range(20)).cache(path=tmp_path / "it.cache", key="v 1")
    assert [cached[index] for index in (3, 4, 3)] == [3, 4, 3]
    return tmp_path / "it.cache"


def test_info_says_what_is_there(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "info", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: 2 of 20 samples, 16 bytes\nkey: v 1; version 1 of the layout\n"
    assert main(["cache", "info", "--json", str(file)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"version": 1, "length": 20, "key": "v 1", "stored": 2, "nbytes": 16}


def test_clear_deletes_the_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "clear", str(file)]) == 0
    assert capsys.readouterr().out == f"deleted {file}\n" and not file.exists()


def test_clear_deletes_a_damaged_cache(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(file.read_bytes()[:70])
    assert main(["cache", "info", str(file)]) == 2
    assert "is no cache of samples that this version of the library can read" in capsys.readouterr().err
    assert main(["cache", "clear", str(file), "-q"]) == 0 and not file.exists()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["info", "clear"])
def test_another_file_stays(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "thesis.txt"
    other.write_text("all of it")
    assert main(["cache", verb, str(other)]) == 2
    assert f"{other} is no cache of samples" in capsys.readouterr().err and other.read_text() == "all of it"
    assert main(["cache", verb, str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err
