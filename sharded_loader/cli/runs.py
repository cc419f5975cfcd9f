"""What a run has read, and why it waited: the batch of any step, the first step in which two differ, reports of ranks.

    replay MODULE:MAKE_LOADER --step N     target.find_loader --> loader.indices, loader.batch --> values_of --> lines
                                                              --> --save FILE.pt
    diff A.json B.json                     SavedRun.read --> first_difference, other_facts --> lines

    report FILES                           one file: `page.text_of`; several: `page.joined`, which names the slow rank

    values_of(batch, indices) -> lines     shape, range and odd values of each array or tensor of a batch

A run is known by a state or a fingerprint, saved as JSON. Exit code 0; 1 if two runs differ; 2 if the command cannot
run, which one line says. What can go wrong: the module, the state, the step, the user's dataset, the files to write.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import FILE, CannotRun, os_errors_in_one_line
from sharded_loader.cli.target import find_loader, say_error

if TYPE_CHECKING:
    import numpy as np

DIFFERENT = 1


@click.command(short_help="Read the batch of any step again, and show it.")
@click.argument("loader", metavar="MODULE:MAKE_LOADER")
@click.option("--state", type=FILE, metavar="FILE.json", help="A state or a fingerprint. Default: none is loaded.")
@click.option("--step", type=click.IntRange(0), required=True, help="The step, from 0 since the first epoch.")
@click.option("--epoch", type=click.IntRange(0), help="With it, the step counts from 0 in this epoch.")
@click.option(
    "--save",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.pt",
    help="Write indices and batch, for torch.load.",
)
@output.force_option
@output.quiet_option
def replay(
    loader: str, state: Path | None, step: int, epoch: int | None, save: Path | None, force: bool, quiet: bool
) -> None:
    """Read the batch of a step again, with its random numbers, and show its indices, shapes and values.

    MODULE:MAKE_LOADER is a function in a module, or path/to/file.py:MAKE_LOADER. It takes no arguments and returns the
    loader of the run: a ShardedDataLoader, or a DataLoader of sharded_loader.torch. No worker is started.
    """
    if save is not None:
        output.check_output(save, force=force)
    saved = None if state is None else _read_state(state)
    made = find_loader(loader)
    steps: Any = getattr(made, "_known_steps", None)
    if epoch is None and steps is None:
        raise CannotRun("the steps of this loader are counted in each epoch: give --epoch")
    try:
        if state is not None:
            made.load_state_dict(saved)
        number, place = steps.place_of(step) if epoch is None else (epoch, step)
        indices, batch = made.indices(number, place), made.batch(number, place)
    except Exception as error:
        raise CannotRun(f"step {step} of {loader} cannot be read: {say_error(error)}") from None
    finally:
        getattr(made, "close", int)()  # PyTorch's loaders have none
    if isinstance(indices, tuple):  # of an evaluation
        indices, batch = indices[0], batch[0]
    click.echo(f"step     {place} of epoch {number}\nindices  {', '.join(map(str, indices))}")
    for shard, own, name in _by_shards(made, indices, batch):
        for line in values_of(shard, own, name):
            click.echo(line)
    if save is not None:
        import torch

        from sharded_loader.base.system import write_whole

        content = io.BytesIO()
        torch.save({"epoch": number, "step": place, "indices": indices, "batch": batch}, content)
        with os_errors_in_one_line(save):
            write_whole(save, content.getvalue())
        if not quiet:
            click.echo(f"written  {save}")


def _read_state(file: Path) -> object:
    """A state that was saved as JSON, also as a part of a fingerprint. Whether it is one is said where it is loaded."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotRun(f"{file} has no JSON ({error}): give a file with json.dumps(loader.state_dict())") from None
    return content["state"] if isinstance(content, dict) and "fingerprint" in content else content


@click.command(short_help="Name the first step in which two runs differ.")
@click.argument("one", type=FILE, metavar="A.json")
@click.argument("other", type=FILE, metavar="B.json")
@output.quiet_option
def diff(one: Path, other: Path, quiet: bool) -> int:
    """Compare two runs by their states, or by the fingerprints of an epoch.

    A.json and B.json have json.dumps(loader.state_dict()), or json.dumps(loader.fingerprint(epoch).as_dict()). With
    --quiet the exit code alone tells whether they differ.
    """
    from sharded_loader.instruments.check import SavedRun, first_difference, other_facts

    try:
        with os_errors_in_one_line(one):
            runs = SavedRun.read(one), SavedRun.read(other)
        step, facts = first_difference(*runs), other_facts(*runs)
    except (TypeError, ValueError) as error:
        raise CannotRun(str(error)) from None
    named = "No step differs" if step is None else f"The first step that differs is step {step[1]} of epoch {step[0]}"
    for fact in () if quiet else (named, *facts):
        click.echo(f"{fact[0].upper()}{fact[1:]}.")
    return 0 if step is None and not facts else DIFFERENT


@click.command(short_help="Read the reports of all ranks, and name the slow one.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES")
@output.quiet_option
def report(files: tuple[Path, ...], quiet: bool) -> None:
    """Read what loader.report("rank0.html") has written.

    Of one file it prints the causes of waiting, stages, workers and slowest samples. Of several files, one for each
    rank of a job, it names the rank that the others wait for, and says why it is slow.
    """
    from sharded_loader.instruments import page

    found = {}
    try:
        for path in files:
            try:
                found[str(path)] = page.facts_in(path.read_text(encoding="utf-8", errors="replace"))
            except ValueError as error:
                raise CannotRun(f"{path}: {error}") from None
        text = page.joined(found) if len(found) > 1 else page.text_of(*found.values())
    except OSError as error:
        raise CannotRun(f"{error.filename} cannot be read ({error.strerror}): give files that exist") from None
    except ValueError as error:
        raise CannotRun(str(error)) from None
    click.echo(text.partition("\n\n")[0] if quiet else text)


# -- values ------------------------------------------------------------------------------------------------------------


def _by_shards(loader: Any, indices: list[Any], batch: Any) -> Iterable[tuple[Any, list[Any], str]]:
    """The content, the indices and the name of each shard of a batch, or of the batch that has none."""
    from sharded_loader.engine.messages import Task

    split, are_lists = getattr(loader, "_split", None), all(isinstance(one, list) for one in indices)
    if not are_lists and getattr(split, "num_shards", None) is None:
        return [(batch, indices, "batch")]
    task = Task(0, 0, 0, 0, tuple(indices) if are_lists else (indices,), are_lists)
    shards = task.shards if split is None else split.sharded(task).shards
    return [(part, list(own), f"batch[{n}]") for n, (part, own) in enumerate(zip(batch, shards, strict=True))]


def values_of(batch: object, indices: list[Any], name: str = "batch") -> Iterator[str]:
    """A line for each array and tensor of a batch: its type, its shape, its range, and samples with odd numbers.

    Args:
        batch, indices: the batch, and the index of each of its samples.
        name: of the batch.

    Example:
        >>> import numpy as np
        >>> print(*values_of({"x": np.array([[1.0, 2.0], [np.nan, 8.0]])}, [7, 3]))
        batch['x']: float64 (2, 2), from 1 (sample 7) to 8 (sample 3), NaN or infinite: sample 3
    """
    import numpy as np

    for path, kind, array in _arrays_of(batch, name):
        words = [f"{path}: {kind} {array.shape}"]
        if array.size and array.ndim and array.dtype.kind in "biuf":
            rows = array.reshape(len(array), -1).astype(np.float64)
            of_rows = indices if len(indices) == len(rows) else [f"in row {row}" for row in range(len(rows))]
            finite = np.isfinite(rows)
            if finite.any():
                places = (int(best(np.where(finite, rows, np.nan))) for best in (np.nanargmin, np.nanargmax))
                ends = [f"{rows.flat[place]:.6g} (sample {of_rows[place // rows.shape[1]]})" for place in places]
                words.append(f"from {' to '.join(ends)}")
            if not finite.all():
                odd = ", ".join(str(of_rows[row]) for row in np.flatnonzero(~finite.all(1)))
                words.append(f"NaN or infinite: sample {odd}")
        yield ", ".join(words)


def _arrays_of(tree: Any, name: str) -> Iterator[tuple[str, str, np.ndarray[Any, Any]]]:
    """The name, the type and the values of each array and tensor; a list of plain values is one array."""
    import numpy as np

    from sharded_loader.batching.tree import ATOMS, children, field_names, is_tensor

    parts = None if isinstance(tree, list | tuple) and ATOMS.issuperset(map(type, tree)) else children(tree)
    if parts is None:
        kind = type(tree).__name__
        if is_tensor(tree):
            kind, tree = str(tree.dtype), tree.detach().cpu().to_dense()
            is_short = tree.is_floating_point() and tree.dtype.itemsize < 4  # NumPy lacks some of these
            tree = (tree.float() if is_short else tree).numpy()
        elif isinstance(tree, np.ndarray):
            kind = str(tree.dtype)
        yield name, kind, np.asarray(tree)
        return
    if isinstance(tree, Mapping):
        names = [f"[{key!r}]" for key in tree.keys()]  # noqa: SIM118 - see `batching.tree`
    elif isinstance(tree, list | tuple):
        names = [f"[{place}]" for place in range(len(parts))]
    else:
        names = [f".{field}" for field in field_names(tree)]
    for end, part in zip(names, parts, strict=True):
        yield from _arrays_of(part, name + end)
