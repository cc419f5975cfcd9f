"""On a GPU, values are intact whatever streams are busy with and however batches are used."""

from __future__ import annotations

import collections
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from on_cuda import PART, PRETENDED, OnCuda, Rows, copies_of, host_values, needs_cuda, sleep
from stress import order_of, rows, stress
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import Subset, TensorDataset

from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader, empty
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.devices.accelerator import address_of
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.codec import ON_HOST
from sharded_loader.ray.cluster import Lent

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(300)]

COUNT, WIDTH, BATCH, STEPS = 1024, 16_384, 32, 2000 // PART  # 2 MB per batch
EPOCHS = max(1, 20 // PART)


def loader_of(**options: Any) -> ShardedDataLoader:
    return made(rows(COUNT, WIDTH), BATCH, shuffle=True, seed=3, **options)


def test_2000_batches_are_intact_under_stress(cuda: torch.device, pool: Pool) -> None:
    with loader_of(device=cuda, pool=pool) as loader:
        seen, differing = stress(OnCuda(cuda, WIDTH), loader, STEPS, seed=4)
    assert seen > 0.7 * STEPS
    assert differing == 0


def test_they_are_on_a_stream_that_the_user_has_chosen(cuda: torch.device, worker_pool: Pool) -> None:
    target = OnCuda(cuda, WIDTH)
    with loader_of(device=cuda, pool=worker_pool) as loader, torch.cuda.stream(torch.cuda.Stream(cuda)):
        _, differing = stress(target, loader, STEPS // 4, seed=5)
    assert differing == 0


@pytest.mark.parametrize("moving", [False, True], ids=["tensors", "objects that move themselves"])
def test_they_are_while_the_stream_changes_from_batch_to_batch(
    cuda: torch.device, worker_pool: Pool, moving: bool
) -> None:
    """Begun on one stream and handed out on another: the memory belongs to the first."""
    target, rng = OnCuda(cuda, WIDTH), random.Random(6)
    streams = [torch.cuda.current_stream(cuda), torch.cuda.Stream(cuda), torch.cuda.Stream(cuda)]
    with loader_of(device=cuda, pool=worker_pool, batchify_fn=_as_moving if moving else None) as loader:
        for batches in target.epochs(loader, EPOCHS):
            for number in range(len(loader)):
                with torch.cuda.stream(rng.choice(streams)):
                    batch = next(batches)
                    if moving:
                        (own,) = batch
                        assert (own.values.device, own.labels.device.type) == (cuda, "cpu")
                        batch = [own.values, own.labels.to(cuda)]
                        del own
                    shapes = [(field.shape, field.dtype) for field in batch]
                    target.compare(batch, number * BATCH)
                    del batch
                    target.delay(rng, loader)
                    target.poison(shapes)
    assert target.wrong() == (EPOCHS * COUNT // BATCH, 0)


@pytest.mark.parametrize("where", ["the current stream", "a side stream"])
def test_the_users_own_copies_of_pinned_batches_are_intact(cuda: torch.device, pool: Pool, where: str) -> None:
    """The host batch is dropped as soon as its copy has been asked for."""
    target, rng, done = OnCuda(cuda, WIDTH), random.Random(7), 0
    stream = target.side if where == "a side stream" else torch.cuda.current_stream(cuda)
    with loader_of(pin_memory=True, pool=pool) as loader:
        for batches in target.epochs(loader, -(-STEPS * BATCH // COUNT)):
            for number, batch in enumerate(batches):
                assert all(field.is_pinned() for field in batch)
                with torch.cuda.stream(stream):
                    if rng.random() < 0.5:
                        sleep(rng.randrange(20_000, 800_000))  # so that the copy comes late
                    moved = [field.to(cuda, non_blocking=True) for field in batch]
                    del batch
                    target.compare(moved, number * BATCH)
                    del moved
                done += 1
    assert done >= STEPS
    assert target.wrong() == (done, 0)


class Sample:
    """An object that does not move itself."""

    def __init__(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        self.values = values
        self.labels = labels


class Moving(Sample):
    """One that does, and leaves something on the host."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Moving:
        return Moving(self.values.to(device, non_blocking=non_blocking), self.labels)


def test_the_users_own_copies_from_objects_are_intact(cuda: torch.device, process_pool: ProcessPool) -> None:
    """The object is dropped as soon as its copy has been asked for; the copy comes late."""
    target = OnCuda(cuda, WIDTH)
    with loader_of(device=cuda, pool=process_pool, batchify_fn=_as_sample) as loader:
        for batches in target.epochs(loader, EPOCHS):
            for number, batch in enumerate(batches):
                sleep(800_000)
                moved = [batch.values.to(cuda, non_blocking=True), batch.labels.to(cuda, non_blocking=True)]
                del batch
                target.compare(moved, number * BATCH)
    assert target.wrong() == (EPOCHS * COUNT // BATCH, 0)


def _as_sample(samples: list[Any]) -> Sample:
    values, labels = default_batchify_fn(samples)
    return Sample(values, labels)


def _as_moving(samples: list[Any]) -> list[Moving]:
    values, labels = default_batchify_fn(samples)
    return [Moving(values, labels)]


def _packed(samples: list[Any]) -> Any:
    return {"packed": pack_sequence([torch.as_tensor(sample) for sample in samples], enforce_sorted=False)}


def test_a_packed_sequence_keeps_its_batch_sizes_on_the_host(cuda: torch.device, process_pool: ProcessPool) -> None:
    data = [torch.full((1 + i % 5, 64), float(i)) for i in range(64)]
    with ShardedDataLoader(data, 8, device=cuda, pool=process_pool, batchify_fn=_packed) as loader:
        for number, batch in enumerate(loader):
            packed = batch["packed"]
            assert (packed.data.device, packed.batch_sizes.device.type) == (cuda, "cpu")
            assert not packed.batch_sizes.is_pinned() or packed.batch_sizes.numel() == 0
            expected = [float(i) for i in range(8 * number, 8 * number + 8) for _ in range(1 + i % 5)]
            assert sorted(packed.data[:, 0].tolist()) == expected


@pytest.mark.parametrize("where", ["the current stream", "a side stream"])
def test_a_recurrent_network_reads_a_packed_batch(cuda: torch.device, where: str) -> None:
    """What stands on the host and what on the device is as `torch.nn.LSTM` wants it."""
    torch.manual_seed(0)
    host = torch.nn.LSTM(64, 8)
    network = torch.nn.LSTM(64, 8)
    network.load_state_dict(host.state_dict())
    network.to(cuda)
    data = [torch.randn(1 + i % 5, 64) for i in range(32)]
    stream = torch.cuda.Stream(cuda) if where == "a side stream" else torch.cuda.current_stream(cuda)
    torch.cuda.synchronize(cuda)
    with (
        torch.cuda.stream(stream),
        torch.no_grad(),
        ShardedDataLoader(data, 8, device=cuda, num_workers=2, batchify_fn=_packed) as loader,
    ):
        for number, batch in enumerate(loader):
            _, (found, _) = network(batch["packed"])
            _, (wanted, _) = host(_packed(data[8 * number : 8 * number + 8])["packed"])
            assert torch.allclose(found.cpu(), wanted, atol=1e-2)  # TF32


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """What a tokenizer gives, where transformers is not there: it moves itself, and changes itself."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        self.data = {name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()}
        return self


def _encoding(rows: torch.Tensor) -> Any:
    return pytest.importorskip("transformers").BatchEncoding({"input_ids": rows})


def _graph(rows: torch.Tensor) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list([data.Data(x=row[None]) for row in rows])


OBJECTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "a mapping": (lambda rows: Encoding(input_ids=rows), lambda batch: batch["input_ids"]),
    "BatchEncoding": (_encoding, lambda batch: batch["input_ids"]),
    "PyG": (_graph, lambda batch: batch.x),
    "sparse": (lambda rows: rows.to_sparse(), lambda batch: batch.to_dense()),
}


NOT_PRETENDED = pytest.mark.skipif(PRETENDED, reason="a pretended GPU has no sparse tensors")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=NOT_PRETENDED if name == "sparse" else ()) for name in OBJECTS]
)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 has it for each sparse tensor
@pytest.mark.parametrize("deep", [False, True], ids=["the batch", "in a dict"])
def test_objects_of_other_libraries_arrive(cuda: torch.device, name: str, deep: bool) -> None:
    make, find = OBJECTS[name]
    data = ArrayDataset(np.repeat(np.arange(1, 65, dtype=np.float32)[:, None], 16_384, 1))
    make(torch.ones(1, 2))  # is the library there?

    def batchify(samples: list[Any]) -> Any:
        made = make(torch.from_numpy(np.stack(samples)))
        return {"deep": [made]} if deep else made

    with ShardedDataLoader(data, 8, device=cuda, num_workers=2, batchify_fn=batchify) as loader:
        for number, batch in enumerate(loader):
            sleep(800_000)  # the copies come late
            found = find(batch["deep"][0] if deep else batch)
            assert found.device == cuda
            wanted = torch.arange(8 * number + 1, 8 * number + 9, device=cuda, dtype=torch.float32)
            assert torch.equal(found, wanted[:, None].expand(8, 16_384))


class Halves:
    """An object over two parts of one array, in the memory that the loader gives for the batch."""

    def __init__(self, samples: list[Any]) -> None:
        whole = empty((len(samples), WIDTH), np.int32)
        np.stack([values for values, _ in samples], out=whole)
        self.first, self.second = torch.from_numpy(whole[:2]), torch.from_numpy(whole[2:])
        self.labels = torch.tensor([label for _, label in samples[2:]])


def test_the_second_tensor_of_an_object_may_be_copied_alone(cuda: torch.device, process_pool: ProcessPool) -> None:
    """Torch would not find the block of pinned memory that it lies in: it begins in the middle. (A pretended GPU shows
    no race: tests/devices/test_objects.py does.)"""
    target = Rows(cuda, WIDTH)
    with ShardedDataLoader(rows(COUNT, WIDTH), BATCH, device=cuda, pool=process_pool, batchify_fn=Halves) as loader:
        for batch in loader:
            sleep(800_000)
            second, labels = batch.second.to(cuda, non_blocking=True), batch.labels.to(cuda)
            del batch
            target.compare(second, labels)
    seen, differing = target.result()
    assert (seen, differing) == ([index for index in range(COUNT) if index % BATCH >= 2], 0)


def test_the_objects_of_a_group_of_batches_may_be_copied_too(cuda: torch.device) -> None:
    """As `RayPool` brings them, without Ray: all batches of a group lie in one pinned block."""
    place, lent, target = Placer([cuda], pin_memory=False), Lent(0), Rows(cuda, WIDTH)
    task = Task(0, 0, 0, 0, ([0],), False)
    lent.empty, lent.copies_all = place.empty, True
    for step in range(20):
        first = np.arange(step * 2, step * 2 + 2)
        group = (first[:, None] * WIDTH + np.arange(WIDTH)).astype(np.int32)
        places = [(number * 4 * WIDTH, -(4 * WIDTH | ON_HOST)) for number in range(2)]
        for number, taken in enumerate(lent.buffers(places, group.view(np.uint8).reshape(-1), [])):
            values = torch.from_numpy(taken.view(np.int32))
            sample = Result(0, 0, {"meta": Sample(values, torch.tensor(first[number]))})
            batch = place.place([Entry(0, task, sample)])
            del sample
            sleep(800_000)
            found = batch["meta"].values.to(cuda, non_blocking=True)
            target.compare(found[None], batch["meta"].labels.to(cuda)[None])
            del batch, found, values, taken
    assert target.result() == (list(range(40)), 0)
    place.closer()()


def test_a_slot_is_used_again_only_when_its_copy_is_done(cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    early, again, copied, pool = [], [], list[tuple[int, Any]](), ProcessPool(2)

    class Returned(collections.deque):  # type: ignore[type-arg]
        """The slots that may be used again."""

        def append(self, lease: Any) -> None:
            slot = lease.resource
            start = address_of(arena.segments[slot.segment].mapping)[0] + slot.offset
            mine = [item for item in copied if start <= item[0] < start + slot.nbytes]
            again.extend(mine)
            early.extend(slot for _, event in mine if not event.query())
            copied[:] = [item for item in copied if item not in mine]
            super().append(lease)

    def noted(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        done = copy(target, source)
        copied.append((source.data_ptr(), torch.cuda.current_stream(cuda).record_event()))
        return done

    with loader_of(device=cuda, pool=pool) as loader:
        list(loader)
        (copies, stream), arena = copies_of(loader), pool._transport.arena
        arena.returned, copy = Returned(arena.returned), copies.streams.copy
        monkeypatch.setattr(copies.streams, "copy", noted)
        for _ in range(5):
            for _ in loader:
                with torch.cuda.stream(stream):
                    sleep(4_000_000)  # the host is two milliseconds ahead
        torch.cuda.synchronize(cuda)
    assert len(again) > 20
    assert early == []


def test_two_shards_on_one_device_are_the_batch(cuda: torch.device, pool: Pool) -> None:
    with loader_of(devices=[cuda, cuda], shard_weights=[2, 1], pool=pool) as loader:
        order = order_of(loader, 0)
        for number, (first, second) in enumerate(loader):
            assert (len(first[1]), len(second[1])) == (21, 11)
            indices = np.array(order[number * BATCH : (number + 1) * BATCH])
            for found, wanted in ((first, indices[:21]), (second, indices[21:])):
                values, labels = host_values(found)
                assert labels.tolist() == wanted.tolist()
                assert (values == wanted[:, None] * WIDTH + np.arange(WIDTH)).all()


def test_a_tensor_that_is_on_its_device_stays_what_it_is(cuda: torch.device) -> None:
    made = torch.arange(1000, device=cuda)
    with ShardedDataLoader(range(4), 4, batchify_fn=lambda samples: [made, np.arange(4)], device=cuda) as loader:
        found, beside = next(iter(loader))
    assert found is made
    assert (beside.device, beside.tolist()) == (cuda, [0, 1, 2, 3])


DTYPES = ["bool", "uint8", "int16", "uint16", "uint32", "uint64", "float16", "float64", "complex64", "bfloat16"]


@pytest.mark.parametrize("name", [*DTYPES, "float8_e5m2"])
@pytest.mark.parametrize("resident", [False, True, 0.4])
def test_every_dtype_arrives(cuda: torch.device, name: str, resident: Any) -> None:
    values = (torch.arange(64) % (2 if name == "bool" else 64)).to(getattr(torch, name))
    column = ArrayDataset(values.reshape(16, 4), values[:16])
    with (
        ShardedDataLoader(column, 5, device=Placement(cuda, resident=resident)) as loader,
        ShardedDataLoader(column, 5) as host,
    ):
        for found, wanted in zip(loader, host, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert (one.dtype, one.device) == (values.dtype, cuda)
                assert one.tolist() == other.tolist()


@pytest.mark.parametrize("stream", ["the default stream", "a stream of the user's"])
def test_resident_equals_streamed(cuda: torch.device, stream: str) -> None:
    chosen = torch.cuda.stream(torch.cuda.Stream(cuda)) if "user" in stream else nullcontext()
    with chosen, loader_of(device=cuda, resident=True) as resident, loader_of(device=cuda, num_workers=2) as sent:
        for _ in range(2):
            for ours, theirs in zip(resident, sent, strict=True):
                assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert f"resident on {cuda}" in repr(resident)


PARTS: dict[str, Any] = {
    "array": lambda: np.arange(96 * 4).reshape(96, 4),
    "TensorDataset": lambda: TensorDataset(torch.arange(96), torch.arange(96).to(torch.bfloat16)),
    "Subset": lambda: Subset(TensorDataset(torch.arange(96), torch.zeros(96, 0)), [*range(40), 3, 3]),
    "split": lambda: rows(96, 32).split([64, 32], seed=1)[0],
    "take": lambda: rows(96, 32).take(50),
    "shard": lambda: rows(96, 32).shard(2, 1),
}


@pytest.mark.parametrize("share", [True, 0.5, 0.02])
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_rows_of_all_kinds_are_those_that_are_sent(cuda: torch.device, make: Any, share: Any) -> None:
    options: dict[str, Any] = {"batch_size": 7, "shuffle": True, "seed": 2}
    with (
        ShardedDataLoader(make(), device=Placement(cuda, resident=share), **options) as resident,
        ShardedDataLoader(make(), device=cuda, **options) as sent,
    ):
        for ours, theirs in zip(resident, sent, strict=True):
            assert type(ours) is type(theirs)
            for one, other in zip([*ours], [*theirs], strict=True):
                assert (one.dtype, one.shape, one.device) == (other.dtype, other.shape, cuda)
                assert torch.equal(one, other)
        assert f"resident on {cuda}" in repr(resident)


def test_what_is_gathered_has_gradients(cuda: torch.device) -> None:
    model = torch.nn.Linear(1, 3, bias=False).to(cuda)
    with ShardedDataLoader(np.arange(6, dtype=np.float32).reshape(6, 1), 6, devices=[cuda, cuda]) as loader:
        outputs = [(model(shard), shard.mean()) for shard in next(iter(loader))]
        joined, means = loader.gather(outputs)
    joined.sum().backward()
    assert (joined.shape, joined.device) == ((6, 3), cuda)
    assert means.tolist() == [1.0, 4.0]
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[15.0]] * 3


def test_resident_columns_that_were_loaded_in_inference_mode_can_be_used_after_it(cuda: torch.device) -> None:
    data = ArrayDataset(torch.arange(64, dtype=torch.float32).reshape(16, 4))
    with ShardedDataLoader(data, 8, device=Placement(cuda, resident=True)) as loader:
        with torch.inference_mode():
            batches = iter(loader)
            next(batches)
        with torch.cuda.stream(torch.cuda.Stream(cuda)):  # the columns are recorded on it
            batch = next(batches)
        torch.cuda.synchronize(cuda)
    assert not batch.is_inference()
    assert batch.tolist() == data.columns[0][8:].tolist()


@pytest.mark.parametrize("share", [True, 0.5])
def test_resident_batches_are_intact_under_stress(cuda: torch.device, share: Any) -> None:
    with loader_of(device=cuda, resident=share) as loader:
        seen, differing = stress(OnCuda(cuda, WIDTH), loader, STEPS, seed=8)
    assert seen > 0.7 * STEPS
    assert differing == 0
