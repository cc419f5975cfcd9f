"""Shards for tests: tar files, MDS files, tables, written by hand or by the libraries that are there."""

from __future__ import annotations

import functools
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardCache, ShardDataset
from sharded_loader.storage.files import Stat
from sharded_loader.storage.stores import ObjectStore


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For modules that import it: the datasets and stores that a test has made are closed at its end."""
    made: list[Any] = []
    for kind in (ShardDataset, ObjectStore):

        def noting(self: Any, *args: Any, init: Any = kind.__init__, **options: Any) -> None:
            init(self, *args, **options)
            made.append(self)

        monkeypatch.setattr(kind, "__init__", functools.wraps(kind.__init__)(noting))
    yield
    for one in made:
        one.close()


def tar(members: dict[str, bytes]) -> bytes:
    """A tar file of these members, in this order."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as out:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            out.addfile(member, io.BytesIO(content))
    return file.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.write_bytes(tar(members))


def tar_of_numbers(numbers: range) -> bytes:
    """A tar file whose samples are these numbers as texts."""
    return tar({f"{number:03}.txt": b"%d" % number for number in numbers})


def number(sample: dict[str, Any]) -> int:
    """The number that a sample is."""
    return int(sample["txt"])


def place_of(cache: ShardCache, url: str, stat: Stat) -> Path:
    """The file that a shard is, or will be, in a cache."""
    return cache._path(url, stat)


def write_mds(path: Path, columns: dict[str, tuple[str, int | None]], rows: list[list[bytes]]) -> None:
    """An MDS file, as its description says.

    Args:
        path: where.
        columns: encoding, and size where it is fixed, of each column.
        rows: the encoded columns of each sample.
    """
    names = sorted(columns)
    config = {
        "column_names": names,
        "column_encodings": [columns[name][0] for name in names],
        "column_sizes": [columns[name][1] for name in names],
    }
    samples = []
    for row in rows:
        free = [len(value) for name, value in zip(names, row, strict=True) if columns[name][1] is None]
        samples.append(np.array(free, "<u4").tobytes() + b"".join(row))
    text = json.dumps(config).encode()
    begin = 4 * (len(rows) + 2) + len(text)
    offsets = np.cumsum([begin, *map(len, samples)]).astype("<u4")
    path.write_bytes(np.array([len(rows)], "<u4").tobytes() + offsets.tobytes() + text + b"".join(samples))


def assert_same_samples(found: list[Any], expected: list[Any]) -> None:
    """Compare dicts whose values may be arrays."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, value in other.items():
            if isinstance(value, np.ndarray):
                assert one[name].dtype == value.dtype and np.array_equal(one[name], value)
            else:
                assert one[name] == value and type(one[name]) is type(value), (name, one[name], value)
