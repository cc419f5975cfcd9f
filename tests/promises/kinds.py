"""Kinds of loaders, each with what a naive reading of its data gives: for promises that are the same for all of them.

Samples are rows: a number that says where the sample is, and one that it draws from `sample_rng`. One sample may fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch.utils.data
from conftest import made, make_pool
from samples import Drawing
from stream_samples import (
    LENGTHS,
    At,
    DrawsOwn,
    GoOn,
    ItsOwnIterator,
    Own,
    Parts,
    Stateful,
    Told,
    WithStatefulRows,
    batches_of,
    part_of_torch,
    values,
)

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

SIZE = 4


@dataclass(frozen=True)
class Kind:
    """A kind of loader over a kind of data.

    Attributes:
        loader: the class.
        data: makes the dataset; its arguments are what is called before the bad sample, and the bad sample's index.
        batches: the numbers of an epoch's samples, by batches.
        bads: indices of samples that may be the bad one: in the middle, at the end, at a beginning.
        options: of the loader.
        bad: the index of the bad sample.
    """

    loader: Callable[..., Any]
    data: Callable[[Callable[[], Any] | None, Any], Any]
    batches: list[list[int]]
    bads: tuple[Any, Any, Any]
    options: dict[str, Any]
    bad: Any

    def at(self, number: int) -> Kind:
        """The same with another bad sample."""
        return replace(self, bad=self.bads[number])

    @property
    def with_error(self) -> list[Any]:
        """The batches, with None in the place of the one that the bad sample is in; a generator has ended."""
        bad = self.bad if isinstance(self.bad, int) else 100 * self.bad[0] + self.bad[1]
        ended = range(bad + 1, bad + (100 if "streams" in self.options else 0))
        return [None if bad in batch else batch for batch in self.batches if batch[0] not in ended]

    @property
    def skipped(self) -> list[list[int]]:
        """The batches without the bad sample."""
        left = self.with_error
        at = left.index(None)
        goes_on = isinstance(self.bad, int)
        bad = self.bad if goes_on else 100 * self.bad[0] + self.bad[1]
        (batch,) = (batch for batch in self.batches if bad in batch)
        return [*left[:at], [one for one in batch if one < bad or (goes_on and one > bad)], *left[at + 1 :]]

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
            with made(self.data(fail, self.bad), pool=make_pool(pool, workers, **of_pool), **options) as loader:
                yield loader
        else:
            if pool != "inline":
                options |= {"num_workers": workers, **({"thread_pool": True} if pool == "thread" else {})}
            if pool == "ray":
                pytest.skip("the drop-in reads on this machine")
            if pool not in ("inline", "thread"):
                options["start_method"] = pool
            yield DataLoader(self.data(fail, self.bad), **options)

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


def indexed(fail: Callable[[], Any] | None, bad: int) -> Any:
    return Drawing(22, [] if fail is None else [bad], fail)


def in_parts(fail: Callable[[], Any] | None, bad: tuple[int, int]) -> Any:
    return DrawsOwn(before=None if fail is None else At(fail, *bad))


INDEXED = ([[*range(at, min(at + SIZE, 22))] for at in range(0, 22, SIZE)], (6, 21, 0), {}, 6)
IN_PARTS = (batches_of(LENGTHS, SIZE), ((3, 5), (0, 6), (3, 1)), {"streams": len(LENGTHS)}, (3, 5))

KINDS = {
    "map": Kind(ShardedDataLoader, indexed, *INDEXED),
    "iterable": Kind(ShardedDataLoader, in_parts, *IN_PARTS),
    "drop-in over map": Kind(DataLoader, indexed, *INDEXED),
    "drop-in over iterable": Kind(DataLoader, lambda *bad: Lines(in_parts(*bad)), *IN_PARTS),
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


WITHOUT_STATE = (Parts, GoOn, Own, Told, ItsOwnIterator)
WITH_STATE = (WithStatefulRows, Stateful)
STREAMS = (*WITHOUT_STATE, *WITH_STATE)


def loader_of(dataset: Any, pool: Any = "inline", workers: int = 2, **options: Any) -> ShardedDataLoader:
    """A loader of batches of `SIZE` samples. ``pool`` is a pool or the name of one."""
    pool = make_pool(pool, workers) if isinstance(pool, str) else pool
    options = {"streams": len(LENGTHS), "seed": 5, **options}
    return made(dataset, options.pop("batch_size", SIZE), pool=pool, **options)


def epochs_of(dataset: Any, *given: Any, epochs: int = 1, **options: Any) -> list[list[Any]]:
    """The batches of the first epochs, as lists."""
    with loader_of(dataset, *given, **options) as loader:
        return [[values(batch) for batch in loader] for _ in range(epochs)]
