"""P7: whatever becomes of the trainer, and whatever the workers are doing, no process stays behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest
from conftest import METHODS, PROCESS_POOLS, begin, make_pool, shared_memory_names, until
from failures import hangs_with_the_gil
from inside import zygote_pids

from sharded_loader import ProcessPool, ShardedDataLoader

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's part of it: Linux")

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
if ending == "_exit":
    os._exit(0)
elif ending != "return":
    time.sleep(60)
"""


def lives(pid: int) -> bool:
    """Whether it is there and no zombie, which is its reaper's affair."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: Iterable[int]) -> None:
    """All of them end. On an idle machine it takes a few hundredths of a second."""
    left = [*pids]
    try:
        assert until(lambda: not any(map(lives, left)), 60.0), left
    finally:
        for pid in filter(lives, left):
            os.kill(pid, signal.SIGKILL)


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
def test_workers_that_hold_the_gil_go_with_their_trainer(method: str, ending: str, tmp_path: Path) -> None:
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
            trainer.kill()
        trainer.wait(300)
        try:
            assert_gone(pid for pid in pids if pid)
            assert (child == 0) or lives(child)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
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
    assert until(lambda: len(os.listdir(tmp_path)) == 2)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert_gone(map(int, os.listdir(tmp_path)))


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
def test_close_does_not_wait_for_workers_that_hold_the_gil(method: str, tmp_path: Path) -> None:
    pool = make_pool(method)
    assert isinstance(pool, ProcessPool)
    loader = ShardedDataLoader(Holds(tmp_path), 1, pool=pool, prefetch=2)
    waits = begin(loader)
    assert until(lambda: len(os.listdir(tmp_path)) == 2)
    everybody = [*pool.pids, *zygote_pids(pool)]
    loader.close()
    waits.join()
    # Reaped, too: not even a zombie.
    assert [pid for pid in everybody if psutil.pid_exists(pid) and method != "forkserver"] == []
    assert_gone(everybody)


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
        while (zygote := pool._transport.zygote) is None or zygote._process.pid == first:
            os.kill(pool.pids[0], signal.SIGKILL)  # another zygote is made for the next worker
            assert len(list(loader)) == 8
        print(zygote._process.pid, *pool.pids, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = list(map(int, trainer.stdout.readline().split()))
        trainer.kill()
    assert len(pids) == 3
    assert_gone(pids)
