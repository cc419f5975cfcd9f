"""The command ``sharded-loader``: reads arguments, shows progress, prints results.

    main -> make_parser -> one function per subcommand: arguments -> exit code

Each subcommand is an entry of `make_parser` and a function here. What it does lies in modules of its own (`train`,
`stop`, `kill`), imported when it runs, so that ``--help`` and ``--version`` wait neither for torch nor for an extra.

Exit codes: 0 done; 1 a disturbed run came out otherwise than the undisturbed one; 2 the command cannot run as typed
(unknown option, absent device, missing extra), with one line on stderr that says why; 130 Ctrl-C. Any other failure is
a bug or the machine's, and keeps its traceback.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Sequence

from sharded_loader import __version__

USAGE_ERROR = 2
DIFFERENT = 1
INTERRUPTED = 130  # 128 + SIGINT, as shells say it

DEFAULT_WORKERS = 2
POOLS = ("inline", "thread", "process", "ray")


class CannotRun(Exception):
    """The command cannot run as typed. The message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments. None: those of this process.

    Returns:
        The exit code.

    Example:
        >>> main(["--version"]) == 0
        sharded-loader ...
        True
    """
    try:
        arguments = make_parser().parse_args(argv)
        code: int = arguments.run(arguments)
        return code
    except CannotRun as error:
        print(f"sharded-loader: {error}", file=sys.stderr)
        return USAGE_ERROR
    except SystemExit as stop:  # argparse after --help and usage errors, rich when its output is closed
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        print("sharded-loader: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The arguments of the command; ``run`` in what it parses is the function that does it.

    Example:
        >>> make_parser().parse_args(["demo", "--seed", "3"]).seed
        3
    """
    parser = argparse.ArgumentParser(
        prog="sharded-loader", description="A data loader for PyTorch: sharded batches in order, from any pool."
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    demo = commands.add_parser(
        "demo",
        help="train a small network on handwritten digits, over all GPUs or two CPU shards",
        description="Train a small convolutional network on 1,797 handwritten digits, data-parallel in one process.",
    )
    add = demo.add_argument
    each = "one shard of each batch for each, such as cpu,cpu or cuda:0,cuda:1 (default: all GPUs, else cpu,cpu)"
    add("--devices", default="auto", metavar="LIST", help=each)
    add("--pool", choices=POOLS, default="process", help="who reads the samples (default: %(default)s)")
    workers = f"threads, processes or actors of the pool (default: {DEFAULT_WORKERS}; inline has none)"
    add("--workers", type=int, metavar="N", help=workers)
    add("--epochs", type=int, default=20, metavar="N", help="default: %(default)s")
    add("--seed", type=int, default=0, metavar="N", help="same seed, same accuracy (default: %(default)s)")
    stop = "afterwards train again, kill that run in mid-epoch, resume it, and compare"
    add("--stop-resume", action="store_true", help=stop)
    kill = "afterwards train again while workers are killed at random, and compare"
    add("--kill", action="store_true", help=kill)
    demo.set_defaults(run=run_demo)
    return parser


def run_demo(arguments: argparse.Namespace) -> int:
    """``sharded-loader demo``: train with a progress bar, then print accuracy, speed and waiting.

    Raises:
        CannotRun: the options contradict each other, a device is not there, or the extra is not installed.
    """
    for name, least in (("workers", 1), ("epochs", 1), ("seed", 0)):
        number = getattr(arguments, name)
        if number is not None and not least <= number < 2**63:  # what torch takes as a seed
            raise CannotRun(f"demo: --{name}: {number} is out of range: give a number from {least} to 2**63-1")
    if arguments.pool == "inline" and arguments.workers is not None:
        raise CannotRun(
            "demo: --pool inline reads in the training loop and has no workers: leave out --workers, "
            "or choose --pool thread, process or ray"
        )
    if arguments.pool != "process" and arguments.kill:
        raise CannotRun(
            f"demo: --kill kills worker processes, and --pool {arguments.pool} has none here: leave out --pool, "
            f"or choose --pool process"
        )
    if arguments.pool == "ray" and importlib.util.find_spec("ray") is None:
        raise CannotRun("demo: --pool ray needs Ray: pip install ray")
    try:
        import sklearn.datasets  # noqa: F401
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError as error:
        raise CannotRun(f'demo: needs scikit-learn and rich ({error}): pip install "sharded_loader[demo]"') from None
    from sharded_loader.demo import kill, stop, train

    try:
        devices = train.find_devices(arguments.devices)
    except ValueError as error:
        raise CannotRun(f"demo: --devices {arguments.devices}: {error}") from None
    workers = 0 if arguments.pool == "inline" else arguments.workers or DEFAULT_WORKERS
    options = train.Options(devices, arguments.pool, workers, arguments.epochs, arguments.seed)
    console = Console(highlight=False, soft_wrap=True)
    readers = "the training loop" if workers == 0 else f"{workers} {options.pool} workers"
    console.print(
        f"Training on handwritten digits: a shard of each batch on {', '.join(map(str, devices))}; "
        f"read by {readers}; seed {options.seed}."
    )
    loss_column = TextColumn("loss {task.fields[loss]}")
    columns = TextColumn("epoch"), MofNCompleteColumn(), BarColumn(), loss_column, TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=options.epochs, loss="-")

        def show(epoch: int, loss: float) -> None:
            progress.update(bar, completed=epoch, loss=f"{loss:.4f}")

        report = train.train_and_test(options, show)
        show(options.epochs, report.losses[-1])
    console.print(f"held-out accuracy   {report.accuracy:.2%} of {report.held_out} scans")
    console.print(f"samples per second  {report.stats.samples_per_second:,.0f}")
    console.print(f"waiting for data    {report.stats.waiting_share:.1%} of the time")
    code = 0
    for asked, name, disturb in (
        (arguments.stop_resume, "killed and resumed  ", stop.stop_and_resume),
        (arguments.kill, "with workers killed ", kill.train_and_kill),
    ):
        if asked:
            disturbed, how = disturb(options)
            same = (disturbed.accuracy, disturbed.losses) == (report.accuracy, report.losses)
            console.print(f"{name}{disturbed.accuracy:.2%}: {how}")
            console.print(f"{'':20}{'the same' if same else 'NOT the same'} accuracy and losses as undisturbed")
            code = code if same else DIFFERENT
    return code
