"""How worker processes come into being: the start method, and what is done differently for ours.

``multiprocess`` re-runs the user's script in a spawned worker, and in the forkserver. Not in ours: the
entries that say so are taken out of what it sends, for this thread and only while it starts a worker. So a
script needs no ``if __name__ == "__main__"``, and nothing imports torch by accident.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import multiprocess
import multiprocess.process
import threadpoolctl  # noqa: F401 - forked workers inherit it
from multiprocess import spawn

from sharded_loader.system import can_pass_descriptors
from sharded_loader.workers import preload, spawning


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
    if start_method == "forkserver" and not can_pass_descriptors():
        text = 'this system refuses to pass descriptors between processes, as a forkserver must: start_method="spawn"'
        warnings.warn(f"{text} is used instead", RuntimeWarning, stacklevel=3)
        return "spawn"
    return start_method


def start_forkserver(modules: Iterable[str] = ()) -> None:
    """Start the forkserver of ``multiprocess``, if none runs: workers fork from it.

    Args:
        modules: what it imports, beside our own (see `preload`). One that runs already stays as it is, and so does a
            choice that the user has made with ``multiprocess.set_forkserver_preload``.
    """
    from multiprocess import forkserver

    if forkserver._forkserver._preload_modules == ["__main__"]:  # nobody has chosen otherwise
        forkserver.set_forkserver_preload([preload.__name__])
    with starting_worker("forkserver"), preload.requested(modules):
        forkserver.ensure_running()


def _forget_forkserver() -> None:
    """In a forked child: the forkserver is the parent's, and ``multiprocess`` would wait for it as for a child."""
    server: Any = getattr(sys.modules.get("multiprocess.forkserver"), "_forkserver", None)
    if getattr(server, "_forkserver_pid", None) is not None:
        preload = server._preload_modules
        os.close(server._forkserver_alive_fd)  # it lives as long as somebody has this open
        server.__init__()
        server._preload_modules = preload


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_forkserver)


_this_thread = threading.local()


def _preparation_data(name: str) -> dict[str, Any]:
    """``spawn.get_preparation_data``, without the user's script for our own workers."""
    data: dict[str, Any] = _original_preparation_data(name)
    if is_starting_worker():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


_original_preparation_data = spawn.get_preparation_data
spawn.get_preparation_data = _preparation_data


def is_starting_worker() -> bool:
    """Whether this thread is starting a worker: a fork that happens now is ours, not the user's."""
    return bool(getattr(_this_thread, "starts_worker", False))


@contextlib.contextmanager
def starting_worker(start_method: str) -> Iterator[None]:
    """Inside, this thread's processes start without the user's script, and with SIGINT blocked.

    Blocked, because a Ctrl-C goes to the whole process group, and a worker that has not yet come to ignore
    it would end in a traceback.
    """
    block = hasattr(signal, "pthread_sigmask")
    if block and start_method != "fork" and not (start_method == "spawn" and spawning.AVAILABLE):
        from multiprocess import resource_tracker

        resource_tracker.ensure_running()  # its start would unblock the signal again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if block else set()
    _this_thread.starts_worker = True
    try:
        yield
    finally:
        _this_thread.starts_worker = False
        if block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget_process(process: Any) -> None:
    """Take a worker out of the list of children that ``multiprocess`` looks after.

    It would send them SIGTERM and join them when the program ends, or when a child that the user forked
    ends; ours end by end-of-file.
    """
    multiprocess.process._children.discard(process)
