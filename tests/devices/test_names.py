"""Which devices the user means, and whether it is this process's own GPU."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from simulated import Machine

from sharded_loader import Placement, ShardedDataLoader
from sharded_loader.base.system import LOCAL_RANKS
from sharded_loader.devices import names, placement
from sharded_loader.devices.names import device_list, find_device, find_devices, indexed
from sharded_loader.engine.pool import Pool

CPU, CUDA, FIRST, SECOND, META = map(torch.device, ("cpu", "cuda", "cuda:0", "cuda:1", "meta"))


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    found = [FIRST, SECOND]
    monkeypatch.setattr(names, "accelerators", lambda: found)
    for variable in LOCAL_RANKS:
        monkeypatch.delenv(variable, raising=False)
    return found


# -- names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [("cpu", CPU), (0, FIRST), (1, SECOND), ("cuda:1", SECOND), ("cuda", CUDA), (SECOND, SECOND), (META, META)],
)
def test_a_device_has_a_name_an_index_or_is_one(two_gpus: Any, name: Any, found: torch.device) -> None:
    assert find_device(name) == found


@pytest.mark.parametrize(
    ("device", "devices", "found"),
    [
        (None, None, (None, False)),
        ("cuda:1", None, ([SECOND], False)),
        (1, None, ([SECOND], False)),
        (None, ["cuda:1", "cpu"], ([SECOND, CPU], True)),
        (None, (0, 1), ([FIRST, SECOND], True)),
        (None, "auto", ([FIRST, SECOND], True)),
    ],
)
def test_device_means_plain_batches_and_devices_shards(two_gpus: Any, device: Any, devices: Any, found: Any) -> None:
    assert find_devices(device, devices) == found


@pytest.mark.parametrize(
    ("device", "devices", "error", "message"),
    [
        ("gpu", None, ValueError, "device 'gpu' is unknown; this process sees: cpu, cuda:0, cuda:1"),
        ("auto", None, ValueError, 'devices="auto" means all accelerators'),
        ("cuda:2", None, ValueError, "device 'cuda:2' does not exist; this process sees: cpu, cuda:0, cuda:1"),
        ("xpu", None, ValueError, "device 'xpu' does not exist"),
        ("meta", None, ValueError, "device 'meta' does not exist"),  # only the object means it
        (1.5, None, TypeError, "device 1.5 is a float"),
        (7, None, ValueError, "there is no accelerator 7"),
        (None, [2], ValueError, "there is no accelerator 2"),
        (None, [-1], ValueError, "there is no accelerator -1"),
        (None, [True], TypeError, "device True is a bool; give a name, an index or a torch.device"),
        ("cpu", ["cpu"], ValueError, "not both"),
        (None, 2, ValueError, r"devices=2: an int alone .* give a list such as \[0, 1\], or .*; device= takes one"),
        (None, "cpu", TypeError, "devices is 'cpu', and must be a list: .*; device= takes one"),
        (None, CPU, TypeError, "devices is 'cpu', and must be a list"),
        (None, {"cpu"}, TypeError, "must be a list"),
        (None, [], ValueError, "devices is empty"),
    ],
)
def test_other_devices_are_rejected(
    two_gpus: Any, device: Any, devices: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        find_devices(device, devices)


def test_auto_is_the_cpu_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "accelerators", list)
    assert find_devices(None, "auto") == ([CPU], True)
    assert device_list("auto") == [CPU]


@pytest.mark.parametrize("found", [[torch.device("mps:0")], []])
def test_a_mac_with_an_older_torch_has_one_accelerator(
    found: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "accelerator", None, raising=False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: bool(found))
    assert names.accelerators() == found


def test_devices_in_a_list_have_their_numbers(two_gpus: Any) -> None:
    assert device_list(["cuda:1", "cpu", torch.device("cpu", 0)]) == [SECOND, CPU, CPU]
    assert indexed(SECOND) == SECOND
    assert indexed(META) == META


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(current_device=lambda: 1))
    assert indexed(CUDA) == SECOND and indexed(torch.device("mps")) == torch.device("mps:1")


def test_all_accelerators_for_each_of_several_processes_is_a_warning(
    two_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.warns(UserWarning, match="each of the 8 processes .* give device=local_rank"):
        assert find_devices(None, "auto") == (two_gpus, True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert find_devices(None, "auto") == (two_gpus, True)
    del two_gpus[1]  # each process sees its own GPU
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert find_devices(None, "auto") == ([FIRST], True)


# -- one process per GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found", "ranks", "count", "message"),
    [
        *[(CUDA, FIRST, {name: "1"}, 2, rf"{name} is 1.*torch\.cuda\.set_device\(1\)") for name in LOCAL_RANKS],
        pytest.param(CUDA, FIRST, {}, 2, r"rank 5 of the process group", id="a process group"),
        pytest.param(CUDA, FIRST, {"LOCAL_RANK": "0"}, 2, None, id="the first process"),
        pytest.param(CUDA, FIRST, {}, 2, None, id="no ranks"),
        pytest.param(CUDA, FIRST, {"LOCAL_RANK": "x"}, 2, None, id="no number"),
        pytest.param(CUDA, SECOND, {"LOCAL_RANK": "1"}, 2, None, id="set_device was called"),
        pytest.param(FIRST, FIRST, {"LOCAL_RANK": "1"}, 2, None, id="on purpose"),
        pytest.param(CUDA, FIRST, {"LOCAL_RANK": "1"}, 1, None, id="each process sees its own GPU"),
        pytest.param(CPU, CPU, {"LOCAL_RANK": "1"}, 2, None, id="no GPU"),
    ],
)
def test_the_gpu_of_another_rank_is_warned_of(
    two_gpus: Any, monkeypatch: pytest.MonkeyPatch, name: Any, found: Any, ranks: Any, count: int, message: str | None
) -> None:
    del two_gpus[count:]
    for variable, rank in ranks.items():
        monkeypatch.setenv(variable, rank)
    if "process group" in (message or ""):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    warned = rf"means cuda:0.*{message}.*cuda:1"
    with pytest.warns(UserWarning, match=warned) if message else contextlib.nullcontext():
        names.warn_of_rank(name, found)  # warnings are errors


@pytest.mark.parametrize("resident", [False, True])
def test_a_loader_warns_once(machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, resident: bool) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    device, first = torch.device("privateuseone"), machine.devices[0]
    monkeypatch.setattr(placement, "indexed", lambda device: first)
    with (
        pytest.warns(UserWarning, match="several processes would share privateuseone:0") as caught,
        ShardedDataLoader(np.arange(64), 4, device=Placement(device, resident=resident), pool=pool) as loader,
    ):
        for _ in range(2):
            list(loader)
    assert [one.filename for one in caught] == [__file__]
