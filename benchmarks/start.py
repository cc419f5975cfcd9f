"""How soon workers read, and how soon they are gone: `python -m benchmarks.start`.

Each row has a process of its own, which holds 154 MB of images, and perhaps 500 MB of Python objects. The loaders take
turns in it, in a new order in each round. Times in milliseconds, the median and the least of all rounds:

    first    from making the loader to its first batch, of 256 images
    close    after 8 batches and a rest, from leaving the loop until no worker is left
    epoch    200 images in batches of 16, with workers that live for one epoch: one of five epochs in a row

"ours" is `ShardedDataLoader`, "drop-in" is `sharded_loader.torch.DataLoader`.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.child import BEFORE_CLOSING, PATIENCE, workers_alive
from benchmarks.samples import images

LOADERS = ("ours", "drop-in", "torch")
KINDS = ("first", "close", "epoch")
EPOCHS, SMALL = 5, 200
REST = 0.15
"""Seconds in which workers finish what they were told to read ahead."""

OBJECTS = 5_000_000
"""Floats in tuples of ten: 100 bytes for each float."""


def make(name: str, dataset: Any, batch: int, workers: int, method: str, persistent: bool) -> Any:
    """A loader of this name, of processes or (``method`` is "threads") of threads, which torch does not have."""
    if name == "ours":
        from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool

        pool = ThreadPool(workers) if method == "threads" else ProcessPool(workers, start_method=method)
        return ShardedDataLoader(dataset, batch, pool=pool)
    from torch.utils import data

    from sharded_loader.torch import DataLoader

    kind: Any = data.DataLoader if name == "torch" else DataLoader
    more: dict[str, Any] = {"persistent_workers": persistent}
    if method != "threads":
        more["multiprocessing_context"] = method
    elif name == "drop-in":
        more["thread_pool"] = True
    return kind(dataset, batch, num_workers=workers, **more)


def once(open_loader: Callable[..., Any], rows: Any) -> dict[str, float]:
    """Seconds of one start, one end and one short epoch."""
    began = time.perf_counter()
    loader = open_loader(rows, 256, True)
    batches = iter(loader)
    next(batches)
    first = time.perf_counter() - began
    for _ in range(BEFORE_CLOSING - 1):
        next(batches)
    time.sleep(REST)
    began = time.perf_counter()
    del batches
    if hasattr(loader, "close"):
        loader.close()
    del loader
    while workers_alive() and time.perf_counter() < began + PATIENCE:
        time.sleep(0.001)
    close = time.perf_counter() - began
    loader = open_loader([rows[index] for index in range(SMALL)], 16, False)
    began = time.perf_counter()
    for _ in range(EPOCHS):
        for _ in loader:
            pass
    epoch = (time.perf_counter() - began) / EPOCHS
    if hasattr(loader, "close"):
        loader.close()
    return {"first": first, "close": close, "epoch": epoch}


def child(workers: int, method: str, heap: bool, rounds: int) -> dict[str, list[float]]:
    """All rounds of a row: a list of seconds for each kind and loader."""
    warnings.simplefilter("ignore")
    rows, found = images().rows, defaultdict(list)
    held = [tuple(map(float, range(at, at + 10))) for at in range(0, OBJECTS, 10)] if heap else []
    gc.collect()
    order, shuffle = list(LOADERS), random.Random(0)
    for number in range(rounds + 1):
        shuffle.shuffle(order)
        for name in order:
            # The attributes are bound now: the loop goes on to another loader while this one ends.
            times = once(lambda *given, name=name: make(name, given[0], given[1], workers, method, given[2]), rows)
            for kind in KINDS if number else ():  # in the first round modules are imported
                found[f"{kind} {name}"].append(times[kind])
    del held
    return found


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.start", description="How workers start and end.")
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--methods", nargs="+", default=["fork", "threads", "spawn"])
    parser.add_argument("--rounds", type=int, default=15, help="of fork and threads; spawn has a fifth of them")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(child(**json.loads(given.child))))
        return
    print("| workers | heap | what | " + " | ".join(LOADERS) + " | torch / ours | torch / drop-in |")
    print("|---|---|---|" + "---|" * (len(LOADERS) + 2))
    for method in given.methods:
        for heap in (False, True):
            for workers in given.workers:
                rounds = max(2, given.rounds // 5) if method == "spawn" else given.rounds
                what = {"workers": workers, "method": method, "heap": heap, "rounds": rounds}
                command = [sys.executable, "-m", "benchmarks.start", "--child", json.dumps(what)]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                found = json.loads(done.stdout.splitlines()[-1])
                for kind in KINDS:
                    times = [found[f"{kind} {name}"] for name in LOADERS]
                    shown = [f"{1000 * statistics.median(one):.1f} ({1000 * min(one):.1f})" for one in times]
                    for one in times[:2]:
                        ratio = statistics.median(other / own for other, own in zip(times[2], one, strict=True))
                        shown.append(f"{ratio:.2f} ({min(times[2]) / min(one):.2f})")
                    size = "500 MB" if heap else "small"
                    print(f"| {workers} {method} | {size} | {kind} | {' | '.join(shown)} |", flush=True)


if __name__ == "__main__":
    main()
