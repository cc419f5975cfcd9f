"""How many copies of a dataset the ranks of a machine hold: `python -m benchmarks.shared`.

    ranks as processes of their own -> each reads an epoch with its workers, and waits -> PSS of all processes -> copies

A page of memory that three processes map counts a third in the PSS of each. Python, torch and the memory of batches
count too, so each way is measured twice, with a small and a large dataset, and the difference counts.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import numpy as np
import psutil

ROW = 250_000
SMALL = 200
"""Rows of the small dataset: as many as all batches in flight."""

WAYS = ("own", "memmap")


def build(rows: int) -> Any:
    """Numbers, and texts: half of the bytes each."""
    from sharded_loader import ArrayDataset

    images = np.arange(rows).astype(np.uint8)[:, None] + np.zeros(ROW // 2, np.uint8)
    return ArrayDataset(image=images, name=np.array([b"%0*d" % (ROW // 2, number) for number in range(rows)]))


def mapped(path: str) -> Any:
    """The array of a file."""
    from sharded_loader import ArrayDataset

    return ArrayDataset(image=np.load(path, mmap_mode="r"))


def rank(way: str, method: str, rows: int, workers: int, path: str) -> None:
    """One rank: build or map, read an epoch, and wait until stdin ends."""
    from sharded_loader import ProcessPool, ShardedDataLoader

    began = time.perf_counter()
    dataset: Any = mapped(path) if way == "memmap" else build(rows)
    took = time.perf_counter() - began
    order = {"shuffle": True, "seed": 0}
    with ShardedDataLoader(dataset, 4, pool=ProcessPool(workers, start_method=method), **order) as loader:
        for _ in loader:
            pass
        first = time.perf_counter() - began - took
        print(f"{took} {first}", flush=True)
        sys.stdin.read()


def pss(process: psutil.Process) -> int:
    """Bytes of a process and of all below it. Of files only arrays: other programs map the same libraries."""
    total = 0
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error), open(f"/proc/{one.pid}/smaps_rollup") as file:
            total += 1024 * sum(int(line.split()[1]) for line in file if line.startswith(("Pss_Anon", "Pss_Shmem")))
        with contextlib.suppress(OSError, psutil.Error):
            total += sum(found.pss for found in one.memory_maps() if found.path.endswith(".npy"))
    return total


def measure(way: str, method: str, rows: int, ranks: int, workers: int) -> tuple[int, float, float]:
    """PSS of all ranks; the longest seconds until one had the dataset, and in which one has read an epoch."""
    arguments = [way, method, str(rows), str(workers), ""]
    with contextlib.ExitStack() as stack:  # which ends their stdin, and waits for them
        if way == "memmap":
            arguments[-1] = f"{stack.enter_context(tempfile.TemporaryDirectory())}/images.npy"
            np.save(arguments[-1], np.zeros((rows, ROW), np.uint8))
        command = [sys.executable, "-m", "benchmarks.shared", "--rank", *arguments]
        started = [
            stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for _ in range(ranks)
        ]
        seconds = [tuple(map(float, one.stdout.readline().split())) for one in started if one.stdout is not None]
        nbytes = sum(pss(psutil.Process(one.pid)) for one in started)
    took, read = map(max, zip(*seconds, strict=True))
    return nbytes, took, read


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared", description="Count the copies of a dataset.")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--mb", type=int, default=500, help="how large the dataset is")
    parser.add_argument("--methods", nargs="+", default=["fork", "spawn"])
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        way, method, rows, workers, path = given.rank
        rank(way, method, int(rows), int(workers), path)
        return
    large = given.mb * 1_000_000 // ROW
    print(f"{given.ranks} ranks x {given.workers} workers, {given.mb} MB")
    print("| dataset | workers | copies (PSS) | until all have it, s | first epoch, s |")
    print("|---|---|---|---|---|")
    for way in given.ways:
        for method in given.methods:
            little, *_ = measure(way, method, SMALL, given.ranks, given.workers)
            much, took, read = measure(way, method, SMALL + large, given.ranks, given.workers)
            copies = (much - little) / (large * ROW)
            print(f"| {way} | {method} | {copies:.2f} | {took:.1f} | {read:.1f} |", flush=True)


if __name__ == "__main__":
    main()
