"""One copy stream by itself: what it keeps and for how long, what it waits for, and how it is closed."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import HostClock, until
from devices_samples import copies_on
from simulated import Event, Machine, SimulatedStreams, Stream

from sharded_loader.devices import copies as module
from sharded_loader.devices.copies import HOST_AHEAD, CopyStream


@pytest.fixture
def copies(machine: Machine) -> Iterator[CopyStream]:
    yield copies_on(machine)
    module.STILL_READ.clear()
    gc.collect()


def begin_one(copies: CopyStream) -> Any:
    return copies.begin([torch.arange(9)])


def give_up(copies: CopyStream) -> None:
    """Close it while the device hangs."""
    with pytest.warns(UserWarning, match="has not done its copies"):
        assert not copies.close(0.01)


class Moving:
    """An object that pins itself, and moves nothing: what counts is its pinned memory."""

    def __init__(self, streams: SimulatedStreams, values: torch.Tensor) -> None:
        self.streams, self.values = streams, values

    def pin_memory(self) -> Moving:
        return Moving(self.streams, self.streams.pin(self.values, (1,)))

    def to(self, device: Any, non_blocking: bool) -> str:
        return "moved"


# -- begin and finish -----------------------------------------------------------------------------------------


def test_a_batch_without_tensors_asks_nothing_of_the_device(machine: Machine, copies: CopyStream) -> None:
    assert copies.begin(["text", 3]).finish() == ["text", 3]
    assert (machine.log, len(machine.streams[machine.devices[0]])) == ([], 1)


TENSORS: dict[str, Callable[[], tuple[torch.Tensor, bool]]] = {
    "plain": lambda: (torch.ones(2), True),
    "elsewhere": lambda: (torch.ones(2, device="meta"), False),
    "sparse": lambda: (torch.eye(2).to_sparse(), False),
    "nested": lambda: (torch.nested.nested_tensor([torch.ones(2)]), False),
    "quantized": lambda: (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8), False),
    "with a gradient": lambda: (torch.ones(2, requires_grad=True), False),
    "of a class": lambda: (torch.nn.Parameter(torch.ones(2), requires_grad=False), False),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")  # torch says of some kinds that it is going to drop them
def test_tensors_that_are_more_than_their_values_move_themselves(kind: str) -> None:
    tensor, is_plain = TENSORS[kind]()
    assert module._is_plain(tensor) is is_plain


def test_a_batch_whose_handing_out_is_interrupted_keeps_its_memory(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(stream: Stream, event: Event) -> None:
        raise KeyboardInterrupt

    pending = copies.begin([torch.arange(1000)])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Stream, "wait_event", interrupted)
        pending.finish()
    del pending
    gc.collect()
    mine = machine.allocate(machine.devices[0], torch.empty(1000, dtype=torch.int64)).zero_()
    machine.finish()
    assert mine.sum() == 0


def test_some_copies_are_begun_before_the_host_waits_for_the_first(machine: Machine, copies: CopyStream) -> None:
    for _ in range(HOST_AHEAD):
        begin_one(copies)
    assert machine.blocked == 0
    begin_one(copies)
    assert machine.blocked > 0


@pytest.mark.parametrize("broken", [False, True])
def test_what_an_interrupted_begin_has_given_to_the_device_goes_when_it_was_read_or_the_context_breaks(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SimulatedStreams, "copy", interrupted)
        begin_one(copies)
    gc.collect()
    assert len(machine.pinned) == 1
    machine.has_failed = broken
    assert copies.close()
    gc.collect()
    assert len(copies.in_use) == 0 and (broken or len(machine.pinned) == 0)
    machine.has_failed = False
    module.LOST.clear()


# -- the end --------------------------------------------------------------------------------------------------


def test_a_signal_handler_may_close_the_loader_while_the_host_waits(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_one(copies)
    rest, signals = SimulatedStreams.rest, [signal.SIGINT]

    def interrupting(streams: SimulatedStreams, seconds: float) -> None:
        if signals:
            signal.raise_signal(signals.pop())
        else:
            rest(streams, seconds)

    def handler(number: int, frame: object) -> None:
        assert copies.close()

    monkeypatch.setattr(SimulatedStreams, "rest", interrupting)
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert copies.drain()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(copies.in_use), signals) == (0, [])


@pytest.fixture
def hanging(machine: Machine, host_time: HostClock) -> Iterator[None]:
    """The device does nothing until the test ends. Time passes while the host waits for it."""
    machine.hangs, machine.pass_time = True, host_time.move
    yield
    machine.hangs = False


def test_a_thread_that_waits_for_a_hanging_device_does_not_keep_another_from_closing(
    machine: Machine, copies: CopyStream, hanging: None
) -> None:
    for _ in range(HOST_AHEAD):
        begin_one(copies).finish()
    inside = threading.Thread(target=lambda: begin_one(copies))
    inside.start()
    assert until(lambda: machine.blocked)
    give_up(copies)
    machine.hangs = False
    inside.join()


def test_what_a_hanging_device_reads_stays_and_nobody_waits_for_it_any_more(
    machine: Machine, copies: CopyStream, hanging: None
) -> None:
    for _ in range(HOST_AHEAD):
        copies.begin([torch.arange(9), Moving(copies.streams, torch.arange(9))]).finish()  # type: ignore[arg-type]
    count = len(machine.pinned)
    give_up(copies)
    gc.collect()
    assert len(machine.pinned) == count == 2 * HOST_AHEAD
    # A thread that is in `next` at this moment.
    late = threading.Thread(target=lambda: begin_one(copies).finish(), daemon=True)
    late.start()
    late.join(60.0)
    assert not late.is_alive()


def test_who_gave_up_waiting_only_looks_again(
    copies: CopyStream, hanging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_one(copies).finish()
    give_up(copies)

    def rest(streams: SimulatedStreams, seconds: float) -> None:
        raise AssertionError("waited again")

    monkeypatch.setattr(SimulatedStreams, "rest", rest)
    assert not copies.close(60.0)


def test_what_was_left_alone_is_given_back_when_any_loader_is_closed_and_waited_for_again(
    machine: Machine, copies: CopyStream, hanging: None
) -> None:
    begin_one(copies).finish()
    assert not copies.drain(0.01)
    give_up(copies)
    assert copies in module.STILL_READ and len(copies.in_use) == 1
    machine.hangs = False
    machine.finish()
    assert copies_on(machine).close()
    assert (module.STILL_READ, len(copies.in_use)) == (set(), 0)
    for _ in range(3 * HOST_AHEAD):
        begin_one(copies).finish()
        assert len(copies.in_use) <= HOST_AHEAD


def test_at_the_programs_end_the_memory_is_left_to_the_driver(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_one(copies).finish()
    monkeypatch.setattr(module, "program_ends", lambda: True)
    assert not copies.close()  # without a warning
    gc.collect()
    assert (machine.blocked, len(machine.pinned)) == (0, 1)


@pytest.mark.parametrize("closes", [False, True])
def test_who_waits_for_copies_waits_for_one_that_another_thread_begins(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    copy, begun, goes_on = SimulatedStreams.copy, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait()
        return copy(*arguments)

    monkeypatch.setattr(SimulatedStreams, "copy", slow)
    if closes:  # and leaves the memory alone
        monkeypatch.setattr(module, "program_ends", lambda: True)
    wait = copies.close if closes else copies.drain
    threads = [threading.Thread(target=copies.begin, args=([torch.arange(9)],)), threading.Thread(target=wait)]
    threads[0].start()
    assert begun.wait(60.0)
    threads[1].start()
    threads[1].join(0.1)
    goes_on.set()
    for thread in threads:
        thread.join()
    assert (len(copies.in_use), len(module.STILL_READ), machine.faults) == (int(closes), int(closes), [])
