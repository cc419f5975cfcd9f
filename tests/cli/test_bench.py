"""``sharded-loader bench``: a table with a recommendation, JSON, and errors of the user's dataset."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded_loader import SimpleDataset
from sharded_loader.cli import main
from sharded_loader.cli.bench import ROUNDS, Row, find_dataset, measure, recommend
from sharded_loader.cli.output import CannotRun
from sharded_loader.instruments.auto import START, Tuner
from tests.samples import Drawing

QUICK = ["--seconds", "0.03"]


@pytest.fixture(autouse=True)
def users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "benched_data.py").write_text(
        "import os\n"
        "from torch.utils.data import get_worker_info\n"
        "numbers = list(range(100))\n"
        "class Bad:\n"
        "    def __len__(self): return 100\n"
        "    def __getitem__(self, index):\n"
        "        if index == 13: raise ValueError('a broken\\nimage')\n"
        "        return index\n"
        "bad = Bad()\n"
        "class Stream:\n"
        "    def __iter__(self):\n"
        "        info = get_worker_info()\n"
        "        return iter(range(info.id, 50, info.num_workers) if info else range(50))\n"
        "stream = Stream()\n"
        "class MainOnly(Bad):\n"
        "    pid = os.getpid()\n"
        "    def __getitem__(self, index):\n"
        "        if os.getpid() != self.pid: raise OSError('a closed file')\n"
        "        return index\n"
        "main_only = MainOnly()\n"
        "ragged = [[1] * (1 + number % 3) for number in range(100)]\n"
        "def longest(samples): return max(map(len, samples))\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "benched_data", raising=False)


@pytest.mark.slow
def test_it_prints_a_row_for_each_pool_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:numbers", *QUICK]) == 0
    head, columns, *rows, advice = capsys.readouterr().out.splitlines()
    assert head == "benched_data:numbers: list, 100 samples, in random order; batches of 64."
    assert columns.split("  ")[0] == "pool" and columns.endswith("x inline")
    assert [row.split()[:2] for row in rows] == [["inline", "0"], ["thread", "2"], ["process", "2"]]
    assert rows[0].endswith("1.00")
    assert all(re.search(r" ±\d+% ", row) for row in rows)
    assert advice.startswith(("Use num_workers=2", "Inline is enough", "No clear winner"))


@pytest.mark.slow
def test_samples_of_different_lengths_are_measured_with_the_users_collate_function(capsys: Any) -> None:
    assert main(["bench", "benched_data:ragged", *QUICK]) == 2
    assert "different" in capsys.readouterr().err
    assert main(["bench", "benched_data:ragged", *QUICK, "--collate", "benched_data:longest"]) == 0
    assert capsys.readouterr().out.startswith("benched_data:ragged: list, 100 samples")
    assert main(["bench", "benched_data:ragged", *QUICK, "--collate", "benched_data:numbers"]) == 2
    assert "benched_data:numbers is a list, not a function" in capsys.readouterr().err


def test_a_sample_that_raises_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:bad", "-q", "--no-shuffle", *QUICK]) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        "sharded-loader bench: reading the dataset failed: "
        "ValueError: a broken image (in epoch 0, batch 0, sample 13)\n"
    )
    assert shown.out == ""
    assert main(["bench", "benched_data:bad", "--no-shuffle", "--pools", "thread", *QUICK]) == 2
    assert "ValueError: a broken image (in epoch 0, batch 0, sample 13, thread " in capsys.readouterr().err


@pytest.mark.slow
def test_a_row_that_fails_is_shown_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:main_only", "--pools", "inline,process", *QUICK]) == 1
    shown = capsys.readouterr()
    assert ["process", "2", "failed", "-", "-", "-"] in [line.split() for line in shown.out.splitlines()]
    assert "process with 2 workers failed: OSError: a closed file" in shown.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["benched_data:numbers", "--pools", "inline,dask"], "'dask' is not a pool: choose from inline"),
        (["benched_data:numbers", "--seconds", "0"], "0.0 is not in the range"),
        (["benched_data:numbers", "--batch-size", "0"], "0 is not in the range"),
        (["benched_data:stream", "--shuffle"], "has only __iter__ and comes in its own order: leave out --shuffle"),
        (["benched_data:numbrs"], "benched_data has no 'numbrs': look for the name in the file"),
        ([], "Missing argument"),
    ],
)
def test_a_wrong_argument_is_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *options]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_auto_finds_how_many_workers_are_measured(pool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(self: Tuner, meter: Any, pipeline: Any, now: float) -> None:
        pipeline.pool.wanted = 5

    monkeypatch.setattr(Tuner, "look", look)
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    assert measure(pool, 9.0, arguments(range(1000))).workers == 5


def test_more_processes_than_cores_are_no_warning_where_auto_finds_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_loader.base.limits.cores_for_workers", lambda: 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure("process", SECONDS, arguments(range(8))).error is None
    found = measure("thread", 9.0, arguments(Drawing(10, [5])))  # where it finds no number, it is that to begin with
    assert found.workers == START and found.error is not None and found.error.startswith("ValueError: bad 5")


@pytest.mark.slow
def test_spawned_workers_find_the_classes_of_a_file_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own_classes.py").write_text(
        "class Numbers:\n    def __len__(self): return 100\n    def __getitem__(self, index): return index\n"
    )
    program = (
        "import multiprocessing, sys\nfrom sharded_loader.cli import main\n"
        "multiprocessing.set_start_method('spawn')\n"
        f"sys.exit(main(['bench', 'inner/own_classes.py:Numbers', '--pools', 'process', *{QUICK}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "Use num_workers=2" in done.stdout


SECONDS = 0.03


def arguments(dataset: Any, batch_size: int = 4, shuffle: bool = False, batchify_fn: Any = None) -> dict[str, Any]:
    return {"dataset": dataset, "batch_size": batch_size, "shuffle": shuffle, "batchify_fn": batchify_fn}


class Once:
    """Iterable data that is used up."""

    def __init__(self) -> None:
        self.items = iter(range(3))

    def __iter__(self) -> Iterator[int]:
        return self.items


def nothing() -> list[int]:
    return []


def test_a_row_is_measured_in_rounds() -> None:
    for pool, workers in ("inline", 0), ("thread", 2):
        turns: list[None] = []
        found = measure(pool, SECONDS, arguments(range(100), shuffle=True), lambda turns=turns: turns.append(None))
        assert len(turns) >= ROUNDS and (found.workers, found.error) == (workers, None)
        assert found.highest >= found.samples_per_second >= found.lowest > 0 and found.ms_per_batch > 0


@pytest.mark.parametrize("dataset", ["short", "stream", "function"])
@pytest.mark.slow
def test_data_of_every_kind_is_measured_in_every_pool(dataset: str) -> None:
    given: dict[str, Any] = {"short": [1, 2], "function": lambda part, parts: range(part, 5, parts)}
    data = given.get(dataset) or find_dataset(f"benched_data:{dataset}")
    measured = [measure(pool, SECONDS, arguments(data)) for pool in ("inline", "thread", "process")]
    assert [one.error for one in measured] == [None, None, None]


def test_speed_and_time_per_batch_are_counted_from_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every look at the clock takes a second.
    seconds = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(seconds)))
    one = measure("inline", 60, arguments(range(1000), 10))
    assert one.samples_per_second * one.ms_per_batch / 1000 == pytest.approx(10)
    assert one.ms_per_batch >= 1000


@pytest.mark.slow
def test_a_slow_dataset_is_measured_for_a_batch_of_each_worker() -> None:
    read: list[int] = []
    data = SimpleDataset(range(10**6)).transform(lambda index: read.append(index) or index)
    measure("thread", 1e-9, arguments(data, 1))
    assert len(read) >= 1 + 2 * START + ROUNDS * START


def test_what_fails_only_in_workers_ends_only_their_row() -> None:
    here = os.getpid()

    def fails_in_workers(index: int) -> int:
        if os.getpid() != here:
            raise OSError("no files here")
        return index

    dataset = arguments(SimpleDataset(range(100)).transform(fails_in_workers))
    in_main, in_workers = (measure(pool, SECONDS, dataset) for pool in ("inline", "process"))
    assert in_main.error is None
    assert in_workers.error is not None and in_workers.error.startswith("OSError: no files here (in epoch 0, batch ")
    assert in_workers.samples_per_second == 0


@pytest.mark.parametrize(
    ("dataset", "said"), [(nothing, "it gives no samples"), (Once(), "it gives its samples only once")]
)
def test_data_without_samples_is_an_error(dataset: Any, said: str) -> None:
    with pytest.raises(CannotRun, match=said):
        measure("inline", SECONDS, arguments(dataset))


INLINE = Row("inline", 0, 1000.0, 64.0)


def rows(*speeds: tuple[str, int, float]) -> list[Row]:
    return [Row(pool, workers, speed, 64000 / speed) for pool, workers, speed in speeds]


def spread(pool: str, workers: int, lowest: float, median: float, highest: float) -> Row:
    return Row(pool, workers, median, 64000 / median, lowest=lowest, highest=highest)


FAILED = Row("thread", 8, error="boom")
SLOW = spread("inline", 0, 600, 1000, 1500)
SLOWER = [INLINE, *rows(("thread", 1, 900), ("process", 2, 1100))]
OVERLAP = "No clear winner: the rounds of num_workers=2 and inline overlap. "


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (SLOWER, "Inline is enough, so leave out num_workers"),
        (SLOWER, "with workers it is at best 1.10 times as fast"),
        # The faster pool, and how to choose it.
        ([INLINE, *rows(("process", 2, 1500), ("thread", 4, 1900))], "Use num_workers=4, thread_pool=True: 1.9"),
        ([INLINE, *rows(("process", 2, 1900), ("thread", 2, 1890))], "Use num_workers=2: 1.9 times"),
        ([INLINE, *rows(("ray", 2, 1900))], 'Use num_workers=2, pool="ray": 1.9 times'),
        # Says when inline is enough all the same.
        ([INLINE, *rows(("process", 2, 1900))], "is enough if your training step takes far longer than 64 ms"),
        # Rows that ran, and rounds that overlap.
        (rows(("thread", 1, 900), ("process", 2, 1800)), "Use num_workers=2: "),
        ([INLINE, FAILED, *rows(("process", 2, 1900))], "Use num_workers=2: "),
        ([SLOW, spread("process", 2, 1600, 1900, 2000)], "Use num_workers=2: "),
        ([SLOW, spread("process", 2, 1300, 1900, 2000)], OVERLAP),
        # Rows that are alike need no winner.
        (
            [INLINE, spread("process", 2, 1800, 1900, 2000), spread("thread", 4, 1750, 1850, 1950)],
            "Use num_workers=2: ",
        ),
        ([INLINE, spread("thread", 2, 990, 1010, 1200)], "Inline is enough"),
        ([INLINE], "Only inline was measured, 64 ms per batch: add --pools inline,thread,process to compare."),
    ],
)
def test_it_names_the_arguments_and_the_reason(measured: list[Row], said: str) -> None:
    advice = recommend(measured)
    assert said in advice and advice.endswith(".") and "\n" not in advice
    assert ("--seconds" in advice) == (said == OVERLAP)


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
        ("users_data:xyz", r"users_data has no 'xyz': look for the name in the file"),
        ("nowhere_at_all:x", r"there is no module 'nowhere_at_all' in .*: change to the folder that contains it"),
        ("users_data.inner:x", r"there is no module 'users_data.inner'"),
        ("nowhere.py:x", r"there is no file nowhere.py: write the path of a Python file"),
        ("some/where:x", "or write path/to/file.py:NAME"),
        ("json.py:data", r"'json' is also the name of a module that Python has imported: rename the file"),
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


@pytest.mark.parametrize(
    ("target", "kind", "file"),
    [
        ("users_broken:x", ModuleNotFoundError, "users_broken.py"),
        ("users_script:x", SystemExit, "users_script.py"),
        ("users_package/data.py:x", ImportError, "data.py"),
        ("users_data:fails", OSError, "users_data.py"),
        ("users_data:needs", TypeError, "bench.py"),
    ],
)
def test_an_error_of_the_users_code_keeps_its_traceback(target: str, kind: Any, file: str, folder: Path) -> None:
    with pytest.raises(kind) as raised:
        find_dataset(target)
    assert raised.traceback[-1].path.name == file
