"""How long is the road of a batch, and how large is the package? ``python -m benchmarks.road``.

    roads.measure_road    calls, functions and files of the main process, of an epoch and of one `next()`
    roads.time_epoch      CPU time of the main process per batch
    sizes.sizes_of        modules, lines, rooms, import levels and circles

A `Checkout` is a folder that holds the package. A process of its own imports the package from there and measures it
(`roads.serve`), so that two checkouts can be measured in one run. All stay open, and the epochs whose CPU time is
measured take turns.

``targets.json`` holds a target for some of the numbers, and the best value so far. A target is *reached* once the best
value is not above it. A number must not rise above a target that was reached (`lost`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.imports import read_sources
from benchmarks.roads import ROADS
from benchmarks.sizes import sizes_of

PACKAGE = "sharded_loader"
ROOT = Path(__file__).resolve().parent.parent
TARGETS = Path(__file__).with_name("targets.json")
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.roads as r; del sys.path[0]; r.serve()"


class Checkout(contextlib.AbstractContextManager["Checkout"]):
    """A folder that holds the package, and a process that measures it.

    Args:
        folder: The root of the checkout, which holds the folder `PACKAGE`.

    Raises:
        FileNotFoundError: The folder does not hold the package.
        RuntimeError: The process could not import the package from this folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._sources = read_sources(self.folder / PACKAGE)
        path = os.pathsep.join([str(self.folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, str(ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": path},
        )
        try:
            found = self._answer()
            if Path(found).resolve() != self.folder / PACKAGE:
                raise RuntimeError(f"Python imported {found}, not the package in {self.folder}")
        except BaseException:
            self.__exit__()
            raise

    def sizes(self) -> tuple[dict[str, int], list[str]]:
        """The size of the package, and the sentences that name what is counted."""
        return sizes_of(self._sources)

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, *question: str) -> Any:
        """Have the process measure something.

        Args:
            question: ``"walk"`` and one of `ROADS` (`roads.measure_road`), or ``"cpu"`` (`roads.time_epoch`).

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures {self.folder} ended; its error stands above")
        return json.loads(line)


def rows_of(walks: Mapping[str, Any]) -> dict[str, float]:
    """The measured roads, by the names of the rows."""
    return {
        f"{what}, {road}: {name}": value
        for road, summary in walks.items()
        for what in ("epoch", "next()")
        for name, value in summary.get(what, {}).items()
    }


def read_targets() -> dict[str, dict[str, float]]:
    """``{"target": ..., "best": ...}`` by the name of the row."""
    targets: dict[str, dict[str, float]] = json.loads(TARGETS.read_text(encoding="utf-8"))
    return targets


def record(rows: Mapping[str, float]) -> None:
    """Write what is better than the best value so far."""
    targets = read_targets()
    for name in targets.keys() & rows.keys():
        targets[name]["best"] = min(targets[name]["best"], rows[name])
    lines = [f"{json.dumps(name)}: {json.dumps(target)}" for name, target in targets.items()]
    TARGETS.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def lost(rows: Mapping[str, float]) -> list[str]:
    """A sentence for each target that was reached and is not any more."""
    return [
        f"{name} is {rows[name]:g}; the target {wanted['target']:g} was reached: {wanted['best']:g}"
        for name, wanted in read_targets().items()
        if wanted["best"] <= wanted["target"] < rows.get(name, 0)
    ]


def table_of(columns: Mapping[str, Mapping[str, float]], targets: Mapping[str, Mapping[str, float]] = {}) -> str:
    """A Markdown table.

    Two columns get a third one with the ratio of the second to the first. With targets, there is a column with each
    target and what the last column is above it.
    """
    heads, (first, *others) = ["", *columns], columns.values()
    lines = []
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        values = [column.get(name) for column in (first, *others)]
        cells = ["" if value is None else f"{value:.4g}" if value % 1 else f"{value:.0f}" for value in values]
        if others:
            cells.append(f"{values[1] / values[0]:.2f}" if values[0] and values[1] is not None else "")
        if targets:
            target, last = targets.get(name, {}).get("target"), values[-1]
            above = f", {last - target:+g}" if target is not None and last is not None and last > target else ""
            cells.append("" if target is None else f"{target:g}{above}")
        lines.append([name, *cells])
    heads += ["ratio"] * bool(others) + ["target"] * bool(targets)
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (heads, rule, *lines)
    )


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """The command line; the exit status is 1 if a target is lost."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.road", description="Measure the road of a batch.")
    parser.add_argument("--package", type=Path, default=ROOT, metavar="PATH", help="a checkout (default: this one)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, for a column before it")
    parser.add_argument("--only", nargs="+", choices=ROADS, default=list(ROADS), metavar="ROAD", help="some roads")
    parser.add_argument("--walk", action="store_true", help="print the functions of the median next(), by road")
    parser.add_argument("--rounds", type=int, default=7, help="epochs whose CPU time is measured (default 7)")
    parser.add_argument("--record", action="store_true", help="write values that are better than the best so far")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds has to be at least 1")
    with contextlib.ExitStack() as stack:
        folders = [folder for folder in (chosen.against, chosen.package) if folder is not None]
        checkouts = [stack.enter_context(Checkout(folder)) for folder in folders]
        # The last roads pretend a device, which would change the times.
        cpu = zip(*([checkout.ask("cpu") for checkout in checkouts] for _ in range(chosen.rounds)), strict=True)
        times = [{"main process: CPU us per batch": statistics.median(seconds) * 1e6} for seconds in cpu]
        walks = [{road: checkout.ask("walk", road) for road in ROADS if road in chosen.only} for checkout in checkouts]
    sizes = [checkout.sizes() for checkout in checkouts]
    measured = zip(checkouts, walks, times, sizes, strict=True)
    columns = {str(checkout.folder): rows_of(walk) | time | size for checkout, walk, time, (size, _) in measured}
    *_, rows = columns.values()
    if chosen.record:
        record(rows)
    say(table_of(columns, read_targets()))
    for checkout, roads in zip(checkouts, walks, strict=True):
        for road, summary in roads.items():
            if "left out" in summary:
                say(f"left out in {checkout.folder}: {road}: {summary['left out']}")
    for note in sizes[-1][1]:
        say(note)
    if chosen.walk:
        for road, summary in walks[-1].items():
            say(f"\nthe median next(), {road}:")
            for file, function, line, depth in summary.get("walk", []):
                say(f"{'  ' * depth}{file}:{line} {function}")
    for sentence in lost(rows):
        say(f"lost: {sentence}")
    return bool(lost(rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
