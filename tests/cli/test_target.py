"""The user's dataset is found by its name, and every way to fail is one line that says what to do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from sharded_loader.cli.output import CannotRun
from sharded_loader.cli.target import find_dataset

SOURCE = """
class Numbers:
    size = 5
    def __len__(self): return self.size
    def __getitem__(self, index): return index

class Stream:
    def __iter__(self): return iter(range(3))

class Folder(Numbers):
    def __init__(self, root): ...

numbers = Numbers()
stream = Stream()
empty = []
used_up = iter([1])
five = 5

def make(): return Numbers()
def generate(): yield 1
def part(number, count): yield number
def needs(root): return Numbers()
def fails(): raise OSError("no such disk")
def nothing(): return None

class holder:
    train = numbers
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A folder with the user's modules, which are forgotten at the end."""
    (tmp_path / "users_data.py").write_text(SOURCE)
    (tmp_path / "users_broken.py").write_text("import numpy\n\nimport not_installed_anywhere\n")
    (tmp_path / "users_script.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "json.py").write_text("data = [1]\n")
    (tmp_path / "users_package").mkdir()
    (tmp_path / "users_package" / "__init__.py").write_text("")
    (tmp_path / "users_package" / "data.py").write_text("from . import other\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("users_") or name == "data"]:
        del sys.modules[name]


@pytest.mark.parametrize("place", ["users_data", "users_data.py", "./users_data.py"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("numbers", "Numbers"),
        ("Numbers", "Numbers"),
        ("make", "Numbers"),
        ("holder.train", "Numbers"),
        ("stream", "Stream"),
        ("generate", "function"),
        ("part", "function"),
    ],
)
def test_a_dataset_is_found(place: str, name: str, kind: str, folder: Path) -> None:
    assert type(find_dataset(f"{place}:{name}")).__name__ == kind


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("users_data", r"does not name a dataset: write module:NAME or path/to/file.py:NAME"),
        ("users_data.py", r"does not name a dataset: write module:NAME"),
        ("users_data:", r"does not name a dataset: write module:NAME"),
        (":numbers", r"does not name a dataset: write module:NAME"),
        ("users_data:number", r"users_data has no 'number': did you mean 'numbers'\?"),
        ("users_data:xyz", r"users_data has no 'xyz': look for the name in the file"),
        ("nowhere_at_all:x", r"there is no module 'nowhere_at_all' in .*: change to the folder that contains it"),
        ("users_data.inner:x", r"there is no module 'users_data.inner'"),
        ("nowhere.py:x", r"there is no file nowhere.py: write the path of a Python file"),
        ("some/where:x", "or write path/to/file.py:NAME"),
        (
            "users_broken:x",
            r"ModuleNotFoundError: No module named 'not_installed_anywhere' \(users_broken.py, line 3\)",
        ),
        ("users_script:x", r"importing users_script failed: SystemExit: 3"),
        ("users_package/data.py:x", r"relative import.*: write package.module:NAME instead of a path"),
        ("json.py:data", r"'json' is also the name of a module that Python has imported: rename the file"),
        ("users_data:needs", r"missing 1 required.*write a function without arguments that returns the dataset"),
        ("users_data:Folder", r"missing 1 required.*write a function without arguments that returns the dataset"),
        ("users_data:fails", r"calling users_data:fails failed: OSError: no such disk \(users_data.py, line 23\)"),
        ("users_data:nothing", r"users_data:nothing is not a dataset: a dataset needs __getitem__ and __len__"),
        ("users_data:five", r"users_data:five is not a dataset: a dataset needs __getitem__ and __len__"),
        ("users_data:used_up", r"users_data:used_up is not a dataset: .*which can be read once"),
        ("users_data:empty", r"users_data:empty is empty: its length is 0"),
    ],
)
def test_what_is_no_dataset_is_said_in_one_line(target: str, said: str, folder: Path) -> None:
    import json  # noqa: F401 - json.py in the folder has its name

    with pytest.raises(CannotRun, match=said) as raised:
        find_dataset(target)
    assert "\n" not in raised.value.message
