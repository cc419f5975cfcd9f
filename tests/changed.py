"""What a change leaves alone: ``python -m tests.changed COMMIT`` prints arguments for pytest.

A satellite is a room of `benchmarks.sizes.OPTIONAL`. Its tests are left out if nothing has changed since the commit in
the core, in the harness of the tests, in the satellite and those that it imports, and in their tests. All import
`extend`, so that one belongs to the core here.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.imports import imports_of, read_sources
from benchmarks.sizes import OPTIONAL

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "sharded_loader"
SATELLITES = {*OPTIONAL} - {"extend"}


def room_of(module: str) -> str:
    room = f"{module}.".split(".")[1]
    return {"torch": "drop_in", "__main__": "cli"}.get(room, room)  # where it is tested


def left_out(changed: Iterable[str]) -> list[str]:
    """The folders of tests that need not run, by the files that have changed."""
    rooms = [re.sub(r"^(?:sharded_loader|tests)/(\w+).*", r"\1", path) for path in changed if path[-3:] != ".md"]
    touched, before = {room_of(f"p.{room}") for room in rooms} - {"docs", "benchmarks", "tutorials"}, set[str]()
    if touched - SATELLITES:
        return []
    pairs = [(room_of(one.importer), room_of(one.imported)) for one in imports_of(read_sources(PACKAGE))]
    while touched != before:
        before = {*touched}
        touched |= {importer for importer, imported in pairs if imported in before}
    return [f"tests/{room}" for room in sorted(SATELLITES - touched) if (TESTS / room).is_dir()]


if __name__ == "__main__":
    command = ["git", "diff", "--name-only", *sys.argv[1:]]
    files = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=True).stdout.splitlines()
    print(*(f"--ignore={folder}" for folder in left_out(files)))
