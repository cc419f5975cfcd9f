"""Shared memory by each back end: two processes see it, nobody else does, and nothing of it stays."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import shared_memory_names
from refusing import in_child

from sharded_loader.base import system
from sharded_loader.memory.segments import Segment, attach, create

BACKENDS = ["memfd", "shm", "file", "named"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="all back ends: Linux only")


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", request.param)
    return str(request.param)


def attach_again(segment: Segment, **options: Any) -> Segment:
    """As a worker does."""
    fd = None if segment.name else os.dup(segment.fd)  # type: ignore[arg-type]
    return attach(segment.number, segment.nbytes, fd, segment.name, **options)


def test_what_a_worker_writes_the_trainer_sees(backend: str) -> None:
    segment = create(3, 3 * 4096)
    segment.mapping[:4] = b"abcd"

    def work() -> bool:
        twin = attach_again(segment)
        seen = twin.mapping[:4] == b"abcd"
        twin.mapping[4096:4100] = b"wxyz"
        return seen and twin.nbytes == 3 * 4096 and twin.number == 3

    assert in_child(work) == "True"
    assert segment.mapping[4096:4100] == b"wxyz"
    segment.close()


def test_what_is_written_to_a_private_mapping_stays_private(backend: str) -> None:
    segment = create(-1, 2 * 4096)
    segment.mapping[:4] = b"abcd"

    def work() -> bool:
        twin, other = attach_again(segment, private=True), attach_again(segment, private=True)
        twin.mapping[:4] = b"wxyz"
        array = np.frombuffer(twin.mapping, np.uint8)
        array[1] = 7
        return array.flags.writeable and other.mapping[:4] == b"abcd" and twin.mapping[:2] == b"w\x07"

    assert in_child(work) == "True"
    assert segment.mapping[:4] == b"abcd"
    segment.close()


def test_a_segment_is_allocated_in_full_and_has_no_name_and_no_program_inherits_it(backend: str) -> None:
    before, nbytes = shared_memory_names(), 2 * system.ALLOCATED_AT_ONCE + 4096
    segment = create(0, nbytes)
    assert segment.fd is not None and not os.get_inheritable(segment.fd)
    assert os.fstat(segment.fd).st_blocks * 512 >= nbytes
    assert shared_memory_names() == before
    assert (segment.name is not None) == (backend == "named")
    segment.close()


def test_the_mapping_outlives_the_descriptor_and_goes_with_the_last_array(backend: str) -> None:
    segment = create(0, 4096)
    array = np.frombuffer(segment.mapping, np.uint8)
    segment.close()
    segment.close()
    array[:] = 5
    assert int(array.sum()) == 5 * 4096
    del array  # the fixture of all tests looks for what is left


def test_a_name_does_not_survive_a_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    import _posixshmem

    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "shm")
    real = _posixshmem.shm_open

    def interrupted(*args: Any, **options: Any) -> int:
        os.close(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr(_posixshmem, "shm_open", interrupted)
    before = shared_memory_names()
    with pytest.raises(KeyboardInterrupt):
        create(0, 4096)
    assert shared_memory_names() == before


def test_a_refusal_and_a_worker_that_cannot_map_leave_no_descriptor(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "posix_fallocate", full)
        create(0, 4096)
    assert len(os.listdir("/proc/self/fd")) == before
    segment = create(0, 4096)
    with pytest.raises((OSError, ValueError)):
        fd = None if segment.name else os.dup(segment.fd)  # type: ignore[arg-type]
        attach(0, 1 << 20, fd, segment.name)  # longer than it is
    segment.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_unknown_back_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "mmap")
    with pytest.raises(ValueError, match="'mmap'.*memfd.*shm.*file.*named"):
        create(0, 4096)


@pytest.mark.costly(2)
def test_no_name_is_left_when_the_trainer_is_killed(backend: str) -> None:
    before = shared_memory_names()
    kills = "import os; from sharded_loader.memory.segments import create; a = create(0, 9); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", kills], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert shared_memory_names() == before


@pytest.mark.skipif(sys.version_info < (3, 13), reason="before, a mapping holds a descriptor of its own")
def test_an_array_that_is_held_after_close_holds_no_descriptor(backend: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = create(0, 4096)
    array = np.frombuffer(segment.mapping, np.uint8)
    segment.close()
    assert len(os.listdir("/proc/self/fd")) == before and not array.any()


def test_a_ctrl_c_while_a_segment_is_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one between the system call and the note of its result; the fixture looks for what is left."""
    memfd_create = os.memfd_create

    def interrupted(*arguments: Any) -> int:
        fd = memfd_create(*arguments)
        signal.raise_signal(signal.SIGINT)
        return fd

    monkeypatch.setattr(os, "memfd_create", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create(0, 4096)


def test_a_segment_that_nobody_has_noted_closes_its_descriptor() -> None:
    fd = create(0, 4096).fd
    assert fd is not None
    with pytest.raises(OSError):
        os.fstat(fd)
