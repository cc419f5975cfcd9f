"""``sharded-loader bench module:dataset``: which pool, and how many workers, for the user's own dataset?

    target.find_dataset --> find_workers, for each pool --> measure --> a table, recommend
    output.cores_of_others, between two rounds --> a line, if other programs disturb the measurement

    find_workers(pool, seconds, arguments) -> how many workers ``num_workers="auto"`` has found, without a training step
    measure(dataset, rows, ...) -> a Measurement for each row: the medians of several rounds, and their spread
    recommend(measurements) -> one sentence, a pure function
    gain_of_cache(dataset, fastest row, ...) -> one sentence: what `Dataset.cache` would gain

Rounds are interleaved: every row is measured once, then every row again. So a disturbance of the machine hits all rows
alike. Each turn has a new loader. Its first batches are not counted: workers start, and fill what is prefetched. A turn
measures at least as many batches as it has workers, even if that takes longer than asked for.

`measure` owns one loader at a time and closes it. What can go wrong: the dataset raises. In the main process that ends
the measurement; with workers it ends only that row, unless every row fails.

Exit code 0; 1 if a row failed, which is said below the table; 2 if the dataset cannot be found or read.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from warnings import catch_warnings, simplefilter

import click

from sharded_loader.base.limits import cores_for_workers
from sharded_loader.base.notices import LoaderWarning
from sharded_loader.cli import output
from sharded_loader.cli.output import POOLS, CannotRun, Steps, busy_text, complain, cores_of_others
from sharded_loader.cli.target import find_dataset, find_function, kind_of, say_error

if TYPE_CHECKING:
    from sharded_loader import ShardedDataLoader


def _listed_pools(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    pools = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [pool for pool in pools if pool not in POOLS]:
        raise click.BadParameter(f"{unknown[0]!r} is not a pool: choose from {', '.join(POOLS)}")
    return pools


@click.command(short_help="Measure how fast your dataset is read.")
@click.argument("dataset", metavar="MODULE:DATASET")
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Samples per batch.")
@click.option("--collate", metavar="MODULE:FUNCTION", help="Your collate function. Default: the loader's own.")
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    help="Time for each row of the table. To find its number of workers takes five times as long.",
)
@click.option(
    "--pools",
    callback=_listed_pools,
    default="inline,thread,process",
    metavar="LIST",
    help="Who reads: inline is the main process.",
)
@click.option("--shuffle/--no-shuffle", default=None, help="Read in random order. Default: random if possible.")
@output.json_option
@output.quiet_option
def bench(
    dataset: str,
    batch_size: int,
    collate: str | None,
    seconds: float,
    pools: list[str],
    shuffle: bool | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure how fast your dataset is read: inline, by threads and by processes.

    ``num_workers="auto"`` finds how many workers are measured.

    MODULE:DATASET is an object in a module, or path/to/file.py:DATASET. DATASET is a dataset, or a function that takes
    no arguments and returns one. Datasets with only __iter__ work too.
    """
    from sharded_loader.data.inspection import is_stream

    data = find_dataset(dataset)
    batchify_fn = None if collate is None else find_function(collate)
    if is_stream(data) and shuffle:
        raise CannotRun(f"{dataset} has only __iter__ and comes in its own order: leave out --shuffle")
    shuffle = not is_stream(data) if shuffle is None else shuffle
    asked: dict[str, Any] = {
        "dataset": dataset,
        "kind": kind_of(data),
        "batch_size": batch_size,
        "shuffle": shuffle,
        "seconds": seconds,
    }
    if not quiet and not as_json:
        order = "random order" if shuffle else "the dataset's own order"
        click.echo(f"{dataset}: {asked['kind']}, in {order}; batches of {batch_size}.")
    others: list[float] = []
    arguments = {"dataset": data, "batch_size": batch_size, "shuffle": shuffle, "batchify_fn": batchify_fn}

    def on_turn(number: int, row: Row) -> None:
        if number % len(rows) == 0:  # between two rounds, when this program does nothing
            others.append(cores_of_others())
        steps.update(number, str(row))

    try:
        with Steps("finding the number of workers", len(pools), quiet) as steps:
            rows = []
            for number, pool in enumerate(sorted(pools, key=lambda pool: pool != "inline")):
                steps.update(number, pool)
                rows.append(Row(pool, find_workers(pool, ROUNDS * seconds, arguments)))
        with Steps("measuring", ROUNDS * len(rows), quiet) as steps:
            measured = measure(rows, seconds, arguments, on_turn)
    except DatasetFailed as error:
        raise CannotRun(f"reading {dataset} failed: {error}") from None
    recommendation, cores_used = recommend(measured), statistics.median(others)
    fastest = max(measured, key=lambda row: row.samples_per_second)
    cached = "" if is_stream(data) else gain_of_cache(fastest, seconds / ROUNDS, arguments)
    if as_json:
        cells = [dataclasses.asdict(row) | {"times_inline": times_inline(row, measured)} for row in measured]
        result = {"rounds": ROUNDS, "cores_of_others": cores_used, "rows": cells, "recommendation": recommendation}
        result["cache"] = cached
        output.show_json(asked | result)
    else:
        _show(measured, cores_used)
        click.echo(recommendation)
        if cached:
            click.echo(cached)
    failed = [row for row in measured if row.error is not None]
    for row in failed:
        complain(f"{row.pool} with {row.workers} workers failed: {row.error}")
    return int(bool(failed))


def times_inline(row: Measurement, measured: list[Measurement]) -> float | None:
    """How many times as fast as inline; None if one of the two was not measured.

    Example:
        >>> inline, workers = Measurement("inline", 0, 100.0, 1.0), Measurement("process", 2, 150.0, 0.7)
        >>> times_inline(workers, [inline, workers]), times_inline(workers, [workers])
        (1.5, None)
    """
    inline = [other.samples_per_second for other in measured if other.pool == "inline"]
    return row.samples_per_second / inline[0] if inline and row.error is None else None


def _show(measured: list[Measurement], others: float) -> None:
    cells = []
    for row in measured:
        times = times_inline(row, measured)
        shown = [f"{row.samples_per_second:,.0f}", ms_text(row.ms_per_batch), f"±{row.spread:.0%}"]
        shown = ["failed", "-", "-"] if row.error else shown
        cells.append([row.pool, str(row.workers), *shown, "-" if times is None else f"{times:.2f}"])
    output.show_table(["pool", "workers", "samples/s", "ms per batch", "spread", "x inline"], cells)
    if (busy := busy_text(others, os.cpu_count() or 1, cores_for_workers())) is not None:
        click.echo(f"{busy} The figures are lower than on a quiet machine, and vary more.")


# -- the measurement, without a terminal -------------------------------------------------------------------------------


ROUNDS = 5
"""Of three rounds on a busy machine, the median is often a disturbed one."""

WORTH = 1.2
"""Workers are worth their memory if they read this many times as fast as the main process."""

_ARGUMENTS = {"process": "", "thread": ", thread_pool=True", "ray": ', pool="ray"'}


@dataclass(frozen=True)
class Row:
    """What is measured: a pool (``inline``, ``thread``, ``process`` or ``ray``) and its number of workers."""

    pool: str
    workers: int

    def __str__(self) -> str:
        return "inline" if self.pool == "inline" else f"{self.workers} x {self.pool}"


@dataclass(frozen=True)
class Measurement(Row):
    """How fast a row was.

    Attributes:
        samples_per_second: the median over the rounds; 0 if the row failed.
        ms_per_batch: milliseconds from one batch to the next, the median over the rounds.
        error: why the row failed; None if it did not.
        lowest, highest: samples per second of the slowest and of the fastest round.

    Example:
        >>> Measurement("inline", 0, 100.0, lowest=90.0, highest=120.0).spread
        0.15
    """

    samples_per_second: float = 0.0
    ms_per_batch: float = 0.0
    error: str | None = None
    lowest: float = 0.0
    highest: float = 0.0

    @property
    def spread(self) -> float:
        """Half the way from the slowest to the fastest round, as a share of the median."""
        return (self.highest - self.lowest) / 2 / self.samples_per_second if self.samples_per_second else 0.0


class DatasetFailed(Exception):
    """The dataset raised in the main process or in every row; the message says what and at which sample."""


def find_workers(pool: str, seconds: float, arguments: dict[str, Any]) -> int:
    """How many workers ``num_workers="auto"`` has found after some seconds, in a loader with these arguments.

    If they cannot read the dataset, it is the number to begin with: then `measure` says why. On a cluster of Ray it is
    the number of cores here.
    """
    from sharded_loader import ShardedDataLoader
    from sharded_loader.instruments.auto import START

    if pool in ("inline", "ray"):
        return cores_for_workers() * (pool == "ray")
    kind: Any = pool
    with suppress(Exception), ShardedDataLoader(num_workers="auto", pool=kind, seed=0, **arguments) as loader:
        began = time.perf_counter()
        for _ in _without_end(loader):
            if time.perf_counter() - began >= seconds:
                return loader.num_workers
    return START


def measure(
    rows: Sequence[Row],
    seconds: float,
    arguments: dict[str, Any],
    on_turn: Callable[[int, Row], object] = lambda number, row: None,
) -> list[Measurement]:
    """Measure every row in several rounds.

    Args:
        rows: inline first.
        seconds: for each row, all rounds together, without what is not counted.
        arguments: of the loader, without its workers.
        on_turn: called before each turn with its number, from 0, and its row.

    Returns:
        A measurement for each row, in their order.

    Raises:
        DatasetFailed: the dataset raised in the main process or in every row, or it has no samples.
    """
    turns: dict[Row, list[tuple[float, float]]] = {row: [] for row in rows}
    errors: dict[Row, str] = {}
    for number in range(ROUNDS * len(rows)):
        row = rows[number % len(rows)]
        on_turn(number, row)
        if row in errors:
            continue
        try:
            turns[row].append(_turn(row, seconds / ROUNDS, arguments))
        except DatasetFailed:
            raise
        except Exception as error:
            errors[row] = say_error(error)
            if row.pool == "inline" or len(errors) == len(rows):
                raise DatasetFailed(errors[row]) from error
    return [_summed_up(row, turns[row], errors.get(row)) for row in rows]


def _summed_up(row: Row, turns: list[tuple[float, float]], error: str | None) -> Measurement:
    if error is not None:
        return Measurement(row.pool, row.workers, error=error)
    speeds, times = zip(*turns, strict=True)
    middle = statistics.median(speeds), statistics.median(times)
    return Measurement(row.pool, row.workers, *middle, lowest=min(speeds), highest=max(speeds))


def _turn(row: Row, seconds: float, arguments: dict[str, Any]) -> tuple[float, float]:
    """Samples per second and milliseconds per batch, of a loader with these arguments."""
    with _loader_of(row, arguments) as loader:
        batches = _without_end(loader)
        for _ in range(1 + 2 * row.workers):
            next(batches)
        before, begin, count = loader.stats().samples, time.perf_counter(), 0
        while count < max(2, row.workers) or time.perf_counter() - begin < seconds:
            next(batches)
            count += 1
        took = time.perf_counter() - begin
        return (loader.stats().samples - before) / took, 1000 * took / count


def _loader_of(row: Row, arguments: dict[str, Any]) -> ShardedDataLoader[Any]:
    from sharded_loader import ShardedDataLoader

    pool: Any = row.pool
    with catch_warnings():
        simplefilter("ignore", LoaderWarning)  # about more workers than cores: these were found to be the fastest
        return ShardedDataLoader(num_workers=row.workers, pool=pool, seed=0, **arguments)


def _without_end(loader: Any) -> Iterator[Any]:
    """The batches of one epoch after the other."""
    why = "it gives no samples: give a dataset that has some"
    while True:
        batch = None
        for batch in loader:
            yield batch
        if batch is None:
            raise DatasetFailed(why)
        why = "it gives its samples only once: return a new iterator from __iter__"


def gain_of_cache(fastest: Measurement, seconds: float, arguments: dict[str, Any]) -> str:
    """What a cache of the samples would gain, in one sentence. It is tried with as many samples as are read in time.

    Args:
        fastest: the row whose pool reads.
        seconds: how long samples are read that are not cached, and then samples that are.
        arguments: of the loader, without its workers. Samples are read by index.
    """
    from sharded_loader import SimpleDataset
    from sharded_loader.caching.dataset import StoredDataset

    dataset = arguments["dataset"]
    count = min(len(dataset), max(arguments["batch_size"], int(seconds * fastest.samples_per_second)))
    try:
        part = StoredDataset(SimpleDataset(dataset).take(count), "50%")
        arguments = arguments | {"dataset": part, "shuffle": True}
        with _loader_of(fastest, arguments) as loader:
            for _ in loader:
                pass
        times = _turn(fastest, seconds, arguments)[0] / fastest.samples_per_second
    except Exception as error:  # without a cache, the same samples were read
        return f"A cache cannot keep the samples: {say_error(error)}"
    if times < WORTH:
        return f"A cache of the samples gains nothing: later epochs are {times:.2f} times as fast."
    nbytes = part.counts[2] / max(1, part.cached) * len(dataset)
    return (
        f"With dataset.cache(...), epochs after the first are {times:.1f} times as fast; all samples take "
        f"{output.size_text(nbytes)}."
    )


def recommend(measurements: Sequence[Measurement]) -> str:
    """Which arguments to give to the loader, in one sentence.

    Args:
        measurements: one of each pool, with as many workers as ``"auto"`` has found. Those that failed are ignored.

    Returns:
        The sentence. It names no arguments if the rounds of two rows overlap that lead to other arguments.

    Example:
        >>> recommend([Measurement("inline", 0, 1000, 64.0), Measurement("process", 2, 1100, 58.2)])
        'Inline is enough, so leave out num_workers: with workers it is at best 1.10 times as fast.'
    """
    good = [row for row in measurements if row.error is None]
    inline = next((row for row in good if row.pool == "inline"), None)
    inline_ms = "" if inline is None else f"{ms_text(inline.ms_per_batch)} ms"
    if inline is not None and len(good) == 1:
        return f"Only inline was measured, {inline_ms} per batch: add --pools inline,thread,process to compare."
    chosen = max(good, key=lambda row: row.samples_per_second)
    if inline is not None and chosen.samples_per_second < WORTH * inline.samples_per_second:
        chosen = inline
    if unclear := [row for row in good if row is not chosen and _may_be_faster(row, chosen)]:
        return (
            f"No clear winner: the rounds of {_arguments(chosen)} and {_arguments(unclear[0])} overlap. "
            "Stop other programs and measure again, or measure for longer, such as --seconds 20."
        )
    arguments = _arguments(chosen)
    if inline is None:
        return f"Use {arguments}: no other pool that was measured is faster."
    if chosen is inline:
        times = max(row.samples_per_second for row in good if row is not inline) / inline.samples_per_second
        return f"Inline is enough, so leave out num_workers: with workers it is at best {times:.2f} times as fast."
    times = chosen.samples_per_second / inline.samples_per_second
    then = f"inline is enough if your training step takes far longer than {inline_ms}."
    return f"Use {arguments}: {times:.1f} times as fast as inline; {then}"


def _may_be_faster(other: Measurement, chosen: Measurement) -> bool:
    """Whether the medians differ enough to matter, and the rounds too much to tell which row is faster."""
    low, high = sorted([other, chosen], key=lambda row: row.samples_per_second)
    return high.samples_per_second >= WORTH * low.samples_per_second and low.highest > high.lowest


def _arguments(row: Measurement) -> str:
    return "inline" if row.pool == "inline" else f"num_workers={row.workers}{_ARGUMENTS[row.pool]}"


def ms_text(ms: float) -> str:
    """Milliseconds with three digits.

    Example:
        >>> ms_text(0.01234), ms_text(12.345), ms_text(1234.5)
        ('0.0123', '12.3', '1,234')
    """
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"
