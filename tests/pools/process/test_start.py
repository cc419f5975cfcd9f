"""How a worker starts: what is chosen, what is sent to it, what it does not run."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import multiprocess
import pytest
from conftest import METHODS
from multiprocess import spawn

from sharded_loader.engine.messages import BOARD, DEATH, JOB, SEGMENT, Job, NewJob, unpack_head
from sharded_loader.pools.process import resources, start, template
from sharded_loader.pools.process.resources import WorkerResources
from sharded_loader.pools.process.start import launch, send_segment
from sharded_loader.pools.process.template import TemplateGone, is_starting_worker, starting_worker

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="forked workers")


class Link:
    """Notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, int, int, bytes, bool]] = []

    def send(self, head: bytes, descriptor: int | None = None) -> None:
        kind, run, seq, content = unpack_head(head)
        self.sent.append((kind, run, seq, bytes(content), descriptor is not None))


def test_a_segment_is_known_by_its_name_or_by_a_descriptor() -> None:
    link: Any = Link()
    send_segment(link, SimpleNamespace(number=3, nbytes=4096, name=None, fd=9))  # type: ignore[arg-type]
    send_segment(link, SimpleNamespace(number=3, nbytes=64, name="/x", fd=9), BOARD, 5)  # type: ignore[arg-type]
    assert link.sent == [(SEGMENT, 3, 4096, b"", True), (BOARD, 5, 64, b"/x", False)]


def test_only_our_own_workers_do_not_run_the_user_s_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/script.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert "init_main_from_path" in spawn.get_preparation_data("theirs")
    with starting_worker():
        assert "init_main_from_path" not in spawn.get_preparation_data("ours")


def test_a_start_is_known_in_its_own_thread_alone() -> None:
    seen: list[bool] = []
    with starting_worker():
        thread = threading.Thread(target=lambda: seen.append(is_starting_worker()))
        thread.start()
        thread.join()
        assert is_starting_worker() and seen == [False]
        if hasattr(signal, "pthread_sigmask"):
            assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not is_starting_worker()
    if hasattr(signal, "pthread_sigmask"):
        assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_worker_process_may_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocess.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="num_workers=0, or threads"):
        launch(0, 1, "spawn", WorkerResources(None), NewJob(Job(range(3), None, 0), None))


@unix
def test_if_templates_are_gone_a_few_times_the_worker_is_forked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Gone:
        def __init__(self, *_: Any) -> None:
            made.append(self)
            self.closed = False

        def fork(self, number: int, conn: Any) -> Any:
            raise TemplateGone("the template process is gone: as a test")

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr(template, "Template", Gone)
    owner = WorkerResources(None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        owner.workers.append(launch(0, 1, "fork", owner, NewJob(Job(range(3), None, 0), None)))
    assert len(made) == start.TEMPLATES and all(one.closed for one in made)
    assert len(caught) == start.TEMPLATES and "as it is now" in str(caught[0].message)
    assert owner.workers[0].is_alive() and owner.template is None
    owner.close()


@METHODS
def test_what_a_worker_is_sent_first(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The board, then the lifeline, then the word that a forked worker waits for."""
    sent: list[bytes] = []
    make_link = start.make_link

    def watched(conn: Any) -> Any:
        link = make_link(conn)
        send = link.send
        monkeypatch.setattr(
            link, "send", lambda head, *args, **more: (sent.append(head[:1]), send(head, *args, **more)), raising=False
        )
        return link

    monkeypatch.setattr(start, "make_link", watched)
    owner = resources.WorkerResources(None)
    owner.open(1)
    owner.workers.append(launch(0, 1, method, owner, NewJob(Job(range(3), None, 0), None)))
    lifeline = [DEATH] if sys.platform == "linux" else []
    assert sent == [BOARD, *lifeline, *([JOB] if method == "fork" else [])]
    owner.close()
