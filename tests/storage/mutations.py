"""Damaged files: seeded mutations of a file's bytes, each of which has to be refused, or to change nothing.

    assert_noticed(Subject("a.tar", content, payload, reference), range(200), tmp_path)

    right           the samples of the whole file
    refused         a `ShardError` that names the file, and a place in it
    unnoticeable    other samples, and the format cannot tell: only bytes inside samples differ, or the mutant is whole
                    by another reader (``reference``)
    vague, raw, wrong       defects

To look at one seed: ``damaged(subject.content, seed)`` gives what was done, and the bytes.
"""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardDataset
from sharded_loader.recordio import positioned
from sharded_loader.storage.files import ShardError

FINE = ("right", "refused", "unnoticeable")

PLACE = re.compile(r"(offset|bytes?|sample|record|row|column|member|page|block|batch)s? [^ ]*\d")


def read_shards(path: str) -> list[Any]:
    """All samples of a shard, by `ShardDataset`. Its index is kept beside it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = ShardDataset(path, index_folder=Path(path).parent / "indexes")
        try:
            return dataset.__getitems__(range(len(dataset)))
        finally:
            dataset.close()


@dataclass(frozen=True)
class Subject:
    """A file to be damaged."""

    name: str  # with its suffix
    content: bytes
    payload: Sequence[tuple[int, int]] = ()  # where the bytes lie whose change no reader can notice: begins and ends
    reference: Callable[[bytes], list[Any] | None] | None = None  # another reader; it gives None for what is damaged


def damaged(content: bytes, seed: int) -> tuple[str, bytes]:
    """A mutant, and what was done to it. The seed alone decides."""
    chance = random.Random(seed)
    unit = chance.choice((1, 1, 4, 64, 512))
    kind = KINDS[seed % len(KINDS)]
    size = min(unit * chance.randint(1, 4), len(content))
    at, other = (chance.randrange(max(1, len(content) - size)) // unit * unit for _ in range(2))
    raw = bytearray(content)
    if kind == "flip a bit of":
        raw[at] ^= 1 << chance.randrange(8)
    elif kind == "flip":
        raw[at] ^= chance.randrange(1, 256)
    elif kind in ("zero", "overwrite"):
        raw[at : at + size] = bytes(size) if kind == "zero" else chance.randbytes(size)
    elif kind == "cut":
        del raw[at:]
    elif kind == "zero from there on":
        raw[at:] = bytes(len(raw) - at)
    elif kind == "take out":
        del raw[at : at + size]
    elif kind == "insert":
        raw[at:at] = chance.choice((bytes(size), chance.randbytes(size)))
    elif kind == "duplicate":
        raw[other:other] = raw[at : at + size]
    elif kind == "swap":
        raw[at : at + size], raw[other : other + size] = raw[other : other + size], raw[at : at + size]
    else:
        at = len(raw)
        raw += chance.choice((bytes(size), chance.randbytes(size), raw[:size]))
    return f"{kind} {size} bytes at {at}, {other}", bytes(raw)


KINDS = (
    *("flip a bit of", "flip a bit of", "flip", "zero", "overwrite", "cut", "zero from there on", "take out"),
    *("insert", "duplicate", "swap", "extend"),
)


def assert_noticed(subject: Subject, seeds: Iterable[int], folder: Path) -> None:
    """Fail if a mutant gives wrong samples, or an error that does not help."""
    counts: Counter[str] = Counter()
    defects: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("TICK", "LONG_TICK"):
            patch.setattr(positioned, name, 0)  # no mutant is changed while it is read
        right = _read(subject, folder / "whole", subject.content)
        for seed in seeds:
            told, mutant = damaged(subject.content, seed)
            verdict, text = _verdict(subject, folder / str(seed), mutant, right)
            counts[verdict] += 1
            if verdict not in FINE:
                defects.append(f"{verdict}: seed {seed}: {told}: {text}")
    assert not defects, f"{subject.name}: {dict(counts)}\n" + "\n".join(defects[:20])
    assert counts["refused"] > 0, "no mutant was refused: do they reach the reader?"


def _verdict(subject: Subject, folder: Path, mutant: bytes, right: list[Any]) -> tuple[str, str]:
    try:
        found = _read(subject, folder, mutant)
    except ShardError as error:
        text = str(error)
        if subject.name not in text:
            return "vague", f"does not name the file: {text}"
        if not PLACE.search(text):
            return "vague", f"names no place in the file: {text}"
        return "refused", ""
    except Exception as error:
        return "raw", f"{type(error).__name__}: {error}"
    if same(found, right):
        return "right", ""
    if subject.reference is not None and same(found, subject.reference(mutant)):
        return "unnoticeable", ""
    if len(mutant) == len(subject.content):  # the same damage, but only to bytes inside samples
        inside = bytearray(subject.content)
        for begin, end in subject.payload:
            inside[begin:end] = mutant[begin:end]
        with contextlib.suppress(Exception):
            if same(found, _read(subject, folder, bytes(inside))):
                return "unnoticeable", ""
    return "wrong", f"{len(found)} samples, such as {str(found[:1])[:200]}; right are {len(right)}"


def _read(subject: Subject, folder: Path, content: bytes) -> list[Any]:
    """The samples of these bytes, as a file in a folder of its own: no index of another mutant is found."""
    folder.mkdir()
    try:
        (folder / subject.name).write_bytes(content)
        return read_shards(str(folder / subject.name))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def same(one: Any, other: Any) -> bool:
    """Whether two samples are equal, down to types; NaN equals itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    return bool(one == other) or (one != one and other != other)
