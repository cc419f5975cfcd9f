"""How long is the road of a batch, and how large is the package? ``python -m benchmarks.road``.

    walk.record_walks     calls, functions and files of one `next()` in the main process
    time_epoch            CPU time of the main process per batch
    sizes.sizes_of        modules, lines, import levels and circles

A `Checkout` is a folder that holds the package. A process of its own imports the package from there and measures it
(`serve`), so that two checkouts can be measured in one run. All stay open, and the epochs whose CPU time is measured
take turns.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.imports import read_sources
from benchmarks.samples import NUM_IMAGES, Array
from benchmarks.sizes import sizes_of
from benchmarks.walk import record_walks, summary_of
from benchmarks.workloads import WORKLOADS

PACKAGE = "sharded_loader"
ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
POOLS = ("process", "inline")
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); import benchmarks.road as r; del sys.path[0]; r.serve()"


# -- the process that measures ----------------------------------------------------------------------------------


class Pairs:
    """Samples of the workload ``images``, with labels: ``(image, number)``."""

    def __init__(self, images: Array) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Array, int]:
        return self._images[index], index % 10


def open_loader(pool: str, length: int = NUM_IMAGES) -> Any:
    """A shuffled loader of the package, after one epoch.

    Args:
        pool: one of `POOLS`.
        length: how many samples of the dataset the loader reads per epoch.
    """
    from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader

    workload = WORKLOADS["images"]
    fork = workload.start_method in multiprocessing.get_all_start_methods()
    processes: dict[str, Any] = {"start_method": workload.start_method} if fork else {}
    images = workload.build().columns
    assert images is not None
    made: Any = ProcessPool(WORKERS, **processes) if pool == "process" else InlinePool()
    loader = ShardedDataLoader(Pairs(images[:length]), workload.batch_size, shuffle=True, pool=made)
    for _ in loader:
        pass
    return loader


def time_epoch(loader: Any) -> float:
    """Seconds of CPU time per batch, over one epoch without pauses.

    All threads of this process count, worker processes do not.
    """
    start = time.process_time()
    for _ in loader:
        pass
    return (time.process_time() - start) / len(loader)


def serve() -> None:
    """Answer each line of stdin, ``[what, pool]``, with one line of JSON."""
    import sharded_loader

    root = str(Path(sharded_loader.__file__).parent)
    loaders: dict[str, Any] = {}
    print(json.dumps(root), flush=True)
    for line in sys.stdin:
        what, pool = json.loads(line)
        if pool not in loaders:
            loaders[pool] = open_loader(pool)
        answer = summary_of(record_walks(loaders[pool], root)) if what == "walk" else time_epoch(loaders[pool])
        print(json.dumps(answer), flush=True)
    for loader in loaders.values():
        loader.close()


# -- the report -------------------------------------------------------------------------------------------------


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
        self.sizes, self.notes = sizes_of(read_sources(self.folder / PACKAGE))
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

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def ask(self, what: str, pool: str) -> Any:
        """Have the process measure something.

        Args:
            what: ``"walk"`` (`summary_of` the recorded turns) or ``"cpu"`` (`time_epoch`).
            pool: one of `POOLS`.

        Raises:
            RuntimeError: The process ended.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, pool]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that measures {self.folder} ended; its error stands above")
        return json.loads(line)


def rows_of(checkout: Checkout, walks: Mapping[str, Any], cpu: Sequence[float]) -> dict[str, float]:
    """The column of a checkout, by the names of the rows."""
    rows: dict[str, float] = {}
    for pool in POOLS:
        rows |= {f"next(), {pool}: {name}": value for name, value in walks[pool]["medians"].items()}
        rows[f"next(), {pool}: mean calls"] = walks[pool]["mean calls"]
    rows["main process: CPU us per batch"] = statistics.median(cpu) * 1e6
    return rows | checkout.sizes


def table_of(columns: Mapping[str, Mapping[str, float]]) -> str:
    """A Markdown table; two columns get a third one with the ratio of the second to the first."""
    heads, (first, *others) = ["", *columns], columns.values()
    lines = []
    for name in first:
        values = [column[name] for column in (first, *others)]
        cells = [f"{value:.4g}" if value % 1 else f"{value:.0f}" for value in values]
        if others:
            cells.append(f"{values[1] / values[0]:.2f}" if values[0] else "")
        lines.append([name, *cells])
    heads += ["ratio"] if others else []
    widths = [max(map(len, column)) for column in zip(heads, *lines, strict=True)]
    rule = ["-" * width for width in widths]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (heads, rule, *lines)
    )


def main(arguments: Sequence[str], say: Callable[[str], None] = print) -> int:
    """The command line; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.road", description="Measure the road of a batch.")
    parser.add_argument("--package", type=Path, default=ROOT, metavar="PATH", help="a checkout (default: this one)")
    parser.add_argument("--against", type=Path, metavar="PATH", help="another checkout, for a column before it")
    parser.add_argument("--walk", action="store_true", help="print the functions of the median next(), by pool")
    parser.add_argument("--rounds", type=int, default=7, help="epochs whose CPU time is measured (default 7)")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 1:
        parser.error("--rounds has to be at least 1")
    with contextlib.ExitStack() as stack:
        folders = [folder for folder in (chosen.against, chosen.package) if folder is not None]
        checkouts = [stack.enter_context(Checkout(folder)) for folder in folders]
        walks = [{pool: checkout.ask("walk", pool) for pool in POOLS} for checkout in checkouts]
        cpu = [[checkout.ask("cpu", "process") for checkout in checkouts] for _ in range(chosen.rounds)]
    columns = zip(checkouts, walks, zip(*cpu, strict=True), strict=True)
    say(table_of({str(checkout.folder): rows_of(checkout, walk, times) for checkout, walk, times in columns}))
    for note in checkouts[-1].notes:
        say(note)
    if chosen.walk:
        for pool in POOLS:
            say(f"\nthe median next(), {pool}:")
            for file, function, line, depth in walks[-1][pool]["walk"]:
                say(f"{'  ' * depth}{file}:{line} {function}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
