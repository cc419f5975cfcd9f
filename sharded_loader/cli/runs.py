"""Runs: one that shows the library at work, and a comparison of two runs.

    demo                 `sharded_loader.demo.train.train_and_test` --> Report --> lines
    diff A.json B.json   read_fingerprint --> first_difference, other_facts --> lines

With ``--stop-resume`` and ``--kill``, the demo trains again, disturbed, and compares. Exit code 1: two runs differ; 2:
scikit-learn is missing, or a file is missing, damaged or not a fingerprint.
"""

from __future__ import annotations

from pathlib import Path

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import FILE, CannotRun, Steps, os_errors_in_one_line


@click.command(short_help="Train a small network on handwritten digits.")
@click.option("--epochs", type=click.IntRange(1), metavar="N", default=20, help="Passes over the digits.")
@click.option(  # torch takes such seeds
    "--seed", type=click.IntRange(0, 2**63 - 1), default=0, metavar="N", help="The seed decides the accuracy."
)
@click.option("--stop-resume", is_flag=True, help="Train again, kill that run in mid-epoch, resume it, and compare.")
@click.option("--kill", is_flag=True, help="Train again while workers are killed at random, and compare.")
@output.quiet_option
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
    report = train.train_and_test(epochs, seed, Steps("training", epochs, quiet).update)
    click.echo(f"held-out accuracy   {report.accuracy:.2%} of 359 scans")
    click.echo(f"samples per second  {report.samples_per_second:,.0f}")
    click.echo(f"waiting for data    {report.waiting_share:.1%} of the last epoch")
    runs, differ = {"killed and resumed": stop_resume, "with workers killed": kill}, False
    for name, run in zip(runs, (train.stop_and_resume, train.train_and_kill), strict=True):
        if runs[name]:
            disturbed, how = run(epochs, seed, Steps(name, None, quiet).update)
            is_same = (disturbed.accuracy, disturbed.losses) == (report.accuracy, report.losses)
            differ |= not is_same
            click.echo(f"{name:20}{disturbed.accuracy:.2%}: {how}")
            click.echo(f"{'':20}{'the same' if is_same else 'NOT the same'} accuracy and losses as in the first run")
    return int(differ)


@click.command(short_help="Name the first step in which two runs differ.")
@click.argument("one", type=FILE, metavar="A.json")
@click.argument("other", type=FILE, metavar="B.json")
@output.quiet_option
def diff(one: Path, other: Path, quiet: bool) -> int:
    """Compare two runs by the fingerprints of an epoch.

    A.json and B.json have json.dumps(loader.fingerprint(epoch).as_dict()). With --quiet the exit code alone tells
    whether they differ.
    """
    from sharded_loader.instruments.check import first_difference, other_facts, read_fingerprint

    try:
        with os_errors_in_one_line(one):
            runs = read_fingerprint(one), read_fingerprint(other)
        step, facts = first_difference(*runs), other_facts(*runs)
    except ValueError as error:
        raise CannotRun(str(error)) from None
    named = f"The first step that differs is step {step} of epoch {runs[0].epoch}"
    named = "No step differs" if step is None else named
    for fact in () if quiet else (named, *facts):
        click.echo(f"{fact[0].upper()}{fact[1:]}.")
    return int(step is not None or bool(facts))
