"""Objects with a ``to`` of their own move themselves: ahead if their tensors can be found, otherwise at the end."""

from __future__ import annotations

import collections
import gc
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import covering
from devices_samples import GOOD, Checks, begun, copies_on, entries, place_now, placer_on, streams_on
from simulated import Machine
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from sharded_loader import ShardedDataLoader
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool

WIDTH = 4096
"""Numbers per sample: a batch of four is larger than what goes through the pipe."""

STREAMS: dict[str, Any] = {}
"""The device's streams, its log, and what was moved from, for the objects below: they travel and cannot hold them."""


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device, by the current stream, as ``tensor.to(device, non_blocking=True)`` makes it."""
    streams = STREAMS["device"]
    moved = streams.empty_like(tensor)
    STREAMS["log"].append(("to", streams.caller_stream().name))
    STREAMS["from"].append(weakref.ref(tensor))
    streams.copy(moved, tensor if streams.is_pinned(tensor) else streams.pin(tensor, tensor.stride()))
    return moved


def moves(machine: Machine) -> list[str]:
    """The streams that objects have moved on."""
    return [stream for what, stream in machine.log if what == "to"]


class Ragged(NamedTuple):
    """Like a `PackedSequence`: the sizes belong on the host."""

    values: Any
    sizes: Any

    def to(self, device: Any, non_blocking: bool = False) -> Ragged:
        return Ragged(sent(self.values), self.sizes)


@dataclass
class Record:
    values: Any
    sizes: Any

    def to(self, device: Any, non_blocking: bool = False) -> Record:
        return Record(sent(self.values), self.sizes)


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's: it changes itself."""

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        self.data["values"] = sent(self.data["values"])
        return self

    @property
    def values(self) -> Any:  # type: ignore[override]
        return self.data["values"]

    @property
    def sizes(self) -> Any:
        return self.data["sizes"]


class Hiding(list):  # type: ignore[type-arg]
    """A container with a tensor that nobody finds in its place."""

    def to(self, device: Any, non_blocking: bool = False) -> Hiding:
        moved = Hiding([sent(self[0]), self[1]])
        moved.hidden = sent(self[0])  # type: ignore[attr-defined]
        return moved

    values = property(lambda self: self.hidden)
    sizes = property(lambda self: self[1])


class Bare:
    """An object that only moves, and knows of nothing else."""

    def __init__(self, values: Any, sizes: Any = None) -> None:
        self.values, self.sizes = values, sizes

    def to(self, device: Any) -> Any:
        return type(self)(sent(self.values), self.sizes)


class Graph(Bare):
    """Like a batch of PyG: an object that pins and moves itself, and leaves something on the host."""

    def pin_memory(self) -> Any:
        return type(self)(STREAMS["device"].pin(self.values, self.values.stride()), self.sizes)

    def to(self, device: Any, *args: Any, non_blocking: bool = False) -> Any:
        return super().to(device)


class Recorded(Graph):
    """Like a batch of PyG now: it also says which stream uses it."""

    def record_stream(self, stream: Any) -> None:
        STREAMS["device"].record_use([self.values], stream)


class Stubborn(Bare):
    def to(self, device: Any) -> Any:
        raise ValueError("I stay here")


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "a namedtuple": Ragged,
    "a dataclass": Record,
    "a mapping": lambda values, sizes: Encoding(values=values, sizes=sizes),
    "a list that hides one": lambda values, sizes: Hiding([values, sizes]),
    "a graph that records": Recorded,
    "a graph": Graph,
    "an object": Bare,
}
LATE = ("a graph", "an object")
"""Their tensors may be anywhere, so they move on the caller's stream."""


@pytest.fixture
def device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    for name, value in {"device": streams_on(machine), "log": machine.log, "from": []}.items():
        monkeypatch.setitem(STREAMS, name, value)
    return machine.devices[0]


def make(kind: str, values: torch.Tensor | None = None) -> Any:
    return KINDS[kind](torch.arange(1000) if values is None else values, torch.zeros(1))


def batchify(samples: list[Any]) -> Any:
    made = {}
    for kind, make in KINDS.items():
        values = torch.from_numpy(np.stack(samples))
        made[kind] = make(values, values.clone())
    return [{"x": torch.from_numpy(np.stack(samples)), "own": made}]


def rows(count: int) -> list[Any]:
    return [np.full(WIDTH, i, np.float32) for i in range(count)]


@pytest.mark.costly
def test_they_move_as_they_know_how_from_memory_that_is_no_pinned_slot(
    machine: Machine, device: torch.device, pool: Pool
) -> None:
    checks = Checks(machine)
    with ShardedDataLoader(rows(96), 4, batchify_fn=batchify, device=device, pool=pool) as loader:
        for number, (batch,) in enumerate(loader):
            expected = 4 * number + np.arange(4)[:, None]
            for kind, moved in batch["own"].items():
                assert type(moved).__name__ == type(KINDS[kind](0, 0)).__name__
                # What stays on the host may be copied by the user at any time.
                assert not machine.holds(moved.sizes.data_ptr(), 1) and (moved.sizes.numpy() == expected).all()
                checks.compare(moved.values, expected, (number, kind))
            checks.compare(batch["x"], expected, (number, "x"))
            del batch, moved
            machine.run(number % 5)
        assert checks.done() == GOOD


@covering(2, kind=KINDS, how=["alone", "beside a tensor", "through a function"])
def test_they_move_ahead_if_their_tensors_can_be_found_and_another_stream_may_use_them(
    machine: Machine, device: torch.device, kind: str, how: str
) -> None:
    """The memory is the copy stream's, and would be used again while the other stream reads it.

    Other objects move on the stream that they are handed out on, if there is no function that needs them.
    """
    copies, other, checks, seen = copies_on(machine), machine.new_stream(device), Checks(machine), list[str]()

    def see(batch: Any) -> Any:
        assert moves(machine) and set(moves(machine)) == {machine.streams[device][-1].name}
        seen.append(type(batch[0]).__name__)
        return batch

    is_late, transform = kind in LATE, None
    if how == "through a function":
        is_late, transform = False, see
    batch = [make(kind), torch.arange(7)] if how == "beside a tensor" else [make(kind)]
    pending = copies.begin(batch, transform=transform)
    machine.run(0)  # the thread has enqueued it
    assert set(moves(machine)) == (set() if is_late else {machine.streams[device][-1].name})
    with machine.on(device, other):
        batch = pending.finish()
        checks.compare(batch[0].values, np.arange(1000))
        del batch, pending
    assert (other.name in moves(machine)) == is_late
    with machine.on(device, machine.streams[device][-1]):
        for mine in [machine.allocate(device, torch.empty(1000, dtype=torch.int64)) for _ in range(4)]:
            machine.fill(device, mine)
    assert checks.done() == GOOD
    assert seen == ([] if transform is None else [type(KINDS[kind](0, 0)).__name__])


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", ["a namedtuple", "a dataclass", "a graph that records", *LATE])
def test_what_they_move_from_is_held_until_it_was_read(machine: Machine, device: torch.device, kind: str) -> None:
    copies = copies_on(machine)
    copies.begin([make(kind)]).finish()
    gc.collect()
    (source,) = STREAMS["from"]
    assert source() is not None
    copies.drain()
    gc.collect()
    assert source() is None


class Sparse(Hiding):
    """A container with a tensor that torch cannot record."""

    def to(self, device: Any, non_blocking: bool = False) -> Sparse:
        STREAMS["log"].append(("to", STREAMS["device"].caller_stream().name))
        return Sparse(self)


def test_what_cannot_be_recorded_moves_when_it_is_handed_out(machine: Machine, device: torch.device) -> None:
    pending = copies_on(machine).begin([Sparse([torch.eye(3).to_sparse()]), torch.arange(7)])
    assert moves(machine) == []
    pending.finish()
    assert moves(machine) == [machine.streams[device][0].name]


def test_a_batch_has_moved_once_when_it_is_finished_again_and_not_at_all_before(
    machine: Machine, device: torch.device
) -> None:
    """It is finished again when there was no memory for another shard of its batch."""
    copies, checks = copies_on(machine), Checks(machine)
    copies.begin([make("an object")])
    pending = copies.begin([make("an object")])
    assert moves(machine) == []
    (first,), (again,) = pending.finish(), pending.finish()
    checks.compare(again.values, np.arange(1000))
    assert checks.done() == GOOD
    assert (again is first, len(moves(machine))) == (True, 1)


class Tail:
    """An object over the end of a pinned buffer. Torch does not know which buffer a copy from it reads."""

    moved: torch.Tensor | None = None

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def pin_memory(self) -> Tail:
        pinned = STREAMS["device"].pin(self.values, (1,))
        return Tail(torch.from_numpy(pinned.numpy()[8:]))

    def to(self, device: Any, non_blocking: bool = False) -> str:
        Tail.moved = sent(self.values)
        return "moved"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fails", [False, True], ids=["all move", "another one cannot"])
def test_memory_that_torch_does_not_guard_is_not_used_again_before_it_was_read(
    machine: Machine, device: torch.device, fails: bool, seed: int
) -> None:
    machine.random.seed(seed)
    streams, copies = STREAMS["device"], copies_on(machine)
    batch = [torch.arange(7), Tail(torch.arange(1000)), *([Stubborn(None)] if fails else [])]
    if fails:
        with pytest.raises(ValueError, match="I stay here"):
            copies.begin(batch).finish()
    else:
        copies.begin(batch).finish()
    del batch
    gc.collect()
    while machine.run(1):
        copies.begin([])  # lets go of what was read
        with streams.current():
            streams.pin(torch.zeros(1000, dtype=torch.int64), (1,))
    assert Tail.moved is not None
    assert Tail.moved.tolist() == list(range(8, 1000))


@pytest.mark.parametrize("batch", [torch.ones(3), Bare(torch.ones(3))], ids=["copied", "moves itself"])
def test_what_arrives_in_inference_mode_can_be_trained_on_after_it(
    machine: Machine, device: torch.device, batch: Any
) -> None:
    with torch.inference_mode():
        (moved,) = copies_on(machine).begin([batch]).finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    (weight * (moved.values if isinstance(batch, Bare) else moved)).sum().backward()
    assert weight.grad is not None


class Asked(Ragged):
    """It says whether it was pinned when it was asked to move."""

    def to(self, device: Any, non_blocking: bool = False) -> bool:
        return bool(STREAMS["device"].is_pinned(self.values))


def test_the_tensors_of_a_container_are_pinned_before_it_moves_itself(machine: Machine, device: torch.device) -> None:
    """Then its ``to(non_blocking=True)`` does not wait."""
    assert copies_on(machine).begin([Asked(torch.arange(1000), None)]).finish() == [True]


class Same(Ragged):
    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return self.values


@dataclass
class Uncopied:
    """A container of the user's that cannot be built again: it has no copies."""

    values: Any

    def __copy__(self) -> Uncopied:
        raise TypeError("there is only one")

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return self


class Locked(Mapping):  # type: ignore[type-arg]
    """Another one: it is not made from a dictionary."""

    def __init__(self, name: str, values: Any) -> None:
        self.held = {name: values}

    __getitem__ = property(lambda self: self.held.__getitem__)  # type: ignore[assignment]
    __iter__ = property(lambda self: self.held.__iter__)  # type: ignore[assignment]
    __len__ = property(lambda self: self.held.__len__)  # type: ignore[assignment]
    to = Uncopied.to


def test_what_need_not_or_cannot_be_moved_or_built_again_stays_what_it_is(
    machine: Machine, device: torch.device
) -> None:
    resting, graded = Stubborn(None), torch.ones(3, requires_grad=True)
    resting.device = device  # type: ignore[attr-defined]
    for own in (resting, Uncopied(torch.arange(9)), Locked("a", torch.arange(9))):
        assert copies_on(machine).begin([own]).finish()[0] is own
    assert copies_on(machine).begin([Same(graded, torch.ones(1))]).finish()[0] is graded


def test_their_memory_is_let_go_when_a_later_batch_is_begun(machine: Machine, device: torch.device) -> None:
    copies = copies_on(machine)
    for _ in range(3 * HOST_AHEAD):  # the device does nothing until the host has to wait for it
        copies.begin([make("a namedtuple")]).finish()
        gc.collect()
        assert len(machine.pinned) <= 3 * HOST_AHEAD
    machine.finish()
    copies.begin([make("a namedtuple")]).finish()
    gc.collect()
    assert len(machine.pinned) <= 2
    copies.drain()
    gc.collect()
    assert len(machine.pinned) == 0


def test_what_is_copied_ahead_gives_way_to_what_moves_itself(machine: Machine, device: torch.device) -> None:
    machine.blocks = 3  # of the batch and of the two behind it; none for the object in it
    window = entries(*([torch.full((9,), seq), Bare(torch.full((9,), seq))] for seq in range(3)))
    first, own = placer_on(machine).place(window)
    machine.finish()
    assert (first.tolist(), own.values.tolist(), begun(window)) == ([0] * 9, [0] * 9, [0, 1])


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host() -> None:
    """On the meta device, which goes the way of all devices without streams."""
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]), enforce_sorted=False)
    placed = Placer([torch.device("meta")], pin_memory=False)
    for moved in (place_now(placed, packed), place_now(placed, [{"a": (packed, torch.ones(2))}])[0]["a"][0]):
        assert type(moved) is PackedSequence
        assert (moved.data.device.type, moved.batch_sizes.device.type) == ("meta", "cpu")
        assert moved.sorted_indices is not None and moved.sorted_indices.device.type == "meta"


class Edge(NamedTuple):
    start: Any
    to: Any


@dataclass
class Letter:
    to: Any
    text: Any


@pytest.mark.parametrize(
    "batch", [Edge(np.arange(3), np.arange(4)), {"start": np.arange(3), "to": np.arange(4)}, Letter(np.arange(4), "hi")]
)
def test_a_field_called_to_is_a_field(machine: Machine, device: torch.device, batch: Any) -> None:
    moved = place_now(placer_on(machine), batch)
    machine.finish()
    assert type(moved) is type(batch)
    assert (moved["to"] if isinstance(moved, dict) else moved.to).tolist() == [0, 1, 2, 3]
    assert moves(machine) == []


def refuses_the_second(samples: list[Any]) -> Any:
    first = torch.tensor(samples[0][0])
    return (Stubborn if first == 4 else Bare)(torch.from_numpy(np.stack(samples)), first)


def test_what_they_raise_is_their_batchs_error_and_says_where(
    machine: Machine, device: torch.device, pool: Pool
) -> None:
    with ShardedDataLoader(rows(12), 4, batchify_fn=refuses_the_second, device=device, pool=pool) as loader:
        batches = iter(loader)
        assert next(batches).sizes.item() == 0
        with pytest.raises(ValueError, match="I stay here") as caught:
            next(batches)
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        assert "raised while the batch was copied to privateuseone:0" in notes
        assert "epoch 0, batch 1" in notes
        assert next(batches).sizes.item() == 8
