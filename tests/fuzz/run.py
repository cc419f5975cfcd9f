"""Random cases, one after the other: what they are, what is said of them, what they have left behind.

(kind, seed) -> a `steps.Program` -> run -> nothing, or a `Difference`
"""

import contextlib
import faulthandler
import gc
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests import conftest
from tests.damaged_records import DamagedFile
from tests.fuzz.caches import Round
from tests.fuzz.faults import Calm, Disturbed, Twins
from tests.fuzz.groups import Groups
from tests.fuzz.growth import Growing
from tests.fuzz.leases import Leased
from tests.fuzz.packed import Filtered, Phases
from tests.fuzz.ranks import Ranks
from tests.fuzz.shares import Shares
from tests.fuzz.steps import Case, Difference
from tests.fuzz.storm import Storm

KINDS: dict[str, tuple[Any, ...]] = {
    "plain": ("loaders of every kind", Case),
    "faults": ("disturb the loaders", Disturbed, Twins),
    "twins": ("draw every verb of both loaders", Calm),
    "ranks": ("ranks that leave and join", Ranks),
    "leases": ("leases that are finished at random, on ranks that are killed", Leased),
    "shares": ("ranks that share global batches, and are killed", Shares),
    "growth": ("datasets that grow and lose samples", Growing),
    "packed": ("documents packed as they are read, and filtered samples", Phases, Filtered),
    "records": ("damaged RecordIO files", DamagedFile),
    "caches": ("ranks that share a cache, and are killed", Round),
    "groups": ("samples that are read by group, ahead of their batches", Groups),
    "nodes": ("actors and nodes of a cluster of Ray that are killed", Storm),
}
"""What each is, and its programs: a seed runs one of them."""

HANG = 150.0
"""Seconds for one step. The slowest in order, a first batch from spawned workers, takes 5 on a busy machine, and 40
with eight other jobs on two cores."""


@dataclass
class Report:
    """What has happened in all cases."""

    counts: Counter[str] = field(default_factory=Counter)  # what was done, and how often
    # Of cases with faults. If their zygote was killed, they are nobody's children any more.
    workers: dict[int, psutil.Process] = field(default_factory=dict)
    case: Any = None  # the one that runs
    began: float = field(default_factory=time.monotonic)

    def say(self) -> None:
        counts, seconds = self.counts, time.monotonic() - self.began
        faults = sum(count for name, count in counts.items() if name.startswith("fault"))
        done = f"{counts['cases']} cases, {counts['batches compared']} batches, {faults} faults"
        print(f"{seconds:5.0f} s: {done}, {counts['differences']} differences", flush=True)

    def show(self, left: dict[str, Any]) -> None:
        """The table."""
        for name, count in [*sorted(self.counts.items()), ("kinds of things left at the end", len(left))]:
            print(f"{name:60}{count:>10,}")
        for kind, items in left.items():
            print(f"left: {kind}: {items}")

    def watch(self, over: threading.Event) -> None:
        """Say every 10 s how far it is; end the program when a step hangs."""
        said = time.monotonic()
        while not over.wait(1.0):
            # If not even this thread can run.
            faulthandler.dump_traceback_later(HANG + 10, exit=True, file=sys.__stderr__)
            now, case = time.monotonic(), self.case
            if case is not None and now - case.last_sign > HANG:
                print(f"HANG of {HANG:.0f} s in {case}", flush=True)
                faulthandler.dump_traceback(all_threads=True, file=sys.__stderr__)
                self.show({})
                sys.stdout.flush()
                os._exit(1)
            if now - said >= 10:
                said = now
                self.say()
        faulthandler.cancel_dump_traceback_later()

    def left(self, before: Any) -> dict[str, Any]:
        """What is still there although every loader is closed or garbage, after a grace for what is ending."""

        def find() -> dict[str, Any]:
            gc.collect()
            alive = {pid for pid, worker in self.workers.items() if _lives(worker)}
            return conftest.remains(*before) | ({"workers": alive} if alive else {})

        conftest.until(lambda: not find(), conftest.PATIENCE)
        return find()


def _lives(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def run_case(seed: int, kind: str = "plain", processes: bool = True, report: Report | None = None) -> Counter[str]:
    """Run one case; if wanted, with threads in the place of processes. What was done, and how often.

    Raises:
        Difference: the loader did something else; says what, and what was done to it.
    """
    case, report, (_, *programs) = None, report or Report(), KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # batches that are left out
        try:
            report.case = case = programs[seed % len(programs)](seed, processes)
            case.run()
        except Exception as error:
            again = f"python -m tests.fuzz --case {seed}{f' --{kind}' * (kind != 'plain')}"
            raise Difference(f"case {seed}: {error}\n    {case}\nagain: {again}") from error
        finally:
            if case is not None:
                report.counts.update(case.counts)
                report.workers |= case.workers
            report.case = None
    return report.counts


def run(seeds: Iterable[int], kind: str, until: float) -> int:
    """Run cases up to a time, print what has happened; the exit status."""
    logging.getLogger("sharded_loader").addHandler(logging.NullHandler())  # of samples that are skipped, and deaths
    conftest.start_helpers()
    gc.collect()
    gc.freeze()
    before, report, over = conftest.here(), Report(), threading.Event()
    report.counts["differences"] = 0
    monitor = threading.Thread(target=report.watch, args=[over])
    monitor.start()
    try:
        for seed in seeds:
            if time.monotonic() > until:
                break
            try:
                run_case(seed, kind, report=report)
            except Difference as difference:
                report.counts["differences"] += 1
                traceback.print_exception(difference)
            report.counts["cases"] += 1
    finally:
        over.set()
        monitor.join()
    report.say()
    left = report.left(before)
    report.show(left)
    return 1 if left or report.counts["differences"] else 0
