"""Nothing of it in your thread: a thread begins copies and runs ``device_transform``, on a device that works late."""

from __future__ import annotations

import collections
import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import let_workers_finish, made
from devices_samples import GOOD, Checks, copied
from simulated import Event, Machine, SimulatedStreams, Stream

from sharded_loader import ArrayDataset, ThreadPool
from sharded_loader.devices.background import Background, Later
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool

ROWS = ArrayDataset(np.arange(48, dtype=np.float32).repeat(1000).reshape(48, 1000))
"""Row i is full of i."""


def rows_of(number: int) -> np.ndarray:
    """The values of a batch."""
    return np.arange(4 * number, 4 * number + 4, dtype=np.float32).repeat(1000).reshape(4, 1000)


def loader_on(machine: Machine, transform: Callable[..., Any] | None, **options: Any) -> Any:
    return made(ROWS, 4, device=machine.devices[0], device_transform=transform, **options)


# -- the thread by itself ----------------------------------------------------------------------------------------------


def test_calls_are_made_in_order_and_an_error_belongs_to_its_call() -> None:
    background, done = Background("copies"), list[int]()
    later = [background.submit(functools.partial(done.append, 1)), background.submit(lambda: 1 // 0)]
    later.append(background.submit(lambda: threading.current_thread().name))
    assert later[2].wait() == "copies" and later[0].wait() is None and done == [1]
    with pytest.raises(ZeroDivisionError):
        later[1].wait()
    assert background.close()


def test_a_new_thread_is_prepared_once_and_a_failure_to_do_so_is_an_error_of_the_call() -> None:
    prepared: list[str] = []

    def prepare() -> None:
        prepared.append(threading.current_thread().name)
        if len(prepared) == 1:
            raise RuntimeError("no context")

    background = Background("copies")
    with pytest.raises(RuntimeError, match="no context"):
        background.submit(lambda: 1, prepare).wait()
    assert [background.submit(lambda: 2, prepare).wait() for _ in range(3)] == [2, 2, 2]
    assert prepared == ["copies"] * 2
    assert background.close()


def test_the_limit_of_threads_is_an_error_of_each_call_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    background = Background("copies")
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="new thread"):
            background.submit(list)
    assert background.close()
    monkeypatch.undo()
    assert background.submit(list).wait() == []
    assert background.close()


def test_a_call_that_does_not_return_is_left_behind_and_another_thread_goes_on() -> None:
    background, go_on = Background("copies"), threading.Event()
    stuck = background.submit(go_on.wait)
    with pytest.raises(TimeoutError):
        stuck.wait(0.0)
    assert not background.wait(0.0) and not background.close(0.0)
    assert background.submit(lambda: "other").wait() == "other"
    go_on.set()
    assert stuck.wait() and background.close()


def test_a_thread_ends_with_its_owner() -> None:
    background = Background("copies")
    thread = background.submit(threading.current_thread).wait()
    del background
    thread.join()


# -- in a loader -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [None, lambda batch: batch * 2], ids=["copies", "a transform"])
def test_the_thread_that_asks_for_batches_does_nothing_but_wait(
    machine: Machine, pool: Pool, monkeypatch: pytest.MonkeyPatch, transform: Any
) -> None:
    """And it never makes the copy stream current."""
    threads: set[str] = set()
    for name in ("copy", "set_stream", "pin", "is_pinned"):
        call = getattr(SimulatedStreams, name)

        def noted(self: Any, *given: Any, call: Any = call) -> Any:
            threads.add(threading.current_thread().name)
            return call(self, *given)

        monkeypatch.setattr(SimulatedStreams, name, noted)
    home = machine.stream(machine.devices[0])
    with loader_on(machine, transform, pool=pool) as loader:
        for batch in loader:
            del batch
            assert machine.stream(machine.devices[0]) is home
            machine.finish()
    assert copied(machine) >= 12  # some are of the next epoch
    assert threads == {"sharded_loader-copies-privateuseone:0"}


def test_where_memory_cannot_be_registered_the_thread_copies_into_pinned_memory(
    machine: Machine, worker_pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pins, pin = set[str](), SimulatedStreams.pin
    monkeypatch.setattr(SimulatedStreams, "runtime", lambda streams: None)
    # Threads would read into pinned memory.
    monkeypatch.setattr(Placer, "empty", lambda placer, shape, dtype: np.empty(shape, dtype))

    def noted(streams: SimulatedStreams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        pins.add(threading.current_thread().name)
        return pin(streams, host, stride)

    monkeypatch.setattr(SimulatedStreams, "pin", noted)
    checks = Checks(machine)
    with loader_on(machine, None, pool=worker_pool) as loader:
        for number, batch in enumerate(loader):
            checks.compare(batch, rows_of(number))
            del batch
            machine.finish()
    assert checks.done() == GOOD
    assert pins == {"sharded_loader-copies-privateuseone:0"}


def test_micro_batches_that_are_asked_for_together_do_not_make_the_host_wait(machine: Machine) -> None:
    """As with gradient accumulation, while the step before is still at work."""
    with loader_on(machine, None) as loader:
        loader.device_prefetch = 10
        batches = iter(loader)
        micro = [next(batches) for _ in range(10)]
        assert machine.blocked == 0
        machine.finish()
        assert [int(batch[0, 0]) for batch in micro] == list(range(0, 40, 4))


def test_their_host_memory_is_bounded_by_bytes(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_loader.devices.copies.HOST_BYTES", 3 * ROWS[:4].nbytes)
    with loader_on(machine, None) as loader:
        loader.device_prefetch = 10
        for _ in loader:
            assert len(machine.pinned) <= HOST_AHEAD + 2
    assert machine.blocked > 0


def test_a_next_makes_few_calls_of_torch(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 15, with the clock events of one batch in eight. What the thread calls is not counted."""
    calls, main = collections.Counter[str](), threading.current_thread()

    def count(kind: Any, name: str) -> None:
        call = getattr(kind, name)

        def counted(*given: Any, **named: Any) -> Any:
            calls[name] += threading.current_thread() is main
            return call(*given, **named)

        monkeypatch.setattr(kind, name, counted)

    for name in ("current", "set_stream", "empty_like", "copy", "is_pinned", "record_use", "timed_event", "pin"):
        count(SimulatedStreams, name)
    for name in ("current_device", "stream"):
        count(Machine, name)
    for name in ("query", "record", "elapsed_time"):
        count(Event, name)
    for name in ("wait_event", "record_event"):
        count(Stream, name)
    rows = ArrayDataset(np.zeros((1600, 10_000), np.float32))
    with made(rows, 16, device=machine.devices[0], num_workers=2, prefetch=4) as loader:
        batches = iter(loader)
        for _ in range(20):
            next(batches)
            machine.finish()
        calls.clear()
        for _ in range(64):
            next(batches)
            called = calls.copy()  # not what follows
            machine.finish()
            calls.clear()
            calls.update(called)
    assert calls.total() <= 15 * 64


def test_a_capture_in_the_default_mode_is_not_broken_by_the_thread(machine: Machine, worker_pool: Pool) -> None:
    """It queries events and pins memory while the program captures a graph right after ``next``."""
    go_on, checks = threading.Event(), Checks(machine)

    def slow(batch: Any) -> Any:
        assert go_on.wait(60)
        return batch

    with loader_on(machine, slow, pool=worker_pool, prefetch=4) as loader:
        go_on.set()
        batches = iter(loader)
        first = next(batches)
        go_on.clear()
        machine.capturing = threading.get_ident(), "global"
        go_on.set()
        for background in machine.backgrounds:
            assert background.wait(60)
        assert not machine.capture_failed
        machine.capturing = 0, ""
        for number, batch in enumerate([first, *batches]):
            checks.compare(batch, rows_of(number))
            machine.finish()
    assert checks.done() == GOOD


def test_without_anything_to_copy_there_is_no_thread(pool: Pool) -> None:
    before = set(threading.enumerate())
    with made(ROWS, 4, device="cpu", pool=pool) as loader:
        for _ in loader:
            assert not any("copies" in thread.name for thread in set(threading.enumerate()) - before)


def test_next_returns_while_the_transform_of_a_later_batch_is_at_work(machine: Machine) -> None:
    go_on, begun, asked = threading.Event(), threading.Semaphore(0), itertools.count()

    def slow(batch: Any) -> Any:
        if next(asked) >= 2:
            begun.release()
            assert go_on.wait(60)
        return batch

    with loader_on(machine, slow, pool=ThreadPool(1), prefetch=4) as loader:
        batches = iter(loader)
        next(batches)
        let_workers_finish(loader, batches)
        next(batches)
        begun.acquire()  # the third batch is at work, and the second is here
        go_on.set()
        assert len(list(batches)) == 10


@pytest.mark.parametrize("sharded", [False, True])
def test_an_error_of_the_transform_is_its_batch_s_and_the_rest_comes(machine: Machine, sharded: bool) -> None:
    asked = collections.Counter[str]()

    def refuse(batch: Any) -> Any:
        asked[threading.current_thread().name] += 1
        if asked[threading.current_thread().name] == 3:
            raise ValueError("no such picture")
        return batch

    where = {"devices": machine.devices} if sharded else {"device": machine.devices[0]}
    with made(ROWS, 4, device_transform=refuse, **where) as loader:
        batches, got = iter(loader), []
        for number in range(12):
            if number == 2:
                with pytest.raises(ValueError, match="no such picture") as raised:
                    next(batches)
                assert any("epoch 0, batch 2" in note for note in raised.value.__notes__)
            else:
                batch = next(batches)
                machine.finish()
                got.append(int(batch[0][0, 0] if sharded else batch[0, 0]))
    assert got == [0, 4, *range(12, 48, 4)]


RESULTS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "its input": (lambda batch: batch, lambda rows: rows),
    "a view": (lambda batch: batch[1:], lambda rows: rows[1:]),
    "nothing": (lambda batch: None, lambda rows: None),
    "a number": (lambda batch: 3, lambda rows: 3),
    "a text": (lambda batch: ["text"], lambda rows: ["text"]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_a_transform_may_return_anything(machine: Machine, pool: Pool, name: str) -> None:
    transform, expected = RESULTS[name]
    checks = Checks(machine)
    with loader_on(machine, transform, pool=pool) as loader:
        for number, batch in enumerate(loader):
            if isinstance(batch, torch.Tensor):
                checks.compare(batch, expected(rows_of(number)))
            else:
                assert batch == expected(None)
            del batch
        machine.finish()
    assert not checks.mismatched


def test_a_transform_that_never_ends_is_an_error_after_the_pool_s_timeout(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, is_made = threading.Event(), Later.is_made

    def never(batch: Any) -> Any:
        return go_on.wait(60) and batch

    # The time is over at once.
    monkeypatch.setattr(Later, "is_made", lambda later, seconds: is_made(later, 0.0 if seconds == 7 else seconds))
    loader = loader_on(machine, never, pool=ThreadPool(1, timeout=7))
    batches = iter(loader)
    for number in range(2):
        with pytest.raises(TimeoutError, match="device_transform has not returned for 7 s") as raised:
            next(batches)
        assert any(f"batch {number}" in note for note in raised.value.__notes__)
    go_on.set()
    machine.finish()
    loader.close()


def test_a_transform_that_finds_the_device_full_is_called_again(machine: Machine, pool: Pool) -> None:
    asked, checks = itertools.count(), Checks(machine)

    def full(batch: Any) -> Any:
        if next(asked) == 2:
            raise torch.OutOfMemoryError
        return batch

    with loader_on(machine, full, pool=pool) as loader:
        for number, batch in enumerate(loader):
            checks.compare(batch, rows_of(number))
            del batch
            machine.finish()
    assert checks.done() == GOOD


def test_modes_of_the_caller_do_not_reach_the_transform(machine: Machine) -> None:
    seen: list[bool] = []

    def look(batch: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu") or torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        return batch

    for where in ("cpu", machine.devices[0]):
        with made(ROWS, 4, device=where, device_transform=look) as loader, torch.autocast("cpu", dtype=torch.bfloat16):
            inside = next(iter(loader))
            assert loader.batch(0, 0).dtype is inside.dtype
        machine.finish()
    assert set(seen) == {False}
