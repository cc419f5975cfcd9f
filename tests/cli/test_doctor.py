"""``sharded-loader doctor``: the machine in lines, what to change, JSON, an exit code; what made-up facts mean."""

from __future__ import annotations

import builtins
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sharded_loader.cli import doctor
from sharded_loader.cli.doctor import (
    REQUIRED,
    Facts,
    Gpu,
    Room,
    busy_text,
    collect,
    cores_of_others,
    explain_start_method,
    find,
    lines,
)
from sharded_loader.cli.main import main

GIB, MIB = 1 << 30, 1 << 20
INSTALLED = dict.fromkeys(REQUIRED, "99")
SMALL_SHM = Room("/dev/shm", 64 * MIB, 60 * MIB)
DOCKER = Facts(shared_memory="shm", shm=Room("/dev/shm", 64 << 20, 64 << 20))
NOTED = Facts(descriptors=256)


@pytest.mark.parametrize(
    ("facts", "code", "last"),
    [(Facts(), 0, "No problem found."), (NOTED, 0, "0 problems, 1 note."), (DOCKER, 1, "1 problem, 0 notes.")],
)
def test_the_exit_code_tells_whether_there_is_a_problem(
    facts: Facts, code: int, last: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: facts)
    assert main(["doctor"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[0] == "sharded_loader"
    assert lines[-1] == last


def test_a_problem_comes_with_what_to_change(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: DOCKER)
    assert main(["doctor", "-q"]) == 1
    problem, change = capsys.readouterr().out.splitlines()
    assert problem == "problem: Batches lie in /dev/shm, which has 64.0 MiB (64.0 MiB free)."
    assert change.startswith("  change: Enlarge it: docker run --shm-size=8g")


def test_quietly_a_good_machine_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "collect", Facts)
    assert main(["doctor", "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_json_has_facts_and_findings(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "collect", lambda: DOCKER)
    assert main(["doctor", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["facts"]["shm"] == {"path": "/dev/shm", "size": 64 << 20, "free": 64 << 20}
    assert [finding["is_problem"] for finding in found["findings"]] == [True]


@pytest.mark.slow
def test_it_works_where_torch_cannot_be_imported() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\nfrom sharded_loader.cli.main import main\nsys.exit(main(['doctor']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")
    assert "problem: torch is installed and cannot be imported: " in done.stdout
    assert "start method" in done.stdout


def test_a_good_machine_has_no_findings() -> None:
    assert find(Facts()) == []
    assert find(Facts(torch_cuda="13.0", nvidia_driver=True, gpus=[Gpu("cuda:0", "H100", 80 * GIB)])) == []


@pytest.mark.parametrize(
    ("facts", "is_problem", "what", "change"),
    [
        ({"required": INSTALLED | {"torch": None, "fsspec": None}}, True, "torch, fsspec", "pip install torch fsspec"),
        ({"torch_error": "OSError: libc10.so"}, True, "cannot be imported: OSError: libc10.so", "Install torch again"),
        ({"required": INSTALLED | {"torch": "2.3.1+cpu"}}, True, "torch is 2.3.1+cpu", "Update torch"),
        ({"cores": 1, "usable_cores": 1}, False, "has one core", "more cores"),
        ({"usable_cores": 1}, True, "may run on 1 of 8 cores", "taskset"),
        ({"core_limit": 1.5}, True, "may use 1.5 of 8 cores", "docker run --cpus 4"),
        ({"free_memory": 200 * MIB}, True, "Only 200.0 MiB of memory is free", "memory limit"),
        (
            {"shared_memory": None, "shared_memory_error": "no"},
            True,
            "no memory that processes can share: no",
            "--shm-size",
        ),
        ({"shared_memory": "file"}, True, "temporary files in /tmp", "--shm-size"),
        ({"shared_memory": "shm", "shm": SMALL_SHM}, True, "64.0 MiB (60.0 MiB free)", "--shm-size"),
        ({"shared_memory": "shm", "shm": Room("/dev/shm", 9 * GIB, MIB)}, True, "(1.0 MiB free)", "--shm-size"),
        ({"shm": SMALL_SHM}, False, "does not need it here; torch's own DataLoader does", "--shm-size"),
        ({"descriptors": 100, "most_descriptors": 4096}, True, "may open 100 files", "ulimit -n 4096"),
        ({"descriptors": 256}, False, "may open 256 files", "ulimit -n 65536"),
        ({"descriptors": 100, "most_descriptors": 100}, True, "may open 100 files", "docker run --ulimit nofile=65536"),
        ({"passes_descriptors": False}, False, "does not pass descriptors", "seccomp"),
        ({"trial": None, "trial_error": "WorkerDiedError: x"}, True, "failed: WorkerDiedError: x", "thread_pool=True"),
        ({"nvidia_driver": True}, True, "built for the CPU only", "Install a build of torch for CUDA"),
        ({"nvidia_driver": True, "torch_cuda": "13.0"}, True, "sees no GPU", "docker run --gpus all"),
        (
            {"nvidia_driver": True, "torch_cuda": "13.0", "visible_devices": "7"},
            True,
            "CUDA_VISIBLE_DEVICES is '7'",
            "Unset CUDA_VISIBLE_DEVICES",
        ),
        ({"pinned_error": "RuntimeError: no"}, True, "cannot be pinned: RuntimeError: no", "memory limit"),
    ],
)
def test_each_trouble_is_one_finding_with_advice(
    facts: dict[str, Any], is_problem: bool, what: str, change: str
) -> None:
    [finding] = find(replace(Facts(), **facts))
    assert finding.is_problem == is_problem
    assert what in finding.what and finding.what.endswith(".")
    assert change in finding.change


@pytest.mark.parametrize(
    "facts",
    [
        {"core_limit": 2.0},
        {"cores": 64, "usable_cores": 2},
        {"shm": None, "shared_memory": "named", "descriptors": None, "passes_descriptors": False, "system": "win32"},
        {"shm": None, "shared_memory": "shm", "system": "darwin", "start_method": "spawn"},
        {"required": INSTALLED | {"torch": "2.4.0"}},
        {"visible_devices": "", "torch_cuda": "13.0"},
    ],
)
def test_what_is_usual_is_no_finding(facts: dict[str, Any]) -> None:
    assert find(replace(Facts(), **facts)) == []


def test_problems_come_before_notes() -> None:
    found = find(Facts(shm=SMALL_SHM, descriptors=256, trial_error="x", free_memory=1))
    assert [finding.is_problem for finding in found] == [True, True, False, False]


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        (Facts(), "fork, the default on Linux: "),
        (Facts(system="darwin", start_method="spawn"), "spawn, the default on macOS: "),
        (Facts(system="win32", start_method="spawn"), "spawn, the default on Windows: "),
        (Facts(start_method="forkserver"), "forkserver, as this program has set it"),
        (Facts(start_method=None), "unknown: multiprocess cannot be imported"),
    ],
)
def test_the_start_method_is_explained(facts: Facts, said: str) -> None:
    assert explain_start_method(facts).startswith(said)


def test_the_facts_are_told_in_lines() -> None:
    told = dict(
        lines(
            Facts(
                core_limit=2.5,
                optional={"rich": "15.0", "ray": None},
                gpus=[Gpu("cuda:0", "H100", 80 * GIB), Gpu("mps", "mps")],
                required=INSTALLED | {"torch": None},
            )
        )
    )
    assert told["torch"] == "not installed"
    assert (told["optional"], told["not installed"]) == ("rich 15.0", "ray")
    assert told["cores"] == "8 of 8 usable; the container may use the time of 2.5"
    assert told["memory"] == "32.0 GiB of 64.0 GiB free (the machine's memory)"
    assert told["GPUs"] == "cuda:0 H100 80.0 GiB, mps mps"
    assert told["workers"] == "two processes delivered 8 batches in 0.10 s"


def test_what_is_unknown_is_told_too() -> None:
    facts = Facts(shm=None, shared_memory=None, descriptors=None, start_methods=(), trial=None)
    told = dict(lines(facts))
    assert (told["shared memory"], told["open files"], told["start methods"]) == ("none", "no limit", "none")
    assert (told["GPUs"], told["pinned memory"], told["workers"]) == (
        "none that torch sees",
        "not needed without a GPU",
        "not tried",
    )


def test_doctor_notes_a_busy_machine() -> None:
    [note] = find(Facts(cores=2, usable_cores=2, others=1.7))
    assert not note.is_problem
    assert note.what == "Other programs use 1.7 of 2 cores. Workers get what is left."


# -- facts -------------------------------------------------------------------------------------------------------------


def test_this_machine_is_described() -> None:
    found = collect()
    assert found.required["torch"] == torch.__version__
    assert None not in found.required.values()
    assert 1 <= found.usable_cores <= found.cores
    assert found.free_memory > 0
    assert found.shared_memory is not None and found.shared_memory_error is None
    assert found.start_method in found.start_methods
    assert found.trial_error is None and found.trial is not None and found.trial > 0


def test_without_torch_everything_else_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    found = collect()
    assert found.torch_error is not None and "torch" in found.torch_error
    assert (found.trial, found.trial_error, found.gpus) == (None, None, ())
    assert found.start_method is not None and found.shared_memory is not None


def test_workers_that_cannot_start_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_loader(*arguments: Any, **options: Any) -> Any:
        raise OSError("no processes\nat all")

    monkeypatch.setattr("sharded_loader.ShardedDataLoader", no_loader, raising=False)
    found = collect()
    assert (found.trial, found.trial_error) == (None, "OSError: no processes at all")


def test_a_wrong_choice_of_shared_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "floppy")
    found = collect()
    assert found.shared_memory is None
    assert found.shared_memory_error is not None and "SHARDED_LOADER_MEMORY is 'floppy'" in found.shared_memory_error
    assert found.trial_error is not None


@pytest.mark.skipif(sys.platform == "win32", reason="there, memory is always named")
def test_the_kind_of_shared_memory_is_what_the_system_gives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder, kind in ((None, "memfd"), ("/dev/shm", "shm"), (str(tmp_path), "file")):
        opened = lambda label, kind, folder=folder: (os.open(os.devnull, os.O_RDONLY), folder)  # noqa: E731
        monkeypatch.setattr(doctor, "open_memory", opened)
        assert doctor._shared_memory() == kind


def test_a_platform_without_limits_and_affinity_has_facts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_resource(name: str, *rest: Any) -> Any:
        if name == "resource":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_resource)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert doctor._descriptor_limits() == (None, None)
    assert doctor.usable_cores() == os.cpu_count()


def test_a_gpu_is_described_and_memory_is_pinned_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    pretended = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(get_device_properties=lambda device: properties),
    )
    monkeypatch.setattr("sharded_loader.devices.names.accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(doctor, "_pin", lambda torch, device: f"no room for {device}")
    found: dict[str, Any] = {}
    doctor._look_at_gpus(pretended, found)
    assert found["gpus"] == [doctor.Gpu("cuda:0", "H100", 80 << 30)]
    assert (found["torch_cuda"], found["pinned_error"]) == ("13.0", "no room for cuda:0")


def test_memory_that_cannot_be_pinned_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error:\nout of memory")

    version = SimpleNamespace(cuda=None, hip=None)
    monkeypatch.setattr("sharded_loader.devices.names.accelerators", lambda: [torch.device("cpu")])
    found: dict[str, Any] = {}
    doctor._look_at_gpus(SimpleNamespace(version=version, empty=fails, uint8=torch.uint8), found)
    assert found["pinned_error"] == "RuntimeError: CUDA error: out of memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_can_be_pinned_on_this_machine(cuda: Any) -> None:
    assert doctor._pin(torch, cuda) is None


@pytest.mark.parametrize(
    ("others", "cores", "usable", "said"),
    [
        (0.0, 2, 2, False),
        (0.2, 2, 2, False),
        (1.7, 2, 2, True),
        (30.0, 64, 8, False),
        (60.0, 64, 8, True),
        (60.0, 64, 64, True),
    ],
)
def test_it_is_said_only_if_workers_lack_cores(others: float, cores: int, usable: int, said: bool) -> None:
    assert (busy_text(others, cores, usable) is not None) == said


def test_the_cores_of_others_are_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 85.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert cores_of_others() == pytest.approx(1.7)
