"""How a worker starts: what is chosen, what is sent to it, what it does not run."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import multiprocess
import pytest
from multiprocess import spawn

from sharded_loader.base.system import ONE_THREAD
from sharded_loader.engine.messages import Job
from sharded_loader.pools.process import spawned, start
from sharded_loader.pools.process.spawned import PRELOAD
from sharded_loader.pools.process.start import ZygoteGone, is_starting_worker, starting_worker
from sharded_loader.pools.process.transport import ProcessTransport

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="forked workers")


def test_only_our_own_workers_do_not_run_the_user_s_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/script.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert "init_main_from_path" in spawn.get_preparation_data("theirs")
    with starting_worker():
        assert "init_main_from_path" not in spawn.get_preparation_data("ours")


def test_a_start_is_known_in_its_own_thread_alone() -> None:
    seen: list[bool] = []
    can_wait = hasattr(signal, "pthread_sigmask")
    with starting_worker():
        thread = threading.Thread(target=lambda: seen.append(is_starting_worker()))
        thread.start()
        thread.join()
        assert is_starting_worker() and seen == [False]
        assert not can_wait or signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not is_starting_worker()
    assert not can_wait or signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_process_may_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocess.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="num_workers=0, or threads"):
        ProcessTransport(1, "spawn", None).launch(0, Job(range(3), None, 0))


@unix
def test_if_the_zygote_is_gone_the_worker_is_forked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Gone:
        def __init__(self, *_: Any) -> None:
            made.append(self)
            self.closed = False

        def fork(self, number: int, num_workers: int, conn: Any) -> Any:
            raise ZygoteGone("the zygote process is gone: as a test")

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(start, "Zygote", Gone)
    owner = ProcessTransport(1, "fork", None)
    owner._is_up = True  # the first workers do not come from a zygote
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        owner.workers.append(owner.launch(0, Job(range(3), None, 0)))
    assert [one.closed for one in made] == [True]
    assert len(caught) == 1 and "as it is now" in str(caught[0].message)
    assert owner.workers[0].is_alive() and owner.zygote is None
    owner.close()


# -- what a forkserver imports ----------------------------------------------------------------------------------------


@unix
def test_a_forkserver_imports_what_it_is_told_with_one_thread_and_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted_module.py").write_text("import os\nthreads = os.environ['OMP_NUM_THREADS']\n")
    (tmp_path / "broken_module.py").write_text("raise SystemExit(3)\n")
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    request = {"modules": ["broken_module", "no_such_module", "wanted_module"], "path": [str(tmp_path), *sys.path]}
    monkeypatch.setenv(PRELOAD, json.dumps(request))
    before = list(sys.path)
    spawned._preload()
    assert sys.modules.pop("wanted_module").threads == "1"
    assert sys.path == before and PRELOAD not in os.environ
    assert {name: os.environ[name] for name in ONE_THREAD if name in os.environ} == {"OMP_NUM_THREADS": "7"}
