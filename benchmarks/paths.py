"""How long is it from a clone to the first epoch? ``python -m benchmarks.paths``.

    measure(path, folder) -> Watch     seconds of each step that docs/paths.md tells its reader to take

A path is a recipe. Each is taken as a newcomer takes it: a fresh clone, the README's first command, which installs
everything into an environment of its own, then the page's data and its program, with its command. The object store is a
web server on this machine. pip may find in its cache what it has downloaded before.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PORT = 8123
PATHS = {
    "images": ("images", "pillow", {}),
    "language model, 8 processes": ("language-model", "", {}),
    "object store, 2 machines": (
        "several-machines",
        "aiohttp",
        {
            'ShardDataset("shards/': f'ShardDataset("http://127.0.0.1:{PORT}/shards/',
            '.tar")': '.tar", cache=ShardCache("cache", "1 GB"))',
            "import ShardDataset,": "import ShardCache, ShardDataset,",
        },
    ),
}
"""By the name of a path: its recipe, the package that it needs, and what to change in the program."""


class Watch(NamedTuple):
    """Seconds of the steps of a path."""

    clone: float
    demo: float
    data: float
    program: float


def measure(name: str, folder: Path) -> Watch:
    """Take the steps of a path in an empty folder, and return their seconds."""
    recipe, package, changes = PATHS[name]
    page = (ROOT / f"docs/recipes/{recipe}.md").read_text(encoding="utf-8")
    program, data = (textwrap.dedent(block) for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    for old, new in changes.items():
        assert old in program, f"docs/recipes/{recipe}.md has no {old}"
        program = program.replace(old, new)
    clone, seconds = folder / "clone", []
    environment = os.environ | {
        "PATH": f"{clone / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    environment.pop("PYTHONPATH", None)
    steps = [
        [["git", "clone", "-q", str(ROOT), str(clone)]],
        [["make", "-C", str(clone), "demo"]],
        [["python", "data.py"]],
        _commands(page),
    ]
    if package:
        constraints = str(clone / "constraints.txt")
        steps.insert(2, [["python", "-m", "pip", "install", "-qq", "-c", constraints, package]])
    (folder / "data.py").write_text(data, encoding="utf-8")
    (folder / "train.py").write_text(program, encoding="utf-8")
    with _served(folder) if changes else tempfile.TemporaryDirectory():
        for commands in steps:
            began = time.perf_counter()
            running = [subprocess.Popen(command, cwd=folder, env=environment) for command in commands]
            codes = [process.wait() for process in running]
            if any(codes):
                raise SystemExit(f"{name}: {shlex.join(commands[0])} has failed")
            seconds.append(time.perf_counter() - began)
    first, demo, *installed, second, last = seconds
    return Watch(first, demo + sum(installed), second, last)


def _commands(page: str) -> list[list[str]]:
    """The commands of a page. Those of several machines are all started here."""
    page = page.replace("--master-addr 10.0.0.1", f"--master-addr 127.0.0.1 --master-port {PORT + 1}")
    shown = [shlex.split(line[2:]) for line in page.splitlines() if line.startswith("$ ")]
    return shown or [["python", "train.py"]]


@contextmanager
def _served(folder: Path) -> Iterator[None]:
    """Serve a folder by HTTP."""
    command = [sys.executable, "-m", "http.server", str(PORT), "--bind", "127.0.0.1", "-d", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.terminate()


def main(arguments: Sequence[str] | None = None) -> None:
    """Take the paths, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.paths", description="From a clone to the first epoch.")
    parser.add_argument("--only", choices=PATHS, nargs="+", default=list(PATHS))
    rows = []
    for name in parser.parse_args(arguments).only:
        with tempfile.TemporaryDirectory() as folder:
            watch = measure(name, Path(folder))
        rows.append(f"| {name} | {' | '.join(f'{one:.0f} s' for one in (*watch, sum(watch)))} |")
    print("\n".join(["| path | clone | `make demo` | data | program | all |", "|---|---|---|---|---|---|", *rows]))


if __name__ == "__main__":
    main()
