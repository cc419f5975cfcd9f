"""Whole jobs, from the first line to the last batch: ``python -m benchmarks.jobs``. See `jobs.md` for what it found.

    jobs_data       files of a job, from fixed seeds, in a temporary folder
    jobs_loaders    torch, the drop-in and ours; `jobs_others`: the specialists, each in its own format
    jobs_child      one contender does one job, in a process of its own
    here            rounds, the memory of all its processes, kills -> `jobs.json` and `jobs.md`

Each contender reads its epochs without a step, is killed (SIGKILL) in the middle of one more, and goes on in a new
process. Then it reads them with a step of fixed length: a sleep that leaves the processor free as a GPU does,
by default as long as the tutorial's loader takes for a batch.

    first           seconds from the first line of the process, imports included, to the first batch
    epochs          seconds of each
    utilisation     time in steps / all time, with the step
    memory          the most of all processes together, shared pages counted once (PSS; without Linux, RSS); files that
                    are mapped are pages that the system can drop, so they are told apart
    kill            seconds from the first line of the new process to the first batch that had not been read before,
                    and how many samples are read again for it; steps of the tutorial's length are taken again, too
    samples         whether each sample came once, and what it was, in each epoch

Contenders of a round follow each other in another order each time, so that a slow minute does not hit the same one.
A row says what is not installed. A run of some jobs keeps the rows that `jobs.json` has of others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import itertools
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.child import descendants
from benchmarks.jobs_data import KINDS, RANKS, REMOTE, SPEECH, Job, load
from benchmarks.jobs_loaders import OUR_NAME, TUNED, TUTORIAL
from benchmarks.jobs_others import CONTENDERS
from benchmarks.pictures import draw_jobs
from benchmarks.range_server import serving

Row = dict[str, Any]

WORKERS = 2
TIMEOUT = 600.0
"""Seconds that a contender may take for one run."""

PAUSE, GRACE = 0.2, 1.0
"""Seconds between two looks at the memory; and from a kill until what is left of the processes is killed, too."""

SPEED = 50e6
"""Bytes per second of a connection to the object store."""


# -- one run -----------------------------------------------------------------------------------------------------------


class Watch(threading.Thread):
    """Looks at the memory of a process and all below it, as long as they live.

    Attributes:
        most: bytes of all processes together, without mapped files, where they were the most.
        files: the most bytes of mapped files.
    """

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.pid, self.most, self.files, self.ended = pid, 0, 0, threading.Event()

    def run(self) -> None:
        while not self.ended.wait(PAUSE):
            memory, files = memory_of(self.pid)
            self.most, self.files = max(self.most, memory), max(self.files, files)


def memory_of(pid: int) -> tuple[int, int]:
    """Bytes of a process and all below it, without mapped files and of those."""
    if not Path("/proc/self/smaps_rollup").exists():
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            one = psutil.Process(pid)
            return sum(process.memory_info().rss for process in [one, *one.children(recursive=True)]), 0
        return 0, 0
    memory = files = 0
    for each in [pid, *descendants(pid)]:
        with contextlib.suppress(OSError):  # it has ended
            for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
                kind, _, rest = line.partition(":")
                memory += int(rest.split()[0]) * 1024 if kind in ("Pss_Anon", "Pss_Shmem") else 0
                files += int(rest.split()[0]) * 1024 if kind == "Pss_File" else 0
    return memory, files


def events(request: Row, watch: list[Watch]) -> Iterator[Row]:
    """What a contender says, in a process of its own, which is killed when nobody asks for more."""
    command = [sys.executable, "-m", "benchmarks.jobs_child"]
    pipes: Row = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with contextlib.ExitStack() as stack:
        errors = stack.enter_context(tempfile.TemporaryFile("w+"))
        process = stack.enter_context(subprocess.Popen(command, stderr=errors, **pipes))
        timer = threading.Timer(TIMEOUT, end, [process])
        timer.start()
        watch.append(Watch(process.pid))
        watch[-1].start()
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(request))
            process.stdin.close()
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
            if process.wait() != 0:
                errors.seek(0)
                said = re.findall(r"^([\w.]+(?:Error|Exception|Exit)): (.{,60})", errors.read(), re.MULTILINE)
                why = "failed: {}: {}".format(*said[-1]) if said else f"failed: exit status {process.returncode}"
                yield {"why": why if timer.is_alive() else f"more than {TIMEOUT:.0f} s"}
        finally:
            timer.cancel()
            watch[-1].ended.set()
            watch[-1].join()
            end(process)


def end(process: subprocess.Popen[str]) -> None:
    """Kill a process at once, and after a moment what it has left of its session."""
    process.kill()
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError):
            for _ in range(int(GRACE / 0.05)):
                os.killpg(process.pid, 0)
                process.poll()
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGKILL)


def one_run(contender: str, job: Job, own: Path, step: float, kill: bool) -> Row:
    """The figures of one contender."""
    row: Row = {"contender": contender, "epochs": [], "samples": []}
    missing = CONTENDERS[contender].missing
    if missing:
        return {**row, "why": f"not installed: {missing}"}
    ranks = RANKS if job.name == SPEECH else 1
    request: Row = {"contender": contender, "folder": job.folder, "own": str(own), "step": step, "ranks": ranks}
    request |= {"workers": 1 if ranks > 1 else WORKERS, "kill": kill, "state": False}
    watch: list[Watch] = []
    for event in events(request, watch):
        if "first" in event:
            row["first"] = event["first"]
        elif "epoch" in event:
            row["epochs"].append(event["seconds"])
            row["samples"].append(event["verdict"])
            row["batches"] = event["batches"]
        elif "steps" in event:
            row["utilisation"] = step * event["steps"] / event["seconds"]
        elif "ready" in event:
            break
        else:
            row |= event
    row["memory"], row["files"] = watch[0].most, watch[0].files
    if kill and "why" not in row:
        for event in events({**request, "state": True}, watch):
            row |= {"kill": event["new"], "again": event["again"]} if "new" in event else event
        row["samples"].append(row.pop("resumed", "nothing after the kill"))
    return row


# -- rounds ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def made(name: str, scale: float, contenders: Sequence[str]) -> Iterator[Job]:
    """The job, with its files and the formats of these contenders, in a folder that goes at the end."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="jobs-"))
        command = [sys.executable, "-m", "benchmarks.jobs_others", name, folder, str(scale), *contenders]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} cannot be made: {done.stderr.strip().splitlines()[-1]}")
        job = load(Path(folder))
        if name == REMOTE:
            job = replace(job, url=stack.enter_context(serving(Path(folder), SPEED))[0])
            job.path("job.json").write_text(json.dumps(asdict(job)))
        yield job


def rows_of(job: Job, contenders: Sequence[str], rounds: int, step: float | None) -> Iterator[Row]:
    """All runs of a job; ``step``: seconds of the second setting, None: as long as the tutorial's batch."""
    out: set[str] = set()
    taken: list[float] = []
    for number, has_step in itertools.product(range(rounds), (False, True)):
        length = 0.0
        if has_step:
            length = statistics.median(taken) if step is None and taken else step or 0.0
            if not length:
                continue
        for contender in random.Random(f"{job.name} {number} {has_step}").sample(contenders, len(contenders)):
            if contender in out:
                continue
            own = job.path(f"own-{number}-{has_step}-{contender}".replace(" ", "-"))
            row = one_run(contender, job, own, length, kill=not has_step)
            shutil.rmtree(own, ignore_errors=True)
            load_now = round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None
            row = {"job": job.name, "round": number, "step": length, "count": job.count, "load": load_now, **row}
            if "why" in row:
                out.add(contender)
            elif contender == TUTORIAL and not has_step:
                taken.append(row["epochs"][1] / row["batches"])
            yield row


def measure(
    names: Sequence[str], contenders: Sequence[str], rounds: int, scale: float, step: float | None
) -> Iterator[Row]:
    """All rows of all jobs."""
    for name in names:
        of_job = [one for one in contenders if not CONTENDERS[one].jobs or name in CONTENDERS[one].jobs]
        needs = KINDS[name].needs
        if needs and importlib.util.find_spec(needs) is None:
            yield {"job": name, "contender": "", "round": 0, "step": 0.0, "why": f"not installed: {needs}"}
            continue
        with made(name, scale, of_job) as job:
            yield from rows_of(job, of_job, rounds, step)


# -- tables ------------------------------------------------------------------------------------------------------------


def median(rows: Sequence[Row], name: str, at: int | None = None) -> float | None:
    """The median of a figure over the rounds; None if nobody has it."""
    values = [row[name] if at is None else row[name][at] for row in rows if name in row and (at is None or row[name])]
    return statistics.median(values) if values else None


def cell(value: float | None, form: str = "{:.2f}") -> str:
    return "" if value is None else form.format(value)


def line_of(contender: str, rows: Sequence[Row], epochs: int) -> str:
    """A row of a job's table."""
    plain = [row for row in rows if not row["step"] and "why" not in row]
    stepped = [row for row in rows if row["step"] and "why" not in row]
    why = next((row["why"] for row in rows if "why" in row), "")
    verdicts = sorted({verdict for row in plain + stepped for verdict in row["samples"]}) + [why] * bool(why)
    kill = cell(median(plain, "kill")) + cell(median(plain, "again"), ", {:,.0f} again")
    megabytes = [None if (value := median(plain, name)) is None else value / 1e6 for name in ("memory", "files")]
    memory = cell(megabytes[0], "{:,.0f}") + cell(megabytes[1], " + {:,.0f}")
    cells = [contender, cell(median(plain, "first")), *(cell(median(plain, "epochs", at)) for at in range(epochs))]
    cells += [
        cell(median(stepped, "epochs", 1)),
        cell(median(stepped, "utilisation")),
        memory,
        kill,
        ", ".join(verdicts),
    ]
    return f"| {' | '.join(cells)} |"


def table(name: str, rows: Sequence[Row]) -> str:
    """The table of a job, as Markdown."""
    kind, mine = KINDS[name], [row for row in rows if row["job"] == name]
    epochs, count = kind.epochs, next((row["count"] for row in mine if "count" in row), 0)
    step = max((row["step"] for row in mine), default=0.0)
    heads = ["first", *(f"epoch {number + 1}" for number in range(epochs)), "epoch 2 with step", "utilisation"]
    heads += ["memory + files, MB", "kill", "samples"]
    loads = [row["load"] for row in mine if row.get("load") is not None]
    busy = f", load average {min(loads):.0f} to {max(loads):.0f}" if loads else ""
    rounds = len({row["round"] for row in mine})
    lines = [f"**{name}**: {kind.title}; {count:,} samples, {rounds} rounds, step {1e3 * step:.1f} ms{busy}", ""]
    lines += [f"| contender | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for contender in dict.fromkeys(row["contender"] for row in sorted(mine, key=rank_of)):
        lines.append(line_of(contender, [row for row in mine if row["contender"] == contender], epochs))
    return "\n".join(lines)


def rank_of(row: Row) -> int:
    """The place of a row's contender in tables."""
    return [*CONTENDERS, ""].index(row["contender"])


def summary(rows: Sequence[Row]) -> str:
    """How many times as fast as the others ours is, as medians of the ratios within rounds, and who is ahead."""
    heads = ["job", "first", "epoch 1", "epoch 2", "kill", "memory", "epoch 2 / best other", "ahead in epoch 2"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in dict.fromkeys(row["job"] for row in rows):
        mine = [row for row in rows if row["job"] == name and not row["step"] and "why" not in row]
        others = [other for other in CONTENDERS if other not in (OUR_NAME, "drop-in")]
        figures = [("first", None), ("epochs", 0), ("epochs", 1), ("kill", None), ("memory", None)]
        cells = [cell(ratio(mine, TUNED, figure, at)) for figure, at in figures]
        ratios = {other: value for other in others if (value := ratio(mine, other, "epochs", 1)) is not None}
        ahead = [f"{other} ({value:.2f})" for other, value in ratios.items() if value < 1]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {cell(min(ratios.values(), default=None))} | {', '.join(ahead)} |"
        )
    return "\n".join(lines)


def ratio(rows: Sequence[Row], other: str, figure: str, at: int | None) -> float | None:
    """The median over the rounds of another's figure divided by ours: above 1 ours is ahead."""
    found = []
    for number in {row["round"] for row in rows}:
        pair = [
            median([r for r in rows if r["contender"] == one and r["round"] == number], figure, at)
            for one in (other, OUR_NAME)
        ]
        if None not in pair:
            found.append(pair[0] / max(pair[1], 1e-9))  # type: ignore[operator, type-var]
    return statistics.median(found) if found else None


BEGIN, END = "<!-- results: `python -m benchmarks.jobs` writes below this line -->", "<!-- end of results -->"


def tables(rows: Sequence[Row], about: str) -> list[str]:
    """The paragraphs of the results."""
    return [about, summary(rows), *(table(name, rows) for name in dict.fromkeys(row["job"] for row in rows))]


def write(rows: Sequence[Row], folder: Path, about: str) -> None:
    """Write `jobs.json`, and the tables between the two lines of `jobs.md`; other jobs keep the rows they had."""
    path, here = folder / "jobs.json", {row["job"] for row in rows}
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [*(row for row in kept if row["job"] not in here), *rows]
    rows.sort(key=lambda row: list(KINDS).index(row["job"]))
    lines = ",\n".join(json.dumps({name: rounded(value) for name, value in row.items()}) for row in rows)
    path.write_text(f'{{"about": {json.dumps(about)}, "rows": [\n{lines}\n]}}\n')
    text = "\n\n".join(tables(rows, about))
    page = folder / "jobs.md"
    before = page.read_text().partition(BEGIN)[0] if page.exists() else "# Whole jobs\n\n"
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}\n")
    draw_jobs(seconds_of(rows), folder / "jobs.png")


def seconds_of(rows: Sequence[Row]) -> dict[str, dict[str, tuple[float, float]]]:
    """Of each job and contender, the medians of epochs 1 and 2."""
    found: dict[str, dict[str, tuple[float, float]]] = {}
    for row in sorted(rows, key=rank_of):
        mine = [one for one in rows if (one["job"], one["contender"]) == (row["job"], row["contender"])]
        times = [median([one for one in mine if not one["step"] and "why" not in one], "epochs", at) for at in (0, 1)]
        if times[0] is not None and times[1] is not None:
            found.setdefault(row["job"], {})[row["contender"]] = times[0], times[1]
    return {name: found[name] for name in KINDS if name in found}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print each row, and write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.jobs", description="Whole jobs, as people run them.")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, one round, torch and ours")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(KINDS), help="names of jobs, with commas between them")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="likewise")
    parser.add_argument("--step", type=float, help="milliseconds; by default as long as the tutorial's batch takes")
    parser.add_argument("--scale", type=float, default=1.0, help="how many samples, as a multiple")
    parser.add_argument("--out", type=Path, help="folder for jobs.json and jobs.md")
    given = parser.parse_args(arguments)
    names, contenders = given.only.split(","), given.contenders.split(",")
    unknown = {*names} - {*KINDS} | {*contenders} - {*CONTENDERS}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join([*KINDS, *CONTENDERS])}")
    rounds, scale, step = given.rounds, given.scale, None if given.step is None else given.step / 1e3
    if given.quick:
        rounds, scale, contenders = 1, 0.1 * scale, [one for one in contenders if one in (TUTORIAL, OUR_NAME)]
    about = f"{datetime.date.today()}, {os.cpu_count()} cores, {scale:g} of the samples"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # what was started ends, too
    rows = []
    for row in measure(names, contenders, rounds, scale, step):
        rows.append(row)
        print(json.dumps({name: rounded(value) for name, value in row.items()}), flush=True)
        if given.out is not None:
            write(rows, given.out, about)
    if given.out is None:
        print("\n\n".join(tables(rows, about)))


def rounded(value: Any) -> Any:
    """A figure with few digits."""
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
