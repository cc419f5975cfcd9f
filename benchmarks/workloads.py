"""What is measured: one `Workload` per table of the report, and the order of the samples.

WORKLOADS[name].build() -> Source       the data, once per child process
order(length) -> indices                one shuffled epoch, the same in every child process
epochs_of(order, samples) -> list       the order again and again, in one list: every loader reads this list
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks import samples
from benchmarks.samples import Array, Source

LATENCY_THREADS = 16

MOST_SAMPLES = 12_000_000
"""Entries of the longest list of indices: 96 MB. Repeated entries share the integers."""


@dataclass(frozen=True)
class Workload:
    """One table of the report.

    Attributes:
        name: how ``--only`` names it.
        title: what a reader sees.
        kind: ``"rate"`` (samples per second in a long epoch), ``"first"`` (seconds from making the loader to
            its first batch), ``"close"`` (seconds to break out and close), ``"import"`` (seconds of imports in
            a spawned worker), ``"memory"`` (bytes, PSS of the process tree), ``"gap"`` (the time of the first
            batches of an epoch, divided by the mean time of as many batches: see `benchmarks.child.gap_of`).
        build: makes the data.
        batch_size: samples per batch.
        pool: who reads: ``"process"``, ``"thread"`` or ``"inline"``.
        workers: how many; 0 means as many as the command line says.
        start_method: of process workers.
        padded: samples are ragged and have to be padded.
        records: samples are bytes in a RecordIO file (`PlainRecords`), read by ``get_batch``, without a loader.
        iterable: the dataset is an ``IterableDataset`` (`benchmarks.plans.blocks_of`).
        shuffled: whether the epoch is; else in the order of the data.
        ceilings: letters of the bare limits that are measured beside the loaders. Samples are compared with those
            that the first limit read.
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
    iterable: bool = False
    shuffled: bool = True
    ceilings: tuple[str, ...] = ()
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
    """A sampler without end: the same order again and again, in as little memory as one epoch."""

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


def epochs_of(order: Array, count: int) -> list[int]:
    """The order again and again, as a plain list.

    Args:
        order: the indices of one epoch.
        count: how many samples the list must have at least. The list has whole epochs, and at least one.

    Returns:
        The list. It has at most `MOST_SAMPLES` entries, or one epoch if an epoch is longer.
    """
    most = max(1, MOST_SAMPLES // len(order))
    result: list[int] = order.tolist() * min(most, -(-count // len(order)) or 1)
    return result


def order(length: int, shuffled: bool = True) -> Array:
    """The epoch of a dataset of that many samples."""
    return np.random.default_rng(17).permutation(length) if shuffled else np.arange(length)


def stack(rows: Sequence[Array]) -> Array:
    """A batch of equal samples, for loaders that leave it to the user."""
    return np.stack(rows)


def pad(rows: Sequence[Array]) -> Array:
    """A batch of ragged samples, padded with 0, for loaders that leave it to the user."""
    batch = np.zeros((len(rows), max(map(len, rows))), rows[0].dtype)
    for place, row in zip(batch, rows, strict=True):
        place[: len(row)] = row
    return batch


_IMAGES = "50k images 3x32x32 uint8"

_SHAPED = (
    Workload(
        "images",
        f"{_IMAGES}, batch 256",
        "rate",
        samples.images,
        256,
        ceilings=("C", "J"),
        check_batches=40,
        quick=True,
    ),
    Workload(
        "columns",
        f"{_IMAGES}, columns, batch 256",
        "rate",
        samples.images,
        256,
        ceilings=("T",),
        check_batches=40,
        quick=True,
    ),
    Workload(
        "large",
        "602 KB float32 samples, batch 64",
        "rate",
        samples.large,
        64,
        ceilings=("C", "D"),
        check_batches=3,
        quick=True,
    ),
    Workload(
        "tiny",
        "float32[16] rows, batch 16",
        "rate",
        samples.tiny,
        16,
        ceilings=("C", "J"),
        check_batches=200,
        quick=True,
    ),
    Workload(
        "tokens",
        "ragged int64 tokens 5..500, batch 64, padded",
        "rate",
        samples.tokens,
        64,
        padded=True,
        ceilings=("C",),
        check_batches=100,
        quick=True,
    ),
)
"""What the samples look like decides, not how long it takes to read them."""


def _inline(workload: Workload, ceilings: tuple[str, ...]) -> Workload:
    """The same work without worker processes."""
    return replace(
        workload,
        name=f"{workload.name}-inline",
        title=f"{workload.title}, inline",
        pool="inline",
        ceilings=ceilings,
    )


_BY_NAME = {workload.name: workload for workload in _SHAPED}

WORKLOADS = {
    workload.name: workload
    for workload in (
        *_SHAPED,
        Workload(
            "iterable",
            f"{_IMAGES} as an IterableDataset, batch 256",
            "rate",
            samples.images,
            256,
            iterable=True,
            shuffled=False,
            ceilings=("C",),
            check_batches=40,
            quick=True,
        ),
        _inline(_BY_NAME["images"], ("C", "J")),
        _inline(_BY_NAME["columns"], ("T",)),
        _inline(_BY_NAME["tiny"], ("C", "J")),
        _inline(_BY_NAME["large"], ("C",)),
        Workload(
            "jpeg",
            "JPEG 480x360, decoded, scaled to 224x224, batch 16",
            "rate",
            samples.jpegs,
            16,
            ceilings=("P",),
            check_batches=4,
        ),
        Workload(
            "latency",
            "5 ms latency per sample, 16 threads, batch 8",
            "rate",
            samples.slow,
            8,
            pool="thread",
            workers=LATENCY_THREADS,
            ceilings=("S",),
            check_batches=16,
            quick=True,
        ),
        *[
            Workload(
                f"records{'-shuffled' if shuffled else ''}",
                f"RecordIO, 100k records of 100..500 bytes, {'shuffled' if shuffled else 'in order'}, batch 1,024",
                "rate",
                samples.records,
                1024,
                pool="inline",
                records=True,
                shuffled=shuffled,
                ceilings=("R",),
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
                samples.images,
                256,
                start_method=method,
            )
            for method in ("fork", "forkserver", "spawn")
        ],
        Workload("gap", "from one epoch to the next, 128 JPEGs, batch 16", "gap", samples.jpegs, 16, check_batches=8),
        Workload("close", "break, then close, idle workers", "close", samples.images, 256, quick=True),
        Workload(
            "import",
            "imports of a spawned worker",
            "import",
            samples.modules,
            1,
            start_method="spawn",
            ceilings=("N",),
            quick=True,
        ),
        Workload(
            "memory",
            f"memory (PSS of the tree), {_IMAGES}, spawn",
            "memory",
            samples.images,
            256,
            start_method="spawn",
            check_batches=10,
        ),
    )
}
