"""What a batch goes through on its device: ahead, with numbers that depend on nothing but its place in the run."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from devices_samples import GOOD, Checks, copies_on, place_now, streams_on
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader
from sharded_loader.base.errors import notes_of
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.devices.placement import Placer
from sharded_loader.devices.transform import BatchTransform
from sharded_loader.engine.pool import Pool

WIDTH = 1000


ROWS = ArrayDataset(x=np.arange(48).repeat(WIDTH).reshape(48, WIDTH), name=np.arange(48))
"""Row i is full of i."""


def moving(machine: Machine, size: int, function: Any = None, data: Any = ROWS, **options: Any) -> ShardedDataLoader:
    """A loader of the first device, with a function."""
    return made(data, size, device=machine.devices[0], device_transform=function, **options)


def on_host(function: Any, size: int = 4, **options: Any) -> ShardedDataLoader:
    return made(ROWS, size, device_transform=function, **options)


class Late:
    """A function of the user's whose work the device does when it gets to it: twice the values, plus a random number.

    It allocates what it returns, and something in between, as torch's functions do.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.asked = machine, 0
        self.where: list[str] = []

    def __call__(self, batch: Any, rng: Any) -> Any:
        self.asked += 1
        added = int(rng.integers(1 << 30))
        twice = self.work(batch["x"], lambda values: values * 2)
        return {"x": self.work(twice, lambda values: values + added), "name": batch["name"], "added": added}

    def work(self, tensor: torch.Tensor, fn: Callable[[Any], Any]) -> torch.Tensor:
        machine = self.machine
        (device,) = machine.devices[:1]
        made = streams_on(machine).empty_like(torch.empty(tensor.shape, dtype=tensor.dtype))
        source, target, nbytes = tensor.data_ptr(), made.data_ptr(), tensor.nbytes

        def happen() -> None:
            values = fn(np.frombuffer(ctypes.string_at(source, nbytes), np.int64))
            ctypes.memmove(target, values.ctypes.data, nbytes)

        self.where.append(machine.stream(device).name)
        machine.stream(device).give(happen)
        return made


def noisy(batch: Any, rng: Any) -> Any:
    return batch["x"][:, 0] * 2, rng.integers(1 << 30, size=3).tolist()


def drawn(loader: ShardedDataLoader[Any], epochs: int = 1) -> list[Any]:
    """The random numbers of each batch."""
    return [numbers for _ in range(epochs) for _, numbers in loader]


# -- on a device -------------------------------------------------------------------------------------------------------


@pytest.mark.costly(4)
@pytest.mark.parametrize("seed", range(2))
def test_it_runs_behind_the_copy_and_before_the_program(machine: Machine, pool: Pool, seed: int) -> None:
    """Batches are dropped as soon as their work is given to the stream. Memory that is used too early is seen."""
    machine.random.seed(seed)
    checks, late = Checks(machine), Late(machine)
    with moving(machine, 4, late, seed=3, pool=pool) as loader:
        for epoch in range(2):
            for number, batch in enumerate(loader):
                expected = (np.arange(4 * number, 4 * number + 4) * 2 + batch["added"])[:, None]
                for _ in range(3):
                    checks.compare(batch["x"], expected, (epoch, number))
                del batch
                machine.run((number * 7 + seed) % 9)
        assert checks.done() == GOOD
    assert set(late.where) == {machine.streams[machine.devices[0]][1].name}  # the copy stream


def test_the_memory_is_bounded_however_far_the_host_is_ahead(machine: Machine) -> None:
    with moving(machine, 4, Late(machine)) as loader:
        for _ in range(6):
            for batch in loader:
                machine.kernel(machine.devices[0], batch["x"], lambda found: None)
                del batch
        # Of each batch under way: the copy, what lies between, the result. And one batch that the program holds.
        assert machine.peak <= 3 * (HOST_AHEAD + loader.device_prefetch + 1)
        machine.finish()


@pytest.mark.parametrize("seed", range(8))
def test_what_it_is_made_of_is_not_used_again_before_it_was_read(machine: Machine, seed: int) -> None:
    """The copy's memory is the caller's, whose stream knows nothing of a function on another one."""
    machine.random.seed(seed)
    device, late, rng = machine.devices[0], Late(machine), np.random.default_rng(0)
    batch = {"x": np.arange(WIDTH), "name": "text"}
    pending = copies_on(machine).begin(batch, transform=lambda given: late(given, rng))
    for mine in [machine.allocate(device, torch.empty(WIDTH, dtype=torch.int64)) for _ in range(3)]:
        machine.fill(device, mine)
    machine.finish()
    result = pending.finish()
    machine.finish()
    assert result["x"].tolist() == [2 * value + result["added"] for value in range(WIDTH)]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", ["jagged", "sparse", "nested"])
def test_it_may_return_a_jagged_tensor_and_none_that_torch_cannot_guard(machine: Machine, kind: str) -> None:
    result = {
        "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "sparse": lambda: {"x": torch.eye(3).to_sparse()},
        "nested": lambda: {"x": torch.nested.nested_tensor([torch.eye(3)])},
    }[kind]
    with moving(machine, 48, lambda batch: result()) as loader:
        if kind == "jagged":
            assert [batch.size(0) for batch in loader] == [2]
        else:
            message = "device_transform has returned a sparse or nested tensor.*return dense"
            with pytest.raises(TypeError, match=message):
                next(iter(loader))
        machine.finish()


def test_a_device_without_memory_is_tried_again(machine: Machine) -> None:
    late, refused = Late(machine), []

    def full(batch: Any, rng: Any) -> Any:
        if not refused:
            refused.append(1)
            raise torch.OutOfMemoryError("simulated")
        return late(batch, rng)

    with moving(machine, 4, full) as loader:
        assert len(list(loader)) == 12
        machine.finish()
    assert machine.caches_emptied >= 1


@pytest.mark.parametrize("share", [True, False])
def test_resident_rows_go_through_it_too(machine: Machine, share: bool) -> None:
    with moving(machine, 8, noisy, seed=5, resident=share) as loader:
        assert drawn(loader) == drawn(on_host(noisy, 8, seed=5))
        machine.finish()


def test_a_device_without_streams_runs_it_at_once() -> None:
    transform = BatchTransform(lambda batch: ("seen", batch["x"].device.type), False, (), lambda: 0)
    placement = Placer([torch.device("meta")], pin_memory=False, transform=transform)
    assert place_now(placement, {"x": np.ones(3)}) == ("seen", "meta")


# -- the same numbers everywhere ---------------------------------------------------------------------------------------


def test_the_numbers_are_the_same_in_every_pool_on_every_device_and_after_a_resume(
    machine: Machine, pool: Pool
) -> None:
    options: dict[str, Any] = {"shuffle": True, "device_transform": noisy}
    whole = made(ROWS, 8, seed=7, **options)
    expected, state = drawn(whole, 2), {**whole.state_dict(), "epoch": 1, "samples": 16}
    assert len(set(map(tuple, expected))) == 12  # others in each batch and epoch
    with made(ROWS, 8, seed=7, pool=pool, device=machine.devices[0], **options) as loader:
        assert drawn(loader, 2) == expected
        machine.finish()
    other_seed = made(ROWS, 8, seed=8, **options)
    assert not {tuple(numbers) for numbers in drawn(other_seed, 2)} & set(map(tuple, expected))
    other_seed.load_state_dict(state)  # which brings the seed
    assert drawn(other_seed) == expected[8:]


def test_shards_and_ranks_have_numbers_of_their_own(machine: Machine) -> None:
    with made(ROWS, 8, seed=1, devices=machine.devices, device_transform=noisy) as loader:
        shards = [numbers for shards in loader for _, numbers in shards]
        machine.finish()
    ranks = [numbers for rank in range(3) for numbers in drawn(on_host(noisy, num_replicas=3, rank=rank, seed=1))]
    assert len(set(map(tuple, shards))) == len(set(map(tuple, ranks))) == 12


def lines(part: int, parts: int) -> Iterator[dict[str, Any]]:
    return ({"x": np.full(3, index)} for index in range(part, 48, parts))


@pytest.mark.slow
def test_iterable_data_goes_through_it(pool: Pool) -> None:
    options: dict[str, Any] = {"streams": 2, "seed": 7, "device_transform": noisy}
    expected = drawn(made(lines, 8, **options))
    with made(lines, 8, pool=pool, **options) as loader:
        batches = iter(loader)
        got = [next(batches)[1] for _ in range(3)]
        state = loader.state_dict()
        del batches
        loader.load_state_dict(state)
        assert got + drawn(loader) == expected
    assert len(set(map(tuple, expected))) == 6


def test_it_runs_without_devices_and_on_shards_in_host_memory(pool: Pool) -> None:
    with on_host(noisy, 8, pool=pool, num_shards=2) as loader:
        for number, shards in enumerate(loader):
            values = [first.tolist() for first, _ in shards]
            assert values == [[2 * (8 * number + 4 * shard + place) for place in range(4)] for shard in range(2)]


class Module(torch.nn.Module):
    def forward(self, batch: Any, rng: Any) -> Any:
        return 3, rng.integers(100)


def scaled(batch: Any, scale: int = 3, rng: Any = None) -> Any:
    return scale, rng.integers(100)


def keyword(batch: Any, *, rng: Any) -> Any:
    return 3, rng.integers(100)


def test_a_generator_is_given_to_who_asks_for_it_by_name_and_takes_the_place_of_no_other_argument() -> None:
    for asks, scale in ((scaled, 3), (functools.partial(scaled, scale=5), 5), (keyword, 3), (Module(), 3)):
        found, number = next(iter(on_host(asks)))
        assert found == scale and number in range(100)
    for alone in (lambda batch: batch["x"], lambda batch, size=3: batch["x"], torch.nn.Identity()):
        batch = next(iter(on_host(alone)))
        assert torch.equal(batch["x"] if isinstance(batch, dict) else batch, torch.arange(4).repeat(WIDTH, 1).T)


def test_an_iterator_that_has_begun_keeps_its_numbers_when_a_state_is_loaded(machine: Machine) -> None:
    other = ShardedDataLoader(ROWS, 8, seed=8).state_dict()
    for options in ({}, {"device": machine.devices[0]}):
        with made(ROWS, 8, seed=7, device_transform=noisy, **options) as loader:
            expected = drawn(loader)
            machine.finish()
        with made(ROWS, 8, seed=7, device_transform=noisy, **options) as loader:
            batches = iter(loader)
            got = [next(batches)[1]]
            loader.load_state_dict(other)
            assert got + [numbers for _, numbers in batches] == expected
            machine.finish()


def test_peek_is_the_first_batch() -> None:
    loader = on_host(noisy, seed=1)
    assert loader.peek()[1] == next(iter(loader))[1]


def test_how_the_program_calls_next_changes_nothing(machine: Machine) -> None:
    """A batch of a call in inference mode may be changed and trained on."""
    weight = torch.ones(1, requires_grad=True)

    def in_place(batch: Any) -> Any:
        batch["name"] += 1
        return {**batch, "product": batch["name"] * weight, "grad": torch.is_grad_enabled()}

    for options in ({}, {"device": machine.devices[0]}):
        with made(ROWS, 8, host_fields="name", device_transform=in_place, **options) as loader:
            batches = iter(loader)
            found = [next(batches)]
            with torch.inference_mode():
                found.append(next(batches))
            machine.finish()
            for number, batch in enumerate(found):
                assert batch["name"].tolist() == list(range(8 * number + 1, 8 * number + 9))
                assert not (batch["grad"] or batch["product"].requires_grad)
                assert not any(batch[name].is_inference() for name in ("x", "name", "product"))
            del batches


# -- errors ------------------------------------------------------------------------------------------------------------


def test_its_error_says_where(machine: Machine, pool: Pool) -> None:
    def fails(batch: Any) -> Any:
        if batch["name"][0] == 16:
            raise ValueError("these do not please me")
        return batch["name"].tolist()

    options: dict[str, Any] = {"device_transform": fails}
    if pool.num_workers:
        options["device"] = machine.devices[0]
    # On the simulated device the values are there when it has done its work: these lie on the host.
    options["host_fields"] = "name"
    with made(ROWS, 8, pool=pool, **options) as loader:
        batches = iter(loader)
        assert next(batches) == list(range(8)) and next(batches) == list(range(8, 16))
        with pytest.raises(ValueError, match="these do not please me") as caught:
            next(batches)
        text = "\n".join(notes_of(caught.value))
        assert "raised by device_transform" in text and "in epoch 0, batch 2" in text
        assert "while the batch was copied" not in text
        assert "loader.read(i, epoch=0) for i in (16," in text
        assert next(batches) == list(range(24, 32))
        del batches, caught
        machine.finish()


def test_an_async_function_is_rejected() -> None:
    async def later(batch: Any) -> Any:
        return batch

    with pytest.raises(TypeError, match="device_transform is async: it gives coroutine objects"):
        next(iter(on_host(later)))


def test_an_interruption_loses_no_batch(machine: Machine) -> None:
    asked = itertools.count()

    def interrupted(batch: Any, rng: Any) -> Any:
        found = noisy(batch, rng)
        if next(asked) == 3:
            raise KeyboardInterrupt
        return found

    options: dict[str, Any] = {"seed": 2, "device": machine.devices[0]}
    with made(ROWS, 8, device_transform=interrupted, **options) as loader:
        batches, got = iter(loader), []
        while len(got) < 6:
            with contextlib.suppress(KeyboardInterrupt):
                got.append(next(batches)[1])
        del batches
        machine.finish()
    with made(ROWS, 8, device_transform=noisy, **options) as loader:
        assert got == drawn(loader)
        machine.finish()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"device_transform": 3}, TypeError, "device_transform is 3; it must be a function of a batch"),
        ({"device_transform": len, "pin_memory": True}, ValueError, "device_transform is for batches on devices: give"),
        ({"host_fields": "x", "pin_memory": True}, ValueError, "host_fields is for batches on devices: give device"),
        ({"host_fields": [1.5]}, TypeError, "host_fields has 1.5; it must have names of fields, or numbers"),
        ({"host_fields": [True]}, TypeError, "host_fields has True"),
        ({"host_fields": b"x"}, TypeError, "host_fields has b'x'; it must have names of fields, or numbers"),
        ({"host_fields": "x", "resident": True, "device": "cpu"}, ValueError, "host_fields keeps .* leave out one"),
    ],
)
def test_wrong_arguments_are_rejected(options: Any, error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        made(ROWS, 4, **options)


# -- fields that stay on the host --------------------------------------------------------------------------------------

Pair = collections.namedtuple("Pair", "x name")


def fields(samples: list[Any]) -> tuple[Any, Any]:
    return torch.from_numpy(np.stack([one["x"] for one in samples])), torch.tensor(
        [one["name"] for one in samples] * 100
    )


@pytest.mark.costly(2)
@pytest.mark.parametrize(
    ("batchify", "field"),
    [
        (lambda samples: dict(zip(("x", "name"), fields(samples), strict=True)), "name"),
        (fields, 1),
        (lambda samples: list(fields(samples)), 1),
        (lambda samples: Pair(*fields(samples)), "name"),
        (lambda samples: {"x": fields(samples)[0], "name": list(fields(samples)[1].split(8))}, ["name"]),
    ],
    ids=["dict", "tuple", "list", "named tuple", "a list of tensors"],
)
def test_host_fields_stay_on_the_host(machine: Machine, pool: Pool, batchify: Any, field: Any) -> None:
    checks = Checks(machine)
    with moving(machine, 8, host_fields=field, collate_fn=batchify, pool=pool) as loader:
        for number, batch in enumerate(loader):
            x, names = batch.values() if isinstance(batch, dict) else batch
            expected = np.arange(8 * number, 8 * number + 8)
            for name in names if isinstance(names, list) else [names]:
                # The values are there now, in memory that the user may copy from at any time.
                assert name[:8].tolist() == expected.tolist()
                assert not machine.is_pinned(name)
            checks.compare(x, expected[:, None])
        assert checks.done() == GOOD


@dataclasses.dataclass
class Item:
    """Moves itself, and asks all of its values to move, as some versions of transformers do."""

    x: Any
    name: Any

    def to(self, device: Any, non_blocking: bool = False) -> Item:
        return Item(moved(self.x), moved(self.name))


def moved(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.to("device")


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("fn", [None, lambda batch: batch], ids=["no function", "function"])
def test_host_fields_of_a_container_that_moves_itself_are_values(machine: Machine, on_device: bool, fn: Any) -> None:
    def batchify(samples: list[Any]) -> Any:
        return Item(*fields(samples))

    options: dict[str, Any] = {"device": machine.devices[0]} if on_device else {}
    with made(ROWS, 8, collate_fn=batchify, host_fields="name", device_transform=fn, **options) as loader:
        for number, batch in enumerate(loader):
            assert type(batch) is Item and batch.name[:8].tolist() == list(range(8 * number, 8 * number + 8))
        machine.finish()


@pytest.mark.parametrize("fn", [None, lambda batch: batch], ids=["no function", "function"])
def test_a_host_field_may_be_sparse(machine: Machine, monkeypatch: pytest.MonkeyPatch, fn: Any) -> None:
    monkeypatch.setattr(SimulatedStreams, "holds", lambda streams, tensor: tensor.layout is torch.strided)

    def batchify(samples: list[Any]) -> Any:
        return {"x": torch.ones(3), "graph": torch.eye(3).to_sparse()}

    with moving(machine, 8, fn, collate_fn=batchify, host_fields="graph") as loader:
        assert next(iter(loader))["graph"].is_sparse
        machine.finish()


def test_beside_a_host_field_a_sparse_tensor_moves_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the caller's stream, because it cannot be recorded there. Nobody has given a function to blame."""
    streams, moves = [], torch.Tensor.to

    def move(tensor: Any, device: Any, **named: Any) -> Any:
        if tensor.is_sparse and device == machine.devices[0]:
            streams.append(machine.stream(device).name)
            return tensor
        return moves(tensor, device, **named)

    monkeypatch.setattr(torch.Tensor, "to", move)

    def batchify(samples: list[Any]) -> Any:
        return {"name": torch.ones(3), "graph": torch.eye(3).to_sparse()}

    with moving(machine, 24, collate_fn=batchify, host_fields="name") as loader:
        assert [batch["graph"].is_sparse for batch in loader] == [True, True]
        machine.finish()
    assert streams == [machine.streams[machine.devices[0]][0].name] * 2


def test_a_field_that_a_batch_does_not_have_is_named() -> None:
    with pytest.raises(TypeError, match="host_fields has 'jpeg', and the batch is a dict with the fields 'x', 'name'"):
        next(iter(ShardedDataLoader(ROWS, 4, device=Placement(host_fields=["jpeg", "x"]))))
    with pytest.raises(TypeError, match="host_fields has 2, and the batch is a ndarray without fields"):
        next(iter(ShardedDataLoader(range(9), 4, device=Placement(host_fields=2))))


# -- for other streams -------------------------------------------------------------------------------------------------


def test_ready_event_lets_another_stream_use_a_batch(machine: Machine) -> None:
    device, other, found = machine.devices[0], machine.new_stream(machine.devices[0]), []
    with moving(machine, 8) as loader:
        assert loader.ready_event is None
        for batch in loader:
            with streams_on(machine).current():
                other.wait_event(loader.ready_event)
            with machine.on(device, other):
                machine.kernel(device, batch["x"], lambda values: found.append(int(values[0, 0])))
            streams_on(machine).record_use([batch["x"]], other)
            del batch
        machine.finish()
    assert found == list(range(0, 48, 8))


@pytest.mark.parametrize("kind", ["shards", "resident", "moved late", "host"])
def test_there_is_an_event_for_each_shard(machine: Machine, kind: str) -> None:
    devices, moves = machine.devices, SimpleNamespace(to=lambda device, non_blocking: "moved")
    options: dict[str, Any] = {
        "shards": {"devices": devices},
        "resident": {"devices": devices, "resident": True},
        "moved late": {"devices": devices, "collate_fn": lambda samples: [moves]},
        "host": {"num_shards": 2},
    }[kind]
    with made(ArrayDataset(np.arange(8)), 4, **options) as loader:
        shards = next(iter(loader))
        events = loader.ready_event
        if kind == "host":
            assert events is None
        else:
            assert [event.device for event in events] == devices and len(shards) == 2
            machine.finish()
            with streams_on(machine).current():
                assert events[0].query()


def test_peek_leaves_the_event_as_it_is_and_it_does_not_hold_the_batch(machine: Machine) -> None:
    with moving(machine, 8) as loader:
        loader.peek()
        assert loader.ready_event is None
        batches = iter(loader)
        batch = next(batches)
        held, event = weakref.ref(batch["x"]), loader.ready_event
        del batch
        gc.collect()
        assert held() is None and event is not None
        loader.peek()
        assert loader.ready_event is event
        del batches
        machine.finish()
