"""A Ctrl-C while an epoch begins, or inside a sampler that is not ours: the epoch is not lost, nothing stays behind."""

from __future__ import annotations

import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import covering, make_pool
from injection import PUMP, InterruptAt
from inside import pipeline_of
from test_resume import SAMPLERS, batches, through_json

from sharded_loader import ShardedDataLoader, ThreadPool
from sharded_loader.randomness import rng

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


def interrupted(number: int, call: Callable[[], Any]) -> tuple[list[Any], bool]:
    """What ``call`` returns, in a list, or nothing if it was interrupted at its line of this number; whether it was."""
    tracer = InterruptInSampling(number)
    before = sys.gettrace()
    got = []
    try:
        sys.settrace(tracer)
        got.append(call())
    except KeyboardInterrupt:
        assert tracer.fired
    finally:
        sys.settrace(before)
    return got, tracer.fired


def make(kind: str, pool: str) -> ShardedDataLoader:
    return ShardedDataLoader(range(40), seed=5, pool=make_pool(pool, 1), prefetch=2, **SAMPLERS[kind]())


def places(kind: str) -> list[Any]:
    """The undisturbed stream of three epochs."""
    loader = make(kind, "inline")
    return [batches(loader) for _ in range(3)]


@pytest.mark.costly
@covering(1, pool=["inline", "thread"], kind=KINDS, iterator=["the same", "another"])
@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 61])
def test_interrupted_anywhere_in_the_first_next_no_epoch_has_begun(
    pool: str, kind: str, iterator: str, step: int
) -> None:
    """The slow cases interrupt at every line."""
    expected = places(kind)
    line = 1
    while True:
        with make(kind, pool) as loader:
            assert batches(loader) == expected[0]
            state = loader.state_dict()
            one = iter(loader)
            got, fired = interrupted(line, lambda: next(one))  # noqa: B023 - called at once
            if not got:
                assert len(pipeline_of(loader).runs) <= 1, line
                assert (loader.epoch, loader.position) == (1, 0)
                assert through_json(loader.state_dict()) == state
            rest = batches(one if got or iterator == "the same" else loader)
            assert [batch.tolist() for batch in got] + rest == expected[1], line
            assert batches(loader) == expected[2]
            loader.batch_sampler.set_epoch(1)
            assert loader.epoch == 1, line  # the call is heard
        assert not pipeline_of(loader).runs, line
        if not fired:
            break
        line += 13 if pool == "thread" else step
    assert line > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*KINDS, "stateful"])
@pytest.mark.parametrize("at", [0, 2])
def test_interrupted_anywhere_in_a_sampler_the_stream_goes_on(kind: str, at: int) -> None:
    expected = places(kind)
    line = 1
    while True:
        random.seed(1), np.random.seed(1)
        generators = random.getstate(), np.random.get_state()[1].tolist()
        loader = make(kind, "inline")
        iterator = iter(loader)
        first = batches(iterator, at)
        got, fired = interrupted(line, lambda: next(iterator))  # noqa: B023 - called at once
        assert (random.getstate(), np.random.get_state()[1].tolist()) == generators, line
        assert not rng._lock._is_owned(), line  # or other threads would wait for ever
        assert rng.reading.get() is None, line  # or sample_rng() would give the same generator for ever
        assert loader.state_dict()["epoch"] == 0
        first += [batch.tolist() for batch in got] + batches(iterator)
        second = batches(loader)
        if kind == "stateful" and at == 0:
            # Its order comes from how often it was started: another one, but a whole one.
            assert [sorted(sum(epoch, [])) for epoch in (first, second)] == [list(range(23))] * 2, line
        else:
            assert [first, second] == expected[:2], line
        if not fired:
            break
        line += 1
    assert line > 50


class Interrupts:
    """A sampler with a state, in which a Ctrl-C comes."""

    def __init__(self) -> None:
        self.at = 0
        self.armed = True

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        while self.at < 12:
            if self.at == 6 and self.armed:
                self.armed = False
                signal.raise_signal(signal.SIGINT)
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


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
