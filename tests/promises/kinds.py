"""Kinds of loaders, each with what a naive reading of its data gives: for promises that are the same for all of them.

Samples are rows: a number that says where the sample is, and one that it draws from `sample_rng`. One sample may fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.utils.data
from conftest import made, make_pool
from samples import Drawing
from stream_samples import LENGTHS, At, DrawsOwn, batches_of, part_of_torch, values

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

SIZE = 4


@dataclass(frozen=True)
class Kind:
    """A kind of loader over a kind of data.

    Attributes:
        loader: the class.
        data: makes the dataset. Its argument is called before the bad sample.
        batches: the numbers of an epoch's samples, by batches.
        bad: the index of the bad sample.
        with_error: the batches, with None in the place of the one that the bad sample is in; a generator has ended.
        skipped: the batches without the bad sample.
        options: of the loader.
    """

    loader: Callable[..., Any]
    data: Callable[[Callable[[], Any] | None], Any]
    batches: list[list[int]]
    bad: Any
    with_error: list[Any]
    skipped: list[list[int]]
    options: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        """Whether it has a pool, `close`, `peek` and so on."""
        return self.loader is ShardedDataLoader

    @contextlib.contextmanager
    def open(
        self, pool: str = "inline", fail: Callable[[], Any] | None = None, workers: int = 2, **options: Any
    ) -> Iterator[Any]:
        """A loader, which is closed in the end."""
        options = {"batch_size": SIZE, "seed": 5, **self.options, **options}
        if pool == "inline":
            options.pop("prefetch_factor", None)
        if self.is_ours:
            of_pool = {name: options.pop(name) for name in ("restarts", "timeout") if name in options}
            with made(self.data(fail), pool=make_pool(pool, workers, **of_pool), **options) as loader:
                yield loader
        else:
            if pool != "inline":
                options |= {"num_workers": workers, **({"thread_pool": True} if pool == "thread" else {})}
            if pool not in ("inline", "thread"):
                options["start_method"] = pool
            yield DataLoader(self.data(fail), **options)

    def epochs(self, count: int = 1, **options: Any) -> list[list[Any]]:
        """The rows of the first epochs, read without workers."""
        with self.open(**options) as loader:
            return [rows_of(loader) for _ in range(count)]

    def pids(self, loader: Any, iterator: Any) -> list[int]:
        return loader.pool.pids if self.is_ours else [worker.pid for worker in iterator._workers]


class Lines(torch.utils.data.IterableDataset[Any]):
    """Iterable data as torch has it, which asks torch for its part."""

    def __init__(self, parts: DrawsOwn) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        return self.parts(part_of_torch(len(LENGTHS)), len(LENGTHS))


def indexed(fail: Callable[[], Any] | None) -> Any:
    return Drawing(22, [] if fail is None else [6], fail)


def in_parts(fail: Callable[[], Any] | None) -> Any:
    return DrawsOwn(before=None if fail is None else At(fail, 3, 5))


INDEXED: dict[str, Any] = {
    "batches": (batches := [[*range(at, min(at + SIZE, 22))] for at in range(0, 22, SIZE)]),
    "bad": 6,
    "with_error": [batches[0], None, *batches[2:]],
    "skipped": [batches[0], [4, 5, 7], *batches[2:]],
    "options": {},
}
IN_PARTS: dict[str, Any] = {
    "batches": (batches := batches_of(LENGTHS, SIZE)),
    "bad": (3, 5),
    "with_error": [*batches[:4], None],
    "skipped": [*batches[:4], [304]],
    "options": {"streams": len(LENGTHS)},
}

KINDS = {
    "map": Kind(ShardedDataLoader, indexed, **INDEXED),
    "iterable": Kind(ShardedDataLoader, in_parts, **IN_PARTS),
    "drop-in over map": Kind(DataLoader, indexed, **INDEXED),
    "drop-in over iterable": Kind(DataLoader, lambda fail: Lines(in_parts(fail)), **IN_PARTS),
}
OURS = [name for name, kind in KINDS.items() if kind.is_ours]
"""The kinds that have a pool, `close`, `peek` and so on."""


def rows_of(batches: Any) -> list[Any]:
    return [values(batch) for batch in batches]


def numbers_of(batches: Any) -> list[Any]:
    """The numbers of the samples, by batches; of a row that was replaced by a number, that."""
    return [batch and [row[0] if isinstance(row, list) else row for row in batch] for batch in batches]


def until_the_end(iterator: Iterator[Any]) -> tuple[list[Any], list[Exception]]:
    """An epoch's rows, by batches, None in the place of each error; and the errors."""
    places: list[Any] = []
    errors: list[Exception] = []
    while len(errors) < 20:
        try:
            places.append(values(next(iterator)))
        except StopIteration:
            return places, errors
        except Exception as error:
            errors.append(error)
            places.append(None)
    raise AssertionError(f"the epoch does not end: {errors[-1]!r}")
