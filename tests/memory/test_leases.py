"""What the user holds stays: over every start method and back end, however it is held, whatever else happens."""

import contextlib
import gc
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import METHODS, made, make_pool, shared_memory_names, until
from memory_samples import SHAPE, DiesInTheMiddle, arena_of
from programs import run_forked, without_notices
from refusing import in_child
from samples import Filled

from sharded_loader import ProcessPool, ShardedDataLoader

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
BACKENDS = ("memfd", "shm", "named") if sys.platform.startswith("linux") else (None,)

BATCH = 4
PER_ROW = SHAPE // 4


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """The trainer decides, and reads the variable for each segment."""
    if request.param is not None:
        monkeypatch.setenv("SHARDED_LOADER_MEMORY", request.param)


def is_batch(batch, first, size=BATCH):
    expected = torch.arange(first, first + size, dtype=batch.dtype)
    return batch.shape == (size, PER_ROW) and bool((batch == expected[:, None]).all())


@contextlib.contextmanager
def loader_over(pool, length=240, **options):
    # So many in flight, however cheap the batches are, and none at the end of the epoch: the tests count slots.
    given = {"prefetch": 4, "prefetch_epochs": False, **options}
    with made(Filled(length), BATCH, pool=pool, **given) as loader:
        yield loader


@METHODS
@pytest.mark.costly
def test_a_batch_held_for_an_epoch_keeps_its_values_while_every_slot_is_reused(method, backend):
    with loader_over(make_pool(method)) as loader:
        held = {}
        used = []
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


def test_batches_stay_after_close_and_after_the_loader_is_gone():
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


@pytest.mark.costly(2)
@METHODS
@pytest.mark.parametrize("fit", [1, 4, 20])
def test_a_leak_ends_in_a_line_of_the_log_and_never_in_a_stall(method, fit, caplog):
    bound = fit * (BATCH * SHAPE * 17 // 16 + 4096)
    leaked = []
    with loader_over(ProcessPool(2, start_method=method, max_bytes=bound), 480) as loader:
        leaked += loader
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert re.search(r"finds no room in shared memory .*max_bytes.*your program holds \d+ batches", record.getMessage())
    assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(leaked))


@METHODS
@pytest.mark.costly
def test_the_arena_grows_after_the_workers_have_started(method, backend):
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


def test_shards_of_one_batch_are_held_apart_and_an_epoch_that_is_broken_off_gives_its_slots_back():
    with loader_over(make_pool("fork"), num_shards=2) as loader:
        held = []
        for number, (left, right) in enumerate(loader):
            assert is_batch(torch.cat([left, right]), BATCH * number)
            held.append(right)
            del left, right
        assert all((half[:, 0] == torch.tensor([4.0 * n + 2, 4.0 * n + 3])).all() for n, half in enumerate(held))
    with loader_over(make_pool("fork")) as loader:
        for _ in range(12):
            for number, batch in enumerate(loader):
                assert is_batch(batch, BATCH * number)
                if number == 12:
                    break
            del batch
        list(map(is_batch, loader, itertools.count(0, BATCH)))
        assert arena_of(loader).lent == 0 and len(arena_of(loader).segments) == 1


@METHODS
def test_a_worker_killed_while_it_writes_spoils_no_other_batch(method, tmp_path):
    with loader_over(make_pool(method), batchify_fn=DiesInTheMiddle(101, tmp_path / "died")) as loader:
        batches = list(loader)
        assert all(is_batch(batch, BATCH * number) for number, batch in enumerate(batches)) and len(batches) == 60
        batches.clear()
        assert arena_of(loader).lent == 0  # the slot of the batch that died is free again, too


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
@pytest.mark.parametrize("grandchild", [False, True])
@pytest.mark.costly
def test_a_batch_that_a_forked_child_holds_is_not_overwritten(grandchild):
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
def test_a_forked_child_keeps_no_descriptor_of_the_arena():
    with loader_over(make_pool("fork")) as loader:
        iterator = iter(loader)
        held = [next(iterator) for _ in range(20)]
        open_ = in_child(lambda: [one.fd for one in arena_of(loader).segments if one.fd] or is_batch(held[-1], 76))
        assert open_ == "True" and is_batch(next(iterator), 80)


@linux
@pytest.mark.parametrize(
    ("method", "memory"),
    [
        ("fork", "memfd"),
        pytest.param("spawn", "shm", marks=pytest.mark.slow),
        pytest.param("forkserver", "named", marks=pytest.mark.slow),
    ],
)
def test_no_name_stays_when_the_trainer_is_killed(method, memory, monkeypatch):
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
        print(*loader.pool.pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.returncode == -9 and not done.stderr
    assert shared_memory_names() == names
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    # The workers, and so the memory, go too.
    assert until(lambda: not any(os.path.exists(f"/proc/{pid}/exe") for pid in pids))


SMALL_MOUNT = """
import os, sys, warnings
sys.path[:0] = sys.argv[2:]
from memory_samples import arena_of
from samples import Filled
from sharded_loader import ProcessPool, ShardedDataLoader
assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 64 << 20
size = 2400  # x 16 KB = 38 MB
data = Filled(16 * size)
order = [list(range(n * size, (n + 1) * size)) for n in range(16)]
held = []
warnings.simplefilter("ignore")
with ShardedDataLoader(data, batch_sampler=order, pool=ProcessPool(2, start_method=sys.argv[1])) as loader:
    held += loader
    arena = arena_of(loader)
    print(len(held), len(arena.segments), arena.nbytes > 37 << 20)
    for number, batch in enumerate(held):
        assert bool((batch[:, ::512] == batch[:, :1]).all()) and batch[:, 0].tolist() == order[number]
    assert os.listdir("/dev/shm") == []
"""


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["memfd", "shm", "named"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_large_batches_flow_and_are_held_in_a_container_with_a_small_mount(method, memory, tmp_path):
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
    if not sys.platform.startswith("linux") or subprocess.run([*mount, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    script = tmp_path / "script.py"
    script.write_text(SMALL_MOUNT)
    given = [sys.executable, str(script), method, *map(str, Path(__file__).parents[:2])]
    done = subprocess.run(
        [*mount, *given],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env=os.environ | {"SHARDED_LOADER_MEMORY": memory},
    )
    assert (done.returncode, without_notices(done.stderr)) == (0, "")  # with 64 MB, one batch takes the slow way
    count, segments, some = done.stdout.split()
    assert (count, some) == ("16", "True") and int(segments) <= 4
