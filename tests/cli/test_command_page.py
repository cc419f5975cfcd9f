"""The examples of `docs/guides/command.md` run, and print what the page says, numbers apart."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/command.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", PAGE)
SLOW = ("bench", "demo", "doctor")
NUMBER = re.compile(r"[\d.,]*\d")


def without_numbers(line: str) -> str:
    return " ".join(NUMBER.sub("0", line).split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the page supposes: the module, and images in two classes, packed already."""
    modules = {"my_data": "scans = Scans()", "compared": "json.dump(loader.fingerprint"}
    for name, line in modules.items():
        [module] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if line in block]
        (tmp_path / f"{name}.py").write_text(module, encoding="utf-8")
    for name in ("cat/0", "cat/1", "dog/0", "dog/1"):
        path = tmp_path / "photos" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bytes(1230))
    return tmp_path


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "80"}


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    assert program == "sharded-loader"
    return subprocess.run(
        [sys.executable, "-m", "sharded_loader", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
    )


def test_every_verb_has_an_example() -> None:
    verbs = {tuple(word for word in command.split()[1:3] if word.isalpha()) for command, _ in EXAMPLES}
    records = {("records", verb) for verb in ("pack", "index")}
    assert verbs >= {("doctor",), ("bench",), ("demo",), ("diff",), *records}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "promised"),
    [
        pytest.param(*example, id=example[0], marks=[pytest.mark.slow] if example[0].split()[1] in SLOW else [])
        for example in EXAMPLES
    ],
)
def test_an_example_prints_what_the_page_says(command: str, promised: str, folder: Path) -> None:
    if "train.rec" in command and " pack " not in command:
        assert run("sharded-loader records pack photos train.rec", folder).returncode == 0
    if " diff" in command:
        subprocess.run([sys.executable, "compared.py"], cwd=folder, env=ENVIRONMENT, check=True)
    done = run(command, folder)
    if " doctor" in command:  # each machine has other facts, and the names are the same
        assert done.returncode in (0, 1), done.stderr
        promised = "\n".join(line.split("  ")[0] for line in promised.splitlines() if "  " in line)
        printed = [line.split("  ")[0].strip() for line in done.stdout.splitlines()]
        printed = [name if len(name) < 15 else name[:15].strip() for name in printed]
    else:
        assert done.returncode == (" diff" in command), done.stderr
        printed = [without_numbers(line) for line in done.stdout.splitlines()]
    wanted = [
        line if " doctor" in command else without_numbers(line) for line in promised.splitlines() if line != "..."
    ]
    if " bench" in command:
        *wanted, advice = wanted
        # It depends on the machine.
        assert printed.pop().startswith(("Use num_workers", "Inline is enough")) and advice.startswith(
            "Use num_workers"
        )
    remaining = iter(printed)
    assert [line for line in wanted if line not in remaining] == []
