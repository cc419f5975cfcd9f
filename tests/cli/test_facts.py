"""The facts about this machine are collected, whatever is missing; and whether other programs use its cores."""

from __future__ import annotations

import builtins
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sharded_loader.cli import facts
from sharded_loader.cli.facts import busy_text, collect, cores_of_others


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
        monkeypatch.setattr(facts, "open_memory", opened)
        assert facts._shared_memory() == kind


def test_a_platform_without_limits_and_affinity_has_facts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_resource(name: str, *rest: Any) -> Any:
        if name == "resource":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_resource)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert facts._descriptors() == (None, None)
    assert facts.usable_cores() == os.cpu_count()


def test_a_gpu_is_described_and_memory_is_pinned_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="H100", total_memory=80 << 30)
    pretended = SimpleNamespace(
        version=SimpleNamespace(cuda="13.0"),
        cuda=SimpleNamespace(get_device_properties=lambda device: properties),
    )
    monkeypatch.setattr("sharded_loader.devices.names.accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(facts, "_pin", lambda torch, device: f"no room for {device}")
    found: dict[str, Any] = {}
    facts._gpus(pretended, found)
    assert found["gpus"] == [facts.Gpu("cuda:0", "H100", 80 << 30)]
    assert (found["torch_cuda"], found["pinned_error"]) == ("13.0", "no room for cuda:0")


def test_memory_that_cannot_be_pinned_is_told_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("CUDA error:\nout of memory")

    version = SimpleNamespace(cuda=None, hip=None)
    monkeypatch.setattr("sharded_loader.devices.names.accelerators", lambda: [torch.device("cpu")])
    found: dict[str, Any] = {}
    facts._gpus(SimpleNamespace(version=version, empty=fails, uint8=torch.uint8), found)
    assert found["pinned_error"] == "RuntimeError: CUDA error: out of memory"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_memory_can_be_pinned_on_this_machine(cuda: Any) -> None:
    assert facts._pin(torch, cuda) is None


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
