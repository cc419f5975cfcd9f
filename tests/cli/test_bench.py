"""``sharded-loader bench``: a table with a recommendation, JSON, and errors of the user's dataset."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sharded_loader.cli import bench
from sharded_loader.cli.main import main

QUICK = ["--seconds", "0.03", "--workers", "2"]


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


def test_it_prints_a_row_for_each_pool_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:numbers", *QUICK]) == 0
    head, columns, *rows, advice = capsys.readouterr().out.splitlines()
    assert head == "benched_data:numbers: list, 100 samples, in random order; batches of 64."
    assert columns.split("  ")[0] == "pool" and columns.endswith("x inline")
    rows = [row for row in rows if not row.startswith("Other programs use")]
    assert [row.split()[:2] for row in rows] == [["inline", "0"], ["thread", "2"], ["process", "2"]]
    assert rows[0].endswith("1.00")
    assert all(re.search(r" ±\d+% ", row) for row in rows)
    assert advice.startswith(("Use num_workers=2", "Inline is enough", "No clear winner"))


def test_samples_of_different_lengths_are_measured_with_the_users_collate_function(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["bench", "benched_data:ragged", *QUICK]) == 2
    assert "different" in capsys.readouterr().err
    assert main(["bench", "benched_data:ragged", *QUICK, "--collate", "benched_data:longest"]) == 0
    assert capsys.readouterr().out.startswith("benched_data:ragged: list, 100 samples")
    assert main(["bench", "benched_data:ragged", *QUICK, "--collate", "benched_data:numbers"]) == 2
    assert "benched_data:numbers is a list, not a function" in capsys.readouterr().err


def test_json_has_the_numbers_and_nothing_else_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--pools", "inline,thread", "--batch-size", "8", "--json"]
    assert main(["bench", "benched_data:stream", *QUICK, *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["shuffle"], found["batch_size"]) == ("Stream, iterable data", False, 8)
    assert [(row["pool"], row["workers"]) for row in found["rows"]] == [("inline", 0), ("thread", 2)]
    assert all(row["samples_per_second"] > 0 and row["times_inline"] > 0 for row in found["rows"])
    assert found["recommendation"].endswith(".")


def test_a_sample_that_raises_is_named_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:bad", "-q", "--no-shuffle", *QUICK]) == 2
    shown = capsys.readouterr()
    assert shown.err == (
        "sharded-loader bench: reading benched_data:bad failed: "
        "ValueError: a broken image (in epoch 0, batch 0, sample 13)\n"
    )
    assert shown.out == ""


def test_without_inline_a_sample_that_raises_is_named_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:bad", "--no-shuffle", "--pools", "thread", *QUICK]) == 2
    assert "ValueError: a broken image (in epoch 0, batch 0, sample 13, thread " in capsys.readouterr().err


def test_a_row_that_fails_is_shown_beside_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "benched_data:main_only", "--pools", "inline,process", *QUICK]) == 1
    shown = capsys.readouterr()
    assert ["process", "2", "failed", "-", "-", "-"] in [line.split() for line in shown.out.splitlines()]
    assert "process with 2 workers failed: OSError: a closed file" in shown.err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["benched_data:numbers", "--workers", "0"], "is not a list of positive integers, such as 1,2,4"),
        (["benched_data:numbers", "--workers", "two"], "'two' is not a list of positive integers"),
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


def test_by_default_as_many_workers_are_measured_as_there_are_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, numbers in (1, [1, 2]), (6, [1, 2, 4]), (64, [1, 2, 4, 8, 16]):
        monkeypatch.setattr(bench, "cores_for_workers", lambda cores=cores: cores)
        assert bench._listed_numbers(None, None, None) == numbers  # type: ignore[arg-type]


@pytest.mark.parametrize(("others", "said"), [(1.7, True), (0.0, False)])
def test_bench_says_that_the_machine_is_busy(
    others: float, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "cores_of_others", lambda: others)
    monkeypatch.setattr(bench, "cores_for_workers", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    arguments = ["bench", "keyword:kwlist", "--pools", "inline", "--seconds", "0.01"]
    assert main(arguments) == 0
    assert ("Other programs use 1.7 of 2 cores. The figures are lower" in capsys.readouterr().out) == said


@pytest.mark.slow
def test_spawned_workers_find_the_classes_of_a_file_in_another_folder(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "own_classes.py").write_text(
        "class Numbers:\n    def __len__(self): return 100\n    def __getitem__(self, index): return index\n"
    )
    program = (
        "import multiprocessing, sys\nfrom sharded_loader.cli.main import main\n"
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
