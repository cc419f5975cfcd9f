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
from devices_samples import GOOD, Checks, begun, copies_on, entries, place_now, placer_on, streams_on
from simulated import Machine, SimulatedStreams
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from sharded_loader import ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process.pool import ProcessPool

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


class _Ragged(NamedTuple):
    values: Any
    sizes: Any


class Ragged(_Ragged):
    """Like a `PackedSequence`: the sizes belong on the host."""

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


class Fields(list):  # type: ignore[type-arg]
    def to(self, device: Any, non_blocking: bool = False) -> Fields:
        return Fields([sent(self[0]), self[1]])

    values = property(lambda self: self[0])
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
    "a list": lambda values, sizes: Fields([values, sizes]),
    "a graph that records": Recorded,
    "a graph": Graph,
    "an object": Bare,
}
LATE = ("a graph", "an object")
"""Their tensors may be anywhere, so they move on the caller's stream."""


EARLY = [kind for kind in KINDS if kind not in LATE]


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


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a tensor"])
def test_they_move_ahead_if_their_tensors_can_be_found(
    machine: Machine, device: torch.device, kind: str, beside: bool
) -> None:
    """The others move on the stream that they are handed out on."""
    copies, other, checks = copies_on(machine), machine.new_stream(device), Checks(machine)
    pending = copies.begin([make(kind), torch.arange(7)] if beside else make(kind))
    assert moves(machine) == ([] if kind in LATE else [machine.streams[device][-1].name])
    with machine.on(device, other):
        batch = pending.finish()
        checks.compare((batch[0] if beside else batch).values, np.arange(1000))
        del batch, pending
    assert checks.done() == GOOD
    assert (other.name in moves(machine)) == (kind in LATE)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", EARLY)
def test_memory_of_the_copy_stream_is_not_used_again_while_the_caller_reads_it(
    machine: Machine, device: torch.device, kind: str, seed: int
) -> None:
    """A batch is dropped as soon as its work is given to the stream, and the next ones are copied ahead."""
    machine.random.seed(seed)
    copies, checks = copies_on(machine), Checks(machine)
    waiting = [copies.begin([make(kind, torch.full((1000,), number))]) for number in range(2)]
    for number in range(12):
        waiting.append(copies.begin([make(kind, torch.full((1000,), number + 2))]))
        (batch,) = waiting.pop(0).finish()
        for _ in range(3):
            checks.compare(batch.values, number, number)
        del batch
        machine.run(seed)
    del waiting
    assert checks.done() == GOOD


class Hiding(Fields):
    """A container with a tensor that nobody finds in its place."""

    def to(self, device: Any, non_blocking: bool = False) -> Hiding:
        moved = Hiding([sent(self[0]), self[1]])
        moved.hidden = sent(self[0])  # type: ignore[attr-defined]
        return moved

    values = property(lambda self: self.hidden)


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["moved", "through a function"])
@pytest.mark.parametrize("kind", [*KINDS, "a list that hides one"])
def test_another_stream_than_at_the_beginning_may_use_them(
    machine: Machine, device: torch.device, kind: str, transform: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The memory is the copy stream's, and would be used again while that stream reads it."""
    monkeypatch.setitem(KINDS, "a list that hides one", lambda values, sizes: Hiding([values, sizes]))
    copies, other, checks = copies_on(machine), machine.new_stream(device), Checks(machine)
    pending = copies.begin([make(kind)], transform=transform)
    with machine.on(device, other):
        (batch,) = pending.finish()
        checks.compare(batch.values, np.arange(1000))
        del batch, pending
    with machine.on(device, machine.streams[device][-1]):
        for mine in [machine.allocate(device, torch.empty(1000, dtype=torch.int64)) for _ in range(4)]:
            machine.fill(device, mine)
    assert checks.done() == GOOD


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a mapping"])  # that one changes itself
def test_what_they_move_from_is_held_until_it_was_read(machine: Machine, device: torch.device, kind: str) -> None:
    copies = copies_on(machine)
    copies.begin([make(kind)]).finish()
    gc.collect()
    (source,) = STREAMS["from"]
    assert source() is not None
    copies.drain()
    gc.collect()
    assert source() is None


@pytest.mark.parametrize("kind", KINDS)
def test_device_transform_gets_what_they_have_become(machine: Machine, device: torch.device, kind: str) -> None:
    got = []

    def see(batch: Any) -> Any:
        got.append((type(batch[0]).__name__, moves(machine)))
        return batch[0].values

    values = copies_on(machine).begin([make(kind)], transform=see).finish()
    machine.finish()
    assert got == [(type(KINDS[kind](0, 0)).__name__, [machine.streams[device][1].name])]
    assert values.sum() == 499500


class Sparse(Fields):
    """A container with a tensor that torch cannot record."""

    def to(self, device: Any, non_blocking: bool = False) -> Sparse:
        STREAMS["log"].append(("to", STREAMS["device"].caller_stream().name))
        return Sparse(self)


def test_what_cannot_be_recorded_moves_when_it_is_handed_out(machine: Machine, device: torch.device) -> None:
    pending = copies_on(machine).begin([Sparse([torch.eye(3).to_sparse()]), torch.arange(7)])
    assert moves(machine) == []
    pending.finish()
    assert moves(machine) == [machine.streams[device][0].name]


def containers(samples: list[Any]) -> Any:
    values = torch.from_numpy(np.stack(samples))
    return {"own": Encoding(values=values, sizes=values.clone())}


@pytest.mark.slow
def test_the_host_copies_them_once(
    machine: Machine, device: torch.device, process_pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the slot, into pinned memory that torch guards wherever a copy begins."""
    pinned, pin, checks = [], SimulatedStreams.pin, Checks(machine)

    def noted(streams: SimulatedStreams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        pinned.append(host.nbytes)
        return pin(streams, host, stride)

    monkeypatch.setattr(SimulatedStreams, "pin", noted)
    with ShardedDataLoader(rows(160), 4, batchify_fn=containers, device=device, pool=process_pool) as loader:
        for number, batch in enumerate(loader):
            if number == 12:  # the first ones came through the pipe: nobody knew how large they are
                pinned.clear()
            own, expected = batch["own"], 4 * number + np.arange(4)[:, None]
            checks.compare(own.values, expected, number)
            # The user copies a part of what has stayed on the host, and drops it at once.
            part = own.sizes[1:]
            assert (part.numpy() == expected[1:]).all() and not machine.holds(part.data_ptr(), 1)
            checks.compare(sent(part), expected[1:], number)
            del batch, own, part
            machine.run(number % 5)
        assert (pinned, checks.done()) == ([], GOOD)


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


def test_what_moves_in_inference_mode_can_be_trained_on_after_it(machine: Machine, device: torch.device) -> None:
    pending = copies_on(machine).begin([Bare(torch.ones(3))])
    with torch.inference_mode():
        (moved,) = pending.finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    (weight * moved.values).sum().backward()
    assert weight.grad is not None


class Asked(_Ragged):
    """It says whether it was pinned when it was asked to move."""

    def to(self, device: Any, non_blocking: bool = False) -> bool:
        return bool(STREAMS["device"].is_pinned(self.values))


def test_the_tensors_of_a_container_are_pinned_before_it_moves_itself(machine: Machine, device: torch.device) -> None:
    """Then its ``to(non_blocking=True)`` does not wait."""
    assert copies_on(machine).begin([Asked(torch.arange(1000), None)]).finish() == [True]


class Same(_Ragged):
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

    def to(self, device: Any, non_blocking: bool = False) -> Any:
        return self


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
    copies.begin([])
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


def bare(samples: list[Any]) -> Any:
    return Bare(torch.from_numpy(np.stack(samples)))


def test_without_memory_for_what_moves_itself_there_is_made_room(
    machine: Machine, device: torch.device, worker_pool: Pool
) -> None:
    machine.blocks = 2  # one in the consumer's hands, and one more
    with ShardedDataLoader(rows(48), 4, batchify_fn=bare, device=device, pool=worker_pool) as loader:
        for number, batch in enumerate(loader):
            machine.finish()
            assert batch.values[:, 0].tolist() == [4.0 * number + i for i in range(4)]


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


# -- pin_memory ---------------------------------------------------------------------------------------------------


class Pinning(_Ragged):
    def pin_memory(self) -> Pinning:
        return Pinning(self.values.pin_memory(), self.sizes)


@pytest.fixture
def pinner(monkeypatch: pytest.MonkeyPatch) -> Placer:
    """It pins in this thread, by a function that copies, and has no memory for ten numbers."""

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise RuntimeError("only dense CPU tensors can be pinned")
        if tensor.is_nested or tensor.numel() == 10:
            raise RuntimeError("CUDA error: out of memory")
        return tensor.clone()

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    return Placer(None, pin_memory=True, in_background=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pin_memory_asks_containers_that_pin_themselves_and_leaves_what_torch_cannot_pin(pinner: Placer) -> None:
    values, sizes, sparse = torch.ones(3), torch.ones(2), torch.eye(3).to_sparse()
    own, kind, left = place_now(pinner, [Pinning(values, sizes), torch.Tensor, sparse])
    assert (type(own), kind) == (Pinning, torch.Tensor)
    assert own.sizes is sizes and own.values is not values and left is sparse
    nested = torch.nested.nested_tensor([torch.ones(2)])
    assert place_now(pinner, [nested])[0] is nested


def test_pin_memory_without_host_memory_leaves_batches_as_they_are(pinner: Placer) -> None:
    tensor = torch.ones(10)
    with pytest.warns(UserWarning, match="could not be pinned .*out of memory"):
        assert place_now(pinner, [tensor])[0] is tensor
