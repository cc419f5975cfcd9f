"""Processes that name one key have one memory, whoever dies first, and leave nothing behind."""

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

from sharded_loader.memory import rendezvous
from sharded_loader.memory.rendezvous import Opened, label_of, meet, name_of, open_nameless

LINUX_HERE = os.path.exists("/proc/self/ns/pid")
LINUX = pytest.mark.skipif(not LINUX_HERE, reason="elsewhere each process makes its own")


def join(fd: int) -> Opened:
    return Opened(fd, name_of(fd), is_temporary=False)


def make() -> Opened:
    opened = Opened(*open_nameless("test"), is_temporary=True)
    os.write(opened.fd, b"made\n")
    return opened


def refuse() -> Opened:
    raise AssertionError("it is there")


def noting(path: Path) -> Callable[[], Opened]:
    """Makes memory, and notes it in a file."""

    def made() -> Opened:
        with open(path, "a") as file:
            file.write("made\n")
        return make()

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
def key() -> Iterator[str]:
    found = uuid.uuid4().hex
    label = label_of(found) if LINUX_HERE else ""
    yield found
    assert not label or label not in Path("/proc/net/unix").read_text()


@pytest.fixture
def processes(key: str) -> Iterator[Processes]:
    """They are gone before it is looked what is left of the key."""
    found = Processes()
    yield found
    for pid in list(found.pids):
        found.kill(pid)
    for fd in (found.told, found.tell, found.goes_on, found.go_on):
        os.close(fd)


@LINUX
def test_the_second_process_opens_the_memory_of_the_first(processes: Processes, key: str) -> None:
    mine = meet(key, join, make)

    def other() -> None:
        found = meet(key, join, refuse)
        assert os.pread(found.fd, 5, 0) == b"made\n"
        os.pwrite(found.fd, b"seen\n", 0)

    assert processes.wait(processes.start(other)) == 0
    assert os.pread(mine.fd, 9, 0) == b"seen\n"


@LINUX
def test_of_many_that_come_at_once_one_makes_it(processes: Processes, key: str, tmp_path: Path) -> None:
    def work() -> None:
        found = meet(key, join, noting(tmp_path / "notes"))
        assert os.pread(found.fd, 5, 0) == b"made\n"
        processes.say_and_wait()  # keeps it until all have met

    for _ in range(8):
        processes.start(work)
    processes.hear(8)
    os.write(processes.go_on, b"." * 8)
    assert [processes.wait(pid) for pid in list(processes.pids)] == [0] * 8
    assert (tmp_path / "notes").read_text() == "made\n"


@LINUX
def test_a_maker_that_is_killed_leaves_its_place_to_another(processes: Processes, key: str, tmp_path: Path) -> None:
    def never() -> Opened:
        processes.say_and_wait()
        raise AssertionError

    first = processes.start(lambda: meet(key, join, never))
    processes.hear()
    second = processes.start(lambda: meet(key, join, noting(tmp_path / "notes")))
    processes.kill(first)
    assert processes.wait(second) == 0
    assert (tmp_path / "notes").read_text() == "made\n"


@LINUX
def test_a_child_of_a_killed_maker_keeps_nobody_waiting(processes: Processes, key: str) -> None:
    def never() -> Opened:
        pid = os.fork()
        if pid == 0:
            os.read(processes.goes_on, 1)
            os._exit(0)
        processes.say_and_wait()
        raise AssertionError

    first = processes.start(lambda: meet(key, join, never))
    processes.hear()
    processes.kill(first)
    meet(key, join, make)
    os.write(processes.go_on, b".")


@LINUX
def test_the_memory_is_found_when_its_maker_has_ended(processes: Processes, key: str) -> None:
    def hold(maker: Callable[[], Opened]) -> None:
        found = meet(key, join, maker)
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
def test_memory_that_nobody_has_is_made_again(processes: Processes, key: str) -> None:
    for _ in range(3):
        pid = processes.start(lambda: (meet(key, join, make), processes.say_and_wait()))
        processes.hear()
        processes.kill(pid)
    meet(key, join, make)


@LINUX
def test_an_error_of_the_maker_is_raised_and_the_next_one_makes_it(key: str) -> None:
    def fail() -> Opened:
        raise PermissionError("no")

    for _ in range(2):
        with pytest.raises(PermissionError, match="no"):
            meet(key, join, fail)
    assert os.pread(meet(key, join, make).fd, 5, 0) == b"made\n"


@LINUX
def test_threads_make_it_once(key: str, tmp_path: Path) -> None:
    found: list[Opened] = []
    maker = noting(tmp_path / "notes")
    threads = [threading.Thread(target=lambda: found.append(meet(key, join, maker))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "notes").read_text() == "made\n"
    assert len({os.fstat(one.fd).st_ino for one in found}) == 1


@LINUX
def test_memory_that_is_something_else_is_left_alone(key: str) -> None:
    first = meet(key, join, make)
    second = meet(key, lambda fd: None, make)
    assert not os.path.sameopenfile(first.fd, second.fd)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
@LINUX
def test_what_another_user_offers_or_claims_is_not_used(
    processes: Processes, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.geteuid()

    def foreign() -> None:
        """Another user, who knows the name of the key."""
        os.setuid(12345)
        monkeypatch.setattr(rendezvous.os, "geteuid", lambda: real)
        with meet(key, join, make).offer, rendezvous._claimed(label_of(key)):
            processes.say_and_wait()

    processes.start(foreign)
    processes.hear()
    mine = meet(key, join, make)
    assert os.fstat(mine.fd).st_uid == real


@pytest.mark.parametrize("what", ["socket", "proc"])
def test_where_processes_cannot_meet_each_makes_its_own(monkeypatch: pytest.MonkeyPatch, what: str, key: str) -> None:
    def deny(*_: Any) -> Any:
        raise OSError("denied")

    if what == "socket":
        monkeypatch.setattr(rendezvous.socket, "socket", deny)
    else:
        monkeypatch.setattr(rendezvous.os.path, "exists", lambda path: False)
    for _ in range(2):
        assert os.pread(meet(key, join, make).fd, 5, 0) == b"made\n"
