"""Calls that a system may refuse: what is done instead gives the same."""

from __future__ import annotations

import errno
import mmap
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sharded_loader.base import system

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")


def refused(number: int) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return call


@linux
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EACCES, errno.EINVAL])
def test_the_first_kind_of_memory_that_works_is_used(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
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
def test_memory_for_which_there_is_no_descriptor_is_not_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", refused(errno.EMFILE))
    with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):
        system.open_memory("sharded_loader-0")


@linux
def test_a_platform_without_memfd_or_shm_has_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")
    monkeypatch.setitem(sys.modules, "_posixshmem", None)
    fd, kind = system.open_memory("sharded_loader-0")
    os.close(fd)
    assert kind == tempfile.gettempdir()


@linux
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP, errno.EINVAL])
def test_memory_is_set_aside_without_posix_fallocate_too(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refused(number))
    fd, _ = system.open_memory("sharded_loader-0")
    nbytes = system.ALLOCATED_AT_ONCE + 3 * mmap.PAGESIZE
    os.ftruncate(fd, nbytes)
    system.allocate(fd, nbytes)
    assert os.fstat(fd).st_blocks * 512 >= nbytes and os.fstat(fd).st_size == nbytes
    os.close(fd)


@linux
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.ENOMEM])
def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refused(number))
    fd, _ = system.open_memory("sharded_loader-0")
    try:
        with pytest.raises(OSError, match=os.strerror(number)):
            system.allocate(fd, mmap.PAGESIZE)
    finally:
        os.close(fd)


def test_whether_descriptors_can_be_passed_is_found_out_by_passing_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.can_pass_descriptors()
    for name in ("send_fds", "recv_fds"):
        with monkeypatch.context() as patched:
            patched.setattr(socket, name, refused(errno.EPERM))
            assert not system.can_pass_descriptors()
    monkeypatch.setattr(socket, "send_fds", lambda end, data, fds: end.send(data[0]))  # a security module takes it out
    assert not system.can_pass_descriptors()


def test_no_descriptors_in_this_moment_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socketpair", refused(errno.EMFILE))
    assert system.can_pass_descriptors()


# -- files under /proc that cannot be read --------------------------------------------------------------------


def test_a_cgroup_whose_name_is_no_text_sets_no_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert system.free_bytes(tmp_path).nbytes > 0
    assert system.oom_kills(tmp_path) is None


# -- what is free, read from files like those of real machines ---------------------------------------------------------

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def machine(free: int = 100 * GIB) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal:  263 kB\nMemFree:  1 kB\nMemAvailable: {free // 1024} kB\nBuffers: 3 kB\n"}


def v2(folder: str, maximum: int | str, current: int, **stat: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    lines = {"anon": 5, "file": 6, "inactive_file": 0, "active_file": 0, "slab": 7} | stat
    return {
        f"{at}/memory.max": f"{maximum}\n",
        f"{at}/memory.current": f"{current}\n",
        f"{at}/memory.stat": "".join(f"{key} {value}\n" for key, value in lines.items()),
    }


def v1(folder: str, limit: int, usage: int, **stat: int) -> dict[str, str]:
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    lines = {"cache": 5, "inactive_file": 0, "active_file": 0, "hierarchical_memory_limit": limit} | stat
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": "".join(f"{key} {value}\n" for key, value in lines.items()),
    }


UNLIMITED_V1 = 9223372036854771712


def test_without_cgroups_the_machine_is_the_limit(tmp_path: Path) -> None:
    limit = system.free_bytes(write(tmp_path, machine()))
    assert limit.nbytes == 100 * GIB and "machine" in limit.what


def test_a_system_without_proc_still_has_an_answer(tmp_path: Path) -> None:
    limit = system.free_bytes(tmp_path)
    assert limit.nbytes > 0 and limit.what


def test_this_machine_has_an_answer() -> None:
    limit = system.free_bytes()
    assert 0 < limit.nbytes < 1 << 60 and limit.what


@pytest.mark.parametrize("tight", ["", "user.slice", "user.slice/job", "user.slice/job/step"])
def test_the_tightest_of_all_enclosing_groups_of_v2_counts(tmp_path: Path, tight: str) -> None:
    files = machine() | {"proc/self/cgroup": "0::/user.slice/job/step\n"}
    for folder in ("user.slice", "user.slice/job", "user.slice/job/step"):
        files |= v2(folder, "max", 5 * GIB)
    files |= v2(tight, 8 * GIB, 5 * GIB)
    limit = system.free_bytes(write(tmp_path, files))
    assert limit.nbytes == 3 * GIB
    assert limit.what.endswith(f"cgroup {tmp_path}/sys/fs/cgroup/{tight}".rstrip("/"))


def test_groups_of_others_do_not_count(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/mine\n"} | v2("mine", 8 * GIB, 0) | v2("other", GIB, 0)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 8 * GIB


def test_in_a_container_the_root_of_the_mount_counts(tmp_path: Path) -> None:
    # The path is the host's; the container sees its own group as the root.
    files = machine() | {"proc/self/cgroup": "0::/kubepods/pod1/container2\n"} | v2("", 4 * GIB, GIB)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 3 * GIB
    files["proc/self/cgroup"] = "0::/../../elsewhere\n"
    assert system.free_bytes(write(tmp_path, files)).nbytes == 3 * GIB


@pytest.mark.parametrize("tight", ["", "slurm", "slurm/job"])
def test_v1_beside_other_controllers(tmp_path: Path, tight: str) -> None:
    files = machine() | {"proc/self/cgroup": "9:name=systemd:/x\n4:memory:/slurm/job\n3:cpu,cpuacct:/\n0::/\n"}
    for folder in ("", "slurm", "slurm/job"):
        files |= v1(folder, UNLIMITED_V1, 5 * GIB)
    files |= v1(tight, 6 * GIB, 5 * GIB)
    limit = system.free_bytes(write(tmp_path, files))
    assert limit.nbytes == GIB and "sys/fs/cgroup/memory" in limit.what


def test_v1_without_a_limit(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "4:memory:/job\n"} | v1("job", UNLIMITED_V1, GIB)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 100 * GIB


def test_the_page_cache_is_free(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"}
    files |= v2("job", 10 * GIB, 9 * GIB, inactive_file=2 * GIB, active_file=5 * GIB)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 8 * GIB


def test_in_v1_the_page_cache_of_the_groups_below_is_free_too(tmp_path: Path) -> None:
    # A job with its limit, and a step below it that has read the dataset's files.
    files = machine() | {"proc/self/cgroup": "4:memory:/job/step\n"}
    files |= v1("job", 10 * GIB, 9 * GIB, total_inactive_file=7 * GIB, total_active_file=GIB)
    files |= v1("job/step", UNLIMITED_V1, 9 * GIB, inactive_file=7 * GIB, total_inactive_file=7 * GIB)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 9 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 2 * GIB)
    assert system.free_bytes(write(tmp_path, files)).nbytes == 0


def test_cache_that_was_counted_later_than_the_usage_frees_no_more_than_the_limit(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 1000, inactive_file=5000)
    assert system.free_bytes(write(tmp_path, files)).nbytes == GIB


@pytest.mark.parametrize("broken", ["", "nonsense\n", "12 34 56\n"])
def test_files_that_cannot_be_read_do_not_count(tmp_path: Path, broken: str) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 0)
    for name in ("memory.max", "memory.current"):
        files[f"sys/fs/cgroup/job/{name}"] = broken
    assert system.free_bytes(write(tmp_path, files)).nbytes == 100 * GIB


EVENTS = "low 0\nhigh 3\nmax 41\noom 5\noom_kill {}\noom_group_kill 9\n"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill {}\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "count"),
    [
        ("0::/job/step\n", {"job/step/memory.events": EVENTS.format(2), "job/memory.events": EVENTS.format(7)}, 2),
        ("0::/of/the/host\n", {"memory.events": EVENTS.format(4)}, 4),  # in a container
        ("4:memory:/job\n0::/\n", {"memory/job/memory.oom_control": CONTROL.format(3)}, 3),
        ("4:cpu,memory:/x\n", {"memory/memory.oom_control": CONTROL.format(1)}, 1),
        ("4:memory:/\n", {"memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\n"}, None),  # before 4.13
        ("0::/\n", {"memory.events": "oom_kill many\n"}, None),
        ("0::/\n", {"memory.events": "\n\noom_kill\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_what_the_kernel_has_killed_is_read_from_the_own_group(
    tmp_path: Path, cgroup: str, files: dict[str, str], count: int | None
) -> None:
    write(tmp_path, {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert system.oom_kills(tmp_path) == count


def test_without_cgroups_nobody_knows_what_the_kernel_has_killed(tmp_path: Path) -> None:
    assert system.oom_kills(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "nonsense\n"})
    assert system.oom_kills(tmp_path) is None
    assert system.free_bytes(tmp_path).nbytes > 0


# -- environment variables --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "number"), [(None, 7), ("", 7), (" ", 7), ("3", 3), (" 12 ", 12), ("0", 0)])
def test_an_environment_variable_holds_a_number(value: str | None, number: int) -> None:
    environ = {} if value is None else {"X": value}
    assert system.integer("X", 7, least=0, advice="unset it", environ=environ) == number


@pytest.mark.parametrize("value", ["x", "1.5", "-1", "1e3"])
def test_an_environment_variable_that_holds_no_such_number_is_named(value: str) -> None:
    with pytest.raises(ValueError, match=f"variable X is '{value}'; it must be an integer of at least 0: unset it"):
        system.integer("X", 7, least=0, advice="unset it", environ={"X": value})


@pytest.mark.parametrize(("value", "on"), [(None, False), ("", False), ("0", False), (" 0 ", False), ("1", True)])
def test_a_switch_is_off_where_it_is_0_or_empty(value: str | None, on: bool) -> None:
    assert system.is_on("X", {} if value is None else {"X": value}) == on


# -- what would not fit -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_bytes", lambda: system.Limit(GIB, "the machine's memory"))
    with pytest.raises(MemoryError, match="it is a list. That takes 2,147,483,648 bytes.*1,073,741,824: take less"):
        system.check_fits(2 * GIB, "it is a list", "take less")
    system.check_fits(GIB, "it fits", "take less")


def test_small_things_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "free_bytes", lambda: system.Limit(0, "the machine's memory"))
    system.check_fits(1000, "it is small", "take less")
