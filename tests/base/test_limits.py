"""How much memory is free, how many cores there are, and whether the workers are far more."""

import warnings

import pytest

from sharded_loader import LoaderWarning, ShardedDataLoader
from sharded_loader.base import limits
from sharded_loader.base.limits import core_limit, cores_for_workers, warn_of_workers


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# -- what is free, read from files like those of real machines ---------------------------------------------------------

GIB = 1 << 30


def machine(free=100 * GIB):
    return {"proc/meminfo": f"MemTotal:  263 kB\nMemFree:  1 kB\nMemAvailable: {free // 1024} kB\nBuffers: 3 kB\n"}


def v2(folder, maximum, current, **stat):
    at = f"sys/fs/cgroup/{folder}".rstrip("/")
    lines = {"anon": 5, "file": 6, "inactive_file": 0, "active_file": 0, "slab": 7} | stat
    return {
        f"{at}/memory.max": f"{maximum}\n",
        f"{at}/memory.current": f"{current}\n",
        f"{at}/memory.stat": "".join(f"{key} {value}\n" for key, value in lines.items()),
    }


def v1(folder, limit, usage, **stat):
    at = f"sys/fs/cgroup/memory/{folder}".rstrip("/")
    lines = {"cache": 5, "inactive_file": 0, "active_file": 0, "hierarchical_memory_limit": limit} | stat
    return {
        f"{at}/memory.limit_in_bytes": f"{limit}\n",
        f"{at}/memory.usage_in_bytes": f"{usage}\n",
        f"{at}/memory.stat": "".join(f"{key} {value}\n" for key, value in lines.items()),
    }


UNLIMITED_V1 = 9223372036854771712


def test_without_cgroups_or_proc_there_is_still_an_answer(tmp_path):
    assert limits.free_bytes(tmp_path).nbytes > 0 and limits.free_bytes(tmp_path).what
    assert limits.oom_kills(tmp_path) is None
    limit = limits.free_bytes(write(tmp_path, machine()))
    assert limit.nbytes == 100 * GIB and "machine" in limit.what
    assert 0 < limits.free_bytes().nbytes < 1 << 60  # of this machine
    for content in (b"nonsense\n", b"0::/\xff\xfe\n"):  # a name that is no text
        (tmp_path / "proc/self").mkdir(parents=True, exist_ok=True)
        (tmp_path / "proc/self/cgroup").write_bytes(content)
        assert limits.oom_kills(tmp_path) is None and limits.free_bytes(tmp_path).nbytes == 100 * GIB


@pytest.mark.parametrize("group", [v1, v2])
@pytest.mark.parametrize("tight", ["", "job", "job/step"])
def test_the_tightest_of_all_enclosing_groups_counts(tmp_path, group, tight):
    beside = "9:name=systemd:/x\n4:memory:/job/step\n3:cpu,cpuacct:/\n0::/\n"
    files = machine() | {"proc/self/cgroup": "0::/job/step\n" if group is v2 else beside}
    for folder in ("", "job", "job/step"):
        unlimited = "max" if group is v2 else UNLIMITED_V1
        files |= group(folder, 8 * GIB if folder == tight else unlimited, 5 * GIB)
    limit = limits.free_bytes(write(tmp_path, files))
    root = f"{tmp_path}/sys/fs/cgroup/{'memory/' if group is v1 else ''}"
    assert limit.nbytes == 3 * GIB and limit.what.endswith(f"{root}{tight}".rstrip("/"))


@pytest.mark.parametrize(
    ("cgroup", "files", "free"),
    [
        # Groups of others do not count.
        ("0::/mine\n", v2("mine", 8 * GIB, 0) | v2("other", GIB, 0), 8 * GIB),
        # The path is the host's; the container sees its own group as the root.
        ("0::/kubepods/pod1/container2\n", v2("", 4 * GIB, GIB), 3 * GIB),
        ("0::/../../elsewhere\n", v2("", 4 * GIB, GIB), 3 * GIB),
        # The first kind of cgroups, without a limit.
        ("4:memory:/job\n", v1("job", UNLIMITED_V1, GIB), 100 * GIB),
        # The page cache is free.
        ("0::/job\n", v2("job", 10 * GIB, 9 * GIB, inactive_file=2 * GIB, active_file=5 * GIB), 8 * GIB),
        # A job with its limit, and a step below it that has read the dataset's files.
        (
            "4:memory:/job/step\n",
            v1("job", 10 * GIB, 9 * GIB, total_inactive_file=7 * GIB, total_active_file=GIB)
            | v1("job/step", UNLIMITED_V1, 9 * GIB, inactive_file=7 * GIB, total_inactive_file=7 * GIB),
            9 * GIB,
        ),
        # A group over its limit leaves nothing.
        ("0::/job\n", v2("job", GIB, 2 * GIB), 0),
        # Cache that was counted later than the usage frees no more than the limit.
        ("0::/job\n", v2("job", GIB, 1000, inactive_file=5000), GIB),
        # Files that cannot be read do not count.
        *(("0::/job\n", v2("job", broken, broken), 100 * GIB) for broken in ("", "nonsense", "12 34 56")),
    ],
)
def test_what_is_free_in_a_group(tmp_path, cgroup, files, free):
    assert limits.free_bytes(write(tmp_path, machine() | {"proc/self/cgroup": cgroup} | files)).nbytes == free


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
def test_what_the_kernel_has_killed_is_read_from_the_own_group(tmp_path, cgroup, files, count):
    write(tmp_path, {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert limits.oom_kills(tmp_path) == count


def test_what_does_not_fit_is_refused_and_workers_share_what_the_container_allows(monkeypatch):
    free = [GIB]
    monkeypatch.setattr(limits, "free_bytes", lambda: limits.Limit(free[0], "the machine's memory"))
    with pytest.raises(MemoryError, match="it is a list. That takes 2,147,483,648 bytes.*1,073,741,824: take less"):
        limits.check_fits(2 * GIB, "it is a list", "take less")
    limits.check_fits(GIB, "it fits", "take less")
    free[0] = 0
    limits.check_fits(1000, "it is small", "take less")
    monkeypatch.setattr(limits, "usable_cores", lambda: 8)
    for limit, number in ((None, 8), (2.5, 3), (0.5, 1), (99.0, 8)):
        monkeypatch.setattr(limits, "core_limit", lambda limit=limit: limit)
        assert cores_for_workers() == number


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n", "job/cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu.max": "50000 100000\n", "job/cpu.max": "max 100000\n"}, 0.5),
        ({"job/cpu.max": "nonsense\n"}, None),
        ({"cpu/job/cpu.cfs_quota_us": "-1", "cpu/job/cpu.cfs_period_us": "100000"}, None),  # the first kind of cgroups
        ({"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"}, 4.0),
    ],
)
def test_the_tightest_limit_of_processor_time_counts(files, limit, tmp_path):
    cgroup = "4:memory:/x\n2:cpu,cpuacct:/job\n" if "cpu/job/cpu.cfs_quota_us" in files else "0::/job\n"
    write(tmp_path, {"proc/self/cgroup": cgroup} | {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert core_limit(tmp_path) == limit


@pytest.mark.parametrize(
    ("workers", "ranks", "warns"), [(16, "", False), (17, "", True), (16, "2", True), (4, "8", False), (4, "x", False)]
)
def test_far_more_worker_processes_than_cores_are_a_warning(workers, ranks, warns, monkeypatch):
    monkeypatch.setattr(limits, "cores_for_workers", lambda: 8)
    monkeypatch.setattr(limits, "usable_cores", lambda: 8)
    monkeypatch.setattr(limits.os, "cpu_count", lambda: 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_workers(workers, {"LOCAL_WORLD_SIZE": ranks})
    assert [one.category for one in caught] == [LoaderWarning] * warns
    assert all("share 8 cores" in str(one.message) for one in caught)


def test_the_loader_warns_when_it_is_made_and_threads_may_be_many(monkeypatch):
    monkeypatch.setattr(limits, "cores_for_workers", lambda: 2)
    with pytest.warns(LoaderWarning, match="64 worker processes share 2 cores") as caught:
        ShardedDataLoader(range(8), 2, num_workers=64)
    assert caught[0].filename == __file__
    ShardedDataLoader(range(8), 2, num_workers=64, thread_pool=True)
