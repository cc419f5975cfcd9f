"""``sharded-loader doctor``: checks whether this machine suits a loader, and what to change.

    collect() --> Facts --> lines: names and texts, which describe the machine
                        --> find: Findings, problems first: what is wrong or worth knowing, and what to change

`collect` only looks. Failures become texts, because the command must work where torch is broken. A small loader with
two worker processes is tried. With a *problem* (exit code 1) the loader fails or is slow; with a *note* it works well.
A driver may hang when asked for its GPUs; Ctrl-C ends that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import math
import os
import platform
import shutil
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import click

from sharded_loader import __version__
from sharded_loader.cli import output
from sharded_loader.cli.output import counted, size_text
from sharded_loader.extend.tools import core_limit, free_bytes, open_memory, usable_cores

PACKAGES = ("torch", "numpy", "multiprocess", "cloudpickle", "filelock", "fsspec", "threadpoolctl", "pyarrow", "ray")

GIB = 1 << 30
"""Free memory, and size of a /dev/shm that holds batches, below which workers are soon killed."""

FEW_DESCRIPTORS, SCARCE_DESCRIPTORS = 1024, 128
"""A worker takes about four in the main process (measured), besides the program's own files. macOS allows 256."""

SHM = "docker run --shm-size=8g; in Kubernetes, an emptyDir with medium: Memory at /dev/shm."


@click.command(short_help="Check this machine, and say what to change.")
@output.quiet_option
def doctor(quiet: bool) -> int:
    """Check versions, cores, memory, shared memory, limits, worker processes and GPUs, and say what to change.

    The exit code is 1 if there is a problem. With --quiet it prints only problems and notes.
    """
    facts = collect()
    findings = find(facts)
    problems = sum(finding.is_problem for finding in findings)
    said = [f"{'problem' if one.is_problem else 'note'}: {one.what}\n  change: {one.change}" for one in findings]
    if not quiet:
        count = f"{counted(problems, 'problem')}, {counted(len(findings) - problems, 'note')}."
        said = [*(f"{name:15} {text}" for name, text in lines(facts)), "", *said]
        said.append(count if findings else "No problem found.")
    for line in said:
        click.echo(line)
    return int(problems > 0)


# -- facts -------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Facts:
    """Facts found by `collect`. The defaults describe a machine without problems.

    Attributes:
        cores, usable_cores: of the machine; allowed by affinity and cgroup.
        free_memory: bytes this process may still use, and the source of that limit.
        shared_memory: kind of memory for batches: ``memfd``, ``shm``, ``file``, ``named``; None: none.
        shm: total and free bytes of /dev/shm; None if the platform has none.
        descriptors: limit of open files; None: no known limit.
        trial: time that two new worker processes took for a few batches.
    """

    versions: dict[str, str] = dataclasses.field(default_factory=lambda: {"sharded_loader": __version__})
    torch_error: str | None = None
    cores: int = 8
    usable_cores: float = 8
    free_memory: tuple[int, str] = 32 * GIB, "the machine's memory"
    shared_memory: str | None = "memfd"
    shared_memory_error: str | None = None
    shm: tuple[int, int] | None = (32 * GIB, 32 * GIB)
    descriptors: int | None = 65536
    gpus: Sequence[str] = ()
    nvidia_driver: bool = False
    trial: str = "not tried"
    trial_error: str | None = None


def collect() -> Facts:
    """Collect the facts of this machine. It takes a second or two, most of it for torch."""
    facts = Facts(shared_memory=None, shm=None, descriptors=None, free_memory=free_bytes())
    facts.versions.update(python=platform.python_version(), platform=platform.platform())
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            facts.versions[name] = importlib.metadata.version(name)
    facts.cores, facts.usable_cores = os.cpu_count() or 1, min(usable_cores(), core_limit() or math.inf)
    with _noting_error(facts, "shared_memory_error"):
        facts.shared_memory = _shared_memory()
    with contextlib.suppress(OSError):
        facts.shm = shutil.disk_usage("/dev/shm")[::2]
    with contextlib.suppress(ImportError):  # Windows
        import resource

        facts.descriptors = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] % 2**63, 2**31)
    facts.nvidia_driver = os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None
    with _noting_error(facts, "torch_error"):
        from sharded_loader import ShardedDataLoader
        from sharded_loader.extend.engine import accelerators

        facts.gpus = list(map(str, accelerators()))
        with _noting_error(facts, "trial_error"), ShardedDataLoader(range(64), 8, num_workers=2) as loader:
            begin, count = time.perf_counter(), len(list(loader))
            facts.trial = f"two processes delivered {count} batches in {time.perf_counter() - begin:.2f} s"
    return facts


@contextlib.contextmanager
def _noting_error(facts: Facts, name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        setattr(facts, name, output.one_line(error))


def _shared_memory() -> str:
    """Return the kind of memory for batches."""
    from sharded_loader.extend.engine import chosen_backend

    if os.name == "nt":
        return "named"
    chosen = chosen_backend()
    descriptor, folder = open_memory("sharded_loader-doctor", None if chosen == "named" else chosen)
    os.close(descriptor)
    return {None: "memfd", "/dev/shm": "shm"}.get(folder, "file")


# -- what they mean ----------------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """A finding: its sentence, and what to change. With a problem, the loader fails or is slow."""

    is_problem: bool
    what: str
    change: str


def find(facts: Facts) -> list[Finding]:
    """Return what is wrong with a machine, or worth knowing about it; problems first.

    Example:
        >>> find(Facts())
        []
        >>> [finding.what for finding in find(Facts(descriptors=100))]
        ['A process may open 100 files at a time, and each worker takes about four.']
    """
    (size, free), (memory, memory_limit) = facts.shm or (0, GIB), facts.free_memory
    limit, kind, torch = facts.descriptors or FEW_DESCRIPTORS, facts.shared_memory, facts.versions.get("torch")
    table = [
        (facts.torch_error, True, f"torch cannot be imported: {facts.torch_error}.",
         "Install torch again in this environment."),
        (facts.usable_cores < 2, facts.cores > 1,
         f"Workers and training share {facts.usable_cores:g} of {facts.cores} cores.",
         "Give more: docker run --cpus 4, resources.limits.cpu in Kubernetes, --cpus-per-task=4 for Slurm, taskset."),
        (memory < GIB, True, f"Only {size_text(memory)} of memory is free ({memory_limit}).",
         "End other programs, or raise the memory limit of the container."),
        (kind is None, True, f"There is no memory that processes can share: {facts.shared_memory_error}.",
         f"Allow memfd_create, or enlarge /dev/shm: {SHM}"),
        (kind == "file", True, "Batches travel through temporary files, because there is no shared memory.",
         f"Allow memfd_create in the seccomp profile, or mount /dev/shm: {SHM}"),
        (kind == "shm" and free < GIB, True,
         f"Batches lie in /dev/shm, which has {size_text(size)} ({size_text(free)} free).", f"Enlarge it: {SHM}"),
        (limit < FEW_DESCRIPTORS, limit < SCARCE_DESCRIPTORS,
         f"A process may open {limit} files at a time, and each worker takes about four.",
         "Run: ulimit -n 65536. In a container: docker run --ulimit nofile=65536."),
        (facts.trial_error, True, f"A trial with two worker processes failed: {facts.trial_error}.",
         "Until this is fixed, read with threads: ShardedDataLoader(..., thread_pool=True)."),
        (facts.nvidia_driver and not facts.gpus and not facts.torch_error, True,
         f"The machine has an NVIDIA driver, and torch {torch} sees no GPU.",
         "Install a build of torch for CUDA, and see CUDA_VISIBLE_DEVICES. In a container: docker run --gpus all."),
    ]  # fmt: skip
    found = [Finding(is_problem, what, change) for holds, is_problem, what, change in table if holds]
    return sorted(found, key=lambda finding: not finding.is_problem)


def lines(facts: Facts) -> list[tuple[str, str]]:
    """Describe a machine, as names and texts."""
    kinds = {"memfd": "memfd, not limited by /dev/shm", "shm": "/dev/shm", "file": "temporary files", None: "none"}
    room = f" ({size_text(facts.shm[1])} of {size_text(facts.shm[0])} free)" if facts.shm else ""
    return [
        *facts.versions.items(),
        ("cores", f"{facts.usable_cores:g} of {facts.cores} usable"),
        ("memory", f"{size_text(facts.free_memory[0])} free ({facts.free_memory[1]})"),
        ("shared memory", kinds.get(facts.shared_memory, "named") + room),
        ("open files", f"{facts.descriptors:,}" if facts.descriptors else "no limit"),
        ("GPUs", ", ".join(facts.gpus) or "none that torch sees"),
        ("workers", "the trial failed" if facts.trial_error else facts.trial),
    ]
