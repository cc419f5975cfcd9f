"""Every rank the same work: one table for each of its parts.

    python -m benchmarks.ranks [--quick] [equal plans kinds mixtures packing tokens]

Each part is a module with `TITLE` and `rows`. A row is a dict; rows with the same keys are one table.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable
from itertools import groupby
from typing import Any

PARTS = ("equal", "plans", "kinds", "mixtures", "packing", "tokens")


def tables(rows: Iterable[dict[str, Any]]) -> Iterable[str]:
    """The lines of Markdown tables."""
    for keys, group in groupby(rows, key=tuple):
        yield ""
        yield f"| {' | '.join(keys)} |"
        yield "|---" * len(keys) + "|"
        for row in group:
            yield f"| {' | '.join(map(str, row.values()))} |"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description="Measure what ranks get.")
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="some parts")
    parser.add_argument("--quick", action="store_true", help="less data, to see whether it runs")
    given = parser.parse_args()
    for name in given.parts or PARTS:
        part = importlib.import_module(f"benchmarks.ranks_{name}")
        print(f"\n### {part.TITLE}", flush=True)
        print("\n".join(tables(part.rows(given.quick))), flush=True)


if __name__ == "__main__":
    main()
