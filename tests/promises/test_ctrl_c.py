"""A Ctrl-C at any moment leaves a loader that can go on: no batch is lost, none comes twice, nothing hangs."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from injection import InterruptAt, next_interrupted
from programs import run_forked

from sharded_loader import ShardedDataLoader
from sharded_loader.engine.pool import Pool


@pytest.mark.parametrize("step", [23, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
@pytest.mark.costly
def test_what_a_signal_raises_at_any_line_of_next_passes_and_no_batch_is_lost(
    new_pool: Callable[..., Pool], signal_name: str, step: int
) -> None:
    interrupt = functools.partial(InterruptAt, name=signal_name)
    loader = ShardedDataLoader(range(100_000), 3, pool=new_pool(), num_shards=2, prefetch=4)
    expected = iter(range(0, 100_000, 3))
    with loader:
        iterator = iter(loader)
        assert next(iterator)[0][0] == next(expected)
        line = 1
        while True:
            got, fired = next_interrupted(iterator, line, interrupt)
            for batch in got:
                assert batch[0][0] == next(expected)
            if not fired:
                break
            # The loader goes on, in order, with all that was in flight.
            for _ in range(2):
                assert next(iterator)[0][0] == next(expected)
            line += step
        assert line > 60


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
        except KeyboardInterrupt:
            print("interrupted", flush=True)
        for _ in range(5):
            seen.append(next(iterator)[0].item())
        assert seen == list(range(0, 4 * len(seen), 4)), seen
        loader.close()
        print("went on", flush=True)
    """
    done = run_forked(script)
    assert done.stdout.split("\n")[:2] == ["interrupted", "went on"], done
    assert done.stderr == ""
    assert done.returncode == 0
