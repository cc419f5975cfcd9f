"""Which devices the user means, and whether it is this process's own GPU."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from sharded_loader.base.system import LOCAL_RANKS
from sharded_loader.devices import names
from sharded_loader.devices.names import device_list, find_device, find_devices, indexed

CPU, CUDA, FIRST, SECOND = (torch.device(name) for name in ("cpu", "cuda", "cuda:0", "cuda:1"))


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
    [("cpu", CPU), (0, FIRST), (1, SECOND), ("cuda:1", SECOND), ("cuda", CUDA), (SECOND, SECOND)],
)
def test_a_device_has_a_name_an_index_or_is_one(two_gpus: Any, name: Any, found: torch.device) -> None:
    assert find_device(name) == found


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("gpu", ValueError, "device 'gpu' is unknown; this process sees: cpu, cuda:0, cuda:1"),
        ("auto", ValueError, 'devices="auto" means all accelerators'),
        ("cuda:2", ValueError, "device 'cuda:2' does not exist; this process sees: cpu, cuda:0, cuda:1"),
        ("xpu", ValueError, "device 'xpu' does not exist"),
        (2, ValueError, "there is no accelerator 2"),
        (-1, ValueError, "there is no accelerator -1"),
        (True, TypeError, "device True is a bool; give a name, an index or a torch.device"),
        (1.5, TypeError, "device 1.5 is a float"),
    ],
)
def test_other_names_are_rejected(two_gpus: Any, name: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_device(name)


def test_only_the_object_means_the_meta_device(two_gpus: Any) -> None:
    assert find_device(torch.device("meta")).type == "meta"


@pytest.mark.parametrize(
    ("device", "devices", "found"),
    [
        (None, None, (None, False)),
        ("cuda:1", None, ([SECOND], False)),
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
        ("cpu", ["cpu"], ValueError, "not both"),
        (0, None, ValueError, 'device=0: an int alone could be an index or a count; say device="cuda:0"'),
        (None, 2, ValueError, r"devices=2: an int alone .* give a list such as \[0, 1\], or .*; device= takes one"),
        (None, "cpu", TypeError, "devices is 'cpu', and must be a list: .*; device= takes one"),
        (None, CPU, TypeError, "devices is 'cpu', and must be a list"),
        (None, {"cpu"}, TypeError, "must be a list"),
        (None, [], ValueError, "devices is empty"),
    ],
)
def test_other_devices_are_rejected(device: Any, devices: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        find_devices(device, devices)


def test_auto_is_the_cpu_where_there_is_no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "accelerators", list)
    assert find_devices(None, "auto") == ([CPU], True)
    assert device_list("auto") == [CPU]


def test_devices_in_a_list_have_their_numbers(two_gpus: Any) -> None:
    assert device_list(["cuda:1", "cpu", torch.device("cpu", 0)]) == [SECOND, CPU, CPU]
    assert indexed(SECOND) == SECOND
    assert indexed(torch.device("meta")) == torch.device("meta")


# -- one process per GPU --------------------------------------------------------------------------------------


@pytest.mark.parametrize("variable", LOCAL_RANKS)
def test_the_gpu_of_another_rank_is_warned_of(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    with pytest.warns(UserWarning, match=rf"means cuda:0.*{variable} is 1.*torch\.cuda\.set_device\(1\)"):
        names.warn_of_rank(CUDA, FIRST)


def test_a_process_group_tells_the_rank_too(two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)
    with pytest.warns(UserWarning, match=r"rank 5 of the process group.*cuda:1"):
        names.warn_of_rank(CUDA, FIRST)


@pytest.mark.parametrize(
    ("name", "found", "rank", "count"),
    [
        pytest.param(CUDA, FIRST, "0", 2, id="the first process"),
        pytest.param(CUDA, FIRST, None, 2, id="no ranks"),
        pytest.param(CUDA, FIRST, "x", 2, id="no number"),
        pytest.param(CUDA, SECOND, "1", 2, id="set_device was called"),
        pytest.param(FIRST, FIRST, "1", 2, id="on purpose"),
        pytest.param(CUDA, FIRST, "1", 1, id="each process sees its own GPU"),
        pytest.param(CPU, CPU, "1", 2, id="no GPU"),
    ],
)
def test_whoever_has_its_own_gpu_is_not_warned(
    two_gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch, name: Any, found: Any, rank: Any, count: int
) -> None:
    del two_gpus[count:]
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        names.warn_of_rank(name, found)
