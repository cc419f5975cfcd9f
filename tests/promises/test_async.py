"""Samples of an ``async def`` are awaited, many at a time, and everything else is as with ``def``, over every pool."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool, until

from sharded_loader import (
    InlinePool,
    OnError,
    PackStream,
    Placement,
    ShardedDataLoader,
    ShuffleBuffer,
    SimpleDataset,
    SubsetDataset,
    ThreadPool,
    WorkerTimeoutError,
    interleave,
    sample_rng,
    sample_seed,
)
from sharded_loader.base.errors import notes_of
from sharded_loader.engine.pool import Pool
from sharded_loader.torch import DataLoader

INDICES = np.arange(40)


class Store:
    """Samples that a function reads: at first, those that come later are there sooner."""

    def __init__(self, read: Callable[[int], Any] | None = None) -> None:
        self.read = read

    def __len__(self) -> int:
        return 40

    async def __getitem__(self, index: int) -> Any:
        if self.read is not None:
            return await self.read(int(index))
        first = sample_rng().random()
        await asyncio.sleep((index % 4 == 0) / 500)
        return int(index), first + sample_rng().random()


class Direct(Store):
    """The same, read by an ordinary method."""

    def __getitem__(self, index: int) -> tuple[int, float]:  # type: ignore[override]
        return int(index), sample_rng().random() + sample_rng().random()


class Many(Store):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        await asyncio.sleep(0)
        return [(int(index), sample_rng(index).random()) for index in indices]


class ManyDirect(Direct):
    def __getitem__(self, index: int) -> Any:
        return int(index), sample_rng().random()

    def __getitems__(self, indices: list[int]) -> Any:
        return [(int(index), sample_rng(index).random()) for index in indices]


class InBulk(Store):
    async def __getitems__(self, indices: list[int]) -> list[Any]:
        return await asyncio.gather(*[self[index] for index in indices])


def noisy(index: Any, value: Any) -> tuple[Any, float]:
    return index, value + sample_rng().random()


def globally(index: Any, value: Any) -> tuple[Any, float]:
    return index, value + random.random() + np.random.rand() + float(torch.rand(()))


async def noisy_later(index: Any, value: Any) -> tuple[Any, float]:
    await asyncio.sleep(0)
    return noisy(index, value)


def doubled(index: Any, value: Any) -> tuple[Any, float]:
    return index, 2.0


def epochs(dataset: Any, pool: Pool | None = None, **options: Any) -> list[Any]:
    with closing(ShardedDataLoader(dataset, 6, seed=3, shuffle=True, pool=pool, **options)) as loader:
        return [[batch[0].tolist(), batch[1].tolist()] for _ in range(2) for batch in loader]


STACKS: dict[str, Callable[[Any], Any]] = {
    "bare": lambda d: d,
    "transform": lambda d: SimpleDataset(d).transform(noisy),
    "seeded": lambda d: SimpleDataset(d).transform(globally, seeded=True).transform(globally, seeded=True),
    "async transform": lambda d: SimpleDataset(d).transform(noisy_later).transform(noisy),
    "part": lambda d: SubsetDataset(d, range(30)).take(20)[::-1] + SimpleDataset(d).shard(3, 1),
    "subset": lambda d: torch.utils.data.Subset(d, range(5, 29)),
}


@covering(name=[*STACKS], pool=POOLS, kinds=[(Store, Direct), (Many, ManyDirect)])
def test_all_is_what_ordinary_methods_read_in_the_same_order(name: str, pool: str, kinds: Any) -> None:
    later, direct = (STACKS[name](kind()) for kind in kinds)
    assert epochs(later, make_pool(pool)) == epochs(direct, InlinePool())


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_samples_that_fill_up_batches_are_mixed_or_packed_are_awaited(kind: Any) -> None:
    def read(dataset: Any, **named: Any) -> Any:
        return [*kind(dataset, 2, collate_fn=str, **named)]

    later, direct = Store(), Direct()
    for named in (
        {"keep": lambda sample: sample[1] < 1, "seed": 3},
        {"on_error": "refill", "shuffle": True, "seed": 3},
    ):
        assert read(later, **named) == read(direct, **named)
    for make in (
        lambda rows: interleave([rows, lambda: iter(range(40))]),
        lambda rows: ShuffleBuffer(rows, 4),
        lambda rows: PackStream(rows, 4, tokenize=lambda sample: [int(9 * sample[1])]),
    ):
        assert read(make(later), seed=3, streams=1) == read(make(direct), seed=3, streams=1)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_drop_in_awaits_too(workers: int) -> None:
    found = [
        [batch[0].tolist() for batch in DataLoader(dataset, 6, num_workers=workers, seed=3)]  # type: ignore[arg-type]
        for dataset in (Store(), Many(), Direct())
    ]
    assert found[0] == found[1] == found[2]


@covering(pool=POOLS, shards=[None, 3])
def test_parts_of_batches_and_evaluation_are_awaited(pool: str, shards: int | None) -> None:
    with closing(ShardedDataLoader(Store(), 6, num_shards=shards, pool=make_pool(pool))) as loader:
        found = list(loader)
    flat = [index for batch in found for part in (batch if shards else [batch]) for index in part[0].tolist()]
    assert flat == list(range(40))


class Together:
    """No sample is there before as many are awaited as fit; a thread says whether more were."""

    def __init__(self, at_a_time: int | None = None) -> None:
        self.most = self.now = 0
        if at_a_time is not None:
            self.concurrency = at_a_time
        self.enough = at_a_time or 64

    def __len__(self) -> int:
        return 128

    async def __getitem__(self, index: int) -> int:
        self.now += 1
        self.most = max(self.most, self.now)
        while self.most < self.enough:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.001)
        self.now -= 1
        return int(index)


BESIDE: dict[str, Callable[[Any], Any]] = {
    **{name: STACKS[name] for name in ("bare", "subset", "part")},
    "mixed": lambda d: SimpleDataset(d) + [*range(128)],
    "mixed, transformed": lambda d: (SimpleDataset(d) + [*range(128)]).transform(int).take(200),
}


@pytest.mark.parametrize("name", [*BESIDE])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_the_samples_of_a_batch_are_awaited_together(name: str, kind: Any) -> None:
    dataset = Together(16)
    del dataset.concurrency
    batches = iter(kind(BESIDE[name](dataset), 16))
    next(batches)
    assert dataset.most == 16


@covering(number=[None, 5], pool=["inline", "thread", "fork"])
def test_64_samples_are_awaited_at_a_time_or_as_many_as_the_dataset_says(number: int | None, pool: str) -> None:
    dataset = Together(number)
    with closing(ShardedDataLoader(SimpleDataset(dataset), 100, pool=make_pool(pool, 1))) as loader:
        assert [index for samples in loader for index in samples.tolist()] == list(range(128))
    assert pool == "fork" or dataset.most == (number or 64)


def test_functions_that_are_awaited_run_together_too() -> None:
    dataset = Together(8)

    class Later:
        async def __call__(self, index: int) -> int:
            return await dataset[index]

    for fn in (dataset.__getitem__, Later()):
        dataset.most = 0
        batch = next(iter(ShardedDataLoader(SimpleDataset(range(8)).transform(fn).transform(float).take(8), 8)))
        assert dataset.most == 8 and batch.tolist() == list(range(8))


@pytest.mark.parametrize(
    ("number", "kind", "text"),
    [
        (0, ValueError, "concurrency of the dataset must be at least 1, got 0"),
        (2.5, TypeError, "concurrency of the dataset must be an integer, got 2.5"),
        ("64", TypeError, "concurrency of the dataset must be an integer, got '64'"),
    ],
)
@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_a_number_that_is_none_is_an_error(number: Any, kind: type[Exception], text: str, pool: str) -> None:
    dataset = Together()
    dataset.concurrency = number
    with closing(ShardedDataLoader(dataset, 4, pool=make_pool(pool))) as loader, pytest.raises(kind, match=text):
        next(iter(loader))


async def fails(index: int) -> int:
    await asyncio.sleep(0 if index == 9 else 0.002)
    if index in (8, 9):
        raise ValueError(f"bad {index}")
    if index == 20:
        raise SystemExit(3)
    return index


@covering(dataset=[Store(fails), InBulk(fails), SimpleDataset(Store(fails)).transform(lambda i: i)], pool=POOLS)
def test_an_error_names_the_first_sample_that_fails_and_the_epoch_goes_on(dataset: Any, pool: str) -> None:
    found: list[Any] = []
    with closing(ShardedDataLoader(dataset, 6, pool=make_pool(pool))) as loader:
        batches = iter(loader)
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                break
            except Exception as error:
                found.append(error)
    errors = {number: one for number, one in enumerate(found) if isinstance(one, Exception)}
    assert [*errors] == [1, 3] and len(found) == 7
    assert str(errors[1]) == "bad 8" and "epoch 0, batch 1, sample 8" in "\n".join(notes_of(errors[1]))
    assert "SystemExit" in str(errors[3]) and "sample 20" in "\n".join(notes_of(errors[3]))


def test_a_batch_method_cannot_be_async() -> None:
    class InBatches(Direct):
        async def get_batch(self, indices: list[int]) -> Any:
            return indices

    with closing(ShardedDataLoader(InBatches(), 6)) as loader, pytest.raises(TypeError, match=r"dataset\.get_batch"):
        next(iter(loader))


@pytest.mark.parametrize("pool", POOLS)
def test_bad_samples_are_skipped_and_replaced(pool: str) -> None:
    dataset = SubsetDataset(Store(fails), range(20))
    with closing(ShardedDataLoader(dataset, 6, pool=make_pool(pool), on_error="skip")) as loader:
        assert [batch.tolist() for batch in loader][1] == [6, 7, 10, 11]
        assert sorted(index for index, _ in loader.skipped) == [8, 9]
    with closing(ShardedDataLoader(dataset, 6, pool=make_pool(pool), on_error=lambda error: -1)) as loader:
        assert [batch.tolist() for batch in loader][1] == [6, 7, -1, -1, 10, 11]


class Hangs(Store):
    def __init__(self) -> None:
        self.ends: list[Callable[[], Any]] = []

    async def __getitem__(self, index: int) -> Any:
        if index == 8:
            event, loop = asyncio.Event(), asyncio.get_running_loop()
            self.ends.append(lambda: loop.call_soon_threadsafe(event.set))
            await event.wait()
        return int(index)

    def end(self) -> None:
        for end in self.ends:
            with suppress(RuntimeError):  # the loop is closed
                end()


@pytest.mark.parametrize("pool", POOLS[1:])
@pytest.mark.slow
def test_a_coroutine_that_never_ends_is_late_as_any_sample(pool: str) -> None:
    options, dataset = {} if pool == "thread" else {"restarts": 2}, Hangs()
    with closing(ShardedDataLoader(dataset, 6, pool=make_pool(pool, timeout=1.0, **options))) as loader:
        batches = iter(loader)
        assert next(batches).tolist() == list(range(6))
        at = "several samples at once" if pool == "thread" else "sample 8"
        with pytest.raises(WorkerTimeoutError, match=f"reading {at}, in epoch 0, batch 1"):
            next(batches)
        dataset.end()
        assert [one for batch in batches for one in batch.tolist()] == list(range(12, 40))
        assert loader.stats().replaced_workers >= 1


@pytest.mark.parametrize("pool", POOLS)
def test_a_loader_can_be_closed_while_samples_are_awaited(pool: str) -> None:
    dataset = Hangs()
    loader = ShardedDataLoader(dataset, 6, pool=make_pool(pool, 1))
    batches = iter(loader)
    next(batches)
    loader.close()  # the fixture of all tests looks for threads
    assert until(lambda: dataset.end() or not any("sharded_loader" in one.name for one in threading.enumerate()))


def test_an_error_cancels_the_rest_of_its_batch() -> None:
    over: list[int] = []

    async def read(index: int) -> int:
        try:
            if index == 3:
                await asyncio.sleep(0)
                raise ValueError("bad")
            if index > 3:
                await asyncio.Event().wait()
        finally:
            over.append(index)
        return index

    with closing(ShardedDataLoader(Store(read), 6)) as loader:
        with pytest.raises(ValueError, match="bad"):
            next(iter(loader))
        assert sorted(over[:6]) == list(range(6))


@pytest.mark.skipif(not hasattr(signal, "pthread_kill"), reason="this platform sends no signal to a thread")
def test_a_ctrl_c_ends_the_wait_and_what_is_awaited() -> None:
    over: list[int] = []

    async def read(index: int) -> None:
        if index == 5:  # the others have begun
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        try:
            await asyncio.Event().wait()
        finally:
            over.append(index)

    with closing(ShardedDataLoader(Store(read), 6)) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        assert until(lambda: sorted(over) == list(range(6)))


def test_a_ctrl_c_at_the_moment_when_samples_are_sent_to_the_loop_cancels_them(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, futures = asyncio.run_coroutine_threadsafe, list[Any]()

    def interrupted(*given: Any) -> Any:
        futures.append(submit(*given))
        signal.raise_signal(signal.SIGINT)
        return futures[-1]

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    with closing(ShardedDataLoader(Store(lambda index: asyncio.Event().wait()), 6)) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
    assert [future.cancelled() for future in futures] == [True]


class Client(Store):
    """What belongs to an event loop, such as an HTTP session, is opened once in each process."""

    loops: tuple[Any, ...] = ()

    async def __getitem__(self, index: int) -> Any:
        if asyncio.get_running_loop() not in self.loops:
            self.loops += (asyncio.get_running_loop(),)
        return len(self.loops)


@pytest.mark.parametrize("pool", POOLS)
def test_a_process_has_one_event_loop_for_all_batches_which_ends_with_the_loader(pool: str) -> None:
    dataset = Client()
    with closing(ShardedDataLoader(SimpleDataset(dataset).take(30), 6, pool=make_pool(pool))) as loader:
        assert {loops for _ in range(2) for batch in loader for loops in batch.tolist()} == {1}
    assert [loop.is_closed() for loop in dataset.loops] == [True] * (pool in ("inline", "thread"))


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.filterwarnings("error")
@pytest.mark.costly
def test_nobody_is_told_that_samples_were_never_awaited(pool: str, capfd: pytest.CaptureFixture[str]) -> None:
    for dataset in (Store(fails), SimpleDataset(Store()).transform(noisy)):
        with closing(ShardedDataLoader(dataset, 4, pool=make_pool(pool), on_error="skip")) as loader:
            next(iter(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gc.collect()
    assert "never awaited" not in capfd.readouterr().err


def test_a_loop_that_runs_already_is_left_alone() -> None:
    async def in_a_notebook() -> list[Any]:
        return epochs(SimpleDataset(Store()).transform(noisy)) + [list(SimpleDataset(Store()).take(2))]

    *found, samples = asyncio.run(in_a_notebook())
    assert found == epochs(SimpleDataset(Direct()).transform(noisy)) and [index for index, _ in samples] == [0, 1]


def test_wrappers_can_be_awaited_by_the_user_too() -> None:
    async def read() -> Any:
        return await SimpleDataset(Store()).transform(doubled).transform(doubled)[3]

    assert asyncio.run(read()) == (3, 2.0)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_dataset_that_awaits_by_itself_does_so_in_vain_on_the_loop() -> None:
    async def read(index: int) -> Any:
        return list(SimpleDataset(Store()).take(2))[index]

    with closing(ShardedDataLoader(Store(read), 2)) as loader, pytest.raises(RuntimeError, match="await dataset"):
        next(iter(loader))


async def seeded(index: int) -> tuple[int, float]:
    await asyncio.sleep(0.001)
    with sample_seed():
        return index, random.random()


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_what_reads_one_sample_or_batch_awaits_and_draws_the_same(pool: str) -> None:
    with closing(ShardedDataLoader(Store(seeded), 4, shuffle=True, seed=5, pool=make_pool(pool))) as loader:
        first = [one.tolist() for one in next(iter(loader))]
        assert [one.tolist() for one in loader.batch(0, 0)] == first
        assert list(loader.read(int(first[0][2]), epoch=0)) == [first[0][2], first[1][2]]
        assert loader.fingerprint(0) == loader.fingerprint(0)
        assert loader.check(samples=3).differing == ()


def test_methods_that_read_all_samples_await_them() -> None:
    dataset = SimpleDataset(Store(fails)).take(8)
    assert list(dataset) == list(range(8)) and list(map(int, dataset.transform(str, lazy=False))) == list(range(8))
    kept = dataset.filter(lambda index: index % 2 == 0)
    assert list(kept.indices) == [0, 2, 4, 6]


async def plain(index: int) -> tuple[int, float]:
    await asyncio.sleep(0)
    return index, 1.0


@pytest.mark.parametrize("pool", POOLS)
def test_a_cache_awaits_each_sample_once(pool: str, tmp_path: Any) -> None:
    stored = SimpleDataset(Store(plain)).transform(doubled).cache("1 MB", path=tmp_path / "cache")
    kept = SimpleDataset(InBulk(plain)).transform(doubled).cache()
    for dataset in (stored, kept, stored + kept, stored.transform(noisy)):
        with closing(ShardedDataLoader(dataset, 6, pool=make_pool(pool))) as loader:
            found = [[int(index) for batch in loader for index in batch[0]] for _ in range(2)]
        assert found[0] == found[1] == list(range(40)) * (len(dataset) // 40)
    assert stored.cached == 40


def test_below_a_cache_nothing_is_drawn() -> None:
    with pytest.raises(ValueError, match=r"sample_rng\(\) is called below cache"):
        SimpleDataset(Store()).cache("1 MB")


class Stream(torch.utils.data.IterableDataset[int]):
    async def __iter__(self) -> AsyncIterator[int]:  # type: ignore[override, misc]
        for i in range(8):
            yield i


class Coroutine(torch.utils.data.IterableDataset[int]):
    async def __iter__(self) -> Any:  # type: ignore[override]
        return iter(range(8))


class Yields(Store):
    async def __getitem__(self, index: int) -> Any:
        yield index


async def collated(samples: list[int]) -> list[int]:
    return samples


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "generator": (Yields(), {}, "dataset[index]"),
    "field": (SimpleDataset([(1, 2), (3, 4)]).transform(lambda a, b: (collated([a]), b)), {}, "a field of the samples"),
    "stream": (Stream(), {}, "the dataset"),
    "coroutine": (Coroutine(), {}, "the dataset"),
    "collate": (SimpleDataset(range(8)), {"collate_fn": collated}, "the collate function"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@covering(case=REFUSED, kind=["inline", "threads", "processes", "drop-in"])
def test_other_async_methods_are_an_error_at_the_first_batch(case: str, kind: str) -> None:
    dataset, arguments, where = REFUSED[case]
    known: dict[str, Any] = {"processes": {"num_workers": 1}, "threads": {"num_workers": 2, "thread_pool": True}}
    workers = known.get(kind, {})
    with pytest.raises(TypeError) as caught:
        if kind == "drop-in":
            next(iter(DataLoader(dataset, 2, **arguments)))
        else:
            with closing(ShardedDataLoader(dataset, 2, **workers, **arguments)) as loader:
                next(iter(loader))
    if (case, kind) == ("field", "drop-in"):  # batches are torch's own default_collate's
        assert "found <class 'coroutine'>" in str(caught.value)
    else:
        assert f"{where} is async" in str(caught.value) and "def instead of async def" in str(caught.value)


TEN = SimpleDataset(range(10))

TAKEN: dict[str, Callable[[Any], object]] = {
    "filter": TEN.filter,
    "transform_first": TEN.transform_first,
    "keep": lambda fn: ShardedDataLoader(TEN, 2, keep=fn),
    "collate_fn": lambda fn: ShardedDataLoader(TEN, 2, collate_fn=fn),
    "on_error": lambda fn: ShardedDataLoader(TEN, 2, on_error=fn),
    "OnError": OnError,
    "worker_init_fn": lambda fn: ShardedDataLoader(TEN, 2, num_workers=1, worker_init_fn=fn),
    "of a pool": lambda fn: ThreadPool(1, worker_init_fn=fn),
    "device_transform": lambda fn: ShardedDataLoader(TEN, 2, device=Placement("cpu", device_transform=fn)),
    "tokenize": lambda fn: PackStream(TEN, 8, 2, tokenize=fn),
    "collate_fn of the drop-in": lambda fn: DataLoader(TEN, 2, collate_fn=fn),
    "worker_init_fn of the drop-in": lambda fn: DataLoader(TEN, 2, num_workers=1, worker_init_fn=fn),
    "on_error of the drop-in": lambda fn: DataLoader(TEN, 2, on_error=fn),
}


class Awaited:
    async def __call__(self, given: Any) -> Any:
        return given


@covering(given=TAKEN, function=[collated, Awaited(), partial(collated)])
def test_an_async_function_is_refused_where_it_would_not_be_awaited(given: str, function: Any) -> None:
    with pytest.raises(TypeError, match="is async: it gives coroutine objects"):
        TAKEN[given](function)


@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_an_async_iterable_is_an_error_that_says_what_to_write(make: Any) -> None:
    with pytest.raises(TypeError, match=r"__aiter__.*async def __getitem__"):
        next(iter(make(type("AsyncIterable", (), {"__aiter__": iter})(), 2)))


def test_an_async_transform_cannot_be_seeded() -> None:
    with pytest.raises(TypeError, match=r"draw from sample_rng\(\)"):
        SimpleDataset(range(3)).transform(noisy_later, seeded=True)
