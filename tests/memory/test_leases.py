"""What the user holds stays: over every start method and back end, however it is held, whatever else happens."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import METHODS, made, make_pool, shared_memory_names
from memory_samples import SHAPE, DiesInTheMiddle
from programs import run_forked, without_notices
from samples import Filled

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.memory.arena import Arena
from sharded_loader.memory.segments import Slot

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
BACKENDS = ("memfd", "shm", "named") if sys.platform.startswith("linux") else (None,)

BATCH = 4
PER_ROW = SHAPE // 4


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer decides, and reads the variable for each segment."""
    if request.param is not None:
        monkeypatch.setenv("SHARDED_LOADER_MEMORY", request.param)


def arena_of(loader: Any) -> Arena:
    arena: Arena = loader._pipeline.pool._transport.arena
    return arena


def is_batch(batch: torch.Tensor, first: int, size: int = BATCH) -> bool:
    expected = torch.arange(first, first + size, dtype=batch.dtype)
    return batch.shape == (size, PER_ROW) and bool((batch == expected[:, None]).all())


@contextlib.contextmanager
def loader_over(pool: Any, length: int = 240, **options: Any) -> Iterator[Any]:
    # So many in flight, however cheap the batches are, and none at the end of the epoch: the tests count slots.
    given = {"prefetch": 4, "prefetch_epochs": False, **options}
    with made(Filled(length), BATCH, pool=pool, **given) as loader:
        yield loader


@METHODS
@pytest.mark.costly
def test_a_batch_held_for_an_epoch_keeps_its_values_while_every_slot_is_reused(method: str, backend: None) -> None:
    with loader_over(make_pool(method)) as loader:
        held: dict[int, Any] = {}
        used: list[int] = []
        for number, batch in enumerate(loader):
            assert is_batch(batch, BATCH * number)
            if number == 20:
                held[number] = batch
            elif number == 21:
                held[number] = batch[1:3]
            elif number == 22:
                held[number] = batch.numpy()[::-1]
            elif number > 22:
                used.append(batch.data_ptr())
                batch.fill_(-1)  # and the user may write to what is his
            del batch
        assert arena_of(loader).lent == 3 and len(arena_of(loader).segments) == 1
        assert len(set(used)) <= 8  # reused
        assert not {array.__array_interface__["data"][0] for array in map(np.asarray, held.values())} & set(used)
        assert is_batch(held[20], 80)
        assert (held[21] == torch.tensor([[85.0], [86.0]])).all()
        assert (held[22] == np.array([[91], [90], [89], [88]])).all()
        held.clear()
        assert arena_of(loader).lent == 0


@METHODS
@pytest.mark.costly
def test_all_batches_can_be_held(method: str, backend: None) -> None:
    with loader_over(make_pool(method)) as loader:
        batches = list(loader)
        assert len(loader._pipeline.pool._transport.arena.segments) <= 4
        assert list(loader)  # another epoch over them
        assert arena_of(loader).nbytes <= 4 * len(batches) * BATCH * SHAPE  # slots are as large as batches
        assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(batches))
        assert len({batch.data_ptr() for batch in batches}) == len(batches)


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_other_pools_keep_them_too(pool: str) -> None:
    with loader_over(make_pool(pool)) as loader:
        batches = list(loader)
        list(loader)
        assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(batches))


class _Graph:
    """A graph that has saved the batch for the backward pass."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.weight = torch.ones(BATCH, 1, requires_grad=True)
        self.loss = (batch * self.weight).mean(1).sum()

    def read(self) -> list[float]:
        self.loss.backward()
        assert self.weight.grad is not None
        return self.weight.grad.flatten().tolist()


class _Thread:
    """Another thread holds the batch, and nobody else."""

    def __init__(self, batch: torch.Tensor) -> None:
        self.go = threading.Event()
        self.answer: list[float] = []
        self.thread = threading.Thread(target=self.work, args=([batch],), daemon=True)
        self.thread.start()

    def work(self, box: list[torch.Tensor]) -> None:
        batch = box.pop()
        self.go.wait()
        self.answer = batch[:, 0].tolist()

    def read(self) -> list[float]:
        self.go.set()
        self.thread.join()
        return self.answer


HOLDS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], list[float]]]] = {
    "the batch": (lambda b: b, lambda t: t[:, 0].tolist()),
    "a slice": (lambda b: b[:, 5:7], lambda t: t[:, 0].tolist()),
    "turned and of another dtype": (
        lambda b: b.view(torch.int32).T,
        lambda t: t[0].contiguous().view(torch.float32).tolist(),
    ),
    "detached": (lambda b: b.detach().unsqueeze(0), lambda t: t[0, :, 0].tolist()),
    "numpy": (lambda b: b.numpy(), lambda a: a[:, 0].tolist()),
    "a view of a view in numpy": (lambda b: b.numpy()[:, ::2][:, 1:][:, 3], lambda a: a.tolist()),
    "another dtype in numpy": (lambda b: b.numpy().view(np.int32)[:, 1], lambda a: a.view(np.float32).tolist()),
    "a memoryview": (lambda b: memoryview(b.numpy()), lambda m: np.asarray(m)[:, 0].tolist()),
    "dlpack": (np.from_dlpack, lambda a: a[:, 0].tolist()),
    "its storage": (
        lambda b: b.untyped_storage(),
        lambda s: torch.empty(0).set_(s, 0, (BATCH,), (PER_ROW,)).tolist(),
    ),
    "autograd": (_Graph, _Graph.read),
    "another thread": (_Thread, _Thread.read),
    "share_memory_": (lambda b: b.share_memory_(), lambda t: t[:, 0].tolist()),
}


@pytest.mark.slow
def test_however_it_is_held() -> None:
    """One batch is held in each way. Each goes back when what holds it is gone, and no earlier."""
    kept: dict[str, Any] = {}
    first, left = 20, iter(HOLDS)
    with loader_over(make_pool("fork"), 320) as loader:
        for number, batch in enumerate(loader):
            how = next(left, None) if number >= first else None
            if how is not None:
                kept[how] = HOLDS[how][0](batch)
            elif number >= first:
                batch.fill_(-1)
            del batch
        assert len(kept) == len(HOLDS) and number > first + 2 * len(HOLDS)
        arena = arena_of(loader)
        for place, how in enumerate(HOLDS):
            assert arena.lent == len(kept.keys() - {"share_memory_"}), how  # torch moves what is in that one elsewhere
            wanted = [float(BATCH * (first + place) + row) for row in range(BATCH)]
            assert HOLDS[how][1](kept.pop(how)) == wanted, how
            gc.collect()
        assert arena.lent == 0


def test_batches_stay_after_close_and_after_the_loader_is_gone() -> None:
    loader = ShardedDataLoader(Filled(), BATCH, pool=make_pool("fork"))
    kept = [batch for batch, _ in zip(iter(loader), range(30), strict=False)]
    loader.close()
    assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(kept))
    with pytest.raises(Exception, match="closed"):
        next(iter(loader))
    again = ShardedDataLoader(Filled(), BATCH, pool=make_pool("fork"))
    iterator = iter(again)
    kept += [next(iterator) for _ in range(30)]
    del again, iterator
    gc.collect()
    for start in (0, 30):
        assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(kept[start : start + 30]))


@pytest.mark.slow
def test_leases_that_end_after_the_loader_are_nobody_s_affair() -> None:
    loader = ShardedDataLoader(Filled(), BATCH, pool=make_pool("fork"))
    kept = list(loader)
    loader.close()
    other = ShardedDataLoader(Filled(), BATCH, pool=make_pool("fork"))
    batches = []
    for batch in other:
        kept.pop()
        batches.append(batch)
    assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(batches))
    other.close()


# -- bounds ---------------------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("max_bytes", [0, 1000, 100_000, 300_000, None])
@pytest.mark.costly(2)
def test_values_are_right_at_any_bound(method: str, max_bytes: int | None) -> None:
    with loader_over(ProcessPool(2, start_method=method, max_bytes=max_bytes), 120) as loader:
        held = []
        for number, batch in enumerate(loader):
            assert is_batch(batch, BATCH * number)
            if number % 9 == 0:
                held.append((number, batch))
        assert all(is_batch(batch, BATCH * number) for number, batch in held)
        assert max_bytes is None or arena_of(loader).nbytes <= max_bytes


@pytest.mark.costly(2)
@METHODS
@pytest.mark.parametrize("fit", [1, 4, 20])
def test_a_leak_ends_in_a_line_of_the_log_and_never_in_a_stall(
    method: str, fit: int, caplog: pytest.LogCaptureFixture
) -> None:
    bound = fit * (BATCH * SHAPE * 17 // 16 + 4096)
    leaked = []
    with loader_over(ProcessPool(2, start_method=method, max_bytes=bound), 480) as loader:
        leaked += loader
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert re.search(r"finds no room in shared memory .*max_bytes.*your program holds \d+ batches", record.getMessage())
    assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(leaked))


# -- growth ---------------------------------------------------------------------------------------------------


@METHODS
@pytest.mark.costly
def test_the_arena_grows_after_the_workers_have_started(method: str, backend: None) -> None:
    sizes = [1] * 6 + [4] * 6 + [40] * 4 + [300] * 4 + [1] * 4 + [600] * 2
    starts = [0, *itertools.accumulate(sizes)]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    data = Filled(starts[-1])
    held = []
    with ShardedDataLoader(data, batch_sampler=batches, pool=make_pool(method)) as loader:
        for number, batch in enumerate(loader):
            assert is_batch(batch, starts[number], sizes[number])
            held.append(batch)
        assert 2 <= len(arena_of(loader).segments) <= 6
    assert all(is_batch(batch, starts[number], sizes[number]) for number, batch in enumerate(held))


@pytest.mark.slow
def test_batches_of_any_size_in_any_order() -> None:
    rng = random.Random(1)
    sizes = [rng.choice([0, 1, 1, 2, 3, 7, 50]) or 1 for _ in range(150)]
    starts = [0, *itertools.accumulate(sizes)]
    batches = [list(range(start, start + size)) for start, size in zip(starts, sizes, strict=False)]
    held: dict[int, torch.Tensor] = {}
    with ShardedDataLoader(Filled(starts[-1]), batch_sampler=batches, pool=make_pool("fork", 3)) as loader:
        for number, batch in enumerate(loader):
            assert is_batch(batch, starts[number], sizes[number])
            held[number] = batch
            for old in rng.sample(sorted(held), min(len(held), rng.randrange(3))):
                assert is_batch(held.pop(old), starts[old], sizes[old])
        assert all(is_batch(batch, starts[number], sizes[number]) for number, batch in held.items())


def test_shards_of_one_batch_lie_in_one_slot_and_are_held_apart() -> None:
    with loader_over(make_pool("fork"), num_shards=2) as loader:
        held = []
        for number, (left, right) in enumerate(loader):
            assert is_batch(torch.cat([left, right]), BATCH * number)
            held.append(right)
            del left, right
        assert all((half[:, 0] == torch.tensor([4.0 * n + 2, 4.0 * n + 3])).all() for n, half in enumerate(held))


def test_two_iterators_do_not_write_into_each_other_s_batches() -> None:
    with loader_over(make_pool("fork"), 160) as loader:
        pairs = list(zip(iter(loader), iter(loader), strict=True))
        assert all(is_batch(batch, BATCH * n) for n, pair in enumerate(pairs) for batch in pair)
        assert all(one.data_ptr() != other.data_ptr() for one, other in pairs)


def test_an_epoch_that_is_broken_off_gives_its_slots_back() -> None:
    with loader_over(make_pool("fork")) as loader:
        for _ in range(12):
            for number, batch in enumerate(loader):
                assert is_batch(batch, BATCH * number)
                if number == 12:
                    break
            del batch
        list(map(is_batch, loader, itertools.count(0, BATCH)))
        assert arena_of(loader).lent == 0 and len(arena_of(loader).segments) == 1


# -- deaths ---------------------------------------------------------------------------------------------------


@METHODS
def test_a_worker_killed_while_it_writes_spoils_no_other_batch(method: str, tmp_path: Path) -> None:
    with loader_over(make_pool(method), batchify_fn=DiesInTheMiddle(101, tmp_path / "died")) as loader:
        owned = loader._pipeline.pool._transport
        iterator = iter(loader)
        got: dict[int, torch.Tensor] = {}
        given_early: list[Slot] = []
        give, processes = owned.arena.give, {worker.process.pid for worker in owned.workers}

        def checked(slot: Slot) -> None:
            # Of a worker's slots only those come back whose batches have arrived, until it is reaped.
            for worker in owned.workers:
                if slot in worker.slots.values() and worker.process.pid in processes and worker.is_alive():
                    given_early.append(slot)
            give(slot)

        owned.arena.give = checked
        for number, batch in enumerate(iterator):
            assert is_batch(batch, BATCH * number)
            got[number] = batch
        assert len(got) == 60
        assert all(is_batch(batch, BATCH * number) for number, batch in got.items())
        assert not given_early
        # The slot of the batch that died is free again.
        got.clear()
        del batch
        assert arena_of(loader).lent == 0
        free = sum(end - start for parts in owned.arena._free for start, end in parts)
        free += sum(lease.resource.nbytes for lease in owned.arena.returned)
        writing = sum(slot.nbytes for worker in owned.workers for slot in worker.slots.values())
        assert free + writing == owned.arena.nbytes


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("grandchild", [False, True])
@pytest.mark.costly
def test_a_batch_that_a_forked_child_holds_is_not_overwritten(grandchild: bool) -> None:
    with loader_over(make_pool("fork"), 400) as loader:
        iterator = iter(loader)
        for _ in range(20):
            batch = next(iterator)
        assert is_batch(batch, 76)
        ready, go = os.pipe(), os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                if grandchild and os.fork():
                    os._exit(0)
                os.write(ready[1], b"x")
                os.read(go[0], 1)
                os.write(ready[1], b"+" if is_batch(batch, 76) else b"-")
            finally:
                os._exit(0)
        os.read(ready[0], 1)
        if grandchild:
            os.waitpid(pid, 0)
        del batch
        rest = []
        for number, later in enumerate(iterator, 20):
            assert is_batch(later, BATCH * number)
            later.fill_(-1)
            rest.append(later.data_ptr())
            del later
        os.write(go[1], b"x")
        answer = os.read(ready[0], 1)
        if not grandchild:
            os.waitpid(pid, 0)
        for end in (*ready, *go):
            os.close(end)
        assert answer == b"+"
        assert len(set(rest)) < 20  # slots were reused, but not that one


@linux
def test_a_forked_child_keeps_no_descriptor_of_the_arena() -> None:
    with loader_over(make_pool("fork")) as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(20)]
        pid = os.fork()
        if pid == 0:
            open_ = [segment.fd for segment in arena_of(loader).segments if segment.fd is not None]
            os._exit(bool(open_) or not is_batch(held[-1], 76))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert is_batch(next(iterator), 80)


@linux
@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("fork", "memfd"),
        pytest.param("spawn", "shm", marks=pytest.mark.slow),
        pytest.param("forkserver", "named", marks=pytest.mark.slow),
    ],
)
def test_no_name_stays_when_the_trainer_is_killed(method: str, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", memory)
    names = shared_memory_names()
    done = run_forked(
        f"""
        import os, signal
        from samples import Filled
        from sharded_loader import ProcessPool, ShardedDataLoader
        loader = ShardedDataLoader(Filled(), 4, pool=ProcessPool(2, start_method={method!r}))
        iterator = iter(loader)
        held = [next(iterator) for _ in range(20)]
        print(*loader._pipeline.pool.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -9 and not done.stderr
    assert shared_memory_names() == names
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = 100
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in pids) and deadline:
        deadline -= 1
        threading.Event().wait(0.05)
    assert deadline  # the workers, and so the memory, have gone too


# -- a container's small mount --------------------------------------------------------------------------------

SMALL_MOUNT = """
import os, sys
sys.path.insert(0, {here!r})
import numpy as np
from samples import Filled
from sharded_loader import ProcessPool, ShardedDataLoader
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
size = 2400  # x 16 KB = 38 MB
data = Filled(16 * size)
order = [list(range(n * size, (n + 1) * size)) for n in range(16)]
held = []
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with ShardedDataLoader(data, batch_sampler=order, pool=ProcessPool(2, start_method={method!r})) as loader:
        for number, batch in enumerate(loader):
            held.append(batch)
        arena = loader._pipeline.pool._transport.arena
        print(len(held), len(arena.segments), arena.nbytes > 38 << 20)
        assert all(
            bool((batch[:, ::512] == batch[:, :1]).all()) and batch[:, 0].tolist() == order[number]
            for number, batch in enumerate(held)
        )
        assert os.listdir("/dev/shm") == []
"""


def _can_mount() -> bool:
    command = ["unshare", "-m", "sh", "-c", "mount -t tmpfs -o size=64m tmpfs /dev/shm"]
    try:
        return subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["memfd", "shm", "named"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_batches_flow_and_are_held_in_a_container_with_a_small_mount(
    method: str, memory: str, tmp_path: Path
) -> None:
    if not sys.platform.startswith("linux") or not _can_mount():
        pytest.skip("needs the right to mount")
    script = tmp_path / "script.py"
    script.write_text(SMALL_MOUNT.format(here=str(Path(__file__).parents[1]), method=method))
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=os.environ | {"SHARDED_LOADER_MEMORY": memory},
    )
    assert (done.returncode, without_notices(done.stderr)) == (0, "")  # with 64 MB, one batch takes the slow way
    count, segments, some = done.stdout.split()
    assert (count, some) == ("16", "True") and int(segments) <= 4
