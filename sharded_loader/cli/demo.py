"""``sharded-loader demo``: trains with progress, then prints accuracy, speed and waiting.

    options --> `sharded_loader.demo.train.train_and_test` --> Report --> lines on stdout

With ``--stop-resume`` and ``--kill`` it trains again, disturbed, and compares. Exit code 1: the disturbed run ended
with other numbers. What can go wrong: scikit-learn is not installed, which is one line, exit code 2.
"""

from __future__ import annotations

import click

from sharded_loader.cli.output import CannotRun, Steps, quiet_option


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
    with Steps("training", epochs, quiet) as steps:
        report = train.train_and_test(epochs, seed, steps.update)
    click.echo(f"held-out accuracy   {report.accuracy:.2%} of 359 scans")
    click.echo(f"samples per second  {report.samples_per_second:,.0f}")
    click.echo(f"waiting for data    {report.waiting_share:.1%} of the last epoch")
    runs, differ = {"killed and resumed": stop_resume, "with workers killed": kill}, False
    for name, run in zip(runs, (train.stop_and_resume, train.train_and_kill), strict=True):
        if runs[name]:
            with Steps(name, None, quiet) as steps:
                disturbed, how = run(epochs, seed, steps.update)
            is_same = (disturbed.accuracy, disturbed.losses) == (report.accuracy, report.losses)
            differ |= not is_same
            click.echo(f"{name:20}{disturbed.accuracy:.2%}: {how}")
            click.echo(f"{'':20}{'the same' if is_same else 'NOT the same'} accuracy and losses as in the first run")
    return int(differ)
