"""From what was measured on a device to bars and tables. Pure.

    records -> judge, table -> Markdown, also what the terminal shows

Ratios are medians over rounds of the ratio within a round. Values are rates, where more is better, but for seconds
(`host`, `lock`, `pinning`), shares (`bound`) and bytes (`memory`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from benchmarks.measure import Record
from benchmarks.report import Bar, Verdict, about_lines, format_ratio, markdown, summarise, values_of, within_rounds

BEGIN = "<!-- results: `python -m benchmarks.gpu --out` writes between these two lines -->"
END = "<!-- end of results on a GPU -->"

NO_GPU = (
    "**The CPU stood in for a GPU, with everything made small, to try the program: nothing can be concluded from these "
    "numbers.**"
)

BARS = (
    *(Bar(f"bus {size} MB", "limit", 0.9) for size in (16, 64, 256)),
    *(Bar(f"bus {size} MB", "torch, ahead", 1.5) for size in (16, 64, 256)),
    *(Bar(f"warm {size} MB, batches", None, 64, at_most=True) for size in (16, 64, 256)),
    Bar("step", "ideal", 0.98),
    *(Bar(f"pin {size} MB", "torch", 0.98) for size in (4, 40)),
    Bar("bound processor", None, 0.2, at_most=True),
    Bar("bound waiting", None, 0.05, at_most=True),
    *(Bar(f"host {size}, rest 2 ms", None, 100e-6, at_most=True) for size in ("65 KB", "16 MB")),
    *(Bar(f"resident {size}", "streamed", 3) for size in (256, 4096)),
)
JUDGED = {"pin": "drop-in"}
"""Who has to reach the bars of a part; otherwise ours."""


class Table(NamedTuple):
    """One table of the report: a row for each workload whose name begins with a word.

    Attributes:
        title: above it.
        prefix: this word.
        columns: loader -> head.
        ratios: of two loaders.
        show: a value as text.
    """

    title: str
    prefix: str
    columns: dict[str, str]
    ratios: tuple[tuple[str, str], ...]
    show: Callable[[float], str]


def in_units(factor: float, text: str) -> Callable[[float], str]:
    """A function that shows a value times the factor.

    Example:
        >>> in_units(1e-9, "{:.3g} GB/s")(24_510_000_000)
        '24.5 GB/s'
    """
    return lambda value: text.format(value * factor)


gigabytes, megabytes = in_units(1e-9, "{:.3g} GB/s"), in_units(1e-6, "{:.0f} MB")
microseconds, milliseconds = in_units(1e6, "{:.0f} us"), in_units(1e3, "{:.3g} ms")
share, per_gigabyte = "{:.1%}".format, "{:.3g} s/GB".format


def per_second(value: float) -> str:
    """Of a rate of anything: three digits and a unit.

    Example:
        >>> per_second(123.45), per_second(2_340_000)
        ('123', '2.34 M')
    """
    for scale, unit in ((1e6, " M"), (1e3, " k")):
        if value >= 10 * scale or (unit == " M" and value >= scale):
            return f"{value / scale:.3g}{unit}" if value < 1000 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.3g}" if value < 1000 else f"{value:.0f}"


FEEDS = {
    "ours": "ours",
    "ours, threads": "ours, threads",
    "torch": "torch",
    "torch, ahead": "torch, prefetcher",
    "workers": "our processes, to the host",
    "workers, threads": "our threads, to the host",
}
"""Columns of what fills batches in `bus`."""

TABLES = (
    Table(
        "Bytes per second to the device, by the size of a batch",
        "bus",
        {**FEEDS, "limit": "bare copies"},
        (("ours", "limit"), ("ours, threads", "limit"), ("ours", "torch, ahead")),
        gigabytes,
    ),
    Table(
        "Before that: batches until pages are touched, and faults per page of the last 64 batches",
        "warm",
        FEEDS,
        (),
        per_second,
    ),
    Table(
        "Training steps per second",
        "step",
        {"ours": "ours", "torch": "torch", "torch, ahead": "torch, prefetcher", "ideal": "ideal: the batch is there"},
        (("ours", "ideal"), ("torch", "ideal"), ("torch, ahead", "ideal")),
        per_second,
    ),
    Table(
        "Steps per second with `pin_memory=True` and the loop's own copies",
        "pin",
        {"ours": "ours", "drop-in": "the drop-in", "torch": "torch"},
        (("drop-in", "torch"), ("ours", "torch")),
        per_second,
    ),
    Table(
        "Processor time per such step, of all threads of the main process",
        "pinning",
        {"ours": "ours", "drop-in": "the drop-in", "torch": "torch"},
        (),
        milliseconds,
    ),
    Table(
        "A loop that the device limits, without synchronisation: shares of the time, of the main thread",
        "bound",
        {"ours": "ours", "drop-in": "the drop-in, `device=`", "torch, ahead": "torch, prefetcher"},
        (),
        share,
    ),
    Table(
        "Host time per `next()`, batches finished, after a rest of the host",
        "host",
        {
            "next()": "next()",
            "torch's calls": "torch's own calls",
            "ours": "beyond them",
            "placing": "`placing_seconds`",
        },
        (),
        microseconds,
    ),
    Table(
        "The most memory that is held",
        "memory",
        {"ours": "ours", "ours, threads": "ours, threads", "torch": "torch", "torch, ahead": "torch, prefetcher"},
        (),
        megabytes,
    ),
    Table("Page-locking a segment", "lock", {"lock": "lock", "unlock": "unlock"}, (), per_gigabyte),
    Table(
        "Samples per second, 50,000 images 3x32x32 uint8 with labels, shuffled, by the size of a batch",
        "resident",
        {"ours": "resident", "streamed": "streamed by workers", "inline": "streamed by the loop"},
        (("ours", "streamed"), ("ours", "inline")),
        per_second,
    ),
    Table(
        "Two shards on one device, bytes per second, batches of 16 MB",
        "shards",
        {"ours": "two shards", "one": "in one piece"},
        (("ours", "one"),),
        gigabytes,
    ),
)


BUSY = "A step keeps the device busy for {}, measured right after such steps."
NOTES: dict[str, tuple[str, Callable[[float], str]]] = {
    "step batch": ("A step takes {} images.", "{:.0f}".format),
    "pin step": (BUSY, milliseconds),
    "bound step": (BUSY, milliseconds),
    "memory batch": ("A batch takes {} bytes.", "{:,.0f}".format),
}
"""Below a table: the sizes that were measured, by workload."""


def judge(bar: Bar, records: Sequence[Record]) -> Verdict:
    """Whether ours reaches the bar. None: it was not measured, or not even our workers reach it.

    Example:
        >>> records = [Record(0, "step", "ours", 97.0), Record(0, "step", "ideal", 100.0)]
        >>> judge(Bar("step", "ideal", 0.98), records).met
        False
    """
    ones = values_of(records, bar.workload, JUDGED.get(bar.workload.split()[0], "ours"))
    if bar.of is None:
        measured = statistics.median(ones.values()) if ones else None
    else:
        others = values_of(records, bar.workload, bar.of)
        measured = within_rounds(ones, others)
        workers = within_rounds(values_of(records, bar.workload, "workers"), others)
        if measured is not None and workers is not None and measured < bar.limit and workers < WORKERS * bar.limit:
            return Verdict(bar, measured, None)
    if measured is None:
        return Verdict(bar, None, None)
    return Verdict(bar, measured, measured <= bar.limit if bar.at_most else measured >= bar.limit)


WORKERS = 1.1
"""How many times what a bar asks for workers have to be able to make: otherwise they are the limit."""


def cause(workload: str, records: Sequence[Record]) -> str:
    """Why not even our workers reach a bar of `bus`, as far as it was measured.

    Example:
        >>> cause("bus 16 MB", [Record(0, "warm 16 MB, faults per page", "workers", 0.3)])
        'workers bring no more to the host, and may still touch pages for the first time'
    """
    settled, counted = (
        values_of(records, f"{workload.replace('bus', 'warm')}, {what}", "workers")
        for what in ("batches", "faults per page")
    )
    why = ", into touched pages" if settled else ", and may still touch pages for the first time"
    return f"workers bring no more to the host{why if counted else ''}"


def bars(spec: Table, workload: str, records: Sequence[Record]) -> str:
    """The bars of a row, what was measured, and whether it is enough."""
    texts = []
    for verdict in (judge(bar, records) for bar in BARS if bar.workload == workload):
        bar, who = verdict.bar, JUDGED.get(spec.prefix)
        unknown = "not measured" if verdict.measured is None else cause(workload, records)
        met = {True: "met", False: "not met", None: unknown}[verdict.met]
        limit = f"{bar.limit:g} {spec.columns[bar.of].split(':')[0]}" if bar.of else spec.show(bar.limit)
        named = f"{who + ' ' if who else ''}{'<=' if bar.at_most else '>='} {limit}"
        texts.append(f"{named}: {measured(verdict, spec.show)}, {met}")
    return "; ".join(texts)


def measured(verdict: Verdict, show: Callable[[float], str]) -> str:
    """With as many digits as the bars have.

    Example:
        >>> measured(Verdict(Bar("step", "ideal", 0.98), 0.9786, False), str)
        '0.979'
    """
    value = verdict.measured
    if value is None:
        return "-"
    if verdict.bar.of is None:
        return show(value)
    return f"{value:.3f}" if value < 2 else format_ratio(value)


def table(spec: Table, records: Sequence[Record]) -> str:
    """The medians of one part, with what has failed in its place; empty if nothing of it was tried."""
    found = (r.workload for r in records if r.loader != "size")
    workloads = [name for name in dict.fromkeys(found) if name.split()[0] == spec.prefix]
    if not workloads:
        return ""
    head = ["", *spec.columns.values()]
    head += [f"{spec.columns[one]} / {spec.columns[other].split(':')[0]}" for one, other in spec.ratios]
    judged = any(bar.workload in workloads for bar in BARS)
    rows = [[*head, "bar"] if judged else head]
    for workload in workloads:
        row = [workload.removeprefix(spec.prefix).strip() or workload]
        row += [cell(records, workload, loader, spec.show) for loader in spec.columns]
        for one, other in spec.ratios:
            times = within_rounds(values_of(records, workload, one), values_of(records, workload, other))
            row.append(format_ratio(times))
        rows.append([*row, bars(spec, workload, records)] if judged else row)
    return f"**{spec.title}**\n\n{markdown(rows)}"


def cell(records: Sequence[Record], workload: str, loader: str, show: Callable[[float], str]) -> str:
    """Median and spread of one loader, or why there is none."""
    summary = summarise(list(values_of(records, workload, loader).values()))
    if summary is not None:
        low, high = show(summary.low), show(summary.high)
        return show(summary.median) if low == high else f"{show(summary.median)} ({low} .. {high})"
    errors = [r.error for r in records if (r.workload, r.loader) == (workload, loader) and r.error]
    return errors[0].replace("|", "/")[:100] if errors else "-"


def whole(records: Sequence[Record], about: dict[str, Any], is_gpu: bool) -> str:
    """The report as Markdown, without a title."""
    device = ", ".join(f"{name} {about[name]}" for name in ("device", "cuda", "driver", "cpus") if name in about)
    parts = [] if is_gpu else [NO_GPU]
    parts.append(f"{device.removeprefix('device ')}  \n{about_lines(about)}")
    for spec in TABLES:
        if text := table(spec, records):
            parts.append(text)
            parts += [
                note.format(cell(records, name, "size", show))
                for name, (note, show) in NOTES.items()
                if name.startswith(f"{spec.prefix} ") and values_of(records, name, "size")
            ]
    verdicts = [judge(bar, records) for bar in BARS]
    met, missed, unknown = ([one.bar for one in verdicts if one.met is kind] for kind in (True, False, None))
    names = "; ".join(dict.fromkeys(bar.workload for bar in unknown))
    parts.append(f"Bars: {len(met)} met, {len(missed)} not met, {len(unknown)} not judged{names and ': '}{names}.")
    return "\n\n".join(parts)
