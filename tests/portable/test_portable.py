"""What Windows and macOS do otherwise than Linux, one difference at a time: ``make test-portable``."""

from __future__ import annotations

import math
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import multiprocess
import numpy as np
import psutil
import pytest

from sharded_loader import lengths_of
from sharded_loader.base import limits, system
from sharded_loader.caching import shared, store
from sharded_loader.engine.messages import Job, Task
from sharded_loader.memory import segments
from sharded_loader.pools.process import link as wire
from sharded_loader.pools.process import worker as worker_module
from sharded_loader.pools.process.transport import ProcessTransport
from sharded_loader.recordio import positioned

linux = pytest.mark.skipif(sys.platform != "linux", reason="stands in for another system")


@linux
def test_names_of_shared_memory_have_the_31_characters_of_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Mock(side_effect=OSError("seen"))
    monkeypatch.setattr(system, "posix_shared_memory", lambda: SimpleNamespace(shm_open=opened, shm_unlink=Mock()))
    monkeypatch.setattr(os, "getpid", lambda: 99_999)
    for number in (0, -10_000_000, 10_000_000):
        with pytest.raises(OSError, match="seen"):
            system.open_memory(f"{system.PREFIX}-{number}", "shm")
    assert all(len(call.args[0]) <= 31 for call in opened.call_args_list)


@linux
def test_macos_has_a_dataset_in_a_file_which_workers_map_for_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds: list[Any] = []

    def opened(label: str, kind: str | None) -> tuple[int, str | None]:
        kinds.append(kind)
        return os.memfd_create(label), None

    monkeypatch.setattr(segments, "open_memory", opened)
    monkeypatch.setattr(sys, "platform", "darwin")
    for number in (-1, 0):
        segments.create(number, 4096).close()
    assert kinds == ["file", None]


@pytest.mark.skipif(sys.platform == "darwin", reason="memory has no name there")
def test_the_memory_of_a_job_has_its_name_until_each_worker_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows would give a worker that starts slowly empty memory under the name that is gone."""
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "named")
    owner = ProcessTransport(1, "spawn", None)
    owner.workers = [worker := SimpleNamespace(link=Mock(), unread=[])]  # type: ignore[list-item]
    for value in (1.0, 2.0):
        owner.start(Job(np.full(100_000, value), None, 0))
    first, second = [call.args[0] for call in worker.link.send_segment.call_args_list]
    for number, segment in ((first.number, first), (second.number, second)):
        read = segments.attach(number, segment.nbytes, None, segment.name, private=True)
        assert (1.0 if segment is first else 2.0) in np.frombuffer(read.mapping, np.float64)[:90_000]
        read.close()
        del read
    descriptor = first.fd
    worker.link.reset_mock()
    del worker.unread[:1], first, segment
    owner.workers = []
    owner.close()
    assert descriptor is None or not os.path.exists(f"/proc/self/fd/{descriptor}")


@pytest.mark.parametrize("error", [ValueError("concurrent send_bytes() calls"), TypeError("the handle is None")])
def test_a_thread_that_wakes_the_program_while_another_does_so_or_closes_has_nothing_to_do(error: Exception) -> None:
    owner = ProcessTransport(1, "spawn", None)
    owner.waker = (Mock(), Mock(send_bytes=Mock(side_effect=error)))
    owner.wake()
    assert owner.waker[1].send_bytes.called
    owner.waker = None


@linux
def test_more_handles_than_windows_waits_for_at_once_are_asked_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing import connection

    wait, pipes = connection.wait, [multiprocess.Pipe(duplex=False) for _ in range(130)]

    def wait_for_some(handles: list[Any], timeout: float | None = None) -> list[Any]:
        assert len(handles) <= 63
        return wait(handles, timeout)

    monkeypatch.setattr(connection, "wait", wait_for_some)
    monkeypatch.setattr(sys, "platform", "win32")
    ends = [reader for reader, _ in pipes]
    assert wire.wait_for_any(ends, 0.0) == [] == wire.wait_for_any(ends, 0.001)
    for number in (0, 129):
        pipes[number][1].send_bytes(b"x")
    assert wire.wait_for_any(ends, None) == [ends[0], ends[129]]
    for end in [one for pair in pipes for one in pair]:
        end.close()


class Large:
    """Texts that a pipe does not take at once. The second one is read when it is told to."""

    def __init__(self) -> None:
        self.begun, self.may_go_on = threading.Event(), threading.Event()

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> str:
        if index == 1:
            self.begun.set()
            self.may_go_on.wait()
        return "x" * 30_000


def test_a_worker_reads_on_while_it_sends_what_was_asked_for(host_time: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ends of a pipe of Windows block: each would wait for the other one to read."""
    monkeypatch.setattr(wire, "PORTABLE", True)
    monkeypatch.setattr(worker_module, "GROUP_SECONDS", math.inf)
    monkeypatch.setattr("sharded_loader.streams.worker_info.announce_worker", lambda *_: None)  # this is no worker
    ours, theirs = multiprocess.Pipe()
    for end in (ours, theirs):
        with socket.socket(fileno=os.dup(end.fileno())) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    link, data = wire.Link(ours, blocks=True), Large()
    worker = worker_module.WorkerThreads(other := wire.Link(theirs, blocks=True), 4, 5)
    runs = threading.Thread(target=worker.run, args=[Job(data, None, 0)], daemon=True)
    runs.start()
    link.send(wire.JOB)
    tasks = [(0, seq, None, Task(0, seq, 1, seq, ([seq],), False).fields) for seq in range(2)]
    link.send(wire.TASKS, content=pickle.dumps(tasks))
    assert data.begun.wait(60)
    link.send(wire.FLUSH)
    sends = threading.Thread(target=link.send, args=[wire.TASKS], kwargs={"content": pickle.dumps([]) + bytes(1 << 20)})
    sends.daemon = True
    sends.start()
    sends.join(60)
    assert not sends.is_alive(), "the program waits for the worker to read, and the worker for the program"
    data.may_go_on.set()
    while sum(len(message.content) for message in link.inbox) < 60_000:  # both texts
        link.read()
    link.send(wire.LEAVE)
    runs.join()
    link.close()
    other.close()


@linux
def test_windows_says_how_much_memory_is_free_through_psutil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=7 << 30))
    assert limits.free_bytes(tmp_path).nbytes == 7 << 30
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert limits.free_bytes(tmp_path).nbytes == 2 << 30


def test_lengths_are_found_although_another_process_has_the_lock_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "unlink", Mock(side_effect=PermissionError("open elsewhere")))
    assert lengths_of([[5, 2, 9], [7, 1]], tmp_path / "lengths.npy").tolist() == [3, 2]


@linux
def test_a_lock_of_windows_moves_no_reader_s_position_and_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def locking(fd: int, mode: str, nbytes: int) -> None:
        assert positioned.seek_lock.locked() and os.lseek(fd, 0, os.SEEK_CUR) == 1000
        asked.append(mode)
        if asked in (["take"], ["take", "take"]):
            raise PermissionError("held elsewhere")

    monkeypatch.setitem(sys.modules, "msvcrt", SimpleNamespace(locking=locking, LK_NBLCK="take", LK_UNLCK="give"))
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(shared, "LOCK_POLL", 0.0)
    with tempfile.TemporaryFile() as file:
        for is_taken in (True, False):
            shared.set_lock(file.fileno(), is_taken, byte=1000)
        assert asked == ["take", "take", "take", "give"]
        asked.clear()
        with pytest.raises(PermissionError):
            shared.set_lock(file.fileno(), True, byte=1000, block=False)


def test_memory_in_a_file_is_deleted_with_its_last_holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows deletes no file that is mapped, so who made it cannot delete it; and nobody else would do so later."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(shared, "HAS_LINKS", False)
    made = store.Session(100)
    joined = pickle.loads(pickle.dumps(made))
    joined.sound[50] = 7
    assert made.sound[50] == 7 and len(os.listdir(tmp_path)) == 1
    del made
    assert joined.sound[50] == 7
    del joined
    assert os.listdir(tmp_path) == []


PROGRAM = """
import os, signal
import numpy as np
from sharded_loader.engine.messages import Job, Task
from sharded_loader.pools.process.pool import ProcessPool

class Rows:
    def __init__(self, first):
        self.rows = np.full((200, 500), first)  # published in a segment; batches of 400 KB lie in slots

    def __len__(self):
        return 800

    def __getitem__(self, index):
        return self.rows[index % 200] + index

pool, found = ProcessPool(2), {}
for first in (0.0, 1000.0):
    pool.start(Job(Rows(first), None, 0))
left = [Task(0, seq, 1, seq, (list(range(100 * seq, 100 * seq + 100)),), False) for seq in range(8)]
while len(found) < 8:
    room = max(0, pool.room)
    pool.submit(left[:room])
    del left[:room]
    for result in pool.wait(True):
        assert result.error is None, result.error
        found[result.seq] = np.array(result.batch)
        if len(found) == 2:
            os.kill(pool.pids[0], signal.SIGKILL)
assert all((found[seq][:, 7] == np.arange(1000 + 100 * seq, 1100 + 100 * seq)).all() for seq in range(8))
pool.close()
print("read", pool.start_method)
"""


@linux
@pytest.mark.costly
@pytest.mark.parametrize("system", ["windows", "macos"])
def test_spawned_workers_read_and_one_that_is_killed_is_replaced_as_there(system: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    here = Path(__file__).parent
    environment = os.environ | {"SHARDED_LOADER_TEST_PORTABLE": system}
    environment["PYTHONPATH"] = os.pathsep.join([str(here), str(here.parent.parent)])
    command = [sys.executable, "-W", "error", str(tmp_path / "program.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout == "read spawn\n", done.stderr
