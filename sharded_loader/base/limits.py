"""How much this process may use: memory and cores of the machine, and what the cgroups around it allow (v1, v2).

    free_bytes() -> Limit(nbytes, what)      the tightest limit of memory
    own_bytes(), private_bytes() -> nbytes   what this process takes, with and without what a fork has left to two
    check_fits(nbytes, what, instead)        a MemoryError for what would not fit
    oom_kills() -> count | None              how often the kernel has killed in this cgroup, where it says so
    cores_for_workers() -> number
    warn_of_workers(workers)                 far more worker processes than cores: a `LoaderWarning`

`free_bytes` is asked before shared memory grows: in a memory cgroup the kernel gives no error, it kills. Nothing here
imports NumPy or torch.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

from sharded_loader.base.notices import warn
from sharded_loader.base.system import integer

T = TypeVar("T")

SMALL = 1 << 28
"""Bytes that are not worth a look at what is free: 0.1 ms."""

FEW = 4
"""Processes that are no burden on any machine."""


# -- memory -----------------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """The number of bytes that are free, and what sets that limit, in words."""

    nbytes: int
    what: str


def processes_here() -> int:
    """The number of processes that share this machine's memory: LOCAL_WORLD_SIZE, which torchrun sets.

    Raises:
        ValueError: the variable holds no such number.
    """
    advice = "torchrun sets it to the number of processes on this machine; unset it, or give ProcessPool(max_bytes=...)"
    return integer("LOCAL_WORLD_SIZE", 1, least=1, advice=advice)


def free_bytes(root: Path = Path("/")) -> Limit:
    """What is free for this process.

    Args:
        root: where /proc and /sys are; another folder in tests.
    """
    return min([_machine(root), *_of_groups(root, "memory", _memory)])


def own_bytes(root: Path = Path("/")) -> int:
    """The memory of this process, without shared memory, with what a fork has left to it and to its parent: 40 us.

    Args:
        root: where /proc is; another folder in tests.

    Raises:
        ImportError: this system has no such file, and psutil is not installed.
    """
    try:
        _, resident, shared, *_ = map(int, (root / "proc/self/statm").read_text().split())
    except (OSError, ValueError):
        import psutil

        return int(psutil.Process().memory_full_info().uss)
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(root: Path = Path("/")) -> int:
    """The memory that this process alone has: 2 ms for each 100 MB of `own_bytes`. Arguments and errors as there."""
    nbytes = own_bytes(root)
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/smaps_rollup").read_text().splitlines()
        private = [int(line.split()[1]) for line in lines if line.startswith(("Private_C", "Private_D"))]
        nbytes = min(nbytes, 1024 * sum(private))  # that has pages of shared memory which no other one has touched
    return nbytes


def check_fits(nbytes: int, what: str, instead: str) -> None:
    """Refuse what would not fit into memory, before it is made: while it grows, the kernel may kill the process.

    Args:
        nbytes: how much it takes.
        what: what it is, and why.
        instead: what to do.

    Raises:
        MemoryError: so much is not free.
    """
    if nbytes > SMALL and nbytes > (limit := free_bytes()).nbytes:
        raise MemoryError(f"{what}. That takes {nbytes:,} bytes, and {limit.what} leaves {limit.nbytes:,}: {instead}")


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this cgroup the kernel has killed for want of memory, its own or the machine's.

    Args:
        root: where /proc and /sys are; another folder in tests.

    Returns:
        None where the kernel does not say.
    """
    for base, group, version in groups(root):
        for folder in (group, base):
            try:
                text = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
                return int(dict(line.split(maxsplit=1) for line in text.splitlines())["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return None


def _machine(root: Path) -> Limit:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Limit(int(line.split()[1]) * 1024, "the machine's memory")
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return Limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, "half of the machine's memory")
    return Limit(2 << 30, "2 GiB, for want of a way to ask this system")


def groups(root: Path, controller: str = "memory") -> Iterator[tuple[Path, Path, int]]:
    """This process's cgroups of a controller: where they are mounted, the group itself, version (1, 2).

    In a container the group may be a folder that only the host can see: the root of what is mounted is then the
    container's own group.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "-", "-")[:3]
        base = root / "sys/fs/cgroup"
        if controllers == "":
            yield base, base / path.lstrip("/"), 2
        elif controller in controllers.split(","):
            yield base / controller, base / controller / path.lstrip("/"), 1


def _of_groups(root: Path, controller: str, read: Callable[[Path, int], T]) -> Iterator[T]:
    """What ``read(folder, version)`` finds in this process's cgroups and in those around them."""
    for base, group, version in groups(root, controller):
        for folder in {base, *(g for g in [group, *group.parents] if base in g.parents)}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                yield read(folder, version)


def _memory(folder: Path, version: int) -> Limit:
    maximum, current = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    limit, used = (int((folder / f"memory.{name}").read_text()) for name in (maximum, current))
    # The page cache is counted as used, and given up when memory is wanted; the active part too, which is
    # most of it where every epoch reads the same files. v1 counts the groups below only under "total_".
    stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
    for key in ("inactive_file", "active_file"):
        used -= int(stat.get(f"total_{key}", stat.get(key, 0)))
    return Limit(max(0, limit - max(0, used)), f"the memory limit of cgroup {folder}")


# -- cores ------------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """How many cores this process may run on."""
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or a sandbox does not allow it
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_limit(root: Path = Path("/")) -> float | None:
    """The processor time that the cgroups around this process allow, in cores; None: no limit.

    Args:
        root: where /proc and /sys are; another folder in tests.
    """
    shares = _of_groups(root, "cpu", _cores)
    return min((share for share in shares if share > 0), default=None)


def _cores(folder: Path, version: int) -> float:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
    return quota / period if period else 0


def cores_for_workers() -> int:
    """How many cores worker processes can share, at least 1."""
    return math.ceil(min(usable_cores(), core_limit() or math.inf))


def ranks_here(environ: Mapping[str, str] = os.environ) -> int:
    """The number of programs on this machine by LOCAL_WORLD_SIZE; 1 if that is no number."""
    given = environ.get("LOCAL_WORLD_SIZE", "").strip()
    return max(1, int(given)) if given.isdecimal() else 1


def ranks_on_cores(environ: Mapping[str, str] = os.environ) -> int:
    """The number of programs that share the cores of this one. A rank that is bound to cores has them to itself."""
    return ranks_here(environ) if usable_cores() == os.cpu_count() else 1


def warn_of_workers(workers: int, environ: Mapping[str, str] = os.environ) -> None:
    """Warn of more than two worker processes for each core.

    Args:
        workers: the processes of this loader.
        environ: where to look for LOCAL_WORLD_SIZE. It is the number of programs on this machine, each with as many
            workers.
    """
    cores, ranks = cores_for_workers(), ranks_on_cores(environ)
    if workers > FEW and workers * ranks > 2 * cores:
        each = f", in each of {ranks} ranks on this machine," if ranks > 1 else ""
        warn(
            f"{workers} worker processes{each} share {cores} core{'s' * (cores > 1)}. They take turns, and each takes "
            f'memory: num_workers="auto" finds how many help. If they wait for files or the network, use threads'
        )
