"""How much memory is free, how many cores there are, and whether the workers are far more."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from simulated import pretended_sys

from sharded_loader import LoaderWarning, ShardedDataLoader
from sharded_loader.base import limits
from sharded_loader.base.limits import (
    Near,
    bind,
    core_limit,
    cores_for_workers,
    cpus_in,
    cpus_near,
    node_of,
    numa_nodes,
    run_on,
    warn_of_workers,
)


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- memory -----------------------------------------------------------------------------------------------------------


def test_a_cgroup_whose_name_is_no_text_sets_no_limit(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_bytes(b"0::/\xff\xfe\n")
    assert limits.free_bytes(tmp_path).nbytes > 0
    assert limits.oom_kills(tmp_path) is None


# -- what is free, read from files like those of real machines ---------------------------------------------------------

GIB = 1 << 30


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
    limit = limits.free_bytes(write(tmp_path, machine()))
    assert limit.nbytes == 100 * GIB and "machine" in limit.what


def test_a_system_without_proc_still_has_an_answer(tmp_path: Path) -> None:
    limit = limits.free_bytes(tmp_path)
    assert limit.nbytes > 0 and limit.what


def test_this_machine_has_an_answer() -> None:
    limit = limits.free_bytes()
    assert 0 < limit.nbytes < 1 << 60 and limit.what


@pytest.mark.parametrize("tight", ["", "user.slice", "user.slice/job", "user.slice/job/step"])
def test_the_tightest_of_all_enclosing_groups_of_v2_counts(tmp_path: Path, tight: str) -> None:
    files = machine() | {"proc/self/cgroup": "0::/user.slice/job/step\n"}
    for folder in ("user.slice", "user.slice/job", "user.slice/job/step"):
        files |= v2(folder, "max", 5 * GIB)
    files |= v2(tight, 8 * GIB, 5 * GIB)
    limit = limits.free_bytes(write(tmp_path, files))
    assert limit.nbytes == 3 * GIB
    assert limit.what.endswith(f"cgroup {tmp_path}/sys/fs/cgroup/{tight}".rstrip("/"))


def test_groups_of_others_do_not_count(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/mine\n"} | v2("mine", 8 * GIB, 0) | v2("other", GIB, 0)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 8 * GIB


def test_in_a_container_the_root_of_the_mount_counts(tmp_path: Path) -> None:
    # The path is the host's; the container sees its own group as the root.
    files = machine() | {"proc/self/cgroup": "0::/kubepods/pod1/container2\n"} | v2("", 4 * GIB, GIB)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 3 * GIB
    files["proc/self/cgroup"] = "0::/../../elsewhere\n"
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 3 * GIB


@pytest.mark.parametrize("tight", ["", "slurm", "slurm/job"])
def test_v1_beside_other_controllers(tmp_path: Path, tight: str) -> None:
    files = machine() | {"proc/self/cgroup": "9:name=systemd:/x\n4:memory:/slurm/job\n3:cpu,cpuacct:/\n0::/\n"}
    for folder in ("", "slurm", "slurm/job"):
        files |= v1(folder, UNLIMITED_V1, 5 * GIB)
    files |= v1(tight, 6 * GIB, 5 * GIB)
    limit = limits.free_bytes(write(tmp_path, files))
    assert limit.nbytes == GIB and "sys/fs/cgroup/memory" in limit.what


def test_v1_without_a_limit(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "4:memory:/job\n"} | v1("job", UNLIMITED_V1, GIB)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 100 * GIB


def test_the_page_cache_is_free(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"}
    files |= v2("job", 10 * GIB, 9 * GIB, inactive_file=2 * GIB, active_file=5 * GIB)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 8 * GIB


def test_in_v1_the_page_cache_of_the_groups_below_is_free_too(tmp_path: Path) -> None:
    # A job with its limit, and a step below it that has read the dataset's files.
    files = machine() | {"proc/self/cgroup": "4:memory:/job/step\n"}
    files |= v1("job", 10 * GIB, 9 * GIB, total_inactive_file=7 * GIB, total_active_file=GIB)
    files |= v1("job/step", UNLIMITED_V1, 9 * GIB, inactive_file=7 * GIB, total_inactive_file=7 * GIB)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 9 * GIB


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 2 * GIB)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 0


def test_cache_that_was_counted_later_than_the_usage_frees_no_more_than_the_limit(tmp_path: Path) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 1000, inactive_file=5000)
    assert limits.free_bytes(write(tmp_path, files)).nbytes == GIB


@pytest.mark.parametrize("broken", ["", "nonsense\n", "12 34 56\n"])
def test_files_that_cannot_be_read_do_not_count(tmp_path: Path, broken: str) -> None:
    files = machine() | {"proc/self/cgroup": "0::/job\n"} | v2("job", GIB, 0)
    for name in ("memory.max", "memory.current"):
        files[f"sys/fs/cgroup/job/{name}"] = broken
    assert limits.free_bytes(write(tmp_path, files)).nbytes == 100 * GIB


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
    assert limits.oom_kills(tmp_path) == count


def test_without_cgroups_nobody_knows_what_the_kernel_has_killed(tmp_path: Path) -> None:
    assert limits.oom_kills(tmp_path) is None
    write(tmp_path, {"proc/self/cgroup": "nonsense\n"})
    assert limits.oom_kills(tmp_path) is None
    assert limits.free_bytes(tmp_path).nbytes > 0


# -- what would not fit -----------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: limits.Limit(GIB, "the machine's memory"))
    with pytest.raises(MemoryError, match="it is a list. That takes 2,147,483,648 bytes.*1,073,741,824: take less"):
        limits.check_fits(2 * GIB, "it is a list", "take less")
    limits.check_fits(GIB, "it fits", "take less")


def test_small_things_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: limits.Limit(0, "the machine's memory"))
    limits.check_fits(1000, "it is small", "take less")


# -- cores ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 0.5),
        ({"sys/fs/cgroup/job/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_tightest_limit_of_processor_time_counts(
    files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    assert core_limit(write(tmp_path, {"proc/self/cgroup": "0::/job\n"} | files)) == limit


@pytest.mark.parametrize(("quota", "limit"), [("-1", None), ("400000", 4.0)])
def test_the_first_kind_of_cgroups_is_read_too(quota: str, limit: float | None, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
    }
    assert core_limit(write(tmp_path, files)) == limit


def test_workers_share_what_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "usable_cores", lambda: 8)
    for limit, number in ((None, 8), (2.5, 3), (0.5, 1), (99.0, 8)):
        monkeypatch.setattr(limits, "core_limit", lambda limit=limit: limit)
        assert cores_for_workers() == number


@pytest.mark.parametrize(
    ("workers", "ranks", "warns"), [(16, "", False), (17, "", True), (16, "2", True), (4, "8", False), (16, "x", False)]
)
def test_far_more_worker_processes_than_cores_are_a_warning(
    workers: int, ranks: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "cores_for_workers", lambda: 8)
    monkeypatch.setattr(limits, "usable_cores", lambda: 8)
    monkeypatch.setattr(limits.os, "cpu_count", lambda: 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_workers(workers, {"LOCAL_WORLD_SIZE": ranks})
    assert [one.category for one in caught] == [LoaderWarning] * warns
    assert all("share 8 cores" in str(one.message) for one in caught)


def test_the_loader_warns_when_it_is_made_and_threads_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "cores_for_workers", lambda: 2)
    with pytest.warns(LoaderWarning, match="64 worker processes share 2 cores") as caught:
        ShardedDataLoader(range(8), 2, num_workers=64)
    assert caught[0].filename == __file__
    ShardedDataLoader(range(8), 2, num_workers=64, thread_pool=True)


# -- cores near a device ----------------------------------------------------------------------------------------------

FIRST, SECOND, OTHER = "0000:01:00.0", "0000:81:00.0", "0000:82:00.0"
linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="Linux only")


@pytest.fixture
def may_use(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets the CPUs that this process may use."""
    return lambda cpus: monkeypatch.setattr(limits, "usable_cpus", lambda: cpus_in(cpus))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("0-3,8,10-11\n", [0, 1, 2, 3, 8, 10, 11]), ("5\n", [5]), ("\n", []), ("", []), ("0-1,128-129", [0, 1, 128, 129])],
)
def test_a_list_of_cpus_is_read_as_the_kernel_writes_it(text: str, cpus: list[int]) -> None:
    assert sorted(cpus_in(text)) == cpus


def test_nodes_with_cpus_are_found(tmp_path: Path) -> None:
    pretended_sys(tmp_path, {0: "0-1", 1: "2-3", 2: "", 10: "4"}, {})
    (tmp_path / "sys/devices/system/node/node11").mkdir()  # without a list
    (tmp_path / "sys/devices/system/node/node12").mkdir()
    (tmp_path / "sys/devices/system/node/node12/cpulist").write_text("not a list")
    assert numa_nodes(tmp_path) == {0: {0, 1}, 1: {2, 3}, 10: {4}}


def test_the_node_of_a_device_is_unknown_unless_the_system_says_it(tmp_path: Path) -> None:
    pretended_sys(tmp_path, {}, {FIRST: "1", SECOND: "-1", OTHER: "no number"})
    assert [node_of(one, tmp_path) for one in (FIRST, SECOND, OTHER, "0000:99:00.0", None)] == [1, -1, -1, -1, -1]
    assert node_of(FIRST, tmp_path / "no such folder") == -1


@pytest.mark.parametrize(
    ("nodes", "gpus", "usable", "near"),
    [
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "0-7", Near(cpus_in("4-7"), 4), id="the GPU is on node 1"),
        pytest.param({0: "0-3,8", 1: "4-7"}, [SECOND], "0-9", Near(cpus_in("0-3,8"), 5), id="on node 0"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST, FIRST], "0-7", Near(cpus_in("4-7"), 4), id="two GPUs on one node"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "2-5", Near(cpus_in("4-5"), 2), id="never more than it may use"),
        pytest.param({0: "0-7"}, [FIRST], "0-7", Near(), id="one node"),
        pytest.param({}, [FIRST], "0-7", Near(), id="no /sys"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "0-3", Near(), id="bound to the other node"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "4-7", Near(), id="bound to this node already"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "5-6", Near(), id="bound to a part of it"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST], "", Near(), id="the system does not say what it may use"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST, SECOND], "0-7", Near(), id="GPUs on two nodes"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST, None], "0-7", Near(), id="a device of no known address"),
        pytest.param({0: "0-3", 1: "4-7"}, [FIRST, OTHER], "0-7", Near(), id="a device of no known node"),
        pytest.param({0: "0-3", 1: "4-7"}, [OTHER], "0-7", Near(), id="no known node"),
        pytest.param({0: "0-3", 2: "4-7"}, [FIRST], "0-7", Near(), id="a node without CPUs"),
        pytest.param({0: "0-3", 1: "4-7"}, [], "0-7", Near(), id="no device"),
    ],
)
def test_what_is_near_is_chosen_only_where_there_is_one_right_answer(
    nodes: dict[int, str], gpus: list[str | None], usable: str, near: Near, may_use: Any, tmp_path: Path
) -> None:
    pretended_sys(tmp_path, nodes, {FIRST: "1", SECOND: "0", OTHER: "-1"})
    may_use(usable)
    assert cpus_near(gpus, tmp_path) == near


def test_cpus_that_share_a_core_count_as_one(may_use: Any, tmp_path: Path) -> None:
    pairs = {"cpu4": "4,12", "cpu12": "4,12", "cpu5": "5,13", "cpu13": "5,13"}
    pretended_sys(tmp_path, {0: "0-3", 1: "4-6,12-13"}, {FIRST: "1"}, **pairs)
    may_use("0-15")
    assert cpus_near([FIRST], tmp_path) == Near(cpus_in("4-6,12-13"), 3)


def test_a_system_without_affinities_prefers_no_cpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """macOS, Windows."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    pretended_sys(tmp_path, {0: "0", 1: "1"}, {FIRST: "1"})
    assert cpus_near([FIRST], tmp_path) == Near()
    assert limits.usable_cores() == os.cpu_count()
    ran = []
    run_on(Near().cpus, lambda: ran.append(threading.current_thread()))
    assert ran == [threading.current_thread()]


@linux
@pytest.mark.parametrize("error", [None, OSError(errno.ENOSPC, "no room"), KeyboardInterrupt()], ids=repr)
def test_work_on_other_cpus_leaves_those_of_this_thread(error: BaseException | None) -> None:
    usable, seen = os.sched_getaffinity(0), []

    def work() -> None:
        seen.append(os.sched_getaffinity(0))
        if error is not None:
            raise error

    last, threads = {max(usable)}, threading.active_count()
    if error is None:
        run_on(last, work)
    else:
        with pytest.raises(type(error)):
            run_on(last, work)
    assert seen == [last]
    assert (os.sched_getaffinity(0), threading.active_count()) == (usable, threads)


@linux
def test_work_is_done_also_where_the_system_rejects_the_cpus_or_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    def rejects(thread: int, cpus: Any) -> None:
        raise PermissionError(errno.EPERM, "not here")

    def no_thread(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[bool] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_setaffinity", rejects)
        run_on(os.sched_getaffinity(0), lambda: done.append(threading.current_thread() is threading.main_thread()))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        run_on(os.sched_getaffinity(0), lambda: done.append(threading.current_thread() is threading.main_thread()))
    assert done == [False, True]


@pytest.fixture
def sleeper() -> Iterator[int]:
    """The pid of a child process with two threads."""
    program = "import threading, sys; threading.Thread(target=sys.stdin.read).start(); print('ready', flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        yield child.pid
        child.communicate("")


@pytest.fixture
def two_cpus() -> list[int]:
    if not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs and their affinity")
    return sorted(os.sched_getaffinity(0))


def affinities(pid: int) -> list[set[int]]:
    """Of each thread of a process."""
    return [os.sched_getaffinity(int(thread)) for thread in os.listdir(f"/proc/{pid}/task")]


def test_all_threads_of_a_process_are_bound(sleeper: int, two_cpus: list[int]) -> None:
    bind(sleeper, {two_cpus[-1]})
    assert affinities(sleeper) == [{two_cpus[-1]}] * 2


def test_a_thread_that_begins_meanwhile_is_bound_too(monkeypatch: pytest.MonkeyPatch, may_use: Any) -> None:
    may_use("0-3")
    looks, where = iter([["10"], ["10", "11", "12", "13"]]), {10: {0, 1, 2, 3}, 11: {0, 1, 2, 3}, 12: {0}}
    calls = []

    def bound(thread: int, cpus: Any) -> None:
        calls.append((thread, set(cpus)))
        where[thread] = set(cpus)

    def asked(thread: int) -> set[int]:
        if thread not in where:
            raise ProcessLookupError(errno.ESRCH, "it has ended")
        return where[thread]

    monkeypatch.setattr(os, "listdir", lambda path: next(looks))
    monkeypatch.setattr(os, "sched_getaffinity", asked, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", bound, raising=False)
    bind(10, cpus_in("2-5"))
    assert calls == [(10, {2, 3}), (11, {2, 3})]  # never more than this process may use


def test_what_the_user_has_bound_stays_there(sleeper: int, two_cpus: list[int]) -> None:
    os.sched_setaffinity(sleeper, two_cpus[:1])  # its main thread
    bind(sleeper, {two_cpus[-1]})
    assert sorted(map(sorted, affinities(sleeper))) == [two_cpus[:1], two_cpus[-1:]]


def test_a_process_is_never_bound_to_cpus_that_this_one_may_not_use(
    sleeper: int, two_cpus: list[int], may_use: Any
) -> None:
    os.sched_setaffinity(sleeper, two_cpus[:1])
    may_use(str(two_cpus[0]))
    for cpus in (two_cpus, two_cpus[1:]):
        bind(sleeper, cpus)
        assert os.sched_getaffinity(sleeper) == {two_cpus[0]}


def test_a_process_that_has_ended_is_not_bound(two_cpus: list[int]) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    bind(child.pid, two_cpus)
