"""The seam: names of the core, looked up when they are used."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from importlib import import_module

import pytest

from sharded_loader.base import checks
from sharded_loader.extend import tools


@pytest.mark.parametrize("module", ["extend", "extend.data", "extend.engine", "extend.order", "extend.tools"])
def test_every_name_is_there_is_shown_and_says_what_it_is(module: str) -> None:
    names = import_module(f"sharded_loader.{module}")
    assert len(set(names.__all__)) == len(names.__all__) > 0
    assert {*names.__all__, "__doc__"} <= {*dir(names)}
    found = [getattr(names, name) for name in names.__all__]
    aliases = [one for one in found if hasattr(one, "__origin__")]  # which Python 3.10 takes for classes
    named = [one for one in found if (inspect.isclass(one) and one not in aliases) or inspect.isfunction(one)]
    assert module != "extend" or [one for one in named if not one.__doc__] == []
    assert tools.check_int is checks.check_int and "check_int" in vars(tools)  # looked up once


def test_an_unknown_name_is_named() -> None:
    with pytest.raises(AttributeError, match=r"module 'sharded_loader.extend.tools' has no attribute 'chek_int'"):
        tools.chek_int
    with pytest.raises(ImportError, match="chek_int"):
        exec("from sharded_loader.extend.tools import chek_int")


def test_nothing_is_imported_before_it_is_used() -> None:
    program = "import sys; import sharded_loader.extend.data, sharded_loader.extend.engine; print(*sorted(sys.modules))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    ours = [name for name in found if name.startswith("sharded_loader.")]
    assert ours == ["sharded_loader.extend", "sharded_loader.extend.data", "sharded_loader.extend.engine"]
    assert "numpy" not in found


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each case needs torch's garbage, and torch an import of 3 s")
def test_an_import_leaves_the_garbage_collector_as_it_was() -> None:
    """A full collection, which takes 100 ms after torch, waits until much has been made."""
    program = """
import gc, os, threading, torch
full, over, calls = [], threading.Event(), []
gc.callbacks.append(lambda phase, about: full.append(phase) if about["generation"] == 2 else None)

def state():
    return gc.isenabled(), gc.get_freeze_count() // 1000

def after_a_freeze():
    gc.freeze(), gc.collect(1)

def beside_a_thread_which_may_fork():
    threading.Thread(target=over.wait).start()
    gc.disable = gc.freeze = lambda: calls.append("touched")

for begin in (lambda: None, gc.disable, after_a_freeze, beside_a_thread_which_may_fork):
    if (child := os.fork()) == 0:
        begin()
        before = state()
        from sharded_loader import ImageFolderDataset, ShardedDataLoader
        from sharded_loader.torch import DataLoader
        kept = [[] for _ in range(30_000)]
        print(calls if threading.active_count() > 1 else full, state() == before, flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] True\n" * 4
