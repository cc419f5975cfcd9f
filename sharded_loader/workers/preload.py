"""What the forkserver has imported when workers are forked from it: our worker, and what the dataset needs.

    trainer:     with requested(modules): start the forkserver      names and sys.path, in its environment
    forkserver:  import this module -> the imports, once for all workers

A module that cannot be imported is left to the workers, whose error says why. BLAS and OpenMP get one thread before
they are loaded: a process with threads must not fork, and workers want one each anyway. The user's own children of
the same forkserver inherit those libraries with one thread, but not the variables.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

VARIABLE = "SHARDED_LOADER_PRELOAD"

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
"""Variables that numerical libraries read once, when they are loaded."""


@contextmanager
def requested(modules: Iterable[str]) -> Iterator[None]:
    """Inside, a forkserver that starts imports these modules; never the user's script."""
    import json

    names = sorted(set(modules) - {"__main__", "__mp_main__"})
    os.environ[VARIABLE] = json.dumps({"modules": names, "path": sys.path})
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def _import_requested() -> None:
    import json

    request = json.loads(os.environ.pop(VARIABLE))
    threads = {name: os.environ.get(name) for name in THREADS}
    os.environ.update(dict.fromkeys(THREADS, "1"))
    # The forkserver of some Pythons has the path of a bare interpreter, without the folder of the user's script.
    path, sys.path[:] = sys.path[:], request["path"]
    try:
        for name in ["sharded_loader.workers.worker", "threadpoolctl", *request["modules"]]:
            try:
                importlib.import_module(name)
            except BaseException:
                continue
    finally:
        sys.path[:] = path
        for name, value in threads.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


if VARIABLE in os.environ:
    _import_requested()
