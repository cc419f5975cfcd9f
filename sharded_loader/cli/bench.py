"""``sharded-loader bench module:dataset``: which pool, and how many workers, for the user's own dataset?

    target.find_dataset --> measure.measure --> a table, advice.recommend

Exit code 0; 1 if a row failed, which is said below the table; 2 if the dataset cannot be found or read.
"""

from __future__ import annotations

import dataclasses

import click

from sharded_loader.cli.advice import ms_text, recommend
from sharded_loader.cli.facts import cores_for_workers
from sharded_loader.cli.measure import ROUNDS, DatasetFailed, Measurement, measure, rows_of
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
        raise click.BadParameter(f"{text!r} is no list of numbers from 1: write 1,2,4")
    return list(dict.fromkeys(numbers))


def _listed_pools(context: click.Context, parameter: click.Parameter, text: str) -> list[str]:
    pools = list(dict.fromkeys(part.strip() for part in text.split(",")))
    if unknown := [pool for pool in pools if pool not in POOLS]:
        raise click.BadParameter(f"{unknown[0]!r} is no pool: choose from {', '.join(POOLS)}")
    return pools


@click.command(short_help="Measure how fast your dataset is read.")
@click.argument("dataset", metavar="MODULE:DATASET")
@click.option("--batch-size", type=click.IntRange(1), default=64, show_default=True, help="Samples per batch.")
@click.option(
    "--collate",
    metavar="MODULE:FUNCTION",
    help="Makes a batch of a list of samples, as batchify_fn or collate_fn. Default: the loader's own.",
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
                on_turn=lambda number, row: steps.update(number, str(row)),
            )
    except DatasetFailed as error:
        raise CannotRun(f"reading {dataset} failed: {error}") from None
    failed = [one for one in measured if one.error is not None]
    if len(failed) == len(measured):
        raise CannotRun(f"reading {dataset} failed: {failed[0].error}")
    advice = recommend(measured, cores_for_workers())
    if as_json:
        say_json(
            {
                "dataset": dataset,
                "kind": kind_of(found),
                "batch_size": batch_size,
                "shuffle": shuffled,
                "seconds": seconds,
                "rounds": ROUNDS,
                "rows": [dataclasses.asdict(one) | {"times_inline": times_inline(one, measured)} for one in measured],
                "recommendation": advice,
            }
        )
    else:
        _show(measured)
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
                "-" if times is None else f"{times:.2f}",
            ]
        )
    show_table(["pool", "workers", "samples/s", "ms per batch", "x inline"], cells)
