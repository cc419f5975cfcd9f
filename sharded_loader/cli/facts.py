"""What this machine is like, as far as a loader cares: `collect` looks, and decides nothing.

    collect() -> Facts --> findings

Every look may fail and is then None, or the text of the error: ``doctor`` must work where torch, or anything else, is
broken. Only `collect` imports torch, and it makes a small loader with two worker processes to see that they work.

Owns nothing. What can go wrong: a driver that hangs when it is asked for its GPUs; Ctrl-C ends that.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from sharded_loader import __version__
from sharded_loader.base.limits import core_limit, free_bytes, usable_cores
from sharded_loader.base.system import can_pass_descriptors, open_memory

BUSY = 0.3
"""Cores. Measurements vary visibly if workers lack more than this."""

REQUIRED = ("torch", "numpy", "multiprocess", "cloudpickle", "filelock", "fsspec", "threadpoolctl")
OPTIONAL = ("click", "psutil", "rich", "pillow", "pyarrow", "ray", "scikit-learn", "torchvision")


@dataclass(frozen=True)
class Room:
    """A file system: where it is mounted, its size in bytes, and how much of it is free."""

    path: str
    size: int
    free: int


@dataclass(frozen=True)
class Gpu:
    """An accelerator that torch sees: its device, name, and memory in bytes (0: unknown)."""

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
        _gpus(torch, found)
        with _noting_error(found, "trial_error"):
            found["trial"] = _trial()
    found["descriptors"], found["most_descriptors"] = _descriptors()
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


def one_line(error: BaseException) -> str:
    """An exception as one line of text.

    Example:
        >>> one_line(ValueError("a\\nb"))
        'ValueError: a b'
    """
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


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


def _descriptors() -> tuple[int | None, int | None]:
    """The limit of open files, and how far it can be raised."""
    try:
        import resource
    except ImportError:  # Windows
        return None, None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    return (None if soft == unlimited else soft), (None if hard == unlimited else hard)


def _gpus(torch: Any, found: dict[str, Any]) -> None:
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
    """Pin memory of torch's, and page-lock memory as the loader does. The warning if that fails."""
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
