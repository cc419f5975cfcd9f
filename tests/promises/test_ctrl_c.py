"""A Ctrl-C at any moment leaves a loader that can go on: no batch is lost, none comes twice, nothing hangs."""

from __future__ import annotations

import functools
import itertools
import json
import linecache
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import covering, make_pool
from injection import PUMP, InterruptAt, InterruptAtReturn, next_interrupted
from inside import pipeline_of
from kinds import loader_of
from programs import run_forked
from stream_samples import Parts, Stateful, WithStatefulRows, batches_of, values
from test_resume import SAMPLERS, HasPlace, batches, stream, through_json

import sharded_loader
from sharded_loader import InlinePool, RandomSampler, ShardedDataLoader, ThreadPool, WeightedRandomSampler
from sharded_loader.engine.pool import Pool
from sharded_loader.randomness import rng
from sharded_loader.randomness.rng import reading
from sharded_loader.torch import DataLoader


def shards_of(pool: Pool, step: int) -> tuple[ShardedDataLoader, Iterator[Any]]:
    loader = ShardedDataLoader(range(100_000), 3, pool=pool, num_shards=2, prefetch=4)
    return loader, ([[n, n + 1], [n + 2]] for n in range(0, 99_999, 3))


def parts_of(kind: Callable[..., Any], pool: Pool, step: int) -> tuple[ShardedDataLoader, Iterator[Any]]:
    lengths = (2500 // step, 1000 // step, 5000 // step)
    loader = loader_of(kind(lengths), pool, streams=3, batch_size=2, prefetch=4)
    return loader, iter(batches_of(lengths, 2))


DATA = {
    "indexed": shards_of,
    "parts": functools.partial(parts_of, Parts),
    "stateful": functools.partial(parts_of, Stateful),
    "stateful rows": functools.partial(parts_of, WithStatefulRows),
}


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.parametrize("data", DATA)
@pytest.mark.costly(4)
def test_what_a_signal_raises_at_any_line_of_next_passes_and_no_batch_is_lost(
    new_pool: Callable[..., Pool], signal_name: str, data: str, step: int
) -> None:
    pool = new_pool()
    if getattr(pool, "start_method", "fork") != "fork" and data != "indexed":  # their workers take long to start again
        step = max(step, 7)
    loader, expected = DATA[data](pool, step)
    interrupt = functools.partial(InterruptInParts, name=signal_name)
    with loader:
        iterator = iter(loader)
        assert values(next(iterator)) == next(expected)
        line = 1
        while True:
            got, fired = next_interrupted(iterator, line, interrupt)
            for batch in got:
                assert values(batch) == next(expected), line
            assert reading.get() is None and torch_data.get_worker_info() is None, line
            if not fired:
                break
            # The loader goes on, in order, with all that was in flight.
            for _ in range(2):
                assert values(next(iterator)) == next(expected), line
            line += step
        assert line > 60
        if data != "indexed":
            assert [values(batch) for batch in iterator] == list(expected)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_one_ctrl_c_in_the_loop_is_one_keyboard_interrupt_and_no_other_output(method: str) -> None:
    script = f"""
        import os, signal, threading, time
        from sharded_loader import ProcessPool, ShardedDataLoader

        class Slow:
            def __len__(self): return 1000
            def __getitem__(self, i):
                time.sleep(0.01)
                return i

        loader = ShardedDataLoader(Slow(), 4, pool=ProcessPool(2, start_method="{method}"))
        seen = []
        iterator = iter(loader)
        seen.append(next(iterator)[0].item())
        try:
            # To the whole process group, as a terminal does.
            threading.Timer(0.05, os.killpg, (os.getpgrp(), signal.SIGINT)).start()
            while True:
                seen.append(next(iterator)[0].item())
        except KeyboardInterrupt as error:
            print("interrupted", flush=True)
            in_loop = error.__traceback__.tb_next is None  # outside next: the batch may be lost by the loop itself
        for _ in range(5):
            seen.append(next(iterator)[0].item())
        missing = set(range(0, seen[-1], 4)) - set(seen)
        assert len(missing) <= in_loop and seen == sorted(set(seen)), seen
        loader.close()
        print("went on", flush=True)
    """
    done = run_forked(script)
    assert done.stdout.split("\n")[:2] == ["interrupted", "went on"], done
    assert done.stderr == ""
    assert done.returncode == 0


SAMPLING = ("epoch.py", "tables.py", "third_party.py", "rng.py", "base.py", "test_resume.py")
KINDS = ("random", "rollover", "gluon style", "stateful by epoch", "stateful iterator", "torch distributed")


class InterruptInSampling(InterruptAt):
    """Also before the lines of samplers that are defined in a test."""

    def __init__(self, number: int) -> None:
        super().__init__(number, (*PUMP, *SAMPLING))

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code.co_filename.endswith("test_resume.py") and frame.f_code.co_name != "__iter__":
            return None
        return super().__call__(frame, event, arg)


class InterruptInParts(InterruptAt):
    """Not before the plain assignments with which a ``finally`` clause begins: Python looks for no signal there."""

    def __init__(self, number: int, name: str = "SIGINT") -> None:
        super().__init__(number, (*PUMP, "epoch.py", "order.py", "reader.py", "parts.py"), name)

    def __call__(self, frame: Any, event: str, arg: Any) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if text.startswith(("here.part = ", "reading.set(", "_, here.part = ")):
            return self
        return super().__call__(frame, event, arg)


def make(kind: str, pool: str) -> ShardedDataLoader:
    if kind.startswith("iterable"):
        return loader_of(Parts((9, 6)), pool, streams=2, steps_per_epoch=3 if "steps" in kind else None)
    return ShardedDataLoader(range(40), seed=5, pool=make_pool(pool, 1), prefetch=2, **SAMPLERS[kind]())


def places(kind: str) -> list[Any]:
    """The undisturbed stream of three epochs."""
    return stream(make(kind, "inline"))


@pytest.mark.costly(3)
@covering(1, pool=["inline", "thread"], kind=[*KINDS, "iterable", "iterable, steps"], after=["0", "0, another", "2"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 61])
def test_interrupted_anywhere_in_next_no_batch_is_lost_and_no_epoch_has_begun_without_one(
    pool: str, kind: str, after: str, step: int
) -> None:
    """After so many batches, on by the same iterator or another. The slow cases interrupt at every line."""
    expected = stream(make(kind, "inline"))
    line, at = 1, int(after[0])
    while True:
        random.seed(1), np.random.seed(1)
        generators = random.getstate(), np.random.get_state()[1].tolist()
        with make(kind, pool) as loader:
            assert batches(loader) == expected[0]
            one = iter(loader)
            first = batches(one, at)
            state = loader.state_dict()
            got, fired = next_interrupted(one, line, InterruptInParts if "iterable" in kind else InterruptInSampling)
            assert (random.getstate(), np.random.get_state()[1].tolist()) == generators, line
            assert not rng._lock._is_owned(), line  # or other threads would wait for ever
            assert reading.get() is None, line  # or sample_rng() would give the same generator for ever
            if not got:
                assert len(pipeline_of(loader).runs) <= 1, line
                assert (loader.epoch, loader.position) == (1, at)
                assert through_json(loader.state_dict()) == state
            rest = batches(loader if after == "0, another" and not got else one)
            assert first + [batch.tolist() for batch in got] + rest == expected[1], line
            assert batches(loader) == expected[2]
            if "iterable" not in kind:
                loader.batch_sampler.set_epoch(1)
                assert loader.epoch == 1, line  # the call is heard
        assert not pipeline_of(loader).runs, line
        if not fired:
            break
        line += 13 if pool == "thread" else step
    assert line > 50


class Interrupts(HasPlace):
    """A sampler with a state, in which a Ctrl-C comes."""

    armed = True

    def __len__(self) -> int:
        return 12

    def order(self) -> Iterator[int]:
        for index in range(12):
            if index == 6 and self.armed:
                self.armed = False
                signal.raise_signal(signal.SIGINT)
            yield index


SEEN = "iterator.py", "pipeline.py", "dataloader.py", "profiler.py"
"""Modules on the way of a batch, torch's too."""


class Stream(torch_data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(100_000))


@pytest.mark.parametrize("data", [range(100_000), Stream()], ids=type)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_ctrl_c_as_any_c_function_returns_loses_no_batch(kind: Any, data: Any, pool: str) -> None:
    """Also as the lock is released, and as the drop-in gets the batch: the lines that `InterruptAt` cannot stop at."""
    is_thread = pool == "thread"
    loader = kind(data, 1, num_workers=int(is_thread), thread_pool=is_thread)
    iterator, done = iter(loader), 0
    for number in itertools.count(1):
        batch = None
        with InterruptAtReturn(number, SEEN) as interrupt:
            batch = next(iterator)
        done += batch is not None and batch.tolist() == [done]
        assert getattr(loader, "position", done) == done, number  # what a state would have
        assert [next(iterator).tolist() for _ in range(2)] == [[done], [done + 1]], number
        done += 2
        if not interrupt.fired:
            break
    assert number > 10


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_ctrl_c_inside_a_sampler_with_a_state_loses_no_batch(pool: str, prefetch: int) -> None:
    with ShardedDataLoader(range(12), 4, sampler=Interrupts(), pool=make_pool(pool, 1), prefetch=prefetch) as loader:
        got, times = [], 0
        iterator: Any = None
        while True:
            try:
                iterator = iterator or iter(loader)
                got.append(next(iterator).tolist())
            except KeyboardInterrupt:
                times += 1
            except StopIteration:
                break
        assert times == 1
        assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert loader.epoch == 1


def test_an_epoch_that_was_interrupted_gives_way_to_another() -> None:
    with ShardedDataLoader(range(12), 4, sampler=Interrupts(), pool=ThreadPool(1), prefetch=3) as loader:
        with pytest.raises(KeyboardInterrupt):
            next(iter(loader))
        loader.set_epoch(3)
        iterator = iter(loader)
        next(iterator)
        assert len(pipeline_of(loader).runs) == 1
        del iterator
        assert not pipeline_of(loader).runs


def test_a_ctrl_c_while_threads_start_leaves_a_pool_that_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    with ShardedDataLoader(range(6), 2, pool=ThreadPool(2)) as loader:
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(threading.Thread, "start", lambda thread: signal.raise_signal(signal.SIGINT))
            next(iter(loader))
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
        assert loader.epoch == 1


def test_a_ctrl_c_as_an_epoch_begins_leaves_what_was_read_ahead_to_somebody() -> None:
    nobodys = []
    for line in itertools.count(1, 3):
        with ShardedDataLoader(range(12), 4, shuffle=True, pool=ThreadPool(1)) as loader:
            loader.prefetch_epochs = True
            assert len(list(loader)) == 3
            iterator: Any = iter(loader)
            got, fired = next_interrupted(iterator, line, lambda at: InterruptAt(at, ("epochs.py", "iterator.py")))
            assert len(got + list(iterator)) == 3
            if len(pipeline_of(loader).runs) > 2:  # that of the iterator, and the next one
                nobodys.append(line)
        if not fired:
            break
    assert line > 20 and len(nobodys) <= 1, nobodys  # before a plain ``return``, where no real Ctrl-C comes


# -- calls between two steps -------------------------------------------------------------------------------------------


class Heard:
    """A dataset that is told the epoch, and has more samples when it `grow`s."""

    def __init__(self, length: int = 12) -> None:
        self.length, self.epoch = length, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(index) + 100 * self.epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class InterruptInCalls(InterruptAt):
    """Before any line of the library, but those that defer signals."""

    def __init__(self, number: int) -> None:
        modules = {path.name for path in Path(sharded_loader.__file__).parent.rglob("*.py")}
        super().__init__(number, sorted(modules - {"interrupts.py"}))


LOADERS: dict[str, Callable[..., Any]] = {
    "ShardedDataLoader": functools.partial(ShardedDataLoader, seed=7),
    "drop-in": DataLoader,
    "drop-in, seeded": functools.partial(DataLoader, seed=7),
    "drop-in of ranks": functools.partial(DataLoader, seed=7, num_replicas=1, rank=0),
}
SHUFFLED = {"shuffle": True}
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[Any, Any], object]]] = {
    "load_state_dict": (dict, lambda loader, state: loader.load_state_dict(state)),
    "load_state_dict of a shuffle": (lambda: SHUFFLED, lambda loader, state: loader.load_state_dict(state)),
    "load_state_dict, skip": (lambda: SHUFFLED, lambda loader, state: loader.load_state_dict(state, skip=[(15, 15)])),
    "set_epoch": (lambda: SHUFFLED, lambda loader, state: loader.set_epoch(4)),
    "state_dict": (lambda: SHUFFLED, lambda loader, state: loader.state_dict()),
    "rescale": (lambda: SHUFFLED, lambda loader, state: loader.rescale(2, 1, 2)),
    "grow": (lambda: SHUFFLED, lambda loader, state: loader.grow(Heard(17))),
    "without": (lambda: SHUFFLED, lambda loader, state: loader.without([1, 2, 5, 7])),
    "update": (
        lambda: {"sampler": WeightedRandomSampler([1.0] * 12, 12, seed=2)},
        lambda loader, state: loader.sampler.update([1, 2, 3], [50.0, 0.0, 70.0]),
    ),
}
ONLY_OF_OUR_ORDER = "rescale", "grow", "without", "update"
OF_TORCH = "drop-in", "drop-in, seeded"


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("face", LOADERS)
@pytest.mark.costly(4)
def test_a_ctrl_c_in_a_call_leaves_the_loader_as_before_or_as_behind_it(face: str, call: str, step: int) -> None:
    """Its position, its batches under way and those of the next epochs. The slow cases interrupt at every line."""
    if call in ONLY_OF_OUR_ORDER and face in OF_TORCH:
        pytest.skip("torch's order has no such call, or it counts from the next epoch on")
    arguments, do = CALLS[call]

    def begun(state: Any) -> tuple[Any, Any]:
        torch.manual_seed(7)
        loader = LOADERS[face](Heard(), 2, **arguments())
        if call == "load_state_dict" and state is not None:
            loader.load_state_dict(begun(None)[0].state_dict())  # a position that another one takes the place of
        iterator = iter(loader)
        next(iterator), next(iterator)
        return loader, iterator

    def seen(loader: Any, iterator: Any) -> list[Any]:
        torch.manual_seed(8)
        place = [len(loader), json.dumps(loader.state_dict()), getattr(loader, "epoch", None), len(loader.dataset)]
        if face not in OF_TORCH:  # where the dataset is told the epoch at once
            place += batches(iterator)
        return [*place, *batches(loader), "next", *batches(loader)]

    loader, _ = begun(None)
    batches(loader)
    iterator = iter(loader)
    next(iterator)
    state = through_json(loader.state_dict())
    before, behind = begun(state), begun(state)
    do(behind[0], state)
    allowed = [seen(*before), seen(*behind)]
    assert (allowed[0] == allowed[1]) == (call == "state_dict")
    for line in itertools.count(1, step):
        loader, iterator = begun(state)
        interrupt, tracer = InterruptInCalls(line), sys.gettrace()
        try:
            sys.settrace(interrupt)
            do(loader, state)
        except KeyboardInterrupt:
            assert interrupt.fired
        finally:
            sys.settrace(tracer)
        assert seen(loader, iterator) in allowed, line
        if not interrupt.fired:
            break
    assert line > 2 * step


def test_a_signal_handler_may_save_a_state_while_a_loaded_position_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *_: states.append(loader.state_dict()))
    try:
        for line in itertools.count(1):
            sampler = RandomSampler(12)
            loader = ShardedDataLoader(range(12), 4, sampler=sampler, seed=1)
            next(iter(loader))
            loader.load_state_dict(loader.state_dict())
            sampler.set_epoch(5)
            tracer, tracing = InterruptAt(line, ("epochs.py",)), sys.gettrace()
            sys.settrace(tracer)
            state = loader.state_dict()
            sys.settrace(tracing)
            if not tracer.fired:
                break
            assert states.pop() == state, line
    finally:
        signal.signal(signal.SIGINT, before)
    assert line > 5


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_a_ctrl_c_while_a_dropped_loader_closes_comes_when_it_has_closed(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[bool]()

    def close() -> None:
        signal.raise_signal(signal.SIGINT)
        closed.append(True)

    monkeypatch.setattr(InlinePool, "closer", lambda pool: close)
    with pytest.raises(KeyboardInterrupt):
        iterator = iter(kind(range(4), 2))
        next(iterator)
        del iterator
        threading.Event().wait(10)
    assert closed
