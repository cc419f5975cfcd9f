"""Promises of gathering: the bytes of the file or None, whatever happens to the file; the process lives."""

from __future__ import annotations

import errno
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import RecordFileDataset, ShardedDataLoader
from sharded_loader.engine.pool import Pool
from sharded_loader.recordio import RecordIOError, gather
from sharded_loader.recordio import files as recordfile
from sharded_loader.recordio.gather import KEPT_BYTES, LEAST, MEAN_BYTES, MOST, Gatherer
from tests import reference_recordio as reference

pytestmark = pytest.mark.skipif(gather._pwritev is None, reason="Linux only")

PAGE = 4096
CONTENT = np.random.default_rng(0).integers(0, 256, 200 * PAGE, np.uint8).tobytes()


@pytest.fixture
def opened(tmp_path: Path) -> Any:
    """A gatherer over a file of `CONTENT`; the file's path."""
    path = tmp_path / "bytes"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    found = [Gatherer(fd), path]
    yield found
    found.clear()  # its descriptors go with it
    os.close(fd)


def stretches(count: int, seed: int = 1, most: int = 500) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, most, count)
    return rng.integers(0, len(CONTENT) - sizes), sizes


def expected(offsets: Any, sizes: Any, content: bytes = CONTENT) -> bytes:
    return b"".join(content[begin : begin + size] for begin, size in zip(offsets, sizes, strict=True))


@pytest.mark.parametrize("count", [LEAST, MOST, MOST + 1, 5 * MOST])
def test_stretches_in_any_order_are_one_buffer(opened: Any, count: int) -> None:
    where = stretches(count)
    assert opened[0].read(*where) == expected(*where)


def test_a_few_stretches_are_left_to_single_reads(opened: Any) -> None:
    assert opened[0].read(*stretches(LEAST - 1)) is None


def test_threads_gather_at_the_same_time(opened: Any) -> None:
    def check(seed: int) -> None:
        for turn in range(30):
            where = stretches(300, seed + 100 * turn)
            assert opened[0].read(*where) == expected(*where)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(check, range(8)))


def test_a_file_that_has_grown_is_mapped_again(opened: Any) -> None:
    gatherer, path = opened
    before, more = stretches(50), CONTENT[::-1]
    assert gatherer.read(*before) == expected(*before)
    with open(path, "ab") as file:
        file.write(more)
    after = stretches(50, 2)
    after = (after[0] + len(CONTENT) // 2, after[1])
    assert gatherer.read(*after) == expected(*after, CONTENT + more)


@pytest.mark.parametrize("left", [0, 1, 100 * PAGE, 100 * PAGE + 7, len(CONTENT) - 500])
def test_a_file_that_has_shrunk_is_not_read(opened: Any, left: int) -> None:
    gatherer, path = opened
    sizes = np.full(len(CONTENT) // 500, 500)
    whole = np.cumsum(sizes) - sizes, sizes
    assert gatherer.read(*whole) == expected(*whole)
    os.truncate(path, left)
    assert gatherer.read(*whole) is None
    with open(path, "r+b") as file:  # whole again: it is mapped, and read
        file.write(CONTENT)
    assert gatherer.read(*whole) == expected(*whole)


def test_what_does_not_lie_in_the_file_is_not_read(opened: Any) -> None:
    sizes = np.full(LEAST, 500)
    assert opened[0].read(np.full(LEAST, len(CONTENT) - 499), sizes) is None


def test_large_scratch_files_give_their_memory_back(opened: Any) -> None:
    sizes = np.full(KEPT_BYTES // 1000 + 1, 1000)
    where = np.arange(len(sizes)) % 100 * PAGE, sizes
    assert opened[0].read(*where) == expected(*where)
    (scratch,) = gather._scratches
    assert os.fstat(scratch.fd).st_size == 0


def test_long_stretches_are_left_to_single_reads(opened: Any) -> None:
    for size, is_read in ((MEAN_BYTES, True), (MEAN_BYTES + 1, False)):
        where = np.arange(LEAST) * PAGE, np.full(LEAST, size)
        assert opened[0].read(*where) == (expected(*where) if is_read else None)


def test_many_open_files_take_few_descriptors(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gather, "MAPS", 3)
    before, where = len(os.listdir("/proc/self/fd")), stretches(50)
    gatherers = [Gatherer(opened[0]._fd) for _ in range(10)]
    found = [one.read(*where) for one in gatherers]
    assert [content is not None for content in found] == [True] * 3 + [False] * 7
    assert len(os.listdir("/proc/self/fd")) <= before + 3 + 1  # a map holds a descriptor up to Python 3.12
    del gatherers[0]  # its place is free
    assert gatherers[-1].read(*where) == expected(*where)


@pytest.mark.parametrize(("number", "tried"), [(errno.ENODEV, 1), (errno.EMFILE, 2)], ids=["no map", "no descriptor"])
@pytest.mark.parametrize("name", ["mmap", "memfd"])
def test_without_the_means_nothing_is_gathered(
    opened: Any, monkeypatch: pytest.MonkeyPatch, name: str, number: int, tried: int
) -> None:
    tries = []

    def refused(*_: Any, **__: Any) -> Any:
        tries.append(1)
        raise OSError(number, os.strerror(number))

    gatherer, where = opened[0], stretches(50)
    with monkeypatch.context() as patched:
        patched.setattr(*((gather.mmap, "mmap") if name == "mmap" else (os, "memfd_create")), refused)
        assert gatherer.read(*where) is None
        assert gatherer.read(*where) is None
    assert len(tries) == tried  # what may be different the next time is tried again
    assert gatherer.read(*where) == (expected(*where) if tried == 2 else None)


def test_other_systems_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gather._system_call() is None


def test_descriptors_go_with_the_gatherer(opened: Any) -> None:
    before = set(os.listdir("/proc/self/fd"))
    gatherer = Gatherer(opened[0]._fd)
    assert gatherer.read(*stretches(50)) is not None
    assert len(os.listdir("/proc/self/fd")) > len(before)
    del gatherer
    assert set(os.listdir("/proc/self/fd")) == before


# -- under a dataset ---------------------------------------------------------------------------------------------------

RECORDS = [bytes([number % 251]) * (number % 300) for number in range(500)]


def write(path: Path) -> list[int]:
    content, offsets = reference.write(RECORDS)
    path.write_bytes(content)
    path.with_suffix(".idx").write_text("".join(f"{key}\t{at}\n" for key, at in enumerate(offsets[:-1])))
    return offsets


def test_a_shuffled_batch_is_gathered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.rec")
    order = random.Random(1).sample(range(500), 400)
    with RecordFileDataset(tmp_path / "a.rec") as dataset, monkeypatch.context() as patched:
        patched.setattr(recordfile.RecordFile, "read_stretches", None)
        patched.setattr(recordfile.RecordFile, "read", None)
        assert dataset.get_batch(order[:200]) == [RECORDS[number] for number in order[:200]]
        assert dataset.get_batch(order[200:]) == [RECORDS[number] for number in order[200:]]


@pytest.mark.parametrize("within", [0, 50], ids=["at a record", "within one"])
@pytest.mark.parametrize("moment", ["before", "after the sizes"])
def test_a_file_that_shrinks_names_the_first_record_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, within: int, moment: str
) -> None:
    offsets = write(tmp_path / "a.rec")
    order = random.Random(2).sample(range(500), 300)
    end = offsets[399] + within
    first = next(number for number in order if number >= 399)
    really = Gatherer.read

    def shrinking(gatherer: Gatherer, *where: Any) -> Any:
        os.truncate(tmp_path / "a.rec", end)
        return really(gatherer, *where)

    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        assert dataset.get_batch(order) == [RECORDS[number] for number in order]
        if moment == "before":
            os.truncate(tmp_path / "a.rec", end)
        else:
            monkeypatch.setattr(Gatherer, "read", shrinking)
        with pytest.raises(RecordIOError, match=rf"a\.rec, offset {offsets[first]}: "):
            dataset.get_batch(order)
        good = [number for number in order if number < 399]
        assert dataset.get_batch(good) == [RECORDS[number] for number in good]


def test_a_file_that_is_closed_while_it_is_read_is_the_one_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a.rec")
    order = random.Random(4).sample(range(500), 200)
    really, others = Gatherer._mapped, []

    def closing(gatherer: Gatherer, end: int) -> Any:
        dataset.close()  # as another thread does
        others.append(os.open(os.devnull, os.O_RDONLY))  # it would get the number of the descriptor
        return really(gatherer, end)

    with RecordFileDataset(tmp_path / "a.rec") as dataset, monkeypatch.context() as patched:
        patched.setattr(Gatherer, "_mapped", closing)
        assert dataset.get_batch(order) == [RECORDS[number] for number in order]
    for fd in others:
        os.close(fd)


def test_every_pool_gathers_after_the_main_process_has(tmp_path: Path, pool: Pool) -> None:
    write(tmp_path / "a.rec")
    with RecordFileDataset(tmp_path / "a.rec") as dataset:
        order = random.Random(3).sample(range(500), 480)
        assert dataset.get_batch(order) == [RECORDS[number] for number in order]
        with ShardedDataLoader(dataset, 48, sampler=order, pool=pool) as loader:
            batches = list(loader)
            assert dataset.get_batch(order) == [RECORDS[number] for number in order]
    assert [record for batch in batches for record in batch] == [RECORDS[number] for number in order]
