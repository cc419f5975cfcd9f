"""From records to ratios, bars, sentences and tables. Pure.

    records -> summarise, ratio, judge, compare_samples
    findings(records, cores)    three sentences: what was found
    whole(records, about)       the tables (Markdown, also what the terminal shows)

A ratio is the median over rounds of the ratio within a round, of speeds: above 1 means faster, or smaller. A bar
that speaks of time or size (`Bar.at_most`) has the inverse: below 1 means faster, or smaller.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ceilings import CEILINGS
from benchmarks.loaders import LOADERS, OURS
from benchmarks.measure import NOT_INSTALLED, Record
from benchmarks.workloads import WORKLOADS, Workload

BEGIN = "<!-- results: `python -m benchmarks --out` writes between these two lines -->"
END = "<!-- end of results -->"
BEGIN_FINDINGS = "<!-- findings: `python -m benchmarks --out` writes between these two lines -->"
END_FINDINGS = "<!-- end of findings -->"


@dataclass(frozen=True)
class Bar:
    """What ours has to reach on a workload.

    Attributes:
        workload: its name.
        of: a ceiling or a loader to compare with. None: the value itself is compared with the limit.
        limit: a ratio. Without ``of``: seconds, or a ratio if the workload's value is one (``"gap"``).
        at_most: True for time or size, which must not exceed the limit. False for speed, which must reach it.
    """

    workload: str
    of: str | None
    limit: float
    at_most: bool = False

    def __str__(self) -> str:
        if self.of is None:
            return f"<= {self.limit:g}" if self.workload == "gap" else f"<= {self.limit * 1000:g} ms"
        if not self.at_most:
            return f">= {self.limit:g} {self.of}"
        what = "memory" if self.workload == "memory" else "time"
        return f"<= {self.limit:g} of the {what} of {CEILINGS.get(self.of, self.of)}"


BARS = (
    Bar("images", "C", 1.0),
    Bar("images", "seqtools", 1.5),
    Bar("columns", "T", 0.5),
    Bar("columns", "seqtools", 1.3),
    Bar("columns-inline", "T", 0.75),
    Bar("large", "D", 0.95),
    Bar("large-inline", "C", 0.9),
    Bar("tiny", "torch", 0.04, at_most=True),
    Bar("iterable", "torch", 2.0),
    Bar("tokens", "C", 0.5),
    Bar("tokens", "seqtools", 1.3),
    Bar("images-inline", "C", 1.2),
    Bar("tiny-inline", "C", 0.35),
    Bar("jpeg", "P", 0.97),
    Bar("latency", "S", 0.99),
    Bar("records", "R", 5),
    Bar("records-shuffled", "R", 2),
    Bar("import", "N", 1.6, at_most=True),
    Bar("first-spawn", None, 0.200, at_most=True),
    Bar("gap", None, 1.3, at_most=True),
    Bar("close", None, 0.010, at_most=True),
    Bar("memory", "torch", 0.45, at_most=True),
)


@dataclass(frozen=True)
class Summary:
    """The values of one loader on one workload over all rounds."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Verdict:
    """A bar, and where ours is. ``measured`` and ``met`` are None where there is nothing to compare."""

    bar: Bar
    measured: float | None
    met: bool | None


# -- numbers --------------------------------------------------------------------------------------------------


def summarise(values: Sequence[float]) -> Summary | None:
    """Median and spread; None without values."""
    return Summary(statistics.median(values), min(values), max(values)) if values else None


def values_of(records: Iterable[Record], workload: str, loader: str) -> dict[int, float]:
    """Round -> value."""
    return {
        record.round: record.value
        for record in records
        if record.workload == workload and record.loader == loader and record.value is not None
    }


def ratio(records: Sequence[Record], workload: str, one: str, other: str) -> float | None:
    """How many times as good ``one`` is as ``other``: median over the rounds that have both."""
    ones, others = values_of(records, workload, one), values_of(records, workload, other)
    return within_rounds(ones, others) if WORKLOADS[workload].higher_is_better else within_rounds(others, ones)


def within_rounds(ones: dict[int, float], others: dict[int, float]) -> float | None:
    """The median over the rounds that have both of one value through the other of the same round."""
    both = sorted(ones.keys() & others.keys())
    return statistics.median(ones[number] / others[number] for number in both) if both else None


def judge(bar: Bar, records: Sequence[Record]) -> Verdict:
    """Whether ours reaches the bar."""
    measured: float | None
    if bar.of is None:
        values = list(values_of(records, bar.workload, OURS).values())
        measured = statistics.median(values) if values else None
    else:
        one, other = (bar.of, OURS) if bar.at_most else (OURS, bar.of)
        measured = ratio(records, bar.workload, one, other)
    if measured is None:
        return Verdict(bar, None, None)
    return Verdict(bar, measured, measured <= bar.limit if bar.at_most else measured >= bar.limit)


def compare_samples(records: Sequence[Record], workload: str) -> dict[str, str]:
    """Loader -> ``"ok"``, ``"other order"`` or ``"MISMATCH"``, compared with the first ceiling, else with torch."""
    digests = {
        record.loader: (record.same, record.in_order)
        for record in reversed(records)
        if record.workload == workload and record.same is not None
    }
    if not digests:
        return {}
    reference = next(
        (name for name in (*WORKLOADS[workload].ceilings, "torch") if name in digests), next(iter(digests))
    )
    same, in_order = digests[reference]
    found: dict[str, str] = {}
    for record in records:
        if record.workload != workload or record.same is None or found.get(record.loader) == "MISMATCH":
            continue
        if record.same != same:
            found[record.loader] = "MISMATCH"
        elif found.get(record.loader) != "other order":
            found[record.loader] = "ok" if record.in_order == in_order else "other order"
    return found


def behind(records: Sequence[Record], workload: str) -> dict[str, float]:
    """The other loaders that ours is behind on a workload -> ours / this, where that rounds to less than 1.00."""
    ratios = {name: ratio(records, workload, OURS, name) for name in LOADERS if name != OURS}
    return {name: times for name, times in ratios.items() if times is not None and times < 0.995}


def failures(records: Sequence[Record]) -> list[str]:
    """What ``--check`` objects to: bars that are missed, samples that differ, ours not measured."""
    found = [
        f"{WORKLOADS[verdict.bar.workload].title}: {_measured(verdict)}, the bar is {verdict.bar}"
        for verdict in (judge(bar, records) for bar in BARS)
        if verdict.met is False
    ]
    for workload in dict.fromkeys(record.workload for record in records):
        found += [
            f"{WORKLOADS[workload].title}: {loader} delivered other samples"
            for loader, verdict in compare_samples(records, workload).items()
            if verdict == "MISMATCH"
        ]
    found += [
        f"{WORKLOADS[record.workload].title}: {record.loader}: {record.error}"
        for record in records
        if record.error is not None and (record.loader == OURS or record.loader in CEILINGS)
    ]
    return found


# -- text -----------------------------------------------------------------------------------------------------


def format_value(kind: str, value: float) -> str:
    """With its unit and three digits."""
    if kind == "rate":
        return _three_digits(value)
    if kind == "memory":
        return f"{value / 1e6:.0f} MB"
    if kind == "gap":
        return format_ratio(value)
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.2f} s"


def _three_digits(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    if value >= 1e4:
        return f"{value / 1e3:.0f} k" if value >= 1e5 else f"{value / 1e3:.1f} k"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def format_ratio(value: float | None) -> str:
    """Two significant digits and a bit."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 20 else f"{value:.1f}" if value >= 5 else f"{value:.2f}"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table; the first row is its head. Padded, so that it reads in a terminal too."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


HEADS = {
    "rate": "samples/s",
    "first": "to first batch",
    "close": "to close",
    "import": "to import",
    "memory": "memory",
    "gap": "gap",
}


def workload_table(records: Sequence[Record], workload: Workload) -> str:
    """All that was measured on one workload."""
    name = workload.name
    samples = compare_samples(records, name)
    loaders = list(dict.fromkeys(record.loader for record in records if record.workload == name))
    rank = [*CEILINGS, *LOADERS]
    head = ["", HEADS[workload.kind], "min .. max"]
    head += [*(f"of {ceiling}" for ceiling in workload.ceilings), "ours / this", "samples"]
    rows = [head]
    for loader in sorted(loaders, key=rank.index):
        label = f"{loader}: {CEILINGS[loader]}" if loader in CEILINGS else loader
        summary = summarise(list(values_of(records, name, loader).values()))
        if summary is None:
            errors = [r.error or "" for r in records if r.workload == name and r.loader == loader]
            error = NOT_INSTALLED if errors[0].startswith(NOT_INSTALLED) else f"failed: {errors[0]}"[:100]
            rows.append([label, error.replace("|", "/")] + [""] * (len(head) - 2))
            continue
        shown = [format_value(workload.kind, value) for value in (summary.median, summary.low, summary.high)]
        row = [label, shown[0], f"{shown[1]} .. {shown[2]}"]
        row += [format_ratio(ratio(records, name, loader, ceiling)) for ceiling in workload.ceilings]
        ours = "" if loader == OURS else format_ratio(ratio(records, name, OURS, loader))
        rows.append([*row, ours, samples.get(loader, "")])
    return markdown(rows)


def bars_table(records: Sequence[Record]) -> str:
    """The bars whose workload was measured, and who is ahead of ours there."""
    rows = [["work", "bar", "measured", "", "behind"]]
    measured = {record.workload for record in records}
    told = set()
    for bar in BARS:
        if bar.workload in measured:
            verdict = judge(bar, records)
            met = {True: "met", False: "not met", None: "not measured"}[verdict.met]
            ahead = {} if bar.workload in told else behind(records, bar.workload)
            told.add(bar.workload)
            names = ", ".join(f"{name} ({format_ratio(times)})" for name, times in ahead.items())
            rows.append([WORKLOADS[bar.workload].title, str(bar), _measured(verdict), met, names])
    return markdown(rows)


def _measured(verdict: Verdict) -> str:
    if verdict.measured is None:
        return "-"
    if verdict.bar.of is None:
        return format_value("gap" if verdict.bar.workload == "gap" else "close", verdict.measured)
    return f"{verdict.measured:.3f}" if verdict.measured < 0.1 else f"{verdict.measured:.2f}"


def findings(records: Sequence[Record], cores: int) -> str:
    """Three sentences that say what was found.

    Args:
        records: all measurements.
        cores: of the machine.

    Returns:
        How ours compares with torch on the workloads that are rates; where ours is behind another loader, with the
        ratio of speeds, times or sizes (below 1); and whether all loaders delivered the same samples.
    """
    return " ".join([_beside_torch(records, cores), _behind_sentence(records), _samples_sentence(records)])


def times_torch(records: Sequence[Record], loader: str) -> dict[str, float]:
    """Workload -> how many times as fast as torch a loader is: where both were measured, and a rate was."""
    found = {}
    for name in dict.fromkeys(record.workload for record in records):
        times = ratio(records, name, loader, "torch") if WORKLOADS[name].kind == "rate" else None
        if times is not None:
            found[name] = times
    return found


def _beside_torch(records: Sequence[Record], cores: int) -> str:
    here = f"On {'this core' if cores == 1 else f'these {cores} cores'}"
    times = times_torch(records, OURS)
    if not times:
        return f"{here}, the speed of sharded_loader was not compared with that of torch's DataLoader."
    low, high = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    shown = f"{format_ratio(times[low])} (`{low}`)"
    if low != high:
        shown = f"between {shown} and {format_ratio(times[high])} (`{high}`)"
    return f"{here}, sharded_loader reads {shown} times as fast as torch's DataLoader."


def _behind_sentence(records: Sequence[Record]) -> str:
    places: dict[str, list[str]] = {}
    for workload in dict.fromkeys(record.workload for record in records):
        for name, times in behind(records, workload).items():
            places.setdefault(name, []).append(f"`{workload}` ({format_ratio(times)})")
    if not places:
        return "It is behind no other loader that was measured."
    return f"It is {listed([f'behind {name} on {listed(works)}' for name, works in places.items()])}."


def _samples_sentence(records: Sequence[Record]) -> str:
    wrong: dict[str, list[str]] = {"MISMATCH": [], "other order": []}
    compared = False
    for workload in dict.fromkeys(record.workload for record in records):
        for name, verdict in compare_samples(records, workload).items():
            compared = True
            if verdict != "ok":
                wrong[verdict].append(f"{name} on `{workload}`")
    if not compared:
        return "No samples were compared."
    if wrong["MISMATCH"]:
        return f"Other samples were delivered by {listed(wrong['MISMATCH'])}."
    if wrong["other order"]:
        return f"All loaders delivered the same samples, in another order by {listed(wrong['other order'])}."
    return "All loaders delivered the same samples."


def listed(items: Sequence[str]) -> str:
    """``a, b and c``.

    Example:
        >>> listed(["a", "b", "c"])
        'a, b and c'
    """
    return f"{', '.join(items[:-1])} and {items[-1]}" if len(items) > 1 else "".join(items)


def about_lines(about: dict[str, Any]) -> str:
    """Where the numbers come from."""
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    settings = ", ".join(f"{name} {value:g}" for name, value in about["settings"].items())
    lines = [
        f"{about['date']}, {about['cpu']}, {about['cores']} cores, {about['system']}  ",
        f"{versions}  ",
        f"`{about['command']}` ({settings})",
    ]
    return "\n".join(lines + (["", about["note"]] if about["note"] else []))


def whole(records: Sequence[Record], about: dict[str, Any]) -> str:
    """The report as Markdown, without a title."""
    parts = [about_lines(about), bars_table(records)]
    for name in dict.fromkeys(record.workload for record in records):
        parts += [f"**{WORKLOADS[name].title}** (`{name}`)", workload_table(records, WORKLOADS[name])]
    return "\n\n".join(parts)


def fill(text: str, results: str, begin_line: str = BEGIN, end_line: str = END) -> str | None:
    """``text`` with the results between its two marker lines; None if it has no such lines."""
    before, begin, rest = text.partition(begin_line)
    _, end, after = rest.partition(end_line)
    return f"{before}{begin}\n\n{results}\n\n{end}{after}" if begin and end else None
