"""Processes that name one label, as the ranks of a machine do, have one memory, whoever dies, and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_pool
from samples import wait_for

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.caching import shared
from sharded_loader.caching.dataset import JOB, job_of_ranks
from sharded_loader.caching.shared import HAS_LINKS, Opened, links_of, meet, open_nameless

pytestmark = pytest.mark.skipif(not HAS_LINKS, reason="elsewhere each process has its own")


def join(opened: Opened) -> Opened:
    return opened


def make(label: str) -> Opened:
    opened = open_nameless(label)
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
    assert not list(links_of(found))


@pytest.fixture
def processes(label: str) -> Iterator[Processes]:
    """They are gone before it is looked what is left of the label."""
    found = Processes()
    yield found
    for pid in list(found.pids):
        found.kill(pid)
    for fd in (found.told, found.tell, found.goes_on, found.go_on):
        os.close(fd)


def test_the_second_process_opens_the_memory_of_the_first(processes: Processes, label: str) -> None:
    mine = meet(label, join, make)

    def other() -> None:
        found = meet(label, join, refuse)
        assert os.pread(found.fd, 5, 0) == b"made\n"
        os.pwrite(found.fd, b"seen\n", 0)

    assert processes.wait(processes.start(other)) == 0
    assert os.pread(mine.fd, 9, 0) == b"seen\n"


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


def test_memory_that_is_something_else_or_that_others_may_write_to_is_left_alone(label: str) -> None:
    first = meet(label, join, make)
    assert not os.path.sameopenfile(first.fd, meet(label, lambda opened: None, make).fd)
    os.fchmod(first.fd, 0o666)
    assert not os.path.sameopenfile(first.fd, meet(label, join, make).fd)


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root becomes another user")
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


# -- ``cache(...)`` in the ranks of one machine ------------------------------------------------------------------------

COUNT, RANKS, EPOCHS = 60, 3, 3


def rank(number: int, notes: Path, pool: str, ragged: bool, between: Callable[[str], Any]) -> None:
    """What a rank does, with the variables that torchrun gives it. The file of its number says what it has counted."""
    os.environ |= {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS), "MASTER_PORT": str(notes)}

    def decode(index: int) -> Any:
        with notes.open("a") as file:
            file.write(f"{index} ")
        return np.full((20, 30), index), index, f"name {index}" if ragged else "name"

    cached = SimpleDataset(range(COUNT)).transform(decode).cache("1 MB")
    between("made")
    options: dict[str, Any] = {"num_replicas": RANKS, "rank": number, "pool": make_pool(pool)}
    with ShardedDataLoader(cached, 4, shuffle=True, seed=1, **options) as loader:
        for epoch in range(EPOCHS):
            for pixels, labels, names in loader:
                assert (pixels == labels[:, None, None]).all()
                assert not ragged or names == [f"name {index}" for index in labels.tolist()]
            between(f"epoch {epoch}")
    notes.with_name(f"{number}.json").write_text(json.dumps([cached.cached, *cached.counts[:2]]))


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True], ids=["columns", "records"])
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_ranks_decode_each_sample_once(processes: Processes, tmp_path: Path, pool: str, ragged: bool) -> None:
    def work(number: int) -> None:
        def wait(what: str) -> None:
            (tmp_path / f"{what} {number}").touch()
            for other in range(RANKS):
                wait_for(tmp_path / f"{what} {other}")

        rank(number, tmp_path / "notes", pool, ragged, wait)

    pids = [processes.start(lambda number=number: work(number)) for number in range(RANKS)]  # type: ignore[misc]
    assert [processes.wait(pid) for pid in pids] == [0] * RANKS
    found = [json.loads((tmp_path / f"{number}.json").read_text()) for number in range(RANKS)]
    assert [stored for stored, _, _ in found] == [COUNT] * RANKS
    # Each reads sample 0 twice when it makes the cache, and two read the same one now and then, which is prefetched.
    reads = len((tmp_path / "notes").read_text().split())
    assert COUNT <= sum(missed for _, _, missed in found) == reads - RANKS * 2 <= COUNT + 12


@pytest.mark.slow
def test_the_others_go_on_when_the_first_rank_is_killed(processes: Processes, tmp_path: Path) -> None:
    """Also a rank that is started in its place finds what is there."""
    notes = tmp_path / "notes"

    def reads() -> list[str]:
        return notes.read_text().split()

    def start(number: int, waits: bool = True) -> int:
        wait = processes.say_and_wait if waits else lambda: None
        pid = processes.start(lambda: rank(number, notes, "fork", False, lambda what: wait()))
        if waits:
            processes.hear()
        return pid

    first = start(0)
    os.write(processes.go_on, b".")
    processes.hear()
    other, before = start(1), {*reads()}
    processes.kill(first)
    assert len(before) >= COUNT // RANKS
    assert processes.wait(start(0, waits=False)) == 0
    stored, hits, _ = json.loads((tmp_path / "0.json").read_text())
    assert hits >= COUNT // RANKS and stored >= len(before)
    done = len(reads())
    os.write(processes.go_on, b"." * (EPOCHS + 1))
    assert processes.wait(other) == 0
    _, hits, misses = json.loads((tmp_path / "1.json").read_text())
    assert hits > 0 and len(reads()) == done + misses


@pytest.mark.slow
def test_other_interpreters_ask_for_the_same_memory() -> None:
    program = (
        "import os, numpy\nfrom sharded_loader import SimpleDataset\n"
        "cached = SimpleDataset(range(60)).transform(lambda index: (numpy.full(3, index), 'name')).cache('1 MB')\n"
        "print(os.readlink(cached._store.name).split()[0])\n"
    )
    environ = {**os.environ, "RANK": "0", "MASTER_PORT": uuid.uuid4().hex}
    found = [subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True) for _ in range(2)]
    assert found[0].stdout == found[1].stdout and b"sharded_loader-cache-" in found[0].stdout


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """This process becomes another rank, of the same job or of one at another port."""
    from sharded_loader.caching import store

    def become(port: str = uuid.uuid4().hex) -> None:
        monkeypatch.setenv("MASTER_PORT", port)
        store._calls.clear()

    monkeypatch.setenv("RANK", "0")
    become()
    return become


def is_one_memory(one: Any, other: Any) -> bool:
    return os.path.sameopenfile(one._store.fd, other._store.fd)


def decoding(max_bytes: Any = "1 MB", count: int = 9, fn: Any = None, **options: Any) -> Any:
    return SimpleDataset(range(count)).transform(fn or decoded).cache(max_bytes, **options)


def decoded(index: int) -> Any:
    return np.zeros(3) if index == 0 else np.full(3, float(index))


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "shards whose first samples are equal": (
        lambda: SimpleDataset([0.0] * 4 + [1.0] * 4).shard(2, 0).cache("1 MB"),
        lambda: SimpleDataset([0.0] * 4 + [1.0] * 4).take(8)[4:].cache("1 MB"),
    ),
    "files": (
        lambda: SimpleDataset(["a.jpg", "b.jpg"]).transform(lambda name: 1).cache("1 MB"),
        lambda: SimpleDataset(["a.jpg", "c.jpg"]).transform(lambda name: 1).cache("1 MB"),
    ),
    "functions": (decoding, lambda: decoding(fn=np.zeros)),
    "keys": (decoding, lambda: decoding(key="b")),
    "bounds": (decoding, lambda: decoding("2 MB")),
    "samples": (decoding, lambda: decoding(fn=lambda index: (decoded(index), str(index)))),
}


@pytest.mark.parametrize(("one", "other"), DIFFERENT.values(), ids=DIFFERENT)
def test_ranks_that_ask_for_something_else_have_their_own(
    as_rank: Callable[..., None], one: Callable[[], Any], other: Callable[[], Any]
) -> None:
    first = one()
    list(first)
    as_rank()
    second = other()
    assert not is_one_memory(first, second) and second.cached == 0
    assert len(list(second)) == len(second) == second.counts[1] and second.counts[0] == 0
    as_rank()
    assert is_one_memory(first, one())


def test_the_second_cache_of_a_rank_and_those_of_another_job_are_others(
    as_rank: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = decoding(), decoding()
    as_rank()
    assert is_one_memory(one, decoding()) and is_one_memory(two, decoding()) and not is_one_memory(one, two)
    as_rank("another job")
    assert not is_one_memory(one, decoding())
    for name in ("RANK", "LOCAL_RANK", *JOB):
        monkeypatch.delenv(name, raising=False)
    assert not is_one_memory(decoding(), decoding())  # no ranks


def test_all_ranks_together_keep_within_the_bound(as_rank: Callable[..., None]) -> None:
    ranks = []
    for number in range(4):
        ranks.append(decoding(50 * 24, 100))
        for index in range(number, 100, 4):
            ranks[-1][index]
        as_rank()
    assert [rank.cached for rank in ranks] == [50] * 4
    assert all((rank[index] == decoded(index)).all() for rank in ranks for index in range(100))


@pytest.mark.parametrize("bound", [None, "1 MB"])
def test_each_rank_counts_its_own(as_rank: Callable[..., None], bound: str | None) -> None:
    one = decoding(bound, 10)
    list(one)
    as_rank()
    other = decoding(bound, 10)
    assert other[3][0] == 3
    assert one.counts == (0, 10, 240) and other.counts == (1, 0, 240)


RANK_OF: dict[str, tuple[dict[str, str], bool]] = {
    "torchrun": ({"RANK": "0", "TORCHELASTIC_RUN_ID": "x", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, True),
    "srun": ({"SLURM_LOCALID": "1", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True),
    "mpirun": ({"OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "n"}, True),
    "only a rank": ({"RANK": "0"}, True),
    "none": ({"MASTER_ADDR": "a"}, False),
}


@pytest.mark.parametrize(("environ", "is_rank"), RANK_OF.values(), ids=RANK_OF)
def test_ranks_are_known_by_what_started_them(environ: dict[str, str], is_rank: bool) -> None:
    assert (job_of_ranks(environ) is not None) == is_rank
