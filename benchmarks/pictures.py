"""From records to pictures: files, and matplotlib only if it is installed.

draw_chart(records, path)     every loader beside torch, one line for each workload that is a rate
draw_panels(records, path)    every workload in a panel of its own
draw_jobs(figures, path)      epochs 1 and 2 of whole jobs, each in a panel of its own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.ceilings import CEILINGS
from benchmarks.loaders import LOADERS, OURS
from benchmarks.measure import Record
from benchmarks.report import format_ratio, summarise, times_torch, values_of
from benchmarks.workloads import WORKLOADS, Workload

DPI = 120
WIDTH = 10.0
"""Inches: 1,200 pixels."""

MARKS = {
    "ours": ("o", "#d95f02"),
    "drop-in": ("d", "#f2a65a"),
    "torch-bulk": ("s", "#1f4e9c"),
    "stateful": ("^", "#3b8bd4"),
    "spdl": ("D", "#2a9d8f"),
    "grain": ("v", "#7a5195"),
    "seqtools": ("P", "#222222"),
    "tensorflow": ("X", "#b5179e"),
    "ray": ("*", "#6b705c"),
}
"""Loader -> marker and colour."""


def draw_chart(records: Sequence[Record], path: Path) -> bool:
    """How many times as fast as torch each loader is, on a logarithmic axis.

    Args:
        records: all measurements.
        path: where the picture goes.

    Returns:
        Whether it was drawn: not without matplotlib, and not if no loader can be compared with torch.
    """
    points = {name: times_torch(records, name) for name in LOADERS if name != "torch"}
    works = [name for name in WORKLOADS if any(name in times for times in points.values())]
    figure = _figure(WIDTH, 1.3 + 0.42 * len(works)) if works else None
    if figure is None:
        return False
    axes = figure.subplots()
    axes.axvline(1, color="0.45", linewidth=1.2, zorder=1)
    for line in range(len(works)):
        axes.axhline(line, color="0.9", linewidth=1, zorder=0)
    for name in reversed(points):  # ours comes last, on top
        at = [(times, works.index(work)) for work, times in points[name].items()]
        if not at:
            continue
        marker, colour = MARKS.get(name, ("o", "0.5"))
        size = 110 if name == OURS else 45
        axes.scatter(*zip(*at, strict=True), marker=marker, s=size, color=colour, label=name, zorder=3)
        if name == OURS:
            for times, line in at:
                text = format_ratio(times)
                axes.annotate(
                    text, (times, line), (0, 8), textcoords="offset points", ha="center", color=colour, fontsize=9
                )
    axes.set_xscale("log")
    low, high = axes.get_xlim()
    ticks = [tick for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100) if low <= tick <= high]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_yticks(range(len(works)), works)
    axes.set_ylim(len(works) - 0.5, -0.7)
    axes.set_xlabel("times as fast as torch's DataLoader (the line at 1), median over the rounds")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=8, frameon=False)
    figure.savefig(path, dpi=DPI, facecolor="white")
    return True


def draw_panels(records: Sequence[Record], path: Path) -> bool:
    """One panel per workload: medians, with lines from the worst to the best round. False without matplotlib."""
    names = list(dict.fromkeys(record.workload for record in records))
    columns = min(3, len(names))
    rows = -(-len(names) // max(columns, 1))
    figure = _figure(4.6 * columns, 2.5 * rows) if names else None
    if figure is None:
        return False
    for axes, name in zip(figure.subplots(rows, columns, squeeze=False).flat, names, strict=False):
        _draw_panel(axes, records, WORKLOADS[name])
    for axes in figure.axes[len(names) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=90, facecolor="white")
    return True


def draw_jobs(figures: Mapping[str, Mapping[str, tuple[float, float]]], path: Path) -> bool:
    """One panel per job: seconds of epochs 1 and 2 of each contender. False without matplotlib, or without figures."""
    figure = _figure(WIDTH, 2.6 * -(-len(figures) // 2)) if figures else None
    if figure is None:
        return False
    panels = figure.subplots(-(-len(figures) // 2), 2, squeeze=False).flat
    for axes, (job, seconds) in zip(panels, figures.items(), strict=False):
        names = list(seconds)[::-1]
        for epoch, colours in enumerate((("#c6d5ea", "#fbcf9f"), ("tab:blue", "tab:orange"))):
            places = [place + (0.2, -0.2)[epoch] for place in range(len(names))]
            shades = [colours["ours" in name] for name in names]
            axes.barh(places, [seconds[name][epoch] for name in names], 0.4, color=shades)
        axes.set_yticks(range(len(names)), names)
        all_seconds = [one for pair in seconds.values() for one in pair]
        low, high = min(all_seconds) / 2, max(all_seconds) * 1.2
        ticks = [tick for power in (0.01, 0.1, 1, 10, 100) for tick in (power, 3 * power) if low <= tick <= high]
        axes.set_xscale("log")
        axes.set_xlim(low, high)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(job, fontsize=10)
        axes.tick_params(labelsize=8)
        axes.set_xlabel("seconds of epochs 1 (pale) and 2, less is better", fontsize=8)
    for axes in figure.axes[len(figures) :]:
        axes.set_visible(False)
    figure.savefig(path, dpi=90, facecolor="white")
    return True


def _figure(width: float, height: float) -> Any:
    """A figure of so many inches; None without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _draw_panel(axes: Any, records: Sequence[Record], workload: Workload) -> None:
    scale, unit = {
        "rate": (1e-3, "thousand samples/s"),
        "memory": (1e-6, "MB, less is better"),
        "gap": (1.0, "ratio, less is better"),
    }.get(workload.kind, (1e3, "ms, less is better"))
    if workload.name in ("jpeg", "latency"):
        scale, unit = 1.0, "samples/s"
    bars = []
    for loader in [*CEILINGS, *LOADERS]:
        summary = summarise(list(values_of(records, workload.name, loader).values()))
        if summary is not None:
            bars.append((loader, summary))
    bars.reverse()
    colours = ["0.75" if name in CEILINGS else "tab:orange" if name == OURS else "tab:blue" for name, _ in bars]
    medians = [summary.median * scale for _, summary in bars]
    spread = [
        [(summary.median - summary.low) * scale for _, summary in bars],
        [(summary.high - summary.median) * scale for _, summary in bars],
    ]
    axes.barh([name for name, _ in bars], medians, color=colours, xerr=spread, ecolor="0.3", capsize=2)
    axes.set_title(workload.title, fontsize=9)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
