"""One measurement, in a process of its own: ``python -m benchmarks.child``.

    stdin   {"workload", "loader", "workers", "warm", "span"}     loader: a loader's name or a ceiling's letter
    stdout  its last line: {"value", "same", "in_order"}, or {"error"}

value: samples per second, seconds, bytes or a ratio, as `Workload.kind` says. same and in_order: digests of the first
batches, equal for two loaders that delivered the same samples, and the same samples in the same batches.

A spawned worker of torch's imports this module again, as its main module: it imports nothing heavy.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ceilings import CEILINGS, measure_ceiling
from benchmarks.loaders import LOADERS, Plan, leaves
from benchmarks.workloads import WORKLOADS, Workload, pad, stack

BEFORE_CLOSING = 8
"""Batches that are read before a loop is left."""

IDLE = 0.3
"""Seconds in which workers finish what they were told to read ahead, before closing is timed."""

EPOCHS = 12
"""Of a measurement of gaps; the first one is not timed."""

PATIENCE = 5.0
"""Seconds to wait for worker processes that outlive ``close``."""

HELPERS = ("resource_tracker", "forkserver")
"""Processes of the standard library that live as long as the program."""

INTERPRETERS = 3
"""Fresh ones per measurement of imports; the fastest counts, the others had something in their way."""

READINGS = 3
"""Of memory, the largest counts."""


def main() -> None:
    """Measure what stdin says."""
    warnings.simplefilter("ignore")
    request = json.loads(sys.stdin.read())
    try:
        result = measure(**request)
    except Exception as error:
        result = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print("\n" + json.dumps(result), flush=True)


def measure(workload: str, loader: str, workers: int, warm: float, span: float) -> dict[str, Any]:
    """The measurement of one loader or ceiling on one workload."""
    what = WORKLOADS[workload]
    workers = what.workers or workers
    if what.kind == "import":
        return {"value": time_imports(worker_modules(loader, what))}
    if loader in CEILINGS:
        return _measure_ceiling(loader, what, workers, warm, span)
    LOADERS[loader].load()
    plan = Plan(what, what.build(), workers, warm + span)
    if what.kind in TIMES:
        return TIMES[what.kind](loader, plan)
    stream = LOADERS[loader].open(plan)
    batches = iter(stream)
    result = digest(itertools.islice(batches, what.check_batches))
    if what.kind == "memory":
        _spend(batches, what, warm + span)
        value = float(max(tree_pss() for _ in range(READINGS)))
    else:
        _spend(batches, what, warm)
        samples, seconds = _spend(batches, what, span)
        value = samples / seconds
    del batches
    stream.close()
    return {"value": value, **result}


def digest(batches: Iterable[Any]) -> dict[str, str]:
    """What batches hold. Padding does not count: a sample is the same sample in any batch."""
    total = 0
    stream = 0
    for batch in batches:
        for leaf in leaves(batch):
            for row in leaf:
                raw = row.tobytes().rstrip(b"\0")
                total += zlib.crc32(raw)
                stream = zlib.crc32(raw, stream)
            stream = zlib.crc32(repr(leaf.shape).encode(), stream)
    return {"same": f"{total:x}", "in_order": f"{stream:08x}"}


# -- rates ----------------------------------------------------------------------------------------------------


def _spend(batches: Iterator[Any], workload: Workload, span: float) -> tuple[int, float]:
    """Read batches for a while, a whole number of cycles.

    Args:
        batches: an iterator.
        workload: knows its cycle.
        span: at least so many seconds.

    Returns:
        The samples, and the seconds that they took.

    Raises:
        RuntimeError: the batches ended before.
    """
    began = time.perf_counter()
    until = began + span
    samples = 0
    while True:
        before = samples
        for batch in itertools.islice(batches, workload.cycle):
            has_fields = isinstance(batch, (list, tuple)) and not workload.records
            samples += len(batch[0] if has_fields else batch)
        now = time.perf_counter()
        if samples - before < workload.cycle * workload.batch_size:
            raise RuntimeError(f"the batches ended after {now - began:.2f} s of {span:g} s: choose a shorter --span")
        if now >= until:
            return samples, now - began


def _measure_ceiling(name: str, workload: Workload, workers: int, warm: float, span: float) -> dict[str, Any]:
    plan = Plan(workload, workload.build(), workers)
    result: dict[str, Any] = {}
    if name != "S":  # bare sleep delivers nothing
        collate = list if workload.records else pad if workload.padded else stack
        rows = plan.source.rows
        result = digest(
            collate([rows[index] for index in plan.batches[number].tolist()])
            for number in range(workload.check_batches)
        )
    result["value"] = measure_ceiling(name, workload, plan.source, plan.batches, workers, warm, span)
    return result


# -- seconds --------------------------------------------------------------------------------------------------


def _time_first(loader: str, plan: Plan) -> dict[str, Any]:
    began = time.perf_counter()
    stream = LOADERS[loader].open(plan)
    batches = iter(stream)
    batch = next(batches)
    value = time.perf_counter() - began
    result = digest([batch])
    del batch, batches
    stream.close()
    return {"value": value, **result}


def _time_close(loader: str, plan: Plan) -> dict[str, Any]:
    """From the ``break`` until no worker is left."""
    stream = LOADERS[loader].open(plan)
    batches = iter(stream)
    result = digest(itertools.islice(batches, BEFORE_CLOSING))
    time.sleep(IDLE)
    began = time.perf_counter()
    del batches
    stream.close()
    while workers_alive() and time.perf_counter() < began + PATIENCE:
        time.sleep(0.001)
    return {"value": time.perf_counter() - began, **result}


def _time_gap(loader: str, plan: Plan) -> dict[str, Any]:
    """Epoch after epoch, each with a loop of its own."""
    stream = LOADERS[loader].open(plan)
    result: dict[str, Any] = {}
    epochs = []
    for epoch in range(EPOCHS):
        times = []
        batches = iter(stream)
        if epoch == 0:
            result = digest(batches)
        else:
            for _ in batches:
                times.append(time.perf_counter())
            epochs.append(times)
        del batches
    stream.close()
    return {"value": gap_of(epochs, plan.workers), **result}


def gap_of(epochs: Sequence[Sequence[float]], together: int) -> float:
    """How much longer the first batches of an epoch take than other batches.

    Args:
        epochs: for each epoch the moments, in seconds, at which its batches were delivered.
        together: how many batches are read at the same time, by as many workers. They often arrive together: with two
            workers one batch comes at once and the next one after twice the mean time. So the gap is the time from the
            last batch of an epoch to batch number ``together`` of the next epoch.

    Returns:
        The median gap, divided by the mean time of as many batches: a ratio, 1 if there is no gap. The gaps count in
        the mean.

    Raises:
        ValueError: there are not two epochs, or an epoch is shorter than ``together``.
    """
    if len(epochs) < 2 or min(map(len, epochs)) < together:
        raise ValueError(f"two epochs of at least {together} batches are needed")
    gaps = [after[together - 1] - before[-1] for before, after in itertools.pairwise(epochs)]
    mean = (epochs[-1][-1] - epochs[0][-1]) / sum(map(len, epochs[1:]))
    return statistics.median(gaps) / (together * mean)


TIMES = {"first": _time_first, "close": _time_close, "gap": _time_gap}
"""Kind of workload -> what measures it."""


def worker_modules(name: str, workload: Workload) -> list[str]:
    """What a spawned worker of this loader has imported when it reads its first sample, in that order."""
    if name == "N":
        return ["numpy"]
    LOADERS[name].load()
    plan = Plan(workload, workload.build(), 1)
    stream = LOADERS[name].open(plan)
    batches = iter(stream)
    modules: list[str] = next(batches)[0].split("\n")
    del batches
    stream.close()
    return [module for module in modules if not module.startswith(("benchmarks", "__"))]


def time_imports(modules: list[str]) -> float:
    """Seconds to import these modules in a fresh interpreter."""
    code = (
        "import importlib, sys, time\n"
        "names = sys.stdin.read().split()\n"
        "began = time.perf_counter()\n"
        "for name in names:\n"
        "    if name not in sys.modules:\n"
        "        try:\n"
        "            importlib.import_module(name)\n"
        "        except Exception:\n"
        "            pass\n"  # modules that others made and no finder knows
        "print(time.perf_counter() - began)\n"
    )
    times = []
    for _ in range(INTERPRETERS):
        done = subprocess.run(
            [sys.executable, "-c", code], input="\n".join(modules), capture_output=True, text=True, check=True
        )
        times.append(float(done.stdout.split()[-1]))
    return min(times)


# -- processes ------------------------------------------------------------------------------------------------


def tree_pss() -> int:
    """Bytes of this process and all below it; what several share counts once (Linux)."""
    total = 0
    for pid in [os.getpid(), *descendants()]:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def descendants(root: int | None = None) -> list[int]:
    """All living processes below this one, or below another (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            except OSError:
                continue
            if state != "Z":
                children.setdefault(int(parent), []).append(int(entry.name))
    found: list[int] = []
    todo = [os.getpid() if root is None else root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def workers_alive() -> list[int]:
    found = []
    for pid in descendants():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if command and not any(helper in command for helper in HELPERS):
            found.append(pid)
    return found


if __name__ == "__main__":
    main()
