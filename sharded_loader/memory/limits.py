"""How much memory may still be taken, and what is in the way.

    free_bytes() -> Limit(nbytes, what)      the tightest of: machine, every enclosing cgroup (v1, v2)
    oom_kills() -> count | None              how often the kernel has killed in this cgroup, where it says so

Asked before shared memory grows. The kernel does not refuse inside a memory cgroup: it kills.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sharded_loader.environment import integer


@dataclass(frozen=True)
class Limit:
    """So many bytes are free, and what sets that limit, in words."""

    nbytes: int
    what: str


def processes_here() -> int:
    """How many processes share this machine's memory: LOCAL_WORLD_SIZE, which torchrun sets.

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
    return min([_machine(root), *_cgroups(root)], key=lambda limit: limit.nbytes)


def oom_kills(root: Path = Path("/")) -> int | None:
    """How many processes of this cgroup the kernel has killed for want of memory, its own or the machine's.

    Args:
        root: where /proc and /sys are; another folder in tests.

    Returns:
        None where the kernel does not say.
    """
    for base, group, version in _groups(root):
        for folder in (group, base):
            try:
                text = (folder / ("memory.events" if version == 2 else "memory.oom_control")).read_text()
                return int(dict(line.split(maxsplit=1) for line in text.splitlines())["oom_kill"])
            except (OSError, ValueError, KeyError):
                continue
    return None


def open_files() -> int | None:
    """How many descriptors this process may have; None where the platform does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _machine(root: Path) -> Limit:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return Limit(int(line.split()[1]) * 1024, "the machine's memory")
    except (OSError, ValueError, IndexError):
        pass
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        return Limit(pages * size // 2, "half of the machine's memory")
    except (AttributeError, ValueError, OSError):
        return Limit(2 << 30, "2 GiB, for want of a way to ask this system")


def _groups(root: Path) -> Iterator[tuple[Path, Path, int]]:
    """This process's cgroups that count memory: where they are mounted, the group itself, version (1, 2).

    In a container the group may be a folder that only the host can see: the root of what is mounted is then the
    container's own group.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "-", "-")[:3]
        if controllers == "":
            base = root / "sys/fs/cgroup"
            yield base, base / path.lstrip("/"), 2
        elif "memory" in controllers.split(","):
            base = root / "sys/fs/cgroup/memory"
            yield base, base / path.lstrip("/"), 1


def _cgroups(root: Path) -> list[Limit]:
    found = []
    for base, group, version in _groups(root):
        names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
        for folder in {base, *(g for g in [group, *group.parents] if base in g.parents)}:
            limit = _cgroup(folder, *names)
            if limit is not None:
                found.append(limit)
    return found


def _cgroup(folder: Path, maximum: str, current: str) -> Limit | None:
    try:
        text = (folder / maximum).read_text().strip()
        if text == "max":
            return None
        used = int((folder / current).read_text())
        # The page cache is counted as used, and given up when memory is wanted; the active part too, which is
        # most of it where every epoch reads the same files. v1 counts the groups below only under "total_".
        stat = dict(line.split(maxsplit=1) for line in (folder / "memory.stat").read_text().splitlines())
        for key in ("inactive_file", "active_file"):
            used -= int(stat.get(f"total_{key}", stat.get(key, 0)))
        return Limit(max(0, int(text) - max(0, used)), f"the memory limit of cgroup {folder}")
    except (OSError, ValueError):
        return None
