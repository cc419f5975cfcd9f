"""What one turn of ``for batch in loader`` calls, counted with `sys.setprofile`.

    record_walks(loader, root) -> epochs of walks of Steps     one walk per batch
    counts_of(walk), summary_of(epochs)                        numbers

A turn is one ``next()``, and in it the batch of the turn before is dropped. Only functions whose code lies in the
folder ``root`` are counted, and only in the thread that runs the loop:

- A *call* is a ``call`` event. A generator that goes on is called again. A comprehension is a function if it has a
  frame of its own (before Python 3.12): compare numbers of one version of Python.
- *Functions* are distinct if their code is.
- A *change of file* is a call in another file than the call before it. Returns are not counted.
- The *steady* turns of an epoch are those without its first and its last quarter, where it fills and where the next
  epoch begins.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

EPOCHS = 3
"""Epochs that are recorded. A function belongs to the road if most of them call it: some calls are rare, as when memory
is cut once more."""

PAUSE = 0.015
"""Seconds between two turns, as for a training step. Workers finish all batches in flight in this time, so that the
walks do not depend on who is faster: with a shorter pause, messages come one by one or together, and medians differ."""

MEANS = ("calls", "changes of file")
"""Counts with a mean. Turns in which messages come and others take turns, and a median may be either."""


class Step(NamedTuple):
    """One call.

    Attributes:
        file: path below the package.
        function: its qualified name (Python 3.10: its name).
        line: where the function begins.
        depth: how many functions of the package wait for it.
    """

    file: str
    function: str
    line: int
    depth: int


def walk_of(events: Iterable[tuple[str, str, str, int]], root: str) -> list[Step]:
    """The calls among events ``(kind, file, function, line)``; files outside of the folder ``root`` are ignored."""
    walk, depth = [], 0
    for kind, file, function, line in events:
        if file.startswith(root + os.sep):
            if kind == "call":
                walk.append(Step(file[len(root) + 1 :].replace(os.sep, "/"), function, line, depth))
            # An event that closes what was open before the first one is no call of this walk.
            depth = max(0, depth + {"call": 1, "return": -1}[kind])
    return walk


def counts_of(walk: Sequence[Step]) -> dict[str, int]:
    """Calls, distinct functions, distinct files and changes of file."""
    return {
        "calls": len(walk),
        "functions": len({step[:3] for step in walk}),
        "files": len({step.file for step in walk}),
        "changes of file": sum(step.file != before.file for before, step in itertools.pairwise(walk)),
    }


def summary_of(epochs: Sequence[Sequence[Sequence[Step]]]) -> dict[str, Any]:
    """Numbers of the steady turns of some epochs, all of which have a batch.

    Returns:
        ``"epoch"``: the distinct functions and files that most epochs call. ``"next()"``: the median of each count of a
        turn, and the mean of those in `MEANS`. ``"walk"``: the most frequent walk with the median of calls.
    """
    steady = [walks[len(walks) // 4 : len(walks) - len(walks) // 4] for walks in epochs]
    epochs_of = Counter(function for walks in steady for function in {step[:3] for walk in walks for step in walk})
    touched = [function for function, count in epochs_of.items() if count > len(steady) / 2]
    walks = [walk for walks in steady for walk in walks]
    counts = [counts_of(walk) for walk in walks]
    middle = statistics.median_low(count["calls"] for count in counts)
    return {
        "epoch": {"functions": len(touched), "files": len({file for file, *_ in touched})},
        "next()": {
            **{name: statistics.median(count[name] for count in counts) for name in counts[0]},
            **{f"mean {name}": statistics.mean(count[name] for count in counts) for name in MEANS},
        },
        "walk": Counter(tuple(walk) for walk in walks if len(walk) == middle).most_common(1)[0][0],
    }


def record_walks(
    loader: Iterable[Any], root: str, epochs: int = EPOCHS, pause: float = PAUSE
) -> list[list[list[Step]]]:
    """The walk of every turn that gives a batch, by epoch.

    Args:
        loader: What the loop runs over, once per epoch.
        root: The folder whose functions are counted.
        epochs: How often the loop runs.
        pause: Seconds before each turn.
    """
    events: list[tuple[str, Any]] = []

    def note(frame: Any, kind: str, argument: object) -> None:
        if kind in ("call", "return"):
            events.append((kind, frame.f_code))

    recorded: list[list[list[Step]]] = []
    batch, end = None, object()
    for _ in range(epochs):
        iterator = iter(loader)
        recorded.append([])
        while True:
            time.sleep(pause)
            events.clear()
            sys.setprofile(note)
            try:
                batch = next(iterator, end)
            finally:
                sys.setprofile(None)
            if batch is end:
                break
            plain = [
                (kind, code.co_filename, getattr(code, "co_qualname", code.co_name), code.co_firstlineno)
                for kind, code in events
            ]
            recorded[-1].append(walk_of(plain, root))
    return recorded
