"""``sharded-loader bench module:dataset``: which pool, and how many workers, for the user's own dataset?

    target.find_dataset --> measure.measure --> a table, advice.recommend
    busy.cores_of_others, between two rounds --> a line, if other programs disturb the measurement

Exit code 0; 1 if a row failed, which is said below the table; 2 if the dataset cannot be found or read.
"""

from __future__ import annotations

import dataclasses
import os
import statistics

import click

from sharded_loader.base.cores import cores_for_workers
from sharded_loader.cli.advice import ms_text, recommend
from sharded_loader.cli.busy import busy_text, cores_of_others
from sharded_loader.cli.measure import ROUNDS, DatasetFailed, Measurement, Row, measure, rows_of
from sharded_loader.cli.output import CannotRun, Steps, complain, json_option, quiet_option, say, say_json, show_table
from sharded_loader.cli.target import find_dataset, find_function, kind_of

POOLS = ("inline", "thread", "process", "ray")
DEFAULT_POOLS = "inline,thread,process"


def _listed_numbers(context: click.Context, parameter: click.Parameter, text: str | None) -> list[int]:
    if text is None:
        cores = cores_for_workers()
        return [count for count in (1, 2, 4, 8, 16) if count <= max(2, cores)]
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise click.BadParameter(f"{text!r} is not a list of positive integers, such as 1,2,4")
    return list(dict.fromkeys(numbers))


def _listed_pools(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    pools = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [pool for pool in pools if pool not in POOLS]:
        raise click.BadParameter(f"{unknown[0]!r} is not a pool: choose from {', '.join(POOLS)}")
    return pools


@click.command(short_help="Measure how fast your dataset is read.")
@click.argument("dataset", metavar="MODULE:DATASET")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Samples per batch.")
@click.option(
    "--collate",
    metavar="MODULE:FUNCTION",
    help="Makes a batch of a list of samples, as collate_fn. Default: the loader's own.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0, min_open=True),
    default=3.0,
    show_default=True,
    help="Time for each row of the table.",
)
@click.option(
    "--workers",
    callback=_listed_numbers,
    metavar="LIST",
    help="Numbers of workers, such as 1,2,4. Default: up to the number of cores.",
)
@click.option(
    "--pools",
    callback=_listed_pools,
    default=DEFAULT_POOLS,
    show_default=True,
    metavar="LIST",
    help="Who reads: inline is the main process.",
)
@click.option(
    "--shuffle/--no-shuffle",
    default=None,
    help="Random order, or the order of the dataset. Default: random if possible.",
)
@json_option
@quiet_option
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

    found = find_dataset(dataset)
    batchify_fn = None if collate is None else find_function(collate)
    stream = is_stream(found)
    if stream and shuffle:
        raise CannotRun(f"{dataset} has only __iter__ and comes in its own order: leave out --shuffle")
    shuffled = not stream if shuffle is None else shuffle
    rows = rows_of(pools, workers)
    others: list[float | None] = []

    def on_turn(number: int, row: Row) -> None:
        if number % len(rows) == 0:  # between two rounds, when this program does nothing
            others.append(cores_of_others())
        steps.update(number, str(row))

    if not quiet and not as_json:
        order = "random order" if shuffled else "the dataset's own order"
        say(f"{dataset}: {kind_of(found)}, in {order}; batches of {batch_size}.")
    try:
        with Steps("measuring", ROUNDS * len(rows), quiet) as steps:
            measured = measure(
                found,
                rows,
                batch_size=batch_size,
                seconds=seconds,
                shuffle=shuffled,
                batchify_fn=batchify_fn,
                on_turn=on_turn,
            )
    except DatasetFailed as error:
        raise CannotRun(f"reading {dataset} failed: {error}") from None
    failed = [one for one in measured if one.error is not None]
    if len(failed) == len(measured):
        raise CannotRun(f"reading {dataset} failed: {failed[0].error}")
    advice = recommend(measured, cores_for_workers())
    known = [one for one in others if one is not None]
    busy = statistics.median(known) if known else None
    if as_json:
        say_json(
            {
                "dataset": dataset,
                "kind": kind_of(found),
                "batch_size": batch_size,
                "shuffle": shuffled,
                "seconds": seconds,
                "rounds": ROUNDS,
                "cores_of_others": busy,
                "rows": [dataclasses.asdict(one) | {"times_inline": times_inline(one, measured)} for one in measured],
                "recommendation": advice,
            }
        )
    else:
        _show(measured)
        if (note := busy_text(busy, os.cpu_count() or 1, cores_for_workers())) is not None:
            say(f"{note} The figures are lower than on a quiet machine, and vary more.")
        say(advice)
    for one in failed:
        complain(f"{one.pool} with {one.workers} workers failed: {one.error}")
    return int(bool(failed))


def times_inline(one: Measurement, measured: list[Measurement]) -> float | None:
    """How many times as fast as inline; None if one of the two was not measured.

    Example:
        >>> inline, workers = Measurement("inline", 0, 100.0, 1.0), Measurement("process", 2, 150.0, 0.7)
        >>> times_inline(workers, [inline, workers]), times_inline(workers, [workers])
        (1.5, None)
    """
    inline = [other.samples_per_second for other in measured if other.pool == "inline"]
    return one.samples_per_second / inline[0] if inline and one.error is None else None


def _show(measured: list[Measurement]) -> None:
    cells = []
    for one in measured:
        times = times_inline(one, measured)
        cells.append(
            [
                one.pool,
                str(one.workers),
                "failed" if one.error else f"{one.samples_per_second:,.0f}",
                "-" if one.error else ms_text(one.ms_per_batch),
                "-" if one.error else f"±{one.spread:.0%}",
                "-" if times is None else f"{times:.2f}",
            ]
        )
    show_table(["pool", "workers", "samples/s", "ms per batch", "spread", "x inline"], cells)
