"""Recordings of random cases: what they do at one commit, compared with what they do at another one.

    (kind, seed) -> line -> {"arguments", "events": [[step, batch | error | state], ...], "warnings"}   one JSON line

Two recordings of one commit are equal: no event depends on time, on addresses, or on the module of a class.
"""

import faulthandler
import gc
import hashlib
import itertools
import json
import logging
import random
import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.fuzz import run
from tests.fuzz.steps import DONE, Pair, frozen

# What a text has of one run, or of one version of the source.
PASSING = [
    (re.compile(r"Traceback \(most recent call last\):\n(?:[ \t].*(?:\n|$))*"), "Traceback\n"),
    (re.compile(r"0x[0-9a-f]{6,}"), "0x"),
    (re.compile(r"sharded_loader(\.\w+)*\.(?=[A-Z])"), ""),
    (re.compile(r"\b(pid|worker|thread) \d+"), r"\1 N"),
]


def clean(text: str) -> str:
    for pattern, replacement in PASSING:
        text = pattern.sub(replacement, text)
    return text


def digest(value: Any) -> str:
    return hashlib.blake2b(clean(repr(value)).encode(), digest_size=6).hexdigest()


def shown(value: Any) -> str:
    """A batch, an error, or whatever a call returns."""
    if value is DONE:
        return "end"
    if isinstance(value, BaseException):
        texts = [f"{type(value).__name__}: {value}", *getattr(value, "__notes__", [])]
        return clean("\n".join(texts)) + ("" if value.__cause__ is None else f"\nfrom {shown(value.__cause__)}")
    if isinstance(value, int | str | None):
        return clean(repr(value))
    return f"{digest(frozen(value))} {clean(' '.join(str(value).split()))[:60]}"


def plain(value: Any) -> Any:
    """A state as JSON. Long texts, long lists and arrays are shortened to a checksum."""
    if isinstance(value, dict):
        return {f"{key}": plain(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, list | tuple) and (len(value) <= 12 or any(isinstance(part, dict) for part in value)):
        return [type(value).__name__, *map(plain, value)]
    is_short = type(value) in (bool, int, float, type(None)) or (isinstance(value, str) and len(value) < 80)
    return value if is_short else f"{type(value).__name__} {digest(value)}"


def line(kind: str, seed: int, processes: bool = True) -> dict[str, Any]:
    """What one case does."""
    for start in (random.seed, np.random.seed, torch.manual_seed):
        start(seed)
    events, lines, arguments = list[Any](), set[str](), ""

    class Recorded(run.KINDS[kind][1]):  # type: ignore[misc]
        def outcome(self, ask: Callable[[], Any]) -> Any:
            returned = super().outcome(ask)
            events.append([self.steps[-1].partition(" ")[0], shown(returned)])
            return returned

        def next_of(self, pair: Pair, at: int) -> Any:
            more = super().next_of(pair, at)
            events.append(["state", plain(pair.loader.state_dict())])
            return more

    handler, logger = logging.Handler(), logging.getLogger("sharded_loader")
    handler.emit = lambda record: lines.add(clean(record.getMessage()))  # type: ignore[method-assign]
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            case = Recorded(seed, processes)
            case.run()
            arguments = str(case)
        except Exception as error:
            events.append(["run", shown(error)])
    logger.removeHandler(handler)
    gc.collect()
    lines |= {clean(f"{warning.category.__name__}: {warning.message}") for warning in caught}
    arguments = [clean(part) for part in arguments.split("\n    ")]
    return {"kind": kind, "seed": seed, "arguments": arguments, "events": events, "warnings": sorted(lines)}


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """Each difference of two lines, or parts of lines, as text."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differences(was.get(key, "missing"), now.get(key, "missing"), f"{where}/{key}")
    elif isinstance(was, list) and isinstance(now, list):
        for number, (one, other) in enumerate(itertools.zip_longest(was, now, fillvalue="missing")):
            name = f"{number}" if not isinstance(one, list) or len(one) != 2 else f"{number} {one[0]}"
            yield from differences(one, other, f"{where}/{name}")
    elif was != now:
        yield f"    {where}\n        was {was}\n        now {now}"


def compare(before: Iterable[Any], after: Iterable[Any]) -> int:
    """Print how two recordings of the same cases differ; how many of them do."""
    counts = []
    for was, now in zip(before, after, strict=True):
        found = list(itertools.islice(differences(was, now), 4))
        counts.append(len(found))
        if found:
            print(f"{now['kind']} {now['seed']}: {now['arguments'][:2]}", *found, sep="\n", flush=True)
    print(f"{len(counts)} seeds compared, {sum(map(bool, counts))} differ")
    return sum(map(bool, counts))


def watched_line(kind: str, seed: int) -> str:
    """As JSON. A case that hangs ends the program, with the stack of each thread."""
    faulthandler.dump_traceback_later(2 * run.HANG, exit=True)
    try:
        return json.dumps(line(kind, seed)) + "\n"
    finally:
        faulthandler.cancel_dump_traceback_later()


def record(path: Path, seeds: Iterable[int], kind: str) -> int:
    with path.open("w") as file:
        file.writelines(watched_line(kind, seed) for seed in seeds)
    return 0


def check(path: Path) -> int:
    """Do what a file has once more, and compare; the exit status."""
    known = list(map(json.loads, path.read_text().splitlines()))
    return min(1, compare(known, (json.loads(watched_line(one["kind"], one["seed"])) for one in known)))
