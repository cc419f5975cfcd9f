"""The loader inside a process that the user has spawned: what the script defines is called ``__mp_main__`` there."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import cloudpickle
import pytest
from programs import run_script, without_notices

from sharded_loader.memory import publish

SCRIPT = """
import concurrent.futures, enum, multiprocessing, sys, typing
from collections import namedtuple
from dataclasses import dataclass

import multiprocess
import numpy as np

METHODS = ["spawn"] if sys.platform == "win32" else ["fork", "spawn", "forkserver"]
T = typing.TypeVar("T")
Pair = namedtuple("Pair", "x y")
SCALE = 10

class Color(enum.Enum):
    RED = 1

@dataclass
class Sample:
    value: int
    color: Color

class MyError(Exception):
    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")
        self.b = b

class Key:
    def __init__(self, value): self.value = value
    def __eq__(self, other): return type(other) is Key and other.value == self.value
    def __hash__(self): return hash(self.value)

class Base(typing.Generic[T]):
    def __len__(self): return 8

class Data(Base[T]):
    def __getitem__(self, index):
        if isinstance(index, Key): index = index.value
        if index == 7: raise MyError(index, "seven")
        return scaled(index)

def scaled(index): return SCALE * index

def batchify(samples): return Sample(sum(samples), Color.RED), Pair(*samples[:2])

def init(number): global SCALE; SCALE = 100

def use_loaders(*_):
    from sharded_loader import ProcessPool, ShardedDataLoader
    seen = []
    for method in METHODS:
        pool = ProcessPool(1, start_method=method)
        with ShardedDataLoader(Data(), 2, batchify_fn=batchify, pool=pool) as loader:
            batches = iter(loader)
            for _ in range(3):
                sample, pair = next(batches)
                assert type(sample) is Sample and sample.color is Color.RED and type(pair) is Pair, (sample, pair)
                seen.append(sample.value)
            try:
                next(batches)
            except MyError as error:
                assert error.args == ("7 and seven",) and error.b == "seven" and error.__cause__ is not None
            else:
                raise AssertionError("no error")
        keys = [[Key(1), Key(2)]]
        pool = ProcessPool(1, start_method=method, worker_init_fn=init)
        with ShardedDataLoader(Data(), batch_sampler=keys, batchify_fn=lambda samples: samples, pool=pool) as loader:
            assert list(loader) == [[100, 200]], list(loader)
        with ShardedDataLoader(Data(), 8, on_error="skip", pool=ProcessPool(1, start_method=method)) as loader:
            assert next(iter(loader)).tolist() == [0, 10, 20, 30, 40, 50, 60]
            assert [(index, type(error)) for index, error in loader.skipped] == [(7, MyError)]
    assert seen == [10, 50, 90] * len(METHODS), seen
    print("read", __name__, flush=True)
    return True

def process(context):
    child = context.Process(target=use_loaders)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode

def nested():
    process(multiprocessing.get_context("spawn"))

if __name__ == "__main__":
    how, _, method = sys.argv[1].partition(" ")
    if how == "torch":
        import torch.multiprocessing
        torch.multiprocessing.spawn(use_loaders, nprocs=1)
    elif how == "multiprocessing":
        process(multiprocessing.get_context(method))
    elif how == "multiprocess":
        process(multiprocess.get_context(method))
    elif how == "executor":
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            assert executor.submit(use_loaders).result()
    elif how == "nested":
        child = multiprocessing.get_context("spawn").Process(target=nested)
        child.start()
        child.join()
        assert child.exitcode == 0
    else:
        use_loaders()
"""

FORKSERVER = () if sys.platform == "win32" else ("multiprocessing forkserver", "executor forkserver")
HOW = ("torch", "alone", "multiprocessing spawn", "multiprocess spawn", "executor spawn", "nested", *FORKSERVER)


@pytest.mark.slow  # each is a chain of programs
@pytest.mark.parametrize("how", HOW)
def test_what_the_script_defines_reaches_workers_of_a_spawned_process_and_comes_back(tmp_path: Path, how: str) -> None:
    done = run_script(tmp_path / "script.py", SCRIPT, how)
    assert done.stdout == ("read __main__\n" if how == "alone" else "read __mp_main__\n")


@pytest.mark.slow
def test_a_module_that_is_run_as_a_program_is_a_script_too(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "program.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "package.program", "executor spawn"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, without_notices(done.stderr)) == (0, "read __mp_main__\n", ""), done


def test_the_user_s_own_use_of_cloudpickle_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType(publish.SCRIPT)
    monkeypatch.setitem(sys.modules, publish.SCRIPT, script)
    for registered in (set(), {publish.SCRIPT}):
        if registered:
            cloudpickle.register_pickle_by_value(script)
        with publish.script_by_value(), publish.script_by_value():
            assert publish.SCRIPT in cloudpickle.list_registry_pickle_by_value()
        assert cloudpickle.list_registry_pickle_by_value() == registered
    cloudpickle.unregister_pickle_by_value(script)
