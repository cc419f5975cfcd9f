"""On a GPU, the host does not wait, memory is page-locked and stays flat, and nothing is left behind."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from on_cuda import (
    PART,
    PRETENDED,
    SECONDS,
    Cudart,
    copies_of,
    let_workers_finish,
    memory_limit,
    needs_cuda,
    no_synchronisation,
    run_program,
    sleep,
)

from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.devices import accelerator, copies, placement
from sharded_loader.devices.accelerator import Registrar, Streams, pinned_empty
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.engine.pool import Pool
from sharded_loader.memory import arena
from sharded_loader.memory.segments import Segment, create
from sharded_loader.torch import DataLoader

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(300)]

MB = 1 << 20


def images(count: int, megabytes: float = 0.25) -> ArrayDataset:
    """Samples of so many megabytes; each holds its number."""
    width = int(megabytes * MB) // 4
    return ArrayDataset(np.repeat(np.arange(count, dtype=np.float32)[:, None], width, 1), np.arange(count))


def test_no_call_that_makes_the_host_wait(cuda: torch.device, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, paged, count = [], [], 0

    def watched(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        # From other memory, or into another layout, the host waits, and torch does not tell.
        paged.extend(source.shape for _ in range(not source.is_pinned() or source.stride() != target.stride()))
        return copy(target, source)

    with ShardedDataLoader(images(64), 8, shuffle=True, device=cuda, pool=pool) as loader:
        total = torch.zeros((), device=cuda)
        for values, _ in loader:  # segments are registered, and memory is allocated
            total += values.mean()
        torch.cuda.synchronize(cuda)
        streams = copies_of(loader)[0].streams
        monkeypatch.setattr(streams, "rest", blocked.append)
        copy = streams.copy
        monkeypatch.setattr(streams, "copy", watched)
        for _ in range(3):
            torch.cuda.synchronize(cuda)
            with no_synchronisation():
                for values, _ in loader:
                    total += values.mean()
                    torch.cuda.synchronize(cuda)  # the device keeps step
        monkeypatch.undo()
    assert total.item() == pytest.approx(4 * 8 * 31.5, rel=1e-4)
    assert blocked == []
    assert paged == []
    assert count >= 2 * (3 * 8 - 2)  # the first ones may have been begun in the epoch before


@pytest.mark.parametrize("share", [True, 0.5])
def test_resident_batches_make_no_call_that_makes_the_host_wait(cuda: torch.device, share: Any) -> None:
    with ShardedDataLoader(images(64), 8, shuffle=True, device=Placement(cuda, resident=share)) as loader:
        list(loader)
        torch.cuda.synchronize(cuda)
        total = torch.zeros((), device=cuda)
        with no_synchronisation():
            for values, _ in loader:
                total += values.mean()
    assert total.item() == pytest.approx(8 * 31.5, rel=1e-4)


def test_next_returns_while_the_device_is_busy(cuda: torch.device, pool: Pool) -> None:
    with ShardedDataLoader(images(64), 8, device=cuda, pool=pool) as loader:
        sleep(SECONDS)
        list(loader)  # as many slots and pinned buffers as it takes are there then
        batches = iter(loader)
        first = [next(batches) for _ in range(2)]
        torch.cuda.synchronize(cuda)
        sleep(3 * SECONDS)
        asleep = torch.cuda.Event()
        asleep.record()
        later = [next(batches) for _ in range(3)]
        assert not asleep.query()
        torch.cuda.synchronize(cuda)
        assert [labels[0].item() for _, labels in (*first, *later)] == [0, 8, 16, 24, 32]
        assert [values[0, 0].item() for values, _ in (*first, *later)] == [0, 8, 16, 24, 32]


def late_rows(seconds: float) -> SimpleDataset:
    """Rows of 16 KB that take their time. Without any, they do not give up the core either."""

    def read(index: int) -> np.ndarray[Any, Any]:
        if seconds:
            time.sleep(seconds)
        return np.full(4096, index, np.float32)

    return SimpleDataset(range(400)).transform(read)


def train(loader: Any, cycles: int, cuda: torch.device) -> Any:
    """An epoch of a loop that never waits for the device by itself, after one in which everything is made.

    Returns:
        Parts of the seconds of the epoch: of the main thread's processor, and those that the loader has counted.
    """
    total = torch.zeros((), device=cuda)
    for _ in range(2):
        torch.cuda.synchronize(cuda)
        batches = iter(loader)
        total += next(batches)[0, 0]  # which waits for workers to begin
        before = loader.stats()
        began, cpu = time.perf_counter(), time.thread_time()
        for batch in batches:
            sleep(cycles)
            total += batch[0, 0]
        torch.cuda.synchronize(cuda)
        seconds, cpu, after = time.perf_counter() - began, time.thread_time() - cpu, loader.stats()
    next(iter(loader))  # the device's times of the last batches are read when the next ones are begun
    assert total.item() == 2 * sum(range(0, 400, SIZE))
    shares = {name: (getattr(after, name) - getattr(before, name)) / seconds for name in HOSTS}
    waited = loader.stats().device_waiting_seconds - before.device_waiting_seconds
    return SimpleNamespace(processor=cpu / seconds, device_waiting_seconds=waited / seconds, **shares)


HOSTS = "waiting_seconds", "device_seconds"
KINDS = pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader], ids=["ours", "drop-in"])
SLACK, SIZE = (4, 20) if PRETENDED else (1, 8)
"""A pretended GPU copies with the main thread's processor, and beside other programs: its batches, and the steps of a
busy device, are long, so that what the others take of the time decides nothing."""


@KINDS
def test_a_host_that_waits_for_the_device_sleeps_and_does_not_call_it_waiting_for_data(
    cuda: torch.device, kind: Any
) -> None:
    """Steps of 15 to 20 ms, batches that are there."""
    options = {"persistent_workers": True} if kind is DataLoader else {}
    shares = train(kind(late_rows(0), SIZE, num_workers=2, device=cuda, **options), SLACK * SECONDS // 50, cuda)
    assert shares.processor <= 0.2 * SLACK
    assert shares.waiting_seconds <= (shares.device_seconds / 2 if PRETENDED else 0.05)
    assert shares.device_waiting_seconds <= 0.05 * SLACK
    assert shares.device_seconds >= 0.8 / SLACK


@KINDS
def test_a_device_that_has_nothing_to_do_says_so(
    cuda: torch.device, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 samples of 5 ms in each batch, two workers: 20 ms for a batch, and a step of 1 ms.

    A host that other programs hold up does not wait for data meanwhile, nor does the device, as far as events tell.
    """
    if PRETENDED:  # few batches, each of which is measured
        monkeypatch.setattr(copies, "CLOCK_EVERY", 1)
    shares = train(kind(late_rows(0.005), SIZE, num_workers=2, device=cuda), SECONDS // 1000, cuda)
    assert shares.device_waiting_seconds >= 0.8 * (shares.waiting_seconds / 2 if PRETENDED else 1)
    assert shares.device_seconds <= 0.1 * SLACK


def test_memory_stays_flat_under_a_host_that_runs_ahead(cuda: torch.device, worker_pool: Pool) -> None:
    nbytes = 8 * 32 * 1024 + 8 * 8
    with ShardedDataLoader(images(256, 1 / 32), 8, device=cuda, pool=worker_pool) as loader:
        list(loader)
        torch.cuda.synchronize(cuda)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(cuda)
        torch.cuda.reset_peak_memory_stats(cuda)
        total = torch.zeros((), device=cuda)
        steps, reserved = 0, []
        while steps < 10_000 // PART:
            for values, _ in loader:
                sleep(400_000)  # some 0.2 ms: the host is faster
                total += values[0, 0]
                steps += 1
                assert len(copies_of(loader)[0].in_use) <= HOST_AHEAD
            assert len(copies_of(loader)[0].in_use) == 0  # after an epoch no host memory is held for copies
            reserved.append(torch.cuda.memory_reserved(cuda))
        del values
        torch.cuda.synchronize(cuda)
        peak = torch.cuda.max_memory_allocated(cuda) - before
    # In the consumer's hands, being handed out, two ahead; and what the allocator rounds up.
    assert peak <= 6 * nbytes
    assert reserved[-1] == reserved[len(reserved) // 4]
    assert total.item() == pytest.approx(steps / 32 * sum(range(0, 256, 8)), rel=1e-3)


def test_next_inside_a_graph_capture_is_rejected_and_loses_nothing(cuda: torch.device, pool: Pool) -> None:
    with ShardedDataLoader(images(16), 4, device=cuda, pool=pool) as loader:
        batches = iter(loader)
        values, labels = next(batches)
        static, graph = torch.zeros_like(values), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(cuda)
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # threads may pin memory meanwhile
            doubled = static * 2
            with pytest.raises(RuntimeError, match="graph is being captured"):
                next(batches)
        seen = [labels.tolist()]
        for values, labels in batches:
            static.copy_(values)
            graph.replay()
            seen.append(labels.tolist())
        torch.cuda.synchronize(cuda)
        assert seen == [list(range(i, i + 4)) for i in range(0, 16, 4)]
        assert doubled.shape == values.shape


def capture_beside_threads(mode: str) -> None:
    """Capture a graph in this thread while threads of a loader pin memory, which the mode allows or not."""
    cuda, gate, pins = torch.device("cuda", 0), threading.Event(), threading.Semaphore(0)
    pinned_empty = accelerator.pinned_empty

    def gated(index: int) -> np.ndarray:
        assert index < 8 or gate.wait(60)
        return np.full(5000, index, np.float32)

    def watched(*arguments: Any) -> Any:
        try:
            return pinned_empty(*arguments)
        finally:
            if gate.is_set():
                pins.release()

    data = SimpleDataset(range(64)).transform(gated)
    loader = ShardedDataLoader(data, 4, device=cuda, num_workers=2, thread_pool=True)
    with mock.patch.object(accelerator, "pinned_empty", watched), loader:
        batches, failed = iter(loader), []
        first = [next(batches)]
        static, graph = torch.full((8,), 3.0, device=cuda), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(cuda)
        try:
            # The end of a broken capture leaves its stream current: the outer block takes that back.
            with torch.cuda.stream(torch.cuda.default_stream(cuda)), torch.cuda.graph(graph, capture_error_mode=mode):
                doubled = static * 2
                gate.set()
                assert pins.acquire(timeout=60) and pins.acquire(timeout=60)  # two batches meanwhile
            graph.replay()
            assert doubled.tolist() == [6.0] * 8
        except RuntimeError as error:  # of torch: the capture is broken
            failed.append(error)
        for _ in range(15):
            try:
                first.append(next(batches))
            except RuntimeError as error:  # the batch of a thread that was kept from pinning memory
                failed.append(error)
        assert next(batches, None) is None
        assert mode == "global" or failed == []
        assert all("captur" in str(error) for error in failed), failed
        numbers = [int(batch[0, 0]) for batch in first]
        assert numbers == sorted(numbers) and len(numbers) >= 16 - len(failed)
        # Whatever has become of the capture, the loader goes on.
        assert [batch[:, -1].tolist() for batch in loader] == [list(range(i, i + 4)) for i in range(0, 64, 4)]


def test_a_thread_local_capture_works_beside_threads_that_read(cuda: torch.device) -> None:
    capture_beside_threads("thread_local")


def test_after_a_capture_in_the_default_mode_beside_threads_the_loader_goes_on() -> None:
    """The capture may break, and with it batches: torch's own loader has the same limit. In a process of its own."""
    run_program("import test_gpu_host as tests; tests.capture_beside_threads('global')", 200).check_returncode()


def test_50_epochs_with_new_loaders_leave_nothing(
    cuda: torch.device, new_pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Cudart(torch.cuda.cudart())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    data, memory, epochs = images(32), [], max(12, 50 // PART)
    whole = 0
    for epoch in range(epochs):
        loader = ShardedDataLoader(data, 4, shuffle=True, device=cuda, pool=new_pool())
        for number, _ in enumerate(loader):
            if epoch % 3 == 2 and number == 1:
                break
        else:
            whole += 1
        if epoch % 2:
            loader.close()
        del loader, _
        gc.collect()
        torch.cuda.synchronize(cuda)
        assert runtime.registered == {}, epoch
        memory.append((torch.cuda.memory_allocated(cuda), torch.cuda.memory_reserved(cuda)))
    assert len({allocated for allocated, _ in memory}) == 1
    assert memory[-1][1] == memory[9][1]
    if isinstance(new_pool(), ProcessPool):
        # A few batches into an epoch the pool knows how large they are, and makes a segment.
        assert runtime.calls >= whole > 0


# -- no memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", [1, 2])
def test_what_is_copied_ahead_gives_way_to_memory(cuda: torch.device, worker_pool: Pool, shards: int) -> None:
    """A batch has 64 MB, in one shard or two; there is room for two batches and a bit."""
    with (
        ShardedDataLoader(images(24, 32), 2, devices=[cuda] * shards, pool=worker_pool) as loader,
        memory_limit(cuda, (2 * 64 + 16 * shards) * MB),
    ):
        seen, batches = [], iter(loader)
        for batch in batches:
            for values, labels in batch:
                seen += labels.tolist()
                assert [values[0, 0].item(), values[-1, -1].item()] == [labels[0].item(), labels[-1].item()]
            let_workers_finish(loader, batches)
        assert seen == list(range(24))
        assert loader.device_prefetch < 2
        del batch, values, labels


def test_without_room_for_the_next_batch_it_is_that_batchs_error(cuda: torch.device, pool: Pool) -> None:
    with (
        ShardedDataLoader(images(12, 32), 2, device=cuda, pool=pool) as loader,
        memory_limit(cuda, (64 + 32) * MB),
    ):
        batches = iter(loader)
        held = next(batches)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            next(batches)
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        assert "copied to cuda:0" in notes
        assert "epoch 0, batch 1" in notes
        del held, caught
        gc.collect()
        assert next(batches)[1].tolist() == [4, 5]


def test_columns_that_do_not_fit_are_streamed(cuda: torch.device) -> None:
    with (
        memory_limit(cuda, 256 * MB),
        pytest.warns(UserWarning, match="cuda:0 does not keep the data"),
        ShardedDataLoader(images(16, 32), 1, device=Placement(cuda, resident=True)) as loader,  # 512 MB
    ):
        assert [labels.item() for _, labels in loader] == list(range(16))


def test_a_device_without_memory_for_a_batch_gives_its_rows_back(cuda: torch.device) -> None:
    gc.collect()
    before = torch.cuda.memory_allocated(cuda)
    # The device keeps 16 of 32 MB: the first batch.
    with ShardedDataLoader(images(128), 64, device=Placement(cuda, resident=0.5)) as loader:
        batches = iter(loader)
        assert next(batches)[1].tolist() == list(range(64))
        gc.collect()
        assert torch.cuda.memory_allocated(cuda) - before >= 16 * MB
        with memory_limit(cuda, 8 * MB), pytest.warns(UserWarning, match="cuda:0 does not keep the data"):
            values, labels = next(batches)
        assert (values[:, 0].tolist(), labels.tolist()) == (list(range(64, 128)), list(range(64, 128)))
        assert torch.cuda.memory_allocated(cuda) - before < 20 * MB  # the second batch


# -- page-locked memory ---------------------------------------------------------------------------------------

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


def test_the_error_of_a_refused_segment_does_not_come_up_elsewhere(cuda: torch.device, segment: Segment) -> None:
    undo = Registrar(Streams(cuda), lambda: None).register(segment.mapping)
    assert undo is not None
    with pytest.warns(UserWarning, match="could not be pinned"):
        assert Registrar(Streams(cuda), lambda: None).register(segment.mapping) is None
    assert (torch.arange(1000, device=cuda) * 2).sum().item() == 999_000
    undo()
    undo()  # it is not locked: this fails, and is cleared
    assert torch.ones(1000, device=cuda).sum().item() == 1000


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
