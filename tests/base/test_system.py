"""Calls that a system may refuse: what is done instead gives the same."""

import errno
import io
import mmap
import os
import socket
import sys
import tempfile

import pytest
from refusing import in_child

from sharded_loader.base import system

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")


def refused(number):
    def call(*arguments, **options):
        raise OSError(number, os.strerror(number))

    return call


@linux
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL])
def test_the_first_kind_of_memory_that_works_is_used(monkeypatch, number):
    import _posixshmem

    kinds = []
    for module, name in ((system, "PREFIX"), (os, "memfd_create"), (_posixshmem, "shm_open")):
        if module is not system:
            monkeypatch.setattr(module, name, refused(number))
        fd, kind = system.open_memory("sharded_loader-0")
        kinds.append(kind)
        os.ftruncate(fd, mmap.PAGESIZE)
        system.allocate(fd, mmap.PAGESIZE)
        with mmap.mmap(fd, mmap.PAGESIZE) as ours, mmap.mmap(fd, mmap.PAGESIZE) as theirs:
            ours[:4] = b"abcd"
            assert theirs[:4] == b"abcd"
        assert not os.get_inheritable(fd) and os.fstat(fd).st_nlink == 0
        os.close(fd)
    assert kinds == [None, "/dev/shm", tempfile.gettempdir()]
    monkeypatch.setattr(system.tempfile, "mkstemp", refused(number))
    with pytest.raises(OSError, match=os.strerror(number)):
        system.open_memory("sharded_loader-0")


@linux
def test_without_descriptors_memory_is_not_looked_for_elsewhere_and_without_memfd_and_shm_in_files(monkeypatch):
    monkeypatch.setattr(os, "memfd_create", refused(errno.EMFILE))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        system.open_memory("sharded_loader-0")
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setitem(sys.modules, "_posixshmem", None)
    fd, kind = system.open_memory("sharded_loader-0")
    os.close(fd)
    assert kind == tempfile.gettempdir()


@linux
@pytest.mark.parametrize("name", ["ENOSYS", "EPERM", "EOPNOTSUPP", "EINVAL", "ENOSPC", "ENOMEM", "EDQUOT", "EIO"])
def test_memory_is_set_aside_without_posix_fallocate_too_unless_there_is_none(monkeypatch, name):
    number = getattr(errno, name)
    monkeypatch.setattr(os, "posix_fallocate", refused(number))
    fd, _ = system.open_memory("sharded_loader-0")
    nbytes = system.ALLOCATED_AT_ONCE + 3 * mmap.PAGESIZE
    os.ftruncate(fd, nbytes)
    try:
        if name in ("ENOSPC", "ENOMEM", "EDQUOT", "EIO"):
            with pytest.raises(OSError, match=os.strerror(number)):
                system.allocate(fd, nbytes)
        else:
            system.allocate(fd, nbytes)
            assert os.fstat(fd).st_blocks * 512 >= nbytes and os.fstat(fd).st_size == nbytes
    finally:
        os.close(fd)


def test_whether_descriptors_can_be_passed_is_found_out_by_passing_one(monkeypatch):
    assert system.can_pass_descriptors()
    for name in ("send_fds", "recv_fds"):
        with monkeypatch.context() as patched:
            patched.setattr(socket, name, refused(errno.EPERM))
            assert not system.can_pass_descriptors()
    monkeypatch.setattr(socket, "send_fds", lambda end, data, fds: end.send(data[0]))  # a security module takes it out
    assert not system.can_pass_descriptors()
    monkeypatch.undo()
    monkeypatch.setattr(socket, "socketpair", refused(errno.EMFILE))
    assert system.can_pass_descriptors(), "no descriptors in this moment is no refusal"


@pytest.mark.parametrize("number", [0, 2500])
def test_a_descriptor_is_readable_when_a_read_returns_at_once(number):
    """Also one above those that select takes."""
    import resource

    def work():
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
        reader, writer = os.pipe()
        asked = os.dup2(reader, number) if number else reader
        before = system.is_readable(asked)
        os.close(writer)
        return before, system.is_readable(asked)

    assert in_child(work) == "(False, True)"


def test_an_environment_variable_holds_a_number_and_a_switch_is_off_where_it_is_0():
    for value, number in ((None, 7), ("", 7), (" ", 7), ("3", 3), (" 12 ", 12), ("0", 0)):
        environ = {} if value is None else {"X": value}
        assert system.integer("X", 7, least=0, advice="unset it", environ=environ) == number
        assert system.is_on("X", environ) == (number not in (7, 0))
    for value in ("x", "1.5", "-1", "1e3"):
        with pytest.raises(ValueError, match=f"variable X is '{value}'; it must be an integer of at least 0: unset it"):
            system.integer("X", 7, least=0, advice="unset it", environ={"X": value})


@pytest.mark.parametrize("content", [b"", b"1\n", b"no numbers\n", None])
def test_where_the_system_does_not_tell_of_waits_for_a_core_there_are_none(monkeypatch, content):
    def opened(name):
        if content is None:
            raise FileNotFoundError(name)
        return io.BytesIO(content)

    monkeypatch.setattr(io, "FileIO", opened)
    assert system.core_seconds()[1] == 0.0
