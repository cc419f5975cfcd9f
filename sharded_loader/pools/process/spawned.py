"""First code in a new interpreter: a spawned worker, or the forkserver that workers are forked from.

    main process: start.py  --pickled dict through a pipe-->  main(orders) -> worker.main
    main process: start.py  --variable PRELOAD------------->  the forkserver imports this module and those listed

A spawned worker uses the standard library's ``Connection``, with the same wire format as ``multiprocess``, which would
import dill: 20 ms, half as long as NumPy. If the dataset imports ``multiprocess``, that is set up as in any child.

BLAS and OpenMP are limited to one thread before NumPy is imported, so nothing imported at the top may import NumPy: a
process with threads must not fork. The user's own children of the same forkserver inherit the single-threaded
libraries, but not the variables.

If an import fails, a spawned worker ends with the traceback; the forkserver leaves the error to the workers.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

from sharded_loader.base.imports import call_after_import
from sharded_loader.base.private import become_child
from sharded_loader.base.system import ONE_THREAD

PRELOAD = "SHARDED_LOADER_PRELOAD"
"""Environment variable with the forkserver's modules and ``sys.path``, as JSON."""


def main(orders: dict[str, Any]) -> None:
    """Run a worker until its pipe is closed. ``orders`` come from `start.SpawnedProcess`."""
    os.environ.update(ONE_THREAD)
    sys.argv = orders["sys_argv"]
    os.chdir(orders["dir"])
    _close_stdin()
    known = orders["name"], orders["authkey"], orders["orig_dir"], orders["tracker"]
    call_after_import("multiprocess", lambda: become_child(*known))
    from sharded_loader.pools.process import worker

    number, num_workers = orders["number"], orders["num_workers"]
    worker.main(Connection(orders["fd"]), number, num_workers, None, limited=True, held=orders["alive"])


def _close_stdin() -> None:
    """Close stdin, as ``multiprocess`` does: several processes must not read one terminal."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdin.close()
    with contextlib.suppress(OSError, ValueError):
        sys.stdin = open(os.open(os.devnull, os.O_RDONLY), encoding="utf-8", closefd=False)  # noqa: SIM115


def _preload() -> None:
    """In the forkserver, import modules once for all workers."""
    import json

    request = json.loads(os.environ.pop(PRELOAD))
    threads = {name: os.environ[name] for name in ONE_THREAD if name in os.environ}
    os.environ.update(ONE_THREAD)
    # Some Pythons' forkserver has the path of a bare interpreter, without the folder of the user's script.
    path, sys.path[:] = sys.path[:], request["path"]
    for name in request["modules"]:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    sys.path[:] = path
    for name in ONE_THREAD:
        del os.environ[name]
    os.environ.update(threads)


if PRELOAD in os.environ:
    _preload()
