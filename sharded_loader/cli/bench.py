"""``sharded-loader bench module:dataset``: which pool, and how many workers, for the user's own dataset?

    target.find_dataset --> measure.measure --> a table, measure.recommend
    facts.cores_of_others, between two rounds --> a line, if other programs disturb the measurement

Exit code 0; 1 if a row failed, which is said below the table; 2 if the dataset cannot be found or read.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
from typing import Any

import click

from sharded_loader.base.limits import cores_for_workers
from sharded_loader.cli import output
from sharded_loader.cli.facts import busy_text, cores_of_others
from sharded_loader.cli.measure import ROUNDS, DatasetFailed, Measurement, Row, measure, ms_text, recommend, rows_of
from sharded_loader.cli.output import POOLS, CannotRun, Steps, complain
from sharded_loader.cli.target import find_dataset, find_function, kind_of


def _listed_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    if text is None:
        return [count for count in (1, 2, 4, 8, 16) if count <= max(2, cores_for_workers())]
    numbers = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is not a list of positive integers, such as 1,2,4")
    return list(dict.fromkeys(numbers))


def _listed_pools(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    pools = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [pool for pool in pools if pool not in POOLS]:
        raise click.BadParameter(f"{unknown[0]!r} is not a pool: choose from {', '.join(POOLS)}")
    return pools


@click.command(short_help="Measure how fast your dataset is read.")
@click.argument("dataset", metavar="MODULE:DATASET")
@click.option("--batch-size", type=click.IntRange(1), default=64, help="Samples per batch.")
@click.option("--collate", metavar="MODULE:FUNCTION", help="Your collate function. Default: the loader's own.")
@click.option("--seconds", type=click.FloatRange(0, min_open=True), default=3.0, help="Time for each row of the table.")
@click.option(
    "--workers", callback=_listed_numbers, metavar="LIST", help="Such as 1,2,4. Default: up to the number of cores."
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
    workers: list[int],
    pools: list[str],
    shuffle: bool | None,
    as_json: bool,
    quiet: bool,
) -> int:
    """Measure how fast your dataset is read: inline, by threads and by processes.

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
    rows = rows_of(pools, workers)
    others: list[float] = []

    def on_turn(number: int, row: Row) -> None:
        if number % len(rows) == 0:  # between two rounds, when this program does nothing
            others.append(cores_of_others())
        steps.update(number, str(row))

    try:
        with Steps("measuring", ROUNDS * len(rows), quiet) as steps:
            measured = measure(data, rows, seconds, batch_size, shuffle, batchify_fn, on_turn)
    except DatasetFailed as error:
        raise CannotRun(f"reading {dataset} failed: {error}") from None
    show = _show_json if as_json else _show
    show(asked, measured, statistics.median(others))
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


def _show_json(asked: dict[str, Any], measured: list[Measurement], others: float) -> None:
    rows = [dataclasses.asdict(row) | {"times_inline": times_inline(row, measured)} for row in measured]
    result = {"rounds": ROUNDS, "cores_of_others": others, "rows": rows}
    output.show_json(asked | result | {"recommendation": recommend(measured, cores_for_workers())})


def _show(asked: dict[str, Any], measured: list[Measurement], others: float) -> None:
    cells = []
    for row in measured:
        times = times_inline(row, measured)
        shown = [f"{row.samples_per_second:,.0f}", ms_text(row.ms_per_batch), f"±{row.spread:.0%}"]
        shown = ["failed", "-", "-"] if row.error else shown
        cells.append([row.pool, str(row.workers), *shown, "-" if times is None else f"{times:.2f}"])
    output.show_table(["pool", "workers", "samples/s", "ms per batch", "spread", "x inline"], cells)
    if (busy := busy_text(others, os.cpu_count() or 1, cores_for_workers())) is not None:
        click.echo(f"{busy} The figures are lower than on a quiet machine, and vary more.")
    click.echo(recommend(measured, cores_for_workers()))
