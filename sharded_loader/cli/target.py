"""Find the user's dataset by name: ``module:dataset`` or ``path/to/file.py:dataset``.

    "package.data:train_set" --import--> an object --called, if it is a function or a class--> a dataset

The module is imported under its own name, so that spawned workers find its classes; its folder stays first in
``sys.path``. Errors of the user's code become one line that says what to do (`CannotRun`).
"""

from __future__ import annotations

import difflib
import importlib
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from sharded_loader.cli.output import CannotRun, one_line


def find_dataset(target: str) -> Any:
    """Return the dataset that the user has named; raise CannotRun if there is none, or it cannot be made or read.

    After the colon of ``target`` stands a dataset, or a callable without arguments that makes one. The name may have
    dots.

    Example:
        >>> find_dataset("keyword:kwlist")[:2]
        ['False', 'None']
    """
    from sharded_loader.extend.data import has_own, is_stream, takes_two
    from sharded_loader.extend.engine import dataset_given

    data = _find(target, "dataset")
    is_class = isinstance(data, type)
    is_dataset = not is_class and any(has_own(type(data), name) for name in ("__getitem__", "__iter__"))
    if callable(data) and not is_dataset and (is_class or not takes_two(data)):  # two: it gives a part of iterable data
        try:
            made = data()
        except Exception as error:
            lacks = isinstance(error, TypeError) and "argument" in str(error)
            advice = ": write a function without arguments that returns the dataset, and name that function" * lacks
            raise CannotRun(f"calling {target} failed: {_with_line(error)}{advice}") from None
        data = data if isinstance(made, Iterator) and not is_class else made  # a generator function is iterable data
    try:
        data = dataset_given(data)
        is_empty = not is_stream(data) and len(data) == 0
    except Exception as error:
        why = say_error(error).partition(": ")[2] or say_error(error)
        raise CannotRun(f"{target} is not a dataset: {why}") from None
    if is_empty:
        raise CannotRun(f"{target} is empty: its length is 0. Give a dataset with samples")
    return data


def find_function(target: str) -> Callable[..., Any]:
    """Return the function that the user has named, as in `find_dataset`; raise CannotRun if there is none.

    Example:
        >>> find_function("operator:add")(1, 2)
        3
    """
    named = _find(target, "function")
    if not callable(named):
        from sharded_loader.extend.tools import an  # imports NumPy, which --help does not wait for

        raise CannotRun(f"{target} is {an(type(named))}, not a function: name a function")
    return named  # type: ignore[no-any-return]


def say_error(error: BaseException) -> str:
    """Format an exception of the user's code in one line, with the loader's notes: epoch, batch, sample.

    Example:
        >>> say_error(KeyError("label"))
        "KeyError: 'label'"
    """
    from sharded_loader.extend.tools import notes_of

    where = [note.partition(" in ")[2] for note in notes_of(error) if note.startswith("sharded_loader: in ")]
    return one_line(error) + (f" (in {where[-1]})" if where else "")


def _find(target: str, what: str) -> Any:
    module_name, _, name = target.rpartition(":")
    if not module_name or not name or name.endswith(".py"):
        raise CannotRun(f"{target!r} does not name a {what}: write module:NAME or path/to/file.py:NAME")
    try:
        return operator.attrgetter(name)(_import(module_name))
    except AttributeError as error:
        close = difflib.get_close_matches(error.name or "", dir(error.obj), 1)
        advice = f"did you mean {close[0]!r}?" if close else "look for the name in the file"
        raise CannotRun(f"{module_name} has no {name!r}: {advice}") from None


def _import(where: str) -> ModuleType:
    """Import a module by its name or its file."""
    name, folder, path = where, os.getcwd(), Path(where)
    if where.endswith(".py"):
        if not path.is_file():
            raise CannotRun(f"there is no file {path}: write the path of a Python file, from {folder}")
        path = path.resolve()
        name, folder = path.stem, str(path.parent)
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(path):
            raise CannotRun(f"{path}: {name!r} is also the name of a module that Python has imported: rename the file")
    sys.path.insert(0, folder)  # as `python` and `python -m` have it
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script may exit
        absent = error.name if isinstance(error, ModuleNotFoundError) else None
        if absent and f"{name}.".startswith(f"{absent}."):  # the module, or a package that contains it
            raise CannotRun(
                f"there is no module {absent!r} in {folder} or among the installed ones: "
                f"change to the folder that contains it, or write path/to/file.py:NAME"
            ) from None
        relative = isinstance(error, ImportError) and "relative import" in str(error)
        hint = ": write package.module:NAME instead of a path" if relative else ""
        raise CannotRun(f"importing {where} failed: {_with_line(error)}{hint}") from None


def _with_line(error: BaseException) -> str:
    """Format an error with the line of the user's code that raised it."""
    ours = os.path.dirname(__file__)
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [one for one in frames if "importlib" not in one.filename and not one.filename.startswith(ours)]
    where = f" ({os.path.basename(theirs[-1].filename)}, line {theirs[-1].lineno})" if theirs else ""
    return say_error(error) + where
