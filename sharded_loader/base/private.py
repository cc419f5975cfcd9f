"""Names of Python and of other libraries that are not public. They are used here, and in `drop_in.trainers`.

A new version of a library may drop such a name without notice. Each use says what happens then, and
``tests/base/test_private.py`` has a test for each name. Nothing here imports a library that is not imported already,
except where the caller needs that library anyway. Classes of this library that override methods of `multiprocess` or of
torch's loader stay with the pools and with the drop-in.
"""

from __future__ import annotations

import contextlib
import copyreg
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
    """Whether this thread has an `RLock`; `threading.Condition` asks in the same way."""
    return bool(lock._is_owned())


def is_being_imported(module: object) -> bool:
    """Whether the import of a module has begun and not ended. Without the name: no."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


def posix_shared_memory() -> Any:
    """The module with ``shm_open``, which makes no name that the resource tracker looks after.

    Raises:
        ImportError: there is none: memory is then a file.
    """
    import _posixshmem  # type: ignore[import-not-found]

    return _posixshmem


def slot_names(kind: type) -> Iterable[str]:
    """The attributes in the slots of a class and its bases."""
    names: Iterable[str] = copyreg._slotnames(kind)  # type: ignore[attr-defined]
    return names


def is_thread_of_others(thread: threading.Thread) -> bool:
    """Whether `threading` has not started this thread."""
    return isinstance(thread, threading._DummyThread)


# -- multiprocess and multiprocessing ----------------------------------------------------------------------------------


def fork_quietly(popen: object, started: object) -> None:
    """Fork as ``multiprocess`` does, without Python's warning about threads. Without the names: with the warning.

    From Python 3.12 on, a fork beside threads is followed by a DeprecationWarning, which the user cannot act on: the
    child runs only this library's code. A filter would not do, because all threads share the list of filters. Python
    drops a warning from code whose module has no name, so this one fork runs in a namespace without a name.
    """
    from multiprocess import popen_fork

    launch, made = popen_fork.Popen._launch, list[int]()

    def pipe() -> list[int]:
        made.extend(os.pipe())
        return made[-2:]

    if isinstance(launch, FunctionType):
        names = {**vars(popen_fork), "__name__": None, "os": SimpleNamespace(**{**vars(os), "pipe": pipe})}
        launch = FunctionType(launch.__code__, names, closure=launch.__closure__)
    try:
        launch(popen, started)
    except OSError:  # no process, or no descriptors: `multiprocess` leaves its pipes open
        popen_fork.util.close_fds(*made)
        raise


def forget_child(started: object) -> None:
    """Take a process out of the list of children that ``multiprocess`` looks after.

    It would send them SIGTERM and join them when the program ends, or when a child that the user forked ends; ours end
    by end-of-file. Without the name: they get the SIGTERM.
    """
    from multiprocess import process

    getattr(process, "_children", set()).discard(started)


def become_child(name: str, authkey: bytes, folder: str, tracker: int | None) -> None:
    """In a spawned worker: name, authentication key, daemon, as ``multiprocess`` itself passes them on."""
    from multiprocess import process, resource_tracker

    current: Any = process.current_process()
    current._name = name
    current._config.update(authkey=process.AuthenticationString(authkey), daemon=True)
    process.ORIGINAL_DIR = folder
    resource_tracker._resource_tracker._fd = tracker


def tracker_descriptor() -> int | None:
    """The descriptor of the resource tracker; None where none runs. Without the name: None, and a worker starts one."""
    from multiprocess import resource_tracker

    return getattr(getattr(resource_tracker, "_resource_tracker", None), "_fd", None)


def interpreter_flags() -> list[str]:
    """The options of this interpreter, for another one. Without the name: none."""
    from multiprocess import util

    flags: list[str] = getattr(util, "_args_from_interpreter_flags", list)()
    return flags


def has_forkserver_preload() -> bool:
    """Whether the user has chosen what the forkserver imports. Without the name: yes."""
    from multiprocess import forkserver

    return bool(getattr(forkserver._forkserver, "_preload_modules", None) != ["__main__"])


def forget_forkserver() -> int | None:
    """In a forked child: the forkserver is the parent's, and ``multiprocess`` would wait for it as for a child.

    Returns:
        The descriptor that keeps the forkserver alive, to be closed; None where none runs.
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
    """Have ``multiprocess`` send its new processes what ``change`` makes of the data that it would send."""
    from multiprocess import spawn

    original = spawn.get_preparation_data
    spawn.get_preparation_data = lambda name: change(original(name))


# -- cloudpickle -------------------------------------------------------------------------------------------------------


def tracker_of(cls: type) -> str | None:
    """The mark by which cloudpickle knows a class that it sends by value. Without the name: None."""
    tracker: str | None = _cloudpickle("_DYNAMIC_CLASS_TRACKER_BY_CLASS").get(cls)
    return tracker


def tracked_class(tracker: str | None) -> type | None:
    """The class with this mark."""
    found: type | None = _cloudpickle("_DYNAMIC_CLASS_TRACKER_BY_ID").get(tracker)
    return found


def _cloudpickle(table: str) -> Any:
    return getattr(sys.modules.get("cloudpickle.cloudpickle"), table, {})  # not loaded: it has brought no class


# -- torch -------------------------------------------------------------------------------------------------------------


def find_profiler_enabled() -> Callable[[], bool]:
    """The function that tells whether torch's profiler runs. Without the name: it never does."""
    enabled: Callable[[], bool] = getattr(sys.modules["torch"].autograd, "_profiler_enabled", lambda: False)
    return enabled


def skip_compiling(functions: Iterable[FunctionType]) -> None:
    """Have Dynamo, which is imported, compile neither these functions, nor what they call, nor this library.

    Before torch 2.7 what they call may be compiled. Without the names: it is.
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
    """Take Dynamo's hook out of this thread, which has inherited it by a fork. Without the name: it stays."""
    hook: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    if hasattr(hook, "set_eval_frame"):
        hook.set_eval_frame(None)


_TORCH_WORKER = "torch.utils.data._utils.worker"


def answer_for_torch(answer: Callable[[], object]) -> None:
    """Have torch's ``get_worker_info()`` return what ``answer`` returns, if that is not None, once torch is imported.

    The function stays the same object, because datasets import it by name. Without the name: torch answers by itself.
    """
    module: Any = sys.modules.get(_TORCH_WORKER)
    function: Any = getattr(module, "get_worker_info", None)  # None: it is not imported, or only half of it
    code = getattr(function, "__code__", None)
    if code is not None and not code.co_freevars and code is not _get_worker_info.__code__:
        module._sharded_loader_info = answer
        function.__code__ = _get_worker_info.__code__


def _get_worker_info() -> Any:
    """Its code runs in torch's module, where these names are."""
    names = globals()
    info = names["_sharded_loader_info"]()
    return names["_worker_info"] if info is None else info


def worker_info(**fields: object) -> Any:
    """What ``get_worker_info()`` returns, as an object of torch, which is imported."""
    return sys.modules[_TORCH_WORKER].WorkerInfo(**fields)


def set_worker_info(**fields: object) -> None:
    """This process is a worker of torch's kind."""
    module: Any = sys.modules[_TORCH_WORKER]
    module._worker_info = worker_info(**fields)


SEED_BYTES, WORD_BYTES = slice(0, 8), slice(24, 24 + 8 * 624)
"""Where torch keeps the seed and the words of a Mersenne Twister in the state of a CPU generator."""


# -- threadpoolctl -----------------------------------------------------------------------------------------------------


def limit_to_one_thread(library: Any) -> None:
    """Limit a library to one thread, in a process that was just forked.

    There OpenBLAS would start a thread for every core before it takes the limit, and each waits actively for 30 ms.
    Without the name: it does.

    Args:
        library: as a controller of threadpoolctl has it.
    """
    if library.internal_api == "openblas" and library.threading_layer == "pthreads":
        with contextlib.suppress(AttributeError, ValueError):  # an old threadpoolctl, no such symbol
            ctypes.c_int.in_dll(library.dynlib, "blas_cpu_number").value = 1
            return
    library.set_num_threads(1)


# -- fsspec ------------------------------------------------------------------------------------------------------------


def path_of(system: Any, url: str) -> str:
    """A URL as a file system of fsspec knows it, or as a class of file systems does."""
    return str(system._strip_protocol(url))


def close_session(system: Any) -> None:
    """Close the connections of a file system. Without the names: they are closed when the program ends.

    So are those of ``simplecache::http://``: fsspec shares the file system inside with the whole program.
    """
    if hasattr(system, "fs"):
        return
    session = getattr(system, "_session", None) or getattr(system, "_s3", None)
    close = getattr(system, "close_session", None)
    if session is not None and close is not None:
        close(system.loop, session)
