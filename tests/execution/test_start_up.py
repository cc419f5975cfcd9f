"""Workers start at once, and from a forkserver that has imported what they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from samples import Uneven
from test_process_pool import run_script

from sharded_loader import SimpleDataset
from sharded_loader.memory.publish import publish

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


def user_module() -> object:
    return np.linalg.norm


def test_modules_that_functions_by_value_use_are_known_too() -> None:
    def local() -> object:
        return np.linalg, torch

    modules = publish(local).modules
    assert {"numpy", "torch"} <= modules
    assert __name__ in publish(user_module).modules


@posix
def test_the_forkserver_has_imported_what_dataset_batchify_and_transform_need(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(DATA)
    for name in ("collating", "changing"):
        (tmp_path / f"{name}.py").write_text(
            f"import os\nIMPORTED_BY = os.getpid()\ndef {name}(*x): return (x, IMPORTED_BY)\n"
        )
    done = run_script(
        tmp_path / "script.py",
        """
        import data, collating, changing
        from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
        print("script runs")
        class Wrapped(SimpleDataset):
            pass
        dataset = Wrapped(data.Data()).transform(changing.changing)
        pool = ProcessPool(2, start_method="forkserver")
        with ShardedDataLoader(dataset, 2, pool=pool, batchify_fn=collating.collating) as loader:
            for (samples,), by_batchify in loader:
                for (_, by_data, worker, server), by_transform in samples:
                    assert worker in pool.pids
                    assert by_data == by_transform == by_batchify == server, (by_data, by_transform, by_batchify)
        """,
    )
    assert done.stdout == "script runs\n"


@linux
def test_the_forkserver_has_one_thread_and_its_children_the_user_s_environment(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(
        DATA.replace("IMPORTED_BY =", "import torch\na = np.ones((300, 300)); a @ a\nIMPORTED_BY =").replace(
            "i, IMPORTED_BY", "len(os.listdir(f'/proc/{os.getppid()}/task')), torch.get_num_threads(), IMPORTED_BY"
        )
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    run_script(
        tmp_path / "script.py",
        """
        import os
        import data
        import multiprocess
        from sharded_loader import ProcessPool, ShardedDataLoader

        def child(queue):
            queue.put([name for name in os.environ if name.endswith("_NUM_THREADS") or name.startswith("SHARDED")])

        if __name__ == "__main__":
            pool = ProcessPool(2, start_method="forkserver")
            with ShardedDataLoader(data.Data(), 1, pool=pool) as loader:
                for tasks, threads, by, worker, server in loader:
                    assert int(tasks) == 1 and int(threads) == 1 and by == server, (tasks, threads, by, server)
            context = multiprocess.get_context("forkserver")
            queue = context.SimpleQueue()
            process = context.Process(target=child, args=(queue,))
            process.start()
            assert queue.get() == []
            process.join()
            assert not [name for name in os.environ if name.startswith("SHARDED")]
        """,
        env=environment,
    )


@posix
@pytest.mark.parametrize("how", ["raise RuntimeError('twice')", "raise SystemExit(3)", "import nothing_of_this_name"])
def test_a_module_that_the_forkserver_cannot_import_is_left_to_the_workers(tmp_path: Path, how: str) -> None:
    fails_second_time = f"""
        import pathlib
        count = pathlib.Path(__file__).with_suffix(".count")
        count.open("a").write("x")
        if count.read_text() == "xx": {how}
    """
    (tmp_path / "data.py").write_text("\n".join(map(str.strip, fails_second_time.splitlines())) + DATA)
    run_script(
        tmp_path / "script.py",
        """
        import data
        from sharded_loader import ProcessPool, ShardedDataLoader
        with ShardedDataLoader(data.Data(), 1, pool=ProcessPool(2, start_method="forkserver")) as loader:
            for _, by, worker, server in loader:
                assert by == worker
        """,
    )
    assert len((tmp_path / "data.count").read_text()) >= 3  # trainer, forkserver, one worker or both


@posix
def test_the_user_s_own_choice_of_preloads_is_respected(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(DATA)
    run_script(
        tmp_path / "script.py",
        """
        import data, multiprocess
        from sharded_loader import ProcessPool, ShardedDataLoader
        multiprocess.set_forkserver_preload(["json"])
        with ShardedDataLoader(data.Data(), 1, pool=ProcessPool(2, start_method="forkserver")) as loader:
            for _, by, worker, server in loader:
                assert by == worker
        """,
    )


@posix
def test_all_spawned_workers_start_at_once(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif '--multiprocessing-fork' in sys.orig_argv: time.sleep(1)\n"
    )
    run_script(
        tmp_path / "script.py",
        """
        import time
        from sharded_loader import ProcessPool, ShardedDataLoader
        began = time.monotonic()
        with ShardedDataLoader(range(8), 1, pool=ProcessPool(4, start_method="spawn")) as loader:
            assert len(list(loader)) == 8
        assert 1 < time.monotonic() - began < 3, time.monotonic() - began
        """,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
