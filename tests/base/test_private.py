"""Each name of others that is not public is still there, and where it is not, the library does something else."""

import ast
import ctypes
import hashlib
import importlib
import itertools
import signal
import sys
import threading
import types
from pathlib import Path

import multiprocess.forkserver
import multiprocess.popen_fork
import multiprocess.resource_tracker
import multiprocess.util
import numpy
import pytest
import threadpoolctl
import torch

from sharded_loader.base import private
from sharded_loader.base.imports import call_after_import, forget_import

NAMES = {
    "_blake2": "blake2b",
    "_posixshmem": "shm_open shm_unlink",
    "_signal": "getsignal",
    "_thread": "RLock._is_owned",
    "importlib.machinery": "ModuleSpec._initializing",
    "threading": "_DummyThread",
    "multiprocessing.popen_spawn_posix": "_DupFd",
    "multiprocessing.process": "_parent_process",
    "multiprocessing.reduction": "ForkingPickler._extra_reducers",
    "multiprocessing.util": "_run_after_forkers",
    "multiprocess.forkserver": "_forkserver._preload_modules _forkserver._forkserver_pid",
    "multiprocess.popen_fork": "Popen._launch.__code__",
    "multiprocess.popen_spawn_posix": "Popen._launch",
    "multiprocess.process": "_children BaseProcess._Popen ORIGINAL_DIR AuthenticationString",
    "multiprocess.resource_tracker": "_resource_tracker._fd",
    "multiprocess.spawn": "get_preparation_data get_executable",
    "multiprocess.util": "_args_from_interpreter_flags spawnv_passfds",
    "cloudpickle.cloudpickle": "_DYNAMIC_CLASS_TRACKER_BY_CLASS _DYNAMIC_CLASS_TRACKER_BY_ID",
    "numpy": "memmap._mmap",
    "torch": "_foreach_copy_",
    "torch.autograd": "_profiler_enabled",
    "torch._dynamo": "trace_rules.add",
    "torch._C._dynamo.eval_frame": "set_eval_frame",
    "torch.utils.data._utils.worker": "get_worker_info.__code__ WorkerInfo _worker_info",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter DataLoader._auto_collation DataLoader._index_sampler",
    "lightning.pytorch.loops": "_FitLoop",
    "lightning.fabric.wrappers": "_FabricDataLoader",
    "accelerate.state": "GradientState._add_dataloader GradientState._remove_dataloader",
    "fsspec.asyn": "AsyncFileSystem._strip_protocol",
}
"""By module: the names that this library uses."""

SLOW_TO_IMPORT = ("lightning.pytorch.loops", "lightning.fabric.wrappers", "accelerate.state", "torch._dynamo")

ON_OBJECTS = {"_initializing", "_mmap"}
"""Instances have them, and their classes do not."""


@pytest.mark.parametrize(
    ("module", "name"),
    [
        pytest.param(module, name, marks=pytest.mark.slow if module in SLOW_TO_IMPORT else ())
        for module, names in NAMES.items()
        for name in names.split()
    ],
)
def test_a_name_of_others_is_still_there(module, name):
    holder = pytest.importorskip(module)
    *path, last = name.split(".")
    for step in path:
        holder = getattr(holder, step, None)
    assert last in ON_OBJECTS or hasattr(holder, last), (
        f"{module} has no {name} any more. sharded_loader/base/private.py says what happens without it: look at what "
        f"the new version has in its place"
    )


def test_objects_have_the_names_that_their_classes_do_not_show(tmp_path):
    assert numpy.memmap(tmp_path / "file", numpy.uint8, "w+", shape=3)._mmap is not None
    assert private.is_being_imported(types.SimpleNamespace(__spec__=types.SimpleNamespace(_initializing=True)))
    assert not private.is_being_imported(threading) and hasattr(threading.__spec__, "_initializing")


@pytest.mark.lint
def test_private_names_of_others_stand_in_two_modules():
    """Attributes that this library sets nowhere. Some are documented; those of torch's loader are its base class's."""
    root = Path(private.__file__).parents[1]
    nodes = {path.relative_to(root).as_posix(): [*ast.walk(ast.parse(path.read_text()))] for path in root.rglob("*.py")}
    ours = {"_replace", "_asdict", "_make", "_fields", "_getframe", "_current_frames", "_exit"}
    ours |= {"_auto_collation", "_index_sampler", "_persistent_workers", "_pin_memory_device"}
    ours |= {"_sampler_iter", "_timeout", "_collate_fn"}
    for node in itertools.chain(*nodes.values()):
        if isinstance(getattr(node, "ctx", None), ast.Store) or hasattr(node, "body"):
            ours |= {str(getattr(node, name)) for name in ("name", "attr", "id") if hasattr(node, name)}
    uses = {
        f"{path}: {node.attr}"
        for path in nodes.keys() - {"base/private.py", "drop_in/trainers.py"}
        for node in nodes[path]
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")
        if node.attr not in ours
    }
    assert uses == set(), f"use these names of others in sharded_loader/base/private.py: {sorted(uses)}"


def test_a_lock_says_whether_this_thread_has_it_and_public_functions_serve_for_faster_ones(monkeypatch):
    lock, seen = threading.RLock(), list[bool]()
    assert not private.is_owned(lock)
    with lock:
        assert private.is_owned(lock)
        other = threading.Thread(target=lambda: seen.append(private.is_owned(lock)))
        other.start()
        other.join()
        assert seen == [False]
    assert not private.is_owned(lock)
    for name in ("_blake2", "_signal"):
        monkeypatch.setitem(sys.modules, name, None)
    spec = importlib.util.find_spec(private.__name__)
    assert spec is not None and spec.loader is not None
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert (again.blake2b, again.getsignal) == (hashlib.blake2b, signal.getsignal)
    assert again.blake2b(b"x").digest() == private.blake2b(b"x").digest()


def test_libraries_without_the_names_have_their_own_ways(monkeypatch):
    launched = []
    monkeypatch.setattr(multiprocess.popen_fork.Popen, "_launch", list.append)
    private.fork_quietly(launched, 5)
    assert launched == [5]
    monkeypatch.delattr(multiprocess.process, "_children")
    monkeypatch.delattr(multiprocess.resource_tracker, "_resource_tracker")
    monkeypatch.delattr(multiprocess.util, "_args_from_interpreter_flags")
    monkeypatch.setattr(multiprocess.forkserver, "_forkserver", object())
    private.forget_child(object())
    assert private.tracker_descriptor() is None and private.interpreter_flags() == []
    assert private.has_forkserver_preload() and private.forget_forkserver() is None
    monkeypatch.delattr(torch.autograd, "_profiler_enabled")
    for name in ("torch._dynamo", "torch._C._dynamo.eval_frame", "cloudpickle.cloudpickle"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    assert private.find_profiler_enabled()() is False
    private.skip_compiling([])
    private.end_compiling()
    assert private.tracker_of(int) is None and private.tracked_class("mark") is None
    private.close_session(object())
    assert not private.is_thread_of_others(threading.current_thread())


def test_openblas_takes_a_limit_without_being_called():
    """The name is there: OpenBLAS says that it has one thread."""
    numpy.ones((2, 2)) @ numpy.ones((2, 2))
    controllers = threadpoolctl.ThreadpoolController().lib_controllers
    found = [one for one in controllers if getattr(one, "threading_layer", "") == "pthreads"]
    if not found:
        pytest.skip("NumPy has no OpenBLAS with threads of its own")
    for library in found:
        before = library.num_threads
        private.limit_to_one_thread(library)
        assert library.num_threads == 1
        library.set_num_threads(before)


def test_a_library_without_the_name_is_called():
    own = {"internal_api": "openblas", "threading_layer": "pthreads", "dynlib": ctypes.CDLL(None)}
    old = {name: value for name, value in own.items() if name != "dynlib"}
    for library in (own, {**own, "threading_layer": "openmp"}, {**own, "internal_api": "mkl"}, old):
        called = []
        private.limit_to_one_thread(types.SimpleNamespace(**library, set_num_threads=called.append))
        assert called == [1]


# -- what waits for the import of a module is called once --------------------------------------------------------------


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module that can be imported, and is not."""
    (tmp_path / "imported_later.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "imported_later"
    forget_import("imported_later")
    sys.modules.pop("imported_later", None)


@pytest.mark.parametrize("forgotten", [False, True])
def test_the_last_function_is_called_once_when_the_module_is_imported_unless_forgotten(module, forgotten):
    called, before = list[str](), list(sys.meta_path)
    call_after_import(module, lambda: called.append("replaced"))
    call_after_import(module, lambda: called.append(sys.modules[module].value))
    assert called == []
    if forgotten:
        forget_import(module)
        assert sys.meta_path == before
    __import__(module)
    __import__(module)
    assert called == [5] * (not forgotten)
    call_after_import(module, lambda: called.append("at once"))
    assert called == [5] * (not forgotten) + ["at once"]
