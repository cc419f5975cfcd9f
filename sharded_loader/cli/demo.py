"""``sharded-loader demo``: trains with progress, then prints accuracy, speed and waiting.

    options --> `sharded_loader.demo.train.train_and_test` --> Report --> lines on stdout

With ``--stop-resume`` and ``--kill`` it trains again, disturbed, and compares. Exit code 1: the disturbed run ended
with other numbers. What can go wrong: the options contradict each other, a device is absent, scikit-learn or Ray is not
installed. Each of these is one line, exit code 2.
"""

from __future__ import annotations

import importlib.util
import os
from typing import TYPE_CHECKING

import click

from sharded_loader.base.limits import cores_for_workers
from sharded_loader.cli.output import POOLS, CannotRun, Steps, busy_text, cores_of_others, quiet_option

if TYPE_CHECKING:
    from sharded_loader.demo.train import Report

DIFFERENT = 1
DEFAULT_WORKERS = 2


@click.command(short_help="Train a small network on handwritten digits.")
@click.option("--devices", default="auto", metavar="LIST", help="Such as cuda:0,cuda:1. auto: all GPUs, or cpu,cpu.")
@click.option("--pool", type=click.Choice(POOLS), default="process", help="Who reads the samples.")
@click.option(
    "--workers", type=click.IntRange(1), metavar="N", help=f"How many. Default: {DEFAULT_WORKERS}; inline has none."
)
@click.option("--epochs", type=click.IntRange(1), metavar="N", default=20, help="Passes over the digits.")
@click.option(  # torch takes such seeds
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, metavar="N", help="The seed decides the accuracy."
)
@click.option("--stop-resume", is_flag=True, help="Train again, kill that run in mid-epoch, resume it, and compare.")
@click.option("--kill", is_flag=True, help="Train again while workers are killed at random, and compare.")
@quiet_option
def demo(
    devices: str, pool: str, workers: int | None, epochs: int, seed: int, stop_resume: bool, kill: bool, quiet: bool
) -> int:
    """Train a small convolutional network on 1,797 handwritten digits, on several devices from one process."""
    _check(pool, workers, kill)
    from sharded_loader.demo import train

    try:
        chosen = train.find_devices(devices)
    except ValueError as error:
        raise CannotRun(f"--devices {devices}: {error}") from None
    count = 0 if pool == "inline" else workers or DEFAULT_WORKERS
    options = train.Options(chosen, pool, count, epochs, seed)
    if not quiet:
        readers = "the training loop" if count == 0 else f"{count} {pool} workers"
        shards = f"a shard of each batch on {', '.join(map(str, chosen))}"
        click.echo(f"Training on handwritten digits: {shards}; read by {readers}; seed {seed}.")

    def on_batch(epoch: int, loss: float) -> None:
        steps.update(epoch, f"loss {loss:.4f}")

    with Steps("training", epochs, quiet) as steps:
        report = train.train_and_test(options, on_batch)
    click.echo(f"held-out accuracy   {report.accuracy:.2%} of {report.held_out} scans")
    click.echo(f"samples per second  {report.stats.samples_per_second:,.0f}")
    click.echo(f"waiting for data    {report.waiting_share:.1%} of the time")
    if not quiet:
        click.echo(explain_waiting(report.waiting_share, cores_of_others()))
    code = 0
    if stop_resume:
        with Steps("killed and resumed", None, quiet) as steps:
            resumed = train.stop_and_resume(options, lambda what: steps.update(0, what))
        code |= _compare("killed and resumed", report, *resumed)
    if kill:
        with Steps("with workers killed", epochs, quiet) as steps:
            killed = train.train_and_kill(options, on_batch)
        code |= _compare("with workers killed", report, *killed)
    return code


def _check(pool: str, workers: int | None, kill: bool) -> None:
    """Raise if the options contradict each other, or if a package is not installed."""
    if pool == "inline" and workers is not None:
        what = "--pool inline reads in the training loop and has no workers"
        raise CannotRun(f"{what}: leave out --workers, or choose --pool thread, process or ray")
    if pool != "process" and kill:
        what = f"--kill kills worker processes, and --pool {pool} has none here"
        raise CannotRun(f"{what}: leave out --pool, or choose --pool process")
    if pool == "ray" and importlib.util.find_spec("ray") is None:
        raise CannotRun("--pool ray needs Ray: pip install ray")
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        raise CannotRun(f"it needs scikit-learn ({error}): pip install scikit-learn") from None


def explain_waiting(share: float, others: float) -> str:
    """What the share of waiting means.

    Args:
        share: part of the training time that the loop spent in ``next``, from 0 to 1.
        others: how many cores other programs use.

    Example:
        >>> print(explain_waiting(0.051, 0.0))
        Once the workers had started, the loop waited 5.1% of the time. A faster loader can save at most that.
    """
    text = (
        f"Once the workers had started, the loop waited {share:.1%} of the time. A faster loader can save at most that."
    )
    busy = busy_text(others, os.cpu_count() or 1, cores_for_workers())
    return f"{text}\n{busy} On a quiet machine, the loop waits less." if busy else text


def _compare(name: str, report: Report, disturbed: Report, how: str) -> int:
    same = (disturbed.accuracy, disturbed.losses) == (report.accuracy, report.losses)
    click.echo(f"{name:20}{disturbed.accuracy:.2%}: {how}")
    click.echo(f"{'':20}{'the same' if same else 'NOT the same'} accuracy and losses as in the first run")
    return 0 if same else DIFFERENT
