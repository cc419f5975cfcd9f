"""What only processes can get wrong: start methods, identity of classes, pipes, signals, threads, memory."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import platform
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import multiprocess
import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, PROCESS_POOLS, SPAWN_FIRST, ahead
from injection import InterruptAt
from multiprocess import spawn
from programs import run_script
from refusing import in_child
from samples import Large, StartsAndDies, page_faults

from sharded_loader import ProcessPool, RayPool, ShardedDataLoader, SimpleDataset, ThreadPool, sample_rng
from sharded_loader.base import limits
from sharded_loader.base.limits import own_bytes, private_bytes
from sharded_loader.engine.messages import Job
from sharded_loader.memory import segments
from sharded_loader.pools.process import link, transport
from sharded_loader.pools.process.start import (
    choose_start_method,
    is_starting_worker,
    start_forkserver,
    starting_worker,
)
from sharded_loader.torch import DataLoader


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [(), ("forgotten",)], ids=["held", "forgotten"])
@SPAWN_FIRST
def test_a_script_needs_no_guard_and_its_batches_have_its_classes_also_after_it_has_defined_others(
    tmp_path: Path, method: str, forgotten: tuple[str, ...]
) -> None:
    """As a notebook does in a cell that is run again: workers go on with the classes that the dataset was made with."""
    done = run_script(
        tmp_path / "script.py",
        """
        import gc, sys
        print("script runs")
        import numpy as np
        from collections import namedtuple
        from dataclasses import dataclass
        from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset

        class MyError(ValueError):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
                self.b = b

        Point = namedtuple("Point", "x y")

        @dataclass
        class Pair:
            x: object
            y: object

            @dataclass
            class Inner:
                z: object

        class Data:
            seen = "class attribute"
            def __len__(self): return 14
            def __getitem__(self, i):
                if i == 3: raise MyError(i, "more")
                if i == 13: raise Late(i)
                return Pair(Point(np.float32(i * i), f"s{i}"), Pair.Inner(-i))

        class Late(ValueError): pass

        Data.seen = "changed"
        pool = ProcessPool(1, start_method=sys.argv[1], worker_init_fn=lambda n: None)
        loader = ShardedDataLoader(Data(), 2, pool=pool, prefetch=1)
        iterator = iter(loader)
        batch = next(iterator)
        assert type(batch) is Pair and type(batch.x) is Point and type(batch.y) is Pair.Inner, batch
        assert batch.x.x.tolist() == [0, 1] and batch.x.y == ["s0", "s1"]
        try:
            next(iterator)
        except MyError as error:
            assert type(error) is MyError and error.b == "more" and str(error) == "3 and more"
        else:
            raise SystemExit("no error")
        old = type(batch), Pair.Inner

        @dataclass
        class Pair:
            x: object
            y: object
            more: object
            def __setstate__(self, state): raise RuntimeError("the new class was given an old state")

        class Late(ValueError): pass

        if len(sys.argv) > 2:
            old = batch = None
            gc.collect()
        for _ in range(4):
            batch = next(iterator)
            assert type(batch) is not Pair and type(batch).__name__ == "Pair" and type(batch.y).__name__ == "Inner"
            assert old is None or (type(batch) is old[0] and type(batch.y) is old[1])
        try:
            next(iterator)
        except ValueError as error:
            # Under fork an error has the name that it has now. A spawned worker's classes came with the dataset.
            assert sys.argv[1] != "fork" or isinstance(error, Late)
            print(error.args)
        assert Data.seen == "changed"
        loader.close()

        doubled = SimpleDataset(range(4)).transform(lambda x: 2 * x)
        print([b.tolist() for b in ShardedDataLoader(doubled, 4, pool=ProcessPool(1, start_method=sys.argv[1]))])
        """,
        method,
        *forgotten,
    )
    assert done.stdout == "script runs\n(13,)\n[[0, 2, 4, 6]]\n"


def test_only_our_own_workers_do_not_run_the_user_s_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/script.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert "init_main_from_path" in spawn.get_preparation_data("theirs")
    with starting_worker():
        assert "init_main_from_path" not in spawn.get_preparation_data("ours")


def test_a_start_is_known_in_its_own_thread_alone_and_is_not_interrupted() -> None:
    def held_back() -> bool:
        return hasattr(signal, "pthread_sigmask") and signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    seen: list[bool] = []
    with starting_worker():
        thread = threading.Thread(target=lambda: seen.append(is_starting_worker()))
        thread.start()
        thread.join()
        assert is_starting_worker() and seen == [False]
        assert held_back() or not hasattr(signal, "pthread_sigmask")
    assert not is_starting_worker() and not held_back()


def test_a_worker_process_may_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocess.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="num_workers=0, or threads"):
        transport.ProcessTransport(1, "spawn", None).launch(0, Job(range(3), None, 0))


def test_the_start_method_that_the_user_set_is_the_default() -> None:
    def work() -> str:
        multiprocessing.set_start_method("spawn", force=True)
        return repr(ProcessPool(1))

    assert in_child(work) == "ProcessPool(1, start_method='spawn')"
    assert choose_start_method("forkserver") == "forkserver"


@pytest.mark.skipif(not os.path.isdir("/dev/fd"), reason="this platform does not list descriptors")
def test_a_ctrl_c_while_the_start_method_is_chosen_leaves_no_descriptor() -> None:
    opened = len(os.listdir("/dev/fd"))
    for number in itertools.count(1):
        before, tracer = sys.gettrace(), InterruptAt(number, ["system.py", "start.py"])
        with contextlib.suppress(KeyboardInterrupt):
            try:
                sys.settrace(tracer)
                choose_start_method("forkserver")
            finally:
                sys.settrace(before)
        assert len(os.listdir("/dev/fd")) == opened, number
        if not tracer.fired:
            break


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="this platform blocks no signals")
def test_a_ctrl_c_as_the_forkserver_starts_leaves_the_signal_unblocked(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = signal.pthread_sigmask

    def with_late_signal(how: int, signals: Any) -> Any:
        """To block signals runs the handler of one that has just come."""
        found, handler = mask(how, signals), signal.getsignal(signal.SIGINT)
        if (how, set(signals)) == (signal.SIG_BLOCK, {signal.SIGINT}) and callable(handler):
            handler(signal.SIGINT, None)
        return found

    monkeypatch.setattr(signal, "pthread_sigmask", with_late_signal)
    with pytest.raises(KeyboardInterrupt):
        start_forkserver()
    assert signal.SIGINT not in mask(signal.SIG_UNBLOCK, {signal.SIGINT})


def test_classes_of_a_function_keep_their_identity(process_pool: ProcessPool) -> None:
    class Point(NamedTuple):
        x: Any

    class Local(Exception):
        pass

    def read(index: int) -> Any:
        if index == 2:
            raise Local(index)
        return Point(index), Local(index), Local

    with ShardedDataLoader(SimpleDataset(range(4)).transform(read), 2, pool=process_pool) as loader:
        iterator = iter(loader)
        points, others, classes = next(iterator)
        assert type(points) is Point and classes == [Local, Local]
        assert [type(other) for other in others] == [Local, Local]
        with pytest.raises(Local):
            next(iterator)


def test_tasks_that_the_pipe_does_not_take_at_once_arrive_later(process_pool: ProcessPool) -> None:
    class Lengths(dict[str, int]):
        def __getitem__(self, key: str) -> int:
            return len(key)

    keys = [letter * (1 << 20) for letter in "abcdefgh"]
    with ShardedDataLoader(Lengths(), 1, sampler=keys, pool=process_pool, prefetch=6) as loader:
        assert [batch.tolist() for batch in loader] == [[1 << 20]] * 8


@pytest.mark.slow
@METHODS
@pytest.mark.parametrize("portable", [False, True])
def test_large_tasks_and_large_results_do_not_wait_for_each_other(
    method: str, portable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if portable and method == "forkserver":
        pytest.skip("it runs since the first test, with other pipes")
    if portable:
        monkeypatch.setenv("SHARDED_LOADER_PORTABLE", "1")
        for module in (segments, link, transport):
            monkeypatch.setattr(module, "PORTABLE", True)
    size = 100_000  # a task of 400 KB pickled, a result of 800 KB
    options = {"pool": ProcessPool(2, start_method=method), "prefetch": 10, "batchify_fn": np.array}
    with ShardedDataLoader(range(1_000_000), size, **options) as loader:  # type: ignore[arg-type]
        for number, batch in enumerate(loader):
            assert batch[0] == number * size
            assert batch[-1] == (number + 1) * size - 1


@pytest.mark.slow
def test_a_worker_that_imports_torch_late_is_a_worker_to_torch(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import sys\n"
        "class Lazy:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i):\n"
        "        had = int('torch' in sys.modules)\n"
        "        import torch\n"
        "        info = torch.utils.data.get_worker_info()\n"
        "        return had, info.id, info.num_workers, torch.get_num_threads(), int(info.dataset is not None)\n"
    )
    done = run_script(
        tmp_path / "script.py",
        """
        from data import Lazy
        from sharded_loader import ProcessPool, ShardedDataLoader
        for method in ("spawn", "forkserver"):
            with ShardedDataLoader(Lazy(), 1, pool=ProcessPool(1, start_method=method)) as loader:
                print([part.tolist() for part in next(iter(loader))])
        """,
    )
    assert done.stdout == "[[0], [0], [1], [1], [1]]\n" * 2


def test_a_worker_has_its_number_a_seed_of_its_own_and_one_thread(process_pool: ProcessPool) -> None:
    def read(index: int) -> tuple[int, ...]:
        import threadpoolctl

        info: Any = torch.utils.data.get_worker_info()
        blas = max((library["num_threads"] for library in threadpoolctl.threadpool_info()), default=1)
        return state["number"], info.id, info.num_workers, torch.get_num_threads(), blas, info.seed

    def init(number: int) -> None:
        info: Any = torch.utils.data.get_worker_info()
        assert info.seed == torch.initial_seed()
        state["number"] = number

    def seeds(seed: int, workers: int) -> set[int]:
        pool = ProcessPool(workers, start_method=process_pool.start_method, worker_init_fn=init)
        with ShardedDataLoader(SimpleDataset(range(8)).transform(read), 1, pool=pool, seed=seed) as loader:
            rows = [[int(part[0]) for part in batch] for batch in loader]
        assert {row[0] for row in rows} <= {*range(workers)}
        assert all(row[0] == row[1] and row[2:5] == [workers, 1, 1] for row in rows)
        return {row[5] for row in rows}

    state: dict[str, int] = {}
    before = torch.get_num_threads()
    assert not seeds(1, workers=2) & seeds(2, workers=1)  # seed + number would be the same in two of them
    assert torch.get_num_threads() == before
    assert torch.utils.data.get_worker_info() is None


@pytest.mark.slow
@SPAWN_FIRST
@pytest.mark.parametrize("ending", ["live", "raise", "exit", "break"])
def test_leaving_the_program_in_mid_epoch_is_silent(method: str, ending: str) -> None:
    script = """
        import sys
        from sharded_loader import ProcessPool, ShardedDataLoader
        class Data:
            def __len__(self): return 4000
            def __getitem__(self, i): return i
        pool = ProcessPool(2, start_method=sys.argv[1])
        loader = ShardedDataLoader(Data(), 4, pool=pool)
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            if number == 2:
                if sys.argv[2] == "raise": raise ValueError("the user's own")
                if sys.argv[2] == "exit": sys.exit(3)
                break
        if sys.argv[2] == "break": del iterator, loader
        print(*pool.pids)
    """
    program = [sys.executable, "-c", textwrap.dedent(script), method, ending]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == {"raise": 1, "exit": 3}.get(ending, 0)
    noise = [line for line in done.stderr.splitlines() if line and not line.startswith((" ", "Traceback"))]
    assert noise == (["ValueError: the user's own"] if ending == "raise" else [])
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())


def test_a_proxy_in_the_main_module_is_left_alone(monkeypatch: pytest.MonkeyPatch, worker_pool: Any) -> None:
    """Like those of web frameworks: outside of a request, its class cannot be asked for."""
    of_class = property(Mock(side_effect=RuntimeError("working outside of request context")))
    proxy = type("Proxy", (), {"__class__": of_class})()
    monkeypatch.setitem(vars(sys.modules["__main__"]), "request", proxy)  # pytest 8.3's setattr asks for the class
    with ShardedDataLoader(range(4), 2, pool=worker_pool) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]


def test_a_forked_child_of_the_user_cannot_use_the_loader_and_harms_nothing(worker_pool: Any) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this platform has no fork")
    with ShardedDataLoader(range(100), 2, pool=worker_pool) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        assert re.search("RuntimeError: .*forked child", in_child(lambda: next(iterator)))
        assert in_child(worker_pool.closer()) == "None"  # a finalizer, which sys.exit runs
        assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(2, 100, 2)]
        assert loader.stats().replaced_workers == 0


def test_a_grandchild_that_holds_the_pipe_does_not_hide_a_death(process_pool: ProcessPool, tmp_path: Path) -> None:
    with ShardedDataLoader(StartsAndDies("fork", tmp_path), 4, pool=process_pool) as loader:
        assert [index for batch in loader for index in batch.tolist()] == list(range(40))
    os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


@METHODS
@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
def test_nobody_waits_for_the_lock_of_progress_bars_that_a_killed_process_holds(method: str) -> None:
    """All forked processes share it."""
    tqdm = pytest.importorskip("tqdm.std").tqdm
    usual, lock = tqdm.get_lock(), multiprocessing.RLock()

    def with_progress(index: int) -> int:
        return sum(tqdm([index], disable=True))  # a bar that nobody sees, as Hugging Face's datasets make it

    tqdm.set_lock(lock)
    try:
        dies = multiprocessing.get_context("fork").Process(target=lambda: lock.acquire() and os.kill(os.getpid(), 9))
        dies.start()
        dies.join()
        data = SimpleDataset(range(12)).transform(with_progress)
        with ShardedDataLoader(data, 4, pool=ProcessPool(2, start_method=method)) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    finally:
        tqdm.set_lock(usual)


# -- `max_worker_memory=`: a worker that has grown past it is replaced between two batches -----------------------------

MB = 1 << 20


class Leaks:
    """Each sample leaves memory behind."""

    def __init__(self, nbytes: int, count: int = 200) -> None:
        self.nbytes, self.count = nbytes, count
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.kept.append(np.ones(self.nbytes, np.uint8))
        return np.array([index, sample_rng().random(), psutil.Process().memory_info().rss, private_bytes()])


def fresh(method: str) -> int:
    """What a worker takes that has read a batch."""
    with ShardedDataLoader(Leaks(0, 1), 1, pool=ProcessPool(1, start_method=method)) as loader:
        return int(next(iter(loader))[0, 3])


@pytest.mark.slow
@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_dataset_that_leaks_reads_on_in_bounded_memory(method: str, caplog: Any) -> None:
    data, limit = Leaks(2 * MB), fresh(method) + 40 * MB
    with ShardedDataLoader(data, 4, shuffle=True, seed=1, num_workers=1, thread_pool=True) as loader:
        expected = [batch[:, :2].tolist() for batch in loader]
    data.kept.clear()
    pool = ProcessPool(2, start_method=method, max_worker_memory=limit, restarts=0)
    with ahead(ShardedDataLoader(data, 4, shuffle=True, seed=1, pool=pool), False) as loader:
        for _ in range(2):
            batches = [batch.numpy() for batch in loader]
            assert loader.stats(0).recycled_workers > 0
            loader.set_epoch(0)
            assert [batch[:, :2].tolist() for batch in batches] == expected
        stats = loader.stats()
        growth = np.concatenate(batches)[:, 2].max() - np.concatenate(batches)[:, 2].min()
    assert stats.recycled_workers >= 2 and stats.replaced_workers == 0 and "replaced" not in str(stats)
    assert growth < 200 * MB, "without the limit it is 800 MB"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("method", PROCESS_POOLS[:1])
def test_a_limit_below_what_a_new_worker_takes_is_an_error_with_both_numbers(method: str) -> None:
    pool = ProcessPool(2, start_method=method, max_worker_memory="1 MB")
    with ShardedDataLoader(Leaks(0, 100_000), 4, pool=pool) as loader:
        with pytest.raises(MemoryError, match=r"worker \d takes [\d,]{9,} bytes .* max_worker_memory allows 1,000,000"):
            list(loader)
        assert not pool.started


@pytest.mark.parametrize("limit", [0, -5, True, "much", []])
def test_wrong_limits(limit: Any) -> None:
    text = re.escape(f"max_worker_memory is {limit!r}: give a number of bytes above 0, or a text such as")
    for make in (ProcessPool, lambda _, **options: DataLoader([1], 1, num_workers=2, **options)):
        with pytest.raises(ValueError, match=text):
            make(2, max_worker_memory=limit)


def test_only_worker_processes_have_memory_of_their_own() -> None:
    for options in ({}, {"num_workers": 2, "thread_pool": True}):
        with pytest.raises(ValueError, match="max_worker_memory='2 GB' needs worker processes on this machine"):
            DataLoader([1], 1, max_worker_memory="2 GB", **options)  # type: ignore[arg-type]
    for kind in (ThreadPool, RayPool):
        with pytest.raises(TypeError, match="max_worker_memory"):
            kind(2, max_worker_memory=1 << 30)  # type: ignore[operator]


def test_a_text_says_the_bytes_and_the_repr_makes_the_pool_again() -> None:
    assert repr(ProcessPool(1, max_worker_memory="1.5 GB")).endswith("max_worker_memory=1500000000)")


def test_shared_memory_and_pages_of_a_fork_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("9999 1000 300 1 0 500 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert own_bytes(tmp_path) == private_bytes(tmp_path) == 700 * page, "where the kernel has no smaps_rollup"
    rollup = "Rss: 5000 kB\nShared_Dirty: 300 kB\nPrivate_Clean: 40 kB\nPrivate_Dirty: 2 kB\nSwap: 9 kB\n"
    (tmp_path / "proc/self/smaps_rollup").write_text(rollup)
    assert (own_bytes(tmp_path), private_bytes(tmp_path)) == (700 * page, 42 << 10)


def test_without_proc_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_bytes(tmp_path) > MB
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(limits.own_bytes, "__defaults__", (tmp_path,))
    with pytest.raises(ImportError, match="max_worker_memory needs psutil on this system: pip install psutil"):
        ProcessPool(1, max_worker_memory="1 GB")


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators keep what they like")
@METHODS
def test_a_worker_uses_the_memory_of_its_last_samples_again(method: str) -> None:
    pool = ProcessPool(1, start_method=method)
    with ShardedDataLoader(Large(160), 16, batchify_fn=page_faults, pool=pool) as loader:
        faults = np.diff(list(loader))
    pages = 16 * 600_000 // os.sysconf("SC_PAGE_SIZE")
    assert faults[-5:].max() < pages // 2, "page faults of a batch"
