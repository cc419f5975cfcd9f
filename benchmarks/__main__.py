"""``python -m benchmarks``: the command line.

arguments -> Settings -> measure.run -> records -> sentences and tables on stdout, files in --out
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import measure, pictures, report
from benchmarks.loaders import LOADERS, OURS
from benchmarks.workloads import WORKLOADS

QUICK = {"rounds": 1, "warm": 0.1, "span": 0.3}
FULL = {"rounds": 7, "warm": 0.5, "span": 1.0}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line, its defaults filled in."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description="Measure sharded_loader beside other loaders and bare limits."
    )
    parser.add_argument("--quick", action="store_true", help="about a minute: ours and torch, one short round")
    parser.add_argument("--rounds", type=int, help=f"how often all is measured (default {FULL['rounds']})")
    parser.add_argument("--workers", type=int, default=2, help="worker processes of each loader (default 2)")
    parser.add_argument("--span", type=float, help=f"seconds per measurement (default {FULL['span']:g})")
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, metavar="WORKLOAD", help=", ".join(WORKLOADS))
    parser.add_argument("--loaders", nargs="+", choices=LOADERS, metavar="LOADER", help=", ".join(LOADERS))
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results.json, the page and the pictures there")
    parser.add_argument("--note", default="", help="a sentence to stand above the results")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed or samples differ")
    chosen = parser.parse_args(arguments)
    defaults = QUICK if chosen.quick else FULL
    chosen.rounds = defaults["rounds"] if chosen.rounds is None else chosen.rounds
    chosen.span = defaults["span"] if chosen.span is None else chosen.span
    chosen.warm = defaults["warm"]
    if min(chosen.rounds, chosen.workers) < 1 or chosen.span <= 0:
        parser.error("--rounds and --workers have to be at least 1, --span above 0")
    chosen.only = chosen.only or [name for name, work in WORKLOADS.items() if work.quick or not chosen.quick]
    chosen.loaders = chosen.loaders or ([OURS, "torch"] if chosen.quick else list(LOADERS))
    return chosen


def main(arguments: Sequence[str]) -> int:
    """Run the benchmark; the exit status."""
    chosen = parse(arguments)
    settings = measure.Settings(
        tuple(chosen.only), tuple(chosen.loaders), int(chosen.rounds), chosen.workers, chosen.warm, chosen.span
    )
    records: list[measure.Record] = []
    try:
        for record in measure.run(settings, lambda line: print(line, file=sys.stderr, flush=True)):
            records.append(record)
    except KeyboardInterrupt:
        print(f"interrupted after {len(records)} measurements: here is what there is", file=sys.stderr)
    # The note stands beside the command anyway.
    typed = [word for before, word in zip(["", *arguments], arguments, strict=False) if "--note" not in (before, word)]
    about = measure.about(settings, shlex.join(["python", "-m", "benchmarks", *typed]), chosen.note)
    print(report.findings(records, about["cores"]), report.whole(records, about), sep="\n\n")
    if chosen.out is not None:
        write(chosen.out, records, about)
    found = report.failures(records) if chosen.check else []
    for failure in found:
        print(f"check: {failure}", file=sys.stderr)
    return 1 if found else 0


def write(folder: Path, records: list[measure.Record], about: dict[str, Any]) -> None:
    """Write results.json, two pictures, the sentences and the tables.

    Args:
        folder: where they go; made if it is not there. Sentences and tables go between the marker lines of its
            README.md, or into results.md if there are no such lines.
        records: all measurements.
        about: where and how they were made.
    """
    folder.mkdir(parents=True, exist_ok=True)
    plain = {"about": about, "records": [dataclasses.asdict(record) for record in records]}
    (folder / "results.json").write_text(json.dumps(plain, indent=1) + "\n")
    found, tables = report.findings(records, about["cores"]), report.whole(records, about)
    if pictures.draw_chart(records, folder / "results.png"):
        found += "\n\n![how many times as fast as torch each loader is, by workload](results.png)"
    if pictures.draw_panels(records, folder / "panels.png"):
        tables += "\n\n![medians, with lines from the worst to the best round](panels.png)"
    else:
        print("no pictures: matplotlib is not installed (extra `bench`)", file=sys.stderr)
    readme = folder / "README.md"
    filled = readme.read_text() if readme.exists() else None
    if filled is not None:
        filled = report.fill(filled, found, report.BEGIN_FINDINGS, report.END_FINDINGS)
    if filled is not None:
        filled = report.fill(filled, tables)
    if filled is None:
        (folder / "results.md").write_text(f"# Benchmark results\n\n{found}\n\n{tables}\n")
    else:
        readme.write_text(filled)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
