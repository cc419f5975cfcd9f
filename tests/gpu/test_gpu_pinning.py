"""On a GPU, segments are page-locked where that is allowed, and a refusal harms nobody."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from on_cuda import SECONDS, Cudart, needs_cuda, sleep

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import copies, placement
from sharded_loader.devices.accelerator import PORTABLE, Registrar, Streams, address_of, clear_error, pinned_empty
from sharded_loader.memory import arena
from sharded_loader.memory.segments import Segment, create

pytestmark = [pytest.mark.gpu, needs_cuda]

ROWS, WIDTH = 256, 8192


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH))


def read_all(loader: ShardedDataLoader) -> None:
    for number, batch in enumerate(loader):
        assert batch[:, 0].tolist() == [float(WIDTH) * (32 * number + i) for i in range(32)]


@pytest.fixture
def segment(cuda: torch.device) -> Iterator[Segment]:
    made = create(0, 1 << 20)
    yield made
    made.close()


def test_registered_memory_is_pinned_for_torch(cuda: torch.device, segment: Segment) -> None:
    undo = Registrar(Streams(cuda), lambda: None).register(segment.mapping)
    assert undo is not None
    # At an offset too: a slot's tensor begins where the slot does.
    tensor = torch.from_numpy(np.frombuffer(segment.mapping, np.float32, 1000, 4096))
    assert tensor.is_pinned()
    tensor[:] = torch.arange(1000)
    moved = torch.empty_like(tensor, device=cuda)
    moved.copy_(tensor, non_blocking=True)
    assert torch.equal(moved.cpu(), torch.arange(1000, dtype=torch.float32))
    undo()
    assert not tensor.is_pinned()
    del tensor


def test_batches_of_workers_are_copied_out_of_the_segments(cuda: torch.device, process_pool: ProcessPool) -> None:
    with ShardedDataLoader(dataset(), 32, device=cuda, pool=process_pool) as loader:
        read_all(loader)  # from here on the pool knows how large a batch is
        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(Streams, "pin")
            read_all(loader)
        assert process_pool._transport.arena.segments
        for made in process_pool._transport.arena.segments:
            assert torch.from_numpy(np.frombuffer(made.mapping, np.uint8)).is_pinned()


def test_threads_put_batches_into_pinned_memory(cuda: torch.device) -> None:
    for dtype in ("f4", "u1", "M8[ns]", "?"):
        array = pinned_empty(Streams(cuda), (3, 2), np.dtype(dtype))
        assert torch.from_numpy(array.view(np.uint8).reshape(-1)).is_pinned()


@pytest.mark.parametrize("code", [1, 2, 801])
def test_a_refusal_is_one_warning_and_batches_arrive(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    runtime = Cudart(torch.cuda.cudart(), refuse=code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    with (
        pytest.warns(UserWarning, match=rf"could not be pinned .*error {code}") as caught,
        ShardedDataLoader(dataset(), 32, device=cuda, pool=ProcessPool(2)) as loader,
    ):
        for _ in range(3):
            read_all(loader)
    assert sum("could not be pinned" in str(warning.message) for warning in caught) == 1
    assert runtime.calls == 1


def provoke(segment: Segment, kind: str) -> Any:
    """Let a registration fail; its code."""
    runtime: Any = torch.cuda.cudart()
    address, nbytes = address_of(segment.mapping)
    if kind == "size 0":
        return runtime.cudaHostRegister(address, 0, PORTABLE)
    assert int(runtime.cudaHostRegister(address, nbytes, PORTABLE)) == 0
    return runtime.cudaHostRegister(address, nbytes, PORTABLE)


@pytest.mark.parametrize("kind", ["size 0", "twice"])
def test_a_failed_registration_is_cleared(cuda: torch.device, segment: Segment, kind: str) -> None:
    runtime: Any = torch.cuda.cudart()
    code = provoke(segment, kind)
    assert int(code) != 0
    clear_error(runtime)
    assert torch.ones(1000, device=cuda).sum().item() == 1000
    if kind == "twice":
        assert int(runtime.cudaHostUnregister(address_of(segment.mapping)[0])) == 0


def test_the_error_of_a_refused_segment_does_not_come_up_elsewhere(cuda: torch.device, segment: Segment) -> None:
    registrar = Registrar(Streams(cuda), lambda: None)
    undo = registrar.register(segment.mapping)
    assert undo is not None
    assert registrar.register(segment.mapping) is undo  # who asks again, after an interruption, gets it again
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert Registrar(Streams(cuda), lambda: None).register(segment.mapping) is None
    assert (torch.arange(1000, device=cuda) * 2).sum().item() == 999_000
    undo()


def test_unlocking_what_is_not_locked_harms_nobody(cuda: torch.device) -> None:
    mapping = mmap.mmap(-1, 1 << 16)
    undo = Registrar(Streams(cuda), lambda: None).register(mapping)
    assert undo is not None
    undo()
    undo()  # fails, and is cleared
    assert torch.ones(1000, device=cuda).sum().item() == 1000
    mapping.close()


def test_a_device_that_is_busy_for_long_is_not_waited_for_without_end(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory stays as it is: registered, and mapped."""
    runtime = Cudart(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(placement, "CLOSING_SECONDS", 0.2)
    loader = ShardedDataLoader(dataset(), 32, device=cuda, pool=ProcessPool(2))
    batches = iter(loader)
    held = [next(batches) for _ in range(4)]
    torch.cuda.synchronize(cuda)
    sleep(3 * SECONDS)
    busy = torch.cuda.Event()
    busy.record()
    held.append(next(batches))  # the copies of those behind it wait for the device
    with pytest.warns(UserWarning, match="has not done its copies within"):
        loader.close()
    assert not busy.query()
    assert runtime.registered
    torch.cuda.synchronize(cuda)
    for number, batch in enumerate(held):
        assert batch[:, 0].tolist() == [float(WIDTH) * (32 * number + i) for i in range(32)]
    del batch, held, batches
    arena.Arena().close()  # looks again at what was left alone
    assert (runtime.registered, arena.STILL_READ, copies.STILL_READ) == ({}, [], set())
