"""The first lines of a new interpreter: a spawned worker, or the forkserver that workers are forked from.

    main process: start.py  --pickled dict through a pipe-->  main(orders) -> worker.main
    main process: start.py  --variable PRELOAD------------->  the forkserver imports this module, and what that lists

``multiprocess`` imports dill: 20 ms, half as long as NumPy takes, for things that a worker never does. So a spawned
worker does with the standard library's ``Connection``, which has the same bytes on the wire. Where the user's dataset
imports ``multiprocess`` after all, it finds itself as in any child process.

BLAS and OpenMP are limited to one thread here, before NumPy is imported: nothing may be imported at the top that
imports NumPy. A process with threads must not fork, and workers want one thread each anyway. The user's own children of
the same forkserver inherit those libraries with one thread, but not the variables.

What can go wrong: a library cannot be imported. A spawned worker then tells the main process why (`link.CRASHED`). The
forkserver leaves it to the workers, whose error says why.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from sharded_loader.base.imports import call_after_import
from sharded_loader.base.private import become_child
from sharded_loader.base.system import ONE_THREAD
from sharded_loader.pools.process import link

PRELOAD = "SHARDED_LOADER_PRELOAD"
"""The variable that names the modules for the forkserver, and ``sys.path``: JSON."""


def main(orders: dict[str, Any]) -> None:
    """Be a worker until the pipe is closed.

    Args:
        orders: what `start.SpawnedProcess` sent.
    """
    os.environ.update(ONE_THREAD)
    sys.argv = orders["sys_argv"]
    os.chdir(orders["dir"])
    _close_stdin()
    known = orders["name"], orders["authkey"], orders["orig_dir"], orders["tracker"]
    call_after_import("multiprocess", lambda: become_child(*known))
    conn = Connection(orders["fd"])
    try:
        from sharded_loader.pools.process import worker
    except BaseException:
        # As `worker` tells why it ends, without NumPy, which may be what cannot be imported.
        link.make_link(conn, blocks=True).send(link.CRASHED, content=traceback.format_exc().encode(errors="replace"))
        raise SystemExit(1) from None
    worker.main(conn, orders["number"], orders["num_workers"], None, limited=True, held=orders["alive"])


def _close_stdin() -> None:
    """As ``multiprocess`` does: several processes that read one terminal are of no use."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stdin.close()
    with contextlib.suppress(OSError, ValueError):
        sys.stdin = open(os.open(os.devnull, os.O_RDONLY), encoding="utf-8", closefd=False)  # noqa: SIM115


def _preload() -> None:
    """In the forkserver: import what the main process has asked for, once for all workers."""
    import json

    request = json.loads(os.environ.pop(PRELOAD))
    threads = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    # The forkserver of some Pythons has the path of a bare interpreter, without the folder of the user's script.
    path, sys.path[:] = sys.path[:], request["path"]
    for name in request["modules"]:
        with contextlib.suppress(BaseException):
            importlib.import_module(name)
    sys.path[:] = path
    for name, value in threads.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


if PRELOAD in os.environ:
    _preload()
