"""Workers start at once, with what they need, also in a process that the user has spawned."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from conftest import METHODS, PROCESS_POOLS
from programs import run_script, without_notices
from samples import Uneven

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.memory.publish import SCRIPT as SCRIPT_MODULE
from sharded_loader.memory.publish import publish, script_by_value

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")

DATA = """
import os
import numpy as np
IMPORTED_BY = os.getpid()
class Data:
    def __len__(self): return 4
    def __getitem__(self, i): return i, IMPORTED_BY, os.getpid(), os.getppid()
"""


def test_what_a_job_needs_is_known_by_name() -> None:
    dataset = SimpleDataset([Uneven(4), np.zeros(3), lambda: pytest.raises]).transform(os.path.basename)
    modules = publish(dataset).modules
    assert {"samples", os.path.__name__} <= modules and "torch" not in modules
    assert "torch" in publish([torch.zeros(3)]).modules
    assert {"numpy", "torch"} <= publish(lambda: (np.linalg, torch)).modules  # sent by value
    assert __name__ in publish(start_and_read).modules


def start_and_read(tmp_path: Path, check: str, data: str = DATA, before: str = "", **more: Any) -> Any:
    """Run a program that reads with a fork server, and checks something for each sample."""
    (tmp_path / "data.py").write_text(data)
    script = f"""
import data, multiprocess, os
from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
{before}
pool = ProcessPool(2, start_method="forkserver")
with ShardedDataLoader({more.pop("read", "data.Data(), 1")}, pool=pool) as loader:
    for batch in loader:
        {check}
"""
    return run_script(tmp_path / "script.py", script, **more)


@pytest.mark.slow
@posix
def test_the_forkserver_has_imported_what_dataset_batchify_and_transform_need(tmp_path: Path) -> None:
    for name in ("collating", "changing"):
        (tmp_path / f"{name}.py").write_text(
            f"import os\nIMPORTED_BY = os.getpid()\ndef {name}(*x): return (x, IMPORTED_BY)\n"
        )
    check = """(samples,), by_batchify = batch
        for (_, by_data, worker, server), by_transform in samples:
            assert worker in pool.pids
            assert by_data == by_transform == by_batchify == server, (by_data, by_transform, by_batchify)"""
    before = """import collating, changing
print("script runs")
class Wrapped(SimpleDataset):
    pass
dataset = Wrapped(data.Data()).transform(changing.changing)"""
    done = start_and_read(tmp_path, check, before=before, read="dataset, 2, batchify_fn=collating.collating")
    assert done.stdout == "script runs\n"


@pytest.mark.slow
@linux
def test_the_forkserver_has_one_thread_and_its_children_the_user_s_environment(tmp_path: Path) -> None:
    data = DATA.replace("IMPORTED_BY =", "import torch\na = np.ones((300, 300)); a @ a\nIMPORTED_BY =").replace(
        "i, IMPORTED_BY", "len(os.listdir(f'/proc/{os.getppid()}/task')), torch.get_num_threads(), IMPORTED_BY"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    check = """tasks, threads, by, worker, server = map(int, batch)
        assert (tasks, threads) == (1, 1) and by == server, (tasks, threads, by, server)
        process = multiprocess.get_context("forkserver").Process(target=data.child)
        process.start()
        process.join()
        assert process.exitcode == 0 and not [name for name in os.environ if name.startswith("SHARDED")]"""
    child = "def child():\n    assert not [name for name in os.environ if 'NUM_THREADS' in name or 'SHARDED' in name]\n"
    start_and_read(
        tmp_path, check, data + child, "del __file__  # a child does not run the program again", env=environment
    )


@posix
@pytest.mark.slow
@pytest.mark.parametrize("how", ["raise SystemExit(3)", "raise RuntimeError('twice')", "import nothing_of_this_name"])
def test_a_module_that_the_forkserver_cannot_import_is_left_to_the_workers(tmp_path: Path, how: str) -> None:
    fails_second_time = f"""import pathlib
count = pathlib.Path(__file__).with_suffix(".count")
count.open("a").write("x")  # two workers may write at once
if count.read_text() == "xx": {how}
"""
    start_and_read(tmp_path, "assert batch[1] == batch[2]", fails_second_time + DATA)
    assert len((tmp_path / "data.count").read_text()) >= 3  # trainer, forkserver, one worker or both


@posix
@pytest.mark.slow
def test_the_user_s_own_choice_of_preloads_is_respected(tmp_path: Path) -> None:
    start_and_read(tmp_path, "assert batch[1] == batch[2]", before='multiprocess.set_forkserver_preload(["json"])')


@pytest.mark.slow
@posix
def test_all_spawned_workers_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        textwrap.dedent("""
            import os, pathlib, sys, time
            if "--multiprocessing-fork" in sys.orig_argv:  # a worker: it goes on when all four have begun
                here = pathlib.Path(__file__).parent
                (here / f"{os.getpid()}.begun").touch()
                until = time.monotonic() + 30
                while len(list(here.glob("*.begun"))) < 4:
                    if time.monotonic() > until:
                        os._exit(3)
                    time.sleep(0.01)
        """)
    )
    run_script(
        tmp_path / "script.py",
        """
        from sharded_loader import ProcessPool, ShardedDataLoader
        with ShardedDataLoader(range(8), 1, pool=ProcessPool(4, start_method="spawn")) as loader:
            assert len(list(loader)) == 8
        """,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )


@pytest.mark.slow
def test_neither_the_main_process_nor_a_forked_worker_imports_what_it_does_not_need() -> None:
    """Beside torch a worker imports a module to answer for it. With mixtures that took 7 ms of each recovery, not 2."""
    program = (
        "import sys\nfrom sharded_loader import ProcessPool, ShardedDataLoader\n"
        "from sharded_loader.torch import DataLoader\n"
        "assert len(list(DataLoader(range(3)))) == 3\n"
        "class Modules:\n"
        "    def __len__(self): return 1\n"
        "    def __getitem__(self, index): return ' '.join(sys.modules)\n"
        "with ShardedDataLoader(Modules(), 1, pool=ProcessPool(1, start_method='fork')) as loader:\n"
        "    (names,) = next(iter(loader))\n"
        "assert 'sharded_loader.streams.worker_info' in names\n"
        "assert 'sharded_loader.storage.dataset' not in names\n"
        "assert 'torch._dynamo' not in names\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@posix
@pytest.mark.slow
def test_a_spawned_worker_imports_little_and_is_the_only_process_that_is_started(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import sys\nclass Data:\n    def __len__(self): return 1\n    def __getitem__(self, i):\n"
        "        return list(sys.modules)\n"
    )
    run_script(
        tmp_path / "script.py",
        """
        import psutil
        from data import Data
        from sharded_loader import ProcessPool, ShardedDataLoader
        pool = ProcessPool(2, start_method="spawn")
        with ShardedDataLoader(Data(), 1, batchify_fn=max, pool=pool) as loader:
            loaded = set(next(iter(loader)))
            assert {child.pid for child in psutil.Process().children(recursive=True)} == set(pool.pids)
        heavy = {"multiprocess", "dill", "cloudpickle", "threadpoolctl", "torch", "numpy.random", "hashlib", "json"}
        assert not loaded & heavy, loaded & heavy
        ours = [name for name in loaded if name.startswith("sharded_loader")]
        assert len(ours) < 41, (len(ours), ours)
        """,
    )


@METHODS
def test_global_generators_are_seeded_by_the_batch_whenever_they_are_imported(method: str) -> None:
    def drawn(index: int) -> Any:  # a spawned worker meets them in its first sample here
        return np.array([random.random(), np.random.random(), torch.rand(()).item()])

    def draw(pool: ProcessPool) -> list[float]:
        with ShardedDataLoader(SimpleDataset(range(12)).transform(drawn), 3, pool=pool, seed=5) as loader:
            return torch.cat([*loader, *loader]).flatten().tolist()

    found = draw(ProcessPool(2, start_method=method))
    assert len(set(found)) == 2 * 12 * 3
    assert found == draw(ProcessPool(1, start_method=PROCESS_POOLS[0]))


@posix
@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_multiprocess_in_a_worker_finds_itself_in_a_child_process(method: str) -> None:
    """And Python's own `multiprocessing`, which is asked by programs that do something in the main process only."""
    import multiprocess

    def asks(index: int) -> object:
        import logging
        import multiprocessing

        from multiprocess import current_process

        current, record = current_process(), logging.LogRecord("", 0, "", 0, "", None, None)
        names = {current.name, multiprocessing.current_process().name, record.processName}
        assert multiprocessing.parent_process() is not None and len(names) == 1
        return {"name": current.name, "daemon": current.daemon, "key": bytes(current.authkey).hex()}

    dataset, pool = SimpleDataset([0]).transform(asks), ProcessPool(1, start_method=method)
    with ShardedDataLoader(dataset, 1, pool=pool, batchify_fn=max) as loader:
        found = next(iter(loader))
    key = bytes(multiprocess.current_process().authkey).hex()
    assert found == {"name": "sharded_loader-worker-0", "daemon": True, "key": key}


@linux
def test_forked_workers_use_a_queue_that_the_main_process_has_used() -> None:
    """It has a thread in the main process, which a fork does not copy."""
    import multiprocessing

    queue: Any = multiprocessing.get_context("fork").Queue()

    def tells(index: int) -> int:
        queue.put(index)
        return index

    queue.put("main")
    assert queue.get() == "main"
    dataset, pool, told = SimpleDataset(range(4)).transform(tells), ProcessPool(2, start_method="fork"), set[int]()
    with ShardedDataLoader(dataset, 1, pool=pool) as loader:
        list(loader)
        while len(told) < 4:
            told.add(queue.get(timeout=30))
    queue.close()
    queue.join_thread()


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
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, without_notices(done.stderr)) == (0, "read __mp_main__\n", ""), done


def test_the_user_s_own_use_of_cloudpickle_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType(SCRIPT_MODULE)
    monkeypatch.setitem(sys.modules, SCRIPT_MODULE, script)
    for registered in (set(), {SCRIPT_MODULE}):
        if registered:
            cloudpickle.register_pickle_by_value(script)
        with script_by_value(), script_by_value():
            assert SCRIPT_MODULE in cloudpickle.list_registry_pickle_by_value()
        assert cloudpickle.list_registry_pickle_by_value() == registered
    cloudpickle.unregister_pickle_by_value(script)
