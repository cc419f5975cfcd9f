"""Resource limits of this process: memory and cores of the machine, restricted by its cgroups (v1 and v2).

    free_bytes() -> Limit(nbytes, what)      tightest memory limit
    own_bytes(), private_bytes() -> nbytes   memory of this process, with and without pages shared by a fork
    cores_for_workers() -> number

Check `free_bytes` before growing shared memory: in a memory cgroup the kernel kills instead of reporting an error.
Functions with a ``root`` argument read /proc and /sys below it, for tests. This module imports neither NumPy nor torch.
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
"""Bytes below which checking for free memory (0.1 ms) is not worthwhile."""

FEW = 4
"""Number of processes that never warrants a warning."""


# -- memory -----------------------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """Free bytes, and the name of the limit that determines them."""

    nbytes: int
    what: str


def processes_here(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share this machine (LOCAL_WORLD_SIZE; ValueError if invalid)."""
    advice = "torchrun sets it to the number of processes on this machine; unset it, or give ProcessPool(max_bytes=...)"
    return integer("LOCAL_WORLD_SIZE", 1, least=1, advice=advice, environ=environ)


def free_bytes(root: Path = Path("/")) -> Limit:
    """Return the memory available to this process."""
    return min([_machine_limit(root), *_read_groups(root, "memory", _group_memory)])


def own_bytes(root: Path = Path("/")) -> int:
    """Return this process's memory in bytes, without shared memory but with pages shared through a fork (40 us)."""
    try:
        _, resident, shared, *_ = map(int, (root / "proc/self/statm").read_text().split())
    except (OSError, ValueError):
        import psutil

        return int(psutil.Process().memory_full_info().uss)
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def private_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that belong to this process alone (2 ms per 100 MB of `own_bytes`)."""
    nbytes = own_bytes(root)
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/self/smaps_rollup").read_text().splitlines()
        private = [int(line.split()[1]) for line in lines if line.startswith(("Private_C", "Private_D"))]
        nbytes = min(nbytes, 1024 * sum(private))  # they include shared memory that only this process has touched
    return nbytes


def check_fits(nbytes: int, what: str, instead: str) -> None:
    """Raise a MemoryError before an allocation that would not fit: while it grows, the kernel may kill the process."""
    if nbytes > SMALL and nbytes > (limit := free_bytes()).nbytes:
        raise MemoryError(f"{what}. That takes {nbytes:,} bytes, and {limit.what} leaves {limit.nbytes:,}: {instead}")


def oom_kills(root: Path = Path("/")) -> int | None:
    """Return the number of processes of this cgroup that the kernel killed for lack of memory; None if unknown."""
    for base, group, version in groups(root):
        for folder in (group, base):
            try:
                text = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
                return int(dict(line.split(maxsplit=1) for line in text.splitlines())["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return None


def _machine_limit(root: Path) -> Limit:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Limit(int(line.split()[1]) * 1024, "the machine's memory")
    with contextlib.suppress(AttributeError, ValueError, OSError):
        return Limit(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2, "half of the machine's memory")
    with contextlib.suppress(ImportError):  # Windows
        import psutil

        return Limit(int(psutil.virtual_memory().available), "the machine's memory")
    return Limit(2 << 30, "2 GiB, for want of a way to ask this system (pip install psutil)")


def groups(root: Path, controller: str = "memory") -> Iterator[tuple[Path, Path, int]]:
    """Yield mount point, folder and version (1, 2) of this process's cgroups of a controller.

    In a container the folder may exist only on the host; the root of the mount is then the container's own group.
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


def _read_groups(root: Path, controller: str, read: Callable[[Path, int], T]) -> Iterator[T]:
    """Apply ``read(folder, version)`` to this process's cgroups and their ancestors, skipping those without a limit."""
    for base, group, version in groups(root, controller):
        for folder in {base, *(g for g in [group, *group.parents] if base in g.parents)}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                yield read(folder, version)


def _group_memory(folder: Path, version: int) -> Limit:
    maximum, current = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    limit, used = (int((folder / f"memory.{name}").read_text()) for name in (maximum, current))
    # The page cache counts as used but is reclaimable, including its active part, which dominates when every
    # epoch reads the same files. In v1 only the "total_" values include child groups.
    stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
    used -= sum(int(stat.get(f"total_{key}", stat.get(key, 0))) for key in ("inactive_file", "active_file"))
    return Limit(max(0, limit - max(0, used)), f"the memory limit of cgroup {folder}")


# -- cores ------------------------------------------------------------------------------------------------------------


def usable_cores() -> int:
    """Return the number of cores on which this process may run."""
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or forbidden by a sandbox
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_limit(root: Path = Path("/")) -> float | None:
    """Return the CPU quota of the cgroups around this process, in cores; None without a limit."""
    return min((share for share in _read_groups(root, "cpu", _group_quota) if share > 0), default=None)


def _group_quota(folder: Path, version: int) -> float:
    names = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    quota, period = map(float, " ".join((folder / name).read_text() for name in names).split())
    return quota / period if period else 0


def cores_for_workers() -> int:
    """Return the number of cores that worker processes can share, at least 1."""
    return math.ceil(min(usable_cores(), core_limit() or math.inf))


def ranks_on_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share this one's cores; 1 if this rank is bound to cores of its own."""
    return processes_here(environ) if usable_cores() == os.cpu_count() else 1


def warn_of_workers(workers: int, environ: Mapping[str, str] = os.environ) -> None:
    """Warn about more than two worker processes per core, counting ``workers`` for each rank on this machine."""
    if workers > FEW and workers * (ranks := ranks_on_cores(environ)) > 2 * (cores := cores_for_workers()):
        each = f", in each of {ranks} ranks on this machine," if ranks > 1 else ""
        warn(
            f"{workers} worker processes{each} share {cores} core{'s' * (cores > 1)}. They take turns, and each takes "
            f'memory: num_workers="auto" finds how many help. If they wait for files or the network, use threads'
        )
