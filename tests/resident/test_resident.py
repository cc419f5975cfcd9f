"""Data that lives on the devices gives the same stream of batches, and falls back where there is no room."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from simulated import Machine
from torch.utils.data import TensorDataset

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader, SimpleDataset
from sharded_loader.devices.accelerator import Streams
from sharded_loader.devices.copies import PendingCopy
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.resident import ResidentPool, load_rows, memory_of, put_rows, take_rows


def dataset(rows: int = 100) -> ArrayDataset:
    return ArrayDataset(
        image=np.arange(rows * 12, dtype=">f4").reshape(rows, 3, 4),
        label=torch.arange(rows, dtype=torch.int16),
        small=np.arange(rows, dtype=np.uint8)[:, None],
    )


def resident(machine: Machine, *args: Any, **options: Any) -> ShardedDataLoader:
    """A loader of the first device, which keeps the rows."""
    return made(*args, device=machine.devices[0], **({"resident": True} | options))


def stream(loader: ShardedDataLoader, machine: Machine | None = None, epochs: int = 2) -> list[Any]:
    """All values of some epochs, with dtypes and the number of shards."""
    seen = []
    for _ in range(epochs):
        for shards in loader:
            if machine is not None:
                machine.finish()
            seen.append([{name: (t.dtype, t.tolist()) for name, t in shard.items()} for shard in shards])
    return seen


def test_each_device_decides_for_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.devices[0]
    monkeypatch.setattr(machine, "memory_of", lambda device: (1 << 20 if device == first else 1000, 1 << 20))
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3}
    with (
        pytest.warns(UserWarning, match=r"privateuseone:1 does not keep the data \(.* bytes of columns, room for 0\)"),
        made(dataset(), devices=machine.devices, resident=True, **options) as loader,
        made(dataset(), devices=["cpu", "cpu"], **options) as sent,
    ):
        assert stream(loader, machine) == stream(sent)
        assert "resident on privateuseone:0;" in repr(loader).replace(",", ";")


def test_a_reserve_is_left_for_the_model(machine: Machine) -> None:
    needed = sum(column.nbytes for column in dataset().columns.values())
    for total, kept in ((needed * 4 // 3 + 10, ""), (needed * 4 // 3 - 10, " (99 of 100 samples)")):
        machine.memory_bytes = (total, total)
        with resident(machine, dataset(), 16, resident="auto") as loader:
            next(iter(loader))
            assert f"resident on privateuseone:0{kept}, " in repr(loader)


@pytest.mark.parametrize(("share", "kept"), [(True, True), ("auto", False)])
def test_where_a_device_does_not_tell_its_memory_it_is_tried_if_the_user_insists(
    machine: Machine, share: Any, kept: bool
) -> None:
    machine.memory_bytes = None
    with resident(machine, dataset(), 16, resident=share) as loader:
        batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert ("resident on" in repr(loader)) is kept


def test_out_of_memory_while_the_columns_are_copied_falls_back_with_a_message(machine: Machine) -> None:
    machine.blocks = 2  # the third column finds none
    with resident(machine, dataset(), 16, resident="auto") as loader:
        with pytest.warns(UserWarning, match=r"does not keep the data \(simulated: 2 blocks.*: it is sent batches"):
            batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert machine.caches_emptied == 1  # the columns that found room are not in the way of the batches


def test_a_refreshed_dataset_is_copied_again_before_the_next_epoch(machine: Machine) -> None:
    values = np.arange(8)
    with resident(machine, ArrayDataset(values), 4) as loader:
        under_way = iter(loader)
        next(under_way)
        values += 100
        loader.refresh()
        second = next(under_way)  # goes on, over what is there
        machine.finish()
        assert second.tolist() == [4, 5, 6, 7]
        first = next(iter(loader))
        machine.finish()
        assert first.tolist() == [100, 101, 102, 103]


def test_a_bad_index_is_its_batch_s_error(machine: Machine) -> None:
    with resident(machine, dataset(), batch_sampler=[[1], [2, 500], [3]]) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(IndexError, match="epoch 0, batch 1: the sampler yielded index 500"):
            next(batches)
        third = next(batches)
        machine.finish()
        assert third["label"].tolist() == [3]


def test_on_the_cpu_batches_are_gathered_in_the_loop(worker_pool: Pool) -> None:
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3, "devices": ["cpu", "cpu"]}
    with (
        made(dataset(), pool=worker_pool, resident=True, **options) as loader,
        made(dataset(), **options) as plain,
    ):
        assert stream(loader) == stream(plain)
        assert not loader.pool.started


def test_peek_is_the_first_batch(machine: Machine) -> None:
    with resident(machine, dataset(), 16, shuffle=True) as loader:
        peeked, first = loader.peek(), next(iter(loader))
        machine.finish()
        assert peeked["label"].tolist() == first["label"].tolist()


@pytest.mark.parametrize(
    ("data", "options", "error", "message"),
    [
        (ArrayDataset([1, 2]), {"device": "cpu"}, TypeError, r"column 0 is a list, which a device cannot hold"),
        (
            ArrayDataset(x=np.zeros(2), name=np.array(["a", "b"])),
            {"device": "cpu"},
            TypeError,
            r"column 'name' is a ndarray of <U1, which a device cannot hold",
        ),
        (SimpleDataset([1, 2]), {"device": "cpu"}, TypeError, r"reads something else: SimpleDataset\(2 "),
        (ArrayDataset(np.zeros(2)).transform(abs), {"device": "cpu"}, TypeError, "Apply a transform before"),
        (TensorDataset(torch.zeros(2)), {"device": "cpu", "collate_fn": list}, ValueError, "collate_fn cannot run"),
        (np.array(["a", "b"]), {"device": "cpu"}, TypeError, "reads something else"),
        (ArrayDataset(np.zeros(2)), {}, ValueError, "give device= or devices= as well"),
        (ArrayDataset(np.zeros(2)), {"device": "cpu", "batchify_fn": list}, ValueError, "leave it out"),
    ],
)
def test_what_cannot_be_resident_is_refused_or_with_auto_read_as_always(
    data: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        made(data, 1, resident=True, **options)
    with made(data, 1, resident="auto", **options) as loader:
        assert len(list(loader)) == 2


@pytest.mark.parametrize("value", ["yes", 1, 0, 0.0, -1, -0.5, 1.5, float("nan"), float("inf"), None, np.zeros(2)])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match='it must be True, False, "auto", or a fraction of the rows: a float above 0'):
        ShardedDataLoader(ArrayDataset(np.zeros(2)), 1, device=Placement("cpu", resident=value))


# -- the pool by itself ---------------------------------------------------------------------------------------


def new_resident(machine: Machine, rows: int = 100) -> ResidentPool:
    placement = Placer(machine.devices, pin_memory=False)
    pool = ResidentPool(dataset(rows), placement, share=1.0, insists=True, least=0.0)
    assert pool.load(again=False)
    pool.start(Job(dataset(rows), None, 0))
    return pool


def task(seq: int, *shards: list[int], run: int = 0) -> Task:
    return Task(run, seq, 0, 0, shards, True)


def test_one_task_is_gathered_in_each_wait(machine: Machine) -> None:
    pool = new_resident(machine)
    pool.submit([task(0, [3, -1], [7]), task(1, [2], [1])])
    assert pool.wait(block=False) == ()
    results = [*pool.wait(), *pool.wait()]
    machine.finish()
    assert [(result.seq, result.samples) for result in results] == [(0, 3), (1, 2)]
    first, second = results[0].batch
    assert (type(first), type(second)) == (PendingCopy, PendingCopy)
    assert (first.batch["label"].tolist(), second.batch["label"].tolist()) == ([3, 99], [7])
    assert pool.wait() == ()


def test_tasks_that_are_cancelled_are_not_gathered(machine: Machine) -> None:
    pool = new_resident(machine)
    pool.submit([task(0, [1], run=1), task(0, [2], run=2)])
    pool.cancel(1)
    assert [result.run for result in (*pool.wait(), *pool.wait())] == [2]


def test_closing_drops_the_tasks_and_keeps_the_columns(machine: Machine) -> None:
    pool = new_resident(machine)
    pool.submit([task(0, [1])])
    pool.close()
    assert (pool.started, pool.wait(), list(pool.counts)) == (False, (), machine.devices)
    pool.forget()
    assert pool.counts == {}


def test_what_goes_wrong_in_a_gather_is_the_batchs_error(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*arguments: Any) -> torch.Tensor:
        raise RuntimeError("simulated: broken")

    pool = new_resident(machine)
    monkeypatch.setattr(machine, "take", take)
    pool.submit([task(5, [1], [2])])
    (result,) = pool.wait()
    assert isinstance(result.error, RuntimeError)
    assert "epoch 0, batch 5" in "\n".join(result.error.__notes__)


# -- pools change ---------------------------------------------------------------------------------------------


def test_an_epoch_under_way_goes_on_in_the_pool_of_the_next(machine: Machine, new_pool: Callable[..., Pool]) -> None:
    """The devices have lost their room, and later find it again."""
    with resident(machine, ArrayDataset(np.arange(40)), 4, resident="auto", pool=new_pool()) as loader:
        first = iter(loader)
        seen = [next(first)]
        assert "resident on" in repr(loader)
        for memory in ((0, 0), (1 << 30, 1 << 30)):
            machine.memory_bytes = memory
            loader.refresh()
            other = next(iter(loader))
            machine.finish()
            assert other.tolist() == [0, 1, 2, 3]
            assert loader.pool.started is (memory == (0, 0))
            assert ("resident on" in repr(loader)) is (memory != (0, 0))
            seen.append(next(first))
        seen += first
        machine.finish()
    assert [batch.tolist() for batch in seen] == np.arange(40).reshape(10, 4).tolist()


def test_an_epoch_under_way_survives_an_interrupted_copy_of_the_columns(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    with ShardedDataLoader(
        ArrayDataset(np.arange(12)), 4, device=Placement(machine.devices[0], resident=True)
    ) as loader:
        first = iter(loader)
        seen = [next(first)]
        loader.refresh()
        with monkeypatch.context() as patch:
            patch.setattr(machine, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        seen += first
        machine.finish()
        assert [batch.tolist() for batch in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


# -- what is asked of a device ---------------------------------------------------------------------------------


def test_rows_of_columns_in_another_layout_are_gathered() -> None:
    column = torch.arange(12.0).reshape(3, 4).T
    taken = take_rows(column, torch.tensor([3, 1]))
    assert taken.tolist() == [[3.0, 7.0, 11.0], [1.0, 5.0, 9.0]]


@pytest.fixture
def cuda() -> Streams:
    return Streams(torch.device("cuda", 1))  # this asks nothing of a device


def test_what_is_loaded_is_there_before_anybody_uses_it(cuda: Streams) -> None:
    log: list[Any] = []
    event = SimpleNamespace(synchronize=lambda: log.append("waited"))
    cuda.caller_stream = lambda: SimpleNamespace(record_event=lambda: log.append("recorded") or event)
    target: Any = SimpleNamespace(copy_=lambda host: log.append(("copied", host)))
    host: Any = "rows"
    load_rows(cuda, target, host)
    assert log == [("copied", "rows"), "recorded", "waited"]


WORDS = ["bool", "uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2", "float64", "complex64", "complex128"]


@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 0), (6, 2, 2)], ids=str)
@pytest.mark.parametrize("name", WORDS)
def test_rows_of_every_dtype_are_taken_and_put(name: str, shape: tuple[int, ...]) -> None:
    column = torch.arange(1, math.prod(shape) + 1).reshape(shape).to(getattr(torch, name))
    taken = take_rows(column, torch.tensor([5, 0, 0]))
    assert (taken.dtype, taken.tolist()) == (column.dtype, [column.tolist()[row] for row in (5, 0, 0)])
    put_rows(column, torch.tensor([1, 4, 3]), taken)
    assert [column.tolist()[row] for row in (1, 4, 3)] == taken.tolist()
    assert column.tolist()[2] == torch.arange(1, math.prod(shape) + 1).reshape(shape).to(column.dtype).tolist()[2]


def test_the_memory_that_torch_has_cached_can_be_used(cuda: Streams, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(**functions: Any) -> None:
        monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))

    asked: dict[str, Any] = {"memory_reserved": lambda device: 30, "memory_allocated": lambda device: 20}
    answer(mem_get_info=lambda device: (100, 200), **asked)
    assert memory_of(cuda) == (110, 200)
    answer(**asked)
    assert memory_of(cuda) is None
