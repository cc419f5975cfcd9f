"""Reports as text and HTML, Chrome traces, and the comparison of ranks; all numbers come from the loader's `Meter`.

    text_of(stats, arguments), page_of(about, stats, arguments, rows) -> text for a terminal; HTML with style and plot
    compared({rank: (stats, host)}) -> the slowest rank, and text for a terminal
    trace_of(rows, name) -> the content of a JSON file: lanes "next()", "worker 0" ... with a slice for each stage

A page needs no network and no script. Its plot is SVG without text, stretched to the window, with the table below as
legend. Slices of a lane do not overlap, in whole nanoseconds, because viewers drop overlapping ones.

Source of the idea and the format of traces: "Trace Event Format", the document of Chrome's trace viewer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from string import Template

import numpy as np

from sharded_loader.extend import BatchTimes
from sharded_loader.extend.tools import brief
from sharded_loader.instruments.stats import LoaderStats
from sharded_loader.instruments.times import CAUSES, ENOUGH, STAGES, time_text

Rows = Sequence[tuple[float, Sequence[str]]]
"""Rows of a table: each row's share of the whole, and its cells."""

Section = tuple[str, str, Sequence[str], Rows]
"""A table: title, description, headings, rows."""

# -- tables ------------------------------------------------------------------------------------------------------------


def text_of(stats: LoaderStats, given: Mapping[str, object]) -> str:
    """Return a report for a terminal: rate, verdict and advice, then tables. ``given`` holds the loader's arguments."""
    parts = [str(stats)]
    for title, about, headings, rows in _sections(stats, given):
        parts.append("\n  ".join([f"{title}: {about}", *table(headings, [cells for _, cells in rows])]))
    return "\n\n".join(parts)


def _sections(stats: LoaderStats, given: Mapping[str, object]) -> list[Section]:
    causes = sorted(((took / stats.seconds, took, name) for name, took in stats.causes.items() if took), reverse=True)
    whole = sum(of.seconds for of in stats.stages.values()) or 1.0
    workers, most = [], stats.slowest[0].seconds if stats.slowest else 1.0
    for number, of in sorted(stats.workers.items()):
        busy = of.seconds / ((of.seconds + of.idle_seconds) or 1.0)
        ran = min(1.0, of.processor_seconds / (of.seconds or 1.0))
        times = map(time_text, (of.p50, of.p99, of.longest))
        workers.append((busy, (_name(number), str(of.batches), f"{busy:.0%}", f"{ran:.0%}", *times)))
    tables: list[tuple[str, str, str, Rows]] = [
        ("Causes", "Why next() waited, as shares of the time of all epochs.", "cause time share",
         [(share, (name, time_text(took), f"{share:.1%}")) for share, took, name in causes]),
        ("Stages", "How long batches were in each stage: in all, quantiles, the longest.",
         "stage sum p50 p90 p99 longest",
         [(of.seconds / whole, (name, *map(time_text, of))) for name, of in stats.stages.items()]),
        ("Workers", "Runs: part of its busy time in which it does not wait for input. Then: of one batch.",
         "worker batches busy runs p50 p99 longest", workers),
        ("Slowest samples", "To read them took longest.", "index time epoch worker",
         [(took / most, (brief(index), time_text(took), str(epoch), _name(worker)))
          for index, took, epoch, worker in stats.slowest]),
        ("Arguments", "What the loader was given.", "name value",
         [(0.0, (name, brief(value))) for name, value in given.items()]),
    ]  # fmt: skip
    return [(title, about, headings.split(), rows) for title, about, headings, rows in tables if rows]


def _name(worker: int) -> str:
    return "main process" if worker < 0 else str(worker)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table. With more than two columns, all but the first are right-aligned as numbers.

    Example:
        >>> table(["pool", "workers", "x"], [["inline", "0", "1.00"]])
        ['pool    workers     x', 'inline        0  1.00']
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    sides = "<" + (">" if len(widths) > 2 else "<") * (len(widths) - 1)  # numbers end below each other
    form = "  ".join(f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True))
    return [form.format(*cells).rstrip() for cells in (headings, *rows)]


# -- the ranks of a job ------------------------------------------------------------------------------------------------


def compared(ranks: Mapping[int, tuple[LoaderStats, str]]) -> tuple[int | None, str]:
    """Return the slowest rank, or None, and a report. ``ranks``: statistics and host name of each rank."""
    rows, slow, (worst, *others) = [], None, sorted(ranks, key=lambda rank: -ranks[rank][0].waiting_share)
    for rank, (of, host) in sorted(ranks.items()):
        sample, cause = time_text(of.reading_seconds / (of.samples or 1)), max(CAUSES, key=of.causes.__getitem__)
        rows.append((str(rank), host, f"{of.samples_per_second:,.0f}", f"{of.waiting_share:.1%}", sample, cause))
    headings = ("rank", "host", "samples/s", "waiting", "to read a sample", "waits for")
    stats, text = ranks[worst][0], ""
    if others:  # all ranks end a step together, so the step waits for the slowest one
        share = stats.waiting_share
        alone = share - ranks[others[0]][0].waiting_share
        text = f"No rank is much slower than the others. The slowest waits for data for {share:.0%} of the time."
        if share < ENOUGH:
            text = "No rank waits for data: the training loop is the limit."
        elif alone >= max(ENOUGH, share / 2):
            slow, text = worst, f"Rank {worst} is slow: the others wait for it for {alone:.0%} of the time."
    told = [text, stats.verdict, stats.advice] if not others or stats.waiting_share >= ENOUGH else [text]
    return slow, "\n  ".join(["\n".join(filter(None, [*told, f"\nRanks: {len(ranks)}"])), *table(headings, rows)])


# -- a page ------------------------------------------------------------------------------------------------------------

COLUMNS = 120
"""Columns in the plot of waits."""

_HUES = ("#e4572e", "#2e86ab", "#7b5ea7", "#c94f7c", "#8d6e63", "#f2a93b", "#3a9d6e", "#5c7cfa", "#78909c")
_COLOURS = dict(zip(STAGES, (_HUES[place] for place in (8, 7, 5, 6, 2, 4, 3)), strict=True))
_COLOURS |= dict(zip(CAUSES, _HUES, strict=False))  # both have "placing"

_FOLDER = Path(__file__).parent


def page_of(about: str, stats: LoaderStats, given: Mapping[str, object], rows: Sequence[BatchTimes]) -> str:
    """Return the HTML report. ``about`` names loader, host and time; ``rows`` are the last batches."""
    plots = {"Causes": _waits(rows)} if rows else {}
    summary, verdict, advice = (_escape(text) for text in (str(stats).split("\n")[0], stats.verdict, stats.advice))
    return Template((_FOLDER / "page.html").read_text("utf-8")).substitute(
        style=(_FOLDER / "page.css").read_text("utf-8"),
        about=_p(about),
        summary=summary,
        verdict=verdict,
        advice=advice,
        sections="\n".join(_section(section, plots.get(section[0], "")) for section in _sections(stats, given)),
    )


def _escape(text: str) -> str:
    import html  # with its entities: 3 ms

    return html.escape(text)


def _p(text: str) -> str:
    return f'<p class="faint">{_escape(text)}</p>'


def _section(section: Section, plot: str) -> str:
    title, about, headings, rows = section
    lines = ["".join(f"<th>{one}" for one in headings)]
    for share, cells in rows:
        style = f"--share: {share:.1%}; --hue: {_COLOURS.get(cells[0], _HUES[-1])}"
        first, *others = map(_escape, cells)
        lines.append(f'<td style="{style}">{first}' + "".join(f"<td><code>{one}</code>" for one in others))
    table = f'<div class="table"><table class="{title.lower()}"><tr>' + "\n<tr>".join(lines) + "</table></div>"
    return f"<h2>{title}</h2>{_p(about)}{plot}{table}"


def _waits(rows: Sequence[BatchTimes]) -> str:
    """Plot the share of waiting over time, by cause."""
    edges = np.linspace(rows[0].asked, rows[-1].taken, COLUMNS + 1)
    below, paths, width = np.zeros(COLUMNS), [], 1000 / COLUMNS
    for cause in CAUSES:
        waits = np.array([(row.asked, row.asked + row.waited) for row in rows if row.cause == cause])
        if len(waits):
            overlaps = np.minimum(waits[:, 1], edges[1:, None]) - np.maximum(waits[:, 0], edges[:-1, None])
            tall = 1000 * overlaps.clip(0.0).sum(1) / np.diff(edges)
            below += tall
            tops = [(width * x, 1000 - below[x], tall[x]) for x in range(COLUMNS) if tall[x] > 0]
            bars = "".join(f"M{x:.1f} {y:.1f}h{width:.1f}v{h:.1f}h-{width:.1f}z" for x, y, h in tops)
            paths.append(f'<path fill="{_COLOURS[cause]}" d="{bars}"/>')
    about = f"The share of the time that was waiting, from 0 to 100%, over the last {len(rows)} batches."
    axis = f'<p class="ends faint"><span>0 s</span><span>{time_text(edges[-1] - edges[0])}</span></p>'
    box = 'viewBox="0 0 1000 1000" preserveAspectRatio="none" style="height: 8rem" role="img"'
    return f'{_p(about)}<svg {box} aria-label="{_escape(about)}">{"".join(paths)}</svg>{axis}'


# -- a trace -----------------------------------------------------------------------------------------------------------

NEXT, FIRST_WORKER = 0, 2
"""Lane numbers. If there are no workers, the main process reads in the lane before the first worker's."""


def trace_of(rows: Sequence[BatchTimes], name: str) -> dict[str, object]:
    """Return a trace of ``rows``, which are in the order of delivery. ``name`` is the process name shown.

    Example:
        >>> [event["args"]["name"] for event in trace_of([], "rank 0")["traceEvents"]]
        ['rank 0', 'next()']
    """
    start = min((stamp for row in rows for stamp in (row.asked, row.began) if stamp), default=0.0)
    events, ends = list[dict[str, object]](), dict[int, int]()

    def add(kind: str, name: str, lane: int, at: int = 0, **more: object) -> None:
        """Add an event; ``at`` is in nanoseconds."""
        event = {"ph": kind, "name": name, "cat": "batch", "pid": os.getpid(), "tid": lane, "ts": at / 1000}
        events.append(event | more)

    def add_slice(name: str, lane: int, began: float, ended: float, **args: object) -> None:
        """Add a slice after the previous one of its lane."""
        first, last = (round(1e9 * (stamp - start)) for stamp in (began, ended))
        first = max(first, ends.get(lane, first))
        ends[lane] = last = max(first, last)
        if first < last:
            add("X", name, lane, first, dur=(last - first) / 1000, args=args)

    add("M", "process_name", NEXT, args={"name": name})
    add("M", "thread_name", NEXT, args={"name": "next()"})
    for worker in sorted({row.worker for row in rows if row.began}):
        title = f"worker {worker}" if worker >= 0 else "main process"
        add("M", "thread_name", FIRST_WORKER + worker, args={"name": title})
    batches = [(row, {"epoch": row.epoch, "step": row.step, "samples": max(0, row.samples)}) for row in rows]
    for row, about in batches:
        waited = {"waited_seconds": row.waited, "placing_seconds": row.placing, "cause": row.cause}
        add_slice("next", NEXT, row.asked, row.taken, **about, **waited)
    for row, about in sorted(batches, key=lambda batch: batch[0].began):  # as the workers had them
        cuts = (row.began, row.ended - row.collate, row.ended, row.written)
        for stage, at in zip(("read", "collate", "write"), pairwise(cuts), strict=True) if row.began else ():
            add_slice(stage, FIRST_WORKER + row.worker, *at, **about)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
