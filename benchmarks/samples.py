"""The datasets of the benchmark, made from fixed seeds.

    images() -> Source          one function for each kind of sample
    Source.rows                 a plain dataset: ``__getitem__(index)`` returns one sample, a NumPy array
    Source.columns              the same samples as one array, where a workload is about columns

A worker that a loader spawns imports this module for the dataset classes. So this module imports NumPy alone.
"""

from __future__ import annotations

import io
import struct
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

IMAGE_SHAPE = (3, 32, 32)
NUM_IMAGES = 50_000
LATENCY = 0.005
MAX_TOKENS = 500
NUM_RECORDS = 100_000


class Rows:
    """Samples are the rows of an array."""

    def __init__(self, array: Array) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> Any:
        return self._array[index]


class SlowRows(Rows):
    """Rows that come after `LATENCY`, as from a network."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(LATENCY)
        return self._array[index]


class Tokens:
    """Ragged rows: stretches of one flat array."""

    def __init__(self, flat: Array, ends: Sequence[int]) -> None:
        self._flat = flat
        self._starts = [0, *ends[:-1]]
        self._ends = list(ends)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Array:
        return self._flat[self._starts[index] : self._ends[index]]


class Jpegs:
    """Encoded photographs, decoded and scaled to 224 x 224 when they are read."""

    def __init__(self, files: list[bytes]) -> None:
        self._files = files

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> Array:
        from PIL import Image

        with Image.open(io.BytesIO(self._files[index])) as image:
            return np.array(image.convert("RGB").resize((224, 224)))


class PlainRecords:
    """A ``.rec`` file as a plain reader reads it: seek, read, unpack the header, read, for each record."""

    _MAGIC = struct.pack("<I", 0xCED7230A)

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "rb")  # noqa: SIM115 - it is closed with the process
        self._offsets = [int(line.split("\t")[1]) for line in path.with_suffix(".idx").read_text().splitlines()]

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        file = self._file
        file.seek(self._offsets[index])
        parts = []
        while True:
            magic, word = struct.unpack("<4sI", file.read(8))
            if magic != self._MAGIC:
                raise ValueError("no record there")
            length = word & 0x1FFFFFFF
            data = file.read(length)
            if len(data) < length:
                raise ValueError("truncated")
            if word >> 29 == 0:
                return data
            parts.append(data)
            file.read(-length % 4)
            if word >> 29 == 3:
                return self._MAGIC.join(parts)


class LoadedModules:
    """Its samples tell which modules the worker that reads them has loaded."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        return "\n".join(sys.modules)


@dataclass(frozen=True)
class Source:
    """The data of a workload, in the forms that loaders want."""

    rows: Any
    columns: Array | None = None


def images() -> Source:
    array = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, *IMAGE_SHAPE), dtype=np.uint8)
    return Source(Rows(array), array)


def large() -> Source:
    array = np.random.default_rng(1).random((256, 3, 224, 224), dtype=np.float32)
    return Source(Rows(array))


def tiny() -> Source:
    return Source(Rows(np.random.default_rng(2).random((50_000, 16), dtype=np.float32)))


def tokens() -> Source:
    rng = np.random.default_rng(3)
    ends = np.cumsum(rng.integers(5, MAX_TOKENS + 1, 20_000))
    return Source(Tokens(rng.integers(1, 50_000, ends[-1]), ends.tolist()))


def jpegs() -> Source:
    from PIL import Image

    files = []
    rng = np.random.default_rng(4)
    photographs = _photographs()
    for number in range(128):
        photograph = photographs[number % len(photographs)]
        height, width = photograph.shape[:2]
        top, left = int(rng.integers(height - 359)), int(rng.integers(width - 479))
        file = io.BytesIO()
        Image.fromarray(photograph[top : top + 360, left : left + 480]).save(file, "jpeg", quality=90)
        files.append(file.getvalue())
    return Source(Jpegs(files))


def _photographs() -> list[Array]:
    """scikit-learn's two; without it, smooth noise."""
    try:
        from sklearn.datasets import load_sample_images

        return [np.asarray(image) for image in load_sample_images().images]
    except Exception:  # not installed, or a build without its pictures: any picture will do
        from PIL import Image

        rng = np.random.default_rng(5)
        small = [Image.fromarray(rng.integers(0, 256, (27, 40, 3), dtype=np.uint8)) for _ in range(2)]
        return [np.asarray(image.resize((640, 427), Image.Resampling.BICUBIC)) for image in small]


def slow() -> Source:
    return Source(SlowRows(np.random.default_rng(6).random((10_000, 64), dtype=np.float32)))


_RECORDS_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""They go when the child ends."""


def records() -> Source:
    rng = np.random.default_rng(8)
    raw = rng.integers(0, 256, 1 << 20, dtype=np.uint8).tobytes()  # holds no magic
    _RECORDS_FOLDERS.append(tempfile.TemporaryDirectory())
    path = Path(_RECORDS_FOLDERS[-1].name) / "records.rec"
    offset, lines = 0, []
    with open(path, "wb") as file:
        lengths, begins = rng.integers(100, 501, NUM_RECORDS).tolist(), rng.integers(0, 1 << 19, NUM_RECORDS).tolist()
        for key, (length, begin) in enumerate(zip(lengths, begins, strict=True)):
            lines.append(f"{key}\t{offset}\n")
            offset += file.write(
                struct.pack("<II", 0xCED7230A, length) + raw[begin : begin + length] + bytes(-length % 4)
            )
    path.with_suffix(".idx").write_text("".join(lines))
    return Source(PlainRecords(path))


def modules() -> Source:
    return Source(LoadedModules())
