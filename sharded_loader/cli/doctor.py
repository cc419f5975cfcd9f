"""``sharded-loader doctor``: is this machine fit for a loader, and what should be changed?

    collect() --> Facts --> lines: names and texts, which describe the machine
                        --> find: Findings, problems first: what is wrong or worth knowing, and what to change

`collect` looks, and decides nothing. Every look may fail and is then None, or the text of the error: the command must
work where torch, or anything else, is broken. Only `collect` imports torch, and it makes a small loader with two worker
processes to see that they work.

A *problem* means that the loader fails or is slow here. A *note* is worth knowing, and the loader works well.
`find` and `lines` are pure functions, tested on made-up facts. Exit code 0: no problem; 1: a problem.

What can go wrong: a driver that hangs when it is asked for its GPUs; Ctrl-C ends that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import re
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from sharded_loader import __version__
from sharded_loader.base.limits import core_limit, free_bytes, usable_cores
from sharded_loader.base.system import can_pass_descriptors, open_memory
from sharded_loader.cli.output import counted, json_option, one_line, quiet_option, show_json, size_text

BUSY = 0.3
"""Cores. Measurements vary visibly if workers lack more than this."""

REQUIRED = ("torch", "numpy", "multiprocess", "cloudpickle", "filelock", "fsspec", "threadpoolctl")
OPTIONAL = ("click", "psutil", "rich", "pillow", "pyarrow", "ray", "scikit-learn", "torchvision")

GIB = 1 << 30
LEAST_TORCH = (2, 4)

LEAST_MEMORY = GIB
"""Free bytes: below, workers and their batches are soon killed."""

LEAST_SHM = GIB
"""Size of /dev/shm where batches lie in it. Docker gives 64 MiB."""

FEW_DESCRIPTORS, SCARCE_DESCRIPTORS = 1024, 128
"""A worker takes about four in the main process (measured), and a program opens files of its own. macOS gives 256."""


@click.command(short_help="Check this machine, and say what to change.")
@json_option
@quiet_option
def doctor(as_json: bool, quiet: bool) -> int:
    """Check versions, cores, memory, shared memory, limits, worker processes and GPUs, and say what to change.

    The exit code is 1 if there is a problem. With --quiet it prints only problems and notes.
    """
    facts = collect()
    findings = find(facts)
    problems = sum(finding.is_problem for finding in findings)
    if as_json:
        show_json({"facts": dataclasses.asdict(facts), "findings": list(map(dataclasses.asdict, findings))})
        return int(problems > 0)
    if not quiet:
        for name, text in lines(facts):
            click.echo(f"{name:15} {text}")
        click.echo()
    for finding in findings:
        click.echo(f"{'problem' if finding.is_problem else 'note'}: {finding.what}")
        click.echo(f"  change: {finding.change}")
    if not quiet:
        notes = len(findings) - problems
        click.echo(f"{counted(problems, 'problem')}, {counted(notes, 'note')}." if findings else "No problem found.")
    return int(problems > 0)


# -- facts -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Room:
    """A file system: where it is mounted, its size in bytes, and how much of it is free."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """An accelerator that torch sees.

    Attributes:
        device: such as ``cuda:0``.
        name: of the product.
        memory: in bytes; 0: unknown.
    """

    device: str
    name: str
    memory: int = 0


@dataclass(frozen=True)
class Facts:
    """What `collect` found. The defaults describe a machine without any problem.

    Attributes:
        library, python, platform: versions in words.
        system: ``linux``, ``darwin`` or ``win32``, as `sys.platform`.
        required, optional: versions of packages; None: not installed.
        torch_error: why torch cannot be imported; None if it can.
        cores: of the machine.
        usable_cores: the cores that this process may run on.
        core_limit: processor time that its cgroup allows, in cores; None: no limit.
        others: how many cores other programs use.
        memory: of the machine in bytes.
        free_memory: what this process may still use, in bytes.
        memory_limit: what sets that limit.
        shared_memory: where batches lie: ``memfd``, ``shm``, ``file``, ``named``; None: nowhere.
        shared_memory_error: why there is none.
        shm: the mount /dev/shm; None if the platform has none.
        temporary: the file system of temporary files.
        descriptors, most_descriptors: the limit of open files and how far it can be raised; None: no limit known.
        passes_descriptors: processes may send each other descriptors.
        start_methods: of worker processes, on this platform.
        start_method: the one that a `ProcessPool` takes by default; None: multiprocess cannot be imported.
        gpus: accelerators that torch sees.
        torch_cuda: the CUDA (or ROCm) version that torch was built for; None: for the CPU only.
        nvidia_driver: the machine has one.
        visible_devices: the variable CUDA_VISIBLE_DEVICES; None: unset.
        pinned_error: why memory cannot be pinned for a GPU; None: it can, or there is no GPU.
        trial: seconds that two new worker processes took for a few batches; None: not tried, or failed.
        trial_error: why the trial failed.
    """

    library: str = __version__
    python: str = "3.11.0"
    platform: str = "Linux"
    system: str = "linux"
    required: dict[str, str | None] = field(default_factory=lambda: dict.fromkeys(REQUIRED, "99"))
    optional: dict[str, str | None] = field(default_factory=dict)
    torch_error: str | None = None
    cores: int = 8
    usable_cores: int = 8
    core_limit: float | None = None
    others: float = 0.0
    memory: int = 64 << 30
    free_memory: int = 32 << 30
    memory_limit: str = "the machine's memory"
    shared_memory: str | None = "memfd"
    shared_memory_error: str | None = None
    shm: Room | None = Room("/dev/shm", 32 << 30, 32 << 30)
    temporary: Room | None = Room("/tmp", 99 << 30, 99 << 30)
    descriptors: int | None = 65536
    most_descriptors: int | None = None
    passes_descriptors: bool = True
    start_methods: Sequence[str] = ("fork", "spawn", "forkserver")
    start_method: str | None = "fork"
    gpus: Sequence[Gpu] = ()
    torch_cuda: str | None = None
    nvidia_driver: bool = False
    visible_devices: str | None = None
    pinned_error: str | None = None
    trial: float | None = 0.1
    trial_error: str | None = None


def collect() -> Facts:
    """Look at this machine. It takes a second or two, most of it for torch."""
    import psutil

    required = {name: version_of(name) for name in REQUIRED}
    found: dict[str, Any] = {"shared_memory": None, "trial": None}
    with _noting_error(found, "shared_memory_error"):
        found["shared_memory"] = _shared_memory()
    with _noting_error(found, "torch_error"):
        import torch

        required["torch"] = torch.__version__
        _look_at_gpus(torch, found)
        with _noting_error(found, "trial_error"):
            found["trial"] = _trial()
    found["descriptors"], found["most_descriptors"] = _descriptor_limits()
    found["start_methods"], found["start_method"] = _start_methods()
    found["free_memory"], found["memory_limit"] = free_bytes()
    return Facts(
        python=f"{platform.python_version()} ({platform.python_implementation()})",
        platform=platform.platform(),
        system=sys.platform,
        required=required,
        optional={name: version_of(name) for name in OPTIONAL},
        cores=os.cpu_count() or 1,
        usable_cores=usable_cores(),
        core_limit=core_limit(),
        others=cores_of_others(0.3),
        memory=psutil.virtual_memory().total,
        shm=_room("/dev/shm") if sys.platform != "win32" else None,
        temporary=_room(None),
        passes_descriptors=can_pass_descriptors(),
        nvidia_driver=os.path.exists("/proc/driver/nvidia/version") or shutil.which("nvidia-smi") is not None,
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        **found,
    )


@contextlib.contextmanager
def _noting_error(found: dict[str, Any], name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        found[name] = one_line(error)


def version_of(package: str) -> str | None:
    """The version of an installed package, without importing it; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cores_of_others(seconds: float = 0.1) -> float:
    """How many cores other programs use.

    Args:
        seconds: how long to look. This process must do nothing meanwhile.
    """
    import psutil

    return float(psutil.cpu_percent(interval=seconds)) / 100 * (os.cpu_count() or 1)


def busy_text(others: float, cores: int, usable: int) -> str | None:
    """A sentence about other programs, if they use cores that workers need; otherwise None.

    Args:
        others: as `cores_of_others` returns it.
        cores: the cores of the machine.
        usable: how many of them workers may use.

    Example:
        >>> busy_text(1.7, cores=2, usable=2), busy_text(1.7, cores=64, usable=8)
        ('Other programs use 1.7 of 2 cores.', None)
    """
    if others + usable < cores + BUSY:
        return None
    return f"Other programs use {others:.1f} of {cores} cores."


def _room(path: str | None) -> Room | None:
    try:
        path = path or tempfile.gettempdir()
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return Room(path, usage.total, usage.free)


def _shared_memory() -> str:
    """The kind of memory that batches will lie in."""
    from sharded_loader.memory.segments import chosen_backend

    if sys.platform == "win32":
        return "named"
    chosen = chosen_backend()
    descriptor, folder = open_memory("sharded_loader-doctor", None if chosen == "named" else chosen)
    os.close(descriptor)
    return {None: "memfd", "/dev/shm": "shm"}.get(folder, "file")


def _start_methods() -> tuple[list[str], str | None]:
    try:
        import multiprocess

        from sharded_loader.pools.process.start import choose_start_method
    except ImportError:
        return [], None
    return multiprocess.get_all_start_methods(), choose_start_method(None)


def _descriptor_limits() -> tuple[int | None, int | None]:
    """The limit of open files, and how far it can be raised."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (None if soft == unlimited else soft), (None if hard == unlimited else hard)


def _look_at_gpus(torch: Any, found: dict[str, Any]) -> None:
    from sharded_loader.devices.names import accelerators

    found["torch_cuda"] = torch.version.cuda or getattr(torch.version, "hip", None)
    with _noting_error(found, "pinned_error"):
        devices = accelerators()
        found["gpus"] = [_gpu(torch, device) for device in devices]
        if devices and devices[0].type != "mps":
            found["pinned_error"] = _pin(torch, devices[0])


def _gpu(torch: Any, device: Any) -> Gpu:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return Gpu(str(device), properties.name, properties.total_memory)
    return Gpu(str(device), device.type)


def _pin(torch: Any, device: Any) -> str | None:
    """Have torch pin memory, and pin memory in place as the loader does. Returns the warning if that fails."""
    import mmap

    from sharded_loader.devices.pinning import Registrar
    from sharded_loader.devices.streams import Streams

    torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mapping = mmap.mmap(-1, 1 << 20)
        undo = Registrar(Streams(device), lambda: None).register(mapping)
        if undo is not None:
            undo()
        mapping.close()
    return str(caught[0].message) if caught else None


def _trial() -> float:
    """The seconds that two new worker processes take for a few batches."""
    from sharded_loader import ShardedDataLoader

    begin = time.perf_counter()
    with ShardedDataLoader(range(64), 8, num_workers=2) as loader:
        if [number for batch in loader for number in batch.tolist()] != list(range(64)):
            raise RuntimeError("the batches differ from those of the main process")
    return time.perf_counter() - begin


# -- what they mean ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """Something about the machine.

    Attributes:
        is_problem: the loader fails or is slow because of it.
        what: one sentence.
        change: what to change.
    """

    is_problem: bool
    what: str
    change: str


def find(facts: Facts) -> list[Finding]:
    """What is wrong with a machine, or worth knowing about it.

    Args:
        facts: as `facts.collect` found them.

    Returns:
        The findings, problems first. None at all: everything is well.

    Example:
        >>> find(Facts())
        []
        >>> [finding.change for finding in find(Facts(descriptors=100, most_descriptors=4096))]
        ['Run: ulimit -n 4096']
    """
    looks = _packages, _cores, _memory, _descriptors, _processes, _gpus
    return sorted((finding for look in looks for finding in look(facts)), key=lambda finding: not finding.is_problem)


def _packages(facts: Facts) -> Iterator[Finding]:
    absent = [name for name, version in facts.required.items() if version is None]
    if absent:
        yield Finding(True, f"Not installed: {', '.join(absent)}.", f"Run: pip install {' '.join(absent)}")
    if facts.torch_error is not None and "torch" not in absent:
        what = f"torch is installed and cannot be imported: {facts.torch_error}."
        yield Finding(True, what, "Install torch again in this environment.")
    version = facts.required.get("torch") or ""
    numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
    if len(numbers) == 2 and numbers < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        yield Finding(True, f"torch is {version}, and the loader needs {least} or later.", "Update torch.")


def _cores(facts: Facts) -> Iterator[Finding]:
    if (busy := busy_text(facts.others, facts.cores, facts.usable_cores)) is not None:
        yield Finding(False, f"{busy} Workers get what is left.", "Stop programs that you do not need.")
    limit = facts.core_limit
    may_use = facts.usable_cores if limit is None else min(facts.usable_cores, limit)
    if may_use >= 2:
        return
    if facts.cores < 2:
        what = "The machine has one core: worker processes only help while samples wait for a disk or a network."
        yield Finding(False, what, "Use a machine with more cores if `sharded-loader bench` shows no gain.")
    elif limit is not None and limit < facts.usable_cores:
        what = f"The container may use {limit:g} of {facts.cores} cores, so workers and training share one."
        yield Finding(True, what, "Raise the limit: docker run --cpus 4, or resources.limits.cpu in Kubernetes.")
    else:
        what = f"This process may run on 1 of {facts.cores} cores, so workers and training share it."
        yield Finding(True, what, "Raise it: taskset --cpu-list 0-3 for a command, --cpus-per-task=4 for Slurm.")


def _memory(facts: Facts) -> Iterator[Finding]:
    if facts.free_memory < LEAST_MEMORY:
        what = f"Only {size_text(facts.free_memory)} of memory is free ({facts.memory_limit})."
        yield Finding(True, what, "End other programs, or raise the memory limit of the container.")
    shm = facts.shm
    size = "docker run --shm-size=8g; in Kubernetes, an emptyDir with medium: Memory at /dev/shm."
    if facts.shared_memory is None:
        what = f"There is no memory that processes can share: {facts.shared_memory_error}."
        yield Finding(True, what, f"Allow memfd_create, or enlarge /dev/shm: {size}")
    elif facts.shared_memory == "file":
        folder = f" in {facts.temporary.path}" if facts.temporary else ""
        what = f"Batches travel through temporary files{folder}, because the system gives no shared memory."
        yield Finding(True, what, f"Allow memfd_create in the seccomp profile, or mount /dev/shm: {size}")
    elif facts.shared_memory == "shm" and shm is not None and min(shm.size, shm.free) < LEAST_SHM:
        what = f"Batches lie in /dev/shm, which has {size_text(shm.size)} ({size_text(shm.free)} free)."
        yield Finding(True, what, f"Enlarge it: {size}")
    elif shm is not None and shm.size < LEAST_SHM:
        what = f"/dev/shm has {size_text(shm.size)}. This library does not need it here; torch's own DataLoader does."
        yield Finding(False, what, f"For torch's DataLoader, enlarge it: {size}")


def _descriptors(facts: Facts) -> Iterator[Finding]:
    limit, most = facts.descriptors, facts.most_descriptors
    if limit is None or limit >= FEW_DESCRIPTORS:
        return
    what = f"A process may open {limit} files at a time, and each worker takes about four."
    more = 65536 if most is None else min(65536, most)
    raised = f"Run: ulimit -n {more}" if more > limit else None
    change = raised or "Ask for a higher hard limit (docker run --ulimit nofile=65536)."
    yield Finding(limit < SCARCE_DESCRIPTORS, what, change)


def _processes(facts: Facts) -> Iterator[Finding]:
    if not facts.passes_descriptors and facts.system != "win32":
        what = "The system does not pass descriptors between processes, so the loader shares memory by name."
        yield Finding(False, what, "Allow sendmsg and recvmsg in the seccomp profile.")
    if facts.trial_error is not None:
        what = f"A trial with two worker processes failed: {facts.trial_error}."
        yield Finding(True, what, "Until this is fixed, read with threads: ShardedDataLoader(..., thread_pool=True).")


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.nvidia_driver and not facts.gpus and facts.torch_error is None:
        what = f"The machine has an NVIDIA driver, and torch (built for CUDA {facts.torch_cuda}) sees no GPU."
        change = "Run nvidia-smi. In a container: docker run --gpus all."
        if facts.torch_cuda is None:
            torch = f"torch {facts.required.get('torch')}"
            what = f"The machine has an NVIDIA driver, and {torch} is built for the CPU only."
            change = "Install a build of torch for CUDA, if you want to train on the GPU."
        elif facts.visible_devices is not None:
            what = f"torch sees no GPU, and CUDA_VISIBLE_DEVICES is {facts.visible_devices!r}."
            change = "Unset CUDA_VISIBLE_DEVICES, or name a GPU that `nvidia-smi -L` lists."
        yield Finding(True, what, change)
    if facts.pinned_error is not None:
        what = f"Memory cannot be pinned: {facts.pinned_error}."
        yield Finding(True, what, "Raise the memory limit of the container; without pinned memory, copies are slower.")


def explain_start_method(facts: Facts) -> str:
    """Which start method worker processes have by default, and why.

    Example:
        >>> explain_start_method(Facts())
        'fork, the default on Linux: workers start in milliseconds and share the memory of the dataset'
    """
    chosen = facts.start_method
    if chosen is None:
        return "unknown: multiprocess cannot be imported"
    if chosen == "fork":
        return "fork, the default on Linux: workers start in milliseconds and share the memory of the dataset"
    if chosen == "spawn":
        where = {"darwin": "macOS", "win32": "Windows"}.get(facts.system, facts.system)
        return f"spawn, the default on {where}: each worker is a new interpreter and gets a pickle of the dataset"
    return f"{chosen}, as this program has set it"


def lines(facts: Facts) -> list[tuple[str, str]]:
    """What there is to say about a machine: names and texts."""
    installed = [f"{name} {version}" for name, version in facts.optional.items() if version]
    absent = [name for name, version in facts.optional.items() if not version]
    cores = f"{facts.usable_cores} of {facts.cores} usable"
    if facts.core_limit is not None:
        cores += f"; the container may use the time of {facts.core_limit:g}"
    kinds = {"memfd": "memfd, not limited by /dev/shm", "shm": "/dev/shm", "file": "temporary files", "named": "named"}
    memory = kinds.get(facts.shared_memory or "", "none")
    if facts.shm is not None:
        memory += f" ({size_text(facts.shm.free)} of {size_text(facts.shm.size)} free)"
    most = "" if facts.most_descriptors is None else f" (may be raised to {facts.most_descriptors:,})"
    descriptors = "no limit" if facts.descriptors is None else f"{facts.descriptors:,}{most}"
    gpus = [f"{gpu.device} {gpu.name}" + (f" {size_text(gpu.memory)}" if gpu.memory else "") for gpu in facts.gpus]
    pinned = "works" if facts.gpus else "not needed without a GPU"
    trial = "not tried" if facts.trial is None else f"two processes delivered 8 batches in {facts.trial:.2f} s"
    return [
        ("sharded_loader", facts.library),
        ("python", facts.python),
        ("platform", facts.platform),
        *((name, version or "not installed") for name, version in facts.required.items()),
        ("optional", ", ".join(installed) or "none"),
        ("not installed", ", ".join(absent) or "none"),
        ("cores", cores),
        ("memory", f"{size_text(facts.free_memory)} of {size_text(facts.memory)} free ({facts.memory_limit})"),
        ("shared memory", memory),
        ("open files", descriptors),
        ("start methods", ", ".join(facts.start_methods) or "none"),
        ("start method", explain_start_method(facts)),
        ("GPUs", ", ".join(gpus) or "none that torch sees"),
        ("pinned memory", pinned if facts.pinned_error is None else "does not work"),
        ("workers", trial if facts.trial_error is None else "the trial failed"),
    ]
