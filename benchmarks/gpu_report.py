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
    *(Bar(f"bus {size} MB", "limit", 0.95) for size in (16, 64, 256)),
    *(Bar(f"bus {size} MB", "torch, ahead", 1.5) for size in (16, 64, 256)),
    Bar("step", "ideal", 0.98),
    *(Bar(f"pin {size} MB", "torch", 0.98) for size in (4, 40)),
    Bar("bound processor", None, 0.2, at_most=True),
    Bar("bound waiting", None, 0.05, at_most=True),
    Bar("host 65 KB", None, 150e-6, at_most=True),
    Bar("host 16 MB", None, 150e-6, at_most=True),
    Bar("resident 256", "streamed", 3),
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


def gigabytes(value: float) -> str:
    """Of a rate in bytes per second.

    Example:
        >>> gigabytes(24_510_000_000)
        '24.5 GB/s'
    """
    return f"{value / 1e9:.3g} GB/s"


def microseconds(value: float) -> str:
    """Of seconds."""
    return f"{value * 1e6:.0f} us"


def milliseconds(value: float) -> str:
    """Of seconds."""
    return f"{value * 1e3:.3g} ms"


def share(value: float) -> str:
    """A part of the time.

    Example:
        >>> share(0.034)
        '3.4%'
    """
    return f"{value:.1%}"


def size(value: float) -> str:
    """Of bytes."""
    return f"{value / 1e6:.0f} MB"


def per_gigabyte(value: float) -> str:
    """Of seconds per GB."""
    return f"{value:.3g} s/GB"


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


TABLES = (
    Table(
        "Bytes per second to the device, by the size of a batch",
        "bus",
        {
            "ours": "ours",
            "ours, threads": "ours, threads",
            "torch": "torch",
            "torch, ahead": "torch, prefetcher",
            "workers": "our workers, to the host",
            "limit": "bare copies",
        },
        (("ours", "limit"), ("ours, threads", "limit"), ("ours", "torch, ahead")),
        gigabytes,
    ),
    Table(
        "Training steps per second",
        "step",
        {"ours": "ours", "torch": "torch", "torch, ahead": "torch, prefetcher", "ideal": "ideal: the batch is there"},
        (("ours", "ideal"), ("torch", "ideal"), ("torch, ahead", "ideal")),
        per_second,
    ),
    Table(
        "Steps per second with `pin_memory=True` and the loop's own copies, steps of 30 ms",
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
        "Host time per `next()`, batches finished",
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
        size,
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


def bars_table(records: Sequence[Record]) -> str:
    """All bars, measured or not."""
    rows = [["work", "bar", "measured", ""]]
    for verdict in (judge(bar, records) for bar in BARS):
        bar = verdict.bar
        unknown = "not measured" if verdict.measured is None else "the workers are the limit"
        met = {True: "met", False: "not met", None: unknown}[verdict.met]
        named = f"<= {shown(bar, bar.limit)}" if bar.of is None else f">= {bar.limit:g} {bar.of}"
        judged = JUDGED.get(bar.workload.split()[0])
        rows.append([f"{bar.workload}, {judged}" if judged else bar.workload, named, measured(verdict), met])
    return markdown(rows)


def shown(bar: Bar, value: float) -> str:
    """What is measured for a bar that compares with nothing."""
    return share(value) if bar.workload.startswith("bound") else microseconds(value)


def measured(verdict: Verdict) -> str:
    """With as many digits as the bars have.

    Example:
        >>> measured(Verdict(Bar("step", "ideal", 0.98), 0.9786, False))
        '0.979'
    """
    value = verdict.measured
    if value is None:
        return "-"
    if verdict.bar.of is None:
        return shown(verdict.bar, value)
    return f"{value:.3f}" if value < 2 else format_ratio(value)


def table(spec: Table, records: Sequence[Record]) -> str:
    """The medians of one part, with what has failed in its place; empty if nothing of it was tried."""
    workloads = list(dict.fromkeys(r.workload for r in records if r.workload.split()[0] == spec.prefix))
    workloads = [name for name in workloads if name not in ("step batch", "memory batch")]
    if not workloads:
        return ""
    head = ["", *spec.columns.values()]
    head += [f"{spec.columns[one]} / {spec.columns[other].split(':')[0]}" for one, other in spec.ratios]
    rows = [head]
    for workload in workloads:
        row = [workload.removeprefix(spec.prefix).strip() or workload]
        row += [cell(records, workload, loader, spec.show) for loader in spec.columns]
        for one, other in spec.ratios:
            times = within_rounds(values_of(records, workload, one), values_of(records, workload, other))
            row.append(format_ratio(times))
        rows.append(row)
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
    sizes = {record.workload: record.value for record in records if record.loader == "size" and record.value}
    notes = {"step": "A step takes {:.0f} images.", "memory": "A batch takes {:,.0f} bytes."}
    parts = [] if is_gpu else [NO_GPU]
    parts += [f"{device.removeprefix('device ')}  \n{about_lines(about)}", bars_table(records)]
    for spec in TABLES:
        if text := table(spec, records):
            note = sizes.get(f"{spec.prefix} batch")
            parts.append(text if note is None else f"{text}\n\n{notes[spec.prefix].format(note)}")
    verdicts = [judge(bar, records).met for bar in BARS]
    met, missed, unknown = (verdicts.count(kind) for kind in (True, False, None))
    parts.append(f"Bars: {met} met, {missed} not met, {unknown} not measured.")
    return "\n\n".join(parts)
