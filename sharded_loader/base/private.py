"""Non-public names of Python and other libraries. Besides this module, only `drop_in.trainers` uses such names.

A new version of a library may drop such a name without notice. Each docstring says what happens then ("Without the
name"), and ``tests/base/test_private.py`` tests each name. No library is imported here unless the caller needs it
anyway. Subclasses that override methods of `multiprocess` or of torch's loader stay with the pools and the drop-in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterable
from types import FunctionType, SimpleNamespace
from typing import Any

try:
    from _blake2 import blake2b  # as hashlib has it, without OpenSSL: 2 ms
except ImportError:
    from hashlib import blake2b

try:
    from _signal import getsignal  # type: ignore[import-not-found]  # without the enumerations: 8 us instead of 96
except ImportError:
    from signal import getsignal

__all__ = ["blake2b", "getsignal"]


# -- Python ------------------------------------------------------------------------------------------------------------


def is_owned(lock: Any) -> bool:
    """Return True if this thread holds an `RLock`; `threading.Condition` asks in the same way."""
    return bool(lock._is_owned())


def is_being_imported(module: object) -> bool:
    """Return True while the import of a module is in progress. Without the name: False."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def posix_shared_memory() -> Any:
    """Return the module with ``shm_open``, which bypasses the resource tracker; ImportError if it is missing."""
    import _posixshmem  # type: ignore[import-not-found]

    return _posixshmem


def is_thread_of_others(thread: threading.Thread) -> bool:
    """Return True if the thread was not started by `threading`."""
    return isinstance(thread, threading._DummyThread)


# -- multiprocess and multiprocessing ----------------------------------------------------------------------------------


def fork_quietly(popen: object, started: object) -> None:
    """Fork as ``multiprocess`` does, without Python's warning about threads. Without the names: with the warning.

    Since Python 3.12 a fork beside threads emits a DeprecationWarning, on which the user cannot act: the child runs
    only this library's code. A filter would affect all threads, which share the list of filters. Python drops warnings
    from code whose module has no name, so this fork runs in a namespace without a name.
    """
    from multiprocess import popen_fork

    launch, opened = popen_fork.Popen._launch, list[int]()

    def pipe() -> list[int]:
        opened.extend(os.pipe())
        return opened[-2:]

    if isinstance(launch, FunctionType):
        names = {**vars(popen_fork), "__name__": None, "os": SimpleNamespace(**{**vars(os), "pipe": pipe})}
        launch = FunctionType(launch.__code__, names, closure=launch.__closure__)
    try:
        launch(popen, started)
    except OSError:  # no process or no descriptors; `multiprocess` leaves its pipes open
        popen_fork.util.close_fds(*opened)
        raise


def forget_child(started: object) -> None:
    """Remove a process from the list of children that ``multiprocess`` manages.

    It would send them SIGTERM and join them at exit, or when another forked child exits; ours exit on end-of-file.
    Without the name: they get the SIGTERM.
    """
    from multiprocess import process

    getattr(process, "_children", set()).discard(started)


def become_worker(name: str) -> None:
    """Tell ``multiprocessing`` that this process is a worker. Programs ask it whether they are the main process.

    Without the name: ``parent_process()`` is None. A worker is no daemon there: samples may start processes. Forks of
    ``multiprocess`` do not reset what ``multiprocessing`` opened before: connections to a manager, threads of queues.
    """
    from multiprocessing import process

    getattr(sys.modules.get("multiprocessing.util"), "_run_after_forkers", list)()
    process.current_process().name = name
    vars(process).update(_parent_process=SimpleNamespace(name="MainProcess", pid=os.getppid()))


def become_child(name: str, authkey: bytes, folder: str, tracker: int | None) -> None:
    """Set name, authentication key and daemon flag in a spawned worker, as ``multiprocess`` does."""
    from multiprocess import process, resource_tracker

    current: Any = process.current_process()
    current._name, process.ORIGINAL_DIR = name, folder
    current._config.update(authkey=process.AuthenticationString(authkey), daemon=True)
    resource_tracker._resource_tracker._fd = tracker


def tracker_descriptor() -> int | None:
    """Return the descriptor of a running resource tracker. Without the name: None, and a worker starts another one."""
    from multiprocess import resource_tracker

    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None)


def interpreter_flags() -> list[str]:
    """Return the options of this interpreter, for starting another one. Without the name: none."""
    from multiprocess import util

    return list(getattr(util, "_args_from_interpreter_flags", list)())


def has_forkserver_preload() -> bool:
    """Return True if the user has chosen the forkserver's imports. Without the name: True."""
    from multiprocess import forkserver

    return bool(getattr(forkserver._forkserver, "_preload_modules", None) != ["__main__"])


def forget_forkserver() -> int | None:
    """Reset the parent's forkserver in a forked child, where ``multiprocess`` would wait for it as for a child.

    Return the descriptor that keeps it alive, to be closed; None if none runs.
    """
    from multiprocess import forkserver

    server: Any = forkserver._forkserver
    if getattr(server, "_forkserver_pid", None) is None:
        return None
    chosen, alive = server._preload_modules, server._forkserver_alive_fd
    server.__init__()
    server._preload_modules = chosen
    return int(alive)


def change_preparation_data(change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Apply ``change`` to the data that ``multiprocess`` sends to its new processes."""
    from multiprocess import spawn

    original = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: change(original(name))


# -- cloudpickle -------------------------------------------------------------------------------------------------------


def tracker_of(cls: type) -> str | None:
    """Return cloudpickle's id of a class that it sends by value. Without the name: None."""
    tracker: str | None = _cloudpickle("_DYNAMIC_CLASS_TRACKER_BY_CLASS").get(cls)
    return tracker


def tracked_class(tracker: str | None) -> type | None:
    """Return the class with this id."""
    cls: type | None = _cloudpickle("_DYNAMIC_CLASS_TRACKER_BY_ID").get(tracker)
    return cls


def _cloudpickle(table: str) -> Any:
    return getattr(sys.modules.get("cloudpickle.cloudpickle"), table, {})  # if it is not loaded, no class came by value


# -- torch -------------------------------------------------------------------------------------------------------------


def find_profiler_enabled() -> Any:
    """Return the function that tells if torch's profiler is running. Without the name: it returns False."""
    return getattr(sys.modules["torch"].autograd, "_profiler_enabled", lambda: False)


def skip_compiling(functions: Iterable[FunctionType]) -> None:
    """Exclude these functions, their callees and this library from compilation by Dynamo, which is imported.

    Before torch 2.7, and without the names, callees may be compiled.
    """
    rules: Any = getattr(sys.modules["torch._dynamo"], "trace_rules", None)
    if rules is not None:
        rules.add("sharded_loader")
    hook: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hasattr(hook, "set_code_exec_strategy"):
        skip = hook._FrameExecStrategy(hook._FrameAction.SKIP, hook._FrameAction.SKIP)
        for function in functions:
            hook.set_code_exec_strategy(function.__code__, skip)


def end_compiling() -> None:
    """Remove Dynamo's hook, inherited by a fork, from this thread. Without the name: it stays."""
    hook: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hasattr(hook, "set_eval_frame"):
        hook.set_eval_frame(None)


_TORCH_WORKER = "torch.utils.data._utils.worker"


def answer_for_torch(answer: Callable[[], object]) -> None:
    """Make torch's ``get_worker_info()`` return the result of ``answer`` unless that is None, once torch is imported.

    The function object stays the same, because datasets import it by name. Without the name: torch answers by itself.
    """
    module: Any = sys.modules.get(_TORCH_WORKER)
    function: Any = getattr(module, "get_worker_info", None)  # None: not imported, or only partly
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_freevars and code is not _get_worker_info.__code__:
        module._sharded_loader_info = answer
        function.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    """Replacement code, which runs in the namespace of torch's module."""
    names = globals()
    info = names["_sharded_loader_info"]()
    return names["_worker_info"] if info is None else info


def worker_info(**fields: object) -> Any:
    """Create a ``WorkerInfo`` of torch, which is imported."""
    return sys.modules[_TORCH_WORKER].WorkerInfo(**fields)


def set_worker_info(**fields: object) -> None:
    """Mark this process as a worker in torch's sense."""
    vars(sys.modules[_TORCH_WORKER])["_worker_info"] = worker_info(**fields)


SEED_BYTES, WORD_BYTES = slice(0, 8), slice(24, 24 + 8 * 624)
"""Layout of the state of torch's CPU generator: the seed and the words of a Mersenne Twister."""


# -- threadpoolctl -----------------------------------------------------------------------------------------------------


def limit_to_one_thread(library: Any) -> None:
    """Limit a library, given by threadpoolctl, to one thread in a newly forked process.

    OpenBLAS would first start a thread per core, and each busy-waits for 30 ms. Without the name: it does.
    """
    if library.internal_api == "openblas" and library.threading_layer == "pthreads":
        with contextlib.suppress(AttributeError, ValueError):  # an old threadpoolctl, no such symbol
            ctypes.c_int.in_dll(library.dynlib, "blas_cpu_number").value = 1
            return
    library.set_num_threads(1)


# -- fsspec ------------------------------------------------------------------------------------------------------------


def path_of(system: Any, url: str) -> str:
    """Strip the protocol from a URL, as fsspec's file systems and their classes do."""
    return str(system._strip_protocol(url))


def close_session(system: Any) -> None:
    """Close the connections of a file system. Without the names: they are closed at exit.

    So are those of ``simplecache::http://``: fsspec shares the inner file system with the whole program.
    """
    if hasattr(system, "fs"):
        return
    session = getattr(system, "_session", None) or getattr(system, "_s3", None)
    close = getattr(system, "close_session", None)
    if session is not None and close is not None:
        close(system.loop, session)
