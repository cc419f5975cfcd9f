"""Slots: where they lie, when they are used again, how the arena grows and what it says when it cannot."""

import contextlib
import errno
import gc
import itertools
import os
import signal
import sys
import threading
import warnings
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from calls import calls_of
from conftest import PROCESS_POOLS, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from injection import InterruptAt
from memory_samples import SHAPE, arena_of
from refusing import in_child
from samples import Filled

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.base.limits import Limit
from sharded_loader.engine.messages import Result, pack_result, unpack_result
from sharded_loader.memory import arena as arena_module
from sharded_loader.memory.arena import (
    FIRST_SEGMENT,
    KEPT,
    LEAST_BYTES,
    PAGE,
    PAUSE,
    WINDOW,
    Arena,
    RecentSizes,
    ReusedMemory,
)
from sharded_loader.memory.codec import SlotWriter, decode
from sharded_loader.memory.segments import Slot

posix = pytest.mark.skipif(sys.platform == "win32", reason="POSIX only")


@pytest.fixture
def new():
    """Makes arenas. They are closed after the test."""
    made = []
    yield lambda *given: made.append(Arena(*given)) or made[-1]
    for one in made:
        one.close()


@pytest.fixture
def arena(new):
    return new()


def take(arena, nbytes):
    slot = arena.take(nbytes)
    assert slot is not None
    return slot


def lend(arena, slot):
    """All of the slot's memory."""
    (whole,) = arena.lend(slot, [(0, slot.nbytes)])
    return whole


def test_the_first_that_fits_is_taken_and_neighbours_join_without_gaps(arena):
    a, b, c, d = (take(arena, 1 << 16) for _ in range(4))
    arena.give(b)
    assert take(arena, 1 << 16) == b
    for slot in (a, c, b):  # b comes between two that are free already
        arena.give(slot)
    joined = take(arena, 3 << 16)
    assert (joined.offset, joined.nbytes) == (a.offset, 3 << 16)
    arena.give(joined)
    arena.give(d)
    whole = take(arena, FIRST_SEGMENT)
    assert whole.offset == 0 and len(arena.segments) == 1
    arena.give(whole)
    for nbytes in (100_000, 300_000, 150_000, 1_000_000):
        for slot in [take(arena, nbytes) for _ in range(4)]:
            arena.give(slot)
    assert arena.nbytes == FIRST_SEGMENT


def test_any_number_of_batches_takes_a_few_descriptors_up_to_a_share_of_what_is_free(new, monkeypatch):
    arena = new(1 << 30)
    slots = [take(arena, 256 << 10) for _ in range(1000)]
    assert len(set(slots)) == 1000
    assert len(arena.segments) <= 30
    monkeypatch.setattr(arena_module.limits, "free_bytes", lambda: Limit(64 << 20, "the machine's memory"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    arena = new()
    while arena.take(1 << 20) is not None:
        pass
    assert arena.nbytes == 8 << 20


@pytest.mark.parametrize("max_bytes", [0, 1, 64, 4095, 4096, 10_000, 1_000_000, 5_000_000])
def test_the_bound_is_kept(max_bytes, new):
    arena = new(max_bytes)
    for nbytes in (3000, 64):  # without a warning
        while arena.take(nbytes) is not None:
            pass
    assert arena.nbytes <= max_bytes
    assert arena.nbytes > max_bytes - PAGE  # and used up
    assert arena.take(max_bytes + 1) is None


@pytest.mark.parametrize("held", [0, 3])
def test_a_batch_as_large_as_the_last_one_takes_three_calls(arena, held):
    """The road of a batch whose worker has a slot of its own. And what makes the result."""
    sizes, kept = RecentSizes(), []
    for number in range(10):
        encoded = pack_result(Result(0, number, [np.full((100, 100), number)]), SlotWriter(np.empty(1 << 20, np.uint8)))
        assert encoded is not None
        batches = []

        def road(encoded=encoded, batches=batches):
            sizes.note(100_000)
            own = arena.returned[0]
            slot = own.popleft().resource if own else arena.take(sizes.wanted)
            buffers = arena.lend(slot, encoded.places)
            batches.append(unpack_result(0, 0, decode(encoded.pickled), buffers))

        calls = calls_of(road)
        if number > held + 1:
            assert calls == ["note", "lend", "decode", "unpack_result"]
        if number < held:
            kept.append(batches)


def test_what_comes_back_is_used_for_batches_of_any_other_size(new):
    arena = new(FIRST_SEGMENT)
    for nbytes in (FIRST_SEGMENT, FIRST_SEGMENT // 2, FIRST_SEGMENT):
        lend(arena, take(arena, nbytes))


# -- exhaustion -----------------------------------------------------------------------------------------------


def test_a_limit_of_the_system_is_named_with_the_bytes(monkeypatch, new):
    limit = Limit(1_000_000, "the memory limit of cgroup /sys/fs/cgroup/job")
    monkeypatch.setattr(arena_module.limits, "free_bytes", lambda: limit)
    arena = new(1 << 30)
    with pytest.raises(MemoryError, match=r"2,002,944 bytes wanted, 0 in use.* cgroup /sys/fs/cgroup/job .*1,000,000"):
        arena.take(2_000_000)
    with pytest.raises(MemoryError, match="901,120 bytes wanted"):
        arena.take(900_000)  # a quarter more must be free
    assert arena.nbytes == 0
    assert take(arena, 300_000).nbytes >= 300_000  # what there is can be had


@pytest.fixture
def no_descriptors():
    """No descriptor is left; the value says that there are some again."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    yield lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@posix
@pytest.mark.parametrize("have", [False, True])
def test_without_descriptors_batches_go_through_the_pipe_until_there_are_some(have, request, monkeypatch, new):
    arena = new(1 << 30)
    if have:
        take(arena, 1000)
    monkeypatch.setattr(arena_module, "create", tries := Mock(wraps=arena_module.create))
    raised = request.getfixturevalue("no_descriptors")
    expected = r"bytes of shared memory wanted, .*limit of \d+ of open files .*ulimit -n.*through the pipe"
    with pytest.warns(UserWarning, match=expected) as seen:
        for _ in range(3 * PAUSE):
            assert arena.take(16 << 20) is None
    assert len(seen) == 1 and tries.call_count == 3
    raised()
    while arena.take(16 << 20) is None:
        assert arena._take_count < 5 * PAUSE


@pytest.fixture
def small_mount(monkeypatch):
    """A mount of 64 MB under the shm back end; yields the bytes in it."""
    used = [0]

    def create(number, nbytes):
        if used[0] + nbytes > 64 << 20:
            where = ["/dev/shm"] if os.environ.get("SHARDED_LOADER_MEMORY") == "shm" else []
            raise OSError(errno.ENOSPC, "No space left on device", *where)
        used[0] += nbytes
        return real(number, nbytes)

    real = arena_module.create
    monkeypatch.setattr(arena_module, "create", create)
    return used


def test_a_full_mount_is_a_bound_and_memory_that_the_machine_has_not_got_an_error(small_mount, new):
    arena = new(1 << 30)
    with pytest.raises(MemoryError, match=r"bytes .*No space left"):
        arena.take(70 << 20)
    arena = new(1 << 30)
    first = take(arena, 38 << 20)
    with pytest.warns(UserWarning, match="No space left"):
        assert arena.take(38 << 20) is None
    arena.give(first)
    assert take(arena, 38 << 20) == first


@posix
def test_a_batch_larger_than_the_mount_goes_through_the_pipe(small_mount, monkeypatch, new):
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "shm")
    arena = new(1 << 30)
    with pytest.warns(UserWarning, match=r"bytes .*No space left.* /dev/shm mount .*--shm-size") as seen:
        for _ in range(3 * PAUSE):
            assert arena.take(70 << 20) is None
    assert len(seen) == 1
    assert take(arena, 1 << 20)  # what there is can be had


@pytest.mark.parametrize("limit", ["of the machine", "of the mount"])
def test_near_a_limit_the_segments_are_few_too(limit, request, monkeypatch, new):
    arena, count = new(1 << 30), 0
    if limit == "of the mount":
        request.getfixturevalue("small_mount")
    else:
        left = lambda: Limit(max(0, (100 << 20) - arena.nbytes), "the machine's memory")  # noqa: E731
        monkeypatch.setattr(arena_module.limits, "free_bytes", left)
    with pytest.warns(UserWarning, match="No space left") if limit == "of the mount" else pytest.raises(MemoryError):
        while arena.take(200 << 10) is not None:
            count += 1
    assert count > 300 and len(arena.segments) < 30


def test_leases_end_in_any_thread_and_inside_the_collector(arena):
    for _ in range(4):
        held = [lend(arena, take(arena, 1 << 16)) for _ in range(10)]
        threads = [threading.Thread(target=held.pop) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        cycle = [held.pop()]
        cycle.append(cycle)
        del cycle
        held.clear()
        gc.collect()
        assert arena.lent == 0
    assert arena.nbytes == FIRST_SEGMENT


def test_what_a_device_may_still_read_and_what_comes_back_after_close_disturb_no_later_segment(arena):
    reads = [True]
    first = Arena(register=lambda mapping: lambda: not reads[0])
    take(first, 100)
    first.close()
    assert len(arena_module.STILL_READ) == 1
    take(arena, 100)
    assert len(arena_module.STILL_READ) == 1
    reads.clear()
    reads.append(False)
    take(arena, 2 * FIRST_SEGMENT)
    assert arena_module.STILL_READ == []
    arena = Arena()
    whole = lend(arena, take(arena, 1 << 16))
    arena.close()
    again = lend(arena, take(arena, 1 << 16))
    del whole
    assert arena.take(1 << 16) != Slot(0, 0, 1 << 16)
    assert arena.lent == 1
    del again
    arena.close()


@posix
def test_what_is_lent_at_a_fork_is_used_again_when_the_child_has_ended(arena):
    before, free = take(arena, 1 << 16), take(arena, 1 << 16)
    gone = take(arena, 1 << 16)
    lent, returned = lend(arena, before), lend(arena, gone)
    del returned
    ends = [arena.hold_for_child(), arena.hold_for_child()]
    after = lend(arena, take(arena, 1 << 16))
    del lent, after
    assert arena.lent == 1  # the child's
    arena.give(free)
    slots = [take(arena, 1 << 16) for _ in range(200)]
    assert len(arena.segments) > 1
    assert before not in slots and free in slots and gone in slots
    os.close(ends.pop())
    assert before not in [take(arena, 1 << 16) for _ in range(200)]  # another child lives
    os.close(ends.pop())
    assert before in [take(arena, 1 << 16) for _ in range(200)]
    assert arena.hold_for_child() is None and arena.lent == 0


@posix
def test_children_that_have_ended_cost_no_descriptors_while_what_was_lent_lives_on(arena):
    lent = lend(arena, take(arena, 1 << 16))
    before = psutil.Process().num_fds()
    for _ in range(20):
        os.close(arena.hold_for_child())  # as after the fork, and a child that ends at once
    assert psutil.Process().num_fds() <= before + 1
    arena.close_descriptors()
    assert arena.hold_for_child() is None  # in a child: nothing there reads those ends
    del lent


@posix
def test_batches_that_a_child_holds_stay_as_they_are(arena):
    whole = [lend(arena, take(arena, 1000))]
    assert in_child(lambda: (whole.clear(), gc.collect())[0]) == "None"
    assert arena.lent == 1 and whole.pop() is not None


def at_every_line(do, other):
    """``do()``, once for each line of the arena in it. Before that line, as another thread might, ``other()`` runs."""
    before, tracing, line, fired = signal.signal(signal.SIGUSR1, lambda *_: other()), sys.gettrace(), 0, True
    try:
        while fired:
            line += 1
            tracer = InterruptAt(line, ("arena.py",), "SIGUSR1")
            sys.settrace(tracer)
            do()
            sys.settrace(tracing)
            fired = tracer.fired
    finally:
        sys.settrace(tracing)
        signal.signal(signal.SIGUSR1, before)
    return line


@posix
def test_a_fork_in_one_thread_and_a_look_from_one_disturb_no_other_at_work(arena):
    live = []

    def work():
        slot = take(arena, 64)
        assert not any(_overlap(slot, other) for other, _ in live)
        live.append((slot, lend(arena, slot)))

    def go_on():
        live.clear()
        work(), work()

    ends = []
    assert at_every_line(go_on, lambda: ends.append(arena.hold_for_child())) > 30
    for end in filter(None, ends):
        os.close(end)  # as after the fork, whose child has ended
    assert at_every_line(lambda: arena.lent, lambda: len(live) < 9 and work()) > 3


def _overlap(a, b):
    return a.segment == b.segment and a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes


class Slots(RuleBasedStateMachine):
    """Whatever is taken, given, lent, returned and forked: no two live slots share a byte."""

    filling = Bundle("filling")
    lent = Bundle("lent")

    @initialize(max_bytes=st.integers(0, 300_000))
    def begin(self, max_bytes):
        self.arena = Arena(max_bytes)
        self.max_bytes = max_bytes
        self.live = []
        self.children = []
        self.out = []

    @rule(target=filling, nbytes=st.one_of(st.integers(0, 300), st.integers(0, 100_000)))
    def take(self, nbytes):
        with contextlib.suppress(MemoryError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            slot = self.arena.take(nbytes)
            if slot is not None:
                assert slot.nbytes >= max(1, nbytes) and slot.offset % 64 == 0
                assert slot.offset + slot.nbytes <= self.arena.segments[slot.segment].nbytes
                for other in self.live + self.held():
                    assert not _overlap(slot, other)
                self.live.append(slot)
            return slot

    def held(self):
        """What children can read."""
        return [slot for _, slots in self.children for slot in slots]

    @rule(slot=consumes(filling))
    def give(self, slot):
        if slot is not None:
            self.live.remove(slot)
            self.arena.give(slot)

    @rule(target=lent, slot=consumes(filling))
    def lend(self, slot):
        if slot is None:
            return None
        self.out.append(slot)
        whole = lend(self.arena, slot)
        assert whole.ctypes.data % 64 == 0
        return [slot, whole[: slot.nbytes // 2]]

    @rule(batch=consumes(lent))
    def drop(self, batch):
        if batch is not None:
            batch.pop()
            self.live.remove(batch[0])
            self.out.remove(batch[0])

    @rule()
    def fork(self):
        if (end := self.arena.hold_for_child()) is not None:
            self.children.append((end, [*self.out, *self.held()]))

    @rule(last=st.booleans())
    def child_ends(self, last):
        if self.children:
            os.close(self.children.pop(-1 if last else 0)[0])

    @invariant()
    def counted(self):
        if hasattr(self, "arena"):
            assert self.arena.lent >= len({*self.out, *self.held()})  # and what ended children held, until it is needed
            assert self.arena.nbytes <= self.max_bytes

    def teardown(self):
        if hasattr(self, "arena"):
            self.arena.close()
        for end, _ in getattr(self, "children", ()):
            os.close(end)


TestSlots = Slots.TestCase
TestSlots.settings = settings(
    max_examples=max(60 * settings.default.max_examples // 100, 15), stateful_step_count=40, deadline=None
)


@given(st.lists(st.integers(0, 1 << 40), max_size=200), st.integers(1, 70))
def test_it_holds_the_largest_of_the_window_and_changes_only_when_it_must(sizes, window):
    recent = RecentSizes(window)
    assert recent.wanted == 0
    for number, nbytes in enumerate(sizes, 1):
        before = recent.wanted
        recent.note(nbytes)
        largest = max(sizes[max(0, number - window) : number])
        assert recent.wanted >= largest
        assert before == recent.wanted or nbytes > before or 2 * largest < before
        if number > 1 and before != recent.wanted and before:
            assert recent.wanted <= largest + largest // 8 + 2 * PAGE


def test_one_large_batch_does_not_make_all_later_slots_large():
    # Batch 4 has 64 samples, every other one has 4.
    starts = range(68, 68 + 4 * (WINDOW + 30), 4)
    order = [[n, n, n, n] for n in range(4)] + [list(range(64))] + [list(range(s, s + 4)) for s in starts]
    pool = ProcessPool(2, start_method=PROCESS_POOLS[0])
    with ShardedDataLoader(Filled(600), batch_sampler=order, pool=pool, prefetch=4) as loader:  # however cheap they are
        held = []
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == order[number]
            if number > WINDOW + 15:
                held.append(batch)
        assert arena_of(loader).lent == len(held) > 5
        addresses = sorted(batch.data_ptr() for batch in held)
        assert min(after - before for before, after in itertools.pairwise(addresses)) < 8 * SHAPE


# -- large batches that are made in this process lie in memory that is used again -------------------------------------


LARGE = LEAST_BYTES
U8 = np.dtype(np.uint8)


def address(array):
    return int(array.__array_interface__["data"][0])


def test_memory_that_has_come_back_is_handed_out_again():
    empty = ReusedMemory()
    first = empty((2, LARGE), U8)
    where = address(first)
    assert first.shape == (2, LARGE) and first.flags.writeable and first.flags.c_contiguous and where % 64 == 0
    second = empty((2, LARGE), U8)
    assert not np.shares_memory(first, second)
    del first
    assert address(empty((LARGE // 2, 4), np.dtype("f4"))) != where  # another size
    assert address(empty((LARGE // 4, 2), np.dtype("f4"))) == where
    for array in (empty((LARGE - 1,), U8), empty((LARGE,), np.dtype(object)), empty((0, 5), U8)):
        assert array.base is None  # small arrays and objects are new
    assert empty((LARGE,), np.dtype(object))[0] is None


HOLDS = {
    "a view": lambda array: array[5:7],
    "a view of another dtype": lambda array: array.view(np.int16)[1:][::2],
    "strides": lambda array: np.lib.stride_tricks.as_strided(array[8:].view(np.int32)[::2], (2, 2), (0, 0)),
    "a tensor": torch.from_numpy,
    "a slice of a tensor": lambda array: torch.from_numpy(array)[3:5],
    "a storage": lambda array: torch.from_numpy(array).untyped_storage(),
    "dlpack": lambda array: torch.from_dlpack(array),
    "a memoryview": lambda array: memoryview(array)[4:],
    "autograd": lambda array: torch.from_numpy(array.view(np.float32)) * torch.ones(1, requires_grad=True),
}


@pytest.mark.costly(4)
@pytest.mark.parametrize("how", HOLDS)
def test_what_is_held_in_any_way_is_not_used_again(how, arena):
    empty = ReusedMemory()
    array = empty((LARGE,), U8)
    where = address(array)
    held = HOLDS[how](array)
    del array
    assert all(address(empty((LARGE,), U8)) != where for _ in range(5))
    del held
    gc.collect()
    assert where in {address(one) for one in [empty((LARGE,), U8) for _ in range(5)]}
    slot = take(arena, LARGE)  # and so it is with memory of workers
    held = HOLDS[how](lend(arena, slot))
    gc.collect()
    assert arena.lent == 1 and take(arena, LARGE) != slot
    del held
    gc.collect()
    assert arena.lent == 0 and take(arena, LARGE) == slot


def test_what_is_not_wanted_any_more_goes_and_what_is_held_when_it_is_cleared_stays():
    empty = ReusedMemory()

    def kept():
        return sum(len(block) for blocks in empty._free.values() for _, block in blocks)

    for _ in range(2):
        held = [empty((2 * LARGE,), U8) for _ in range(10)]
        del held
    empty((LARGE,), U8)
    assert kept() >= 20 * LARGE
    for _ in range(KEPT + 1):
        empty((LARGE,), U8)
    assert kept() == 0
    held = empty((LARGE,), U8)
    held[...] = 7
    empty.clear()
    assert kept() == 0
    for other in [empty((LARGE,), U8) for _ in range(3)]:
        other[...] = 1
    assert (held == 7).all()


@posix
def test_threads_never_get_the_same_memory():
    empty, live = ReusedMemory(), []

    def one():
        live.append(empty((LARGE,), U8))

    def go_on():
        live.clear()
        one()
        live.clear()  # its block is free
        one()
        assert len(set(map(address, live))) == len(live)

    assert at_every_line(go_on, one) > 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_keeps_what_it_holds():
    empty = ReusedMemory()
    held = empty((LARGE,), U8)
    held[...] = 7
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go[0], 1)
        os.write(done[1], b"+" if (held == 7).all() else b"-")
        os._exit(0)
    del held
    empty((LARGE,), U8)[...] = 1
    os.write(go[1], b"x")
    assert os.read(done[0], 1) == b"+" and os.waitpid(pid, 0)
    for end in (*go, *done):
        os.close(end)


ROWS = Filled(40, LARGE // 8)


@pytest.mark.costly(2)
@pytest.mark.parametrize("source", [ROWS, ArrayDataset(np.stack([ROWS[i] for i in range(40)]))], ids=type)
@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_loader_uses_memory_again_and_what_the_user_holds_stays(pool, source):
    with ShardedDataLoader(source, 4, pool=make_pool(pool)) as loader:
        seen = {}
        held = []
        for epoch in range(3):
            for number, batch in enumerate(loader):
                seen[batch.data_ptr()] = seen.get(batch.data_ptr(), 0) + 1
                if epoch == 1 and number % 3 == 0:
                    held.append((number, batch[1:3]))
                del batch
        assert max(seen.values()) > 2 and sum(seen.values()) == 30
        for number, rows in held:
            assert [row.unique().tolist() for row in rows] == [[4 * number + 1], [4 * number + 2]]
