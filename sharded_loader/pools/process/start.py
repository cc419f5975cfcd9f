"""How worker processes start that are not forked from the template: interpreters of their own, and a forkserver.

    choose_start_method(None) -> "fork"
    spawn_worker(number, ..., conn, fds) -> process        spawn: `SpawnedProcess`; forkserver: forked from that
    start_forkserver(modules)                              it has them imported before it forks

``multiprocess`` re-runs the user's script in a spawned worker, and in the forkserver. Not in ours: the entries that say
so are taken out of what it sends, for this thread and only while it starts a worker. So a script needs no
``if __name__ == "__main__"``, and nothing imports torch by accident.

What can go wrong: no process, no descriptor (OSError).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import pickle
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import multiprocess
from multiprocess import forkserver, resource_tracker, spawn, util
from multiprocess.context import SpawnProcess

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.private import (
    change_preparation_data,
    forget_child,
    forget_forkserver,
    has_forkserver_preload,
    interpreter_flags,
    tracker_descriptor,
)
from sharded_loader.base.system import can_pass_descriptors
from sharded_loader.pools.process import spawned, template, worker
from sharded_loader.pools.process.template import NAME


def choose_start_method(start_method: str | None) -> str:
    """The start method to use: what is asked for, else what the user set for the process, else the default.

    Raises:
        ValueError: this platform does not have it.
    """
    known = multiprocess.get_all_start_methods()
    if start_method is None:
        chosen = multiprocessing.get_start_method(allow_none=True) or multiprocess.get_start_method(allow_none=True)
        start_method = chosen or ("fork" if sys.platform.startswith("linux") else "spawn")
    if start_method not in known:
        raise ValueError(f"start_method is {start_method!r}; this platform has {', '.join(map(repr, known))}")
    with uninterrupted():  # a descriptor that has come must be closed
        falls_back = start_method == "forkserver" and not can_pass_descriptors()
    if falls_back:
        text = 'this system does not pass descriptors between processes, as a forkserver must: start_method="spawn"'
        warnings.warn(f"{text} is used instead", RuntimeWarning, stacklevel=3)
        return "spawn"
    return start_method


# Handles take another way on Windows. The interpreter of a frozen program takes no `-c`.
_HAS_INTERPRETER = sys.platform != "win32" and not getattr(sys, "frozen", False)

# The path first: without it the library itself might not be found.
_PROGRAM = (
    "import pickle, sys; orders = pickle.load(open({pipe}, 'rb')); sys.path = orders['sys_path']; "
    "from sharded_loader.pools.process.spawned import main; main(orders)"
)


def spawn_worker(number: int, num_workers: int, start_method: str, conn: Any, fds: Sequence[int]) -> Any:
    """Start a worker in an interpreter of its own, or from the forkserver.

    Args:
        number, num_workers: of the worker, and of the pool.
        start_method: ``"spawn"`` or ``"forkserver"``.
        conn: the worker's end of its pipe; the caller closes its own copy.
        fds: other descriptors that a spawned worker gets, with the numbers that they have here.

    Returns:
        The process, as ``multiprocess`` has it.
    """
    name = f"{NAME}-{number}"
    started: Any
    if start_method == "spawn" and _HAS_INTERPRETER:
        started = SpawnedProcess(name, {"number": number, "num_workers": num_workers}, conn, fds)
    else:
        context = multiprocess.get_context(start_method)
        started = context.Process(name=name, target=worker.main, args=(conn, number, num_workers, None), daemon=True)
        if sys.platform != "win32":
            resource_tracker.ensure_running()  # its start would unblock SIGINT again
    with template.starting_worker():
        started.start()
    forget_child(started)
    return started


def start_forkserver(modules: Iterable[str] = ()) -> None:
    """Start the forkserver of ``multiprocess``, if none runs: workers fork from it.

    Args:
        modules: what it imports, beside our own; never the user's script. One that runs already stays as it is, and so
            does a choice that the user has made with ``multiprocess.set_forkserver_preload``.
    """
    if not has_forkserver_preload():
        forkserver.set_forkserver_preload([spawned.__name__])
    resource_tracker.ensure_running()  # as above
    wanted = sorted(set(modules) - {"__main__", "__mp_main__"})
    request = {"modules": [worker.__name__, "threadpoolctl", *wanted], "path": sys.path}
    os.environ[spawned.PRELOAD] = json.dumps(request)
    try:
        with template.starting_worker():
            forkserver.ensure_running()
    finally:
        os.environ.pop(spawned.PRELOAD, None)


def _forget_forkserver() -> None:
    alive = forget_forkserver()
    if alive is not None:
        os.close(alive)  # the forkserver lives as long as a process has this open


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_forkserver)


def _without_script(data: dict[str, Any]) -> dict[str, Any]:
    """What ``multiprocess`` sends, without the user's script for our own workers."""
    if template.is_starting_worker():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


change_preparation_data(_without_script)
worker.find_libraries()  # what has been found once is found fast

if _HAS_INTERPRETER:
    from multiprocess import popen_spawn_posix

    class _SpawnedPopen(popen_spawn_posix.Popen):  # type: ignore[misc]
        def _launch(self, started: SpawnedProcess) -> None:
            fd = started.conn.fileno()
            # Where one runs. None is started for a worker, which makes nothing that it would look after: 20 ms, 11 MB.
            tracker = tracker_descriptor()
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                self.sentinel, alive, source, orders = ends
                command = [spawn.get_executable(), *interpreter_flags()]
                # The last argument is how ``multiprocess`` marks what it spawns.
                command += ["-c", _PROGRAM.format(pipe=source), "--multiprocessing-fork"]
                inherited = [fd, source, alive, *([] if tracker is None else [tracker]), *started.fds]
                self.pid = util.spawnv_passfds(command[0], command, inherited)
                with open(orders, "wb", closefd=False) as stream:
                    data = spawn.get_preparation_data(started.name)
                    data |= {"authkey": bytes(data["authkey"]), "tracker": tracker, "fd": fd, "alive": alive}
                    pickle.dump(data | started.orders, stream)
            finally:
                for end in ends[1:]:
                    os.close(end)
                if ends:
                    self.finalizer = util.Finalize(self, util.close_fds, ends[:1])


class SpawnedProcess(SpawnProcess):  # type: ignore[misc]
    """A ``multiprocess`` process whose child does not import ``multiprocess``.

    All that comes after the start (join, kill, exit code, sentinel) is ``multiprocess``'s own.

    Args:
        name: of the process.
        orders: what `spawned.main` gets beside what ``multiprocess`` tells its children.
        conn: the worker's end of the pipe; closed by the caller when the process has started.
        fds: other descriptors that it gets, with the numbers that they have here.
    """

    def __init__(self, name: str, orders: dict[str, Any], conn: Any, fds: Sequence[int] = ()) -> None:
        super().__init__(name=name, daemon=True)
        self.orders = orders
        self.conn = conn
        self.fds = fds

    @staticmethod
    def _Popen(started: SpawnedProcess) -> Any:
        return _SpawnedPopen(started)
