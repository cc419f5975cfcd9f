"""A Ctrl-C at any moment leaves a loader that can go on: no batch is lost, none comes twice, nothing hangs."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest
from conftest import ahead
from injection import InterruptAt, next_interrupted
from programs import run_forked

from sharded_loader import ProcessPool, ShardedDataLoader
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


def test_interrupt_inside_the_dataset_reads_the_batch_again() -> None:
    class Interrupted:
        armed = True

        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> int:
            if index == 3 and self.armed:
                type(self).armed = False
                signal.raise_signal(signal.SIGINT)
            return index

    iterator = iter(ShardedDataLoader(Interrupted(), 2))
    assert next(iterator).tolist() == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(iterator)
    assert [batch.tolist() for batch in iterator] == [[2, 3], [4, 5]]


class InterruptAtSlot(InterruptAt):
    """Raises before the n-th line of what hands a slot from its worker to the user."""

    HANDS = ("_take", "_decode", "lend", "submit")

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        # The files of these functions, whether or not the pump has them: `lend` is the arena's.
        if frame.f_code.co_name not in self.HANDS or "sharded_loader" not in frame.f_code.co_filename:
            return None
        return super().__call__(frame, event, arg)


@pytest.mark.slow
def test_interrupt_while_a_slot_changes_hands_loses_no_slot() -> None:
    data = np.broadcast_to(np.arange(2000)[:, None], (2000, 4096))
    pool = ProcessPool(2, start_method="fork")
    with ahead(ShardedDataLoader(data, 4, pool=pool, prefetch=4), False) as loader:
        arena = loader._pipeline.pool._transport.arena
        iterator = iter(loader)
        expected = iter(range(0, 2000, 4))
        for _ in range(10):  # the first ones are in no slot
            assert int(next(iterator)[0, 0]) == next(expected)
        interrupted = set()
        at_slot = functools.partial(InterruptAtSlot, modules=("pool.py", "arena.py"))
        for line in range(1, 50):
            for _ in range(3):  # how many lines one call runs depends on what has come
                got, fired = next_interrupted(iterator, line, at_slot)
                for batch in got:
                    assert int(batch[0, 0]) == next(expected)
                if fired:
                    interrupted.add(line)
                    break
            for _ in range(2):
                batch = next(iterator)
                assert int(batch[0, 0]) == int(batch[-1, -1]) - 3 == next(expected)
        assert len(interrupted) > 25
        for batch in iterator:
            assert int(batch[0, 0]) == next(expected)
        del batch, got
        assert arena.lent == 0
        free = sum(end - start for parts in arena._free for start, end in parts)
        free += sum(lease.resource.nbytes for lease in arena.returned)
        taken = [slot for worker in loader._pipeline.pool._transport.workers for slot in worker.slots.values() if slot]
        assert free + sum(slot.nbytes for slot in taken) == arena.nbytes
