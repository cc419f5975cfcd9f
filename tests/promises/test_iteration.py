"""Epochs, the next one read ahead, threads, and all that a loader answers between batches, over every pool."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, ahead, begin, covering, make_pool
from failures import boom
from inside import pipeline_of
from samples import Bad, Draws, Foreign, Gate, Noting, Told, wait_for
from test_resume import SAMPLERS, sampled
from torch.utils.data import DistributedSampler

from sharded_loader import (
    ArrayDataset,
    BatchSampler,
    ConcatDataset,
    FixedBucketSampler,
    InlinePool,
    LoaderClosedError,
    LoaderWarning,
    Placement,
    ProcessPool,
    RandomSampler,
    Sampler,
    ShardedDataLoader,
    ShuffleBuffer,
    SimpleDataset,
    ThreadPool,
    WeightedRandomSampler,
    interleave,
)
from sharded_loader.engine.messages import _REPLY, pack_reply
from sharded_loader.engine.pipeline import Run
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.codec import Encoded
from sharded_loader.pools.process import transport
from sharded_loader.pools.process.link import CANCEL, Link
from sharded_loader.pools.process.worker import WorkerThreads


def lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in one] if isinstance(one, list) else one.tolist() for one in batches]


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


@pytest.mark.parametrize("where", ["", "sampler", "batch_sampler", "batch_sampler.sampler"])
@pytest.mark.parametrize("replicas", [{}, {"num_replicas": 2, "rank": 1}])
def test_set_epoch_works_wherever_libraries_call_it(where: str, replicas: dict[str, int]) -> None:
    def epochs(count: int) -> list[Any]:
        loader = ShardedDataLoader(range(20), 6, shuffle=True, seed=1, **replicas)
        return [lists(loader) for _ in range(count)]

    expected = epochs(4)
    loader = ShardedDataLoader(range(20), 6, shuffle=True, seed=1, **replicas)
    iterator = iter(loader)
    operator.attrgetter(where)(loader).set_epoch(3) if where else loader.set_epoch(3)
    assert loader.epoch == 3
    assert lists(iterator) == expected[3]
    operator.attrgetter(where)(loader).set_epoch(1) if where else loader.set_epoch(1)
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
    reference.set_epoch(3)  # before a loader has it
    assert sum(lists(ShardedDataLoader(range(20), 5, sampler=reference)), []) == list(reference)


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
        loader = ahead(ShardedDataLoader(range(10), 4, pool=pool), True)
        list(loader)  # what is read ahead goes with it
        iterator = iter(loader)
        next(iterator)
        alive = weakref.ref(loader)
        del loader, iterator
        assert alive() is None
        assert not (pool.num_workers and pool.started)
    finally:
        gc.enable()
    with ShardedDataLoader(range(10), 4, pool=pool) as again:
        assert lists(again) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


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


@pytest.mark.parametrize("name", ["fork", "spawn"])
def test_break_cancels_what_waits_in_a_worker_process(name: str, tmp_path: Path) -> None:
    read, go_on = tmp_path / "read", tmp_path / "go on"
    dataset = SimpleDataset(Noting(read)).transform(lambda index: wait_for(go_on) or index if index else index)
    with ShardedDataLoader(dataset, 1, pool=make_pool(name, 1), prefetch=3) as loader:
        next(iter(loader))
        loader.set_epoch(0)
        again = iter(loader)
        go_on.touch()
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


def test_peek_at_nothing_or_at_an_error_is_that_error() -> None:
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
    loader.load_state_dict(loader.state_dict())
    assert "epoch 0, resumes at batch 1" in repr(loader) and (len(loader), len(iter(loader))) == (3, 3)


def test_a_torch_dataset_sampler_and_batch_sampler_work_as_they_are(pool: Pool) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10), torch.arange(10.0))
    sampler = torch.utils.data.BatchSampler(torch.utils.data.SubsetRandomSampler([1, 3, 5, 7]), 2, False)
    with ShardedDataLoader(data, batch_sampler=sampler, pool=pool, seed=1) as loader:
        first = [[part.tolist() for part in batch] for batch in loader]
        assert sorted(sum((batch[0] for batch in first), [])) == [1, 3, 5, 7]
        assert all([float(i) for i in batch[0]] == batch[1] for batch in first)
        loader.set_epoch(0)
        assert [[part.tolist() for part in batch] for batch in loader] == first


@pytest.mark.filterwarnings("ignore:.*the whole epoch had fewer than a batch")
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


@pytest.mark.parametrize("kind", ["inline", "thread", "fork", "spawn"])
@pytest.mark.costly(2)
def test_close_in_a_signal_handler_ends_the_wait(kind: str, tmp_path: Path) -> None:
    closed, trainer = tmp_path / "closed", os.getpid()

    def signals_and_waits(index: int) -> int:
        if os.getpid() == trainer and threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGALRM)
        else:
            os.kill(trainer, signal.SIGALRM)
            wait_for(closed)
        return index

    loader = ShardedDataLoader(SimpleDataset(range(12)).transform(signals_and_waits), 1, pool=make_pool(kind))

    def close(*_: Any) -> None:
        loader.close()
        closed.touch()

    before = signal.signal(signal.SIGALRM, close)
    try:
        with pytest.raises(LoaderClosedError):
            list(loader)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("kind", ["thread", "fork"])
def test_what_a_signal_handler_raises_passes_even_if_it_has_closed_the_loader(kind: str, tmp_path: Path) -> None:
    loader = ShardedDataLoader(SimpleDataset([tmp_path / "closed"]).transform(wait_for), 1, pool=make_pool(kind))

    def close(*_: Any) -> None:
        (tmp_path / "closed").touch()
        loader.close()
        raise TimeoutError("too slow")

    before = signal.signal(signal.SIGALRM, close)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(TimeoutError, match="too slow"):
            list(loader)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
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


def test_ranks_of_the_environment_that_would_repeat_each_other_are_warned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    loader = ShardedDataLoader(range(4), 2)
    with pytest.warns(LoaderWarning, match="one of 2 ranks") as warned:
        assert lists(loader) == lists(loader)
    assert len(warned) == 1


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
    """What ``work`` returns for the number of each thread."""
    begin = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(lambda number: begin.wait() >= 0 and work(number), range(THREADS)))


def loops_of(pool: Pool) -> int:
    return 400 if isinstance(pool, InlinePool) else 40


@pytest.mark.usefixtures("threads_that_take_turns_often")
@pytest.mark.costly
def test_each_loop_of_each_thread_is_an_epoch_of_its_own(pool: Pool) -> None:
    count = loops_of(pool) // 4
    data = ArrayDataset(np.arange(12))
    with ShardedDataLoader(data, 4, shuffle=True, seed=3) as alone:
        epochs = [lists(alone) for _ in range(count * THREADS)]
    with ShardedDataLoader(data, 4, shuffle=True, seed=3, pool=pool) as loader:
        found = in_threads(lambda number: [lists(loader) for _ in range(count)])
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
@pytest.mark.usefixtures("threads_that_take_turns_often")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_fork_while_other_threads_make_pools_keeps_what_is_lent() -> None:
    """What the library does before a fork is done although the set of pools changes meanwhile."""
    in_threads(lambda number: [ProcessPool(1) if number else transport._before_fork() for _ in range(1000)])


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
        collects = type("Collects", (), {"begun": None, "__del__": lambda self: gc.collect()})()
        pipeline_of(loader).runs[first.run.number].window.append(collects)
        del collects
        second.itself = second  # type: ignore[attr-defined]
        gc.disable()
        try:
            del second
            pipeline_of(loader).drop(first.run.number)
        finally:
            gc.enable()
        assert not pipeline_of(loader).dropped
        assert len(list(loader)) == 20


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


WITH_WORKERS = ["thread", *PROCESS_POOLS]
LENGTH = 22


class Notes:
    """Notes which samples are read, in this process."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length, self.known = length, True
        self.read: list[int] = []
        self.come = threading.Condition()

    def __len__(self) -> int:
        if not self.known:
            raise OSError("the file is not there")
        return self.length

    def __getitem__(self, index: int) -> int:
        with self.come:
            self.read.append(index)
            self.come.notify_all()
        return index

    def wait_for(self, count: int) -> None:
        with self.come:
            assert self.come.wait_for(lambda: len(self.read) >= count, 30)


def run_ahead(loader: ShardedDataLoader) -> Run | None:
    """The run that is read ahead."""
    return next((run for run in pipeline_of(loader).runs.values() if run.is_ahead), None)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    **SAMPLERS,
    "rank, rollover": lambda: {**SAMPLERS["ranks"](), "last_batch": "rollover"},
    "split": lambda: {"batch_size": 4, "shuffle": True, "num_shards": 2},
    "steps": lambda: {"batch_size": 4, "shuffle": True, "steps_per_epoch": 3},
    "one batch": lambda: {"batch_size": 40, "shuffle": True},
}


@covering(1, pool=WITH_WORKERS, order=ORDERS, prefetch=[1, None, 50])
def test_batches_are_the_same_with_and_without(pool: str, order: str, prefetch: int | None) -> None:
    expected = sampled(order, ORDERS)
    with ahead(sampled(order, ORDERS, prefetch=prefetch, pool=make_pool(pool)), True) as loader:
        for _ in range(4):
            assert lists(loader) == lists(expected)
            assert (loader.epoch, loader.position) == (expected.epoch, expected.position)
            assert loader.state_dict() == expected.state_dict()


def test_the_next_epoch_is_read_before_it_begins() -> None:
    data = Notes()
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(2), prefetch=4), True) as loader:
        iterator = iter(loader)
        for _ in range(LENGTH // 2):
            next(iterator)
        data.wait_for(LENGTH + 8)  # the last batch is in the user's hands: all that is in flight is of the next epoch
        assert data.read.count(0) == 2 and (loader.epoch, loader.position) == (0, LENGTH // 2)
        assert next(iterator, None) is None
        assert (loader.epoch, loader.position) == (1, 0)
        assert lists(loader) == [[i, i + 1] for i in range(0, LENGTH, 2)]
        data.wait_for(2 * LENGTH + 8)
        assert data.read.count(0) == 3  # what was read ahead is not read again


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_in_flight_than_prefetch_says(prefetch: int) -> None:
    gate = Gate()
    loader = ahead(ShardedDataLoader(gate, 10, pool=ThreadPool(1), prefetch=prefetch), True)
    loader.pool.group = 8  # however cheap batches are
    iterator = iter(loader)
    for number in range(10):
        for _ in range(10):
            gate.opened.release()
        next(iterator)
        in_flight = sum(len(run.window) for run in pipeline_of(loader).runs.values())
        assert in_flight <= prefetch, number
    found = run_ahead(loader)
    assert found is not None and len(found.window) == prefetch
    gate.open_for_all()
    loader.close()


def test_by_default_processes_read_ahead_and_threads_do_not() -> None:
    for pool, expected in (("inline", False), ("thread", False), *((name, True) for name in PROCESS_POOLS[:1])):
        with ShardedDataLoader(range(8), 2, pool=make_pool(pool)) as loader:
            assert loader.prefetch_epochs == expected
            lists(loader)
            assert (run_ahead(loader) is not None) == expected
            loader.prefetch_epochs = not expected
            lists(loader)
            assert (run_ahead(loader) is not None) == (not expected and pool != "inline")


def shuffled(epoch: int, seed: int = 5, **options: Any) -> list[Any]:
    loader = ShardedDataLoader(range(LENGTH), 4, True, seed=seed, **options)
    loader.set_epoch(epoch)
    return lists(loader)


@pytest.mark.parametrize("pool", WITH_WORKERS)
def test_another_epoch_is_another_epoch(pool: str) -> None:
    with ahead(ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(pool)), True) as loader:
        assert lists(loader) == shuffled(0)
        loader.set_epoch(7)
        assert lists(loader) == shuffled(7)
        loader.set_epoch(8)
        assert run_ahead(loader) is not None
        assert lists(loader) == shuffled(8)
        loader.sampler.set_epoch(3)
        assert lists(loader) == shuffled(3)
        assert lists(loader) == shuffled(4)
        assert len(pipeline_of(loader).runs) <= 1


@pytest.mark.parametrize("pool", ["thread", *PROCESS_POOLS[:1]])
def test_a_state_that_is_loaded_counts(pool: str) -> None:
    with ahead(ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(pool)), True) as loader:
        iterator = iter(loader)
        first = lists([next(iterator), next(iterator)])
        state = loader.state_dict()
        rest = lists(iterator)
        assert first + rest == shuffled(0)
        loader.load_state_dict(state)
        assert lists(loader) == rest
        assert lists(loader) == shuffled(1)
        other = ShardedDataLoader(range(LENGTH), 4, True, seed=9)
        loader.load_state_dict(other.state_dict())
        assert lists(loader) == shuffled(0, seed=9)


@pytest.mark.parametrize("pool", ["thread", *PROCESS_POOLS])
def test_refresh_shows_the_dataset_as_it_is(pool: str) -> None:
    data = [np.zeros(2) for _ in range(12)]
    with ahead(ShardedDataLoader(data, 4, pool=make_pool(pool)), True) as loader:
        assert {value for batch in lists(loader) for row in batch for value in row} == {0}
        data[:] = [np.ones(2) for _ in range(12)]
        loader.refresh()
        assert {value for batch in lists(loader) for row in batch for value in row} == {1}
        data += [np.ones(2)] * 4
        loader.refresh()
        assert sum(map(len, lists(loader))) == 16


def test_what_decides_the_batches_may_change_until_the_epoch_begins() -> None:
    weights = np.ones(LENGTH)
    batches = BatchSampler(WeightedRandomSampler(weights, 12, seed=1), 4)
    with ahead(
        ShardedDataLoader(range(LENGTH), batch_sampler=batches, pool=ThreadPool(2), num_shards=2), True
    ) as loader:
        assert [[len(part) for part in batch] for batch in lists(loader)] == [[2, 2]] * 3
        assert run_ahead(loader) is not None
        loader.shard_weights = [3, 1]
        assert [[len(part) for part in batch] for batch in lists(loader)] == [[3, 1]] * 3
        batches.batch_size = 6
        assert [len(batch[0]) for batch in lists(loader)] == [5, 5]
        batches.sampler.seed = 2  # type: ignore[attr-defined]
        fresh = ShardedDataLoader(
            range(LENGTH),
            batch_sampler=BatchSampler(WeightedRandomSampler(weights, 12, seed=2), 6),
            num_shards=2,
            device=Placement(shard_weights=[3, 1]),
        )
        fresh.set_epoch(3)
        assert lists(loader) == lists(fresh)


class Curriculum(Sampler[int]):
    """A user's sampler, whose order the training loop decides on between epochs."""

    count = 8

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return iter(range(start, self.count))

    def len_epoch(self, epoch: int) -> int:
        return self.count


def test_samplers_of_others_are_not_asked_before_their_epoch() -> None:
    begun: list[None] = []
    sampler = Foreign(lambda: begun.append(None) or range(8), 8)
    with ahead(ShardedDataLoader(range(8), 2, sampler=sampler, pool=ThreadPool(2)), True) as loader:
        for epoch in range(3):
            lists(loader)
            assert len(begun) == epoch + 1 and run_ahead(loader) is None
    order = list(range(8))
    with ahead(ShardedDataLoader(range(8), 2, sampler=order, pool=ThreadPool(2)), True) as loader:
        lists(loader)
        order.reverse()
        assert lists(loader) == [[7, 6], [5, 4], [3, 2], [1, 0]]
    own = Curriculum()
    with ahead(ShardedDataLoader(range(8), 2, sampler=own, pool=ThreadPool(2)), True) as loader:
        lists(loader)
        own.count = 4
        assert lists(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("pool", WITH_WORKERS)
def test_a_dataset_that_is_told_the_epoch_is_in_one_at_a_time(pool: str) -> None:
    data = Told()
    with ahead(ShardedDataLoader(data, 2, pool=make_pool(pool)), True) as loader:
        for epoch in range(4):
            assert lists(loader) == [[100 * epoch + i, 100 * epoch + i + 1] for i in range(0, 12, 2)]
        assert (run_ahead(loader) is None) == (pool == "thread")


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_workers_that_are_killed_between_two_epochs_lose_no_batch(method: str) -> None:
    with ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(method)) as loader:
        for epoch in range(3):
            assert lists(loader) == shuffled(epoch)
            for pid in loader.pool.pids:  # type: ignore[attr-defined]
                with contextlib.suppress(ProcessLookupError):  # killed before, and not missed since: all was read ahead
                    os.kill(pid, signal.SIGKILL)


def test_what_was_dropped_is_not_read_on_by_the_epoch_before_it() -> None:
    data = Notes(40)
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(1), prefetch=8), True) as loader:
        one = iter(loader)
        first = lists([next(one) for _ in range(16)])
        dropped = run_ahead(loader)
        assert dropped is not None
        loader.set_epoch(5)
        other = iter(loader)
        second = lists([next(other)])
        assert not dropped.window and not dropped.is_ahead
        first += lists(one)
        assert not dropped.window and dropped.number not in pipeline_of(loader).runs
        assert first == second + lists(other)


def test_what_cannot_be_asked_yet_is_no_error_of_this_epoch() -> None:
    data = Notes()
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(2)), True) as loader:
        iterator = iter(loader)
        found = lists([next(iterator)])
        data.known = False
        found += lists(iterator)
        assert found == [[i, i + 1] for i in range(0, LENGTH, 2)] and run_ahead(loader) is None
        with pytest.raises(OSError, match="the file is not there"):
            next(iter(loader))
        data.known = True
        assert lists(loader) == found


def test_a_loader_is_closed_while_the_next_epoch_hangs() -> None:
    gate = Gate()
    for _ in range(100):
        gate.opened.release()
    # One thread: with two, the next epoch could take what this one has been let through for.
    loader = ahead(ShardedDataLoader(gate, 10, pool=ThreadPool(1)), True)
    lists(loader)
    waits = begin(loader)
    loader.close()
    gate.open_for_all()
    waits.join()
