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
from torch.utils.data import get_worker_info

from sharded_loader import SimpleDataset
from sharded_loader.cli import main
from sharded_loader.cli.bench import ROUNDS, Row, measure, recommend
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
def test_samples_of_different_lengths_are_measured_with_the_users_collate_function(
    capsys: pytest.CaptureFixture[str],
) -> None:
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


def test_without_inline_a_sample_that_raises_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
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
        (["benched_data:numbrs"], "did you mean 'numbers'?"),
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


def test_where_auto_finds_no_number_it_is_that_to_begin_with() -> None:
    found = measure("thread", 9.0, arguments(Drawing(10, [5])))
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
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "Use num_workers=2" in done.stdout


# -- What ``bench`` measures, with datasets of every kind and rows that fail; and its advice ------------------------


SECONDS = 0.03


def arguments(dataset: Any, batch_size: int = 4, shuffle: bool = False, batchify_fn: Any = None) -> dict[str, Any]:
    return {"dataset": dataset, "batch_size": batch_size, "shuffle": shuffle, "batchify_fn": batchify_fn}


class Counting:
    """Iterable data of 30 samples."""

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(info.id, 30, info.num_workers) if info else range(30))


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


@pytest.mark.parametrize(
    "dataset", [[1, 2], Counting(), lambda part, parts: range(part, 5, parts)], ids=["short", "iterable", "function"]
)
@pytest.mark.slow
def test_data_of_every_kind_is_measured_in_every_pool(dataset: Any) -> None:
    measured = [measure(pool, SECONDS, arguments(dataset)) for pool in ("inline", "thread", "process")]
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


INLINE_ROW = Row("inline", 0, 1000.0, 64.0)


def rows(*speeds: tuple[str, int, float]) -> list[Row]:
    return [Row(pool, workers, speed, 64000 / speed) for pool, workers, speed in speeds]


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        # Workers gain nothing.
        (rows(("thread", 1, 900), ("process", 2, 1100)), "Inline is enough, so leave out num_workers"),
        (rows(("thread", 1, 900), ("process", 2, 1100)), "with workers it is at best 1.10 times as fast"),
        # The faster pool, and how to choose it.
        (rows(("process", 2, 1500), ("thread", 4, 1900)), "Use num_workers=4, thread_pool=True: 1.9 times"),
        (rows(("process", 2, 1900), ("thread", 2, 1890)), "Use num_workers=2: 1.9 times"),
        (rows(("ray", 2, 1900)), 'Use num_workers=2, pool="ray": 1.9 times'),
        # Says when inline is enough all the same.
        (rows(("process", 2, 1900)), "inline is enough if your training step takes far longer than 64 ms"),
    ],
)
def test_it_names_the_arguments_and_the_reason(measured: list[Row], said: str) -> None:
    advice = recommend([INLINE_ROW, *measured])
    assert said in advice
    assert advice.endswith(".") and "\n" not in advice


def test_inline_alone_is_compared_with_nothing() -> None:
    assert recommend([INLINE_ROW]) == (
        "Only inline was measured, 64 ms per batch: add --pools inline,thread,process to compare."
    )


def spread(pool: str, workers: int, lowest: float, median: float, highest: float) -> Row:
    return Row(pool, workers, median, 64000 / median, lowest=lowest, highest=highest)


FAILED = Row("thread", 8, error="boom")
SLOW = spread("inline", 0, 600, 1000, 1500)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([*rows(("thread", 1, 900), ("process", 2, 1800))], "Use num_workers=2: "),  # without inline
        ([INLINE_ROW, FAILED, *rows(("process", 2, 1900))], "Use num_workers=2: "),
        ([SLOW, spread("process", 2, 1600, 1900, 2000)], "Use num_workers=2: "),
        (
            [SLOW, spread("process", 2, 1300, 1900, 2000)],
            "No clear winner: the rounds of num_workers=2 and inline overlap. ",
        ),
        # Rows that are alike need no winner.
        (
            [INLINE_ROW, spread("process", 2, 1800, 1900, 2000), spread("thread", 4, 1750, 1850, 1950)],
            "Use num_workers=2: ",
        ),
        ([INLINE_ROW, spread("thread", 2, 990, 1010, 1200)], "Inline is enough"),
    ],
)
def test_the_advice_counts_rows_that_ran_and_rounds_that_overlap(measured: list[Row], said: str) -> None:
    advice = recommend(measured)
    assert advice.startswith(said) and ("--seconds" in advice) == ("overlap" in said)
