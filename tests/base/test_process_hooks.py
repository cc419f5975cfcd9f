"""What Python calls at an import and at a fork: hooks that run once, and forks that are followed to their end."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from refusing import in_child

from sharded_loader.base.process_hooks import Fork, call_after_import, forget_import, is_readable

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that can be imported, and is not."""
    (tmp_path / "imported_later.py").write_text("value = 5\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "imported_later"
    forget_import("imported_later")
    sys.modules.pop("imported_later", None)


def test_the_last_function_is_called_once_when_the_module_has_been_imported(module: str) -> None:
    called: list[Any] = []
    call_after_import(module, lambda: called.append("replaced"))
    call_after_import(module, lambda: called.append(sys.modules[module].value))
    assert called == []
    __import__(module)
    __import__(module)
    assert called == [5]
    call_after_import(module, lambda: called.append("at once"))
    assert called == [5, "at once"]


def test_an_import_that_was_forgotten_calls_nothing(module: str) -> None:
    before, called = list(sys.meta_path), []
    call_after_import(module, lambda: called.append(1))
    forget_import(module)
    __import__(module)
    assert (called, sys.meta_path) == ([], before)


@posix
def test_a_descriptor_is_readable_when_a_read_returns_at_once() -> None:
    reader, writer = os.pipe()
    assert not is_readable(reader)
    os.close(writer)
    assert is_readable(reader)
    os.close(reader)


@posix
def test_descriptors_above_what_select_takes_can_be_asked_too() -> None:
    import resource

    def work() -> object:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
        reader, writer = os.pipe()
        os.dup2(reader, 2500)
        before = is_readable(2500)
        os.close(writer)
        return before, is_readable(2500)

    assert in_child(work) == "(False, True)"


@posix
@pytest.mark.parametrize("daemon", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_fork_has_ended_when_no_process_is_left_that_came_of_it(daemon: bool) -> None:
    go, began, gone = os.pipe(), os.pipe(), os.pipe()
    child = Fork()
    pid = os.fork()
    if pid == 0:
        os.close(go[1])
        if os.fork() == 0:
            if daemon:  # as every library does that makes daemons; what this test needs stays open
                for descriptor in set(range(3, 256)) - {go[0], began[1], gone[1]}:
                    with contextlib.suppress(OSError):
                        os.close(descriptor)
            os.write(began[1], b"x")
            os.read(go[0], 1)  # until the parent closes it
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    os.read(began[0], 1)
    assert not child.has_ended()  # there is a grandchild
    os.close(gone[1])
    os.close(go[1])
    os.read(gone[0], 1)  # until its end
    while not child.has_ended():  # nobody but the system reaps it
        os.sched_yield()
    for descriptor in (go[0], *began, gone[0]):
        os.close(descriptor)


def test_a_fork_without_a_pipe_is_taken_to_live_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pipe", refuse)
        child = Fork()
    assert not child.has_ended()
