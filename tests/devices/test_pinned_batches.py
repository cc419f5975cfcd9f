"""``pin_memory=True``: a thread pins, and ``next`` only waits. No GPU is here: torch's ``pin_memory`` is pretended."""

from __future__ import annotations

import contextlib
import gc
import itertools
import signal
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import let_workers_finish, until

from sharded_loader import ShardedDataLoader
from sharded_loader.base.errors import notes_of
from sharded_loader.devices import names, placement
from sharded_loader.drop_in import iterator as drop_in
from sharded_loader.drop_in.pinning import PinnedCopy, Pinner
from sharded_loader.engine.pool import Pool
from sharded_loader.torch import DataLoader

THREAD = "sharded_loader-pins"


class Pinned(NamedTuple):
    """One call of torch's ``pin_memory``."""

    value: float
    thread: str
    torch_threads: int
    device: int


class Pins(list[Pinned]):
    """What was pinned, in the place of ``torch.cuda``: each thread has a current device."""

    def __init__(self) -> None:
        self.threads = threading.local()
        self.before: Callable[[float], object] = lambda value: None  # called by each ``pin_memory``, in its thread

    def current_device(self) -> int:
        return getattr(self.threads, "device", 0)

    def set_device(self, device: int) -> None:
        self.threads.device = device


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> Pins:
    pins = Pins()

    def pin(tensor: torch.Tensor, device: Any = None) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise RuntimeError("only dense CPU tensors can be pinned")
        value, thread = tensor.flatten()[0].item(), threading.current_thread().name
        pins.before(value)
        pins.append(Pinned(value, thread, torch.get_num_threads(), pins.current_device()))
        return tensor.clone()

    devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    for module in (names, placement, drop_in.core):
        monkeypatch.setattr(module, "accelerators", lambda: devices)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: pins)
    if not hasattr(torch, "accelerator"):  # before 2.6
        monkeypatch.setattr(torch, "accelerator", SimpleNamespace(is_available=1, current_accelerator=1), raising=False)
    for asked in (torch.accelerator, torch.cuda):  # torch's iterator asks one of them; in torch 2.6, the second
        monkeypatch.setattr(asked, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device("cuda"))
    return pins


def rows() -> np.ndarray:
    return np.arange(64.0, dtype=np.float32)[:, None] * np.ones(3, np.float32)


def made(kind: str, pool: Pool | None = None) -> Any:
    if kind == "ours":
        return ShardedDataLoader(rows(), 4, pin_memory=True, **({"num_workers": 2} if pool is None else {"pool": pool}))
    return DataLoader(rows(), 4, pin_memory=True, num_workers=2, start_method="fork")


def firsts(batches: Any) -> list[float]:
    return [batch[0, 0].item() for batch in batches]


IN_ORDER = [4.0 * number for number in range(16)]


def test_a_thread_pins_the_batches_of_workers_in_order(pins: Pins, worker_pool: Pool) -> None:
    with made("ours", worker_pool) as loader:
        for _ in range(2):
            assert firsts(loader) == IN_ORDER
    assert [one.value for one in pins][:32] == 2 * IN_ORDER  # and the first ones of the next epoch
    assert {one.thread for one in pins} == {THREAD}


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_without_workers_the_main_thread_pins_as_in_torch(pins: Pins, kind: Any) -> None:
    assert firsts(kind(rows(), 4, pin_memory=True)) == IN_ORDER
    assert {one.thread for one in pins} == {"MainThread"}


@pytest.mark.costly
@pytest.mark.parametrize("in_order", [True, False])
def test_the_drop_in_pins_in_a_thread(pins: Pins, in_order: bool) -> None:
    loader = DataLoader(rows(), 4, pin_memory=True, num_workers=2, start_method="fork", in_order=in_order)
    for _ in range(2):
        found = firsts(loader)
        assert (found if in_order else sorted(found)) == IN_ORDER
    assert {one.thread for one in pins} == {THREAD}


@pytest.mark.parametrize("kind", ["ours", "drop-in"])
def test_the_device_of_the_main_thread_pins_with_one_of_torchs_threads_and_no_other_thread_loses_any(
    pins: Pins, kind: str
) -> None:
    """In a new thread it would be the first device, which would get a context."""
    before = torch.get_num_threads()
    assert before > 1, "this test needs two cores"
    pins.set_device(1)
    assert firsts(made(kind)) == IN_ORDER
    assert {(one.device, one.torch_threads) for one in pins} == {(1, 1)}
    found = [torch.get_num_threads()]
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join()
    assert found == [before, before]


def test_batches_are_pinned_while_the_loop_works(pins: Pins, worker_pool: Pool) -> None:
    with made("ours", worker_pool) as loader:
        batches = iter(loader)
        next(batches)
        let_workers_finish(loader, batches)
        next(batches)
        pinned = threading.Event()
        pins.before = lambda value: pinned.set() if value == 12.0 else None
        if 12.0 not in [one.value for one in pins]:
            assert pinned.wait(300), "nobody has asked for it"
        assert next(batches)[0, 0].item() == 8.0


@pytest.mark.parametrize("kind", ["ours", "drop-in"])
def test_a_batch_that_cannot_be_pinned_is_an_error_and_without_memory_stays_as_it_is(pins: Pins, kind: str) -> None:
    def refuse(value: float) -> None:
        if value >= 8.0:
            raise RuntimeError("not this one" if value == 8.0 else "CUDA error: out of memory")

    pins.before = refuse
    with pytest.warns(UserWarning, match="could not be pinned .*out of memory") as warned:
        batches = iter(made(kind))
        assert [next(batches)[0, 0].item() for _ in range(2)] == [0.0, 4.0]
        with pytest.raises(RuntimeError, match="not this one") as caught:
            next(batches)
        assert "epoch 0, batch 2" in "".join(notes_of(caught.value))
        del caught
        assert firsts(batches) == IN_ORDER[3:]
    assert len(warned) == 1


class Pinning(NamedTuple):
    """A container that pins itself."""

    values: Any
    sizes: Any

    def pin_memory(self) -> Pinning:
        return Pinning(self.values.pin_memory(), self.sizes)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_containers_pin_themselves_and_what_torch_cannot_pin_stays_as_it_is(pins: Pins) -> None:
    values, sizes, sparse = torch.ones(3), torch.ones(2), torch.eye(3).to_sparse()
    pinner = Pinner("cuda", in_thread=False)
    own, kind, left = pinner.begin([Pinning(values, sizes), torch.Tensor, sparse]).finish()
    assert (type(own), kind) == (Pinning, torch.Tensor)
    assert own.sizes is sizes and own.values is not values and left is sparse
    nested = torch.nested.nested_tensor([torch.ones(2)])
    assert pinner.begin([nested]).finish()[0] is nested


def test_nothing_holds_a_batch_that_was_pinned_and_dropped(pins: Pins) -> None:
    """Neither the thread, which waits for the next one, nor an error that leads back to it."""

    def pin(batch: Any) -> Any:
        if batch.nbytes:
            raise ValueError("not this one")
        return batch

    pinner = Pinner("cuda", pin=pin)
    gc.disable()  # what goes only with the collector keeps memory for a long time
    try:
        for size in (0, 3):
            pending = pinner.begin(np.ones(size))
            held = weakref.ref(pending)
            with pytest.raises(ValueError, match="not this one") if size else contextlib.nullcontext():
                pending.finish()
            del pending
            assert until(lambda held=held: held() is None)  # type: ignore[misc]  # the thread is about to let go of it
    finally:
        gc.enable()
        pinner.close()


@pytest.mark.parametrize("kind", ["ours", "drop-in"])
@pytest.mark.costly
def test_a_thread_that_cannot_begin_is_an_error_and_no_hang(
    pins: Pins, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def broken(device: int) -> None:
        raise ValueError("no such device")

    batches = iter(made(kind))
    with monkeypatch.context() as patch:
        patch.setattr(pins, "set_device", broken)
        for number in range(3):
            with pytest.raises(ValueError, match="no such device") as caught:
                next(batches)
            assert f"epoch 0, batch {number}" in "".join(notes_of(caught.value))
            del caught
    assert pins == []


def test_an_object_that_runs_out_of_memory_is_pinned_or_an_error(pins: Pins) -> None:
    class Greedy(torch.nn.Module):
        def pin_memory(self) -> Any:
            raise torch.cuda.OutOfMemoryError("nothing left")

    loader = ShardedDataLoader(rows(), 4, pin_memory=True, batchify_fn=lambda samples: Greedy(), num_workers=1)
    with pytest.raises(torch.cuda.OutOfMemoryError, match="nothing left"):
        next(iter(loader))
    loader.close()


def test_ctrl_c_while_a_batch_is_pinned_loses_nothing(
    pins: Pins, monkeypatch: pytest.MonkeyPatch, worker_pool: Pool
) -> None:
    begun, go_on, asked, finish = threading.Event(), threading.Event(), itertools.count(), PinnedCopy.finish

    def interrupted(pending: PinnedCopy) -> Any:
        if next(asked) == 2:
            assert begun.wait(300)
            signal.raise_signal(signal.SIGINT)
        return finish(pending)

    def before(value: float) -> None:
        if value == 8.0:
            begun.set()
            go_on.wait(300)

    pins.before = before
    monkeypatch.setattr(PinnedCopy, "finish", interrupted)
    with made("ours", worker_pool) as loader:
        batches, got = iter(loader), []
        with pytest.raises(KeyboardInterrupt):
            while True:
                got.append(next(batches)[0, 0].item())
        go_on.set()
        got += firsts(batches)
    assert got == IN_ORDER


@pytest.mark.costly(2)
@pytest.mark.parametrize("end", ["close", "forget", "break"])
def test_the_thread_ends_with_its_loader(pins: Pins, worker_pool: Pool, end: str) -> None:
    loader = made("ours", worker_pool)
    batches = iter(loader)
    next(batches)
    assert THREAD in [thread.name for thread in threading.enumerate()]
    if end == "close":
        loader.close()
    del batches
    if end == "forget":
        del loader
        gc.collect()
    elif end == "break":
        assert firsts(loader) == IN_ORDER
        loader.close()
    assert THREAD not in [thread.name for thread in threading.enumerate()]


def test_pin_memory_on_a_mac_is_one_warning_and_has_no_effect(monkeypatch: pytest.MonkeyPatch, pool: Pool) -> None:
    def pin(self: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mps has no pinned memory")

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("mps", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    with (
        pytest.warns(UserWarning, match="pin_memory=True has no effect.*mps") as caught,
        ShardedDataLoader(np.arange(64), 4, pin_memory=True, pool=pool) as loader,
    ):
        assert next(iter(loader)).tolist() == [0, 1, 2, 3]
    assert [one.filename for one in caught] == [__file__]


def test_pin_memory_beside_a_device_warns_of_no_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("mps", 0)])
    placement.Placer([torch.device("cpu")], pin_memory=True)  # warnings are errors
