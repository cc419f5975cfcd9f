"""Bad input: an error that says what happened, where, and what to do; never a hang or silence."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, made, make_pool
from failures import hang
from samples import Bad
from torch.utils.data import DistributedSampler

from sharded_loader import (
    BatchSampler,
    FixedBucketSampler,
    InlinePool,
    LoaderClosedError,
    Placement,
    ProcessPool,
    RandomSampler,
    ShardedDataLoader,
    SimpleDataset,
    ThreadPool,
)
from sharded_loader.batchify import Stack
from sharded_loader.data.datasets import Dataset
from sharded_loader.devices import placement
from sharded_loader.engine.pool import Pool
from sharded_loader.loader.arguments import OtherNames
from sharded_loader.torch import DataLoader as DropIn


def nothing(number: int) -> None:
    """A worker_init_fn."""


def make(**arguments: Any) -> ShardedDataLoader:
    return made(arguments.pop("dataset", range(10)), **{"batch_size": 4, **arguments})


def named(name: str) -> Callable[[], Any]:
    return functools.partial(ShardedDataLoader, range(4), 2, **{name: None})


class IterableDataset:
    """Another library's, named as torch's."""


class Named(IterableDataset):
    """Indexed, with a length or not."""

    def __init__(self, length: Any = 10) -> None:
        self.length = length

    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return int(self.length)


class Torchs(Named, torch.utils.data.IterableDataset[int]):
    """As litdata's and mosaicml's: a stream, and indexed as well."""

    def __iter__(self) -> Any:
        raise AssertionError("it was read as a stream")


class Stream:
    def __iter__(self) -> Any:
        return iter(range(4))


REFUSED: list[tuple[Any, Any, str]] = [
    ({"batch_size": None}, ValueError, "batch_size must be specified unless batch_sampler .*sharded_loader.torch"),
    ({"shuffle": True, "sampler": [1]}, ValueError, "shuffle must not be specified if sampler"),
    ({"batch_sampler": [[1]]}, ValueError, "must not be specified if batch_sampler"),
    ({"last_batch": "drop"}, ValueError, "keep.*discard.*rollover"),
    *(({"batch_size": size}, (TypeError, ValueError), "batch_size") for size in (0, 2.5, True)),
    ({"on_error": "ignore"}, ValueError, '"raise", "skip", "replace"'),
    ({"pool": "fibers"}, ValueError, '"inline", "thread", "process"'),
    ({"pool": "process"}, ValueError, "num_workers"),
    ({"pool": "thread"}, ValueError, "pool='thread' needs workers: give num_workers="),
    ({"thread_pool": True}, ValueError, "thread_pool=True needs workers: give num_workers="),
    ({"prefetch": 2.5}, TypeError, "prefetch must be an integer, got 2.5"),
    ({"prefetch": float("inf")}, TypeError, "prefetch must be an integer, got inf"),
    ({"pool": InlinePool(), "num_workers": 2}, ValueError, "leave out num_workers"),
    ({"pool": "process", "thread_pool": True, "num_workers": 1}, ValueError, "contradict"),
    ({"num_workers": 1.5}, TypeError, "num_workers"),
    ({"num_shards": 0}, ValueError, "num_shards"),
    ({"num_shards": 2, "device": "cpu"}, ValueError, "devices="),
    ({"num_shards": 3, "devices": ["cpu", "cpu"]}, ValueError, "only 2 devices"),
    ({"shard_weights": [1, 2]}, ValueError, "num_shards="),
    ({"num_shards": 2, "shard_weights": [1, 2, 3]}, ValueError, "3"),
    ({"num_shards": 2, "shard_weights": [1, -1]}, ValueError, "negative|-1"),
    ({"num_shards": 2, "shard_weights": [0, 0]}, ValueError, "zero"),
    ({"num_shards": 2, "shard_weights": [1, float("nan")]}, ValueError, "nan"),
    ({"device": "cpu", "devices": ["cpu"]}, ValueError, "not both"),
    ({"devices": []}, ValueError, "empty"),
    ({"device": 1.5}, TypeError, "device"),
    ({"num_replicas": 2}, ValueError, "rank"),
    ({"rank": 0}, ValueError, "num_replicas"),
    ({"num_replicas": 2, "rank": 2}, ValueError, "0 to 1"),
    ({"num_replicas": 2, "rank": -1}, ValueError, "rank"),
    ({"seed": "abc"}, (TypeError, ValueError), "seed"),
    ({"batchify_fn": 3}, TypeError, "collate function is 3"),
    ({"sampler": (i for i in range(3))}, TypeError, "one-shot"),
    ({"dataset": 3}, TypeError, "__getitem__"),
    ({"dataset": list}, TypeError, r"the class list itself: give an object of it, list\(\.\.\.\)"),
    ({"batch_sampler": 4}, TypeError, "batch_sampler is 4, a number.*num_workers="),  # torch's positions
    ({"resident": True}, ValueError, "resident"),
    ({"dataset": "/data/train"}, TypeError, r"the str '/data/train', not an object that reads.*list\(text\)"),
    ({"dataset": Path("train")}, TypeError, "Path 'train', not an object that reads samples"),
    ({"shuffle": "yes"}, TypeError, "shuffle is 'yes'; it must be True or False"),
    ({"shuffle": RandomSampler}, TypeError, "sampler="),
    *(
        ({name: "False", "num_workers": 1}, TypeError, f"{name} is 'False'; it must be True or False")
        for name in ("pin_memory", "thread_pool", "evaluate", "drop_last", "persistent_workers", "with_source")
    ),
    ({"sampler": "random"}, TypeError, "sampler must be a sampler .* got 'random' of type str"),
    ({"sampler": RandomSampler}, TypeError, r"the class RandomSampler itself: give an object"),
    ({"pool": ProcessPool}, ValueError, r"a pool object, such as ProcessPool\("),
    ({"pool": "spawn", "num_workers": 3}, ValueError, r'ProcessPool\(3, start_method="spawn"\)'),
    ({"nonsense": 1}, TypeError, "no argument 'nonsense'"),
    ({"shufle": True}, TypeError, "did you mean 'shuffle'"),
    ({"batchify_fn": Stack}, TypeError, r"Stack\(\)"),
    ({"collate_fn": list, "batchify_fn": list}, ValueError, "collate_fn is torch's name for batchify_fn"),
    ({"prefetch": 2, "prefetch_factor": 2, "num_workers": 1}, ValueError, "prefetch_factor is torch's name for"),
    ({"drop_last": True, "last_batch": "keep"}, ValueError, "contradict each other"),
    ({"drop_last": True, "last_batch": "rollover"}, ValueError, "contradict each other"),
    ({"prefetch_factor": 2}, ValueError, "prefetch_factor needs workers"),
    ({"prefetch_factor": 0, "num_workers": 1}, ValueError, "prefetch_factor"),
    ({"prefetch_factor": 1.5, "num_workers": 1}, (TypeError, ValueError), "prefetch_factor"),
    ({"timeout": 3}, ValueError, "timeout=3 needs workers"),
    ({"timeout": -1, "num_workers": 1}, ValueError, "timeout"),
    ({"timeout": "soon", "num_workers": 1}, TypeError, "timeout"),
    ({"worker_init_fn": 3}, TypeError, "worker_init_fn"),
    ({"pool": InlinePool(), "timeout": 3}, ValueError, "give worker_init_fn and timeout to the pool"),
    ({"pool": InlinePool(), "worker_init_fn": nothing}, ValueError, "give worker_init_fn and timeout to the pool"),
    *(({"steps_per_epoch": steps}, (TypeError, ValueError), "steps_per_epoch") for steps in (0, 2.5)),
    ({"steps_per_epoch": 2, "last_batch": "rollover"}, ValueError, "contradict each other"),
    ({"steps_per_epoch": 2, "drop_last": True}, ValueError, "contradict each other"),
    *(
        ({"steps_per_epoch": 2, "batch_size": None, "batch_sampler": batches}, ValueError, "contradict each other")
        for batches in (BatchSampler(range(8), 3, "rollover"), FixedBucketSampler([1] * 8, 3, last_batch="rollover"))
    ),
    # names of torch, of others, and of our own that have moved
    (named("generator"), TypeError, "seed"),
    (named("multiprocessing_context"), TypeError, "start_method"),
    (named("pin_memory_device"), TypeError, "device"),
    (named("in_order"), TypeError, "order"),
    (named("snapshot_every_n_steps"), TypeError, "state_dict"),
    (named("auto_reload"), TypeError, "'auto_reload': leave it out, or set loader.prefetch_epochs"),
    (named("prefetch_epochs"), TypeError, "set loader.prefetch_epochs instead"),
    (named("max_skipped"), TypeError, r'write on_error=OnError\("skip", limit=\) instead'),
    (named("max_worker_memory"), TypeError, r"write pool=ProcessPool\(n, max_worker_memory=\) instead"),
    (named("max_bytes"), TypeError, r"write pool=ProcessPool\(n, max_bytes=\) instead"),
    (named("restarts"), TypeError, r"write pool=ProcessPool\(n, restarts=\) instead"),
    (named("shard_weights"), TypeError, r"device=Placement\(device, ...\), or devices=Placement\(devices, ...\)"),
    *((named(name), TypeError, "give it to Placement") for name in ("resident", "device_transform", "host_fields")),
    (named("pin_device_id"), TypeError, "device"),
    (named("try_nopython"), TypeError, "leave it out"),
    (named("generatr"), TypeError, r"did you mean 'generator'\? Here write seed= "),
    (named("collate_fnn"), TypeError, r"did you mean 'collate_fn'\?$"),
    *(
        (
            {"dataset": type("Only", (base,), {"__len__": lambda self: 3})()},
            TypeError,
            "needs __getitem__ and __len__.*has neither",
        )
        for base in (IterableDataset, torch.utils.data.Dataset, Dataset)
    ),
    ({"dataset": Named(ZeroDivisionError("in the user's code"))}, ZeroDivisionError, "in the user's code"),
    ({"sampler": DistributedSampler(Named(), 2, 0), "num_replicas": 2, "rank": 0}, ValueError, "twice"),
    # what leaves samples out or repeats them, where each is to count once
    ({"evaluate": True, "last_batch": "discard"}, ValueError, "last_batch='discard'"),
    ({"evaluate": True, "last_batch": "rollover"}, ValueError, "last_batch='rollover'"),
    ({"evaluate": True, "drop_last": True}, ValueError, "last_batch='discard'"),
    ({"evaluate": True, "steps_per_epoch": 3}, ValueError, "steps_per_epoch"),
    ({"evaluate": True, "on_error": "skip"}, ValueError, "on_error='skip'"),
    ({"evaluate": True, "on_error": "replace"}, ValueError, "on_error='replace'"),
    # iterable data, which comes in its own order
    (
        {"dataset": (i for i in range(3))},
        TypeError,
        "a generator, which can be read once.*give the function that makes",
    ),
    ({"dataset": iter([1, 2])}, TypeError, "a list_iterator, which can be read once"),
    ({"dataset": itertools.count()}, TypeError, "a count, which can be read once"),
    ({"dataset": {1, 2}}, TypeError, r"a set, whose order is not defined: give sorted\(dataset\)"),
    ({"dataset": frozenset({1})}, TypeError, "a frozenset"),
    ({"dataset": Stream}, TypeError, "is the class Stream itself"),
    (
        {"dataset": None},
        TypeError,
        "needs __getitem__ and __len__, or __iter__ for iterable data; NoneType has neither",
    ),
    ({"dataset": Stream(), "shuffle": True}, ValueError, "leave out shuffle.*give ShuffleBuffer"),
    ({"dataset": Stream(), "sampler": [1]}, ValueError, "Stream, is iterable data, which comes .* leave out sampler"),
    ({"dataset": Stream(), "batch_sampler": [[1]], "batch_size": None}, ValueError, "leave out batch_sampler"),
    ({"dataset": Stream(), "evaluate": True}, ValueError, "iterable data.*leave out evaluate"),
    *(({"dataset": Stream(), "streams": no}, (ValueError, TypeError), "streams") for no in (0, -1, 1.5, True)),
    ({"dataset": Stream(), "steps_per_epoch": 0}, ValueError, "steps_per_epoch"),
    ({"dataset": Stream(), "steps_per_epoch": "3"}, TypeError, "steps_per_epoch"),
    ({"dataset": Stream(), "last_batch": "rollover"}, ValueError, '"keep" or "discard"'),
    ({"dataset": Stream(), "last_batch": "discard", "steps_per_epoch": 2}, ValueError, "contradict each other"),
    ({"dataset": Stream(), "streams": 1, "num_replicas": 2, "rank": 0}, ValueError, "is 1, but there are 2 ranks, and"),
    ({"dataset": Stream(), "batch_size": 0}, ValueError, "batch_size"),
    ({"dataset": Stream(), "batch_size": 2.5}, (ValueError, TypeError), "batch_size"),
    ({"dataset": Stream(), "batch_size": None}, (ValueError, TypeError), "batch_size"),
    # pools
    (lambda: ProcessPool(0), ValueError, "at least 1"),
    (lambda: ProcessPool("2"), TypeError, "num_workers"),  # type: ignore[arg-type]
    (lambda: ProcessPool(1, start_method="forks"), ValueError, "'spawn'"),
    (lambda: ProcessPool(1, worker_init_fn=3), TypeError, "worker_init_fn"),  # type: ignore[arg-type]
    (lambda: ProcessPool(1, restarts=-1), ValueError, "restarts"),
    (lambda: ProcessPool(1, restarts=True), TypeError, "restarts"),
    *(
        (functools.partial(ProcessPool, 1, timeout=seconds), ValueError, "positive number of seconds")
        for seconds in (0, -1.5, float("inf"), float("nan"))
    ),
    (lambda: ProcessPool(1, timeout=True), TypeError, "timeout is True"),
    (lambda: ProcessPool(1, timeout="3"), TypeError, "timeout is '3'"),  # type: ignore[arg-type]
    (lambda: ThreadPool(-1), ValueError, "at least 1"),
    (lambda: ThreadPool(1, timeout=0), ValueError, "positive number of seconds"),
    (lambda: ThreadPool(1, timeout=False), TypeError, "timeout is False"),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_wrong_arguments_are_refused_by_the_constructor(given: Any, error: type[Exception], message: str) -> None:
    """``given``: arguments of the loader, or a function that makes a pool."""
    with pytest.raises(error, match=message):
        given() if callable(given) else make(**given)


def test_all_wrong_names_are_told_at_once_each_with_its_advice() -> None:
    with pytest.raises(TypeError) as caught:
        make(generator=None, auto_reload=False, shufle=True, zzz=1, in_order=True)
    lines = str(caught.value).splitlines()
    assert lines[0] == "ShardedDataLoader has none of these 5 arguments:"
    assert [line.split("'")[1] for line in lines[1:]] == ["generator", "auto_reload", "shufle", "zzz", "in_order"]
    for line, advice in zip(
        lines[1:], ("seed=", "prefetch_epochs", "did you mean 'shuffle'?", "help(", "always come in order"), strict=True
    ):
        assert advice in line
    with pytest.raises(TypeError, match="has no argument 'zzz'; see help"):
        make(zzz=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("last_batch", "drop_last"),
        ("batchify_fn", "collate_fn"),
        ("prefetch", "prefetch_factor"),
        ("pool", "start_method"),
    ],
)
def test_the_drop_in_gives_torchs_spelling_of_our_arguments(name: str, said: str) -> None:
    with pytest.raises(TypeError, match=f"DataLoader has no argument '{name}': write .*{said}="):
        DropIn([1, 2], **{name: None})  # type: ignore[arg-type]


def test_every_argument_of_torchs_loader_is_one_of_ours_or_gives_our_spelling() -> None:
    ours = {*inspect.signature(ShardedDataLoader.__init__).parameters, *OtherNames.__annotations__}
    theirs = inspect.signature(torch.utils.data.DataLoader.__init__).parameters
    foreign = [name for name in theirs if name not in ours]
    with pytest.raises(TypeError) as caught:
        make(**dict.fromkeys(foreign))
    advice = dict(line.strip().split(": ", 1) for line in str(caught.value).splitlines()[1:])
    assert set(advice) == {repr(name) for name in foreign}
    assert all(line.startswith(("write ", "leave it out")) for line in advice.values())


def test_a_loader_has_at_most_24_arguments_and_40_public_attributes_beside_those_of_torch() -> None:
    parameters = [name for name in inspect.signature(ShardedDataLoader.__init__).parameters if name != "self"]
    assert len(parameters) - 1 <= 24 and parameters[-1] == "names"
    assert parameters[:11] == [
        *("dataset", "batch_size", "shuffle", "sampler", "last_batch", "batch_sampler", "batchify_fn", "num_workers"),
        *("pin_memory", "prefetch", "thread_pool"),
    ]  # Gluon's, in their places
    public = {name for name in dir(ShardedDataLoader) if not name.startswith("_")}
    of_torch = inspect.signature(torch.utils.data.DataLoader).parameters.keys() | {"in_order"}  # since 2.6
    assert len(public - of_torch) + 4 <= 40, "dataset, sampler, batch_size and num_workers are ours, too"


def test_options_are_given_in_one_place() -> None:
    with pytest.raises(ValueError, match="device and devices are both a Placement"):
        make(device=Placement("cpu"), devices=Placement(["cpu"]))
    both = make(devices=["cpu", "cpu"], device=Placement(shard_weights=[3, 1]))
    assert [len(shard) for shard in next(iter(both))] == [3, 1]


def test_torch_s_names_mean_what_they_mean_in_torch() -> None:
    for ours, theirs in (
        ({"batchify_fn": sum}, {"collate_fn": sum}),
        ({"last_batch": "discard"}, {"drop_last": True}),
        ({}, {"drop_last": False, "persistent_workers": True, "timeout": 0}),
        ({"last_batch": "rollover"}, {"last_batch": "rollover", "drop_last": False}),
        ({"last_batch": "discard"}, {"last_batch": "discard", "drop_last": True}),
    ):
        one, other = (make(**given) for given in (ours, theirs))
        assert one.drop_last == other.drop_last
        for _ in range(2):
            assert [*map(np.ndarray.tolist, map(np.asarray, one))] == [*map(np.ndarray.tolist, map(np.asarray, other))]
    with make(num_workers=3, thread_pool=True, prefetch_factor=4) as loader:
        assert (loader.prefetch, loader.prefetch_factor) == (12, 4)


@pytest.mark.parametrize("pool", ["thread", "process"])
def test_worker_init_fn_and_timeout_go_to_the_pool(pool: str) -> None:
    with make(pool=pool, num_workers=2, worker_init_fn=nothing, timeout=30) as loader:
        assert len(list(loader)) == 3
        assert (loader.timeout, loader.worker_init_fn) == (30, nothing)
        assert (loader.pool.timeout, loader.pool.worker_init_fn) == (30, nothing)


@pytest.mark.slow
def test_a_hang_ends_after_the_timeout_that_the_loader_was_given() -> None:
    with make(dataset=Bad(hang), num_workers=1, timeout=0.2) as loader, pytest.raises(TimeoutError):
        list(loader)


def test_a_worker_init_fn_without_workers_is_called_by_nobody_as_in_torch() -> None:
    def fails(number: int) -> None:
        raise AssertionError

    assert len(list(make(worker_init_fn=fails))) == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LOCAL_WORLD_SIZE", "abc"),
        ("LOCAL_WORLD_SIZE", "2.0"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "-4"),
        ("SHARDED_LOADER_MEMORY", "ram"),
        *(("WORLD_SIZE", "two"), ("RANK", "x"), ("RANK", "7"), ("WORLD_SIZE", "0")),
    ],
)
def test_a_wrong_environment_variable_is_named_before_the_first_epoch(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    if name in ("WORLD_SIZE", "RANK"):
        for variable, known in {"WORLD_SIZE": "2", "RANK": "0", name: value}.items():
            monkeypatch.setenv(variable, known)
        loader = make(num_replicas="auto")
        with pytest.raises(ValueError, match=name):
            list(loader)
        return
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name} is '{value}'"):
        make(num_workers=1)
    if name == "LOCAL_WORLD_SIZE":
        with make(pool=ProcessPool(1, max_bytes=1 << 20)) as loader:  # nobody asks
            assert len(list(loader)) == 3


def test_a_wrong_environment_variable_of_mid_epoch_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "abc")
    with (
        make(pool=pool, dataset=np.zeros((64, 100_000))) as loader,
        pytest.raises(ValueError, match="LOCAL_WORLD_SIZE"),
    ):
        list(loader)


@pytest.mark.costly
def test_the_pool_of_a_closed_loader_serves_another(pool: Pool) -> None:
    first = make(pool=pool, dataset=np.arange(10_000 * 8).reshape(8, 10_000))
    iterator = iter(first)
    held = next(iterator)
    before = held.clone()
    first.close()
    with make(pool=pool, dataset=np.arange(10_000 * 8).reshape(8, 10_000) * -1) as second:
        for _ in range(3):
            assert [int(batch[0, 1]) for batch in second] == [-1, -40_001]
        first.close()
        del first
        batches, workers = iter(second), getattr(pool, "pids", None)
        next(batches)
        for _ in range(2):
            with pytest.raises(LoaderClosedError):
                next(iterator)
        assert (pool.started, getattr(pool, "pids", None)) == (True, workers)
        assert len(list(batches)) == 1
        del iterator
        gc.collect()
        assert len(list(second)) == 2
        assert torch.equal(held, before)
        with pytest.raises(ValueError, match=r"another loader, which is not closed.*close\(\)"):
            make(pool=pool)


def test_a_loader_that_could_not_be_made_does_not_keep_the_pool(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(type(pool), "use_memory", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            make(pool=pool)
    gc.collect()
    with make(pool=pool) as loader:
        assert len(list(loader)) == 3


@pytest.mark.parametrize("dataset", [Named(), Torchs()], ids=["named so", "torch's"])
def test_a_dataset_with_indices_is_accepted_whatever_its_base_is_called(pool: Pool, dataset: Any) -> None:
    with make(dataset=dataset, pool=pool, shuffle=True, seed=1) as loader:
        assert sorted(index for batch in loader for index in batch.tolist()) == list(range(10))


def test_what_has_an_index_but_no_length_needs_a_sampler() -> None:
    half = type("Half", (), {"__getitem__": lambda self, index: index})
    assert [batch.tolist() for batch in make(dataset=half(), sampler=[1, 2])] == [[1, 2]]
    with pytest.raises(TypeError, match="has no __len__"):
        make(dataset=half())


@pytest.mark.parametrize("kind", [TypeError, NotImplementedError, ValueError])
def test_a_dataset_that_says_it_has_no_length_needs_a_sampler_and_tells_the_cause(kind: type[Exception]) -> None:
    error = kind("unknown yet")
    with pytest.raises(TypeError, match=f"its __len__ raised {type(error).__name__}: unknown yet.*sampler"):
        make(dataset=Named(error))
    with make(dataset=Named(error), sampler=[3, 1, 2]) as loader:
        assert [batch.tolist() for batch in loader] == [[3, 1, 2]]
        assert "unknown number of samples" in repr(loader)


def test_a_repr_does_not_raise_where_a_length_has_broken_since() -> None:
    dataset = Named()
    loader = make(dataset=dataset)
    dataset.length = ValueError("unreachable")
    assert repr(loader).startswith("ShardedDataLoader(10 samples, 3 batches of 4")


def test_pin_memory_without_an_accelerator_warns_once_and_has_no_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "accelerators", list)
    with pytest.warns(UserWarning, match="no accelerator"):
        loader = make(pin_memory=True)
    assert len(list(loader)) == 3


class Holder(SimpleDataset):
    def __init__(self) -> None:
        super().__init__(range(4))
        self.deep = {"lock": threading.Lock()}


@pytest.mark.parametrize("name", POOLS[1:])
def test_a_dataset_that_cannot_be_pickled_works_in_threads_and_forks_and_says_so_elsewhere(name: str) -> None:
    with make(dataset=Holder(), pool=make_pool(name, 1)) as loader:
        if name in ("thread", "fork"):
            assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3]]
            return
        with pytest.raises(TypeError, match=r"dataset\.deep\['lock'\] \(lock\)") as caught:
            next(iter(loader))
        assert ('start_method="fork"' in str(caught.value)) == hasattr(os, "fork")
        assert "thread_pool=True" in str(caught.value)
