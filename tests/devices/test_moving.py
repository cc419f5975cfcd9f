"""Objects with a ``to`` of their own move themselves: ahead if their tensors can be found, otherwise at the end."""

from __future__ import annotations

import collections.abc
import ctypes
import functools
import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from devices_samples import place_now
from simulated import Machine, SimulatedStreams
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from sharded_loader import ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import HOST_AHEAD, CopyStream
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process.pool import ProcessPool

WIDTH = 4096
"""Numbers per sample: a batch of four is larger than what goes through the pipe."""

STREAMS: dict[str, SimulatedStreams] = {}
"""The device's, for the objects below, which travel between processes and cannot hold them."""


def sent(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the device, by the current stream, as ``tensor.to(device, non_blocking=True)`` makes it."""
    streams = STREAMS["device"]
    moved = streams.empty_like(tensor)
    STREAMS["log"].append(("to", streams.caller_stream().name))  # type: ignore[attr-defined]
    streams.copy(moved, tensor if streams.is_pinned(tensor) else streams.pin(tensor, tensor.stride()))
    return moved


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


class Graph:
    """Like a batch of PyG: an object that pins and moves itself, and leaves something on the host."""

    def __init__(self, values: Any, sizes: Any) -> None:
        self.values = values
        self.sizes = sizes

    def pin_memory(self) -> Graph:
        streams = STREAMS["device"]
        return Graph(streams.pin(self.values, self.values.stride()), self.sizes)

    def to(self, device: Any, *args: Any, non_blocking: bool = False) -> Graph:
        return Graph(sent(self.values), self.sizes)


class Recorded(Graph):
    """Like a batch of PyG now: it also says which stream uses it."""

    def pin_memory(self) -> Recorded:
        streams = STREAMS["device"]
        return Recorded(streams.pin(self.values, self.values.stride()), self.sizes)

    def to(self, device: Any, *args: Any, non_blocking: bool = False) -> Recorded:
        return Recorded(sent(self.values), self.sizes)

    def record_stream(self, stream: Any) -> None:
        STREAMS["device"].record_use([self.values], stream)


class Bare:
    """An object that only moves, and knows of nothing else."""

    def __init__(self, values: Any, sizes: Any) -> None:
        self.values = values
        self.sizes = sizes

    def to(self, device: Any) -> Bare:
        return Bare(sent(self.values), self.sizes)


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


@pytest.fixture
def device(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setitem(STREAMS, "device", SimulatedStreams(machine, machine.devices[0]))
    monkeypatch.setitem(STREAMS, "log", machine.log)  # type: ignore[arg-type]
    return machine.devices[0]


def batchify(samples: list[Any]) -> Any:
    made = {}
    for kind, make in KINDS.items():
        values = torch.from_numpy(np.stack(samples))
        made[kind] = make(values, values.clone())
    return [{"x": torch.from_numpy(np.stack(samples)), "own": made}]


@pytest.mark.costly
def test_they_move_as_they_know_how_from_memory_that_is_no_pinned_slot(
    machine: Machine, device: torch.device, pool: Pool
) -> None:
    data = [np.full(WIDTH, i, np.float32) for i in range(96)]
    wrong: list[Any] = []
    with ShardedDataLoader(data, 4, batchify_fn=batchify, device=device, pool=pool) as loader:
        for number, (batch,) in enumerate(loader):
            expected = [4.0 * number + i for i in range(4)]
            for kind, moved in batch["own"].items():
                assert type(moved).__name__ == type(KINDS[kind](0, 0)).__name__
                # What stays on the host may be copied by the user at any time.
                if machine.holds(moved.sizes.data_ptr(), 1) or moved.sizes[:, 0].tolist() != expected:
                    wrong.append((number, kind))
                machine.kernel(device, moved.values, _compare(expected, wrong, (number, kind)))
            machine.kernel(device, batch["x"], _compare(expected, wrong, (number, "x")))
            del batch, moved
            machine.run(number % 5)
        machine.finish()
    assert (wrong, machine.faults) == ([], [])


def _compare(expected: list[float], wrong: list[Any], label: Any) -> Callable[[np.ndarray], None]:
    return lambda found: None if found[:, -1].tolist() == expected else wrong.append(label)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside a tensor"])
def test_they_move_ahead_if_their_tensors_can_be_found(
    machine: Machine, device: torch.device, kind: str, beside: bool
) -> None:
    """The others move on the stream that they are handed out on."""
    copies, other, found = CopyStream(STREAMS["device"]), machine.new_stream(device), []
    own = KINDS[kind](torch.arange(1000), torch.zeros(1))
    pending = copies.begin([own, torch.arange(7)] if beside else own)
    moved = [stream for what, stream in machine.log if what == "to"]
    assert moved == ([] if kind in LATE else [copies._stream.name])
    with machine.on(device, other):
        batch = pending.finish()
        machine.kernel(device, (batch[0] if beside else batch).values, lambda values: found.append(int(values.sum())))
        del batch, pending, own
    machine.finish()
    assert (("to", other.name) in machine.log) == (kind in LATE)
    assert (found, machine.faults) == ([499500], [])
    copies.drain()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in LATE])
def test_memory_of_the_copy_stream_is_not_used_again_while_the_caller_reads_it(
    machine: Machine, device: torch.device, kind: str, seed: int
) -> None:
    """A batch is dropped as soon as its work is given to the stream, and the next ones are copied ahead."""
    machine._random.seed(seed)
    copies, wrong = CopyStream(STREAMS["device"]), []
    waiting = [copies.begin([KINDS[kind](torch.full((1000,), number), torch.zeros(1))]) for number in range(2)]
    for number in range(12):
        waiting.append(copies.begin([KINDS[kind](torch.full((1000,), number + 2), torch.zeros(1))]))
        (batch,) = waiting.pop(0).finish()
        for _ in range(3):
            machine.kernel(
                device,
                batch.values,
                lambda found, number=number: None if (found == number).all() else wrong.append(number),
            )
        del batch
        machine.run(seed)
    del waiting
    machine.finish()
    assert (wrong, machine.faults) == ([], [])
    copies.drain()


@pytest.mark.parametrize("transform", [None, lambda batch: batch], ids=["moved", "through a function"])
@pytest.mark.parametrize("kind", KINDS)
def test_another_stream_than_at_the_beginning_may_use_them(
    machine: Machine, device: torch.device, kind: str, transform: Any
) -> None:
    """The memory is the copy stream's, and would be used again while that stream reads it."""
    copies, other, found = CopyStream(STREAMS["device"]), machine.new_stream(device), []
    pending = copies.begin([KINDS[kind](torch.arange(1000), torch.zeros(1))], transform=transform)
    with machine.on(device, other):
        (batch,) = pending.finish()
        machine.kernel(device, batch.values, lambda values: found.append(int(values.sum())))
        del batch, pending
    stream = copies._stream or machine.stream(device)
    with machine.on(device, stream):
        mine = [machine.allocate(device, torch.empty(1000, dtype=torch.int64)) for _ in range(4)]
        for address in [one.data_ptr() for one in mine]:
            stream.give(functools.partial(ctypes.memset, address, 0, 8000))
    machine.finish()
    assert (found, machine.faults) == ([499500], [])
    copies.drain()


@pytest.mark.costly(3)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "a mapping"])  # that one changes itself
def test_what_they_move_from_is_held_until_it_was_read(
    machine: Machine, device: torch.device, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, moved_from = CopyStream._stage, []

    def noted(copies: CopyStream, leaf: Any) -> Any:
        staged = stage(copies, leaf)
        moved_from.append(weakref.ref(staged.values))
        return staged

    monkeypatch.setattr(CopyStream, "_stage", noted)
    copies = CopyStream(STREAMS["device"])
    copies.begin([KINDS[kind](torch.arange(1000), torch.zeros(1))]).finish()
    gc.collect()
    assert moved_from[0]() is not None
    machine.finish()
    copies.drain()
    gc.collect()
    assert moved_from[0]() is None


@pytest.mark.parametrize("kind", KINDS)
def test_device_transform_gets_what_they_have_become(machine: Machine, device: torch.device, kind: str) -> None:
    copies, got = CopyStream(STREAMS["device"]), []

    def see(batch: Any) -> Any:
        got.append((type(batch[0]).__name__, [stream for what, stream in machine.log if what == "to"]))
        return batch[0].values

    values = copies.begin([KINDS[kind](torch.arange(1000), torch.zeros(1))], transform=see).finish()
    machine.finish()
    assert got == [(type(KINDS[kind](0, 0)).__name__, [copies._stream.name])]
    assert values.sum() == 499500
    copies.drain()


class Sparse(Fields):
    """A container with a tensor that torch cannot record."""

    def to(self, device: Any, non_blocking: bool = False) -> Sparse:
        STREAMS["log"].append(("to", STREAMS["device"].caller_stream().name))  # type: ignore[attr-defined]
        return Sparse(self)


def test_what_cannot_be_recorded_moves_when_it_is_handed_out(machine: Machine, device: torch.device) -> None:
    copies = CopyStream(STREAMS["device"])
    pending = copies.begin([Sparse([torch.eye(3).to_sparse()]), torch.arange(7)])
    assert not any(what == "to" for what, _ in machine.log)
    pending.finish()
    assert ("to", machine.streams[device][0].name) in machine.log
    copies.drain()


def test_a_tensor_that_hides_in_a_container_is_recorded_too(machine: Machine, device: torch.device) -> None:
    class Hiding(Fields):
        def to(self, device: Any, non_blocking: bool = False) -> Hiding:
            moved = Hiding([sent(self[0])])
            moved.hidden = sent(self[0])  # type: ignore[attr-defined]
            return moved

    copies, other, found = CopyStream(STREAMS["device"]), machine.new_stream(device), []
    pending = copies.begin([Hiding([torch.arange(1000)])])
    with machine.on(device, other):
        (batch,) = pending.finish()
        machine.kernel(device, batch.hidden, lambda values: found.append(int(values.sum())))
        del batch, pending
    with machine.on(device, copies._stream):
        mine = machine.allocate(device, torch.empty(1000, dtype=torch.int64))
        address = mine.data_ptr()
        copies._stream.give(lambda: ctypes.memset(address, 0, 8000))
    machine.finish()
    assert (found, machine.faults) == ([499500], [])
    copies.drain()


def containers(samples: list[Any]) -> Any:
    values = torch.from_numpy(np.stack(samples))
    return {"own": Encoding(values=values, sizes=values.clone())}


@pytest.mark.slow
def test_the_host_copies_them_once(
    machine: Machine, device: torch.device, process_pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the slot, into pinned memory that torch guards wherever a copy begins."""
    pinned, pin, found = [], SimulatedStreams.pin, []

    def noted(streams: SimulatedStreams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        pinned.append(host.nbytes)
        return pin(streams, host, stride)

    monkeypatch.setattr(SimulatedStreams, "pin", noted)
    data = [np.full(WIDTH, i, np.float32) for i in range(160)]
    with ShardedDataLoader(data, 4, batchify_fn=containers, device=device, pool=process_pool) as loader:
        for number, batch in enumerate(loader):
            if number == 12:  # the first ones came through the pipe: nobody knew how large they are
                pinned.clear()
            own, expected = batch["own"], [4.0 * number + i for i in range(4)]
            machine.kernel(device, own.values, _compare(expected, found, number))
            # The user copies a part of what has stayed on the host, and drops it at once.
            part = own.sizes[1:]
            assert part[:, 0].tolist() == expected[1:] and not machine.holds(part.data_ptr(), 1)
            machine.kernel(device, sent(part), _compare(expected[1:], found, number))
            del batch, own, part
            machine.run(number % 5)
        machine.finish()
    assert (pinned, found, machine.faults) == ([], [], [])


def test_a_batch_that_is_never_handed_out_moves_nothing(machine: Machine, device: torch.device) -> None:
    copies = CopyStream(STREAMS["device"])
    copies.begin([Bare(torch.arange(1000), torch.zeros(1))])
    assert not any(what == "to" for what, _ in machine.log)


def test_a_batch_that_is_finished_again_has_moved_once(machine: Machine, device: torch.device) -> None:
    """As when there was no memory for another shard of its batch."""
    copies = CopyStream(STREAMS["device"])
    pending = copies.begin([Bare(torch.arange(1000), torch.zeros(1))])
    (first,) = pending.finish()
    (again,) = pending.finish()
    found: list[int] = []
    machine.kernel(device, again.values, lambda values: found.append(int(values.sum())))
    machine.finish()
    assert (again is first, found, len(copies._moved)) == (True, [499500], 1)
    assert sum(what == "to" for what, _ in machine.log) == 1


def test_their_memory_is_kept_until_their_copies_are_done(machine: Machine, device: torch.device) -> None:
    """As torch guards only copies from where a buffer begins."""
    copies = CopyStream(STREAMS["device"])
    for kind, kept in ((Ragged, copies.kept), (Bare, copies._moved)):
        (moved,) = copies.begin([kind(torch.arange(1000), torch.zeros(1))]).finish()
        assert len(kept) == 1
        copies.drain()
        assert (len(kept), int(moved.values.sum())) == (0, 499500)


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
    machine._random.seed(seed)
    streams, copies = STREAMS["device"], CopyStream(STREAMS["device"])
    batch = [torch.arange(7), Tail(torch.arange(1000)), *([Stubborn(None, None)] if fails else [])]
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
    copies.drain()


def test_what_moves_in_inference_mode_can_be_trained_on_after_it(machine: Machine, device: torch.device) -> None:
    copies = CopyStream(STREAMS["device"])
    pending = copies.begin([Bare(torch.ones(3), None)])
    with torch.inference_mode():
        (moved,) = pending.finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    (weight * moved.values).sum().backward()
    assert weight.grad is not None
    copies.drain()


def test_what_is_on_its_device_is_not_asked_to_move(machine: Machine, device: torch.device) -> None:
    resting = Stubborn(None, None)
    resting.device = device  # type: ignore[attr-defined]
    assert CopyStream(STREAMS["device"]).begin([resting]).finish()[0] is resting


class Asked(_Ragged):
    """It says whether it was pinned when it was asked to move."""

    def to(self, device: Any, non_blocking: bool = False) -> bool:
        return bool(STREAMS["device"].is_pinned(self.values))


def test_the_tensors_of_a_container_are_pinned_before_it_moves_itself(machine: Machine, device: torch.device) -> None:
    """Then its ``to(non_blocking=True)`` does not wait."""
    copies = CopyStream(STREAMS["device"])
    assert copies.begin([Asked(torch.arange(1000), None)]).finish() == [True]
    copies.drain()


def test_a_tensor_with_a_gradient_in_a_container_is_left_alone(machine: Machine, device: torch.device) -> None:
    class Same(_Ragged):
        def to(self, device: Any, non_blocking: bool = False) -> Any:
            return self.values

    values = torch.ones(3, requires_grad=True)
    assert CopyStream(STREAMS["device"]).begin([Same(values, torch.ones(1))]).finish()[0] is values


@dataclass
class Uncopied:
    """A container of the user's that cannot be built again: it has no copies."""

    values: Any

    def __copy__(self) -> Uncopied:
        raise TypeError("there is only one")

    def to(self, device: Any, non_blocking: bool = False) -> Uncopied:
        return self


class Locked(collections.abc.Mapping):  # type: ignore[type-arg]
    """Another one: it is not made from a dictionary."""

    def __init__(self, name: str, values: Any) -> None:
        self.held = {name: values}

    def __getitem__(self, name: str) -> Any:
        return self.held[name]

    def __iter__(self) -> Any:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def to(self, device: Any, non_blocking: bool = False) -> Locked:
        return self


@pytest.mark.parametrize("own", [Uncopied(torch.arange(9)), Locked("a", torch.arange(9))], ids=["copy", "constructor"])
def test_a_container_that_cannot_be_built_again_moves_as_it_is(
    machine: Machine, device: torch.device, own: Any
) -> None:
    copies = CopyStream(STREAMS["device"])
    assert copies.begin([own]).finish()[0] is own
    copies.drain()


def test_their_memory_is_let_go_when_a_later_batch_is_begun(machine: Machine, device: torch.device) -> None:
    copies = CopyStream(STREAMS["device"])
    for _ in range(3 * HOST_AHEAD):  # the device does nothing until the host has to wait for it
        copies.begin([Ragged(torch.arange(1000), torch.zeros(1))]).finish()
        assert len(copies._moved) <= HOST_AHEAD
    machine.finish()
    copies.begin([torch.zeros(1)])
    assert len(copies._moved) == 0


def test_what_is_copied_ahead_gives_way_to_what_moves_itself(machine: Machine, device: torch.device) -> None:
    machine.blocks = 3  # of the batch and of the two behind it; none for the object in it
    placed, window = Placer([device], pin_memory=False), []
    for seq in range(3):
        batch = [torch.full((9,), seq), Bare(torch.full((9,), seq), None)]
        window.append(Entry(seq, Task(0, seq, 0, seq, ([seq],), False), Result(0, seq, batch)))
    first, own = placed.place(window)
    machine.finish()
    assert (first.tolist(), own.values.tolist()) == ([0] * 9, [0] * 9)
    assert [entry.begun is not None for entry in window] == [True, True, False]


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host() -> None:
    """On the meta device, which goes the way of all devices without streams."""
    packed = pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2]), enforce_sorted=False)
    placed = Placer([torch.device("meta")], pin_memory=False)
    for tree, find in (
        (packed, lambda batch: batch),
        ([{"a": (packed, torch.ones(2))}], lambda batch: batch[0]["a"][0]),
    ):
        moved = find(place_now(placed, tree))
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
    placed = Placer([device], pin_memory=False)
    moved = place_now(placed, batch)
    machine.finish()
    assert type(moved) is type(batch)
    assert (moved["to"] if isinstance(moved, dict) else moved.to).tolist() == [0, 1, 2, 3]
    assert not any(what == "to" for what, _ in machine.log)


def test_without_memory_for_what_moves_itself_there_is_made_room(
    machine: Machine, device: torch.device, worker_pool: Pool
) -> None:
    machine.blocks = 2  # one in the consumer's hands, and one more
    data = [np.full(WIDTH, i, np.float32) for i in range(48)]

    def batchify(samples: list[Any]) -> Any:
        return Bare(torch.from_numpy(np.stack(samples)), torch.zeros(1))

    with ShardedDataLoader(data, 4, batchify_fn=batchify, device=device, pool=worker_pool) as loader:
        for number, batch in enumerate(loader):
            machine.finish()
            assert batch.values[:, 0].tolist() == [4.0 * number + i for i in range(4)]


def test_what_they_raise_is_their_batchs_error_and_says_where(
    machine: Machine, device: torch.device, pool: Pool
) -> None:
    data = [np.full(WIDTH, i, np.float32) for i in range(12)]
    with ShardedDataLoader(data, 4, batchify_fn=_refuses_the_second, device=device, pool=pool) as loader:
        batches = iter(loader)
        assert next(batches).sizes.item() == 0
        with pytest.raises(ValueError, match="I stay here") as caught:
            next(batches)
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        assert "raised while the batch was copied to privateuseone:0" in notes
        assert "epoch 0, batch 1" in notes
        assert next(batches).sizes.item() == 8


class Stubborn(Bare):
    def to(self, device: Any) -> Bare:
        raise ValueError("I stay here")


def _refuses_the_second(samples: list[Any]) -> Any:
    first = torch.tensor(samples[0][0])
    return (Stubborn if first == 4 else Bare)(torch.from_numpy(np.stack(samples)), first)


def test_pin_memory_asks_containers_that_pin_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self.clone())
    placed, log = Placer(None, pin_memory=True, in_background=False), []

    class Pinning(_Ragged):
        def pin_memory(self) -> Pinning:
            log.append("asked")
            return Pinning(self.values.pin_memory(), self.sizes)

    sizes = torch.ones(2)
    batch = place_now(placed, [Pinning(torch.ones(3), sizes), torch.Tensor])
    assert (log, type(batch[0]), batch[1]) == (["asked"], Pinning, torch.Tensor)
    assert batch[0].sizes is sizes


def test_pin_memory_leaves_what_torch_cannot_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.layout is not torch.strided:
            raise RuntimeError("only dense CPU tensors can be pinned")
        return tensor.clone()

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    placed, sparse = Placer(None, pin_memory=True, in_background=False), torch.eye(3).to_sparse()
    batch = place_now(placed, [sparse, torch.ones(3)])
    assert batch[0] is sparse


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_pin_memory_without_host_memory_leaves_batches_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    def pin(tensor: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    placed, nested = Placer(None, True, in_background=False), torch.nested.nested_tensor([torch.ones(2)])
    assert place_now(placed, [nested])[0] is nested  # torch pins no nested tensor
    tensor = torch.ones(3)
    with pytest.warns(UserWarning, match="could not be pinned .*out of memory"):
        assert place_now(placed, [tensor])[0] is tensor
