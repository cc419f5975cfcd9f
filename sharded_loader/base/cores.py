"""How many cores there are for workers: what this process may run on, and what its cgroups allow.

cores_for_workers() -> number
warn_of_workers(workers)             far more worker processes than cores: a `LoaderWarning`
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path

from sharded_loader.base.notices import warn
from sharded_loader.base.system import groups

FEW = 4
"""So many processes are no burden on any machine."""


def usable_cores() -> int:
    """How many cores this process may run on."""
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or refused by a sandbox
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def core_limit(root: Path = Path("/")) -> float | None:
    """The processor time that the cgroups around this process allow, in cores; None: no limit.

    Args:
        root: where /proc and /sys are; another folder in tests.
    """
    found = []
    for base, group, version in groups(root, "cpu"):
        for folder in {base, *(one for one in [group, *group.parents] if base in one.parents)}:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                if version == 2:
                    quota, period = map(float, (folder / "cpu.max").read_text().split())
                else:
                    quota, period = (float((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
                if quota > 0 and period > 0:
                    found.append(quota / period)
    return min(found, default=None)


def cores_for_workers() -> int:
    """How many cores worker processes can share, at least 1."""
    limit = core_limit()
    return max(1, min(usable_cores(), usable_cores() if limit is None else math.ceil(limit)))


def warn_of_workers(workers: int, environ: Mapping[str, str] = os.environ) -> None:
    """Warn of more than two worker processes for each core.

    Args:
        workers: the processes of this loader.
        environ: where to look for LOCAL_WORLD_SIZE: so many programs on this machine have as many.
    """
    cores, given = cores_for_workers(), environ.get("LOCAL_WORLD_SIZE", "").strip()
    ranks = max(1, int(given)) if given.isdecimal() and usable_cores() == os.cpu_count() else 1
    if workers > FEW and workers * ranks > 2 * cores:
        each = f", in each of {ranks} ranks on this machine," if ranks > 1 else ""
        warn(
            f"{workers} worker processes{each} share {cores} core{'s' * (cores > 1)}. They take turns, and each takes "
            f"memory: give num_workers={max(1, cores // ranks)}, or threads if they wait for files or the network"
        )
