"""What a report says, as a dict that JSON can hold: of one loader, and of all ranks of a job.

    facts_of(loader's class, arguments, ranks, stats, rows) -> facts
    text_of(facts), joined({file: facts}) -> text for a terminal
    compared({rank: facts}) -> the slowest rank, and text for a terminal

A file keeps the facts, so that they can be read where no loader is. Nothing is counted or timed here: the loader's
`Meter` has done that. What can go wrong: the files are not of the ranks of one job, or not of the same time.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from sharded_loader.base.described import brief
from sharded_loader.base.system import JOB
from sharded_loader.engine.messages import BatchTimes
from sharded_loader.instruments.stats import LoaderStats
from sharded_loader.instruments.waits import CAUSES, ENOUGH, time_text

_WAITED = attrgetter("epoch", "step", "waited", "turn", "taken")

Facts = dict[str, Any]

Rows = Sequence[tuple[float, Sequence[str]]]
"""Of each row its share of the whole, and its cells."""

Section = tuple[str, str, Sequence[str], Rows]
"""A table: its title, a sentence about it, and the headings."""

_TABLES = (
    ("Causes", "Why next() waited, as shares of the time of all epochs.", "cause time share"),
    ("Stages", "How long batches were in each stage: in all, quantiles, the longest.", "stage sum p50 p90 p99 longest"),
    (
        "Workers",
        "Runs: part of its busy time in which it does not wait for input. Then: of one batch.",
        "worker batches busy runs p50 p99 longest",
    ),
    ("Slowest samples", "To read them took longest.", "index time epoch worker"),
    ("Arguments", "What the loader was given.", "name value"),
)


def facts_of(
    kind: str, given: Mapping[str, Any], replicas: tuple[int, int], stats: LoaderStats, rows: Sequence[BatchTimes]
) -> Facts:
    """What a report of one loader says.

    Args:
        kind, given, replicas: the loader's class, its arguments, and (num_replicas, rank).
        stats, rows: its numbers, and its last batches.
    """
    (ranks, rank), host = replicas, platform.node()
    tables = _rows_of(stats, given)
    return {
        "loader": kind,
        "ranks": ranks,
        "rank": rank,
        "job": [os.environ.get(name, "") for name in JOB],
        "about": f"{kind}, rank {rank} of {ranks}, on {host}, {time.strftime('%Y-%m-%d %H:%M')}",
        "host": host,
        "summary": str(stats).splitlines()[0],
        "verdict": stats.verdict,
        "advice": stats.advice,
        "numbers": stats.as_dict(),
        "sections": [(*of[:2], of[2].split(), rows) for of, rows in zip(_TABLES, tables, strict=True) if rows],
        "waits": [[*of[:2], *(round(s, 6) for s in of[2:])] for of in map(_WAITED, rows)],
    }


def _rows_of(stats: LoaderStats, given: Mapping[str, Any]) -> Iterator[Rows]:
    """The rows of each of `_TABLES`."""
    causes = sorted(((took / stats.seconds, took, name) for name, took in stats.causes.items() if took), reverse=True)
    yield [(share, (name, time_text(took), f"{share:.1%}")) for share, took, name in causes]
    whole = sum(of.seconds for of in stats.stages.values()) or 1.0
    yield [(of.seconds / whole, (name, *map(time_text, of))) for name, of in stats.stages.items()]
    workers = []
    for number, of in sorted(stats.workers.items()):
        busy = of.seconds / ((of.seconds + of.idle_seconds) or 1.0)
        ran = min(1.0, of.processor_seconds / (of.seconds or 1.0))
        times = map(time_text, (of.p50, of.p99, of.longest))
        workers.append((busy, (_name(number), str(of.batches), f"{busy:.0%}", f"{ran:.0%}", *times)))
    yield workers
    yield [
        (took / stats.slowest[0].seconds, (brief(index), time_text(took), str(epoch), _name(worker)))
        for index, took, epoch, worker in stats.slowest
    ]
    yield [(0.0, (name, brief(value))) for name, value in given.items()]


def _name(worker: int) -> str:
    return "main process" if worker < 0 else str(worker)


def text_of(facts: Facts) -> str:
    """A report for a terminal: the rate, the verdict and the advice, then the tables."""
    parts = ["\n".join(filter(None, [facts["summary"], facts["verdict"], facts["advice"]]))]
    for title, about, headings, rows in facts["sections"]:
        parts.append(_table(f"{title}: {about}", headings, [cells for _, cells in rows]))
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
    return compared(ranks)[1]


def compared(ranks: Mapping[int, Facts]) -> tuple[int | None, str]:
    """Which rank holds up the others, and a text that says why and has a row of each. None: no rank does.

    Raises:
        ValueError: they are not of the same time.
    """
    first, rows = next(iter(ranks.values())), []
    for rank, facts in sorted(ranks.items()):
        of = facts["numbers"]
        sample = time_text(of["reading_seconds"] / (of["samples"] or 1.0))
        share = f"{of['waiting_share']:.1%}"
        cause = max(CAUSES, key=lambda name: of[f"cause_{name}"])
        rows.append((str(rank), facts["host"], f"{of['samples_per_second']:,.0f}", share, sample, cause))
    headings = ("rank", "host", "samples/s", "waiting", "to read a sample", "waits for")
    title = f"{len(ranks)} of {first['ranks']} ranks"
    slow, text = _judged(ranks) if len(ranks) > 1 else (None, f"{first['verdict']}\n{first['advice']}".strip())
    return slow, f"{text}\n\n{_table(title, headings, rows)}"


def _judged(ranks: Mapping[int, Facts]) -> tuple[int | None, str]:
    """Which rank holds up the others, if one does, and why they wait.

    All ranks end a step together, so the step waits for the slowest one.
    """
    noted = [{(epoch, step): times for epoch, step, *times in facts["waits"]} for facts in ranks.values()]
    first, last = max(min(of, default=(0, 0)) for of in noted), min(max(of, default=(0, 0)) for of in noted)
    steps = [step for step in set[Any]().union(*noted) if first <= step <= last]
    if not steps:
        raise ValueError("no batch is in all reports: let all ranks report after the same step")
    waited = np.array([[of.get(step, [0.0])[0] for step in steps] for of in noted])  # cheap batches are not noted
    spans = [[stamp for step in steps for stamp in of.get(step, ())[1:]] for of in noted]
    seconds = max(max(span, default=0.0) - min(span, default=0.0) for span in spans) or 1.0
    second, most = np.sort(waited, axis=0)[-2:]
    # How much less the job would wait if a rank were like the second slowest. Of cheap batches, the sums tell it.
    alone = np.bincount(waited.argmax(0), most - second, len(ranks)) / seconds
    shares = np.array([facts["numbers"]["waiting_share"] for facts in ranks.values()])
    alone[shares.argmax()] = max(alone[shares.argmax()], shares.max() - np.sort(shares)[-2])
    together, about = max(min(1.0, most.sum() / seconds), shares.max()), list(ranks)[alone.argmax()]
    slow = about if alone.max() >= max(ENOUGH, together / 2) else None
    if slow is not None:
        text = f"Rank {slow} is slow: the others wait for it for {alone.max():.0%} of the time."
    elif together >= ENOUGH:
        about = list(ranks)[shares.argmax()]
        text = "No rank is much slower than the others. In each step all wait for the slowest: "
        text += f"{together:.0%} of the time."
    else:
        return None, "No rank waits for data: the training loop is the limit."
    return slow, "\n".join(filter(None, [text, ranks[about]["verdict"], ranks[about]["advice"]]))
