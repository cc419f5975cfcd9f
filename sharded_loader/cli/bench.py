"""``sharded-loader bench module:dataset``: measure which pool, and how many workers, suit the user's dataset.

    find_dataset --> measure, for each pool --> a table, recommend

The dataset is named as ``module:dataset`` or ``path/to/file.py:dataset``. The module is imported under its own name, so
that spawned workers find its classes; its folder stays first in ``sys.path``. An error of the module, or of the
function that makes the dataset, keeps its traceback, which shows the user's line.

A row is measured in rounds once ``num_workers="auto"`` has settled, so workers have started and prefetched. A round has
at least as many batches as there are workers, even if that takes longer. `measure` owns one loader and closes it.

An error of the dataset ends the measurement in the main process, but with workers only that row, unless all rows fail.
Exit code 1: a row failed, as said below the table; 2: the dataset cannot be found or read.
"""

from __future__ import annotations

import importlib
import math
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import catch_warnings, simplefilter

import click

from sharded_loader import LoaderWarning
from sharded_loader.cli import output
from sharded_loader.cli.output import CannotRun, Steps, ms_text, say_error
from sharded_loader.extend.tools import cores_for_workers

ROUNDS = 5
"""Of only three rounds on a busy machine, the median is often a disturbed one."""

WORTH = 1.2
"""Workers are worth their memory if they read this many times as fast as the main process."""

POOLS = {"inline": "", "process": "", "thread": ", thread_pool=True", "ray": ', pool="ray"'}
"""Loader arguments that choose a pool, besides ``num_workers``."""


@click.command(short_help="Measure how fast your dataset is read.")
@click.argument("dataset", metavar="MODULE:DATASET")
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Samples per batch.")
@click.option("--collate", metavar="MODULE:FUNCTION", help="Your collate function. Default: the loader's own.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, help="Time for a row of the table.")
@click.option("--pools", default="inline,thread,process", metavar="LIST", help="inline is the main process.")
@click.option("--shuffle/--no-shuffle", default=None, help="Read in random order. Default: random if possible.")
@output.quiet_option
def bench(dataset: str, collate: str | None, pools: str, quiet: bool, **options: Any) -> int:
    """Measure how fast your dataset is read: inline, by threads and by processes.

    ``num_workers="auto"`` finds how many workers are measured: this takes five times as long as the row itself.

    MODULE:DATASET is an object in a module, or path/to/file.py:DATASET. DATASET is a dataset, or a function that takes
    no arguments and returns one. Datasets with only __iter__ work too.
    """
    from sharded_loader.extend.data import is_stream
    from sharded_loader.instruments.page import table

    listed = sorted(dict.fromkeys(pools.split(",")), key="inline".__ne__)
    if unknown := {*listed} - {*POOLS}:
        raise CannotRun(f"{min(unknown)!r} is not a pool: choose from {', '.join(POOLS)}")
    data, seconds = find_dataset(dataset), options.pop("seconds")
    if is_stream(data) and options["shuffle"]:
        raise CannotRun(f"{dataset} has only __iter__ and comes in its own order: leave out --shuffle")
    if options["shuffle"] is None:
        options["shuffle"] = not is_stream(data)
    options |= {"dataset": data, "batchify_fn": None if collate is None else find_function(collate)}
    if not quiet:
        order = "random order" if options["shuffle"] else "the dataset's own order"
        kind = f"{type(data).__name__}, {'iterable data' if is_stream(data) else f'{len(data):,} samples'}"
        click.echo(f"{dataset}: {kind}, in {order}; batches of {options['batch_size']}.")
    steps = Steps("measuring", len(listed), quiet)
    rows = [measure(pool, seconds, options, partial(steps.update, done, pool)) for done, pool in enumerate(listed)]
    if all(row.error for row in rows):
        raise CannotRun(f"reading the dataset failed: {rows[0].error}")
    inline = rows[0].samples_per_second if rows[0].pool == "inline" else None
    cells = [[row.pool, str(row.workers), *_cells_of(row, inline)] for row in rows]
    click.echo("\n".join(table(["pool", "workers", "samples/s", "ms per batch", "spread", "x inline"], cells)))
    click.echo(recommend(rows))
    for row in rows:
        if row.error is not None:
            output.complain(f"{row.pool} with {row.workers} workers failed: {row.error}")
    return int(any(row.error for row in rows))


def _cells_of(row: Row, inline: float | None) -> list[str]:
    if row.error is not None:
        return ["failed", "-", "-", "-"]
    times = f"{row.samples_per_second / inline:.2f}" if inline else "-"
    spread = (row.highest - row.lowest) / 2 / row.samples_per_second  # half the way between the extremes
    return [f"{row.samples_per_second:,.0f}", ms_text(row.ms_per_batch), f"±{spread:.0%}", times]


# -- the measurement, without a terminal -------------------------------------------------------------------------------


@dataclass
class Row:
    """Speed of a pool (``inline``, ``thread``, ``process`` or ``ray``) with its number of workers.

    Speeds are medians over the rounds, 0 if the row failed with ``error``; ``lowest`` and ``highest`` are samples per
    second of the slowest and fastest round.
    """

    pool: str
    workers: int = 0
    samples_per_second: float = 0.0
    ms_per_batch: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    error: str | None = None

    @property
    def arguments(self) -> str:
        """Arguments of a loader that reads like this."""
        return "inline" if self.pool == "inline" else f"num_workers={self.workers}{POOLS[self.pool]}"


def measure(
    pool: Any, seconds: float, arguments: Mapping[str, Any], on_turn: Callable[[], object] = lambda: None
) -> Row:
    """Find the number of workers of a pool (with Ray, the number of cores here), and measure how fast it reads.

    Args:
        pool: its name.
        seconds: time of all rounds together. Finding the number takes five times as long.
        arguments: of the loader, without its workers.
        on_turn: called now and then.

    Raises:
        CannotRun: the dataset raised in the main process, or has no samples.
    """
    from sharded_loader import ShardedDataLoader

    row, turns, finds = Row(pool), list[tuple[float, float]](), pool in ("thread", "process")
    workers: Any = "auto" if finds else cores_for_workers() * (pool == "ray")
    try:
        with catch_warnings():
            simplefilter("ignore", LoaderWarning)  # about more workers than cores: they may be the fastest
            loader = ShardedDataLoader(num_workers=workers, pool=pool, seed=0, **arguments)
        with loader:
            row.workers, batches = loader.num_workers, _without_end(loader)
            for _ in range(1 + 2 * row.workers):
                next(batches)
            until = time.perf_counter() + ROUNDS * seconds * finds
            while time.perf_counter() < until:
                next(batches)
                on_turn()
            loader._meter.tune_at, row.workers = math.inf, loader.num_workers  # that number stays
            for _ in range(ROUNDS):
                on_turn()
                before, began, count = loader.stats().samples, time.perf_counter(), 0
                while count < max(2, row.workers) or time.perf_counter() - began < seconds / ROUNDS:
                    next(batches)
                    count += 1
                took = time.perf_counter() - began
                turns.append(((loader.stats().samples - before) / took, 1000 * took / count))
    except CannotRun:
        raise
    except Exception as error:
        row.error = say_error(error)
        if pool == "inline":
            raise CannotRun(f"reading the dataset failed: {row.error}") from None
        return row
    speeds, times = zip(*turns, strict=True)
    row.samples_per_second, row.ms_per_batch = statistics.median(speeds), statistics.median(times)
    row.lowest, row.highest = min(speeds), max(speeds)
    return row


def _without_end(loader: Iterable[object]) -> Iterator[object]:
    """Yield the batches of one epoch after another."""
    why = "it gives no samples: give a dataset that has some"
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise CannotRun(f"reading the dataset failed: {why}")
        why = "it gives its samples only once: return a new iterator from __iter__"


def recommend(rows: list[Row]) -> str:
    """Recommend loader arguments, in one sentence; none if overlapping rounds leave the choice open. Skips failed rows.

    Example:
        >>> recommend([Row("inline", 0, 1000, 64.0), Row("process", 2, 1100, 58.2)])
        'Inline is enough, so leave out num_workers: with workers it is at best 1.10 times as fast.'
    """
    good = sorted((row for row in rows if row.error is None), key=lambda row: -row.samples_per_second)
    inline, chosen = next((row for row in good if row.pool == "inline"), None), good[0]
    if inline is not None and len(good) == 1:
        ms = ms_text(inline.ms_per_batch)
        return f"Only inline was measured, {ms} ms per batch: add --pools inline,thread,process to compare."
    if inline is not None and chosen.samples_per_second < WORTH * inline.samples_per_second:
        chosen = inline
    for row in good:  # the medians differ enough to matter, and the rounds too much to tell which row is faster
        low, high = sorted([row, chosen], key=lambda row: row.samples_per_second)
        if high.samples_per_second >= WORTH * low.samples_per_second and low.highest > high.lowest:
            return (
                f"No clear winner: the rounds of {chosen.arguments} and {row.arguments} overlap. "
                "Stop other programs and measure again, or measure for longer, such as --seconds 20."
            )
    if inline is None:
        return f"Use {chosen.arguments}: no other pool that was measured is faster."
    times = max(row.samples_per_second for row in good if row is not inline) / inline.samples_per_second
    if chosen is inline:
        return f"Inline is enough, so leave out num_workers: with workers it is at best {times:.2f} times as fast."
    then = f"inline is enough if your training step takes far longer than {ms_text(inline.ms_per_batch)} ms."
    return f"Use {chosen.arguments}: {times:.1f} times as fast as inline; {then}"


# -- the dataset, by its name ------------------------------------------------------------------------------------------


def find_dataset(target: str) -> Any:
    """Import the user's dataset. Raises CannotRun if it does not exist or cannot be read, and any error of its module.

    After the colon of ``target`` stands a dataset, or a callable without arguments that makes one. The name may have
    dots.

    Example:
        >>> find_dataset("keyword:kwlist")[:2]
        ['False', 'None']
    """
    from sharded_loader.extend.data import has_own, is_stream, takes_two
    from sharded_loader.extend.engine import dataset_given

    data = _find(target, "dataset")
    is_class = isinstance(data, type)
    is_dataset = not is_class and any(has_own(type(data), name) for name in ("__getitem__", "__iter__"))
    if callable(data) and not is_dataset and (is_class or not takes_two(data)):  # two: it gives a part of iterable data
        made = data()
        data = data if isinstance(made, Iterator) and not is_class else made  # a generator function is iterable data
    try:
        data = dataset_given(data)
        is_empty = not is_stream(data) and len(data) == 0
    except Exception as error:
        why = say_error(error).partition(": ")[2] or say_error(error)
        raise CannotRun(f"{target} is not a dataset: {why}") from None
    if is_empty:
        raise CannotRun(f"{target} is empty: its length is 0. Give a dataset with samples")
    return data


def find_function(target: str) -> Callable[..., Any]:
    """Import the user's function, named as in `find_dataset`. Raises CannotRun if it does not exist.

    Example:
        >>> find_function("operator:add")(1, 2)
        3
    """
    named = _find(target, "function")
    if not callable(named):
        from sharded_loader.extend.tools import an  # imports NumPy, which --help does not wait for

        raise CannotRun(f"{target} is {an(type(named))}, not a function: name a function")
    return named  # type: ignore[no-any-return]


def _find(target: str, what: str) -> Any:
    module_name, _, name = target.rpartition(":")
    if not module_name or not name or name.endswith(".py"):
        raise CannotRun(f"{target!r} does not name a {what}: write module:NAME or path/to/file.py:NAME")
    module = _import(module_name)
    try:
        return operator.attrgetter(name)(module)
    except AttributeError as error:
        raise CannotRun(f"{module_name} has no {error.name!r}: look for the name in the file") from None


def _import(where: str) -> ModuleType:
    """Import a module by its name or its file."""
    name, folder, path = where, os.getcwd(), Path(where)
    if where.endswith(".py"):
        if not path.is_file():
            raise CannotRun(f"there is no file {path}: write the path of a Python file, from {folder}")
        path = path.resolve()
        name, folder = path.stem, str(path.parent)
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
            raise CannotRun(f"{path}: {name!r} is also the name of a module that Python has imported: rename the file")
    sys.path.insert(0, folder)  # as `python` and `python -m` have it
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # neither the module nor a package that contains it
            raise
        text = f"there is no module {error.name!r} in {folder} or among the installed ones"
        raise CannotRun(f"{text}: change to the folder that contains it, or write path/to/file.py:NAME") from None
