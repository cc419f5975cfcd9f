"""How an epoch begins, what it gives, raises and counts; what a loader tells of itself, and what can be set."""

import contextlib
import copy
import gc
import os
import pickle
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import covering, made, make_pool
from samples import Drawing, NoLength, Told
from stream_samples import Told as ToldStream
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from sharded_loader import (
    InlinePool,
    LoaderClosedError,
    Placement,
    ProcessPool,
    ShardedDataLoader,
    SimpleDataset,
    SubsetRandomSampler,
    ThreadPool,
    TooManySkippedError,
)
from sharded_loader.base import imports
from sharded_loader.data.seeding import MAX_SEARCHED, _datasets_in, epoch_listeners, epoch_setter, reachable
from sharded_loader.loader import epochs
from sharded_loader.torch import DataLoader


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Inside, only the last reference frees an object."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_an_iterator_is_true_has_a_length_and_counts_batches_and_samples_but_no_errors() -> None:
    loader = ShardedDataLoader(Drawing(12, bad=[5]), 4)
    iterator: Any = iter(loader)
    assert (len(iterator), bool(iterator), iter(iterator) is iterator) == (3, True, True)
    assert next(iterator)[:, 0].tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="bad 5") as caught:
        next(iterator)
    assert caught.traceback, "its traceback leads to the sample"
    assert next(iterator)[:, 0].tolist() == [8, 9, 10, 11] and list(iterator) == []
    assert (len(iterator), bool(iterator)) == (3, True)
    stats = loader.stats()
    assert (stats.batches, stats.samples) == (2, 8)
    assert stats.seconds >= stats.waiting_seconds >= stats.placing_seconds >= 0


def test_an_error_of_placing_is_the_batchs_and_does_not_keep_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails_once(batch: Any) -> Any:
        monkeypatch.undo()
        raise RuntimeError("no room")

    monkeypatch.setattr("sharded_loader.loader.iterator.to_torch", fails_once)
    with uncollected():
        loader = ShardedDataLoader(np.arange(8), 4)
        freed, iterator = weakref.ref(loader), iter(loader)
        with pytest.raises(RuntimeError, match="no room") as caught:
            next(iterator)
        assert any("epoch 0, batch 0" in note for note in caught.value.__notes__)
        assert torch.equal(next(iterator), torch.arange(4, 8))
        del loader, iterator, caught
        assert freed() is None


@pytest.mark.parametrize(
    "given", [{"batch_size": 2}, {"batch_sampler": [[0], [], [9], [2]]}, {"batch_sampler": [[0], 7]}], ids=str
)
def test_an_error_does_not_keep_the_loader(given: dict[str, Any]) -> None:
    with uncollected():
        loader = ShardedDataLoader(Drawing(4, bad=[1]), **given)
        freed, iterator = weakref.ref(loader), iter(loader)
        with contextlib.suppress(StopIteration):
            while True:
                with contextlib.suppress(ValueError, IndexError, TypeError):
                    next(iterator)
        del loader, iterator
        assert freed() is None


def test_a_next_that_has_handed_out_nothing_leaves_the_position_with_another_iterator() -> None:
    closes = False
    place = Placement(device_transform=lambda batch: batch if not closes else loader.close())
    loader = ShardedDataLoader(range(20), 4, device=place)
    first, second = iter(loader), iter(loader)
    for iterator in (first, second, second):
        next(iterator)
    before, closes = loader.state_dict(), True
    assert (loader.epoch, loader.position) == (1, 2)
    with pytest.raises(LoaderClosedError):
        next(first)
    assert (loader.epoch, loader.position, loader.state_dict()) == (1, 2, before)


class Unsent:
    """An index that no worker process can be sent."""

    def __reduce__(self) -> Any:
        raise RuntimeError("stays here")


@pytest.mark.parametrize(
    "given",
    [
        {"batch_sampler": [[0], [1], [2], [], [0]]},
        {"batch_sampler": [[0], [1], [2], [Unsent()], [0]], "pool": "process"},
        {"batch_sampler": [[0], [1], [], [0]], "prefetch": 1},  # planned when nothing else is in flight
    ],
    ids=["planned", "sent", "alone"],
)
def test_an_error_that_waits_for_its_turn_does_not_keep_the_iterator(given: dict[str, Any]) -> None:
    """The position is that of the iterator as long as it lives. A state that is saved later must not have it."""
    with made(range(4), **{"pool": "thread", "prefetch": 4, **given}, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        loader.set_epoch(0)
        next(iterator)
        assert loader.position == 2
        with uncollected():
            del iterator
            assert loader.position == 0


def test_an_error_of_the_epoch_that_is_prefetched_does_not_keep_the_iterator_before_it() -> None:
    options = {"pool": "thread", "num_workers": 1, "prefetch": 4, "prefetch_epochs": True}
    with made(range(4), 1, sampler=SubsetRandomSampler([9, 9]), **options) as loader:
        iterator = iter(loader)
        with pytest.raises(IndexError, match="the sampler yielded index 9"):
            next(iterator)
        loader.set_epoch(0)
        with uncollected():
            del iterator
            assert loader.position == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the gate is a pipe that workers inherit")
@pytest.mark.parametrize("method", ["fork", "thread"])
def test_a_signal_handler_may_call_next_while_the_pool_waits(method: str) -> None:
    gate, opener = os.pipe()
    inner: list[int] = []

    def gated(index: int) -> int:
        if index == 2:
            os.read(gate, 1)
        return index

    def handler(number: int, frame: Any) -> None:
        os.write(opener, bytes(8))
        inner.extend(next(iter(loader)).tolist())

    def interrupt() -> None:
        while not pool.waiting:
            os.sched_yield()
        os.kill(os.getpid(), signal.SIGUSR1)

    pool, striker = make_pool(method, 1), threading.Thread(target=interrupt)
    with ShardedDataLoader(SimpleDataset(range(8)).transform(gated), 2, pool=pool, prefetch=1) as loader:
        before = signal.signal(signal.SIGUSR1, handler)
        outer: Any = iter(loader)
        first = next(outer).tolist()
        striker.start()
        try:
            rest = [batch.tolist() for batch in outer]
        finally:
            striker.join()  # before the handler goes: the signal would end the program
            signal.signal(signal.SIGUSR1, before)
    os.close(gate), os.close(opener)
    assert [first, *rest] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert inner == [0, 1]


def test_next_inside_the_work_of_next_is_an_error_that_says_what_to_do() -> None:
    loader = ShardedDataLoader(range(8), 2)
    outer: Any = iter(loader)
    next(outer)
    epoch, real = outer.run.epoch, outer.run.epoch.task

    def task(seq: int) -> Any:
        with pytest.raises(RuntimeError, match="set a flag there"):
            next(iter(loader))
        del epoch.task
        return real(seq)

    epoch.task = task
    assert next(outer).tolist() == [2, 3] and "task" not in vars(epoch)
    assert [batch.tolist() for batch in outer] == [[4, 5], [6, 7]]


@pytest.mark.parametrize("given", [{}, {"num_workers": 2, "thread_pool": True}], ids=["inline", "threads"])
def test_a_profiler_sees_each_wait_for_a_batch(given: dict[str, Any]) -> None:
    loader = ShardedDataLoader(range(8), batch_size=4, **given)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:  # the other kind begins for seconds
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    ranges = [one.name for one in profile.function_events if one.name.startswith("enumerate(")]
    assert len(ranges) == 3  # two batches, and the end of the epoch
    assert all(name.startswith("enumerate(ShardedDataLoader)#") and name.endswith(".__next__") for name in ranges)


# -- with the observer of the core alone, it reads as it always does ---------------------------------------------------


def outcomes(**options: Any) -> list[Any]:
    """Batches, errors and states of two epochs, and what is told of skipped samples."""
    seen: list[Any] = []
    with made(Drawing(12, bad=[5]), 4, shuffle=True, seed=1, **options) as loader:
        for _ in range(2):
            batches = iter(loader)
            while True:
                try:
                    seen.append(next(batches).tolist())
                except StopIteration:
                    break
                except (ValueError, TooManySkippedError) as error:
                    seen.append(str(error))
                seen.append(loader.state_dict())
        seen += loader.num_skipped, [index for index, _ in loader.skipped]
        assert repr(loader).startswith("ShardedDataLoader(12 samples, 3 batches of 4")
    return seen


@covering(pool=[None, "thread", "process"], on_error=["raise", "skip"], max_skipped=[None, 0])
def test_batches_errors_and_states_are_the_same_without_measuring(
    monkeypatch: pytest.MonkeyPatch, pool: str | None, on_error: str, max_skipped: int | None
) -> None:
    options: dict[str, Any] = {"pool": pool, "num_workers": 2 if pool else 0, "on_error": on_error}
    options |= {"max_skipped": max_skipped if on_error == "skip" else None}
    expected = outcomes(**options)
    monkeypatch.setitem(imports._providers, ("observer", "instruments"), "sharded_loader.engine.pipeline:Observer")
    assert outcomes(**options) == expected


# -- an epoch begins when its first batch is asked for: how an iterator gets its run -----------------------------------


class Deaf(NoLength):
    def set_epoch(self, epoch: int) -> None:
        pass


def test_what_begins_after_the_end_of_an_epoch_without_a_length_was_loaded() -> None:
    whole, sampler = [[0, 1, 2], [3, 4, 5]], Deaf(range(6))
    first = ShardedDataLoader(range(6), 3, sampler=NoLength(range(6)))
    iterator = iter(first)
    next(iterator), next(iterator)
    state = first.state_dict() | {"sampler": "Deaf"}
    second = ShardedDataLoader(range(6), 3, sampler=sampler)
    for tell, epoch, after in ((None, None, 2), (second, 0, 1), (second, 1, 2), (sampler, 0, 1)):
        second.load_state_dict(state)
        if tell is not None:
            tell.set_epoch(epoch)
        assert second.peek().tolist() == whole[0]
        assert [batch.tolist() for batch in second] == whole and second.epoch == after


def test_a_state_of_the_end_of_an_epoch_without_a_length_goes_on_with_a_dataset_that_is_told() -> None:
    first, second = (ShardedDataLoader(Told(), batch_sampler=NoLength([[0, 1], [2, 3]])) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[100, 101], [102, 103]]


def test_the_first_batch_and_a_sample_are_read_without_an_epoch() -> None:
    loader = ShardedDataLoader(Told(), 4)
    assert loader.peek().tolist() == [0, 1, 2, 3] and loader.read(3, epoch=7) == 703
    assert (loader.epoch, loader.position, loader.pool.started, loader.dataset.epoch) == (0, 0, False, 0)
    with pytest.raises(IndexError, match="epoch 0 has no batches"):
        ShardedDataLoader([], 4).peek()


class Around:
    """A wrapper of the user's, without a place for attributes."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = {"it": held}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.held["it"][index])


class AroundStream(IterableDataset[int]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)


WRAPPERS: dict[str, Any] = {
    "Subset": lambda data: Subset(data, range(4)),
    "ConcatDataset": lambda data: ConcatDataset([Subset(range(2), []), Subset(data, range(4))]),
    "the user's": Around,
    "ours around torch's": lambda data: SimpleDataset(Subset(data, range(4))).transform(int),
    "ours": lambda data: SimpleDataset(data).transform(int).take(4),
    "iterable": AroundStream,
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("pool", ["inline", "thread", "fork", "spawn"])
def test_set_epoch_of_a_dataset_inside_is_heard_by_every_worker(kind: str, pool: str) -> None:
    data, unit = (ToldStream([4]), 1000) if kind == "iterable" else (Told(), 100)
    with ShardedDataLoader(WRAPPERS[kind](data), 2, pool=make_pool(pool, 1)) as loader:
        for tell, epoch in ((None, 0), (data, 5), (None, 6), (loader, 2), (data, 9)):
            if tell is not None:
                tell.set_epoch(epoch)
            assert (loader.epoch, {int(one) // unit for batch in loader for one in batch}) == (epoch, {epoch})


def test_the_search_for_datasets_with_set_epoch_is_bounded() -> None:
    """A sample list, however long, and datasets that hold each other."""
    data, other = Around(Told()), Told()
    data.held.update({"samples": [(str(number), number) for number in range(10**5)], "more": [Around(0)] * 10**4})
    data.held["it"].back = other.back = data  # type: ignore[attr-defined]
    assert list(epoch_listeners(data)) == [data.held["it"]]
    many = Around(None)
    many.held = [[Around([Around(number)]) for number in range(100)] for _ in range(100)]  # type: ignore[assignment]
    assert sum(1 for _ in reachable(many, _datasets_in, most=MAX_SEARCHED)) <= MAX_SEARCHED
    assert epoch_setter(many) is None


def test_threads_that_do_not_read_ahead_do_not_search_for_set_epoch_at_each_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched = list[Any]()
    monkeypatch.setattr(epochs, "epoch_setter", lambda data: searched.append(data) or epoch_setter(data))
    with ShardedDataLoader(range(40), 2, pool=ThreadPool(1), prefetch=20) as loader:
        assert not loader.prefetch_epochs and len(list(loader)) == 20
    assert len(searched) < 10  # it was asked in each `next` once the epoch was planned: up to 25 ms in large datasets


# -- what a loader tells about itself, and what can be set ------------------------------------------------------------


def nothing(number: int) -> None:
    """A worker_init_fn."""


def test_what_other_libraries_read_has_the_values_of_torch_s_loader() -> None:
    theirs = torch.utils.data.DataLoader(range(10), 4)  # type: ignore[arg-type]
    loader = ShardedDataLoader(range(10), 4)
    for name in ("prefetch_factor", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"):
        assert getattr(loader, name) == getattr(theirs, name), name
    for name in ("persistent_workers", "in_order", "pin_memory_device", "drop_last", "batch_size", "num_workers"):
        assert getattr(loader, name) == getattr(theirs, name, True), name  # torch 2.4 has no in_order
    assert loader.collate_fn([1, 2]).tolist() == [1, 2]
    assert ShardedDataLoader(range(4), 2, batchify_fn=list).collate_fn is list


def test_with_workers_they_tell_of_the_pool() -> None:
    with ShardedDataLoader(range(10), 4, num_workers=3, prefetch=7, worker_init_fn=nothing, timeout=9) as loader:
        assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (2, True, 9)
        assert loader.worker_init_fn is nothing and isinstance(loader.pool, ProcessPool)
        assert loader.multiprocessing_context.get_start_method() == loader.pool.start_method
        loader.prefetch = 0
        assert loader.prefetch_factor == 1
    with ShardedDataLoader(range(10), 4, pool=ThreadPool(2)) as loader:
        assert loader.multiprocessing_context is None and loader.persistent_workers and loader.timeout == 0


@pytest.mark.parametrize(("workers", "given", "found"), [(3, None, 6), (3, 5, 5), (3, -1, 0), (0, None, 0)])
def test_prefetch_is_twice_the_workers_unless_it_is_given(workers: int, given: Any, found: int) -> None:
    pool = ThreadPool(workers) if workers else InlinePool()
    with ShardedDataLoader(range(10), 4, pool=pool, prefetch=given) as loader:
        assert loader.prefetch == found
        loader.prefetch = 7
        assert loader.prefetch == 7
        for no_number in ("2", True, 2.5, None):
            with pytest.raises(TypeError, match="device_prefetch must be an integer"):
                loader.device_prefetch = no_number
        loader.device_prefetch = 4
        assert loader.device_prefetch == 0  # without devices nothing is copied ahead


def test_shard_weights_are_copied_and_need_shards() -> None:
    loader, weights = ShardedDataLoader(range(10), 4, num_shards=2), [3.0, 1.0]
    loader.shard_weights = weights
    weights[0] = 9.0
    assert loader.shard_weights == [3.0, 1.0]
    loader.shard_weights = None
    assert loader.shard_weights is None
    with pytest.raises(ValueError, match="shard_weights need shards"):
        ShardedDataLoader(range(10), 4).shard_weights = [1.0]


def test_a_repr_tells_of_a_dataset_that_is_empty_by_now_and_of_the_end() -> None:
    loader = ShardedDataLoader([1, 2, 3], 2)
    loader.dataset.clear()
    loader.refresh()
    assert repr(loader).startswith("ShardedDataLoader(0 samples, 0 batches of 2")
    loader.close()
    assert repr(loader) == "ShardedDataLoader(closed)"


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_iterators_have_the_method_next_of_old_scripts(kind: Any) -> None:
    batches = iter(kind(range(4), 2))
    assert [batches.next().tolist(), batches.next().tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(StopIteration):
        batches.next()


def test_arguments_of_other_loaders_get_advice() -> None:
    advice = {"shm_size": "leave it out", "num_threads": "write num_workers= and", "ctx_list": "write devices= instead"}
    for name, said in (advice | {"batchsize": "did you mean 'batch_size'", "image_size": r"see help\(Sharded"}).items():
        with pytest.raises(TypeError, match=f"'{name}'.*{said}"):
            ShardedDataLoader(range(4), 2, **{name: 1})


def test_what_a_loader_was_given_makes_another_one_like_it() -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 1, "thread_pool": True}
    data = list(range(10))
    with ShardedDataLoader(data, 4, **given) as loader:
        assert dict(loader.arguments) == {"dataset": data, "batch_size": 4, **given}
        assert loader.arguments["dataset"] is data
        with ShardedDataLoader(**loader.arguments) as other:
            assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]
    with pytest.raises(TypeError):
        loader.arguments["seed"] = 4  # type: ignore[index]


def test_a_loader_of_a_users_class_knows_what_its_base_was_given() -> None:
    class Evens(ShardedDataLoader[Any]):
        def __init__(self, size: int, **given: Any) -> None:
            super().__init__(range(0, size, 2), 2, **given)

    loader = Evens(6, drop_last=True)
    assert dict(loader.arguments) == {"dataset": range(0, 6, 2), "batch_size": 2, "drop_last": True}
    assert [batch.tolist() for batch in ShardedDataLoader(**loader.arguments)] == [[0, 2]]


def test_results_are_gathered_on_the_first_device() -> None:
    meta = torch.device("meta")
    for devices in ({"devices": [meta, "cpu"]}, {"device": meta}):
        loader: ShardedDataLoader[Any] = ShardedDataLoader(range(4), 4, **devices)
        assert loader.gather([torch.ones(2), torch.ones(1)]).device.type == "meta"
        assert loader.gather([torch.ones(2), torch.ones(1)], "cpu").tolist() == [1, 1, 1]
    assert ShardedDataLoader(range(4), 4, num_shards=2).gather([{"x": torch.ones(1)}] * 2)["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, InlinePool),
        ({"num_workers": 2}, ProcessPool),
        ({"num_workers": 2, "thread_pool": True}, ThreadPool),
        ({"num_workers": 2, "pool": "thread"}, ThreadPool),
        ({"num_workers": 2, "pool": "inline"}, InlinePool),
        ({"num_workers": -1}, InlinePool),
        ({"pool": ThreadPool(3)}, ThreadPool),
    ],
    ids=str,
)
def test_the_arguments_choose_the_pool_and_start_nothing(given: dict[str, Any], kind: type) -> None:
    loader = ShardedDataLoader(range(10), 4, **given)
    assert type(loader.pool) is kind and not loader.pool.started


def test_a_loader_over_plain_data_asks_for_no_satellite_but_its_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    instruments = {key: place for key, place in imports.PROVIDED.items() if ".instruments." in place}
    monkeypatch.setattr(imports, "_providers", instruments)
    dataset = SimpleDataset(range(10)).transform(str)
    assert len(list(ShardedDataLoader(dataset, 4, shuffle=True, steps_per_epoch=3))) == 3


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_neither_pickled_nor_copied_and_says_what_to_do(take: Any) -> None:
    with ShardedDataLoader(range(4), 2) as loader, pytest.raises(TypeError, match="from the same arguments"):
        take(loader)
