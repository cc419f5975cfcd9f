"""What a change leaves alone: ``python -m tests.changed COMMIT`` prints arguments for pytest.

A satellite is a room of `benchmarks.sizes.OPTIONAL`. Its tests are left out if neither the core, nor the harness of the
tests, nor the satellite, nor its tests have changed since the commit. The satellites know each other through the core
alone but for `extend`, so that one belongs to the core here.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.sizes import OPTIONAL

TESTS = Path(__file__).parent
SATELLITES = {*OPTIONAL} - {"extend"}
TESTED_IN = {"torch": "drop_in", "__main__": "cli"}


def left_out(changed: Iterable[str]) -> list[str]:
    """The folders of tests that need not run, by the files that have changed."""
    rooms = [re.sub(r"^(?:sharded_loader|tests)/(\w+).*", r"\1", path) for path in changed if path[-3:] != ".md"]
    touched = {TESTED_IN.get(room, room) for room in rooms}
    if touched - SATELLITES - {"docs", "benchmarks", "tutorials"}:
        return []
    return [f"tests/{room}" for room in sorted(SATELLITES - touched) if (TESTS / room).is_dir()]


if __name__ == "__main__":
    command = ["git", "diff", "--name-only", *sys.argv[1:]]
    files = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout.splitlines()
    print(*(f"--ignore={folder}" for folder in left_out(files)))
