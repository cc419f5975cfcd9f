"""``sharded-loader demo``: trains with progress, then prints accuracy, speed and waiting.

    options --> `sharded_loader.demo.train.train_and_test` --> Report --> lines on stdout

With ``--stop-resume`` and ``--kill`` it trains again, disturbed, and compares. Exit code 1: the disturbed run ended
with other numbers. What can go wrong: scikit-learn is not installed, which is one line, exit code 2.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from sharded_loader.base.limits import cores_for_workers
from sharded_loader.cli.output import CannotRun, Steps, busy_text, cores_of_others, quiet_option

if TYPE_CHECKING:
    from sharded_loader.demo.train import Report


@click.command(short_help="Train a small network on handwritten digits.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", default=20, help="Passes over the digits.")
@click.option(  # torch takes such seeds
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, metavar="N", help="The seed decides the accuracy."
)
@click.option("--stop-resume", is_flag=True, help="Train again, kill that run in mid-epoch, resume it, and compare.")
@click.option("--kill", is_flag=True, help="Train again while workers are killed at random, and compare.")
@quiet_option
def demo(epochs: int, seed: int, stop_resume: bool, kill: bool, quiet: bool) -> int:
    """Train a small convolutional network on 1,797 handwritten digits, on all devices from one process."""
    try:
        import sklearn.datasets  # noqa: F401
    except ImportError as error:
        raise CannotRun(f"it needs scikit-learn ({error}): pip install scikit-learn") from None
    from sharded_loader.demo import train

    if not quiet:
        shards = f"a shard of each batch on {', '.join(map(str, train.devices()))}"
        click.echo(f"Training on handwritten digits: {shards}; read by {train.WORKERS} process workers; seed {seed}.")

    def on_batch(epoch: int, loss: float) -> None:
        steps.update(epoch, f"loss {loss:.4f}")

    with Steps("training", epochs, quiet) as steps:
        report = train.train_and_test(epochs, seed, on_batch)
    click.echo(f"held-out accuracy   {report.accuracy:.2%} of {report.held_out} scans")
    click.echo(f"samples per second  {report.samples_per_second:,.0f}")
    click.echo(f"waiting for data    {report.waiting_share:.1%} of the time")
    if not quiet:
        click.echo(explain_waiting(report.waiting_share, cores_of_others()))
    code = 0
    if stop_resume:
        with Steps("killed and resumed", None, quiet) as steps:
            resumed = train.stop_and_resume(epochs, seed, lambda what: steps.update(0, what))
        code |= _compare("killed and resumed", report, *resumed)
    if kill:
        with Steps("with workers killed", epochs, quiet) as steps:
            killed = train.train_and_kill(epochs, seed, on_batch)
        code |= _compare("with workers killed", report, *killed)
    return code


def explain_waiting(share: float, others: float) -> str:
    """What the share of waiting means.

    Args:
        share: part of the training time that the loop spent in ``next``, from 0 to 1.
        others: how many cores other programs use.

    Example:
        >>> print(explain_waiting(0.051, 0.0))
        Once the workers had started, the loop waited 5.1% of the time. A faster loader can save at most that.
    """
    text = f"the loop waited {share:.1%} of the time. A faster loader can save at most that."
    said = busy_text(others, os.cpu_count() or 1, cores_for_workers())
    busy = f"\n{said} On a quiet machine, the loop waits less." if said else ""
    return f"Once the workers had started, {text}{busy}"


def _compare(name: str, report: Report, disturbed: Report, how: str) -> int:
    is_same = (disturbed.accuracy, disturbed.losses) == (report.accuracy, report.losses)
    click.echo(f"{name:20}{disturbed.accuracy:.2%}: {how}")
    click.echo(f"{'':20}{'the same' if is_same else 'NOT the same'} accuracy and losses as in the first run")
    return int(not is_same)
