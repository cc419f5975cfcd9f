"""What a report says, as a dict that JSON can hold: of one loader, and of all ranks of a job.

    facts_of(loader's class, arguments, stats, rows) -> facts
    sections(facts) -> tables, for a terminal and for a browser
    text_of(facts), joined({file: facts}) -> text for a terminal

A file keeps the facts, so that they can be read where no loader is. Nothing is counted or timed here: the loader's
`Meter` has done that. What can go wrong: no batch was delivered, or the files are not of the ranks of one job.
"""

from __future__ import annotations

import os
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sharded_loader.base.described import brief
from sharded_loader.loader.stats import LoaderStats
from sharded_loader.loader.times import STAGES, BatchTimes, StageTimes, WorkerTimes
from sharded_loader.loader.waits import CAUSES, ENOUGH, time_text

JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that are the same for all ranks of a job, and differ between jobs."""

Facts = dict[str, Any]


class Section(NamedTuple):
    """A table of a report.

    Attributes:
        title, about: what it shows, and one sentence that explains it.
        headings: of the columns.
        rows: of each row its share of the whole, from 0 to 1, and its cells.
    """

    title: str
    about: str
    headings: Sequence[str]
    rows: Sequence[tuple[float, Sequence[str]]]


def facts_of(
    kind: str, given: Mapping[str, Any], replicas: tuple[int, int], stats: LoaderStats, rows: Sequence[BatchTimes]
) -> Facts:
    """What a report of one loader says.

    Args:
        kind, given, replicas: the loader's class, its arguments, and (num_replicas, rank).
        stats, rows: its numbers, and its last batches.
    """
    return {
        "loader": kind,
        "ranks": replicas[0],
        "rank": replicas[1],
        "job": [os.environ.get(name, "") for name in JOB],
        "host": platform.node(),
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "arguments": {name: brief(value) for name, value in given.items()},
        "summary": str(stats).splitlines()[0],
        "verdict": stats.verdict,
        "advice": stats.advice,
        "numbers": stats.as_dict(),
        "slowest": [[brief(one.index), *one[1:]] for one in stats.slowest],
        "waits": [[row.epoch, row.step, round(row.waited, 6), round(row.taken - row.turn, 6)] for row in rows],
    }


def sections(facts: Facts) -> Iterator[Section]:
    """The tables of a report, without those that have no row."""
    slowest = facts["slowest"]
    longest = max((seconds for _, seconds, _, _ in slowest), default=1.0) or 1.0
    samples = [
        (took / longest, (index, time_text(took), str(epoch), _name(who))) for index, took, epoch, who in slowest
    ]
    given = [(0.0, pair) for pair in facts["arguments"].items()]
    for section in (
        _causes(facts["numbers"]),
        _stages(facts["numbers"]),
        _workers(facts["numbers"]),
        Section("Slowest samples", "To read them took longest.", ("index", "time", "epoch", "worker"), samples),
        Section("Arguments", "What the loader was given.", ("name", "value"), given),
    ):
        if section.rows:
            yield section


def _causes(numbers: Mapping[str, float]) -> Section:
    whole = numbers["seconds"] or 1.0
    found = sorted(((numbers[f"cause_{name}"], name) for name in CAUSES), reverse=True)
    rows = [(took / whole, (name, time_text(took), f"{took / whole:.1%}")) for took, name in found if took]
    return Section(
        "Causes", "Why next() waited, as shares of the time of all epochs.", ("cause", "time", "share"), rows
    )


def _stages(numbers: Mapping[str, float]) -> Section:
    found = {name: [numbers[f"stage_{name}_{of}"] for of in StageTimes._fields] for name in STAGES}
    whole = sum(times[0] for times in found.values())
    rows = [(times[0] / whole, (name, *map(time_text, times))) for name, times in found.items() if whole]
    about = "How long batches were in each stage of their way: in all, quantiles of one batch, and the longest."
    return Section("Stages", about, ("stage", "sum", *StageTimes._fields[1:]), rows)


def _workers(numbers: Mapping[str, float]) -> Section:
    rows = []
    for number in sorted(int(found[1]) for name in numbers if (found := re.fullmatch(r"worker_(-?\d+)_batches", name))):
        of = WorkerTimes(*(numbers[f"worker_{number}_{name}"] for name in WorkerTimes._fields))  # type: ignore[arg-type]
        busy = of.seconds / ((of.seconds + of.idle_seconds) or 1.0)
        ran = min(1.0, of.processor_seconds / (of.seconds or 1.0))
        times = map(time_text, (of.p50, of.p99, of.longest))
        rows.append((busy, (_name(number), f"{of.batches:.0f}", f"{busy:.0%}", f"{ran:.0%}", *times)))
    about = "Busy: it has a batch. Runs: of this time, it does not wait for a disk or a network. Then: of one batch."
    return Section("Workers", about, ("worker", "batches", "busy", "runs", "p50", "p99", "longest"), rows)


def _name(worker: int) -> str:
    return "main process" if worker < 0 else str(worker)


def text_of(facts: Facts) -> str:
    """A report for a terminal: the rate, the verdict and the advice, then the tables."""
    parts = ["\n".join(filter(None, [facts["summary"], facts["verdict"], facts["advice"]]))]
    parts += [
        _table(f"{one.title}: {one.about}", one.headings, [cells for _, cells in one.rows]) for one in sections(facts)
    ]
    return "\n\n".join(parts)


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    sides = "<" + (">" if len(widths) > 2 else "<") * (len(widths) - 1)  # numbers end below each other
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    lines = [form.format(*cells).rstrip() for cells in (headings, *rows)]
    return "\n  ".join([title, *lines])


def joined(files: Mapping[str, Facts]) -> str:
    """What the ranks of a job say together: which one is slow, and why, then a row of each.

    Args:
        files: the facts of each rank, by the name of the file.

    Raises:
        ValueError: they are not of the ranks of one job, or not of the same time.
    """
    ranks: dict[int, Facts] = {}
    first_name, first = next(iter(files.items()))
    for name, facts in files.items():
        for what in ("job", "ranks", "loader"):
            if facts[what] != first[what]:
                raise ValueError(
                    f"{name} is of another job than {first_name}: {what} is {facts[what]!r} there, and {first[what]!r} "
                    "here. Give the files of one job"
                )
        if ranks.setdefault(facts["rank"], facts) is not facts:
            raise ValueError(f"{name} is of rank {facts['rank']}, as another file is: give one file of each rank")
    rows = []
    for rank, facts in sorted(ranks.items()):
        of = facts["numbers"]
        sample = time_text(of["reading_seconds"] / (of["samples"] or 1.0))
        share = f"{of['waiting_share']:.1%}"
        rows.append((str(rank), facts["host"], f"{of['samples_per_second']:,.0f}", share, sample, _cause(facts)))
    headings = ("rank", "host", "samples/s", "waiting", "to read a sample", "waits for")
    title = f"{len(ranks)} of {first['ranks']} ranks"
    return f"{_judged(ranks)}\n\n{_table(title, headings, rows)}"


def _cause(facts: Facts) -> str:
    causes = _causes(facts["numbers"]).rows
    return causes[0][1][0] if causes else ""


def _judged(ranks: Mapping[int, Facts]) -> str:
    """Which rank holds up the others, and why. All ranks end a step together, so the step waits for the slowest one."""
    waits = {n: {(epoch, step): times for epoch, step, *times in facts["waits"]} for n, facts in ranks.items()}
    steps = set.intersection(*map(set, waits.values()))
    if not steps:
        raise ValueError("no batch is in all files: let all ranks write their files after the same step")
    seconds = max(sum(waits[rank][step][1] for step in steps) for rank in ranks) or 1.0
    alone = dict.fromkeys(ranks, 0.0)  # how much less the job would wait if this rank were like the second slowest
    together = 0.0
    for step in steps:
        (second, _), (most, slowest) = sorted((waits[rank][step][0], rank) for rank in ranks)[-2:]
        together += most
        alone[slowest] += most - second
    slow = max(alone, key=lambda rank: alone[rank])
    if alone[slow] >= max(ENOUGH * seconds, together / 2):
        text = f"Rank {slow} is slow: the others wait for it for {alone[slow] / seconds:.0%} of the time."
    elif together >= ENOUGH * seconds:
        slow = max(ranks, key=lambda rank: ranks[rank]["numbers"]["waiting_share"])
        share = f"{together / seconds:.0%}"
        text = f"No rank is much slower than the others. In each step all wait for the slowest: {share} of the time."
    else:
        return "No rank waits for data: the training loop is the limit."
    return "\n".join(filter(None, [text, ranks[slow]["verdict"], ranks[slow]["advice"]]))
