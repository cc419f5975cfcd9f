"""One rank of a program that shares a dataset: `python shared_rank.py KEY [WHAT]`.

It prints a word for each thing that happens, and goes on when it is told a line. "builds", in ``make_dataset``: on the
line "raise" it raises an error. "has": the numbers that follow are a digest of the dataset.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from sharded_loader.caching.shared import share


class Data:
    """An object of the program's own class, with arrays."""

    def __init__(self, size: int) -> None:
        self.x = np.arange(size)
        self.names = np.array([f"name {number}" for number in range(2000)])
        self.function = lambda: int(self.x[-1])


def make() -> Data:
    tell("builds")
    if sys.stdin.readline() == "raise\n":
        raise OSError("no such data")
    return Data(100_000)


def make_other() -> Data:
    return Data(10)


def tell(*words: Any) -> None:
    print(*words, flush=True)


if __name__ == "__main__":
    key, what = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    try:
        data = share(make_other if what == "other" else make, key)
    except Exception as error:
        tell(type(error).__name__, error)
        raise SystemExit from None
    tell("has", type(data) is Data, data.x.sum(), data.names[1999], data.function())
    if what == "forks" and os.fork() == 0:
        sys.stdout.close()
        os.close(1)
        while os.getppid() != 1:  # until the test lets it end
            if not sys.stdin.readline():
                break
        os._exit(0)
    sys.stdin.readline()
