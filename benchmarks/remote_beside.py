"""Other libraries over the same slow server, beside ours: part of `python -m benchmarks.remote`.

    remote_loaders     ours, MosaicML's streaming, litdata, WebDataset: a URL -> batches
    here               each loader in turns, each in a process of its own -> two tables

All read the same samples: noise of 16 kB with its index, each library in its own format. Each has two workers, a cache
for 53 % of the data (WebDataset has none), and a shuffle over about four shards.

    open            makes the dataset and the loader; the modules are imported before
    first batch     from the beginning of `open` until the first batch is there
    epoch 1, 2      samples per second, from the first request for a batch
    bytes           that the server sent until the end of each epoch, as a multiple of the data
    requests        that the server answered, in the same way
    CPU             seconds of the loader's processes, for both epochs
    resumed         from the beginning of `open` until the first batch of a state of mid-epoch is there, with an empty
                    cache; of libraries whose loader has `load_state_dict`

Each row has the medians of the rounds. Each sample is compared with what was written, and each has to come once.

The second table shows one epoch of a small dataset over a server with a fault: see `benchmarks.range_server`.

    right           all samples came, each once
    error           the epoch ended with it; what it says is printed below the table
    other samples   samples came, of other content than the index file was made for, and no error
    nothing         no end within `PATIENCE` seconds

The others are optional: a row says if a library is not installed. `make test-frameworks` installs them all, into
``.venv-frameworks``.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.range_server import CHANGE, CHANGED, COUNTS, CUT, NO_PARTS, REFUSED, serving
from benchmarks.remote_loaders import LOADERS, OURS, WEBDATASET, Noise, write

LARGE, SMALL = (32, 512, 16_000), (8, 128, 16_000)
"""Shards, samples of a shard, and bytes of a sample, of each table: 262 and 16 MB."""

SHARE = 0.53
"""Of the data, for which the caches have room in the first table. In the second, they have room for twice as much."""

TIMEOUT, PATIENCE = 90, 30
"""Seconds that a loader may take for a row of the first table, and of the second."""

FAULTS = {REFUSED: "503 for 30 %", CUT: "30 % of answers cut", NO_PARTS: "no ranges", CHANGED: "a shard is replaced"}


# -- one measurement, in a process of its own --------------------------------------------------------------------------


class Check:
    """Whether each sample comes once and is what was written.

    Args:
        sums: of each sample that was written.
    """

    def __init__(self, sums: Any) -> None:
        self.sums, self.counts, self.is_other = sums, np.zeros(len(sums), int), False

    def see(self, batch: Any) -> None:
        """Take a batch."""
        samples, indices = (np.asarray(batch[name]) for name in (("x", "index") if isinstance(batch, dict) else (0, 1)))
        self.counts += np.bincount(indices, minlength=len(self.counts))
        self.is_other |= bool((samples.view(np.uint64).sum(1) != self.sums[indices]).any())

    @property
    def verdict(self) -> str:
        """What was seen."""
        missing, more = int((self.counts == 0).sum()), int((self.counts > 1).sum())
        if missing or more:
            return f"{missing} SAMPLES MISSING, {more} TWICE"
        return "other samples" if self.is_other else "right"


def asked(url: str) -> Any:
    """The answer of the server to a request that does not count."""
    with urllib.request.urlopen(url) as answer:
        return json.loads(answer.read())


def spent() -> float:
    """Processor seconds of this process and of those of its children that have ended."""
    return sum(os.times()[:4])


def one(name: str, url: str, folder: Path, epochs: int) -> dict[str, Any]:
    """What one loader does, in this process."""
    warnings.simplefilter("ignore")
    kept = LOADERS[name].load()
    sums, found, verdicts = np.load(folder / "sums.npy"), {}, set[str]()
    size = json.loads((folder / "sizes").read_text())[2]
    own, room = tempfile.TemporaryDirectory(dir=folder), int((SHARE if epochs > 1 else 2) * len(sums) * size)
    cpu, began, counts = spent(), time.perf_counter(), [asked(url + COUNTS)]
    opened = LOADERS[name].open(url, Path(own.name), room)
    found["open"] = time.perf_counter() - began
    asked(url + CHANGE)
    for epoch in range(epochs):
        check, first = Check(sums), time.perf_counter()
        for batch in opened.batches:
            found.setdefault("first", time.perf_counter() - began)
            check.see(batch)
        found[f"epoch {epoch + 1}"] = len(sums) / (time.perf_counter() - first)
        counts.append(asked(url + COUNTS))
        verdicts.add(check.verdict)
    opened.close()
    can_resume = epochs > 1 and hasattr(opened.batches, "load_state_dict")
    del opened
    gc.collect()
    steps = np.diff(counts, axis=0) / (len(sums) * size, 1)
    found.update(cpu=spent() - cpu, bytes=steps[:, 0].tolist(), requests=steps[:, 1].tolist())
    if can_resume:
        found["resumed"] = resumed(name, url, folder, room)
    del kept
    return {**found, "same": ", ".join(sorted(verdicts))}


def resumed(name: str, url: str, folder: Path, room: int) -> float:
    """Seconds until a state of mid-epoch has given a batch, on a machine with an empty cache."""
    with contextlib.ExitStack() as stack:
        places = [Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder))) for _ in range(2)]
        first = LOADERS[name].open(url, places[0], room)
        for _ in itertools.islice(first.batches, len(first.batches) // 2 + 1):
            state = first.batches.state_dict()
        first.close()
        began = time.perf_counter()
        second = LOADERS[name].open(url, places[1], room)
        second.batches.load_state_dict(state)
        next(iter(second.batches))
        seconds = time.perf_counter() - began
        second.close()
    return seconds


def measured(name: str, url: str, folder: Path, epochs: int, timeout: float) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.remote_beside", "--one", name, url, str(folder), str(epochs)]
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True, start_new_session=True) as process:
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # its workers too
            process.communicate()
            return {"why": f"nothing in {timeout} s"}
    if process.returncode:
        said = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", errors, re.MULTILINE) or [str(process.returncode)]
        return {"why": "error", "says": said[-1]}
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return found


def written(folder: Path, *sizes: int) -> None:
    """Write all formats; by a process of its own, as some libraries must not be imported before others."""
    command = [sys.executable, "-m", "benchmarks.remote_beside", "--write", str(folder), *map(str, sizes)]
    subprocess.run(command, check=True, capture_output=True)


# -- the tables --------------------------------------------------------------------------------------------------------


def beside(scale: float, rounds: int, speed: float | None) -> None:
    """Print the table of two epochs."""
    shards, samples, size = LARGE[0], LARGE[1], 8 * max(1, int(LARGE[2] * scale / 8))
    with tempfile.TemporaryDirectory() as place, serving(Path(place), speed) as (url, _):
        written(Path(place), shards, samples, size)
        nbytes = shards * samples * size / 1e6
        print(f"\n{shards * samples:,} samples in {shards} shards, {nbytes:.0f} MB, {rounds} rounds, load {load()}\n")
        found: dict[str, list[Any]] = {name: [] for name in LOADERS}
        for _, name in itertools.product(range(rounds), LOADERS):
            missing = LOADERS[name].missing
            found[name].append({"why": missing} if missing else measured(name, url, Path(place), 2, TIMEOUT))
        print("| | open, s | first batch, s | epoch 1, samples/s | epoch 2 | bytes 1 / 2 | requests 1 / 2 ", end="")
        print("| CPU, s | resumed, s | samples |\n|---|---|---|---|---|---|---|---|---|---|")
        for name, runs in found.items():
            print(row(name, runs), flush=True)
        seconds = {name: median(runs, "first") for name, runs in found.items()}
        if seconds[OURS] and seconds[WEBDATASET]:
            ratio = seconds[OURS] / seconds[WEBDATASET]
            print(f"\n- first batch / WebDataset's, the same files: {ratio:.2f} (bar 1.3)")
        print(f"\nload {load()}")


def median(runs: Iterable[dict[str, Any]], key: str) -> Any:
    """The median over the rounds that have a figure; of lists, one for each place; None if no round has it."""
    found = [run[key] for run in runs if key in run]
    if not found:
        return None
    return (
        list(map(statistics.median, zip(*found, strict=True)))
        if isinstance(found[0], list)
        else statistics.median(found)
    )


def row(name: str, runs: list[dict[str, Any]]) -> str:
    """A row of the first table."""
    verdicts = ", ".join(sorted({run.get("same") or f"{run['why']} {run.get('says', '')}".strip() for run in runs}))
    forms = {"open": ".2f", "first": ".2f", "epoch 1": ",.0f", "epoch 2": ",.0f", "bytes": ".2f", "requests": ".0f"}
    cells = []
    for key, form in {**forms, "cpu": ".1f", "resumed": ".2f"}.items():
        value = median(runs, key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        cells.append(" / ".join(format(one, form) for one in values))
    return f"| {name} | {' | '.join(cells)} | {verdicts} |"


def failures(speed: float | None) -> None:
    """Print the table of faults."""
    says = []
    print(f"\n| | {' | '.join(FAULTS.values())} |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as place:
        written(Path(place), *SMALL)
        for name in LOADERS:
            cells = []
            for fault, text in FAULTS.items():
                missing = LOADERS[name].missing
                with serving(Path(place), speed, fault) as (url, _):
                    began = time.perf_counter()
                    found = {"why": missing} if missing else measured(name, url, Path(place), 1, PATIENCE)
                seconds = f", {time.perf_counter() - began:.0f} s" if "same" in found else ""
                cells.append((found.get("same") or found["why"]) + seconds)
                if "says" in found:
                    says.append(f"- {name}, {text}: `{found['says'][:240]}`")
            print(f"| {name} | {' | '.join(cells)} |", flush=True)
    print("\n" + "\n".join(says) + f"\n\nload {load()}")


def load() -> str:
    """The load averages of this machine."""
    return " ".join(f"{value:.1f}" for value in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def main() -> None:
    """Measure one loader, or write the data."""
    parser = argparse.ArgumentParser(description="Parts of `python -m benchmarks.remote`.")
    parser.add_argument("--one", nargs=4, metavar=("LOADER", "URL", "FOLDER", "EPOCHS"))
    parser.add_argument("--write", nargs=4, metavar=("FOLDER", "SHARDS", "SAMPLES", "SIZE"))
    given = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr):
        if given.write:
            folder, (shards, samples, size) = Path(given.write[0]), map(int, given.write[1:])
            (folder / "sizes").write_text(json.dumps([shards, samples, size]))
            write(folder, Noise(shards * samples, size), samples)
            if (shards, samples, size) == SMALL:
                write(folder / "changed", Noise(shards * samples, size, 1), samples)
                for path in (folder / "changed" / "data").glob("*/*"):
                    if not re.search(r"\D0*1\.(tar|mds|bin)$", str(path)):  # one shard of each format
                        path.unlink()
            return
        name, url, folder, epochs = given.one
        found = one(name, url, Path(folder), int(epochs))
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
