"""Epochs, iterators, threads, and everything that a loader answers between batches, over every pool."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import pytest
import torch
from conftest import ahead, make_pool
from failures import boom
from inside import pipeline_of
from samples import Bad, Draws, Gate, Noting, Told, wait_for
from torch.utils.data import DistributedSampler

from sharded_loader import (
    ArrayDataset,
    BatchSampler,
    ConcatDataset,
    FixedBucketSampler,
    InlinePool,
    LoaderClosedError,
    Placement,
    ProcessPool,
    RandomSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    ShuffleBuffer,
    SimpleDataset,
    ThreadPool,
    interleave,
)
from sharded_loader.engine.messages import _REPLY, pack_reply
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.codec import Encoded
from sharded_loader.pools.process import transport
from sharded_loader.pools.process.link import CANCEL, Link
from sharded_loader.pools.process.worker import WorkerThreads


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


def test_epoch_and_position_tell_the_epoch_in_progress() -> None:
    loader = ShardedDataLoader(range(20), 6)
    for number, _ in enumerate(loader):
        assert (loader.epoch, loader.position) == (0, number + 1)
    for _ in loader:
        loader.set_epoch(9)  # whatever comes next
        assert (loader.epoch, loader.position) == (1, 1)
        loader.set_epoch(2)
        break
    for change in (lambda: None, lambda: loader.set_epoch(2), lambda: iter(loader)):  # nothing changes
        change()
        assert (loader.epoch, loader.position) == (1, 1)
    next(iter(loader))
    assert (loader.epoch, loader.position) == (2, 1)
    loader.set_epoch(9)
    assert (loader.epoch, loader.position) == (9, 0)


SET_EPOCH: list[Callable[[ShardedDataLoader], Any]] = [
    lambda loader: loader,
    lambda loader: loader.sampler,
    lambda loader: loader.batch_sampler,
    lambda loader: loader.batch_sampler.sampler,
]


@pytest.mark.parametrize("where", SET_EPOCH)
@pytest.mark.parametrize("replicas", [{}, {"num_replicas": 2, "rank": 1}])
def test_set_epoch_works_wherever_libraries_call_it(where: Callable[..., Any], replicas: dict[str, int]) -> None:
    def epochs(count: int) -> list[Any]:
        loader = ShardedDataLoader(range(20), 6, shuffle=True, seed=1, **replicas)
        return [lists(loader) for _ in range(count)]

    expected = epochs(4)
    loader = ShardedDataLoader(range(20), 6, shuffle=True, seed=1, **replicas)
    iterator = iter(loader)
    where(loader).set_epoch(3)
    assert loader.epoch == 3
    assert lists(iterator) == expected[3]
    where(loader).set_epoch(1)
    assert lists(loader) == expected[1]
    assert lists(loader) == expected[2]


@pytest.mark.parametrize("calls_set_epoch", [False, True])
def test_torch_s_distributed_sampler_reads_another_order_every_epoch(calls_set_epoch: bool) -> None:
    def sampler(rank: int) -> DistributedSampler[int]:
        return DistributedSampler(range(20), num_replicas=2, rank=rank, seed=3)  # type: ignore[arg-type]

    loader = ShardedDataLoader(range(20), 5, sampler=sampler(1))
    reference = sampler(1)
    for epoch in range(3):
        if calls_set_epoch:
            loader.sampler.set_epoch(epoch)
        reference.set_epoch(epoch)
        assert sum(lists(loader), []) == list(reference)
    loader.sampler.set_epoch(0)
    reference.set_epoch(0)
    assert sum(lists(loader), []) == list(reference)


@pytest.mark.parametrize("epoch", [-1, 1.5, "1"])
def test_a_wrong_epoch_is_refused(epoch: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="epoch"):
        ShardedDataLoader(range(4), 2).set_epoch(epoch)


def test_an_abandoned_rollover_epoch_changes_nothing(pool: Pool) -> None:
    with ShardedDataLoader(range(10), 4, last_batch="rollover", pool=pool) as loader:
        for _ in loader:
            break
        assert lists(loader) == [[8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]


def test_a_temporary_loader_works_and_ends_with_its_loop(new_pool: Callable[..., Pool]) -> None:
    found = []
    for batch in ShardedDataLoader(range(10), 4, pool=new_pool()):
        found.append(batch.tolist())
    assert found == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    for batch in ShardedDataLoader(range(10), 4, pool=new_pool()):
        assert batch.tolist() == [0, 1, 2, 3]
        break


def test_a_loader_is_freed_without_the_garbage_collector(new_pool: Callable[..., Pool]) -> None:
    gc.collect()
    gc.disable()
    try:
        pool = new_pool()
        loader = ShardedDataLoader(range(10), 4, pool=pool)
        iterator = iter(loader)
        next(iterator)
        alive = weakref.ref(loader)
        del loader, iterator
        assert alive() is None
        assert not (pool.num_workers and pool.started)
    finally:
        gc.enable()
    with ShardedDataLoader(range(10), 4, pool=pool) as again:
        assert [batch.tolist() for batch in again] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_break_cancels_what_has_not_begun() -> None:
    gate = Gate(free=0)
    loader = ahead(ShardedDataLoader(gate, 1, pool=ThreadPool(2), prefetch=50), False)
    iterator = iter(loader)
    next(iterator)
    for _ in range(3):  # the first sample, and the one at which each thread now waits
        gate.begun.acquire()
    del iterator
    gate.open_for_all()
    assert lists(loader) == [[i] for i in range(100)]
    assert gate.reads == 3 + 100
    loader.close()


class ReadsAndWaits(Noting):
    """Samples but the first wait for a file."""

    def __getitem__(self, index: int) -> int:
        super().__getitem__(index)
        if index:
            wait_for(self.path.with_name("go on"))
        return index


@pytest.mark.parametrize("name", ["fork", "spawn"])
def test_break_cancels_what_waits_in_a_worker_process(name: str, tmp_path: Path) -> None:
    read = tmp_path / "read"
    with ShardedDataLoader(ReadsAndWaits(read), 1, pool=make_pool(name, 1), prefetch=3) as loader:
        next(iter(loader))
        loader.set_epoch(0)
        again = iter(loader)
        (tmp_path / "go on").touch()
        assert next(again).tolist() == [0]
    before = read.read_text().split()[1:]
    # What was running ends, what waited does not begin. On a busy machine the worker may hear of it one sample later.
    assert before[: before.index("0")] in ([], ["1"], ["1", "2"])


def test_workers_live_as_long_as_the_loader(process_pool: Any) -> None:
    with ShardedDataLoader(range(8), 2, pool=process_pool) as loader:
        list(loader)
        pids = process_pool.pids
        list(loader)
        assert process_pool.pids == pids
        assert len(set(pids)) == 2


def test_prefetch_bounds_what_is_in_flight_and_may_change() -> None:
    gate = Gate()
    gate.open_for_all()
    loader = ShardedDataLoader(gate, 1, pool=ThreadPool(2), prefetch=3)
    iterator = iter(loader)
    next(iterator)
    for _ in range(4):
        gate.begun.acquire(timeout=300)
    assert not gate.begun.acquire(timeout=0.1)  # one delivered, three in flight
    loader.prefetch = 6
    next(iterator)
    for _ in range(4):
        gate.begun.acquire(timeout=300)
    assert not gate.begun.acquire(timeout=0.1)
    loader.prefetch = None  # type: ignore[assignment]
    assert loader.prefetch == 4
    loader.close()


def test_shard_weights_may_change_and_hold_from_the_next_batch_dispatched(pool: Pool) -> None:
    with ShardedDataLoader(range(100), 10, pool=pool, num_shards=2, prefetch=2) as loader:
        sizes = []
        for number, shards in enumerate(loader):
            sizes.append([len(shard) for shard in shards])
            if number == 2:
                loader.shard_weights = [4, 1]
                assert loader.shard_weights == [4, 1]
            if number == 6:
                with pytest.raises(ValueError, match="weights"):
                    loader.shard_weights = [1, 1, 1]
    assert sizes[:3] == [[5, 5]] * 3
    assert sizes[5:] == [[8, 2]] * 5


def test_an_iterator_has_the_length_of_its_epoch_or_none_and_is_one_all_the_same() -> None:
    """torch's iterators count so, and tqdm asks for it."""
    loader = ShardedDataLoader(range(10), 4, last_batch="rollover")
    assert [len(loader), len(iter(loader))] == [2, 2]
    iterator = iter(loader)
    assert [len(iterator) for _ in iterator] == [2, 2]
    assert [len(loader), len(iter(loader)), len(list(loader))] == [3, 3, 3]
    sampler = type("WithoutLength", (), {"__iter__": lambda self: iter(range(3))})()
    iterator = iter(ShardedDataLoader(range(4), 2, sampler=sampler))
    with pytest.raises(TypeError, match="WithoutLength, has no length"):
        len(iterator)
    assert iterator and lists(iterator) == [[0, 1], [2]]
    assert iter(ShardedDataLoader([], 2))


def test_peek_is_the_first_batch_and_changes_nothing(pool: Pool) -> None:
    with ShardedDataLoader(range(20), 6, shuffle=True, seed=4, pool=pool, num_shards=2) as loader:
        peeked = [shard.tolist() for shard in loader.peek()]
        assert not pool.started
        assert (loader.epoch, loader.position) == (0, 0)
        assert [shard.tolist() for shard in next(iter(loader))] == peeked
    with pytest.raises(IndexError, match="no batches"):
        ShardedDataLoader([], 2).peek()
    with pytest.raises(Exception, match="went wrong"):
        ShardedDataLoader(Bad(boom), 8).peek()


def test_read_gives_a_sample_of_any_epoch(new_pool: Callable[..., Pool]) -> None:
    with ShardedDataLoader(Draws(), 20, seed=9, pool=new_pool()) as loader:
        for epoch in range(2):
            (own, tensor, shared), *_ = [next(iter(loader))]
            sample = loader.read(7, epoch=epoch)
            np.testing.assert_array_equal(sample[0], own[7])
            assert torch.equal(sample[1], tensor[7])
            np.testing.assert_array_equal(sample[2], shared[7])


def test_repr_tells_what_is_read_and_where_the_loader_is() -> None:
    loader = ShardedDataLoader(ArrayDataset(image=np.zeros((10, 3)), label=np.arange(10)), 4, devices=["cpu", "cpu"])
    next(iter(loader))
    for part in ("10 samples", "3 batches of 4", "on cpu, cpu", "InlinePool()", "epoch 0, at batch 1"):
        assert part in repr(loader)


def test_a_torch_dataset_sampler_and_batch_sampler_work_as_they_are(pool: Pool) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10.0))
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SubsetRandomSampler([1, 3, 5, 7]), 2, False)
    with ShardedDataLoader(data, batch_sampler=sampler, pool=pool, seed=1) as loader:
        first = [[part.tolist() for part in batch] for batch in loader]
        assert sorted(sum((batch[0] for batch in first), [])) == [1, 3, 5, 7]
        assert all([float(i) for i in batch[0]] == batch[1] for batch in first)
        loader.set_epoch(0)
        assert [[part.tolist() for part in batch] for batch in loader] == first


def test_own_samplers_decide_shards(pool: Pool) -> None:
    sampler = ShardedBatchSampler(BatchSampler(RandomSampler(20, seed=1), 6), 2, costs=list(range(20)))
    with ShardedDataLoader(range(20), batch_sampler=sampler, pool=pool, devices=["cpu", "cpu"]) as loader:
        batches = [[shard.tolist() for shard in shards] for shards in loader]
    assert sorted(i for shards in batches for shard in shards for i in shard) == list(range(20))
    assert all(len(shards) == 2 for shards in batches)


@pytest.mark.parametrize("last_batch", ["keep", "discard"])
@pytest.mark.parametrize("length", [0, 3, 10, 11, 12])
def test_ranks_share_the_order_as_torch_s_distributed_sampler_does(last_batch: str, length: int) -> None:
    order = sum(lists(ShardedDataLoader(range(length), 1, shuffle=True, seed=0)), [])

    for rank in range(4):
        reference = DistributedSampler(range(length), 4, rank, shuffle=False, drop_last=last_batch == "discard")
        loader = ShardedDataLoader(range(length), 1, shuffle=True, num_replicas=4, rank=rank, last_batch=last_batch)
        assert sum(lists(loader), []) == ([order[i] for i in reference] if length else [])


def test_batches_of_a_batch_sampler_are_dealt_out_too() -> None:
    batches = [[0, 1], [2], [3, 4]]
    found = [lists(ShardedDataLoader(range(5), batch_sampler=batches, num_replicas=2, rank=rank)) for rank in range(2)]
    assert found == [[[0, 1], [3, 4]], [[2], [0, 1]]]


def test_a_dataset_with_set_epoch_is_told(pool: Pool) -> None:
    with ShardedDataLoader(Told(), 4, pool=pool) as loader:
        for epoch in range(3):
            assert sum(lists(loader), []) == [100 * epoch + i for i in range(12)]
        loader.set_epoch(7)
        assert loader.peek().tolist() == [700, 701, 702, 703]
        assert loader.read(3, epoch=5) == 503
        assert sum(lists(loader), []) == [700 + i for i in range(12)]


WRAPPED: dict[str, Any] = {
    "transform": lambda inside: SimpleDataset(inside).transform(abs).take(12),
    "concatenated": lambda inside: ConcatDataset([inside, range(4)]),
    "mixture": lambda inside: interleave([inside, [0] * 12], weights=[1, 1], seed=1),
    "stream": lambda inside: interleave([Flow(inside)]),
    "buffer": lambda inside: ShuffleBuffer(Flow(inside), 2, seed=1),
}


class Flow:
    """An iterable dataset that passes the epoch on."""

    def __init__(self, inside: Any) -> None:
        self.flows, self.set_epoch = inside, inside.set_epoch

    def __iter__(self) -> Any:
        return (self.flows[i] for i in range(12))


@pytest.mark.parametrize("kind", WRAPPED)
def test_set_epoch_of_a_dataset_inside_another_is_heard(kind: str) -> None:
    dataset = Told()
    outside = WRAPPED[kind](dataset)
    with ShardedDataLoader(outside, 4) as loader, ShardedDataLoader(dataset, 4) as other:
        list(loader)
        told = outside._inside[0] if kind in ("stream", "buffer") else dataset
        told.set_epoch(5)
        for epoch in (5, 6):
            assert max(sum(lists(loader), [])) // 100 == epoch
        outside.set_epoch(2)
        assert max(sum(lists(loader), [])) // 100 == 2
        if kind not in ("stream", "buffer"):  # there, `Flow` tells the dataset
            assert other.epoch == 5  # the calls of another loader are not heard


def test_where_there_is_one_dataset_it_can_be_in_one_epoch_only(pool: Pool) -> None:
    with ShardedDataLoader(Told(), 4, pool=pool) as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        assert next(old).tolist() == [4, 5, 6, 7]  # the new one has begun nothing yet
        assert next(new).tolist() == [100, 101, 102, 103]
        if pool.shares_dataset:
            with pytest.raises(RuntimeError, match="epoch 0 cannot go on: epoch 1 was begun"):
                next(old)
        else:
            assert next(old).tolist() == [8, 9, 10, 11]


def test_a_loader_with_processes_in_a_worker_process_is_a_clear_error(process_pool: Any) -> None:
    def nested(index: int) -> Any:
        (inner,) = ShardedDataLoader(range(4), 4, num_workers=index, pool=None if index else "inline")
        return inner

    with ShardedDataLoader(SimpleDataset(range(2)).transform(nested), 1, pool=process_pool) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [[0, 1, 2, 3]]
        with pytest.raises(RuntimeError, match="a worker process, which may have none of its own.*num_workers=0"):
            next(iterator)


def test_loaders_may_nest() -> None:
    outer = SimpleDataset(range(3)).transform(lambda i: sum(int(b.sum()) for b in ShardedDataLoader(range(i + 1), 2)))
    assert lists(ShardedDataLoader(outer, 3)) == [[0, 1, 3]]


def test_read_and_peek_leave_the_epoch_that_threads_read_alone() -> None:
    with ShardedDataLoader(Told(), 1, pool=ThreadPool(2)) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(RuntimeError, match="cannot read in epoch 7 while threads read epoch 0"):
            loader.read(0, epoch=7)
        with pytest.raises(RuntimeError, match="cannot read in epoch 1"):
            loader.peek()
        assert loader.read(3) == 3
        assert sum(lists(iterator), []) == list(range(1, 12))
        assert loader.peek().tolist() == [100]


def test_an_older_iterator_goes_on_after_refresh(pool: Pool) -> None:
    data = list(range(8))
    with ShardedDataLoader(data, 2, pool=pool) as loader:
        old = iter(loader)
        assert next(old).tolist() == [0, 1]
        data.append(8)
        loader.refresh()
        new = iter(loader)
        assert next(new).tolist() == [0, 1]
        assert lists(old) == [[2, 3], [4, 5], [6, 7]]
        assert lists(new) == [[2, 3], [4, 5], [6, 7], [8]]


def test_refresh_keeps_the_epoch_that_a_sampler_was_told() -> None:
    loader = ShardedDataLoader(range(8), 2, shuffle=True, seed=1)
    loader.sampler.set_epoch(5)
    loader.refresh()
    assert loader.epoch == 5


class Silent(list[int]):
    """A sampler that is told its epoch and does not show it."""

    def set_epoch(self, epoch: int) -> None:
        self[:] = [(i + epoch) % 10 for i in range(4)]


def test_a_sampler_that_does_not_show_its_epoch_is_listened_to() -> None:
    loader = ShardedDataLoader(range(10), 4, sampler=Silent(range(4)))
    assert lists(loader) == [[0, 1, 2, 3]]
    assert lists(loader) == [[1, 2, 3, 4]]
    loader.sampler.set_epoch(5)
    assert loader.epoch == 5
    assert lists(loader) == [[5, 6, 7, 8]]
    assert lists(loader) == [[6, 7, 8, 9]]


def test_set_epoch_reaches_through_nested_samplers() -> None:
    inner = DistributedSampler(range(12), num_replicas=2, rank=0, seed=1)  # type: ignore[arg-type]
    batches = torch.utils.data.BatchSampler(inner, 2, False)
    loader = ShardedDataLoader(range(12), batch_sampler=ShardedBatchSampler(batches, 2))
    assert loader.sampler is inner

    def epoch() -> list[int]:
        return [int(i) for shards in loader for shard in shards for i in shard]

    first, second = epoch(), epoch()
    assert first != second
    loader.sampler.set_epoch(0)
    assert (loader.epoch, epoch()) == (0, first)


def test_weights_hold_from_the_next_batch_dispatched_not_planned() -> None:
    loader = ShardedDataLoader(range(400), 10, pool=ThreadPool(1), num_shards=2, prefetch=1)
    iterator = iter(loader)
    loader.prefetch = 30
    next(iterator)
    loader.shard_weights = [9, 1]
    sizes = [[len(shard) for shard in shards] for shards in iterator]
    assert sizes[-1] == [9, 1]
    loader.close()


def test_indices_of_a_sampler_are_indices_tuples_too() -> None:
    class Grid:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, place: tuple[int, int]) -> int:
            return 10 * place[0] + place[1]

    loader = ShardedDataLoader(Grid(), 2, sampler=[(0, 1), (1, 2), (2, 0)])
    assert lists(loader) == [[1, 12], [20]]


def test_a_share_of_0_must_come_last() -> None:
    with pytest.raises(ValueError, match="come last"):
        ShardedDataLoader(range(4), 2, num_shards=2, device=Placement(shard_weights=[0, 1]))
    assert [
        len(shards) for shards in ShardedDataLoader(range(4), 2, num_shards=2, device=Placement(shard_weights=[1, 0]))
    ] == [1, 1]


def test_auto_is_not_settled_before_the_first_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = ShardedDataLoader(range(10), 5, num_replicas="auto")
    assert (len(loader), "2 batches" in repr(loader)) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert len(loader) == 1
    iterator = iter(loader)
    assert next(iterator).tolist() == [1, 3, 5, 7, 9]
    monkeypatch.delenv("WORLD_SIZE")
    assert (len(loader), lists(loader)) == (1, [[1, 3, 5, 7, 9]])
    with pytest.raises(ValueError, match="rank"):
        ShardedDataLoader(range(10), 5, num_replicas="auto", rank=1)


class SignalsAndWaits(Noting):
    """A sample sends a signal to the main thread of the trainer, and waits for a file, unless that thread reads it."""

    trainer = 0

    def __getitem__(self, index: int) -> int:
        if os.getpid() == self.trainer and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGALRM)
        else:
            os.kill(self.trainer, signal.SIGALRM)
            wait_for(self.path)
        return index


@pytest.mark.parametrize("kind", ["inline", "thread", "fork", "spawn"])
@pytest.mark.costly(2)
def test_close_in_a_signal_handler_ends_the_wait(kind: str, tmp_path: Path) -> None:
    dataset = SignalsAndWaits(tmp_path / "closed")
    dataset.trainer = os.getpid()
    loader = ShardedDataLoader(dataset, 1, pool=make_pool(kind))

    def close(*_: Any) -> None:
        loader.close()
        dataset.path.touch()

    before = signal.signal(signal.SIGALRM, close)
    try:
        with pytest.raises(LoaderClosedError):
            list(loader)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"sampler": RandomSampler(100), "batch_size": 5},
        lambda: {"batch_sampler": BatchSampler(RandomSampler(100), 5)},
        lambda: {"batch_sampler": FixedBucketSampler(list(range(1, 101)), 5, shuffle=True)},
    ],
)
def test_ranks_agree_on_the_order_of_samplers_that_were_given_no_seed(make: Callable[[], dict[str, Any]]) -> None:
    parts = [lists(ShardedDataLoader(range(100), num_replicas=2, rank=rank, **make())) for rank in range(2)]
    assert sorted(set(sum(parts[0] + parts[1], []))) == list(range(100))
    again = [lists(ShardedDataLoader(range(100), seed=7, **make())) for _ in range(2)]
    assert again[0] == again[1]


def test_an_epoch_that_a_sampler_was_told_before_counts() -> None:
    sampler = DistributedSampler(range(20), num_replicas=2, rank=0, seed=3)  # type: ignore[arg-type]
    sampler.set_epoch(3)
    loader = ShardedDataLoader(range(20), 5, sampler=sampler)
    assert loader.epoch == 3
    expected = list(sampler)
    assert sum(lists(loader), []) == expected


@pytest.mark.slow
def test_ranks_that_would_repeat_each_other_are_warned_once(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, warnings
        import torch.distributed as dist
        from sharded_loader import ShardedDataLoader, SplitSampler
        rank = int(sys.argv[1])
        dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
        def count(**options):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = ShardedDataLoader(range(10), 5, **options)
                batches = [batch.tolist() for _ in range(2) for batch in loader]
            return sum("one of 2 ranks" in str(w.message) for w in caught), batches[0]
        assert count(sampler=SplitSampler(10, 2, rank))[0] == 0  # which shares out too
        print(count()[0], count(num_replicas=1)[0], *count(num_replicas="auto"))
        dist.barrier()
        dist.destroy_process_group()
        """)
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "meet")], stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    answers = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert answers == ["1 0 0 [0, 2, 4, 6, 8]\n", "1 0 0 [1, 3, 5, 7, 9]\n"]


THREADS = 4


@pytest.fixture
def threads_that_take_turns_often() -> Iterator[None]:
    """A thread may lose its turn between any two lines, as on a busy machine with many cores."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns for the number of each thread, or raises."""
    found: list[Any] = [None] * THREADS
    begin = threading.Barrier(THREADS)

    def run(number: int) -> None:
        begin.wait()
        try:
            found[number] = work(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def loops_of(pool: Pool) -> int:
    return 400 if isinstance(pool, InlinePool) else 40


@pytest.mark.usefixtures("threads_that_take_turns_often")
@pytest.mark.costly
def test_each_loop_of_each_thread_is_an_epoch_of_its_own(pool: Pool) -> None:
    count = loops_of(pool) // 4
    data = ArrayDataset(np.arange(12))
    with ShardedDataLoader(data, 4, shuffle=True, seed=3) as alone:
        epochs = [[batch.tolist() for batch in alone] for _ in range(count * THREADS)]
    with ShardedDataLoader(data, 4, shuffle=True, seed=3, pool=pool) as loader:
        found = in_threads(lambda number: [[batch.tolist() for batch in loader] for _ in range(count)])
    assert [one for one in found if isinstance(one, BaseException)] == []
    assert sorted(epoch for loops in found for epoch in loops) == sorted(epochs)


@pytest.mark.usefixtures("threads_that_take_turns_often")
@pytest.mark.costly
def test_threads_that_break_off_and_threads_that_go_on_do_not_disturb_each_other(pool: Pool) -> None:
    count = loops_of(pool)
    with ShardedDataLoader(range(12), 2, pool=pool, prefetch=3) as loader:

        def work(number: int) -> int:
            for turn in range(count):
                got = []
                for batch in loader:
                    got += batch.tolist()
                    if number % 2 and len(got) > turn % 10:
                        break
                assert got == list(range(len(got))) and (number % 2 or len(got) == 12), got
            return count

        assert in_threads(work) == [count] * THREADS


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_fork_while_other_threads_make_pools_keeps_what_is_lent() -> None:
    """What the library does before a fork is done although the set of pools changes meanwhile."""
    done = threading.Event()

    def make_pools() -> None:
        while not done.is_set():
            _ = [ProcessPool(1) for _ in range(50)]

    makers = [threading.Thread(target=make_pools) for _ in range(2)]
    for maker in makers:
        maker.start()
    try:
        for _ in range(2500):
            transport._before_fork()
    finally:
        done.set()
        for maker in makers:
            maker.join()


def test_threads_remember_only_the_runs_that_are_alive() -> None:
    with ShardedDataLoader(range(8), 2, pool=ThreadPool(1)) as loader:
        for _ in range(5):
            for _ in loader:
                break
        held = iter(loader)
        next(held)
        (shared,) = loader.pool._running  # type: ignore[attr-defined]
        assert shared.live == {held.run.number}


def test_a_worker_forgets_a_cancelled_run_when_its_tasks_are_dropped() -> None:
    ours, theirs = (Link(end, blocks=True) for end in multiprocess.Pipe())
    worker = WorkerThreads(theirs, 0, 1)
    worker._finished.set()
    for run in range(5):
        ours.send(CANCEL, run)
    ours.close()
    worker.run(None)  # until the pipe's end
    theirs.close()
    assert not worker._reader.cancelled


def test_an_iterator_may_be_collected_while_another_one_is_dropped(new_pool: Callable[[], Pool]) -> None:
    pool = new_pool()
    with ShardedDataLoader(range(40), 2, prefetch=2, pool=pool) as loader:
        first, second = iter(loader), iter(loader)
        next(first), next(second)
        pipeline_of(loader).runs[first.run.number].window.append(Collects())  # type: ignore[arg-type]
        second.itself = second  # type: ignore[attr-defined]
        gc.disable()
        try:
            del second
            pipeline_of(loader).drop(first.run.number)
        finally:
            gc.enable()
        assert not pipeline_of(loader).dropped
        assert len(list(loader)) == 20


class Collects:
    """The collector comes when this goes."""

    begun = None

    def __del__(self) -> None:
        gc.collect()


def test_a_reply_may_hold_more_than_four_gigabytes() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 5 << 30

    reply = pack_reply(1, 2, 3, Encoded(Huge(), (), ()))
    assert _REPLY.unpack_from(reply)[-1] == 5 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inline", "thread", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_signal_handler_may_ask_how_far_it_is_at_any_line(name: str) -> None:
    """As one for SIGUSR1 does, which prints the counts, or for SIGTERM, which saves the state."""
    asked = 0

    def ask(frame: Any, event: str, argument: Any) -> Any:
        nonlocal asked
        if event == "line" and not asking:
            asked += 1
            asking.append(True)
            loader.stats(), loader.state_dict(), repr(loader), len(loader)
            asking.clear()
        return ask if "sharded_loader" in frame.f_code.co_filename else None

    def loop() -> None:
        sys.settrace(ask)
        for batch in loader:
            got.append(batch.tolist())
        sys.settrace(None)

    asking: list[bool] = []
    got: list[list[int]] = []
    with ShardedDataLoader(range(8), 2, pool=make_pool(name)) as loader:
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        thread.join(300)
        assert not thread.is_alive()
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert asked > 200
