"""``python -m benchmarks.gpu``: what a loader does for a GPU, in under 10 minutes.

arguments -> Run -> the parts, one after the other -> records -> tables on stdout, gpu.json and tables in --out

One process: a device's context takes seconds to make. What fails is shown in its place, and the rest goes on. What was
measured is in gpu.json at once. If the program is interrupted (Ctrl-C, SIGTERM), or something hangs beyond the budget,
it ends with the tables of what there is; in the second case after the stacks, with status 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import faulthandler
import json
import os
import shlex
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import gpu_costs, gpu_parts, gpu_report, measure, report
from benchmarks.gpu_device import Device
from benchmarks.gpu_run import QUICK, SMOKE, Run, Scale

PARTS: dict[str, Callable[[Run], None]] = {
    "bus": gpu_parts.bus,
    "step": gpu_parts.step,
    "pin": gpu_costs.pin,
    "bound": gpu_costs.bound,
    "host": gpu_costs.host,
    "memory": gpu_costs.memory,
    "resident": gpu_parts.resident,
    "shards": gpu_parts.shards,
    "lock": gpu_costs.lock,
}
"""What matters most comes first: what no longer fits into the time is left out."""

BUDGET, QUICK_BUDGET = 540, 270
GRACE = 50
"""Seconds after the budget's end in which what was begun has to be over."""


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, its defaults filled in."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description="Measure the way to a GPU.")
    parser.add_argument("--device", default="cuda:0", help="default cuda:0; cpu only tries the program")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, under five minutes")
    parser.add_argument("--only", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--workers", type=int, help="of each loader (default 8, at most half of the CPUs)")
    times = f"seconds for all of it (default {BUDGET}, with --quick {QUICK_BUDGET})"
    parser.add_argument("--budget", type=float, help=times)
    parser.add_argument("--out", type=Path, metavar="DIR", help="write gpu.json, and the tables, there")
    parser.add_argument("--note", default="", help="a sentence to stand above the results")
    chosen = parser.parse_args(arguments)
    if chosen.workers is None:
        chosen.workers = max(1, min(8, (os.cpu_count() or 2) // 2))
    if chosen.budget is None:
        chosen.budget = QUICK_BUDGET if chosen.quick else BUDGET
    if chosen.workers < 1 or chosen.budget <= 0:
        parser.error("--workers has to be at least 1, --budget above 0")
    chosen.only = chosen.only or list(PARTS)
    return chosen


def main(arguments: Sequence[str], watched: bool = False) -> int:
    """Run the benchmark.

    Args:
        watched: end the process if it hangs, and take SIGTERM for a Ctrl-C.

    Returns:
        The exit status: 0 whatever was measured, 2 where there is no such device.
    """
    chosen = parse(arguments)
    try:
        device = Device(chosen.device)
    except RuntimeError as error:
        print(f"{error}", file=sys.stderr)
        return 2
    scale = SMOKE if not device.is_gpu else QUICK if chosen.quick else Scale()
    settings = measure.Settings((), ("ours", "torch"), scale.rounds, chosen.workers, 0, scale.span)
    about = measure.about(settings, shlex.join(["python", "-m", "benchmarks.gpu", *arguments]), chosen.note)
    about |= device.about()

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
        if chosen.out is not None:
            keep(chosen.out, run, about)

    def finish() -> None:
        text = gpu_report.whole(run.records, about, device.is_gpu)
        print(text, flush=True)
        if chosen.out is not None:
            write(chosen.out, run, about, text)

    run = Run(device, scale, chosen.workers, time.monotonic() + chosen.budget, say)
    if watched:
        watch(chosen.budget + GRACE, finish)
    try:
        for name in chosen.only:
            if time.monotonic() > run.deadline:
                run.fail(name, "ours", 0, "skipped: no time left")
                continue
            try:
                PARTS[name](run)
            except Exception as error:
                traceback.print_exc(file=sys.stderr)
                run.fail(name, "ours", 0, f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        print(f"interrupted after {len(run.records)} measurements: here is what there is", file=sys.stderr)
    finish()
    if watched:
        faulthandler.cancel_dump_traceback_later()
    return 0


def watch(seconds: float, finish: Callable[[], None]) -> None:
    """End this process after so many seconds, with what there is; at once, like a Ctrl-C, on SIGTERM."""

    def give_up() -> None:
        faulthandler.dump_traceback(all_threads=True)
        try:
            finish()
        finally:
            os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    # If not even a thread gets to run, what is in gpu.json is all there is.
    faulthandler.dump_traceback_later(seconds + 5, exit=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def keep(folder: Path, run: Run, about: dict[str, object]) -> None:
    """gpu.json, as far as it is known."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"about": about, "records": [dataclasses.asdict(record) for record in run.records]}
    (folder / "gpu.json").write_text(json.dumps(plain, indent=1) + "\n")


def write(folder: Path, run: Run, about: dict[str, object], text: str) -> None:
    """gpu.json, and the tables: into a README.md with the marker lines (measured on a GPU only), else into gpu.md."""
    keep(folder, run, about)
    readme = folder / "README.md"
    filled = None
    if run.device.is_gpu and readme.exists():
        filled = report.fill(readme.read_text(), text, gpu_report.BEGIN, gpu_report.END)
    if filled is None:
        (folder / "gpu.md").write_text(f"# Results on a GPU\n\n{text}\n")
    else:
        readme.write_text(filled)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], watched=True))
