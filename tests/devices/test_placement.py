"""`Placer`: each shard on its device, memory for batches, what it does without any, whose error it is, and captures."""

from __future__ import annotations

import signal
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from devices_samples import SHARDED, Refusing, begun, copied, entries, place_now, placer_on
from injection import TimeIsUp
from simulated import Machine, SimulatedStreams, Stream

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.devices import accelerator, placement
from sharded_loader.devices.copies import CLOSING_SECONDS, SMALL, CopyStream, PendingCopy
from sharded_loader.devices.placement import LONGEST_PAUSE, PAUSE, CopyDepth, Placer
from sharded_loader.engine.messages import NOTHING
from sharded_loader.engine.pool import Pool

CPU = torch.device("cpu")


# -- one step -------------------------------------------------------------------------------------------------


def test_in_host_memory_arrays_become_tensors_over_the_same_memory() -> None:
    placed, array = Placer(None, pin_memory=False), np.arange(4)
    batch = place_now(placed, {"x": array, "name": "a"})
    array[0] = 7
    assert (batch["x"].tolist(), batch["name"]) == ([7, 1, 2, 3], "a")
    assert (placed.asynchronous, placed.capture_probes, placed.ahead) == ([], [], 0)


def test_each_shard_goes_to_its_device(machine: Machine) -> None:
    placed = Placer([machine.devices[0], CPU, torch.device("meta")], pin_memory=False)
    host = [np.arange(2), np.arange(3), np.arange(4)]
    first, second, third = place_now(placed, host, SHARDED)
    machine.finish()
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 1, 2])
    assert not np.shares_memory(second.numpy(), host[1])  # it may lie in page-locked memory
    assert (third.device.type, len(third)) == ("meta", 4)
    assert copied(machine) == 1
    assert len(place_now(placed, host[:2], SHARDED)) == 2  # of an incomplete batch
    machine.finish()


def test_micro_batches_all_go_to_the_one_device(machine: Machine) -> None:
    placed = placer_on(machine)
    found = place_now(placed, [np.arange(2), np.arange(3), np.arange(4)], SHARDED)
    machine.finish()
    assert [batch.tolist() for batch in found] == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]
    assert copied(machine) == 3


def test_what_is_on_its_device_passes_through(machine: Machine) -> None:
    placed, tensor = Placer(machine.devices, pin_memory=False), torch.arange(3)
    first, second = place_now(placed, [PendingCopy({"x": tensor}), np.arange(2)], SHARDED)
    machine.finish()
    assert first["x"] is tensor
    assert second.tolist() == [0, 1]
    assert place_now(placer_on(machine), PendingCopy(tensor)) is tensor
    assert copied(machine) == 1


# -- batch after batch ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batches", "ahead", "sent"),
    [
        ([*map(np.array, range(4))], 0, [0]),
        ([*map(np.array, range(4))], 2, [0, 1, 2]),
        ([np.array(0), np.array(1), None, np.array(3)], 4, [0, 1]),  # up to the first that is not finished
        ([np.array(0), ValueError("no"), NOTHING, np.array(3)], 3, [0, 3]),
        ([np.array(0), Refusing(), np.array(2)], 2, [0, 1, 2]),
    ],
    ids=["none", "two", "one is not finished", "errors and empty batches", "one that cannot be begun"],
)
def test_as_many_batches_behind_the_next_one_are_begun_as_are_wanted(
    machine: Machine, batches: Any, ahead: int, sent: list[int]
) -> None:
    placed, window = placer_on(machine), entries(*batches)
    placed.copy_ahead(ahead)
    first = placed.place(window)
    assert begun(window) == sent
    fails = isinstance(window[1].result and window[1].result.batch, Refusing)
    if fails:
        with pytest.raises(ValueError, match="cannot be pinned"):  # an error in its turn
            placed.place(window[1:])
    elif 1 in sent:
        placed.place(window[1:])
    machine.finish()
    assert (first.item(), copied(machine)) == (0, len(begun(window)))  # each one once, but not what failed


def test_the_batches_behind_are_begun_before_the_stream_of_the_user_waits_for_the_next_one(machine: Machine) -> None:
    placer_on(machine).place(entries(np.array(0), np.array(1)))
    home = f"{machine.devices[0]} default"
    steps = [step for step in machine.log if step in (("allocate", home), ("wait", home))]
    assert steps == [*[("allocate", home)] * 2, ("wait", home)]


@pytest.mark.parametrize("signal_name", ["SIGALRM"], indirect=True)
def test_what_a_signal_handler_raises_while_a_batch_is_begun_ahead_is_raised(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, signal_name: str
) -> None:
    before = SimulatedStreams.empty_like

    def interrupted(streams: SimulatedStreams, host: torch.Tensor) -> torch.Tensor:
        if host.item() == 1:
            signal.raise_signal(signal.SIGALRM)
        return before(streams, host)

    monkeypatch.setattr(SimulatedStreams, "empty_like", interrupted)
    with pytest.raises(TimeIsUp):
        placer_on(machine).place(entries(np.array(0), np.array(1)))


# -- the end --------------------------------------------------------------------------------------------------


def test_what_closes_does_not_hold_the_placement(machine: Machine) -> None:
    """It is a finalizer's: what it held would live as long as the loader."""
    placed = placer_on(machine)
    placed.create_streams()
    close, gone = placed.closer(), weakref.ref(placed)
    del placed
    assert gone() is None
    assert close()


@pytest.mark.parametrize("hangs", [0, 1])
def test_all_devices_are_waited_for_together(machine: Machine, monkeypatch: pytest.MonkeyPatch, hangs: int) -> None:
    placed, clock, given = Placer([CPU, *machine.devices], pin_memory=False), [100.0], []
    place_now(placed, [np.arange(2)] * 3, SHARDED)

    def close(copies: CopyStream, seconds: float) -> bool:
        given.append(seconds)
        clock[0] += 0.75 * CLOSING_SECONDS
        return copies.streams.device != machine.devices[hangs]

    monkeypatch.setattr(CopyStream, "close", close)
    monkeypatch.setattr("sharded_loader.base.host_clock.now", lambda: clock[0])
    assert not placed.closer()()
    assert given == [CLOSING_SECONDS, 0.25 * CLOSING_SECONDS]


def test_another_thread_may_meet_a_device_while_the_loader_is_closed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Placer(machine.devices, pin_memory=False)
    place_now(placed, [np.arange(2)], SHARDED)
    drain = CopyStream.drain

    def meanwhile(copies: CopyStream, seconds: float) -> bool:
        placed.create_streams()
        return drain(copies, seconds)

    monkeypatch.setattr(CopyStream, "drain", meanwhile)
    assert placed.closer()()


def test_memory_is_pinned_if_it_is_copied_from_and_otherwise_reused_until_the_placer_is_closed(
    machine: Machine,
) -> None:
    array = placer_on(machine).empty((2, 3), np.dtype("f4"))
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert machine.pinned.keys() == {array.__array_interface__["data"][0]}
    placed, blocks = Placer(None, pin_memory=False), []
    for _ in range(2):
        array = placed.empty((1 << 22,), np.dtype("u1"))
        blocks.append(weakref.ref(array.base.base.obj))  # type: ignore[union-attr]
        del array
    assert blocks[0]() is blocks[1]() is not None
    placed.closer()()
    assert blocks[0]() is None


# -- a device without memory -----------------------------------------------------------------------------------


DATA = ArrayDataset(np.arange(64))
IN_ORDER = [list(range(i, i + 4)) for i in range(0, 64, 4)]


@pytest.fixture
def in_use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were in use when the cache was emptied, after all work."""
    found, real = [], machine.empty_cache
    monkeypatch.setattr(machine, "empty_cache", lambda: (machine.finish(), found.append(machine.in_use), real()))
    return found


def test_what_is_copied_ahead_gives_way(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2  # one in the consumer's hands, and one more
    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=worker_pool) as loader:
        seen = []
        for batch in loader:
            machine.finish()
            seen.append(batch.tolist())
        assert seen == IN_ORDER
        assert loader.device_prefetch == 0


def test_only_tries_that_fail_make_the_next_ones_rarer_within_a_bound() -> None:
    depth, tries = CopyDepth(1), list[int]()
    depth.lower()
    for step in range(5 * LONGEST_PAUSE):
        if depth.count < depth.wanted:
            depth.retry()
        if depth.count:
            tries.append(step)
            for _ in range(2):  # the try has failed, and the batch before it does not fit either
                depth.lower()
    assert tries[0] == PAUSE - 1
    assert np.diff(tries)[:7].tolist() == [min(2**n * PAUSE, LONGEST_PAUSE) for n in range(1, 8)]


def test_all_devices_make_room_and_the_end_of_an_epoch_waits_for_all(machine: Machine) -> None:
    placed = Placer([CPU, *machine.devices], pin_memory=False)
    for wait in (placed.make_room, placed.end_epoch):
        place_now(placed, [np.arange(4)] * 3, SHARDED)
        wait()
        assert [len(copies.in_use) for copies in placed.copies.values() if copies is not None] == [0, 0]
    assert machine.caches_emptied == 2


@pytest.mark.costly
def test_a_device_that_has_room_again_is_sent_batches_ahead_again(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2
    data = ArrayDataset(np.arange(4 * 4 * PAUSE))
    with ShardedDataLoader(data, 4, device=machine.devices[0], pool=worker_pool) as loader:
        assert loader.device_prefetch == 2
        for number, batch in enumerate(loader):
            held = batch
            machine.finish()
            if number == 8:
                assert loader.device_prefetch == 0
                machine.blocks = None
        del batch, held
        assert loader.device_prefetch == 2
    assert machine.caches_emptied == 2


def test_the_error_stands_in_its_batch_s_place_and_says_where(machine: Machine, pool: Pool) -> None:
    machine.blocks = 1
    with ShardedDataLoader(DATA, 4, devices=[machine.devices[1]], pool=pool) as loader:
        batches = iter(loader)
        (held,) = next(batches)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            next(batches)
        assert "copied to privateuseone:1" in notes(caught.value)
        assert "epoch 0, batch 1" in notes(caught.value)
        assert machine.caches_emptied > 0
        del held, caught
        (third,) = next(batches)
        machine.finish()
        assert third.tolist() == [8, 9, 10, 11]


def test_a_second_try_has_the_memory_of_the_first(machine: Machine, in_use: list[int]) -> None:
    """Of a batch of two parts the first found room: it must not be in the way of the batch itself."""
    pair = ArrayDataset(np.zeros((64, SMALL)), np.ones((64, SMALL)))
    machine.blocks = 3
    with ShardedDataLoader(pair, 4, device=machine.devices[0]) as loader:
        batches = iter(loader)
        held = next(batches)
        with pytest.raises(torch.OutOfMemoryError):
            next(batches)
        assert in_use == [2]
        del held
        next(batches)


def test_what_is_copied_ahead_gives_its_memory_to_a_batch_of_another_size(machine: Machine) -> None:
    """The blocks have to go back to the device: the allocator of torch keeps them for tensors of their size."""
    placed, window = placer_on(machine), entries(np.arange(4), np.arange(4))
    held = placed.place(window)
    machine.blocks = machine.allocated
    window = [*entries(np.arange(100)), window[1]]
    batch = placed.place(window)
    machine.finish()
    assert (batch.tolist(), held.tolist()) == (list(range(100)), list(range(4)))
    assert begun(window) == [0]


@pytest.mark.parametrize("blocks", [2, 3])
def test_parts_of_a_batch_that_does_not_fit_ahead_are_not_in_the_way(
    machine: Machine, in_use: list[int], blocks: int
) -> None:
    machine.blocks = blocks
    window = entries(*([np.arange(SMALL), np.arange(SMALL + 1)] for _ in range(2)))
    first, second = placer_on(machine).place(window)
    assert in_use == [2]  # of the first batch
    machine.finish()
    assert (first.tolist(), second.tolist(), begun(window)) == ([*range(SMALL)], [*range(SMALL + 1)], [0])


def test_an_error_that_is_not_the_memorys_is_not_tried_again(machine: Machine) -> None:
    refusing = Refusing()
    with pytest.raises(ValueError, match="cannot be pinned"):
        placer_on(machine).place(entries(refusing))
    assert (refusing.tries, machine.caches_emptied) == (1, 0)


def test_a_device_that_stays_full_is_tried_twice_for_each_batch(machine: Machine) -> None:
    machine.blocks = 0
    with pytest.raises(torch.OutOfMemoryError):
        placer_on(machine).place(entries(np.arange(4)))
    assert machine.caches_emptied == 1


# -- errors of earlier work -----------------------------------------------------------------------------------


def notes(error: BaseException) -> str:
    return "\n".join(notes_of(error))


LATE = [RuntimeError("CUDA error: device-side assert triggered"), RuntimeError("HIP error: invalid device function")]
if hasattr(torch, "AcceleratorError"):
    LATE.append(torch.AcceleratorError("an illegal memory access was encountered"))


@pytest.mark.costly(2)
@pytest.mark.parametrize("error", LATE, ids=repr)
@pytest.mark.parametrize("where", ["copy", "wait"])
def test_an_error_of_an_earlier_kernel_is_not_blamed_on_the_batch(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, error: RuntimeError, where: str
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=pool) as loader:
        batches = iter(loader)
        next(batches)
        machine.finish()
        with monkeypatch.context() as patch:
            patch.setattr(*{"copy": (SimulatedStreams, "copy"), "wait": (Stream, "wait_event")}[where], fail)
            # What was begun before is handed out still.
            with pytest.raises(type(error)) as caught:
                for _ in range(4):
                    next(batches)
    text = notes(caught.value)
    assert "the cause may be an earlier kernel" in text
    assert text.count("CUDA_LAUNCH_BLOCKING=1") == 1
    assert "raised while the batch was copied" not in text
    assert "loader.read(" not in text  # no sample is the cause
    assert "epoch 0, batch" in text  # when it was noticed


@pytest.mark.parametrize("pool", ["inline", "thread"], indirect=True)
def test_an_error_that_comes_up_when_memory_is_pinned_is_not_blamed_on_the_batch_either(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool
) -> None:
    def fail(*arguments: Any) -> None:
        raise LATE[0]

    monkeypatch.setattr(SimulatedStreams, "pinned_bytes", fail)
    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=pool) as loader:
        with pytest.raises(RuntimeError, match="CUDA error") as caught:
            next(iter(loader))
    assert "the cause may be an earlier kernel" in notes(caught.value)
    assert "loader.read(" not in notes(caught.value)


def test_a_batch_that_cannot_be_made_a_tensor_is_no_error_of_the_device(machine: Machine) -> None:
    masked = np.ma.masked_array([1, 2], [True, False])
    with pytest.raises(BatchifyError, match="masked") as caught:
        place_now(Placer([machine.devices[0]], pin_memory=False), [masked])
    assert notes(caught.value) == ""


# -- graph captures -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [False, True])
def test_next_inside_a_graph_capture_is_rejected_and_loses_nothing(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, pool: Pool, resident: bool
) -> None:
    monkeypatch.setattr(accelerator, "capture_probe", {"privateuseone": lambda: capturing}.get)
    with ShardedDataLoader(DATA, 4, device=Placement(machine.devices[0], resident=resident), pool=pool) as loader:
        capturing, batches = False, iter(loader)
        seen = [next(batches)]
        capturing, before = True, list(machine.log)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"graph is being captured.*static\.copy_\(next\(batches\)\)"):
                next(batches)
        with pytest.raises(RuntimeError, match="graph is being captured"):
            loader.peek()
        assert machine.log == before  # nothing has been done that could break the capture
        capturing = False
        seen += batches
        machine.finish()
    assert [batch.tolist() for batch in seen] == IN_ORDER


def test_pinning_inside_a_capture_is_rejected_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(accelerator, "capture_probe", {"cuda": lambda: True}.get)
    batches = iter(ShardedDataLoader(DATA, 4, pin_memory=True))
    with pytest.raises(RuntimeError, match="graph is being captured"):
        next(batches)


def test_batches_in_host_memory_may_be_read_inside_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "capture_probe", lambda kind: lambda: True)
    assert next(iter(ShardedDataLoader(DATA, 4))).tolist() == [0, 1, 2, 3]
