"""What only processes can get wrong: start methods, identity of classes, pipes, signals, threads, memory."""

from __future__ import annotations

import contextlib
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, PROCESS_POOLS, SPAWN_FIRST, begin
from injection import InterruptAt
from programs import run_script

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.memory import codec as classes
from sharded_loader.pools.process.start import choose_start_method

# -- no guard, no second run of the script --------------------------------------------------------------------


@SPAWN_FIRST
@pytest.mark.slow
def test_a_script_needs_no_guard_and_its_classes_and_lambdas_work(tmp_path: Path, method: str) -> None:
    done = run_script(
        tmp_path / "script.py",
        """
        import sys
        print("script runs")
        import numpy as np
        from collections import namedtuple
        from dataclasses import dataclass
        from sharded_loader import ProcessPool, ShardedDataLoader

        class MyError(Exception):
            def __init__(self, a, b):
                super().__init__(f"{a} and {b}")
                self.b = b

        Pair = namedtuple("Pair", "x y")

        @dataclass
        class Sample:
            x: object
            name: str

        class Squares:
            seen = "class attribute"
            def __len__(self): return 8
            def __getitem__(self, i):
                if i == 5: raise MyError(i, "more")
                return Sample(Pair(np.float32(i * i), i), f"s{i}")

        Squares.seen = "changed"
        loader = ShardedDataLoader(Squares(), 2, pool=ProcessPool(2, start_method=sys.argv[1]))
        iterator = iter(loader)
        batch = next(iterator)
        assert type(batch) is Sample and type(batch.x) is Pair, batch
        assert batch.x.x.tolist() == [0, 1] and batch.name == ["s0", "s1"]
        next(iterator)
        try:
            next(iterator)
        except MyError as error:
            assert type(error) is MyError and error.b == "more" and str(error) == "5 and more"
        else:
            raise SystemExit("no error")
        assert next(iterator).x.y.tolist() == [6, 7]
        assert Squares.seen == "changed"

        from sharded_loader import SimpleDataset
        doubled = SimpleDataset(range(4)).transform(lambda x: 2 * x)
        pool = ProcessPool(1, start_method=sys.argv[1], worker_init_fn=lambda n: None)
        print([b.tolist() for b in ShardedDataLoader(doubled, 4, pool=pool)])
        """,
        method,
    )
    assert done.stdout == "script runs\n[[0, 2, 4, 6]]\n"


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", [(), ("forgotten",)], ids=["held", "forgotten"])
@METHODS
def test_a_cell_that_is_run_again_leaves_the_classes_of_the_batches_that_workers_make(
    tmp_path: Path, method: str, forgotten: tuple[str, ...]
) -> None:
    """As in a notebook: the workers go on with the classes that the dataset was made with."""
    done = run_script(
        tmp_path / "script.py",
        """
        import dataclasses, gc, sys
        from sharded_loader import ProcessPool, ShardedDataLoader

        @dataclasses.dataclass
        class Pair:
            x: object
            y: object

            @dataclasses.dataclass
            class Inner:
                z: object

        class Late(ValueError): pass

        class Data:
            def __len__(self): return 10
            def __getitem__(self, i):
                if i == 9: raise Late(i)
                return Pair(i, Pair.Inner(-i))

        loader = ShardedDataLoader(Data(), 2, pool=ProcessPool(1, start_method=sys.argv[1]), prefetch=1)
        iterator = iter(loader)
        old = type(next(iterator)), Pair.Inner
        assert old[0] is Pair

        @dataclasses.dataclass
        class Pair:
            x: object
            y: object
            more: object
            def __setstate__(self, state): raise RuntimeError("the new class was given an old state")

        class Late(ValueError): pass

        if len(sys.argv) > 2:
            old = None
            gc.collect()
        for _ in range(3):
            batch = next(iterator)
            assert type(batch) is not Pair and type(batch).__name__ == "Pair" and type(batch.y).__name__ == "Inner"
            assert old is None or (type(batch) is old[0] and type(batch.y) is old[1])
        try:
            next(iterator)
        except ValueError as error:
            # Under fork an error has the name that it has now. A spawned worker's classes came with the dataset.
            assert sys.argv[1] != "fork" or isinstance(error, Late)
            print(error.args)
        loader.close()
        """,
        method,
        *forgotten,
    )
    assert done.stdout == "(9,)\n"


@pytest.mark.slow
def test_a_script_from_standard_input_works_too() -> None:
    script = (
        "from sharded_loader import *\n"
        "class D:\n    def __len__(self): return 2\n    def __getitem__(self, i): return i\n"
        "print([b.tolist() for b in ShardedDataLoader(D(), 2, pool=ProcessPool(1, start_method='spawn'))])\n"
    )
    done = subprocess.run([sys.executable, "-"], input=script, capture_output=True, text=True, timeout=300, check=False)
    assert (done.stdout, done.stderr) == ("[[0, 1]]\n", "")


@pytest.mark.slow
def test_the_start_method_that_the_user_set_is_the_default(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "script.py",
        """
        import multiprocessing
        from sharded_loader import ProcessPool
        multiprocessing.set_start_method("spawn")
        print(ProcessPool(1))
        """,
    )
    assert done.stdout == "ProcessPool(1, start_method='spawn')\n"
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


@pytest.mark.slow
def test_other_users_of_multiprocess_still_get_their_script(tmp_path: Path) -> None:
    run_script(
        tmp_path / "script.py",
        """
        import multiprocess
        from sharded_loader import ProcessPool, ShardedDataLoader

        def child(queue): queue.put(__name__)

        if __name__ == "__main__":
            list(ShardedDataLoader(range(4), 2, pool=ProcessPool(1, start_method="spawn")))
            context = multiprocess.get_context("spawn")
            queue = context.Queue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            queue.get(timeout=300)
            process.join()
            queue.close()
            queue.join_thread()
        """,
    )


# -- identity -------------------------------------------------------------------------------------------------


def test_classes_of_a_function_keep_their_identity(process_pool: ProcessPool) -> None:
    class Point(NamedTuple):
        x: Any

    class Note:
        def __init__(self, text: str) -> None:
            self.text = text

    class Local(Exception):
        pass

    class Data:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            if index == 4:
                raise Local(index)
            return Point(index), Note(f"n{index}"), Note

    with ShardedDataLoader(Data(), 2, pool=process_pool) as loader:
        iterator = iter(loader)
        points, texts, classes = next(iterator)
        assert type(points) is Point
        assert [type(note) for note in texts] == [Note, Note]
        assert classes == [Note, Note]
        next(iterator)
        with pytest.raises(Local):
            next(iterator)


def test_a_class_of_a_function_is_looked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among all classes of the process, which takes as long as a hundred small batches."""

    class Point(NamedTuple):
        x: Any

    class Data:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return Point(index)

    searches = []
    all_classes = classes._all_classes
    monkeypatch.setattr(classes, "_all_classes", lambda: searches.append(1) or all_classes())
    with ShardedDataLoader(Data(), 2, pool=ProcessPool(1, start_method=PROCESS_POOLS[0])) as loader:
        assert {type(batch) for batch in loader} == {Point}
    assert len(searches) <= 1


# -- structure and dtypes -------------------------------------------------------------------------------------

DTYPES = ["bool", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64"]


def test_every_structure_and_dtype_comes_back_as_it_was(process_pool: ProcessPool) -> None:
    def batchify(indices: list[int]) -> dict[str, Any]:
        return {
            "dtypes": [np.arange(3).astype(dtype) for dtype in DTYPES],
            "bfloat16": torch.arange(3, dtype=torch.bfloat16),
            "scalar": np.array(3.5),
            "empty": np.zeros((0, 3), np.float32),
            "reversed": np.arange(5000)[::-1],
            "column": np.arange(40_000).reshape(200, 200)[:, 3],
            "read-only": np.broadcast_to(np.float32(2), (3, 2)),
            "big-endian": np.arange(3, dtype=">i4"),
            "large": np.arange(1_000_000, dtype=np.float32),
            "tensor": torch.ones(100_000),
            "transposed": torch.arange(6).view(2, 3).t(),
            "sparse": torch.eye(3).to_sparse(),
            "names": np.array(["a", "bc"]),
            "dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
            "nested": ({"deep": [np.int64(1), None, "text", b"bytes"]},),
        }

    with ShardedDataLoader(range(1), 1, pool=process_pool, batchify_fn=batchify) as loader:
        found = next(iter(loader))
    with ShardedDataLoader(range(1), 1, batchify_fn=batchify) as loader:
        expected = next(iter(loader))

    def compare(one: Any, other: Any) -> None:
        assert type(one) is type(other)
        if isinstance(one, torch.Tensor):
            assert (one.dtype, one.shape, one.layout) == (other.dtype, other.shape, other.layout)
            assert torch.equal(one.to_dense(), other.to_dense())
            one.add_(1) if one.dtype != torch.bool and one.layout is torch.strided else None  # writable
        elif isinstance(one, np.ndarray):
            np.testing.assert_array_equal(one, other)
        elif isinstance(one, dict):
            assert list(one) == list(other)
            for key in one:
                compare(one[key], other[key])
        elif isinstance(one, (list, tuple)):
            assert len(one) == len(other)
            for a, b in zip(one, other, strict=True):
                compare(a, b)
        else:
            assert one == other

    compare(found, expected)
    assert [tensor.dtype for tensor in found["dtypes"]] == [getattr(torch, dtype) for dtype in DTYPES]


def test_a_tensor_that_requires_grad_is_a_clear_error(process_pool: ProcessPool) -> None:
    def batchify(indices: list[int]) -> torch.Tensor:
        return torch.ones(3, requires_grad=True)

    with ShardedDataLoader(range(2), 1, pool=process_pool, batchify_fn=batchify) as loader:
        with pytest.raises((TypeError, ValueError), match=r"\.detach\(\)"):
            next(iter(loader))


# -- pipes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_large_tasks_and_large_results_do_not_wait_for_each_other(process_pool: ProcessPool) -> None:
    class Large:
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> int:
            return index

    size = 100_000  # a task of 400 KB pickled, a result of 800 KB
    with ShardedDataLoader(Large(), size, pool=process_pool, prefetch=10, batchify_fn=np.array) as loader:
        for number, batch in enumerate(loader):
            assert batch[0] == number * size
            assert batch[-1] == (number + 1) * size - 1


@pytest.mark.slow  # the quick one over these pipes is in tests/promises/test_storms.py
@METHODS
def test_the_portable_pipes_keep_the_promises_too(tmp_path: Path, method: str) -> None:
    run_script(
        tmp_path / "script.py",
        """
        import os, signal, sys, tempfile
        import numpy as np
        from sharded_loader import ProcessPool, ShardedDataLoader, WorkerDiedError

        class Data:
            def __len__(self): return 400_000
            def __getitem__(self, i):
                if i == 399_999 or i == 49_999 and not os.path.exists(marker):
                    open(marker, "w").close()
                    os.kill(os.getpid(), signal.SIGKILL)
                return i

        marker = tempfile.mktemp()
        def pool(): return ProcessPool(2, start_method=sys.argv[1])
        with ShardedDataLoader(Data(), 50_000, pool=pool(), prefetch=6, batchify_fn=np.array) as loader:
            died = 0
            seen = []
            iterator = iter(loader)
            while True:
                try:
                    seen.append(int(next(iterator)[0]))
                except WorkerDiedError:
                    died += 1
                except StopIteration:
                    break
            assert (died, seen) == (1, list(range(0, 350_000, 50_000))), (died, seen)
        os.unlink(marker)
        big = np.random.rand(40, 1000)
        with ShardedDataLoader(big, 4, shuffle=True, seed=1, pool=pool()) as loader:
            whole = np.concatenate([batch.numpy() for batch in loader])
        assert sorted(whole[:, 0]) == sorted(big[:, 0])
        """,
        method,
        env={**os.environ, "SHARDED_LOADER_PORTABLE": "1"},
    )


# -- workers --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_worker_imports_torch_only_if_its_dataset_needs_it(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        "import sys\n"
        "import numpy as np\n"
        "class Data:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, i): return np.full(3, i), int('torch' in sys.modules)\n"
        "class Lazy(Data):\n"
        "    def __getitem__(self, i):\n"
        "        import torch\n"
        "        info = torch.utils.data.get_worker_info()\n"
        "        return info.id, info.num_workers, torch.get_num_threads(), int(info.dataset is not None)\n"
    )
    done = run_script(
        tmp_path / "script.py",
        """
        import sys
        from data import Data, Lazy
        from sharded_loader import ProcessPool, ShardedDataLoader
        for method in ("spawn", "forkserver"):
            for data in (Data(), Lazy()):
                pool = ProcessPool(1, start_method=method)
                print([part.tolist() for part in next(iter(ShardedDataLoader(data, 1, pool=pool)))])
        """,
    )
    assert done.stdout == "[[[0, 0, 0]], [0]]\n[[0], [1], [1], [1]]\n" * 2


def test_worker_init_fn_and_get_worker_info_and_one_thread_each(process_pool: ProcessPool) -> None:
    state: dict[str, int] = {}

    def init(number: int) -> None:
        state["number"] = number

    class Data:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[int, ...]:
            import threadpoolctl

            info: Any = torch.utils.data.get_worker_info()
            blas = max((library["num_threads"] for library in threadpoolctl.threadpool_info()), default=1)
            return state["number"], info.id, info.num_workers, torch.get_num_threads(), blas

    before = torch.get_num_threads()
    pool = ProcessPool(2, start_method=process_pool.start_method, worker_init_fn=init)
    with ShardedDataLoader(Data(), 1, pool=pool) as loader:
        rows = [[int(part[0]) for part in batch] for batch in loader]
    assert {row[0] for row in rows} <= {0, 1}
    assert all(row[0] == row[1] and row[2:] == [2, 1, 1] for row in rows)
    assert torch.get_num_threads() == before
    assert torch.utils.data.get_worker_info() is None


def test_what_a_dataset_changes_in_itself_stays_in_its_worker(process_pool: ProcessPool) -> None:
    data = np.zeros((4, 3))

    class Writes:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            data[index] += 1
            return data[index].copy()

    with ShardedDataLoader(Writes(), 4, pool=process_pool) as loader:
        assert next(iter(loader)).sum() == 12
    assert data.sum() == 0


@pytest.mark.slow
@METHODS
def test_workers_go_when_the_trainer_is_killed(tmp_path: Path, method: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from sharded_loader import ProcessPool, ShardedDataLoader
        class Slow:
            def __len__(self): return 100
            def __getitem__(self, i):
                time.sleep(60 if i >= 4 else 0)
                return i
        pool = ProcessPool(2, start_method=sys.argv[1])
        iterator = iter(ShardedDataLoader(Slow(), 2, pool=pool))
        next(iterator), next(iterator)
        print(*pool.pids, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script), method], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        workers = [psutil.Process(pid) for pid in pids]
        trainer.kill()
    gone, alive = psutil.wait_procs(workers, timeout=300)
    assert len(gone) == 2, alive


@pytest.mark.slow
@SPAWN_FIRST
@pytest.mark.parametrize(
    "ending", ["live", "raise", *(pytest.param(end, marks=pytest.mark.slow) for end in ("exit", "break"))]
)
def test_leaving_the_program_in_mid_epoch_is_silent(tmp_path: Path, method: str, ending: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from sharded_loader import ProcessPool, ShardedDataLoader
        class Slow:
            def __len__(self): return 1000
            def __getitem__(self, i):
                time.sleep(0.01)
                return i
        pool = ProcessPool(2, start_method=sys.argv[1])
        loader = ShardedDataLoader(Slow(), 4, pool=pool)
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            if number == 2:
                if sys.argv[2] == "raise": raise ValueError("the user's own")
                if sys.argv[2] == "exit": sys.exit(3)
                break
        if sys.argv[2] == "break": del iterator, loader
        print(*pool.pids)
        """)
    )
    done = subprocess.run(
        [sys.executable, str(script), method, ending], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == {"raise": 1, "exit": 3}.get(ending, 0)
    noise = [line for line in done.stderr.splitlines() if line and not line.startswith((" ", "Traceback"))]
    assert noise == (["ValueError: the user's own"] if ending == "raise" else [])
    assert not any(psutil.pid_exists(int(pid)) for pid in done.stdout.split())


def test_close_is_quick_whatever_the_workers_do(process_pool: ProcessPool, tmp_path: Path) -> None:
    class Stuck:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            marker.touch()
            time.sleep(1000)
            return index

    marker = tmp_path / "begun"
    loader = ShardedDataLoader(Stuck(), 1, pool=process_pool)
    waits = begin(loader)
    while not marker.exists():
        time.sleep(0.01)  # a spawned worker needs a while to begin
    pids = process_pool.pids
    loader.close()
    assert not any(psutil.pid_exists(pid) for pid in pids)
    waits.join(300)
    assert not waits.is_alive()


def test_a_forked_child_of_the_user_cannot_use_the_loader_and_harms_nothing(worker_pool: Any) -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this platform has no fork")
    with ShardedDataLoader(range(100), 2, pool=worker_pool) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(iterator)
            except RuntimeError as error:
                os.write(write, json.dumps(str(error)).encode())
            del iterator, loader
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            assert "forked child" in answer.read()
        os.waitpid(child, 0)
        assert [batch.tolist() for batch in iterator] == [[i, i + 1] for i in range(2, 100, 2)]


def test_a_grandchild_that_holds_the_pipe_does_not_hide_a_death(process_pool: ProcessPool, tmp_path: Path) -> None:
    class Forks:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            child = os.fork()
            if child == 0:
                time.sleep(300)
                os._exit(0)
            (tmp_path / str(child)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
            return index

    began = time.monotonic()
    with ShardedDataLoader(Forks(), 1, pool=process_pool, prefetch=1) as loader:
        with pytest.raises(RuntimeError, match="SIGKILL"):
            next(iter(loader))
    assert time.monotonic() - began < 200
    for child in tmp_path.iterdir():
        os.kill(int(child.name), signal.SIGKILL)


@pytest.mark.slow
def test_prints_of_workers_arrive(tmp_path: Path) -> None:
    done = run_script(
        tmp_path / "script.py",
        """
        from sharded_loader import ProcessPool, ShardedDataLoader
        class Prints:
            def __len__(self): return 1
            def __getitem__(self, i):
                print("from the worker")
                return i
        loader = ShardedDataLoader(Prints(), 1, pool=ProcessPool(1, start_method="spawn"))
        loader.prefetch_epochs = False
        list(loader)
        """,
    )
    assert done.stdout == "from the worker\n"


def test_the_descriptors_of_many_loaders_do_not_add_up(process_pool: ProcessPool) -> None:
    def once() -> int:
        pool = ProcessPool(1, start_method=process_pool.start_method)
        for _ in ShardedDataLoader(range(4), 2, pool=pool):
            break
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("this platform does not list descriptors")
    once()
    assert once() == once() == once()


ANY: Callable[..., Any] = lambda *_: None  # noqa: E731 - importable lambdas exist too


def test_a_lambda_of_a_module_works(process_pool: ProcessPool) -> None:
    pool = ProcessPool(1, start_method=process_pool.start_method, worker_init_fn=ANY)
    assert [batch.tolist() for batch in ShardedDataLoader(range(2), 2, pool=pool)] == [[0, 1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_tensors_keep_their_memory_format_and_nested_ones_travel(process_pool: ProcessPool) -> None:
    def batchify(indices: list[int]) -> Any:
        images = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
        return images, torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])

    with ShardedDataLoader(range(1), 1, pool=process_pool, batchify_fn=batchify) as loader:
        images, nested = next(iter(loader))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(images, torch.arange(120.0).view(2, 3, 4, 5))
    assert [len(tensor) for tensor in nested.unbind()] == [2, 3]


def test_worker_seeds_differ_between_workers_and_runs(process_pool: ProcessPool) -> None:
    def seeds(seed: int, workers: int) -> set[int]:
        def init(number: int) -> None:
            info: Any = torch.utils.data.get_worker_info()
            assert info.seed == torch.initial_seed()

        class Data:
            def __len__(self) -> int:
                return 8

            def __getitem__(self, index: int) -> int:
                info: Any = torch.utils.data.get_worker_info()
                return int(info.seed)

        pool = ProcessPool(workers, start_method=process_pool.start_method, worker_init_fn=init)
        with ShardedDataLoader(Data(), 1, pool=pool, seed=seed) as loader:
            return {int(batch[0]) for batch in loader}

    assert not seeds(1, workers=2) & seeds(2, workers=1)  # seed + number would be the same in two of them


class WithProgress:
    """Each row makes a progress bar that nobody sees, as Hugging Face's datasets do."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        from tqdm.std import tqdm

        return sum(tqdm([index], disable=True))


@METHODS
@pytest.mark.skipif(sys.platform == "win32", reason="nothing is forked there")
def test_nobody_waits_for_the_lock_of_progress_bars_that_a_killed_process_holds(method: str) -> None:
    """All forked processes share it."""
    tqdm = pytest.importorskip("tqdm.std").tqdm
    usual, lock = tqdm.get_lock(), multiprocessing.RLock()
    tqdm.set_lock(lock)
    try:
        dies = multiprocessing.get_context("fork").Process(target=lambda: lock.acquire() and os.kill(os.getpid(), 9))
        dies.start()
        dies.join()
        with ShardedDataLoader(WithProgress(), 4, pool=ProcessPool(2, start_method=method)) as loader:
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    finally:
        tqdm.set_lock(usual)
