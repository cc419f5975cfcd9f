"""Rounds of measurements, each in a child process of its own.

    Settings -> run(settings) -> Records, one after the other

In each round every loader and every ceiling of every chosen workload is measured once, in a new shuffled order: a
machine that slows down for a minute slows down all of them, and ratios are taken within a round. A child that fails
or hangs becomes a record with an error, and the run goes on.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.loaders import LOADERS, OURS
from benchmarks.workloads import WORKLOADS, Workload

ROOT = Path(__file__).resolve().parent.parent

TIMEOUT = 120.0
"""Seconds for one child, beyond what it was asked to spend."""

GRACE = 0.5
"""Seconds between asking a child to end, and ending it."""

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Settings:
    """What to run.

    Attributes:
        workloads: names, in the order of the report.
        loaders: names, likewise.
        rounds: how often everything is measured.
        workers: processes per loader, where the workload does not say.
        warm, span: seconds before and of a timed stretch.
        seed: of the order within a round.
    """

    workloads: tuple[str, ...]
    loaders: tuple[str, ...]
    rounds: int
    workers: int
    warm: float
    span: float
    seed: int = 0


@dataclass(frozen=True)
class Record:
    """One measurement, or why there is none."""

    round: int
    workload: str
    loader: str
    value: float | None = None
    error: str | None = None
    same: str | None = None
    in_order: str | None = None


def contestants(workload: Workload, loaders: Sequence[str]) -> list[str]:
    """The ceilings and the loaders that can do this workload."""
    able = [name for name in loaders if LOADERS[name].refuses(workload) is None]
    if workload.records:
        able = [name for name in able if name == OURS]
    if workload.kind == "import":
        able = [name for name in able if name in ("ours", "torch")]
    return [*workload.ceilings, *able]


def plan(settings: Settings) -> list[list[tuple[str, str]]]:
    """Per round the (workload, loader) pairs, in the order in which they are measured."""
    shuffle = random.Random(settings.seed)
    rounds = []
    for _ in range(settings.rounds):
        pairs = []
        for name in settings.workloads:
            group = [(name, loader) for loader in contestants(WORKLOADS[name], settings.loaders)]
            shuffle.shuffle(group)
            # Shuffled within the workload, not over all: what a ratio compares is measured seconds apart.
            pairs += group
        rounds.append(pairs)
    return rounds


def run(settings: Settings, say: Callable[[str], None]) -> Iterator[Record]:
    """All measurements, as they are made; ``say`` is told about each."""
    missing = {name for name in settings.loaders if LOADERS[name].version() is None}
    for number, pairs in enumerate(plan(settings)):
        for workload, loader in pairs:
            result: dict[str, Any]
            if loader in missing:
                result = {"error": NOT_INSTALLED}
            else:
                request = {
                    "workload": workload,
                    "loader": loader,
                    "workers": settings.workers,
                    "warm": settings.warm,
                    "span": settings.span,
                }
                result = run_child(request, TIMEOUT + settings.warm + settings.span)
            shown = result.get("error") or f"{result['value']:.6g}"
            say(f"round {number + 1}/{settings.rounds}  {workload:15} {loader:10} {shown}")
            yield Record(number, workload, loader, **result)


def run_child(request: dict[str, Any], timeout: float) -> dict[str, Any]:
    """The result of `benchmarks.child` in a fresh interpreter."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(json.dumps(request), timeout)
        except subprocess.TimeoutExpired:
            _kill(process)
            return {"error": f"no result after {timeout:.0f} s"}
        except BaseException:
            _kill(process)
            raise
    with contextlib.suppress(ValueError, IndexError):
        result = json.loads(out.splitlines()[-1])
        if isinstance(result, dict):
            error = str(result.get("error", ""))
            missing = error.startswith(("ImportError", "ModuleNotFoundError"))
            return {"error": f"{NOT_INSTALLED} ({error})"} if missing else result
    last = err.strip().splitlines()[-1:] or ["no output"]
    return {"error": f"ended with {process.returncode}: {last[0]}"}


def _kill(process: subprocess.Popen[str]) -> None:
    """The child and its workers: they are a session of their own.

    First in a way that the standard library's resource tracker ignores, so that it can remove the shared memory of
    the dead.
    """
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            time.sleep(GRACE)
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def about(settings: Settings, command: str, note: str) -> dict[str, Any]:
    """Where and with what the run was made."""
    packages = ["sharded_loader", "torch", "numpy", "pillow"]
    packages += [LOADERS[name].package for name in settings.loaders if LOADERS[name].package not in packages]
    versions = {}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = NOT_INSTALLED
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "command": command,
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.release().split('-')[0]}, Python {platform.python_version()}",
        "versions": versions,
        "settings": {name: value for name, value in asdict(settings).items() if name not in ("workloads", "loaders")},
        "note": note,
    }


def _cpu() -> str:
    with contextlib.suppress(OSError, IndexError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
