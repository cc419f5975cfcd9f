"""Slots stay with the worker that touched them, and no batch that fits goes through the pipe, not even the first."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, let_workers_finish, make_pool
from memory_samples import arena_of

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader, SimpleDataset, empty
from sharded_loader.memory.arena import FIRST_SEGMENT, Arena

MB = 1 << 20
ROWS = ArrayDataset(np.arange(96 * MB // 8, dtype=np.int64).reshape(96, -1))
"""96 rows of 1 MB."""


@pytest.fixture
def arena():
    made = Arena(1 << 30)
    yield made
    made.close()


def lend(arena, slot, worker):
    [whole] = arena.lend(slot, [(0, slot.nbytes)], worker)
    return whole


def test_a_worker_gets_its_own_slot_then_an_untouched_one_then_another_worker_s(arena):
    first, second = arena.take(MB, 0), arena.take(MB, 1)
    batches = [lend(arena, first, 0), lend(arena, second, 1)]
    batches.clear()
    assert arena.take(MB, 1) == second
    untouched = [arena.take(MB, 1) for _ in range(arena.nbytes // MB - 2)]
    assert first not in untouched and len(arena.segments) == 1
    assert arena.take(MB, 1) == first and len(arena.segments) == 1


def test_slots_of_a_worker_that_has_several_are_given_away_first(arena):
    slots = [arena.take(FIRST_SEGMENT // 4, worker) for worker in (0, 1, 1, 2)]
    batches = [lend(arena, slot, worker) for slot, worker in zip(slots, (0, 1, 1, 2), strict=True)]
    batches.clear()
    assert arena.take(FIRST_SEGMENT // 4, 3) in slots[1:3]


@pytest.mark.parametrize("megabytes", [1, 4, 16, 64])
@pytest.mark.parametrize("in_flight", [18, 22, 34])
def test_memory_fits_what_is_in_flight(monkeypatch, megabytes, in_flight):
    arena = Arena(1 << 40)
    monkeypatch.setattr(
        "sharded_loader.memory.arena.create", lambda number, nbytes: type("S", (), {"nbytes": nbytes})()
    )
    for _ in range(in_flight):
        arena.take(megabytes * MB)
    assert arena.nbytes <= 1.15 * in_flight * megabytes * MB and len(arena.segments) <= 9
    arena.segments = []


@pytest.fixture
def touched(monkeypatch):
    """Pairs of a worker and a slot that it has written."""
    pairs, lend = set(), Arena.lend

    def noted(arena, slot, places, worker=0):
        pairs.add((worker, slot))
        return lend(arena, slot, places, worker)

    monkeypatch.setattr(Arena, "lend", noted)
    return pairs


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_slot_stays_with_its_worker_as_long_as_all_have_time(touched, method):
    with ShardedDataLoader(ROWS, 2, pool=make_pool(method, 4), prefetch=8) as loader:
        batches, known, is_warm = iter(loader), set(), False
        for number, batch in enumerate(batches):
            del batch
            let_workers_finish(loader, batches)
            known = known if is_warm else touched.copy()
            # A worker that has started late has no slots of its own before.
            is_warm = number >= 16 and min(map([worker for worker, _ in known].count, range(4))) >= 2
    assert not {slot for _, slot in touched - known} & {slot for _, slot in known}  # there may be more slots


@pytest.fixture
def sent(monkeypatch):
    """Of each batch, the bytes that came through the pipe."""
    found, lend = [], Arena.lend

    def noted(arena, slot, places, worker=0):
        found.append(sum(0 if type(place) is tuple else len(place) for place in places))
        return lend(arena, slot, places, worker)

    monkeypatch.setattr(Arena, "lend", noted)
    return found


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_no_batch_goes_through_the_pipe_not_even_the_first_or_a_larger_one(method, sent):
    order = [[n] for n in range(8)] + [[8, 9, 10]] + [[n] for n in range(11, 20)]
    with ShardedDataLoader(ROWS, batch_sampler=order, pool=make_pool(method, 2)) as loader:
        for batch, indices in zip(loader, order, strict=True):
            assert batch[:, 0].tolist() == [n * MB // 8 for n in indices]
        assert loader.stats().slow_batches == 0
    assert sent == [0] * len(order)


def test_without_room_batches_go_through_the_pipe_and_come_right(sent):
    with ShardedDataLoader(ROWS, 2, pool=make_pool(PROCESS_POOLS[0], 2, max_bytes=3 * MB)) as loader:
        batches = list(loader)
        assert loader.stats().slow_batches > 0
    assert [batch[0, 0].item() for batch in batches] == [n * MB // 8 for n in range(0, 96, 2)]


def fork_and_exit():
    if not (child := os.fork()):
        os._exit(0)
    return os.waitpid(child, 0)[1]


def fork_and_look(batch):
    """The child reads the batch that its parent holds."""
    if not (child := os.fork()):
        os._exit(len(set(batch[:, 0].tolist())) != 4)
    return os.waitpid(child, 0)[1]


def validate():
    return sum(map(len, torch.utils.data.DataLoader(range(4), num_workers=2, multiprocessing_context="fork"))) - 4


CHILDREN = {
    "fork": lambda batch: fork_and_look(batch),
    "_exit": lambda batch: fork_and_exit(),
    "subprocess": lambda batch: subprocess.run([sys.executable, "-S", "-c", ""]).returncode,
    "torch's loader": lambda batch: validate(),
}


@pytest.mark.costly
@pytest.mark.skipif("fork" not in PROCESS_POOLS, reason="no fork")
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("how", CHILDREN)
def test_children_of_the_program_cost_no_memory_once_they_have_ended(machine, how, on_device):
    """The second half of 24 forks, or 100 in the slow test below, finds the memory of the first."""
    assert len(sizes_over(machine if on_device else None, CHILDREN[how], 24)) == 1


@pytest.mark.slow
@pytest.mark.skipif("fork" not in PROCESS_POOLS, reason="no fork")
@pytest.mark.parametrize("how", CHILDREN)
def test_a_hundred_children_cost_no_memory(machine, how):
    assert len(sizes_over(machine, CHILDREN[how], 100)) == 1


def sizes_over(machine, child, times):
    """The sizes of shared memory, and of what a device has registered, at each of the last forks."""
    sizes, options = set(), {"device": machine.devices[0]} if machine else {}
    with ShardedDataLoader(ROWS, 4, pool=make_pool("fork", 2), prefetch=4, **options) as loader:
        batches = iter(loader)
        for number in range(times):
            if (batch := next(batches, None)) is None:
                batch = next(batches := iter(loader))
            if machine:
                machine.finish()
            assert child(batch) == 0
            if number >= times // 2:
                sizes.add((arena_of(loader).nbytes, sum(machine.registered.values()) if machine else 0))
    return sizes


@pytest.mark.skipif("fork" not in PROCESS_POOLS, reason="no fork")
def test_a_worker_that_dies_while_it_waits_for_a_slot_costs_no_batch(monkeypatch):
    """Its batch is read again, and the slots of the dead are free."""
    parent, asked, take = os.getpid(), [], Arena.take
    data = SimpleDataset([np.full(MB // 8, n) for n in range(12)])

    def taken(arena, nbytes, worker=0, waiting=0):
        if not asked and os.getpid() == parent:
            asked.append(worker)
            os.kill(loader.pool.workers[worker].pid, 9)
        return take(arena, nbytes, worker, waiting)

    monkeypatch.setattr(Arena, "take", taken)
    with ShardedDataLoader(data, 2, pool=make_pool("fork", 2)) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == [[n, n + 1] for n in range(0, 12, 2)]
        assert loader.stats().replaced_workers == 1


def halves(samples):
    """The first half is written into the slot; with the second, a batch now and then exceeds it."""
    rows = np.stack(samples)
    first = empty(rows.shape, rows.dtype)
    first[:] = rows
    return first, np.repeat(rows, 1 + int(rows[0, 0]) // 16, axis=0)


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_slot_that_was_too_small_is_kept_until_the_worker_has_copied_out_of_it(monkeypatch, method):
    outgrown, kept, give, lend, send = {}, [], Arena.give, Arena.lend, ProcessPool._send_slot

    def sent(pool, worker, run, seq, nbytes):
        outgrown[worker.number] = worker.slots.get((run, seq))
        send(pool, worker, run, seq, nbytes)

    def lent(arena, slot, places, worker=0):
        outgrown.pop(worker, None)  # its result is here
        return lend(arena, slot, places, worker)

    def given(arena, slot):
        kept.append(slot not in outgrown.values())
        give(arena, slot)

    monkeypatch.setattr(ProcessPool, "_send_slot", sent)
    monkeypatch.setattr(Arena, "lend", lent)
    data = ArrayDataset(np.repeat(np.arange(96.0)[:, None], 5000, axis=1))
    with ShardedDataLoader(data, 2, pool=make_pool(method, 2), batchify_fn=halves) as loader:
        monkeypatch.setattr(Arena, "give", given)
        for number, (first, second) in enumerate(loader):
            assert first[:, 0].tolist() == [2 * number, 2 * number + 1] and (first == first[:, :1]).all()
            assert second[0, 0] == 2 * number and len(second) == 2 * (1 + 2 * number // 16)
    assert kept and all(kept)


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_first_batch_without_memory_is_an_error_and_not_a_slow_batch(monkeypatch, method):
    asked, take = [], Arena.take

    def full(arena, *given):
        asked.append(given)
        if len(asked) == 1:
            raise MemoryError("the container is full")
        return take(arena, *given)

    monkeypatch.setattr(Arena, "take", full)
    with ShardedDataLoader(ROWS, 4, pool=make_pool(method, 1)) as loader:
        batches = iter(loader)
        with pytest.raises(MemoryError, match="the container is full"):
            next(batches)
        assert [batch[0, 0].item() for batch in batches] == [n * MB // 8 for n in range(4, 96, 4)]
        assert loader.stats().slow_batches == 0
