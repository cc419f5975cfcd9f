"""Workers end with their trainer."""

from __future__ import annotations

import os
import signal
import sys

import multiprocess
import pytest

from sharded_loader.pools.process.link import Link
from sharded_loader.pools.process.worker import close_in_children, die_with

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a pipe: Linux")


@linux
@pytest.mark.parametrize("before", [False, True])
def test_a_process_dies_with_the_other_end_of_its_pipe_also_if_that_is_closed_already(before: bool) -> None:
    reader, writer = os.pipe()
    ready, tell = os.pipe()
    if before:
        os.close(writer)
    pid = os.fork()
    if pid == 0:
        if not before:
            os.close(writer)
        die_with(f"/proc/self/fd/{reader}")
        os.write(tell, b"x")
        os._exit(7) if before else signal.pause()
    if not before:
        os.read(ready, 1)
        os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in ((1, -signal.SIGKILL) if before else (-signal.SIGKILL,))
    for end in (reader, ready, tell):
        os.close(end)


@linux
def test_what_the_trainer_watches_is_closed_in_the_children_of_a_worker() -> None:
    ours, theirs = multiprocess.Pipe()
    sentinel, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        link = Link(theirs, blocks=True)
        end = link.waitable
        close_in_children(held)
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{held}") or os.path.exists(f"/proc/self/fd/{end}"))
        assert os.get_inheritable(held) is False
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (sentinel, held):
        os.close(end)
    ours.close()
    theirs.close()
