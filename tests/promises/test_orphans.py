"""P7: whatever becomes of the trainer, and whatever the workers are doing, no process stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import METHODS, PROCESS_POOLS, make_pool, shared_memory_names
from failures import hangs_with_the_gil

from sharded_loader import ProcessPool, ShardedDataLoader

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of it: Linux")

PATIENCE = 60.0
"""Seconds in which orphans are gone. On an idle machine it is a few hundredths."""

TRAINER = """
import ctypes, os, pathlib, sys, time
from sharded_loader import ProcessPool, ShardedDataLoader

method, ending, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])

class Holds:
    def __len__(self): return 8
    def __getitem__(self, i):
        if i >= 2:
            (folder / str(os.getpid())).touch()
            ctypes.PyDLL(None).sleep(600)  # in C, with the GIL
        return i

pool = ProcessPool(2, start_method=method)
loader = ShardedDataLoader(Holds(), 1, pool=pool, prefetch=4)
iterator = iter(loader)
next(iterator), next(iterator)
child = 0
if ending == "child":
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
while not all((folder / str(pid)).exists() for pid in pool.pids):
    time.sleep(0.01)
zygote = pool._transport.zygote
print(child, zygote._process.pid if zygote else 0, *pool.pids, flush=True)
time.sleep(0.1)  # they are in the call
if ending == "close":
    began = time.monotonic()
    loader.close()
    print(time.monotonic() - began)
elif ending == "return":
    pass
elif ending == "_exit":
    os._exit(0)
else:
    time.sleep(60)
"""


def lives(pid: int) -> bool:
    """Whether it is there and no zombie, which is its reaper's affair."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def seconds_until_gone(pids: Iterable[int]) -> float:
    began = time.monotonic()
    left = list(pids)
    while left := [pid for pid in left if lives(pid)]:
        if time.monotonic() - began > PATIENCE:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"still there after {PATIENCE} s: {left}")
        time.sleep(0.002)
    return time.monotonic() - began


# Programs of their own take seconds each: most are left to `make test-all`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "ending"),
    [
        pytest.param(method, ending, marks=() if ending == "alone" and method != "forkserver" else pytest.mark.slow)
        for ending in ("alone", "child", "_exit", "return")
        for method in PROCESS_POOLS
    ],
)
def test_workers_that_hold_the_gil_go_with_their_trainer(
    method: str, ending: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    """Killed; killed while a child that the user forked lives on; left by ``os._exit``; at its end."""
    script, folder = tmp_path / "script.py", tmp_path / "begun"
    folder.mkdir()
    script.write_text(textwrap.dedent(TRAINER))
    names = shared_memory_names()
    with subprocess.Popen(
        [sys.executable, str(script), method, ending, str(folder)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        child, *pids = map(int, trainer.stdout.readline().split())
        if ending in ("alone", "child"):
            time.sleep(0.1)
            trainer.kill()
        trainer.wait(300)
        try:
            seconds = seconds_until_gone(pid for pid in pids if pid)
            assert (child == 0) or lives(child)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
    record_property("from the trainer's end to the last worker's, s", seconds)
    print(f"{method}, {ending}: the workers were gone after {1000 * seconds:.0f} ms")
    assert shared_memory_names() <= names


@METHODS
def test_workers_that_hold_the_gil_from_their_first_line_go_with_their_trainer(method: str, tmp_path: Path) -> None:
    """In worker_init_fn, before any thread of theirs has had a turn."""

    def holds(number: int) -> None:
        c = ctypes.PyDLL(None)
        c.creat(os.fsencode(tmp_path / str(os.getpid())), 0o600)  # not in Python, which lets others have the GIL
        c.sleep(600)

    trainer = os.fork()
    if trainer == 0:
        try:
            pool = ProcessPool(2, start_method=method, worker_init_fn=holds)
            next(iter(ShardedDataLoader(range(8), 1, pool=pool)))
        finally:
            os._exit(1)
    while len(pids := os.listdir(tmp_path)) < 2:
        assert os.waitpid(trainer, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    time.sleep(0.1)  # they are in the call
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    seconds_until_gone(map(int, pids))


class Holds:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        (self.folder / str(os.getpid())).touch()
        hangs_with_the_gil()
        return index


@METHODS
def test_close_does_not_wait_for_workers_that_hold_the_gil(
    method: str, tmp_path: Path, record_property: Callable[[str, Any], None]
) -> None:
    pool = make_pool(method)
    assert isinstance(pool, ProcessPool)
    loader = ShardedDataLoader(Holds(tmp_path), 1, pool=pool, prefetch=2)
    iterator = iter(loader)
    pids = pool.pids
    while not all((tmp_path / str(pid)).exists() for pid in pids):
        time.sleep(0.01)
    time.sleep(0.05)  # they are in the call
    zygote = pool._transport.zygote
    everybody = [*pids, *([zygote._process.pid] if zygote is not None else [])]
    began = time.monotonic()
    loader.close()
    seconds = time.monotonic() - began
    record_property("close, ms", 1000 * seconds)
    print(f"{method}: closed in {1000 * seconds:.0f} ms")
    # Reaped, too: not even a zombie.
    assert [pid for pid in everybody if psutil.pid_exists(pid) and method != "forkserver"] == []
    seconds_until_gone(everybody)
    del iterator


@METHODS
def test_idle_workers_end_by_themselves(method: str, record_property: Callable[[str, Any], None]) -> None:
    pool = make_pool(method)
    assert isinstance(pool, ProcessPool)
    with ShardedDataLoader(range(8), 1, pool=pool) as loader:
        assert len(list(loader)) == 8
        began = time.monotonic()
    seconds = time.monotonic() - began
    record_property("close, ms", 1000 * seconds)
    print(f"{method}: closed in {1000 * seconds:.0f} ms")


@pytest.mark.slow
def test_workers_of_a_killed_zygote_end_with_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from sharded_loader import ProcessPool, ShardedDataLoader
        pool = ProcessPool(2, start_method="fork")
        loader = ShardedDataLoader(range(8), 1, pool=pool)
        iterator = iter(loader)
        next(iterator), next(iterator)  # the zygote is made behind the first batch
        first = pool._transport.zygote._process.pid
        os.kill(first, signal.SIGKILL)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert len(list(iterator)) == 6
        while pool._transport.zygote._process.pid == first:  # until the kernel has got round to it
            assert len(list(loader)) == 8
        print(pool._transport.zygote._process.pid, *pool.pids, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = list(map(int, trainer.stdout.readline().split()))
        trainer.kill()
    assert len(pids) == 3
    seconds_until_gone(pids)
