"""Processes that name one label have one memory, whoever dies first, and leave nothing behind."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sharded_loader.caching import shared
from sharded_loader.caching.shared import Opened, links_of, meet, name_of, open_nameless

LINUX_HERE = os.path.isdir("/proc/self/fd")
LINUX = pytest.mark.skipif(not LINUX_HERE, reason="elsewhere each process makes its own")


def join(fd: int) -> Opened:
    return Opened(fd, name_of(fd), is_temporary=False)


def make(label: str) -> Opened:
    opened = Opened(*open_nameless(label), is_temporary=True)
    os.write(opened.fd, b"made\n")
    return opened


def refuse(label: str) -> Opened:
    raise AssertionError("it is there")


def noting(path: Path) -> Callable[[str], Opened]:
    """Makes memory, and notes it in a file."""

    def made(label: str) -> Opened:
        with open(path, "a") as file:
            file.write("made\n")
        return make(label)

    return made


class Processes:
    """Forked children. Each says how far it is, waits to be told to go on, and is gone at the end."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.told, self.tell = os.pipe()
        self.goes_on, self.go_on = os.pipe()

    def start(self, work: Callable[[], Any]) -> int:
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):
                os.close(self.go_on)
                work()
                os._exit(0)
            os._exit(3)
        self.pids.append(pid)
        return pid

    def say(self) -> None:
        os.write(self.tell, b".")

    def say_and_wait(self) -> None:
        self.say()
        os.read(self.goes_on, 1)

    def hear(self, count: int = 1) -> None:
        for _ in range(count):
            assert os.read(self.told, 1) == b"."

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.wait(pid)

    def wait(self, pid: int) -> int:
        self.pids.remove(pid)
        return os.waitpid(pid, 0)[1]


@pytest.fixture
def label() -> Iterator[str]:
    found = f"test-{uuid.uuid4().hex}"
    yield found
    assert not LINUX_HERE or not list(links_of(found))


@pytest.fixture
def processes(label: str) -> Iterator[Processes]:
    """They are gone before it is looked what is left of the label."""
    found = Processes()
    yield found
    for pid in list(found.pids):
        found.kill(pid)
    for fd in (found.told, found.tell, found.goes_on, found.go_on):
        os.close(fd)


@LINUX
def test_the_second_process_opens_the_memory_of_the_first(processes: Processes, label: str) -> None:
    mine = meet(label, join, make)

    def other() -> None:
        found = meet(label, join, refuse)
        assert os.pread(found.fd, 5, 0) == b"made\n"
        os.pwrite(found.fd, b"seen\n", 0)

    assert processes.wait(processes.start(other)) == 0
    assert os.pread(mine.fd, 9, 0) == b"seen\n"


@LINUX
def test_of_many_that_come_at_once_one_makes_it(processes: Processes, label: str, tmp_path: Path) -> None:
    def work() -> None:
        found = meet(label, join, noting(tmp_path / "notes"))
        assert os.pread(found.fd, 5, 0) == b"made\n"
        processes.say_and_wait()  # keeps it until all have met

    for _ in range(8):
        processes.start(work)
    processes.hear(8)
    os.write(processes.go_on, b"." * 8)
    assert [processes.wait(pid) for pid in list(processes.pids)] == [0] * 8
    assert (tmp_path / "notes").read_text() == "made\n"


@LINUX
def test_a_maker_that_is_killed_leaves_its_place_to_another(processes: Processes, label: str, tmp_path: Path) -> None:
    def never(label: str) -> Opened:
        processes.say_and_wait()
        raise AssertionError

    first = processes.start(lambda: meet(label, join, never))
    processes.hear()
    second = processes.start(lambda: meet(label, join, noting(tmp_path / "notes")))
    processes.kill(first)
    assert processes.wait(second) == 0
    assert (tmp_path / "notes").read_text() == "made\n"


@LINUX
def test_the_memory_is_found_when_its_maker_has_ended(processes: Processes, label: str) -> None:
    def hold(maker: Callable[[str], Opened]) -> None:
        found = meet(label, join, maker)
        processes.say_and_wait()
        assert os.pread(found.fd, 5, 0) == b"made\n"

    chain = []
    for number in range(4):  # each one finds what the one before has, whose own finder is dead
        chain.append(processes.start(lambda maker=make if number == 0 else refuse: hold(maker)))  # type: ignore[misc]
        processes.hear()
        if number:
            processes.kill(chain[number - 1])
    os.write(processes.go_on, b".")
    assert processes.wait(chain[-1]) == 0


@LINUX
def test_memory_that_nobody_has_or_whose_maker_failed_is_made_again(processes: Processes, label: str) -> None:
    def fail(label: str) -> Opened:
        raise PermissionError("no")

    for _ in range(3):
        pid = processes.start(lambda: (meet(label, join, make), processes.say_and_wait()))
        processes.hear()
        processes.kill(pid)
        with pytest.raises(PermissionError, match="no"):
            meet(label, join, fail)
    assert os.pread(meet(label, join, make).fd, 5, 0) == b"made\n"


@LINUX
def test_threads_make_it_once(label: str, tmp_path: Path) -> None:
    found: list[Opened] = []
    maker = noting(tmp_path / "notes")
    threads = [threading.Thread(target=lambda: found.append(meet(label, join, maker))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "notes").read_text() == "made\n"
    assert len({os.fstat(one.fd).st_ino for one in found}) == 1


@LINUX
def test_memory_that_is_something_else_or_that_others_may_write_to_is_left_alone(label: str) -> None:
    first = meet(label, join, make)
    assert not os.path.sameopenfile(first.fd, meet(label, lambda fd: None, make).fd)
    os.fchmod(first.fd, 0o666)
    assert not os.path.sameopenfile(first.fd, meet(label, join, make).fd)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
@LINUX
def test_what_another_user_holds_is_not_used(processes: Processes, label: str) -> None:
    def foreign() -> None:
        """Another user, who knows the label."""
        os.setuid(12345)
        kept = make(label)
        os.fchmod(kept.fd, 0o666)
        processes.say_and_wait()

    processes.start(foreign)
    processes.hear()
    mine = meet(label, join, make)
    assert os.fstat(mine.fd).st_uid == 0


@pytest.mark.parametrize("what", ["locks", "proc"])
def test_where_processes_cannot_meet_each_makes_its_own(monkeypatch: pytest.MonkeyPatch, what: str, label: str) -> None:
    def deny(path: str) -> Any:
        raise PermissionError(f"{path} belongs to another user")

    if what == "locks":
        monkeypatch.setattr(shared, "lock_at", deny)
    else:
        monkeypatch.setattr(shared, "HAS_LINKS", False)
    for _ in range(2):
        assert os.pread(meet(label, join, make).fd, 5, 0) == b"made\n"
