"""Shared memory by each back end: two processes see it, nobody else does, and nothing of it stays."""

import errno
import importlib
import os
import signal
import socket
import subprocess
import sys

import multiprocess
import numpy as np
import pytest
from conftest import PROCESS_POOLS, SPAWNED, covering, shared_memory_names
from memory_samples import SHAPE, allow_no_more, arena_of
from refusing import in_child
from samples import Filled

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.base import system
from sharded_loader.memory.segments import attach, create
from sharded_loader.pools.process import link, worker
from sharded_loader.pools.process.link import CANCEL, GUARD, Link

BACKENDS = ["memfd", "shm", "file", "named"]
pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="all back ends: Linux only")


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", request.param)
    return str(request.param)


def attach_again(segment, **options):
    """As a worker does."""
    fd = None if segment.name else os.dup(segment.fd)
    return attach(segment.number, segment.nbytes, fd, segment.name, **options)


@pytest.mark.parametrize("private", [False, True])
def test_what_a_worker_writes_the_trainer_sees_unless_the_mapping_is_private(backend, private):
    segment = create(3, 3 * 4096)
    segment.mapping[:4] = b"abcd"

    def work():
        twin, other = attach_again(segment, private=private), attach_again(segment, private=private)
        seen = twin.mapping[:4] == b"abcd" and twin.nbytes == 3 * 4096 and twin.number == 3
        twin.mapping[4096:4100] = b"wxyz"
        array = np.frombuffer(twin.mapping, np.uint8)
        array[4097] = 7
        return seen and array.flags.writeable and (other.mapping[4096:4098] == b"w\x07") != private

    assert in_child(work) == "True"
    assert segment.mapping[4096:4100] == (bytes(4) if private else b"w\x07yz")
    segment.close()


def test_a_segment_is_allocated_in_full_and_has_no_name_and_no_program_inherits_it(backend):
    before, nbytes = shared_memory_names(), 2 * system.ALLOCATED_AT_ONCE + 4096
    segment = create(0, nbytes)
    assert segment.fd is not None and not os.get_inheritable(segment.fd)
    assert os.fstat(segment.fd).st_blocks * 512 >= nbytes
    assert shared_memory_names() == before
    assert (segment.name is not None) == (backend == "named")
    segment.close()


def test_the_mapping_outlives_the_descriptor_and_goes_with_the_last_array(backend):
    before = len(os.listdir("/proc/self/fd"))
    segment = create(0, 4096)
    array = np.frombuffer(segment.mapping, np.uint8)
    segment.close()
    segment.close()
    if sys.version_info >= (3, 13):  # before, a mapping holds a descriptor of its own
        assert len(os.listdir("/proc/self/fd")) == before
    array[:] = 5
    assert int(array.sum()) == 5 * 4096
    del array  # the fixture of all tests looks for what is left


def test_a_refusal_and_a_worker_that_cannot_map_leave_no_descriptor(backend, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
        patched.setattr(os, "posix_fallocate", full)
        create(0, 4096)
    assert len(os.listdir("/proc/self/fd")) == before
    segment = create(0, 4096)
    with pytest.raises((OSError, ValueError)):
        fd = None if segment.name else os.dup(segment.fd)
        attach(0, 1 << 20, fd, segment.name)  # longer than it is
    segment.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.costly(2)
def test_no_name_is_left_when_the_trainer_is_killed(backend):
    before = shared_memory_names()
    kills = "import os; from sharded_loader.memory.segments import create; a = create(0, 9); os.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, "-c", kills], check=False, timeout=300)
    assert done.returncode == -signal.SIGKILL
    assert shared_memory_names() == before


@pytest.mark.parametrize("call", ["os.memfd_create", "_posixshmem.shm_open"])
def test_a_ctrl_c_while_a_segment_is_made_leaves_no_descriptor_and_no_name(call, monkeypatch):
    """The one between the system call and the note of its result; the fixture looks for what is left."""
    module, _, name = call.partition(".")
    real = getattr(importlib.import_module(module), name)

    def interrupted(*arguments, **options):
        fd = real(*arguments, **options)
        if name == "shm_open":
            os.close(fd)
            raise KeyboardInterrupt
        signal.raise_signal(signal.SIGINT)
        return fd

    monkeypatch.setattr(call, interrupted)
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "shm" if name == "shm_open" else "memfd")
    before = shared_memory_names()
    with pytest.raises(KeyboardInterrupt):
        create(0, 4096)
    assert shared_memory_names() == before


def test_a_segment_that_nobody_has_noted_closes_its_descriptor_and_an_unknown_back_end_is_refused(monkeypatch):
    fd = create(0, 4096).fd
    assert fd is not None
    with pytest.raises(OSError):
        os.fstat(fd)
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", "mmap")
    with pytest.raises(ValueError, match="'mmap'.*memfd.*shm.*file.*named"):
        create(0, 4096)


# -- a worker that may have no more descriptors is slower, or a clear error, and never a hang -------------------------


@covering(1, method=PROCESS_POOLS, memory=["memfd", "named"])
@pytest.mark.costly
def test_a_worker_that_can_map_no_segment_sends_batches_through_the_pipe(method, memory, monkeypatch, capfd):
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", memory)
    pool = ProcessPool(2, start_method=method, worker_init_fn=allow_no_more)
    with ShardedDataLoader(Filled(160), 4, pool=pool) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [4 * number + i for i in range(4)] and batch.shape == (4, SHAPE // 4)
            assert arena_of(loader).lent == 0
        assert number == 39 and len(arena_of(loader).segments) == 1  # the trainer had one
    told = [line for line in capfd.readouterr().err.splitlines() if line]
    assert method == "forkserver" or 1 <= len(told) <= 2  # once by each worker (a forkserver's output is elsewhere)
    assert all("through the pipe" in line and "of open files is reached" in line for line in told)


take = Link.take_descriptor


def refuse(end):
    os.close(take(end))
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.slow
@SPAWNED
def test_a_worker_that_cannot_map_its_dataset_says_why(method):
    data = ArrayDataset(np.zeros(100_000))
    pool = ProcessPool(2, start_method=method, worker_init_fn=allow_no_more)
    with ShardedDataLoader(data, 1000, pool=pool) as loader:
        assert next(iter(loader)).shape == (1000,)
        loader.refresh()
        with pytest.raises(OSError, match=r"dataset cannot be mapped: the limit of \d+ of open files .*ulimit -n"):
            list(loader)


@pytest.mark.parametrize("what", ["no descriptor is taken", "sockets time out", "too many are on their way"])
def test_whatever_happens_to_descriptors_on_their_way_the_worker_reads(what, monkeypatch):
    calls, real = [], link.send_descriptors

    def send_descriptors(*arguments):
        calls.append(arguments)
        if len(calls) <= 3 and what == "too many are on their way":
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return real(*arguments)

    def init(number):
        if what == "sockets time out":  # a default that is the user's own affair
            socket.setdefaulttimeout(0.01)

    monkeypatch.setattr(link, "send_descriptors", send_descriptors)
    if what == "no descriptor is taken":
        monkeypatch.setattr(Link, "take_descriptor", refuse)
    with ShardedDataLoader(Filled(160), 4, pool=ProcessPool(1, start_method="fork", worker_init_fn=init)) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 160, 4))
    assert len(calls) > 3 * (what == "too many are on their way")


def test_a_worker_that_may_open_nothing_from_the_start_lives_and_reads():
    """The pipe that ends it with the trainer cannot be taken either: that is no reason to end."""
    ours, theirs = multiprocess.Pipe(duplex=True)
    trainer = Link(ours)
    end = Link(theirs, blocks=True)
    reader = worker.WorkerThreads(end, 0, 1)
    read, write = os.pipe()
    try:
        trainer.send(GUARD, descriptor=read)
        trainer.send(CANCEL, 7)
        trainer.close()  # end-of-file after that
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Link, "take_descriptor", refuse)
            reader._finished.set()
            reader.receive()
        assert reader._reader.cancelled == {7}
    finally:
        end.close()
        os.close(read)
        os.close(write)
