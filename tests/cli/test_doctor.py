"""``sharded-loader doctor``: the machine in lines, what to change, JSON, and an exit code."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from sharded_loader.cli import doctor
from sharded_loader.cli.facts import Facts, Room
from sharded_loader.cli.main import main

DOCKER = Facts(shared_memory="shm", shm=Room("/dev/shm", 64 << 20, 64 << 20))
NOTED = Facts(descriptors=256)


@pytest.mark.parametrize(
    ("facts", "code", "last"),
    [(Facts(), 0, "No problem found."), (NOTED, 0, "0 problems, 1 note."), (DOCKER, 1, "1 problem, 0 notes.")],
)
def test_the_exit_code_tells_whether_there_is_a_problem(
    facts: Facts, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "sharded_loader"
    assert lines[-1] == last


def test_a_problem_comes_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: DOCKER)
    assert main(["doctor", "-q"]) == 1
    problem, change = capsys.readouterr().out.splitlines()
    assert problem == "problem: Batches lie in /dev/shm, which has 64.0 MiB (64.0 MiB free)."
    assert change.startswith("  change: Enlarge it: docker run --shm-size=8g")


def test_quietly_a_good_machine_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", Facts)
    assert main(["doctor", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_json_has_facts_and_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: DOCKER)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["shm"] == {"path": "/dev/shm", "size": 64 << 20, "free": 64 << 20}
    assert [finding["is_problem"] for finding in found["findings"]] == [True]


def test_it_works_where_torch_cannot_be_imported() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom sharded_loader.cli.main import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem: torch is installed and cannot be imported: " in done.stdout
    assert "start method" in done.stdout
