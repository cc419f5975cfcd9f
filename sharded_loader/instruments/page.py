"""A report as one page for a browser: HTML with its style, its plots, and the facts in it. It asks no network.

    page_of(facts, rows) -> the text of the file
    facts_in(text) -> the facts again

A plot is SVG without text, which stretches to the width of the window. The table below it is its legend: a cause, or a
stage, has one colour in both. The page is light or dark as the reader's system is. It has no script.

What can go wrong: a text is no such page, or a part of one.
"""

from __future__ import annotations

import html
import json
import re
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from sharded_loader.engine.messages import BatchTimes
from sharded_loader.instruments.facts import Facts, Section
from sharded_loader.instruments.times import STAGES
from sharded_loader.instruments.trace import stages_in_worker
from sharded_loader.instruments.waits import CAUSES, time_text

COLUMNS = 120
"""Of the plot of waits."""

SHOWN = 60
"""The last batches whose way is drawn: more would be thinner than a pixel."""

_FACTS = re.compile(r'<script type="application/json" id="sharded-loader-report-1" data-crc="(\d+)">(.*?)</script>')

_HUES = ("#e4572e", "#2e86ab", "#7b5ea7", "#c94f7c", "#8d6e63", "#f2a93b", "#3a9d6e", "#5c7cfa", "#78909c")
_COLOURS = dict(zip(STAGES, (_HUES[place] for place in (8, 7, 5, 6, 2, 4, 3)), strict=True))
_COLOURS |= dict(zip(CAUSES, _HUES, strict=False))  # both have "placing"

_STYLE = Path(__file__).with_name("page.css")

Bars = Iterable[tuple[str, float, float, float, float]]
"""Rectangles: what each shows, left, top, width and height."""


def page_of(facts: Facts, rows: Sequence[BatchTimes]) -> str:
    """The page.

    Args:
        facts: of the report.
        rows: the last batches.
    """
    text = json.dumps(facts, allow_nan=False).replace("<", "\\u003c")
    plots = {"Causes": _waits(rows), "Stages": _lanes(rows[-SHOWN:])} if rows else {}
    return "\n".join(
        [
            '<!doctype html><html lang="en"><meta charset="utf-8"><title>Why training waits</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">',
            f"<style>{_STYLE.read_text(encoding='utf-8')}</style>",
            f"<h1>Why training waits</h1>{_p(facts['about'])}<p>{html.escape(facts['summary'])}</p>",
            f'<div class="verdict"><b>{html.escape(facts["verdict"])}</b><br>{html.escape(facts["advice"])}</div>',
            *(_section(section, plots.get(section[0], "")) for section in facts["sections"]),
            f'<script type="application/json" id="sharded-loader-report-1" data-crc="{zlib.crc32(text.encode())}">'
            f"{text}</script></html>",
        ]
    )


def facts_in(text: str) -> Facts:
    """The facts of a page.

    Raises:
        ValueError: there are none, or they are damaged.
    """
    found = _FACTS.search(text)
    if found is None or zlib.crc32(found[2].encode()) != int(found[1]):
        raise ValueError("it is no report, or it is damaged: give files that loader.report(path) has written")
    facts: Facts = json.loads(found[2])
    return facts


def _p(text: str) -> str:
    return f'<p class="faint">{html.escape(text)}</p>'


def _section(section: Section, plot: str) -> str:
    """A table, and its plot before it."""
    title, about, headings, rows = section
    lines = ["".join(f"<th>{one}" for one in headings)]
    for share, cells in rows:
        style = f"--share: {share:.1%}; --hue: {_COLOURS.get(cells[0], _HUES[-1])}"
        first, *others = map(html.escape, cells)
        lines.append(f'<td style="{style}">{first}' + "".join(f"<td><code>{one}</code>" for one in others))
    table = f'<div class="table"><table class="{title.lower()}"><tr>' + "\n<tr>".join(lines) + "</table></div>"
    return f"<h2>{title}</h2>{_p(about)}{plot}{table}"


def _waits(rows: Sequence[BatchTimes]) -> str:
    """How much of the time was waiting, over time, by causes."""
    edges = np.linspace(rows[0].asked, rows[-1].taken, COLUMNS + 1)
    below, bars = np.zeros(COLUMNS), []
    for cause in CAUSES:
        waits = np.array([(row.asked, row.waited) for row in rows if row.cause == cause]).reshape(-1, 2)
        seconds = waits[:, 1].cumsum()
        stamps = np.stack([waits[:, 0], waits.sum(1)], 1).ravel()
        reached = np.stack([seconds - waits[:, 1], seconds], 1).ravel()
        if len(waits):
            share = np.diff(np.interp(edges, np.maximum.accumulate(stamps), reached)) / np.diff(edges)
            bars += [
                (cause, x, 1 - low - high, 1, high) for x, (low, high) in enumerate(zip(below, share, strict=True))
            ]
            below += share
    about = f"The share of the time that was waiting, from 0 to 100%, over the last {len(rows)} batches."
    return _p(about) + _svg(about, bars, COLUMNS, 1, "8rem") + _ends(edges[-1] - edges[0])


def _lanes(rows: Sequence[BatchTimes]) -> str:
    """What the main process and the workers did, over time."""
    start, end = rows[0].asked, rows[-1].taken
    lanes: dict[int, list[tuple[str, float, float]]] = {-2: [(row.cause, row.asked, row.taken) for row in rows]}
    for row in sorted((row for row in rows if row.began), key=lambda row: row.worker):
        lanes.setdefault(row.worker, []).extend(stages_in_worker(row))
    text = [_p(f"The last {len(rows)} batches: when next() waited, and what each worker did.")]
    for worker, spans in lanes.items():
        name = {-2: "next()", -1: "main process"}.get(worker, f"worker {worker}")
        cut = [(what, max(first, start) - start, max(last, start) - start) for what, first, last in spans]
        bars = [(what, first, 0.0, last - first, 1.0) for what, first, last in cut]
        text.append(f'<div class="lane"><span>{name}</span>{_svg(name, bars, end - start, 1, "1.2rem")}</div>')
    return "".join([*text, '<div class="lane"><span></span>', _ends(end - start), "</div>"])


def _ends(seconds: float) -> str:
    """The ends of an axis of time."""
    return f'<p class="ends faint"><span>0 s</span><span>{time_text(seconds)}</span></p>'


def _svg(title: str, bars: Bars, width: float, height: float, size: str) -> str:
    """A plot: one path for all rectangles of a colour."""
    paths: dict[str, list[str]] = {}
    for what, left, top, wide, high in bars:
        x, y, w, h = (f"{1000 * one:.1f}" for one in (left / width, top / height, wide / width, high / height))
        if wide > 0 and high > 0:
            paths.setdefault(what, []).append(f"M{x} {y}h{w}v{h}h-{w}z")
    drawn = "".join(f'<path fill="{_COLOURS.get(what, _HUES[-1])}" d="{"".join(d)}"/>' for what, d in paths.items())
    box = f'viewBox="0 0 1000 1000" preserveAspectRatio="none" style="height: {size}"'
    return f'<svg {box} role="img" aria-label="{html.escape(title)}">{drawn}</svg>'
