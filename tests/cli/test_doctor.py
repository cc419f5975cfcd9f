"""``sharded-loader doctor``: the machine in lines, what to change, JSON, an exit code; what made-up facts mean."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from sharded_loader.cli import doctor, main
from sharded_loader.cli.doctor import Facts, collect, find, lines

GIB, MIB = 1 << 30, 1 << 20
SMALL_SHM = (64 * MIB, 60 * MIB)
DOCKER = Facts(shared_memory="shm", shm=(64 * MIB, 64 * MIB))
NOTED = Facts(descriptors=256)


@pytest.mark.parametrize(
    ("facts", "code", "last"),
    [(Facts(), 0, "No problem found."), (NOTED, 0, "0 problems, 1 note."), (DOCKER, 1, "1 problem, 0 notes.")],
)
def test_the_exit_code_tells_whether_there_is_a_problem_and_what_to_change(
    facts: Facts, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "sharded_loader" and lines[-1] == last
    assert main(["doctor", "-q"]) == code
    quiet = capsys.readouterr().out.splitlines()
    if code:
        problem, change = quiet
        assert problem == "problem: Batches lie in /dev/shm, which has 64.0 MiB (64.0 MiB free)."
        assert change.startswith("  change: Enlarge it: docker run --shm-size=8g")
    assert quiet == [] or facts != Facts()


@pytest.mark.slow
def test_it_works_where_torch_cannot_be_imported() -> None:
    program = "import sys; sys.modules['torch'] = None\nfrom sharded_loader.cli import main\nsys.exit(main(['doctor']))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem: torch cannot be imported: " in done.stdout
    assert "shared memory" in done.stdout


@pytest.mark.parametrize(
    ("facts", "is_problem", "what", "change"),
    [
        ({"torch_error": "OSError: libc10.so"}, True, "cannot be imported: OSError: libc10.so", "Install torch again"),
        ({"cores": 1, "usable_cores": 1}, False, "share 1 of 1 cores", "Give more"),
        ({"usable_cores": 1}, True, "share 1 of 8 cores", "taskset"),
        ({"usable_cores": 1.5}, True, "share 1.5 of 8 cores", "docker run --cpus 4"),
        ({"free_memory": (200 * MIB, "x")}, True, "Only 200.0 MiB of memory is free (x)", "memory limit"),
        ({"shared_memory": None, "shared_memory_error": "no"}, True, "that processes can share: no", "--shm-size"),
        ({"shared_memory": "file"}, True, "temporary files", "--shm-size"),
        ({"shared_memory": "shm", "shm": SMALL_SHM}, True, "64.0 MiB (60.0 MiB free)", "--shm-size"),
        ({"shared_memory": "shm", "shm": (9 * GIB, MIB)}, True, "(1.0 MiB free)", "--shm-size"),
        ({"descriptors": 100}, True, "may open 100 files", "ulimit -n 65536"),
        ({"descriptors": 256}, False, "may open 256 files", "docker run --ulimit nofile=65536"),
        ({"trial_error": "WorkerDiedError: x"}, True, "failed: WorkerDiedError: x", "thread_pool=True"),
        (
            {"nvidia_driver": True, "versions": {"torch": "2.13.0+cpu"}},
            True,
            "torch 2.13.0+cpu sees no GPU",
            "--gpus all",
        ),
    ],
)
def test_a_trouble_is_one_finding_with_advice(facts: dict[str, Any], is_problem: bool, what: str, change: str) -> None:
    [finding] = find(replace(Facts(), **facts))
    assert finding.is_problem == is_problem
    assert what in finding.what and finding.what.endswith(".")
    assert change in finding.change


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"usable_cores": 2.0},
        {"cores": 64, "usable_cores": 2},
        {"shm": None, "shared_memory": "named", "descriptors": None},
        {"shm": None, "shared_memory": "shm"},
        {"shm": SMALL_SHM},
        {"nvidia_driver": True, "gpus": ["cuda:0"]},
    ],
)
def test_what_is_usual_is_no_finding(facts: dict[str, Any]) -> None:
    assert find(replace(Facts(), **facts)) == []


def test_the_facts_are_told_in_lines() -> None:
    told = dict(lines(Facts({"torch": "2.13.0"}, usable_cores=2.5, gpus=["cuda:0", "cuda:1"], trial="well")))
    assert (told["torch"], told["cores"], told["workers"]) == ("2.13.0", "2.5 of 8 usable", "well")
    assert (told["memory"], told["GPUs"]) == ("32.0 GiB free (the machine's memory)", "cuda:0, cuda:1")
    told = dict(lines(Facts(shm=None, shared_memory=None, descriptors=None)))  # what is unknown
    assert (told["shared memory"], told["open files"]) == ("none", "no limit")
    assert (told["GPUs"], told["workers"]) == ("none that torch sees", "not tried")
    assert dict(lines(Facts(trial_error="x")))["workers"] == "the trial failed"
    found = find(Facts(descriptors=256, trial_error="x", free_memory=(1, "x")))
    assert [finding.is_problem for finding in found] == [True, True, False]  # problems come before notes


def test_this_machine_is_described() -> None:
    found = collect()
    assert found.versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]  # + names a build
    assert 0 < found.usable_cores <= found.cores
    assert found.free_memory[0] > 0
    assert found.shared_memory is not None and found.shared_memory_error is None
    assert found.trial_error is None and found.trial.startswith("two processes delivered 8 batches in ")


def test_what_fails_or_is_not_there_is_a_fact_and_all_else_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("sharded_loader.extend.engine.accelerators", Mock(side_effect=ImportError("libc10.so")))
        found = collect()
        assert found.torch_error == "ImportError: libc10.so" and found.shared_memory is not None
        assert (found.trial, found.trial_error, found.gpus) == ("not tried", None, ())
    with monkeypatch.context() as patch:
        no_loader = Mock(side_effect=OSError("no processes\nat all"))
        patch.setattr("sharded_loader.ShardedDataLoader", no_loader, raising=False)
        patch.setitem(sys.modules, "resource", None)  # a platform without limits and affinity
        patch.delattr(os, "sched_getaffinity", raising=False)
        patch.setattr(doctor, "core_limit", lambda: None)
        found = collect()
        assert (found.trial, found.trial_error) == ("not tried", "OSError: no processes at all")
        assert (found.descriptors, found.usable_cores) == (None, os.cpu_count())
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "floppy")
    found = collect()
    assert found.shared_memory is None and found.trial_error is not None
    assert found.shared_memory_error is not None and "SHARDED_LOADER_MEMORY is 'floppy'" in found.shared_memory_error


@pytest.mark.skipif(sys.platform == "win32", reason="there, memory is always named")
def test_the_kind_of_shared_memory_is_what_the_system_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, kind in ((None, "memfd"), ("/dev/shm", "shm"), (str(tmp_path), "file")):
        opened = lambda label, kind, folder=folder: (os.open(os.devnull, os.O_RDONLY), folder)  # noqa: E731
        monkeypatch.setattr(doctor, "open_memory", opened)
        assert doctor._shared_memory() == kind
