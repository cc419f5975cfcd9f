"""What is measured: datasets made from fixed seeds, and one `Workload` per table of the report.

    Workload.build() -> Source      the data, once per child process
    Source.rows                     a plain dataset: ``__getitem__(index)`` -> one sample, a NumPy array
    Source.columns                  the same samples as one array, where the workload is about columns
    order(source) -> indices        one shuffled epoch, the same in every child; loaders repeat it without end

A child that is spawned by a loader imports this module for its dataset classes, so it imports NumPy alone.
"""

from __future__ import annotations

import io
import itertools
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

IMAGE_SHAPE = (3, 32, 32)
NUM_IMAGES = 50_000
LATENCY = 0.005
LATENCY_THREADS = 16
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


@dataclass(frozen=True)
class Workload:
    """One table of the report.

    Attributes:
        name: how ``--only`` names it.
        title: what a reader sees.
        kind: ``"rate"`` (samples per second in a long epoch), ``"first"`` (seconds from making the loader to
            its first batch), ``"close"`` (seconds to break out and close), ``"import"`` (seconds of imports in
            a spawned worker), ``"memory"`` (bytes, PSS of the process tree).
        build: makes the data.
        batch_size: samples per batch.
        pool: who reads: ``"process"``, ``"thread"`` or ``"inline"``.
        workers: how many; 0 means as many as the command line says.
        start_method: of process workers.
        padded: samples are ragged and have to be padded.
        records: samples are bytes in a RecordIO file (`PlainRecords`), read by ``get_batch``, without a loader.
        shuffled: whether the epoch is; else in the order of the data.
        ceiling: letter of the bare limit that is measured beside the loaders, or None.
        check_batches: that many batches are compared between loaders, before anything is timed.
        quick: part of ``--quick``.
    """

    name: str
    title: str
    kind: str
    build: Callable[[], Source]
    batch_size: int
    pool: str = "process"
    workers: int = 0
    start_method: str = "fork"
    padded: bool = False
    records: bool = False
    shuffled: bool = True
    ceiling: str | None = None
    check_batches: int = 1
    quick: bool = False

    @property
    def higher_is_better(self) -> bool:
        """Whether the measured value is a rate."""
        return self.kind == "rate"

    @property
    def cycle(self) -> int:
        """A timed span is a multiple of this many batches: all that are read at the same time arrive together."""
        return self.workers or 4


class Repeated:
    """A sampler: the same order again and again, so that a span of any length lies in one epoch."""

    TIMES = 100_000

    def __init__(self, order: Array) -> None:
        self._order = order.tolist()

    def __iter__(self) -> Iterator[int]:
        return itertools.chain.from_iterable(itertools.repeat(self._order, self.TIMES))

    def __len__(self) -> int:
        return len(self._order) * self.TIMES


class RepeatedBatches:
    """The batches of `Repeated`, by number: index arrays."""

    def __init__(self, order: Array, batch_size: int) -> None:
        self._length = len(order)
        self._batch_size = batch_size
        copies = -(-batch_size // len(order))
        self._order = np.concatenate([order, *[order] * copies])[: len(order) + batch_size]

    def __len__(self) -> int:
        return self._length * Repeated.TIMES // self._batch_size

    def __getitem__(self, number: int) -> Array:
        start = number * self._batch_size % self._length
        return self._order[start : start + self._batch_size]


def order(length: int, shuffled: bool = True) -> Array:
    """The epoch of a dataset of that many samples."""
    return np.random.default_rng(17).permutation(length) if shuffled else np.arange(length)


def stack(samples: Sequence[Array]) -> Array:
    """A batch of equal samples, for loaders that leave it to the user."""
    return np.stack(samples)


def pad(samples: Sequence[Array]) -> Array:
    """A batch of ragged samples, padded with 0, for loaders that leave it to the user."""
    batch = np.zeros((len(samples), max(map(len, samples))), samples[0].dtype)
    for row, sample in zip(batch, samples, strict=True):
        row[: len(sample)] = sample
    return batch


# -- data -----------------------------------------------------------------------------------------------------


def _images() -> Source:
    array = np.random.default_rng(0).integers(0, 256, (NUM_IMAGES, *IMAGE_SHAPE), dtype=np.uint8)
    return Source(Rows(array), array)


def _large() -> Source:
    array = np.random.default_rng(1).random((256, 3, 224, 224), dtype=np.float32)
    return Source(Rows(array))


def _tiny() -> Source:
    return Source(Rows(np.random.default_rng(2).random((50_000, 16), dtype=np.float32)))


def _tokens() -> Source:
    rng = np.random.default_rng(3)
    ends = np.cumsum(rng.integers(5, MAX_TOKENS + 1, 20_000))
    return Source(Tokens(rng.integers(1, 50_000, ends[-1]), ends.tolist()))


def _jpegs() -> Source:
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


def _slow() -> Source:
    return Source(SlowRows(np.random.default_rng(6).random((10_000, 64), dtype=np.float32)))


_RECORDS_FOLDERS: list[tempfile.TemporaryDirectory[str]] = []
"""They go when the child ends."""


def _records() -> Source:
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


def _modules() -> Source:
    return Source(LoadedModules())


_IMAGES = "50k images 3x32x32 uint8"

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("images", f"{_IMAGES}, batch 256", "rate", _images, 256, ceiling="C", check_batches=40, quick=True),
        Workload(
            "columns", f"{_IMAGES}, columns, batch 256", "rate", _images, 256, ceiling="T", check_batches=40, quick=True
        ),
        Workload(
            "columns-inline",
            f"{_IMAGES}, columns, batch 256, inline",
            "rate",
            _images,
            256,
            pool="inline",
            ceiling="T",
            check_batches=40,
            quick=True,
        ),
        Workload(
            "large", "602 KB float32 samples, batch 64", "rate", _large, 64, ceiling="C", check_batches=3, quick=True
        ),
        Workload("tiny", "float32[16] rows, batch 16", "rate", _tiny, 16, ceiling="C", check_batches=200, quick=True),
        Workload(
            "tokens",
            "ragged int64 tokens 5..500, batch 64, padded",
            "rate",
            _tokens,
            64,
            padded=True,
            ceiling="C",
            check_batches=100,
            quick=True,
        ),
        Workload(
            "images-inline",
            f"{_IMAGES}, batch 256, inline",
            "rate",
            _images,
            256,
            pool="inline",
            ceiling="C",
            check_batches=40,
            quick=True,
        ),
        Workload(
            "tiny-inline",
            "float32[16] rows, batch 16, inline",
            "rate",
            _tiny,
            16,
            pool="inline",
            ceiling="C",
            check_batches=200,
            quick=True,
        ),
        Workload(
            "jpeg",
            "JPEG 480x360, decoded, scaled to 224x224, batch 16",
            "rate",
            _jpegs,
            16,
            ceiling="P",
            check_batches=4,
        ),
        Workload(
            "latency",
            "5 ms latency per sample, 16 threads, batch 8",
            "rate",
            _slow,
            8,
            pool="thread",
            workers=LATENCY_THREADS,
            ceiling="S",
            check_batches=16,
            quick=True,
        ),
        *[
            Workload(
                f"records{'-shuffled' if shuffled else ''}",
                f"RecordIO, 100k records of 100..500 bytes, {'shuffled' if shuffled else 'in order'}, batch 1,024",
                "rate",
                _records,
                1024,
                pool="inline",
                records=True,
                shuffled=shuffled,
                ceiling="R",
                check_batches=100,
                quick=True,
            )
            for shuffled in (False, True)
        ],
        *[
            Workload(
                f"first-{method}",
                f"first batch of a 154 MB dataset, {method}",
                "first",
                _images,
                256,
                start_method=method,
            )
            for method in ("fork", "forkserver", "spawn")
        ],
        Workload("close", "break, then close, idle workers", "close", _images, 256, quick=True),
        Workload(
            "import",
            "imports of a spawned worker",
            "import",
            _modules,
            1,
            start_method="spawn",
            ceiling="N",
            quick=True,
        ),
        Workload(
            "memory",
            f"memory (PSS of the tree), {_IMAGES}, spawn",
            "memory",
            _images,
            256,
            start_method="spawn",
            check_batches=10,
        ),
    )
}
