"""On a GPU, values are intact whatever streams are busy with, however batches are used and whoever makes them."""

from __future__ import annotations

import collections
import gc
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, made, make_pool
from on_cuda import LONG, PART, PRETENDED, SHORT, Cudart, Late, OnCuda, Rows, copies_of, needs_cuda, sleep
from stress import order_of, rows, stress
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import IterableDataset, get_worker_info

from sharded_loader import ArrayDataset, Placement, ProcessPool, ShardedDataLoader, empty
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.devices.accelerator import address_of
from sharded_loader.engine.pool import Pool
from sharded_loader.torch import DataLoader

pytestmark = [pytest.mark.gpu, needs_cuda, pytest.mark.timeout(300)]

COUNT, WIDTH, BATCH, STEPS = 1024, 16_384, 32, 2000 // PART  # 2 MB per batch
EPOCHS = max(1, 20 // PART)


def loader_of(**options: Any) -> ShardedDataLoader:
    return made(rows(COUNT, WIDTH), BATCH, shuffle=True, seed=3, **options)


@pytest.mark.parametrize("chosen", [False, True], ids=["the default stream", "a stream of the user's"])
def test_2000_batches_are_intact_under_stress(cuda: torch.device, pool: Pool, chosen: bool) -> None:
    target, stream = OnCuda(cuda, WIDTH), torch.cuda.Stream(cuda) if chosen else None
    with loader_of(device=cuda, pool=pool) as loader, torch.cuda.stream(stream):
        seen, differing = stress(target, loader, STEPS, seed=4)
    assert seen > 0.7 * STEPS
    assert differing == 0


@pytest.mark.parametrize("share", [True, 0.5])
def test_resident_batches_are_intact_under_stress(cuda: torch.device, share: Any) -> None:
    with loader_of(device=cuda, resident=share) as loader:
        seen, differing = stress(OnCuda(cuda, WIDTH), loader, STEPS, seed=8)
    assert seen > 0.7 * STEPS
    assert differing == 0


@pytest.mark.parametrize("moving", [False, True], ids=["tensors", "objects that move themselves"])
def test_batches_are_intact_while_the_stream_changes_from_batch_to_batch(
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


class Stream(IterableDataset):  # type: ignore[type-arg]
    """The same rows without an index: each worker yields its part."""

    def __iter__(self) -> Iterator[Any]:
        info, data = get_worker_info(), rows(COUNT, WIDTH)
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (data[index] for index in range(first, COUNT, step))


def drop_in(kind: str, **options: Any) -> DataLoader[Any]:
    if kind == "iterable":
        return DataLoader(Stream(), BATCH, **options)
    return DataLoader(rows(COUNT, WIDTH), BATCH, shuffle=True, seed=3, **options)


PINNING: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: loader_of(pin_memory=True, pool=make_pool(name)) for name in POOLS},
    **{
        f"the drop-in, {kind}, {workers}": lambda kind=kind, n=workers: drop_in(kind, pin_memory=True, num_workers=n)
        for kind in ("map", "iterable")
        for workers in (2, 0)
    },
}


@pytest.mark.parametrize("where", ["the current stream", "a side stream"])
@pytest.mark.parametrize("make", PINNING.values(), ids=PINNING)
def test_the_users_own_copies_of_pinned_batches_are_intact(cuda: torch.device, make: Any, where: str) -> None:
    """The host batch is dropped as soon as its copy has been asked for, and the copy comes late."""
    rng, target = random.Random(7), Rows(cuda, WIDTH)
    stream = torch.cuda.Stream(cuda) if where == "a side stream" else torch.cuda.current_stream(cuda)
    torch.cuda.synchronize(cuda)
    loader = make()
    with loader if isinstance(loader, ShardedDataLoader) else nullcontext():
        for _ in range(EPOCHS):
            for batch in loader:
                assert all(field.is_pinned() for field in batch)
                with torch.cuda.stream(stream):
                    if rng.random() < 0.5:
                        sleep(rng.randrange(SHORT, LONG))
                    values, labels = [field.to(cuda, non_blocking=True) for field in batch]
                    del batch
                    target.compare(values, labels)
                    del values, labels
            torch.cuda.synchronize(cuda)
            seen, differing = target.result()
            assert (sorted(seen), differing) == (list(range(COUNT)), 0)


@pytest.mark.parametrize("kind", ["map", "iterable"])
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2},
        {"num_workers": 2, "in_order": False},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "thread_pool": True},
        {},
    ],
    ids=["workers", "any_order", "persistent", "no_processes", "alone"],
)
def test_batches_of_the_drop_in_are_intact_in_two_epochs(
    cuda: torch.device, monkeypatch: pytest.MonkeyPatch, kind: str, options: dict[str, Any]
) -> None:
    runtime, rng, target = Cudart(torch.cuda.cudart()), random.Random(1), Rows(cuda, WIDTH)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    loader = drop_in(kind, device=cuda, **options)
    for epoch in range(2):
        for values, labels in loader:
            sleep(rng.randrange(SHORT, LONG))
            target.compare(values, labels)
        seen, differing = target.result()
        assert (sorted(seen), differing) == (list(range(COUNT)), 0)
        if kind == "map" and options.get("in_order", True):
            expected = DataLoader(range(COUNT), BATCH, shuffle=True, seed=3)
            expected.set_epoch(epoch)
            assert seen == [index for batch in expected for index in batch.tolist()]
    del loader, values, labels
    gc.collect()
    torch.cuda.synchronize(cuda)
    assert runtime.registered == {}
    if options.get("num_workers") and not options.get("thread_pool"):
        assert runtime.calls  # the segments of the workers were page-locked


class Sample:
    """An object that does not move itself."""

    def __init__(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        self.values = values
        self.labels = labels


class Moving(Sample):
    """One that does, and leaves something on the host."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Moving:
        return Moving(self.values.to(device, non_blocking=non_blocking), self.labels)


class Part(Sample):
    """An object over a part of one array, in the memory that the loader gives for the batch.

    Torch would not find the block of pinned memory that it lies in: it begins in the middle. (A pretended GPU shows no
    race: tests/devices/test_objects.py does.)
    """

    def __init__(self, samples: list[Any]) -> None:
        whole = empty((len(samples), WIDTH), np.int32)
        np.stack([values for values, _ in samples], out=whole)
        self.first = torch.from_numpy(whole[:2])
        super().__init__(torch.from_numpy(whole[2:]), torch.tensor([label for _, label in samples[2:]]))


def _as_sample(samples: list[Any]) -> Sample:
    return Sample(*default_batchify_fn(samples))


@pytest.mark.parametrize(("build", "begin"), [(_as_sample, 0), (Part, 2)], ids=["whole", "a part"])
def test_the_users_own_copies_from_objects_are_intact(
    cuda: torch.device, process_pool: ProcessPool, build: Any, begin: int
) -> None:
    """The object is dropped as soon as its copy has been asked for; the copy comes late."""
    target = Rows(cuda, WIDTH)
    with loader_of(device=cuda, pool=process_pool, batchify_fn=build) as loader:
        for epoch in range(EPOCHS):
            for batch in loader:
                sleep(LONG)
                values, labels = batch.values.to(cuda, non_blocking=True), batch.labels.to(cuda, non_blocking=True)
                del batch
                target.compare(values, labels)
            expected = [index for place, index in enumerate(order_of(loader, epoch)) if place % BATCH >= begin]
            assert target.result() == (expected, 0)


def _as_moving(samples: list[Any]) -> list[Moving]:
    values, labels = default_batchify_fn(samples)
    return [Moving(values, labels)]


def _packed(samples: list[Any]) -> Any:
    return {"packed": pack_sequence([torch.as_tensor(sample) for sample in samples], enforce_sorted=False)}


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
            packed = batch["packed"]
            assert (packed.data.device, packed.batch_sizes.device.type) == (cuda, "cpu")
            assert not packed.batch_sizes.is_pinned() or packed.batch_sizes.numel() == 0
            _, (found, _) = network(packed)
            _, (wanted, _) = host(_packed(data[8 * number : 8 * number + 8])["packed"])
            assert torch.allclose(found.cpu(), wanted, atol=1e-2)  # TF32


def _graph(rows: torch.Tensor) -> Any:
    data = pytest.importorskip("torch_geometric.data")
    return data.Batch.from_data_list([data.Data(x=row[None]) for row in rows])


OBJECTS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "BatchEncoding": (
        lambda rows: pytest.importorskip("transformers").BatchEncoding({"input_ids": rows}),
        lambda batch: batch["input_ids"],
    ),
    "PyG": (_graph, lambda batch: batch.x),
    "sparse": (lambda rows: rows.to_sparse(), lambda batch: batch.to_dense()),
}


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 has it for each sparse tensor
@pytest.mark.parametrize("deep", [False, True], ids=["the batch", "in a dict"])
def test_objects_of_other_libraries_arrive(cuda: torch.device, name: str, deep: bool) -> None:
    if PRETENDED and name == "sparse":
        pytest.skip("a pretended GPU has no sparse tensors")
    make, find = OBJECTS[name]
    data = ArrayDataset(np.repeat(np.arange(1, 65, dtype=np.float32)[:, None], 16_384, 1))
    make(torch.ones(1, 2))  # is the library there?

    def batchify(samples: list[Any]) -> Any:
        made = make(torch.from_numpy(np.stack(samples)))
        return {"deep": [made]} if deep else made

    with ShardedDataLoader(data, 8, device=cuda, num_workers=2, batchify_fn=batchify) as loader:
        for number, batch in enumerate(loader):
            sleep(LONG)  # the copies come late
            found = find(batch["deep"][0] if deep else batch)
            assert found.device == cuda
            wanted = torch.arange(8 * number + 1, 8 * number + 9, device=cuda, dtype=torch.float32)
            assert torch.equal(found, wanted[:, None].expand(8, 16_384))


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
        given = {worker: Returned(leases) for worker, leases in arena.returned.items()}
        arena.returned, copy = collections.defaultdict(Returned, given), copies.streams.copy
        monkeypatch.setattr(copies.streams, "copy", noted)
        for _ in range(5):
            for _ in loader:
                with torch.cuda.stream(stream):
                    sleep(4_000_000)  # the host is two milliseconds ahead
        torch.cuda.synchronize(cuda)
    assert len(again) > 20
    assert early == []


def test_a_tensor_that_is_on_its_device_stays_what_it_is(cuda: torch.device) -> None:
    made = torch.arange(1000, device=cuda)
    with ShardedDataLoader(range(4), 4, batchify_fn=lambda samples: [made, np.arange(4)], device=cuda) as loader:
        found, beside = next(iter(loader))
    assert found is made
    assert (beside.device, beside.tolist()) == (cuda, [0, 1, 2, 3])


DTYPES = ["bool", "uint8", "int16", "uint16", "uint32", "uint64", "float16", "float64", "complex64", "bfloat16"]


@pytest.mark.parametrize("name", [*DTYPES, "float8_e5m2"])
@pytest.mark.parametrize("resident", [False, True, 0.4, 0.02])
def test_every_dtype_and_rows_without_numbers_arrive(cuda: torch.device, name: str, resident: Any) -> None:
    values = (torch.arange(64) % (2 if name == "bool" else 64)).to(getattr(torch, name))
    column = ArrayDataset(values.reshape(16, 4), values[:16], values[:0].reshape(16, 0))
    options: dict[str, Any] = {"shuffle": True, "seed": 2}
    with (
        ShardedDataLoader(column, 5, device=Placement(cuda, resident=resident), **options) as loader,
        ShardedDataLoader(column, 5, **options) as host,
    ):
        for found, wanted in zip(loader, host, strict=True):
            for one, other in zip(found, wanted, strict=True):
                assert (one.dtype, one.shape, one.device) == (values.dtype, other.shape, cuda)
                assert one.tolist() == other.tolist()
        assert (f"resident on {cuda}" in repr(loader)) is bool(resident)


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


# -- functions, containers and small tensors on the copy stream ------------------------------------------------


def columns() -> ArrayDataset:
    return ArrayDataset(x=np.repeat(np.arange(512), WIDTH).reshape(512, WIDTH), y=np.arange(512))


class Behind(Late):
    """The device is behind."""

    def compare(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        sleep(SHORT)
        self.expect(found, expected)

    def compare_rows(self, x: torch.Tensor, y: torch.Tensor, number: int, added: int = 0, factor: int = 1) -> None:
        first = torch.arange(BATCH, device=self.device) + number * BATCH
        self.compare(x, (first * factor + added)[:, None])
        self.compare(y, first)


def prepare(batch: Any, rng: Any) -> Any:
    added = int(rng.integers(1000))
    between = batch["x"] * 2
    return between + added, batch["y"], added


def test_a_function_runs_on_the_copy_stream(cuda: torch.device, pool: Pool) -> None:
    wrong, streams = Behind(cuda), set()

    def noted(batch: Any, rng: Any) -> Any:
        streams.add(torch.cuda.current_stream(cuda).cuda_stream)
        return prepare(batch, rng)

    with ShardedDataLoader(
        columns(), BATCH, seed=1, device=Placement(cuda, device_transform=noted), pool=pool
    ) as loader:
        for _ in range(EPOCHS):
            for number, (x, y, added) in enumerate(loader):
                wrong.compare_rows(x, y, number, added, 2)
                shapes = [(x.shape, x.dtype), (y.shape, y.dtype)]
                del x, y
                wrong.poison(shapes)
    assert wrong.differing() == 0
    assert len(streams) == 1 and torch.cuda.default_stream(cuda).cuda_stream not in streams


def test_the_memory_of_its_results_is_bounded(cuda: torch.device) -> None:
    with ShardedDataLoader(columns(), BATCH, device=Placement(cuda, device_transform=prepare)) as loader:
        for x, _, _ in loader:  # what torch keeps for the streams
            sleep(SHORT)
            del x
        torch.cuda.synchronize(cuda)
        before = torch.cuda.memory_reserved(cuda)
        for _ in range(EPOCHS):
            for x, _, _ in loader:
                sleep(SHORT)
                del x
        torch.cuda.synchronize(cuda)
        assert torch.cuda.memory_reserved(cuda) <= 2 * before


def test_host_fields_stay_on_the_host(cuda: torch.device, pool: Pool) -> None:
    with ShardedDataLoader(columns(), BATCH, device=Placement(cuda, host_fields=["y"]), pool=pool) as loader:
        for number, batch in enumerate(loader):
            assert batch["x"].device == cuda and not batch["y"].is_pinned()
            assert batch["y"].tolist() == list(range(number * BATCH, (number + 1) * BATCH))


class Encoding(collections.UserDict):  # type: ignore[type-arg]
    """Like a tokenizer's."""

    def to(self, device: Any, non_blocking: bool = False) -> Encoding:
        return Encoding({name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()})


def encoding(samples: list[Any]) -> Any:
    return Encoding({name: torch.from_numpy(np.stack([one[name] for one in samples])) for name in ("x", "y")})


def test_a_container_that_moves_itself_is_copied_ahead(cuda: torch.device, pool: Pool) -> None:
    wrong = Behind(cuda)
    with ShardedDataLoader(columns(), BATCH, device=cuda, pool=pool, collate_fn=encoding) as loader:
        for _ in range(EPOCHS):
            for number, batch in enumerate(loader):
                wrong.compare_rows(batch["x"], batch["y"], number)
                shapes = [(field.shape, field.dtype) for field in batch.values()]
                del batch
                wrong.poison(shapes)
    assert wrong.differing() == 0


def test_many_small_tensors_are_intact(cuda: torch.device, pool: Pool) -> None:
    dtypes, wrong = [np.float32, np.int64, np.uint8, np.float16, np.bool_], Behind(cuda)
    columns = {f"{k}": np.arange(COUNT * (1 + k % 5)).reshape(COUNT, -1).astype(dtypes[k % 5]) for k in range(256)}
    on_device = {name: torch.from_numpy(column).to(cuda) for name, column in columns.items()}
    with ShardedDataLoader(ArrayDataset(**columns), BATCH, device=cuda, pool=pool) as loader:
        for number, batch in enumerate(loader):
            for name, field in batch.items():
                wrong.expect(field, on_device[name][number * BATCH : (number + 1) * BATCH])
            del batch, field
    assert wrong.differing() == 0


def test_another_stream_waits_for_the_ready_event(cuda: torch.device, pool: Pool) -> None:
    other, wrong = torch.cuda.Stream(cuda), Behind(cuda)
    torch.cuda.synchronize(cuda)
    with ShardedDataLoader(columns(), BATCH, device=cuda, pool=pool) as loader:
        for number, batch in enumerate(loader):
            other.wait_event(loader.ready_event)
            with torch.cuda.stream(other):
                wrong.compare(batch["y"], torch.arange(BATCH, device=cuda) + number * BATCH)
            batch["y"].record_stream(other)
            del batch
    assert wrong.differing() == 0
