"""Data that lives on the devices gives the same stream of batches, and falls back where there is no room."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from injection import InterruptAt, next_interrupted
from simulated import Machine, SimulatedStreams
from torch.utils.data import TensorDataset

from sharded_loader import ArrayDataset, Placement, ShardedDataLoader, SimpleDataset
from sharded_loader.devices.copies import PendingCopy
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.resident import ResidentPool


def dataset(rows: int = 100) -> ArrayDataset:
    return ArrayDataset(
        image=np.arange(rows * 12, dtype=">f4").reshape(rows, 3, 4),
        label=torch.arange(rows, dtype=torch.int16),
        small=np.arange(rows, dtype=np.uint8)[:, None],
    )


def stream(loader: ShardedDataLoader, machine: Machine | None = None, epochs: int = 2) -> list[Any]:
    """All values of some epochs, with dtypes and the number of shards."""
    seen = []
    for _ in range(epochs):
        for shards in loader:
            if machine is not None:
                machine.finish()
            seen.append([{name: (t.dtype, t.tolist()) for name, t in shard.items()} for shard in shards])
    return seen


OPTIONS: dict[str, dict[str, Any]] = {
    "in order": {"batch_size": 16},
    "shuffled": {"batch_size": 16, "shuffle": True},
    "rolled over": {"batch_size": 16, "shuffle": True, "last_batch": "rollover"},
    "weighted": {"batch_size": 15, "shard_weights": [2, 1]},
    "a rank": {"batch_size": 8, "shuffle": True, "num_replicas": 3, "rank": 1},
    "given batches": {"batch_sampler": [[0, 5, -1], [7], [2, 2, 3, 99]]},
    "given shards": {"batch_sampler": [[[0, 5], [-1]], [[7]]]},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_stream_is_that_of_batches_that_are_sent(machine: Machine, options: dict[str, Any]) -> None:
    options = {"seed": 5} | options
    with (
        made(dataset(), devices=machine.devices, resident=True, **options) as resident,
        made(dataset(), devices=["cpu", "cpu"], **options) as sent,
    ):
        assert stream(resident, machine) == stream(sent)
        assert "resident on privateuseone:0, privateuseone:1" in repr(resident)
    assert machine.faults == []


def test_it_resumes_like_any_other_loader(machine: Machine) -> None:
    def new(**options: Any) -> ShardedDataLoader:
        return made(dataset(), 16, shuffle=True, seed=1, **options)

    with new(devices=machine.devices, resident=True) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = loader.state_dict()
    with new(devices=["cpu", "cpu"]) as sent, new(devices=machine.devices, resident=True) as resident:
        sent.load_state_dict(state)
        resident.load_state_dict(state)
        assert stream(resident, machine) == stream(sent)


def test_no_worker_is_started(machine: Machine, worker_pool: Pool) -> None:
    with ShardedDataLoader(
        dataset(), 16, device=Placement(machine.devices[0], resident="auto"), pool=worker_pool
    ) as loader:
        for _ in loader:
            machine.finish()
        assert not loader.pool.started


def test_each_device_decides_for_itself(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = machine.devices[0]
    monkeypatch.setattr(SimulatedStreams, "memory", lambda self: (1 << 20 if self.device == first else 1000, 1 << 20))
    options: dict[str, Any] = {"batch_size": 16, "shuffle": True, "seed": 3}
    with (
        pytest.warns(UserWarning, match=r"privateuseone:1 does not keep the data \(.* bytes of columns, room for 0\)"),
        made(dataset(), devices=machine.devices, resident=True, **options) as resident,
        made(dataset(), devices=["cpu", "cpu"], **options) as sent,
    ):
        assert stream(resident, machine) == stream(sent)
        assert "resident on privateuseone:0;" in repr(resident).replace(",", ";")
    assert machine.faults == []


def test_a_reserve_is_left_for_the_model(machine: Machine) -> None:
    needed = sum(column.nbytes for column in dataset().columns.values())
    for total, kept in ((needed * 4 // 3 + 10, ""), (needed * 4 // 3 - 10, " (99 of 100 samples)")):
        machine.memory_bytes = (total, total)
        with ShardedDataLoader(dataset(), 16, device=Placement(machine.devices[0], resident="auto")) as loader:
            next(iter(loader))
            assert f"resident on privateuseone:0{kept}, " in repr(loader)


@pytest.mark.parametrize(("resident", "kept"), [(True, True), ("auto", False)])
def test_where_a_device_does_not_tell_its_memory_it_is_tried_if_the_user_insists(
    machine: Machine, resident: Any, kept: bool
) -> None:
    machine.memory_bytes = None
    with ShardedDataLoader(dataset(), 16, device=Placement(machine.devices[0], resident=resident)) as loader:
        batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert ("resident on" in repr(loader)) is kept


def test_auto_says_nothing_where_there_is_no_room_and_reads_with_its_workers(
    machine: Machine, new_pool: Callable[..., Pool]
) -> None:
    machine.memory_bytes = (10, 10)
    with ShardedDataLoader(
        dataset(), 16, device=Placement(machine.devices[0], resident="auto"), pool=new_pool()
    ) as loader:
        batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert loader.pool.started


def test_out_of_memory_while_the_columns_are_copied_falls_back_with_a_message(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = ResidentPool.load

    def load_without_room(pool: ResidentPool, *, again: bool) -> bool:
        machine.blocks = 2  # the third column finds none
        try:
            return load(pool, again=again)
        finally:
            machine.blocks = None

    monkeypatch.setattr(ResidentPool, "load", load_without_room)
    with ShardedDataLoader(dataset(), 16, device=Placement(machine.devices[0], resident="auto")) as loader:
        with pytest.warns(UserWarning, match=r"does not keep the data \(simulated: 2 blocks.*: it is sent batches"):
            batch = next(iter(loader))
        machine.finish()
        assert batch["label"].tolist() == list(range(16))
        assert machine.caches_emptied == 1  # the columns that found room are not in the way of the batches


def test_a_refreshed_dataset_is_copied_again_before_the_next_epoch(machine: Machine) -> None:
    values = np.arange(8)
    with ShardedDataLoader(ArrayDataset(values), 4, device=Placement(machine.devices[0], resident=True)) as loader:
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
    with ShardedDataLoader(
        dataset(), batch_sampler=[[1], [2, 500], [3]], device=Placement(machine.devices[0], resident=True)
    ) as loader:
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
        made(dataset(), pool=worker_pool, resident=True, **options) as resident,
        made(dataset(), **options) as plain,
    ):
        assert stream(resident) == stream(plain)
        assert not resident.pool.started


def test_peek_is_the_first_batch(machine: Machine) -> None:
    with ShardedDataLoader(dataset(), 16, shuffle=True, device=Placement(machine.devices[0], resident=True)) as loader:
        peeked, first = loader.peek(), next(iter(loader))
        machine.finish()
        assert peeked["label"].tolist() == first["label"].tolist()


def test_a_closed_loader_has_no_more_batches(machine: Machine) -> None:
    from sharded_loader import LoaderClosedError

    loader = ShardedDataLoader(dataset(), 16, device=Placement(machine.devices[0], resident=True))
    batches = iter(loader)
    next(batches)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(batches)


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
    assert machine.faults == []


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
    monkeypatch.setattr(SimulatedStreams, "take", take)
    pool.submit([task(5, [1], [2])])
    (result,) = pool.wait()
    assert isinstance(result.error, RuntimeError)
    assert "epoch 0, batch 5" in "\n".join(result.error.__notes__)


def test_rows_are_gathered_on_the_stream_of_the_caller(machine: Machine) -> None:
    device = machine.devices[0]
    mine = machine.new_stream(device)
    with ShardedDataLoader(ArrayDataset(np.arange(8)), 4, device=Placement(device, resident=True)) as loader:
        batches = iter(loader)
        next(batches)
        assert not any(what == "record_use" for what, _ in machine.log)  # the columns are of that stream
        with machine.on(device, mine):
            second = next(batches)
            found: list[Any] = []
            machine.kernel(device, second, lambda values: found.append(values.tolist()))
        machine.finish()
    assert found == [[4, 5, 6, 7]]
    assert ("record_use", mine.name) in machine.log


def test_nothing_is_gathered_ahead_of_its_turn(machine: Machine, worker_pool: Pool) -> None:
    """Two iterators take turns on two streams: each batch belongs to the stream that asks for it."""
    device = machine.devices[0]
    streams = [machine.new_stream(device), machine.new_stream(device)]
    with ShardedDataLoader(
        ArrayDataset(np.arange(12)), 4, device=Placement(device, resident=True), pool=worker_pool, prefetch=4
    ) as loader:
        iterators = [iter(loader), iter(loader)]
        for _ in range(3):
            for batches, stream in zip(iterators, streams, strict=True):
                machine.log.clear()
                with machine.on(device, stream):
                    next(batches)
                assert {name for what, name in machine.log if what in ("allocate", "copy")} == {stream.name}
        machine.finish()


# -- pools change ---------------------------------------------------------------------------------------------


def test_an_epoch_under_way_goes_on_in_the_pool_of_the_next(machine: Machine, new_pool: Callable[..., Pool]) -> None:
    """The devices have lost their room, and later find it again."""
    data, device = ArrayDataset(np.arange(40)), machine.devices[0]
    with ShardedDataLoader(data, 4, device=Placement(device, resident="auto"), pool=new_pool()) as loader:
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
    assert machine.faults == []


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
            patch.setattr(SimulatedStreams, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iter(loader))
        seen += first
        machine.finish()
        assert [batch.tolist() for batch in seen] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


MODULES = ("iterator.py", "loader.py", "pipeline.py", "placement.py", "pool.py")


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interrupt_at_every_line_loses_no_batch(machine: Machine, step: int) -> None:
    data = ArrayDataset(np.arange(2000))
    with ShardedDataLoader(data, 1, device=Placement(machine.devices[0], resident=True)) as loader:
        line, fired, batches, number = 0, True, iter(loader), 0
        while fired:
            line += step
            got, fired = next_interrupted(batches, line, lambda at: InterruptAt(at, MODULES))
            got.append(next(batches))
            machine.finish()
            for batch in got:
                assert batch.tolist() == [number]
                number += 1
        assert sum(what == "allocate" for what, _ in machine.log) <= 1 + 4 * number  # the column came once
    assert machine.faults == []
    assert line > 50
