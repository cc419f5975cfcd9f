"""``sharded-loader doctor``: is this machine fit for a loader, and what should be changed?

    facts.collect() --> Facts --> lines: names and texts, which describe the machine
                              --> find: Findings, problems first: what is wrong or worth knowing, and what to change

A *problem* means that the loader fails or is slow here. A *note* is worth knowing, and the loader works well.
`find` and `lines` are pure functions, tested on made-up facts. Exit code 0: no problem; 1: a problem.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

import click

from sharded_loader.cli.facts import Facts, busy_text, collect
from sharded_loader.cli.output import counted, json_option, quiet_option, show_json, size_text

GIB = 1 << 30
LEAST_TORCH = (2, 4)

LEAST_MEMORY = GIB
"""Free bytes: below, workers and their batches are soon killed."""

LEAST_SHM = GIB
"""Size of /dev/shm where batches lie in it. Docker gives 64 MiB."""

FEW_DESCRIPTORS, SCARCE_DESCRIPTORS = 1024, 128
"""A worker takes about four in the main process (measured), and a program opens files of its own. macOS gives 256."""


@dataclasses.dataclass(frozen=True)
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
